"""The graph of a job: its operators (`exec/rounds.py`), and the sources, epochs and metrics that belong to them.

One thread runs it. A source batch passes the operators downstream of its source; then the watermark advances, and the
results of windows that it closes pass the operators downstream.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path

import pyarrow as pa

from scalein.connectors.base import BoundSource
from scalein.dtypes import UNITS_PER_SECOND, DType, Kind, Schema
from scalein.errors import BadArgument, SourceLoc
from scalein.exec import fragments as cutting
from scalein.exec.changelog import check as check_changes
from scalein.exec.compatibility import check_emit, described, joined_tables, signature
from scalein.exec.event_time import extent, extents, least
from scalein.exec.evolution import folder_name, remove_unnamed, resume, states_by_folder
from scalein.exec.fragments import Fragment, SourceEdge
from scalein.exec.operator import Context, Growing, Morsel, Operator, SnapshotFuture, open_operator
from scalein.exec.operator_metrics import OperatorMetrics
from scalein.exec.rounds import Node, Result, Rounds, Timeline
from scalein.exec.scan_predicates import row_groups_skipped
from scalein.exec.stream_join import StreamJoin
from scalein.exec.window_aggregate import BufferedAggregate
from scalein.ir import ops
from scalein.ir.exprs import type_of
from scalein.jobs.dead_letters import DeadLetters
from scalein.jobs.metrics import Metrics
from scalein.jobs.recovery import event_time_of, label, restored_positions, restored_watermark, state_numbers
from scalein.jobs.source_inputs import SourceInput, source_input_of
from scalein.jobs.source_readers import Reader, SourceBatch
from scalein.jobs.state_growth import StateGrowth, growth_warning
from scalein.options import Options
from scalein.storage.checked_json import Json

SHARED_TIMES = 1 << 20  # least rows whose times workers read in parallel: waking one costs a quarter of that


@dataclass(frozen=True)
class OutputSpec:
    """What the user asked of a job's results."""

    roles: Sequence[str]  # of the outputs, by which checkpoints know them
    emit: str
    late: Callable[[pa.RecordBatch], None]
    keeps_late: bool  # with all their columns
    dead_letters: DeadLetters | None
    has_checkpoints: bool = True
    evolve: bool = False  # aggregates that the checkpoint does not have begin empty


class JobGraph:
    """The operators of a job, in topological order, with their inputs, clocks and state."""

    def __init__(self, roots: Sequence[ops.Op], options: Options, output: OutputSpec, folder: Path,
                 epoch: dict[str, Json] | None, metrics: Metrics, at: SourceLoc) -> None:
        self.metrics, self._options, self._emit, self._at = metrics, options, output.emit, at
        numbers, has_lost_outputs = state_numbers(epoch, output.roles) if epoch is not None else ([], False)
        roots, self._resumed = resume(roots, epoch, numbers, folder if output.has_checkpoints else None, output.emit,
                                      output.evolve, at)
        self._roots, self._roles, self._dead_letters = roots, output.roles, output.dead_letters
        self._skipped_before, self._folder = row_groups_skipped(*roots), folder
        self._edges = cutting.cut_together(roots, output.emit)
        self._fragments = cutting.fragments(self._edges)
        self._ends = [next(each for each in self._fragments if number in each.outputs) for number in range(len(roots))]
        cutting.check_event_time(roots)
        cutting.check_bounded(self._edges, self.is_bounded, output.emit, at)
        if epoch is not None:
            check_emit(epoch, self._emit_mode, at)
        known = restored_positions(epoch, self._edges, self._ends, has_lost_outputs, at)
        self._context: list[Context] = []
        self._inputs: list[SourceInput] = []
        self._rounds = Rounds([], output.emit)
        try:
            self._rounds = Rounds(self._open_nodes(output, self._timelines(epoch, known)), output.emit)
            for edge, about in zip(self._edges, known, strict=True):
                self._inputs.append(self._input(edge, about))
            if self._dead_letters is not None:
                self._dead_letters.open(source.readers[0] for source in self._inputs)
            cutting.check_order(self._edges, [len(source.readers) for source in self._inputs])
        except BaseException:
            self.close()
            raise

    def _open_nodes(self, output: OutputSpec, timelines: dict[int, Timeline]) -> list[Node]:
        """The operators, connected as their fragments are."""
        failed = None if output.dead_letters is None else output.dead_letters.failed
        nodes: dict[int, Node] = {}
        try:
            for fragment, found in zip(self._fragments, self._resumed, strict=True):
                context = Context(self._options, self._folder / folder_name(found.folder), output.late,
                                  output.keeps_late, self._count_timeless, failed, output.has_checkpoints,
                                  found.columns, found.migration, found.holds_rows)
                self._context.append(context)
                operator = open_operator(fragment, context, found.state, self._emit_of(fragment))
                name = "rows" if fragment.state is None else type(fragment.state).__name__.lower()
                nodes[id(fragment)] = Node(operator, OperatorMetrics(name), timelines[id(fragment)],
                                           fragment.is_timed, outputs=fragment.outputs, lead=fragment.lead)
                if isinstance(operator, BufferedAggregate) and fragment.window is None and not self.is_bounded:
                    raise BadArgument("aggregates as large as their input have no result over an endless source",
                                      at=self._at, step="group_by", hint="group by a window of time as well")
        except BaseException:
            for node in nodes.values():
                node.operator.close()
            raise
        for fragment in self._fragments:
            node = nodes[id(fragment)]
            node.consumers = [nodes[id(each)] for each in fragment.consumers]
            for consumer in node.consumers:
                consumer.inputs.append(node)
        for edge in self._edges:
            for first in edge.firsts:
                nodes[id(first)].is_fed = True
        return list(nodes.values())

    def _timelines(self, epoch: dict[str, Json] | None, known: list[dict[str, Json]]) -> dict[int, Timeline]:
        """The timeline of each fragment: sources whose rows meet share one. `known` is what an epoch says of each."""
        groups: list[list[SourceEdge]] = []
        for edge in self._edges:
            reached = {id(each) for each in cutting.fragments([edge])}
            meeting = [group for group in groups if reached & {id(each) for each in cutting.fragments(group)}]
            together = [*(each for group in meeting for each in group), edge]
            groups = [*(group for group in groups if group not in meeting), together]
        found: dict[int, Timeline] = {}
        for group in groups:
            sources = [about for edge, about in zip(self._edges, known, strict=True) if edge in group]
            timeline = Timeline(restored_watermark(epoch, sources))
            found |= {id(fragment): timeline for fragment in cutting.fragments(group)}
        return found

    @property
    def steps(self) -> list[Operator]:
        return self._rounds.operators

    @property
    def stages(self) -> list[OperatorMetrics]:
        return [node.metrics for node in self._rounds.nodes]

    @cached_property
    def _upstream(self) -> dict[str, list[Fragment]]:
        """The fragments with state that each output depends on, by role."""
        return {role: [each for each in cutting.upstream(end, self._edges) if each.state is not None]
                for role, end in zip(self._roles, self._ends, strict=True)}

    @cached_property
    def signature(self) -> list[Json]:
        """What the states depend on."""
        return [signature(fragment) for fragment in self._fragments if fragment.state is not None]

    @cached_property
    def _described(self) -> dict[str, list[Json]]:
        """Each output's flow as text, by role."""
        return {role: described(root) for role, root in zip(self._roles, self._roots, strict=True)}

    @property
    def described(self) -> list[Json]:
        """The flows as text, by which the next run tells what has changed."""
        return [line for role in sorted(self._described) for line in self._described[role]]

    @cached_property
    def joined_tables(self) -> list[Json]:
        """What the static tables are, by which the next run tells that they have changed."""
        return joined_tables(self._roots)

    @property
    def _emit_mode(self) -> str:
        """What the last states depend on besides their ops: groups are stored differently for a changelog."""
        return self._emit if any(isinstance(end.state, ops.Aggregate) for end in self._ends) else "final"

    @property
    def is_bounded(self) -> bool:
        return all(not isinstance(edge.source.data, BoundSource) or edge.source.data.bounded for edge in self._edges)

    @property
    def readers(self) -> list[Reader]:
        return [reader for source in self._inputs for reader in source.readers]

    @property
    def watermark(self) -> int | None:
        """The least of the watermarks; there are several if sources do not meet."""
        found = [source.timeline.watermark for source in self._inputs if source.clocks]
        return min((mark for mark in found if mark is not None), default=None)

    @property
    def mark(self) -> object:
        """How far the job has come: where it is equal, an epoch would say nothing new."""
        return (self.metrics.to_json(), [source.timeline.watermark for source in self._inputs],
                [reader.position for reader in self.readers])

    def output_schema(self, output: int) -> pa.Schema:
        """The columns of the results of an output."""
        schema = self._ends[output].op.schema.arrow
        return schema.append(pa.field("op", pa.string(), False)) if self._emit == "changes" else schema

    @property
    def failed_schema(self) -> pa.Schema:
        """The columns of dead letters."""
        assert self._dead_letters is not None
        return self._dead_letters.schema

    @property
    def late_schema(self) -> pa.Schema:
        """The columns of late rows: rows are late in the first windows on their way."""
        found: list[Schema] = []
        waiting = [first for edge in self._edges for first in edge.firsts]
        while waiting:
            fragment = waiting.pop(0)
            if not fragment.is_timed or fragment.state is None:
                waiting += fragment.consumers
            elif fragment.state.late_schema not in found:
                found.append(fragment.state.late_schema)
        if len(found) > 1:
            raise BadArgument("late rows of these windows have different columns, and late= takes one sink",
                              at=self._at, found="; ".join(map(repr, found)),
                              hint='select the same columns before each group_by, or late="drop"')
        return found[0].arrow if found else self._fragments[0].input.arrow

    def _count_timeless(self, rows: int) -> None:
        self.metrics.timeless_rows += rows

    def _input(self, edge: SourceEdge, known: dict[str, Json]) -> SourceInput:
        numbers = [self._fragments.index(first) for first in edge.firsts]
        nodes = [self._rounds.nodes[number] for number in numbers]
        needed = [name for node in nodes for name in node.operator.reads]
        is_timed = any(fragment.is_timed for fragment in cutting.fragments([edge]))
        found = source_input_of(edge, needed, self._context[numbers[0]], known, nodes, is_timed)
        found.timeline.clocks += found.clocks.values()
        return found

    # --- rows

    def run(self, deliveries: list[SourceBatch],
            more: Callable[[], list[SourceBatch]] = lambda: []) -> Iterator[Result]:
        """Yields immediate results and those of closed windows, lazily; the caller must exhaust it.

        Source batches that `more` returns meanwhile, on any thread, are appended to `deliveries`.
        """
        if self._dead_letters is not None:
            self._dead_letters.begin_round()
        is_one = len(self._inputs) == 1
        for source, some in [(self._inputs[0], deliveries)] if is_one else self._turns(deliveries):
            mark = source.edge.watermark
            if mark is not None and source.times is None and len(source.nodes) == 1 and self._rounds.speculate(
                    source.nodes[0], mark.column, source.clocks, some, more if is_one else lambda: []):
                self.metrics.rows_in += sum(delivery.batch.num_rows for delivery in some)
                self.metrics.bytes_in += sum(delivery.size for delivery in some)
                continue
            yield from self._rounds.run(source.nodes, self._morsels(source, some))
        yield from self.advance()

    def _turns(self, deliveries: list[SourceBatch]) -> Iterator[tuple[SourceInput, list[SourceBatch]]]:
        """The batches of several sources, in the order of arrival. Where streams are joined, the source whose event
        time is behind comes first, so that rows of the other need not wait for it longer than they must.
        """
        if not any(isinstance(step, StreamJoin) for step in self.steps):
            yield from ((source, list(each)) for source, each in groupby(deliveries, key=self._input_of))
            return
        waiting: dict[SourceInput, deque[SourceBatch]] = {}
        for delivery in deliveries:
            waiting.setdefault(self._input_of(delivery), deque()).append(delivery)
        while waiting:
            marks = {source: least(list(source.clocks.values())) for source in waiting}
            source = min(waiting, key=lambda each: -math.inf if marks[each] is None else marks[each] or 0)
            yield source, [waiting[source].popleft()]
            if not waiting[source]:
                del waiting[source]

    def advance(self) -> Iterator[Result]:
        """Results of windows that the watermark has closed, as they are asked for."""
        return self._rounds.advance()

    def finish(self) -> Iterator[Result]:
        """Everything that is left, one batch after the other: it may be more than fits into memory. Nothing follows."""
        return self._rounds.finish()

    def fill(self, rows: Iterable[pa.RecordBatch]) -> None:
        """Bootstrap the state from historical rows: no output, no late rows, no metrics."""
        source, counted = self._inputs[0], self.metrics.to_json()
        late = [context.late for context in self._context]
        for context in self._context:
            context.late = lambda rows: None
        names = source.readers[0].columns
        for batch in rows:
            past = SourceBatch(source.readers[0], batch.select(names), source.readers[0].position, True, 0.0)
            deque(self._rounds.run(source.nodes, self._morsels(source, [past])), maxlen=0)
            if source.clocks:  # they are the past of all partitions
                greatest = source.clocks[source.readers[0].name].greatest
                for clock in source.clocks.values():
                    clock.greatest = greatest
                source.timeline.move_watermark()
            deque(self.advance(), maxlen=0)
        for context, given in zip(self._context, late, strict=True):
            context.late = given
        self.metrics.restore({**counted})

    def _input_of(self, delivery: SourceBatch) -> SourceInput:
        return next(source for source in self._inputs if delivery.reader in source.readers)

    def _morsels(self, source: SourceInput, deliveries: list[SourceBatch]) -> Iterator[Morsel]:
        """Batches with the watermark before each; time moves after them."""
        known, timeline = self._extents(source, deliveries), source.timeline
        for delivery in deliveries:
            reader, batch, _, is_last, _, size = delivery
            self.metrics.rows_in += batch.num_rows
            self.metrics.bytes_in += size
            batch = batch if self._dead_letters is None else self._dead_letters.decoded(delivery)
            clock = source.clocks.get(reader.name)
            if clock is None:
                if batch.num_rows:
                    yield Morsel(batch, timeline.watermark if source.is_timed else None)
                continue
            times = self._times(source, batch)
            within = extent(times) if known is None else next(known)
            if batch.num_rows:
                assert source.edge.watermark is not None
                own = source.edge.watermark.column if source.times is None else ""
                yield Morsel(batch, timeline.watermark if source.is_timed else None, own if within else "",
                              *(within or ()))
            if within is not None:
                clock.observe(times, within, timeline.watermark)
            if is_last:
                clock.end_batch()
                timeline.move_watermark()

    def _extents(self, source: SourceInput, deliveries: list[SourceBatch]) -> Iterator[tuple[int, int] | None] | None:
        """How far the times of each batch reach, where workers find out sooner than this thread does batch by batch."""
        workers = self._context[0].options.workers
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

    def growth_warnings(self, elapsed_s: float) -> Iterator[tuple[str, SourceLoc]]:
        """Of operators whose state turns out to grow without bound, once each, and where they are."""
        for fragment, node, growth in self._growing:
            assert fragment.state is not None
            text = growth_warning(fragment.state, node.operator, growth, node.metrics.rows_in, elapsed_s)
            if text is not None:
                yield text, fragment.state.at

    @cached_property
    def _growing(self) -> list[tuple[Fragment, Node, StateGrowth]]:
        """The operators whose state may grow with every row, if the job does not end by itself."""
        nodes = [] if self.is_bounded else self._rounds.nodes
        return [(fragment, node, StateGrowth()) for fragment, node in zip(self._fragments, nodes, strict=False)
                if isinstance(node.operator, Growing)]

    @property
    def row_groups_skipped(self) -> int:
        """Row groups of Parquet that had nothing the flow keeps."""
        return row_groups_skipped(*self._roots) - self._skipped_before

    @property
    def peak_state_rows(self) -> int:
        """The most rows that each join of streams has retained in this run, added up."""
        return sum(step.peak_state_rows for step in self.steps if isinstance(step, StreamJoin))

    @property
    def state_bytes(self) -> int:
        """What steps hold in memory."""
        return sum(step.state_bytes for step in self.steps)

    def mark_idle(self, reader: Reader, is_idle: bool) -> None:
        for source in self._inputs:
            clock = source.clocks.get(reader.name) if reader in source.readers else None
            if clock is not None:
                clock.is_idle, clock.is_ended = is_idle, reader.has_ended
                source.timeline.move_watermark()

    @property
    def is_done(self) -> bool:
        """Whether rows that may still come can change nothing."""
        return self._rounds.is_done(node for source in self._inputs for node in source.nodes)

    def _emit_of(self, fragment: Fragment) -> str:
        """Only groups at the end emit changes: to operators downstream they give what is final."""
        if self._emit == "final" or fragment.consumers:
            return "final"
        check_changes(fragment, self._at)
        return self._emit

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
        has_several = len({source.timeline for source in self._inputs}) > 1
        sources: list[Json] = [{"name": label(source.edge.source), "event_time": event_time_of(source.edge),
                                "partitions": source.to_json(has_several)} for source in self._inputs]
        frozen = [step.snapshot() for step in self.steps]
        stateful = [each for each in self._fragments if each.state is not None]
        outputs: dict[str, Json] = {
            role: {"states": [stateful.index(each) for each in self._upstream[role]], "flow": self._described[role]}
            for role in self._roles}  # fmt: skip
        return {"sources": sources, "watermark": self.watermark, "steps": self.signature, "flow": self.described,
                "tables": self.joined_tables, "emit": self._emit_mode, "outputs": outputs,
                "operators": self.stateful([each.record for each in self._resumed]),
                "folders": self.stateful([each.folder for each in self._resumed])}, frozen

    def retain(self, kept: list[dict[str, Json]]) -> None:
        """Remove the state that no retained epoch names."""
        named: list[dict[int, Json]] = []
        for epoch in kept:
            with suppress(ValueError, KeyError):  # one that says something else could not be gone on from anyway
                named.append(states_by_folder(epoch))
        for found, step in zip(self._resumed, self.steps, strict=True):
            step.retain([each[found.folder] for each in named if found.folder in each])
        remove_unnamed(self._folder, {folder for each in named for folder in each}
                       | {each.folder for each in self._resumed})

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
