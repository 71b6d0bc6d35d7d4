"""An aggregation that goes on: rows in, again and again, and now and then all groups out.

Kernels and workers' tables stay between calls, so that a few rows cost little. Which worker a row goes to does not
matter, nor how many there are: their tables are merged when the groups are taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import numpy as np
import pyarrow as pa

from scalein.ir.handed_on import kernel_steps
from scalein.ir.nodes import Grouped, Pipe
from scalein.ir.stages import GroupMode
from scalein.options import Options
from scalein.runtime.domain import domain_of, with_room
from scalein.runtime.emit import Emitter
from scalein.runtime.group import GroupRun, Worker
from scalein.runtime.joins import Built
from scalein.runtime.tables import HashTable
from scalein.runtime.units import units
from scalein.runtime.workers import each_worker


class Standing:
    """The groups of a node since they were taken last, passed through the pipe that follows, if any."""

    def __init__(self, node: Grouped, joins: dict[int, Built], options: Options, then: Pipe | None = None,
                 then_joins: dict[int, Built] | None = None, watched: bool = False, few: bool = False) -> None:
        node = replace(node, steps=kernel_steps(node))
        self._emitter = Emitter(node, then, then_joins or {}, options)
        self._run = GroupRun(node, joins, options, None, self._emitter)
        self._run.seen = [] if watched else None
        self._first_mode = self._run.mode
        self._may_be_direct = not few  # rows at a time: making such a table would take longer
        self._mode: GroupMode | None = None  # that the kernel at hand is for
        self._workers: list[Worker] = []

    def add(self, batches: Iterator[pa.RecordBatch], workers: int) -> None:
        """Count the rows of batches in."""
        batches = (batch for batch in batches if batch.num_rows)
        if not self._workers:
            first = next(batches, None)
            if first is None:
                return
            self._begin(first)
            batches = chain([first], batches)
        while len(self._workers) < workers:
            self._workers.append(Worker(self._run))
        each_worker(self._workers[:workers], units(batches, workers))

    def _begin(self, first: pa.RecordBatch) -> None:
        """Decide how rows find their groups, from the first batch since groups were taken."""
        run = self._run
        has_news = run.prepared.learn(first)
        if has_news:
            run.prepared.specialise()  # sets table and keys
            run.spare.clear()
        run.mode, run.domain = self._first_mode, None
        if run.mode is GroupMode.HASH and self._may_be_direct:
            found = domain_of(run.prepared, run.table, run.keys, [first])
            if found is not None:
                run.mode, run.domain = GroupMode.DIRECT, with_room(found, run.table)
        if has_news or run.mode is not self._mode:
            run.prepared.compile()

    def seen(self, batches: list[pa.RecordBatch]) -> list[tuple[int, int]] | None:
        """How far the times of each batch of the last `add` reach, if they are watched and could be."""
        found, self._run.seen = self._run.seen or [], []
        ends = np.cumsum([batch.num_rows for batch in batches])
        least, greatest = np.full(len(ends), 2**63 - 1), np.full(len(ends), -(2**63))
        places = np.searchsorted(ends, [each.first_row for each in found], side="right")
        for place, each in zip(places, found, strict=True):
            least[place] = min(each.least, least[place])
            greatest[place] = max(each.greatest, greatest[place])
        return list(zip(least.tolist(), greatest.tolist(), strict=True)) if np.all(least <= greatest) else None

    @property
    def count(self) -> int:
        """Groups in all tables, at most: those of several workers may be the same."""
        return sum(state.count for worker in self._workers for state in worker.states)

    def take(self) -> Iterator[pa.RecordBatch]:
        """All groups, once."""
        if not self._workers:
            return
        first, *others = self._workers
        for other in others:
            first.states += other.states
        self._workers, self._mode = [], self._run.mode
        yield from self._emitter.emit(self._run.prepared, self._run.table, first.settled())
        for state in first.states:  # memory that was touched before is half the cost of a table
            if isinstance(state, HashTable) and state.sides is None:
                state.clear()
                self._run.spare.append(state)
