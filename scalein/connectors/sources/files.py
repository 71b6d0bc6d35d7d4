"""FileSource: the rows of files, in order, decoded ahead; `follow` goes on with files that appear.

Offset: {"file": name, "row": rows of it that were read, "done": whether these are all}. Files are in the order of their
names, so all before that one were read. A followed directory is in the order of modification time, then name. There a
file may still appear behind others (it was written before them and got its name later), so the offset also has
`since`, a modification time up to which all files count as read, and `read`, the names of later files that were.
`since` stays `GRACE_NS` behind the newest file read, or behind the clock, if that file is from the future; a file that
appears with an older time is skipped, with a warning. One that appears while nobody looks cannot be told from one that
was read long ago, except by the time when its entry last changed (`ctime`): `looked` is when the directory was last
looked at before, and what is old and has changed since is warned of as well.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa

from scalein.connectors.base import QUIET_S
from scalein.connectors.formats.base import MOST_ROWS, Format, Part
from scalein.connectors.formats.lenient import BAD
from scalein.connectors.formats.parquet import Parquet
from scalein.connectors.formats.statistics import Condition
from scalein.connectors.formats.text import Csv, JsonLines
from scalein.connectors.sources.listing import File, Listing
from scalein.connectors.sources.read_ahead import Unit, ahead
from scalein.errors import BadArgument, BadData, SourceLoc, here
from scalein.options import granted_cores
from scalein.storage.checked_json import Json

GRACE_NS = 3600 * 10**9
_LOOK_S = 0.05  # between two looks into a followed directory
_MOST_THREADS = 8  # pyarrow has its own for the columns of each file; more would hold more rows
_PARTITION = "files"

Item = tuple[pa.RecordBatch, Json]
Offset = dict[str, Any]


@dataclass(frozen=True)
class FileSource:
    """Files of one format and schema; a `Source` with one partition."""

    format: Format
    listing: Listing
    whole: pa.Schema  # of the files
    bounded: bool = True
    columns: tuple[str, ...] | None = None
    memory: int | None = None  # bytes of batches that may be decoded ahead
    replays = True

    @staticmethod
    def open(format: Format, given: object, schema: pa.Schema | None, follow: bool, at: SourceLoc) -> FileSource:
        """The source of what a path means; its schema is that of the first file that has one, unless given."""
        listing = Listing.of(given, f"read_{format.name}", at)
        files = listing.files()
        if not files and not (follow and schema is not None):
            hint = "give schema= to follow a directory that is still empty" if follow else None
            raise BadData(f"no file matches {listing}", at=at, hint=hint)
        found = schema
        for file in files if schema is None else []:
            found = format.schema(listing.path(file.name))
            if found is not None:
                break
        if found is None:
            raise BadData(f"the files of {listing} are all empty, so their columns are unknown", at=at,
                          hint="give schema=")
        return FileSource(format, listing, found.remove_metadata(), bounded=not follow)

    @property
    def schema(self) -> pa.Schema:
        """The columns it reads, and those of lines that cannot be, if they are kept."""
        found = self.whole if self.columns is None else pa.schema([self.whole.field(name) for name in self.columns])
        has_bad = isinstance(self.format, Csv | JsonLines) and self.format.bad == "keep"
        return pa.schema([*found, *BAD]) if has_bad else found

    def partitions(self) -> Sequence[str]:
        return (_PARTITION,)

    def project(self, columns: Sequence[str]) -> FileSource:
        """The same files, reading these columns only."""
        return replace(self, columns=tuple(columns))

    def where(self, tests: tuple[Condition, ...]) -> FileSource:
        """The same files, without rows for which one of the tests does not hold, as far as that is easily told."""
        if not tests or not isinstance(self.format, Parquet):
            return self
        return replace(self, format=replace(self.format, tests=tests))

    def lenient(self, how: str) -> FileSource:
        """The same files, in which a line that cannot be decoded is a row: "null" or "keep", see `careful.py`."""
        if not isinstance(self.format, Csv | JsonLines):
            return self
        taken = [name for name in self.schema.names if how == "keep" and name in BAD.names]
        if taken:
            raise BadArgument(f"on_error= adds columns to rows that fail, and the source has one of them: {taken[0]!r}",
                              at=here(), has=", ".join(BAD.names), hint='rename it in the files, or on_error="null"')
        return replace(self, format=replace(self.format, bad=how))

    def within(self, memory: int) -> FileSource:
        """The same files, of which no more than so many bytes are decoded ahead, or one batch."""
        return replace(self, memory=memory)

    @property
    def row_groups_skipped(self) -> int:
        """How many row groups of Parquet were not read, because of `where`."""
        return self.format.skipped.row_groups if isinstance(self.format, Parquet) else 0

    def read(self, partition: str, offset: Json) -> Iterator[Item]:
        """The rows behind an offset, in batches cut as the files are."""
        units = self._listed(offset) if self.bounded else self._followed(offset)
        empty = pa.RecordBatch.from_pylist([], schema=self.schema)
        threads = min(granted_cores(), _MOST_THREADS) + 1
        for item in ahead(units, threads, QUIET_S, size_of=_size_of, most_bytes=self.memory, units_wait=False):
            if item is not None:
                offset = item[1]
                yield item
            elif not self.bounded:
                yield empty, offset

    def _listed(self, offset: Json) -> Iterator[Unit[Item]]:
        files, place = self.listing.files(), _place(offset)
        name = place.get("file", "")
        self._check_there(place, [file.name for file in files])
        for file in files:
            if file.name > name or (file.name == name and not place.get("done")):
                yield from self._units(file, place.get("row", 0) if file.name == name else 0, {"file": file.name})

    def _followed(self, offset: Json) -> Iterator[Unit[Item] | None]:
        """The units of files that are there and of those that appear; None when there is nothing new."""
        place = _place(offset)
        since: int = place.get("since", -1)
        newest = since + GRACE_NS if place else -1
        read: dict[str, int] = dict(place.get("read", {}))
        begun = {place["file"]: place["row"]} if place and not place["done"] else {}
        if place and place["done"]:
            read[place["file"]] = place["mtime_ns"]
        looked_ns = time.time_ns()
        files = self.listing.files(timed=True)
        self._check_there(place, [file.name for file in files])
        # `past` were read long ago, or passed over.
        past = {file.name for file in files if file.mtime_ns <= since and file.name not in begun}
        self._warn([file for file in files if file.name in past and file.ctime_ns > place.get("looked", looked_ns)])
        # What was begun is completed first, whatever has appeared before it in the meantime.
        files.sort(key=lambda file: (file.name not in begun, file))
        looked_s = time.monotonic()
        while True:
            for file in files:
                if file.name in read or file.name in past:
                    continue
                if file.mtime_ns <= since and file.name not in begun:
                    self._warn([file])
                    past.add(file.name)
                    continue
                known: Offset = {"file": file.name, "mtime_ns": file.mtime_ns, "since": since, "read": dict(read),
                                 "looked": looked_ns}
                yield from self._units(file, begun.pop(file.name, 0), known)
                newest = max(newest, min(file.mtime_ns, time.time_ns()))
                read[file.name] = file.mtime_ns
                if newest - GRACE_NS > since:
                    since = newest - GRACE_NS
                    past |= {name for name, mtime_ns in read.items() if mtime_ns <= since}
                    read = {name: mtime_ns for name, mtime_ns in read.items() if mtime_ns > since}
            while time.monotonic() - looked_s < _LOOK_S:
                yield None
            looked_ns = time.time_ns()
            files, looked_s = self.listing.files(timed=True), time.monotonic()

    def _check_there(self, place: Offset, names: list[str]) -> None:
        """A file that was read to its end may go away; one that was begun may not."""
        if place and not place.get("done") and place["file"] not in names:
            raise BadData(f"{self.listing.path(place['file'])} is gone, but only {place['row']} rows of it were read")

    def _warn(self, old: list[File]) -> None:
        if old:
            more = f" (and {len(old) - 1:,} more)" if len(old) > 1 else ""
            warnings.warn(f"{self.listing.path(old[0].name)} is not read{more}: it appeared, or was changed, with a "
                          "modification time more than an hour before files that were read already; if it was never "
                          "read, touch it", stacklevel=2)

    def _units(self, file: File, row: int, offset: Offset) -> Iterator[Unit[Item]]:
        """The parts of a file behind a row, each giving its batches with offsets; the last one marks the end."""
        path = self.listing.path(file.name)
        columns = None if self.columns is None else list(self.columns)
        waiting: Part | None = None
        for part in self.format.parts(path, self.whole, columns, row):
            if waiting is not None:
                yield partial(_numbered, waiting, row, offset, False)
            waiting = part
        if waiting is not None:
            yield partial(_numbered, waiting, row, offset, True)
        elif row:
            raise _shrunk(path, row)


def _numbered(part: Part, row: int, offset: Offset, is_last: bool) -> Iterator[Item]:
    """The batches of a part from `row` of the file on, of at most 256 k rows, with the offset behind each."""
    waiting: Item | None = None  # whether it is the last is known when the next is there
    place = part.row
    for batch in part.open():
        start, place = place, place + batch.num_rows
        if start < row:
            batch = batch.slice(min(row - start, batch.num_rows))
        for first in range(0, batch.num_rows, MOST_ROWS):
            if waiting is not None:
                yield waiting
            piece = batch.slice(first, MOST_ROWS)
            behind = place - batch.num_rows + first + piece.num_rows
            waiting = piece, {**offset, "row": behind, "done": False}
    if place < row:
        raise _shrunk(offset["file"], row)
    if waiting is not None:
        yield waiting[0], {**offset, "row": place, "done": is_last}


def _size_of(item: Item) -> int:
    return int(item[0].nbytes)


def _shrunk(name: str, row: int) -> BadData:
    return BadData(f"{name} has fewer rows than the {row} that were read of it before",
                   hint="a file must not change once it has its name")


def _place(offset: Json) -> Offset:
    if offset is None:
        return {}
    if not isinstance(offset, dict) or not {"file", "row"} <= offset.keys():
        raise BadData("this is no offset in files", found=repr(offset))
    return offset

