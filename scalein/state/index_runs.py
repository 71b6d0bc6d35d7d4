"""Index files: the offsets of the records of a snapshot, by hash; written once, read a block at a time.

An entry is 64 bits: bits 27 to 55 of the hash of a record's key, and the offset of the record, in words of 8 bytes. The
key group, the top 8 bits of the hash, follows from the position of the entry in the file. So 29 bits distinguish the
keys of a group, and a reader compares the key itself once it has read the record.

After the entries comes a directory with the first hash of each block. The header has the bounds of each group, so
looking up one key needs the few directory blocks of its group, however large the file is.

Invariant: the entries of a group are contiguous and sorted. An entry is a hint: it may point to bytes that hold another
record by now, or none. A reader first checks that the offset is that of a record of the entry's group.

Threads: a writer belongs to one thread. An `IndexRun` may be read by any number of threads at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from threading import Lock
from typing import NamedTuple

import numpy as np

from scalein.errors import Damaged, InternalError, StoreFailed
from scalein.layout import GROUPS
from scalein.state import format
from scalein.state.checksum import Checksums, block_checksums
from scalein.state.run_file import IndexMemory
from scalein.state.segment_images import block_seeds
from scalein.storage.filesystem import FileSystem, Input, aligned_buffer

ENTRY = 8  # bytes
PER_BLOCK = format.BLOCK // ENTRY - 1  # the first word of a block is its checksum
OFFSET_BITS = 35
_LOW_BITS = np.uint64(27)  # of a hash, which are not in an entry
_OFFSET_SHIFT = np.uint64(OFFSET_BITS)
_BOUNDS_AT = format.START.size
_WRITE_BLOCKS = 128  # per write


def make_entries(hashes: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Entries of records with these hashes and offsets, which are multiples of 8 below 2^38."""
    found: np.ndarray = (hashes >> _LOW_BITS << _OFFSET_SHIFT) | (offsets.astype(np.uint64) >> np.uint64(3))
    return found


def entry_offsets(entries: np.ndarray) -> np.ndarray:
    found: np.ndarray = ((entries & np.uint64((1 << OFFSET_BITS) - 1)) << np.uint64(3)).astype(np.int64)
    return found


def _blocks(words: int) -> int:
    """The number of blocks for so many words: entries, or first hashes of the directory."""
    return -(-words // PER_BLOCK)


def _file_bytes(blocks: int) -> int:
    return format.BLOCK * (1 + blocks + _blocks(blocks))


def _sealed_bytes(blocks: int) -> int:
    """The size of a directory before format 3: one sealed area."""
    return format.padded(ENTRY * blocks + format.SEAL)


class IndexWriter:
    """A new index file, durable once `finish` has returned."""

    def __init__(self, fs: FileSystem, id: int, expected: int, checksums: Checksums = block_checksums) -> None:
        self.id = id
        self._fs, self._checksums = fs, checksums
        self._counts = np.zeros(GROUPS, np.int64)
        self._area = aligned_buffer(_WRITE_BLOCKS * format.BLOCK).view(np.uint64).reshape(-1, 1 + PER_BLOCK)
        self._pending: list[np.ndarray] = []  # fewer entries than one write
        self._pending_count = 0
        self._blocks = 0
        self._firsts: list[np.ndarray] = []  # the first entry of each block
        self._output = fs.create(format.index_name(id), _file_bytes(_blocks(expected)))

    def add(self, group: int, entries: np.ndarray) -> None:
        """Add all entries of a group, sorted; groups come in order. The array may be changed afterwards."""
        if self._counts[group:].any() or (entries[1:] < entries[:-1]).any():
            raise InternalError("the entries of an index are not sorted", file=format.index_name(self.id))
        self._counts[group] = len(entries)
        per_write = _WRITE_BLOCKS * PER_BLOCK
        self._pending.append(entries.copy())
        self._pending_count += len(entries)
        if self._pending_count >= per_write:
            entries = np.concatenate(self._pending)
            for start in range(0, len(entries) - per_write + 1, per_write):
                self._write(entries[start : start + per_write])
            self._pending = [entries[len(entries) // per_write * per_write :].copy()]  # a copy: the rest is freed
            self._pending_count = len(self._pending[0])

    def _write(self, entries: np.ndarray) -> None:
        self._write_words(entries)
        self._firsts.append(entries[::PER_BLOCK].copy())

    def _write_words(self, words: np.ndarray) -> None:
        """Append blocks: at most as many as one write has."""
        full, rest = divmod(len(words), PER_BLOCK)
        area = self._area[: full + bool(rest)]
        area[:full, 1:] = words[: full * PER_BLOCK].reshape(-1, PER_BLOCK)
        if rest:
            area[full, 1 : 1 + rest], area[full, 1 + rest :] = words[full * PER_BLOCK :], 0
        area[:, 0] = 0
        offset = format.BLOCK * (1 + self._blocks)
        area[:, 0] = self._checksums(area.view(np.uint8), block_seeds(self.id, offset, len(area)))
        self._output.write(offset, area.reshape(-1).view(np.uint8))
        self._blocks += len(area)

    def finish(self) -> None:
        """Write the remaining entries and the directory, sync and close the file."""
        if self._pending_count:
            self._write(np.concatenate(self._pending))
        bounds = np.concatenate(([0], self._counts.cumsum())).astype("<u8")
        firsts = _firsts(np.concatenate([np.zeros(0, np.uint64), *self._firsts]), bounds)
        per_write = _WRITE_BLOCKS * PER_BLOCK
        for start in range(0, len(firsts), per_write):
            self._write_words(firsts[start : start + per_write])
        header = aligned_buffer(format.BLOCK)
        header[:] = 0
        format.START.pack_into(header.data, 0, format.INDEX_MAGIC, format.VERSION, 0, self.id)
        header[_BOUNDS_AT:][: bounds.nbytes] = bounds.view(np.uint8)
        format.seal(header, self.id, self._checksums)
        self._output.write(0, header)
        self._output.sync()
        self._output.close()

    def abandon(self) -> None:
        """Close the file and remove it if possible; otherwise the next start removes it."""
        self._output.close()
        with suppress(StoreFailed):
            self._fs.remove(format.index_name(self.id))


def _firsts(entries: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """The hashes of the first entries of blocks, with their lowest bits zero."""
    numbers = np.arange(len(entries), dtype=np.uint64) * np.uint64(PER_BLOCK)
    groups = (bounds.searchsorted(numbers, "right") - 1).astype(np.uint64)
    bits = entries >> _OFFSET_SHIFT << _LOW_BITS
    found: np.ndarray = groups << np.uint64(56) | bits
    return found


class IndexRead(NamedTuple):
    """Blocks of an index to be read, and pairs of a block and a hash that it may hold.

    Blocks of the directory have no such pairs.
    """

    source: IndexRun
    numbers: np.ndarray  # of the blocks in the file
    block: np.ndarray  # of each pair, the position of its block in `numbers`
    hashes: np.ndarray

    @property
    def inputs(self) -> Sequence[Input]:
        return [self.source.input]

    @property
    def input_index(self) -> np.ndarray:
        return np.zeros(len(self.numbers), np.int64)

    @property
    def offsets(self) -> np.ndarray:
        return (1 + self.numbers) * format.BLOCK

    @property
    def sizes(self) -> np.ndarray:
        return np.full(len(self.numbers), format.BLOCK)


class IndexRun:
    """An index file that is read. Raises `Damaged` or `NewerFormat` unless its header and size are valid."""

    def __init__(self, fs: FileSystem, id: int, checksums: Checksums = block_checksums,
                 index_memory: IndexMemory | None = None) -> None:  # fmt: skip
        self.id = id
        self.name = fs.path_of(format.index_name(id))
        self._checksums, self._index_memory, self._directory_memory = checksums, index_memory or IndexMemory(), 0
        self._lock = Lock()
        self.input = fs.open(format.index_name(id))
        try:
            header = self.input.read(0, format.BLOCK)
            version = format.START.unpack_from(header.data)[1]
            format.check_start(header, format.INDEX_MAGIC, id, self.name, "an index", checksums)
            bounds = header[_BOUNDS_AT:][: ENTRY * (GROUPS + 1)].view("<u8")
            self.blocks = _blocks(int(bounds[-1]))
            self._is_sealed = version < 3
            size = format.BLOCK * (1 + self.blocks) + _sealed_bytes(self.blocks) if self._is_sealed else (
                _file_bytes(self.blocks))  # fmt: skip
            if bounds[0] or (bounds[1:] < bounds[:-1]).any() or size != self.input.size:
                raise self._damaged(_BOUNDS_AT, f"{bounds[-1]} entries in {self.input.size} bytes")
            self.bounds = bounds.astype(np.int64)
            self._first_blocks = -(-self.bounds // PER_BLOCK)  # of each group, the first that starts within it
            self._firsts = aligned_buffer(ENTRY * self.blocks).view("<u8")  # the directory, where it is loaded
            self._is_loaded = np.zeros(_blocks(self.blocks), bool)
        except BaseException:
            self.close()
            raise

    @property
    def count(self) -> int:
        return int(self.bounds[-1])

    def directory_reads(self, hashes: np.ndarray, most: int) -> list[IndexRead]:
        """The directory blocks to load before `entry_reads` of some hashes: reads of at most so many blocks, or one."""
        groups = np.unique(hashes >> np.uint64(56)).astype(np.int64)
        first, last = self._first_blocks[groups], self._first_blocks[groups + 1]
        first, last = first[first < last] // PER_BLOCK, (last[first < last] - 1) // PER_BLOCK + 1
        with self._lock:
            if self._is_sealed and len(first) and not self._is_loaded[0]:
                self._add_firsts(0, self._read_sealed(), _sealed_bytes(self.blocks))
            steps = np.zeros(len(self._is_loaded) + 1, np.int64)
            np.add.at(steps, first, 1)
            np.subtract.at(steps, last, 1)
            numbers = np.flatnonzero((steps.cumsum()[:-1] > 0) & ~self._is_loaded) + self.blocks
        nothing = np.zeros(0, np.int64)
        return [IndexRead(self, numbers[start : start + max(1, most)], nothing, nothing.view(np.uint64))
                for start in range(0, len(numbers), max(1, most))]

    def add_directory_blocks(self, read: IndexRead, area: np.ndarray) -> None:
        """Load directory blocks that were read."""
        words = self._verified(area, read.offsets).reshape(-1, 1 + PER_BLOCK)[:, 1:]
        with self._lock:
            for number, block in zip((read.numbers - self.blocks).tolist(), words, strict=True):
                self._add_firsts(number, block, format.BLOCK)

    def _add_firsts(self, first: int, words: np.ndarray, size_bytes: int) -> None:
        """Load the first hashes from one directory block on."""
        if not self._is_loaded[first]:  # another thread may have loaded it meanwhile
            into = self._firsts[first * PER_BLOCK :]
            into[: len(words)] = words[: len(into)]
            self._is_loaded[first : first + _blocks(len(words))] = True
            self._index_memory.add(size_bytes)
            self._directory_memory += size_bytes

    def _read_sealed(self) -> np.ndarray:
        at = format.BLOCK * (1 + self.blocks)
        data = self.input.read(at, self.input.size - at)
        self.input.drop_cache(at)
        format.check_seal(data, self.id, self.name, "an index's directory", at, self._checksums)
        firsts: np.ndarray = data[: ENTRY * self.blocks].view("<u8")
        return firsts

    def _read_directory(self) -> np.ndarray:
        """The whole directory, from the disk."""
        if self._is_sealed:
            return self._read_sealed()
        return self._read_words(self.blocks, self.blocks + len(self._is_loaded))[: self.blocks]

    def _read_words(self, first: int, last: int) -> np.ndarray:
        """The words of the blocks [first, last), read past the page cache."""
        area = aligned_buffer((last - first) * format.BLOCK)
        offset = format.BLOCK * (1 + first)
        self.input.read_into(offset, area.data, direct=True)
        words = self._verified(area, offset + np.arange(last - first) * format.BLOCK)
        found: np.ndarray = words.reshape(-1, 1 + PER_BLOCK)[:, 1:].reshape(-1)
        return found

    def entry_reads(self, hashes: np.ndarray, most: int) -> list[IndexRead]:
        """The blocks of entries that may hold some sorted hashes whose directory blocks are loaded: reads of at most so
        many blocks, or one."""
        groups = (hashes >> np.uint64(56)).astype(np.int64)
        has_entries = np.flatnonzero(self.bounds[groups] < self.bounds[groups + 1])
        hashes, groups = hashes[has_entries], groups[has_entries]
        prefixes = hashes >> _LOW_BITS
        low, high = self._first_blocks[groups], self._first_blocks[groups + 1]
        last = _bisect(self._firsts, low, high, prefixes + np.uint64(1), _LOW_BITS)
        first = _bisect(self._firsts, low, last, prefixes, _LOW_BITS)
        first = np.maximum(first - 1, 0)  # a block may end with the hash that the next one starts with
        counts = np.maximum(last - first, 0)
        ends = counts.cumsum()
        blocks = np.arange(int(counts.sum())) + np.repeat(first + counts - ends, counts)
        numbers, block = np.unique(blocks, return_inverse=True)
        order = np.argsort(block, kind="stable")
        block, pairs = block[order], np.repeat(hashes, counts)[order]
        reads = []
        for start in range(0, len(numbers), max(1, most)):
            low, high = block.searchsorted((start, start + max(1, most))).tolist()
            reads.append(IndexRead(self, numbers[start : start + max(1, most)], block[low:high] - start,
                                   pairs[low:high]))
        return reads

    def matches(self, read: IndexRead, area: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The offsets of the entries of requested hashes, and the hash of each, from blocks that were read."""
        words = self._verified(area, read.offsets)
        groups = (read.hashes >> np.uint64(56)).astype(np.int64)
        bits = read.hashes >> _LOW_BITS & np.uint64((1 << 64 - OFFSET_BITS) - 1)
        before = read.numbers[read.block] * PER_BLOCK
        starts = read.block * (1 + PER_BLOCK) + 1
        least = starts + np.clip(self.bounds[groups] - before, 0, PER_BLOCK)
        most = starts + np.clip(self.bounds[groups + 1] - before, 0, PER_BLOCK)
        low = _bisect(words, least, most, bits, _OFFSET_SHIFT)
        counts = _bisect(words, low, most, bits + np.uint64(1), _OFFSET_SHIFT) - low
        nth = np.arange(int(counts.sum())) - np.repeat(counts.cumsum() - counts, counts)
        return entry_offsets(words[np.repeat(low, counts) + nth]), np.repeat(read.hashes, counts)

    def entries(self, first: int, last: int) -> np.ndarray:
        """The entries of the groups [first, last), read past the page cache."""
        low, high = int(self.bounds[first]), int(self.bounds[last])
        if low == high:
            return np.zeros(0, np.uint64)
        block = low // PER_BLOCK
        return self._read_words(block, _blocks(high))[low - block * PER_BLOCK : high - block * PER_BLOCK]

    def verify(self) -> None:
        """Read the whole file; `Damaged` if a byte is not what was written, or entries are not sorted."""
        firsts = self._read_directory()
        seen = 0
        for group in range(GROUPS):
            entries = self.entries(group, group + 1)
            start = int(self.bounds[group])
            blocks = np.arange(self._first_blocks[group], self._first_blocks[group + 1])
            heads = np.uint64(group << 56) | entries[blocks * PER_BLOCK - start] >> _OFFSET_SHIFT << _LOW_BITS
            if (entries[1:] < entries[:-1]).any() or (heads != firsts[blocks]).any():
                raise self._damaged(format.BLOCK, f"unsorted entries of group {group}")
            seen += len(blocks)
        if seen != self.blocks:
            raise self._damaged(format.BLOCK, f"{seen} of {self.blocks} blocks")

    def close(self) -> None:
        self.input.close()
        with self._lock:
            self._index_memory.add(-self._directory_memory)
            self._directory_memory = 0
            self._firsts = np.zeros(0, np.uint64)

    def _verified(self, area: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """The words of blocks, whose checksums are verified and set to zero."""
        words = area.view("<u8")
        stored = words[:: 1 + PER_BLOCK].copy()
        words[:: 1 + PER_BLOCK] = 0
        sums = self._checksums(area.reshape(-1, format.BLOCK), np.uint64(self.id) ^ offsets.astype(np.uint64))
        if len(wrong := np.flatnonzero(sums != stored)):
            at = int(wrong[0])
            raise format.wrong_checksum(self.name, "a block", int(offsets[at]), int(stored[at]), int(sums[at]))
        return words

    def _damaged(self, offset: int, found: str) -> Damaged:
        return Damaged("an index of the store is inconsistent", file=self.name, offset=offset, found=found)


def _bisect(words: np.ndarray, low: np.ndarray, high: np.ndarray, bits: np.ndarray, shift: np.uint64) -> np.ndarray:
    """The first of the sorted words [low, high) that, shifted right, is at least `bits`; many ranges at once."""
    low, high = low.copy(), high.copy()
    while (is_open := low < high).any():
        middle = (low + high) // 2
        is_less = words[np.minimum(middle, len(words) - 1)] >> shift < bits
        low = np.where(is_open & is_less, middle + 1, low)
        high = np.where(is_open & ~is_less, middle, high)
    return low
