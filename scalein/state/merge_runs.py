"""Lookups and merges of sorted blocks of state (`hash_runs.py`), by key.

Both work on whole columns: hashes are searched and sorted by numpy, rows are taken by pyarrow, and values of equal keys
are combined pair by pair (`exec/combine.py`). Where several keys share a hash, or a block has a key several times,
rows are numbered by their keys instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalein.arrow_rows import scattered, taken
from scalein.state.hash_runs import BLOCK_ROWS, hashes_of, in_hash_range
from scalein.state.interfaces import GroupMerger


@dataclass(frozen=True, slots=True)
class Match:
    """Rows of a run, and for each the number of the wanted row that has its key."""

    numbers: np.ndarray
    rows: pa.RecordBatch


def look_up(wanted: pa.RecordBatch, blocks: Iterable[pa.RecordBatch], keys: Sequence[str]) -> Iterator[Match]:
    """The rows of blocks that have the same keys as the wanted rows; all are sorted by hash."""
    hashes = hashes_of(wanted)
    for block in blocks:
        there = hashes_of(block)
        if not len(there):
            continue
        start, end = np.searchsorted(hashes, there[0]), np.searchsorted(hashes, there[-1], side="right")
        numbers, positions = _matching_hashes(hashes[start:end], there)
        numbers += start
        if not len(numbers):
            continue
        rows = take_rows(block, positions)
        same = _keys_equal(wanted, numbers, rows, np.arange(len(positions)), keys)
        if not same.all():
            numbers, rows = numbers[same], rows.filter(pa.array(same))
        yield Match(numbers, rows)


def _matching_hashes(wanted: np.ndarray, there: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The positions of both hashes of each pair of equal ones."""
    left = np.searchsorted(there, wanted)
    is_there = left < len(there)
    is_there &= there[np.minimum(left, len(there) - 1)] == wanted
    numbers = np.flatnonzero(is_there)
    positions = left[numbers]
    following = np.minimum(positions + 1, len(there) - 1)
    if not ((following > positions) & (there[following] == there[positions])).any():
        return numbers, positions
    counts = np.searchsorted(there, wanted[numbers], side="right") - positions  # several rows of one hash
    before = np.cumsum(counts) - counts
    return np.repeat(numbers, counts), np.repeat(positions - before, counts) + np.arange(counts.sum())


def rows_with_hashes(block: pa.RecordBatch, hashes: np.ndarray) -> pa.RecordBatch:
    """The rows of a sorted block that have one of these hashes, which are sorted too."""
    there = hashes_of(block)
    if not len(there) or not len(hashes):
        return block.slice(0, 0)
    _, positions = _matching_hashes(hashes, there)
    return take_rows(block, positions)


def take_rows(batch: pa.RecordBatch, positions: np.ndarray) -> pa.RecordBatch:
    rows = pa.array(positions)
    return pa.RecordBatch.from_arrays([taken(column, rows) for column in batch.columns], schema=batch.schema)


def _keys_equal(left: pa.RecordBatch, left_at: np.ndarray, right: pa.RecordBatch, right_at: np.ndarray,
                keys: Sequence[str]) -> np.ndarray:
    """Whether rows have equal keys, as in a group_by: NaN equals NaN, and null equals null."""
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
class MergedBlock:
    """The rows of several blocks in a range of hashes. For each row of the first block, `at` is its position in the
    result, and `existed` says whether any other block had its key.
    """

    block: pa.RecordBatch
    at: np.ndarray
    existed: np.ndarray


def merge_blocks(parts: Sequence[Sequence[pa.RecordBatch]], keys: Sequence[str], merger: GroupMerger | None,
                 max_rows: int | None = None) -> Iterator[MergedBlock]:
    """The rows of several lists of blocks in one order, in blocks of about so many rows; rows of equal keys combined,
    if they can be.
    """
    rows = sum(block.num_rows for part in parts for block in part)
    bounds = _bounds(parts, -(-rows // (max_rows or BLOCK_ROWS)))
    for start, end in zip([None, *bounds], [*bounds, None], strict=True):
        chosen = [[in_hash_range(block, start, end) for block in part] for part in parts]
        if any(block.num_rows for part in chosen for block in part):
            whole = [pa.concat_batches(part) if len(part) > 1 else part[0] for part in chosen if part]
            yield _merge_pairwise(whole, keys, merger) or _merge_all(whole, keys, merger)


def _bounds(parts: Sequence[Sequence[pa.RecordBatch]], count: int) -> list[np.uint64]:
    """Hashes that cut all rows into parts of about the same size: hashes are uniform, unless keys are few."""
    found = [hashes_of(block) for part in parts for block in part if block.num_rows]
    if count < 2:
        return []
    least, greatest = int(min(each[0] for each in found)), int(max(each[-1] for each in found))
    return [np.uint64(least + (greatest - least) * k // count) for k in range(1, count)]


def _merge_pairwise(parts: list[pa.RecordBatch], keys: Sequence[str],
                    merger: GroupMerger | None) -> MergedBlock | None:
    """Merge each part into the next one; None if keys share a hash, or there are no values to combine."""
    if merger is None or len(parts) == 1 or any((np.diff(hashes_of(part)) == 0).any() for part in parts):
        return None
    rows, at = parts[0], np.arange(parts[0].num_rows)
    existed = np.zeros(len(at), bool)
    for part in parts[1:]:
        found = _merge_two(part, rows, keys, merger)
        if found is None:
            return None
        rows, existed, at = found.block, existed | found.existed[at], found.at[at]
    return MergedBlock(rows, at, existed)


def _merge_two(large: pa.RecordBatch, small: pa.RecordBatch, keys: Sequence[str],
               merger: GroupMerger) -> MergedBlock | None:
    """Merge two blocks, each of which has every hash at most once; None if two keys share a hash."""
    there, hashes = hashes_of(large), hashes_of(small)
    positions = np.searchsorted(there, hashes)
    is_there = positions < len(there)
    is_there[is_there] = there[positions[is_there]] == hashes[is_there]
    old, new = np.flatnonzero(is_there), np.flatnonzero(~is_there)
    if not _keys_equal(small, old, large, positions[old], keys).all():
        return None
    values = dict[str, pa.Array]()
    if len(old):
        columns = merger.combine_pairs(take_rows(small.select(merger.names), old),
                                         take_rows(large.select(merger.names), positions[old]))
        values = dict(zip(merger.names, columns, strict=True))
    # Each new row is inserted before the position that was found for it.
    order = np.insert(np.arange(len(there)), positions[new], len(there) + np.arange(len(new))) if len(new) else None
    found = []
    for name, column in zip(large.schema.names, large.columns, strict=True):
        if name in values:
            column = scattered(column, positions[old], values[name])
        if order is not None:
            column = taken(pa.concat_arrays([column, taken(small.column(name), pa.array(new))]), pa.array(order))
        found.append(column)
    at = positions + np.searchsorted(positions[new], positions, side="right")
    at[new] = positions[new] + np.arange(len(new))
    return MergedBlock(pa.RecordBatch.from_arrays(found, schema=large.schema), at, is_there)


def _merge_all(parts: list[pa.RecordBatch], keys: Sequence[str], merger: GroupMerger | None) -> MergedBlock:
    together = parts[0] if len(parts) == 1 else pa.concat_batches(parts)
    hashes, first = hashes_of(together), parts[0].num_rows
    order = np.argsort(hashes, kind="stable")  # of sorted sequences, this is a merge
    if merger is None or (len(parts) == 1 and not (np.diff(hashes) == 0).any()):
        at = np.empty(len(order), np.int64)
        at[order] = np.arange(len(order))
        rows = take_rows(together, order) if len(parts) > 1 else together
        return MergedBlock(rows, at[:first], np.zeros(first, bool))
    numbers = _number_keys(together, hashes, order, keys)
    counts = np.bincount(numbers)
    index = np.empty(len(counts), np.int64)
    index[numbers[::-1]] = np.arange(len(numbers))[::-1]  # the first row of each number
    existed = np.bincount(numbers[first:], minlength=len(counts))[numbers[:first]] > 0
    several = np.flatnonzero(counts[numbers] > 1)
    if not len(several):
        return MergedBlock(take_rows(together, index), numbers[:first], existed)
    combined_numbers = np.cumsum(counts > 1) - 1  # numbers of the keys that are combined, from 0
    combined = merger.combine_numbered(take_rows(together, several), combined_numbers[numbers[several]])
    value_index = index.copy()
    value_index[counts > 1] = len(together) + np.arange(combined.num_rows)
    columns = []
    for name, column in zip(together.schema.names, together.columns, strict=True):
        if name in combined.schema.names:
            columns.append(taken(pa.concat_arrays([column, combined.column(name)]), pa.array(value_index)))
        else:
            columns.append(taken(column, pa.array(index)))
    return MergedBlock(pa.RecordBatch.from_arrays(columns, schema=together.schema), numbers[:first], existed)


def key_numbers(rows: pa.RecordBatch, keys: Sequence[str]) -> np.ndarray:
    """The number of each row's key, for rows sorted by hash."""
    return _number_keys(rows, hashes_of(rows), np.arange(rows.num_rows), keys)


def _number_keys(rows: pa.RecordBatch, hashes: np.ndarray, order: np.ndarray, keys: Sequence[str]) -> np.ndarray:
    """The number of each row's key, counted in the order of the hashes."""
    ordered = hashes[order]
    repeats = np.flatnonzero(ordered[1:] == ordered[:-1]) + 1  # positions with the hash of the one before
    is_new = np.ones(len(order), bool)
    if len(repeats):
        same = _keys_equal(rows, order[repeats - 1], rows, order[repeats], keys)
        is_new[repeats[same]] = False
        if not same.all():
            order, is_new = _split_collisions(rows, ordered, order, is_new, ordered[repeats[~same]], keys)
    numbers = np.empty(len(order), np.int64)
    numbers[order] = np.cumsum(is_new) - 1
    return numbers


def _split_collisions(rows: pa.RecordBatch, ordered: np.ndarray, order: np.ndarray, is_new: np.ndarray,
                      shared: np.ndarray,
                      keys: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The order, and where a new key starts, with keys that share a hash separated, row by row: they are few."""
    order, is_new = order.copy(), is_new.copy()
    for hash in np.unique(shared):
        start, end = np.searchsorted(ordered, hash), np.searchsorted(ordered, hash, side="right")
        names = [tuple("nan" if isinstance(value, float) and value != value else (value,) for value in row.values())
                 for row in take_rows(rows.select(list(keys)), order[start:end]).to_pylist()]
        first = {name: k for k, name in reversed(list(enumerate(names)))}
        ranks = np.array([first[name] for name in names])
        by_name = np.argsort(ranks, kind="stable")
        order[start:end] = order[start:end][by_name]
        is_new[start:end] = np.diff(ranks[by_name], prepend=-1) != 0
    return order, is_new
