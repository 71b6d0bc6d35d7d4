"""Scalar expressions: a column, a literal, or a call of a function from `functions/`.

Two forms share these classes. What the user wrote has no types (`dtype is None`); `resolve` turns
it into typed nodes with every implicit cast spelled out. From then on a type is looked up, never
inferred. Three node classes are enough because what a function means, whether it can fail, and
how it is typed stands once, in `functions/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, TypeVar

from scalein.dtypes import DType
from scalein.errors import NOWHERE, SourceLoc
from scalein.ir.digest import digest_of

_MAX_SHOWN = 10_000  # nodes of an expression whose repr is written out; one that shares parts can have any number
_STRIDE = 50  # levels that pickle descends at once; its limit is that of Python's stack


@dataclass(frozen=True, slots=True)
class Col:
    """A column of the input, by name."""

    name: str
    dtype: DType | None = None
    nullable: bool = True
    depth: ClassVar[int] = 0
    size: ClassVar[int] = 1


@dataclass(frozen=True, slots=True)
class Lit:
    """A constant. Typed literals hold the physical value: an int for times, None for null."""

    value: object
    dtype: DType | None = None
    depth: ClassVar[int] = 0
    size: ClassVar[int] = 1

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


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Call:
    """A function of `functions.registry.REGISTRY` over arguments; `params` are Python constants (names, units, sets).

    Expressions may be deep, and share parts: nothing here recurses. Equal means an equal digest.
    """

    fn: str
    args: tuple[Expr, ...]
    params: tuple[object, ...] = ()
    dtype: DType | None = None
    nullable: bool = True
    at: SourceLoc = field(default=NOWHERE, compare=False)
    depth: int = field(init=False, compare=False)  # calls on the longest way down
    size: int = field(init=False, compare=False)  # nodes when written out: a shared part counts for each use
    _digest: bytes = field(init=False, compare=False)  # when it has been asked for
    _deep: tuple[Call, ...] = field(init=False, compare=False)  # when it has been pickled

    def __post_init__(self) -> None:
        depth, size = 0, 1
        for arg in self.args:
            size += arg.size
            if arg.depth > depth:
                depth = arg.depth
        object.__setattr__(self, "depth", depth + 1)
        object.__setattr__(self, "size", size)

    @property
    def digest(self) -> bytes:
        """Equal for equal expressions, and for no others."""
        try:
            return self._digest
        except AttributeError:
            pass
        for call in _calls_without(self, "_digest"):
            about = digest_of("Call", (call.fn, call.args, call.params, call.dtype, call.nullable))
            object.__setattr__(call, "_digest", about)
        return self._digest

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (isinstance(other, Call) and self.fn == other.fn and self.size == other.size
                and self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        if self.size > _MAX_SHOWN:
            return f"Call(fn={self.fn!r}, digest={self.digest.hex()!r})"
        found: list[str] = []
        waiting: list[Expr | str] = [self]
        while waiting:
            part = waiting.pop()
            if not isinstance(part, Call):
                found.append(part if isinstance(part, str) else repr(part))
                continue
            found.append(f"Call(fn={part.fn!r}, args=(")
            waiting.append(f"), params={part.params!r}, dtype={part.dtype!r}, nullable={part.nullable!r})")
            for number, arg in reversed(list(enumerate(part.args))):
                waiting += ["," if len(part.args) == 1 else "", arg, ", " if number else ""]
        return "".join(found)

    def __reduce__(self) -> tuple[object, ...]:
        """Parts that lie deep come first, so that pickle finds them known when it comes to what holds them."""
        first: tuple[Expr, ...] = ()
        if self.depth > 2 * _STRIDE:
            for call in () if hasattr(self, "_deep") else _calls_without(self, "_deep"):
                below = ((arg, arg._deep) for arg in call.args if isinstance(arg, Call))
                object.__setattr__(call, "_deep", deep_parts(call, below))
            first = self._deep
        return _unpickled, (first, self.fn, self.args, self.params, self.dtype, self.nullable, self.at)


def _unpickled(first: tuple[Expr, ...], *fields: object) -> Call:
    return Call(*fields)  # type: ignore[arg-type]


class Deep(Protocol):
    """A part of a tree, which knows how far it is to the leaves."""

    @property
    def depth(self) -> int: ...


DeepPart = TypeVar("DeepPart", bound=Deep)


def deep_parts(part: DeepPart, below: Iterable[tuple[DeepPart, tuple[DeepPart, ...]]]) -> tuple[DeepPart, ...]:
    """Parts of a deep tree, inputs first, that leave less than `2 * _STRIDE` levels between them on any way down.

    `below` are the parts that stand right below it, each with its own deep parts. The tuple is that of a part below
    where nothing is added, so that pickle writes it once.
    """
    found: tuple[DeepPart, ...] = ()
    for each, deep in below:
        if each.depth > _STRIDE and each.depth // _STRIDE < part.depth // _STRIDE:
            deep = (*deep, each)
        found = tuple(dict.fromkeys((*found, *deep))) if found and deep and found is not deep else found or deep
    return found


def _calls_without(root: Call, name: str) -> list[Call]:
    """The calls at and below `root` that have no such value yet, arguments before what holds them."""
    found: list[Call] = []
    seen: set[int] = set()
    waiting: list[tuple[Call, bool]] = [(root, False)]
    while waiting:
        call, is_over = waiting.pop()
        if is_over:
            found.append(call)
        elif id(call) not in seen:
            seen.add(id(call))
            waiting.append((call, True))
            waiting += [(arg, False) for arg in call.args if isinstance(arg, Call) and not hasattr(arg, name)]
    return found


Expr = Col | Lit | Call


@dataclass(frozen=True, slots=True)
class Agg:
    """An aggregate of `aggregates.AGGREGATES` over arguments, typed like expressions; `params` are Python constants.

    `where` is the condition of `.filter(...)` as the user wrote it; a typed aggregate has it in its arguments.
    """

    fn: str
    args: tuple[Expr, ...]
    dtype: DType | None = None
    nullable: bool = True
    params: tuple[object, ...] = ()
    at: SourceLoc = field(default=NOWHERE, compare=False, repr=False)
    where: Expr | None = None


@dataclass(frozen=True, slots=True)
class AggregateResult(Col):
    """An aggregate in an expression that the user wrote, called by its text: `x.sum()` in `x.sum() / count()`.

    `GroupBy.agg` puts a column of the aggregation in its place, so typed expressions have none.
    """

    agg: Agg = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class OverResult(Col):
    """An aggregate or window function over other rows in an expression that the user wrote, called by its text.

    `by` are what rows are ordered by, each with whether the greatest value comes first. A column that an `Over`
    computes takes its place, so typed expressions have none.
    """

    agg: Agg = field(kw_only=True)
    keys: tuple[Expr, ...] = field(kw_only=True)
    by: tuple[tuple[Expr, bool], ...] = field(kw_only=True)
    rows: int | None = field(kw_only=True)
    within: object = field(kw_only=True)  # a span of time
    at: SourceLoc = field(default=NOWHERE, compare=False, kw_only=True)


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
    """The expression and everything below it, parents first; a call that several share comes once."""
    seen: set[int] = set()
    waiting = [expr]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Call):
            if id(node) in seen:
                continue
            seen.add(id(node))
            waiting += reversed(node.args)
        yield node


def args_of(expr: Expr) -> tuple[Expr, ...]:
    return expr.args if isinstance(expr, Call) else ()


def post_order(expr: Expr, parts: Callable[[Expr], Sequence[Expr]] = args_of) -> list[Expr]:
    """The expression and everything below it, each once, arguments (or other `parts`) before what holds them."""
    found: list[Expr] = []
    seen: set[int] = set()
    waiting: list[tuple[Expr, bool]] = [(expr, False)]
    while waiting:
        node, is_over = waiting.pop()
        if is_over:
            found.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            below = parts(node)
            if below:
                waiting.append((node, True))
                waiting += [(arg, False) for arg in reversed(below)]
            else:
                found.append(node)
    return found


def branches(call: Call) -> tuple[Expr, ...]:
    """Conditions and values of a chain in turn, then the last value: an if_else in the last place goes on with it."""
    found: list[Expr] = []
    last: Expr = call
    while isinstance(last, Call) and last.fn == "if_else":
        condition, value, last = last.args
        found += [condition, value]
    return (*found, last)


def columns(expr: Expr) -> set[str]:
    """Names of the columns an expression reads."""
    return {node.name for node in walk(expr) if isinstance(node, Col)}


def type_of(expr: Expr | Agg) -> DType:
    """The type of a resolved expression."""
    assert expr.dtype is not None, f"unresolved expression {expr!r}"
    return expr.dtype
