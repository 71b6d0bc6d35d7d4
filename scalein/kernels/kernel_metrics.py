"""Metrics of kernels: per worker of an operator (a job's metrics), and per kernel of one run (`explain`).

A worker's counters are plain numbers that only its thread writes; a reader sees each as of some moment. The metrics of
an operator are thread-local to the thread that runs it, which passes them to its workers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from scalein.ir.exprs import type_of
from scalein.ir.stages import (
    Collect,
    ExpandLog,
    FromBatches,
    FromPointers,
    FromRecords,
    FromRows,
    FromTable,
    Merge,
    MergeBag,
    Partition,
    ProjectStep,
    Rank,
    Sink,
    Stage,
)
from scalein.ir.tables import log_layout
from scalein.layout import size_of
from scalein.llvm_backend.cache import Compiled

_thread = threading.local()


@dataclass(slots=True)
class WorkerCounters:
    """Of one worker: rows and column bytes that its kernels read, seconds in kernels, and seconds that it waited for
    the other workers to finish.
    """

    rows: int = 0
    bytes: float = 0.0
    useful_s: float = 0.0
    wait_s: float = 0.0


@dataclass(slots=True)
class WorkerMetrics:
    """Of one operator: the counters of each worker; worker 0 is the thread that runs the operator."""

    counters: list[WorkerCounters] = field(default_factory=lambda: [WorkerCounters()])

    def of(self, worker: int) -> WorkerCounters:
        while len(self.counters) <= worker:
            self.counters.append(WorkerCounters())
        return self.counters[worker]


def current_counters() -> WorkerCounters | None:
    """The counters of this thread, if its operator is measured."""
    found: WorkerCounters | None = getattr(_thread, "counters", None)
    return found


def current_metrics() -> WorkerMetrics | None:
    """The metrics of the operator that this thread runs, if it is measured."""
    found: WorkerMetrics | None = getattr(_thread, "metrics", None)
    return found


def attach_worker(metrics: WorkerMetrics | None, worker: int) -> None:
    """Make this thread count as a worker of an operator from now on."""
    _thread.metrics, _thread.counters = metrics, None if metrics is None else metrics.of(worker)


@contextmanager
def recording(metrics: WorkerMetrics | None, worker: int = 0) -> Iterator[None]:
    """Within, this thread counts as a worker of an operator."""
    before = current_metrics(), current_counters()
    attach_worker(metrics, worker)
    try:
        yield
    finally:
        _thread.metrics, _thread.counters = before


# A profile of one run: calls, rows, time and bytes of each kernel. Recorded only for `explain`.

@dataclass(slots=True)
class KernelMetrics:
    """Calls, rows and time (of the CPU) of one kernel, over all workers."""

    stage: Stage
    compiled: Compiled
    calls: int = 0
    rows: int = 0
    seconds: float = 0.0
    rows_out: int = 0
    load_seconds: float = 0.0

    @property
    def bytes_read(self) -> float:
        """Bytes of the input rows; of a string only its offset, not its text."""
        match self.stage.reader:
            case FromBatches() as reader:
                return self.rows * reader.row_bytes
            case FromRows(stride=stride):
                return self.rows * stride
            case FromTable(table):
                return self.rows * table.layout.size
            case FromRecords():
                return self.rows * _record_bytes(self.stage.sink)
            case FromPointers(table):
                return self.rows * table.layout.size

    @property
    def bytes_written(self) -> float:
        """Bytes of the columns and partitions that the kernel filled; records are counted where they are read."""
        match self.stage.sink:
            case Collect(items):
                width = sum(4 if type_of(item.expr).is_bytes else size_of(type_of(item.expr)) for item in items)
                return self.rows_out * width
            case Partition(stride=stride) if all(isinstance(step, ProjectStep) for step in self.stage.steps):
                return self.rows * stride  # after a filter the number of rows is unknown
            case _:
                return 0


def _record_bytes(sink: Sink) -> int:
    """The size of the records that a kernel reads: a table's, or those of its side state."""
    match sink:
        case Merge(table) | Rank(table):
            return table.layout.size
        case MergeBag(table, bag):
            return table.bags[bag][1].layout.size
        case ExpandLog(table, number):
            return log_layout(table.accs[number]).size
        case _:
            return 0


@dataclass(slots=True)
class Profile:
    """The metrics of every kernel, by its identity."""

    kernels: dict[int, KernelMetrics] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    elsewhere_s: float = 0.0  # of the kernels' time, in threads of their own: loops of the user

    @property
    def seconds(self) -> float:
        """In all kernels, over all workers."""
        return sum(each.seconds for each in self.kernels.values())

    def cpu_s(self) -> float:
        """What this thread has taken of the CPU, and kernels in threads of their own: for differences."""
        return time.thread_time() + self.elsewhere_s

    def add_kernel(self, stage: Stage, compiled: Compiled, seconds: float) -> None:
        """A kernel was requested; compiling it, reading it or finding it in memory took this long."""
        with self.lock:
            self.kernels.setdefault(id(compiled), KernelMetrics(stage, compiled)).load_seconds += seconds

    def add_call(self, compiled: Compiled, rows: int, here_s: float, elsewhere_s: float, rows_out: int) -> None:
        with self.lock:
            self.elsewhere_s += elsewhere_s
            metrics = self.kernels.get(id(compiled))
            if metrics is None:  # a kernel that was requested before the profile began
                assert compiled.stage is not None
                metrics = self.kernels[id(compiled)] = KernelMetrics(compiled.stage, compiled)
            metrics.calls += 1
            metrics.rows += rows
            metrics.seconds += here_s + elsewhere_s
            metrics.rows_out += rows_out


_profile: Profile | None = None


def current_profile() -> Profile | None:
    return _profile


@contextmanager
def profiling() -> Iterator[Profile]:
    """A profile of the runs within. One at a time in a process."""
    global _profile
    profile = Profile()
    _profile = profile
    try:
        yield profile
    finally:
        _profile = None
