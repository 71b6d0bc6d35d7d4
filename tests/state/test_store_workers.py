"""Calls with several workers: every row is merged once, by the worker of its key group, in order."""

from __future__ import annotations

import threading
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pytest

from scalein.kernels import store as store_kernels
from scalein.state import LogStore
from scalein.state.budget import Budget
from scalein.storage.local import LocalFileSystem
from tests.state.store_model import KINDS
from tests.state.store_pair import Pair, probes

TINY = Budget(1 << 30, 1 << 14, 1 << 12)  # tiny segments and logs, no eviction
STEPS = ["more", "merge", "upsert", "delete", "more", "slow_snapshot", "merge", "more", "get", "snapshot", "delete"]


def shuffled(random: Random, pair: Pair, calls: int) -> None:
    for _ in range(calls):
        # From no row to several blocks, and calls that start one worker only.
        size = random.choice([0, 1, 7, 300, 1023, 1024, 1025, 2600])
        pair.do((random.choice(STEPS), random.randrange(1 << 30), size))


@pytest.mark.parametrize(("kind", "workers"), [(kind, 2 + k % 4) for k, kind in enumerate(KINDS)])
def test_calls_of_all_sizes_equal_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str,
                                            workers: int) -> None:
    monkeypatch.setattr(store_kernels, "WORKER_ROWS", 150)
    pair = Pair(KINDS[kind], lambda readonly: LocalFileSystem(tmp_path, readonly), TINY, workers)
    random = Random(f"{kind} {workers}")
    for _ in range(3):
        shuffled(random, pair, 12)
        pair.op_look_back(random, 0)
    pair.op_reopen(random, 0)
    pair.op_scan(random, 0)
    pair.close()


def test_undo_logs_of_several_workers_are_merged_by_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The changes of a record are in the logs of several workers: its worker differs between calls."""
    monkeypatch.setattr(store_kernels, "WORKER_ROWS", 150)
    with probes() as seen:
        pair = Pair(KINDS["int"], lambda readonly: LocalFileSystem(tmp_path, readonly), TINY, 3)
        pair.op_more(Random(0), 1500)
        for seed in range(4):
            pair.op_slow_snapshot(Random(seed), 0)
            for size in (100, 300, 1000, 100, 1000, 300):
                pair.op_more(Random(seed), size)
            pair.op_look_back(Random(seed), 0)
        pair.close()
    assert seen["undo full"], seen


@pytest.mark.parametrize("keys", [1, 2, 3])
def test_workers_without_rows_are_harmless(tmp_path: Path, keys: int) -> None:
    """All rows of a block belong to one worker, and none to the others."""
    value = {"n": pa.int64(), "last": pa.int64()}
    with LogStore.open(tmp_path, key={"k": pa.string()}, value=value, workers=4) as store:
        names, order = np.array(["a key of many bytes " + "x" * k for k in range(keys)]), np.arange(5000)
        for _ in range(3):
            store.merge(pa.table({"k": names[order % keys], "last": order}), n="count", last="last")
        found = {row["k"]: (row["n"], row["last"]) for row in store.scan().read_all().to_pylist()}
        assert found == {name: (3 * (order % keys == k).sum(), order[order % keys == k][-1])
                         for k, name in enumerate(names.tolist())}


def test_segments_are_copied_concurrently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel with a full log does not wait for the copies of other segments; it waits for its own one."""
    pair = Pair(KINDS["int"], lambda readonly: LocalFileSystem(tmp_path, readonly), TINY, 2)
    pair.op_more(Random(1), 2600)
    pair.op_slow_snapshot(Random(1), 0)
    copier = pair.store._snapshots.copier
    first, second = sorted(copier._current.uncopied)[:2]
    begun, go_on, copy = threading.Event(), threading.Event(), copier._memtable.kernels.copy

    def slow(target: int, source: int, size: int) -> None:
        if source == copier._arena.base + (first << copier._arena.shift):
            begun.set()
            go_on.wait()
        copy(target, source, size)

    with monkeypatch.context() as patch:
        patch.setattr(copier._memtable.kernels, "copy", slow)
        threads = [threading.Thread(target=copier.copy_now, args=(first,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        begun.wait()
        copier.copy_now(second)
        assert second in copier._current.images
        assert first not in copier._current.images
        assert all(thread.is_alive() for thread in threads)
        go_on.set()
        for thread in threads:
            thread.join()
    assert first in copier._current.images
    pair.op_more(Random(2), 2600)
    pair.op_look_back(Random(1), 0)
    pair.close()


def test_a_failed_copy_is_retried_by_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(KINDS["int"], lambda readonly: LocalFileSystem(tmp_path, readonly), TINY, 1)
    pair.op_more(Random(1), 2600)
    pair.op_slow_snapshot(Random(1), 0)
    copier = pair.store._snapshots.copier
    segment = min(copier._current.uncopied)

    def fails(target: int, source: int, size: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(copier._memtable.kernels, "copy", fails)
        with pytest.raises(KeyboardInterrupt):
            copier.copy_now(segment)
    assert segment in copier._current.uncopied
    pair.op_more(Random(2), 2600)
    pair.op_look_back(Random(1), 0)
    pair.close()
