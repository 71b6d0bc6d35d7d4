"""Partial groups buffered until the windows of their slices close.

Windows that close at the same watermark are finished together; under memory pressure in several close batches
(`close_batches.py`), each emitted before the next is started. The same batches serve to combine buffered partials.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property

import numpy as np
import pyarrow as pa

from scalein.arrow_rows import as_integers, filtered, from_numpy
from scalein.exec.aggregate_operator import FOREVER, AggregateOperator, Finalizer
from scalein.exec.close_batches import KeyShares, Part, most_bytes, parts_of
from scalein.exec.event_time import extent
from scalein.exec.operator import Batches, SnapshotFuture
from scalein.ir.exprs import Expr, columns
from scalein.ir.windows import Window
from scalein.state.interfaces import WindowBuffer
from scalein.state.row_buffer import BufferSegment
from scalein.storage.checked_json import Json, as_int, as_map

CLOSED = "closed"  # in a state: windows that end here or before are done


class WindowCloser(AggregateOperator):
    """Batches that wait in a log until the windows close that their slices are in."""

    _log: WindowBuffer
    _finish: Finalizer
    _slices: str  # the column with the start of a row's slice
    _by: tuple[Expr, ...]  # the keys of what waits
    _closed = -FOREVER  # windows that end here or before are done

    def flush(self) -> None:
        """Put everything that has arrived into the log."""

    @property
    def next_end(self) -> int | None:  # type: ignore[override]
        starts = [each.first for each in self._log.segments]
        if self._window is None or not starts:
            return None
        return max(self._window.first_end(min(starts)), self._window.first_open_end(self._closed))

    @property
    def due(self) -> int | None:  # type: ignore[override]
        """The watermark at which sliding windows must be closed before more rows are added: a row may arrive when some
        of its windows have closed but not all, and which of them count it must not depend on the size of a round.
        """
        if self._window is None or self._window.is_tumbling:
            return None
        return -FOREVER if self._closed == -FOREVER else self._window.first_open_end(self._closed)

    @property
    def state_bytes(self) -> int:
        return self._log.memory_bytes

    def _add(self, batch: pa.RecordBatch) -> None:
        found = extent(batch.column(self._slices))
        if found is not None:
            self._log.add(batch, *found)

    def advance(self, watermark: int) -> Iterator[pa.RecordBatch]:
        if self._late is None or (end := self._late.last_end(watermark)) <= self._closed:
            return
        self.flush()
        before, self._closed = self._closed, end
        yield from self._finished(before, end)
        self._drop(self._late.least_open(watermark))

    def finish(self) -> Iterator[pa.RecordBatch]:
        self.flush()
        yield from self._finished(self._closed, FOREVER)
        self._closed = FOREVER
        self._log.drop(FOREVER)

    def _finished(self, after: int, end: int) -> Iterator[pa.RecordBatch]:
        """The results of windows that end after `after`, up to `end`, part by part if memory is short."""
        waiting, window = self._waiting(end), self._window
        for part in self._parts(waiting, Part(after, end), window):
            given = self._given(waiting, part, window)
            if window is None or (given and window.is_tumbling):
                yield from self._finish.all(given)
            elif given:
                yield from self._finish.between(given, part.after, part.end)

    def _waiting(self, end: int) -> list[BufferSegment]:
        """What waits for windows that begin before a time."""
        return [each for each in self._log.segments if each.first < end]

    def _parts(self, waiting: list[BufferSegment], whole: Part, window: Window | None) -> Iterable[Part]:
        """A part of what waits, in smaller ones if it is too large."""
        most = most_bytes(self._context.options.memory)
        if most is None or (size := self._log.size_bytes(waiting)) <= most:
            return [whole]
        found = [np.unique(self._starts(batch), return_counts=True)
                 for each in waiting for batch in self._log.read(each)]
        starts, places = np.unique(np.concatenate([each for each, _ in found]), return_inverse=True)
        rows = np.bincount(places, np.concatenate([counts for _, counts in found]))
        sizes = rows * (size / max(1, sum(each.rows for each in waiting)))
        return parts_of(whole, starts, sizes.astype(np.int64), window, most, any(map(columns, self._by)))

    def _given(self, waiting: list[BufferSegment], part: Part, window: Window | None) -> Batches:
        """What a part needs of batches that wait."""
        least = -FOREVER if window is None else max(-FOREVER, window.least_open(part.after))
        found = [self._within(batch, each, least, part) for each in waiting
                 if each.last >= least and each.first < part.end for batch in self._log.read(each)]
        return [batch for batch in found if batch.num_rows]

    def _within(self, batch: pa.RecordBatch, segment: BufferSegment, least: int, part: Part) -> pa.RecordBatch:
        if segment.first < least or segment.last >= part.end:
            starts = self._starts(batch)
            batch = filtered(batch, from_numpy((starts >= least) & (starts < part.end)))
        if part.shares > 1 and batch.num_rows:
            batch = filtered(batch, from_numpy(self._shares.has(batch, part, self._context.options)))
        return batch

    def _starts(self, batch: pa.RecordBatch) -> np.ndarray:
        return np.asarray(as_integers(batch.column(self._slices)))

    @cached_property
    def _shares(self) -> KeyShares:
        return KeyShares(self._log.schema, self._by)

    def _drop(self, first_open: int) -> None:
        """Forget slices that no open window has a part in."""
        self._log.drop(first_open)

    def restore(self, state: Json) -> None:
        self._log.restore(state)
        self._closed = -FOREVER
        if state is not None:
            self._closed = as_int(as_map(state)[CLOSED])
            self._count_from(state)

    def snapshot(self) -> SnapshotFuture:
        wait, about = self._log.snapshot(self._not_buffered()), {CLOSED: self._closed, **self._counting}
        return lambda: {**wait(), **about}

    def _not_buffered(self) -> list[BufferSegment]:
        """What waits elsewhere than in the buffer."""
        return []

    def retain(self, kept: list[Json]) -> None:
        self._log.retain(kept)
