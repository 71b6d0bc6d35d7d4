"""H2O's db-benchmark: ten questions of group-by and five joins with materialised results, half of `--bench-rows` rows.

Ten million rows by default, in memory, two workers, with DuckDB and Polars beside us.
"""

from __future__ import annotations

from collections.abc import Callable

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from polars import col

import scalein as si
from bench import h2o
from bench.race import Race, duck
from bench.tpch import check_same


@pytest.fixture
def workers() -> int:
    return 2


GROUP_BY: dict[str, Callable[[pl.LazyFrame], pl.LazyFrame]] = {
    "q1": lambda x: x.group_by("id1").agg(col("v1").sum()),
    "q2": lambda x: x.group_by("id1", "id2").agg(col("v1").sum()),
    "q3": lambda x: x.group_by("id3").agg(col("v1").sum(), col("v3").mean()),
    "q4": lambda x: x.group_by("id4").agg(col("v1", "v2", "v3").mean()),
    "q5": lambda x: x.group_by("id6").agg(col("v1", "v2", "v3").sum()),
    "q6": lambda x: x.group_by("id4", "id5").agg(col("v3").median().alias("median_v3"),
                                                 col("v3").std().alias("sd_v3")),
    "q7": lambda x: x.group_by("id3").agg((col("v1").max() - col("v2").min()).alias("range_v1_v2")),
    "q8": lambda x: x.drop_nulls("v3").group_by("id6").agg(col("v3").top_k(2).alias("largest2_v3")).explode(
        "largest2_v3"),
    "q9": lambda x: x.group_by("id2", "id4").agg((pl.corr("v1", "v2") ** 2).alias("r2")),
    "q10": lambda x: x.group_by("id1", "id2", "id3", "id4", "id5", "id6").agg(
        col("v3").sum(), pl.len().alias("n")),
}  # fmt: skip

JOINS: dict[str, tuple[str, str, str]] = {
    "j1": ("small", "id1", "inner"), "j2": ("medium", "id2", "inner"), "j3": ("medium", "id2", "left"),
    "j4": ("medium", "id5", "inner"), "j5": ("big", "id3", "inner"),
}  # fmt: skip


@pytest.mark.parametrize("name", GROUP_BY)
def bench_group_by(race: Race, rows: int, workers: int, name: str) -> None:
    """A question of group-by; the goal is 2 on the geometric mean."""
    x = h2o.groups(rows // 2)
    query, frame = h2o.GROUP_BY[name], pl.from_arrow(x)
    assert isinstance(frame, pl.DataFrame)
    flow, in_duckdb, in_polars = si.sql(query, x=x), duck(query, workers, x=x), GROUP_BY[name](frame.lazy())
    want = in_duckdb()
    for got in (flow.collect(workers=workers), pa.table(in_polars.collect()).select(want.column_names)):
        check_same(_summed(got), _summed(want), rounding=1e-7)
    race(lambda: flow.collect(workers=workers), rounds=3, goals={"duckdb": 2, "polars": 2}, duckdb=in_duckdb,
         polars=in_polars.collect, row_count=x.num_rows, size_bytes=x.nbytes, bound="groups")


@pytest.mark.parametrize("name", JOINS)
def bench_join(race: Race, rows: int, workers: int, name: str) -> None:
    """A join whose rows are all materialised; the goal is 1."""
    tables = h2o.joins(rows // 2)
    other, key, how = JOINS[name]
    x, y = tables["x"], tables[other]
    query, frames = h2o.JOINS[name], (pl.from_arrow(x), pl.from_arrow(y))
    assert isinstance(frames[0], pl.DataFrame)
    assert isinstance(frames[1], pl.DataFrame)
    flow, in_duckdb = si.sql(query, x=x, **{other: y}), duck(query, workers, x=x, **{other: y})
    in_polars = frames[0].lazy().join(frames[1].lazy(), on=key, how=how, suffix=f"_{other}")  # type: ignore[arg-type]
    want = _summed(in_duckdb())
    check_same(_summed(flow.collect(workers=workers)), want, rounding=1e-9)
    assert in_polars.select(pl.len(), col("v1").sum()).collect()["len"].item() == want["rows"][0].as_py()
    race(lambda: flow.collect(workers=workers), rounds=3, goals={"duckdb": 1, "polars": 1}, duckdb=in_duckdb,
         polars=in_polars.collect, row_count=x.num_rows, size_bytes=x.nbytes + y.nbytes, bound="copies of rows")


def _summed(table: pa.Table) -> pa.Table:
    """One row about a result of any size: how many rows, and an order-free sum over each column."""
    connection = duckdb.connect()
    connection.register("t", table)
    sums = [f'sum("{f.name}") AS "{f.name}"' if not pa.types.is_string(f.type) and not pa.types.is_string_view(f.type)
            and not pa.types.is_large_string(f.type) else f'sum(hash("{f.name}")::HUGEINT)::DOUBLE AS "{f.name}"'
            for f in table.schema]
    return connection.sql(f"SELECT count(*) AS rows, {', '.join(sums)} FROM t").to_arrow_table()
