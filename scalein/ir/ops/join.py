"""Join and union: their schemas, which filters pass them (`push`), and which side is built: always the right one.

A join is with a static table. `Join` gives its rows as those of the left side come; `OuterJoin` also keeps the table's
rows without a match, which are known when the left side has ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Self

from scalein.dtypes import I32, Field, Schema
from scalein.errors import NOWHERE, SourceLoc
from scalein.ir import physical
from scalein.ir.checks import PROBES, expect, wrong_keys
from scalein.ir.event_time import AT_THE_END, EventTime, of_union
from scalein.ir.exprs import Col, Expr, Lit, columns
from scalein.ir.functions.registry import can_fail
from scalein.ir.ops.base import Op, SameColumns
from scalein.ir.ops.predicates import width
from scalein.ir.ops.rows import Project
from scalein.ir.physical import JoinBuild, Node, Pipeline, identity
from scalein.ir.printer import show_equation
from scalein.ir.rewrite import rewrite, substitute
from scalein.ir.stages import Probe

if TYPE_CHECKING:
    from scalein.ir.passes.physicalize import Planner


@dataclass(frozen=True, eq=False, repr=False)
class Union(Op):
    """The rows of the first input, then of the next; all have the first one's names and types."""

    inputs: tuple[Op, ...]
    at: SourceLoc = field(default=NOWHERE, compare=False)

    def _columns(self) -> Schema:
        schemas = [below.schema for below in self.inputs]
        return Schema(tuple(Field(f.name, f.dtype, any(schema.fields[k].nullable for schema in schemas))
                            for k, f in enumerate(schemas[0].fields)))

    def with_inputs(self, inputs: tuple[Op, ...]) -> Self:
        is_same = len(inputs) == len(self.inputs) and all(a is b for a, b in zip(inputs, self.inputs, strict=True))
        return self if is_same else replace(self, inputs=inputs)

    def wrong(self) -> Iterator[str]:
        first = self.inputs[0].schema
        for other in (below.schema for below in self.inputs[1:]):
            if other.names != first.names:
                yield f"its inputs have columns {first.names} and {other.names}"
                return
            for mine, found in zip(first, other, strict=True):
                yield from expect(partial("column {!r} of an input".format, found.name), found.dtype, mine.dtype)

    def reads(self, needed: set[str]) -> tuple[set[str], ...]:
        return (needed,) * len(self.inputs)

    def narrow(self, needed: set[str]) -> Union:
        """All inputs are alike, so one that gives more than is needed gets a projection."""
        return self.with_inputs(tuple(_exactly(below, needed) for below in self.inputs))

    def cheapest(self) -> set[str]:
        return {min(self.schema.fields, key=width).name}

    def _time_of(self, below: Sequence[EventTime]) -> EventTime:
        return of_union(below)

    def push(self, predicate: Expr) -> list[tuple[int, Expr]] | None:
        return [(number, predicate) for number in range(len(self.inputs))]

    def physical(self, p: Planner) -> Node:
        return physical.Union(tuple(map(p.node, self.inputs)), self.schema)


def _exactly(op: Op, needed: set[str]) -> Op:
    fields = tuple(field for field in op.schema if field.name in needed)
    return op if len(fields) == len(op.schema) else Project(op, identity(Schema(fields)), at=op.at)


@dataclass(frozen=True, eq=False, repr=False)
class Join(Op):
    """Rows of `left` with the matching rows of a static table (`right`, read whole first).

    `how` is inner, left, semi, anti, or cross, which has no keys. Keys are expressions of equal types on both sides;
    `keep` maps output name -> column of the right side (never its keys). Null keys match nothing.
    """

    left: Op
    right: Op
    left_keys: tuple[Expr, ...]
    right_keys: tuple[Expr, ...]
    how: str
    keep: tuple[tuple[str, str], ...] = ()
    at: SourceLoc = field(default=NOWHERE, compare=False)

    is_row_by_row = True
    _hows: ClassVar[tuple[str, ...]] = (*PROBES, "cross")

    @property
    def inputs(self) -> tuple[Op, ...]:
        return (self.left, self.right)

    @property
    def streams(self) -> tuple[Op, ...]:
        return (self.left,)

    def _columns(self) -> Schema:
        fields = list(self.left.schema.fields)
        for name, column in self.keep:
            f = self.right.schema[column]
            fields.append(Field(name, f.dtype, f.nullable or self.how == "left"))
        return Schema(tuple(fields))

    def with_inputs(self, inputs: tuple[Op, ...]) -> Self:
        left, right = inputs
        return self if left is self.left and right is self.right else replace(self, left=left, right=right)

    def exprs(self) -> tuple[tuple[Expr, int], ...]:
        return (*((key, 0) for key in self.left_keys), *((key, 1) for key in self.right_keys))

    def _with_exprs(self, new: Iterator[Expr]) -> Self:
        left = tuple(next(new) for _ in self.left_keys)
        return replace(self, left_keys=left, right_keys=tuple(next(new) for _ in self.right_keys))

    def _detail(self) -> str:
        keys = ", ".join(show_equation(*pair) for pair in zip(self.left_keys, self.right_keys, strict=False))
        kept = ", ".join(name if name == column else f"{name} = {column}" for name, column in self.keep)
        return self.how + (f" on {keys}" if keys else "") + (f" keep {kept}" if kept else "")

    def wrong(self) -> Iterator[str]:
        if self.how == "cross":
            yield from ("a cross join has keys" for _ in self.exprs()[:1])
        else:
            yield from wrong_keys(self.how, self.left_keys, self.right_keys, bool(self.keep), self._hows)
        known = set(self.right.schema.names)
        yield from (f"no column {column!r} on the right" for _, column in self.keep if column not in known)

    def reads(self, needed: set[str]) -> tuple[set[str], ...]:
        return needed & set(self.left.schema.names), {column for name, column in self.keep if name in needed}

    def narrow(self, needed: set[str]) -> Join:
        keep = tuple(pair for pair in self.keep if pair[0] in needed)
        return self if len(keep) == len(self.keep) else replace(self, keep=keep)

    def passes_through(self, column: str) -> bool:
        return self.left.schema.get(column) is not None

    def push(self, predicate: Expr) -> list[tuple[int, Expr]] | None:
        """A left join keeps every row of the left side; the others drop rows that a predicate must not fail for."""
        wanted = columns(predicate)
        if wanted <= set(self.left.schema.names):
            return [(0, predicate)] if self.how == "left" or not can_fail(predicate) else None
        kept = dict(self.keep)
        if self.how not in ("inner", "cross") or not wanted <= kept.keys() or can_fail(predicate):
            return None
        return [(1, self._on_the_right(predicate))]

    def _on_the_right(self, predicate: Expr) -> Expr:
        """A predicate over kept columns, as one over the right side."""
        there = {name: self.right.schema[column] for name, column in self.keep}
        return substitute(predicate, {name: Col(f.name, f.dtype, f.nullable) for name, f in there.items()})

    def physical(self, p: Planner) -> Node:
        """A cross join is an inner one by a constant: one chain of all rows of the table."""
        left, left_keys = p.hosts(p.node(self.left), self.left_keys or (_CONSTANT,))
        right, right_keys = p.columns(p.node(self.right), self.right_keys or (_CONSTANT,))
        number = p.join_number()
        table = JoinBuild(right, tuple(right_keys), tuple(dict.fromkeys(column for _, column in self.keep)),
                          tests_presence=self.how in ("semi", "anti"))
        probe = Probe(number, tuple(left_keys), "inner" if self.how == "cross" else self.how, self.keep)
        return Pipeline(left, (probe,), identity(self.schema), joins=((number, table),), name="join")


_CONSTANT = Lit(0, I32)


@dataclass(frozen=True, eq=False, repr=False)
class OuterJoin(Join):
    """A join that keeps all rows of the table: those without a match follow at the end, in the table's order.

    `how` is right, or outer, which keeps all rows of the left side as well. The left keys are different columns; where
    there is no row of the left side, they hold the right keys and its other columns are null.
    """

    name: str = ""  # by which a checkpoint knows its state

    is_row_by_row = False
    has_state = True
    is_blocking = True
    keeps_nullable = True
    _hows = ("right", "outer")

    def _columns(self) -> Schema:
        keys = {a.name: b for a, b in zip(self.left_keys, self.right_keys, strict=True) if isinstance(a, Col)}
        is_outer = self.how == "outer"
        fields = [Field(f.name, f.dtype, keys[f.name].nullable or (is_outer and f.nullable) if f.name in keys else True)
                  for f in self.left.schema]
        there = ((name, self.right.schema[column]) for name, column in self.keep)
        return Schema((*fields, *(Field(name, f.dtype, f.nullable or is_outer) for name, f in there)))

    def wrong(self) -> Iterator[str]:
        yield from super().wrong()
        names = [key.name for key in self.left_keys if isinstance(key, Col)]
        if len(set(names)) < len(self.left_keys):
            yield "its left keys are not different columns"

    def passes_through(self, column: str) -> bool:
        return False

    def _time_of(self, below: Sequence[EventTime]) -> EventTime:
        """Rows come at the end, some of them without those of the left side."""
        return AT_THE_END

    def push(self, predicate: Expr) -> list[tuple[int, Expr]] | None:
        """A right join keeps every row of the right side; fewer rows of the left would leave more without a match."""
        if self.how != "right" or not columns(predicate) <= dict(self.keep).keys():
            return None
        return [(1, self._on_the_right(predicate))]

    def physical(self, p: Planner) -> Node:
        right, right_keys = p.columns(p.node(self.right), self.right_keys)
        number = p.join_number()
        table = JoinBuild(right, tuple(right_keys), tuple(dict.fromkeys(column for _, column in self.keep)), True)
        is_outer = self.how == "outer"
        probe = Probe(number, self.left_keys, "left" if is_outer else "inner", self.keep, marks=True)
        kept = ((name, self.right.schema[column]) for name, column in self.keep)
        matched = Schema((*self.left.schema, *(Field(name, f.dtype, f.nullable or is_outer) for name, f in kept)))
        pipe = Pipeline(p.node(self.left), (probe,), identity(matched), joins=((number, table),), name="join")
        keys = {a.name: b.name for a, b in zip(self.left_keys, right_keys, strict=True) if isinstance(a, Col)}
        origins = {**keys, **dict(self.keep)}
        return physical.OuterJoin(pipe, number, tuple(origins.get(f.name) for f in self.schema), self.schema)


@dataclass(frozen=True, eq=False, repr=False)
class Reordered(SameColumns):
    """Inner joins in the order that is estimated to cost least, which bounded runs compute.

    `written` is the same in the order of FROM. Jobs and Spark take that (`as_written`): there the first table is the
    stream, and a checkpoint must not depend on the sizes of tables. `estimate` shows the order with numbers of rows.
    """

    input: Op
    written: Op = field(compare=False)
    estimate: str = field(default="", compare=False)
    at: SourceLoc = field(default=NOWHERE, compare=False)

    is_row_by_row = True

    def _detail(self) -> str:
        return self.estimate

    def push(self, predicate: Expr) -> list[tuple[int, Expr]] | None:
        return [(0, predicate)]

    def physical(self, p: Planner) -> Node:
        return p.node(self.input)


def as_written(root: Op) -> Op:
    """The plan with its joins in the order in which they were written."""
    return rewrite(root, lambda op: op.written if isinstance(op, Reordered) else None)
