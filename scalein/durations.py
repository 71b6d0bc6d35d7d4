"""Lengths of time as users write them: "10s", "1h30m", "10 minutes", a timedelta, or a plain integer.

A `Span` is either an exact number of nanoseconds or a plain count, which fits integer time columns only.
It meets a column's unit in `in_units`, where everything that cannot fit is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta

from scalein.dtypes import UNITS_PER_SECOND, DType, Kind
from scalein.errors import BadDuration, SourceLoc

_SECOND_NS = UNITS_PER_SECOND["ns"]
_NANOSECONDS = {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": _SECOND_NS, "m": 60 * _SECOND_NS,
                "h": 3_600 * _SECOND_NS, "d": 86_400 * _SECOND_NS, "w": 7 * 86_400 * _SECOND_NS}  # fmt: skip
_WORDS = {
    "nanosecond": "ns", "microsecond": "us", "µs": "us", "millisecond": "ms", "milli": "ms", "second": "s", "sec": "s",
    "minute": "m", "min": "m", "hour": "h", "hr": "h", "day": "d", "week": "w",
}  # fmt: skip
_CALENDAR = ("mo", "month", "q", "quarter", "y", "yr", "year")
_PART = re.compile(r"\s*(\d+)\s*([a-zµ]+)")
_FORMS = 'write it like "10s", "1h30m", "500ms", "10 minutes", or as a timedelta'

Duration = str | timedelta | int


@dataclass(frozen=True, slots=True)
class Span:
    """A length: nanoseconds, or a plain count where `is_count`; `text` is what the user wrote."""

    length: int
    is_count: bool
    text: str

    def __repr__(self) -> str:
        return self.text


def span(value: object, what: str, at: SourceLoc, *, zero: bool = False, negative: bool = False) -> Span:
    """The length that `value` means; `what` names the argument in errors, `zero` and `negative` allow such a one.

    >>> from scalein.errors import NOWHERE
    >>> span("1h30m", "size", NOWHERE).length // 10**9
    5400
    """
    match value:
        case bool():
            raise _unreadable(value, what, at)
        case int():
            found = Span(value, True, str(value))
        case timedelta():
            nanoseconds = ((value.days * 86_400 + value.seconds) * 1_000_000 + value.microseconds) * 1_000
            found = Span(nanoseconds, False, repr(value))
        case str():
            found = Span(_parse(value, what, at), False, repr(value))
        case _:
            raise _unreadable(value, what, at)
    if found.length < 0 and not negative:
        raise BadDuration(f"the {what} is negative", at=at, found=found.text, hint="write it without the sign")
    if found.length == 0 and not zero:
        raise BadDuration(f"the {what} is zero", at=at, found=found.text, hint=_FORMS)
    return found


def seconds(value: object, what: str, at: SourceLoc) -> float:
    """A length on the clock, where a plain integer has no unit."""
    found = span(value, what, at)
    if found.is_count:
        raise _unreadable(value, what, at)
    return found.length / _SECOND_NS


def _unreadable(value: object, what: str, at: SourceLoc, hint: str = _FORMS) -> BadDuration:
    return BadDuration(f"the {what} must be a duration such as '5s'", at=at, found=repr(value), hint=hint)


def _parse(text: str, what: str, at: SourceLoc) -> int:
    """Nanoseconds of one or more numbers with units, each unit once and smaller than the one before."""
    rest = text.strip().lower()
    sign = -1 if rest.startswith("-") else 1
    rest = rest.removeprefix("-")
    total, smallest = 0, None
    while rest:
        part = _PART.match(rest)
        if part is None:
            raise _unreadable(text, what, at)
        name = part[2]
        unit = name if name in _NANOSECONDS else _WORDS.get(name) or _WORDS.get(name.removesuffix("s"))
        if unit is None and name.removesuffix("s") in _CALENDAR:
            raise _unreadable(text, what, at, hint="months, quarters and years have no fixed length; "
                              "group by .dt.year() and .dt.month(), or use days")
        if unit is None or (smallest is not None and _NANOSECONDS[unit] >= smallest):
            raise _unreadable(text, what, at)
        smallest = _NANOSECONDS[unit]
        total += int(part[1]) * smallest
        rest = rest[part.end() :].strip()
    if smallest is None:
        raise _unreadable(text, what, at)
    return sign * total


def in_units(length: Span, dtype: DType, what: str, column: str, at: SourceLoc) -> int:
    """The length in units of a timestamp or integer column; exact, or a `BadDuration`."""
    if length.is_count != dtype.is_int:
        form = "an integer" if dtype.is_int else "a duration with a unit"
        example = "10" if dtype.is_int else '"10s"'
        raise BadDuration(f"the {what} must be {form}, because {column} is {dtype!r}", at=at, found=length.text,
                          hint=f"for example {example}")
    if dtype.is_int:
        units, rest = length.length, 0
    else:
        units, rest = divmod(length.length, _SECOND_NS // UNITS_PER_SECOND[dtype.unit])
    if rest:
        raise BadDuration(f"the {what} is no whole number of {column}'s units ({dtype.unit})", at=at,
                          found=length.text, hint="cast the column to a finer unit, or take a longer duration")
    if abs(units) > dtype.int_range()[1]:
        raise BadDuration(f"the {what} is longer than {column} can count ({dtype!r})", at=at, found=length.text)
    assert dtype.is_int or dtype.kind in (Kind.TS, Kind.DUR)
    return units
