"""A process that has one state store and nothing else, so that its memory can be measured from outside.

Its argument is a job, as JSON. It says "ready" when all that it needs beside the store is in memory, and waits for a
line; a job of several turns says "turn" before each, and waits again. It names each phase as it begins, and ends with
its figures as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bench.data import Updates
from bench.race import time_s
from bench.stores import BATCH, FUNCTIONS, KEY, VALUE, Ours, Rocks, Store, assert_merges
from scalein.state import LogStore

CALL_ROWS, GET_KEYS, POOL_ROWS = 1 << 16, 10_000, 1 << 24
STEP = 1 << 20


def spill(job: dict[str, Any]) -> dict[str, float]:
    """Rates of phases, in rows a second, on a store that all keys have been brought to; a phase of `phases` is a turn
    of so many seconds, and may come again."""
    keys, memory, is_ours = int(job["keys"]), job["memory"], job["store"] == "ours"
    pool = min(POOL_ROWS, max(keys, GET_KEYS))
    updates = {kind: Updates(keys, kind, pool) for kind in ("uniform", "zipf")}
    with tempfile.TemporaryDirectory() as folder:  # kernels and modules are loaded before memory is measured
        for small_memory in (None, 1 << 20):  # the second one spills and compacts
            small, few = Ours(Path(folder) / str(small_memory), memory=small_memory), Updates(100_000, "uniform", 1_000)
            for _ in range(8):
                small.fill(few)
            assert_merges(small, few, 1_000)
            small.close()
    say("ready")
    sys.stdin.readline()
    store: Store
    if is_ours:
        store = Ours(Path(job["folder"]), memory=memory)
    else:
        store = Rocks(Path(job["folder"]), cache=memory // 4, write_buffer=max(memory // 8, 1 << 16))
    say("fill")
    rates = {"fill": keys / time_s(lambda: store.fill(updates["uniform"]))}
    assert_merges(store, updates["uniform"], min(BATCH, pool))
    call_rows = min(CALL_ROWS if is_ours else BATCH, pool)

    def merge(kind: str) -> int:
        store.merge(updates[kind].take(call_rows))
        return call_rows

    def get() -> int:
        rows = updates["uniform"].take(GET_KEYS)["k"].to_numpy()
        assert (store.get(rows)["n"] > 0).all()
        return GET_KEYS

    calls: dict[str, Callable[[], int]] = {
        "zipf": lambda: merge("zipf"), "uniform": lambda: merge("uniform"), "get": get}  # fmt: skip
    done: dict[str, tuple[int, float]] = {}
    for phase, seconds in job["phases"]:
        wait_for_turn()
        say(phase)
        rows, start = 0, time.perf_counter()
        while (taken_s := time.perf_counter() - start) < seconds:
            rows += calls[phase]()
        before, before_s = done.get(phase, (0, 0.0))
        done[phase] = before + rows, before_s + taken_s
    rates |= {phase: rows / taken_s for phase, (rows, taken_s) in done.items()}
    assert_merges(store, updates["uniform"], min(BATCH, pool))
    if isinstance(store, Ours):
        stats = store.store.stats()
        rates |= {name: float(str(stats[name])) for name in ("disk_bytes", "resident_bytes", "record_bytes", "runs")}
    say("close")
    store.close()
    return rates


def build(job: dict[str, Any]) -> dict[str, float]:
    """Make a store with all keys, and save it. Key k has the value k % STEP."""
    say("ready")
    sys.stdin.readline()
    with LogStore.open(job["folder"], key=KEY, value=VALUE, memory=job.get("memory")) as store:
        for start in range(0, int(job["keys"]), STEP):
            keys = np.arange(start, min(start + STEP, int(job["keys"])))
            values = (keys % STEP).astype(np.float64)
            store.merge(pa.table({"k": keys, "s": values, "m": values}), **FUNCTIONS)
    return {}


def reopen(job: dict[str, Any]) -> dict[str, float]:
    """Seconds from opening a store to the first values, with the engine's modules imported before."""
    imports_s = time_s(lambda: [import_module(f"scalein.{name}") for name in ("compiler", "kernels.store")])
    keys = np.random.default_rng().integers(0, int(job["keys"]), int(job["asked"]))
    asked = pa.array(keys)
    say("ready")
    sys.stdin.readline()
    start = time.perf_counter()
    store = LogStore.open(job["folder"], memory=job.get("memory"))
    opened = time.perf_counter()
    found = store.get(asked)
    done = time.perf_counter()
    np.testing.assert_array_equal(found["s"].to_numpy(), (keys % STEP).astype(np.float64))
    store.close()
    return {"imports": imports_s, "open": opened - start, "get": done - opened, "first_get": done - start}


def say(text: str) -> None:
    print(text, flush=True)


def wait_for_turn() -> None:
    say("turn")
    sys.stdin.readline()


if __name__ == "__main__":
    asked_for = json.loads(sys.argv[1])
    say(json.dumps({"spill": spill, "build": build, "reopen": reopen}[asked_for["task"]](asked_for)))
