"""State stores that are compared: ours, RocksDB and LMDB, each with sum, count and max of the updates of integer keys.

All have the same face: `fill` brings every key once, `merge` is a read-modify-write of each row, `get` the values of
keys. The others get what helps them: keys in their order, values as 24 bytes of packed numbers, many keys a call, no
log and no sync.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bench.data import Updates
from scalein.state import LogStore

KEY, VALUE = {"k": pa.int64()}, {"s": pa.float64(), "n": pa.int64(), "m": pa.float64()}
FUNCTIONS = {"s": "sum", "n": "count", "m": "max"}
PACKED = np.dtype([("s", "<f8"), ("n", "<i8"), ("m", "<f8")])
BATCH = 4_096  # rows of a write batch of the others

Array = npt.NDArray[Any]


class Store(Protocol):
    """What is compared."""

    def fill(self, updates: Updates) -> None:
        """Bring every key once."""

    def merge(self, rows: pa.Table) -> None:
        """Update the values of keys that are there."""

    def get(self, keys: Array) -> Array:
        """The values of keys that are there, as PACKED."""

    def close(self) -> None:
        """Free what it has."""


class Ours:
    """scalein's LogStore."""

    def __init__(self, folder: Path, *, memory: int | None = None, workers: int = 1) -> None:
        self.folder = folder
        self.store = LogStore.open(folder, key=KEY, value=VALUE, memory=memory, workers=workers)

    def fill(self, updates: Updates) -> None:
        for rows in updates.all_keys():
            self.merge(rows)

    def merge(self, rows: pa.Table) -> None:
        self.store.merge(rows, **FUNCTIONS)

    def get(self, keys: Array) -> Array:
        found = self.store.get(pa.array(keys))
        packed = np.empty(len(keys), PACKED)
        for name in VALUE:
            packed[name] = found[name].to_numpy()
        return packed

    def close(self) -> None:
        """Close it without the last snapshot: its time belongs to nothing that is measured."""
        self.store.__exit__(KeyboardInterrupt, None, None)


class Rocks:
    """RocksDB: multi-get, write batches, a Bloom filter, no log."""

    def __init__(self, folder: Path, *, cache: int, write_buffer: int | None = None) -> None:
        rocksdict = import_module("rocksdict")
        options, blocks = rocksdict.Options(raw_mode=True), rocksdict.BlockBasedOptions()
        blocks.set_block_cache(rocksdict.Cache(cache))
        blocks.set_bloom_filter(10, False)
        if write_buffer is not None:  # a small budget: everything counts
            blocks.set_cache_index_and_filter_blocks(True)
            options.set_write_buffer_size(write_buffer)
            options.set_max_write_buffer_number(2)
        options.set_block_based_table_factory(blocks)
        options.increase_parallelism(2)
        self._new_batch: Callable[[], Any] = lambda: rocksdict.WriteBatch(raw_mode=True)
        self._folder, self._db = folder, rocksdict.Rdict(str(folder), options)
        self._unlogged = rocksdict.WriteOptions()
        self._unlogged.disable_wal = True

    def fill(self, updates: Updates) -> None:
        for keys, values in first_values(updates):
            self._put(keys, values)
        self._db.flush()

    def merge(self, rows: pa.Table) -> None:
        for keys, fold in folded(rows):
            self._put(keys, fold(_unpacked(self._db.get(keys))))

    def _put(self, keys: list[bytes], values: list[bytes]) -> None:
        batch = self._new_batch()
        for key, value in zip(keys, values, strict=True):
            batch.put(key, value)
        self._db.write(batch, self._unlogged)

    def get(self, keys: Array) -> Array:
        return _unpacked(self._db.get(_names(keys)))

    def close(self) -> None:
        self._db.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class Lmdb:
    """LMDB: a writable map, a transaction for each batch, no sync."""

    def __init__(self, folder: Path) -> None:
        lmdb = import_module("lmdb")
        self._folder = folder
        self._env = lmdb.open(str(folder), map_size=1 << 36, writemap=True, sync=False, metasync=False, lock=False)

    def fill(self, updates: Updates) -> None:
        for keys, values in first_values(updates):
            with self._env.begin(write=True) as transaction, transaction.cursor() as cursor:
                cursor.putmulti(zip(keys, values, strict=True), append=True)

    def merge(self, rows: pa.Table) -> None:
        for keys, fold in folded(rows):
            with self._env.begin(write=True) as transaction, transaction.cursor() as cursor:
                found = [value for _, value in cursor.getmulti(keys)]
                cursor.putmulti(zip(keys, fold(_unpacked(found)), strict=True))

    def get(self, keys: Array) -> Array:
        with self._env.begin() as transaction, transaction.cursor() as cursor:
            found = dict(cursor.getmulti(_names(keys)))
        return _unpacked([found[name] for name in _names(keys)])

    def close(self) -> None:
        self._env.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def first_values(updates: Updates, step: int = 1 << 16) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Every key once, in order, with the value of a first row; the same in all of the others, not in ours."""
    for start in range(0, updates.keys, step):
        keys = np.arange(start, min(start + step, updates.keys))
        values = np.zeros(len(keys), PACKED)
        values["s"], values["n"], values["m"] = keys / 64.0, 1, keys / 64.0
        yield _names(keys), _packed(values)


def folded(rows: pa.Table) -> Iterator[tuple[list[bytes], Callable[[Array], list[bytes]]]]:
    """Rows by batch: the keys of each once, in order, and what turns their values into the next ones."""
    keys, values = rows["k"].to_numpy(), rows["s"].to_numpy()
    for start in range(0, len(keys), BATCH):
        distinct, place = np.unique(keys[start : start + BATCH], return_inverse=True)
        value = values[start : start + BATCH]

        def fold(old: Array, place: Array = place, value: Array = value) -> list[bytes]:
            new = old.copy()
            np.add.at(new["s"], place, value)
            np.add.at(new["n"], place, 1)
            np.maximum.at(new["m"], place, value)
            return _packed(new)

        yield _names(distinct), fold


def assert_merges(store: Store, updates: Updates, rows: int) -> None:
    """A merge changes what `get` gives as it should, on some rows."""
    table = updates.take(rows)
    keys, place = np.unique(table["k"].to_numpy(), return_inverse=True)
    value = table["s"].to_numpy()
    wanted = store.get(keys)
    np.add.at(wanted["s"], place, value)
    np.add.at(wanted["n"], place, 1)
    np.maximum.at(wanted["m"], place, value)
    store.merge(table)
    np.testing.assert_array_equal(store.get(keys), wanted)


def _names(keys: Array) -> list[bytes]:
    """Keys as bytes that sort as the keys do."""
    return _cut(keys.astype(">i8"))


def _packed(values: Array) -> list[bytes]:
    return _cut(values)


def _cut(array: Array) -> list[bytes]:
    data, size = array.tobytes(), array.dtype.itemsize
    return [data[at : at + size] for at in range(0, len(data), size)]


def _unpacked(values: list[bytes]) -> Array:
    return np.frombuffer(b"".join(values), PACKED)
