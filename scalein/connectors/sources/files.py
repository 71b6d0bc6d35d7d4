"""FileSource: the rows of files in order, prefetched; `follow` continues with files that appear later.

Offset: {"file": name, "row": rows of it that were read, "done": whether these are all}. Files are read in the order of
their names, so all before that one were read. A followed directory is listed again and again; files that are new are
read in the order of modification time, then name. They are known by their names alone: one that arrives with an old
time is as new as any other. So the offset also has `seen`, the names of the files that were read before (see
`seen_files.py`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from scalein.connectors.base import QUIET_S
from scalein.connectors.formats.base import MAX_ROWS, FileSplit, Format
from scalein.connectors.formats.lenient import MALFORMED, malformed_row, with_malformed
from scalein.connectors.formats.parquet import CODED, TEXTS, Parquet, coded_columns
from scalein.connectors.formats.statistics import Condition, holds
from scalein.connectors.formats.text import Csv, JsonLines
from scalein.connectors.partition_columns import PartitionColumns, Values, with_constants
from scalein.connectors.sources.listing import Listing
from scalein.connectors.sources.read_ahead import ReadTask, read_ahead
from scalein.errors import BadData, SourceLoc, locating
from scalein.options import granted_cores
from scalein.storage.checked_json import Json

if TYPE_CHECKING:
    from scalein.connectors.sources.seen_files import SeenFiles

# Between two listings of a followed directory: it doubles while nothing appears; a listing takes a small share of it.
_MIN_WAIT_S, _MAX_WAIT_S, _LISTING_SHARE = 0.05, 0.4, 4
_MAX_THREADS = 8  # pyarrow decodes the columns of a file in its own threads; more would only hold more rows
_LOOKED_AT = 4  # files whose text decides whether columns are read as dictionaries
_MIN_BATCH_BYTES = 1 << 20  # of Parquet under a memory limit
_PARTITION = "files"

Item = tuple[pa.RecordBatch, Json]
Offset = dict[str, Any]


@dataclass(frozen=True)
class FileSource:
    """Files of one format and schema; a `Source` with one partition."""

    format: Format
    listing: Listing
    whole: pa.Schema  # of the files
    partition_columns: PartitionColumns = field(default_factory=lambda: PartitionColumns(pa.schema([])))
    partition_tests: tuple[Condition, ...] = ()  # files for whose values one does not hold need not be read
    bounded: bool = True
    is_until_now: bool = False  # a followed directory ends with the files that are there
    columns: tuple[str, ...] | None = None
    sets_aside: bool = False  # a file or record that cannot be read is a row that says so: see `formats/lenient.py`
    memory: int | None = None  # bytes of batches that may be decoded ahead
    replays = True

    @staticmethod
    def open(format: Format, given: object, schema: pa.Schema | None, follow: bool, at: SourceLoc) -> FileSource:
        """The source of what a path means; its schema is that of the first file that has one, unless given."""
        found = schema
        with locating(at):
            listing = Listing.of(given, f"read_{format.name}", at)
            files = listing.files()
            if not files and not (follow and schema is not None):
                hint = "give schema= to follow a directory that is still empty" if follow else None
                raise BadData(f"no file matches {listing}", at=at, hint=hint)
            # As in Spark and Polars, a glob and a file have no partition columns.
            parts = PartitionColumns.infer((file.name for file in files) if listing.is_directory else (), schema)
            for file in files if schema is None else []:
                found = format.schema(listing.path(file.name))
                if found is not None:
                    break
        if found is None:
            raise BadData(f"the files of {listing} have no rows, so the types of their columns are unknown", at=at,
                          hint="give schema=, with all columns and their types")
        if schema is not None:
            found = pa.schema([column for column in schema if column.name not in parts.schema.names])
        return FileSource(format, listing, found.remove_metadata(), parts, bounded=not follow)

    @property
    def schema(self) -> pa.Schema:
        """The columns that are read, and those of malformed records if these are kept."""
        return pa.schema([*self._read_columns, *MALFORMED]) if self.sets_aside else self._read_columns

    @property
    def _read_columns(self) -> pa.Schema:
        found = self._all_columns
        return found if self.columns is None else pa.schema([found.field(name) for name in self.columns])

    @property
    def _is_text(self) -> bool:
        return isinstance(self.format, Csv | JsonLines)

    def origin(self, offset: Json) -> tuple[str, int | None]:
        """The file of an offset, and the rows before it; of text only lines have numbers, and these are not known."""
        position = _position(offset)
        return self.listing.path(position["file"]), None if self._is_text else position["row"]

    @property
    def _all_columns(self) -> pa.Schema:
        """The columns of the files, then partition columns; one that is both has the type of the latter."""
        parts = self.partition_columns.schema
        return pa.schema([*(parts.field(column.name) if column.name in parts.names else column
                            for column in self.whole),
                          *(column for column in parts if column.name not in self.whole.names)])

    def partitions(self) -> Sequence[str]:
        return (_PARTITION,)

    def content(self) -> str:
        """What tells the files that there are now from others, without reading them."""
        sizes = [os.stat(self.listing.path(file.name)) for file in self.listing.files()]
        last = max((each.st_mtime_ns for each in sizes), default=0)
        when = datetime.fromtimestamp(last / 1e9, UTC).isoformat(" ", "milliseconds")
        files = f"{len(sizes):,} file{'s' * (len(sizes) != 1)}"
        return f"{self.listing}: {files}, {sum(each.st_size for each in sizes):,} bytes, last changed at {when}"

    def project(self, columns: Sequence[str]) -> FileSource:
        """The same files, reading these columns only."""
        return replace(self, columns=tuple(columns))

    def where(self, tests: tuple[Condition, ...]) -> FileSource:
        """The same files, without those whose partition values rule out one of the tests, and without row groups
        whose statistics do.
        """
        names = self.partition_columns.schema.names
        found = replace(self, partition_tests=tuple(test for test in tests if test.column in names))
        stored = tuple(test for test in tests if test.column not in names)
        if not stored or not isinstance(self.format, Parquet):
            return found
        return replace(found, format=replace(self.format, tests=stored))

    def lenient(self, how: str, needed: Sequence[str] = ()) -> FileSource:
        """The same files, in which a malformed record is a row: "null" or "keep", see `formats/lenient.py`. With "keep"
        so is a file that cannot be read; a record that has the columns `needed` is not malformed.
        """
        found = replace(self, sets_aside=how == "keep")
        if not isinstance(self.format, Csv | JsonLines):
            return found
        return replace(found, format=replace(self.format, malformed=how, needed=tuple(needed)))

    def until_now(self) -> FileSource:
        """The same files; a followed directory ends with those that are there when it is read."""
        return replace(self, is_until_now=True)

    def within(self, memory: int) -> FileSource:
        """The same files, prefetching at most that many bytes, or one batch."""
        if not isinstance(self.format, Parquet):
            return replace(self, memory=memory)
        batch_bytes = max(_MIN_BATCH_BYTES, memory // 8)
        return replace(self, memory=memory, format=replace(self.format, batch_bytes=batch_bytes))

    def with_dictionaries(self) -> FileSource:
        """The same rows, with dictionaries for text that has few different values, as the first files of Parquet say:
        these are cheaper to decode, to compare and to group by.
        """
        if not isinstance(self.format, Parquet) or not self.bounded or self.sets_aside:
            return self
        try:
            files = sorted(self.listing.names())[:_LOOKED_AT]
            coded = frozenset.intersection(*(coded_columns(self.listing.path(name)) for name in files)) if files else ()
        except (OSError, pa.ArrowException):
            return self  # reading will say what is wrong
        types = {column.name: CODED for column in self.whole if column.name in coded and column.type in TEXTS}
        return self if not types else replace(self, whole=pa.schema([
            column.with_type(types.get(column.name, column.type)) for column in self.whole]))

    @property
    def row_groups_skipped(self) -> int:
        """How many row groups of Parquet were not read, because of `where`."""
        return self.format.skipped.row_groups if isinstance(self.format, Parquet) else 0

    def rules_out(self, name: str) -> bool:
        """Whether the partition values of a file rule out all its rows."""
        if not self.partition_tests:
            return False
        values = self._values(name)
        return not all(holds(test, values[test.column]) for test in self.partition_tests)

    def splits(self, name: str, columns: Sequence[str] | None, row: int) -> Iterator[FileSplit]:
        """The splits of a file with rows at or after `row`; they have some columns, or all that are read."""
        path, source = self.listing.path(name), self if columns is None else self.project(columns)
        values = self._values(name)
        needs_marks = self.sets_aside and not self._is_text
        if not values:
            columns = None if source.columns is None else list(source.columns)
            for split in self.format.splits(path, self.whole, columns, row):
                yield FileSplit(split.row, partial(_with_marks, split)) if needs_marks else split
            return
        schema = source.schema
        stored = [column for column in self.whole.names if column in schema.names and column not in values]
        for split in self.format.splits(path, self.whole, stored, row):
            split = FileSplit(split.row, partial(_with_marks, split)) if needs_marks else split
            yield FileSplit(split.row, partial(_with_values, split, schema, values))

    def _values(self, name: str) -> Values:
        return self.partition_columns.values(name) if self.listing.is_directory else {}

    def read(self, partition: str, offset: Json) -> Iterator[Item]:
        """The rows after an offset; batches do not span files."""
        tasks = self._listed(offset) if self.bounded else self._followed(offset)
        # Not `from_pylist`, nor anything else that makes arrays of Python's values: pyarrow imports pandas for that.
        empty = pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in self.schema], schema=self.schema)
        threads = min(granted_cores(), _MAX_THREADS) + 1
        for item in read_ahead(tasks, threads, QUIET_S, size_of=_size_of, most_bytes=self.memory,
                               tasks_wait=False):
            if item is not None:
                offset = item[1]
                yield item
            elif not self.bounded:
                yield empty, offset

    def _listed(self, offset: Json) -> Iterator[ReadTask[Item]]:
        names, position = [file.name for file in self.listing.files()], _position(offset)
        last = position.get("file", "")
        self._check_there(position, names)
        for name in names:
            if name > last or (name == last and not position.get("done")):
                yield from self._tasks(name, position.get("row", 0) if name == last else 0, {"file": name})

    def _followed(self, offset: Json) -> Iterator[ReadTask[Item] | None]:
        """The tasks of files that exist and of those that appear; None when there is nothing new."""
        position = _position(offset)
        names = self.listing.names()
        self._check_there(position, names)
        seen = self._seen(position, names)
        if position and not position["done"]:  # it is completed first, whatever appeared before it in the meantime
            name = position["file"]
            yield from self._tasks(name, position["row"], {"file": name, "seen": seen.to_json()})
            seen.add(name)
        wait_s = _MIN_WAIT_S
        while True:
            started_s = time.monotonic()
            seen.forget(names)
            new = self.listing.timed(name for name in names if name not in seen)
            listed_s = time.monotonic()
            for file in new:
                yield from self._tasks(file.name, 0, {"file": file.name, "seen": seen.to_json()})
                seen.add(file.name)
            if self.is_until_now:
                return
            wait_s = _MIN_WAIT_S if new else min(2 * wait_s, _MAX_WAIT_S)
            while time.monotonic() - listed_s < max(wait_s, _LISTING_SHARE * (listed_s - started_s)):
                yield None
            names = self.listing.names()

    def _seen(self, position: Offset, names: list[str]) -> SeenFiles:
        """The files that were read before an offset, without one that was begun."""
        from scalein.connectors.sources.seen_files import SeenFiles  # hashes, which other reads do not need

        seen = SeenFiles(position.get("seen"))
        if "since" in position:  # the first offsets had names of the last hour, and a time before which all were read
            seen.add(*position["read"])
            seen.add(*(file.name for file in self.listing.timed(names)
                       if file.mtime_ns <= position["since"] and (position["done"] or file.name != position["file"])))
        if position and position["done"]:
            seen.add(position["file"])
        return seen

    def _check_there(self, position: Offset, names: list[str]) -> None:
        """A file that was read to its end may go away; one that was begun may not."""
        if position and not position.get("done") and position["file"] not in names:
            path, rows = self.listing.path(position["file"]), position["row"]
            raise BadData(f"{path} is gone, but only {rows} rows of it were read")

    def _tasks(self, name: str, row: int, offset: Offset) -> Iterator[ReadTask[Item]]:
        """The splits of a file after a row, each yielding batches with offsets; the last one marks the end."""
        if self.rules_out(name):
            return
        waiting: FileSplit | None = None
        try:
            for split in self.splits(name, None, row):
                if waiting is not None:
                    yield partial(self._checked, waiting, row, offset, split.row)
                waiting = split
        except BadData as error:
            found = self._set_aside(name, error)
            yield lambda: iter([(found, {**offset, "row": row, "done": True})])
            return
        if waiting is not None:
            yield partial(self._checked, waiting, row, offset, None)
        elif row:
            raise _shrunk(self.listing.path(name), row)

    def _checked(self, split: FileSplit, row: int, offset: Offset, end: int | None) -> Iterator[Item]:
        """The batches of a split, which ends at row `end` of the file, or with the file; its rest may be set aside."""
        items = _numbered(split, row, offset, end is None)
        while True:
            try:
                item = next(items, None)
            except BadData as error:
                after = {**offset, "row": row if end is None else end, "done": end is None}
                item = self._set_aside(offset["file"], error), after
                items = iter(())
            if item is None:
                return
            yield item

    def _set_aside(self, name: str, error: BadData) -> pa.RecordBatch:
        """The row of a file that cannot be read, or of its rest; raises if there is no place for it, or if the disk is
        to blame: then the file may be good.
        """
        cause = error.__cause__
        if not self.sets_aside or (isinstance(cause, OSError) and cause.errno is not None):
            raise error
        found = error.facts.get("found")
        text = error.what if found is None else f"{error.what}: {found}"
        return malformed_row(self._read_columns, text, self.listing.path(name), None, None)


def _with_values(split: FileSplit, schema: pa.Schema, values: Values) -> Iterator[pa.RecordBatch]:
    for batch in split.open():
        yield with_constants(batch, schema, values, batch.num_rows)


def _with_marks(split: FileSplit) -> Iterator[pa.RecordBatch]:
    return map(with_malformed, split.open())


def _numbered(split: FileSplit, row: int, offset: Offset, is_last: bool) -> Iterator[Item]:
    """The batches of a split from `row` of the file on, of at most 256 k rows, with the offset after each."""
    waiting: Item | None = None  # whether it is the last is known when the next is there
    position = split.row
    for batch in split.open():
        start, position = position, position + batch.num_rows
        if start < row:
            batch = batch.slice(min(row - start, batch.num_rows))
        for first in range(0, batch.num_rows, MAX_ROWS):
            if waiting is not None:
                yield waiting
            piece = batch.slice(first, MAX_ROWS)
            after = position - batch.num_rows + first + piece.num_rows
            waiting = piece, {**offset, "row": after, "done": False}
    if position < row:
        raise _shrunk(offset["file"], row)
    if waiting is not None:
        yield waiting[0], {**offset, "row": position, "done": is_last}


def _size_of(item: Item) -> int:
    return int(item[0].nbytes)


def _shrunk(name: str, row: int) -> BadData:
    return BadData(f"{name} has fewer rows than the {row} that were read of it before",
                   hint="a file must not change once it has its name")


def _position(offset: Json) -> Offset:
    if offset is None:
        return {}
    if not isinstance(offset, dict) or not {"file", "row"} <= offset.keys():
        raise BadData("this is no offset in files", found=repr(offset))
    return offset

