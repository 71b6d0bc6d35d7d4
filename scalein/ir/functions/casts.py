"""Casts: which there are, which can fail, which pyarrow computes, and those of constants."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from scalein.dtypes import F64, FLOATS, SIGNED, TIMES, UNITS_PER_SECOND, DType, Kind, ticks_per_day
from scalein.ir import decimals
from scalein.ir.exprs import Call, Expr, Lit, type_of
from scalein.ir.functions.registry import Args, Function, Moved, NoValue, declare, typed
from scalein.ir.literals import fit
from scalein.ir.unify import INT_DIGITS, Refused, nested_hint, type_literal

# Zones whose local time is UTC; every other one makes the calendar functions host functions.
UTC_ZONES = ("", "UTC", "Etc/UTC", "+00:00", "Z")


def is_utc(dtype: DType) -> bool:
    """Whether local time of a timestamp is its UTC time, so that the calendar needs no zone rules."""
    return dtype.tz in UTC_ZONES


def _cast(call: Call, args: Args) -> Expr:
    target, arg = type_of(call), args[0]
    fitted = fit(arg.value, target) if isinstance(arg, Lit) and arg.dtype is None else None
    if fitted is not None:
        return fitted
    arg = type_literal(arg)
    if type_of(arg) == target:
        return arg
    if type_of(arg).nested == pa.null() and not target.is_nested:
        return Lit(None, target)
    hint = _cannot_cast(type_of(arg), target)
    if hint is not None:
        raise Refused(f"cannot cast {type_of(arg)!r} to {target!r}", hint)
    return typed(call, [arg], target)


def _cannot_cast(source: DType, target: DType) -> str | None:
    """Why a cast is refused, as a hint; None if it is allowed."""
    plain = (Kind.BOOL, Kind.F32, Kind.F64, Kind.DEC)
    kinds = {source.kind, target.kind}
    if source.is_nested:
        return nested_hint(source)
    if target.is_nested:
        return "no cast makes a nested value; group_by(...).agg(...) with .collect() makes lists"
    if Kind.BIN in kinds and kinds - {Kind.BIN, Kind.STR}:
        return "binary casts from and to text only, which is its bytes"
    if kinds == {Kind.DEC, Kind.BOOL}:
        return "compare it with 0, or go through an integer: .cast(pa.int64())"
    for time, other in ((source, target), (target, source)):
        if time.kind in TIMES and other.kind in plain:
            return "go through its integer: .cast(pa.int64())"
        if time.kind is Kind.DUR and other.is_string:
            return "go through its integer: .cast(pa.int64())"
    match source.kind, target.kind:
        case Kind.TS, (Kind.DATE | Kind.DATE64) if not is_utc(source):
            return "for the day in UTC, cast to a timestamp without zone first; .dt.day() gives the local one"
        case (Kind.DATE | Kind.DATE64), Kind.TS if not is_utc(target):
            return "midnight depends on the zone; cast to a timestamp without zone first"
        case (Kind.TS | Kind.DATE | Kind.DATE64), Kind.DUR:
            return "subtract another time to get a duration"
        case Kind.DUR, (Kind.TS | Kind.DATE | Kind.DATE64):
            return "add it to a time"
        case (Kind.DATE | Kind.DATE64 | Kind.DUR), Kind.TIME:
            return "a timestamp has a time of the day: cast to pa.timestamp(...) first"
        case Kind.TIME, (Kind.TS | Kind.DATE | Kind.DATE64 | Kind.DUR):
            return "a time of the day belongs to no date; go through its integer: .cast(pa.int64())"
    return None


# --- where they fail, and where they run -------------------------------------------------------------------------


def to_finer(source: DType, unit: str) -> bool:
    """Whether a unit counts smaller steps than the type's, so that a value may leave its 64 bits."""
    return UNITS_PER_SECOND[unit] > UNITS_PER_SECOND[source.unit]


def _decimal_cast_fails(source: DType, target: DType) -> bool:
    """Whether a value can be too large, where one type is a decimal and the other one, an integer or a float."""
    if target.is_float or source.is_float:
        return source.is_float
    if not target.is_decimal:  # towards zero
        most = 10 ** max(0, source.precision - source.scale) - 1
        low, high = target.int_range()
        return bool(-most < low or most > high)
    whole = source.precision - source.scale if source.is_decimal else INT_DIGITS[source.kind]
    carry = source.scale > target.scale  # 9.9 -> 10
    return whole + carry > target.precision - target.scale


def _cast_fails(call: Call) -> bool:
    source, target = type_of(call.args[0]), type_of(call)
    if target.kind is Kind.BIN:
        return target.form == "fixed"
    if source.kind is Kind.BIN:
        return True
    if source.is_decimal or (target.is_decimal and not source.is_string):
        return not target.is_string and _decimal_cast_fails(source, target)
    if target.is_string or Kind.BOOL in (source.kind, target.kind):
        return source.is_string and not target.is_string
    if source.is_string:
        return True
    if target.is_float:
        return False
    if source.is_float:
        return True
    match source.kind, target.kind:
        case (Kind.TS, Kind.TS) | (Kind.DUR, Kind.DUR):
            return to_finer(source, target.unit)
        case Kind.TS, Kind.DATE:
            return source.unit in ("s", "ms")  # finer units have fewer days than 32 bits hold
        case Kind.TS, Kind.DATE64:
            return source.unit == "s"
        case (Kind.DATE | Kind.DATE64), Kind.TS:
            return target.unit in ("us", "ns")
        case Kind.DATE, Kind.DATE64:
            return False
        case (Kind.TIME | Kind.TS), Kind.TIME:
            return False  # a day has few enough units
        case Kind.DATE64, Kind.DATE64:
            return False
        case _, (Kind.TIME | Kind.DATE64):
            return True
    (least, greatest), (low, high) = source.int_range(), target.int_range()
    return least < low or greatest > high


def _reads_or_writes_text(call: Call) -> bool:
    """Text from and to other types but its own bytes, times and dates of text, and the clock of a zone."""
    source, target = type_of(call.args[0]), type_of(call)
    if source.is_string and target.kind in (Kind.BIN, Kind.TS, Kind.DATE, Kind.DATE64):
        return False
    return source.is_string != target.is_string or (target.kind is Kind.TIME and not is_utc(source))


# --- constants ---------------------------------------------------------------------------------------------------


def _fold(call: Call) -> Callable[[Any], Any]:
    source, target = type_of(call.args[0]), type_of(call)
    return lambda value: _converted(value, source, target)


def _converted(value: Any, source: DType, target: DType) -> Any:
    """A value in another type, before its range is checked."""
    if source.is_bytes or target.is_bytes:
        if source.kind is target.kind and target.form != "fixed":
            return value  # another Arrow form of the same bytes
        raise NoValue
    if source.is_decimal or target.is_decimal:
        return _converted_decimal(value, source, target)
    if target.kind is Kind.BOOL:
        if math.isnan(value):
            raise NoValue
        return bool(value)
    if target.is_float:
        # More than 53 bits would be rounded twice on their way to 32.
        if target.kind is Kind.F32 and isinstance(value, int) and abs(value) > 1 << 53:
            raise NoValue
        return float(value)
    if source.is_float:
        return math.trunc(value)
    match source.kind, target.kind:
        case Kind.TIME, _ if target.kind is not Kind.TIME:
            return int(value)
        case _, Kind.TIME if source.kind is not Kind.TIME:
            raise NoValue
        case _, Kind.DATE64 if source.kind in (Kind.TS, Kind.DATE) and is_utc(source):
            return value // ticks_per_day(source) * ticks_per_day(target)
        case _, Kind.DATE64 if source.kind not in TIMES and value % ticks_per_day(target):
            raise NoValue
        case one, other if one in TIMES and other in TIMES:
            if one is not other and not (is_utc(source) and is_utc(target)):
                raise NoValue
            return value * ticks_per_day(target) // ticks_per_day(source)
        case _:
            return int(value)


def _converted_decimal(value: Any, source: DType, target: DType) -> Any:
    if target.is_float:
        return decimals.to_float(value, source.scale)
    if source.is_float:
        found = decimals.from_float(value, target.scale)
        if found is None:
            raise NoValue
        return found
    if target.is_decimal:
        return decimals.rescaled(value, source.scale, target.scale)
    return decimals.truncated(value, source.scale)


def _is_wider(call: Call) -> bool:
    """Whether a number becomes a wider integer or an f64."""
    source, target = type_of(call.args[0]), type_of(call)
    if target == F64:
        return source.kind in (*SIGNED, *FLOATS)
    return {source.kind, target.kind} <= {*SIGNED} and SIGNED.index(source.kind) <= SIGNED.index(target.kind)


def _same_integer(call: Call) -> Moved | None:
    (value,) = call.args
    return Moved(value, 0) if type_of(value).is_int and type_of(call).is_int else None


declare(Function("cast", _cast, fallible=_cast_fails, host=_reads_or_writes_text, arrow="cast", fold=_fold,
                 moved=_same_integer, show="{0}.cast({type})", spark="cast", spark_if=_is_wider))
