"""Combining partial groups, and finishing them, column by column.

Compiled code can do all of it, but it looks groups up by their keys; here rows are known to belong together by their
places. So what is a sum, a minimum or a maximum of plain numbers is done by numpy where rows stand side by side; text
and the like, and whatever might be out of range, goes through compiled code, with a number in the place of the key.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalein.arrow_functions import taken
from scalein.exec.bounded import CombineByNumber
from scalein.ir.partials import TwoPhase
from scalein.ir.tables import AccKind, Output
from scalein.options import Options


class Combining:
    """How values of equal keys become one."""

    def __init__(self, two: TwoPhase, options: Options) -> None:
        self._two, self._options = two, options
        self._by_number = CombineByNumber(two)
        self.names = two.values.names

    def pairs(self, left: pa.RecordBatch, right: pa.RecordBatch) -> list[pa.Array]:
        """The value columns of rows that belong together one by one."""
        found = [] if not self._two.is_by_column else [
            _pair(left.column(name), right.column(name), self._two.functions[name]) for name in self.names]
        if not found or any(column is None for column in found):
            numbers = np.tile(np.arange(left.num_rows), 2)
            both = pa.concat_batches([left.select(self.names), right.select(self.names)])
            return list(self._by_number.combine(both, numbers, self._options).columns)
        return found

    def numbered(self, rows: pa.RecordBatch, numbers: np.ndarray) -> pa.RecordBatch:
        """The values of all rows of a number, in the order of the numbers, which begin at 0 and leave none out."""
        if not self._two.is_by_column:
            return self._by_number.combine(rows, numbers, self._options)
        order = None if (np.diff(numbers) >= 0).all() else np.argsort(numbers, kind="stable")
        starts = np.flatnonzero(np.diff(numbers if order is None else numbers[order], prepend=-1))
        found = [_reduced(rows.column(name), order, starts, self._two.functions[name]) for name in self.names]
        if any(column is None for column in found):
            return self._by_number.combine(rows, numbers, self._options)
        return pa.RecordBatch.from_arrays(found, names=self.names)

    # --- results

    def finished(self, rows: pa.RecordBatch) -> pa.RecordBatch | None:
        """The groups that partial ones are if each is whole, row by row; None where compiled code must look at them."""
        if not self._two.is_by_column:
            return None
        table = self._two.final.table
        accs = self._two.partial.table.accs
        names = [key.name for key in table.keys]
        columns = [rows.column(name) for name in names]
        if table.window is not None:
            start = rows.column("window_start")
            columns += [start, _later(start, table.window.size)]
        for output in table.outputs:
            # The second phase counts accumulators from 1: its own first one is the number of its rows.
            numbers = [number - 1 for number in output.accs]
            found = _finished(output, accs[numbers[0]].kind, [rows.column(f"#acc{number}") for number in numbers])
            if found is None:
                return None
            columns.append(found)
        return pa.RecordBatch.from_arrays(columns, schema=self._two.final.schema.arrow)


def plain(column: pa.Array) -> np.ndarray | None:
    """The values of a column of numbers without nulls, of decimals two words a row; None for others. Not to be written.
    """
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


def of_plain(values: np.ndarray, arrow: pa.DataType) -> pa.Array:
    """The column that `plain` gave these values of."""
    values = np.ascontiguousarray(values)
    return pa.Array.from_buffers(arrow, len(values), [None, pa.py_buffer(values)])


def placed_in(column: pa.Array, places: np.ndarray, values: pa.Array) -> pa.Array:
    """A column with other values at some places."""
    old, new = plain(column), plain(values)
    if old is not None and new is not None:
        found = old.copy()
        found[places] = new
        return of_plain(found, column.type)
    index = np.arange(len(column))
    index[places] = len(column) + np.arange(len(values))
    return taken(pa.concat_arrays([column, values]), pa.array(index))


def _pair(left: pa.Array, right: pa.Array, function: str) -> pa.Array | None:
    a, b = plain(left), plain(right)
    if a is None or b is None:
        return None
    if pa.types.is_decimal(left.type):
        return of_plain(_sum_of_words(a, b), left.type) if function == "sum" else None
    is_float = pa.types.is_floating(left.type)
    match function:
        case "sum":
            return of_plain(a + b, left.type)
        case "min":  # NaN is the greatest
            return of_plain(np.fmin(a, b) if is_float else np.minimum(a, b), left.type)
        case _:
            return of_plain(np.maximum(a, b), left.type)


def _reduced(column: pa.Array, order: np.ndarray | None, starts: np.ndarray, function: str) -> pa.Array | None:
    """One value for all rows from a start to the next, in some order."""
    values = plain(column)
    if values is None or not len(starts):
        return None
    values = values if order is None else values[order]
    if pa.types.is_decimal(column.type):
        return of_plain(_sums_of_words(values, starts), column.type) if function == "sum" else None
    match function:
        case "sum":
            return of_plain(np.add.reduceat(values, starts), column.type)
        case "min":
            least = np.fmin if pa.types.is_floating(column.type) else np.minimum
            return of_plain(least.reduceat(values, starts), column.type)
        case _:
            return of_plain(np.maximum.reduceat(values, starts), column.type)


def _sums_of_words(words: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Sums of integers of 128 bits: halves of their low words, so that nothing overflows, and their high words."""
    low, high, half = words[:, 0], words[:, 1], np.uint64(32)
    first = np.add.reduceat(low & np.uint64(0xFFFFFFFF), starts)
    second = np.add.reduceat(low >> half, starts) + (first >> half)
    found = (first & np.uint64(0xFFFFFFFF)) | (second << half)
    return np.stack([found, np.add.reduceat(high, starts) + (second >> half)], axis=1)


def _sum_of_words(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Sums of integers of 128 bits: a trillion sums of 64 bits fit."""
    low = a[:, 0] + b[:, 0]
    return np.stack([low, a[:, 1] + b[:, 1] + (low < a[:, 0])], axis=1)


def _later(start: pa.Array, size: int) -> pa.Array:
    values = plain(start)
    assert values is not None
    return of_plain((values + size).astype(values.dtype), start.type)


def _finished(output: Output, kind: AccKind, columns: list[pa.Array]) -> pa.Array | None:
    value, wanted = columns[0], output.dtype.arrow
    counts = np.asarray(columns[1]) if len(columns) > 1 else None
    if kind is AccKind.ISUM:
        words = plain(value)
        unsigned = wanted == pa.uint64()
        if words is None or value.type.scale or not (not words[:, 1].any() if unsigned else _fits(words)):
            return None
        value = of_plain(words[:, 0], pa.uint64() if unsigned else pa.int64())
    if output.fn == "mean":
        values = plain(value)
        if values is None or counts is None:
            return None
        value = pa.array(values.astype(np.float64) / np.maximum(counts, 1))
    if value.type != wanted:
        return None
    if counts is None or not output.nullable or counts.all():
        return value
    is_any = pa.array(counts > 0)
    return pc.if_else(is_any, value, pa.scalar(None, wanted))


def _fits(words: np.ndarray) -> bool:
    """Whether numbers of 128 bits fit into 64."""
    return bool((words[:, 1] == (words[:, 0].view(np.int64) >> 63).view(np.uint64)).all())
