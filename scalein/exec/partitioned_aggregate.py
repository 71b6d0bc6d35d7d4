"""Aggregation of more than memory holds: rows are partitioned by the hash of their keys, spilled, and aggregated one
partition at a time.

It is for groups that are larger than their records: with values of which all are needed (quantiles, lists, distinct
values) or with text; `radix.py` spills those of fixed size. What is spilled are keys and arguments, as Arrow batches. A
key is in one partition, so the groups of a partition are complete. A partition that is too large is partitioned again,
by other bits of the hash. The rows of one key cannot be divided: they are aggregated in memory, however many they are.
Rows of a key stay in the order of the input.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import pyarrow as pa

from scalein.exec.pipeline import run_pipeline
from scalein.exec.spill_file import SpillFile
from scalein.exec.spill_partitions import SpillPartitions, drained, hash_items, read_within
from scalein.ir import ops
from scalein.ir.exprs import Col, Expr, Named, type_of
from scalein.ir.internal_names import internal
from scalein.ir.physical import Pipeline, Scan, WindowAggregate
from scalein.ir.tables import AccKind, Table
from scalein.kernels.prepare import table_exprs

if TYPE_CHECKING:
    from scalein.exec.aggregate import HashAggregate

WORKING_FACTOR = 6  # bytes that aggregating a partition takes for each byte of its rows


def holds_all_values(table: Table) -> bool:
    """Whether groups take memory for each of their rows."""
    return any(acc.kind in (AccKind.VALUES, AccKind.LIST) for acc in table.accs)


def holds_more_than_records(table: Table, keys: tuple[Expr, ...]) -> bool:
    """Whether groups have side state or text."""
    return table.has_sides or any(type_of(e).is_bytes for e in (*keys, *table_exprs(table)))


def run_partitioned(run: HashAggregate, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The groups of an aggregation with keys, in the memory of its account."""
    node, account = _over_columns(run.node), run.account.child()
    assert account.limit is not None
    rows = run_pipeline(_arguments(run.node), batches, run.joins, run.options, None)
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
            yield from _aggregate(run, node, iter(part))


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


def _arguments(node: WindowAggregate) -> Pipeline:
    """Keys and arguments as columns, and the hash of each key."""
    items = [Named(name, expr) for expr, name in _fields(node).items()]
    return Pipeline(node.input, node.steps, (*items, *hash_items(node.keys)), node.joins, "partition")


def _over_columns(node: WindowAggregate) -> WindowAggregate:
    """The same aggregation over these columns."""
    fields = {expr: Col(name, type_of(expr), expr.nullable) for expr, name in _fields(node).items()}
    table = node.table
    window = None if table.window is None else replace(table.window, time=fields[table.window.time])
    table = replace(table, accs=tuple(acc.over(fields.__getitem__) for acc in table.accs), window=window)
    schema = _arguments(node).schema.arrow
    source = ops.Source("spilled", schema, tuple(schema.names))
    return WindowAggregate(Scan(source), (), table, tuple(fields[key] for key in node.keys))
