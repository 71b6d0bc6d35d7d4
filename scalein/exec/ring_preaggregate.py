"""Ring pre-aggregation: sliding windows of a job, with the slices of all open windows in each key's record.

As in `ring.py` a row costs one probe. But windows are emitted when the caller closes them, not when a row is newer than
the ring, and slices that no open window needs are cleared. The ring covers `size` slices from the first one of an open
window on; the caller checks before it adds rows (`try_cover`), and buffers rows outside of it elsewhere.

The tables are sharded by key group, and each skips the rows of the others. Work (rows to add, windows to emit, slices
to clear) is deferred, and run shard by shard when results are requested: workers wait for each other once, not for each
window. If the number of workers changes, some first serve several shards, or none. When a window has closed, new
shards are started (`repartition`); the old ones are retired: they get no more rows, and are dropped when all their
slices have closed. Meanwhile a key may be in several tables, so windows are combined from partial groups by slice. All
content is drained as partial groups (`drain_partials`) where a column has its first null (the layout of records has no
null bits without need), and where most records are of expired keys.

Which aggregations get a ring, and how wide it is, is decided by `SlidingAggregate` (`window_aggregate.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from scalein.errors import InternalError
from scalein.exec.direct_addressing import MAX_SLICE
from scalein.exec.emit import Emitter
from scalein.exec.join_build import JoinTable
from scalein.exec.tables import HashTable, handle_full
from scalein.ir.passes.pass_through import kernel_steps
from scalein.ir.physical import WindowAggregate
from scalein.ir.stages import Group, GroupMode
from scalein.ir.tables import Slicing, Table
from scalein.kernels.call import call
from scalein.kernels.output import CHUNK_ROWS, Collector
from scalein.kernels.prepare import Prepared, specialised_table, table_exprs
from scalein.kernels.specialise import Specialiser
from scalein.kernels.workers import run_parallel
from scalein.layout import DONE, RING_ADVANCE, FrameData
from scalein.llvm_backend.cache import Compiled
from scalein.options import Options

MIN_DRAINED_RECORDS = 1 << 16
THREAD_ROWS = 1 << 14
_END_OF_TIME = 1 << 126
EXPIRED_FACTOR = 4  # with more records than this multiple of the last window's groups, most are of expired keys


class RingPreAggregation:
    """Open windows of a node. Slices have the numbers of `Table.slice_of`."""

    def __init__(self, node: WindowAggregate, partial_: WindowAggregate, joins: dict[int, JoinTable],
                 options: Options, size: int) -> None:
        node, partial_ = (replace(each, steps=kernel_steps(each)) for each in (node, partial_))
        self._windows, self._slices = (
            _View(each, replace(each.table, slicing=Slicing.RING, ring=size), options) for each in (node, partial_))
        self._options, self._size = options, size
        self._table = node.table
        self._window_slices = node.table.window_slices
        self._step = node.table.window_step
        self._workers = self._current_workers = options.workers  # the number of shards; the workers of the last call
        self._lock = threading.Lock()
        self._prepared = Prepared("ring", node.input.schema, node.steps, self._sink,
                                  (*node.keys, *table_exprs(node.table)), joins, options)
        self._node = node
        self._shards: list[_Shard] = []
        self._retired: list[_RetiredTables] = []
        self._tasks: list[_Task] = []  # deferred
        self._deferred_rows = 0
        self._closed: list[pa.RecordBatch] = []  # windows that were not drained yet
        self._first_slice: int | None = None  # of the ring; a window starts there
        self._least_slice = 0  # that a row may have: all its windows are in the ring, or closed
        self._last_slice: int | None = None  # that may have a row
        self._last_groups: int | None = None  # groups of the last window, if it came from the ring alone

    def _sink(self, special: Specialiser) -> Group:
        # For the facts observed so far: `add` starts new shards when they change.
        for each in (self._windows, self._slices):
            each.table, keys = specialised_table(each.general, each.node.keys, special, nullable=False)
        self._prepared.key_exprs = keys
        return Group(self._windows.table, keys, GroupMode.HASH, owned=self._workers > 1)

    # --- rows

    def try_cover(self, least: int, greatest: int) -> bool:
        """Extend the ring to these times; false if it cannot cover them."""
        low, high = self._table.slice_of(least), self._table.slice_of(greatest)
        if low < -MAX_SLICE or high > MAX_SLICE:
            return False
        first, least_ = self._first_slice, self._least_slice
        if first is None:  # earlier windows may be open, and later rows may belong to them
            first = (low // self._step - (-(-self._window_slices // self._step) - 1)) * self._step
            least_ = first + self._window_slices - self._step
        if low < least_ or high >= first + self._size:
            return False
        self._first_slice, self._least_slice = first, least_
        self._last_slice = high if self._last_slice is None else max(high, self._last_slice)
        return True

    def add(self, batches: list[pa.RecordBatch], workers: int) -> list[pa.RecordBatch]:
        """Aggregate rows whose times the ring covers; returns partial groups that had to be drained."""
        if not batches:
            return []
        self._current_workers = workers
        left: list[pa.RecordBatch] = []
        # All batches, without a shortcut: facts decide the layout of records.
        is_new = any([self._prepared.observe(batch) for batch in batches])  # noqa: C419
        if is_new:
            left = self.partials(_END_OF_TIME)
            self._shards, self._retired = [], []
        if not self._shards:
            self._workers = workers
            compiled = self._prepared.compile()
            self._shards = [_Shard(self._prepared, compiled, self._windows.table, self._options, worker, workers)
                            for worker in range(workers)]
        assert self._first_slice is not None
        self._deferred_rows += sum(batch.num_rows for batch in batches)
        self._defer(_Task(partial(_Shard.add, batches=batches, lock=self._lock, first=self._first_slice,
                                  size=self._size)))
        return left

    def _defer(self, task: _Task) -> None:
        if self._shards:
            self._tasks.append(task)

    def _run_deferred(self) -> None:
        """Run the deferred tasks on all shards."""
        tasks, rows = self._tasks, self._deferred_rows
        self._tasks, self._deferred_rows = [], 0
        if not tasks:
            return
        rows += sum(task.windows for task in tasks) * sum(shard.records.count for shard in self._shards)
        self._run_parallel([partial(shard.run_tasks, tasks) for shard in self._shards], rows)
        for number, task in enumerate(tasks):
            if task.view is not None:
                found = self._batches(task.view, [shard.results[number] for shard in self._shards])
                self._last_groups = sum(batch.num_rows for batch in found) // task.windows
                self._closed += found
        for shard in self._shards:
            shard.results.clear()

    def _batches(self, view: _View, chunks: list[list[list[pa.Array]]]) -> list[pa.RecordBatch]:
        return [view.emitter.batch(arrays, self._prepared, view.table)
                for some in chunks for arrays in some if len(arrays[0])]

    def _run_parallel(self, functions: list[Callable[[], None]], rows: int) -> None:
        """Run a function of each table on the current number of workers; fewer for few rows, as threads are costly."""
        workers = max(1, min(self._current_workers, rows // THREAD_ROWS, len(functions)))
        run_parallel([partial(_each, functions[worker::workers]) for worker in range(workers)])

    @property
    def has_split_keys(self) -> bool:
        """Whether a key may be in several tables: then windows must be combined from `partials`."""
        return bool(self._retired)

    @property
    def _tables(self) -> list[_Shard]:
        return [*self._shards, *(shard for retired in self._retired for shard in retired.shards)]

    @property
    def bytes(self) -> int:
        return sum(shard.records.used for shard in self._tables)

    @property
    def earliest(self) -> int | None:
        """A lower bound of all times in the ring, if it has any."""
        first = self._first_slice  # read once: other threads read it while it changes
        return None if first is None or not (self._shards or self._retired) else self._table.slice_start(first)

    @property
    def is_mostly_expired(self) -> bool:
        if self._last_groups is None:
            return False
        records = sum(shard.records.count for shard in self._tables)
        return records > max(MIN_DRAINED_RECORDS, EXPIRED_FACTOR * self._last_groups)

    # --- out

    def close(self, after: int, end: int) -> None:
        """Close the windows that end after `after`, up to `end`, in units of the time column; slices that no later
        window needs are cleared. No key may be split.

        Slices are cleared window by window: the last ones of the next window reuse the ring positions.
        """
        if self._first_slice is None or self._last_slice is None or not self._shards:
            return
        size, step = self._window_slices, self._step
        start = max(self._first_slice, self._table.slice_of(after) + 1 - size)
        start = -(-start // step) * step
        starts = range(start, min(self._table.slice_of(end) - size, self._last_slice) + 1, step)
        if start > self._first_slice:
            self.clear_before(self._table.slice_start(start))
        if not starts or self._first_slice is None:
            return
        self._windows.compile(size)  # not concurrently in the shards
        self._defer(_Task(partial(_Shard.emit, view=self._windows, slices=size, firsts=starts, clear_emitted=True),
                          self._windows, len(starts)))
        self._first_slice = self._least_slice = starts[-1] + step

    def drain_closed(self) -> list[pa.RecordBatch]:
        """The windows that were closed since the last drain."""
        self._run_deferred()
        found, self._closed = self._closed, []
        return found

    def partials(self, end: int) -> list[pa.RecordBatch]:
        """The partial groups of slices that start before a time."""
        self._run_deferred()
        self._last_groups = None
        tables = self._tables
        if self._first_slice is None or self._last_slice is None or not tables:
            return []
        firsts = range(self._first_slice, min(self._table.slice_of(end - 1), self._last_slice) + 1)
        if not firsts:
            return []
        self._slices.compile(1)  # not concurrently in the shards
        found: list[list[list[pa.Array]]] = [[] for _ in tables]

        def emit(k: int) -> None:
            found[k] += tables[k].emit(self._slices, 1, firsts, clear_emitted=False)

        records = sum(shard.records.count for shard in tables)
        self._run_parallel([partial(emit, k) for k in range(len(tables))], records * len(firsts))
        return self._batches(self._slices, found)

    def clear_before(self, first_open: int) -> None:
        """Clear the slices before the start of the first open window."""
        first = self._table.slice_of(first_open)
        if self._first_slice is None or first < self._first_slice:
            return
        self._least_slice = first
        if self._last_slice is None or first > self._last_slice:
            self._run_deferred()
            # All windows have closed.
            self._first_slice, self._last_slice, self._shards, self._retired = None, None, [], []
            return
        closed = range(self._first_slice, min(first, self._first_slice + self._size))
        self._defer(_Task(partial(_Shard.clear, slices=closed)))
        self._retired = [retired for retired in self._retired if retired.last >= first]
        for retired in self._retired:
            for shard in retired.shards:
                shard.clear(closed)
        self._first_slice = first

    def repartition(self, workers: int) -> None:
        """Retire the shards if the number of workers has changed; `add` starts new ones."""
        if workers == self._workers or not self._shards or self._last_slice is None:
            return
        self._run_deferred()
        self._retired.append(_RetiredTables(self._shards, self._last_slice))
        self._shards, self._last_groups = [], None

    def drain_partials(self) -> list[pa.RecordBatch]:
        """Remove all content, as partial groups."""
        found = self.partials(_END_OF_TIME)
        self._last_slice, self._shards, self._retired = None, [], []
        return found


def _each(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        function()


class _RetiredTables(NamedTuple):
    """Shards that get no more rows, and the last slice that may have a row."""

    shards: list[_Shard]
    last: int


class _Task(NamedTuple):
    """A deferred function of each shard; if it emits windows, their view and number."""

    run: Callable[[_Shard], list[list[pa.Array]] | None]
    view: _View | None = None
    windows: int = 0


class _View:
    """How the records of a ring are read: as windows, or as slices."""

    def __init__(self, node: WindowAggregate, table: Table, options: Options) -> None:
        self.node, self.general, self.table = node, table, table
        self.emitter = Emitter(node, None, {}, options)

    def compile(self, slices: int) -> None:
        self.emitter.kernel(self.table, slices)


class _Shard:
    """The table of some key groups."""

    def __init__(self, prepared: Prepared, compiled: Compiled, table: Table, options: Options, worker: int,
                 workers: int) -> None:
        self._prepared, self._compiled, self._table = prepared, compiled, table
        self.records = HashTable(table, options)
        # Results of many rounds share a chunk: untouched memory costs nothing, and a chunk for each would cost a
        # hundred page faults.
        self._out: dict[_View, Collector] = {}
        self.results: dict[int, list[list[pa.Array]]] = {}  # columns, by the number of a task
        self.frame = compiled.kernel.frame.new()
        self.frame["owner.workers"], self.frame["owner.worker"] = workers, worker
        prepared.attach_joins(self.frame)

    def run_tasks(self, tasks: list[_Task]) -> None:
        for number, task in enumerate(tasks):
            self.results[number] = task.run(self) or []

    def add(self, batches: list[pa.RecordBatch], lock: threading.Lock, first: int, size: int) -> None:
        """Aggregate rows of the slices from `first` on."""
        self.frame["ring.open"], self.frame["ring.limit"] = first, first + size
        for batch in batches:
            with lock:  # interned dictionary values are shared
                self._prepared.bind(self.frame, batch)
            self.frame["first_row"], self.frame["row"], self.frame["end"] = 0, 0, batch.num_rows
            while (status := self._call(self.frame)) != DONE:
                if status == RING_ADVANCE:
                    raise InternalError("a row is outside of the slices that a ring covers")
                handle_full(self.records, status, self.frame)

    def _call(self, frame: FrameData) -> int:
        self.records.attach(frame)
        status = call(self._compiled, frame)
        self.records.detach(frame)
        return status

    def emit(self, view: _View, slices: int, firsts: range, clear_emitted: bool) -> list[list[pa.Array]]:
        if view not in self._out:
            compiled, items = view.emitter.kernel(view.table, slices)
            self._out[view] = Collector(compiled, compiled.kernel.frame.new(), items, CHUNK_ROWS)
        out, layout = self._out[view], self._table.layout
        frame = out.frame
        frame.keep["source"] = self.records
        chunks: list[list[pa.Array]] = []
        for first in firsts:
            frame["window.first"] = first
            for k in range(slices):
                frame[f"window.slice{k}"] = ((first + k) & (self._table.ring - 1)) * layout.ring_step
            frame["source"], frame["row"], frame["end"] = self.records.first, 0, self.records.count
            chunks += out.run()
            if clear_emitted:
                self.clear(range(first, first + firsts.step))
        return [*chunks, out.finish()]

    def clear(self, slices: range) -> None:
        layout = self._table.layout
        words = self.records.words(layout.size // 8)
        count = layout.ring_step // 8
        for number in slices:
            start = (layout.ring_start + (number & (self._table.ring - 1)) * layout.ring_step) // 8
            words[:, start : start + count] = np.frombuffer(layout.template, np.int64)[start : start + count]
