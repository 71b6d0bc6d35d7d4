"""Tables that kernels fill: a hash index with its arena, a direct-addressed arena, a single record.

All three hold records of one layout; a reader needs only the address of the first record and the number of records.
A hash table doubles (`HashTable.grow`) when it is full to `layout.LOAD_SIXTEENTHS`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from scalein.errors import ScaleinError
from scalein.exec.side_state import SideState
from scalein.ir.stages import FromRecords, GroupMode, Merge, MergeBag, Sink, Stage
from scalein.ir.tables import Key, Slicing, Table
from scalein.kernels.call import call, kernel
from scalein.layout import (
    ARENA_FULL,
    BLOCK_ROWS,
    BUCKET_WORDS,
    DONE,
    GROUPS,
    INDEX_FULL,
    LOAD_SIXTEENTHS,
    TAG_BITS,
    FrameData,
)
from scalein.llvm_backend.cache import Compiled
from scalein.memory import address, allocate, reserve
from scalein.options import Options

if TYPE_CHECKING:
    from scalein.kernels.store import Grow

ARENA_START = 64  # address 0 means "empty" in the index
FIRST_BUCKETS = 8  # of a key group
ADDRESS_SPACE = 1 << 36  # bytes that an arena may grow to; memory is committed when it is touched
HEAP_BYTES = 1 << 16


class HashTable:
    """Index and arena of one table; owned by one worker at a time."""

    base = ARENA_START  # offset of the first record

    def __init__(self, table: Table, options: Options) -> None:
        self._size = table.layout.size
        self._options = options
        self.side_state = _side_state(table, options)
        self._arena = _arena()
        self.used = ARENA_START
        self.strays = 0  # sessions that are in no list
        self.free = 0  # the address of a free record, from which a list of them begins
        # Address of the buckets, shift of the tag, mask of bucket numbers, free entries.
        self._groups = np.zeros((GROUPS, 4), np.int64)
        self._buckets = FIRST_BUCKETS
        self._heap: list[np.ndarray] = []
        self._heap_at, self._heap_left = 0, 0
        self._index = self._new_index(np.full(GROUPS, FIRST_BUCKETS, np.int64))

    def _new_index(self, buckets: np.ndarray) -> list[np.ndarray]:
        """Empty bucket arrays, zeroed and contiguous; the groups' headers point to them."""
        sizes = buckets * (BUCKET_WORDS * 8)
        area = allocate(int(sizes.sum()))
        area[:] = 0
        self._groups[:, 0] = address(area) + np.concatenate(([0], np.cumsum(sizes)[:-1]))
        self._groups[:, 1] = TAG_BITS - np.log2(buckets).astype(np.int64)
        self._groups[:, 2] = buckets - 1
        self._groups[:, 3] = buckets * BUCKET_WORDS * LOAD_SIXTEENTHS // 16
        return [area]

    def attach(self, frame: FrameData, prefix: str = "table") -> None:
        """Make a kernel work on this table."""
        frame[f"{prefix}.groups"] = address(self._groups)
        frame[f"{prefix}.arena"] = address(self._arena)
        frame[f"{prefix}.arena_size"] = len(self._arena)
        frame[f"{prefix}.used"] = self.used
        frame[f"{prefix}.heap"] = self._heap_at
        frame[f"{prefix}.heap_left"] = self._heap_left
        frame["strays"], frame["free"] = self.strays, self.free
        frame.keep[prefix] = self
        if self.side_state is not None:
            self.side_state.attach(frame)

    def detach(self, frame: FrameData, prefix: str = "table") -> None:
        """Read back what the kernel has changed."""
        self.used = frame.get(f"{prefix}.used", self.used)
        self.strays, self.free = frame.get("strays", self.strays), frame.get("free", self.free)
        if f"{prefix}.heap" in frame:
            self._heap_at, self._heap_left = frame[f"{prefix}.heap"], frame[f"{prefix}.heap_left"]
        if self.side_state is not None:
            self.side_state.detach(frame)

    def grow(self) -> None:
        """Double every key group's table that is nearly full, splitting on the tags' next bit."""
        limit = (self._groups[:, 2] + 1) * BUCKET_WORDS * LOAD_SIXTEENTHS // 16
        full = np.flatnonzero(self._groups[:, 3] <= limit // 4)
        if np.any(self._groups[full, 1] <= 0):
            raise ScaleinError("a table has more keys than its index can distinguish")
        old = self._groups[full].copy()
        sizes = (old[:, 2] + 1) * 2 * BUCKET_WORDS * 8
        area = allocate(int(sizes.sum()))
        area[:] = 0
        self._groups[full, 0] = address(area) + np.concatenate(([0], np.cumsum(sizes)[:-1]))
        self._groups[full, 1] -= 1
        self._groups[full, 2] = (old[:, 2] + 1) * 2 - 1
        self._groups[full, 3] += limit[full]
        after = self._groups[full]
        _grow(self._options).split(np.column_stack((old[:, 0], old[:, 2] + 1, after[:, :3])))
        self._index.append(area)

    def make_room(self, frame: FrameData, prefix: str = "table") -> None:
        """After ARENA_FULL: allocate a piece of string heap; an error if the address space is exhausted."""
        if self.used + BLOCK_ROWS * self._size > len(self._arena):
            raise ScaleinError("the groups of this flow need more memory than this process may use",
                               found=f"{self.used >> 20} MiB", hint="filter or aggregate before grouping")
        need = frame.get(f"{prefix}.heap_need", 0)
        size = max(HEAP_BYTES << min(len(self._heap), 8), 2 * need)
        self._heap.append(allocate(size))
        self._heap_at, self._heap_left = address(self._heap[-1]), size

    def reuse_for_group(self, old: int, new: int) -> None:
        """Drop all records of the only key group in use, and give its buckets to another."""
        buckets = int(self._groups[old, 2]) + 1
        self.used, self.strays, self.free = ARENA_START, 0, 0
        self._reset_heap()
        ctypes.memset(int(self._groups[old, 0]), 0, buckets * BUCKET_WORDS * 8)
        self._groups[[old, new]] = self._groups[[new, old]]
        self._groups[new, 3] = buckets * BUCKET_WORDS * LOAD_SIXTEENTHS // 16
        if self.side_state is not None:
            self.side_state.clear()

    def clear(self) -> None:
        """Drop all records; the index retains its size."""
        self.used, self.strays, self.free = ARENA_START, 0, 0
        self._reset_heap()
        buckets = self._groups[:, 2] + 1
        if len(self._index) > 1 or len(self._index[0]) > 2 * int(buckets.sum()) * BUCKET_WORDS * 8:
            self._index = self._new_index(buckets)
        else:
            self._index[0][:] = 0
            self._groups[:, 3] = buckets * BUCKET_WORDS * LOAD_SIXTEENTHS // 16

    def _reset_heap(self) -> None:
        if self._heap:  # retain the largest piece for reuse
            self._heap = self._heap[-1:]
            self._heap_at, self._heap_left = address(self._heap[0]), len(self._heap[0])

    def words(self, record_words: int) -> np.ndarray:
        """All records as rows of 8-byte words."""
        return self._arena[ARENA_START : self.used].view(np.int64).reshape(-1, record_words)

    @property
    def bytes(self) -> int:
        """What records, index and text take; without side state."""
        return self.used + sum(map(len, self._index)) + sum(map(len, self._heap))

    @property
    def first(self) -> int:
        return address(self._arena) + ARENA_START

    @property
    def count(self) -> int:
        return (self.used - ARENA_START) // self._size


def handle_full(state: State, status: int, frame: FrameData, prefix: str = "table") -> None:
    """Grow what a kernel found full: index, arena, heap or side state."""
    if state.side_state is not None and state.side_state.make_room(status, frame):
        return
    assert isinstance(state, HashTable), status
    if status == INDEX_FULL:
        state.grow()
    elif status == ARENA_FULL:
        state.make_room(frame, prefix)
    else:
        raise AssertionError(f"status {status}")


def _arena() -> np.ndarray:
    return reserve(ADDRESS_SPACE)


def _side_state(table: Table, options: Options) -> SideState | None:
    return SideState(table, lambda side: HashTable(side, options)) if table.has_sides or table.has_heap else None


@cache
def _grow(options: Options) -> Grow:
    from scalein.kernels.store import grow_kernel

    return grow_kernel(options)


class _FixedRecords:
    """Records at fixed positions, without an index: the common part of two kinds of table."""

    base = 0  # offset of the first record

    def __init__(self, table: Table, records: np.ndarray, options: Options) -> None:
        self.records, self.count = records, len(records)
        self.side_state = _side_state(table, options)

    def attach(self, frame: FrameData) -> None:
        """Make a kernel work on these records."""
        frame.keep["records"] = self
        if self.side_state is not None:
            self.side_state.attach(frame)

    def detach(self, frame: FrameData) -> None:
        """Read back what the kernel has changed."""
        if self.side_state is not None:
            self.side_state.detach(frame)

    def words(self, record_words: int) -> np.ndarray:
        """All records as rows of 8-byte words."""
        return self.records.view(np.int64).reshape(-1, record_words)

    @property
    def first(self) -> int:
        return address(self.records)


class RecordCopies(_FixedRecords):
    """Copies of the records of a table."""


class OneRecord(_FixedRecords):
    """The record of an aggregate without keys."""

    def __init__(self, table: Table, options: Options) -> None:
        super().__init__(table, _records(table, 1), options)

    def attach(self, frame: FrameData) -> None:
        super().attach(frame)
        frame["one"] = self.first


class Domain:
    """Ranges of keys and slices that a direct table covers: position = sum of (key - least) * stride."""

    def __init__(self, spans: Sequence[tuple[int, int]], nullable: Sequence[bool],
                 slices: tuple[int, int] | None) -> None:
        self.spans = [(least, greatest - least + 1) for least, greatest in spans]
        self.nullable = list(nullable)
        self.slices = slices  # first, count
        self.strides: list[int] = []
        size = 1
        for (_, span), null in zip(self.spans, self.nullable, strict=True):
            self.strides.append(size)
            size *= span + null
        self.per_slice = size
        self.size = size * (slices[1] if slices else 1)

    def has_same_positions(self, other: Domain) -> bool:
        """Whether every key has the same position in both."""
        return self.slices == other.slices and self.has_shape(other)

    def has_shape(self, other: Domain) -> bool:
        """Whether the other differs at most in its first slice."""
        return (self.spans, self.nullable, self.size) == (other.spans, other.nullable, other.size)


class DirectTemplate:
    """The initial records of a direct table, with their keys. Tables over the same ranges differ only in their first
    slice, so this is computed once and copied for each of them.
    """

    def __init__(self, table: Table, domain: Domain) -> None:
        self.table, self._domain = table, domain
        self.records = _records(table, domain.size)
        positions = np.arange(domain.size)
        nulls = np.zeros(domain.size, np.int64)
        for k, (key, (least, span), null) in enumerate(zip(table.keys, domain.spans, domain.nullable, strict=True)):
            position = positions // domain.strides[k] % (span + null)
            is_null = position == span if null else np.zeros(domain.size, bool)
            start = least - (1 << 64) if least >= 1 << 63 else least  # unsigned keys wrap around, as their bits do
            values = np.where(is_null, 0, position.astype(np.int64) + start)
            _field(table, self.records, f"key{k}", _numpy(key))[:] = values.astype(_numpy(key))
            nulls |= is_null.astype(np.int64) << k
        if table.has_nulls:
            _field(table, self.records, "nulls", np.dtype(np.int64))[:] = nulls
        self.slices = positions // domain.per_slice  # of each record, from the first on

    def fits(self, table: Table, domain: Domain) -> bool:
        return self.table is table and self._domain.has_shape(domain)


class DirectTable(_FixedRecords):
    """An array with a record for every key of a small domain, keys already written."""

    def __init__(self, template: DirectTemplate, domain: Domain, options: Options) -> None:
        table = template.table
        records = allocate(template.records.size)[: template.records.size].reshape(template.records.shape)
        records[:] = template.records
        super().__init__(table, records, options)
        self.domain = domain
        if table.slicing is Slicing.KEY and domain.slices is not None:
            _field(table, records, "slice", np.dtype(np.int64))[:] = template.slices + domain.slices[0]

    def attach(self, frame: FrameData) -> None:
        super().attach(frame)
        frame["direct.arena"], frame["direct.size"] = address(self.records), self.domain.size
        for k, ((least, span), stride) in enumerate(zip(self.domain.spans, self.domain.strides, strict=True)):
            frame[f"direct.least{k}"] = least
            frame[f"direct.span{k}"] = span
            frame[f"direct.stride{k}"] = stride
        if self.domain.slices is not None:
            frame["direct.first_slice"], frame["direct.slices"] = self.domain.slices
            frame["direct.slice_stride"] = self.domain.per_slice


State = OneRecord | DirectTable | HashTable


def _records(table: Table, count: int) -> np.ndarray:
    """Empty records."""
    size = count * table.layout.size
    records = allocate(size)[:size].reshape(count, table.layout.size)
    records[:] = np.frombuffer(table.layout.template, np.uint8)
    return records


def _field(table: Table, records: np.ndarray, name: str, dtype: np.dtype) -> np.ndarray:
    start = table.layout.offset(name)
    return records[:, start : start + dtype.itemsize].view(dtype)[:, 0]


def _numpy(key: Key) -> np.dtype:
    dtype = key.stored
    if dtype.is_float:
        raise AssertionError("float keys are never addressed directly")
    bits = max(8, dtype.bits)
    return np.dtype(f"{'i' if dtype.is_signed else 'u'}{bits // 8}")


# Merging tables of one layout, with their side state: partial results of workers, slices into windows.

EVERYTHING = (-(2**63), 2**63 - 1)


class MergeKernels:
    """The kernels that merge states of one table."""

    def __init__(self, table: Table, mode: GroupMode, options: Options, slide: bool = False) -> None:
        self.table, self._options = table, options
        self._records = self._kernel(Merge(table, mode, slide))
        self._bags = [self._kernel(MergeBag(table, k, mode)) for k in range(len(table.bags))]

    def _kernel(self, sink: Sink) -> Compiled:
        return kernel(Stage("merge", FromRecords(), (), sink), self._options)

    def in_sessions(self, state: State) -> State:
        """The same sessions, all of them in the lists of their keys; for other tables as they are."""
        return self.sessions_anew(state) if isinstance(state, HashTable) and state.strays else state

    def sessions_anew(self, state: HashTable) -> HashTable:
        """The same sessions in another table, in lists, without records that no row has reached."""
        layout = self.table.layout
        words = state.words(layout.size // 8)
        words = words[words[:, layout.offset("acc0") // 8] > 0]
        order = np.argsort(words[:, layout.offset("first") // 8], kind="stable")
        found = HashTable(self.table, self._options)
        self.into(found, RecordCopies(self.table, words[order].view(np.uint8), self._options))
        return found

    def into(self, target: State, source: State | RecordCopies, back: int = 0,
             within: tuple[int, int] = EVERYTHING) -> None:
        """Merge the records of one state into another, of slices (or windows, when they slide) within a range."""
        moved = self._moved(source)
        if moved is not None:
            moved[:] = -1
        frame = self._records.kernel.frame.new()
        frame["slide.back"] = back
        frame["range.first"], frame["range.last"] = within
        _run(self._records, frame, target, source.first, source.count, source)
        if source.side_state is None or target.side_state is None:
            return
        for k, compiled in enumerate(self._bags):
            bag = source.side_state.bags[k]
            frame = compiled.kernel.frame.new()
            frame["owners"] = source.first - source.base
            _run(compiled, frame, target, bag.first, bag.count, source)
        if moved is not None:
            for log, other in zip(target.side_state.logs, source.side_state.logs, strict=True):
                positions = moved[(other.column("owner") - source.base) // self.table.layout.size]
                is_retained = positions >= 0
                entries = other.entries if is_retained.all() else other.entries[is_retained]
                log.add(entries)
                log.column("owner")[log.count - len(entries) :] = positions[is_retained]
                log.merged_heaps += [heap for heap in (other.heap, *other.merged_heaps) if heap not in log.merged_heaps]

    def _moved(self, source: State | RecordCopies) -> np.ndarray | None:
        """The new position of each record of the source, if it has side state that must follow."""
        if not self.table.has_sides:
            return None
        layout = self.table.layout
        return source.words(layout.size // 8)[:, layout.offset("moved") // 8]


def _run(compiled: Compiled, frame: FrameData, target: State, first: int, count: int,
         source: State | RecordCopies) -> None:
    frame["source"], frame["row"], frame["end"] = first, 0, count
    frame.keep["source"] = source
    while True:
        target.attach(frame)
        status = call(compiled, frame)
        target.detach(frame)
        if status == DONE:
            return
        handle_full(target, status, frame)
