"""Sessions that emit changes, and groups that are forgotten when they have been quiet (`agg(..., ttl=)`).

Rows are buffered until the watermark has passed them, and taken in the order of event time, a gap at a time: so a row
begins a session or extends the last one of its key, and never joins two. A key has one record, of the session that may
still be extended; it is deleted once the watermark has passed its end. Hints in the order of time say which keys to
look at.

Invariant: all rows before `_passed` have been taken, and none to come is earlier. So a session that begins earlier was
there before, and one whose last row is not earlier has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from scalein.arrow_rows import as_integers, filtered, from_numpy
from scalein.dtypes import I64
from scalein.exec.aggregate_operator import Partial
from scalein.exec.bounded import Program
from scalein.exec.changelog import Changelog
from scalein.exec.changelog_aggregate import key_columns
from scalein.exec.event_time_rows import EventTimeRows
from scalein.exec.fragments import Fragment
from scalein.exec.local_state import ONE, backend_of
from scalein.exec.operator import Batches, Context, FragmentRunner, Morsel, SnapshotFuture
from scalein.ir import ops
from scalein.ir.exprs import Named
from scalein.ir.internal_names import internal
from scalein.ir.physical import Node, identity
from scalein.ir.unify import cast_to
from scalein.ir.windows import Session
from scalein.kernels.bind import conformed
from scalein.storage.checked_json import Json, as_int, as_map

_TIME, _FIRST, _END = internal("time"), "window_start", "window_end"
_ROWS, _HINTS, PASSED = "rows", "hints", "passed"  # parts of a version
_HINT_ROWS = 1 << 14  # of a segment of hints


class SessionChangelog(Partial):
    """The last session of each key, until nothing can extend it."""

    def __init__(self, fragment: Fragment, context: Context, root: Node, state: Json) -> None:
        super().__init__(fragment, context, root)
        assert isinstance(fragment.state, ops.Aggregate)
        assert isinstance(self._window, Session)
        self.emits_changes = True
        self._gap = self._window.gap
        kept = fragment.before.schema.names if context.keeps_late else self._names
        items = [item for item in identity(fragment.before.schema) if item.name in kept]
        before = ops.Project(fragment.before, (*items, Named(_TIME, cast_to(self._window.time, I64))))
        self._before = FragmentRunner(before, context)
        self.reads = self._reads(self._before.program.node)
        self._rows = EventTimeRows(context, before.schema.arrow, key_columns(fragment.state), _TIME,
                                   [item.name for item in items])
        self._combine = FragmentRunner(fragment.op, context, Program(self._two.combine), by_row=False)
        self._changes = Changelog(fragment, self._two.final, context)
        self._partial_schema = arrow = self._two.partial.schema.arrow
        own = [key.name for key in self._two.partial.table.keys]
        self._keys = own or [ONE]
        keys = pa.schema([arrow.field(name) for name in own] or [pa.field(ONE, pa.int8(), False)])
        values = pa.schema([field for field in arrow if field.name not in own])
        self._records = backend_of(context).records(keys, values, placed_by=own)
        self._stored_schema = pa.schema([*keys, *values])
        hints = pa.schema([*keys, pa.field(_END, pa.int64(), False)])
        self._hints = backend_of(context).buffer(hints, own, _END, None, _HINTS)
        self._passed: int | None = None
        self.restore(state)

    def restore(self, state: Json) -> None:
        about = {} if state is None else as_map(state)
        self._records.restore(state)
        self._rows.restore(about.get(_ROWS))
        self._hints.restore(about.get(_HINTS))
        self._passed = None if about.get(PASSED) is None else as_int(about[PASSED])

    # --- rows

    def rows(self, morsels: Iterable[Morsel]) -> list[Morsel]:
        for morsel in self._sound(morsels):
            for batch in self._before.run([morsel.batch]):
                self._rows.add(batch, morsel.watermark)
        return []

    def advance(self, watermark: int) -> Batches:
        found = self._released(watermark)
        self._passed = watermark
        self._forget(watermark)
        return found

    def finish(self) -> Batches:
        return self._released(None)

    def _released(self, end: int | None) -> Batches:
        rows = self._rows.release(end)
        return [] if rows is None else [change for some in self._parts(rows) for change in self._changed(some)]

    def _parts(self, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Rows in the order of time in parts no longer than a gap: those of a key are in one session."""
        times, start = np.asarray(as_integers(rows.column(_TIME))), 0
        while start < len(times):
            end = int(np.searchsorted(times, times[start] + self._gap, side="right"))
            yield rows.slice(start, end - start)
            self._passed = int(times[end - 1]) + 1 if end < len(times) else self._passed
            start = end

    def _changed(self, rows: pa.RecordBatch) -> Batches:
        """Take rows of which those of a key are in one session; what that changed."""
        partials = self._keyed(self._combined(self._partials_of(rows)))
        known = self._records.get(partials.select(self._keys))
        found = self._keyed(self._combined([known.select(self._partial_schema.names), partials.select(
            self._partial_schema.names)]))
        starts, ends = (np.asarray(as_integers(found.column(name))) for name in (_FIRST, _END))
        existed = np.zeros(len(starts), bool)
        if self._passed is not None:
            has_changed = ends >= self._passed + self._gap
            found, existed = filtered(found, from_numpy(has_changed)), starts[has_changed] < self._passed
        before = self._records.get(filtered(found, from_numpy(existed)).select(self._keys))
        self._records.put(conformed(found.select(self._stored_schema.names), self._stored_schema))
        self._add_hints(found)
        return self._results(before, found, existed)

    def _partials_of(self, rows: pa.RecordBatch) -> Batches:
        return self._of_checked([rows.select(self._names)])

    def _combined(self, partials: Batches) -> pa.RecordBatch:
        parts = [conformed(batch, self._partial_schema) for batch in self._combine.run(partials)]
        return parts[0] if len(parts) == 1 else pa.concat_batches(parts)

    def _keyed(self, groups: pa.RecordBatch) -> pa.RecordBatch:
        """With a key for groups that have none."""
        return groups if self._keys != [ONE] else groups.append_column(ONE, from_numpy(np.zeros(len(groups), np.int8)))

    def _results(self, before: pa.RecordBatch, now: pa.RecordBatch, existed: np.ndarray) -> Batches:
        names = self._partial_schema.names
        before, now = before.select(names), now.select(names)
        if self._changes.is_one_to_one and self._finish.is_by_row:
            return self._changes.of_rows(self._finish.each([now]), existed)
        return self._changes.of_groups(before, np.flatnonzero(existed), now, np.arange(len(now)), len(now))

    # --- forgetting

    def _add_hints(self, found: pa.RecordBatch) -> None:
        ends = np.asarray(as_integers(found.column(_END)))
        order = np.argsort(ends, kind="stable")
        columns = [*found.select(self._keys).columns, from_numpy(ends)]
        hints = pa.RecordBatch.from_arrays(columns, names=self._hints.schema.names).take(from_numpy(order))
        for start in range(0, len(order), _HINT_ROWS):
            part = hints.slice(start, _HINT_ROWS)
            self._hints.add(conformed(part, self._hints.schema), int(ends[order[start]]),
                            int(ends[order[start + part.num_rows - 1]]))

    def _forget(self, watermark: int) -> None:
        """Forget sessions that no row to come extends: those that end before the watermark."""
        due = [batch for each in self._hints.segments if each.first < watermark for batch in self._hints.read(each)]
        self._hints.drop(watermark)
        for batch in due:
            is_due = np.asarray(as_integers(batch.column(_END))) < watermark
            if not is_due.any():
                continue
            known = self._records.get(filtered(batch, from_numpy(is_due)).select(self._keys))
            is_over = np.asarray(as_integers(known.column(_END))) < watermark
            if is_over.any():
                self._records.delete(filtered(known, from_numpy(is_over)).select(self._keys))

    # --- state

    @property
    def state_bytes(self) -> int:
        return self._rows.memory_bytes + self._records.memory_bytes + self._hints.memory_bytes

    def flush(self) -> None:
        self._rows.flush()
        self._hints.coalesce()

    def snapshot(self) -> SnapshotFuture:
        wait, rows, hints = self._records.snapshot(), self._rows.snapshot(), self._hints.snapshot()
        about = {"by_row": False, PASSED: self._passed}
        return lambda: {**wait(), _ROWS: rows(), _HINTS: hints(), **about}

    def retain(self, kept: list[Json]) -> None:
        self._records.retain(kept)
        for part, held in ((self._rows, _ROWS), (self._hints, _HINTS)):
            part.retain([as_map(version).get(held) for version in kept if isinstance(version, dict)])

    def close(self) -> None:
        for each in (self._records, self._rows, self._hints):
            each.close()
