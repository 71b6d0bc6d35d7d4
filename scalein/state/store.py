"""LogStore: keyed state, updated by batch, larger than memory, with snapshots that do not stop it.

The public interface. `tiers.py` knows where records are, `snapshot_writer.py` writes snapshots; here calls are checked,
split into slices that fit into memory, and run one at a time under one lock.

Threads: any thread may call; calls wait for one another. Background threads never take the store's lock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa

from scalein.errors import (
    BadArgument,
    BadData,
    Damaged,
    NewerFormat,
    ScaleinError,
    StoreFailed,
    here,
    locating,
)
from scalein.notebook_card import Card, Display, format_bytes
from scalein.options import Options, parse_size
from scalein.state.budget import Budget
from scalein.state.checksum import compiled_checksums
from scalein.state.columns import (
    RowsLike,
    SchemaLike,
    check_names,
    check_same_columns,
    check_text_sizes,
    format_schema,
    key_batches,
    key_schema,
    merge_functions,
    to_batches,
    value_schema,
)
from scalein.state.evict import MAX_EVICTIONS
from scalein.state.manifest import Manifest, decode_schemas, encode_schema, find_snapshot
from scalein.state.recovery import (
    FileIds,
    Groups,
    RecoveredState,
    combine,
    format_groups,
    group_mask,
    import_stores,
    parse_key_groups,
    recover,
)
from scalein.state.run_levels import MERGE_SEGMENT, MergeTable
from scalein.state.snapshot import Snapshot
from scalein.state.snapshot_writer import SnapshotWriter
from scalein.state.sum_bounds import SumBounds
from scalein.state.tiers import Tiers
from scalein.storage.checked_json import Json
from scalein.storage.filesystem import FileSystem, Lock
from scalein.storage.local import LocalFileSystem

if TYPE_CHECKING:
    from scalein.kernels.store import Functions, StoreKernels

KEEP_SNAPSHOTS = 3


class LogStore:
    """Keyed state in memory and on disk. All operations take batches of rows.

    >>> import tempfile, pyarrow as pa
    >>> folder = tempfile.mkdtemp()
    >>> rows = pa.table({"user": ["a", "b", "a"], "n": [1, 1, 1], "best": [0.5, 2.0, 1.5]})
    >>> with LogStore.open(folder, key={"user": pa.string()}, value={"n": pa.int64(), "best": pa.float64()}) as store:
    ...     store.merge(rows, n="sum", best="max")
    ...     store.get(pa.array(["a", "z"])).to_pylist()
    [{'n': 2, 'best': 1.5}, {'n': None, 'best': None}]
    """

    def __new__(cls, *parts: object, **more: object) -> Self:
        if len(parts) < 5:
            raise BadArgument("a store is opened with LogStore.open, not with LogStore", at=here(),
                              hint='LogStore.open("directory", key={"user": pa.string()}, value={"n": pa.int64()})')
        return super().__new__(cls)

    def __init__(self, fs: FileSystem, key: pa.Schema, value: pa.Schema, kernels: StoreKernels, ids: FileIds, *,
                 budget: Budget, workers: int, keep: int, readonly: bool) -> None:
        self._fs, self._key, self._value, self._kernels = fs, key, value, kernels
        self._budget, self._workers, self._readonly = budget, workers, readonly
        self._max_workers = workers  # that have undo logs
        self._lock = threading.RLock()
        self._ids = ids
        self._tiers = Tiers(fs, kernels, budget, ids.new_file, self._remove_obsolete)
        self._tiers.functions = ("",) * len(value)
        self._snapshots = SnapshotWriter(fs, kernels, self._tiers, budget, workers, keep, ids.number)
        self._sums = SumBounds(value)
        # A value is null until a row sets it, even if its column is not nullable.
        self._values = pa.schema([field.with_nullable(True) for field in value])
        self._columns: dict[str, Json] = {"key": encode_schema(key), "value": encode_schema(value)}
        self._merges: dict[object, Functions] = {}  # the arguments of the last merge -> its functions
        self._groups: Groups | None = None  # key groups of this store; None: all
        self._group_mask: np.ndarray | None = None  # the same, by group
        self._has_changed = False
        self._directory_lock: Lock | None = None
        self._is_closed = False
        self._is_inconsistent = False  # a call was interrupted: the content of memory is unknown
        self._display: Display | None = None  # in a notebook
        self._last_figures: dict[str, Any] | None = None  # of a closed store, for its card

    def __repr__(self) -> str:
        state = ", closed" if self._is_closed else ""
        return f"<LogStore {self._fs.path_of('')}: {format_schema(self._key)} -> {format_schema(self._value)}{state}>"

    def _repr_html_(self) -> str:
        return self._draw()[0]

    def _ipython_display_(self) -> None:
        """A card that is redrawn by calls until the store is closed; IPython calls this in place of `repr`."""
        if self._is_closed:
            raise NotImplementedError  # a card that does not change is `_repr_html_`
        if self._display is None:
            self._display = Display(self._draw)
        self._display.show()

    def _draw(self) -> tuple[str, str]:
        with self._lock:
            status = ("closed" if self._is_closed else "interrupted" if self._is_inconsistent
                      else "read-only" if self._readonly else "open")  # fmt: skip
            facts = [("key", format_schema(self._key)), ("value", format_schema(self._value))]
            if not self._is_closed:
                limit = "" if self._budget.total is None else f" of at most {format_bytes(self._budget.total)}"
                facts.append(("in memory", f"{format_bytes(self.memory_bytes)}{limit}"))
            found = self._last_figures if self._is_closed else self._figures()
            if found is not None:
                facts += [("on disk", format_bytes(found["disk_bytes"])),
                          ("evicted", f"{found['cold_records']:,} records in {found['runs']:,} runs"),
                          ("snapshots", ", ".join(map(str, found["snapshots"])) or "none")]
            return Card("LogStore", status, self._fs.path_of(""), facts).html, repr(self)

    # --- opening

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, key: SchemaLike | None = None, value: SchemaLike | None = None,
             memory: str | int | None = None, snapshot: int | None = None, readonly: bool = False, workers: int = 1,
             keep: int = KEEP_SNAPSHOTS, key_groups: Iterable[int] | None = None,
             old: Sequence[str | os.PathLike[str]] = ()) -> LogStore:
        """Open a store, or create it if there is none and `key` is given.

        `memory` is the most that it may hold in memory ("64MB"); the rest is on disk. `snapshot` opens an older one,
        `readonly` takes no lock and changes nothing. `keep` is the number of snapshots that are retained. `key_groups`
        (of 256, by the hashes of keys) opens a part of the keys, for one of several owners; `old` starts a new store
        with these key groups of other stores: no record is read or copied for that before it is needed.
        """
        options = Options.make(workers=workers, at=here())
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise BadArgument("keep must be a number of snapshots, at least 1", at=here(), found=repr(keep))
        budget = Budget.of(None if memory is None else parse_size(memory, at=here()))
        if key is None and not old and not os.path.isdir(path):
            raise _no_store(os.fspath(path))
        with locating(here()):
            others = [LocalFileSystem(other, readonly=True) for other in old]
            return cls.open_on(LocalFileSystem(path, readonly), key=key, value=value, budget=budget, snapshot=snapshot,
                               readonly=readonly, keep=keep, options=options, key_groups=key_groups, old=others)

    @classmethod
    def open_on(cls, fs: FileSystem, *, key: SchemaLike | None, value: SchemaLike | None, budget: Budget,
                snapshot: int | None = None, readonly: bool = False, keep: int = KEEP_SNAPSHOTS,
                options: Options | None = None, kernels: StoreKernels | None = None,
                key_groups: Iterable[int] | None = None, old: Sequence[LocalFileSystem] = ()) -> LogStore:
        """Open a store on a file system; tests pass simulated disks and shared kernels."""
        from scalein.kernels.store import StoreKernels  # LLVM, which importing scalein does not load

        options = options or Options.make(workers=1)
        given = None if key is None else (key_schema(key), value_schema(value or {}))
        groups = parse_key_groups(key_groups)
        lock = None if readonly else fs.lock()
        store: LogStore | None = None
        try:
            checksums = kernels.checksums if kernels is not None else compiled_checksums(options)
            found = find_snapshot(fs, snapshot, checksums)
            ids, sources = FileIds(), []
            if found is not None:
                columns = decode_schemas(found, fs)
                check_same_columns(given, columns)
                ids, sources = FileIds.of(found, fs), [(found, groups)]
                if old:
                    raise BadArgument("only a new store can be started from old ones", at=here(),
                                      file=fs.path_of(""))
            elif old and not readonly:
                columns, sources = import_stores(fs, old, given, groups, checksums)
            elif given is not None and not readonly:
                columns = given
            else:
                raise _no_store(fs.path_of(""))
            check_names(*columns)
            kernels = kernels or StoreKernels(*columns, options)
            store = cls(fs, *columns, kernels, ids, budget=replace(budget, has_text=bool(kernels.text_cells)),
                        workers=options.workers, keep=keep, readonly=readonly)
            store._directory_lock = lock
            if sources:
                levels = store._tiers.levels
                store._restore([recover(manifest, fs, levels, columns[1], wanted) for manifest, wanted in sources])
            else:
                store._groups, store._group_mask = groups, group_mask(groups)
            if not readonly:
                store._start(found)
            return store
        except BaseException:
            if store is not None:
                store._release()
            elif lock is not None:
                lock.release()
            raise

    def _restore(self, parts: list[RecoveredState]) -> None:
        state, tiers = combine(parts), self._tiers
        tiers.functions = state.functions
        tiers.levels.install(state.runs)
        self._groups, self._group_mask = state.groups, group_mask(state.groups)
        self._sums.restore(state.bounds)
        tiers.restored.install(state.pieces, self._readonly)
        tiers.set_group_flags()

    def _start(self, found: Manifest | None) -> None:
        """Write the first snapshot of a new store, or remove files that no snapshot names."""
        self._ids.skip_used(self._fs.names())
        if found is None:
            self.snapshot().wait()
        else:
            self._snapshots.adopt(found)

    # --- rows

    def merge(self, rows: RowsLike, **functions: str) -> None:
        """Merge rows into the values of their keys: `merge(table, n="sum", best="max")`.

        sum, count, min, max, first, last: a null changes nothing. replace: the newest row wins. A value column without
        a function does not change.
        """
        with self._call(writes=True):
            self._merge(*self._to_merge(rows, functions))

    def merge_and_get(self, rows: RowsLike, **functions: str) -> pa.Table:
        """Merge rows, and return the new values of their keys, row by row, like `get`."""
        with self._call(writes=True):
            batches, chosen = self._to_merge(rows, functions)
            self._merge(batches, chosen)
            return self._values_of([batch.select(self._key.names) for batch in batches])

    def _to_merge(self, rows: RowsLike, functions: dict[str, str]) -> tuple[list[pa.RecordBatch], Functions]:
        """Rows of the store's columns, and the merge function of each value."""
        names = _names(rows)
        arguments = (*names, *(f"{name} {function!r}" for name, function in functions.items()))
        if arguments not in self._merges:
            self._merges = {arguments: merge_functions(self._value, functions, names, self._key)}
        chosen = self._merges[arguments]
        fields = [field for field, function in zip(self._value, chosen, strict=True)
                  if function and (function != "count" or field.name in names)]
        return to_batches(rows, self._key, fields, "merge"), chosen

    def upsert(self, rows: RowsLike) -> None:
        """Set the values of keys; of several rows of one key the last wins."""
        with self._call(writes=True):
            self._merge(to_batches(rows, self._key, self._value, "upsert"), ("replace",) * len(self._value))

    def _check_owned(self, batches: list[pa.RecordBatch], what: str) -> None:
        """Raise for keys of groups that another store owns: this one has only a part of their history."""
        if self._group_mask is None:
            return
        for batch in batches:
            groups = self._kernels.lookup(self._tiers.memtable, batch)[1] >> np.uint64(56)
            others = np.flatnonzero(~self._group_mask[groups.astype(np.int64)])
            if len(others):
                raise BadData(f"{what} was given keys of key groups that this store does not have", at=here(),
                              found=f"{len(others)} of {batch.num_rows} rows, the first of key group "
                              f"{groups[others[0]]}", has=format_groups(self._groups or frozenset()))

    def _merge(self, batches: list[pa.RecordBatch], functions: Functions) -> None:
        self._tiers.raise_unreported()
        self._check_owned(batches, "merge")
        self._check_texts(batches)
        self._refresh_sum_bounds(sum(batch.num_rows for batch in batches))
        may_overflow = self._sums.check(batches, functions, partial(self._test_merge, batches, functions))
        for batch in self._slices(batches):
            if any(function != "replace" for function in functions):  # rows that replace all values leave no partials
                self._tiers.use_functions(functions)
            if may_overflow:  # a partial sum may overflow where the full one does not
                self._tiers.resolve_partials(batch)
            self._tiers.memtable.batch += 1
            self._kernels.upsert(self._tiers.memtable, batch, functions, self._workers)

    def _refresh_sum_bounds(self, rows: int) -> None:
        """Measure records again if sums might seem to overflow; what cannot be read now is not needed for that."""
        try:
            self._sums.refresh(rows, lambda shard: self._tiers.greatest_values(shard, self._sums.names))
        except (Damaged, NewerFormat, StoreFailed):
            if self._tiers.memtable.is_inconsistent:
                raise
            self._sums.stop_measuring()

    def _test_merge(self, batches: list[pa.RecordBatch], functions: Functions) -> None:
        """Merge rows into copies of their records: an error here leaves the store unchanged."""
        copies = MergeTable(self._kernels)
        for batch in self._slices(batches):
            self._tiers.resolve_partials(batch)
            pointers, _ = self._kernels.lookup(self._tiers.memtable, batch)
            is_new = self._kernels.lookup(copies.table, batch)[0] == 0
            copies.merge(np.unique(pointers[is_new & (pointers != 0)]), self._tiers.functions)
            self._kernels.upsert(copies.table, batch, functions, 1)

    def delete(self, keys: RowsLike | pa.Array | pa.ChunkedArray) -> None:
        """Delete keys; those that do not exist are ignored."""
        with self._call(writes=True):
            self._tiers.raise_unreported()
            batches = key_batches(keys, self._key, "delete")
            self._check_texts(batches)
            self._check_owned(batches, "delete")
            for batch in self._slices(batches):
                self._tiers.memtable.batch += 1
                self._kernels.delete(self._tiers.memtable, batch, self._workers)

    def _check_texts(self, batches: list[pa.RecordBatch]) -> None:
        if self._kernels.text_cells:
            check_text_sizes(batches, min(self._budget.segment_bytes, MERGE_SEGMENT))

    def _slices(self, batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Slices of rows that fit into memory, for which space is made."""
        step = self._budget.batch_rows(self._kernels.record_bytes)
        for batch in batches:
            for start in range(0, batch.num_rows, step):
                rows = batch if batch.num_rows <= step else batch.slice(start, step)
                self._tiers.evict_to_budget(rows.nbytes if self._kernels.text_cells else 0)
                self._has_changed = True
                yield rows

    def get(self, keys: RowsLike | pa.Array | pa.ChunkedArray) -> pa.Table:
        """The values of keys, row by row; null for keys that do not exist."""
        with self._call():
            batches = key_batches(keys, self._key, "get")
            self._check_owned(batches, "get")
            return self._values_of(batches)

    def _values_of(self, batches: list[pa.RecordBatch]) -> pa.Table:
        if not len(self._value):
            return pa.table({})
        step = self._budget.batch_rows(self._kernels.record_bytes)
        parts = [_cast(rows, self._values) for batch in batches for start in range(0, batch.num_rows, step)
                 for rows in self._kernels.rows(self._tiers.find(batch.slice(start, step)), self._values.names)]
        return pa.Table.from_batches(parts, self._values)

    def scan(self) -> pa.RecordBatchReader:
        """All keys with their values, unordered; each part is read as it is when the reader reaches it.

        Parts are ranges of hashes whose rows take an eighth of `memory`, about.
        """
        schema = pa.schema([*self._key, *self._values])

        def batches() -> Iterator[pa.RecordBatch]:
            position = 0
            while position < 1 << 64:
                with self._call():
                    position, records = self._tiers.scan(position)
                    found = [rows for pointers in records for rows in self._kernels.rows(pointers, schema.names)]
                while found:  # a batch that was read is not held here
                    yield found.pop(0).cast(schema)

        with self._call():
            return pa.RecordBatchReader.from_batches(schema, batches())

    def __len__(self) -> int:
        with self._call():
            position = count = 0
            while position < 1 << 64:
                position, records = self._tiers.scan(position)
                count += sum(map(len, records))
            return count

    # --- on disk

    def snapshot(self) -> Snapshot:
        """Capture the store as it is now, and write it in the background. Other calls continue meanwhile."""
        with self._call(writes=True):
            self._tiers.finish_evictions(MAX_EVICTIONS)
            self._tiers.load_newest_pieces()
            id, merged = self._ids.new(), self._ids.new_file()
            meta: dict[str, Json] = {**self._columns, "bounds": self._sums.to_json(), "store": self._ids.store,
                                     "next": self._ids.following,
                                     "groups": None if self._groups is None else [*sorted(self._groups)]}  # fmt: skip
            snapshot = self._snapshots.capture(id, self._ids.file(id), merged, meta)
            self._has_changed = False
            return snapshot

    def set_workers(self, workers: int) -> None:
        """Merge with fewer workers than the store was opened with, or with as many again, from the next call on."""
        with self._call(writes=True):
            self._workers = max(1, min(workers, self._max_workers))

    def hold(self, snapshots: Iterable[int]) -> None:
        """Retain these snapshots besides the newest `keep`, from the next snapshot on, and no other ones."""
        with self._call(writes=True):
            self._snapshots.held = frozenset(snapshots)

    def compact(self) -> None:
        """Merge all runs of each shard into one: deleted and overwritten records no longer take disk space."""
        with self._call(writes=True):
            self._has_changed |= self._tiers.compact()

    def verify(self) -> None:
        """Read all files of the newest snapshot and of this store; raises `Damaged`, naming the file."""
        with self._call():
            self._tiers.verify()
            self._snapshots.verify()

    @property
    def memory_bytes(self) -> int:
        """Bytes that the store holds in memory now; any thread may read it at any time."""
        return self._tiers.memory_bytes + self._snapshots.copier.memory_bytes

    def stats(self) -> dict[str, object]:
        """Figures: bytes in memory and on disk, runs, records in runs, snapshots."""
        with self._call():
            return self._figures()

    def _figures(self) -> dict[str, Any]:
        tiers = self._tiers
        return {
            "resident_bytes": self.memory_bytes,
            "disk_bytes": sum(map(self._fs.size, self._fs.names())),
            "record_bytes": self._kernels.record_bytes,
            "runs": sum(map(len, tiers.levels.runs)),
            "cold_records": sum(run.record_count for runs in tiers.levels.runs for run in runs),
            "groups_not_loaded": len(tiers.restored.unloaded_groups()),
            "snapshots": self._snapshots.ids,
            "compaction_error": None if (error := tiers.compactor.error or self._snapshots.index_error) is None
            else str(error),
        }

    # --- closing

    def close(self) -> None:
        """Take a last snapshot if anything changed, wait for it, and unlock the directory.

        After a call that was interrupted (Ctrl-C), the last snapshot remains the newest.
        """
        if self._is_closed:
            return
        try:
            if not self._readonly and not self._is_inconsistent:
                self._snapshots.wait()
                if self._has_changed or self._snapshots.last_failed:
                    self.snapshot().wait()
        finally:
            self._release()

    def abandon(self) -> None:
        """Unlock the directory without another snapshot: changes since the last one are lost."""
        if not self._is_closed:
            self._release()

    def _release(self) -> None:
        if self._display is not None:
            self._last_figures = self._figures()
        self._snapshots.close()
        self._tiers.close()
        self._is_closed = True
        if self._directory_lock is not None:
            self._directory_lock.release()
        if self._display is not None:
            self._display.close()

    def __enter__(self) -> LogStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    # --- calls

    def _remove_obsolete(self) -> None:
        if not self._is_closed:
            self._snapshots.remove_obsolete_files()

    def _note_end(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        """Calls leave a consistent store after errors, but not after Ctrl-C, nor without memory, nor if a step that
        moves records failed. An error has the line of the call.
        """
        self._is_inconsistent |= (isinstance(error, MemoryError) or not isinstance(error, Exception | None)
                                  or self._tiers.memtable.is_inconsistent)  # fmt: skip
        if isinstance(error, ScaleinError):
            error.locate(here())
        if self._display is not None:
            self._display.update()

    def _call(self, writes: bool = False) -> ExitStack:
        """The context of a public call: exclusive, on an open store."""
        with ExitStack() as call:
            self._lock.acquire()
            call.callback(self._lock.release)
            if self._is_closed:
                raise ScaleinError("the store is closed", at=here())
            if self._is_inconsistent:
                raise StoreFailed("a call was interrupted, and the content of memory is not known", at=here(),
                                  file=self._fs.path_of(""), hint="close the store and open it again: its last "
                                  "snapshot is intact")
            call.push(self._note_end)
            if writes and self._readonly:
                raise ScaleinError("the store was opened read-only", at=here(), hint="open it without readonly=True")
            return call.pop_all()


def _no_store(directory: str) -> StoreFailed:
    return StoreFailed("there is no store in this directory", at=here(), file=directory,
                       hint="give key= and value= to create one")


def _cast(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    return rows if rows.schema == schema else rows.cast(schema)


def _names(rows: RowsLike) -> list[str]:
    return list(rows.schema.names) if isinstance(getattr(rows, "schema", None), pa.Schema) else []
