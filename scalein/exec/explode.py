"""explode: one row for each element of a list, by pyarrow; the other columns repeat.

Output comes in pieces of bounded numbers of rows and bytes, however long the lists and whatever is repeated beside
them. Lists that lie one behind the other, as they do in most arrays, give their elements without a copy.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from scalein.exec import array_limits
from scalein.interp.lists import Extents, extents
from scalein.interp.taking import taken
from scalein.ir import ops

PIECE_ROWS = 1 << 18


def explode(op: ops.Explode, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows of each batch, once for each element of their lists."""
    schema = op.schema.arrow
    for batch in batches:
        lists = extents(batch.column(op.column))
        others = [array_limits.weights(batch.column(name)) for name in schema.names if name != op.column]
        for rows, starts, sizes in _pieces(lists, array_limits.together(others)):
            parents = pa.array(np.repeat(rows, sizes))
            elements = _elements(lists.values, starts, sizes)
            columns = [elements if name == op.column else taken(batch.column(name), parents) for name in schema.names]
            columns = [c if c.type == f.type else c.cast(f.type) for c, f in zip(columns, schema, strict=True)]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _pieces(lists: Extents, weights: np.ndarray | None) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Rows that have elements, and where those are, cut so that no piece has too many or repeats too much."""
    rows = np.flatnonzero(lists.sizes)
    starts, sizes = lists.starts[rows], lists.sizes[rows]
    ends = np.cumsum(sizes)
    first, count = 0, int(ends[-1]) if len(ends) else 0
    while first < count:
        low = int(np.searchsorted(ends, first, side="right"))
        last = min(count, first + PIECE_ROWS)
        high = int(np.searchsorted(ends, last, side="left")) + 1
        if weights is not None:
            ours = slice(low, high)
            last = min(last, _lightest(ends[ours], sizes[ours], weights[rows[ours]], first))
            high = int(np.searchsorted(ends, last, side="left")) + 1
        ours = slice(low, high)
        # The first and the last list may lie in other pieces as well.
        before = np.maximum(first - (ends[ours] - sizes[ours]), 0)
        behind = np.maximum(ends[ours] - last, 0)
        yield rows[ours], starts[ours] + before, sizes[ours] - before - behind
        first = last


def _lightest(ends: np.ndarray, sizes: np.ndarray, weights: np.ndarray, first: int) -> int:
    """Up to which element the rows repeated from `first` on stay light; at least one."""
    repeats = np.minimum(sizes, ends - first)  # of the first list, what is left
    totals = np.cumsum(repeats * weights)
    k = int(np.searchsorted(totals, array_limits.MOST_WEIGHT, side="right"))
    if k == len(totals):
        return int(ends[-1])
    room = array_limits.MOST_WEIGHT - int(totals[k] - repeats[k] * weights[k])
    return max(first + 1, int(ends[k] - repeats[k]) + room // int(weights[k]))


def _elements(values: pa.Array, starts: np.ndarray, sizes: np.ndarray) -> pa.Array:
    if bool((starts[1:] == starts[:-1] + sizes[:-1]).all()):
        return values.slice(int(starts[0]), int(sizes.sum()))
    shifts = starts - (np.cumsum(sizes) - sizes)
    return taken(values, pa.array(np.repeat(shifts, sizes) + np.arange(int(sizes.sum()))))
