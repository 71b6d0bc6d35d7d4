"""CSV files that Spark would scan: cut into splits on the driver, read by tasks where that gives the rows that Spark
would read, and refused (`NotPlain`) where that is not sure. Spark reads a batch of which a split was refused.

pyarrow cuts lines into fields and converts these from text. Both readers mean the same if

    lines     end with \\n or \\r\\n, and have as many fields as the schema has columns; empty lines are no rows
    bytes     are UTF-8, without \\0 and backslashes, which are escapes to Spark
    quotes    enclose whole fields, in one line, with no quote inside
    numbers   have no spaces or hexadecimal digits, and are not called nan or inf
    dates     are 2024-01-31
    times     are 2024-01-31 23:59:59.123456, or with T, or fewer digits; all with Z or all without, in UTC
    booleans  are words

and every field of a column that is read converts to its type. A field without a character, quoted or not, is null.
These are properties of lines, so a split decides for itself, wherever a file is cut.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from scalein.spark.row_groups import ScannedFile, assign_splits

BLOCK_BYTES = 4 << 20  # read and converted at a time
SPLIT_BYTES = 32 << 20
_SEPARATORS = (",", ";", "|")  # a line of tabs would be a row to pyarrow, and blank to Spark
_INTEGERS = (pa.int8(), pa.int16(), pa.int32(), pa.int64())
_OTHER_TYPES = (pa.string(), pa.bool_(), pa.float64(), pa.date32(), pa.timestamp("us"), pa.timestamp("us", "UTC"))
_NEWLINE, _RETURN, _QUOTE = b'\n\r"'
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BLANK = bytes(range(33))


class NotPlain(Exception):
    """A file has something that Spark and pyarrow may read differently."""


@dataclass(frozen=True)
class CsvDialect:
    """What Spark takes CSV files to be."""

    columns: tuple[str, ...]  # all fields of a line, by position: names of the header are not compared
    separator: str
    has_header: bool
    zone: str  # of times without one, as Arrow writes it


@dataclass(frozen=True)
class CsvSplits:
    """Splits of CSV files: the rows of a scan, or of one of its tasks."""

    schema: pa.Schema  # the columns that are read, in the types in which Spark would send them
    dialect: CsvDialect
    splits: tuple[tuple[str, int, int], ...]  # the lines of a file that start at these offsets
    sizes: tuple[int, ...]

    def read(self) -> Iterator[pa.RecordBatch]:
        """All rows, read by one thread. Raises NotPlain, perhaps after some rows."""
        for path, start, end in self.splits:
            try:
                for block in _blocks(path, start, end, self.dialect.has_header):
                    yield from _rows(block, self.schema, self.dialect)
            except (pa.ArrowException, OSError) as error:  # if it is an error to Spark as well, Spark reports it
                raise NotPlain from error

    def split(self, tasks: int) -> tuple[CsvSplits, ...]:
        """The splits of each task, of about the same size."""
        return tuple(replace(self, splits=tuple(self.splits[k] for k in numbers),
                             sizes=tuple(self.sizes[k] for k in numbers))
                     for numbers in assign_splits(range(len(self.splits)), self.sizes, tasks))


def plan_csv(files: Sequence[ScannedFile], schema: pa.Schema, dialect: CsvDialect) -> CsvSplits | None:
    """The splits of some files with the columns of `schema`, if tasks may be able to read them; else None."""
    is_supported = all(field.type in _INTEGERS or field.type in _OTHER_TYPES or pa.types.is_decimal128(field.type)
                       for field in schema)
    # A line of spaces could be a row of one column; Spark decompresses files by the ending of their names.
    if not is_supported or len(dialect.columns) < 2 or dialect.separator not in _SEPARATORS or not all(
            each.path.endswith(".csv") and not each.values for each in files):
        return None
    splits = []
    for each in files:
        try:
            size = os.stat(each.path).st_size
        except OSError:  # Spark reports the error when it reads the file
            return None
        splits += [(each.path, start, min(start + SPLIT_BYTES, size)) for start in range(0, size, SPLIT_BYTES)]
    return CsvSplits(schema, dialect, tuple(splits), tuple(end - start for _, start, end in splits))


def _blocks(path: str, start: int, end: int, has_header: bool) -> Iterator[bytes]:
    """The lines that start in a range of a file, in blocks; without the header."""
    with open(path, "rb") as file:
        if start:
            file.seek(start - 1)
            file.readline()
        elif has_header:
            _check_bytes(header := file.readline())
            if not header.strip(_BLANK):  # to Spark, the first line that is not blank
                raise NotPlain
        while (position := file.tell()) < end:
            block = file.read(min(BLOCK_BYTES, end - position))
            if not block:  # the file has become shorter
                raise NotPlain
            if not position and block.startswith(_BYTE_ORDER_MARK):
                raise NotPlain
            yield block if block.endswith(b"\n") else block + file.readline()


def _rows(block: bytes, schema: pa.Schema, dialect: CsvDialect) -> Iterator[pa.RecordBatch]:
    import pyarrow.csv as pc

    _check_bytes(block)
    _check_quotes(block, ord(dialect.separator))
    read = [name for name in dialect.columns if name in schema.names] or [dialect.columns[0]]
    names = [f"{k}" for k in range(len(dialect.columns))]
    included = [names[dialect.columns.index(name)] for name in read]
    table = pc.read_csv(
        pa.BufferReader(block),
        pc.ReadOptions(use_threads=False, block_size=len(block) + 1, column_names=names),
        pc.ParseOptions(delimiter=dialect.separator),
        pc.ConvertOptions(column_types=dict.fromkeys(included, pa.string()), include_columns=included,
                          null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=True))
    for batch in table.to_batches():
        columns = dict(zip(read, batch.columns, strict=True))
        arrays = [_converted(columns[field.name], field.type, dialect.zone) for field in schema]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema) if arrays else batch.select([])


def _check_bytes(block: bytes) -> None:
    """Raise NotPlain unless both readers see the same characters and the same lines."""
    if b"\\" in block or b"\0" in block or (b"\r" in block and block.count(b"\r") != block.count(b"\r\n")):
        raise NotPlain
    ends = pa.py_buffer(np.array([0, len(block)], np.int32))
    pa.StringArray.from_buffers(1, ends, pa.py_buffer(block)).validate(full=True)  # as UTF-8


def _check_quotes(block: bytes, separator: int) -> None:
    """Raise NotPlain unless quotes enclose whole fields of one line, and are not in others."""
    if b'"' not in block:
        return
    codes = np.frombuffer(block, np.uint8)
    quotes = np.flatnonzero(codes == _QUOTE)
    if len(quotes) % 2:
        raise NotPlain
    opening, closing = quotes[::2], quotes[1::2]
    before, after = codes[opening - 1], codes[np.minimum(closing + 1, len(codes) - 1)]
    is_start = (before == separator) | (before == _NEWLINE) | (opening == 0)
    is_end = (after == separator) | (after == _NEWLINE) | (after == _RETURN) | (closing == len(codes) - 1)
    newlines = np.flatnonzero(codes == _NEWLINE)
    is_in_line = np.searchsorted(newlines, opening) == np.searchsorted(newlines, closing)
    if not (is_start & is_end & is_in_line).all():
        raise NotPlain


def _converted(text: pa.StringArray, wanted: pa.DataType, zone: str) -> pa.Array:
    """The values of fields, by pyarrow's conversion, where Spark's gives the same."""
    if wanted == pa.string() or text.null_count == len(text):
        return text.cast(wanted)
    codes = _characters(text)
    if wanted in _INTEGERS or pa.types.is_decimal(wanted):
        is_same = codes.max() <= ord("9")
    elif wanted == pa.float64():
        letters = codes[codes > ord("9")]
        is_same = bool(((letters | 0x20) == ord("e")).all())
    elif wanted == pa.bool_():
        is_same = codes.min() > ord("9")
    elif wanted == pa.date32():
        is_same = True
    else:
        return _times(text, codes, wanted, zone)
    if not is_same:
        raise NotPlain
    return text.cast(wanted)


def _times(text: pa.StringArray, codes: np.ndarray, wanted: pa.DataType, zone: str) -> pa.Array:
    count = len(text) - text.null_count
    if np.count_nonzero(codes == ord(":")) != 2 * count:  # seconds are there
        raise NotPlain
    if wanted.tz is not None and np.count_nonzero(codes == ord("Z")) == count:
        return text.cast(pa.timestamp("us", "UTC")).cast(wanted)
    if wanted.tz is not None and zone != "UTC":
        raise NotPlain
    return text.cast(pa.timestamp("us")).cast(wanted)


def _characters(text: pa.StringArray) -> np.ndarray:
    """The bytes of all values, one after the other."""
    _, offsets, data = text.buffers()
    bounds = np.frombuffer(offsets, np.int32)[[text.offset, text.offset + len(text)]]
    return np.frombuffer(data, np.uint8)[bounds[0]:bounds[1]]
