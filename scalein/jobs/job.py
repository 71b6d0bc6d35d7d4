"""Job: a flow that runs in a thread of its own until its input ends or it is stopped.

The thread takes what has arrived, runs the pipeline over it, writes what comes out, and, when a checkpoint is due,
freezes everything at that border and goes on: a second thread waits for the state to be on disk, publishes the epoch
and commits the output. At most one epoch is under way. Requests (`scale`, `snapshot`, `stop`) are served at borders.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from scalein.connectors.base import Json
from scalein.errors import BadArgument, ComputeError, LateData, ScaleinError, here
from scalein.jobs.epochs import Checkpoint
from scalein.jobs.feeds import Feeds, Reader
from scalein.jobs.json import as_int, as_list, as_map, as_text
from scalein.jobs.metrics import Metrics
from scalein.jobs.outlets import Outlet
from scalein.jobs.pipeline import Pipeline, Wishes
from scalein.jobs.plan import Plan
from scalein.jobs.steps import Frozen
from scalein.jobs.watching import log_lines, serve, show_bar
from scalein.jobs.watermarks import IDLE_S
from scalein.jobs.words import why_no_output
from scalein.options import Options
from scalein.runtime.run import batches
from scalein.runtime.stopping import leaving_on_sigterm

STEP_ROWS = 1 << 23  # that are run at once when there are so many
_PLAIN = re.compile(r"\w[\w .-]*")  # names of savepoints
QUIET_S = 0.05  # the longest wait for rows before requests are looked at


class Job:
    """A flow at work. `wait()` gives back when it has ended, or raises what ended it.

    >>> import pyarrow as pa, scalein as si
    >>> seen = si.to_memory()
    >>> job = si.from_arrow(pa.table({"x": [1, 2, 3]})).limit(2).start(sink=seen)
    >>> job.wait()
    >>> seen.table().to_pydict()
    {'x': [1, 2]}
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._sinks = {name: Outlet(sink, name) for name, sink in plan.sinks.items()}
        self._metrics = Metrics()
        self._has_warned = False
        self._checkpoint = None if plan.checkpoint is None else Checkpoint(plan.checkpoint)
        self._own_folder = Path(tempfile.mkdtemp(prefix="scalein-job-")) if plan.checkpoint is None else None
        self._epoch = 0
        self._name = uuid.uuid4().hex[:8]
        self._run_number = 0
        self._uncommitted: list[dict[str, Json]] = []  # what sinks have prepared and no epoch says yet
        self._workers = plan.options.workers
        self._requests: list[tuple[Callable[[], None], threading.Event]] = []
        self._wants_stop: str | None = None  # "stop" or "drain"
        self._publisher = ThreadPoolExecutor(1, "scalein-epoch")
        self._under_way: Future[None] | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._stop_serving: Callable[[], None] = lambda: None
        self._is_finished = False
        self._pipeline: Pipeline
        try:
            self._open()
        except BaseException:
            self._release()
            raise
        self._feeds = Feeds(self._pipeline.readers, plan.rows_per_second)
        self._thread = threading.Thread(target=self._main, name="scalein-job", daemon=True)
        self._thread.start()

    # --- opening

    def _open(self) -> None:
        if self._checkpoint is None:
            assert self._own_folder is not None
            self._begin(None, self._own_folder)
        else:
            self._checkpoint.open()
            if self._plan.savepoint is not None:
                self._checkpoint.begin_from(self._plan.savepoint)
            self._name = self._checkpoint.name()
            folder = self._checkpoint.path
            self._checkpoint.recovered(lambda epoch: self._begin(epoch, folder))
            self._pipeline.forget(self._checkpoint.kept())

    def _begin(self, epoch: dict[str, Json] | None, folder: Path) -> None:
        """The pipeline and sinks as an epoch left them."""
        plan = self._plan
        if hasattr(self, "_pipeline"):
            self._pipeline.close()  # of a newer epoch, that turned out to be damaged
        wishes = Wishes(plan.emit, self._late, "late" in plan.sinks,
                        self._failed if plan.on_error == "sink" else None)
        self._pipeline = Pipeline(plan.op, plan.options, wishes, folder, epoch, self._metrics, plan.at)
        committed: list[dict[str, Json]] = []
        if epoch is not None:
            self._epoch, self._run_number, self._name = as_int(epoch["epoch"]), as_int(epoch["run"]) + 1, as_text(
                epoch["job"])
            committed = [as_map(each) for each in as_list(epoch["output"])]
            self._metrics.restore(as_map(epoch["metrics"]))
            self._is_finished = epoch["finished"] is True
        for name, sink in self._sinks.items():
            prepared = [each[name] for each in committed if name in each]
            for earlier in prepared[:-1]:
                sink.commit(earlier)
            schema = self._pipeline.schema_of(name, plan.emit)
            sink.open(schema, prepared[-1] if prepared else None, f"{self._name}-{self._run_number}")

    # --- the thread

    def _main(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            self._error = error
        finally:
            try:
                self._release()
            except BaseException as error:
                self._error = self._error or error
            self._ended.set()
            with suppress(IndexError):
                while True:
                    self._requests.pop(0)[1].set()

    def _loop(self) -> None:
        if self._plan.bootstrap is not None and not self._epoch:
            self._pipeline.fill(batches(self._plan.bootstrap, self._plan.options))
        due = time.monotonic() + self._plan.every_s
        seen_at = dict.fromkeys(self._pipeline.readers, time.monotonic())
        idle: set[Reader] = set()
        while not self._is_finished:
            self._serve()
            if self._wants_stop is not None:
                if self._wants_stop == "drain":
                    self._write(self._pipeline.finish())
                    self._is_finished = True
                break
            start = time.monotonic()
            deliveries = self._feeds.take(STEP_ROWS, min(QUIET_S, max(due - start, 0.001)))
            now = time.monotonic()
            self._metrics.wait_s += now - start
            if deliveries:
                arrived = {d.reader for d in deliveries if d.batch.num_rows}
                for reader in arrived & idle:
                    self._pipeline.mark_idle(reader, False)
                idle -= arrived
                seen_at.update(dict.fromkeys(arrived, now))
                self._write(self._pipeline.run(deliveries))
                for delivery in deliveries:
                    self._metrics.latency.add(time.monotonic() - delivery.came_s, delivery.batch.num_rows)
                self._metrics.busy_s += time.monotonic() - now
            if self._pipeline.is_sated or (not deliveries and self._feeds.has_ended):
                self._write(self._pipeline.finish())
                self._is_finished = True
                break
            self._look_for_idle(seen_at, idle)
            if self._is_free():
                self._settle()
                if time.monotonic() >= due:
                    self._begin_epoch()
                    due = max(due + self._plan.every_s, time.monotonic())
        self._settle()
        self._begin_epoch()
        self._settle(is_last=True)

    def _look_for_idle(self, seen_at: dict[Reader, float], idle: set[Reader]) -> None:
        now = time.monotonic()
        for reader, at in seen_at.items():
            has_ended = reader.is_ended and not reader.pending
            if reader.rows:  # it is the job that is slow, or held back: that must not make its rows late
                seen_at[reader] = now
            elif has_ended or (now - at > IDLE_S and not reader.is_bounded):
                idle.add(reader)
                self._pipeline.mark_idle(reader, True)
        self._write(self._pipeline.advance())

    def _write(self, batches: list[pa.RecordBatch]) -> None:
        for batch in batches:
            if batch.num_rows:
                self._metrics.rows_out += batch.num_rows
                self._sinks["out"].write(batch)

    def _late(self, rows: pa.RecordBatch) -> None:
        self._metrics.late_rows += rows.num_rows
        if self._plan.late == "error":
            raise LateData(f"{rows.num_rows} rows came too late: all windows that they are in are closed",
                           at=self._plan.at, found=rows.slice(0, 1).to_pylist()[0],
                           hint='a longer delay of with_watermark, late="drop", or a sink for them')
        if "late" in self._plan.sinks:
            self._sinks["late"].write(rows)
        elif not self._has_warned:
            self._has_warned = True
            warnings.warn(f"{rows.num_rows} rows came too late and were dropped; later ones are only counted: see "
                          "metrics()[\"late_rows\"], or give late= a sink", RuntimeWarning, stacklevel=2)

    def _failed(self, row: pa.RecordBatch, error: ComputeError) -> None:
        if row.schema.names != self._pipeline.schema_of("failed", self._plan.emit).names:
            raise error  # it failed far behind the source: there is no row of the source's to give
        self._metrics.failed_rows += row.num_rows
        self._sinks["failed"].write(row)

    # --- epochs

    def _is_free(self) -> bool:
        return self._under_way is None or self._under_way.done()

    def _begin_epoch(self) -> None:
        """Freeze the job at this border; the rest happens beside it."""
        self._settle()
        if self._checkpoint is not None:
            self._pipeline.settle()
        prepared: dict[str, Json] = {name: sink.prepare() for name, sink in self._sinks.items()}
        self._uncommitted.append(prepared)
        self._epoch += 1
        try:
            content, frozen = self._pipeline.freeze() if self._checkpoint is not None else ({}, [])
        except ScaleinError as error:
            self._under_way = Future()
            self._under_way.set_exception(error)
            return
        content |= {"finished": self._is_finished, "metrics": {**self._metrics.to_json()}, "job": self._name,
                    "run": self._run_number, "output": [*self._uncommitted]}
        self._under_way = self._publisher.submit(self._publish, self._epoch, content, frozen, time.monotonic())

    def _publish(self, number: int, content: dict[str, Json], frozen: list[Frozen], began: float) -> None:
        if self._checkpoint is not None:
            content["states"] = self._pipeline.stateful([wait() for wait in frozen])
            kept = self._checkpoint.publish(number, content)
        else:
            kept = []
        self._pipeline.forget(kept)
        for each in map(as_map, as_list(content["output"])):
            for name, sink in self._sinks.items():
                sink.commit(each[name])
        self._metrics.checkpoint_s = time.monotonic() - began

    def _settle(self, is_last: bool = False) -> None:
        """Wait for the epoch under way. One that failed is made up for by the next; the last one must not fail."""
        if self._under_way is None:
            return
        under_way, self._under_way = self._under_way, None
        try:
            under_way.result()
            self._uncommitted.clear()
            self._metrics.epochs += 1
        except ScaleinError as error:
            self._metrics.failed_checkpoints += 1
            if is_last:
                raise
            warnings.warn(f"a checkpoint failed, the job goes on from the last one: {error}", RuntimeWarning,
                          stacklevel=2)

    # --- requests

    def _serve(self) -> None:
        while self._requests:
            request, done = self._requests.pop(0)
            request()
            done.set()

    def _ask(self, request: Callable[[], None]) -> None:
        """Have something done at the next border, and wait for it, unless it is the job's own thread that asks."""
        done = threading.Event()
        self._requests.append((request, done))
        self._feeds.wake()
        while threading.current_thread() is not self._thread and not self._ended.is_set() and not done.wait(0.05):
            pass

    def scale(self, workers: int) -> None:
        """Change the number of workers, at the next border. State is shared: nothing of it moves."""
        options = Options.make(workers=workers, at=self._plan.at)

        def change() -> None:
            start = time.perf_counter()
            self._workers = options.workers
            self._pipeline.set_workers(options.workers)
            self._metrics.rescales.append({"workers": options.workers, "state_bytes_moved": 0,
                                           "pause_s": time.perf_counter() - start, "at": time.time()})

        self._ask(change)

    def snapshot(self, name: str | None = None) -> Path | None:
        """Take a checkpoint now, and wait until it is whole.

        With a name it is a savepoint: a directory that stays for good, to begin others from
        (`start(checkpoint="new/", savepoint=job.snapshot("before the change"))`).
        """
        outcome: list[ScaleinError] = []
        places: list[Path] = []
        if name is not None and (self._checkpoint is None or not _PLAIN.fullmatch(name)):
            raise BadArgument("a savepoint needs a plain name, and the job a checkpoint", at=here(), found=repr(name))

        def take() -> None:
            self._begin_epoch()
            try:
                self._settle(is_last=True)
                if name is not None and self._checkpoint is not None:
                    places.append(self._checkpoint.save_as(name))
            except ScaleinError as error:
                outcome.append(error)

        self._check_outside()
        self._ask(take)
        if outcome or self._error is not None:
            raise outcome[0] if outcome else self._error  # type: ignore[misc]
        if name is not None and not places:
            raise ScaleinError("the job ended before the savepoint was taken", at=here(), found=repr(name),
                               hint="start it again with the same checkpoint, and ask then")
        return places[0] if places else None

    def stop(self, *, drain: bool = False) -> None:
        """End the job with a last checkpoint; `drain` first gives the results of all windows that are open.

        A job that was drained is finished: its checkpoint does not go on with rows that come later. A sink's `write`
        may call this; then it comes back at once, and the job ends behind the rows at hand.
        """
        self._wants_stop = "drain" if drain else "stop"
        self._feeds.wake()
        if threading.current_thread() is not self._thread:
            self.wait()

    def wait(self, timeout: float | None = None, *, progress: bool = False) -> None:
        """Until the job has ended; raises what ended it. Ctrl-C and SIGTERM stop it, with a last checkpoint.

        `progress=True` shows a bar meanwhile, in a terminal or a notebook (it needs `scalein[jobs]`).
        """
        self._check_outside()
        with leaving_on_sigterm():
            try:
                if progress:
                    show_bar(self, timeout)
                else:
                    self._ended.wait(timeout)
            except (KeyboardInterrupt, SystemExit):
                self._wants_stop = "stop"
                self._feeds.wake()
                self._ended.wait()
                raise
        if self._error is not None:
            raise self._error

    def _check_outside(self) -> None:
        if threading.current_thread() is self._thread:
            raise BadArgument("a job cannot wait for itself", at=here(),
                              hint="a sink's function runs inside of the job: it may call stop() or scale()")

    def await_end(self, timeout: float) -> bool:
        """Whether the job has ended, after at most so many seconds; raises nothing."""
        return self._ended.wait(timeout)

    def await_termination(self, timeout: float | None = None) -> bool:
        """As in PySpark: wait, and say whether the job has ended."""
        self.wait(timeout)
        return self._ended.is_set()

    # --- looking

    @property
    def is_active(self) -> bool:
        return not self._ended.is_set()

    @property
    def exception(self) -> BaseException | None:
        """What ended the job, if it did not end well."""
        return self._error

    @property
    def status(self) -> str:
        """In a word: running, finished, stopped or failed."""
        if not self._ended.is_set():
            return "running"
        if self._error is not None:
            return "failed"
        return "finished" if self._is_finished else "stopped"

    def metrics(self) -> dict[str, object]:
        """Figures so far: rows, late rows, rescales, epochs, latency."""
        found = self._metrics
        return {
            **found.to_json(), "epochs": found.epochs, "failed_checkpoints": found.failed_checkpoints,
            "far_rows": self._pipeline.far_rows, "checkpoint_s": found.checkpoint_s,
            "workers": self._workers, "rescales": list(found.rescales), "watermark": self._pipeline.watermark,
            "lag_s": self._pipeline.lag_s, "state_bytes": self._pipeline.state_bytes,
            "busy_s": round(found.busy_s, 3), "wait_s": round(found.wait_s, 3),
            "latency_s": {f"p{share * 100:g}": found.latency.percentile(share) for share in (0.5, 0.99, 0.999)},
        }  # fmt: skip

    @property
    def last_progress(self) -> dict[str, object]:
        """As in PySpark: the figures of now. See `metrics`."""
        return {"status": self.status, **self.metrics()}

    def why_no_output(self) -> str:
        """Why nothing has come out yet, in a sentence or two."""
        if self._error is not None:
            return f"The job has failed: {self._error}"
        return why_no_output(self._pipeline, self._metrics, self._plan.emit)

    def log_metrics(self, path: str | os.PathLike[str]) -> None:
        """Append the figures to a file, a line of JSON every second."""
        log_lines(self, path)

    def serve_metrics(self, port: int = 0) -> int:
        """Give the figures to Prometheus over HTTP, as long as the job runs; the port they are at."""
        self._stop_serving()
        found, self._stop_serving = serve(self, port)
        return found

    def __repr__(self) -> str:
        found = self._metrics
        return f"Job({self.status}, {found.rows_in:,} rows in, {found.rows_out:,} out, {found.epochs} checkpoints)"

    # ---

    def _release(self) -> None:
        """Give everything back, whatever happened."""
        self._stop_serving()
        if hasattr(self, "_feeds"):
            self._feeds.close()
        self._publisher.shutdown(wait=True)
        for sink in self._sinks.values():
            with suppress(Exception):
                sink.close()
        if hasattr(self, "_pipeline"):
            self._pipeline.close()
        if self._checkpoint is not None:
            self._checkpoint.close()
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)
