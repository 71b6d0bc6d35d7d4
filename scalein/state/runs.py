"""Run files: records sorted by the hash of their key, written once, read by hash or from end to end.

Invariant: a run never changes after `finish`. Records of one hash lie together, in as many neighbouring blocks as they
need. Nothing that was read is handed out before checksums, counts and places were verified (see blocks.py), and no size
that a file states is believed before it was held against the file's own.

A run knows the first hash of each block: 12 bytes in memory for 4 KiB on disk, and perhaps a filter, read when it is
first asked.

Threads: a writer belongs to one thread. A `Run` may be read by any number at once.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from scalein.errors import BadArgument, Damaged, InternalError, StoreFailed
from scalein.state import format
from scalein.state.blocks import Pulled, Shape, cut, pack, pull, unpack
from scalein.state.checksum import Checksums, block_checksums
from scalein.state.files import Files, aligned
from scalein.state.filters import make_filter, passes

WRITE_BYTES = 4 << 20  # of records that are collected for one write
READ_BYTES = 4 << 20  # of a step of a scan

# record count, block count, directory offset, directory bytes, least hash, greatest hash, filter bytes, spec bytes
_HEADER = struct.Struct("<QQQQQQQI")
_SPEC_AT = format.START.size + _HEADER.size
MOST_SPEC_BYTES = format.BLOCK - format.SEAL - _SPEC_AT


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What was written."""

    id: int
    record_count: int
    block_count: int
    size_bytes: int
    least_hash: int
    greatest_hash: int


class Records(NamedTuple):
    """Records from a run. Their long cells hold addresses in `texts`: keep it as long as they are looked at."""

    records: np.ndarray  # (n, stride) u8
    texts: np.ndarray | None


def _directory_bytes(block_count: int, filter_bytes: int) -> int:
    return format.padded(12 * block_count + 4 + filter_bytes + format.SEAL)


class RunWriter:
    """A new run file. It is on the disk once `finish` returned."""

    def __init__(self, files: Files, id: int, stride: int, spec: str, text_cells: tuple[int, ...] = (),
                 expected_bytes: int = 0, checksums: Checksums = block_checksums,
                 has_filter: bool = False) -> None:  # fmt: skip
        self.id = id
        self._all_hashes: list[np.ndarray] | None = [] if has_filter else None
        self._shape = Shape(stride, text_cells)
        self._spec = spec.encode()
        if len(self._spec) > MOST_SPEC_BYTES:
            raise BadArgument("the merge functions of a table take too much room in a run's header",
                              found=f"{len(self._spec)} bytes", most=f"{MOST_SPEC_BYTES} bytes")  # fmt: skip
        self._files = files
        self._checksums = checksums
        self._end = format.BLOCK
        self._count = 0
        self._greatest = 0
        self._waiting: list[tuple[Pulled, np.ndarray]] = []
        self._waiting_bytes = 0
        self._first_hashes: list[np.ndarray] = []
        self._sizes: list[np.ndarray] = []
        self._output = files.create(format.run_name(id), expected_bytes)

    def add(self, records: np.ndarray, hashes: np.ndarray) -> None:
        """Append records (n, stride), sorted by hash, behind those that are there.

        Long cells end in the address of their bytes in this process. All is copied before this returns.
        """
        if self._all_hashes is not None:
            self._all_hashes.append(np.array(hashes, np.uint64))
        if len(hashes) and (int(hashes[0]) < self._greatest or (hashes[1:] < hashes[:-1]).any()):
            raise InternalError("the records of a run are not sorted by hash", file=format.run_name(self.id))
        # Text comes on top, and is gathered by arrays of eight times its size.
        step = max(1, WRITE_BYTES // (4 if self._shape.text_cells else 1) // self._shape.stride)
        for start in range(0, len(records), step):
            pulled = pull(self._shape, np.ascontiguousarray(records[start : start + step], np.uint8))
            self._waiting.append((pulled, np.array(hashes[start : start + step], np.uint64)))
            self._waiting_bytes += pulled.records.nbytes + pulled.text.nbytes
            if self._waiting_bytes >= WRITE_BYTES:
                self._write(is_last=False)
        if len(hashes):
            self._greatest = int(hashes[-1])
            pulled, last_hashes = self._waiting[-1]  # only these records can still be the caller's memory
            self._waiting[-1] = pulled._replace(records=pulled.records.copy()), last_hashes
        self._count += len(records)

    def _write(self, is_last: bool) -> None:
        """Write what waits; unless it is the end, the last block waits on, as it may have room."""
        pulled, hashes = _joined(self._shape, self._waiting)
        how = cut(self._shape, pulled.text_ends)
        blocks = len(how.sizes) - (not is_last)
        self._waiting.clear()
        self._waiting_bytes = 0
        if blocks < len(how.sizes):
            rest, pulled = _split(self._shape, pulled, int(how.firsts[blocks]))
            self._waiting.append((rest, hashes[how.firsts[blocks] :]))
            self._waiting_bytes = rest.records.nbytes + rest.text.nbytes
            how = how._replace(firsts=how.firsts[: blocks + 1], sizes=how.sizes[:blocks])
        if blocks:
            area = pack(self._shape, pulled, how, self.id, self._end, self._checksums)
            self._output.write(self._end, area)
            self._end += len(area)
            self._first_hashes.append(hashes[how.firsts[:-1]])
            self._sizes.append(how.sizes)

    def finish(self) -> RunInfo:
        """Write what is left and the directory, sync and close the file."""
        if self._waiting:
            self._write(is_last=True)
        firsts = np.concatenate([*self._first_hashes, np.zeros(0, np.uint64)])
        sizes = np.concatenate([np.array([format.BLOCK]), *self._sizes])
        filter = np.zeros(0, np.uint8)
        if self._all_hashes is not None:
            filter = make_filter(np.concatenate([*self._all_hashes, np.zeros(0, np.uint64)]))
        directory = aligned(_directory_bytes(len(firsts), len(filter)))
        directory[:] = 0
        directory[: 8 * len(firsts)].view("<u8")[:] = firsts
        directory[8 * len(firsts) :][: 4 * len(sizes)].view("<u4")[:] = sizes.cumsum() // format.BLOCK
        directory[8 * len(firsts) + 4 * len(sizes) :][: len(filter)] = filter
        format.seal(directory, self.id, self._checksums)
        least = int(firsts[0]) if len(firsts) else 0
        header = aligned(format.BLOCK)
        header[:] = 0
        format.START.pack_into(header.data, 0, format.RUN_MAGIC, format.VERSION, self._shape.stride, self.id)
        _HEADER.pack_into(header.data, format.START.size, self._count, len(firsts), self._end, len(directory), least,
                          self._greatest, len(filter), len(self._spec))  # fmt: skip
        header[_SPEC_AT : _SPEC_AT + len(self._spec)] = np.frombuffer(self._spec, np.uint8)
        format.seal(header, self.id, self._checksums)
        self._output.write(self._end, directory)
        self._output.write(0, header)
        self._output.sync()
        self._output.close()
        return RunInfo(self.id, self._count, len(firsts), self._end + len(directory), least, self._greatest)

    def abandon(self) -> None:
        """Close the file and remove it if that can be done; the next start removes what is left."""
        self._output.close()
        with suppress(StoreFailed):
            self._files.remove(format.run_name(self.id))


def _joined(shape: Shape, parts: list[tuple[Pulled, np.ndarray]]) -> tuple[Pulled, np.ndarray]:
    if len(parts) == 1:
        return parts[0]
    before = 0
    ends = []
    for pulled, _ in parts:
        pulled.shift_text(shape, before)
        ends.append(pulled.text_ends + before)
        before += len(pulled.text)
    records = np.concatenate([pulled.records for pulled, _ in parts])
    text = np.concatenate([pulled.text for pulled, _ in parts])
    return Pulled(records, text, np.concatenate(ends)), np.concatenate([hashes for _, hashes in parts])


def _split(shape: Shape, pulled: Pulled, at: int) -> tuple[Pulled, Pulled]:
    """The records from `at` on, which share no memory with the others, and the records before."""
    border = int(pulled.text_ends[at - 1]) if at else 0
    rest = Pulled(pulled.records[at:].copy(), pulled.text[border:].copy(), pulled.text_ends[at:] - border)
    rest.shift_text(shape, -border)
    return rest, Pulled(pulled.records[:at], pulled.text[:border], pulled.text_ends[:at])


class Run:
    """A run file that is read. Raises `Damaged` or `NewerFormat` unless header and size are in order."""

    def __init__(self, files: Files, id: int, stride: int, text_cells: tuple[int, ...] = (),
                 checksums: Checksums = block_checksums) -> None:  # fmt: skip
        self.id = id
        self.name = files.name_of(format.run_name(id))
        self._shape = Shape(stride, text_cells)
        self._checksums = checksums
        self._input = files.open(format.run_name(id))
        try:
            self._read_header(stride)
        except BaseException:
            self.close()
            raise

    def _read_header(self, stride: int) -> None:
        header = self._input.read(0, format.BLOCK)
        found_stride = format.check_start(header, format.RUN_MAGIC, self.id, self.name, "a run", self._checksums)
        (self.record_count, self.block_count, self._directory_at, size, self.least_hash, self.greatest_hash,
         self._filter_bytes, spec_bytes) = _HEADER.unpack_from(header.data, format.START.size)  # fmt: skip
        if found_stride != stride:
            raise self._damaged(12, f"records of {found_stride} bytes", f"records of {stride} bytes")
        if self._filter_bytes & (self._filter_bytes - 1) or self._filter_bytes > self._input.size:
            raise self._damaged(72, f"a filter of {self._filter_bytes} bytes", "a power of two")
        expected = _directory_bytes(self.block_count, self._filter_bytes)
        if self._directory_at % format.BLOCK or size != expected or self._directory_at + size != self._input.size:
            raise self._damaged(format.START.size, f"{self.block_count} blocks, {size} bytes of directory at "
                                f"{self._directory_at}", f"a file of {self._input.size} bytes")  # fmt: skip
        if spec_bytes > MOST_SPEC_BYTES:
            raise self._damaged(_SPEC_AT - 4, f"{spec_bytes} bytes", f"at most {MOST_SPEC_BYTES}")
        try:
            self.spec = header[_SPEC_AT : _SPEC_AT + spec_bytes].tobytes().decode()
        except UnicodeDecodeError as error:
            raise self._damaged(_SPEC_AT, str(error), "text in UTF-8") from error

    @property
    def size_bytes(self) -> int:
        return self._input.size

    @property
    def _directory(self) -> tuple[np.ndarray, np.ndarray]:
        return self._index[:2]

    @cached_property
    def _index(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The first hash of each block; the offset of each block and of the end; the filter."""
        data = self._input.read(self._directory_at, self._input.size - self._directory_at)
        self._input.forget(self._directory_at)
        format.check_seal(data, self.id, self.name, "a run's directory", self._directory_at, self._checksums)
        count = self.block_count
        firsts = data[: 8 * count].view("<u8").copy()
        starts = data[8 * count :][: 4 * count + 4].view("<u4").astype(np.int64) * format.BLOCK
        if starts[0] != format.BLOCK or starts[-1] != self._directory_at or (np.diff(starts) <= 0).any():
            raise self._damaged(self._directory_at, "blocks in no order", "blocks one after the other")
        if count and (firsts[0] != self.least_hash or (firsts[1:] < firsts[:-1]).any()):
            raise self._damaged(self._directory_at, "hashes in no order", "sorted hashes")
        return firsts, starts, data[12 * count + 4 :][: self._filter_bytes].copy()

    def may_have(self, hashes: np.ndarray) -> np.ndarray:
        """Which of some hashes a record may have; without a filter, all."""
        filter = self._index[2]
        return passes(filter, hashes) if len(filter) else np.ones(len(hashes), bool)

    def blocks_for(self, hashes: np.ndarray) -> np.ndarray:
        """The numbers of the blocks that may hold a record of one of these sorted hashes; sorted, each once."""
        firsts, _ = self._directory
        inside = hashes[hashes.searchsorted(np.uint64(self.least_hash)) :]
        inside = inside[: inside.searchsorted(np.uint64(self.greatest_hash), "right")]
        if not len(inside) or not len(firsts):
            return np.zeros(0, np.int64)
        # Where a block begins with the hash itself, the one before may end with it.
        low = np.maximum(firsts.searchsorted(inside, "left") - 1, 0)
        high = firsts.searchsorted(inside, "right") - 1
        if (low != high).any():
            counts = high - low + 1
            before = counts.cumsum() - counts
            low = np.repeat(low - before, counts) + np.arange(int(counts.sum()))
        return np.unique(low)

    def blocks_between(self, least: int, greatest: int) -> tuple[int, int]:
        """The blocks [first, last) that may hold a hash of a range."""
        firsts, _ = self._directory
        if greatest < self.least_hash or least > self.greatest_hash or not len(firsts):
            return 0, 0
        first = max(0, int(firsts.searchsorted(np.uint64(least), "left")) - 1)
        return first, int(firsts.searchsorted(np.uint64(greatest), "right"))

    def read_blocks(self, numbers: np.ndarray) -> Records:
        """The records of blocks, given by sorted numbers without repetition; all are asked for before any is read."""
        _, starts = self._directory
        offsets, sizes = starts[numbers], starts[numbers + 1] - starts[numbers]
        # Neighbours are one piece.
        heads = np.flatnonzero(np.diff(offsets, prepend=-1) != np.concatenate([[0], sizes[:-1]]))
        piece_offsets = offsets[heads].tolist()
        piece_sizes = np.add.reduceat(sizes, heads).tolist() if len(heads) else []
        if len(piece_offsets) > 1:
            for offset, size in zip(piece_offsets, piece_sizes, strict=True):
                self._input.will_need(offset, size)
        area = aligned(int(sizes.sum()))
        into, at = area.data, 0
        for offset, size in zip(piece_offsets, piece_sizes, strict=True):
            self._input.read_into(offset, into[at : at + size])
            at += size
        return self._unpacked(area, offsets, sizes)

    def read_range(self, first: int, last: int) -> Records:
        """The records of the blocks [first, last), past the page cache."""
        _, starts = self._directory
        area = aligned(int(starts[last] - starts[first]))
        self._input.read_into(int(starts[first]), area.data, direct=True)
        return self._unpacked(area, starts[first:last], np.diff(starts[first : last + 1]))

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

    def forget(self) -> None:
        """Let the file leave the page cache."""
        self._input.forget()

    def close(self) -> None:
        self._input.close()

    def _unpacked(self, area: np.ndarray, offsets: np.ndarray, sizes: np.ndarray) -> Records:
        if not len(sizes):
            return Records(np.zeros((0, self._shape.stride), np.uint8), None)
        records = unpack(self._shape, area, sizes, self.id, offsets, self.name, self._checksums)
        return Records(records, area if self._shape.text_cells else None)

    def _damaged(self, offset: int, found: str, right: str) -> Damaged:
        return Damaged("a run of a store contradicts itself", file=self.name, offset=offset, found=found, right=right)
