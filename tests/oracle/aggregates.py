"""AGGREGATES: every aggregate as a Python function of the typed aggregate and one group's arguments.

`fn(agg, *columns)` gets each argument's values of the group's rows, nulls included, in the source's order; `count`,
which has no argument, gets a null a row.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from scalein.errors import ComputeError
from scalein.ir.aggregates import UserAggregate
from scalein.ir.exprs import Agg, Call, NamedAgg, type_of
from scalein.ir.udf import Method
from tests.oracle import udfs
from tests.oracle.functions import NoValue, hash_value, in_range
from tests.oracle.values import Values, order_key


def aggregate(item: NamedAgg, columns: list[Values]) -> Any:
    """The value of an aggregate over a group; an error names its column."""
    try:
        return AGGREGATES[item.agg.fn](item.agg, *columns)
    except NoValue as reason:
        raise ComputeError(f"{reason} in `{item.name}`", at=item.agg.at, type=type_of(item.agg)) from None


def valid(values: Values) -> Values:
    return [value for value in values if value is not None]


def _sum(agg: Agg, values: Values) -> Any:
    """Whole numbers exactly, checked once at the end, so that no order of the rows overflows alone."""
    known = valid(values)
    if not known:
        return None
    return float_sum(known) if type_of(agg).is_float else in_range(sum(known), type_of(agg))


def float_sum(values: Values) -> float:
    """The correctly rounded sum."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # an infinity, or NaN where infinities meet
        return sum(values)


def _mean(agg: Agg, values: Values) -> float | None:
    known, dtype = valid(values), type_of(agg.args[0])
    if not known:
        return None
    if dtype.is_float:
        return float_sum(known) / len(known)
    return float(Fraction(sum(known), len(known)) / Fraction(10) ** dtype.scale)


def _var(agg: Agg, values: Values) -> float | None:
    known = valid(values)
    if len(known) < 2:
        return None
    mean = float_sum(known) / len(known)
    return float_sum([(value - mean) * (value - mean) for value in known]) / (len(known) - 1)


def _std(agg: Agg, values: Values) -> float | None:
    var = _var(agg, values)
    return None if var is None else math.sqrt(var)


def _pairs(xs: Values, ys: Values) -> list[tuple[Any, Any]]:
    return [(x, y) for x, y in zip(xs, ys, strict=True) if x is not None and y is not None]


def _products(pairs: list[tuple[Any, Any]]) -> tuple[Fraction, Fraction, Fraction] | None:
    """Sums of squared deviations of either side and of their products, exactly; None if a value is infinite or NaN."""
    if not all(map(math.isfinite, (value for pair in pairs for value in pair))):
        return None
    sides = [list(map(Fraction, side)) for side in zip(*pairs, strict=True)]
    a, b = ([value - sum(side) / len(side) for value in side] for side in sides)
    first, second, both = (sum((p * q for p, q in zip(*two, strict=True)), Fraction())
                           for two in ((a, a), (b, b), (a, b)))
    return first, second, both


def _cov(agg: Agg, xs: Values, ys: Values) -> float | None:
    pairs = _pairs(xs, ys)
    if len(pairs) < 2:
        return None
    found = _products(pairs)
    return math.nan if found is None else float(found[2] / (len(pairs) - 1))


def _corr(agg: Agg, xs: Values, ys: Values) -> float | None:
    """NaN where a side has the same value in all rows."""
    pairs = _pairs(xs, ys)
    if len(pairs) < 2:
        return None
    x, y, both = _products(pairs) or (0, 0, 0)
    return math.copysign(math.sqrt(both * both / (x * y)), both) if x and y else math.nan


def _end(number: int) -> Callable[..., Any]:
    """The value, null or not, of the first or last row; of those that count, if a condition says which do."""

    def apply(agg: Agg, values: Values, counts: Values | None = None) -> Any:
        rows = values if counts is None else [value for value, each in zip(values, counts, strict=True) if each is True]
        return rows[number] if rows else None

    return apply


def _by(choose: Callable[..., Any]) -> Callable[..., Any]:
    """The value, null or not, of the first row whose `by` is least or greatest."""

    def apply(agg: Agg, values: Values, by: Values) -> Any:
        rows = [(order_key(key), value) for value, key in zip(values, by, strict=True) if key is not None]
        return choose(rows, key=lambda row: row[0])[1] if rows else None

    return apply


def _quantile(agg: Agg, values: Values) -> float | None:
    """Between the two values next to the place q * (n - 1), by its distance from them."""
    known, q = sorted(valid(values), key=order_key), float(str(agg.params[0]))
    if not known:
        return None
    place = q * (len(known) - 1)
    below = math.floor(place)
    low, high = known[below], known[math.ceil(place)]
    share = place - below
    return float(low if low == high else low * (1 - share) + high * share)


COARSE_BITS = 45  # of the 52 of a fraction, which an approximate quantile leaves out


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


def _approx_quantile(agg: Agg, values: Values) -> float | None:
    return _quantile(agg, [None if value is None else coarse(value) for value in values])


SKETCH_BITS = 9  # of a hash, which choose one of 512 registers


def _approx_n_unique(agg: Agg, values: Values) -> int:
    """HyperLogLog: a hash chooses a register by its first bits, which has the longest run of zeros after them."""
    registers = [0] * (1 << SKETCH_BITS)
    for value in valid(values):
        bits = hash_value(value, type_of(agg.args[0])) % (1 << 64)
        rest = bits << SKETCH_BITS & (1 << 64) - 1 | 1 << (SKETCH_BITS - 1)
        number = bits >> (64 - SKETCH_BITS)
        registers[number] = max(registers[number], 65 - rest.bit_length())
    size, empty = float(len(registers)), registers.count(0)
    raw = 0.7213 / (1 + 1.079 / size) * size * size / sum(2.0**-run for run in registers)
    return int((size * math.log(size / empty) if raw <= 2.5 * size and empty else raw) + 0.5)


def _top_k(agg: Agg, values: Values, by: Values) -> Values:
    rows = [(order_key(key), value) for value, key in zip(values, by, strict=True) if None not in (key, value)]
    return [value for _, value in sorted(rows, key=lambda row: row[0], reverse=True)[: agg.params[0]]]  # type: ignore[misc]


def _udaf(agg: Agg, *columns: Values) -> Any:
    """The class's own methods, one row after the other; null if no row counts."""
    (user,) = agg.params
    assert isinstance(user, UserAggregate)
    acc, width = user.acc, len(user.params)
    assert isinstance(acc.update, Method)
    fields = {f"self.{slot.name}": slot.init for slot in acc.slots}
    counted = 0
    try:
        for row in zip(*columns, strict=True):
            skips = any(value is None and strict for value, strict in zip(row[:width], acc.strict, strict=True))
            if skips or (len(agg.args) > width and row[-1] is not True):
                continue
            counted += 1
            udfs.change(acc.update, fields, row[:width])
        assert isinstance(acc.finish, Call)
        return udfs.call(acc.finish.params[0], list(fields.values())) if counted else None  # type: ignore[arg-type]
    except udfs.Failed as error:
        raise NoValue(str(error)) from None


AGGREGATES: dict[str, Callable[..., Any]] = {
    "count": lambda agg, rows: len(rows),
    "count_valid": lambda agg, values: len(valid(values)),
    "sum": _sum,
    "mean": _mean,
    "var": _var,
    "std": _std,
    "min": lambda agg, values: min(valid(values), key=order_key, default=None),
    "max": lambda agg, values: max(valid(values), key=order_key, default=None),
    "cov": _cov,
    "corr": _corr,
    "first": _end(0),
    "last": _end(-1),
    "arg_min": _by(min),
    "arg_max": _by(max),
    "n_unique": lambda agg, values: len({order_key(value) for value in valid(values)}),
    "quantile": _quantile,
    "collect": lambda agg, values: valid(values),
    "top_k": _top_k,
    "approx_n_unique": _approx_n_unique,
    "approx_quantile": _approx_quantile,
    "udaf": _udaf,
}
