"""Spill partitions: batches in a spill file, partitioned by a hash of their keys.

The hash of each key is a column of the batches (`hash_items`), computed by the kernel that writes them. Rows of a
partition are in the order in which they were added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from scalein.arrow_rows import as_numpy, from_numpy, taken
from scalein.cancellation import raise_if_cancelled
from scalein.dtypes import I64
from scalein.exec.spill_file import SpilledBatches, SpillFile
from scalein.ir.exprs import Call, Expr, Named
from scalein.ir.internal_names import internal
from scalein.memory import MemoryAccount

HASH = internal("hash")
HASH_BITS = 64
PARTITION_BITS = 5
MIN_DIVIDED_BYTES = 1 << 16  # whatever the limit, a smaller partition is not divided
BUFFER_SHARE = 16  # of the limit, the rows that wait to be written have 1/16


def read_within(account: MemoryAccount, batches: Iterator[pa.RecordBatch],
                working_factor: int) -> tuple[list[pa.RecordBatch], bool]:
    """The batches that the account has memory for, `working_factor` bytes for each of theirs; whether these are all."""
    read: list[pa.RecordBatch] = []
    for batch in batches:
        read.append(batch)
        account.reserve(working_factor * batch.nbytes)
        if account.is_under_pressure:
            return read, False
    return read, True


def drained(batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The batches, which are removed one by one."""
    batches.reverse()
    while batches:
        yield batches.pop()


def hash_items(keys: Sequence[Expr]) -> list[Named]:
    """The columns by which rows are partitioned; equal keys have equal hashes."""
    return [Named(f"{HASH}{k}", Call("hash", (key,), (), I64, False)) for k, key in enumerate(keys)]


class SpillPartition(SpilledBatches):
    """The rows of one partition, and the bounds of their hashes."""

    def __init__(self, file: SpillFile, schema: pa.Schema) -> None:
        super().__init__(file, schema)
        self._least, self._greatest = (1 << HASH_BITS) - 1, 0

    def add_hashes(self, hashes: np.ndarray) -> None:
        """Note the hashes of some rows of the partition."""
        self._least, self._greatest = min(self._least, int(hashes.min())), max(self._greatest, int(hashes.max()))

    @property
    def has_one_hash(self) -> bool:
        return self._least >= self._greatest


class SpillPartitions:
    """Rows partitioned by the bits of their hash from `shift` on."""

    def __init__(self, file: SpillFile, schema: pa.Schema, limit: int, shift: int = 0) -> None:
        self._file, self._schema, self._limit, self._shift = file, schema, limit, shift
        self._most = limit // BUFFER_SHARE
        self.parts = [SpillPartition(file, schema) for _ in range(1 << PARTITION_BITS)]
        self._waiting: list[list[pa.RecordBatch]] = [[] for _ in self.parts]
        self._bytes = 0

    def add(self, batch: pa.RecordBatch) -> None:
        raise_if_cancelled()
        mask = np.uint64((1 << PARTITION_BITS) - 1)
        hashes = _hashes(batch)
        numbers = ((hashes >> np.uint64(self._shift)) & mask).astype(np.uint8)
        ends = np.cumsum(np.bincount(numbers, minlength=len(self.parts))).tolist()
        by_part = np.argsort(numbers, kind="stable")
        hashes, order = hashes[by_part], from_numpy(by_part)
        ordered = pa.RecordBatch.from_arrays([taken(column, order) for column in batch.columns], schema=self._schema)
        for part, waiting, start, end in zip(self.parts, self._waiting, [0, *ends[:-1]], ends, strict=True):
            if end > start:
                part.add_hashes(hashes[start:end])
                waiting.append(ordered.slice(start, end - start))
        self._bytes += ordered.nbytes
        if self._bytes > self._most:
            self.flush()

    def flush(self) -> None:
        """Write what is waiting."""
        for part, waiting in zip(self.parts, self._waiting, strict=True):
            if waiting:
                part.add(pa.concat_batches(waiting))
                waiting.clear()
        self._bytes = 0
        pa.default_memory_pool().release_unused()

    def is_large(self, part: SpillPartition, working_factor: int) -> bool:
        """Whether processing a partition, which takes `working_factor` times its size, takes more than the limit."""
        return part.bytes > MIN_DIVIDED_BYTES and part.bytes * working_factor > self._limit

    def must_divide(self, part: SpillPartition, working_factor: int) -> bool:
        """Whether a partition is too large, and can be divided by other bits of the hash; they do not divide the rows
        of one key.
        """
        can_divide = not part.has_one_hash and self._shift + PARTITION_BITS < HASH_BITS
        return can_divide and self.is_large(part, working_factor)

    def divided(self, part: SpillPartition) -> SpillPartitions:
        """The rows of one partition, partitioned again."""
        inner = SpillPartitions(self._file, self._schema, self._limit, self._shift + PARTITION_BITS)
        for batch in part:
            inner.add(batch)
        inner.flush()
        return inner


def _hashes(batch: pa.RecordBatch) -> np.ndarray:
    """The hash of each row's keys."""
    found = np.zeros(batch.num_rows, np.uint64)
    for name in batch.schema.names:
        if name.startswith(HASH):
            found = (found ^ as_numpy(batch.column(name)).view(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
            found ^= found >> np.uint64(29)
    return found
