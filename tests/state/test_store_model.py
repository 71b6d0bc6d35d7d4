"""LogStore against a dict, by random operations, with memory so small that every path runs."""

from __future__ import annotations

import os
import tempfile
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scalein.state.budget import Budget
from scalein.state.files import RealFiles
from tests.state.store_model import KINDS
from tests.state.store_pair import Op, Pair, probes

EXAMPLES = int(os.environ.get("SCALEIN_STORE_EXAMPLES", "6"))
NAMES = ["merge", "merge", "more", "more", "more", "upsert", "delete", "get", "get", "scan", "len", "snapshot", "slow_snapshot",
         "wait", "compact", "verify", "reopen", "look_back", "go_back"]  # fmt: skip
OPS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 1 << 30), st.sampled_from([0, 1, 3, 40, 300, 1500])),
               min_size=12, max_size=40)  # fmt: skip
BUDGETS = {
    "large": Budget(None, 1 << 16, 1 << 12),
    "small": Budget(1 << 20, 1 << 16, 1 << 12),
    "tiny": Budget(300_000, 1 << 14, 1 << 13),
}
_seen: dict[str, Counter[str]] = {}


def run(ops: list[Op], kind: str, budget: str, workers: int) -> Counter[str]:
    with tempfile.TemporaryDirectory() as folder, probes() as seen:
        pair = Pair(KINDS[kind], lambda readonly: RealFiles(folder, readonly), BUDGETS[budget], workers)
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
def test_a_store_is_a_dict(kind: str) -> None:
    seen = _seen.setdefault(kind, Counter())

    @settings(deadline=None, max_examples=EXAMPLES, database=None, derandomize="SCALEIN_STORE_EXAMPLES" not in os.environ,
              suppress_health_check=list(HealthCheck))
    @given(ops=OPS, budget=st.sampled_from(["small", "tiny", "large"]), workers=st.sampled_from([1, 2]))
    def attempt(ops: list[Op], budget: str, workers: int) -> None:
        seen.update(run(ops, kind, budget, workers))

    attempt()
