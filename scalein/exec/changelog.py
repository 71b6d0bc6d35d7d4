"""The changelog of a running aggregate: how the rows of a round changed its results, as rows with an `op`.

A group with its first result is an "insert", one whose result changed an "update", one that has no result any more (a
filter downstream of the aggregation dropped it) a "delete" with its last values. Applying the rows in order, by key,
gives what `collect` would give. Each partial group carries a number through the ops after the aggregation, which
identifies its results before and after the round.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalein.arrow_rows import filtered, from_numpy
from scalein.compiler import compile_flow
from scalein.dtypes import I64, Field, Schema
from scalein.errors import BadArgument, SourceLoc
from scalein.exec.bounded import Program
from scalein.exec.fragments import Fragment
from scalein.exec.operator import Batches, Context, FragmentRunner
from scalein.ir import ops
from scalein.ir.exprs import Col, Named
from scalein.ir.internal_names import internal
from scalein.ir.physical import Scan, WindowAggregate
from scalein.ir.rewrite import stacked, stream_path
from scalein.ir.tables import Key

OP = "op"
_ROW = internal("number")
_NUMBER = Col(_ROW, I64, False)


def check(fragment: Fragment, at: SourceLoc) -> None:
    """Refuse flows whose changes cannot be tracked."""
    if OP in fragment.op.schema.names:
        raise BadArgument(f'emit="changes" adds a column {OP!r}, and the flow has one', at=at, hint="rename it")
    if not isinstance(fragment.state, ops.Aggregate):
        return
    if any(isinstance(op, ops.MapBatches) for op in _behind(fragment)):
        raise BadArgument('emit="changes" cannot track a Python function after an aggregation', at=at,
                          step="map_batches", hint='map before the group, or emit="final"')


def _behind(fragment: Fragment) -> list[ops.Op]:
    assert fragment.state is not None
    return stream_path(fragment.op, fragment.state)


class Changelog:
    """From partial groups (or rows) before and after a round to results with an `op`. `final` is the aggregation of
    these.
    """

    def __init__(self, fragment: Fragment, final: WindowAggregate, context: Context) -> None:
        state = fragment.state
        assert isinstance(state, ops.Aggregate) and isinstance(final.input, Scan)  # noqa: PT018
        partials = Schema((*final.input.schema, Field(_ROW, I64, False)))
        self._columns = partials.names
        table = replace(final.table, keys=(*final.table.keys, Key(_ROW, I64, False)))
        source = Scan(ops.Source("partials", partials.arrow, tuple(partials.names)))
        final = replace(final, input=source, table=table, keys=(*final.keys, _NUMBER))
        self._groups = FragmentRunner(fragment.op, context, Program(final), by_row=False)
        fields = final.schema
        groups = ops.Source("groups", fields.arrow, tuple(fields.names))
        downstream = compile_flow(_numbered(fragment.op, state, groups))
        self._behind = FragmentRunner(fragment.op, context, Program(downstream), by_row=False)
        self.is_one_to_one = all(op.is_one_to_one for op in _behind(fragment))  # a group has always one result
        self._names = fragment.op.schema.names

    def between(self, before: pa.RecordBatch, now: pa.RecordBatch, existed: np.ndarray) -> Batches:
        """Changes of groups whose values were `before`, if they existed, and are `now`; row by row."""
        count = now.num_rows
        if self.is_one_to_one:
            new, new_rows = self._results(now, np.arange(count))
            return _changes(new.slice(0, 0), new_rows[:0], new, new_rows, existed)
        there = filtered(before, pa.array(existed))
        return self.of_groups(there, np.flatnonzero(existed), now, np.arange(count), count)

    def of_rows(self, results: Batches, existed: np.ndarray) -> Batches:
        """Changes of groups that have a result each, in their order."""
        if existed.all():  # as a rule
            return [changelog_rows(batch.select(self._names), "update") for batch in results]
        found, start = [], 0
        for batch in results:
            op = pc.if_else(from_numpy(existed[start : start + batch.num_rows]), "update", "insert")
            found.append(batch.select(self._names).append_column(pa.field(OP, pa.string(), False), op))
            start += batch.num_rows
        return found

    def of_groups(self, before: pa.RecordBatch, before_of: np.ndarray, now: pa.RecordBatch, now_of: np.ndarray,
                  count: int) -> Batches:
        """Changes of `count` groups; each row has the number of its group, which may have several rows."""
        old, old_rows = self._results(before, before_of)
        new, new_rows = self._results(now, now_of)
        had, has = (np.bincount(rows, minlength=count) for rows in (old_rows, new_rows))
        return _changes(old, old_rows, new, new_rows, (had == 1) & (has == 1))

    def _results(self, partials: pa.RecordBatch, numbers: np.ndarray) -> tuple[pa.RecordBatch, np.ndarray]:
        """The results of partial groups, and of which each is."""
        given = partials.append_column(_ROW, pa.array(numbers, pa.int64())).select(self._columns)
        batches = self._behind.run(self._groups.run([given]))
        schema = self._behind.program.node.schema.arrow
        found = pa.concat_batches(batches) if batches else pa.RecordBatch.from_pylist([], schema)
        return found.select(self._names), found.column(_ROW).to_numpy()


def _changes(old: pa.RecordBatch, old_rows: np.ndarray, new: pa.RecordBatch, new_rows: np.ndarray,
                same: np.ndarray) -> Batches:
    """The changes from old to new results, each with the number of its group: groups in `same` are updates; otherwise
    old results are deletes and new ones inserts.
    """
    parts = ((old, ~same[old_rows], "delete"), (new, ~same[new_rows], "insert"), (new, same[new_rows], "update"))
    found = [(filtered(table, pa.array(which)), op) for table, which, op in parts]
    return [changelog_rows(batch, op) for batch, op in found if batch.num_rows]


def changelog_rows(batch: pa.RecordBatch, op: str) -> pa.RecordBatch:
    """Rows that say what they are."""
    return batch.append_column(pa.field(OP, pa.string(), False), pa.repeat(pa.scalar(op, pa.string()), batch.num_rows))


def _numbered(op: ops.Op, state: ops.Aggregate, source: ops.Source) -> ops.Op:
    """The ops after an aggregation, over another source, with the number of each row."""
    path = (replace(each, items=(*each.items, Named(_ROW, _NUMBER))) if isinstance(each, ops.Project) else each
            for each in stream_path(op, state))
    return stacked(path, source)
