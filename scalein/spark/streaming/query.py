"""A stream: a flow inside Spark's Structured Streaming, seen from the driver.

Spark owns the source, its offsets, the numbers of batches and the retries of tasks. A batch is one action inside of
`foreachBatch`, and what becomes of it is told in `commits.py`. Who reads its rows, Spark or the tasks, is decided batch
by batch (`files.py`).

Spark's thread calls `_on_batch`; others ask and set flags. A thread of our own waits for the query's end, to give the
checkpoint free.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from scalein.errors import ScaleinError, here
from scalein.spark.batch.apply import chosen
from scalein.spark.batch.scan import parallelism
from scalein.spark.errors import explained, in_our_words
from scalein.spark.serialize import Carried, pack
from scalein.spark.streaming.commits import Commits, Plan, checked_partitions
from scalein.spark.streaming.inputs import WHOLE_BYTES, Files, scanned
from scalein.spark.streaming.tasks import (
    SPARK_CELLS,
    Batch,
    FromFiles,
    Heard,
    MapTask,
    ReduceTask,
    RowTask,
    WholeTask,
    counted,
    heard,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

STOP_S = 60.0  # that a stop waits for the batch under way
# The plan of a batch is one we know: two stages that Spark need not think over. Larger Arrow batches cost it less, but
# cells are large: a batch of them must stay below what an Arrow column of bytes can hold.
_SETTINGS = {"spark.sql.adaptive.enabled": "false", "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
             "spark.sql.execution.arrow.maxBytesPerBatch": str(64 << 20)}  # fmt: skip


class _Stopped(Exception):
    """A batch is not begun, because the stream is to end."""


class StreamJob:
    """A running stream: `scale` it, `stop` it, `wait` for its end."""

    def __init__(self, plan: Plan, stream: DataFrame) -> None:
        self._plan, self._session = plan, stream.sparkSession
        self._error: BaseException | None = None
        self._wants_stop = False
        self._is_cut = False  # a stop has ended a batch, or kept one from beginning: what Spark says of it is no error
        self._caller = 0  # the thread that a batch is done in
        self._ended, self._idle = threading.Event(), threading.Lock()  # the lock is held during a batch
        self._work = Carried.by(stream.sparkSession.sparkContext, pack(plan.work))
        try:
            self._commits = Commits(plan, self._work)
            try:
                self._query = self._start(stream)
            except BaseException:
                self._commits.close()
                raise
        except BaseException:
            self._work.close()
            raise
        threading.Thread(target=self._watch, name="scalein stream", daemon=True).start()

    def _start(self, stream: DataFrame) -> StreamingQuery:
        writer = stream.writeStream.foreachBatch(self._on_batch)
        writer = writer.option("checkpointLocation", self._plan.location.spark_uri("spark"))
        if self._plan.trigger:
            writer = writer.trigger(**self._plan.trigger)  # type: ignore[call-overload]
        with in_our_words():
            return writer.start()

    def _on_batch(self, df: DataFrame, number: int) -> None:
        try:
            # Only a stop can have it, and it waits for this thread: to wait here would be to wait for ever.
            if not self._idle.acquire(blocking=False):
                raise _Stopped
            try:
                self._caller = threading.get_ident()
                if self._wants_stop:
                    raise _Stopped  # whatever comes back is a batch that is done
                spark = df.sparkSession
                query = spark.sparkContext.getLocalProperty("sql.streaming.queryId")
                self._commits.do(number, str(query), lambda batch: self._act(df, batch, str(query)), spark)
            finally:
                self._caller = 0
                self._idle.release()
        except _Stopped:
            self._is_cut = True
            raise
        except BaseException as error:
            self._note(error)
            raise

    def _note(self, error: BaseException) -> None:
        """Keep the first error, unless it is what a stop makes of a batch."""
        if self._error is None and not self._is_cut:
            self._error = explained(error) or error

    def _act(self, df: DataFrame, batch: Batch, query: str) -> Heard:
        """Run a batch's one action."""
        with in_our_words():
            found = scanned(self._session, df.sparkSession, query, self._plan.entering)
            if found is None:
                return self._by_spark(df, batch)
            said = self._from_files(df.sparkSession, batch, found.files)
            found.count(counted([*said.words.values()], self._plan.work.mode)["rows"])
            return said

    def _by_spark(self, df: DataFrame, batch: Batch) -> Heard:
        """Spark reads."""
        with _settings(df.sparkSession):
            return self._collected(chosen(df, self._plan.entering.names), self._first(batch), batch)

    def _from_files(self, spark: SparkSession, batch: Batch, files: Files) -> Heard:
        """Tasks read files themselves; all of them everything, if that is less than a shuffle costs."""
        cores = parallelism(spark)
        if self._plan.work.mode != "rowwise" and batch.partitions * sum(files.sizes) <= cores * WHOLE_BYTES:
            targets = spark.sparkContext.parallelize(range(batch.partitions), batch.partitions)
            return heard(targets.mapPartitions(WholeTask(batch, files)).collect())
        shares = files.shares(cores)
        with _settings(spark):
            numbers = spark.range(0, len(shares), 1, max(1, len(shares)))
            return self._collected(numbers, FromFiles(self._first(batch), shares), batch)

    def _first(self, batch: Batch) -> MapTask | RowTask:
        """The task that gets the stream's rows."""
        return RowTask(batch) if self._plan.work.mode == "rowwise" else MapTask(batch)

    def _collected(self, rows: DataFrame, first: Callable[..., Any], batch: Batch) -> Heard:
        """What the tasks of a batch say, whose first ones get these rows."""
        cells = rows.mapInArrow(first, SPARK_CELLS)
        if self._plan.work.mode != "rowwise":
            cells = cells.repartition(batch.partitions, "target").mapInArrow(ReduceTask(batch), SPARK_CELLS)
        return heard((row[0], row[1], row[2]) for row in cells.collect())

    # --- what people ask

    def scale(self, partitions: int) -> None:
        """Have the state in so many partitions from the next batch on. No state is moved for that, unless `migration`
        says so.
        """
        self._commits.partitions = checked_partitions(partitions, here())

    def stop(self) -> None:
        """End the stream behind the batch under way, or in the middle of one that takes longer than a minute: it will
        be played again. Started with the same checkpoint, the stream goes on.
        """
        self._wants_stop = True
        if self._caller == threading.get_ident():  # a sink's own function asks, whose batch has to end first
            threading.Thread(target=self.stop, name="scalein stop", daemon=True).start()
            return
        is_idle = self._idle.acquire(timeout=STOP_S)
        try:
            if not self._ended.is_set():
                self._is_cut = self._is_cut or not is_idle
                with in_our_words():
                    self._query.stop()
        finally:
            if is_idle:
                self._idle.release()
        self._ended.wait()

    def wait(self, timeout: float | None = None) -> None:
        """Until the stream has ended, or so many seconds; raises what ended it."""
        self._ended.wait(timeout)
        if self.exception is not None:
            raise self.exception

    def await_termination(self, timeout: float | None = None) -> bool:
        """As in PySpark: wait, and say whether the stream has ended."""
        self.wait(timeout)
        return self._ended.is_set()

    @property
    def last_progress(self) -> dict[str, object] | None:
        """The figures of the last batch that this start has done: rows, late rows, watermark, state, seconds."""
        return self._commits.progress

    @property
    def exception(self) -> BaseException | None:
        """What ended the stream, if it did not end well."""
        return self._error

    @property
    def is_active(self) -> bool:
        return not self._ended.is_set()

    @property
    def status(self) -> str:
        """In a word: running, finished, stopped or failed."""
        if not self._ended.is_set():
            return "running"
        if self.exception is not None:
            return "failed"
        return "stopped" if self._wants_stop else "finished"

    @property
    def query(self) -> StreamingQuery:
        """Spark's own handle."""
        return self._query

    def __repr__(self) -> str:
        done = "no batch yet" if self.last_progress is None else f"batch {self.last_progress['batch_id']}"
        return f"StreamJob({self.status}, {done}, {self._commits.partitions} partitions)"

    # ---

    def _watch(self) -> None:
        """Wait for the query's end, and give everything back."""
        try:
            self._query.awaitTermination()
        except BaseException as error:
            self._note(error)
        try:
            self._commits.close()
        except ScaleinError as error:
            self._error = self._error or error
        finally:
            self._work.close()
            self._ended.set()


@contextmanager
def _settings(spark: SparkSession) -> Iterator[None]:
    """Our settings for the action of a batch; the session is the stream's own, and a function of the user's sees it
    as it was.
    """
    before = {name: spark.conf.get(name, None) for name in _SETTINGS}
    try:
        for name, value in _SETTINGS.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, old in before.items():
            if old is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, old)
