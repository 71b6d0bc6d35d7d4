"""An aggregation that goes on: rows in, again and again, and now and then all groups out.

Kernels and workers' tables stay between calls, so that a few rows cost little. Which worker a row goes to does not
matter, nor how many there are: their tables are merged when the groups are taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import pyarrow as pa

from scalein.ir.handed_on import kernel_steps
from scalein.ir.nodes import Grouped
from scalein.ir.stages import GroupMode
from scalein.options import Options
from scalein.runtime.domain import domain_of
from scalein.runtime.emit import Emitter
from scalein.runtime.group import GroupRun, Worker
from scalein.runtime.joins import Built
from scalein.runtime.units import units
from scalein.runtime.workers import each_worker


class Standing:
    """The groups of a node since they were taken last."""

    def __init__(self, node: Grouped, joins: dict[int, Built], options: Options) -> None:
        node = replace(node, steps=kernel_steps(node))
        self._emitter = Emitter(node, None, {}, options)
        self._run = GroupRun(node, joins, options, None, self._emitter)
        self._first_mode = self._run.mode
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
        run.mode = self._first_mode
        run.prepared.learn(first)
        run.prepared.specialise()  # sets table and keys
        run.domain = domain_of(run.prepared, run.table, run.keys, [first]) if run.mode is GroupMode.HASH else None
        if run.domain is not None:
            run.mode = GroupMode.DIRECT
        run.prepared.compile()

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
        self._workers = []
        yield from self._emitter.emit(self._run.prepared, self._run.table, first.settled())
