"""Pipelines: batches, or the groups of a table, through a fused kernel that writes columns.

Pass-through columns are not copied: they are the input's arrays. Rows retain their order with any number of workers:
morsels are dispatched and returned in order. A pipeline with a `distinct` runs in one thread: in parallel, the first
row of a key would depend on timing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import TYPE_CHECKING

import pyarrow as pa

from scalein.arrow_rows import as_type, taken
from scalein.exec.morsels import PIPELINE_MORSEL_ROWS
from scalein.exec.schedule import schedule
from scalein.exec.tables import HashTable, handle_full
from scalein.ir.exprs import Named
from scalein.ir.passes.pass_through import Origin, kernel_steps, row_numbers, split_items, taken_items
from scalein.ir.physical import Pipeline
from scalein.ir.stages import Collect, DedupStep, FilterStep, Probe, ProjectStep, Stage
from scalein.kernels import kernel_metrics
from scalein.kernels.call import call
from scalein.kernels.output import CHUNK_ROWS, collect_chunks
from scalein.kernels.prepare import Prepared
from scalein.kernels.specialise import Specialiser
from scalein.kernels.workers import start_worker
from scalein.layout import DEDUP, DONE, OUTPUT_FULL, FrameData
from scalein.llvm_backend.cache import Compiled
from scalein.memory import MemoryAccount
from scalein.options import Options

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from scalein.exec.join_build import JoinTable

FIRST_CHUNK_ROWS = 1 << 16  # of the first output chunk after a filter: most of a larger one might stay unused


def run_pipeline(pipeline: Pipeline, batches: Iterator[pa.RecordBatch], joins: dict[int, JoinTable], options: Options,
                 table: pa.Table | None, account: MemoryAccount | None = None) -> Iterator[pa.RecordBatch]:
    """The pipeline's output for each input batch, in order; the keys of a `distinct` are in the memory of the account.
    """
    if pipeline.dedup is not None and account is not None and account.limit is not None:
        from scalein.exec.external_distinct import distinct_within

        pipeline, batches = distinct_within(pipeline, batches, joins, options, account)
        table = None
    operator = prepare_pipeline(pipeline, joins, options, table)
    return run_prepared(operator, batches, options) if pipeline.dedup is None else (
        run_dedup(operator, batches, DedupTable(options)))  # fmt: skip


def prepare_pipeline(pipeline: Pipeline, joins: dict[int, JoinTable], options: Options,
                     table: pa.Table | None) -> PipelineOperator:
    """The operator of a pipeline, for any number of runs; if the input is one `table`, its facts are observed now."""
    passed, computed = split_items(pipeline)
    numbers = row_numbers(pipeline)
    written = (*computed, *numbers.values())
    prepared = Prepared(pipeline.name, pipeline.input.schema, kernel_steps(pipeline),
                        lambda special: _collect(written, special), tuple(i.expr for i in written), joins, options)
    prepared.observe_table(table)
    return PipelineOperator(prepared, passed, written, pipeline.schema.arrow, taken_items(pipeline), tuple(numbers))


def run_prepared(operator: PipelineOperator, batches: Iterator[pa.RecordBatch],
                 options: Options) -> Iterator[pa.RecordBatch]:
    """The output for each input batch, in order."""
    if options.workers == 1 and not options.deterministic:  # else batches are cut as for several workers
        for batch in batches:
            if batch.num_rows:
                yield from operator.run(batch, operator.bound(batch))
        return
    rows = schedule().morsel_rows(PIPELINE_MORSEL_ROWS)
    morsels = (batch.slice(start, rows) for batch in batches for start in range(0, batch.num_rows, rows))
    first = list(islice(morsels, 2))
    if len(first) < 2 or options.workers == 1:  # starting a thread is expensive
        for morsel in chain(first, morsels):
            yield from operator.run(morsel, operator.bound(morsel))
        return
    yield from _run_parallel(operator, chain(first, morsels), options)


def _run_parallel(operator: PipelineOperator, morsels: Iterator[pa.RecordBatch],
                  options: Options) -> Iterator[pa.RecordBatch]:
    from concurrent.futures import ThreadPoolExecutor  # a few rows need no threads

    stop, numbers, metrics = threading.Event(), count(), kernel_metrics.current_metrics()

    def initialize() -> None:
        start_worker(stop, options.workers)
        kernel_metrics.attach_worker(metrics, next(numbers))

    with ThreadPoolExecutor(options.workers, "scalein", initialize) as pool, _cancel_on_error(pool, stop):
        under_way: deque[Future[list[pa.RecordBatch]]] = deque()
        for morsel in morsels:
            # Bound here, not in the thread: a later morsel may need another variant of the kernel.
            under_way.append(pool.submit(operator.run, morsel, operator.bound(morsel)))
            while len(under_way) > 2 * options.workers:
                yield from under_way.popleft().result()
        while under_way:
            yield from under_way.popleft().result()


def run_dedup(operator: PipelineOperator, batches: Iterator[pa.RecordBatch],
              dedup: DedupTable) -> Iterator[pa.RecordBatch]:
    """Morsels one after the other, with one table of keys; the consumer may stop after a few rows."""
    rows = schedule().morsel_rows(PIPELINE_MORSEL_ROWS)
    for batch in batches:
        for start in range(0, batch.num_rows, rows):
            morsel = batch.slice(start, rows)
            bound = operator.bound(morsel)
            assert operator.prepared.stage is not None
            dedup.lay_out(operator.prepared.stage)
            yield from operator.run(morsel, bound, dedup)


@contextmanager
def _cancel_on_error(pool: ThreadPoolExecutor, stop: threading.Event) -> Iterator[None]:
    """Cancel the threads of a run that ends early."""
    try:
        yield
    except BaseException:
        stop.set()
        pool.shutdown(wait=False, cancel_futures=True)
        raise


@dataclass(frozen=True, slots=True)
class PipelineOperator:
    """A pipeline with its kernel: pass-through columns, nested columns taken by row number, and columns that the kernel
    writes.

    The last columns that the kernel writes are these row numbers: of the batch (None) and of joined tables.
    """

    prepared: Prepared
    passed: dict[int, str]
    computed: tuple[Named, ...]
    schema: pa.Schema
    taken: dict[int, Origin]
    numbered: tuple[int | None, ...]

    def release(self) -> None:
        """Drop references to the data of a run that has ended."""
        self.prepared.release()

    def bound(self, batch: pa.RecordBatch) -> tuple[Compiled, FrameData] | None:
        """The kernel and its frame over a batch; None if there is nothing to compute."""
        prepared = self.prepared
        if not self.computed and all(isinstance(step, ProjectStep) for step in prepared.steps):
            return None
        compiled = prepared.compiled
        if prepared.observe(batch):
            compiled = prepared.compile_known() if prepared.has_all_facts else prepared.compile()
        assert compiled is not None
        frame = compiled.kernel.frame.new()
        prepared.bind(frame, batch)
        prepared.attach_joins(frame)
        frame["row"], frame["end"] = 0, batch.num_rows
        return compiled, frame

    def run(self, batch: pa.RecordBatch, bound: tuple[Compiled, FrameData] | None,
            dedup: DedupTable | None = None) -> list[pa.RecordBatch]:
        if bound is None:
            return [_assemble(self.schema, batch, self.passed, [])]
        drops_rows = any(isinstance(step, FilterStep | Probe | DedupStep) for step in self.prepared.steps)
        parts = collect_chunks(*bound, self.computed, batch.num_rows, FIRST_CHUNK_ROWS if drops_rows else CHUNK_ROWS,
                          None if dedup is None else dedup.call)
        if self.taken:
            return [rows for arrays in parts if len(arrays[0]) for rows in self._with_nested(batch, arrays)]
        if not self.passed:
            return [pa.RecordBatch.from_arrays(arrays, schema=self.schema) for arrays in parts if len(arrays[0])]
        result, start = [], 0
        for arrays in parts:
            result.append(_assemble(self.schema, batch.slice(start, len(arrays[0])), self.passed, arrays))
            start += len(arrays[0])
        return result

    def _with_nested(self, batch: pa.RecordBatch, arrays: list[pa.Array]) -> list[pa.RecordBatch]:
        """The written columns with the nested ones between them; in several batches if those are too long."""
        try:
            return [self._with_all_nested(batch, arrays)]
        except (pa.ArrowInvalid, pa.ArrowCapacityError):
            half = len(arrays[0]) // 2
            if not half:
                raise
        halves = ([a[:half] for a in arrays], [a[half:] for a in arrays])
        return [rows for each in halves for rows in self._with_nested(batch, each)]

    def _with_all_nested(self, batch: pa.RecordBatch, arrays: list[pa.Array]) -> pa.RecordBatch:
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
    columns = [as_type(c, f.type) for c, f in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


class DedupTable:
    """The keys that a `distinct` has seen: one table for the whole run, and the number of blocks done.

    Batches may need new variants of the kernel; the layout of records does not change, so the table remains valid.
    """

    def __init__(self, options: Options) -> None:
        self._options, self._blocks = options, 0
        self._table: HashTable | None = None

    def lay_out(self, stage: Stage) -> None:
        """Use the layout of a kernel's stage, unless there is one already."""
        if self._table is None:
            step = next(step for step in stage.steps if isinstance(step, DedupStep))
            self._table = HashTable(step.table, self._options)

    @property
    def bytes(self) -> int:
        """What the keys take."""
        return 0 if self._table is None else self._table.bytes

    def call(self, compiled: Compiled, frame: FrameData) -> int:
        """Run the kernel until it is done or its output is full; the table grows as needed."""
        table = self._table
        assert table is not None
        while True:
            table.attach(frame, DEDUP)
            frame[f"{DEDUP}.blocks"] = self._blocks
            status = call(compiled, frame)
            table.detach(frame, DEDUP)
            self._blocks = frame[f"{DEDUP}.blocks"]
            if status in (DONE, OUTPUT_FULL):
                return status
            handle_full(table, status, frame, DEDUP)
