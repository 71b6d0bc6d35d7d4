"""Snapshots beside merges: what they take from the rate, how long a call waits, and what they write.

A store with one worker; the thread that copies and writes may have the second core. Rates with and without snapshots
come from phases that alternate. A call's time is also given without what its thread waited for a core while others had
it, here or on the machine below a virtual one: where it is not quiet, that is most of the longest ones. What a machine
does to calls is told by those of the C yardstick, which has no snapshots: its longest ones are from phases in between.
"""

from __future__ import annotations

import ctypes
import resource
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.data import Updates
from bench.race import time_s
from bench.stores import Ours, assert_merges
from bench.yardsticks import StateTable
from scalein.state.format import image_name
from scalein.state.snapshot import Snapshot

CALL_ROWS = 1 << 16
POOL_ROWS = 1 << 25
PHASES = 6  # of each kind
INTERVAL_S = 1.0
LONG_S = 0.005  # no call should take longer

pytestmark = pytest.mark.parametrize("workers", [2])  # cores


@dataclass
class Phase:
    """What one stretch of merges saw."""

    rows: int = 0
    taken_s: float = 0.0
    calls_s: list[float] = field(default_factory=list)
    own_calls_s: list[float] = field(default_factory=list)  # less the time that the thread had no core
    pauses_s: list[float] = field(default_factory=list)
    own_pauses_s: list[float] = field(default_factory=list)
    snapshots_s: list[float] = field(default_factory=list)  # from freeze to being on disk
    image_mb: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.rows / self.taken_s

    @property
    def own_rate(self) -> float:
        return self.rows / sum(self.own_calls_s)


class Stopwatch:
    """Seconds of a call, and of those the ones that the calling thread did not wait for a core.

    What a machine below a virtual one took is told where the thread never blocked: then it is all but the CPU's time.
    """

    def __enter__(self) -> Stopwatch:
        self._first, self._waited_s, self._blocked = time.perf_counter(), waited_s(), times_blocked()
        self._cpu_s, self._start = time.thread_time(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.end, cpu_s = time.perf_counter(), time.thread_time() - self._cpu_s
        waited, has_blocked, last = waited_s() - self._waited_s, times_blocked() > self._blocked, time.perf_counter()
        self.taken_s = self.end - self._start
        self.own_s = min(self.taken_s, last - self._first - waited)  # it may have waited around the call
        if not has_blocked:
            self.own_s = min(self.own_s, cpu_s)


def waited_s() -> float:
    """How long this thread could have run and had no core."""
    with open("/proc/thread-self/schedstat", "rb") as file:
        return int(file.read().split()[1]) / 1e9


def times_blocked() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def run(store: Ours, updates: Updates, seconds: float, every_s: float | None) -> Phase:
    """Merge for some seconds, with a snapshot every so often; the last one's end is not waited for in that time."""
    phase, under_way = Phase(), list[tuple[Snapshot, float]]()
    rows = min(CALL_ROWS, len(updates.pool))
    start = now = time.perf_counter()
    due = start + every_s / 2 if every_s else float("inf")
    while now < start + seconds:
        if now >= due:
            with Stopwatch() as watch:
                taken = store.store.snapshot()
            phase.pauses_s.append(watch.taken_s)
            phase.own_pauses_s.append(watch.own_s)
            under_way.append((taken, now))
            due = max(due + (every_s or 0.0), now)
        batch = updates.take(rows)
        with Stopwatch() as watch:
            store.merge(batch)
        now = watch.end
        phase.calls_s.append(watch.taken_s)
        phase.own_calls_s.append(watch.own_s)
        phase.rows += rows
        while under_way and under_way[0][0].is_done:
            _note(phase, store, *under_way.pop(0))
    phase.taken_s = now - start
    for taken, at in under_way:
        taken.wait()
        _note(phase, store, taken, at)
    return phase


def run_c(table: StateTable, updates: Updates, seconds: float) -> list[float]:
    """Merge the same into the C table for some seconds; the times of its calls."""
    rows, calls_s = min(CALL_ROWS, len(updates.pool)), list[float]()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        batch = updates.take(rows)
        keys, values = batch["k"].to_numpy(), batch["s"].to_numpy()
        calls_s.append(time_s(partial(table.merge, keys, values)))
    return calls_s


def _note(phase: Phase, store: Ours, taken: Snapshot, at: float) -> None:
    taken.wait()  # raises if it failed
    phase.snapshots_s.append(time.perf_counter() - at)
    image = store.folder / image_name(store.store._ids.file(taken.id))
    phase.image_mb.append(image.stat().st_size / 1e6 if image.exists() else 0.0)


def joined(phases: list[Phase]) -> Phase:
    whole = Phase(sum(phase.rows for phase in phases), sum(phase.taken_s for phase in phases))
    for name in ("calls_s", "own_calls_s", "pauses_s", "own_pauses_s", "snapshots_s", "image_mb"):
        setattr(whole, name, [value for phase in phases for value in getattr(phase, name)])
    return whole


def percentiles(name: str, values_s: list[float], unit: str, factor: float, goal: float | None = None,
                ) -> dict[str, float]:
    """p50, p99 and max of times, with a goal for p99."""
    if not values_s:
        return {}
    p50, p99 = np.percentile(values_s, [50, 99])
    found = {"p50": p50, "p99": p99, "max": max(values_s)}
    facts = {f"{name}_{which}_{unit}": round(float(value) * factor, 3) for which, value in found.items()}
    return facts if goal is None else {**facts, f"{name}_p99_goal_below_{unit}": goal}


@pytest.mark.parametrize("kind", ["uniform", "zipf"])
def bench_snapshot_every_second(benchmark: Any, machine: Mapping[str, object], c: ctypes.CDLL, rows: int,
                                seconds: float, kind: str, tmp_path: Path) -> None:
    """Merges in calls of 65,536 rows on 10 M keys; goals: 0.9 of the rate without snapshots, no call above 5 ms, freeze
    below 1 ms at p99."""
    updates = Updates(rows // 2, kind, min(POOL_ROWS, 2 * rows))
    length = seconds / PHASES
    every_s = min(INTERVAL_S, length / 3)
    without, beside, calls_of_c = list[Phase](), list[Phase](), list[float]()
    table = StateTable(c, updates.keys)
    with closing(Ours(tmp_path)) as store:
        for part in updates.all_keys():
            table.merge(part["k"].to_numpy(), part["s"].to_numpy())
        store.fill(updates)
        assert_merges(store, updates, min(CALL_ROWS, rows))
        run(store, updates, length, every_s)  # memory of logs and images is new the first time

        def alternate() -> None:
            for _ in range(PHASES):
                without.append(run(store, updates, length, None))
                beside.append(run(store, updates, length, every_s))
                calls_of_c.extend(run_c(table, updates, length))

        benchmark.pedantic(alternate, rounds=1)
        disk_mb = float(str(store.store.stats()["disk_bytes"])) / 1e6
    table.free()
    ratios = [b.rate / a.rate for a, b in zip(without, beside, strict=True)]
    own_ratios = [b.own_rate / a.own_rate for a, b in zip(without, beside, strict=True)]
    alone, both = joined(without), joined(beside)
    benchmark.extra_info.update(
        machine, keys=updates.keys, every_s=every_s, snapshots=len(both.pauses_s), disk_mb=round(disk_mb),
        million_rows_per_s=round(both.rate / 1e6, 1), without_million_rows_per_s=round(alone.rate / 1e6, 1),
        ratio_to_without=round(float(np.median(ratios)), 3), goal_to_without=0.9,
        ratio_to_without_less_waiting=round(float(np.median(own_ratios)), 3),
        **percentiles("call", both.calls_s, "ms", 1e3), call_max_goal_below_ms=1e3 * LONG_S,
        **{f"long_{name}_per_s": round(sum(each > LONG_S for each in calls_s) / sum(calls_s), 3) for name, calls_s in (
            ("calls", both.calls_s), ("calls_without", alone.calls_s), ("calls_of_c", calls_of_c))},
        **percentiles("call_less_waiting", both.own_calls_s, "ms", 1e3),
        **percentiles("call_without", alone.calls_s, "ms", 1e3),
        **percentiles("call_without_less_waiting", alone.own_calls_s, "ms", 1e3),
        **percentiles("call_of_c", calls_of_c, "ms", 1e3),
        **percentiles("pause", both.pauses_s, "us", 1e6, goal=1000),
        **percentiles("pause_less_waiting", both.own_pauses_s, "us", 1e6),
        snapshot_takes_ms=round(float(np.median(both.snapshots_s)) * 1e3),
        image_mb=round(float(np.median(both.image_mb))))


@pytest.mark.parametrize("share", [0.1, 1, 5], ids=["1M", "10M", "50M"])
def bench_snapshot_pause(benchmark: Any, machine: Mapping[str, object], rows: int, seconds: float, share: float,
                         tmp_path: Path) -> None:
    """The freeze alone, all segments changed, by the number of keys; goal: the same at 1 M and 50 M, within 2x."""
    updates = Updates(int(rows // 2 * share), "uniform", min(POOL_ROWS, rows))
    parts = list[Phase]()
    with closing(Ours(tmp_path)) as store:
        store.fill(updates)
        assert_merges(store, updates, min(CALL_ROWS, rows))

        def freeze_often() -> None:
            end = time.perf_counter() + seconds
            while not parts or time.perf_counter() < end:  # each part waits for its snapshot
                parts.append(run(store, updates, 0.1, 0.1))

        benchmark.pedantic(freeze_often, rounds=1)
    whole = joined(parts)
    benchmark.extra_info.update(machine, keys=updates.keys, snapshots=len(whole.pauses_s),
                                image_mb=round(float(np.median(whole.image_mb)), 1),
                                **percentiles("pause", whole.pauses_s, "us", 1e6, goal=1000),
                                **percentiles("pause_less_waiting", whole.own_pauses_s, "us", 1e6))


def bench_snapshot_bytes(benchmark: Any, machine: Mapping[str, object], rows: int, tmp_path: Path) -> None:
    """What a snapshot writes after merges into the newest 1 %, 10 % and all of the keys, and how many segments those
    are: keys that came together lie together."""
    updates = Updates(rows // 2, "uniform", 1)
    in_order = np.arange(updates.keys)
    facts: dict[str, float] = {}
    with closing(Ours(tmp_path)) as store:
        for start in range(0, updates.keys, 1 << 20):
            store.merge(updates.table(in_order[start : start + (1 << 20)]))
        store.store.snapshot().wait()

        def touch_and_save() -> None:
            for percent in (0, 1, 10, 100):
                touched = in_order[len(in_order) - len(in_order) * percent // 100 :]
                if len(touched):
                    store.merge(updates.table(updates.rng.permutation(touched)))
                segments = np.count_nonzero(store.store._tiers.memtable.arena.dirty)  # no public figure says it
                image = store.folder / image_name(store.store._ids.file(store.store.snapshot().wait().id))
                written = image.stat().st_size if image.exists() else 0
                facts[f"{percent}_percent_segments"] = int(segments)
                facts[f"{percent}_percent_in_{segments}_segments_mb"] = round(written / 1e6, 2)

        benchmark.pedantic(touch_and_save, rounds=1)
    benchmark.extra_info.update(machine, keys=updates.keys, **facts)
