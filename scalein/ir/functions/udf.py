"""Calls of the user's own functions, compiled from Python or left to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from scalein.dtypes import F64, I64, TIMES, Kind
from scalein.ir.exprs import Call, Expr, walk
from scalein.ir.functions.registry import ANY, Args, Function, Nulls, always, declare, typed
from scalein.ir.unify import Refused, cast_to, own_type_of

if TYPE_CHECKING:  # most flows have no udf
    from scalein.ir.udf import Variable

_PYTHON_NAMES = {Kind.F64: "float", Kind.I64: "int", Kind.BOOL: "bool", Kind.STR: "str"}


def _udf(call: Call, args: Args) -> Expr:
    from scalein.ir.udf import AnyUdf

    (udf,) = call.params
    assert isinstance(udf, AnyUdf)
    given = [udf_argument(udf.name, param, arg) for param, arg in zip(udf.params, args, strict=True)]
    return typed(call, given, udf.dtype)


def udf_argument(name: str, param: Variable, arg: Expr) -> Expr:
    """The argument in the parameter's type: any number as a float, any integer that 64 bits hold as an int."""
    own = own_type_of(arg)
    fits = own is None or own.kind is param.dtype.kind or (
        own.is_number or own.is_decimal if param.dtype == F64
        else param.dtype == I64 and own.is_int and own.kind is not Kind.U64
    )  # fmt: skip
    if not fits:
        wanted = _PYTHON_NAMES[param.dtype.kind]
        hint = f"cast it: .cast({wanted})" if own is not None and (own.is_number or own.kind in TIMES) else None
        raise Refused(f"{name} takes {wanted} as {param.name!r}, not {own!r}", hint)
    return cast_to(arg, param.dtype)


def _nullable(call: Call, args: Sequence[Expr]) -> bool:
    from scalein.ir.udf import AnyUdf, can_be_null

    (udf,) = call.params
    assert isinstance(udf, AnyUdf)
    return can_be_null(udf, args)


def _stays_python(call: Call) -> bool:
    from scalein.ir.udf import PythonUdf

    return isinstance(call.params[0], PythonUdf)


def _makes_text(call: Call) -> bool:
    from scalein.ir.udf import Udf, builds_text

    return isinstance(call.params[0], Udf) and builds_text(call.params[0])


def has_udf(expr: Expr) -> bool:
    """Whether a typed expression calls a compiled Python function, which may cost anything."""
    return any(isinstance(node, Call) and node.fn == "udf" for node in walk(expr))


declare(Function("udf", _udf, ANY, Nulls.OWN, nullable=_nullable, fallible=always, host=_stays_python,
                 makes_text=_makes_text, show="{name}({args})"))
