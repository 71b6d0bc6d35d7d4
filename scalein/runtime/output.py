"""Output chunks: buffers that a collecting kernel fills, and the record batch they become."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from scalein.dtypes import DType, Kind
from scalein.ir.exprs import Named, type_of
from scalein.layout import BLOCK_ROWS, FrameData
from scalein.runtime.memory import address, allocate

CHUNK_ROWS = 1 << 20
# String bytes of a chunk: 32-bit offsets must reach them, with room for a block of long ones.
TEXT_BYTES = 1 << 24


class Chunk:
    """Buffers for up to `rows` rows of the collected columns."""

    def __init__(self, items: tuple[Named, ...], never_null: tuple[bool, ...], rows: int, text_bytes: int) -> None:
        self._types = [type_of(item.expr) for item in items]
        self.rows = max(rows, BLOCK_ROWS)
        self.text_bytes = text_bytes
        self._data = [self._data_buffer(t) for t in self._types]
        self._offsets = [allocate(4 * (self.rows + 1)) if t.kind is Kind.STR else None for t in self._types]
        self._valid = [None if sure else allocate(self.rows) for sure in never_null]

    def _data_buffer(self, dtype: DType) -> np.ndarray:
        if dtype.kind is Kind.STR:
            return allocate(self.text_bytes)
        return allocate(self.rows * max(1, dtype.bits // 8))

    def attach(self, frame: FrameData) -> None:
        """Make a kernel write here, from the first row on."""
        frame["out.count"] = 0
        frame["out.capacity"] = self.rows
        frame.keep["out"] = self
        for k, (data, offsets, valid) in enumerate(zip(self._data, self._offsets, self._valid, strict=True)):
            frame[f"out{k}.data"] = address(data)
            if offsets is not None:
                offsets[:4] = 0
                frame[f"out{k}.offsets"] = address(offsets)
                frame[f"out{k}.used"] = 0
                frame[f"out{k}.room"] = self.text_bytes
            if valid is not None:
                frame[f"out{k}.valid"] = address(valid)

    def take(self, count: int) -> list[pa.Array]:
        """The first `count` rows as arrays over the chunk's buffers."""
        return [self._array(k, count) for k in range(len(self._types))]

    def _array(self, k: int, count: int) -> pa.Array:
        dtype = self._types[k]
        valid = self._valid[k]
        bitmap, nulls = None, 0
        if valid is not None:
            flags = valid[:count]
            nulls = count - int(np.count_nonzero(flags))
            if nulls:
                bitmap = pa.py_buffer(np.packbits(flags, bitorder="little"))
        if dtype.kind is Kind.STR:
            offsets = self._offsets[k]
            assert offsets is not None
            plain = pa.Array.from_buffers(pa.string(), count, [bitmap, pa.py_buffer(offsets), pa.py_buffer(self._data[k])], nulls)
            return plain if dtype.arrow == pa.string() else plain.cast(dtype.arrow)
        if dtype.kind is Kind.BOOL:
            data = pa.py_buffer(np.packbits(self._data[k][:count], bitorder="little"))
        else:
            data = pa.py_buffer(self._data[k])
        return pa.Array.from_buffers(dtype.arrow, count, [bitmap, data], nulls)
