"""The functions of `math` and the builtins that a udf may call, by the objects that names refer to."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from scalein.dtypes import BOOL, F64, I64, STR, DType
from scalein.ir.exprs import Lit
from scalein.ir.udf import TEXTS, Apply, Let, Part, is_tuple, items_of, tuple_of
from scalein.udf.conversions import convert, truth
from scalein.udf.known import Known

if TYPE_CHECKING:
    from scalein.udf.exprs import Exprs

Handler = Callable[["Exprs", ast.Call, Known], Part | None]

# Of one float. A NaN of a number, or an infinity of a finite number, is an error, as in Python.
FLOAT_1 = ("sqrt", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan",
           "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "fabs", "cbrt", "erf", "erfc", "gamma", "lgamma",
           "ulp")  # fmt: skip
FLOAT_2 = ("pow", "atan2", "fmod", "copysign", "remainder", "nextafter")
_OF_MANY = (math.fsum, math.prod, math.dist)
TESTS = ("isnan", "isinf", "isfinite")


def call(exprs: Exprs, node: ast.Call, called: object, known: Known) -> Part | None:
    """The call of a builtin; None if it cannot be compiled, or not with these arguments."""
    handler = _HANDLERS.get(id(called))
    return None if handler is None else handler(exprs, node, known)


def takes_keywords(called: object) -> bool:
    return called is math.isclose


def hint(called: object) -> str | None:
    """What to write instead of a call that is not compiled."""
    if any(called is each for each in (*_OF_MANY, sum, any, all, sorted)):
        return "it takes a collection, of which a udf has none: write a loop"
    return None


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


def _ints(fn: str, least: int, most: int) -> Handler:
    def handler(exprs: Exprs, node: ast.Call, known: Known) -> Part | None:
        if not least <= len(node.args) <= most:
            return None
        return Apply(fn, tuple(exprs.integer(arg, known) for arg in node.args), I64, line=node.lineno)

    return handler


def _fold_ints(fn: str, nothing: int) -> Handler:
    """gcd and lcm of any number of ints."""

    def handler(exprs: Exprs, node: ast.Call, known: Known) -> Part | None:
        parts = [exprs.integer(arg, known) for arg in node.args] or [Lit(nothing, I64)]
        result = parts[0] if len(parts) > 1 else Apply(fn, (parts[0], Lit(nothing, I64)), I64, line=node.lineno)
        for part in parts[1:]:
            result = Apply(fn, (result, part), I64, line=node.lineno)
        return result

    return handler


def _hypot(exprs: Exprs, node: ast.Call, known: Known) -> Part | None:
    parts = [exprs.floating(arg, known) for arg in node.args] or [Lit(0.0, F64)]
    result: Part = parts[0] if len(parts) > 1 else Apply("fabs", (parts[0],), F64, line=node.lineno)
    for part in parts[1:]:
        result = Apply("hypot", (result, part), F64, line=node.lineno)
    return result


def _ldexp(exprs: Exprs, node: ast.Call, known: Known) -> Part | None:
    if len(node.args) != 2:
        return None
    return Apply("ldexp", (exprs.floating(node.args[0], known), exprs.integer(node.args[1], known)), F64,
                 line=node.lineno)


def _pair(fn: str, second: DType) -> Handler:
    """frexp and modf of a float, divmod of two numbers: tuples."""

    def handler(exprs: Exprs, node: ast.Call, known: Known) -> Part | None:
        if len(node.args) != 1:
            return None
        part = exprs.floating(node.args[0], known)
        return Apply(fn, (part,), tuple_of([(F64, False), (second, False)]), line=node.lineno)

    return handler


def _divmod(exprs: Exprs, node: ast.Call, known: Known) -> Part | None:
    if len(node.args) != 2:
        return None
    both = exprs.unify(node, [exprs.number(arg, known) for arg in node.args])
    dtype = both[0].dtype
    assert dtype is not None
    locals_ = [exprs.new_local(dtype) for _ in both]
    items = tuple(Apply(fn, tuple(locals_), dtype, line=node.lineno) for fn in ("floordiv", "mod"))
    whole = tuple_of([(dtype, False)] * 2)
    found: Part = Apply("tuple", items, whole)
    for local, part in zip(reversed(locals_), reversed(both), strict=True):
        found = Let(local.name, part, found, whole)
    return found


def _isclose(exprs: Exprs, node: ast.Call, known: Known) -> Part | None:
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    if len(node.args) != 2 or not set(given) <= {"rel_tol", "abs_tol"}:
        return None
    parts = [exprs.floating(arg, known) for arg in node.args]
    for name, default in (("rel_tol", 1e-9), ("abs_tol", 0.0)):
        parts.append(exprs.floating(given[name], known) if name in given else Lit(default, F64))
    return Apply("isclose", tuple(parts), BOOL, line=node.lineno)


def _round(exprs: Exprs, node: ast.Call, known: Known) -> Part | None:
    """round(x), or round(x, digits) with as many digits as a constant says."""
    if len(node.args) != 2:
        return _to_int("round")(exprs, node, known)
    part, digits = exprs.number(node.args[0], known), exprs.integer(node.args[1], known)
    if part.dtype != F64 or not isinstance(digits, Lit) or not 0 <= int(str(digits.value)) <= 30:
        return None
    return Apply("rounded", (part, digits), F64, line=node.lineno)


def _int(exprs: Exprs, node: ast.Call, known: Known) -> Part | None:
    if len(node.args) != 1:
        return None
    part = exprs.value(node.args[0], known)
    if part.dtype == STR:
        return Apply("int_of", (part,), I64, line=node.lineno)
    part = exprs.as_number(node.args[0], part)
    return part if part.dtype == I64 else Apply("trunc", (part,), I64, line=node.lineno)


def _ord(exprs: Exprs, node: ast.Call, known: Known) -> Part | None:
    part = exprs.value(node.args[0], known) if len(node.args) == 1 else None
    return Apply("ord", (part,), I64, line=node.lineno) if part is not None and part.dtype == STR else None


def _chr(exprs: Exprs, node: ast.Call, known: Known) -> Part | None:
    return Apply("chr", (exprs.integer(node.args[0], known),), STR, line=node.lineno) if len(node.args) == 1 else None


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
    if part.dtype is not None and is_tuple(part.dtype):
        return Lit(len(items_of(part.dtype)), I64)
    return Apply("len", (part,), I64) if part.dtype in (STR, TEXTS) else None


def _str(exprs: Exprs, node: ast.Call, known: Known) -> Part | None:
    return exprs.as_text(node, exprs.value(node.args[0], known)) if len(node.args) == 1 else None


def _float(exprs: Exprs, node: ast.Call, known: Known) -> Part | None:
    match node.args:
        case [arg]:
            part = exprs.value(arg, known)
            if isinstance(part, Lit) and part.dtype == STR:  # float("inf")
                with suppress(ValueError):
                    return Lit(float(str(part.value)), F64)
            if part.dtype == STR:
                return Apply("float_of", (part,), F64, line=node.lineno)
            return convert(exprs.as_number(arg, part), F64)
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
        (math.hypot, _hypot), (math.ldexp, _ldexp), (math.isclose, _isclose),
        (math.gcd, _fold_ints("gcd", 0)), (math.lcm, _fold_ints("lcm", 1)), (math.comb, _ints("comb", 2, 2)),
        (math.perm, _ints("perm", 1, 2)), (math.factorial, _ints("factorial", 1, 1)),
        (math.isqrt, _ints("isqrt", 1, 1)),
        (math.frexp, _pair("frexp", I64)), (math.modf, _pair("modf", F64)), (divmod, _divmod),
        (ord, _ord), (chr, _chr),
        (int, _int), (round, _round), (abs, _absolute),
        (min, _min_max("min")), (max, _min_max("max")),
        (len, _length), (str, _str), (float, _float), (bool, _bool), (pow, _power),
    )
}  # fmt: skip
