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
from scalein.exec.bounded import PreAggregationProgram, Program
from scalein.exec.changelog import Changelog, changelog_rows
from scalein.exec.combine import Combiner
from scalein.exec.error_location import located
from scalein.exec.event_time import extent
from scalein.exec.expiry_index import ExpiryIndex, windows_of
from scalein.exec.fragments import Fragment
from scalein.exec.operator import (
    Batches,
    Context,
    FragmentRunner,
    Morsel,
    SnapshotFuture,
    filtered,
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
from scalein.storage.checked_json import Json, as_int, as_map

MAX_PARTITIONED_BYTES = 640 << 20  # of rows that are buffered until they are aggregated
EXPIRY = "expiry"  # in the state of windows: the keys of those that are open
EXPIRY_SHARE = 8  # this fraction (1/8) of the state's memory is for these keys
_ONE = "#one"  # the key of groups without keys


class RunningAggregate(Partial):
    """Groups in a store; at the end, or whenever they change, they are results."""

    def __init__(self, fragment: Fragment, context: Context, root: Node, state: Json, emit: str) -> None:
        super().__init__(fragment, context, root, is_told=emit == "changes")
        self.emits_changes = emit == "changes"
        self.changes = Changelog(fragment, self._two.final, context) if emit == "changes" else None
        keys = self._two.keys
        key = keys.arrow if keys.names else pa.schema([pa.field(_ONE, pa.int8(), False)])
        value = pa.schema([field.with_nullable(True) for field in self._two.values.arrow])
        self._keys, self._columns = key.names, [*keys.names, *value.names]
        self._stored_columns = [*key.names, *value.names]
        self._combiner = Combiner(self._two, context.options)
        memory = context.options.memory
        hint_bytes = 0 if memory is None or self._window is None else memory // EXPIRY_SHARE
        self._open: Callable[[], LogStore] = lambda: open_store(context, key, value, state, hint_bytes)
        if state is not None or context.has_checkpoints:
            _ = self._store
        if self.changes is None:
            self._pre_aggregation = PreAggregationProgram(self._two.partial, complete=aggregate_node(root))
        self._oldest = FOREVER if state is None else as_int(as_map(state)["oldest"])  # window in the store
        self._slides = self._window is not None and not self._window.is_tumbling
        self._apart = (FragmentRunner(fragment.op, context, Program(self._two.combine), by_row=False)
                       if self._slides else None)
        self._first_open = -FOREVER  # the start of the first window that is not closed
        if state is not None and self._slides:
            self._first_open = as_int(as_map(state)["first_open"])
        self._expiry = ExpiryIndex(context.folder, key, None if memory is None else hint_bytes)
        # Checkpoints of earlier versions have no index: it is filled from the store when the first window closes.
        self._is_indexed = state is None or EXPIRY in as_map(state)
        if state is not None and self._is_indexed:
            self._expiry.restore(context, as_map(state)[EXPIRY])
        if state is not None:
            self._count_from(state)
        is_by_row = state is not None and as_map(state)["by_row"] is True and (
            self.changes is None and self._two.is_by_column)
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
        found = self._merged(self._partials(morsels))
        if self._pre_aggregation.partitioned_bytes > MAX_PARTITIONED_BYTES:
            self.flush()
        if self._has_many and self.changes is None and self._two.is_by_column:
            self._rows = ByRow(self._fragment, self._context, self._store, self._two)
        if self.changes is not None:
            found += self._merged(self._taken())
        return [Morsel(batch, None) for batch in found]

    def _merged(self, partials: Batches) -> Batches:
        """Merge partial groups into the store; what that changed, if it is wanted."""
        found: Batches = []
        if not partials:
            return []
        self._store.set_workers(self._context.options.workers)
        for batch in self._of_windows(partials):
            if self._keys == [_ONE]:
                batch = batch.append_column(_ONE, pa.array(np.zeros(batch.num_rows, np.int8)))
            # If every group has exactly one result, the previous one is not needed.
            has_one = self.changes is not None and self.changes.is_one_to_one
            is_asked = self.changes is not None and not has_one
            before = self._stored(batch) if is_asked or not self._two.is_by_column else None
            now = self._put(batch, before)
            if self._window is not None:
                times = extent(batch.column("window_start"))
                self._oldest = min(self._oldest, FOREVER if times is None else times[0])
            if now is None or self.changes is None:
                continue
            if before is not None:
                existed = np.asarray(before.column("#acc0").is_valid())
            else:  # it has more rows than these
                existed = np.asarray(now.column("#acc0")) != np.asarray(batch.column("#acc0"))
            if self._window is not None and self._is_indexed and not existed.all():
                self._expiry.add(filtered(batch, pa.array(~existed)).select(self._keys))
            if has_one and self._finish.is_by_row:
                found += self.changes.of_rows(self._finish.each([now]), existed)
            else:
                found += self.changes.between(now if before is None else before, now, existed)
        return found

    def _of_windows(self, partials: Batches) -> Batches:
        """Partial groups, of which a slice is in one window or, where these slide, in several that are open. A round
        whose rows a filter has dropped has none.
        """
        if self._apart is None or self._window is None:
            return [batch for batch in partials if batch.num_rows]
        of_each = [found for batch in partials
                   for found in windows_of(batch, self._window, self._first_open)]
        return [batch for batch in self._apart.run(of_each) if batch.num_rows]

    def _put(self, partials: pa.RecordBatch, before: pa.RecordBatch | None) -> pa.RecordBatch | None:
        """Merge partial groups, no key twice, into the store: column by column, or, where columns mean something only
        together, with those that were there `before`. Gives the groups as they are now, with a changelog.
        """
        names = self._two.values.names
        if self._two.is_by_column:
            rows = partials.select(self._stored_columns)
            if self.changes is not None:
                return self._values(partials, self._store.merge_and_get(rows, **self._two.functions))
            self._store.merge(rows, **self._two.functions)
            return None
        assert before is not None
        existed = np.asarray(before.column("#acc0").is_valid())
        new = pa.RecordBatch.from_arrays([partials.column(name) for name in names], names=names)
        both = pa.concat_batches([filtered(before.select(names), pa.array(existed)), new])
        numbers = np.concatenate([np.flatnonzero(existed), np.arange(new.num_rows)])
        values = self._combiner.combine_numbered(both, numbers)
        self._store.upsert(pa.RecordBatch.from_arrays(
            [*(partials.column(name) for name in self._keys), *values.columns], names=self._stored_columns))
        return None if self.changes is None else self._stored(partials)

    def _stored(self, partials: pa.RecordBatch) -> pa.RecordBatch:
        """The groups of partial ones, as they are in the store; values of those that are not there are null."""
        return self._values(partials, self._store.get(partials.select(self._keys)))

    def _values(self, partials: pa.RecordBatch, stored: pa.Table) -> pa.RecordBatch:
        """Groups by the keys of partial ones, with values from the store."""
        chunks = (stored.column(name).chunks for name in self._two.values.names)
        values = (some[0] if len(some) == 1 else pa.concat_arrays(some) for some in chunks)
        return pa.RecordBatch.from_arrays([*(partials.column(name) for name in self._two.keys.names), *values],
                                          names=self._columns)

    @property
    def due(self) -> int | None:  # type: ignore[override]
        """Of windows that slide, a row may come after some that it is in have closed: see `window_close.py`."""
        if self._window is None or not self._slides:
            return None
        return -FOREVER if self._first_open == -FOREVER else self._window.end_of(self._first_open)

    def advance(self, watermark: int) -> Batches:
        """Windows of a changelog are dropped when they close."""
        if self._late is None:
            return []
        first_open = self._late.least_open(watermark)
        self._first_open = max(self._first_open, first_open)
        if self._oldest < first_open:
            if not self._is_indexed:
                self._is_indexed = True
                for batch in self._store.scan():
                    self._expiry.add(batch.select(self._keys))
            for keys in self._expiry.closed(first_open):
                self._store.delete(keys)
            self._oldest = FOREVER if self._expiry.oldest is None else self._expiry.oldest
        return []

    def finish(self) -> Iterable[pa.RecordBatch]:
        if not self._has_store and self._keys != [_ONE]:
            try:
                return self._finish.downstream(list(self._pre_aggregation.drain_complete()))
            except ComputeError as error:
                raise located(error, self._fragment.op, self._pre_aggregation.node) from None
        self.flush()
        if self.changes is not None:
            is_empty = self._keys == [_ONE] and not len(self._store)
            return [changelog_rows(batch, "insert") for batch in (self._finish.all([]) if is_empty else [])]
        return self._results()

    def _results(self) -> Iterator[pa.RecordBatch]:
        """All groups, a part of the store at a time: they may be more than fit into memory."""
        batches = (batch.select(self._columns) for batch in self._store.scan() if batch.num_rows)
        if self._keys == [_ONE]:  # no row at all is a result as well
            yield from self._finish.all(list(batches))
        else:
            for batch in batches:
                yield from self._finish.each([batch])

    def flush(self) -> None:
        self._has_many |= self._pre_aggregation.is_partitioned
        self._merged(self._taken())

    def snapshot(self) -> SnapshotFuture:
        about = {"oldest": self._oldest, "by_row": self._rows is not None, **self._counting}
        if self._slides:
            about["first_open"] = self._first_open
        wait, expiry = snapshot_store(self._store), self._expiry.snapshot()
        if self._window is None or not self._is_indexed:
            return lambda: {**as_map(wait()), **about}
        return lambda: {**as_map(wait()), **about, EXPIRY: expiry()}

    def retain(self, kept: list[Json]) -> None:
        if self._has_store:
            hold(self._store, kept)
        if self._window is not None:
            self._expiry.retain([as_map(state).get(EXPIRY) for state in kept if isinstance(state, dict)])

    @property
    def state_bytes(self) -> int:
        stored = self._store.memory_bytes if self._has_store else 0
        return stored + self._pre_aggregation.partitioned_bytes + self._expiry.memory_bytes

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


