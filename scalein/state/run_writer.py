"""Writing of run files: sorted records, packed into blocks, and the directory behind them.

Records without text are collected in one buffer and packed into another by a kernel, so a writer takes little memory
and little of Python's lock. With text, blocks are cut by what their records take (see blocks.py).

Threads: a writer belongs to one thread.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from scalein.errors import BadArgument, InternalError, StoreFailed
from scalein.state import format
from scalein.state.bloom import Mark, empty_filter, mark_bits, shift_of
from scalein.state.checksum import Checksums, block_checksums
from scalein.state.run_blocks import Pulled, Shape, cut, pack, pull
from scalein.state.workspace import Room
from scalein.storage.filesystem import FileSystem, aligned_buffer

MOST_ROOMS = 2  # that are kept for the next writers
WRITE_BYTES = 1 << 19  # of records that are collected for one write, at most

# record count, block count, directory offset, directory bytes, least hash, greatest hash, filter bytes, spec bytes
HEADER = struct.Struct("<QQQQQQQI")
SPEC_AT = format.START.size + HEADER.size
MOST_SPEC_BYTES = format.BLOCK - format.SEAL - SPEC_AT

# Blocks, records without text, records a block, bytes of a block, id of the file, offset in it (see `Kernels.pack`).
Pack = Callable[[np.ndarray, np.ndarray, int, int, int, int], None]


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What was written."""

    id: int
    record_count: int
    block_count: int
    size_bytes: int
    least_hash: int
    greatest_hash: int


def directory_bytes(block_count: int, filter_bytes: int) -> int:
    return format.padded(12 * block_count + 4 + filter_bytes + format.SEAL)


class RunWriter:
    """A new run file. It is on the disk once `finish` returned. `filtered`: make a filter for about so many records.

    `rooms` that nobody uses: the writer takes one, and leaves it there when it has finished.
    """

    def __init__(self, fs: FileSystem, id: int, stride: int, spec: str, text_cells: tuple[int, ...] = (),
                 expected_bytes: int = 0, checksums: Checksums = block_checksums, filtered: int | None = None,
                 pack: Pack | None = None, mark: Mark = mark_bits, rooms: list[Room] | None = None,
                 write_bytes: int | None = None) -> None:  # fmt: skip
        self.id = id
        self._write_bytes = min(WRITE_BYTES, write_bytes or WRITE_BYTES)
        self._rooms = [] if rooms is None else rooms
        self._room = Room()
        with suppress(IndexError):  # not looked at before: another thread may take the last
            self._room = self._rooms.pop()
        self._room.begin()
        self._filter = np.zeros(0, np.uint8) if filtered is None else empty_filter(filtered)
        self._shape = Shape(stride, text_cells)
        self._spec = spec.encode()
        if len(self._spec) > MOST_SPEC_BYTES:
            raise BadArgument("the merge functions of a table take too much room in a run's header",
                              found=f"{len(self._spec)} bytes", most=f"{MOST_SPEC_BYTES} bytes")  # fmt: skip
        self._fs = fs
        self._checksums, self._pack, self._mark = checksums, pack, mark
        self._end = format.BLOCK
        self._count = 0
        self._greatest = 0
        self._waiting: list[tuple[Pulled, np.ndarray]] = []  # with text
        self._waiting_bytes = 0
        self._per_block, self._block_bytes = self._shape.whole_block
        self._blocks = max(1, self._write_bytes // self._block_bytes)  # that are written at once
        self._records = np.zeros((0, stride), np.uint8)  # that wait, without text
        self._area = np.zeros(0, np.uint8)
        self._used = 0
        self._first_hashes: list[np.ndarray] = []
        self._sizes: list[np.ndarray] = []
        self._output = fs.create(format.run_name(id), expected_bytes)

    @property
    def records_at_once(self) -> int:
        """Records without text that are written at once: those that come so many at a time are not copied."""
        return self._blocks * self._per_block

    def add(self, records: np.ndarray, hashes: np.ndarray) -> None:
        """Append records (n, stride), sorted by hash, behind those that are there.

        Long cells end in the address of their bytes in this process. All is copied before this returns.
        """
        if not len(hashes):
            return
        if int(hashes[0]) < self._greatest or (hashes[1:] < hashes[:-1]).any():
            raise InternalError("the records of a run are not sorted by hash", file=format.run_name(self.id))
        if len(self._filter):
            self._mark(self._filter, np.ascontiguousarray(hashes), shift_of(self._filter))
        if self._shape.text_cells:
            self._add_with_text(records, hashes)
        else:
            self._add_plain(np.ascontiguousarray(records, np.uint8))
            self._first_hashes.append(hashes[-self._count % self._per_block :: self._per_block].copy())
        self._greatest = int(hashes[-1])
        self._count += len(records)

    def _add_plain(self, records: np.ndarray) -> None:
        """Fill blocks; those that are whole are written many at once."""
        together = self.records_at_once
        while len(records):
            if not self._used and len(records) >= together:
                self._write_plain(records[:together])
                records = records[together:]
                continue
            if not len(self._records):
                self._records = self._room.bytes(together * self._shape.stride).reshape(together, -1)
            step = min(len(records), together - self._used)
            self._records[self._used : self._used + step] = records[:step]
            self._used += step
            records = records[step:]
            if self._used == together:
                self._write_plain(self._records)
                self._used = 0

    def _write_plain(self, records: np.ndarray) -> None:
        blocks = -(-len(records) // self._per_block)
        if self._pack is None:
            nothing = Pulled(records, np.zeros(0, np.uint8), np.zeros(len(records), np.int64))
            area = pack(self._shape, nothing, cut(self._shape, nothing.text_ends), self.id, self._end, self._checksums)
        else:
            if len(self._area) < blocks * self._block_bytes:
                self._area = self._room.bytes(blocks * self._block_bytes)
            area = self._area[: blocks * self._block_bytes]
            self._pack(area, records, self._per_block, self._block_bytes, self.id, self._end)
        self._output.write(self._end, area)
        self._end += len(area)
        self._sizes.append(np.full(blocks, self._block_bytes))

    def _add_with_text(self, records: np.ndarray, hashes: np.ndarray) -> None:
        step = max(1, self._write_bytes // self._shape.stride)  # text comes on top, and is gathered by larger arrays
        for start in range(0, len(records), step):
            pulled = pull(self._shape, np.ascontiguousarray(records[start : start + step], np.uint8))
            self._waiting.append((pulled, np.array(hashes[start : start + step], np.uint64)))
            self._waiting_bytes += pulled.records.nbytes + pulled.text.nbytes
            if self._waiting_bytes >= self._write_bytes:
                self._write(is_last=False)

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
        if self._used:
            self._write_plain(self._records[: self._used])
        firsts = np.concatenate([*self._first_hashes, np.zeros(0, np.uint64)])
        sizes = np.concatenate([np.array([format.BLOCK]), *self._sizes])
        filter = self._filter
        directory = aligned_buffer(directory_bytes(len(firsts), len(filter)))
        directory[:] = 0
        directory[: 8 * len(firsts)].view("<u8")[:] = firsts
        directory[8 * len(firsts) :][: 4 * len(sizes)].view("<u4")[:] = sizes.cumsum() // format.BLOCK
        directory[8 * len(firsts) + 4 * len(sizes) :][: len(filter)] = filter
        format.seal(directory, self.id, self._checksums)
        least = int(firsts[0]) if len(firsts) else 0
        header = aligned_buffer(format.BLOCK)
        header[:] = 0
        format.START.pack_into(header.data, 0, format.RUN_MAGIC, format.VERSION, self._shape.stride, self.id)
        HEADER.pack_into(header.data, format.START.size, self._count, len(firsts), self._end, len(directory), least,
                          self._greatest, len(filter), len(self._spec))  # fmt: skip
        header[SPEC_AT : SPEC_AT + len(self._spec)] = np.frombuffer(self._spec, np.uint8)
        format.seal(header, self.id, self._checksums)
        self._output.write(self._end, directory)
        self._output.write(0, header)
        self._output.sync()
        self._output.close()
        if len(self._rooms) < MOST_ROOMS:
            self._rooms.append(self._room)
        return RunInfo(self.id, self._count, len(firsts), self._end + len(directory), least, self._greatest)

    def abandon(self) -> None:
        """Close the file and remove it if that can be done; the next start removes what is left."""
        self._output.close()
        with suppress(StoreFailed):
            self._fs.remove(format.run_name(self.id))


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
