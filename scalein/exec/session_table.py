"""The open sessions of a job in resident tables: rows are counted in as in `collect`, and what is final is taken out.

Rows come as they arrive; partial groups (of a checkpoint, or of rows whose times are computed) are merged into the same
records, by a kernel of its own whose accumulators have the same fields (`partials.by_records`). When time advances, the
records of sessions that are final are found by their last times, emitted as results, and become free. Nothing that
stays open is moved. A key's record remains for its next session; if most records have no session, the open ones go to a
new table.

The tables are sharded by key group, and each skips the rows of the others. If the number of workers or what is known of
the input changes, all sessions go to new tables as partial groups.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalein.exec.emit import Emitter
from scalein.exec.join_build import JoinTable
from scalein.exec.tables import ARENA_START, HashTable, MergeKernels, handle_full
from scalein.ir.exprs import columns
from scalein.ir.partials import by_records
from scalein.ir.passes.pass_through import kernel_steps
from scalein.ir.physical import WindowAggregate
from scalein.ir.stages import FOREVER, Group, GroupMode
from scalein.ir.tables import Table
from scalein.ir.windows import Session
from scalein.kernels.call import call
from scalein.kernels.prepare import Prepared, specialised_table, table_exprs
from scalein.kernels.specialise import Specialiser
from scalein.kernels.workers import run_parallel
from scalein.layout import DONE, FrameData
from scalein.options import Options

Batches = list[pa.RecordBatch]
MIN_RECORDS = 1 << 16
IDLE_FACTOR = 4  # with more records than this multiple of the open sessions, these go to a new table
THREAD_ROWS = 1 << 14


class Closed(NamedTuple):
    """What is final, as results, and bounds of what is still open: the least first time, and the least end."""

    results: Batches
    least_first: int
    least_end: int


class SessionTable:
    """The open sessions of a node."""

    def __init__(self, node: WindowAggregate, partial_: WindowAggregate, joins: dict[int, JoinTable],
                 options: Options) -> None:
        node, partial_ = (replace(each, steps=kernel_steps(each)) for each in (node, partial_))
        assert isinstance(node.table.window, Session)
        self._gap, self._node, self._options = node.table.window.gap, node, options
        self._whole, self._parts = (_View(each, options) for each in (node, partial_))
        self._again = by_records(node)
        self._workers = options.workers  # the number of shards
        # The text of keys is in the records: the ids of a dictionary mean nothing in another kernel.
        self._keys = frozenset(name for key in node.keys for name in columns(key))
        exprs = (*node.keys, *table_exprs(node.table))
        self._rows = Prepared("sessions", node.input.schema, node.steps, self._rows_sink, exprs, joins, options)
        exprs = (*self._again.keys, *table_exprs(self._again.table))
        self._partials = Prepared("sessions", self._again.input.schema, (), self._partials_sink, exprs, {}, options)
        self._shards: list[_Shard] = []
        self._merge: MergeKernels | None = None
        self._lock = threading.Lock()

    # For the facts observed so far: new shards begin when they change.

    def _rows_sink(self, special: Specialiser) -> Group:
        for view in (self._whole, self._parts):
            view.table, keys = specialised_table(view.node.table, view.node.keys, special, nullable=True)
        self._rows.key_exprs = keys
        return Group(self._whole.table, keys, GroupMode.HASH, owned=self._workers > 1)

    def _partials_sink(self, special: Specialiser) -> Group:
        table, keys = specialised_table(self._again.table, self._again.keys, special, nullable=True)
        return Group(table, keys, GroupMode.HASH, owned=self._workers > 1)

    @property
    def is_prepared(self) -> bool:
        """Whether rows have come, so that the layout of records is known."""
        return bool(self._shards)

    @property
    def bytes(self) -> int:
        return sum(shard.records.bytes for shard in self._shards)

    @property
    def count(self) -> int:
        """Records, some of which may have no session."""
        return sum(shard.records.count for shard in self._shards)

    # --- in

    def add(self, batches: Batches, workers: int, row: int) -> int:
        """Count rows in, which are numbered from `row` on; returns the next number."""
        batches = [self._plain(batch) for batch in batches if batch.num_rows]
        if not batches:
            return row
        # All batches, without a shortcut: facts decide the kernel.
        is_new = any([self._rows.observe(batch) for batch in batches])  # noqa: C419
        if is_new or workers != self._workers:
            self._renew(workers)
        starts = [row, *(row + int(n) for n in np.cumsum([batch.num_rows for batch in batches]))]
        self._run(self._rows, batches, starts)
        return starts[-1]

    def _plain(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        for k, name in enumerate(batch.schema.names):
            if name in self._keys and pa.types.is_dictionary(batch.column(k).type):
                batch = batch.set_column(k, name, pc.cast(batch.column(k), pa.string()))
        return batch

    def _renew(self, workers: int) -> None:
        """Begin new shards, with the same sessions."""
        held = self.partials()
        self._workers = workers
        self._rows.compile()
        self._partials.compiled = None
        self._merge = MergeKernels(self._whole.table, GroupMode.HASH, self._options)
        self._shards = [_Shard(self._whole.table, self._options, worker, workers) for worker in range(workers)]
        self.put(held)

    def put(self, partials: Batches) -> None:
        """Merge partial groups in; rows have come before."""
        partials = [batch for batch in partials if batch.num_rows]
        if not partials:
            return
        is_new = any([self._partials.observe(batch) for batch in partials])  # noqa: C419
        if is_new:
            self._partials.compile()
            assert self._partials.stage is not None and isinstance(self._partials.stage.sink, Group)  # noqa: PT018
            assert self._partials.stage.sink.table.layout == self._whole.table.layout
        self._run(self._partials, partials, [0] * len(partials))

    def _run(self, prepared: Prepared, batches: Batches, rows: list[int]) -> None:
        run = [partial(shard.add, prepared, batches, rows, self._lock) for shard in self._shards]
        self._in_parallel(run, sum(batch.num_rows for batch in batches))

    def _in_parallel(self, functions: Sequence[Callable[[], None]], rows: int) -> None:
        workers = max(1, min(len(functions), rows // THREAD_ROWS))
        run_parallel([partial(_each, functions[worker::workers]) for worker in range(workers)])

    # --- out

    def partials(self) -> Batches:
        """All sessions, as partial groups."""
        return [batch for shard in self._ordered() if shard.records.count
                for batch in self._parts.emitter.picked(self._rows, self._parts.table, shard.records, shard.live())]

    def close(self, watermark: int) -> Closed:
        """Emit sessions that end before a watermark, and forget them; FOREVER: all of them."""
        results: Batches = []
        least_first = least_end = FOREVER
        self._whole.emitter.kernel(self._whole.table, picked=True)  # not concurrently in the shards
        shards = self._ordered()
        found: list[_Found | None] = [None] * len(shards)

        def take(k: int) -> None:
            found[k] = shards[k].taken(watermark, self._gap, self._emit)

        self._in_parallel([partial(take, k) for k in range(len(shards))], self.count)
        for shard, each in zip(shards, found, strict=True):
            assert each is not None
            results += each.batches
            least_first, least_end = min(least_first, each.least_first), min(least_end, each.least_end)
            if shard.records.count > max(MIN_RECORDS, IDLE_FACTOR * each.open):
                assert self._merge is not None
                shard.records = self._merge.sessions_anew(shard.records)
        return Closed([batch for batch in results if batch.num_rows], least_first, least_end)

    def _emit(self, records: HashTable, numbers: np.ndarray) -> Iterator[pa.RecordBatch]:
        return self._whole.emitter.picked(self._rows, self._whole.table, records, numbers)

    def clear(self) -> None:
        for shard in self._shards:
            shard.records.clear()

    def _ordered(self) -> list[_Shard]:
        """The shards, with all sessions in the lists of their keys."""
        for shard in self._shards:
            assert self._merge is not None
            found = self._merge.in_sessions(shard.records)
            assert isinstance(found, HashTable)
            shard.records = found
        return self._shards


def _each(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()


class _View:
    """How records are read: as results, or as partial groups."""

    def __init__(self, node: WindowAggregate, options: Options) -> None:
        self.node, self.table = node, node.table
        self.emitter = Emitter(node, None, {}, options)


class _Found(NamedTuple):
    batches: Batches
    open: int  # sessions that are left
    least_first: int
    least_end: int


class _Shard:
    """The table of some key groups."""

    def __init__(self, table: Table, options: Options, worker: int, workers: int) -> None:
        self._table, self._worker, self._workers = table, worker, workers
        self.records = HashTable(table, options)
        self._frames: dict[int, tuple[object, FrameData]] = {}  # by the identity of what it was prepared with
        layout = table.layout
        self._width = layout.size // 8
        self._rows_at, self._first_at, self._last_at, self._previous_at = (
            layout.offset(name) // 8 for name in ("acc0", "first", "last", "previous"))
        # What a record has of its session: whole words, and bytes that share a word with others.
        slots = [(layout.offset(name), size) for name, size in (("first", 8), ("last", 8), *table.acc_slots)]
        is_whole = [at % 8 == size % 8 == 0 for at, size in slots]
        self._words = [at // 8 + k for (at, size), whole in zip(slots, is_whole, strict=True) if whole
                       for k in range(size // 8)]
        self._bytes = [each for each, whole in zip(slots, is_whole, strict=True) if not whole]

    def add(self, prepared: Prepared, batches: Batches, rows: list[int], lock: threading.Lock) -> None:
        """Count rows or partial groups in."""
        compiled = prepared.compiled
        assert compiled is not None
        known = self._frames.get(id(prepared))
        if known is None or known[0] is not compiled:
            known = self._frames[id(prepared)] = (compiled, compiled.kernel.frame.new())
            known[1]["owner.workers"], known[1]["owner.worker"] = self._workers, self._worker
            prepared.attach_joins(known[1])
        frame = known[1]
        for batch, row in zip(batches, rows, strict=False):
            with lock:  # lookup tables of dictionaries are shared
                prepared.bind(frame, batch)
            frame["first_row"], frame["row"], frame["end"] = row, 0, batch.num_rows
            while True:
                self.records.attach(frame)
                status = call(compiled, frame)
                self.records.detach(frame)
                if status == DONE:
                    break
                handle_full(self.records, status, frame)

    def live(self) -> np.ndarray:
        """The numbers of records that have a session."""
        return np.flatnonzero(self.records.words(self._width)[:, self._rows_at] > 0)

    def taken(self, watermark: int, gap: int, emit: Callable[[HashTable, np.ndarray], Iterator[pa.RecordBatch]]
              ) -> _Found:
        """The sessions that end before a watermark, which are forgotten."""
        live = self.live()
        if watermark == FOREVER:
            found = list(emit(self.records, live))
            self.records.clear()
            return _Found(found, 0, FOREVER, FOREVER)
        words = self.records.words(self._width)
        last = words[live, self._last_at]
        is_final = last < watermark - gap
        final = live[is_final]
        found = list(emit(self.records, final)) if len(final) else []
        if len(final):
            self._forget(words, final)
        left = live[~is_final]
        if not len(left):
            return _Found(found, 0, FOREVER, FOREVER)
        least_first = int(words[left, self._first_at].min())
        return _Found(found, len(left), least_first, int(last[~is_final].min()) + gap)

    def _forget(self, words: np.ndarray, final: np.ndarray) -> None:
        """Clear records. Those in the list of a key become free: what is before a final session is final as well."""
        size = 8 * self._width
        template = np.frombuffer(self._table.layout.template, np.int64)
        for k in self._words:
            words[final, k] = template[k]
        for at, width in self._bytes:
            words.view(np.uint8).reshape(-1, size)[final, at : at + width] = np.frombuffer(
                self._table.layout.template, np.uint8)[at : at + width]
        previous = words[:, self._previous_at]
        linking = np.flatnonzero(previous)
        linked = (previous[linking] - ARENA_START) // size
        is_final = np.zeros(len(words), bool)
        is_final[final] = True
        is_gone = is_final[linked]
        freed = linked[is_gone]
        previous[linking[is_gone]] = 0
        if len(freed):
            addresses = freed * size + ARENA_START
            previous[freed] = np.append(self.records.free, addresses[:-1])
            self.records.free = int(addresses[-1])
