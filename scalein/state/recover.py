"""What a snapshot left on disk of the records in memory: pieces, whose key groups are read when they are touched.

A piece is the memory of one process at one freeze: chunks of records and texts, in images of segments. Strings in it
lead to addresses of that process; they are translated, and held against the chunks of their group, before anything
follows them.

Invariant: a group of a piece is older than whatever memory holds of it, and newer than its runs. It is loaded whole,
once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from scalein.errors import Damaged
from scalein.layout import GROUPS, INLINE_BYTES
from scalein.memory import address
from scalein.state.files import Files, aligned
from scalein.state.hot import RECORDS, TEXTS
from scalein.state.images import Extent, Image
from scalein.state.kernels import Kernels
from scalein.state.manifest import Json, Manifest


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

    def without(self, group: int) -> Piece:
        piece = replace(self, loaded=self.loaded | {group})
        piece.__dict__["rows"] = self.rows
        return piece

    def only(self, groups: frozenset[int]) -> Piece:
        piece = replace(self, loaded=self.loaded | (frozenset(self.rows) - groups))
        piece.__dict__["rows"] = self.rows
        return piece

    def record_count(self, group: int, record_bytes: int) -> int:
        rows = self.rows[group]
        return int((self.used[rows[self.kind[rows] == RECORDS]] // np.uint64(record_bytes)).sum())

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
        return {"base": self.base, "shift": self.shift}, {f"{number}.{name}": c for name, c in columns.items()}

    @staticmethod
    def from_tables(manifest: Manifest, number: int, facts: dict[str, int]) -> Piece:
        def column(name: str) -> np.ndarray:
            return manifest.tables[f"{number}.{name}"]

        segments = {int(segment): (int(id), Extent(int(segment), int(at), int(size)))
                    for segment, id, at, size in zip(column("segment"), column("image"), column("at"), column("size"),
                                                     strict=True)}
        piece = Piece(facts["base"], facts["shift"], column("group"), column("kind"),
                      column("offset").astype(np.uint64), column("used").astype(np.uint64), segments)
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
        if missing := set(np.unique(self.offset >> np.uint64(shift)).tolist()) - self.segments.keys():
            raise ValueError(f"no image of segment {min(missing)}")


class Images:
    """Image files, opened once."""

    def __init__(self, files: Files, kernels: Kernels) -> None:
        self._files, self._kernels = files, kernels
        self._open: dict[int, Image] = {}

    def get(self, id: int) -> Image:
        if id not in self._open:
            self._open[id] = Image(self._files, id, self._kernels.checksums)
        return self._open[id]

    def close(self) -> None:
        for image in self._open.values():
            image.close()


@dataclass(frozen=True, eq=False)
class Loaded:
    """Records of a group as they were read, and the bytes that their strings lead to."""

    pointers: np.ndarray
    kept: list[np.ndarray]


def load(piece: Piece, group: int, images: Images, kernels: Kernels) -> Loaded:
    """A group's records, with addresses of this process; `Damaged` if a string leads out of the group's texts."""
    rows = piece.rows[group]
    chunks = {TEXTS: [], RECORDS: []}  # type: dict[int, list[tuple[int, np.ndarray, str]]]
    for row in rows.tolist():
        offset, used = int(piece.offset[row]), int(piece.used[row])
        if used:
            data, name = _read(piece, images, offset, used)
            chunks[int(piece.kind[row]) & 1].append((offset, data, name))
    size = kernels.record_bytes
    pointers = []
    for _, data, name in chunks[RECORDS]:
        records = data[: len(data) // size * size].reshape(-1, size)
        if kernels.text_cells:
            _translate(records, kernels.text_cells, piece.base, chunks[TEXTS], name)
        start = address(data)
        pointers.append(np.arange(start, start + len(records) * size, size, dtype=np.uint64))
    kept = [data for kind in chunks.values() for _, data, _ in kind]
    return Loaded(np.concatenate(pointers) if pointers else np.zeros(0, np.uint64), kept)


def _read(piece: Piece, images: Images, offset: int, used: int) -> tuple[np.ndarray, str]:
    segment = offset >> piece.shift
    start = offset - (segment << piece.shift)
    id, extent = piece.segments[segment]
    image = images.get(id)
    if start + used > extent.size:
        raise Damaged("a snapshot's manifest names bytes that its image does not have", file=image.name,
                      found=f"{used} bytes at {start} of segment {segment}", right=f"at most {extent.size}")
    data = aligned(used)
    data[:] = image.read(extent, start, used)
    return data, image.name


def _translate(records: np.ndarray, cells: tuple[int, ...], base: int, texts: list[tuple[int, np.ndarray, str]],
               name: str) -> None:
    """Let long strings lead to the texts as they were read."""
    texts = sorted(texts, key=lambda text: text[0])
    starts = np.array([base + offset for offset, _, _ in texts], np.uint64)
    sizes = np.array([len(data) for _, data, _ in texts], np.uint64)
    places = np.array([address(data) for _, data, _ in texts], np.uint64)
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
