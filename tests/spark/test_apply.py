"""apply on DataFrames: the rows of `collect`, and of Spark SQL where it can express the flow."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import scalein as si
import scalein.spark as sis
from scalein import col, lit
from scalein.errors import NOWHERE, BadArgument, BadData, WrongType
from scalein.spark.types import spark_arrow_schema, spark_schema
from tests import test_readme
from tests.same import assert_same
from tests.spark.flows import ADS, FLOWS, ORDERED, ROWS, SQL, rows


def as_spark(table: pa.Table) -> pa.Table:
    """A result in Spark's types."""
    return table.cast(spark_arrow_schema(table.schema, NOWHERE))


def from_spark(df: Any) -> pa.Table:
    """A DataFrame's rows; nullability is ignored."""
    table = df.toArrow()
    plain = spark_arrow_schema(table.schema, NOWHERE)
    return table.cast(pa.schema([field.with_nullable(True) for field in plain]))


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return rows()


@pytest.fixture(scope="module")
def df(spark: Any, table: pa.Table) -> Any:
    """Seven partitions, one of which is empty, one of which has most rows."""
    whole = spark.createDataFrame(table)
    few, none = whole.filter("n < 10").coalesce(1), whole.filter("n < 0").coalesce(1)
    found = few.unionAll(none).unionAll(whole.filter("n >= 10").repartition(5)).cache()
    found.createOrReplaceTempView("rows")
    spark.createDataFrame(ADS).createOrReplaceTempView("ads")
    assert found.count() == ROWS
    return found


def same(got: Any, want: pa.Table, ordered: bool = False) -> None:
    found, wanted = from_spark(got), as_spark(want)
    assert_same(found, wanted.cast(found.schema), ordered=ordered, tolerance=1e-9)


# By default as many as CI has time for, each kind of plan among them; SCALEIN_SPARK_FLOWS=all runs every flow.
SOME = ("filter", "made_text", "structs", "text_key", "decimals", "udf",
        "map_batches", "explode_count", "join_left", "join_right",
        "join_outer", "join_group", "each", "keys", "unique", "distinct", "tumbling_zone", "window_rows", "chained",
        "union_group", "sorted_then", "overs", "tumbling_expressions",
        "empty_all")  # fmt: skip
SOME_ORDERED = ("sort_nulls_last", "top_groups")
SOME_SQL = ("nan_filter", "made_text", "rowwise", "text_key", "join_anti", "all", "each", "float_key", "sliding")
ALL = os.environ.get("SCALEIN_SPARK_FLOWS") == "all"


@pytest.mark.parametrize("name", FLOWS if ALL else SOME)
def test_apply_gives_the_rows_of_collect(name: str, df: Any, table: pa.Table) -> None:
    q = FLOWS[name](si.flow(table.schema))
    same(sis.apply(q, df), q.collect(table))


@pytest.mark.parametrize("name", ORDERED if ALL else SOME_ORDERED)
def test_apply_keeps_the_order_of_a_sort(name: str, df: Any, table: pa.Table) -> None:
    q = ORDERED[name](si.flow(table.schema))
    same(sis.apply(q, df), q.collect(table), ordered=True)


@pytest.mark.parametrize("name", SQL if ALL else SOME_SQL)
def test_spark_sql_gives_the_same(name: str, spark: Any, df: Any, table: pa.Table) -> None:
    q = {**FLOWS, **ORDERED}[name](si.flow(table.schema))
    want = from_spark(spark.sql(SQL[name]))
    got = as_spark(q.collect(table))
    assert_same(got.cast(want.schema), want, tolerance=1e-9)


def test_a_dataframe_without_rows(spark: Any, df: Any, table: pa.Table) -> None:
    none = spark.createDataFrame([], df.schema)
    for name in ("filter", "all", "unique_all", "chained", "union_group", "join_outer", "sort", "top_k"):
        q = {**FLOWS, **ORDERED}[name](si.flow(table.schema))
        same(sis.apply(q, none), q.collect(table.slice(0, 0)))


def test_transform(df: Any, table: pa.Table) -> None:
    q = FLOWS["each"](si.flow(table.schema))
    same(df.transform(lambda df: sis.apply(q, df)), q.collect(table))
    same(df.transform(sis.apply, q), q.collect(table))


def test_a_flow_of_sparks_schema(df: Any, table: pa.Table) -> None:
    q = si.flow(df.schema).group_by("k", si.tumbling("z", "1m")).agg(n=si.count(), d=col("d").max())
    assert dict(sis.apply(q, df).dtypes)["window_start"] == "timestamp"
    same(sis.apply(q, df), q.collect(table.set_column(5, "t", table["t"].cast(pa.timestamp("us", "UTC")))))


@pytest.fixture
def in_zone(spark: Any) -> Iterator[Callable[[str], None]]:
    """Sets the session's time zone."""
    yield lambda zone: spark.conf.set("spark.sql.session.timeZone", zone)
    spark.conf.set("spark.sql.session.timeZone", "UTC")


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Kolkata", "GMT+8", "-03:30", "Etc/UTC"])
def test_a_clock_is_read_in_the_sessions_time_zone(spark: Any, in_zone: Callable[[str], None], zone: str) -> None:
    """Across the beginning and the end of summer time."""
    in_zone(zone)
    starts = [datetime(2024, 3, 9, 23, 30, tzinfo=UTC), datetime(2024, 11, 2, 1, 15, tzinfo=UTC)]
    times = [(start + timedelta(hours=k),) for start in starts for k in range(48)]
    df = spark.createDataFrame(times, "t timestamp")
    assert si.flow(df.schema).schema.field("t").type.tz in (zone, "+08:00", "UTC")
    t = col("t").dt
    q = si.flow(df.schema).select("t", y=t.year(), m=t.month(), d=t.day(), h=t.hour(), mi=t.minute(), w=t.weekday(),
                                  n=t.ordinal_day(), day=t.truncate("1d"), text=col("t").cast(pa.string()))
    want = df.selectExpr("t", "year(t) y", "month(t) m", "day(t) d", "hour(t) h", "minute(t) mi",
                         "weekday(t) + 1 w", "dayofyear(t) n", "date_trunc('DAY', t) day")  # fmt: skip
    got = from_spark(sis.apply(q, df)).drop("text").sort_by("t")
    assert got.to_pylist() == from_spark(want).sort_by("t").to_pylist()


def test_a_time_without_a_zone_has_the_same_clock_in_every_session(spark: Any, in_zone: Callable[[str], None]) -> None:
    in_zone("America/New_York")
    data = pa.table({"t": pa.array([datetime(2024, 3, 11, 3, 30), datetime(2024, 7, 1)], pa.timestamp("us"))})
    q = si.flow(data.schema).select(h=col("t").dt.hour(), t="t")
    df = spark.createDataFrame(data, schema=spark_schema(data.schema, NOWHERE))
    same(sis.apply(q, df), q.collect(data))
    with pytest.raises(WrongType, match="time zone America/New_York"):
        sis.apply(q, df.selectExpr("cast(t as timestamp) t"))
    with pytest.raises(Exception, match="time zone America/New_York"):
        df.selectExpr("cast(t as timestamp) t").mapInArrow(q.map_in_arrow, sis.schema(q)).collect()


def test_collated_text_is_refused(spark: Any) -> None:
    df = spark.sql("select s, s collate UTF8_LCASE as c from values ('a'), ('A') as t(s)")
    with pytest.raises(WrongType, match="column 'c' has the collation UTF8_LCASE"):
        si.flow(df.schema)
    q = si.flow({"c": pa.string()}).group_by("c").agg(n=si.count())
    with pytest.raises(WrongType, match="column 'c' has the collation UTF8_LCASE"):
        sis.apply(q, df)
    for plain in (df.selectExpr("c collate UTF8_BINARY as c"), df.selectExpr("cast(c as string) as c")):
        assert sis.apply(q, plain).count() == 2
    assert sis.apply(si.flow(df.select("s").schema), df).count() == 2


def test_filters_of_collated_columns_stay_with_spark(spark: Any, tmp_path: Path) -> None:
    """Also where tasks could read the files themselves."""
    df = spark.sql("select s, s collate UTF8_LCASE as c from values ('a'), ('A'), ('b') as t(s)")
    df.write.parquet(str(tmp_path / "files"))
    stored = spark.read.parquet(str(tmp_path / "files"))
    assert dict(stored.dtypes)["c"] == "string collate UTF8_LCASE"
    filtered = stored.filter("c = 'a'").select("s")
    q = si.flow(filtered.schema).group_by("s").agg(n=si.count())
    assert sorted(row["s"] for row in sis.apply(q, filtered).collect()) == ["A", "a"]


def test_another_time_zone_of_the_session(spark: Any, df: Any, table: pa.Table) -> None:
    """A flow whose own schema says UTC reads the clock in UTC; the session's time zone does not change instants."""
    q = si.flow(table.schema).group_by("k").agg(z=col("z").max(), h=col("z").dt.hour().max())
    spark.conf.set("spark.sql.session.timeZone", "America/St_Johns")
    try:
        got = sis.apply(q, df).toArrow()
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    want = as_spark(q.collect(table))
    assert_same(got.cast(want.schema), want)


def test_a_spark_timestamp_is_a_naive_time_in_utc(spark: Any) -> None:
    times = pa.table({"t": pa.array([0, 61_000_000, None], pa.timestamp("us", "UTC")), "v": [1, 2, 3]})
    q = si.flow({"t": pa.timestamp("ms"), "v": pa.int64()}).group_by(si.tumbling("t", "1m")).agg(s=col("v").sum())
    got = sis.apply(q, spark.createDataFrame(times)).toArrow()
    assert sorted(got["window_start"].cast(pa.int64()).to_pylist()) == [0, 60_000_000]


def test_types_that_spark_does_not_have(spark: Any) -> None:
    q = si.flow({"k": pa.int64()}).select(
        a=col("k").cast(pa.uint8()), b=col("k").cast(pa.uint64()), c=col("k").cast(pa.timestamp("s")),
        d=col("k").cast(pa.large_string()), e=col("k").cast(pa.uint32()))
    data = pa.table({"k": [1, 200, None]})
    got = sis.apply(q, spark.createDataFrame(data))
    assert got.dtypes == [("a", "smallint"), ("b", "decimal(20,0)"), ("c", "timestamp_ntz"), ("d", "string"),
                          ("e", "bigint")]
    same(got, q.collect(data))
    narrow = si.flow({"a": pa.uint8()}).group_by("a").agg(n=si.count())  # and back
    same(sis.apply(narrow, got.select("a")), narrow.collect(q.collect(data).select(["a"])))


def test_odd_names(spark: Any) -> None:
    data = pa.table({"a.b": [1, 2, 2], "c d": ["x", "y", "z"], "`": [1.0, 2.0, 3.0], "c0": [7, 8, 9]})
    f = si.flow(data.schema)
    for q in (f.filter(col("a.b") > 1).select("`", **{"a.b": col("a.b")}), f.sort("c d").select(**{"x.y": col("a.b")}),
              f.group_by("a.b").agg(**{"n.n": si.count(), "m": col("`").sum()}), f.sort("a.b", "`")):
        same(sis.apply(q, spark.createDataFrame(data)), q.collect(data))
    bound = si.from_arrow(data).group_by("a.b").agg(n=si.count(), m=col("`").sum())
    same(sis.run(bound, spark), bound.collect())


def test_parquet_dictionaries_do_not_hide_a_zero(spark: Any, tmp_path: Path) -> None:
    """Dictionaries of Parquet files distinguish -0.0 from 0.0."""
    for name, zero in (("minus", -0.0), ("plus", 0.0)):
        data = pa.table({"x": [zero] * 50 + [1.0] * 5})
        pq.write_table(data, tmp_path / name)
        df, f = spark.read.parquet(str(tmp_path / name)), si.flow(data.schema)
        tests = [test for asked in (0.0, -0.0) for test in (
            col("x") == asked, lit(asked) >= col("x"), col("x") >= asked)]
        for flow in (f.filter(test) for test in tests):
            assert sis.apply(flow, df).count() == len(flow.collect(data)), flow


def test_statistics_do_not_hide_nan(spark: Any, tmp_path: Path) -> None:
    """Spark's statistics of a file and of a cached batch ignore NaN."""
    data = pa.table({"x": [1.0, float("nan"), 3.0, None], "y": [1, 2, 3, 4]})
    pq.write_table(data, tmp_path / "some.parquet")
    stored, cached = spark.read.parquet(str(tmp_path / "some.parquet")), spark.createDataFrame(data).cache()
    f = si.flow(data.schema)
    for q in (f.filter(col("x") > 5.0), f.filter(si.lit(5.0) <= col("x")), f.filter(~(col("x") < 5.0)),
              f.filter(col("x") != 3.0), f.filter(col("x") == float("nan")), f.filter(col("x") < 5.0)):  # fmt: skip
        for df in (stored, cached):
            same(sis.apply(q, df), q.collect(data))
    cached.unpersist()


def test_many_groups(spark: Any) -> None:
    data = pa.table({"k": [k % 5000 for k in range(20_000)], "v": list(range(20_000))})
    q = si.flow(data.schema).group_by("k").agg(s=col("v").sum(), n=si.count())
    same(sis.apply(q, spark.createDataFrame(data).repartition(3)), q.collect(data))


# --- refused flows


@pytest.mark.parametrize(("make", "message"), [
    (lambda f: f.limit(3), "limit depends on the order"),
    (lambda f: f.distinct("k"), "distinct of some columns"),
    (lambda f: f.group_by("k").agg(col("s").first()), "first depends on the order"),
    (lambda f: f.group_by("k").agg(col("s").last()), "last depends on the order"),
    (lambda f: f.group_by("k").agg(col("s").collect()), "collect depends on the order"),
])  # fmt: skip
def test_what_needs_an_order_is_refused(make: Any, message: str, df: Any, table: pa.Table) -> None:
    with pytest.raises(BadArgument, match=message) as raised:
        sis.apply(make(si.flow(table.schema)), df)
    assert raised.value.hint
    assert "test_apply.py" in str(raised.value)


def test_a_missing_column_is_refused(df: Any) -> None:
    with pytest.raises(BadData, match="no column 'kk'") as raised:
        sis.apply(si.flow({"kk": pa.int64()}), df)
    assert "did you mean 'k'" in str(raised.value)


def test_a_column_of_another_type_is_refused(df: Any) -> None:
    with pytest.raises(WrongType, match="'k' of the DataFrame is bigint, but the flow's schema says int32"):
        sis.apply(si.flow({"k": pa.int32()}), df)


def test_nulls_in_a_column_declared_without_nulls(df: Any) -> None:
    q = si.flow(pa.schema([pa.field("k", pa.int64(), nullable=False)])).group_by().agg(s=col("k").sum())
    with pytest.raises(Exception, match="has nulls, but the flow's schema says"):
        sis.apply(q, df).collect()


def test_wrong_arguments_are_refused(table: pa.Table, df: Any) -> None:
    with pytest.raises(BadArgument, match=r"takes a Spark DataFrame(.|\n)*found  pyarrow.Table"):
        sis.apply(si.flow(table.schema), table)  # type: ignore[arg-type]
    with pytest.raises(BadArgument, match="a flow and a DataFrame"):
        sis.apply(df, df)
    with pytest.raises(BadArgument, match="has its data already"):
        sis.apply(si.from_arrow(table), df)
    f = si.flow(table.schema)
    with pytest.raises(BadArgument, match="static side has no data"):
        sis.apply(f.join(f.group_by("k").agg(n=si.count()), on="k"), df)


def test_a_stream_is_refused_where_rows_must_meet(spark: Any) -> None:
    stream = spark.readStream.format("rate").load()
    q = si.flow({"value": pa.int64()})
    assert sis.apply(q.filter(col("value") > 1), stream).isStreaming
    with pytest.raises(BadArgument, match="this one is a stream"):
        sis.apply(q.group_by().agg(si.count()), stream)


def test_an_error_in_a_row_keeps_its_message(spark: Any) -> None:
    q = si.flow({"k": pa.int64()}).select(y=col("k") // (col("k") - 1))
    with pytest.raises(Exception, match="ComputeError: division by zero") as raised:
        sis.apply(q, spark.createDataFrame(pa.table({"k": [1, 2]}))).collect()
    assert "test_apply.py" in str(raised.value)


def test_a_users_exception_keeps_its_message(spark: Any) -> None:
    def fails(batch: pa.RecordBatch) -> pa.RecordBatch:
        raise ValueError("no such luck")

    q = si.flow({"k": pa.int64()}).map_batches(fails, {"k": pa.int64()})
    with pytest.raises(Exception, match="no such luck"):
        sis.apply(q, spark.createDataFrame(pa.table({"k": [1, 2]}))).collect()


def test_simple_filters_and_projections_are_pushed_to_spark(df: Any, table: pa.Table) -> None:
    q = si.flow(table.schema).filter(col("k") == 2, col("x") * 2 > 1).group_by("s").agg(n=si.count())
    plan = sis.apply(q, df)._jdf.queryExecution().optimizedPlan().toString()
    assert "(k#" in plan.split("MapInArrow")[-1]
    assert "Project [s#" in plan or "x#" in plan
    assert "day#" not in plan.split("InMemoryRelation")[0]


def test_the_code_of_the_readme_for_pyspark(spark: Any) -> None:
    """Analysed, not run: names and arguments are right, and the columns those of the flow beside it."""
    from pyspark.sql import functions

    names = {"F": functions, "si": si, "col": col, "flow": si.from_arrow(test_readme.ROWS)}
    df, shops = (spark.createDataFrame(pd.DataFrame(rows)) for rows in (test_readme.ROWS, test_readme.SHOPS))
    for _, _, in_spark, here in test_readme.HABITS:
        found = eval(f"df{in_spark}", {**names, "df": df, "shops": shops})
        want = eval(f"flow{here}", {**names, "shops": test_readme.SHOPS})
        assert "tumbling" in here or sorted(found.columns) == sorted(want.columns), in_spark
