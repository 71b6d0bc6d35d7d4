"""A process that is killed at any moment: acknowledged snapshots survive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pyarrow as pa

from scalein.state import LogStore
from scalein.state.budget import Budget
from scalein.storage.local import LocalFileSystem

ROUNDS = int(os.environ.get("SCALEIN_STORE_KILLS", "12"))
KEYS = 150
# Each step adds 1 to every key; a text names the step. Printed steps were acknowledged.
# A server with compiled kernels forks a process for each round, which prints its number first; the server prints "dead"
# when it has ended.
PROGRAM = """
import os, sys, tempfile
import numpy as np, pyarrow as pa
from scalein.state import LogStore
from scalein.state.budget import Budget
from scalein.storage.local import LocalFileSystem

def run(path, steps):
    store = LogStore.open_on(LocalFileSystem(path), key={"k": pa.int64()}, value={"n": pa.int64(), "t": pa.string()},
                                budget=Budget(700_000, 1 << 14, 1 << 12), keep=2)
    found = store.get(pa.array([0]))["n"].to_pylist()[0] or 0
    keys = np.arange(KEYS)
    waiting = []
    for step in range(found + 1, found + steps):
        text = pa.array([f"a text that says {step}"] * KEYS)
        store.merge(pa.table({"k": keys, "n": np.ones(KEYS, np.int64), "t": text}), n="sum", t="replace")
        waiting.append((step, store.snapshot()))
        while waiting and (len(waiting) > 2 or waiting[0][1].is_done):
            done, snapshot = waiting.pop(0)
            snapshot.wait()
            if steps > 10:
                print(done, flush=True)
    store.close()

with tempfile.TemporaryDirectory() as folder:
    run(folder, 5)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        print("pid", os.getpid(), flush=True)
        run(sys.argv[1], 1_000_000)
    os.waitpid(child, 0)
    print("dead", flush=True)
""".replace("KEYS", str(KEYS))


def test_acknowledged_snapshots_survive_a_kill(tmp_path: Path) -> None:
    random = Random(5)
    acknowledged = 0
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path / "s")], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as server:  # fmt: skip
        try:
            for number in range(ROUNDS):
                acknowledged = kill_once(server, random, tmp_path / "s", acknowledged, number)
        finally:
            server.kill()


def kill_once(server: subprocess.Popen[str], random: Random, path: Path, before: int, number: int) -> int:
    """Start a process, kill it, and open the store; returns its step."""
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write("go\n")
    server.stdin.flush()
    pid = int(server.stdout.readline().split()[1])
    lines = [server.stdout.readline()]
    time.sleep(random.random() * 0.1)
    os.kill(pid, signal.SIGKILL)
    while not lines[-1].endswith("dead\n"):
        lines.append(server.stdout.readline())
    acknowledged = max((int(line) for line in lines[:-1]), default=before)
    assert acknowledged > before, f"round {number}: nothing was acknowledged"
    budget = Budget(700_000, 1 << 14, 1 << 12)
    with LogStore.open_on(LocalFileSystem(path), key=None, value=None, budget=budget) as store:
        found = store.scan().read_all()
        counts, texts = set(found["n"].to_pylist()), set(found["t"].to_pylist())
        assert (len(found), len(counts), len(texts)) == (KEYS, 1, 1), f"round {number}: {counts} {texts}"
        step = int(counts.pop())
        assert texts.pop() == f"a text that says {step}"
        assert acknowledged <= step <= acknowledged + 4, f"round {number}: {step}, acknowledged {acknowledged}"
        assert set(store.get(pa.array(range(KEYS)))["n"].to_pylist()) == {step}
        store.verify()
    return step
