"""Joins of streams on Spark: the rows of `collect`, of DataFrames and of streams of two inputs; what is refused.

Streams that are joined with themselves, with crashes and migrations, are in `tests/conformance`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
import scalein.spark as sis
from scalein import col
from scalein.api.flow import Flow
from scalein.errors import BadArgument
from scalein.exec.fragments import cut, fragments
from scalein.ir import ops
from scalein.options import Options
from scalein.spark.map_reduce import MapReduce
from scalein.spark.serialize import optimise
from scalein.spark.shuffle import route
from scalein.spark.stream_joins import ShuffledJoin, with_join_columns
from tests.engines import examples
from tests.same import assert_same
from tests.spark.simulated import drain, start_stream, tasks_over, united
from tests.spark.test_apply import same

DELAY = 5
HOWS = ("inner", "left", "right", "outer", "semi", "anti")
BOUNDS: list[dict[str, Any]] = [{"within": si.tumbling("t", 6)}, {"between": (-3, 5)}, {"between": (2, 9)},
                                {"between": (-9, -2)}, {"keep": 4}]
LEFT = {"k": pa.int32(), "s": pa.string(), "t": pa.int64(), "x": pa.int64()}
RIGHT = {"k": pa.int64(), "s": pa.string(), "t": pa.int64(), "y": pa.float64()}


def side(rng: np.random.Generator, schema: dict[str, pa.DataType], count: int, slow: int = 1) -> pa.Table:
    """Rows at most DELAY behind the latest one; some have no key or no time."""
    times = np.cumsum(rng.integers(0, 4, count)) // slow - rng.integers(0, DELAY + 1, count)
    words = np.array(["", "a", "a longer key than twelve bytes"])[rng.integers(0, 3, count)]
    columns = [pa.array(rng.integers(0, 4, count), next(iter(schema.values())), mask=rng.random(count) < 0.1),
               pa.array(words.tolist()), pa.array(times, mask=rng.random(count) < 0.1), np.arange(count)]
    return pa.table(columns, names=[*schema]).cast(pa.schema(schema))


def flows() -> tuple[Flow, Flow]:
    """The two inputs; the keys of one are wider than those of the other."""
    return si.flow(LEFT, name="l").with_watermark("t", DELAY), si.flow(RIGHT, name="r").with_watermark("t", DELAY)


def shuffled(q: Flow, tables: dict[str, pa.Table], targets: int) -> pa.Table:
    """A join as the tasks of a batch query run it, one target after the other."""
    options = Options.make(workers=1)
    op = with_join_columns(optimise(q.op))
    edges = cut(op)
    end = fragments(edges)[-1]
    assert isinstance(end.state, ops.BufferedJoin)
    join = ShuffledJoin(end)
    blocks: list[list[pa.RecordBatch]] = [[] for _ in range(targets)]
    for edge in edges:
        map_reduce = MapReduce(edge.first)
        rows = list(map_reduce.map(tables[edge.source.name].select(map_reduce.reads).to_batches(), options))
        for number, batch in join.by_side(rows):
            for target, part in route([batch], join.sides[number].keys, targets, options):
                blocks[target].append(part)
    found = [batch for some in blocks for batch in join.joined(some, options)]
    return pa.Table.from_batches(found, q.op.schema.arrow)


@examples(8)
@given(st.integers(0, 1 << 32), st.sampled_from(HOWS), st.sampled_from([*BOUNDS, {"keep": "forever"}]))
def test_tasks_join_both_sides(seed: int, how: str, bound: dict[str, Any]) -> None:
    rng = np.random.default_rng(seed)
    tables = {"l": side(rng, LEFT, int(rng.integers(0, 60))), "r": side(rng, RIGHT, int(rng.integers(0, 60)))}
    left, right = flows()
    if how in ("right", "outer"):  # their keys are those of the wider side
        left = left.with_columns(k=col("k").cast(pa.int64()))
    on = ["k", "s"] if rng.random() < 0.5 else "k"
    q = left.join(right.filter(col("y") != 7), on=on, how=how, **bound).filter(col("k").is_null() | (col("k") < 3))
    assert_same(shuffled(q, tables, int(rng.integers(1, 4))), q.collect(tables))


@examples(8)
@given(st.integers(0, 1 << 32), st.sampled_from([*HOWS, "asof"]), st.sampled_from(BOUNDS))
def test_a_stream_of_two_inputs(seed: int, how: str, bound: dict[str, Any]) -> None:
    """One input may be behind the other: the least watermark counts. In the end a drain makes all rows final."""
    rng = np.random.default_rng(seed)
    tables = {"l": side(rng, LEFT, int(rng.integers(1, 60)), int(rng.integers(1, 3))),
              "r": side(rng, RIGHT, int(rng.integers(1, 60)), int(rng.integers(1, 3)))}
    left, right = (each.with_columns(k=col("k").cast(pa.int64())) for each in flows())
    if how == "asof":
        q = left.join_asof(right.select("k", "t", at=col("t")), on="t", by="k", tolerance=rng.choice([None, 4]))
    else:
        q = left.filter(col("x") != 3).join(right, on="k", how=how, **bound)
    ends = {name: np.sort(rng.integers(0, table.num_rows + 1, 5)) for name, table in tables.items()}
    with tempfile.TemporaryDirectory() as folder:
        sink = si.to_memory()
        coordinator = start_stream(q, Path(folder) / "c", sink, partitions=int(rng.integers(1, 4)))
        for number in range(6):
            parts = {name: table.slice(0 if number == 0 else ends[name][number - 1],
                                       None if number == 5 else int(ends[name][number] - (
                                           0 if number == 0 else ends[name][number - 1])))
                     for name, table in tables.items()}  # fmt: skip
            coordinator.partitions = int(rng.integers(1, 5))
            coordinator.run_batch(number, "query", tasks_over([united(q, parts)], int(rng.integers(1, 3))), None)
        assert coordinator.progress is not None
        assert (coordinator.progress["late_rows"], coordinator.totals.late_rows) == (0, 0)
        drain(coordinator)
        coordinator.close()
        assert_same(sink.table(), q.collect(tables))


def test_late_rows_and_what_is_retained(tmp_path: Path) -> None:
    """A row before the watermark of both sides is late; rows that nothing can match are forgotten."""
    q = flows()[0].select("t", k=col("s")).join(flows()[1].select("t", "y", k=col("s")), on="k", between=(-2, 3))

    def batch(left: list[int], right: list[int]) -> pa.Table:
        def rows(times: list[int], schema: dict[str, pa.DataType]) -> pa.Table:
            return pa.table([[1] * len(times), ["a"] * len(times), times, range(len(times))],
                            names=[*schema]).cast(pa.schema(schema))
        return united(q, {"l": rows(left, LEFT), "r": rows(right, RIGHT)})

    sink = si.to_memory()
    coordinator = start_stream(q, tmp_path, sink)
    for number, (left, right) in enumerate([([10, 100], []), ([], [11, 50]), ([44, 45], [44, 53, 90]), ([], [200])]):
        coordinator.run_batch(number, "query", tasks_over([batch(left, right)]), None)
    assert coordinator.clock.watermark == 95
    assert coordinator.totals.late_rows == 2, "44 on both sides: by then the watermark is 45"
    assert sorted(zip(*(sink.table()[name].to_pylist() for name in ("t", "t_right")), strict=True)) == [(10, 11)]
    assert coordinator.progress is not None
    assert coordinator.progress["state_rows"] < 5
    coordinator.close()
    state = sis.read_state(tmp_path)
    assert set(state.column_names) == {"side", "t", "k", "t_right", "y", "k_right"}
    assert {(row["side"], row["t"], row["t_right"]) for row in state.to_pylist()} >= {("left", 100, None),
                                                                                     ("right", None, 200)}


@pytest.mark.parametrize(("make", "words"), [
    (lambda a, b: a.join(b, on="k", within=si.tumbling("t", 6)).distinct("k"), "one operator with state"),
    (lambda a, b: a.join(b, on="k", keep="forever", how="left"), "never knows that a row has no match"),
    (lambda a, b: a.join(si.from_arrow({"k": [1], "t": [2]}).with_watermark("t", 1), on="k", between=(0, 1)),
     "has its data already"),
])
def test_what_is_refused(make: Any, words: str, tmp_path: Path) -> None:
    left, right = (each.with_columns(k=col("k").cast(pa.int64())) for each in flows())
    with pytest.raises(BadArgument, match=words):
        start_stream(make(left, right), tmp_path, si.to_memory())


def test_sinks_of_other_rows_are_refused(tmp_path: Path) -> None:
    left, right = flows()
    q = left.join(right, on="s", between=(0, 1))
    for how in ({"late": si.to_memory()}, {"on_error": si.to_memory()}):
        with pytest.raises(BadArgument, match="sides have different columns"):
            start_stream(q, tmp_path, si.to_memory(), **how)  # type: ignore[arg-type]


# --- with Spark


def test_dataframes(spark: Any, tmp_path: Path) -> None:
    """One side is a scan of files that tasks read, the other side is rows of Spark's."""
    rng = np.random.default_rng(5)
    tables = {"l": side(rng, LEFT, 200), "r": side(rng, RIGHT, 150)}
    pq.write_table(tables["l"], tmp_path / "l.parquet")
    frames = {"l": spark.read.parquet(str(tmp_path)), "r": spark.createDataFrame(tables["r"]).repartition(2)}
    left, right = flows()
    q = left.join(right, on="s", between=(-3, 5), how="left").group_by("s").agg(n=si.count(), m=col("y").max())
    same(sis.apply(q, frames), q.collect(tables))
    one = si.from_arrow(tables["l"])
    same(sis.run(one.join_asof(one.select("s", "t", at=col("t")), on="t", by="s"), spark),
         one.join_asof(one.select("s", "t", at=col("t")), on="t", by="s").collect())
    with pytest.raises(BadArgument, match="more than one input"):
        sis.apply(q, frames["l"])
    with pytest.raises(BadArgument, match="inputs that the flow has"):
        sis.apply(q, {"l": frames["l"], "other": frames["r"]})


def test_two_streams(spark: Any, tmp_path: Path) -> None:
    """Two folders of files, a rescale, and a restart from the checkpoint."""
    rng = np.random.default_rng(6)
    tables = {"l": side(rng, LEFT, 120), "r": side(rng, RIGHT, 120)}
    last = {"l": pa.table([[9], ["z"], [10_000], [0]], names=[*LEFT]), "r": pa.table([[9], ["y"], [10_000], [0]],
                                                                                    names=[*RIGHT])}
    frames = {}
    for name, table in tables.items():
        (tmp_path / name).mkdir()
        pq.write_table(table.slice(0, 60), tmp_path / name / "0.parquet")
        schema = spark.read.parquet(str(tmp_path / name)).schema
        frames[name] = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(tmp_path / name))
    left, right = flows()
    q = left.join(right, on="s", between=(-3, 5), how="left")

    def run(partitions: int) -> dict[str, object]:
        job = sis.start(q, frames, sink=si.to_parquet(tmp_path / "out"), checkpoint=tmp_path / "c",
                        trigger={"availableNow": True}, partitions=partitions)
        job.wait()
        assert job.last_progress is not None
        return job.last_progress

    assert run(2)["read_by"] == "spark"
    for name, table in tables.items():
        pq.write_table(table.slice(60), tmp_path / name / "1.parquet")
        pq.write_table(last[name].cast(table.schema), tmp_path / name / "2.parquet")
    assert run(3)["late_rows"] == 0
    want = q.collect({name: pa.concat_tables([table, last[name].cast(table.schema)]) for name, table in tables.items()})
    got = si.read_parquet(tmp_path / "out").collect()
    assert_same(got, want.filter(pa.compute.not_equal(want["s"], "z")))
