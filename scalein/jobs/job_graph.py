"""The graph of a job: its operators in topological order, the source inputs that feed them, and the watermark.

One thread runs it. A source batch passes the operators on the path of its source; then the watermark advances, and the
results of windows that it closes pass the operators downstream.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby, islice
from pathlib import Path

import pyarrow as pa

from scalein.connectors.base import BoundSource
from scalein.dtypes import UNITS_PER_SECOND, DType, Kind, Schema
from scalein.errors import BadArgument, SourceLoc
from scalein.exec import fragments as cutting
from scalein.exec.changelog import changelog_rows
from scalein.exec.changelog import check as check_changes
from scalein.exec.compatibility import check_emit, described, signature
from scalein.exec.event_time import extent, extents, least
from scalein.exec.evolution import remove_unnamed, resume, states_of
from scalein.exec.fragments import Fragment, SourceEdge
from scalein.exec.operator import Blocking, Context, Distinct, Limit, Morsel, Operator, SnapshotFuture, Stateless
from scalein.exec.running_aggregate import RunningAggregate
from scalein.exec.scan_predicates import row_groups_skipped
from scalein.exec.speculation import speculate
from scalein.exec.window_aggregate import BufferedAggregate, SlidingAggregate, WindowedAggregate, open_aggregate
from scalein.ir import ops
from scalein.ir.exprs import type_of
from scalein.jobs.dead_letters import DeadLetters
from scalein.jobs.metrics import Metrics, Stage
from scalein.jobs.recovery import label, restored_positions
from scalein.jobs.source_inputs import SourceInput, source_input_of
from scalein.jobs.source_readers import Reader, SourceBatch
from scalein.options import Options
from scalein.storage.checked_json import Json, as_int

SHARED_TIMES = 1 << 20  # least rows whose times workers read in parallel: waking one costs a quarter of that
NEVER = 1 << 62  # delay of rows that come only at the end of the input


@dataclass(frozen=True)
class OutputSpec:
    """What the user asked of a job's results."""

    emit: str
    late: Callable[[pa.RecordBatch], None]
    keeps_late: bool  # with all their columns
    dead_letters: DeadLetters | None
    has_checkpoints: bool = True
    evolve: bool = False  # aggregates that the checkpoint does not have begin empty


class JobGraph:
    """The operators of a job, in topological order, with their inputs, clocks and state."""

    def __init__(self, op: ops.Op, options: Options, output: OutputSpec, folder: Path, epoch: dict[str, Json] | None,
                 metrics: Metrics, at: SourceLoc) -> None:
        self.metrics, self._options, self._emit, self._at = metrics, options, output.emit, at
        self._dead_letters = output.dead_letters
        op, self._resumed = resume(op, epoch, folder if output.has_checkpoints else None, output.emit,
                                   output.evolve, at)
        self._folder, self._op, self._skipped_before = folder, op, row_groups_skipped(op)
        self._edges = cutting.cut(op)
        self._fragments = cutting.fragments(self._edges)
        cutting.check_bounded(self._edges, self.is_bounded, output.emit, at)
        if epoch is not None:
            check_emit(epoch, self._emit_mode, at)
        known = restored_positions(epoch, self._edges, at)
        failed = None if output.dead_letters is None else output.dead_letters.failed
        self.steps: list[Operator] = []
        self._context: list[Context] = []
        try:
            for fragment, found in zip(self._fragments, self._resumed, strict=True):
                context = Context(options, folder / found.folder, output.late, output.keeps_late, self._count_timeless,
                                  failed, self._delay(fragment), output.has_checkpoints, found.columns,
                                  found.migration, found.holds_rows)
                self._context.append(context)
                self.steps.append(_step(fragment, context, found.state, self._emit_of(fragment, output.emit, at)))
                if isinstance(self.steps[-1], BufferedAggregate) and fragment.window is None and not self.is_bounded:
                    raise BadArgument("aggregates as large as their input have no result over an endless source",
                                      at=at, step="group_by", hint="group by a window of time as well")
            self._inputs = [self._input(edge, about) for edge, about in zip(self._edges, known, strict=True)]
            if self._dead_letters is not None:
                self._dead_letters.open(self._inputs[0].readers[0])
            cutting.check_order(self._fragments, [(each.path, len(each.readers)) for each in self._inputs])
        except BaseException:
            self.close()
            raise
        self.stages = [Stage("rows" if fragment.state is None else type(fragment.state).__name__.lower())
                       for fragment in self._fragments]  # fmt: skip
        self.watermark: int | None = None
        self._advanced: int | None = None  # the watermark that the steps know of
        if epoch is not None and epoch["watermark"] is not None:
            self.watermark = self._advanced = as_int(epoch["watermark"])

    @cached_property
    def signature(self) -> list[Json]:
        """What the states depend on."""
        return [signature(fragment) for fragment in self._fragments if fragment.state is not None]

    @cached_property
    def described(self) -> list[Json]:
        """The flow as text, by which the next run tells what has changed."""
        return described(self._op)

    @property
    def _emit_mode(self) -> str:
        """What the last state depends on besides its op: groups are stored differently for a changelog."""
        return self._emit if isinstance(self._fragments[-1].state, ops.Aggregate) else "final"

    @property
    def is_bounded(self) -> bool:
        return all(not isinstance(edge.source.data, BoundSource) or edge.source.data.bounded for edge in self._edges)

    @property
    def readers(self) -> list[Reader]:
        return [reader for source in self._inputs for reader in source.readers]

    @property
    def mark(self) -> object:
        """How far the job has come: where it is equal, an epoch would say nothing new."""
        return self.metrics.to_json(), self.watermark, [reader.position for reader in self.readers]

    def schema_of(self, sink: str, emit: str) -> pa.Schema:
        """The columns of results ("out"), of late rows, or of rows that failed."""
        if sink == "late":
            return self._late_schema
        if sink == "failed":
            assert self._dead_letters is not None
            return self._dead_letters.schema
        schema = self._fragments[-1].op.schema.arrow
        return schema.append(pa.field("op", pa.string(), False)) if emit == "changes" else schema

    @property
    def _late_schema(self) -> pa.Schema:
        """The columns of late rows: rows are late in the first windows on their way."""
        found: list[Schema] = []
        for source in self._inputs:
            windowed = (self._fragments[number] for number in source.path if self._fragments[number].window is not None)
            found += [fragment.before.schema for fragment in islice(windowed, 1) if fragment.before.schema not in found]
        if len(found) > 1:
            raise BadArgument("late rows of these windows have different columns, and late= takes one sink",
                              at=self._at, found="; ".join(map(repr, found)),
                              hint='select the same columns before each group_by, or late="drop"')
        return found[0].arrow if found else self._fragments[0].input.arrow

    def _count_timeless(self, rows: int) -> None:
        self.metrics.timeless_rows += rows

    def _input(self, edge: SourceEdge, known: dict[str, Json]) -> SourceInput:
        first = self._fragments.index(edge.first)
        path, fragment = [first], edge.first.then
        while fragment is not None:
            path.append(self._fragments.index(fragment))
            fragment = fragment.then
        is_timed = any(self._fragments[number].window is not None for number in path)
        return source_input_of(edge, self.steps[first].reads, self._context[first], known, path, is_timed)

    # --- rows

    def run(self, deliveries: list[SourceBatch],
            more: Callable[[], list[SourceBatch]] = lambda: []) -> Iterator[pa.RecordBatch]:
        """Yields immediate results and those of closed windows, lazily; the caller must exhaust it.

        Source batches that `more` returns meanwhile, on any thread, are appended to `deliveries`.
        """
        if self._dead_letters is not None:
            self._dead_letters.begin_round()
        is_one = len(self._inputs) == 1
        sources = [(self._inputs[0], deliveries)] if is_one else [
            (source, list(each)) for source, each in groupby(deliveries, key=self._input_of)]  # fmt: skip
        for source, some in sources:
            mark, step, stage = source.edge.watermark, self.steps[source.path[0]], self.stages[source.path[0]]
            if mark is not None and source.times is None and isinstance(step, WindowedAggregate):
                with stage.working():
                    is_done = speculate(self, step, mark.column, source.clocks, some,
                                               more if is_one else lambda: [])
                if is_done:
                    stage.rows_in += sum(delivery.batch.num_rows for delivery in some)
                    continue
            morsels = self._morsels(source, some)
            held_back: list[Morsel] = []  # a barrier
            while True:
                yield from self._as_changelog(self._along(source.path, self._until_due(morsels, held_back)))
                if not held_back:
                    break
                yield from self._advance()
        yield from self.advance()

    def _until_due(self, morsels: Iterator[Morsel], held_back: list[Morsel]) -> Iterator[Morsel]:
        """Morsels until an operator must see the watermark; the first one after that goes to `held_back`."""
        while held_back:
            yield held_back.pop()
        before = self._advanced
        for morsel in morsels:
            due = min((step.due for step in self.steps if step.due is not None), default=None)
            if due is not None and self.watermark is not None and self.watermark != before and self.watermark >= due:
                held_back.append(morsel)
                return
            yield morsel

    def _as_changelog(self, out: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
        """Results that nothing takes back are inserts to those who want changes."""
        last = self.steps[-1]
        if self._emit == "final" or (isinstance(last, RunningAggregate) and last.changes is not None):
            return out
        return [changelog_rows(batch, "insert") for batch in out]

    def fill(self, rows: Iterable[pa.RecordBatch]) -> None:
        """Bootstrap the state from historical rows: no output, no late rows, no metrics."""
        source, counted = self._inputs[0], self.metrics.to_json()
        late = [context.late for context in self._context]
        for context in self._context:
            context.late = lambda rows: None
        names = source.readers[0].columns
        for batch in rows:
            past = SourceBatch(source.readers[0], batch.select(names), source.readers[0].position, True, 0.0)
            self._along(source.path, self._morsels(source, [past]))
            if source.clocks:  # they are the past of all partitions
                greatest = source.clocks[source.readers[0].name].greatest
                for clock in source.clocks.values():
                    clock.greatest = greatest
                self.move_watermark()
            deque(self.advance(), maxlen=0)
        for context, given in zip(self._context, late, strict=True):
            context.late = given
        self.metrics.restore({**counted})

    def _input_of(self, delivery: SourceBatch) -> SourceInput:
        return next(source for source in self._inputs if delivery.reader in source.readers)

    def _morsels(self, source: SourceInput, deliveries: list[SourceBatch]) -> Iterator[Morsel]:
        """Batches with the watermark before each; time moves after them."""
        known = self._extents(source, deliveries)
        for delivery in deliveries:
            reader, batch, _, is_last, _, size = delivery
            self.metrics.rows_in += batch.num_rows
            self.metrics.bytes_in += size
            batch = batch if self._dead_letters is None else self._dead_letters.decoded(delivery)
            clock = source.clocks.get(reader.name)
            if clock is None:
                if batch.num_rows:
                    yield Morsel(batch, self.watermark if source.is_timed else None)
                continue
            times = self._times(source, batch)
            within = extent(times) if known is None else next(known)
            if batch.num_rows:
                assert source.edge.watermark is not None
                own = source.edge.watermark.column if source.times is None else ""
                yield Morsel(batch, self.watermark if source.is_timed else None, own if within else "",
                              *(within or ()))
            if within is not None:
                clock.observe(times, within, self.watermark)
            if is_last:
                clock.end_batch()
                self.move_watermark()

    def _extents(self, source: SourceInput, deliveries: list[SourceBatch]) -> Iterator[tuple[int, int] | None] | None:
        """How far the times of each batch reach, where workers find out sooner than this thread does batch by batch."""
        workers = self._context[source.path[0]].options.workers
        if workers == 1 or not source.clocks or source.times is not None or source.readers[0].malformed_columns or (
                sum(delivery.batch.num_rows for delivery in deliveries) < SHARED_TIMES):
            return None
        return iter(extents([self._times(source, delivery.batch) for delivery in deliveries], workers))

    def _times(self, source: SourceInput, batch: pa.RecordBatch) -> pa.Array:
        assert source.edge.watermark is not None
        if source.times is None:
            return batch.column(source.edge.watermark.column)
        found = source.times.run([batch])
        return pa.concat_arrays([each.column(0) for each in found]) if found else pa.array([], pa.int64())

    def _along(self, path: list[int], morsels: Iterable[Morsel]) -> list[pa.RecordBatch]:
        for number in path:
            stage = self.stages[number]
            with stage.working():
                morsels = found = self.steps[number].rows(stage.taking(morsels))
            stage.rows_out += sum(morsel.batch.num_rows for morsel in found)
        return [morsel.batch for morsel in morsels]

    def move_watermark(self) -> None:
        found = least([clock for source in self._inputs for clock in source.clocks.values()])
        if found is not None and (self.watermark is None or found > self.watermark):
            self.watermark = found

    def advance(self) -> Iterator[pa.RecordBatch]:
        """Results of windows that the watermark has closed, as they are asked for."""
        yield from self._advance()
        for step, stage in zip(self.steps, self.stages, strict=True):
            if isinstance(step, SlidingAggregate):  # nothing follows one that puts results off
                yield from self._as_changelog(list(stage.giving(step.given)))

    def _advance(self) -> Iterator[pa.RecordBatch]:
        if self.watermark is None or self.watermark == self._advanced:
            return
        before, self._advanced, now = self._advanced, self.watermark, self.watermark
        for number, step in enumerate(self.steps):  # what one gives comes before the next one's time advances
            for batch in self.stages[number].giving(partial(step.advance, now)):
                yield from self._as_changelog(self._along(self._downstream(number), [Morsel(batch, before)]))

    # --- for who looks

    @property
    def has_watermark(self) -> bool:
        return any(source.clocks for source in self._inputs)

    @property
    def has_running(self) -> bool:
        return any(isinstance(s.state, ops.Aggregate) and s.state.window is None for s in self._fragments)

    @property
    def has_blocking(self) -> bool:
        return any(fragment.is_blocking for fragment in self._fragments)

    @property
    def first_window(self) -> DType | None:
        """The type of time of the first windows, if there are any."""
        windows = (fragment.window for fragment in self._fragments if fragment.window is not None)
        return next((type_of(window.time) for window in windows), None)

    @property
    def partitions_without_time(self) -> list[str]:
        """Those that the first watermark waits for: active ones, or all if none is active."""
        clocks = [each for source in self._inputs for each in source.clocks.items() if each[1].watermark is None]
        active = [name for name, clock in clocks if not clock.is_idle and not clock.is_ended]
        return active or [name for name, _ in clocks]

    @property
    def slowest_partition(self) -> str | None:
        """The active partition with the least watermark, if others are further."""
        marks = [(clock.watermark, name) for source in self._inputs for name, clock in source.clocks.items()
                 if clock.watermark is not None and not clock.is_idle and not clock.is_ended]
        return min(marks)[1] if marks and min(marks)[0] < max(marks)[0] else None

    @property
    def next_end(self) -> int | None:
        """The end of the first window that something waits in."""
        ends = [end for step in self.steps if (end := step.next_end) is not None]
        return min(ends, default=None)

    @property
    def time_type(self) -> DType | None:
        """The type of times that the watermark is about."""
        return next((source.edge.timed.schema[source.edge.watermark.column].dtype for source in self._inputs
                     if source.edge.watermark is not None), None)

    @property
    def lag_s(self) -> float | None:
        """How far the watermark lags wall-clock time, in seconds."""
        dtype = self.time_type
        if self.watermark is None or dtype is None or dtype.kind is not Kind.TS:
            return None
        return round(time.time() - self.watermark / UNITS_PER_SECOND[dtype.unit], 3)

    @property
    def outlier_rows(self) -> int:
        """Rows whose times do not advance event time: a gap of more than a day is before them."""
        return sum(clock.outlier_rows for source in self._inputs for clock in source.clocks.values())

    @property
    def outlier_warning(self) -> str | None:
        """The warning of a batch with many outliers, if there was one in this run."""
        return next((clock.warning for source in self._inputs for clock in source.clocks.values()
                     if clock.warning is not None), None)

    @property
    def row_groups_skipped(self) -> int:
        """Row groups of Parquet that had nothing the flow keeps."""
        return row_groups_skipped(self._op) - self._skipped_before

    @property
    def state_bytes(self) -> int:
        """What steps hold in memory."""
        return sum(step.state_bytes for step in self.steps)

    def mark_idle(self, reader: Reader, is_idle: bool) -> None:
        for source in self._inputs:
            clock = source.clocks.get(reader.name) if reader in source.readers else None
            if clock is not None:
                clock.is_idle, clock.is_ended = is_idle, reader.has_ended
        self.move_watermark()

    @property
    def is_done(self) -> bool:
        """Whether rows that may still come can change nothing: all of them would meet a limit that is reached."""
        sated = {number for number, step in enumerate(self.steps) if isinstance(step, Limit) and step.is_done}
        return all(sated & set(source.path) for source in self._inputs)

    def finish(self) -> Iterator[pa.RecordBatch]:
        """Everything that is left, one batch after the other: it may be more than fits into memory. Nothing follows."""
        for number, step in enumerate(self.steps):
            for batch in self.stages[number].giving(step.finish):
                yield from self._as_changelog(self._along(self._downstream(number), [Morsel(batch, self._advanced)]))

    def _delay(self, fragment: Fragment) -> int:
        """How much earlier time is here: a window that is still open after an aggregation begins less than its size
        ago.
        """
        return max((self._delay(each) + _holds_back(each) for each in self._fragments if each.then is fragment),
                   default=0)

    def _emit_of(self, fragment: Fragment, emit: str, at: SourceLoc) -> str:
        """Only the last group tells its changes: what comes before it, the others take as it stays."""
        if emit == "final" or fragment.then is not None:
            return "final"
        check_changes(fragment, at)
        return emit

    def _downstream(self, number: int) -> list[int]:
        path = []
        fragment = self._fragments[number].then
        while fragment is not None:
            path.append(self._fragments.index(fragment))
            fragment = fragment.then
        return path

    # --- epochs

    def set_workers(self, workers: int) -> None:
        for context in self._context:
            context.options = replace(context.options, workers=workers)

    def flush(self) -> None:
        """Take all that has arrived into the steps' states."""
        for step in self.steps:
            step.flush()

    def snapshot(self) -> tuple[dict[str, Json], list[SnapshotFuture]]:
        """Where sources and time are, and the steps' states, as of now."""
        sources: list[Json] = [{"name": label(source.edge.source), "partitions": source.to_json()}
                               for source in self._inputs]
        frozen = [step.snapshot() for step in self.steps]
        return {"sources": sources, "watermark": self.watermark, "steps": self.signature, "flow": self.described,
                "operators": self.stateful([each.record for each in self._resumed]), "emit": self._emit_mode}, frozen

    def retain(self, kept: list[dict[str, Json]]) -> None:
        """Remove the state that no retained epoch names."""
        named: list[tuple[str, Json]] = []
        for epoch in kept:
            with suppress(ValueError, KeyError):  # one that says something else could not be gone on from anyway
                named += states_of(epoch)
        for step, found in zip(self.steps, self._resumed, strict=True):
            step.retain([state for folder, state in named if folder == found.folder])
        remove_unnamed(self._folder, [*(folder for folder, _ in named), *(each.folder for each in self._resumed)])

    def stateful(self, states: list[Json]) -> list[Json]:
        """Of all operators' states, those that an epoch stores."""
        return [state for state, fragment in zip(states, self._fragments, strict=True) if fragment.state is not None]

    def close(self) -> None:
        for step in self.steps:
            step.close()
        # These callbacks reference the job: without them it, and the results in its sinks, are freed at once.
        for context in self._context:
            context.late, context.timeless, context.failed = _nothing, _nothing, None
        self._dead_letters = None


def _nothing(given: object) -> None:
    pass


def _holds_back(fragment: Fragment) -> int:
    """How much later than their event times a fragment emits rows."""
    if fragment.is_blocking or (isinstance(fragment.state, ops.Aggregate) and fragment.window is None):
        return NEVER
    return 0 if fragment.window is None else fragment.window.delay


def _step(fragment: Fragment, context: Context, state: Json, emit: str) -> Operator:
    match fragment.state:
        case None:
            return Stateless(fragment, context)
        case ops.Aggregate():
            return open_aggregate(fragment, context, state, emit)
        case ops.Distinct():
            return Distinct(fragment, context, state)
        case ops.Limit():
            return Limit(fragment, context, state)
        case ops.Sort() | ops.OuterJoin():
            return Blocking(fragment, context, state)
