"""lower_expr(): a typed expression for one row, total and branch-free where it can be.

What each function's code is stands in `functions/`, one `@lowers` each.
"""

from __future__ import annotations

from llvmlite import ir

from scalein.dtypes import DType
from scalein.errors import InternalError
from scalein.ir.exprs import Call, Col, Expr, Lit, type_of
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.fn import I1, const
from scalein.llvm_backend.functions.registry import LAZY, CallSite, lower_call
from scalein.llvm_backend.functions.strings import as_bytes
from scalein.llvm_backend.values import Env, Row, Str, Value, register_type


def lower_expr(code: Code, expr: Expr, env: Env, row: Row, live: ir.Value | None = None) -> Value:
    """The value of an expression in a row; `live` narrows the row's own liveness."""
    match expr:
        case Col(name):
            return row.get(env[name])
        case Lit():
            return lower_literal(code, expr.value, type_of(expr))
        case Call(fn) if fn in LAZY:
            return lower_call(CallSite(code, expr, (), live, lambda arg, live: lower_expr(code, arg, env, row, live)))
        case Call(fn, args):
            values = [lower_expr(code, arg, env, row, live) for arg in args]
            return lower_call(CallSite(code, expr, values, code.f.all_of(row.live, live)))
    raise InternalError(f"no lowering for {expr!r}")


def lower_literal(code: Code, value: object, dtype: DType) -> Value:
    if dtype.is_bytes:
        content = as_bytes(value)
        data: ir.Value | Str = Str(code.text(content), const(len(content)))
    elif value is None:
        data = const(0.0 if dtype.is_float else 0, register_type(dtype))
    else:
        assert isinstance(value, int | float)
        data = const(float(value) if dtype.is_float else int(value), register_type(dtype))
    return Value(data, const(0, I1) if value is None else None)
