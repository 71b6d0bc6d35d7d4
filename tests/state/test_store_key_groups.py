"""Stores with some of the key groups, and stores that start from others."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from scalein import ScaleinError
from scalein.state import LogStore, format, recovery
from scalein.state.budget import Budget
from scalein.state.run_file import RunFile
from scalein.storage.local import LocalFileSystem

KEY, VALUE = {"k": pa.string()}, {"n": pa.int64(), "t": pa.string()}
LOW, HIGH = range(128), range(128, 256)
ROWS = 8_000


def rows(step: int) -> pa.Table:
    names = [f"the key with number {k}" if k % 2 else str(k) for k in range(step * 100, step * 100 + ROWS)]
    return pa.table({"k": names, "n": np.ones(ROWS, np.int64), "t": [f"{name} of step {step}" for name in names]})


def fill(path: Path, steps: range, memory: str | None = None) -> dict[str, tuple[int, str]]:
    wanted: dict[str, tuple[int, str]] = {}
    with LogStore.open(path, key=KEY, value=VALUE, memory=memory) as store:
        for step in steps:
            table = rows(step)
            store.merge(table, n="sum", t="last")
            for name, text in zip(table["k"].to_pylist(), table["t"].to_pylist(), strict=True):
                wanted[name] = wanted.get(name, (0, ""))[0] + 1, text
    return wanted


def content(store: LogStore) -> dict[str, tuple[int, str]]:
    found = store.scan().read_all().to_pydict()
    return {k: (n, t) for k, n, t in zip(found["k"], found["n"], found["t"], strict=True)}


@pytest.mark.parametrize("memory", [None, "1MB"])
def test_a_store_is_split_between_two_new_ones(tmp_path: Path, memory: str | None) -> None:
    wanted = fill(tmp_path / "old", range(3), memory)
    shares = []
    for name, groups in (("low", LOW), ("high", HIGH)):
        with LogStore.open(tmp_path / name, old=[tmp_path / "old"], key_groups=groups, memory=memory) as store:
            assert store.stats()["groups_not_loaded"] <= 128  # type: ignore[operator]
            shares.append(content(store))
    assert not shares[0].keys() & shares[1].keys()
    assert shares[0] | shares[1] == wanted
    assert min(map(len, shares)) > len(wanted) // 3


@pytest.mark.parametrize("memory", [None, "1MB"])
def test_two_stores_are_imported_into_one(tmp_path: Path, memory: str | None) -> None:
    wanted = fill(tmp_path / "old", range(4), memory)
    for name, groups in (("low", LOW), ("high", HIGH)):
        LogStore.open(tmp_path / name, old=[tmp_path / "old"], key_groups=groups, memory=memory).close()
    with LogStore.open(tmp_path / "new", old=[tmp_path / "low", tmp_path / "high"], memory=memory) as store:
        for folder in ("old", "low", "high"):
            for file in (tmp_path / folder).iterdir():
                file.unlink()
        more = rows(2)
        store.merge(more, n="sum", t="last")  # before any old record is read
        for name, text in zip(more["k"].to_pylist(), more["t"].to_pylist(), strict=True):
            wanted[name] = wanted.get(name, (0, ""))[0] + 1, text
        store.snapshot().wait()
        assert content(store) == wanted
    with LogStore.open(tmp_path / "new") as again:
        again.verify()
        again.compact()
        assert content(again) == wanted


def test_a_store_can_be_opened_with_fewer_key_groups(tmp_path: Path) -> None:
    wanted = fill(tmp_path / "s", range(3), "1MB")
    with LogStore.open(tmp_path / "s", key_groups=LOW) as store:
        mine = content(store)
        assert 0 < len(mine) < len(wanted)
        assert mine.items() <= wanted.items()
        store.merge(pa.table({"k": [next(iter(mine))], "n": [1], "t": ["x"]}), n="sum", t="last")
    with LogStore.open(tmp_path / "s") as again:
        assert len(again) == len(mine)
        other = next(iter(wanted.keys() - mine.keys()))
        for call in (again.get, again.delete):
            with pytest.raises(ScaleinError, match="key groups that this store does not have"):
                call(pa.array([other]))
        with pytest.raises(ScaleinError, match="key groups that this store does not have"):
            again.merge(pa.table({"k": [next(iter(mine)), other], "n": [1, 1], "t": ["", ""]}), n="sum", t="last")
        assert again.get(pa.array([next(iter(mine))]))["n"].to_pylist() == [mine[next(iter(mine))][0] + 1]
    with pytest.raises(ScaleinError, match="does not have all of these key groups"):
        LogStore.open(tmp_path / "s", key_groups=HIGH)


def test_invalid_imports_are_refused(tmp_path: Path) -> None:
    fill(tmp_path / "a", range(1))
    fill(tmp_path / "b", range(1))
    with pytest.raises(ScaleinError, match="two of the old stores have the same key groups"):
        LogStore.open(tmp_path / "new", old=[tmp_path / "a", tmp_path / "b"])
    with pytest.raises(ScaleinError, match="only a new store"):
        LogStore.open(tmp_path / "a", old=[tmp_path / "b"])
    with pytest.raises(ScaleinError, match="other columns"):
        LogStore.open(tmp_path / "c", old=[tmp_path / "b"], key={"k": pa.int64()}, value=VALUE)
    for groups in ([], [256], [-1], [True], ["a"]):
        with pytest.raises(ScaleinError, match="key_groups must be numbers"):
            LogStore.open(tmp_path / "d", key=KEY, value=VALUE, key_groups=groups)  # type: ignore[arg-type]


def test_an_import_with_little_memory(tmp_path: Path) -> None:
    wanted = fill(tmp_path / "old", range(3))
    budget, old = Budget(300_000, 1 << 14, 1 << 12), LocalFileSystem(tmp_path / "old", readonly=True)
    with LogStore.open_on(LocalFileSystem(tmp_path / "new"), key=None, value=None, budget=budget, old=[old]) as store:
        assert content(store) == wanted
        assert len(store) == len(wanted)


def test_stores_that_share_runs_are_combined(tmp_path: Path) -> None:
    """The groups are split within a shard, so that both stores have its runs; one of them compacts or adds to them."""
    wanted = fill(tmp_path / "old", range(4), "1MB")
    for name, groups in (("low", range(100)), ("high", range(100, 256))):
        LogStore.open(tmp_path / name, old=[tmp_path / "old"], key_groups=groups).close()
    with LogStore.open(tmp_path / "high", memory="1MB") as high:
        theirs = content(high)
        mine = rows(1).filter(pa.array([name in theirs for name in rows(1)["k"].to_pylist()]))
        high.merge(mine, n="sum", t="last")
        for name, text in zip(mine["k"].to_pylist(), mine["t"].to_pylist(), strict=True):
            wanted[name] = wanted[name][0] + 1, text
    with LogStore.open(tmp_path / "new", old=[tmp_path / "high", tmp_path / "low"]) as store:
        assert content(store) == wanted
    with LogStore.open(tmp_path / "new") as store:  # by its manifest
        assert content(store) == wanted
        store.compact()
        assert content(store) == wanted


def test_a_failed_open_leaves_no_file_open(tmp_path: Path) -> None:
    fill(tmp_path / "old", range(2), "1MB")
    (broken,) = sorted((tmp_path / "old").glob("index-*"))[-1:]
    broken.write_bytes(b"\0" * broken.stat().st_size)
    files, threads = set(os.listdir("/proc/self/fd")), set(threading.enumerate())
    with pytest.raises(ScaleinError, match="index"):
        LogStore.open(tmp_path / "old")
    with pytest.raises(ScaleinError, match="index"):
        LogStore.open(tmp_path / "old", readonly=True)
    assert set(os.listdir("/proc/self/fd")) <= files
    assert set(threading.enumerate()) <= threads


# --- files that stay open


def open_file_names(path: Path) -> set[str]:
    """Files below a directory that this process has open."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return {name for name in found if name.startswith(f"{path}/")}


def test_a_part_of_the_key_groups_opens_its_own_runs_only(tmp_path: Path) -> None:
    fill(tmp_path / "s", range(3), "1MB")
    for readonly in (True, False):
        with LogStore.open(tmp_path / "s", key_groups=range(16), readonly=readonly) as store:
            mine = {format.run_name(run.id) for some in store._tiers.levels.runs for run in some}
            assert mine
            assert {os.path.basename(name) for name in open_file_names(tmp_path) if name.endswith(".run")} <= mine
        assert not open_file_names(tmp_path)


def test_a_failed_import_leaves_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, groups, function in (("a", LOW, "sum"), ("b", HIGH, "max")):
        with LogStore.open(tmp_path / name, key=KEY, value=VALUE, memory="1MB", key_groups=groups) as store:
            for step in range(6):
                table = rows(step)
                keys = table.select(["k"]).combine_chunks().to_batches()[0]
                owners = store._kernels.lookup(store._tiers.memtable, keys)[1]
                store.merge(table.filter(pa.array(np.isin(owners >> np.uint64(56), groups))), n=function, t="last")
            assert any(store._tiers.levels.runs)
    with pytest.raises(ScaleinError, match="different functions"):
        LogStore.open(tmp_path / "new", old=[tmp_path / "a", tmp_path / "b"])
    assert not open_file_names(tmp_path)
    with pytest.raises(ScaleinError, match="does not have all of these key groups"):
        LogStore.open(tmp_path / "a", key_groups=HIGH)
    assert not open_file_names(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(recovery, "manifest_files", lambda _: {}["nothing"])
        with pytest.raises(ScaleinError, match="incomplete or invalid"):
            LogStore.open(tmp_path / "a")
    assert not open_file_names(tmp_path)
    with monkeypatch.context() as patch:
        read_header = RunFile._read_header

        def without_functions(self: RunFile, stride: int) -> None:
            read_header(self, stride)
            self.spec = "{"

        patch.setattr(RunFile, "_read_header", without_functions)
        with pytest.raises(ScaleinError, match="incomplete or invalid"):
            LogStore.open(tmp_path / "a", readonly=True)
    assert not open_file_names(tmp_path)
