"""SnapshotWriter: from a capture to a manifest on disk, and the removal of files that are no longer needed.

Invariant: a file is removed only when no retained snapshot names it, no snapshot that is being written will, and the
store itself does not read it. An old manifest is removed durably before any of its files is.

Threads: one thread copies, one writes snapshots, in order; `capture` and `adopt` are called under the store's lock. The
threads do not take that lock: a capture may wait for them while it is held.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from scalein.errors import Damaged, ScaleinError, StoreFailed, warn
from scalein.state import format, manifest
from scalein.state.budget import Budget
from scalein.state.compaction import lower_priority
from scalein.state.indexer import Indexer, RecordChunks
from scalein.state.manifest import Manifest, manifest_files
from scalein.state.pieces import PieceFiles, RestoredPiece
from scalein.state.snapshot import Capture, SegmentCopier, SegmentImages, Snapshot
from scalein.state.tiers import Tiers
from scalein.storage.checked_json import Json
from scalein.storage.filesystem import FileSystem
from scalein.storage.publish import TEMPORARY

if TYPE_CHECKING:
    from scalein.kernels.store import StoreKernels


class SnapshotWriter:
    """The snapshots of a store: those that are retained, and those that are being written."""

    def __init__(self, fs: FileSystem, kernels: StoreKernels, tiers: Tiers, budget: Budget, workers: int, keep: int,
                 number: Callable[[int], int]) -> None:
        self._fs, self._kernels, self._tiers, self._keep, self._number = fs, kernels, tiers, keep, number
        self.copier = SegmentCopier(tiers.memtable, workers, budget.segment_copies, budget.undo_log_bytes)
        self._images = SegmentImages(fs, tiers.memtable, self.copier)
        self._indexer = Indexer(fs, kernels, tiers.memtable.arena.base, budget.merge_records(kernels.record_bytes))
        self._has_budget = budget.total is not None
        self._retained: dict[int, frozenset[str]] = {}  # snapshots -> the files that they name
        self.held: frozenset[int] = frozenset()  # snapshots that are retained however many newer ones there are
        self._uncertain_files: set[str] = set()  # of snapshots that failed, but may be found at the next start
        self._in_progress: list[Capture] = []
        self._writer = ThreadPoolExecutor(1, "scalein-snapshot")
        # With a low priority: freeing the blocks of an old image occupies a core for milliseconds. The writer itself
        # keeps its priority: evicted memory can be reused only once it has unpinned the chunks.
        self._remover = ThreadPoolExecutor(1, "scalein-remove", lower_priority)
        self._lock = Lock()  # over the retained snapshots and those in progress
        self._removing = Lock()
        self.last_failed = False

    @property
    def index_error(self) -> BaseException | None:
        """Why the last merge of index files failed."""
        return self._indexer.error

    @property
    def ids(self) -> list[int]:
        return sorted(self._retained)

    def adopt(self, newest: Manifest) -> None:
        """Continue after a snapshot: newer ones are removed, and so are files that no remaining one names."""
        for id in format.ids(self._fs.names(), "snapshot"):
            if id > newest.id:
                self._fs.remove(format.manifest_name(id))
            elif id == newest.id:
                self._retained[id] = manifest_files(newest)
            else:
                try:
                    self._retained[id] = manifest_files(manifest.read(self._fs, id, self._kernels.checksums))
                except (Damaged, KeyError, ValueError):  # a damaged one retains nothing
                    self._fs.remove(format.manifest_name(id))
        self._fs.sync_directory()
        self.remove_obsolete_files(is_start=True)

    # --- writing

    def capture(self, id: int, image_id: int, merged_id: int, meta: dict[str, Json]) -> Snapshot:
        """Capture the store as it is, and write it in the background."""
        tiers, memtable = self._tiers, self._tiers.memtable
        copies = self.copier.mark_changed()
        facts: list[Json] = []
        tables: dict[str, np.ndarray] = {}
        for number, piece in enumerate(tiers.restored.pieces):
            about, columns = piece.to_tables(number)
            facts.append(about)
            tables |= columns
        with self._lock:  # `remove_obsolete_files` sees the list of runs and the reference to it change at once
            runs = list(tiers.levels.runs)
            ids: list[Json] = [[run.id for run in shard_runs] for shard_runs in runs]
            masks: dict[str, Json] = {str(run.id): [*sorted(run.groups)] for shard_runs in runs for run in shard_runs
                                      if run.groups is not None}
            meta = {**meta, "runs": ids, "masks": masks, "pieces": facts, "functions": list(tiers.functions)}
            capture = Capture(id, image_id, merged_id, meta, memtable.headers.copy(),
                              memtable.chunks.rows[: memtable.chunks.count].copy(), copies,
                              frozenset(tiers.file_names(runs)), memtable.pin(), tables)
            capture.runs = [run.written for shard_runs in runs for run in shard_runs]  # also those that have failed
            self._in_progress.append(capture)
        self._writer.submit(self._write, capture)
        return Snapshot(capture)

    def _write(self, capture: Capture) -> None:
        try:
            self._write_files(capture)
        except BaseException as error:
            capture.error = error
        self._tiers.memtable.unpin(capture.pin)
        with self._lock:
            self._in_progress.remove(capture)
            self.last_failed = capture.error is not None
        capture.done.set()
        if capture.error is None:
            self._indexer.schedule_merge(capture.merged_id)
            try:
                self._remove_old_snapshots()
            except ScaleinError as error:
                warn(f"old files of a store could not be removed: {error}")

    def _write_files(self, capture: Capture) -> None:
        chunks = capture.chunk_tables(self._tiers.memtable.arena.base)
        if not self._has_budget:  # the sooner segments are copied, the fewer changes are logged
            self._images.write(capture)
        indexes = self._indexer.add(capture.image_id, RecordChunks.of(chunks, self._kernels.record_bytes))
        self._tiers.memtable.unpin(capture.pin)
        if self._has_budget:  # the sooner chunks are unpinned, the sooner evicted memory can be reused
            self._images.write(capture)
        for run in capture.runs:
            run.result()
        self._publish(capture, chunks, indexes)

    def _publish(self, capture: Capture, chunks: dict[str, np.ndarray], indexes: list[int]) -> None:
        arena, extents = self._tiers.memtable.arena, self._images.extents
        segments = np.unique(chunks["offset"] >> np.uint64(arena.shift)).tolist()
        if any(segment not in extents for segment in segments):
            raise StoreFailed("an earlier snapshot failed, and this one needs an image that it should have written")
        piece = RestoredPiece(arena.base, arena.shift, chunks["group"], chunks["kind"], chunks["offset"],
                              chunks["used"], {segment: extents[segment] for segment in segments}, tuple(indexes))
        pieces = capture.meta["pieces"]
        assert isinstance(pieces, list)
        about, columns = piece.to_tables(len(pieces))
        files = capture.files | piece.file_names
        names: list[Json] = [*sorted(files)]
        meta: dict[str, Json] = {**capture.meta, "pieces": [*pieces, about], "files": names}
        with self._lock:
            self._uncertain_files |= files
        manifest.publish(self._fs, Manifest(capture.id, meta, {**capture.tables, **columns}), self._kernels.checksums)
        with self._lock:
            self._retained[capture.id] = files
            self._uncertain_files = set()  # there is a newer snapshot now

    # --- removing

    def _remove_old_snapshots(self) -> None:
        on_disk = format.ids(self._fs.names(), "snapshot")
        with self._lock:
            newest = self.ids[-self._keep :]
        retained = [*self.held, *newest]
        old = [id for id in on_disk if id < newest[-1] and id not in retained]  # also one that failed after its rename
        for id in old:
            self._fs.remove(format.manifest_name(id))
        self._fs.sync_directory()  # a manifest must not reappear without its files
        with self._lock:
            for id in old:
                self._retained.pop(id, None)
        self._remover.submit(self.remove_obsolete_files).result()

    def remove_obsolete_files(self, is_start: bool = False) -> None:
        """Remove files that neither a retained snapshot nor this store needs.

        A file that is newer than the newest snapshot may belong to the next one, unless it was replaced. Ids are never
        reused, so an obsolete file stays obsolete, and no lock is held while a large file is removed (0.1 s).
        """
        with self._removing:
            names = self._fs.names()
            # In this order: a capture that names a run which was replaced meanwhile is in progress by then.
            obsolete = self._tiers.compactor.obsolete_files
            replaced = set(obsolete)
            needed = self._tiers.file_names(self._tiers.levels.runs) | self._tiers.compactor.files_being_written()
            with self._lock:
                newest = max(self._retained, default=0)
                needed = needed.union(*self._retained.values(), *(capture.files for capture in self._in_progress))
                needed |= {format.image_name(capture.image_id) for capture in self._in_progress}
                needed |= self._uncertain_files
                needed |= {format.index_name(capture.image_id) for capture in self._in_progress}
            needed |= {format.image_name(id) for id, _ in list(self._images.extents.values())} | self._indexer.files
            found = [(id, name_of(id)) for kind, name_of in (("run", format.run_name), ("image", format.image_name),
                                                             ("index", format.index_name))
                     for id in format.ids(names, kind)]
            for id, name in found:
                if name not in needed and (is_start or self._number(id) < newest or name in replaced):
                    self._fs.remove(name)
                    obsolete.discard(name)
            if is_start:
                for name in names:
                    final = name.removeprefix(TEMPORARY)
                    if final != name and any(format.ids([final], kind) for kind in format.KINDS):
                        self._fs.remove(name)

    def verify(self) -> None:
        """Read the images of the memtable; `Damaged` names the file that is not what was written."""
        self._writer.submit(lambda: None).result()  # a snapshot in progress may replace and remove files
        files = PieceFiles(self._fs, self._kernels)
        try:
            for id, extent in list(self._images.extents.values()):
                files.image(id).verify(extent)
            for run in self._indexer.runs:
                files.index(run.id).verify()
        finally:
            files.close()

    def wait(self) -> None:
        """Wait for the snapshots in progress. Not under the store's lock."""
        for capture in list(self._in_progress):
            capture.done.wait()

    def close(self) -> None:
        """Wait for the snapshots in progress, and accept no more. Not under the store's lock."""
        self._writer.shutdown(wait=True)
        self._remover.shutdown(wait=True)
        self._images.close()
        self._indexer.close()
