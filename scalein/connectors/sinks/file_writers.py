"""File formats as sinks write them: pyarrow's writers behind one interface.

The size of row groups and of files is decided in `files.py` (`FileSink.write`). Files can be joined into one: Parquet
and Arrow row by row, so that small row groups become good ones, text byte by byte.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from scalein.connectors.formats.json_writer import JsonWriter
from scalein.errors import NO_PERMISSION, WriteFailed

GROUP_BYTES = 32 << 20  # size of a row group or block of a file
GROUP_ROWS = 1 << 20
SAMPLE_ROWS = 4096  # first rows of a Parquet file, which decide what columns get a dictionary


class Writer(Protocol):
    """Writes tables of one schema to a file that the caller closes."""

    def write(self, table: pa.Table) -> None:
        """Append rows."""

    def close(self) -> None:
        """Complete the file."""


class WriteFormat(Protocol):
    """A file format: the suffix of its names, and its writer."""

    @property
    def suffix(self) -> str:
        """With the dot."""

    def begin(self, file: pa.NativeFile, schema: pa.Schema) -> Writer:
        """A writer into an open file."""

    def join(self, paths: Sequence[str], file: pa.NativeFile, schema: pa.Schema) -> None:
        """Write the rows of files of this format to an open file, in their order."""


@contextmanager
def writing(path: str) -> Iterator[None]:
    """Errors of pyarrow and the system are raised as `WriteFailed`, which names the file."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeEncodeError) as error:
        raise WriteFailed(f"{path} cannot be written", found=str(error).strip() or type(error).__name__,
                          hint=NO_PERMISSION if isinstance(error, PermissionError) else None) from error


class _Parquet:
    """The writer is opened with the first rows, which decide what columns get a dictionary."""

    def __init__(self, file: pa.NativeFile, schema: pa.Schema) -> None:
        self._file, self._schema = file, schema
        self._writer: Any = None  # pyarrow has no types

    def write(self, table: pa.Table) -> None:
        self._begun(table).write_table(table, row_group_size=max(1, table.num_rows))

    def _begun(self, first: pa.Table) -> Any:
        import pyarrow.parquet as pq

        if self._writer is None:
            self._writer = pq.ParquetWriter(self._file, self._schema, compression="zstd",
                                            use_dictionary=_repeating(first))
        return self._writer

    def close(self) -> None:
        writer = self._begun(pa.Table.from_batches([], self._schema))
        try:
            writer.close()
        finally:
            writer.is_open = False  # one that failed would try again, and print, when it is collected


def _repeating(table: pa.Table) -> bool | list[str]:
    """The columns that get a dictionary, or True for all. For numbers that hardly repeat, building a dictionary takes a
    third of the time of writing, and the writer drops it after a megabyte.
    """
    sample = table.slice(0, SAMPLE_ROWS)
    if any(pa.types.is_nested(field.type) for field in table.schema):
        return True  # their columns have other names in the file
    names = [field.name for field, column in zip(table.schema, sample.columns, strict=True)
             if not _is_number(field.type) or 2 * pc.count_distinct(column).as_py() <= sample.num_rows]
    return True if len(names) == table.num_columns else names


def _is_number(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_primitive(dtype) and not pa.types.is_boolean(dtype))


@dataclass(frozen=True)
class ParquetFiles:
    """Each write is a row group, compressed with zstd."""

    suffix: str = ".parquet"

    def begin(self, file: pa.NativeFile, schema: pa.Schema) -> Writer:
        return _Parquet(file, schema)

    def join(self, paths: Sequence[str], file: pa.NativeFile, schema: pa.Schema) -> None:
        _join_rows(_parquet_batches, paths, self.begin(file, schema), schema)


@dataclass(frozen=True)
class IpcFiles:
    """Each write is a record batch."""

    suffix: str = ".arrow"

    def begin(self, file: pa.NativeFile, schema: pa.Schema) -> Writer:
        return pa.ipc.new_file(file, schema)  # type: ignore[no-any-return]

    def join(self, paths: Sequence[str], file: pa.NativeFile, schema: pa.Schema) -> None:
        _join_rows(_ipc_batches, paths, self.begin(file, schema), schema)


@dataclass(frozen=True)
class CsvFiles:
    """A line of names, then a line a row; null is an empty field, an empty text is `""`."""

    suffix: str = ".csv"

    def begin(self, file: pa.NativeFile, schema: pa.Schema) -> Writer:
        from pyarrow.csv import CSVWriter

        for field in schema:
            if pa.types.is_nested(field.type):
                raise pa.ArrowNotImplementedError(f"column {field.name!r} is {field.type}, for which there is no CSV")
        return CSVWriter(file, schema)  # type: ignore[no-any-return]

    def join(self, paths: Sequence[str], file: pa.NativeFile, schema: pa.Schema) -> None:
        self.begin(empty := pa.BufferOutputStream(), schema).close()
        names = empty.getvalue()
        file.write(names)
        _join_bytes(paths, file, skipped=names.size)


@dataclass(frozen=True)
class JsonFiles:
    """One JSON object a line."""

    suffix: str = ".json"

    def begin(self, file: pa.NativeFile, schema: pa.Schema) -> Writer:
        return JsonWriter(file, schema)

    def join(self, paths: Sequence[str], file: pa.NativeFile, schema: pa.Schema) -> None:
        _join_bytes(paths, file, skipped=0)


def _join_rows(read: Callable[[str], Iterator[pa.RecordBatch]], paths: Sequence[str], writer: Writer,
               schema: pa.Schema) -> None:
    """Write the rows of files in groups of good size."""
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in (each for path in paths for each in read(path)):
        held.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if size >= GROUP_BYTES or rows >= GROUP_ROWS:
            writer.write(pa.Table.from_batches(held, schema).combine_chunks())
            held, rows, size = [], 0, 0
    if held:
        writer.write(pa.Table.from_batches(held, schema).combine_chunks())
    writer.close()


def _parquet_batches(path: str) -> Iterator[pa.RecordBatch]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        yield from file.iter_batches()


def _ipc_batches(path: str) -> Iterator[pa.RecordBatch]:
    with pa.OSFile(path) as file, pa.ipc.open_file(file) as reader:
        yield from map(reader.get_batch, range(reader.num_record_batches))


def _join_bytes(paths: Sequence[str], into: pa.NativeFile, skipped: int) -> None:
    """Append files without their first `skipped` bytes."""
    for path in paths:
        with open(path, "rb") as file:
            file.seek(skipped)
            shutil.copyfileobj(file, into, 1 << 20)
