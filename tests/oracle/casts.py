"""Casts between all types: numbers exactly or not at all, text as Arrow reads and writes it.

A lower scale of a decimal rounds half away from zero; whole numbers and times of coarser units are cut, numbers towards
zero and times towards the past.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

from scalein.dtypes import TIMES, UNITS_PER_SECOND, DType, Kind, ticks_per_day
from tests.oracle.functions import (
    SECONDS_PER_DAY,
    NoValue,
    date_of,
    day_number,
    half_up,
    in_range,
    local,
    offset_s,
    zone,
)
from tests.oracle.values import as_float32, rounded


def cast(a: Any, source: DType, target: DType) -> Any:
    """A value of one type as one of another."""
    if target.is_string:
        return text_of(a, source)
    if source.is_string and target.kind is not Kind.BIN:
        return value_of(a, target)
    if target.kind is Kind.BIN:
        return _to_bytes(a, target)
    if source.is_decimal or target.is_decimal:
        return _cast_decimal(a, source, target)
    if target.kind is Kind.BOOL:
        return a != 0
    if target.is_float:
        return nearest_float(a, target)
    if source.is_float:
        return in_range(_truncated(a), target)
    if source.kind in TIMES and target.kind in TIMES:
        return _cast_time(a, source, target)
    if target.kind is Kind.TIME and not 0 <= a < ticks_per_day(target):
        raise NoValue("impossible cast")
    if target.kind is Kind.DATE64 and a % ticks_per_day(target):
        raise NoValue("impossible cast")
    return in_range(int(a), target)


def _cast_time(a: int, source: DType, target: DType) -> int:
    have, want = ticks_per_day(source), ticks_per_day(target)
    if target.kind is Kind.TIME:
        ticks = local(a, source) if source.kind is Kind.TS else a
        return ticks % have * want // have
    found = a * want // have
    return in_range(found // want * want if target.kind is Kind.DATE64 else found, target)


def _to_bytes(a: Any, target: DType) -> bytes:
    found = a.encode() if isinstance(a, str) else a
    if target.form == "fixed" and len(found) != target.width:
        raise NoValue("impossible cast")
    return found  # type: ignore[no-any-return]


def nearest_float(a: float, target: DType) -> float:
    """The nearest float of the type: of an integer too, which is rounded once and not over a float64."""
    if isinstance(a, float) or target.kind is Kind.F64:
        return rounded(float(a), target)
    size = abs(a)
    drop = max(0, size.bit_length() - 24)
    kept, rest = divmod(size, 1 << drop)
    half = (1 << drop) >> 1
    kept += drop > 0 and (rest > half or (rest == half and kept % 2 == 1))
    return as_float32(math.ldexp(kept, drop)) * (-1 if a < 0 else 1)


def _truncated(a: float) -> int:
    if not math.isfinite(a):
        raise NoValue("impossible cast of nan or inf")
    return math.trunc(a)


def _cast_decimal(a: Any, source: DType, target: DType) -> Any:
    if target.is_float:
        return rounded(_quotient(Fraction(a) / Fraction(10) ** source.scale), target)
    if source.is_float:
        if not math.isfinite(a):
            raise NoValue("impossible cast of nan or inf")
        scaled = a * 10.0**target.scale if target.scale >= 0 else a / 10.0**-target.scale  # as floats do it
        exact = Fraction(scaled) if math.isfinite(scaled) else Fraction(target.int_range()[1] + 1)
        return in_range(half_up(exact.numerator, exact.denominator), target)
    scale = target.scale if target.is_decimal else 0
    exact = Fraction(int(a)) * Fraction(10) ** (scale - source.scale)
    if target.is_decimal:
        return in_range(half_up(exact.numerator, exact.denominator), target)
    return in_range(math.trunc(exact), target)


def _quotient(exact: Fraction) -> float:
    try:
        return exact.numerator / exact.denominator
    except OverflowError:
        return math.copysign(math.inf, exact.numerator)


# --- values as text -------------------------------------------------------------------------------------------------


def text_of(a: Any, source: DType) -> str:
    """A value as Arrow writes it."""
    match source.kind:
        case Kind.STR:
            return a  # type: ignore[no-any-return]
        case Kind.BIN:
            try:
                return a.decode()  # type: ignore[no-any-return]
            except UnicodeDecodeError as error:
                raise NoValue("impossible cast") from error
        case Kind.BOOL:
            return "true" if a else "false"
        case Kind.F64:
            return _float_text(a, repr)
        case Kind.F32:
            return _float_text(a, _shortest_float32)
        case Kind.DEC:
            return _decimal_text(a, source.scale)
        case Kind.DATE | Kind.DATE64:
            return _date_text(a // ticks_per_day(source), a)
        case Kind.TIME:
            return _clock_text(a, source.unit)
        case Kind.TS:
            return _timestamp_text(a, source)
    return str(a)


def _shortest_float32(a: float) -> str:
    return next(text for digits in range(1, 10) if as_float32(float(text := f"{a:.{digits}g}")) == a)


def _float_text(a: float, shortest: Callable[[float], str]) -> str:
    """The fewest digits that give the float back; with an exponent below 1e-6 and from 1e10 on."""
    if not math.isfinite(a):
        return str(a)
    if a == 0:
        return "-0" if math.copysign(1.0, a) < 0 else "0"
    sign, digits, exponent = Decimal(shortest(a)).normalize().as_tuple()
    assert isinstance(exponent, int)
    text, point = "".join(map(str, digits)), len(digits) + exponent  # the point stands after so many digits
    if -6 < point <= 10:
        number = text.ljust(point, "0") if point >= len(text) else f"{text[:point]}.{text[point:]}" if point > 0 else (
            "0." + "0" * -point + text)
    else:
        mantissa = text[0] + ("." + text[1:] if len(text) > 1 else "")
        number = f"{mantissa}e{point - 1:+d}" if point > 1 else f"{mantissa}e{point - 1}"
    return "-" * sign + number


def _decimal_text(a: int, scale: int) -> str:
    """With an exponent where there are no digits before it, or more than six zeros after the point."""
    digits = str(abs(a))
    adjusted = len(digits) - 1 - scale
    sign = "-" if a < 0 else ""
    if scale < 0 or adjusted < -6:
        return f"{sign}{digits[0]}{'.' + digits[1:] if len(digits) > 1 else ''}E{adjusted:+d}"
    if scale == 0:
        return sign + digits
    padded = digits.rjust(scale + 1, "0")
    return f"{sign}{padded[:-scale]}.{padded[-scale:]}"


def _date_text(days: int, value: int) -> str:
    date, moved = date_of(days)
    year = date.year + moved
    if not -32_767 <= year <= 32_767:
        return f"<value out of range: {value}>"
    return f"{'-' if year < 0 else ''}{abs(year):04}-{date:%m-%d}"


def _clock_text(ticks: int, unit: str) -> str:
    per_second = UNITS_PER_SECOND[unit]
    seconds, fraction = divmod(ticks, per_second)
    clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return clock if unit == "s" else f"{clock}.{fraction:0{len(str(per_second)) - 1}}"


def _timestamp_text(a: int, source: DType) -> str:
    day = ticks_per_day(source)
    ticks = local(a, source)
    date = _date_text(ticks // day, a)
    if date.startswith("<"):
        return date
    text = f"{date} {_clock_text(ticks % day, source.unit)}"
    if source.tz == "":
        return text
    if zone(source.tz) is datetime.UTC:
        return text + "Z"
    offset = offset_s(a // UNITS_PER_SECOND[source.unit], source.tz)
    return f"{text}{'-' if offset < 0 else '+'}{abs(offset) // 3600:02}{abs(offset) // 60 % 60:02}"


# --- text as values -------------------------------------------------------------------------------------------------

_INT = re.compile(r"-?[0-9]+|0[xX][0-9a-fA-F]+")
_FLOAT = re.compile(r"[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|(?i:inf(?:inity)?)|"
                    r"(?i:nan)(?:\([A-Za-z0-9_]*\))?)")  # fmt: skip
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_DATE = r"([0-9]{4})-([0-9]{2})-([0-9]{2})"
_CLOCK = r"([0-9]{2})(?::([0-9]{2})(?::([0-9]{2})(?:\.([0-9]+))?)?)?"
_ZONE = r"(?:Z|([+-])([0-9]{2})(?::?([0-9]{2}))?)"
_TIMESTAMP = re.compile(rf"{_DATE}(?:[ T]{_CLOCK}({_ZONE})?)?")


def value_of(a: str, target: DType) -> Any:
    """Text as Arrow reads it."""
    found = _parsed(a, target)
    if found is None:
        raise NoValue("impossible cast")
    return found


def _parsed(a: str, target: DType) -> Any:
    match target.kind:
        case Kind.BOOL:
            return {"true": True, "1": True, "false": False, "0": False}.get(_ascii_lower(a))
        case Kind.F64 | Kind.F32:
            return _parsed_float(a, target) if _FLOAT.fullmatch(a) else None
        case Kind.DEC:
            return _parsed_decimal(a, target) if _DECIMAL.fullmatch(a) else None
        case Kind.TS:
            return _parsed_timestamp(a, target)
        case Kind.DATE | Kind.DATE64:
            days = _days(*found.groups()) if (found := re.fullmatch(_DATE, a, re.ASCII)) else None
            return None if days is None else days * ticks_per_day(target)
        case Kind.TIME:
            return None if re.search(_ZONE + "$", a) else (
                _parsed_timestamp(f"1970-01-01 {a}", DType(Kind.TS, unit=target.unit)))
    return _parsed_int(a, target) if _INT.fullmatch(a) else None


def _ascii_lower(a: str) -> str:
    return "".join(chr(ord(c) + 32) if "A" <= c <= "Z" else c for c in a)


def _parsed_int(a: str, target: DType) -> int | None:
    """Decimal digits, or the bits as hexadecimal ones."""
    low, high = target.int_range()
    if a[:2] in ("0x", "0X"):
        if len(a) - 2 > target.bits // 4:
            return None
        found = int(a, 16)
        return found - (1 << target.bits) if found > high else found
    found = int(a)
    return None if not low <= found <= high or (a[0] == "-" and low == 0) else found


def _parsed_float(a: str, target: DType) -> float:
    if "nan" in a.lower():
        return math.nan
    found = float(a)
    if target.kind is Kind.F64 or not math.isfinite(found):
        return found
    near = as_float32(found)  # rounded once: the two floats next to it are tried against the exact value
    exact = Fraction(Decimal(a)) if abs(Decimal(a).adjusted()) < 400 else Fraction(0)
    if math.isinf(near) or near == 0 or not exact:
        return near
    step = math.ldexp(1.0, max(-149, math.frexp(near)[1] - 24))
    return min((near, as_float32(near - step), as_float32(near + step)), key=lambda each: (
        abs(Fraction(each) - exact) if math.isfinite(each) else exact * exact + 1, math.frexp(each)[0] * 2**24 % 2))


def _parsed_decimal(a: str, target: DType) -> int | None:
    """All digits must be kept."""
    with localcontext() as context:
        context.prec = 10_000
        number = Decimal(a)
        exponent = number.as_tuple().exponent
        assert isinstance(exponent, int)
        if -exponent - len(number.as_tuple().digits) > 76 or exponent > 38:
            return None
        digits = Fraction(number) * Fraction(10) ** target.scale
    whole = digits.numerator
    low, high = target.int_range()
    return whole if digits.denominator == 1 and low <= whole <= high else None


def _days(year: str, month: str, day: str) -> int | None:
    try:
        return day_number(int(year), int(month), int(day))
    except ValueError:
        return None


def _parsed_timestamp(a: str, target: DType) -> int | None:
    """A date, and after it the hour, minute, second and as many digits of it as the unit has.

    An offset or Z gives the time in UTC. Without one it is UTC's as well, if the type has no other zone.
    """
    found = _TIMESTAMP.fullmatch(a)
    if found is None:
        return None
    year, month, day, hour, minute, second, fraction, offset, sign, ahead_h, ahead_m = found.groups(None)
    days = _days(year, month, day)
    clock = [int(part or 0) for part in (hour, minute, second)]
    digits = len(str(UNITS_PER_SECOND[target.unit])) - 1
    if days is None or clock[0] > 23 or max(clock[1:]) > 59 or len(fraction or "") > digits:
        return None
    if (offset is None and zone(target.tz) is not datetime.UTC) or int(ahead_h or 0) > 23 or int(ahead_m or 0) > 59:
        return None
    ahead = (int(ahead_h or 0) * 3600 + int(ahead_m or 0) * 60) * (-1 if sign == "-" else 1)
    seconds = days * SECONDS_PER_DAY + clock[0] * 3600 + clock[1] * 60 + clock[2] - ahead
    ticks = seconds * UNITS_PER_SECOND[target.unit] + int((fraction or "").ljust(digits, "0") or 0)
    low, high = target.int_range()
    return ticks if low <= ticks <= high else None
