"""Why a job has emitted nothing yet: the first reason that holds, from its sources to its results."""

from __future__ import annotations

from scalein.exec.diagnosis import WindowFacts, why_no_window
from scalein.jobs.job_graph import JobGraph
from scalein.jobs.metrics import Metrics


def why_no_output(graph: JobGraph, metrics: Metrics, emit: str) -> str:
    """A few sentences that explain why there are no rows yet."""
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
    return why_no_window(WindowFacts(
        window, rows_in, metrics.of_run("late_rows"), metrics.of_run("timeless_rows"), graph.outlier_rows,
        graph.has_watermark, graph.watermark, graph.next_end, graph.partitions_without_time, graph.slowest_partition))
