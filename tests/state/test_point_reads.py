"""Point reads: of keys in memory, in several runs, deleted, absent; damage is reported by the reads that meet it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pytest

from scalein.errors import Damaged, StoreFailed
from scalein.kernels.store import StoreKernels
from scalein.options import Options
from scalein.state import LogStore, compaction, evict, format, tiers
from scalein.state.arena import Arena
from scalein.state.budget import Budget
from scalein.state.checksum import block_checksum
from scalein.state.memtable import MemTable
from scalein.state.run_file import RunFile
from scalein.state.run_levels import SHARDS, RunLevels, pointers_to
from scalein.state.run_writer import RunWriter
from scalein.storage import aio
from scalein.storage.local import LocalFileSystem
from tests.state.store_model import KINDS, rows_of
from tests.state.store_pair import Pair

BLOCK = format.BLOCK
KEYS = 15_000
TINY = Budget(100_000, 1 << 14, 1 << 12)  # less than the smallest index: everything is evicted at once
LITTLE = Budget(800_000, 1 << 14, 1 << 12)


@pytest.mark.parametrize(("kind", "is_async"), [("int", True), ("text", True), ("nullable", True), ("float", True),
                                                ("int", False), ("text", False)])  # fmt: skip
def test_gets_equal_the_model_for_any_number_of_keys(kind: str, is_async: bool, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_async:
        monkeypatch.setattr(aio, "_system", lambda: None)
    pair = Pair(KINDS[kind], lambda readonly: LocalFileSystem(tmp_path, readonly), TINY, 1)
    for seed in range(5):
        pair.op_more(Random(seed), 1000)
        pair.op_delete(Random(seed), 100)
        if seed == 4:
            pair.op_upsert(Random(seed), 300)
    assert all(pair.store._tiers.levels.runs)
    for again in range(2):
        random = Random(again)
        for size in (1, 2, 7, 300, 2500, 1):  # some keys are repeated, and some do not exist
            pair.op_get(random, size)
        one = pair.kind.key_table(random, 1)
        assert list(rows_of(pair.store.get(pa.concat_tables([one] * 300)))) == pair.model.get(one) * 300
        pair.op_reopen(random, 0)
    pair.close()


def filled(path: Path, memory: Budget) -> LogStore:
    store = LogStore.open_on(LocalFileSystem(path), key={"k": pa.int64()}, value={"n": pa.int64()}, budget=memory)
    for numbers in np.split(np.arange(KEYS), 5):
        store.merge(pa.table({"k": numbers, "n": numbers}), n="sum")
    return store


def damage(store: LogStore, keys: np.ndarray, more: int) -> Damaged | None:
    """The damage that reading these keys reports; without damage, their values are checked."""
    try:
        found = store.get(pa.array(keys))
    except Damaged as error:
        return error
    assert found["n"].to_pylist() == (keys + more).tolist()
    return None


def test_only_reads_of_a_damaged_block_fail(tmp_path: Path) -> None:
    store = filled(tmp_path, TINY)
    store._tiers.finish_evictions()
    store.compact()
    run = max((run for runs in store._tiers.levels.runs for run in runs), key=lambda run: run.record_count)
    path = tmp_path / format.run_name(run.id)
    content = bytearray(path.read_bytes())
    block = content[2 * BLOCK : 3 * BLOCK]
    hostile = bytearray(block)  # a right checksum, but more records than fit
    hostile[:16] = (1 << 20).to_bytes(4, "little") + bytes(12)
    hostile[8:16] = block_checksum(memoryview(hostile), run.id ^ 2 * BLOCK).to_bytes(8, "little")
    flipped = bytearray(block)
    flipped[1000] ^= 4
    empty = bytes(BLOCK)
    for bytes_now, message in ((hostile, "more than it holds"), (flipped, "damaged"), (empty, "damaged")):
        os.pwrite(fd := os.open(path, os.O_RDWR), bytes_now, 2 * BLOCK)
        os.close(fd)
        found = [damage(store, np.arange(start, start + 20), 0) for start in range(0, KEYS, 375)]
        errors = [error for error in found if error is not None]
        assert 0 < len(errors) < len(found)
        assert {error.facts["file"] for error in errors} == {str(path)}
        assert all(message in str(error) for error in errors)
    os.pwrite(fd := os.open(path, os.O_RDWR), block, 2 * BLOCK)
    os.close(fd)
    assert damage(store, np.arange(KEYS), 0) is None
    store.close()


def test_a_damaged_group_is_not_loaded_partially(tmp_path: Path) -> None:
    """Partial records that were loaded twice would be counted twice."""
    plenty = Budget(None, 1 << 16, 1 << 12)
    filled(tmp_path, plenty).close()
    image = next(path for path in sorted(tmp_path.iterdir()) if path.suffix == ".seg" and path.stat().st_size > BLOCK)
    store = LogStore.open_on(LocalFileSystem(tmp_path), key=None, value=None, budget=plenty)
    store.merge(pa.table({"k": np.arange(KEYS), "n": np.ones(KEYS, np.int64)}), n="sum")
    was = image.read_bytes()[3 * BLOCK + 77]
    os.pwrite(fd := os.open(image, os.O_RDWR), bytes([was ^ 1]), 3 * BLOCK + 77)
    for _ in range(2):
        with pytest.raises(Damaged, match="image"):
            store.get(pa.array(np.arange(KEYS)))
    found = [damage(store, np.array([key]), 1) for key in range(0, KEYS, 20)]
    errors = [error for error in found if error is not None]
    assert 0 < len(errors) < len(found) // 10
    assert {error.facts["file"] for error in errors} == {str(image)}
    os.pwrite(fd, bytes([was]), 3 * BLOCK + 77)
    os.close(fd)
    assert damage(store, np.arange(KEYS), 1) is None
    store.close()


def test_partials_of_other_functions_are_evicted_whatever_their_accesses(tmp_path: Path,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """The retained records are chosen by a sample of groups; an eviction of all records must not depend on it."""
    monkeypatch.setattr(evict, "ACCESS_SAMPLE", 1)
    store = filled(tmp_path, LITTLE)
    assert all(store._tiers.levels.runs)
    often = np.arange(100, KEYS, KEYS // 20)
    for _ in range(20):
        store.merge(pa.table({"k": often, "n": np.ones(len(often), np.int64)}), n="sum")
    store.merge(pa.table({"k": [KEYS], "n": [1]}), n="max")
    assert damage(store, often, 20) is None
    store.close()


def test_loaded_groups_stay_within_the_budget(tmp_path: Path) -> None:
    """A store that was written without a budget is opened with a small one: gets request all groups repeatedly."""
    plenty, keys, files = Budget(None, 1 << 16, 1 << 12), np.arange(40_000), LocalFileSystem(tmp_path)
    with LogStore.open_on(files, key={"k": pa.int64()}, value={"n": pa.int64()}, budget=plenty) as store:
        store.merge(pa.table({"k": keys, "n": keys}), n="sum")
    store = LogStore.open_on(LocalFileSystem(tmp_path), key=None, value=None, budget=LITTLE)
    for start in range(0, 10_000, 2_500):
        assert damage(store, keys[start : start + 2_500], 0) is None
        assert store._tiers.memtable.in_use < 1.5 * LITTLE.memtable_bytes
    store.close()


def test_a_compaction_that_ends_while_the_next_one_is_scheduled(tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one must not see the runs that the last one replaced: it would drop as many newer ones."""
    store = LogStore.open_on(LocalFileSystem(tmp_path), key={"k": pa.int64()}, value={"n": pa.int64()},
                                budget=Budget(None, 1 << 16, 1 << 12))  # fmt: skip
    ours, may_continue, merged = store._tiers, threading.Event(), RunLevels.compact

    def held(*args: object, **kwargs: object) -> object:
        run = merged(*args, **kwargs)  # type: ignore[arg-type]
        may_continue.wait(10)
        return run

    def ended() -> None:
        may_continue.set()
        while ours.compactor._running:
            time.sleep(0.001)
        may_continue.clear()

    def all_of(sizes: list[int]) -> int:
        ended()
        return 0

    def evict(key: int, first: Callable[[list[int]], int]) -> None:
        monkeypatch.setattr(compaction, "first_to_compact", first)
        store.merge(pa.table({"k": [key], "n": [key]}), n="sum")
        ours._evict(0, 0.0)
        ours.finish_evictions()
        time.sleep(0.1)  # a compaction that was started has read its runs by now

    monkeypatch.setattr(RunLevels, "compact", held)
    keys = np.arange(2_000)
    hashes = store._kernels.lookup(ours.memtable, pa.record_batch({"k": keys}))[1]
    keys = keys[hashes >> np.uint64(60) == 0][:6]
    for key, first in zip(keys.tolist(), [len, len, len, lambda sizes: 1, all_of, len], strict=True):
        evict(key, first)
    ended()
    assert damage(store, keys, 0) is None
    assert ours.compactor.error is None
    store.close()


def test_another_thread_takes_the_last_merge_buffers(tmp_path: Path) -> None:
    class Contended(list[object]):
        def __bool__(self) -> bool:
            return True  # and another thread takes it first

    store = filled(tmp_path, LITTLE)
    store._tiers.compactor.wait()
    store._tiers.levels._merge_buffers = Contended()
    assert len(store) == KEYS
    store.close()


def test_seek_hashes_finds_all_records_of_a_hash() -> None:
    kernels = StoreKernels(pa.schema({"a": pa.int64(), "b": pa.float32()}), pa.schema({"n": pa.int64()}),
                           Options.make(workers=1))  # fmt: skip
    table = MemTable(kernels, Arena(1 << 16, 1 << 26))
    rows = {"a": pa.array([k if k % 7 else None for k in range(500)]), "b": pa.array(np.arange(500) % 3, pa.float32())}
    kernels.upsert(table, pa.record_batch({**rows, "n": np.arange(500)}), ("sum",), 1)
    pointers = np.concatenate([table.pointers(group) for group in range(256)])
    pointers = pointers[np.argsort(kernels.hash_keys(pointers))]
    repeats = Random(1).choices([1, 1, 1, 2, 3], k=len(pointers))
    records = np.repeat(kernels.gather(np.ascontiguousarray(pointers)), repeats, axis=0)
    hashes = kernels.hash_keys(pointers_to(records))
    starts = np.array([0, 0, 10, 200, len(records), 40])
    counts = np.array([len(records), 1, 0, 90, 0, 41])
    asked = np.concatenate((hashes, hashes + np.uint64(1), [np.uint64(0), np.uint64((1 << 64) - 1)])).astype(np.uint64)
    base, size = int(pointers_to(records)[0]), records.shape[1]
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        first = np.full(len(asked), base + start * size, np.uint64)
        found, many = kernels.seek_hashes(first, np.full(len(asked), count), asked)
        part = hashes[start : start + count]
        assert many.tolist() == [int((part == h).sum()) for h in asked]
        positions = part.searchsorted(asked) + start
        assert found.tolist() == (base + positions * size).tolist()


def test_frequent_reads_trigger_compaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "first_to_compact", len)  # nothing else merges them
    store = filled(tmp_path, TINY)
    store.merge(pa.table({"k": np.arange(KEYS), "n": np.ones(KEYS, np.int64)}), n="sum")
    store._tiers.finish_evictions()
    assert any(len(runs) > 1 for runs in store._tiers.levels.runs)
    random = np.random.default_rng(0)
    for _ in range(200):
        keys = random.integers(0, KEYS, 500)
        assert store.get(pa.array(keys))["n"].to_pylist() == (keys + 1).tolist()
        store._tiers.compactor.wait()
        if all(len(runs) == 1 for runs in store._tiers.levels.runs):
            break
    else:
        pytest.fail("runs of a shard stayed apart")
    store.close()
    with LogStore.open(tmp_path, readonly=True) as again:
        files = sorted(tmp_path.iterdir())
        for _ in range(10):
            again.get(pa.array(random.integers(0, KEYS, 500)))
        assert sorted(tmp_path.iterdir()) == files  # a read-only store writes nothing


def test_a_get_works_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path, LITTLE)
    store._tiers.finish_evictions()
    store._tiers.compactor.wait()

    def full(*_: object) -> None:
        raise StoreFailed("no space left")

    monkeypatch.setattr(RunWriter, "add", full)
    monkeypatch.setattr(RunLevels, "full_index_bytes", LITTLE.memtable_bytes)  # so records would have to be evicted
    for keys in np.split(np.random.default_rng(0).permutation(KEYS), 5):
        assert damage(store, keys, 0) is None
    with pytest.raises(StoreFailed, match="no space left"):
        store.compact()
    monkeypatch.undo()
    assert damage(store, np.arange(KEYS), 0) is None
    store.close()


def test_workspaces_are_freed_after_an_eviction(tmp_path: Path) -> None:
    store = filled(tmp_path, Budget(None, 1 << 16, 1 << 12))
    for shard in range(SHARDS):
        store._tiers._evict(shard, 0.0)
    store._tiers.finish_evictions()
    assert store._tiers.evictor.workspaces
    store.merge(pa.table({"k": np.arange(KEYS), "n": np.arange(KEYS)}), n="max")  # evicts partials of other functions
    assert store._tiers.evictor.workspaces == []
    assert damage(store, np.arange(KEYS), 0) is None
    store.close()


def test_a_get_does_not_wait_for_replaced_files_to_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path, TINY)
    store.merge(pa.table({"k": np.arange(KEYS), "n": np.ones(KEYS, np.int64)}), n="sum")
    store._tiers.finish_evictions()
    store._tiers.compactor.wait()
    store._tiers.finish_evictions()
    close, may_close, replaced = RunFile.close, threading.Event(), list[int]()

    def slow(self: RunFile) -> None:
        replaced.append(self.id)
        assert may_close.wait(30)
        close(self)

    monkeypatch.setattr(RunFile, "close", slow)
    for shard in range(SHARDS):
        store._tiers.compactor.schedule(shard, all_runs=True)
    store._tiers.compactor.wait()
    assert store.get(pa.array([7]))["n"].to_pylist() == [8]
    assert not may_close.is_set()
    may_close.set()
    store.close()
    assert len(replaced) > SHARDS


def test_a_get_reports_a_damaged_directory_among_many(tmp_path: Path) -> None:
    """The directories of many runs are read concurrently."""
    filled(tmp_path, LITTLE).close()
    damaged = sorted(tmp_path.glob("run-*"))[3]
    content = bytearray(damaged.read_bytes())
    content[-format.BLOCK] ^= 1
    damaged.write_bytes(content)
    with LogStore.open(tmp_path, readonly=True) as store:
        assert sum(map(len, store._tiers.levels.runs)) > tiers.MAX_EVICTIONS
        with pytest.raises(Damaged, match=damaged.name):
            store.get(pa.array(np.arange(KEYS)))
