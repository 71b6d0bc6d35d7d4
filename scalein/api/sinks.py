"""Where a job's rows go: `flow.start(sink=...)`. Sinks are imported when one is made: most flows have none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from scalein.api.hints import with_argument_hints
from scalein.errors import BadArgument, here
from scalein.options import parse_size

if TYPE_CHECKING:
    from scalein.connectors.sinks.file_writers import WriteFormat
    from scalein.connectors.sinks.files import FileSink
    from scalein.connectors.sinks.simple import CallbackSink, ConsoleSink, MemorySink


@with_argument_hints
def to_parquet(path: object, *, partition_by: str | Sequence[str] | None = None, roll: str | int = "256MB") -> FileSink:
    """Parquet files in a directory, which is made if it is not there; files in it stay.

    Each checkpoint makes new files, and they appear with it: whoever reads the directory sees every row once, also
    after a crash. Sorted by name, files are in the order in which a job wrote them. The directory belongs to that job,
    whose checkpoint is noted in a file `_owner`: another job is refused. Jobs without a checkpoint may write to a
    directory one after another. A file of more than `roll` bytes is followed by another. `partition_by` names columns
    that become directories (`country=fr/`), as in Hive and Spark.

    >>> import scalein as si, tempfile
    >>> si.to_parquet(tempfile.gettempdir(), partition_by="country", roll="64MB")
    to_parquet(...)
    """
    from scalein.connectors.sinks.file_writers import ParquetFiles

    return _files(path, ParquetFiles(), partition_by, roll, "to_parquet")


@with_argument_hints
def to_ipc(path: object, *, partition_by: str | Sequence[str] | None = None, roll: str | int = "256MB") -> FileSink:
    """Arrow IPC files in a directory; otherwise like `to_parquet`. They are larger, but can be mapped and read at once.

    >>> import scalein as si, tempfile
    >>> si.to_ipc(tempfile.gettempdir())
    to_ipc(...)
    """
    from scalein.connectors.sinks.file_writers import IpcFiles

    return _files(path, IpcFiles(), partition_by, roll, "to_ipc")


@with_argument_hints
def to_csv(path: object, *, partition_by: str | Sequence[str] | None = None, roll: str | int = "256MB") -> FileSink:
    """CSV files in a directory, each with a line of names; otherwise like `to_parquet`. `read_csv` reads them back.

    >>> import scalein as si, tempfile
    >>> si.to_csv(tempfile.gettempdir())
    to_csv(...)
    """
    from scalein.connectors.sinks.file_writers import CsvFiles

    return _files(path, CsvFiles(), partition_by, roll, "to_csv")


@with_argument_hints
def to_json(path: object, *, partition_by: str | Sequence[str] | None = None, roll: str | int = "256MB") -> FileSink:
    """Files with one JSON object a line in a directory; otherwise like `to_parquet`.

    Times and decimals are text; a number that is not finite is null.

    >>> import scalein as si, tempfile
    >>> si.to_json(tempfile.gettempdir())
    to_json(...)
    """
    from scalein.connectors.sinks.file_writers import JsonFiles

    return _files(path, JsonFiles(), partition_by, roll, "to_json")


def to_callback(fn: Callable[[pa.RecordBatch], object]) -> CallbackSink:
    """A function that gets each record batch as it is made.

    If the job crashes, rows since its last checkpoint come again: the function should not mind.

    >>> import pyarrow as pa, scalein as si
    >>> si.to_callback(lambda batch: print(batch.num_rows)).write(pa.record_batch({"x": [1, 2]}))
    2
    """
    if not callable(fn):
        raise BadArgument("to_callback takes a function of a record batch", at=here(), found=repr(fn))
    from scalein.connectors.sinks.simple import CallbackSink

    return CallbackSink(fn)


def to_memory() -> MemorySink:
    """Rows kept in memory: `.table()` of the sink gives them, also while the job runs.

    >>> import pyarrow as pa, scalein as si
    >>> sink, batch = si.to_memory(), pa.record_batch({"x": [1, 2]})
    >>> sink.open(batch.schema, None, "job-1"); sink.write(batch)
    >>> sink.table().to_pydict()
    {'x': [1, 2]}
    """
    from scalein.connectors.sinks.simple import MemorySink

    return MemorySink()


def to_console(rows: int = 20) -> ConsoleSink:
    """A table in the terminal for each batch of results, of at most `rows` rows.

    >>> import pyarrow as pa, scalein as si
    >>> si.to_console(rows=1).write(pa.record_batch({"page": ["home", "help"], "views": [12, 7]}))
    page  views
    ────  ─────
    home     12
    ... 1 more row
    <BLANKLINE>
    """
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise BadArgument("to_console takes a number of rows, 1 or more", at=here(), found=repr(rows))
    from scalein.connectors.sinks.simple import ConsoleSink, format_table

    return ConsoleSink(rows, format_table)


def _files(path: object, format: WriteFormat, partition_by: str | Sequence[str] | None, roll: str | int,
           step: str) -> FileSink:
    from scalein.connectors.sinks.files import FileSink

    at = here()
    by = [partition_by] if isinstance(partition_by, str) else list(partition_by or ())
    if not all(isinstance(name, str) for name in by) or len(set(by)) < len(by):
        raise BadArgument("partition_by takes different names of columns", at=at, found=repr(partition_by))
    return FileSink(path, format, by, parse_size(roll, "roll", at), step, at)
