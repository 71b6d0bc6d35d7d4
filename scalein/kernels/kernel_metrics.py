"""Tallies: what each worker did for a step of a job, counted where kernels are called.

A worker's counters are plain numbers that only its thread writes; whoever reads them sees each as of some moment. Whose
they are is known by the thread: a step's tally is set on the thread that runs it, which hands it on to its workers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_thread = threading.local()


@dataclass(slots=True)
class Work:
    """One worker's: rows and bytes of columns that its kernels read, the time in kernels, and the time that it waited
    for the others to end.
    """

    rows: int = 0
    bytes: float = 0.0
    useful_s: float = 0.0
    wait_s: float = 0.0


@dataclass(slots=True)
class Tally:
    """Of one step, by number of worker; 0 is the thread that runs the step."""

    works: list[Work] = field(default_factory=lambda: [Work()])

    def of(self, worker: int) -> Work:
        while len(self.works) <= worker:
            self.works.append(Work())
        return self.works[worker]


def mine() -> Work | None:
    """Where this thread counts, if anybody wants to know."""
    found: Work | None = getattr(_thread, "work", None)
    return found


def current() -> Tally | None:
    """That of the step which this thread runs."""
    found: Tally | None = getattr(_thread, "tally", None)
    return found


def enlist(tally: Tally | None, worker: int) -> None:
    """From now on this thread is a worker of a step."""
    _thread.tally, _thread.work = tally, None if tally is None else tally.of(worker)


@contextmanager
def counting(tally: Tally | None, worker: int = 0) -> Iterator[None]:
    """Within, this thread is a worker of a step."""
    before = current(), mine()
    enlist(tally, worker)
    try:
        yield
    finally:
        _thread.tally, _thread.work = before
