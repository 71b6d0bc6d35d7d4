"""Decimals: digits without the point, as one integer of 128 bits, and a scale that stands in the type.

Sums have the greater scale and a digit more, products the sum of scales and of digits; past 38 digits the type
stays at 38, and a value that needs more is an error. `/` gives a float (`functions/arithmetic.py`). Here is what those
numbers mean, in whole numbers of Python: constants are folded with it, kernels are written after it.
"""

from __future__ import annotations

import math

from scalein.dtypes import MAX_PRECISION, DType, Kind
from scalein.ir.exprs import Call, Expr, Lit, type_of
from scalein.ir.functions.registry import typed
from scalein.ir.literals import decimal_type
from scalein.ir.unify import Refused, as_decimal, cast_to, own_type_of, unify

INEXACT = "cast to pa.float64(), or to an integer"


def is_decimal_arithmetic(args: tuple[Expr, ...]) -> bool:
    """Whether arguments meet as decimals: one is, and the others are decimals, integers or null."""
    known = [own for own in map(own_type_of, args) if own is not None]
    return any(own.is_decimal for own in known) and all(own.is_decimal or own.is_int for own in known)


def total(call: Call, args: tuple[Expr, ...], refusal: str) -> Expr:
    """A sum or difference of decimals and integers, typed."""
    both = unify(args, refusal)
    common = type_of(both[0])
    dtype = DType(Kind.DEC, precision=min(MAX_PRECISION, common.precision + 1), scale=common.scale)
    given = [met if arg.dtype is None else arg for arg, met in zip(args, both, strict=True)]  # one cast, not two
    return typed(call, [cast_to(arg, dtype) for arg in given], dtype)


def product(call: Call, args: tuple[Expr, ...]) -> Expr:
    """Each factor keeps its own scale; a plain constant has as many digits as it was written with."""
    left, right = (_factor(arg, other) for arg, other in (args, args[::-1]))
    one, other = type_of(left), type_of(right)
    scale = one.scale + other.scale
    if scale > MAX_PRECISION:
        raise Refused(f"* of {one!r} and {other!r} has {scale} decimals, more than {MAX_PRECISION}",
                      "cast one side to fewer digits, for example .cast(pa.decimal128(18, 4))")
    precision = min(MAX_PRECISION, one.precision + other.precision)
    return typed(call, [left, right], DType(Kind.DEC, precision=precision, scale=scale))


def _factor(arg: Expr, other: Expr) -> Expr:
    if isinstance(arg, Lit) and arg.dtype is None and arg.value is not None:
        own = decimal_type(arg.value)  # type: ignore[arg-type]
    else:
        own = own_type_of(arg) or own_type_of(other)
    assert own is not None
    dtype = as_decimal(own)
    assert dtype is not None
    return cast_to(arg, dtype)


# --- what values mean


def rescaled(value: int, have: int, want: int) -> int:
    """Digits at another scale, rounded half away from zero."""
    if want >= have:
        return int(value * 10 ** (want - have))
    unit = 10 ** (have - want)
    size = int((2 * abs(value) + unit) // (2 * unit))
    return -size if value < 0 else size


def truncated(value: int, scale: int) -> int:
    """The whole part."""
    size = int(abs(value) // 10**scale if scale >= 0 else abs(value) * 10**-scale)
    return -size if value < 0 else size


def to_float(value: int, scale: int) -> float:
    """The digits, rounded to a float, over the power of ten: two roundings, as kernels do it."""
    return float(value) / 10.0**scale if scale >= 0 else float(value) * 10.0**-scale


def from_float(value: float, scale: int) -> int | None:
    """The nearest decimal, half away from zero, of the float times the power of ten; None for nan and inf."""
    scaled = value * 10.0**scale if scale >= 0 else value / 10.0**-scale
    if not math.isfinite(scaled):
        return None
    rest, whole = math.modf(scaled)  # both exact
    return int(whole) + (1 if scaled > 0 else -1) if abs(rest) >= 0.5 else int(whole)


def rounded(value: int, dtype: DType, digits: int) -> int:
    """Half away from zero at `digits` decimals; the scale stays."""
    return rescaled(rescaled(value, dtype.scale, digits), digits, dtype.scale)
