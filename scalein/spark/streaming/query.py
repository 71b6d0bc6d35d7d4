"""A running stream: a flow inside Spark's Structured Streaming, seen from the driver.

Spark owns the source, its offsets, the numbers of batches and the retries of tasks. A batch is one action inside
`foreachBatch`; the coordinator (`coordinator.py`) runs and commits it. Whether Spark or the tasks read its rows is
decided batch by batch (`inputs.py`).

Threads: Spark's thread calls `_on_batch`; users' threads query and set flags. A daemon thread waits for the end of the
query, publishes meanwhile what waits for larger files, and then releases the checkpoint.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from scalein.durations import seconds
from scalein.errors import BadArgument, ScaleinError, here
from scalein.exec.metrics_log import log_lines
from scalein.spark.batch.apply import select_columns
from scalein.spark.batch.scan import parallelism
from scalein.spark.errors import explain_error, explain_jvm_error, translate_errors
from scalein.spark.origin import ORIGIN
from scalein.spark.row_groups import RowGroups, coded_types, plan_row_groups
from scalein.spark.serialize import BroadcastPlan, serialize
from scalein.spark.streaming.coordinator import Coordinator, StreamSpec, checked_partitions
from scalein.spark.streaming.diagnose import why_no_output
from scalein.spark.streaming.inputs import READ_ALL_BYTES, READ_ALL_TEXT_BYTES, scan_of_batch
from scalein.spark.streaming.sinks import FunctionCommitter
from scalein.spark.streaming.tasks import (
    BLOCK_DDL,
    BatchResult,
    FileTask,
    MapTask,
    MicroBatch,
    ReadAllTask,
    ReduceTask,
    RowwiseTask,
    batch_totals,
    collect_results,
)
from scalein.spark.text_splits import TextSplits
from scalein.state.key_groups import KEY_GROUPS
from scalein.storage.object_store import Location

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

MAX_CODED_PLANS = 4  # of a stream; each is compiled in every process
MAX_CODED_PLAN_BYTES = 1 << 20  # it has the static tables of joins once more
STOP_S = 60.0  # for which a stop waits for the current batch
PUBLISH_S = 1.0  # between two looks whether output has waited long enough
# The plan of a batch is fixed: two stages that Spark need not replan. Larger Arrow batches cost less, but a batch of
# shuffle blocks must stay below the 2 GB of an Arrow binary column.
_SETTINGS = {"spark.sql.adaptive.enabled": "false", "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
             "spark.sql.execution.arrow.maxBytesPerBatch": str(64 << 20)}  # fmt: skip
_DESCRIPTION = "spark.job.description"
_FILE_MANAGER = "spark.sql.streaming.checkpointFileManagerClass"
_RENAMING_MANAGER = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"


class _Stopped(Exception):
    """A batch does not start, because the stream is stopping."""


class StreamJob:
    """A running stream: `scale` it, `stop` it, `wait` for its end."""

    def __init__(self, spec: StreamSpec, stream: DataFrame) -> None:
        self._spec, self._session = spec, stream.sparkSession
        self._error: BaseException | None = None
        self._is_stopping = self._is_draining = False
        self._is_refused = False  # tasks met files that Spark must read, and more of these may follow
        self._is_cancelled = False  # a stop has cancelled a batch, or prevented one: Spark's error is expected then
        self._batch_thread = 0  # the thread of the current batch
        self._ended, self._batch_lock = threading.Event(), threading.Lock()  # the lock is held during a batch
        serialized = serialize(spec.plan)
        self._broadcast = BroadcastPlan.broadcast(stream.sparkSession.sparkContext, serialized)
        self._may_be_coded = spec.plan.may_be_coded and len(serialized[1]) <= MAX_CODED_PLAN_BYTES
        self._coded: dict[frozenset[str], BroadcastPlan] = {}  # plans for dictionaries in some columns
        try:
            self._coordinator = Coordinator(spec, self._broadcast)
            try:
                self._query = self._start(stream)
            except BaseException:
                self._coordinator.close()
                raise
        except BaseException:
            self._broadcast.destroy()
            raise
        threading.Thread(target=self._watch, name="scalein stream", daemon=True).start()

    def _start(self, stream: DataFrame) -> StreamingQuery:
        writer = stream.writeStream.foreachBatch(self._on_batch)
        writer = writer.option("checkpointLocation", self._spec.location.spark_uri("spark"))
        if self._spec.name is not None:
            writer = writer.queryName(self._spec.name)
        if self._spec.trigger:
            writer = writer.trigger(**self._spec.trigger)  # type: ignore[call-overload]
        with translate_errors(), _settings(self._session, _log_settings(self._session, self._spec.location)):
            return writer.start()

    def _on_batch(self, df: DataFrame, number: int) -> None:
        try:
            # Only a stop can hold it, and it waits for this thread: waiting here would be a deadlock.
            if not self._batch_lock.acquire(blocking=False):
                raise _Stopped
            try:
                self._batch_thread = threading.get_ident()
                if self._is_stopping:
                    raise _Stopped  # if this returned, Spark would take the batch for done
                spark = df.sparkSession
                query = str(spark.sparkContext.getLocalProperty("sql.streaming.queryId"))
                self._coordinator.run_batch(number, query, lambda batch: self._run_tasks(df, batch, query), spark)
            finally:
                self._batch_thread = 0
                self._batch_lock.release()
        except _Stopped:
            self._is_cancelled = True
            raise
        except BaseException as error:
            self._record_error(error)
            raise

    def _record_error(self, error: BaseException) -> None:
        """Record the first error, unless it is that of a batch that a stop has cancelled."""
        if self._error is None and not self._is_cancelled:
            self._error = explain_error(error) or explain_jvm_error(error) or error
            if isinstance(self._error, ScaleinError):
                self._error.locate(self._spec.at)

    def _run_tasks(self, df: DataFrame, batch: MicroBatch, query: str) -> BatchResult:
        """Run the one action of a batch."""
        with translate_errors(), _described(df.sparkSession, self._spec.plan.title):
            found = None if self._is_refused else scan_of_batch(self._session, df.sparkSession, query, self._spec.input,
                                                                batch.clock)
            if found is None:
                return self._read_by_spark(df, batch)
            skipped = found.rows.skipped
            by_tasks = replace(batch, skipped_times=skipped.times)
            result = self._read_files(df.sparkSession, *self._with_dictionaries(by_tasks, found.rows))
            if result.is_refused:  # what tasks wrote is not part of a manifest, as after a failed attempt
                self._is_refused = True
                return self._read_by_spark(df, batch)
            found.report_rows(batch_totals([*result.tasks.values()], self._spec.plan.mode)["rows"])
            return replace(result, skipped=skipped)

    def _run_without_rows(self, batch: MicroBatch) -> BatchResult:
        """Run the tasks that hold the state."""
        nothing = plan_row_groups((), batch.input_schema)
        assert nothing is not None
        with translate_errors(), _described(self._session, f"{self._spec.plan.title}, at the end"):
            return self._read_files(self._session, batch, nothing)

    def _with_dictionaries(self, batch: MicroBatch,
                           row_groups: RowGroups | TextSplits) -> tuple[MicroBatch, RowGroups | TextSplits]:
        """The batch with dictionaries in columns of text with few different values, and a plan for them."""
        if isinstance(row_groups, TextSplits):
            return batch, row_groups
        coded = row_groups.coded
        is_known = coded in self._coded or len(self._coded) < MAX_CODED_PLANS
        if not (coded and is_known and self._may_be_coded):
            return batch, row_groups
        if coded not in self._coded:
            self._coded[coded] = BroadcastPlan.broadcast(self._session.sparkContext,
                                                         serialize(self._spec.plan.with_coded(coded)))
        schema = coded_types(batch.input_schema, coded)
        return replace(batch, broadcast=self._coded[coded], input_schema=schema), row_groups.with_dictionaries()

    def _read_by_spark(self, df: DataFrame, batch: MicroBatch) -> BatchResult:
        """Run a batch whose rows Spark reads."""
        if self._spec.plan.has_origin:
            from pyspark.sql.functions import input_file_name

            df = df.withColumn(ORIGIN, input_file_name())
        with _settings(df.sparkSession, _SETTINGS):
            return self._collect(select_columns(df, self._spec.input.flow_types.names), self._first_task(batch), batch,
                                 "spark")

    def _read_files(self, spark: SparkSession, batch: MicroBatch, rows: RowGroups | TextSplits) -> BatchResult:
        """Run a batch whose rows tasks read from files; all tasks read all files if that costs less than a shuffle."""
        cores = parallelism(spark)
        limit = READ_ALL_TEXT_BYTES if isinstance(rows, TextSplits) else READ_ALL_BYTES
        if self._spec.plan.mode != "rowwise" and batch.partitions * sum(rows.sizes) <= cores * limit:
            targets = spark.sparkContext.parallelize(range(batch.partitions), batch.partitions)
            return collect_results(targets.mapPartitions(ReadAllTask(batch, rows)).collect(), "tasks")
        parts = rows.split(cores)
        with _settings(spark, _SETTINGS):
            numbers = spark.range(0, len(parts), 1, max(1, len(parts)))
            return self._collect(numbers, FileTask(self._first_task(batch), parts), batch, "tasks")

    def _first_task(self, batch: MicroBatch) -> MapTask | RowwiseTask:
        """The task that reads the stream's rows."""
        return RowwiseTask(batch) if self._spec.plan.mode == "rowwise" else MapTask(batch)

    def _collect(self, rows: DataFrame, first_task: Callable[..., Any], batch: MicroBatch,
                 read_by: str) -> BatchResult:
        """The results of a batch's tasks, of which the first ones read these rows."""
        blocks = rows.mapInArrow(first_task, BLOCK_DDL)
        if self._spec.plan.mode != "rowwise":
            blocks = blocks.repartition(batch.partitions, "target").mapInArrow(ReduceTask(batch), BLOCK_DDL)
        return collect_results(((row[0], row[1], row[2]) for row in blocks.collect()), read_by)

    # --- the user's methods

    def scale(self, partitions: int) -> None:
        """Use this number of partitions from the next batch on. State is moved only as `migration` says."""
        self._coordinator.partitions = checked_partitions(partitions, here())

    def autoscale(self, model: Any, **options: Any) -> Any:
        """Scale it while it runs, between `least` and `most` partitions: see `scalein.model.autoscale`."""
        if not hasattr(model, "autoscale"):
            raise BadArgument("autoscale needs a model or a policy", at=here(), found=type(model).__name__,
                              hint="scalein.model.profile(flow, sample) gives a model, scalein.model.DS2() a policy")
        return model.autoscale(self, **options)

    def work_done(self) -> tuple[float, float, int]:
        """Rows taken in and seconds in batches since the start, and the partitions: what an autoscaler observes."""
        totals = self._coordinator.totals
        return totals.rows_in, totals.busy_s, self._coordinator.partitions

    def batches_done(self) -> tuple[float, float, int, float | None, int]:
        """Rows and seconds of the batches of this start, and their number; when the last one ended, by
        `time.monotonic`, and the partitions that it had.
        """
        done = self._coordinator.totals
        return done.rows_in, done.busy_s, done.batches, done.ended_s, done.partitions

    def is_in_batch(self) -> bool:
        """Whether a batch runs now."""
        return self._batch_lock.locked()

    def configuration(self, workers: int) -> dict[str, object]:
        """The arguments of `Model.predict` for this stream, with `workers` partitions."""
        every_s = 0.0
        with suppress(ScaleinError):  # Spark reads more texts than we do, and 0 is no interval
            every_s = seconds(self._spec.trigger.get("processingTime", 0), "the trigger", self._spec.at)
        read_by = str((self.last_progress or {}).get("read_by", "tasks"))
        cores = parallelism(self._session)
        return {"partitions": workers, "executors": 1, "cores": cores, "read_by": read_by,
                "migration": self._spec.migration, **({"every": every_s} if every_s else {})}

    def most_workers(self) -> int:
        """As many partitions as tasks run at a time."""
        return min(KEY_GROUPS, parallelism(self._session))

    def await_end(self, timeout: float) -> bool:
        """Whether the stream has ended, after waiting at most `timeout` seconds; raises nothing."""
        return self._ended.wait(timeout)

    def stop(self, *, drain: bool = False) -> None:
        """End the stream after the current batch, or in the middle of one that takes longer than a minute: that batch
        will be repeated. Started with the same checkpoint, the stream resumes.

        `drain=True` waits for the current batch, and then gives the results of all windows that are open. They stay
        closed: if the stream is started again, rows in them are late, also those that Spark had not handed over yet.
        """
        if drain and self._spec.committers["out"].kind == FunctionCommitter.kind:
            raise BadArgument("a sink function knows results by the number of their batch, and a drain has none",
                              at=here(), hint='use a sink such as si.to_parquet("out/"), or stop()')
        self._is_stopping = True
        self._is_draining = self._is_draining or drain
        if self._batch_thread == threading.get_ident():  # called by a sink's function, whose batch must end first
            threading.Thread(target=self.stop, name="scalein stop", daemon=True).start()
            return
        is_between_batches = self._batch_lock.acquire(timeout=-1 if self._is_draining else STOP_S)
        try:
            if not self._ended.is_set():
                self._is_cancelled = self._is_cancelled or not is_between_batches
                with translate_errors():
                    self._query.stop()
        finally:
            if is_between_batches:
                self._batch_lock.release()
        self._ended.wait()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the stream has ended, or at most `timeout` seconds; raises the error that ended it."""
        if self._ended.wait(timeout) and self.exception is not None:
            raise self.exception

    def await_termination(self, timeout: float | None = None) -> bool:
        """As in PySpark: wait, and return whether the stream has ended."""
        self.wait(timeout)
        return self._ended.is_set()

    @property
    def last_progress(self) -> dict[str, object] | None:
        """Metrics of the checkpoint's last batch, which may be one of an earlier start; None before the first.

        batch     `batch_id`, Spark's number of it, and `name`, that of the query; `partitions`, the number of tasks
                  that held its state; `duration_s`, and of these `phases_s`: tasks, prepare (output), publish (the
                  manifest: the commit point), commit (output becomes visible), cleanup. Both are empty for a batch of
                  an earlier start.
        rows      `rows_in` and `rows_out`, `late_rows` (whose windows were all closed), `failed_rows` (that went to the
                  sink of `on_error=`), `timeless_rows` (without an event time, so in no window). `read_by` is "tasks"
                  if compiled tasks read the files themselves, "spark" if rows came out of the JVM; of `rows_in`, those
                  in `row_groups_skipped` row groups of the files were not read, since none of them passes the flow's
                  filters.
        time      after the batch: `watermark`, in units of the time column, and `watermark_time`, the same as text;
                  where there is none, `why_no_watermark` says why. `outlier_rows` counts, since the first batch of the
                  checkpoint, rows whose time was too far ahead of the others to move the watermark.
        state     after the batch: `state_rows`, `state_bytes` and `state_files`. A group may have rows in several
                  files, until these are merged. Of the batch itself, over its tasks: `state_bytes_read`, of rows that
                  were looked up or merged; of these `state_bytes_moved`, in files that hold key groups of other tasks
                  too, as they do after a rescale; `state_bytes_written`, of new files; and `state_bytes_verified`, of
                  blocks whose checksums a process computed because it met them for the first time.
        """
        return self._coordinator.progress

    @property
    def recent_progress(self) -> list[dict[str, object]]:
        """`last_progress` of the last hundred batches of this start, oldest first: who looks seldom misses none."""
        return list(self._coordinator.recent_progress)

    def metrics(self) -> dict[str, object]:
        """Figures of this start, by the names that those of a job have: `rows_in`, `rows_out`, `late_rows`, `busy_s` in
        batches, `workers`, which are partitions; the number of `batches`, what the last one took (`batch_s`), and
        `watermark_time` and `state_bytes` after it.
        """
        totals, last = self._coordinator.totals, self.last_progress or {}
        return {"rows_in": totals.rows_in, "rows_out": totals.rows_out, "late_rows": totals.late_rows,
                "busy_s": round(totals.busy_s, 3), "workers": self._coordinator.partitions, "batches": totals.batches,
                "batch_s": last.get("duration_s"), "watermark_time": last.get("watermark_time"),
                "state_bytes": last.get("state_bytes", 0)}

    def log_metrics(self, path: str | os.PathLike[str]) -> None:
        """Append the figures to a file, a line of JSON every second: `scalein top FILE` shows it."""
        log_lines(self, path)

    def why_no_output(self) -> str:
        """Why nothing has come out since the start, in a few sentences: no rows, the watermark, outliers."""
        if self.exception is not None:
            return f"The stream has failed: {self.exception}"
        return why_no_output(self._coordinator, self._spec.plan, self.status)

    @property
    def name(self) -> str | None:
        """The name of Spark's query, as in `spark.streams.active` and in its UI."""
        return self._spec.name

    @property
    def exception(self) -> BaseException | None:
        """The error that ended the stream, if there was one."""
        return self._error

    @property
    def is_active(self) -> bool:
        return not self._ended.is_set()

    @property
    def status(self) -> str:
        """One of "running", "finished", "stopped" and "failed"."""
        if not self._ended.is_set():
            return "running"
        if self.exception is not None:
            return "failed"
        return "stopped" if self._is_stopping else "finished"

    @property
    def query(self) -> StreamingQuery:
        """Spark's own handle of the query."""
        return self._query

    def __repr__(self) -> str:
        name = "" if self.name is None else f"{self.name!r}, "
        done = "no batch yet" if self.last_progress is None else f"batch {self.last_progress['batch_id']}"
        return f"StreamJob({name}{self.status}, {done}, {self._coordinator.partitions} partitions)"

    # ---

    def _publish_waiting(self) -> None:
        """Publish what has waited long enough; if that fails, the stream ends."""
        try:
            self._coordinator.publish_waiting()
        except BaseException as error:
            self._record_error(error)
            self._query.stop()

    def _watch(self) -> None:
        """Wait for the end of the query, publish what waits, and release the checkpoint."""
        try:
            if (every_s := self._spec.files_every_s) is not None:
                while not self._query.awaitTermination(max(0.05, min(every_s, PUBLISH_S))):  # type: ignore[arg-type]
                    self._publish_waiting()
            self._query.awaitTermination()
        except BaseException as error:
            self._record_error(error)
        try:
            if self._is_draining and self._error is None:
                self._coordinator.drain(self._run_without_rows, self._session)
            self._coordinator.publish_waiting(is_end=True)
        except BaseException as error:
            self._is_cancelled = False  # it is no error of Spark's
            self._record_error(error)
        try:
            self._coordinator.close()
        except ScaleinError as error:
            self._error = self._error or error
        finally:
            try:
                for broadcast in (self._broadcast, *self._coded.values()):
                    broadcast.destroy()
            finally:
                self._ended.set()  # whatever happens: `stop` and `wait` wait for it


def _log_settings(spark: SparkSession, location: Location) -> dict[str, str]:
    """Settings with which a query starts, unless the user has chosen: how Spark writes the log of its offsets.

    Its default starts processes of the system (readlink, chmod) for each local file, some 40 ms; the other way renames
    files in the JVM, which is as atomic on a local disk.
    """
    from py4j.protocol import Py4JError

    if not location.is_local or spark.conf.get(_FILE_MANAGER, None) is not None:
        return {}
    try:
        assert spark.sparkContext._jvm is not None
        spark.sparkContext._jvm.org.apache.spark.util.Utils.classForName(_RENAMING_MANAGER, False, True)
    except (Py4JError, TypeError):  # Spark before 4.1 has it elsewhere
        return {}
    return {_FILE_MANAGER: _RENAMING_MANAGER}


@contextmanager
def _described(spark: SparkSession, flow: str) -> Iterator[None]:
    """Add the flow to the description of jobs in Spark's UI, which has the query and the batch."""
    context = spark.sparkContext
    own = context.getLocalProperty(_DESCRIPTION)
    context.setLocalProperty(_DESCRIPTION, f"{own}\n{flow}" if own else flow)
    try:
        yield
    finally:
        context.setLocalProperty(_DESCRIPTION, own)  # type: ignore[arg-type]


@contextmanager
def _settings(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Settings of a session for a while: users, and their sink functions, must not see them."""
    before = {name: spark.conf.get(name, None) for name in settings}
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, old in before.items():
            if old is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, old)
