"""The keys of open windows: in memory up to a limit, on disk beyond it, and over checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from scalein.exec import expiry_index
from scalein.exec.expiry_index import ExpiryIndex
from scalein.exec.operator import Context
from scalein.options import Options

SCHEMA = pa.schema([("k", pa.string()), pa.field("window_start", pa.int64(), False)])
MEMORY = 1 << 16


def keys(seed: int, count: int) -> pa.RecordBatch:
    random = np.random.default_rng(seed)
    names = pa.array([f"user {seed} {k}" for k in range(count)])
    return pa.RecordBatch.from_arrays([names, pa.array(random.integers(0, 5, count) * 10)], schema=SCHEMA)


def taken(index: ExpiryIndex, first_open: int) -> set[tuple[str, int]]:
    found = [(row["k"], row["window_start"]) for batch in index.closed(first_open) for row in batch.to_pylist()]
    assert len(found) == len(set(found))
    return set(found)


@pytest.mark.parametrize("memory", [None, MEMORY])
def test_keys_are_those_that_were_added(memory: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiry_index, "MIN_SEGMENTS", 20)
    index, want = ExpiryIndex(tmp_path, SCHEMA, memory), set[tuple[str, int]]()
    for seed in range(60):
        batch = keys(seed, 200)
        index.add(batch)
        want |= {(row["k"], row["window_start"]) for row in batch.to_pylist()}
        assert memory is None or index.memory_bytes <= memory
    assert len(index._log.segments) <= 100
    assert index.oldest == 0
    assert taken(index, 11) == {key for key in want if key[1] <= 10}
    assert (index.oldest, taken(index, 11)) == (20, set())
    state = json.loads(json.dumps(index.snapshot()()))
    index.retain([state])
    again = ExpiryIndex(tmp_path, SCHEMA, memory)
    again.restore(Context(Options(), tmp_path, print, False, print, None), state)
    assert again.oldest == 20
    assert taken(again, 1000) == taken(index, 1000) == {key for key in want if key[1] > 10}
    again.retain([])
    assert (again.oldest, again.memory_bytes, list(tmp_path.iterdir())) == (None, 0, [])
