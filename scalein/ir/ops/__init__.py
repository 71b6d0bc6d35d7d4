"""Dataflow operators as the user wrote them: immutable, typed, each with its schema.

Every expression inside is resolved: `flow.py` resolves it against the input's schema before it
builds the op, so an op that exists is well typed. `select`, `with_columns`, `drop`, `rename` and
`cast` are all a `Project`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow as pa

from scalein.dtypes import Field, Schema, element_of, from_arrow_type
from scalein.errors import NOWHERE, SourceLoc
from scalein.ir.exprs import Expr, Named, NamedAgg, type_of


@dataclass(frozen=True, slots=True)
class Source:
    """Batches of a given Arrow schema; `data` is None for an unbound input (`si.flow(schema)`).

    `data` is a zero-argument callable giving an iterator of record batches, or a pa.Table. It takes
    no part in equality: a plan is compiled for a schema. `columns` is what the plan reads, in order
    (pruning narrows it).
    """

    name: str
    arrow: pa.Schema
    columns: tuple[str, ...]
    data: object = field(default=None, compare=False, repr=False)
    at: SourceLoc = field(default=NOWHERE, compare=False, repr=False)

    @property
    def schema(self) -> Schema:
        return Schema.from_arrow(pa.schema([self.arrow.field(name) for name in self.columns]))


@dataclass(frozen=True, slots=True)
class Filter:
    """Keep the rows for which `predicate` is true; null counts as false."""

    input: Op
    predicate: Expr
    at: SourceLoc = field(default=NOWHERE, compare=False, repr=False)

    @property
    def schema(self) -> Schema:
        return self.input.schema


@dataclass(frozen=True, slots=True)
class Project:
    """New columns in order, each an expression over the input."""

    input: Op
    items: tuple[Named, ...]
    at: SourceLoc = field(default=NOWHERE, compare=False, repr=False)

    @property
    def schema(self) -> Schema:
        return Schema(tuple(Field(i.name, type_of(i.expr), i.expr.nullable) for i in self.items))


@dataclass(frozen=True, slots=True)
class Limit:
    """The first `count` rows in the source's order."""

    input: Op
    count: int
    at: SourceLoc = field(default=NOWHERE, compare=False, repr=False)

    @property
    def schema(self) -> Schema:
        return self.input.schema


@dataclass(frozen=True, slots=True)
class Distinct:
    """The first row, in the source's order, of each value of the columns `keys`; null is a value of its own."""

    input: Op
    keys: tuple[str, ...]
    at: SourceLoc = field(default=NOWHERE, compare=False, repr=False)

    @property
    def schema(self) -> Schema:
        return self.input.schema


@dataclass(frozen=True, slots=True)
class By:
    """What rows are ordered by: an expression, and whether the greatest value comes first."""

    expr: Expr
    descending: bool = False


@dataclass(frozen=True, slots=True)
class Sort:
    """All rows in order, or the first `count` of them: NaN is the greatest, ties keep the source's order.

    Nulls come first, or last with `nulls_last`, whatever the direction.
    """

    input: Op
    by: tuple[By, ...]
    nulls_last: bool = False
    count: int | None = None
    at: SourceLoc = field(default=NOWHERE, compare=False, repr=False)

    @property
    def schema(self) -> Schema:
        return self.input.schema


@dataclass(frozen=True, slots=True)
class Union:
    """The rows of the first input, then of the next; all have the first one's names and types."""

    inputs: tuple[Op, ...]
    at: SourceLoc = field(default=NOWHERE, compare=False, repr=False)

    @property
    def schema(self) -> Schema:
        first = self.inputs[0].schema
        return Schema(tuple(Field(f.name, f.dtype, any(i.schema.fields[k].nullable for i in self.inputs))
                            for k, f in enumerate(first.fields)))


@dataclass(frozen=True, slots=True)
class MapBatches:
    """The user's Python function on Arrow batches: the escape hatch."""

    input: Op
    fn: Callable[[pa.RecordBatch], pa.RecordBatch]
    arrow: pa.Schema
    at: SourceLoc = field(default=NOWHERE, compare=False, repr=False)

    @property
    def schema(self) -> Schema:
        return Schema.from_arrow(self.arrow)


@dataclass(frozen=True, slots=True)
class Explode:
    """A row for each element of a list column, in order, the element in its place; none for a null or empty list."""

    input: Op
    column: str
    at: SourceLoc = field(default=NOWHERE, compare=False, repr=False)

    @property
    def schema(self) -> Schema:
        return Schema(tuple(self._element(f) if f.name == self.column else f for f in self.input.schema))

    @staticmethod
    def _element(column: Field) -> Field:
        found = element_of(column.dtype)
        assert found is not None, f"{column!r} is no list"
        return Field(column.name, from_arrow_type(found.type, column.name), found.nullable)


@dataclass(frozen=True, slots=True)
class Join:
    """Rows of `left` with the matching rows of a static table (`right`, read whole first).

    `how` is inner, left, semi or anti. Keys are expressions of equal types on both sides; `keep` maps
    output name -> column of the right side (never its keys). Null keys match nothing.
    """

    left: Op
    right: Op
    left_keys: tuple[Expr, ...]
    right_keys: tuple[Expr, ...]
    how: str
    keep: tuple[tuple[str, str], ...] = ()
    at: SourceLoc = field(default=NOWHERE, compare=False, repr=False)

    @property
    def schema(self) -> Schema:
        fields = list(self.left.schema.fields)
        for name, column in self.keep:
            f = self.right.schema[column]
            fields.append(Field(name, f.dtype, f.nullable or self.how == "left"))
        return Schema(tuple(fields))


@dataclass(frozen=True, slots=True)
class Window:
    """Half-open windows [k*every, k*every + size), aligned to the epoch, in units of the time column.

    Tumbling is `every == size`. `size` is a multiple of nothing in particular: the slices that windows
    share are gcd(size, every) long.
    """

    time: Expr
    size: int
    every: int

    @property
    def is_tumbling(self) -> bool:
        return self.size == self.every


@dataclass(frozen=True, slots=True)
class Aggregate:
    """Groups by `keys` (and window): keys, window_start and window_end if windowed, then `aggs`."""

    input: Op
    keys: tuple[Named, ...]
    window: Window | None
    aggs: tuple[NamedAgg, ...]
    at: SourceLoc = field(default=NOWHERE, compare=False, repr=False)

    @property
    def schema(self) -> Schema:
        fields = [Field(k.name, type_of(k.expr), k.expr.nullable) for k in self.keys]
        if self.window is not None:
            dtype = type_of(self.window.time)
            fields += [Field("window_start", dtype, False), Field("window_end", dtype, False)]
        fields += [Field(a.name, type_of(a.agg), a.agg.nullable) for a in self.aggs]
        return Schema(tuple(fields))


@dataclass(frozen=True, slots=True)
class Watermark:
    """Event time of a job: watermark = max(column) - delay. Bounded runs need none and ignore it."""

    input: Op
    column: str
    delay: int
    at: SourceLoc = field(default=NOWHERE, compare=False, repr=False)

    @property
    def schema(self) -> Schema:
        return self.input.schema


Op = Source | Filter | Project | Limit | Distinct | Sort | Union | MapBatches | Explode | Join | Aggregate | Watermark


def inputs(op: Op) -> tuple[Op, ...]:
    """The ops that feed this one, left to right."""
    match op:
        case Source():
            return ()
        case Union():
            return op.inputs
        case Join():
            return (op.left, op.right)
        case _:
            return (op.input,)
