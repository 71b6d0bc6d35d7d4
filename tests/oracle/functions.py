"""FUNCTIONS: every scalar function as a Python function of a typed call and the values of one row.

`fn(call, *values)` gives the value, or raises `NoValue` where the row has none; the text says why. Values are not null,
except for the functions in NULL_TAKING: null in, null out is decided in `exprs.py`, and so is what is lazy.
"""

from __future__ import annotations

import calendar
import datetime
import functools
import math
import re
import struct
import zoneinfo
from collections.abc import Callable
from typing import Any

from scalein.dtypes import UNITS_PER_SECOND, DType, Kind, ticks_per_day
from scalein.ir.exprs import Call, type_of
from scalein.ir.udf import AnyUdf
from tests.oracle import udfs
from tests.oracle.values import order_key, rounded

Function = Callable[..., Any]

SECONDS_PER_DAY = 86_400


class NoValue(ArithmeticError):
    """This row has no value; the text says why, in the words of the error that the user sees."""


def in_range(value: int, dtype: DType) -> int:
    """The value, if the type holds it."""
    low, high = dtype.int_range()
    if not low <= value <= high:
        raise NoValue("overflow")
    return value


# --- arithmetic: floats follow IEEE in their own width, whole numbers are exact or fail ---------------------------


def _result(call: Call, value: Any) -> Any:
    dtype = type_of(call)
    return rounded(value, dtype) if dtype.is_float else in_range(value, dtype)


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


def _floordiv(call: Call, a: Any, b: Any) -> Any:
    if type_of(call).is_float:
        return float_floor(rounded(float_div(a, b), type_of(call)))
    if b == 0:
        raise NoValue("division by zero")
    return in_range(a // b, type_of(call))


def _mod(call: Call, a: Any, b: Any) -> Any:
    dtype = type_of(call)
    if dtype.is_float:
        return rounded(a - rounded(_floordiv(call, a, b) * b, dtype), dtype) if b != 0 else math.nan
    if b == 0:
        raise NoValue("division by zero")
    return in_range(a % b, dtype)


def _round(call: Call, a: Any) -> Any:
    """Half away from zero, at the tenth, hundredth, ... or at tens, hundreds, ...; in the width of the type."""
    dtype = type_of(call)
    digits = int(str(call.params[0]))
    if dtype.is_decimal:
        unit = 10 ** max(0, dtype.scale - digits)
        return in_range(half_up(a, unit) * unit, dtype)
    if not dtype.is_float:
        return a
    scale = rounded(10.0 ** abs(digits), dtype)
    if digits < 0:
        return rounded(half_away(rounded(a / scale, dtype)) * scale, dtype)
    scaled = rounded(a * scale, dtype)
    return rounded(half_away(scaled) / scale, dtype) if math.isfinite(scaled) else a  # too great to have such digits


def half_up(a: int, unit: int) -> int:
    """a / unit as the nearest whole number; ties go away from zero."""
    whole, rest = divmod(abs(a), unit)
    return (whole + (2 * rest >= unit)) * (-1 if a < 0 else 1)


def _sqrt(call: Call, a: float) -> float:
    return math.nan if a < 0 else rounded(math.sqrt(a), type_of(call))


def _exp(call: Call, a: float) -> float:
    try:
        return rounded(math.exp(a), type_of(call))
    except OverflowError:
        return math.inf


def _log(call: Call, a: float) -> float:
    if a == 0:
        return -math.inf
    return math.nan if a < 0 else rounded(math.log(a), type_of(call))


def _pow(call: Call, a: float, b: float) -> float:
    is_odd = math.isfinite(b) and b == math.floor(b) and b % 2 == 1
    try:
        return rounded(math.pow(a, b), type_of(call))
    except OverflowError:
        return -math.inf if a < 0 and is_odd else math.inf
    except ValueError:  # 0 to a negative power, or a root of a negative number
        return (math.copysign(math.inf, a) if is_odd else math.inf) if a == 0 else math.nan


# --- the least and greatest of a row --------------------------------------------------------------------------------


def _beyond(call: Call, *values: Any) -> Any:
    """The greatest or least value that is not null, of equal ones the first."""
    known = [value for value in values if value is not None]
    return (max if call.fn == "row_max" else min)(known, key=order_key, default=None)


def _clip(call: Call, a: Any, low: Any, high: Any) -> Any:
    """A bound that is null is none; where the bounds are the wrong way round, the high one counts."""
    if a is None:
        return None
    a = low if low is not None and order_key(a) < order_key(low) else a
    return high if high is not None and order_key(a) > order_key(high) else a


# --- sets, hashes ---------------------------------------------------------------------------------------------------


def _is_in(call: Call, a: Any) -> bool | None:
    """SQL's IN: not found in a list that has a null is unknown."""
    values, has_null = call.params
    assert isinstance(values, tuple)
    return True if order_key(a) in {order_key(value) for value in values} else None if has_null else False


_P1, _P2, _P3, _P4, _P5 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63,
                           0x27D4EB2F165667C5)  # fmt: skip
_MASK = (1 << 64) - 1


def _rotated(number: int, by: int) -> int:
    number &= _MASK
    return (number << by | number >> 64 - by) & _MASK


def xxh64(data: bytes, seed: int = 42) -> int:
    """XXH64, as its specification has it."""
    mixed = lambda lane, word: _rotated(lane + word * _P2, 31) * _P1 & _MASK  # noqa: E731
    at, found = 0, seed + _P5
    if len(data) >= 32:
        lanes = [seed + _P1 + _P2, seed + _P2, seed, seed - _P1]
        for at in range(0, len(data) - 31, 32):
            lanes = [mixed(lane, word) for lane, word in zip(lanes, struct.unpack_from("<4Q", data, at), strict=True)]
        at += 32
        found = sum(_rotated(lane, by) for lane, by in zip(lanes, (1, 7, 12, 18), strict=True))
        for lane in lanes:
            found = (found ^ mixed(0, lane)) * _P1 + _P4 & _MASK
    found = found + len(data) & _MASK
    for at in range(at, len(data) - 7, 8):  # noqa: B020
        found = _rotated(found ^ mixed(0, int.from_bytes(data[at : at + 8], "little")), 27) * _P1 + _P4
    rest = data[len(data) - len(data) % 8 :]
    if len(rest) >= 4:
        found = _rotated(found ^ int.from_bytes(rest[:4], "little") * _P1 & _MASK, 23) * _P2 + _P3
        rest = rest[4:]
    for byte in rest:
        found = _rotated(found ^ byte * _P5 & _MASK, 11) * _P1
    found &= _MASK
    found = (found ^ found >> 33) * _P2 & _MASK
    found = (found ^ found >> 29) * _P3 & _MASK
    return found ^ found >> 32


def hash_value(value: Any, dtype: DType) -> int:
    """XXH64 with the seed 42, as a signed integer, of a value's bytes; the seed itself for null."""
    if value is None:
        return 42
    if isinstance(value, str | bytes):
        data = value.encode() if isinstance(value, str) else value
    elif isinstance(value, float):
        data = struct.pack("<f" if dtype.kind is Kind.F32 else "<d", math.nan if math.isnan(value) else value + 0.0)
    else:
        bits = (128 if dtype.precision > 18 else 64) if dtype.is_decimal else max(32, dtype.bits)
        data = (int(value) % (1 << bits)).to_bytes(bits // 8, "little")
    found = xxh64(data)
    return found - (1 << 64) if found >> 63 else found


# --- text -----------------------------------------------------------------------------------------------------------

# Of these Python knows no simple mapping of one code point to one, which Unicode has.
_IOTAS = [code for start in (0x1F80, 0x1F90, 0x1FA0) for code in range(start, start + 8)]
_UPPER = {"ß": "ẞ", **{chr(code): chr(code + 8) for code in _IOTAS}, "ᾳ": "ᾼ", "ῃ": "ῌ", "ῳ": "ῼ"}
_LOWER = {"İ": "i"}


def _upper(call: Call, a: str) -> str:
    return "".join(_UPPER.get(c) or (c.upper() if len(c.upper()) == 1 else c) for c in a)


def _lower(call: Call, a: str) -> str:
    return "".join(_LOWER.get(c) or (c.lower() if len(c.lower()) == 1 else c) for c in a)


def _str_slice(call: Call, a: str) -> str:
    """Code points [offset, offset + length); a negative offset counts from the end, before the start is empty."""
    offset, length = call.params
    assert isinstance(offset, int)
    assert length is None or isinstance(length, int)
    start = offset if offset >= 0 else len(a) + offset
    stop = len(a) if length is None else start + length
    return a[max(start, 0) : max(stop, 0)]


def _split_part(call: Call, a: str) -> str:
    """Part `number` from 1, or from the end if negative; empty where there is none."""
    by, number = call.params
    parts = a.split(by)  # type: ignore[arg-type]
    at = number - 1 if number > 0 else len(parts) + number  # type: ignore[operator]
    return parts[at] if 0 <= at < len(parts) else ""


@functools.cache
def _pattern(pattern: str) -> re.Pattern[str]:
    """RE2's regular expression for Python: classes and boundaries are ASCII's, `$` is the end of the text."""
    head = re.match(r"\(\?[a-z]+\)", pattern)
    is_multiline = head is not None and "m" in head[0]
    ended = pattern if is_multiline else re.sub(r"(\\.)|\$", lambda found: found[1] or r"\Z", pattern)
    flags = re.ASCII if pattern.isascii() and not re.search(r"\(\?[a-z]*i", pattern) else re.NOFLAG
    return re.compile(ended, flags)


def _matches(call: Call, a: str) -> bool:
    return _pattern(str(call.params[0])).search(a) is not None


def _extract(call: Call, a: str) -> str | None:
    """What a group of the first match holds; empty where the group took no part in it, null where nothing matches."""
    pattern, group = call.params
    found = _pattern(str(pattern)).search(a)
    return None if found is None else found[group] or ""  # type: ignore[call-overload, no-any-return]


# --- time -----------------------------------------------------------------------------------------------------------


@functools.cache
def zone(name: str) -> datetime.tzinfo:
    """The time zone of a timestamp type: UTC, an offset such as +05:30, or a name of the IANA database."""
    if name in ("", "UTC", "Etc/UTC", "Z"):
        return datetime.UTC
    offset = re.fullmatch(r"([+-])(\d\d):?(\d\d)", name)
    if offset is None:
        return zoneinfo.ZoneInfo(name)
    span = datetime.timedelta(hours=int(offset[2]), minutes=int(offset[3]))
    return datetime.timezone(-span if offset[1] == "-" else span)


def offset_s(seconds: int, name: str) -> int:
    """Seconds that a zone's clock is ahead of UTC at an instant, given in seconds of the epoch."""
    if zone(name) is datetime.UTC:
        return 0
    day, rest = divmod(seconds, SECONDS_PER_DAY)
    date, years = date_of(day)
    cycle = date.replace(year=date.year - 400) if not 1 <= date.year + years <= 9999 else date.replace(
        year=date.year + years)
    utc = datetime.datetime.combine(cycle, datetime.time(), datetime.UTC) + datetime.timedelta(seconds=rest)
    offset = utc.astimezone(zone(name)).utcoffset()
    assert offset is not None
    return int(offset.total_seconds())


def local(ticks: int, dtype: DType) -> int:
    """A timestamp as its zone's clock shows it, in ticks since midnight of the epoch's first day there."""
    per_second = UNITS_PER_SECOND[dtype.unit]
    return ticks + offset_s(ticks // per_second, dtype.tz) * per_second


def _truncate(call: Call, a: int) -> int:
    """Down to a multiple of the length on the local clock, and back; a clock time that is not one instant fails."""
    dtype, every = type_of(call), int(str(call.params[0]))
    per_second = UNITS_PER_SECOND[dtype.unit]
    wanted = local(a, dtype) // every * every
    around = {offset_s(wanted // per_second + side * SECONDS_PER_DAY, dtype.tz) for side in (-1, 0, 1)}
    found = {wanted - offset * per_second for offset in around
             if local(wanted - offset * per_second, dtype) == wanted}
    if len(found) != 1:
        raise NoValue("impossible cast")
    return in_range(found.pop(), dtype)


def _epoch(call: Call, a: int) -> int:
    ticks = UNITS_PER_SECOND[str(call.params[0])] * SECONDS_PER_DAY
    return in_range(a * ticks // ticks_per_day(type_of(call.args[0])), type_of(call))


def _total(ticks_in_a_day: int) -> Function:
    """Whole units of a duration, towards zero."""

    def apply(call: Call, a: int) -> int:
        have = ticks_per_day(type_of(call.args[0]))
        return in_range(abs(a) * ticks_in_a_day // have * (-1 if a < 0 else 1), type_of(call))

    return apply


_NAMES = {letter: getattr(calendar, names) for letter, names in (
    ("b", "month_abbr"), ("B", "month_name"), ("a", "day_abbr"), ("A", "day_name"))}  # fmt: skip


def _strftime(call: Call, a: int) -> str:
    """Each directive as Python's own `datetime` writes it; a year may have more digits, and a sign."""
    dtype = type_of(call.args[0])
    day = ticks_per_day(dtype)
    date, moved = date_of(a // day)
    seconds, fraction = divmod(a % day * SECONDS_PER_DAY * 10**6 // day, 10**6)
    time = datetime.datetime.combine(date, datetime.time()) + datetime.timedelta(seconds=seconds, microseconds=fraction)
    if dtype.tz:
        time = time.replace(tzinfo=datetime.UTC)
    year = date.year + moved

    def written(found: re.Match[str]) -> str:
        match found[1]:
            case "Y":
                return f"{'-' if year < 0 else ''}{abs(year):04}"
            case "%":
                return "%"
            case letter:
                return time.strftime(f"%{letter}")

    return re.sub("%(.)", written, str(call.params[0]), flags=re.DOTALL)


_READ = {
    "Y": r"([0-9]{4})", "y": r"([0-9]{2})", "j": r"([0-9]{1,3}+)", "f": r"([0-9]{1,6}+)", "p": "([AaPp][Mm])",
    "z": r"(Z|[+-][0-9]{2}(?::?[0-9]{2})?+)", "%": "%",
    **dict.fromkeys("mdHIMS", r"([0-9]{1,2}+)"),
    **{letter: "(?ai:(" + "|".join(f"{name[:3]}(?:{name[3:]})?+" for name in _NAMES[letter.upper()] if name) + "))"
       for letter in "bBaA"},
}  # fmt: skip


def _strptime(call: Call, a: str) -> int:
    """By a regular expression in which numbers take all digits that they can; then by the calendar."""
    pattern, target = str(call.params[0]), type_of(call)
    pieces = re.split("%(.)", pattern, flags=re.DOTALL)
    found = re.fullmatch("".join(_READ[piece] if number % 2 else re.escape(piece)
                                 for number, piece in enumerate(pieces)), a)
    if found is None:
        raise NoValue("text that is no such time")
    given = dict(zip((letter for letter in pieces[1::2] if letter != "%"), found.groups(), strict=True))
    try:
        return in_range(_instant(given, target), target)
    except (ValueError, NoValue):
        raise NoValue("text that is no such time") from None


def day_number(year: int, month: int, day: int) -> int:
    """Days since the epoch of a date in any year; raises ValueError if the calendar does not have it."""
    cycles, rest = divmod(year, 400)  # Python's years are 1 to 9999, the calendar's repeat
    date = datetime.date(2000 + rest, month, day)
    return date.toordinal() - datetime.date(1970, 1, 1).toordinal() + (cycles - 5) * 146_097


def _instant(given: dict[str, str], target: DType) -> int:
    """Ticks of a type of what a text says; raises ValueError for what the calendar or the clock does not have."""
    month = next((number for letter in "bB" if letter in given for number, name in enumerate(_NAMES["b"])
                  if name and name.lower() == given[letter][:3].lower()), int(given.get("m", 1)))  # fmt: skip
    year = int(given.get("Y", 1970))
    if "y" in given:
        year = int(given["y"]) + (2000 if int(given["y"]) < 69 else 1900)
    days = day_number(year, month, int(given.get("d", 1)))
    if "j" in given:
        days = day_number(year, 1, 1) + int(given["j"]) - 1
        if not day_number(year, 1, 1) <= days <= day_number(year, 12, 31):
            raise ValueError("no such day")
    hour = int(given.get("H", 0))
    if "I" in given:
        if not 1 <= int(given["I"]) <= 12:
            raise ValueError("no such hour")
        hour = int(given["I"]) % 12 + (12 if given["p"].lower() == "pm" else 0)
    clock = datetime.time(hour, int(given.get("M", 0)), int(given.get("S", 0)))
    seconds = clock.hour * 3600 + clock.minute * 60 + clock.second
    micros = int(given.get("f", "0").ljust(6, "0"))
    if target.kind is not Kind.TIME:
        offset = given.get("z", "Z").replace(":", "")
        ahead_h, ahead_m = (int(offset[1:3] or 0), int(offset[3:] or 0)) if offset != "Z" else (0, 0)
        if ahead_h > 23 or ahead_m > 59:
            raise ValueError("no such offset")
        seconds += days * SECONDS_PER_DAY - (ahead_h * 3600 + ahead_m * 60) * (-1 if offset[0] == "-" else 1)
    return (seconds * 10**6 + micros) * ticks_per_day(target) // (SECONDS_PER_DAY * 10**6)


def date_of(days: int) -> tuple[datetime.date, int]:
    """The date `days` after the epoch as one of the 400 years from 2000 on, and the years it was moved by.

    The calendar, with its weekdays, repeats after 400 years of 146,097 days.
    """
    cycles, rest = divmod(days - 10_957, 146_097)
    return datetime.date(2000, 1, 1) + datetime.timedelta(rest), 400 * cycles


def _date_part(part: Callable[[datetime.date, int], int]) -> Function:
    def apply(call: Call, a: int) -> int:
        dtype = type_of(call.args[0])
        ticks = local(a, dtype) if dtype.kind is Kind.TS else a
        return part(*date_of(ticks // ticks_per_day(dtype)))

    return apply


def _clock_part(repeats_ns: int, unit_ns: int) -> Function:
    """What a part of the clock repeats after, and what it counts, in nanoseconds."""

    def apply(call: Call, a: int) -> int:
        dtype = type_of(call.args[0])
        day = ticks_per_day(dtype)
        ticks = local(a, dtype) if dtype.kind is Kind.TS else a
        return ticks % day * (SECONDS_PER_DAY * 10**9 // day) % repeats_ns // unit_ns

    return apply


# --- nested values --------------------------------------------------------------------------------------------------


def _list_get(call: Call, a: list[Any]) -> Any:
    number = int(str(call.params[0]))
    return a[number] if -len(a) <= number < len(a) else None


def _udf(call: Call, *values: Any) -> Any:
    (udf,) = call.params
    assert isinstance(udf, AnyUdf)
    try:
        return udfs.call(udf, values)
    except udfs.Failed as error:
        raise NoValue(str(error)) from error.__cause__


def _cast(call: Call, a: Any) -> Any:
    from tests.oracle.casts import cast

    return cast(a, type_of(call.args[0]), type_of(call))


FUNCTIONS: dict[str, Function] = {
    "udf": _udf,
    "concat": lambda call, a, b: a + b,
    "clip": _clip,
    "row_max": _beyond,
    "row_min": _beyond,
    "add": lambda call, a, b: _result(call, a + b),
    "sub": lambda call, a, b: _result(call, a - b),
    "mul": lambda call, a, b: _result(call, a * b),
    "div": lambda call, a, b: _result(call, float_div(a, b)),
    "floordiv": _floordiv,
    "mod": _mod,
    "divisible": lambda call, a: a % call.params[0] == 0,
    "pow": _pow,
    "neg": lambda call, a: _result(call, -a),
    "abs": lambda call, a: _result(call, abs(a)),
    "floor": lambda call, a: float_floor(a) if type_of(call).is_float else a,
    "ceil": lambda call, a: -float_floor(-a) if type_of(call).is_float else a,
    "round": _round,
    "sqrt": _sqrt,
    "exp": _exp,
    "log": _log,
    "eq": lambda call, a, b: order_key(a) == order_key(b),
    "ne": lambda call, a, b: order_key(a) != order_key(b),
    "lt": lambda call, a, b: order_key(a) < order_key(b),
    "le": lambda call, a, b: order_key(a) <= order_key(b),
    "gt": lambda call, a, b: order_key(a) > order_key(b),
    "ge": lambda call, a, b: order_key(a) >= order_key(b),
    "not": lambda call, a: not a,
    "is_null": lambda call, a: a is None,
    "is_not_null": lambda call, a: a is not None,
    "is_nan": lambda call, a: math.isnan(a),
    "hash": lambda call, a: hash_value(a, type_of(call.args[0])),
    "is_in": _is_in,
    "try_divide": lambda call, a, b: _result(call, a / b) if b != 0 else None,
    "cast": _cast,
    "str_len": lambda call, a: len(a),
    "str_slice": _str_slice,
    "starts_with": lambda call, a: a.startswith(call.params[0]),
    "ends_with": lambda call, a: a.endswith(call.params[0]),
    "contains": lambda call, a: call.params[0] in a,
    "lower": _lower,
    "upper": _upper,
    "str_strip": lambda call, a: a.strip(call.params[0]),
    "str_lstrip": lambda call, a: a.lstrip(call.params[0]),
    "str_rstrip": lambda call, a: a.rstrip(call.params[0]),
    "str_split_part": _split_part,
    "str_extract": _extract,
    "str_matches": _matches,
    "str_replace": lambda call, a: a.replace(*call.params),
    "dt_year": _date_part(lambda date, moved: date.year + moved),
    "dt_quarter": _date_part(lambda date, moved: (date.month + 2) // 3),
    "dt_month": _date_part(lambda date, moved: date.month),
    "dt_day": _date_part(lambda date, moved: date.day),
    "dt_weekday": _date_part(lambda date, moved: date.isoweekday()),
    "dt_ordinal_day": _date_part(lambda date, moved: date.timetuple().tm_yday),
    "dt_hour": _clock_part(86_400 * 10**9, 3_600 * 10**9),
    "dt_minute": _clock_part(3_600 * 10**9, 60 * 10**9),
    "dt_second": _clock_part(60 * 10**9, 10**9),
    "dt_millisecond": _clock_part(10**9, 10**6),
    "dt_microsecond": _clock_part(10**9, 10**3),
    "dt_nanosecond": _clock_part(10**9, 1),
    "dt_total_days": _total(1),
    "dt_total_hours": _total(24),
    "dt_total_minutes": _total(24 * 60),
    "dt_total_seconds": _total(SECONDS_PER_DAY),
    "dt_total_milliseconds": _total(SECONDS_PER_DAY * 10**3),
    "dt_total_microseconds": _total(SECONDS_PER_DAY * 10**6),
    "dt_total_nanoseconds": _total(SECONDS_PER_DAY * 10**9),
    "dt_strftime": _strftime,
    "dt_local": lambda call, a: local(a, type_of(call.args[0])),
    "str_strptime": _strptime,
    "dt_truncate": _truncate,
    "dt_epoch": _epoch,
    "list_len": lambda call, a: len(a),
    "list_get": _list_get,
    "make_struct": lambda call, *values: dict(zip(call.params, values, strict=True)),
    "struct_field": lambda call, a: a[call.params[0]],
}

NULL_TAKING = {"is_null", "is_not_null", "hash", "udf", "clip", "row_max", "row_min", "make_struct"}
LAZY = {"and", "or", "if_else", "fill_null", "try"}  # `exprs.py` says which of their arguments are asked for
