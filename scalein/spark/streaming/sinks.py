"""Sinks of a stream: how tasks write rows, and how the driver makes them visible.

    our file sinks   tasks stage and sync files under unique names; the driver renames those of successful tasks, or
                     with `files_every=` joins those of several batches, and renames what it has written
    other sinks      rows are sent to the driver, which writes them through the sink's two phases
    a function       tasks write Parquet files into the checkpoint; the driver calls `function(df, batch_id)` over them

A picklable `TaskSink` opens a `TaskWriter` in each task; what this returns at its end is JSON, and blocks of rows. A
`Committer` is the driver's part, for results ("out"), late rows ("late") and failed rows ("failed"). One thread at a
time uses a writer or a committer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from scalein.connectors.base import Sink
from scalein.connectors.sinks.files import FileSink, staged_files, waiting_files
from scalein.connectors.sinks.sink_writer import SinkWriter
from scalein.errors import ScaleinError, SourceLoc, WriteFailed
from scalein.spark.shuffle import decode_block, encode_block
from scalein.spark.types import spark_arrow_schema, spark_schema, to_spark
from scalein.storage.checked_json import Json, as_list, as_text
from scalein.storage.object_store import OUTPUT, Location

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Function = Callable[[Any, int], object]
CLEANUP_EVERY = 64  # batches between two searches for files of failed attempts
ROW_GROUP_BYTES = 32 << 20  # of a row group in the files for a function
BLOCK_ROWS = 1 << 16  # of results that are sent to the driver in one block


class TaskWriter(Protocol):
    """Writes the rows of one task."""

    def write(self, batch: pa.RecordBatch) -> None: ...

    def finish(self) -> tuple[Json, list[pa.Buffer]]:
        """JSON and rows for the driver; files are durable afterwards."""

    def abort(self) -> None:
        """Discard the rows: the task has failed."""


class TaskSink(Protocol):
    """A sink as tasks use it; picklable."""

    def open(self, prefix: str, task: int) -> TaskWriter: ...


@dataclass(frozen=True)
class StagedFiles:
    """Stages files of a file sink."""

    sink: FileSink
    schema: pa.Schema
    role: str

    def open(self, prefix: str, task: int) -> TaskWriter:
        return _StagedFileWriter(self.sink.for_task(self.schema, _role_prefix(prefix, self.role), task))


def _role_prefix(prefix: str, role: str) -> str:
    """The prefix of files, by role: a sink must not take the late rows in a folder below its own for its files.

    >>> _role_prefix("0a1b2c3d-0000000007", "late")
    '0a1b2c3dlate-0000000007'
    """
    job, _, number = prefix.partition("-")
    return prefix if role == "out" else f"{job}{role}-{number}"


@dataclass
class _StagedFileWriter:
    sink: FileSink
    write: Callable[[pa.RecordBatch], None] = field(init=False)

    def __post_init__(self) -> None:
        self.write = self.sink.write

    def finish(self) -> tuple[Json, list[pa.Buffer]]:
        return self.sink.prepare(), []

    def abort(self) -> None:
        self.sink.close()


@dataclass(frozen=True)
class RowsToDriver:
    """Sends rows to the driver."""

    def open(self, prefix: str, task: int) -> TaskWriter:
        return _RowCollector()


@dataclass
class _RowCollector:
    blocks: list[pa.Buffer] = field(default_factory=list)

    def write(self, batch: pa.RecordBatch) -> None:
        self.blocks += [encode_block(batch.slice(start, BLOCK_ROWS)) for start in range(0, batch.num_rows, BLOCK_ROWS)]

    def finish(self) -> tuple[Json, list[pa.Buffer]]:
        return None, self.blocks

    def abort(self) -> None:
        pass


@dataclass(frozen=True)
class CheckpointFiles:
    """Writes Parquet files into the checkpoint, in Spark's types."""

    location: Location
    schema: pa.Schema  # in Spark's types

    def open(self, prefix: str, task: int) -> TaskWriter:
        return _CheckpointFileWriter(self.location, self.schema)


@dataclass
class _CheckpointFileWriter:
    """Creates a file with the first rows; buffers at most one row group in memory."""

    location: Location
    schema: pa.Schema
    buffered: list[pa.RecordBatch] = field(default_factory=list)
    buffered_bytes: int = 0
    name: str = ""
    writer: Any = None
    open_files: ExitStack = field(default_factory=ExitStack)

    def write(self, batch: pa.RecordBatch) -> None:
        for rows in to_spark(batch, self.schema):
            self.buffered.append(rows)
            self.buffered_bytes += rows.nbytes
            if self.buffered_bytes >= ROW_GROUP_BYTES:
                self._flush()

    def _flush(self) -> None:
        import pyarrow.parquet as pq

        if self.writer is None:
            self.name = self.location.new_name(OUTPUT, ".parquet")
            written = self.open_files.enter_context(self.location.create(self.name))
            file = self.open_files.enter_context(pa.PythonFile(written, "w"))
            self.writer = self.open_files.enter_context(pq.ParquetWriter(file, self.schema, compression="lz4"))
        self.writer.write_table(pa.Table.from_batches(self.buffered, self.schema))
        self.buffered, self.buffered_bytes = [], 0

    def finish(self) -> tuple[Json, list[pa.Buffer]]:
        if self.buffered:
            self._flush()
        self.open_files.close()
        return [self.name] if self.name else [], []

    def abort(self) -> None:
        with suppress(WriteFailed), self.open_files:
            raise WriteFailed("the task has failed")  # so that the open file is not published


# --- on the driver


class Committer(Protocol):
    """The driver's part of a sink. What one kind has prepared, another cannot commit."""

    kind: str
    task_sink: TaskSink

    def claim(self, run: str, checkpoint: str) -> None:
        """Take what the sink writes to for a start of the stream."""

    def open(self, committed: Json, next_prefix: str) -> None: ...

    def prepare(self, prefix: str, results: list[Json], blocks: list[pa.Buffer]) -> Json:
        """The entry of a batch's output in the manifest, from the results of tasks."""

    def commit(self, prepared: Json, spark: SparkSession | None, batch: int) -> None:
        """Make the output visible; idempotent."""

    def files(self, prepared: Json) -> list[str]:
        """The files of the checkpoint that the output needs."""

    def publish_waiting(self, is_end: bool) -> Json:
        """The entry with which rows of committed batches become visible that wait for it; None if it is not time."""

    def close(self) -> None: ...


_FILES = "files "


class FileCommitter:
    """A file sink for which tasks stage files.

    With `files_every_s`, the staged files of batches wait: the manifest names them, and no reader sees them. When they
    have waited for so long, or are as large as a file should be, they are joined, and what is joined becomes visible.
    What was joined is removed after the manifest that names the result is published. Files that an earlier start has
    left become visible as they are, since this one may write other columns or another format.
    """

    def __init__(self, sink: FileSink, schema: pa.Schema, role: str, files_every_s: float | None) -> None:
        self.kind = f"{_FILES}{sink.path}"  # a sink of another folder cannot commit what is staged in this one
        self._sink, self._schema, self._role, self._job, self._commits = sink, schema, role, "", 0
        self._every_s, self._since = files_every_s, 0.0  # of the first file that waits, by the monotonic clock
        self._last: Json = None  # the last entry that was committed
        self._is_earlier = False  # that is one of an earlier start
        self.task_sink: TaskSink = StagedFiles(sink, schema, role)

    def claim(self, run: str, checkpoint: str) -> None:
        self._sink.acquire(run, checkpoint)

    def open(self, committed: Json, next_prefix: str) -> None:
        prefix = _role_prefix(next_prefix, self._role)
        self._job = prefix.partition("-")[0]
        self._sink.open(self._schema, committed, prefix)
        self._last, self._is_earlier = committed, True

    def prepare(self, prefix: str, results: list[Json], blocks: list[pa.Buffer]) -> Json:
        self._sink.prepare()  # syncs the directories in which files of the previous batch were renamed
        epoch, waiting = self._sink.epoch_of(_role_prefix(prefix, self._role), results), waiting_files(self._last)
        if self._every_s is None:
            return epoch
        is_due = self._is_due(waiting) or self._sink.is_full([*waiting, *staged_files(epoch)])
        waiting += staged_files(epoch)
        return (self._sink.epoch_of_waiting(epoch, waiting, joins=True) if is_due
                else self._sink.epoch_with_waiting(epoch, waiting))

    def _is_due(self, waiting: list[str]) -> bool:
        """Whether files have waited long enough."""
        return bool(waiting) and self._every_s is not None and time.monotonic() - self._since >= self._every_s

    def publish_waiting(self, is_end: bool) -> Json:
        waiting = waiting_files(self._last)
        if not waiting or not (is_end or self._is_due(waiting)):
            return None
        self._sink.prepare()
        return self._sink.epoch_of_waiting(self._last, waiting, joins=not self._is_earlier)

    def commit(self, prepared: Json, spark: SparkSession | None, batch: int) -> None:
        self._sink.commit(prepared)
        if not waiting_files(self._last):
            self._since = time.monotonic()
        self._last, self._is_earlier = prepared, False
        self._commits += 1
        if self._commits % CLEANUP_EVERY == 0:
            self._sink.remove_staged(f"{self._job}-{batch}", waiting_files(prepared))

    def files(self, prepared: Json) -> list[str]:
        return []

    def close(self) -> None:
        self._sink.close()


def has_waiting(kind: str, prepared: Json) -> bool:
    """Whether an entry of a manifest has output that is not visible yet, and waits for a later batch."""
    return kind.startswith(_FILES) and bool(waiting_files(prepared))


class DriverCommitter:
    """Any other sink: its rows are sent to the driver."""

    def __init__(self, sink: Sink, schema: pa.Schema, role: str) -> None:
        self._sink, self._schema = SinkWriter(sink, role), schema
        self.kind = self._sink.kind
        self.task_sink: TaskSink = RowsToDriver()

    def claim(self, run: str, checkpoint: str) -> None:
        self._sink.claim(run, checkpoint)

    def open(self, committed: Json, next_prefix: str) -> None:
        self._sink.open(self._schema, committed, next_prefix)

    def prepare(self, prefix: str, results: list[Json], blocks: list[pa.Buffer]) -> Json:
        for block in blocks:
            self._sink.write(decode_block(block, self._schema))
        return self._sink.prepare()

    def commit(self, prepared: Json, spark: SparkSession | None, batch: int) -> None:
        self._sink.commit(prepared)

    def files(self, prepared: Json) -> list[str]:
        return []

    def publish_waiting(self, is_end: bool) -> Json:
        return None

    def close(self) -> None:
        self._sink.close()


class FunctionCommitter:
    """A function of a DataFrame and the batch's number, called at commit; after a crash again, with both."""

    kind = "function"

    def __init__(self, function: Function, schema: pa.Schema, location: Location, at: SourceLoc) -> None:
        self._function, self._location = function, location
        self._spark_schema = spark_schema(schema, at)
        self.task_sink: TaskSink = CheckpointFiles(location, spark_arrow_schema(schema, at))

    def claim(self, run: str, checkpoint: str) -> None:
        pass  # the function's own matter

    def open(self, committed: Json, next_prefix: str) -> None:
        pass  # Spark repeats a batch whose function did not return

    def prepare(self, prefix: str, results: list[Json], blocks: list[pa.Buffer]) -> Json:
        return [name for result in results for name in as_list(result)]

    def files(self, prepared: Json) -> list[str]:
        return [as_text(name) for name in as_list(prepared)]

    def commit(self, prepared: Json, spark: SparkSession | None, batch: int) -> None:
        assert spark is not None
        paths = [self._location.spark_uri(name) for name in self.files(prepared)]
        df: DataFrame = (spark.read.schema(self._spark_schema).parquet(*paths) if paths
                         else spark.createDataFrame([], self._spark_schema))
        try:
            self._function(df, batch)
        except ScaleinError:
            raise
        except Exception as error:
            name = getattr(self._function, "__name__", type(self._function).__name__)
            raise WriteFailed(f"the sink function {name} raised {type(error).__name__}", found=error,
                              batch=batch) from error

    def publish_waiting(self, is_end: bool) -> Json:
        return None

    def close(self) -> None:
        pass


def make_committer(sink: object, schema: pa.Schema, role: str, location: Location, at: SourceLoc,
                   files_every_s: float | None = None) -> Committer:
    """The committer of the user's sink."""
    if isinstance(sink, FileSink):
        return FileCommitter(sink, schema, role, files_every_s)
    if isinstance(sink, Sink):
        return DriverCommitter(sink, schema, role)
    assert callable(sink)
    return FunctionCommitter(sink, schema, location, at)
