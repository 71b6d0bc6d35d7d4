"""Restored pieces: the records that were in memory at a snapshot, on disk. Key groups are loaded when they are needed.

A piece is the memtable of one process at one snapshot: chunks of records and texts, in images of segments. Its string
cells hold addresses of that process; they are checked against the text chunks of their group, and relocated, before
they are used.

Invariant: the records of a piece are older than those in memory and newer than those of runs. A group of a piece is
loaded completely, once; before that, single keys can be looked up in it (`piece_lookups.py`), which changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from scalein.errors import Damaged
from scalein.layout import GROUPS, INLINE_BYTES
from scalein.memory import address
from scalein.state import format
from scalein.state.index_runs import IndexRun
from scalein.state.manifest import Manifest
from scalein.state.memtable import RECORDS, TEXTS
from scalein.state.run_file import IndexMemory
from scalein.state.segment_images import SUM_BYTES, BlockRanges, Extent, ImageFile, verify_blocks
from scalein.storage.checked_json import Json
from scalein.storage.filesystem import FileSystem, Input

if TYPE_CHECKING:
    from scalein.kernels.store import StoreKernels

MAX_OPEN = 32  # image files, and as many index files, that stay open while they are not read


class ChunksByOffset(NamedTuple):
    """Chunks of one kind, sorted by their offset in the piece."""

    offset: np.ndarray
    used: np.ndarray
    group: np.ndarray

    def locate(self, offsets: np.ndarray, groups: np.ndarray, sizes: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
        """Which ranges of bytes lie in one chunk of their group, and their distance from its start."""
        if not len(self.offset):
            return np.zeros(len(offsets), bool), np.zeros(len(offsets), np.int64)
        at = np.maximum(self.offset.searchsorted(offsets, "right") - 1, 0)
        within = offsets - self.offset[at]
        return (within >= 0) & (within + sizes <= self.used[at]) & (self.group[at] == groups), within


class ExtentsBySegment(NamedTuple):
    """The image extents of the segments of a piece that hold chunks."""

    segment: np.ndarray  # sorted
    offset: np.ndarray
    size: np.ndarray
    image_index: np.ndarray  # of the image in `ids`
    ids: list[int]


@dataclass(eq=False)
class RestoredPiece:
    """The chunks of a piece; columns as in the manifest."""

    base: int
    shift: int
    group: np.ndarray
    kind: np.ndarray
    offset: np.ndarray
    used: np.ndarray
    segments: dict[int, tuple[int, Extent]]  # -> id of the image file, extent
    indexes: tuple[int, ...] | None = None  # ids of the index files; None: format 1, which has none
    loaded: frozenset[int] = frozenset()  # groups that are in memory again, or belong to another store

    @cached_property
    def chunk_rows(self) -> dict[int, np.ndarray]:
        """The rows of each group's chunks, loaded or not."""
        order = np.argsort(self.group, kind="stable")
        groups, starts = np.unique(self.group[order], return_index=True)
        return dict(zip(groups.tolist(), np.split(order, starts[1:]), strict=True)) if len(order) else {}

    @cached_property
    def groups(self) -> frozenset[int]:
        """The groups that are not loaded."""
        return frozenset(self.chunk_rows) - self.loaded

    @property
    def image_ids(self) -> set[int]:
        return {id for id, _ in self.segments.values()} if self.groups else set()

    @property
    def index_ids(self) -> set[int]:
        return set(self.indexes or ()) if self.groups else set()

    @property
    def file_names(self) -> set[str]:
        """The files that hold the groups which are not loaded."""
        return {format.image_name(id) for id in self.image_ids} | {format.index_name(id) for id in self.index_ids}

    @cached_property
    def used_segments(self) -> np.ndarray:
        """Segments that hold chunks, in order."""
        found: np.ndarray = np.unique(self.offset >> np.uint64(self.shift)).astype(np.int64)
        return found

    @cached_property
    def extents(self) -> ExtentsBySegment:
        found = [self.segments[segment] for segment in self.used_segments.tolist()]
        ids = sorted({id for id, _ in found})
        return ExtentsBySegment(self.used_segments, np.array([extent.offset for _, extent in found], np.int64),
                                np.array([extent.size for _, extent in found], np.int64),
                                np.array([ids.index(id) for id, _ in found], np.int64), ids)

    @cached_property
    def _by_offset(self) -> tuple[ChunksByOffset, ChunksByOffset]:
        order = np.argsort(self.offset, kind="stable")
        kinds = [order[self.kind[order] & 1 == kind] for kind in (RECORDS, TEXTS)]
        records, texts = (ChunksByOffset(self.offset[rows].astype(np.int64), self.used[rows].astype(np.int64),
                                         self.group[rows].astype(np.int64)) for rows in kinds)
        return records, texts

    def chunks_of(self, kind: int) -> ChunksByOffset:
        return self._by_offset[kind]

    @cached_property
    def group_bytes(self) -> np.ndarray:
        """Bytes of each group, loaded or not."""
        return np.bincount(self.group, self.used, GROUPS)

    def covers(self, hashes: np.ndarray) -> np.ndarray:
        """Which hashes belong to groups that are not loaded."""
        mask = np.zeros(GROUPS, bool)
        mask[list(self.groups)] = True
        found: np.ndarray = mask[(hashes >> np.uint64(56)).astype(np.int64)]
        return found

    def without(self, group: int) -> RestoredPiece:
        return self._with_loaded(self.loaded | {group})

    def restrict_to(self, groups: frozenset[int]) -> RestoredPiece:
        return self._with_loaded(self.loaded | (frozenset(self.chunk_rows) - groups))

    def _with_loaded(self, loaded: frozenset[int]) -> RestoredPiece:
        piece = replace(self, loaded=loaded)
        for name in ("chunk_rows", "used_segments", "extents", "_by_offset", "group_bytes"):  # independent of `loaded`
            if name in self.__dict__:
                piece.__dict__[name] = self.__dict__[name]
        return piece

    def to_tables(self, number: int) -> tuple[Json, dict[str, np.ndarray]]:
        """The piece for a manifest: JSON values, and tables whose names begin with its number."""
        rows = np.concatenate([self.chunk_rows[group] for group in self.groups]) if self.groups else np.zeros(0, int)
        rows = np.sort(rows)
        used = set(np.unique(self.offset[rows] >> np.uint64(self.shift)).tolist())
        extents = sorted((segment, extent) for segment, extent in self.segments.items() if segment in used)
        columns = {
            "group": self.group[rows], "kind": self.kind[rows], "offset": self.offset[rows], "used": self.used[rows],
            "segment": np.array([segment for segment, _ in extents], np.uint64),
            "image": np.array([id for _, (id, _) in extents], np.uint64),
            "at": np.array([extent.offset for _, (_, extent) in extents], np.uint64),
            "size": np.array([extent.size for _, (_, extent) in extents], np.uint64),
        }  # fmt: skip
        if self.indexes is not None:
            columns["index"] = np.array(self.indexes, np.uint64)
        return {"base": self.base, "shift": self.shift}, {f"{number}.{name}": c for name, c in columns.items()}

    @staticmethod
    def from_tables(manifest: Manifest, number: int, facts: dict[str, int]) -> RestoredPiece:
        def column(name: str) -> np.ndarray:
            return manifest.tables[f"{number}.{name}"]

        segments = {int(segment): (int(id), Extent(int(segment), int(at), int(size)))
                    for segment, id, at, size in zip(column("segment"), column("image"), column("at"), column("size"),
                                                     strict=True)}
        piece = RestoredPiece(facts["base"], facts["shift"], column("group"), column("kind"),
                              column("offset").astype(np.uint64), column("used").astype(np.uint64), segments,
                              tuple(column("index").tolist()) if f"{number}.index" in manifest.tables else None)
        piece.check()
        return piece

    def check(self) -> None:
        """Raise `ValueError` unless all groups, segments and offsets are valid."""
        base, shift = self.base, self.shift
        if not isinstance(base, int) or not 0 <= base < 1 << 62 or not isinstance(shift, int) or not 12 <= shift < 40:
            raise ValueError(f"segments of 2^{shift} bytes at {base}")
        if len({len(self.group), len(self.kind), len(self.offset), len(self.used)}) > 1:
            raise ValueError("columns of chunks have different lengths")
        if len(self.group) and not 0 <= int(self.group.min()) <= int(self.group.max()) < GROUPS:
            raise ValueError(f"key group {self.group.max()}")
        if int(self.offset.max(initial=0)) >= 1 << 62 or int(self.used.max(initial=0)) > 1 << shift:
            raise ValueError(f"{self.used.max()} bytes, offsets up to {self.offset.max()}")
        if len(self.offset) and int(((self.offset & np.uint64((1 << shift) - 1)) + self.used).max()) > 1 << shift:
            raise ValueError("chunks after the ends of their segments")
        if not all(isinstance(id, int) and 0 <= id < 1 << 62 for id in self.indexes or ()):
            raise ValueError(f"index files {self.indexes}")
        if missing := set(self.used_segments.tolist()) - self.segments.keys():
            raise ValueError(f"no image of segment {min(missing)}")


class PieceFiles:
    """Open image and index files. The least recently used are closed, unless they could not be opened again."""

    def __init__(self, fs: FileSystem, kernels: StoreKernels) -> None:
        self._fs, self._kernels = fs, kernels
        self._index_memory = IndexMemory()
        self._images: dict[int, ImageFile] = {}  # least recently used first
        self._indexes: dict[int, IndexRun] = {}
        self.may_reopen = False  # the directory is locked: no other process removes files

    @property
    def memory_bytes(self) -> int:
        """Memory of the directories of indexes."""
        return self._index_memory.bytes

    def image(self, id: int) -> ImageFile:
        image = self._images.pop(id, None) or ImageFile(self._fs, id, self._kernels.checksums)
        self._images[id] = image
        return image

    def index(self, id: int) -> IndexRun:
        index = self._indexes.pop(id, None) or IndexRun(self._fs, id, self._kernels.checksums, self._index_memory)
        self._indexes[id] = index
        return index

    def check(self, piece: RestoredPiece) -> None:
        """Open the files of a piece, so that they stay readable if another process removes them; `Damaged` if they are
        too short."""
        for id, extent in sorted(piece.segments.values()) if piece.groups else ():
            self.image(id).check(extent)
            self.trim()
        for id in piece.index_ids:
            self.index(id)
            self.trim()

    def take_unneeded(self, pieces: list[RestoredPiece]) -> list[ImageFile | IndexRun]:
        """Take the open files that none of these pieces needs; the caller closes them."""
        images = set[int]().union(*(piece.image_ids for piece in pieces))
        indexes = set[int]().union(*(piece.index_ids for piece in pieces))
        return [*(self._images.pop(id) for id in [*self._images] if id not in images),
                *(self._indexes.pop(id) for id in [*self._indexes] if id not in indexes)]

    def trim(self) -> None:
        """Close the least recently used files, if they can be opened again. No thread may be reading them."""
        for files in (self._images, self._indexes) if self.may_reopen else ():
            while len(files) > MAX_OPEN:
                files.pop(next(iter(files))).close()

    def verify(self, piece: RestoredPiece) -> None:
        """Read the whole piece; `Damaged` names the file that is not what was written."""
        for id, extent in sorted(piece.segments.values()):
            self.image(id).verify(extent)
            self.trim()
        for id in piece.index_ids:
            self.index(id).verify()
            self.trim()

    def close(self) -> None:
        for image in self._images.values():
            image.close()
        for index in self._indexes.values():
            index.close()


class _Chunk(NamedTuple):
    """A chunk of a group: its offset in the piece, its bytes in use, their position in the bytes read, its image."""

    kind: int
    offset: int
    used: int
    position: int
    image: ImageFile


@dataclass(frozen=True, eq=False)
class GroupRead:
    """The blocks of a group of a piece to be read, and after all of these their checksums."""

    group: int
    number: int  # of the piece
    chunks: list[_Chunk]
    inputs: list[Input]
    input_index: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    block_counts: np.ndarray  # of each chunk
    sums_at: np.ndarray  # of each chunk, the position of its checksums in the bytes read


def group_request(number: int, piece: RestoredPiece, group: int, files: PieceFiles) -> GroupRead:
    """The read of a group of a piece; `Damaged` if the manifest names bytes that an image does not have."""
    found: list[tuple[_Chunk, BlockRanges]] = []
    end = 0
    rows = piece.chunk_rows[group]
    for kind, offset, used in zip((piece.kind[rows] & 1).tolist(), piece.offset[rows].tolist(),
                                  piece.used[rows].tolist(), strict=True):  # fmt: skip
        if not used:
            continue
        id, extent = piece.segments[offset >> piece.shift]
        image, start = files.image(id), offset & (1 << piece.shift) - 1
        if start + used > extent.size or start % format.BLOCK:
            raise Damaged("a snapshot's manifest names bytes that its image does not have", file=image.name,
                          found=f"{used} bytes at {start} of segment {offset >> piece.shift}",
                          expected=f"at most {extent.size}")
        ranges = image.block_ranges(extent, start, used)
        found.append((_Chunk(kind, offset, used, end, image), ranges))
        end += ranges.size
    chunks = [chunk for chunk, _ in found]
    ids = list(dict.fromkeys(chunk.image.id for chunk in chunks))
    image_index = np.array([ids.index(chunk.image.id) for chunk in chunks], np.int64)
    columns = np.array([ranges for _, ranges in found], np.int64).reshape(-1, len(BlockRanges._fields))
    sums_sizes = columns[:, 3]
    return GroupRead(group, number, chunks, [files.image(id).input for id in ids],
                     np.concatenate((image_index, image_index)),
                     np.concatenate((columns[:, 0], columns[:, 2])), np.concatenate((columns[:, 1], sums_sizes)),
                     columns[:, 1] // format.BLOCK, end + sums_sizes.cumsum() - sums_sizes + columns[:, 4])


def group_records(read: GroupRead, area: np.ndarray, piece: RestoredPiece, kernels: StoreKernels) -> np.ndarray:
    """Pointers to a group's records in the bytes that were read; their string cells point there as well.

    `Damaged` if the bytes are not what was written, or a string is outside of the group's texts.
    """
    _verify(read, area, kernels)
    size = kernels.record_bytes
    texts = [(chunk.offset, area[chunk.position :][: chunk.used]) for chunk in read.chunks if chunk.kind == TEXTS]
    pointers = [np.zeros(0, np.uint64)]
    for chunk in read.chunks:
        if chunk.kind == RECORDS:
            records = area[chunk.position :][: chunk.used // size * size].reshape(-1, size)
            if kernels.text_cells:
                _relocate_strings(records, kernels.text_cells, piece.base, texts, chunk.image.name)
            start = address(records)
            pointers.append(np.arange(start, start + len(records) * size, size, dtype=np.uint64))
    return np.concatenate(pointers)


def _verify(read: GroupRead, area: np.ndarray, kernels: StoreKernels) -> None:
    counts = read.block_counts
    before = counts.cumsum() - counts
    nth = np.arange(int(counts.sum())) - np.repeat(before, counts)  # in its chunk
    offsets = np.repeat(read.offsets[: len(counts)], counts) + nth * format.BLOCK
    ids = np.array([chunk.image.id for chunk in read.chunks], np.uint64)
    stored = area.view("<u8")[np.repeat(read.sums_at // SUM_BYTES, counts) + nth]

    def origin(block: int) -> tuple[str, int]:
        chunk = int(before.searchsorted(block, "right")) - 1
        return read.chunks[chunk].image.name, int(offsets[block])

    blocks = area[: len(nth) * format.BLOCK].reshape(-1, format.BLOCK)
    verify_blocks(blocks, np.repeat(ids, counts) ^ offsets.astype(np.uint64), stored, origin, kernels.checksums)


def _relocate_strings(records: np.ndarray, cells: tuple[int, ...], base: int, texts: list[tuple[int, np.ndarray]],
                      name: str) -> None:
    """Let long cells point to the texts as they were read."""
    texts = sorted(texts, key=lambda text: text[0])
    starts = np.array([base + offset for offset, _ in texts], np.uint64)
    sizes = np.array([len(data) for _, data in texts], np.uint64)
    addresses = np.array([address(data) for _, data in texts], np.uint64)
    for cell in cells:
        lengths = records[:, cell : cell + 4].copy().view("<u4")[:, 0].astype(np.uint64)
        long = np.flatnonzero(lengths > INLINE_BYTES)
        if not len(long):
            continue
        old = records[long, cell + 8 : cell + 16].copy().view("<u8")[:, 0]
        at = np.searchsorted(starts, old, "right") - 1
        inside = at >= 0
        if inside.all():
            within = old - starts[at]
            inside = (within <= sizes[at]) & (lengths[long] <= sizes[at] - np.minimum(within, sizes[at]))
        if not inside.all():
            raise Damaged("a string of a stored record is outside of its texts", file=name,
                          found=f"{np.count_nonzero(~inside)} of {len(long)} strings")
        records[long, cell + 8 : cell + 16] = (addresses[at] + within).astype("<u8").view(np.uint8).reshape(-1, 8)
