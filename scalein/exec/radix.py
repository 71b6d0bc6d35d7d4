"""Radix-partitioned aggregation: many groups, aggregated one key group at a time in a table that fits the cache.

First every row (keys and arguments only) is appended to the chunks of its key group: 256 sequential write streams
instead of a random access per row. Then a worker takes a key group, runs its rows through the same update kernel that
reads batches otherwise, and emits the records while they are in cache. A worker reuses one table for all its key
groups. The largest key groups go first; one that is larger than a worker's fair share is aggregated by all workers in
parts, so a heavy key does no harm.

Under a memory limit aggregations spill here: rows beyond `PARTITION_SHARE` of the limit go to a spill file
(`_more_chunks`). `has_many_groups` decides whether rows are partitioned at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pyarrow as pa

from scalein.exec.finalize import finalize
from scalein.exec.morsels import Morsel
from scalein.exec.schedule import schedule
from scalein.exec.spill_file import SpillFile, pieces_in
from scalein.exec.tables import HashTable, handle_full
from scalein.ir.exprs import Call, Col, Expr, Lit, Named, type_of
from scalein.ir.stages import Group, GroupMode, Partition, Stage
from scalein.ir.tables import Table
from scalein.kernels.call import call, kernel
from scalein.kernels.output import CHUNK_ROWS, Collector
from scalein.kernels.prepare import Prepared, table_args, table_exprs
from scalein.kernels.specialise import Specialiser
from scalein.kernels.workers import run_parallel, run_workers
from scalein.layout import CHUNKS_FULL, DONE, GROUPS, FrameData
from scalein.llvm_backend.cache import Compiled
from scalein.memory import address, allocate

if TYPE_CHECKING:
    from scalein.exec.aggregate import AggregateWorker, HashAggregate

Aggregator = TypeVar("Aggregator", bound="GroupAggregator")
SAMPLE_ROWS = 1 << 18
MANY_SHARE = 3 / 8  # groups per row of the sample, from which partitioning pays
SAMPLE_SHARE = 16  # of a memory limit, a sample has at most 1/16
FEW_SHARE = 1 / 64  # the same under a memory limit
MAX_FIELDS = 64  # a partition row has one word of null bits
CHUNK_BYTES = 1 << 16
HEAVY_SHARE = 2  # a key group is heavy from 1/2 of a worker's fair share on
SLAB_CHUNKS = 1 << 9
SLAB_BYTES = SLAB_CHUNKS * CHUNK_BYTES
PARTITION_SHARE = 0.6  # of the memory limit, for rows; the rest is for tables and results
ROUND_GROUPS = 16
PIECES_A_CALL = 1 << 9  # chunks that a call of the update kernel reads, so that Ctrl-C takes effect soon


def fits(table: Table) -> bool:
    """Whether key groups can be emitted one by one: each key is in one of them."""
    fields = len(table.keys) + len(dict.fromkeys(table_args(table)))
    whole = not table.has_lists and (table.window is None or table.window.is_tumbling)
    return len(table.keys) > 0 and fields <= MAX_FIELDS and whole


def aggregate_sample(worker: AggregateWorker, morsels: Iterator[Morsel],
                     memory: int | None = None) -> tuple[list[Morsel], Iterator[Morsel]]:
    """Aggregate the first rows by hashing; returns their morsels, and the rest."""
    sample: list[Morsel] = []
    rows = size = 0
    for morsel in morsels:
        piece = morsel.batch.slice(0, SAMPLE_ROWS - rows)
        sample.append(Morsel(piece, morsel.first_row))
        worker.process(sample[-1])
        rows += piece.num_rows
        size += piece.nbytes if memory is not None else 0
        if rows >= SAMPLE_ROWS or (memory is not None and size > memory // SAMPLE_SHARE):
            rest = Morsel(morsel.batch.slice(piece.num_rows), morsel.first_row + piece.num_rows)
            return sample, chain([rest] if rest.batch.num_rows else [], morsels)
    return sample, iter(())


def has_many_groups(worker: AggregateWorker, sample: list[Morsel], memory: int | None) -> bool:
    """Whether there are enough groups for partitioning to pay, or, under a memory limit, to expect many more. Distinct
    values count as groups.
    """
    rows = sum(morsel.batch.num_rows for morsel in sample)
    if memory is None:
        return rows >= SAMPLE_ROWS and bool(worker.states[0].count > MANY_SHARE * rows)
    side = worker.states[0].side_state
    count = max([worker.states[0].count, *(bag.count for bag in (side.bags if side is not None else ()))])
    is_enough = rows >= SAMPLE_ROWS or sum(morsel.batch.nbytes for morsel in sample) > memory // SAMPLE_SHARE
    return bool(is_enough and count > FEW_SHARE * rows)


def run_radix(run: HashAggregate, morsels: Iterator[Morsel]) -> Iterator[pa.RecordBatch]:
    """Partition all rows, then aggregate and emit each key group."""
    plan = RadixPlan(run)
    try:
        yield from _run_plan(run, plan, morsels)
    finally:
        plan.pinned.clear()  # now, not when the garbage collector finds the plan
        if plan.spill is not None:
            plan.spill.close()


def _run_plan(run: HashAggregate, plan: RadixPlan, morsels: Iterator[Morsel]) -> Iterator[pa.RecordBatch]:
    partitioners = [_Partitioner(plan) for _ in range(run.options.workers)]
    run_workers(partitioners, morsels, schedule().assign)
    yield from _groups(run, plan, partitioners, run.options.workers)


class RadixPartitions:
    """Rows of many calls, partitioned by key group, until their groups are drained."""

    def __init__(self, run: HashAggregate) -> None:
        self._run, self._plan = run, RadixPlan(run)
        self._partitioners: list[_Partitioner] = []

    @staticmethod
    def fits(run: HashAggregate) -> bool:
        """Whether rows can be buffered without their batches (no text), and there is no memory limit."""
        texts = any(type_of(e).is_bytes for e in (*run.keys, *table_exprs(run.table)))
        return fits(run.table) and not texts and run.options.memory is None

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self._partitioners)

    def add(self, morsels: Iterator[Morsel], workers: int) -> None:
        while len(self._partitioners) < workers:
            self._partitioners.append(_Partitioner(self._plan))
        run_workers(self._partitioners[:workers], morsels, schedule().assign)

    def groups(self, workers: int) -> Iterator[pa.RecordBatch]:
        """All groups, key group by key group."""
        return _groups(self._run, self._plan, self._partitioners, workers)

    def aggregator(self, kind: Callable[[RadixPlan, Compiled, list[_Partitioner], int], Aggregator]) -> Aggregator:
        """A worker that aggregates key groups, for a caller that runs it itself."""
        return kind(self._plan, self._plan.update_kernel(), self._partitioners, CHUNK_ROWS)

    def rows(self, group: int) -> int:
        return sum(each.rows(group) for each in self._partitioners)

    def clear(self) -> None:
        """Forget all rows; their memory is used again."""
        for each in self._partitioners:
            each.clear()


def _groups(run: HashAggregate, plan: RadixPlan, partitioners: list[_Partitioner],
            workers: int) -> Iterator[pa.RecordBatch]:
    rows = [sum(p.rows(group) for p in partitioners) for group in range(GROUPS)]
    order = sorted((g for g in range(GROUPS) if rows[g]), key=lambda g: -rows[g])
    update = plan.update_kernel()
    aggregators = [GroupAggregator(plan, update, partitioners, sum(rows)) for _ in range(workers)]
    # A key group with a large share of all rows, because of a heavy key, is aggregated by all workers.
    heavy = [g for g in order if len(aggregators) > 1 and rows[g] * len(aggregators) * HEAVY_SHARE > sum(rows)]
    for group in heavy:
        _aggregate_heavy(run, aggregators, group, [piece for p in partitioners for piece in p.pieces(group)])
    light = [g for g in order if g not in heavy]
    # Under a memory limit, results are emitted in rounds; else all at once, which starts fewer threads.
    step = len(light) if run.options.memory is None else ROUND_GROUPS
    for start in range(0, len(light), max(1, step)):
        run_workers(aggregators, iter(light[start : start + step]), schedule().assign)
        yield from _emitted(run, aggregators, is_last=False)
    yield from _emitted(run, aggregators, is_last=True)


def _emitted(run: HashAggregate, aggregators: list[GroupAggregator], is_last: bool) -> Iterator[pa.RecordBatch]:
    for aggregator in aggregators:
        for arrays in aggregator.finish() if is_last else aggregator.full():
            yield from run.emitter.after(iter([run.emitter.batch(arrays, run.prepared, run.table)]), run.table)


def _aggregate_heavy(run: HashAggregate, aggregators: list[GroupAggregator], group: int,
                     pieces: list[tuple[int, int]]) -> None:
    """Aggregate a key group in parts, merge the parts, emit it."""
    jobs = [partial(f.aggregate, group, pieces[k :: len(aggregators)]) for k, f in enumerate(aggregators)]
    run_parallel(jobs)
    merge_kernels = run.merge_kernels(GroupMode.HASH)
    for other in aggregators[1:]:
        merge_kernels.into(aggregators[0].table, other.table)
    aggregators[0].emit()


class RadixPlan:
    """The partitioning stage, and the table over partition rows that follows it."""

    def __init__(self, run: HashAggregate) -> None:
        self.run = run
        node = run.node
        exprs = (*node.keys, *table_exprs(node.table))
        self.prepared = Prepared("partition", node.input.schema, node.steps, self._sink, exprs, run.prepared.joins,
                                 run.options)
        self.prepared.facts = dict(run.prepared.facts)
        self.prepared.interners = run.prepared.interners
        self.partition: Partition | None = None
        self.holds_strings = any(type_of(e).is_bytes for e in (*run.keys, *table_exprs(run.table)))
        self.pinned: list[dict[str, object]] = []  # the batches that strings of the rows point into
        limit = run.options.memory
        self.spill = None if limit is None else SpillFile()
        share = int((limit or 0) * PARTITION_SHARE) // run.options.workers
        self.most_slabs = None if limit is None else max(1, share // SLAB_BYTES)

    def _sink(self, special: Specialiser) -> Partition:
        run = self.run
        keys = tuple(special.key(key) for key in run.node.keys)
        given = dict.fromkeys(table_args(run.node.table))
        args = [special.key(e) if by_code else special.expr(e) for e, by_code in given]
        # The layout of rows must not depend on the batch, so nullability follows the table.
        items = [Named(f"key{k}", _with_nulls(e, key.nullable))
                 for k, (e, key) in enumerate(zip(keys, run.table.keys, strict=True))]
        items += [Named(f"arg{k}", _with_nulls(e, old.nullable))
                  for k, (e, old) in enumerate(zip(args, self._args(), strict=True))]
        ordinal = any(acc.needs_order for acc in run.table.accs)
        self.partition = Partition(keys, tuple(items), ordinal)
        return self.partition

    def _args(self) -> list[Expr]:
        """Arguments as the table has them: their nullability decides the layout of rows."""
        old = [e for e, _ in dict.fromkeys(table_args(self.run.node.table))]
        if self.run.source is None:
            return old
        seen = {_plain(e): e for e in table_exprs(self.run.table)}
        return [seen.get(_plain(e), e) for e in old]

    def update_kernel(self) -> Compiled:
        """The table's update over partition rows instead of batches."""
        if self.prepared.stage is None:
            self.prepared.compile()
        partition, run = self.partition, self.run
        assert partition is not None
        by_expr = {_plain(item.expr): Col(item.name, item.expr.dtype, item.expr.nullable)
                   for item in partition.items if item.name.startswith("arg")}

        def field(expr: Expr) -> Expr:
            return by_expr[_plain(expr)]

        table = run.table
        window = None if table.window is None else table.window.over(field)
        accs = tuple(acc.over(field) for acc in table.accs)
        keys = tuple(Col(item.name, item.expr.dtype, item.expr.nullable)
                     for item in partition.items if item.name.startswith("key"))
        over_rows = replace(table, accs=accs, window=window)
        return kernel(Stage("update", partition.reader, (), Group(over_rows, keys, GroupMode.HASH)), run.options)


def _with_nulls(expr: Expr, nullable: bool) -> Expr:
    return expr if isinstance(expr, Lit) else replace(expr, nullable=nullable)


def _plain(expr: Expr) -> Expr:
    """The expression without nullability, for comparison."""
    if isinstance(expr, Lit):
        return expr
    if isinstance(expr, Call):
        return replace(expr, nullable=True, args=tuple(_plain(a) for a in expr.args))
    return replace(expr, nullable=True)


class _Partitioner:
    """A worker's 256 chunk streams."""

    def __init__(self, plan: RadixPlan) -> None:
        self._plan = plan
        self._heads = np.zeros((GROUPS, 2), np.int64)
        self._slabs: list[np.ndarray] = []
        self._free = np.zeros(0, np.int64)
        self._log = np.zeros(0, np.int64)
        self._left = self._taken = 0
        self._spilled: list[list[int]] = [[] for _ in range(GROUPS)]  # file offsets of spilled chunks, by key group
        self._read: dict[int, np.ndarray] = {}  # spilled chunks that were read back, by key group

    def process(self, morsel: Morsel) -> None:
        plan = self._plan
        with plan.run.lock:
            if plan.prepared.observe(morsel.batch) or plan.prepared.compiled is None:
                plan.prepared.compile()
            compiled = plan.prepared.compiled
            assert compiled is not None
            frame = compiled.kernel.frame.new()
            plan.prepared.bind(frame, morsel.batch)
            plan.prepared.attach_joins(frame)
            if plan.holds_strings:
                plan.pinned.append(frame.keep)
        frame["first_row"] = morsel.first_row
        frame["row"], frame["end"] = 0, morsel.batch.num_rows
        while True:
            self._attach(frame)
            status = call(compiled, frame)
            self._left, self._taken = frame["part.left"], frame["part.taken"]
            if status == DONE:
                return
            assert status == CHUNKS_FULL
            self._more_chunks()

    @property
    def _chunk_bytes(self) -> int:
        assert self._plan.partition is not None
        stride = self._plan.partition.stride
        return max(1, CHUNK_BYTES // stride) * stride

    def _attach(self, frame: FrameData) -> None:
        frame.point("part.heads", self._heads)
        frame["part.left"], frame["part.taken"] = self._left, self._taken
        frame["part.chunk_bytes"] = self._chunk_bytes
        if len(self._free):
            frame["part.free"], frame["part.log"] = address(self._free), address(self._log)

    def _more_chunks(self) -> None:
        most = self._plan.most_slabs
        if most is not None and len(self._slabs) >= most:
            self._spill_full()
            if self._left > GROUPS:
                return
        slab = allocate(SLAB_CHUNKS * self._chunk_bytes)
        self._slabs.append(slab)
        new = address(slab) + np.arange(SLAB_CHUNKS, dtype=np.int64)[::-1] * self._chunk_bytes
        self._free = np.concatenate((self._free[: self._left], new))
        self._left += SLAB_CHUNKS
        log = np.zeros(2 * SLAB_CHUNKS * len(self._slabs), np.int64)
        log[: 2 * self._taken] = self._log[: 2 * self._taken]
        self._log = log

    def _spill_full(self) -> None:
        """Spill all chunks but the one that each key group is filling, and free them for reuse."""
        assert self._plan.spill is not None
        taken = self._log[: 2 * self._taken].reshape(-1, 2)
        is_open = np.isin(taken[:, 1] + self._chunk_bytes, self._heads[:, 1])
        full = taken[~is_open]
        offsets = self._plan.spill.write(full[:, 1].tolist(), self._chunk_bytes)
        for group, offset in zip(full[:, 0].tolist(), offsets, strict=True):
            self._spilled[group].append(offset)
        self._free = np.concatenate((self._free[: self._left], full[:, 1]))
        self._left += len(full)
        rest = taken[is_open].ravel().copy()
        self._log[: len(rest)] = rest
        self._taken = len(rest) // 2

    def clear(self) -> None:
        """Forget all rows; the chunks are free."""
        size = self._chunk_bytes
        free = [address(slab) + np.arange(SLAB_CHUNKS, dtype=np.int64)[::-1] * size for slab in self._slabs]
        self._free = np.concatenate([self._free[:0], *free[::-1]])
        self._left, self._taken = len(self._free), 0
        self._heads[:] = 0

    @property
    def bytes(self) -> int:
        return sum(map(len, self._slabs))

    def rows(self, group: int) -> int:
        spilled = len(self._spilled[group]) * (self._chunk_bytes // self._stride)
        return spilled + sum(rows for _, rows in self._in_memory(group))

    def pieces(self, group: int) -> list[tuple[int, int]]:
        """Address and row count of a group's chunks, in order."""
        offsets = self._spilled[group]
        if not offsets:
            return self._in_memory(group)
        assert self._plan.spill is not None
        self._read[group] = found = self._plan.spill.read(offsets, self._chunk_bytes)
        rows = self._chunk_bytes // self._stride
        return [*pieces_in(found, len(offsets), rows), *self._in_memory(group)]

    def release(self, group: int) -> None:
        """Free what was read back of a key group."""
        self._read.pop(group, None)

    @property
    def _stride(self) -> int:
        assert self._plan.partition is not None
        return self._plan.partition.stride

    def _in_memory(self, group: int) -> list[tuple[int, int]]:
        taken = self._log[: 2 * self._taken].reshape(-1, 2)
        chunks = taken[taken[:, 0] == group, 1]
        if not len(chunks):
            return []
        stride, last = self._stride, int(chunks[-1])
        rows = self._chunk_bytes // stride
        left = (int(self._heads[group, 0]) - last) // stride
        return [*((chunk, rows) for chunk in chunks[:-1].tolist()), (last, left)]


class GroupAggregator:
    """A worker that aggregates and emits whole key groups."""

    def __init__(self, plan: RadixPlan, update: Compiled, partitioners: list[_Partitioner], rows: int) -> None:
        self._run, self._update, self._partitioners = plan.run, update, partitioners
        self.table = HashTable(plan.run.table, plan.run.options)
        self._frame = update.kernel.frame.new()
        compiled, items = plan.run.emitter.kernel(plan.run.table)
        self._out = Collector(compiled, compiled.kernel.frame.new(), items, rows)
        self._full: list[list[pa.Array]] = []
        self._group = 0  # the key group that the table holds

    def process(self, group: int) -> None:
        self.aggregate(group, [piece for p in self._partitioners for piece in p.pieces(group)])
        for partitioner in self._partitioners:
            partitioner.release(group)
        self.emit()

    def begin(self, group: int) -> None:
        """Give the table to another key group."""
        self.table.reuse_for_group(self._group, group)  # so that the index grows once, not once per group
        self._group = group

    def aggregate(self, group: int, given: list[tuple[int, int]]) -> None:
        """Replace the key group in the table by the rows of another."""
        self.begin(group)
        frame, table = self._frame, self.table
        pieces = np.array(given, np.int64).reshape(-1, 2)
        frame.point("pieces", pieces)
        frame["piece"], frame["row"] = 0, 0
        for start in range(0, len(pieces), PIECES_A_CALL):
            part = pieces[start : start + PIECES_A_CALL]
            frame["piece.count"], frame.rows = start + len(part), int(part[:, 1].sum())
            while True:
                table.attach(frame)
                status = call(self._update, frame)
                table.detach(frame)
                if status == DONE:
                    break
                handle_full(table, status, frame)

    def emit(self) -> None:
        table = self._run.in_sessions(self.table)
        finalize(self._run.table, table, replace(self._run.options, workers=1))
        out = self._out.frame
        out["source"], out["row"], out["end"] = table.first, 0, table.count
        self._full += self._out.run()

    def full(self) -> list[list[pa.Array]]:
        """The full chunks that were emitted since the last call."""
        full, self._full = self._full, []
        return full

    def finish(self) -> list[list[pa.Array]]:
        return [*self._full, self._out.finish()]
