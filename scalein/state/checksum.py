"""The checksum of the store's files: 64 bits of a block of bytes and a seed. It detects damage, not forgery.

The bytes are little-endian words of 64 bits; word i goes to lane i % 8. A lane starts at seed ^ (lane * `_LANE`) and
takes a word by acc = (acc ^ word) * `_WORD`; acc ^= acc >> 32. At the end the lanes are folded in order, from h = 0,
by h = (h ^ acc) * `_FOLD`; h ^= h >> 29. All arithmetic is modulo 2^64. Every step is invertible, so two blocks that
differ in one word never have the same checksum.

Eight lanes are one vector of the compiled kernel, which the store uses and which gives the same results. The cost in
numpy is per step, 64 bytes of every block at once: many blocks of 4 KiB are fast, one long block is slow.

Bytes of any length, as in the runs of Spark's streams, are padded with zeros to blocks of 4 KiB; a block's seed is its
number. The checksums of these blocks, padded with zeros to a multiple of 64 bytes, are one more block, whose seed is
the length: its checksum is that of the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from scalein.options import Options

if TYPE_CHECKING:
    from scalein.kernels.store import StoreKernels

LANES = 8
BYTES_BLOCK = 4096  # of bytes of any length
GRAIN = 64  # bytes of a step: sizes are multiples of it

_LANE = 0x9E3779B97F4A7C15
_WORD = np.uint64(0xD6E8FEB86659FD93)
_FOLD = np.uint64(0xA0761D6478BD642F)
_STARTS = np.array([lane * _LANE % (1 << 64) for lane in range(LANES)], np.uint64)
_BATCH = 256  # blocks: 1 MiB of 4 KiB blocks stays in a core's cache, four times as fast as 16 MiB
_HALF = np.uint64(32)
_FOLD_SHIFT = np.uint64(29)

# Blocks of one size (n, size) u8, contiguous, and their seeds (n,) u64 -> their checksums (n,) u64.
Checksums = Callable[[np.ndarray, np.ndarray], np.ndarray]


def block_checksums(blocks: np.ndarray, seeds: np.ndarray) -> np.ndarray:
    """The checksums of the rows of a contiguous (n, size) array of bytes, each with its seed.

    >>> [hex(sum) for sum in block_checksums(np.zeros((2, 4096), np.uint8), np.array([0, 1], np.uint64)).tolist()]
    ['0xf95dfa9554872ca1', '0x49f566615cdc0f18']
    """
    sums = np.zeros(len(blocks), np.uint64)
    for start in range(0, len(blocks), _BATCH):
        batch = slice(start, start + _BATCH)
        sums[batch] = _batch_checksums(blocks[batch], seeds[batch])
    return sums


def _batch_checksums(blocks: np.ndarray, seeds: np.ndarray) -> np.ndarray:
    count, size = blocks.shape
    words = blocks.view("<u8").reshape(count, size // GRAIN, LANES)
    lanes = seeds.astype(np.uint64)[:, None] ^ _STARTS
    for step in range(size // GRAIN):
        lanes ^= words[:, step]
        lanes *= _WORD
        lanes ^= lanes >> _HALF
    folded = np.zeros(count, np.uint64)
    for lane in range(LANES):
        folded ^= lanes[:, lane]
        folded *= _FOLD
        folded ^= folded >> _FOLD_SHIFT
    return folded


def block_checksum(data: memoryview | np.ndarray, seed: int) -> int:
    """The checksum of one block, whose size is a multiple of 64 bytes."""
    block = np.frombuffer(data, np.uint8) if isinstance(data, memoryview) else data.reshape(-1).view(np.uint8)
    return int(block_checksums(block.reshape(1, -1), np.array([seed], np.uint64))[0])


class ByteChecksum:
    """The checksum of bytes of any length, which come in parts."""

    def __init__(self, checksums: Checksums = block_checksums) -> None:
        self._checksums = checksums
        self._size = 0
        self._rest = bytearray()  # less than a block
        self._sums: list[np.ndarray] = []  # of whole blocks
        self._blocks = 0

    def update(self, data: bytes | pa.Buffer) -> None:
        view = memoryview(data).cast("B")
        self._size += len(view)
        if self._rest:
            missing = BYTES_BLOCK - len(self._rest)
            self._rest += view[:missing]
            view = view[missing:]
            if len(self._rest) < BYTES_BLOCK:
                return
            self._add(np.frombuffer(self._rest, np.uint8))
            self._rest = bytearray()
        whole = len(view) // BYTES_BLOCK * BYTES_BLOCK
        if whole:
            self._add(np.frombuffer(view[:whole], np.uint8))
        self._rest += view[whole:]

    def _add(self, area: np.ndarray) -> None:
        blocks = area.reshape(-1, BYTES_BLOCK)
        self._sums.append(self._checksums(blocks, np.arange(self._blocks, self._blocks + len(blocks), dtype=np.uint64)))
        self._blocks += len(blocks)

    def digest(self) -> int:
        """The checksum of all parts; no more may follow."""
        if self._rest:
            self._add(np.frombuffer(self._rest.ljust(BYTES_BLOCK, b"\0"), np.uint8))
        sums = np.concatenate([*self._sums, np.zeros(-self._blocks % LANES, np.uint64)])
        return int(self._checksums(sums.view(np.uint8).reshape(1, -1), np.array([self._size], np.uint64))[0])


def compiled_checksums(options: Options) -> Checksums:
    """The compiled checksum, for callers that do not know the columns of the table yet; compiled on first use."""

    @cache
    def kernels() -> StoreKernels:
        from scalein.kernels.store import StoreKernels

        return StoreKernels(pa.schema([("key", pa.int64())]), pa.schema([]), options)

    return lambda blocks, seeds: kernels().checksums(blocks, seeds)
