"""Control of jobs in tests: a virtual clock, and failpoints at which a job crashes or pauses.

The test's thread moves the clock and releases pauses; the job's threads wait for them. Clock and failpoints are global
to the process: one test at a time uses them.
"""

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
    """A clock that only the test advances, for jobs and `si.generate` that are started inside its `with`.

    It decides when a checkpoint is due (`every`), when an idle partition no longer holds back the watermark, and how
    many rows `max_rows_per_second` lets pass. Latencies are still measured by the machine's clock.

    >>> import scalein as si
    >>> from scalein.testing import stream, until
    >>> rows = si.to_memory()
    >>> with Clock() as clock:
    ...     job = si.from_source(stream("x \\n 1 \\n -- \\n 2")).start(sink=rows, max_rows_per_second=1)
    ...     until(lambda: rows.table().num_rows == 1, job)
    ...     clock.advance("1s")
    ...     job.wait()
    True
    >>> rows.table().to_pydict()
    {'x': [1, 2]}
    """

    def __init__(self) -> None:
        self._now, self._advanced = 0.0, threading.Condition()

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        with self._advanced:
            self._advanced.wait(min(seconds, 0.01))

    def advance(self, duration: Duration) -> None:
        """Advance time, as in "10s"; it does not wait for the effects: see `until`."""
        with self._advanced:
            self._now += seconds(duration, "advance", here())
            self._advanced.notify_all()

    def __enter__(self) -> Self:
        clocks.use(self)
        return self

    def __exit__(self, *_: object) -> None:
        clocks.leave(self)


# --- crashes and pauses


@contextmanager
def crash_at(point: str, number: int = 1) -> Iterator[None]:
    """Crash a job when it reaches a failpoint for the `number`th time: files stay as they are at that moment.

    `POINTS` names the failpoints. The job's `wait` raises `Crashed`; or `start` does, at "open". Started again after
    the `with`, the job must resume as if nothing had happened: so user-defined sinks can be tested.

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
    True
    >>> si.read_parquet(f"{folder}/out").collect().to_pydict()
    {'x': [1, 2]}
    """
    count = [0]

    def handle(reached: str) -> None:
        if reached == point:
            count[0] += 1
        if count[0] >= number:  # other threads of the job crash at their next failpoint
            raise Crashed(f'the job died at "{point}": {POINTS[point]}')

    with _handling(point, handle):
        yield


class Pause:
    """A job that is paused at a failpoint: `reached()` waits until it is there, `go_on()` resumes it for good."""

    def __init__(self) -> None:
        self._reached, self._resumed = threading.Event(), threading.Event()

    def reached(self, most_s: float = LONG_S) -> None:
        assert self._reached.wait(most_s), f"the job has not reached the failpoint within {most_s} s"

    def go_on(self) -> None:
        self._resumed.set()

    def _wait(self) -> None:
        self._reached.set()
        self._resumed.wait()


@contextmanager
def pause_at(point: str, number: int = 1) -> Iterator[Pause]:
    """Pause a job when it reaches a failpoint of `POINTS` for the `number`th time; the end of the `with` resumes it at
    the latest. A paused job serves no requests: do not scale or snapshot it meanwhile.

    >>> import scalein as si
    >>> from scalein.testing import stream
    >>> rows = si.to_memory()
    >>> with pause_at("batch") as pause:
    ...     job = si.from_source(stream("x \\n 1")).group_by().agg(n=si.count()).start(sink=rows)
    ...     pause.reached()
    ...     job.why_no_output()
    'A running aggregate gives its result at the end of the input. emit="changes" gives each group whenever it changes.'
    >>> job.wait()
    True
    >>> rows.table().to_pydict()
    {'n': [1]}
    """
    pause, count = Pause(), [0]

    def handle(reached: str) -> None:
        count[0] += reached == point
        if reached == point and count[0] == number:
            pause._wait()

    with _handling(point, handle):
        try:
            yield pause
        finally:
            pause.go_on()


@contextmanager
def _handling(point: str, handle: Callable[[str], None]) -> Iterator[None]:
    if point not in POINTS:
        raise BadArgument("a job has no such failpoint", at=here(), found=repr(point), has=", ".join(POINTS))
    failpoints.handlers.append(handle)
    try:
        yield
    finally:
        failpoints.handlers.remove(handle)
