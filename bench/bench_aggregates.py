"""Aggregates whose state has no fixed size, and decimals, over a million groups and over a thousand."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pyarrow as pa
import pytest

import scalein as si
from bench.data import SEED
from bench.race import Race, assert_same, duck
from scalein import col
from scalein.api.column import Column

MANY, FEW = 1_000_000, 1_000
BOUND = "cache misses: one for the group, one for the value"


@lru_cache(maxsize=1)
def sales(rows: int) -> pa.Table:
    """A key of each size, a value that repeats, one that does not, a name of 6 to 11 letters, an amount of
    money, a weight that goes with the value.
    """
    rng = np.random.default_rng(SEED + 8)
    names = pa.array([f"name-{n}" for n in range(100_000)])
    cents = np.zeros((rows, 2), np.int64)
    cents[:, 0] = rng.integers(0, 10**6, rows)
    keys = rng.integers(0, MANY, rows)
    return pa.table({
        "many": keys,
        "few": keys % FEW,
        "item": rng.integers(0, 1000, rows),
        "value": (value := rng.random(rows)),
        "name": names.take(pa.array(rng.integers(0, len(names), rows))),
        "amount": pa.Array.from_buffers(pa.decimal128(12, 2), rows, [None, pa.py_buffer(cents)]),
        "weight": 3 * value + rng.random(rows),
    })  # fmt: skip


QUERIES: dict[str, tuple[list[Column], str, float]] = {
    "n_unique": ([col("item").n_unique().alias("x")], "count(distinct item) x", 2),
    "quantile": ([col("value").quantile(0.9).alias("x")], "quantile_cont(value, 0.9) x", 2),
    "text": ([col("name").min().alias("x"), col("name").max().alias("y")], "min(name) x, max(name) y", 2),
    "corr": ([si.corr("value", "weight").alias("x")],
             "case when count(*) > 1 then corr(value, weight) end x", 2),
    "decimal": ([col("amount").sum().alias("x")], "sum(amount) x", 1),
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("key", ["many", "few"])
@pytest.mark.parametrize("query", QUERIES)
def bench_aggregates(race: Race, rows: int, workers: int, key: str, query: str) -> None:
    table = sales(rows)
    aggs, sql, goal = QUERIES[query]
    flow = si.from_arrow(table).group_by(key).agg(*aggs)
    in_duckdb = duck(f"select {key}, {sql} from sales group by {key}", workers, sales=table)
    assert_same(flow.collect(workers=workers), in_duckdb(), by=(key,), atol=1e-6 if query == "corr" else 0.0)
    race(lambda: flow.collect(workers=workers), duckdb=in_duckdb, rounds=3,
         goals={"duckdb": goal} if key == "many" else None,
         row_count=rows, size_bytes=16 * rows, bound=BOUND)
