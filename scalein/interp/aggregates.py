"""Every aggregate as a function of one group's rows, in the source's order."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from scalein.dtypes import DType
from scalein.errors import ComputeError
from scalein.interp.scalars import in_range
from scalein.interp.values import Values, has_plain_elements, order_key, to_arrow
from scalein.ir.exprs import Agg, type_of
from scalein.ir.functions.hashing import hash_value
from scalein.ir.functions.registry import NoValue
from scalein.ir.printer import show_agg
from scalein.layout import COARSE_BITS, SKETCH_BITS, SKETCH_REGISTERS


def aggregate(agg: Agg, args: list[Values]) -> Any:
    """The value of an aggregate over a group whose rows have these arguments."""
    try:
        if agg.fn in _LISTS:
            found = _LISTS[agg.fn](*args, *agg.params)
            if has_plain_elements(type_of(agg).arrow):
                return found
            return to_arrow(found, type_of(agg.args[0])).to_pylist()  # as any nested value is held
        if agg.fn == "mean" and type_of(agg.args[0]).is_decimal:
            return _decimal_mean(args[0], type_of(agg.args[0]).scale)
        if agg.fn == "approx_n_unique":
            own = type_of(agg.args[0])
            args = [[hash_value(value, own) for value in _valid(args[0])]]
        return _AGGREGATES[agg.fn](type_of(agg), *args, *agg.params)
    except NoValue as error:
        raise ComputeError(f"{error} in `{show_agg(agg)}`", at=agg.at, type=type_of(agg)) from None


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


def _decimal_mean(values: Values, scale: int) -> float | None:
    """The exact mean, rounded once."""
    valid = _valid(values)
    return float(Fraction(sum(valid), len(valid)) / Fraction(10) ** scale) if valid else None


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


def _quantile(dtype: DType, values: Values, q: float) -> float | None:
    """Between the two values next to the place q * (n - 1), by its distance from them."""
    valid = sorted(_valid(values), key=order_key)
    if not valid:
        return None
    place = q * (len(valid) - 1)
    below = math.floor(place)
    low, high = valid[below], valid[math.ceil(place)]
    share = place - below
    return float(low if low == high else low * (1 - share) + high * share)


def _approx_quantile(dtype: DType, values: Values, q: float) -> float | None:
    return _quantile(dtype, [None if value is None else coarse(value) for value in values], q)


def coarse(value: float) -> float:
    """The nearest float with 8 significant bits, but never an infinity that was none."""
    bits = int.from_bytes(struct.pack("<d", value), "little")
    size, sign = bits & ((1 << 63) - 1), bits >> 63 << 63
    if size >= 0x7FF << 52:
        return value
    mask = -(1 << COARSE_BITS)
    nearest = (size + (1 << (COARSE_BITS - 1))) & mask
    size = nearest if nearest < 0x7FF << 52 else size & mask
    return float(struct.unpack("<d", (size | sign).to_bytes(8, "little"))[0])


def _approx_n_unique(dtype: DType, hashes: Values) -> int:
    """HyperLogLog: each hash chooses a register by its first bits, which keeps the longest run of zeros behind them."""
    registers = [0] * SKETCH_REGISTERS
    for value in hashes:
        rest = (value << SKETCH_BITS | 1 << (SKETCH_BITS - 1)) & (1 << 64) - 1
        number = (value & (1 << 64) - 1) >> (64 - SKETCH_BITS)
        registers[number] = max(registers[number], 65 - rest.bit_length())
    size, empty = float(SKETCH_REGISTERS), registers.count(0)
    raw = 0.7213 / (1 + 1.079 / size) * size * size / sum(2.0**-run for run in registers)
    return int((size * math.log(size / empty) if raw <= 2.5 * size and empty else raw) + 0.5)


def _collect(values: Values) -> Values:
    return _valid(values)


def _top_k(values: Values, by: Values, k: int) -> Values:
    rows = [(order_key(key), value) for value, key in zip(values, by, strict=True) if None not in (key, value)]
    return [value for _, value in sorted(rows, key=lambda row: row[0], reverse=True)[:k]]


_LISTS: dict[str, Callable[..., Values]] = {"collect": _collect, "top_k": _top_k}

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
    "n_unique": lambda dtype, values: len({order_key(value) for value in values if value is not None}),
    "quantile": _quantile,
    "approx_n_unique": _approx_n_unique,
    "approx_quantile": _approx_quantile,
}
