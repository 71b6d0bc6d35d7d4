"""Scalar expressions: a column, a literal, or a call of a function from `functions.py`.

Two forms share these classes. What the user wrote has no types (`dtype is None`); `resolve` turns
it into typed nodes with every implicit cast spelled out. From then on a type is looked up, never
inferred. Three node classes are enough because what a function means, whether it can fail, and
how it is typed stands once, in `functions.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, TypeVar

from scalein.dtypes import DType
from scalein.errors import NOWHERE, SourceLoc
from scalein.ir.digest import digest_of

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
    """A function of `functions.FUNCTIONS` over arguments; `params` are Python constants (names, units, sets).

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
        for call in _calls_without_digest(self):
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
        texts: dict[int, str] = {}
        for node in post_order(self):
            if isinstance(node, Call):
                args = ", ".join(texts[id(arg)] for arg in node.args) + ("," if len(node.args) == 1 else "")
                texts[id(node)] = (f"Call(fn={node.fn!r}, args=({args}), params={node.params!r}, dtype={node.dtype!r}, "
                                   f"nullable={node.nullable!r})")
            else:
                texts[id(node)] = repr(node)
        return texts[id(self)]

    def __reduce__(self) -> tuple[object, ...]:
        """Parts that lie deep come first, so that pickle finds them known when it comes to what holds them."""
        first = tuple(deep_parts(post_order(self), lambda node: node.args if isinstance(node, Call) else ()))
        return _unpickled, (first, self.fn, self.args, self.params, self.dtype, self.nullable, self.at)


def _unpickled(first: tuple[Expr, ...], *fields: object) -> Call:
    return Call(*fields)  # type: ignore[arg-type]


class Deep(Protocol):
    """A part of a tree, which knows how far it is to the leaves."""

    @property
    def depth(self) -> int: ...


DeepPart = TypeVar("DeepPart", bound=Deep)


def deep_parts(parts: list[DeepPart], below: Callable[[DeepPart], Iterable[DeepPart]]) -> Iterator[DeepPart]:
    """Of the parts of a deep tree, inputs first, some that leave less than `2 * _STRIDE` between them on any way."""
    if parts[-1].depth <= 2 * _STRIDE:
        return
    wanted = {id(each) for part in parts for each in below(part)
              if each.depth > _STRIDE and each.depth // _STRIDE < part.depth // _STRIDE}
    yield from (part for part in parts if id(part) in wanted)


def _calls_without_digest(root: Call) -> list[Call]:
    """The calls at and below `root` whose digest was never asked for, arguments before what holds them."""
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
            waiting += [(arg, False) for arg in call.args if isinstance(arg, Call) and not hasattr(arg, "_digest")]
    return found


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


def post_order(expr: Expr) -> list[Expr]:
    """The expression and everything below it, each once, arguments before what holds them."""
    found: list[Expr] = []
    seen: set[int] = set()
    waiting: list[tuple[Expr, bool]] = [(expr, False)]
    while waiting:
        node, is_over = waiting.pop()
        if is_over:
            found.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            if isinstance(node, Call) and node.args:
                waiting.append((node, True))
                waiting += [(arg, False) for arg in reversed(node.args)]
            else:
                found.append(node)
    return found


def columns(expr: Expr) -> set[str]:
    """Names of the columns an expression reads."""
    return {node.name for node in walk(expr) if isinstance(node, Col)}


def type_of(expr: Expr | Agg) -> DType:
    """The type of a resolved expression."""
    assert expr.dtype is not None, f"unresolved expression {expr!r}"
    return expr.dtype
