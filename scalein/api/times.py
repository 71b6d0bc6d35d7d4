"""Times in the code of users: types of the fields of a class, and lengths of time."""

from __future__ import annotations

from datetime import datetime, timedelta

from scalein.durations import span
from scalein.errors import BadDuration, here

Timestamp = datetime
Duration = timedelta


def duration(length: str) -> timedelta:
    """A length of time, for the code of a class that `process` runs: "1m", "1h30m", "10 seconds".

    >>> import scalein as si
    >>> si.duration("1h30m")
    datetime.timedelta(seconds=5400)
    """
    at = here()
    found = span(length, "duration", at, zero=True, negative=True)
    microseconds, rest = divmod(found.length, 1_000)
    if found.is_count or rest:
        raise BadDuration("a duration is a text with units, in whole microseconds", at=at, found=repr(length),
                          hint='for example si.duration("10s")')
    return timedelta(microseconds=microseconds)
