"""Job: the handle of a flow that runs in a thread (`driver.py`) until its input ends or it is stopped."""

from __future__ import annotations

import atexit
import os
import re
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np

from scalein.errors import BadArgument, ScaleinError, here, warn
from scalein.exec.metrics_log import log_lines
from scalein.jobs.diagnose import why_no_output
from scalein.jobs.driver import Driver
from scalein.jobs.job_card import JobCard
from scalein.jobs.metrics import LATENCY_LIMITS
from scalein.jobs.monitor import figures, serve, show_bar
from scalein.jobs.spec import JobSpec
from scalein.jobs.supervisor import Supervisor
from scalein.kernels.workers import exit_on_sigterm
from scalein.options import Options

_PLAIN = re.compile(r"\w[\w .-]*")  # names of savepoints


class Job:
    """A flow at work. `wait()` returns when it has ended, or raises what ended it. A program that ends before its job
    is warned.

    >>> import pyarrow as pa, scalein as si
    >>> seen = si.to_memory()
    >>> job = si.from_arrow(pa.table({"x": [1, 2, 3]})).limit(2).start(sink=seen)
    >>> job.wait()
    True
    >>> seen.table().to_pydict()
    {'x': [1, 2]}
    """

    def __init__(self, plan: JobSpec) -> None:
        self._plan = plan
        self._supervisor = Supervisor(plan)
        self._card: JobCard | None = None  # of a notebook
        _started.add(self)

    @property
    def _driver(self) -> Driver:
        return self._supervisor.driver

    # --- requests

    def scale(self, workers: int) -> None:
        """Change the number of workers at the next barrier. They share the state: see `metrics()["rescales"]`.

        A job that has finished meanwhile needs none any more; one that was stopped or failed is refused.
        """
        options = Options.make(workers=workers, at=self._plan.at)
        if self.status in ("stopped", "failed"):
            raise BadArgument("the job has ended, so its workers cannot be changed", at=here(), found=self.status,
                              hint="start(workers=...) again with the same checkpoint")
        self._driver.scale(options.workers)

    def autoscale(self, model: Any, **options: Any) -> Any:
        """Scale it while it runs, as a model (`si.model.profile`) or a policy (`si.model.DS2()`) decides.

        `job.autoscale(model, p99="100ms", every="5s", least=1, most=8)` scales ahead of the load that a forecast sees.
        Gives the autoscaler, whose `decisions` have what was predicted and what came: see `si.model.autoscale`.
        """
        if not hasattr(model, "autoscale"):
            raise BadArgument("autoscale needs a model or a policy", at=here(), found=type(model).__name__,
                              hint="si.model.profile(flow, sample) gives a model, si.model.DS2() is a policy")
        return model.autoscale(self, **options)

    def work_done(self) -> tuple[float, float, int]:
        """Rows taken in and seconds in rounds of this run, and the workers: what an autoscaler observes."""
        found = self._driver.metrics
        return found.of_run("rows_in"), found.busy_s, self._driver.workers

    def snapshot(self, name: str | None = None) -> Path | str | None:
        """Take a checkpoint now, and wait until it is whole. That of a job that has ended well is.

        With a name it is a savepoint: a directory that stays for good, to begin others from
        (`start(checkpoint="new/", savepoint=job.snapshot("before the change"))`). That of a checkpoint on another file
        system is there, and this gives its address. Once this job has been stopped, one that begins from its savepoint
        may write to the same folders: results after the savepoint are replaced.
        """
        if name is not None and (self._driver.checkpoint is None or not _PLAIN.fullmatch(name)):
            raise BadArgument("a savepoint needs a plain name, and the job a checkpoint", at=here(), found=repr(name))
        self._check_outside()
        folder = self._driver.snapshot(name)
        if name is not None and folder is None:
            raise ScaleinError("the job ended before the savepoint was taken", at=here(), found=repr(name),
                               hint="start it again with the same checkpoint, and ask then")
        return folder

    def stop(self, *, drain: bool = False) -> None:
        """End the job with a last checkpoint. It goes on from there when it is started again. One that is already at
        the end of its input (it sorts, or gives the results of its last windows) ends without: it goes on from the last
        one that it took.

        `drain=True` reads nothing more from the sources, runs all rows that were read ahead, at any rate, and gives the
        results of all windows that are open. Such a job is finished: its checkpoint does not go on with rows that come
        later, and who starts it again is warned of them.

        Whatever runs inside of the job (a sink, a source, a function) may call this; then it comes back at once, and
        the job ends after the current rows.
        """
        self._supervisor.request_stop(drain=drain)
        if not self._driver.is_inside():
            self.wait()

    def wait(self, timeout: float | None = None, *, progress: bool = False) -> bool:
        """Until the job has ended, or some seconds have passed: whether it has ended. Raises what ended it.

        Ctrl-C and SIGTERM stop it meanwhile, with a last checkpoint.

        `progress=True` shows a bar meanwhile, in a terminal or a notebook (it needs `scalein[jobs]`).
        """
        self._check_outside()
        with exit_on_sigterm():
            try:
                if progress:
                    show_bar(self, timeout)
                else:
                    self._supervisor.ended.wait(timeout)
            except (KeyboardInterrupt, SystemExit):
                self._supervisor.request_stop()
                self._supervisor.ended.wait()
                raise
        has_ended = self._supervisor.ended.is_set()  # an error is known before everything is released, or restarted
        if has_ended and self._driver.error is not None:
            raise self._driver.error
        return has_ended

    def _check_outside(self) -> None:
        if self._driver.is_inside():
            raise BadArgument("a job cannot wait for itself", at=here(),
                              hint="what runs inside of the job, like a sink's function, may call stop() or scale()")

    def await_end(self, timeout: float) -> bool:
        """Whether the job has ended, after waiting at most `timeout` seconds; raises nothing."""
        return self._supervisor.ended.wait(timeout)

    def await_termination(self, timeout: float | None = None) -> bool:
        """As in PySpark: wait, and say whether the job has ended."""
        return self.wait(timeout)

    # --- looking

    @property
    def is_active(self) -> bool:
        return not self._supervisor.ended.is_set()

    @property
    def exception(self) -> BaseException | None:
        """What ended the job, if it did not end well."""
        return self._driver.error

    @property
    def status(self) -> str:
        """In a word: running, finished, stopped or failed."""
        if not self._supervisor.ended.is_set():
            return "running"
        if self._driver.error is not None:
            return "failed"
        return "finished" if self._driver.is_finished or self._driver.is_caught_up else "stopped"

    def metrics(self) -> dict[str, object]:
        """Figures so far. Names that end in `_s` are seconds.

        rows          `rows_in`, `bytes_in`, `rows_out`; `late_rows`, whose windows were all closed; `timeless_rows`,
                      without an event time, so in no window; `failed_rows`, that went to the sink of `on_error=`: from
                      the first run of the checkpoint on. `run_rows_in` and `run_rows_out` are those of this run.
                      `outlier_rows`, more than a day after all others, do not advance the watermark.
                      `row_groups_skipped`: of Parquet files, because of their statistics.
        checkpoints   `epochs` that were committed and `failed_checkpoints` in this run; `checkpoint_s`, the last one
                      took, and `checkpoint_at`, when it was committed (seconds since 1970)
        time          `watermark`, in units of the time column; `watermark_time`, the same as text; `lag_s` and `lag`,
                      how far it is behind the clock; `latency_s`, from the arrival of a row to the end of the round
                      that processed it, by percentile; `busy_s` and `wait_s`, in rounds and between them
        state         `state_bytes`, in memory; `peak_state_rows`, the most rows that joins of streams have retained in
                      this run; `workers`; `rescales`, each with its `workers`, the time `at` which it
                      was, how long it paused the job (`pause_s`), and `state_bytes_moved`, which is 0: workers share
                      the state
        `stages`      each step's `rows_in`, `rows_out` and `busy_s` in this run; of each of its `workers` the `rows`,
                      `bytes`, seconds in kernels (`useful_s`), and seconds that it waited for the others (`wait_s`)
        """
        found = figures(self._driver.metrics, self._driver.graph, self._driver.workers)
        return {**found, "restarts": self._supervisor.restarts}

    @property
    def last_progress(self) -> dict[str, object]:
        """As in PySpark: the figures of now. See `metrics`."""
        return {"status": self.status, **self.metrics()}

    @property
    def name(self) -> str:
        """The name of the checkpoint's directory, by which metrics tell jobs apart; "job" without one."""
        checkpoint = self._plan.checkpoint
        if isinstance(checkpoint, Path):
            return checkpoint.resolve().name
        return "job" if checkpoint is None else checkpoint.uri.rpartition("/")[2]

    def latency_buckets(self) -> tuple[list[tuple[float, int]], float]:
        """A cumulative histogram of latency: limits in seconds with rows, and the seconds of all rows together."""
        latency = self._driver.metrics.latency
        return latency.buckets(), latency.total_s

    def latency_counts(self) -> tuple[np.ndarray, np.ndarray]:
        """A histogram of latency: limits in seconds, and the rows below each; the last are beyond all."""
        return LATENCY_LIMITS, self._driver.metrics.latency.counts.copy()

    def why_no_output(self) -> str:
        """Why nothing has come out yet, in a few sentences."""
        if self._driver.error is not None:
            return f"The job has failed: {self._driver.error}"
        return why_no_output(self._driver.graph, self._driver.metrics, self._plan.emit)

    def log_metrics(self, path: str | os.PathLike[str]) -> None:
        """Append the figures to a file, a line of JSON every second."""
        log_lines(self, path)

    def serve_metrics(self, port: int = 0) -> int:
        """Give the figures to Prometheus over HTTP, as long as the job runs; the port they are at.

        `scalein_rows_in_total`, `scalein_busy_seconds_total`, `scalein_lag_seconds`, the histogram
        `scalein_latency_seconds` and so on, each with the label `job`: the name of the checkpoint's directory.
        """
        self._supervisor.at_end(lambda: None)  # the port may be the same
        found, stop = serve(self, port)
        self._supervisor.at_end(stop)
        return found

    def __repr__(self) -> str:
        found = self._driver.metrics
        return f"Job({self.status}, {found.rows_in:,} rows in, {found.rows_out:,} out, {found.epochs} checkpoints)"

    def _repr_html_(self) -> str:
        return self._as_card().html

    def _ipython_display_(self) -> None:
        """A card that is redrawn while the job runs; called by IPython in place of `repr`."""
        self._as_card().show()

    def _as_card(self) -> JobCard:
        if self._card is None:
            place = "" if self._plan.checkpoint is None else str(self._plan.checkpoint)
            self._card = JobCard(self, place)
        return self._card


_started: WeakSet[Job] = WeakSet()


@atexit.register
def _warn_of_running() -> None:
    """Threads of jobs end with the program, whatever they are doing."""
    for job in list(_started):
        if job.is_active:
            rest = ("what it had not written is lost" if job._plan.checkpoint is None else
                    "it continues from its last checkpoint when it is started again")
            warn(f"the program ends, but the job that it started here was still running, and {rest}: "
                 "job.wait() waits for its end, job.stop() ends it", job._plan.at)
