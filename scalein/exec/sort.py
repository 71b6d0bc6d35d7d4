"""Sort and top-n: all rows sorted, or the first of them found in one pass.

A sort holds its whole input, or, under a memory limit, what fits (`external_sort.py`). The first `count` rows are found
in memory for about `count` rows and a piece of a batch: a row that cannot be among them is dropped by comparing its
first key with that of the worst row held.

NaN is the greatest number; nulls are where `nulls_last` says (`argsort`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalein.arrow_rows import as_numpy, as_type, from_numpy, taken
from scalein.cancellation import DETACHED_ROWS, raise_if_cancelled, run_detached
from scalein.exec import arrow_offset_limits
from scalein.ir.physical import Sort
from scalein.kernels.bind import conformed
from scalein.memory import MemoryAccount

Result = TypeVar("Result")

RESULT_ROWS = 1 << 18  # of an output batch
PIECE_ROWS = 1 << 16  # compared at once, and held beside the best rows so far


def run_sort(node: Sort, batches: Iterator[pa.RecordBatch], account: MemoryAccount) -> Iterator[pa.RecordBatch]:
    """The sorted rows of a node, in the memory of the account."""
    schema = node.schema.arrow
    held = pa.schema([field.with_type(storage_type(field.type)) for field in schema])
    rows = (part for batch in _until_cancelled(batches) if batch.num_rows
            for part in arrow_offset_limits.split_heavy(batch))
    if node.count is not None:
        found = _first_rows(node, rows, held, node.count)
    elif account.limit is not None:
        from scalein.exec.external_sort import sort_within

        found = sort_within(node, rows, held, account.child())
    else:
        found = _sorted(node, rows, held)
    return (conformed(batch, schema) for batch in found)


def _until_cancelled(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The batches; a sort calls no kernel, which would look whether the run was cancelled."""
    for batch in batches:
        raise_if_cancelled()
        yield batch


def storage_type(kind: pa.DataType) -> pa.DataType:
    """The type in which a column is held: pyarrow has no `take` for views."""
    if pa.types.is_string_view(kind):
        return pa.large_string()
    return pa.large_binary() if pa.types.is_binary_view(kind) else kind


def _sorted(node: Sort, batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    yield from in_order(node, [conformed(batch, schema) for batch in batches], schema, None)


def in_order(node: Sort, parts: list[pa.RecordBatch], schema: pa.Schema,
              count: int | None) -> Iterator[pa.RecordBatch]:
    """The rows of some batches in order, or the first of them; text too long for one array becomes large text."""
    table = pa.Table.from_batches(parts, schema)
    parts.clear()
    run = run_detached if table.num_rows > DETACHED_ROWS else _run_here
    columns = run(partial(_whole_columns, table))
    del table
    arrays = {name: column.arrays[0] for name, column in zip(schema.names, columns, strict=True)}
    order = run(partial(row_order, node, arrays))[:count]
    heavy = [column.weights[order] for column in columns if column.weights is not None]
    weights = arrow_offset_limits.total_weights(heavy)
    for start, stop in arrow_offset_limits.cut_points(len(order), RESULT_ROWS, weights):
        raise_if_cancelled()
        part = order[start:stop]
        yield pa.RecordBatch.from_arrays([column.take(part) for column in columns], schema.names)


def _run_here(function: Callable[[], Result]) -> Result:
    return function()


def _whole_columns(table: pa.Table) -> list[arrow_offset_limits.WholeColumn]:
    found = []
    for column in table.columns:
        raise_if_cancelled()
        found.append(arrow_offset_limits.WholeColumn(column))
    return found


def _first_rows(node: Sort, batches: Iterator[pa.RecordBatch], schema: pa.Schema,
                count: int) -> Iterator[pa.RecordBatch]:
    best = _Best(node, schema, count)
    if count:
        for batch in batches:
            for start in range(0, batch.num_rows, PIECE_ROWS):
                best.add(batch.slice(start, PIECE_ROWS))
    yield from best.sorted_rows()


class _Best:
    """The best rows so far, in order, and newer ones that may be among them."""

    def __init__(self, node: Sort, schema: pa.Schema, count: int) -> None:
        self._node, self._schema, self._count = node, schema, count
        self._parts: list[pa.RecordBatch] = []
        self._rows = 0
        self._worst: pa.Scalar | None = None  # first key of the last of the best rows

    def add(self, piece: pa.RecordBatch) -> None:
        if self._worst is not None:
            piece = _take_rows(piece, pc.indices_nonzero(self._may_enter(piece)))
        if not piece.num_rows:
            return
        self._parts.append(conformed(piece, self._schema))
        self._rows += piece.num_rows
        # Sorting only when there are as many new rows as old ones keeps the cost linear in the rows added.
        if self._rows >= 2 * self._count + PIECE_ROWS or (self._worst is None and self._rows >= self._count):
            self.sorted_rows()

    def sorted_rows(self) -> list[pa.RecordBatch]:
        """The best rows in order; all others are dropped."""
        if not self._parts:
            return []
        found = in_order(self._node, self._parts, self._schema, self._count)
        self._parts = [conformed(batch, self._schema) for batch in found]
        self._rows = sum(batch.num_rows for batch in self._parts)
        if self._rows == self._count:
            self._worst = comparable(self._parts[-1].column(self._node.by[0][0]))[-1]
        return self._parts

    def _may_enter(self, piece: pa.RecordBatch) -> pa.Array:
        """Which rows have a first key as good as the worst one held; better, if it is the only key."""
        name, descending = self._node.by[0]
        alone, nulls_last = len(self._node.by) == 1, self._node.nulls_last
        key, worst = comparable(as_type(piece.column(name), self._schema.field(name).type)), self._worst
        assert worst is not None
        if not worst.is_valid:
            good = key.is_valid() if nulls_last else pa.repeat(False, len(key))
            return good if alone else pc.or_(good, key.is_null())
        if pa.types.is_floating(key.type) and math.isnan(worst.as_py()):
            good = pa.repeat(False, len(key)) if descending else pc.invert(pc.is_nan(key))
            good = good if alone else pc.or_(good, pc.is_nan(key))
        elif descending:  # no comparison holds for NaN, which is greater than all
            good = pc.invert((pc.less_equal if alone else pc.less)(key, worst))
        else:
            good = (pc.less if alone else pc.less_equal)(key, worst)
        if not key.null_count:
            return good
        return pc.if_else(key.is_null(), not nulls_last, good)


def _take_rows(batch: pa.RecordBatch, rows: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([taken(column, rows) for column in batch.columns], schema=batch.schema)


def row_order(node: Sort, columns: dict[str, pa.Array]) -> Rows:
    """Row numbers in the order of the node's keys; a key is one array, since no list is a key."""
    return argsort([(comparable(columns[name]), way) for name, way in node.by], node.nulls_last)


def comparable(column: pa.Array) -> pa.Array:
    """The column as values that pyarrow compares."""
    kind = column.type
    if pa.types.is_boolean(kind):
        return column.cast(pa.uint8())
    return column.cast(pa.large_binary()) if pa.types.is_fixed_size_binary(kind) else column


# argsort: row numbers in the order of some columns; stable for all types.
#
# Rows are sorted by the last key first, then by the one before it, and so on, with stable sorts. Nulls are separated in
# each. A key becomes integers in its order: floats by their bits (so that NaN is the greatest in both directions, where
# pyarrow puts it last in both), text by its first eight bytes. The distance from the least and the row's number, packed
# into one word, are sorted as plain integers: that is stable, needs no access to rows, and numpy does it with vector
# code, ten times as fast as a sort of indices (10 M rows: 0.3 s against 5). Where both do not fit 64 bits, two sorts by
# parts of the distance are made. Text with equal first bytes, and types without such integers (decimals), are compared
# by pyarrow.

Words = np.ndarray[Any, np.dtype[np.uint64]]
Integers = np.ndarray[Any, np.dtype[np.integer[Any]]]
Rows = np.ndarray[Any, np.dtype[np.int64]]

PREFIX = 8  # bytes of text in a word
NUMBERED_ROWS = 1 << 16  # at once, in cache: a new array of all row numbers costs as much as the sort


def argsort(keys: Sequence[tuple[pa.Array, bool]], nulls_last: bool) -> Rows:
    """Row numbers in the order of the keys (a column, and whether the greatest comes first)."""
    rows: Rows | None = None  # None: the identity
    for column, descending in reversed(keys):
        raise_if_cancelled()
        if column.null_count == 0:
            rows = _argsort_column(column, descending, rows)
            continue
        valid = np.asarray(column.is_valid())
        known = valid if rows is None else valid[rows]
        nulls, rest = (np.flatnonzero(each) if rows is None else rows[each] for each in (~known, known))
        rest = _argsort_column(column, descending, rest)
        rows = np.concatenate((rest, nulls) if nulls_last else (nulls, rest))
    assert rows is not None
    return rows


def is_in_order(column: pa.Array, descending: bool) -> bool:
    """Whether a column of integers, floats or times without nulls has this order already."""
    values = None if column.null_count else integers_of(column)
    if values is None:
        return False
    return bool(np.all(values[1:] <= values[:-1] if descending else values[1:] >= values[:-1]))


def _argsort_column(column: pa.Array, descending: bool, rows: Rows | None) -> Rows:
    """The rows, none of which is null, stably sorted by a column."""
    count = len(column) if rows is None else len(rows)
    if count < 2:
        return np.arange(count) if rows is None else rows
    if _is_text(column.type):
        return _argsort_text(column, descending, np.arange(count) if rows is None else rows)
    values = integers_of(column)
    if values is None:
        order = _by_pyarrow(column if rows is None else column.take(from_numpy(rows)), descending)
    else:
        order = _order(values if rows is None else values[rows], descending)
    return order if rows is None else rows[order]


def _by_pyarrow(column: pa.Array, descending: bool) -> Rows:
    return as_numpy(pc.array_sort_indices(column, order="descending" if descending else "ascending")).astype(np.int64)


def _order(values: Integers, descending: bool) -> Rows:
    """The stable argsort of integers."""
    least, greatest = int(values.min()), int(values.max())
    wide = values.view(np.uint64) if values.itemsize == 8 else values.astype(np.int64).view(np.uint64)
    # Modulo 2^64, so the sign does not matter.
    words = np.uint64(greatest % 2**64) - wide if descending else wide - np.uint64(least % 2**64)
    room = 64 - (len(words) - 1).bit_length()  # bits left beside the row's number
    low = np.uint64(max(0, (greatest - least).bit_length() - room))
    if not low:
        return packed_argsort(words)
    order = packed_argsort(words >> low)
    if not _differ_within(words, low, order):
        return order
    order = packed_argsort(words & np.uint64((1 << int(low)) - 1))
    return order[packed_argsort((words >> low)[order])]


def packed_argsort(words: Words) -> Rows:
    """The argsort of words whose upper bits are free for the row's number; overwrites the words."""
    bits = np.uint64((len(words) - 1).bit_length())
    words <<= bits
    numbers = np.arange(min(len(words), NUMBERED_ROWS), dtype=np.uint64)
    for start in range(0, len(words), NUMBERED_ROWS):
        part = words[start : start + NUMBERED_ROWS]
        part |= numbers[: len(part)] + np.uint64(start)
    words.sort()
    words &= np.uint64((1 << int(bits)) - 1)
    return words.view(np.int64)


def _differ_within(words: Words, low: np.uint64, order: Rows) -> bool:
    """Whether neighbours that differ have equal upper bits: then those alone did not decide the order."""
    ordered = words[order]
    tops = ordered >> low
    return bool(np.any((tops[1:] == tops[:-1]) & (ordered[1:] != ordered[:-1])))


def integers_of(column: pa.Array) -> Integers | None:
    """Integers in the order of a column of fixed width up to 64 bits; undefined for nulls."""
    kind = column.type
    if pa.types.is_boolean(kind):
        column = column.cast(pa.uint8())
    elif pa.types.is_floating(kind):
        return _ranks(column)
    elif pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        column = column.view(pa.int32() if kind.bit_width == 32 else pa.int64())
    if not pa.types.is_integer(column.type):
        return None
    values: Integers = np.frombuffer(column.buffers()[1], column.type.to_pandas_dtype())
    return values[column.offset : column.offset + len(column)]


def _ranks(column: pa.Array) -> Integers:
    """Integers in the order of floats: the bits, those below the sign inverted where it is set."""
    values = as_numpy(column.fill_null(0.0) if column.null_count else column) + 0.0  # -0.0 + 0.0 = 0.0
    values[np.isnan(values)] = np.nan  # one NaN, without a sign: greater than infinity
    bits: np.ndarray[Any, np.dtype[np.signedinteger[Any]]] = values.view(f"i{values.itemsize}")
    width = 8 * values.itemsize - 1
    bits ^= (bits >> width) & ((1 << width) - 1)
    return bits


# --- text


def _is_text(kind: pa.DataType) -> bool:
    return any(is_kind(kind) for is_kind in (
        pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary))


def _argsort_text(column: pa.Array, descending: bool, rows: Rows) -> Rows:
    """By the first bytes; then, where those are equal and the text is longer or of another length, by the whole text.
    """
    words, sizes = _prefixes(column)
    words, sizes = words[rows], sizes[rows]
    order = _order(words, descending)
    words, sizes = words[order], sizes[order]
    rows = rows[order]
    same = words[1:] == words[:-1]
    undecided = same & ((sizes[1:] > PREFIX) | (sizes[1:] != sizes[:-1]))
    if not undecided.any():
        return rows
    # All runs of equal prefixes with an undecided pair are sorted by pyarrow at once, then split into the runs again.
    runs = np.concatenate(([0], np.cumsum(~same)))
    open_runs = np.zeros(int(runs[-1]) + 1, bool)
    open_runs[runs[1:][undecided]] = True
    spots = np.flatnonzero(open_runs[runs])
    decided = _by_pyarrow(column.take(from_numpy(rows[spots])), descending)
    decided = decided[_order(runs[spots][decided], False)]
    rows[spots] = rows[spots][decided]
    return rows


def _prefixes(column: pa.Array) -> tuple[Words, Rows]:
    """The first bytes of each text as a word, zero where it ends, and its size in bytes."""
    is_large = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    _, offset_buffer, data_buffer = column.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64 if is_large else np.int32)
    offsets = offsets[column.offset : column.offset + len(column) + 1].astype(np.int64)
    starts, sizes = offsets[:-1] - offsets[0], np.diff(offsets)
    data = np.frombuffer(data_buffer or b"", np.uint8)[offsets[0] : offsets[-1]]
    padded = np.concatenate((data, np.zeros(PREFIX, np.uint8)))
    at_any_byte = np.ndarray(len(data) + 1, ">u8", padded, strides=(1,))  # read unaligned, most significant byte first
    words = at_any_byte[starts].astype(np.uint64)
    limit_error = (8 * np.clip(PREFIX - sizes, 0, PREFIX - 1)).astype(np.uint64)
    words = (words >> limit_error) << limit_error
    words[sizes == 0] = 0
    return words, sizes
