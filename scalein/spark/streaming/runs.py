"""Runs: a stream's state in immutable files, sorted by hash.

The state of a stream is a bag of rows: partial groups (`ir/two_phase.py`), any number of which combine to the value of
their key, or rows that wait for their end. A run holds some of it in one Arrow IPC file, sorted by the column `#hash`,
whose top 8 bits are the key group. A batch adds a run with what it brought; runs that are not much larger than it are
merged into it, so that there are few: each is several times as large as the next smaller one. The value of a key is
what all runs have of it: no run is newer than another, and none is wrong.

A range of key groups is a range of rows of every run. So another number of partitions moves nothing: a task opens the
files that there are and takes its rows, and `Run` says which groups of a file still count. (The merges of several
tasks may each take their part of one file.) Until a merge comes by, a task reads what is its own of files that it has
in common with others; `migration` says whether it waits for that (lazy), rewrites its part with the next batch (eager),
or with each batch a piece of it, where the batch has most rows (hybrid).

Where windows are, `#hash` is that of the key and the slice of time together, under the key's own group. Two keys may
have one hash: whatever looks something up compares the keys themselves, in which NaN equals NaN and null equals null.

A piece of a file (a record batch) holds all rows of a hash, and has a checksum of its own: a process checks it when it
first needs rows of the piece's key groups, and does not read the others.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from scalein.arrow_functions import taken
from scalein.errors import Damaged
from scalein.exec.event_time import as_integers
from scalein.spark.shuffle import KEY_GROUPS
from scalein.storage.checked_json import Json, as_int, as_list, as_text
from scalein.storage.object_store import STATE, Location

HASH = "#hash"
PIECE_ROWS = 1 << 20  # of a piece, about; also what a merge holds at a time
PIECES = 8  # in which the key groups of a task move
MIGRATIONS = ("lazy", "eager", "hybrid")
RATIO = 4  # runs of up to so many times what is merged already are merged too
_KEPT_OPEN = 64  # files of a process; their memory is the page cache's
_GROUP = np.uint64(0xFF << 56)
_MIX = np.uint64(0x9E3779B185EBCA87)


class Piece(NamedTuple):
    """Bytes [start, end) of a file, their checksum, and the first and the last key group that they have rows of."""

    start: int
    end: int
    sum: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Run:
    """A file, the key groups [first, last) of it that count, and from when to when its slices of time are."""

    file: str  # its name in the checkpoint
    first: int
    last: int
    rows: int  # in the whole file
    size_bytes: int
    sum: int  # of the bytes behind the pieces; of all, in a file of a version that wrote none
    oldest: int | None = None
    newest: int | None = None
    pieces: tuple[Piece, ...] = ()

    def to_json(self) -> list[Json]:
        return [self.file, self.first, self.last, self.rows, self.size_bytes, self.sum, self.oldest, self.newest,
                [[*piece] for piece in self.pieces]]

    @staticmethod
    def of(given: Json) -> Run:
        file, first, last, rows, size, total, oldest, newest, *more = as_list(given)
        pieces = [Piece(*map(as_int, as_list(each))) for some in more for each in as_list(some)]
        first, last = as_int(first), as_int(last)
        if not 0 <= first < last <= KEY_GROUPS:
            raise ValueError(f"no range of key groups: {first}, {last}")
        return Run(as_text(file), first, last, as_int(rows), as_int(size), as_int(total),
                   None if oldest is None else as_int(oldest), None if newest is None else as_int(newest),
                   tuple(pieces))

    def within(self, first: int, last: int) -> Run | None:
        """What of it is in a range of key groups."""
        first, last = max(first, self.first), min(last, self.last)
        return replace(self, first=first, last=last) if first < last else None


def joined_runs(runs: Iterable[Run]) -> list[Run]:
    """The same runs, parts of one file that are neighbours put together."""
    found: list[Run] = []
    for run in sorted(runs, key=lambda each: (each.file, each.first)):
        if found and found[-1].file == run.file and found[-1].last == run.first:
            found[-1] = replace(found[-1], last=run.last)
        else:
            found.append(run)
    return found


def hottest(run: Run, width: int, rows: np.ndarray) -> tuple[Run, list[Run]]:
    """So many key groups of a run, in one range, of which a batch has most rows, and what is left of the run; `rows`
    are those of the batch by key group.
    """
    width = min(width, run.last - run.first)
    heat = np.convolve(rows[run.first : run.last], np.ones(width, np.int64), "valid")
    first = run.first + int(heat.argmax())
    rest = (run.within(run.first, first), run.within(first + width, run.last))
    return replace(run, first=first, last=first + width), [each for each in rest if each is not None]


def ranges(partitions: int) -> list[tuple[int, int]]:
    """The key groups [first, last) of each partition.

    >>> ranges(3)
    [(0, 86), (86, 171), (171, 256)]
    """
    starts = [-(-KEY_GROUPS * k // partitions) for k in range(partitions + 1)]
    return list(pairwise(starts))


def with_slices(hashes: np.ndarray, slices: np.ndarray) -> np.ndarray:
    """Hashes of keys and slices of time; the key's group stays."""
    mixed = (hashes ^ (slices.astype(np.int64).view(np.uint64) * _MIX)) * _MIX
    mixed ^= mixed >> np.uint64(29)
    found: np.ndarray = (hashes & _GROUP) | (mixed * _MIX >> np.uint64(8))
    return found


# --- files


def write_run(location: Location, pieces: Iterable[pa.RecordBatch], groups: tuple[int, int],
              slices: str | None) -> Run | None:
    """Pieces in the order of their hashes, as a run; None if they have no row."""
    some = (piece for piece in pieces if piece.num_rows)
    first = next(some, None)
    if first is None:
        return None
    name = location.new_name(STATE, ".arrow")
    rows, ends, written_pieces = 0, list[int](), list[Piece]()
    with location.create(name) as written:
        with pa.ipc.new_file(pa.PythonFile(written, "w"), first.schema) as writer:
            for piece in chain([first], some):
                start = written.size_bytes
                writer.write_batch(piece)
                groups_of = hashes_of(piece)[[0, -1]] >> np.uint64(56)
                written_pieces.append(Piece(start, written.size_bytes, written.take_checksum(), *map(int, groups_of)))
                rows += piece.num_rows
                if slices is not None:
                    times = np.asarray(as_integers(piece.column(slices)))
                    ends += [int(times.min()), int(times.max())]
        return Run(name, *groups, rows, written.size_bytes, written.take_checksum(), min(ends, default=None),
                   max(ends, default=None), tuple(written_pieces))


class _Unsound(Exception):
    """A file is not what was written."""


class _File:
    """A mapped file, and those of its pieces that were checked."""

    def __init__(self, data: pa.Buffer, run: Run) -> None:
        end = run.pieces[-1].end if run.pieces else 0
        if data.size != run.size_bytes or zlib.crc32(data.slice(end)) != run.sum:
            raise _Unsound
        self._data, self._reader = data, pa.ipc.open_file(data)
        self._pieces = run.pieces
        self._checked: dict[int, pa.RecordBatch] = {}

    def within(self, first: int, last: int) -> list[pa.RecordBatch]:
        """Its pieces that may have rows of the key groups [first, last)."""
        return [self._piece(k) for k in range(self._reader.num_record_batches)
                if not self._pieces or (self._pieces[k].first < last and first <= self._pieces[k].last)]

    def _piece(self, number: int) -> pa.RecordBatch:
        if number not in self._checked:
            if self._pieces:
                start, end, known = self._pieces[number][:3]
                if zlib.crc32(self._data.slice(start, end - start)) != known:
                    raise _Unsound
            self._checked[number] = self._reader.get_batch(number)
        return self._checked[number]


_open: OrderedDict[str, _File] = OrderedDict()


def pieces_of(location: Location, run: Run) -> list[pa.RecordBatch]:
    """The rows of a run that count, mapped, in the order of their hashes; a piece is checked when it is new here."""
    name = location.uri_of(run.file)
    try:
        try:
            whole = _opened(location, run, name).within(run.first, run.last)
        except _Unsound:
            _open.pop(name, None)
            if not location.drop_local_copy(run.file):
                raise
            whole = _opened(location, run, name).within(run.first, run.last)
    except _Unsound:
        raise Damaged("a file of a stream's state is not what was written", file=name) from None
    except (OSError, pa.ArrowException) as error:
        raise Damaged("a file of a stream's state cannot be read", file=name, found=error) from error
    if (run.first, run.last) == (0, KEY_GROUPS):
        return whole
    start, end = (np.uint64(group << 56) if group < KEY_GROUPS else None for group in (run.first, run.last))
    return [part for piece in whole if (part := between(piece, start, end)).num_rows]


def _opened(location: Location, run: Run, name: str) -> _File:
    if name not in _open:
        _open[name] = _File(location.map_file(run.file), run)
        while len(_open) > _KEPT_OPEN:
            _open.popitem(last=False)
    _open.move_to_end(name)
    return _open[name]


def keep_only(location: Location, runs: Iterable[Run]) -> None:
    """Let go of all files of a stream but these. A mapped file's bytes stay on disk even when it is removed, and a
    worker that lives on would hold those of all batches.
    """
    names = {run.file for run in runs}
    wanted = {location.uri_of(name) for name in names}
    for name in [name for name in _open if name.startswith(location.uri_of(STATE)) and name not in wanted]:
        _open.pop(name, None)
    location.retain_local_copies(names)


def between(piece: pa.RecordBatch, start: np.uint64 | None, end: np.uint64 | None) -> pa.RecordBatch:
    """Rows whose hashes are in [start, end)."""
    found = hashes_of(piece)
    first = 0 if start is None else int(np.searchsorted(found, start))
    last = len(found) if end is None else int(np.searchsorted(found, end))
    return piece.slice(first, last - first)


def hashes_of(piece: pa.RecordBatch) -> np.ndarray:
    return np.asarray(piece.column(HASH))


def in_order(rows: pa.RecordBatch, hashes: np.ndarray) -> pa.RecordBatch:
    """Rows with their hashes, sorted by these."""
    order = _order(hashes)
    columns = [pa.array(hashes[order]), *(taken(column, pa.array(order)) for column in rows.columns)]
    return pa.RecordBatch.from_arrays(columns, schema=with_hash(rows.schema))


def _order(hashes: np.ndarray) -> np.ndarray:
    """The places of hashes in their order. numpy sorts 16 bits at a time by radix, which takes half as long as to
    compare 64; what is left to do then is next to nothing, and it has a way to sort that sees that.
    """
    order = np.argsort((hashes >> np.uint64(32)).astype(np.uint16), kind="stable")
    order = order[np.argsort((hashes >> np.uint64(48)).astype(np.uint16)[order], kind="stable")]
    found: np.ndarray = order[np.argsort(hashes[order], kind="stable")]
    return found


def with_hash(schema: pa.Schema) -> pa.Schema:
    return schema.insert(0, pa.field(HASH, pa.uint64(), False))


def to_merge(sizes: Sequence[int], rows: int) -> set[int]:
    """Which of some runs are merged into new rows: the smallest, as long as they are not much larger than those."""
    found = set[int]()
    for number in sorted(range(len(sizes)), key=lambda k: sizes[k]):
        if sizes[number] > RATIO * rows:
            break
        found.add(number)
        rows += sizes[number]
    return found
