"""process on Spark: the rows of `collect` from DataFrames and streams; state as a table; what is refused.

Streams with crashes, rescales and migrations are in `tests/conformance`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import scalein as si
import scalein.spark as sis
from scalein import col
from scalein.api.flow import Flow
from scalein.errors import BadArgument
from scalein.exec.fragments import cut
from scalein.options import Options
from scalein.spark.batch.tasks import ProcessBlocks, ShuffleWriteProcess
from scalein.spark.map_reduce import MapReduce
from tests.same import assert_same
from tests.spark.simulated import drain, run, start_stream
from tests.spark.test_apply import same

SCHEMA = pa.schema({"k": pa.string(), "t": pa.timestamp("us"), "x": pa.int64()})


@si.process
class Again:
    """Counts the rows of a key; a timer sets itself again, so the greatest time of all rows matters at the end."""

    n: int = 0

    def on_row(self, row: Any) -> Any:
        self.n += 1
        self.set_timer(row.t + si.duration("10ms"))

    def on_timer(self, at: Any) -> Any:
        yield {"at": at, "n": self.n}
        self.set_timer(at + si.duration("10ms"))


@si.process
class Batched:
    """Yields the rows of 30 ms since the first one, when a timer says so."""

    n: int = 0
    total: int = 0

    def on_row(self, row: Any) -> Any:
        if self.n == 0:
            self.set_timer(row.t + si.duration("30ms"))
        self.n += 1
        self.total += row.x

    def on_timer(self, at: Any) -> Any:
        yield {"n": self.n, "total": self.total, "at": at}
        self.n = 0
        self.total = 0


@si.process
class Sums:
    total: int = 0

    def on_row(self, row: Any) -> Any:
        self.total += row.x
        yield {"total": self.total}


def rows(count: int, seed: int = 3) -> pa.Table:
    rng = np.random.default_rng(seed)
    times = np.sort(rng.integers(0, 200, count)) * 1000
    return pa.table([pa.array(np.array(["a", "b", "ccc", "d"])[rng.integers(0, 4, count)].tolist()),
                     pa.array(times, pa.timestamp("us"), mask=rng.random(count) < 0.1), rng.integers(0, 9, count)],
                    schema=SCHEMA)  # fmt: skip


def flow(cls: Any, source: Flow) -> Flow:
    return source.with_watermark("t", "5ms").filter(col("x") > 0).group_by(key=col("k").str.upper()).process(cls)


@pytest.mark.parametrize("cls", [Again, Batched])
@pytest.mark.parametrize("targets", [1, 3])
def test_tasks_give_the_rows_of_collect(cls: Any, targets: int) -> None:
    options, table = Options.make(workers=1), rows(80)
    q = flow(cls, si.flow(SCHEMA)).filter(col("n") > 0)
    map_reduce = MapReduce(cut(q.op)[0].first)
    ids = tuple(range(targets))
    blocks: list[list[pa.RecordBatch]] = [[] for _ in ids]
    for part in (table.slice(0, 30), table.slice(30)):
        given = iter(part.select(map_reduce.reads).to_batches())
        for block in ShuffleWriteProcess(map_reduce, ids).run(given, options):
            blocks[block.column("target")[0].as_py()].append(block)
    reduced = ProcessBlocks(map_reduce.reduce_only)
    found = [batch for some in blocks for batch in reduced.run(iter(some), options)]
    assert_same(pa.Table.from_batches(found, q.op.schema.arrow), q.collect(table))


def test_state_as_a_table_and_a_drain(tmp_path: Path) -> None:
    table = rows(60)
    sink = si.to_memory()
    coordinator = start_stream(flow(Batched, si.flow(SCHEMA)), tmp_path, sink)
    run(coordinator, [[table.slice(0, 30)], [table.slice(30)]])
    assert coordinator.progress is not None
    assert coordinator.progress["late_rows"] == 0
    assert coordinator.progress["timeless_rows"] == table.slice(30).filter(pa.compute.greater(
        table.slice(30)["x"], 0))["t"].null_count  # fmt: skip
    drain(coordinator)
    coordinator.close()
    in_time = table.filter(pa.compute.is_valid(table["t"])).filter(pa.compute.greater(table.filter(
        pa.compute.is_valid(table["t"]))["x"], 0))  # fmt: skip
    state = sis.read_state(tmp_path)
    assert state.column_names == ["key", "n", "total"]
    totals = sum(state["total"].to_pylist()) + sum(sink.table()["total"].to_pylist())
    assert totals == sum(in_time["x"].to_pylist())


def test_what_is_refused(tmp_path: Path) -> None:
    q = si.flow(SCHEMA).group_by("k").process(Sums)
    with pytest.raises(BadArgument, match="order of rows"):
        start_stream(q, tmp_path, si.to_memory())
    with pytest.raises(BadArgument, match="order of rows"):
        MapReduce(cut(q.op)[0].first)


def test_a_dataframe(spark: Any) -> None:
    table = rows(80)
    q = flow(Again, si.flow(SCHEMA))
    same(sis.apply(q, spark.createDataFrame(table).repartition(3)), q.collect(table))
