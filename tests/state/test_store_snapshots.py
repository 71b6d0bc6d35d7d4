"""Snapshots of a store whose calls go on meanwhile: undo logs that fill up, several under way, texts, failures."""

from __future__ import annotations

import errno
import time
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from scalein.errors import ScaleinError, StoreFailed
from scalein.layout import RECORD_AT, RECORD_END, ROOM
from scalein.state import LogStore
from scalein.state.budget import Budget
from scalein.state.evict import Spiller
from scalein.state.snapshot import Copy, Frozen
from scalein.storage.local import LocalFileSystem
from tests.state.power_cut_disk import PowerCutDisk
from tests.state.store_model import KINDS
from tests.state.store_pair import Pair, probes

SMALL = Budget(None, 1 << 14, 1 << 12)


def pair_of(kind: str, path: Path, workers: int = 1, budget: Budget = SMALL) -> Pair:
    return Pair(KINDS[kind], lambda readonly: LocalFileSystem(path, readonly), budget, workers)


@pytest.mark.parametrize("kind", ["int", "text"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_undo_log_makes_the_kernel_copy(tmp_path: Path, kind: str, workers: int) -> None:
    with probes() as seen:
        pair = pair_of(kind, tmp_path, workers)
        for seed in range(3):
            pair.op_more(Random(seed), 1500)
            pair.op_slow_snapshot(Random(seed), 0)
            for again in range(5):
                pair.op_more(Random(again), 1500)
                pair.op_upsert(Random(again), 300)
                pair.op_delete(Random(again), 300)
            pair.op_look_back(Random(seed), 0)
        pair.op_reopen(Random(0), 0)
        pair.op_scan(Random(0), 0)
        pair.close()
    assert seen["undo full"], seen


@pytest.mark.parametrize("at_once", [1, 1000])
def test_a_freeze_does_not_disturb_the_copy_before(tmp_path: Path, at_once: int) -> None:
    """All segments were copied by kernels: the next freeze has the marks, while nothing of the first was mended yet."""
    pair = pair_of("int", tmp_path, 2)
    pair.store._saver.copier.at_once = at_once
    pair.op_more(Random(1), 1500)
    pair.op_slow_snapshot(Random(1), 0)
    copier = pair.store._saver.copier
    for seed in range(3):
        pair.op_more(Random(seed), 1500)
    for segment in list(copier._current.left):
        copier.copy_now(segment)
    pair.op_snapshot(Random(3), 0)
    for seed in range(3):
        pair.op_more(Random(seed), 1500)
    pair.op_look_back(Random(1), 0)
    pair.close()


def test_texts_written_since_the_last_snapshot_are_in_the_next(tmp_path: Path) -> None:
    """A new text may lie in a segment none of whose records changed."""
    value = {"t": pa.string()}
    store = LogStore.open_on(LocalFileSystem(tmp_path), key={"k": pa.int64()}, value=value, budget=SMALL)

    def rows(keys: range, what: str) -> pa.Table:
        return pa.table({"k": pa.array(keys, pa.int64()), "t": [f"{what} of the key number {k}" for k in keys]})

    store.upsert(rows(range(3000), "first"))
    store.snapshot().wait()
    for step in range(5):
        store.upsert(rows(range(step, 3000, 97), f"text {step}"))
        store.snapshot().wait()
    wanted = store.scan().read_all().sort_by("k")["t"].to_pylist()
    store.close()
    with LogStore.open(tmp_path) as again:
        assert again.scan().read_all().sort_by("k")["t"].to_pylist() == wanted


@pytest.mark.parametrize("kind", ["create", "write", "sync", "rename", "sync_directory"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("call", [0, 1])
def test_a_failed_snapshot_is_said_and_the_next_holds_everything(kind: str, number: int, call: int) -> None:
    disk = PowerCutDisk()
    pair = Pair(KINDS["int"], lambda readonly: disk, SMALL, 1)
    pair.op_more(Random(1), 300)
    pair.store.snapshot().wait()
    pair.op_more(Random(2), 300)
    disk.fail(kind, call, number)
    snapshot = pair.store.snapshot()
    pair.op_more(Random(3), 300)
    if kind == "rename" and call == 1:  # there is only one
        snapshot.wait(20)
    else:
        with pytest.raises(StoreFailed, match=f"snapshot {snapshot.id}") as caught:
            snapshot.wait(20)
        assert "disk/" in str(caught.value)
    disk._faults.clear()
    pair.op_snapshot(Random(3), 0)
    pair.wait()
    pair.op_scan(Random(0), 0)
    pair.store._shut()
    pair.store = pair.opened()
    pair.op_scan(Random(0), 0)
    pair.close()


def test_close_says_that_the_snapshot_under_way_failed() -> None:
    disk = PowerCutDisk()
    pair = Pair(KINDS["int"], lambda readonly: disk, SMALL, 1)
    pair.op_more(Random(1), 300)
    pair.gate.clear()
    pair.store.snapshot()
    for kind in ("create", "write", "sync"):
        for call in range(20):
            disk.fail(kind, call)
    pair.gate.set()
    with pytest.raises(StoreFailed):
        pair.store.close()
    disk._faults.clear()
    pair.store = pair.opened()  # the lock was given back
    pair.model.content = {}
    pair.op_scan(Random(0), 0)
    pair.close()


def test_a_failing_snapshot_does_not_disturb_the_one_behind() -> None:
    disk = PowerCutDisk()
    pair = Pair(KINDS["int"], lambda readonly: disk, SMALL, 2)
    pair.op_more(Random(1), 1500)
    pair.op_snapshot(Random(0), 0)
    pair.wait()
    for seed in range(4):
        pair.op_more(Random(seed), 1500)
        disk.fail("sync", 0)
        first = pair.store.snapshot()
        pair.op_more(Random(seed + 10), 1500)
        second = pair.store.snapshot()
        content = dict(pair.model.content)
        pair.op_more(Random(seed + 20), 1500)
        results = []
        for snapshot in (first, second):
            try:
                snapshot.wait(20)
                results.append(True)
            except ScaleinError:
                results.append(False)
        assert results[0] is False
        if results[1]:
            pair.frozen = {second.id: content}
            pair.op_look_back(Random(0), 0)
        disk._faults.clear()
    pair.op_reopen(Random(0), 0)
    pair.op_scan(Random(0), 0)
    pair.close()


def test_a_chunk_that_begins_where_a_full_one_ends_is_whole() -> None:
    """Which chunk of a group is open must not be told by where its next record goes."""
    headers = np.zeros((256, 16), np.int64)
    base = 1 << 20
    headers[3, RECORD_AT], headers[3, RECORD_END] = base + 8192, base + 8192  # the open one is just full
    chunks = np.array([[3, 0, 8192, 4096, 1], [3, 0, 4096, 4096, 2], [3, 1, 12288, 4096, 3], [-1, 0, 0, 0, 0]])
    frozen = Frozen(1, 1, 2, {}, headers, chunks, Copy({}), frozenset(), 0)
    tables = frozen.chunk_tables(base)
    assert tables["offset"].tolist() == [8192, 4096, 12288]
    assert tables["used"].tolist() == [4096, 4096, 4096]


def test_records_that_cannot_leave_come_back_under_newer_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle is evicted again while its first records are still on their way, and those then fail."""
    write = Spiller._write_run
    calls = []

    def first_fails(self: Spiller, *args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            time.sleep(0.2)
            raise StoreFailed("no room on the disk")
        return write(self, *args)

    monkeypatch.setattr(Spiller, "_write_run", first_fails)
    keys = np.arange(500)
    with LogStore.open(tmp_path, key={"k": pa.int64()}, value={"n": pa.int64()}) as store:
        store.upsert(pa.table({"k": keys, "n": np.full(500, 1)}))
        store._tiers._evict(0, 0.0)
        store.upsert(pa.table({"k": keys, "n": np.full(500, 2)}))
        with pytest.raises(StoreFailed, match="no room"):
            store._tiers._evict(0, 0.0)
        store._tiers._evict(0, 0.0)
        store._tiers.settle()
        assert len(calls) == 2
        assert store.get(pa.array(keys))["n"].to_pylist() == [2] * 500
        assert len(store) == 500


def test_records_that_an_interrupted_call_made_are_in_the_next_image(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """A kernel that leaves for room has made records that it did not mark; there may be none to come back to."""
    store = LogStore.open_on(LocalFileSystem(tmp_path), key={"k": pa.int64()}, value={"n": pa.int64()}, budget=SMALL)
    hot, numbers = store._tiers.hot, np.arange(20_000, dtype=np.int64)
    hashes = store._kernels.lookup(hot, pa.record_batch({"k": numbers}))[1]
    keys = numbers[hashes >> np.uint64(56) == hashes[-1] >> np.uint64(56)]
    first = hot.headers[0, ROOM] - 1  # one more has room in the index of a group
    store.upsert(pa.table({"k": keys[:first], "n": keys[:first]}))
    store.snapshot().wait()

    def interrupted(*args: object) -> None:
        raise ScaleinError("no room")

    more = pa.table({"k": keys[first : first + 4], "n": keys[first : first + 4]})
    with monkeypatch.context() as patch:
        patch.setattr(hot, "serve", interrupted)
        with pytest.raises(ScaleinError, match="no room"):
            store.upsert(more)
    store.close()
    with LogStore.open_on(LocalFileSystem(tmp_path), key=None, value=None, budget=SMALL) as store:
        store._tiers.load_all()
        assert set(store.scan().read_all()["k"].to_pylist()) <= set(keys[: first + 4].tolist())  # no zeros as a record
        assert store.get(pa.array(keys[:first]))["n"].to_pylist() == keys[:first].tolist()


def test_a_call_that_was_interrupted_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing cleans up behind Ctrl-C: what the call left in memory is not known, so the last snapshot stays."""
    store = LogStore.open(tmp_path, key={"k": pa.int64()}, value={"n": pa.int64()})
    store.upsert(pa.table({"k": [1], "n": [1]}))
    store.snapshot().wait()

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store._kernels, "keep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.upsert(pa.table({"k": [1, 2], "n": [5, 5]}))
    with pytest.raises(ScaleinError, match="interrupted half-way"):
        store.get(pa.array([1]))
    store.close()
    with LogStore.open(tmp_path) as store:
        assert store.scan().read_all().to_pylist() == [{"k": 1, "n": 1}]
