"""Run files: records sorted by the hash of their key, written once (writing.py), read by hash or from end to end.

Invariant: a run never changes after `finish`. Records of one hash lie together, in as many neighbouring blocks as they
need. Nothing that was read is handed out before checksums, counts and places were verified (see blocks.py), and no size
that a file states is believed before it was held against the file's own.

A run knows the first hash of each block: 16 bytes in memory for 4 KiB on disk, and perhaps a filter, read when it is
first asked; the filter not by those who read all of it.

Threads: a `Run` may be read by any number at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock
from typing import NamedTuple, NoReturn

import numpy as np

from scalein.errors import Damaged
from scalein.state import format
from scalein.state.bloom import passes
from scalein.state.checksum import Checksums, block_checksums
from scalein.state.run_blocks import Origin, Shape, checked, unpack
from scalein.state.run_writer import HEADER, MOST_SPEC_BYTES, SPEC_AT, directory_bytes
from scalein.storage.filesystem import FileSystem, aligned_buffer

READ_BYTES = 4 << 20  # of a step of a scan


class Records(NamedTuple):
    """Records from a run. Their long cells hold addresses in `texts`: keep it as long as they are looked at."""

    records: np.ndarray  # (n, stride) u8
    texts: np.ndarray | None


class Places(NamedTuple):
    """Where a run may have records of some hashes: blocks in order, each once, and pairs of a block and a hash."""

    offsets: np.ndarray  # of the blocks
    sizes: np.ndarray
    block: np.ndarray  # of each pair, its number among these; ascending
    hashes: np.ndarray


class _Index(NamedTuple):
    """What is in memory of a run. Who merges runs asks no filter, which is most of it."""

    firsts: np.ndarray  # the first hash of each block
    starts: np.ndarray  # the offset of each block and of the end
    filter: np.ndarray | None

    @property
    def size_bytes(self) -> int:
        return self.firsts.nbytes + self.starts.nbytes + (0 if self.filter is None else self.filter.nbytes)


class Held:
    """Bytes in memory that some runs take for their directories and filters. Any thread may add."""

    def __init__(self) -> None:
        self.bytes = 0
        self._lock = Lock()

    def add(self, size: int) -> None:
        with self._lock:
            self.bytes += size


class Run:
    """A run file that is read. Raises `Damaged` or `NewerFormat` unless header and size are in order."""

    def __init__(self, fs: FileSystem, id: int, stride: int, text_cells: tuple[int, ...] = (),
                 checksums: Checksums = block_checksums, held: Held | None = None) -> None:  # fmt: skip
        self.id = id
        self._held = held or Held()
        self._loading = Lock()
        self._loaded: _Index | None = None
        self.name = fs.path_of(format.run_name(id))
        self._shape = Shape(stride, text_cells)
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
        if spec_bytes > MOST_SPEC_BYTES:
            raise self._damaged(SPEC_AT - 4, f"{spec_bytes} bytes", f"at most {MOST_SPEC_BYTES}")
        try:
            self.spec = header[SPEC_AT : SPEC_AT + spec_bytes].tobytes().decode()
        except UnicodeDecodeError as error:
            raise self._damaged(SPEC_AT, str(error), "text in UTF-8") from error

    @property
    def size_bytes(self) -> int:
        return self.input.size

    @property
    def index_bytes(self) -> int:
        """What its directory and filter take in memory when they are needed."""
        return int(16 * self.block_count + 8 + self._filter_bytes)

    @property
    def is_loaded(self) -> bool:
        """Whether directory and filter are in memory."""
        return self._loaded is not None and self._loaded.filter is not None

    def load(self) -> None:
        """Have directory and filter in memory."""
        self._index(with_filter=True)

    @property
    def _directory(self) -> tuple[np.ndarray, np.ndarray]:
        return self._index(with_filter=False)[:2]

    def _index(self, with_filter: bool) -> _Index:
        """Read when first needed, whoever needs it."""
        with self._loading:
            if self._loaded is None or (with_filter and self._loaded.filter is None):
                before = 0 if self._loaded is None else self._loaded.size_bytes
                self._loaded = self._read_index(with_filter)
                self._held.add(self._loaded.size_bytes - before)
            return self._loaded

    def _read_index(self, with_filter: bool) -> _Index:
        data = self.input.read(self._directory_at, self.input.size - self._directory_at)
        self.input.drop_cache(self._directory_at)
        format.check_seal(data, self.id, self.name, "a run's directory", self._directory_at, self._checksums)
        count = self.block_count
        firsts = data[: 8 * count].view("<u8").copy()
        starts = data[8 * count :][: 4 * count + 4].view("<u4").astype(np.int64) * format.BLOCK
        if starts[0] != format.BLOCK or starts[-1] != self._directory_at or (np.diff(starts) <= 0).any():
            raise self._damaged(self._directory_at, "blocks in no order", "blocks one after the other")
        if count and (firsts[0] != self.least_hash or (firsts[1:] < firsts[:-1]).any()):
            raise self._damaged(self._directory_at, "hashes in no order", "sorted hashes")
        filter = data[12 * count + 4 :][: self._filter_bytes]
        return _Index(firsts, starts, filter.copy() if with_filter else None)

    def may_have(self, hashes: np.ndarray) -> np.ndarray:
        """Which of some hashes a record may have; without a filter, all."""
        filter = self._index(with_filter=True).filter
        assert filter is not None
        return passes(filter, hashes) if len(filter) else np.ones(len(hashes), bool)

    def places(self, hashes: np.ndarray) -> Places:
        """The blocks that may hold a record of one of these sorted hashes."""
        firsts, starts, _ = self._index(with_filter=True)
        inside = hashes[hashes.searchsorted(np.uint64(self.least_hash)) :]
        inside = inside[: inside.searchsorted(np.uint64(self.greatest_hash), "right")]
        inside = inside[self.may_have(inside)]
        if not len(inside) or not len(firsts):
            nothing = np.zeros(0, np.int64)
            return Places(nothing, nothing, nothing, nothing.view(np.uint64))
        last = firsts.searchsorted(inside, "right") - 1
        begins = np.flatnonzero(firsts[last] == inside)
        if len(begins):  # where a block begins with the hash itself, the ones before may end with it
            counts = np.ones(len(last), np.int64)
            counts[begins] = last[begins] - np.maximum(firsts.searchsorted(inside[begins], "left") - 1, 0) + 1
            ends = counts.cumsum()
            last = np.arange(int(ends[-1])) + np.repeat(last + 1 - ends, counts)
            inside = np.repeat(inside, counts)
        is_new = np.ones(len(last), bool)
        is_new[1:] = last[1:] != last[:-1]
        numbers = last[is_new]
        return Places(starts[numbers], starts[numbers + 1] - starts[numbers], is_new.cumsum() - 1, inside)

    def blocks_between(self, least: int, greatest: int) -> tuple[int, int]:
        """The blocks [first, last) that may hold a hash of a range."""
        firsts, _ = self._directory
        if greatest < self.least_hash or least > self.greatest_hash or not len(firsts):
            return 0, 0
        first = max(0, int(firsts.searchsorted(np.uint64(least), "left")) - 1)
        return first, int(firsts.searchsorted(np.uint64(greatest), "right"))

    def spans(self, leasts: np.ndarray, greatests: np.ndarray) -> np.ndarray:
        """The blocks that may hold a hash of each range: the first, the one behind the last, where they begin in the
        file, their bytes; a row each."""
        firsts, starts = self._directory
        first = np.maximum(firsts.searchsorted(leasts, "left") - 1, 0)
        last = firsts.searchsorted(greatests, "right")
        has_none = (greatests < np.uint64(self.least_hash)) | (leasts > np.uint64(self.greatest_hash))
        last = np.where(has_none, first, last)
        return np.stack((first, last, starts[first], starts[last] - starts[first]))

    def read_range(self, first: int, last: int) -> Records:
        """The records of the blocks [first, last), past the page cache."""
        _, starts = self._directory
        offset, size = self.extent(first, last)
        area = aligned_buffer(size)
        self.input.read_into(offset, area.data, direct=True)
        return self._unpacked(area, starts[first:last], np.diff(starts[first : last + 1]))

    def extent(self, first: int, last: int) -> tuple[int, int]:
        """Where in the file the blocks [first, last) begin, and how many bytes they have."""
        _, starts = self._directory
        return int(starts[first]), int(starts[last] - starts[first])

    @property
    def block_shape(self) -> tuple[int, int]:
        """Records without text in a block, and its bytes."""
        return self._shape.whole_block

    def refuse(self, area: np.ndarray, first: int, last: int) -> NoReturn:
        """Raise what is wrong with the blocks [first, last), whose bytes are in `area`, of a run without text."""
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
        """Read all; `Damaged` if a byte of the file is not what was written."""
        found = sum(len(part.records) for part in self.scan())
        if found != self.record_count:
            raise self._damaged(format.START.size, f"{found} records", f"{self.record_count} records")

    def close(self) -> None:
        self.input.close()
        with self._loading:
            if self._loaded is not None:
                self._held.add(-self._loaded.size_bytes)
                self._loaded = None

    def _unpacked(self, area: np.ndarray, offsets: np.ndarray, sizes: np.ndarray) -> Records:
        if not len(sizes):
            return Records(np.zeros((0, self._shape.stride), np.uint8), None)
        origin = Origin(self.id, offsets, lambda _: self.name)
        heads = checked(self._shape, area, sizes, origin, self._checksums)
        records = unpack(self._shape, area, sizes, origin, heads)
        return Records(records, area if self._shape.text_cells else None)

    def _damaged(self, offset: int, found: str, right: str) -> Damaged:
        return Damaged("a run of a store contradicts itself", file=self.name, offset=offset, found=found, right=right)
