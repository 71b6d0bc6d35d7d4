"""Every function of an expression as a Python function of one row's values, none of them null.

`scalar(call)` gives it for a typed call. Where a row has no value the function raises `NoValue`,
and `exprs.py` adds the text of the expression. What null and dead rows do is decided there too.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from scalein.dtypes import TIMES, UNITS_PER_SECOND, DType, Kind, ticks_per_day
from scalein.errors import InternalError
from scalein.interp.values import order_key, rounded
from scalein.ir import decimals
from scalein.ir.exprs import Call, type_of
from scalein.ir.functions.registry import NoValue

Scalar = Callable[..., Any]

SECONDS_PER_DAY = 86_400


def scalar(call: Call) -> Scalar:
    """The meaning of a call in one row."""
    if call.fn in _ARITHMETIC:
        return _arithmetic(call.fn, type_of(call))
    if call.fn in _COMPARISONS:
        compare = _COMPARISONS[call.fn]
        return lambda a, b: compare(order_key(a), order_key(b))
    if call.fn in _MATH:
        return _math(call)
    if call.fn.startswith("dt_"):
        return _time_part(call)
    match call.fn:
        case "not":
            return lambda a: not a
        case "try_divide":
            return lambda a, b: rounded(a / b, type_of(call)) if b != 0 else None
        case "is_nan":
            return lambda a: math.isnan(a)
        case "cast":
            return _cast(type_of(call.args[0]), type_of(call))
        case "is_in":
            return _is_in(call)
        case "divisible":
            return lambda a: a % call.params[0] == 0
        case "str_len":
            return len
        case "starts_with":
            return lambda a: a.startswith(call.params[0])
        case "ends_with":
            return lambda a: a.endswith(call.params[0])
        case "contains":
            return lambda a: call.params[0] in a
        case "str_slice":
            return _str_slice(call)
        case _:
            raise InternalError(f"the interpreter does not know the function {call.fn!r}")


# --- arithmetic ---------------------------------------------------------------------------------


def _arithmetic(fn: str, dtype: DType) -> Scalar:
    """Numbers and times. Floats follow IEEE in their own width; whole numbers are exact or fail."""
    if dtype.is_float:
        return _float_arithmetic(fn, dtype)
    exact = _INT_ARITHMETIC[fn]
    return lambda *args: in_range(exact(*args), dtype)


def in_range(value: int, dtype: DType) -> int:
    """The value, if the type holds it."""
    low, high = dtype.int_range()
    if not low <= value <= high:
        raise NoValue("overflow")
    return value


def _floordiv(a: int, b: int) -> int:
    if b == 0:
        raise NoValue("division by zero")
    return a // b


def _mod(a: int, b: int) -> int:
    if b == 0:
        raise NoValue("division by zero")
    return a % b


_INT_ARITHMETIC: dict[str, Scalar] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": _floordiv,
    "mod": _mod,
    "neg": lambda a: -a,
    "abs": abs,
}
_ARITHMETIC = {*_INT_ARITHMETIC, "div"}


def _float_arithmetic(fn: str, dtype: DType) -> Scalar:
    def near(value: float) -> float:
        return rounded(value, dtype)

    def floordiv(a: float, b: float) -> float:
        return float_floor(near(float_div(a, b)))

    def mod(a: float, b: float) -> float:
        return near(a - near(float_floor(near(float_div(a, b))) * b)) if b != 0 else math.nan

    table: dict[str, Scalar] = {
        "add": lambda a, b: near(a + b),
        "sub": lambda a, b: near(a - b),
        "mul": lambda a, b: near(a * b),
        "div": lambda a, b: near(float_div(a, b)),
        "floordiv": floordiv,
        "mod": mod,
        "neg": lambda a: -a,
        "abs": abs,
    }
    return table[fn]


def float_div(a: float, b: float) -> float:
    """IEEE division: x/0 is an infinity, 0/0 is NaN."""
    if b != 0:
        return a / b
    if a == 0 or math.isnan(a):
        return math.nan
    return math.copysign(math.inf, a) * math.copysign(1.0, b)


def float_floor(a: float) -> float:
    return float(math.floor(a)) if math.isfinite(a) and a != 0 else a


def half_away(a: float) -> float:
    """The nearest whole number; ties go away from zero."""
    if not math.isfinite(a):
        return a
    whole = float(math.trunc(a))
    return math.copysign(whole + math.copysign(1.0, a) if abs(a - whole) >= 0.5 else whole, a)


_COMPARISONS: dict[str, Scalar] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}

# The C library's functions, through pyarrow: Python's raise where IEEE has an answer.
_LIBM = {"sqrt": pc.sqrt, "exp": pc.exp, "log": pc.ln, "pow": pc.power}
_MATH = {*_LIBM, "floor", "ceil", "round"}


def _math(call: Call) -> Scalar:
    dtype = type_of(call)
    if dtype.is_decimal:
        digits = int(str(call.params[0]))
        return lambda a: in_range(decimals.rounded(a, dtype, digits), dtype)
    if not dtype.is_float:  # round, floor and ceil of whole numbers
        return lambda a: a
    if call.fn in _LIBM:
        return lambda *args: _LIBM[call.fn](*(pa.scalar(arg, dtype.arrow) for arg in args)).as_py()
    match call.fn, call.params:
        case "floor", _:
            return float_floor
        case "ceil", _:
            return lambda a: -float_floor(-a)
        case _, (int(digits),):
            return _round(digits, dtype)
        case _:
            raise InternalError(f"round without a number of digits: {call!r}")


def _round(digits: int, dtype: DType) -> Scalar:
    """half_away(x * 10^digits) / 10^digits in the width of the type; a float too great to have such digits stays."""
    scale = rounded(10.0 ** abs(digits), dtype)

    def round_up(a: float) -> float:
        scaled = rounded(a * scale, dtype)
        return rounded(half_away(scaled) / scale, dtype) if math.isfinite(scaled) else a

    def round_down(a: float) -> float:
        return rounded(half_away(rounded(a / scale, dtype)) * scale, dtype)

    return round_up if digits >= 0 else round_down


def _is_in(call: Call) -> Scalar:
    """SQL's IN: not found in a list that has a null is unknown."""
    values, has_null = call.params
    assert isinstance(values, tuple)
    keys = {order_key(value) for value in values}
    return lambda a: True if order_key(a) in keys else None if has_null else False


def _str_slice(call: Call) -> Scalar:
    """Code points [offset, offset + length); a negative offset counts from the end, before the start is empty."""
    offset, length = call.params
    assert isinstance(offset, int)
    assert length is None or isinstance(length, int)

    def cut(a: str) -> str:
        start = offset if offset >= 0 else len(a) + offset
        stop = len(a) if length is None else start + length
        return a[max(start, 0) : max(stop, 0)]

    return cut


# --- casts --------------------------------------------------------------------------------------


def _cast(source: DType, target: DType) -> Scalar:
    """Between bools, numbers and times; text is in `hosts.py`, except from one form to another and to its bytes."""
    if source.is_bytes:
        return _cast_bytes(target)
    if source.is_decimal or target.is_decimal:
        return _cast_decimal(source, target)
    if target.kind is Kind.BOOL:
        return lambda a: a != 0
    if target.is_float:
        # From a wide integer this rounds once, not over a float64.
        return lambda a: pa.scalar(a, source.arrow).cast(target.arrow, safe=False).as_py()
    if source.is_float:
        return lambda a: in_range(_truncated(a), target)
    if target.kind is Kind.TIME or source.kind is Kind.TIME:
        return _cast_clock(source, target)
    num, den = _ratio(source, target)
    if target.kind is Kind.DATE64 and source.kind in TIMES:
        day = ticks_per_day(target)
        return lambda a: in_range(int(a) * num // den // day * day, target)
    if target.kind is Kind.DATE64:
        return lambda a: in_range(a, target) if a % ticks_per_day(target) == 0 else _raise("impossible cast")
    return lambda a: in_range(int(a) * num // den, target)


def _cast_bytes(target: DType) -> Scalar:
    def cast(a: Any) -> Any:
        found = a.encode() if isinstance(a, str) and target.kind is Kind.BIN else a
        if target.form == "fixed" and len(found) != target.width:
            raise NoValue("impossible cast")
        return found

    return cast


def _cast_decimal(source: DType, target: DType) -> Scalar:
    """A lower scale rounds half away from zero, a whole number is cut towards zero."""
    if target.is_float:
        return lambda a: rounded(decimals.to_float(a, source.scale), target)
    if source.is_float:
        return lambda a: in_range(_from_float(a, target.scale), target)
    if target.is_decimal:
        return lambda a: in_range(decimals.rescaled(a, source.scale, target.scale), target)
    return lambda a: in_range(decimals.truncated(a, source.scale), target)


def _from_float(a: float, scale: int) -> int:
    found = decimals.from_float(a, scale)
    if found is None:
        raise NoValue("impossible cast of nan or inf")
    return found


def _cast_clock(source: DType, target: DType) -> Scalar:
    """Times of the day: in another unit, of a timestamp, from and to their integers."""
    if source.kind not in TIMES:
        return lambda a: a if 0 <= a < ticks_per_day(target) else _raise("impossible cast")
    if target.kind is not Kind.TIME:
        return lambda a: in_range(a, target)
    day, num = ticks_per_day(source), ticks_per_day(target)
    return lambda a: a % day * num // day


def _raise(what: str) -> Any:
    raise NoValue(what)


def _truncated(a: float) -> int:
    if not math.isfinite(a):
        raise NoValue("impossible cast of nan or inf")
    return math.trunc(a)


def _ratio(source: DType, target: DType) -> tuple[int, int]:
    """Units of `target` in a unit of `source`; 1 where one of them is a plain number."""
    if target.kind in TIMES and source.kind in TIMES:
        return ticks_per_day(target), ticks_per_day(source)
    return 1, 1


# --- time ---------------------------------------------------------------------------------------


def _time_part(call: Call) -> Scalar:
    dtype = type_of(call.args[0])
    match call.fn, call.params:
        case "dt_truncate", (int(every),):
            return lambda a: in_range(a // every * every, type_of(call))
        case "dt_epoch", (str(unit),):
            num, den = UNITS_PER_SECOND[unit] * SECONDS_PER_DAY, ticks_per_day(dtype)
            return lambda a: in_range(a * num // den, type_of(call))
        case _:
            return _calendar_part(call.fn.removeprefix("dt_"), dtype)


def _calendar_part(part: str, dtype: DType) -> Scalar:
    """A part of the date or of the time of day, before the epoch too."""
    per_day = ticks_per_day(dtype)
    if part in _DATE_PARTS:
        return lambda a: _DATE_PARTS[part](a // per_day)
    nanoseconds_per_tick = SECONDS_PER_DAY * 10**9 // per_day
    modulus, unit = _TIME_PARTS[part]
    return lambda a: a % per_day * nanoseconds_per_tick % modulus // unit


def _date(days: int) -> tuple[datetime.date, int]:
    """The date `days` after the epoch as one of the 400 years from 2000 on, and the years it was moved by.

    The calendar, with its weekdays, repeats after 400 years of 146,097 days.
    """
    cycles, rest = divmod(days - _DAYS_TO_2000, 146_097)
    return datetime.date(2000, 1, 1) + datetime.timedelta(rest), 400 * cycles


_DAYS_TO_2000 = 10_957


def _year(days: int) -> int:
    date, moved = _date(days)
    return date.year + moved


_DATE_PARTS: dict[str, Callable[[int], int]] = {
    "year": _year,
    "quarter": lambda days: (_date(days)[0].month + 2) // 3,
    "month": lambda days: _date(days)[0].month,
    "day": lambda days: _date(days)[0].day,
    "weekday": lambda days: _date(days)[0].isoweekday(),
    "ordinal_day": lambda days: _date(days)[0].timetuple().tm_yday,
}

# Nanoseconds: what a part repeats after, and what it counts.
_TIME_PARTS = {
    "hour": (86_400 * 10**9, 3_600 * 10**9),
    "minute": (3_600 * 10**9, 60 * 10**9),
    "second": (60 * 10**9, 10**9),
    "millisecond": (10**9, 10**6),
    "microsecond": (10**9, 10**3),
    "nanosecond": (10**9, 1),
}
