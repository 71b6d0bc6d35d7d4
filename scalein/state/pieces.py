"""What a snapshot left on disk of the records in memory: pieces, whose key groups are read when they are touched.

A piece is the memory of one process at one freeze: chunks of records and texts, in images of segments. Strings in it
lead to addresses of that process; they are translated, and held against the chunks of their group, before anything
follows them.

Invariant: a group of a piece is older than whatever memory holds of it, and newer than its runs. It is loaded whole,
once; before, single keys may be looked up in it (lookups.py), which changes nothing.
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
from scalein.state.manifest import Json, Manifest
from scalein.state.memtable import RECORDS, TEXTS
from scalein.state.run_file import Held
from scalein.state.segment_images import SUM_BYTES, Extent, Image, Places, verify_blocks
from scalein.storage.filesystem import FileSystem, Input

if TYPE_CHECKING:
    from scalein.kernels.store import StoreKernels

MOST_OPEN = 32  # images, and as many indexes, that stay open while nobody reads them


class ChunksByPlace(NamedTuple):
    """Chunks of one kind, sorted by where they were in memory."""

    offset: np.ndarray
    used: np.ndarray
    group: np.ndarray

    def holding(self, places: np.ndarray, groups: np.ndarray, sizes: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
        """Which ranges of bytes lie in one chunk of their group, and how far behind its beginning."""
        if not len(self.offset):
            return np.zeros(len(places), bool), np.zeros(len(places), np.int64)
        at = np.maximum(self.offset.searchsorted(places, "right") - 1, 0)
        within = places - self.offset[at]
        return (within >= 0) & (within + sizes <= self.used[at]) & (self.group[at] == groups), within


class ExtentsBySegment(NamedTuple):
    """Where images have the segments of a piece that have chunks."""

    segment: np.ndarray  # sorted
    offset: np.ndarray
    size: np.ndarray
    input_index: np.ndarray  # of the images
    ids: list[int]


@dataclass(eq=False)
class Piece:
    """Chunks by key group; columns as in the manifest."""

    base: int
    shift: int
    group: np.ndarray
    kind: np.ndarray
    offset: np.ndarray
    used: np.ndarray
    segments: dict[int, tuple[int, Extent]]  # -> image file, extent
    indexes: tuple[int, ...] | None = None  # index files; None: of a time when there were none
    loaded: frozenset[int] = frozenset()  # groups that are in memory again

    @cached_property
    def rows(self) -> dict[int, np.ndarray]:
        """The chunks of each group, loaded or not."""
        order = np.argsort(self.group, kind="stable")
        groups, starts = np.unique(self.group[order], return_index=True)
        return dict(zip(groups.tolist(), np.split(order, starts[1:]), strict=True)) if len(order) else {}

    @cached_property
    def groups(self) -> frozenset[int]:
        """Those that were not loaded yet."""
        return frozenset(self.rows) - self.loaded

    @property
    def image_ids(self) -> set[int]:
        return {id for id, _ in self.segments.values()} if self.groups else set()

    @property
    def index_ids(self) -> set[int]:
        return set(self.indexes or ()) if self.groups else set()

    @cached_property
    def needed(self) -> np.ndarray:
        """Segments that have chunks, in order."""
        found: np.ndarray = np.unique(self.offset >> np.uint64(self.shift)).astype(np.int64)
        return found

    @cached_property
    def extents(self) -> ExtentsBySegment:
        found = [self.segments[segment] for segment in self.needed.tolist()]
        ids = sorted({id for id, _ in found})
        return ExtentsBySegment(self.needed, np.array([extent.offset for _, extent in found], np.int64),
                                np.array([extent.size for _, extent in found], np.int64),
                                np.array([ids.index(id) for id, _ in found], np.int64), ids)

    @cached_property
    def _by_place(self) -> tuple[ChunksByPlace, ChunksByPlace]:
        order = np.argsort(self.offset, kind="stable")
        kinds = [order[self.kind[order] & 1 == kind] for kind in (RECORDS, TEXTS)]
        records, texts = (ChunksByPlace(self.offset[rows].astype(np.int64), self.used[rows].astype(np.int64),
                                        self.group[rows].astype(np.int64)) for rows in kinds)
        return records, texts

    def chunks_of(self, kind: int) -> ChunksByPlace:
        return self._by_place[kind]

    @cached_property
    def group_bytes(self) -> np.ndarray:
        """What each group has, loaded or not."""
        return np.bincount(self.group, self.used, GROUPS)

    def has(self, hashes: np.ndarray) -> np.ndarray:
        """Which hashes are of groups that were not loaded yet."""
        mask = np.zeros(GROUPS, bool)
        mask[list(self.groups)] = True
        found: np.ndarray = mask[(hashes >> np.uint64(56)).astype(np.int64)]
        return found

    def without(self, group: int) -> Piece:
        return self._with_loaded(self.loaded | {group})

    def only(self, groups: frozenset[int]) -> Piece:
        return self._with_loaded(self.loaded | (frozenset(self.rows) - groups))

    def _with_loaded(self, loaded: frozenset[int]) -> Piece:
        piece = replace(self, loaded=loaded)
        for name in ("rows", "needed", "extents", "_by_place", "group_bytes"):  # which depend on all chunks
            if name in self.__dict__:
                piece.__dict__[name] = self.__dict__[name]
        return piece

    def to_tables(self, number: int) -> tuple[Json, dict[str, np.ndarray]]:
        """The piece for a manifest: facts, and tables whose names begin with its number."""
        stay = np.sort(np.concatenate([self.rows[group] for group in self.groups]) if self.groups else np.zeros(0, int))
        needed = set(np.unique(self.offset[stay] >> np.uint64(self.shift)).tolist())
        places = sorted((segment, place) for segment, place in self.segments.items() if segment in needed)
        columns = {
            "group": self.group[stay], "kind": self.kind[stay], "offset": self.offset[stay], "used": self.used[stay],
            "segment": np.array([segment for segment, _ in places], np.uint64),
            "image": np.array([id for _, (id, _) in places], np.uint64),
            "at": np.array([extent.offset for _, (_, extent) in places], np.uint64),
            "size": np.array([extent.size for _, (_, extent) in places], np.uint64),
        }  # fmt: skip
        if self.indexes is not None:
            columns["index"] = np.array(self.indexes, np.uint64)
        return {"base": self.base, "shift": self.shift}, {f"{number}.{name}": c for name, c in columns.items()}

    @staticmethod
    def from_tables(manifest: Manifest, number: int, facts: dict[str, int]) -> Piece:
        def column(name: str) -> np.ndarray:
            return manifest.tables[f"{number}.{name}"]

        segments = {int(segment): (int(id), Extent(int(segment), int(at), int(size)))
                    for segment, id, at, size in zip(column("segment"), column("image"), column("at"), column("size"),
                                                     strict=True)}
        piece = Piece(facts["base"], facts["shift"], column("group"), column("kind"),
                      column("offset").astype(np.uint64), column("used").astype(np.uint64), segments,
                      tuple(column("index").tolist()) if f"{number}.index" in manifest.tables else None)
        piece.check()
        return piece

    def check(self) -> None:
        """Raise `ValueError` unless it says something about groups and segments that there are."""
        base, shift = self.base, self.shift
        if not isinstance(base, int) or not 0 <= base < 1 << 62 or not isinstance(shift, int) or not 12 <= shift < 40:
            raise ValueError(f"segments of 2^{shift} bytes at {base}")
        if len({len(self.group), len(self.kind), len(self.offset), len(self.used)}) > 1:
            raise ValueError("chunks without all of their columns")
        if len(self.group) and not 0 <= int(self.group.min()) <= int(self.group.max()) < GROUPS:
            raise ValueError(f"key group {self.group.max()}")
        if int(self.offset.max(initial=0)) >= 1 << 62 or int(self.used.max(initial=0)) > 1 << shift:
            raise ValueError(f"{self.used.max()} bytes, offsets up to {self.offset.max()}")
        if len(self.offset) and int(((self.offset & np.uint64((1 << shift) - 1)) + self.used).max()) > 1 << shift:
            raise ValueError("chunks beyond the ends of their segments")
        if not all(isinstance(id, int) and 0 <= id < 1 << 62 for id in self.indexes or ()):
            raise ValueError(f"index files {self.indexes}")
        if missing := set(self.needed.tolist()) - self.segments.keys():
            raise ValueError(f"no image of segment {min(missing)}")


class Images:
    """Image files and their index files. Those used last are open; all, if they could not be opened again."""

    def __init__(self, fs: FileSystem, kernels: StoreKernels) -> None:
        self._fs, self._kernels = fs, kernels
        self._held = Held()
        self._open: dict[int, Image] = {}  # the one used last is the last
        self._indexes: dict[int, IndexRun] = {}
        self.may_reopen = False  # nobody else may remove them: the directory is ours

    @property
    def memory_bytes(self) -> int:
        """What directories of indexes take."""
        return self._held.bytes

    def get(self, id: int) -> Image:
        image = self._open.pop(id, None) or Image(self._fs, id, self._kernels.checksums)
        self._open[id] = image
        return image

    def index(self, id: int) -> IndexRun:
        index = self._indexes.pop(id, None) or IndexRun(self._fs, id, self._kernels.checksums, self._held)
        self._indexes[id] = index
        return index

    def check(self, piece: Piece) -> None:
        """Open the files of a piece, which others may remove from now on unless they are ours; `Damaged` if they are
        too short for it."""
        for id, extent in sorted(piece.segments.values()) if piece.groups else ():
            self.get(id).check(extent)
            self.trim()
        for id in piece.index_ids:
            self.index(id)
            self.trim()

    def take_unneeded(self, pieces: list[Piece]) -> list[Image | IndexRun]:
        """Open files that none of these pieces is in; who takes them closes them."""
        images = set[int]().union(*(piece.image_ids for piece in pieces))
        indexes = set[int]().union(*(piece.index_ids for piece in pieces))
        return [*(self._open.pop(id) for id in [*self._open] if id not in images),
                *(self._indexes.pop(id) for id in [*self._indexes] if id not in indexes)]

    def trim(self) -> None:
        """Close those that were used longest ago, as far as they can be opened again. Nobody may be reading them."""
        for files in (self._open, self._indexes) if self.may_reopen else ():
            while len(files) > MOST_OPEN:
                files.pop(next(iter(files))).close()

    def verify(self, piece: Piece) -> None:
        """Read all of a piece; `Damaged` names the file that is not what was written."""
        for id, extent in sorted(piece.segments.values()):
            self.get(id).verify(extent)
            self.trim()
        for id in piece.index_ids:
            self.index(id).verify()
            self.trim()

    def close(self) -> None:
        for image in self._open.values():
            image.close()
        for index in self._indexes.values():
            index.close()


class _Chunk(NamedTuple):
    """A chunk of a group: where it was in memory, its bytes, where they are among those read, and its image."""

    kind: int
    offset: int
    used: int
    place: int
    image: Image


@dataclass(frozen=True, eq=False)
class GroupRead:
    """The blocks that have a group of a piece, and behind all of these their checksums."""

    group: int
    number: int  # of the piece
    chunks: list[_Chunk]
    inputs: list[Input]
    input_index: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    block_counts: np.ndarray  # of each chunk
    sums_at: np.ndarray  # of each chunk, where its checksums begin among the bytes that are read


def group_read(number: int, piece: Piece, group: int, images: Images) -> GroupRead:
    """What to read for a group of a piece; `Damaged` if the manifest names bytes that an image does not have."""
    found: list[tuple[_Chunk, Places]] = []
    end = 0
    rows = piece.rows[group]
    for kind, offset, used in zip((piece.kind[rows] & 1).tolist(), piece.offset[rows].tolist(),
                                  piece.used[rows].tolist(), strict=True):  # fmt: skip
        if not used:
            continue
        id, extent = piece.segments[offset >> piece.shift]
        image, start = images.get(id), offset & (1 << piece.shift) - 1
        if start + used > extent.size or start % format.BLOCK:
            raise Damaged("a snapshot's manifest names bytes that its image does not have", file=image.name,
                          found=f"{used} bytes at {start} of segment {offset >> piece.shift}",
                          right=f"at most {extent.size}")
        places = image.places(extent, start, used)
        found.append((_Chunk(kind, offset, used, end, image), places))
        end += places.size
    chunks, all_places = [chunk for chunk, _ in found], [places for _, places in found]
    ids = list(dict.fromkeys(chunk.image.id for chunk in chunks))
    which = np.array([ids.index(chunk.image.id) for chunk in chunks], np.int64)
    columns = np.array(all_places, np.int64).reshape(-1, len(Places._fields))
    sums_sizes = columns[:, 3]
    return GroupRead(group, number, chunks, [images.get(id).input for id in ids], np.concatenate((which, which)),
                     np.concatenate((columns[:, 0], columns[:, 2])), np.concatenate((columns[:, 1], sums_sizes)),
                     columns[:, 1] // format.BLOCK, end + sums_sizes.cumsum() - sums_sizes + columns[:, 4])


def records_in(read: GroupRead, area: np.ndarray, piece: Piece, kernels: StoreKernels) -> np.ndarray:
    """Pointers to a group's records in the bytes that were read, whose strings lead there as well.

    `Damaged` if these are not what was written, or a string leads out of the group's texts.
    """
    _verify(read, area, kernels)
    size = kernels.record_bytes
    texts = [(chunk.offset, area[chunk.place :][: chunk.used]) for chunk in read.chunks if chunk.kind == TEXTS]
    pointers = [np.zeros(0, np.uint64)]
    for chunk in read.chunks:
        if chunk.kind == RECORDS:
            records = area[chunk.place :][: chunk.used // size * size].reshape(-1, size)
            if kernels.text_cells:
                _translate(records, kernels.text_cells, piece.base, texts, chunk.image.name)
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


def _translate(records: np.ndarray, cells: tuple[int, ...], base: int, texts: list[tuple[int, np.ndarray]],
               name: str) -> None:
    """Let long strings lead to the texts as they were read."""
    texts = sorted(texts, key=lambda text: text[0])
    starts = np.array([base + offset for offset, _ in texts], np.uint64)
    sizes = np.array([len(data) for _, data in texts], np.uint64)
    places = np.array([address(data) for _, data in texts], np.uint64)
    for cell in cells:
        lengths = records[:, cell : cell + 4].copy().view("<u4")[:, 0].astype(np.uint64)
        long = np.flatnonzero(lengths > INLINE_BYTES)
        if not len(long):
            continue
        leads = records[long, cell + 8 : cell + 16].copy().view("<u8")[:, 0]
        at = np.searchsorted(starts, leads, "right") - 1
        inside = at >= 0
        if inside.all():
            within = leads - starts[at]
            inside = (within <= sizes[at]) & (lengths[long] <= sizes[at] - np.minimum(within, sizes[at]))
        if not inside.all():
            raise Damaged("a string of a stored record leads out of its texts", file=name,
                          found=f"{np.count_nonzero(~inside)} of {len(long)} strings")
        records[long, cell + 8 : cell + 16] = (places[at] + within).astype("<u8").view(np.uint8).reshape(-1, 8)
