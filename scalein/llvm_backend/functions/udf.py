"""Compiled Python functions: each call of a udf is an internal LLVM function with real control flow.

    { i64 errors, data..., i1 valid }  name(args..., ptr stop, ptr texts...)

What fails returns at once with the bit of its error set, so nothing runs on with a wrong value. A row whose value
is not needed is not computed at all: with garbage for arguments a loop might not end. LLVM inlines the function
into the row loop. Only udfs with loops have `stop` (and `valid` is there if the result may be None): a word that the
caller sets to make the loops return. Only those that build text have `texts`, the places of made text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from llvmlite import ir

from scalein.dtypes import DType, Kind
from scalein.ir.exprs import Lit
from scalein.ir.printer import show_expr
from scalein.ir.udf import (
    Assign,
    Break,
    Choose,
    Continue,
    Either,
    ForRange,
    If,
    Invoke,
    Let,
    Local,
    Part,
    Return,
    Statement,
    Udf,
    Variable,
    While,
    builds_text,
    has_loops,
    is_short,
)
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.fn import I1, I64, PTR, Fn, Loop, const
from scalein.llvm_backend.functions.registry import CallSite
from scalein.llvm_backend.functions.udf_apply import lower_apply, truth
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
        found += [arg.data.ptr, arg.data.size] if isinstance(arg.data, Str) else [arg.data]
        if param.nullable:
            found.append(const(1, I1) if arg.valid is None else arg.valid)
    return found


def _registers(dtype: DType) -> list[ir.Type]:
    return [PTR, I64] if dtype.kind is Kind.STR else [register_type(dtype)]


def _returned(f: Fn, found: ir.Value, udf: Udf) -> Value:
    """The value in what a udf's function returned."""
    valid = f.b.extract_value(found, len(found.type.elements) - 1) if udf.nullable else None
    if udf.dtype.kind is Kind.STR:
        return Value(Str(f.b.extract_value(found, 1), f.b.extract_value(found, 2)), valid)
    return Value(f.b.extract_value(found, 1), valid)


def _nothing(dtype: DType) -> Value:
    """A value to put where there is none."""
    data: ir.Value | Str
    if dtype.kind is Kind.STR:
        data = Str(ir.Constant(PTR, None), const(0))
    else:
        data = const(0.0 if dtype.is_float else 0, register_type(dtype))
    return Value(data, const(0, I1))


class _Slots:
    """A local that holds a value: a string takes two slots, what may be None one more."""

    def __init__(self, f: Fn, dtype: DType, nullable: bool) -> None:
        self._data = [f.var(typ) for typ in _registers(dtype)]
        self._valid = f.var(I1) if nullable else None

    def set(self, value: Value) -> None:
        parts = [value.data.ptr, value.data.size] if isinstance(value.data, Str) else [value.data]
        for slot, part in zip(self._data, parts, strict=True):
            slot.set(part)
        if self._valid is not None:
            self._valid.set(const(1, I1) if value.valid is None else value.valid)

    def get(self) -> Value:
        data = [slot.get() for slot in self._data]
        return Value(Str(*data) if len(data) == 2 else data[0], None if self._valid is None else self._valid.get())


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


class _Body:
    """One udf's function being written."""

    def __init__(self, functions: _Functions, udf: Udf) -> None:
        self.functions, self.udf = functions, udf
        self.code, self.f = functions.code, functions.code.f
        self.locals: dict[str, _Slots] = {}
        self.loops: list[Loop] = []
        valid = [I1] if udf.nullable else []
        self.result = ir.LiteralStructType([I64, *_registers(udf.dtype), *valid])
        self.stop: ir.Value | None = None
        self.texts: TextPlaces | None = None

    def write(self) -> ir.Function:
        f, udf = self.f, self.udf
        types = [typ for param in udf.params for typ in (*_registers(param.dtype), *([I1] if param.nullable else []))]
        shared = [PTR] * (has_loops(udf) + len(TextPlaces._fields) * builds_text(udf))
        with f.function(udf.name, self.result, [*types, *shared]) as fn:
            for variable in (*udf.params, *udf.locals):
                self.locals[variable.name] = _Slots(f, variable.dtype, variable.nullable)
            given = iter(fn.args)
            for param in udf.params:
                self.locals[param.name].set(_argument(param, given))
            self.stop = next(given) if has_loops(udf) else None
            self.texts = TextPlaces(*given) if builds_text(udf) else None
            self.block(udf.body)
            f.b.unreachable()  # every way returns, or never ends
        return fn

    # --- ways out

    def give(self, value: Value, errors: ir.Value | None = None) -> None:
        """Return a value, or the bits of what failed."""
        b = self.f.b
        parts = [value.data.ptr, value.data.size] if isinstance(value.data, Str) else [value.data]
        if self.udf.nullable:
            parts.append(const(1, I1) if value.valid is None else value.valid)
        result = ir.Constant(self.result, ir.Undefined)
        for number, part in enumerate((const(0) if errors is None else errors, *parts)):
            result = b.insert_value(result, part, number)
        self.f.give(result)

    def fail(self, what: str, line: int, condition: ir.Value) -> None:
        text = f"{what} at {self.udf.place(line)} in `{self.functions.shown}`"
        self.leave(condition, const(1 << self.code.bit(text)))

    def leave(self, condition: ir.Value, errors: ir.Value) -> None:
        with self.f.when(condition, likely=False):
            self.give(_nothing(self.udf.dtype), errors)

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
                self.give(self.expr(value))
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
                is_true = truth(f, first.get(), part.dtype)
                decided = f.b.not_(is_true) if fn == "and" else is_true
                return self.either(decided, part, first, right)
            case Let(name, value, body):
                self.locals[name].set(self.expr(value))
                return self.expr(body)
            case Invoke():
                return self.invoke(part)
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


def _argument(param: Variable, given: Iterator[ir.Value]) -> Value:
    data = [next(given) for _ in _registers(param.dtype)]
    valid = next(given) if param.nullable else None
    return Value(Str(*data) if len(data) == 2 else data[0], valid)


def _constant(code: Code, value: object, dtype: DType) -> Value:
    if value is None:
        return _nothing(dtype)
    if dtype.kind is Kind.STR:
        content = str(value).encode()
        return Value(Str(code.text(content), const(len(content))))
    assert isinstance(value, int | float)
    return Value(const(value, register_type(dtype)))
