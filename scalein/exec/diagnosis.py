"""Why windows have emitted nothing yet: the first reason that holds, in jobs and in Spark streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from scalein.dtypes import UNITS_PER_SECOND, DType, Kind
from scalein.exec.event_time import JUMP_BATCHES


@dataclass(frozen=True)
class WindowFacts:
    """What is known of a flow's first windows and of its event time."""

    dtype: DType  # of the time that windows are about
    rows_in: int
    late_rows: int
    timeless_rows: int
    outlier_rows: int
    has_watermark: bool
    watermark: int | None
    next_end: int | None  # of the first open window that has rows
    waiting: Sequence[str] = ()  # partitions from which no row with a time has come
    slowest: str | None = None  # the partition that holds the watermark back, where others are further


def why_no_window(facts: WindowFacts) -> str:
    """One to three sentences that explain why no window has closed yet, where rows have arrived."""
    if facts.late_rows == facts.rows_in:
        return "All rows came after their windows had closed: the delay of with_watermark is too short for this input."
    if facts.timeless_rows == facts.rows_in:
        return "The time of all rows is null: rows without a time are in no window."
    if not facts.has_watermark:
        return ("Windows close when time has passed them, and the flow does not say how late rows may come: "
                "put with_watermark(time, delay) before the group. The end of the input closes them as well.")
    if facts.watermark is None:
        of = f" from partition {', '.join(facts.waiting)}" if facts.waiting else ""
        return f"There is no watermark yet: no row with a time has come{of}."
    mark = shown(facts.watermark, facts.dtype)
    if facts.next_end is None:
        return (f"The watermark is at {mark}, but no row is in an open window: filters or joins let none pass, or all "
                "of them came too late.")
    text = (f"The first open window ends at {shown(facts.next_end, facts.dtype)} and the watermark is at {mark}: it "
            f"closes when a row arrives that is {_distance(facts.next_end - facts.watermark, facts.dtype)} later than "
            "the latest so far.")
    if facts.slowest is not None:
        text += f" Partition {facts.slowest} holds it back, as its times are the earliest."
    if facts.outlier_rows:
        text += (f" {facts.outlier_rows:,} rows are outliers, more than a day after all others, and do not advance it "
                 f"unless most rows of {JUMP_BATCHES} batches in a row are.")
    return text


def shown(time: int, dtype: DType) -> str:
    """A time in units of its column, as a person writes it."""
    if dtype.kind is not Kind.TS:
        return f"{time:,}"
    seconds, rest = divmod(time, UNITS_PER_SECOND[dtype.unit])
    try:
        moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
    except OverflowError:
        return str(time)
    digits = len(str(UNITS_PER_SECOND[dtype.unit])) - 1
    return moment.strftime("%Y-%m-%d %H:%M:%S") + (f".{rest:0{digits}}".rstrip("0") if rest else "")


def _distance(units: int, dtype: DType) -> str:
    if dtype.kind is not Kind.TS:
        return f"{units:,}"
    return f"{units / UNITS_PER_SECOND[dtype.unit]:g} s"
