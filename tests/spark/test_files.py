"""Files that Spark's tasks read themselves: the same rows as Spark's own reader, in `apply`, `run` and streams."""

from __future__ import annotations

import datetime as dt
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import scalein as si
import scalein.spark as sis
from scalein import col
from scalein.errors import BadData
from scalein.spark.row_groups import ScannedFile, plan_row_groups
from tests.same import assert_same

NOW = {"availableNow": True}
ROWS = 300


def everyday(rows: int = ROWS, seed: int = 1) -> pa.Table:
    """Columns of the types that files of Polars, pandas and Spark have, with nulls."""
    rng = np.random.default_rng(seed)
    gone = rng.random(rows) < 0.1
    n = rng.integers(-100, 100, rows)
    ms = 1_700_000_000_000 + rng.integers(0, 10**7, rows)
    words = pa.array(np.array(["view", "click", "a b", "ü"])[rng.integers(0, 4, rows)], mask=gone)

    def of(values: Any, arrow: pa.DataType) -> pa.Array:
        return pa.array(values, arrow, mask=gone)

    return pa.table({
        "n": pa.array(np.arange(rows)),
        "ms": of(ms, pa.timestamp("ms")), "us": of(ms * 1000 + 7, pa.timestamp("us")),
        "utc": of(ms, pa.timestamp("ms", "UTC")), "day": of(n.astype(np.int32) + 20_000, pa.int32()).cast(pa.date32()),
        "word": words, "coded": words.dictionary_encode(), "large": words.cast(pa.large_string()),
        "view": words.cast(pa.string_view()), "bytes": words.cast(pa.large_binary()),
        "i8": of(n, pa.int8()), "i16": of(n, pa.int16()), "i32": of(n, pa.int32()), "u8": of(abs(n), pa.uint8()),
        "u32": of(abs(n), pa.uint32()), "f32": of(n / 4, pa.float32()), "flag": of(n > 0, pa.bool_()),
        "price": pa.array([None if g else Decimal(int(k)).scaleb(-2) for k, g in zip(n, gone, strict=True)],
                          pa.decimal128(9, 2)),
        "list": pa.array([None if g else [int(k), None] for k, g in zip(n, gone, strict=True)], pa.list_(pa.int64())),
        "struct": pa.array([{"x": int(k)} for k in n], pa.struct({"x": pa.int32()})),
    })  # fmt: skip


def write_partitioned(table: pa.Table, folder: Path, *columns: str) -> None:
    """Folders by the values of columns; pyarrow does not filter views."""
    pq.write_to_dataset(table.drop_columns(["view"]), folder, partition_cols=list(columns), row_group_size=50)


def rows_of(df: Any) -> list[tuple[Any, ...]]:
    return sorted(tuple(map(repr, row)) for row in df.collect())


def is_read_by_spark(df: Any) -> bool:
    return "FileScan" in df._jdf.queryExecution().executedPlan().toString()


def check_apply(df: Any, is_scan: bool = True) -> None:
    """All columns of a DataFrame, read by tasks or by Spark, are those that Spark itself reads."""
    out = sis.apply(si.flow(df.schema).filter(col("n") != -1), df)
    assert is_read_by_spark(out) != is_scan
    assert rows_of(out) == rows_of(df)


@contextmanager
def setting(spark: Any, name: str, value: str) -> Iterator[None]:
    before = spark.conf.get(name)
    spark.conf.set(name, value)
    try:
        yield
    finally:
        spark.conf.set(name, before)


def test_everyday_types(spark: Any, tmp_path: Path) -> None:
    """Several row groups, an empty file, a file of no bytes, another order of columns, and a column that is missing."""
    table = everyday()
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=70)
    pq.write_table(table.slice(0, 0), tmp_path / "b.parquet")
    (tmp_path / "c.parquet").touch()
    pq.write_table(table.select(table.column_names[::-1]).slice(0, 9), tmp_path / "d.parquet")
    pq.write_table(table.drop_columns(["word", "price", "list"]).slice(3, 5), tmp_path / "e.parquet")
    pq.write_table(table.select(["n"]).slice(9, 2), tmp_path / "f.parquet")
    df = spark.read.schema(spark.read.parquet(str(tmp_path / "a.parquet")).schema).parquet(str(tmp_path))
    check_apply(df)
    check_apply(df.select("word", "n", "coded"))
    check_apply(spark.read.schema("n long, ms timestamp, us timestamp, nothing double").parquet(str(tmp_path)))
    df.createOrReplaceTempView("everyday_files")
    check_apply(spark.table("everyday_files"))


def test_files_of_spark_and_polars(spark: Any, tmp_path: Path) -> None:
    """Spark writes INT96 times by default, or in milliseconds; Polars views and large text."""
    polars = pytest.importorskip("polars")
    whole = everyday().drop_columns(["bytes"])
    df = spark.createDataFrame(whole.drop_columns(["u8", "u32", "view"]))
    for kind in ("INT96", "TIMESTAMP_MICROS", "TIMESTAMP_MILLIS"):
        with setting(spark, "spark.sql.parquet.outputTimestampType", kind):
            df.write.parquet(str(tmp_path / kind))
        check_apply(spark.read.parquet(str(tmp_path / kind)))
    (tmp_path / "polars").mkdir()
    polars.from_arrow(whole).write_parquet(tmp_path / "polars" / "a.parquet", row_group_size=100)
    check_apply(spark.read.parquet(str(tmp_path / "polars")))


@pytest.mark.parametrize("partition", [
    pa.array(["a b", None, "c/d", "%41", "1"]), pa.array([1, 2, None, 40, 5]),
    pa.array([dt.date(2026, 1, day) for day in range(1, 6)]), pa.array([1.5, 2.5, None, 0.0, -1.0]),
])
def test_partitioned_folders(spark: Any, tmp_path: Path, partition: pa.Array) -> None:
    table = everyday(50).append_column("p", partition.take(pa.array(np.arange(50) % 5)))
    table = table.append_column("q", pa.array(np.arange(50) % 2))
    write_partitioned(table, tmp_path, "p", "q")
    df = spark.read.parquet(str(tmp_path))
    check_apply(df)
    check_apply(df.select("q", "n"))
    out = sis.apply(si.flow(df.schema).group_by("p").agg(n=si.count()), df)
    assert not is_read_by_spark(out)
    assert rows_of(out) == rows_of(df.groupBy("p").count())
    wanted = spark.read.schema("n long, p string, q short").parquet(str(tmp_path))
    check_apply(wanted)


def test_nested_folders(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "in" / "deep er").mkdir(parents=True)
    pq.write_table(everyday(20), tmp_path / "in" / "deep er" / "a.parquet")
    pq.write_table(everyday(30), tmp_path / "in" / "b.parquet")
    check_apply(spark.read.option("recursiveFileLookup", "true").parquet(str(tmp_path / "in")))
    check_apply(spark.read.parquet(f"{tmp_path}/in/*/*.parquet"))


def test_filters_skip_row_groups_and_files(spark: Any, tmp_path: Path) -> None:
    table = everyday(400).append_column("p", pa.array(np.arange(400) // 200))
    write_partitioned(table, tmp_path, "p")
    df = spark.read.parquet(str(tmp_path))
    bound = dt.datetime(2023, 11, 14, 23, 0)
    for condition, in_spark in ((col("n") < 60, "n < 60"), (col("p") == 1, "p = 1"),
                                (col("ms") > bound, f"ms > timestamp_ntz'{bound}'"),
                                ((col("p") == 0) & (col("word") == "view"), "p = 0 and word = 'view'")):
        out = sis.apply(si.flow(df.schema).filter(condition).select("n", "ms", "word", "p"), df)
        assert not is_read_by_spark(out)
        assert rows_of(out) == rows_of(df.filter(in_spark).select("n", "ms", "word", "p"))


FILTERS = ("n > 3 and word is not null", "5 > n or i8 is null", "not (word = 'view')", "word in ('view', 'ü')",
           "day >= date'2024-10-01'", "ms < timestamp_ntz'2023-11-14 23:00:00.001'", "flag = true and price <= 0.25",
           "utc >= timestamp'2023-11-14 23:00:00Z'", "flag or i8 < -50", "f32 = float(2.5)", "p = 1",
           "p = 1 and n between 210 and 230")


@pytest.mark.parametrize("condition", FILTERS)
def test_filters_of_a_dataframe_run_in_the_flow(spark: Any, tmp_path: Path, condition: str) -> None:
    table = everyday(400).append_column("p", pa.array(np.arange(400) // 200))
    write_partitioned(table, tmp_path, "p")
    df = spark.read.parquet(str(tmp_path)).filter(condition)
    assert 0 < df.count() < 400
    check_apply(df)
    check_apply(df.select("n", "list"))
    q = si.flow(df.schema).group_by("coded").agg(n=si.count())
    assert rows_of(sis.apply(q, df)) == rows_of(df.groupBy("coded").count())


def test_many_groups_are_read_by_key(spark: Any, tmp_path: Path) -> None:
    table = pa.table({"k": [f"key {k}" for k in range(5_000)] * 2, "v": pa.array(range(10_000), pa.int16())})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3_000)
    df = spark.read.parquet(str(tmp_path))
    out = sis.apply(si.flow(df.schema).group_by("k").agg(s=col("v").sum()), df)
    plan = out._jdf.queryExecution().executedPlan().toString()
    assert "Exchange" not in plan
    assert "FileScan" not in plan
    assert rows_of(out) == rows_of(df.selectExpr("k", "bigint(v) as v").groupBy("k").sum("v"))


def test_what_spark_must_read(spark: Any, tmp_path: Path) -> None:
    """Whatever the tasks might read otherwise stays with Spark, silently."""
    table = everyday(50)
    pq.write_table(table, tmp_path / "a.parquet")
    path = str(tmp_path)
    df = spark.read.parquet(path)
    check_apply(df.filter("n % 3 = 1"), is_scan=False)
    check_apply(df.filter("n > 3 or length(word) > 3"), is_scan=False)
    check_apply(df.withColumnRenamed("word", "text"), is_scan=False)
    check_apply(df.select("n", "_metadata.file_name"), is_scan=False)
    check_apply(spark.read.option("mergeSchema", "true").parquet(path), is_scan=False)
    check_apply(spark.read.schema("n long, WORD string").parquet(path), is_scan=False)
    check_apply(df.limit(3).coalesce(1), is_scan=False)
    with setting(spark, "spark.sql.files.ignoreCorruptFiles", "true"):
        check_apply(df, is_scan=False)
    with setting(spark, "spark.sql.parquet.datetimeRebaseModeInRead", "LEGACY"):
        check_apply(df, is_scan=False)
    spark.read.parquet(path).write.orc(str(tmp_path / "orc"))
    check_apply(spark.read.orc(str(tmp_path / "orc")), is_scan=False)
    cached = spark.read.parquet(path).cache()
    try:
        assert cached.count() == 50
        out = sis.apply(si.flow(cached.schema).select("n"), cached)
        assert "InMemoryTableScan" in out._jdf.queryExecution().executedPlan().toString()
    finally:
        cached.unpersist()


def test_the_files_are_those_of_the_dataframe(spark: Any, tmp_path: Path) -> None:
    """A DataFrame has the files that Spark listed when it was made."""
    pq.write_table(everyday(50), tmp_path / "a.parquet")
    df = spark.read.parquet(str(tmp_path))
    pq.write_table(everyday(20), tmp_path / "b.parquet")
    assert sis.apply(si.flow(df.schema).select("n"), df).count() == 50


# --- without a session


def cast(column: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray:
    return column.cast(pa.string()).cast(wanted) if pa.types.is_dictionary(column.type) else column.cast(wanted)


def readable(table: pa.Table, schema: pa.Schema, folder: Path, **options: Any) -> bool:
    path = folder / "x.parquet"
    pq.write_table(table, path, **options)
    found = plan_row_groups([ScannedFile(str(path), {})], schema)
    if found is not None:
        got = pa.Table.from_batches(list(found.read()), schema)
        assert_same(got, pa.table({field.name: cast(table[field.name], field.type) for field in schema}), ordered=True)
    return found is not None


def test_types_that_are_read(tmp_path: Path) -> None:
    table = everyday()
    text = pa.schema([("coded", pa.string()), ("large", pa.string()), ("view", pa.string()), ("bytes", pa.binary())])
    assert readable(table, text, tmp_path)
    assert readable(table, pa.schema([("i8", pa.int64()), ("f32", pa.float64()), ("price", pa.decimal128(12, 3))]),
                    tmp_path)
    assert readable(table, pa.schema([("ms", pa.timestamp("us")), ("utc", pa.timestamp("us", "UTC"))]), tmp_path)
    assert readable(table, pa.schema([("us", pa.timestamp("us", "UTC"))]), tmp_path)
    for name, lossy in (("n", pa.int32()), ("utc", pa.timestamp("us")), ("word", pa.binary()), ("n", pa.string()),
                        ("price", pa.decimal128(9, 3))):
        assert not readable(table, pa.schema([(name, lossy)]), tmp_path)
    instants = table.select(["utc"]).cast(pa.schema([("utc", pa.timestamp("us", "UTC"))]))
    assert readable(instants, instants.schema, tmp_path, use_deprecated_int96_timestamps=True)
    assert not readable(table.select(["us"]), pa.schema([("us", pa.timestamp("us"))]), tmp_path,
                        use_deprecated_int96_timestamps=True)
    for key, value in (("org.apache.spark.legacyDateTime", ""), ("org.apache.spark.version", "2.4.0")):
        legacy = table.replace_schema_metadata({key: value})
        assert not readable(legacy, pa.schema([("day", pa.date32())]), tmp_path)
        assert readable(legacy, pa.schema([("n", pa.int64())]), tmp_path)
    (tmp_path / "x.parquet").write_bytes(b"no Parquet")
    assert plan_row_groups([ScannedFile(str(tmp_path / "x.parquet"), {})], text) is None


def test_row_groups_are_dealt_by_size(tmp_path: Path) -> None:
    table = everyday(1_000)
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=90)
    pq.write_table(table, tmp_path / "b.parquet")
    found = plan_row_groups([ScannedFile(str(tmp_path / f"{name}.parquet"), {}) for name in "ab"],
                            pa.schema([("n", pa.int64()), ("word", pa.string())]))
    assert found is not None
    parts = found.split(2)
    sizes = [sum(part.sizes) for part in parts]
    assert max(sizes) - min(sizes) <= max(found.sizes)
    assert sum(batch.num_rows for part in parts for batch in part.read()) == 2_000


def test_text_of_few_values_is_read_as_dictionaries(tmp_path: Path) -> None:
    """If it has few values in all row groups; a partition column has one in each."""
    few, many = pa.array(["view", None, "click"] * 1_000), pa.array([f"user {k}" for k in range(3_000)])
    mixed = pa.concat_arrays([few.slice(0, 1_500), many.slice(1_500)])
    table = pa.table({"few": few, "coded": few.dictionary_encode(), "many": many, "mixed": mixed})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1_000)
    schema = pa.schema([(name, pa.string()) for name in ("few", "coded", "many", "mixed", "p", "q")])
    values = {"p": pa.scalar("here"), "q": pa.scalar(None, pa.string())}
    found = plan_row_groups([ScannedFile(str(tmp_path / "a.parquet"), values)], schema)
    assert found is not None
    assert found.coded == {"few", "coded", "p", "q"}
    dictionaries = found.with_dictionaries()
    assert pa.types.is_dictionary(dictionaries.schema.field("few").type)
    got = pa.Table.from_batches(list(dictionaries.read()), dictionaries.schema)
    assert_same(got.cast(schema), pa.Table.from_batches(list(found.read()), schema), ordered=True)
    assert got["few"].to_pylist() == few.to_pylist()


# --- streams and run


def stream_of(spark: Any, folder: Path, schema: Any = None) -> Any:
    schema = spark.read.parquet(str(folder)).schema if schema is None else schema
    return spark.readStream.schema(schema).parquet(str(folder))


def start(q: Any, stream: Any, folder: Path) -> Any:
    job = sis.start(q, stream, sink=si.to_parquet(folder / "out"), checkpoint=folder / "checkpoint", emit="changes",
                    trigger=NOW, partitions=2)
    job.wait()
    return job


def partitioned(table: pa.Table, folder: Path) -> None:
    write_partitioned(table, folder, "word")


def plain(table: pa.Table, folder: Path) -> None:
    folder.mkdir()
    pq.write_table(table, folder / "a.parquet", row_group_size=100)


def by_spark(table: pa.Table, folder: Path) -> None:
    """Lists of structs whose fields have other names: only Spark reads them."""
    plain(table.rename_columns([name.upper() if name == "i8" else name for name in table.column_names]), folder)


def test_batches_with_and_without_dictionaries_share_their_state(spark: Any, tmp_path: Path) -> None:
    """Of three batches tasks read the first with dictionaries and the second without; Spark reads the third."""
    (tmp_path / "in").mkdir()
    keys = pa.array(["view", None, "ü", "click"] * 500)
    tables = [pa.table({"k": keys, "v": pa.array(range(2_000))}),
              pa.table({"k": pa.array([f"user {k}" for k in range(1_990)] + ["view", None, "ü"] * 3 + [""]),
                        "v": pa.array(range(2_000), pa.int32())}),
              pa.table({"k": keys, "V": pa.array(range(2_000))})]  # fmt: skip
    for number, table in enumerate(tables):
        pq.write_table(table, tmp_path / "in" / f"{number}.parquet")
        os.utime(tmp_path / "in" / f"{number}.parquet", (1_700_000_000 + number,) * 2)
    stream = spark.readStream.schema("k string, v long").option("maxFilesPerTrigger", 1).parquet(str(tmp_path / "in"))
    q = si.flow(stream.schema).group_by("k").agg(n=si.count(), s=col("v").sum())
    job = sis.start(q, stream, sink=si.to_parquet(tmp_path / "out"), trigger="0 seconds",
                    checkpoint=tmp_path / "checkpoint", emit="changes", partitions=3)
    while job.last_progress is None or job.last_progress["batch_id"] < 2:
        time.sleep(0.05)
        assert job.is_active, job.exception
    job.stop()
    assert len(job._coded) == 1
    assert job.last_progress["read_by"] == "spark"
    whole = pa.concat_tables([table.rename_columns(["k", "v"]).cast(pa.schema({"k": pa.string(), "v": pa.int64()}))
                              for table in tables])
    assert_same(sis.read_state(tmp_path / "checkpoint"), q.collect(whole))


@pytest.mark.parametrize(("write", "reader"), [(plain, "tasks"), (partitioned, "tasks"), (by_spark, "spark")])
def test_streams_say_who_reads(spark: Any, tmp_path: Path, write: Callable[[pa.Table, Path], None],
                               reader: str) -> None:
    table = everyday().append_column("k", everyday()["coded"])
    write(table, tmp_path / "in")
    schema = spark.createDataFrame(table.drop_columns(["u8", "u32", "k", "view"])).schema.add("k", "string")
    q = si.flow(schema).group_by("word").agg(
        n=si.count(), s=col("i8").sum(), p=col("price").sum(), first=col("ms").min(), k=col("k").max())
    job = start(q, stream_of(spark, tmp_path / "in", schema), tmp_path)
    assert job.last_progress["read_by"] == reader
    assert job.last_progress["rows_in"] == ROWS
    whole = spark.read.schema(schema).parquet(str(tmp_path / "in")).toArrow()
    want = q.collect(whole.select(schema.names).cast(si.flow(schema).schema))
    assert_same(sis.read_state(tmp_path / "checkpoint").select(want.column_names), want)


def test_a_filter_after_a_watermark_skips_row_groups(spark: Any, tmp_path: Path) -> None:
    """The greatest times, which close the windows, are in row groups that are not read."""
    times = pa.array(range(400), pa.timestamp("s")).cast(pa.timestamp("ms"))
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"t": times, "x": range(400, 0, -1)}), tmp_path / "in" / "a.parquet", row_group_size=100)
    q = (si.flow({"t": pa.timestamp("us"), "x": pa.int64()}).with_watermark("t", "10s").filter(col("x") > 350)
         .group_by(si.tumbling("t", "10s")).agg(n=si.count()))  # fmt: skip
    stream = stream_of(spark, tmp_path / "in", "t timestamp_ntz, x long")
    job = sis.start(q, stream, sink=si.to_parquet(tmp_path / "out"), checkpoint=tmp_path / "checkpoint",
                    trigger=NOW)
    job.wait()
    assert job.last_progress is not None
    assert {name: job.last_progress[name] for name in ("row_groups_skipped", "rows_in", "read_by", "watermark")} == {
        "row_groups_skipped": 3, "rows_in": 400, "read_by": "tasks", "watermark": 389_000_000}
    assert pq.read_table(tmp_path / "out")["n"].to_pylist() == [10] * 5


def test_nanoseconds_are_read_if_they_are_whole_microseconds(spark: Any, tmp_path: Path) -> None:
    """Spark itself reads no nanoseconds; a schema makes a stream of them all the same."""
    times = pa.array([1_000, 2_000, None], pa.timestamp("ns"))
    plain(pa.table({"t": times}), tmp_path / "in")
    q = si.flow({"t": pa.timestamp("us")}).group_by("t").agg(n=si.count())
    job = start(q, stream_of(spark, tmp_path / "in", "t timestamp_ntz"), tmp_path)
    assert job.last_progress["read_by"] == "tasks"
    assert sis.read_state(tmp_path / "checkpoint")["t"].cast(pa.int64()).sort().to_pylist() == [1, 2, None]
    pq.write_table(pa.table({"t": pa.array([1_001], pa.timestamp("ns"))}), tmp_path / "in" / "b.parquet")
    with pytest.raises(BadData, match=r"column 't' of .*b\.parquet is timestamp\[ns\]"):
        start(q, stream_of(spark, tmp_path / "in", "t timestamp_ntz"), tmp_path)


def test_run_converts_files_to_the_types_of_the_first(spark: Any, tmp_path: Path) -> None:
    pq.write_table(pa.table({"k": ["a", "b"], "t": pa.array([1, 2], pa.timestamp("us")), "v": [1, 2]}),
                   tmp_path / "a.parquet")
    pq.write_table(pa.table({"k": pa.array(["b", "c"]).dictionary_encode(), "t": pa.array([1, 2], pa.timestamp("ms")),
                             "v": pa.array([3, 4], pa.int16())}), tmp_path / "b.parquet")  # fmt: skip
    q = si.read_parquet(tmp_path).group_by("k").agg(s=col("v").sum(), t=col("t").max())
    assert_same(sis.run(q, spark).toArrow().cast(q.schema), q.collect())
