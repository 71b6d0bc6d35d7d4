"""Scans: bounded memory, and each key once although the store changes meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from scalein.state import LogStore
from scalein.state.run_levels import SHARDS

MEMORY = 1 << 19
TEXT = "t" * 150


def rows(first: int, count: int, is_text: bool) -> pa.Table:
    keys = np.arange(first, first + count)
    if is_text:
        return pa.table({"k": keys, "v": pa.array([TEXT] * count, pa.string())})
    return pa.table({"k": keys, **dict.fromkeys("vwxyz", keys)})


def opened(path: Path, is_text: bool, memory: int | None = MEMORY, readonly: bool = False) -> LogStore:
    schema = rows(0, 0, is_text).schema
    return LogStore.open(path, key={"k": pa.int64()}, value={f.name: f.type for f in schema if f.name != "k"},
                         memory=memory, readonly=readonly)


def evicted(path: Path, count: int, is_text: bool) -> LogStore:
    """A store with so many rows, in two runs of each shard."""
    with opened(path, is_text, memory=None) as store:
        for first in (0, count // 2):
            store.upsert(rows(first, count // 2, is_text))
            store._tiers.collect_garbage()
            for shard in range(SHARDS):
                store._tiers._evict(shard, 0.0)
            store._tiers.finish_evictions()
    return opened(path, is_text)


@pytest.mark.parametrize("is_text", [False, True], ids=["numbers", "texts"])
def test_a_scan_holds_a_part_of_the_memory_limit(is_text: bool, tmp_path: Path) -> None:
    count = 40_000 if is_text else 120_000
    with evicted(tmp_path, count, is_text) as store:
        made: list[int] = []  # bytes of batches that were made and not read yet
        real, most = store._kernels.rows, 0

        def counted(pointers: np.ndarray, names: Sequence[str]) -> list[pa.RecordBatch]:
            found = real(pointers, names)
            made.extend(batch.nbytes for batch in found)
            return found

        store._kernels.rows = counted  # type: ignore[method-assign]
        total, keys = 0, 0
        for batch in store.scan():
            most, keys, total = max(most, sum(made)), keys + batch.num_rows, total + batch.nbytes
            made.pop(0)
        assert (keys, len(store)) == (count, count)
        assert most < MEMORY // 3 < total // 16 < MEMORY


@pytest.mark.parametrize("is_text", [False, True], ids=["numbers", "texts"])
def test_a_scan_sees_each_key_once_whatever_changes_meanwhile(is_text: bool, tmp_path: Path) -> None:
    count = 15_000
    with evicted(tmp_path, count, is_text) as store:
        store.delete(pa.array(range(0, count, 7)))
        seen, deleted = Counter[int](), set[int]()
        for number, batch in enumerate(store.scan()):
            seen.update(batch.column("k").to_pylist())
            match number:
                case 3:
                    store.upsert(rows(count, 1000, is_text))
                case 5:
                    gone = pa.array(range(1, count, 7 * 31))
                    store.delete(gone)
                    deleted.update(gone.to_pylist())
                case 9:
                    store.compact()
                case 11:
                    store.snapshot().wait()
        assert max(seen.values()) == 1
        always = {key for key in range(count) if key % 7} - deleted
        assert always <= set(seen)
        assert not any(key < count and key % 7 == 0 for key in seen)


@pytest.mark.parametrize("readonly", [False, True])
def test_a_scan_of_a_restored_store_has_all_keys(readonly: bool, tmp_path: Path) -> None:
    with opened(tmp_path, False) as store:
        for first in range(0, 15_000, 5_000):
            store.upsert(rows(first, 5_000, False))
    with opened(tmp_path, False, readonly=readonly) as store:
        found = store.scan().read_all()
        assert len(store) == found.num_rows == 15_000
        assert found.sort_by("k").equals(rows(0, 15_000, False))
