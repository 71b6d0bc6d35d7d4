"""The pipeline of a job: its steps, fed by partitions, with the clocks of these.

One thread runs it. What arrives goes along the path of its source, step by step; then time advances, and what that
closes goes on along the path behind it.
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
from scalein.errors import BadArgument, ScaleinError, SourceLoc
from scalein.exec.event_time import extent, extents, least
from scalein.exec.scan_predicates import row_groups_skipped
from scalein.ir import ops
from scalein.ir.exprs import type_of
from scalein.jobs import fragments as cutting
from scalein.jobs.changelog import check as check_changes
from scalein.jobs.changelog import told
from scalein.jobs.compatibility import check_same, label, places, signature, state_number, states
from scalein.jobs.dead_letters import failed_schema, without_bad_lines
from scalein.jobs.fragments import Feed, Segment
from scalein.jobs.metrics import Metrics, Stage
from scalein.jobs.operators import Arrival, Distinct, Frozen, Limit, Sort, Stateless, Step, Surroundings
from scalein.jobs.running_aggregate import Running
from scalein.jobs.source_inputs import Line, line_of
from scalein.jobs.source_readers import Delivery, Reader
from scalein.jobs.speculation import counted_on_trial
from scalein.jobs.window_aggregate import Sliding, Waiting, Windowed, grouped
from scalein.options import Options
from scalein.storage.checked_json import Json, as_int

SHARED_TIMES = 1 << 20  # at least, to look at side by side: waking a worker takes as long as a quarter of them
NEVER = 1 << 62  # rows come at the end: time does not pass behind them before


@dataclass(frozen=True)
class Wishes:
    """What the user asked of a job's results."""

    emit: str
    late: Callable[[pa.RecordBatch], None]
    keeps_late: bool  # with all their columns
    failed: Callable[[pa.RecordBatch, ScaleinError], None] | None
    has_checkpoints: bool = True


class Pipeline:
    """Steps in an order in which each comes before the one that it feeds."""

    def __init__(self, op: ops.Op, options: Options, wishes: Wishes, folder: Path, epoch: dict[str, Json] | None,
                 metrics: Metrics, at: SourceLoc) -> None:
        self.metrics, self._options, self._emit, self._at = metrics, options, wishes.emit, at
        self._failed = wishes.failed
        self._op, self._skipped_before = op, row_groups_skipped(op)
        self._feeds = cutting.cut(op)
        self._segments = cutting.segments(self._feeds)
        cutting.check_bounded(self._feeds, self.is_bounded, wishes.emit, at)
        if epoch is not None:
            check_same(epoch, self.signature, self._told_how, at)
        known = places(epoch, self._feeds, at)
        kept = states(epoch, self._segments)
        self.steps: list[Step] = []
        self._around: list[Surroundings] = []
        try:
            for number, segment in enumerate(self._segments):
                around = Surroundings(options, folder / f"state-{state_number(self._segments, number)}", wishes.late,
                                      wishes.keeps_late, self._count_timeless, wishes.failed, self._delay(segment),
                                      wishes.has_checkpoints)
                self._around.append(around)
                self.steps.append(_step(segment, around, kept[number], self._emit_of(segment, wishes.emit, at)))
                if isinstance(self.steps[-1], Waiting) and segment.window is None and not self.is_bounded:
                    raise BadArgument("aggregates as large as their input have no result over an endless source",
                                      at=at, step="group_by", hint="group by a window of time as well")
            self._lines = [self._line(feed, about) for feed, about in zip(self._feeds, known, strict=True)]
        except BaseException:
            self.close()
            raise
        self.stages = [Stage("rows" if segment.state is None else type(segment.state).__name__.lower())
                       for segment in self._segments]  # fmt: skip
        self.watermark: int | None = None
        self._advanced: int | None = None  # the watermark that the steps know of
        if epoch is not None and epoch["watermark"] is not None:
            self.watermark = self._advanced = as_int(epoch["watermark"])

    @cached_property
    def signature(self) -> list[Json]:
        """What the states depend on."""
        return [signature(segment) for segment in self._segments if segment.state is not None]

    @property
    def _told_how(self) -> str:
        """What the last state depends on besides its op: groups are kept otherwise where their changes are told."""
        return self._emit if isinstance(self._segments[-1].state, ops.Aggregate) else "final"

    @property
    def is_bounded(self) -> bool:
        return all(not isinstance(feed.source.data, BoundSource) or feed.source.data.bounded for feed in self._feeds)

    @property
    def readers(self) -> list[Reader]:
        return [reader for line in self._lines for reader in line.readers]

    @property
    def mark(self) -> object:
        """How far the job has come: where it is equal, an epoch would say nothing new."""
        return self.metrics.to_json(), self.watermark, [reader.place for reader in self.readers]

    def schema_of(self, sink: str, emit: str) -> pa.Schema:
        """The columns of results ("out"), of late rows, or of rows that failed."""
        if sink == "late":
            return self._late_schema
        if sink == "failed":
            return failed_schema(self._segments[0].input.arrow, self._lines[0].readers[0])
        schema = self._segments[-1].op.schema.arrow
        return schema.append(pa.field("op", pa.string(), False)) if emit == "changes" else schema

    @property
    def _late_schema(self) -> pa.Schema:
        """The columns of late rows: rows are late in the first windows on their way."""
        found: list[Schema] = []
        for line in self._lines:
            windowed = (self._segments[number] for number in line.path if self._segments[number].window is not None)
            found += [segment.before.schema for segment in islice(windowed, 1) if segment.before.schema not in found]
        if len(found) > 1:
            raise BadArgument("late rows of these windows have different columns, and late= takes one sink",
                              at=self._at, found="; ".join(map(repr, found)),
                              hint='select the same columns before each group_by, or late="drop"')
        return found[0].arrow if found else self._segments[0].input.arrow

    def _count_timeless(self, rows: int) -> None:
        self.metrics.timeless_rows += rows

    def _line(self, feed: Feed, known: dict[str, Json]) -> Line:
        first = self._segments.index(feed.first)
        path, segment = [first], feed.first.then
        while segment is not None:
            path.append(self._segments.index(segment))
            segment = segment.then
        is_timed = any(self._segments[number].window is not None for number in path)
        return line_of(feed, self.steps[first].reads, self._around[first], known, path, is_timed)

    # --- rows

    def run(self, deliveries: list[Delivery],
            more: Callable[[], list[Delivery]] = lambda: []) -> Iterator[pa.RecordBatch]:
        """What the rows that arrived give at once, and what they close, as it is asked for: all of it has to be.

        If `more` are taken meanwhile, which any thread may do, they are at the end of `deliveries` then.
        """
        is_one = len(self._lines) == 1
        lines = [(self._lines[0], deliveries)] if is_one else [
            (line, list(each)) for line, each in groupby(deliveries, key=self._line_of)]  # fmt: skip
        for line, some in lines:
            mark, step, stage = line.feed.watermark, self.steps[line.path[0]], self.stages[line.path[0]]
            if mark is not None and line.times is None and isinstance(step, Windowed):
                with stage.working():
                    is_done = counted_on_trial(self, step, mark.column, line.clocks, some,
                                               more if is_one else lambda: [])
                if is_done:
                    stage.rows_in += sum(delivery.batch.num_rows for delivery in some)
                    continue
            arrivals = self._arrivals(line, some)
            behind: list[Arrival] = []  # a border
            while True:
                yield from self._told(self._along(line.path, self._until_due(arrivals, behind)))
                if not behind:
                    break
                yield from self._advance()
        yield from self.advance()

    def _until_due(self, arrivals: Iterator[Arrival], behind: list[Arrival]) -> Iterator[Arrival]:
        """Arrivals up to where a step wants to know of time; the one behind that border is in `behind` then."""
        while behind:
            yield behind.pop()
        before = self._advanced
        for arrival in arrivals:
            due = min((step.due for step in self.steps if step.due is not None), default=None)
            if due is not None and self.watermark is not None and self.watermark != before and self.watermark >= due:
                behind.append(arrival)
                return
            yield arrival

    def _told(self, out: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
        """Results that nothing takes back are inserts to those who want changes."""
        last = self.steps[-1]
        if self._emit == "final" or (isinstance(last, Running) and last.changes is not None):
            return out
        return [told(batch, "insert") for batch in out]

    def fill(self, rows: Iterable[pa.RecordBatch]) -> None:
        """Take rows of the past in, whose results are known: nothing of them is given, and late ones are no news."""
        line, counted = self._lines[0], self.metrics.to_json()
        late = [around.late for around in self._around]
        for around in self._around:
            around.late = lambda rows: None
        names = line.readers[0].columns
        for batch in rows:
            past = Delivery(line.readers[0], batch.select(names), line.readers[0].place, True, 0.0)
            self._along(line.path, self._arrivals(line, [past]))
            if line.clocks:  # they are the past of all partitions
                greatest = line.clocks[line.readers[0].name].greatest
                for clock in line.clocks.values():
                    clock.greatest = greatest
                self.move_watermark()
            deque(self.advance(), maxlen=0)
        for around, given in zip(self._around, late, strict=True):
            around.late = given
        self.metrics.restore({**counted})

    def _line_of(self, delivery: Delivery) -> Line:
        return next(line for line in self._lines if delivery.reader in line.readers)

    def _arrivals(self, line: Line, deliveries: list[Delivery]) -> Iterator[Arrival]:
        """Batches with the watermark before each; time moves behind them."""
        known = self._extents(line, deliveries)
        for reader, batch, _, is_last, _, size in deliveries:
            self.metrics.rows_in += batch.num_rows
            self.metrics.bytes_in += size
            batch = without_bad_lines(reader, batch, self._failed)
            clock = line.clocks.get(reader.name)
            if clock is None:
                if batch.num_rows:
                    yield Arrival(batch, self.watermark if line.is_timed else None)
                continue
            within = extent(self._times(line, batch)) if known is None else next(known)
            if batch.num_rows:
                assert line.feed.watermark is not None
                own = line.feed.watermark.column if line.times is None else ""
                yield Arrival(batch, self.watermark if line.is_timed else None, own if within else "",
                              *(within or ()))
            if within is not None:
                clock.see(within, partial(self._times, line, batch))
            if is_last:
                clock.end_batch()
                self.move_watermark()

    def _extents(self, line: Line, deliveries: list[Delivery]) -> Iterator[tuple[int, int] | None] | None:
        """How far the times of each batch reach, where workers find out sooner than this thread does batch by batch."""
        workers = self._around[line.path[0]].options.workers
        if workers == 1 or not line.clocks or line.times is not None or line.readers[0].beside or (
                sum(delivery.batch.num_rows for delivery in deliveries) < SHARED_TIMES):
            return None
        return iter(extents([self._times(line, delivery.batch) for delivery in deliveries], workers))

    def _times(self, line: Line, batch: pa.RecordBatch) -> pa.Array:
        assert line.feed.watermark is not None
        if line.times is None:
            return batch.column(line.feed.watermark.column)
        found = line.times.run([batch])
        return pa.concat_arrays([each.column(0) for each in found]) if found else pa.array([], pa.int64())

    def _along(self, path: list[int], arrivals: Iterable[Arrival]) -> list[pa.RecordBatch]:
        for number in path:
            stage = self.stages[number]
            with stage.working():
                arrivals = found = self.steps[number].rows(stage.taking(arrivals))
            stage.rows_out += sum(arrival.batch.num_rows for arrival in found)
        return [arrival.batch for arrival in arrivals]

    def move_watermark(self) -> None:
        found = least([clock for line in self._lines for clock in line.clocks.values()])
        if found is not None and (self.watermark is None or found > self.watermark):
            self.watermark = found

    def advance(self) -> Iterator[pa.RecordBatch]:
        """Results of windows that the watermark has closed, as they are asked for."""
        yield from self._advance()
        for step, stage in zip(self.steps, self.stages, strict=True):
            if isinstance(step, Sliding):  # nothing follows one that puts results off
                yield from self._told(list(stage.giving(step.given)))

    def _advance(self) -> Iterator[pa.RecordBatch]:
        if self.watermark is None or self.watermark == self._advanced:
            return
        before, self._advanced, now = self._advanced, self.watermark, self.watermark
        for number, step in enumerate(self.steps):  # what one gives comes before the next one's time advances
            for batch in self.stages[number].giving(partial(step.advance, now)):
                yield from self._told(self._along(self._behind(number), [Arrival(batch, before)]))

    # --- for who looks

    @property
    def has_watermark(self) -> bool:
        return any(line.clocks for line in self._lines)

    @property
    def has_running(self) -> bool:
        return any(isinstance(s.state, ops.Aggregate) and s.state.window is None for s in self._segments)

    @property
    def has_sort(self) -> bool:
        return any(isinstance(segment.state, ops.Sort) for segment in self._segments)

    @property
    def first_window(self) -> DType | None:
        """The type of time of the first windows, if there are any."""
        windows = (segment.window for segment in self._segments if segment.window is not None)
        return next((type_of(window.time) for window in windows), None)

    @property
    def partitions_without_time(self) -> list[str]:
        return [name for line in self._lines for name, clock in line.clocks.items() if clock.watermark is None]

    @property
    def next_end(self) -> int | None:
        """The end of the first window that something waits in."""
        ends = [end for step in self.steps if (end := step.next_end) is not None]
        return min(ends, default=None)

    @property
    def time_type(self) -> DType | None:
        """The type of times that the watermark is about."""
        return next((line.feed.timed.schema[line.feed.watermark.column].dtype for line in self._lines
                     if line.feed.watermark is not None), None)

    @property
    def lag_s(self) -> float | None:
        """How far the watermark is behind the clock on the wall, in seconds."""
        dtype = self.time_type
        if self.watermark is None or dtype is None or dtype.kind is not Kind.TS:
            return None
        return round(time.time() - self.watermark / UNITS_PER_SECOND[dtype.unit], 3)

    @property
    def far_rows(self) -> int:
        """Rows whose time was too far ahead to be believed."""
        return sum(clock.far_rows for line in self._lines for clock in line.clocks.values())

    @property
    def row_groups_skipped(self) -> int:
        """Row groups of Parquet that had nothing the flow keeps."""
        return row_groups_skipped(self._op) - self._skipped_before

    @property
    def state_bytes(self) -> int:
        """What steps hold in memory."""
        return sum(step.state_bytes for step in self.steps)

    def mark_idle(self, reader: Reader, is_idle: bool) -> None:
        for line in self._lines:
            clock = line.clocks.get(reader.name) if reader in line.readers else None
            if clock is not None:
                clock.is_idle, clock.is_ended = is_idle, reader.has_ended
        self.move_watermark()

    @property
    def is_sated(self) -> bool:
        """Whether rows that may still come can change nothing: all of them would meet a limit that is reached."""
        sated = {number for number, step in enumerate(self.steps) if isinstance(step, Limit) and step.is_sated}
        return all(sated & set(line.path) for line in self._lines)

    def finish(self) -> Iterator[pa.RecordBatch]:
        """Everything that is left, one batch after the other: it may be more than fits into memory. Nothing follows."""
        for number, step in enumerate(self.steps):
            for batch in self.stages[number].giving(step.finish):
                yield from self._told(self._along(self._behind(number), [Arrival(batch, self._advanced)]))

    def _delay(self, segment: Segment) -> int:
        """How much earlier time is here: a window that is still open behind a group begins less than its size ago."""
        return max((self._delay(each) + _holds_back(each) for each in self._segments if each.then is segment),
                   default=0)

    def _emit_of(self, segment: Segment, emit: str, at: SourceLoc) -> str:
        """Only the last group tells its changes: what comes before it, the others take as it stays."""
        if emit == "final" or segment.then is not None:
            return "final"
        check_changes(segment, at)
        return emit

    def _behind(self, number: int) -> list[int]:
        path = []
        segment = self._segments[number].then
        while segment is not None:
            path.append(self._segments.index(segment))
            segment = segment.then
        return path

    # --- epochs

    def set_workers(self, workers: int) -> None:
        for around in self._around:
            around.options = replace(around.options, workers=workers)

    def settle(self) -> None:
        """Take all that has arrived into the steps' states."""
        for step in self.steps:
            step.settle()

    def freeze(self) -> tuple[dict[str, Json], list[Frozen]]:
        """Where sources and time are, and the steps' states, as of now."""
        sources: list[Json] = [{"name": label(line.feed.source), "partitions": line.to_json()} for line in self._lines]
        frozen = [step.freeze() for step in self.steps]
        return {"sources": sources, "watermark": self.watermark, "steps": self.signature,
                "emit": self._told_how}, frozen

    def forget(self, kept: list[dict[str, Json]]) -> None:
        """Remove what epochs that stay do not name."""
        named = []
        for epoch in kept:
            with suppress(ValueError, KeyError):  # one that says something else could not be gone on from anyway
                named.append(states(epoch, self._segments))
        for number, step in enumerate(self.steps):
            step.forget([each[number] for each in named])

    def stateful(self, states: list[Json]) -> list[Json]:
        """Of all steps' states, those that an epoch keeps."""
        return [state for state, segment in zip(states, self._segments, strict=True) if segment.state is not None]

    def close(self) -> None:
        for step in self.steps:
            step.close()
        for around in self._around:  # they lead back to the job: it, and the results in its sinks, would wait for the
            around.late, around.timeless, around.failed = _nothing, _nothing, None  # garbage collector
        self._failed = None


def _nothing(given: object) -> None:
    pass


def _holds_back(segment: Segment) -> int:
    """How much later than their times rows of a segment come."""
    if isinstance(segment.state, ops.Sort) or (isinstance(segment.state, ops.Aggregate) and segment.window is None):
        return NEVER
    return 0 if segment.window is None else segment.window.size


def _step(segment: Segment, around: Surroundings, state: Json, emit: str) -> Step:
    match segment.state:
        case None:
            return Stateless(segment, around)
        case ops.Aggregate():
            return grouped(segment, around, state, emit)
        case ops.Distinct():
            return Distinct(segment, around, state)
        case ops.Limit():
            return Limit(segment, around, state)
        case ops.Sort():
            return Sort(segment, around, state)
