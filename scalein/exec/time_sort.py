"""Sorts of a job. Rows that are sorted by their window first leave when no earlier window can come, sorted among
themselves: so they leave in the order of all. Any other sort, and one over rows without a watermark, waits for the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from scalein.arrow_rows import as_integers, filtered, from_numpy
from scalein.exec.event_time import extent
from scalein.exec.fragments import Fragment
from scalein.exec.operator import (
    Batches,
    Blocking,
    Context,
    FragmentRunner,
    Morsel,
    Operator,
    SnapshotFuture,
    Stateless,
    downstream_of,
    executes,
    files_of,
)
from scalein.ir import ops
from scalein.state.row_buffer import BufferSegment, RowBuffer
from scalein.storage.checked_json import Json, as_int, as_map

MAX_SEGMENTS = 512  # buffered, before they are coalesced


@executes(ops.Sort)
def open_sort(fragment: Fragment, context: Context, state: Json, emit: str) -> Operator:
    return (Blocking if fragment.sorted_by is None else TimeSort)(fragment, context, state, emit)


class TimeSort(Stateless):
    """Rows in the order of their windows: those that are complete are sorted, the others are buffered."""

    def __init__(self, fragment: Fragment, context: Context, state: Json, emit: str = "final") -> None:
        super().__init__(downstream_of(fragment), context)
        assert isinstance(fragment.state, ops.Sort)
        assert fragment.sorted_by is not None
        self._column, self._lead = fragment.sorted_by
        self._sort = FragmentRunner(fragment.state, context, by_row=False)
        self._left = fragment.state.count  # rows that may still leave; None: all
        schema = fragment.input.arrow
        self.reads = schema.names
        self._log = RowBuffer(context.folder, schema, context.options.memory)
        if state is not None:
            self._restore(state)

    def _restore(self, state: Json) -> None:
        self._log.restore(state)
        about = as_map(state)
        if "left" in about:
            self._left = None if about["left"] is None else as_int(about["left"])
        else:  # as earlier versions buffered all rows of a sort, without times
            self._log.replace([BufferSegment(*found, each.rows, None, each.file, each.number)
                               for each in self._log.segments if (found := self._extent(self._log.batch(each)))])

    @property
    def is_done(self) -> bool:  # type: ignore[override]
        return self._left == 0

    @property
    def state_bytes(self) -> int:
        return self._log.memory_bytes

    def _extent(self, batch: pa.RecordBatch) -> tuple[int, int] | None:
        return extent(batch.column(self._column))

    def rows(self, morsels: Iterable[Morsel]) -> list[Morsel]:
        for morsel in morsels:
            batch = morsel.batch.select(self._log.schema.names)
            found = self._extent(batch)
            if found is not None:
                self._log.add(batch, *found)
        return []

    def advance(self, watermark: int) -> Batches:
        return self._sorted(watermark + self._lead)

    def finish(self) -> Batches:
        return self._sorted(None)

    def _sorted(self, end: int | None) -> Batches:
        """The rows of windows before `end`, in order."""
        waiting = self._log.segments
        if not any(end is None or each.first < end for each in waiting):
            return []
        released: Batches = []
        kept: list[BufferSegment] = []
        with self._log.pinned(waiting):
            for each in waiting:
                if end is not None and each.first >= end:
                    kept.append(each)
                    continue
                batch = self._log.batch(each)
                if end is not None and each.last >= end:
                    is_ready = np.asarray(as_integers(batch.column(self._column))) < end
                    rest = filtered(batch, from_numpy(~is_ready))
                    found = self._extent(rest)
                    assert found is not None
                    kept.append(BufferSegment(*found, rest.num_rows, rest))
                    batch = filtered(batch, from_numpy(is_ready))
                released.append(batch)
            self._log.replace(kept)
            found_rows = self._sort.run(released)
        if self._left is not None:
            found_rows = list(self._first(found_rows))
        return self._runner.run(found_rows)

    def _first(self, batches: Batches) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            assert self._left is not None
            yield batch.slice(0, self._left)
            self._left -= min(self._left, batch.num_rows)

    def flush(self) -> None:
        if len(self._log.segments) > MAX_SEGMENTS:
            self._log.coalesce()

    def snapshot(self) -> SnapshotFuture:
        kept, left = list(self._log.segments), self._left
        return lambda: {**self._log.to_json(kept), "left": left}

    def retain(self, kept: list[Json]) -> None:
        self._log.remove_unreferenced(files_of(kept))
