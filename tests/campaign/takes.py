"""Sorts of types, and what types the arguments of a call may have."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pyarrow as pa

from scalein.dtypes import DATE, F64, I64, STR, DType, Kind
from scalein.ir.functions.casts import is_utc
from scalein.ir.unify import common_type
from tests.campaign.kinds import dtype_of

Is = Callable[[DType], bool]
Types = Sequence[DType]
# An argument's type, given the types in scope, what the call shall give, and the arguments before. None: no such.
Take = Callable[[random.Random, Types, DType, list[DType]], DType | None]


def kind_is(*kinds: Kind) -> Is:
    return lambda dtype: dtype.kind in kinds


def is_number(dtype: DType) -> bool:
    return dtype.is_number


def is_float(dtype: DType) -> bool:
    return dtype.is_float


def is_int(dtype: DType) -> bool:
    return dtype.is_int


def is_text(dtype: DType) -> bool:
    return dtype.is_string


def is_any(dtype: DType) -> bool:
    return not dtype.is_nested


def has_sign(dtype: DType) -> bool:
    return (dtype.is_number and (dtype.is_float or dtype.is_signed)) or dtype.kind in (Kind.DUR, Kind.DEC)


is_bool, is_ts, is_dur, is_date = kind_is(Kind.BOOL), kind_is(Kind.TS), kind_is(Kind.DUR), kind_is(Kind.DATE)
is_i64, is_i32, is_f64 = kind_is(Kind.I64), kind_is(Kind.I32), kind_is(Kind.F64)
is_decimal = kind_is(Kind.DEC)


def is_nested(dtype: DType) -> bool:
    return dtype.is_nested


def is_list(dtype: DType) -> bool:
    return dtype.nested is not None and hasattr(dtype.nested, "value_type") and not pa.types.is_map(dtype.nested)


def is_struct(dtype: DType) -> bool:
    return dtype.nested is not None and pa.types.is_struct(dtype.nested)


# --- types of arguments ---


def same(rng: random.Random, types: Types, result: DType, before: list[DType]) -> DType | None:
    return result


def narrow(rng: random.Random, types: Types, result: DType, before: list[DType]) -> DType | None:
    """The result's type, now and then a narrower one that widens to it."""
    if rng.random() < 0.85 or not result.is_number:
        return result
    return rng.choice([t for t in types if t.is_number and common_type(t, result) == result] or [result])


def first(rng: random.Random, types: Types, result: DType, before: list[DType]) -> DType | None:
    """The first argument's type, or one that can be compared with it."""
    if rng.random() < 0.9:
        return before[0]
    return rng.choice([t for t in types if common_type(t, before[0]) is not None] or [before[0]])


def of(is_it: Is, *others: DType) -> Take:
    """A type of that sort from the columns, else one of `others`."""

    def take(rng: random.Random, types: Types, result: DType, before: list[DType]) -> DType | None:
        found = [dtype for dtype in types if is_it(dtype)] or list(others)
        return rng.choice(found) if found else None

    return take


def exactly(dtype: DType) -> Take:
    return lambda rng, types, result, before: dtype


def span_of(rng: random.Random, types: Types, result: DType, before: list[DType]) -> DType | None:
    return DType(Kind.DUR, unit=result.unit)


def time_of(rng: random.Random, types: Types, result: DType, before: list[DType]) -> DType | None:
    """A timestamp of the duration's unit; with the zone of one in scope."""
    return rng.choice([t for t in types if is_ts(t) and t.unit == result.unit] or [DType(Kind.TS, unit=result.unit)])


def list_of(rng: random.Random, types: Types, result: DType, before: list[DType]) -> DType | None:
    """A list in scope whose elements have the result's type."""
    found = [t for t in types if is_list(t) and t.nested is not None and dtype_of(t.nested.value_type) == result]
    return rng.choice(found) if found else None


def struct_with(rng: random.Random, types: Types, result: DType, before: list[DType]) -> DType | None:
    """A struct in scope that has a field of the result's type."""
    found = [t for t in types if is_struct(t) and any(dtype_of(field.type) == result for field in t.nested or ())]
    return rng.choice(found) if found else None


def castable(rng: random.Random, types: Types, result: DType, before: list[DType]) -> DType | None:
    """A type of a column that can be cast, and mostly is without failing."""
    return rng.choice([t for t in types if t != result and _can_cast(t, result)] or [I64 if result.is_number else None])


def _can_cast(source: DType, target: DType) -> bool:
    if source.is_nested or target.is_nested:
        return False
    match source.kind, target.kind:
        case Kind.DEC, _:
            return target.is_number or target.is_decimal
        case _, Kind.DEC:
            return source.is_number
        case (Kind.STR, Kind.BIN) | (Kind.DATE, Kind.DATE64) | (Kind.DATE64, Kind.DATE) | (Kind.TIME, Kind.TIME):
            return target.form != "fixed"
        case Kind.DATE64, Kind.TS:
            return is_utc(target)
        case Kind.TS, Kind.TIME:
            return is_utc(source)
        case Kind.TIME, _:
            return target.is_int and target.bits == source.bits
        case (Kind.BIN | Kind.DATE64), _:
            return False
        case Kind.BOOL, _:
            return target.is_number or target.is_string
        case _, Kind.BOOL:
            return source.is_number
        case Kind.TS, Kind.DATE:
            return is_utc(source)
        case Kind.DATE, Kind.TS:
            return is_utc(target)
        case (Kind.TS, Kind.TS) | (Kind.DUR, Kind.DUR):
            return True
        case (Kind.TS | Kind.DUR), Kind.I64:
            return True
        case Kind.DATE, _:
            return target.is_int or target.is_string
        case _, Kind.STR:
            return source.kind is not Kind.DUR and not source.is_bytes
    return source.is_number and target.is_number


any_column = of(is_any, I64)
a_ts = of(is_ts, DType(Kind.TS, unit="us"))
a_clock = of(kind_is(Kind.TS, Kind.TIME), DType(Kind.TS, unit="us"))
a_day = of(kind_is(Kind.TS, Kind.DATE, Kind.DATE64), DATE)
a_text, an_int, a_float = of(is_text, STR), of(is_int, I64), of(is_float, F64)
