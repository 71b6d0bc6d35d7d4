"""Slices: the keys of groups by the slice of time that they are of, so that to close some costs what these hold."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from scalein.jobs.steps import Batches
from scalein.jobs.watermarks import as_integers


class Slices:
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
