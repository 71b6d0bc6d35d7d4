"""Filters: what is selected, projected or summed in one pass over memory."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

import scalein as si
from bench import data, yardsticks
from bench.race import Race, assert_same, duck
from scalein import col


def bench_filter_project(race: Race, c: ctypes.CDLL, rows: int, workers: int) -> None:
    """W4: one row of 123 stays; bound: reading 16 bytes a row."""
    bids = data.bids(rows)
    flow = si.from_arrow(bids).filter(col("auction") % 123 == 0).select("auction", price=col("price") * 0.908)
    by_hand = yardsticks.filter_project(c, bids)
    in_duckdb = duck("select auction, price * 0.908::double as price from bids where auction % 123 = 0",
                     workers, bids=bids)
    assert_same(flow.collect(workers=workers), by_hand()(), by=())
    race(lambda: flow.collect(workers=workers), c=by_hand, duckdb=in_duckdb, goals={"c": 0.8, "duckdb": 3.5},
         row_count=rows, size_bytes=16 * rows, bound="memory bandwidth, 16 bytes a row")


@pytest.mark.parametrize("workers", [1, 2])
def bench_clip(race: Race, rows: int, workers: int) -> None:
    """A column between two bounds; bound: reading and writing 8 bytes a row."""
    trades = data.trades(rows)
    flow = si.from_arrow(trades).select(price=col("price").clip(20.0, 80.0))
    prices = trades["price"].to_numpy()
    in_duckdb = duck("select least(greatest(price, 20::double), 80::double) as price from trades", workers,
                     trades=trades)
    assert_same(flow.collect(workers=workers), {"price": np.clip(prices, 20.0, 80.0)}, by=())
    assert_same(flow.collect(workers=workers), in_duckdb(), by=())
    race(lambda: flow.collect(workers=workers), numpy=lambda: np.clip(prices, 20.0, 80.0), duckdb=in_duckdb,
         goals={"duckdb": 2}, row_count=rows, size_bytes=16 * rows, bound="memory bandwidth, 16 bytes a row")


@pytest.mark.parametrize("selectivity", [0.01, 0.5, 0.99])
def bench_filter_sum(race: Race, c: ctypes.CDLL, rows: int, workers: int, selectivity: float) -> None:
    """A sum without keys of what a filter keeps; bound: memory bandwidth whatever the selectivity."""
    trades, least = data.trades(rows), 99 - round(100 * selectivity)
    flow = si.from_arrow(trades).filter(col("qty") > least).group_by().agg(total=col("price").sum())
    by_hand = yardsticks.filter_sum(c, trades, least)
    assert_same(flow.collect(workers=workers), by_hand()(), by=())
    race(lambda: flow.collect(workers=workers), c=by_hand,
         row_count=rows, size_bytes=16 * rows, bound="memory bandwidth, 16 bytes a row")
