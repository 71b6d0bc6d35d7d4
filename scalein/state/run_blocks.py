"""Blocks of a run file: records of one size and the text of their long strings, in multiples of 4 KiB.

A block is a head of 16 bytes (count of records, bytes of text, checksum), the records, the text; none is compressed. In
memory the cell of a long string (more than 12 bytes) ends in the address of its bytes; in a block it ends in their
offset from the start of the block. `detach` and `pack` convert addresses to offsets, `unpack` converts them back.

Invariant: `unpack` returns an address only after it has verified that the string lies in the text of its own block,
whatever the file contains. Every cell of a record must be valid, also one whose value is null.

All functions work on many blocks at once; with text there is one Python step per block.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from scalein.errors import Damaged, InternalError
from scalein.layout import INLINE_BYTES, STRING_BYTES
from scalein.state import format
from scalein.state.checksum import Checksums
from scalein.storage.filesystem import aligned_buffer

HEAD = 16  # bytes
_CAPACITY = format.BLOCK - HEAD
_WORD = 8
_SHORT_TEXT = 256  # mean string length in bytes: shorter strings are gathered bytewise, longer ones copied one by one


@dataclass(frozen=True, slots=True)
class RecordShape:
    """The size of a record, and the offsets of its string cells."""

    stride: int
    text_cells: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.stride <= 0 or self.stride % _WORD:
            raise InternalError("the size of a record is not a multiple of 8 bytes", found=f"{self.stride} bytes")
        if any(not 0 <= cell <= self.stride - STRING_BYTES for cell in self.text_cells):
            raise InternalError("a string cell is outside of its record", found=self.text_cells)

    @property
    def full_block(self) -> tuple[int, int]:
        """The number of records without text that fit into a block, and its size in bytes."""
        count = max(1, _CAPACITY // self.stride)
        return count, format.padded(HEAD + count * self.stride)


class DetachedRecords(NamedTuple):
    """Records whose long cells end in the offset of their bytes in `text`, which has the order of the records."""

    records: np.ndarray  # (n, stride) u8
    text: np.ndarray  # u8
    text_ends: np.ndarray  # (n,) i64: the end of each record's text

    def shift_text(self, shape: RecordShape, by: int) -> None:
        """Adjust the records as if `by` bytes were inserted before the text."""
        for cell in shape.text_cells if by else ():
            is_long = _lengths(self.records, cell) > INLINE_BYTES
            offsets = _pointer_words(self.records, cell)
            offsets[is_long] = offsets[is_long].astype(np.int64) + by


class BlockPlan(NamedTuple):
    """The division of records into blocks: the first record of each block and the total count, and the block sizes."""

    firsts: np.ndarray  # (blocks + 1,) i64
    sizes: np.ndarray  # (blocks,) i64


def detach(shape: RecordShape, records: np.ndarray) -> DetachedRecords:
    """Records with their long strings copied; without string cells, the records themselves."""
    if not shape.text_cells:
        return DetachedRecords(records, np.zeros(0, np.uint8), np.zeros(len(records), np.int64))
    records = records.copy()
    lengths = np.stack([_lengths(records, cell) for cell in shape.text_cells], axis=1)
    sizes = np.where(lengths > INLINE_BYTES, lengths, 0)
    ends = sizes.cumsum().reshape(sizes.shape)
    offsets = ends - sizes
    sources = np.stack([_pointer_words(records, cell) for cell in shape.text_cells], axis=1)
    is_long = sizes > 0
    text = _gather(sources[is_long].astype(np.int64), sizes[is_long])
    for k, cell in enumerate(shape.text_cells):
        _pointer_words(records, cell)[is_long[:, k]] = offsets[is_long[:, k], k]
    return DetachedRecords(records, text, ends[:, -1])


def _gather(addresses: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The bytes at these addresses of this process, concatenated."""
    total = int(sizes.sum())
    text = np.empty(total, np.uint8)
    ends = sizes.cumsum()
    if total < _SHORT_TEXT * len(sizes):
        least = int(addresses.min())
        memory = np.asarray(_Memory(least, int((addresses + sizes).max()) - least))
        np.take(memory, np.repeat(addresses - least - (ends - sizes), sizes) + np.arange(total), out=text)
        return text
    start = int(text.ctypes.data)
    for into, address, size in zip((start + ends - sizes).tolist(), addresses.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(into, address, size)
    return text


class _Memory:
    """A range of this process's memory as a numpy array; only elements that are indexed need to be mapped."""

    def __init__(self, address: int, size: int) -> None:
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (size,), "data": (address, True)}


def plan_blocks(shape: RecordShape, text_ends: np.ndarray) -> BlockPlan:
    """As many records per block as fit into 4 KiB; a record that does not fit gets a larger block of its own."""
    count = len(text_ends)
    if not count or text_ends[-1] == 0:
        per_block = max(1, _CAPACITY // shape.stride)
        firsts = np.append(np.arange(0, count, per_block), count)
        return BlockPlan(firsts, np.full(len(firsts) - 1, format.padded(HEAD + min(per_block, count) * shape.stride)))
    ends = text_ends + np.arange(1, count + 1) * shape.stride
    first_list, sizes = [0], []
    first = before = 0
    while first < count:
        last = max(first + 1, int(ends.searchsorted(before + _CAPACITY, "right")))
        end = int(ends[last - 1])
        sizes.append(format.padded(HEAD + end - before))
        first_list.append(last)
        first, before = last, end
    return BlockPlan(np.array(first_list), np.array(sizes))


def pack(shape: RecordShape, detached: DetachedRecords, plan: BlockPlan, id: int, offset: int,
         checksums: Checksums) -> np.ndarray:
    """The bytes of blocks that are written at `offset` of the file, in page-aligned memory. Changes long cells."""
    counts = np.diff(plan.firsts)
    starts = plan.sizes.cumsum() - plan.sizes
    text_bounds = np.concatenate([[0], detached.text_ends])[plan.firsts]
    text_starts = HEAD + counts * shape.stride  # in each block
    area = aligned_buffer(int(plan.sizes.sum()))
    area[:] = 0
    for cell in shape.text_cells:
        is_long = _lengths(detached.records, cell) > INLINE_BYTES
        if is_long.any():
            shift = np.repeat(text_starts - text_bounds[:-1], counts)[is_long]
            offsets = _pointer_words(detached.records, cell)
            offsets[is_long] = offsets[is_long].astype(np.int64) + shift
    if _is_regular(counts, plan.sizes):
        full, last = _grid(shape, area, counts, plan.sizes)
        end = len(detached.records) - int(counts[-1])
        full[:] = detached.records[:end].reshape(full.shape)
        last[:] = detached.records[end:].reshape(-1)
    else:
        _rows(area, shape.stride)[_row_words(shape, starts, counts)] = detached.records.view("<u8")
    if len(detached.text):
        positions, bounds = (starts + text_starts).tolist(), text_bounds.tolist()
        for k, position in enumerate(positions):
            text = detached.text[bounds[k] : bounds[k + 1]]
            area[position : position + len(text)] = text
    heads = area.view("<u4")
    heads[starts // 4] = counts
    heads[starts // 4 + 1] = np.diff(text_bounds)
    area.view("<u8")[starts // _WORD + 1] = _sums(area, starts, plan.sizes, id, offset + starts, checksums)
    return area


class Origin(NamedTuple):
    """Where blocks were read from: the ids of their files, their offsets there, and the names of the files."""

    ids: np.ndarray | int
    offsets: np.ndarray
    file_of: Callable[[int], str]


class BlockHeads(NamedTuple):
    """The heads of contiguous blocks, verified: where each starts, its record count, the bounds of its text in it."""

    starts: np.ndarray
    counts: np.ndarray
    text_starts: np.ndarray
    text_limits: np.ndarray


def check_blocks(shape: RecordShape, area: np.ndarray, sizes: np.ndarray, origin: Origin,
                 checksums: Checksums) -> BlockHeads:
    """The heads of blocks that were read into `area`; `Damaged` if the blocks are not what was written."""
    offsets = origin.offsets
    starts = sizes.cumsum() - sizes
    sums_at = starts // _WORD + 1
    words = area.view("<u8")
    stored = words[sums_at]
    words[sums_at] = 0
    sums = _sums(area, starts, sizes, origin.ids, offsets, checksums)
    if len(wrong := np.flatnonzero(sums != stored)):
        at = int(wrong[0])
        raise format.wrong_checksum(origin.file_of(at), "a block", int(offsets[at]), int(stored[at]), int(sums[at]))
    heads = area.view("<u4")
    counts, text_bytes = heads[starts // 4].astype(np.int64), heads[starts // 4 + 1].astype(np.int64)
    text_starts = HEAD + counts * shape.stride
    text_limits = text_starts + text_bytes
    if len(wrong := np.flatnonzero((counts == 0) | (text_limits > sizes))):
        at = int(wrong[0])
        raise Damaged("a block of a store's file claims more than it holds", file=origin.file_of(at),
                      offset=int(offsets[at]),
                      found=f"{counts[at]} records and {text_bytes[at]} bytes of text in {sizes[at]}")  # fmt: skip
    return BlockHeads(starts, counts, text_starts, text_limits)


def unpack(shape: RecordShape, area: np.ndarray, sizes: np.ndarray, origin: Origin, heads: BlockHeads) -> np.ndarray:
    """The records of blocks that were checked.

    Long cells end in addresses in `area`, which the caller keeps alive. `Damaged` if one points outside of its block.
    """
    starts, counts, text_starts, text_limits = heads
    records = _records(shape, area, starts, counts, sizes)
    base = int(area.ctypes.data)
    for cell in shape.text_cells:
        lengths = _lengths(records, cell)
        rows = np.flatnonzero(lengths > INLINE_BYTES)
        if len(rows):
            block = np.repeat(np.arange(len(counts)), counts)[rows]
            offsets = _pointer_words(records, cell)
            found = offsets[rows]
            low, high = text_starts[block].astype(np.uint64), text_limits[block].astype(np.uint64)
            # Unsigned, and in this order: an offset near 2^64 must not wrap around into the block.
            is_bad = (found < low) | (found > high) | (lengths[rows].astype(np.uint64) > high - found)
            if is_bad.any():
                at = int(np.flatnonzero(is_bad)[0])
                raise Damaged("a string of a store's file is outside of its block",
                              file=origin.file_of(int(block[at])), offset=int(origin.offsets[block[at]]),
                              found=f"{lengths[rows[at]]} bytes at {found[at]}")  # fmt: skip
            offsets[rows] = found + (base + starts[block]).astype(np.uint64)
    return records


def _records(shape: RecordShape, area: np.ndarray, starts: np.ndarray, counts: np.ndarray,
             sizes: np.ndarray) -> np.ndarray:
    """A copy of the records of blocks."""
    if not _is_regular(counts, sizes):
        rows: np.ndarray = _rows(area, shape.stride)[_row_words(shape, starts, counts)]
        return rows.view(np.uint8)
    records = np.empty((int(counts.sum()), shape.stride), np.uint8)
    full, last = _grid(shape, area, counts, sizes)
    end = len(records) - int(counts[-1])
    records[:end].reshape(full.shape)[:] = full
    records[end:].reshape(-1)[:] = last
    return records


def _is_regular(counts: np.ndarray, sizes: np.ndarray) -> bool:
    """True if all blocks have the same size, and all but the last the same count: copied three times as fast."""
    return bool((sizes == sizes[0]).all() and (counts[:-1] == counts[0]).all())


def _grid(shape: RecordShape, area: np.ndarray, counts: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of the records in regular blocks: a row for each block but the last, and those of the last."""
    grid = area.reshape(-1, int(sizes[0]))
    full = grid[:-1, HEAD : HEAD + int(counts[0]) * shape.stride]
    return full, grid[-1, HEAD : HEAD + int(counts[-1]) * shape.stride]


def _rows(area: np.ndarray, stride: int) -> np.ndarray:
    """A row of `stride` bytes for every word at which a record can start; rows overlap."""
    words = area.view("<u8")
    width = stride // _WORD
    return np.lib.stride_tricks.as_strided(words, (max(0, len(words) - width + 1), width), (_WORD, _WORD))


def _row_words(shape: RecordShape, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The word at which each record starts, for blocks that start at these bytes."""
    width = shape.stride // _WORD
    before = counts.cumsum() - counts
    return np.repeat((starts + HEAD) // _WORD - before * width, counts) + np.arange(int(counts.sum())) * width


def _sums(area: np.ndarray, starts: np.ndarray, sizes: np.ndarray, id: int | np.ndarray, offsets: np.ndarray,
          checksums: Checksums) -> np.ndarray:  # fmt: skip
    """The checksums of blocks; blocks of one size are computed at once."""
    seeds = np.asarray(id, np.uint64) ^ offsets.astype(np.uint64)
    sums = np.zeros(len(sizes), np.uint64)
    if (sizes == sizes[0]).all():
        return checksums(area.reshape(-1, int(sizes[0])), seeds)
    pages = area.reshape(-1, format.BLOCK)
    for size in np.unique(sizes).tolist():
        of_size = np.flatnonzero(sizes == size)
        rows = pages[starts[of_size, None] // format.BLOCK + np.arange(size // format.BLOCK)].reshape(-1, size)
        sums[of_size] = checksums(rows, seeds[of_size])
    return sums


def _lengths(records: np.ndarray, cell: int) -> np.ndarray:
    """The string lengths in a column of cells."""
    return records[:, cell : cell + 4].view("<u4")[:, 0].astype(np.int64)


def _pointer_words(records: np.ndarray, cell: int) -> np.ndarray:
    """The last words of a column of cells, as a view: writing changes the records."""
    column: np.ndarray = records[:, cell + STRING_BYTES - _WORD : cell + STRING_BYTES].view("<u8")[:, 0]
    return column
