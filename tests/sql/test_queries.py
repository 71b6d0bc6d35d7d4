"""SQL against DuckDB: written queries over tables with nulls, NaN and no rows, and random ones."""

from __future__ import annotations

import math
from datetime import date, datetime
from decimal import Decimal
from random import Random
from typing import Any

import duckdb
import pyarrow as pa
import pytest

import scalein as si
from tests.sql.queries import QUERIES
from tests.sql.random_queries import random_query

T = pa.table({
    "a": pa.array([1, 2, 3, None, 5, -7], pa.int64()), "b": pa.array([2, 2, None, 4, 3, 3], pa.int64()),
    "f": [1.5, None, float("nan"), -0.0, 0.0, 2.5], "s": ["x", "yy", None, "", "xyz", "Y"],
    "d": [date(2020, 1, 1), date(2020, 2, 3), None, date(1999, 12, 31), date(2020, 1, 1), date(2021, 6, 5)],
    "ts": pa.array([datetime(2020, 1, 1, 1, 2, 3), datetime(2020, 2, 3), None, datetime(1999, 12, 31, 23, 59, 59),
                    datetime(2020, 1, 1), datetime(2021, 6, 5, 4)], pa.timestamp("us")),
    "k": [True, False, None, True, True, False]})
U = pa.table({"a": pa.array([1, 1, 3, None, 9], pa.int64()), "v": pa.array([10, 20, 30, 40, None], pa.int64()),
              "w": ["p", "q", "p", None, "q"]})
TABLES = {"t": T, "u": U, "e": T.slice(0, 0), "eu": U.slice(0, 0)}


@pytest.fixture(scope="module")
def duck() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(config={"threads": 1})
    for name, table in TABLES.items():
        connection.register(name, table)
    return connection


def rows(table: pa.Table) -> list[tuple[Any, ...]]:
    """Rows in one order, with numbers of one kind; several columns may have one name."""
    columns = [[_plain(value) for value in column.to_pylist()] for column in table.columns]
    return sorted(zip(*columns, strict=True), key=repr)


def _plain(value: Any) -> Any:
    if isinstance(value, Decimal | float | int) and not isinstance(value, bool):
        number = float(value)
        return "nan" if math.isnan(number) else float(f"{number + 0.0:.9g}") + 0.0
    if isinstance(value, datetime) and value.time() == datetime.min.time():
        return value.date()
    return value


def check(query: str, duck: duckdb.DuckDBPyConnection, workers: int = 1) -> None:
    want = duck.sql(query).to_arrow_table()
    got = si.sql(query, **TABLES).collect(workers=workers)
    assert got.num_columns == want.num_columns
    assert rows(got) == rows(want), query
    if " order by " in query.rpartition(")")[2]:
        ordered = [[_plain(value) for value in table.column(0).to_pylist()] for table in (got, want)]
        assert ordered[0] == ordered[1], query


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_is_duckdbs(query: str, duck: duckdb.DuckDBPyConnection) -> None:
    check(query, duck)


@pytest.mark.parametrize("number", range(34))
def test_a_random_query_is_duckdbs(number: int, duck: duckdb.DuckDBPyConnection, pytestconfig: pytest.Config) -> None:
    """The same queries every time, and two that follow from the run's --hypothesis-seed."""
    seed = number if number < 32 else number + 1000 * int(pytestconfig.getoption("--hypothesis-seed"))
    random = Random(seed)
    query, workers = random_query(random), random.randint(1, 3)
    try:
        check(query, duck, workers)
    except Exception as error:
        raise AssertionError(f"the query of the seed {seed}: {query}") from error
