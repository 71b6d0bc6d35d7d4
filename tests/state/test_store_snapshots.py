"""Snapshots during other calls: full undo logs, several snapshots in progress, texts, failures."""

from __future__ import annotations

import errno
import threading
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
from scalein.state.evict import Evictor
from scalein.state.snapshot import Capture, SegmentCopies
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
def test_a_capture_does_not_disturb_the_copy_of_the_previous_one(tmp_path: Path, at_once: int) -> None:
    """All segments were copied by kernels: the next capture sets marks before the first undo logs are applied."""
    pair = pair_of("int", tmp_path, 2)
    pair.store._snapshots.copier.max_copies = at_once
    pair.op_more(Random(1), 1500)
    pair.op_slow_snapshot(Random(1), 0)
    copier = pair.store._snapshots.copier
    for seed in range(3):
        pair.op_more(Random(seed), 1500)
    for segment in list(copier._current.uncopied):
        copier.copy_now(segment)
    pair.op_snapshot(Random(3), 0)
    for seed in range(3):
        pair.op_more(Random(seed), 1500)
    pair.op_look_back(Random(1), 0)
    pair.close()


def test_texts_written_since_the_last_snapshot_are_in_the_next(tmp_path: Path) -> None:
    """A new text may be in a segment without changed records."""
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
def test_a_failed_snapshot_is_reported_and_the_next_one_is_complete(kind: str, number: int, call: int) -> None:
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
    pair.store._release()
    pair.store = pair.opened()
    pair.op_scan(Random(0), 0)
    pair.close()


def test_close_reports_the_failed_snapshot() -> None:
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
    pair.store = pair.opened()  # the lock was released
    pair.model.content = {}
    pair.op_scan(Random(0), 0)
    pair.close()


def test_a_failed_snapshot_does_not_disturb_the_next_one() -> None:
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
            pair.captured = {second.id: content}
            pair.op_look_back(Random(0), 0)
        disk._faults.clear()
    pair.op_reopen(Random(0), 0)
    pair.op_scan(Random(0), 0)
    pair.close()


def test_the_size_of_a_chunk_that_begins_where_a_full_one_ends() -> None:
    """The open chunk of a group must not be found by the position of its next record."""
    headers = np.zeros((256, 16), np.int64)
    base = 1 << 20
    headers[3, RECORD_AT], headers[3, RECORD_END] = base + 8192, base + 8192  # the open chunk is just full
    chunks = np.array([[3, 0, 8192, 4096, 1], [3, 0, 4096, 4096, 2], [3, 1, 12288, 4096, 3], [-1, 0, 0, 0, 0]])
    capture = Capture(1, 1, 2, {}, headers, chunks, SegmentCopies({}), frozenset(), 0)
    tables = capture.chunk_tables(base)
    assert tables["offset"].tolist() == [8192, 4096, 12288]
    assert tables["used"].tolist() == [4096, 4096, 4096]


def test_records_of_a_failed_eviction_come_back_under_newer_ones(tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard is evicted again while its first eviction is in flight, which then fails."""
    write = Evictor._write_run
    calls, may_fail = [], threading.Event()

    def first_fails(self: Evictor, *args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            may_fail.wait(60)
            raise StoreFailed("no space on the disk")
        return write(self, *args)

    monkeypatch.setattr(Evictor, "_write_run", first_fails)
    keys = np.arange(500)
    with LogStore.open(tmp_path, key={"k": pa.int64()}, value={"n": pa.int64()}) as store:
        store.upsert(pa.table({"k": keys, "n": np.full(500, 1)}))
        store._tiers._evict(0, 0.0)
        store.upsert(pa.table({"k": keys, "n": np.full(500, 2)}))
        may_fail.set()
        with pytest.raises(StoreFailed, match="no space"):
            store._tiers._evict(0, 0.0)
        store._tiers._evict(0, 0.0)
        store._tiers.finish_evictions()
        assert len(calls) == 2
        assert store.get(pa.array(keys))["n"].to_pylist() == [2] * 500
        assert len(store) == 500


def test_records_of_an_interrupted_call_are_in_the_next_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that returns for memory has inserted records in unmarked segments; it may not be called again."""
    store = LogStore.open_on(LocalFileSystem(tmp_path), key={"k": pa.int64()}, value={"n": pa.int64()}, budget=SMALL)
    memtable, numbers = store._tiers.memtable, np.arange(20_000, dtype=np.int64)
    hashes = store._kernels.lookup(memtable, pa.record_batch({"k": numbers}))[1]
    keys = numbers[hashes >> np.uint64(56) == hashes[-1] >> np.uint64(56)]
    first = memtable.headers[0, ROOM] - 1  # one more fits into the index of a group
    store.upsert(pa.table({"k": keys[:first], "n": keys[:first]}))
    store.snapshot().wait()

    def interrupted(*args: object) -> None:
        raise ScaleinError("no space")

    more = pa.table({"k": keys[first : first + 4], "n": keys[first : first + 4]})
    with monkeypatch.context() as patch:
        patch.setattr(memtable, "serve", interrupted)
        with pytest.raises(ScaleinError, match="no space"):
            store.upsert(more)
    store.close()
    with LogStore.open_on(LocalFileSystem(tmp_path), key=None, value=None, budget=SMALL) as store:
        store._tiers.load_all()
        assert set(store.scan().read_all()["k"].to_pylist()) <= set(keys[: first + 4].tolist())  # no zeros as a record
        assert store.get(pa.array(keys[:first]))["n"].to_pylist() == keys[:first].tolist()


def test_no_snapshot_is_taken_after_an_interrupted_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing cleans up after Ctrl-C: the content of memory is unknown, so the last snapshot remains the newest."""
    store = LogStore.open(tmp_path, key={"k": pa.int64()}, value={"n": pa.int64()})
    store.upsert(pa.table({"k": [1], "n": [1]}))
    store.snapshot().wait()

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store._kernels, "upsert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.upsert(pa.table({"k": [1, 2], "n": [5, 5]}))
    with pytest.raises(ScaleinError, match="was interrupted"):
        store.get(pa.array([1]))
    store.close()
    with LogStore.open(tmp_path) as store:
        assert store.scan().read_all().to_pylist() == [{"k": 1, "n": 1}]
