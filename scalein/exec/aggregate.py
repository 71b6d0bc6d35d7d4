"""Hash aggregation: batches into a table of groups, then the groups out through the downstream pipeline.

How rows find their groups is decided at run time, and every decision can be revised:

one      no keys: a record per worker, merged at the end
direct   keys and slices with small ranges: an array per worker, merged at the end; a key outside widens
         the ranges, or switches to a hash table
hash     a hash table per worker, merged at the end
radix    many groups, or a memory limit: rows are partitioned by key group first, then each key group is aggregated and
         emitted on its own, in a table that fits the cache (`radix.py`); rows beyond the limit are spilled
parts    under a memory limit, groups with text, lists, quantiles or distinct values (`partitioned_aggregate.py`)
ring     sliding windows over data that can be read twice (`ring.py`)

Sliding windows otherwise aggregate by slice and merge slices into windows at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from scalein.exec import partitioned_aggregate, radix, ring
from scalein.exec.direct_addressing import DIRECT_BYTES, domain_of, widened
from scalein.exec.emit import Emitter
from scalein.exec.finalize import compact_logs, mode_of
from scalein.exec.morsels import Morsel, cut_morsels
from scalein.exec.schedule import schedule
from scalein.exec.tables import (
    EVERYTHING,
    DirectTable,
    DirectTemplate,
    Domain,
    HashTable,
    MergeKernels,
    OneRecord,
    State,
    handle_full,
)
from scalein.ir.exprs import Expr
from scalein.ir.passes.pass_through import kernel_steps
from scalein.ir.physical import Pipeline, WindowAggregate
from scalein.ir.stages import Group, GroupMode
from scalein.ir.tables import Slicing, Table
from scalein.kernels.call import call
from scalein.kernels.prepare import Prepared, specialised_table, table_exprs
from scalein.kernels.specialise import Specialiser
from scalein.kernels.workers import run_workers
from scalein.layout import DONE, OUT_OF_DOMAIN, FrameData
from scalein.llvm_backend.cache import Compiled
from scalein.memory import MemoryAccount
from scalein.options import Options

if TYPE_CHECKING:
    from scalein.exec.join_build import JoinTable

PART_VALUES = 1 << 23  # values in bags and logs of the windows that are built at once


def hash_aggregate(node: WindowAggregate, joins: dict[int, JoinTable], options: Options, table: pa.Table | None,
                   downstream: Pipeline | None, downstream_joins: dict[int, JoinTable],
                   account: MemoryAccount) -> HashAggregate:
    """The aggregation of a node, whose groups pass through the downstream pipeline, if any."""
    node = replace(node, steps=kernel_steps(node))
    emitter = Emitter(node, downstream, downstream_joins, options)
    return HashAggregate(node, joins, options, table, emitter, account)


class TimeBounds(NamedTuple):
    """The least and the greatest time of a morsel, or of a part of it."""

    first_row: int
    least: int
    greatest: int


class HashAggregate:
    """The operator of one aggregation. It can be reused over other data (`reset`); compiled kernels are retained."""

    def __init__(self, node: WindowAggregate, joins: dict[int, JoinTable], options: Options, source: pa.Table | None,
                 emitter: Emitter, account: MemoryAccount | None = None) -> None:
        self.node, self.options, self.source, self.emitter = node, options, source, emitter
        self.joins, self.account = joins, account or MemoryAccount(options.memory)
        self._first_mode = GroupMode.ONE if not node.keys and node.table.window is None else GroupMode.HASH
        self.mode = self._first_mode
        self.table, self.keys = node.table, node.keys  # specialised together with the kernel
        exprs = (*node.keys, *table_exprs(node.table))
        self.prepared = Prepared("group", node.input.schema, node.steps, self.sink, exprs, joins, options)
        self.prepared.observe_table(source)
        self.lock = threading.RLock()  # guards input facts, kernels and the mode, which workers share
        self.domain: Domain | None = None
        self._template: DirectTemplate | None = None
        self._merge_kernels: dict[tuple[GroupMode, bool], MergeKernels] = {}
        self._layouts: dict[Hashable, tuple[Table, tuple[Expr, ...]]] = {}  # table and keys, by input facts
        self.spare_tables: list[HashTable] = []  # empty, for reuse
        # Of the morsels so far, if times are tracked; None for a morsel whose times are unknown.
        self.time_bounds: list[TimeBounds | None] | None = None

    def reset(self, source: pa.Table, options: Options, account: MemoryAccount) -> None:
        """Start a run over other data."""
        self.source, self.options, self.mode, self.account = source, options, self._first_mode, account
        self.emitter.options = options
        self.prepared.reset(source)

    def release(self) -> None:
        """Drop references to the data and the tables of a run that has ended."""
        self.source, self.domain, self.spare_tables = None, None, []
        self.prepared.release()

    def sink(self, special: Specialiser) -> Group:
        # The layout must not change between batches: null bits of keys and counts of values follow the facts of the
        # whole input if they are known, else the schema.
        nullable = self.source is None
        self.table, self.keys = specialised_table(self.node.table, self.node.keys, special, nullable)
        self.prepared.key_exprs = self.keys
        return Group(self.table, self.keys, self.mode, watched=self.time_bounds is not None)

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        first = next((b for b in batches if b.num_rows), None)
        if first is None:
            yield from self.emitter.empty_result(self.mode is GroupMode.ONE)
            return
        rest = chain([first], (b for b in batches if b.num_rows))
        if self.node.table.needs_two_passes and not self._may_spill:
            from scalein.exec.session_rows import run_in_two_passes  # few flows have sessions

            yield from run_in_two_passes(self, rest)
            return
        if self._may_spill and partitioned_aggregate.must_be_whole(self.node.table):
            yield from partitioned_aggregate.run_partitioned(self, rest)
            return
        self.prepared.observe(first)
        self._lay_out()
        # Distinct values may be many even if keys are few: then their number in a sample decides.
        if self.mode is GroupMode.HASH and not (self._may_spill and self.node.table.bags):
            sample = self.source.to_batches() if self.source is not None else [first]
            domain = domain_of(self.prepared, self.table, self.keys, [b for b in sample if b.num_rows])
            if domain is not None:
                self.mode = GroupMode.DIRECT
                self.domain = domain
            elif ring.fits(self.table) and self.source is not None:
                found = ring.run_ring(self, self.source)
                if found is not None:
                    yield from found
                    return
        yield from self._aggregate(rest)

    @property
    def _may_spill(self) -> bool:
        """Whether rows are partitioned and spilled if groups become too large; those of fixed size go to `radix`."""
        if self.options.memory is None:
            return False
        if not self.node.keys:
            return self.node.table.window is None and partitioned_aggregate.has_quantiles(self.node.table)
        is_fixed = not partitioned_aggregate.holds_more_than_records(self.node.table, self.node.keys)
        return not (is_fixed and radix.fits(self.node.table))

    def _lay_out(self) -> None:
        """Set table and keys for the input facts."""
        known = self._layouts.get(self.prepared.facts_key)
        if known is None:
            self.prepared.specialise()
            self._layouts = {self.prepared.facts_key: (self.table, self.keys)}
            return
        self.table, self.keys = known
        self.prepared.key_exprs = self.keys

    def compile(self) -> None:
        """Compile the kernel for the mode and the input facts."""
        if self.source is None:
            self.prepared.compile()
            return
        self.prepared.compile_known(self.mode)
        assert self.prepared.stage is not None and isinstance(self.prepared.stage.sink, Group)  # noqa: PT018
        self.table, self.keys = self.prepared.stage.sink.table, self.prepared.stage.sink.keys
        self.prepared.key_exprs = self.keys

    # --- one, direct, hash

    def _aggregate(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        morsels = cut_morsels(batches, self.options.workers)
        first = list(islice(morsels, self.options.workers))  # starting a thread is expensive: none without a morsel
        workers, morsels = [AggregateWorker(self) for _ in first], chain(first, morsels)
        if self.mode is GroupMode.HASH and (self._may_spill or radix.fits(self.table)):
            sample, morsels = radix.aggregate_sample(workers[0], morsels, self.options.memory)
            if radix.has_many_groups(workers[0], sample, self.options.memory):
                every = chain(sample, morsels)
                if not self._may_spill:
                    yield from radix.run_radix(self, every)
                    return
                workers.clear()
                yield from partitioned_aggregate.run_partitioned(self, (morsel.batch for morsel in every))
                return
        run_workers(workers, morsels, schedule().assign)
        leader = workers[0]
        for other in workers[1:]:
            leader.states += other.states
        yield from self.emitter.emit(self.prepared, self.table, leader.merged())

    def merge_kernels(self, mode: GroupMode, slide: bool = False) -> MergeKernels:
        known = self._merge_kernels.get((mode, slide))
        if known is None or known.table is not self.table:
            known = self._merge_kernels[mode, slide] = MergeKernels(self.table, mode, self.options, slide)
        return known

    def in_sessions(self, state: State) -> State:
        """The state without sessions that are still in several parts."""
        if self.table.slicing is not Slicing.SESSION:
            return state
        return self.merge_kernels(GroupMode.HASH).in_sessions(state)

    def direct_table(self) -> DirectTable:
        """An empty direct table over the domain."""
        with self.lock:
            assert self.domain is not None
            if self._template is None or not self._template.fits(self.table, self.domain):
                self._template = DirectTemplate(self.table, self.domain)
            return DirectTable(self._template, self.domain, self.options)


class AggregateWorker:
    """The state of one worker thread: usually one table; a direct table whose range became too wide adds a second."""

    def __init__(self, operator: HashAggregate) -> None:
        self._operator = operator
        self._prepared = operator.prepared
        self.mode = operator.mode
        self.states: list[State] = []
        self._state: State | None = None
        self._compiled: Compiled | None = None
        self._frame: FrameData | None = None

    def process(self, morsel: Morsel) -> None:
        """Aggregate the rows of a morsel."""
        with self._operator.lock:  # input facts and kernels are shared by the workers
            if self._prepared.observe(morsel.batch) or self._prepared.compiled is None:
                self._operator.compile()
            compiled = self._prepared.compiled
            assert compiled is not None
            if self.mode is not self._operator.mode:  # another worker has switched to hashing
                self._switch_mode()
            if compiled is not self._compiled:
                self._compiled, self._frame = compiled, compiled.kernel.frame.new()
                self._prepared.attach_joins(self._frame)
            assert self._frame is not None
            self._prepared.bind(self._frame, morsel.batch)
        frame = self._frame
        frame["first_row"] = morsel.first_row
        frame["row"], frame["end"] = 0, morsel.batch.num_rows
        frame["time.least"], frame["time.greatest"] = 2**63 - 1, -(2**63)
        while not self._step(compiled, frame, morsel):
            pass
        if self._state is not None and self._state.side_state is not None:
            compact_logs(self._operator.table, self._state, replace(self._operator.options, workers=1))

    def _step(self, compiled: Compiled, frame: FrameData, morsel: Morsel) -> bool:
        """One call of the kernel; true when the morsel is done."""
        state = self._new_state()
        state.attach(frame)
        status = call(compiled, frame)
        state.detach(frame)
        if self._operator.time_bounds is not None:
            self._operator.time_bounds.append(TimeBounds(morsel.first_row, frame["time.least"], frame["time.greatest"])
                                  if "time.least" in frame else None)
        if status == DONE:
            return True
        if status == OUT_OF_DOMAIN:
            rest = Morsel(morsel.batch.slice(frame["row"]), morsel.first_row + frame["row"])
            self._leave_domain(rest)
            self.process(rest)
            return True
        handle_full(state, status, frame)
        return False

    def _new_state(self) -> State:
        if self._state is None:
            table = self._operator.table
            match self.mode:
                case GroupMode.ONE:
                    self._state = OneRecord(table, self._operator.options)
                case GroupMode.DIRECT:
                    self._state = self._operator.direct_table()
                case GroupMode.HASH:
                    self._state = self._hash_table()
            self.states.append(self._state)
        return self._state

    def _hash_table(self) -> HashTable:
        with suppress(IndexError):
            return self._operator.spare_tables.pop()
        return HashTable(self._operator.table, self._operator.options)

    def _leave_domain(self, morsel: Morsel) -> None:
        """Handle a key outside the direct table: widen it if it stays small, else switch to hashing."""
        operator = self._operator
        with operator.lock:
            state = self._state
            assert isinstance(state, DirectTable)
            found = domain_of(self._prepared, operator.table, operator.keys, [morsel.batch], scan_all=True)
            if found is not None:
                wider = widened(state.domain, found)
                if wider.size * operator.table.layout.size <= DIRECT_BYTES:
                    operator.domain, self._state = wider, None
                    return
            operator.mode = GroupMode.HASH
            self._switch_mode()
            operator.compile()

    def _switch_mode(self) -> None:
        self.mode = self._operator.mode
        self._state = None
        self._compiled = None

    def merged(self) -> Iterator[State]:
        """Merge all states: yields one, or, for sliding windows, one for each range of windows."""
        operator = self._operator
        table = operator.table
        slides = table.window is not None and not table.window.is_tumbling
        if not self.states:
            self._new_state()
        target, *others = self.states
        if others:
            mode = mode_of(target)
            if isinstance(target, DirectTable) and not all(_has_same_positions(target, other) for other in others):
                target, others, mode = HashTable(table, operator.options), self.states, GroupMode.HASH
            merge_kernels = operator.merge_kernels(mode)
            for state in others:
                merge_kernels.into(target, state)
        if not slides:
            yield operator.in_sessions(target)
            return
        assert table.window is not None
        compact_logs(table, target, replace(operator.options, workers=1), at_once=True)
        sliding = operator.merge_kernels(GroupMode.HASH, slide=True)
        ranges = _ranges(table, target)
        for first, last in ranges:
            part = target
            if len(ranges) > 1:  # each range scans its own slices often, and the others once
                part = HashTable(table, operator.options)
                slices = table.window_slices  # a window has slices before or after the one that it is known by
                within = max(first - slices, EVERYTHING[0]), min(last + slices, EVERYTHING[1])
                operator.merge_kernels(GroupMode.HASH).into(part, target, within=within)
            windows = HashTable(table, operator.options)
            for back in range(table.window.windows_per_row):
                sliding.into(windows, part, back, within=(first, last))
            yield windows


def _has_same_positions(table: DirectTable, other: State) -> bool:
    """Whether a key has the same position in both."""
    return isinstance(other, DirectTable) and other.domain.has_same_positions(table.domain)


def _ranges(table: Table, state: State) -> list[tuple[int, int]]:
    """Ranges of windows that are built and emitted one after the other.

    Values in bags and logs are copied into every window that contains them: for all windows at once, that may exceed
    memory.
    """
    assert table.window is not None
    if not table.has_sides or state.side_state is None:
        return [EVERYTHING]
    values = sum(bag.count for bag in state.side_state.bags) + sum(log.count for log in state.side_state.logs)
    parts = -(-values * table.window.windows_per_row // PART_VALUES)
    layout = table.layout
    words = state.words(layout.size // 8)
    slices = np.sort(words[words[:, layout.offset("acc0") // 8] > 0, layout.offset("slice") // 8])
    borders = np.unique(slices[np.arange(1, parts) * len(slices) // parts]).tolist() if len(slices) else []
    return list(zip([EVERYTHING[0], *borders], [*(border - 1 for border in borders), EVERYTHING[1]], strict=True))
