"""Lines of text that cannot be decoded: which they are, and what becomes of them.

pyarrow decodes blocks of many lines, and gives a file up at the first wrong one. Such a file is read once more here, in
pieces that end where records do: a piece that fails is halved until what fails is a single record. What is right comes
out as pyarrow decodes it, in the same order.

    raise   the first line that is wrong is an error that names it
    null    a wrong line is a row: null in the fields that cannot be decoded, or in all of them
    keep    a wrong line is a row without values, that has its file, number and text in the columns `BAD`

A record of many lines that has all its fields is wrong as a whole. One that has not is the work of a quote that is
not closed: only its first line is wrong then, and the others are looked at anew. Where the next quote closed it, that
is the end of what is looked at: values with newlines may be torn there.

A wrong line costs about ten calls of pyarrow's, 2 to 5 ms in all: a file with many of them is better mended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa

from scalein.dtypes import from_arrow_type
from scalein.errors import BadData

BLOCK_BYTES = 4 << 20  # a record is shorter
BAD = pa.schema({"bad_file": pa.string(), "bad_line": pa.int64(), "bad_text": pa.string()})
_SHOWN = 200  # characters of a line, in an error
_NEWLINE = ord("\n")
_RETURN = ord("\r")


class Records(Protocol):
    """How text of one kind is cut and decoded."""

    def ends(self, data: bytes) -> list[int]:
        """The places behind each whole record of some data that begins with one."""

    def decode(self, data: bytes, names: list[str]) -> pa.RecordBatch:
        """These columns of whole records; an error of pyarrow's if one of them is wrong."""

    def is_one(self, data: bytes) -> bool:
        """Whether several lines are one record, with as many fields as it should have, whatever their values."""


@dataclass(frozen=True)
class Careful:
    """A file that is read record by record; `how` is raise, null or keep."""

    path: str
    records: Records
    schema: pa.Schema  # of the rows, without those of `BAD`
    how: str
    hint: str

    def rows(self, has_header: bool) -> Iterator[pa.RecordBatch]:
        """All rows of the file; a header is no row."""
        with pa.input_stream(self.path) as file:
            left, line = b"", 1
            while True:
                block = file.read(BLOCK_BYTES)
                data = left + block
                ends = self._cut(data, is_end=not block)
                records = _between(ends)
                if has_header and records:
                    has_header, records = False, records[1:]
                yield from _joined(self._decoded(data, records, line))
                done = ends[-1] if ends else 0
                line, left = line + _lines(data, 0, done), data[done:]
                if not block:
                    return

    def _cut(self, data: bytes, is_end: bool) -> list[int]:
        """The places where records end. What has no end, though it should, ends with its first line."""
        ends = self._ends(data, is_end)
        done = ends[-1] if ends else 0
        while (is_end and done < len(data)) or len(data) - done > BLOCK_BYTES:
            line = done + _first_line(data[done:])
            more = self._ends(data[line:], is_end)
            ends += [line, *(line + each for each in more)]
            done = ends[-1]
        return ends

    def _ends(self, data: bytes, is_end: bool) -> list[int]:
        """The places where records end by themselves: the last one of a file may do so without a newline."""
        if not is_end or not data or data.endswith(b"\n"):
            return self.records.ends(data)
        return [min(end, len(data)) for end in self.records.ends(data + b"\n")]

    def _decoded(self, data: bytes, records: list[tuple[int, int]], line: int) -> Iterator[pa.RecordBatch]:
        """Records, each from a place to another in data that begins with a line."""
        waiting, counted = [records] if records else [], 0  # the line is that of the place `counted`
        while waiting:
            some = waiting.pop()
            start, end = some[0][0], some[-1][1]
            try:
                found = self._decode(data[start:end], self.schema.names)
            except pa.ArrowException as error:
                if len(some) > 1:
                    waiting += [some[len(some) // 2 :], some[: len(some) // 2]]
                    continue
                first = start + _first_line(data[start:end])
                if first < end and self.records.is_one(data[start:end]):
                    first = end
                line, counted = line + _lines(data, counted, start), start
                yield self._wrong(data[start:first], line, error)
                if first < end:  # more lines, that a quote has made part of it
                    again = _between(self._cut(data[first:end], is_end=True))
                    waiting.append([(first + a, first + b) for a, b in again])
                continue
            if found.num_rows:
                yield beside(found) if self.how == "keep" else found

    def _decode(self, data: bytes, names: list[str]) -> pa.RecordBatch:
        found = self.records.decode(data, names)
        for name in names:
            if not self.schema.field(name).nullable and found.column(name).null_count:
                raise pa.ArrowInvalid(f"a field of column {name!r}, which cannot be null, is empty")
        return found

    def _wrong(self, text: bytes, line: int, error: pa.ArrowException) -> pa.RecordBatch:
        """The row of a line that cannot be decoded."""
        shown = text.decode(errors="backslashreplace").rstrip("\r\n")
        columns = [self._alone(field, text) for field in self.schema] if self.how == "null" else []
        if self.how == "raise" or None in columns:
            raise BadData(f"line {line} of {self.path} cannot be read", found=str(error).strip(), text=shown[:_SHOWN],
                          hint=self.hint)
        if self.how == "null":
            return pa.RecordBatch.from_arrays(columns, names=self.schema.names)
        empty = pa.RecordBatch.from_arrays([_nothing(field) for field in self.schema], names=self.schema.names)
        return beside(empty, self.path, line, shown)

    def _alone(self, field: pa.Field, text: bytes) -> pa.Array | None:
        """The field of a line as a column; None if it cannot be decoded and must not be null."""
        try:
            found = self._decode(text, [field.name])
        except pa.ArrowException:
            return pa.nulls(1, field.type) if field.nullable else None
        return found.column(0) if found.num_rows == 1 else pa.nulls(1, field.type)


def beside(batch: pa.RecordBatch, *bad: object) -> pa.RecordBatch:
    """Rows with the columns `BAD`: null if they are right, else file, number and text of the one row's line."""
    more = [pa.array([value], field.type) for value, field in zip(bad, BAD, strict=True)] if bad else [
        pa.nulls(batch.num_rows, field.type) for field in BAD]
    return pa.RecordBatch.from_arrays([*batch.columns, *more], names=[*batch.schema.names, *BAD.names])


def _joined(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """All rows as one batch, also those before an error: around wrong lines they come in very small ones."""
    some, failed = list[pa.RecordBatch](), None
    try:
        for batch in batches:
            some.append(batch)
    except BadData as error:
        failed = error
    if some:
        names = some[0].schema.names
        columns = [pa.concat_arrays([batch.column(name) for batch in some]) for name in names]
        yield pa.RecordBatch.from_arrays(columns, names=names)
    if failed is not None:
        raise failed


def _nothing(field: pa.Field) -> pa.Array:
    """A value that nobody will look at, of a column that may not take a null."""
    if field.nullable:
        return pa.nulls(1, field.type)
    if not pa.types.is_nested(field.type) and not from_arrow_type(field.type).is_bytes:
        return pa.Array.from_buffers(field.type, 1, [None, pa.py_buffer(bytes(16))])
    return pa.array([""], pa.string()).cast(field.type)


def newlines(data: bytes) -> list[int]:
    r"""The places behind the lines of some data. A \r at its end may be half of a newline.

    >>> newlines(b"a\r\nb\nc\rd\r")
    [3, 5, 7]
    """
    found = np.frombuffer(data, np.uint8)
    is_end = found == _NEWLINE
    is_end[:-1] |= (found[:-1] == _RETURN) & (found[1:] != _NEWLINE)
    return (np.flatnonzero(is_end) + 1).tolist()


def _between(ends: list[int]) -> list[tuple[int, int]]:
    return list(zip([0, *ends], ends, strict=False))


def _lines(data: bytes, start: int, end: int) -> int:
    return data.count(b"\n", start, end) + data.count(b"\r", start, end) - data.count(b"\r\n", start, end)


def _first_line(data: bytes) -> int:
    """The place behind the first line of some data."""
    return next(iter(newlines(data)), len(data))
