"""CSV and JSON lines, decoded by pyarrow block by block; files whose names end in .gz, .bz2, .zst and so on are
decompressed.

Types are inferred from the first block of the first file and hold for all files, unless `schema=` is given.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import pyarrow as pa

from scalein.connectors.formats.base import FileSplit, check_names, reading
from scalein.connectors.formats.lenient import BLOCK_BYTES, LenientReader, newlines, with_malformed
from scalein.errors import BadData

_HINT = "all files have the types of schema=, or else those of the first rows of the first file"
_END = "\x1c\x1d\x1e\x1f"  # characters that separate texts; no line of a file has just these
_NULL = re.compile(rb"\s*null")


@dataclass(frozen=True, slots=True)
class Csv:
    """Rows under a line of names. An empty field without quotes is null, nothing else is."""

    delimiter: str
    name: str = "csv"
    malformed: str = "raise"  # what becomes of malformed records: see `lenient.py`
    needed: tuple[str, ...] = ()

    def schema(self, path: str) -> pa.Schema | None:
        if not self._header(path):
            return None
        with reading(path, self.name), self._open(path) as reader:
            return _known(path, reader.schema)

    def splits(self, path: str, schema: pa.Schema, columns: list[str] | None, row: int) -> Iterator[FileSplit]:
        names = self._header(path)
        if not names:
            return
        check_names(path, names, schema.names)

        wanted = pa.schema([schema.field(name) for name in columns or schema.names])

        def open() -> Iterator[pa.RecordBatch]:
            end = _EndMark(self.delimiter, len(names))
            with (reading(path, self.name, _HINT), pa.input_stream(path) as file,
                  self._open(_Marked(file, end.text), schema, wanted.names, end) as reader):
                last: pa.RecordBatch | None = None
                for batch in reader:
                    if last is not None:
                        yield last
                    last = batch
                end.check()  # before the last rows: an unclosed quote swallows all lines that follow it
                if last is not None:
                    yield last

        lenient = LenientReader(path, self.name, _CsvRecords(self, names, wanted), wanted, self.malformed, _HINT,
                                self.needed)
        yield FileSplit(0, partial(_fast_then_lenient, open, lenient, has_header=True))

    def _header(self, path: str) -> list[str]:
        """The names in the first line; none if the file is empty."""
        try:
            with reading(path, self.name), pa.input_stream(path) as file:
                # Malformed bytes after the header are reported when they are read.
                text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="", errors="surrogateescape")
                names = next(csv.reader(text, delimiter=self.delimiter), [])
                "".join(names).encode()
        except (UnicodeEncodeError, csv.Error) as error:
            raise BadData(f"{path} does not begin with a line of names", found=error) from error
        return names

    def _open(self, file: Any, schema: pa.Schema | None = None, columns: list[str] | None = None,
              end: _EndMark | None = None) -> Any:
        from pyarrow.csv import ReadOptions, open_csv

        return open_csv(file, ReadOptions(block_size=BLOCK_BYTES), *self.options(schema, columns, end))

    def options(self, schema: pa.Schema | None, columns: list[str] | None, end: _EndMark | None) -> tuple[Any, Any]:
        """How text is parsed, and its fields are converted; `end` is the mark at the end of the text, if there is one.
        """
        from pyarrow.csv import ConvertOptions, ParseOptions

        convert = ConvertOptions(column_types=schema, include_columns=columns, null_values=[""],
                                 strings_can_be_null=True, quoted_strings_can_be_null=False)
        parse = ParseOptions(delimiter=self.delimiter, newlines_in_values=True, invalid_row_handler=end)
        return parse, convert


class _EndMark:
    """A line with one field too many, at the end of a text. pyarrow closes a quote that is open there without a word:
    then it does not meet this line.
    """

    def __init__(self, delimiter: str, names: int) -> None:
        self._row = _END + delimiter * names
        self._is_met = False

    @property
    def text(self) -> bytes:
        return f"\n{self._row}\n".encode()

    def __call__(self, row: Any) -> str:
        """What pyarrow does with a line that has not as many fields as there are names."""
        self._is_met = row.text == self._row
        return "skip" if self._is_met or row.text.endswith(f"\n{self._row}") else "error"

    def check(self) -> None:
        if not self._is_met:
            raise pa.ArrowInvalid("CSV parse error: a quote is not closed")


class _Marked:
    """A file as pyarrow reads it, with a mark at its end."""

    def __init__(self, file: pa.NativeFile, mark: bytes) -> None:
        self._file, self._mark = file, mark

    @property
    def closed(self) -> bool:
        return bool(self._file.closed)

    def close(self) -> None:
        self._file.close()

    def read(self, size: int) -> pa.Buffer:
        found = self._file.read_buffer(size)
        if not found.size:
            found, self._mark = pa.py_buffer(self._mark), b""
        return found


@dataclass(frozen=True)
class _CsvRecords:
    """Lines with fields, of which quoted ones may have newlines."""

    format: Csv
    names: list[str]  # in the file
    wanted: pa.Schema

    def ends(self, data: bytes) -> list[int]:
        if b'"' not in data:
            return newlines(data)
        found, match = [], self._record.match(data)
        while match is not None:
            found.append(match.end())
            match = self._record.match(data, match.end())
        return found

    @cached_property
    def _record(self) -> re.Pattern[bytes]:
        rest = f"[^{re.escape(self.format.delimiter)}\r\n]*"
        field = f'(?:"[^"]*(?:""[^"]*)*"{rest}|(?!"){rest})'
        more = f"(?:{re.escape(self.format.delimiter)}{field})*"
        return re.compile(f"{field}{more}(?:\r\n|\n|\r(?=[^\n]))".encode())

    def decode(self, data: bytes, names: list[str]) -> pa.RecordBatch:
        from pyarrow.csv import ReadOptions, read_csv

        if not data.strip(b"\r\n"):
            return _none_of(self.wanted, names)
        end = _EndMark(self.format.delimiter, len(self.names)) if _is_text(data) else None
        data += end.text if end is not None else b""
        read = ReadOptions(column_names=self.names, use_threads=False, block_size=len(data) + 1)
        found = read_csv(pa.BufferReader(data), read, *self.format.options(self.wanted, names, end))
        if end is not None:
            end.check()
        return _one(found, names)

    def is_one(self, data: bytes) -> bool:
        fields = pa.schema([(name, pa.binary()) for name in self.wanted.names])
        try:
            return bool(replace(self, wanted=fields).decode(data, fields.names).num_rows == 1)
        except pa.ArrowException:
            return False


@dataclass(frozen=True, slots=True)
class JsonLines:
    """One JSON object a line. A field that is missing is null; one that the schema does not name is left out."""

    name: str = "json"
    malformed: str = "raise"  # as in `Csv`
    needed: tuple[str, ...] = ()

    def schema(self, path: str) -> pa.Schema | None:
        if self._is_empty(path):
            return None
        with reading(path, self.name), closing(self._open(path)) as reader:
            return _known(path, reader.schema)

    def splits(self, path: str, schema: pa.Schema, columns: list[str] | None, row: int) -> Iterator[FileSplit]:
        names = columns or schema.names
        wanted = pa.schema([schema.field(name) for name in names])
        stored = pa.schema([pa.field(field.name, _stored(field.type)) for field in wanted])

        def open() -> Iterator[pa.RecordBatch]:
            with reading(path, self.name, _HINT), closing(self._open(path, stored)) as reader:
                for batch in reader:
                    batch.validate(full=True)  # pyarrow takes texts of JSON as they are
                    yield batch.select(names) if stored == wanted else batch.select(names).cast(wanted)

        if not self._is_empty(path):
            lenient = LenientReader(path, self.name, _JsonRecords(wanted, stored), wanted, self.malformed, _HINT,
                                    self.needed)
            yield FileSplit(0, partial(_fast_then_lenient, open, lenient, has_header=False))

    def _is_empty(self, path: str) -> bool:
        with reading(path, self.name), pa.input_stream(path) as file:
            return not file.read(1)

    def _open(self, path: str, schema: pa.Schema | None = None) -> Any:
        from pyarrow.json import ParseOptions, ReadOptions, open_json

        parse = ParseOptions(explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "ignore")
        return open_json(_Lines(pa.input_stream(path)), ReadOptions(block_size=BLOCK_BYTES), parse)


class _Lines:
    """A file of JSON as pyarrow reads it: its blocks end where lines do, and none begins with null."""

    def __init__(self, file: pa.NativeFile) -> None:
        self._file, self._left = file, b""
        self._is_begin = True  # whether what is left begins with a line

    @property
    def closed(self) -> bool:
        return bool(self._file.closed)

    def close(self) -> None:
        self._file.close()

    def read(self, size: int) -> bytes:
        more = self._file.read(max(size - len(self._left), 1))
        data, is_begin = self._left + more, self._is_begin
        cut = data.rfind(b"\n") + 1 if more else 0
        cut = cut or len(data)
        self._left, self._is_begin = data[cut:], data[cut - 1 : cut] == b"\n"
        data = data[:cut]
        return _without_null(data) if is_begin else data


def _without_null(data: bytes) -> bytes:
    """JSON lines, with a leading null, which crashes pyarrow, replaced by an object without fields: the same row."""
    found = _NULL.match(data)
    return data if found is None else b"".join([data[: found.end() - 4], b"{}  ", data[found.end() :]])


@dataclass(frozen=True, slots=True)
class _JsonRecords:
    """A line each."""

    wanted: pa.Schema
    stored: pa.Schema

    def ends(self, data: bytes) -> list[int]:
        return newlines(data)

    def is_one(self, data: bytes) -> bool:
        return False

    def decode(self, data: bytes, names: list[str]) -> pa.RecordBatch:
        from pyarrow.json import ParseOptions, ReadOptions, read_json

        if not data.strip():
            return _none_of(self.wanted, names)
        stored = pa.schema([self.stored.field(name) for name in names])
        wanted = pa.schema([self.wanted.field(name).with_nullable(True) for name in names])
        parse = ParseOptions(explicit_schema=stored, unexpected_field_behavior="ignore")
        data = _without_null(data)
        found = read_json(pa.BufferReader(data), ReadOptions(use_threads=False, block_size=len(data) + 1), parse)
        found.validate(full=True)
        return _one(found.select(names).cast(wanted), names)


def _fast_then_lenient(open: Callable[[], Iterator[pa.RecordBatch]], lenient: LenientReader,
                   has_header: bool) -> Iterator[pa.RecordBatch]:
    """The rows of a file as pyarrow decodes them; from the block at which it fails on, by the lenient reader."""
    done = 0
    try:
        for batch in open():
            if any(not field.nullable and batch.column(field.name).null_count for field in lenient.schema):
                raise BadData(f"{lenient.path} cannot be read", found="an empty field of a column that cannot be null")
            yield with_malformed(batch) if lenient.how == "keep" else batch
            done += batch.num_rows
        return
    except BadData as error:
        if error.__cause__ is not None and not isinstance(error.__cause__, pa.ArrowInvalid):
            raise
        failed = error
    with reading(lenient.path, lenient.format, _HINT):
        for batch in lenient.rows(has_header):
            skipped = min(done, batch.num_rows)
            done -= skipped
            if skipped < batch.num_rows:
                yield batch.slice(skipped)
    if lenient.how == "raise":
        raise failed  # although no single record fails


def _is_text(data: bytes) -> bool:
    """Whether it is UTF-8; pyarrow reports other lines to stderr where they have an end mark."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _none_of(schema: pa.Schema, names: list[str]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], pa.schema([schema.field(name) for name in names]))


def _one(table: pa.Table, names: list[str]) -> pa.RecordBatch:
    batches = table.select(names).combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], table.schema)


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
