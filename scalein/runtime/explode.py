"""explode: one row for each element of a list, by pyarrow; the other columns repeat.

Output comes in pieces of a bounded number of rows, however long the lists are. Lists that lie one behind the other,
as they do in most arrays, give their elements without a copy.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from scalein.interp.lists import Extents, extents
from scalein.interp.taking import taken
from scalein.ir import ops

PIECE_ROWS = 1 << 18


def explode(op: ops.Explode, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows of each batch, once for each element of their lists."""
    schema = op.schema.arrow
    for batch in batches:
        lists = extents(batch.column(op.column))
        for rows, starts, sizes in _pieces(lists):
            parents = pa.array(np.repeat(rows, sizes))
            elements = _elements(lists.values, starts, sizes)
            columns = [elements if name == op.column else taken(batch.column(name), parents) for name in schema.names]
            columns = [c if c.type == f.type else c.cast(f.type) for c, f in zip(columns, schema, strict=True)]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _pieces(lists: Extents) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Rows that have elements, and where those are, cut so that no piece has too many."""
    rows = np.flatnonzero(lists.sizes)
    starts, sizes = lists.starts[rows], lists.sizes[rows]
    ends = np.cumsum(sizes)
    for first in range(0, int(ends[-1]) if len(ends) else 0, PIECE_ROWS):
        low = int(np.searchsorted(ends, first, side="right"))
        high = int(np.searchsorted(ends, first + PIECE_ROWS, side="left")) + 1
        ours = slice(low, high)
        # The first and the last list may lie in other pieces as well.
        before = np.maximum(first - (ends[ours] - sizes[ours]), 0)
        behind = np.maximum(ends[ours] - first - PIECE_ROWS, 0)
        yield rows[ours], starts[ours] + before, sizes[ours] - before - behind


def _elements(values: pa.Array, starts: np.ndarray, sizes: np.ndarray) -> pa.Array:
    if bool((starts[1:] == starts[:-1] + sizes[:-1]).all()):
        return values.slice(int(starts[0]), int(sizes.sum()))
    shifts = starts - (np.cumsum(sizes) - sizes)
    return taken(values, pa.array(np.repeat(shifts, sizes) + np.arange(int(sizes.sum()))))
