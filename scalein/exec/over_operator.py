"""Over in a job: values over other rows, as time passes.

Rows are buffered until the watermark has passed them (`event_time_rows.py`), and computed in the order of time, by the
same plan as in a bounded run, after the rows of their keys that their frames reach back to. What a key remembers is in
records of the backend, by key and slot: in the slots from 1 on its last rows, as many as frames by rows and `lag` reach
back; in slot 0 how many rows there were, and what running aggregates have come to, each a number that the next rows are
combined with. Frames in time have the rows of that time in a buffer, all of which are looked at when rows are computed.
Where they are many, that is done less often than time advances, so that it takes a share of the time only; under a
memory limit, it is done for one share of the keys after the other.

Rows of windows (`group_by(..., window).top_k`) are computed when their window closes, and leave nothing. `distinct`
within a time remembers when a key was last kept, with `ttl` when it last came, and forgets it once that is too long
ago: hints in the order of time say which keys to look at.

What must wait for the end of the input (`lead`, other orders, whole partitions) is `Blocking`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalein.arrow_rows import as_integers, as_numpy, filtered, from_numpy, taken
from scalein.dtypes import I64, Field, Schema
from scalein.exec.close_batches import MAX_SHARES, KeyShares, Part, most_bytes
from scalein.exec.event_time_rows import EventTimeRows, in_time_order
from scalein.exec.fragments import Fragment, placeholder
from scalein.exec.local_state import backend_of
from scalein.exec.operator import (
    Batches,
    Blocking,
    Context,
    FragmentRunner,
    Morsel,
    Operator,
    SnapshotFuture,
    Stateless,
    downstream_of,
    executes,
    reads,
)
from scalein.ir import ops
from scalein.ir.aggregates import AGGREGATES
from scalein.ir.exprs import Agg, Col, Expr, Named, type_of
from scalein.ir.internal_names import internal
from scalein.ir.ops.over import SPACED, WINDOWED
from scalein.ir.over import Frame, OverCall
from scalein.ir.physical import identity
from scalein.ir.stages import FOREVER
from scalein.kernels.bind import conformed
from scalein.storage.checked_json import Json, as_map

SLOT, COUNT = internal("slot"), internal("count")
ROWS, HINTS = "rows", "hints"  # parts of a version
HINT_ROWS = 1 << 14  # of a segment of hints
MANY_ROWS = 1 << 16  # of the frames in time that are retained: then computing rows takes at most 1/3 of the time
COMPUTE_SHARE = 3


@executes(ops.Over)
def open_over(fragment: Fragment, context: Context, state: Json, emit: str) -> Operator:
    assert isinstance(fragment.state, ops.Over)
    match fragment.state.kind:
        case "":
            return Blocking(fragment, context, state, emit)
        case kind if kind == WINDOWED:
            return WindowedOver(fragment, context, state, emit)
        case kind if kind == SPACED:
            return SpacedOver(fragment, context, state, emit)
        case _:
            return TimedOver(fragment, context, state, emit)


class _EventTimeOver(Stateless, ABC):
    """Rows buffered by a time, with their keys and arguments as columns."""

    lead = 0  # the watermark that releases a row is so much later than its time

    def __init__(self, fragment: Fragment, context: Context, state: Json, emit: str = "final") -> None:
        super().__init__(downstream_of(fragment), context)
        assert isinstance(fragment.state, ops.Over)
        self._op = op = fragment.state
        self._context = context
        source = op.input.schema
        given = [expr for expr, _ in op.exprs()]
        made = {expr: Named(internal(f"o{k}"), expr) for k, expr in enumerate(given) if not isinstance(expr, Col)}
        project = ops.Project(fragment.before, (*identity(source), *made.values()))
        self._before = FragmentRunner(project, context)
        self.reads = reads(self._before.program.node)
        self._schema = project.schema
        self._columns = {expr: expr.name if isinstance(expr, Col) else made[expr].name for expr in given}
        self._keys = [self._columns[key] for key in op.keys]
        self._rows = EventTimeRows(context, self._schema.arrow, self._keys, op.time, op.late_schema.names)

    def _column(self, expr: Expr) -> Col:
        field = self._schema[self._columns[expr]]
        return Col(field.name, field.dtype, field.nullable)

    def _calls(self) -> tuple[OverCall, ...]:
        """The calls over columns of the buffered rows."""
        return tuple(replace(call, agg=replace(call.agg, args=tuple(map(self._column, call.agg.args))))
                     for call in self._op.calls)

    def _runner_of(self, schema: Schema, calls: Iterable[OverCall]) -> FragmentRunner:
        """What computes calls over rows with these columns; in memory, so that rows stay in their order.

        Among the rows are remembered ones, in which columns may be null that never are in the input.
        """
        op = self._op
        known = {item.name: item.expr for item in identity(schema)}
        keys = tuple(known[name] for name in self._keys)
        by = tuple(replace(by, expr=known[self._columns[by.expr]]) for by in op.by)
        over = ops.Over(placeholder(schema), keys, by, tuple(_over_columns(call, known) for call in calls),
                        op.nulls_last, at=op.at)
        return FragmentRunner(over, self._in_memory, by_row=False)

    @property
    def _in_memory(self) -> Context:
        """Few rows at a time are computed: what is spilled would be buffered twice, and come in another order."""
        return replace(self._context, options=replace(self._context.options, memory=None))

    def rows(self, morsels: Iterable[Morsel]) -> list[Morsel]:
        for morsel in morsels:
            mark = None if morsel.watermark is None else morsel.watermark + self.lead
            for batch in self._before.run([morsel.batch]):
                self._add(batch, mark)
        return []

    def _add(self, batch: pa.RecordBatch, watermark: int | None) -> None:
        self._rows.add(batch, watermark)

    def advance(self, watermark: int) -> Batches:
        rows = self._rows.release(watermark + self.lead)
        return [] if rows is None else self._emitted(rows)

    def finish(self) -> Iterable[pa.RecordBatch]:
        rows = self._rows.release(None)
        return [] if rows is None else self._emitted(rows)

    def _emitted(self, rows: pa.RecordBatch) -> Batches:
        computed = self._computed(rows)
        schema = self._op.schema.arrow
        found = pa.RecordBatch.from_arrays([*(rows.column(name) for name in self._op.input.schema.names), *computed],
                                           names=schema.names)
        return self._runner.run([conformed(found, schema)])

    @abstractmethod
    def _computed(self, rows: pa.RecordBatch) -> list[pa.Array]:
        """The calls' columns, for rows in the order of time."""

    # --- state

    def restore(self, state: Json) -> None:
        self._rows.restore(None if state is None else as_map(state).get(ROWS))

    @property
    def state_bytes(self) -> int:
        return self._rows.memory_bytes

    def flush(self) -> None:
        self._rows.flush()

    def snapshot(self) -> SnapshotFuture:
        wait = self._rows.snapshot()
        return lambda: {ROWS: wait()}

    def retain(self, kept: list[Json]) -> None:
        self._rows.retain(_parts(kept, ROWS))

    def close(self) -> None:
        self._rows.close()


def _over_columns(call: OverCall, known: dict[str, Expr]) -> OverCall:
    """The call over columns of the same names, some of which may be null where its own could not."""
    args = tuple(known[arg.name] if isinstance(arg, Col) else arg for arg in call.agg.args)
    may_be_null = any(arg.nullable for arg in args) and not all(arg.nullable for arg in call.agg.args)
    is_value = call.agg.fn not in AGGREGATES or not AGGREGATES[call.agg.fn].never_null
    return replace(call, agg=replace(call.agg, args=args, nullable=call.agg.nullable or (may_be_null and is_value)))


def _parts(kept: list[Json], name: str) -> list[Json]:
    return [as_map(version).get(name) for version in kept if isinstance(version, dict)]


class WindowedOver(_EventTimeOver):
    """Rows of windows: each window is computed when it closes, and then done. Where an aggregation gives the rows, that
    is when the watermark of its results has passed the window's end.
    """

    def __init__(self, fragment: Fragment, context: Context, state: Json, emit: str = "final") -> None:
        super().__init__(fragment, context, state, emit)
        self._whole = self._runner_of(self._schema, self._calls())
        self._window = None if self._op.assigned is None else self._op.assigned.window
        # In a task of a Spark stream the rows come with their windows.
        self._is_assigned = self._window is not None or (
            ops.LAST_WINDOW in self._op.input.schema.names and not fragment.lead)
        self.lead = int(self._is_assigned)  # a window is closed at the watermark that is its end
        self.restore(state)

    def promise(self, watermark: int) -> int | None:
        """Rows of open windows are to come, whatever their times in these."""
        return watermark if self._window is None else max(self._window.least_open(watermark), -(1 << 63))

    def _add(self, batch: pa.RecordBatch, watermark: int | None) -> None:
        """Of a row whose windows are all closed, the last one is late; a closed window before it is not."""
        if watermark is not None and self._is_assigned:
            ends = np.asarray(as_integers(batch.column(self._op.time)))
            is_closed = ends < watermark
            if is_closed.any():
                is_last = np.asarray(batch.column(ops.LAST_WINDOW))
                batch = filtered(batch, from_numpy(~is_closed | is_last))
        self._rows.add(batch, watermark)

    def _computed(self, rows: pa.RecordBatch) -> list[pa.Array]:
        found = pa.Table.from_batches(self._whole.run([rows]))
        return [_one(found, call.name) for call in self._op.calls]


def _whole(batches: Batches, schema: pa.Schema) -> pa.RecordBatch:
    """One batch of them all."""
    if len(batches) == 1:
        return batches[0]
    empty = pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)
    return pa.concat_batches([empty, *(conformed(each, schema) for each in batches)])


def _one(table: pa.Table, name: str) -> pa.Array:
    chunks = table.column(name)
    return chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()


class _Remembering(_EventTimeOver):
    """With records by key and slot."""

    def __init__(self, fragment: Fragment, context: Context, state: Json, emit: str = "final") -> None:
        super().__init__(fragment, context, state, emit)
        arrow = self._schema.arrow
        self._key_schema = pa.schema([*(arrow.field(name) for name in self._keys), pa.field(SLOT, pa.int64(), False)])
        self._values = self._value_schema()
        self._records = backend_of(context).records(self._key_schema, self._values, placed_by=self._keys)
        self._hints = backend_of(context).buffer(self._hint_schema(), self._keys, self._op.time, None, HINTS)
        of_keys = placeholder(Schema.from_arrow(pa.schema([arrow.field(name) for name in self._keys])))
        self._distinct = None
        if self._keys:
            self._distinct = FragmentRunner(ops.Distinct(of_keys, tuple(self._keys)), self._in_memory, by_row=False)
        self.restore(state)

    def restore(self, state: Json) -> None:
        super().restore(state)
        self._records.restore(state)
        self._hints.restore(None if state is None else as_map(state).get(HINTS))

    @abstractmethod
    def _value_schema(self) -> pa.Schema:
        """What a record holds."""

    @abstractmethod
    def _hint_schema(self) -> pa.Schema:
        """What the buffer of hints holds: keys, their times, and what frames in time aggregate."""

    def _remembered(self, rows: pa.RecordBatch, slots: int) -> pa.RecordBatch:
        """The records of the keys of some rows, in slots 0 to `slots`."""
        keys = rows.select(self._keys)
        if self._distinct is not None:
            keys = _whole(self._distinct.run([keys]), keys.schema)
            count = keys.num_rows
        else:
            count = 1
        numbers = from_numpy(np.repeat(np.arange(count), slots + 1))
        arrays = [taken(column, numbers) for column in keys.columns]
        asked = pa.RecordBatch.from_arrays([*arrays, from_numpy(np.tile(np.arange(slots + 1), count))],
                                           schema=self._key_schema)
        return self._records.get(asked)

    def _add_hints(self, rows: pa.RecordBatch) -> None:
        """Rows in the order of time."""
        times = np.asarray(as_integers(rows.column(self._op.time)))
        for start in range(0, rows.num_rows, HINT_ROWS):
            part = rows.slice(start, HINT_ROWS)
            self._hints.add(conformed(part.select(self._hints.schema.names), self._hints.schema), int(times[start]),
                            int(times[start + part.num_rows - 1]))

    @property
    def state_bytes(self) -> int:
        return self._rows.memory_bytes + self._records.memory_bytes + self._hints.memory_bytes

    def flush(self) -> None:
        self._rows.flush()
        self._hints.coalesce()

    def snapshot(self) -> SnapshotFuture:
        wait, rows, hints = self._records.snapshot(), self._rows.snapshot(), self._hints.snapshot()
        return lambda: {**wait(), ROWS: rows(), HINTS: hints()}

    def retain(self, kept: list[Json]) -> None:
        self._records.retain(kept)
        self._rows.retain(_parts(kept, ROWS))
        self._hints.retain(_parts(kept, HINTS))

    def close(self) -> None:
        for each in (self._records, self._rows, self._hints):
            each.close()


class SpacedOver(_Remembering):
    """When each key last came, or was last kept."""

    def __init__(self, fragment: Fragment, context: Context, state: Json, emit: str = "final") -> None:
        super().__init__(fragment, context, state, emit)
        (call,) = self._op.calls
        (within,) = call.agg.params
        assert isinstance(within, int)
        self._within, self._is_from_any = within, call.agg.fn == "after_quiet"
        arrow = self._schema.arrow
        self._given = pa.schema([arrow.field(name) for name in dict.fromkeys([*self._keys, self._op.time])])
        self._marks = self._runner_of(Schema.from_arrow(self._given), (call,))
        self._last = None
        if self._keys:
            last = ops.Distinct(placeholder(Schema.from_arrow(self._given)), tuple(self._keys))
            self._last = FragmentRunner(last, self._in_memory, by_row=False)

    def _value_schema(self) -> pa.Schema:
        return pa.schema([pa.field(COUNT, pa.int64(), False)])  # the time

    def _hint_schema(self) -> pa.Schema:
        arrow = self._schema.arrow
        return pa.schema([arrow.field(name) for name in dict.fromkeys([*self._keys, self._op.time])])

    def advance(self, watermark: int) -> Batches:
        found = super().advance(watermark)
        self._forget(watermark - self._within)
        return found

    def _forget(self, until: int) -> None:
        """Forget keys whose last time is not after this: the next row is kept in any case."""
        found = [batch for each in self._hints.segments if each.first <= until for batch in self._hints.read(each)]
        self._hints.drop(until + 1)
        for batch in found:
            is_due = np.asarray(as_integers(batch.column(self._op.time))) <= until
            if not is_due.any():
                continue
            batch = filtered(batch, from_numpy(is_due))
            known = self._remembered(conformed(batch, self._given), 0)
            is_old = np.asarray(known.column(COUNT)) <= until
            if is_old.any():
                self._records.delete(filtered(known, from_numpy(is_old)).select(self._key_schema.names))

    def _computed(self, rows: pa.RecordBatch) -> list[pa.Array]:
        known = self._remembered(rows, 0)
        kind = self._given.field(self._op.time).type
        times = known.column(COUNT)
        times = times.view(kind) if pa.types.is_timestamp(kind) else times.cast(kind)
        columns = [times if name == self._op.time and name not in self._keys else known.column(name)
                   for name in self._given.names]
        before = pa.RecordBatch.from_arrays(columns, schema=self._given)
        both = pa.concat_batches([before, conformed(rows.select(self._given.names), self._given)])
        (call,) = self._op.calls
        marks = _one(pa.Table.from_batches(self._marks.run([both])), call.name).slice(before.num_rows)
        kept = rows if self._is_from_any else filtered(rows, marks)
        if kept.num_rows:
            last = self._last_of_keys(kept)
            self._add_hints(in_time_order([last], self._op.time) if self._is_from_any else kept)
            numbers = as_integers(last.column(self._op.time))
            slots = from_numpy(np.zeros(last.num_rows, np.int64))
            self._records.put(pa.RecordBatch.from_arrays(
                [*(last.column(name) for name in self._keys), slots, numbers],
                schema=pa.schema([*self._key_schema, *self._values])))
        return [marks]

    def _last_of_keys(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The last row of each key."""
        if self._last is None:
            return rows.slice(rows.num_rows - 1)
        backwards = from_numpy(np.arange(rows.num_rows)[::-1].copy())
        keys = pa.RecordBatch.from_arrays([taken(rows.column(name), backwards) for name in self._given.names],
                                          schema=self._given)
        return _whole(self._last.run([keys]), self._given)


class TimedOver(_Remembering):
    """The last rows of each key, and its running aggregates."""

    def __init__(self, fragment: Fragment, context: Context, state: Json, emit: str = "final") -> None:
        op = fragment.state
        assert isinstance(op, ops.Over)
        self._reach = op.reach  # rows
        # Where all frames are of a time, the buffer has their rows, and there is nothing else to remember.
        remembers = self._reach > 0 or any(call.is_running for call in op.calls)
        self.never_forgotten = 0 if remembers else None
        self._length = op.length  # of time
        self.defers_results = op.length is not None
        self._postponed: int | None = None  # the watermark that was not acted upon
        self._released: int | None = None  # the watermark up to which rows have come out
        self._computed_s, self._took_s = 0.0, 0.0  # when rows were computed last, and how long it took
        super().__init__(fragment, context, state, emit)
        calls = self._calls()
        self._near = [call for call in calls if not call.is_running]
        self._running = [call for call in calls if call.is_running]
        used = dict.fromkeys([*self._keys, op.time, *(arg.name for call in calls for arg in call.agg.args
                                                      if isinstance(arg, Col))])
        self._used = pa.schema([self._schema.arrow.field(name).with_nullable(True) if name not in self._keys
                                else self._schema.arrow.field(name) for name in used])
        schema = Schema.from_arrow(self._used)
        self._near_runner = self._runner_of(schema, self._near) if self._near else None
        fields = [Field(_carried(call), type_of(call.agg), True) for call in self._running]
        # Where an aggregate combines with values as if it were one, it has a column of its own as its argument.
        self._own = {_given(call): call for call in self._running if call.agg.fn in ("min", "max", "first")}
        given = [Field(name, type_of(call.agg), True) for name, call in self._own.items()]
        self._meta = Schema((*schema, Field(COUNT, I64, True), *fields, *given))
        known = {item.name: item.expr for item in identity(self._meta)}
        calls = tuple(replace(call, agg=replace(call.agg, args=(known[_given(call)],))) if _given(call) in self._own
                      else call for call in self._running)
        whole = Frame(is_whole=True)
        places = [OverCall(internal("place"), Agg("row_number", (), I64, False), Frame()),
                  OverCall(internal("size"), Agg("count", (), I64, False), whole)]
        carried = [OverCall(internal(f"was.{name}"), Agg("first", (known[name],), known[name].dtype, True), whole)
                   for name in (COUNT, *map(_carried, self._running))]
        self._running_runner = self._runner_of(self._meta, [*calls, *places, *carried])

    def _value_schema(self) -> pa.Schema:
        op, arrow = self._op, self._schema.arrow
        names = dict.fromkeys([op.time, *(self._columns[arg] for call in op.calls for arg in call.agg.args)])
        stored = [arrow.field(name).with_nullable(True) for name in names if name not in self._keys]
        carried = [pa.field(_carried(call), type_of(call.agg).arrow) for call in op.calls if call.is_running]
        return pa.schema([*stored, pa.field(COUNT, pa.int64()), *carried])

    def _hint_schema(self) -> pa.Schema:
        op, arrow = self._op, self._schema.arrow
        names = dict.fromkeys([*self._keys, op.time, *(self._columns[arg] for call in op.calls
                                                       for arg in call.agg.args)])
        return pa.schema([arrow.field(name) for name in names])

    def promise(self, watermark: int) -> int | None:
        return watermark if self._postponed is None else self._released

    def advance(self, watermark: int) -> Batches:
        self._postponed = watermark
        return self.deferred()

    def deferred(self) -> Batches:
        """What the watermark has passed, unless the rows that their frames reach back to were read just before. A Spark
        task puts nothing off: its version of the state says that all of it has come out.
        """
        mark = self._postponed
        if mark is None:
            return []
        began = time.monotonic()
        may_wait = self._context.options.memory is None and self._context.state is None
        waits = may_wait and began - self._computed_s < (COMPUTE_SHARE - 1) * self._took_s
        if waits and sum(each.rows for each in self._hints.segments) > MANY_ROWS:
            return []
        self._postponed, self._released = None, mark
        found = super().advance(mark)
        if self._length is not None:
            self._hints.drop(mark - self._length)
        self._computed_s = time.monotonic()
        self._took_s = self._computed_s - began
        return found

    def _computed(self, rows: pa.RecordBatch) -> list[pa.Array]:
        if self.never_forgotten is None:
            found = self._near_values(rows, rows.slice(0, 0))
        else:
            known = self._remembered(rows, self._reach)
            is_meta = np.asarray(known.column(SLOT)) == 0
            found = self._near_values(rows, filtered(known, from_numpy(~is_meta)))
            found |= self._running_values(rows, filtered(known, from_numpy(is_meta)))
        if self._length is not None:
            self._add_hints(rows)
        return [found[call.name] for call in self._op.calls]

    def _near_values(self, rows: pa.RecordBatch, last: pa.RecordBatch) -> dict[str, pa.Array]:
        """Calls over the rows before."""
        if self._near_runner is None:
            return {}
        if self._length is not None:
            return self._values_in_time(rows)
        order = from_numpy(np.argsort(np.asarray(last.column(COUNT)), kind="stable"))
        return self._values_after([last.take(order)] if last.num_rows else [], rows)

    def _values_in_time(self, rows: pa.RecordBatch) -> dict[str, pa.Array]:
        """Calls over the rows of a time before: at once, or if memory is short for one share of the keys after the
        other.
        """
        waiting, memory = self._hints.segments, self._context.options.memory
        most = most_bytes(memory)
        shares = 1
        if most is not None and self._keys:
            shares = max(1, min(MAX_SHARES, -(-(self._hints.size_bytes(waiting) + rows.nbytes) // most)))
        if shares == 1:
            return self._values_after([batch for each in waiting for batch in self._hints.read(each)], rows)
        found: dict[str, list[pa.Array]] = {call.name: [] for call in self._near}
        places: list[np.ndarray] = []
        for share in range(shares):
            part = Part(-FOREVER, FOREVER, share, shares)
            is_own = self._shares.has(rows, part, self._context.options)
            if not is_own.any():
                continue
            places.append(np.flatnonzero(is_own))
            before = [filtered(batch, from_numpy(self._shares.has(batch, part, self._context.options)))
                      for each in waiting for batch in self._hints.read(each)]
            values = self._values_after([batch for batch in before if batch.num_rows],
                                        filtered(rows, from_numpy(is_own)))
            for name, array in values.items():
                found[name].append(array)
        order = from_numpy(np.argsort(np.concatenate(places)))
        return {name: taken(pa.concat_arrays(arrays), order) for name, arrays in found.items()}

    @cached_property
    def _shares(self) -> KeyShares:
        known = {item.name: item.expr for item in identity(self._schema)}
        return KeyShares(self._schema.arrow, tuple(known[name] for name in self._keys))

    def _values_after(self, parts: Batches, rows: pa.RecordBatch) -> dict[str, pa.Array]:
        """Calls over the rows before, which are `parts`."""
        assert self._near_runner is not None
        given = [conformed(part.select(self._used.names), self._used) for part in (*parts, rows)]
        before = sum(part.num_rows for part in parts)
        table = pa.Table.from_batches(self._near_runner.run([pa.concat_batches(given)]))
        return {call.name: _one(table, call.name).slice(before) for call in self._near}

    def _running_values(self, rows: pa.RecordBatch, meta: pa.RecordBatch) -> dict[str, pa.Array]:
        """Calls over all rows before, of which slot 0 is left; and what the records are now."""
        table = self._with_meta(rows, meta)
        found = pa.Table.from_batches(self._running_runner.run([table]))
        columns = {name: _one(found, name).slice(meta.num_rows) for name in found.column_names}
        was = {name: columns[internal(f"was.{name}")] for name in (COUNT, *map(_carried, self._running))}
        place, size = as_numpy(columns[internal("place")]), as_numpy(columns[internal("size")])
        before = as_numpy(pc.fill_null(was[COUNT], 0))
        has_meta = as_numpy(was[COUNT].is_valid().cast(pa.int64()))
        number = before + place - has_meta  # of the row among those of its key, from 1 on
        values = {call.name: _combined(call, columns[call.name], was[_carried(call)], before, has_meta)
                  for call in self._running}
        self.never_forgotten = (self.never_forgotten or 0) + int((number == 1).sum())
        self._put(rows, number, size - place, values)
        return values

    def _with_meta(self, rows: pa.RecordBatch, meta: pa.RecordBatch) -> pa.RecordBatch:
        """The rows after what slot 0 has: a row of each key."""
        schema = self._meta.arrow
        first = int(as_numpy(as_integers(rows.column(self._op.time)).slice(0, 1))[0])
        kind = schema.field(self._op.time).type
        early = from_numpy(np.full(meta.num_rows, first - 1 if first > -(1 << 63) else first))
        times = early.view(kind) if pa.types.is_timestamp(kind) else early.cast(kind)
        columns: list[pa.Array] = []
        for field in schema:
            if field.name == self._op.time and field.name not in self._keys:
                columns.append(times)
            elif field.name in self._own:
                columns.append(meta.column(_carried(self._own[field.name])))
            elif field.name in self._keys or field.name not in self._used.names:
                columns.append(meta.column(field.name))
            else:
                columns.append(pa.nulls(meta.num_rows, field.type))
        above = pa.RecordBatch.from_arrays([each if each.type == field.type else each.cast(field.type)
                                            for each, field in zip(columns, schema, strict=True)], schema=schema)
        names = {name: call.agg.args[0] for name, call in self._own.items()}
        names |= {name: Col(name) for name in self._used.names}
        new = pa.RecordBatch.from_arrays(
            [rows.column(names[field.name].name) if field.name in names else  # type: ignore[union-attr]
             pa.nulls(rows.num_rows, field.type) for field in schema], names=schema.names)
        return pa.concat_batches([above, conformed(new, schema)])

    def _put(self, rows: pa.RecordBatch, number: np.ndarray, after: np.ndarray, values: dict[str, pa.Array]) -> None:
        """Store the last rows of each key and its aggregates; `after` is how many rows of its key follow a row."""
        def records(picked: np.ndarray, slots: np.ndarray, has_values: bool) -> None:
            where = from_numpy(np.flatnonzero(picked))
            count = len(where)
            columns = [taken(rows.column(name), where) for name in self._keys]
            columns.append(from_numpy(slots[picked]))
            for field in self._values:
                if field.name == COUNT:
                    columns.append(from_numpy(number[picked]))
                elif field.name in rows.schema.names:
                    columns.append(pa.nulls(count, field.type) if has_values else taken(rows.column(field.name), where))
                else:
                    name = _call_of(field.name)
                    columns.append(taken(values[name], where) if has_values else pa.nulls(count, field.type))
            schema = pa.schema([*self._key_schema, *self._values])
            self._records.put(pa.RecordBatch.from_arrays(
                [each if each.type == field.type else each.cast(field.type)
                 for each, field in zip(columns, schema, strict=True)], schema=schema))

        records(after == 0, np.zeros(len(number), np.int64), True)
        if self._reach:
            records(after < self._reach, number % self._reach + 1, False)


def _carried(call: OverCall) -> str:
    return internal(f"now.{call.name}")


def _given(call: OverCall) -> str:
    return internal(f"of.{call.name}")


def _call_of(carried: str) -> str:
    return carried.removeprefix(internal("now."))


def _combined(call: OverCall, found: pa.Array, was: pa.Array, before: np.ndarray, has_meta: np.ndarray) -> pa.Array:
    """The aggregate of these rows, and of all before them."""
    match call.agg.fn:
        case "row_number" | "rank" | "count":
            return from_numpy(as_numpy(found) + before - has_meta)
        case "dense_rank":
            return from_numpy(as_numpy(found) + as_numpy(pc.fill_null(was, 0)) - has_meta)
        case "count_valid":
            return pc.add_checked(found, pc.fill_null(was, 0))
        case "sum":
            both = pc.add_checked(found, was)
            return pc.coalesce(both, found, was)
        case _:
            return found

