"""Rows are dicts of Python values, and how they come from Arrow and go back.

A value is a bool, an int (for times and the digits of decimals too), a float, a str, bytes, a list, a dict, or None for
null. A float32 is the float that equals it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa

from scalein.dtypes import DType, Kind, Schema, from_arrow_type_or_none

Row = dict[str, Any]
Values = list[Any]


def from_arrow(array: pa.Array | pa.ChunkedArray) -> Values:
    """The values of an Arrow column of any layout."""
    is_ = pa.types
    if isinstance(array, pa.ChunkedArray):
        return [value for chunk in array.chunks for value in from_arrow(chunk)]
    if is_.is_dictionary(array.type):
        words = from_arrow(array.dictionary)
        return [None if code is None else words[code] for code in array.indices.to_pylist()]
    if is_.is_run_end_encoded(array.type):
        return _decoded_runs(array)
    if is_.is_temporal(array.type):
        return array.view(pa.int64() if array.type.bit_width == 64 else pa.int32()).to_pylist()  # type: ignore[no-any-return]
    if is_.is_decimal(array.type):
        return _digits(array)
    if is_.is_struct(array.type):
        columns = [from_arrow(array.field(number)) for number in range(array.type.num_fields)]
        names = [field.name for field in array.type]
        return [dict(zip(names, row, strict=True)) if valid else None
                for valid, *row in zip(_validity(array), *columns, strict=True)]
    if is_.is_map(array.type):
        return [None if value is None else [(item["key"], item["value"]) for item in value] for value in _lists(array)]
    if _is_list(array.type):
        return _lists(array)
    return array.to_pylist()  # type: ignore[no-any-return]


def _is_list(arrow: pa.DataType) -> bool:
    is_ = pa.types
    tests = (is_.is_list, is_.is_large_list, is_.is_fixed_size_list, is_.is_list_view, is_.is_large_list_view)
    return any(test(arrow) for test in tests)


def _lists(array: pa.Array) -> Values:
    """Each list as a list: the elements are converted once, as one column."""
    found: Values = [None] * len(array)
    parts = [array[row].values if valid else None for row, valid in enumerate(_validity(array))]
    known = [part for part in parts if part is not None]
    if not known:
        return found
    flat, at = from_arrow(pa.chunked_array(known, known[0].type)), 0
    for row, part in enumerate(parts):
        if part is not None:
            found[row], at = flat[at : at + len(part)], at + len(part)
    return found


def _decoded_runs(array: pa.Array) -> Values:
    values, ends = from_arrow(array.values), array.run_ends.to_pylist()
    spread = [values[run] for run, end in enumerate(ends) for _ in range(end - (ends[run - 1] if run else 0))]
    return spread[array.offset : array.offset + len(array)]


def _validity(array: pa.Array) -> list[bool]:
    return array.is_valid().to_pylist()  # type: ignore[no-any-return]


def _digits(array: pa.Array) -> Values:
    """The digits of decimals, each as one integer; Python's Decimal would round them to its context's precision."""
    width = array.type.bit_width // 8
    data = memoryview(array.buffers()[1] or b"")
    places = range(array.offset * width, (array.offset + len(array)) * width, width)
    return [int.from_bytes(data[at : at + width], "little", signed=True) if valid else None
            for at, valid in zip(places, _validity(array), strict=True)]


def to_arrow(values: Sequence[Any], dtype: DType) -> pa.Array:
    """The Arrow array, of exactly `dtype.arrow`, that holds these values."""
    return _array(values, dtype.arrow)


def _array(values: Sequence[Any], arrow: pa.DataType) -> pa.Array:
    if pa.types.is_temporal(arrow):
        return pa.array(values, pa.int64() if arrow.bit_width == 64 else pa.int32()).view(arrow)
    return pa.array([_external(value, arrow) for value in values], arrow)


def _external(value: Any, arrow: pa.DataType) -> Any:
    """A value as pyarrow takes it: decimals as Decimal, everything else as it is."""
    is_ = pa.types
    if value is None:
        return None
    if is_.is_decimal(arrow):
        sign, digits = int(value < 0), tuple(map(int, str(abs(value))))
        return Decimal((sign, digits, -arrow.scale))
    if is_.is_struct(arrow):
        return {field.name: _external(value[field.name], field.type) for field in arrow}
    if is_.is_map(arrow):
        return [(_external(key, arrow.key_type), _external(item, arrow.item_type)) for key, item in value]
    if _is_list(arrow):
        return [_external(item, arrow.value_type) for item in value]
    return value


def rows_of(data: Iterable[pa.RecordBatch], names: Sequence[str]) -> list[Row]:
    """The rows of some batches; of a batch without columns too."""
    found: list[Row] = []
    for batch in data:
        columns = [from_arrow(batch.column(name)) for name in names]
        found += [{name: column[row] for name, column in zip(names, columns, strict=True)}
                  for row in range(batch.num_rows)]
    return found


def table_of(rows: Sequence[Row], schema: Schema) -> pa.Table:
    """The rows as a table of exactly this schema."""
    arrays = [to_arrow([row[field.name] for row in rows], field.dtype) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema.arrow)


def nested_dtype(arrow: pa.DataType) -> DType:
    """The type of a value inside a nested one."""
    return from_arrow_type_or_none(arrow) or DType(Kind.NESTED, nested=arrow)


def as_float32(value: float) -> float:
    """The nearest float32, an infinity beyond the greatest."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def rounded(value: float, dtype: DType) -> float:
    """The nearest float of this type: what a float operation gives after an exact or wider one."""
    return as_float32(value) if dtype.kind is Kind.F32 else value


def order_key(value: Any) -> Any:
    """A key that sorts values as scalein does: NaN last and equal to NaN, -0.0 as 0.0, text by its bytes."""
    if isinstance(value, float):
        return (1, 0.0) if math.isnan(value) else (0, value)
    return value.encode() if isinstance(value, str) else value


def group_key(values: Iterable[Any]) -> tuple[Any, ...]:
    """A hashable key, equal for rows of one group: as `order_key`, and null equals null."""
    return tuple(None if value is None else order_key(value) for value in values)
