"""LogStore: keyed state by batch, larger than memory, with snapshots that do not stop it.

Records in memory (`hot`), snapshots of them (`snapshot`), what left memory (`cold`), what a reopened store has not yet
read (`recover`): this module ties them together, under one lock that every call of the user's takes.

Invariant: what a key's value is follows from, oldest first: its bundle's runs, the pieces that were not loaded yet, the
record in memory. A record that does not know all that is older is PARTIAL, or its group says so (`NEW_FLAGS`).

Threads: any thread may call; calls run one after the other. A snapshot thread writes, a compaction thread merges runs.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType

import numpy as np
import pyarrow as pa

from scalein.errors import BadArgument, Damaged, ScaleinError, StoreFailed, here
from scalein.layout import GROUPS, PARTIAL, TOMB
from scalein.memory import address
from scalein.options import Options
from scalein.sizes import parse_size
from scalein.state import format, manifest
from scalein.state.arena import Arena
from scalein.state.budget import Budget
from scalein.state.cold import BUNDLE_GROUPS, BUNDLES, Cold, ColdRun, Scratch, cold_enough, groups_of, to_merge
from scalein.state.columns import (
    Given,
    SchemaLike,
    batches_of,
    check_names,
    functions_of,
    key_schema,
    keys_of,
    value_schema,
)
from scalein.state.files import Files, Held, RealFiles
from scalein.state.hot import HotTable
from scalein.state.kernels import Functions, Kernels, find_kernels
from scalein.state.manifest import Json, Manifest
from scalein.state.recover import Images, Piece, load
from scalein.state.snapshot import Copier, Frozen, ImageFiles, Snapshot
from scalein.state.sums import SumBounds

KEPT_SNAPSHOTS = 3
KEPT_SHARE = 0.25  # of a bundle's records, those hit most, that stay in memory when it is evicted


class LogStore:
    """Keyed state on disk and in memory. Everything goes by batch.

    >>> import tempfile, pyarrow as pa
    >>> folder = tempfile.mkdtemp()
    >>> with LogStore.open(folder, key={"user": pa.string()}, value={"n": pa.int64(), "best": pa.float64()}) as store:
    ...     store.merge(pa.table({"user": ["a", "b", "a"], "n": [1, 1, 1], "best": [0.5, 2.0, 1.5]}), n="sum", best="max")
    ...     store.get(pa.array(["a", "z"])).to_pylist()
    [{'n': 2, 'best': 1.5}, {'n': None, 'best': None}]
    """

    def __init__(self, files: Files, key: pa.Schema, value: pa.Schema, *, budget: Budget, workers: int, keep: int,
                 readonly: bool, options: Options, kernels: Kernels | None = None) -> None:
        self._files, self._key, self._value = files, key, value
        self._budget, self._workers, self._keep, self._readonly = budget, workers, keep, readonly
        self._kernels = kernels or find_kernels(key, value, options)
        self._hot = HotTable(self._kernels, Arena(budget.segment_bytes), budget.most_chunk)
        self._copier = Copier(self._hot, workers)
        self._images = ImageFiles(files, self._hot, self._copier)
        self._cold = Cold(files, self._kernels)
        self._scratch: Scratch | None = None
        self._old_images = Images(files, self._kernels)
        self._pieces: list[Piece] = []  # oldest first
        self._functions: Functions = ("",) * len(value)  # of the partials in memory
        self._sums = SumBounds(value)
        self._lock = threading.RLock()
        self._next_id = 1
        self._clock = 0  # the bundle that is evicted next
        self._changed = False
        self._snapshots: dict[int, frozenset[str]] = {}  # kept ones -> the files that they name
        self._under_way: list[Frozen] = []
        self._writer = ThreadPoolExecutor(1, "scalein-snapshot")
        self._compactor = ThreadPoolExecutor(1, "scalein-compact")
        self._compacting: dict[int, Future[None]] = {}
        self._compact_error: BaseException | None = None
        self._held: Held | None = None
        self._closed = False

    # --- opening

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, key: SchemaLike | None = None, value: SchemaLike | None = None,
             memory: str | int | None = None, snapshot: int | None = None, readonly: bool = False, workers: int = 1,
             keep: int = KEPT_SNAPSHOTS) -> LogStore:
        """Open a store, or create it if there is none and `key` is given.

        `memory` is all that it may hold in memory ("64MB"); what is more goes to disk. `snapshot` opens an older one,
        `readonly` takes no lock and changes nothing. `keep` is the number of snapshots that stay.
        """
        options = Options.make(workers=workers, at=here())
        if not isinstance(keep, int) or keep < 1:
            raise BadArgument("keep must be a number of snapshots, at least 1", at=here(), found=repr(keep))
        budget = Budget.of(None if memory is None else parse_size(memory, at=here()))
        if key is None and not os.path.isdir(path):
            raise StoreFailed("there is no store in this directory", at=here(), file=os.fspath(path),
                              hint="give key= and value= to create one")
        files = RealFiles(path, readonly)
        return cls.open_files(files, key=key, value=value, budget=budget, snapshot=snapshot, readonly=readonly, keep=keep,
                              options=options)

    @classmethod
    def open_files(cls, files: Files, *, key: SchemaLike | None, value: SchemaLike | None, budget: Budget,
                   snapshot: int | None = None, readonly: bool = False, keep: int = KEPT_SNAPSHOTS,
                   options: Options | None = None, kernels: Kernels | None = None) -> LogStore:
        """Open a store behind the seam to the operating system; tests bring disks and kernels of their own."""
        held = None if readonly else files.lock()
        try:
            found = _find_manifest(files, snapshot)
            keys = None if key is None else key_schema(key)
            values = None if value is None and key is None else value_schema(value or {})
            if found is None:
                if keys is None or values is None or readonly:
                    raise StoreFailed("there is no store in this directory", at=here(), file=files.name_of(""),
                                      hint="give key= and value= to create one")
            else:
                known = _schemas(found, files)
                for name, ours, theirs in (("key", keys, known[0]), ("value", values, known[1])):
                    if ours is not None and not ours.equals(theirs):
                        raise BadArgument(f"the store has other {name} columns than it was opened with", at=here(),
                                          found=_shown(ours), has=_shown(theirs))
                keys, values = known
            check_names(keys, values)
            options = options or Options.make(workers=1)
            store = cls(files, keys, values, budget=budget, workers=options.workers, keep=keep, readonly=readonly,
                        options=options, kernels=kernels)
            store._held = held
            if found is not None:
                store._restore(found)
            if not readonly:
                store._begin(found)
            return store
        except BaseException:
            if held is not None:
                held.release()
            raise

    def _restore(self, found: Manifest) -> None:
        meta = found.meta
        try:
            self._next_id = max(int(meta["next"]), found.id + 1)  # type: ignore[arg-type]
            self._functions = tuple(str(name) for name in meta["functions"])  # type: ignore[union-attr]
            self._sums.restore(meta["bounds"])
            self._pieces = [Piece.from_tables(found, k, facts)  # type: ignore[arg-type]
                            for k, facts in enumerate(meta["pieces"])]  # type: ignore[arg-type]
            self._cold.runs = [tuple(self._cold.open(int(id)) for id in ids)  # type: ignore[arg-type,union-attr]
                               for ids in meta["runs"]]  # type: ignore[union-attr]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise Damaged("a snapshot's manifest does not say what a snapshot has",
                          file=self._files.name_of(format.manifest_name(found.id)), found=repr(error)) from error
        for id in {id for piece in self._pieces for id in piece.image_ids}:
            self._old_images.get(id)
        self._flag_groups()

    def _begin(self, found: Manifest | None) -> None:
        """Make a new store one on disk; remove what no snapshot names."""
        names = self._files.names()
        self._next_id = max([self._next_id, *(id + 1 for kind in ("snapshot", "image", "run")
                                               for id in format.ids(names, kind))])
        if found is None:
            self._changed = True
            self.snapshot().wait()
            return
        for id in format.ids(names, "snapshot"):
            try:
                self._snapshots[id] = _named(manifest.read(self._files, id))
            except (ScaleinError, KeyError, TypeError, ValueError):  # a damaged one is no reason to keep anything
                if id > found.id:
                    self._snapshots[id] = frozenset()
        # Going on from an older snapshot leaves the newer ones behind.
        for id in [id for id in self._snapshots if id > found.id]:
            del self._snapshots[id]
            self._files.remove(format.manifest_name(id))
        self._files.sync_directory()
        self._remove_garbage()

    def _flag_groups(self) -> None:
        """New records of a group are partial where anything older lies outside of memory."""
        waiting = {group for piece in self._pieces for group in piece.groups}
        for group in range(GROUPS):
            is_partial = group in waiting or bool(self._cold.runs[group // BUNDLE_GROUPS])
            self._hot.set_flags(group, PARTIAL if is_partial else 0)

    # --- rows

    def merge(self, rows: Given, **functions: str) -> None:
        """Merge rows into the values of their keys: `merge(table, n="sum", best="max")`.

        sum, count, min, max, first, last: a null changes nothing. replace: the newest row counts. A value column
        without a function stays as it is.
        """
        with self._writing():
            chosen = functions_of(self._value, functions, rows.schema.names, self._key)
            fields = [f for f, function in zip(self._value, chosen, strict=True)
                      if function and (function != "count" or f.name in rows.schema.names)]
            self._keep_rows(batches_of(rows, self._key, fields, "merge"), chosen)

    def upsert(self, rows: Given) -> None:
        """Set the values of keys; of several rows of one key the last counts."""
        with self._writing():
            self._keep_rows(batches_of(rows, self._key, self._value, "upsert"), ("replace",) * len(self._value))

    def _keep_rows(self, batches: list[pa.RecordBatch], functions: Functions) -> None:
        for batch in self._slices(batches):
            if any(function not in ("", "replace") for function in functions) or "" in functions:
                self._use_functions(functions)
            self._sums.check(batch, functions, partial(self._try, batch, functions))
            self._hot.batch += 1
            self._kernels.keep(self._hot, batch, functions, self._workers)

    def _try(self, batch: pa.RecordBatch, functions: Functions) -> None:
        """Merge rows into copies of their records: what fails here leaves the store as it is."""
        scratch = Scratch(self._kernels)
        pointers, _ = self._kernels.find(self._hot, batch)
        scratch.absorb(np.unique(pointers[pointers != 0]), self._functions)
        self._kernels.keep(scratch.table, batch, functions, 1)

    def _use_functions(self, functions: Functions) -> None:
        """Partials in memory are all made by the same functions: others leave it before."""
        if functions != self._functions:
            if self._pieces or any(self._cold.runs):
                self._load_all()
                for bundle in range(BUNDLES):
                    self._evict(bundle, 0.0)
            self._functions = functions

    def delete(self, keys: Given | pa.Array | pa.ChunkedArray) -> None:
        """Forget keys; those that are not there are no error."""
        with self._writing():
            for batch in self._slices(keys_of(keys, self._key, "delete")):
                self._hot.batch += 1
                self._kernels.delete(self._hot, batch, self._workers)

    def _slices(self, batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Rows in pieces that memory has room for."""
        for batch in batches:
            step = self._budget.rows(self._kernels.record_bytes)
            for start in range(0, batch.num_rows, step):
                piece = batch.slice(start, step)
                self._make_room(piece.nbytes if self._kernels.text_cells else 0)
                self._changed = True
                yield piece

    def get(self, keys: Given | pa.Array | pa.ChunkedArray) -> pa.Table:
        """The values of keys, row by row; null where a key is not there."""
        with self._reading():
            names = self._value.names
            parts = [rows for batch in keys_of(keys, self._key, "get")
                     for start in range(0, batch.num_rows, self._budget.rows(self._kernels.record_bytes))
                     for rows in self._get(batch.slice(start, self._budget.rows(self._kernels.record_bytes)), names)]
            return _table(parts, self._value)

    def _get(self, batch: pa.RecordBatch, names: list[str]) -> list[pa.RecordBatch]:
        pointers, hashes = self._kernels.find(self._hot, batch)
        groups = (hashes >> np.uint64(56)).astype(np.int64)
        waiting = {group for piece in self._pieces for group in piece.groups}
        if waiting:
            touched = waiting & set(np.unique(groups).tolist())
            for group in sorted(touched):
                self._load(group)
            if touched:
                pointers, hashes = self._kernels.find(self._hot, batch)
        nothing = np.frombuffer(bytearray(self._kernels.template), np.uint8).copy()
        nothing[0] |= TOMB
        has_runs = np.array([bool(runs) for runs in self._cold.runs])[groups // BUNDLE_GROUPS]
        asked = np.flatnonzero(has_runs & (pointers == 0))
        found = np.flatnonzero(has_runs & (pointers != 0))
        if len(found):
            heads = self._kernels.gather(np.ascontiguousarray(pointers[found]))[:, :8].copy().view(np.uint64)[:, 0]
            asked = np.sort(np.concatenate((asked, found[(heads & np.uint64(PARTIAL)) != 0])))
        if len(asked):
            self._find_cold(batch.take(pa.array(asked)), asked, pointers, hashes)
        pointers = np.where(pointers == 0, np.uint64(address(nothing)), pointers)
        return self._kernels.rows(pointers, names)

    def _find_cold(self, batch: pa.RecordBatch, asked: np.ndarray, pointers: np.ndarray, hashes: np.ndarray) -> None:
        """Bring together what runs and memory have of some rows' keys, and let their pointers lead there."""
        scratch = self._scratch_table()
        wanted = np.unique(hashes[asked])
        for bundle in np.unique(wanted >> np.uint64(60)).tolist():
            inside = wanted[(wanted >> np.uint64(60)) == np.uint64(bundle)]
            self._cold.find(int(bundle), inside, scratch)
        partial = np.unique(pointers[asked])
        scratch.absorb(np.ascontiguousarray(partial[partial != 0]), self._functions)
        pointers[asked] = self._kernels.find(scratch.table, batch)[0]

    def scan(self) -> pa.RecordBatchReader:
        """All keys with their values, in no order; a key group is read as it is when the reader comes to it."""
        schema = pa.schema([*self._key, *self._value])

        def batches() -> Iterator[pa.RecordBatch]:
            for bundle in range(BUNDLES):
                with self._reading():
                    self._load_bundle(bundle)
                    found = [rows for pointers in self._alive(bundle)
                             for rows in self._kernels.rows(pointers, schema.names)]
                yield from (rows.cast(schema) for rows in found)

        self._check_open()
        return pa.RecordBatchReader.from_batches(schema, batches())

    def _alive(self, bundle: int) -> Iterator[np.ndarray]:
        """Pointers to all records of a bundle that were not deleted."""
        runs = self._cold.runs[bundle]
        pointers = np.concatenate([self._hot.pointers(group) for group in groups_of(bundle)])
        if not runs:
            heads = np.concatenate([self._hot.heads(group) for group in groups_of(bundle)])
            yield np.ascontiguousarray(pointers[(heads & np.uint64(TOMB)) == 0])
            return
        newest = (pointers, self._kernels.hashes(pointers), self._functions)
        for found in self._cold.ranges(bundle, runs, self._scratch_table(), newest):
            heads = self._kernels.gather(found)[:, :8].copy().view(np.uint64)[:, 0]
            yield np.ascontiguousarray(found[(heads & np.uint64(TOMB)) == 0])

    def __len__(self) -> int:
        with self._reading():
            count = 0
            for bundle in range(BUNDLES):
                self._load_bundle(bundle)
                count += sum(len(pointers) for pointers in self._alive(bundle))
            return count

    # --- memory

    def _scratch_table(self) -> Scratch:
        if self._scratch is None:
            self._scratch = Scratch(self._kernels)
        self._scratch.clear()
        return self._scratch

    def _make_room(self, text_bytes: int) -> None:
        """Let bundles leave memory, one after the other, until a slice of rows fits."""
        for _ in range(2 * BUNDLES):
            if not self._budget.is_over(self._hot.in_use + text_bytes):
                return
            self._evict(self._clock, KEPT_SHARE)
            self._clock = (self._clock + 1) % BUNDLES

    def _evict(self, bundle: int, share_kept: float) -> None:
        """Write the records of a bundle that are hit least to a run, and forget them."""
        hot = self._hot
        groups = groups_of(bundle)
        self._load_bundle(bundle, make_room=False)
        pointers = np.concatenate([hot.pointers(group) for group in groups])
        if not len(pointers):
            return
        heads = np.concatenate([hot.heads(group) for group in groups])
        leaving = cold_enough(heads, share_kept) if share_kept else np.ones(len(heads), bool)
        run = self._write_run(bundle, pointers[leaving], heads[leaving])
        staying = np.ascontiguousarray(pointers[~leaving])
        chunks = [chunk for group in groups for chunk in hot.release(group)]
        if run is not None:
            self._cold.runs[bundle] = (*self._cold.runs[bundle], run)
        for group in groups:
            hot.set_flags(group, PARTIAL if self._cold.runs[bundle] else 0)
        self._kernels.absorb(hot, staying, self._functions, older=False)
        hot.give_back(chunks)
        self._compact_soon(bundle)

    def _write_run(self, bundle: int, pointers: np.ndarray, heads: np.ndarray) -> ColdRun | None:
        if not self._cold.runs[bundle]:  # nothing older: what was deleted needs no trace
            pointers = pointers[(heads & np.uint64(TOMB)) == 0]
        if not len(pointers):
            return None
        id = self._new_id()
        writer = self._cold.writer(id, self._functions, len(pointers) * self._kernels.record_bytes)
        try:
            records, hashes = self._cold.sorted_records(np.ascontiguousarray(pointers))
            writer.add(records, hashes)
            writer.finish()
        except BaseException:
            writer.abandon()
            raise
        return self._cold.open(id)

    # --- pieces of the past

    def _load(self, group: int) -> None:
        """Bring a group's records back to memory, under those that are newer."""
        for number in range(len(self._pieces) - 1, -1, -1):
            piece = self._pieces[number]
            if group in piece.groups:
                found = load(piece, group, self._old_images, self._kernels)
                self._hot.batch += 1
                self._kernels.absorb(self._hot, found.pointers, self._functions, older=True)
                self._pieces[number] = piece.without(group)
        self._pieces = [piece for piece in self._pieces if len(piece.group)]
        if not self._cold.runs[group // BUNDLE_GROUPS]:
            self._hot.set_flags(group, 0)

    def _load_bundle(self, bundle: int, make_room: bool = True) -> None:
        for group in groups_of(bundle):
            if any(group in piece.groups for piece in self._pieces):
                if make_room:
                    self._make_room(0)
                self._load(group)

    def _load_all(self) -> None:
        for bundle in range(BUNDLES):
            self._load_bundle(bundle)

    # --- snapshots

    def snapshot(self) -> Snapshot:
        """Freeze the store as it is now and write it in the background. Calls go on meanwhile."""
        with self._writing():
            frozen = self._freeze()
            self._under_way.append(frozen)
            self._changed = False
            self._writer.submit(self._write_snapshot, frozen)
            return Snapshot(frozen)

    def _freeze(self) -> Frozen:
        changed, used = self._copier.mark()
        pieces: list[Json] = []
        tables: dict[str, np.ndarray] = {}
        for number, piece in enumerate(self._pieces):
            facts, columns = piece.to_tables(number)
            pieces.append(facts)
            tables |= columns
        runs: list[Json] = [[run.id for run in runs] for runs in self._cold.runs]
        meta: dict[str, Json] = {
            "key": _schema_text(self._key), "value": _schema_text(self._value), "functions": list(self._functions),
            "bounds": self._sums.to_json(), "runs": runs, "pieces": pieces,
        }  # fmt: skip
        files = {format.run_name(run.id) for runs in self._cold.runs for run in runs}
        files |= {format.image_name(id) for piece in self._pieces for id in piece.image_ids}
        id = self._new_id()
        meta["next"] = self._next_id
        frozen = Frozen(id, meta, self._hot.headers.copy(), self._hot.chunks.rows[: self._hot.chunks.count].copy(),
                        changed, used, frozenset(files))
        frozen.tables = tables
        return frozen

    def _write_snapshot(self, frozen: Frozen) -> None:
        try:
            self._images.write(frozen)
            self._publish(frozen)
        except BaseException as error:
            frozen.error = error
            self._changed = True
        finally:
            with self._lock:
                self._under_way.remove(frozen)
            frozen.done.set()
        try:
            if frozen.error is None:
                with self._lock:
                    self._forget_old_snapshots()
        except ScaleinError as error:
            warnings.warn(f"old files of a store could not be removed: {error}", RuntimeWarning, stacklevel=2)

    def _publish(self, frozen: Frozen) -> None:
        arena = self._hot.arena
        chunks = frozen.chunk_tables(arena.base)
        needed = np.unique(chunks["offset"] >> np.uint64(arena.shift)).tolist()
        missing = [segment for segment in needed if segment not in self._images.known]
        if missing:
            raise StoreFailed("a snapshot before this one failed, and this one needs what that should have written")
        piece = Piece(arena.base, arena.shift, chunks["group"], chunks["kind"], chunks["offset"], chunks["used"],
                      {segment: self._images.known[segment] for segment in needed})
        pieces = frozen.meta["pieces"]
        assert isinstance(pieces, list)
        facts, columns = piece.to_tables(len(pieces))
        meta = {**frozen.meta, "pieces": [*pieces, facts]}
        files = frozen.files | {format.image_name(id) for id in piece.image_ids}
        names: list[Json] = list(sorted(files))
        found = Manifest(frozen.id, {**meta, "files": names}, {**frozen.tables, **columns})
        manifest.publish(self._files, found, self._kernels.checksums)
        with self._lock:
            self._snapshots[frozen.id] = files

    def _forget_old_snapshots(self) -> None:
        for id in sorted(self._snapshots)[: -self._keep]:
            self._files.remove(format.manifest_name(id))
            del self._snapshots[id]
        self._files.sync_directory()  # a manifest must not come back without its files
        self._remove_garbage()

    def _remove_garbage(self) -> None:
        """Remove what neither a kept snapshot nor this store needs."""
        needed = set().union(*self._snapshots.values(), *(frozen.files for frozen in self._under_way))
        needed |= {format.run_name(run.id) for runs in self._cold.runs for run in runs}
        needed |= {format.image_name(id) for piece in self._pieces for id in piece.image_ids}
        needed |= {format.image_name(id) for id, _ in self._images.known.values()}
        needed |= {format.image_name(frozen.id) for frozen in self._under_way}
        busy = {format.run_name(id) for id in self._being_written}
        for name in self._files.names():
            is_ours = name.startswith((format.TEMPORARY, "run-", "image-"))
            if is_ours and name not in needed and name not in busy:
                self._files.remove(name)

    # --- compaction

    @property
    def _being_written(self) -> set[int]:
        return set(self._compacting)

    def _compact_soon(self, bundle: int) -> None:
        """Merge runs of a bundle in the background if there are too many."""
        runs = self._cold.runs[bundle]
        first = to_merge([run.record_count for run in runs])
        if first == len(runs) or any(future for future in self._compacting.values() if not future.done()):
            return
        if len({run.functions for run in runs[first:]}) > 1:
            first = 0
        id = self._new_id()
        self._compacting = {id: self._compactor.submit(self._compact_runs, bundle, runs[first:], first == 0, id)}

    def _compact_runs(self, bundle: int, runs: tuple[ColdRun, ...], is_bottom: bool, id: int) -> None:
        try:
            merged = self._cold.merged(bundle, runs, id, Scratch(self._kernels), is_bottom)
            with self._lock:
                now = self._cold.runs[bundle]
                at = now.index(runs[0])
                self._cold.runs[bundle] = (*now[:at], *([merged] if merged else []), *now[at + len(runs) :])
                self._compacting.pop(id, None)
                if not self._closed:
                    self._remove_garbage()
        except BaseException as error:
            self._compact_error = error

    def compact(self) -> None:
        """Merge all runs of each bundle into one: what was deleted or merged since takes no room any more."""
        with self._writing():
            self._wait_for_compaction()
            for bundle, runs in enumerate(self._cold.runs):
                if len(runs) > 1:
                    id = self._new_id()
                    merged = self._cold.merged(bundle, runs, id, self._scratch_table(), is_bottom=True)
                    self._cold.runs[bundle] = (merged,) if merged else ()
                    self._changed = True
            self._remove_garbage()

    def _wait_for_compaction(self) -> None:
        for future in list(self._compacting.values()):
            while not future.done():
                self._lock.release()  # the compactor needs it to finish
                try:
                    future.result()
                finally:
                    self._lock.acquire()
        self._compacting = {}

    # --- looking

    def stats(self) -> dict[str, object]:
        """Figures: bytes in memory and on disk, runs, snapshots, the pause of the last freeze."""
        with self._lock:
            self._check_open()
            names = self._files.names()
            scratch = self._scratch.memory_bytes if self._scratch else 0
            resident = self._hot.arena.touched + self._hot.buckets.touched + self._copier.memory_bytes + scratch
            return {
                "resident_bytes": resident,
                "record_bytes": self._kernels.record_bytes,
                "disk_bytes": sum(self._files.size(name) for name in names),
                "runs": sum(map(len, self._cold.runs)),
                "cold_records": sum(run.record_count for runs in self._cold.runs for run in runs),
                "groups_not_loaded": len({group for piece in self._pieces for group in piece.groups}),
                "snapshots": sorted(self._snapshots),
                "compaction_error": None if self._compact_error is None else str(self._compact_error),
            }

    def verify(self) -> None:
        """Read everything that the newest snapshot and this store name; raises `Damaged`, naming the file."""
        with self._reading():
            for runs in self._cold.runs:
                for run in runs:
                    run.run.verify()
            for piece in self._pieces:
                for id, extent in piece.segments.values():
                    self._old_images.get(id).verify(extent)
            images = Images(self._files, self._kernels)
            try:
                for id, extent in list(self._images.known.values()):
                    images.get(id).verify(extent)
            finally:
                images.close()

    # --- closing

    def close(self) -> None:
        """Take a last snapshot if anything changed, wait for it, and give the directory back."""
        if self._closed:
            return
        try:
            if not self._readonly and self._changed:
                self.snapshot().wait()
        finally:
            self._shut()

    def _shut(self) -> None:
        self._writer.shutdown(wait=True)
        self._compactor.shutdown(wait=True, cancel_futures=True)
        self._closed = True
        for runs in self._cold.runs:
            for run in runs:
                run.run.close()
        self._old_images.close()
        if self._held is not None:
            self._held.release()

    def __enter__(self) -> LogStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        elif not self._closed:
            self._shut()

    def _new_id(self) -> int:
        id, self._next_id = self._next_id, self._next_id + 1
        return id

    def _check_open(self) -> None:
        if self._closed:
            raise ScaleinError("the store is closed", at=here())

    def _reading(self) -> _Entered:
        return _Entered(self, writes=False)

    def _writing(self) -> _Entered:
        return _Entered(self, writes=True)


class _Entered:
    """A call of the user's: alone, on an open store."""

    def __init__(self, store: LogStore, writes: bool) -> None:
        self._store, self._writes = store, writes

    def __enter__(self) -> None:
        self._store._lock.acquire()
        try:
            self._store._check_open()
            if self._writes and self._store._readonly:
                raise ScaleinError("the store was opened to be read only", at=here(), hint="open it without readonly=True")
        except BaseException:
            self._store._lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        self._store._lock.release()


def _find_manifest(files: Files, snapshot: int | None) -> Manifest | None:
    """The newest whole manifest, or the one asked for; a damaged newest one is said and passed over."""
    if snapshot is not None:
        known = format.ids(files.names(), "snapshot")
        if snapshot not in known:
            raise StoreFailed(f"the store has no snapshot {snapshot}", at=here(), file=files.name_of(""),
                              has=", ".join(map(str, known)))
        return manifest.read(files, snapshot)
    damaged: Damaged | None = None
    for found in manifest.newest(files):
        if isinstance(found, Manifest):
            if damaged is not None:
                warnings.warn(f"the newest snapshot is damaged, going back to {found.id}: {damaged}", RuntimeWarning,
                              stacklevel=4)
            return found
        damaged = damaged or found
    if damaged is not None:
        raise damaged
    return None


def _named(found: Manifest) -> frozenset[str]:
    names = found.meta["files"]
    assert isinstance(names, list)
    return frozenset(str(name) for name in names)


def _schema_text(schema: pa.Schema) -> str:
    return bytes(schema.serialize()).hex()


def _schemas(found: Manifest, files: Files) -> tuple[pa.Schema, pa.Schema]:
    try:
        key, value = (pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(str(found.meta[name])))) for name in ("key", "value"))
    except (KeyError, ValueError, pa.ArrowException) as error:
        raise Damaged("a snapshot's manifest has no columns", file=files.name_of(format.manifest_name(found.id)),
                      found=repr(error)) from error
    return key, value


def _shown(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def _table(parts: list[pa.RecordBatch], schema: pa.Schema) -> pa.Table:
    nullable = pa.schema([field.with_nullable(True) for field in schema])
    return pa.Table.from_batches([part.cast(nullable) for part in parts], nullable)
