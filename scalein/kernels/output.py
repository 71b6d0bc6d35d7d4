"""Output chunks: buffers that a collecting kernel fills, of up to `CHUNK_ROWS` rows, and the arrays over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from scalein.dtypes import Kind
from scalein.errors import ScaleinError
from scalein.ir.exprs import Named, type_of
from scalein.kernels.call import call
from scalein.layout import BLOCK_ROWS, DONE, FrameData, size_of
from scalein.llvm_backend.cache import Compiled
from scalein.memory import allocate

CHUNK_ROWS = 1 << 20
# Text bytes of a chunk: within reach of 32-bit offsets, with space for a block of long strings.
TEXT_BYTES = 1 << 24
TEXT_BYTES_A_ROW = 64  # a first estimate, so that a small batch does not allocate megabytes
MAX_TEXT_BYTES = (1 << 31) - 1


class Chunk:
    """Buffers for up to `rows` rows of the collected columns, in one allocation."""

    def __init__(self, items: tuple[Named, ...], never_null: tuple[bool, ...], rows: int, text_bytes: int) -> None:
        self._types = [type_of(item.expr) for item in items]
        self.rows = rows = max(rows, BLOCK_ROWS)
        self.text_bytes = text_bytes
        sizes: list[int] = []
        for dtype, is_never_null in zip(self._types, never_null, strict=True):
            is_text = dtype.is_loose
            width = dtype.width if dtype.form == "fixed" else size_of(dtype)
            sizes += [text_bytes if is_text else rows * width, 4 * (rows + 1) if is_text else 0,
                      0 if is_never_null else rows]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + (size + 63) // 64 * 64)
        self._memory = allocate(starts[-1])
        self._buffer = pa.py_buffer(self._memory)
        self._starts, self._never_null = starts, never_null

    def attach(self, frame: FrameData) -> None:
        """Make a kernel write into this chunk, from its first row on."""
        frame["out.count"] = 0
        frame["out.capacity"] = self.rows
        frame.keep["out"] = self
        base = self._buffer.address
        for k, dtype in enumerate(self._types):
            data, offsets, valid = self._starts[3 * k : 3 * k + 3]
            frame[f"out{k}.data"] = base + data
            if dtype.is_loose:
                self._memory[offsets : offsets + 4] = 0
                frame[f"out{k}.offsets"] = base + offsets
                frame[f"out{k}.used"] = 0
                frame[f"out{k}.room"] = self.text_bytes
            if not self._never_null[k]:
                frame[f"out{k}.valid"] = base + valid

    def arrays(self, end: int, start: int = 0) -> list[pa.Array]:
        """Rows as arrays over the chunk's buffers."""
        return [self._array(k, start, end - start) for k in range(len(self._types))]

    def _array(self, k: int, start: int, count: int) -> pa.Array:
        dtype = self._types[k]
        data, offsets, valid, end = self._starts[3 * k : 3 * k + 4]
        bitmap, nulls = None, 0
        if not self._never_null[k]:
            flags = self._memory[valid + start : valid + start + count]
            nulls = count - int(np.count_nonzero(flags))
            if nulls:
                bitmap = pa.py_buffer(np.packbits(flags, bitorder="little"))
        if dtype.is_loose:
            at = offsets + 4 * start
            parts = [bitmap, self._buffer.slice(at, valid - at), self._buffer.slice(data, offsets - data)]
            plain = pa.Array.from_buffers(pa.string() if dtype.is_string else pa.binary(), count, parts, nulls)
            return plain if dtype.arrow == plain.type else plain.cast(dtype.arrow)
        if dtype.kind is Kind.BOOL:
            packed = pa.py_buffer(np.packbits(self._memory[data + start : data + start + count], bitorder="little"))
            return pa.Array.from_buffers(dtype.arrow, count, [bitmap, packed], nulls)
        data += start * (dtype.width if dtype.form == "fixed" else size_of(dtype))
        return pa.Array.from_buffers(dtype.arrow, count, [bitmap, self._buffer.slice(data, end - data)], nulls)


Call = Callable[[Compiled, FrameData], int]  # runs a kernel until it is done or its output is full


def collect_chunks(compiled: Compiled, frame: FrameData, items: tuple[Named, ...], rows: int,
              first: int = CHUNK_ROWS, run: Call | None = None) -> Iterator[list[pa.Array]]:
    """Run a collecting kernel to its end; yields the columns of each full chunk, and of the last even if it is empty.

    `rows` is an upper bound of the output; `first` limits the first chunk where far fewer are likely.
    """
    collector = Collector(compiled, frame, items, rows, first, run)
    yield from collector.run()
    yield collector.finish()


class Collector:
    """A collecting kernel with its output chunk, over the input of one or more calls."""

    def __init__(self, compiled: Compiled, frame: FrameData, items: tuple[Named, ...], rows: int,
                 first: int = CHUNK_ROWS, run: Call | None = None) -> None:
        self._compiled, self.frame, self._items = compiled, frame, items
        self._call = run or call
        self._most = min(max(rows, 1), CHUNK_ROWS)
        self._rows = min(self._most, first)
        self._text = min(TEXT_BYTES, TEXT_BYTES_A_ROW * self._rows)
        self._new_chunk()

    def _new_chunk(self) -> None:
        self._chunk = Chunk(self._items, self._compiled.never_null, self._rows, self._text)
        self._chunk.attach(self.frame)
        self._emitted = 0  # rows of the chunk that were returned already

    def run(self) -> Iterator[list[pa.Array]]:
        """Process rows [row, end) of the frame's input; yields the chunks that became full."""
        while self._call(self._compiled, self.frame) != DONE:
            count = self.frame["out.count"]
            if count:
                if count > self._emitted:
                    yield self._chunk.arrays(count, self._emitted)
                self._rows = min(self._most, 4 * self._rows)
                self._text = max(self._text, min(TEXT_BYTES, TEXT_BYTES_A_ROW * self._rows))
            else:  # one block's strings alone are more than a chunk holds
                if self._text == MAX_TEXT_BYTES:
                    raise ScaleinError("a block of rows has more text than an Arrow string array can hold",
                                       found="more than 2 GiB",
                                       hint="shorten the strings with .str.slice, or drop them")
                self._text = min(4 * self._text, MAX_TEXT_BYTES)
                self._rows = min(self._most, 4 * self._rows)  # one row of a process may yield many
            self._new_chunk()

    def finish(self) -> list[pa.Array]:
        """The rest of the last chunk; further rows may be appended after it."""
        start, self._emitted = self._emitted, self.frame["out.count"]
        return self._chunk.arrays(self._emitted, start)
