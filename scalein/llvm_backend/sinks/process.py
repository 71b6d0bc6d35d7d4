"""Process: find each row's record, fire its timer, run the user's `on_row` over it, write the rows that it yields.

A row is all or nothing. Fields are registers while a method runs, and rows that it yields lie after the end of the
output: only when it has returned are the fields stored and the end moved. If the output is full before, the kernel
leaves with that row as the one to continue at. A timer that fires before a row is a step of its own: it is not undone
if the row fails, and does not fire again.

Where state is `tracked`, a record says whether it changed since it was written to a store, and the word of slot `due`
with its number the time at which a timer fires or the key is forgotten, at the earliest.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from scalein.dtypes import STR
from scalein.ir.exprs import Expr, type_of
from scalein.ir.process import CHANGED, HELD, LAST, NEVER, NO_TIME, STATUS, TIMER
from scalein.ir.stages import Process
from scalein.ir.tables import Table
from scalein.ir.udf import Method, Statement, Yield
from scalein.layout import BLOCK_ROWS, ERROR, OUTPUT_FULL
from scalein.llvm_backend.block import Block, rows
from scalein.llvm_backend.cells import Place, leave_without_room, needed
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.expr_accumulators import read_slot, reset_slot, write_slot
from scalein.llvm_backend.exprs import lower_expr
from scalein.llvm_backend.fn import I1, I8, I32, I64, PTR, const
from scalein.llvm_backend.functions.udf import InlineMethod, RingMemory
from scalein.llvm_backend.hash_index import Index, place_in
from scalein.llvm_backend.keys import key_block
from scalein.llvm_backend.text_arena import joined
from scalein.llvm_backend.values import Env, Row, Str, Value, to_memory

FIRST_RECORD = 64  # bytes of an arena before its first record


def lower_process(code: Code, sink: Process, block: Block, env: Env, start: ir.Value) -> None:
    code.never_null += [not item.expr.nullable for item in sink.items]
    if sink.action == "timers":
        _fire_picked(code, sink, block, env, start)
        return
    f, table = code.f, sink.table
    index = Index(code, table, "table")
    index.ensure_arena(BLOCK_ROWS)
    with f.when(f.b.icmp_signed(">", block.count, const(0))):
        keys = key_block(code, block, env, sink.keys, table.has_nulls, None)
        code.check_errors(ERROR)
        records = index.find(keys, block.count, None, insert=True)
        with rows(code, block, rare=True) as row:
            record = f.load(records, row.k, PTR)
            f.set_slot("row", f.b.add(start, row.offset("in")))
            if sink.action == "load":
                _load(code, sink, record, env, row)
            else:
                _run_row(code, sink, record, env, row)


def _load(code: Code, sink: Process, record: ir.Value, env: Env, row: Row) -> None:
    """A record as a store has it."""
    state = _Record(code, sink.table, record)
    given = {slot.name: lower_expr(code, arg, env, row) for slot, arg in zip(sink.body.stored, sink.args, strict=True)}
    state.write(given)
    state.set(STATUS, const(HELD))
    if sink.body.is_timed:
        state.set_due(sink)


def _run_row(code: Code, sink: Process, record: ir.Value, env: Env, row: Row) -> None:
    f, b, body = code.f, code.f.b, sink.body
    assert body.on_row is not None
    state = _Record(code, sink.table, record)
    written = [lower_expr(code, key, env, row) for key in _emitted_keys(sink)]
    args = [lower_expr(code, arg, env, row) for arg in sink.args]
    time = None if sink.time is None else lower_expr(code, sink.time, env, row).number
    code.check_errors(ERROR)
    if body.has_timer:
        assert time is not None
        _fire_until(code, sink, state, written, time)
    if body.ttl:
        assert time is not None
        _forget_if_quiet(code, sink, state, time)
    timer_before = state.get(TIMER) if body.has_timer else None
    method = _Inline(code, sink, body.on_row, written, state)
    changed = method.run([*state.read(), *args])
    code.check_errors(ERROR, later=True)
    state.write(changed)
    method.commit()
    if body.ttl:
        state.set(LAST, time)
    if sink.tracked:
        status = state.get(STATUS)
        state.set(STATUS, const(HELD | CHANGED))
        if body.is_timed:
            is_new = b.icmp_unsigned("==", b.and_(status, const(HELD)), const(0))
            if timer_before is not None:
                is_new = b.or_(is_new, b.icmp_signed("!=", timer_before, state.get(TIMER)))
            with f.when(is_new):
                state.set_due(sink)


def _emitted_keys(sink: Process) -> Sequence[Expr]:
    """The keys that rows begin with: none where the only key is a constant."""
    return sink.keys if len(sink.items) > len(sink.body.outputs) else ()


def _fire_until(code: Code, sink: Process, state: _Record, keys: Sequence[Value], until: ir.Value) -> None:
    """Fire the timer while it is at or before a time; it is committed each time."""
    f, b, body = code.f, code.f.b, sink.body
    with f.forever() as loop:
        at = state.get(TIMER)
        loop.stop_if(b.icmp_signed(">", at, until))
        assert body.on_timer is not None
        fields = [Value(const(NEVER)) if slot.name == TIMER else value
                  for slot, value in zip((slot for slot in body.stored if slot.ring is None), state.read(),
                                         strict=False)]
        method = _Inline(code, sink, body.on_timer, keys, state)
        changed = method.run([*fields, Value(at)])
        code.check_errors(ERROR, later=True)
        state.write({TIMER: Value(const(NEVER)), **changed})
        method.commit()
        if body.ttl:
            state.set(LAST, at)
        if sink.tracked:
            state.set(STATUS, const(HELD | CHANGED))
        if sink.action == "timers":
            loop.stop_if(b.icmp_signed("!=", f.slot("once"), const(0)))


def _forget_if_quiet(code: Code, sink: Process, state: _Record, time: ir.Value, forgets: bool = False) -> None:
    """Begin anew if there was neither a row nor a timer for so long; with `forgets`, there is no state from now on."""
    f, b, body = code.f, code.f.b, sink.body
    last = state.get(LAST)
    is_held = b.icmp_signed("!=", last, const(NO_TIME))
    quiet = b.icmp_signed("<=", _after(code, last, body.ttl), time)
    is_idle = b.icmp_signed("==", state.get(TIMER), const(NEVER)) if body.has_timer else None
    condition = f.all_of(is_held, quiet, is_idle)
    assert condition is not None
    with f.when(condition, likely=False):
        state.reset()
        if forgets:
            state.set(STATUS, const(CHANGED))


def _after(code: Code, time: ir.Value, span: int) -> ir.Value:
    return code.f.call("llvm.sadd.sat.i64", I64, [time, const(span)])


def _fire_picked(code: Code, sink: Process, block: Block, env: Env, start: ir.Value) -> None:
    """Fire the timers of records at or before slot `until`, and forget keys that were quiet until then."""
    f, table, body = code.f, sink.table, sink.body
    until = f.slot("until")
    with rows(code, block, rare=True) as row:
        f.set_slot("row", f.b.add(start, row.offset("in")))
        number = f.load(f.slot("picked", PTR), f.b.add(start, row.offset("in")), I64)
        record = f.byte_at(f.slot("source", PTR), f.b.mul(number, const(table.layout.size)))
        state = _Record(code, table, record, number)
        written = [lower_expr(code, key, env, row) for key in _emitted_keys(sink)]
        if body.has_timer:
            _fire_until(code, sink, state, written, until)
            with f.when(f.b.icmp_signed("!=", f.slot("once"), const(0))):
                state.set(TIMER, const(NEVER))
        if body.ttl:
            _forget_if_quiet(code, sink, state, until, forgets=True)
        if sink.tracked:
            state.set_due(sink)


class _Record:
    """The state of a key in its record."""

    def __init__(self, code: Code, table: Table, record: ir.Value, number: ir.Value | None = None) -> None:
        self.code, self.f, self.table, self.record = code, code.f, table, record
        self.place: Place = place_in(code.f, table, record)
        self._slots = {slot.name: (f"acc0.{part}", slot) for part, slot in table.accs[0].expr.parts}
        self._number = number

    def name(self, slot: str) -> str:
        return self._slots[slot][0]

    def get(self, slot: str) -> ir.Value:
        return self.f.b.load(self.place(self.name(slot)), typ=I64)

    def set(self, slot: str, value: ir.Value) -> None:
        self.f.store(value, self.place(self.name(slot)))

    def read(self) -> list[Value]:
        """The fields that are no rings, and the timer."""
        return [read_slot(self.f, self.place, name, slot) for name, slot in self._slots.values()
                if slot.name not in (LAST, STATUS) and slot.ring is None]

    def write(self, changed: dict[str, Value]) -> None:
        """Store some fields. Text may lie where it is written to, so it is copied before."""
        texts = {name for name in changed if self._slots[name][1].dtype == STR}
        copied = {name: Value(joined(self.code, [value.string]), value.valid) if name in texts else value
                  for name, value in changed.items()}
        leave_for = [copied[name].string for name in texts]
        if leave_for:
            leave_without_room(self.f, needed(self.f, leave_for))
        for slot, value in copied.items():
            write_slot(self.code, self.place, *self._slots[slot], value)

    def reset(self) -> None:
        """As a new key's."""
        for name, slot in self._slots.values():
            if slot.name != STATUS:
                reset_slot(self.code, self.place, name, slot)

    def set_due(self, sink: Process) -> None:
        """The earliest time at which a timer fires, or the key is forgotten."""
        f, b, body = self.f, self.f.b, sink.body
        due: ir.Value = const(NEVER)
        if body.ttl:
            last = self.get(LAST)
            is_held = b.icmp_signed("!=", last, const(NO_TIME))
            due = b.select(is_held, _after(self.code, last, body.ttl), due)
        if body.has_timer:
            timer = self.get(TIMER)
            due = b.select(b.icmp_signed("==", timer, const(NEVER)), due, timer)
        number = self._number
        if number is None:
            first = b.add(b.ptrtoint(f.slot("table.arena", PTR), I64), const(FIRST_RECORD))
            number = b.udiv(b.sub(b.ptrtoint(self.record, I64), first), const(self.table.layout.size))
        f.store(due, f.slot("due", PTR), number)


class _Inline(InlineMethod):
    """A method for one row or timer: its yields are written after the end of the output."""

    def __init__(self, code: Code, sink: Process, method: Method, keys: Sequence[Value], state: _Record) -> None:
        super().__init__(code, method, sink.body.name)
        f = self.f
        self.rings = {ring.name: RingMemory(f, ring, state.place(state.name(ring.name.removeprefix("self."))))
                      for ring in method.rings}
        self._keys, self._types = keys, [type_of(item.expr) for item in sink.items]
        self._nullable = [item.expr.nullable for item in sink.items]
        self._count = f.var(I64, f.get_slot("out.count"))
        texts = [k for k, dtype in enumerate(self._types) if dtype.is_loose]
        self._used = {k: f.var(I64, f.get_slot(f"out{k}.used")) for k in texts}

    def begin(self, given: Sequence[Value]) -> None:
        """A row with a null where the method needs a value fails."""
        for param, value in zip(self.method.params, given, strict=True):
            if not param.nullable and value.valid is not None:
                text = f"null in {param.name} of `{self.functions.shown}`"
                self.leave(self.f.b.not_(value.valid), const(1 << self.code.bit(text)))

    def statement(self, statement: Statement) -> None:
        if isinstance(statement, Yield):
            self._emit([*self._keys, *(self.expr(value) for value in statement.values)])
        else:
            super().statement(statement)

    def _emit(self, values: Sequence[Value]) -> None:
        f, b, position = self.f, self.f.b, self._count.get()
        f.leave_if(b.icmp_signed(">=", position, f.slot("out.capacity")), OUTPUT_FULL)
        for k, value in enumerate(values):
            if k in self._used:
                self._emit_text(k, value, position)
                continue
            f.store(to_memory(f, value.number), f.slot(f"out{k}.data", PTR), position)
            self._emit_valid(k, value, position)
        self._count.set(b.add(position, const(1)))

    def _emit_text(self, k: int, value: Value, position: ir.Value) -> None:
        f, b, used, text = self.f, self.f.b, self._used[k], value.string
        if value.valid is not None:
            text = Str(text.ptr, b.select(value.valid, text.size, const(0)))
        end = b.add(used.get(), text.size)
        f.leave_if(b.icmp_signed(">", end, f.slot(f"out{k}.room")), OUTPUT_FULL)
        target = f.byte_at(f.slot(f"out{k}.data", PTR), used.get())
        f.call("llvm.memcpy.p0.p0.i64", ir.VoidType(), [target, text.ptr, text.size, const(0, I1)])
        used.set(end)
        f.store(b.trunc(end, I32), f.slot(f"out{k}.offsets", PTR), b.add(position, const(1)))
        self._emit_valid(k, value, position)

    def _emit_valid(self, k: int, value: Value, position: ir.Value) -> None:
        if self._nullable[k]:
            valid = const(1, I8) if value.valid is None else self.f.b.zext(value.valid, I8)
            self.f.store(valid, self.f.slot(f"out{k}.valid", PTR), position)

    def commit(self) -> None:
        """The rows that were yielded belong to the output, and what was appended to rings to the record."""
        for ring in self.rings.values():
            ring.commit()
        self.f.set_slot("out.count", self._count.get())
        for k, used in self._used.items():
            self.f.set_slot(f"out{k}.used", used.get())
