"""RunFile: reads a run, which has records sorted by the hash of their key and is written once (`run_writer.py`).

Invariant: a run never changes after `finish`. Records of one hash are contiguous, in as many adjacent blocks as they
need. Nothing that was read is returned before checksums, counts and offsets are verified (see `run_blocks.py`), and no
size that a file states is used before it is checked against the size of the file.

The directory, the first hash of each block, takes 16 bytes in memory for 4 KiB on disk. It and the Bloom filter are
read on first use; scans and merges do not load the filter.

Threads: a `RunFile` may be read by any number of threads at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock
from typing import NamedTuple, NoReturn

import numpy as np

from scalein.errors import Damaged
from scalein.state import format
from scalein.state.bloom import may_contain
from scalein.state.checksum import Checksums, block_checksums
from scalein.state.run_blocks import Origin, RecordShape, check_blocks, unpack
from scalein.state.run_writer import HEADER, MAX_SPEC_BYTES, SPEC_AT, directory_bytes
from scalein.storage.filesystem import FileSystem, aligned_buffer

READ_BYTES = 4 << 20  # per step of a scan


class Records(NamedTuple):
    """Records from a run. Their long cells hold addresses in `texts`, which must outlive them."""

    records: np.ndarray  # (n, stride) u8
    texts: np.ndarray | None


class CandidateBlocks(NamedTuple):
    """Blocks of a run that may hold some hashes, in order and each once, and pairs of a block and a hash."""

    offsets: np.ndarray  # of the blocks
    sizes: np.ndarray
    block: np.ndarray  # of each pair, the index of its block; ascending
    hashes: np.ndarray


class _LoadedIndex(NamedTuple):
    """The part of a run that is in memory. The filter is most of it, and merges do not need it."""

    firsts: np.ndarray  # the first hash of each block
    starts: np.ndarray  # the offset of each block, and of the end
    filter: np.ndarray | None

    @property
    def size_bytes(self) -> int:
        return self.firsts.nbytes + self.starts.nbytes + (0 if self.filter is None else self.filter.nbytes)


class IndexMemory:
    """Total memory of the directories and filters of some files. Any thread may add to it."""

    def __init__(self) -> None:
        self.bytes = 0
        self._lock = Lock()

    def add(self, size: int) -> None:
        with self._lock:
            self.bytes += size


class RunFile:
    """A run file. Raises `Damaged` or `NewerFormat` unless its header and size are valid."""

    def __init__(self, fs: FileSystem, id: int, stride: int, text_cells: tuple[int, ...] = (),
                 checksums: Checksums = block_checksums, index_memory: IndexMemory | None = None) -> None:  # fmt: skip
        self.id = id
        self._index_memory = index_memory or IndexMemory()
        self._loading = Lock()
        self._loaded: _LoadedIndex | None = None
        self.name = fs.path_of(format.run_name(id))
        self._shape = RecordShape(stride, text_cells)
        self._checksums = checksums
        self.input = fs.open(format.run_name(id))
        try:
            self._read_header(stride)
        except BaseException:
            self.close()
            raise

    def _read_header(self, stride: int) -> None:
        header = self.input.read(0, format.BLOCK)
        found_stride = format.check_start(header, format.RUN_MAGIC, self.id, self.name, "a run", self._checksums)
        (self.record_count, self.block_count, self._directory_at, size, self.least_hash, self.greatest_hash,
         self._filter_bytes, spec_bytes) = HEADER.unpack_from(header.data, format.START.size)  # fmt: skip
        if found_stride != stride:
            raise self._damaged(12, f"records of {found_stride} bytes", f"records of {stride} bytes")
        if self._filter_bytes & (self._filter_bytes - 1) or self._filter_bytes > self.input.size:
            raise self._damaged(72, f"a filter of {self._filter_bytes} bytes", "a power of two")
        expected = directory_bytes(self.block_count, self._filter_bytes)
        if self._directory_at % format.BLOCK or size != expected or self._directory_at + size != self.input.size:
            raise self._damaged(format.START.size, f"{self.block_count} blocks, {size} bytes of directory at "
                                f"{self._directory_at}", f"a file of {self.input.size} bytes")  # fmt: skip
        if spec_bytes > MAX_SPEC_BYTES:
            raise self._damaged(SPEC_AT - 4, f"{spec_bytes} bytes", f"at most {MAX_SPEC_BYTES}")
        try:
            self.spec = header[SPEC_AT : SPEC_AT + spec_bytes].tobytes().decode()
        except UnicodeDecodeError as error:
            raise self._damaged(SPEC_AT, str(error), "text in UTF-8") from error

    @property
    def size_bytes(self) -> int:
        return self.input.size

    @property
    def index_bytes(self) -> int:
        """Memory of its directory and filter, once they are loaded."""
        return int(16 * self.block_count + 8 + self._filter_bytes)

    @property
    def is_loaded(self) -> bool:
        """Whether directory and filter are in memory."""
        return self._loaded is not None and self._loaded.filter is not None

    def load(self) -> None:
        """Load directory and filter."""
        self._index(with_filter=True)

    @property
    def _directory(self) -> tuple[np.ndarray, np.ndarray]:
        return self._index(with_filter=False)[:2]

    def _index(self, with_filter: bool) -> _LoadedIndex:
        """Loaded on first use."""
        with self._loading:
            if self._loaded is None or (with_filter and self._loaded.filter is None):
                before = 0 if self._loaded is None else self._loaded.size_bytes
                self._loaded = self._read_index(with_filter)
                self._index_memory.add(self._loaded.size_bytes - before)
            return self._loaded

    def _read_index(self, with_filter: bool) -> _LoadedIndex:
        data = self.input.read(self._directory_at, self.input.size - self._directory_at)
        self.input.drop_cache(self._directory_at)
        format.check_seal(data, self.id, self.name, "a run's directory", self._directory_at, self._checksums)
        count = self.block_count
        firsts = data[: 8 * count].view("<u8").copy()
        starts = data[8 * count :][: 4 * count + 4].view("<u4").astype(np.int64) * format.BLOCK
        if starts[0] != format.BLOCK or starts[-1] != self._directory_at or (np.diff(starts) <= 0).any():
            raise self._damaged(self._directory_at, "blocks that are not adjacent", "adjacent blocks")
        if count and (firsts[0] != self.least_hash or (firsts[1:] < firsts[:-1]).any()):
            raise self._damaged(self._directory_at, "unsorted hashes", "sorted hashes")
        filter = data[12 * count + 4 :][: self._filter_bytes]
        return _LoadedIndex(firsts, starts, filter.copy() if with_filter else None)

    def may_have(self, hashes: np.ndarray) -> np.ndarray:
        """Which of the hashes the run may have; without a filter, all."""
        filter = self._index(with_filter=True).filter
        assert filter is not None
        return may_contain(filter, hashes) if len(filter) else np.ones(len(hashes), bool)

    def candidate_blocks(self, hashes: np.ndarray) -> CandidateBlocks:
        """The blocks that may hold one of these sorted hashes."""
        firsts, starts, _ = self._index(with_filter=True)
        inside = hashes[hashes.searchsorted(np.uint64(self.least_hash)) :]
        inside = inside[: inside.searchsorted(np.uint64(self.greatest_hash), "right")]
        inside = inside[self.may_have(inside)]
        if not len(inside) or not len(firsts):
            nothing = np.zeros(0, np.int64)
            return CandidateBlocks(nothing, nothing, nothing, nothing.view(np.uint64))
        last = firsts.searchsorted(inside, "right") - 1
        begins = np.flatnonzero(firsts[last] == inside)
        if len(begins):  # if a block begins with the hash, the blocks before it may end with it
            counts = np.ones(len(last), np.int64)
            counts[begins] = last[begins] - np.maximum(firsts.searchsorted(inside[begins], "left") - 1, 0) + 1
            ends = counts.cumsum()
            last = np.arange(int(ends[-1])) + np.repeat(last + 1 - ends, counts)
            inside = np.repeat(inside, counts)
        is_new = np.ones(len(last), bool)
        is_new[1:] = last[1:] != last[:-1]
        numbers = last[is_new]
        return CandidateBlocks(starts[numbers], starts[numbers + 1] - starts[numbers], is_new.cumsum() - 1, inside)

    def blocks_in_range(self, least: int, greatest: int) -> tuple[int, int]:
        """The blocks [first, last) that may hold a hash of a range."""
        firsts, _ = self._directory
        if greatest < self.least_hash or least > self.greatest_hash or not len(firsts):
            return 0, 0
        first = max(0, int(firsts.searchsorted(np.uint64(least), "left")) - 1)
        return first, int(firsts.searchsorted(np.uint64(greatest), "right"))

    def blocks_in_ranges(self, leasts: np.ndarray, greatests: np.ndarray) -> np.ndarray:
        """The blocks that may hold a hash of each range. Rows: the first, the end, their offset in the file, their
        size in bytes."""
        firsts, starts = self._directory
        first = np.maximum(firsts.searchsorted(leasts, "left") - 1, 0)
        last = firsts.searchsorted(greatests, "right")
        has_none = (greatests < np.uint64(self.least_hash)) | (leasts > np.uint64(self.greatest_hash))
        last = np.where(has_none, first, last)
        return np.stack((first, last, starts[first], starts[last] - starts[first]))

    def read_range(self, first: int, last: int) -> Records:
        """The records of the blocks [first, last), read past the page cache."""
        _, starts = self._directory
        offset, size = self.extent(first, last)
        area = aligned_buffer(size)
        self.input.read_into(offset, area.data, direct=True)
        return self._unpacked(area, starts[first:last], np.diff(starts[first : last + 1]))

    def extent(self, first: int, last: int) -> tuple[int, int]:
        """The offset and the size in bytes of the blocks [first, last)."""
        _, starts = self._directory
        return int(starts[first]), int(starts[last] - starts[first])

    @property
    def block_shape(self) -> tuple[int, int]:
        """The number of records of a block without text, and its size in bytes."""
        return self._shape.full_block

    def raise_damage(self, area: np.ndarray, first: int, last: int) -> NoReturn:
        """Raise the error for the damaged blocks [first, last) of a run without text, whose bytes are in `area`."""
        _, starts = self._directory
        self._unpacked(area, starts[first:last], np.diff(starts[first : last + 1]))
        raise self._damaged(self.extent(first, last)[0], "records with text, or too many in a block",
                            "records without text")

    def scan(self, step_bytes: int = READ_BYTES) -> Iterator[Records]:
        """All records in the order of their hashes, about `step_bytes` of the file at a time."""
        _, starts = self._directory
        first = 0
        while first < self.block_count:
            last = max(first + 1, int(starts.searchsorted(starts[first] + step_bytes, "right")) - 1)
            yield self.read_range(first, last)
            first = last

    def verify(self) -> None:
        """Read the whole file; `Damaged` if a byte is not what was written."""
        found = sum(len(part.records) for part in self.scan())
        if found != self.record_count:
            raise self._damaged(format.START.size, f"{found} records", f"{self.record_count} records")

    def close(self) -> None:
        self.input.close()
        with self._loading:
            if self._loaded is not None:
                self._index_memory.add(-self._loaded.size_bytes)
                self._loaded = None

    def _unpacked(self, area: np.ndarray, offsets: np.ndarray, sizes: np.ndarray) -> Records:
        if not len(sizes):
            return Records(np.zeros((0, self._shape.stride), np.uint8), None)
        origin = Origin(self.id, offsets, lambda _: self.name)
        heads = check_blocks(self._shape, area, sizes, origin, self._checksums)
        records = unpack(self._shape, area, sizes, origin, heads)
        return Records(records, area if self._shape.text_cells else None)

    def _damaged(self, offset: int, found: str, expected: str) -> Damaged:
        return Damaged("a run of the store is inconsistent", file=self.name, offset=offset, found=found,
                       expected=expected)
