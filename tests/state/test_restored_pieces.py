"""Restored pieces: how many there are, which of their files are open, when they are loaded."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pytest

from scalein.errors import Damaged
from scalein.state import LogStore, format, piece_lookups, pieces, restored
from scalein.state.budget import Budget
from scalein.state.restored import first_to_load
from scalein.storage.local import LocalFileSystem
from tests.state.store_model import KINDS
from tests.state.store_pair import Pair, kernels_of

PLENTY = Budget(None, 1 << 16, 1 << 12)
SMALL = Budget(300_000, 1 << 14, 1 << 12)
KEY, VALUE = {"k": pa.int64()}, {"n": pa.int64()}
ROWS = pa.table({"k": np.arange(5000), "n": np.ones(5000, np.int64)})


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four pieces are the maximum, and lookups load no group."""
    monkeypatch.setattr(restored, "MAX_PIECES", 4)
    monkeypatch.setattr(piece_lookups, "BYTES_PER_READ", 0)


def paired(path: Path, kind: str = "int", budget: Budget = PLENTY) -> Pair:
    return Pair(KINDS[kind], lambda readonly: LocalFileSystem(path, readonly), budget, 1)


def open_file_names(path: Path) -> list[str]:
    """Files of a directory that this process has open."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if name.startswith(f"{path}/"):
            found.append(name)
    return found


def shard_groups(store: LogStore) -> list[int]:
    """The key group of each of the rows."""
    batch = ROWS.select(["k"]).combine_chunks().to_batches()[0]
    found: list[int] = (store._kernels.lookup(store._tiers.memtable, batch)[1] >> np.uint64(56)).tolist()
    return found


def damage(path: Path, store: LogStore) -> None:
    """Change a byte of some group's records in the newest piece."""
    piece = store._tiers.restored.pieces[-1]
    id, extent = piece.segments[0]
    at = extent.offset + int(piece.offset[len(piece.offset) // 2]) + 16
    raw = bytearray((path / format.image_name(id)).read_bytes())
    raw[at] ^= 1
    (path / format.image_name(id)).write_bytes(raw)


@pytest.mark.parametrize("budget", [PLENTY, SMALL])
@pytest.mark.parametrize("kind", ["int", "text"])
def test_the_number_of_pieces_is_bounded(kind: str, budget: Budget, tmp_path: Path, few: None) -> None:
    pair = paired(tmp_path, kind, budget)
    pair.do(("more", 99, 2000))
    most_open = 0
    for session in range(24):
        pair.op_reopen(Random(0), 0)
        pair.do(("more" if session % 5 else "delete", session, 40))
        most_open = max(most_open, len(open_file_names(tmp_path)))
        assert len(pair.store._tiers.restored.pieces) <= 5
        if session % 8 == 7:
            pair.do(("get", session, 300))
    assert budget is SMALL or most_open < 20
    pair.do(("get", 7, 500))
    pair.do(("scan", 0, 0))
    pair.op_reopen(Random(0), 0)
    pair.do(("verify", 0, 0))
    pair.do(("scan", 0, 0))
    pair.close()


def test_a_large_old_piece_is_not_loaded_because_of_small_new_ones(tmp_path: Path, few: None) -> None:
    pair = paired(tmp_path)
    pair.do(("more", 99, 3000))
    for session in range(12):
        pair.op_reopen(Random(0), 0)
        pair.do(("more", session, 5))
    oldest = pair.store._tiers.restored.pieces[0]
    assert not oldest.loaded
    assert oldest.group_bytes.sum() > 10_000
    pair.do(("scan", 0, 0))
    pair.close()


def test_a_snapshot_loads_pieces_group_by_group(tmp_path: Path, few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One group per snapshot, unless there are far too many pieces."""
    monkeypatch.setattr(restored, "MAX_PIECES", 99)
    for _ in range(8):
        with LogStore.open(tmp_path, key=KEY, value=VALUE) as store:
            store.merge(ROWS, n="sum")
    store = LogStore.open(tmp_path)
    found = store._tiers.restored
    assert len(found.pieces) == 8
    monkeypatch.setattr(restored, "MAX_PIECES", 4)
    monkeypatch.setattr(restored, "MAX_LOAD_BYTES", 1)
    for step in (1, 2, 3):
        store.snapshot().wait()
        assert [len(piece.loaded) for piece in found.pieces] == [step] * 8
    monkeypatch.setattr(restored, "MAX_PIECES", 3)
    store.snapshot().wait()
    assert not found.pieces
    assert store.get(ROWS.select(["k"]))["n"].to_pylist() == [8] * len(ROWS)
    store.close()
    with LogStore.open(tmp_path) as store:
        assert store.get(ROWS.select(["k"]))["n"].to_pylist() == [8] * len(ROWS)


def test_a_snapshot_is_written_despite_damaged_groups(tmp_path: Path, few: None) -> None:
    """Groups that cannot be read remain in their pieces; the rows of the session are saved."""
    for session in range(5):
        with LogStore.open(tmp_path, key=KEY, value=VALUE) as store:
            store.merge(ROWS, n="sum")
            assert len(store._tiers.restored.pieces) == session
    with LogStore.open(tmp_path, readonly=True) as store:
        damage(tmp_path, store)
    with LogStore.open(tmp_path) as store:
        store.merge(pa.table({"k": [10_000], "n": [5]}), n="sum")
    with LogStore.open(tmp_path) as store:
        assert len(store._tiers.restored.pieces) == 6
        assert 1 <= len(store._tiers.restored.pieces[0].groups) < 256
        assert store.get(pa.array([10_000]))["n"].to_pylist() == [5]
        found = next(group for group in range(256) if group not in store._tiers.restored.pieces[4].groups)
        mine = [k for k, group in zip(ROWS["k"].to_pylist(), shard_groups(store), strict=True) if group == found]
        assert store.get(pa.array(mine))["n"].to_pylist() == [5] * len(mine)


@pytest.mark.parametrize("budget", [Budget(100_000, 1 << 14, 1 << 12), SMALL])
def test_a_damaged_group_does_not_block_other_groups(budget: Budget, tmp_path: Path) -> None:
    """Its shard cannot be evicted: one merge reports it, reads of other keys never do."""
    with LogStore.open(tmp_path, key=KEY, value=VALUE) as store:
        store.merge(ROWS, n="sum")
    with LogStore.open(tmp_path, readonly=True) as store:
        damage(tmp_path, store)
    with LogStore.open_on(LocalFileSystem(tmp_path), key=None, value=None, budget=budget) as store:
        groups, keys, reported = np.array(shard_groups(store)), ROWS["k"].to_numpy(), 0
        for first in range(0, 5000, 100):
            try:
                store.merge(ROWS.slice(first, 100), n="sum")
            except Damaged:
                reported += 1
                store.merge(ROWS.slice(first, 100), n="sum")
        assert reported == 1
        bad = [group for group in range(256) if is_damaged(store, keys[groups == group])]
        assert len(bad) == 1
        good = keys[groups != bad[0]]
        assert store.get(pa.array(good))["n"].to_pylist() == [2] * len(good)
        store.snapshot().wait()
        store.merge(ROWS, n="sum")
    with LogStore.open_on(LocalFileSystem(tmp_path), key=None, value=None, budget=budget) as store:
        assert store.get(pa.array(good))["n"].to_pylist() == [3] * len(good)


def is_damaged(store: LogStore, keys: np.ndarray) -> bool:
    try:
        store.get(pa.array(keys))
    except Damaged:
        return True
    return False


@pytest.mark.parametrize("kind", ["int", "text"])
def test_least_recently_used_files_are_closed(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that another process may remove stay open."""
    monkeypatch.setattr(pieces, "MAX_OPEN", 2)
    monkeypatch.setattr(piece_lookups, "BYTES_PER_READ", 0)
    pair = paired(tmp_path, kind)
    for session in range(6):
        pair.do(("more", session, 300))
        pair.op_reopen(Random(0), 0)
    assert len(pair.store._tiers.restored.pieces) == 6
    assert len(open_file_names(tmp_path)) <= 5
    for step in range(3):
        pair.do(("get", step, 200))
        assert len(open_file_names(tmp_path)) <= 9  # a file that was read has a second descriptor, past the page cache
    pair.do(("verify", 0, 0))
    with LogStore.open_on(LocalFileSystem(tmp_path, readonly=True), key=None, value=None, budget=PLENTY, readonly=True,
                             kernels=kernels_of(kind, 1)) as reader:  # fmt: skip
        for file in tmp_path.iterdir():
            if file.suffix in (".seg", ".idx"):
                file.rename(file.with_suffix(".away"))
        pair.check(reader, pair.model.content)
    for file in tmp_path.iterdir():
        if file.suffix == ".away":
            file.rename(file.with_suffix(".idx" if file.name.startswith("index") else ".seg"))
    pair.do(("scan", 0, 0))
    pair.close()


@pytest.mark.parametrize("is_all", [True, False])
def test_files_of_loaded_pieces_are_removed_and_closed(is_all: bool, tmp_path: Path) -> None:
    """Once no snapshot needs them they are removed, and no longer open."""
    for session in range(2):
        with LogStore.open(tmp_path, key=KEY, value=VALUE, keep=1) as store:
            store.merge(ROWS, n="sum")
            assert len(store._tiers.restored.pieces) == session
    with LogStore.open(tmp_path, keep=1) as store:
        assert len([name for name in open_file_names(tmp_path) if name.endswith((".seg", ".idx"))]) == 4
        store._tiers._load([*range(256)], 0 if is_all else 1)
        for _ in range(2):
            store.merge(ROWS, n="sum")
            store.snapshot().wait()
        store._snapshots._writer.submit(lambda: None).result()
        store._tiers._closer.submit(lambda: None).result()
        names = {os.path.basename(name) for name in open_file_names(tmp_path)}
        assert not [name for name in names if name.endswith("(deleted)")]
        assert len([name for name in names if name.endswith(".seg")]) == (0 if is_all else 1)
        assert store.get(ROWS.select(["k"]))["n"].to_pylist() == [4] * len(ROWS)


# --- read-only stores


@pytest.mark.parametrize("filled", [None, "1MB"])
@pytest.mark.parametrize("kind", [pa.int64(), pa.string()])
def test_a_readonly_store_stays_within_its_budget(kind: pa.DataType, filled: str | None, tmp_path: Path,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that do not fit into memory are looked up on disk, or scanned one by one."""
    monkeypatch.setattr(piece_lookups, "BYTES_PER_READ", 1 << 20)  # loading is always cheaper
    keys = pa.array([f"a key with the number {k}" if k % 2 else str(k) for k in range(20_000)])
    keys = keys if kind == pa.string() else pa.array(np.arange(20_000))
    with LogStore.open(tmp_path, key={"k": kind}, value={"n": pa.int64()}, memory=filled) as store:
        store.upsert(pa.table({"k": keys, "n": np.arange(20_000)}))
        store.upsert(pa.table({"k": keys[:10_000], "n": np.arange(10_000)}))
    with LogStore.open(tmp_path, memory="500KB", readonly=True) as store:
        assert store._tiers.restored.pieces
        memtable, most = store._tiers.memtable, store._budget.memtable_bytes
        slack = 64 << 10  # a group, at most
        random = Random(0)
        for _ in range(2):
            some = np.array(random.sample(range(20_000), 1500))
            assert store.get(keys.take(pa.array(some)))["n"].to_pylist() == some.tolist()
            assert memtable.in_use <= most
        assert len(store._tiers.restored.unloaded_groups()) < 256  # some groups are in memory
        found = 0
        for batch in store.scan():
            found += batch.num_rows
            assert memtable.in_use <= most + slack
        assert found == 20_000
        assert len(store) == 20_000
        assert memtable.in_use <= most + slack
        assert store.get(keys[:5])["n"].to_pylist() == [0, 1, 2, 3, 4]


def test_the_choice_of_pieces_to_load() -> None:
    assert first_to_load([1] * 17) == 0
    assert first_to_load([100, *[1] * 16]) == 1
    assert first_to_load([100, 16, *[1] * 15]) == 2
    assert first_to_load([30, 16, *[1] * 15]) == 0
    assert first_to_load([2**k for k in range(20, 0, -1)]) == 19
