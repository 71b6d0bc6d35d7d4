"""Work: what a flow does with a stream, cut in two, the same in every process.

    rowwise    no state: the map side gives results
    distinct   rows unlike any before: the keys seen are state, and whatever is new is a result
    running    groups without an end, or windows told of as they change: state, and what the batch changed are results
    closing    windows: state until the watermark has passed their end, then results

The map side makes of a batch's rows what crosses the shuffle (`spark/phases.py`), without rows that come too late:
those whose windows were all closed behind the batch before. The reduce side is in `reducing.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import pyarrow as pa

from scalein.compiler import compile_flow
from scalein.dtypes import Schema
from scalein.errors import BadArgument, ComputeError, LateData, SourceLoc
from scalein.exec.bounded import Program
from scalein.exec.event_time import extent, outlier_distance
from scalein.ir import ops
from scalein.ir.exprs import Col, Named
from scalein.ir.rewrite import rewrite, walk_ops
from scalein.jobs.changelog import OP
from scalein.jobs.changelog import changelog_rows as told
from scalein.jobs.changelog import check as check_changes
from scalein.jobs.compatibility import signature
from scalein.jobs.fragments import Feed, Fragment, cut, over, placeholder
from scalein.jobs.lateness import Lateness
from scalein.jobs.operators import Context, FragmentRunner, Morsel, reads
from scalein.jobs.partials import all_computed
from scalein.options import Options
from scalein.spark.phases import Phases
from scalein.spark.streaming.clocks import Clock, Seen, moved, seen
from scalein.storage.checked_json import Json

SLICE = "#slice"  # the start of the slice of time of a row that waits


@dataclass
class Tally:
    """What a task counted beside its results."""

    rows: int = 0
    timeless: int = 0
    late_rows: int = 0
    failed_rows: int = 0
    seen: list[Seen] = field(default_factory=list)
    late: list[pa.RecordBatch] = field(default_factory=list)  # if they are wanted
    failed: list[pa.RecordBatch] = field(default_factory=list)

    def to_json(self) -> dict[str, Json]:
        return {"rows": self.rows, "timeless": self.timeless, "late_rows": self.late_rows,
                "failed_rows": self.failed_rows,
                "seen": [[each.rows, each.near, each.far, each.middle, each.believed] for each in self.seen]}


class Work:
    """A flow over one stream. `late` is drop, error or sink; `on_error` is raise or sink."""

    def __init__(self, op: ops.Op, emit: str, late: str, on_error: str, at: SourceLoc) -> None:
        self._op, self.emit, self._late, self._on_error, self._at = op, emit, late, on_error, at
        feed = _one_feed(op, at)
        self.feed, segment = feed, feed.first
        self.phases = Phases(segment)
        self.segment = self.phases.segment  # in which a distinct is a group
        self.window = self.phases.window
        self.mark = feed.watermark
        self.mode = self._mode(segment)
        if emit == "changes":
            check_changes(segment, at)
            if self.window is not None and not self.window.is_tumbling:
                raise BadArgument('emit="changes" of sliding windows is not there on Spark yet', at=at, step="group_by",
                                  hint='tumbling windows have it; or emit="final"')
        self.keeps_late = late == "sink"
        dtype = None if self.mark is None else feed.timed.schema[self.mark.column].dtype
        self.far = None if dtype is None else outlier_distance(dtype)

    def __reduce__(self) -> tuple[object, ...]:
        return Work, (self._op, self.emit, self._late, self._on_error, self._at)

    def _mode(self, segment: Fragment) -> str:
        match segment.state:
            case None:
                return "rowwise"
            case ops.Distinct():
                return "distinct"
        if self.phases.kind == "top":
            raise BadArgument("an endless stream cannot be sorted", at=self._at, step="sort",
                              hint="sort what the sink has got")
        if self.window is None and self.emit == "final":
            raise BadArgument("a running aggregate over an endless stream has no final result", at=self._at,
                              step="group_by", hint='give emit="changes", or group by a window of time as well')
        if self.window is None or (self.emit == "changes" and self.phases.kind == "partials"):
            return "running"
        if self.mark is None:
            raise BadArgument("windows over an endless stream never close without a watermark", at=self._at,
                              step="group_by", hint="with_watermark(column, delay) at the beginning of the flow")
        return "closing"

    # --- what it is about

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns of results."""
        found = self.segment.op.schema.arrow
        return found.append(pa.field(OP, pa.string(), False)) if self.emit == "changes" else found

    @cached_property
    def late_schema(self) -> pa.Schema:
        return self.segment.before.schema.arrow

    @property
    def signature(self) -> list[Json]:
        """What the state depends on: a checkpoint goes on with a flow that has the same."""
        if self.feed.first.state is None:
            return []
        how = self.mode if self.phases.is_by_column else f"{self.mode}, columns together"
        return [f"{how} {signature(self.feed.first)}"]

    @property
    def outdated(self) -> list[list[Json]]:
        """The signatures of the same flow by a scalein that kept rows where partial groups are kept now."""
        if self.feed.first.state is None or self.phases.is_by_column:
            return []
        return [[f"{mode} {signature(self.feed.first)}"] for mode in ("running", "closing")]

    @property
    def slices(self) -> str | None:
        """The column of the state that has the start of a row's slice of time."""
        if self.window is None:
            return None
        return "window_start" if self.phases.kind == "partials" else SLICE

    @property
    def time(self) -> str:
        """The column that has the time of rows that wait."""
        assert self.window is not None
        return self.phases._crossing_names[self.window.time]

    @property
    def identity(self) -> list[str]:
        """The columns that tell groups apart."""
        keys = list(self.phases.keys)
        return keys if self.slices is None else [*keys, self.slices]

    @cached_property
    def kept(self) -> pa.Schema:
        """The columns of the state."""
        found = self.phases.crossing
        return found if self.slices in (None, *found.names) else found.append(pa.field(SLICE, pa.int64(), False))

    @cached_property
    def lateness(self) -> Lateness | None:
        if self.window is None:
            return None
        return Lateness(self.segment, self.window, 0, self.late_schema.names if self.keeps_late else self._used)

    @cached_property
    def _used(self) -> list[str]:
        """The columns that the aggregation reads."""
        state = self.segment.state
        assert isinstance(state, ops.Aggregate)
        used = state.state_reads()
        names = self.segment.before.schema.names
        return [name for name in names if name in used] or names[:1]

    @cached_property
    def reads(self) -> list[str]:
        """The columns of the stream that the map side needs, in the stream's order."""
        found = set(self.phases.reads)
        if self.lateness is not None:
            found |= set(reads(self.lateness.rows.node))
        if self.mark is not None:
            found |= {self.mark.column} if self._times is None else set(reads(self._times.node))
        if self._check is not None:
            found |= set(reads(self._check.node))
        names = self.segment.input.arrow.names
        return [name for name in names if name in found] or names[:1]

    @cached_property
    def row_keys(self) -> tuple[str, ...] | None:
        """The columns of the stream that are the keys, if rows of other keys need not be looked at: those that are
        counted or kept apart by their time, or because they fail, must be.
        """
        return None if self.mark is not None or self._check is not None else self.phases.source_keys

    def moved(self, clock: Clock, what: Iterable[Seen]) -> Clock:
        """The time behind a batch, of which tasks have seen that."""
        return clock if self.mark is None else moved(clock, what, self.far, self.mark.delay)

    def told(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Results that nothing takes back, as whoever asked for changes wants them."""
        return told(batch, "insert") if self.emit == "changes" else batch

    # --- the map side

    @cached_property
    def _times(self) -> Program | None:
        """The times that the watermark is about, where they are no column of the stream."""
        if self.mark is None or self.feed.timed is self.feed.first.input:
            return None
        found = self.feed.timed.schema[self.mark.column]
        return Program(compile_flow(ops.Project(self.feed.timed, (Named("time", Col(found.name, found.dtype,
                                                                                     found.nullable)),))))

    @cached_property
    def _sorted_phases(self) -> Phases:
        """The phases over rows of the aggregation's input: those of batches from which some rows were taken out."""
        fields = Schema(tuple(each for each in self.segment.before.schema if each.name in self._used))
        return Phases(cut(over(self.segment.op, self.segment.before, placeholder(fields)))[0].first)

    def crossing(self, batches: Iterable[pa.RecordBatch], clock: Clock, tally: Tally,
                 options: Options) -> Iterator[pa.RecordBatch]:
        """What crosses for batches of the stream's columns `reads`; the rest is counted."""
        watermark = clock.watermark
        arrivals = self._arrivals(self._sound(batches, tally, options), clock, watermark, tally, options)
        for is_in_time, some in groupby(self._split(arrivals), key=itemgetter(0)):
            rows = (batch for _, batch in some)
            if is_in_time:
                yield from self.phases.map(rows, options)
            else:
                yield from self._sorted_phases.map(self._in_time(rows, watermark, tally, options), options)

    @cached_property
    def _check(self) -> Program | None:
        """All that is computed of a row before it meets others, if rows that fail there are to be left out."""
        if self._on_error != "sink":
            return None
        is_rowwise = self.mode == "rowwise"
        return Program(compile_flow(self.segment.op if is_rowwise else all_computed(self.segment, self.keeps_late)))

    def _sound(self, batches: Iterable[pa.RecordBatch], tally: Tally, options: Options) -> Iterator[pa.RecordBatch]:
        """The rows that do not fail. They are computed once more later: groups and the sorting out of late rows cannot
        take a row back.
        """
        if self._check is None:
            yield from batches
            return

        def failed(rows: pa.RecordBatch, error: ComputeError) -> None:
            tally.rows += rows.num_rows
            tally.failed_rows += rows.num_rows
            tally.failed.append(rows)

        around = Context(options, Path(), lambda rows: None, False, lambda rows: None, failed, 0)
        runner = FragmentRunner(self.segment.op, around, self._check)
        for batch in batches:
            yield from runner.passing(batch)

    def _split(self, arrivals: Iterable[Morsel]) -> Iterator[tuple[bool, pa.RecordBatch]]:
        """Batches, and whether all their rows are in time or must be looked at."""
        for arrival in arrivals:
            if self.lateness is None or not arrival.batch.num_rows:
                yield True, arrival.batch
                continue
            good, rest = self.lateness.split(arrival)
            if good is not None:
                yield True, good.batch
            if rest is not None:
                yield False, rest

    def _arrivals(self, batches: Iterable[pa.RecordBatch], clock: Clock, watermark: int | None, tally: Tally,
                  options: Options) -> Iterator[Morsel]:
        for batch in batches:
            tally.rows += batch.num_rows
            if self.mark is None or not batch.num_rows:
                yield Morsel(batch, watermark)
                continue
            times = self._times_of(batch, options)
            within = extent(times)
            if within is None:
                yield Morsel(batch, watermark)
                continue
            tally.seen.append(seen(times, within, clock.greatest, self.far))
            yield Morsel(batch, watermark, self.mark.column if self._times is None else "", *within)

    def _times_of(self, batch: pa.RecordBatch, options: Options) -> pa.Array:
        assert self.mark is not None
        if self._times is None:
            return batch.column(self.mark.column)
        found = [each.column(0) for each in self._times.run([batch], options)]
        return pa.concat_arrays(found) if found else pa.array([], pa.int64())

    def _in_time(self, batches: Iterable[pa.RecordBatch], watermark: int | None, tally: Tally,
                 options: Options) -> Iterator[pa.RecordBatch]:
        """The rows of batches that are not late and have a time, as the aggregation gets them."""
        assert self.lateness is not None
        for batch in batches:
            for found in self.lateness.sort(batch, watermark, options):
                tally.timeless += found.timeless
                if found.late.num_rows:
                    self._keep_late(found.late, tally)
                if found.good.num_rows:
                    yield found.good.select(self._used)

    def _keep_late(self, rows: pa.RecordBatch, tally: Tally) -> None:
        tally.late_rows += rows.num_rows
        if self._late == "error":
            raise LateData(f"{rows.num_rows} rows came too late: all windows that they are in are closed",
                           at=self._at, found=rows.slice(0, 1).to_pylist()[0],
                           hint='a longer delay of with_watermark, late="drop", or a sink for them')
        if self.keeps_late:
            tally.late.append(rows)


def one_source(op: ops.Op, at: SourceLoc) -> ops.Source:
    """The input of a flow that waits for its data."""
    waiting = [each for each in _main(op) if isinstance(each, ops.Source) and each.data is None]
    if not waiting:
        raise BadArgument("a flow over a stream begins with si.flow(schema), and this one has its data already", at=at,
                          hint="si.flow(stream_df.schema)")
    return waiting[0]


def _one_feed(op: ops.Op, at: SourceLoc) -> Feed:
    """The one input of a flow, whose rows meet at most one aggregation; other flows are refused."""
    for each in _main(op):
        match each:
            case ops.Union():
                raise BadArgument("a flow over a stream has one input, and this one has a union", at=at, step="union",
                                  hint="unite the streams in Spark: a.unionByName(b)")
            case ops.Limit():
                raise BadArgument("limit depends on the order of rows, and a stream on Spark has none", at=at,
                                  step="limit")
    feeds = cut(op)
    if feeds[0].first.then is not None:
        raise BadArgument("a flow over a stream has at most one aggregation or distinct, and this one has a chain",
                          at=at, hint="start a second stream over what the first one writes")
    return feeds[0]


def _main(op: ops.Op) -> Iterator[ops.Op]:
    """The ops that the stream's rows pass; what they are joined with is static."""
    static = {id(below) for each in walk_ops(op) if isinstance(each, ops.Join) for below in walk_ops(each.right)}
    return (each for each in walk_ops(op) if id(each) not in static)


def bound_types(op: ops.Op, schema: pa.Schema) -> ops.Op:
    """The flow whose input comes in these types."""
    return rewrite(op, lambda each: replace(each, arrow=schema) if isinstance(each, ops.Source) and each.data is None
                   and each.arrow != schema else None)
