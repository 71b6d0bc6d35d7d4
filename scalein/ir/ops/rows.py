"""Ops that look at one row, or batch, at a time.

`select`, `with_columns`, `drop`, `rename` and `cast` are all a `Project`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Self

import pyarrow as pa

from scalein.dtypes import BOOL, Field, Schema, element_of, from_arrow_type
from scalein.errors import NOWHERE, SourceLoc
from scalein.ir.checks import expect
from scalein.ir.event_time import WINDOW_END, WINDOW_START, EventTime, Promise
from scalein.ir.exprs import Col, Expr, Named, columns, type_of
from scalein.ir.functions.registry import can_fail
from scalein.ir.internal_names import internal
from scalein.ir.ops.base import Op, SameColumns, Unary
from scalein.ir.ops.predicates import cost, over
from scalein.ir.physical import Host, Node, Pipeline, identity
from scalein.ir.printer import show_expr, show_named
from scalein.ir.stages import FilterStep
from scalein.ir.windows import Window

if TYPE_CHECKING:
    from scalein.ir.passes.physicalize import Planner

LAST_WINDOW = internal("last_window")


@dataclass(frozen=True, eq=False, repr=False)
class Filter(SameColumns):
    """Keep the rows for which `predicate` is true; null counts as false."""

    input: Op
    predicate: Expr
    at: SourceLoc = field(default=NOWHERE, compare=False)

    is_row_by_row = True

    def exprs(self) -> tuple[tuple[Expr, int], ...]:
        return ((self.predicate, 0),)

    def _with_exprs(self, new: Iterator[Expr]) -> Self:
        return replace(self, predicate=next(new))

    def _detail(self) -> str:
        return show_expr(self.predicate)

    def wrong(self) -> Iterator[str]:
        return expect(lambda: "the predicate", self.predicate.dtype, BOOL)

    def physical(self, p: Planner) -> Node:
        before, (predicate,) = p.hosts(p.node(self.input), [self.predicate])
        return Pipeline(before, (FilterStep(predicate),), identity(self.schema), name="filter")


@dataclass(frozen=True, eq=False, repr=False)
class Project(Unary):
    """New columns in order, each an expression over the input."""

    input: Op
    items: tuple[Named, ...]
    at: SourceLoc = field(default=NOWHERE, compare=False)

    is_row_by_row = True
    is_one_to_one = True
    keeps_nullable = True

    def _columns(self) -> Schema:
        return Schema(tuple(Field(i.name, type_of(i.expr), i.expr.nullable) for i in self.items))

    @cached_property
    def _by_name(self) -> dict[str, Expr]:
        return {item.name: item.expr for item in self.items}

    def exprs(self) -> tuple[tuple[Expr, int], ...]:
        return tuple((item.expr, 0) for item in self.items)

    def _with_exprs(self, new: Iterator[Expr]) -> Self:
        return replace(self, items=tuple(Named(item.name, next(new)) for item in self.items))

    def _detail(self) -> str:
        return ", ".join(map(show_named, self.items))

    def reads(self, needed: set[str]) -> tuple[set[str], ...]:
        return (set(),)

    def narrow(self, needed: set[str]) -> Project:
        items = tuple(item for item in self.items if item.name in needed)
        return self if len(items) == len(self.items) else replace(self, items=items)

    def cheapest(self) -> set[str]:
        return {min(self.items, key=cost).name}

    def passes_through(self, column: str) -> bool:
        return any(item.name == column and isinstance(item.expr, Col) and item.expr.name == column
                   for item in self.items)

    def _time_of(self, below: Sequence[EventTime]) -> EventTime:
        return below[0].projected(self.items)

    def push(self, predicate: Expr) -> list[tuple[int, Expr]] | None:
        below = over(self._by_name, predicate)
        return None if below is None else [(0, below)]

    def physical(self, p: Planner) -> Node:
        before, exprs = p.hosts(p.node(self.input), [item.expr for item in self.items])
        items = tuple(Named(i.name, e) for i, e in zip(self.items, exprs, strict=True))
        return Pipeline(before, (), items, name="project")


@dataclass(frozen=True, eq=False, repr=False)
class MapBatches(Unary):
    """The user's Python function on Arrow batches: the escape hatch. No filter passes it: its function sees rows."""

    input: Op
    fn: Callable[[pa.RecordBatch], pa.RecordBatch]
    arrow: pa.Schema
    at: SourceLoc = field(default=NOWHERE, compare=False)

    is_row_by_row = True

    def _columns(self) -> Schema:
        return Schema.from_arrow(self.arrow)

    def _detail(self) -> str:
        return str(getattr(self.fn, "__name__", type(self.fn).__name__))

    def _time_of(self, below: Sequence[EventTime]) -> EventTime:
        """The function is trusted with columns that it gives under their names, and of their types."""
        known = self.input.schema
        return below[0].through(f.name for f in self.schema if (old := known.get(f.name)) and old.dtype == f.dtype)

    def reads(self, needed: set[str]) -> tuple[set[str], ...]:
        return (set(self.input.schema.names),)

    def physical(self, p: Planner) -> Node:
        return Host(p.node(self.input), self)


@dataclass(frozen=True, eq=False, repr=False)
class Explode(Unary):
    """A row for each element of some list columns, in order, the elements in their places.

    The lists of a row have one length; null counts as empty, and an empty list gives no row.
    """

    input: Op
    lists: tuple[str, ...]
    at: SourceLoc = field(default=NOWHERE, compare=False)

    is_row_by_row = True

    def _columns(self) -> Schema:
        return Schema(tuple(_element(f) if f.name in self.lists else f for f in self.input.schema))

    def _detail(self) -> str:
        return ", ".join(self.lists)

    def wrong(self) -> Iterator[str]:
        for name in self.lists:
            column = self.input.schema.get(name)
            if column is None or element_of(column.dtype) is None:
                yield f"no list {name!r} in its input"

    def reads(self, needed: set[str]) -> tuple[set[str], ...]:
        return (needed | set(self.lists),)

    def passes_through(self, column: str) -> bool:
        return column not in self.lists

    def push(self, predicate: Expr) -> list[tuple[int, Expr]] | None:
        """What the elements of a list share decides for all of them; a row without elements must not fail."""
        return None if set(self.lists) & columns(predicate) or can_fail(predicate) else [(0, predicate)]

    def physical(self, p: Planner) -> Node:
        return Host(p.node(self.input), self)


@dataclass(frozen=True, eq=False, repr=False)
class AssignWindows(Unary):
    """A row for each window that holds it, the windows in ascending order; one without a time is dropped.

    `LAST_WINDOW` says which of a row's windows is the last one that closes.
    """

    input: Op
    window: Window
    at: SourceLoc = field(default=NOWHERE, compare=False)

    is_row_by_row = True

    def _columns(self) -> Schema:
        time = type_of(self.window.time)
        return Schema((*self.input.schema, Field(WINDOW_START, time, False), Field(WINDOW_END, time, False),
                       Field(LAST_WINDOW, BOOL, False)))

    def exprs(self) -> tuple[tuple[Expr, int], ...]:
        return ((self.window.time, 0),)

    def _with_exprs(self, new: Iterator[Expr]) -> Self:
        return replace(self, window=replace(self.window, time=next(new)))

    def _detail(self) -> str:
        return str(self.window)

    def wrong(self) -> Iterator[str]:
        return self.window.wrong()

    def reads(self, needed: set[str]) -> tuple[set[str], ...]:
        return (needed - {WINDOW_START, WINDOW_END, LAST_WINDOW},)

    def passes_through(self, column: str) -> bool:
        return column not in (WINDOW_START, WINDOW_END, LAST_WINDOW)

    def _time_of(self, below: Sequence[EventTime]) -> EventTime:
        """A window ends after the times that it holds; it may have begun long before."""
        found = super()._time_of(below)
        known = below[0].promise(self.window.time)
        if found.promised is None or known is None:
            return found
        end = Promise(known.lead, WINDOW_END, True)
        return replace(found, promised={**found.promised, WINDOW_END: end})

    def times(self) -> tuple[tuple[Expr, int], ...]:
        return ((self.window.time, 0),)

    def push(self, predicate: Expr) -> list[tuple[int, Expr]] | None:
        """A row without a time must not fail."""
        own = {WINDOW_START, WINDOW_END, LAST_WINDOW}
        return None if own & columns(predicate) or can_fail(predicate) else [(0, predicate)]

    def physical(self, p: Planner) -> Node:
        before, (time,) = p.columns(p.node(self.input), [self.window.time])
        return Host(before, replace(self, window=replace(self.window, time=time)))


def _element(column: Field) -> Field:
    found = element_of(column.dtype)
    assert found is not None, f"{column!r} is no list"
    return Field(column.name, from_arrow_type(found.type, column.name), found.nullable)
