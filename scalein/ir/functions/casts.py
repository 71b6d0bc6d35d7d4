"""Calls of constants, computed at compile time in plain Python; the smaller half of `fold`.

Only what Python computes bit for bit like the kernels is here: integers, comparisons, casts, and the
float operations that IEEE 754 rounds exactly. A call that would fail, or that is not in the table, has
no value here and stays in the plan, so that it fails (or not) where and when the user's rows reach it.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable
from typing import Any

from scalein.dtypes import TIMES, DType, Kind, ticks_per_day
from scalein.ir import decimals
from scalein.ir.exprs import Call, Lit, type_of
from scalein.ir.functions.registry import COMPARISONS, HOST_TEXT, is_utc

# Functions that are null as soon as one argument is, whatever the others are.
STRICT = frozenset(
    (
        "add", "sub", "mul", "div", "floordiv", "mod", "neg", "abs", "floor", "ceil", "sqrt", "exp", "log", "pow",
        "try_divide", "list_len", "list_get", "struct_field",
        "round", "not", "is_nan", "is_in", "cast", "divisible", "str_len", "str_slice", "starts_with", "ends_with",
        "contains", "lower", "upper", "dt_truncate", "dt_epoch",
    )
) | frozenset((*COMPARISONS, *HOST_TEXT))

class _NoValue(Exception):
    """The call fails, or is left to the kernels."""


def evaluate(call: Call) -> Lit | None:
    """The value of a strict call whose arguments are all literals, or None if it has none here.

    >>> from scalein.dtypes import I64
    >>> evaluate(Call("add", (Lit(1, I64), Lit(2, I64)), dtype=I64))
    Lit(value=3, dtype=i64)
    """
    values = [arg.value for arg in call.args if isinstance(arg, Lit)]
    if len(values) < len(call.args) or call.fn not in STRICT:
        return None
    if None in values:
        return Lit(None, call.dtype)
    try:
        return Lit(_within_type(_compute(call, values), type_of(call)), call.dtype)
    except (_NoValue, ArithmeticError, ValueError):
        return None


def _compute(call: Call, values: list[Any]) -> Any:
    of = type_of(call.args[0])
    if of.kind is Kind.F32:
        values = [_to_f32(value) for value in values]
    if call.fn in COMPARISONS:
        return getattr(operator, call.fn)(*(_ordered(value) for value in values))
    if call.fn == "cast":
        return _cast(values[0], of, type_of(call))
    compute = (_FLOAT if of.is_float else _EXACT).get(call.fn)
    if compute is None:
        raise _NoValue
    return compute(*values)


def _within_type(value: Any, dtype: DType) -> Any:
    """The value as its type holds it: checked if integer-like, rounded if a float of 32 bits."""
    match dtype.kind:
        case Kind.BOOL | Kind.STR | Kind.BIN | Kind.F64:
            return value
        case Kind.F32:
            return _to_f32(value)
    low, high = dtype.int_range()
    if not low <= value <= high:
        raise _NoValue
    return value


def _to_f32(value: float) -> float:
    """Rounded to 32 bits. After + - * / and sqrt in 64 bits that is the same as computing in 32."""
    try:
        rounded: float = struct.unpack("f", struct.pack("f", value))[0]
        return rounded
    except OverflowError:
        return math.copysign(math.inf, value)


def _ordered(value: Any) -> Any:
    """A key by which Python compares as we do: strings by bytes, NaN equal to itself and the greatest."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, float):
        return (1, 0.0) if math.isnan(value) else (0, value)
    return value


def _divide(a: float, b: float) -> float:
    if b != 0:
        return a / b
    return math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1.0, b)


def _whole(round_to: Callable[[float], int]) -> Callable[[float], float]:
    def apply(value: float) -> float:
        return math.copysign(float(round_to(value)), value) if math.isfinite(value) else value

    return apply


_EXACT: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv, "mod": operator.mod,
    "neg": operator.neg, "abs": operator.abs, "not": operator.not_,
}  # fmt: skip
_FLOAT: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": _divide, "neg": operator.neg,
    "abs": operator.abs, "floor": _whole(math.floor), "ceil": _whole(math.ceil), "is_nan": math.isnan,
    "sqrt": lambda value: math.nan if value < 0 else math.sqrt(value),
}  # fmt: skip


def _cast(value: Any, source: DType, target: DType) -> Any:
    """A value in another type, before its range is checked."""
    if source.is_bytes or target.is_bytes:
        if source.kind is target.kind and target.form != "fixed":
            return value  # another Arrow form of the same bytes
        raise _NoValue
    if source.is_decimal or target.is_decimal:
        return _cast_decimal(value, source, target)
    if target.kind is Kind.BOOL:
        if math.isnan(value):
            raise _NoValue
        return bool(value)
    if target.is_float:
        # More than 53 bits would be rounded twice on their way to 32.
        if target.kind is Kind.F32 and isinstance(value, int) and abs(value) > 1 << 53:
            raise _NoValue
        return float(value)
    if source.is_float:
        return math.trunc(value)
    match source.kind, target.kind:
        case Kind.TIME, _ if target.kind is not Kind.TIME:
            return int(value)
        case _, Kind.TIME if source.kind is not Kind.TIME:
            raise _NoValue
        case _, Kind.DATE64 if source.kind in (Kind.TS, Kind.DATE) and is_utc(source):
            return value // ticks_per_day(source) * ticks_per_day(target)
        case _, Kind.DATE64 if source.kind not in TIMES and value % ticks_per_day(target):
            raise _NoValue
        case one, other if one in TIMES and other in TIMES:
            if one is not other and not (is_utc(source) and is_utc(target)):
                raise _NoValue
            return value * ticks_per_day(target) // ticks_per_day(source)
        case _:
            return int(value)


def _cast_decimal(value: Any, source: DType, target: DType) -> Any:
    if target.is_float:
        return decimals.to_float(value, source.scale)
    if source.is_float:
        found = decimals.from_float(value, target.scale)
        if found is None:
            raise _NoValue
        return found
    if target.is_decimal:
        return decimals.rescaled(value, source.scale, target.scale)
    return decimals.truncated(value, source.scale)
