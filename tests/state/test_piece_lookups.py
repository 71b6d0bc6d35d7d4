"""Point reads after a reopen: by the indexes of snapshots, without loading groups; and these indexes themselves."""

from __future__ import annotations

import threading
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pytest

from scalein.errors import StoreFailed
from scalein.state import LogStore, format, piece_lookups
from scalein.state import indexer as indexing
from scalein.state.arena import Arena
from scalein.state.budget import Budget
from scalein.state.index_runs import IndexRun, IndexWriter
from scalein.state.indexer import first_merged
from scalein.storage.local import LocalFileSystem
from tests.state.store_model import KINDS
from tests.state.store_pair import Pair

PLENTY = Budget(None, 1 << 16, 1 << 12)


def never_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece_lookups, "READ_WORTH", 0)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("window", [1 << 14, 1 << 22])
def test_keys_are_looked_up_in_pieces_of_several_ages(kind: str, window: int, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """Records, partials and deleted ones of several processes, whose groups stay on disk; windows of a few blocks."""
    never_load(monkeypatch)
    pair = Pair(KINDS[kind], lambda readonly: LocalFileSystem(tmp_path, readonly), PLENTY, 1)
    for age in range(3):
        for step in range(3):  # several index files
            pair.do(("more", 10 * age + step, 700 >> age))
            pair.do(("delete", 10 * age + step, 40))
            pair.store.snapshot().wait()
        pair.op_reopen(Random(0), 0)
        assert pair.kind.overflows or len(pair.store._tiers.past.pieces) == 1 + age  # overflows load groups
        pair.store._tiers._reader.buffer_bytes = window
        loaded = pair.store.stats()["groups_not_loaded"]
        for seed in range(3):
            pair.do(("get", seed, 400))
        assert pair.store.stats()["groups_not_loaded"] == loaded
        pair.store.verify()
    monkeypatch.setattr(piece_lookups, "READ_WORTH", 1 << 20)
    pair.do(("get", 5, 400))
    pair.do(("scan", 0, 0))
    assert pair.store.stats()["groups_not_loaded"] == 0
    pair.close()


@pytest.mark.parametrize("kind", ["int", "text"])
def test_entries_of_chunks_that_others_have_now_lead_to_nothing_wrong(kind: str, tmp_path: Path,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups leave memory and come back to other places, again and again, between snapshots: each has its own index."""
    never_load(monkeypatch)
    monkeypatch.setattr(indexing, "LEAST_MERGED", 50)  # files are made anew now and then
    pair = Pair(KINDS[kind], lambda readonly: LocalFileSystem(tmp_path, readonly), Budget(800_000, 1 << 16, 1 << 12), 1)
    for step in range(12):
        pair.do(("more", step, 500))
        pair.do(("delete", step, 100))
        for bundle in range(step % 3, 16, 3):
            pair.store._tiers._evict(bundle, 0.3)
        pair.do(("snapshot", step, 0))
        if step % 4 == 3:
            pair.op_reopen(Random(0), 0)
            pair.do(("get", step, 600))
            pair.do(("get", 3, 600))
            runs = pair.store._saver._indexer.runs
            assert len(runs) <= 3
    pair.do(("look_back", 0, 0))
    pair.do(("scan", 0, 0))
    pair.close()


def test_what_is_asked_for_often_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that asks for much loads at once; calls that ask for little load a group now and then."""
    keys = np.arange(50_000)
    with LogStore.open_on(LocalFileSystem(tmp_path), key={"k": pa.int64()}, value={"n": pa.int64()},
                             budget=PLENTY) as store:  # fmt: skip
        store.upsert(pa.table({"k": keys, "n": keys}))

    def left(store: LogStore) -> int:
        return int(str(store.stats()["groups_not_loaded"]))

    def get(store: LogStore, some: np.ndarray) -> None:
        assert store.get(pa.array(some))["n"].to_pylist() == some.tolist()

    monkeypatch.setattr(piece_lookups, "READ_WORTH", 1000)  # 3 keys or so are worth a group
    monkeypatch.setattr(piece_lookups, "LOADED_BYTES", 1)
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
        assert before - 3 <= left(store) < before  # one a call, however many are due


def test_merges_after_a_reopen_load_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a restarted job does: rows of some keys, their values, a snapshot, and so on."""
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


def test_owners_look_up_in_the_files_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One store becomes two, each goes on with its key groups, and both become one again; nothing is loaded."""
    never_load(monkeypatch)
    keys = np.arange(3000)
    with LogStore.open(tmp_path / "old", key={"k": pa.int64()}, value={"n": pa.int64()}) as store:
        store.merge(pa.table({"k": keys, "n": keys}), n="sum")
        groups = store._kernels.lookup(store._tiers.hot, pa.record_batch({"k": keys}))[1] >> np.uint64(56)
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
        assert len(store._tiers.past.pieces) == 4
    with LogStore.open(tmp_path / "new", key_groups=range(64, 192), readonly=True) as store:
        some = keys[np.isin(groups, range(64, 192))]
        assert store.get(pa.array(some))["n"].to_pylist() == wanted[some].tolist()
        assert store.stats()["groups_not_loaded"] == 128


# --- indexes of snapshots


def index_names(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir() if file.suffix == ".idx")


def test_only_new_records_are_indexed(tmp_path: Path) -> None:
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


def test_files_are_merged_and_old_ones_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the background; a merge that fails is tried again, and nothing is lost meanwhile."""
    never_load(monkeypatch)
    fails = [True]
    finish = IndexWriter.finish

    def failing(self: IndexWriter) -> None:
        is_merge = self.id in merged_ids
        if is_merge and fails[0]:
            raise StoreFailed("no more room")
        finish(self)

    merged_ids: set[int] = set()
    soon = indexing.Indexer.merge_soon

    def noted(self: indexing.Indexer, id: int) -> None:
        merged_ids.add(id)
        soon(self, id)
        if self._merging is not None:
            self._merging.merged.exception()  # waits

    monkeypatch.setattr(IndexWriter, "finish", failing)
    monkeypatch.setattr(indexing.Indexer, "merge_soon", noted)
    store = LogStore.open_on(LocalFileSystem(tmp_path), key={"k": pa.int64()}, value={"n": pa.int64()}, budget=PLENTY,
                                keep=1)  # fmt: skip
    for step in range(8):
        fails[0] = step < 4
        store.upsert(pa.table({"k": np.arange(100 * step, 100 * step + 100), "n": np.full(100, step)}))
        store.snapshot().wait()
        store._saver._writer.submit(lambda: None).result()
        assert len(store._saver._indexer.runs) == (step + 1 if step < 5 else 2)
        store.verify()
    assert len(index_names(tmp_path)) == 3  # of the newest snapshot, and one that was merged since
    store.close()
    with LogStore.open(tmp_path) as store:
        assert store.get(pa.array(np.arange(800)))["n"].to_pylist() == np.repeat(np.arange(8), 100).tolist()
        assert store.stats()["groups_not_loaded"]


def test_a_store_that_is_closed_waits_for_no_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    entries, groups = IndexRun.entries, list[int]()

    def held(self: IndexRun, first: int, last: int) -> np.ndarray:
        groups.append(first)
        begun.set()
        goes_on.wait(10)
        return entries(self, first, last)

    monkeypatch.setattr(IndexRun, "entries", held)
    store = LogStore.open_on(LocalFileSystem(tmp_path), key={"k": pa.int64()}, value={"n": pa.int64()}, budget=PLENTY)
    for step in range(2):
        store.upsert(pa.table({"k": np.arange(100 * step, 100 * step + 100), "n": np.arange(100)}))
        store.snapshot().wait()
    assert begun.wait(10)
    indexer = store._saver._indexer
    threading.Timer(0.2, lambda: (goes_on.set() if indexer._is_closing else None)).start()
    store.close()
    assert set(groups) == {0}
    assert len(index_names(tmp_path)) == 2


def test_few_files_each_much_larger_than_all_newer_ones() -> None:
    big = indexing.LEAST_MERGED
    assert first_merged([]) == 0
    assert first_merged([5]) == 1
    assert first_merged([5, 3]) == 0
    assert first_merged([100 * big, 5]) == 2
    assert first_merged([100 * big, 10 * big, 5]) == 3
    assert first_merged([100 * big, 5, 10 * big]) == 1
    assert first_merged([100 * big, 30 * big, 25 * big]) == 0


def test_a_chunk_stays_while_an_index_is_made_of_it() -> None:
    arena = Arena(1 << 16, 1 << 24)
    first = arena.take(4096)
    arena.pinned = 1  # the first snapshot
    arena.give_back(first, 4096)
    second = arena.take(4096)
    assert second != first
    arena.pinned = 2
    arena.give_back(second, 4096)
    arena.unpinned = 1
    assert arena.take(4096) == first
    assert arena.take(4096) not in (first, second)
    arena.unpinned = 2
    assert arena.take(4096) == second


def test_a_snapshot_has_the_keys_of_its_freeze_though_their_memory_is_used_again(tmp_path: Path,
                                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups leave memory and others come into their chunks after the freeze, before the index is made."""
    never_load(monkeypatch)
    pair = Pair(KINDS["text"], lambda readonly: LocalFileSystem(tmp_path, readonly), PLENTY, 1)
    pair.do(("more", 1, 1500))
    pair.do(("slow_snapshot", 0, 0))  # waits with its copies, and its index comes after them
    for bundle in range(16):
        pair.store._tiers._evict(bundle, 0.0)
    pair.store._tiers.settle()
    pair.do(("more", 2, 1500))
    frozen = pair.waiting[-1].id
    pair.wait()
    with pair.opened(frozen, readonly=True) as old:
        keys = pa.table({name: [key[k] for key in pair.frozen[frozen]] for k, name in enumerate(pair.kind.key.names)},
                        pair.kind.key)  # fmt: skip
        found = old.get(keys).to_pylist()
        assert [tuple(row.values()) for row in found] == list(pair.frozen[frozen].values())
    pair.close()
