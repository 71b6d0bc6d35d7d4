"""LogStore: keyed state by batch, larger than memory, with snapshots that do not stop it.

What users call. Where records are is `tiers`, how they get to disk is `saving`; here calls are checked, cut into slices
that memory has room for, and run one after the other under one lock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
import pyarrow as pa

from scalein.errors import BadArgument, BadData, ScaleinError, StoreFailed, here
from scalein.options import Options, parse_size
from scalein.state.budget import Budget
from scalein.state.checksum import compiled_checksums
from scalein.state.columns import (
    Given,
    SchemaLike,
    batches_of,
    check_names,
    check_same,
    check_texts,
    functions_of,
    key_schema,
    keys_of,
    shown,
    value_schema,
)
from scalein.state.evict import LEAVING_AT_ONCE
from scalein.state.manifest import Json, Manifest
from scalein.state.recovery import Groups, Ids, Part, groups_given, mask_of, move_in, part_of, shown_groups, together
from scalein.state.run_levels import SCRATCH_SEGMENT, Scratch
from scalein.state.snapshot import Snapshot
from scalein.state.snapshot_writer import Saver, find_manifest, schema_text, schemas_of
from scalein.state.sum_bounds import SumBounds
from scalein.state.tiers import Tiers
from scalein.storage.filesystem import FileSystem, Lock
from scalein.storage.local import LocalFileSystem

if TYPE_CHECKING:
    from scalein.kernels.store import Functions, StoreKernels

KEPT_SNAPSHOTS = 3


class LogStore:
    """Keyed state on disk and in memory. Everything goes by batch.

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

    def __init__(self, fs: FileSystem, key: pa.Schema, value: pa.Schema, kernels: StoreKernels, ids: Ids, *,
                 budget: Budget, workers: int, keep: int, readonly: bool) -> None:
        self._fs, self._key, self._value, self._kernels = fs, key, value, kernels
        self._budget, self._workers, self._readonly = budget, workers, readonly
        self._most_workers = workers  # that have undo logs
        self._lock = threading.RLock()
        self._ids = ids
        self._tiers = Tiers(fs, kernels, budget, ids.new_file, self._clean)
        self._tiers.functions = ("",) * len(value)
        self._saver = Saver(fs, kernels, self._tiers, budget, workers, keep, ids.number)
        self._sums = SumBounds(value)
        # Rows that leave a value alone may leave it null, whatever its column says.
        self._values = pa.schema([field.with_nullable(True) for field in value])
        self._columns: dict[str, Json] = {"key": schema_text(key), "value": schema_text(value)}  # for freezes
        self._merges: dict[object, Functions] = {}  # what was last asked of columns, and what it comes to
        self._groups: Groups | None = None  # key groups that this store has; None: all
        self._owned: np.ndarray | None = None  # the same, by group
        self._has_changed = False
        self._held: Lock | None = None
        self._is_closed = False
        self._is_torn = False

    def __repr__(self) -> str:
        state = ", closed" if self._is_closed else ""
        return f"<LogStore {self._fs.path_of('')}: {shown(self._key)} -> {shown(self._value)}{state}>"

    # --- opening

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, key: SchemaLike | None = None, value: SchemaLike | None = None,
             memory: str | int | None = None, snapshot: int | None = None, readonly: bool = False, workers: int = 1,
             keep: int = KEPT_SNAPSHOTS, key_groups: Iterable[int] | None = None,
             old: Sequence[str | os.PathLike[str]] = ()) -> LogStore:
        """Open a store, or create it if there is none and `key` is given.

        `memory` is all that it may hold in memory ("64MB"); what is more goes to disk. `snapshot` opens an older one,
        `readonly` takes no lock and changes nothing. `keep` is the number of snapshots that stay. `key_groups` (of 256,
        by the keys' hashes) opens a part of the keys, for one of several owners; `old` begins a new store with what
        other stores have of them: nothing is read or copied for that, records come when they are asked for.
        """
        options = Options.make(workers=workers, at=here())
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise BadArgument("keep must be a number of snapshots, at least 1", at=here(), found=repr(keep))
        budget = Budget.of(None if memory is None else parse_size(memory, at=here()))
        if key is None and not old and not os.path.isdir(path):
            raise _no_store(os.fspath(path))
        others = [LocalFileSystem(other, readonly=True) for other in old]
        return cls.open_on(LocalFileSystem(path, readonly), key=key, value=value, budget=budget, snapshot=snapshot,
                              readonly=readonly, keep=keep, options=options, key_groups=key_groups, old=others)

    @classmethod
    def open_on(cls, fs: FileSystem, *, key: SchemaLike | None, value: SchemaLike | None, budget: Budget,
                   snapshot: int | None = None, readonly: bool = False, keep: int = KEPT_SNAPSHOTS,
                   options: Options | None = None, kernels: StoreKernels | None = None,
                   key_groups: Iterable[int] | None = None, old: Sequence[LocalFileSystem] = ()) -> LogStore:
        """Open a store behind the seam to the operating system; tests bring disks and kernels of their own."""
        from scalein.kernels.store import StoreKernels  # LLVM, which importing scalein does not load

        options = options or Options.make(workers=1)
        given = None if key is None else (key_schema(key), value_schema(value or {}))
        groups = groups_given(key_groups)
        held = None if readonly else fs.lock()
        store: LogStore | None = None
        try:
            checksums = kernels.checksums if kernels is not None else compiled_checksums(options)
            found = find_manifest(fs, snapshot, checksums)
            ids, sources = Ids(), []
            if found is not None:
                columns = schemas_of(found, fs)
                check_same(given, columns)
                ids, sources = Ids.of(found, fs), [(found, groups)]
                if old:
                    raise BadArgument("only a new store can begin with what old ones have", at=here(),
                                      file=fs.path_of(""))
            elif old and not readonly:
                columns, sources = move_in(fs, old, given, groups, checksums)
            elif given is not None and not readonly:
                columns = given
            else:
                raise _no_store(fs.path_of(""))
            check_names(*columns)
            store = cls(fs, *columns, kernels or StoreKernels(*columns, options), ids, budget=budget,
                        workers=options.workers, keep=keep, readonly=readonly)
            store._held = held
            if sources:
                cold = store._tiers.cold
                store._restore([part_of(one, fs, cold, columns[1], wanted) for one, wanted in sources])
            else:
                store._groups, store._owned = groups, mask_of(groups)
            if not readonly:
                store._begin(found)
            return store
        except BaseException:
            if store is not None:
                store._shut()
            elif held is not None:
                held.release()
            raise

    def _restore(self, parts: list[Part]) -> None:
        part, tiers = together(parts), self._tiers
        tiers.functions = part.functions
        tiers.cold.begin(part.runs)
        self._groups, self._owned = part.groups, mask_of(part.groups)
        self._sums.restore(part.bounds)
        tiers.past.begin(part.pieces, self._readonly)
        tiers.flag_groups()

    def _begin(self, found: Manifest | None) -> None:
        """Make a new store one on disk; remove what no snapshot names."""
        self._ids.pass_over(self._fs.names())
        if found is None:
            self.snapshot().wait()
        else:
            self._saver.begin(found)

    # --- rows

    def merge(self, rows: Given, **functions: str) -> None:
        """Merge rows into the values of their keys: `merge(table, n="sum", best="max")`.

        sum, count, min, max, first, last: a null changes nothing. replace: the newest row counts. A value column
        without a function stays as it is.
        """
        with self._entered(writes=True):
            self._keep(*self._to_merge(rows, functions))

    def merge_and_get(self, rows: Given, **functions: str) -> pa.Table:
        """Merge rows, and give the values that their keys have then, row by row, as `get` would."""
        with self._entered(writes=True):
            batches, chosen = self._to_merge(rows, functions)
            self._keep(batches, chosen)
            return self._got([batch.select(self._key.names) for batch in batches])

    def _to_merge(self, rows: Given, functions: dict[str, str]) -> tuple[list[pa.RecordBatch], Functions]:
        """Rows of the store's columns, and what they do to each value."""
        names = _names(rows)
        asked = (*names, *(f"{name} {function!r}" for name, function in functions.items()))
        if asked not in self._merges:
            self._merges = {asked: functions_of(self._value, functions, names, self._key)}
        chosen = self._merges[asked]
        fields = [field for field, function in zip(self._value, chosen, strict=True)
                  if function and (function != "count" or field.name in names)]
        return batches_of(rows, self._key, fields, "merge"), chosen

    def upsert(self, rows: Given) -> None:
        """Set the values of keys; of several rows of one key the last counts."""
        with self._entered(writes=True):
            self._keep(batches_of(rows, self._key, self._value, "upsert"), ("replace",) * len(self._value))

    def _check_owned(self, batches: list[pa.RecordBatch], what: str) -> None:
        """Refuse keys that belong to another owner: half of the truth would be none."""
        if self._owned is None:
            return
        for batch in batches:
            groups = self._kernels.lookup(self._tiers.hot, batch)[1] >> np.uint64(56)
            others = np.flatnonzero(~self._owned[groups.astype(np.int64)])
            if len(others):
                raise BadData(f"{what} was given keys of key groups that this store does not have", at=here(),
                              found=f"{len(others)} of {batch.num_rows} rows, the first of key group "
                              f"{groups[others[0]]}", has=shown_groups(self._groups or frozenset()))

    def _keep(self, batches: list[pa.RecordBatch], functions: Functions) -> None:
        self._tiers.tell()
        self._check_owned(batches, "merge")
        self._check_texts(batches)
        may_overflow = self._sums.check(batches, functions, partial(self._try, batches, functions))
        for batch in self._slices(batches):
            if any(function != "replace" for function in functions):  # rows that replace all make no partials
                self._tiers.use_functions(functions)
            if may_overflow:  # a partial sum may not fit where the whole one does
                self._tiers.make_whole(batch)
            self._tiers.hot.batch += 1
            self._kernels.upsert(self._tiers.hot, batch, functions, self._workers)

    def _try(self, batches: list[pa.RecordBatch], functions: Functions) -> None:
        """Merge rows into copies of their records: what fails here leaves the store as it is."""
        scratch = Scratch(self._kernels)
        for batch in self._slices(batches):
            self._tiers.make_whole(batch)
            pointers, _ = self._kernels.lookup(self._tiers.hot, batch)
            is_new = self._kernels.lookup(scratch.table, batch)[0] == 0
            scratch.absorb(np.unique(pointers[is_new & (pointers != 0)]), self._tiers.functions)
            self._kernels.upsert(scratch.table, batch, functions, 1)

    def delete(self, keys: Given | pa.Array | pa.ChunkedArray) -> None:
        """Forget keys; those that are not there are no error."""
        with self._entered(writes=True):
            self._tiers.tell()
            batches = keys_of(keys, self._key, "delete")
            self._check_texts(batches)
            self._check_owned(batches, "delete")
            for batch in self._slices(batches):
                self._tiers.hot.batch += 1
                self._kernels.delete(self._tiers.hot, batch, self._workers)

    def _check_texts(self, batches: list[pa.RecordBatch]) -> None:
        if self._kernels.text_cells:
            check_texts(batches, min(self._budget.segment_bytes, SCRATCH_SEGMENT))

    def _slices(self, batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Rows in pieces that memory has room for."""
        step = self._budget.rows(self._kernels.record_bytes)
        for batch in batches:
            for start in range(0, batch.num_rows, step):
                piece = batch if batch.num_rows <= step else batch.slice(start, step)
                self._tiers.make_room(piece.nbytes if self._kernels.text_cells else 0)
                self._has_changed = True
                yield piece

    def get(self, keys: Given | pa.Array | pa.ChunkedArray) -> pa.Table:
        """The values of keys, row by row; null where a key is not there."""
        with self._entered():
            batches = keys_of(keys, self._key, "get")
            self._check_owned(batches, "get")
            return self._got(batches)

    def _got(self, batches: list[pa.RecordBatch]) -> pa.Table:
        if not len(self._value):
            return pa.table({})
        step = self._budget.rows(self._kernels.record_bytes)
        parts = [_cast(rows, self._values) for batch in batches for start in range(0, batch.num_rows, step)
                 for rows in self._kernels.rows(self._tiers.find(batch.slice(start, step)), self._values.names)]
        return pa.Table.from_batches(parts, self._values)

    def scan(self) -> pa.RecordBatchReader:
        """All keys with their values, in no order; a part of them is read as it is when the reader comes to it."""
        schema = pa.schema([*self._key, *self._values])

        def batches() -> Iterator[pa.RecordBatch]:
            for groups in self._tiers.parts:
                with self._entered():
                    found = [rows for pointers in self._tiers.alive(groups)
                             for rows in self._kernels.rows(pointers, schema.names)]
                yield from (rows.cast(schema) for rows in found)

        with self._entered():
            return pa.RecordBatchReader.from_batches(schema, batches())

    def __len__(self) -> int:
        with self._entered():
            return sum(len(pointers) for groups in self._tiers.parts for pointers in self._tiers.alive(groups))

    # --- on disk

    def snapshot(self) -> Snapshot:
        """Freeze the store as it is now and write it in the background. Calls go on meanwhile."""
        with self._entered(writes=True):
            self._tiers.settle(LEAVING_AT_ONCE)
            self._tiers.join()
            id, merged = self._ids.new(), self._ids.new_file()
            meta: dict[str, Json] = {**self._columns, "bounds": self._sums.to_json(), "store": self._ids.store,
                                     "next": self._ids.following,
                                     "groups": None if self._groups is None else [*sorted(self._groups)]}  # fmt: skip
            saved = self._saver.save(id, self._ids.file(id), merged, meta)
            self._has_changed = False
            return saved

    def set_workers(self, workers: int) -> None:
        """Merge with fewer workers than the store was opened with, or with as many again, from the next call on."""
        with self._entered(writes=True):
            self._workers = max(1, min(workers, self._most_workers))

    def hold(self, snapshots: Iterable[int]) -> None:
        """Let these snapshots stay, and no others than them and the newest `keep`, from the next one on."""
        with self._entered(writes=True):
            self._saver.held = frozenset(snapshots)

    def compact(self) -> None:
        """Merge all runs of a bundle into one: what was deleted or merged since takes no room any more."""
        with self._entered(writes=True):
            self._has_changed |= self._tiers.compact()

    def verify(self) -> None:
        """Read everything that the newest snapshot and this store name; raises `Damaged`, naming the file."""
        with self._entered():
            self._tiers.verify()
            self._saver.verify()

    @property
    def memory_bytes(self) -> int:
        """What the store holds in memory now; may be asked for at any time, by any thread."""
        return self._tiers.memory_bytes + self._saver.copier.memory_bytes

    def stats(self) -> dict[str, object]:
        """Figures: bytes in memory and on disk, runs, records that left memory, snapshots."""
        with self._entered():
            tiers = self._tiers
            return {
                "resident_bytes": self.memory_bytes,
                "disk_bytes": sum(map(self._fs.size, self._fs.names())),
                "record_bytes": self._kernels.record_bytes,
                "runs": sum(map(len, tiers.cold.runs)),
                "cold_records": sum(run.record_count for runs in tiers.cold.runs for run in runs),
                "groups_not_loaded": len(tiers.past.waiting()),
                "snapshots": self._saver.ids,
                "compaction_error": None if (error := tiers.compactor.error or self._saver.index_error) is None
                else str(error),
            }

    # --- closing

    def close(self) -> None:
        """Take a last snapshot if anything changed, wait for it, and give the directory back.

        After a call that was interrupted half-way (Ctrl-C), the last snapshot is what stays.
        """
        if self._is_closed:
            return
        try:
            if not self._readonly and not self._is_torn:
                self._saver.settle()
                if self._has_changed or self._saver.is_behind:
                    self.snapshot().wait()
        finally:
            self._shut()

    def abandon(self) -> None:
        """Give the directory back without another snapshot: what changed since the last one is forgotten."""
        if not self._is_closed:
            self._shut()

    def _shut(self) -> None:
        self._saver.close()
        self._tiers.close()
        self._is_closed = True
        if self._held is not None:
            self._held.release()

    def __enter__(self) -> LogStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    # ---

    def _clean(self) -> None:
        if not self._is_closed:
            self._saver.remove_garbage()

    def _note_end(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        """Calls clean up behind errors, but not behind Ctrl-C, nor where there is no memory to do it with, nor where
        something that never fails did so while records were on their way.
        """
        self._is_torn |= (isinstance(error, MemoryError) or not isinstance(error, Exception | None)
                          or self._tiers.hot.is_torn)  # fmt: skip

    def _entered(self, writes: bool = False) -> ExitStack:
        """A call of the user's: alone, on an open store."""
        with ExitStack() as entered:
            self._lock.acquire()
            entered.callback(self._lock.release)
            if self._is_closed:
                raise ScaleinError("the store is closed", at=here())
            if self._is_torn:
                raise StoreFailed("a call was interrupted half-way, and what it left in memory is not known", at=here(),
                                  file=self._fs.path_of(""), hint="close the store and open it again: its last "
                                  "snapshot is whole")
            entered.push(self._note_end)
            if writes and self._readonly:
                raise ScaleinError("the store was opened to be read only", at=here(),
                                   hint="open it without readonly=True")
            return entered.pop_all()


def _no_store(directory: str) -> StoreFailed:
    return StoreFailed("there is no store in this directory", at=here(), file=directory,
                       hint="give key= and value= to create one")


def _cast(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    return rows if rows.schema == schema else rows.cast(schema)


def _names(rows: Given) -> list[str]:
    return list(rows.schema.names) if isinstance(getattr(rows, "schema", None), pa.Schema) else []
