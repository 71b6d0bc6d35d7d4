"""State machines of the user's at work: a hash table of what keys remember, and the kernels over it.

One thread runs them: rows of a key come in order. Bounded runs (`run_process`) fire what timers are left at the end:
first those up to the time of the last row, also if others were set meanwhile, then each one that is set once. So a
timer that sets the next one comes to an end, and jobs, whose watermark stays below the last row, give the same.

Under a memory limit, the keys of a bounded run may become too many. Then what they remember, and the rows that are
left, are partitioned by the hash of the key and spilled; one partition goes on after the other, and is divided again if
its keys are too many. Rows then come out by partition; those of a key stay in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
import pyarrow as pa

from scalein.arrow_rows import from_numpy
from scalein.dtypes import Schema
from scalein.errors import ComputeError
from scalein.exec.event_time import extent
from scalein.exec.morsels import PIPELINE_MORSEL_ROWS
from scalein.exec.node_cut import scan_of_rows
from scalein.exec.pipeline import FIRST_CHUNK_ROWS, PipelineOperator, run_pipeline
from scalein.exec.spill_file import SpillFile
from scalein.exec.spill_partitions import HASH_BITS, PARTITION_BITS, SpillPartitions, hash_items
from scalein.exec.tables import ADDRESS_SPACE, HashTable, handle_full
from scalein.ir.exprs import Col, Expr, Named, columns
from scalein.ir.partials import StateColumns, columns_of
from scalein.ir.physical import Pipeline, Process, identity
from scalein.ir.process import CHANGED, HELD, NEVER, STATUS, part_of
from scalein.ir.stages import Collect, FromTable, Stage
from scalein.ir.stages import Process as ProcessSink
from scalein.kernels.call import call, kernel
from scalein.kernels.output import CHUNK_ROWS, collect_chunks
from scalein.kernels.prepare import Prepared
from scalein.kernels.specialise import Specialiser
from scalein.layout import DONE, OUTPUT_FULL, FrameData
from scalein.llvm_backend.cache import Compiled
from scalein.memory import MemoryAccount, address, reserve
from scalein.options import Options

TABLE_SHARE = 4  # of a memory limit, the states of a bounded run have 1/4
MIN_TABLE_BYTES = 1 << 20
LIMITED_ROWS = 1 << 16  # under a memory limit, rows after which the states' size is looked at

Failed = Callable[[int, ComputeError], None]  # the number of a row in its batch


def run_process(node: Process, batches: Iterator[pa.RecordBatch], options: Options, table: pa.Table | None,
                latest: int = -NEVER, account: MemoryAccount | None = None) -> Iterator[pa.RecordBatch]:
    """The rows that the class yields, in the order in which it did. `latest` is the time of a row of other keys."""
    run = _BoundedRun(node, options, latest, None if account is None else account.limit)
    states = states_of(node, options, run.limit is not None)
    if table is not None:
        states.observe(table)
    yield from run.over(states, batches, 0)


class _BoundedRun:
    """The run of a process over rows that end."""

    def __init__(self, node: Process, options: Options, latest: int, limit: int | None) -> None:
        self._node, self._options, self._latest = node, options, latest
        self._times = None if node.time is None else node_times(node)
        self.limit = limit
        self._most = None if limit is None else max(MIN_TABLE_BYTES, limit // TABLE_SHARE)

    def over(self, states: States, batches: Iterator[pa.RecordBatch], shift: int) -> Iterator[pa.RecordBatch]:
        """What rows yield, and then the timers of their keys. The bits of the hash before `shift` are equal."""
        rows = self._noted(batches)
        for batch in rows:
            yield from states.rows(batch)
            if self._most is not None and states.bytes > self._most and shift < HASH_BITS:
                yield from self._spilled(states, rows, shift)
                return
        if self._node.body.has_timer:
            yield from states.fire(self._latest)
            yield from states.fire(NEVER - 1, once=True)

    def _noted(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The batches, in parts after which the memory of states is looked at; their latest time is noted."""
        for batch in batches:
            if self._times is not None and batch.num_rows:
                self._latest = max(self._latest, self._times(batch))
            if self._most is None:
                yield batch
                continue
            for start in range(0, batch.num_rows, LIMITED_ROWS):
                yield batch.slice(start, LIMITED_ROWS)

    def _spilled(self, states: States, rows: Iterator[pa.RecordBatch], shift: int) -> Iterator[pa.RecordBatch]:
        """The same for what is left, one partition of the keys after the other."""
        node = self._node
        keys = tuple(Col(key.name, key.dtype, key.nullable) for key in node.table.keys)
        file = SpillFile()
        try:
            known = self._partitioned(file, iter([states.records()]), Schema.from_arrow(records_schema(node)), keys,
                                      shift)
            states.clear()
            left = self._partitioned(file, rows, node.input.schema, tuple(key.expr for key in node.keys), shift)
            for some, records in zip(left.parts, known.parts, strict=True):
                if some.rows or records.rows:
                    part = states_of(node, self._options, True)
                    for batch in records:
                        part.load(batch.select(records_schema(node).names))
                    given = (batch.select(node.input.schema.names) for batch in some)
                    yield from self.over(part, given, shift + PARTITION_BITS)
        finally:
            file.close()

    def _partitioned(self, file: SpillFile, batches: Iterator[pa.RecordBatch], schema: Schema,
                     keys: tuple[Expr, ...], shift: int) -> SpillPartitions:
        assert self.limit is not None
        hashed = Pipeline(scan_of_rows(schema), (), (*identity(schema), *hash_items(keys)), (), "partition")
        parts = SpillPartitions(file, hashed.schema.arrow, self.limit, shift)
        for batch in run_pipeline(hashed, batches, {}, replace(self._options, memory=None), None):
            parts.add(batch)
        parts.flush()
        return parts


def node_times(node: Process) -> Callable[[pa.RecordBatch], int]:
    """The greatest event time of a batch, as the class sees it."""
    assert node.time is not None
    assert node.body.clock is not None
    (name,) = columns(node.time)
    arrow = node.body.clock.arrow

    def greatest(batch: pa.RecordBatch) -> int:
        column = batch.column(name)
        found = extent(column if column.type == arrow else column.cast(arrow))
        return -NEVER if found is None else found[1]

    return greatest


def _report(failed: Failed, start: int, row: int, error: ComputeError) -> None:
    failed(start + row, error)


class States(Protocol):
    """What the keys of a process remember."""

    def observe(self, table: pa.Table) -> None:
        """All rows to come are of this table."""

    def rows(self, batch: pa.RecordBatch, failed: Failed | None = None) -> Iterator[pa.RecordBatch]:
        """What the rows of a batch yield, in their order; rows that fail go to `failed`, or the run ends."""

    def fire(self, until: int, once: bool = False) -> Iterator[pa.RecordBatch]:
        """Fire timers up to a time, each at most `once` or until none is left, and forget quiet keys."""

    def records(self) -> pa.RecordBatch:
        """All keys that are not forgotten, with their fields."""

    def load(self, records: pa.RecordBatch) -> None:
        """Make records of keys and fields, as `changes` gives them, of keys that are not there."""

    def changes(self) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """Keys with their fields, and keys that were forgotten, since the last call."""

    @property
    def due_times(self) -> np.ndarray:
        """When time will change each record, at the earliest, by its number."""

    def due(self, known: np.ndarray) -> pa.RecordBatch:
        """The keys that time will change earlier than `known`, by number, each with the time: column `due`."""

    def compact(self) -> None:
        """Drop the records of keys that were forgotten, after `changes` has told of them."""

    def clear(self) -> None:
        """Forget all keys."""

    @property
    def bytes(self) -> int: ...

    @property
    def count(self) -> int:
        """Records."""


def states_of(node: Process, options: Options, tracked: bool) -> States:
    if node.body.python is not None:
        from scalein.exec.python_process import PythonStates

        return PythonStates(node, tracked)
    return CompiledStates(node, options, tracked)


def records_schema(node: Process) -> pa.Schema:
    """The keys and fields of records, as a store has them."""
    fields = [pa.field(slot.name, slot.dtype.arrow if slot.ring is None else pa.binary(), slot.nullable)
              for slot in node.body.stored]
    return pa.schema([*key_schema(node), *fields])


def key_schema(node: Process) -> pa.Schema:
    return pa.schema([pa.field(key.name, key.dtype.arrow, key.nullable) for key in node.table.keys])


class CompiledStates:
    """Records in a hash table."""

    def __init__(self, node: Process, options: Options, tracked: bool) -> None:
        self._node, self._options, self._tracked = node, options, tracked
        self._items, self._schema = identity(node.schema), node.schema.arrow
        self._table = HashTable(node.table, options)
        layout = node.table.layout
        self._words, self._status = layout.size // 8, layout.offset(part_of(node.table, STATUS)) // 8
        self._due = reserve(ADDRESS_SPACE // layout.size * 8).view(np.int64) if tracked and node.body.is_timed else None
        args: tuple[Expr, ...] = (*node.args, *(() if node.time is None else (node.time,)))
        exprs = (*(key.expr for key in node.keys), *args)
        prepared = Prepared("process", node.input.schema, (), self._sink, exprs, {}, options)
        self._rows = PipelineOperator(prepared, {}, self._items, self._schema, {}, ())
        self._loading: PipelineOperator | None = None
        self._keys = tuple(Col(key.name, key.dtype, key.nullable) for key in node.table.keys)
        self._kernels: dict[str, tuple[Compiled, tuple[Named, ...]]] = {}
        self._failed: Failed | None = None

    def observe(self, table: pa.Table) -> None:
        self._rows.prepared.observe_table(table)

    def _sink(self, special: Specialiser) -> ProcessSink:
        node = self._node
        keys, args = (tuple(map(special.expr, exprs)) for exprs in ((k.expr for k in node.keys), node.args))
        time = None if node.time is None else special.expr(node.time)
        return ProcessSink(node.table, keys, args, node.body, self._items, time, "rows", self._tracked)

    @property
    def bytes(self) -> int:
        side = self._table.side_state
        heap = 0 if side is None or side.heap is None else sum(map(len, side.heap.pieces))
        return self._table.bytes + heap + (0 if self._due is None else 8 * self._table.count)

    # --- rows and timers

    def rows(self, batch: pa.RecordBatch, failed: Failed | None = None) -> Iterator[pa.RecordBatch]:
        for start in range(0, batch.num_rows, PIPELINE_MORSEL_ROWS):
            bound = self._rows.bound(batch.slice(start, PIPELINE_MORSEL_ROWS))
            assert bound is not None
            report = None if failed is None else partial(_report, failed, start)
            yield from self._run(*bound, self._items, self._schema, report)

    def fire(self, until: int, once: bool = False) -> Iterator[pa.RecordBatch]:
        node, table = self._node, self._table
        picked = np.arange(table.count) if self._due is None else np.flatnonzero(self._due[: table.count] <= until)
        if not len(picked):
            return
        sink = ProcessSink(node.table, self._keys, (), node.body, self._items, None, "timers", self._tracked)
        compiled, _ = self._kernel("timers", FromTable(node.table, picked=True), sink)
        frame = self._over(compiled, picked)
        frame["until"], frame["once"] = until, int(once)
        if not node.body.has_timer:  # it only forgets, so the kernel has no output
            self._call(compiled, frame, None)
            return
        yield from self._run(compiled, frame, self._items, self._schema, None)

    def _kernel(self, name: str, reader: FromTable, sink: ProcessSink | Collect) -> tuple[Compiled, tuple[Named, ...]]:
        if name not in self._kernels:
            self._kernels[name] = kernel(Stage(name, reader, (), sink), self._options), sink.items
        return self._kernels[name]

    def _over(self, compiled: Compiled, picked: np.ndarray) -> FrameData:
        """A frame over some records, by their numbers."""
        numbers = np.ascontiguousarray(picked, np.int64)
        frame = compiled.kernel.frame.new()
        frame["source"], frame["picked"] = self._table.first, address(numbers)
        frame["row"], frame["end"] = 0, len(numbers)
        frame.keep["picked"] = numbers
        return frame

    def _run(self, compiled: Compiled, frame: FrameData, items: tuple[Named, ...], schema: pa.Schema,
             failed: Failed | None) -> Iterator[pa.RecordBatch]:
        def run(compiled: Compiled, frame: FrameData) -> int:
            return self._call(compiled, frame, failed)

        for arrays in collect_chunks(compiled, frame, items, CHUNK_ROWS, FIRST_CHUNK_ROWS, run):
            if len(arrays[0]):
                yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _call(self, compiled: Compiled, frame: FrameData, failed: Failed | None) -> int:
        """Run the kernel until it is done or its output is full; the table grows as needed."""
        while True:
            self._table.attach(frame)
            if self._due is not None:
                frame["due"] = address(self._due)
            try:
                status = call(compiled, frame)
            except ComputeError as error:
                self._table.detach(frame)
                if failed is None:
                    raise
                row = frame["row"]
                failed(row, error)
                frame["row"] = row + 1
                continue
            self._table.detach(frame)
            if status in (DONE, OUTPUT_FULL):
                return status
            handle_full(self._table, status, frame)

    # --- records as columns

    def load(self, records: pa.RecordBatch) -> None:
        if self._loading is None:
            node, schema = self._node, self._records()
            fields = {item.name: item.expr for item in identity(schema)}
            keys = tuple(fields[key.name] for key in node.keys)
            args = tuple(fields[slot.name] for slot in node.body.stored)

            def sink(special: Specialiser) -> ProcessSink:
                given, values = tuple(map(special.expr, keys)), tuple(map(special.expr, args))
                return ProcessSink(node.table, given, values, node.body, (), None, "load", True)

            prepared = Prepared("load", schema, (), sink, (*keys, *args), {}, self._options)
            self._loading = PipelineOperator(prepared, {}, self._items, self._schema, {}, ())
        for start in range(0, records.num_rows, PIPELINE_MORSEL_ROWS):
            bound = self._loading.bound(records.slice(start, PIPELINE_MORSEL_ROWS))
            assert bound is not None
            self._call(*bound, None)

    def _records(self) -> Schema:
        return Schema.from_arrow(records_schema(self._node))

    def records(self) -> pa.RecordBatch:
        return self._columns(np.flatnonzero(self._table.words(self._words)[:, self._status] & HELD))

    def changes(self) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        status = self._table.words(self._words)[:, self._status]
        changed = np.flatnonzero(status & CHANGED)
        is_held = (status[changed] & HELD) != 0
        records, gone = self._columns(changed[is_held]), self._columns(changed[~is_held])
        status[changed] &= ~CHANGED
        return records, gone.select(key_schema(self._node).names)

    @property
    def due_times(self) -> np.ndarray:
        assert self._due is not None
        return self._due[: self._table.count].copy()

    def due(self, known: np.ndarray) -> pa.RecordBatch:
        names = key_schema(self._node).names
        times = self.due_times
        before = np.full(len(times), NEVER)
        before[: len(known)] = known
        status = self._table.words(self._words)[:, self._status]
        picked = np.flatnonzero((times < before) & ((status & HELD) != 0))
        return self._columns(picked).select(names).append_column("due", from_numpy(times[picked]))

    def _columns(self, picked: np.ndarray) -> pa.RecordBatch:
        """The keys and fields of some records."""
        schema = records_schema(self._node)
        table = self._node.table
        raw = columns_of(table, StateColumns.of(table), 0)[: len(self._node.body.stored)]
        items = (*(Named(key.name, key) for key in self._keys),
                 *(Named(column.name, Col(column.name, column.dtype, column.nullable)) for column in raw))
        reader = FromTable(replace(table, outputs=raw), picked=True)
        compiled, _ = self._kernel("records", reader, Collect(items))
        parts = [pa.RecordBatch.from_arrays([a if a.type == f.type else a.cast(f.type)
                                             for a, f in zip(arrays, schema, strict=True)], schema=schema)
                 for arrays in collect_chunks(compiled, self._over(compiled, picked), items, len(picked))]
        return parts[0] if len(parts) == 1 else pa.concat_batches(parts)

    @property
    def count(self) -> int:
        return self._table.count

    def compact(self) -> None:
        status = self._table.words(self._words)[:, self._status]
        records = self.records()
        changed = np.flatnonzero(status[(status & HELD) != 0] & CHANGED)
        self.clear()
        self.load(records)
        self._table.words(self._words)[changed, self._status] |= CHANGED

    def clear(self) -> None:
        self._table.clear()
        if self._table.side_state is not None:
            self._table.side_state.clear()
