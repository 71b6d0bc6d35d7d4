"""Arrow IPC: files of either format. They are read, not mapped: a file that shrinks or changes meanwhile must not take
memory away from kernels, or change what was validated. Every batch is validated before a kernel sees it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa

from scalein.connectors.formats.base import FileSplit, check_schema, reading
from scalein.connectors.formats.validate import Validator
from scalein.errors import BadData

_MAGIC = b"ARROW1"  # the file format begins so, the stream format does not


@dataclass(frozen=True, slots=True)
class Ipc:
    """Record batches as they were written."""

    name: str = "ipc"

    def schema(self, path: str) -> pa.Schema:
        with _file(path) as file:
            return _open(file, None).schema

    def splits(self, path: str, schema: pa.Schema, columns: list[str] | None, row: int) -> Iterator[FileSplit]:
        with _file(path) as file:
            reader = _open(file, None)
            check_schema(path, reader.schema, schema)
            names = columns or schema.names
            chosen = [reader.schema.get_field_index(name) for name in names]
            block, first = _block_of(row, _open(file, chosen[:1])) if row else (0, 0)

        def open() -> Iterator[pa.RecordBatch]:
            with _file(path) as file:
                validator = Validator()
                for batch in _batches(_open(file, chosen), block):
                    validator.check(batch)
                    yield batch if batch.schema.names == names else batch.select(names)

        yield FileSplit(first, open)


@contextmanager
def _file(path: str) -> Iterator[pa.NativeFile]:
    """An open file; one that has another size at the end is refused: a stream may have been cut between two batches."""
    with reading(path, "ipc"):
        handle = os.open(path, os.O_RDONLY)
        watched = os.dup(handle)
        try:
            with pa.OSFile(handle) as file:
                size = os.fstat(watched).st_size
                yield file
            if (now := os.fstat(watched).st_size) != size:
                raise BadData(f"{path} changed while it was read", found=f"{now:,} bytes, and {size:,} before",
                              hint="a file must not change once it has its name")
        finally:
            os.close(watched)


def _open(file: pa.NativeFile, fields: list[int] | None) -> pa.RecordBatchReader | pa.ipc.RecordBatchFileReader:
    options = pa.ipc.IpcReadOptions(ensure_alignment=pa.ipc.Alignment.DataTypeSpecific, included_fields=fields)
    file.seek(0)
    is_file = file.read(len(_MAGIC)) == _MAGIC
    file.seek(0)
    return pa.ipc.open_file(file, options=options) if is_file else pa.ipc.open_stream(file, options=options)


def _block_of(row: int, reader: pa.RecordBatchReader | pa.ipc.RecordBatchFileReader) -> tuple[int, int]:
    """The block of a file that a row is in, and its first row; a stream has no block index, so it starts at its
    beginning.

    The last block if there is no such row: the reader reports that.
    """
    first = 0
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        for block in range(reader.num_record_batches):
            rows = reader.get_batch(block).num_rows
            if first + rows > row or block == reader.num_record_batches - 1:
                return block, first
            first += rows
    return 0, 0


def _batches(reader: pa.RecordBatchReader | pa.ipc.RecordBatchFileReader, block: int) -> Iterator[pa.RecordBatch]:
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        yield from (reader.get_batch(k) for k in range(block, reader.num_record_batches))
    else:
        yield from reader
