"""Aggregation of more than memory holds: rows are partitioned by the hash of their keys, spilled, and aggregated one
partition at a time.

It is for groups that are larger than their records: with values of which all are needed (quantiles, lists, distinct
values) or with text; `radix.py` spills those of fixed size. What is spilled are keys and arguments, as Arrow batches. A
key is in one partition, so the groups of a partition are complete. A partition that is too large is partitioned again,
by other bits of the hash. The rows of one key, or of an aggregation without keys, cannot be divided. The numbers whose
quantiles are asked for are then reduced to the few that these depend on (`order_statistics.py`), as equal ones take no
memory. Lists and distinct values of one group are in memory, however many they are. Rows of a key stay in the order of
the input.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from scalein.arrow_rows import as_numpy
from scalein.dtypes import BOOL
from scalein.exec.order_statistics import floats_of, quantile_neighbours, reduced, words_of
from scalein.exec.pipeline import run_pipeline
from scalein.exec.spill_file import SpillFile
from scalein.exec.spill_partitions import SpillPartition, SpillPartitions, drained, hash_items, read_within
from scalein.ir import ops
from scalein.ir.exprs import Call, Col, Expr, Named, type_of
from scalein.ir.internal_names import internal
from scalein.ir.passes.aggregate_layout import distinct_table
from scalein.ir.physical import Pipeline, Scan, WindowAggregate
from scalein.ir.stages import DedupStep, FilterStep
from scalein.ir.tables import AccKind, Table
from scalein.kernels.prepare import table_exprs
from scalein.options import Options

if TYPE_CHECKING:
    from scalein.exec.aggregate import HashAggregate

WORKING_FACTOR = 6  # bytes that aggregating a partition takes for each byte of its rows
PIECE_ROWS = 1 << 17  # whose numbers are reduced and aggregated at once


def holds_all_values(table: Table) -> bool:
    """Whether groups take memory for each of their rows."""
    return any(acc.kind in (AccKind.VALUES, AccKind.LIST) for acc in table.accs)


def must_be_whole(table: Table) -> bool:
    """Whether all rows of a group must be together before any is counted."""
    return table.needs_two_passes or holds_all_values(table)


def has_quantiles(table: Table) -> bool:
    return any(acc.kind is AccKind.VALUES for acc in table.accs)


def holds_more_than_records(table: Table, keys: tuple[Expr, ...]) -> bool:
    """Whether groups have side state or text."""
    return table.has_sides or any(type_of(e).is_bytes for e in (*keys, *table_exprs(table)))


def run_partitioned(run: HashAggregate, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The groups of an aggregation, in the memory of its account."""
    node, account = over_columns(run.node), run.account.child()
    assert account.limit is not None
    rows = run_pipeline(arguments_of(run.node), batches, run.joins, run.options, None)
    file: SpillFile | None = None
    try:
        waiting, is_all = read_within(account, rows, WORKING_FACTOR)
        if is_all:
            yield from _aggregate(run, node, iter(waiting))
            return
        account.release()
        file = SpillFile()
        parts = SpillPartitions(file, node.input.schema.arrow, account.limit)
        for batch in chain(drained(waiting), rows):
            parts.add(batch)
        parts.flush()
        yield from _groups(run, node, parts)
    finally:
        account.release()
        if file is not None:
            file.close()


def _groups(run: HashAggregate, node: WindowAggregate, parts: SpillPartitions) -> Iterator[pa.RecordBatch]:
    for part in parts.parts:
        if parts.must_divide(part, WORKING_FACTOR):
            yield from _groups(run, node, parts.divided(part))
        elif part.rows:
            is_reducible = has_quantiles(node.table) and node.table.window is None
            if is_reducible and parts.is_large(part, WORKING_FACTOR) and _has_one_key(node, part, run.options):
                yield from _aggregate(run, *_with_reduced_values(node, part))
            else:
                yield from _aggregate(run, node, iter(part))


def _has_one_key(node: WindowAggregate, part: SpillPartition, options: Options) -> bool:
    """Whether all rows of a partition are of one group. Different keys may have one hash."""
    if not node.keys or not part.has_one_hash:
        return not node.keys
    keys = tuple(Named(f"key{k}", key) for k, key in enumerate(node.keys))
    first_rows = Pipeline(node.input, (DedupStep(distinct_table(keys), node.keys),), keys, (), "distinct")
    groups = 0
    for batch in run_pipeline(first_rows, iter(part), {}, options, None):
        groups += batch.num_rows
        if groups > 1:
            return False
    return True


def _with_reduced_values(node: WindowAggregate,
                         part: SpillPartition) -> tuple[WindowAggregate, Iterator[pa.RecordBatch]]:
    """The same aggregation of one group, and its rows with additional columns, from which quantiles are computed."""
    table = node.table
    shares: dict[str, set[float]] = {}  # of the quantiles, by the column of their numbers
    for acc in table.accs:
        if acc.kind is AccKind.VALUES:
            assert isinstance(acc.arg, Col)
            shares.setdefault(acc.arg.name, set()).update(share for _, share in table.quantiles_of(acc))

    def pieces() -> Iterator[pa.RecordBatch]:
        return (batch.slice(start, PIECE_ROWS) for batch in part for start in range(0, batch.num_rows, PIECE_ROWS))

    def words(name: str) -> Iterator[np.ndarray]:
        return (words_of(as_numpy(batch.column(name).drop_null())) for batch in pieces())

    statistics = {name: quantile_neighbours(partial(words, name), sorted(ours)) for name, ours in shares.items()}
    ranked = {name: internal(f"ranked.{name}") for name in shares}
    accs = tuple(replace(acc, arg=replace(acc.arg, name=ranked[acc.arg.name]))
                 if acc.kind in (AccKind.VALUES, AccKind.QUANTILE) and isinstance(acc.arg, Col) else acc
                 for acc in table.accs)  # fmt: skip
    fields = [pa.field(name, pa.float64()) for name in ranked.values()]
    schema = pa.schema([*part.schema, *fields])
    source = ops.Source("spilled", schema, tuple(schema.names))
    rows = (pa.RecordBatch.from_arrays([*batch.columns, *(_reduced(batch.column(name), found)
                                                          for name, found in statistics.items())], schema=schema)
            for batch in pieces())  # fmt: skip
    return replace(node, input=Scan(source), table=replace(table, accs=accs)), rows


def _reduced(column: pa.Array, statistics: np.ndarray) -> pa.Array:
    """The numbers of a column, reduced to order statistics; nulls stay null."""
    if not len(statistics):
        return column
    valid = column.is_valid()
    numbers = floats_of(reduced(words_of(as_numpy(column)), statistics))
    assert valid.offset == 0
    return pa.Array.from_buffers(column.type, len(column), [valid.buffers()[1], pa.py_buffer(numbers)])


def _aggregate(run: HashAggregate, node: WindowAggregate,
               batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    from scalein.exec.aggregate import HashAggregate

    options = replace(run.options, memory=None)
    partition = HashAggregate(node, {}, options, None, run.emitter.over(node, options))
    yield from partition.run(batches)
    partition.release()


def _fields(node: WindowAggregate) -> dict[Expr, str]:
    """The names of the columns in which keys and arguments are spilled."""
    exprs = dict.fromkeys((*node.keys, *table_exprs(node.table)))
    return {expr: internal(f"field{k}") for k, expr in enumerate(exprs)}


def arguments_of(node: WindowAggregate) -> Pipeline:
    """Keys and arguments as columns, and the hash of each key."""
    items = [Named(name, expr) for expr, name in _fields(node).items()]
    window = node.table.window
    times = () if window is None else tuple(
        FilterStep(Call("is_not_null", (e,), dtype=BOOL, nullable=False)) for e in window.exprs if e.nullable)
    return Pipeline(node.input, (*node.steps, *times), (*items, *hash_items(node.keys)), node.joins, "partition")


def over_columns(node: WindowAggregate) -> WindowAggregate:
    """The same aggregation over these columns."""
    fields = {expr: Col(name, type_of(expr), expr.nullable) for expr, name in _fields(node).items()}
    table = node.table
    window = None if table.window is None else table.window.over(fields.__getitem__)
    table = replace(table, accs=tuple(acc.over(fields.__getitem__) for acc in table.accs), window=window)
    schema = arguments_of(node).schema.arrow
    source = ops.Source("spilled", schema, tuple(schema.names))
    return WindowAggregate(Scan(source), (), table, tuple(fields[key] for key in node.keys))
