"""Supervisor: starts the driver of a job again after a failure that may pass, from the last checkpoint.

Failures of a disk, a network or a sink may pass; a row that cannot be computed or damaged state fails again. Between
two attempts it waits twice as long each time. Attempts count anew once the job has run for a while and has taken a
checkpoint: one whose checkpoints all fail may run for long as well, and makes no progress.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from scalein.errors import WriteFailed, warn
from scalein.jobs.driver import Driver
from scalein.jobs.spec import JobSpec

FIRST_WAIT_S, MAX_WAIT_S = 0.1, 30.0
STEADY_S = 600.0  # after which a job that failed before counts as recovered
_LASTING = (FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)


class Supervisor:
    """The driver of a job, and those that follow it."""

    def __init__(self, plan: JobSpec) -> None:
        self._plan = plan
        self.driver = Driver(plan)
        self.restarts = 0  # so far
        self._is_stopped = threading.Event()
        self._at_end: Callable[[], None] = lambda: None
        self._has_ended = threading.Event()
        self._thread: threading.Thread | None = None
        if plan.restarts:
            self._thread = threading.Thread(target=self._watch, name="scalein-supervisor", daemon=True)
            self._thread.start()

    @property
    def ended(self) -> threading.Event:
        """Set when no driver will follow."""
        return self.driver.ended if self._thread is None else self._has_ended

    def request_stop(self, *, drain: bool = False) -> None:
        self._is_stopped.set()
        self.driver.request_stop(drain=drain)

    def at_end(self, act: Callable[[], None]) -> None:
        """Call this when the job has ended, instead of what was to be called."""
        before, self._at_end = self._at_end, act
        before()
        if self._thread is None:
            self.driver.at_end = act

    def _watch(self) -> None:
        attempts, began_s = 0, time.monotonic()
        while True:
            self.driver.ended.wait()
            if time.monotonic() - began_s > STEADY_S and self.driver.metrics.epochs:
                attempts = 0
            error = self.driver.error
            if error is None or self._is_stopped.is_set() or attempts >= self._plan.restarts or not may_pass(error):
                break
            wait_s = min(FIRST_WAIT_S * 2**attempts, MAX_WAIT_S)
            attempts += 1
            warn(f"the job failed and is started again in {wait_s:.1f} s, attempt {attempts} of {self._plan.restarts}: "
                 f"{error}", self._plan.at)
            if self._is_stopped.wait(wait_s):
                break
            began_s = time.monotonic()
            self._start_again()
        self._has_ended.set()
        self._at_end()

    def _start_again(self) -> None:
        self.restarts += 1
        options = replace(self._plan.options, workers=self.driver.workers)
        try:
            self.driver = Driver(replace(self._plan, options=options))
        except BaseException as error:
            self.driver.error = error  # of the next attempt: the driver before it has ended
            return
        if self._is_stopped.is_set():  # a request that went to the driver before
            self.driver.request_stop()


def may_pass(error: BaseException) -> bool:
    """Whether a failure may be gone when the job is started again.

    >>> may_pass(ConnectionResetError()), may_pass(PermissionError()), may_pass(ZeroDivisionError())
    (True, False, False)
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError):
            return not isinstance(seen, _LASTING)
        seen = seen.__cause__
    return isinstance(error, WriteFailed)
