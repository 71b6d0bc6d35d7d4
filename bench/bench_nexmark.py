"""Nexmark: each query over half of `--bench-rows` events (ten million by default) in memory, and DuckDB beside it.

`python -m scalein bench nexmark --events 10000000 --duckdb --jobs` prints the same as a table, with jobs and the
geometric mean.
"""

from __future__ import annotations

import pytest

from bench.race import Race
from scalein import nexmark
from scalein.cli.bench import check_same, connect
from scalein.nexmark import QUERIES, Tables


@pytest.fixture(scope="module")
def data(rows: int) -> Tables:
    return nexmark.tables(events=rows // 2)


@pytest.mark.parametrize("name", QUERIES)
def bench_nexmark(race: Race, data: Tables, workers: int, name: str) -> None:
    """A query by `collect`, at least five times as fast as DuckDB on the geometric mean."""
    query, flow, connection = QUERIES[name], nexmark.flow(name, data), connect(data, workers)
    check_same(connection, name, flow.collect(workers=workers), connection.sql(query.duckdb).to_arrow_table())
    inputs = [getattr(data, kind) for kind in query.inputs]
    race(lambda: flow.collect(workers=workers), rounds=3, goals={"duckdb": 5},
         duckdb=lambda: connection.sql(query.duckdb).to_arrow_table(),
         row_count=sum(table.num_rows for table in inputs), size_bytes=sum(table.nbytes for table in inputs),
         bound=query.asks)
