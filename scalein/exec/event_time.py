"""Event time: the watermark of each partition of a source, and the least of them.

The watermark of a partition is its greatest time minus the delay, and it advances between source batches. That of the
job is the least of all partitions that are not idle and have not ended. Outliers do not advance it: one broken clock
must not close the windows of all.

One rule says which times are outliers, in jobs and in Spark streams. Event time advances from row to row by steps of at
most a day (`max_gap`): beginning at the greatest time so far, or in the first batch at the median time of its rows, it
reaches every time of the batch that is at most a day after one already reached. The other rows are outliers: a gap of
more than a day is between them and everything reached. So a batch may span months, as files of the past do. If the
median row of JUMP_BATCHES batches in a row is an outlier, time has jumped, as after a pause, and goes on from the
median of the last one. Outliers of earlier batches are no steps: after a day, those of a clock that is two days ahead
would be reached, and time would follow that clock.

What the rule needs of a batch is a `TimeSummary`, which can be merged, over parts of a batch and over Spark tasks.
Times are integers in units of the time column; integer columns have no outliers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalein.arrow_rows import as_integers
from scalein.dtypes import DType, Kind
from scalein.kernels.workers import run_parallel
from scalein.storage.checked_json import Json, as_int, as_list, as_map

JUMP_BATCHES = 3  # consecutive batches whose median row is an outlier, after which time has jumped, as after a pause
MAX_RANGES = 1000  # of the summary of a batch
MANY_OUTLIERS = 10  # percent of a batch's rows, from which on a warning is due
MAX_NUMPY_TIMES = 1 << 16
IDLE_S = 5.0  # without a row, after which a partition of an unbounded source holds no watermark back
_DAY = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}


def max_gap_of(dtype: DType) -> int | None:
    """The longest step by which event time advances from row to row, a day; integers have no such limit."""
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


class TimeRange(NamedTuple):
    """Times between which there is no gap of more than `max_gap`: the least, the greatest, and the number of rows."""

    least: int
    greatest: int
    rows: int


@dataclass(frozen=True, slots=True)
class TimeSummary:
    """The times of some rows: ranges in order, with a gap of more than `max_gap` between any two.

    If there are more than MAX_RANGES, only the earliest are held, and the rows of the others are counted: then event
    time advances no further than the ranges do. In order of time such rows come in later batches.
    """

    ranges: tuple[TimeRange, ...] = ()
    rows_beyond: int = 0  # in no range

    @property
    def rows(self) -> int:
        return sum(each.rows for each in self.ranges) + self.rows_beyond

    @property
    def median(self) -> TimeRange:
        """The range of the median row; the last one, if that row is in no range."""
        rest = self.rows // 2
        for each in self.ranges:
            if rest < each.rows:
                return each
            rest -= each.rows
        return self.ranges[-1]

    def bounded(self) -> TimeSummary:
        if len(self.ranges) <= MAX_RANGES:
            return self
        beyond = sum(each.rows for each in self.ranges[MAX_RANGES:])
        return TimeSummary(self.ranges[:MAX_RANGES], self.rows_beyond + beyond)

    def to_json(self) -> Json:
        return [[[*each] for each in self.ranges], self.rows_beyond]

    @staticmethod
    def from_json(given: Json) -> TimeSummary:
        ranges, beyond = as_list(given)
        return TimeSummary(tuple(TimeRange(*map(as_int, as_list(each))) for each in as_list(ranges)), as_int(beyond))


NO_TIMES = TimeSummary()


def merge_summaries(summaries: Iterable[TimeSummary], max_gap: int | None) -> TimeSummary:
    """The summary of the rows of all, in whatever order they are given. Its size is not bounded."""
    merged: list[TimeRange] = []
    beyond = 0
    ranges: list[TimeRange] = []
    for summary in summaries:
        ranges += summary.ranges
        beyond += summary.rows_beyond
    for least, greatest, rows in sorted(ranges):
        if merged and (max_gap is None or least - merged[-1].greatest <= max_gap):
            last = merged[-1]
            merged[-1] = TimeRange(last.least, max(last.greatest, greatest), last.rows + rows)
        else:
            merged.append(TimeRange(least, greatest, rows))
    return TimeSummary(tuple(merged), beyond)


def summarize(times: pa.Array, within: tuple[int, int], known: int | None, max_gap: int | None) -> TimeSummary:
    """The summary of some times, of which `within` has the least and the greatest.

    Gaps before `known`, the greatest time of earlier batches, and those that it bridges do not matter.
    """
    least, greatest = within
    rows = len(times) - times.null_count
    if max_gap is None or greatest - (least if known is None else known) <= max_gap:
        return TimeSummary((TimeRange(least, greatest, rows),))
    values = np.asarray(as_integers(times).drop_null())
    if known is not None and known > least:
        values, least = np.maximum(values, known), known
    return _ranges(values, least, greatest, max_gap)


def _ranges(values: np.ndarray, least: int, greatest: int, max_gap: int) -> TimeSummary:
    """The ranges of some values, at most MAX_RANGES: values are counted by day, since there is no gap within one, and
    few values over a long time are sorted.
    """
    far = values[:0]
    end = least + len(values) * max_gap
    if greatest >= end:  # more days than values
        is_far = values >= end
        values, far = values[~is_far], np.sort(values[is_far])
    # Unsigned differences do not overflow.
    days = ((values.view(np.uint64) - np.uint64(least % (1 << 64))) // np.uint64(max_gap)).view(np.int64)
    counts = np.bincount(days)
    first, last = np.full(len(counts), np.iinfo(np.int64).max), np.full(len(counts), np.iinfo(np.int64).min)
    np.minimum.at(first, days, values)
    np.maximum.at(last, days, values)
    occupied = np.flatnonzero(counts)
    firsts, lasts = (np.concatenate([each[occupied], far]) for each in (first, last))
    rows = np.concatenate([counts[occupied], np.ones(len(far), np.int64)])
    gaps = firsts[1:].view(np.uint64) - lasts[:-1].view(np.uint64)
    starts = np.flatnonzero(np.concatenate([[True], gaps > np.uint64(max_gap)]))
    columns = (firsts[starts], lasts[np.append(starts[1:], len(firsts)) - 1], np.add.reduceat(rows, starts))
    ranges = tuple(map(TimeRange._make, zip(*(each[:MAX_RANGES].tolist() for each in columns), strict=True)))
    return TimeSummary(ranges, int(columns[2][MAX_RANGES:].sum()))


class Advance(NamedTuple):
    """Event time after a batch."""

    greatest: int
    outliers: int  # rows of the batch
    outlier_batches: int  # consecutive, up to this one, whose median row is an outlier


def advance(known: int | None, outlier_batches: int, batch: TimeSummary, max_gap: int | None) -> Advance:
    """Event time after a batch that has times, by the rule above."""
    median = batch.median
    if known is None:
        reached, outlier_batches = median.greatest, 0
    else:
        reached = known
        for each in batch.ranges:
            if max_gap is not None and each.least - reached > max_gap:
                break
            reached = max(reached, each.greatest)
        outlier_batches = outlier_batches + 1 if median.greatest > reached else 0
        if outlier_batches >= JUMP_BATCHES:
            reached, outlier_batches = median.greatest, 0
    outliers = sum(each.rows for each in batch.ranges if each.greatest > reached) + batch.rows_beyond
    return Advance(reached, outliers, outlier_batches)


def outlier_warning(outliers: int, rows: int) -> str | None:
    """The text of a warning, if many of a batch's rows are outliers."""
    if outliers * 100 < MANY_OUTLIERS * rows or not outliers:
        return None
    return (f"{outliers:,} of {rows:,} rows of a batch are outliers: their times are more than a day after all others. "
            "They count in their windows, but do not advance the watermark: these windows stay open until event time "
            f"gets there, or most rows of {JUMP_BATCHES} batches in a row are outliers. If the times are wrong, filter "
            "these rows out before with_watermark; if they are right, as after a pause, smaller batches end the wait "
            'sooner. Later ones are only counted: see last_progress["outlier_rows"]')


@dataclass
class PartitionClock:
    """The event time of one partition. What the current source batch has reached becomes `greatest` at its end."""

    delay: int
    max_gap: int | None
    greatest: int | None = None
    pending: int | None = None  # the greatest time that the current source batch has reached
    pending_rows: int = 0  # of the current source batch, up to `pending`
    ahead: TimeSummary = NO_TIMES  # the other rows of the current source batch; all of the first one
    is_idle: bool = False
    is_ended: bool = False
    outlier_rows: int = 0
    outlier_batches: int = 0  # consecutive, whose median row was an outlier
    warning: str | None = field(default=None, compare=False)  # of the last batch with many outliers

    @property
    def watermark(self) -> int | None:
        return None if self.greatest is None else self.greatest - self.delay

    def observe(self, times: pa.Array, within: tuple[int, int], watermark: int | None) -> None:
        """Observe times of the current batch, of which `within` has the least and the greatest; they are read only if
        some may be outliers.

        `watermark` is that of the job: while a partition is idle, time goes on without it.
        """
        if self.greatest is not None and watermark is not None and self.greatest < watermark:
            self.greatest = watermark
            self.pending = None if self.pending is None else max(self.pending, watermark)
        known = self.greatest if self.pending is None else self.pending
        if known is not None and (self.max_gap is None or within[1] - known <= self.max_gap):
            self.pending = max(known, within[1])
            self.pending_rows += len(times) - times.null_count
        else:
            found = summarize(times, within, known, self.max_gap)
            self.ahead = merge_summaries([self.ahead, found], self.max_gap).bounded()

    def end_batch(self) -> None:
        if self.ahead.ranges:
            self._advance()
        elif self.pending is not None:
            self.greatest, self.outlier_batches = self.pending, 0
        self.pending, self.pending_rows = None, 0

    def _advance(self) -> None:
        batch = self.ahead
        if self.pending is not None:
            assert self.greatest is not None
            reached = TimeRange(self.greatest, self.pending, self.pending_rows)
            batch = merge_summaries([TimeSummary((reached,)), batch], self.max_gap)
        found = advance(self.greatest, self.outlier_batches, batch, self.max_gap)
        self.greatest, self.outlier_batches = found.greatest, found.outlier_batches
        self.outlier_rows += found.outliers
        self.warning = outlier_warning(found.outliers, batch.rows) or self.warning
        self.ahead = NO_TIMES

    def to_json(self) -> Json:
        return {"greatest": self.greatest, "coming": self.pending, "coming_rows": self.pending_rows,
                "ahead": self.ahead.to_json(), "far_rows": self.outlier_rows, "far_batches": self.outlier_batches}

    def restore(self, given: Json) -> None:
        about = as_map(given)
        self.greatest, self.pending = (None if about[name] is None else as_int(about[name])
                                      for name in ("greatest", "coming"))
        self.outlier_rows, self.outlier_batches = as_int(about["far_rows"]), as_int(about["far_batches"])
        if "ahead" in about:
            self.pending_rows, self.ahead = as_int(about["coming_rows"]), TimeSummary.from_json(about["ahead"])
        elif self.pending is not None and self.greatest is None:  # an older version, in the middle of the first batch
            self.ahead, self.pending = TimeSummary((TimeRange(self.pending, self.pending, 1),)), None


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
