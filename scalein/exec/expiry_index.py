"""The expiry index: which windows a slice of time is in, and the keys of groups by window, so that the cost of closing
is proportional to the groups that close.

Keys wait in a row buffer: beyond a share of the job's memory they are on disk, and a checkpoint writes the new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from scalein.arrow_rows import as_integers, filtered
from scalein.exec.operator import Batches, Context, files_of, restore_rows
from scalein.ir.windows import Window
from scalein.state.row_buffer import RowBuffer
from scalein.storage.checked_json import Json

MIN_SEGMENTS = 512  # of the buffer, before those of each window are put together


def windows_of(partials: pa.RecordBatch, window: Window, first_open: int) -> Batches:
    """Partial groups of slices, again for each window that their slice is in and whose anchor is `first_open` or later,
    with the anchor in the place of the slice's start. A key may come several times.
    """
    at = partials.schema.get_field_index("window_start")
    field, starts = partials.schema.field(at), np.asarray(as_integers(partials.column(at)))
    found = []
    for windows, is_in in window.anchors_of(starts):
        values = np.ascontiguousarray(windows.astype(f"i{field.type.bit_width // 8}"))
        column = pa.Array.from_buffers(field.type, len(values), [None, pa.py_buffer(values)])
        found.append(filtered(partials.set_column(at, field, column), pa.array(is_in & (windows >= first_open))))
    return [batch for batch in found if batch.num_rows]


class ExpiryIndex:
    """Keys of groups that wait for their windows to close; they have a column `window_start`.

    A segment of the buffer has keys of one window. A key may come twice, or be deleted already: these are hints.
    """

    def __init__(self, folder: Path, keys: pa.Schema, memory: int | None) -> None:
        self._log = RowBuffer(folder, keys, memory)
        self._most_segments = MIN_SEGMENTS

    def add(self, keys: pa.RecordBatch) -> None:
        if not keys.num_rows:
            return
        starts = np.asarray(as_integers(keys.column("window_start")))
        order = np.argsort(starts, kind="stable")
        found, firsts = np.unique(starts[order], return_index=True)
        rows = (keys if len(found) == 1 else keys.take(pa.array(order))).cast(self._log.schema)
        for start, first, end in zip(found.tolist(), firsts, [*firsts[1:], len(starts)], strict=True):
            self._log.add(rows.slice(first, end - first), start, start)
        if len(self._log.segments) > self._most_segments:
            self._log.coalesce(apart=True)
            self._most_segments = MIN_SEGMENTS + 2 * len(self._log.segments)

    @property
    def oldest(self) -> int | None:
        return min((segment.first for segment in self._log.segments), default=None)

    def closed(self, first_open: int) -> Iterator[pa.RecordBatch]:
        """The keys of windows that begin before a time, which are dropped from the index."""
        gone = [segment for segment in self._log.segments if segment.first < first_open]
        with self._log.pinned(gone):
            self._log.replace([segment for segment in self._log.segments if segment.first >= first_open])
            yield from map(self._log.batch, gone)

    @property
    def memory_bytes(self) -> int:
        return self._log.memory_bytes

    def snapshot(self) -> Callable[[], dict[str, Json]]:
        """What a checkpoint says of the index; any thread may call it, and the keys are durable then."""
        segments = list(self._log.segments)
        return lambda: self._log.to_json(segments)

    def restore(self, context: Context, state: Json) -> None:
        restore_rows(context, self._log, state)

    def retain(self, kept: list[Json]) -> None:
        self._log.remove_unreferenced(files_of(kept))
