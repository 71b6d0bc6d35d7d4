"""Ops that depend on the order of rows, or make one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from scalein.dtypes import BOOL
from scalein.errors import NOWHERE, SourceLoc
from scalein.ir import physical
from scalein.ir.event_time import EventTime
from scalein.ir.exprs import Call, Col, Expr, Named, columns
from scalein.ir.functions.registry import has_host
from scalein.ir.internal_names import internal
from scalein.ir.ops.base import Op, SameColumns
from scalein.ir.ops.predicates import is_same_within_group
from scalein.ir.physical import Node, Pipeline, identity
from scalein.ir.printer import show_expr
from scalein.ir.stages import DedupStep
from scalein.layout import NULL_BITS

if TYPE_CHECKING:
    from scalein.ir.passes.physicalize import Planner


@dataclass(frozen=True, eq=False, repr=False)
class Limit(SameColumns):
    """The first `count` rows in the source's order. No filter passes it: it counts rows."""

    input: Op
    count: int
    at: SourceLoc = field(default=NOWHERE, compare=False)
    name: str = ""  # by which a checkpoint knows its state

    has_state = True
    memory_shares = 0  # a number

    def _detail(self) -> str:
        return str(self.count)

    def wrong(self) -> Iterator[str]:
        if self.count < 0:
            yield f"count is {self.count}"

    def physical(self, p: Planner) -> Node:
        return physical.Limit(p.node(self.input), self.count)


@dataclass(frozen=True, eq=False, repr=False)
class Distinct(SameColumns):
    """The first row, in the source's order, of each value of the columns `keys`; null is a value of its own."""

    input: Op
    keys: tuple[str, ...]
    at: SourceLoc = field(default=NOWHERE, compare=False)
    name: str = ""  # by which a checkpoint knows its state

    has_state = True

    def _detail(self) -> str:
        return ", ".join(self.keys)

    def wrong(self) -> Iterator[str]:
        known = set(self.input.schema.names)
        yield from (f"no column {name!r} in its input" for name in self.keys if name not in known)
        if not self.keys:
            yield "no keys"

    def reads(self, needed: set[str]) -> tuple[set[str], ...]:
        return (needed | set(self.keys),)

    def state_reads(self) -> set[str]:
        return set(self.keys)

    def push(self, predicate: Expr) -> list[tuple[int, Expr]] | None:
        """A predicate on keys keeps or drops all rows of a key, so the first of them stays the first.

        What pyarrow computes is left to the few rows that come out.
        """
        may_move = columns(predicate) <= set(self.keys) and is_same_within_group(predicate) and not has_host(predicate)
        return [(0, predicate)] if may_move else None

    def physical(self, p: Planner) -> Node:
        fields = self.input.schema
        keys = [Named(name, Col(name, fields[name].dtype, fields[name].nullable)) for name in self.keys]
        # A record has one word of null bits, whose last is shared: keys that share it tell null from zero themselves.
        keys += [Named(internal(f"null.{key.name}"), Call("is_null", (key.expr,), dtype=BOOL, nullable=False))
                 for key in keys[NULL_BITS - 1 :] if key.expr.nullable]
        step = DedupStep(p.first_rows(tuple(keys)), tuple(key.expr for key in keys))
        return Pipeline(p.node(self.input), (step,), identity(self.schema), name="distinct")


@dataclass(frozen=True, slots=True)
class By:
    """What rows are ordered by: an expression, and whether the greatest value comes first."""

    expr: Expr
    descending: bool = False


@dataclass(frozen=True, eq=False, repr=False)
class Sort(SameColumns):
    """All rows in order, or the first `count` of them: NaN is the greatest, ties keep the source's order.

    Nulls come first, or last with `nulls_last`, whatever the direction.
    """

    input: Op
    by: tuple[By, ...]
    nulls_last: bool = False
    count: int | None = None
    at: SourceLoc = field(default=NOWHERE, compare=False)
    name: str = ""  # by which a checkpoint knows its state

    has_state = True
    is_blocking = True

    def exprs(self) -> tuple[tuple[Expr, int], ...]:
        return tuple((by.expr, 0) for by in self.by)

    def _with_exprs(self, new: Iterator[Expr]) -> Self:
        return replace(self, by=tuple(replace(by, expr=next(new)) for by in self.by))

    def _detail(self) -> str:
        by = ", ".join(f"{show_expr(by.expr)}{' descending' if by.descending else ''}" for by in self.by)
        first = f", first {self.count}" if self.count is not None else ""
        return by + (", nulls last" if self.nulls_last else "") + first

    def wrong(self) -> Iterator[str]:
        if not self.by:
            yield "nothing to sort by"
        if self.count is not None and self.count < 0:
            yield f"count is {self.count}"

    def limit_of_windows(self, rows: EventTime) -> tuple[str, int] | None:
        """The column of windows that the order is by, first of all, and its lead: in a job, rows leave when it is
        passed.
        """
        first = self.by[0]
        if first.descending or not isinstance(first.expr, Col) or rows.promised is None:
            return None
        found = rows.promised.get(first.expr.name)
        return (first.expr.name, found.lead) if found is not None and found.is_limit else None

    def _time_of(self, below: Sequence[EventTime]) -> EventTime:
        """Rows of any other order come at the end."""
        (rows,) = below
        return rows if self.limit_of_windows(rows) else replace(rows, promised=None, is_derived=True)

    def push(self, predicate: Expr) -> list[tuple[int, Expr]] | None:
        """Every row is there, below as above, unless it gives the first ones only."""
        return [(0, predicate)] if self.count is None else None

    def physical(self, p: Planner) -> Node:
        """Keys that are no columns are computed before, and dropped after."""
        before, keys = p.columns(p.node(self.input), [by.expr for by in self.by])
        by = tuple((key.name, by.descending) for key, by in zip(keys, self.by, strict=True))
        node = physical.Sort(before, by, self.nulls_last, self.count)
        if node.schema.names == self.schema.names:
            return node
        return Pipeline(node, (), identity(self.schema), name="project")
