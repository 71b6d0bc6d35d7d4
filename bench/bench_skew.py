"""Skew: half of all rows have one key. It must do no harm, alone and with two workers."""

from __future__ import annotations

import ctypes

import pytest

from bench import data, yardsticks
from bench.bench_group_by import four_aggregates
from bench.race import Race, assert_same


@pytest.mark.parametrize("workers", [1, 2])
def bench_heavy_key(race: Race, c: ctypes.CDLL, rows: int, workers: int) -> None:
    """W3 with a heavy key against W3 with uniform keys: the heavy key's rows are cheaper, so the ratio is above 1."""
    skewed, even = data.keyed_values(rows, heavy=0.5), data.keyed_values(rows)
    flow, uniform = four_aggregates(skewed), four_aggregates(even)
    by_hand = yardsticks.group_many(c, skewed, workers)
    assert_same(flow.collect(workers=workers), by_hand()(), by=("key",))
    race(lambda: flow.collect(workers=workers), c=by_hand, uniform=lambda: uniform.collect(workers=workers),
         rounds=5, goals={"uniform": 1.0}, row_count=rows, size_bytes=16 * rows, bound="cache misses of the light keys")
