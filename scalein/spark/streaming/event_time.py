"""Event time of a stream, from tasks that each see a part of a batch.

The watermark is the greatest time so far less the delay; it moves between batches and never back. Outlier timestamps,
far ahead of the others, do not move it, as in jobs (`exec/event_time.py`): one wrong clock must not close the windows
of all. If most rows of `JUMP_BATCHES` batches in a row are far ahead, time has jumped, and the clock follows.

A task summarizes the times of each batch of rows (`summarize_times`); every process that has the summaries of all tasks
computes the same clock (`advance`). Times are integers in units of the time column.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from scalein.exec.event_time import JUMP_BATCHES, as_integers
from scalein.storage.checked_json import Json, as_int, as_map


@dataclass(frozen=True, slots=True)
class Clock:
    """Event time between two batches."""

    greatest: int | None = None
    outlier_batches: int = 0  # in a row, most of whose rows were far ahead
    outlier_rows: int = 0
    watermark: int | None = None  # stored: a stream may resume with another delay, and closed windows stay closed

    def to_json(self) -> Json:
        return {"greatest": self.greatest, "far_batches": self.outlier_batches, "far_rows": self.outlier_rows,
                "watermark": self.watermark}

    @staticmethod
    def from_json(content: Json) -> Clock:
        fields = as_map(content)
        greatest, watermark = (None if fields[name] is None else as_int(fields[name])
                               for name in ("greatest", "watermark"))
        return Clock(greatest, as_int(fields["far_batches"]), as_int(fields["far_rows"]), watermark)


@dataclass(frozen=True, slots=True)
class TimeSummary:
    """The times of some rows, relative to the greatest time known before."""

    rows: int  # with a time
    near: int | None  # the greatest that is not far ahead of the known time, if there is one
    far: int  # how many are far ahead of it
    middle: int  # the median
    believed: int  # the greatest that is not far ahead of the median


def summarize_times(times: pa.Array, within: tuple[int, int], known: int | None,
                    outlier_distance: int | None) -> TimeSummary:
    """The summary of some times, of which `within` has the least and the greatest.

    A time that is more than `outlier_distance` ahead of `known` is an outlier.
    """
    least, greatest = within
    count = len(times) - times.null_count
    if outlier_distance is None or greatest - (least if known is None else known) <= outlier_distance:
        return TimeSummary(count, greatest, 0, greatest, greatest)
    values = np.asarray(as_integers(times).drop_null())
    middle = int(np.partition(values, len(values) // 2)[len(values) // 2])
    believed = int(values[values <= middle + outlier_distance].max())
    if known is None:
        return TimeSummary(count, None, 0, middle, believed)
    near = values[values <= known + outlier_distance]
    return TimeSummary(count, int(near.max()) if len(near) else None, count - len(near), middle, believed)


def advance(clock: Clock, summaries: Iterable[TimeSummary], outlier_distance: int | None, delay: int) -> Clock:
    """The clock after a batch, from the summaries of all its tasks."""
    advanced = _advance_greatest(clock, summaries, outlier_distance)
    if advanced.greatest is None:
        return advanced
    reached = advanced.greatest - delay
    return replace(advanced, watermark=reached if clock.watermark is None else max(clock.watermark, reached))


def _advance_greatest(clock: Clock, summaries: Iterable[TimeSummary], outlier_distance: int | None) -> Clock:
    with_times = [each for each in summaries if each.rows]
    if not with_times:
        return clock
    if clock.greatest is None:
        by_middle = sorted(with_times, key=lambda each: each.middle)
        half = sum(each.rows for each in with_times) / 2
        weights = np.cumsum([each.rows for each in by_middle])
        middle = by_middle[int(np.searchsorted(weights, half))].middle
        return Clock(max(each.believed for each in with_times
                         if outlier_distance is None or each.believed <= middle + outlier_distance))
    outlier_rows = sum(each.far for each in with_times)
    outlier_batches = clock.outlier_batches + 1 if outlier_rows * 2 > sum(each.rows for each in with_times) else 0
    near = [each.near for each in with_times if each.near is not None]
    if outlier_batches >= JUMP_BATCHES:
        return Clock(max(each.believed for each in with_times if each.far * 2 > each.rows), 0,
                     clock.outlier_rows + outlier_rows)
    return Clock(max([clock.greatest, *near]), outlier_batches, clock.outlier_rows + outlier_rows)


def least_open(watermark: int, size: int, every: int) -> int:
    """The least time that is in an open window."""
    return ((watermark - size) // every + 1) * every
