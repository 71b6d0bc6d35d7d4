"""Looking up and merging: what sorted pieces of a state (`runs.py`) have of the same keys.

All of it works on whole columns: hashes are searched and sorted by numpy, rows are taken by pyarrow, and values of
equal keys are combined side by side (`combining.py`). Where a hash is that of several keys, or a key is in one piece
several times, the rows are numbered by their keys instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalein.arrow_functions import taken
from scalein.spark.streaming.combining import Combining, placed_in
from scalein.spark.streaming.runs import PIECE_ROWS, between, hashes_of


@dataclass(frozen=True, slots=True)
class Found:
    """Rows of a run, and for each the number of the row that was looked for."""

    numbers: np.ndarray
    rows: pa.RecordBatch


def looked_up(wanted: pa.RecordBatch, pieces: Iterable[pa.RecordBatch], keys: Sequence[str]) -> Iterator[Found]:
    """What pieces have of the same keys as some rows; all are sorted by hash."""
    hashes = hashes_of(wanted)
    for piece in pieces:
        there = hashes_of(piece)
        if not len(there):
            continue
        start, end = np.searchsorted(hashes, there[0]), np.searchsorted(hashes, there[-1], side="right")
        numbers, places = _matching(hashes[start:end], there)
        numbers += start
        if not len(numbers):
            continue
        rows = rows_at(piece, places)
        same = _same(wanted, numbers, rows, np.arange(len(places)), keys)
        if not same.all():
            numbers, rows = numbers[same], rows.filter(pa.array(same))
        yield Found(numbers, rows)


def _matching(wanted: np.ndarray, there: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each pair of equal hashes the places of both."""
    left = np.searchsorted(there, wanted)
    is_there = left < len(there)
    is_there &= there[np.minimum(left, len(there) - 1)] == wanted
    numbers = np.flatnonzero(is_there)
    places = left[numbers]
    behind = np.minimum(places + 1, len(there) - 1)
    if not ((behind > places) & (there[behind] == there[places])).any():
        return numbers, places
    counts = np.searchsorted(there, wanted[numbers], side="right") - places  # several of one hash
    before = np.cumsum(counts) - counts
    return np.repeat(numbers, counts), np.repeat(places - before, counts) + np.arange(counts.sum())


def rows_at(batch: pa.RecordBatch, places: np.ndarray) -> pa.RecordBatch:
    rows = pa.array(places)
    return pa.RecordBatch.from_arrays([taken(column, rows) for column in batch.columns], schema=batch.schema)


def _same(left: pa.RecordBatch, left_at: np.ndarray, right: pa.RecordBatch, right_at: np.ndarray,
          keys: Sequence[str]) -> np.ndarray:
    """Whether rows have equal keys, as in groups: NaN equals NaN, and null equals null."""
    same = np.ones(len(left_at), bool)
    for name in keys:
        same &= _equal(taken(left.column(name), pa.array(left_at)), taken(right.column(name), pa.array(right_at)))
    return same


def _equal(left: pa.Array, right: pa.Array) -> np.ndarray:
    if pa.types.is_string_view(left.type) or pa.types.is_binary_view(left.type):
        plain = pa.large_string() if pa.types.is_string_view(left.type) else pa.large_binary()
        left, right = left.cast(plain), right.cast(plain)
    found = pc.equal(left, right)
    if pa.types.is_floating(left.type):
        found = pc.or_(found, pc.and_(pc.is_nan(left), pc.is_nan(right)))
    same = np.asarray(found.fill_null(False))
    if left.null_count or right.null_count:
        same = same | (np.asarray(left.is_null()) & np.asarray(right.is_null()))
    return same


# --- merging


@dataclass(frozen=True, slots=True)
class Merged:
    """A piece that holds what several had of a range of hashes; `at` has for each row of the first where it is now,
    and `others` whether any other had its key.
    """

    piece: pa.RecordBatch
    at: np.ndarray
    others: np.ndarray


def merged(parts: Sequence[Sequence[pa.RecordBatch]], keys: Sequence[str], combine: Combining | None,
           most_rows: int | None = None) -> Iterator[Merged]:
    """The rows of several lists of pieces in one order, in pieces of about so many rows; rows of equal keys combined,
    if they can be.
    """
    rows = sum(piece.num_rows for part in parts for piece in part)
    bounds = _bounds(parts, -(-rows // (most_rows or PIECE_ROWS)))
    for start, end in zip([None, *bounds], [*bounds, None], strict=True):
        chosen = [[between(piece, start, end) for piece in part] for part in parts]
        if any(piece.num_rows for part in chosen for piece in part):
            whole = [pa.concat_batches(part) if len(part) > 1 else part[0] for part in chosen if part]
            yield _one_by_one(whole, keys, combine) or _merged(whole, keys, combine)


def _bounds(parts: Sequence[Sequence[pa.RecordBatch]], count: int) -> list[np.uint64]:
    """Hashes that cut all rows into some parts of about one size: hashes are spread evenly, but for few keys."""
    found = [hashes_of(piece) for part in parts for piece in part if piece.num_rows]
    if count < 2:
        return []
    least, greatest = int(min(each[0] for each in found)), int(max(each[-1] for each in found))
    return [np.uint64(least + (greatest - least) * k // count) for k in range(1, count)]


def _one_by_one(parts: list[pa.RecordBatch], keys: Sequence[str], combine: Combining | None) -> Merged | None:
    """Each part put into the next one; None if a hash is not that of one key, or there are no values to combine."""
    if combine is None or len(parts) == 1 or any((np.diff(hashes_of(part)) == 0).any() for part in parts):
        return None
    rows, at = parts[0], np.arange(parts[0].num_rows)
    others = np.zeros(len(at), bool)
    for part in parts[1:]:
        found = _put_into(part, rows, keys, combine)
        if found is None:
            return None
        rows, others, at = found.piece, others | found.others[at], found.at[at]
    return Merged(rows, at, others)


def _put_into(large: pa.RecordBatch, small: pa.RecordBatch, keys: Sequence[str], combine: Combining) -> Merged | None:
    """The rows of two pieces; both have each hash once."""
    there, hashes = hashes_of(large), hashes_of(small)
    places = np.searchsorted(there, hashes)
    is_there = places < len(there)
    is_there[is_there] = there[places[is_there]] == hashes[is_there]
    old, new = np.flatnonzero(is_there), np.flatnonzero(~is_there)
    if not _same(small, old, large, places[old], keys).all():
        return None
    values = dict[str, pa.Array]()
    if len(old):
        columns = combine.pairs(rows_at(small.select(combine.names), old),
                                rows_at(large.select(combine.names), places[old]))
        values = dict(zip(combine.names, columns, strict=True))
    # Each new row comes before the place that was found for it.
    order = np.insert(np.arange(len(there)), places[new], len(there) + np.arange(len(new))) if len(new) else None
    found = []
    for name, column in zip(large.schema.names, large.columns, strict=True):
        if name in values:
            column = placed_in(column, places[old], values[name])
        if order is not None:
            column = taken(pa.concat_arrays([column, taken(small.column(name), pa.array(new))]), pa.array(order))
        found.append(column)
    at = places + np.searchsorted(places[new], places, side="right")
    at[new] = places[new] + np.arange(len(new))
    return Merged(pa.RecordBatch.from_arrays(found, schema=large.schema), at, is_there)


def _merged(parts: list[pa.RecordBatch], keys: Sequence[str], combine: Combining | None) -> Merged:
    together = parts[0] if len(parts) == 1 else pa.concat_batches(parts)
    hashes, first = hashes_of(together), parts[0].num_rows
    order = np.argsort(hashes, kind="stable")  # of lists that are sorted this is a merge
    if combine is None or (len(parts) == 1 and not (np.diff(hashes) == 0).any()):
        at = np.empty(len(order), np.int64)
        at[order] = np.arange(len(order))
        return Merged(rows_at(together, order) if len(parts) > 1 else together, at[:first], np.zeros(first, bool))
    numbers = _numbered(together, hashes, order, keys)
    counts = np.bincount(numbers)
    index = np.empty(len(counts), np.int64)
    index[numbers[::-1]] = np.arange(len(numbers))[::-1]  # of each number its first row
    others = np.bincount(numbers[first:], minlength=len(counts))[numbers[:first]] > 0
    several = np.flatnonzero(counts[numbers] > 1)
    if not len(several):
        return Merged(rows_at(together, index), numbers[:first], others)
    again = np.cumsum(counts > 1) - 1  # numbers of those that are combined, counted from 0
    combined = combine.numbered(rows_at(together, several), again[numbers[several]])
    value_index = index.copy()
    value_index[counts > 1] = len(together) + np.arange(combined.num_rows)
    columns = []
    for name, column in zip(together.schema.names, together.columns, strict=True):
        if name in combined.schema.names:
            columns.append(taken(pa.concat_arrays([column, combined.column(name)]), pa.array(value_index)))
        else:
            columns.append(taken(column, pa.array(index)))
    return Merged(pa.RecordBatch.from_arrays(columns, schema=together.schema), numbers[:first], others)


def numbered_keys(rows: pa.RecordBatch, keys: Sequence[str]) -> np.ndarray:
    """For each of some rows in the order of their hashes the number of its key."""
    return _numbered(rows, hashes_of(rows), np.arange(rows.num_rows), keys)


def _numbered(rows: pa.RecordBatch, hashes: np.ndarray, order: np.ndarray, keys: Sequence[str]) -> np.ndarray:
    """For each row the number of its key, counted in the order of the hashes."""
    ordered = hashes[order]
    repeats = np.flatnonzero(ordered[1:] == ordered[:-1]) + 1  # places in the order that have the hash before them
    is_new = np.ones(len(order), bool)
    if len(repeats):
        same = _same(rows, order[repeats - 1], rows, order[repeats], keys)
        is_new[repeats[same]] = False
        if not same.all():
            order, is_new = _told_apart(rows, ordered, order, is_new, ordered[repeats[~same]], keys)
    numbers = np.empty(len(order), np.int64)
    numbers[order] = np.cumsum(is_new) - 1
    return numbers


def _told_apart(rows: pa.RecordBatch, ordered: np.ndarray, order: np.ndarray, is_new: np.ndarray, shared: np.ndarray,
                keys: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The order and its borders where some hashes are those of several keys: a few rows, one after the other."""
    order, is_new = order.copy(), is_new.copy()
    for hash in np.unique(shared):
        start, end = np.searchsorted(ordered, hash), np.searchsorted(ordered, hash, side="right")
        names = [tuple("nan" if isinstance(value, float) and value != value else (value,) for value in row.values())
                 for row in rows_at(rows.select(list(keys)), order[start:end]).to_pylist()]
        first = {name: k for k, name in reversed(list(enumerate(names)))}
        ranks = np.array([first[name] for name in names])
        by_name = np.argsort(ranks, kind="stable")
        order[start:end] = order[start:end][by_name]
        is_new[start:end] = np.diff(ranks[by_name], prepend=-1) != 0
    return order, is_new
