"""State in memory: merges into keys that are there, and into a store that is new, against C, RocksDB and LMDB.

Keys are drawn afresh for each round, before it is timed: a replay of the same rows would meet a warmed-up cache.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from bench.data import Updates
from bench.race import Race, assert_same, time_s
from bench.stores import BATCH, Lmdb, Ours, Rocks, Store, assert_merges
from bench.yardsticks import StateTable

CALL_ROWS = 1 << 20
ROW_BYTES = 16
BOUND = "cache misses: the index, the record"


class Feed:
    """The rows of a round, the same for all sides: fresh keys each time."""

    def __init__(self, updates: Updates, rows: int) -> None:
        self._updates, self._rows = updates, rows
        self.fresh()

    def fresh(self) -> None:
        gc.collect()  # stores of earlier rounds
        self.keys = self._updates.rng.integers(0, self._updates.keys, self._rows)
        self.values = np.resize(self._updates.values, self._rows)
        self.calls = pa.table({"k": self.keys, "s": self.values, "m": self.values}).to_batches(CALL_ROWS)

    def into(self, store: Ours) -> None:
        for rows in self.calls:
            store.merge(rows)


def assert_as_in(store: Ours, table: StateTable) -> None:
    wanted = table.columns()
    found = store.get(wanted["k"])
    names = ("s", "n", "m")
    assert_same(pa.table({name: found[name] for name in names}), {name: wanted[name] for name in names}, by=())


@pytest.mark.parametrize("workers", [1, 2])
def bench_merge(race: Race, c: ctypes.CDLL, rows: int, workers: int, tmp_path: Path) -> None:
    """Sum, count and max on 10 M keys that are there; the C has a table with room for all of them."""
    updates = Updates(rows // 2, "uniform", BATCH)
    table = StateTable(c, updates.keys, workers)
    with closing(Ours(tmp_path, workers=workers)) as store:
        for part in updates.all_keys():
            store.merge(part)
            table.merge(part["k"].to_numpy(), part["s"].to_numpy())
        feed = Feed(updates, rows)
        feed.into(store)
        table.merge(feed.keys, feed.values)
        assert_as_in(store, table)
        race(lambda: feed.into(store), c=lambda: table.merge(feed.keys, feed.values), before=feed.fresh, rounds=5,
             goals={"c": 0.9} if workers == 1 else None, row_count=rows, size_bytes=ROW_BYTES * rows, bound=BOUND)
        race.benchmark.extra_info["record_bytes"] = store.store.stats()["record_bytes"]
    table.free()


def bench_merge_new(race: Race, c: ctypes.CDLL, rows: int, tmp_path: Path) -> None:
    """The yardstick's own way: 20 M rows of 10 M keys into a new store, which grows; the C's table is presized, and its
    result is written to arrays."""
    updates = Updates(rows // 2, "uniform", BATCH)
    feed = Feed(updates, rows)
    folders = (tmp_path / f"store-{number}" for number in range(100))

    def by_hand() -> object:
        table = StateTable(c, updates.keys)
        table.merge(feed.keys, feed.values)
        result = table.columns()
        table.free()
        return result

    def ours() -> None:
        with closing(Ours(next(folders))) as store:
            feed.into(store)

    with closing(Ours(tmp_path / "checked")) as store:
        table = StateTable(c, updates.keys)
        feed.into(store)
        table.merge(feed.keys, feed.values)
        assert_as_in(store, table)
        table.free()
    race(ours, c=by_hand, before=feed.fresh, rounds=5, row_count=rows, size_bytes=ROW_BYTES * rows,
         bound=BOUND + ", and memory that is new")


@pytest.mark.parametrize("workers", [2])  # the cores that both stores may use
def bench_merge_two_threads(race: Race, rows: int, workers: int, tmp_path: Path) -> None:
    """A store with two workers against one with one, on the same rows."""
    updates = Updates(rows // 2, "uniform", BATCH)
    with closing(Ours(tmp_path / "one")) as one, closing(Ours(tmp_path / "two", workers=workers)) as two:
        for store in (one, two):
            store.fill(updates)
            assert_merges(store, updates, BATCH)
        feed = Feed(updates, rows)
        race(lambda: feed.into(two), one_thread=lambda: feed.into(one), before=feed.fresh, rounds=5,
             goals={"one_thread": 1.7}, row_count=rows, size_bytes=ROW_BYTES * rows, bound=BOUND)
        for name, store in (("one_thread", one), ("two_threads", two)):  # what a machine that is not quiet can tell
            feed.fresh()
            start = time.process_time()
            feed.into(store)
            race.benchmark.extra_info[f"{name}_cpu_a_million_rows_ms"] = round(
                (time.process_time() - start) / rows * 1e9, 1)


RIVALS: dict[str, tuple[str, Callable[[Path], Store], float]] = {
    "rocksdb": ("rocksdict", lambda folder: Rocks(folder, cache=512 << 20), 100),
    "lmdb": ("lmdb", Lmdb, 40),
}


@pytest.mark.parametrize("rival", RIVALS)
def bench_merge_against(race: Race, rows: int, tmp_path: Path, rival: str) -> None:
    """Write batches of 4,096 rows; the rival gets 1 % of the rows that we get: rates are compared."""
    module, make, goal = RIVALS[rival]
    pytest.importorskip(module, reason=f"{module} is not installed: nothing to compare with")
    updates = Updates(rows // 2, "uniform", BATCH)
    few = max(2 * BATCH, rows // 100)
    with closing(Ours(tmp_path / "ours")) as store, closing(make(tmp_path / rival)) as other:
        for each in (store, other):
            each.fill(updates)
            assert_merges(each, updates, BATCH)
        feed = Feed(updates, rows)
        theirs_s: list[float] = []

        def before() -> None:
            feed.fresh()
            some = pa.table({"k": feed.keys[:few], "s": feed.values[:few]})
            theirs_s.append(time_s(lambda: other.merge(some)))

        race(lambda: feed.into(store), before=before, rounds=3, row_count=rows, size_bytes=ROW_BYTES * rows,
             bound=BOUND)
    info = race.benchmark.extra_info
    if race.benchmark.stats is not None:
        ratios = [(rows / ours) / (few / theirs) for ours, theirs in
                  zip(race.benchmark.stats.stats.data, theirs_s, strict=True)]
        info.update({f"{rival}_million_rows_per_s": round(few / min(theirs_s) / 1e6, 3),
                     f"ratio_to_{rival}": round(float(np.median(ratios)), 1), f"goal_to_{rival}": goal})
