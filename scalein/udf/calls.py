"""The functions of `math` and the builtins that a udf may call, by the objects that names refer to."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from scalein.dtypes import BOOL, F64, I64, STR
from scalein.ir.exprs import Lit
from scalein.ir.udf import Apply, Part
from scalein.udf.conversions import convert, truth
from scalein.udf.known import Known

if TYPE_CHECKING:
    from scalein.udf.exprs import Exprs

Handler = Callable[["Exprs", ast.Call, Known], Part | None]

# Of one float. A NaN of a number, or an infinity of a finite number, is an error, as in Python.
FLOAT_1 = ("sqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan",
           "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "fabs", "cbrt", "erf", "erfc")  # fmt: skip
FLOAT_2 = ("pow", "atan2", "fmod", "copysign", "hypot")
TESTS = ("isnan", "isinf", "isfinite")


def call(exprs: Exprs, node: ast.Call, called: object, known: Known) -> Part | None:
    """The call of a builtin; None if it cannot be compiled, or not with these arguments."""
    handler = _HANDLERS.get(id(called))
    return None if handler is None else handler(exprs, node, known)


def bind_arguments(called: object, args: Sequence[ast.expr], keywords: Sequence[ast.keyword]) -> list[object]:
    """The argument of each parameter: a syntax tree, or the default's value. Raises TypeError as a call would."""
    named = {keyword.arg: keyword.value for keyword in keywords}
    if None in named or any(isinstance(arg, ast.Starred) for arg in args):
        raise TypeError("starred arguments are not supported")
    signature = inspect.signature(called.python)  # type: ignore[attr-defined]
    found = signature.bind(*args, **{str(name): value for name, value in named.items()})
    found.apply_defaults()
    return [found.arguments[name] for name in signature.parameters]


def _floats(fn: str, count: int) -> Handler:
    def handler(exprs: Exprs, node: ast.Call, known: Known) -> Part | None:
        if len(node.args) != count:
            return None
        return Apply(fn, tuple(exprs.floating(arg, known) for arg in node.args), F64, line=node.lineno)

    return handler


def _test(fn: str) -> Handler:
    def handler(exprs: Exprs, node: ast.Call, known: Known) -> Part | None:
        return Apply(fn, (exprs.floating(node.args[0], known),), BOOL) if len(node.args) == 1 else None

    return handler


def _to_int(fn: str) -> Handler:
    """int, round, floor, ceil, trunc of a number, as an int; fails where it does not fit into int64."""

    def handler(exprs: Exprs, node: ast.Call, known: Known) -> Part | None:
        if len(node.args) != 1:
            return None
        part = exprs.number(node.args[0], known)
        return part if part.dtype == I64 else Apply(fn, (part,), I64, line=node.lineno)

    return handler


def _log(exprs: Exprs, node: ast.Call, known: Known) -> Part | None:
    """math.log(x) or math.log(x, base)."""
    if len(node.args) not in (1, 2):
        return None
    logs = tuple(Apply("log", (exprs.floating(arg, known),), F64, line=node.lineno) for arg in node.args)
    return logs[0] if len(logs) == 1 else Apply("div", logs, F64, line=node.lineno)


def _scaled(factor: float) -> Handler:
    def handler(exprs: Exprs, node: ast.Call, known: Known) -> Part | None:
        if len(node.args) != 1:
            return None
        return Apply("mul", (exprs.floating(node.args[0], known), Lit(factor, F64)), F64)

    return handler


def _absolute(exprs: Exprs, node: ast.Call, known: Known) -> Part | None:
    if len(node.args) != 1:
        return None
    part = exprs.number(node.args[0], known)
    return Apply("abs" if part.dtype == I64 else "fabs", (part,), I64 if part.dtype == I64 else F64, line=node.lineno)


def _min_max(fn: str) -> Handler:
    """min and max of two or more values: the first of equal ones, with Python's comparison of NaN."""

    def handler(exprs: Exprs, node: ast.Call, known: Known) -> Part | None:
        if len(node.args) < 2:
            return None
        result, *rest = exprs.unify(node, [exprs.value(arg, known) for arg in node.args])
        for part in rest:
            assert result.dtype is not None
            result = Apply(fn, (result, part), result.dtype)
        return result

    return handler


def _length(exprs: Exprs, node: ast.Call, known: Known) -> Part | None:
    if len(node.args) != 1:
        return None
    part = exprs.value(node.args[0], known)
    return Apply("len", (part,), I64) if part.dtype == STR else None


def _str(exprs: Exprs, node: ast.Call, known: Known) -> Part | None:
    return exprs.as_text(node, exprs.value(node.args[0], known)) if len(node.args) == 1 else None


def _float(exprs: Exprs, node: ast.Call, known: Known) -> Part | None:
    match node.args:
        case [ast.Constant(str(text))]:  # float("inf")
            try:
                return Lit(float(text), F64)
            except ValueError:
                return None
        case [arg]:
            return convert(exprs.number(arg, known), F64)
        case _:
            return None


def _bool(exprs: Exprs, node: ast.Call, known: Known) -> Part | None:
    return truth(exprs.read(node.args[0], known)) if len(node.args) == 1 else None


def _power(exprs: Exprs, node: ast.Call, known: Known) -> Part | None:
    if len(node.args) != 2:
        return None
    return exprs.binary(node, ast.Pow(), *(exprs.value(arg, known) for arg in node.args))


_HANDLERS: dict[int, Handler] = {
    id(function): handler
    for function, handler in (
        *((getattr(math, fn), _floats(fn, 1)) for fn in FLOAT_1),
        *((getattr(math, fn), _floats(fn, 2)) for fn in FLOAT_2),
        *((getattr(math, fn), _test(fn)) for fn in TESTS),
        *((getattr(math, fn), _to_int(fn)) for fn in ("floor", "ceil", "trunc")),
        (math.log, _log), (math.degrees, _scaled(180.0 / math.pi)), (math.radians, _scaled(math.pi / 180.0)),
        (int, _to_int("trunc")), (round, _to_int("round")), (abs, _absolute),
        (min, _min_max("min")), (max, _min_max("max")),
        (len, _length), (str, _str), (float, _float), (bool, _bool), (pow, _power),
    )
}  # fmt: skip
