"""Why a job has emitted nothing yet: the first reason that holds, from its sources to its results."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from scalein.dtypes import UNITS_PER_SECOND, DType, Kind
from scalein.jobs.driver import Pipeline
from scalein.jobs.metrics import Metrics


def why_no_output(pipeline: Pipeline, metrics: Metrics, emit: str) -> str:
    """One or two sentences that explain why there are no rows yet."""
    rows_in, rows_out = metrics.of_run("rows_in"), metrics.of_run("rows_out")
    if rows_out:
        return f"There is output: {rows_out:,} rows so far."
    if not rows_in and pipeline.row_groups_skipped:
        return (f"The flow's filter keeps no row so far: {pipeline.row_groups_skipped:,} row groups were skipped, as "
                "their statistics say so.")
    if not rows_in:
        names = ", ".join(sorted({reader.data.name if hasattr(reader.data, "name") else "memory"
                                  for reader in pipeline.readers}))  # fmt: skip
        return f"No row has arrived yet from {names}."
    window = pipeline.first_window
    if window is None:
        if pipeline.has_running and emit == "final":
            return ("A running aggregate gives its result at the end of the input. "
                    'emit="changes" gives each group whenever it changes.')
        if pipeline.has_sort:
            return "A sorted flow gives its rows when all of them have arrived: at the end of the input."
        return f"{rows_in:,} rows have arrived, and the flow's filters or joins let none of them pass."
    if metrics.of_run("late_rows") == rows_in:
        return "All rows came after their windows had closed: the delay of with_watermark is too short for this input."
    if metrics.of_run("timeless_rows") == rows_in:
        return "The time of all rows is null: rows without a time are in no window."
    if not pipeline.has_watermark:
        return ("Windows close when time has passed them, and the flow does not say how late rows may come: "
                "put with_watermark(time, delay) before the group. The end of the input closes them as well.")
    if pipeline.watermark is None:
        waiting = ", ".join(pipeline.partitions_without_time)
        return f"There is no watermark yet: no row with a time has come from partition {waiting}."
    found = pipeline.next_end
    if found is None:
        return (f"The watermark is at {shown(pipeline.watermark, window)}, but no row is in an open window: filters or "
                "joins let none pass, or all of them came too late.")
    return (f"The first open window ends at {shown(found, window)} and the watermark is at "
            f"{shown(pipeline.watermark, window)}: it closes when a row arrives that is "
            f"{_distance(found - pipeline.watermark, window)} later than the latest so far.")


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
    return distance(units / UNITS_PER_SECOND[dtype.unit])


def distance(seconds: float) -> str:
    """A length of time in its two greatest units.

    >>> distance(0.25), distance(61.5), distance(90_000), distance(-3)
    ('0.25 s', '1 m 2 s', '1 d 1 h', '-3 s')
    """
    if seconds < 0:
        return f"-{distance(-seconds)}"
    if seconds < 60:
        return f"{seconds:.3g} s"
    parts: list[str] = []
    left = round(seconds)
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count:,} {unit}" if count else "")
    return " ".join(part for part in parts[:2] if part)
