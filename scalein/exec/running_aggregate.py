"""Running aggregates: groups without a window live long and change often, so they are in a state store, by key.

What arrives is pre-aggregated in workers' tables, and merged into the store as partial groups at checkpoints or when
there are many. If there are nearly as many groups as rows, rows are partitioned by key group (`exec/radix.py`) before
they are aggregated; from the second time on they go straight into the store. A job without checkpoints that ends before
that needs no store: its groups are read from the tables, as `collect` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

import numpy as np
import pyarrow as pa

from scalein.errors import ComputeError
from scalein.exec.aggregate_operator import FOREVER, Partial, aggregate_node
from scalein.exec.bounded import PreAggregationProgram
from scalein.exec.combine import Combiner
from scalein.exec.error_location import located
from scalein.exec.fragments import Fragment
from scalein.exec.local_state import ONE, upsert_merged
from scalein.exec.operator import (
    Batches,
    Context,
    FragmentRunner,
    Morsel,
    SnapshotFuture,
    hold,
    open_store,
    snapshot_store,
)
from scalein.ir import ops
from scalein.ir.exprs import Named
from scalein.ir.internal_names import internal
from scalein.ir.partials import TwoPhase, row_values
from scalein.ir.passes.aggregate_layout import aggregate_table
from scalein.ir.physical import Node
from scalein.state import LogStore
from scalein.storage.checked_json import Json, as_map

MAX_PARTITIONED_BYTES = 640 << 20  # of rows that are buffered until they are aggregated


def most_partitioned(memory: int | None) -> int:
    """Bytes of rows that may be buffered by key group: of limited memory, the third that workers' tables have."""
    return MAX_PARTITIONED_BYTES if memory is None else min(MAX_PARTITIONED_BYTES, memory // 3)


class RunningAggregate(Partial):
    """Groups without a window, in a store; at the end they are results."""

    def __init__(self, fragment: Fragment, context: Context, root: Node, state: Json) -> None:
        super().__init__(fragment, context, root)
        keys = self._two.keys
        key = keys.arrow if keys.names else pa.schema([pa.field(ONE, pa.int8(), False)])
        value = pa.schema([field.with_nullable(True) for field in self._two.values.arrow])
        self._keys, self._columns = key.names, [*keys.names, *value.names]
        self._stored_columns = [*key.names, *value.names]
        self._combiner = Combiner(self._two, context.options)
        self._open: Callable[[], LogStore] = lambda: open_store(context, key, value, state)
        if state is not None or context.has_checkpoints:
            _ = self._store
        self._pre_aggregation = PreAggregationProgram(self._two.partial, complete=aggregate_node(root))
        if state is not None:
            self._count_from(state)
        is_by_row = state is not None and as_map(state)["by_row"] is True and self._two.is_by_column
        self._rows = ByRow(fragment, context, self._store, self._two) if is_by_row else None

    @cached_property
    def _store(self) -> LogStore:
        return self._open()

    @property
    def _has_store(self) -> bool:
        return "_store" in self.__dict__

    def rows(self, morsels: Iterable[Morsel]) -> list[Morsel]:
        if self._rows is not None:
            self._rows.merge([morsel.batch for morsel in morsels])
            return []
        self._merge(self._partials(morsels))
        if self._pre_aggregation.partitioned_bytes > most_partitioned(self._context.options.memory):
            self.flush()
        if self._has_many and self._two.is_by_column:
            self._rows = ByRow(self._fragment, self._context, self._store, self._two)
        return []

    def _merge(self, partials: Batches) -> None:
        """Merge partial groups, no key twice, into the store: column by column, or, where columns mean something only
        together, with those that are there.
        """
        if not partials:
            return
        self._store.set_workers(self._context.options.workers)
        for batch in partials:
            if not batch.num_rows:  # a filter has dropped all rows of a round
                continue
            if self._keys == [ONE]:
                batch = batch.append_column(ONE, pa.array(np.zeros(batch.num_rows, np.int8)))
            rows = batch.select(self._stored_columns)
            if self._two.is_by_column:
                self._store.merge(rows, **self._two.functions)
            else:
                upsert_merged(self._store, rows, self._keys, self._combiner)

    def advance(self, watermark: int) -> Batches:
        return []

    def finish(self) -> Iterable[pa.RecordBatch]:
        if not self._has_store and self._keys != [ONE]:
            try:
                return self._finish.downstream(list(self._pre_aggregation.drain_complete()))
            except ComputeError as error:
                raise located(error, self._fragment.op, self._pre_aggregation.node) from None
        self.flush()
        return self._results()

    def _results(self) -> Iterator[pa.RecordBatch]:
        """All groups, a part of the store at a time: they may be more than fit into memory."""
        batches = (batch.select(self._columns) for batch in self._store.scan() if batch.num_rows)
        if self._keys == [ONE]:  # no row at all is a result as well
            yield from self._finish.all(list(batches))
        else:
            for batch in batches:
                yield from self._finish.each([batch])

    def flush(self) -> None:
        self._has_many |= self._pre_aggregation.is_partitioned
        self._merge(self._taken())

    def snapshot(self) -> SnapshotFuture:
        # Groups without windows have no oldest one.
        about = {"oldest": FOREVER, "by_row": self._rows is not None, **self._counting}
        wait = snapshot_store(self._store)
        return lambda: {**wait(), **about}

    def retain(self, kept: list[Json]) -> None:
        if self._has_store:
            hold(self._store, kept)

    @property
    def state_bytes(self) -> int:
        stored = self._store.memory_bytes if self._has_store else 0
        return stored + self._pre_aggregation.partitioned_bytes

    def close(self) -> None:
        if self._has_store:
            self._store.abandon()


class ByRow:
    """Rows straight into the store: where groups are nearly as many as rows, partial ones would only be in the way."""

    def __init__(self, fragment: Fragment, context: Context, store: LogStore, two: TwoPhase) -> None:
        state = fragment.state
        assert isinstance(state, ops.Aggregate)
        self._store, self._context = store, context
        wanted = state.narrow({output.name for output in two.final.table.outputs})
        of_accs = row_values(aggregate_table(state.keys, None, wanted.aggs))
        values = [(column.name, *of_accs[column.accs[0]]) for column in two.partial.table.outputs]
        self._functions = {name: function for name, _, function in values}
        given = [(name, expr) for name, expr, _ in values if expr is not None]
        items = [*state.keys, *(Named(internal(f"given{k}"), expr) for k, (_, expr) in enumerate(given))]
        self._names = [*(key.name for key in state.keys), *(name for name, _ in given)]
        self._runner = FragmentRunner(ops.Project(fragment.before, tuple(items)), context)

    def merge(self, batches: Batches) -> None:
        self._store.set_workers(self._context.options.workers)
        for batch in self._runner.run(batches):
            self._store.merge(batch.rename_columns(self._names), **self._functions)


