"""Time that a test moves, and points at which a job dies or waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from scalein.connectors import clock as clocks
from scalein.durations import Duration, seconds
from scalein.errors import BadArgument, here
from scalein.storage import failpoints
from scalein.storage.failpoints import POINTS, Crashed
from scalein.testing.streams import LONG_S


class Clock(clocks.Clock):
    """Time that stands still until the test moves it, for jobs and `si.generate` that are started inside of its `with`.

    It decides when a checkpoint is due (`every`), when a silent partition holds nothing back any more, and how many
    rows `max_rows_per_second` lets pass. Latencies are measured by the machine's clock as ever.

    >>> import scalein as si
    >>> from scalein.testing import stream, until
    >>> rows = si.to_memory()
    >>> with Clock() as clock:
    ...     job = si.from_source(stream("x \\n 1 \\n -- \\n 2")).start(sink=rows, max_rows_per_second=1)
    ...     until(lambda: rows.table().num_rows == 1, job)
    ...     clock.advance("1s")
    ...     job.wait()
    >>> rows.table().to_pydict()
    {'x': [1, 2]}
    """

    def __init__(self) -> None:
        self._now, self._moved = 0.0, threading.Condition()

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        with self._moved:
            self._moved.wait(min(seconds, 0.01))

    def advance(self, duration: Duration) -> None:
        """Let time pass, as in "10s"; it does not wait for what that brings about: see `until`."""
        with self._moved:
            self._now += seconds(duration, "advance", here())
            self._moved.notify_all()

    def __enter__(self) -> Self:
        clocks.use(self)
        return self

    def __exit__(self, *_: object) -> None:
        clocks.leave(self)


# --- deaths and pauses


@contextmanager
def crash_at(point: str, number: int = 1) -> Iterator[None]:
    """Let a job die when it comes to a point for the `number`th time: what is on disk stays as it is then.

    `POINTS` names the points. The job's `wait` raises `Crashed`; or `start` does, at "open". Started again, behind the
    `with`, the job must go on as if nothing had been: so sinks of one's own can be tried.

    >>> import tempfile, scalein as si
    >>> from scalein.testing import stream
    >>> folder = tempfile.mkdtemp()
    >>> def job():
    ...     out = si.to_parquet(f"{folder}/out")
    ...     return si.from_source(stream("x \\n 1 \\n -- \\n 2")).start(sink=out, checkpoint=f"{folder}/checkpoint")
    >>> with crash_at("commit"):
    ...     try:
    ...         job().wait()
    ...     except Crashed as crash:
    ...         print(crash)
    the job died at "commit": the epoch is published; its output is not visible yet
    >>> job().wait()
    >>> si.read_parquet(f"{folder}/out").collect().to_pydict()
    {'x': [1, 2]}
    """
    count = [0]

    def watch(reached: str) -> None:
        if reached == point:
            count[0] += 1
        if count[0] >= number:  # what else the job has under way dies as well, at its next point
            raise Crashed(f'the job died at "{point}": {POINTS[point]}')

    with _watching(point, watch):
        yield


class Pause:
    """A job that is held at a point: `reached()` waits until it is there, `go_on()` lets it go on, for good."""

    def __init__(self) -> None:
        self._reached, self._over = threading.Event(), threading.Event()

    def reached(self, most_s: float = LONG_S) -> None:
        assert self._reached.wait(most_s), f"the job has not come there within {most_s} s"

    def go_on(self) -> None:
        self._over.set()

    def _hold(self) -> None:
        self._reached.set()
        self._over.wait()


@contextmanager
def pause_at(point: str, number: int = 1) -> Iterator[Pause]:
    """Hold a job when it comes to a point of `POINTS` for the `number`th time; at the latest, the end of the `with`
    lets it go on. A job that is held serves no requests: ask it for nothing meanwhile.

    >>> import scalein as si
    >>> from scalein.testing import stream
    >>> rows = si.to_memory()
    >>> with pause_at("batch") as pause:
    ...     job = si.from_source(stream("x \\n 1")).group_by().agg(n=si.count()).start(sink=rows)
    ...     pause.reached()
    ...     job.why_no_output()
    'A running aggregate gives its result at the end of the input. emit="changes" gives each group whenever it changes.'
    >>> job.wait()
    >>> rows.table().to_pydict()
    {'n': [1]}
    """
    pause, count = Pause(), [0]

    def watch(reached: str) -> None:
        count[0] += reached == point
        if reached == point and count[0] == number:
            pause._hold()

    with _watching(point, watch):
        try:
            yield pause
        finally:
            pause.go_on()


@contextmanager
def _watching(point: str, watch: Callable[[str], None]) -> Iterator[None]:
    if point not in POINTS:
        raise BadArgument("a job has no such point", at=here(), found=repr(point), has=", ".join(POINTS))
    failpoints.handlers.append(watch)
    try:
        yield
    finally:
        failpoints.handlers.remove(watch)
