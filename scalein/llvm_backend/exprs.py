"""lower_expr(): a typed expression for one row, total and branch-free where it can be.

What each function's code is stands in `functions/`, one `@lowers` each.
"""

from __future__ import annotations

from collections.abc import Generator

from llvmlite import ir

from scalein.dtypes import DType
from scalein.errors import InternalError
from scalein.ir.exprs import Call, Col, Expr, Lit, type_of
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.fn import I1, const
from scalein.llvm_backend.functions.registry import LAZY, CallSite, lower_call
from scalein.llvm_backend.functions.strings import as_bytes
from scalein.llvm_backend.values import Env, Row, Str, Value, register_type

Steps = Generator["Steps", Value, Value]  # gives what must be lowered first, is sent its value, returns its own


def lower_expr(code: Code, expr: Expr, env: Env, row: Row, live: ir.Value | None = None) -> Value:
    """The value of an expression in a row; `live` narrows the row's own liveness.

    Expressions and columns in terms of columns may be deeper than Python's stack: what is under way is a list.
    """
    under_way = [_lower(code, expr, env, row, live)]
    value: Value | None = None
    while True:
        try:
            # A generator is sent None first, then what it asked for.
            under_way.append(under_way[-1].send(value))  # type: ignore[arg-type]
            value = None
        except StopIteration as end:
            under_way.pop()
            value = end.value
            if not under_way:
                assert value is not None
                return value


def _lower(code: Code, expr: Expr, env: Env, row: Row, live: ir.Value | None) -> Steps:
    match expr:
        case Col(name):
            binding = env[name]
            found = row.known(binding)
            if found is None and binding.column is not None:
                below, inner = binding.column
                found = row.remember(binding, (yield _lower(code, below, inner, row, None)))
            return row.get(binding) if found is None else found
        case Lit():
            return lower_literal(code, expr.value, type_of(expr))
        case Call(fn) if fn in LAZY:
            asking = LAZY[fn](CallSite(code, expr, (), live))
            value: Value | None = None
            while True:
                try:
                    arg, narrower = asking.send(value)  # type: ignore[arg-type]
                except StopIteration as end:
                    made: Value = end.value
                    return made
                value = yield _lower(code, arg, env, row, narrower)
        case Call(args=args):
            values: list[Value] = []
            for arg in args:
                values.append((yield _lower(code, arg, env, row, live)))
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
        typ = register_type(dtype)
        data = code.f.literal(float(value), typ) if dtype.is_float else const(int(value), typ)
    return Value(data, const(0, I1) if value is None else None)
