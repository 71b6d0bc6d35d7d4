"""Arithmetic of numbers, decimals, times and durations; functions of floats.

Integer overflow and a zero divisor are errors (`_overflows`, `_divides_badly`), floats give inf and NaN. How kernels
find overflow: `llvm_backend/functions/arithmetic.py`. The types of decimals: `ir/decimals.py`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any

from scalein.dtypes import F64, I64, MAX_PRECISION, SIGNED, TIMES, UNSIGNED, DType, Kind
from scalein.ir import decimals
from scalein.ir.exprs import Call, Expr, Lit, type_of
from scalein.ir.functions.registry import REGISTRY, Args, Fold, Function, Moved, always, declare, typed
from scalein.ir.functions.strings import concatenated
from scalein.ir.literals import fit
from scalein.ir.unify import NOT_A_NUMBER, Refused, cast_to, finer, own_type_of, type_literal, unify


def _refusal(fn: str) -> str:
    return f"{REGISTRY[fn].sign} does not take"


def _numbers(call: Call, args: Args) -> list[Expr]:
    """Both sides in one number type; where a decimal is no decimal any more, a float."""
    known = [own for own in map(own_type_of, args) if own is not None]
    if any(own.is_decimal for own in known) and all(own.is_decimal or own.is_number for own in known):
        return [cast_to(arg, F64) for arg in args]
    left, right = unify(args, _refusal(call.fn))
    dtype = type_of(left)
    if not dtype.is_number:
        hint = NOT_A_NUMBER if dtype.kind is Kind.BOOL else None
        raise Refused(f"{_refusal(call.fn)} {dtype!r} and {type_of(right)!r}", hint)
    return [left, right]


def _arithmetic(call: Call, args: Args) -> Expr:
    if call.fn == "add" and any(own is not None and own.is_string for own in map(own_type_of, args)):
        return concatenated(call, args)
    if any(own is not None and own.kind in TIMES for own in map(own_type_of, args)):
        return _time_arithmetic(call, args)
    if decimals.is_decimal_arithmetic(args):
        return _decimal_arithmetic(call, args)
    both = _numbers(call, args)
    return typed(call, both, type_of(both[0]))


def _decimal_arithmetic(call: Call, args: Args) -> Expr:
    match call.fn:
        case "add" | "sub":
            return decimals.total(call, args, _refusal(call.fn))
        case "mul":
            return decimals.product(call, args)
    raise Refused(f"{_refusal(call.fn)} decimals", decimals.INEXACT)


def _time_arithmetic(call: Call, args: Args) -> Expr:
    """`ts + dur`, `ts - dur`, `ts - ts`, `dur + dur`, `dur - dur`, `dur * int`, and dates in the place of `ts`."""
    left, right = args
    match call.fn, *(own and own.kind for own in map(own_type_of, args)):
        case "sub", (Kind.DATE | Kind.DATE64), (Kind.DATE | Kind.DATE64):
            both = [_midnight(arg) for arg in unify(args, _refusal(call.fn))]
            return typed(call, both, DType(Kind.DUR, unit=type_of(both[0]).unit))
        case ("add" | "sub"), (Kind.DATE | Kind.DATE64), Kind.DUR:
            return _shift_date(call, left, right)
        case "add", Kind.DUR, (Kind.DATE | Kind.DATE64):
            return _shift_date(call, right, left)
        case ("add" | "sub"), Kind.TS, Kind.DUR:
            return _shift(call, left, right)
        case "add", Kind.DUR, Kind.TS:
            return _shift(call, right, left)
        case "sub", Kind.TS, Kind.TS:
            both = unify(args, _refusal(call.fn))
            return typed(call, both, DType(Kind.DUR, unit=type_of(both[0]).unit))
        case ("add" | "sub"), Kind.DUR, Kind.DUR:
            both = unify(args, _refusal(call.fn))
            return typed(call, both, type_of(both[0]))
        case "mul", Kind.DUR, kind if kind in (*SIGNED, *UNSIGNED) and kind is not Kind.U64:
            return _scale(call, left, right)
        case "mul", kind, Kind.DUR if kind in (*SIGNED, *UNSIGNED) and kind is not Kind.U64:
            return _scale(call, right, left)
    shown = " and ".join("null" if own is None else repr(own) for own in map(own_type_of, args))
    hint = "with times one can write ts + dur, ts - dur, ts - ts, dur + dur, dur - dur and dur * int"
    kinds = [own.kind for own in map(own_type_of, args) if own is not None]
    if call.fn in ("add", "sub") and any(kind in (Kind.DATE, Kind.DATE64) for kind in kinds):
        hint = "days are added as a duration, for example timedelta(days=1)"
        if Kind.TS in kinds:
            hint = 'cast the date to a timestamp first: .cast(pa.timestamp("us"))'
    raise Refused(f"{_refusal(call.fn)} {shown}", hint)


def _midnight(date: Expr, unit: str = "") -> Expr:
    """A date as a timestamp: in the coarsest unit that holds it, or in one that is given."""
    date = type_literal(date)
    own = "s" if type_of(date).kind is Kind.DATE else "ms"
    return cast_to(date, DType(Kind.TS, unit=finer(own, unit) if unit else own))


def _shift_date(call: Call, date: Expr, by: Expr) -> Expr:
    """The date of midnight moved by a duration: as in Python and Polars, a part of a day is cut, towards the past."""
    date = type_literal(date)
    if isinstance(by, Lit) and by.dtype is None:
        by = fit(by.value, DType(Kind.DUR, unit="s")) or type_literal(by)
    moved = _shift(call, _midnight(date, type_of(by).unit), by)
    return typed(Call("cast", (), at=call.at), [moved], type_of(date))


def _shift(call: Call, instant: Expr, by: Expr) -> Expr:
    """A timestamp moved by a duration, both in the finer unit; a constant takes the other's unit if it can."""
    if isinstance(by, Lit) and by.dtype is None:
        own = own_type_of(instant)
        assert own is not None
        by = fit(by.value, DType(Kind.DUR, unit=own.unit)) or type_literal(by)
    if isinstance(instant, Lit) and instant.dtype is None:
        own = own_type_of(instant)
        assert own is not None
        instant = fit(instant.value, replace(own, unit=type_of(by).unit)) or type_literal(instant)
    unit = finer(type_of(instant).unit, type_of(by).unit)
    dtype = replace(type_of(instant), unit=unit)
    return typed(call, [cast_to(instant, dtype), cast_to(by, DType(Kind.DUR, unit=unit))], dtype)


def _scale(call: Call, length: Expr, by: Expr) -> Expr:
    length = type_literal(length)
    return typed(call, [length, cast_to(by, I64)], type_of(length))


def _as_float(arg: Expr, what: str) -> Expr:
    """A float as it is, an integer or decimal as f64."""
    arg = type_literal(arg)
    if not type_of(arg).is_number and not type_of(arg).is_decimal:
        raise Refused(f"{what} takes a number, not {type_of(arg)!r}")
    return arg if type_of(arg).is_float else cast_to(arg, F64)


def _divide(call: Call, args: Args) -> Expr:
    if any(own is not None and own.kind in TIMES for own in map(own_type_of, args)):
        return _time_arithmetic(call, args)
    both = [_as_float(arg, "/") for arg in _numbers(call, args)]
    return typed(call, both, type_of(both[0]))


def _power(call: Call, args: Args) -> Expr:
    return typed(call, [cast_to(arg, F64) for arg in _numbers(call, args)], F64)


def _negate(call: Call, args: Args) -> Expr:
    (arg,) = args
    if isinstance(arg, Lit) and arg.dtype is None and type(arg.value) in (int, float, Decimal):
        return Lit(-arg.value)  # type: ignore[operator]  # `type_literal` refuses what has no 64 bits any more
    arg = type_literal(arg)
    dtype = type_of(arg)
    if not (dtype.is_number or dtype.is_decimal or dtype.kind is Kind.DUR):
        hint = "~ negates a condition" if dtype.kind is Kind.BOOL else None
        raise Refused(f"- takes a number or a duration, not {dtype!r}", hint)
    if dtype.kind in UNSIGNED:
        raise Refused(f"- takes no unsigned number: {dtype!r} has no negative values", "cast it to a signed integer")
    return typed(call, [arg], dtype)


def _absolute(call: Call, args: Args) -> Expr:
    arg = type_literal(args[0])
    if not (type_of(arg).is_number or type_of(arg).is_decimal or type_of(arg).kind is Kind.DUR):
        raise Refused(f"abs takes a number or a duration, not {type_of(arg)!r}")
    return typed(call, [arg], type_of(arg))


def _float_function(call: Call, args: Args) -> Expr:
    arg = _as_float(args[0], call.fn)
    return typed(call, [arg], type_of(arg))


def _round(call: Call, args: Args) -> Expr:
    arg = type_literal(args[0])
    if type_of(arg).is_decimal:
        return arg if int(str(call.params[0])) >= type_of(arg).scale else typed(call, [arg], type_of(arg))
    return arg if type_of(arg).is_int else _float_function(call, (arg,))


# --- where they fail ---------------------------------------------------------------------------------------------


def _overflows(call: Call) -> bool:
    if type_of(call).is_decimal:  # only where the type was cut to the most digits there are
        if call.fn == "mul":
            return sum(type_of(arg).precision for arg in call.args) > MAX_PRECISION
        return type_of(call).precision == MAX_PRECISION
    return not type_of(call).is_float


def _rounds_up(call: Call) -> bool:
    """Of decimals 9.9 may become 10, which takes a digit more."""
    return type_of(call).is_decimal


def _divides_badly(call: Call) -> bool:
    """Integer division fails for a zero divisor, and `//` also for MIN // -1; a literal settles both."""
    if type_of(call).is_float:
        return False
    divisor = call.args[1]
    if isinstance(divisor, Lit) and isinstance(divisor.value, int):
        return divisor.value == 0 or (call.fn == "floordiv" and divisor.value == -1 and type_of(call).is_signed)
    return True


def _has_no_negative(call: Call) -> bool:
    """MIN has no positive counterpart in two's complement."""
    return type_of(call).kind in (*SIGNED, Kind.DUR)


# --- constants ---------------------------------------------------------------------------------------------------


def _always(compute: Callable[..., Any]) -> Fold:
    return lambda call: compute


def _exact(compute: Callable[..., Any]) -> Fold:
    """A fold of everything but floats."""
    return lambda call: None if type_of(call.args[0]).is_float else compute


def _float(compute: Callable[..., Any]) -> Fold:
    """A fold of floats alone."""
    return lambda call: compute if type_of(call.args[0]).is_float else None


def _quotient(a: float, b: float) -> float:
    if b != 0:
        return a / b
    return math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1.0, b)


def _whole(round_to: Callable[[float], int]) -> Callable[[float], float]:
    def apply(value: float) -> float:
        return math.copysign(float(round_to(value)), value) if math.isfinite(value) else value

    return apply


def _is_plain(call: Call) -> bool:
    """Whether it is of floats or signed integers, all of one type."""
    own = type_of(call)
    return (own == F64 or own.kind in SIGNED) and all(type_of(arg) == own for arg in call.args)


def _root(value: float) -> float:
    return math.nan if value < 0 else math.sqrt(value)


def _added(call: Call) -> Moved | None:
    match call.args:
        case (Lit(value=int(by)), value) | (value, Lit(value=int(by))):
            return Moved(value, by)
    return None


def _subtracted(call: Call) -> Moved | None:
    value, by = call.args
    return Moved(value, -by.value) if isinstance(by, Lit) and isinstance(by.value, int) else None


declare(
    Function("add", _arithmetic, 2, fallible=_overflows, fold=_always(operator.add), show="{0} + {1}", moved=_added,
             duckdb="({0} + {1})", spark="__add__", spark_if=_is_plain, spark_checked="try_add",
             numpy=("add",)),
    Function("sub", _arithmetic, 2, fallible=_overflows, fold=_always(operator.sub), show="{0} - {1}",
             moved=_subtracted,
             duckdb="({0} - {1})", spark="__sub__", spark_if=_is_plain, spark_checked="try_subtract",
             numpy=("subtract",)),
    Function("mul", _arithmetic, 2, fallible=_overflows, fold=_always(operator.mul), show="{0} * {1}",
             duckdb="({0} * {1})", spark="__mul__", spark_if=_is_plain, spark_checked="try_multiply",
             numpy=("multiply",)),
    Function("div", _divide, 2, fold=_float(_quotient), show="{0} / {1}", duckdb="({0} / {1})",
             numpy=("divide", "true_divide")),
    Function("try_divide", _divide, 2, gives_null=always, show="{0}.try_divide({1})", sql=("TRY_DIVIDE",),
             duckdb="CASE WHEN {1} <> 0 THEN {0} / {1} END"),
    Function("floordiv", _arithmetic, 2, fallible=_divides_badly, fold=_exact(operator.floordiv), show="{0} // {1}",
             numpy=("floor_divide",)),
    Function("mod", _arithmetic, 2, fallible=_divides_badly, fold=_exact(operator.mod), show="{0} % {1}",
             sql=("MOD",), numpy=("remainder", "mod")),
    Function("pow", _power, 2, show="{0} ** {1}", sql=("POWER", "POW"), duckdb="pow({0}, {1})",
             numpy=("power", "float_power")),
    Function("neg", _negate, fallible=_has_no_negative, fold=_always(operator.neg), show="-{0}", duckdb="(-{0})",
             numpy=("negative",)),
    Function("abs", _absolute, fallible=_has_no_negative, fold=_always(abs), show="{0}.abs()", sql=("ABS",),
             duckdb="abs({0})", numpy=("absolute", "fabs")),
    Function("floor", _float_function, fold=_float(_whole(math.floor)), show="{0}.floor()", sql=("FLOOR",),
             duckdb="floor({0})", numpy=("floor",)),
    Function("ceil", _float_function, fold=_float(_whole(math.ceil)), show="{0}.ceil()", sql=("CEIL", "CEILING"),
             duckdb="ceil({0})", numpy=("ceil",)),
    Function("round", _round, fallible=_rounds_up, show="{0}.round({params})", sql=("ROUND",)),
    Function("sqrt", _float_function, fold=_float(_root), show="{0}.sqrt()", sql=("SQRT",), duckdb="sqrt({0})",
             numpy=("sqrt",)),
    Function("exp", _float_function, show="{0}.exp()", sql=("EXP",), duckdb="exp({0})", numpy=("exp",)),
    Function("log", _float_function, show="{0}.log()", sql=("LN",), duckdb="ln({0})", numpy=("log",)),
)


def plus(number: Expr, more: int) -> Expr:
    """A 64-bit integer with another added to it; overflow is an error."""
    return Call("add", (number, Lit(more, I64)), dtype=I64, nullable=number.nullable)


def plus_steps(number: Expr, count: Expr, step: int) -> Expr:
    """A 64-bit integer with a number of steps added to it; overflow is an error."""
    length = Call("mul", (count, Lit(step, I64)), dtype=I64, nullable=count.nullable)
    return Call("add", (number, length), dtype=I64, nullable=number.nullable or count.nullable)


def floored(number: Expr, step: int) -> Expr:
    """The greatest multiple of a step that is not above a 64-bit integer; overflow is an error."""
    count = Call("floordiv", (number, Lit(step, I64)), dtype=I64, nullable=number.nullable)
    return Call("mul", (count, Lit(step, I64)), dtype=I64, nullable=number.nullable)
