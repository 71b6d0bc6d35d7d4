"""PieceLookups: reads the records of single keys from restored pieces, without loading their key groups.

Index entries give the offsets of records, offsets give blocks of images; with text, cells give further blocks. Each of
these steps is done for all keys at once, a few buffers of blocks at a time.

Invariant: an offset is read only if, by the chunks of the manifest, a record of the key's group lies there, and a
string only if it lies in a text chunk of that group; nothing is used before the checksums of its blocks are verified.
So an index may contain anything, and a hostile one does no harm.

Threads: called under the store's lock.
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
from scalein.state.arena import MIN_CHUNK
from scalein.state.compaction import BYTES_PER_READ
from scalein.state.memtable import RECORDS, TEXTS
from scalein.state.pieces import PieceFiles, RestoredPiece
from scalein.state.run_levels import MergeTable, pointers_to
from scalein.state.segment_images import SUM_BYTES, ImageFile, verify_blocks
from scalein.storage.aio import BlockReader
from scalein.storage.filesystem import Input

if TYPE_CHECKING:
    from scalein.kernels.store import Functions, StoreKernels

READS_PER_KEY = 3  # as a rule: a block of the index, of an image, and of the image's checksums
CHUNK_OVERHEAD = 1.5  # memory of a loaded group per byte, at most, besides the smallest chunks of records and of texts
INDEX_OVERHEAD = 20  # bytes of index per loaded record, at most
MAX_LOAD_BYTES = 8 << 20  # of groups that a call loads because of earlier calls


@dataclass(frozen=True, eq=False)
class _BlockRead:
    """Blocks of images that hold some byte ranges of a piece, each once, and after them their checksums.

    The checksums of one extent are read at once, including those in between: one larger read costs less than several.
    Range k begins at byte `at[k]` of the bytes read.
    """

    images: list[ImageFile]
    input_index: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    count: int  # of blocks without checksums
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
class _TextRead(_BlockRead):
    """The blocks of the long strings of records, and the record and cell of each range."""

    records: np.ndarray  # (n, record bytes), including those without long strings
    row: np.ndarray
    cell: np.ndarray


class PieceLookups:
    """Looks keys up in pieces, and decides which groups to load instead."""

    def __init__(self, kernels: StoreKernels, reader: BlockReader) -> None:
        self._kernels, self._reader = kernels, reader
        self._requested = np.zeros(GROUPS)  # keys of each group, so far

    def groups_to_load(self, pieces: list[RestoredPiece], keys: np.ndarray,
                       free_bytes: int) -> tuple[list[int], list[int]]:
        """The groups without an index, which must be loaded, and those that are better loaded than looked up when so
        many keys of each are requested: the smallest first, as many as fit into memory.

        The latter are groups for which loading costs less right now, and a few for which it would have cost less, had
        all requests been known. So groups that are read again and again are soon in memory, and no call waits long.
        """
        size = sum((piece.group_bytes for piece in pieces), np.zeros(GROUPS))
        is_unloaded, has_no_index = np.zeros(GROUPS, bool), np.zeros(GROUPS, bool)
        for piece in pieces:
            is_unloaded[list(piece.groups)] = True
            has_no_index[list(piece.groups)] |= piece.indexes is None
        is_requested = is_unloaded & (keys > 0)
        may_load = is_requested & ~has_no_index
        now = may_load & (READS_PER_KEY * BYTES_PER_READ * keys > size)
        late = np.flatnonzero(may_load & ~now & (READS_PER_KEY * BYTES_PER_READ * self._requested > size))
        late = late[size[late].cumsum() - size[late] < MAX_LOAD_BYTES]
        self._requested += keys
        better = np.concatenate((np.flatnonzero(now), late))
        better = better[np.argsort(size[better], kind="stable")]
        memory = size[better] * (CHUNK_OVERHEAD + INDEX_OVERHEAD / self._kernels.record_bytes) + 2 * MIN_CHUNK
        return np.flatnonzero(is_requested & has_no_index).tolist(), better[memory.cumsum() <= free_bytes].tolist()

    def read(self, piece: RestoredPiece, files: PieceFiles, hashes: np.ndarray, functions: Functions,
             table: MergeTable) -> None:
        """Merge the records of some sorted hashes into a table, as newer than all that it holds."""
        hashes = hashes[piece.covers(hashes)]
        if not len(hashes):
            return
        offsets, groups = self._candidate_offsets(piece, files, hashes)
        found = (self._with_text(piece, files, offsets, groups) if self._kernels.text_cells else
                 self._plain(piece, files, offsets))  # fmt: skip
        for pointers in found:
            found_hashes = self._kernels.hash_keys(pointers)
            is_requested = hashes[np.minimum(hashes.searchsorted(found_hashes), len(hashes) - 1)] == found_hashes
            table.merge(np.ascontiguousarray(pointers[is_requested]), functions)

    def _candidate_offsets(self, piece: RestoredPiece, files: PieceFiles,
                           hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Offsets of records that may have these hashes, in order and each once, and their groups."""
        indexes, most = [files.index(id) for id in piece.indexes or ()], self._reader.buffer_bytes // format.BLOCK
        for read, area in self._reader.read(read for index in indexes for read in index.directory_reads(hashes, most)):
            read.source.add_directory_blocks(read, area)
        reads = (read for index in indexes for read in index.entry_reads(hashes, most))
        found = [read.source.matches(read, area) for read, area in self._reader.read(reads)]
        offsets = np.concatenate([np.zeros(0, np.int64), *(offsets for offsets, _ in found)])
        groups = np.concatenate([np.zeros(0, np.uint64), *(theirs for _, theirs in found)]) >> np.uint64(56)
        groups = groups.astype(np.int64)
        inside, within = piece.chunks_of(RECORDS).locate(offsets, groups, self._kernels.record_bytes)
        inside &= within % self._kernels.record_bytes == 0
        offsets, first = np.unique(offsets[inside], return_index=True)  # only now: an offset belongs to one group
        return offsets, groups[inside][first]

    def _plain(self, piece: RestoredPiece, files: PieceFiles, offsets: np.ndarray) -> Iterator[np.ndarray]:
        """Pointers to the records at some offsets, which the next step may overwrite."""
        sizes = np.full(len(offsets), self._kernels.record_bytes)
        reads = (_locate(piece, files, offsets[first:last], sizes[first:last])
                 for first, last in self._split(_max_blocks(sizes) + 1))
        for read, area in self._reader.read(reads):
            read.verify(area, self._kernels)
            yield (read.at + address(area)).astype(np.uint64)

    def _with_text(self, piece: RestoredPiece, files: PieceFiles, offsets: np.ndarray,
                   groups: np.ndarray) -> Iterator[np.ndarray]:
        """The same for records with text; their cells point to the bytes read."""
        nothing = np.zeros((0, self._kernels.record_bytes), np.uint8)
        records = np.concatenate([nothing, *map(self._kernels.gather, self._plain(piece, files, offsets))])
        for read, area in self._reader.read(self._text_reads(piece, files, records, offsets, groups)):
            read.verify(area, self._kernels)
            addresses = (read.at + address(area)).astype("<u8").view(np.uint8).reshape(-1, 8)
            read.records[read.row[:, None], read.cell[:, None] + np.arange(8, 16)] = addresses
            yield pointers_to(read.records)

    def _text_reads(self, piece: RestoredPiece, files: PieceFiles, records: np.ndarray, offsets: np.ndarray,
                    groups: np.ndarray) -> Iterator[_TextRead]:
        cells = np.array(self._kernels.text_cells)
        sizes, addresses = (np.stack([records[:, cell + at : cell + at + width].copy().view(kind)[:, 0]
                                      for cell in self._kernels.text_cells], axis=1).astype(np.uint64)
                            for at, width, kind in ((0, 4, "<u4"), (8, 8, "<u8")))
        sizes = np.where(sizes > INLINE_BYTES, sizes, 0).astype(np.int64)
        for first, last in self._split(np.where(sizes, _max_blocks(sizes) + 1, 0).sum(axis=1)):
            row, column = np.nonzero(sizes[first:last])
            size = sizes[first:last][row, column]
            texts = addresses[first:last][row, column] - np.uint64(piece.base)  # an overflow is in no chunk
            texts = np.minimum(texts, np.uint64(1 << 62)).astype(np.int64)
            inside, _ = piece.chunks_of(TEXTS).locate(texts, groups[first:last][row], size)
            if not inside.all():
                wrong = int(offsets[first + row[int(np.argmin(inside))]])
                raise Damaged("a string of a stored record is outside of its texts",
                              file=files.image(piece.segments[wrong >> piece.shift][0]).name,
                              found=f"{np.count_nonzero(~inside)} of {len(row)} strings")
            yield _TextRead(**vars(_locate(piece, files, texts, size)), records=records[first:last], row=row,
                            cell=cells[column])  # fmt: skip

    def _split(self, blocks: np.ndarray) -> Iterator[tuple[int, int]]:
        """Ranges of items with so many blocks each that fit into a read buffer; a larger item is a range by itself."""
        ends = (blocks * format.BLOCK).cumsum()
        first = before = 0
        while first < len(ends):
            last = max(first + 1, int(ends.searchsorted(before + self._reader.buffer_bytes, "right")))
            yield first, last
            first, before = last, int(ends[last - 1])


def _max_blocks(sizes: np.ndarray) -> np.ndarray:
    """The number of blocks that a range of so many bytes can touch."""
    found: np.ndarray = (sizes + format.BLOCK - 2) // format.BLOCK + 1
    return found


def _locate(piece: RestoredPiece, files: PieceFiles, offsets: np.ndarray, sizes: np.ndarray) -> _BlockRead:
    """The blocks of images that hold byte ranges of a piece; `Damaged` if an image is too short."""
    extents = piece.extents
    row, within = extents.segment.searchsorted(offsets >> piece.shift), offsets & (1 << piece.shift) - 1
    if (is_bad := within + sizes > extents.size[row]).any():
        at = int(np.flatnonzero(is_bad)[0])
        raise Damaged("a snapshot's manifest names bytes that its image does not have",
                      file=files.image(extents.ids[extents.image_index[row[at]]]).name,
                      found=f"{sizes[at]} bytes at {within[at]} of segment {extents.segment[row[at]]}",
                      expected=f"at most {extents.size[row[at]]}")
    first = within // format.BLOCK
    counts = (within + sizes - 1) // format.BLOCK - first + 1
    before = counts.cumsum() - counts
    numbers = np.repeat(first - before, counts) + np.arange(int(counts.sum()))
    # A segment has at most 2^28 blocks.
    blocks, block_of = np.unique(np.repeat(row, counts).astype(np.int64) << 28 | numbers, return_inverse=True)
    rows, numbers = blocks >> 28, blocks & (1 << 28) - 1
    sums = extents.offset[rows] + extents.size[rows] + numbers * SUM_BYTES
    used_rows, starts, per_row = np.unique(rows, return_index=True, return_counts=True)
    firsts = sums[starts] // format.BLOCK * format.BLOCK
    lengths = sums[starts + per_row - 1] // format.BLOCK * format.BLOCK + format.BLOCK - firsts
    shift = len(blocks) * format.BLOCK + lengths.cumsum() - lengths - firsts  # from offsets in the file to those read
    used_images, image_index = np.unique(np.concatenate((extents.image_index[rows], extents.image_index[used_rows])),
                                         return_inverse=True)
    return _BlockRead([files.image(extents.ids[k]).verified() for k in used_images.tolist()], image_index,
                      np.concatenate((extents.offset[rows] + numbers * format.BLOCK, firsts)),
                      np.concatenate((np.full(len(blocks), format.BLOCK), lengths)), len(blocks),
                      (sums + np.repeat(shift, per_row)) // SUM_BYTES,
                      block_of[before] * format.BLOCK + within % format.BLOCK)  # fmt: skip
