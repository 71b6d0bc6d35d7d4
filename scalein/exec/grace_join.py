"""Grace hash join: a join whose table is larger than memory.

The table's rows are partitioned by the hash of their keys and spilled, then so are the rows that probe it, with their
numbers. Partitions are joined one after the other, each by the same kernels as a table in memory. Their outputs are
sorted runs, by the number of the probing row; merged, they are in the order that a join in memory gives. A partition
that is too large is partitioned again; the rows of one key cannot be divided, and are joined in memory.

Tables of right and outer joins, whose matches are marked, are always held in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import pyarrow as pa

from scalein.arrow_rows import from_numpy
from scalein.dtypes import I64, Field, Schema
from scalein.exec.external_sort import SortedRuns
from scalein.exec.join_build import JoinTable, build
from scalein.exec.pipeline import run_pipeline
from scalein.exec.spill_file import SpillFile
from scalein.exec.spill_partitions import SpillPartitions, drained, hash_items, read_within
from scalein.ir import ops
from scalein.ir.exprs import Col, Expr, Named, type_of, walk
from scalein.ir.internal_names import internal
from scalein.ir.physical import JoinBuild, Node, Pipeline, Scan, Sort, WindowAggregate, identity
from scalein.ir.stages import Probe, ProjectStep, Step, step_exprs
from scalein.kernels.bind import conformed
from scalein.kernels.prepare import table_exprs
from scalein.memory import MemoryAccount
from scalein.options import Options

WORKING_FACTOR = 5  # bytes that a table in memory takes, while it is built, for each byte of its rows
NUMBER = internal("probing")  # the number of a probing row, beside the numbers that others give rows


class SpilledTable:
    """The rows of a join's table, partitioned by the hash of their keys."""

    def __init__(self, table: JoinBuild, parts: SpillPartitions) -> None:
        self.table, self.parts = table, parts


def read_table(table: JoinBuild, batches: Iterator[pa.RecordBatch], options: Options,
               account: MemoryAccount) -> JoinTable | SpilledTable:
    """The table of a join: in memory if the account allows it, and then reserved there."""
    assert account.limit is not None
    read, is_all = read_within(account, batches, WORKING_FACTOR)
    if is_all:
        return build(table, iter(read), options)
    account.release()
    rows = Pipeline(table.input, (), (*identity(table.input.schema), *hash_items(table.keys)), (), "partition")
    parts = SpillPartitions(SpillFile(), rows.schema.arrow, account.limit)
    for batch in run_pipeline(rows, chain(drained(read), batches), {}, options, None):
        parts.add(batch)
    parts.flush()
    return SpilledTable(table, parts)


def join_spilled(node: Pipeline | WindowAggregate, rows: Iterator[pa.RecordBatch],
                 tables: Mapping[int, JoinTable | SpilledTable],
                 options: Options) -> tuple[Pipeline | WindowAggregate, Iterator[pa.RecordBatch]]:
    """The rest of a node after its last join with a spilled table, and the rows that reach it."""
    while (at := next((k for k, step in enumerate(node.steps)
                       if isinstance(step, Probe) and isinstance(tables[step.table], SpilledTable)), None)) is not None:
        node, rows = _cut(node, at, rows, tables, options)
    return node, rows


def _cut(node: Pipeline | WindowAggregate, at: int, rows: Iterator[pa.RecordBatch],
         tables: Mapping[int, JoinTable | SpilledTable],
         options: Options) -> tuple[Pipeline | WindowAggregate, Iterator[pa.RecordBatch]]:
    probe = node.steps[at]
    assert isinstance(probe, Probe)
    table = tables[probe.table]
    assert isinstance(table, SpilledTable)
    after = node.steps[at + 1 :]
    used = _names(step_exprs(after)) | {name for e in _outputs(node) for name in _names([e])}
    before = _columns_after(node, node.steps[:at])
    carried = [column for name, column in before.items() if name in used | _names(probe.keys)]
    found = _joined_columns(probe, table.table)
    items = tuple(Named(c.name, c) for c in [*carried, *found] if c.name in used)
    first = Pipeline(node.input, node.steps[:at], (*(Named(c.name, c) for c in carried), *hash_items(probe.keys)),
                     node.joins, "partition")
    in_memory = {number: each for number, each in tables.items() if isinstance(each, JoinTable)}
    probing = run_pipeline(first, rows, in_memory, options, None)
    joined = _GraceJoin(probe, table, first.schema, items, options)
    rest = replace(node, input=Scan(_source(joined.schema)), steps=after)
    return rest, joined.run(probing)


class _GraceJoin:
    """The join of two partitioned inputs."""

    def __init__(self, probe: Probe, table: SpilledTable, probing: Schema, items: tuple[Named, ...],
                 options: Options) -> None:
        self._probe, self._table, self._options = probe, table, options
        self._probing = Schema((*probing, Field(NUMBER, I64, False)))
        built = Scan(_source(Schema(tuple(table.table.input.schema))))
        self._build = replace(table.table, input=built)
        number = Col(NUMBER, I64, False)
        self._pipe = Pipeline(Scan(_source(self._probing)), (probe,), (*items, Named(NUMBER, number)),
                              ((probe.table, self._build),), "join")
        self.schema = self._pipe.schema

    def run(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        assert self._options.memory is not None
        limit = self._options.memory
        node = Sort(self._pipe, ((NUMBER, False),), True, None)
        runs = SortedRuns(node, self.schema.arrow, limit)
        file = SpillFile()
        try:
            probing = SpillPartitions(file, self._probing.arrow, limit)
            start = 0
            for batch in rows:
                numbers = from_numpy(np.arange(start, start + batch.num_rows))
                probing.add(pa.RecordBatch.from_arrays([*batch.columns, numbers], schema=self._probing.arrow))
                start += batch.num_rows
            probing.flush()
            self._join(self._table.parts, probing, runs)
            file.close()
            yield from runs.merged()
        finally:
            file.close()
            runs.close()

    def _join(self, built: SpillPartitions, probing: SpillPartitions, runs: SortedRuns) -> None:
        for build_part, probe_part in zip(built.parts, probing.parts, strict=True):
            if not probe_part.rows:
                continue
            if built.must_divide(build_part, WORKING_FACTOR):
                self._join(built.divided(build_part), probing.divided(probe_part), runs)
                continue
            names = self._build.input.schema.names
            table = build(self._build, (batch.select(names) for batch in build_part), self._options)
            joined = run_pipeline(self._pipe, iter(probe_part), {self._probe.table: table}, self._options, None)
            runs.add(conformed(batch, self.schema.arrow) for batch in joined if batch.num_rows)


def _source(schema: Schema) -> ops.Source:
    return ops.Source("spilled", schema.arrow, tuple(schema.names))


def _columns_after(node: Node, steps: Sequence[Step]) -> dict[str, Col]:
    """The columns that there are after some steps of a node."""
    assert isinstance(node, Pipeline | WindowAggregate)
    found = {field.name: Col(field.name, field.dtype, field.nullable) for field in node.input.schema}
    for step in steps:
        if isinstance(step, ProjectStep):
            found = {item.name: Col(item.name, type_of(item.expr), item.expr.nullable) for item in step.items}
        elif isinstance(step, Probe):
            found |= {column.name: column for column in _joined_columns(step, dict(node.joins)[step.table])}
    return found


def _joined_columns(probe: Probe, table: JoinBuild) -> list[Col]:
    fields = table.input.schema
    return [Col(name, fields[column].dtype, fields[column].nullable or probe.how == "left")
            for name, column in probe.keep]


def _outputs(node: Pipeline | WindowAggregate) -> list[Expr]:
    if isinstance(node, Pipeline):
        return [item.expr for item in node.items]
    return [*node.keys, *table_exprs(node.table)]


def _names(exprs: Sequence[Expr]) -> set[str]:
    return {part.name for expr in exprs for part in walk(expr) if isinstance(part, Col)}
