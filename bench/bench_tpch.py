"""TPC-H's queries in SQL: over tables in memory and over Parquet files, with DuckDB and Polars beside them.

`--bench-scale` is the scale factor (1 by default); the data is kept in `--bench-folder` between runs.
"""

from __future__ import annotations

import os
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pytest

import scalein as si
from bench import tpch, tpch_polars
from bench.race import Race

WORKERS = 2
os.environ.setdefault("POLARS_MAX_THREADS", str(WORKERS))


@pytest.fixture
def workers() -> int:
    return WORKERS


@pytest.fixture(scope="module")
def scale(request: pytest.FixtureRequest) -> float:
    return float(request.config.getoption("--bench-scale"))


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = request.config.getoption("--bench-folder")
    return Path(given) if given else tmp_path_factory.mktemp("tpch")


@pytest.fixture(scope="module")
def tables(folder: Path, scale: float) -> dict[str, pa.Table]:
    return tpch.tables(folder, scale)


@pytest.mark.parametrize("name", tpch.QUERIES)
def bench_memory(race: Race, tables: dict[str, pa.Table], workers: int, name: str) -> None:
    """A query over tables in memory: the goal is 1.2 on the geometric mean."""
    connection = duckdb.connect(config={"threads": workers})
    for table, rows in tables.items():
        connection.register(table, rows)
    frames = {table: pl.from_arrow(rows).lazy() for table, rows in tables.items()}  # type: ignore[union-attr]
    flow = si.sql(tpch.QUERIES[name], **tables)
    _race(race, flow, connection, frames, name, workers, 1.2, sum(each.nbytes for each in tables.values()))


@pytest.mark.parametrize("name", tpch.QUERIES)
def bench_parquet(race: Race, folder: Path, scale: float, workers: int, name: str) -> None:
    """A query over Parquet files: the goal is 0.8 on the geometric mean."""
    connection = duckdb.connect(config={"threads": workers})
    files = tpch.files(folder, scale)
    for table, path in files.items():
        connection.execute(f"CREATE VIEW {table} AS SELECT * FROM read_parquet('{path}')")
    frames = {table: pl.scan_parquet(path) for table, path in files.items()}
    flow = si.sql(tpch.QUERIES[name], **{table: si.read_parquet(path) for table, path in files.items()})
    _race(race, flow, connection, frames, name, workers, 0.8, sum(path.stat().st_size for path in files.values()))


def _race(race: Race, flow: si.Flow, connection: duckdb.DuckDBPyConnection, frames: dict[str, pl.LazyFrame],
          name: str, workers: int, goal: float, size_bytes: int) -> None:
    query, in_polars = tpch.QUERIES[name], tpch_polars.QUERIES[name](frames)
    got, want = flow.collect(workers=workers), connection.sql(query).to_arrow_table()
    tpch.check_same(got, want)
    in_order = pa.table(in_polars.collect()).rename_columns(want.column_names)
    tpch.check_same(in_order, want, rounding=1e-4)  # its products of decimals keep two digits
    race(lambda: flow.collect(workers=workers), rounds=3, goals={"duckdb": goal, "polars": goal},
         duckdb=lambda: connection.sql(query).to_arrow_table(), polars=in_polars.collect,
         row_count=got.num_rows, size_bytes=size_bytes, bound="scans and joins")
