"""Session windows in a job: parts of sessions wait until the watermark says that no row to come can join them.

What waits are partial groups, each with its first time and its end, or rows, for aggregates as large as their input. A
session [first, last + gap) is final once the watermark is after last + gap: then it is emitted and forgotten. Where
much waits, that is done less often than the watermark moves, so that looking for final sessions takes a share of the
time only.

Lateness. The rows of a source batch are merged with the open sessions and with one another; then those are late that
are only in sessions which are final already. So a row that is behind may connect two sessions that are open. Rows that
keep the watermark's promise are never late, and meet no session that is final: most batches have no others, and are not
looked at any further. Before any other row, everything that is final is emitted.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalein.arrow_rows import as_integers, filtered, from_numpy
from scalein.compiler import compile_flow
from scalein.dtypes import Schema
from scalein.errors import ComputeError
from scalein.exec.aggregate_operator import FOREVER, AggregateOperator, Finalizer, Partial, aggregate_node
from scalein.exec.bounded import PreAggregationProgram, Program, SessionTableProgram
from scalein.exec.changelog_aggregate import key_columns
from scalein.exec.close_batches import MAX_SHARES, KeyShares, Part, most_bytes
from scalein.exec.error_location import located
from scalein.exec.event_time import extent
from scalein.exec.fragments import Fragment
from scalein.exec.local_state import backend_of
from scalein.exec.operator import Batches, Context, FragmentRunner, Morsel, SnapshotFuture
from scalein.exec.running_aggregate import most_partitioned
from scalein.exec.session_rows import SessionJoin, spans_of
from scalein.exec.session_table import SessionTable
from scalein.ir import ops
from scalein.ir.exprs import Expr, columns
from scalein.ir.partials import two_phase
from scalein.ir.physical import Node, identity
from scalein.ir.windows import Session
from scalein.state.interfaces import WindowBuffer
from scalein.state.row_buffer import BufferSegment
from scalein.storage.checked_json import Json

SMALL_ROWS = 1 << 16  # that wait: then looking for final sessions takes no time
CLOSE_SHARE = 3  # else it takes at most 1/3 of the time
TABLE_SHARE = 16  # and 1/16 where sessions of few keys are in resident tables
_FIRST, _END = "window_start", "window_end"
_SLICE = "#slice"


class _Sessions(AggregateOperator, ABC):
    """What partial groups and rows have in common."""

    _log: WindowBuffer
    _finish: Finalizer
    _by: tuple[Expr, ...]  # the keys of what waits
    _slices = _FIRST  # the column with the first time of what waits
    defers_results = True

    def _begin(self, fragment: Fragment, context: Context) -> None:
        assert isinstance(fragment.state, ops.Aggregate)
        assert isinstance(self._window, Session)
        assert self._late is not None
        self._gap, self._lateness = self._window.gap, self._late
        self._keys = fragment.state.keys
        kept = fragment.before.schema.names if context.keeps_late else self._names
        self._rows = Schema(tuple(field for field in fragment.before.schema if field.name in kept))
        two = two_phase(spans_of(self._rows, self._keys, self._window))
        self._spans, self._merged_spans = Program(two.partial), Program(two.combine)
        self._span_names = [*(key.name for key in self._keys), _FIRST, _END, "#acc0"]
        self._join = SessionJoin(self._rows, self._keys, self._window.time)
        self._postponed: int | None = None  # the watermark that was not acted upon
        self._closed_s, self._took_s = 0.0, 0.0  # when that was done last, and how long it took
        self._forget_bounds()

    def _forget_bounds(self) -> None:
        """Bounds of what waits, from its first times."""
        firsts = [each.first for each in self._log.segments]
        self._least_first = min(firsts, default=FOREVER)
        self._least_end = FOREVER if not firsts else self._least_first + self._gap

    # --- what differs

    @abstractmethod
    def _take(self, morsels: Iterable[Morsel]) -> None:
        """Take rows of the fragment's input."""

    @abstractmethod
    def _take_checked(self, rows: pa.RecordBatch) -> None:
        """Take rows of the aggregation's input."""

    @abstractmethod
    def flush(self) -> None:
        """Put everything that has arrived into the log."""

    @abstractmethod
    def _open_spans(self) -> Batches:
        """The sessions that wait, or parts of them."""

    @abstractmethod
    def _closed(self, given: Batches, watermark: int) -> tuple[Batches, Batches, Batches]:
        """Of what waits, what is final, as input of `_finish`, and the rest, with the limits of its sessions."""

    # --- rows

    def rows(self, morsels: Iterable[Morsel]) -> list[Morsel]:
        given, results = iter(self._sound(morsels)), Batches()
        behind: list[Morsel] = []
        while True:
            self._take(self._prompt(given, behind))
            if not behind:
                return [Morsel(batch, None) for batch in results]
            results += self._taken_behind(behind.pop())

    def _prompt(self, morsels: Iterator[Morsel], behind: list[Morsel]) -> Iterator[Morsel]:
        """Morsels whose rows all have a time that is known to be within the watermark's promise, up to the first other
        one, which goes to `behind`.
        """
        column = self._lateness.column
        for morsel in morsels:
            if not morsel.batch.num_rows:
                continue
            times = None if column is None else morsel.batch.column(column)
            if column is None or times is None or times.null_count:
                behind.append(morsel)
                return
            within = (morsel.least, morsel.greatest) if morsel.column == column else extent(times)
            if within is None or (morsel.watermark is not None and within[0] < morsel.watermark):
                behind.append(morsel)
                return
            self._extend(within[0])
            self._counted += morsel.batch.num_rows
            yield Morsel(morsel.batch, morsel.watermark, column, *within)

    def _extend(self, least: int) -> None:
        self._least_first = min(self._least_first, least)
        self._least_end = min(self._least_end, least + self._gap)

    def _taken_behind(self, morsel: Morsel) -> Batches:
        """Take a batch of which some rows may be late; the results that are due before it."""
        results: Batches = []
        for rows, times in self._lateness.with_times(morsel.batch, self._context.options):
            if times.null_count:
                self._context.timeless(times.null_count)
                rows, times = filtered(rows, times.is_valid()), times.drop_null()
            if not rows.num_rows:
                continue
            mark, moments = morsel.watermark, np.asarray(times)
            if mark is not None and moments.min() < mark:
                results += self._close(mark)
                if moments.min() < mark - self._gap:
                    rows = self._without_late(rows, mark)
            if rows.num_rows:
                self._extend(int(moments.min()))  # perhaps of a late row: it is a bound
                self._counted += rows.num_rows
                self._take_checked(rows.select(self._names))
        return results

    def _without_late(self, rows: pa.RecordBatch, watermark: int) -> pa.RecordBatch:
        """Rows that are in sessions which are not final, with one another and with those that wait."""
        options = self._context.options
        spans = [*self._spans.run([rows], options), *self._open_spans()]
        found = list(self._merged_spans.run([batch.select(self._span_names) for batch in spans], options))
        alive = [filtered(batch, pc.greater_equal(as_integers(batch.column(_END)), watermark)) for batch in found]
        good, late = self._join.split([rows], alive, self._gap, options)
        for batch in late:
            self._context.late(batch)
        return pa.concat_batches(good) if good else rows.slice(0, 0)

    # --- time

    def _share(self) -> int:
        """Looking for final sessions takes at most this part of the time, where much waits."""
        return CLOSE_SHARE

    @property
    def next_end(self) -> int | None:  # type: ignore[override]
        return None if self._least_end == FOREVER else self._least_end

    @property
    def state_bytes(self) -> int:
        return self._log.memory_bytes

    def promise(self, watermark: int) -> int | None:
        """A session to come begins with one that is open, or with a row that is at most a gap behind."""
        return min(self._least_first, watermark - self._gap)

    def advance(self, watermark: int) -> Iterator[pa.RecordBatch]:
        self._postponed = watermark
        yield from self.deferred()

    def deferred(self) -> Iterator[pa.RecordBatch]:
        mark = self._postponed
        if mark is None:
            return
        waits = self._context.state is None and time.monotonic() - self._closed_s < (self._share() - 1) * self._took_s
        if not waits or self._counted + sum(each.rows for each in self._log.segments) <= SMALL_ROWS:
            yield from self._close_iter(mark)

    def finish(self) -> Iterator[pa.RecordBatch]:
        yield from self._close_iter(FOREVER)

    def _close(self, watermark: int) -> Batches:
        return list(self._close_iter(watermark))

    def _close_iter(self, watermark: int) -> Iterator[pa.RecordBatch]:
        """The results of sessions that are final, which are forgotten; part by part if memory is short."""
        self._postponed = None
        if self._least_end >= watermark and watermark != FOREVER:
            return
        began = time.monotonic()
        self.flush()
        open_spans: Batches = []
        with self._log.taken() as waiting:
            for part in self._parts(waiting):
                given = self._given(waiting, part)
                if not given:
                    continue
                final, rest, spans = (given, [], []) if watermark == FOREVER else self._closed(given, watermark)
                for batch in rest:
                    self._add(batch)
                open_spans += [batch.select([_FIRST, _END]) for batch in spans]
                if final and watermark == FOREVER:
                    yield from self._finish.all(final)
                elif final:  # each session once
                    yield from self._finish.each(final)
        self._least_first = self._least_end = FOREVER
        for batch in open_spans:
            if batch.num_rows:
                self._least_first = min(self._least_first, pc.min(as_integers(batch.column(0))).as_py())
                self._least_end = min(self._least_end, pc.min(as_integers(batch.column(1))).as_py())
        self._closed_s = time.monotonic()
        self._took_s = self._closed_s - began

    def _parts(self, waiting: Sequence[BufferSegment]) -> Iterator[Part]:
        """What waits, in parts by their keys if memory is short."""
        most, size = most_bytes(self._context.options.memory), self._log.size_bytes(waiting)
        has_keys = any(map(columns, self._by))
        shares = 1 if most is None or not has_keys else max(1, min(MAX_SHARES, -(-size // most)))
        return (Part(-FOREVER, FOREVER, share, shares) for share in range(shares))

    def _given(self, waiting: Sequence[BufferSegment], part: Part) -> Batches:
        """What waits of the keys of a part, read piece by piece: all of it may be more than fits into memory."""
        given: Batches = []
        for batch in (batch for each in waiting for batch in self._log.read(each)):
            if part.shares > 1:
                batch = filtered(batch, from_numpy(self._shares.has(batch, part, self._context.options)))
            if batch.num_rows:
                given.append(batch)
        return given

    def _add(self, batch: pa.RecordBatch) -> None:
        found = extent(batch.column(self._slices))
        if found is not None:
            self._log.add(batch, *found)

    @cached_property
    def _shares(self) -> KeyShares:
        return KeyShares(self._log.schema, self._by)

    # --- checkpoints

    def restore(self, state: Json) -> None:
        self._log.restore(state)
        self._postponed, self._took_s = None, 0.0
        self._forget_bounds()
        if state is not None:
            self._count_from(state)

    def snapshot(self) -> SnapshotFuture:
        wait, about = self._log.snapshot(self._not_buffered()), self._counting
        return lambda: {**wait(), **about}

    def _not_buffered(self) -> list[BufferSegment]:
        """What waits elsewhere than in the buffer."""
        return []

    def retain(self, kept: list[Json]) -> None:
        self._log.retain(kept)


class PartialSessions(_Sessions, Partial):
    """Partial groups wait: each of some rows of a session. In a job without a memory limit they are the records of
    resident tables (`session_table.py`), once rows have come whose times are a column of the source.
    """

    _table: SessionTableProgram | None = None

    def __init__(self, fragment: Fragment, context: Context, root: Node, state: Json) -> None:
        Partial.__init__(self, fragment, context, root)
        if context.state is None and context.options.memory is None and context.columns is None:
            self._table = SessionTableProgram(aggregate_node(root), self._two.partial, context.options)
        self._by = self._two.final.keys
        self._pre_aggregation = PreAggregationProgram(self._two.partial, complete=aggregate_node(root))
        self._combine = FragmentRunner(fragment.op, context, Program(self._two.combine), by_row=False)
        schema = self._two.partial.schema.arrow
        keys = [key.name for key in self._two.partial.table.keys]
        self._log = backend_of(context).buffer(schema, keys, _FIRST, None)
        self._begin(fragment, context)
        self.restore(state)

    def _take(self, morsels: Iterable[Morsel]) -> None:
        if self._table is not None:
            self._take_into(self._table, [morsel.batch for morsel in morsels])
            return
        for batch in self._counted_in(morsel.batch for morsel in morsels):
            self._add(batch)
        if self._pre_aggregation.partitioned_bytes > most_partitioned(self._context.options.memory):
            self.flush()

    def _take_into(self, sessions: SessionTableProgram, batches: Batches) -> None:
        try:
            self._row = sessions.add(batches, self._context.options, self._row)
        except ComputeError as error:
            raise located(error, self._fragment.op, sessions.node) from None
        if self._log.segments and sessions.table.is_prepared:
            with self._log.taken() as waiting:
                for each in waiting:
                    sessions.table.put(self._log.read(each))

    def _share(self) -> int:
        return CLOSE_SHARE if self._resident is None or self._resident.is_partitioned else TABLE_SHARE

    @property
    def _resident(self) -> SessionTable | None:
        """The tables, if they have all sessions: else they have none, and all that waits is in the buffer."""
        found = None if self._table is None else self._table.table
        return None if found is None or not found.is_prepared or self._log.segments else found

    @property
    def state_bytes(self) -> int:
        return super().state_bytes + (0 if self._resident is None else self._resident.bytes)

    def finish(self) -> Iterator[pa.RecordBatch]:
        if self._log.segments or self._resident is not None:
            yield from super().finish()
            return
        try:  # nothing waits elsewhere: results from the workers' tables
            yield from self._finish.downstream(list(self._pre_aggregation.drain_complete()))
        except ComputeError as error:
            raise located(error, self._fragment.op, self._pre_aggregation.node) from None

    def _close_iter(self, watermark: int) -> Iterator[pa.RecordBatch]:
        found = self._resident
        if found is None or self._table is None:
            yield from super()._close_iter(watermark)
            return
        self._postponed = None
        if self._least_end >= watermark and watermark != FOREVER:
            return
        began = time.monotonic()
        try:
            closed = found.close(watermark)
        except ComputeError as error:
            raise located(error, self._fragment.op, self._table.node) from None
        self._least_first, self._least_end, self._counted = closed.least_first, closed.least_end, found.count
        yield from self._finish.downstream(closed.results)
        self._closed_s = time.monotonic()
        self._took_s = self._closed_s - began

    def _take_checked(self, rows: pa.RecordBatch) -> None:
        partials = self._of_checked([rows])
        if self._resident is not None:
            self._resident.put(partials)
            return
        for batch in partials:
            self._add(batch)

    def flush(self) -> None:
        if self._resident is not None:
            return
        for batch in self._taken():
            self._add(batch)
        self._log.compact(self._combined)

    def restore(self, state: Json) -> None:
        if self._resident is not None:
            self._resident.clear()
        super().restore(state)

    def _not_buffered(self) -> list[BufferSegment]:
        found = ((batch, extent(batch.column(_FIRST))) for batch in self._resident.partials()) if self._resident else ()
        return [BufferSegment(*within, batch.num_rows, batch) for batch, within in found if within]

    def _combined(self, waiting: list[BufferSegment]) -> Iterator[pa.RecordBatch]:
        for part in self._parts(waiting):
            yield from self._combine.each(self._given(waiting, part))

    def _open_spans(self) -> Batches:
        if self._resident is not None:
            return self._resident.partials()
        self.flush()
        return [batch for each in self._log.segments for batch in self._log.read(each)]

    def _closed(self, given: Batches, watermark: int) -> tuple[Batches, Batches, Batches]:
        final: Batches = []
        rest: Batches = []
        for batch in self._combine.run(given):
            is_final = pc.less(as_integers(batch.column(_END)), watermark)
            final.append(filtered(batch, is_final))
            rest.append(filtered(batch, pc.invert(is_final)))
        final, rest = ([batch for batch in found if batch.num_rows] for found in (final, rest))
        return final, rest, rest


class BufferedSessions(_Sessions):
    """Rows wait, for aggregates as large as their input, or with text."""

    _slices = _SLICE

    def __init__(self, fragment: Fragment, context: Context, root: Node, state: Json) -> None:
        super().__init__(fragment, context)
        needed = tuple(item for item in identity(fragment.before.schema) if item.name in self._names)
        self._before = FragmentRunner(ops.Project(fragment.before, needed), context)
        checked = compile_flow(self._checked_op)
        self._finish = Finalizer(self._checked_op, checked, aggregate_node(checked), aggregate_node(checked), context)
        assert isinstance(fragment.state, ops.Aggregate)
        self._by = tuple(key.expr for key in fragment.state.keys)
        self.reads = self._reads(self._before.program.node)
        schema = self._before.program.node.schema.arrow.append(pa.field(_SLICE, pa.int64()))
        self._log = backend_of(context).buffer(schema, key_columns(fragment.state), _SLICE, None)
        self._begin(fragment, context)
        held = Schema(tuple(field for field in fragment.before.schema if field.name in self._names))
        assert isinstance(self._window, Session)
        self._held_spans = Program(two_phase(spans_of(held, self._keys, self._window)).partial)
        self._held_join = SessionJoin(held, self._keys, self._window.time)
        self._held_names = held.names
        self.restore(state)

    def _take(self, morsels: Iterable[Morsel]) -> None:
        for batch in self._before.run(morsel.batch for morsel in morsels):
            self._take_checked(batch)

    def _take_checked(self, rows: pa.RecordBatch) -> None:
        for found in self._lateness.timed(rows, self._context.options):
            self._add(found.rows.append_column(_SLICE, found.times))

    def flush(self) -> None:
        self._log.coalesce()

    def _held(self) -> Batches:
        return [batch.select(self._held_names) for each in self._log.segments for batch in self._log.read(each)]

    def _open_spans(self) -> Batches:
        return list(self._held_spans.run(self._held(), self._context.options))

    def _closed(self, given: Batches, watermark: int) -> tuple[Batches, Batches, Batches]:
        options = self._context.options
        rows = [batch.select(self._held_names) for batch in given]
        spans = list(self._held_spans.run(rows, options))
        is_final = [pc.less(as_integers(batch.column(_END)), watermark) for batch in spans]
        final = [filtered(batch, mask) for batch, mask in zip(spans, is_final, strict=True)]
        if not any(batch.num_rows for batch in final):
            return [], given, spans
        inside, outside = self._held_join.split(rows, final, self._gap, options)
        rest: Batches = []
        for batch in outside:
            rest += [found.rows.append_column(_SLICE, found.times) for found in self._lateness.timed(batch, options)]
        return inside, rest, [filtered(batch, pc.invert(mask)) for batch, mask in zip(spans, is_final, strict=True)]
