"""Joins of two streams in a job.

Rows of both sides are buffered. A pair is emitted when the second of its rows arrives: that row probes the rows of the
other side. A row that comes out without a match, or once for all its matches (left, right, outer, semi, anti, as-of),
is emitted when it is final: when the watermark says that no row to come can match it.

Retention. No row to come is earlier than the watermark W. With an interval [low, high] of right - left, a row of the
left at t is final once t < W - high, one of the right once t < W + low; in windows, once their window has closed. Then
it is dropped, unless rows of the other side that are not final yet may match it: where those wait, it stays as long as
they may, high or -low longer. An as-of join without a tolerance retains the last row of each key. Without a bound all
rows stay.

Lateness. In windows, a row is late if its window is closed; else if its time is before the watermark. Rows without a
time are counted and dropped.

State. Each side has immutable segments of rows (`JoinRows`), and the rows of a round probe those whose times overlap
their own. In a job, a segment's join table is built when it is first probed, and stays as long as the segment; under a
memory limit each batch probes on its own, and the table is built again each time. In a task of a Spark stream, the rows
with the keys of a batch are looked up, and become a table for that batch. Which rows were emitted follows from their
times and the watermark, so there are no flags.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary, finalize

import numpy as np
import pyarrow as pa

from scalein.arrow_rows import as_integers, filtered, from_numpy, taken
from scalein.compiler import compile_flow
from scalein.dtypes import I64
from scalein.errors import ComputeError
from scalein.exec.bounded import Program
from scalein.exec.error_location import located
from scalein.exec.fragments import Fragment, placeholder
from scalein.exec.join_build import build
from scalein.exec.local_state import MAX_SEGMENT_ROWS, backend_of
from scalein.exec.operator import (
    Batches,
    Context,
    Morsel,
    SnapshotFuture,
    Stateless,
    downstream_of,
    executes,
)
from scalein.ir import ops
from scalein.ir.exprs import Col, Expr, Lit, Named
from scalein.ir.internal_names import internal
from scalein.ir.ops.stream_join import WINDOW_COLUMNS, TimeBound, side_column
from scalein.ir.physical import JoinBuild, Pipeline, identity, walk_nodes
from scalein.ir.stages import FOREVER
from scalein.ir.unify import cast_to
from scalein.kernels.bind import conformed
from scalein.options import Options
from scalein.state.row_buffer import BufferSegment
from scalein.storage.checked_json import Json, as_int, as_map

MIN_COMPACTED_ROWS = 1 << 12
_TIME = internal("time")
LEFT, RIGHT = 0, 1
PARTS = ("", "right")  # of the state: the sides
RELEASES = 4  # in the time that rows are retained


class _OnTime(NamedTuple):
    """Rows of a side, and bounds of their times."""

    rows: pa.RecordBatch
    first: int
    last: int


class _Probe:
    """A join of rows with segments of the other side, which are its table."""

    def __init__(self, op: ops.StreamJoin) -> None:
        self.op, self.node = op, compile_flow(op)
        self._table: JoinBuild = next(table for node in walk_nodes(self.node) if isinstance(node, Pipeline)
                                      for _, table in node.joins)
        self._rows = Program(self._table.input)

    def over(self, batches: Batches, options: Options) -> Program:
        """The join with these rows as its table."""
        return self.sized(batches, options)[0]

    def sized(self, batches: Batches, options: Options) -> tuple[Program, int]:
        """The same, and the bytes of the table."""
        table = build(self._table, self._rows.run(batches, options), options)
        return Program(self.node, {id(self._table): table}), table.memory_bytes


class _Bytes:
    """A number of bytes."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, count: int) -> None:
        self.count += count


class _Side:
    """The rows of a side, and the tables of its segments."""

    def __init__(self, number: int, op: ops.StreamJoin, time: Expr, context: Context, waits: bool) -> None:
        schema, keys = op.inputs[number].schema, (op.left_keys, op.right_keys)[number]
        self.schema, self.waits, self.is_limited = schema.arrow, waits, context.options.memory is not None
        self.given = [side_column(number, name) for name in schema.names]
        self.keys = [key.name for key in keys if isinstance(key, Col)]
        self._time = time.name if isinstance(time, Col) else None
        self.rows = backend_of(context).join_rows(self.schema, self.keys, self._time, PARTS[number])
        self._programs: WeakKeyDictionary[BufferSegment, dict[int, Program]] = WeakKeyDictionary()  # by id of a probe
        self.tables = _Bytes()  # of their joins
        items = (*identity(schema), Named(_TIME, cast_to(time, I64)))
        self._times = Program(compile_flow(ops.Project(placeholder(schema), items)))

    def timed(self, batch: pa.RecordBatch, options: Options) -> Iterator[tuple[pa.RecordBatch, np.ndarray, int]]:
        """Rows that have a time, their times, and the number of the others: one batch, or none."""
        found = [batch] if self._time is not None else list(self._times.run([batch], options))
        for rows in found if len(found) < 2 else [pa.concat_batches(found)]:
            times = as_integers(rows.column(self._time or _TIME))
            rows = rows.select(self.schema.names)
            missing = times.null_count
            if missing:
                rows, times = filtered(rows, times.is_valid()), times.drop_null()
            yield rows, np.asarray(times), missing

    def overlapping(self, low: int, high: int) -> list[BufferSegment]:
        return [each for each in self.rows.segments if each.first <= high and each.last >= low]

    def program(self, segment: BufferSegment, probe: _Probe, of: _Side, batches: Batches, options: Options) -> Program:
        """The join with a segment's rows, at least those that have the keys of these batches of the other side."""
        if self.rows.reads_by_key:
            return probe.over([self.rows.read_matching(segment, [each.select(of.keys) for each in batches])], options)
        known = self._programs.setdefault(segment, {})
        found = known.get(id(probe))
        if found is None:
            found, size = probe.sized([self.rows.read(segment)], options)
            if not self.is_limited:
                known[id(probe)] = found
                self.tables.add(size)
                finalize(segment, self.tables.add, -size)
        return found


@executes(ops.BufferedJoin)
class StreamJoin(Stateless):
    """The join of two streams: see the head of this module."""

    defers_results = True

    def __init__(self, fragment: Fragment, context: Context, state: Json, emit: str = "final") -> None:
        super().__init__(downstream_of(fragment), context)
        assert isinstance(fragment.state, ops.BufferedJoin)
        self._context, self._op, self.reads = context, fragment.state, fragment.input.arrow.names
        join, self._schema = fragment.state.join, fragment.state.schema.arrow
        self._is_timed = join.bound is not None
        self._bound = bound = join.bound or TimeBound(Lit(0, I64), Lit(0, I64))  # all rows at one time
        join = replace(join, bound=bound)
        self._join, self._is_asof = join, bound.pick != "all"
        self._sides = (_Side(LEFT, join, bound.left, context, join.waiting[LEFT]),
                       _Side(RIGHT, join, bound.right, context, join.waiting[RIGHT]))
        self._pairs = None if self._is_asof or join.how in ("semi", "anti") else tuple(
            _Probe(replace(join, how="inner", builds_left=builds_left)) for builds_left in (False, True))
        keys = tuple(Named(internal(f"key{k}"), key) for k, key in enumerate(join.right_keys))
        keyed = ops.Project(join.right, (*identity(join.right.schema), *keys))
        of_right = replace(join, left=keyed, right=join.left, left_keys=join.right_keys, right_keys=join.left_keys,
                           keep=(), bound=bound.mirrored(), builds_left=False)
        self._unmatched = tuple(_Probe(replace(each, how="anti", keep=())) if side.waits and not self._is_asof else None
                                for each, side in zip((join, of_right), self._sides, strict=True))
        self._matched = _Probe(replace(join, how="semi")) if join.how == "semi" else None
        self._asof = _Probe(join) if self._is_asof else None
        self._compacted_rows = 0
        self._waiting: tuple[list[_OnTime], list[_OnTime]] = ([], [])  # of the round, by side
        self._waiting_rows = 0
        self._waits_since: int | None = None  # the watermark before the first of them
        self.peak_state_rows = 0
        self._taken_in = 0  # rows
        self._due = -FOREVER - 1
        self._advanced: int | None = None  # the watermark that was announced last
        if state is not None:
            self.restore(state)

    def restore(self, state: Json) -> None:
        about = as_map(state)
        for side, version in zip(self._sides, (about, about[PARTS[RIGHT]]), strict=True):
            side.rows.restore(version)
        self._advanced = None if about["watermark"] is None else as_int(about["watermark"])

    @property
    def due(self) -> int | None:  # type: ignore[override]
        if not self._is_timed:
            return None
        if self._is_asof and self._sides[LEFT].rows.rows < max(MIN_COMPACTED_ROWS, self._sides[RIGHT].rows.rows // 2):
            return FOREVER  # a table of all that is retained is built for few rows
        return self._due

    @property
    def state_bytes(self) -> int:
        return sum(side.rows.memory_bytes + side.tables.count for side in self._sides)

    @property
    def state_rows(self) -> int:
        """Rows that are retained."""
        return sum(side.rows.rows for side in self._sides) + self._waiting_rows

    @property
    def never_forgotten(self) -> int | None:
        return None if self._is_timed else self._taken_in

    def promise(self, watermark: int) -> int | None:
        """Times of either side in rows to come: a pair may have one that was retained."""
        bound = self._bound
        if self._is_timed and self._is_asof and bound.left_wait < FOREVER:
            return watermark - max(0, bound.left_wait)  # its rows have the times of the left side
        if not self._is_timed or max(bound.left_wait, bound.right_wait) >= FOREVER:
            return None
        if bound.is_window:
            return bound.window_start(watermark)
        return watermark - max(0, bound.left_wait, bound.right_wait)

    # --- rows

    def rows(self, morsels: Iterable[Morsel]) -> list[Morsel]:
        """Rows that give pairs wait for the end of the round, or until they are many: a table is built and probed once
        for all.
        """
        most = MAX_SEGMENT_ROWS if self._pairs is not None and self._context.options.memory is None else 0
        found: list[Morsel] = []
        for morsel in morsels:
            is_left = morsel.batch.schema.names[0] == self._sides[LEFT].given[0]
            number = LEFT if is_left else RIGHT
            if not self._waiting_rows:
                self._waits_since = morsel.watermark
            for some in self._on_time(number, morsel.batch, morsel.watermark):
                self._waiting[number].append(some)
                self._waiting_rows += some.rows.num_rows
            if self._waiting_rows > most:
                found += [Morsel(batch, self._waits_since) for batch in self.deferred()]
        return found

    def deferred(self) -> Batches:
        """Pairs of the rows that wait."""
        pairs: Batches = []
        for number in (LEFT, RIGHT):
            if self._waiting[number]:
                pairs += self._arrived(number)
        return self._runner.run(pairs)

    def _on_time(self, number: int, batch: pa.RecordBatch, watermark: int | None) -> Iterator[_OnTime]:
        """The rows of a batch that are not late."""
        side = self._sides[number]
        renamed = pa.RecordBatch.from_arrays([batch.column(name) for name in side.given], schema=side.schema)
        for rows, times, missing in side.timed(renamed, self._context.options):
            if missing:
                self._context.timeless(missing)
            if watermark is not None and self._is_timed and len(times):
                is_late = times < self._least_on_time(watermark)
                if is_late.any():
                    self._context.late(self._late(filtered(rows, from_numpy(is_late))))
                    rows, times = filtered(rows, from_numpy(~is_late)), times[~is_late]
            if len(times):
                yield _OnTime(conformed(rows, side.schema), int(times.min()), int(times.max()))

    def _arrived(self, number: int) -> Iterator[pa.RecordBatch]:
        """Pairs of new rows of a side with buffered ones; then the new ones are buffered."""
        given = list(self._waiting[number])
        self._waiting[number].clear()
        side, other, options = self._sides[number], self._sides[1 - number], self._context.options
        first, last = min(each.first for each in given), max(each.last for each in given)
        batches = [each.rows for each in given]
        if self._pairs is not None:
            for segment in other.overlapping(*self._range(number, first, last)):
                near = self._range(1 - number, segment.first, segment.last)
                probing = [each.rows for each in given if each.first <= near[1] and each.last >= near[0]]
                if probing:
                    program = other.program(segment, self._pairs[number], side, probing, options)
                    yield from self._run(program, probing)
        rows = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        side.rows.add(rows, first, last)
        self._waiting_rows -= rows.num_rows
        self._taken_in += rows.num_rows
        self.peak_state_rows = max(self.peak_state_rows, self.state_rows)

    def _late(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Late rows of a side as they are reported."""
        if not self._context.keeps_late:
            return rows
        schema = self._op.late_schema.arrow
        columns = [rows.column(f.name) if f.name in rows.schema.names else pa.nulls(rows.num_rows, f.type)
                   for f in schema]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def _run(self, program: Program, batches: Batches) -> Batches:
        try:
            return [batch for batch in program.run(batches, self._context.options) if batch.num_rows]
        except ComputeError as error:
            raise located(error, self._op, program.node) from None

    # --- time

    def _least_on_time(self, watermark: int) -> int:
        return self._bound.window_start(watermark) if self._bound.is_window else watermark

    def _range(self, number: int, first: int, last: int) -> tuple[int, int]:
        """The times of the other side that rows from `first` to `last` may match."""
        bound = self._bound if number == LEFT else self._bound.mirrored()
        if bound.is_window:
            return bound.window_start(first), bound.window_start(last) + bound.size
        return first + bound.low, last + bound.high

    def _final(self, number: int, watermark: int) -> int:
        """Rows of a side with earlier times are final at a watermark."""
        if self._bound.is_window:
            return self._least_on_time(watermark)
        return watermark - (self._bound.left_wait if number == LEFT else self._bound.right_wait)

    def _emitted_before(self, number: int, watermark: int) -> int:
        """Rows of a side with earlier times have come out, where they wait until they are final. Not yet those that
        were final when they came, with a time that is not before the watermark: others like them may come.
        """
        return min(self._final(number, watermark), self._least_on_time(watermark))

    def _dropped(self, number: int, watermark: int) -> int:
        """Rows of a side with earlier times are dropped: neither rows to come nor rows that wait can match them."""
        found, waits = self._final(number, watermark), self._sides[1 - number].waits
        if not self._bound.is_window and waits:
            found -= max(0, self._bound.right_wait if number == LEFT else self._bound.left_wait)
        return min(found, self._emitted_before(number, watermark)) if self._sides[number].waits else found

    def advance(self, watermark: int) -> Batches:
        found = self.deferred()
        if not self._is_timed:
            return found
        bound = self._bound
        span = sum(wait for wait in (bound.left_wait, bound.right_wait) if wait < FOREVER)
        release = watermark + max(1, span // RELEASES)
        self._due = bound.window_start(watermark) + bound.size if bound.is_window else release
        return found + self._released(watermark)

    def finish(self) -> Batches:
        found = self.deferred() + self._released(None)
        for side in self._sides:
            side.rows.replace([])
        return found

    def _released(self, watermark: int | None) -> Batches:
        """The rows that are final; those that nothing can match any more are dropped."""
        found: Batches = []
        for number, side in enumerate(self._sides):
            if side.waits:
                first, end = (None if mark is None else self._emitted_before(number, mark)
                              for mark in (self._advanced, watermark))
                found += self._emitted(number, list(self._within(side, first, end)))
        if watermark is not None:
            self._advanced = watermark
            for number, side in enumerate(self._sides):
                self._drop(side, self._dropped(number, watermark))
            if self._is_asof and self._bound.low <= -FOREVER:
                limit = watermark - max(0, self._bound.high)
                if not self._sides[RIGHT].rows.keep_newest(limit):
                    self._compact(limit)
        return self._runner.run(found)

    def _within(self, side: _Side, first: int | None, end: int | None) -> Iterator[pa.RecordBatch]:
        """The rows with times in [first, end)."""
        for each in side.rows.segments:
            is_begun, is_over = first is None or each.first >= first, end is None or each.last < end
            if (end is not None and each.first >= end) or (first is not None and each.last < first):
                continue
            for rows, times, _ in side.timed(side.rows.read(each), self._context.options):
                if not (is_begun and is_over):
                    mask = np.ones(len(times), bool) if first is None else times >= first
                    rows = filtered(rows, from_numpy(mask if end is None else mask & (times < end)))
                if rows.num_rows:
                    yield rows

    def _drop(self, side: _Side, limit: int) -> None:
        """Drop rows before a time; of a segment, only if they are about half of it."""
        held: list[BufferSegment] = []
        is_same = True
        for each in side.rows.segments:
            if each.last < limit:
                is_same = False
                continue
            if each.first < limit and 2 * (limit - each.first) > each.last - each.first + 1:
                is_same = False
                for rows, times, _ in side.timed(side.rows.read(each), self._context.options):
                    rows, times = filtered(rows, from_numpy(times >= limit)), times[times >= limit]
                    if len(times):
                        held.append(BufferSegment(int(times.min()), int(times.max()), rows.num_rows, rows))
                continue
            held.append(each)
        if not is_same:
            side.rows.replace(held)

    def _emitted(self, number: int, final: Batches) -> Batches:
        """What comes out of rows of a side that are final."""
        if not final:
            return []
        side, other, options = self._sides[number], self._sides[1 - number], self._context.options
        least, greatest = zip(*((int(times.min()), int(times.max())) for batch in final
                                for _, times, _ in side.timed(batch, options)), strict=True)
        segments = other.overlapping(*self._range(number, min(least), max(greatest)))
        if self._asof is not None:
            keys = [each.select(side.keys) for each in final]
            rows = [other.rows.read_matching(each, keys) for each in segments]
            return self._run(self._asof.over(rows, options), final)
        unmatched = self._unmatched[number]
        assert unmatched is not None
        found: Batches = []
        if not segments:
            final = self._run(unmatched.over([], options), final)
        for each in segments:
            if self._matched is not None:
                found += self._run(other.program(each, self._matched, side, final, options), final)
            final = self._run(other.program(each, unmatched, side, final, options), final)
            if not final:
                break
        if self._join.how == "semi":
            return found
        return [self._padded(number, batch) for batch in final]

    def _padded(self, number: int, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Rows without a match, with null in the columns of the other side; the left keys hold the right ones."""
        origins = {name: name for name in batch.schema.names}
        if number == RIGHT:
            keys = {key.name: internal(f"key{k}") for k, key in enumerate(self._join.left_keys) if isinstance(key, Col)}
            windows = {name: name for name in WINDOW_COLUMNS if self._bound.is_window}
            origins = {**keys, **dict(self._join.keep), **windows}
        columns = [batch.column(origins[field.name]) if field.name in origins else pa.nulls(batch.num_rows, field.type)
                   for field in self._schema]
        columns = [c if c.type == field.type else c.cast(field.type)
                   for c, field in zip(columns, self._schema, strict=True)]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _compact(self, limit: int) -> None:
        """Of the right side's rows before a time, only the last of each key can match a row of the left."""
        side = self._sides[RIGHT]
        old = [each for each in side.rows.segments if each.last < limit]
        count = sum(each.rows for each in old)
        if count < max(MIN_COMPACTED_ROWS, 2 * self._compacted_rows):
            return
        rows = pa.concat_batches([side.rows.read(each) for each in old])
        ((rows, times, _),) = side.timed(rows, self._context.options)
        order = np.argsort(times, kind="stable")[::-1]  # the last row first
        newest = pa.RecordBatch.from_arrays([taken(c, from_numpy(order)) for c in rows.columns], schema=side.schema)
        names = [internal(f"key{k}") for k in range(len(self._join.right_keys))]
        keys = tuple(Named(name, key) for name, key in zip(names, self._join.right_keys, strict=True))
        keyed = ops.Project(placeholder(self._join.right.schema), (*identity(self._join.right.schema), *keys))
        firsts = Program(compile_flow(ops.Distinct(keyed, tuple(names))))
        found = [batch.select(side.schema.names) for batch in self._run(firsts, [newest])]
        rows = conformed(pa.concat_batches(found), side.schema)
        ((rows, times, _),) = side.timed(rows, self._context.options)
        order = np.argsort(times, kind="stable")
        rows = pa.RecordBatch.from_arrays([taken(c, from_numpy(order)) for c in rows.columns], schema=side.schema)
        one = BufferSegment(int(times.min()), int(times.max()), rows.num_rows, rows)
        gone = set(map(id, old))
        side.rows.replace([one, *(each for each in side.rows.segments if id(each) not in gone)])
        self._compacted_rows = rows.num_rows

    # --- state

    def snapshot(self) -> SnapshotFuture:
        left, right = (side.rows.snapshot() for side in self._sides)
        watermark = self._advanced
        return lambda: {**left(), PARTS[RIGHT]: right(), "watermark": watermark}

    def retain(self, kept: list[Json]) -> None:
        versions = [each for each in kept if isinstance(each, dict)]
        self._sides[LEFT].rows.retain(versions)
        self._sides[RIGHT].rows.retain([each.get(PARTS[RIGHT]) for each in versions])
