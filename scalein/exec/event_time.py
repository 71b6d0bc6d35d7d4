"""Event time: the watermark of each partition of a source, and the least of them.

The watermark of a partition is its greatest time minus the delay, and it advances between source batches. That of the
job is the least of all partitions that are not idle and have not ended. A few outlier timestamps, far ahead of the
rest, do not advance it: one broken clock must not close the windows of all.

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

JUMP_BATCHES = 3  # consecutive batches of outlier timestamps after which time has jumped, as after a pause
MAX_NUMPY_TIMES = 1 << 16
IDLE_S = 5.0  # without a row, after which a partition of an unbounded source holds no watermark back
_DAY = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}


def as_integers(times: pa.Array) -> pa.Array:
    """Times as 64-bit integers, without a copy where they are already."""
    if pa.types.is_timestamp(times.type):
        return times.view(pa.int64())
    return times if times.type == pa.int64() else times.cast(pa.int64())


def outlier_distance(dtype: DType) -> int | None:
    """How far ahead of the rest a timestamp is an outlier; integers have no such distance."""
    return _DAY[dtype.unit] if dtype.kind is Kind.TS else None


def extent(times: pa.Array) -> tuple[int, int] | None:
    """The least and the greatest of some times."""
    if not len(times):
        return None
    if len(times) < MAX_NUMPY_TIMES and not times.null_count:  # numpy starts sooner, pyarrow needs only one pass
        values = np.asarray(as_integers(times))
        return int(values.min()), int(values.max())
    found = pc.min_max(as_integers(times))
    least, greatest = found["min"].as_py(), found["max"].as_py()
    return None if least is None else (least, greatest)


def extents(columns: list[pa.Array], workers: int) -> list[tuple[int, int] | None]:
    """The extent of each of some columns of times, computed by `workers` workers."""
    found: list[tuple[int, int] | None] = [None] * len(columns)

    def measure(worker: int) -> None:
        for k in range(worker, len(columns), workers):
            found[k] = extent(columns[k])

    run_parallel([partial(measure, worker) for worker in range(workers)])
    return found


@dataclass
class PartitionClock:
    """The event time of one partition. `pending` becomes `greatest` at the end of the current source batch."""

    delay: int
    outlier_distance: int | None
    greatest: int | None = None
    pending: int | None = None
    is_idle: bool = False
    is_ended: bool = False
    outlier_rows: int = 0
    outlier_batches: int = 0  # consecutive, in which most rows were outliers

    @property
    def watermark(self) -> int | None:
        return None if self.greatest is None else self.greatest - self.delay

    def observe(self, within: tuple[int, int], times: Callable[[], pa.Array]) -> None:
        """Observe the least and the greatest time of the current batch; all times are read only if these may be
        outliers.
        """
        least, greatest = within
        known = self.greatest if self.pending is None else self.pending
        base = least if known is None else known
        if self.outlier_distance is not None and greatest - base > self.outlier_distance:
            greatest = self._without_outliers(times(), known)
        else:
            self.outlier_batches = 0
        self.pending = greatest if known is None else max(known, greatest)

    def _without_outliers(self, times: pa.Array, known: int | None) -> int:
        """The greatest time that is no outlier; if most are outliers for some batches, time has jumped."""
        values = np.asarray(as_integers(times).drop_null())
        assert self.outlier_distance is not None
        middle = int(np.partition(values, len(values) // 2)[len(values) // 2])
        limit = middle + self.outlier_distance
        if known is not None:
            self.outlier_batches = self.outlier_batches + 1 if middle > known + self.outlier_distance else 0
            limit = max(known + self.outlier_distance, limit if self.outlier_batches >= JUMP_BATCHES else known)
        near = values[values <= limit]
        self.outlier_rows += len(values) - len(near)
        return int(near.max()) if len(near) else limit - self.outlier_distance

    def end_batch(self) -> None:
        if self.pending is not None:
            self.greatest, self.pending = self.pending, None

    def to_json(self) -> Json:
        return {"greatest": self.greatest, "coming": self.pending, "far_rows": self.outlier_rows,
                "far_batches": self.outlier_batches}

    def restore(self, given: Json) -> None:
        about = as_map(given)
        self.greatest, self.pending = (None if about[name] is None else as_int(about[name])
                                      for name in ("greatest", "coming"))
        self.outlier_rows, self.outlier_batches = as_int(about["far_rows"]), as_int(about["far_batches"])


def least(clocks: list[PartitionClock]) -> int | None:
    """The watermark of all partitions; None while an active one has none, or all have ended.

    If all are idle, none holds the others back: the watermark is the greatest of them (as in Flink).
    """
    slowest: int | None = None
    furthest: int | None = None  # of those that are idle
    for clock in clocks:
        mark = clock.watermark
        if clock.is_ended or (clock.is_idle and mark is None):
            continue
        if mark is None:
            return None
        if clock.is_idle:
            furthest = mark if furthest is None else max(furthest, mark)
        else:
            slowest = mark if slowest is None else min(slowest, mark)
    return furthest if slowest is None else slowest
