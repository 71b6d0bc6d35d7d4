"""The clock that jobs and sources wait by; tests replace it with a virtual one."""

from __future__ import annotations

import time


class Clock:
    """The machine's own clock, in seconds from some moment on."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait for at most that long; callers check the time again."""
        time.sleep(seconds)


_REAL = Clock()
_current: list[Clock] = [_REAL]


def clock() -> Clock:
    """The clock of jobs that are started now."""
    return _current[-1]


def use(given: Clock) -> None:
    """From now on, take the time from this clock, until `leave`."""
    _current.append(given)


def leave(given: Clock) -> None:
    _current.remove(given)
