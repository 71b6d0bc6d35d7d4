"""Process with a class that stays Python (`compile=False`): objects of the class by key, and its methods row by row.

It means what compiled classes mean: a row is all or nothing, timers and `ttl` as in `llvm_backend/sinks/process.py`.
Only the typed fields are stored; values of a row and of fields are Python's, times `datetime` and `timedelta`.
"""

from __future__ import annotations

import copy
import math
import os
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

from scalein.arrow_rows import as_integers
from scalein.cancellation import raise_if_cancelled
from scalein.dtypes import F64, Kind
from scalein.errors import ComputeError
from scalein.exec.process import Failed, key_schema, records_schema
from scalein.ir.accumulators import Slot
from scalein.ir.exprs import Col
from scalein.ir.physical import Process
from scalein.ir.process import CHANGED, HELD, LAST, NEVER, NO_TIME, TIMER
from scalein.ir.ring import Ring

ROWS = 1 << 12  # of an output batch
_NAN = object()  # the key that all NaNs are


@dataclass
class _State:
    """What a key remembers."""

    key: tuple[object, ...]
    obj: Any
    timer: int = NEVER
    last: int = NO_TIME
    status: int = 0


class PythonStates:
    """Objects of the class in a dict."""

    def __init__(self, node: Process, tracked: bool) -> None:
        assert node.body.python is not None
        self._node, self._body, self._schema = node, node.body, node.schema.arrow
        self._cls = _with_timers(node.body.python.cls)
        self._fields = [slot.name for slot in node.body.slots]
        self._states: dict[tuple[object, ...], _State] = {}
        self._times = _Times(node)

    def observe(self, table: pa.Table) -> None:
        pass

    @property
    def bytes(self) -> int:
        return len(self._states) * (400 + 64 * len(self._fields))

    @property
    def count(self) -> int:
        return len(self._states)

    # --- rows and timers

    def rows(self, batch: pa.RecordBatch, failed: Failed | None = None) -> Iterator[pa.RecordBatch]:
        node = self._node
        keys = _tuples([batch.column(key.expr.name) for key in node.keys if isinstance(key.expr, Col)], len(batch))
        args = [self._times.values(batch.column(arg.name)) for arg in node.args if isinstance(arg, Col)]
        event = None
        if isinstance(node.time, Col):
            event = as_integers(batch.column(node.time.name)).to_pylist()
        made: list[tuple[object, ...]] = []
        for number, key in enumerate(keys):
            if number % ROWS == 0:
                raise_if_cancelled()
            state = self._state(key)
            time = NO_TIME if event is None else event[number]
            row = SimpleNamespace(**dict(zip(self._body.columns, (column[number] for column in args), strict=True)))
            try:
                made += self._fire(state, time) if self._body.has_timer else ()
                self._forget_if_quiet(state, time, state.status)
                made += self._step(state, "on_row", row)
            except ComputeError as error:
                if failed is None:
                    raise
                failed(number, error)
                continue
            state.last = time
            state.status = HELD | CHANGED
            if len(made) >= ROWS:
                yield self._batch(made)
                made = []
        if made:
            yield self._batch(made)

    def fire(self, until: int, once: bool = False) -> Iterator[pa.RecordBatch]:
        made: list[tuple[object, ...]] = []
        for state in list(self._states.values()):
            if self._body.has_timer:
                made += self._fire(state, until, once)
                if once:
                    state.timer = NEVER
            self._forget_if_quiet(state, until, CHANGED)
        if made:
            yield self._batch(made)

    def _state(self, key: tuple[object, ...]) -> _State:
        same = tuple(_same(part) for part in key)
        if same not in self._states:
            self._states[same] = _State(key, self._new())
        return self._states[same]

    def _new(self) -> Any:
        obj = self._cls()
        for slot in self._body.slots:
            if slot.ring is not None:
                setattr(obj, slot.name, Ring(slot.size))
        return obj

    def _fire(self, state: _State, until: int, once: bool = False) -> list[tuple[object, ...]]:
        made: list[tuple[object, ...]] = []
        while state.timer <= until:
            at, before = state.timer, state.timer
            state.timer = NEVER
            try:
                made += self._step(state, "on_timer", self._times.value(at))
            except ComputeError:
                state.timer = before
                raise
            state.last, state.status = at, HELD | CHANGED
            if once:
                break
        return made

    def _forget_if_quiet(self, state: _State, time: int, status: int) -> None:
        """As a new key, if there was neither a row nor a timer for so long."""
        ttl = self._body.ttl
        if ttl and state.last != NO_TIME and state.last + ttl <= time and state.timer == NEVER:
            state.obj, state.last, state.status = self._new(), NO_TIME, status

    def _step(self, state: _State, method: str, arg: object) -> list[tuple[object, ...]]:
        """The rows that a method yields. If it fails, its object is as before."""
        obj, names = state.obj, self._body.outputs
        before = {name: copy.deepcopy(value) if isinstance(value, Ring) else value for name, value in vars(obj).items()}
        obj._timer = state.timer
        try:
            found = getattr(obj, method)(arg)
            key = state.key if len(self._schema) > len(names) else ()
            made = [] if found is None else [(*key, *(row[field.name] for field in names)) for row in found]
            self._check(obj)
            state.timer = self._times.units(obj._timer)
        except Exception as error:
            vars(obj).clear()
            vars(obj).update(before)
            raise ComputeError(self._described(error)) from None
        return made

    def _check(self, obj: object) -> None:
        """Whether the fields have values of their types."""
        for slot in self._body.slots:
            value = getattr(obj, slot.name)
            if value is None and not slot.nullable:
                raise TypeError(f"self.{slot.name} cannot be None")

    def _described(self, error: Exception) -> str:
        frames = traceback.extract_tb(error.__traceback__)
        inner = frames[-1]
        return (f"{type(error).__name__}: {error} at {os.path.basename(inner.filename)}:{inner.lineno} in "
                f"`{self._body.name}`")

    def _batch(self, made: list[tuple[object, ...]]) -> pa.RecordBatch:
        try:
            arrays = [pa.array(column, field.type) for column, field in zip(zip(*made, strict=True), self._schema,
                                                                            strict=True)]
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise ComputeError(f"a row that `{self._body.name}` yields does not have the types of its columns",
                               found=error) from None
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    # --- records as columns

    def load(self, records: pa.RecordBatch) -> None:
        keys = _tuples(records.columns[: len(self._node.keys)], len(records))
        columns: dict[str, list[Any]] = {
            field.name: self._times.values(records.column(k)) if field.name in self._fields
            else records.column(k).to_pylist() for k, field in enumerate(records.schema)}
        rings = {slot.name: slot for slot in self._body.slots if slot.ring is not None}
        for number, key in enumerate(keys):
            state = self._state(key)
            for name in self._fields:
                value = columns[name][number]
                setattr(state.obj, name, _ring(rings[name], value) if name in rings else value)
            state.timer = columns[TIMER][number] if TIMER in columns else NEVER
            state.last = columns[LAST][number] if LAST in columns else NO_TIME
            state.status = HELD

    def records(self) -> pa.RecordBatch:
        return self._columns([state for state in self._states.values() if state.status & HELD])

    def changes(self) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        changed = [state for state in self._states.values() if state.status & CHANGED]
        held = self._columns([state for state in changed if state.status & HELD])
        gone = self._columns([state for state in changed if not state.status & HELD])
        for state in changed:
            state.status &= ~CHANGED
        return held, gone.select(key_schema(self._node).names)

    def _columns(self, states: list[_State]) -> pa.RecordBatch:
        schema, width = records_schema(self._node), len(self._node.keys)
        hidden = {TIMER: lambda state: state.timer, LAST: lambda state: state.last}
        rings = {slot.name: slot for slot in self._body.slots if slot.ring is not None}

        def value(state: _State, name: str) -> object:
            if name in hidden:
                return hidden[name](state)
            found = getattr(state.obj, name)
            return _ring_bytes(rings[name], found) if name in rings else found

        rows = [[*state.key, *(value(state, field.name) for field in list(schema)[width:])] for state in states]
        columns = list(zip(*rows, strict=True)) or [()] * len(schema)
        try:
            arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise ComputeError(f"a field of `{self._body.name}` does not have its type", found=error) from None
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    @property
    def due_times(self) -> np.ndarray:
        return np.array([self._due(state) for state in self._states.values()], np.int64)

    def _due(self, state: _State) -> int:
        if state.timer != NEVER or not self._body.ttl or state.last == NO_TIME:
            return state.timer
        return state.last + self._body.ttl

    def due(self, known: np.ndarray) -> pa.RecordBatch:
        times = self.due_times
        before = np.full(len(times), NEVER)
        before[: len(known)] = known
        picked = [state for state, is_due in zip(self._states.values(), times < before, strict=True)
                  if is_due and state.status & HELD]
        keys = self._columns(picked).select(key_schema(self._node).names)
        return keys.append_column("due", pa.array([self._due(state) for state in picked], pa.int64()))

    def compact(self) -> None:
        self._states = {key: state for key, state in self._states.items() if state.status & HELD}

    def clear(self) -> None:
        self._states = {}


class _Times:
    """Times of a class as Python's, and back."""

    def __init__(self, node: Process) -> None:
        self._clock = node.body.clock

    def values(self, column: pa.Array) -> list[object]:
        """Python's values. Nanoseconds must be whole microseconds."""
        if pa.types.is_timestamp(column.type) and column.type.unit == "ns":
            column = column.cast(pa.timestamp("us", column.type.tz))
        elif pa.types.is_duration(column.type) and column.type.unit == "ns":
            column = column.cast(pa.duration("us"))
        found: list[object] = column.to_pylist()
        return found

    def value(self, at: int) -> object:
        """An event time."""
        assert self._clock is not None
        if self._clock.kind is not Kind.TS:
            return at
        return self.values(pa.array([at], pa.int64()).cast(self._clock.arrow))[0]

    def units(self, time: object) -> int:
        """A time that a timer is set to."""
        if isinstance(time, int):
            return time
        assert self._clock is not None
        if not isinstance(time, datetime):
            raise TypeError(f"set_timer takes a time, not {time!r}")
        found: int = pa.array([time], self._clock.arrow).cast(pa.int64())[0].as_py()
        return found


def _ring_bytes(slot: Slot, ring: Ring[Any]) -> bytes:
    """A ring as a record has it: the number of values, and each in its place."""
    words = np.zeros(slot.size + 1, np.int64)
    words[0] = len(ring)
    values = np.array(list(ring), np.float64 if slot.ring == F64 else np.int64)
    words[1 : len(ring) + 1] = values.view(np.int64)
    return words.tobytes()


def _ring(slot: Slot, stored: bytes) -> Ring[Any]:
    words = np.frombuffer(stored, np.int64)
    found: Ring[Any] = Ring(slot.size)
    count = int(words[0])
    values = words[1:].view(np.float64 if slot.ring == F64 else np.int64)
    for number in range(max(0, count - slot.size), count):
        found.append(values[number % slot.size].item())
    return found


def _with_timers(cls: type) -> type:
    """The class with the methods that set its timer."""

    def set_timer(self: Any, time: object) -> None:
        self._timer = time

    def clear_timer(self: Any) -> None:
        self._timer = NEVER

    return type(cls.__name__, (cls,), {"set_timer": set_timer, "clear_timer": clear_timer, "_timer": NEVER})


def _tuples(columns: list[pa.Array], count: int) -> list[tuple[object, ...]]:
    if not columns:
        return [()] * count
    return list(zip(*(column.to_pylist() for column in columns), strict=True))


def _same(part: object) -> object:
    """Equal for equal keys: NaN equals NaN."""
    return _NAN if isinstance(part, float) and math.isnan(part) else part


