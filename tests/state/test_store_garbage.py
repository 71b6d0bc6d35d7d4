"""Garbage collection: the memory and disk space of deleted and replaced records are freed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from scalein.state import LogStore
from scalein.state.tiers import Tiers

KEYS = np.arange(20_000)


def test_the_memory_of_replaced_texts_is_freed(tmp_path: Path) -> None:
    with LogStore.open(tmp_path, key={"k": pa.int64()}, value={"t": pa.string()}) as store:
        sizes = []
        for step in range(40):
            text = pa.array([f"a text of the step {step} that is long, for key {k}" for k in KEYS.tolist()])
            store.upsert(pa.table({"k": KEYS, "t": text}))
            sizes.append(store._tiers.memtable.arena.in_use)
        assert max(sizes) < 16 << 20
        assert store.get(pa.array([7]))["t"].to_pylist() == ["a text of the step 39 that is long, for key 7"]
        assert len(store) == len(KEYS)


def test_the_memory_of_deleted_records_is_freed(tmp_path: Path) -> None:
    with LogStore.open(tmp_path, key={"k": pa.int64()}, value={"n": pa.int64()}) as store:
        for step in range(30):
            keys = KEYS + step * len(KEYS)
            store.merge(pa.table({"k": keys, "n": keys}), n="sum")
            store.delete(pa.array(keys[:-10]))
        assert len(store) == 300
        assert store._tiers.memtable.arena.in_use < 20 << 20
        assert store.get(pa.array([len(KEYS) - 1]))["n"].to_pylist() == [len(KEYS) - 1]


def test_a_snapshot_is_a_point_in_time_during_garbage_collection(tmp_path: Path) -> None:
    tidied = []
    collect_garbage = Tiers.collect_garbage

    def counted(self: Tiers) -> None:
        tidied.append(len(self.memtable.gc_candidates))
        collect_garbage(self)

    store = LogStore.open(tmp_path, key={"k": pa.int64()}, value={"t": pa.string()}, keep=40)
    snapshots = {}
    Tiers.collect_garbage = counted  # type: ignore[method-assign]
    try:
        for step in range(30):
            text = pa.array([f"step {step:04d} of key {k:06d}" for k in KEYS.tolist()])
            store.upsert(pa.table({"k": KEYS, "t": text}))
            snapshots[step] = store.snapshot()
    finally:
        Tiers.collect_garbage = collect_garbage  # type: ignore[method-assign]
    store.close()
    assert sum(tidied) > 100
    for step in (0, 7, 15, 22, 29):
        with LogStore.open(tmp_path, snapshot=snapshots[step].id, readonly=True) as old:
            found = old.scan().read_all().sort_by("k")
            assert found["t"].to_pylist() == [f"step {step:04d} of key {k:06d}" for k in KEYS.tolist()]
