"""Saving: from a freeze to a manifest on disk, and what may be removed afterwards.

Invariant: a file is removed only after no kept snapshot names it, no snapshot under way will, and the store itself does
not read it. An old manifest is gone from the directory, synced, before any of its files is removed.

Threads: one thread copies, one writes snapshots, in order; `save` and `begin` are called under the store's lock.
Neither thread takes that lock: a freeze may wait for them while it is held.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from scalein.errors import BadArgument, BadName, Damaged, ScaleinError, StoreFailed, WrongType, here
from scalein.state import format, manifest
from scalein.state.budget import Budget
from scalein.state.checksum import Checksums
from scalein.state.columns import check_names, key_schema, value_schema
from scalein.state.compaction import step_back
from scalein.state.indexer import Chunks, Indexer
from scalein.state.manifest import Json, Manifest
from scalein.state.pieces import Images, Piece
from scalein.state.restored import piece_files
from scalein.state.snapshot import Copier, Frozen, ImageFiles, Snapshot
from scalein.state.tiers import Tiers
from scalein.storage.filesystem import FileSystem

if TYPE_CHECKING:
    from scalein.kernels.store import StoreKernels


class Saver:
    """The snapshots of a store: those that are kept, and those under way."""

    def __init__(self, fs: FileSystem, kernels: StoreKernels, tiers: Tiers, budget: Budget, workers: int, keep: int,
                 number: Callable[[int], int]) -> None:
        self._fs, self._kernels, self._tiers, self._keep, self._number = fs, kernels, tiers, keep, number
        self.copier = Copier(tiers.hot, workers, budget.copies, budget.log_bytes)
        self._images = ImageFiles(fs, tiers.hot, self.copier)
        self._indexer = Indexer(fs, kernels, tiers.hot.arena.base, budget.scratch_records(kernels.record_bytes))
        self._is_limited = budget.total is not None
        self._kept: dict[int, frozenset[str]] = {}  # snapshots -> the files that they name
        self.held: frozenset[int] = frozenset()  # snapshots that stay however many newer ones there are
        self._doubtful: set[str] = set()  # files of snapshots that failed, but may be found at the next start
        self._under_way: list[Frozen] = []
        self._writer = ThreadPoolExecutor(1, "scalein-snapshot")
        # Behind rows: to free the blocks of an old image keeps a core for milliseconds. Not the writer itself, for
        # which memory that was left waits to be used again.
        self._remover = ThreadPoolExecutor(1, "scalein-remove", step_back)
        self._books = Lock()  # over the snapshots that are kept and under way
        self._removing = Lock()
        self.is_behind = False  # a snapshot failed since the last whole one

    @property
    def index_error(self) -> BaseException | None:
        """Why index files could not be merged the last time."""
        return self._indexer.error

    @property
    def ids(self) -> list[int]:
        return sorted(self._kept)

    def begin(self, newest: Manifest) -> None:
        """Go on from a snapshot: newer ones are left behind, and what no other names is removed."""
        for id in format.ids(self._fs.names(), "snapshot"):
            if id > newest.id:
                self._fs.remove(format.manifest_name(id))
            elif id == newest.id:
                self._kept[id] = names_in(newest)
            else:
                try:
                    self._kept[id] = names_in(manifest.read(self._fs, id, self._kernels.checksums))
                except (Damaged, KeyError, ValueError):  # a damaged one is no reason to keep anything
                    self._fs.remove(format.manifest_name(id))
        self._fs.sync_directory()
        self.remove_garbage(is_start=True)

    # --- writing

    def save(self, id: int, image_id: int, merged_id: int, meta: dict[str, Json]) -> Snapshot:
        """Freeze the store as it is, and write it in the background."""
        tiers, hot = self._tiers, self._tiers.hot
        copy = self.copier.mark()
        facts: list[Json] = []
        tables: dict[str, np.ndarray] = {}
        for number, piece in enumerate(tiers.past.pieces):
            about, columns = piece.to_tables(number)
            facts.append(about)
            tables |= columns
        with self._books:  # which runs there are, and that this needs them, is one step to `remove_garbage`
            runs = list(tiers.cold.runs)
            ids: list[Json] = [[run.id for run in some] for some in runs]
            masks: dict[str, Json] = {str(run.id): [*sorted(run.groups)] for some in runs for run in some
                                      if run.groups is not None}
            meta = {**meta, "runs": ids, "masks": masks, "pieces": facts, "functions": list(tiers.functions)}
            frozen = Frozen(id, image_id, merged_id, meta,
                            hot.headers.copy(), hot.chunks.rows[: hot.chunks.count].copy(), copy,
                            frozenset(tiers.files(runs)), hot.pin(), tables)
            frozen.waits = [run.made for some in runs for run in some]  # also those that failed by now
            self._under_way.append(frozen)
        self._writer.submit(self._write, frozen)
        return Snapshot(frozen)

    def _write(self, frozen: Frozen) -> None:
        try:
            self._write_files(frozen)
        except BaseException as error:
            frozen.error = error
        self._tiers.hot.unpin(frozen.pin)
        with self._books:
            self._under_way.remove(frozen)
            self.is_behind = frozen.error is not None
        frozen.done.set()
        if frozen.error is None:
            self._indexer.merge_soon(frozen.merged_id)
            try:
                self._forget_old()
            except ScaleinError as error:
                warnings.warn(f"old files of a store could not be removed: {error}", RuntimeWarning, stacklevel=2)

    def _write_files(self, frozen: Frozen) -> None:
        chunks = frozen.chunk_tables(self._tiers.hot.arena.base)
        if not self._is_limited:  # the sooner segments are copied, the less is logged of what changes in them
            self._images.write(frozen)
        indexes = self._indexer.add(frozen.image_id, Chunks.of(chunks, self._kernels.record_bytes))
        self._tiers.hot.unpin(frozen.pin)
        if self._is_limited:  # the sooner chunks that records left can be used again, the less memory is taken
            self._images.write(frozen)
        for run in frozen.waits:
            run.result()
        self._publish(frozen, chunks, indexes)

    def _publish(self, frozen: Frozen, chunks: dict[str, np.ndarray], indexes: list[int]) -> None:
        arena = self._tiers.hot.arena
        needed = np.unique(chunks["offset"] >> np.uint64(arena.shift)).tolist()
        if any(segment not in self._images.known for segment in needed):
            raise StoreFailed("a snapshot before this one failed, and this one needs what that should have written")
        piece = Piece(arena.base, arena.shift, chunks["group"], chunks["kind"], chunks["offset"], chunks["used"],
                      {segment: self._images.known[segment] for segment in needed}, tuple(indexes))
        pieces = frozen.meta["pieces"]
        assert isinstance(pieces, list)
        about, columns = piece.to_tables(len(pieces))
        files = frozen.files | piece_files(piece)
        names: list[Json] = [*sorted(files)]
        meta: dict[str, Json] = {**frozen.meta, "pieces": [*pieces, about], "files": names}
        with self._books:
            self._doubtful |= files
        manifest.publish(self._fs, Manifest(frozen.id, meta, {**frozen.tables, **columns}), self._kernels.checksums)
        with self._books:
            self._kept[frozen.id] = files
            self._doubtful = set()  # there is a newer one now

    # --- removing

    def _forget_old(self) -> None:
        on_disk = format.ids(self._fs.names(), "snapshot")
        with self._books:
            staying = self.ids[-self._keep :]
        staying = [*self.held, *staying]
        old = [id for id in on_disk if id < staying[-1] and id not in staying]  # also one that failed after its rename
        for id in old:
            self._fs.remove(format.manifest_name(id))
        self._fs.sync_directory()  # a manifest must not come back without its files
        with self._books:
            for id in old:
                self._kept.pop(id, None)
        self._remover.submit(self.remove_garbage).result()

    def remove_garbage(self, is_start: bool = False) -> None:
        """Remove what neither a kept snapshot nor this store needs.

        A file that is newer than the newest snapshot may be on its way to be needed, unless it was replaced. Ids are
        never used twice, so what is garbage stays garbage, and nobody waits while a large file is removed (0.1 s).
        """
        with self._removing:
            names = self._fs.names()
            # In this order: a freeze that names a run which is gone from the tiers by now is in the books by then.
            dropped = self._tiers.compactor.dropped
            replaced = set(dropped)
            needed = self._tiers.files(self._tiers.cold.runs) | self._tiers.compactor.being_written()
            with self._books:
                newest = max(self._kept, default=0)
                needed = needed.union(*self._kept.values(), *(frozen.files for frozen in self._under_way))
                needed |= {format.image_name(frozen.image_id) for frozen in self._under_way}
                needed |= self._doubtful
                needed |= {format.index_name(frozen.image_id) for frozen in self._under_way}
            needed |= {format.image_name(id) for id, _ in list(self._images.known.values())} | self._indexer.files
            found = [(id, path_of(id)) for kind, path_of in (("run", format.run_name), ("image", format.image_name),
                                                             ("index", format.index_name))
                     for id in format.ids(names, kind)]
            for id, name in found:
                if name not in needed and (is_start or self._number(id) < newest or name in replaced):
                    self._fs.remove(name)
                    dropped.discard(name)
            if is_start:
                for name in names:
                    plain = name.removeprefix(format.TEMPORARY)
                    if plain != name and any(format.ids([plain], kind) for kind in format.KINDS):
                        self._fs.remove(name)

    def verify(self) -> None:
        """Read the images of what is in memory; `Damaged` names the file that is not what was written."""
        self._writer.submit(lambda: None).result()  # what is being written may replace and remove what is read here
        images = Images(self._fs, self._kernels)
        try:
            for id, extent in list(self._images.known.values()):
                images.get(id).verify(extent)
            for run in self._indexer.runs:
                images.index(run.id).verify()
        finally:
            images.close()

    def settle(self) -> None:
        """Wait for the snapshots under way. Not under the lock."""
        for frozen in list(self._under_way):
            frozen.done.wait()

    def close(self) -> None:
        """Wait for the snapshots under way, and take no more. Not under the lock."""
        self._writer.shutdown(wait=True)
        self._remover.shutdown(wait=True)
        self._images.close()
        self._indexer.close()


# --- manifests


def find_manifest(fs: FileSystem, snapshot: int | None, checksums: Checksums) -> Manifest | None:
    """The newest whole manifest, or the one asked for; a damaged newest one is said and passed over."""
    if snapshot is not None:
        known = format.ids(fs.names(), "snapshot")
        if snapshot not in known:
            raise StoreFailed(f"the store has no snapshot {snapshot}", at=here(), file=fs.path_of(""),
                              has=", ".join(map(str, known)))
        return manifest.read(fs, snapshot, checksums)
    damaged: Damaged | None = None
    for found in manifest.newest(fs, checksums):
        if isinstance(found, Manifest):
            if damaged is not None:
                warnings.warn(f"the newest snapshot is damaged, going back to {found.id}: {damaged}", RuntimeWarning,
                              stacklevel=4)
            return found
        damaged = damaged or found
    if damaged is not None:
        raise damaged
    return None


def names_in(found: Manifest) -> frozenset[str]:
    """The files that a snapshot consists of."""
    names = found.meta["files"]
    if not isinstance(names, list):
        raise ValueError(f"files: {names!r}")
    return frozenset(str(name) for name in names)


def file_id(given: Json) -> int:
    """The id of a file as a manifest names it."""
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given < 1 << 62:
        raise ValueError(f"no id of a file: {given!r}")
    return given


def schema_text(schema: pa.Schema) -> str:
    return bytes(schema.serialize()).hex()


def schemas_of(found: Manifest, fs: FileSystem) -> tuple[pa.Schema, pa.Schema]:
    """The key and value columns that a manifest names."""
    try:
        key, value = (pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(str(found.meta[name]))))
                      for name in ("key", "value"))
        if not (key_schema(key).equals(key) and value_schema(value).equals(value)):
            raise ValueError(f"columns that a store does not have: {[*key.names, *value.names]}")
        check_names(key, value)
    except (KeyError, ValueError, pa.ArrowException, BadArgument, BadName, WrongType) as error:
        raise Damaged("a snapshot's manifest has no columns", file=fs.path_of(format.manifest_name(found.id)),
                      found=repr(error)) from error
    return key, value
