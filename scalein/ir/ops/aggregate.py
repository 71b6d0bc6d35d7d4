"""Groups of rows.

The result types of aggregates are in `ir/aggregates.py`, windows in `ir/windows.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from scalein.dtypes import BOOL, Field, Schema
from scalein.errors import NOWHERE, SourceLoc
from scalein.ir.aggregates import AGGREGATES
from scalein.ir.event_time import AT_THE_END, EventTime, of_windows
from scalein.ir.exprs import Agg, Call, Col, Expr, Named, NamedAgg, columns, type_of
from scalein.ir.functions.registry import can_fail, has_host
from scalein.ir.internal_names import internal, is_internal
from scalein.ir.ops.base import Op, Unary
from scalein.ir.ops.predicates import is_same_within_group, over
from scalein.ir.ops.rows import Project
from scalein.ir.physical import Node, Pipeline, WindowAggregate, identity
from scalein.ir.printer import show_agg, show_named
from scalein.ir.stages import FilterStep
from scalein.ir.windows import Window

if TYPE_CHECKING:
    from scalein.ir.passes.physicalize import Planner


@dataclass(frozen=True, eq=False, repr=False)
class Aggregate(Unary):
    """Groups by `keys` (and window): keys, window_start and window_end if windowed, then `aggs`."""

    input: Op
    keys: tuple[Named, ...]
    window: Window | None
    aggs: tuple[NamedAgg, ...]
    at: SourceLoc = field(default=NOWHERE, compare=False)
    name: str = ""  # by which a checkpoint knows its state

    has_state = True
    memory_shares = 4  # the tables of a round have one of them
    keeps_nullable = True

    def _columns(self) -> Schema:
        fields = [Field(k.name, type_of(k.expr), k.expr.nullable) for k in self.keys]
        if self.window is not None:
            dtype = type_of(self.window.time)
            fields += [Field("window_start", dtype, False), Field("window_end", dtype, False)]
        fields += [Field(a.name, type_of(a.agg), a.agg.nullable) for a in self.aggs]
        return Schema(tuple(fields))

    def exprs(self) -> tuple[tuple[Expr, int], ...]:
        held = [key.expr for key in self.keys]
        held += [self.window.time] if self.window is not None else []
        held += [arg for named in self.aggs for arg in named.agg.args]
        return tuple((expr, 0) for expr in held)

    def _with_exprs(self, new: Iterator[Expr]) -> Self:
        keys = tuple(Named(key.name, next(new)) for key in self.keys)
        window = replace(self.window, time=next(new)) if self.window is not None else None
        aggs = tuple(NamedAgg(named.name, _with_args(named.agg, new)) for named in self.aggs)
        return replace(self, keys=keys, window=window, aggs=aggs)

    def _detail(self) -> str:
        by = [show_named(key) for key in self.keys] + ([str(self.window)] if self.window is not None else [])
        aggs = ", ".join(show_agg(named.agg) if is_internal(named.name) else f"{named.name} = {show_agg(named.agg)}"
                         for named in self.aggs)
        return (f"by {', '.join(by)}" if by else "all") + (f": {aggs}" if aggs else "")

    def wrong(self) -> Iterator[str]:
        if self.window is not None:
            yield from self.window.wrong()
        for agg in (named.agg for named in self.aggs):
            if agg.dtype is None:
                yield f"aggregate {agg.fn} has no type"
            if agg.fn not in AGGREGATES:
                yield f"no aggregate {agg.fn!r}"
            elif not 0 <= len(agg.args) - AGGREGATES[agg.fn].arity <= AGGREGATES[agg.fn].optional:
                yield f"aggregate {agg.fn} with {len(agg.args)} arguments"

    def reads(self, needed: set[str]) -> tuple[set[str], ...]:
        return (set(),)

    def narrow(self, needed: set[str]) -> Aggregate:
        aggs = tuple(named for named in self.aggs if named.name in needed)
        return self if len(aggs) == len(self.aggs) else replace(self, aggs=aggs)

    def cheapest(self) -> set[str]:
        if self.keys or self.window is not None:
            return set()
        return {min(self.aggs, key=lambda named: len(named.agg.args)).name}

    def _time_of(self, below: Sequence[EventTime]) -> EventTime:
        """Groups without a window come at the end."""
        if self.window is None:
            return AT_THE_END
        keys = {key.name: key.expr for key in self.keys}
        return of_windows(below[0], self.window.time, keys, self.window)

    def times(self) -> tuple[tuple[Expr, int], ...]:
        return () if self.window is None else ((self.window.time, 0),)

    def state_reads(self) -> set[str]:
        return {name for expr, _ in self.exprs() for name in columns(expr)}

    def push(self, predicate: Expr) -> list[tuple[int, Expr]] | None:
        """A predicate on keys keeps or drops whole groups. Without keys there is one row even for no input.

        A window drops rows without time, which one that can fail must not meet.
        """
        keys = {key.name: key.expr for key in self.keys}
        if not keys or not columns(predicate) <= keys.keys() or not is_same_within_group(predicate):
            return None
        below = None if self.window is not None and can_fail(predicate) else over(keys, predicate)
        return None if below is None else [(0, below)]

    def physical(self, p: Planner) -> Node:
        exprs = [k.expr for k in self.keys] + [arg for a in self.aggs for arg in a.agg.args]
        before, window = p.node(self.input), None
        if self.window is not None:
            before, (time,) = p.hosts(before, [self.window.time])
            window = replace(self.window, time=time)
            if time.nullable and any(has_host(e) and can_fail(e) for e in exprs):
                # A row without a time is in no window: what pyarrow computes of it must not fail.
                known = Call("is_not_null", (time,), dtype=BOOL, nullable=False)
                before = Pipeline(before, (FilterStep(known),), identity(before.schema), name="filter")
        before, exprs = p.hosts(before, exprs)
        rest = iter(exprs)
        keys = tuple(Named(k.name, next(rest)) for k in self.keys)
        aggs = tuple(NamedAgg(a.name, _with_args(a.agg, rest)) for a in self.aggs)
        return WindowAggregate(before, (), p.table(keys, window, aggs), tuple(k.expr for k in keys))


def _with_args(agg: Agg, new: Iterator[Expr]) -> Agg:
    return replace(agg, args=tuple(next(new) for _ in agg.args))


def by_window(op: Op) -> Op:
    """Groups by a limit of windows that were computed before, as groups in windows of one unit: for a job, which has
    them when the watermark has passed the limit, not at the end of its input.
    """
    if not isinstance(op, Aggregate) or op.window is not None:
        return op
    limit = op.input.event_time.limit_among(key.expr for key in op.keys)
    if limit is None:
        return op
    named = tuple(Named(internal(f"key.{key.name}"), key.expr) for key in op.keys)
    window = Aggregate(op.input, named, Window(limit, 1, 1), op.aggs, at=op.at, name=op.name)
    shown = {key.name: internal(f"key.{key.name}") for key in op.keys}
    fields = [(f.name, window.schema[shown.get(f.name, f.name)]) for f in op.schema]
    return Project(window, tuple(Named(name, Col(f.name, f.dtype, f.nullable)) for name, f in fields), at=op.at)
