"""Tasks: the Python functions of a batch's one action, and what crosses between them and to the driver.

    stream's rows -> MapTask -> cells (target, kind, blob) -> repartition by target -> ReduceTask -> words, blobs
    a few files -> WholeTask -> words, blobs

The cells of a target hold what crosses (`PARTIALS`), late and failed rows if they are wanted, and from each map task
what it counted and saw of time: so each reduce task knows the batch's time, and closes windows in the same batch. A
flow without state has no second task: `RowTask` does everything.

A task's words are JSON: the runs and files that it wrote, and what it counted. Whatever it wrote is durable before it
speaks, and nothing of it counts before the driver has heard it: attempts may fail, be repeated, or run beside one
another.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from scalein.options import Options
from scalein.spark.batch.tasks import JOINED_BYTES, task_options
from scalein.spark.serialize import Carried
from scalein.spark.shuffle import decoded, encoded, joined, own_rows, placed, routed
from scalein.spark.streaming.clocks import Clock, Seen
from scalein.spark.streaming.inputs import Files
from scalein.spark.streaming.reducing import Reducer, Share
from scalein.spark.streaming.runs import Run, keep_only, ranges
from scalein.spark.streaming.sinks import Output, Taken
from scalein.spark.streaming.work import Tally, Work
from scalein.spark.types import entering
from scalein.storage.checked_json import Json
from scalein.storage.object_store import Location

PARTIALS, COUNTED, LATE, WORDS, OUT, FAILED = range(6)  # kinds of cells, and of what a task says
CELLS = pa.schema([pa.field("target", pa.int32(), False), pa.field("kind", pa.int32(), False),
                   pa.field("blob", pa.binary(), False)])  # fmt: skip
SPARK_CELLS = "target int, kind int, blob binary"
JOINED_ROWS = 1 << 18  # of a batch for kernels
TOTALS = ("rows", "timeless", "late_rows", "failed_rows")  # that map tasks count
_KIND_OF = {"out": OUT, "late": LATE, "failed": FAILED}

Batches = Iterator[pa.RecordBatch]


@dataclass(frozen=True)
class Batch:
    """What the tasks of one batch are told."""

    work: Carried
    entering: pa.Schema  # the stream's columns that are read, as the flow has them
    prefix: str  # of files: <job>-<batch>
    partitions: int
    clock: Clock
    runs: tuple[Run, ...]
    location: Location
    migration: str
    outputs: dict[str, Output]  # of results ("out"), and perhaps of late and failed rows

    def unpacked(self) -> Work:
        found = self.work.value()
        assert isinstance(found, Work)
        return found


@dataclass(frozen=True)
class MapTask:
    """A partition of the stream's rows into cells."""

    batch: Batch

    def __call__(self, batches: Batches) -> Batches:
        return self.run(batches, task_options(), _task_number())

    def run(self, batches: Iterable[pa.RecordBatch], options: Options, number: int) -> Batches:
        batch, work, tally = self.batch, self.batch.unpacked(), Tally()
        places = placed(batch.partitions)
        rows = _entered(batches, batch.entering)
        crossing = work.crossing(rows, batch.clock, tally, options)
        for target, part in routed(crossing, work.phases.keys, batch.partitions, options):
            yield cell(places[target], PARTIALS, encoded(part))
        for kind, kept in ((LATE, tally.late), (FAILED, tally.failed)):
            for rows in joined(kept, JOINED_BYTES):
                yield cell(places[number % batch.partitions], kind, encoded(rows))
        words = pa.py_buffer(json.dumps(tally.to_json()).encode())
        for target in range(batch.partitions):
            yield cell(places[target], COUNTED, words)


@dataclass(frozen=True)
class ReduceTask:
    """The cells of a target, and its state, into results and new state."""

    batch: Batch

    def __call__(self, cells: Batches) -> Batches:
        return self.run(cells, task_options())

    def run(self, cells: Iterable[pa.RecordBatch], options: Options) -> Batches:
        batch, work = self.batch, self.batch.unpacked()
        keep_only(batch.location, batch.runs)
        given: list[pa.RecordBatch] = []
        others: list[tuple[str, pa.RecordBatch]] = []  # late and failed rows
        counted: list[dict[str, Any]] = []
        targets = set[int]()
        for place, kind, blob in _blobs(cells):
            targets.add(place)
            if kind == PARTIALS:
                given.append(decoded(blob, work.phases.crossing))
            elif kind == LATE:
                others.append(("late", decoded(blob, work.late_schema)))
            elif kind == FAILED:
                others.append(("failed", decoded(blob, batch.entering)))
            else:
                counted.append(json.loads(blob.to_pybytes()))
        if not targets:  # no task had anything to say to this target
            return
        target = placed(batch.partitions).index(targets.pop())
        assert not targets, "cells of several targets in one partition"
        yield from _reduced(batch, target, given, others, counted, options)


@dataclass(frozen=True)
class WholeTask:
    """A target's state and all rows of the batch, which the task reads itself, into results and new state.

    Each task goes through all rows for those of its own keys, so nothing has to be shuffled. All see the same rows in
    the same order, and come to the same time.
    """

    batch: Batch
    files: Files

    def __call__(self, targets: Iterable[int]) -> Iterator[tuple[int, int, bytes]]:
        for target in targets:
            for said in self.run(target, task_options()):
                yield from ((number, kind, blob.to_pybytes()) for number, kind, blob in _blobs([said]))

    def run(self, target: int, options: Options) -> Batches:
        batch, work, tally = self.batch, self.batch.unpacked(), Tally()
        keep_only(batch.location, batch.runs)
        rows = _entered(self.files.read(), batch.entering)
        if (keys := work.row_keys) is not None:  # others need not become groups here
            rows = _own(rows, keys, target, batch.partitions, tally, options)
        crossing = work.crossing(rows, batch.clock, tally, options)
        if keys is None:
            parts = routed(crossing, work.phases.keys, batch.partitions, options)
            given = [part for to, part in parts if to == target]
        else:
            given = list(crossing)
        others = [(role, rows) for role, kept in (("late", tally.late), ("failed", tally.failed)) for rows in kept]
        yield from _reduced(batch, target, given, others if target == 0 else [], [tally.to_json()], options)


def _reduced(batch: Batch, target: int, given: list[pa.RecordBatch], others: list[tuple[str, pa.RecordBatch]],
             counted: list[dict[str, Any]], options: Options) -> Batches:
    """The end of a batch for a target: what crossed to it and its state into results and new state. `others` are late
    and failed rows, `counted` what map tasks counted.
    """
    work, groups = batch.unpacked(), ranges(batch.partitions)[target]
    runs = [part for run in batch.runs if (part := run.within(*groups)) is not None]
    share = Share(groups, runs, batch.clock, work.moved(batch.clock, seen_of(counted)), batch.migration)
    with _outputs(batch, target) as outputs:
        left = reducer(work, options).run(share, given, batch.location, outputs["out"].write)
        for role, rows in others:
            outputs[role].write(rows)
        totals = {name: sum(words[name] for words in counted) for name in TOTALS}
        yield from _said(target, outputs, runs=[[*run.to_json()] for run in left],
                         clock=share.now.to_json(), **totals)


@dataclass(frozen=True)
class RowTask:
    """A partition of the stream's rows into results, for flows without state."""

    batch: Batch

    def __call__(self, batches: Batches) -> Batches:
        return self.run(batches, task_options(), _task_number())

    def run(self, batches: Iterable[pa.RecordBatch], options: Options, number: int) -> Batches:
        batch, work, tally = self.batch, self.batch.unpacked(), Tally()
        with _outputs(batch, number) as outputs:
            for found in work.crossing(_entered(batches, batch.entering), batch.clock, tally, options):
                outputs["out"].write(work.told(found))
            for rows in tally.failed:
                outputs["failed"].write(rows)
            yield from _said(number, outputs, **tally.to_json())


@dataclass(frozen=True)
class FromFiles:
    """A task whose rows are in files; Spark gives the number of its share."""

    task: MapTask | RowTask
    shares: tuple[Files, ...]

    def __call__(self, numbers: Batches) -> Batches:
        options = task_options()
        for number in (each for batch in numbers for each in batch.column(0).to_pylist()):
            yield from self.task.run(self.shares[number].read(), options, number)


def reducer(work: Work, options: Options) -> Reducer:
    """The reduce side of a flow, kept with it."""
    known: tuple[Options, Reducer] | None = getattr(work, "_reducer", None)
    if known is None or known[0] != options:
        known = (options, Reducer(work, options))
        work._reducer = known  # type: ignore[attr-defined]
    return known[1]


def seen_of(words: Iterable[dict[str, Any]]) -> list[Seen]:
    """What tasks saw of time."""
    return [Seen(*each) for some in words for each in some["seen"]]


@dataclass
class _Counted:
    """An output of a task, and how many rows it got."""

    taken: Taken
    rows: int = 0

    def write(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            self.rows += batch.num_rows
            self.taken.write(batch)


@contextmanager
def _outputs(batch: Batch, number: int) -> Iterator[dict[str, _Counted]]:
    """Where a task's rows go; if it fails, what it staged is given up."""
    begun = {role: _Counted(each.begin(batch.prefix, number)) for role, each in batch.outputs.items()}
    try:
        yield begun
    except BaseException:
        for each in begun.values():
            each.taken.abandon()
        raise


def _said(number: int, outputs: dict[str, _Counted], **words: Json) -> Batches:
    """The end of a task: its words, then rows for the driver."""
    words["rows_out"] = outputs["out"].rows
    blobs: list[tuple[int, pa.Buffer]] = []
    for role, each in outputs.items():
        words[role], sent = each.taken.finish()
        blobs += ((_KIND_OF[role], blob) for blob in sent)
    yield cell(number, WORDS, pa.py_buffer(json.dumps(words).encode()))
    for kind, blob in blobs:
        yield cell(number, kind, blob)


def _entered(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Batches:
    for batch in joined(batches, JOINED_BYTES, JOINED_ROWS):
        yield entering(batch, schema)


def _own(batches: Batches, keys: Sequence[str], target: int, targets: int, tally: Tally, options: Options) -> Batches:
    """The rows of a target; the others are only counted."""
    for batch in batches:
        rows = own_rows(batch, keys, target, targets, options)
        tally.rows += batch.num_rows - rows.num_rows
        if rows.num_rows:
            yield rows


def cell(number: int, kind: int, blob: pa.Buffer) -> pa.RecordBatch:
    offsets = pa.py_buffer(np.array([0, blob.size], np.int32))
    column = pa.BinaryArray.from_buffers(pa.binary(), 1, [None, offsets, blob])
    return pa.RecordBatch.from_arrays([pa.array([number], pa.int32()), pa.array([kind], pa.int32()), column],
                                      schema=CELLS)


def _blobs(cells: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, int, pa.Buffer]]:
    for batch in cells:
        for target, kind, blob in zip(*batch.columns, strict=True):
            yield target.as_py(), kind.as_py(), blob.as_buffer()


def _task_number() -> int:
    from pyspark import TaskContext

    context = TaskContext.get()
    return 0 if context is None else int(context.partitionId())


@dataclass(frozen=True)
class Heard:
    """What all tasks of a batch have said: words by task, and rows for the driver by role."""

    words: dict[int, dict[str, Json]]
    rows: dict[str, list[pa.Buffer]]


def counted(words: Sequence[dict[str, Any]], mode: str) -> dict[str, int]:
    """The totals of a batch. A task with state has heard of all rows, so any of them knows."""
    return {name: sum(each[name] for each in (words if mode == "rowwise" else words[:1])) for name in TOTALS}


def heard(rows: Iterable[tuple[int, int, Any]]) -> Heard:
    """What tasks said, from (number, kind, blob)."""
    found = Heard({}, {role: [] for role in _KIND_OF})
    role_of = {kind: role for role, kind in _KIND_OF.items()}
    for number, kind, blob in rows:
        if kind == WORDS:
            found.words[number] = json.loads(bytes(blob))
        else:
            found.rows[role_of[kind]].append(pa.py_buffer(blob))
    return found
