"""Why a job has emitted nothing yet: the first reason that holds, from its sources to its results."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from scalein.dtypes import UNITS_PER_SECOND, DType, Kind
from scalein.jobs.job_graph import JobGraph
from scalein.jobs.metrics import Metrics


def why_no_output(graph: JobGraph, metrics: Metrics, emit: str) -> str:
    """One or two sentences that explain why there are no rows yet."""
    rows_in, rows_out = metrics.of_run("rows_in"), metrics.of_run("rows_out")
    if rows_out:
        return f"There is output: {rows_out:,} rows so far."
    if not rows_in and graph.row_groups_skipped:
        return (f"The flow's filter keeps no row so far: {graph.row_groups_skipped:,} row groups were skipped, as "
                "their statistics say so.")
    if not rows_in:
        names = ", ".join(sorted({reader.data.name if hasattr(reader.data, "name") else "memory"
                                  for reader in graph.readers}))  # fmt: skip
        return f"No row has arrived yet from {names}."
    window = graph.first_window
    if window is None:
        if graph.has_running and emit == "final":
            return ("A running aggregate gives its result at the end of the input. "
                    'emit="changes" gives each group whenever it changes.')
        if graph.has_blocking:
            return "A sort, or a right or outer join, gives its rows when all have arrived: at the end of the input."
        return f"{rows_in:,} rows have arrived, and the flow's filters or joins let none of them pass."
    if metrics.of_run("late_rows") == rows_in:
        return "All rows came after their windows had closed: the delay of with_watermark is too short for this input."
    if metrics.of_run("timeless_rows") == rows_in:
        return "The time of all rows is null: rows without a time are in no window."
    if not graph.has_watermark:
        return ("Windows close when time has passed them, and the flow does not say how late rows may come: "
                "put with_watermark(time, delay) before the group. The end of the input closes them as well.")
    if graph.watermark is None:
        waiting = ", ".join(graph.partitions_without_time)
        return f"There is no watermark yet: no row with a time has come from partition {waiting}."
    found = graph.next_end
    if found is None:
        return (f"The watermark is at {shown(graph.watermark, window)}, but no row is in an open window: filters or "
                "joins let none pass, or all of them came too late.")
    return (f"The first open window ends at {shown(found, window)} and the watermark is at "
            f"{shown(graph.watermark, window)}: it closes when a row arrives that is "
            f"{_distance(found - graph.watermark, window)} later than the latest so far.")


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
