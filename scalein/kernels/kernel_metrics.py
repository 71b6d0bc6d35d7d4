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
class WorkerCounters:
    """One worker's: rows and bytes of columns that its kernels read, the time in kernels, and the time that it waited
    for the others to end.
    """

    rows: int = 0
    bytes: float = 0.0
    useful_s: float = 0.0
    wait_s: float = 0.0


@dataclass(slots=True)
class WorkerMetrics:
    """Of one step, by number of worker; 0 is the thread that runs the step."""

    counters: list[WorkerCounters] = field(default_factory=lambda: [WorkerCounters()])

    def of(self, worker: int) -> WorkerCounters:
        while len(self.counters) <= worker:
            self.counters.append(WorkerCounters())
        return self.counters[worker]


def current_counters() -> WorkerCounters | None:
    """Where this thread counts, if anybody wants to know."""
    found: WorkerCounters | None = getattr(_thread, "work", None)
    return found


def current_metrics() -> WorkerMetrics | None:
    """That of the step which this thread runs."""
    found: WorkerMetrics | None = getattr(_thread, "tally", None)
    return found


def attach_worker(metrics: WorkerMetrics | None, worker: int) -> None:
    """From now on this thread is a worker of a step."""
    _thread.metrics, _thread.work = metrics, None if metrics is None else metrics.of(worker)


@contextmanager
def recording(metrics: WorkerMetrics | None, worker: int = 0) -> Iterator[None]:
    """Within, this thread is a worker of a step."""
    before = current_metrics(), current_counters()
    attach_worker(metrics, worker)
    try:
        yield
    finally:
        _thread.metrics, _thread.work = before
