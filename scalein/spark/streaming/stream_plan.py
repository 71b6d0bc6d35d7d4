"""The plan of a stream: what a flow does with each batch, as a map and a reduce side, the same in every process.

    rowwise    no state: the map side gives results
    distinct   rows unlike any before: the keys so far are state, and new keys are results
    running    groups that never close, or windows with emit="changes": state, and the changes of each batch are results
    closing    windows: state until the watermark has passed their end, then results

The map side turns the rows of a batch into rows to shuffle (`spark/map_reduce.py`), without late rows: those whose
windows were all closed by the batch before. The reduce side is in `reduce_side.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import pyarrow as pa

from scalein.compiler import compile_flow
from scalein.connectors.formats.statistics import Condition
from scalein.dtypes import Schema
from scalein.errors import BadArgument, ComputeError, LateData, SourceLoc
from scalein.exec.aggregate_operator import all_computed
from scalein.exec.bounded import Program
from scalein.exec.changelog import OP, changelog_rows
from scalein.exec.changelog import check as check_changes
from scalein.exec.compatibility import signature
from scalein.exec.dead_letters import dead_letter, dead_letter_schema
from scalein.exec.event_time import NO_TIMES, TimeSummary, extent, max_gap_of, merge_summaries, summarize
from scalein.exec.fragments import Fragment, SourceEdge, cut, over, placeholder
from scalein.exec.lateness import Lateness
from scalein.exec.operator import Context, FragmentRunner, Morsel, reads
from scalein.exec.scan_predicates import scan_conditions
from scalein.ir import ops
from scalein.ir.exprs import Col, Named
from scalein.ir.printer import dump
from scalein.ir.rewrite import rewrite, walk_ops
from scalein.options import Options
from scalein.spark.map_reduce import MapReduce
from scalein.spark.origin import ORIGIN, file_of_origin, without_origin
from scalein.spark.row_groups import TimeColumn, coded_types
from scalein.spark.streaming.event_time import Clock
from scalein.storage.checked_json import Json

SLICE = "#slice"  # the start of the time slice of a buffered row


@dataclass
class MapSummary:
    """What a map task counted, besides the rows to shuffle."""

    rows: int = 0
    timeless: int = 0
    late_rows: int = 0
    failed_rows: int = 0
    times: TimeSummary = NO_TIMES
    late: list[pa.RecordBatch] = field(default_factory=list)  # if late rows have a sink
    failed: list[pa.RecordBatch] = field(default_factory=list)  # dead letters
    origin: str | None = None  # of rows that are not from files

    def to_json(self) -> dict[str, Json]:
        return {"rows": self.rows, "timeless": self.timeless, "late_rows": self.late_rows,
                "failed_rows": self.failed_rows, "times": self.times.to_json()}


class StreamPlan:
    """A flow over one stream. `late` is drop, error or sink; `on_error` is raise or sink."""

    def __init__(self, op: ops.Op, emit: str, late: str, on_error: str, at: SourceLoc) -> None:
        self._op, self.emit, self._late, self._on_error, self._at = op, emit, late, on_error, at
        edge = _single_input(op, at)
        self.edge, fragment = edge, edge.first
        self.map_reduce = MapReduce(fragment)
        self.fragment = self.map_reduce.fragment  # where a distinct has become a group_by
        self.window = self.map_reduce.window
        self.watermark_op = edge.watermark
        self.mode = self._mode(fragment)
        if emit == "changes":
            check_changes(fragment, at)
            if self.window is not None and not self.window.is_tumbling:
                raise BadArgument('emit="changes" does not support sliding windows on Spark yet', at=at,
                                  step="group_by", hint='use tumbling windows, or emit="final"')
        self.sends_late = late == "sink"
        self.time_type = None if self.watermark_op is None else edge.timed.schema[self.watermark_op.column].dtype
        self.max_gap = None if self.time_type is None else max_gap_of(self.time_type)

    def __reduce__(self) -> tuple[object, ...]:
        return StreamPlan, (self._op, self.emit, self._late, self._on_error, self._at)

    def with_coded(self, names: Collection[str]) -> StreamPlan:
        """The same for a stream with dictionaries of text in some columns."""
        schema = coded_types(unbound_source(self._op, self._at).arrow, names)
        return StreamPlan(with_input_types(self._op, schema), self.emit, self._late, self._on_error, self._at)

    @property
    def may_be_coded(self) -> bool:
        """Whether columns of the stream may be dictionaries: not where they are shuffled as they are."""
        return self._check is None and not self.sends_late

    def _mode(self, fragment: Fragment) -> str:
        match fragment.state:
            case None:
                return "rowwise"
            case ops.Distinct():
                return "distinct"
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
        return "closing"

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
        return self.fragment.before.schema.arrow

    @property
    def signature(self) -> list[Json]:
        """What the state depends on: a checkpoint can be resumed by a flow with the same signature."""
        if self.edge.first.state is None:
            return []
        mode = self.mode if self.map_reduce.is_by_column else f"{self.mode}, columns together"
        return [f"{mode} {signature(self.edge.first)}"]

    @property
    def outdated_signatures(self) -> list[list[Json]]:
        """The signatures of the same flow in versions that buffered rows instead of partial groups."""
        if self.edge.first.state is None or self.map_reduce.is_by_column:
            return []
        return [[f"{mode} {signature(self.edge.first)}"] for mode in ("running", "closing")]

    @property
    def slice_column(self) -> str | None:
        """The column of the state with the start of a row's time slice; None without a window."""
        if self.window is None:
            return None
        return "window_start" if self.map_reduce.kind == "partials" else SLICE

    @property
    def time_column(self) -> str:
        """The column with the time of buffered rows."""
        assert self.window is not None
        return self.map_reduce.shuffle_names[self.window.time]

    @property
    def group_columns(self) -> list[str]:
        """The columns that identify a group: the keys, and with a window the time slice."""
        keys = list(self.map_reduce.keys)
        return keys if self.slice_column is None else [*keys, self.slice_column]

    @cached_property
    def state_schema(self) -> pa.Schema:
        """The columns of the state."""
        found = self.map_reduce.shuffle_schema
        return found if self.slice_column in (None, *found.names) else found.append(pa.field(SLICE, pa.int64(), False))

    @cached_property
    def lateness(self) -> Lateness | None:
        if self.window is None:
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
        return self.fragment.input.arrow.names if self.has_origin else self.computed_from

    @cached_property
    def computed_from(self) -> list[str]:
        """The columns of the stream that the map side needs, in the stream's order."""
        found = set(self.map_reduce.reads)
        if self.lateness is not None:
            found |= set(reads(self.lateness.rows.node))
        if self.watermark_op is not None:
            found |= {self.watermark_op.column} if self._times is None else set(reads(self._times.node))
        if self._check is not None:
            found |= set(reads(self._check.node))
        names = self.fragment.input.arrow.names
        return [name for name in names if name in found] or names[:1]

    @cached_property
    def row_keys(self) -> tuple[str, ...] | None:
        """The columns of the stream that are the keys, if a task may skip rows of other keys. It must not where rows
        count for the watermark, may be late, or may fail.
        """
        return None if self.watermark_op is not None or self._check is not None else self.map_reduce.source_keys

    @cached_property
    def scan_conditions(self) -> tuple[Condition, ...]:
        """Conditions for which a source may skip rows; not where these may fail. `skipped_time` counts nevertheless."""
        if self._check is not None:
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

    def advance_clock(self, clock: Clock, summaries: Iterable[TimeSummary]) -> Clock:
        """The clock after a batch, from the summaries of its tasks."""
        if self.watermark_op is None:
            return clock
        return clock.advance(summaries, self.max_gap, self.watermark_op.delay)

    def changelog_rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Results that are final: inserts of a changelog if emit="changes"."""
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
        morsels = self._morsels(self._without_failing(batches, summary, options), clock, watermark, summary, options)
        for is_in_time, some in groupby(self._split(morsels), key=itemgetter(0)):
            rows = (batch for _, batch in some)
            if is_in_time:
                yield from self.map_reduce.map(rows, options)
            else:
                yield from self._map_reduce_of_filtered.map(self._in_time(rows, watermark, summary, options), options)

    @cached_property
    def _check(self) -> Program | None:
        """Computes all row-wise expressions, if rows that fail in them go to a sink."""
        if self._on_error != "sink":
            return None
        is_rowwise = self.mode == "rowwise"
        return Program(compile_flow(self.fragment.op if is_rowwise else all_computed(self.fragment, self.sends_late)))

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
        if self._late == "error":
            raise LateData(f"{rows.num_rows} rows came too late: all windows that they are in are closed",
                           at=self._at, found=rows.slice(0, 1).to_pylist()[0],
                           hint='a longer delay of with_watermark, late="drop", or a sink for them')
        if self.sends_late:
            summary.late.append(rows)


def unbound_source(op: ops.Op, at: SourceLoc) -> ops.Source:
    """The unbound source of a flow."""
    unbound = [each for each in _stream_ops(op) if isinstance(each, ops.Source) and each.data is None]
    if not unbound:
        raise BadArgument("a flow over a stream begins with si.flow(schema), and this one has its data already", at=at,
                          hint="si.flow(stream_df.schema)")
    return unbound[0]


def _single_input(op: ops.Op, at: SourceLoc) -> SourceEdge:
    """The input of a flow with at most one aggregation; other flows are refused."""
    for each in _stream_ops(op):
        match each:
            case ops.Union():
                raise BadArgument("a flow over a stream has one input, and this one has a union", at=at, step="union",
                                  hint="unite the streams in Spark: a.unionByName(b)")
            case ops.Limit():
                raise BadArgument("limit depends on the order of rows, and a stream on Spark has none", at=at,
                                  step="limit")
            case ops.OuterJoin():
                raise BadArgument(f"a join with how={each.how!r} needs a flow that ends: only then it is known which "
                                  "rows of the table have no match", at=each.at, step="join",
                                  hint='take how="left" or "inner"')
    edges = cut(op)
    if edges[0].first.consumers:
        raise BadArgument("a flow over a stream has at most one aggregation or distinct, and this one has several",
                          at=at, hint="start a second stream over the output of the first")
    return edges[0]


def _stream_ops(op: ops.Op) -> Iterator[ops.Op]:
    """The ops that the stream's rows pass, without the static sides of joins."""
    static = {id(below) for each in walk_ops(op) if isinstance(each, ops.Join) for below in walk_ops(each.right)}
    return (each for each in walk_ops(op) if id(each) not in static)


def with_input_types(op: ops.Op, schema: pa.Schema) -> ops.Op:
    """The flow with the given types of its unbound input."""
    return rewrite(op, lambda each: replace(each, arrow=schema) if isinstance(each, ops.Source) and each.data is None
                   and each.arrow != schema else None)
