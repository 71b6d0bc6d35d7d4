"""Several inputs of a stream, which Spark reads as one.

Several streaming DataFrames become one: `INPUT` is the number of a row's input, and each input has columns of its own,
which are null in the rows of the others. Map tasks separate them again, and run what precedes the op with state, or the
union of all, on each way from an input.

Each way has a clock of its own; the watermark of the stream is the least of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from scalein.arrow_rows import filtered, from_numpy
from scalein.compiler import compile_flow
from scalein.errors import BadArgument, ComputeError, SourceLoc
from scalein.exec.bounded import Program
from scalein.exec.error_location import located
from scalein.exec.event_time import NO_TIMES, TimeSummary, extent, max_gap_of, merge_summaries, summarize
from scalein.exec.fragments import SourceEdge
from scalein.exec.operator import Morsel, reads
from scalein.ir import ops
from scalein.ir.exprs import Col, Named
from scalein.kernels.bind import conformed
from scalein.options import Options
from scalein.spark.batch.filters import quote_name
from scalein.spark.streaming.event_time import Clock
from scalein.spark.streaming.stream_plan import MapSummary, StreamPlan, time_summaries, unbound_sources

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

INPUT = "input"  # the column with the number of a row's input


@dataclass(frozen=True)
class Way:
    """A way from an input to the op with state."""

    edge: SourceEdge
    input: int
    clock: int  # the number of its clock; -1 without a watermark
    rows: Program  # those that it brings
    times: Program | None  # those of the watermark; None where they are a column of the input

    def times_of(self, batch: pa.RecordBatch, options: Options) -> pa.Array:
        assert self.edge.watermark is not None
        if self.times is None:
            return batch.column(self.edge.watermark.column)
        found = [each.column(0) for each in self.times.run([batch], options)]
        return pa.concat_arrays(found) if found else pa.array([], pa.int64())

    @property
    def max_gap(self) -> int | None:
        mark = self.edge.watermark
        assert mark is not None
        return max_gap_of(self.edge.timed.schema[mark.column].dtype)


class Inputs:
    """The inputs of a flow by name, and the ways of their rows."""

    def __init__(self, op: ops.Op, sources: Mapping[str, ops.Source], edges: list[SourceEdge],
                 rows_of: Callable[[SourceEdge], Program]) -> None:
        """`rows_of` gives what runs on the way from an edge."""
        self._op, self.sources, self._edges, self._rows_of = op, dict(sources), edges, rows_of
        self.is_united = len(self.sources) > 1
        self.source = self._union_source()

    def _column(self, name: str, column: str) -> str:
        """The column of the stream with a column of an input."""
        if not self.is_united:
            return column
        source = self.sources[name]
        return f"i{[*self.sources].index(name)}c{source.arrow.names.index(column)}"

    def _union_source(self) -> ops.Source:
        """The columns of all inputs."""
        if not self.is_united:
            return next(iter(self.sources.values()))
        fields = [field.with_name(self._column(name, field.name)).with_nullable(True)
                  for name, source in self.sources.items() for field in source.arrow]
        schema = pa.schema([pa.field(INPUT, pa.int32(), False), *fields])
        return ops.Source("inputs", schema, tuple(schema.names))

    def united(self, frames: Mapping[str, DataFrame]) -> DataFrame:
        """The streams of all inputs as one."""
        from pyspark.sql import functions

        types = {self._column(name, field.name): field.dataType for name in self.sources
                 for field in frames[name].schema.fields if field.name in self.sources[name].arrow.names}
        found: DataFrame | None = None
        for number, (name, source) in enumerate(self.sources.items()):
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
        """The columns that are needed of each input, in its order."""
        found: dict[str, list[str]] = {}
        for name, source in self.sources.items():
            needed: set[str] = set()
            for way in self.ways:
                if [*self.sources][way.input] == name:
                    needed.update(reads(way.rows.node))
                    if way.times is not None:
                        needed.update(reads(way.times.node))
                    elif way.edge.watermark is not None:
                        needed.add(way.edge.watermark.column)
            found[name] = [each for each in source.arrow.names if each in needed] or source.arrow.names[:1]
        return found

    @cached_property
    def computed_from(self) -> list[str]:
        """The columns of the stream that are needed, in its order."""
        found = {self._column(name, column) for name, columns in self.reads_by_input.items() for column in columns}
        return [name for name in self.source.arrow.names if name in found or (self.is_united and name == INPUT)]

    @cached_property
    def ways(self) -> list[Way]:
        clocks: list[tuple[object, ...]] = []
        found: list[Way] = []
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
            found.append(Way(edge, [*self.sources].index(edge.source.name), clock, self._rows_of(edge), times))
        return found

    def _rows_by_input(self, batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The rows of each input."""
        numbers = np.asarray(batch.column(INPUT)) if self.is_united else np.zeros(0, np.int32)
        for number, (name, columns) in enumerate(self.reads_by_input.items()):
            is_own = numbers == number
            rows = batch if not self.is_united or is_own.all() else filtered(batch, from_numpy(is_own))
            if rows.num_rows:
                schema = pa.schema([self.sources[name].arrow.field(column) for column in columns])
                given = [rows.column(self._column(name, column)) for column in columns]
                yield number, conformed(pa.RecordBatch.from_arrays(given, columns), schema)

    def rows(self, batches: Iterable[pa.RecordBatch], clock: Clock, summary: MapSummary,
             options: Options) -> Iterator[tuple[Way, pa.RecordBatch]]:
        """What the ways bring of batches of the stream; rows and times are added to `summary`."""
        clocks = _clocks(clock, self.clock_count)
        summaries = [NO_TIMES] * self.clock_count
        for batch in batches:
            summary.rows += batch.num_rows
            for number, rows in self._rows_by_input(batch):
                is_counted = set[int]()
                for way in self.ways:
                    if way.input != number:
                        continue
                    if way.clock >= 0 and way.clock not in is_counted:
                        is_counted.add(way.clock)
                        times, gap = way.times_of(rows, options), way.max_gap
                        if (within := extent(times)) is not None:
                            seen = summarize(times, within, clocks[way.clock].greatest, gap)
                            summaries[way.clock] = merge_summaries([summaries[way.clock], seen], gap).bounded()
                    try:
                        found = list(way.rows.run([rows], options))
                    except ComputeError as error:
                        raise located(error, self._op, way.rows.node) from None
                    yield from ((way, each) for each in found)
        if self.clock_count > 1:
            summary.input_times = summaries
        elif summaries:
            summary.times = summaries[0]

    # --- time

    @cached_property
    def clock_count(self) -> int:
        return max((way.clock for way in self.ways), default=-1) + 1

    def advance_clock(self, clock: Clock, summaries: Iterable[Mapping[str, Any]], skipped: TimeSummary) -> Clock:
        """The clock after a batch, from the summaries of its tasks, and the times of rows that none has read."""
        summaries = list(summaries)
        ways = {way.clock: way for way in self.ways if way.edge.watermark is not None}
        marks = [(ways[k].max_gap, ways[k].edge.watermark) for k in range(self.clock_count)]
        if not marks:
            return clock
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


class UnionPlan(StreamPlan):
    """A flow over the union of several streams."""

    def __init__(self, op: ops.Op, emit: str, late: str, on_error: str, at: SourceLoc) -> None:
        super().__init__(op, emit, late, on_error, at)
        timed = [edge for edge in self._edges if edge.watermark is not None]
        types = {edge.timed.schema[edge.watermark.column].dtype for edge in timed if edge.watermark is not None}
        if timed and len(timed) < len(self._edges):
            raise BadArgument("some streams of the union have a watermark, and others have none", at=at, step="union",
                              hint="with_watermark(column, delay) on each, or on none")
        if len(types) > 1:
            raise BadArgument("the streams of the union have watermarks of different types", at=at, step="union",
                              found=", ".join(sorted(map(str, types))),
                              hint="cast the time of one before with_watermark")
        self.inputs = Inputs(op, unbound_sources(op, at), self._edges, self._branch)
        self.source = self.inputs.source

    def _arriving(self, batches: Iterable[pa.RecordBatch], clock: Clock, summary: MapSummary,
                  options: Options) -> Iterator[Morsel]:
        assert self.inputs is not None
        for _, batch in self.inputs.rows(batches, clock, summary, options):
            yield Morsel(batch, clock.watermark)


def _clocks(clock: Clock, count: int) -> list[Clock]:
    """The clocks of all ways."""
    if count == 1:
        return [clock]
    return [*clock.inputs] or [Clock()] * count
