"""Compiled Python functions: each call of a udf is an internal LLVM function with real control flow.

    { i64 errors, data..., i1 valid }  name(args..., ptr stop, ptr texts...)

What fails returns at once with the bit of its error set, so nothing runs on with a wrong value. A row whose value
is not needed is not computed at all: with garbage for arguments a loop might not end. LLVM inlines the function
into the row loop. Only udfs with loops have `stop` (and `valid` is there if the result may be None): a word that the
caller sets to make the loops return. Only those that build text have `texts`, the places of made text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from llvmlite import ir

from scalein.dtypes import DType, Kind
from scalein.ir.exprs import Lit
from scalein.ir.printer import show_expr
from scalein.ir.udf import (
    TEXTS,
    Apply,
    Assign,
    Break,
    Choose,
    Continue,
    Either,
    ForEach,
    ForRange,
    If,
    Invoke,
    Let,
    Local,
    Method,
    Part,
    Return,
    RingAppend,
    RingField,
    RingRead,
    Statement,
    Udf,
    While,
    builds_text,
    has_loops,
    is_short,
    is_tuple,
    items_of,
)
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.fn import F64, I1, I64, PTR, Fn, Loop, const
from scalein.llvm_backend.functions.registry import CallSite
from scalein.llvm_backend.functions.udf_apply import lower_apply, truth
from scalein.llvm_backend.functions.udf_split import Characters, Cursor, Pieces
from scalein.llvm_backend.text_arena import TextPlaces, text_places
from scalein.llvm_backend.values import Str, Value, register_type

STOPPED = "stopped"  # the error of a cancelled loop; the caller that cancelled it raises its own


def lower_udf(c: CallSite) -> Value:
    """The udf's value in a row; it is called only if the row is live and no argument that it needs is null."""
    code, f, args, live = c.code, c.f, c.values, c.live
    (udf,) = c.params
    assert isinstance(udf, Udf)
    strict = f.all_of(*(arg.valid for arg, param in zip(args, udf.params, strict=True) if not param.nullable))
    called = f.all_of(live, strict)
    function = _Functions(code, show_expr(c.call))
    fn = function.get(udf)
    shared = [f.slot_ptr("stop")] if has_loops(udf) else []
    shared += text_places(code) if builds_text(udf) else ()
    slots = _Slots(f, udf.dtype, udf.nullable)
    errors = f.var(I64, const(0))
    slots.set(_nothing(udf.dtype))

    def run() -> None:
        found = f.b.call(fn, [*_passed(udf, args), *shared])
        errors.set(f.b.extract_value(found, 0))
        slots.set(_returned(f, found, udf))

    if called is None:
        run()
    else:
        with f.when(called):
            run()
    if c.failed is None:
        code.fail_bits(errors.get())
    else:
        c.failed.append(f.b.icmp_unsigned("!=", errors.get(), const(0)))
    value = slots.get()
    return Value(value.data, f.all_of(strict, value.valid))


def _passed(udf: Udf, args: Sequence[Value]) -> list[ir.Value]:
    """The arguments as registers: a string is two, an optional value is followed by its validity."""
    found: list[ir.Value] = []
    for arg, param in zip(args, udf.params, strict=True):
        found += _split_up(arg, param.dtype, param.nullable)
    return found


# --- values as registers: a string is two, an optional value is followed by its validity, a tuple is its items


def _registers(dtype: DType, nullable: bool = False) -> list[ir.Type]:
    valid = [I1] if nullable else []
    if dtype.kind is Kind.STR:
        return [PTR, I64, *valid]
    if dtype == TEXTS:
        return [*Pieces.TYPES, *valid]
    if is_tuple(dtype):
        return [*(typ for item in items_of(dtype) for typ in _registers(*item)), *valid]
    return [register_type(dtype), *valid]


def _split_up(value: Value, dtype: DType, nullable: bool) -> list[ir.Value]:
    """A value's registers."""
    data: object = value.data
    if isinstance(data, Str):
        found = [data.ptr, data.size]
    elif isinstance(data, Pieces):
        found = data.registers()
    elif isinstance(data, tuple):
        found = [part for item, typ in zip(data, items_of(dtype), strict=True) for part in _split_up(item, *typ)]
    else:
        found = [data]
    if nullable:
        found.append(const(1, I1) if value.valid is None else value.valid)
    return found


def _put_together(given: Iterator[ir.Value], dtype: DType, nullable: bool) -> Value:
    """The value of these registers."""
    data: ir.Value
    if dtype.kind is Kind.STR:
        data = Str(next(given), next(given))
    elif dtype == TEXTS:
        data = Pieces.of([next(given) for _ in Pieces.TYPES])
    elif is_tuple(dtype):
        data = tuple(_put_together(given, *item) for item in items_of(dtype))
    else:
        data = next(given)
    return Value(data, next(given) if nullable else None)


def _returned(f: Fn, found: ir.Value, udf: Udf) -> Value:
    """The value in what a udf's function returned."""
    registers = (f.b.extract_value(found, place) for place in range(1, len(found.type.elements)))
    return _put_together(registers, udf.dtype, udf.nullable)


def _nothing(dtype: DType) -> Value:
    """A value to put where there is none."""
    nothing = [ir.Constant(PTR, None) if typ == PTR else const(0.0 if typ == F64 else 0, typ)
               for typ in _registers(dtype)]  # fmt: skip
    return Value(_put_together(iter(nothing), dtype, False).data, const(0, I1))


class _Slots:
    """A local that holds a value: a string takes two slots, what may be None one more."""

    def __init__(self, f: Fn, dtype: DType, nullable: bool) -> None:
        self._type = dtype, nullable
        self._slots = [f.var(typ) for typ in _registers(dtype, nullable)]

    def set(self, value: Value) -> None:
        for slot, part in zip(self._slots, _split_up(value, *self._type), strict=True):
            slot.set(part)

    def get(self) -> Value:
        return _put_together((slot.get() for slot in self._slots), *self._type)


@dataclass(slots=True)
class _Functions:
    """The functions of one call: its udf's and those of the udfs that it calls, each written once."""

    code: Code
    shown: str  # the call, for errors
    made: dict[Udf, ir.Function] = field(default_factory=dict)

    def get(self, udf: Udf) -> ir.Function:
        if udf not in self.made:
            self.made[udf] = _Body(self, udf).write()
        return self.made[udf]


class _Statements(ABC):
    """The statements of a function or a method being written."""

    def __init__(self, functions: _Functions, body: Udf | Method) -> None:
        self.functions, self.body = functions, body
        self.code, self.f = functions.code, functions.code.f
        self.locals: dict[str, _Slots] = {}
        self.loops: list[Loop] = []
        self.rings: dict[str, RingMemory] = {}
        self.stop: ir.Value | None = None
        self.texts: TextPlaces | None = None

    @abstractmethod
    def end(self, value: Part | None) -> None:
        """Return from it."""

    @abstractmethod
    def leave(self, condition: ir.Value, errors: ir.Value) -> None:
        """Return under a condition with the bits of what failed."""

    def fail(self, what: str, line: int, condition: ir.Value) -> None:
        text = f"{what} at {self.body.place(line)} in `{self.functions.shown}`"
        self.leave(condition, const(1 << self.code.bit(text)))

    # --- statements

    def block(self, statements: Sequence[Statement]) -> None:
        for statement in statements:
            self.statement(statement)

    def statement(self, statement: Statement) -> None:
        f = self.f
        match statement:
            case Assign(name, value):
                self.locals[name].set(self.expr(value))
            case If(condition, then, otherwise):
                with f.when_else(self.test(condition)) as (yes, no):
                    with yes:
                        self.block(then)
                    with no:
                        self.block(otherwise)
            case Return(value):
                self.end(value)
            case RingAppend(name, value):
                self.rings[name].append(self.expr(value).number)
            case Break():
                self.loops[-1].stop()
            case Continue():
                self.loops[-1].again()
            case While(condition, body):
                with f.forever() as loop:
                    self.heed_stop()
                    if not isinstance(condition, Lit):
                        loop.stop_if(f.b.not_(self.test(condition)))
                    self.loop_body(loop, body)
            case ForRange():
                self.for_range(statement)
            case ForEach(name, values, body):
                self.for_each(name, self.expr(values), body)

    def for_range(self, statement: ForRange) -> None:
        f, b = self.f, self.f.b
        start, stop, step = (self.expr(part).number for part in (statement.start, statement.stop, statement.step))
        left = f.var(I64, self.rounds(statement, start, stop, step))
        following = f.var(I64, start)
        with f.forever() as loop:
            loop.stop_if(b.icmp_unsigned("==", left.get(), const(0)))
            if not is_short(statement):
                self.heed_stop()
            left.set(b.sub(left.get(), const(1)))
            number = following.get()
            self.locals[statement.name].set(Value(number))
            following.set(b.add(number, step))  # may wrap after the last iteration, where it is not used
            self.loop_body(loop, statement.body)

    def for_each(self, name: str, values: Value, body: Sequence[Statement]) -> None:
        f = self.f
        cursor = Cursor(self.code, values.data if isinstance(values.data, Pieces) else Characters(values.string))
        with f.forever() as loop:
            self.heed_stop()
            self.locals[name].set(Value(cursor.step(loop)))
            self.loop_body(loop, body)

    def rounds(self, statement: ForRange, start: ir.Value, stop: ir.Value, step: ir.Value) -> ir.Value:
        """How often a range's loop runs, as an unsigned number."""
        b = self.f.b
        if isinstance(step, ir.Constant) and step.constant == 1:
            return b.select(b.icmp_signed("<", start, stop), b.sub(stop, start), const(0))
        self.fail("range() with a step of zero", statement.line, b.icmp_unsigned("==", step, const(0)))
        up = b.icmp_signed(">", step, const(0))
        low, high = b.select(up, start, stop), b.select(up, stop, start)
        size = b.select(up, step, b.sub(const(0), step))
        size = b.select(b.icmp_unsigned("==", size, const(0)), const(1), size)
        count = b.add(b.udiv(b.sub(b.sub(high, low), const(1)), size), const(1))
        return b.select(b.icmp_signed("<", low, high), count, const(0))

    def loop_body(self, loop: Loop, body: Sequence[Statement]) -> None:
        self.loops.append(loop)
        self.block(body)
        self.loops.pop()

    def heed_stop(self) -> None:
        assert self.stop is not None
        asked = self.f.b.icmp_unsigned("!=", self.f.load_now(self.stop), const(0))
        self.leave(asked, const(1 << self.code.bit(STOPPED)))

    # --- expressions

    def test(self, part: Part) -> ir.Value:
        return self.expr(part).number

    def expr(self, part: Part) -> Value:
        f = self.f
        match part:
            case Lit(value, dtype):
                assert dtype is not None
                return _constant(self.code, value, dtype)
            case Local(name, _, nullable):
                found = self.locals[name].get()
                return found if nullable else Value(found.data)
            case Choose(condition, then, otherwise):
                return self.either(self.test(condition), part, then, otherwise)
            case Either(fn, left, right):
                first = _Slots(f, part.dtype, left.nullable)
                first.set(self.expr(left))
                is_true = truth(self.code, first.get(), part.dtype)
                decided = f.b.not_(is_true) if fn == "and" else is_true
                return self.either(decided, part, first, right)
            case Let(name, value, body):
                self.locals[name].set(self.expr(value))
                return self.expr(body)
            case Invoke():
                return self.invoke(part)
            case RingRead():
                return Value(self.rings[part.name].read(self, part))
            case _:
                args = [self.expr(arg) for arg in part.args]
                return lower_apply(self.code, part, args, self.texts, lambda what, bad: self.fail(what, part.line, bad))

    def either(self, condition: ir.Value, part: Choose | Either, yes: Part | _Slots, no: Part) -> Value:
        """One of two values; only that one is computed."""
        result = _Slots(self.f, part.dtype, part.nullable)
        with self.f.when_else(condition) as (then, otherwise):
            with then:
                result.set(yes.get() if isinstance(yes, _Slots) else self.expr(yes))
            with otherwise:
                result.set(self.expr(no))
        return result.get()

    def invoke(self, part: Invoke) -> Value:
        args = [self.expr(arg) for arg in part.args]
        fn = self.functions.get(part.udf)
        shared = [self.stop] if has_loops(part.udf) else []
        shared += self.texts or () if builds_text(part.udf) else ()
        found = self.f.b.call(fn, [*_passed(part.udf, args), *shared])
        errors = self.f.b.extract_value(found, 0)
        self.leave(self.f.b.icmp_unsigned("!=", errors, const(0)), errors)
        return _returned(self.f, found, part.udf)


class _Body(_Statements):
    """One udf's function being written."""

    def __init__(self, functions: _Functions, udf: Udf) -> None:
        super().__init__(functions, udf)
        self.udf = udf
        self.result = ir.LiteralStructType([I64, *_registers(udf.dtype, udf.nullable)])

    def write(self) -> ir.Function:
        f, udf = self.f, self.udf
        types = [typ for param in udf.params for typ in _registers(param.dtype, param.nullable)]
        shared = [PTR] * (has_loops(udf) + len(TextPlaces._fields) * builds_text(udf))
        with f.function(udf.name, self.result, [*types, *shared]) as fn:
            for variable in (*udf.params, *udf.locals):
                self.locals[variable.name] = _Slots(f, variable.dtype, variable.nullable)
            given = iter(fn.args)
            for param in udf.params:
                self.locals[param.name].set(_put_together(given, param.dtype, param.nullable))
            self.stop = next(given) if has_loops(udf) else None
            self.texts = TextPlaces(*given) if builds_text(udf) else None
            self.block(udf.body)
            f.b.unreachable()  # every way returns, or never ends
        return fn

    # --- ways out

    def end(self, value: Part | None) -> None:
        assert value is not None
        self.give(self.expr(value))

    def give(self, value: Value, errors: ir.Value | None = None) -> None:
        """Return a value, or the bits of what failed."""
        b = self.f.b
        parts = _split_up(value, self.udf.dtype, self.udf.nullable)
        result = ir.Constant(self.result, ir.Undefined)
        for number, part in enumerate((const(0) if errors is None else errors, *parts)):
            result = b.insert_value(result, part, number)
        self.f.give(result)

    def leave(self, condition: ir.Value, errors: ir.Value) -> None:
        with self.f.when(condition, likely=False):
            self.give(_nothing(self.udf.dtype), errors)


class RingMemory:
    """A ring: how many values were appended, and the last of them, each in the place of its number modulo the size."""

    def __init__(self, f: Fn, field: RingField, place: ir.Value) -> None:
        """`place` is in a record: one that is appended to is copied before."""
        self.f, self.field, self._stored, self._at = f, field, place, place
        if field.appends:
            self._at = f.scratch(I64, field.size + 1, "ring")
            self._copy(self._at, place)

    def _copy(self, target: ir.Value, source: ir.Value) -> None:
        size = const(8 * (self.field.size + 1))
        self.f.call("llvm.memcpy.p0.p0.i64", ir.VoidType(), [target, source, size, const(0, I1)])

    def commit(self) -> None:
        if self.field.appends:
            self._copy(self._stored, self._at)

    def _place(self, number: ir.Value) -> ir.Value:
        b = self.f.b
        return self.f.at(self._at, b.add(b.urem(number, const(self.field.size)), const(1)), I64)

    def _count(self) -> ir.Value:
        return self.f.b.load(self._at, typ=I64)

    def _length(self) -> ir.Value:
        return self.f.min(self._count(), const(self.field.size))

    def append(self, value: ir.Value) -> None:
        count = self._count()
        self.f.store(value, self._place(count))
        self.f.store(self.f.b.add(count, const(1)), self._at)

    def _item(self, index: ir.Value) -> ir.Value:
        """The value of a number from 0."""
        b = self.f.b
        number = b.add(b.sub(self._count(), self._length()), index)
        return b.load(self._place(number), typ=register_type(self.field.dtype))

    def read(self, body: _Statements, part: RingRead) -> ir.Value:
        f, b, length = self.f, self.f.b, self._length()
        if part.fn == "len":
            return length
        if part.fn == "item":
            index = body.expr(part.args[0]).number
            index = b.select(b.icmp_signed("<", index, const(0)), b.add(index, length), index)
            body.fail("ring index out of range", part.line, b.icmp_unsigned(">=", index, length))
            return self._item(index)
        typ = register_type(self.field.dtype)
        total = f.var(typ, const(0.0 if self.field.dtype.is_float else 0, typ))
        if part.fn != "sum":
            body.fail(f"{part.fn}() of an empty ring", part.line, b.icmp_signed("==", length, const(0)))
            total.set(self._item(const(0)))
        kind = self.field.dtype
        apply = Apply("add" if part.fn == "sum" else part.fn, (Lit(0, kind), Lit(0, kind)), kind, line=part.line)
        number = f.var(I64, const(0))
        with f.forever() as loop:
            loop.stop_if(b.icmp_signed(">=", number.get(), length))
            given = [Value(total.get()), Value(self._item(number.get()))]
            found = lower_apply(body.code, apply, given, None, lambda what, bad: body.fail(what, part.line, bad))
            total.set(found.number)
            number.set(b.add(number.get(), const(1)))
        return total.get()


class InlineMethod(_Statements):
    """A method written where it is called: its fields are registers until it ends."""

    body: Method

    def __init__(self, code: Code, method: Method, shown: str) -> None:
        super().__init__(_Functions(code, shown), method)
        self.method = method
        self.errors = self.f.var(I64)
        self.exit: ir.Block | None = None

    def run(self, given: Sequence[Value]) -> dict[str, Value]:
        """The new values of the fields that it changes, for values of its parameters; failures are the kernel's."""
        self.write(given)
        self.code.fail_bits(self.errors.get())
        return {name.removeprefix("self."): self.locals[name].get() for name in self.method.changes}

    def write(self, given: Sequence[Value]) -> None:
        f, method = self.f, self.method
        for variable in (*method.params, *method.locals):
            self.locals[variable.name] = _Slots(f, variable.dtype, variable.nullable)
        for param, value in zip(method.params, given, strict=True):
            self.locals[param.name].set(value)
        self.errors.set(const(0))
        self.stop = f.slot_ptr("stop") if has_loops(method) else None
        self.texts = text_places(self.code) if builds_text(method) else None
        self.exit = f.b.append_basic_block("exit")
        self.begin(given)
        self.block(method.body)
        f.b.branch(self.exit)  # never: every path has returned
        f.b.position_at_end(self.exit)

    def begin(self, given: Sequence[Value]) -> None:
        """What comes before the first statement."""

    def end(self, value: Part | None) -> None:
        self.f.b.branch(self.exit)
        self.f.b.position_at_end(self.f.b.append_basic_block("dead"))

    def leave(self, condition: ir.Value, errors: ir.Value) -> None:
        with self.f.when(condition, likely=False):
            self.errors.set(errors)
            self.end(None)


def _constant(code: Code, value: object, dtype: DType) -> Value:
    if value is None:
        return _nothing(dtype)
    if dtype.kind is Kind.STR:
        content = str(value).encode()
        return Value(Str(code.text(content), const(len(content))))
    assert isinstance(value, int | float)
    return Value(const(value, register_type(dtype)))
