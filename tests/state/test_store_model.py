"""LogStore compared with its model by random operations, with so little memory that every code path runs."""

from __future__ import annotations

import math
import os
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from scalein.state import LogStore
from scalein.state.budget import Budget
from scalein.storage.local import LocalFileSystem
from tests.state.store_model import KINDS
from tests.state.store_pair import Op, Pair, probes

EXAMPLES = int(os.environ.get("SCALEIN_STORE_EXAMPLES", "1"))
NAMES = ["merge", "merge", "more", "more", "more", "upsert", "delete", "get", "get", "scan", "len", "snapshot",
         "slow_snapshot", "wait", "compact", "verify", "reopen", "look_back", "go_back"]  # fmt: skip
OPS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 1 << 30), st.sampled_from([0, 1, 3, 40, 300, 1500])),
               min_size=12, max_size=40)  # fmt: skip
BUDGETS = {
    "large": Budget(None, 1 << 16, 1 << 12),
    "small": Budget(1 << 20, 1 << 16, 1 << 12),
    "little": Budget(800_000, 1 << 14, 1 << 12),  # some groups fit: they are searched on disk first, then loaded
    "tiny": Budget(300_000, 1 << 14, 1 << 13),
}
EVERYTHING: list[Op] = [
    ("more", 1, 1500), ("more", 2, 1500), ("slow_snapshot", 3, 0), ("more", 4, 1500), ("more", 4, 1500),
    ("upsert", 5, 300), ("more", 6, 1500), ("delete", 7, 300), ("get", 8, 300), ("look_back", 9, 0), ("more", 10, 1500),
    ("snapshot", 11, 0),
    ("merge", 12, 300), ("more", 13, 300), ("get", 14, 300), ("compact", 15, 0), ("verify", 16, 0), ("reopen", 17, 0),
    ("get", 18, 40), ("more", 19, 40), ("snapshot", 20, 0), ("more", 21, 300), ("scan", 22, 0), ("go_back", 23, 0),
    ("merge", 24, 300), ("get", 25, 300), ("len", 26, 0),
]  # fmt: skip


def run(ops: list[Op], kind: str, budget: str, workers: int) -> Counter[str]:
    with tempfile.TemporaryDirectory() as folder, probes() as seen:
        pair = Pair(KINDS[kind], lambda readonly: LocalFileSystem(folder, readonly), BUDGETS[budget], workers)
        try:
            for op in ops:
                pair.do(op)
            pair.op_look_back(None, 0)  # type: ignore[arg-type]
            pair.op_reopen(None, 0)  # type: ignore[arg-type]
            pair.op_scan(None, 0)  # type: ignore[arg-type]
        finally:
            pair.close()
    return seen + pair.done


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_store_equals_its_model(kind: str) -> None:
    seen: Counter[str] = Counter()

    # Without shrinking, which takes minutes here: the first failing operations are printed, and are few.
    @settings(deadline=None, max_examples=EXAMPLES, database=None, phases=[Phase.explicit, Phase.generate],
              derandomize="SCALEIN_STORE_EXAMPLES" not in os.environ, suppress_health_check=list(HealthCheck))
    @given(ops=OPS, budget=st.sampled_from(["small", "tiny", "large", "little"]), workers=st.sampled_from([1, 2]))
    @example(ops=EVERYTHING, budget="small", workers=2)
    @example(ops=EVERYTHING, budget="tiny", workers=1)
    def attempt(ops: list[Op], budget: str, workers: int) -> None:
        seen.update(run(ops, kind, budget, workers))

    attempt()
    wanted = {"evicted", "loaded", "read from disk", "merged runs", "compacted in background", "record chunk", "undone"}
    wanted |= {"overflow"} if KINDS[kind].overflows else {"undo full"}
    wanted |= {"text chunk"} if kind in ("text", "nullable", "binary") else set()
    assert not wanted - seen.keys(), f"never ran: {wanted - seen.keys()}; {seen}"


def test_growing_group_indexes(tmp_path: Path) -> None:
    """Many keys in few calls, so that a group's index doubles several times and its chunks are many."""
    with probes() as seen, LogStore.open_on(LocalFileSystem(tmp_path), key={"k": pa.int64()}, value={"n": pa.int64()},
                                               budget=BUDGETS["large"]) as store:  # fmt: skip
        keys = np.random.default_rng(1).permutation(40_000)
        for _ in range(2):
            store.merge(pa.table({"k": keys, "n": keys}), n="sum")
        assert len(store) == len(keys)
        assert store.get(pa.array(keys))["n"].to_pylist() == (2 * keys).tolist()
    assert seen["index grew"] > 256
    with LogStore.open(tmp_path) as again:
        assert again.get(pa.array(keys))["n"].to_pylist() == (2 * keys).tolist()


def test_special_values_are_stored_exactly(tmp_path: Path) -> None:
    """The sign of zero, NaN and nulls survive `replace`, eviction and a restart."""
    values = [0.0, -0.0, math.nan, math.inf, None, 5e-324]
    table = pa.table({"k": list(range(len(values))), "x": pa.array(values, pa.float64())})
    for _ in range(2):
        with LogStore.open_on(LocalFileSystem(tmp_path), key={"k": pa.int64()}, value={"x": pa.float64()},
                                 budget=BUDGETS["tiny"]) as store:  # fmt: skip
            store.upsert(table)
            for shard in range(16):
                store._tiers._evict(shard, 0.0)
            found = store.get(pa.array(range(len(values))))["x"].to_pylist()
            assert repr(found) == repr(values)
            assert len(store) == len(values)
