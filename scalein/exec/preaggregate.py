"""An aggregation that goes on: rows in, again and again, and now and then all groups out.

Kernels and workers' tables stay between calls, so that a few rows cost little. Which worker a row goes to does not
matter, nor how many there are: their tables are merged when the groups are taken. Where groups are nearly as many as
rows, and the caller allows it, rows are partitioned by key group instead and aggregated when groups are taken, as in a
bounded run (`radix.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, chain, islice

import pyarrow as pa

from scalein.exec import radix
from scalein.exec.emit import Emitter
from scalein.exec.hash_aggregate import GroupRun, Worker
from scalein.exec.join_build import JoinTable
from scalein.exec.key_domain import domain_of, with_room
from scalein.exec.morsels import Unit, units
from scalein.exec.radix import Parted
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

DIRECT_ROWS = 1 << 17  # for which a direct table pays: it is made anew each time, a hash table only cleared


class Standing:
    """The groups of a node since they were taken last, passed through the pipe that follows, if any."""

    def __init__(self, node: WindowAggregate, joins: dict[int, JoinTable], options: Options,
                 then: Pipeline | None = None, then_joins: dict[int, JoinTable] | None = None,
                 watched: bool = False, few: bool = False, whole: WindowAggregate | None = None) -> None:
        """With `whole`, an aggregation by the same accumulators, groups can be taken as its own; then rows may be
        partitioned."""
        node = replace(node, steps=kernel_steps(node))
        self._emitter = Emitter(node, then, then_joins or {}, options)
        self._run = GroupRun(node, joins, options, None, self._emitter)
        self._run.seen = [] if watched else None
        self._first_mode = self._run.mode
        self._last_rows = 0 if few else DIRECT_ROWS  # between the last two times that groups were taken
        self._rows = 0
        self.row = 0  # the number of the next row that is added
        self._before = 0  # of the first row of the last `add`
        self._mode: GroupMode | None = None  # that the kernel at hand is for
        self._workers: list[Worker] = []
        self._parted: Parted | None = None
        self._whole = None if whole is None else replace(whole, steps=node.steps)
        self._whole_table = node.table
        self._run.prepared.sink = self._sink
        self._now = options.workers

    def _sink(self, special: Specialiser) -> Group:
        if self._whole is not None:
            self._whole_table, _ = specialised_table(self._whole.table, self._whole.keys, special, nullable=True)
        return self._run.sink(special)

    def add(self, batches: Iterator[pa.RecordBatch], workers: int) -> None:
        """Count the rows of batches in; they are numbered from `row` on."""
        batches = self._counted(batches)
        self._now, is_begin, self._before = workers, not self._workers, self.row
        if is_begin:
            first = next(batches, None)
            if first is None:
                return
            self._begin(first)
            batches = chain([first], batches)
        while len(self._workers) < workers:
            self._workers.append(Worker(self._run))
        work = units(batches, workers, self._before)
        begun = list(islice(work, workers))  # a thread costs as much as many rows: none without work
        work, workers = chain(begun, work), max(1, len(begun))
        if is_begin and self._whole is not None and self._run.mode is GroupMode.HASH and Parted.fits(self._run):
            work = self._tried(work)
        if self._parted is not None:
            self._parted.add(work, workers)
        else:
            run_workers(self._workers[:workers], work, schedule().assign)

    def _counted(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows:
                self._rows += batch.num_rows
                self.row += batch.num_rows
                yield batch

    def _tried(self, work: Iterator[Unit]) -> Iterator[Unit]:
        """Aggregate the first rows, to see whether groups are many; gives the work that is left."""
        first = self._workers[0]
        tried, rest = radix.try_some(first, work)
        if not radix.has_many_groups(first, tried, is_limited=False):
            return rest
        self._forget(first)
        self._parted = Parted(self._run)
        return chain(tried, rest)

    def _begin(self, first: pa.RecordBatch) -> None:
        """Decide how rows find their groups, from the first batch since groups were taken."""
        run = self._run
        has_news = run.prepared.learn(first)
        if has_news:
            run.prepared.specialise()  # sets table and keys
            run.spare.clear()
        run.mode, run.domain = self._first_mode, None
        if run.mode is GroupMode.HASH and self._last_rows >= DIRECT_ROWS:
            found = domain_of(run.prepared, run.table, run.keys, [first])
            if found is not None:
                run.mode, run.domain = GroupMode.DIRECT, with_room(found, run.table)
        if has_news or run.mode is not self._mode:
            run.prepared.compile()

    def seen(self, batches: list[pa.RecordBatch]) -> list[tuple[int, int]] | None:
        """How far the times of each batch of the last `add` reach, if they are watched and could be."""
        told, self._run.seen = self._run.seen or [], []
        found = [each for each in told if each is not None]
        if len(found) < len(told):
            return None
        ends = list(accumulate(batch.num_rows for batch in batches))
        least, greatest = [2**63 - 1] * len(ends), [-(2**63)] * len(ends)
        for row, low, high in found:
            place = bisect_right(ends, row - self._before)
            least[place], greatest[place] = min(low, least[place]), max(high, greatest[place])
        times = list(zip(least, greatest, strict=True))
        return times if all(low <= high for low, high in times) else None

    @property
    def count(self) -> int:
        """Groups in all tables, at most: those of several workers may be the same."""
        return sum(state.count for worker in self._workers for state in worker.states)

    def take(self) -> Iterator[pa.RecordBatch]:
        """All groups, once."""
        if self._workers:
            yield from self._take(self._emitter, self._run.table)

    def take_whole(self) -> Iterator[pa.RecordBatch]:
        """All groups, once, as those of `whole`."""
        assert self._whole is not None
        if self._workers:
            yield from self._take(Emitter(self._whole, None, {}, self._run.options), self._whole_table)

    def _take(self, emitter: Emitter, table: Table) -> Iterator[pa.RecordBatch]:
        run = self._run
        self._last_rows, self._rows = self._rows, 0
        first, *others = self._workers
        for other in others:
            first.states += other.states
        self._workers, self._mode = [], run.mode
        if self._parted is None:
            yield from emitter.emit(run.prepared, table, first.settled())
            self._forget(first)
            return
        parted, self._parted = self._parted, None
        usual = run.emitter, run.table
        run.emitter, run.table = emitter, table  # records are the same, what is read of them is not
        yield from parted.groups(self._now)
        run.emitter, run.table = usual

    def _forget(self, worker: Worker) -> None:
        """Keep the tables for later: memory that was touched before is half the cost of one."""
        for state in worker.states:
            if isinstance(state, HashTable) and state.sides is None:
                state.clear()
                self._run.spare.append(state)

    @property
    def is_parted(self) -> bool:
        return self._parted is not None

    @property
    def part_bytes(self) -> int:
        """Of rows that are partitioned."""
        return 0 if self._parted is None else self._parted.bytes
