"""Joins of two streams in bounded runs, against DuckDB's range join and its as-of join, and against Polars'."""

from __future__ import annotations

import numpy as np
import polars as pl
import pyarrow as pa

import scalein as si
from bench.race import Race, assert_same, duck

KEYS = 1_000_000
GAP_US = 20_000_000  # between two rows of a key on one side, on average


def _side(rows: int, seed: int, payload: str) -> pa.Table:
    """Rows in the order of time, of keys in random order."""
    rng = np.random.default_rng(seed)
    keys = min(KEYS, max(1, rows // 20))
    times = np.sort(rng.integers(0, max(1, rows // keys) * GAP_US, rows))
    return pa.table({"k": rng.integers(0, keys, rows), "t": pa.array(times, pa.timestamp("us")),
                     payload: rng.integers(0, 1000, rows)})


def bench_interval_join(race: Race, rows: int, workers: int) -> None:
    """Rows of a key within 5 s of each other, summed; bound: one probe a row, beyond the caches."""
    left, right = _side(rows, 1, "x"), _side(rows, 2, "y")
    flow = si.from_arrow(left).with_watermark("t", "0s").join(
        si.from_arrow(right).with_watermark("t", "0s"), on="k", between=("-5s", "5s")).group_by().agg(
        n=si.count(), x=si.col("x").sum(), y=si.col("y").sum())
    in_duckdb = duck("select count(*) n, sum(x)::bigint x, sum(y)::bigint y from l join r on l.k = r.k"
                     " and r.t between l.t - interval 5 seconds and l.t + interval 5 seconds",
                     workers, l=left, r=right)
    assert_same(flow.collect(workers=workers), in_duckdb(), by=())
    race(lambda: flow.collect(workers=workers), duckdb=in_duckdb, rounds=3, goals={"duckdb": 5},
         row_count=2 * rows, size_bytes=left.nbytes + right.nbytes, bound="a probe a row")


def bench_asof_join(race: Race, rows: int, workers: int) -> None:
    """The last row of the key before each row; bound: one probe and a search a row, beyond the caches."""
    left, right = _side(rows, 3, "x"), _side(rows, 4, "y")
    flow = si.from_arrow(left).join_asof(si.from_arrow(right), on="t", by="k").group_by().agg(
        n=si.count(), x=si.col("x").sum(), y=si.col("y").sum())
    in_duckdb = duck("select count(*) n, sum(x)::bigint x, sum(y)::bigint y from l asof left join r"
                     " on l.k = r.k and l.t >= r.t", workers, l=left, r=right)
    frames = pl.from_arrow(left), pl.from_arrow(right)
    assert all(isinstance(frame, pl.DataFrame) for frame in frames)

    def in_polars() -> object:
        joined = frames[0].join_asof(frames[1], on="t", by="k")  # type: ignore[union-attr, arg-type]
        return joined.select(pl.len(), pl.col("x", "y").sum())

    assert flow.collect(workers=workers)["n"].to_pylist() == in_duckdb()["n"].to_pylist()
    race(lambda: flow.collect(workers=workers), duckdb=in_duckdb, polars=in_polars, rounds=3,
         goals={"duckdb": 2, "polars": 2}, row_count=2 * rows, size_bytes=left.nbytes + right.nbytes,
         bound="a probe and a search a row")
