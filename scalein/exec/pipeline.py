"""Pipes: batches through a kernel that collects, or a table's groups through one.

Columns that a pipe hands on untouched are not copied: they are the input's own. Rows keep their
order whatever the number of workers: units of work are handed out and given back in order. A pipeline with a
`distinct` runs in one thread: side by side, which row of a key comes first would depend on timing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count, islice

import pyarrow as pa

from scalein.arrow_functions import taken
from scalein.exec.join_build import JoinTable
from scalein.exec.schedule import schedule
from scalein.exec.tables import HashTable, grown
from scalein.ir.exprs import Named
from scalein.ir.passes.pass_through import Origin, kernel_steps, row_numbers, split_items, taken_items
from scalein.ir.physical import Pipeline
from scalein.ir.stages import Collect, DedupStep, FilterStep, Probe, ProjectStep, Stage
from scalein.kernels import kernel_metrics
from scalein.kernels.call import call
from scalein.kernels.output import CHUNK_ROWS, collected
from scalein.kernels.prepare import Prepared
from scalein.kernels.specialise import Specialiser
from scalein.kernels.workers import start_worker
from scalein.layout import DEDUP, DONE, OUTPUT_FULL, FrameData
from scalein.llvm_backend.cache import Compiled
from scalein.options import Options

UNIT_ROWS = 1 << 19  # rows a worker takes at once: about a millisecond
FEW_ROWS = 1 << 16  # of a first chunk behind a filter: most of a larger one might never be touched


def run_pipe(pipe: Pipeline, batches: Iterator[pa.RecordBatch], joins: dict[int, JoinTable], options: Options,
             table: pa.Table | None) -> Iterator[pa.RecordBatch]:
    """The pipe's output for each input batch, in order."""
    work = ready(pipe, joins, options, table)
    return _run_alone(work, batches, options) if pipe.dedup is not None else run_ready(work, batches, options)


def ready(pipe: Pipeline, joins: dict[int, JoinTable], options: Options, table: pa.Table | None) -> Work:
    """What a pipe does, for as many runs as one likes; of a `table`, its facts are known before."""
    passed, computed = split_items(pipe)
    numbers = row_numbers(pipe)
    written = (*computed, *numbers.values())
    prepared = Prepared(pipe.name, pipe.input.schema, kernel_steps(pipe), lambda special: _collect(written, special),
                        tuple(i.expr for i in written), joins, options)
    prepared.assume(table)
    return Work(prepared, passed, written, pipe.schema.arrow, taken_items(pipe), tuple(numbers))


def run_ready(work: Work, batches: Iterator[pa.RecordBatch], options: Options) -> Iterator[pa.RecordBatch]:
    """The output for each input batch, in order."""
    if options.workers == 1:
        for batch in batches:
            if batch.num_rows:
                yield from work.run(batch, work.bound(batch))
        return
    rows = schedule().morsel_rows(UNIT_ROWS)
    units = (batch.slice(start, rows) for batch in batches for start in range(0, batch.num_rows, rows))
    begun = list(islice(units, 2))
    if len(begun) < 2:  # a thread costs as much as many rows
        for unit in begun:
            yield from work.run(unit, work.bound(unit))
        return
    yield from _run_side_by_side(work, chain(begun, units), options)


def _run_side_by_side(work: Work, units: Iterator[pa.RecordBatch], options: Options) -> Iterator[pa.RecordBatch]:
    stop, numbers, metrics = threading.Event(), count(), kernel_metrics.current_metrics()

    def ready_to_work() -> None:
        start_worker(stop, options.workers)
        kernel_metrics.attach_worker(metrics, next(numbers))

    with ThreadPoolExecutor(options.workers, "scalein", ready_to_work) as pool, _stopping(pool, stop):
        under_way: deque[Future[list[pa.RecordBatch]]] = deque()
        for unit in units:
            # Bound here, not in the thread: a later unit may bring a new variant of the kernel.
            under_way.append(pool.submit(work.run, unit, work.bound(unit)))
            while len(under_way) > 2 * options.workers:
                yield from under_way.popleft().result()
        while under_way:
            yield from under_way.popleft().result()


def _run_alone(work: Work, batches: Iterator[pa.RecordBatch], options: Options) -> Iterator[pa.RecordBatch]:
    """Units one after the other, with what has been seen so far; few rows may be enough for who asks."""
    seen: DedupTable | None = None
    rows = schedule().morsel_rows(UNIT_ROWS)
    for batch in batches:
        for start in range(0, batch.num_rows, rows):
            unit = batch.slice(start, rows)
            bound = work.bound(unit)
            if seen is None:
                assert work.prepared.stage is not None
                seen = DedupTable(work.prepared.stage, options)
            yield from work.run(unit, bound, seen)


@contextmanager
def _stopping(pool: ThreadPoolExecutor, stop: threading.Event) -> Iterator[None]:
    """Whatever ends the run early ends its threads."""
    try:
        yield
    except BaseException:
        stop.set()
        pool.shutdown(wait=False, cancel_futures=True)
        raise


@dataclass(frozen=True, slots=True)
class Work:
    """What a pipe does to a batch: some columns are handed on, nested ones taken, the others a kernel writes.

    The last columns that the kernel writes are row numbers: of the batch (None) and of joined tables.
    """

    prepared: Prepared
    passed: dict[int, str]
    computed: tuple[Named, ...]
    schema: pa.Schema
    taken: dict[int, Origin]
    numbered: tuple[int | None, ...]

    def release(self) -> None:
        """Let go of the data of a run that has ended."""
        self.prepared.release()

    def bound(self, batch: pa.RecordBatch) -> tuple[Compiled, FrameData] | None:
        """The kernel and its frame over a batch; None if there is nothing to compute."""
        prepared = self.prepared
        if not self.computed and all(isinstance(step, ProjectStep) for step in prepared.steps):
            return None
        compiled = prepared.compiled
        if prepared.learn(batch):
            compiled = prepared.compile_known() if prepared.knows_all else prepared.compile()
        assert compiled is not None
        frame = compiled.kernel.frame.new()
        prepared.bind(frame, batch)
        prepared.attach_joins(frame)
        frame["row"], frame["end"] = 0, batch.num_rows
        return compiled, frame

    def run(self, batch: pa.RecordBatch, bound: tuple[Compiled, FrameData] | None,
            seen: DedupTable | None = None) -> list[pa.RecordBatch]:
        if bound is None:
            return [_assemble(self.schema, batch, self.passed, [])]
        is_thinned = any(isinstance(step, FilterStep | Probe | DedupStep) for step in self.prepared.steps)
        parts = collected(*bound, self.computed, batch.num_rows, FEW_ROWS if is_thinned else CHUNK_ROWS,
                          None if seen is None else seen.call)
        if self.taken:
            return [rows for arrays in parts if len(arrays[0]) for rows in self._with_taken(batch, arrays)]
        if not self.passed:
            return [pa.RecordBatch.from_arrays(arrays, schema=self.schema) for arrays in parts if len(arrays[0])]
        result, start = [], 0
        for arrays in parts:
            result.append(_assemble(self.schema, batch.slice(start, len(arrays[0])), self.passed, arrays))
            start += len(arrays[0])
        return result

    def _with_taken(self, batch: pa.RecordBatch, arrays: list[pa.Array]) -> list[pa.RecordBatch]:
        """The written columns, and between them the rows of nested ones; in parts if those are too long."""
        try:
            return [self._with_all_taken(batch, arrays)]
        except (pa.ArrowInvalid, pa.ArrowCapacityError):
            half = len(arrays[0]) // 2
            if not half:
                raise
        halves = ([a[:half] for a in arrays], [a[half:] for a in arrays])
        return [rows for each in halves for rows in self._with_taken(batch, each)]

    def _with_all_taken(self, batch: pa.RecordBatch, arrays: list[pa.Array]) -> pa.RecordBatch:
        rows = dict(zip(self.numbered, arrays[len(arrays) - len(self.numbered) :], strict=True))
        rest = iter(arrays)
        columns = [self._take(batch, self.taken[i], rows) if i in self.taken else next(rest)
                   for i in range(len(self.schema))]  # fmt: skip
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _take(self, batch: pa.RecordBatch, origin: Origin, rows: dict[int | None, pa.Array]) -> pa.Array:
        found = batch.column(origin.column) if origin.join is None else (
            self.prepared.joins[origin.join].nested[origin.column])  # fmt: skip
        return taken(found, rows[origin.join])


def _collect(items: tuple[Named, ...], special: Specialiser) -> Collect:
    return Collect(tuple(Named(i.name, special.expr(i.expr)) for i in items))


def _assemble(schema: pa.Schema, batch: pa.RecordBatch, passed: dict[int, str],
              arrays: list[pa.Array]) -> pa.RecordBatch:
    rest = iter(arrays)
    columns = [batch.column(passed[i]) if i in passed else next(rest) for i in range(len(schema))]
    columns = [c if c.type == f.type else c.cast(f.type) for c, f in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


class DedupTable:
    """The keys that a `distinct` has met: one table for the whole run, and how many blocks are done.

    Batches may bring new variants of the kernel; records keep their layout, so the table stays.
    """

    def __init__(self, stage: Stage, options: Options) -> None:
        step = next(step for step in stage.steps if isinstance(step, DedupStep))
        self._table = HashTable(step.table, options)
        self._blocks = 0

    def call(self, compiled: Compiled, frame: FrameData) -> int:
        """Run the kernel until it is done or its output is full; the table gets the room it asks for."""
        while True:
            self._table.attach(frame, DEDUP)
            frame[f"{DEDUP}.blocks"] = self._blocks
            status = call(compiled, frame)
            self._table.detach(frame, DEDUP)
            self._blocks = frame[f"{DEDUP}.blocks"]
            if status in (DONE, OUTPUT_FULL):
                return status
            grown(self._table, status, frame, DEDUP)
