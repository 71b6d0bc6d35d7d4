"""Arrow arrays as lists of plain values, and the order and equality of those values.

A value is a bool, an int (also for timestamps, dates and durations), a float, a str, or None for
null. A float32 is held as the float that equals it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from scalein.dtypes import DType, Kind

Values = list[Any]


def from_arrow(array: pa.Array | pa.ChunkedArray) -> Values:
    """The values of an Arrow column; a dictionary gives what its codes stand for."""
    if isinstance(array, pa.ChunkedArray):
        return [value for chunk in array.chunks for value in from_arrow(chunk)]
    if pa.types.is_dictionary(array.type):
        words = array.dictionary.to_pylist()
        return [None if code is None else words[code] for code in array.indices.to_pylist()]
    if pa.types.is_timestamp(array.type) or pa.types.is_duration(array.type):
        return array.cast(pa.int64()).to_pylist()  # type: ignore[no-any-return]
    if pa.types.is_date32(array.type):
        return array.cast(pa.int32()).to_pylist()  # type: ignore[no-any-return]
    return array.to_pylist()  # type: ignore[no-any-return]


def to_arrow(values: Sequence[Any], dtype: DType) -> pa.Array:
    """The Arrow array, of exactly `dtype.arrow`, that holds these values."""
    match dtype.kind:
        case Kind.TS | Kind.DUR:
            return pa.array(values, pa.int64()).cast(dtype.arrow)
        case Kind.DATE:
            return pa.array(values, pa.int32()).cast(dtype.arrow)
        case _:
            return pa.array(values, dtype.arrow)


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
