"""RunWriter: writes a run file, that is sorted records packed into blocks, and after them the directory.

Records without text are collected in one buffer and packed into another by a kernel, so a writer needs little memory
and rarely holds the GIL. With text, blocks are planned by the sizes of their records (see `run_blocks.py`).

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
from scalein.state.arena import Workspace
from scalein.state.bloom import SetBits, empty_filter, filter_shift, set_bits
from scalein.state.checksum import Checksums, block_checksums
from scalein.state.run_blocks import DetachedRecords, RecordShape, detach, pack, plan_blocks
from scalein.storage.filesystem import FileSystem, aligned_buffer

MAX_WORKSPACES = 2  # unused ones that are kept for the next writers
WRITE_BYTES = 1 << 19  # of records that are collected for one write, at most

# record count, block count, directory offset, directory bytes, least hash, greatest hash, filter bytes, spec bytes
HEADER = struct.Struct("<QQQQQQQI")
SPEC_AT = format.START.size + HEADER.size
MAX_SPEC_BYTES = format.BLOCK - format.SEAL - SPEC_AT

# Blocks, records without text, records per block, block size, file id, offset in the file (see `StoreKernels.pack`).
Pack = Callable[[np.ndarray, np.ndarray, int, int, int, int], None]


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run that was written."""

    id: int
    record_count: int
    block_count: int
    size_bytes: int
    least_hash: int
    greatest_hash: int


def directory_bytes(block_count: int, filter_bytes: int) -> int:
    return format.padded(12 * block_count + 4 + filter_bytes + format.SEAL)


class RunWriter:
    """A new run file, durable once `finish` has returned. `filter_records`: build a Bloom filter for about so many.

    `workspaces`: a list of unused ones; the writer takes one, and returns it when it has finished.
    """

    def __init__(self, fs: FileSystem, id: int, stride: int, spec: str, text_cells: tuple[int, ...] = (),
                 expected_bytes: int = 0, checksums: Checksums = block_checksums, filter_records: int | None = None,
                 pack: Pack | None = None, set_filter_bits: SetBits = set_bits,
                 workspaces: list[Workspace] | None = None, write_bytes: int | None = None) -> None:
        self.id = id
        self._write_bytes = min(WRITE_BYTES, write_bytes or WRITE_BYTES)
        self._workspaces = [] if workspaces is None else workspaces
        self._workspace = Workspace()
        with suppress(IndexError):  # not checked before: another thread may take the last one
            self._workspace = self._workspaces.pop()
        self._workspace.reset()
        self._filter = np.zeros(0, np.uint8) if filter_records is None else empty_filter(filter_records)
        self._shape = RecordShape(stride, text_cells)
        self._spec = spec.encode()
        if len(self._spec) > MAX_SPEC_BYTES:
            raise BadArgument("the merge functions of a table do not fit into the header of a run",
                              found=f"{len(self._spec)} bytes", most=f"{MAX_SPEC_BYTES} bytes")  # fmt: skip
        self._fs = fs
        self._checksums, self._pack, self._set_bits = checksums, pack, set_filter_bits
        self._end = format.BLOCK
        self._count = 0
        self._greatest = 0
        self._pending: list[tuple[DetachedRecords, np.ndarray]] = []  # with text
        self._pending_bytes = 0
        self._per_block, self._block_bytes = self._shape.full_block
        self._blocks = max(1, self._write_bytes // self._block_bytes)  # per write
        self._records = np.zeros((0, stride), np.uint8)  # collected for the next write, without text
        self._block_buffer = np.zeros(0, np.uint8)
        self._used = 0
        self._first_hashes: list[np.ndarray] = []
        self._sizes: list[np.ndarray] = []
        self._output = fs.create(format.run_name(id), expected_bytes)

    @property
    def records_per_write(self) -> int:
        """Records without text of one write: batches of just this size are not copied."""
        return self._blocks * self._per_block

    def add(self, records: np.ndarray, hashes: np.ndarray) -> None:
        """Append records (n, stride), sorted by hash.

        Long cells end in the address of their bytes in this process. Everything is copied before this returns.
        """
        if not len(hashes):
            return
        if int(hashes[0]) < self._greatest or (hashes[1:] < hashes[:-1]).any():
            raise InternalError("the records of a run are not sorted by hash", file=format.run_name(self.id))
        if len(self._filter):
            self._set_bits(self._filter, np.ascontiguousarray(hashes), filter_shift(self._filter))
        if self._shape.text_cells:
            self._add_with_text(records, hashes)
        else:
            self._add_plain(np.ascontiguousarray(records, np.uint8))
            self._first_hashes.append(hashes[-self._count % self._per_block :: self._per_block].copy())
        self._greatest = int(hashes[-1])
        self._count += len(records)

    def _add_plain(self, records: np.ndarray) -> None:
        """Collect records until they fill the blocks of a write."""
        per_write = self.records_per_write
        while len(records):
            if not self._used and len(records) >= per_write:
                self._write_plain(records[:per_write])
                records = records[per_write:]
                continue
            if not len(self._records):
                self._records = self._workspace.byte_buffer(per_write * self._shape.stride).reshape(per_write, -1)
            step = min(len(records), per_write - self._used)
            self._records[self._used : self._used + step] = records[:step]
            self._used += step
            records = records[step:]
            if self._used == per_write:
                self._write_plain(self._records)
                self._used = 0

    def _write_plain(self, records: np.ndarray) -> None:
        blocks = -(-len(records) // self._per_block)
        if self._pack is None:
            plain = DetachedRecords(records, np.zeros(0, np.uint8), np.zeros(len(records), np.int64))
            plan = plan_blocks(self._shape, plain.text_ends)
            area = pack(self._shape, plain, plan, self.id, self._end, self._checksums)
        else:
            if len(self._block_buffer) < blocks * self._block_bytes:
                self._block_buffer = self._workspace.byte_buffer(blocks * self._block_bytes)
            area = self._block_buffer[: blocks * self._block_bytes]
            self._pack(area, records, self._per_block, self._block_bytes, self.id, self._end)
        self._output.write(self._end, area)
        self._end += len(area)
        self._sizes.append(np.full(blocks, self._block_bytes))

    def _add_with_text(self, records: np.ndarray, hashes: np.ndarray) -> None:
        step = max(1, self._write_bytes // self._shape.stride)  # their text comes on top
        for start in range(0, len(records), step):
            detached = detach(self._shape, np.ascontiguousarray(records[start : start + step], np.uint8))
            self._pending.append((detached, np.array(hashes[start : start + step], np.uint64)))
            self._pending_bytes += detached.records.nbytes + detached.text.nbytes
            if self._pending_bytes >= self._write_bytes:
                self._write(is_last=False)

    def _write(self, is_last: bool) -> None:
        """Write pending records; unless they are the last ones, the last block stays pending, as it may not be full."""
        detached, hashes = _concatenate(self._shape, self._pending)
        plan = plan_blocks(self._shape, detached.text_ends)
        blocks = len(plan.sizes) - (not is_last)
        self._pending.clear()
        self._pending_bytes = 0
        if blocks < len(plan.sizes):
            rest, detached = _split(self._shape, detached, int(plan.firsts[blocks]))
            self._pending.append((rest, hashes[plan.firsts[blocks] :]))
            self._pending_bytes = rest.records.nbytes + rest.text.nbytes
            plan = plan._replace(firsts=plan.firsts[: blocks + 1], sizes=plan.sizes[:blocks])
        if blocks:
            area = pack(self._shape, detached, plan, self.id, self._end, self._checksums)
            self._output.write(self._end, area)
            self._end += len(area)
            self._first_hashes.append(hashes[plan.firsts[:-1]])
            self._sizes.append(plan.sizes)

    def finish(self) -> RunInfo:
        """Write the remaining records and the directory, sync and close the file."""
        if self._pending:
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
        if len(self._workspaces) < MAX_WORKSPACES:
            self._workspaces.append(self._workspace)
        return RunInfo(self.id, self._count, len(firsts), self._end + len(directory), least, self._greatest)

    def abandon(self) -> None:
        """Close the file and remove it if possible; otherwise the next start removes it."""
        self._output.close()
        with suppress(StoreFailed):
            self._fs.remove(format.run_name(self.id))


def _concatenate(shape: RecordShape,
                 parts: list[tuple[DetachedRecords, np.ndarray]]) -> tuple[DetachedRecords, np.ndarray]:
    if len(parts) == 1:
        return parts[0]
    before = 0
    ends = []
    for detached, _ in parts:
        detached.shift_text(shape, before)
        ends.append(detached.text_ends + before)
        before += len(detached.text)
    records = np.concatenate([detached.records for detached, _ in parts])
    text = np.concatenate([detached.text for detached, _ in parts])
    return DetachedRecords(records, text, np.concatenate(ends)), np.concatenate([hashes for _, hashes in parts])


def _split(shape: RecordShape, detached: DetachedRecords, at: int) -> tuple[DetachedRecords, DetachedRecords]:
    """The records from `at` on, which share no memory with the others, and the records before."""
    text_at = int(detached.text_ends[at - 1]) if at else 0
    rest = DetachedRecords(detached.records[at:].copy(), detached.text[text_at:].copy(),
                           detached.text_ends[at:] - text_at)
    rest.shift_text(shape, -text_at)
    return rest, DetachedRecords(detached.records[:at], detached.text[:text_at], detached.text_ends[:at])
