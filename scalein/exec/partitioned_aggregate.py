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

import numpy as np
import pyarrow as pa

from scalein.arrow_rows import as_numpy, from_numpy, taken
from scalein.cancellation import raise_if_cancelled
from scalein.dtypes import I64
from scalein.exec.pipeline import run_pipeline
from scalein.exec.spill_file import SpilledBatches, SpillFile
from scalein.ir import ops
from scalein.ir.exprs import Call, Col, Expr, Named, type_of
from scalein.ir.internal_names import internal
from scalein.ir.physical import Pipeline, Scan, WindowAggregate
from scalein.ir.tables import AccKind, Table
from scalein.kernels.prepare import table_exprs

if TYPE_CHECKING:
    from scalein.exec.aggregate import HashAggregate

HASH = internal("hash")
WORKING_FACTOR = 6  # bytes that aggregating a partition takes for each byte of its rows
BUFFER_SHARE = 16  # of the limit, the rows that wait to be written have 1/16
PARTITIONS_BITS = 5
HASH_BITS = 64


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
    waiting: list[pa.RecordBatch] = []
    file: SpillFile | None = None
    try:
        for batch in rows:
            waiting.append(batch)
            account.reserve(WORKING_FACTOR * batch.nbytes)
            if account.is_under_pressure:
                break
        else:
            yield from _aggregate(run, node, iter(waiting))
            return
        account.release()
        file = SpillFile()
        parts = _Partitions(file, node.input.schema.arrow, 0, account.limit)
        for batch in chain(_drained(waiting), rows):
            parts.add(batch)
        parts.flush()
        yield from _groups(run, node, parts, file, account.limit)
    finally:
        account.release()
        if file is not None:
            file.close()


def _drained(batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The batches, which are removed one by one."""
    batches.reverse()
    while batches:
        yield batches.pop()


def _groups(run: HashAggregate, node: WindowAggregate, parts: _Partitions, file: SpillFile,
            limit: int) -> Iterator[pa.RecordBatch]:
    total = sum(part.rows for part in parts.parts)
    for part in parts.parts:
        raise_if_cancelled()
        is_divisible = part.rows < total and parts.shift + PARTITIONS_BITS < HASH_BITS
        if part.bytes * WORKING_FACTOR > limit and is_divisible:
            inner = _Partitions(file, part.schema, parts.shift + PARTITIONS_BITS, limit)
            for batch in part:
                inner.add(batch)
            inner.flush()
            yield from _groups(run, node, inner, file, limit)
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
    hashes = [Named(f"{HASH}{k}", Call("hash", (key,), (), I64, False)) for k, key in enumerate(node.keys)]
    return Pipeline(node.input, node.steps, (*items, *hashes), node.joins, "partition")


def _over_columns(node: WindowAggregate) -> WindowAggregate:
    """The same aggregation over these columns."""
    fields = {expr: Col(name, type_of(expr), expr.nullable) for expr, name in _fields(node).items()}
    table = node.table
    window = None if table.window is None else replace(table.window, time=fields[table.window.time])
    table = replace(table, accs=tuple(acc.over(fields.__getitem__) for acc in table.accs), window=window)
    schema = _arguments(node).schema.arrow
    source = ops.Source("spilled", schema, tuple(schema.names))
    return WindowAggregate(Scan(source), (), table, tuple(fields[key] for key in node.keys))


class _Partitions:
    """Rows in a spill file, partitioned by some bits of their hash."""

    def __init__(self, file: SpillFile, schema: pa.Schema, shift: int, limit: int) -> None:
        self.shift, self._most = shift, limit // BUFFER_SHARE
        self.parts = [SpilledBatches(file, schema) for _ in range(1 << PARTITIONS_BITS)]
        self._waiting: list[list[pa.RecordBatch]] = [[] for _ in self.parts]
        self._bytes = 0

    def add(self, batch: pa.RecordBatch) -> None:
        raise_if_cancelled()
        numbers = (_hashes(batch) >> np.uint64(self.shift)) & np.uint64((1 << PARTITIONS_BITS) - 1)
        order = np.argsort(numbers.astype(np.uint8), kind="stable")
        ends = np.cumsum(np.bincount(numbers.astype(np.uint8), minlength=len(self.parts)))
        indices = from_numpy(order)
        sorted_ = pa.RecordBatch.from_arrays([taken(column, indices) for column in batch.columns], schema=batch.schema)
        for waiting, start, end in zip(self._waiting, [0, *ends[:-1].tolist()], ends.tolist(), strict=True):
            if end > start:
                waiting.append(sorted_.slice(start, end - start))
        self._bytes += sorted_.nbytes
        if self._bytes > self._most:
            self.flush()

    def flush(self) -> None:
        """Write what is waiting."""
        for part, waiting in zip(self.parts, self._waiting, strict=True):
            if waiting:
                part.add(pa.concat_batches(waiting))
                waiting.clear()
        self._bytes = 0


def _hashes(batch: pa.RecordBatch) -> np.ndarray:
    """The hash of each row's keys."""
    found = np.zeros(batch.num_rows, np.uint64)
    for name in batch.schema.names:
        if name.startswith(HASH):
            found = (found ^ as_numpy(batch.column(name)).view(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
            found ^= found >> np.uint64(29)
    return found
