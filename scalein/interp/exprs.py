"""Expressions over columns, and the rows in which they may fail.

`live` says for each row whether the expression is asked for there. A dead row is null and cannot
fail: the branch of a `when` that was not taken, the right side of an `and` whose left side is
false or of an `or` whose left side is true. A row with a null argument is null, and cannot fail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from scalein import arrow_functions
from scalein.dtypes import DType
from scalein.errors import ComputeError
from scalein.interp import udfs
from scalein.interp.scalars import scalar
from scalein.interp.values import Values, from_arrow, to_arrow
from scalein.ir.exprs import Call, Col, Expr, Lit, columns, type_of
from scalein.ir.functions.hashing import hash_value
from scalein.ir.functions.registry import NoValue, fallible, is_host
from scalein.ir.printer import show_expr
from scalein.ir.udf import AnyUdf

Live = list[bool]


def evaluate(expr: Expr, batch: pa.RecordBatch | pa.Table) -> pa.Array:
    """The value of a typed expression in every row, as an array of exactly its type."""
    # What pyarrow means stays in Arrow from the column to the result: this path runs in compiled flows too.
    if isinstance(expr, Col):
        return _as_type(batch.column(expr.name), type_of(expr))
    if isinstance(expr, Call) and expr.fn == "try" and is_host(expr):
        (tried,) = expr.args
        assert isinstance(tried, Call)
        if tried.fn != "udf":
            return arrow_functions.attempt(tried, [evaluate(arg, batch) for arg in tried.args])
    if isinstance(expr, Call) and is_host(expr) and expr.fn not in ("udf", "try"):
        words = _dictionary(expr, batch)
        if words is not None:  # once for each word, not for each row
            return _apply(expr, [_as_type(words.dictionary, type_of(expr.args[0]))]).take(words.indices)
        return _apply(expr, [evaluate(arg, batch) for arg in expr.args])
    read = {name: from_arrow(batch.column(name)) for name in columns(expr)}
    return to_arrow(compute(expr, read, [True] * batch.num_rows), type_of(expr))


def compute(expr: Expr, read: Mapping[str, Values], live: Live) -> Values:
    """The expression's value in every live row, null in the others."""
    match expr:
        case Col():
            return [value if alive else None for value, alive in zip(read[expr.name], live, strict=True)]
        case Lit():
            return [expr.value if alive else None for alive in live]
        case Call(fn="and" | "or"):
            return _connect(expr, read, live)
        case Call(fn="if_else"):
            return _choose(expr, read, live)
        case Call(fn="try", args=(Call() as tried,)):
            return _try(tried, read, live)
    args = [compute(arg, read, live) for arg in expr.args]
    match expr.fn:
        case "is_null":
            return _row_by_row(lambda a: a is None, args, live)
        case "is_not_null":
            return _row_by_row(lambda a: a is not None, args, live)
        case "fill_null":
            return _row_by_row(lambda a, b: b if a is None else a, args, live)
        case "udf":
            return _call_udf(expr, args, live)
        case "hash":
            return _row_by_row(lambda a: hash_value(a, type_of(expr.args[0])), args, live)
    if is_host(expr):
        arrays = [to_arrow(values, type_of(arg)) for values, arg in zip(args, expr.args, strict=True)]
        return from_arrow(_apply(expr, arrays))
    strict = scalar(expr)
    try:
        return _row_by_row(lambda *row: None if None in row else strict(*row), args, live)
    except NoValue as error:
        raise _failure(error, expr) from None


def _try(tried: Call, read: Mapping[str, Values], live: Live) -> Values:
    """A call's value in each live row, null where that call has none; its arguments fail as ever."""
    args = [compute(arg, read, live) for arg in tried.args]
    if tried.fn == "udf":
        (udf,) = tried.params
        assert isinstance(udf, AnyUdf)
        return _row_by_row(_attempted(udfs.call(udf)), args, live)
    if is_host(tried):
        arrays = [to_arrow(values, type_of(arg)) for values, arg in zip(args, tried.args, strict=True)]
        return from_arrow(arrow_functions.attempt(tried, arrays))
    strict = scalar(tried)
    return _row_by_row(_attempted(lambda *row: None if None in row else strict(*row)), args, live)


def _attempted(fn: Callable[..., Any]) -> Callable[..., Any]:
    def attempt(*row: Any) -> Any:
        try:
            return fn(*row)
        except NoValue:
            return None

    return attempt


def _call_udf(expr: Call, args: Sequence[Values], live: Live) -> Values:
    """The user's function in every live row; it says itself what null means to it."""
    (udf,) = expr.params
    assert isinstance(udf, AnyUdf)
    try:
        return _row_by_row(udfs.call(udf), args, live)
    except NoValue as error:
        raise _failure(error, expr) from error.__cause__


def _row_by_row(fn: Callable[..., Any], args: Sequence[Values], live: Live) -> Values:
    return [fn(*row) if alive else None for alive, *row in zip(live, *args, strict=True)]


def _connect(expr: Call, read: Mapping[str, Values], live: Live) -> Values:
    """Kleene's and, or: one side decides alone (false for and, true for or), else null wins."""
    decides = expr.fn == "or"
    found = compute(expr.args[0], read, live)
    for arg in expr.args[1:]:
        asked = [alive and value is not decides for alive, value in zip(live, found, strict=True)]
        both = zip(found, compute(arg, read, asked), strict=True)
        found = [decides if decides in pair else None if None in pair else not decides for pair in both]
    return [value if alive else None for value, alive in zip(found, live, strict=True)]


def _choose(expr: Call, read: Mapping[str, Values], live: Live) -> Values:
    """The second argument where the first is true, else the third: a null condition is not true."""
    condition, taken, other = expr.args
    truth = compute(condition, read, live)
    then = compute(taken, read, [alive and value is True for alive, value in zip(live, truth, strict=True)])
    otherwise = compute(other, read, [alive and value is not True for alive, value in zip(live, truth, strict=True)])
    return [a if value is True else b for value, a, b in zip(truth, then, otherwise, strict=True)]


def _apply(call: Call, args: Sequence[pa.Array]) -> pa.Array:
    try:
        return arrow_functions.apply(call, args)
    except NoValue as error:
        raise _failure(error, call) from error.__cause__


def _failure(error: NoValue, call: Call) -> ComputeError:
    cause = error.__cause__
    return ComputeError(f"{error} in `{show_expr(call)}`", at=call.at, type=type_of(call), found=cause)


def _dictionary(call: Call, batch: pa.RecordBatch | pa.Table) -> pa.DictionaryArray | None:
    """The column that a call of one column reads, if it is a dictionary of no more words than rows.

    A word that no row has must not fail.
    """
    if fallible(call) or not isinstance(call.args[0], Col):
        return None
    column = batch.column(call.args[0].name)
    is_coded = isinstance(column, pa.DictionaryArray) and type_of(call.args[0]).is_string
    return column if is_coded and len(column.dictionary) <= len(column) else None


def _as_type(column: pa.Array | pa.ChunkedArray, dtype: DType) -> pa.Array:
    """The column as one plain array of the type; a dictionary is decoded."""
    if column.type == dtype.arrow:
        return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if pa.types.is_dictionary(column.type) and dtype.is_string:
        return _as_type(column.cast(dtype.arrow), dtype)
    return to_arrow(from_arrow(column), dtype)
