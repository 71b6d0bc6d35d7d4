"""The body of a compiled `@si.udf`: small typed trees with Python's meaning, made by `scalein.udf` from an AST.

Everything is decided here that a type checker decides: each local has one type (int widens to float where both are
assigned), conversions are spelled out, a value that may be None says so, no local is read before it is set, and no
statement stands where it cannot be reached. Constants are `Lit`. The trees are values: they pickle, compare and hash,
and their repr is part of the key under which machine code is cached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import import_module

import pyarrow as pa

from scalein.dtypes import DType, Kind, from_arrow_type
from scalein.ir.exprs import Expr, Lit

# --- types that only udfs have, as Arrow would write them

TEXTS = DType(Kind.NESTED, nested=pa.list_(pa.string()))  # the pieces that `split` gives
NOTHING = DType(Kind.NESTED, nested=pa.null())  # of an item that is None and whose type is not known yet
Item = tuple[DType, bool]  # of a tuple: its type, and whether it may be None


def tuple_of(items: Sequence[Item]) -> DType:
    """The type of a tuple.

    >>> from scalein.dtypes import F64, I64
    >>> tuple_of([(I64, False), (F64, True)]).arrow
    StructType(struct<0: int64 not null, 1: double>)
    """
    fields = [pa.field(str(place), dtype.arrow, nullable) for place, (dtype, nullable) in enumerate(items)]
    return DType(Kind.NESTED, nested=pa.struct(fields))


def is_tuple(dtype: DType | None) -> bool:
    return dtype is not None and dtype.nested is not None and pa.types.is_struct(dtype.nested)


def items_of(dtype: DType) -> list[Item]:
    """The items of a tuple's type."""
    assert dtype.nested is not None
    return [(from_arrow_type(field.type), field.nullable) for field in dtype.nested]


# --- expressions -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Local:
    """A parameter or variable. `nullable` says whether it may be None at this place."""

    name: str
    dtype: DType
    nullable: bool = False


@dataclass(frozen=True, slots=True)
class Apply:
    """An operator or builtin over arguments that are all needed; `line` is named when it fails.

    Arguments are not None, except for those of `is_none`, `truth`, `tuple` and the conversions, which keep None.
    """

    fn: str
    args: tuple[Part, ...]
    dtype: DType
    nullable: bool = False
    line: int = 0


@dataclass(frozen=True, slots=True)
class Choose:
    """`then if condition else otherwise`; both have the type."""

    condition: Part
    then: Part
    otherwise: Part
    dtype: DType
    nullable: bool = False


@dataclass(frozen=True, slots=True)
class Either:
    """`left and right` or `left or right`: the operand that decides, as in Python."""

    fn: str
    left: Part
    right: Part
    dtype: DType
    nullable: bool = False


@dataclass(frozen=True, slots=True)
class Let:
    """`body`, in which the local `name` is `value`: the middle of `a < b() < c` is computed once."""

    name: str
    value: Part
    body: Part
    dtype: DType
    nullable: bool = False


@dataclass(frozen=True, slots=True)
class Invoke:
    """A call of another udf."""

    udf: Udf
    args: tuple[Part, ...]
    dtype: DType
    nullable: bool = False


@dataclass(frozen=True, slots=True)
class RingRead:
    """Of a field that is a ring: its `len`, an `item` by number, or the `sum`, `min` or `max` of its values."""

    fn: str
    name: str
    args: tuple[Part, ...]
    dtype: DType
    line: int = 0
    nullable: bool = False


Part = Lit | Local | Apply | Choose | Either | Let | Invoke | RingRead

# --- statements --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Assign:
    name: str
    value: Part


@dataclass(frozen=True, slots=True)
class If:
    condition: Part
    then: tuple[Statement, ...]
    otherwise: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class ForRange:
    """`for name in range(start, stop, step)`; the bounds are computed once."""

    name: str
    start: Part
    stop: Part
    step: Part
    body: tuple[Statement, ...]
    line: int


@dataclass(frozen=True, slots=True)
class ForEach:
    """`for name in values`, which are the characters of a text or the pieces of a split one; computed once."""

    name: str
    values: Part
    body: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class While:
    condition: Part
    body: tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class Return:
    value: Part | None  # None in a method, which returns nothing


@dataclass(frozen=True, slots=True)
class Break:
    pass


@dataclass(frozen=True, slots=True)
class Continue:
    pass


@dataclass(frozen=True, slots=True)
class Yield:
    """Gives a row, of these values."""

    values: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class RingAppend:
    """Appends a value to a field that is a ring."""

    name: str
    value: Part


Statement = RingAppend | Assign | If | ForRange | ForEach | While | Return | Break | Continue | Yield

# --- functions ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Variable:
    """A parameter or local: `nullable` says whether it may ever hold None."""

    name: str
    dtype: DType
    nullable: bool = False

    def __repr__(self) -> str:
        return f"{self.name}: {self.dtype!r}{'?' if self.nullable else ''}"


@dataclass(frozen=True, slots=True)
class Udf:
    """A compiled function. Where a parameter that is not Optional gets a null, the result is null without a call."""

    name: str
    file: str
    params: tuple[Variable, ...]
    locals: tuple[Variable, ...]
    dtype: DType
    nullable: bool
    body: tuple[Statement, ...]

    def place(self, line: int) -> str:
        """Where in the user's file something failed, for errors."""
        return f"{self.file}:{line}"


@dataclass(frozen=True, slots=True)
class RingField:
    """A field that is a ring of `size` values."""

    name: str
    dtype: DType
    size: int
    appends: bool  # a method appends to it


@dataclass(frozen=True, slots=True)
class Method:
    """A compiled method, which changes fields of its object. Its parameters are the fields of objects, called `self.x`
    and `other.x`, and then the arguments.
    """

    name: str  # with its class
    file: str
    params: tuple[Variable, ...]
    locals: tuple[Variable, ...]
    changes: tuple[str, ...]  # the fields that it assigns to
    body: tuple[Statement, ...]
    rings: tuple[RingField, ...] = ()  # the fields that are rings

    def place(self, line: int) -> str:
        """Where in the user's file something failed, for errors."""
        return f"{self.file}:{line}"


@dataclass(frozen=True, slots=True)
class PythonUdf:
    """A function that stays Python (`compile=False`), called row by row between kernels.

    It pickles as functions do: by module and name, where that leads to the udf again.
    """

    name: str
    params: tuple[Variable, ...]
    dtype: DType
    nullable: bool
    call: Callable[..., object]

    def __reduce__(self) -> tuple[object, ...]:
        module, name = self.call.__module__, self.call.__qualname__
        if module != "__main__" and "<locals>" not in name and _by_name(module, name) == self:
            return _by_name, (module, name)
        return PythonUdf, (self.name, self.params, self.dtype, self.nullable, self.call)


def _by_name(module: str, name: str) -> object:
    """The Python function inside the udf of this name in a module; None if there is no such udf."""
    found: object = import_module(module)
    for part in (*name.split("."), "ir"):
        found = getattr(found, part, None)
    return found


AnyUdf = Udf | PythonUdf


def walk(root: object) -> Iterator[tuple[object, int]]:
    """A udf or its statements, every statement and part below and the udfs that it calls, each with its depth."""
    waiting: list[tuple[object, int]] = [(root, 0)]
    while waiting:
        node, depth = waiting.pop()
        if isinstance(node, tuple):
            waiting += [(each, depth) for each in node]
        elif is_dataclass(node) and not isinstance(node, DType):
            yield node, depth
            waiting += [(getattr(node, part.name), depth + 1) for part in fields(node)]


SHORT_ROUNDS = 256


def is_short(statement: ForRange) -> bool:
    """Whether a loop ends soon whatever the data, so that it need not check for cancellation.

    Without that question LLVM can unroll it, and compute several rows at once.
    """
    bounds = [part.value for part in (statement.start, statement.stop, statement.step) if isinstance(part, Lit)]
    if len(bounds) < 3 or bounds[2] == 0 or has_loops(statement.body):
        return False
    start, stop, step = (int(str(bound)) for bound in bounds)
    return len(range(start, stop, step)) <= SHORT_ROUNDS


def has_loops(root: object) -> bool:
    """Whether a udf or its statements, or a udf that they call, loop."""
    return any(isinstance(node, ForRange | ForEach | While) for node, _ in walk(root))


# Methods of text that ask something of all its characters.
CLASSES = ("isalpha", "isalnum", "isdigit", "isdecimal", "isnumeric", "isspace", "isprintable", "isascii", "isupper",
           "islower")  # fmt: skip
_BUILDING = ("concat", "text", "fixed", "replace", "upper", "lower", "casefold", "titled", "pad", "zfill", "repeat",
             "reversed", "join", "chr", "grouped")


def builds_text(root: object) -> bool:
    """Whether a udf, or one that it calls, makes text that is no part of another: that takes memory."""
    return any(isinstance(node, Apply) and node.fn in _BUILDING for node, _ in walk(root))


def can_be_null(udf: AnyUdf, args: Sequence[Expr]) -> bool:
    """Whether a call can be null: the function may return None, or is not called because of a null argument."""
    skipped = (arg.nullable and not param.nullable for arg, param in zip(args, udf.params, strict=True))
    return udf.nullable or any(skipped)


_SMALL = 1 << 40  # a block of sums of such numbers is far from overflow


def unchecked_counts(method: Method, starts: Mapping[str, object]) -> Method:
    """The method for an object that begins anew and sees one block of rows: what only counts is not checked.

    `starts` are the first values of its int fields. One that is changed by `self.n += 1` and its like cannot overflow.
    """
    given: dict[str, list[Part]] = {}
    for node, _ in walk(method.body):
        if isinstance(node, Assign | Let):
            given.setdefault(node.name, []).append(node.value)
    counters = {name for name, start in starts.items() if isinstance(start, int) and abs(start) < _SMALL
                and all(_counts(value, name) for value in given.get(name, ()))}

    def unchecked(block: tuple[Statement, ...]) -> tuple[Statement, ...]:
        return tuple(map(each, block))

    def each(statement: Statement) -> Statement:
        match statement:
            case If(condition, then, otherwise):
                return If(condition, unchecked(then), unchecked(otherwise))
            case Assign(name, Apply(fn) as value) if name in counters:
                return Assign(name, replace(value, fn=f"{fn}_small"))
            case _:
                return statement

    return replace(method, body=unchecked(method.body))


def _counts(value: Part, name: str) -> bool:
    """Whether it is the field plus or minus a small constant."""
    match value:
        case Apply("add" | "sub", (Local(of), Lit(int(step)))):
            return of == name and abs(step) < _SMALL
        case _:
            return False
