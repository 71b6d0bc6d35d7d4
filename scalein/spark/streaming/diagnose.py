"""Why a stream has emitted nothing since its start: the first reason that holds."""

from __future__ import annotations

from scalein.exec.diagnosis import WindowFacts, why_no_window
from scalein.spark.streaming.coordinator import Coordinator
from scalein.spark.streaming.stream_plan import StreamPlan


def why_no_output(coordinator: Coordinator, plan: StreamPlan) -> str:
    """A few sentences that explain why there are no rows yet."""
    totals = coordinator.totals
    if not totals.batches:
        return "No batch has ended yet: Spark has found no new rows in its source, or the first batch is running."
    if totals.rows_out:
        return f"There is output: {totals.rows_out:,} rows since the start."
    if not totals.rows_in:
        return f"No row has arrived yet: the {totals.batches:,} batches since the start were empty."
    if plan.mode != "closing":
        reason = " or are like earlier ones" if plan.mode == "distinct" else ""
        return f"{totals.rows_in:,} rows have arrived: all of them are dropped by the flow's filters or joins{reason}."
    assert plan.lateness is not None
    text = why_no_window(WindowFacts(
        plan.lateness.dtype, totals.rows_in, totals.late_rows, totals.timeless_rows, coordinator.clock.outlier_rows,
        True, coordinator.clock.watermark, coordinator.next_end))
    return f"{text} A stream has no end that closes its last windows." if coordinator.next_end is not None else text
