"""The expiry index: which windows a slice of time is in, and the keys of groups by slice or window, so that the cost of
closing is proportional to the groups that close.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from scalein.exec.event_time import as_integers
from scalein.exec.operator import Batches, filtered
from scalein.ir.windows import Window


def windows_of(partials: pa.RecordBatch, window: Window, first_open: int) -> Batches:
    """Partial groups of slices, again for each window that their slice is in and that begins at `first_open` or later,
    with the window's start in the place of the slice's. A key may come several times.
    """
    at = partials.schema.get_field_index("window_start")
    field, starts = partials.schema.field(at), np.asarray(as_integers(partials.column(at)))
    found = []
    for windows, is_in in window.starts_of(starts):
        values = np.ascontiguousarray(windows.astype(f"i{field.type.bit_width // 8}"))
        column = pa.Array.from_buffers(field.type, len(values), [None, pa.py_buffer(values)])
        found.append(filtered(partials.set_column(at, field, column), pa.array(is_in & (windows >= first_open))))
    return [batch for batch in found if batch.num_rows]


class ExpiryIndex:
    """Keys of groups that wait for their windows to close; they have a column `window_start`."""

    def __init__(self) -> None:
        self._keys: dict[int, Batches] = {}
        self.held_bytes = 0

    def add(self, keys: pa.RecordBatch) -> None:
        if not keys.num_rows:
            return
        starts = np.asarray(as_integers(keys.column("window_start")))
        order = np.argsort(starts, kind="stable")
        found, firsts = np.unique(starts[order], return_index=True)
        rows = keys if len(found) == 1 else keys.take(pa.array(order))
        for start, first, end in zip(found.tolist(), firsts, [*firsts[1:], len(starts)], strict=True):
            self._keys.setdefault(start, []).append(rows.slice(first, end - first))
        self.held_bytes += rows.nbytes

    @property
    def oldest(self) -> int | None:
        return min(self._keys, default=None)

    def closed(self, first_open: int) -> Batches:
        """The keys of slices before a time, which are forgotten."""
        gone = [start for start in self._keys if start < first_open]
        found = [keys for start in gone for keys in self._keys.pop(start)]
        self.held_bytes -= sum(keys.nbytes for keys in found)
        return found
