"""memory= is one budget for all that a job keeps: batches that wait, tables, and the state of each step."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import scalein as si
from scalein import col, memory
from scalein.connectors.sources import read_ahead as ahead_module
from scalein.exec import close_batches, local_state, window_aggregate
from scalein.exec.aggregate_operator import MAX_GROUPS, MIN_GROUPS, Finalizer, most_groups
from scalein.exec.bounded import PreAggregationProgram
from scalein.exec.fragments import cut
from scalein.exec.operator import FragmentRunner
from scalein.ir import ops
from scalein.ir.rewrite import walk_ops
from scalein.jobs.source_readers import AHEAD_BYTES, Reader, SourcePosition, SourceReaders
from scalein.jobs.spec import Shares
from scalein.state import LogStore
from scalein.state.row_buffer import RowBuffer
from scalein.testing import Stream, until
from tests.jobs.streams import rows_in

MB = 10**6
SCHEMA = pa.schema({"t": pa.int64(), "k": pa.int64()})


class Counting:
    """Endless batches of 1 MB; how many were asked for."""

    schema = SCHEMA
    bounded = False

    def __init__(self, names: list[str]) -> None:
        self._names, self.given = names, 0

    def partitions(self) -> list[str]:
        return self._names

    def read(self, partition: str, offset: Any) -> Iterator[tuple[pa.RecordBatch, Any]]:
        rows = MB // 16
        for number in range(offset or 0, 1 << 30):
            self.given += 1
            start = number * rows
            numbers = pa.array(np.arange(start, start + rows))
            yield pa.record_batch([numbers, numbers], schema=SCHEMA), number + 1


def test_batches_that_wait_have_their_share() -> None:
    source = Counting(["a", "b"])
    connected: Any = si.from_source(source).op.data  # type: ignore[union-attr]
    readers = [Reader(name, connected, SCHEMA.names, SourcePosition()) for name in source.partitions()]
    edges = SourceReaders(readers, None, 16 * MB)  # half of it would be the source's, if it read ahead
    until(lambda: all(reader.is_full for reader in readers))
    assert sum(reader.bytes for reader in readers) == 8 * MB
    assert source.given <= 8 + len(readers)  # one in each reader's hand
    edges.close()
    tiny = [Reader("a", connected, SCHEMA.names, SourcePosition())]
    edges = SourceReaders(tiny, None, 1)  # one batch always may wait
    until(lambda: tiny[0].is_full)
    assert len(tiny[0].pending) == 1
    assert len(edges.take(1 << 30, 1.0)) == 1
    edges.close()


def test_files_are_decoded_ahead_within_their_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(6):
        table = pa.table({"x": np.arange(number * 500_000, (number + 1) * 500_000)})
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=100_000)
    held: list[int] = []
    real = ahead_module._Prefetcher._has_room

    def has_room(self: Any, queue: Any, size: int) -> bool:
        held.append(self._bytes)
        return real(self, queue, size)

    monkeypatch.setattr(ahead_module._Prefetcher, "_has_room", has_room)
    source = si.read_parquet(tmp_path).op.data.within(2 * MB)  # type: ignore[union-attr]
    total = 0
    for batch, _ in source.read_from("files", None):
        time.sleep(0.001)
        total += batch.num_rows
    assert (total, len(held) > 20) == (3_000_000, True)
    assert max(held) <= 3 * MB  # and the batch that is waited for
    rows = si.to_memory()
    si.read_parquet(tmp_path).start(sink=rows, memory="1B").wait()
    assert rows.table().num_rows == 3_000_000


def test_rows_that_the_user_holds_anyway_do_not_count() -> None:
    table: Any = si.from_arrow(pa.table({"x": range(10)})).op.data  # type: ignore[union-attr]
    reader = Reader("all", table, ["x"], SourcePosition())
    SourceReaders([reader], None, 1).close()
    assert reader.most_bytes == AHEAD_BYTES


def test_steps_share_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, list[Any]] = {"log": [], "store": []}
    init, opened = RowBuffer.__init__, LogStore.open

    def log(self: RowBuffer, folder: Any, schema: Any, memory: Any, *others: Any, **named: Any) -> None:
        given["log"].append(memory)
        init(self, folder, schema, memory, *others, **named)

    def store(*args: Any, **named: Any) -> LogStore:
        given["store"].append(named["memory"])
        return opened(*args, **named)

    monkeypatch.setattr(RowBuffer, "__init__", log)
    monkeypatch.setattr(LogStore, "open", store)
    flow = si.from_arrow(pa.table({"t": [1, 2], "k": [1, 1]})).with_watermark("t", 0).distinct("t")
    flow = flow.group_by("k", si.tumbling("t", 10)).agg(n=si.count()).sort("n")
    flow.start(sink=si.to_memory(), memory="64MB").wait()
    share = Shares.of(64 * MB, 4 + 2 * 3).kept  # a window's slices, with tables; the keys of distinct, what is sorted
    assert given == {"log": [share, share], "store": [share]}
    assert share is not None
    assert (3 + 1 / 3) * share + 16 * MB <= 64 * MB
    flow.start(sink=si.to_memory()).wait()
    assert given["log"][2:] == [None, None]
    given["log"].clear()
    rows = [si.from_arrow(pa.table({"t": [1, 2], f"v{k}": [1, 1], "k": [1, 1]})).with_watermark("t", 0)
            for k in range(3)]  # fmt: skip
    joined = rows[0].join(rows[1], on="k", between=(0, 1)).drop("t_right").join(rows[2], on="k", between=(0, 1))
    joined.start(sink=si.to_memory(), memory="64MB").wait()
    assert len(given["log"]) == 4  # two sides each
    assert sum(given["log"]) <= 64 * MB


class Table:
    """A static table of three keys, which counts how often it is read."""

    schema = pa.schema({"k": pa.int64(), "name": pa.string()})
    bounded = True

    def __init__(self, size: int) -> None:
        names = [name * size for name in "abc"]
        self.rows, self.reads = pa.record_batch([[0, 1, 2], names], schema=self.schema), 0

    def partitions(self) -> list[str]:
        return ["all"]

    def read(self, partition: str, offset: Any) -> Iterator[tuple[pa.RecordBatch, Any]]:
        self.reads += 1
        yield self.rows, 3


@pytest.mark.parametrize("size", [1, 10_000], ids=["in memory", "spilled"])
@pytest.mark.parametrize("then", ["rows", "groups"])
def test_a_static_table_is_read_once(size: int, then: str) -> None:
    """However many rounds a job has, and whether the table fits into its memory or not."""
    batches = [pa.record_batch([[n % 3, 7], [n, n]], names=["k", "n"]) for n in range(5)]
    table, stream, out = Table(size), Stream({"all": batches}, allowed={"all": 0}), si.to_memory()
    flow = si.from_source(stream).join(si.from_source(table), on="k").with_columns(name=col("name").str.slice(0, 1))
    if then == "groups":
        flow = flow.filter(col("n") >= 0).group_by("name").agg(n=col("n").sum())
    job = flow.start(sink=out, memory="200KB")
    for count in range(1, len(batches) + 1):
        stream.allow("all", count)
        until(lambda count=count: rows_in(job) == 2 * count, job)  # type: ignore[misc]
    job.wait()
    wanted = [("abc"[n % 3], n) for n in range(5)]
    groups = {name: sum(n for each, n in wanted if each == name) for name, _ in wanted}
    found = [(row["name"], row["n"]) for row in out.table().to_pylist()]
    assert sorted(found) == sorted(wanted if then == "rows" else groups.items())
    assert table.reads == 1


def test_tables_between_two_borders_have_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = pa.schema({"k": pa.int64(), "#acc0": pa.int64(), "#acc1": pa.decimal128(38, 0), "w": pa.string()})
    assert most_groups(schema, None) == MAX_GROUPS == most_groups(schema, 1 << 40)
    assert most_groups(schema, 1) == MIN_GROUPS
    assert 100_000 < most_groups(schema, 48 * MB) < 200_000
    drained: list[tuple[threading.Thread, int]] = []
    real = PreAggregationProgram.drain

    def drain(self: PreAggregationProgram) -> Any:
        drained.append((threading.current_thread(), self.count))
        return real(self)

    monkeypatch.setattr(PreAggregationProgram, "drain", drain)
    rows = 30_000
    table = pa.table({"k": [f"key {n // 10}" for n in range(rows)]})
    flow = si.from_arrow(pa.Table.from_batches(table.to_batches(max_chunksize=500))).group_by("k").agg(n=si.count())
    out = si.to_memory()
    job = flow.start(sink=out, memory="256kB", workers=1)
    job.wait()
    assert out.table().num_rows == rows // 10
    assert set(out.table().column("n").to_pylist()) == {10}
    most = [count for thread, count in drained if thread is job._driver._thread]  # not of jobs that are ending yet
    assert len(most) > 2
    assert max(most) <= MIN_GROUPS + 50


def test_maps_that_nobody_uses_count_as_well() -> None:
    def used(size: int) -> None:
        memory.allocate(size)[:] = 1

    used(8 * MB)
    assert memory._free_bytes >= 8 * MB
    with memory.keep_at_most(5 * MB), memory.keep_at_most(None):
        assert memory._free_bytes <= 5 * MB
        used(8 * MB)
        assert memory._free_bytes <= 5 * MB
    used(8 * MB)
    assert memory._free_bytes >= 8 * MB
    seen: list[int] = []
    flow = si.from_arrow(pa.table({"x": [1]}))
    flow.start(sink=si.to_callback(lambda batch: seen.append(min(memory._max_pooled))), memory="8MB").wait()
    assert (seen, min(memory._max_pooled)) == ([MB], memory.MAX_POOLED_BYTES)


def test_a_small_budget_changes_nothing_but_time() -> None:
    table = pa.table({"t": np.arange(6_000) // 4, "k": np.arange(6_000) % 701})
    rows = si.from_arrow(pa.Table.from_batches(table.to_batches(max_chunksize=777)))
    flow = rows.with_watermark("t", 10).distinct("t", "k").group_by("k", si.tumbling("t", 300)).agg(
        n=si.count(), all=col("t").collect())
    results = []
    for given in (None, "1B"):
        out = si.to_memory()
        flow.start(sink=out, memory=given, workers=2).wait()
        results.append(sorted(map(str, out.table().to_pylist())))
    assert results[0] == results[1]


@pytest.mark.parametrize("behind", [False, True])
def test_results_are_written_as_they_are_made(behind: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All of them at once may be more than memory holds."""
    real, scanned, seen = LogStore.scan, [0], []

    def scan(self: LogStore) -> Iterator[pa.RecordBatch]:
        for batch in real(self):
            scanned[0] += batch.num_rows
            yield batch

    monkeypatch.setattr(LogStore, "scan", scan)
    flow = si.from_arrow(pa.table({"k": np.arange(20_000)})).group_by("k").agg(n=si.count())
    flow = flow.map_batches(lambda batch: batch, flow.collect().schema) if behind else flow
    flow.start(sink=si.to_callback(lambda batch: seen.append((batch.num_rows, scanned[0]))), checkpoint=tmp_path).wait()
    assert sum(rows for rows, _ in seen) == 20_000
    assert seen[0][1] < 2_000


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("window", [si.tumbling("t", 100), si.tumbling("t", 20_000), si.sliding("t", 300, every=100)],
                         ids=["many", "one", "sliding"])
@pytest.mark.parametrize("large", [False, True])
def test_windows_that_close_together_are_finished_in_parts(
        window: Any, large: bool, at_end: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Many by time, one by its keys; what a part gives is written before the next is begun."""
    rows, least = 20_000, 40_000
    monkeypatch.setattr(close_batches, "MIN_BYTES", least)
    monkeypatch.setattr(window_aggregate, "ring", SimpleNamespace(fits=lambda table: False))
    given, written = list[tuple[int, int]](), [0]
    for name in ("all", "between"):
        real = getattr(Finalizer, name)

        def spied(self: Finalizer, batches: Any, *more: int, real: Any = real) -> Any:
            given.append((sum(batch.nbytes for batch in batches), written[0]))
            return real(self, batches, *more)

        monkeypatch.setattr(Finalizer, name, spied)

    def write(batch: pa.RecordBatch) -> None:
        written[0] += batch.num_rows

    numbers = np.arange(rows)
    table = pa.table({"t": numbers, "k": [f"key {n % 4_000}" for n in numbers], "x": numbers % 7})
    last = pa.record_batch([[10**6], ["last"], [1]], schema=table.schema)  # closes all that is before
    batches = [*table.to_batches(max_chunksize=777), *([] if at_end else [last])]
    stream = Stream({"all": batches}, ends=at_end)
    flow = si.from_source(stream).with_watermark("t", 30_000).group_by("k", window).agg(
        n=si.count(), m=col("x").n_unique() if large else col("x").max())  # fmt: skip
    job = flow.start(sink=si.to_callback(write), memory=3 * least, workers=2)
    want = si.from_arrow(table).group_by("k", window).agg(n=si.count()).collect().num_rows
    until(lambda: written[0] >= want, job)
    job.stop()
    assert written[0] == want
    assert len(given) > 8
    assert max(size for size, _ in given) < 1.6 * least  # windows that slide share slices, and keys are not all alike
    seen = [before for _, before in given]
    assert seen == sorted(seen)
    assert seen[-1] > want // 2


def test_sessions_that_wait_are_combined_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them at once, and the tables of their keys, may be more than memory holds."""
    least = 40_000
    monkeypatch.setattr(close_batches, "MIN_BYTES", least)
    monkeypatch.setattr(local_state, "MIN_COMBINED_ROWS", 1_000)
    real, given = FragmentRunner.each, list[int]()

    def spied(self: FragmentRunner, batches: Any) -> Any:
        given.append(sum(batch.nbytes for batch in batches))
        return real(self, batches)

    monkeypatch.setattr(FragmentRunner, "each", spied)
    table = pa.table({"t": np.arange(20_000), "k": np.arange(20_000) % 7_000})
    flow = si.from_batches(table.to_batches(max_chunksize=500), table.schema).with_watermark("t", 0)
    out = si.to_memory()
    flow.group_by("k", si.session("t", gap=10**6)).agg(n=si.count()).start(sink=out, memory=3 * least, workers=1).wait()
    counts = np.bincount(np.arange(20_000) % 7_000)
    assert dict(zip(out.table()["k"].to_pylist(), out.table()["n"].to_pylist(), strict=True)) == dict(enumerate(counts))
    assert len(given) > 4
    assert max(given) < 1.6 * least  # keys are not all alike


def test_what_a_buffer_holds_is_no_part_of_something_larger(tmp_path: Path) -> None:
    whole = pa.record_batch({"x": np.arange(100_000), "s": ["a text"] * 100_000})
    buffer = RowBuffer(tmp_path, whole.schema, MB)
    buffer.add(whole.slice(500, 2))
    held = buffer.segments[0].batch
    assert held is not None
    assert held == whole.slice(500, 2)
    assert sum(each.size for column in held.columns for each in column.buffers() if each is not None) < 1_000


def test_the_rows_of_a_flow_that_is_gone_are_given_back() -> None:
    """What was compiled for a flow that may be started again must not keep its tables."""
    def run(join: bool) -> list[Any]:
        rows = pa.table({"k": [1, 2, 3]})
        flow = si.from_arrow(rows)
        flow = flow.join(pa.table({"k": [1, 2]}), on="k") if join else flow
        flow = flow.group_by("k").agg(n=si.count())
        found = []
        for _ in range(2):
            out = si.to_memory()
            flow.start(sink=out).wait()
            found.append(out.table().sort_by("k").to_pydict())
        assert found[0] == found[1] == {"k": [1, 2, 3][: 2 if join else 3], "n": [1, 1, 1][: 2 if join else 3]}
        return [weakref.ref(op.data) for op in walk_ops(flow.op) if isinstance(op, ops.Source)]

    held = [*run(False), *run(True)]
    gc.collect()
    assert [each() for each in held] == [None] * 3


def test_a_flow_is_not_cut_twice() -> None:
    flow = si.from_arrow(pa.table({"k": [1]})).join(pa.table({"k": [1]}), on="k").group_by("k").agg(n=si.count())
    first, second = cut(flow.op), cut(flow.op)
    assert [edge.first for edge in first] == [edge.first for edge in second]
    assert [edge.source for edge in second] == [edge.source for edge in first]
    assert second[0].source.data is first[0].source.data is not None
