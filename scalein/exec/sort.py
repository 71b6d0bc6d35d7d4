"""Order: all rows sorted, or the first of them found in one pass.

A sort holds its whole input. The first `count` rows are found with room for `count` rows and a piece of a batch: a
row that cannot be among them, because as many better ones are known, is dropped by comparing its first key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from scalein.exec import array_limits
from scalein.exec.places import Rows, places
from scalein.interp.taking import taken
from scalein.ir.physical import Ordered
from scalein.kernels.bind import conformed

RESULT_ROWS = 1 << 18  # of a batch that comes out
PIECE_ROWS = 1 << 16  # looked at together, and held beside the best rows so far


def run_ordered(node: Ordered, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows of a node in their order."""
    schema = node.schema.arrow
    held = pa.schema([field.with_type(_held(field.type)) for field in schema])
    rows = (part for batch in batches if batch.num_rows for part in array_limits.light(batch))
    found = _sorted(node, rows, held) if node.count is None else _first_rows(node, rows, held, node.count)
    return (conformed(batch, schema) for batch in found)


def _held(kind: pa.DataType) -> pa.DataType:
    """The type in which a column is held: pyarrow takes no rows of a view."""
    if pa.types.is_string_view(kind):
        return pa.large_string()
    return pa.large_binary() if pa.types.is_binary_view(kind) else kind


def _sorted(node: Ordered, batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    yield from _in_order(node, [conformed(batch, schema) for batch in batches], schema, None)


def _in_order(node: Ordered, parts: list[pa.RecordBatch], schema: pa.Schema,
              count: int | None) -> Iterator[pa.RecordBatch]:
    """The rows of some batches in order, or the first of them; text that was too much for one array is large."""
    table = pa.Table.from_batches(parts, schema)
    parts.clear()
    columns = [array_limits.Held(column) for column in table.columns]
    del table
    order = _places(node, {name: column.arrays[0] for name, column in zip(schema.names, columns, strict=True)})[:count]
    heavy = [column.weights[order] for column in columns if column.weights is not None]
    for start, stop in array_limits.cuts(len(order), RESULT_ROWS, array_limits.together(heavy)):
        part = order[start:stop]
        yield pa.RecordBatch.from_arrays([column.take(part) for column in columns], schema.names)


def _first_rows(node: Ordered, batches: Iterator[pa.RecordBatch], schema: pa.Schema,
                count: int) -> Iterator[pa.RecordBatch]:
    best = _Best(node, schema, count)
    if count:
        for batch in batches:
            for start in range(0, batch.num_rows, PIECE_ROWS):
                best.add(batch.slice(start, PIECE_ROWS))
    yield from best.settled()


class _Best:
    """The best rows so far, in order, and newer ones that may be among them."""

    def __init__(self, node: Ordered, schema: pa.Schema, count: int) -> None:
        self._node, self._schema, self._count = node, schema, count
        self._parts: list[pa.RecordBatch] = []
        self._rows = 0
        self._worst: pa.Scalar | None = None  # first key of the last row that is still good enough

    def add(self, piece: pa.RecordBatch) -> None:
        if self._worst is not None:
            piece = _at(piece, pc.indices_nonzero(self._may_enter(piece)))
        if not piece.num_rows:
            return
        self._parts.append(conformed(piece, self._schema))
        self._rows += piece.num_rows
        # Sorting again only when there are as many new rows as old ones keeps it at a few times their number.
        if self._rows >= 2 * self._count + PIECE_ROWS or (self._worst is None and self._rows >= self._count):
            self.settled()

    def settled(self) -> list[pa.RecordBatch]:
        """The best rows in their order, and nothing else is kept."""
        if not self._parts:
            return []
        found = _in_order(self._node, self._parts, self._schema, self._count)
        self._parts = [conformed(batch, self._schema) for batch in found]
        self._rows = sum(batch.num_rows for batch in self._parts)
        if self._rows == self._count:
            self._worst = _comparable(self._parts[-1].column(self._node.by[0][0]))[-1]
        return self._parts

    def _may_enter(self, piece: pa.RecordBatch) -> pa.Array:
        """Which rows have a first key as good as the worst one kept; better, where nothing else could decide."""
        name, descending = self._node.by[0]
        alone, nulls_last = len(self._node.by) == 1, self._node.nulls_last
        key, worst = _comparable(piece.column(name).cast(self._schema.field(name).type)), self._worst
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


def _at(batch: pa.RecordBatch, places: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([taken(column, places) for column in batch.columns], schema=batch.schema)


def _places(node: Ordered, columns: dict[str, pa.Array]) -> Rows:
    """The rows' places in the order of the node's keys; a key is one array, since no list is a key."""
    return places([(_comparable(columns[name]), way) for name, way in node.by], node.nulls_last)


def _comparable(column: pa.Array) -> pa.Array:
    """The column as values that pyarrow compares."""
    kind = column.type
    if pa.types.is_boolean(kind):
        return column.cast(pa.uint8())
    return column.cast(pa.large_binary()) if pa.types.is_fixed_size_binary(kind) else column
