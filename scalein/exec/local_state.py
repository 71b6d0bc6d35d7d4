"""The state of a job's operators (`state/interfaces.py`): stores and row buffers in the operator's folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalein.arrow_rows import as_integers, filtered, from_numpy
from scalein.exec.event_time import extent
from scalein.exec.expiry_index import ExpiryIndex
from scalein.exec.operator import Context, files_of, hold, open_store, restore_rows, snapshot_store
from scalein.state import LogStore
from scalein.state.interfaces import Change, GroupMerger, StateBackend, StateFuture
from scalein.state.row_buffer import BufferSegment, RowBuffer
from scalein.storage.checked_json import Json, as_int, as_map

MIN_COMBINED_ROWS = 1 << 20  # buffered partial groups below this number are not combined
MAX_SEGMENT_ROWS = 1 << 20  # of rows for joins that are merged
MAX_BATCHES = 512  # buffered, before they are combined
COMBINE_GROWTH = 4  # growth since the last combine that makes another one worthwhile
EXPIRY = "expiry"  # in the version of a table with windows: the keys of those that are open
EXPIRY_SHARE = 8  # this fraction (1/8) of the state's memory is for these keys
FOREVER = (1 << 63) - 1  # in units of time
ONE = "#one"  # the key of groups without keys
_SEEN = "#seen"
_TEXTS = {pa.string().id, pa.large_string().id, pa.binary().id, pa.string_view().id}


def backend_of(context: Context) -> StateBackend:
    """Where an operator has its state."""
    return context.state or LocalState(context)


@dataclass(frozen=True)
class LocalState:
    """Makes the state of an operator in its folder."""

    context: Context

    def table(self, keys: pa.Schema, values: pa.Schema, slices: str | None, merger: GroupMerger) -> StoreTable:
        return StoreTable(self.context, keys, values, slices, merger)

    def key_set(self, keys: pa.Schema) -> StoreKeys:
        return StoreKeys(self.context, keys)

    def rows_by_key(self, schema: pa.Schema, keys: Sequence[str]) -> None:
        """There are none: rows are buffered in the order of time."""

    def records(self, keys: pa.Schema, values: pa.Schema, placed_by: Sequence[str] | None = None) -> StoreRecords:
        return StoreRecords(self.context, keys, values)

    def buffer(self, schema: pa.Schema, keys: Sequence[str], slices: str, merger: GroupMerger | None,
               name: str = "rows") -> SliceBuffer:
        return SliceBuffer(self.context, schema, slices, name)

    def join_rows(self, schema: pa.Schema, keys: Sequence[str], time: str | None, part: str) -> SegmentedRows:
        memory = self.context.options.memory
        return SegmentedRows(RowBuffer(self.context.folder, schema, None if memory is None else memory // 2,
                                       prefix=part or "rows"))


@dataclass
class SegmentedRows:
    """Rows of a side of a join, in a row buffer. Small segments are merged when they are as large as the one before, so
    a row is copied a logarithmic number of times.
    """

    buffer: RowBuffer
    reads_by_key = False

    @property
    def segments(self) -> list[BufferSegment]:
        return self.buffer.segments

    @property
    def rows(self) -> int:
        return self.buffer.rows

    @property
    def memory_bytes(self) -> int:
        return self.buffer.memory_bytes

    def add(self, batch: pa.RecordBatch, first: int, last: int) -> None:
        rows = self.buffer
        rows.add(batch, first, last)
        segments = rows.segments
        while (len(segments) > 1 and segments[-2].rows <= segments[-1].rows
               and segments[-2].rows + segments[-1].rows <= MAX_SEGMENT_ROWS):  # fmt: skip
            first, last = (min(each.first for each in segments[-2:]), max(each.last for each in segments[-2:]))
            merged = pa.concat_batches([rows.batch(each) for each in segments[-2:]])
            rows.replace(segments[:-2])
            rows.add(merged, first, last)
            segments = rows.segments

    def replace(self, segments: list[BufferSegment]) -> None:
        self.buffer.replace(segments)

    def read(self, segment: BufferSegment) -> pa.RecordBatch:
        return self.buffer.batch(segment)

    def read_matching(self, segment: BufferSegment, keys: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
        return self.read(segment)

    def keep_newest(self, limit: int) -> bool:
        return False

    def restore(self, version: Json) -> None:
        if version is not None:
            self.buffer.restore(version)

    def snapshot(self) -> StateFuture:
        held = list(self.buffer.segments)
        return lambda: self.buffer.to_json(held)

    def retain(self, kept: Sequence[Json]) -> None:
        self.buffer.remove_unreferenced(files_of(kept))

    def close(self) -> None:
        pass


class StoreTable:
    """Groups in a store, and the keys of open windows by time. Partial groups have each key once."""

    def __init__(self, context: Context, keys: pa.Schema, values: pa.Schema, slices: str | None,
                 merger: GroupMerger) -> None:
        self._context, self._slices, self._merger = context, slices, merger
        self._key = keys if keys.names else pa.schema([pa.field(ONE, pa.int8(), False)])
        self._value = pa.schema([field.with_nullable(True) for field in values])
        self._names, self._stored_names = [*keys.names, *values.names], [*self._key.names, *values.names]
        memory = context.options.memory
        self._hint_bytes = 0 if memory is None or slices is None else memory // EXPIRY_SHARE
        self._expiry = ExpiryIndex(context.folder, self._key, None if memory is None else self._hint_bytes)
        self._version: Json = None
        self._oldest = FOREVER  # window in the store
        self._is_indexed = True

    def restore(self, version: Json) -> None:
        self._version = version
        if version is not None or self._context.has_checkpoints:
            _ = self._store
        if version is None:
            return
        about = as_map(version)
        self._oldest = as_int(about["oldest"])
        # Checkpoints of earlier versions have no index: it is filled from the store when the first window closes.
        self._is_indexed = EXPIRY in about
        if self._is_indexed:
            self._expiry.restore(self._context, about[EXPIRY])

    @cached_property
    def _store(self) -> LogStore:
        return open_store(self._context, self._key, self._value, self._version, self._hint_bytes)

    @property
    def _has_store(self) -> bool:
        return "_store" in self.__dict__

    @property
    def is_empty(self) -> bool:
        return not len(self._store)

    def merge_and_get(self, partials: pa.RecordBatch, gets_before: bool) -> Change:
        self._store.set_workers(self._context.options.workers)
        if self._key.names == [ONE]:
            partials = partials.append_column(ONE, pa.array(np.zeros(partials.num_rows, np.int8)))
        functions = self._merger.functions
        before = self._stored(partials) if gets_before and functions is not None else None
        if functions is None:
            rows = partials.select(self._stored_names)
            before = self._values(partials, upsert_merged(self._store, rows, self._key.names, self._merger))
            now = self._stored(partials)
        else:
            stored = self._store.merge_and_get(partials.select(self._stored_names), **functions)
            now = self._values(partials, stored)
        if before is not None:
            existed = np.asarray(before.column("#acc0").is_valid())
        else:  # it has more rows than these
            existed = np.asarray(now.column("#acc0")) != np.asarray(partials.column("#acc0"))
        if self._slices is not None:
            times = extent(partials.column(self._slices))
            self._oldest = min(self._oldest, FOREVER if times is None else times[0])
            if self._is_indexed and not existed.all():
                self._expiry.add(filtered(partials, from_numpy(~existed)).select(self._key.names))
        return Change(now, existed, before)

    def _stored(self, partials: pa.RecordBatch) -> pa.RecordBatch:
        """The groups of partial ones, as they are in the store; values of those that are not there are null."""
        return self._values(partials, self._store.get(partials.select(self._key.names)))

    def _values(self, partials: pa.RecordBatch, stored: pa.Table) -> pa.RecordBatch:
        """Groups by the keys of partial ones, with values from the store."""
        chunks = (stored.column(name).chunks for name in self._value.names)
        values = (some[0] if len(some) == 1 else pa.concat_arrays(some) for some in chunks)
        keys = (partials.column(name) for name in self._key.names if name != ONE)
        return pa.RecordBatch.from_arrays([*keys, *values], names=self._names)

    def expire(self, first_open: int) -> None:
        if self._oldest >= first_open:
            return
        if not self._is_indexed:
            self._is_indexed = True
            for batch in self._store.scan():
                self._expiry.add(batch.select(self._key.names))
        for keys in self._expiry.closed(first_open):
            self._store.delete(keys)
        self._oldest = FOREVER if self._expiry.oldest is None else self._expiry.oldest

    def snapshot(self) -> StateFuture:
        oldest, wait, expiry = self._oldest, snapshot_store(self._store), self._expiry.snapshot()
        if self._slices is None or not self._is_indexed:
            return lambda: {**as_map(wait()), "oldest": oldest}
        return lambda: {**as_map(wait()), "oldest": oldest, EXPIRY: expiry()}

    def retain(self, kept: Sequence[Json]) -> None:
        if self._has_store:
            hold(self._store, kept)
        if self._slices is not None:
            self._expiry.retain([as_map(version).get(EXPIRY) for version in kept if isinstance(version, dict)])

    @property
    def memory_bytes(self) -> int:
        return (self._store.memory_bytes if self._has_store else 0) + self._expiry.memory_bytes

    def close(self) -> None:
        if self._has_store:
            self._store.abandon()


def upsert_merged(store: LogStore, partials: pa.RecordBatch, keys: Sequence[str], merger: GroupMerger) -> pa.Table:
    """Merge partial groups, no key twice, whose columns combine only together. Gives the groups as they were before,
    with null values where there were none.
    """
    names = merger.names
    before = store.get(partials.select(keys))
    held = pa.RecordBatch.from_arrays([before.column(name).combine_chunks() for name in names], names=names)
    existed = np.asarray(held.column("#acc0").is_valid())
    new = pa.RecordBatch.from_arrays([partials.column(name) for name in names], names=names)
    both = pa.concat_batches([filtered(held, from_numpy(existed)), new])
    values = merger.combine_numbered(both, np.concatenate([np.flatnonzero(existed), np.arange(new.num_rows)]))
    store.upsert(pa.RecordBatch.from_arrays([*(partials.column(name) for name in keys), *values.columns],
                                            names=[*keys, *names]))
    return before


class StoreKeys:
    """Keys in a store."""

    def __init__(self, context: Context, keys: pa.Schema) -> None:
        self._context, self._keys = context, keys
        self._store: LogStore | None = None

    def restore(self, version: Json) -> None:
        self._store = open_store(self._context, self._keys, pa.schema([pa.field(_SEEN, pa.int8())]), version)

    def insert(self, keys: pa.RecordBatch) -> np.ndarray:
        assert self._store is not None
        is_new = pc.is_null(self._store.get(keys).column(_SEEN)).combine_chunks()
        new = filtered(keys, is_new)
        self._store.upsert(new.append_column(_SEEN, pa.array(np.ones(len(new), np.int8))))
        return np.asarray(is_new)

    @property
    def memory_bytes(self) -> int:
        return 0 if self._store is None else self._store.memory_bytes

    def snapshot(self) -> StateFuture:
        assert self._store is not None
        return snapshot_store(self._store)

    def retain(self, kept: Sequence[Json]) -> None:
        assert self._store is not None
        hold(self._store, kept)

    def close(self) -> None:
        if self._store is not None:
            self._store.abandon()


class StoreRecords:
    """Records in a store, which is opened with the first."""

    def __init__(self, context: Context, keys: pa.Schema, values: pa.Schema) -> None:
        self._context, self._keys, self._values = context, keys, values
        held = pa.field(_SEEN, pa.int8())  # null where there is no record
        self._value = pa.schema([held, *(field.with_nullable(True) for field in values)])
        self._version: Json = None

    @cached_property
    def _store(self) -> LogStore:
        return open_store(self._context, self._keys, self._value, self._version)

    @property
    def _has_store(self) -> bool:
        return "_store" in self.__dict__

    def restore(self, version: Json) -> None:
        self._version = version
        if version is not None or self._context.has_checkpoints:
            _ = self._store

    @property
    def resident_bytes(self) -> int:
        width = 32 + sum(16 if field.type.id in _TEXTS else 8 for field in (*self._keys, *self._value))
        return len(self._store) * 2 * width if self._has_store else 0

    def get(self, keys: pa.RecordBatch) -> pa.RecordBatch:
        found = self._store.get(keys).combine_chunks()
        columns = [*(keys.column(name) for name in self._keys.names),
                   *(_one_chunk(found.column(name), field.type) for name, field in zip(
                       self._values.names, self._values, strict=True))]
        is_held = _one_chunk(found.column(_SEEN), pa.int8()).is_valid()
        rows = pa.RecordBatch.from_arrays(columns, names=[*self._keys.names, *self._values.names])
        return self._plain(filtered(rows, is_held))

    def _plain(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """With the nullability of the columns as they were put."""
        schema = pa.schema([*self._keys, *self._values])
        return pa.RecordBatch.from_arrays(rows.select(schema.names).columns, schema=schema)

    def put(self, records: pa.RecordBatch) -> None:
        rows = records.append_column(_SEEN, pa.array(np.ones(records.num_rows, np.int8)))
        self._store.set_workers(self._context.options.workers)
        self._store.upsert(rows.select([*self._keys.names, *self._value.names]))

    def delete(self, keys: pa.RecordBatch) -> None:
        self._store.delete(keys)

    def scan(self) -> Iterator[pa.RecordBatch]:
        if self._has_store:
            yield from map(self._plain, self._store.scan())

    @property
    def memory_bytes(self) -> int:
        return self._store.memory_bytes if self._has_store else 0

    def snapshot(self) -> StateFuture:
        return snapshot_store(self._store)

    def retain(self, kept: Sequence[Json]) -> None:
        if self._has_store:
            hold(self._store, kept)

    def close(self) -> None:
        if self._has_store:
            self._store.abandon()


def _one_chunk(column: pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    chunks = column.chunks
    found = chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks) if chunks else pa.array([], kind)
    return found if found.type == kind else found.cast(kind)


class SliceBuffer:
    """A row buffer whose column `slices` has the starts of slices."""

    def __init__(self, context: Context, schema: pa.Schema, slices: str, name: str = "rows") -> None:
        self._context, self.schema, self._slices = context, schema, slices
        self._rows = RowBuffer(context.folder, schema, context.options.memory, name)
        self._combined_rows = 0  # when they were combined last

    @property
    def segments(self) -> list[BufferSegment]:
        return self._rows.segments

    @property
    def memory_bytes(self) -> int:
        return self._rows.memory_bytes

    def add(self, batch: pa.RecordBatch, first: int, last: int) -> None:
        self._rows.add(batch, first, last)

    def read(self, segment: BufferSegment) -> list[pa.RecordBatch]:
        return [self._rows.batch(segment)]

    def size_bytes(self, segments: Sequence[BufferSegment]) -> int:
        return self._rows.size_bytes(segments)

    @contextmanager
    def taken(self) -> Iterator[list[BufferSegment]]:
        waiting = list(self._rows.segments)
        with self._rows.pinned(waiting):
            self._rows.replace([])
            yield waiting

    def drop(self, first_open: int) -> None:
        old = self._rows.segments
        kept = list(self._open(old, first_open))
        if len(kept) < len(old) or any(a is not b for a, b in zip(kept, old, strict=True)):
            self._rows.replace(kept)

    def _open(self, segments: Iterable[BufferSegment], first_open: int) -> Iterator[BufferSegment]:
        for each in segments:
            if each.first >= first_open:
                yield each
            elif each.last >= first_open:
                batch = self._rows.batch(each)
                starts = np.asarray(as_integers(batch.column(self._slices)))
                batch = filtered(batch, from_numpy(starts >= first_open))
                if (found := extent(batch.column(self._slices))) is not None:
                    yield BufferSegment(*found, batch.num_rows, batch)

    def compact(self, combine: Callable[[list[BufferSegment]], Iterable[pa.RecordBatch]]) -> None:
        most = max(MIN_COMBINED_ROWS, COMBINE_GROWTH * self._combined_rows)
        if self._rows.rows <= most and len(self._rows.segments) <= MAX_BATCHES:
            return
        waiting = list(self._rows.segments)
        with self._rows.pinned(waiting):
            self._rows.replace([])
            for batch in combine(waiting):
                if (found := extent(batch.column(self._slices))) is not None:
                    self._rows.add(batch, *found)
        self._combined_rows = self._rows.rows

    def coalesce(self) -> None:
        """Join segments, if there are many."""
        if len(self._rows.segments) > MAX_BATCHES:
            self._rows.coalesce()

    def restore(self, version: Json) -> None:
        if version is not None:
            restore_rows(self._context, self._rows, version)

    def snapshot(self, others: Sequence[BufferSegment] = ()) -> StateFuture:
        kept = [*self._rows.segments, *others]
        return lambda: self._rows.to_json(kept)

    def retain(self, kept: Sequence[Json]) -> None:
        self._rows.remove_unreferenced(files_of(kept))

    def close(self) -> None:
        pass
