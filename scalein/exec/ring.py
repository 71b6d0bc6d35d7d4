"""Ring: sliding windows with a ring of slices in each key's record; one probe per row.

A window is emitted, by a scan over the records, when a row is newer than the ring: the ring holds the slices of the
oldest window not yet emitted, and `open` slices that rows may still belong to. With several workers, each owns some key
groups and skips the rows of the others.

A row older than the open slices would belong to windows already emitted. Only data far out of order has such rows; then
the run is abandoned and repeated by slice (`aggregate.py`), which accepts any order. So a ring is used only where
the input can be read twice, and nothing is emitted downstream before the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from scalein.exec.direct_addressing import MAX_SLICE
from scalein.exec.morsels import coalesce, cut_morsels
from scalein.exec.tables import HashTable, handle_full
from scalein.ir.stages import Group, GroupMode
from scalein.ir.tables import Slicing, Table
from scalein.kernels.call import call
from scalein.kernels.output import Collector
from scalein.kernels.prepare import Prepared, specialised_table, table_exprs
from scalein.kernels.specialise import Specialiser
from scalein.kernels.workers import run_parallel
from scalein.layout import DONE, RING_ADVANCE, FrameData
from scalein.llvm_backend.cache import Compiled

if TYPE_CHECKING:
    from scalein.exec.aggregate import HashAggregate

MAX_WINDOW_SLICES = 16  # of a window; with more of them a record would not fit a few cache lines
OPEN_SLICES = 4  # minimum; how far out of order rows may be


def fits(table: Table) -> bool:
    """Whether a table has sliding windows of few enough slices, and its records have no side state."""
    window = table.window
    if table.has_sides or table.has_heap or window is None or window.cumulates:
        return False
    return bool(table.keys) and not window.is_tumbling and (
        table.window_slices <= MAX_WINDOW_SLICES)


def run_ring(run: HashAggregate, source: pa.Table) -> Iterator[pa.RecordBatch] | None:
    """The windows of a table in memory; None if its rows are too far out of order."""
    slices = run.table.window_slices
    size = 1 << (slices + OPEN_SLICES - 2).bit_length()
    node = replace(run.node, table=replace(run.node.table, slicing=Slicing.RING, ring=size))
    workers = run.options.workers
    found: list[Table] = []

    def sink(special: Specialiser) -> Group:
        table, keys = specialised_table(node.table, node.keys, special, nullable=False)
        found[:] = [table]
        prepared.key_exprs = keys
        return Group(table, keys, GroupMode.HASH, owned=workers > 1)

    exprs = (*node.keys, *table_exprs(node.table))
    prepared = Prepared("ring", node.input.schema, node.steps, sink, exprs, run.prepared.joins, run.options)
    prepared.facts = dict(run.prepared.facts)
    compiled = prepared.compile()
    rings = [_Ring(run, prepared, compiled, found[0], worker) for worker in range(workers)]
    run_parallel([partial(ring.run, source) for ring in rings])
    if any(ring.gave_up for ring in rings):
        return None
    chunks = [arrays for ring in rings for arrays in ring.chunks]
    batches = (run.emitter.batch(arrays, prepared, found[0]) for arrays in chunks)
    return run.emitter.after(batches, found[0])


class _Ring:
    """The table of one worker, whose records hold rings. Slices have the numbers of `Table.slice_of`."""

    def __init__(self, run: HashAggregate, prepared: Prepared, compiled: Compiled, table: Table, worker: int) -> None:
        self._run, self._prepared, self._compiled, self._table = run, prepared, compiled, table
        self._slices = table.window_slices  # of a window
        self._step = table.window_step
        self._width = table.ring - self._slices + 1  # open slices
        self._open: int | None = None  # first slice that rows may still belong to
        self._records = HashTable(table, run.options)
        self._frame = compiled.kernel.frame.new()
        self._frame["owner.workers"], self._frame["owner.worker"] = run.options.workers, worker
        prepared.attach_joins(self._frame)
        emit, items = run.emitter.kernel(table, self._slices)
        self._out = Collector(emit, emit.kernel.frame.new(), items, 1 << 20)
        self.chunks: list[list[pa.Array]] = []
        self.gave_up = False

    def run(self, source: pa.Table) -> None:
        frame = self._frame
        frame["ring.open"], frame["ring.limit"] = 0, -(1 << 62)
        for morsel in cut_morsels(coalesce(b for b in source.to_batches() if b.num_rows), 1):
            with self._run.lock:
                self._prepared.bind(frame, morsel.batch)
            frame["first_row"] = morsel.first_row
            frame["row"], frame["end"] = 0, morsel.batch.num_rows
            while (status := self._call(frame)) != DONE:
                if status == RING_ADVANCE:
                    if not self._advance(frame["ring.least"], frame["ring.greatest"]):
                        self.gave_up = True
                        return
                else:
                    handle_full(self._records, status, frame)
        if self._open is not None:
            self._emit_until(self._open + self._width + self._slices)
        self.chunks.append(self._out.finish())

    def _call(self, frame: FrameData) -> int:
        self._records.attach(frame)
        status = call(self._compiled, frame)
        self._records.detach(frame)
        return status

    def _advance(self, least: int, greatest: int) -> bool:
        """Advance the open slices so that they contain a block's slices; false if that is impossible."""
        if least < -MAX_SLICE or greatest > MAX_SLICE:
            return False
        if self._open is None:
            self._open = least - max(0, self._width - 1 - (greatest - least)) // 2
        elif greatest >= self._open + self._width:
            self._emit_until(greatest - self._width + 1)
        if least < self._open or greatest >= self._open + self._width:
            return False
        self._frame["ring.open"], self._frame["ring.limit"] = self._open, self._open + self._width
        return True

    def _emit_until(self, new_open: int) -> None:
        """Emit the windows whose last slice is before `new_open`, and clear the slices that no later window needs."""
        assert self._open is not None
        # Past the last slice that can hold a row there is nothing to emit.
        last = min(new_open, self._open + self._width + self._slices)
        for end in range(self._open, last):
            first = end - self._slices + 1
            if first % self._step == 0:
                self._emit(first)
            self._clear(first)
        self._open = new_open

    def _emit(self, first: int) -> None:
        frame, layout = self._out.frame, self._table.layout
        frame["window.first"] = first
        for k in range(self._slices):
            frame[f"window.slice{k}"] = ((first + k) & (self._table.ring - 1)) * layout.ring_step
        frame["source"], frame["row"], frame["end"] = self._records.first, 0, self._records.count
        self.chunks += self._out.run()

    def _clear(self, slice_: int) -> None:
        layout = self._table.layout
        words = self._records.words(layout.size // 8)
        start = (layout.ring_start + (slice_ & (self._table.ring - 1)) * layout.ring_step) // 8
        count = layout.ring_step // 8
        fresh = np.frombuffer(layout.template, np.int64)[start : start + count]
        words[:, start : start + count] = fresh
