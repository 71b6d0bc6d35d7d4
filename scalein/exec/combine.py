"""Combines partial groups whose positions are known already, next to those of a store or a file, and finishes them.

Both are done by kernels made of the accumulators' own code (`ir.stages.FromPartials`): groups of one key stand side by
side in a row, so no key is hashed or compared, and no table is needed. Accumulators that hold text need the heap of a
table: they are grouped by the position.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property

import numpy as np
import pyarrow as pa

from scalein.arrow_rows import as_numpy, as_type, from_numpy, scattered, taken
from scalein.dtypes import I64, Field, Schema
from scalein.exec.bounded import Program
from scalein.ir import ops
from scalein.ir.exprs import Col
from scalein.ir.internal_names import internal
from scalein.ir.partials import TwoPhase
from scalein.ir.physical import Scan, WindowAggregate, identity
from scalein.ir.stages import Collect, FromPartials, Read, Stage, side_column
from scalein.ir.tables import Key, Slicing, Table
from scalein.kernels.bind import bind, form_of, has_nulls
from scalein.kernels.call import kernel
from scalein.kernels.output import collect_chunks
from scalein.llvm_backend.cache import Compiled
from scalein.options import Options

_NUMBER = internal("number")


class Combiner:
    """Combines and finishes the partial groups of one aggregation."""

    def __init__(self, two: TwoPhase, options: Options) -> None:
        self._two, self._options = two, options
        self.names = two.values.names
        self.functions = two.functions if two.is_by_column else None
        self._has_text = two.combine.table.has_heap
        self._pairs = _SideBySide(two.combine.table, two.values, 2)
        self._whole = _SideBySide(two.final.table, two.values, 1)

    def combine_pairs(self, left: pa.RecordBatch, right: pa.RecordBatch) -> list[pa.Array]:
        """The value columns of `left` combined with those of `right`, row by row."""
        if self._has_text:
            both = pa.concat_batches([left.select(self.names), right.select(self.names)])
            return self._by_number(both, np.tile(np.arange(left.num_rows), 2))
        return self._pairs.run((left, right), self._options)

    def combine_numbered(self, rows: pa.RecordBatch, numbers: np.ndarray) -> pa.RecordBatch:
        """The combined values of all rows of each number, in the order of the numbers: 0, 1, 2, ... without gaps."""
        rows = rows.select(self.names)
        if self._has_text:
            return pa.RecordBatch.from_arrays(self._by_number(rows, numbers), names=self.names)
        if not (np.diff(numbers) >= 0).all():
            rows = rows.take(from_numpy(np.argsort(numbers, kind="stable")))
        columns, counts = rows.columns, np.bincount(numbers)
        while len(columns[0]) > len(counts):  # each time, two neighbours of one number become one row
            columns, counts = self._halved(columns, counts), (counts + 1) // 2
        return pa.RecordBatch.from_arrays(columns, names=self.names)

    def _halved(self, columns: list[pa.Array], counts: np.ndarray) -> list[pa.Array]:
        """Rows in the order of their numbers, of which there are `counts`, with every second one combined into the one
        before.
        """
        starts = np.repeat(np.cumsum(counts) - counts, counts)
        is_right = ((np.arange(len(starts)) - starts) & 1).astype(bool)
        left, right = np.flatnonzero(~is_right), np.flatnonzero(is_right)
        pairs = (pa.RecordBatch.from_arrays([taken(column, from_numpy(at)) for column in columns], names=self.names)
                 for at in (right - 1, right))
        combined = self.combine_pairs(*pairs)
        if len(left) == len(right):
            return combined
        is_pair = np.append(is_right, False)[left + 1]
        return [scattered(taken(column, from_numpy(left)), np.flatnonzero(is_pair), values)
                for column, values in zip(columns, combined, strict=True)]

    # --- results

    def finish(self, rows: pa.RecordBatch) -> pa.RecordBatch | None:
        """The results of complete groups, row by row; None where results are of several rows, or text is computed."""
        table, schema = self._two.final.table, self._two.final.schema.arrow
        if self._has_text or (table.window is not None and (table.window.cumulates or not table.window.is_tumbling)):
            return None
        columns = [rows.column(key.name) for key in table.keys]
        if table.window is not None:
            columns += [start := rows.column("window_start"), _plus(start, table.window_slices * table.slice_size)]
        columns += self._whole.run((rows,), self._options)
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    # --- text

    def _by_number(self, rows: pa.RecordBatch, numbers: np.ndarray) -> list[pa.Array]:
        given = rows.add_column(0, pa.field(_NUMBER, pa.int64(), False), from_numpy(numbers))
        found = pa.concat_batches(list(self._numbered.run([given], self._options)))
        order = from_numpy(np.argsort(np.asarray(found.column(_NUMBER)), kind="stable"))
        return [taken(found.column(name), order) for name in self.names]

    @cached_property
    def _numbered(self) -> Program:
        """The `combine` phase, by numbers instead of keys."""
        values = self._two.values
        source = ops.Source("partials", Schema((Field(_NUMBER, I64, False), *values)).arrow, (_NUMBER, *values.names))
        table = replace(_without_keys(self._two.combine.table), keys=(Key(_NUMBER, I64, False),))
        return Program(WindowAggregate(Scan(source), (), table, (Col(_NUMBER, I64, False),)))


class _SideBySide:
    """A kernel over rows of `sides` partial groups each, which gives the outputs of a table."""

    def __init__(self, table: Table, values: Schema, sides: int) -> None:
        self._table, self._values, self._sides = _without_keys(table), values, sides
        self._items = identity(Schema(tuple(Field(o.name, o.dtype, o.nullable) for o in table.outputs)))
        self._types = [output.dtype.arrow for output in table.outputs]
        self._kernels: dict[tuple[Read, ...], Compiled] = {}

    def run(self, sides: Iterable[pa.RecordBatch], options: Options) -> list[pa.Array]:
        columns, reads = list[pa.Array](), list[Read]()
        for side, rows in enumerate(sides):
            for field in self._values:
                column = rows.column(field.name)
                columns.append(column)
                reads.append(Read(side_column(side, field.name), field.dtype, form_of(column.type), has_nulls(column)))
        compiled = self._kernel(tuple(reads), options)
        frame = compiled.kernel.frame.new()
        for column, read in zip(columns, reads, strict=True):
            bind(frame, column, read)
        frame["row"], frame["end"] = 0, len(columns[0])
        chunks = list(collect_chunks(compiled, frame, self._items, len(columns[0])))
        found = [pa.concat_arrays(parts) if len(parts) > 1 else parts[0] for parts in zip(*chunks, strict=True)]
        return [as_type(array, arrow) for array, arrow in zip(found, self._types, strict=True)]

    def _kernel(self, reads: tuple[Read, ...], options: Options) -> Compiled:
        if reads not in self._kernels:
            reader = FromPartials(reads, self._table, self._sides)
            self._kernels[reads] = kernel(Stage("combine", reader, (), Collect(self._items)), options)
        return self._kernels[reads]


def _plus(times: pa.Array, size: int) -> pa.Array:
    """Times without nulls, `size` units later."""
    numbers = times.view(f"int{times.type.bit_width}")
    return from_numpy((as_numpy(numbers) + size).astype(numbers.type.to_pandas_dtype())).view(times.type)


def _without_keys(table: Table) -> Table:
    return replace(table, keys=(), window=None, slicing=Slicing.NONE, slice_size=0)
