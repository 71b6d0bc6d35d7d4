"""Nexmark's queries: as flows and in SQL the rows of DuckDB, and as jobs and on Spark those of `collect`."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import scalein as si
from scalein import nexmark
from scalein.errors import BadArgument
from tests.jobs.streams import cut
from tests.same import assert_same

# 40 s of events, over midnight; a twentieth of the default rate, so that auctions last for seconds.
DATA = nexmark.tables(events=20_000, seed=2, rate=500, out_of_order=100, start=datetime(2024, 1, 1, 23, 59, 40))
SMALL = nexmark.tables(events=6_000, seed=4, rate=200)
ROUNDING = 1e-9
ON_SPARK = ("q2", "q12", "q14", "q17", "q21")  # of one input
SQL_ON_SPARK = ("q5", "q9")  # with several aggregations, a rank and joins
# Over endless streams these have no final rows: each bid may change the place, or the maximum, of those before.
NEVER_FINAL = {"q4": "has no final result",
               **dict.fromkeys(("q6", "q9", "q18", "q19"), "have no order, or no last row")}


class Endless:
    """The rows of a table, as a source that may have more; a job ends with it nevertheless."""

    bounded, replays = False, True

    def __init__(self, table: pa.Table, sizes: list[int]) -> None:
        self.schema, self.batches = table.schema, cut(table, sizes)

    def partitions(self) -> list[str]:
        return ["all"]

    def read(self, partition: str, offset: Any) -> Iterator[tuple[pa.RecordBatch, int]]:
        for number, batch in enumerate(self.batches):
            if number >= (offset or 0):
                yield batch, number + 1


@pytest.fixture(scope="module")
def duck() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(config={"threads": 1})
    for name, table in zip(DATA._fields, DATA, strict=True):
        connection.register(name, table)
    connection.register("side_input", nexmark.side_input())
    return connection


@pytest.mark.parametrize("name", nexmark.QUERIES)
def test_a_query_gives_the_rows_of_duckdb_also_as_a_job(name: str, duck: duckdb.DuckDBPyConnection) -> None:
    random = Random(name)
    flow = nexmark.flow(name, DATA)
    got = flow.collect(workers=random.randint(1, 3))
    assert got.num_rows > 0
    assert_same(got, in_duckdb(duck, name, got.schema), tolerance=ROUNDING)

    sizes = [random.randint(1, 9000) for _ in range(3)]
    streams = nexmark.Streams(*(si.from_batches(cut(table, sizes), table.schema).with_watermark(
        "dateTime", nexmark.DELAY) for table in DATA))
    out = si.to_memory()
    job = nexmark.flow(name, streams).start(sink=out, workers=random.randint(1, 2))
    job.wait()
    assert job.metrics()["late_rows"] == 0
    assert_same(out.table(), got, tolerance=ROUNDING)


@pytest.mark.parametrize("name", nexmark.QUERIES)
def test_the_sql_of_a_query_gives_the_rows_of_duckdb(name: str, duck: duckdb.DuckDBPyConnection) -> None:
    pytest.importorskip("sqlglot", reason="SQL needs sqlglot: pip install 'scalein[sql]'")
    got = nexmark.flow_of_sql(name, SMALL).collect()
    assert got.num_rows > 0
    for kind, table in zip(SMALL._fields, SMALL, strict=True):
        duck.register(kind, table)
    try:
        assert_same(got, in_duckdb(duck, name, got.schema), tolerance=ROUNDING)
    finally:
        for kind, table in zip(DATA._fields, DATA, strict=True):
            duck.register(kind, table)


@pytest.mark.parametrize("is_endless", [False, True], ids=["bounded", "endless"])
@pytest.mark.parametrize("name", nexmark.QUERIES)
def test_the_sql_of_a_query_runs_as_a_job(name: str, is_endless: bool) -> None:
    """Bounded or not, the rows are those of `collect`; where there can be no final rows, that is said."""
    pytest.importorskip("sqlglot", reason="SQL needs sqlglot: pip install 'scalein[sql]'")
    random = Random(name)
    sizes = [random.randint(1, 4000) for _ in range(3)]
    sources = (si.from_source(Endless(table, sizes)) if is_endless else
               si.from_batches(cut(table, sizes), table.schema) for table in SMALL)
    inputs = nexmark.Streams(*(source.with_watermark("dateTime", nexmark.DELAY) for source in sources))
    out = si.to_memory()
    if is_endless and name in NEVER_FINAL:
        with pytest.raises(BadArgument, match=NEVER_FINAL[name]):
            nexmark.flow_of_sql(name, inputs).start(sink=out)
        return
    job = nexmark.flow_of_sql(name, inputs).start(sink=out, workers=random.randint(1, 2))
    job.wait(timeout=120)
    assert job.metrics()["late_rows"] == 0
    assert_same(out.table(), nexmark.flow_of_sql(name, SMALL).collect(), tolerance=ROUNDING)


def in_duckdb(duck: duckdb.DuckDBPyConnection, name: str, schema: pa.Schema) -> pa.Table:
    found = duck.sql(nexmark.QUERIES[name].duckdb).to_arrow_table()
    assert found.column_names == schema.names
    return found.cast(schema.remove_metadata())


def test_unknown_queries_get_a_guess() -> None:
    with pytest.raises(BadArgument, match="did you mean 'q22'"):
        nexmark.flow("q122", DATA)


@pytest.mark.parametrize("name", [*ON_SPARK, *SQL_ON_SPARK])
def test_a_query_runs_on_spark(name: str, spark: Any, tmp_path: Path) -> None:
    import scalein.spark as sis

    for kind, table in zip(DATA._fields, DATA, strict=True):
        pq.write_table(table, tmp_path / f"{kind}.parquet")
    files = nexmark.Streams(*(si.read_parquet(str(tmp_path / f"{kind}.parquet")) for kind in DATA._fields))
    made = nexmark.flow_of_sql if name in SQL_ON_SPARK else nexmark.flow
    got = sis.run(made(name, files), spark).toArrow()
    want = made(name, DATA).collect()
    assert_same(got.cast(want.schema), want, tolerance=ROUNDING)


def test_groups_of_windows_are_final_over_endless_streams() -> None:
    """The most bids of each window come when it is over, and so does who has them."""
    inputs = nexmark.Streams(*(si.from_source(Endless(table, [900, 2000])).with_watermark("dateTime", nexmark.DELAY)
                               for table in SMALL))
    out = si.to_memory()
    job = nexmark.flow("q5", inputs).start(sink=out)
    job.wait(timeout=120)
    assert job.metrics()["late_rows"] == 0
    assert_same(out.table(), nexmark.flow("q5", SMALL).collect())
