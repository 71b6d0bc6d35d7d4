"""TPC-H's 22 queries over generated data, against DuckDB."""

from __future__ import annotations

import duckdb
import pyarrow as pa
import pytest

import scalein as si
from bench import tpch

pytestmark = pytest.mark.skipif(tpch.generator() is None, reason="needs tpchgen-cli")


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pa.Table]:
    return tpch.tables(tmp_path_factory.mktemp("tpch"), 0.01)


@pytest.mark.parametrize("name", tpch.QUERIES)
def test_tpch(name: str, tables: dict[str, pa.Table]) -> None:
    connection = duckdb.connect(config={"threads": 1})
    for table, rows in tables.items():
        connection.register(table, rows)
    want = connection.sql(tpch.QUERIES[name]).to_arrow_table()
    tpch.check_same(si.sql(tpch.QUERIES[name], **tables).collect(workers=2), want)
