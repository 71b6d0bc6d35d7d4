"""Scalar expressions: a column, a literal, or a call of a function from `functions.py`.

Two forms share these classes. What the user wrote has no types (`dtype is None`); `resolve` turns
it into typed nodes with every implicit cast spelled out. From then on a type is looked up, never
inferred. Three node classes are enough because what a function means, whether it can fail, and
how it is typed stands once, in `functions.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from scalein.dtypes import DType
from scalein.errors import NOWHERE, SourceLoc


@dataclass(frozen=True, slots=True)
class Col:
    """A column of the input, by name."""

    name: str
    dtype: DType | None = None
    nullable: bool = True


@dataclass(frozen=True, slots=True)
class Lit:
    """A constant. Typed literals hold the physical value: an int for times, None for null."""

    value: object
    dtype: DType | None = None

    @property
    def nullable(self) -> bool:
        return self.value is None

    # True == 1 == 1.0 in Python, and they must not be one literal here; nor may 0.0 be -0.0.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lit) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[object, ...]:
        return (type(self.value), repr(self.value), self.dtype)


@dataclass(frozen=True, slots=True)
class Call:
    """A function of `functions.FUNCTIONS` over arguments; `params` are Python constants (names, units, sets)."""

    fn: str
    args: tuple[Expr, ...]
    params: tuple[object, ...] = ()
    dtype: DType | None = None
    nullable: bool = True
    at: SourceLoc = field(default=NOWHERE, compare=False, repr=False)


Expr = Col | Lit | Call


@dataclass(frozen=True, slots=True)
class Agg:
    """An aggregate of `functions.AGGREGATES` over arguments, typed like expressions; `params` are Python constants."""

    fn: str
    args: tuple[Expr, ...]
    dtype: DType | None = None
    nullable: bool = True
    params: tuple[object, ...] = ()
    at: SourceLoc = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Named:
    """An expression or aggregate with its output name."""

    name: str
    expr: Expr


@dataclass(frozen=True, slots=True)
class NamedAgg:
    name: str
    agg: Agg


def walk(expr: Expr) -> Iterator[Expr]:
    """The expression and everything below it, parents first."""
    yield expr
    if isinstance(expr, Call):
        for arg in expr.args:
            yield from walk(arg)


def columns(expr: Expr) -> set[str]:
    """Names of the columns an expression reads."""
    return {node.name for node in walk(expr) if isinstance(node, Col)}


def type_of(expr: Expr | Agg) -> DType:
    """The type of a resolved expression."""
    assert expr.dtype is not None, f"unresolved expression {expr!r}"
    return expr.dtype
