"""Text files that Spark would scan: cut into splits on the driver, read by tasks where that gives the rows that Spark
would read, and refused (`NotPlain`) where that is not sure. Spark reads a batch of which a split was refused.

Whether a line is read or refused does not depend on others, so a split decides for itself, wherever a file is cut. What
lines must be is in `csv_lines.py` and `json_lines.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import pyarrow as pa

from scalein.connectors.partition_columns import with_constants
from scalein.spark.origin import ORIGIN, without_origin
from scalein.spark.row_groups import ScannedFile, Skipped, assign_splits

BLOCK_BYTES = 4 << 20  # read and converted at a time
SPLIT_BYTES = 32 << 20
_ENDINGS = (".csv", ".json", ".jsonl", ".ndjson", ".txt")  # Spark decompresses files with some others
_BLANK = bytes(range(33))


class NotPlain(Exception):
    """A file has something that Spark and pyarrow may read differently."""


class Lines(Protocol):
    """What Spark takes the lines of a file to be."""

    @property
    def has_header(self) -> bool: ...

    def can_read(self, schema: pa.Schema) -> bool:
        """Whether columns of these types can be read."""

    def rows(self, block: bytes, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The rows of some lines. Raises NotPlain, or an error of pyarrow, where Spark may read others."""


@dataclass(frozen=True)
class TextSplits:
    """Splits of text files: the rows of a scan, or of one of its tasks."""

    schema: pa.Schema  # the columns that are read, in the types in which Spark would send them; perhaps `ORIGIN`
    lines: Lines
    splits: tuple[tuple[str, int, int], ...]  # the lines of a file that start at these offsets
    sizes: tuple[int, ...]

    @property
    def skipped(self) -> Skipped:
        """None of the rows: text has no statistics."""
        return Skipped()

    def read(self) -> Iterator[pa.RecordBatch]:
        """All rows, read by one thread. Raises NotPlain, perhaps after some rows."""
        stored = without_origin(self.schema)
        for path, start, end in self.splits:
            try:
                for block in _blocks(path, start, end, self.lines.has_header):
                    for rows in self.lines.rows(block, stored):
                        yield rows if len(stored) == len(self.schema) else with_constants(
                            rows, self.schema, {ORIGIN: pa.scalar(path)}, rows.num_rows)
            except (pa.ArrowException, OSError) as error:  # if it is an error to Spark as well, Spark reports it
                raise NotPlain from error

    def split(self, tasks: int) -> tuple[TextSplits, ...]:
        """The splits of each task, of about the same size."""
        return tuple(replace(self, splits=tuple(self.splits[k] for k in numbers),
                             sizes=tuple(self.sizes[k] for k in numbers))
                     for numbers in assign_splits(range(len(self.splits)), self.sizes, tasks))


def plan_text(files: Sequence[ScannedFile], schema: pa.Schema, lines: Lines) -> TextSplits | None:
    """The splits of some files with the columns of `schema`, if tasks may be able to read them; else None."""
    is_text = all(each.path.endswith(_ENDINGS) and not each.values for each in files)
    if not is_text or not lines.can_read(without_origin(schema)):
        return None
    splits = []
    for each in files:
        try:
            size = os.stat(each.path).st_size
        except OSError:  # Spark reports the error when it reads the file
            return None
        splits += [(each.path, start, min(start + SPLIT_BYTES, size)) for start in range(0, size, SPLIT_BYTES)]
    return TextSplits(schema, lines, tuple(splits), tuple(end - start for _, start, end in splits))


def _blocks(path: str, start: int, end: int, has_header: bool) -> Iterator[bytes]:
    """The lines that start in a range of a file, in blocks; without the header."""
    with open(path, "rb") as file:
        if start:
            file.seek(start - 1)
            file.readline()
        elif has_header:
            check_characters(header := file.readline())
            if not header.strip(_BLANK):  # to Spark, the first line that is not blank
                raise NotPlain
        while (position := file.tell()) < end:
            block = file.read(min(BLOCK_BYTES, end - position))
            if not block:  # the file has become shorter
                raise NotPlain
            yield block if block.endswith(b"\n") else block + file.readline()


def check_characters(block: bytes) -> None:
    """Raise NotPlain, or an error of pyarrow, unless a block is UTF-8, and Spark ends lines where it has newlines."""
    if b"\0" in block or (b"\r" in block and block.count(b"\r") != block.count(b"\r\n")):
        raise NotPlain
    ends = pa.py_buffer(np.array([0, len(block)], np.int32))
    pa.StringArray.from_buffers(1, ends, pa.py_buffer(block)).validate(full=True)


def times_of_text(text: pa.StringArray, wanted: pa.DataType, zone: str) -> pa.Array:
    """Text as times or dates, in forms that mean the same to Spark; `zone` is that of times without one."""
    count = len(text) - text.null_count
    if pa.types.is_date(wanted) or not count:
        return text.cast(wanted)
    codes = characters(text)
    if np.count_nonzero(codes == ord(":")) != 2 * count:  # seconds are there
        raise NotPlain
    if wanted.tz is not None and np.count_nonzero(codes == ord("Z")) == count:
        return text.cast(pa.timestamp("us", "UTC")).cast(wanted)
    if wanted.tz is not None and zone != "UTC":
        raise NotPlain
    return text.cast(pa.timestamp("us")).cast(wanted)


def characters(text: pa.StringArray) -> np.ndarray:
    """The bytes of all values, one after the other."""
    _, offsets, data = text.buffers()
    bounds = np.frombuffer(offsets, np.int32)[[text.offset, text.offset + len(text)]]
    return np.frombuffer(data, np.uint8)[bounds[0]:bounds[1]]
