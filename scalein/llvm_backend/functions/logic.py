"""Kleene's logic, null tests and choices: lowerings that decide which of their arguments count, and where they fail."""

from __future__ import annotations

from collections.abc import Generator

from llvmlite import ir

from scalein.ir.exprs import Call, Expr
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.fn import I1, const
from scalein.llvm_backend.functions.registry import CallSite, lower_call, lowers, lowers_lazily
from scalein.llvm_backend.values import Str, Value

Lazily = Generator[tuple[Expr, ir.Value | None], Value, Value]

# Terms of a chain that LLVM sees as one. Its time grows with their square, 27 s for 2,000; it does not look across a
# `freeze`.
_LONG = 32


@lowers_lazily("and", plain=True)
def _and(c: CallSite) -> Lazily:
    """Kleene's and; where the left side is false, the right side cannot fail."""
    return (yield from _decided(c, deciding=False))


@lowers_lazily("or", plain=True)
def _or(c: CallSite) -> Lazily:
    return (yield from _decided(c, deciding=True))


def _decided(c: CallSite, deciding: bool) -> Lazily:
    f, b = c.f, c.f.b
    left = yield c.call.args[0], c.live

    def decides(value: Value) -> ir.Value:
        hit = value.data if deciding else b.not_(value.data)
        both = f.all_of(hit, value.valid)
        assert both is not None
        return both

    open_ = b.not_(decides(left))
    right = yield c.call.args[1], f.all_of(c.live, open_)
    data = b.or_(left.data, right.data) if deciding else b.and_(left.data, right.data)
    if c.call.depth % _LONG == _LONG - 1:
        data = f.freeze(data)
    if left.valid is None and right.valid is None:
        return Value(data)
    # Known if both are, or if either decides. Garbage under a null must not leak into `data`.
    settled = f.any_of(decides(left), decides(right))
    both = f.all_of(left.valid, right.valid)
    assert settled is not None
    assert both is not None
    return Value(b.select(settled, const(int(deciding), I1), data), b.or_(settled, both))


@lowers("not", plain=True)
def _not(c: CallSite) -> ir.Value:
    return c.f.b.not_(c.args[0])


@lowers("is_null", plain=True)
def _is_null(c: CallSite) -> Value:
    valid = c.values[0].valid
    return Value(const(0, I1) if valid is None else c.f.b.not_(valid))


@lowers("is_not_null", plain=True)
def _is_not_null(c: CallSite) -> Value:
    valid = c.values[0].valid
    return Value(const(1, I1) if valid is None else valid)


@lowers_lazily("if_else", plain=True)
def _if_else(c: CallSite) -> Lazily:
    f = c.f
    condition = yield c.call.args[0], c.live
    taken = f.all_of(condition.data, condition.valid)
    assert taken is not None
    then = yield c.call.args[1], f.all_of(c.live, taken)
    otherwise = yield c.call.args[2], f.all_of(c.live, f.b.not_(taken))
    return choose(c.code, taken, then, otherwise)


def choose(code: Code, condition: ir.Value, a: Value, b: Value) -> Value:
    """`a` where the condition holds, else `b`."""
    build = code.f.b
    valid = None
    if a.valid is not None or b.valid is not None:
        valid = build.select(condition, a.valid if a.valid is not None else const(1, I1),
                             b.valid if b.valid is not None else const(1, I1))
    if isinstance(a.data, Str) and isinstance(b.data, Str):
        return Value(Str(build.select(condition, a.data.ptr, b.data.ptr),
                         build.select(condition, a.data.size, b.data.size)), valid)
    return Value(build.select(condition, a.data, b.data), valid)


@lowers_lazily("fill_null", plain=True)
def _fill_null(c: CallSite) -> Lazily:
    first = yield c.call.args[0], c.live
    if first.valid is None:
        return first
    missing = c.f.b.not_(first.valid)
    second = yield c.call.args[1], c.f.all_of(c.live, missing)
    return choose(c.code, first.valid, Value(first.data), second)


@lowers_lazily("try")
def _try(c: CallSite) -> Lazily:
    """The value of a call, null where that call fails; its arguments fail as ever."""
    (tried,) = c.call.args
    assert isinstance(tried, Call)
    failed: list[ir.Value] = []
    args: list[Value] = []
    for arg in tried.args:
        args.append((yield arg, c.live))
    value = lower_call(CallSite(c.code, tried, args, c.live, failed=failed))
    return Value(value.data, c.f.all_of(value.valid, *map(c.f.b.not_, failed)))
