"""State machines over the rows of each key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from scalein.dtypes import BOOL, I64, Field, Schema
from scalein.errors import NOWHERE, SourceLoc
from scalein.ir import physical
from scalein.ir.event_time import EventTime, Promise
from scalein.ir.exprs import Call, Col, Expr, Lit, Named, columns, type_of
from scalein.ir.internal_names import internal
from scalein.ir.ops.base import Op, Unary
from scalein.ir.physical import Node, Pipeline, identity
from scalein.ir.printer import show_named
from scalein.ir.process import ProcessBody
from scalein.ir.stages import FilterStep

if TYPE_CHECKING:
    from scalein.ir.passes.physicalize import Planner


ONLY_KEY = Named(internal("all"), Lit(0, I64))  # of a process without keys; it is no column of its rows


@dataclass(frozen=True, eq=False, repr=False)
class Process(Unary):
    """The rows that a class yields: the keys, then its own columns. `args` are what it reads of a row.

    Rows of a key come in the order of `time`, if there is one, ties in the source's order; a row without a time is
    dropped. `event` is that time as the class sees it, if it matters to more than the order.
    """

    input: Op
    keys: tuple[Named, ...]
    args: tuple[Expr, ...]
    body: ProcessBody
    time: str = ""
    event: Expr | None = None
    at: SourceLoc = field(default=NOWHERE, compare=False)
    name: str = ""  # by which a checkpoint knows its state

    has_state = True

    @property
    def table_keys(self) -> tuple[Named, ...]:
        """What records are found by: a constant, if there are no keys."""
        return self.keys or (ONLY_KEY,)

    def _columns(self) -> Schema:
        keys = (Field(k.name, type_of(k.expr), k.expr.nullable) for k in self.keys)
        return Schema((*keys, *self.body.outputs))

    def exprs(self) -> tuple[tuple[Expr, int], ...]:
        event = () if self.event is None else (self.event,)
        return tuple((expr, 0) for expr in (*(key.expr for key in self.keys), *self.args, *event))

    def _with_exprs(self, new: Iterator[Expr]) -> Self:
        keys = tuple(Named(key.name, next(new)) for key in self.keys)
        args = tuple(next(new) for _ in self.args)
        return replace(self, keys=keys, args=args, event=None if self.event is None else next(new))

    def _detail(self) -> str:
        order = f" in the order of {self.time}" if self.time else ""
        python = ", plain Python" if self.body.python is not None else ""
        fields = ", ".join(f"{slot.name}: {slot.dtype!r}{'?' if slot.nullable else ''}" for slot in self.body.slots)
        ttl = f", forgotten after {self.body.ttl}" if self.body.ttl else ""
        return f"{self.body.name}({fields}{ttl}) by {', '.join(map(show_named, self.keys)) or 'all'}{order}{python}"

    def reads(self, needed: set[str]) -> tuple[set[str], ...]:
        return ({self.time} if self.time else set(),)

    def state_reads(self) -> set[str]:
        return {name for expr, _ in self.exprs() for name in columns(expr)} | ({self.time} if self.time else set())

    def _time_of(self, below: Sequence[EventTime]) -> EventTime:
        """Columns that hold the time of the row or timer whenever they are yielded; plain Python is trusted."""
        rows = below[0]
        if rows.promised is None or not self.time:
            return EventTime("", None if rows.promised is None else {}, True)
        ordered = rows.in_order_of(self.time).promised or {}
        keys = {key.name: found for key in self.keys if isinstance(key.expr, Col)
                and (found := ordered.get(key.expr.name)) is not None}
        kind = self.input.schema[self.time].dtype
        own = {f.name: Promise(0, f.name) for f in self.body.outputs
               if f.dtype == kind and self.body.yields_time(f.name, self.time)}
        return EventTime("", {**keys, **own}, True)

    def times(self) -> tuple[tuple[Expr, int], ...]:
        field = self.input.schema[self.time] if self.time else None
        return () if field is None else ((Col(field.name, field.dtype, field.nullable), 0),)

    def physical(self, p: Planner) -> Node:
        before = p.node(self.input)
        if self.time:
            before = time_sorted(before, self.time)
        before, exprs = p.hosts(before, [expr for expr, _ in self.exprs()])
        keys = tuple(Named(key.name, expr) for key, expr in zip(self.keys, exprs, strict=False))
        args = tuple(exprs[len(keys) : len(keys) + len(self.args)])
        keys = keys or (ONLY_KEY,)
        return physical.Process(before, keys, args, self.body, self.schema, None if self.event is None else exprs[-1])


def time_sorted(before: Node, column: str) -> Node:
    """Rows in the order of event time, ties in their own order; those without a time are dropped."""
    known = before.schema[column]
    if known.nullable:
        there = Call("is_not_null", (Col(column, known.dtype, known.nullable),), dtype=BOOL, nullable=False)
        before = Pipeline(before, (FilterStep(there),), identity(before.schema), name="filter")
    return physical.Sort(before, ((column, False),), False, None)
