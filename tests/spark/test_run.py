"""run: flows bound to files, read by Spark's tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import scalein as si
import scalein.spark as sis
from scalein import Flow, col
from scalein.connectors.formats import parquet
from scalein.errors import BadArgument
from scalein.spark.batch import scan
from tests.spark.flows import FLOWS, ORDERED, rows
from tests.spark.test_apply import same

NAMES = ("join_group", "join_outer_group", "all", "unique", "sliding", "union_static", "sort", "top_k",
         "expressions")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of many row groups, of one, and of none."""
    path = tmp_path_factory.mktemp("rows")
    table = rows()
    pq.write_table(table.slice(0, 2000), path / "a.parquet", row_group_size=100)
    pq.write_table(table.slice(2000), path / "b.parquet")
    pq.write_table(table.slice(0, 0), path / "c.parquet")
    return path


@pytest.mark.parametrize("name", NAMES)
def test_run_gives_the_rows_of_collect(name: str, spark: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # On the driver only: tasks would cut files otherwise, and still read their splits.
    monkeypatch.setattr(parquet, "_SPLIT_ROWS", 300)
    q = {**FLOWS, **ORDERED}[name](si.read_parquet(folder))
    same(sis.run(q, spark), q.collect(), ordered=name in ORDERED)


def test_splits_are_balanced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_SPLIT_ROWS", 300)
    source = si.read_parquet(folder).op.data.source  # type: ignore[union-attr]
    splits, sizes = scan.file_splits(source)
    assert len(splits) == 8
    tasks = scan.assign_splits(splits, sizes, 3)
    assert sorted(split for task in tasks for split in task) == sorted(splits)
    size_of = dict(zip(splits, sizes, strict=True))
    weights = [sum(size_of[split] for split in task) for task in tasks]
    assert max(weights) - min(weights) <= max(sizes)


def test_sizes_are_those_of_columns_read(tmp_path: Path) -> None:
    """Sizes count the columns that a flow needs, whatever their names are."""
    rng = np.random.default_rng(1)
    table = pa.table({"a.b": np.arange(10_000) % 2, "c": rng.random(10_000), "s": [{"x": k} for k in range(10_000)]})
    pq.write_table(table, tmp_path / "a.parquet")
    fractions = [scan._read_fraction(str(tmp_path / "a.parquet"), names) for names in (["a.b"], ["c"], ["s"])]
    assert 0 < fractions[0] < fractions[2] < fractions[1]
    assert sum(fractions) == pytest.approx(1)


def test_other_formats_and_sources(spark: Any, tmp_path: Path) -> None:
    table = rows(300).select(["n", "i", "s"])
    (tmp_path / "csv").mkdir()
    (tmp_path / "json").mkdir()
    (tmp_path / "ipc").mkdir()
    for k in range(3):
        part = table.slice(k * 100, 100)
        pyarrow.csv.write_csv(part, tmp_path / "csv" / f"{k}.csv")
        (tmp_path / "json" / f"{k}.json").write_text("\n".join(json.dumps(row) for row in part.to_pylist()))
        with pa.ipc.new_file(str(tmp_path / "ipc" / f"{k}.arrow"), table.schema) as writer:
            writer.write_table(part)

    class Squares:
        schema = pa.schema({"n": pa.int64()})

        def partitions(self) -> list[str]:
            return ["0", "1"]

        def read(self, partition: str, offset: Any) -> Any:
            for n in range(offset or 0, 3):
                yield pa.record_batch({"n": [n * n + int(partition)]}), n + 1

    flows: list[Flow] = [si.read_csv(tmp_path / "csv"), si.read_json(tmp_path / "json"), si.read_ipc(tmp_path / "ipc"),
                         si.from_arrow(table), si.from_source(Squares())]
    for flow in flows:
        q = flow.group_by(m=col("n") % 7).agg(c=si.count(), s=col("n").sum())
        same(sis.run(q, spark), q.collect())


def test_partitioned_folders(spark: Any, tmp_path: Path) -> None:
    """The columns, types and rows that Spark reads; files that a filter rules out are not opened."""
    table = rows(300).select(["n", "i"])
    for k, folder in enumerate(["s=a%2Fb/d=2024-02-28/m=01", "s=__HIVE_DEFAULT_PARTITION__/d=2024-02-29/m=02",
                                "s=é/d=__HIVE_DEFAULT_PARTITION__/m=3000000000"]):  # fmt: skip
        (tmp_path / folder).mkdir(parents=True)
        pq.write_table(table.slice(k * 100, 100), tmp_path / folder / "a.parquet", row_group_size=40)
    flow, df = si.read_parquet(tmp_path), spark.read.parquet(str(tmp_path))
    same(sis.run(flow, spark), df.toArrow().cast(flow.schema))
    assert flow.schema.names == df.columns
    q = flow.group_by("s", "d").agg(c=si.count(), n=col("n").sum())
    same(sis.run(q, spark), q.collect())
    same(sis.run(flow.group_by("n", "m").agg(c=si.count()), spark), flow.group_by("n", "m").agg(c=si.count()).collect())
    (tmp_path / "s=é" / "d=__HIVE_DEFAULT_PARTITION__" / "m=3000000000" / "a.parquet").write_bytes(b"damaged")
    q = flow.filter(col("m") < 9).group_by("m").agg(c=si.count())
    assert sorted(map(tuple, sis.run(q, spark).collect())) == [(1, 100), (2, 100)]


def test_only_partial_groups_are_shuffled(spark: Any, folder: Path) -> None:
    """Rows are read in the Python workers: Spark itself scans no file."""
    q = si.read_parquet(folder).group_by("k").agg(n=si.count())
    plan = sis.run(q, spark)._jdf.queryExecution().toString()
    assert "parquet" not in plan.lower()
    assert "Range" in plan


def test_many_groups_are_not_shuffled(spark: Any, tmp_path: Path) -> None:
    """Each task reads all files for the rows of its own keys; few groups are shuffled as partial groups."""
    rng = np.random.default_rng(5)
    count = 30_000
    table = pa.table({"i": pa.array(rng.permutation(count), mask=rng.random(count) < 0.001),
                      "f": rng.choice([0.0, -0.0, float("nan"), 1.5], count), "few": rng.integers(0, 9, count),
                      "x": rng.integers(-99, 99, count)})  # fmt: skip
    for number in range(3):
        pq.write_table(table.slice(number * 10_000, 10_000), tmp_path / f"{number}.parquet", row_group_size=4_000)
    events = si.read_parquet(tmp_path).filter(col("x") > -50)
    aggs = {"n": si.count(), "s": col("x").sum(), "u": col("few").n_unique()}
    for keys, is_shuffled in ((("i", "f"), False), (("few",), True), (((col("i") + 1).alias("computed"), "f"), True)):
        q = events.group_by(*keys).agg(**aggs).filter(col("s") != 3)
        df = sis.run(q, spark)
        same(df, q.collect())
        assert ("Exchange" in df._jdf.queryExecution().toString()) == is_shuffled, keys


def test_refused_flows(spark: Any, folder: Path) -> None:
    with pytest.raises(BadArgument, match="has no data yet"):
        sis.run(si.flow({"x": pa.int64()}), spark)
    with pytest.raises(BadArgument, match="never ends"):
        sis.run(si.read_parquet(folder, follow=True), spark)
    with pytest.raises(BadArgument, match="in this order"):
        sis.run(spark, si.read_parquet(folder))
    with pytest.raises(BadArgument, match="limit depends on the order"):
        sis.run(si.read_parquet(folder).limit(3), spark)


def test_a_missing_file_is_reported(spark: Any, tmp_path: Path) -> None:
    pq.write_table(rows(10), tmp_path / "a.parquet")
    df = sis.run(si.read_parquet(tmp_path).select("n"), spark)
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(Exception, match=r"a\.parquet is gone"):
        df.collect()
