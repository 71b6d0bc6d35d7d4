"""Formats of times: the directives of Python's `strftime` and `strptime` that can be compiled, in English.

`%Y %m %d %H %M %S` are numbers, `%f` microseconds, `%y` a year without its century, `%j` the day of the year, `%I` the
hour of a clock with twelve and `%p` its AM or PM, `%b %B %a %A` short and long names of months and weekdays, `%u` and
`%w` the number of the weekday (Sunday is 7 or 0), `%z` an offset from UTC and `%Z` a zone's name. `%F %T %R %D` stand
for `%Y-%m-%d`, `%H:%M:%S`, `%H:%M` and `%m/%d/%y`.
"""

from __future__ import annotations

import re
from functools import lru_cache

MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
          "December")  # fmt: skip
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

_SHORT = {"F": "%Y-%m-%d", "T": "%H:%M:%S", "R": "%H:%M", "D": "%m/%d/%y"}
_OF_DATES, _OF_CLOCKS, _OF_ZONES = frozenset("YymdjbBaAuw"), frozenset("HIMSfp"), frozenset("zZ")
_WRITTEN = _OF_DATES | _OF_CLOCKS | _OF_ZONES
_READ = _WRITTEN - frozenset("uwZ")
# What says the same: two of them in one format could contradict each other.
_SAME = ("Yy", "mbBj", "dj", "HI")

MAX_DIRECTIVES = 64  # of a format: LLVM compiles 64 in a second, and 300 in 12 s

Part = tuple[str, str]  # a directive's letter and "", or "" and text that stands for itself


class BadFormat(ValueError):
    """The format is not supported; the text says why."""


def spelled_out(pattern: str) -> str:
    """A format without directives that stand for others.

    >>> spelled_out("%F at %R, 100%%F")
    '%Y-%m-%d at %H:%M, 100%%F'
    """
    return re.sub("%(.)", lambda found: _SHORT.get(found[1], found[0]), pattern, flags=re.DOTALL)


@lru_cache(256)
def parts(pattern: str) -> tuple[Part, ...]:
    """The directives of a format that is spelled out, and the text between them; raises `BadFormat`.

    >>> parts("%H:%M")
    (('H', ''), ('', ':'), ('M', ''))
    """
    found: list[Part] = []
    for directive, text in re.findall(r"(%.?)|([^%]+)", pattern, re.DOTALL):
        letter = directive[1:]
        if letter in _WRITTEN:
            found.append((letter, ""))
        elif text or letter == "%":
            found.append(("", text or letter))
        else:
            known = " ".join(f"%{each}" for each in sorted(_WRITTEN | _SHORT.keys()))
            raise BadFormat(f"{directive} is not among {known}" if letter else "it ends in a single %")
    count = sum(letter != "" for letter, _ in found)
    if count > MAX_DIRECTIVES:
        raise BadFormat(f"it has {count} directives, and at most {MAX_DIRECTIVES} are compiled")
    return tuple(found)


def letters(pattern: str) -> frozenset[str]:
    """The directives in a format."""
    return frozenset(letter for letter, _ in parts(pattern) if letter)


def needs_date(pattern: str) -> bool:
    return bool(letters(pattern) & _OF_DATES)


def needs_clock(pattern: str) -> bool:
    return bool(letters(pattern) & _OF_CLOCKS)


def needs_zone(pattern: str) -> bool:
    return bool(letters(pattern) & _OF_ZONES)


def check_readable(pattern: str) -> None:
    """Raise `BadFormat` if a text does not follow from a format, or says something twice."""
    given = [letter for letter, _ in parts(pattern) if letter]
    for letter in given:
        if letter not in _READ:
            raise BadFormat(f"%{letter} can be written, but not read")
        if given.count(letter) > 1:
            raise BadFormat(f"%{letter} stands there twice")
    for same in _SAME:
        both = [letter for letter in given if letter in same]
        if len(both) > 1:
            raise BadFormat(f"%{both[0]} and %{both[1]} say the same")
    if ("I" in given) != ("p" in given):
        raise BadFormat("%I and %p belong together")
