"""Every logical operator over whole inputs: lists of rows in, a list of rows out, in the source's order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from scalein.dtypes import plain_arrow
from scalein.errors import BadData, ComputeError
from scalein.ir import ops
from scalein.ir.exprs import Col, Expr, NamedAgg, type_of
from scalein.ir.ops.stream_join import TimeBound
from scalein.ir.over import OverCall
from scalein.ir.printer import show_agg, show_expr
from scalein.ir.process import NEVER, TIMER, ProcessBody
from scalein.ir.stages import FOREVER
from scalein.ir.windows import Cumulate, Session, Window
from tests.oracle import udfs
from tests.oracle.aggregates import aggregate
from tests.oracle.exprs import Failures, meaning
from tests.oracle.values import Row, group_key, order_key, rows_of, table_of


def run(op: ops.Op, given: dict[int, list[Row]] | None = None) -> pa.Table:
    """The whole result of a plan, of exactly its schema."""
    table, failures = attempt(op, given)
    failures.raise_any()
    assert table is not None
    return table


def attempt(op: ops.Op, given: dict[int, list[Row]] | None = None) -> tuple[pa.Table | None, Failures]:
    """The result and all that failed on the way; None where something did."""
    relations = Relations(given=given or {})
    rows = relations.rows(op)
    return None if relations.failures.errors else table_of(rows, op.schema), relations.failures


class _Machine:
    """What a key of a process remembers."""

    def __init__(self, body: ProcessBody, key: tuple[Any, ...]) -> None:
        self.body, self.key = body, key
        self.reset()

    def reset(self) -> None:
        """As a new key."""
        self.last: int | None = None  # row or timer
        self.fields: dict[str, Any] = {f"self.{slot.name}": slot.init for slot in self.body.slots}
        if self.body.has_timer:
            self.fields[f"self.{TIMER}"] = NEVER

    def row(self, args: tuple[Any, ...], at: int | None) -> list[tuple[Any, ...]]:
        found = [] if at is None else self.fire(at)
        is_idle = self.fields.get(f"self.{TIMER}", NEVER) == NEVER
        if self.body.ttl and self.last is not None and is_idle and at is not None and self.last + self.body.ttl <= at:
            self.reset()
        assert self.body.on_row is not None
        found += [(*self.key, *row) for row in udfs.change(self.body.on_row, self.fields, args)]
        self.last = at
        return found

    def fire(self, until: int, most: int = 1 << 30) -> list[tuple[Any, ...]]:
        """Timers up to a time, and at most so many."""
        found: list[tuple[Any, ...]] = []
        while (at := self.fields.get(f"self.{TIMER}", NEVER)) <= until and most:
            self.fields[f"self.{TIMER}"], self.last, most = NEVER, at, most - 1
            assert self.body.on_timer is not None
            found += [(*self.key, *row) for row in udfs.change(self.body.on_timer, self.fields, (at,))]
        return found


@dataclass
class Relations:
    """Rows of operators. A row that fails is noted and left out, so that all that can fail is known.

    `given` are the rows of inputs that are not computed here: streams give what has arrived.
    """

    failures: Failures = field(default_factory=Failures)
    given: dict[int, list[Row]] = field(default_factory=dict)  # by id() of the op

    def rows(self, op: ops.Op) -> list[Row]:
        if id(op) in self.given:
            return self.given[id(op)]
        match op:
            case ops.Source():
                return _read(op)
            case ops.Filter():
                kept = self.failures.values(meaning(op.predicate), self.rows(op.input))
                return [row for row, keep in kept if keep is True]
            case ops.Project():
                return self._project(op)
            case ops.Limit():
                return self.rows(op.input)[: op.count]
            case ops.Distinct():
                firsts: dict[tuple[Any, ...], Row] = {}
                for row in self.rows(op.input):
                    firsts.setdefault(group_key(row[name] for name in op.keys), row)
                return list(firsts.values())
            case ops.Sort():
                return self._sort(op)
            case ops.Union():
                return [{**row} for part in op.inputs for row in self.rows(part)]
            case ops.MapBatches():
                return self._map_batches(op)
            case ops.Explode():
                return self._explode(op)
            case ops.OuterJoin():
                return self._outer_join(op)
            case ops.Join():
                return self._join(op)
            case ops.Process():
                return self._process(op)
            case ops.StreamJoin():
                return self._stream_join(op)
            case ops.Over():
                return self._over(op)
            case ops.AssignWindows():
                return self._assign_windows(op)
            case ops.Aggregate():
                return self._aggregate(op)
            case ops.Watermark():
                return self.rows(op.input)

    def _columns(self, exprs: Sequence[Expr], rows: list[Row]) -> list[tuple[Row, tuple[Any, ...]]]:
        """The rows in which none of the expressions fails, with their values."""
        found: dict[int, list[Any]] = {id(row): [] for row in rows}
        for expr in exprs:
            for row, value in self.failures.values(meaning(expr), rows):
                found[id(row)].append(value)
        return [(row, tuple(found[id(row)])) for row in rows if len(found[id(row)]) == len(exprs)]

    def _project(self, op: ops.Project) -> list[Row]:
        names = [item.name for item in op.items]
        computed = self._columns([item.expr for item in op.items], self.rows(op.input))
        return [dict(zip(names, values, strict=True)) for _, values in computed]

    def _process(self, op: ops.Process) -> list[Row]:
        """The class's own methods for one row after the other, by event time if there is one; at the end the timers up
        to the last row, and then each that is still set, once.
        """
        rows = self.rows(op.input)
        if op.time:
            rows = sorted((row for row in rows if row[op.time] is not None), key=lambda row: row[op.time])
        machines: dict[tuple[Any, ...], _Machine] = {}
        found: list[tuple[Any, ...]] = []
        end: int | None = None
        try:
            for _, values in self._columns([expr for expr, _ in op.exprs()], rows):
                key, args = values[: len(op.keys)], values[len(op.keys) : len(op.keys) + len(op.args)]
                end = values[-1] if op.event is not None else None
                machine = machines.setdefault(group_key(key), _Machine(op.body, key))
                found += machine.row(args, end)
            if end is not None:
                for machine in machines.values():
                    found += [*machine.fire(end), *machine.fire(NEVER - 1, 1)]
        except udfs.Failed as error:
            raise ComputeError(str(error), at=op.at) from None
        return [dict(zip(op.schema.names, row, strict=True)) for row in found]

    def _sort(self, op: ops.Sort) -> list[Row]:
        """By the last key first: each sort is stable, so it keeps the order of those before it among equals."""
        rows = self._columns([by.expr for by in op.by], self.rows(op.input))
        for number, by in reversed(list(enumerate(op.by))):
            nulls = [row for row in rows if row[1][number] is None]
            known = [row for row in rows if row[1][number] is not None]
            known.sort(key=_nth_key(number), reverse=by.descending)
            rows = known + nulls if op.nulls_last else nulls + known
        return [row for row, _ in rows][: op.count]

    def _assign_windows(self, op: ops.AssignWindows) -> list[Row]:
        """A row for each window that holds it."""
        found: list[Row] = []
        for row, time in self.failures.values(meaning(op.window.time), self.rows(op.input)):
            try:
                windows = windows_of(op.window, time)
            except ComputeError as error:
                self.failures.errors.append(error)
                continue
            last = max((end for _, end in windows), default=0)
            found += [{**row, "window_start": start, "window_end": end, op.schema.names[-1]: end == last}
                      for start, end in sorted(windows)]
        return found

    def _over(self, op: ops.Over) -> list[Row]:
        """Each row's frame is looked for among all rows of its partition."""
        rows = self._columns([expr for expr, _ in op.exprs()], self.rows(op.input))
        places = sorted(range(len(rows)), key=lambda k: self._place(op, rows[k][1]))
        partitions: dict[tuple[Any, ...], list[int]] = {}
        for k in places:
            partitions.setdefault(group_key(rows[k][1][: len(op.keys)]), []).append(k)
        found: list[Row] = [{**row} for row, _ in rows]
        for members in partitions.values():
            values = [rows[k][1] for k in members]
            for at, k in enumerate(members):
                width = len(op.keys) + len(op.by)
                for call in op.calls:
                    args = slice(width, width + len(call.agg.args))
                    width += len(call.agg.args)
                    found[k][call.name] = self._over_call(op, call, [row[args] for row in values], at,
                                                          [self._place(op, row) for row in values])
        return found

    def _place(self, op: ops.Over, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """What rows are compared by."""
        by = values[len(op.keys) : len(op.keys) + len(op.by)]
        return tuple(_directed(value, each.descending, op.nulls_last) for value, each in zip(by, op.by, strict=True))

    def _over_call(self, op: ops.Over, call: OverCall, args: list[tuple[Any, ...]], at: int, order: list[Any]) -> Any:
        if call.agg.fn in ("lag", "lead"):
            other = at - call.agg.params[0] if call.agg.fn == "lag" else at + call.agg.params[0]
            return args[other][0] if 0 <= other < len(args) else None
        if call.agg.fn == "row_number":
            return at + 1
        if call.agg.fn == "after_quiet":
            return at == 0 or _number(order[at][0][1]) - _number(order[at - 1][0][1]) >= call.agg.params[0]
        if call.agg.fn == "spaced":
            last = None
            for place in order[: at + 1]:
                now = _number(place[0][1])
                is_kept = last is None or now - last >= call.agg.params[0]
                last = now if is_kept else last
            return is_kept
        if call.agg.fn == "rank":
            return 1 + sum(place < order[at] for place in order)
        if call.agg.fn == "dense_rank":
            return 1 + len({order.index(place) for place in order if place < order[at]})
        frame = range(at + 1)
        if call.frame.is_whole:
            frame = range(len(args))
        elif call.frame.rows is not None:
            frame = range(max(0, at + 1 - call.frame.rows), at + 1)
        elif call.frame.within is not None:
            frame = [k for k in range(len(args)) if _is_near(order[k][0], order[at][0], call.frame.within)]
        elif call.frame.with_peers:
            frame = [k for k in range(len(args)) if order[k] <= order[at]]
        columns = [[args[k][number] for k in frame] for number in range(len(call.agg.args))] or [[None] * len(frame)]
        try:
            return aggregate(NamedAgg(call.name, call.agg), columns)
        except ComputeError as error:
            self.failures.errors.append(ComputeError(error.what.replace(call.name, show_agg(call.agg))))
            return None

    def _map_batches(self, op: ops.MapBatches) -> list[Row]:
        found: list[Row] = []
        for batch in table_of(self.rows(op.input), op.input.schema).to_batches():
            made = op.fn(batch)
            if not isinstance(made, pa.RecordBatch) or _plain(made.schema) != _plain(op.arrow):
                raise BadData("the function of map_batches gave something else than it said", at=op.at,
                              said=_plain(op.arrow), found=_plain(getattr(made, "schema", [])))
            found += rows_of([made], op.arrow.names)
        return found

    def _explode(self, op: ops.Explode) -> list[Row]:
        """A row for each element of the lists, which have one length; null counts as empty."""
        found: list[Row] = []
        for row in self.rows(op.input):
            lists = [row[name] or [] for name in op.lists]
            if len(set(map(len, lists))) > 1:
                self.failures.errors.append(ComputeError(
                    f"lists of different lengths in `explode({', '.join(op.lists)})`", found=row))
                continue
            found += [{**row, **dict(zip(op.lists, each, strict=True))} for each in zip(*lists, strict=True)]
        return found

    def _outer_join(self, op: ops.OuterJoin) -> list[Row]:
        """Every pair whose keys are equal, in the left's order; then the right's rows that are in none."""
        left = self._columns(op.left_keys, self.rows(op.left))
        right = self._columns(op.right_keys, self.rows(op.right))
        found: list[Row] = []
        matched: set[int] = set()
        for row, key in left:
            others = [k for k, (_, other) in enumerate(right)
                      if None not in key and group_key(key) == group_key(other)]
            matched.update(others)
            found += [{**row, **{name: right[k][0][column] for name, column in op.keep}} for k in others]
            if not others and op.how == "outer":
                found.append({**row, **dict.fromkeys((name for name, _ in op.keep), None)})
        nothing = dict.fromkeys(op.left.schema.names)
        for k, (other, key) in enumerate(right):
            if k not in matched:
                names = [mine.name for mine in op.left_keys if isinstance(mine, Col)]
                keys = dict(zip(names, key, strict=True))
                found.append({**nothing, **keys, **{name: other[column] for name, column in op.keep}})
        return found

    def _join(self, op: ops.Join) -> list[Row]:
        """For each row of the left its matches, in the right's order. A key with a null matches nothing."""
        matches: dict[tuple[Any, ...], list[Row]] = {}
        for row, key in self._columns(op.right_keys, self.rows(op.right)):
            if None not in key:
                matches.setdefault(group_key(key), []).append(row)
        found: list[Row] = []
        for row, key in self._columns(op.left_keys, self.rows(op.left)):
            others = matches.get(group_key(key), [])
            match op.how:
                case "semi" | "anti":
                    found += [row] if bool(others) == (op.how == "semi") else []
                case "left" if not others:
                    found.append({**row, **dict.fromkeys((name for name, _ in op.keep), None)})
                case _:
                    found += [{**row, **{name: other[column] for name, column in op.keep}} for other in others]
        return found

    def _stream_join(self, op: ops.StreamJoin) -> list[Row]:
        """Every pair of rows is looked at. With a bound, rows without a time take no part."""
        bound = op.bound
        sides = [self._columns([*keys, *time], self.rows(side)) for side, keys, time in (
            (op.left, op.left_keys, [] if bound is None else [bound.left]),
            (op.right, op.right_keys, [] if bound is None else [bound.right]))]
        if bound is not None:
            sides = [[row for row in side if row[1][-1] is not None] for side in sides]
        left, right = sides
        count = len(op.left_keys)
        matched: set[int] = set()
        found: list[Row] = []
        for row, values in left:
            key = values[:count]
            others = [k for k, (_, other) in enumerate(right)
                      if None not in key and group_key(key) == group_key(other[:count])
                      and (bound is None or _is_within(bound, values[-1], other[-1]))]
            if bound is not None and bound.pick != "all" and others:
                others = [_nearest(bound.pick, values[-1], [(right[k][1][-1], k) for k in others])]
            matched.update(others)
            window = {} if bound is None else self._window_of(bound, values[-1])
            if op.how in ("semi", "anti"):
                found += [{**row, **window}] if bool(others) == (op.how == "semi") else []
                continue
            found += [{**row, **{name: right[k][0][column] for name, column in op.keep}, **window} for k in others]
            if not others and op.how in ("left", "outer"):
                found.append({**row, **dict.fromkeys((name for name, _ in op.keep), None), **window})
        if op.how in ("right", "outer"):
            nothing = dict.fromkeys(op.left.schema.names)
            names = [mine.name for mine in op.left_keys if isinstance(mine, Col)]
            for k, (other, values) in enumerate(right):
                if k not in matched:
                    window = {} if bound is None else self._window_of(bound, values[-1])
                    found.append({**nothing, **dict(zip(names, values[:count], strict=True)),
                                  **{name: other[column] for name, column in op.keep}, **window})
        return found

    def _window_of(self, bound: TimeBound, time: int) -> Row:
        if not bound.size:
            return {}
        try:
            (window,) = windows_of(Window(bound.left, bound.size, bound.size, bound.offset), time)
        except ComputeError as error:
            self.failures.errors.append(error)
            return {}
        return dict(zip(("window_start", "window_end"), window, strict=True))

    def _aggregate(self, op: ops.Aggregate) -> list[Row]:
        """One row for each group that has rows; without keys and window, one row always."""
        return [row for _, row in self.groups(op, self.windowed(op, self.rows(op.input)))]

    def windowed(self, op: ops.Aggregate, rows: list[Row]) -> list[tuple[Row, tuple[int, int] | None]]:
        """Each row with each window that holds it: none if its time is null or between windows, and then neither its
        keys nor its arguments can fail."""
        if op.window is None:
            return [(row, None) for row in rows]
        if isinstance(op.window, Session):
            return [(row, (spans[0], spans[1] + op.window.gap)) for row, _, _, spans in self.sessions(op, rows)]
        found: list[tuple[Row, tuple[int, int] | None]] = []
        for row, time in self.failures.values(meaning(op.window.time), rows):
            try:
                found += [(row, window) for window in windows_of(op.window, time)]
            except ComputeError as error:
                self.failures.errors.append(error)
        return found

    def sessions(self, op: ops.Aggregate,
                 rows: list[Row]) -> list[tuple[Row, tuple[Any, ...], int, tuple[int, int]]]:  # fmt: skip
        """Each row that has a time, its key, its time, and the first and the last time of its session."""
        assert isinstance(op.window, Session)
        gap, (_, high) = op.window.gap, type_of(op.window.time).int_range()
        timed = [(row, time) for row, time in self.failures.values(meaning(op.window.time), rows) if time is not None]
        for _, time in timed:
            if time + gap > high:
                self.failures.errors.append(ComputeError(f"overflow in the windows of `{show_expr(op.window.time)}`",
                                                         type=type_of(op.window.time), found=time))
        keys = {id(row): group_key(key) for row, key in self._columns([key.expr for key in op.keys],
                                                                      [row for row, _ in timed])}
        known = [(row, keys[id(row)], time) for row, time in timed if id(row) in keys]
        return [(row, key, time, session_of(time, [other for _, its, other in known if its == key], gap))
                for row, key, time in known]

    def groups(self, op: ops.Aggregate, rows: list[tuple[Row, tuple[int, int] | None]]
               ) -> list[tuple[tuple[Any, ...], Row]]:  # fmt: skip
        """Each group's key, and the row it gives; the key's values are those of the group's first row."""
        exprs = [*(key.expr for key in op.keys), *(arg for item in op.aggs for arg in item.agg.args)]
        once = list({id(row): row for row, _ in rows}.values())  # a row of several windows is computed once
        values = {id(row): found for row, found in self._columns(exprs, once)}
        shown: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        members: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
        if not op.keys and op.window is None:
            shown[()], members[()] = (), []
        for row, window in rows:
            if id(row) not in values:
                continue
            key = (*values[id(row)][: len(op.keys)], *(window or ()))
            group = group_key(key)
            shown.setdefault(group, key)
            members.setdefault(group, []).append(values[id(row)][len(op.keys) :])
        return [(group, self._group(op, shown[group], rows)) for group, rows in members.items()]

    def _group(self, op: ops.Aggregate, key: tuple[Any, ...], rows: list[tuple[Any, ...]]) -> Row:
        found, at = list(key), 0
        for item in op.aggs:
            width = len(item.agg.args)
            columns = [[row[at + k] for row in rows] for k in range(width)] or [[None] * len(rows)]
            at += width
            try:
                found.append(aggregate(item, columns))
            except ComputeError as error:
                self.failures.errors.append(error)
                found.append(None)
        return dict(zip(op.schema.names, found, strict=True))


def _nth_key(number: int) -> Callable[[tuple[Row, tuple[Any, ...]]], Any]:
    return lambda row: order_key(row[1][number])


class _Descending:
    """A key in the opposite order."""

    def __init__(self, key: Any) -> None:
        self.key = key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Descending) and self.key == other.key

    def __lt__(self, other: _Descending) -> bool:
        return bool(other.key < self.key)

    def __hash__(self) -> int:
        return 0


def _directed(value: Any, descending: bool, nulls_last: bool) -> tuple[Any, ...]:
    if value is None:
        return (2,) if nulls_last else (0,)
    return (1, _Descending(order_key(value)) if descending else order_key(value))


def _is_near(place: tuple[Any, ...], now: tuple[Any, ...], within: int) -> bool:
    """Whether a time is at most so much earlier; null is near to null."""
    if len(place) == 1 or len(now) == 1:
        return len(place) == len(now)
    return 0 <= _number(now[1]) - _number(place[1]) <= within


def _number(key: Any) -> int:
    while isinstance(key, tuple):
        key = key[-1]
    return int(key)


def _is_within(bound: TimeBound, left: int, right: int) -> bool:
    if bound.size:
        return (left - bound.offset) // bound.size == (right - bound.offset) // bound.size
    apart = right - left
    return (bound.low <= -FOREVER or apart >= bound.low) and (bound.high >= FOREVER or apart <= bound.high)


def _nearest(pick: str, time: int, others: list[tuple[int, int]]) -> int:
    """The number of the row that an as-of join takes, of times and numbers; of equal times the last."""
    best = {"backward": lambda at: (-at,), "forward": lambda at: (at,),
            "nearest": lambda at: (abs(at - time), at)}[pick]  # fmt: skip
    least = min(best(at) for at, _ in others)
    return max(number for at, number in others if best(at) == least)


def _plain(schema: Any) -> list[tuple[str, pa.DataType]]:
    return [(field.name, plain_arrow(field.type)) for field in schema]


def _read(op: ops.Source) -> list[Row]:
    if op.data is None:
        raise BadData("the flow has no data yet", at=op.at, hint="give collect the data")
    return rows_of(op.data.read(), op.columns)  # type: ignore[attr-defined]


def least_start(window: Window, watermark: int) -> int:
    """The least start of all windows that end after a watermark."""
    step = window.size if isinstance(window, Cumulate) else window.every
    return ((watermark - window.offset - window.size) // step + 1) * step + window.offset


def session_of(time: int, times: list[int], gap: int) -> tuple[int, int]:
    """The first and the last of the times that a chain of steps of at most a gap leads to."""
    first = last = time
    while near := [each for each in times if (first - gap <= each < first) or (last < each <= last + gap)]:
        first, last = min(first, *near), max(last, *near)
    return first, last


def windows_of(window: Window, time: int | None) -> list[tuple[int, int]]:
    """The windows that hold a time: none holds null. They are [k * every, k * every + size), moved by the offset; those
    that cumulate are the first step of [k * size, (k + 1) * size), the first two, ...
    """
    if time is None:
        return []
    time -= window.offset
    if isinstance(window, Cumulate):
        start = time // window.size * window.size
        found = [(start, start + size) for size in range(window.every, window.size + 1, window.every)
                 if time < start + size]
    else:
        numbers = range((time - window.size) // window.every + 1, time // window.every + 1)
        found = [(k * window.every, k * window.every + window.size) for k in numbers]
    found = [(start + window.offset, end + window.offset) for start, end in found]
    low, high = type_of(window.time).int_range()
    if any(start < low or end > high for start, end in found):
        raise ComputeError(f"overflow in the windows of `{show_expr(window.time)}`", type=type_of(window.time),
                           found=time + window.offset)
    return found
