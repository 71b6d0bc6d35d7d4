"""File formats as sinks write them: pyarrow's writers behind one face."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from scalein.connectors.json_lines import JsonWriter
from scalein.errors import WriteFailed


class Writer(Protocol):
    """Writes tables of one schema to a file that somebody else closes."""

    def write(self, table: pa.Table) -> None:
        """Append rows."""

    def close(self) -> None:
        """Complete the file."""


class WriteFormat(Protocol):
    """A kind of file: the end of its names, and how one is begun."""

    @property
    def suffix(self) -> str:
        """With the dot."""

    def begin(self, file: pa.NativeFile, schema: pa.Schema) -> Writer:
        """A writer into an open file."""


@contextmanager
def writing(path: str) -> Iterator[None]:
    """Errors of pyarrow and the system come out as `WriteFailed` that names the file."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise WriteFailed(f"{path} cannot be written", found=str(error).strip() or type(error).__name__) from error


@dataclass(frozen=True, slots=True)
class _Parquet:
    writer: Any  # pyarrow has no types

    def write(self, table: pa.Table) -> None:
        self.writer.write_table(table, row_group_size=max(1, table.num_rows))

    def close(self) -> None:
        try:
            self.writer.close()
        finally:
            self.writer.is_open = False  # one that failed would try again, and print, when it is collected


@dataclass(frozen=True)
class ParquetFiles:
    """Each write is a row group, compressed with zstd."""

    suffix: str = ".parquet"

    def begin(self, file: pa.NativeFile, schema: pa.Schema) -> Writer:
        import pyarrow.parquet as pq

        return _Parquet(pq.ParquetWriter(file, schema, compression="zstd"))


@dataclass(frozen=True)
class IpcFiles:
    """Each write is a record batch."""

    suffix: str = ".arrow"

    def begin(self, file: pa.NativeFile, schema: pa.Schema) -> Writer:
        return pa.ipc.new_file(file, schema)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class CsvFiles:
    """A line of names, then a line a row; null is an empty field, an empty text is `""`."""

    suffix: str = ".csv"

    def begin(self, file: pa.NativeFile, schema: pa.Schema) -> Writer:
        from pyarrow.csv import CSVWriter

        return CSVWriter(file, schema)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class JsonFiles:
    """One JSON object a line."""

    suffix: str = ".json"

    def begin(self, file: pa.NativeFile, schema: pa.Schema) -> Writer:
        return JsonWriter(file, schema)
