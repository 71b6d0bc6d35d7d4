"""What the store asks of compiled code, as a protocol: this package knows bytes and batches, not how loops are made.

`find_kernels` asks the engine for them when a store is opened; tests may bring their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import pyarrow as pa

from scalein.layout import FrameData
from scalein.options import Options
from scalein.state.checksum import Checksums

Functions = tuple[str, ...]  # what rows do to each value; "" leaves it as it is


Words = Callable[[int], np.ndarray]  # gives memory for so many words of 64 bits


def new_words(count: int) -> np.ndarray:
    return np.empty(count, np.uint64)


class Sorted(NamedTuple):
    """Pointers to records in the order of their hashes, and of their ages where these are equal."""

    hashes: np.ndarray
    pointers: np.ndarray


class Target(Protocol):
    """A table that kernels work on."""

    def attach(self, frame: FrameData, worker: int) -> None:
        """Point the frame at the table; a kernel is about to run."""

    def detach(self, worker: int) -> None:
        """The kernel has returned."""

    def serve(self, status: int, frame: FrameData, worker: int) -> None:
        """Give the kernel what it left for."""


class Kernels(Protocol):
    """The loops of one table. Pointers are addresses of records in this process."""

    record_bytes: int
    template: bytes  # of a record without a row
    text_cells: tuple[int, ...]  # offsets of a record's strings

    def keep(self, target: Target, batch: pa.RecordBatch, functions: Functions, workers: int) -> None:
        """Merge rows into the records of their keys."""

    def delete(self, target: Target, batch: pa.RecordBatch, workers: int) -> None:
        """Mark the records of keys as deleted."""

    def find(self, target: Target, batch: pa.RecordBatch) -> tuple[np.ndarray, np.ndarray]:
        """Pointers to the records of keys (0: none) and the keys' hashes."""

    def absorb(self, target: Target, pointers: np.ndarray, functions: Functions, older: bool) -> None:
        """Merge records into a table, as newer than its own or as older."""

    def fold(self, pointers: np.ndarray, hashes: np.ndarray, functions: Functions,
             words: Words = new_words) -> tuple[np.ndarray, np.ndarray]:
        """Records without text, sorted by hash and then by age, each key once; and their hashes."""

    def stay(self, target: Target, extents: np.ndarray, least_hits: int, drop: int) -> int:
        """Copy those with so many hits among the records of groups to new chunks, with half of their hits, and put
        them into the index of the groups, which is empty. Gives the number of the others, but for those with a flag of
        `drop`. `extents`: addresses of records that lie one behind the other, and how many. Without text.
        """

    def leave(self, base: int, size: int, words: np.ndarray, least_hits: int, drop: int, room: Sorted) -> Sorted:
        """Those others, in order. `words` were in the index of the groups, of an arena of `size` bytes at `base`;
        `room` has room for all of them.
        """

    def clear(self, moves: np.ndarray) -> None:
        """Copy bytes and set them to zero where they were; a row each: target, source, size."""

    def merge(self, lists: Sequence[Sorted], words: Words = new_words) -> Sorted:
        """Sorted lists, at least one and the oldest first, in one; of equal hashes the older ones first."""

    def open_blocks(self, area: np.ndarray, pieces: np.ndarray, per_block: int, block_bytes: int, least: int,
                    greatest: int, words: Words = new_words) -> list[Sorted | None]:
        """The records, without text, with hashes of a range, in blocks of several runs that lie one behind the other.

        `pieces`: how many blocks, the id of their run, where in it they are from. None if one is not as it was written.
        """

    def hashes(self, pointers: np.ndarray) -> np.ndarray:
        """The hashes of records' keys."""

    def seek(self, firsts: np.ndarray, counts: np.ndarray, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of `counts` records each, one behind the other by their hashes: the first of a hash, and how many have it."""

    def rows(self, pointers: np.ndarray, names: Sequence[str]) -> list[pa.RecordBatch]:
        """Columns of records."""

    def gather(self, pointers: np.ndarray, words: Words = new_words) -> np.ndarray:
        """The records one behind the other: (count, record bytes)."""

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy pages that others may change meanwhile."""

    def restore(self, image: int, first: int, log: int, count: int) -> None:
        """Undo `count` changes, the newest first, in the image of the segment at offset `first`."""

    def pack(self, area: np.ndarray, records: np.ndarray, per_block: int, block_bytes: int, id: int,
             offset: int) -> None:
        """The blocks of a run, without text, that will lie from `offset` of the file on."""

    def mark(self, filter: np.ndarray, hashes: np.ndarray, shift: int) -> None:
        """Set the bits of hashes in a run's filter."""

    def checksums(self, blocks: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """The checksum of each row of bytes."""

    def split(self, old: int, old_buckets: int, new: int, shift: int, mask: int) -> None:
        """Move the words of an index table into one of twice the size."""


def find_kernels(key: pa.Schema, value: pa.Schema, options: Options) -> Kernels:
    """The engine's kernels for a table; they are compiled when they are first used."""
    engine: Any = import_module("scalein.kernels.stored")
    return cast(Kernels, engine.StoredKernels(key, value, options))


def find_checksums(options: Options) -> Checksums:
    """The engine's checksums, for who does not know a table's columns yet; asked for when they are first used."""
    kernels = cache(lambda: find_kernels(pa.schema([("key", pa.int64())]), pa.schema([]), options))
    return lambda blocks, seeds: kernels().checksums(blocks, seeds)
