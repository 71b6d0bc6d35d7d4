"""Emit: the records of a finalized table as batches, through the steps downstream of the aggregation.

The number of rows of a batch is decided in `kernels/output.py` (`CHUNK_ROWS`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from scalein.arrow_rows import as_numpy, as_type, from_numpy
from scalein.cancellation import DETACHED_ROWS, run_detached
from scalein.dtypes import I32, I64
from scalein.errors import ScaleinError
from scalein.exec.finalize import ListValues, finalize
from scalein.exec.pipeline import run_pipeline
from scalein.exec.tables import OneRecord, RecordCopies
from scalein.ir.exprs import Col, Named
from scalein.ir.internal_names import internal
from scalein.ir.physical import Pipeline, WindowAggregate, identity
from scalein.ir.stages import Collect, FromTable, Stage
from scalein.ir.tables import Table
from scalein.kernels.call import kernel
from scalein.kernels.output import MAX_TEXT_BYTES, collect_chunks
from scalein.kernels.prepare import Prepared
from scalein.llvm_backend.cache import Compiled
from scalein.options import Options

if TYPE_CHECKING:
    from scalein.exec.join_build import JoinTable
    from scalein.exec.tables import State

BRIEF_ROWS = 1 << 16  # for fewer groups, optimizing the loop takes longer than it saves


class Emitter:
    """The kernel that reads the records of groups and writes columns.

    Downstream steps are fused into that kernel, unless a key is stored as a dictionary id or they join: then groups
    become batches first.
    """

    def __init__(self, node: WindowAggregate, downstream: Pipeline | None, joins: dict[int, JoinTable],
                 options: Options) -> None:
        self._node, self._downstream, self._joins, self.options = node, downstream, joins, options
        self._schema = node.schema.arrow
        self._kernels: dict[tuple[int, bool, bool], tuple[Table, Compiled, tuple[Named, ...]]] = {}

    def over(self, node: WindowAggregate, options: Options) -> Emitter:
        """An emitter for the same groups, made of other columns, with the same downstream steps."""
        return Emitter(node, self._downstream, self._joins, options)

    def emit(self, prepared: Prepared, table: Table, states: Iterable[State]) -> Iterator[pa.RecordBatch]:
        """All groups of some states."""
        return self.after((batch for state in states for batch in self._groups(prepared, table, state)), table)

    def empty_result(self, one: bool) -> Iterator[pa.RecordBatch]:
        """The result of no input: one row if there are no keys, else none."""
        if not one:
            return iter(())
        table = self._node.table
        return self.after(self._groups(None, table, OneRecord(table, self.options)), table)

    def is_fused(self, table: Table) -> bool:
        is_plain = not table.has_lists and not any(key.coded for key in table.keys)
        return self._downstream is not None and not self._joins and is_plain

    def kernel(self, table: Table, window_slices: int = 0, brief: bool = False,
               picked: bool = False) -> tuple[Compiled, tuple[Named, ...]]:
        """The kernel over the table's records, or over those that are picked, and the columns it writes."""
        known = self._kernels.get((window_slices, brief, picked))
        if known is None or known[0] is not table:
            found = self._compiled(table, window_slices, brief, picked)
            known = self._kernels[window_slices, brief, picked] = (table, *found)
        return known[1:]

    def _compiled(self, table: Table, window_slices: int, brief: bool,
                  picked: bool) -> tuple[Compiled, tuple[Named, ...]]:
        sparse = bool(table.keys or table.window)
        reader = FromTable(table, window_slices, sparse, picked=picked)
        if self.is_fused(table):
            assert self._downstream is not None
            steps, items = self._downstream.steps, self._downstream.items
        else:
            steps, items = (), self._raw(table)
        return kernel(Stage("emit", reader, steps, Collect(items), brief), self.options), items

    def _raw(self, table: Table) -> tuple[Named, ...]:
        """The table's columns; a dictionary key as its id, a list as the start and the number of its values."""
        items = []
        coded = {key.name: key for key in table.keys if key.coded}
        lists = {output.name for output in table.outputs if output.is_list}
        for item in identity(table.schema):
            if item.name in coded:
                items.append(Named(item.name, Col(internal(f"id.{item.name}"), I32, coded[item.name].nullable)))
            elif item.name in lists:
                items += [Named(item.name, Col(internal(f"{part}.{item.name}"), I64, False))
                          for part in ("start", "count")]
            else:
                items.append(item)
        return tuple(items)

    def _groups(self, prepared: Prepared | None, table: Table, state: State) -> Iterator[pa.RecordBatch]:
        compiled, items = self.kernel(table, brief=state.count <= BRIEF_ROWS)
        frame = compiled.kernel.frame.new()
        frame["source"] = state.first
        frame.keep["source"] = state
        frame["row"], frame["end"] = 0, state.count
        lists = finalize(table, state, self.options)
        for arrays in collect_chunks(compiled, frame, items, state.count):
            for part in _with_lists(arrays, table, lists) if lists else [arrays]:
                yield self.batch(part, prepared, table)

    def picked(self, prepared: Prepared, table: Table, state: State | RecordCopies,
               numbers: np.ndarray) -> Iterator[pa.RecordBatch]:
        """The groups of some records, by their numbers; for tables whose groups are in their records alone."""
        compiled, items = self.kernel(table, picked=True)
        frame = compiled.kernel.frame.new()
        frame["source"] = state.first
        frame.keep["source"] = state
        frame.point("picked", np.ascontiguousarray(numbers, np.int64))
        frame["row"], frame["end"] = 0, len(numbers)
        for arrays in collect_chunks(compiled, frame, items, len(numbers)):
            yield self.batch(arrays, prepared, table)

    def batch(self, arrays: list[pa.Array], prepared: Prepared | None, table: Table) -> pa.RecordBatch:
        """Columns as a batch of the aggregation's schema, or of the fused pipeline's."""
        if self.is_fused(table):
            assert self._downstream is not None
            return pa.RecordBatch.from_arrays(arrays, schema=self._downstream.schema.arrow)
        schema = self._schema
        if prepared is not None:
            arrays = [self._decoded(a, k, prepared, table) for k, a in enumerate(arrays)]
        arrays = [as_type(a, f.type) for a, f in zip(arrays, schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _decoded(self, array: pa.Array, position: int, prepared: Prepared, table: Table) -> pa.Array:
        """Dictionary ids as the strings they stand for."""
        if position >= len(table.keys) or not table.keys[position].coded:
            return array
        return prepared.key_values(position).take(array)

    def after(self, groups: Iterator[pa.RecordBatch], table: Table) -> Iterator[pa.RecordBatch]:
        """Groups as batches through the downstream steps that were not fused."""
        if self._downstream is None or self.is_fused(table):
            return groups
        return run_pipeline(self._downstream, groups, self._joins, self.options, None)


def _with_lists(arrays: list[pa.Array], table: Table, lists: dict[int, ListValues]) -> Iterator[list[pa.Array]]:
    """Starts and counts of values as lists, split until each piece fits Arrow's offsets.

    Groups are in the order of their records, as their values are.
    """
    width = len(table.keys) + 2 * (table.window is not None)
    columns, rest, rows = list(arrays[:width]), iter(arrays[width:]), len(arrays[0])
    for output in table.outputs:
        if not output.is_list:
            columns.append(next(rest))
            continue
        starts, counts = as_numpy(next(rest)), as_numpy(next(rest))
        offsets = np.concatenate((starts, starts[-1:] + counts[-1:])) if rows else np.zeros(1, np.int64)
        values, arrow = _piece(lists[output.accs[0]], int(offsets[0]), int(offsets[-1])), output.dtype.arrow
        if values is None and rows <= 1:
            raise ScaleinError(f"a list of {output.name!r} has more text or values than an Arrow list can hold",
                               found="more than 2 GiB", hint="cast the column to pa.large_string(), or filter it")
        if values is None:
            half = rows // 2
            for part in ([a.slice(0, half) for a in arrays], [a.slice(half) for a in arrays]):
                yield from _with_lists(part, table, lists)
            return
        cast = partial(values.cast, arrow.value_type)
        values = run_detached(cast) if len(values) > DETACHED_ROWS and values.type != arrow.value_type else cast()
        columns.append(pa.ListArray.from_arrays(from_numpy((offsets - offsets[0]).astype(np.int32)), values,
                                                type=arrow))
    yield columns


def _piece(list_values: ListValues, first: int, end: int) -> pa.Array | None:
    """Some values of a list, or None if they are too many for one array."""
    before = list_values.bytes_before
    size = 0 if before is None else int(before[end] - before[first])
    return None if max(end - first, size) > MAX_TEXT_BYTES else list_values.values.slice(first, end - first)
