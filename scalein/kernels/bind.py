"""Arrow columns as frame slots: addresses of their buffers, without a copy.

How a column is read depends on its form (see `ir.stages.Read`). Only what kernels cannot read directly is rewritten:
dictionary codes of 64 bits, and dictionaries with a null or without values.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from scalein.arrow_rows import as_type
from scalein.ir.stages import Read
from scalein.layout import COLUMN, FrameData, size_of

_EMPTY = np.zeros(64, np.uint8)  # stands for a missing buffer
_EMPTY_ADDRESS = int(_EMPTY.ctypes.data)


def form_of(arrow: pa.DataType) -> str:
    """How a column of this type is read."""
    if pa.types.is_boolean(arrow):
        return "bits"
    if pa.types.is_string(arrow) or pa.types.is_binary(arrow):
        return "str32"
    if pa.types.is_large_string(arrow) or pa.types.is_large_binary(arrow):
        return "str64"
    if pa.types.is_string_view(arrow) or pa.types.is_binary_view(arrow):
        return "view"
    if pa.types.is_fixed_size_binary(arrow):
        return "bytes"
    return "dict" if pa.types.is_dictionary(arrow) else "fixed"


def has_nulls(array: pa.Array) -> bool:
    """Whether a row may be null: a dictionary may contain a null value."""
    return bool(array.null_count) or (pa.types.is_dictionary(array.type) and bool(array.dictionary.null_count))


_CODES = {8: pa.uint8(), 16: pa.uint16(), 32: pa.uint32()}


def code_bits(arrow: pa.DataType) -> int:
    """The width at which a dictionary's codes are read; a code is never negative, so its sign does not matter."""
    return min(32, arrow.index_type.bit_width) if pa.types.is_dictionary(arrow) else 32


def addressable(array: pa.Array, bits: int = 32) -> pa.Array:
    """The column itself, or an equal one that kernels can read; a dictionary with codes of this width."""
    if not pa.types.is_dictionary(array.type):
        return array
    if array.dictionary.null_count:  # the null moves to the codes
        array = array.cast(pa.string()).dictionary_encode()
    if not len(array.dictionary):  # every code is null, and reads as 0: there must be a value 0
        array = pa.DictionaryArray.from_arrays(array.indices, pa.array([""], pa.string()))
    if array.dictionary.type != pa.string():
        array = pa.DictionaryArray.from_arrays(array.indices, array.dictionary.cast(pa.string()))
    if array.indices.type.bit_width != bits:
        return pa.DictionaryArray.from_arrays(array.indices.cast(_CODES[bits]), array.dictionary)
    return array


def bind(frame: FrameData, array: pa.Array, read: Read, prefix: str = COLUMN) -> None:
    """Point the frame's slots of a column at its buffers; row 0 is the array's first."""
    name = prefix + read.name
    if read.form == "dict":
        indices = array.indices
        bind_validity(frame, indices, name, read)
        frame[f"{name}.codes"] = _start(indices.buffers()[1]) + indices.offset * read.code_bits // 8
        _bind_strings(frame, array.dictionary, name, "str32")
        frame[f"{name}.values"] = len(array.dictionary)
        frame.keep[name] = array
        return
    bind_validity(frame, array, name, read)
    frame.keep[name] = array
    if read.form in ("str32", "str64"):
        _bind_strings(frame, array, name, read.form)
        return
    buffers = array.buffers()
    data = buffers[1]
    start = _start(data)
    if read.form == "bits":
        frame[f"{name}.data"] = start
        frame[f"{name}.data_bit"] = array.offset
        frame[f"{name}.data_last"] = 0 if data is None else max(0, data.size - 1)
    elif read.form == "view":
        frame[f"{name}.data"] = start + 16 * array.offset
        others = [_start(b) for b in buffers[2:]]
        frame.point(f"{name}.buffers", np.array([*others, _EMPTY_ADDRESS], np.uint64))
        frame.point(f"{name}.sizes", np.array([*(b.size if b is not None else 0 for b in buffers[2:]), 0], np.int64))
        frame[f"{name}.buffer_count"] = len(buffers) - 1
    elif read.form == "bytes":
        frame[f"{name}.data"] = start + array.offset * read.dtype.width
    else:
        frame[f"{name}.data"] = start + array.offset * size_of(read.dtype)


def bind_validity(frame: FrameData, array: pa.Array, name: str, read: Read) -> None:
    if not read.nulls:
        return
    bits = array.buffers()[0]
    if bits is None:
        ones = np.full(len(array) // 8 + 2, 0xFF, np.uint8)
        frame.point(f"{name}.bits", ones)
        frame[f"{name}.bit"] = 0
        frame[f"{name}.last"] = len(ones) - 1
    else:
        frame[f"{name}.bits"] = bits.address
        frame[f"{name}.bit"] = array.offset
        frame[f"{name}.last"] = max(0, bits.size - 1)


def _bind_strings(frame: FrameData, array: pa.Array, name: str, form: str) -> None:
    width = 8 if form == "str64" else 4
    _, offsets, data = array.buffers()
    frame[f"{name}.offsets"] = _start(offsets) + width * array.offset
    frame[f"{name}.data"] = _start(data)
    frame[f"{name}.bytes"] = 0 if data is None else data.size


def _start(buffer: pa.Buffer | None) -> int:
    """A buffer's address; zeros stand for an empty one, since a kernel may read values that it then ignores."""
    return _EMPTY_ADDRESS if buffer is None or not buffer.size else int(buffer.address)


def bind_codes(frame: FrameData, indices: pa.Array, read: Read) -> None:
    """The codes of a dictionary column, for a table that is looked up by them."""
    name = f"{COLUMN}{read.name}"
    bind_validity(frame, indices, name, read)
    frame[f"{name}.codes"] = _start(indices.buffers()[1]) + indices.offset * read.code_bits // 8
    frame.keep[f"{name}.codes"] = indices


def conformed(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch with exactly these types: a pass-through dictionary column becomes strings."""
    if batch.schema == schema:
        return batch
    columns = [as_type(c, f.type) for c, f in zip(batch.columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
