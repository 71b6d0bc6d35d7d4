"""Aggregations of `apply` that stay with Spark: the same groups as compiled ones, and no row leaves the JVM."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

import scalein as si
import scalein.spark as sis
from scalein import Flow, col
from scalein.errors import NOWHERE, ComputeError
from scalein.spark.errors import translate_errors
from scalein.spark.types import spark_schema
from tests.spark.flows import ADS, FLOWS, rows
from tests.spark.test_apply import as_spark, from_spark, same

MAX = (1 << 63) - 1


def plan(df: Any) -> str:
    return str(df._jdf.queryExecution().optimizedPlan().toString())


def leaves_the_jvm(df: Any) -> bool:
    return "MapInArrow" in plan(df)


def frame(spark: Any, table: pa.Table) -> Any:
    """A DataFrame of three partitions; a time without a zone is a TIMESTAMP_NTZ."""
    return spark.createDataFrame(table, schema=spark_schema(table.schema, NOWHERE)).repartition(3)


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return rows()


@pytest.fixture(scope="module")
def df(spark: Any, table: pa.Table) -> Iterator[Any]:
    found = frame(spark, table).cache()
    yield found
    found.unpersist()


@pytest.fixture(params=["true", "false"])
def ansi(spark: Any, request: pytest.FixtureRequest) -> Iterator[str]:
    """Both ways in which Spark computes: with errors, and without."""
    before = spark.conf.get("spark.sql.ansi.enabled")
    spark.conf.set("spark.sql.ansi.enabled", request.param)
    yield request.param
    spark.conf.set("spark.sql.ansi.enabled", before)


IN_SPARK: dict[str, Any] = {
    **{name: FLOWS[name] for name in ("join_group", "all", "each", "distinct", "tumbling", "tumbling_zone",
                                            "empty")},
    "join_left": lambda f: f.join(ADS, on="k", how="left").group_by("name", "b").agg(n=si.count()),
    "join_semi": lambda f: f.join(ADS, on="k", how="semi").group_by("s").agg(n=si.count()),
    "join_anti": lambda f: f.join(ADS, on="k", how="anti").group_by("day").agg(n=col("k").count()),
    "floats": lambda f: f.group_by("k").agg(s=(col("x") * 2.0 + 0.25).sum(), m=(0.5 - col("x")).mean()),
    "dates": lambda f: f.filter(col("day") <= date(2022, 1, 15), col("day") != date(2022, 1, 10)).group_by("b").agg(
        n=si.count()),
    "instants": lambda f: f.filter(col("z") >= datetime(2023, 11, 14, 22, 16, tzinfo=UTC)).group_by("s").agg(
        n=si.count()),
    "times": lambda f: f.filter(col("t") < datetime(2023, 11, 14, 22, 16, 0, 250)).group_by("s").agg(n=si.count()),
    "before_1970": lambda f: f.filter(col("t") > datetime(1969, 3, 1, 12)).group_by("s").agg(n=si.count()),
    "filtered": lambda f: f.filter(col("i") > 3, col("s") != "a").group_by("d").agg(hi=col("t").max()),
    "renamed": lambda f: f.select(a="k", b="i").group_by("a").agg(m=col("b").mean(), s=col("b").sum()),
    "is_in": lambda f: f.filter(col("s").is_in(["a", "日本"]), ~col("k").is_in([2, 3]) | col("b")).group_by("s").agg(
        n=col("day").is_in([date(2022, 1, 8), date(2022, 1, 12)]).sum(),
        m=si.count().filter(col("i").is_in(list(range(40))))),
    "text_tests": lambda f: f.filter(~col("s").str.ends_with("o")).group_by(
        starts=col("s").str.starts_with("Z"), empty=col("s").str.contains("")).agg(
        n=si.count(), l=col("s").str.contains("ong").sum()),
    "choices": lambda f: f.group_by(
        sign=si.when(col("i") > 0).then(si.lit("plus")).when(col("i") < 0).then(si.lit("minus")).otherwise(None)).agg(
        a=si.when(col("b")).then(col("x")).otherwise(0.5).max(),
        t=si.when(col("x") >= 0.0).then(col("t")).otherwise(None).min(),
        n=si.count().filter(col("x").is_null() | (col("x") == 0.0)), s=col("x").sum().filter(col("i") > 5)),
    "variances": lambda f: f.filter(col("x") <= 1000.0).group_by("s").agg(
        v=col("x").var(), d=col("x").std(), w=col("i").var()),
    "arithmetic": lambda f: f.group_by(k=col("k") * 2 - 1).agg(
        s=(col("i") + 1).sum(), m=(col("n") - col("k")).max(), p=(col("i") * 0.5).sum()),
    "integers": lambda f: f.group_by(si.tumbling("n", 300)).agg(c=si.count(), s=col("n").sum(), m=col("n").mean()),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_SPARK)
def test_spark_gives_the_groups_of_collect(name: str, df: Any, table: pa.Table) -> None:
    q = IN_SPARK[name](si.flow(table.schema))
    got = sis.apply(q, df)
    assert not leaves_the_jvm(got)
    same(got, q.collect(table))


@pytest.mark.parametrize("make", [
    lambda f: f.group_by("x").agg(n=si.count()),
    lambda f: f.group_by("k").agg(s=(col("i") // 2).sum()),
    lambda f: f.group_by("k").agg(s=col("x").is_in([0.0, 1.0]).sum()),
    lambda f: f.group_by("k").agg(s=col("i").is_in([1, None]).sum()),
    lambda f: f.group_by("k").agg(s=((col("b")) & (col("i") * 2 > 1)).sum()),
    lambda f: f.group_by("k").agg(m=col("d").mean()),
    lambda f: f.filter(col("x") * 2 > 1).group_by("k").agg(n=si.count()),
    lambda f: f.group_by("k", si.sliding("t", "2m", every="1m")).agg(n=si.count()),
])  # fmt: skip
def test_what_spark_would_compute_otherwise_is_compiled(make: Any, df: Any, table: pa.Table) -> None:
    q = make(si.flow(table.schema))
    got = sis.apply(q, df)
    assert leaves_the_jvm(got)
    same(got, q.collect(table))


def test_ops_downstream_get_the_groups(df: Any, table: pa.Table) -> None:
    f = si.flow(table.schema)
    for q in (FLOWS["having"](f), FLOWS["chained"](f), FLOWS["distinct_count"](f),
              f.group_by("k").agg(n=si.count()).top_k(4, ["n", "k"])):
        same(sis.apply(q, df), q.collect(table))


def test_no_rows(spark: Any, df: Any, table: pa.Table) -> None:
    none = spark.createDataFrame([], df.schema)
    for make in IN_SPARK.values():
        q = make(si.flow(table.schema))
        same(sis.apply(q, none), q.collect(table.slice(0, 0)))


def by_key(values: list[object], arrow: pa.DataType) -> pa.Table:
    return pa.table({"k": pa.array([0] * len(values), pa.int32()), "x": pa.array(values, arrow)})


def totals(f: Flow) -> Flow:
    return f.group_by("k").agg(s=col("x").sum(), m=col("x").mean(), n=col("x").count())


@pytest.mark.parametrize("values", [
    [MAX, MAX, -MAX, -MAX, 5], [-MAX - 1, 1], [MAX, None], [None, None], [-1, -1, 2], [1 << 40, -(1 << 40), 1 << 31],
    [(1 << 53) + 1, 1 << 53, 3],
])  # fmt: skip
def test_sums_of_64_bits_are_exact(spark: Any, ansi: str, values: list[object]) -> None:
    """Also where a part of the rows has a sum that does not fit."""
    data = by_key(values, pa.int64())
    q = totals(si.flow(data.schema))
    got = sis.apply(q, frame(spark, data))
    assert not leaves_the_jvm(got)
    same(got, q.collect(data))


def test_an_overflow_is_an_error(spark: Any, ansi: str) -> None:
    data = by_key([MAX, 1], pa.int64())
    f = si.flow(data.schema)
    q = f.group_by("k").agg(total=col("x").sum())
    with pytest.raises(ComputeError) as compiled:
        q.collect(data)
    with pytest.raises(ComputeError) as raised, translate_errors():
        sis.apply(q, frame(spark, data)).collect()
    assert raised.value.what == compiled.value.what
    assert "test_aggregate_in_spark.py" in raised.value.facts["at"]
    mean = f.group_by("k").agg(m=col("x").mean())  # it fits
    same(sis.apply(mean, frame(spark, data)), mean.collect(data))


@pytest.mark.parametrize("arrow", [pa.int8(), pa.int16(), pa.int32(), pa.int64()])
def test_arithmetic_of_integers_is_checked(spark: Any, ansi: str, arrow: pa.DataType) -> None:
    """Of each width at both ends of its range: the same values, or the same error, and none for rows that do not count.
    """
    high = (1 << (arrow.bit_width - 1)) - 1
    low = -high - 1
    pairs = [(high, 1), (high, 0), (low, -1), (low, 1), (low, low), (high, high), (1 << (arrow.bit_width // 2), 1),
             (None, high), (low, None), (-1, low), (0, low), (2, high // 2), (3, high // 2)]  # fmt: skip
    data = pa.table({"a": pa.array([a for a, _ in pairs], arrow), "b": pa.array([b for _, b in pairs], arrow),
                     "k": list(range(len(pairs)))})
    f = si.flow(data.schema)
    values = {"add": col("a") + col("b"), "sub": col("a") - col("b"), "mul": col("a") * col("b")}
    aggs: dict[str, Any] = {}
    for name, value in values.items():
        failed = []
        for row in range(len(pairs)):
            try:
                f.filter(col("k") == row).group_by("k").agg(x=value.min()).collect(data)
            except ComputeError as error:
                failed.append((row, error))
        assert 0 < len(failed) < len(pairs)
        good = ~col("k").is_in([row for row, _ in failed])
        aggs |= {f"{name}_lo": value.min().filter(good), f"{name}_n": si.when(good).then(value).otherwise(None).count()}
    q = f.group_by("k").agg(**aggs)
    got = sis.apply(q, frame(spark, data))
    assert not leaves_the_jvm(got)
    same(got, q.collect(data))
    row, error = failed[-1]
    with pytest.raises(ComputeError) as raised, translate_errors():
        sis.apply(f.filter(col("k") == row).group_by("k").agg(n=values["mul"].count()), frame(spark, data)).collect()
    assert raised.value.what == error.what
    assert "test_aggregate_in_spark.py" in raised.value.facts["at"]


def test_variances_of_extreme_values(spark: Any, ansi: str) -> None:
    nan, inf = float("nan"), float("inf")
    for values in ([1.0], [None, 2.0], [1.0, 1.0], [nan, 1.0], [inf, 1.0], [inf, inf], [-inf, inf], [-0.0, 0.0],
                   [1e300, -1e300, 1.0], [1e9 + 0.25, 1e9 + 0.5, 1e9 + 1.25], [5e-324, 0.0], [nan]):
        data = by_key(values, pa.float64())
        q = si.flow(data.schema).group_by("k").agg(v=col("x").var(), d=col("x").std(),
                                                   none=col("x").var().filter(col("k") > 0))
        got = sis.apply(q, frame(spark, data))
        assert not leaves_the_jvm(got)
        same(got, q.collect(data))


def test_floats(spark: Any, ansi: str) -> None:
    nan, inf = float("nan"), float("inf")
    for values in ([nan, 1.0], [nan, nan], [inf, -inf], [-0.0], [-0.0, -0.0], [None, nan], [None], [inf, nan, 2.0]):
        data = by_key(values, pa.float64())
        q = si.flow(data.schema).group_by("k").agg(s=col("x").sum(), m=col("x").mean(), lo=col("x").min(),
                                                   hi=col("x").max(), n=col("x").count())
        got = sis.apply(q, frame(spark, data))
        assert not leaves_the_jvm(got)
        same(got, q.collect(data))


def test_decimals(spark: Any) -> None:
    for digits, in_jvm in ((10, True), (28, True), (29, False), (38, False)):
        data = by_key([Decimal("9" * 8 + ".25"), Decimal("0.75"), None], pa.decimal128(digits, 2))
        q = si.flow(data.schema).group_by("k").agg(s=col("x").sum(), hi=col("x").max())
        got = sis.apply(q, frame(spark, data))
        assert leaves_the_jvm(got) is not in_jvm
        same(got, q.collect(data))


@pytest.mark.parametrize("arrow", [pa.int64(), pa.timestamp("us"), pa.timestamp("us", "UTC")])
def test_windows_of_negative_and_missing_times(spark: Any, ansi: str, arrow: pa.DataType) -> None:
    data = pa.table({"t": pa.array([-1, -10, -11, 0, 9, 10, None, 12345678901], pa.int64()).cast(arrow)})
    size = 10 if pa.types.is_integer(arrow) else "10us"
    q = si.flow(data.schema).group_by(si.tumbling("t", size)).agg(n=si.count())
    got = sis.apply(q, frame(spark, data))
    assert not leaves_the_jvm(got)
    same(got, q.collect(data))


def test_windows_at_the_ends_of_time(spark: Any, ansi: str) -> None:
    for time in (MAX - 1, -MAX):
        data = pa.table({"t": [time]})
        q = si.flow(data.schema).group_by(si.tumbling("t", 10)).agg(n=si.count())
        with pytest.raises(ComputeError), translate_errors():
            sis.apply(q, frame(spark, data)).collect()


def test_days_are_those_of_sparks_windows(spark: Any) -> None:
    """Windows of both begin at midnight in UTC, whatever the session's time zone."""
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        times = [datetime(2024, 3, 10, tzinfo=UTC) + timedelta(hours=5 * k) for k in range(12)]
        df = spark.createDataFrame([(t,) for t in times], "t timestamp")
        q = si.flow(df.schema).group_by(si.tumbling("t", "1d")).agg(n=si.count(), x=col("t").max())
        df.createOrReplaceTempView("times")
        in_sql = spark.sql("select window.start window_start, window.end window_end, count(*) n, max(t) x from times "
                           "group by window(t, '1 day')")
        got = from_spark(sis.apply(q, df)).sort_by("window_start")
        assert got.to_pylist() == from_spark(in_sql).sort_by("window_start").to_pylist()
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")


def test_columns_of_another_type_in_spark_are_compiled(spark: Any) -> None:
    """Values that do not fit the flow's type are an error, which Spark's own types would not find."""
    q = si.flow({"k": pa.uint8()}).group_by("k").agg(n=si.count())
    df = spark.createDataFrame(pa.table({"k": pa.array([1, 2], pa.int16())}))
    got = sis.apply(q, df)
    assert leaves_the_jvm(got)
    same(got, q.collect(pa.table({"k": pa.array([1, 2], pa.uint8())})))


def test_a_large_table_is_joined_in_python(spark: Any) -> None:
    data = pa.table({"k": [1, 2, 3]})
    large = pa.table({"k": range(1 << 20), "v": range(1 << 20)})
    q = si.flow(data.schema).join(large, on="k").group_by("v").agg(n=si.count())
    got = sis.apply(q, frame(spark, data))
    assert leaves_the_jvm(got)
    same(got, q.collect(data))


def test_names_that_need_quotes(spark: Any) -> None:
    data = pa.table({"a.b": [1, 2, 2], "`": [1.0, 2.0, 3.0], "k0": [7, 8, 9], "a0_": ["x", "y", "y"]})
    ads = pa.table({"a.b": [1, 2], "n.n": ["one", "two"]})
    q = (si.flow(data.schema).join(ads, on="a.b").group_by("n.n", "a0_")
         .agg(**{"s.s": col("`").sum(), "k0": col("k0").max()}))  # fmt: skip
    got = sis.apply(q, frame(spark, data))
    assert not leaves_the_jvm(got)
    same(got, q.collect(data))
    assert as_spark(q.collect(data)).schema.names == got.columns
