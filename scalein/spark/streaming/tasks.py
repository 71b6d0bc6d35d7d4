"""Tasks of a stream: the Python functions of a batch's one action, and what they send each other and the driver.

    stream's rows -> MapTask -> blocks (target, kind, block) -> repartition by target -> ReduceTask -> result, rows
    a few files -> ReadAllTask -> result, rows

The blocks of a target hold shuffled rows (`PARTIALS`; of the right side of a join `RIGHT`), late and failed rows if
these have sinks, and the summary of each map task: its counts and its times. So each reduce task knows the batch's
watermark, and closes windows in the same action. A flow without state has no reduce task: `RowwiseTask` does
everything. Where a task finds that Spark must read the batch's files after all (`text_splits.py`), the other tasks go
on, `REFUSED` is sent to the driver, and all is void.

A task's result is JSON: the runs and files that it wrote, and its counts. What a task wrote is durable before it
returns its result, and nothing of it is valid before the driver has the result: attempts may fail, be repeated, or run
at the same time. One thread of a worker process runs a task at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from scalein.exec.dead_letters import dead_letter_schema
from scalein.exec.event_time import NO_TIMES, TimeSummary
from scalein.options import Options
from scalein.spark.batch.tasks import COALESCED_BYTES, task_options
from scalein.spark.origin import without_origin
from scalein.spark.row_groups import RowGroups, Skipped
from scalein.spark.serialize import BroadcastPlan
from scalein.spark.shuffle import coalesce_batches, decode_block, encode_block, rows_of_target, target_ids
from scalein.spark.streaming.event_time import Clock
from scalein.spark.streaming.reduce_side import ReduceInput, Reducer
from scalein.spark.streaming.sinks import TaskSink, TaskWriter
from scalein.spark.streaming.stream_plan import MapSummary, StreamPlan
from scalein.spark.text_splits import NotPlain, TextSplits
from scalein.spark.types import from_spark
from scalein.state.hash_runs import Run, retain_only
from scalein.state.key_groups import key_group_ranges
from scalein.storage.checked_json import Json
from scalein.storage.object_store import Location

PARTIALS, SUMMARY, LATE, RESULT, OUT, FAILED, REFUSED, RIGHT = range(8)  # kinds of blocks
SHUFFLED = (PARTIALS, RIGHT)  # by the number of their schema
BLOCK_SCHEMA = pa.schema([pa.field("target", pa.int32(), False), pa.field("kind", pa.int32(), False),
                          pa.field("block", pa.binary(), False)])  # fmt: skip
BLOCK_DDL = "target int, kind int, block binary"
COALESCED_ROWS = 1 << 18  # of a coalesced batch
TOTALS = ("rows", "timeless", "late_rows", "failed_rows")  # counts of map tasks
_KIND_OF = {"out": OUT, "late": LATE, "failed": FAILED}

Batches = Iterator[pa.RecordBatch]
TaskResult = dict[str, Any]  # JSON: runs and files that a task wrote, and its counts


@dataclass(frozen=True)
class MicroBatch:
    """The input of all tasks of one micro-batch."""

    broadcast: BroadcastPlan
    input_schema: pa.Schema  # the stream's columns that are read, in the flow's types, and perhaps `ORIGIN`
    prefix: str  # of files: <job>-<batch>
    partitions: int
    clock: Clock
    runs: tuple[Run, ...]
    location: Location
    migration: str
    sinks: dict[str, TaskSink]  # of results ("out"), and perhaps of late and failed rows
    skipped_times: TimeSummary = NO_TIMES  # of rows that no task reads
    drains_to: int | None = None  # the watermark after it, if it closes all windows

    def summary(self) -> MapSummary:
        """What a map task counts, at its start."""
        return MapSummary(origin=f"batch {int(self.prefix.rpartition('-')[2])} of the stream")

    def plan(self) -> StreamPlan:
        found = self.broadcast.value()
        assert isinstance(found, StreamPlan)
        return found


@dataclass(frozen=True)
class MapTask:
    """A partition of the stream's rows to shuffle blocks."""

    batch: MicroBatch

    def __call__(self, batches: Batches) -> Batches:
        return self.run(batches, task_options(), _task_number())

    def run(self, batches: Iterable[pa.RecordBatch], options: Options, number: int) -> Batches:
        batch, plan, summary = self.batch, self.batch.plan(), self.batch.summary()
        ids = target_ids(batch.partitions)
        rows = _from_spark(batches, batch.input_schema)
        shuffled_rows = plan.map_rows(rows, batch.clock, summary, options)
        for target, schema, part in plan.routed(shuffled_rows, batch.partitions, options):
            yield block_row(ids[target], SHUFFLED[schema], encode_block(part))
        for kind, held in ((LATE, summary.late), (FAILED, summary.failed)):
            for rows in coalesce_batches(held, COALESCED_BYTES):
                yield block_row(ids[number % batch.partitions], kind, encode_block(rows))
        counts = pa.py_buffer(json.dumps(summary.to_json()).encode())
        for target in range(batch.partitions):
            yield block_row(ids[target], SUMMARY, counts)


@dataclass(frozen=True)
class ReduceTask:
    """The blocks of a target, and its state, to results and new state."""

    batch: MicroBatch

    def __call__(self, blocks: Batches) -> Batches:
        return self.run(blocks, task_options())

    def run(self, blocks: Iterable[pa.RecordBatch], options: Options) -> Batches:
        batch, plan = self.batch, self.batch.plan()
        retain_only(batch.location, batch.runs)
        shuffled: list[pa.RecordBatch] = []
        others: list[tuple[str, pa.RecordBatch]] = []  # late and failed rows
        summaries: list[dict[str, Any]] = []
        targets = set[int]()
        for id_, kind, block in _blocks(blocks):
            targets.add(id_)
            if kind in SHUFFLED:
                shuffled.append(decode_block(block, plan.shuffle_schemas[SHUFFLED.index(kind)]))
            elif kind == LATE:
                others.append(("late", decode_block(block, plan.late_schema)))
            elif kind == FAILED:
                others.append(("failed", decode_block(block, dead_letter_schema(without_origin(batch.input_schema)))))
            elif kind == REFUSED:
                yield block_row(id_, REFUSED, pa.py_buffer(b""))
                return
            else:
                summaries.append(json.loads(block.to_pybytes()))
        if not targets:  # no map task sent a block to this target
            return
        target = target_ids(batch.partitions).index(targets.pop())
        assert not targets, "blocks of several targets in one partition"
        yield from _reduce(batch, target, shuffled, others, summaries, options)


@dataclass(frozen=True)
class ReadAllTask:
    """A target's state and all rows of the batch, which the task reads itself, to results and new state.

    Each task reads all rows and selects those of its own keys, so nothing is shuffled. All tasks read the same rows in
    the same order, and compute the same clock.
    """

    batch: MicroBatch
    files: RowGroups | TextSplits

    def __call__(self, targets: Iterable[int]) -> Iterator[tuple[int, int, bytes]]:
        for target in targets:
            try:
                for row in self.run(target, task_options()):
                    yield from ((number, kind, block.to_pybytes()) for number, kind, block in _blocks([row]))
            except NotPlain:
                yield target, REFUSED, b""

    def run(self, target: int, options: Options) -> Batches:
        batch, plan, summary = self.batch, self.batch.plan(), self.batch.summary()
        retain_only(batch.location, batch.runs)
        rows = _from_spark(self.files.read(), batch.input_schema)
        if (keys := plan.row_keys) is not None:  # rows of other keys need not be aggregated here
            rows = _rows_of_target(rows, keys, target, batch.partitions, summary, options)
        shuffled_rows = plan.map_rows(rows, batch.clock, summary, options)
        if keys is None:
            shuffled = [part for to, _, part in plan.routed(shuffled_rows, batch.partitions, options) if to == target]
        else:
            shuffled = list(shuffled_rows)
        others = [(role, rows) for role, held in (("late", summary.late), ("failed", summary.failed)) for rows in held]
        yield from _reduce(batch, target, shuffled, others if target == 0 else [], [summary.to_json()], options)


def _reduce(batch: MicroBatch, target: int, shuffled: list[pa.RecordBatch], others: list[tuple[str, pa.RecordBatch]],
            summaries: list[dict[str, Any]], options: Options) -> Batches:
    """Reduce the rows of a target and its state to results and new state.

    `others` are late and failed rows, `summaries` those of all map tasks.
    """
    plan, groups = batch.plan(), key_group_ranges(batch.partitions)[target]
    runs = [part for run in batch.runs if (part := run.within(*groups)) is not None]
    clock = plan.advance_clock(batch.clock, summaries, batch.skipped_times)
    if batch.drains_to is not None:
        clock = replace(clock, watermark=batch.drains_to)
    reduce_input = ReduceInput(groups, runs, batch.clock, clock, batch.migration, batch.drains_to is not None)
    with _open_writers(batch, target) as writers:
        reduce_side = reducer(plan, options)
        reduced = reduce_side.run(reduce_input, shuffled, batch.location, writers["out"].write)
        for role, rows in (*others, *(("late", rows) for rows in reduced.late)):
            writers[role].write(rows)
        totals = {name: sum(each[name] for each in summaries) for name in TOTALS}
        own: dict[str, Json] = {"late_rows": reduced.late_rows, "timeless": reduced.timeless}
        yield from _finish(target, writers, runs=[[*run.to_json()] for run in reduced.runs], clock=clock.to_json(),
                           traffic=asdict(reduce_side.traffic), own=own, **totals)


@dataclass(frozen=True)
class RowwiseTask:
    """A partition of the stream's rows to results, for flows without state."""

    batch: MicroBatch

    def __call__(self, batches: Batches) -> Batches:
        return self.run(batches, task_options(), _task_number())

    def run(self, batches: Iterable[pa.RecordBatch], options: Options, number: int) -> Batches:
        batch, plan, summary = self.batch, self.batch.plan(), self.batch.summary()
        with _open_writers(batch, number) as writers:
            for found in plan.map_rows(_from_spark(batches, batch.input_schema), batch.clock, summary, options):
                writers["out"].write(plan.changelog_rows(found))
            for rows in summary.failed:
                writers["failed"].write(rows)
            yield from _finish(number, writers, **summary.to_json())


@dataclass(frozen=True)
class FileTask:
    """A task whose rows are in files; its input row is its number."""

    task: MapTask | RowwiseTask
    parts: tuple[RowGroups | TextSplits, ...]

    def __call__(self, numbers: Batches) -> Batches:
        options = task_options()
        for number in (each for batch in numbers for each in batch.column(0).to_pylist()):
            try:
                yield from self.task.run(self.parts[number].read(), options, number)
            except NotPlain:
                for target in target_ids(self.task.batch.partitions):  # no reduce task need run
                    yield block_row(target, REFUSED, pa.py_buffer(b""))


def reducer(plan: StreamPlan, options: Options) -> Reducer:
    """The reduce side of a flow, cached in its plan."""
    known: tuple[Options, Reducer] | None = getattr(plan, "_reducer", None)
    if known is None or known[0] != options:
        known = (options, Reducer(plan, options))
        plan._reducer = known  # type: ignore[attr-defined]
    return known[1]


@dataclass
class _CountingWriter:
    """The writer of a task for one sink, and the number of its rows."""

    writer: TaskWriter
    rows: int = 0

    def write(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            self.rows += batch.num_rows
            self.writer.write(batch)


@contextmanager
def _open_writers(batch: MicroBatch, number: int) -> Iterator[dict[str, _CountingWriter]]:
    """The writers of a task, by role; they are aborted if it fails."""
    writers = {role: _CountingWriter(sink.open(batch.prefix, number)) for role, sink in batch.sinks.items()}
    try:
        yield writers
    except BaseException:
        for each in writers.values():
            each.writer.abort()
        raise


def _finish(number: int, writers: dict[str, _CountingWriter], **result: Json) -> Batches:
    """The end of a task: its result, then rows for the driver."""
    result["rows_out"] = writers["out"].rows
    blocks_for_driver: list[tuple[int, pa.Buffer]] = []
    for role, each in writers.items():
        result[role], sent = each.writer.finish()
        blocks_for_driver += ((_KIND_OF[role], block) for block in sent)
    yield block_row(number, RESULT, pa.py_buffer(json.dumps(result).encode()))
    for kind, block in blocks_for_driver:
        yield block_row(number, kind, block)


def _from_spark(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Batches:
    for batch in coalesce_batches(batches, COALESCED_BYTES, COALESCED_ROWS):
        yield from_spark(batch, schema)


def _rows_of_target(batches: Batches, keys: Sequence[str], target: int, targets: int, summary: MapSummary,
                    options: Options) -> Batches:
    """The rows of a target; others are only counted."""
    for batch in batches:
        rows = rows_of_target(batch, keys, target, targets, options)
        summary.rows += batch.num_rows - rows.num_rows
        if rows.num_rows:
            yield rows


def block_row(number: int, kind: int, block: pa.Buffer) -> pa.RecordBatch:
    offsets = pa.py_buffer(np.array([0, block.size], np.int32))
    column = pa.BinaryArray.from_buffers(pa.binary(), 1, [None, offsets, block])
    return pa.RecordBatch.from_arrays([pa.array([number], pa.int32()), pa.array([kind], pa.int32()), column],
                                      schema=BLOCK_SCHEMA)


def _blocks(rows: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, int, pa.Buffer]]:
    for batch in rows:
        for target, kind, block in zip(*batch.columns, strict=True):
            yield target.as_py(), kind.as_py(), block.as_buffer()


def _task_number() -> int:
    from pyspark import TaskContext

    context = TaskContext.get()
    return 0 if context is None else int(context.partitionId())


@dataclass(frozen=True)
class BatchResult:
    """The results of all tasks of a batch by task number, and rows for the driver by role."""

    tasks: dict[int, TaskResult]
    rows: dict[str, list[pa.Buffer]]
    read_by: str  # "tasks" if these read the files of the batch, "spark" if its rows came out of the JVM
    is_refused: bool = False  # tasks could not read the files, so that the results are void
    skipped: Skipped = field(default_factory=Skipped)


def batch_totals(results: Sequence[TaskResult], mode: str) -> dict[str, int]:
    """The totals of a batch. A reduce task has the summaries of all map tasks, so any one knows their totals; what it
    has counted itself is its `own`.
    """
    found = {name: sum(each[name] for each in (results if mode == "rowwise" else results[:1])) for name in TOTALS}
    return {name: count + sum(each.get("own", {}).get(name, 0) for each in results) for name, count in found.items()}


def collect_results(rows: Iterable[tuple[int, int, Any]], read_by: str = "spark") -> BatchResult:
    """The results of tasks, from rows (task number, kind, block)."""
    tasks: dict[int, TaskResult] = {}
    rows_of: dict[str, list[pa.Buffer]] = {role: [] for role in _KIND_OF}
    role_of = {kind: role for role, kind in _KIND_OF.items()}
    is_refused = False
    for number, kind, block in rows:
        if kind == RESULT:
            tasks[number] = json.loads(bytes(block))
        elif kind == REFUSED:
            is_refused = True
        else:
            rows_of[role_of[kind]].append(pa.py_buffer(block))
    return BatchResult(tasks, rows_of, read_by, is_refused)
