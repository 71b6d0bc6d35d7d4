"""Lookups: records of some keys in a piece, found by its index files and read by blocks, without loading their groups.

Entries of the index lead to places, places to blocks of images; with text, cells lead to further blocks. Each of these
steps is done for all keys at once, by windows of blocks that are read together.

Invariant: a place is read only if the manifest's chunks say that a record of the asked key's group lies there, and a
string is followed only into a text chunk of that group; nothing is looked at before the checksums of its blocks were
verified. So an index may lead anywhere, and a hostile one does no harm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from scalein.errors import Damaged
from scalein.layout import GROUPS, INLINE_BYTES
from scalein.memory import address
from scalein.state import format
from scalein.state.arena import LEAST_CHUNK
from scalein.state.compaction import READ_WORTH
from scalein.state.memtable import RECORDS, TEXTS
from scalein.state.pieces import Images, Piece
from scalein.state.run_levels import Scratch, pointers_to
from scalein.state.segment_images import SUM_BYTES, Image, verify_blocks
from scalein.storage.aio import BlockReader
from scalein.storage.filesystem import Input

if TYPE_CHECKING:
    from scalein.kernels.store import Functions, StoreKernels

READS = 3  # of a key, at most, as a rule: a block of the index, of an image, and of the image's checksums
CHUNKS_TAKE = 1.5  # of memory, for a group's bytes, at most, beside the smallest chunks of records and of texts
INDEX_TAKES = 20  # bytes of memory for the index of a record, at most
LOADED_BYTES = 8 << 20  # from which on a call loads no more groups that it asks for little of


@dataclass(frozen=True, eq=False)
class _Blocks:
    """Blocks of images that have some ranges of a piece's bytes, each once, and behind them their checksums.

    Those of one extent are read together, with all between them: a larger read costs less than several. Everything is
    read one behind the other; then range k begins at byte `at[k]`.
    """

    images: list[Image]
    input_index: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    count: int  # of blocks that are no checksums
    sums_at: np.ndarray  # of each of these, the word of its checksum
    at: np.ndarray

    @property
    def inputs(self) -> list[Input]:
        return [image.input for image in self.images]

    def verify(self, area: np.ndarray, kernels: StoreKernels) -> None:
        ids = np.array([image.id for image in self.images], np.uint64)[self.input_index[: self.count]]
        verify_blocks(area[: self.count * format.BLOCK].reshape(-1, format.BLOCK),
                      ids ^ self.offsets[: self.count].astype(np.uint64), area.view("<u8")[self.sums_at],
                      lambda block: (self.images[self.input_index[block]].name, int(self.offsets[block])),
                      kernels.checksums)


@dataclass(frozen=True, eq=False)
class _Texts(_Blocks):
    """The blocks of some records' long strings: which record and cell each range belongs to."""

    records: np.ndarray  # (n, record bytes); also those without long strings
    row: np.ndarray
    cell: np.ndarray


class Lookups:
    """Finds records of pieces, a few windows of blocks at a time."""

    def __init__(self, kernels: StoreKernels, reader: BlockReader) -> None:
        self._kernels, self._reader = kernels, reader
        self._asked = np.zeros(GROUPS)  # keys of each group, so far

    def worth_loading(self, pieces: list[Piece], keys: np.ndarray, room_bytes: int) -> tuple[list[int], list[int]]:
        """Groups of pieces without an index, and others to load rather than to look into, when so many keys of each are
        asked for; of the latter the smallest, as many as there is room for in memory.

        Those where that costs less right now; and a few of those where it would have cost less, had we known what would
        be asked for: so what is asked for again and again is in memory soon, and no call waits for much of it.
        """
        size = sum((piece.group_bytes for piece in pieces), np.zeros(GROUPS))
        is_waiting, is_bare = np.zeros(GROUPS, bool), np.zeros(GROUPS, bool)
        for piece in pieces:
            is_waiting[list(piece.groups)] = True
            is_bare[list(piece.groups)] |= piece.indexes is None
        is_asked = is_waiting & (keys > 0)
        now = is_asked & ~is_bare & (READS * READ_WORTH * keys > size)
        late = np.flatnonzero(is_asked & ~is_bare & ~now & (READS * READ_WORTH * self._asked > size))
        late = late[size[late].cumsum() - size[late] < LOADED_BYTES]
        self._asked += keys
        worth = np.concatenate((np.flatnonzero(now), late))
        worth = worth[np.argsort(size[worth], kind="stable")]
        takes = size[worth] * (CHUNKS_TAKE + INDEX_TAKES / self._kernels.record_bytes) + 2 * LEAST_CHUNK
        return np.flatnonzero(is_asked & is_bare).tolist(), worth[takes.cumsum() <= room_bytes].tolist()

    def find(self, piece: Piece, images: Images, hashes: np.ndarray, functions: Functions, scratch: Scratch) -> None:
        """Bring what a piece has of some sorted hashes into a scratch table, as newer than all that is there."""
        hashes = hashes[piece.has(hashes)]
        if not len(hashes):
            return
        places, groups = self._places(piece, images, hashes)
        found = (self._with_texts(piece, images, places, groups) if self._kernels.text_cells else
                 self._plain(piece, images, places))  # fmt: skip
        for pointers in found:
            theirs = self._kernels.hash_keys(pointers)
            is_asked = hashes[np.minimum(hashes.searchsorted(theirs), len(hashes) - 1)] == theirs
            scratch.absorb(np.ascontiguousarray(pointers[is_asked]), functions)

    def _places(self, piece: Piece, images: Images, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where records of these hashes may be, in order and each once, and their groups."""
        indexes, most = [images.index(id) for id in piece.indexes or ()], self._reader.buffer_bytes // format.BLOCK
        for part, area in self._reader.read(part for index in indexes for part in index.unknown(hashes, most)):
            part.run.learn(part, area)
        parts = (part for index in indexes for part in index.asked(hashes, most))
        found = [part.run.found(part, area) for part, area in self._reader.read(parts)]
        places = np.concatenate([np.zeros(0, np.int64), *(places for places, _ in found)])
        groups = np.concatenate([np.zeros(0, np.uint64), *(theirs for _, theirs in found)]) >> np.uint64(56)
        groups = groups.astype(np.int64)
        inside, within = piece.chunks_of(RECORDS).holding(places, groups, self._kernels.record_bytes)
        inside &= within % self._kernels.record_bytes == 0
        places, first = np.unique(places[inside], return_index=True)  # not before: only one group can have a place
        return places, groups[inside][first]

    def _plain(self, piece: Piece, images: Images, places: np.ndarray) -> Iterator[np.ndarray]:
        """Pointers to the records at some places, which the next step may overwrite."""
        sizes = np.full(len(places), self._kernels.record_bytes)
        parts = (_located(piece, images, places[first:last], sizes[first:last])
                 for first, last in self._cut(_blocks_of(sizes) + 1))
        for part, area in self._reader.read(parts):
            part.verify(area, self._kernels)
            yield (part.at + address(area)).astype(np.uint64)

    def _with_texts(self, piece: Piece, images: Images, places: np.ndarray, groups: np.ndarray) -> Iterator[np.ndarray]:
        """The same; strings lead to what was read."""
        nothing = np.zeros((0, self._kernels.record_bytes), np.uint8)
        records = np.concatenate([nothing, *map(self._kernels.gather, self._plain(piece, images, places))])
        for part, area in self._reader.read(self._texts(piece, images, records, places, groups)):
            part.verify(area, self._kernels)
            leads = (part.at + address(area)).astype("<u8").view(np.uint8).reshape(-1, 8)
            part.records[part.row[:, None], part.cell[:, None] + np.arange(8, 16)] = leads
            yield pointers_to(part.records)

    def _texts(self, piece: Piece, images: Images, records: np.ndarray, places: np.ndarray,
               groups: np.ndarray) -> Iterator[_Texts]:
        cells = np.array(self._kernels.text_cells)
        sizes, leads = (np.stack([records[:, cell + at : cell + at + width].copy().view(kind)[:, 0]
                                  for cell in self._kernels.text_cells], axis=1).astype(np.uint64)
                        for at, width, kind in ((0, 4, "<u4"), (8, 8, "<u8")))
        sizes = np.where(sizes > INLINE_BYTES, sizes, 0).astype(np.int64)
        for first, last in self._cut(np.where(sizes, _blocks_of(sizes) + 1, 0).sum(axis=1)):
            row, column = np.nonzero(sizes[first:last])
            size = sizes[first:last][row, column]
            texts = leads[first:last][row, column] - np.uint64(piece.base)  # wraps around: far away is in no chunk
            texts = np.minimum(texts, np.uint64(1 << 62)).astype(np.int64)
            inside, _ = piece.chunks_of(TEXTS).holding(texts, groups[first:last][row], size)
            if not inside.all():
                wrong = int(places[first + row[int(np.argmin(inside))]])
                raise Damaged("a string of a stored record leads out of its texts",
                              file=images.get(piece.segments[wrong >> piece.shift][0]).name,
                              found=f"{np.count_nonzero(~inside)} of {len(row)} strings")
            yield _Texts(**vars(_located(piece, images, texts, size)), records=records[first:last], row=row,
                         cell=cells[column])  # fmt: skip

    def _cut(self, blocks: np.ndarray) -> Iterator[tuple[int, int]]:
        """Ranges of what takes so many blocks each, that fit into a window; what does not has one of its own."""
        ends = (blocks * format.BLOCK).cumsum()
        first = before = 0
        while first < len(ends):
            last = max(first + 1, int(ends.searchsorted(before + self._reader.buffer_bytes, "right")))
            yield first, last
            first, before = last, int(ends[last - 1])


def _blocks_of(sizes: np.ndarray) -> np.ndarray:
    """Blocks that ranges of so many bytes may touch."""
    found: np.ndarray = (sizes + format.BLOCK - 2) // format.BLOCK + 1
    return found


def _located(piece: Piece, images: Images, places: np.ndarray, sizes: np.ndarray) -> _Blocks:
    """The blocks of images that have ranges of a piece's bytes; `Damaged` if an image does not have one."""
    extents = piece.extents
    row, within = extents.segment.searchsorted(places >> piece.shift), places & (1 << piece.shift) - 1
    if (is_bad := within + sizes > extents.size[row]).any():
        at = int(np.flatnonzero(is_bad)[0])
        raise Damaged("a snapshot's manifest names bytes that its image does not have",
                      file=images.get(extents.ids[extents.input_index[row[at]]]).name,
                      found=f"{sizes[at]} bytes at {within[at]} of segment {extents.segment[row[at]]}",
                      right=f"at most {extents.size[row[at]]}")
    first = within // format.BLOCK
    counts = (within + sizes - 1) // format.BLOCK - first + 1
    before = counts.cumsum() - counts
    numbers = np.repeat(first - before, counts) + np.arange(int(counts.sum()))
    # A segment has at most 2^28 blocks.
    blocks, block_of = np.unique(np.repeat(row, counts).astype(np.int64) << 28 | numbers, return_inverse=True)
    rows, numbers = blocks >> 28, blocks & (1 << 28) - 1
    sums = extents.offset[rows] + extents.size[rows] + numbers * SUM_BYTES
    some, begins, together = np.unique(rows, return_index=True, return_counts=True)
    firsts = sums[begins] // format.BLOCK * format.BLOCK
    lengths = sums[begins + together - 1] // format.BLOCK * format.BLOCK + format.BLOCK - firsts
    shift = len(blocks) * format.BLOCK + lengths.cumsum() - lengths - firsts  # from a place in the file to that read
    used, which = np.unique(np.concatenate((extents.input_index[rows], extents.input_index[some])), return_inverse=True)
    return _Blocks([images.get(extents.ids[k]).begin() for k in used.tolist()], which,
                   np.concatenate((extents.offset[rows] + numbers * format.BLOCK, firsts)),
                   np.concatenate((np.full(len(blocks), format.BLOCK), lengths)), len(blocks),
                   (sums + np.repeat(shift, together)) // SUM_BYTES,
                   block_of[before] * format.BLOCK + within % format.BLOCK)  # fmt: skip
