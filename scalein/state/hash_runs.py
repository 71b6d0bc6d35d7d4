"""Runs: the state of a stream in immutable files, sorted by hash.

The state of a stream is a bag of rows: partial groups (`ir/partials.py`), any number of which combine to the value of
their key, or buffered rows. A run holds some of it in one Arrow IPC file, sorted by the column `#hash`, whose top 8
bits are the key group. A batch adds a run of its new rows; runs that are not much larger are merged into it, so that
there are few: each is several times as large as the next smaller one. The value of a key is the combination of its rows
in all runs: no run supersedes another.

A range of key groups is a range of rows of every run. So a change of the number of partitions moves nothing: a task
opens the existing files and selects its rows, and `Run` says which key groups of a file are still valid. (The merges of
several tasks may each have replaced their part of one file.) Until a merge rewrites them, a task reads its part of
files that it shares with other tasks; `migration` decides whether it waits for a merge (lazy), rewrites its part with
the next batch (eager), or a range of it with each batch, first where the batch has most rows (hybrid): an eighth, or
less of a large file, in proportion to the batch.

With windows, `#hash` is that of the key and the time slice together, in the key's own group. Two keys may have one
hash: lookups compare the keys themselves, where NaN equals NaN and null equals null.

A block of a file (a record batch) holds all rows of a hash, and has a checksum of its own: a process verifies it when
it first reads rows of the block's key groups, and does not read the others. After a rescale each process meets blocks
that it did not verify yet, so the checksum is the compiled one of `checksum.py`: that of a gigabyte takes a tenth of a
second, five times less than its CRC, which older files have.

Open files are cached per process; one thread at a time uses the cache (Spark's workers run one task at a time).
"""

from __future__ import annotations

import re
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from scalein.arrow_rows import as_integers, as_numpy, taken, verified
from scalein.errors import Damaged
from scalein.options import Options
from scalein.state.checksum import ByteChecksum, Checksums, compiled_checksums
from scalein.state.key_groups import KEY_GROUPS
from scalein.storage.checked_json import Json, as_int, as_list, as_text
from scalein.storage.object_store import STATE, CountedOutput, Location

HASH = "#hash"
BLOCK_ROWS = 1 << 20  # of a block, about; also what a merge holds at a time
MIGRATION_STEPS = 8  # batches in which a hybrid migration moves a task's key groups, at least
MIGRATION_ROWS, MIGRATION_RATIO = 1 << 14, 2  # rows that it moves with a batch: at least, and for each row of the batch
MIGRATIONS = ("lazy", "eager", "hybrid")
MERGE_RATIO = 4  # a run is merged if it has at most this many times the rows merged so far
CRC32, COMPILED = 0, 1  # kinds of checksums: zlib's, which the first versions wrote, and that of `checksum.py`
_MAX_OPEN_FILES = 64  # of a process; their memory is in the page cache
_NAME = re.compile(rf"{STATE}/[\w-]+\.arrow")
_GROUP_MASK = np.uint64(0xFF << 56)
_MIX = np.uint64(0x9E3779B185EBCA87)


class Block(NamedTuple):
    """Bytes [start, end) of a file, their checksum, and the first and the last key group of their rows. `kind` is that
    of the checksum.
    """

    start: int
    end: int
    sum: int
    first: int
    last: int
    kind: int = CRC32


@dataclass(frozen=True, slots=True)
class Run:
    """A file, its valid key groups [first, last), and its oldest and newest time slice."""

    file: str  # its name in the checkpoint
    first: int
    last: int
    rows: int  # in the whole file
    size_bytes: int
    sum: int  # of the bytes after the blocks; of all bytes in files without block checksums (first version)
    oldest: int | None = None
    newest: int | None = None
    blocks: tuple[Block, ...] = ()
    part: str = ""  # of an operator's state, if that has several

    def to_json(self) -> list[Json]:
        found: list[Json] = [self.file, self.first, self.last, self.rows, self.size_bytes, self.sum, self.oldest,
                             self.newest, [[*block] for block in self.blocks]]
        return [*found, self.part] if self.part else found

    @staticmethod
    def from_json(content: Json) -> Run:
        file, first, last, rows, size, total, oldest, newest, *rest = as_list(content)
        blocks = [Block(*map(as_int, as_list(each))) for some in rest[:1] for each in as_list(some)]
        first, last, size = as_int(first), as_int(last), as_int(size)
        if not 0 <= first < last <= KEY_GROUPS:
            raise ValueError(f"no range of key groups: {first}, {last}")
        if not _NAME.fullmatch(as_text(file)):
            raise ValueError(f"no file of state: {file!r:.100}")
        ends = [0, *(place for block in blocks for place in block[:2]), size]
        if any(end < start for start, end in pairwise(ends)):
            raise ValueError("blocks are not one after the other")
        return Run(as_text(file), first, last, as_int(rows), size, as_int(total),
                   None if oldest is None else as_int(oldest), None if newest is None else as_int(newest),
                   tuple(blocks), as_text(rest[1]) if len(rest) > 1 else "")

    def within(self, first: int, last: int) -> Run | None:
        """The part of it in a range of key groups; None if there is none."""
        first, last = max(first, self.first), min(last, self.last)
        return replace(self, first=first, last=last) if first < last else None


@dataclass
class StateTraffic:
    """Bytes of state that a task used: rows that it looked up, merged or read, of these rows in files that hold key
    groups of other tasks too (what a rescale has left to move), new files, and blocks that it verified.
    """

    read: int = 0
    moved: int = 0
    written: int = 0
    verified: int = 0

    def add_rows(self, run: Run, rows: int, is_shared: bool) -> None:
        """Count rows of a run that were read."""
        size = run.size_bytes * rows // max(1, run.rows)
        self.read += size
        self.moved += size * is_shared


def join_ranges(runs: Iterable[Run]) -> list[Run]:
    """The same runs, with adjacent ranges of one file joined."""
    found: list[Run] = []
    for run in sorted(runs, key=lambda each: (each.file, each.first)):
        if found and found[-1].file == run.file and found[-1].last == run.first:
            found[-1] = replace(found[-1], last=run.last)
        else:
            found.append(run)
    return found


def migration_width(groups: int, rows: int, new_rows: int) -> int:
    """How many of a task's key groups a hybrid migration moves with a batch, for a file with so many of its rows: an
    eighth, or fewer, so that a batch does not take much longer than it does without.
    """
    moved = max(MIGRATION_ROWS, MIGRATION_RATIO * new_rows)
    return max(1, min(-(-groups // MIGRATION_STEPS), groups * moved // max(1, rows)))


def hottest_ranges(runs: Sequence[Run], width: int, rows: np.ndarray) -> tuple[list[Run], list[Run]]:
    """`width` key groups of runs, the ranges for which a batch has most rows, and the rest of the runs."""
    chosen, rest = list[Run](), list(runs)
    while width > 0 and rest:
        ranges = [hottest_range(run, width, rows) for run in rest]
        k = max(range(len(ranges)), key=lambda k: int(rows[ranges[k][0].first : ranges[k][0].last].sum()))
        chosen.append(ranges[k][0])
        rest[k : k + 1] = ranges[k][1]
        width -= chosen[-1].last - chosen[-1].first
    return chosen, rest


def hottest_range(run: Run, width: int, rows: np.ndarray) -> tuple[Run, list[Run]]:
    """The range of `width` key groups of a run for which a batch has most rows, and the rest of the run.

    `rows` counts the batch's rows by key group.
    """
    width = min(width, run.last - run.first)
    rows_in_range = np.convolve(rows[run.first : run.last], np.ones(width, np.int64), "valid")
    first = run.first + int(rows_in_range.argmax())
    rest = (run.within(run.first, first), run.within(first + width, run.last))
    return replace(run, first=first, last=first + width), [each for each in rest if each is not None]


def hash_with_slices(hashes: np.ndarray, slices: np.ndarray) -> np.ndarray:
    """Hashes of keys and time slices; the key group stays that of the key."""
    mixed = (hashes ^ (slices.astype(np.int64).view(np.uint64) * _MIX)) * _MIX
    mixed ^= mixed >> np.uint64(29)
    found: np.ndarray = (hashes & _GROUP_MASK) | (mixed * _MIX >> np.uint64(8))
    return found


# --- files


def write_run(location: Location, blocks: Iterable[pa.RecordBatch], groups: tuple[int, int],
              slices: str | None) -> Run | None:
    """Write blocks, in the order of their hashes, as a run; None if they have no row."""
    some = (block for block in blocks if block.num_rows)
    first = next(some, None)
    if first is None:
        return None
    name = location.new_name(STATE, ".arrow")
    rows, bounds, written_blocks = 0, list[int](), list[Block]()
    with location.create(name) as written:
        output = _SummedOutput(written)
        with pa.ipc.new_file(pa.PythonFile(output, "w"), first.schema) as writer:
            start = 0
            for block in chain([first], some):
                writer.write_batch(block)
                least, greatest = (int(each) >> 56 for each in hashes_of(block)[[0, -1]])
                end, checksum = written.size_bytes, output.take_checksum()
                written_blocks.append(Block(start, end, checksum, least, greatest, COMPILED))
                start = end
                rows += block.num_rows
                if slices is not None:
                    times = np.asarray(as_integers(block.column(slices)))
                    bounds += [int(times.min()), int(times.max())]
            output.begin_tail()
        return Run(name, *groups, rows, written.size_bytes, output.tail_sum, min(bounds, default=None),
                   max(bounds, default=None), tuple(written_blocks))


@cache
def _checksums() -> Checksums:
    return compiled_checksums(Options.make())


def _checksum_of(data: pa.Buffer, kind: int) -> int:
    if kind == CRC32:
        return zlib.crc32(data)
    found = ByteChecksum(_checksums())
    found.update(data)
    return found.digest() >> 1  # integers of manifests have a sign


class _SummedOutput(CountedOutput):
    """A file of a run that is being written: the checksums of its blocks, and the CRC of its tail."""

    def __init__(self, file: CountedOutput) -> None:
        super().__init__(file)
        self._block: ByteChecksum | None = ByteChecksum(_checksums())
        self.tail_sum = 0

    def write(self, data: bytes) -> int:
        if self._block is None:
            self.tail_sum = zlib.crc32(data, self.tail_sum)
        else:
            self._block.update(data)
        return super().write(data)

    def take_checksum(self) -> int:
        """The checksum of the bytes since the block before."""
        assert self._block is not None
        found, self._block = self._block.digest() >> 1, ByteChecksum(_checksums())
        return found

    def begin_tail(self) -> None:
        self._block = None


class _BadChecksum(Exception):
    """The bytes of a file are not those that were written."""


class _RunFile:
    """A mapped file, and its blocks that were verified."""

    def __init__(self, data: pa.Buffer, run: Run, schema: pa.Schema) -> None:
        end = run.blocks[-1].end if run.blocks else 0
        if data.size != run.size_bytes or zlib.crc32(data.slice(end)) != run.sum:
            raise _BadChecksum
        self._data, self._reader = data, pa.ipc.open_file(data)
        self._blocks, self._schema = run.blocks, schema_with_hash(schema)
        self._verified: dict[int, pa.RecordBatch] = {}
        if run.blocks and self._reader.num_record_batches != len(run.blocks):
            raise pa.ArrowInvalid(f"{self._reader.num_record_batches} blocks instead of {len(run.blocks)}")

    def within(self, first: int, last: int, traffic: StateTraffic) -> list[pa.RecordBatch]:
        """Its blocks that may have rows of the key groups [first, last)."""
        return [self._block(k, traffic) for k in range(self._reader.num_record_batches)
                if not self._blocks or (self._blocks[k].first < last and first <= self._blocks[k].last)]

    def _block(self, number: int, traffic: StateTraffic) -> pa.RecordBatch:
        if number not in self._verified:
            if self._blocks:
                traffic.verified += self._blocks[number].end - self._blocks[number].start
                start, end, checksum, _, _, kind = self._blocks[number]
                if _checksum_of(self._data.slice(start, end - start), kind) != checksum:
                    raise _BadChecksum
            self._verified[number] = self._sorted(verified(self._reader.get_batch(number), self._schema), number)
        return self._verified[number]

    def _sorted(self, block: pa.RecordBatch, number: int) -> pa.RecordBatch:
        """The block, if its rows are in the order of their hashes, and of the key groups that the manifest names."""
        hashes = as_numpy(block.column(HASH))
        groups = [int(each) >> 56 for each in hashes[[0, -1]]] if len(hashes) else []
        if (hashes[1:] < hashes[:-1]).any() or (groups and self._blocks and groups != [*self._blocks[number][3:5]]):
            raise pa.ArrowInvalid("its rows are not in the order of their hashes")
        return block


_open_files: OrderedDict[str, _RunFile] = OrderedDict()


def read_run(location: Location, run: Run, schema: pa.Schema,
             traffic: StateTraffic | None = None) -> list[pa.RecordBatch]:
    """The valid rows of a run, memory-mapped, in the order of their hashes: columns of the schema, after the hash.

    A block is verified at its first read, which `traffic` counts.
    """
    name, traffic = location.uri_of(run.file), traffic or StateTraffic()
    try:
        try:
            blocks = _open_run(location, run, name, schema).within(run.first, run.last, traffic)
        except _BadChecksum:
            _open_files.pop(name, None)
            if not location.drop_local_copy(run.file):
                raise
            blocks = _open_run(location, run, name, schema).within(run.first, run.last, traffic)
    except _BadChecksum:
        raise Damaged("a file of a stream's state is not what was written", file=name) from None
    except (OSError, ValueError, IndexError, OverflowError, pa.ArrowException) as error:
        raise Damaged("a file of a stream's state cannot be read", file=name, found=error) from error
    if (run.first, run.last) == (0, KEY_GROUPS):
        return blocks
    start, end = (np.uint64(group << 56) if group < KEY_GROUPS else None for group in (run.first, run.last))
    return [rows for block in blocks if (rows := in_hash_range(block, start, end)).num_rows]


def _open_run(location: Location, run: Run, name: str, schema: pa.Schema) -> _RunFile:
    if name not in _open_files:
        _open_files[name] = _RunFile(location.map_file(run.file), run, schema)
        while len(_open_files) > _MAX_OPEN_FILES:
            _open_files.popitem(last=False)
    _open_files.move_to_end(name)
    return _open_files[name]


def retain_only(location: Location, runs: Iterable[Run]) -> None:
    """Close all files of a stream but these. A removed file occupies disk space while it is mapped, and a long-lived
    worker would hold the files of all batches.
    """
    names = {run.file for run in runs}
    wanted = {location.uri_of(name) for name in names}
    for name in [name for name in _open_files if name.startswith(location.uri_of(STATE)) and name not in wanted]:
        _open_files.pop(name, None)
    location.retain_local_copies(names)


def in_hash_range(block: pa.RecordBatch, start: np.uint64 | None, end: np.uint64 | None) -> pa.RecordBatch:
    """The rows of a block with hashes in [start, end)."""
    found = hashes_of(block)
    first = 0 if start is None else int(np.searchsorted(found, start))
    last = len(found) if end is None else int(np.searchsorted(found, end))
    return block.slice(first, last - first)


def hashes_of(block: pa.RecordBatch) -> np.ndarray:
    return np.asarray(block.column(HASH))


def sort_by_hash(rows: pa.RecordBatch, hashes: np.ndarray) -> pa.RecordBatch:
    """Rows with their hashes, sorted by hash."""
    order = argsort(hashes)
    columns = [pa.array(hashes[order]), *(taken(column, pa.array(order)) for column in rows.columns)]
    return pa.RecordBatch.from_arrays(columns, schema=schema_with_hash(rows.schema))


def argsort(hashes: np.ndarray) -> np.ndarray:
    """Stable argsort of hashes. numpy sorts 16 bits at a time by radix, in half the time of comparing 64 bits; the last
    sort finds nearly sorted input, for which its timsort is linear.
    """
    order = np.argsort((hashes >> np.uint64(32)).astype(np.uint16), kind="stable")
    order = order[np.argsort((hashes >> np.uint64(48)).astype(np.uint16)[order], kind="stable")]
    found: np.ndarray = order[np.argsort(hashes[order], kind="stable")]
    return found


def schema_with_hash(schema: pa.Schema) -> pa.Schema:
    return schema.insert(0, pa.field(HASH, pa.uint64(), False))


def choose_to_merge(sizes: Sequence[int], rows: int) -> set[int]:
    """The numbers of the runs to merge with new rows: the smallest, while they are not much larger than the total."""
    found = set[int]()
    for number in sorted(range(len(sizes)), key=lambda k: sizes[k]):
        if sizes[number] > MERGE_RATIO * rows:
            break
        found.add(number)
        rows += sizes[number]
    return found
