"""Lookups in restored pieces by the indexes of snapshots, without loading groups; and the indexes themselves."""

from __future__ import annotations

import threading
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pytest

from scalein.errors import StoreFailed
from scalein.state import LogStore, format, piece_lookups
from scalein.state import indexer as indexer_module
from scalein.state.arena import Arena
from scalein.state.budget import Budget
from scalein.state.index_runs import IndexRun, IndexWriter
from scalein.state.indexer import first_to_merge
from scalein.state.sum_bounds import SumBounds
from scalein.storage.local import LocalFileSystem
from scalein.testing import until
from tests.state.store_model import KINDS
from tests.state.store_pair import Pair

PLENTY = Budget(None, 1 << 16, 1 << 12)


def never_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece_lookups, "BYTES_PER_READ", 0)
    monkeypatch.setattr(SumBounds, "refresh", lambda self, rows, measure: None)  # it reads all records


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("buffer_bytes", [1 << 14, 1 << 22])
def test_lookups_in_several_pieces(kind: str, buffer_bytes: int, tmp_path: Path,
                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """Full, partial and deleted records of several sessions, whose groups are not loaded; small read buffers."""
    never_load(monkeypatch)
    pair = Pair(KINDS[kind], lambda readonly: LocalFileSystem(tmp_path, readonly), PLENTY, 1)
    for age in range(3):
        for step in range(3):  # several index files
            pair.do(("more", 10 * age + step, 700 >> age))
            pair.do(("delete", 10 * age + step, 40))
            pair.store.snapshot().wait()
        pair.op_reopen(Random(0), 0)
        assert pair.kind.overflows or len(pair.store._tiers.restored.pieces) == 1 + age  # overflows load groups
        pair.store._tiers._reader.buffer_bytes = buffer_bytes
        loaded = pair.store.stats()["groups_not_loaded"]
        for seed in range(3):
            pair.do(("get", seed, 400))
        assert pair.store.stats()["groups_not_loaded"] == loaded
        pair.store.verify()
    monkeypatch.setattr(piece_lookups, "BYTES_PER_READ", 1 << 20)
    pair.do(("get", 5, 400))
    pair.do(("scan", 0, 0))
    assert pair.store.stats()["groups_not_loaded"] == 0
    pair.close()


@pytest.mark.parametrize("kind", ["int", "text"])
def test_stale_index_entries_are_ignored(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are evicted and loaded to other addresses repeatedly between snapshots, each with its own index."""
    never_load(monkeypatch)
    monkeypatch.setattr(indexer_module, "MIN_MERGED", 50)  # all records are indexed anew at times
    pair = Pair(KINDS[kind], lambda readonly: LocalFileSystem(tmp_path, readonly), Budget(800_000, 1 << 16, 1 << 12), 1)
    for step in range(12):
        pair.do(("more", step, 500))
        pair.do(("delete", step, 100))
        for shard in range(step % 3, 16, 3):
            pair.store._tiers._evict(shard, 0.3)
        pair.do(("snapshot", step, 0))
        if step % 4 == 3:
            pair.op_reopen(Random(0), 0)
            pair.do(("get", step, 600))
            pair.do(("get", 3, 600))
            runs = pair.store._snapshots._indexer.runs
            assert len(runs) <= 3
    pair.do(("look_back", 0, 0))
    pair.do(("scan", 0, 0))
    pair.close()


def test_groups_that_are_requested_often_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that requests many keys loads their groups at once; calls that request few load a group at times."""
    keys = np.arange(50_000)
    with LogStore.open_on(LocalFileSystem(tmp_path), key={"k": pa.int64()}, value={"n": pa.int64()},
                             budget=PLENTY) as store:  # fmt: skip
        store.upsert(pa.table({"k": keys, "n": keys}))

    def left(store: LogStore) -> int:
        return int(str(store.stats()["groups_not_loaded"]))

    def get(store: LogStore, some: np.ndarray) -> None:
        assert store.get(pa.array(some))["n"].to_pylist() == some.tolist()

    monkeypatch.setattr(piece_lookups, "BYTES_PER_READ", 1000)  # about 3 keys make loading a group cheaper
    monkeypatch.setattr(piece_lookups, "MAX_LOAD_BYTES", 1)
    with LogStore.open(tmp_path, readonly=True) as store:
        get(store, keys[:1])
        assert left(store) == 256
        get(store, keys[:20_000])
        assert left(store) == 0
    with LogStore.open(tmp_path) as store:
        for calls in range(1, 13):
            get(store, keys[7:8])
            assert left(store) == 256 - (calls > 2)
        get(store, keys[:100])
        before = left(store)
        get(store, keys[:100])
        get(store, keys[:100])
        assert before - 3 <= left(store) < before  # one per call, however many are due


def test_merges_after_a_reopen_load_no_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of a restarted job: merge rows of some keys, read their values, take a snapshot, and so on."""
    never_load(monkeypatch)
    pair = Pair(KINDS["int"], lambda readonly: LocalFileSystem(tmp_path, readonly), PLENTY, 1)
    pair.do(("more", 0, 3000))
    pair.op_reopen(Random(0), 0)
    waiting = pair.store.stats()["groups_not_loaded"]
    for step in range(3):
        pair.do(("more", step, 200))
        pair.do(("get", step, 200))
        pair.do(("snapshot", step, 0))
    assert pair.store.stats()["groups_not_loaded"] == waiting
    pair.do(("scan", 0, 0))
    pair.close()


def test_new_owners_look_up_keys_in_files_of_the_old_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One store is split into two, each continues with its key groups, and both are combined; no group is loaded."""
    never_load(monkeypatch)
    keys = np.arange(3000)
    with LogStore.open(tmp_path / "old", key={"k": pa.int64()}, value={"n": pa.int64()}) as store:
        store.merge(pa.table({"k": keys, "n": keys}), n="sum")
        groups = store._kernels.lookup(store._tiers.memtable, pa.record_batch({"k": keys}))[1] >> np.uint64(56)
    wanted = keys.copy()
    for name, mine in (("low", range(128)), ("high", range(128, 256))):
        some = keys[np.isin(groups, mine)]
        with LogStore.open(tmp_path / name, old=[tmp_path / "old"], key_groups=mine) as store:
            store.merge(pa.table({"k": some[::3], "n": np.full(len(some[::3]), 7)}), n="sum")
            wanted[some[::3]] += 7
            assert store.get(pa.array(some))["n"].to_pylist() == wanted[some].tolist()
    with LogStore.open(tmp_path / "new", old=[tmp_path / "low", tmp_path / "high"]) as store:
        assert store.get(pa.array(keys))["n"].to_pylist() == wanted.tolist()
        assert store.stats()["groups_not_loaded"] == 256
        assert len(store._tiers.restored.pieces) == 4
    with LogStore.open(tmp_path / "new", key_groups=range(64, 192), readonly=True) as store:
        some = keys[np.isin(groups, range(64, 192))]
        assert store.get(pa.array(some))["n"].to_pylist() == wanted[some].tolist()
        assert store.stats()["groups_not_loaded"] == 128


# --- indexes of snapshots


def index_names(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir() if file.suffix == ".idx")


def test_a_snapshot_indexes_new_records_only(tmp_path: Path) -> None:
    store = LogStore.open_on(LocalFileSystem(tmp_path), key={"k": pa.int64()}, value={"n": pa.int64()}, budget=PLENTY)
    for start, end, entries in ((0, 1000, 1000), (500, 1500, 500), (0, 1500, 0)):
        known = set(index_names(tmp_path))
        store.merge(pa.table({"k": np.arange(start, end), "n": np.ones(end - start, np.int64)}), n="sum")
        made = store.snapshot().wait()
        name = format.index_name(store._ids.file(made.id))
        assert (name in index_names(tmp_path)) == (entries > 0)
        if entries:
            assert name not in known
            assert IndexRun(LocalFileSystem(tmp_path), store._ids.file(made.id)).count == entries
    store.close()


def test_index_files_are_merged_and_old_ones_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the background; a failed merge is tried again, and nothing is lost meanwhile."""
    never_load(monkeypatch)
    fails = [True]
    finish = IndexWriter.finish

    def failing(self: IndexWriter) -> None:
        is_merge = self.id in merged_ids
        if is_merge and fails[0]:
            raise StoreFailed("the disk is full")
        finish(self)

    merged_ids: set[int] = set()
    soon = indexer_module.Indexer.schedule_merge

    def noted(self: indexer_module.Indexer, id: int) -> None:
        merged_ids.add(id)
        soon(self, id)
        if self._merge is not None:
            self._merge.merged.exception()  # waits

    monkeypatch.setattr(IndexWriter, "finish", failing)
    monkeypatch.setattr(indexer_module.Indexer, "schedule_merge", noted)
    store = LogStore.open_on(LocalFileSystem(tmp_path), key={"k": pa.int64()}, value={"n": pa.int64()}, budget=PLENTY,
                                keep=1)  # fmt: skip
    for step in range(8):
        fails[0] = step < 4
        store.upsert(pa.table({"k": np.arange(100 * step, 100 * step + 100), "n": np.full(100, step)}))
        store.snapshot().wait()
        store._snapshots._writer.submit(lambda: None).result()
        assert len(store._snapshots._indexer.runs) == (step + 1 if step < 5 else 2)
        store.verify()
    assert len(index_names(tmp_path)) == 3  # of the newest snapshot, and one that was merged since
    store.close()
    with LogStore.open(tmp_path) as store:
        assert store.get(pa.array(np.arange(800)))["n"].to_pylist() == np.repeat(np.arange(8), 100).tolist()
        assert store.stats()["groups_not_loaded"]


def test_close_does_not_wait_for_an_index_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, entries, groups = threading.Event(), IndexRun.entries, list[int]()

    def held(self: IndexRun, first: int, last: int) -> np.ndarray:
        groups.append(first)
        started.set()
        until(lambda: indexer._is_closing)
        return entries(self, first, last)

    monkeypatch.setattr(IndexRun, "entries", held)
    store = LogStore.open_on(LocalFileSystem(tmp_path), key={"k": pa.int64()}, value={"n": pa.int64()}, budget=PLENTY)
    indexer = store._snapshots._indexer
    for step in range(2):
        store.upsert(pa.table({"k": np.arange(100 * step, 100 * step + 100), "n": np.arange(100)}))
        store.snapshot().wait()
    assert started.wait(60)
    store.close()
    assert set(groups) == {0}
    assert len(index_names(tmp_path)) == 2


def test_the_choice_of_index_files_to_merge() -> None:
    big = indexer_module.MIN_MERGED
    assert first_to_merge([]) == 0
    assert first_to_merge([5]) == 1
    assert first_to_merge([5, 3]) == 0
    assert first_to_merge([100 * big, 5]) == 2
    assert first_to_merge([100 * big, 10 * big, 5]) == 3
    assert first_to_merge([100 * big, 5, 10 * big]) == 1
    assert first_to_merge([100 * big, 30 * big, 25 * big]) == 0


def test_a_pinned_chunk_is_not_reused() -> None:
    arena = Arena(1 << 16, 1 << 24)
    first = arena.allocate(4096)
    arena.pinned = 1  # the first snapshot
    arena.free(first, 4096)
    second = arena.allocate(4096)
    assert second != first
    arena.pinned = 2
    arena.free(second, 4096)
    arena.unpinned = 1
    assert arena.allocate(4096) == first
    assert arena.allocate(4096) not in (first, second)
    arena.unpinned = 2
    assert arena.allocate(4096) == second


def test_a_snapshot_has_the_keys_of_its_capture_though_their_memory_is_freed(tmp_path: Path,
                                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are evicted and their chunks are reallocated after the capture, before the index is made."""
    never_load(monkeypatch)
    pair = Pair(KINDS["text"], lambda readonly: LocalFileSystem(tmp_path, readonly), PLENTY, 1)
    pair.do(("more", 1, 1500))
    pair.do(("slow_snapshot", 0, 0))  # its copies wait, and its index is made after them
    for shard in range(16):
        pair.store._tiers._evict(shard, 0.0)
    pair.store._tiers.finish_evictions()
    pair.do(("more", 2, 1500))
    id = pair.waiting[-1].id
    pair.wait()
    with pair.opened(id, readonly=True) as old:
        keys = pa.table({name: [key[k] for key in pair.captured[id]] for k, name in enumerate(pair.kind.key.names)},
                        pair.kind.key)  # fmt: skip
        found = old.get(keys).to_pylist()
        assert [tuple(row.values()) for row in found] == list(pair.captured[id].values())
    pair.close()
