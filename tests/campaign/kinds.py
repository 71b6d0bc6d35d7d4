"""Types of generated columns, as values and as Python text; constants of them as text."""

from __future__ import annotations

import datetime
import decimal
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pyarrow as pa

from scalein.dtypes import TIMES, UNITS_PER_SECOND, DType, Kind, from_arrow_type
from scalein.ir.literals import fit
from tests import strategies

# What columns are made of, by how often: (weight, types).
COLUMN_TYPES: list[tuple[int, list[pa.DataType]]] = [
    (6, [pa.int64()]),
    (4, [pa.float64()]),
    (4, strategies.INTS),
    (3, [pa.string()]),
    (2, strategies.STRINGS),
    (2, [pa.bool_()]),
    (1, [pa.float32()]),
    (2, strategies.NAIVE),
    (1, strategies.ZONED),
    (1, [pa.date32()]),
    (1, strategies.DURATIONS),
    (2, [pa.decimal128(9, 2), pa.decimal128(18, 4), pa.decimal128(38, 10), pa.decimal128(5, 0)]),
    (1, [pa.date64(), pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")]),
    (1, [pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(4), pa.binary(16)]),
    (1, [pa.dictionary(pa.int8(), pa.int64()), pa.dictionary(pa.int32(), pa.timestamp("us")),
         pa.dictionary(pa.int16(), pa.float64())]),
    (2, [pa.list_(pa.int64()), pa.list_(pa.string()), pa.large_list(pa.float64()), pa.list_(pa.int32(), 2),
         *[pa.struct([("x", pa.int64()), ("y", pa.string())])] * 2, pa.list_(pa.struct([("x", pa.int64())]))]),
]  # fmt: skip


def column_type(rng: random.Random) -> pa.DataType:
    """A type for a column."""
    groups = [types for _, types in COLUMN_TYPES]
    return rng.choice(rng.choices(groups, [weight for weight, _ in COLUMN_TYPES])[0])


dtype_of = cache(from_arrow_type)


@cache
def type_text(arrow: pa.DataType) -> str:
    """The type as pyarrow is asked for it."""
    if pa.types.is_dictionary(arrow):
        return f"pa.dictionary({type_text(arrow.index_type)}, {type_text(arrow.value_type)})"
    if pa.types.is_timestamp(arrow):
        return f"pa.timestamp({arrow.unit!r}{f', {arrow.tz!r}' if arrow.tz else ''})"
    if pa.types.is_duration(arrow):
        return f"pa.duration({arrow.unit!r})"
    if pa.types.is_time(arrow):
        return f"pa.time{arrow.bit_width}({arrow.unit!r})"
    if pa.types.is_decimal128(arrow):
        return f"pa.decimal128({arrow.precision}, {arrow.scale})"
    if pa.types.is_fixed_size_binary(arrow):
        return f"pa.binary({arrow.byte_width})"
    if pa.types.is_struct(arrow):
        fields = ", ".join(f"({field.name!r}, {type_text(field.type)})" for field in arrow)
        return f"pa.struct([{fields}])"
    if pa.types.is_fixed_size_list(arrow):
        return f"pa.list_({type_text(arrow.value_type)}, {arrow.list_size})"
    if pa.types.is_large_list(arrow):
        return f"pa.large_list({type_text(arrow.value_type)})"
    if pa.types.is_list(arrow):
        return f"pa.list_({type_text(arrow.value_type)})"
    return {"bool": "pa.bool_()", "float": "pa.float32()", "double": "pa.float64()", "date32[day]": "pa.date32()",
            "date64[ms]": "pa.date64()"}.get(str(arrow), f"pa.{arrow}()")  # fmt: skip


_EPOCH = datetime.datetime(1970, 1, 1)


def constant_text(value: Any, dtype: DType) -> str:
    """A physical value as a typed constant."""
    arrow = type_text(dtype.arrow)
    found = python_value(value, dtype)
    fitted = value if found is None else getattr(fit(found, dtype), "value", None)
    if value is None or fitted is not None:
        return f"lit({found!r}, {arrow})"
    if dtype.kind not in TIMES:
        return f"lit({found!r}, {arrow})"
    through = pa.int32() if dtype.bits == 32 else pa.int64()  # what Python's own time types cannot hold
    return f"lit({value!r}, {type_text(through)}).cast({arrow})"


def python_value(value: Any, dtype: DType) -> Any:
    """The Python object for a physical value; where there is none exactly, something near."""
    if value is None:
        return None
    try:
        match dtype.kind:
            case Kind.TS:
                zone = datetime.UTC if dtype.tz else None
                return (_EPOCH + _span(value, dtype)).replace(tzinfo=zone)
            case Kind.DUR:
                return _span(value, dtype)
            case Kind.DATE:
                return _EPOCH.date() + datetime.timedelta(value)
            case Kind.DATE64:
                return _EPOCH.date() + datetime.timedelta(value // 86_400_000)
            case Kind.TIME:
                return (_EPOCH + _span(value, dtype)).time()
            case _:
                return value
    except OverflowError:
        return None


def _span(value: int, dtype: DType) -> datetime.timedelta:
    return datetime.timedelta(microseconds=value * 1_000_000 // UNITS_PER_SECOND[dtype.unit])


def plain_of(dtype: DType, number: int) -> Any:
    """A harmless value of a type made from a small number, as pyarrow takes it."""
    match dtype.kind:
        case Kind.DEC:
            most = 10 ** min(dtype.precision, 3) - 1
            return decimal.Decimal(max(-most, min(most, number * 3))).scaleb(-dtype.scale)
        case Kind.DATE64:
            return number * 86_400_000
        case Kind.TIME:
            return number * 3_607 * UNITS_PER_SECOND[dtype.unit] % (86_400 * UNITS_PER_SECOND[dtype.unit])
        case Kind.BIN:
            made = b"key%d" % number if number % 3 else b"a longer key than twelve bytes %d" % number
            return made[: dtype.width].ljust(dtype.width, b"\0") if dtype.form == "fixed" else made
        case Kind.NESTED:
            return _nested(dtype.arrow, number)
        case _:
            return strategies.plain_value(dtype, number)


def _nested(arrow: pa.DataType, number: int) -> Any:
    if pa.types.is_struct(arrow):
        return {field.name: None if number % 4 == k else plain_of(dtype_of(field.type), number + k)
                for k, field in enumerate(arrow)}
    count = arrow.list_size if pa.types.is_fixed_size_list(arrow) else abs(number) % 4
    return [None if (number + k) % 5 == 0 else plain_of(dtype_of(arrow.value_type), number + k) for k in range(count)]


def specials_of(dtype: DType, extreme: bool) -> list[Any]:
    """Values at which code tends to be wrong, as pyarrow takes them."""
    match dtype.kind:
        case Kind.DEC:
            most = 10**dtype.precision - 1
            digits = [0, 1, -1, 5, -5, 10 ** min(dtype.precision - 1, max(0, dtype.scale)), *([most, -most] * extreme)]
            return [decimal.Decimal(value).scaleb(-dtype.scale, _WIDE) for value in digits]
        case Kind.DATE64:
            return [days * 86_400_000 for days in (0, 1, -1, 11_016, -25_509)]
        case Kind.TIME:
            day = 86_400 * UNITS_PER_SECOND[dtype.unit]
            return [0, 1, day - 1, day // 2, day // 24]
        case Kind.BIN:
            words = [b"", b"a", b"\0", b"ab", b"\xff\xfe", b"thirteen byte", b"x" * 40]
            return [w[: dtype.width].ljust(dtype.width, b"\0") for w in words] if dtype.form == "fixed" else words
        case Kind.NESTED:
            return [plain_of(dtype, number) for number in (0, 1, 2, 3, 5)]
        case _:
            return strategies.specials(dtype, extreme=extreme)


_WIDE = decimal.Context(prec=40)


@cache
def pool(dtype: DType, extreme: bool) -> list[Any]:
    """Values that constants and columns are drawn from: special ones, and as many plain ones."""
    return [*specials_of(dtype, extreme), *(plain_of(dtype, number) for number in range(-9, 10))]


def value_of(rng: random.Random, dtype: DType, extreme: bool = False) -> Any:
    return rng.choice(pool(dtype, extreme))


def array_of(values: Sequence[Any], type_: pa.DataType) -> pa.Array:
    """An array of exactly this type; a dictionary has at most 100 words, and the first one for others."""
    if not pa.types.is_dictionary(type_):
        return pa.array(values, type_)
    codes, words = encoded(values)
    return pa.DictionaryArray.from_arrays(pa.array(codes, type_.index_type), pa.array(words, type_.value_type))


def encoded(values: Sequence[Any]) -> tuple[list[int | None], list[Any]]:
    """Codes and words."""
    places = {repr(value): value for value in values if value is not None}
    words = list(places.values())[:100]
    codes = {repr(word): code for code, word in enumerate(words)}
    return [None if value is None else codes.get(repr(value), 0) for value in values], words
