"""Groups of a job, by where partial groups (`partials.py`) wait for their end:

Running   without windows, or told of as they change: in a state store (`running.py`)
Windowed  windows close together: partial groups wait as batches, by slice of time, and are finished together, a
          slice dropped whole. Batches are put together when they have become many. (DESIGN has one table a slice: a
          log needs no index and no deletes, its checkpoints are incremental, and closing many windows at once, as
          after a restart, is one pass.)
Waiting   aggregates as large as their input (lists, distinct values, quantiles): the rows themselves wait
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalein.compiler import compile_flow
from scalein.connectors.base import Json
from scalein.ir import ops
from scalein.ir.nodes import identity
from scalein.ir.two_phase import fits
from scalein.jobs.json import as_int, as_map
from scalein.jobs.partials import FOREVER, Finish, Partial, Timed, group_of
from scalein.jobs.rows import Kept, RowLog
from scalein.jobs.running import Running
from scalein.jobs.segments import Segment
from scalein.jobs.steps import (
    Arrival,
    Batches,
    Frozen,
    Runner,
    Step,
    Surroundings,
    files_of,
    filtered,
)
from scalein.jobs.watermarks import as_integers, extent
from scalein.runtime.run import Program

MOST_KEYS, MOST_VALUES = 16, 32  # columns of a store
FEW_ROWS = 1 << 20  # of partial groups, that are not worth being put together
MOST_BATCHES = 512  # that wait, before they are put together
GROWN = 4  # times what they were when they were put together last
_SLICE = "#slice"


def grouped(segment: Segment, around: Surroundings, state: Json, emit: str) -> Step:
    """The step of an aggregation."""
    table = group_of(compile_flow(segment.op)).table
    is_narrow = len(table.keys) < MOST_KEYS and len(table.accs) <= MOST_VALUES
    if not fits(table) or (not is_narrow and (table.window is None or emit == "changes")):
        return Waiting(segment, around, state)
    if table.window is None or emit == "changes":
        return Running(segment, around, state, emit)
    return Windowed(segment, around, state)


class _Closing(Timed):
    """Batches that wait in a log until the windows close that their slices are in."""

    _log: RowLog
    _finish: Finish
    _slices: str  # the column with the start of a row's slice
    _closed = -FOREVER  # windows that end here or before are done

    def settle(self) -> None:
        """Put everything that has arrived into the log."""

    @property
    def next_end(self) -> int | None:  # type: ignore[override]
        starts = [each.first for each in self._log.kept]
        if self._window is None or not starts:
            return None
        size, every = self._window.size, self._window.every
        return max(min(starts) // every * every + size - (size - every) // every * every, self._closed + every)

    @property
    def state_bytes(self) -> int:
        return self._log.held_bytes

    def _add(self, batch: pa.RecordBatch) -> None:
        found = extent(batch.column(self._slices))
        if found is not None:
            self._log.add(batch, *found)

    def advance(self, watermark: int) -> Batches:
        if self._late is None or (end := self._late.last_end(watermark)) <= self._closed:
            return []
        self.settle()
        before, self._closed = self._closed, end
        found = self._finished(before, end)
        self._drop(self._late.least_open(watermark))
        return found

    def finish(self) -> Batches:
        self.settle()
        found = self._finished(self._closed, FOREVER)
        self._closed = FOREVER
        self._log.replace([])
        return found

    def _finished(self, after: int, end: int) -> Batches:
        window = self._window
        if window is None:
            return self._finish.all([self._given(each, FOREVER) for each in self._log.kept])
        given = [self._given(each, end) for each in self._log.kept if each.first < end]
        given = [batch for batch in given if batch.num_rows]
        if not given:
            return []
        return self._finish.all(given) if window.size == window.every else self._finish.between(given, after, end)

    def _given(self, kept: Kept, end: int) -> pa.RecordBatch:
        """The rows of a batch whose windows may end before a time."""
        batch = self._log.batch(kept)
        if kept.last >= end:
            batch = filtered(batch, pc.less(as_integers(batch.column(self._slices)), end))
        return batch

    def _drop(self, first_open: int) -> None:
        """Forget slices that no open window has a part in."""
        kept = []
        for each in self._log.kept:
            if each.first >= first_open:
                kept.append(each)
            elif each.last >= first_open:
                batch = self._log.batch(each)
                batch = filtered(batch, pc.greater_equal(as_integers(batch.column(self._slices)), first_open))
                found = extent(batch.column(self._slices))
                assert found is not None
                kept.append(Kept(*found, batch.num_rows, batch))
        if len(kept) < len(self._log.kept) or any(a is not b for a, b in zip(kept, self._log.kept, strict=True)):
            self._log.replace(kept)

    def freeze(self) -> Frozen:
        kept, closed = list(self._log.kept), self._closed
        return lambda: {**self._log.to_json(kept), "closed": closed}

    def _restore(self, state: Json) -> None:
        if state is not None:
            self._log.restore(state)
            self._closed = as_int(as_map(state)["closed"])

    def forget(self, kept: list[Json]) -> None:
        self._log.remove_others(files_of(kept))


class Windowed(_Closing, Partial):
    """Windows of aggregates of a fixed size: partial groups wait."""

    _slices = "window_start"

    def __init__(self, segment: Segment, around: Surroundings, state: Json) -> None:
        super().__init__(segment, around)
        self._combine = Runner(segment.op, around, Program(self._two.combine), by_row=False)
        self._columns = [name for name in self._two.partial.schema.names if name != "window_end"]
        schema = pa.schema([self._two.partial.schema.arrow.field(name) for name in self._columns])
        self._log = RowLog(around.folder, schema, around.options.memory)
        self._restore(state)
        self._together = 0  # rows when they were put together last

    def rows(self, arrivals: Iterable[Arrival]) -> list[Arrival]:
        self._keep(self._partials(arrivals))
        return []

    def settle(self) -> None:
        self._keep(self._taken())

    def _keep(self, partials: Batches) -> None:
        for batch in partials:
            self._add(batch.select(self._columns))
        if self._log.rows > max(FEW_ROWS, GROWN * self._together) or len(self._log.kept) > MOST_BATCHES:
            given = [self._log.batch(each) for each in self._log.kept]
            self._log.replace([])
            for batch in self._combine.run(given):
                self._add(batch.select(self._columns))
            self._together = self._log.rows


class Waiting(_Closing):
    """Aggregates as large as their input: rows wait, in the columns that they need."""

    _slices = _SLICE

    def __init__(self, segment: Segment, around: Surroundings, state: Json) -> None:
        super().__init__(segment, around)
        needed = tuple(item for item in identity(segment.before.schema) if item.name in self._names)
        self._before = Runner(ops.Project(segment.before, needed), around)
        root = compile_flow(self._sorted_op)
        self._finish = Finish(self._sorted_op, root, group_of(root), group_of(root), around)
        self.reads = self._reads(self._before.program)
        schema = self._before.program.node.schema.arrow.append(pa.field(_SLICE, pa.int64()))
        self._log = RowLog(around.folder, schema, around.options.memory)
        self._size = group_of(root).table.slice_size
        self._restore(state)

    def rows(self, arrivals: Iterable[Arrival]) -> list[Arrival]:
        for batch in self._in_order(arrivals):
            if self._late is None:
                self._add(batch.append_column(_SLICE, pa.array(np.zeros(batch.num_rows, np.int64))))
                continue
            for found in self._late.timed(batch, self._around.options):
                starts = np.asarray(found.times) // self._size * self._size
                self._add(found.rows.append_column(_SLICE, pa.array(starts)))
        return []

    def settle(self) -> None:
        if len(self._log.kept) > MOST_BATCHES:
            self._log.join()

    def _in_order(self, arrivals: Iterable[Arrival]) -> Iterator[pa.RecordBatch]:
        """Rows of the group's input: batches in which all rows are in time, together, and others between them."""
        clean: Batches = []
        for arrival in arrivals:
            sorted_: Batches = []
            clean += self._arrived([arrival], sorted_)
            if sorted_:
                yield from self._before.run(clean)
                yield from sorted_
                clean = []
        yield from self._before.run(clean)


