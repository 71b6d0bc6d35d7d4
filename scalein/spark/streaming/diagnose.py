"""Why a stream has emitted nothing since its start: the first reason that holds."""

from __future__ import annotations

from scalein.exec.diagnosis import WindowFacts, why_no_window
from scalein.spark.streaming.coordinator import Coordinator
from scalein.spark.streaming.stream_plan import StreamPlan


def why_no_output(coordinator: Coordinator, plan: StreamPlan, status: str = "running") -> str:
    """A few sentences that explain why there are no rows yet; `status` is that of the stream."""
    totals, is_running = coordinator.totals, status == "running"
    if totals.rows_out:
        waits = " Some of it waits to become visible in larger files." if coordinator.has_waiting else ""
        return f"There is output: {totals.rows_out:,} rows since the start.{waits}"
    if not totals.batches:
        return _without_batches(coordinator, status)
    ended = "" if is_running else f" The stream is {status}: started again with its checkpoint, it goes on from here."
    if not totals.rows_in:
        return f"No row has arrived yet: the {totals.batches:,} batches since the start were empty.{ended}"
    if plan.mode == "joining":
        return (f"{totals.rows_in:,} rows have arrived, and none has a match yet: rows that wait for one come out when "
                f"the watermarks of both sides have passed their time.{ended}")
    if plan.mode == "sessions":
        return (f"{totals.rows_in:,} rows have arrived, and no session is final yet: the watermark must have passed "
                f"the last row of one by more than its gap.{ended}")
    if plan.mode == "over":
        return (f"{totals.rows_in:,} rows have arrived, and none comes out yet: rows wait until the watermark has "
                f"passed them, or the end of their window.{ended}")
    if plan.mode == "process":
        return (f"{totals.rows_in:,} rows have arrived: the class has yielded nothing for those that the watermark has "
                f"passed; the others wait for it.{ended}")
    if plan.mode != "closing":
        reason = " or are like earlier ones" if plan.mode == "distinct" else ""
        return (f"{totals.rows_in:,} rows have arrived: all of them are dropped by the flow's filters or joins{reason}."
                f"{ended}")
    assert plan.lateness is not None
    text = why_no_window(WindowFacts(
        plan.lateness.dtype, totals.rows_in, totals.late_rows, totals.timeless_rows, coordinator.clock.outlier_rows,
        True, coordinator.clock.watermark, coordinator.next_end))
    last_windows = "" if coordinator.next_end is None else (
        " A stream has no end that closes its last windows; stop(drain=True) does.")
    return f"{text}{last_windows}{ended}"


def _without_batches(coordinator: Coordinator, status: str) -> str:
    """The same where no batch has ended since the start."""
    last, mark = coordinator.last_batch, coordinator.watermark_time(coordinator.clock)
    at = "" if mark is None else f", with the watermark at {mark}"
    before = "" if last is None else (f" It resumes after batch {last}{at}: rows of that batch and of earlier ones do "
                                      "not come again.")
    if status == "running":
        return ("No batch has ended yet: Spark has found no new rows in its source, or the first batch is running."
                f"{before}")
    if status == "finished":
        return f"The stream is finished, without a batch: Spark has found no new rows in its source.{before}"
    return f"The stream was stopped before its first batch had ended.{before}"
