"""The card of a job in a notebook: state, rows a second, watermark, state size, last checkpoint; live while it runs."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from scalein.notebook_card import Card, Display, format_bytes, format_seconds

if TYPE_CHECKING:
    from scalein.jobs.job import Job

SAMPLE_S = 0.5  # between two samples of the rate
SAMPLES = 120  # of the line of rates: one minute
MOST_LAG_S = 365 * 86_400  # a longer one is that of history which is replayed, and says nothing


class JobCard:
    """The job as a card. Once shown, a thread samples the rate and redraws it; the thread ends with the job."""

    def __init__(self, job: Job, place: str) -> None:
        """`place` is the checkpoint's directory."""
        self._job, self._place = job, place
        self._display = Display(self.draw)
        self._rates: deque[float] = deque(maxlen=SAMPLES)
        self._thread: threading.Thread | None = None

    def show(self) -> None:
        """Show the card in the notebook; raises NotImplementedError outside of one, or if the job has ended."""
        if not self._job.is_active:
            raise NotImplementedError  # a card that does not change is `_repr_html_`
        self._display.show()
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, name="scalein-card", daemon=True)
            self._thread.start()

    def draw(self) -> tuple[str, str]:
        return self.html, repr(self._job)

    @property
    def html(self) -> str:
        job, found = self._job, self._job.metrics()
        note = ""
        if job.exception is not None:
            note = str(job.exception)
        elif job.is_active and not found["rows_out"]:
            note = job.why_no_output()
        return Card("Job", job.status, self._place, self._facts(found), note, tuple(self._rates)).html

    def _facts(self, found: dict[str, Any]) -> list[tuple[str, str]]:
        facts = [("rows in", f"{found['rows_in']:,} ({self._rate(found):,.0f}/s)"),
                 ("rows out", f"{found['rows_out']:,}")]
        if found["watermark"] is not None:
            lag_s = found["lag_s"]
            lag = "" if lag_s is None or lag_s > MOST_LAG_S else f" ({format_seconds(lag_s)} behind the clock)"
            facts.append(("watermark", f"{found['watermark_time']}{lag}"))
        facts += [(name.replace("_", " "), f"{found[name]:,}")
                  for name in ("late_rows", "outlier_rows", "failed_rows") if found[name]]
        latency = found["latency_s"]
        if latency["p50"] is not None:
            facts.append(("latency", f"{format_seconds(latency['p50'])} (p99 {format_seconds(latency['p99'])})"))
        facts += [("state", format_bytes(found["state_bytes"])), ("workers", str(found["workers"]))]
        if found["checkpoint_at"] is not None:
            ago = format_seconds(max(0.0, time.time() - found["checkpoint_at"]))
            last = f"the last {ago} ago" if self._job.is_active else "the last when it ended"
            facts.append(("checkpoints", f"{found['epochs']:,}, {last}, in {format_seconds(found['checkpoint_s'])}"))
        if found["failed_checkpoints"]:
            facts.append(("failed checkpoints", f"{found['failed_checkpoints']:,}"))
        return facts

    def _rate(self, found: dict[str, Any]) -> float:
        """Rows a second: of the last sample while the job runs, else of the whole run."""
        if self._rates and self._job.is_active:
            return self._rates[-1]
        return float(found["run_rows_in"] / max(found["busy_s"] + found["wait_s"], 1e-3))

    def _follow(self) -> None:
        then, before = time.monotonic(), self._rows_in()
        while not self._job.await_end(SAMPLE_S):
            now, rows = time.monotonic(), self._rows_in()
            self._rates.append((rows - before) / (now - then))
            then, before = now, rows
            self._display.update()
        self._display.close()

    def _rows_in(self) -> int:
        found: dict[str, Any] = self._job.metrics()
        return int(found["rows_in"])
