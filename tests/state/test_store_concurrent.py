"""Merges by several workers, snapshots, evictions and compactions, all concurrently."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from scalein.options import Options
from scalein.state import LogStore, Snapshot
from scalein.state.budget import Budget
from scalein.storage.local import LocalFileSystem
from tests.state.store_pair import probes

SECONDS = float(os.environ.get("SCALEIN_STORE_SECONDS", "3"))
KEYS = 1500
KEY = {"k": pa.int64()}
VALUE = {"n": pa.int64(), "same": pa.int64(), "x": pa.float64(), "step": pa.string()}


def rows(step: int, order: np.ndarray) -> pa.Table:
    ones = np.ones(KEYS, np.int64)
    steps = [f"the step number {step:6}"] * KEYS
    return pa.table({"k": order, "n": ones, "same": ones, "x": ones * 0.5, "step": steps})


def check(store: LogStore, wanted: int) -> None:
    found = store.scan().read_all()
    assert len(found) == (KEYS if wanted else 0)
    for name, value in (("n", wanted), ("same", wanted), ("x", wanted / 2), ("step", f"the step number {wanted:6}")):
        values = set(found[name].to_pylist())
        assert values <= {value}, f"{name} of the snapshot at {wanted}: {values}"


BUDGETS = {"memory": Budget(None, 1 << 16, 1 << 12), "spills": Budget(1_800_000, 1 << 15, 1 << 12)}


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS.keys())
def test_every_snapshot_is_a_point_in_time(tmp_path: Path, budget: Budget) -> None:
    options = Options.make(workers=2)
    copies, tmp_path = tmp_path, tmp_path / "store"
    with probes() as seen:
        store = LogStore.open_on(LocalFileSystem(tmp_path), key=KEY, value=VALUE, budget=budget, options=options)
        random = np.random.default_rng(1)
        step, stop = 0, threading.Event()
        errors: list[BaseException] = []
        taken: list[tuple[int, Snapshot]] = []
        lock = threading.Lock()  # a capture must know the number of calls before it

        def take_snapshots() -> None:
            try:
                while not stop.is_set():
                    with lock:
                        taken.append((step, store.snapshot()))
                    time.sleep(0.002)
                    if len(taken) % 3 == 0:
                        taken[-1][1].wait(60)
            except BaseException as error:
                errors.append(error)

        def reads() -> None:
            try:
                while not stop.is_set():
                    found = store.get(pa.array(random.integers(0, KEYS, 50)))
                    assert len(set(found["n"].to_pylist())) == 1, "a get saw half a merge"
                    store.stats()
                    time.sleep(0.01)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=take_snapshots), threading.Thread(target=reads)]
        checked = 0
        store.merge(rows(1, np.arange(KEYS)), n="sum", same="sum", x="sum", step="replace")
        step = 1
        for thread in threads:
            thread.start()
        paths = {"undone"} if budget.total is None else {"undone", "evicted", "compacted in background"}
        end = time.monotonic() + SECONDS

        def is_enough() -> bool:
            return checked > 1 and paths <= seen.keys()

        try:
            while not errors and time.monotonic() < (end if is_enough() else end + 60):
                order = random.permutation(KEYS)
                with lock:
                    store.merge(rows(step + 1, order), n="sum", same="sum", x="sum", step="replace")
                    step += 1
                if step % 4 == 0 and taken:
                    wanted, snapshot = taken[-1]
                    snapshot.wait(60)
                    held = set(os.listdir(tmp_path))
                    if f"snapshot-{snapshot.id:010d}.manifest" in held:
                        copy = copies / f"copy{snapshot.id}"
                        with lock:
                            store._snapshots._writer.submit(lambda: None).result(60)
                            copy.mkdir()
                            with store._snapshots._removing:  # files must not be removed while they are linked
                                for name in os.listdir(tmp_path):
                                    if name != "LOCK":
                                        os.link(tmp_path / name, copy / name)
                        if f"snapshot-{snapshot.id:010d}.manifest" in os.listdir(copy):
                            with LogStore.open(copy, snapshot=snapshot.id, readonly=True) as old:
                                check(old, wanted)
                            checked += 1
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]
        check(store, step)
        store.close()
        with LogStore.open(tmp_path, readonly=True) as again:
            check(again, step)
    assert paths <= seen.keys(), seen
    assert checked > 1, (checked, step, seen)
