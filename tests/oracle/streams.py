"""What a flow gives over streams: event time, late rows, windows as they close; by brute force.

`run(flow, events)` takes what sources deliver, step by step, and gives what comes out in each step. Every row is held
for ever; watermarks and open windows are computed anew in each step, by these sentences:

- The watermark of a partition is its greatest time less the delay. It moves at the end of a source batch. That of an
  operator is the least of its partitions; idle and ended ones hold nothing back; where all are idle, it is the
  greatest of theirs. It never goes back.
- From the greatest time so far, or in a partition's first batch from the median of its times, time goes on by steps of
  at most a day over the times of the batch; if the median is not reached in three batches in a row, then from the
  median. For a partition that was idle, the watermark is a time so far.
- A window [s, e) closes when the watermark reaches e. A row counts in those of its windows that were open before its
  source batch; if there was none, it is late. A row without a time is dropped.
- A session is final when the watermark is after its last time and the gap. The rows of a source batch are merged with
  one another and with sessions that were not final before it; those that are in final sessions only are late.
- At the end everything closes. `limit` and `distinct` take rows as they arrive. Sorts and aggregates without a window
  give their rows at the end; with `emit="changes"` what they are after each step is in `Trace.changes`.

Joins of streams are functions over rows with their arrivals, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from scalein.dtypes import UNITS_PER_SECOND, DType, Kind
from scalein.ir import ops
from scalein.ir.windows import Session
from tests.oracle.exprs import meaning
from tests.oracle.relations import Relations, least_start
from tests.oracle.values import Row, group_key, rows_of, table_of

BELIEVED_BATCHES = 3  # in a row, whose median was not reached: then time has made a jump
MAX = 1 << 80  # the watermark at the end


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that a partition of a source delivers at once."""

    rows: pa.RecordBatch
    partition: str = "all"
    source: int = 0  # which source of the flow, in the order of its plan


@dataclass(frozen=True, slots=True)
class Idle:
    """A partition has had nothing for a while; until its next batch it holds nobody back."""

    partition: str = "all"
    source: int = 0


@dataclass(frozen=True, slots=True)
class End:
    """A partition has ended. When all have, everything closes."""

    partition: str = "all"
    source: int = 0


Event = Batch | Idle | End


@dataclass
class Trace:
    """What came out in each step, and what did not."""

    outputs: list[list[Row]]
    watermarks: list[int | None]  # of the last aggregate in time, after each step
    late: list[Row] = field(default_factory=list)
    timeless: int = 0
    changes: list[list[Row]] = field(default_factory=list)  # all rows of the bounded plan, after each step
    _op: ops.Op | None = None

    def table(self, steps: int | None = None) -> pa.Table:
        """All that came out in the first steps."""
        assert self._op is not None
        return table_of([row for step in self.outputs[:steps] for row in step], self._op.schema)

    def late_table(self, op: ops.Op) -> pa.Table:
        return table_of(self.late, op.schema)


def run(flow: Any, events: Sequence[Event], *, changes: bool = False) -> Trace:
    """What comes out of a flow whose sources deliver this; the plan below static tables is read as it is bound."""
    op: ops.Op = flow if isinstance(flow, ops.Op) else flow.op
    stream = _Stream(op, list(events))
    found = Trace(stream.outputs(op), [], _op=op)
    found.watermarks = stream.shown_watermarks(op)
    found.late, found.timeless = stream.late, stream.timeless
    if changes:
        found.changes = [stream.bounded(op, step) for step in range(len(stream.events))]
    return found


class _Stream:
    """The steps of a stream. `outputs(op)` is what an operator gives in each of them."""

    def __init__(self, op: ops.Op, events: list[Event]) -> None:
        self.events = events
        self._sources = list(_stream_sources(op))
        self._known: dict[int, list[list[Row]]] = {}
        self._marks: dict[int, list[int | None]] = {}
        self.late: list[Row] = []
        self.timeless = 0

    @property
    def _is_over(self) -> list[bool]:
        """Whether every partition that ever delivered, or was named, has ended, after each step."""
        named = {(event.source, event.partition) for event in self.events}
        found, ended = [], set[tuple[int, str]]()
        for event in self.events:
            if isinstance(event, End):
                ended.add((event.source, event.partition))
            found.append(ended == named)
        return found

    # --- rows

    def outputs(self, op: ops.Op) -> list[list[Row]]:
        if id(op) not in self._known:
            self._known[id(op)] = self._outputs(op)
        return self._known[id(op)]

    def _outputs(self, op: ops.Op) -> list[list[Row]]:
        match op:
            case ops.Source():
                number = next(k for k, source in enumerate(self._sources) if source is op)
                return [rows_of([event.rows], op.columns) if isinstance(event, Batch) and event.source == number
                        else [] for event in self.events]
            case ops.Limit() | ops.Distinct():
                return self._appended(op)
            case ops.Sort():
                return self._at_the_end(op, op.input)
            case ops.OuterJoin():
                return self._at_the_end(op, op.left)
            case ops.Aggregate(window=None):
                return self._at_the_end(op, op.input)
            case ops.Aggregate(window=Session()):
                return self._session_steps(op)
            case ops.Aggregate():
                return self._windows(op)
            case ops.Union():
                parts = [self.outputs(part) for part in op.inputs]
                return [[{**row} for part in parts for row in part[step]] for step in range(len(self.events))]
            case ops.Join():
                return [_relation(op, {id(op.left): rows}) for rows in self.outputs(op.left)]
        return [_relation(op, {id(op.input): rows}) for rows in self.outputs(op.input)]

    def _appended(self, op: ops.Limit | ops.Distinct) -> list[list[Row]]:
        """Of all rows that have arrived, those that were not given before."""
        found, before, given = [], list[Row](), 0
        for rows in self.outputs(op.input):
            before = before + rows
            now = _relation(op, {id(op.input): before})
            found.append(now[given:])
            given = len(now)
        return found

    def _at_the_end(self, op: ops.Op, below: ops.Op) -> list[list[Row]]:
        rows = [row for step in self.outputs(below) for row in step]
        found, has_ended = [], False
        for is_over in self._is_over:
            found.append(_relation(op, {id(below): rows}) if is_over and not has_ended else [])
            has_ended = has_ended or is_over
        return found

    def bounded(self, op: ops.Op, step: int) -> list[Row]:
        """The bounded plan over the rows that have arrived by the end of a step."""
        given = {id(source): [row for rows in self.outputs(source)[: step + 1] for row in rows]
                 for source in self._sources}
        return _relation(op, given)

    def _windows(self, op: ops.Aggregate) -> list[list[Row]]:
        """Each window in the step that closes it, over the rows that came while it was open."""
        assert op.window is not None
        steps, marks, time = self.outputs(op.input), self.watermarks(op.input), meaning(op.window.time)
        relations = Relations()
        counted: list[tuple[Row, tuple[int, int] | None]] = []
        for step, rows in enumerate(steps):
            mark = marks[step - 1] if step else None
            for row in rows:
                if time(row) is None:
                    self.timeless += 1
                    continue
                windows = relations.windowed(op, [row])
                still_open = [each for each in windows if mark is None or each[1] is None or each[1][1] > mark]
                counted += still_open
                if windows and not still_open:
                    self.late.append(row)
        groups = relations.groups(op, counted)
        relations.failures.raise_any()
        return [[row for _, row in groups if _reached(marks[step], row["window_end"])
                 and not (step and _reached(marks[step - 1], row["window_end"]))] for step in range(len(steps))]

    def _session_steps(self, op: ops.Aggregate) -> list[list[Row]]:
        """Each session in the step that makes it final, over the rows that were not late. For each step, the sessions
        of all rows that are not in final ones are computed anew.
        """
        assert isinstance(op.window, Session)
        steps, marks, time = self.outputs(op.input), self.watermarks(op.input), meaning(op.window.time)
        gap = op.window.gap
        relations = Relations()
        found: list[list[Row]] = []
        held: list[Row] = []
        for step, rows in enumerate(steps):
            before, mark = (marks[step - 1] if step else None), marks[step]
            self.timeless += sum(time(row) is None for row in rows)
            new = {id(row) for row in rows}
            sessions = relations.sessions(op, held + rows)
            late = {id(row) for row, _, _, (_, last) in sessions if before is not None and last + gap < before}
            assert late <= new, "what is final is not held"
            self.late += [row for row in rows if id(row) in late]
            sessions = [each for each in sessions if id(each[0]) not in late]
            final = [(row, (first, last + gap)) for row, _, _, (first, last) in sessions
                     if mark is not None and last + gap < mark]
            found.append([row for _, row in relations.groups(op, final)])
            gone = {id(row) for row, _ in final}
            held = [row for row, _, _, _ in sessions if id(row) not in gone]
        relations.failures.raise_any()
        return found

    # --- time

    def watermarks(self, op: ops.Op) -> list[int | None]:
        """The watermark of what an operator gives, after each step."""
        if id(op) not in self._marks:
            found = self._watermarks(op)
            for step, is_over in enumerate(self._is_over):
                found[step] = MAX if is_over else found[step]
                if step and found[step - 1] is not None:
                    found[step] = max(found[step - 1], found[step] or found[step - 1])  # type: ignore[type-var]
            self._marks[id(op)] = found
        return self._marks[id(op)]

    def _watermarks(self, op: ops.Op) -> list[int | None]:
        match op:
            case ops.Watermark():
                return self._declared(op)
            case ops.Source():
                return [None] * len(self.events)
            case ops.Union():
                parts = [self.watermarks(part) for part in op.inputs]
                return [None if None in marks else min(marks) for marks in zip(*parts, strict=True)]  # type: ignore[type-var]
            case ops.Join() if not isinstance(op, ops.OuterJoin):
                return list(self.watermarks(op.left))
            case ops.OuterJoin() | ops.Sort() | ops.Aggregate(window=None):
                return [None] * len(self.events)  # all rows come at the end: no time passes before
            case ops.Aggregate(window=window) if window is not None:
                # No window that is still open, or opens later, begins before the least open start.
                return [None if mark is None else mark if mark == MAX else least_start(window, mark)
                        for mark in self.watermarks(op.input)]
        return list(self.watermarks(op.input))

    def _declared(self, op: ops.Watermark) -> list[int | None]:
        """Of the partitions of the sources below, by the times of their rows where the watermark is declared."""
        sources = {k for k, source in enumerate(self._sources) if any(source is each for each in _stream_sources(op))}
        partitions = {(event.source, event.partition): _Partition(op.delay, _far_ahead(op.schema[op.column].dtype))
                      for event in self.events if event.source in sources}
        steps, found = self.outputs(op.input), list[int | None]()
        for event, rows in zip(self.events, steps, strict=True):
            partition = partitions.get((event.source, event.partition))
            if partition is not None:
                partition.is_idle, partition.is_ended = isinstance(event, Idle), isinstance(event, End)
                before = max((mark for mark in found if mark is not None), default=None)
                partition.deliver([row[op.column] for row in rows if row[op.column] is not None], before)
            found.append(_least(partitions.values()))
        return found

    def shown_watermarks(self, op: ops.Op) -> list[int | None]:
        """The watermark of the first operator from the end that has one; None where none is known, or at the end."""
        while not isinstance(op, ops.Watermark | ops.Source | ops.Union | ops.Join):
            op = op.input
        return [None if mark == MAX else mark for mark in self.watermarks(op)]


def _stream_sources(op: ops.Op) -> Iterable[ops.Source]:
    """The sources that are streams, in the order of the plan: not those of static tables."""
    if isinstance(op, ops.Source):
        yield op
    for below in op.streams:
        yield from _stream_sources(below)


def _relation(op: ops.Op, given: dict[int, list[Row]]) -> list[Row]:
    relations = Relations(given=given)
    found = relations.rows(op)
    relations.failures.raise_any()
    return found


def _reached(mark: int | None, time: int) -> bool:
    return mark is not None and mark >= time


def _far_ahead(dtype: DType) -> int | None:
    """The longest step of time, a day; numbers have none."""
    return 86_400 * UNITS_PER_SECOND[dtype.unit] if dtype.kind is Kind.TS else None


@dataclass
class _Partition:
    """The time of one partition."""

    delay: int
    far: int | None
    greatest: int | None = None
    is_idle: bool = False
    is_ended: bool = False
    far_batches: int = 0  # in a row, whose median was not reached

    @property
    def watermark(self) -> int | None:
        return None if self.greatest is None else self.greatest - self.delay

    def deliver(self, times: list[int], watermark: int | None) -> None:
        if not times:
            return
        median = sorted(times)[len(times) // 2]
        if self.greatest is None:
            self.greatest = self._reached(median, times)
            return
        known = self.greatest if watermark is None else max(self.greatest, watermark)
        self.greatest = self._reached(known, times)
        self.far_batches = self.far_batches + 1 if median > self.greatest else 0
        if self.far_batches == BELIEVED_BATCHES:
            self.greatest, self.far_batches = self._reached(median, times), 0

    def _reached(self, start: int, times: list[int]) -> int:
        """The greatest time to which steps of at most a day lead."""
        while nearer := [time for time in times if time > start and (self.far is None or time - start <= self.far)]:
            start = min(nearer)
        return start


def _least(partitions: Iterable[_Partition]) -> int | None:
    waiting = [part for part in partitions if not part.is_ended and not (part.is_idle and part.watermark is None)]
    if any(part.watermark is None for part in waiting):
        return None
    active = [part.watermark for part in waiting if not part.is_idle]
    idle = [part.watermark for part in waiting if part.is_idle]
    return min(active) if active else max(idle, default=None)  # type: ignore[type-var]


# --- joins of streams --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrived:
    """A row of one side of a join, its event time, and the operator's watermark before its source batch."""

    row: Row
    time: int | None
    watermark: int | None = None

    @property
    def is_late(self) -> bool:
        return self.time is not None and self.watermark is not None and self.time < self.watermark


Match = Callable[[Arrived, Arrived], bool]


def interval_join(left: Sequence[Arrived], right: Sequence[Arrived], on: Sequence[str], low: int, high: int,
                  how: str = "inner", keep: Sequence[tuple[str, str]] = ()) -> list[Row]:  # fmt: skip
    """Pairs of equal keys whose right time less left time is in [low, high]; late and timeless rows take no part."""
    return _joined(left, right, on, how, keep, lambda a, b: low <= b.time - a.time <= high)  # type: ignore[operator]


def window_join(left: Sequence[Arrived], right: Sequence[Arrived], on: Sequence[str], size: int, every: int,
                how: str = "inner", keep: Sequence[tuple[str, str]] = ()) -> list[Row]:  # fmt: skip
    """Pairs of equal keys in each window that holds both, with `window_start` and `window_end` at the end.

    A row takes part in those of its windows that are open before its source batch.
    """
    windows = sorted({window for row in (*left, *right) for window in _open_windows(row, size, every)})
    found: list[Row] = []
    for start, end in windows:
        sides = [[Arrived(row.row, row.time) for row in side if (start, end) in _open_windows(row, size, every)]
                 for side in (left, right)]
        pairs = _joined(*sides, on, how, keep, lambda a, b: True)
        found += [{**row, "window_start": start, "window_end": end} for row in pairs]
    return found


def _open_windows(row: Arrived, size: int, every: int) -> list[tuple[int, int]]:
    if row.time is None:
        return []
    numbers = range((row.time - size) // every + 1, row.time // every + 1)
    found = [(k * every, k * every + size) for k in numbers]
    return [window for window in found if row.watermark is None or window[1] > row.watermark]


def _joined(left: Sequence[Arrived], right: Sequence[Arrived], on: Sequence[str], how: str,
            keep: Sequence[tuple[str, str]], matches: Match) -> list[Row]:  # fmt: skip
    """Every pair is looked at. `keep` are names of the output and the right's columns; null keys match nothing."""
    lefts = [row for row in left if row.time is not None and not row.is_late]
    rights = [row for row in right if row.time is not None and not row.is_late]

    def is_pair(a: Arrived, b: Arrived) -> bool:
        keys = [tuple(side.row[name] for name in on) for side in (a, b)]
        return None not in keys[0] and group_key(keys[0]) == group_key(keys[1]) and matches(a, b)

    found: list[Row] = []
    for a in lefts:
        others = [b for b in rights if is_pair(a, b)]
        if how in ("semi", "anti"):
            found += [dict(a.row)] if bool(others) == (how == "semi") else []
            continue
        found += [{**a.row, **{name: b.row[column] for name, column in keep}} for b in others]
        if not others and how in ("left", "outer"):
            found.append({**a.row, **dict.fromkeys((name for name, _ in keep), None)})
    if how in ("right", "outer"):
        names = list(lefts[0].row) if lefts else list(on)
        for b in rights:
            if not any(is_pair(a, b) for a in lefts):
                found.append({**dict.fromkeys(names, None), **{name: b.row[name] for name in on},
                              **{name: b.row[column] for name, column in keep}})
    return found
