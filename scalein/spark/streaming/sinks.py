"""Outputs: where tasks put results, and how the driver makes them visible.

    our file sinks   tasks stage and sync files under names of their own; the driver renames those that arrive
    other sinks      rows come to the driver and go through the sink's own two phases there
    a function       tasks write Parquet files into the checkpoint; the driver calls `function(df, batch_id)` over them

A task's part is a `Taken`, made by a picklable `Output`; what it left behind comes back as JSON and blobs, and `Outlet`
is the driver's part, for results ("out") and for late rows ("late").
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from scalein.connectors.base import Sink
from scalein.connectors.sinks.files import FileSink
from scalein.connectors.sinks.sink_writer import SinkWriter as SinkOutlet
from scalein.errors import ScaleinError, SourceLoc, WriteFailed
from scalein.spark.shuffle import decoded, encoded
from scalein.spark.types import leaving, leaving_schema, spark_schema
from scalein.storage.checked_json import Json, as_list, as_text
from scalein.storage.object_store import OUTPUT, Location

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Function = Callable[[Any, int], object]
TIDY_EVERY = 64  # batches, after which files of attempts that have lost are looked for
GROUP_BYTES = 32 << 20  # of a row group in the files for a function
BLOB_ROWS = 1 << 16  # of results that come to the driver in one piece


class Taken(Protocol):
    """Takes the rows of one task."""

    def write(self, batch: pa.RecordBatch) -> None: ...

    def finish(self) -> tuple[Json, list[pa.Buffer]]:
        """What the driver must know, and rows for it; files are durable then."""

    def abandon(self) -> None:
        """The task has failed."""


class Output(Protocol):
    """What a task needs to know of an output; picklable."""

    def begin(self, prefix: str, task: int) -> Taken: ...


@dataclass(frozen=True)
class Staged:
    """Files of a file sink."""

    sink: FileSink
    schema: pa.Schema
    role: str

    def begin(self, prefix: str, task: int) -> Taken:
        return _Staging(self.sink.for_task(self.schema, _named(prefix, self.role), task))


def _named(prefix: str, role: str) -> str:
    """The prefix of files: late rows may be in a folder below the others', whose sink must not take them for its own.

    >>> _named("0a1b2c3d-0000000007", "late")
    '0a1b2c3dlate-0000000007'
    """
    job, _, number = prefix.partition("-")
    return prefix if role == "out" else f"{job}{role}-{number}"


@dataclass
class _Staging:
    sink: FileSink
    write: Callable[[pa.RecordBatch], None] = field(init=False)

    def __post_init__(self) -> None:
        self.write = self.sink.write

    def finish(self) -> tuple[Json, list[pa.Buffer]]:
        return self.sink.prepare(), []

    def abandon(self) -> None:
        self.sink.close()


@dataclass(frozen=True)
class Sent:
    """Rows for the driver."""

    def begin(self, prefix: str, task: int) -> Taken:
        return _Sending()


@dataclass
class _Sending:
    blobs: list[pa.Buffer] = field(default_factory=list)

    def write(self, batch: pa.RecordBatch) -> None:
        self.blobs += [encoded(batch.slice(start, BLOB_ROWS)) for start in range(0, batch.num_rows, BLOB_ROWS)]

    def finish(self) -> tuple[Json, list[pa.Buffer]]:
        return None, self.blobs

    def abandon(self) -> None:
        pass


@dataclass(frozen=True)
class Stored:
    """Parquet files in the checkpoint, in Spark's types."""

    location: Location
    schema: pa.Schema  # as rows leave for Spark

    def begin(self, prefix: str, task: int) -> Taken:
        return _Storing(self.location, self.schema)


@dataclass
class _Storing:
    """A file that is begun with the first rows; a row group of them waits in memory, and no more."""

    location: Location
    schema: pa.Schema
    waiting: list[pa.RecordBatch] = field(default_factory=list)
    waiting_bytes: int = 0
    name: str = ""
    writer: Any = None
    opened: ExitStack = field(default_factory=ExitStack)

    def write(self, batch: pa.RecordBatch) -> None:
        for rows in leaving(batch, self.schema):
            self.waiting.append(rows)
            self.waiting_bytes += rows.nbytes
            if self.waiting_bytes >= GROUP_BYTES:
                self._flush()

    def _flush(self) -> None:
        import pyarrow.parquet as pq

        if self.writer is None:
            self.name = self.location.new_name(OUTPUT, ".parquet")
            written = self.opened.enter_context(self.location.create(self.name))
            file = self.opened.enter_context(pa.PythonFile(written, "w"))
            self.writer = self.opened.enter_context(pq.ParquetWriter(file, self.schema, compression="lz4"))
        self.writer.write_table(pa.Table.from_batches(self.waiting, self.schema))
        self.waiting, self.waiting_bytes = [], 0

    def finish(self) -> tuple[Json, list[pa.Buffer]]:
        if self.waiting:
            self._flush()
        self.opened.close()
        return [self.name] if self.name else [], []

    def abandon(self) -> None:
        with suppress(WriteFailed), self.opened:
            raise WriteFailed("the task has failed")  # then what is open does not become a file


# --- on the driver


class Outlet(Protocol):
    """The driver's part of an output. What one kind has prepared, another cannot commit."""

    kind: str
    output: Output

    def open(self, committed: Json, next: str) -> None: ...

    def prepared(self, prefix: str, words: list[Json], blobs: list[pa.Buffer]) -> Json:
        """What the manifest says of a batch's output, from what tasks have said."""

    def commit(self, prepared: Json, spark: SparkSession | None, batch: int) -> None:
        """Make it visible; may be called again."""

    def files(self, prepared: Json) -> list[str]:
        """The files of the checkpoint that it needs."""

    def close(self) -> None: ...


class FileOutlet:
    """A file sink that tasks stage files for."""

    def __init__(self, sink: FileSink, schema: pa.Schema, role: str) -> None:
        self.kind = f"files {sink.path}"  # what is staged in one folder, a sink of another would look for in vain
        self._sink, self._schema, self._role, self._job, self._commits = sink, schema, role, "", 0
        self.output: Output = Staged(sink, schema, role)

    def open(self, committed: Json, next: str) -> None:
        prefix = _named(next, self._role)
        self._job = prefix.partition("-")[0]
        self._sink.open(self._schema, committed, prefix)

    def prepared(self, prefix: str, words: list[Json], blobs: list[pa.Buffer]) -> Json:
        self._sink.prepare()  # syncs the directories in which files of the batch before were renamed
        return self._sink.epoch_of(_named(prefix, self._role), words)

    def commit(self, prepared: Json, spark: SparkSession | None, batch: int) -> None:
        self._sink.commit(prepared)
        self._commits += 1
        if self._commits % TIDY_EVERY == 0:
            self._sink.remove_staged(f"{self._job}-{batch}")

    def files(self, prepared: Json) -> list[str]:
        return []

    def close(self) -> None:
        self._sink.close()


class DriverOutlet:
    """Any other sink: its rows come to the driver."""

    def __init__(self, sink: Sink, schema: pa.Schema, role: str) -> None:
        self._sink, self._schema = SinkOutlet(sink, role), schema
        self.kind = self._sink.kind
        self.output: Output = Sent()

    def open(self, committed: Json, next: str) -> None:
        self._sink.open(self._schema, committed, next)

    def prepared(self, prefix: str, words: list[Json], blobs: list[pa.Buffer]) -> Json:
        for blob in blobs:
            self._sink.write(decoded(blob, self._schema))
        return self._sink.prepare()

    def commit(self, prepared: Json, spark: SparkSession | None, batch: int) -> None:
        self._sink.commit(prepared)

    def files(self, prepared: Json) -> list[str]:
        return []

    def close(self) -> None:
        self._sink.close()


class FunctionOutlet:
    """A function of a DataFrame and the batch's number, called at commit: after a crash again, with the same ones."""

    kind = "function"

    def __init__(self, function: Function, schema: pa.Schema, location: Location, at: SourceLoc) -> None:
        self._function, self._location = function, location
        self._spark_schema = spark_schema(schema, at)
        self.output: Output = Stored(location, leaving_schema(schema, at))

    def open(self, committed: Json, next: str) -> None:
        pass  # Spark plays a batch again whose function did not come back

    def prepared(self, prefix: str, words: list[Json], blobs: list[pa.Buffer]) -> Json:
        return [name for each in words for name in as_list(each)]

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
            raise WriteFailed(f"the function {name} that gets the rows raised {type(error).__name__}", found=error,
                              batch=batch) from error

    def close(self) -> None:
        pass


def outlet(sink: object, schema: pa.Schema, role: str, location: Location, at: SourceLoc) -> Outlet:
    """The driver's part of whatever the user gave."""
    if isinstance(sink, FileSink):
        return FileOutlet(sink, schema, role)
    if isinstance(sink, Sink):
        return DriverOutlet(sink, schema, role)
    assert callable(sink)
    return FunctionOutlet(sink, schema, location, at)
