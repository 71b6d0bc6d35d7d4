"""Index files: where a piece's records are, by their hashes; written once, read a block at a time.

An entry is 64 bits: bits 27 to 55 of the hash of a record's key, and the record's place in its piece, in words of 8
bytes. The group, the top 8 bits of the hash, is known by where in the file the entry lies. So 29 bits tell the keys of
a group apart, and a reader compares the key itself once it has the record.

Behind the entries comes a directory: what each of their blocks begins with. Where a group's blocks are is known from
the header, so one key needs the few blocks of the directory that tell of its group, however large the file is.

Invariant: entries of a group lie together, sorted. An entry is a hint: it may lead to bytes that hold another record
by now, or none. Whoever follows it asks first whether its place is that of a record of the entry's group.

Threads: a writer belongs to one thread. An `IndexRun` may be read by any number at once.
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
from scalein.state.run_file import Held
from scalein.state.segment_images import block_seeds
from scalein.storage.filesystem import FileSystem, Input, aligned_buffer

ENTRY = 8
PER_BLOCK = format.BLOCK // ENTRY - 1  # the first word of a block is its checksum
PLACE_BITS = 35
_LOW_BITS = np.uint64(27)  # of a hash, that are in no entry
_PLACES = np.uint64(PLACE_BITS)
_BORDERS_AT = format.START.size
_WRITE_BLOCKS = 128  # that are written at once


def entries_of(hashes: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Entries of records with these hashes, at these places: multiples of 8, below 2^38."""
    found: np.ndarray = (hashes >> _LOW_BITS << _PLACES) | (places.astype(np.uint64) >> np.uint64(3))
    return found


def places_of(entries: np.ndarray) -> np.ndarray:
    found: np.ndarray = ((entries & np.uint64((1 << PLACE_BITS) - 1)) << np.uint64(3)).astype(np.int64)
    return found


def _blocks(words: int) -> int:
    """That have so many words, entries or of the directory."""
    return -(-words // PER_BLOCK)


def _file_bytes(blocks: int) -> int:
    return format.BLOCK * (1 + blocks + _blocks(blocks))


def _sealed_bytes(blocks: int) -> int:
    """Of a directory as it was before format 3: one sealed area."""
    return format.padded(ENTRY * blocks + format.SEAL)


class IndexWriter:
    """A new index file. It is on the disk once `finish` returned."""

    def __init__(self, fs: FileSystem, id: int, expected: int, checksums: Checksums = block_checksums) -> None:
        self.id = id
        self._fs, self._checksums = fs, checksums
        self._counts = np.zeros(GROUPS, np.int64)
        self._area = aligned_buffer(_WRITE_BLOCKS * format.BLOCK).view(np.uint64).reshape(-1, 1 + PER_BLOCK)
        self._waiting: list[np.ndarray] = []  # less than what is written at once
        self._waiting_count = 0
        self._blocks = 0
        self._firsts: list[np.ndarray] = []  # entries
        self._output = fs.create(format.index_name(id), _file_bytes(_blocks(expected)))

    def add(self, group: int, entries: np.ndarray) -> None:
        """All entries of a group, sorted; groups come in order. They may be changed once this returned."""
        if self._counts[group:].any() or (entries[1:] < entries[:-1]).any():
            raise InternalError("the entries of an index are in no order", file=format.index_name(self.id))
        self._counts[group] = len(entries)
        together = _WRITE_BLOCKS * PER_BLOCK
        self._waiting.append(entries.copy())
        self._waiting_count += len(entries)
        if self._waiting_count >= together:
            entries = np.concatenate(self._waiting)
            for start in range(0, len(entries) - together + 1, together):
                self._write(entries[start : start + together])
            self._waiting = [entries[len(entries) // together * together :].copy()]  # and not the rest of them
            self._waiting_count = len(self._waiting[0])

    def _write(self, entries: np.ndarray) -> None:
        self._write_words(entries)
        self._firsts.append(entries[::PER_BLOCK].copy())

    def _write_words(self, words: np.ndarray) -> None:
        """Blocks behind those that were written; at most as many as are written at once."""
        whole, rest = divmod(len(words), PER_BLOCK)
        area = self._area[: whole + bool(rest)]
        area[:whole, 1:] = words[: whole * PER_BLOCK].reshape(-1, PER_BLOCK)
        if rest:
            area[whole, 1 : 1 + rest], area[whole, 1 + rest :] = words[whole * PER_BLOCK :], 0
        area[:, 0] = 0
        offset = format.BLOCK * (1 + self._blocks)
        area[:, 0] = self._checksums(area.view(np.uint8), block_seeds(self.id, offset, len(area)))
        self._output.write(offset, area.reshape(-1).view(np.uint8))
        self._blocks += len(area)

    def finish(self) -> None:
        """Write what is left and the directory, sync and close the file."""
        if self._waiting_count:
            self._write(np.concatenate(self._waiting))
        borders = np.concatenate(([0], self._counts.cumsum())).astype("<u8")
        firsts = _firsts(np.concatenate([np.zeros(0, np.uint64), *self._firsts]), borders)
        together = _WRITE_BLOCKS * PER_BLOCK
        for start in range(0, len(firsts), together):
            self._write_words(firsts[start : start + together])
        header = aligned_buffer(format.BLOCK)
        header[:] = 0
        format.START.pack_into(header.data, 0, format.INDEX_MAGIC, format.VERSION, 0, self.id)
        header[_BORDERS_AT:][: borders.nbytes] = borders.view(np.uint8)
        format.seal(header, self.id, self._checksums)
        self._output.write(0, header)
        self._output.sync()
        self._output.close()

    def abandon(self) -> None:
        """Close the file and remove it if that can be done; the next start removes what is left."""
        self._output.close()
        with suppress(StoreFailed):
            self._fs.remove(format.index_name(self.id))


def _firsts(entries: np.ndarray, borders: np.ndarray) -> np.ndarray:
    """Hashes without their lowest bits, of the first entry of each block."""
    numbers = np.arange(len(entries), dtype=np.uint64) * np.uint64(PER_BLOCK)
    groups = (borders.searchsorted(numbers, "right") - 1).astype(np.uint64)
    bits = entries >> _PLACES << _LOW_BITS
    found: np.ndarray = groups << np.uint64(56) | bits
    return found


class Asked(NamedTuple):
    """Blocks of an index, to be read one behind the other, and pairs of one of them and a hash that it may have.

    Blocks of the directory have no such pairs.
    """

    run: IndexRun
    numbers: np.ndarray  # of the blocks in the file
    block: np.ndarray  # of each pair, which of these
    hashes: np.ndarray

    @property
    def inputs(self) -> Sequence[Input]:
        return [self.run.input]

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
    """An index file that is read. Raises `Damaged` or `NewerFormat` unless header and size are in order."""

    def __init__(self, fs: FileSystem, id: int, checksums: Checksums = block_checksums,
                 held: Held | None = None) -> None:  # fmt: skip
        self.id = id
        self.name = fs.path_of(format.index_name(id))
        self._checksums, self._held, self._held_bytes = checksums, held or Held(), 0
        self._learning = Lock()
        self.input = fs.open(format.index_name(id))
        try:
            header = self.input.read(0, format.BLOCK)
            version = format.START.unpack_from(header.data)[1]
            format.check_start(header, format.INDEX_MAGIC, id, self.name, "an index", checksums)
            borders = header[_BORDERS_AT:][: ENTRY * (GROUPS + 1)].view("<u8")
            self.blocks = _blocks(int(borders[-1]))
            self._is_sealed = version < 3
            size = format.BLOCK * (1 + self.blocks) + _sealed_bytes(self.blocks) if self._is_sealed else (
                _file_bytes(self.blocks))  # fmt: skip
            if borders[0] or (borders[1:] < borders[:-1]).any() or size != self.input.size:
                raise self._damaged(_BORDERS_AT, f"{borders[-1]} entries in {self.input.size} bytes")
            self.borders = borders.astype(np.int64)
            self._begins = -(-self.borders // PER_BLOCK)  # of each group, the first block that does not begin before it
            self._firsts = aligned_buffer(ENTRY * self.blocks).view("<u8")  # the directory, as far as it is known
            self._is_known = np.zeros(_blocks(self.blocks), bool)
        except BaseException:
            self.close()
            raise

    @property
    def count(self) -> int:
        return int(self.borders[-1])

    def unknown(self, hashes: np.ndarray, most: int) -> list[Asked]:
        """What to read and `learn` before some hashes can be `asked` for: parts of at most so many blocks, or one."""
        groups = np.unique(hashes >> np.uint64(56)).astype(np.int64)
        first, last = self._begins[groups], self._begins[groups + 1]
        first, last = first[first < last] // PER_BLOCK, (last[first < last] - 1) // PER_BLOCK + 1
        with self._learning:
            if self._is_sealed and len(first) and not self._is_known[0]:
                self._note(0, self._read_sealed(), _sealed_bytes(self.blocks))
            steps = np.zeros(len(self._is_known) + 1, np.int64)
            np.add.at(steps, first, 1)
            np.subtract.at(steps, last, 1)
            numbers = np.flatnonzero((steps.cumsum()[:-1] > 0) & ~self._is_known) + self.blocks
        nothing = np.zeros(0, np.int64)
        return [Asked(self, numbers[start : start + max(1, most)], nothing, nothing.view(np.uint64))
                for start in range(0, len(numbers), max(1, most))]

    def learn(self, asked: Asked, area: np.ndarray) -> None:
        """Blocks of the directory that were read."""
        words = self._verified(area, asked.offsets).reshape(-1, 1 + PER_BLOCK)[:, 1:]
        with self._learning:
            for number, block in zip((asked.numbers - self.blocks).tolist(), words, strict=True):
                self._note(number, block, format.BLOCK)

    def _note(self, first: int, words: np.ndarray, size_bytes: int) -> None:
        """Keep what the directory says from one of its blocks on."""
        if not self._is_known[first]:  # nobody else learned it meanwhile
            into = self._firsts[first * PER_BLOCK :]
            into[: len(words)] = words[: len(into)]
            self._is_known[first : first + _blocks(len(words))] = True
            self._held.add(size_bytes)
            self._held_bytes += size_bytes

    def _read_sealed(self) -> np.ndarray:
        at = format.BLOCK * (1 + self.blocks)
        data = self.input.read(at, self.input.size - at)
        self.input.drop_cache(at)
        format.check_seal(data, self.id, self.name, "an index's directory", at, self._checksums)
        firsts: np.ndarray = data[: ENTRY * self.blocks].view("<u8")
        return firsts

    def _read_directory(self) -> np.ndarray:
        """All of it, from the disk."""
        if self._is_sealed:
            return self._read_sealed()
        return self._read_words(self.blocks, self.blocks + len(self._is_known))[: self.blocks]

    def _read_words(self, first: int, last: int) -> np.ndarray:
        """The words of the blocks [first, last), read past the page cache."""
        area = aligned_buffer((last - first) * format.BLOCK)
        offset = format.BLOCK * (1 + first)
        self.input.read_into(offset, area.data, direct=True)
        words = self._verified(area, offset + np.arange(last - first) * format.BLOCK)
        found: np.ndarray = words.reshape(-1, 1 + PER_BLOCK)[:, 1:].reshape(-1)
        return found

    def asked(self, hashes: np.ndarray, most: int) -> list[Asked]:
        """Where some sorted hashes may be, once nothing is `unknown`: parts of at most so many blocks, or one."""
        groups = (hashes >> np.uint64(56)).astype(np.int64)
        some = np.flatnonzero(self.borders[groups] < self.borders[groups + 1])
        hashes, groups = hashes[some], groups[some]
        prefixes = hashes >> _LOW_BITS
        low, high = self._begins[groups], self._begins[groups + 1]
        last = _bisected(self._firsts, low, high, prefixes + np.uint64(1), _LOW_BITS)
        first = _bisected(self._firsts, low, last, prefixes, _LOW_BITS)
        first = np.maximum(first - 1, 0)  # a block may end with what the next begins
        counts = np.maximum(last - first, 0)
        ends = counts.cumsum()
        blocks = np.arange(int(counts.sum())) + np.repeat(first + counts - ends, counts)
        numbers, block = np.unique(blocks, return_inverse=True)
        order = np.argsort(block, kind="stable")
        block, pairs = block[order], np.repeat(hashes, counts)[order]
        found = []
        for start in range(0, len(numbers), max(1, most)):
            low, high = block.searchsorted((start, start + max(1, most))).tolist()
            found.append(Asked(self, numbers[start : start + max(1, most)], block[low:high] - start, pairs[low:high]))
        return found

    def found(self, asked: Asked, area: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Places that entries of asked hashes lead to, and the hash of each; from the bytes of the blocks."""
        words = self._verified(area, asked.offsets)
        groups = (asked.hashes >> np.uint64(56)).astype(np.int64)
        bits = asked.hashes >> _LOW_BITS & np.uint64((1 << 64 - PLACE_BITS) - 1)
        before = asked.numbers[asked.block] * PER_BLOCK
        begins = asked.block * (1 + PER_BLOCK) + 1
        least = begins + np.clip(self.borders[groups] - before, 0, PER_BLOCK)
        most = begins + np.clip(self.borders[groups + 1] - before, 0, PER_BLOCK)
        low = _bisected(words, least, most, bits, _PLACES)
        counts = _bisected(words, low, most, bits + np.uint64(1), _PLACES) - low
        nth = np.arange(int(counts.sum())) - np.repeat(counts.cumsum() - counts, counts)
        return places_of(words[np.repeat(low, counts) + nth]), np.repeat(asked.hashes, counts)

    def entries(self, first: int, last: int) -> np.ndarray:
        """Those of the groups [first, last), read past the page cache."""
        low, high = int(self.borders[first]), int(self.borders[last])
        if low == high:
            return np.zeros(0, np.uint64)
        begin = low // PER_BLOCK
        return self._read_words(begin, _blocks(high))[low - begin * PER_BLOCK : high - begin * PER_BLOCK]

    def verify(self) -> None:
        """Read all; `Damaged` if a byte of the file is not what was written, or its entries are in no order."""
        firsts = self._read_directory()
        seen = 0
        for group in range(GROUPS):
            entries = self.entries(group, group + 1)
            begin = int(self.borders[group])
            where = np.arange(self._begins[group], self._begins[group + 1])
            heads = np.uint64(group << 56) | entries[where * PER_BLOCK - begin] >> _PLACES << _LOW_BITS
            if (entries[1:] < entries[:-1]).any() or (heads != firsts[where]).any():
                raise self._damaged(format.BLOCK, f"entries of group {group} in no order")
            seen += len(where)
        if seen != self.blocks:
            raise self._damaged(format.BLOCK, f"{seen} of {self.blocks} blocks")

    def close(self) -> None:
        self.input.close()
        with self._learning:
            self._held.add(-self._held_bytes)
            self._held_bytes = 0
            self._firsts = np.zeros(0, np.uint64)

    def _verified(self, area: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """The words of blocks whose checksums are right, and zero."""
        words = area.view("<u8")
        stored = words[:: 1 + PER_BLOCK].copy()
        words[:: 1 + PER_BLOCK] = 0
        sums = self._checksums(area.reshape(-1, format.BLOCK), np.uint64(self.id) ^ offsets.astype(np.uint64))
        if len(wrong := np.flatnonzero(sums != stored)):
            at = int(wrong[0])
            raise format.wrong_checksum(self.name, "a block", int(offsets[at]), int(stored[at]), int(sums[at]))
        return words

    def _damaged(self, offset: int, found: str) -> Damaged:
        return Damaged("an index of a store contradicts itself", file=self.name, offset=offset, found=found)


def _bisected(words: np.ndarray, low: np.ndarray, high: np.ndarray, bits: np.ndarray, shift: np.uint64) -> np.ndarray:
    """The first of the sorted words [low, high) that, without their lowest bits, are at least these; all at once."""
    low, high = low.copy(), high.copy()
    while (is_open := low < high).any():
        middle = (low + high) // 2
        is_less = words[np.minimum(middle, len(words) - 1)] >> shift < bits
        low = np.where(is_open & is_less, middle + 1, low)
        high = np.where(is_open & ~is_less, middle, high)
    return low
