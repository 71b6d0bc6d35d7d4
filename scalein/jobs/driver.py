"""The driver of a job: its thread takes what has arrived, in rounds, runs the operators over it and writes the results.

When a checkpoint is due (`Coordinator.is_due`), it takes a snapshot at that barrier and continues. Requests (`scale`,
`snapshot`, `stop`) are served at barriers; `stop` also cancels what has none: the bootstrap, and the end of the input.
User code runs on the job's threads as well: it may make requests, but not wait for them. `ROUND_S` is the
target duration of a round; one that nothing waits for goes on for up to `LONG_ROUND_S` while there are rows at hand,
since its end costs a millisecond or two.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path

import pyarrow as pa

from scalein.cancellation import Cancelled, cancelled_by, raise_if_cancelled
from scalein.connectors.sinks.sink_writer import SinkWriter
from scalein.errors import Damaged, LateData, ScaleinError, StoreFailed, here, reported, warn
from scalein.exec.bounded import batches
from scalein.exec.compatibility import warn_of_changes
from scalein.exec.event_time import IDLE_S
from scalein.exec.rounds import Result
from scalein.exec.schedule import schedule
from scalein.jobs.checkpoint import Checkpoint
from scalein.jobs.coordinator import Coordinator
from scalein.jobs.dead_letters import DeadLetters
from scalein.jobs.job_graph import JobGraph, OutputSpec
from scalein.jobs.metrics import Metrics
from scalein.jobs.recovery import OutputIdentity, output_roles, without_lost_outputs
from scalein.jobs.source_readers import Reader, SourceBatch, SourceReaders
from scalein.jobs.spec import JobSpec
from scalein.kernels.workers import resident_threads
from scalein.memory import keep_at_most
from scalein.storage.checked_json import Json, as_map
from scalein.storage.failpoints import Crashed, failpoint
from scalein.storage.object_store import Location

MAX_ROUND_ROWS = 1 << 25
FIRST_ROUND_ROWS, MIN_ROUND_ROWS = 1 << 21, 1 << 18  # rows of the first round, and least rows of the others
MORE_ROWS = 1 << 20  # rows added at a time to a round that is faster than expected
ROUND_S = 0.03  # target duration of a round: requests and checkpoints wait for its end
LONG_ROUND_S = 0.1
_WORKER = re.compile(r"scalein-(\d+|udf|pool)")  # names of threads that may be any job's
MORE_S = 0.5  # longest check for rows that a finished job does not read
QUIET_S = 0.05  # longest wait for rows before requests are served


class Driver:
    """A job at work: its graph of operators, sources, sinks and checkpoints, and the thread that drives them."""

    def __init__(self, plan: JobSpec) -> None:
        self._plan = plan
        self._outputs = [SinkWriter(output.sink, "out", output.at) for output in plan.outputs]
        self._side_sinks = {name: SinkWriter(sink, name, plan.at) for name, sink in plan.side_sinks.items()}
        self.metrics = Metrics(outputs=[(sink.place, 0) for sink in self._outputs])
        self._has_warned_of_late_rows = self._has_warned_of_outliers = False
        self._schedule = schedule()
        self._clock = self._schedule.clock()
        self.checkpoint = None if plan.checkpoint is None else _checkpoint(plan.checkpoint)
        self._own_folder = _own_folder() if plan.checkpoint is None else None
        self.workers = plan.options.workers
        self._requests: list[tuple[Callable[[], None], threading.Event]] = []
        self._wants_stop: str | None = None  # "stop" or "drain"
        self._cancel = threading.Event()  # what takes long without reaching a barrier: the bootstrap, and the end
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self.at_end: Callable[[], None] = lambda: None
        self.is_finished = False
        self.is_caught_up = False  # with `until="now"`: all rows were taken, and the next run takes what comes
        self._marked: object = None  # how far the job had come at the last epoch
        self.graph: JobGraph
        self.coordinator: Coordinator
        self.readers: SourceReaders
        try:
            self._open()
            read = [] if self.graph.is_done else self.graph.readers  # limit(0) asks for no batch
            self.readers = SourceReaders(read, plan.rows_per_second, plan.memory.queues)
        except BaseException as error:
            self._release(isinstance(error, Crashed))
            if (found := self._reported(error)) is not error:
                raise found from error
            raise
        self._thread = threading.Thread(target=self._main, name="scalein-job", daemon=True)
        self._thread.start()

    # --- opening

    def _open(self) -> None:
        if self.checkpoint is None:
            assert self._own_folder is not None
            self.coordinator = Coordinator(None, self.metrics, uuid.uuid4().hex[:8])
            self._begin(None, self._own_folder)
        else:
            self.checkpoint.open()
            if self._plan.savepoint is not None and not self.checkpoint.numbers():
                with _local_savepoint(self._plan.savepoint) as folder:
                    self.checkpoint.begin_from(folder)
            self.coordinator = Coordinator(self.checkpoint, self.metrics, self.checkpoint.name())
            folder = self.checkpoint.path
            self.checkpoint.recovered(lambda epoch: self._begin(epoch, folder))
            self.graph.retain(self.checkpoint.kept())

    def _begin(self, epoch: dict[str, Json] | None, folder: Path) -> None:
        """The graph and sinks as an epoch left them."""
        plan = self._plan
        failpoint("open")
        if hasattr(self, "graph"):
            self.graph.close()  # of a newer epoch, that turned out to be damaged
        roles = output_roles(epoch, [OutputIdentity(sink.kind, sink.place, output.op, output.at)
                                     for sink, output in zip(self._outputs, plan.outputs, strict=True)])
        dead_letters = DeadLetters(self._failed) if plan.on_error == "sink" else None
        output = OutputSpec(roles, plan.emit, self._late, "late" in plan.side_sinks, dead_letters,
                            plan.checkpoint is not None, plan.evolve)
        options = replace(plan.options, memory=plan.memory.kept)
        roots = [each.op for each in plan.outputs]
        self.graph = JobGraph(roots, options, output, folder, epoch, self.metrics, plan.at)
        sinks = {**dict(zip(roles, self._outputs, strict=True)), **self._side_sinks}
        if epoch is not None:
            self.metrics.restore(as_map(epoch["metrics"]))
            self.is_finished = epoch["finished"] is True
        schemas = {role: self.graph.output_schema(number) for number, role in enumerate(roles)}
        if "late" in sinks:
            schemas["late"] = self.graph.late_schema
        if "failed" in sinks:
            schemas["failed"] = self.graph.failed_schema
        self.coordinator.open(epoch, sinks, schemas, plan.at)
        if epoch is not None:
            before = without_lost_outputs(epoch, roles, plan.at)
            warn_of_changes(before, self.graph.described, lambda: self.graph.joined_tables, self.coordinator.places,
                            plan.at)

    # --- the thread

    def _main(self) -> None:
        try:
            with keep_at_most(self._plan.memory.spare), resident_threads():
                self._loop()
        except BaseException as error:
            self.error = self._reported(error)
        finally:
            try:
                self._release(isinstance(self.error, Crashed))
            except BaseException as error:
                self.error = self.error or self._reported(error)
            self.ended.set()
            with suppress(IndexError):
                while True:
                    self._requests.pop(0)[1].set()

    def _reported(self, error: BaseException) -> BaseException:
        """What the user sees of an error. Damage that is found while the job runs is there at its next start, too."""
        found = reported(error, self._plan.at)
        if isinstance(found, Damaged) and self._plan.checkpoint is not None and found.hint is None:
            found.add("hint", f"`scalein state {self._plan.checkpoint}` shows the whole epochs, and goes back to one")
        return found

    def _loop(self) -> None:
        if self._plan.bootstrap is not None and not self.coordinator.number:
            past = batches(self._plan.bootstrap, self._plan.options)
            with suppress(Cancelled), cancelled_by(self._cancel):
                self.graph.fill(takewhile(lambda _: self._wants_stop is None, past))
            if self._wants_stop is not None:
                return  # without an epoch: the next run begins with the past again
        if self.checkpoint is not None and self.checkpoint.is_adopted:
            self.begin_epoch()  # what is written from here on is this job's: an epoch to go back to says so
        if self.is_finished and not self.graph.is_done:
            self._warn_of_more()
        self.coordinator.schedule(self._plan.every_s, self._clock.now)
        idle: set[Reader] = set()
        round_rows = FIRST_ROUND_ROWS
        while not self.is_finished:
            self._serve()
            if self._wants_stop == "stop":
                break
            if self._wants_stop == "drain":
                self.readers.end()
            start = time.monotonic()
            most = self._schedule.round_rows(min(MAX_ROUND_ROWS, round_rows))
            deliveries = self.readers.take(most, min(QUIET_S, max(self.coordinator.due_in_s, 0.001)))
            now = time.monotonic()
            self.metrics.wait_s += now - start
            if deliveries:
                arrived = {d.reader for d in deliveries if d.batch.num_rows}
                for reader in arrived & idle:
                    self.graph.mark_idle(reader, False)
                idle -= arrived
                # A partition that has been idle begins with a round: what it gives first holds others back again.
                is_any_idle = any(not reader.has_ended for reader in idle)
                self._write(self.graph.run(deliveries, (lambda: []) if is_any_idle else partial(self._more, now)))
                self._warn_of_outliers()
                self._warn_of_growth()
                end, rows = time.monotonic(), [delivery.batch.num_rows for delivery in deliveries]
                self.metrics.latency.add([end - delivery.arrival_s for delivery in deliveries], rows)
                self.metrics.busy_s += end - now
                round_rows = max(MIN_ROUND_ROWS, int(sum(rows) * ROUND_S / max(end - now, 1e-6)))
                failpoint("batch")
            has_ended = not deliveries and self.readers.has_ended
            if has_ended and self._plan.until_now and not self.graph.is_bounded:
                self.is_caught_up = True
                break
            if self.graph.is_done or has_ended:
                try:
                    self._write(self._finish())
                except Cancelled:
                    if self.checkpoint is not None:  # the state is used up: the next run goes on from the last epoch
                        self.coordinator.await_epoch()
                        return
                    break
                self.is_finished = True
                break
            self._look_for_idle(idle)
            if self.coordinator.is_due(has_changed=self.graph.mark != self._marked):
                self.begin_epoch()
        self.begin_epoch()
        self.coordinator.await_epoch(is_last=True)

    def _finish(self) -> Iterator[Result]:
        """What is left at the end of the input; `stop` cancels it, between two results or while one is computed."""
        results = self.graph.finish()
        while True:
            with cancelled_by(self._cancel):
                raise_if_cancelled()
                result = next(results, None)
            if result is None:
                return
            yield result

    def _more(self, began: float) -> list[SourceBatch]:
        """More rows for a round that is not long yet, unless a request waits for its end."""
        took_s = time.monotonic() - began
        # Changes are emitted at the end of a round, and its tables have not been looked at for their memory before.
        is_awaited = (self._plan.emit == "changes" or self._plan.options.memory is not None
                      or self.coordinator.due_in_s <= 0)
        if self._requests or self._wants_stop is not None or took_s > (ROUND_S if is_awaited else LONG_ROUND_S):
            return []
        return self.readers.take_more(MORE_ROWS)

    def begin_epoch(self) -> None:
        self._marked = self.graph.mark
        self.coordinator.begin(self.graph, self.is_finished)

    def _look_for_idle(self, idle: set[Reader]) -> None:
        """Idle partitions do not hold the watermark back. One that is slow, or blocked by the job, is not idle."""
        for reader in self.graph.readers:
            if self._plan.until_now and reader.is_ended and not reader.is_bounded:
                continue  # the next run reads on: its rows must not be late then
            if reader.has_ended or (reader.quiet_s > IDLE_S and not reader.rows and not reader.is_ended):
                idle.add(reader)
                self.graph.mark_idle(reader, True)
        self._write(self.graph.advance())

    def _warn_of_more(self) -> None:
        """What the sources have now, a finished job does not read: its windows are closed and its results are given."""
        if self.readers.has_more(MORE_S if self.graph.is_bounded else QUIET_S):
            warn("the job of this checkpoint has finished, and rows that came later are not read: give another "
                 f"directory than {self._plan.checkpoint} to begin anew", self._plan.at)

    def _write(self, results: Iterable[Result]) -> None:
        for output, batch in results:
            if batch.num_rows:
                self.metrics.note_result(output, batch.num_rows)
                self._outputs[output].write(batch)

    def _late(self, rows: pa.RecordBatch) -> None:
        self.metrics.late_rows += rows.num_rows
        if self._plan.late == "error":
            raise LateData(f"{rows.num_rows} rows came too late: all windows that they are in are closed",
                           at=self._plan.at, found=rows.slice(0, 1).to_pylist()[0],
                           hint='a longer delay of with_watermark, late="drop", or a sink for them')
        if "late" in self._side_sinks:
            self._side_sinks["late"].write(rows)
        elif not self._has_warned_of_late_rows:
            self._has_warned_of_late_rows = True
            warn(f"{rows.num_rows} rows came too late and were dropped; later ones are only counted: see "
                 "metrics()[\"late_rows\"], or give late= a sink", self._plan.at)

    def _warn_of_outliers(self) -> None:
        if not self._has_warned_of_outliers and (text := self.graph.outlier_warning) is not None:
            self._has_warned_of_outliers = True
            warn(text, self._plan.at)

    def _warn_of_growth(self) -> None:
        for text, at in self.graph.growth_warnings(time.time() - self.metrics.began):
            warn(text, at if at.line else self._plan.at)

    def _failed(self, letters: pa.RecordBatch) -> None:
        self.metrics.failed_rows += letters.num_rows
        self._side_sinks["failed"].write(letters)

    # --- requests

    def scale(self, workers: int) -> None:
        """Change the number of workers at the next barrier; they share the state."""

        def change() -> None:
            start = time.perf_counter()
            self.workers = workers
            self.graph.set_workers(workers)
            self.metrics.note_rescale(workers, time.perf_counter() - start)

        self.ask(change)

    def snapshot(self, name: str | None) -> Path | str | None:
        """Take a checkpoint at the next barrier and wait for it; with a name, the folder of a savepoint of it."""
        failed: list[ScaleinError] = []
        folders: list[Path | str] = []

        def take() -> None:
            self.begin_epoch()
            try:
                self.coordinator.await_epoch(is_last=True)
                if name is not None and self.checkpoint is not None:
                    folders.append(self.checkpoint.save_as(name))
            except ScaleinError as error:
                failed.append(error)
                if self.coordinator.has_given_up:
                    raise

        self.ask(take)
        if failed:
            failed[0].locate(here(self._plan.at))
            raise failed[0]
        if self.error is not None:
            self.ended.wait()  # everything is released first
            raise self.error
        return folders[0] if folders else None

    def request_stop(self, *, drain: bool = False) -> None:
        """End at the next barrier; any thread may call. The end of the input has none: what it gives is cancelled."""
        self._wants_stop = "drain" if drain else "stop"
        if not drain:
            self._cancel.set()
        self.readers.wake()

    def _serve(self) -> None:
        while self._requests:
            request, done = self._requests.pop(0)
            request()
            done.set()

    def ask(self, request: Callable[[], None]) -> None:
        """Serve a request at the next barrier, and wait for it unless the caller is one of the job's threads."""
        done = threading.Event()
        self._requests.append((request, done))
        self.readers.wake()
        while not self.is_inside() and not self.ended.is_set() and not done.wait(0.05):
            pass

    def is_inside(self) -> bool:
        """Whether this thread is one that the job waits for."""
        me = threading.current_thread()
        return me is self._thread or self.coordinator.has_thread(me) or self.readers.has_thread(me) or bool(
            _WORKER.fullmatch(me.name))

    # ---

    def _release(self, is_dead: bool = False) -> None:
        """Give everything back, whatever happened; a job that died on purpose leaves its files as they are."""
        self.at_end()
        if hasattr(self, "readers"):
            self.readers.close()
        if hasattr(self, "coordinator"):
            self.coordinator.close()
        for sink in (*self._outputs, *self._side_sinks.values()):
            with suppress(Exception):
                sink.release() if is_dead else sink.close()
        if hasattr(self, "graph"):
            self.graph.close()
        if self.checkpoint is not None:
            self.checkpoint.close()
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)


def _checkpoint(given: Path | Location) -> Checkpoint:
    if isinstance(given, Path):
        return Checkpoint(given)
    from scalein.jobs.remote_checkpoint import RemoteCheckpoint  # few jobs need it

    return RemoteCheckpoint(given)


@contextmanager
def _local_savepoint(given: Path | Location) -> Iterator[Path]:
    """The folder of a savepoint; that of a remote one is a copy."""
    if isinstance(given, Path):
        yield given
        return
    from scalein.jobs.remote_checkpoint import fetch_savepoint  # few jobs need it

    with tempfile.TemporaryDirectory(prefix="scalein-savepoint-") as folder:
        fetch_savepoint(given, Path(folder))
        yield Path(folder)


def _own_folder() -> Path:
    """A place for what does not fit into memory, of a job without a checkpoint."""
    try:
        return Path(tempfile.mkdtemp(prefix="scalein-job-"))
    except OSError as error:
        raise StoreFailed("a job needs a temporary folder", at=here(), file=tempfile.gettempdir(), found=error,
                          hint="set TMPDIR, or give checkpoint=") from error
