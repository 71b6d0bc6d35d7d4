"""Rows that wait: batches kept as they are, each with the range of slices of time that it has rows of.

For windows, which are finished together and then dropped together, and for whatever needs its whole input. Batches are
immutable: a freeze notes which there are, and a thread writes the new ones to one file, in Arrow's own format, so a
checkpoint writes what is new and nothing twice. What is on disk leaves memory when there is too much of it.
"""

from __future__ import annotations

import os
import re
import threading
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from scalein.errors import Damaged, StoreFailed
from scalein.storage.checked_json import Json, as_int, as_list, as_map, as_text

JOINED_ROWS = 1 << 18
_NAME = re.compile(r"rows-(\d{10})\.arrow")


@dataclass(eq=False)
class Kept:
    """A batch that waits, in memory, in a file, or in both; its slices are in [first, last]."""

    first: int
    last: int
    rows: int
    batch: pa.RecordBatch | None
    file: str = ""
    number: int = 0  # of the batch in its file


@dataclass(eq=False)
class RowLog:
    """Batches in the order in which they came."""

    folder: Path
    schema: pa.Schema
    memory: int | None
    kept: list[Kept] = field(default_factory=list)
    held_bytes: int = 0
    _next: int = 0
    _sums: dict[str, int] = field(default_factory=dict)  # of files, as they were written
    _pinned: list[list[Kept]] = field(default_factory=list)  # that are being read, although they may not wait any more
    _writing: threading.Lock = field(default_factory=threading.Lock)

    @property
    def rows(self) -> int:
        return sum(each.rows for each in self.kept)

    def add(self, batch: pa.RecordBatch, first: int = 0, last: int = 0) -> None:
        self.kept.append(Kept(first, last, batch.num_rows, batch))
        self.held_bytes += batch.nbytes
        if self.memory is not None and self.held_bytes > self.memory:
            self.write(list(self.kept))
            for each in self.kept:
                each.batch = None
            self.held_bytes = 0

    def replace(self, kept: list[Kept]) -> None:
        """Keep these instead; files stay until no checkpoint names them."""
        self.kept = kept
        self.held_bytes = sum(each.batch.nbytes for each in kept if each.batch is not None)

    def join(self) -> None:
        """Fewer and longer batches, in the same order."""
        joined: list[Kept] = []
        some: list[Kept] = []
        for each in [*self.kept, None]:
            if some and (each is None or sum(one.rows for one in some) + each.rows > JOINED_ROWS):
                batch = pa.concat_batches([self.batch(one) for one in some])
                joined.append(Kept(min(one.first for one in some), max(one.last for one in some), len(batch), batch))
                some = []
            if each is not None:
                some.append(each)
        self.replace(joined)

    @contextmanager
    def pinned(self, kept: list[Kept]) -> Iterator[None]:
        """Within, the files of these batches stay, whatever replaces them and whichever checkpoint is retained."""
        with self._writing:
            self._pinned.append(kept)
        try:
            yield
        finally:
            with self._writing:
                self._pinned.remove(kept)

    def batch(self, kept: Kept) -> pa.RecordBatch:
        found = kept.batch  # another thread's look at memory may come between
        if found is not None:
            return found
        try:
            with pa.memory_map(str(self.folder / kept.file)) as file:
                return pa.ipc.open_file(file).get_batch(kept.number)
        except (OSError, pa.ArrowException) as error:
            raise Damaged("rows that wait cannot be read", file=self.folder / kept.file, found=error) from error

    # --- on disk

    def write(self, kept: Iterable[Kept]) -> list[Json]:
        """Put batches that are in no file yet into one, synced; where each of them is. Any thread may call."""
        kept = list(kept)
        with self._writing:
            new = [each for each in kept if not each.file]
            if new:
                self._next += 1
                name = f"rows-{self._next:010}.arrow"
                self._write(self.folder / name, new)
                for number, each in enumerate(new):
                    each.file, each.number = name, number
        return [[each.first, each.last, each.rows, each.file, each.number] for each in kept]

    def _write(self, path: Path, new: list[Kept]) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, self.schema) as writer:
                for each in new:
                    assert each.batch is not None
                    writer.write_batch(each.batch)
            for synced in (path, self.folder):
                handle = os.open(synced, os.O_RDONLY)
                try:
                    os.fsync(handle)
                finally:
                    os.close(handle)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise StoreFailed("cannot write rows that wait", file=path, found=error) from error

    def to_json(self, kept: list[Kept]) -> dict[str, Json]:
        """What a checkpoint says of batches; they are on disk when this returns."""
        entries = self.write(kept)
        names = sorted({each.file for each in kept})
        for name in names:
            if name not in self._sums:
                self._sums[name] = _sum(self.folder / name)
        return {"batches": [*entries], "files": {name: self._sums[name] for name in names}, "next": self._next}

    def restore(self, given: Json) -> None:
        about = as_map(given)
        files = as_map(about["files"])
        for name, expected in files.items():
            if not _NAME.fullmatch(name) or (found := _sum(self.folder / name)) != expected:
                raise Damaged("rows that wait are not what was written", file=self.folder / name)
            self._sums[name] = found
        for entry in map(as_list, as_list(about["batches"])):
            first, last, rows = (as_int(part) for part in entry[:3])
            name, number = as_text(entry[3]), as_int(entry[4])
            if name not in files:
                raise ValueError(f"rows in a file that is not named: {name!r:.100}")
            self.kept.append(Kept(first, last, rows, None, name, number))
        # Numbers of files go on behind all that are there: one may be left from a run that was not committed.
        numbers = [int(match[1]) for path in self.folder.glob("*") if (match := _NAME.fullmatch(path.name))]
        self._next = max([as_int(about["next"]), *numbers])

    def remove_others(self, named: set[str]) -> None:
        """Remove files that neither a checkpoint names nor this log needs; what cannot be removed now stays a while."""
        with self._writing:
            needed = named | {each.file for some in (self.kept, *self._pinned) for each in some}
            for path in self.folder.glob("rows-*.arrow"):
                if path.name not in needed:
                    with suppress(OSError):
                        path.unlink()
                    self._sums.pop(path.name, None)


def _sum(path: Path) -> int:
    """A checksum of a file."""
    total = 0
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                total = zlib.crc32(block, total)
    except FileNotFoundError as error:
        raise Damaged("rows that wait are gone", file=path) from error
    except OSError as error:
        raise StoreFailed("rows that wait cannot be read", file=path, found=error) from error
    return total
