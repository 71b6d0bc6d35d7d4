"""Windows per key over rows that come almost in order, in `collect` and in jobs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pyarrow as pa
import pytest

import scalein as si
from bench import data, yardsticks
from bench.race import Race, assert_same, duck

# DuckDB has no sliding windows: slices of 2 s by hand, then five of them a window. Without slices it is twice as slow.
SLIDING_SQL = """
with slices as (select auction, ts // 2000 as slice, count(*) n from d group by all)
select auction, (slice - back) * 2000 as window_start, sum(n)::bigint n
from (select *, unnest([0, 1, 2, 3, 4]) back from slices) group by all"""

GAP_MS, MAX_DELAY_MS, BATCH_ROWS = 30_000, 100, 1 << 16
SESSIONS_SQL = f"""
with marked as (select user, ts, ts - lag(ts) over (partition by user order by ts) <= {GAP_MS} as joins from d),
     numbered as (select user, ts, sum(case when joins then 0 else 1 end) over (
         partition by user order by ts rows unbounded preceding) number from marked)
select user, min(ts) window_start, max(ts) + {GAP_MS} window_end, count(*) n from numbered group by user, number"""


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


@pytest.mark.parametrize("way", ["collect", "job"])
def bench_window_join(race: Race, c: ctypes.CDLL, rows: int, way: str) -> None:
    """W5: pairs of people and auctions in windows of 10 s, counted; bound: a probe a row, beyond L2."""
    people, auctions = data.people_and_auctions(rows)

    def flow(left: si.Flow, right: si.Flow) -> si.Flow:
        return left.join(right, on="id", within=si.tumbling("ts", 10_000)).group_by().agg(n=si.count())

    bounded, by_hand = flow(si.from_arrow(people), si.from_arrow(auctions)), yardsticks.window_join(c, people, auctions)
    if way == "job":
        _race_as_job(race, flow, people, auctions, by=(), bound="a probe a row")
        return
    assert_same(bounded.collect(workers=1), by_hand()(), by=())
    race(lambda: bounded.collect(workers=1), c=by_hand, rounds=5, goals={"c": 0.7},
         row_count=rows, size_bytes=16 * rows, bound="a probe a row")


@pytest.mark.parametrize("way", ["collect", "job"])
def bench_sessions(race: Race, c: ctypes.CDLL, rows: int, way: str) -> None:
    """W6: sessions of users who have twenty rows each; bound: a miss of the caches a row, for the user's record."""
    visits, by = data.visits(rows), ("user", "window_start")

    def flow(source: si.Flow) -> si.Flow:
        return source.group_by("user", si.session("ts", gap=GAP_MS)).agg(n=si.count())

    if way == "job":
        _race_as_job(race, flow, visits, by=by, bound="a cache miss a row")
        return
    bounded = flow(si.from_arrow(visits))
    by_hand, in_duckdb = yardsticks.sessions(c, visits, GAP_MS), duck(SESSIONS_SQL, 1, d=visits)
    assert_same(bounded.collect(workers=1), by_hand()(), by=by)
    assert_same(bounded.collect(workers=1), in_duckdb(), by=by)
    race(lambda: bounded.collect(workers=1), c=by_hand, duckdb=in_duckdb, rounds=3,
         goals={"c": 0.6, "duckdb": 10}, row_count=rows, size_bytes=16 * rows, bound="a cache miss a row")


def _race_as_job(race: Race, flow: Callable[..., si.Flow], *tables: pa.Table, by: tuple[str, ...], bound: str) -> None:
    """A job of one worker over batches, against `collect` of the same."""
    bounded, in_job, rows = flow(*map(si.from_arrow, tables)), _job(flow, *tables), sum(map(len, tables))
    assert_same(in_job(), bounded.collect(workers=1), by=by)
    race(in_job, collect=lambda: bounded.collect(workers=1), rounds=5, goals={"collect": 0.8}, row_count=rows,
         size_bytes=16 * rows, bound=bound)


def _job(flow: Callable[..., si.Flow], *tables: pa.Table) -> Callable[[], pa.Table]:
    """A flow in a job of one worker, over batches."""
    batches = [(table.to_batches(max_chunksize=BATCH_ROWS), table.schema) for table in tables]

    def run() -> pa.Table:
        out = si.to_memory()
        sources = (si.from_batches(*each).with_watermark("ts", MAX_DELAY_MS) for each in batches)
        flow(*sources).start(sink=out, workers=1).wait()
        return out.table()

    return run
