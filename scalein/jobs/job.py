"""Job: a flow that runs in a thread until its input ends or it is stopped.

The thread takes what has arrived, runs the operators over it, writes the results, and, when a checkpoint is due, takes
a snapshot at that barrier and continues (`coordinator.py`). Requests (`scale`, `snapshot`, `stop`) are served at
barriers. User code runs on the job's threads as well: it may make requests, but not wait for them.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from weakref import WeakSet

import pyarrow as pa

from scalein.connectors.sinks.sink_writer import SinkWriter
from scalein.errors import BadArgument, LateData, ScaleinError, StoreFailed, here, reported, warn
from scalein.exec.bounded import batches
from scalein.exec.event_time import IDLE_S
from scalein.exec.schedule import schedule
from scalein.jobs.checkpoint import Checkpoint
from scalein.jobs.coordinator import Coordinator
from scalein.jobs.dead_letters import in_columns
from scalein.jobs.diagnose import why_no_output
from scalein.jobs.driver import OutputSpec, Pipeline
from scalein.jobs.metrics import Metrics
from scalein.jobs.monitor import figures, log_lines, serve, show_bar
from scalein.jobs.source_readers import Reader, SourceBatch, SourceReaders
from scalein.jobs.spec import JobSpec
from scalein.kernels.workers import exit_on_sigterm, resident_threads
from scalein.memory import keep_at_most
from scalein.options import Options
from scalein.storage.checked_json import Json, as_map
from scalein.storage.failpoints import Crashed, failpoint

STEP_ROWS = 1 << 25  # most rows of a round
FIRST_ROWS, FEW_ROWS = 1 << 21, 1 << 18  # rows of the first round, and least rows of the others
MORE_ROWS = 1 << 20  # rows added at a time to a round that is faster than expected
STEP_S = 0.03  # target duration of a round: requests and checkpoints wait for its end
_PLAIN = re.compile(r"\w[\w .-]*")  # names of savepoints
_WORKER = re.compile(r"scalein-(\d+|udf|pool)")  # names of threads that may be any job's
MORE_S = 0.5  # longest check for rows that a finished job does not read
QUIET_S = 0.05  # longest wait for rows before requests are served


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
        self._sinks = {name: SinkWriter(sink, name, plan.at) for name, sink in plan.sinks.items()}
        self._metrics = Metrics()
        self._has_warned = False
        self._schedule = schedule()
        self._clock = self._schedule.clock()
        self._checkpoint = None if plan.checkpoint is None else Checkpoint(plan.checkpoint)
        self._own_folder = _own_folder() if plan.checkpoint is None else None
        self._workers = plan.options.workers
        self._requests: list[tuple[Callable[[], None], threading.Event]] = []
        self._wants_stop: str | None = None  # "stop" or "drain"
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._stop_serving: Callable[[], None] = lambda: None
        self._is_finished = False
        self._marked: object = None  # how far the job had come at the last epoch
        self._pipeline: Pipeline
        self._coordinator: Coordinator
        self._readers: SourceReaders
        try:
            self._open()
            read = [] if self._pipeline.is_done else self._pipeline.readers  # limit(0) asks for no batch
            self._readers = SourceReaders(read, plan.rows_per_second, plan.memory.queues)
        except BaseException as error:
            self._release(isinstance(error, Crashed))
            if (found := reported(error, plan.at)) is not error:
                raise found from error
            raise
        self._thread = threading.Thread(target=self._main, name="scalein-job", daemon=True)
        _started.add(self)
        self._thread.start()

    # --- opening

    def _open(self) -> None:
        if self._checkpoint is None:
            assert self._own_folder is not None
            self._coordinator = Coordinator(None, self._sinks, self._metrics, uuid.uuid4().hex[:8])
            self._begin(None, self._own_folder)
        else:
            self._checkpoint.open()
            if self._plan.savepoint is not None:
                self._checkpoint.begin_from(self._plan.savepoint)
            self._coordinator = Coordinator(self._checkpoint, self._sinks, self._metrics, self._checkpoint.name())
            folder = self._checkpoint.path
            self._checkpoint.recovered(lambda epoch: self._begin(epoch, folder))
            self._pipeline.retain(self._checkpoint.kept())

    def _begin(self, epoch: dict[str, Json] | None, folder: Path) -> None:
        """The pipeline and sinks as an epoch left them."""
        plan = self._plan
        failpoint("open")
        if hasattr(self, "_pipeline"):
            self._pipeline.close()  # of a newer epoch, that turned out to be damaged
        output = OutputSpec(plan.emit, self._late, "late" in plan.sinks,
                        self._failed if plan.on_error == "sink" else None, plan.checkpoint is not None)
        options = replace(plan.options, memory=plan.memory.kept)
        self._pipeline = Pipeline(plan.op, options, output, folder, epoch, self._metrics, plan.at)
        if epoch is not None:
            self._metrics.restore(as_map(epoch["metrics"]))
            self._is_finished = epoch["finished"] is True
        self._coordinator.open(epoch, lambda name: self._pipeline.schema_of(name, plan.emit), plan.at)

    # --- the thread

    def _main(self) -> None:
        try:
            with keep_at_most(self._plan.memory.spare), resident_threads():
                self._loop()
        except BaseException as error:
            self._error = reported(error, self._plan.at)
        finally:
            try:
                self._release(isinstance(self._error, Crashed))
            except BaseException as error:
                self._error = self._error or reported(error, self._plan.at)
            self._ended.set()
            with suppress(IndexError):
                while True:
                    self._requests.pop(0)[1].set()

    def _loop(self) -> None:
        if self._plan.bootstrap is not None and not self._coordinator.number:
            past = batches(self._plan.bootstrap, self._plan.options)
            self._pipeline.fill(takewhile(lambda _: self._wants_stop is None, past))
            if self._wants_stop is not None:
                return  # without an epoch: the next run begins with the past again
        if self._checkpoint is not None and self._checkpoint.is_adopted:
            self._begin_epoch()  # what is written from here on is this job's: an epoch to go back to says so
        if self._is_finished and not self._pipeline.is_done:
            self._warn_of_more()
        due = self._clock.now() + self._plan.every_s
        idle: set[Reader] = set()
        step_rows = FIRST_ROWS
        while not self._is_finished:
            self._serve()
            if self._wants_stop == "stop":
                break
            if self._wants_stop == "drain":
                self._readers.end()
            start = time.monotonic()
            most = self._schedule.round_rows(min(STEP_ROWS, step_rows))
            deliveries = self._readers.take(most, min(QUIET_S, max(due - self._clock.now(), 0.001)))
            now = time.monotonic()
            self._metrics.wait_s += now - start
            if deliveries:
                arrived = {d.reader for d in deliveries if d.batch.num_rows}
                for reader in arrived & idle:
                    self._pipeline.mark_idle(reader, False)
                idle -= arrived
                # A partition that has been idle begins with a round: what it gives first holds others back again.
                is_any_idle = any(not reader.has_ended for reader in idle)
                self._write(self._pipeline.run(deliveries, (lambda: []) if is_any_idle else partial(self._more, now)))
                end, rows = time.monotonic(), [delivery.batch.num_rows for delivery in deliveries]
                self._metrics.latency.add([end - delivery.came_s for delivery in deliveries], rows)
                self._metrics.busy_s += end - now
                step_rows = max(FEW_ROWS, int(sum(rows) * STEP_S / max(end - now, 1e-6)))
                failpoint("batch")
            if self._pipeline.is_done or (not deliveries and self._readers.has_ended):
                self._write(self._pipeline.finish())
                self._is_finished = True
                break
            self._look_for_idle(idle)
            if self._coordinator.is_free:
                self._coordinator.settle()
                if self._clock.now() >= due:
                    if self._coordinator.is_behind or self._pipeline.mark != self._marked:
                        self._begin_epoch()
                    due = max(due + self._plan.every_s, self._clock.now())
        self._begin_epoch()
        self._coordinator.settle(is_last=True)

    def _more(self, began: float) -> list[SourceBatch]:
        """More rows for a round that is not long yet, unless a request waits for its end."""
        if self._requests or self._wants_stop is not None or time.monotonic() - began > STEP_S:
            return []
        return self._readers.take_more(MORE_ROWS)

    def _begin_epoch(self) -> None:
        self._marked = self._pipeline.mark
        self._coordinator.begin(self._pipeline, self._is_finished)

    def _look_for_idle(self, idle: set[Reader]) -> None:
        """Idle partitions do not hold the watermark back. One that is slow, or blocked by the job, is not idle."""
        for reader in self._pipeline.readers:
            if reader.has_ended or (reader.quiet_s > IDLE_S and not reader.rows and not reader.is_ended):
                idle.add(reader)
                self._pipeline.mark_idle(reader, True)
        self._write(self._pipeline.advance())

    def _warn_of_more(self) -> None:
        """What the sources have now, a finished job does not read: its windows are closed and its results are given."""
        if self._readers.has_more(MORE_S if self._pipeline.is_bounded else QUIET_S):
            warn("the job of this checkpoint has finished, and rows that came later are not read: give another "
                 f"directory than {self._plan.checkpoint} to begin anew", self._plan.at)

    def _write(self, batches: Iterable[pa.RecordBatch]) -> None:
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
            warn(f"{rows.num_rows} rows came too late and were dropped; later ones are only counted: see "
                 "metrics()[\"late_rows\"], or give late= a sink", self._plan.at)

    def _failed(self, rows: pa.RecordBatch, error: ScaleinError) -> None:
        found = in_columns(rows, self._pipeline.schema_of("failed", self._plan.emit))
        if found is None:
            raise error  # it failed after an aggregation: there is no source row to report
        self._metrics.failed_rows += found.num_rows
        self._sinks["failed"].write(found)

    # --- requests

    def _serve(self) -> None:
        while self._requests:
            request, done = self._requests.pop(0)
            request()
            done.set()

    def _ask(self, request: Callable[[], None]) -> None:
        """Serve a request at the next barrier, and wait for it unless the caller is one of the job's threads."""
        done = threading.Event()
        self._requests.append((request, done))
        self._readers.wake()
        while not self._is_inside() and not self._ended.is_set() and not done.wait(0.05):
            pass

    def _is_inside(self) -> bool:
        """Whether this thread is one that the job waits for."""
        me = threading.current_thread()
        return me is self._thread or self._coordinator.has_thread(me) or self._readers.has_thread(me) or bool(
            _WORKER.fullmatch(me.name))

    def scale(self, workers: int) -> None:
        """Change the number of workers at the next barrier. They share the state: see `metrics()["rescales"]`.

        A job that has finished meanwhile needs none any more; one that was stopped or failed is refused.
        """
        options = Options.make(workers=workers, at=self._plan.at)
        if self.status in ("stopped", "failed"):
            raise BadArgument("the job has ended, so its workers cannot be changed", at=here(), found=self.status,
                              hint="start(workers=...) again with the same checkpoint")

        def change() -> None:
            start = time.perf_counter()
            self._workers = options.workers
            self._pipeline.set_workers(options.workers)
            self._metrics.note_rescale(options.workers, time.perf_counter() - start)

        self._ask(change)

    def snapshot(self, name: str | None = None) -> Path | None:
        """Take a checkpoint now, and wait until it is whole. That of a job that has ended well is.

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
                self._coordinator.settle(is_last=True)
                if name is not None and self._checkpoint is not None:
                    places.append(self._checkpoint.save_as(name))
            except ScaleinError as error:
                outcome.append(error)

        self._check_outside()
        self._ask(take)
        if outcome:
            outcome[0].locate(here(self._plan.at))
            raise outcome[0]
        if self._error is not None:
            self._ended.wait()  # it gives everything back first
            raise self._error
        if name is not None and not places:
            raise ScaleinError("the job ended before the savepoint was taken", at=here(), found=repr(name),
                               hint="start it again with the same checkpoint, and ask then")
        return places[0] if places else None

    def stop(self, *, drain: bool = False) -> None:
        """End the job with a last checkpoint. It goes on from there when it is started again.

        `drain=True` reads nothing more from the sources, runs all rows that were read ahead, at any rate, and gives the
        results of all windows that are open. Such a job is finished: its checkpoint does not go on with rows that come
        later, and who starts it again is warned of them.

        Whatever runs inside of the job (a sink, a source, a function) may call this; then it comes back at once, and
        the job ends after the current rows.
        """
        self._wants_stop = "drain" if drain else "stop"
        self._readers.wake()
        if not self._is_inside():
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
                    self._ended.wait(timeout)
            except (KeyboardInterrupt, SystemExit):
                self._wants_stop = "stop"
                self._readers.wake()
                self._ended.wait()
                raise
        if self._error is not None:
            raise self._error
        return self._ended.is_set()

    def _check_outside(self) -> None:
        if self._is_inside():
            raise BadArgument("a job cannot wait for itself", at=here(),
                              hint="what runs inside of the job, like a sink's function, may call stop() or scale()")

    def await_end(self, timeout: float) -> bool:
        """Whether the job has ended, after at most so many seconds; raises nothing."""
        return self._ended.wait(timeout)

    def await_termination(self, timeout: float | None = None) -> bool:
        """As in PySpark: wait, and say whether the job has ended."""
        return self.wait(timeout)

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
        """Figures so far: rows, late rows, rescales, epochs, latency; of each stage, rows and time of this run, and of
        each of its workers rows, bytes, the time in kernels and the time that it waited for the others.

        Rows are counted from the first run of a checkpoint on; `run_rows_in` and `run_rows_out` are those of this run.
        `lag` is how far the watermark is behind the clock, as text ("2 m 5 s"), and `lag_s` in seconds.
        `state_bytes_moved` of a rescale is 0: workers share the state, in whatever tables, stores or logs it is.
        """
        return figures(self._metrics, self._pipeline, self._workers)

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

    def _release(self, is_dead: bool = False) -> None:
        """Give everything back, whatever happened; a job that died on purpose leaves its files as they are."""
        self._stop_serving()
        if hasattr(self, "_readers"):
            self._readers.close()
        if hasattr(self, "_coordinator"):
            self._coordinator.close()
        for sink in self._sinks.values():
            with suppress(Exception):
                sink.release() if is_dead else sink.close()
        if hasattr(self, "_pipeline"):
            self._pipeline.close()
        if self._checkpoint is not None:
            self._checkpoint.close()
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)


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


def _own_folder() -> Path:
    """A place for what does not fit into memory, of a job without a checkpoint."""
    try:
        return Path(tempfile.mkdtemp(prefix="scalein-job-"))
    except OSError as error:
        raise StoreFailed("a job needs a temporary folder", at=here(), file=tempfile.gettempdir(), found=error,
                          hint="set TMPDIR, or give checkpoint=") from error
