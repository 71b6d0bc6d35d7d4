"""Distinct of more keys than memory holds, in the order of the source.

While the keys fit, the first row of each is emitted as it comes. Then the keys so far are partitioned by their hash and
spilled, and so are all further rows, with their numbers. Partitions are processed one after the other: a table of the
keys that were seen before, to which those of the rows are added. First rows of new keys are a sorted run, by number;
the runs are merged, and follow what was emitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from scalein.arrow_rows import copied, from_numpy
from scalein.dtypes import I64, Field, Schema
from scalein.exec.external_sort import SortedRuns
from scalein.exec.node_cut import columns_after, names_of, scan_of_rows, used_after
from scalein.exec.pipeline import DedupTable, PipelineOperator, prepare_pipeline, run_dedup, run_pipeline
from scalein.exec.spill_file import SpilledBatches, SpillFile
from scalein.exec.spill_partitions import SpillPartitions, drained, hash_items
from scalein.ir.exprs import Named
from scalein.ir.internal_names import internal
from scalein.ir.physical import Pipeline, Sort, identity
from scalein.ir.stages import DedupStep
from scalein.memory import MemoryAccount
from scalein.options import Options

if TYPE_CHECKING:
    from scalein.exec.join_build import JoinTable

GROWTH_FACTOR = 2  # a table is reserved with what its next growth takes
WORKING_FACTOR = 4  # bytes that the table of a partition takes for each byte of its rows
NUMBER = internal("first_row")  # the number of a row


def distinct_within(node: Pipeline, batches: Iterator[pa.RecordBatch], joins: dict[int, JoinTable], options: Options,
                    account: MemoryAccount) -> tuple[Pipeline, Iterator[pa.RecordBatch]]:
    """The rest of a node after its dedup step, and the rows that reach it, in the memory of the account."""
    at = next(k for k, step in enumerate(node.steps) if isinstance(step, DedupStep))
    step = node.steps[at]
    assert isinstance(step, DedupStep)
    keys, used = names_of(step.keys), used_after(node, at)
    columns = [c for name, c in columns_after(node, node.steps[:at]).items() if name in used | keys]
    hashes = hash_items(step.keys)
    first = Pipeline(node.input, node.steps[:at], (*(Named(c.name, c) for c in columns), *hashes), node.joins,
                     "partition")
    distinct = _Distinct(step, first.schema, [*sorted(keys), *(item.name for item in hashes)], options, account.child())
    rest = replace(node, input=scan_of_rows(first.schema), steps=node.steps[at + 1 :])
    return rest, distinct.rows(run_pipeline(first, batches, joins, options, None))


class _Distinct:
    """The first row of each key. `keyed` are the names of the keys' columns and of their hashes."""

    def __init__(self, step: DedupStep, schema: Schema, keyed: list[str], options: Options,
                 account: MemoryAccount) -> None:
        self._step, self._schema, self._options, self._account = step, schema, options, account
        self._keyed = Schema(tuple(schema[name] for name in keyed))
        self._numbered = Schema((*schema, Field(NUMBER, I64, False)))
        self._operators: dict[Schema, PipelineOperator] = {}

    def _operator(self, schema: Schema) -> PipelineOperator:
        """The dedup of rows of this schema; its tables have one layout, whatever the other columns are."""
        known = self._operators.get(schema)
        if known is None:
            node = Pipeline(scan_of_rows(schema), (self._step,), identity(schema), (), "distinct")
            known = self._operators[schema] = prepare_pipeline(node, {}, self._options, None)
        return known

    def rows(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The distinct rows, in order."""
        operator, table, account = self._operator(self._schema), DedupTable(self._options), self._account
        seen: list[pa.RecordBatch] = []
        seen_bytes = 0
        try:
            for batch in batches:
                for found in run_dedup(operator, iter([batch]), table):
                    seen.append(copied(found.select(self._keyed.names)))
                    seen_bytes += seen[-1].nbytes
                    account.reserve(seen[-1].nbytes)
                    yield found
                grown = GROWTH_FACTOR * table.bytes + seen_bytes
                account.reserve(grown - account.used)
                if account.is_under_pressure:
                    break
            else:
                return
            del table
            account.release()
            yield from self._spilled(seen, batches)
        finally:
            account.release()

    def _spilled(self, seen: list[pa.RecordBatch], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The first rows of the keys that are not among those seen."""
        limit, schema = self._account.limit, self._numbered.arrow
        assert limit is not None
        runs = SortedRuns(Sort(scan_of_rows(self._numbered), ((NUMBER, False),), True, None), schema, limit)
        file = SpillFile()
        try:
            before, rows = SpillPartitions(file, self._keyed.arrow, limit), SpillPartitions(file, schema, limit)
            for keys in drained(seen):
                before.add(keys)
            before.flush()
            start = 0
            for batch in batches:
                numbers = from_numpy(np.arange(start, start + batch.num_rows))
                rows.add(pa.RecordBatch.from_arrays([*batch.columns, numbers], schema=schema))
                start += batch.num_rows
            rows.flush()
            self._process(before, rows, runs)
            file.close()
            for batch in runs.merged():
                yield batch.select(self._schema.names)
        finally:
            file.close()
            runs.close()

    def _process(self, before: SpillPartitions, rows: SpillPartitions, runs: SortedRuns) -> None:
        for known, given in zip(before.parts, rows.parts, strict=True):
            if not given.rows:
                continue
            if before.must_divide(known, WORKING_FACTOR) or rows.must_divide(given, WORKING_FACTOR):
                self._process(before.divided(known), rows.divided(given), runs)
            else:
                runs.add(self._first_rows(known, given))

    def _first_rows(self, known: SpilledBatches, given: SpilledBatches) -> Iterator[pa.RecordBatch]:
        """The distinct rows of a partition whose keys are not known."""
        table = DedupTable(self._options)
        for _ in run_dedup(self._operator(self._keyed), iter(known), table):
            pass
        yield from run_dedup(self._operator(self._numbered), iter(given), table)
