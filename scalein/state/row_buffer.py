"""RowBuffer: rows that wait for their windows to close, or for the end of the input, as batches with ranges of slices.

Batches are immutable. A snapshot lists the segments of the buffer, and a thread writes the new ones to one file in
Arrow's IPC format: so a checkpoint writes new rows only, and none twice. When the buffer exceeds its memory, segments
that are on disk leave memory.

What comes from a file is validated before a kernel sees it: a checksum can be forged, and may be as old as the start of
the job. Files are read, not mapped: a file that shrinks while it is mapped ends the process.

Threads: rows are added and removed by the job's thread. `write`, `to_json` and `remove_unreferenced` may be called by
any thread.
"""

from __future__ import annotations

import re
import threading
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from scalein.arrow_rows import copied
from scalein.errors import Damaged, StoreFailed
from scalein.storage.checked_json import Json, as_int, as_list, as_map, as_text
from scalein.storage.local import make_directory, sync_path

COALESCED_ROWS = 1 << 18
_NAME = re.compile(r"([a-z]+)-(\d{10})\.arrow")


@dataclass(eq=False)
class BufferSegment:
    """A batch in memory, in a file, or in both; the slices of its rows are in [first, last]."""

    first: int
    last: int
    rows: int
    batch: pa.RecordBatch | None
    file: str = ""
    number: int = 0  # of the batch in its file
    size_bytes: int = 0  # of the batch; 0: not known before it is read

    def __post_init__(self) -> None:
        if self.batch is not None:
            self.size_bytes = self.batch.nbytes


@dataclass(eq=False)
class RowBuffer:
    """Segments in the order of arrival; at most about `memory` bytes of them in memory."""

    folder: Path
    schema: pa.Schema
    memory: int | None
    prefix: str = "rows"  # of its files: several buffers may share a folder
    segments: list[BufferSegment] = field(default_factory=list)
    memory_bytes: int = 0
    _last_file: int = 0
    _checksums: dict[str, int] = field(default_factory=dict)  # of files, as they were written
    _pinned: list[list[BufferSegment]] = field(default_factory=list)  # being read, also after they were replaced
    _writing: threading.Lock = field(default_factory=threading.Lock)

    @property
    def rows(self) -> int:
        return sum(segment.rows for segment in self.segments)

    def add(self, batch: pa.RecordBatch, first: int = 0, last: int = 0) -> None:
        if self.memory is not None:  # a batch may hold on to much more than its rows
            batch = copied(batch)
        self.segments.append(BufferSegment(first, last, batch.num_rows, batch))
        self.memory_bytes += self.segments[-1].size_bytes
        if self.memory is not None and self.memory_bytes > self.memory:
            self.write(list(self.segments))
            for segment in self.segments:
                segment.batch = None
            self.memory_bytes = 0

    def replace(self, segments: list[BufferSegment]) -> None:
        """Hold these segments instead; files remain until no checkpoint names them."""
        self.segments = segments
        self.memory_bytes = sum(segment.size_bytes for segment in segments if segment.batch is not None)

    def coalesce(self, apart: bool = False) -> None:
        """Concatenate segments into fewer and longer ones, in the same order; `apart`: only those of the same slices,
        in the order of these. It takes no more than the buffer's memory, also if segments are on disk.
        """
        waiting = sorted(self.segments, key=lambda one: (one.first, one.last)) if apart else list(self.segments)
        with self.pinned(waiting):
            self.replace([])
            pending: list[BufferSegment] = []
            for segment in [*waiting, None]:
                if pending and (segment is None or sum(one.rows for one in pending) + segment.rows > COALESCED_ROWS
                                or (apart and (segment.first, segment.last) != (pending[0].first, pending[0].last))):
                    self._add_coalesced(pending)
                    pending = []
                if segment is not None:
                    pending.append(segment)

    def _add_coalesced(self, segments: list[BufferSegment]) -> None:
        if len(segments) == 1:
            self.segments += segments
            self.memory_bytes += 0 if segments[0].batch is None else segments[0].size_bytes
        else:
            first, last = min(one.first for one in segments), max(one.last for one in segments)
            self.add(pa.concat_batches([self.batch(one) for one in segments]), first, last)

    @contextmanager
    def pinned(self, segments: list[BufferSegment]) -> Iterator[None]:
        """Within, the files of these segments stay, whatever replaces them and whichever checkpoint is retained."""
        with self._writing:
            self._pinned.append(segments)
        try:
            yield
        finally:
            with self._writing:
                self._pinned.remove(segments)

    def stored_schema(self, segment: BufferSegment) -> pa.Schema:
        """The columns of a segment's file, as an earlier flow wrote them."""
        path = self.folder / segment.file
        try:
            with pa.OSFile(str(path)) as file:
                return pa.ipc.open_file(file).schema
        except (OSError, ValueError, OverflowError, pa.ArrowException) as error:
            raise Damaged("buffered rows cannot be read", file=path, found=error) from error

    def batch(self, segment: BufferSegment) -> pa.RecordBatch:
        found = segment.batch  # read once: another thread may drop it from memory
        if found is not None:
            return found
        path = self.folder / segment.file
        try:
            with pa.OSFile(str(path)) as file:
                found = pa.ipc.open_file(file).get_batch(segment.number)
            found.validate(full=True)
        except (OSError, ValueError, OverflowError, pa.ArrowException) as error:
            raise Damaged("buffered rows cannot be read", file=path, found=error) from error
        if (found.num_rows != segment.rows or not found.schema.equals(self.schema)
                or any(column.null_count for column, field in zip(found.columns, self.schema, strict=True)
                       if not field.nullable)):  # fmt: skip
            raise Damaged("buffered rows are not those that were written", file=path)
        segment.size_bytes = found.nbytes
        return found

    def size_bytes(self, segments: Iterable[BufferSegment]) -> int:
        """The bytes of segments, in memory or not."""
        return sum(segment.size_bytes or self.batch(segment).nbytes for segment in segments)

    # --- on disk

    def write(self, segments: Iterable[BufferSegment]) -> list[Json]:
        """Write the segments that are in no file yet to a new one, durably; returns the position of each segment."""
        segments = list(segments)
        with self._writing:
            new = [segment for segment in segments if not segment.file]
            if new:
                self._last_file += 1
                name = f"{self.prefix}-{self._last_file:010}.arrow"
                self._write(self.folder / name, new)
                for number, segment in enumerate(new):
                    segment.file, segment.number = name, number
        return [[each.first, each.last, each.rows, each.file, each.number] for each in segments]

    def _write(self, path: Path, new: list[BufferSegment]) -> None:
        try:
            make_directory(self.folder)
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, self.schema) as writer:
                for segment in new:
                    assert segment.batch is not None
                    writer.write_batch(segment.batch)
            sync_path(path)
            sync_path(self.folder)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise StoreFailed("cannot write buffered rows", file=path, found=error) from error

    def to_json(self, segments: list[BufferSegment]) -> dict[str, Json]:
        """The segments for a checkpoint; they are on disk when this returns."""
        entries = self.write(segments)
        names = sorted({segment.file for segment in segments})
        for name in names:
            if name not in self._checksums:
                self._checksums[name] = _checksum(self.folder / name)
        return {"batches": [*entries], "files": {name: self._checksums[name] for name in names},
                "next": self._last_file}  # fmt: skip

    def restore(self, given: Json) -> None:
        about = as_map(given)
        files = as_map(about["files"])
        verify_files(self.folder, files)
        self._checksums.update({name: as_int(checksum) for name, checksum in files.items()})
        for entry in map(as_list, as_list(about["batches"])):
            first, last, rows = (as_int(part) for part in entry[:3])
            name, number = as_text(entry[3]), as_int(entry[4])
            if name not in files:
                raise ValueError(f"rows in a file that is not named: {name!r:.100}")
            self.segments.append(BufferSegment(first, last, rows, None, name, number))
        # New files are numbered after all existing ones: an epoch that was not committed may have left some.
        numbers = [int(match[2]) for path in self.folder.glob("*")
                   if (match := _NAME.fullmatch(path.name)) and match[1] == self.prefix]
        self._last_file = max([as_int(about["next"]), *numbers])

    def remove_unreferenced(self, named: set[str]) -> None:
        """Remove files that neither a checkpoint names nor this buffer needs; one that cannot be removed is left."""
        with self._writing:
            needed = named | {segment.file for held in (self.segments, *self._pinned) for segment in held}
            for path in self.folder.glob(f"{self.prefix}-*.arrow"):
                if path.name not in needed:
                    with suppress(OSError):
                        path.unlink()
                    self._checksums.pop(path.name, None)


def verify_files(folder: Path, files: dict[str, Json]) -> None:
    """Raise `Damaged` unless the files that a checkpoint names have the checksums that it gives."""
    for name, expected in files.items():
        if not _NAME.fullmatch(name) or _checksum(folder / name) != expected:
            raise Damaged("a file of buffered rows is not what was written", file=folder / name)


def _checksum(path: Path) -> int:
    """The CRC-32 of a file."""
    total = 0
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                total = zlib.crc32(block, total)
    except FileNotFoundError as error:
        raise Damaged("a file of buffered rows is missing", file=path) from error
    except OSError as error:
        raise StoreFailed("buffered rows cannot be read", file=path, found=error) from error
    return total
