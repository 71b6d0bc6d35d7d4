"""Operators of a job: fragments at work. Batches in, batches out, and state that a checkpoint can name.

An operator is made for the stateful op of its fragment, by the function that `@executes` registers. Its input has a
watermark: no row to come is earlier; `promise` says which watermark its output has then (`rounds.py` keeps both).

Threads: only the job's thread calls an operator, which parallelises its work over worker threads. `rows` consumes
morsels one by one while they are in the cache; `advance` announces the watermark, `finish` the end of the input.
`flush` flushes what has arrived into the state; `snapshot` captures that state in microseconds and returns a future
that another thread waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import pyarrow as pa

from scalein.compiler import compile_flow
from scalein.errors import ComputeError
from scalein.exec.bounded import Program
from scalein.exec.error_location import located
from scalein.exec.fragments import Fragment, over, placeholder
from scalein.ir import ops
from scalein.ir.partials import StateColumns
from scalein.ir.physical import Node, Scan, walk_nodes
from scalein.options import Options
from scalein.state import LogStore
from scalein.state.interfaces import StateBackend, StateFuture
from scalein.state.migration import Migration
from scalein.state.row_buffer import RowBuffer
from scalein.storage.checked_json import Json, as_int, as_map

Batches = list[pa.RecordBatch]
SnapshotFuture = Callable[[], Json]  # waits until the state is durable, and returns its version


class Morsel(NamedTuple):
    """A batch, the watermark before its source batch, and, if known, the bounds of its times. An operator that uses
    event time gets the watermark of its own input, others that of the sources.
    """

    batch: pa.RecordBatch
    watermark: int | None
    column: str = ""
    least: int = 0
    greatest: int = 0


MAX_WORKERS = 16  # that a store is opened for: jobs may be scaled up
RETAINED_SNAPSHOTS = 2  # of a store, besides those that epochs name: one may be in flight


@dataclass
class Context:
    """What operators get from the driver: options, which change only at barriers, a folder, and the side outputs."""

    options: Options
    folder: Path
    late: Callable[[pa.RecordBatch], None]
    keeps_late: bool  # late rows go to a sink, with all their columns
    timeless: Callable[[int], None]
    failed: Callable[[pa.RecordBatch, int, ComputeError], None] | None  # a row of a batch; None: an error ends the job
    has_checkpoints: bool = True
    columns: StateColumns | None = None  # of partial groups, if some began later than others
    migration: Migration | None = None  # of a state with other columns
    holds_rows: bool = False  # of a group, instead of partial groups
    state: StateBackend | None = None  # None: in the folder
    takes_partials: bool = False  # aggregations get partial groups, which other tasks have made, in time


class Operator(Protocol):
    """A fragment at work."""

    reads: list[str]  # columns of its input that it needs
    emits_changes: bool  # rows of a changelog, with an `op`
    defers_results: bool  # some results wait for the end of the round: see `deferred`

    @property
    def is_done(self) -> bool:
        """Whether no further row can change anything."""

    @property
    def next_end(self) -> int | None:
        """The end of the earliest open window that has rows."""

    @property
    def due(self) -> int | None:
        """The watermark that must be announced as soon as it is reached; None: at the end of the round."""

    @property
    def state_bytes(self) -> int:
        """The memory that its state takes."""

    def rows(self, morsels: Iterable[Morsel]) -> list[Morsel]: ...

    def promise(self, watermark: int) -> int | None:
        """The watermark of its output, once that of its input was announced; None: rows of any time may come."""

    def deferred(self) -> Iterable[pa.RecordBatch]:
        """At the end of a round, the results that it has put off."""

    def advance(self, watermark: int) -> Iterable[pa.RecordBatch]:
        """The results that are final at this watermark; the caller consumes the whole iterator."""

    def finish(self) -> Iterable[pa.RecordBatch]:
        """The remaining results, in the same way."""

    def flush(self) -> None:
        """Flush what has arrived into the state. A failed `snapshot` costs one checkpoint, but a flush may fail
        halfway: an error ends the job.
        """

    def snapshot(self) -> SnapshotFuture: ...

    def retain(self, kept: list[Json]) -> None:
        """Remove the state that no retained checkpoint names."""

    def close(self) -> None: ...


@runtime_checkable
class StatefulOperator(Operator, Protocol):
    """An operator that takes over the state of a checkpoint also between two rounds, in place of its own."""

    def restore(self, state: Json) -> None: ...


@runtime_checkable
class Growing(Operator, Protocol):
    """An operator whose state may grow with every row."""

    @property
    def never_forgotten(self) -> int | None:
        """The keys or rows that its state has taken in, in this run; None if time makes it forget them."""


class FragmentRunner:
    """A program over batches. With `by_row`, results of a row do not depend on other rows, so a failing row can be left
    out. Otherwise an error ends the job: halves of a batch would give other groups, or another order.
    """

    def __init__(self, op: ops.Op, context: Context, program: Program | None = None, by_row: bool = True) -> None:
        self._op, self._context, self._by_row = op, context, by_row
        self.program = program or Program(compile_flow(op))

    def run(self, batches: Iterable[pa.RecordBatch]) -> Batches:
        """The results; failing rows go to the sink of failed rows, if there is one."""
        batches = [batch for batch in batches if batch.num_rows]
        try:
            return list(self.program.run(batches, self._context.options))
        except ComputeError as error:
            if self._context.failed is None or not self._by_row:
                raise located(error, self._op, self.program.node) from None
        return [out for batch in batches for _, found in self.bisected(batch) for out in found]

    def each(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The results one by one, of batches that are taken as the program needs them; an error ends the job."""
        try:
            yield from self.program.run(batches, self._context.options)
        except ComputeError as error:
            raise located(error, self._op, self.program.node) from None

    def passing(self, batch: pa.RecordBatch) -> Batches:
        """The rows of a batch that do not fail; the others go to the sink of failed rows."""
        return [some for some, _ in self.bisected(batch)]

    def bisected(self, batch: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, Batches]]:
        """Parts of a batch without its failing rows, and their results: what fails is halved down to a row."""
        waiting = [(0, batch.num_rows)]
        while waiting:
            first, count = waiting.pop()
            some = batch if count == batch.num_rows else batch.slice(first, count)
            try:
                yield some, list(self.program.run([some], self._context.options))
            except ComputeError as error:
                if self._context.failed is None:
                    raise located(error, self._op, self.program.node) from None
                if count == 1:
                    self._context.failed(batch, first, located(error, self._op, self.program.node))
                else:
                    half = count // 2
                    waiting += [(first + half, count - half), (first, half)]


Maker = Callable[[Fragment, Context, Json, str], Operator]  # of the fragment's state in a checkpoint, and of `emit`
_MAKERS: dict[type[ops.Op], Maker] = {}


def executes(*kinds: type[ops.Op]) -> Callable[[Maker], Maker]:
    """Registers what makes the operator of fragments whose stateful op is one of these."""

    def register(maker: Maker) -> Maker:
        _MAKERS.update(dict.fromkeys(kinds, maker))
        return maker

    return register


def open_operator(fragment: Fragment, context: Context, state: Json, emit: str) -> Operator:
    """The operator of a fragment, with its state in a checkpoint; `emit` is how it emits its results."""
    if fragment.state is None:
        return Stateless(fragment, context)
    return _MAKERS[type(fragment.state)](fragment, context, state, emit)


class Stateless:
    """Stateless ops."""

    next_end: int | None = None
    due: int | None = None
    is_done = emits_changes = defers_results = False

    @property
    def state_bytes(self) -> int:
        return 0

    def __init__(self, fragment: Fragment, context: Context) -> None:
        self._runner = FragmentRunner(fragment.op, context)
        self.reads = reads(self._runner.program.node)

    def rows(self, morsels: Iterable[Morsel]) -> list[Morsel]:
        return run_by_watermark(morsels, self._runner.run)

    def promise(self, watermark: int) -> int | None:
        return watermark

    def deferred(self) -> Batches:
        return []

    def advance(self, watermark: int) -> Batches:
        return []

    def finish(self) -> Iterable[pa.RecordBatch]:
        return []

    def flush(self) -> None:
        pass

    def snapshot(self) -> SnapshotFuture:
        return lambda: None

    def retain(self, kept: list[Json]) -> None:
        pass

    def close(self) -> None:
        pass


@executes(ops.Limit)
class Limit(Stateless):
    """The first rows; then no more."""

    def __init__(self, fragment: Fragment, context: Context, state: Json, emit: str = "final") -> None:
        super().__init__(downstream_of(fragment), context)
        assert isinstance(fragment.state, ops.Limit)
        self._before = FragmentRunner(fragment.before, context)
        self.reads = reads(self._before.program.node)
        self._left = fragment.state.count if state is None else as_int(state)

    @property
    def is_done(self) -> bool:  # type: ignore[override]
        return not self._left

    def rows(self, morsels: Iterable[Morsel]) -> list[Morsel]:
        return run_by_watermark(morsels, self._taken)

    def _taken(self, batches: Batches) -> Batches:
        taken = []
        for batch in self._before.run(batches) if self._left else []:
            if self._left:
                taken.append(batch.slice(0, self._left))
                self._left -= taken[-1].num_rows
        return self._runner.run(taken)

    def snapshot(self) -> SnapshotFuture:
        left = self._left
        return lambda: left


@executes(ops.OuterJoin)
class Blocking(Stateless):
    """What needs all rows (a sort, a right or outer join): they are buffered, and its rows come at the end."""

    def __init__(self, fragment: Fragment, context: Context, state: Json, emit: str = "final") -> None:
        super().__init__(fragment, context)
        self._runner = FragmentRunner(fragment.op, context, self._runner.program, by_row=False)
        schema = fragment.input.arrow
        if context.has_checkpoints:  # a flow that goes on from one may need other columns
            self.reads = schema.names
        self._names = [name for name in schema.names if name in self.reads] or schema.names[:1]
        schema = pa.schema([schema.field(name) for name in self._names])
        self._log = RowBuffer(context.folder, schema, context.options.memory)
        if state is not None:
            self._log.restore(state)

    def rows(self, morsels: Iterable[Morsel]) -> list[Morsel]:
        for morsel in morsels:
            self._log.add(morsel.batch.select(self._names))
        return []

    def promise(self, watermark: int) -> int | None:
        return None

    def finish(self) -> Iterator[pa.RecordBatch]:
        yield from self._runner.each(map(self._log.batch, self._log.segments))
        self._log.replace([])

    @property
    def state_bytes(self) -> int:
        return self._log.memory_bytes

    def snapshot(self) -> SnapshotFuture:
        kept = list(self._log.segments)
        return lambda: self._log.to_json(kept)

    def retain(self, kept: list[Json]) -> None:
        self._log.remove_unreferenced(files_of(kept))


# --- shared by operators


def run_by_watermark(morsels: Iterable[Morsel], run: Callable[[Batches], Batches]) -> list[Morsel]:
    """Runs the batches of one watermark together."""
    return [Morsel(batch, watermark) for watermark, some in groupby(morsels, key=lambda each: each.watermark)
            for batch in run([each.batch for each in some])]


def open_store(context: Context, key: pa.Schema, value: pa.Schema, state: Json, reserved_bytes: int = 0) -> LogStore:
    """An operator's store, at the snapshot that a checkpoint names; some of its memory is `reserved` for others."""
    memory = None if context.options.memory is None else context.options.memory - reserved_bytes
    snapshot = None if state is None else as_int(as_map(state)["snapshot"])
    store = LogStore.open(context.folder, key=key, value=value, memory=memory,
                          snapshot=snapshot if context.migration is None else None,
                          workers=MAX_WORKERS, keep=RETAINED_SNAPSHOTS)
    if context.migration is None or snapshot is None:
        return store
    try:
        context.migration.fill_store(store, pa.schema([*key, *value]), snapshot, memory)
    except BaseException:
        store.abandon()
        raise
    return store


def restore_rows(context: Context, rows: RowBuffer, state: Json) -> None:
    """The rows that a checkpoint names."""
    if context.migration is None:
        rows.restore(state)
    else:
        context.migration.fill_rows(rows, state)


def snapshot_store(store: LogStore) -> StateFuture:
    taken = store.snapshot()

    def wait() -> dict[str, Json]:
        return {"snapshot": taken.wait().id}

    return wait


def hold(store: LogStore, kept: Sequence[Json]) -> None:
    """Retain the snapshots that epochs name."""
    held = []
    for state in kept:
        with suppress(ValueError, KeyError):
            held.append(as_int(as_map(state)["snapshot"]))
    store.hold(held)


def files_of(kept: Sequence[Json]) -> set[str]:
    """The files of rows that checkpoints name."""
    named: set[str] = set()
    for state in kept:
        with suppress(ValueError, KeyError):
            named.update(as_map(as_map(state)["files"]))
    return named


def downstream_of(fragment: Fragment) -> Fragment:
    """The ops after the stateful one, as a fragment of their own."""
    assert fragment.state is not None
    source = placeholder(fragment.state.schema)
    return Fragment(over(fragment.op, fragment.state, source), source, None)


def reads(program: Node) -> list[str]:
    """The columns of its input that a program needs."""
    return [name for node in walk_nodes(program) if isinstance(node, Scan) and node.source.data is None
            for name in node.source.columns]
