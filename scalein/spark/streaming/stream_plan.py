"""The plan of a stream: what a flow does with each batch, as a map and a reduce side, the same in every process.

    rowwise    no state: the map side gives results
    distinct   rows unlike any before: the keys so far are state, and new keys are results
    running    groups that never close, or windows with emit="changes": state, and the changes of each batch are results
    closing    windows: state until the watermark has passed their end, then results
    sessions   sessions, and groups that `ttl=` forgets: their rows are shuffled
    process    rows wait until the watermark has passed them, then the class takes them in the order of time
    over       the same for values over other rows, and for `distinct` within a time; rows of windows until these close

The map side turns the rows of a batch into rows to shuffle (`spark/map_reduce.py`). In windows it leaves out late rows:
those whose windows were all closed by the batch before. In the last three modes the operator of the reduce side
(`reduce_side.py`) decides which rows are late, as in a job.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalein.arrow_rows import as_integers, filtered, from_numpy
from scalein.compiler import compile_flow
from scalein.connectors.formats.statistics import Condition
from scalein.dtypes import Schema
from scalein.errors import BadArgument, ComputeError, LateData, SourceLoc
from scalein.exec.aggregate_operator import FOREVER, all_computed
from scalein.exec.bounded import Program
from scalein.exec.changelog import OP, changelog_rows
from scalein.exec.changelog import check as check_changes
from scalein.exec.changelog_aggregate import FIRST_OPEN
from scalein.exec.compatibility import signature
from scalein.exec.dead_letters import dead_letter, dead_letter_schema
from scalein.exec.error_location import located
from scalein.exec.event_time import NO_TIMES, TimeSummary, extent, max_gap_of, merge_summaries, summarize
from scalein.exec.fragments import Fragment, SourceEdge, check_over, cut, fragments, over, placeholder
from scalein.exec.lateness import Lateness
from scalein.exec.operator import Context, FragmentRunner, Morsel, reads
from scalein.exec.process_operator import HINTS, NO_LATEST, ROWS, class_units
from scalein.exec.scan_predicates import scan_conditions
from scalein.exec.session_changelog import PASSED
from scalein.exec.window_aggregate import check_session_changes
from scalein.exec.window_close import CLOSED
from scalein.ir import ops
from scalein.ir.exprs import Col, Named
from scalein.ir.internal_names import internal
from scalein.ir.ops.over import SPACED, WINDOWED
from scalein.ir.physical import identity
from scalein.ir.printer import dump
from scalein.ir.rewrite import rewrite, walk_ops
from scalein.ir.windows import Session
from scalein.options import Options
from scalein.spark.map_reduce import MapReduce, refuse_order
from scalein.spark.origin import ORIGIN, file_of_origin, without_origin
from scalein.spark.row_groups import TimeColumn, coded_types
from scalein.spark.shuffle import route
from scalein.spark.streaming.event_time import Clock
from scalein.state.hash_runs import Run
from scalein.state.run_table import DROPPED, SEEN
from scalein.storage.checked_json import Json

if TYPE_CHECKING:
    from scalein.spark.streaming.several_inputs import Inputs

_LATEST = (1 << 63) - 1
BY_ROWS = ("sessions", "process", "over")  # modes of rows that an operator of jobs takes, which knows what is late
SLICE = "#slice"  # the start of the time slice of a buffered row


@dataclass
class MapSummary:
    """What a map task counted, besides the rows to shuffle."""

    rows: int = 0
    timeless: int = 0
    late_rows: int = 0
    failed_rows: int = 0
    times: TimeSummary = NO_TIMES
    input_times: list[TimeSummary] = field(default_factory=list)  # of several clocks, instead of `times`
    late: list[pa.RecordBatch] = field(default_factory=list)  # if late rows have a sink
    failed: list[pa.RecordBatch] = field(default_factory=list)  # dead letters
    origin: str | None = None  # of rows that are not from files

    def to_json(self) -> dict[str, Json]:
        found: dict[str, Json] = {"rows": self.rows, "timeless": self.timeless, "late_rows": self.late_rows,
                                  "failed_rows": self.failed_rows, "times": self.times.to_json()}
        return {**found, "input_times": [each.to_json() for each in self.input_times]} if self.input_times else found


class StreamPlan:
    """A flow over one stream. `late` is drop, error or sink; `on_error` is raise or sink."""

    inputs: Inputs | None = None  # where several are one stream, or rows take several ways to a join

    def __init__(self, op: ops.Op, emit: str, late: str, on_error: str, at: SourceLoc) -> None:
        self._op, self.emit, self._late, self._on_error, self._at = op, emit, late, on_error, at
        self._edges, fragment = inputs_and_last(op, at)
        self.edge, self.source = self._edges[0], self._edges[0].first.input
        if self._has_branches and on_error == "sink":
            raise BadArgument("a row may fail in one branch of a union and pass the other, so it is no dead letter",
                              at=at, step="union", hint='on_error="null", or unite the streams in Spark')
        self._first = fragment
        self.sends_late = late == "sink"
        self.watermark_op = self.edge.watermark
        if isinstance(fragment.state, ops.Over):
            check_over(fragment.state, self.watermark_op is not None)
        self.map_reduce = MapReduce(fragment, by_arrival=True, keeps_all=self.sends_late)
        self.fragment = self.map_reduce.fragment
        self.window = self.map_reduce.window
        self.mode = self._mode(fragment)
        if emit == "changes":
            check_changes(fragment, at)
        self.time_type = None if self.watermark_op is None else self.edge.timed.schema[self.watermark_op.column].dtype
        self.max_gap = None if self.time_type is None else max_gap_of(self.time_type)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._op, self.emit, self._late, self._on_error, self._at)

    def with_coded(self, names: Collection[str]) -> StreamPlan:
        """The same for a stream with dictionaries of text in some columns."""
        (source,) = unbound_sources(self._op, self._at).values()
        schema = coded_types(source.arrow, names)
        return StreamPlan(with_input_types(self._op, schema), self.emit, self._late, self._on_error, self._at)

    @property
    def may_be_coded(self) -> bool:
        """Whether columns of the stream may be dictionaries: not where they are shuffled as they are."""
        is_shuffled = self.mode in ("distinct", *BY_ROWS)
        return self._check is None and not self.sends_late and not is_shuffled and not self._has_branches

    @property
    def _has_branches(self) -> bool:
        """Whether the flow has a union: each of its branches gets all rows of the stream."""
        return len(self._edges) > 1

    def _mode(self, fragment: Fragment) -> str:
        match fragment.state:
            case None:
                return "rowwise"
            case ops.Distinct():
                return "distinct"
            case ops.Process():
                return "process"
            case ops.Over():
                return "over"
        if self.map_reduce.kind == "top":
            raise BadArgument("an endless stream cannot be sorted", at=self._at, step="sort",
                              hint="sort the rows that the sink has received")
        if self.window is None and self.emit == "final":
            raise BadArgument("a running aggregate over an endless stream has no final result", at=self._at,
                              step="group_by", hint='give emit="changes", or group by a window of time as well')
        if self.window is None or (self.emit == "changes" and self.map_reduce.kind == "partials"):
            return "running"
        if self.watermark_op is None:
            raise BadArgument("windows over an endless stream never close without a watermark", at=self._at,
                              step="group_by", hint="with_watermark(column, delay) at the beginning of the flow")
        if not self.window.is_session:
            return "closing"
        if self.emit == "changes":
            assert isinstance(fragment.state, ops.Aggregate)
            check_session_changes(fragment.state, self.map_reduce.holds_rows)
        return "sessions"

    @property
    def title(self) -> str:
        """The flow in one line: its last step.

        >>> import scalein as si
        >>> flow = si.flow({"k": int}).group_by("k").agg(n=si.count())
        >>> StreamPlan(flow.op, "changes", "drop", "raise", flow.op.at).title
        'scalein: Aggregate by k: n = count()'
        """
        return f"scalein: {dump(self._op).splitlines()[0].partition('  -> ')[0]}"

    # --- schemas and columns

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns of results."""
        found = self.fragment.op.schema.arrow
        return found.append(pa.field(OP, pa.string(), False)) if self.emit == "changes" else found

    @cached_property
    def late_schema(self) -> pa.Schema:
        return self._first.before.schema.arrow

    @property
    def signature(self) -> list[Json]:
        """What the state depends on: a checkpoint can be resumed by a flow with the same signature."""
        if self._first.state is None:
            return []
        mode = self.mode if self.map_reduce.is_by_column else f"{self.mode}, columns together"
        if self.sends_late and (mode == "process" or (mode == "sessions" and self.emit == "changes")):
            mode += ", all columns"  # of rows that wait
        return [f"{mode} {self.state_text}"]

    @property
    def state_text(self) -> str:
        return signature(self._first)

    @property
    def outdated_signatures(self) -> list[list[Json]]:
        """The signatures of the same flow in versions that buffered rows instead of partial groups."""
        if self._first.state is None or self.map_reduce.is_by_column:
            return []
        return [[f"{mode} {signature(self._first)}"] for mode in ("running", "closing")]

    @property
    def slice_column(self) -> str | None:
        """The column of the state with the start of a row's time slice; None without a window."""
        if self.window is None or self.mode == "sessions":
            return None
        return "window_start" if self.map_reduce.kind == "partials" else SLICE

    @property
    def drains_all(self) -> bool:
        """Whether nothing waits after a drain, whatever the watermark is then."""
        return self.mode == "sessions" and self.emit == "final"

    @property
    def reduced(self) -> Fragment:
        """What the reduce side does."""
        return self.map_reduce.reduced

    @property
    def is_timed(self) -> bool:
        """Whether the reduce side uses event time."""
        return self.window is not None or self.mode in BY_ROWS

    @property
    def takes_partials(self) -> bool:
        return self.map_reduce.kind == "partials"

    @property
    def state_parts(self) -> Sequence[str]:
        """The names of an operator's states: one without a name, unless only rows wait, and perhaps others."""
        match self.fragment.state:
            case ops.Process() as op:
                return ("", ROWS, HINTS) if op.body.is_timed else ("", ROWS)
            case ops.Over() as op:
                return (ROWS,) if op.kind == WINDOWED else ("", ROWS, HINTS)
        return ("", ROWS, HINTS) if self.mode == "sessions" and self.emit == "changes" else ("",)

    def version(self, watermark: int | None, part: str) -> dict[str, Json]:
        """What a version of an operator's state has besides runs. It follows from the watermark: which windows are
        closed, which rows have left.
        """
        op = self.fragment.state
        if isinstance(op, ops.Process) and not part:
            return {"latest": NO_LATEST}
        if self.mode == "sessions":
            return {PASSED: watermark} if not part else {} if watermark is None else {DROPPED: watermark}
        if self.mode in BY_ROWS:
            return {} if watermark is None or not part else {DROPPED: self._dropped(watermark, part)}
        closed = first_open = -FOREVER
        if watermark is not None and self.lateness is not None:
            closed, first_open = self.lateness.last_end(watermark), self.lateness.first_open_anchor(watermark)
        return {CLOSED: closed, FIRST_OPEN: first_open}

    def _dropped(self, watermark: int, part: str) -> int:
        """The time from which on a part of the state has rows."""
        match self.fragment.state:
            case ops.Process() as op:
                return watermark if part == ROWS else watermark * class_units(op) + 1
            case ops.Over() as op if op.kind == WINDOWED:
                return watermark + 1
            case ops.Over() as op if part == HINTS:
                if op.kind == SPACED:
                    (within,) = op.calls[0].agg.params
                    assert isinstance(within, int)
                    return watermark - within + 1
                return watermark if op.length is None else watermark - op.length
        return watermark

    @property
    def holds_rows(self) -> bool:
        """Whether the state of windows has rows, and not partial groups."""
        return self.map_reduce.holds_rows and self.window is not None

    @cached_property
    def state_schema(self) -> pa.Schema:
        """The columns of the state."""
        found = self.map_reduce.shuffle_schema
        if self.mode == "distinct":
            return pa.schema([*(found.field(name) for name in self.map_reduce.keys),
                              pa.field(SEEN, pa.int64(), False)])
        return found if self.slice_column in (None, *found.names) else found.append(pa.field(SLICE, pa.int64(), False))

    @cached_property
    def lateness(self) -> Lateness | None:
        if self.window is None or self.mode == "sessions":
            return None
        names = self.late_schema.names if self.sends_late else self._aggregated_columns
        return Lateness(self.fragment, self.window, names)

    @cached_property
    def _aggregated_columns(self) -> list[str]:
        """The columns that the aggregation reads."""
        state = self.fragment.state
        assert isinstance(state, ops.Aggregate)
        used = state.state_reads()
        names = self.fragment.before.schema.names
        return [name for name in names if name in used] or names[:1]

    @property
    def has_origin(self) -> bool:
        """Whether rows have a column `ORIGIN` at the end: for dead letters."""
        return self._check is not None

    @cached_property
    def reads(self) -> list[str]:
        """The columns of the stream that are read, in the stream's order: dead letters have all of them."""
        return self.source.arrow.names if self.has_origin else self.computed_from

    @cached_property
    def computed_from(self) -> list[str]:
        """The columns of the stream that the map side needs, in the stream's order."""
        if self.inputs is not None:
            return self.inputs.computed_from
        found = self._mapped
        if self._has_branches:
            found = {name for branch in self._branches for name in reads(branch.node)}
        if self.watermark_op is not None:
            found |= {self.watermark_op.column} if self._times is None else set(reads(self._times.node))
        if self._check is not None:
            found |= set(reads(self._check.node))
        names = self.source.arrow.names
        return [name for name in names if name in found] or names[:1]

    @property
    def reads_by_input(self) -> dict[str, list[str]]:
        """The columns that are needed of each input, in its order."""
        return {self.edge.source.name: self.computed_from} if self.inputs is None else self.inputs.reads_by_input

    @property
    def is_united(self) -> bool:
        """Whether several inputs are one stream."""
        return self.inputs is not None and self.inputs.is_united

    @property
    def _mapped(self) -> set[str]:
        """The columns that the fragment with the state needs; of a union, the columns of its rows."""
        found = set(self.map_reduce.reads)
        return found if self.lateness is None else found | set(reads(self.lateness.rows.node))

    @cached_property
    def _branches(self) -> list[Program]:
        """The branches of a union."""
        return [self._branch(edge) for edge in self._edges]

    def _branch(self, edge: SourceEdge) -> Program:
        """What gives the rows of the fragment's input on the way from an edge, in the columns that are needed."""
        fields = self.fragment.input.schema
        items = tuple(item for item in identity(fields) if item.name in self._mapped) or identity(fields)[:1]
        return Program(compile_flow(ops.Project(branch_of(edge, self._first), items)))

    @cached_property
    def row_keys(self) -> tuple[str, ...] | None:
        """The columns of the stream that are the keys, if a task may skip rows of other keys. It must not where rows
        count for the watermark, may be late, or may fail.
        """
        has_own_rows = self.watermark_op is None and self._check is None and not self._has_branches
        return self.map_reduce.source_keys if has_own_rows else None

    @cached_property
    def scan_conditions(self) -> tuple[Condition, ...]:
        """Conditions for which a source may skip rows; not where these may fail. `skipped_time` counts nevertheless."""
        if self._check is not None or self._has_branches:
            return ()
        return self.map_reduce.scan_conditions if self._times is None else scan_conditions(self._times.node)

    @property
    def skipped_time(self) -> TimeColumn | None:
        """The column whose times advance the watermark in rows that are skipped, too. None if there is no watermark, or
        if it is computed after the filters: then it is about rows for which the conditions hold.
        """
        if self.watermark_op is None or self._times is not None:
            return None
        return TimeColumn(self.watermark_op.column, self.max_gap)

    def advance_clock(self, clock: Clock, summaries: Iterable[Mapping[str, Any]], skipped: TimeSummary) -> Clock:
        """The clock after a batch, from the summaries of its tasks, and the times of rows that none has read."""
        if self.inputs is not None:
            return self.inputs.advance_clock(clock, summaries, skipped)
        if self.watermark_op is None:
            return clock
        return clock.advance([*time_summaries(summaries), skipped], self.max_gap, self.watermark_op.delay)

    def drained_at(self, runs: Iterable[Run], clock: Clock) -> int | None:
        """The watermark at which all that waits for one comes out: of windows the end of the last one that has rows."""
        if ROWS in self.state_parts:
            times = [run.newest for run in runs if run.part == ROWS and run.newest is not None]
            return min(max(times) + (self.state_parts != (ROWS,)), _LATEST) if times else None
        slices = [run.newest for run in runs if run.newest is not None]
        if slices and self.mode == "sessions":  # parts of sessions are known by their first times
            assert isinstance(self.window, Session)
            seen = [each.greatest for each in (clock, *clock.inputs) if each.greatest is not None]
            return min(max(*slices, *seen) + self.window.gap + 1, _LATEST)
        if self.mode != "closing" or self.window is None or not slices:
            return None
        return min(int(self.window.last_ends(np.array([max(slices)], object))[0]), _LATEST)

    def changelog_rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Results of rows: inserts of a changelog if emit="changes"."""
        return changelog_rows(batch, "insert") if self.emit == "changes" else batch

    # --- the map side

    @cached_property
    def _times(self) -> Program | None:
        """Computes the times of the watermark; None where they are a column of the stream."""
        if self.watermark_op is None or self.edge.has_own_times:
            return None
        found = self.edge.timed.schema[self.watermark_op.column]
        return Program(compile_flow(ops.Project(self.edge.timed, (Named("time", Col(found.name, found.dtype,
                                                                                    found.nullable)),))))

    @cached_property
    def _map_reduce_of_filtered(self) -> MapReduce:
        """Map and reduce over the aggregation's input, for batches from which late rows were removed."""
        fields = Schema(tuple(each for each in self.fragment.before.schema if each.name in self._aggregated_columns))
        return MapReduce(cut(over(self.fragment.op, self.fragment.before, placeholder(fields)))[0].first)

    def map_rows(self, batches: Iterable[pa.RecordBatch], clock: Clock, summary: MapSummary,
                 options: Options) -> Iterator[pa.RecordBatch]:
        """The rows to shuffle, for batches of the stream's columns `reads`; other rows are added to `summary`."""
        watermark = clock.watermark
        morsels = self._arriving(batches, clock, summary, options)
        for is_in_time, some in groupby(self._split(morsels), key=itemgetter(0)):
            rows = (batch for _, batch in some)
            if is_in_time:
                yield from self.map_reduce.map(rows, options)
            else:
                yield from self._map_reduce_of_filtered.map(self._in_time(rows, watermark, summary, options), options)

    def _arriving(self, batches: Iterable[pa.RecordBatch], clock: Clock, summary: MapSummary,
                  options: Options) -> Iterator[Morsel]:
        """The rows of the fragment's input."""
        sound = self._without_failing(batches, summary, options)
        morsels = self._morsels(sound, clock, clock.watermark, summary, options)
        return self._branched(morsels, options) if self._has_branches else morsels

    def routed(self, rows: Iterable[pa.RecordBatch], targets: int,
               options: Options) -> Iterator[tuple[int, int, pa.RecordBatch]]:
        """Shuffled rows with their target, and the number of their schema."""
        return ((target, 0, part) for target, part in route(rows, self.map_reduce.keys, targets, options))

    @property
    def shuffle_schemas(self) -> list[pa.Schema]:
        """The schemas of shuffled rows."""
        return [self.map_reduce.shuffle_schema]

    def coalesced(self, shuffled: Iterable[pa.RecordBatch], watermark: int | None) -> Iterator[pa.RecordBatch]:
        """The rows that a reduce task gets, in the batches in which its operator takes them.

        Of sessions, rows that are behind come last and together: any row of a micro-batch may connect them with a
        session that is open.
        """
        if self.mode != "sessions" or watermark is None:
            yield from shuffled
            return
        assert self.window is not None
        name = self.map_reduce.shuffle_names[self.window.time]
        behind: list[pa.RecordBatch] = []
        for batch in shuffled:
            on_time = pc.fill_null(pc.greater_equal(as_integers(batch.column(name)), watermark), False)
            if on_time.true_count < batch.num_rows:
                behind.append(filtered(batch, pc.invert(on_time)))
                batch = filtered(batch, on_time)
            yield batch
        if behind:
            yield pa.concat_batches(behind)

    @cached_property
    def _check(self) -> Program | None:
        """Computes all row-wise expressions, if rows that fail in them go to a sink."""
        if self._on_error != "sink":
            return None
        if not isinstance(self.fragment.state, ops.Aggregate):
            state = self.fragment.state
            given = () if state is None else (expr for expr, _ in state.exprs() if not isinstance(expr, Col))
            values = [Named(internal(f"value{k}"), expr) for k, expr in enumerate(given)]
            before = self.fragment.before
            return Program(compile_flow(ops.Project(before, (*identity(before.schema), *values)) if values else before))
        return Program(compile_flow(all_computed(self.fragment, self.sends_late)))

    def _without_failing(self, batches: Iterable[pa.RecordBatch], summary: MapSummary,
                         options: Options) -> Iterator[pa.RecordBatch]:
        """The rows that do not fail; the others are dead letters. Their expressions are computed again later, since
        neither the aggregation nor the removal of late rows can undo a row.
        """
        if self._check is None:
            yield from batches
            return

        def failed(batch: pa.RecordBatch, number: int, error: ComputeError) -> None:
            row = batch.slice(number, 1)
            schema = without_origin(batch.schema)
            file = file_of_origin(row.column(ORIGIN)[0].as_py()) or summary.origin
            summary.rows += 1
            summary.failed_rows += 1
            summary.failed.append(dead_letter(row.columns[: len(schema)], dead_letter_schema(schema), error, file))

        context = Context(options, Path(), lambda rows: None, False, lambda rows: None, failed)
        runner = FragmentRunner(self.fragment.op, context, self._check)
        for batch in batches:
            yield from (rows.select(self.computed_from) for rows in runner.passing(batch))

    def _split(self, morsels: Iterable[Morsel]) -> Iterator[tuple[bool, pa.RecordBatch]]:
        """Batches, and whether all their rows are in time or must be checked one by one."""
        for morsel in morsels:
            if self.lateness is None or not morsel.batch.num_rows:
                yield True, morsel.batch
                continue
            good, rest = self.lateness.split(morsel)
            if good is not None:
                yield True, good.batch
            if rest is not None:
                yield False, rest

    def _morsels(self, batches: Iterable[pa.RecordBatch], clock: Clock, watermark: int | None, summary: MapSummary,
                 options: Options) -> Iterator[Morsel]:
        for batch in batches:
            summary.rows += batch.num_rows
            if self.watermark_op is None or not batch.num_rows:
                yield Morsel(batch, watermark)
                continue
            times = self._times_of(batch, options)
            within = extent(times)
            if within is None:
                yield Morsel(batch, watermark)
                continue
            found = summarize(times, within, clock.greatest, self.max_gap)
            summary.times = merge_summaries([summary.times, found], self.max_gap).bounded()
            yield Morsel(batch, watermark, self.watermark_op.column if self._times is None else "", *within)

    def _branched(self, morsels: Iterable[Morsel], options: Options) -> Iterator[Morsel]:
        """The rows of all branches of a union, for rows of the stream."""
        for morsel in morsels:
            for branch in self._branches:
                try:
                    for batch in branch.run([morsel.batch], options):
                        yield Morsel(batch, morsel.watermark)
                except ComputeError as error:
                    raise located(error, self._op, branch.node) from None

    def _times_of(self, batch: pa.RecordBatch, options: Options) -> pa.Array:
        assert self.watermark_op is not None
        if self._times is None:
            return batch.column(self.watermark_op.column)
        found = [each.column(0) for each in self._times.run([batch], options)]
        return pa.concat_arrays(found) if found else pa.array([], pa.int64())

    def _in_time(self, batches: Iterable[pa.RecordBatch], watermark: int | None, summary: MapSummary,
                 options: Options) -> Iterator[pa.RecordBatch]:
        """The rows that are not late and have a time, as the aggregation reads them."""
        assert self.lateness is not None
        for batch in batches:
            for found in self.lateness.split_late(batch, watermark, options):
                summary.timeless += found.timeless
                if found.late.num_rows:
                    self._add_late(found.late, summary)
                if found.good.num_rows:
                    yield found.good.select(self._aggregated_columns)

    def _add_late(self, rows: pa.RecordBatch, summary: MapSummary) -> None:
        summary.late_rows += rows.num_rows
        self.check_late(rows)
        if self.sends_late:
            summary.late.append(rows)

    def check_late(self, rows: pa.RecordBatch) -> None:
        """Late rows may be an error."""
        if self._late == "error":
            why = "all windows that they are in are closed" if self.window is not None else (
                "their time was before the watermark")
            raise LateData(f"{rows.num_rows} rows came too late: {why}", at=self._at,
                           found=rows.slice(0, 1).to_pylist()[0],
                           hint='a longer delay of with_watermark, late="drop", or a sink for them')


def time_summaries(results: Iterable[Mapping[str, Any]]) -> list[TimeSummary]:
    """The time summaries of tasks."""
    return [TimeSummary.from_json(task["times"]) for task in results]


def rows_in_time(batch: pa.RecordBatch, column: str,
                 first: int | None) -> tuple[pa.RecordBatch, pa.RecordBatch, int]:
    """The rows whose time is not before the first one in time, those that are late, and the number without a time."""
    times = as_integers(batch.column(column))
    timeless = times.null_count
    if timeless:
        batch, times = filtered(batch, times.is_valid()), times.drop_null()
    is_late = np.zeros(len(times), bool) if first is None else np.asarray(times) < first
    if not is_late.any():
        return batch, batch.slice(0, 0), timeless
    return filtered(batch, from_numpy(~is_late)), filtered(batch, from_numpy(is_late)), timeless


def unbound_sources(op: ops.Op, at: SourceLoc) -> dict[str, ops.Source]:
    """The inputs of a flow by name; in a union or a join each may occur several times."""
    found: dict[str, ops.Source] = {}
    bound = 0
    for each in stream_ops(op):
        if isinstance(each, ops.Source):
            bound += each.data is not None
            if each.data is None and found.setdefault(each.name, each).arrow != each.arrow:
                raise BadArgument(f"two inputs of the flow have the name {each.name!r} and different columns", at=at,
                                  hint='give each a name of its own: si.flow(schema, name="clicks")')
    if not found:
        raise BadArgument("a flow over a stream begins with si.flow(schema), and this one has its data already", at=at,
                          hint="si.flow(stream_df.schema)")
    if bound:
        raise BadArgument("a side of a join, or a branch of a union, has its data already", at=at,
                          hint='begin it with si.flow(schema, name="..."), and give start its stream; an ordinary '
                               "join, with on= alone, is with a table")
    return found


def inputs_and_last(op: ops.Op, at: SourceLoc) -> tuple[list[SourceEdge], Fragment]:
    """The inputs of a flow with at most one op with state, several of a union, and the fragment that they end in;
    other flows are refused.
    """
    for each in stream_ops(op):
        match each:
            case ops.Limit():
                raise BadArgument("limit depends on the order of rows, and a stream on Spark has none", at=at,
                                  step="limit")
            case ops.OuterJoin():
                raise BadArgument(f"a join with how={each.how!r} needs a flow that ends: only then it is known which "
                                  "rows of the table have no match", at=each.at, step="join",
                                  hint='take how="left" or "inner"')
    edges = cut(op)
    *before, last = fragments(edges)
    for fragment in (*before, last):
        if isinstance(fragment.state, ops.Over) and fragment.state.is_blocking:  # the first reason of several
            refuse_order(fragment.state)
            check_over(fragment.state, any(edge.watermark is not None for edge in edges))
    if any(each.state is not None for each in before):
        if isinstance(last.state, ops.Sort):
            raise BadArgument("results of a stream on Spark are written by several tasks, which have no order among "
                              "them", at=at, step="sort", hint="sort the rows that the sink has received")
        raise BadArgument("a flow over a stream has at most one operator with state, and this one has several",
                          at=at, hint="start a second stream over the output of the first")
    if isinstance(last.state, ops.BufferedJoin) or len({edge.source.name for edge in edges}) > 1:
        return edges, last
    marks = [None if edge.watermark is None else (edge.watermark.column, edge.watermark.delay) for edge in edges]
    is_one = len(set(marks)) == 1 and (marks[0] is None or all(edge.has_own_times for edge in edges))
    if len(edges) > 1 and not is_one:
        raise BadArgument("the branches of a union have different watermarks", at=at, step="union",
                          hint="with_watermark(column, delay) at the beginning of the flow, before its branches")
    return edges, last


def branch_of(edge: SourceEdge, last: Fragment) -> ops.Op:
    """What the rows of a source pass before the last fragment."""
    fragment, op = edge.first, edge.first.op
    while (consumer := fragment.consumers[0]) is not last:
        fragment, op = consumer, over(consumer.op, consumer.input, op)
    return op


def stream_ops(op: ops.Op) -> Iterator[ops.Op]:
    """The ops that the stream's rows pass, without the static sides of joins."""
    static = {id(below) for each in walk_ops(op) if isinstance(each, ops.Join) for below in walk_ops(each.right)}
    return (each for each in walk_ops(op) if id(each) not in static)


def with_input_types(op: ops.Op, schema: pa.Schema) -> ops.Op:
    """The flow with the given types of its unbound input."""
    return rewrite(op, lambda each: replace(each, arrow=schema) if isinstance(each, ops.Source) and each.data is None
                   and each.arrow != schema else None)
