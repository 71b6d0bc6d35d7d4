"""Every aggregate as a function of one group's rows, in the source's order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from scalein.dtypes import DType
from scalein.errors import ComputeError
from scalein.interp.scalars import NoValue, in_range
from scalein.interp.values import Values, order_key
from scalein.ir.exprs import Agg, type_of
from scalein.ir.printer import show_agg


def aggregate(agg: Agg, args: list[Values]) -> Any:
    """The value of an aggregate over a group whose rows have these arguments."""
    try:
        return _AGGREGATES[agg.fn](type_of(agg), *args)
    except NoValue as error:
        raise ComputeError(f"{error} in {show_agg(agg)}", at=agg.at, type=type_of(agg)) from None


def _valid(values: Values) -> Values:
    return [value for value in values if value is not None]


def _sum(dtype: DType, values: Values) -> Any:
    """Whole numbers exactly, checked once at the end, so that no order of the rows overflows alone."""
    valid = _valid(values)
    if not valid:
        return None
    return float_sum(valid) if dtype.is_float else in_range(sum(valid), dtype)


def float_sum(values: Values) -> float:
    """The correctly rounded sum."""
    if not all(map(math.isfinite, values)):
        return sum(values)  # an infinity, or NaN where infinities meet
    try:
        return math.fsum(values)
    except OverflowError:
        return sum(values)


def _mean(dtype: DType, values: Values) -> float | None:
    valid = _valid(values)
    if not valid:
        return None
    return (float_sum(valid) if isinstance(valid[0], float) else sum(valid)) / len(valid)


def _var(dtype: DType, values: Values) -> float | None:
    valid = _valid(values)
    if len(valid) < 2:
        return None
    mean = float_sum(valid) / len(valid)
    return float_sum([(value - mean) * (value - mean) for value in valid]) / (len(valid) - 1)


def _std(dtype: DType, values: Values) -> float | None:
    var = _var(dtype, values)
    return None if var is None else math.sqrt(var)


def _least(dtype: DType, values: Values) -> Any:
    return min(_valid(values), key=order_key, default=None)


def _greatest(dtype: DType, values: Values) -> Any:
    return max(_valid(values), key=order_key, default=None)


def _arg_min(dtype: DType, values: Values, by: Values) -> Any:
    """The value, null or not, of the first row whose `by` is least."""
    rows = [(order_key(key), value) for value, key in zip(values, by, strict=True) if key is not None]
    return min(rows, key=lambda row: row[0])[1] if rows else None


def _arg_max(dtype: DType, values: Values, by: Values) -> Any:
    """The value, null or not, of the first row whose `by` is greatest."""
    rows = [(order_key(key), value) for value, key in zip(values, by, strict=True) if key is not None]
    return max(rows, key=lambda row: row[0])[1] if rows else None


_AGGREGATES: dict[str, Callable[..., Any]] = {
    "count": lambda dtype, rows: len(rows),
    "count_valid": lambda dtype, values: len(_valid(values)),
    "sum": _sum,
    "mean": _mean,
    "var": _var,
    "std": _std,
    "min": _least,
    "max": _greatest,
    "first": lambda dtype, values: values[0] if values else None,
    "last": lambda dtype, values: values[-1] if values else None,
    "arg_min": _arg_min,
    "arg_max": _arg_max,
}
