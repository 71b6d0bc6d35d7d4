"""Groups: batches into a table, then the table's groups out through whatever follows.

How rows reach their records is decided while running, and every decision can be taken back:

one      no keys: a record a worker, merged at the end
direct   keys and slices with small ranges: a table a worker, merged at the end; a key outside widens
         the ranges, or everything moves to a hash table
hash     a table a worker, merged at the end
radix    many groups: rows are partitioned by key group first, then each key group is aggregated and
         emitted on its own, in a table that fits the cache (`radix.py`)
ring     sliding windows over data that can be read again: see `ring.py`

Sliding windows otherwise aggregate by slice and merge slices into windows at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from scalein.exec import radix, ring
from scalein.exec.emit import Emitter
from scalein.exec.finalize import mode_of, shorten
from scalein.exec.join_build import JoinTable
from scalein.exec.key_domain import DIRECT_BYTES, domain_of, widened
from scalein.exec.morsels import Unit, units
from scalein.exec.schedule import schedule
from scalein.exec.tables import EVERYTHING, Blank, DirectTable, Domain, HashTable, Merging, OneRecord, State, grown
from scalein.ir.exprs import Expr
from scalein.ir.passes.pass_through import kernel_steps
from scalein.ir.physical import Pipeline, WindowAggregate
from scalein.ir.stages import Group, GroupMode
from scalein.ir.tables import Table
from scalein.kernels.call import call
from scalein.kernels.prepare import Prepared, specialised_table, table_exprs
from scalein.kernels.specialise import Specialiser
from scalein.kernels.workers import run_workers
from scalein.layout import DONE, OUT_OF_DOMAIN, FrameData
from scalein.llvm_backend.cache import Compiled
from scalein.options import Options

PART_VALUES = 1 << 23  # of the bags and logs of windows that are made at once


def group_run(node: WindowAggregate, joins: dict[int, JoinTable], options: Options, table: pa.Table | None,
              then: Pipeline | None, then_joins: dict[int, JoinTable]) -> GroupRun:
    """The aggregation of a node, whose groups pass through the pipe that follows, if any."""
    node = replace(node, steps=kernel_steps(node))
    return GroupRun(node, joins, options, table, Emitter(node, then, then_joins, options))


class Seen(NamedTuple):
    """Times of a unit, or of a part of it, that begins with a row."""

    first_row: int
    least: int
    greatest: int


class GroupRun:
    """An aggregation under way. Another may follow, over other data: kernels that were made stay."""

    def __init__(self, node: WindowAggregate, joins: dict[int, JoinTable], options: Options, source: pa.Table | None,
                 emitter: Emitter) -> None:
        self.node, self.options, self.source, self.emitter = node, options, source, emitter
        self._first_mode = GroupMode.ONE if not node.keys and node.table.window is None else GroupMode.HASH
        self.mode = self._first_mode
        self.table, self.keys = node.table, node.keys  # specialised when the kernel is
        exprs = (*node.keys, *table_exprs(node.table))
        self.prepared = Prepared("group", node.input.schema, node.steps, self.sink, exprs, joins, options)
        self.prepared.assume(source)
        self.lock = threading.RLock()  # over facts, kernels and the mode, which workers share
        self.domain: Domain | None = None
        self._blank: Blank | None = None
        self._mergings: dict[tuple[GroupMode, bool], Merging] = {}
        self._layouts: dict[Hashable, tuple[Table, tuple[Expr, ...]]] = {}  # table and keys, by what is known
        self.spare: list[HashTable] = []  # empty ones, to be used again
        # Of the units so far, if times are watched; None of a unit that could not be looked at.
        self.seen: list[Seen | None] | None = None

    def renew(self, source: pa.Table, options: Options) -> None:
        """Begin a run over other data."""
        self.source, self.options, self.mode = source, options, self._first_mode
        self.emitter.options = options
        self.prepared.renew(source)

    def release(self) -> None:
        """Let go of the data of a run that has ended, and of tables."""
        self.source, self.domain, self.spare = None, None, []
        self.prepared.release()

    def sink(self, special: Specialiser) -> Group:
        # Layout must not change between batches: nulls of keys and counts of values follow the whole
        # input's facts if they are known, else the schema.
        nullable = self.source is None
        self.table, self.keys = specialised_table(self.node.table, self.node.keys, special, nullable)
        self.prepared.key_exprs = self.keys
        return Group(self.table, self.keys, self.mode, watched=self.seen is not None)

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        first = next((b for b in batches if b.num_rows), None)
        if first is None:
            yield from self.emitter.nothing(self.mode is GroupMode.ONE)
            return
        rest = chain([first], (b for b in batches if b.num_rows))
        self.prepared.learn(first)
        self._lay_out()
        if self.mode is GroupMode.HASH:
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

    def _lay_out(self) -> None:
        """Set table and keys as the data wants them."""
        known = self._layouts.get(self.prepared.known_facts)
        if known is None:
            self.prepared.specialise()
            self._layouts = {self.prepared.known_facts: (self.table, self.keys)}
            return
        self.table, self.keys = known
        self.prepared.key_exprs = self.keys

    def compile(self) -> None:
        """The kernel for the mode and what is known of the data."""
        if self.source is None:
            self.prepared.compile()
            return
        self.prepared.compile_known(self.mode)
        assert self.prepared.stage is not None and isinstance(self.prepared.stage.sink, Group)  # noqa: PT018
        self.table, self.keys = self.prepared.stage.sink.table, self.prepared.stage.sink.keys
        self.prepared.key_exprs = self.keys

    # --- one, direct, hash

    def _aggregate(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        work = units(batches, self.options.workers)
        begun = list(islice(work, self.options.workers))  # a thread costs as much as many rows: none without work
        workers, work = [Worker(self) for _ in begun], chain(begun, work)
        if self.mode is GroupMode.HASH and radix.fits(self.table):
            tried, work = radix.try_some(workers[0], work)
            if radix.has_many_groups(workers[0], tried, self.options.memory is not None):
                yield from radix.run_radix(self, chain(tried, work))
                return
        run_workers(workers, work, schedule().assign)
        first = workers[0]
        for other in workers[1:]:
            first.states += other.states
        yield from self.emitter.emit(self.prepared, self.table, first.settled())

    def merging(self, mode: GroupMode, slide: bool = False) -> Merging:
        known = self._mergings.get((mode, slide))
        if known is None or known.table is not self.table:
            known = self._mergings[mode, slide] = Merging(self.table, mode, self.options, slide)
        return known

    def direct_table(self) -> DirectTable:
        """An empty one over the domain."""
        with self.lock:
            assert self.domain is not None
            if self._blank is None or not self._blank.fits(self.table, self.domain):
                self._blank = Blank(self.table, self.domain)
            return DirectTable(self._blank, self.domain, self.options)


class Worker:
    """A thread's own state. Usually one table; a direct one that grew too wide leaves a second."""

    def __init__(self, run: GroupRun) -> None:
        self._run = run
        self._prepared = run.prepared
        self.mode = run.mode
        self.states: list[State] = []
        self._state: State | None = None
        self._compiled: Compiled | None = None
        self._frame: FrameData | None = None

    def process(self, unit: Unit) -> None:
        """Count the rows of a unit in."""
        with self._run.lock:  # facts and kernels are shared by the workers
            if self._prepared.learn(unit.batch) or self._prepared.compiled is None:
                self._run.compile()
            compiled = self._prepared.compiled
            assert compiled is not None
            if self.mode is not self._run.mode:  # another worker has gone over to hashing
                self._go_over()
            if compiled is not self._compiled:
                self._compiled, self._frame = compiled, compiled.kernel.frame.new()
                self._prepared.attach_joins(self._frame)
            assert self._frame is not None
            self._prepared.bind(self._frame, unit.batch)
        frame = self._frame
        frame["first_row"] = unit.first_row
        frame["row"], frame["end"] = 0, unit.batch.num_rows
        frame["time.least"], frame["time.greatest"] = 2**63 - 1, -(2**63)
        while not self._step(compiled, frame, unit):
            pass
        if self._state is not None and self._state.sides is not None:
            shorten(self._run.table, self._state, replace(self._run.options, workers=1))

    def _step(self, compiled: Compiled, frame: FrameData, unit: Unit) -> bool:
        """One call; true when the unit is done."""
        state = self._new_state()
        state.attach(frame)
        status = call(compiled, frame)
        state.detach(frame)
        if self._run.seen is not None:
            self._run.seen.append(Seen(unit.first_row, frame["time.least"], frame["time.greatest"])
                                  if "time.least" in frame else None)
        if status == DONE:
            return True
        if status == OUT_OF_DOMAIN:
            rest = Unit(unit.batch.slice(frame["row"]), unit.first_row + frame["row"])
            self._leave_domain(rest)
            self.process(rest)
            return True
        grown(state, status, frame)
        return False

    def _new_state(self) -> State:
        if self._state is None:
            table = self._run.table
            match self.mode:
                case GroupMode.ONE:
                    self._state = OneRecord(table, self._run.options)
                case GroupMode.DIRECT:
                    self._state = self._run.direct_table()
                case GroupMode.HASH:
                    self._state = self._hash_table()
            self.states.append(self._state)
        return self._state

    def _hash_table(self) -> HashTable:
        with suppress(IndexError):
            return self._run.spare.pop()
        return HashTable(self._run.table, self._run.options)

    def _leave_domain(self, unit: Unit) -> None:
        """A key outside the direct table: widen it if it stays small, else hash from here on."""
        run = self._run
        with run.lock:
            state = self._state
            assert isinstance(state, DirectTable)
            seen = domain_of(self._prepared, run.table, run.keys, [unit.batch], whole=True)
            if seen is not None:
                wider = widened(state.domain, seen)
                if wider.size * run.table.layout.size <= DIRECT_BYTES:
                    run.domain, self._state = wider, None
                    return
            run.mode = GroupMode.HASH
            self._go_over()
            run.compile()

    def _go_over(self) -> None:
        self.mode = self._run.mode
        self._state = None
        self._compiled = None

    def settled(self) -> Iterator[State]:
        """States with everything in them: one, or, if the table's windows slide, some windows each."""
        run = self._run
        table = run.table
        slides = table.window is not None and not table.window.is_tumbling
        if not self.states:
            self._new_state()
        joined, *others = self.states
        if others:
            mode = mode_of(joined)
            if isinstance(joined, DirectTable) and not all(_is_alike(joined, other) for other in others):
                joined, others, mode = HashTable(table, run.options), self.states, GroupMode.HASH
            merging = run.merging(mode)
            for state in others:
                merging.into(joined, state)
        if not slides:
            yield joined
            return
        assert table.window is not None
        shorten(table, joined, replace(run.options, workers=1), at_once=True)
        sliding = run.merging(GroupMode.HASH, slide=True)
        ranges = _ranges(table, joined)
        for first, last in ranges:
            part = joined
            if len(ranges) > 1:  # each range looks at its own slices often, and at the others once
                part = HashTable(table, run.options)
                end = min(last + table.window.size // table.slice_size, EVERYTHING[1])
                run.merging(GroupMode.HASH).into(part, joined, within=(first, end))
            windows = HashTable(table, run.options)
            for back in range(-(-table.window.size // table.window.every)):
                sliding.into(windows, part, back, within=(first, last))
            yield windows


def _is_alike(table: DirectTable, other: State) -> bool:
    """Whether a key has the same place in both."""
    return isinstance(other, DirectTable) and other.domain.is_same(table.domain)


def _ranges(table: Table, state: State) -> list[tuple[int, int]]:
    """Ranges of windows that are made and emitted one after the other.

    Values in bags and logs are copied into every window that holds them: of all windows at once, that may be more than
    there is room for.
    """
    assert table.window is not None
    if not table.has_sides or state.sides is None:
        return [EVERYTHING]
    values = sum(bag.count for bag in state.sides.bags) + sum(log.count for log in state.sides.logs)
    parts = -(-values * -(-table.window.size // table.window.every) // PART_VALUES)
    layout = table.layout
    words = state.words(layout.size // 8)
    slices = np.sort(words[words[:, layout.offset("acc0") // 8] > 0, layout.offset("slice") // 8])
    borders = np.unique(slices[np.arange(1, parts) * len(slices) // parts]).tolist() if len(slices) else []
    return list(zip([EVERYTHING[0], *borders], [*(border - 1 for border in borders), EVERYTHING[1]], strict=True))
