"""Aggregations that emit changes: groups live in a keyed table, and whenever rows change some, these are results."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from scalein.compiler import compile_flow
from scalein.errors import ComputeError
from scalein.exec.aggregate_operator import FOREVER, AggregateOperator, Partial, aggregate_node
from scalein.exec.bounded import Program
from scalein.exec.changelog import Changelog, changelog_rows
from scalein.exec.combine import Combiner
from scalein.exec.error_location import located
from scalein.exec.expiry_index import windows_of
from scalein.exec.fragments import Fragment
from scalein.exec.local_state import backend_of
from scalein.exec.operator import Batches, Context, FragmentRunner, Morsel, SnapshotFuture
from scalein.ir import ops
from scalein.ir.exprs import Col
from scalein.ir.physical import Node
from scalein.state.interfaces import Change, KeyedRows
from scalein.storage.checked_json import Json, as_int, as_map

FIRST_OPEN = "first_open"  # in the state of sliding windows


class ChangelogAggregate(Partial):
    """Groups in a table; those of windows until these close."""

    def __init__(self, fragment: Fragment, context: Context, root: Node, state: Json) -> None:
        super().__init__(fragment, context, root, is_told=True)
        self.emits_changes = True
        self._changes = Changelog(fragment, self._two.final, context)
        self._combiner = Combiner(self._two, context.options)
        slices = None if self._window is None else "window_start"
        self._table = backend_of(context).table(self._two.keys.arrow, self._two.values.arrow, slices, self._combiner)
        self.never_forgotten = 0 if self._window is None else None
        self._slides = self._window is not None and not self._window.is_tumbling
        self._apart = (FragmentRunner(fragment.op, context, Program(self._two.combine), by_row=False)
                       if self._slides else None)
        self.restore(state)

    def restore(self, state: Json) -> None:
        self._table.restore(state)
        self._first_open = -FOREVER  # the anchor of the first window that is not closed
        if state is None:
            return
        if FIRST_OPEN in (about := as_map(state)):
            self._first_open = as_int(about[FIRST_OPEN])
            if self._window is not None:
                self._table.expire(self._first_open)
        self._count_from(state)

    def rows(self, morsels: Iterable[Morsel]) -> list[Morsel]:
        partials = [*self._partials(morsels), *self._taken()]
        return [Morsel(change, None) for batch in self._of_windows(partials) for change in self._changed(batch)]

    def _changed(self, partials: pa.RecordBatch) -> Batches:
        """Merge partial groups into the table; what that changed."""
        # If every group has exactly one result, the previous one is not needed.
        change = self._table.merge_and_get(partials, gets_before=not self._changes.is_one_to_one)
        if self.never_forgotten is not None:
            self.never_forgotten += len(change.existed) - int(change.existed.sum())
        if self._changes.is_one_to_one and (results := self._results(change)) is not None:
            return self._changes.of_rows(results, change.existed)
        return self._changes.between(change.now if change.before is None else change.before, change.now,
                                     change.existed)

    def _results(self, change: Change) -> Batches | None:
        """The results of groups, one by one and in their order; None where they are not finished so."""
        if self._finish.is_by_row:
            return self._finish.each([change.now])
        try:
            groups = self._combiner.finish(change.now)
        except ComputeError as error:
            raise located(error, self._fragment.op, self._two.final) from None
        return None if groups is None else self._finish.downstream([groups])

    def _of_windows(self, partials: Batches) -> Batches:
        """Partial groups, of which a slice is in one window or, where these slide, in several that are open. A round
        whose rows a filter has dropped has none.
        """
        partials = [batch for batch in partials if batch.num_rows]
        if self._apart is not None and self._window is not None:
            of_each = [found for batch in partials for found in windows_of(batch, self._window, self._first_open)]
            partials = [batch for batch in self._apart.run(of_each) if batch.num_rows]
        if self._context.takes_partials and len(partials) > 1:  # of several map tasks, which have keys in common
            partials = [pa.concat_batches(partials)]
        return partials

    @property
    def due(self) -> int | None:  # type: ignore[override]
        """Of windows that slide, a row may come after some that it is in have closed: see `window_close.py`."""
        if self._window is None or not self._slides:
            return None
        return -FOREVER if self._first_open == -FOREVER else self._window.end_of(self._first_open)

    def advance(self, watermark: int) -> Batches:
        """Windows are dropped when they close."""
        if self._late is not None:
            self._first_open = max(self._first_open, self._late.first_open_anchor(watermark))
            self._table.expire(self._first_open)
        return []

    def finish(self) -> Iterable[pa.RecordBatch]:
        is_empty = not self._two.keys.names and self._table.is_empty
        return [changelog_rows(batch, "insert") for batch in (self._finish.all([]) if is_empty else [])]

    def flush(self) -> None:
        """What has arrived is in the table already."""

    def snapshot(self) -> SnapshotFuture:
        about = {"by_row": False, **self._counting}
        if self._slides:
            about[FIRST_OPEN] = self._first_open
        wait = self._table.snapshot()
        return lambda: {**wait(), **about}

    def retain(self, kept: list[Json]) -> None:
        self._table.retain(kept)

    @property
    def state_bytes(self) -> int:
        return self._table.memory_bytes

    def close(self) -> None:
        self._table.close()


class HolisticChangelog(AggregateOperator):
    """Aggregates whose value needs all rows of its group: the results of groups with new rows are computed anew.

    Its input are rows of columns only.
    """

    def __init__(self, fragment: Fragment, context: Context, state: Json, table: KeyedRows) -> None:
        super().__init__(fragment, context)
        self.emits_changes = True
        root = compile_flow(fragment.op)
        self.reads = self._reads(root)
        self._changes = Changelog(fragment, aggregate_node(root), context)
        self._table = table
        self.restore(state)

    def restore(self, state: Json) -> None:
        self._table.restore(state)

    def rows(self, morsels: Iterable[Morsel]) -> list[Morsel]:
        batches = [morsel.batch for morsel in morsels if morsel.batch.num_rows]
        if not batches:
            return []
        found = self._table.append_and_get(pa.concat_batches(batches))
        return [Morsel(batch, None) for batch in self._changes.of_groups(*found)]

    def advance(self, watermark: int) -> Batches:
        return []

    def finish(self) -> Batches:
        return []

    def flush(self) -> None:
        pass

    @property
    def state_bytes(self) -> int:
        return self._table.memory_bytes

    def snapshot(self) -> SnapshotFuture:
        return self._table.snapshot()

    def retain(self, kept: list[Json]) -> None:
        self._table.retain(kept)


def key_columns(state: ops.Aggregate) -> list[str]:
    """The columns that the keys of an aggregation over plain columns are."""
    return [key.expr.name for key in state.keys if isinstance(key.expr, Col)]
