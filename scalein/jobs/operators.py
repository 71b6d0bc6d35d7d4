"""Steps: segments at work. Batches in, batches out, and a state that a checkpoint can name.

Each step is run by the job's thread alone, which hands the work inside of it to workers. `rows` takes batches as they
come, each looked at right before it is worked on, while it is in the cache; `advance` says how far time has come,
`finish` that nothing follows. `settle` brings what has arrived into the state, and `freeze` fixes that as it is, at
once; what it gives is written and described by another thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalein.arrow_functions import taken
from scalein.compiler import compile_flow
from scalein.errors import ComputeError
from scalein.exec.bounded import Program
from scalein.exec.error_location import placed
from scalein.ir import ops
from scalein.ir.physical import Node, Scan, walk_nodes
from scalein.jobs.fragments import Segment, over, placeholder
from scalein.options import Options
from scalein.state import LogStore
from scalein.state.row_buffer import RowLog
from scalein.storage.checked_json import Json, as_int, as_map

Batches = list[pa.RecordBatch]
Frozen = Callable[[], Json]  # waits until the state is on disk, and says where


class Arrival(NamedTuple):
    """A batch, the watermark before it came, and, if that was looked up, how far one of its columns reaches."""

    batch: pa.RecordBatch
    watermark: int | None
    column: str = ""
    least: int = 0
    greatest: int = 0


MOST_WORKERS = 16  # of a store: jobs may be scaled up
KEPT_STATES = 2  # snapshots of a store besides those that epochs name: one may be under way


@dataclass
class Surroundings:
    """What steps share: options, which may change at a border, a folder, and where rows go that are no result."""

    options: Options
    folder: Path
    late: Callable[[pa.RecordBatch], None]
    keeps_late: bool  # with all their columns
    timeless: Callable[[int], None]
    failed: Callable[[pa.RecordBatch, ComputeError], None] | None  # None: an error ends the job
    delay: int  # how much earlier time is here than at the sources
    has_checkpoints: bool = True


class Step(Protocol):
    """A segment at work."""

    reads: list[str]  # columns of its input that it needs

    @property
    def next_end(self) -> int | None:
        """The end of the first window that something waits in."""

    @property
    def due(self) -> int | None:
        """The watermark that `advance` should be told of as soon as it is reached; None: with the next ones."""

    @property
    def state_bytes(self) -> int:
        """What it holds in memory."""

    def rows(self, arrivals: Iterable[Arrival]) -> list[Arrival]: ...

    def advance(self, watermark: int) -> Iterable[pa.RecordBatch]:
        """What is over by now, one batch after the other as it is asked for, and all are."""

    def finish(self) -> Iterable[pa.RecordBatch]:
        """What is left, in the same way."""

    def settle(self) -> None:
        """Take all that has arrived into the state. Unlike `freeze`, whose error costs one checkpoint, it may fail
        halfway: an error ends the job.
        """

    def freeze(self) -> Frozen: ...

    def forget(self, kept: list[Json]) -> None:
        """Remove what no checkpoint that is kept names."""

    def close(self) -> None: ...


class Runner:
    """A program over batches. If `by_row`, what it makes of some rows does not depend on others: a row that fails can
    be left out. Else an error ends the job: halves of a batch would give other groups, or another order.
    """

    def __init__(self, op: ops.Op, around: Surroundings, program: Program | None = None, by_row: bool = True) -> None:
        self._op, self._around, self._by_row = op, around, by_row
        self.program = program or Program(compile_flow(op))

    def run(self, batches: Iterable[pa.RecordBatch]) -> Batches:
        """All rows; those that fail go where they should, if there is such a place."""
        batches = [batch for batch in batches if batch.num_rows]
        try:
            return list(self.program.run(batches, self._around.options))
        except ComputeError as error:
            if self._around.failed is None or not self._by_row:
                raise placed(error, self._op, self.program.node) from None
        return [out for batch in batches for out in self._without_failing(batch)]

    def sound(self, batch: pa.RecordBatch) -> Batches:
        """The rows of a batch that do not fail; the others go where they should."""
        try:
            deque(self.program.run([batch], self._around.options), maxlen=0)
            return [batch]
        except ComputeError as error:
            if self._around.failed is None:
                raise placed(error, self._op, self.program.node) from None
            if batch.num_rows == 1:
                self._around.failed(batch, placed(error, self._op, self.program.node))
                return []
        half = batch.num_rows // 2
        return self.sound(batch.slice(0, half)) + self.sound(batch.slice(half))

    def _without_failing(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Halves of a batch until the rows that fail are found."""
        try:
            yield from list(self.program.run([batch], self._around.options))
        except ComputeError as error:
            if batch.num_rows == 1:
                assert self._around.failed is not None
                self._around.failed(batch, placed(error, self._op, self.program.node))
                return
            half = batch.num_rows // 2
            yield from self._without_failing(batch.slice(0, half))
            yield from self._without_failing(batch.slice(half))


class Stateless:
    """Row by row ops."""

    next_end: int | None = None
    due: int | None = None

    @property
    def state_bytes(self) -> int:
        return 0

    def __init__(self, segment: Segment, around: Surroundings) -> None:
        self._runner = Runner(segment.op, around)
        self.reads = reads(self._runner.program.node)

    def rows(self, arrivals: Iterable[Arrival]) -> list[Arrival]:
        return run_alike(arrivals, self._runner.run)

    def advance(self, watermark: int) -> Batches:
        return []

    def finish(self) -> Iterable[pa.RecordBatch]:
        return []

    def settle(self) -> None:
        pass

    def freeze(self) -> Frozen:
        return lambda: None

    def forget(self, kept: list[Json]) -> None:
        pass

    def close(self) -> None:
        pass


class Limit(Stateless):
    """The first rows; then no more."""

    def __init__(self, segment: Segment, around: Surroundings, state: Json) -> None:
        super().__init__(_behind(segment), around)
        assert isinstance(segment.state, ops.Limit)
        self._before = Runner(segment.before, around)
        self.reads = reads(self._before.program.node)
        self._left = segment.state.count if state is None else as_int(state)

    @property
    def is_sated(self) -> bool:
        """Whether no further row can pass."""
        return not self._left

    def rows(self, arrivals: Iterable[Arrival]) -> list[Arrival]:
        return run_alike(arrivals, self._taken)

    def _taken(self, batches: Batches) -> Batches:
        taken = []
        for batch in self._before.run(batches) if self._left else []:
            if self._left:
                taken.append(batch.slice(0, self._left))
                self._left -= taken[-1].num_rows
        return self._runner.run(taken)

    def freeze(self) -> Frozen:
        left = self._left
        return lambda: left


class Distinct(Stateless):
    """Rows unlike any before; the keys that were seen are in a store."""

    def __init__(self, segment: Segment, around: Surroundings, state: Json) -> None:
        super().__init__(_behind(segment), around)
        assert isinstance(segment.state, ops.Distinct)
        self._keys = list(segment.state.keys)
        self._fresh = Runner(segment.state, around)
        self.reads = reads(self._fresh.program.node)
        schema = segment.state.schema.arrow
        self._store = open_store(around, pa.schema([schema.field(name) for name in self._keys]),
                                 pa.schema([pa.field("#seen", pa.int8())]), state)

    def rows(self, arrivals: Iterable[Arrival]) -> list[Arrival]:
        return run_alike(arrivals, self._new)

    def _new(self, batches: Batches) -> Batches:
        fresh: Batches = []
        for batch in self._fresh.run(batches):  # unlike any other of these
            is_new = pc.is_null(self._store.get(batch.select(self._keys)).column("#seen")).combine_chunks()
            fresh.append(filtered(batch, is_new))
            keys = fresh[-1].select(self._keys)
            self._store.upsert(keys.append_column("#seen", pa.array(np.ones(len(keys), np.int8))))
        return self._runner.run(fresh)

    @property
    def state_bytes(self) -> int:
        return self._store.memory_bytes

    def freeze(self) -> Frozen:
        return freeze_store(self._store)

    def forget(self, kept: list[Json]) -> None:
        hold(self._store, kept)

    def close(self) -> None:
        self._store.abandon()


class Sort(Stateless):
    """All rows in order, at the end."""

    def __init__(self, segment: Segment, around: Surroundings, state: Json) -> None:
        super().__init__(segment, around)
        self._runner = Runner(segment.op, around, self._runner.program, by_row=False)
        self._log = RowLog(around.folder, segment.input.arrow, around.options.memory)
        if state is not None:
            self._log.restore(state)

    def rows(self, arrivals: Iterable[Arrival]) -> list[Arrival]:
        for arrival in arrivals:
            self._log.add(arrival.batch)
        return []

    def finish(self) -> Batches:
        found = self._runner.run([self._log.batch(each) for each in self._log.kept])
        self._log.replace([])
        return found

    @property
    def state_bytes(self) -> int:
        return self._log.held_bytes

    def freeze(self) -> Frozen:
        kept = list(self._log.kept)
        return lambda: self._log.to_json(kept)

    def forget(self, kept: list[Json]) -> None:
        self._log.remove_others(files_of(kept))


# --- what steps share


def run_alike(arrivals: Iterable[Arrival], run: Callable[[Batches], Batches]) -> list[Arrival]:
    """Batches that came at one time, together."""
    return [Arrival(batch, watermark) for watermark, some in groupby(arrivals, key=lambda each: each.watermark)
            for batch in run([each.batch for each in some])]


def open_store(around: Surroundings, key: pa.Schema, value: pa.Schema, state: Json) -> LogStore:
    """A step's store, at the snapshot that a checkpoint names."""
    return LogStore.open(around.folder, key=key, value=value, memory=around.options.memory,
                         snapshot=None if state is None else as_int(as_map(state)["snapshot"]),
                         workers=MOST_WORKERS, keep=KEPT_STATES)


def freeze_store(store: LogStore) -> Frozen:
    taken = store.snapshot()

    def wait() -> Json:
        return {"snapshot": taken.wait().id}

    return wait


def hold(store: LogStore, kept: list[Json]) -> None:
    """Let the snapshots stay that epochs name."""
    held = []
    for state in kept:
        with suppress(ValueError, KeyError):
            held.append(as_int(as_map(state)["snapshot"]))
    store.hold(held)


def files_of(kept: list[Json]) -> set[str]:
    """The files of rows that checkpoints name."""
    named: set[str] = set()
    for state in kept:
        with suppress(ValueError, KeyError):
            named.update(as_map(as_map(state)["files"]))
    return named


def filtered(batch: pa.RecordBatch, mask: pa.Array) -> pa.RecordBatch:
    """The rows for which a mask is true, also of types that pyarrow's own `filter` cannot do (views of text)."""
    try:
        return batch.filter(mask)
    except pa.ArrowNotImplementedError:
        rows = pc.indices_nonzero(pc.fill_null(mask, False))
        return pa.RecordBatch.from_arrays([taken(column, rows) for column in batch.columns], schema=batch.schema)


def _behind(segment: Segment) -> Segment:
    """The ops behind the one with a state, as a segment of their own."""
    assert segment.state is not None
    source = placeholder(segment.state.schema)
    return Segment(over(segment.op, segment.state, source), source, None, segment.then)


def reads(program: Node) -> list[str]:
    """The columns of its input that a program needs."""
    return [name for node in walk_nodes(program) if isinstance(node, Scan) and node.source.data is None
            for name in node.source.columns]
