"""CSV and JSON lines, as pyarrow reads them block by block; names ending in .gz, .bz2, .zst and so on are unpacked.

Types come from the first block of the first file and hold for all files; `schema=` says otherwise.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from scalein.connectors.formats import Part, check_names, reading
from scalein.errors import BadData

_BLOCK_BYTES = 4 << 20
_HINT = "types come from the first rows of the first file: give schema= if they are others"


@dataclass(frozen=True, slots=True)
class Csv:
    """Rows under a line of names. An empty field without quotes is null, nothing else is."""

    delimiter: str
    name: str = "csv"

    def schema(self, path: str) -> pa.Schema | None:
        if not self._header(path):
            return None
        with reading(path), self._open(path) as reader:
            return _known(path, reader.schema)

    def parts(self, path: str, schema: pa.Schema, columns: list[str] | None, row: int) -> Iterator[Part]:
        names = self._header(path)
        if not names:
            return
        check_names(path, names, schema.names)

        def open() -> Iterator[pa.RecordBatch]:
            with reading(path, _HINT), self._open(path, schema, columns or schema.names) as reader:
                yield from reader

        yield Part(0, open)

    def _header(self, path: str) -> list[str]:
        """The names in the first line; none if the file is empty."""
        try:
            with reading(path), pa.input_stream(path) as file:
                text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
                names = next(csv.reader(text, delimiter=self.delimiter), [])
        except (UnicodeDecodeError, csv.Error) as error:
            raise BadData(f"{path} does not begin with a line of names", found=error) from error
        return names

    def _open(self, path: str, schema: pa.Schema | None = None, columns: list[str] | None = None) -> Any:
        from pyarrow.csv import ConvertOptions, ParseOptions, ReadOptions, open_csv

        convert = ConvertOptions(column_types=schema, include_columns=columns, null_values=[""],
                                 strings_can_be_null=True, quoted_strings_can_be_null=False)
        return open_csv(path, ReadOptions(block_size=_BLOCK_BYTES),
                        ParseOptions(delimiter=self.delimiter, newlines_in_values=True), convert)


@dataclass(frozen=True, slots=True)
class JsonLines:
    """One JSON object a line. A field that is missing is null; one that the schema does not name is left out."""

    name: str = "json"

    def schema(self, path: str) -> pa.Schema | None:
        if self._is_empty(path):
            return None
        with reading(path), closing(self._open(path)) as reader:
            return _known(path, reader.schema)

    def parts(self, path: str, schema: pa.Schema, columns: list[str] | None, row: int) -> Iterator[Part]:
        names = columns or schema.names
        wanted = pa.schema([schema.field(name) for name in names])
        stored = pa.schema([pa.field(field.name, _stored(field.type)) for field in wanted])

        def open() -> Iterator[pa.RecordBatch]:
            with reading(path, _HINT), closing(self._open(path, stored)) as reader:
                for batch in reader:
                    yield batch.select(names) if stored == wanted else batch.select(names).cast(wanted)

        if not self._is_empty(path):
            yield Part(0, open)

    def _is_empty(self, path: str) -> bool:
        with reading(path), pa.input_stream(path) as file:
            return not file.read(1)

    def _open(self, path: str, schema: pa.Schema | None = None) -> Any:
        from pyarrow.json import ParseOptions, ReadOptions, open_json

        parse = ParseOptions(explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "ignore")
        return open_json(pa.input_stream(path), ReadOptions(block_size=_BLOCK_BYTES), parse)


def _stored(arrow: pa.DataType) -> pa.DataType:
    """How values of a type stand in JSON where pyarrow expects something else: a day is text, a duration a count."""
    if pa.types.is_duration(arrow):
        return pa.int64()
    return pa.string() if pa.types.is_date(arrow) else arrow


def _known(path: str, schema: pa.Schema) -> pa.Schema | None:
    """The schema, if it has types: rows were there to infer them from."""
    unknown = [field.name for field in schema if pa.types.is_null(field.type)]
    if len(unknown) == len(schema.names):
        return None
    if unknown:
        raise BadData(f"column {unknown[0]!r} of {path} has no value in its first rows, so its type is unknown",
                      hint="give schema=")
    return schema
