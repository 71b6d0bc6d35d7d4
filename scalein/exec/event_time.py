"""Watermarks: how far event time has come, by partition of each source.

The watermark of a partition is its greatest time less the delay, and it moves at the borders of the batches that the
source delivered. That of the job is the least of all partitions that are not idle and not at their end. A few times
that lie far ahead of the rest move nothing: one broken clock must not close everybody's windows.

Times are integers in units of the time column.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalein.dtypes import DType, Kind
from scalein.kernels.workers import run_parallel
from scalein.storage.checked_json import Json, as_int, as_map

BELIEVED_BATCHES = 3  # far ahead, one behind the other, after which they are right and the past was long ago
FEW_TIMES = 1 << 16
IDLE_S = 5.0  # without a row, after which a partition of an endless source holds nothing back
_DAY = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}


def as_integers(times: pa.Array) -> pa.Array:
    """Times as 64-bit integers, without a copy where they are already."""
    if pa.types.is_timestamp(times.type):
        return times.view(pa.int64())
    return times if times.type == pa.int64() else times.cast(pa.int64())


def far_ahead(dtype: DType) -> int | None:
    """How far ahead of the rest a time is not believed; numbers have no such distance."""
    return _DAY[dtype.unit] if dtype.kind is Kind.TS else None


def extent(times: pa.Array) -> tuple[int, int] | None:
    """The least and the greatest of some times."""
    if not len(times):
        return None
    if len(times) < FEW_TIMES and not times.null_count:  # numpy begins sooner, pyarrow looks at each only once
        values = np.asarray(as_integers(times))
        return int(values.min()), int(values.max())
    found = pc.min_max(as_integers(times))
    least, greatest = found["min"].as_py(), found["max"].as_py()
    return None if least is None else (least, greatest)


def extents(columns: list[pa.Array], workers: int) -> list[tuple[int, int] | None]:
    """The extent of each of some columns of times, looked at by so many workers."""
    found: list[tuple[int, int] | None] = [None] * len(columns)

    def look(worker: int) -> None:
        for k in range(worker, len(columns), workers):
            found[k] = extent(columns[k])

    run_parallel([partial(look, worker) for worker in range(workers)])
    return found


@dataclass
class Partition:
    """What is known of one partition's time. `coming` becomes `greatest` when the batch under way has ended."""

    delay: int
    far: int | None
    greatest: int | None = None
    coming: int | None = None
    is_idle: bool = False
    is_ended: bool = False
    far_rows: int = 0
    far_batches: int = 0  # one behind the other, most of whose rows were far ahead

    @property
    def watermark(self) -> int | None:
        return None if self.greatest is None else self.greatest - self.delay

    def see(self, within: tuple[int, int], times: Callable[[], pa.Array]) -> None:
        """The least and the greatest time of the batch under way; what gives all of them is asked if these are odd."""
        least, greatest = within
        known = self.greatest if self.coming is None else self.coming
        base = least if known is None else known
        if self.far is not None and greatest - base > self.far:
            greatest = self._believed(times(), known)
        else:
            self.far_batches = 0
        self.coming = greatest if known is None else max(known, greatest)

    def _believed(self, times: pa.Array, known: int | None) -> int:
        """The greatest time that is not far ahead of the rest; if most are, for some batches, time has made a jump."""
        values = np.asarray(as_integers(times).drop_null())
        assert self.far is not None
        middle = int(np.partition(values, len(values) // 2)[len(values) // 2])
        limit = middle + self.far
        if known is not None:
            self.far_batches = self.far_batches + 1 if middle > known + self.far else 0
            limit = max(known + self.far, limit if self.far_batches >= BELIEVED_BATCHES else known)
        near = values[values <= limit]
        self.far_rows += len(values) - len(near)
        return int(near.max()) if len(near) else limit - self.far

    def end_batch(self) -> None:
        if self.coming is not None:
            self.greatest, self.coming = self.coming, None

    def to_json(self) -> Json:
        return {"greatest": self.greatest, "coming": self.coming, "far_rows": self.far_rows,
                "far_batches": self.far_batches}

    def restore(self, given: Json) -> None:
        about = as_map(given)
        self.greatest, self.coming = (None if about[name] is None else as_int(about[name])
                                      for name in ("greatest", "coming"))
        self.far_rows, self.far_batches = as_int(about["far_rows"]), as_int(about["far_batches"])


def least(partitions: list[Partition]) -> int | None:
    """The watermark of all; None while one that others wait for has none, or nobody is left.

    Where all are idle, none holds the others back: time is as far as the furthest of them (as in Flink).
    """
    slowest: int | None = None
    furthest: int | None = None  # of those that are idle
    for part in partitions:
        mark = part.watermark
        if part.is_ended or (part.is_idle and mark is None):
            continue
        if mark is None:
            return None
        if part.is_idle:
            furthest = mark if furthest is None else max(furthest, mark)
        else:
            slowest = mark if slowest is None else min(slowest, mark)
    return furthest if slowest is None else slowest
