"""Windows per key over rows that come almost in order."""

from __future__ import annotations

import ctypes

import pytest

import scalein as si
from bench import data, yardsticks
from bench.race import Race, assert_same, duck

# DuckDB has no sliding windows: slices of 2 s by hand, then five of them a window. Without slices it is twice as slow.
SLIDING_SQL = """
with slices as (select auction, ts // 2000 as slice, count(*) n from d group by all)
select auction, (slice - back) * 2000 as window_start, sum(n)::bigint n
from (select *, unnest([0, 1, 2, 3, 4]) back from slices) group by all"""


@pytest.mark.parametrize("workers", [1, 2])
def bench_sliding_count(race: Race, c: ctypes.CDLL, rows: int, workers: int) -> None:
    """W2: 10 s every 2 s per auction, 100,000 Zipf-distributed keys; bound: one probe a row, some misses of L2."""
    bids = data.bids(rows)
    flow = si.from_arrow(bids).group_by("auction", si.sliding("ts", 10_000, every=2_000)).agg(n=si.count())
    by_hand, in_duckdb = yardsticks.sliding_count(c, bids, workers), duck(SLIDING_SQL, workers, d=bids)
    assert_same(flow.collect(workers=workers), by_hand()(), by=("auction", "window_start"))
    # No goal to C: it keeps counts by slice and not by key, which only a lone count allows, and is ahead by half.
    race(lambda: flow.collect(workers=workers), c=by_hand, duckdb=in_duckdb, rounds=5, goals={"duckdb": 5},
         row_count=rows, size_bytes=16 * rows, bound="one probe a row")


def bench_tumbling_count(race: Race, rows: int, workers: int) -> None:
    """10 s per auction; bound: one probe a row."""
    bids = data.bids(rows)
    flow = si.from_arrow(bids).group_by("auction", si.tumbling("ts", 10_000)).agg(n=si.count())
    in_duckdb = duck("select auction, ts // 10000 * 10000 as window_start, count(*) n from d group by all",
                     workers, d=bids)
    assert_same(flow.collect(workers=workers), in_duckdb(), by=("auction", "window_start"))
    race(lambda: flow.collect(workers=workers), duckdb=in_duckdb, rounds=5,
         row_count=rows, size_bytes=16 * rows, bound="one probe a row")
