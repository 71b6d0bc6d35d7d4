"""Inside Spark: `run`, `apply`, `map_in_arrow` and `start` beside Spark SQL, pandas UDFs, row-at-a-time UDFs and
Spark's own state stores. One local session of two cores, the same files and the same settings for all.

Results are compared before anything is timed: a small part row by row, all of it by a sum over the hashes of its rows.
Every query ends in Spark's `noop` sink, so that its rows come out and go nowhere.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

import scalein as si
from bench import data
from bench.race import Race, assert_same, time_s
from scalein import col
from scalein.api.flow import Flow

two_cores = pytest.mark.parametrize("workers", [2])
FILES = 20


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    pytest.importorskip("pyspark")
    from pyspark import cloudpickle  # by value: workers need not import the benchmarks

    from scalein.spark.session import session

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]
    started = session(cores=2, config={"spark.sql.shuffle.partitions": 4, "spark.driver.memory": "6g"})
    yield started
    started.stop()


def drained(df: Any) -> None:
    """Every row of a DataFrame computed, and dropped."""
    df.write.format("noop").mode("overwrite").save()


def checksum(df: Any) -> tuple[int, Decimal]:
    """Rows, and the sum of their hashes: the same for the same rows in any order."""
    from pyspark.sql import functions as f

    hashed = df.select(f.xxhash64(*df.columns).cast("decimal(38,0)").alias("h"))
    row = hashed.agg(f.count("*"), f.sum("h")).collect()[0]
    return row[0], row[1]


def assert_equal(ours: Any, theirs: Any) -> None:
    """Two DataFrames have the same rows; floats are exact, because all values are multiples of 1/64."""
    assert checksum(ours.select(*theirs.columns)) == checksum(theirs)


def in_files(table: pa.Table, folder: Path, files: int = FILES) -> Path:
    folder.mkdir()
    for number in range(files):
        first = number * table.num_rows // files
        rows = (number + 1) * table.num_rows // files - first
        pq.write_table(table.slice(first, rows), folder / f"{number:02}.parquet")
    return folder


# --- run: the executors scan the files themselves


def views(events: Flow) -> Flow:
    """W1."""
    return (events.filter(col("event_type") == 0).join(data.campaigns(), on="ad_id")
            .group_by("campaign_id", si.tumbling("event_time", 10_000)).agg(n=si.count()))  # fmt: skip


def views_in_spark(spark: Any, events: Any, by_hand: bool = False) -> Any:
    """As its users write it, with `window`; or `by_hand`, with integer arithmetic in the place of that: faster."""
    from pyspark.sql import functions as f

    campaigns = spark.createDataFrame(data.campaigns())
    window = f.window(f.timestamp_millis("event_time"), "10 seconds")
    start = f.col("event_time") - f.pmod("event_time", f.lit(10_000))
    counted = (events.filter("event_type = 0").join(f.broadcast(campaigns), "ad_id")
               .groupBy("campaign_id", start.alias("window_start") if by_hand else window)
               .agg(f.count("*").alias("n")))  # fmt: skip
    return counted if by_hand else counted.select("campaign_id", f.unix_millis("window.start").alias("window_start"),
                                                  "n")


def totals(values: Flow) -> Flow:
    """W3."""
    value = col("value")
    return values.group_by("key").agg(s=value.sum(), n=si.count(), lo=value.min(), hi=value.max())


def totals_in_spark(values: Any) -> Any:
    from pyspark.sql import functions as f

    return values.groupBy("key").agg(f.sum("value").alias("s"), f.count("*").alias("n"), f.min("value").alias("lo"),
                                     f.max("value").alias("hi"))  # fmt: skip


@two_cores
def bench_run_yahoo(race: Race, spark: Any, rows: int, workers: int, tmp_path: Path) -> None:
    """W1 of 20 Parquet files, five times the rows; goal: five times Spark SQL; bound: decoding 13 bytes a row."""
    import scalein.spark as sis

    rows *= 5
    folder = in_files(data.ad_events(rows), tmp_path / "events")
    data.ad_events.cache_clear()
    flow, events = views(si.read_parquet(folder)), spark.read.parquet(str(folder))
    in_sql, by_hand = (views_in_spark(spark, events, by_hand) for by_hand in (False, True))
    for rival in (in_sql, by_hand):
        assert_equal(sis.run(flow, spark), rival)
    ours = sis.run(flow, spark)  # all three are planned before, and read when they are drained
    race(lambda: drained(ours), spark_sql=lambda: drained(in_sql), spark_sql_by_hand=lambda: drained(by_hand),
         goals={"spark_sql": 5}, rounds=5, row_count=rows, size_bytes=13 * rows,
         bound="decoding Parquet, and Spark's two stages")


@two_cores
def bench_run_many_keys(race: Race, spark: Any, rows: int, workers: int, tmp_path: Path) -> None:
    """W3 of 20 Parquet files, which both tasks read; goal: three times Spark SQL; bound: results to the JVM."""
    import scalein.spark as sis

    folder = in_files(data.keyed_values(rows, rows // 2), tmp_path / "values")
    flow, in_sql = totals(si.read_parquet(folder)), totals_in_spark(spark.read.parquet(str(folder)))
    assert_equal(sis.run(flow, spark), in_sql)
    ours = sis.run(flow, spark)
    race(lambda: drained(ours), spark_sql=lambda: drained(in_sql), goals={"spark_sql": 3}, rounds=3, row_count=rows,
         size_bytes=16 * rows, bound="results to the JVM")


# --- apply and map_in_arrow: rows are in the JVM


def drain(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Read everything, give one row."""
    yield pa.record_batch({"n": [sum(batch.num_rows for batch in batches)]})


def identity(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    return batches


@two_cores
def bench_apply_yahoo(race: Race, spark: Any, rows: int, workers: int, tmp_path: Path) -> None:
    """W1 of a cached DataFrame, which Spark aggregates; goal: 0.9 of Spark SQL. A mapInArrow that reads the three
    columns and gives one row is beside it: what rows that leave the JVM would cost at least."""
    import scalein.spark as sis

    folder = in_files(data.ad_events(rows), tmp_path / "events")
    events = spark.read.parquet(str(folder)).cache()
    assert events.count() == rows
    flow = views(si.flow(data.ad_events(rows).schema))
    needed = events.select("event_time", "ad_id", "event_type").mapInArrow(drain, "n long")
    in_sql = views_in_spark(spark, events, by_hand=True)
    ours = sis.apply(flow, events)
    assert_equal(ours, in_sql)
    race(lambda: drained(ours), drain=lambda: drained(needed), spark_sql=lambda: drained(in_sql),
         goals={"spark_sql": 0.9}, rounds=5, row_count=rows, size_bytes=13 * rows, bound="Spark's own aggregation")
    events.unpersist()


# --- apply on a scan of files: the tasks read them


def line_items(rows: int) -> pa.Table:
    """What TPC-H's q1 reads: two short texts, four decimals and a date."""
    rng = np.random.default_rng(data.SEED + 33)

    def decimals(low: int, high: int) -> pa.Array:
        values = np.zeros((rows, 2), np.int64)  # the low and the high half of 128 bits
        values[:, 0] = rng.integers(low, high, rows)
        return pa.Array.from_buffers(pa.decimal128(15, 2), rows, [None, pa.py_buffer(values)])

    def texts(words: list[str]) -> pa.Array:
        return pa.array(words).take(pa.array(rng.integers(0, len(words), rows)))

    return pa.table({"flag": texts(["A", "N", "R"]), "status": texts(["F", "O"]), "quantity": decimals(100, 5_001),
                     "price": decimals(90_000, 10_500_000), "discount": decimals(0, 11), "tax": decimals(0, 9),
                     "shipped": pa.array(rng.integers(8_036, 10_562, rows, dtype=np.int32)).cast(pa.date32())})


def pricing(items: Flow) -> Flow:
    """q1."""
    paid = col("price") * (1 - col("discount"))
    return (items.filter(col("shipped") <= date(1998, 9, 2)).group_by("flag", "status")
            .agg(quantity=col("quantity").sum(), price=col("price").sum(), paid=paid.sum(),
                 charged=(paid * (1 + col("tax"))).sum(), mean=col("quantity").mean(), n=si.count()))  # fmt: skip


PRICING = """SELECT flag, status, sum(quantity) AS quantity, sum(price) AS price, sum(price * (1 - discount)) AS paid,
    sum(price * (1 - discount) * (1 + tax)) AS charged, CAST(avg(quantity) AS double) AS mean, count(*) AS n
    FROM items WHERE shipped <= DATE'1998-09-02' GROUP BY flag, status"""


@two_cores
def bench_apply_scan_q1(race: Race, spark: Any, rows: int, workers: int, tmp_path: Path) -> None:
    """q1 of TPC-H on a DataFrame that is a scan of 20 Parquet files; goal: three times Spark SQL."""
    import scalein.spark as sis

    table = line_items(rows)
    size, folder = table.nbytes, in_files(table, tmp_path / "items")
    del table
    items = spark.read.parquet(str(folder))
    items.createOrReplaceTempView("items")
    in_sql, ours = spark.sql(PRICING), sis.apply(pricing(si.flow(items.schema)), items)
    got, want = ({(row.flag, row.status): row for row in df.collect()} for df in (ours, in_sql))
    assert got.keys() == want.keys()
    for key, row in want.items():
        assert [got[key][name] for name in ("quantity", "price", "paid", "charged", "n")] == [
            row[name] for name in ("quantity", "price", "paid", "charged", "n")]
        assert abs(float(got[key].mean) - row["mean"]) < 1e-4  # Spark rounds the mean of decimals to six digits
    race(lambda: drained(ours), spark_sql=lambda: drained(in_sql), goals={"spark_sql": 3}, rounds=3, row_count=rows,
         size_bytes=size, bound="decoding Parquet")


@two_cores
def bench_apply_scan_text_keys(race: Race, spark: Any, rows: int, workers: int, tmp_path: Path) -> None:
    """A sum and a count of each of a million texts, of a DataFrame that is a scan; goal: three times Spark SQL."""
    import scalein.spark as sis

    rng = np.random.default_rng(data.SEED + 34)
    keys = pa.array([f"customer-{k:07}" for k in range(rows // 20)])
    table = pa.table({"key": keys.take(pa.array(rng.integers(0, len(keys), rows))),
                      "value": rng.integers(0, 1 << 20, rows)})
    size, folder = table.nbytes, in_files(table, tmp_path / "values")
    del table
    values = spark.read.parquet(str(folder))
    values.createOrReplaceTempView("text_values")
    in_sql = spark.sql("SELECT key, sum(value) AS s, count(*) AS n FROM text_values GROUP BY key")
    ours = sis.apply(si.flow(values.schema).group_by("key").agg(s=col("value").sum(), n=si.count()), values)
    assert_equal(ours, in_sql)
    race(lambda: drained(ours), spark_sql=lambda: drained(in_sql), goals={"spark_sql": 3}, rounds=3, row_count=rows,
         size_bytes=size, bound="decoding and hashing text")


# --- a stream of files: Spark's half of the demo


@two_cores
@pytest.mark.parametrize("kind", ["ms_dictionary", "us_text"])
def bench_stream_of_files(race: Race, spark: Any, rows: int, workers: int, kind: str, tmp_path: Path) -> None:
    """The demo's query over its ten files, one a batch; goals: 2 and 2.5 times Spark's streaming with RocksDB. Both
    write their results as Parquet, from an empty checkpoint."""
    import scalein.spark as sis
    from scalein.cli import demo

    events, campaigns = demo.make_events(rows), demo.make_campaigns()
    if kind == "us_text":
        events = events.cast(pa.schema({"event_time": pa.timestamp("us"), "ad_id": pa.int32(),
                                        "event_type": pa.string()}))
    demo.write_files(events, tmp_path / "in")
    schema = spark.read.parquet(str(tmp_path / "in")).schema
    want = demo.count_views(si.from_arrow(events), campaigns).collect()
    folders = (tmp_path / str(number) for number in range(100))

    def ours() -> Path:
        folder = next(folders)
        stream = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(tmp_path / "in"))
        job = sis.start(demo.count_views(si.flow(schema), campaigns), stream, sink=si.to_parquet(folder / "out"),
                        checkpoint=folder / "checkpoint", partitions=demo.PARTITIONS, trigger={"availableNow": True})
        job.wait()
        assert job.last_progress is not None
        assert job.last_progress["read_by"] == "tasks"
        return folder

    def theirs() -> Path:
        folder = next(folders)
        folder.mkdir()
        (folder / "in").symlink_to(tmp_path / "in")
        demo.stream_by_spark_alone(spark, campaigns, folder)
        return folder

    found, spark_found = ours(), theirs()
    demo.check_spark_rows(spark_found / "spark-out", want)
    closed = ds.dataset(found / "out").to_table()
    whole = pa.concat_tables([closed, sis.read_state(found / "checkpoint").select(closed.column_names)])
    assert_same(whole, want.cast(whole.schema), by=("window_start", "campaign_id"))
    race(ours, rocksdb=theirs, goals={"rocksdb": 2 if kind == "ms_dictionary" else 2.5}, rounds=3, row_count=rows,
         size_bytes=events.nbytes, bound="decoding Parquet, and Spark's fixed cost of a batch")


def orders(rows: int) -> pa.Table:
    """Quantities 0 to 99, prices, and names of some 12 letters."""
    rng = np.random.default_rng(data.SEED + 30)
    names = pa.array([f"Item-{k:06} x" for k in rng.integers(0, 1_000_000, 50_000)])
    return pa.table({"qty": rng.integers(0, 100, rows), "price": rng.integers(1, 1_000_000, rows) / 64.0,
                     "name": names.take(pa.array(rng.integers(0, len(names), rows)))})


def step(flow: Flow) -> Flow:
    """A filter that keeps nine of ten rows, arithmetic, and text."""
    return flow.filter(col("qty") >= 10).select(
        "qty", total=col("price") * 0.908 + col("qty"), code=col("name").str.slice(5, 6))


def step_in_pandas(spark: Any, df: Any) -> Any:
    import pandas as pd
    from pyspark.sql.pandas.functions import pandas_udf

    def as_udf(fn: Callable[..., Any], dtype: str, *names: str) -> Any:
        fn.__annotations__ = dict.fromkeys((*names, "return"), pd.Series)
        return pandas_udf(fn, dtype)  # type: ignore[call-overload]

    total = as_udf(lambda price, qty: price * 0.908 + qty, "double", "price", "qty")
    code = as_udf(lambda name: name.str.slice(5, 11), "string", "name")
    return df.filter("qty >= 10").select("qty", total("price", "qty").alias("total"), code("name").alias("code"))


def step_by_row(spark: Any, df: Any) -> Any:
    from pyspark.sql import functions as f

    total = f.udf(lambda price, qty: price * 0.908 + qty, "double", useArrow=False)
    code = f.udf(lambda name: name[5:11], "string", useArrow=False)
    return df.filter("qty >= 10").select("qty", total("price", "qty").alias("total"), code("name").alias("code"))


@two_cores
def bench_map_in_arrow(race: Race, spark: Any, rows: int, workers: int, tmp_path: Path) -> None:
    """Filter, arithmetic and text in one kernel; goal: 0.9 of a mapInArrow that gives back what it gets. UDFs that do
    the same are beside it, on a tenth of the rows."""
    import scalein.spark as sis

    rows //= 2
    few = in_files(orders(rows // 10), tmp_path / "few")
    table = orders(rows)
    df, df_few = (spark.read.parquet(str(folder)).cache() for folder in (in_files(table, tmp_path / "all"), few))
    assert (df.count(), df_few.count()) == (rows, rows // 10)
    flow = step(si.flow(table.schema))
    ours, ours_few = (each.mapInArrow(flow.map_in_arrow, sis.schema(flow)) for each in (df, df_few))
    slow = {"pandas_udf": step_in_pandas(spark, df_few), "row_udf": step_by_row(spark, df_few)}
    for udf in slow.values():
        assert_equal(ours_few, udf)
    race(lambda: drained(ours), identity=lambda: drained(df.mapInArrow(identity, df.schema)), goals={"identity": 0.9},
         rounds=5, row_count=rows, size_bytes=table.nbytes, bound="rows from the JVM to Python and back")
    _add_rates(race.benchmark.extra_info, rows // 10, {name: time_s(lambda udf=udf: drained(udf))  # type: ignore[misc]
                                                       for name, udf in slow.items()})
    for cached in (df, df_few):
        cached.unpersist()


def _add_rates(info: dict[str, Any], rows: int, taken_s: Mapping[str, float]) -> None:
    """Rates of rivals on fewer rows, and what we are to them."""
    for name, seconds in taken_s.items():
        info[f"{name}_million_rows_per_s"] = round(rows / seconds / 1e6, 3)
        if "million_rows_per_s" in info:
            info[f"ratio_to_{name}"] = round(info["million_rows_per_s"] / (rows / seconds / 1e6), 1)


# --- state: a running sum and count of each key


def updates(rows: int, keys: int, batches: int, folder: Path) -> pa.Table:
    """A file a batch; of the keys, batch by batch more are seen."""
    rng = np.random.default_rng(data.SEED + 31)
    folder.mkdir()
    tables = []
    for number in range(batches):
        path = folder / f"{number:03}.parquet"
        tables.append(pa.table({"key": rng.integers(0, keys * (number + 1) // batches, rows),
                                "value": rng.integers(0, 1 << 20, rows) / 64.0}))
        pq.write_table(tables[-1], path, row_group_size=max(rows // 4, 1))  # for both cores
        os.utime(path, (1_700_000_000 + number,) * 2)
    return pa.concat_tables(tables)


def arriving(spark: Any, folder: Path) -> Any:
    return (spark.readStream.schema("key long, value double").option("maxFilesPerTrigger", 1).parquet(str(folder)))


def running(values: Flow) -> Flow:
    return values.group_by("key").agg(s=col("value").sum(), n=si.count())


def batch_times_s(query: Any) -> list[float]:
    """Seconds of each batch that had rows, as Spark measured them, but for the first two."""
    return [each.durationMs["triggerExecution"] / 1e3 for each in query.recentProgress if each.numInputRows][2:]


def in_rocksdb(spark: Any, folder: Path, checkpoint: Path) -> list[float]:
    """Spark's own aggregation, its rows dropped."""
    from pyspark.sql import functions as f

    totals = arriving(spark, folder).groupBy("key").agg(f.sum("value").alias("s"), f.count("*").alias("n"))
    query = (totals.writeStream.outputMode("update").format("noop").option("checkpointLocation", str(checkpoint))
             .trigger(availableNow=True).start())  # fmt: skip
    query.awaitTermination()
    return batch_times_s(query)


def with_processor(spark: Any, folder: Path, checkpoint: Path) -> list[float]:
    """transformWithStateInPandas: a Python call, and calls of the state store, for each key of a batch."""
    import pandas as pd
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

    class Running(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.total = handle.getValueState("total", "s double, n long")

        def handleInputRows(self, key: Any, rows: Any, timers: Any) -> Iterator[Any]:
            s, n = self.total.get() if self.total.exists() else (0.0, 0)
            for frame in rows:
                s, n = s + float(frame["value"].sum()), n + len(frame)
            self.total.update((s, n))
            yield pd.DataFrame({"key": [key[0]], "s": [s], "n": [n]})

        def close(self) -> None:
            pass

    totals = arriving(spark, folder).groupBy("key").transformWithStateInPandas(
        Running(), "key long, s double, n long", outputMode="Update", timeMode="None")
    query = (totals.writeStream.outputMode("update").format("noop").option("checkpointLocation", str(checkpoint))
             .trigger(availableNow=True).start())  # fmt: skip
    query.awaitTermination()
    return batch_times_s(query)


ROCKSDB = {
    "spark.sql.streaming.stateStore.providerClass":
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    "spark.sql.shuffle.partitions": "2",
}  # fmt: skip


@two_cores
@pytest.mark.parametrize("kind", ["1M", "10M"])
def bench_state(benchmark: Any, machine: Mapping[str, object], spark: Any, rows: int, workers: int, kind: str,
                tmp_path: Path) -> None:
    """Batches over up to a million keys (24 of a million rows) or ten (12 of two million), the state growing; every
    change is written as Parquet. Goal: twelve times Spark's aggregation in RocksDB, which drops its output here.
    transformWithStateInPandas has batches of a 200th, in the first case."""
    import scalein.spark as sis

    keys = rows // 20 if kind == "1M" else rows // 2
    rows, batches = (rows // 20, 24) if kind == "1M" else (rows // 10, 12)
    folder, checkpoint = tmp_path / "in", tmp_path / "ours"
    table = updates(rows, keys, batches, folder)
    for name, value in ROCKSDB.items():
        spark.conf.set(name, value)
    taken_s: dict[str, list[float]] = {}

    def stream() -> None:
        job = sis.start(running(si.flow(table.schema)), arriving(spark, folder), sink=si.to_parquet(tmp_path / "out"),
                        checkpoint=checkpoint, partitions=2, trigger={"availableNow": True}, emit="changes")
        job.wait()
        taken_s["ours"] = batch_times_s(job.query)

    benchmark.pedantic(stream, rounds=1)
    taken_s["rocksdb"] = in_rocksdb(spark, folder, tmp_path / "rocksdb")
    want = running(si.from_arrow(table)).collect()
    assert_same(sis.read_state(checkpoint), {name: want[name].to_numpy() for name in want.column_names}, by=("key",))
    theirs = spark.read.format("statestore").load(str(tmp_path / "rocksdb")).selectExpr("count(*)", "sum(value.count)")
    assert tuple(theirs.collect()[0]) == (want.num_rows, table.num_rows)
    assert len(taken_s["ours"]) == len(taken_s["rocksdb"]) == batches - 2
    ratios = [b / a for a, b in zip(taken_s["ours"], taken_s["rocksdb"], strict=True)]
    rates = {"": taken_s["ours"], "last_": taken_s["ours"][-5:], "rocksdb_": taken_s["rocksdb"]}
    benchmark.extra_info.update(
        machine, row_count=rows, batches=batches, keys=want.num_rows, goal_to_rocksdb=12,
        ratio_to_rocksdb=round(statistics.median(ratios), 2), batch_ms=round(statistics.median(taken_s["ours"]) * 1e3),
        **{f"{name}million_rows_per_s": round(rows / statistics.median(each) / 1e6, 3) for name, each in rates.items()})
    if kind == "1M":
        few = max(rows // 200, 10)
        updates(few, few, 4, tmp_path / "few")
        processor_s = statistics.median(with_processor(spark, tmp_path / "few", tmp_path / "processor"))
        benchmark.extra_info["processor_rows_per_s"] = round(few / processor_s)


# --- the first batch


@two_cores
def bench_first_batch(benchmark: Any, machine: Mapping[str, object], spark: Any, workers: int, tmp_path: Path,
                      monkeypatch: pytest.MonkeyPatch) -> None:
    """New Python workers and an empty cache of compiled code; goal: at most 1 s above an identity mapInArrow."""
    import scalein.spark as sis

    df = spark.range(0, 20_000, 1, 2).selectExpr("id % 100 as qty", "id / 64 as price", "'Item-000001 x' as name")
    flow = step(si.flow(pa.schema({"qty": pa.int64(), "price": pa.float64(), "name": pa.string()})))
    counted = flow.group_by("qty").agg(n=si.count(), s=col("total").sum())
    queries: dict[str, Callable[[], object]] = {
        "identity": lambda: drained(df.mapInArrow(identity, df.schema)),
        "map_in_arrow": lambda: drained(df.mapInArrow(flow.map_in_arrow, sis.schema(flow))),
        "apply": lambda: drained(sis.apply(counted, df)),
    }
    taken_s: dict[str, list[float]] = {name: [] for name in queries}

    def first_batches(rounds: int = 5) -> None:
        for _ in range(rounds):
            for name, query in queries.items():
                python = tmp_path / f"python-{len(list(tmp_path.iterdir()))}"  # another name, another process
                python.write_text(f'#!/bin/sh\nunset PYTHONDONTWRITEBYTECODE\nPYTHONPYCACHEPREFIX="{tmp_path}" '
                                  f'SCALEIN_CACHE_DIR="{python}.cache" exec "{sys.executable}" "$@"\n')
                python.chmod(0o755)
                monkeypatch.setattr(spark.sparkContext, "pythonExec", str(python))
                taken_s[name].append(time_s(query))

    first_batches(rounds=1)  # the JVM has seen the queries, and Python's bytecode is there, as in an installed package
    for each in taken_s.values():
        each.clear()
    benchmark.pedantic(first_batches, rounds=1)
    medians = {name: statistics.median(each) * 1e3 for name, each in taken_s.items()}
    benchmark.extra_info.update(machine, goal="at most 1000 ms above identity",
                                **{f"{name}_ms": round(took) for name, took in medians.items()},
                                **{f"{name}_above_identity_ms": round(medians[name] - medians["identity"])
                                   for name in ("map_in_arrow", "apply")})  # fmt: skip
