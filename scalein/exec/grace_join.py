"""Grace hash join: a join whose table is larger than memory.

The table's rows are partitioned by the hash of their keys and spilled, then so are the rows that probe it, with their
numbers. Partitions are joined one after the other, each by the same kernels as a table in memory. Their outputs are
sorted runs, by the number of the probing row; merged, they are in the order that a join in memory gives. A partition
that is too large is partitioned again; the rows of one key cannot be divided, and are joined in memory.

The rows of the table of a right or outer join are numbered, too. What a partition has without a match are runs by that
number, which follow when all partitions are joined, in the table's order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain

import numpy as np
import pyarrow as pa

from scalein.arrow_rows import from_numpy
from scalein.dtypes import I64, Field, Schema
from scalein.exec.external_sort import SortedRuns
from scalein.exec.join_build import JoinTable, build
from scalein.exec.node_cut import columns_after, joined_columns, names_of, scan_of_rows, used_after
from scalein.exec.pipeline import run_pipeline
from scalein.exec.spill_file import SpillFile
from scalein.exec.spill_partitions import SpillPartitions, drained, hash_items, read_within
from scalein.ir.exprs import Col, Named
from scalein.ir.internal_names import internal
from scalein.ir.physical import JoinBuild, OuterJoin, Pipeline, Sort, WindowAggregate, identity
from scalein.ir.stages import Probe
from scalein.kernels.bind import conformed
from scalein.memory import MemoryAccount
from scalein.options import Options

WORKING_FACTOR = 5  # bytes that a table in memory takes, while it is built, for each byte of its rows
OUTER_FACTOR = 7  # the same of an outer join's, whose rows are also there as they were read
NUMBER = internal("probing")  # the number of a probing row, beside the numbers that others give rows
TABLE_NUMBER = internal("table")  # that of a row of the table


class SpilledTable:
    """The rows of a join's table, partitioned by the hash of their keys."""

    def __init__(self, table: JoinBuild, parts: SpillPartitions) -> None:
        self.table, self.parts = table, parts


def read_table(table: JoinBuild, batches: Iterator[pa.RecordBatch], options: Options,
               account: MemoryAccount) -> JoinTable | SpilledTable:
    """The table of a join: in memory if the account allows it, and then reserved there."""
    assert account.limit is not None
    read, is_all = read_within(account, batches, _working_factor(table))
    if is_all:
        return build(table, iter(read), options)
    account.release()
    rows = Pipeline(table.input, (), (*identity(table.input.schema), *hash_items(table.keys)), (), "partition")
    hashed = run_pipeline(rows, chain(drained(read), batches), {}, options, None)
    schema = rows.schema.arrow
    if table.is_outer:
        schema, hashed = _numbered_schema(schema, TABLE_NUMBER), _numbered(hashed, TABLE_NUMBER)
    parts = SpillPartitions(SpillFile(), schema, account.limit)
    for batch in hashed:
        parts.add(batch)
    parts.flush()
    return SpilledTable(table, parts)


def _working_factor(table: JoinBuild) -> int:
    return OUTER_FACTOR if table.is_outer else WORKING_FACTOR


def _numbered_schema(schema: pa.Schema, name: str) -> pa.Schema:
    return schema.append(pa.field(name, pa.int64(), False))


def _numbered(batches: Iterator[pa.RecordBatch], name: str) -> Iterator[pa.RecordBatch]:
    """The rows with their numbers."""
    start = 0
    for batch in batches:
        numbers = from_numpy(np.arange(start, start + batch.num_rows))
        yield pa.RecordBatch.from_arrays([*batch.columns, numbers], schema=_numbered_schema(batch.schema, name))
        start += batch.num_rows


def join_spilled(node: Pipeline | WindowAggregate, rows: Iterator[pa.RecordBatch],
                 tables: Mapping[int, JoinTable | SpilledTable], options: Options, account: MemoryAccount,
                 outer: int | None = None) -> tuple[Pipeline | WindowAggregate, Iterator[pa.RecordBatch]]:
    """The rest of a node after its last join with a spilled table, and the rows that reach it. `outer` is the number of
    one that stays in the rest.
    """
    while (at := next((k for k, step in enumerate(node.steps) if isinstance(step, Probe) and step.table != outer
                       and isinstance(tables[step.table], SpilledTable)), None)) is not None:
        node, joined, probing = _cut(node, at, rows, tables, options, account)
        rows = joined.run(probing)
    return node, rows


def outer_join_spilled(node: OuterJoin, rows: Iterator[pa.RecordBatch],
                       tables: Mapping[int, JoinTable | SpilledTable], options: Options,
                       account: MemoryAccount) -> Iterator[pa.RecordBatch]:
    """The rows of a right or outer join, of whose tables some are spilled: those of its pipeline, then those of its
    table without a match.
    """
    rest, rows = join_spilled(node.input, rows, tables, options, account, outer=node.table)
    table = tables[node.table]
    if isinstance(table, JoinTable):
        marked = table.with_marks()
        in_memory = {number: each for number, each in tables.items() if isinstance(each, JoinTable)}
        assert isinstance(rest, Pipeline)
        yield from run_pipeline(rest, rows, {**in_memory, node.table: marked}, options, None, account)
        yield from marked.unmatched(node.origins, node.schema.arrow)
        return
    rest, joined, probing = _cut(rest, len(rest.steps) - 1, rows, tables, options, account)
    assert isinstance(rest, Pipeline)
    unmatched = joined.collect_unmatched(node)
    try:
        yield from run_pipeline(rest, joined.run(probing), {}, options, None, account)
        yield from (batch.drop_columns([TABLE_NUMBER]) for batch in unmatched.merged())
    finally:
        unmatched.close()


def _cut(node: Pipeline | WindowAggregate, at: int, rows: Iterator[pa.RecordBatch],
         tables: Mapping[int, JoinTable | SpilledTable], options: Options,
         account: MemoryAccount) -> tuple[Pipeline | WindowAggregate, _GraceJoin, Iterator[pa.RecordBatch]]:
    """The rest of a node after a join with a spilled table, that join, and the rows that probe it."""
    probe = node.steps[at]
    assert isinstance(probe, Probe)
    table = tables[probe.table]
    assert isinstance(table, SpilledTable)
    used = used_after(node, at)
    before = columns_after(node, node.steps[:at])
    carried = [column for name, column in before.items() if name in used | names_of(probe.exprs)]
    found = joined_columns(probe, table.table)
    items = tuple(Named(c.name, c) for c in [*carried, *found] if c.name in used)
    first = Pipeline(node.input, node.steps[:at], (*(Named(c.name, c) for c in carried), *hash_items(probe.keys)),
                     node.joins, "partition")
    in_memory = {number: each for number, each in tables.items() if isinstance(each, JoinTable)}
    probing = run_pipeline(first, rows, in_memory, options, None, account)
    joined = _GraceJoin(probe, table, first.schema, items, options)
    rest = replace(node, input=scan_of_rows(joined.schema), steps=node.steps[at + 1 :])
    return rest, joined, probing


class _GraceJoin:
    """The join of two partitioned inputs."""

    def __init__(self, probe: Probe, table: SpilledTable, probing: Schema, items: tuple[Named, ...],
                 options: Options) -> None:
        self._probe, self._table, self._options = probe, table, options
        self._probing = Schema((*probing, Field(NUMBER, I64, False)))
        columns, fields = table.table.columns, tuple(table.table.input.schema)
        if table.table.is_outer:
            columns, fields = (*columns, TABLE_NUMBER), (*fields, Field(TABLE_NUMBER, I64, False))
        self._build = replace(table.table, input=scan_of_rows(Schema(fields)), columns=columns)
        self._factor = _working_factor(table.table)
        self._outer: tuple[OuterJoin, pa.Schema, SortedRuns] | None = None  # of what has no match
        number = Col(NUMBER, I64, False)
        self._pipe = Pipeline(scan_of_rows(self._probing), (probe,), (*items, Named(NUMBER, number)),
                              ((probe.table, self._build),), "join")
        self.schema = self._pipe.schema

    def collect_unmatched(self, node: OuterJoin) -> SortedRuns:
        """The rows of the table without a match, with their numbers; they are there when `run` is at its end."""
        assert self._options.memory is not None
        schema = Schema((*node.schema, Field(TABLE_NUMBER, I64, False)))
        by_number = Sort(scan_of_rows(schema), ((TABLE_NUMBER, False),), True, None)
        runs = SortedRuns(by_number, schema.arrow, self._options.memory)
        self._outer = node, schema.arrow, runs
        return runs

    def run(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The joined rows, in the order of those that probe."""
        assert self._options.memory is not None
        limit = self._options.memory
        node = Sort(self._pipe, ((NUMBER, False),), True, None)
        runs = SortedRuns(node, self.schema.arrow, limit)
        file = SpillFile()
        try:
            probing = SpillPartitions(file, self._probing.arrow, limit)
            for batch in _numbered(rows, NUMBER):
                probing.add(batch)
            probing.flush()
            self._join(self._table.parts, probing, runs)
            file.close()
            yield from runs.merged()
        finally:
            file.close()
            runs.close()

    def _join(self, built: SpillPartitions, probing: SpillPartitions, runs: SortedRuns) -> None:
        for build_part, probe_part in zip(built.parts, probing.parts, strict=True):
            if not probe_part.rows and (self._outer is None or not build_part.rows):
                continue
            if built.must_divide(build_part, self._factor):
                self._join(built.divided(build_part), probing.divided(probe_part), runs)
                continue
            names = self._build.input.schema.names
            table = build(self._build, (batch.select(names) for batch in build_part), self._options)
            table = table if self._outer is None else table.with_marks()
            joined = run_pipeline(self._pipe, iter(probe_part), {self._probe.table: table}, self._options, None)
            runs.add(conformed(batch, self.schema.arrow) for batch in joined if batch.num_rows)
            if self._outer is not None:
                node, schema, unmatched = self._outer
                unmatched.add(table.unmatched([*node.origins, TABLE_NUMBER], schema))
