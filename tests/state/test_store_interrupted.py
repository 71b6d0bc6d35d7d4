"""Errors and interrupts while records move: no record is lost silently, and none is duplicated."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from scalein.errors import BadArgument, Damaged, ScaleinError, StoreFailed
from scalein.state import LogStore, piece_lookups
from scalein.state.arena import Arena, BucketAllocator
from scalein.state.budget import Budget
from scalein.state.evict import MAX_EVICTIONS, Evictor
from scalein.state.run_file import RunFile
from scalein.state.run_levels import RunLevels
from scalein.storage.local import LocalFileSystem

TINY = Budget(100_000, 1 << 14, 1 << 12)  # everything is evicted at once
TYPES = {"plain": pa.int64(), "text": pa.string()}


def opened(path: Path, kind: str = "plain", budget: Budget = TINY) -> LogStore:
    return LogStore.open_on(LocalFileSystem(path), key={"k": TYPES[kind]}, value={"n": pa.int64()}, budget=budget)


def rows(kind: str, first: int, count: int) -> pa.Table:
    keys = pa.array(np.arange(first, first + count)).cast(TYPES[kind])
    return pa.table({"k": keys, "n": np.ones(count, np.int64)})


def failing(*_: object, **__: object) -> Any:
    raise RuntimeError("can't start new thread")


def no_thread(store: LogStore, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store._tiers.evictor.threads, "submit", failing)


def no_leaving(store: LogStore, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Evictor, "_register", failing)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("fault", [no_thread, no_leaving])
def test_a_store_that_lost_records_refuses_calls(kind: str, fault: Callable[[LogStore, pytest.MonkeyPatch], None],
                                                 tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses all calls, and the last snapshot is unchanged."""
    store = opened(tmp_path, kind)
    store.merge(rows(kind, 0, 3_000), n="sum")
    store.snapshot().wait()
    with monkeypatch.context() as patch:
        fault(store, patch)
        with pytest.raises(RuntimeError, match="can't start"):
            store.merge(rows(kind, 3_000, 60_000), n="sum")
    with pytest.raises(StoreFailed, match="was interrupted"):
        store.get(rows(kind, 0, 1).select(["k"]))
    store.close()
    with opened(tmp_path, kind) as again:
        assert len(again) == 3_000
        assert set(again.get(rows(kind, 0, 3_000).select(["k"]))["n"].to_pylist()) == {1}


def test_merge_and_get_does_not_fail_after_its_rows_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The records of a failed eviction are back in memory, and the next merge reports the error. The rows of the call
    are one slice here: of several slices, some would be merged."""
    with opened(tmp_path) as store:
        failures, merged = 0, 0
        with monkeypatch.context() as patch:
            patch.setattr(RunLevels, "writer", full)
            for first in range(0, 30_000, 200):
                try:
                    found = store.merge_and_get(rows("plain", first, 200), n="sum")
                except StoreFailed:
                    failures += 1
                else:
                    merged += 200
                    assert found["n"].to_pylist() == [1] * 200
        assert failures
        assert len(store) == merged


def full(*_: object) -> Any:
    raise StoreFailed("the disk is full")


@pytest.mark.parametrize("kind", TYPES)
def test_merge_and_get_of_a_reopened_store_does_not_fail_after_its_rows_are_merged(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups that do not fit into memory are looked up on disk."""
    with opened(tmp_path, kind, Budget(None)) as store:
        store.merge(rows(kind, 0, 6_000), n="sum")
    monkeypatch.setattr(piece_lookups, "BYTES_PER_READ", 1 << 20)  # loading is always cheaper
    with opened(tmp_path, kind, Budget(400_000, 1 << 14, 1 << 12)) as store:
        expected = np.ones(6_000, np.int64)
        done = 0
        with monkeypatch.context() as patch:
            patch.setattr(RunLevels, "writer", full)
            for first in range(0, 6_000, 100):
                with suppress(StoreFailed):
                    found = store.merge_and_get(rows(kind, first, 100), n="sum")
                    expected[first : first + 100] += 1
                    assert found["n"].to_pylist() == [2] * 100
                    done += 1
        assert done
        assert store.get(rows(kind, 0, 6_000).select(["k"]))["n"].to_pylist() == expected.tolist()
        assert len(store) == 6_000


def test_an_error_that_merge_and_get_hides_is_raised_by_the_next_merge(tmp_path: Path,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it changes anything, and once. Reads and snapshots do not raise it."""
    store = opened(tmp_path)
    keys = rows("plain", 0, 100).select(["k"])
    writes = (lambda: store.merge(rows("plain", 0, 100), n="sum"), lambda: store.upsert(rows("plain", 0, 100)),
              lambda: store.delete(keys), store.close)  # fmt: skip
    for number, write in enumerate(writes):
        before = store.get(keys)  # all records are evicted now
        with monkeypatch.context() as patch:
            patch.setattr(RunLevels, "writer", full)
            store.merge_and_get(rows("plain", 1000 * (1 + number), 200), n="sum")
        store.snapshot().wait()
        if write != store.close:
            with pytest.raises(StoreFailed, match="the disk is full"):
                write()
            assert store.get(keys) == before
        write()
    with opened(tmp_path) as again:
        assert len(again) == 4 * 200


def test_a_get_does_not_fail_because_of_failed_evictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a budget, other merge functions evict records: several may be in flight when the disk is full."""
    with LogStore.open(tmp_path, key={"k": pa.int64()}, value={"n": pa.int64()}) as store:
        store.merge(rows("plain", 0, 5_000), n="sum")
    with LogStore.open(tmp_path) as store:
        before = store.get(rows("plain", 0, 100).select(["k"]))

        writing = threading.Barrier(MAX_EVICTIONS, timeout=60)  # all fail together

        def slowly_full(*_: object) -> None:
            with suppress(threading.BrokenBarrierError):  # the evictions after them
                writing.wait()
                writing.abort()
            full()

        with monkeypatch.context() as patch:
            patch.setattr(RunLevels, "writer", slowly_full)
            with pytest.raises(StoreFailed, match="the disk is full"):
                store.merge(rows("plain", 0, 100), n="max")
            assert len(store._tiers.evictor.evictions) > 1
            assert store.get(rows("plain", 0, 100).select(["k"])) == before
        assert len(store) == 5_000


def test_a_failed_get_waits_for_its_reading_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The filters of many runs are read concurrently: if one fails, the call still waits for the others."""
    with opened(tmp_path) as store:
        for first in range(0, 12_000, 1_200):
            store.merge(rows("plain", first, 1_200), n="sum")
    begun, ended = list[int](), list[int]()

    def load(self: RunFile) -> None:
        begun.append(self.id)
        if begun[0] == self.id:
            raise Damaged("not what was written", file=self.name)
        time.sleep(0.05)
        ended.append(self.id)

    with opened(tmp_path) as store:
        assert sum(map(len, store._tiers.levels.runs)) > 3
        with monkeypatch.context() as patch:
            patch.setattr(RunFile, "load", load)
            with pytest.raises(Damaged):
                store.get(rows("plain", 0, 1_200).select(["k"]))
        assert len(ended) == len(begun) - 1
        assert len(begun) > 3


def test_loading_a_run_reads_its_directory_and_filter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as store:
        monkeypatch.setattr(store._tiers.compactor, "schedule", lambda *_, **__: None)  # it would remove runs meanwhile
        for first in range(0, 12_000, 1_200):
            store.merge(rows("plain", first, 1_200), n="sum")
        store._tiers.finish_evictions()
        found = [store._tiers.levels.open_file(run.id) for runs in store._tiers.levels.runs for run in runs]
        assert found
        for run in found:
            assert not run.is_loaded
            _ = run._directory
            assert not run.is_loaded  # the filter is not loaded yet
            run.load()
            assert run.is_loaded
            run.close()


def test_an_invalid_merge_function_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as store, pytest.raises(BadArgument, match="n"):
        store.merge(rows("plain", 0, 1), n=["sum"])  # type: ignore[arg-type]


# --- a table that cannot grow


def no_chunk(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Arena, "allocate", refusing)


def no_index(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BucketAllocator, "allocate", refusing)


def refusing(*_: object) -> Any:
    raise ScaleinError("the store has no more addresses")


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("call", "fault"), [("merge", no_chunk), ("merge", no_index), ("delete", no_chunk),
                                             ("delete", no_index), ("load", no_chunk)])  # fmt: skip
def test_no_snapshot_is_taken_after_half_a_change(call: str, fault: Callable[[pytest.MonkeyPatch], None], kind: str,
                                                  tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that does not get memory has changed some keys: the store refuses calls; the last snapshot remains."""
    with opened(tmp_path, kind, Budget(None)) as store:
        store.merge(rows(kind, 0, 3_000), n="sum")
    store = opened(tmp_path, kind, Budget(None))
    table = rows(kind, 0, 30_000)
    calls = {"merge": lambda: store.merge(table, n="sum"), "delete": lambda: store.delete(table.select(["k"])),
             "load": lambda: len(store)}  # fmt: skip
    with monkeypatch.context() as patch:
        fault(patch)
        with pytest.raises(ScaleinError, match="no more addresses"):
            calls[call]()
    with pytest.raises(StoreFailed, match="was interrupted"):
        store.merge(rows(kind, 0, 30_000), n="sum")
    store.close()
    with opened(tmp_path, kind) as again:
        assert len(again) == 3_000
        assert set(again.get(rows(kind, 0, 3_000).select(["k"]))["n"].to_pylist()) == {1}


def test_a_group_whose_index_cannot_be_allocated_is_loaded_later(tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, budget=Budget(None)) as store:
        store.merge(rows("plain", 0, 30_000), n="sum")
    with opened(tmp_path, budget=Budget(None)) as store:
        with monkeypatch.context() as patch:
            no_index(patch)
            with pytest.raises(ScaleinError, match="no more addresses"):
                len(store)
        store.merge(rows("plain", 0, 60_000), n="sum")
        assert len(store) == 60_000
        assert store.get(rows("plain", 29_999, 2).select(["k"]))["n"].to_pylist() == [2, 1]


def test_memory_of_evictions_in_flight_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_continue, write = threading.Event(), Evictor._write_run

    def held(self: Evictor, *args: Any) -> Any:
        may_continue.wait(60)
        return write(self, *args)

    monkeypatch.setattr(Evictor, "_write_run", held)
    with opened(tmp_path, budget=Budget(None)) as store:
        store.merge(rows("plain", 0, 30_000), n="sum")
        for shard in range(3):
            store._tiers._evict(shard, 0.0)
        evictions = store._tiers.evictor.evictions
        assert len(evictions) == 3
        workspaces = sum(one.workspace.size_bytes for one in evictions if one.workspace is not None)
        assert workspaces > 3 * 30_000 // 16 * 16
        tiers = store._tiers
        assert tiers.memory_bytes == tiers.memtable.memory_bytes + tiers._reader.memory_bytes + workspaces
        may_continue.set()


def test_the_write_buffer_follows_the_budget(tmp_path: Path) -> None:
    for total, most in ((None, 1 << 19), (1 << 30, 1 << 19), (8 << 20, 1 << 17), (1 << 20, 1 << 16)):
        with opened(tmp_path, budget=Budget.of(total)) as store:
            writer = store._tiers.levels.writer(1, ("sum",), 0, 0, has_filter=False)
            assert most - 4096 < writer.records_per_write * store._kernels.record_bytes + 4096 <= most + 4096
            writer.abandon()
