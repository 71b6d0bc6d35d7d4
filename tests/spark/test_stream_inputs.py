"""Streams of one input with a name, and of several that are united: the rows of `collect`; what is refused."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
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
from scalein.errors import NOWHERE, BadArgument
from scalein.spark.streaming.join_plan import plan_of
from tests import oracle
from tests.engines import examples
from tests.same import assert_same
from tests.spark.simulated import drain, fold_changes, rows_of, start_stream, tasks_over, united

SCHEMA = pa.schema({"k": pa.string(), "x": pa.int64(), "t": pa.int64()})
OTHER = pa.schema({"t": pa.int64(), "k": pa.string(), "y": pa.float64()})
DELAY = 5


def table(rng: np.random.Generator, schema: pa.Schema, count: int) -> pa.Table:
    """Rows at most DELAY behind the latest one."""
    times = np.cumsum(rng.integers(0, 4, count)) - rng.integers(0, DELAY + 1, count)
    columns = {"k": [["a", "b", None][k] for k in rng.integers(0, 3, count)], "t": times,
               "x": rng.integers(-3, 9, count), "y": rng.integers(0, 9, count).astype(float)}
    return pa.table([pa.array(columns[field.name], field.type) for field in schema], schema=schema)


def test_the_name_of_a_single_input(tmp_path: Path) -> None:
    rows = pa.table({"k": ["a", "b"], "x": [1, 2], "t": [0, 0]}, schema=SCHEMA)
    q = si.flow(SCHEMA, name="clicks").filter(col("x") > 1)
    assert plan_of(q.op, "final", "drop", "raise", NOWHERE).reads_by_input == {"clicks": ["k", "x", "t"]}
    assert_same(rows_of(q, [[rows]], tmp_path), rows.slice(1))


SHAPES: dict[str, tuple[str, Callable[[Flow, Flow], Flow]]] = {
    "rows": ("final", lambda a, b: a.select("k", "x").union(b.select("k", x=col("y").cast(pa.int64())))),
    "distinct": ("final", lambda a, b: a.select("k", "t").union(b.select("k", "t")).distinct()),
    "groups": ("changes", lambda a, b: a.select("k", n="x").union(b.select("k", n="t"), a.select("k", n="t")).group_by(
        "k").agg(s=col("n").sum(), n=si.count())),
    "windows": ("final", lambda a, b: a.filter(col("x") > 0).select("k", "t").union(b.select("k", "t")).group_by(
        "k", si.tumbling("t", 7)).agg(n=si.count())),
    "sessions": ("final", lambda a, b: a.select("k", "t").union(b.select("k", "t")).group_by(
        "k", si.session("t", 2)).agg(n=si.count())),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("names", ["ab", ("input", "b")])
@examples(3)
@given(seed=st.integers(0, 1 << 32))
def test_a_union_of_two_streams(shape: str, names: tuple[str, str], seed: int) -> None:
    """Each has its own watermark, and the least of them counts. In the end a drain closes all windows."""
    rng, (emit, build) = np.random.default_rng(seed), SHAPES[shape]
    left, right = names
    tables = {left: table(rng, SCHEMA, int(rng.integers(1, 40))), right: table(rng, OTHER, int(rng.integers(1, 40)))}

    def flow(one: Flow, other: Flow) -> Flow:
        return build(one.with_watermark("t", DELAY), other.with_watermark("t", DELAY))

    q = flow(si.flow(SCHEMA, name=left), si.flow(OTHER, name=right))
    ends = {name: [0, *np.sort(rng.integers(0, each.num_rows + 1, 3)), each.num_rows] for name, each in tables.items()}
    with tempfile.TemporaryDirectory() as folder:
        sink = si.to_memory()
        coordinator = start_stream(q, Path(folder) / "c", sink, emit=emit)
        for number in range(4):
            parts = {name: each.slice(ends[name][number], ends[name][number + 1] - ends[name][number])
                     for name, each in tables.items()}
            coordinator.partitions = int(rng.integers(1, 5))
            coordinator.run_batch(number, "query", tasks_over([united(q, parts)], int(rng.integers(1, 3))), None)
        drain(coordinator)
        coordinator.close()
        assert coordinator.totals.late_rows == 0
        got, want = sink.table(), oracle.collect(flow(si.from_arrow(tables[left]), si.from_arrow(tables[right])))
        if emit == "changes":
            got = pa.Table.from_pylist(fold_changes(got, ["k"]), want.schema)
        assert_same(got, want)


def test_late_rows_of_a_union(tmp_path: Path) -> None:
    """A row is late by the least watermark of all streams, whichever it is of."""
    q = si.flow(SCHEMA, name="a").select("k", "t").with_watermark("t", 0).union(
        si.flow(OTHER, name="b").with_watermark("t", 3).select("k", "t")).group_by(si.tumbling("t", 10)).agg(
        n=si.count())  # fmt: skip
    sink, late = si.to_memory(), si.to_memory()
    coordinator = start_stream(q, tmp_path, sink, late=late)
    for number, (a, b) in enumerate([([100], []), ([1], [32]), ([5, 21], [29, 60])]):
        batch = united(q, {name: pa.table([["k"] * len(times), times, times], names=["k", other, "t"]).select(
            schema.names).cast(schema) for name, other, times, schema in (("a", "x", a, SCHEMA), ("b", "y", b, OTHER))})
        coordinator.run_batch(number, "query", tasks_over([batch]), None)
    coordinator.close()
    assert coordinator.clock.watermark == 57
    assert (coordinator.totals.late_rows, late.table()["t"].to_pylist()) == (1, [5])
    assert sorted(zip(*(sink.table()[name].to_pylist() for name in ("window_start", "n")), strict=True)) == [
        (0, 1), (20, 2), (30, 1)]


@pytest.mark.parametrize(("make", "words"), [
    (lambda a, b: a.with_watermark("t", 1).select("k").union(b.select("k")), "others have none"),
    (lambda a, b: a.with_watermark("t", 1).select("k").union(b.with_columns(t=col("t").cast(pa.timestamp(
        "us"))).with_watermark("t", "1s").select("k")), "watermarks of different types"),
    (lambda a, b: a.select("k").union(si.from_arrow({"k": ["a"]})), "has its data already"),
])
def test_what_is_refused(make: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match=words):
        start_stream(make(si.flow(SCHEMA, name="a"), si.flow(OTHER, name="b")), tmp_path, si.to_memory())


# --- with Spark


def test_streams_with_names(spark: Any, tmp_path: Path) -> None:
    """A named input given as it is, and by its name; then the union of two."""
    rows = pa.table({"x": [1, 2, 3]}), pa.table({"x": [100, 200]})
    frames = {}
    for name, each in zip(("input", "b"), rows, strict=True):
        (tmp_path / name).mkdir()
        pq.write_table(each, tmp_path / name / "0.parquet")
        frames[name] = spark.readStream.schema("x bigint").parquet(str(tmp_path / name))
    schema = pa.schema({"x": pa.int64()})

    def run(q: Flow, given: Any) -> list[int]:
        sink = si.to_memory()
        with tempfile.TemporaryDirectory() as folder:
            sis.start(q, given, sink=sink, checkpoint=folder, trigger={"availableNow": True}).wait()
        return sorted(sink.table()["x"].to_pylist())

    one = si.flow(schema, name="b")
    assert run(one, frames["b"]) == run(one, {"b": frames["b"]}) == [100, 200]
    both = si.flow(schema, name="input").union(one)
    assert run(both, frames) == [1, 2, 3, 100, 200]
    with pytest.raises(BadArgument, match="more than one input"):
        run(both, frames["b"])
