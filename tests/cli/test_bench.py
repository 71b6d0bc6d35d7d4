"""`scalein bench nexmark`: times queries, and compares their rows with DuckDB's first."""

from __future__ import annotations

import pyarrow as pa
import pytest

from scalein import nexmark
from scalein.cli import bench
from scalein.cli.main import main
from scalein.errors import InternalError


def test_times_queries_beside_duckdb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "nexmark", "--events", "5000", "--queries", "q2,q12", "--duckdb", "--jobs"]) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0].split("  ")[0] == "query"
    assert [line.split()[0] for line in lines[2:4]] == ["q2", "q12"]
    assert len(lines[2].split()) == 7
    assert lines[-1].startswith("geometric mean: ")
    assert "5,000 events" in shown.err


def test_rows_that_differ_from_duckdb_are_reported() -> None:
    data = nexmark.tables(events=5000)
    connection = bench.connect(data, 1)
    ours = connection.sql(nexmark.QUERIES["q17"].duckdb).to_arrow_table()
    bench.check_same(connection, "q17", ours.sort_by("auction"), ours)
    prices = ours["avg_price"].to_numpy().copy()
    prices[7] += 1
    for wrong in (ours.slice(1), pa.concat_tables([ours.slice(1), ours.slice(2, 1)]),
                  ours.set_column(ours.schema.get_field_index("avg_price"), "avg_price", pa.array(prices))):
        with pytest.raises(InternalError, match="q17 of Nexmark differs from DuckDB"):
            bench.check_same(connection, "q17", wrong, ours)


@pytest.mark.parametrize(("options", "says"), [
    (["--queries", "q2,q99"], "Nexmark has no query 'q99'"), (["--events", "0"], "--events must be above 0"),
])  # fmt: skip
def test_wrong_options_are_named(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "nexmark", *options]) == 1
    assert says in capsys.readouterr().err
