"""Filters that are pushed to Spark: rows that it drops need not be converted to Arrow and sent to Python.

That conversion costs far more than a comparison, so every condition that Spark computes exactly as scalein does goes to
it: comparisons of a column with a constant of numbers, text, booleans, dates and timestamps, null tests, and their
combinations by `and`, `or` and `not`; `is_in`, and tests of text (`calls.py`). None of these can fail, so they may be
evaluated before the others. In both engines NaN is the greatest number and equals itself, text is compared by its
bytes, and null is neither true nor false.

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

from scalein.dtypes import BOOL, FLOATS, NUMBERS, TIMES, Kind
from scalein.exec.fragments import Fragment
from scalein.ir import ops
from scalein.ir.exprs import Call, Col, Expr, Lit, type_of
from scalein.ir.functions.compare import COMPARISONS
from scalein.ir.functions.registry import REGISTRY, Nulls, evaluate
from scalein.ir.rewrite import stream_path, transform_streams
from scalein.spark.batch.catalyst_calls import spark_call, time_literal, time_type

if TYPE_CHECKING:
    from pyspark.sql import Column

_PLAIN = ("boolean", "tinyint", "smallint", "int", "bigint", "float", "double", "string")  # Spark's names
_KINDS = (*NUMBERS, Kind.BOOL, Kind.STR)

Plain = dict[str, str]  # Spark's types of columns


def push_to_spark(fragment: Fragment, struct: Any) -> tuple[Fragment, Column | None]:
    """The fragment without the conditions on its input that Spark can evaluate, and their conjunction."""
    plain = {field.name: field.dataType.simpleString() for field in struct.fields}
    pushed: list[Column] = []

    def without(op: ops.Op) -> ops.Op:
        if isinstance(op, ops.Filter) and op.input is fragment.input:
            left: Expr | None = None
            for each in _conjuncts(op.predicate):
                condition = _condition(each, plain)
                if condition is not None:
                    pushed.append(condition)
                else:
                    left = each if left is None else Call("and", (left, each), (), BOOL, left.nullable or each.nullable)
            return op.input if left is None else replace(op, predicate=left)
        return op

    op = transform_streams(fragment.op, without)
    if not pushed:
        return fragment, None
    conjunction = pushed[0]
    for condition in pushed[1:]:
        conjunction = conjunction & condition
    state = fragment.state
    if state is not None:
        state = next(each for each in stream_path(op, fragment.input) if type(each) is type(state))
    return Fragment(op, fragment.input, state, fragment.consumers), conjunction


def _conjuncts(expr: Expr) -> list[Expr]:
    if isinstance(expr, Call) and expr.fn == "and":
        return [part for arg in expr.args for part in _conjuncts(arg)]
    return [expr]


def _condition(expr: Expr, plain: Plain) -> Column | None:
    """The condition as a Column of Spark, if Spark gives it the same meaning."""
    if isinstance(expr, Col):
        return _column(expr, plain) if type_of(expr).kind is Kind.BOOL else None
    if not isinstance(expr, Call):
        return None
    function = REGISTRY[expr.fn]
    operands: list[Column | None]
    match expr.args:
        case (left, right) if expr.fn in COMPARISONS:
            is_one = isinstance(left, Col) or isinstance(right, Col)
            if not is_one or _is_about_zero(expr):
                return None
            operands = [_operand(left, plain), _operand(right, plain)]
        case (Col() as column,) if function.nulls is Nulls.NEVER or expr.params:
            operands = [_column(column, plain)]
        case (inner,) if _reads_floats(inner):
            return None
        case conditions:
            operands = [_condition(each, plain) for each in conditions]
    known = [operand for operand in operands if operand is not None]
    found = spark_call(expr, known) if len(known) == len(operands) else None
    return found | _is_nan(*expr.args) if found is not None and _passes_nan(expr) else found


def _operand(expr: Expr, plain: Plain) -> Column | None:
    from pyspark.sql import functions

    if isinstance(expr, Col):
        return _column(expr, plain)
    if not isinstance(expr, Lit) or expr.value is None:
        return None
    if isinstance(expr.value, int) and (time := time_literal(expr.value, type_of(expr))) is not None:
        return time
    if type_of(expr).kind not in _KINDS:
        return None
    value = expr.value
    if type_of(expr).kind is Kind.F32 or (isinstance(value, float) and not math.isfinite(value)):
        return None  # scalein would widen a 32-bit literal, Spark would round it
    if isinstance(value, int) and not isinstance(value, bool) and not -(1 << 63) <= value < 1 << 63:
        return None
    return functions.lit(value)


def _passes_nan(call: Call) -> bool:
    """Whether a comparison of a column with a constant holds for NaN, the greatest number."""
    return _is_float_comparison(call) and _holds(call, math.nan)


def _is_about_zero(call: Call) -> bool:
    """Whether statistics would be asked for one of the two zeros, and both satisfy the comparison."""
    is_zero = any(isinstance(arg, Lit) and arg.value == 0 for arg in call.args)
    return _is_float_comparison(call) and is_zero and _holds(call, 0.0) and not _passes_nan(call)


def _is_float_comparison(call: Call) -> bool:
    """Whether floats of a column are compared with a constant."""
    if call.fn not in COMPARISONS:
        return False
    left, right = call.args
    return type_of(left).kind in FLOATS and isinstance(left, Lit) != isinstance(right, Lit)


def _holds(call: Call, value: float) -> bool:
    """Whether the comparison is true where the column has this value."""
    args = tuple(arg if isinstance(arg, Lit) else Lit(value, arg.dtype) for arg in call.args)
    found = evaluate(replace(call, args=args))
    assert found is not None
    return found.value is True


def _is_nan(left: Expr, right: Expr) -> Column:
    from pyspark.sql import functions

    column = left if isinstance(left, Col) else right
    assert isinstance(column, Col)
    return functions.isnan(functions.col(quote_name(column.name)))


def _reads_floats(expr: Expr) -> bool:
    if isinstance(expr, Call):
        return any(map(_reads_floats, expr.args))
    return isinstance(expr, Col) and type_of(expr).kind in FLOATS


def _column(column: Col, plain: Plain) -> Column | None:
    from pyspark.sql import functions

    dtype, own = type_of(column), plain.get(column.name)
    if dtype.kind in TIMES:
        is_same = own is not None and own == time_type(dtype)
    else:
        is_same = dtype.kind in _KINDS and own in _PLAIN
    return functions.col(quote_name(column.name)) if is_same else None


def quote_name(name: str) -> str:
    """A column's name quoted for Spark."""
    return "`" + name.replace("`", "``") + "`"
