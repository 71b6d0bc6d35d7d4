"""One declaration a function: how calls are typed, what null means to them, whether they fail, how they read.

`declare` puts a `Function` into `REGISTRY`; the modules of this package do so for all there are. Whatever else needs to
know something of functions looks here: passes, the printer, kernels, Spark, and the tests. Machine code is in
`llvm_backend/functions/`, one `@lowers` each.

A function *can fail* when a live row may have no value (overflow, zero divisor, impossible cast); passes may drop such
a call but never run it for more rows. A *host* function has no lowering: pyarrow computes it as a step of its own,
which `explain` names.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

from scalein.dtypes import DType, Kind
from scalein.ir.exprs import Call, Col, Expr, Lit, type_of, walk

Args = tuple[Expr, ...]
Rule = Callable[[Call, Args], Expr]
Fold = Callable[[Call], Callable[..., Any] | None]

ANY = -1  # any number of arguments


def never(call: Call) -> bool:
    return False


def always(call: Call) -> bool:
    return True


class Nulls(Enum):
    """What null arguments do."""

    STRICT = auto()  # null wherever an argument is null; elsewhere only as `gives_null` says
    NEVER = auto()  # takes null as a value, and is never null itself
    OWN = auto()  # as `nullable` says


class Moved(NamedTuple):
    """A value that is at least so much greater than another; `is_exact`: and at most."""

    of: Expr
    by: int
    is_exact: bool = True


def nowhere(call: Call) -> Moved | None:
    return None


@dataclass(frozen=True, slots=True)
class Function:
    """A function that expressions may call. Callables look at a typed call alone, not at the calls among its arguments.

    `show` is its text in Python: `{0}` and `{1}` are arguments, `{args}` are all, `{params}` are the constants in
    parentheses, `{values}` those of a list, `{span}` a length of time, `{type}` the type, `{name}` the name of a udf,
    `{fields}` the arguments under the names that the constants are.
    `fold` gives the function of its arguments' values in Python, if that is bit-equal to the kernel of a typed call.
    `duckdb` is SQL over `{0}`, `{1}`, `{args}` and `{params[0]}`, and empty where the meaning differs or depends on
    types.
    """

    name: str  # stable: checkpoints and caches know it
    rule: Rule  # a call and its arguments, typed but for plain constants -> the typed call, implicit casts spelled out
    arity: int = 1
    nulls: Nulls = Nulls.STRICT
    gives_null: Callable[[Call], bool] = never  # of STRICT: whether it may be null in a row without null arguments
    nullable: Callable[[Call, Sequence[Expr]], bool] | None = None  # of OWN: whether it may be null
    fallible: Callable[[Call], bool] = never
    host: Callable[[Call], bool] = never  # pyarrow computes it, by the function `arrow` of scalein.arrow_functions
    arrow: str = ""
    canonical: bool = False  # gives the same for -0.0 and 0.0, and for every NaN, as grouping does
    fold: Fold | None = None
    spelled_out: bool = False  # its rule gives other calls, so no typed plan has it
    moved: Callable[[Call], Moved | None] = nowhere  # which argument it moves by a constant
    makes_text: Callable[[Call], bool] = never  # of bytes that no argument has: they stay until the block ends
    show: str = ""
    sql: tuple[str, ...] = ()
    duckdb: str = ""
    spark: str = ""  # the method of pyspark's Column, or else the SQL function, that means the same
    spark_if: Callable[[Call], bool] = always  # whether it does for the types of a typed call
    spark_checked: str = ""  # of integers: the SQL function that is null where this one overflows
    numpy: tuple[str, ...] = ()  # ufuncs that mean the same

    @property
    def sign(self) -> str:
        """The operator that stands for it in Python, else its name."""
        is_operator = self.show and not re.search(r"[.(]", self.show)
        return re.sub(r"\{\w+\}", "", self.show).strip() if is_operator else self.name


REGISTRY: dict[str, Function] = {}


def declare(*functions: Function) -> None:
    """Adds functions to the registry; a name belongs to one function for ever."""
    for function in functions:
        assert function.name not in REGISTRY, f"{function.name} is declared twice"
        assert (function.nulls is Nulls.OWN) == (function.nullable is not None), f"{function.name}: say what null does"
        REGISTRY[function.name] = function


def nullable(call: Call, args: Sequence[Expr]) -> bool:
    """Whether a call of these arguments may be null; its own `nullable` does not count."""
    function = REGISTRY[call.fn]
    if function.nullable is not None:
        return function.nullable(call, args)
    return function.nulls is Nulls.STRICT and (any(arg.nullable for arg in args) or function.gives_null(call))


def typed(call: Call, args: Sequence[Expr], dtype: DType) -> Call:
    """The call with its arguments and its type, and null as its function declares it."""
    found = Call(call.fn, tuple(args), call.params, dtype, at=call.at)
    return found if nullable(found, args) else Call(found.fn, found.args, found.params, dtype, False, found.at)


def is_strict(call: Call) -> bool:
    """Whether a call is null exactly where one of its arguments is."""
    function = REGISTRY[call.fn]
    return function.nulls is Nulls.STRICT and not function.gives_null(call)


def fallible(call: Call) -> bool:
    """Whether this typed call itself can fail in a live row, given values for its arguments."""
    return REGISTRY[call.fn].fallible(call)


def can_fail(expr: Expr) -> bool:
    """Whether anything in a typed expression can fail in a live row; what is only tried gives null instead."""
    waiting: list[Expr] = [expr]
    seen: set[int] = set()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, Call) or id(node) in seen:
            continue
        seen.add(id(node))
        if node.fn == "try" and isinstance(node.args[0], Call):
            waiting += node.args[0].args
        elif fallible(node):
            return True
        else:
            waiting += node.args
    return False


def is_host(call: Call) -> bool:
    """Whether pyarrow computes this typed call, and no kernel does."""
    return REGISTRY[call.fn].host(call)


def has_host(expr: Expr) -> bool:
    """Whether anything in a typed expression is computed by pyarrow."""
    return isinstance(expr, Call) and any(isinstance(node, Call) and is_host(node) for node in walk(expr))


def makes_text(expr: Expr) -> bool:
    """Whether a kernel that computes a typed expression stores text of its own."""
    return isinstance(expr, Call) and any(
        isinstance(node, Call) and REGISTRY[node.fn].makes_text(node) and not is_host(node) for node in walk(expr))


# --- calls of constants ------------------------------------------------------------------------------------------


class NoValue(ArithmeticError):
    """A call of constants fails, or is left to the kernels."""


def evaluate(call: Call) -> Lit | None:
    """The value of a strict call whose arguments are all literals, or None if it has none here.

    Only what Python computes bit for bit like the kernels has a `fold`: integers, comparisons, casts, and the float
    operations that IEEE 754 rounds exactly. A call that would fail, or that has no `fold`, stays in the plan, so that
    it fails (or not) where and when the user's rows reach it.

    >>> from scalein.dtypes import I64
    >>> evaluate(Call("add", (Lit(1, I64), Lit(2, I64)), dtype=I64))
    Lit(value=3, dtype=i64)
    """
    function = REGISTRY[call.fn]
    values: list[Any] = [arg.value for arg in call.args if isinstance(arg, Lit)]
    if len(values) < len(call.args) or function.nulls is not Nulls.STRICT:
        return None
    if None in values:
        return Lit(None, call.dtype)
    compute = _in_python(call)
    try:
        return None if compute is None else Lit(compute(*values), call.dtype)
    except (ArithmeticError, ValueError):
        return None


def python_function(expr: Expr) -> Callable[[Any], Any] | None:
    """An expression over one column as a function of that column's values, null left out; None if a call in it has no
    `fold`. Where a value has no result here, it raises `ArithmeticError` or `ValueError`.
    """
    match expr:
        case Col():
            return lambda value: value
        case Lit(constant):
            return lambda value: constant
    compute = _in_python(expr)
    args = [arg for arg in map(python_function, expr.args) if arg is not None]
    if compute is None or len(args) < len(expr.args):
        return None
    if len(args) == 1:
        (arg,) = args
        return lambda value: compute(arg(value))
    return lambda value: compute(*[arg(value) for arg in args])


def _in_python(call: Call) -> Callable[..., Any] | None:
    """The call as a function of its arguments' values, with a result as its type holds it."""
    fold = REGISTRY[call.fn].fold
    compute = None if fold is None else fold(call)
    if compute is None:
        return None
    if type_of(call.args[0]).kind is Kind.F32:
        compute = _of_f32(compute)
    match type_of(call).kind:
        case Kind.BOOL | Kind.STR | Kind.BIN | Kind.F64:
            return compute
        case Kind.F32:
            return _to_f32_of(compute)
        case _:
            return _checked(compute, *type_of(call).int_range())


def _of_f32(compute: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values: compute(*map(_to_f32, values))


def _to_f32_of(compute: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values: _to_f32(compute(*values))


def _checked(compute: Callable[..., Any], low: int, high: int) -> Callable[..., Any]:
    def checked(*values: Any) -> Any:
        found = compute(*values)
        if not low <= found <= high:
            raise NoValue
        return found

    return checked


def _to_f32(value: float) -> float:
    """Rounded to 32 bits. After + - * / and sqrt in 64 bits that is the same as computing in 32."""
    try:
        rounded: float = struct.unpack("f", struct.pack("f", value))[0]
        return rounded
    except OverflowError:
        return math.copysign(math.inf, value)
