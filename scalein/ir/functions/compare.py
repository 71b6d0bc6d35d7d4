"""Comparisons, and membership in a set of constants: NaN equals NaN and is the greatest, text compares by its bytes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from scalein.dtypes import BOOL
from scalein.ir.exprs import Call, Expr, Lit, type_of
from scalein.ir.functions.registry import ANY, Args, Fold, Function, Nulls, declare, typed
from scalein.ir.unify import Refused, type_literal, unify

COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


def _compare(call: Call, args: Args) -> Expr:
    return typed(call, unify(args, "cannot compare"), BOOL)


def _fold(compare: Callable[[Any, Any], bool]) -> Fold:
    return lambda call: lambda a, b: compare(_ordered(a), _ordered(b))


def _ordered(value: Any) -> Any:
    """A key by which Python compares as we do: strings by bytes, NaN equal to itself and the greatest."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, float):
        return (1, 0.0) if math.isnan(value) else (0, value)
    return value


def _is_nan(call: Call, args: Args) -> Expr:
    arg = type_literal(args[0])
    if not type_of(arg).is_float:
        raise Refused(f"is_nan takes a float, not {type_of(arg)!r}", "is_null tests for missing values")
    return typed(call, [arg], BOOL)


def _is_in(call: Call, args: Args) -> Expr:
    values, has_null = call.params
    assert isinstance(values, tuple)
    listed = [value if isinstance(value, Lit) else Lit(value) for value in values]
    arg, *found = unify([type_literal(args[0]), *listed], "is_in does not take")
    # A cast among them is a typed constant in a coarser unit than the column's.
    exact = [item for item in found if isinstance(item, Lit)]
    if len(exact) < len(found):
        raise Refused("is_in takes plain constants in the column's own unit", "pass datetime or timedelta values")
    physical = tuple({item: item.value for item in exact}.values())
    return replace(typed(call, [arg], BOOL), params=(physical, has_null))


def _fold_is_in(call: Call) -> Callable[[Any], bool] | None:
    values, has_null = call.params
    assert isinstance(values, tuple)
    known = set(map(_ordered, values))
    return None if has_null else lambda value: _ordered(value) in known


def _is_exact_set(call: Call) -> bool:
    """Whether values are in a set if their bits are, and null is not among them."""
    own = type_of(call.args[0])
    return not call.params[1] and not own.is_float and not own.is_decimal


def _between(call: Call, args: Args) -> Expr:
    """low <= value <= high, spelled out; as with `and`, one side alone can make it false."""
    value, low, high = args
    ends = [_compare(replace(call, fn=fn, args=()), (value, end)) for fn, end in (("ge", low), ("le", high))]
    return typed(replace(call, fn="and"), ends, BOOL)


def _either(call: Call, args: Sequence[Expr]) -> bool:
    return any(arg.nullable for arg in args)


def _every(call: Call, args: Sequence[Expr]) -> bool:
    return all(arg.nullable for arg in args)


def _horizontal(call: Call, args: Args) -> Expr:
    """The least or greatest of some values in one type, which skips nulls."""
    found = unify(args, f"{'max' if call.fn == 'row_max' else 'min'}_horizontal does not take")
    return typed(call, found, type_of(found[0])) if len(found) > 1 else found[0]


def _clip(call: Call, args: Args) -> Expr:
    """min(max(value, low), high); a null bound does not limit."""
    value, low, high = unify([type_literal(args[0]), *args[1:]], "clip does not take")
    return typed(call, [value, low, high], type_of(value))


def _as_the_first(call: Call, args: Sequence[Expr]) -> bool:
    return args[0].nullable


_SIGNS = {"eq": ("==", "=", "equal"), "ne": ("!=", "<>", "not_equal"), "lt": ("<", "<", "less"),
          "le": ("<=", "<=", "less_equal"), "gt": (">", ">", "greater"), "ge": (">=", ">=", "greater_equal")}

declare(
    *(Function(name, _compare, 2, fold=_fold(getattr(operator, name)), canonical=True, show=f"{{0}} {python} {{1}}",
               duckdb=f"({{0}} {sql} {{1}})", spark=f"__{name}__", numpy=(ufunc,))
      for name, (python, sql, ufunc) in _SIGNS.items()),
    Function("between", _between, 3, Nulls.OWN, nullable=_either, spelled_out=True,
             show="{0}.between({1}, {2})"),
    Function("clip", _clip, 3, Nulls.OWN, nullable=_as_the_first, show="{0}.clip({1}, {2})",
             duckdb="CASE WHEN {0} IS NOT NULL THEN least(greatest({0}, {1}), {2}) END"),
    Function("row_max", _horizontal, ANY, Nulls.OWN, nullable=_every, show="max_horizontal({args})",
             sql=("GREATEST",), duckdb="greatest({args})"),
    Function("row_min", _horizontal, ANY, Nulls.OWN, nullable=_every, show="min_horizontal({args})",
             sql=("LEAST",), duckdb="least({args})"),
    Function("is_nan", _is_nan, fold=lambda call: math.isnan, canonical=True, show="{0}.is_nan()",
             sql=("IS_NAN", "ISNAN"), duckdb="isnan({0})", numpy=("isnan",)),
    Function("is_in", _is_in, fold=_fold_is_in, gives_null=lambda call: bool(call.params[1]), canonical=True,
             show="{0}.is_in([{values}])", spark="isin", spark_if=_is_exact_set),
)
