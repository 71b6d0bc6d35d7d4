"""Joins of two streams: by time (in a window, by an interval, as-of), or of all rows that were ever there.

`TimeBound` says which times of the right side a row of the left one meets. All bounds are ranges of times: a window is
the range from its start to its end, an as-of join takes one row of its range. So a bounded run has one plan for all:
the right side is a table whose rows are ordered by key and time, and each row of the left one searches its range there
(`Probe.times`); of an inner join it may be the other way round (`builds_left`).

A row without a time takes part in no bounded join, as in a window: it does not come out of a left or anti join either.
A null key matches nothing, but its row comes out where rows without a match do.

Rows have no order. In a job both sides are streams: `as_buffered` gives the same join over the rows of both
(`JoinSides`), which `exec/stream_join.py` executes; there is how long a row is retained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from scalein.dtypes import BOOL, I64, UNITS_PER_SECOND, Field, Schema
from scalein.errors import NOWHERE, InternalError, SourceLoc, WrongType
from scalein.ir import physical
from scalein.ir.checks import PROBES, expect, wrong_keys
from scalein.ir.event_time import NO_TIME, WINDOW_END, WINDOW_START, EventTime, Promise
from scalein.ir.exprs import Call, Col, Expr, Lit, Named, columns, type_of
from scalein.ir.functions.arithmetic import floored, plus
from scalein.ir.functions.registry import can_fail
from scalein.ir.internal_names import internal
from scalein.ir.ops.base import Op, Unary
from scalein.ir.ops.join import Join, OuterJoin, Union
from scalein.ir.ops.rows import Project
from scalein.ir.ops.source import Source
from scalein.ir.ops.watermark import Watermark
from scalein.ir.physical import JoinBuild, Node, Pipeline, identity
from scalein.ir.printer import show_equation, show_expr, show_span
from scalein.ir.rewrite import substitute, transform, walk_streams
from scalein.ir.stages import FOREVER, FilterStep, Probe, TimeRange
from scalein.ir.unify import cast_to
from scalein.ir.windows import Window

if TYPE_CHECKING:
    from scalein.ir.passes.physicalize import Planner

HOWS = (*PROBES, "right", "outer")
WINDOW_COLUMNS = (WINDOW_START, WINDOW_END)
_TIME = internal("time")
_CAST_TIME = internal("cast_time")  # of a side whose times are of another type


@dataclass(frozen=True, slots=True)
class TimeBound:
    """The times of the right side that a row of the left meets: right - left is in [low, high]; or both are in the
    same window of `size`, moved by `offset`; with a `pick` (backward, forward, nearest) one row of the range. A limit
    of FOREVER means that there is no limit.
    """

    left: Expr
    right: Expr
    low: int = 0
    high: int = 0
    size: int = 0
    pick: str = "all"
    offset: int = 0  # at least 0, less than the size

    @property
    def is_window(self) -> bool:
        return self.size > 0

    def window(self, time: Expr) -> Window:
        return Window(time, self.size, self.size, self.offset)

    def window_start(self, time: int) -> int:
        """Where the window of a time starts."""
        return (time - self.offset) // self.size * self.size + self.offset

    def mirrored(self) -> TimeBound:
        """The same bound, seen from the right side."""
        return replace(self, left=self.right, right=self.left, low=-self.high, high=-self.low)

    def range_of(self, time: Expr) -> TimeRange:
        """The range of a row of the left side with this time, a 64-bit integer."""
        if self.is_window:
            start = plus(floored(plus(time, -self.offset), self.size), self.offset) if self.offset else floored(
                time, self.size)
            return TimeRange(start, 0, start, self.size - 1)
        return TimeRange(time, self.low, time, self.high, self.pick)

    # --- retention, at a watermark: no row to come is earlier

    @property
    def left_wait(self) -> int:
        """So much later than a row of the left, a row of the right may still match it."""
        return self.size if self.is_window else self.high

    @property
    def right_wait(self) -> int:
        """So much later than a row of the right, a row of the left may still match it."""
        return self.size if self.is_window else -self.low

    def __str__(self) -> str:
        left, right = show_expr(self.left), show_expr(self.right)
        if self.is_window:
            return f"within {self.window(self.left)}"
        low, high = ("any" if abs(each) >= FOREVER else
                     ("-" if each < 0 else "") + show_span(abs(each), self.left.dtype)
                     for each in (self.low, self.high))  # fmt: skip
        about = f"{right} - {left} in [{low}, {high}]"
        return about if self.pick == "all" else f"{self.pick}, {about}"


@dataclass(frozen=True, eq=False, repr=False)
class StreamJoin(Op):
    """Rows of two streams with equal keys whose times are within a bound; without one, all rows with equal keys.

    `how` and `keep` are as for `Join` and `OuterJoin`; left keys of right and outer joins are different columns. Joins
    in windows have the columns `window_start` and `window_end` at the end.
    """

    left: Op
    right: Op
    left_keys: tuple[Expr, ...]
    right_keys: tuple[Expr, ...]
    how: str
    keep: tuple[tuple[str, str], ...]
    bound: TimeBound | None
    builds_left: bool = False  # of an inner join: the left side is the smaller one
    name: str = ""  # by which a checkpoint knows its state
    at: SourceLoc = field(default=NOWHERE, compare=False)

    has_state = True
    keeps_nullable = True

    @property
    def inputs(self) -> tuple[Op, ...]:
        return (self.left, self.right)

    def with_inputs(self, inputs: tuple[Op, ...]) -> Self:
        left, right = inputs
        return self if left is self.left and right is self.right else replace(self, left=left, right=right)

    def _columns(self) -> Schema:
        keys = {a.name: b for a, b in zip(self.left_keys, self.right_keys, strict=True) if isinstance(a, Col)}
        is_outer = self.how == "outer"
        fields = list(self.left.schema)
        if self.how in ("right", "outer"):
            fields = [Field(f.name, f.dtype, keys[f.name].nullable or (is_outer and f.nullable) if f.name in keys
                            else True) for f in fields]  # fmt: skip
        for name, column in self.keep:
            f = self.right.schema[column]
            fields.append(Field(name, f.dtype, f.nullable or self.how in ("left", "outer")))
        if self.bound is not None and self.bound.is_window:
            fields += [Field(name, type_of(self.bound.left), False) for name in WINDOW_COLUMNS]
        return Schema(tuple(fields))

    def exprs(self) -> tuple[tuple[Expr, int], ...]:
        keys = (*((key, 0) for key in self.left_keys), *((key, 1) for key in self.right_keys))
        return keys if self.bound is None else (*keys, (self.bound.left, 0), (self.bound.right, 1))

    def _with_exprs(self, new: Iterator[Expr]) -> Self:
        left = tuple(next(new) for _ in self.left_keys)
        right = tuple(next(new) for _ in self.right_keys)
        bound = self.bound if self.bound is None else replace(self.bound, left=next(new), right=next(new))
        return replace(self, left_keys=left, right_keys=right, bound=bound)

    def _detail(self) -> str:
        keys = ", ".join(show_equation(*pair) for pair in zip(self.left_keys, self.right_keys, strict=True))
        kept = ", ".join(name if name == column else f"{name} = {column}" for name, column in self.keep)
        bound = "all rows" if self.bound is None else str(self.bound)
        return f"{self.how} on {keys}, {bound}" + (f" keep {kept}" if kept else "")

    @property
    def waiting(self) -> tuple[bool, bool]:
        """Whether rows of the left and of the right come out when it is known that nothing more matches them."""
        return self.how in ("left", "outer", "semi", "anti"), self.how in ("right", "outer")

    def retention(self) -> tuple[str, ...]:
        bound = self.bound
        if bound is None:
            return ("left and right: all rows are retained for ever, since no time bounds the join",)
        if bound.is_window:
            return ("left and right: rows are retained until their window closes",)
        left, right = bound.left_wait, bound.right_wait
        return (f"left: {self._retained(bound, left, right if self.waiting[1] else 0, 'right')}",
                f"right: {self._retained(bound, right, left if self.waiting[0] else 0, 'left')}")

    def _retained(self, bound: TimeBound, own: int, more: int, other: str) -> str:
        """How long rows of a side are retained: those of the `other` match them at most `own` later, and wait for a
        match themselves as long as `more`.
        """
        if own >= FOREVER:
            is_last = bound.pick == "backward" and other == "left"
            what = "the last row of each key is" if is_last else "rows are"
            return f"{what} retained for ever: no tolerance bounds it"
        spans = [show_span(each, bound.left.dtype) for each in (own, more)]
        text = "rows are retained until the watermark has passed them"
        if own > 0:
            text += f" by {spans[0]}, as rows of the {other} match them so much later"
        return text + (f"; {spans[1]} more, as rows of the {other} wait for a match" if 0 < more < FOREVER else "")

    def wrong(self) -> Iterator[str]:
        yield from wrong_keys(self.how, self.left_keys, self.right_keys, bool(self.keep), HOWS)
        known = set(self.right.schema.names)
        yield from (f"no column {column!r} on the right" for _, column in self.keep if column not in known)
        names = [key.name for key in self.left_keys if isinstance(key, Col)]
        if self.how in ("right", "outer") and len(set(names)) < len(self.left_keys):
            yield "its left keys are not different columns"
        if self.bound is not None:
            yield from expect(lambda: "the time of the right side", self.bound.right.dtype, self.bound.left.dtype)

    def reads(self, needed: set[str]) -> tuple[set[str], ...]:
        return needed & set(self.left.schema.names), {column for name, column in self.keep if name in needed}

    def narrow(self, needed: set[str]) -> StreamJoin:
        keep = tuple(pair for pair in self.keep if pair[0] in needed)
        return self if len(keep) == len(self.keep) else replace(self, keep=keep)

    def _time_of(self, below: Sequence[EventTime]) -> EventTime:
        """Event time is that of the left side, unless rows come without one. See `promise` of the operator."""
        left, right = below
        bound = self.bound
        column = "" if self.how in ("right", "outer") else left.column
        promises = None if bound is None else (left.promise(bound.left), right.promise(bound.right))
        if bound is None or promises is None or left.promised is None or right.promised is None:
            return EventTime(column, None, True)
        waits = (bound.left_wait,) if bound.pick != "all" else (bound.left_wait, bound.right_wait)
        if max(waits) >= FOREVER:
            return EventTime(column, None, True)
        found = {name: Promise(each.lead - promises[0].lead, "left") for name, each in left.promised.items()
                 if promises[0] is not None and each.of == promises[0].of}
        for name, origin in self.keep if bound.pick == "all" else ():
            each, time = right.promised.get(origin), promises[1]
            if each is not None and time is not None and each.of == time.of:
                found[name] = Promise(each.lead - time.lead, "right")
        if bound.is_window:
            found |= {WINDOW_START: Promise(0, WINDOW_START, True), WINDOW_END: Promise(bound.size, WINDOW_START, True)}
        return EventTime(column, found, True)

    def times(self) -> tuple[tuple[Expr, int], ...]:
        return () if self.bound is None else ((self.bound.left, 0), (self.bound.right, 1))

    def push(self, predicate: Expr) -> list[tuple[int, Expr]] | None:
        """A predicate that cannot fail goes to the side that it is about, unless rows without a match come out there,
        or fewer rows would leave more of the other side without one.
        """
        wanted = columns(predicate)
        if can_fail(predicate):
            return None
        if wanted <= set(self.left.schema.names) and self.how in PROBES:
            return [(0, predicate)]
        kept = dict(self.keep)
        is_picked = self.bound is not None and self.bound.pick != "all"
        if not wanted <= kept.keys() or self.how not in ("inner", "right") or is_picked:
            return None
        there = {name: self.right.schema[column] for name, column in self.keep}
        return [(1, substitute(predicate, {name: Col(f.name, f.dtype, f.nullable) for name, f in there.items()}))]

    def physical(self, p: Planner) -> Node:
        if self.bound is None:
            kind = OuterJoin if self.how in ("right", "outer") else Join
            return kind(self.left, self.right, self.left_keys, self.right_keys, self.how, self.keep).physical(p)
        if self.builds_left and self.how == "inner":
            return self._mirrored(p, self.bound)
        is_outer = self.how in ("right", "outer")
        right, right_keys, right_time = _with_time(p, self.right, self.right_keys, self.bound.right)
        names = tuple(dict.fromkeys(column for _, column in self.keep))
        if is_outer and self.bound.is_window:
            hidden = tuple(Named(internal(item.name), item.expr) for item in _limits(self.bound, right_time))
            right = Pipeline(right, (), (*identity(right.schema), *hidden), name="project")
            names = (*names, *(item.name for item in hidden))
        number = p.join_number()
        table = JoinBuild(right, right_keys, names, is_outer, right_time.name)
        left, left_keys, time = _with_time(p, self.left, self.left_keys, self.bound.left)
        how = {"right": "inner", "outer": "left"}.get(self.how, self.how)
        probe = Probe(number, left_keys, how, self.keep, marks=is_outer, times=self.bound.range_of(time))
        kept = ((name, self.right.schema[column]) for name, column in self.keep)
        fields = Schema((*self.left.schema, *(Field(n, f.dtype, f.nullable or how == "left") for n, f in kept)))
        items = (*identity(fields), *_limits(self.bound, time))
        pipe = Pipeline(left, (probe,), items, joins=((number, table),), name="join")
        if not is_outer:
            return pipe
        keys = {a.name: b.name for a, b in zip(self.left_keys, right_keys, strict=True) if isinstance(a, Col)}
        limits_of = {name: internal(name) for name in WINDOW_COLUMNS} if self.bound.is_window else {}
        origins = {**keys, **dict(self.keep), **limits_of}
        return physical.OuterJoin(pipe, number, tuple(origins.get(f.name) for f in self.schema), self.schema)

    def _mirrored(self, p: Planner, bound: TimeBound) -> Node:
        """An inner join whose left side is the table."""
        left, left_keys, left_time = _with_time(p, self.left, self.left_keys, bound.left)
        number = p.join_number()
        names = tuple(self.left.schema.names)
        table = JoinBuild(left, left_keys, names, False, left_time.name)
        right, right_keys, time = _with_time(p, self.right, self.right_keys, bound.right)
        # Under their names in the output: both sides may have a column of the same name.
        kept = [(name, self.right.schema[column]) for name, column in self.keep]
        own = [Named(name, Col(f.name, f.dtype, f.nullable)) for name, f in kept]
        by = [Named(internal(f"key{k}"), key) for k, key in enumerate(right_keys)]
        right = Pipeline(right, (), (*own, *by, Named(_TIME, time)), name="project")
        keys = tuple(Col(item.name, type_of(item.expr), item.expr.nullable) for item in by)
        time = Col(_TIME, I64, False)
        mirrored = bound.mirrored()
        probe = Probe(number, keys, "inner", tuple((name, name) for name in names), times=mirrored.range_of(time))
        fields = Schema((*self.left.schema, *(Field(name, f.dtype, f.nullable) for name, f in kept)))
        items = (*identity(fields), *_limits(bound, time))
        return Pipeline(right, (probe,), items, joins=((number, table),), name="join")


def _with_time(p: Planner, op: Op, keys: tuple[Expr, ...], time: Expr) -> tuple[Node, tuple[Col, ...], Col]:
    """The rows of a side that have a time, and the columns of its keys and of its time."""
    node, found = p.columns(p.node(op), (*keys, cast_to(time, I64)))
    known = found.pop()
    if known.nullable:
        is_known = Call("is_not_null", (known,), dtype=BOOL, nullable=False)
        filled = Call("fill_null", (known, Lit(0, I64)), dtype=I64, nullable=False)
        node = Pipeline(node, (FilterStep(is_known),), (*identity(node.schema), Named(_TIME, filled)), name="filter")
        known = Col(_TIME, I64, False)
    return node, tuple(found), known


def _limits(bound: TimeBound, time: Expr) -> tuple[Named, ...]:
    """The columns of the window of a time, a 64-bit integer."""
    if not bound.is_window:
        return ()
    limits = bound.window(time).limits()
    return tuple(Named(name, cast_to(limit, type_of(bound.left)))
                 for name, limit in zip(WINDOW_COLUMNS, limits, strict=True))


# --- in a job


@dataclass(frozen=True, eq=False, repr=False)
class JoinSides(Union):
    """The rows of both sides of a join as they arrive; those of one side have its columns only."""

    def _columns(self) -> Schema:
        return Schema(tuple(each for side in self.inputs for each in side.schema))

    def wrong(self) -> Iterator[str]:
        return iter(())

    def _time_of(self, below: Sequence[EventTime]) -> EventTime:
        """Each column is that of one side."""
        marked = [each.promised for each in below if each.promised is not None]
        return EventTime("", {name: each for some in marked for name, each in some.items()}) if marked else NO_TIME

    def push(self, predicate: Expr) -> list[tuple[int, Expr]] | None:
        return None

    def physical(self, p: Planner) -> Node:
        raise InternalError("the sides of a join are rows of a job")


@dataclass(frozen=True, eq=False, repr=False)
class BufferedJoin(Unary):
    """A join over the rows of its sides (`JoinSides`); the inputs of `join` have their columns, and no data."""

    input: Op
    join: StreamJoin
    name: str = ""
    at: SourceLoc = field(default=NOWHERE, compare=False)

    has_state = True

    def _columns(self) -> Schema:
        return self.join.schema

    def retention(self) -> tuple[str, ...]:
        return self.join.retention()

    def _time_of(self, below: Sequence[EventTime]) -> EventTime:
        sides = [below[0].projected(_side_columns(k, side.schema)) for k, side in enumerate(self.join.inputs)]
        return self.join._time_of(sides)

    @property
    def late_schema(self) -> Schema:
        """The columns of both sides, one of a name that both have; a row has null in those of the other side."""
        left, right = (side.schema for side in self.join.inputs)
        fields = [replace(f, nullable=True) for f in left if f.name != _CAST_TIME]
        for f in right:
            if f.name == _CAST_TIME:
                continue
            known = left.get(f.name)
            if known is not None and known.dtype != f.dtype:
                raise WrongType(f"late rows of a join have the columns of both sides, and {f.name!r} is "
                                f"{known.dtype!r} on the left and {f.dtype!r} on the right", at=self.at, step="join",
                                hint='rename or cast it on one side, or late="drop"')
            if known is None:
                fields.append(replace(f, nullable=True))
        return Schema(tuple(fields))

    def times(self) -> tuple[tuple[Expr, int], ...]:
        """Over the rows of both sides."""
        named = [{item.name: item.expr for item in _side_columns(k, side.schema)}
                 for k, side in enumerate(self.join.inputs)]
        return tuple((substitute(time, named[side]), 0) for time, side in self.join.times())

    def describe(self) -> tuple[str, str]:
        return self.join.describe()

    def physical(self, p: Planner) -> Node:
        raise InternalError("a join that buffers rows is an operator of a job")


def side_column(side: int, name: str) -> str:
    """The name of a column among the rows of both sides."""
    return internal(f"side{side}.{name}")


def _side_columns(side: int, schema: Schema) -> tuple[Named, ...]:
    """The columns of a side, as those of the rows of both."""
    return tuple(Named(f.name, Col(side_column(side, f.name), f.dtype, f.nullable)) for f in schema)


def as_buffered(roots: Sequence[Op]) -> Sequence[Op]:
    """The plans as a job runs them: joins of streams are over the rows of both sides."""
    if not any(isinstance(op, StreamJoin) for op in walk_streams(*roots)):
        return roots
    return transform(roots, _buffered)


def _buffered(op: Op) -> Op:
    if not isinstance(op, StreamJoin):
        return op
    schema, op = op.schema, with_times_of_one_type(op)
    sides = tuple(Project(side, tuple(Named(side_column(k, f.name), Col(f.name, f.dtype, f.nullable))
                                      for f in side.schema), at=op.at) for k, side in enumerate(op.inputs))
    left, right = (Source("input", side.schema.arrow, tuple(side.schema.names)) for side in op.inputs)
    join = replace(op, left=left, right=right, builds_left=False, name="")
    found = BufferedJoin(JoinSides(sides, at=op.at), join, op.name, at=op.at)
    return found if found.schema.names == schema.names else Project(found, identity(schema), at=op.at)


def with_times_of_one_type(op: StreamJoin) -> StreamJoin:
    """The join with a column for a time that is cast to the other's type, and a watermark of that column: the sides of
    a join have one watermark, in one unit.
    """
    bound = op.bound
    if bound is None or not any(isinstance(time, Call) and time.fn == "cast" for time in (bound.left, bound.right)):
        return op
    sides = list(op.inputs)
    times = [bound.left, bound.right]
    for k, time in enumerate(times):
        if not (isinstance(time, Call) and time.fn == "cast"):
            continue
        side, (given,), dtype = sides[k], time.args, type_of(time)
        mark, lead = side, side.event_time.lead(given)
        while len(mark.streams) == 1 and not isinstance(mark, Watermark):
            (mark,) = mark.streams
        if side.event_time.promised is not None:
            if side.event_time.is_derived or lead is None or not isinstance(mark, Watermark):
                raise WrongType("in a job both sides of a join have times of one type, or those of their sources",
                                at=op.at, step="join", found=str(bound),
                                hint="cast the time of one side before with_watermark")
            factor = 1 if dtype.is_int else UNITS_PER_SECOND[dtype.unit] // UNITS_PER_SECOND[type_of(given).unit]
            column = Col(_CAST_TIME, dtype, time.nullable)
            whole = Project(side, (*identity(side.schema), Named(_CAST_TIME, time)), at=op.at)
            sides[k], times[k] = Watermark(whole, _CAST_TIME, (mark.delay - lead) * factor, at=op.at), column
    return replace(op, left=sides[0], right=sides[1], bound=replace(bound, left=times[0], right=times[1]))
