"""The open sessions of a job as resident records: rows are counted in as in `collect`, and what is final is taken out.

Rows come as they arrive; partial groups (of a checkpoint, or of rows whose times are computed) are merged into the same
records, by a kernel of its own whose accumulators have the same fields (`partials.by_records`). When time advances, the
records of sessions that are final are found by their last times, emitted as results, and forgotten.

Few keys. Records stay in hash tables, sharded by key group; each shard skips the rows of the others. Nothing that stays
open is moved. Records that were emitted become free; a key's own remains for its next session. If most have none, the
open ones go to a new table. If the number of workers or what is known of the input changes, all sessions go to new
tables as partial groups.

Many keys (`_ManyKeys`). Tables that do not fit the cache would cost a miss a row. So rows are partitioned by key group
(`radix.py`), and when time advances each key group is aggregated in a small table that begins with the records of its
open sessions; those that are still open then are copied out again. That is done less often, as it visits all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalein.exec.aggregate import HashAggregate
from scalein.exec.emit import Emitter
from scalein.exec.join_build import JoinTable
from scalein.exec.morsels import Morsel
from scalein.exec.radix import GroupAggregator, RadixPartitions
from scalein.exec.schedule import schedule
from scalein.exec.tables import ARENA_START, HashTable, MergeKernels, RecordCopies, State, handle_full
from scalein.ir.exprs import columns
from scalein.ir.partials import by_records
from scalein.ir.passes.pass_through import kernel_steps
from scalein.ir.physical import WindowAggregate
from scalein.ir.stages import FOREVER, Group, GroupMode
from scalein.ir.tables import Table
from scalein.ir.windows import Session
from scalein.kernels.call import call
from scalein.kernels.output import CHUNK_ROWS, Collector
from scalein.kernels.prepare import Prepared, specialised_table, table_exprs
from scalein.kernels.specialise import Specialiser
from scalein.kernels.workers import run_parallel, run_workers
from scalein.layout import DONE, GROUPS, FrameData
from scalein.options import Options

Batches = list[pa.RecordBatch]
MIN_RECORDS = 1 << 16
IDLE_SHARE = 3 / 4  # of the records, from which on those that are in use go to a new table
THREAD_ROWS = 1 << 14
MANY_RECORDS = 1 << 17  # from which rows are partitioned by key group
FEW_RECORDS = 1 << 14  # until which they are not any more
MAX_PARTITIONED_BYTES = 640 << 20  # of rows, until they are aggregated
_NEVER = -FOREVER


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
        self._aggregate = HashAggregate(node, joins, options, None, self._whole.emitter)
        self._rows = self._aggregate.prepared
        self._rows.sink = self._rows_sink
        exprs = (*self._again.keys, *table_exprs(self._again.table))
        self._partials = Prepared("sessions", self._again.input.schema, (), self._partials_sink, exprs, {}, options)
        self._shards: list[_Shard] = []
        self._merge: MergeKernels | None = None
        self._lock = threading.Lock()
        self._many: _ManyKeys | None = None

    # For the facts observed so far: new shards begin when they change.

    def _rows_sink(self, special: Specialiser) -> Group:
        found = self._aggregate.sink(special)
        self._whole.table = found.table
        self._parts.table, _ = specialised_table(self._parts.node.table, self._parts.node.keys, special, nullable=True)
        return replace(found, owned=self._workers > 1)

    def _partials_sink(self, special: Specialiser) -> Group:
        table, keys = specialised_table(self._again.table, self._again.keys, special, nullable=True)
        return Group(table, keys, GroupMode.HASH, owned=self._workers > 1)

    @property
    def is_prepared(self) -> bool:
        """Whether rows have come, so that the layout of records is known."""
        return bool(self._shards)

    @property
    def is_partitioned(self) -> bool:
        """Whether there are many keys."""
        return self._many is not None

    @property
    def bytes(self) -> int:
        return sum(shard.records.bytes for shard in self._shards) + (0 if self._many is None else self._many.bytes)

    @property
    def count(self) -> int:
        """Records, some of which may have no session."""
        return sum(shard.records.count for shard in self._shards) + (0 if self._many is None else self._many.count)

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
        for k, batch in enumerate(batches):
            if self._many is not None:
                self._many.rows.add(map(Morsel, batches[k:], starts[k:]), workers)
                break
            self._run(self._rows, [batch], [starts[k]])
            if self.count > MANY_RECORDS and RadixPartitions.fits(self._aggregate):
                self._many = _ManyKeys(self._aggregate, self._gap)
        if self._many is not None and self._many.rows.bytes > MAX_PARTITIONED_BYTES:
            self._settle(_NEVER)
        return starts[-1]

    def _plain(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        for k, name in enumerate(batch.schema.names):
            if name in self._keys and pa.types.is_dictionary(batch.column(k).type):
                batch = batch.set_column(k, name, pc.cast(batch.column(k), pa.string()))
        return batch

    def _renew(self, workers: int) -> None:
        """Begin new shards, with the same sessions."""
        held = [] if self._many is not None else self.partials()
        if self._many is not None:
            self._settle(_NEVER)
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
        states: list[tuple[State | RecordCopies, np.ndarray]]
        if self._many is not None:
            self._settle(_NEVER)
            records = self._many.all()
            states = [(records, np.arange(records.count))]
        else:
            states = [(shard.records, shard.live()) for shard in self._ordered()]
        return [batch for records, numbers in states if len(numbers)
                for batch in self._parts.emitter.picked(self._rows, self._parts.table, records, numbers)]

    def _settle(self, watermark: int) -> Closed:
        """With many keys: aggregate the rows, and emit what is final."""
        assert self._many is not None
        for shard in self._ordered():  # where partial groups were merged, and all was before keys became many
            if shard.records.count:
                self._many.put(shard.records)
                shard.records.clear()
        batches, least_first, least_end = self._many.settle(watermark, self._workers)
        if self._many.count <= FEW_RECORDS:
            left, self._many = self._many, None
            assert self._merge is not None
            for worker, shard in enumerate(self._shards):
                self._merge.into(shard.records, left.all(worker, self._workers))
        return Closed(batches, least_first, least_end)

    def close(self, watermark: int) -> Closed:
        """Emit sessions that end before a watermark, and forget them; FOREVER: all of them."""
        if self._many is not None:
            return self._settle(watermark)
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
            if shard.is_mostly_idle:
                assert self._merge is not None
                shard.records = self._merge.sessions_anew(shard.records)
        return Closed([batch for batch in results if batch.num_rows], least_first, least_end)

    def _emit(self, records: HashTable, numbers: np.ndarray) -> Iterator[pa.RecordBatch]:
        return self._whole.emitter.picked(self._rows, self._whole.table, records, numbers)

    def clear(self) -> None:
        self._many = None
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


class _ManyKeys:
    """Rows by key group, and the records of each one's open sessions."""

    def __init__(self, run: HashAggregate, gap: int) -> None:
        self.run, self.gap, self.rows = run, gap, RadixPartitions(run)
        layout = run.table.layout
        self.size = layout.size
        self.at = {name: layout.offset(name) // 8 for name in ("hash", "acc0", "first", "last")}
        self.open: list[np.ndarray] = [np.zeros((0, self.size // 8), np.int64)] * GROUPS
        self.watermark = _NEVER
        self._aggregators: list[_GroupSessions] = []
        self._counted = 0  # rows of the partitions

    @property
    def count(self) -> int:
        """Sessions that were open when rows were aggregated last."""
        return sum(map(len, self.open))

    @property
    def bytes(self) -> int:
        return self.rows.bytes + self.count * self.size

    def put(self, records: HashTable) -> None:
        """Add the sessions of a table."""
        words = records.words(self.size // 8)
        words = words[words[:, self.at["acc0"]] > 0]
        groups = (words[:, self.at["hash"]].view(np.uint64) >> np.uint64(56)).astype(np.int64)
        words = words[np.argsort(groups, kind="stable")]
        ends = np.cumsum(np.bincount(groups, minlength=GROUPS))
        for group in np.unique(groups).tolist():
            some = words[ends[group - 1] if group else 0 : ends[group]]
            self.open[group] = np.concatenate((self.open[group], some))

    def all(self, worker: int = 0, workers: int = 1) -> RecordCopies:
        """The open sessions of a worker's key groups."""
        words = np.concatenate([each for group, each in enumerate(self.open) if group * workers // GROUPS == worker])
        return RecordCopies(self.run.table, words.view(np.uint8), self.run.options)

    def settle(self, watermark: int, workers: int) -> _Found:
        """Aggregate all rows; the sessions that end before a watermark, which are forgotten."""
        self.watermark = watermark
        rows = [self.rows.rows(group) for group in range(GROUPS)]
        work = [count + len(each) for count, each in zip(rows, self.open, strict=True)]
        order = sorted((group for group in range(GROUPS) if work[group]), key=lambda group: -work[group])
        while len(self._aggregators) < workers:
            self._aggregators.append(self.rows.aggregator(partial(_GroupSessions, self)))
        busy = self._aggregators[:workers]
        self.run.merge_kernels(GroupMode.HASH)  # not concurrently in the workers
        run_workers(busy, iter(order), schedule().assign)
        self.rows.clear()
        found = [self.run.emitter.batch(arrays, self.run.prepared, self.run.table)
                 for each in busy for arrays in each.finish()]
        if not any(map(len, self.open)):
            return _Found(found, FOREVER, FOREVER)
        firsts, lasts = (min(int(each[:, self.at[name]].min()) for each in self.open if len(each))
                         for name in ("first", "last"))
        return _Found(found, firsts, lasts + self.gap)


class _GroupSessions(GroupAggregator):
    """A worker that brings the sessions of key groups up to date."""

    def __init__(self, many: _ManyKeys, *given: Any) -> None:
        super().__init__(*given)
        self._many = many
        compiled, items = many.run.emitter.kernel(many.run.table, picked=True)
        self._out = Collector(compiled, compiled.kernel.frame.new(), items, CHUNK_ROWS)

    def begin(self, group: int) -> None:
        super().begin(group)
        many = self._many
        if len(many.open[group]):
            records = RecordCopies(many.run.table, many.open[group].view(np.uint8), many.run.options)
            many.run.merge_kernels(GroupMode.HASH).into(self.table, records)

    def emit(self) -> None:
        many, out = self._many, self._out.frame
        table = many.run.in_sessions(self.table)
        words = table.words(many.size // 8)
        is_open = words[:, many.at["acc0"]] > 0
        if many.watermark != _NEVER:
            is_final = is_open.copy()
            if many.watermark != FOREVER:
                is_final &= words[:, many.at["last"]] < many.watermark - many.gap
            numbers = np.flatnonzero(is_final)
            out.point("picked", numbers)
            out["source"], out["row"], out["end"] = table.first, 0, len(numbers)
            self._full += self._out.run()
            is_open ^= is_final
        many.open[self._group] = words[is_open]

    def finish(self) -> list[list[pa.Array]]:
        found = super().finish()
        self._full = []
        return found


class _Found(NamedTuple):
    batches: Batches
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
        # What a record has of its session: runs of whole words, and bytes that share a word with others.
        slots = [(layout.offset(name), size) for name, size in (("first", 8), ("last", 8), ("previous", 8),
                                                                *table.acc_slots)]
        whole = sorted(at // 8 + k for at, size in slots if at % 8 == size % 8 == 0 for k in range(size // 8))
        starts = [k for k in whole if k - 1 not in whole]
        self._runs = [(k, next(end for end in range(k, self._width + 1) if end not in whole)) for k in starts]
        self._bytes = [(at, size) for at, size in slots if at % 8 or size % 8]

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
            return _Found(found, FOREVER, FOREVER)
        words = self.records.words(self._width)
        last = words[live, self._last_at]
        is_final = last < watermark - gap
        final = live[is_final]
        found = list(emit(self.records, final)) if len(final) else []
        if len(final):
            self._forget(words, final)
        left = live[~is_final]
        if not len(left):
            return _Found(found, FOREVER, FOREVER)
        least_first = int(words[left, self._first_at].min())
        return _Found(found, least_first, int(last[~is_final].min()) + gap)

    def _forget(self, words: np.ndarray, final: np.ndarray) -> None:
        """Clear records. Those in the list of a key become free: what is before a final session is final as well."""
        size, template = 8 * self._width, self._table.layout.template
        previous = words[:, self._previous_at]
        linking = np.flatnonzero(previous)
        linked = (previous[linking] - ARENA_START) // size
        is_final = np.zeros(len(words), bool)
        is_final[final] = True
        is_gone = is_final[linked]
        freed = np.sort(linked[is_gone])[::-1]  # the first to be used again is the first in memory
        for start, end in self._runs:
            words[final, start:end] = np.frombuffer(template, np.int64)[start:end]
        for at, width in self._bytes:
            words.view(np.uint8).reshape(-1, size)[final, at : at + width] = np.frombuffer(template, np.uint8)[
                at : at + width]
        previous[linking[is_gone]] = 0
        if len(freed):
            addresses = freed * size + ARENA_START
            previous[freed] = np.append(self.records.free, addresses[:-1])
            self.records.free = int(addresses[-1])

    @property
    def is_mostly_idle(self) -> bool:
        """Whether most records are of keys without a session, which nothing but their next session uses. (Those that
        are free lead to one another.)
        """
        words = self.records.words(self._width)
        if len(words) <= MIN_RECORDS:
            return False
        is_idle = (words[:, self._rows_at] <= 0) & (words[:, self._previous_at] == 0)
        return bool(np.count_nonzero(is_idle) > IDLE_SHARE * len(words))
