"""Emit: the records of a finished table through the steps that follow the group, as batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

from scalein.dtypes import I32
from scalein.ir.exprs import Col, Named
from scalein.ir.nodes import Grouped, Pipe
from scalein.ir.passes.split import identity
from scalein.ir.stages import Collect, FromTable, Stage
from scalein.ir.tables import Table
from scalein.llvm_backend.cache import Compiled
from scalein.options import Options
from scalein.runtime.call import kernel
from scalein.runtime.joins import Built
from scalein.runtime.pipe import collected, run_pipe
from scalein.runtime.stages import Prepared
from scalein.runtime.tables import OneRecord

if TYPE_CHECKING:
    from scalein.runtime.merge import State


BRIEF_ROWS = 1 << 16  # compiling a fast loop over fewer groups takes longer than it saves


class Emitter:
    """What happens to a table's groups: fused into one kernel that reads records and writes columns.

    Steps that follow are part of that kernel, unless a key is kept as a dictionary id or they join:
    then the groups come out as batches first.
    """

    def __init__(self, node: Grouped, then: Pipe | None, joins: dict[int, Built], options: Options) -> None:
        self._node, self._then, self._joins, self._options = node, then, joins, options

    def emit(self, prepared: Prepared, table: Table, state: State) -> Iterator[pa.RecordBatch]:
        """All groups of a state."""
        return self.after(self._groups(prepared, table, state), table)

    def nothing(self, one: bool) -> Iterator[pa.RecordBatch]:
        """The result of no input: one row if there are no keys, else none."""
        if not one:
            return iter(())
        table = self._node.table
        return self.after(self._groups(None, table, OneRecord(table)), table)

    def is_fused(self, table: Table) -> bool:
        return self._then is not None and not self._joins and not any(key.coded for key in table.keys)

    def kernel(self, table: Table, window_slices: int = 0, brief: bool = False) -> tuple[Compiled, tuple[Named, ...]]:
        """The kernel over the table's records, and the columns it writes."""
        sparse = bool(table.keys or table.window)
        reader = FromTable(table, window_slices, sparse)
        if self.is_fused(table):
            assert self._then is not None
            steps, items = self._then.steps, self._then.items
        else:
            steps, items = (), self._raw(table)
        return kernel(Stage("emit", reader, steps, Collect(items), brief), self._options), items

    def _raw(self, table: Table) -> tuple[Named, ...]:
        """The table's columns; a dictionary key as its id."""
        items = []
        coded = {key.name: key for key in table.keys if key.coded}
        for item in identity(table.schema):
            if item.name in coded:
                items.append(Named(item.name, Col(f"#id.{item.name}", I32, coded[item.name].nullable)))
            else:
                items.append(item)
        return tuple(items)

    def _groups(self, prepared: Prepared | None, table: Table, state: State) -> Iterator[pa.RecordBatch]:
        compiled, items = self.kernel(table, brief=state.count <= BRIEF_ROWS)
        frame = compiled.kernel.frame.new()
        frame["source"] = state.first
        frame.keep["source"] = state
        frame["row"], frame["end"] = 0, state.count
        for arrays in collected(compiled, frame, items, state.count):
            yield self.batch(arrays, prepared, table)

    def batch(self, arrays: list[pa.Array], prepared: Prepared | None, table: Table) -> pa.RecordBatch:
        """Columns as a batch of the group's schema, or of the fused pipe's."""
        if self.is_fused(table):
            assert self._then is not None
            return pa.RecordBatch.from_arrays(arrays, schema=self._then.schema.arrow)
        schema = self._node.schema.arrow
        if prepared is not None:
            arrays = [self._decoded(a, k, prepared, table) for k, a in enumerate(arrays)]
        arrays = [a if a.type == f.type else a.cast(f.type) for a, f in zip(arrays, schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _decoded(self, array: pa.Array, position: int, prepared: Prepared, table: Table) -> pa.Array:
        """Dictionary ids as the strings they stand for."""
        if position >= len(table.keys) or not table.keys[position].coded:
            return array
        return prepared.key_values(position).take(array)

    def after(self, groups: Iterator[pa.RecordBatch], table: Table) -> Iterator[pa.RecordBatch]:
        """Groups as batches through the steps that were not fused."""
        if self._then is None or self.is_fused(table):
            return groups
        return run_pipe(self._then, groups, self._joins, self._options, None)
