"""Text of Parquet files with few different values is read as dictionaries by bounded runs, which shows nowhere."""

from __future__ import annotations

from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import scalein as si
from scalein import col
from scalein.connectors.formats.parquet import coded_columns
from tests.sql.test_queries import rows

N = 6_000


def table(seed: int, few: tuple[str, ...], text: pa.DataType) -> pa.Table:
    random = np.random.default_rng(seed)
    gaps = random.random(N) < 0.1
    return pa.table({
        "k": random.integers(0, 50, N), "x": np.arange(N) + seed * N,
        "few": pa.array(np.array(few)[random.integers(0, len(few), N)], pa.string()).cast(text),
        "gaps": pa.array(np.array(few)[random.integers(0, len(few), N)], pa.string(), mask=gaps).cast(text),
        "many": pa.array([f"value {n} of {seed}" for n in range(N)], pa.string()).cast(text)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files whose text has other values, other types, and in the last one a value for each row."""
    root = tmp_path_factory.mktemp("coded")
    tables = [table(0, ("a", "bb", "ü"), pa.string_view()), table(1, ("bb", "c"), pa.string())]
    tables += [tables[0].slice(0, 0), tables[1].slice(0, 100)]
    tables += [table(4, ("d",), pa.large_string()), table(5, ("a", "c"), pa.dictionary(pa.int32(), pa.string()))]
    last = tables[1].slice(0, 500)
    tables.append(last.set_column(2, "few", pa.array([f"each {n}" for n in range(500)])))
    for number, each in enumerate(tables):
        pq.write_table(each, root / f"{number}.parquet", row_group_size=2_500)
    return root


QUERIES = [
    "SELECT few, gaps, count(*) AS n, sum(x) AS s, max(gaps) AS hi, min(many) AS lo FROM t GROUP BY few, gaps",
    "SELECT x, few, gaps, many FROM t WHERE few IN ('a', 'd') AND gaps <> 'c' AND k = 7",
    "SELECT DISTINCT gaps FROM t", "SELECT few || coalesce(gaps, '-') AS j, upper(few) AS u FROM t WHERE k < 3",
    "SELECT a.x, b.few FROM t a JOIN t b ON a.few = b.gaps AND a.x = b.x",
    "SELECT few, x FROM t WHERE gaps IS NULL ORDER BY few, x LIMIT 40",
    "SELECT gaps AS g FROM t WHERE x < 100 UNION ALL SELECT 'other' AS g UNION ALL SELECT many AS g FROM t WHERE x > 9 "
    "AND x < 12",
    "SELECT count(*) AS n FROM t WHERE few LIKE 'each 1%' AND many NOT IN (SELECT many FROM t WHERE few = 'a')"]


@pytest.mark.parametrize("memory", [None, "64MB"])
def test_results_are_those_of_plain_text(folder: Path, memory: str | None) -> None:
    flow, connection = si.read_parquet(folder), duckdb.connect(config={"threads": 1})
    connection.execute(f"CREATE VIEW t AS SELECT * FROM read_parquet('{folder}/*.parquet')")
    for query in QUERIES if memory is None else QUERIES[:2]:
        got, want = si.sql(query, t=flow).collect(workers=2, memory=memory), connection.sql(query).to_arrow_table()
        assert rows(got) == rows(want), query
        assert not any(pa.types.is_dictionary(field.type) for field in got.schema), query


def test_columns_with_few_values_in_all_row_groups_are_dictionaries(folder: Path) -> None:
    assert coded_columns(str(folder / "0.parquet")) == {"few", "gaps"}
    assert coded_columns(str(folder / "6.parquet")) == {"gaps"}
    flow = si.read_parquet(folder)
    coded = flow.op.data.with_dictionaries().schema
    assert [field.name for field in coded if pa.types.is_dictionary(field.type)] == ["few", "gaps"]


@pytest.mark.parametrize(("name", "text"), [("0", pa.string_view()), ("1", pa.string())])
def test_schema_and_python_functions_see_text(folder: Path, name: str, text: pa.DataType) -> None:
    flow = si.read_parquet(str(folder / f"{name}.parquet"))
    assert flow.schema.field("few").type == text
    seen = []

    def look(batch: pa.RecordBatch) -> pa.RecordBatch:
        seen.append(batch.schema.field("few").type)
        return batch

    result = flow.select("few", "x").map_batches(look, {"few": text, "x": pa.int64()}).collect()
    assert set(seen) == {text}
    assert result.num_rows == N
    batches = list(flow.filter(col("k") == 3).batches())
    assert {batch.schema.field("gaps").type for batch in batches} == {text}
