"""Aggregations of jobs and Spark tasks, by where partial groups (`partials.py`) are held until they are final:

ChangelogAggregate with `emit="changes"`: in a keyed table (`changelog_aggregate.py`)
RunningAggregate   without windows: in a state store, until the end (`running_aggregate.py`)
WindowedAggregate  windows close together: partial groups are buffered as batches, by slice of time, finished together,
                   and dropped slice by slice. Batches are combined when there are many. (A log needs no index and no
                   deletes, its checkpoints are incremental, and closing many windows at once, as after a restart, is
                   one pass.)
SlidingAggregate   sliding windows over few slices: rows go to a ring of slices in each key's record, as in `collect`
                   (`exec/ring_preaggregate.py`). Rows outside the ring are buffered in the log, and so is all that a
                   checkpoint restored; such windows are finished from the partial groups of both. A checkpoint writes
                   the whole ring: it is small, or else the log is used. A ring does not number rows, so aggregates that
                   depend on their order are a WindowedAggregate.
BufferedAggregate  holistic aggregates (lists, distinct values, quantiles): the rows themselves are buffered
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import NoReturn

import numpy as np
import pyarrow as pa

from scalein.compiler import compile_flow
from scalein.errors import BadArgument, ComputeError
from scalein.exec import ring, speculation
from scalein.exec.aggregate_operator import FOREVER, Finalizer, Partial, aggregate_node
from scalein.exec.bounded import PreAggregationProgram, Program, RingPreAggregationProgram
from scalein.exec.changelog_aggregate import ChangelogAggregate, HolisticChangelog, key_columns
from scalein.exec.close_batches import Part
from scalein.exec.combine import Combiner
from scalein.exec.error_location import located
from scalein.exec.event_time import extent
from scalein.exec.fragments import Fragment
from scalein.exec.local_state import backend_of
from scalein.exec.operator import (
    Batches,
    Context,
    FragmentRunner,
    Morsel,
    Operator,
    executes,
)
from scalein.exec.running_aggregate import RunningAggregate
from scalein.exec.session_changelog import SessionChangelog
from scalein.exec.session_windows import BufferedSessions, PartialSessions
from scalein.exec.window_close import WindowCloser
from scalein.ir import ops
from scalein.ir.partials import fits
from scalein.ir.passes.aggregate_layout import aggregate_table
from scalein.ir.physical import Node, Scan, identity
from scalein.ir.windows import Session
from scalein.state.row_buffer import BufferSegment
from scalein.storage.checked_json import Json

AHEAD_SLICES = 3  # least slices of a ring besides those of one window, for out-of-order times and the delay
MIN_OUTSIDE_ROWS = 1 << 16  # rows outside the ring that make it wider
MAX_RING_SLICES = 32
RING_BYTES = 1 << 28  # of all records; a checkpoint writes them whole
_SLICE = "#slice"


@executes(ops.Aggregate)
def open_aggregate(fragment: Fragment, context: Context, state: Json, emit: str) -> Operator:
    """The operator that suits an aggregation's table and how its results are emitted."""
    root = fragment.program("whole", lambda: fragment.op)
    table, op = aggregate_node(root).table, fragment.state
    assert isinstance(op, ops.Aggregate)
    if op.window is not None and op.window.is_session:
        if emit == "changes":
            check_session_changes(op, context.holds_rows)
            return SessionChangelog(fragment, context, root, state)
        return (BufferedSessions if context.holds_rows else PartialSessions)(fragment, context, root, state)
    if emit == "changes" and not fits(table):
        rows = backend_of(context).rows_by_key(fragment.before.schema.arrow, key_columns(op))
        if rows is None:
            _refuse_changes(op)
        return HolisticChangelog(fragment, context, state, rows)
    if context.holds_rows:
        return BufferedAggregate(fragment, context, state)
    if emit == "changes":
        return ChangelogAggregate(fragment, context, root, state)
    if table.window is None:
        return RunningAggregate(fragment, context, root, state)
    if context.takes_partials:
        return WindowedAggregate(fragment, context, root, state)
    # In a ring rows have no numbers.
    is_ring = ring.fits(table) and not any(acc.needs_order for acc in table.accs)
    return (SlidingAggregate if is_ring else WindowedAggregate)(fragment, context, root, state)


def _refuse_changes(op: ops.Aggregate) -> NoReturn:
    """Aggregates as large as their input are computed once, from buffered rows, when they are final."""
    named = next(each for each in op.aggs if not fits(aggregate_table((), None, (each,))))
    raise BadArgument(f'emit="changes" cannot follow {named.agg.fn}, whose value needs all rows of its group',
                      at=named.agg.at if named.agg.at.line else op.at, found=named.name,
                      hint='give emit="final"')


def check_session_changes(op: ops.Aggregate, holds_rows: bool) -> None:
    """Changes of sessions follow event time, so what depends on the source's order would be another value; and each
    session is a record of a fixed size.
    """
    assert isinstance(op.window, Session)
    what = "groups with ttl=" if op.window.is_ttl else "sessions"
    for named in op.aggs:
        table, at = aggregate_table((), None, (named,)), named.agg.at if named.agg.at.line else op.at
        if not fits(table):
            _refuse_changes(op)
        if any(acc.needs_order for acc in table.accs):
            raise BadArgument(f'emit="changes" takes the rows of {what} by event time, and {named.agg.fn} depends on '
                              "the order of the source", at=at, found=named.name,
                              hint='give emit="final", or take arg_min(time), arg_max(time)')
        if table.has_heap or table.has_sides:
            raise BadArgument(f'emit="changes" of {what} cannot follow {named.agg.fn} of text', at=at,
                              found=named.name, hint='give emit="final"')
    if holds_rows:
        raise BadArgument(f'emit="changes" of {what} cannot follow so many aggregates', at=op.at,
                          found=str(len(op.aggs)), hint='give emit="final", or several flows')


class WindowedAggregate(WindowCloser, Partial):
    """Windows of aggregates of a fixed size: partial groups wait."""

    _slices = "window_start"

    def __init__(self, fragment: Fragment, context: Context, root: Node, state: Json) -> None:
        super().__init__(fragment, context, root)
        self._combine = FragmentRunner(fragment.op, context, Program(self._two.combine), by_row=False)
        self._by, self._slice = self._two.final.keys, self._two.combine.table.window
        self._columns = [name for name in self._two.partial.schema.names if name != "window_end"]
        schema = pa.schema([self._two.partial.schema.arrow.field(name) for name in self._columns])
        keys = [key.name for key in self._two.partial.table.keys]
        self._log = backend_of(context).buffer(schema, keys, self._slices, Combiner(self._two, context.options))
        self.restore(state)
        self._speculative: PreAggregationProgram | None = None
        self._speculative_row = 0  # the number of the next row, if the speculation holds
        self._speculation_pause = 0  # rounds without speculation that are left

    def rows(self, morsels: Iterable[Morsel]) -> list[Morsel]:
        self._keep(self._partials(morsels))
        return []

    def flush(self) -> None:
        self._keep(self._taken())

    # --- speculation: the kernels that aggregate the rows report their times

    def can_speculate(self, column: str, rows: int) -> bool:
        """Whether `rows` rows, with their times in `column`, may be aggregated before they are checked for late rows.

        It pays for many rows, and is wasted if one is late.
        """
        self._speculation_pause = max(0, self._speculation_pause - 1)
        return (self._late is not None and self._late.column == column and self._check is None
                and isinstance(self._two.partial.input, Scan)  # else a user's function would see rows twice
                and rows >= speculation.MIN_ROWS and not self._speculation_pause)  # fmt: skip

    def is_late(self, time: int, watermark: int) -> bool:
        """Whether a row is late, or one of its windows should have been emitted before it came."""
        if self._late is None:
            return False
        end = self._late.last_end(watermark)
        return time < self._late.least_open(watermark) or (end > self._closed and time < end)

    def speculate(self, batches: Iterator[pa.RecordBatch],
                  taken: Callable[[], Batches]) -> list[tuple[int, int]] | None:
        """Aggregate rows apart from all others; the least and the greatest time of each batch, or None if it failed.
        After the last batch `taken` returns all of them.
        """
        self._speculative = self._speculative or PreAggregationProgram(self._two.partial, track_times=True)
        is_short = self._context.options.memory is not None  # of memory: groups must not become many
        row = self._row
        found: list[tuple[int, int]] = []
        for some in ([batch] for batch in batches) if is_short else [batches]:
            bounds = None
            with suppress(ComputeError):  # perhaps of a late row, that would not have come so far
                row = self._speculative.add(some, self._context.options, row)
                bounds = self._speculative.time_bounds(some if isinstance(some, list) else taken())
            if bounds is None or (is_short and self._speculative.count > self._most_groups):
                self.end_speculation(False)
                return None
            found += bounds
        self._speculative_row = row
        return found

    def end_speculation(self, is_good: bool) -> None:
        """Retain the speculative groups, or discard them."""
        assert self._speculative is not None
        if is_good:
            has_many = self._speculative.count > speculation.MAX_GROUPS
            self._speculation_pause = speculation.PAUSE_ROUNDS if has_many else 0
            self._row = self._speculative_row
            self._keep(list(self._speculative.drain()))
        else:
            self._speculation_pause, self._speculative = speculation.PAUSE_ROUNDS, None

    def _keep(self, partials: Batches) -> None:
        for batch in partials:
            self._add(batch.select(self._columns))
        self._log.compact(self._combined)

    def _combined(self, waiting: list[BufferSegment]) -> Iterator[pa.RecordBatch]:
        for part in self._parts(waiting, Part(-FOREVER, FOREVER), self._slice):
            for batch in self._combine.run(self._given(waiting, part, self._slice)):
                yield batch.select(self._columns)


class SlidingAggregate(WindowedAggregate):
    """Windows that slide: rows are counted into a ring, what it does not cover waits as partial groups."""

    defers_results = True
    _ring: RingPreAggregationProgram | None = None  # from the first row on

    def __init__(self, fragment: Fragment, context: Context, root: Node, state: Json) -> None:
        super().__init__(fragment, context, root, state)
        self._node = aggregate_node(root)
        assert self._window is not None
        slices = self._node.table.window_slices
        self._ring_slices = 1 << (slices + AHEAD_SLICES - 1).bit_length()
        self._outside = self._inside = 0  # rows since the ring began
        memory = context.options.memory
        self._most_bytes = RING_BYTES if memory is None else min(RING_BYTES, memory // 4)
        assert self._late is not None
        self._has_ring = self._late.column is not None  # else the slices to cover are unknown
        # Workers need not wait for each other at each window, if nothing but the sink wants it.
        self._puts_off = not fragment.consumers and memory is None
        self._closed_before: Batches = []  # windows of a ring that is no more

    def rows(self, morsels: Iterable[Morsel]) -> list[Morsel]:
        if not self._has_ring:
            return super().rows(morsels)
        if self._ring is None:
            self._ring = RingPreAggregationProgram(self._node, self._two.partial, self._ring_slices,
                                                   self._context.options)
        checked: Batches = []
        inside: Batches = []
        outside: Batches = []
        for morsel in self._arrived(morsels, checked):
            is_inside = self._ring.ring.try_cover(morsel.least, morsel.greatest)
            (inside if is_inside else outside).append(morsel.batch)
        try:
            self._keep(self._ring.add(inside, self._context.options.workers))
        except ComputeError as error:
            raise located(error, self._fragment.op, self._ring.node) from None
        self._keep([*self._counted_in(outside), *self._of_checked(checked)])
        self._outside += sum(batch.num_rows for batch in outside)
        self._inside += sum(batch.num_rows for batch in inside)
        if not self._puts_off:
            self._closed_before = self.deferred()
        is_narrow = self._outside > max(MIN_OUTSIDE_ROWS, self._inside // 4)
        if is_narrow or self._ring.ring.bytes > self._most_bytes:
            self._closed_before = self.deferred()
            self._keep(self._ring.ring.drain_partials())
            self._ring, self._ring_slices, self._outside, self._inside = None, 2 * self._ring_slices, 0, 0
            self._has_ring = is_narrow and self._ring_slices <= MAX_RING_SLICES
        return []

    def can_speculate(self, column: str, rows: int) -> bool:
        return not self._has_ring and super().can_speculate(column, rows)

    @property
    def next_end(self) -> int | None:  # type: ignore[override]
        waits, ring_ = super().next_end, self._ring  # others look at it while it changes
        earliest = None if ring_ is None else ring_.ring.earliest
        if earliest is None:
            return waits
        assert self._window is not None
        end = max(self._window.end_of(earliest), self._window.first_open_end(self._closed))
        return end if waits is None else min(waits, end)

    @property
    def state_bytes(self) -> int:
        ring_ = self._ring
        return super().state_bytes + (0 if ring_ is None else ring_.ring.bytes)

    def _finished(self, after: int, end: int) -> Iterator[pa.RecordBatch]:
        if self._ring is None:
            yield from super()._finished(after, end)
            return
        found = self._ring.ring
        if not found.has_split_keys and not any(each.first < end for each in self._log.segments):
            found.close(after, end)
            yield from [] if self._puts_off else self.deferred()
            return
        yield from self.deferred()
        yield from super()._finished(after, end)

    def deferred(self) -> Batches:
        """Results of closed windows that were not emitted yet."""
        found, self._closed_before = self._closed_before, []
        if self._ring is None:
            return found
        try:
            return found + self._finish.downstream(self._ring.ring.drain_closed())
        except ComputeError as error:
            raise located(error, self._fragment.op, self._ring.node) from None

    def _waiting(self, end: int) -> list[BufferSegment]:
        return super()._waiting(end) + self._held(end)

    def _held(self, end: int) -> list[BufferSegment]:
        """What the ring has of slices before a time."""
        batches = [] if self._ring is None else self._ring.ring.partials(end)
        found = ((batch.select(self._columns), extent(batch.column(self._slices))) for batch in batches)
        return [BufferSegment(*within, batch.num_rows, batch) for batch, within in found if within]

    def _drop(self, first_open: int) -> None:
        super()._drop(first_open)
        if self._ring is None:
            return
        found = self._ring.ring
        found.clear_before(first_open)
        found.repartition(self._context.options.workers)
        if found.is_mostly_expired:
            self._keep(found.drain_partials())

    def finish(self) -> Iterator[pa.RecordBatch]:
        yield from super().finish()
        yield from self.deferred()
        self._ring, self._has_ring = None, False

    def _not_buffered(self) -> list[BufferSegment]:
        return self._held(FOREVER)


class BufferedAggregate(WindowCloser):
    """Aggregates as large as their input: rows wait, in the columns that they need."""

    _slices = _SLICE

    def __init__(self, fragment: Fragment, context: Context, state: Json) -> None:
        super().__init__(fragment, context)
        needed = tuple(item for item in identity(fragment.before.schema) if item.name in self._names)
        self._before = FragmentRunner(ops.Project(fragment.before, needed), context)
        root = compile_flow(self._checked_op)
        self._finish = Finalizer(self._checked_op, root, aggregate_node(root), aggregate_node(root), context)
        assert isinstance(fragment.state, ops.Aggregate)
        self._by = tuple(key.expr for key in fragment.state.keys)
        self.reads = self._reads(self._before.program.node)
        schema = self._before.program.node.schema.arrow.append(pa.field(_SLICE, pa.int64()))
        self._log = backend_of(context).buffer(schema, key_columns(fragment.state), _SLICE, None)
        self._size = aggregate_node(root).table.slice_size
        self.restore(state)

    def rows(self, morsels: Iterable[Morsel]) -> list[Morsel]:
        for batch in self._in_order(morsels):
            if self._late is None or self._window is None:
                self._add(batch.append_column(_SLICE, pa.array(np.zeros(batch.num_rows, np.int64))))
                continue
            for found in self._late.timed(batch, self._context.options):
                starts = self._window.slice_starts(np.asarray(found.times), self._size)
                self._add(found.rows.append_column(_SLICE, pa.array(starts)))
        return []

    def flush(self) -> None:
        self._log.coalesce()

    def _in_order(self, morsels: Iterable[Morsel]) -> Iterator[pa.RecordBatch]:
        """Rows of the group's input: batches in which all rows are in time, together, and others between them."""
        clean: Batches = []
        for morsel in morsels:
            checked: Batches = []
            clean += [found.batch for found in self._arrived([morsel], checked)]
            if checked:
                yield from self._before.run(clean)
                yield from checked
                clean = []
        yield from self._before.run(clean)


