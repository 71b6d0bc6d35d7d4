"""Arrays of numbers, rows by number, and lists of every layout: pyarrow's own functions do not know all of them yet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa


def from_numpy(values: np.ndarray) -> pa.Array:
    """Numbers or bools as an Arrow array. `pa.array` would import pandas, where it is installed, which takes 0.2 s.

    >>> from_numpy(np.arange(3)).to_pylist()
    [0, 1, 2]
    """
    if values.dtype == bool:
        bits = np.packbits(values, bitorder="little")
        return pa.Array.from_buffers(pa.bool_(), len(values), [None, pa.py_buffer(bits)])
    values = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def as_numpy(numbers: pa.Array) -> np.ndarray:
    """The numbers of an array without nulls, without a copy. `np.asarray` would import pandas as well.

    >>> as_numpy(from_numpy(np.arange(9)).slice(2, 3)).tolist()
    [2, 3, 4]
    """
    dtype = np.dtype(numbers.type.to_pandas_dtype())
    if not len(numbers):
        return np.empty(0, dtype)
    return np.frombuffer(numbers.buffers()[1], dtype, len(numbers), numbers.offset * dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Extents:
    """The lists of an array: rows `start .. start + size` of `values` each; a null list has size 0."""

    values: pa.Array
    starts: np.ndarray
    sizes: np.ndarray
    valid: np.ndarray


def extents(array: pa.Array) -> Extents:
    """Where the lists of an array are.

    Arrow has lists by offsets (of 32 or 64 bits), by offsets and sizes (views), and of one size. Here they are alike,
    slices and nulls included, and nothing is copied.
    """
    count = len(array)
    valid = np.asarray(array.is_valid())
    if pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        starts = (np.arange(count, dtype=np.int64) + array.offset) * size
        return Extents(array.values, starts, np.where(valid, size, 0), valid)
    offsets = np.asarray(array.offsets).astype(np.int64)
    if pa.types.is_list_view(array.type) or pa.types.is_large_list_view(array.type):
        sizes = np.asarray(array.sizes).astype(np.int64)
        return Extents(array.values, offsets[:count], np.where(valid, sizes, 0), valid)
    return Extents(array.values, offsets[:-1], np.where(valid, np.diff(offsets), 0), valid)


def from_texts(texts: Iterable[str]) -> pa.Array:
    """An array of strings. `pa.array` of Python's values imports pandas, where it is installed."""
    encoded = [text.encode() for text in texts]
    ends = np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)))
    if len(ends) and ends[-1] > np.iinfo(np.int32).max:
        raise pa.ArrowCapacityError(f"{ends[-1]} bytes of text do not fit in an array")
    offsets = np.append(np.zeros(1, np.int32), ends.astype(np.int32))
    return pa.StringArray.from_buffers(len(encoded), pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded)))


def as_type(column: pa.Array, arrow: pa.DataType) -> pa.Array:
    """A column in another form of its type. Dictionaries are decoded for views: pyarrow knows no such cast."""
    if column.type == arrow:
        return column
    if pa.types.is_dictionary(column.type) and arrow in (pa.string_view(), pa.binary_view()):
        column = column.dictionary_decode()
    return column.cast(arrow)


def taken(array: pa.Array, rows: pa.Array) -> pa.Array:
    """The rows of an array at these places, null where the place is; a slice where they are neighbours in order.

    For every Arrow type: pyarrow's own `take` does not know all of them yet.
    """
    if not rows.null_count and len(rows):
        places = as_numpy(rows)
        first = int(places[0])
        if int(places[-1]) - first == len(places) - 1 and bool((np.diff(places) == 1).all()):
            return array.slice(first, len(places))
    return gathered(array, rows)


def gathered(array: pa.Array, rows: pa.Array) -> pa.Array:
    """The same, always in memory of its own."""
    plain = _without_views(array.type)
    if plain != array.type:
        return array.cast(plain).take(rows).cast(array.type)
    try:
        return array.take(rows)
    except pa.ArrowNotImplementedError:
        return _pieced(array, rows)


def filtered(batch: pa.RecordBatch, mask: pa.Array) -> pa.RecordBatch:
    """The rows for which a mask is true, also for types that pyarrow's own `filter` does not support (string views)."""
    try:
        return batch.filter(mask)
    except pa.ArrowNotImplementedError:
        import pyarrow.compute as pc  # which takes long to import

        rows = pc.indices_nonzero(pc.fill_null(mask, False))
        return pa.RecordBatch.from_arrays([taken(column, rows) for column in batch.columns], schema=batch.schema)


def copied(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows in memory of their own: what a kernel writes is a part of a larger chunk."""
    rows = from_numpy(np.arange(batch.num_rows))
    return pa.RecordBatch.from_arrays([gathered(column, rows) for column in batch.columns], schema=batch.schema)


def as_integers(times: pa.Array) -> pa.Array:
    """Times as 64-bit integers, without a copy where they are already."""
    if pa.types.is_timestamp(times.type):
        return times.view(pa.int64())
    return times if times.type == pa.int64() else times.cast(pa.int64())


def scattered(array: pa.Array, places: np.ndarray, values: pa.Array) -> pa.Array:
    """An array with other values at some places.

    >>> scattered(pa.array([1, 2, 3]), np.array([2, 0]), pa.array([30, 10])).to_pylist()
    [10, 2, 30]
    """
    old, new = _fixed_bytes(array), _fixed_bytes(values)
    if old is not None and new is not None:
        old = old.copy()
        if len(new):
            old[places] = new
        return pa.Array.from_buffers(array.type, len(array), [None, pa.py_buffer(old)])
    rows = np.arange(len(array))
    rows[places] = len(array) + np.arange(len(values))
    return taken(pa.concat_arrays([array, values]), from_numpy(rows))


def _fixed_bytes(array: pa.Array) -> np.ndarray | None:
    """The values of an array without nulls, of one width in bytes, as words; None for other arrays."""
    is_plain = pa.types.is_primitive(array.type) and not pa.types.is_boolean(array.type)
    if array.null_count or not (is_plain or pa.types.is_decimal128(array.type)):
        return None
    width = array.type.bit_width // 8
    dtype, words = np.dtype(f"u{min(width, 8)}"), max(1, width // 8)
    if not len(array):
        return np.empty((0, words), dtype)
    found = np.frombuffer(array.buffers()[1], dtype, len(array) * words, array.offset * width)
    return found if words == 1 else found.reshape(-1, words)


def verified(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """A batch that was read from a file, if kernels may read it; ArrowInvalid if not. A checksum can be forged.

    It has the columns of the schema and nulls only where these may be, every buffer is as large as the rows need, and
    all offsets and codes are within what they refer to.
    """
    if batch.schema.names != schema.names or batch.schema.types != schema.types:
        raise pa.ArrowInvalid("it has other columns")
    batch.validate()
    for field, column in zip(schema, batch.columns, strict=True):
        if not field.nullable and column.null_count:
            raise pa.ArrowInvalid(f"{field.name} has nulls")
        if any(buffer is not None and buffer.address % 8 for buffer in column.buffers()):
            raise pa.ArrowInvalid(f"{field.name} is not aligned")
        if not (pa.types.is_primitive(field.type) or pa.types.is_decimal(field.type)):  # their sizes are all there is
            column.validate(full=True)
    return batch


def _without_views(arrow: pa.DataType) -> pa.DataType:
    """The type with plain text and binary in the place of views, at any depth."""
    if pa.types.is_string_view(arrow):
        return pa.large_string()
    if pa.types.is_binary_view(arrow):
        return pa.large_binary()
    if pa.types.is_struct(arrow):
        return pa.struct([field.with_type(_without_views(field.type)) for field in arrow])
    if pa.types.is_fixed_size_list(arrow):
        return pa.list_(arrow.value_field.with_type(_without_views(arrow.value_type)), arrow.list_size)
    if pa.types.is_map(arrow):
        return pa.map_(_without_views(arrow.key_type), _without_views(arrow.item_type), arrow.keys_sorted)
    for is_kind, kind in ((pa.types.is_list, pa.list_), (pa.types.is_large_list, pa.large_list)):
        if is_kind(arrow):
            return kind(arrow.value_field.with_type(_without_views(arrow.value_type)))
    return arrow


def _pieced(array: pa.Array, rows: pa.Array) -> pa.Array:
    """Slices of neighbouring rows, joined: for run-ends inside of other values, which pyarrow can join but not take."""
    places = np.asarray(rows.fill_null(-2))
    starts = np.flatnonzero(np.diff(places, prepend=-9) != 1)
    sizes = np.diff(np.append(starts, len(places)))
    parts = [pa.nulls(1, array.type) if first < 0 else array.slice(first, size)
             for first, size in zip(places[starts].tolist(), sizes.tolist(), strict=True)]
    return pa.concat_arrays(parts) if parts else array.slice(0, 0)
