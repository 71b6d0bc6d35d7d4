"""Combines partial groups, and finishes them, column by column.

Compiled code can do all of it, but it looks groups up by their keys; here the rows that belong together are known by
their positions. So sums, minima and maxima of plain numbers are computed by numpy over aligned columns; text and values
that might overflow go through compiled code, with a number in place of the key.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalein.arrow_rows import taken
from scalein.exec.bounded import CombineByNumber
from scalein.ir.partials import TwoPhase
from scalein.ir.tables import AccKind, Output
from scalein.options import Options


class Combiner:
    """Combines the values of equal keys."""

    def __init__(self, two_phase: TwoPhase, options: Options) -> None:
        self._two_phase, self._options = two_phase, options
        self._by_number = CombineByNumber(two_phase)
        self.names = two_phase.values.names

    def combine_pairs(self, left: pa.RecordBatch, right: pa.RecordBatch) -> list[pa.Array]:
        """The value columns of `left` combined with `right`, row by row."""
        functions = self._two_phase.functions
        found = [] if not self._two_phase.is_by_column else [
            _combine_column(left.column(name), right.column(name), functions[name]) for name in self.names]
        if not found or any(column is None for column in found):
            numbers = np.tile(np.arange(left.num_rows), 2)
            both = pa.concat_batches([left.select(self.names), right.select(self.names)])
            return list(self._by_number.combine(both, numbers, self._options).columns)
        return found

    def combine_numbered(self, rows: pa.RecordBatch, numbers: np.ndarray) -> pa.RecordBatch:
        """The combined values of all rows of each number; numbers are 0, 1, 2, ... without gaps."""
        if not self._two_phase.is_by_column:
            return self._by_number.combine(rows, numbers, self._options)
        order = None if (np.diff(numbers) >= 0).all() else np.argsort(numbers, kind="stable")
        starts = np.flatnonzero(np.diff(numbers if order is None else numbers[order], prepend=-1))
        functions = self._two_phase.functions
        found = [_reduce_column(rows.column(name), order, starts, functions[name]) for name in self.names]
        if any(column is None for column in found):
            return self._by_number.combine(rows, numbers, self._options)
        return pa.RecordBatch.from_arrays(found, names=self.names)

    # --- results

    def finish(self, rows: pa.RecordBatch) -> pa.RecordBatch | None:
        """The results of partial groups that are complete, row by row; None where compiled code must compute them."""
        if not self._two_phase.is_by_column:
            return None
        table = self._two_phase.final.table
        accs = self._two_phase.partial.table.accs
        names = [key.name for key in table.keys]
        columns = [rows.column(name) for name in names]
        if table.window is not None:
            start = rows.column("window_start")
            columns += [start, _window_ends(start, table.window_slices * table.slice_size)]
        for output in table.outputs:
            # The second phase numbers accumulators from 1: its own first one counts its rows.
            numbers = [number - 1 for number in output.accs]
            found = _finish_output(output, accs[numbers[0]].kind, [rows.column(f"#acc{number}") for number in numbers])
            if found is None:
                return None
            columns.append(found)
        return pa.RecordBatch.from_arrays(columns, schema=self._two_phase.final.schema.arrow)


def plain_values(column: pa.Array) -> np.ndarray | None:
    """The values of a numeric column without nulls, two words a row for decimals; None for other columns. Read-only."""
    if column.null_count or not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
                                 or pa.types.is_timestamp(column.type) or pa.types.is_decimal128(column.type)):
        return None
    buffer = column.buffers()[1]
    if pa.types.is_decimal128(column.type):
        words = np.frombuffer(buffer, np.uint64, 2 * len(column), column.offset * 16) if buffer is not None else ()
        return np.asarray(words, np.uint64).reshape(-1, 2)
    kind = np.int64 if pa.types.is_timestamp(column.type) else column.type.to_pandas_dtype()
    return np.frombuffer(buffer, kind, len(column), column.offset * np.dtype(kind).itemsize) if len(column) else (
        np.zeros(0, kind))


def from_values(values: np.ndarray, arrow: pa.DataType) -> pa.Array:
    """The inverse of `plain_values`."""
    values = np.ascontiguousarray(values)
    return pa.Array.from_buffers(arrow, len(values), [None, pa.py_buffer(values)])


def scatter(column: pa.Array, positions: np.ndarray, values: pa.Array) -> pa.Array:
    """A column with other values at some positions."""
    old, new = plain_values(column), plain_values(values)
    if old is not None and new is not None:
        found = old.copy()
        found[positions] = new
        return from_values(found, column.type)
    index = np.arange(len(column))
    index[positions] = len(column) + np.arange(len(values))
    return taken(pa.concat_arrays([column, values]), pa.array(index))


def _combine_column(left: pa.Array, right: pa.Array, function: str) -> pa.Array | None:
    a, b = plain_values(left), plain_values(right)
    if a is None or b is None:
        return None
    if pa.types.is_decimal(left.type):
        return from_values(_add_128(a, b), left.type) if function == "sum" else None
    is_float = pa.types.is_floating(left.type)
    match function:
        case "sum":
            return from_values(a + b, left.type)
        case "min":  # NaN is the greatest
            return from_values(np.fmin(a, b) if is_float else np.minimum(a, b), left.type)
        case _:
            return from_values(np.maximum(a, b), left.type)


def _reduce_column(column: pa.Array, order: np.ndarray | None, starts: np.ndarray, function: str) -> pa.Array | None:
    """One value for all rows from a start to the next, in the given order."""
    values = plain_values(column)
    if values is None or not len(starts):
        return None
    values = values if order is None else values[order]
    if pa.types.is_decimal(column.type):
        return from_values(_sum_groups_128(values, starts), column.type) if function == "sum" else None
    match function:
        case "sum":
            return from_values(np.add.reduceat(values, starts), column.type)
        case "min":
            least = np.fmin if pa.types.is_floating(column.type) else np.minimum
            return from_values(least.reduceat(values, starts), column.type)
        case _:
            return from_values(np.maximum.reduceat(values, starts), column.type)


def _sum_groups_128(words: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Sums of 128-bit integers: of the halves of their low words, which cannot overflow, and of their high words."""
    low, high, half = words[:, 0], words[:, 1], np.uint64(32)
    first = np.add.reduceat(low & np.uint64(0xFFFFFFFF), starts)
    second = np.add.reduceat(low >> half, starts) + (first >> half)
    found = (first & np.uint64(0xFFFFFFFF)) | (second << half)
    return np.stack([found, np.add.reduceat(high, starts) + (second >> half)], axis=1)


def _add_128(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Sums of 128-bit integers: a trillion 64-bit sums fit."""
    low = a[:, 0] + b[:, 0]
    return np.stack([low, a[:, 1] + b[:, 1] + (low < a[:, 0])], axis=1)


def _window_ends(start: pa.Array, size: int) -> pa.Array:
    values = plain_values(start)
    assert values is not None
    return from_values((values + size).astype(values.dtype), start.type)


def _finish_output(output: Output, kind: AccKind, columns: list[pa.Array]) -> pa.Array | None:
    value, result_type = columns[0], output.dtype.arrow
    counts = np.asarray(columns[1]) if len(columns) > 1 else None
    if kind is AccKind.ISUM:
        words = plain_values(value)
        unsigned = result_type == pa.uint64()
        if words is None or value.type.scale or not (not words[:, 1].any() if unsigned else _fits(words)):
            return None
        value = from_values(words[:, 0], pa.uint64() if unsigned else pa.int64())
    if output.fn == "mean":
        values = plain_values(value)
        if values is None or counts is None:
            return None
        value = pa.array(values.astype(np.float64) / np.maximum(counts, 1))
    if value.type != result_type:
        return None
    if counts is None or not output.nullable or counts.all():
        return value
    has_values = pa.array(counts > 0)
    return pc.if_else(has_values, value, pa.scalar(None, result_type))


def _fits(words: np.ndarray) -> bool:
    """Whether 128-bit numbers fit into 64 bits."""
    return bool((words[:, 1] == (words[:, 0].view(np.int64) >> 63).view(np.uint64)).all())
