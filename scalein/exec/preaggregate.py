"""Pre-aggregation: rows of many batches are aggregated into resident tables, and all groups are drained now and then.

Kernels and the workers' tables are retained between calls, so that few rows cost little. Any worker may get any row,
and the number of workers may change: their tables are merged when groups are drained. Where there are nearly as many
groups as rows, and the caller allows it, rows are partitioned by key group instead and aggregated when they are
drained, as in a bounded run (`radix.has_many_groups`). When groups are drained is decided in
`aggregate_operator.py` (`most_groups`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, chain, islice

import pyarrow as pa

from scalein.exec import radix
from scalein.exec.aggregate import AggregateWorker, HashAggregate
from scalein.exec.direct_addressing import domain_of, with_headroom
from scalein.exec.emit import Emitter
from scalein.exec.join_build import JoinTable
from scalein.exec.morsels import Morsel, cut_morsels
from scalein.exec.radix import RadixPartitions
from scalein.exec.schedule import schedule
from scalein.exec.tables import HashTable
from scalein.ir.passes.pass_through import kernel_steps
from scalein.ir.physical import Pipeline, WindowAggregate
from scalein.ir.stages import Group, GroupMode
from scalein.ir.tables import Table
from scalein.kernels.prepare import specialised_table
from scalein.kernels.specialise import Specialiser
from scalein.kernels.workers import run_workers
from scalein.options import Options

DIRECT_ROWS = 1 << 17  # from which a direct table pays: it is built for each drain, a hash table is only cleared


class PreAggregation:
    """The groups of a node since the last drain, passed through the downstream pipeline, if any."""

    def __init__(self, node: WindowAggregate, joins: dict[int, JoinTable], options: Options,
                 downstream: Pipeline | None = None, downstream_joins: dict[int, JoinTable] | None = None,
                 track_times: bool = False, small_input: bool = False, complete: WindowAggregate | None = None) -> None:
        """With `complete`, the complete aggregation by the same accumulators, groups can be drained as its output
        instead of as partial groups; then rows may be partitioned.
        """
        node = replace(node, steps=kernel_steps(node))
        self._emitter = Emitter(node, downstream, downstream_joins or {}, options)
        self._operator = HashAggregate(node, joins, options, None, self._emitter)
        self._operator.time_bounds = [] if track_times else None
        self._first_mode = self._operator.mode
        self._last_rows = 0 if small_input else DIRECT_ROWS  # between the last two drains
        self._rows = 0
        self.row = 0  # the number of the next row that is added
        self._first_row = 0  # the number of the first row of the last `add`
        self._mode: GroupMode | None = None  # of the compiled kernel
        self._workers: list[AggregateWorker] = []
        self._partitions: RadixPartitions | None = None
        self._complete = None if complete is None else replace(complete, steps=node.steps)
        self._complete_table = node.table
        self._operator.prepared.sink = self._sink
        self._current_workers = options.workers

    def _sink(self, special: Specialiser) -> Group:
        if self._complete is not None:
            table, keys = self._complete.table, self._complete.keys
            self._complete_table, _ = specialised_table(table, keys, special, nullable=True)
        return self._operator.sink(special)

    def add(self, batches: Iterator[pa.RecordBatch], workers: int) -> None:
        """Aggregate the rows of batches; they are numbered from `row` on."""
        batches = self._count_rows(batches)
        self._current_workers, is_first, self._first_row = workers, not self._workers, self.row
        if is_first:
            batch = next(batches, None)
            if batch is None:
                return
            self._choose_mode(batch)
            batches = chain([batch], batches)
        while len(self._workers) < workers:
            self._workers.append(AggregateWorker(self._operator))
        morsels = cut_morsels(batches, workers, self._first_row)
        first = list(islice(morsels, workers))  # starting a thread is expensive: none without a morsel
        morsels, workers = chain(first, morsels), max(1, len(first))
        can_partition = is_first and self._complete is not None and self._operator.mode is GroupMode.HASH
        if can_partition and RadixPartitions.fits(self._operator):
            morsels = self._aggregate_sample(morsels)
        if self._partitions is not None:
            self._partitions.add(morsels, workers)
        else:
            run_workers(self._workers[:workers], morsels, schedule().assign)

    def _count_rows(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows:
                self._rows += batch.num_rows
                self.row += batch.num_rows
                yield batch

    def _aggregate_sample(self, morsels: Iterator[Morsel]) -> Iterator[Morsel]:
        """Aggregate a sample, to find out whether there are many groups; returns the morsels that are left."""
        first = self._workers[0]
        sample, rest = radix.aggregate_sample(first, morsels)
        if not radix.has_many_groups(first, sample, memory=None):
            return rest
        self._recycle(first)
        self._partitions = RadixPartitions(self._operator)
        return chain(sample, rest)

    def _choose_mode(self, first: pa.RecordBatch) -> None:
        """Choose how rows find their groups, by the first batch since the last drain."""
        operator = self._operator
        is_new = operator.prepared.observe(first)
        if is_new:
            operator.prepared.specialise()  # sets table and keys
            operator.spare_tables.clear()
        operator.mode, operator.domain = self._first_mode, None
        if operator.mode is GroupMode.HASH and self._last_rows >= DIRECT_ROWS:
            found = domain_of(operator.prepared, operator.table, operator.keys, [first])
            if found is not None:
                operator.mode, operator.domain = GroupMode.DIRECT, with_headroom(found, operator.table)
        if is_new or operator.mode is not self._mode:
            operator.prepared.compile()

    def time_bounds(self, batches: list[pa.RecordBatch]) -> list[tuple[int, int]] | None:
        """The least and the greatest time of each batch of the last `add`, if they are tracked and known."""
        observed, self._operator.time_bounds = self._operator.time_bounds or [], []
        found = [each for each in observed if each is not None]
        if len(found) < len(observed):
            return None
        ends = list(accumulate(batch.num_rows for batch in batches))
        least, greatest = [2**63 - 1] * len(ends), [-(2**63)] * len(ends)
        for row, low, high in found:
            position = bisect_right(ends, row - self._first_row)
            least[position], greatest[position] = min(low, least[position]), max(high, greatest[position])
        times = list(zip(least, greatest, strict=True))
        return times if all(low <= high for low, high in times) else None

    @property
    def count(self) -> int:
        """An upper bound of the groups in all tables: those of several workers may be the same."""
        return sum(state.count for worker in self._workers for state in worker.states)

    def drain(self) -> Iterator[pa.RecordBatch]:
        """Yield all groups and remove them."""
        if self._workers:
            yield from self._drain(self._emitter, self._operator.table)

    def drain_complete(self) -> Iterator[pa.RecordBatch]:
        """Yield all groups as those of `complete`, and remove them."""
        assert self._complete is not None
        if self._workers:
            yield from self._drain(Emitter(self._complete, None, {}, self._operator.options), self._complete_table)

    def _drain(self, emitter: Emitter, table: Table) -> Iterator[pa.RecordBatch]:
        operator = self._operator
        self._last_rows, self._rows = self._rows, 0
        first, *others = self._workers
        for other in others:
            first.states += other.states
        self._workers, self._mode = [], operator.mode
        if self._partitions is None:
            yield from emitter.emit(operator.prepared, table, first.merged())
            self._recycle(first)
            return
        partitions, self._partitions = self._partitions, None
        saved = operator.emitter, operator.table
        operator.emitter, operator.table = emitter, table  # the same records, read as other columns
        yield from partitions.groups(self._current_workers)
        operator.emitter, operator.table = saved

    def _recycle(self, worker: AggregateWorker) -> None:
        """Retain the tables for reuse: faulting in fresh memory is half the cost of a table."""
        for state in worker.states:
            if isinstance(state, HashTable) and state.side_state is None:
                state.clear()
                self._operator.spare_tables.append(state)

    @property
    def is_partitioned(self) -> bool:
        return self._partitions is not None

    @property
    def partitioned_bytes(self) -> int:
        """Bytes of the partitioned rows."""
        return 0 if self._partitions is None else self._partitions.bytes
