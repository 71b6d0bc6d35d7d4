"""Malformed records of text files: how they are found, and what becomes of them.

pyarrow decodes blocks of many lines and fails at the first malformed one. Such a file is read again here, in blocks
that end at record boundaries: a block that fails is bisected until the failing record is found. All other records are
decoded by pyarrow as usual, in the same order.

    raise   the first malformed record is an error that names its line
    null    a malformed record is a row: null in the fields that cannot be decoded, or in all of them
    keep    a malformed record is a row without values; the columns `MALFORMED` have the reason, file, line and text

A record of several lines that has all its fields is malformed as a whole. One with missing fields is caused by a quote
that is not closed: only its first line is malformed, and the following lines are parsed again. Known limit: if a later
quote closes it, parsing continues there, and values that contain newlines may be split.

A malformed record costs about ten calls of pyarrow, 2 to 5 ms.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa

from scalein.dtypes import from_arrow_type
from scalein.errors import BadData
from scalein.ir.internal_names import internal

BLOCK_BYTES = 4 << 20  # upper bound of a record's size
ERROR = internal("error")  # not null for a malformed record or file
MALFORMED = pa.schema({ERROR: pa.string(), internal("bad_file"): pa.string(), internal("bad_line"): pa.int64(),
                       internal("bad_text"): pa.string()})  # fmt: skip
_SHOWN = 200  # characters of a line, in an error
_PLACE = re.compile(r"^In CSV column #\d+: (Row #\d+: )?")  # in the text that pyarrow was given, not in the file
_WHOLE = {"csv": "each line has as many fields as the first one has names", "json": "each line is one JSON object"}
_NEWLINE = ord("\n")
_RETURN = ord("\r")


class Records(Protocol):
    """How text of one kind is cut and decoded."""

    def ends(self, data: bytes) -> list[int]:
        """The end offsets of the complete records in `data`, which begins at a record boundary."""

    def decode(self, data: bytes, names: list[str]) -> pa.RecordBatch:
        """These columns of complete records; raises pyarrow's error if one of them is malformed."""

    def is_one(self, data: bytes) -> bool:
        """Whether several lines are one record with the expected number of fields, whatever their values."""


@dataclass(frozen=True)
class LenientReader:
    """Reads a file and isolates its malformed records; `how` is raise, null or keep."""

    path: str
    format: str  # as in `read_<format>`
    records: Records
    schema: pa.Schema  # of the rows, without the columns of `MALFORMED`
    how: str
    hint: str
    needed: tuple[str, ...] = ()  # with "keep": columns without which a record is malformed; none: all of them

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
        """The end offsets of records. A record without an end, where there should be one, ends with its first line."""
        ends = self._ends(data, is_end)
        done = ends[-1] if ends else 0
        while (is_end and done < len(data)) or len(data) - done > BLOCK_BYTES:
            line = done + _first_line(data[done:])
            more = self._ends(data[line:], is_end)
            ends += [line, *(line + each for each in more)]
            done = ends[-1]
        return ends

    def _ends(self, data: bytes, is_end: bool) -> list[int]:
        """The end offsets of complete records; the last one of a file may lack the newline."""
        if not is_end or not data or data.endswith(b"\n"):
            return self.records.ends(data)
        return [min(end, len(data)) for end in self.records.ends(data + b"\n")]

    def _decoded(self, data: bytes, records: list[tuple[int, int]], line: int) -> Iterator[pa.RecordBatch]:
        """The rows of records, each a pair of offsets into `data`, which begins at line `line`."""
        waiting, counted = [records] if records else [], 0  # `line` is the line number at offset `counted`
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
                yield self._malformed(data[start:first], line, error)
                if first < end:  # the lines that an unclosed quote had made part of the record
                    again = _between(self._cut(data[first:end], is_end=True))
                    waiting.append([(first + a, first + b) for a, b in again])
                continue
            if found.num_rows:
                yield with_malformed(found) if self.how == "keep" else found

    def _decode(self, data: bytes, names: list[str]) -> pa.RecordBatch:
        found = self.records.decode(data, names)
        for name in names:
            if not self.schema.field(name).nullable and found.column(name).null_count:
                raise pa.ArrowInvalid(f"a field of column {name!r}, which cannot be null, is empty")
        return found

    def _malformed(self, text: bytes, line: int, error: pa.ArrowException) -> pa.RecordBatch:
        """The row of a malformed record."""
        shown = text.decode(errors="backslashreplace").rstrip("\r\n")
        columns = [self._alone(field, text) for field in self.schema] if self.how == "null" else []
        if self.how == "raise" or None in columns:
            column = self._failing(text)
            found = str(error).strip() if column is None else _PLACE.sub("", str(error).strip())
            raise BadData(f"line {line} of {self.path} cannot be read", column=column, found=found,
                          text=shown[:_SHOWN], hint=_WHOLE[self.format] if column is None else self.hint)
        if self.how == "null":
            return pa.RecordBatch.from_arrays(columns, names=self.schema.names)
        if self.needed and self._is_readable(text):
            columns = [self._alone(field, text) for field in self.schema]
            return with_malformed(pa.RecordBatch.from_arrays(columns, names=self.schema.names))
        return malformed_row(self.schema, str(error).strip(), self.path, line, shown)

    def _is_readable(self, text: bytes) -> bool:
        """Whether a record has values in all columns that are needed; in the others it may be null."""
        stored = [name for name in self.schema.names if name in self.needed] or self.schema.names[:1]
        try:
            return self._decode(text, stored).num_rows == 1 and all(
                field.nullable or field.name in stored for field in self.schema)
        except pa.ArrowException:
            return False

    def _failing(self, text: bytes) -> str | None:
        """The first column that cannot be decoded, and its type; None if it is not one column that fails."""
        failing = []
        for field in self.schema:
            try:
                self._decode(text, [field.name])
            except pa.ArrowException:
                failing.append(f"{field.name}, which is {field.type} here")
        return failing[0] if failing and len(failing) < max(2, len(self.schema)) else None

    def _alone(self, field: pa.Field, text: bytes) -> pa.Array | None:
        """One field of a record as a column; None if it cannot be decoded and is not nullable."""
        try:
            found = self._decode(text, [field.name])
        except pa.ArrowException:
            return pa.nulls(1, field.type) if field.nullable else None
        return found.column(0) if found.num_rows == 1 else pa.nulls(1, field.type)


def with_malformed(batch: pa.RecordBatch, *bad: object) -> pa.RecordBatch:
    """Rows with the columns `MALFORMED`: null for decoded rows, else the reason, file, line and text of the one
    malformed record.
    """
    more = [pa.array([value], field.type) for value, field in zip(bad, MALFORMED, strict=True)] if bad else [
        pa.nulls(batch.num_rows, field.type) for field in MALFORMED]
    return pa.RecordBatch.from_arrays([*batch.columns, *more], names=[*batch.schema.names, *MALFORMED.names])


def malformed_row(schema: pa.Schema, *bad: object) -> pa.RecordBatch:
    """The row of a malformed record, or of a file that cannot be read: without values."""
    empty = pa.RecordBatch.from_arrays([_nothing(field) for field in schema], names=schema.names)
    return with_malformed(empty, *bad)


def _joined(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """All rows as one batch, also those before an error: bisecting leaves very small batches."""
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
    """A placeholder value for a malformed record, also for columns that are not nullable."""
    if field.nullable:
        return pa.nulls(1, field.type)
    if not pa.types.is_nested(field.type) and not from_arrow_type(field.type).is_bytes:
        return pa.Array.from_buffers(field.type, 1, [None, pa.py_buffer(bytes(16))])
    return pa.array([""], pa.string()).cast(field.type)


def newlines(data: bytes) -> list[int]:
    r"""The end offsets of the lines in `data`. A \r at its end may be half of a newline.

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
    """The end offset of the first line."""
    return next(iter(newlines(data)), len(data))
