"""Blocks of a run file: records of one size and the text of their long strings, in multiples of 4 KiB.

A block is a head of 16 bytes (count of records, bytes of text, checksum), the records, the text. In memory the cell of
a long string (more than 12 bytes) ends in the address of its bytes; in a block it ends in their offset from the
block's start. `pull` and `pack` go from one to the other, `unpack` goes back.

Invariant: `unpack` gives an address only after it verified that the string lies in the text of its own block, whatever
the file holds. Every cell of a record must be a whole one, also where the record says that the value is null.

All work is over many blocks at once; with text there is one Python step a block.
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

HEAD = 16
_ROOM = format.BLOCK - HEAD
_WORD = 8
_SHORT_TEXT = 256  # mean bytes of a string below which bytes are gathered, above which strings are copied one by one


@dataclass(frozen=True, slots=True)
class Shape:
    """The bytes of a record, and where in it the cells of strings are."""

    stride: int
    text_cells: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.stride <= 0 or self.stride % _WORD:
            raise InternalError("a record is not made of words of 8 bytes", found=f"{self.stride} bytes")
        if any(not 0 <= cell <= self.stride - STRING_BYTES for cell in self.text_cells):
            raise InternalError("a string's cell is outside of its record", found=self.text_cells)

    @property
    def whole_block(self) -> tuple[int, int]:
        """Records without text that a block holds, and its bytes."""
        together = max(1, _ROOM // self.stride)
        return together, format.padded(HEAD + together * self.stride)


class Pulled(NamedTuple):
    """Records whose long cells end in the place of their bytes in `text`, which is in the order of the records."""

    records: np.ndarray  # (n, stride) u8
    text: np.ndarray  # u8
    text_ends: np.ndarray  # (n,) i64: the end of each record's text

    def shift_text(self, shape: Shape, by: int) -> None:
        """Change the records as if `by` bytes were put before the text."""
        for cell in shape.text_cells if by else ():
            is_long = _lengths(self.records, cell) > INLINE_BYTES
            places = _places(self.records, cell)
            places[is_long] = places[is_long].astype(np.int64) + by


class Cut(NamedTuple):
    """How records go into blocks: the first record of each and the count of all, and each block's bytes."""

    firsts: np.ndarray  # (blocks + 1,) i64
    sizes: np.ndarray  # (blocks,) i64


def pull(shape: Shape, records: np.ndarray) -> Pulled:
    """Records whose long strings were copied; without cells of strings, the records themselves."""
    if not shape.text_cells:
        return Pulled(records, np.zeros(0, np.uint8), np.zeros(len(records), np.int64))
    records = records.copy()
    lengths = np.stack([_lengths(records, cell) for cell in shape.text_cells], axis=1)
    sizes = np.where(lengths > INLINE_BYTES, lengths, 0)
    ends = sizes.cumsum().reshape(sizes.shape)
    places = ends - sizes
    sources = np.stack([_places(records, cell) for cell in shape.text_cells], axis=1)
    is_long = sizes > 0
    text = _gathered(sources[is_long].astype(np.int64), sizes[is_long])
    for k, cell in enumerate(shape.text_cells):
        _places(records, cell)[is_long[:, k]] = places[is_long[:, k], k]
    return Pulled(records, text, ends[:, -1])


def _gathered(addresses: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The bytes at these addresses of this process, one piece after the other."""
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
    """A piece of this process's memory as numpy takes it; only what is indexed has to be there."""

    def __init__(self, address: int, size: int) -> None:
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (size,), "data": (address, True)}


def cut(shape: Shape, text_ends: np.ndarray) -> Cut:
    """As many records a block as fit into 4 KiB; one that does not fit has a larger block of its own."""
    count = len(text_ends)
    if not count or text_ends[-1] == 0:
        together = max(1, _ROOM // shape.stride)
        firsts = np.append(np.arange(0, count, together), count)
        return Cut(firsts, np.full(len(firsts) - 1, format.padded(HEAD + min(together, count) * shape.stride)))
    ends = text_ends + np.arange(1, count + 1) * shape.stride
    first_list, sizes = [0], []
    first = before = 0
    while first < count:
        behind = max(first + 1, int(ends.searchsorted(before + _ROOM, "right")))
        end = int(ends[behind - 1])
        sizes.append(format.padded(HEAD + end - before))
        first_list.append(behind)
        first, before = behind, end
    return Cut(np.array(first_list), np.array(sizes))


def pack(shape: Shape, pulled: Pulled, how: Cut, id: int, offset: int, checksums: Checksums) -> np.ndarray:
    """The bytes of blocks that will lie at `offset` of the file, in page-aligned memory. Changes long cells."""
    counts = np.diff(how.firsts)
    starts = how.sizes.cumsum() - how.sizes
    text_borders = np.concatenate([[0], pulled.text_ends])[how.firsts]
    texts_at = HEAD + counts * shape.stride  # in each block
    area = aligned_buffer(int(how.sizes.sum()))
    area[:] = 0
    for cell in shape.text_cells:
        is_long = _lengths(pulled.records, cell) > INLINE_BYTES
        if is_long.any():
            shift = np.repeat(texts_at - text_borders[:-1], counts)[is_long]
            places = _places(pulled.records, cell)
            places[is_long] = places[is_long].astype(np.int64) + shift
    if _is_regular(counts, how.sizes):
        whole, last = _grid(shape, area, counts, how.sizes)
        behind = len(pulled.records) - int(counts[-1])
        whole[:] = pulled.records[:behind].reshape(whole.shape)
        last[:] = pulled.records[behind:].reshape(-1)
    else:
        _rows(area, shape.stride)[_row_places(shape, starts, counts)] = pulled.records.view("<u8")
    if len(pulled.text):
        ends, borders = (starts + texts_at).tolist(), text_borders.tolist()
        for k, place in enumerate(ends):
            piece = pulled.text[borders[k] : borders[k + 1]]
            area[place : place + len(piece)] = piece
    heads = area.view("<u4")
    heads[starts // 4] = counts
    heads[starts // 4 + 1] = np.diff(text_borders)
    area.view("<u8")[starts // _WORD + 1] = _sums(area, starts, how.sizes, id, offset + starts, checksums)
    return area


class Origin(NamedTuple):
    """Where blocks were read from: the ids of their files, their places there, and the name of each one's file."""

    ids: np.ndarray | int
    offsets: np.ndarray
    file_of: Callable[[int], str]


class Heads(NamedTuple):
    """Blocks that lie one after the other, verified: where each starts, its records, the bounds of its text in it."""

    starts: np.ndarray
    counts: np.ndarray
    texts_at: np.ndarray
    texts_end: np.ndarray


def checked(shape: Shape, area: np.ndarray, sizes: np.ndarray, origin: Origin, checksums: Checksums) -> Heads:
    """What is in blocks read one after the other into `area`; `Damaged` if it is not what was written."""
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
    texts_at = HEAD + counts * shape.stride
    texts_end = texts_at + text_bytes
    if len(wrong := np.flatnonzero((counts == 0) | (texts_end > sizes))):
        at = int(wrong[0])
        raise Damaged("a block of a store's file says more than it holds", file=origin.file_of(at),
                      offset=int(offsets[at]),
                      found=f"{counts[at]} records and {text_bytes[at]} bytes of text in {sizes[at]}")  # fmt: skip
    return Heads(starts, counts, texts_at, texts_end)


def unpack(shape: Shape, area: np.ndarray, sizes: np.ndarray, origin: Origin, heads: Heads) -> np.ndarray:
    """The records of blocks that were checked.

    Long cells end in addresses in `area`, which the caller keeps alive. `Damaged` if one leads out of its block.
    """
    starts, counts, texts_at, texts_end = heads
    records = _records(shape, area, starts, counts, sizes)
    base = int(area.ctypes.data)
    for cell in shape.text_cells:
        lengths = _lengths(records, cell)
        rows = np.flatnonzero(lengths > INLINE_BYTES)
        if len(rows):
            block = np.repeat(np.arange(len(counts)), counts)[rows]
            places = _places(records, cell)
            found = places[rows]
            low, high = texts_at[block].astype(np.uint64), texts_end[block].astype(np.uint64)
            # Unsigned, and in this order: a place near 2^64 must not wrap around into the block.
            is_bad = (found < low) | (found > high) | (lengths[rows].astype(np.uint64) > high - found)
            if is_bad.any():
                at = int(np.flatnonzero(is_bad)[0])
                raise Damaged("a string of a store's file lies outside of its block",
                              file=origin.file_of(int(block[at])), offset=int(origin.offsets[block[at]]),
                              found=f"{lengths[rows[at]]} bytes at {found[at]}")  # fmt: skip
            places[rows] = found + (base + starts[block]).astype(np.uint64)
    return records


def _records(shape: Shape, area: np.ndarray, starts: np.ndarray, counts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """A copy of the records of blocks."""
    if not _is_regular(counts, sizes):
        rows: np.ndarray = _rows(area, shape.stride)[_row_places(shape, starts, counts)]
        return rows.view(np.uint8)
    records = np.empty((int(counts.sum()), shape.stride), np.uint8)
    whole, last = _grid(shape, area, counts, sizes)
    behind = len(records) - int(counts[-1])
    records[:behind].reshape(whole.shape)[:] = whole
    records[behind:].reshape(-1)[:] = last
    return records


def _is_regular(counts: np.ndarray, sizes: np.ndarray) -> bool:
    """True if all blocks have the same size, and all but the last the same count: copied three times as fast."""
    return bool((sizes == sizes[0]).all() and (counts[:-1] == counts[0]).all())


def _grid(shape: Shape, area: np.ndarray, counts: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of records in regular blocks: a row for each block but the last, and those of the last."""
    grid = area.reshape(-1, int(sizes[0]))
    whole = grid[:-1, HEAD : HEAD + int(counts[0]) * shape.stride]
    return whole, grid[-1, HEAD : HEAD + int(counts[-1]) * shape.stride]


def _rows(area: np.ndarray, stride: int) -> np.ndarray:
    """A row of `stride` bytes for every word at which one can start; rows overlap."""
    words = area.view("<u8")
    width = stride // _WORD
    return np.lib.stride_tricks.as_strided(words, (max(0, len(words) - width + 1), width), (_WORD, _WORD))


def _row_places(shape: Shape, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The word at which each record starts, of blocks that start at these bytes."""
    width = shape.stride // _WORD
    before = counts.cumsum() - counts
    return np.repeat((starts + HEAD) // _WORD - before * width, counts) + np.arange(int(counts.sum())) * width


def _sums(area: np.ndarray, starts: np.ndarray, sizes: np.ndarray, id: int | np.ndarray, offsets: np.ndarray,
          checksums: Checksums) -> np.ndarray:  # fmt: skip
    """The checksums of blocks, those of one size together."""
    seeds = np.asarray(id, np.uint64) ^ offsets.astype(np.uint64)
    sums = np.zeros(len(sizes), np.uint64)
    if (sizes == sizes[0]).all():
        return checksums(area.reshape(-1, int(sizes[0])), seeds)
    pages = area.reshape(-1, format.BLOCK)
    for size in np.unique(sizes).tolist():
        which = np.flatnonzero(sizes == size)
        rows = pages[starts[which, None] // format.BLOCK + np.arange(size // format.BLOCK)].reshape(-1, size)
        sums[which] = checksums(rows, seeds[which])
    return sums


def _lengths(records: np.ndarray, cell: int) -> np.ndarray:
    """The lengths in a column of cells."""
    return records[:, cell : cell + 4].view("<u4")[:, 0].astype(np.int64)


def _places(records: np.ndarray, cell: int) -> np.ndarray:
    """The last words of a column of cells, as they are in the records: writing changes those."""
    column: np.ndarray = records[:, cell + STRING_BYTES - _WORD : cell + STRING_BYTES].view("<u8")[:, 0]
    return column
