"""Filters that are pushed to Spark: rows that it drops need not be converted to Arrow and sent to Python.

That conversion costs far more than a comparison, so every condition that Spark computes exactly as scalein does goes to
it: comparisons of a column with a constant of numbers, text and booleans, null tests, and their combinations by `and`,
`or` and `not`. None of these can fail, so they may be evaluated before the others. In both engines NaN is the greatest
number and equals itself, text is compared by its bytes, and null is neither true nor false.

But statistics do not cover NaN: Spark skips row groups of Parquet files, and batches of a cached DataFrame, if their
greatest number is too small, even if they contain NaN. So where NaN satisfies a comparison, `isnan` is added, which no
statistics can answer; and `not`, which Spark rewrites to such a comparison, is not pushed.

And dictionaries and bloom filters of files distinguish two zeros: a row group is skipped if it has -0.0 where 0.0 is
asked for. So a comparison that zero itself satisfies is not pushed, unless NaN satisfies it too: then the file's
statistics are not used.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from scalein.dtypes import BOOL, FLOATS, NUMBERS, Kind
from scalein.ir import ops
from scalein.ir.exprs import Call, Col, Expr, Lit, type_of
from scalein.ir.rewrite import map_inputs
from scalein.jobs.segments import Segment

if TYPE_CHECKING:
    from pyspark.sql import Column

_PLAIN = ("boolean", "tinyint", "smallint", "int", "bigint", "float", "double", "string")  # Spark's names
_KINDS = (*NUMBERS, Kind.BOOL, Kind.STR)


def push_to_spark(segment: Segment, struct: Any) -> tuple[Segment, Column | None]:
    """The segment without the conditions on its input that Spark can evaluate, and their conjunction."""
    plain = {field.name for field in struct.fields if field.dataType.simpleString() in _PLAIN}
    pushed: list[Column] = []

    def visit(op: ops.Op) -> ops.Op:
        if isinstance(op, ops.Filter) and op.input is segment.input:
            left: Expr | None = None
            for each in _conjuncts(op.predicate):
                condition = _condition(each, plain)
                if condition is not None:
                    pushed.append(condition)
                else:
                    left = each if left is None else Call("and", (left, each), (), BOOL, left.nullable or each.nullable)
            return op.input if left is None else replace(op, predicate=left)
        if isinstance(op, ops.Join):
            return replace(op, left=visit(op.left))
        return map_inputs(op, visit)

    op = visit(segment.op)
    if not pushed:
        return segment, None
    conjunction = pushed[0]
    for condition in pushed[1:]:
        conjunction = conjunction & condition
    state = segment.state
    if state is not None:
        state = next(each for each in _path(op, segment.input) if type(each) is type(state))
    return Segment(op, segment.input, state, segment.then), conjunction


def _path(op: ops.Op, source: ops.Op) -> list[ops.Op]:
    path = [op]
    while path[-1] is not source:
        last = path[-1]
        assert not isinstance(last, ops.Source | ops.Union)
        path.append(last.left if isinstance(last, ops.Join) else last.input)
    return path


def _conjuncts(expr: Expr) -> list[Expr]:
    if isinstance(expr, Call) and expr.fn == "and":
        return [part for arg in expr.args for part in _conjuncts(arg)]
    return [expr]


def _condition(expr: Expr, plain: set[str]) -> Column | None:
    """The condition as a Column of Spark, if Spark gives it the same meaning."""
    if isinstance(expr, Col):
        return _column(expr, plain) if type_of(expr).kind is Kind.BOOL else None
    if not isinstance(expr, Call):
        return None
    match expr.fn, expr.args:
        case ("eq" | "ne" | "lt" | "le" | "gt" | "ge"), (left, right):
            a, b = _operand(left, plain), _operand(right, plain)
            is_one = isinstance(left, Col) or isinstance(right, Col)
            if a is None or b is None or not is_one or _is_about_zero(expr.fn, left, right):
                return None
            found: Column = {"eq": a.__eq__, "ne": a.__ne__, "lt": a.__lt__, "le": a.__le__, "gt": a.__gt__,
                             "ge": a.__ge__}[expr.fn](b)
            return found | _is_nan(left, right) if _passes_nan(expr.fn, left, right) else found
        case ("and" | "or"), (left, right):
            first, second = _condition(left, plain), _condition(right, plain)
            if first is None or second is None:
                return None
            return first & second if expr.fn == "and" else first | second
        case "not", (inner,):
            condition = None if _reads_floats(inner) else _condition(inner, plain)
            return None if condition is None else ~condition
        case ("is_null" | "is_not_null"), (Col() as column,):
            given = _column(column, plain)
            return given if given is None else given.isNull() if expr.fn == "is_null" else given.isNotNull()
        case _:
            return None


def _operand(expr: Expr, plain: set[str]) -> Column | None:
    from pyspark.sql import functions

    if isinstance(expr, Col):
        return _column(expr, plain)
    if not isinstance(expr, Lit) or expr.value is None or type_of(expr).kind not in _KINDS:
        return None
    value = expr.value
    if type_of(expr).kind is Kind.F32 or (isinstance(value, float) and not math.isfinite(value)):
        return None  # scalein would widen a 32-bit literal, Spark would round it
    if isinstance(value, int) and not isinstance(value, bool) and not -(1 << 63) <= value < 1 << 63:
        return None
    return functions.lit(value)


def _passes_nan(fn: str, left: Expr, right: Expr) -> bool:
    """Whether a comparison of a column with a constant holds for NaN, the greatest number."""
    if not (type_of(left).kind in FLOATS and isinstance(left, Lit) != isinstance(right, Lit)):
        return False
    return fn in (("gt", "ge", "ne") if isinstance(right, Lit) else ("lt", "le", "ne"))


def _is_about_zero(fn: str, left: Expr, right: Expr) -> bool:
    """Whether statistics would be asked for one of the two zeros, and both satisfy the comparison."""
    is_float_zero = any(isinstance(each, Lit) and type_of(each).kind in FLOATS and each.value == 0
                        for each in (left, right))
    return is_float_zero and fn in ("eq", "le", "ge") and not _passes_nan(fn, left, right)


def _is_nan(left: Expr, right: Expr) -> Column:
    from pyspark.sql import functions

    column = left if isinstance(left, Col) else right
    assert isinstance(column, Col)
    return functions.isnan(functions.col(quote_name(column.name)))


def _reads_floats(expr: Expr) -> bool:
    if isinstance(expr, Call):
        return any(map(_reads_floats, expr.args))
    return isinstance(expr, Col) and type_of(expr).kind in FLOATS


def _column(column: Col, plain: set[str]) -> Column | None:
    from pyspark.sql import functions

    return functions.col(quote_name(column.name)) if column.name in plain and type_of(column).kind in _KINDS else None


def quote_name(name: str) -> str:
    """A column's name quoted for Spark."""
    return "`" + name.replace("`", "``") + "`"
