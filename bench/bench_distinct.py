"""First rows by key, whole sorts and the first rows of one, against DuckDB and Polars."""

from __future__ import annotations

import polars as pl
import pyarrow as pa
import pytest

import scalein as si
from bench import data
from bench.race import Race, assert_same, duck


@pytest.mark.parametrize("form", ["int", "text"])
@pytest.mark.parametrize("keys", [100, 1_000_000], ids="{:_}".format)
def bench_distinct(race: Race, rows: int, workers: int, keys: int, form: str) -> None:
    """The first row of each key; bound: one probe a row, in L1 or beyond the caches."""
    table = data.keyed_values(rows, keys=keys)
    if form == "text":
        table = table.set_column(0, "key", table["key"].cast(pa.string()))
    flow, frame = si.from_arrow(table).distinct("key"), pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    in_duckdb = duck("select distinct on (key) * from d", workers, d=table)
    first_rows = flow.collect(workers=workers)
    assert_same(first_rows, frame.unique("key", keep="first", maintain_order=True).to_arrow().cast(table.schema), by=())
    race(lambda: flow.collect(workers=workers), duckdb=in_duckdb,
         polars=lambda: frame.unique("key", keep="first", maintain_order=True), rounds=3,
         row_count=rows, size_bytes=table.nbytes, bound="a probe a row")


@pytest.mark.parametrize("count", [None, 100], ids=["all", "first"])
def bench_sort(race: Race, rows: int, workers: int, count: int | None) -> None:
    """All rows by value, or the hundred greatest; bound: taking rows in random order, or reading the keys."""
    table = data.keyed_values(rows)
    flow = si.from_arrow(table).sort("value", descending=True)
    flow = flow if count is None else flow.limit(count)
    sql = "select * from d order by value desc" + ("" if count is None else f" limit {count}")
    in_duckdb = duck(sql, workers, d=table)
    found = flow.collect(workers=workers)
    assert_same(found.select(["value"]), in_duckdb().select(["value"]), by=())
    race(lambda: flow.collect(workers=workers), duckdb=in_duckdb, rounds=3,
         row_count=rows, size_bytes=table.nbytes, bound="random reads")
