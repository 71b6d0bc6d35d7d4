"""Kernels of the state store: sinks over stored records and their index, apart from the steps and sinks of flows.

`kernels/store.py` runs them for `state/`, `llvm_backend/store_*.py` lowers them. They share the builder, the JIT and
the code cache with stages of flows.
"""

from __future__ import annotations

from dataclasses import dataclass

from scalein.ir.exprs import Expr
from scalein.ir.tables import StoredTable


@dataclass(frozen=True, slots=True)
class Upsert:
    """Merge each row into the stored record of its key: one function a value, over the row's `items`.

    `delete` marks the record as deleted instead. `owned`: only key groups of this worker.
    """

    table: StoredTable
    keys: tuple[Expr, ...]
    functions: tuple[str, ...] = ()
    items: tuple[Expr | None, ...] = ()
    delete: bool = False
    owned: bool = False


@dataclass(frozen=True, slots=True)
class Lookup:
    """Write the address of each row's stored record (0: none in memory), and the hash of its key."""

    table: StoredTable
    keys: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class MergeRecords:
    """Merge stored records into a table: newer ones than its own, or `older` ones under its own."""

    table: StoredTable
    functions: tuple[str, ...]
    older: bool = False


@dataclass(frozen=True, slots=True)
class CombineRecords:
    """Write stored records, given in the order of their hashes and ages, each key once: older ones take in newer ones.

    Only for tables without text: see sinks/stored.py.
    """

    table: StoredTable
    functions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HashKeys:
    """Write the hash of each stored record's key."""

    table: StoredTable


@dataclass(frozen=True, slots=True)
class Retain:
    """Copy the most accessed stored records of a shard to emptied indexes, with half of their accesses, and count the
    others; only for tables without text.
    """

    table: StoredTable


@dataclass(frozen=True, slots=True)
class Evict:
    """Write pointers to the others, from the words of the old indexes, in the order of their hashes."""

    table: StoredTable


@dataclass(frozen=True, slots=True)
class SeekHashes:
    """Write which of stored records, in the order of their hashes, have a hash: the first one, and how many."""

    table: StoredTable


@dataclass(frozen=True, slots=True)
class ReadBlocks:
    """Verify blocks of stored records without text; write where each record is, and the hash of its key."""

    table: StoredTable


@dataclass(frozen=True, slots=True)
class BulkOp:
    """Work on bytes of stored tables: what `llvm_backend/store_bulk.py` has (copy, checksum, ...)."""

    what: str


StoreSink = (Upsert | Lookup | MergeRecords | CombineRecords | HashKeys | SeekHashes | Retain | Evict | ReadBlocks
             | BulkOp)  # fmt: skip
