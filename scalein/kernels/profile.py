"""What kernels did in one run: calls, rows, time, bytes. Filled only while `explain` listens."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from scalein.ir.exprs import type_of
from scalein.ir.stages import (
    Collect,
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
    Spread,
    Stage,
)
from scalein.ir.tables import log_layout
from scalein.layout import size_of
from scalein.llvm_backend.cache import Compiled


@dataclass(slots=True)
class KernelMetrics:
    """One kernel's work, over all workers."""

    stage: Stage
    compiled: Compiled
    calls: int = 0
    rows: int = 0
    seconds: float = 0.0
    rows_out: int = 0
    load_seconds: float = 0.0

    @property
    def bytes_read(self) -> float:
        """What the rows of the input take in memory; of strings only the place of their bytes."""
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
        """What the columns and partitions take that the kernel has filled; records are counted where they are read."""
        match self.stage.sink:
            case Collect(items):
                width = sum(4 if type_of(item.expr).is_bytes else size_of(type_of(item.expr)) for item in items)
                return self.rows_out * width
            case Partition(stride=stride) if all(isinstance(step, ProjectStep) for step in self.stage.steps):
                return self.rows * stride  # behind a filter nobody counts the rows
            case _:
                return 0


def _record_bytes(sink: Sink) -> int:
    """Of the records that a kernel reads: a table's, or those of one of its sides."""
    match sink:
        case Merge(table) | Rank(table):
            return table.layout.size
        case MergeBag(table, bag):
            return table.bags[bag][1].layout.size
        case Spread(table, number):
            return log_layout(table.accs[number]).size
        case _:
            return 0


@dataclass(slots=True)
class Profile:
    """Everything measured while listening."""

    kernels: dict[int, KernelMetrics] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add_kernel(self, stage: Stage, compiled: Compiled, seconds: float) -> None:
        """A kernel was asked for; compiling, reading or finding it took this long."""
        with self.lock:
            self.kernels.setdefault(id(compiled), KernelMetrics(stage, compiled)).load_seconds += seconds

    def add_call(self, compiled: Compiled, rows: int, seconds: float, rows_out: int) -> None:
        with self.lock:
            metrics = self.kernels[id(compiled)]
            metrics.calls += 1
            metrics.rows += rows
            metrics.seconds += seconds
            metrics.rows_out += rows_out


_current: Profile | None = None


def current_profile() -> Profile | None:
    return _current


@contextmanager
def profiling() -> Iterator[Profile]:
    """A profile of whatever runs inside. One at a time in a process."""
    global _current
    profile = Profile()
    _current = profile
    try:
        yield profile
    finally:
        _current = None
