"""The program: a tree of nodes, each run by the runtime as an iterator of batches over the ones below it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from scalein.dtypes import Field, Schema
from scalein.ir.exprs import Col, Expr, Named, type_of
from scalein.ir.stages import DedupStep, Step
from scalein.ir.tables import Table

if TYPE_CHECKING:
    from scalein.ir import ops
    from scalein.ir.over import OverCall
    from scalein.ir.process import ProcessBody


@dataclass(frozen=True, slots=True)
class Scan:
    """Batches of a source."""

    source: ops.Source

    @property
    def schema(self) -> Schema:
        return self.source.schema


@dataclass(frozen=True)
class Pipeline:
    """Batches through a stage that ends in Collect."""

    input: Node
    steps: tuple[Step, ...]
    items: tuple[Named, ...]
    joins: tuple[tuple[int, JoinBuild], ...] = ()
    name: str = field(default="pipe", compare=False)

    @cached_property
    def schema(self) -> Schema:
        return Schema(tuple(Field(i.name, type_of(i.expr), i.expr.nullable) for i in self.items))

    @property
    def dedup(self) -> DedupStep | None:
        """The step that keeps first rows only, if there is one: such a pipeline has state, and must preserve the order.
        """
        return next((step for step in self.steps if isinstance(step, DedupStep)), None)


@dataclass(frozen=True, slots=True)
class WindowAggregate:
    """Batches through a stage that ends in Group; gives the table's finished groups as rows."""

    input: Node
    steps: tuple[Step, ...]
    table: Table
    keys: tuple[Expr, ...]
    joins: tuple[tuple[int, JoinBuild], ...] = ()
    name: str = field(default="group", compare=False)

    @property
    def schema(self) -> Schema:
        return self.table.schema


@dataclass(frozen=True)
class Process:
    """What the user's class yields for rows in their order; `args` are what it reads of a row."""

    input: Node
    keys: tuple[Named, ...]
    args: tuple[Expr, ...]
    body: ProcessBody
    schema: Schema
    time: Expr | None = None  # of event, as the class sees it, if it matters

    @cached_property
    def table(self) -> Table:
        return self.body.table(self.keys)


@dataclass(frozen=True, slots=True)
class JoinBuild:
    """A static table to probe: read whole, keyed by `keys`. If it `is_outer`, its rows are kept as they are as well.

    Where there is a `time`, a column of 64-bit integers without nulls, the rows of a key are in the order of it. Of one
    that only `tests_presence` (of semi and anti joins) any row of a key will do, and no others are found.
    """

    input: Node
    keys: tuple[Col, ...]
    columns: tuple[str, ...]
    is_outer: bool = False
    time: str = ""
    tests_presence: bool = False


@dataclass(frozen=True, slots=True)
class OuterJoin:
    """The rows of a pipeline, and then those rows of a table that none of its rows matched.

    `origins` has, for each column, the table's column that an unmatched row has it from; None: it is null.
    """

    input: Pipeline
    table: int  # number of the join in the pipeline
    origins: tuple[str | None, ...]
    schema: Schema


@dataclass(frozen=True)
class Host:
    """A step in Python or pyarrow between kernels: map_batches, explode, or expressions LLVM cannot do well.

    `origins` gives, for internal columns of `items` and steps, what the user wrote.
    """

    input: Node
    op: ops.MapBatches | ops.Explode | ops.AssignWindows | None
    items: tuple[Named, ...] = ()
    origins: tuple[Named, ...] = field(default=(), compare=False)

    def origin(self, item: Named) -> Expr:
        """What the user wrote for a column of this step."""
        return next((named.expr for named in self.origins if named.name == item.name), item.expr)

    @cached_property
    def schema(self) -> Schema:
        if self.op is not None:
            return self.op.schema
        return Schema(tuple(Field(i.name, type_of(i.expr), i.expr.nullable) for i in self.items))


@dataclass(frozen=True, slots=True)
class Limit:
    """The first rows in order."""

    input: Node
    count: int

    @property
    def schema(self) -> Schema:
        return _passed(self).schema


@dataclass(frozen=True, slots=True)
class Sort:
    """All rows in the order of some columns (name, descending), or the first `count` of them."""

    input: Node
    by: tuple[tuple[str, bool], ...]
    nulls_last: bool
    count: int | None

    @property
    def schema(self) -> Schema:
        return _passed(self).schema


@dataclass(frozen=True)
class Over:
    """The rows with columns that are computed over other rows of their partition (`ir/over.py`), of columns alone.

    A partition has equal `keys`, and is in the order of `by` (name, descending), ties in the order of the input.
    """

    input: Node
    keys: tuple[str, ...]
    by: tuple[tuple[str, bool], ...]
    nulls_last: bool
    calls: tuple[OverCall, ...]

    @cached_property
    def schema(self) -> Schema:
        added = (Field(call.name, type_of(call.agg), call.agg.nullable) for call in self.calls)
        return Schema((*self.input.schema, *added))


@dataclass(frozen=True, slots=True)
class Union:
    """The batches of each input in turn."""

    inputs: tuple[Node, ...]
    schema: Schema


Node = Scan | Pipeline | WindowAggregate | Process | OuterJoin | Host | Limit | Sort | Over | Union


def _passed(node: Node) -> Node:
    """The node whose columns come through nodes that change none."""
    while isinstance(node, Limit | Sort):
        node = node.input
    return node


def identity(schema: Schema) -> tuple[Named, ...]:
    """Every column as it is."""
    return tuple(Named(f.name, Col(f.name, f.dtype, f.nullable)) for f in schema)


def inputs(node: Node) -> tuple[Node, ...]:
    """The nodes that feed this one: tables that it probes, then its rows."""
    match node:
        case Scan():
            return ()
        case Pipeline() | WindowAggregate():
            return (*(table.input for _, table in node.joins), node.input)
        case Union():
            return node.inputs
        case _:
            return (node.input,)


def walk_nodes(root: Node) -> Iterator[Node]:
    """Every node of a program once, the tables of its joins included, inputs before what they feed."""
    seen: set[int] = set()
    waiting: list[tuple[Node, bool]] = [(root, False)]
    while waiting:
        node, is_over = waiting.pop()
        if is_over:
            yield node
        elif id(node) not in seen:
            seen.add(id(node))
            waiting.append((node, True))
            waiting += [(below, False) for below in reversed(inputs(node))]
