"""A store with every kind of file, for tests that damage or misuse it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from random import Random

from scalein.state import LogStore
from scalein.state.budget import Budget
from scalein.storage.local import LocalFileSystem
from tests.state.store_model import KINDS, Content
from tests.state.store_pair import Pair, kernels_of

KIND = KINDS["text"]
BUDGET = Budget(800_000, 1 << 16, 1 << 12)


class Built:
    """A store with runs, images and two snapshots, and the content of each snapshot."""

    def __init__(self, path: Path) -> None:
        self.path = path
        pair = Pair(KIND, lambda readonly: LocalFileSystem(path, readonly), BUDGET, 1)
        for seed in range(4):
            pair.op_more(Random(seed), 400)
        pair.op_snapshot(Random(1), 0)
        pair.op_more(Random(9), 300)
        pair.op_snapshot(Random(1), 0)
        pair.wait()
        pair.close()
        self.contents: list[Content] = [{}, *pair.captured.values()]
        self.ids = list(pair.captured)
        self.names = sorted(name for name in os.listdir(path) if name != "LOCK")


def opened(path: Path, readonly: bool = False, budget: Budget = BUDGET) -> LogStore:
    return LogStore.open_on(LocalFileSystem(path, readonly), key=None, value=None, budget=budget, readonly=readonly,
                               kernels=kernels_of("text", 1))  # fmt: skip


def copied(built: Built, path: Path) -> Path:
    shutil.copytree(built.path, path)
    return path
