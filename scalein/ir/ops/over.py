"""Columns that other rows of a row's partition decide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from scalein.dtypes import F64, I64, Field, Schema
from scalein.errors import NOWHERE, SourceLoc
from scalein.ir import physical
from scalein.ir.event_time import EventTime, of_windows
from scalein.ir.exprs import Agg, Call, Col, Expr, Named, columns, type_of
from scalein.ir.functions.registry import has_host
from scalein.ir.internal_names import internal
from scalein.ir.ops.base import Op, Unary
from scalein.ir.ops.order import By
from scalein.ir.ops.predicates import is_same_within_group
from scalein.ir.ops.rows import AssignWindows, Project
from scalein.ir.over import SPACING, OverCall
from scalein.ir.physical import Node, Pipeline, identity
from scalein.ir.printer import show_agg, show_expr
from scalein.ir.unify import cast_to

if TYPE_CHECKING:
    from scalein.ir.passes.physicalize import Planner


WINDOWED, SPACED, TIMED = "windowed", "spaced", "timed"
MAX_REACH = 10_000  # rows of a key that a job remembers


def _can_stream(call: OverCall) -> bool:
    """Whether what came before a row comes down to few values of its key."""
    fn = call.agg.fn
    if fn == "lead" or call.frame.is_whole:
        return False
    if fn == "lag":
        return all(isinstance(step, int) and step <= MAX_REACH for step in call.agg.params)
    if call.is_running:
        if _parts(call) is not None:
            return True
        is_combined = fn in ("row_number", "rank", "dense_rank", "count", "count_valid", "sum", "min", "max")
        return is_combined or (fn == "first" and len(call.agg.args) == 1)
    return call.frame.rows is None or call.frame.rows <= MAX_REACH


def _parts(call: OverCall) -> tuple[tuple[OverCall, ...], Expr] | None:
    """A running aggregate as others that a job can continue, and what it is of these; None if it is one itself."""
    agg = call.agg
    if not call.is_running or len(agg.args) != 1:
        return None
    (x,) = agg.args
    if agg.fn == "last" and not call.frame.with_peers:
        return (), x
    if agg.fn != "mean" or not (type_of(x).is_int or type_of(x).is_float):
        return None
    total = OverCall(internal(f"{call.name}.sum"), Agg("sum", (cast_to(x, F64),), F64, agg.nullable, at=agg.at),
                     call.frame)
    count = OverCall(internal(f"{call.name}.count"), Agg("count_valid", (x,), I64, False, at=agg.at), call.frame)
    values = (Col(total.name, F64, agg.nullable), cast_to(Col(count.name, I64, False), F64))
    mean = Call("div", values, dtype=F64, nullable=agg.nullable)
    return (total, count), mean


def streamed(op: Op) -> Op:
    """Values over other rows as a job computes them: running means of sums and counts, which it can continue."""
    if not isinstance(op, Over) or op.kind != TIMED:
        return op
    parts = {call.name: found for call in op.calls if (found := _parts(call)) is not None}
    if not parts:
        return op
    calls = tuple(each for call in op.calls for each in (parts[call.name][0] if call.name in parts else (call,)))
    whole = replace(op, calls=calls) if calls else op.input
    made = {name: expr for name, (_, expr) in parts.items()}
    items = tuple(Named(item.name, made.get(item.name, item.expr)) for item in identity(op.schema))
    return Project(whole, items, at=op.at)


@dataclass(frozen=True, eq=False, repr=False)
class Over(Unary):
    """Every row, with a column for each of the calls: computed over rows with the same `keys`, in the order of `by`.

    Rows that are equal in `by` are in the source's order, and so are all, if there is no `by`. Nulls come first, or
    last with `nulls_last`, whatever the direction; NaN is the greatest. A frame in time is of the one column of `by`.
    `time` is the column whose watermark completes rows, if there is one: that of event time, which is `by` as well, or
    the ends of windows, which are keys.
    """

    input: Op
    keys: tuple[Expr, ...]
    by: tuple[By, ...]
    calls: tuple[OverCall, ...]
    nulls_last: bool = False
    time: str = ""
    at: SourceLoc = field(default=NOWHERE, compare=False)
    name: str = ""  # by which a checkpoint knows its state

    has_state = True

    @property
    def kind(self) -> str:
        """How a job computes it before the end of its input: see `exec/over_operator.py`; empty: not at all."""
        if not self.time:
            return ""
        if any(isinstance(key, Col) and key.name == self.time for key in self.keys):
            return WINDOWED
        if any(call.agg.fn in SPACING for call in self.calls):
            return SPACED
        is_known = all(map(_can_stream, self.calls)) and (self.length is None or not self.reach)
        types = [type_of(expr) for expr, _ in self.exprs()]
        return TIMED if is_known and not any(dtype.is_nested or dtype.is_decimal for dtype in types) else ""

    @property
    def is_blocking(self) -> bool:  # type: ignore[override]
        return not self.kind

    @property
    def reach(self) -> int:
        """How many rows before a row its values need."""
        lags = [step for call in self.calls if call.agg.fn == "lag"
                for step in call.agg.params if isinstance(step, int)]
        return max([*lags, *(call.frame.rows - 1 for call in self.calls if call.frame.rows is not None)], default=0)

    @property
    def length(self) -> int | None:
        """How far back in time its values reach."""
        return max((call.frame.within for call in self.calls if call.frame.within is not None), default=None)

    def _columns(self) -> Schema:
        added = (Field(call.name, type_of(call.agg), call.agg.nullable) for call in self.calls)
        return Schema((*self.input.schema, *added))

    def exprs(self) -> tuple[tuple[Expr, int], ...]:
        args = (arg for call in self.calls for arg in call.agg.args)
        return tuple((expr, 0) for expr in (*self.keys, *(by.expr for by in self.by), *args))

    def _with_exprs(self, new: Iterator[Expr]) -> Self:
        keys = tuple(next(new) for _ in self.keys)
        by = tuple(replace(by, expr=next(new)) for by in self.by)
        calls = tuple(replace(call, agg=replace(call.agg, args=tuple(next(new) for _ in call.agg.args)))
                      for call in self.calls)
        return replace(self, keys=keys, by=by, calls=calls)

    def shown(self, call: OverCall) -> str:
        """The text of a call: `price.sum().over(user, order_by=ts, rows=3)`."""
        given = [show_expr(key) for key in self.keys]
        if self.by:
            by = [f"{show_expr(by.expr)}{' descending' if by.descending else ''}" for by in self.by]
            given.append(f"order_by={by[0] if len(by) == 1 else '[' + ', '.join(by) + ']'}")
        frame = call.frame.shown(type_of(self.by[0].expr) if self.by else None)
        return f"{show_agg(call.agg)}.over({(', '.join(given) + frame).removeprefix(', ')})"

    def _detail(self) -> str:
        return ", ".join(map(self.shown, self.calls))

    def wrong(self) -> Iterator[str]:
        for call in self.calls:
            yield from call.frame.wrong()
            if call.frame.within is not None and len(self.by) != 1:
                yield f"a frame in time over rows in the order of {len(self.by)} columns"

    def reads(self, needed: set[str]) -> tuple[set[str], ...]:
        return (needed - {call.name for call in self.calls},)

    def narrow(self, needed: set[str]) -> Op:
        calls = tuple(call for call in self.calls if call.name in needed)
        if not calls:
            return self.input
        return self if len(calls) == len(self.calls) else replace(self, calls=calls)

    def passes_through(self, column: str) -> bool:
        return all(call.name != column for call in self.calls)

    @property
    def assigned(self) -> AssignWindows | None:
        """What gives its rows the windows that are computed when they close; None if their rows come complete."""
        below = self.input
        while self.kind == WINDOWED and not below.has_state and below.passes_through(self.time):
            (below,) = below.streams
        return below if isinstance(below, AssignWindows) else None

    def _time_of(self, below: Sequence[EventTime]) -> EventTime:
        rows = below[0].through(filter(self.passes_through, self.schema.names))
        if not self.kind:
            return replace(rows, promised=None, is_derived=True)
        windows = self.assigned
        if windows is None:
            return rows.in_order_of(self.time)
        inside = {name: Col(name) for name in rows.promised or () if name != self.time}
        found = of_windows(windows.input.event_time, windows.window.time, inside, windows.window)
        return replace(found, column=rows.column)

    @property
    def late_schema(self) -> Schema:
        return (self.assigned or self).streams[0].schema

    def times(self) -> tuple[tuple[Expr, int], ...]:
        field = self.input.schema[self.time] if self.kind else None
        return () if field is None else ((Col(field.name, field.dtype, field.nullable), 0),)

    def push(self, predicate: Expr) -> list[tuple[int, Expr]] | None:
        """A predicate on keys keeps or drops whole partitions."""
        keys = {key.name for key in self.keys if isinstance(key, Col)}
        may_move = columns(predicate) <= keys and is_same_within_group(predicate) and not has_host(predicate)
        return [(0, predicate)] if may_move else None

    def physical(self, p: Planner) -> Node:
        """Keys, orders and arguments that are no columns are computed before, and dropped after."""
        before, given = p.columns(p.node(self.input), [expr for expr, _ in self.exprs()])
        rest = iter(given)
        keys = tuple(next(rest).name for _ in self.keys)
        by = tuple((next(rest).name, by.descending) for by in self.by)
        calls = tuple(replace(call, agg=replace(call.agg, args=tuple(next(rest) for _ in call.agg.args)))
                      for call in self.calls)
        node = physical.Over(before, keys, by, self.nulls_last, calls)
        if node.schema.names == self.schema.names:
            return node
        return Pipeline(node, (), identity(self.schema), name="project")
