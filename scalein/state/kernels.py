"""What the store asks of compiled code, as a protocol: this package knows bytes and batches, not how loops are made.

`find_kernels` asks the engine for them when a store is opened; tests may bring their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol, cast

import numpy as np
import pyarrow as pa

from scalein.layout import FrameData
from scalein.options import Options

Functions = tuple[str, ...]  # what rows do to each value; "" leaves it as it is


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

    def fold(self, pointers: np.ndarray, hashes: np.ndarray, functions: Functions) -> tuple[np.ndarray, np.ndarray]:
        """Records without text, sorted by hash and then by age, each key once; and their hashes."""

    def hashes(self, pointers: np.ndarray) -> np.ndarray:
        """The hashes of records' keys."""

    def rows(self, pointers: np.ndarray, names: Sequence[str]) -> list[pa.RecordBatch]:
        """Columns of records."""

    def gather(self, pointers: np.ndarray) -> np.ndarray:
        """The records one behind the other: (count, record bytes)."""

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy pages that others may change meanwhile."""

    def restore(self, image: int, first: int, log: int, count: int) -> None:
        """Undo `count` changes, the newest first, in the image of the segment at offset `first`."""

    def checksums(self, blocks: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """The checksum of each row of bytes."""

    def split(self, old: int, old_buckets: int, new: int, shift: int, mask: int) -> None:
        """Move the words of an index table into one of twice the size."""


def find_kernels(key: pa.Schema, value: pa.Schema, options: Options) -> Kernels:
    """The engine's kernels for a table; they are compiled when they are first used."""
    engine: Any = import_module("scalein.runtime.stored")
    return cast(Kernels, engine.StoredKernels(key, value, options))
