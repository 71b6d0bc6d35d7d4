"""Schedule: the choices of a run that no result may depend on, in one place, so that tests can make them at random.

A driver asks the current schedule how to cut rows into rounds and morsels, which worker gets a morsel, which port is
next, and what time it is. The schedule of production cuts as proposed (`morsels.py`, `jobs/driver.py`), lets whichever
worker is free take the next morsel, and takes ports in turn. `using` puts another one in its place, for runs that start
meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from scalein.connectors import clock as clocks

Assign = Callable[[int], int]  # (number of workers) -> the worker that gets the next morsel


class Schedule:
    """The schedule of production."""

    assign: Assign | None = None  # None: whichever worker is free

    def round_rows(self, proposed: int) -> int:
        """Rows of a round of a job, at most."""
        return proposed

    def piece_rows(self) -> int | None:
        """Rows that are taken at once of a source batch; None takes all of it."""
        return None

    def morsel_rows(self, proposed: int) -> int:
        """Rows of a morsel, at most."""
        return proposed

    def next_port(self, ready: Sequence[int], last: int) -> int:
        """The port, of those that have rows, that is taken from after `last`."""
        return next((port for port in ready if port > last), ready[0])

    def clock(self) -> clocks.Clock:
        """The clock that a job waits by."""
        return clocks.clock()


_current: list[Schedule] = [Schedule()]


def schedule() -> Schedule:
    """The schedule of runs that start now."""
    return _current[-1]


@contextmanager
def using(given: Schedule) -> Iterator[None]:
    """Within, runs follow this schedule.

    >>> class OneByOne(Schedule):
    ...     def morsel_rows(self, proposed: int) -> int:
    ...         return 1
    >>> with using(OneByOne()):
    ...     schedule().morsel_rows(1000)
    1
    """
    _current.append(given)
    try:
        yield
    finally:
        _current.remove(given)
