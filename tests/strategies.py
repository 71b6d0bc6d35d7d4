"""Hypothesis strategies for data: types, values, arrays of every Arrow shape, tables.

Short columns are drawn value by value, so that a failure shrinks to its cause; long ones come from numpy with a drawn
seed, so that they cost nothing. Times stay within the years 1700 to 2200, which every unit and DuckDB hold, unless
`extreme` is asked for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from scalein.dtypes import DType, Kind, from_arrow_type, ticks_per_day
from tests.oracle.values import to_arrow

INTS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
FLOATS = [pa.float32(), pa.float64()]
NUMBERS = INTS + FLOATS
STRINGS = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string()),
           pa.dictionary(pa.int8(), pa.large_string())]  # fmt: skip
UNITS = ["s", "ms", "us", "ns"]
NAIVE = [pa.timestamp(unit) for unit in UNITS]
ZONED = [pa.timestamp("ms", "UTC"), pa.timestamp("us", "Europe/Berlin"), pa.timestamp("ns", "Asia/Kolkata")]
DURATIONS = [pa.duration(unit) for unit in UNITS]
CLOCKS = [pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")]
TIMES = [*NAIVE, *ZONED, pa.date32(), pa.date64(), *DURATIONS, *CLOCKS]
DECIMALS = [pa.decimal128(*digits) for digits in ((4, 1), (18, 2), (19, 0), (30, 6), (38, 10))]
BINARIES = [pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(3), pa.binary(16)]
# Dictionaries of anything but text, and narrow decimals: what is decoded when it is read.
ENCODED = [pa.dictionary(pa.int8(), pa.int64()), pa.dictionary(pa.int32(), pa.timestamp("us")),
           pa.dictionary(pa.int16(), pa.decimal128(9, 2)), pa.dictionary(pa.uint8(), pa.binary()), pa.decimal64(12, 2)]
ALL = [pa.bool_(), *NUMBERS, *STRINGS, *TIMES, *DECIMALS, *BINARIES, *ENCODED]
FIXED = [pa.bool_(), *NUMBERS, *TIMES, *DECIMALS]  # everything but text and binary

_DAYS_PER_CENTURY = 36_524
_WORDS = ["", "a", "b", "ab", "abc", "view", "click", "Ünïcödé", "straße", "ΑΒΓδ", "日本語", "👩🏽‍🚀", "a\nb", "it's",
          '"', "%_", "twelve bytes", "thirteen byte", "x" * 40, "é" * 200]  # fmt: skip


def specials(dtype: DType, *, extreme: bool = True) -> list[Any]:
    """Physical values of a type at which code tends to be wrong."""
    match dtype.kind:
        case Kind.BOOL:
            return [True, False]
        case Kind.F64:
            odd = [5e-324, 1.7976931348623157e308, -1.7976931348623157e308, 9.007199254740993e15, 9.223372036854776e18]
            plain = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 0.1, 1e10, -3.75, 2147483648.0, 1e-10]
            return [*plain, float("nan"), float("inf"), float("-inf"), *(odd if extreme else [])]
        case Kind.F32:
            odd = [float(np.float32(x)) for x in (1e-45, 3.4028235e38, -3.4028235e38, 16777217.0)]
            plain = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, float(np.float32(0.1)), 65536.0, -3.75]
            return [*plain, float("nan"), float("inf"), float("-inf"), *(odd if extreme else [])]
        case Kind.STR:
            return _WORDS
        case Kind.BIN if dtype.form == "fixed":
            words = [bytes(16), b"\xff" * 16, b"abcdefghijklmnop", b"ab\0" * 6, b"\0" * 15 + b"\1"]
            return [word[: dtype.width] for word in words]
        case Kind.BIN:
            return [word.encode() for word in _WORDS] + [b"\0", b"\xff\xfe", b"\0" * 20, b"a\0", b"\x80" * 12]
    low, high = dtype.int_range()
    if dtype.is_int:
        usual = [0, 1, 2, 3, 7, 10, 100, -1, -2, -7, -100]
        ends = [low, low + 1, high, high - 1, high // 2] if extreme else []
        return [value for value in [*usual, *ends] if low <= value <= high]
    if dtype.is_decimal:
        usual = [0, 1, -1, 5, -5, 10, 15, -15, 49, 50, 51, -50, 99, 100, 101, -101, 12_345]
        ends = [low, low + 1, high, high - 1, high // 2, -(high // 10) - 1, 2**63, -(2**63), 2**64] if extreme else []
        return [value for value in [*usual, *ends] if low <= value <= high]
    day = ticks_per_day(dtype)
    if dtype.kind is Kind.TIME:
        return [0, 1, 2, day - 1, day - 2, day // 2, day // 2 + 1, day // 24, day // 86_400 - 1]
    if dtype.kind is Kind.DATE64:
        ends = [-(2**31) * day, (2**31 - 1) * day, 2**31 * day] if extreme else []
        return [*(number * day for number in (0, 1, -1, 11_016, 19_782, -25_509)), *ends]
    usual = [0, 1, -1, day, -day, day - 1, -day - 1, 11_016 * day, 11_016 * day + day // 2, -25_509 * day + 1]
    return [*usual, low, high, low + 1, high - 1] if extreme else usual


def plain_value(dtype: DType, number: int) -> Any:
    """A harmless value of a type made from an integer; distinct for distinct small numbers where the type allows."""
    match dtype.kind:
        case Kind.BOOL:
            return number % 2 == 1
        case Kind.F64 | Kind.F32:
            return number / 4
        case Kind.BIN:
            if dtype.form == "fixed":
                return number.to_bytes(4, "little", signed=True).ljust(16, b".")[: dtype.width]
            return f"{'key' if number % 3 else 'a longer key than twelve bytes '}{number}".encode()
        case Kind.DATE64:
            return number * ticks_per_day(dtype)
        case Kind.TIME:
            return abs(number) * (ticks_per_day(dtype) // 86_400) % ticks_per_day(dtype)
        case Kind.STR:
            return f"{'key' if number % 3 else 'a longer key than twelve bytes '}{number}"
    if dtype.kind in (Kind.TS, Kind.DUR, Kind.DATE):
        return number * max(1, ticks_per_day(dtype) // 24_000)  # steps of 3.6 seconds
    low, high = dtype.int_range()
    return max(low, min(high, number)) if dtype.is_signed else abs(number) % (high + 1)


# --- arrays ---------------------------------------------------------------------------------------


def values(dtype: DType, *, extreme: bool) -> st.SearchStrategy[Any]:
    """One physical value, special or plain."""
    odd = st.sampled_from(specials(dtype, extreme=extreme))
    usual = st.integers(-20, 20).map(lambda number: plain_value(dtype, number))
    if dtype.kind is Kind.STR:
        return odd | usual | st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=12)
    return odd | usual


SHAPES = ["small", "skewed", "unique", "special"]


def many_values(dtype: DType, count: int, seed: int, shape: str, *, extreme: bool) -> list[Any]:
    """Physical values by seed: few distinct ones, half of them one, all distinct, or special ones."""
    rng = np.random.default_rng(seed)
    if shape == "special":
        pool = specials(dtype, extreme=extreme)
        return [pool[i] for i in rng.integers(0, len(pool), count)]
    spread = 12 if shape == "small" else 1000
    numbers = rng.permutation(count) if shape == "unique" else rng.integers(-spread, spread, count)
    if shape == "skewed":
        numbers[rng.random(count) < 0.5] = 7
    return [plain_value(dtype, int(number)) for number in numbers]


def with_nulls(items: list[Any], share: float, seed: int) -> list[Any]:
    gone = np.random.default_rng(seed + 1).random(len(items)) < share
    return [None if is_null else item for item, is_null in zip(items, gone, strict=True)]


def array_of(items: list[Any], type_: pa.DataType) -> pa.Array:
    """An Arrow array of exactly this type, dictionaries included."""
    dtype = from_arrow_type(type_)
    if pa.types.is_dictionary(type_):
        words: list[Any] = list(dict.fromkeys(item for item in items if item is not None))[:100]
        codes = {word: code for code, word in enumerate(words)}
        indices = pa.array([codes.get(item) for item in items], type_.index_type)
        values = pa.array(words, type_.value_type) if dtype.is_string else to_arrow(words, dtype)
        return pa.DictionaryArray.from_arrays(indices, values)
    made = to_arrow(items, dtype)
    return made if made.type == type_ else made.cast(type_)


@st.composite
def arrays(draw: st.DrawFn, type_: pa.DataType, count: int, *, nulls: bool = True, extreme: bool = False) -> pa.Array:
    """An array of `count` rows; as often as not a slice of a longer one, so that its offset is not zero."""
    dtype = from_arrow_type(type_)
    before, after = draw(st.sampled_from([(0, 0), (0, 0), (1, 0), (3, 2), (9, 1)]))
    total = count + before + after
    if total <= 16:
        one = values(dtype, extreme=extreme)
        items = draw(st.lists(st.none() | one if nulls else one, min_size=total, max_size=total))
    else:
        seed, shape = draw(st.integers(0, 2**32)), draw(st.sampled_from(SHAPES))
        share = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])) if nulls else 0.0
        items = with_nulls(many_values(dtype, total, seed, shape, extreme=extreme), share, seed)
    return array_of(items, type_).slice(before, count)


def row_counts(most: int = 300) -> st.SearchStrategy[int]:
    """Numbers of rows: none, a few, and around the sizes of vectors and blocks."""
    edges = [n for n in (0, 15, 16, 17, 63, 64, 65, 128, 257, 300, 5000) if n <= most]
    return st.integers(0, 8) | st.sampled_from(edges)


@st.composite
def schemas(draw: st.DrawFn, types: list[pa.DataType] | None = None, least: int = 1, most: int = 4) -> pa.Schema:
    """Columns a, b, c, ... of types drawn from the list."""
    drawn = draw(st.lists(st.sampled_from(types or ALL), min_size=least, max_size=most))
    return pa.schema([pa.field(name, type_) for name, type_ in zip("abcdefgh", drawn, strict=False)])


@st.composite
def tables(draw: st.DrawFn, schema: pa.Schema, *, most: int = 300, least: int = 0, extreme: bool = False,
           chunked: bool = True) -> pa.Table:  # fmt: skip
    """A table of the schema; columns that are not nullable have no nulls; often in several chunks, some empty."""
    count = max(least, draw(row_counts(most)))
    columns = [draw(arrays(field.type, count, nulls=field.nullable, extreme=extreme)) for field in schema]
    batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    if not chunked or not draw(st.booleans()):
        return pa.Table.from_batches([batch], schema)
    cuts = sorted(draw(st.lists(st.integers(0, count), max_size=4)))
    parts = [batch.slice(start, stop - start) for start, stop in zip([0, *cuts], [*cuts, count], strict=True)]
    return pa.Table.from_batches(parts, schema)


def of_types(*types: pa.DataType) -> pa.Schema:
    """Columns a, b, c, ... of these types."""
    return pa.schema([pa.field(name, type_) for name, type_ in zip("abcdefgh", types, strict=False)])
