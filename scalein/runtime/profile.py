"""What kernels did in one run: calls, rows, time, bytes. Filled only while `explain` listens."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from scalein.ir.stages import FromBatches, FromRecords, FromRows, FromTable, Stage
from scalein.llvm_backend.cache import Compiled


@dataclass(slots=True)
class Usage:
    """One kernel's work, over all workers."""

    stage: Stage
    compiled: Compiled
    calls: int = 0
    rows: int = 0
    seconds: float = 0.0
    rows_out: int = 0

    @property
    def bytes_per_row(self) -> float:
        """What a row of the input takes in memory; of strings only the place of their bytes."""
        match self.stage.reader:
            case FromBatches(reads):
                return sum(_width(read.dtype.bits if not read.dtype.is_string else 32, read.form) + read.nulls / 8 for read in reads)
            case FromRows(stride=stride):
                return stride
            case FromTable(table):
                return table.layout.size
            case FromRecords():
                return self.stage.sink.table.layout.size if hasattr(self.stage.sink, "table") else 0
        return 0


def _width(bits: int, form: str) -> float:
    return {"str64": 8, "view": 16, "dict": 4, "lut": 4}.get(form, bits / 8)


@dataclass(slots=True)
class Profile:
    """Everything measured while listening."""

    usages: dict[int, Usage] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def met(self, stage: Stage, compiled: Compiled) -> None:
        with self.lock:
            self.usages.setdefault(id(compiled), Usage(stage, compiled))

    def called(self, compiled: Compiled, rows: int, seconds: float, rows_out: int) -> None:
        with self.lock:
            usage = self.usages[id(compiled)]
            usage.calls += 1
            usage.rows += rows
            usage.seconds += seconds
            usage.rows_out += rows_out


_current: Profile | None = None


def current() -> Profile | None:
    return _current


@contextmanager
def listening() -> Iterator[Profile]:
    """A profile of whatever runs inside. One at a time in a process."""
    global _current
    profile = Profile()
    _current = profile
    try:
        yield profile
    finally:
        _current = None


def copy_bandwidth() -> float:
    """Bytes a second that one core reads and writes when it copies: the bound of most scans."""
    source = np.ones(1 << 23, np.int64)
    target = np.empty_like(source)
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - started)
    return 2 * source.nbytes / best
