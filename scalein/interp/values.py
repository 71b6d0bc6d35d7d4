"""Arrow arrays as lists of plain values, and the order and equality of those values.

A value is a bool, an int (also for times of every kind, and for the digits of a decimal), a float, a str, bytes, or
None for null. A float32 is held as the float that equals it.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from scalein.dtypes import TIMES, DType, Kind, from_arrow_type

Values = list[Any]


def from_arrow(array: pa.Array | pa.ChunkedArray) -> Values:
    """The values of an Arrow column; a dictionary gives what its codes stand for."""
    if isinstance(array, pa.ChunkedArray):
        return [value for chunk in array.chunks for value in from_arrow(chunk)]
    if pa.types.is_dictionary(array.type):
        words = from_arrow(array.dictionary)
        return [None if code is None else words[code] for code in array.indices.to_pylist()]
    if pa.types.is_temporal(array.type):
        return array.view(pa.int64() if array.type.bit_width == 64 else pa.int32()).to_pylist()  # type: ignore[no-any-return]
    if pa.types.is_decimal(array.type):
        return _digits(array)
    if has_plain_elements(array.type):
        offsets, inner = array.offsets.to_pylist(), from_arrow(array.values)
        return [inner[start:end] if is_valid else None for start, end, is_valid
                in zip(offsets[:-1], offsets[1:], array.is_valid().to_pylist(), strict=True)]
    return array.to_pylist()  # type: ignore[no-any-return]


def has_plain_elements(arrow: pa.DataType) -> bool:
    """Whether lists of this type hold their elements as columns of that type do: Python has no time so extreme.

    Every other nested value is held as pyarrow gives it.
    """
    is_list = pa.types.is_list(arrow) or pa.types.is_large_list(arrow)
    return bool(is_list and (pa.types.is_temporal(arrow.value_type) or pa.types.is_decimal128(arrow.value_type)))


def to_arrow(values: Sequence[Any], dtype: DType) -> pa.Array:
    """The Arrow array, of exactly `dtype.arrow`, that holds these values."""
    match dtype.kind:
        case kind if kind in TIMES:
            return pa.array(values, pa.int64() if dtype.bits == 64 else pa.int32()).view(dtype.arrow)
        case Kind.DEC:
            digits = b"".join((value or 0).to_bytes(16, "little", signed=True) for value in values)
            valid = pa.array([value is not None for value in values], pa.bool_()).buffers()[1]
            return pa.Array.from_buffers(dtype.arrow, len(values), [valid, pa.py_buffer(digits)])
        case Kind.NESTED if has_plain_elements(dtype.arrow):
            element = from_arrow_type(dtype.arrow.value_type)
            flat = to_arrow([each for value in values for each in value or []], element)
            ends = itertools.accumulate((len(value or []) for value in values), initial=0)
            starts = [None if value is None else end for value, end in zip(values, ends, strict=False)]
            is_long = pa.types.is_large_list(dtype.arrow)
            offsets = pa.array([*starts, len(flat)], pa.int64() if is_long else pa.int32())
            return (pa.LargeListArray if is_long else pa.ListArray).from_arrays(offsets, flat, type=dtype.arrow)
        case _:
            return pa.array(values, dtype.arrow)


def _digits(array: pa.Array) -> Values:
    """The digits of decimals, each as one integer. Python's Decimal would round them to its context's precision."""
    width = array.type.bit_width // 8
    data = memoryview(array.buffers()[1] or b"")
    places = range(array.offset * width, (array.offset + len(array)) * width, width)
    return [int.from_bytes(data[at : at + width], "little", signed=True) if is_valid else None
            for at, is_valid in zip(places, array.is_valid().to_pylist(), strict=True)]


def rounded(value: float, dtype: DType) -> float:
    """The nearest float of this type; what a float operation gives after an exact or wider one."""
    return ctypes.c_float(value).value if dtype.kind is Kind.F32 else value


def order_key(value: Any) -> Any:
    """A key that sorts values as scalein does: NaN last and equal to NaN, -0.0 as 0.0, text by its bytes."""
    if isinstance(value, float):
        return (1, 0.0) if math.isnan(value) else (0, value)
    return value.encode() if isinstance(value, str) else value


def group_key(values: Sequence[Any]) -> tuple[Any, ...]:
    """A hashable key, equal for rows of one group: as `order_key`, and null equals null."""
    return tuple(None if value is None else order_key(value) for value in values)
