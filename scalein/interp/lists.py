"""Lists of every Arrow layout, taken apart by where each begins and how long it is.

Arrow has lists by offsets (of 32 or 64 bits), by offsets and sizes (views), and of one size. Behind `extents` they
are alike, slices and nulls included, and nothing is copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from scalein.interp.taking import taken


@dataclass(frozen=True, slots=True)
class Extents:
    """The lists of an array: rows `start .. start + size` of `values` each; a null list has size 0."""

    values: pa.Array
    starts: np.ndarray
    sizes: np.ndarray
    valid: np.ndarray


def extents(array: pa.Array) -> Extents:
    """Where the lists of an array are."""
    count = len(array)
    valid = np.asarray(array.is_valid())
    if pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        starts = (np.arange(count, dtype=np.int64) + array.offset) * size
        return Extents(array.values, starts, np.where(valid, size, 0), valid)
    offsets = np.asarray(array.offsets).astype(np.int64)
    if pa.types.is_list_view(array.type) or pa.types.is_large_list_view(array.type):
        sizes = np.asarray(array.sizes).astype(np.int64)
        return Extents(array.values, offsets[:count], np.where(valid, sizes, 0), valid)
    return Extents(array.values, offsets[:-1], np.where(valid, np.diff(offsets), 0), valid)


def length(array: pa.Array) -> pa.Array:
    """The number of elements of each list, null for a null list."""
    found = extents(array)
    return pa.array(found.sizes, pa.int64(), mask=~found.valid)


def element(array: pa.Array, number: int) -> pa.Array:
    """Element `number` of each list, counted from 0 or, if negative, from the end; null where there is none."""
    found = extents(array)
    there = found.valid & ((found.sizes > number) if number >= 0 else (found.sizes >= -number))
    place = found.starts + number + (0 if number >= 0 else found.sizes)
    return taken(found.values, pa.array(np.where(there, place, 0), pa.int64(), mask=~there))
