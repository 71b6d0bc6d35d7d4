"""Spill file: rows beyond the memory limit, in an anonymous temporary file: chunks of partition rows (`radix.py`), or
Arrow batches (`SpilledBatches`).

The file has no name and disappears with the process. Written pages are dropped from the page cache, since a limit of
the system on memory counts them.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from scalein.errors import StoreFailed
from scalein.memory import address

_MAX_PARTS = 512  # of one system call
_UNSYNCED_BYTES = 64 << 20


class SpillFile:
    """Bytes by offset. Any number of threads may write and read."""

    def __init__(self) -> None:
        import tempfile

        try:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the run
        except OSError as error:
            raise _failed(error) from error
        self._end = 0
        self._synced = 0
        self._lock = threading.Lock()

    def write(self, addresses: list[int], size: int) -> list[int]:
        """Write pieces of one size, given by their addresses; returns the offset of each."""
        with self._lock:
            first, self._end = self._end, self._end + size * len(addresses)
        try:
            for start in range(0, len(addresses), _MAX_PARTS):
                part = addresses[start : start + _MAX_PARTS]
                self._write_all([_bytes_at(address_, size) for address_ in part], first + start * size)
            self._drop_from_cache()
        except OSError as error:
            raise _failed(error) from error
        return [first + k * size for k in range(len(addresses))]

    def append(self, data: memoryview) -> int:
        """Write some bytes; returns their offset."""
        with self._lock:
            first, self._end = self._end, self._end + len(data)
        try:
            self._write_all([data], first)
            self._drop_from_cache()
        except OSError as error:
            raise _failed(error) from error
        return first

    def _write_all(self, parts: list[memoryview], offset: int) -> None:
        while parts:
            written = os.pwritev(self._file.fileno(), parts, offset)
            offset += written
            while parts and written >= len(parts[0]):
                written -= len(parts.pop(0))
            if written:
                parts[0] = parts[0][written:]

    def _drop_from_cache(self) -> None:
        with self._lock:
            if self._end - self._synced < _UNSYNCED_BYTES:
                return
            self._synced = self._end
        os.fdatasync(self._file.fileno())
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self, offsets: list[int], size: int) -> np.ndarray:
        """The pieces at some offsets, as one contiguous array."""
        found = np.empty(size * len(offsets), np.uint8)
        try:
            for k, offset in enumerate(offsets):
                left = found.data[k * size : (k + 1) * size]
                while left:
                    step = os.preadv(self._file.fileno(), [left], offset + size - len(left))
                    if not step:
                        raise OSError("the file is shorter than what was written")
                    left = left[step:]
        except OSError as error:
            raise _failed(error) from error
        return found

    def close(self) -> None:
        self._file.close()


class SpilledBatches:
    """Batches of one schema in a spill file, read back in the order in which they were added."""

    def __init__(self, file: SpillFile, schema: pa.Schema) -> None:
        self._file, self.schema = file, schema
        self._pieces: list[tuple[int, int]] = []  # offset and size of each batch
        self.rows = self.bytes = 0

    def add(self, batch: pa.RecordBatch) -> None:
        data = memoryview(batch.serialize())
        self._pieces.append((self._file.append(data), len(data)))
        self.rows += batch.num_rows
        self.bytes += len(data)

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, number: int) -> pa.RecordBatch:
        offset, size = self._pieces[number]
        return pa.ipc.read_record_batch(pa.py_buffer(self._file.read([offset], size)), self.schema)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return (self[number] for number in range(len(self)))


def _bytes_at(address_: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address_)).cast("B")


def _failed(error: OSError) -> StoreFailed:
    import tempfile

    return StoreFailed("rows beyond the memory limit could not be spilled to disk", file=tempfile.gettempdir(),
                       found=error.strerror or error, hint="free some space there, set TMPDIR, or raise memory=")


def pieces_in(found: np.ndarray, count: int, rows: int) -> list[tuple[int, int]]:
    """Address and row count of contiguous pieces of equal size."""
    start, size = address(found), len(found) // max(1, count)
    return [(start + k * size, rows) for k in range(count)]
