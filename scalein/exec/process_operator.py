"""Process in a job, and in a Spark task: the user's class over rows as they come, with state that a checkpoint names.

Order. With a watermark, rows are buffered until it has passed them (`event_time_rows.py`); then they run in the order
of time, after them the timers up to the watermark. Without one, rows run as they come.

State. What keys remember is a hash table (`process.py`), and durable in a backend's `records`, by key. While all keys
fit into the memory that the operator has, the table has all of them (`_is_resident`): a flush puts the records that
changed into the store, and restoring reads all of them. Else the table holds the keys of one round: they are read from
the store before it, and written back after it. Keys that time will change (a timer, `ttl`) and that are not in the
table are found by hints: rows of a key and its time in a buffer, in the order of time. A hint may be outdated: the
record says what is true.

Spark. A reduce task gives the operator a backend: `records` (get, put and delete by key; `resident_bytes` None, so
that nothing is read but what a task needs), and two buffers, of rows and of hints, whose keys are columns. Rows of its
key groups come in through `rows` with the watermark of the last micro-batch; then `advance` with the new one, `flush`
and `snapshot`. `restore` takes over the version of another task's key groups, as for other operators. Of the numbers in
it, `resident` is false there, and `latest`, the time of the last row, matters at the end of bounded input only: the
greatest one counts. What must be shuffled is `input_columns`, by the columns `key_names` of `keyed` rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain

import numpy as np
import pyarrow as pa

from scalein.arrow_rows import filtered, from_numpy
from scalein.dtypes import UNITS_PER_SECOND, Kind, Schema
from scalein.errors import ComputeError
from scalein.exec.error_location import located
from scalein.exec.event_time_rows import EventTimeRows
from scalein.exec.fragments import Fragment, placeholder
from scalein.exec.local_state import backend_of
from scalein.exec.operator import (
    Batches,
    Context,
    FragmentRunner,
    Morsel,
    SnapshotFuture,
    Stateless,
    downstream_of,
    executes,
    reads,
)
from scalein.exec.process import Failed, key_schema, node_times, records_schema, states_of
from scalein.ir import ops
from scalein.ir.exprs import Col, Named, type_of
from scalein.ir.internal_names import internal
from scalein.ir.physical import Process, Scan, identity
from scalein.ir.process import NEVER
from scalein.kernels.bind import conformed
from scalein.storage.checked_json import Json, as_int, as_map

DUE = "due"
HINT_ROWS = 1 << 14  # of a segment of hints: they are in the order of time, so that few are read before they are due
ROWS, HINTS = "rows", "hints"  # parts of a version
TABLE_SHARE = 4  # this fraction of the operator's memory is for the table, another for buffers; half is the store's
MIN_FORGOTTEN = 1 << 16  # records of forgotten keys that stay in any case
NO_LATEST = -NEVER


@executes(ops.Process)
class ProcessOperator(Stateless):
    """The class at work: see the head of this module."""

    def __init__(self, fragment: Fragment, context: Context, state: Json, emit: str = "final") -> None:
        super().__init__(downstream_of(fragment), context)
        assert isinstance(fragment.state, ops.Process)
        self._op = op = fragment.state
        self._context = context
        source, keeps_all = op.input.schema, context.failed is not None or context.keeps_late
        needed = op.state_reads()
        self.input_columns = [name for name in source.names if keeps_all or name in needed]
        kept = [item for item in identity(source) if item.name in self.input_columns]
        # A key that is a column is not there twice.
        made = [Named(internal(f"key{k}"), key.expr) for k, key in enumerate(op.table_keys)
                if not isinstance(key.expr, Col)]
        names = iter(made)
        self.key_names = [key.expr.name if isinstance(key.expr, Col) else next(names).name for key in op.table_keys]
        self.keyed = ops.Project(fragment.before, (*kept, *made))
        self._before = FragmentRunner(self.keyed, context)
        self.reads = reads(self._before.program.node)
        self._schema = self.keyed.schema
        self._node, self._args = self._process_node()
        memory = context.options.memory
        share, half = (replace(context, options=replace(context.options, memory=None if memory is None else max(
            1, memory // part))) for part in (TABLE_SHARE, 2))
        self._table_bytes = share.options.memory
        self._states = states_of(self._node, context.options, tracked=True)
        keys = key_schema(self._node)
        values = [field for field in records_schema(self._node) if field.name not in keys.names]
        self._records = backend_of(half).records(keys, pa.schema(values))
        self._given_keys = [key.expr.name for key in self._node.keys if isinstance(key.expr, Col)]
        of_keys = placeholder(Schema.from_arrow(keys))
        self._distinct = FragmentRunner(ops.Distinct(of_keys, tuple(keys.names)), context, by_row=False)
        self._rows = None
        if op.time:
            late = fragment.before.schema.names if context.keeps_late else self.input_columns
            self._rows = EventTimeRows(share, self._schema.arrow, self.key_names, op.time, late)
        self._hints = None
        if op.body.is_timed:
            schema = key_schema(self._node).append(pa.field(DUE, pa.int64(), False))
            self._hints = backend_of(share).buffer(schema, key_schema(self._node).names, DUE, None, HINTS)
        self._times = None if self._node.time is None else node_times(self._node)
        self._factor = class_units(op)
        self._latest, self._live_count = NO_LATEST, 0
        self._loaded = 0  # records in the table that were there before
        self._evicted_new = 0  # keys of this run that are not in the table any more
        self._is_resident = True
        self._known_due = np.empty(0, np.int64)  # of records, when they were loaded
        self.restore(state)

    def _process_node(self) -> tuple[Process, FragmentRunner]:
        """The process over columns that are keys, arguments and the time as the class sees it, and what makes them."""
        op, schema = self._op, self._schema
        keys = [Named(internal(f"k{k}"), Col(name, schema[name].dtype, schema[name].nullable))
                for k, name in enumerate(self.key_names)]
        args = [Named(internal(f"a{k}"), arg) for k, arg in enumerate(op.args)]
        event = [] if op.event is None else [Named(internal("event"), op.event)]
        given = ops.Project(placeholder(schema), (*keys, *args, *event))
        fields = {item.name: item.expr for item in identity(given.schema)}
        named = tuple(Named(key.name, fields[item.name]) for key, item in zip(op.table_keys, keys, strict=True))
        source = ops.Source("rows", given.schema.arrow, tuple(given.schema.names))
        time = fields[event[0].name] if event else None
        node = Process(Scan(source), named, tuple(fields[item.name] for item in args), op.body, op.schema, time)
        return node, FragmentRunner(given, self._context)

    # --- rows and time

    def rows(self, morsels: Iterable[Morsel]) -> list[Morsel]:
        rows = self._rows
        found: list[Morsel] = []
        waiting: Batches = []
        mark: int | None = None
        for morsel in morsels:
            for batch in self._before.run([morsel.batch]):
                if rows is not None:
                    rows.add(batch, morsel.watermark)
                elif batch.num_rows:
                    waiting.append(batch)
                    mark = morsel.watermark
        if waiting:
            made = self._run(waiting if self._is_resident else [pa.concat_batches(waiting)])
            found = [Morsel(batch, mark) for batch in self._runner.run(made)]
        return found

    def promise(self, watermark: int) -> int | None:
        return watermark

    def advance(self, watermark: int) -> Batches:
        if self._rows is None:
            return []
        until = watermark * self._factor
        rows = self._rows.release(watermark)
        return self._runner.run(chain([] if rows is None else self._run([rows]), self._fire(until)))

    def finish(self) -> Iterator[pa.RecordBatch]:
        rows = None if self._rows is None else self._rows.release(None)
        if rows is not None:
            yield from self._runner.run(self._run([rows]))
        if self._op.body.has_timer:
            for until, once in ((self._latest, False), (NEVER - 1, True)):
                yield from self._runner.run(self._fire(until, once))

    def _run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """What rows yield, which are in order."""
        for batch in batches:
            for some, found in self._args.bisected(batch):
                for given in found:
                    self._load_keys_of(given)
                    if self._times is not None and given.num_rows:
                        self._latest = max(self._latest, self._times(given))
                    yield from self._states.rows(given, self._failed_in(some))
                    self._end_round()

    def _failed_in(self, batch: pa.RecordBatch) -> Failed | None:
        """Reports the rows of a batch that fail."""
        report = self._context.failed
        if report is None:
            return None
        rows = batch.select([name for name in batch.schema.names if name in self.input_columns])

        def failed(row: int, error: ComputeError) -> None:
            assert report is not None
            report(rows, row, located(error, self._op, self._node))

        return failed

    def _fire(self, until: int, once: bool = False) -> Iterator[pa.RecordBatch]:
        """Timers up to a time."""
        if self._hints is None:
            return
        if self._is_resident:
            yield from self._states.fire(until, once)
            self._drop_forgotten()
            return
        for keys in self._due_keys(until):
            self._load(keys)
            self._known_due = np.full(self._states.count, NEVER)  # their hints are gone
            yield from self._states.fire(until, once)
            self._end_round()

    # --- what does not fit into memory

    def _load_keys_of(self, given: pa.RecordBatch) -> None:
        if not self._is_resident:
            keys = given.select(self._given_keys).rename_columns(key_schema(self._node).names)
            self._load(keys)

    def _load(self, keys: pa.RecordBatch) -> None:
        """Records of keys, which may come several times, into the empty table."""
        for rows in self._distinct.run([keys]):
            found = self._records.get(rows)
            self._loaded += found.num_rows
            self._states.load(found)
        if self._hints is not None:
            self._known_due = self._states.due_times

    def _end_round(self) -> None:
        """Write records back, if they do not all fit into memory."""
        if self._is_resident:
            if self._table_bytes is None or self._states.bytes <= self._table_bytes:
                return
            self._is_resident = False
            self._known_due = np.empty(0, np.int64)
        self._store_changes()
        if self._hints is not None:
            self._add_hints()
        self._evicted_new += self._states.count - self._loaded
        self._loaded = 0
        self._states.clear()

    def _store_changes(self) -> None:
        records, gone = self._states.changes()
        if records.num_rows:
            self._records.put(records)
        if gone.num_rows:
            self._records.delete(gone)

    def _add_hints(self) -> None:
        """Hints of keys that time will change earlier than the hints that they have."""
        assert self._hints is not None
        hints = self._states.due(self._known_due)
        times = np.asarray(hints.column(DUE))
        order = np.argsort(times, kind="stable")
        for start in range(0, len(order), HINT_ROWS):
            part = order[start : start + HINT_ROWS]
            self._hints.add(conformed(hints.take(from_numpy(part)), self._hints.schema), int(times[part[0]]),
                            int(times[part[-1]]))

    def _due_keys(self, until: int) -> Iterator[pa.RecordBatch]:
        """The keys of hints up to a time, which are gone then."""
        assert self._hints is not None
        names = key_schema(self._node).names
        due = [each for each in self._hints.segments if each.first <= until]
        found = [batch for each in due for batch in self._hints.read(each)]
        if not due:
            return
        self._hints.drop(until + 1)
        for batch in found:
            is_due = np.asarray(batch.column(DUE)) <= until
            if is_due.any():
                yield filtered(batch, from_numpy(is_due)).select(names)

    def _drop_forgotten(self) -> None:
        """Free the records of forgotten keys, where they are most."""
        if self._op.body.ttl and self._states.count > 2 * self._live_count + MIN_FORGOTTEN:
            if self._keeps_records:
                self._store_changes()
            self._states.compact()
            self._live_count = self._states.count

    # --- state

    @property
    def _keeps_records(self) -> bool:
        return self._context.has_checkpoints or self._context.state is not None

    @property
    def never_forgotten(self) -> int | None:
        return None if self._op.body.ttl else self._evicted_new + self._states.count - self._loaded

    @property
    def state_bytes(self) -> int:
        buffered = sum(each.memory_bytes for each in (self._rows, self._hints) if each is not None)
        return self._states.bytes + self._records.memory_bytes + buffered

    def restore(self, state: Json) -> None:
        about = {} if state is None else as_map(state)
        self._latest = as_int(about["latest"]) if about else NO_LATEST
        self._live_count = self._loaded = self._evicted_new = 0
        self._known_due = np.empty(0, np.int64)
        self._states.clear()
        self._records.restore(state)
        if self._rows is not None:
            self._rows.restore(about.get(ROWS))
        if self._hints is not None:
            self._hints.restore(about.get(HINTS))
        size = self._records.resident_bytes
        self._is_resident = size is not None and (self._table_bytes is None or size <= self._table_bytes)
        if not about:
            return
        if self._is_resident:
            for records in self._records.scan():
                self._loaded += records.num_rows
                self._states.load(records)
            if self._hints is not None:
                self._hints.drop(NEVER)
        elif self._hints is not None and about.get("resident") is True:  # in memory there were none
            for records in self._records.scan():
                self._states.load(records)
                self._add_hints()
                self._states.clear()

    def flush(self) -> None:
        if self._is_resident and self._keeps_records:
            self._store_changes()
        if self._rows is not None:
            self._rows.flush()

    def snapshot(self) -> SnapshotFuture:
        about: dict[str, Json] = {"latest": self._latest, "resident": self._is_resident}
        wait = self._records.snapshot()
        parts = {name: each.snapshot() for name, each in ((ROWS, self._rows), (HINTS, self._hints)) if each is not None}
        return lambda: {**wait(), **about, **{name: part() for name, part in parts.items()}}

    def retain(self, kept: list[Json]) -> None:
        self._records.retain(kept)
        for name, each in ((ROWS, self._rows), (HINTS, self._hints)):
            if each is not None:
                each.retain([as_map(version).get(name) for version in kept if isinstance(version, dict)])

    def close(self) -> None:
        for each in (self._records, self._rows, self._hints):
            if each is not None:
                each.close()


def class_units(op: ops.Process) -> int:
    """Units of the class in one of the column of event time."""
    if op.event is None:
        return 1
    own, clock = op.input.schema[op.time].dtype, type_of(op.event)
    return UNITS_PER_SECOND[clock.unit] // UNITS_PER_SECOND[own.unit] if own.kind is Kind.TS else 1
