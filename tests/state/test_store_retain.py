"""`hold`: snapshots that a checkpoint names are retained."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from scalein.state import LogStore


def test_a_held_snapshot_is_retained(tmp_path: Path) -> None:
    with LogStore.open(tmp_path, key={"k": pa.int64()}, value={"n": pa.int64()}, keep=1) as store:
        store.merge(pa.table({"k": [1], "n": [1]}), n="sum")
        first = store.snapshot().wait().id
        store.hold([first])
        for _ in range(4):
            store.merge(pa.table({"k": [1], "n": [1]}), n="sum")
            store.snapshot().wait()
        assert first in store.stats()["snapshots"]  # type: ignore[operator]
    with LogStore.open(tmp_path, snapshot=first, readonly=True) as old:
        assert old.get(pa.array([1])).to_pydict() == {"n": [1]}
    with LogStore.open(tmp_path, keep=1) as store:
        assert store.get(pa.array([1])).to_pydict() == {"n": [5]}
        store.merge(pa.table({"k": [1], "n": [1]}), n="sum")
        store.snapshot().wait()
    with LogStore.open(tmp_path, readonly=True) as store:
        assert first not in store.stats()["snapshots"]  # type: ignore[operator]
