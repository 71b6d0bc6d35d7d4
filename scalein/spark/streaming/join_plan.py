"""The plan of a stream that joins two: of several inputs, or of one with itself.

Several streaming DataFrames become one: `INPUT` is the number of a row's input, and each input has columns of its own,
which are null in the rows of the others. Map tasks separate them again, and run what precedes the join on each side;
the rows of both sides are shuffled by their keys, and the reduce side is the operator of jobs (`exec/stream_join.py`).

Each way from an input to the join has a clock of its own; the watermark of the stream is the least of theirs. A row is
late if its time is before the watermark after the batch before, or in windows, if its window is closed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from scalein.arrow_rows import filtered, from_numpy
from scalein.compiler import compile_flow
from scalein.dtypes import DType
from scalein.errors import BadArgument, ComputeError, SourceLoc
from scalein.exec.bounded import Program
from scalein.exec.error_location import located
from scalein.exec.event_time import NO_TIMES, TimeSummary, extent, max_gap_of, merge_summaries, summarize
from scalein.exec.fragments import Fragment, SourceEdge, check_bounded
from scalein.exec.operator import reads
from scalein.ir import ops
from scalein.ir.exprs import Call, Col, Named
from scalein.ir.rewrite import walk_ops
from scalein.ir.stages import FOREVER
from scalein.kernels.bind import conformed
from scalein.options import Options
from scalein.spark.batch.filters import quote_name
from scalein.spark.map_reduce import MapReduce
from scalein.spark.serialize import optimise
from scalein.spark.shuffle import route
from scalein.spark.stream_joins import ShuffledJoin, with_join_columns
from scalein.spark.streaming.event_time import Clock
from scalein.spark.streaming.stream_plan import (
    MapSummary,
    StreamPlan,
    branch_of,
    inputs_and_last,
    rows_in_time,
    stream_ops,
    time_summaries,
)
from scalein.state.hash_runs import Run
from scalein.storage.checked_json import Json

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

INPUT = "input"  # the column with the number of a row's input
PARTS = ("", "right")  # of the state


def plan_of(op: ops.Op, emit: str, late: str, on_error: str, at: SourceLoc) -> StreamPlan:
    """The plan of a stream."""
    is_join = any(isinstance(each, ops.StreamJoin) for each in stream_ops(op))
    return (JoinPlan if is_join else StreamPlan)(op, emit, late, on_error, at)


@dataclass(frozen=True)
class _Way:
    """A way from an input to the join."""

    edge: SourceEdge
    input: int
    clock: int  # the number of its clock; -1 without a watermark
    rows: Program  # those of its side of the join
    times: Program | None  # those of the watermark; None where they are a column of the input

    def times_of(self, batch: pa.RecordBatch, options: Options) -> pa.Array:
        assert self.edge.watermark is not None
        if self.times is None:
            return batch.column(self.edge.watermark.column)
        found = [each.column(0) for each in self.times.run([batch], options)]
        return pa.concat_arrays(found) if found else pa.array([], pa.int64())


class JoinPlan(StreamPlan):
    """A flow over streams that are joined."""

    def __init__(self, op: ops.Op, emit: str, late: str, on_error: str, at: SourceLoc) -> None:
        self._op, self.emit, self._late, self._on_error, self._at = op, emit, late, on_error, at
        for name, policy, other in (("late", late, "drop"), ("on_error", on_error, "null")):
            if policy == "sink":
                raise BadArgument(f"the rows of a join's two sides have different columns, so {name} has no sink",
                                  at=at, step="join", hint=f'{name}="{other}"')
        self._sources = _unbound_sources(op, at)
        self._edges, self._first = inputs_and_last(with_join_columns(optimise(op)), at)
        self.fragment, self.map_reduce = self._first, MapReduce(self._first)
        if not isinstance(self.fragment.state, ops.BufferedJoin):
            raise BadArgument("a flow over a stream has at most one operator with state, and this one has several",
                              at=at, hint="start a second stream over the output of the first")
        _check_times(op)
        check_bounded(self._edges, False, emit, at)
        self.join = ShuffledJoin(self.fragment)
        self.edge = next((edge for edge in self._edges if edge.watermark is not None), self._edges[0])
        self.source = self._union_source()
        self.watermark_op, self.sends_late = self.edge.watermark, False
        self.time_type, self.max_gap = self._time_type(), None

    def __reduce__(self) -> tuple[object, ...]:
        return JoinPlan, (self._op, self.emit, self._late, self._on_error, self._at)

    def _time_type(self) -> DType | None:
        return None if self.watermark_op is None else self.edge.timed.schema[self.watermark_op.column].dtype

    mode = "joining"
    window = lateness = slice_column = skipped_time = row_keys = None
    has_origin = holds_rows = may_be_coded = takes_partials = False
    scan_conditions = ()

    @property
    def state_parts(self) -> tuple[str, ...]:
        return PARTS

    def version(self, watermark: int | None, part: str) -> dict[str, Json]:
        return {} if part else {"watermark": watermark}

    @property
    def is_timed(self) -> bool:
        return self.fragment.is_timed

    @property
    def reduced(self) -> Fragment:
        return self.fragment

    @property
    def signature(self) -> list[Any]:
        return [f"{self.mode} {self.state_text}"]

    @property
    def outdated_signatures(self) -> list[list[Any]]:
        return []

    # --- inputs

    @property
    def is_united(self) -> bool:
        return len(self._sources) > 1

    def _column(self, name: str, column: str) -> str:
        """The column of the stream with a column of an input."""
        if not self.is_united:
            return column
        source = self._sources[name]
        return f"i{[*self._sources].index(name)}c{source.arrow.names.index(column)}"

    def _union_source(self) -> ops.Source:
        """The columns of all inputs."""
        if not self.is_united:
            return next(iter(self._sources.values()))
        fields = [field.with_name(self._column(name, field.name)).with_nullable(True)
                  for name, source in self._sources.items() for field in source.arrow]
        schema = pa.schema([pa.field(INPUT, pa.int32(), False), *fields])
        return ops.Source("inputs", schema, tuple(schema.names))

    def united(self, frames: Mapping[str, DataFrame]) -> DataFrame:
        """The streams of all inputs as one."""
        from pyspark.sql import functions

        types = {self._column(name, field.name): field.dataType for name in self._sources
                 for field in frames[name].schema.fields if field.name in self._sources[name].arrow.names}
        found: DataFrame | None = None
        for number, (name, source) in enumerate(self._sources.items()):
            own = {self._column(name, column): column for column in source.arrow.names}
            columns = [functions.col(quote_name(own[each])) if each in own else functions.lit(None).cast(types[each])
                       for each in self.source.arrow.names[1:]]
            some = frames[name].select(functions.lit(number).alias(INPUT), *(
                column.alias(each) for column, each in zip(columns, self.source.arrow.names[1:], strict=True)))
            found = some if found is None else found.unionAll(some)
        assert found is not None
        return found

    @cached_property
    def reads_by_input(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name, source in self._sources.items():
            needed: set[str] = set()
            for way in self._ways:
                if [*self._sources][way.input] == name:
                    needed.update(reads(way.rows.node))
                    if way.times is not None:
                        needed.update(reads(way.times.node))
                    elif way.edge.watermark is not None:
                        needed.add(way.edge.watermark.column)
            found[name] = [each for each in source.arrow.names if each in needed] or source.arrow.names[:1]
        return found

    @cached_property
    def computed_from(self) -> list[str]:
        found = {self._column(name, column) for name, columns in self.reads_by_input.items() for column in columns}
        return [name for name in self.source.arrow.names if name in found or (self.is_united and name == INPUT)]

    @property
    def reads(self) -> list[str]:
        return self.computed_from

    @cached_property
    def _ways(self) -> list[_Way]:
        clocks: list[tuple[object, ...]] = []
        found: list[_Way] = []
        for edge in self._edges:
            times, clock = None, -1
            if (mark := edge.watermark) is not None:
                known: tuple[object, ...] = (edge.source.name, mark.column, mark.delay, edge.has_own_times or edge)
                if known not in clocks:
                    clocks.append(known)
                clock = clocks.index(known)
                if not edge.has_own_times:
                    time = edge.timed.schema[mark.column]
                    times = Program(compile_flow(ops.Project(edge.timed, (
                        Named("time", Col(time.name, time.dtype, time.nullable)),))))
            rows = Program(compile_flow(branch_of(edge, self.fragment)))
            found.append(_Way(edge, [*self._sources].index(edge.source.name), clock, rows, times))
        return found

    def _inputs(self, batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The rows of each input."""
        numbers = np.asarray(batch.column(INPUT)) if self.is_united else np.zeros(0, np.int32)
        for number, (name, columns) in enumerate(self.reads_by_input.items()):
            is_own = numbers == number
            rows = batch if not self.is_united or is_own.all() else filtered(batch, from_numpy(is_own))
            if rows.num_rows:
                schema = pa.schema([self._sources[name].arrow.field(column) for column in columns])
                given = [rows.column(self._column(name, column)) for column in columns]
                yield number, conformed(pa.RecordBatch.from_arrays(given, columns), schema)

    # --- the map side

    def map_rows(self, batches: Iterable[pa.RecordBatch], clock: Clock, summary: MapSummary,
                 options: Options) -> Iterator[pa.RecordBatch]:
        """The rows of both sides to shuffle."""
        clocks = _clocks(clock, self._clock_count)
        summaries = [NO_TIMES] * self._clock_count
        for batch in batches:
            summary.rows += batch.num_rows
            for number, rows in self._inputs(batch):
                is_counted = set[int]()
                for way in self._ways:
                    if way.input != number:
                        continue
                    if way.clock >= 0 and way.clock not in is_counted:
                        is_counted.add(way.clock)
                        times, gap = way.times_of(rows, options), self._max_gap(way)
                        if (within := extent(times)) is not None:
                            seen = summarize(times, within, clocks[way.clock].greatest, gap)
                            summaries[way.clock] = merge_summaries([summaries[way.clock], seen], gap).bounded()
                    yield from self._side_rows(way, rows, clock.watermark, summary, options)
        if self._clock_count > 1:
            summary.input_times = summaries
        elif summaries:
            summary.times = summaries[0]

    def _side_rows(self, way: _Way, rows: pa.RecordBatch, watermark: int | None, summary: MapSummary,
                   options: Options) -> Iterator[pa.RecordBatch]:
        """The rows of a side that are in time."""
        try:
            found = list(way.rows.run([rows], options))
        except ComputeError as error:
            raise located(error, self._op, way.rows.node) from None
        for batch in found:
            side = self.join.sides[self.join.side_of(batch.schema.names)]
            if side.time is not None:
                batch, late, timeless = rows_in_time(batch, side.time, self._least_on_time(watermark))
                summary.timeless += timeless
                if late.num_rows:
                    self._add_late(late, summary)
            if batch.num_rows:
                yield batch

    def _least_on_time(self, watermark: int | None) -> int | None:
        bound = self._join_op.bound
        if watermark is None:
            return None
        return watermark if bound is None or not bound.is_window else watermark // bound.size * bound.size

    @property
    def _join_op(self) -> ops.StreamJoin:
        assert isinstance(self.fragment.state, ops.BufferedJoin)
        return self.fragment.state.join

    def routed(self, rows: Iterable[pa.RecordBatch], targets: int,
               options: Options) -> Iterator[tuple[int, int, pa.RecordBatch]]:
        for side, batch in self.join.by_side(rows):
            for target, part in route([batch], self.join.sides[side].keys, targets, options):
                yield target, side, part

    @property
    def shuffle_schemas(self) -> list[pa.Schema]:
        return [side.schema for side in self.join.sides]

    def coalesced(self, shuffled: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return (batch for _, batch in self.join.by_side(shuffled))

    # --- time

    @cached_property
    def _clock_count(self) -> int:
        return max((way.clock for way in self._ways), default=-1) + 1

    def _max_gap(self, way: _Way) -> int | None:
        mark = way.edge.watermark
        assert mark is not None
        return max_gap_of(way.edge.timed.schema[mark.column].dtype)

    def advance_clock(self, clock: Clock, summaries: Iterable[Mapping[str, Any]], skipped: TimeSummary) -> Clock:
        summaries = list(summaries)
        ways = {way.clock: way for way in self._ways if way.edge.watermark is not None}
        marks = [(self._max_gap(ways[k]), ways[k].edge.watermark) for k in range(self._clock_count)]
        if len(marks) == 1:
            (gap, mark), = marks
            assert mark is not None
            return clock.advance([*time_summaries(summaries), skipped], gap, mark.delay)
        after = []
        for k, ((gap, mark), before) in enumerate(zip(marks, _clocks(clock, len(marks)), strict=True)):
            assert mark is not None
            times = [TimeSummary.from_json(each["input_times"][k]) for each in summaries if each.get("input_times")]
            after.append(before.advance(times, gap, mark.delay))
        return clock.united(after)

    def drained_at(self, runs: Iterable[Run]) -> int | None:
        """The watermark at which all rows are final that wait for a match."""
        newest = [run.newest for run in runs if run.newest is not None]
        bound = self._join_op.bound
        if bound is None or not newest or self.watermark_op is None:
            return None
        waits = [wait for wait in (bound.left_wait, bound.right_wait) if wait < FOREVER]
        return min(max(newest) + max([0, *waits]) + 1, FOREVER)


def _clocks(clock: Clock, count: int) -> list[Clock]:
    """The clocks of all ways."""
    if count == 1:
        return [clock]
    return [*clock.inputs] or [Clock()] * count


def _unbound_sources(op: ops.Op, at: SourceLoc) -> dict[str, ops.Source]:
    """The inputs of a flow by name."""
    found: dict[str, ops.Source] = {}
    for each in stream_ops(op):
        if isinstance(each, ops.Source):
            if each.data is not None:
                raise BadArgument("a side of a join of streams has its data already", at=at, step="join",
                                  hint='begin it with si.flow(schema, name="..."), and give start its stream; an '
                                       "ordinary join, with on= alone, is with a table")
            found.setdefault(each.name, each)
    return found


def _check_times(op: ops.Op) -> None:
    """Refuse sides with times of two types: their watermark would be in units of either."""
    for each in walk_ops(op):
        bound = each.bound if isinstance(each, ops.StreamJoin) else None
        if bound is not None and any(isinstance(time, Call) and time.fn == "cast"
                                     for time in (bound.left, bound.right)):  # fmt: skip
            raise BadArgument("in a stream both sides of a join have times of one type", at=each.at,
                              found=str(bound), hint="cast the time of one side before with_watermark")
