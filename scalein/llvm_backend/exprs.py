"""lower_expr(): a typed expression for one row, total and branch-free where it can be.

Null and dead rows are computed as well, so every lowering is total: divisors and shifts are guarded
with `select`. A failing row only sets a bit (`Code.fail`), under its validity and under `live`: the
rows for which the expression's value is really asked for.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from scalein.dtypes import DType
from scalein.errors import InternalError
from scalein.ir.exprs import Call, Col, Expr, Lit, type_of
from scalein.ir.printer import show_expr
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.fn import I1, const
from scalein.llvm_backend.functions import arithmetic, dates, strings
from scalein.llvm_backend.functions.casts import lower_cast
from scalein.llvm_backend.functions.compare import compare
from scalein.llvm_backend.functions.hashing import lower_hash
from scalein.llvm_backend.functions.membership import is_in
from scalein.llvm_backend.functions.strings import as_bytes
from scalein.llvm_backend.functions.udf import lower_udf
from scalein.llvm_backend.values import Env, Row, Str, Value, register_type


def lower_expr(code: Code, expr: Expr, env: Env, row: Row, live: ir.Value | None = None) -> Value:
    """The value of an expression in a row; `live` narrows the row's own liveness."""
    match expr:
        case Col(name):
            return row.get(env[name])
        case Lit():
            return lower_literal(code, expr.value, type_of(expr))
        case Call(fn, args) if fn in LAZY:
            return LAZY[fn](code, expr, env, row, live)
        case Call(fn, args):
            values = [lower_expr(code, arg, env, row, live) for arg in args]
            return lower_call(code, expr, values, code.f.all_of(row.live, live))
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


def lower_call(code: Code, call: Call, args: list[Value], live: ir.Value | None,
               failed: list[ir.Value] | None = None) -> Value:
    """A function that needs all its arguments; null in, null out unless it says otherwise.

    A row that fails is an error, unless `failed` is there to take the conditions under which it does.
    """
    f = code.f
    dtype = type_of(call)
    valid = f.all_of(*(a.valid for a in args))
    given = [type_of(arg) for arg in call.args]

    def fail(what: str, condition: ir.Value) -> None:
        if failed is not None:
            failed.append(condition)
            return
        counted = f.all_of(condition, valid, live)
        assert counted is not None
        code.fail(f"{what} in `{show_expr(call)}`", counted)

    match call.fn:
        case "add" | "sub" | "mul" | "div" | "floordiv" | "mod" | "neg" | "abs":
            data = arithmetic.lower(f, call.fn, [a.data for a in args], given, dtype, fail)
        case "floor" | "ceil" | "sqrt" | "exp" | "log" | "pow" | "round":
            data = arithmetic.lower_math(f, call.fn, [a.data for a in args], dtype, call.params, fail)
        case "eq" | "ne" | "lt" | "le" | "gt" | "ge":
            data = compare(code, call.fn, args[0].data, args[1].data, given[0],
                           [_literal(arg) for arg in call.args])
        case "try_divide":
            data = arithmetic.lower_float(f, "div", [a.number for a in args])
            zero = const(0.0, args[1].number.type)
            valid = f.all_of(valid, f.b.fcmp_unordered("!=", args[1].number, zero))
        case "divisible":
            data = arithmetic.divisible(f, args[0].data, given[0], int(str(call.params[0])))
        case "not":
            data = f.b.not_(args[0].data)
        case "is_null":
            return Value(const(0, I1) if args[0].valid is None else f.b.not_(args[0].valid))
        case "is_not_null":
            return Value(const(1, I1) if args[0].valid is None else args[0].valid)
        case "hash":
            return lower_hash(code, args[0], given[0])
        case "is_nan":
            data = f.b.fcmp_unordered("uno", args[0].data, args[0].data)
        case "is_in":
            data, known = is_in(code, args[0], given[0], call.params)
            valid = f.all_of(valid, known)
        case "cast":
            data = lower_cast(f, args[0].data, given[0], dtype, fail)
        case "udf":
            return lower_udf(code, call, args, live, failed)
        case "str_len":
            data = strings.length(code, args[0].string)
        case "starts_with" | "ends_with" | "contains":
            data = strings.match(code, call.fn, args[0].string, str(call.params[0]).encode())
        case "str_slice":
            data = strings.slice_(code, args[0].string, call.params)
        case fn if fn.startswith("dt_"):
            data = dates.lower(f, fn, args[0].data, given[0], call.params, fail)
        case _:
            raise InternalError(f"no lowering for {call.fn}", found=show_expr(call))
    return Value(data, valid)


def _literal(expr: Expr) -> object:
    return expr.value if isinstance(expr, Lit) else None


# --- functions that decide which of their arguments count


def _and(code: Code, call: Call, env: Env, row: Row, live: ir.Value | None) -> Value:
    """Kleene's and; where the left side is false, the right side cannot fail."""
    return _decided(code, call, env, row, live, deciding=False)


def _or(code: Code, call: Call, env: Env, row: Row, live: ir.Value | None) -> Value:
    return _decided(code, call, env, row, live, deciding=True)


def _decided(code: Code, call: Call, env: Env, row: Row, live: ir.Value | None, deciding: bool) -> Value:
    f, b = code.f, code.f.b
    left = lower_expr(code, call.args[0], env, row, live)

    def decides(value: Value) -> ir.Value:
        hit = value.data if deciding else b.not_(value.data)
        both = f.all_of(hit, value.valid)
        assert both is not None
        return both

    open_ = b.not_(decides(left))
    right = lower_expr(code, call.args[1], env, row, f.all_of(live, open_))
    data = b.or_(left.data, right.data) if deciding else b.and_(left.data, right.data)
    if left.valid is None and right.valid is None:
        return Value(data)
    # Known if both are, or if either decides. Garbage under a null must not leak into `data`.
    settled = f.any_of(decides(left), decides(right))
    both = f.all_of(left.valid, right.valid)
    assert settled is not None
    assert both is not None
    return Value(b.select(settled, const(int(deciding), I1), data), b.or_(settled, both))


def _if_else(code: Code, call: Call, env: Env, row: Row, live: ir.Value | None) -> Value:
    f, b = code.f, code.f.b
    condition = lower_expr(code, call.args[0], env, row, live)
    taken = f.all_of(condition.data, condition.valid)
    assert taken is not None
    then = lower_expr(code, call.args[1], env, row, f.all_of(live, taken))
    otherwise = lower_expr(code, call.args[2], env, row, f.all_of(live, b.not_(taken)))
    return choose(code, taken, then, otherwise)


def choose(code: Code, condition: ir.Value, a: Value, b: Value) -> Value:
    """`a` where the condition holds, else `b`."""
    build = code.f.b
    valid = None
    if a.valid is not None or b.valid is not None:
        valid = build.select(condition, a.valid if a.valid is not None else const(1, I1),
                             b.valid if b.valid is not None else const(1, I1))
    if isinstance(a.data, Str) and isinstance(b.data, Str):
        return Value(Str(build.select(condition, a.data.ptr, b.data.ptr),
                         build.select(condition, a.data.size, b.data.size)), valid)
    return Value(build.select(condition, a.data, b.data), valid)


def _fill_null(code: Code, call: Call, env: Env, row: Row, live: ir.Value | None) -> Value:
    first = lower_expr(code, call.args[0], env, row, live)
    if first.valid is None:
        return first
    missing = code.f.b.not_(first.valid)
    second = lower_expr(code, call.args[1], env, row, code.f.all_of(live, missing))
    return choose(code, first.valid, Value(first.data), second)


def _try(code: Code, call: Call, env: Env, row: Row, live: ir.Value | None) -> Value:
    """The value of a call, null where that call fails; its arguments fail as ever."""
    (tried,) = call.args
    assert isinstance(tried, Call)
    failed: list[ir.Value] = []
    args = [lower_expr(code, arg, env, row, live) for arg in tried.args]
    value = lower_call(code, tried, args, live, failed)
    return Value(value.data, code.f.all_of(value.valid, *map(code.f.b.not_, failed)))


LAZY: dict[str, Callable[[Code, Call, Env, Row, ir.Value | None], Value]] = {
    "and": _and, "or": _or, "if_else": _if_else, "fill_null": _fill_null, "try": _try,
}  # fmt: skip

LOWERED = frozenset(LAZY) | frozenset(
    (
        "add", "sub", "mul", "div", "floordiv", "mod", "neg", "abs", "floor", "ceil", "sqrt", "exp", "log", "pow",
        "round", "eq", "ne", "lt", "le", "gt", "ge", "divisible", "not", "is_null", "is_not_null", "is_nan", "is_in",
        "cast", "str_len", "starts_with", "ends_with", "contains", "str_slice", "dt_year", "dt_quarter", "dt_month",
        "dt_day", "dt_weekday", "dt_ordinal_day", "dt_hour", "dt_minute", "dt_second", "dt_millisecond",
        "dt_microsecond", "dt_nanosecond", "dt_truncate", "dt_epoch", "udf", "try_divide", "hash",
    )
)
