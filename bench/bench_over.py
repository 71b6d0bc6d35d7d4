"""Aggregates over frames of ten rows in bounded runs, against DuckDB's windows and Polars' rolling sums."""

from __future__ import annotations

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

import scalein as si
from bench.race import Race, duck

FRAME = 10


@pytest.mark.parametrize("keys", [1_000, 1_000_000])
def bench_frame_of_rows(race: Race, rows: int, workers: int, keys: int) -> None:
    """The sum of a row and the nine of its key before it; bound: two random rows of memory a row."""
    rng = np.random.default_rng(1)
    table = pa.table({"k": rng.integers(0, min(keys, rows), rows), "t": np.arange(rows), "x": rng.random(rows)})
    flow = si.from_arrow(table).select(s=si.col("x").sum().over("k", order_by="t", rows=FRAME))
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    sums = pl.col("x").rolling_sum(FRAME, min_samples=1).over("k")
    in_duckdb = duck(f"select t, sum(x) over (partition by k order by t rows {FRAME - 1} preceding) s from t",
                     workers, t=table)
    want = in_duckdb().sort_by("t")["s"].to_numpy()
    np.testing.assert_allclose(flow.collect(workers=workers)["s"].to_numpy(), want)
    race(lambda: flow.collect(workers=workers), duckdb=in_duckdb, polars=lambda: frame.select(s=sums), rounds=3,
         goals={"duckdb": 5, "polars": 5}, row_count=rows, size_bytes=table.nbytes,
         bound="two random rows of memory a row")
