"""scalein demo: count ad views per campaign and 10 s window over generated events, here and inside Spark.

The query is that of the Yahoo streaming benchmark: filter the views, look up each ad's campaign, count per campaign and
window. The first half runs it on this machine, over all events at once. A second, small flow over its result gives the
table that is printed: one line a window.

The second half runs the same flow inside Spark, as a stream. The events arrive as files, one after the other, through
Structured Streaming on this machine; the number of partitions changes while the stream runs. The rows must equal those
of the first half: closed windows are read from the files written, open ones from the state. Then Spark's own streaming
runs the same query over the same files, with its RocksDB state store, and its time is printed beside ours; what it
finds is compared as well.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from scalein.connectors.sinks.simple import format_table
from scalein.errors import BadArgument, InternalError
from scalein.options import Options

ADS, CAMPAIGNS, SPAN_S, SEED = 1_000, 100, 100, 7
START_MS = 1_700_000_000_000
MAX_ROWS = 1_000_000_000
FILES = 10
PARTITIONS, SCALED_PARTITIONS, SCALE_AFTER_BATCH = 2, 4, 4
SPARK_SETTINGS = {
    "spark.sql.streaming.stateStore.providerClass":
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    "spark.sql.shuffle.partitions": str(PARTITIONS),
    "spark.sql.session.timeZone": "UTC",
}  # fmt: skip
SPARK_QUERY = """
    SELECT /*+ BROADCAST(campaigns) */ campaign_id, window.start AS window_start, count(*) AS views
    FROM events JOIN campaigns USING (ad_id) WHERE event_type = 'view'
    GROUP BY campaign_id, window(event_time, '10 seconds')"""

T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=20_000_000, help="events to generate (default: 20,000,000)")
    parser.add_argument("--workers", type=int, default=None, help="threads (default: the cores this process may use)")
    parser.add_argument("--no-spark", action="store_true", help="run the first half only, no stream inside Spark")


def run(args: argparse.Namespace) -> int:
    options = Options.make(workers=args.workers)
    if not 1 <= args.rows <= MAX_ROWS:
        raise BadArgument(f"--rows must be from 1 to {MAX_ROWS:,}", found=f"{args.rows:,}")
    events, made_s = _timed(lambda: make_events(args.rows))
    print(f"{args.rows:,} ad events over {SPAN_S} s, {events.nbytes / 1e6:,.0f} MB of Arrow, made in {made_s:.1f} s\n")

    campaigns = make_campaigns()
    flow = count_views(si.from_arrow(events), campaigns)
    views, first_s = _timed(lambda: flow.collect(workers=options.workers))
    runs_s = [_timed(lambda: flow.collect(workers=options.workers))[1] for _ in range(3)]
    print(as_text(views))

    best_s = min(runs_s)
    workers = f"{options.workers} worker" + "s" * (options.workers > 1)
    print(f"\n{views.num_rows:,} counts of campaigns and windows. First run, with compiling: {first_s * 1e3:,.0f} ms")
    print(f"Best of {len(runs_s)} more: {best_s * 1e3:,.1f} ms = {args.rows / best_s / 1e6:,.1f} million rows/s "
          f"({events.nbytes / best_s / 1e9:,.1f} GB/s) with {workers}", flush=True)
    if args.no_spark:
        return 0
    missing = missing_for_spark()
    if missing is not None:
        print(f"\n{missing}")
    else:
        rows, summary = stream_in_spark(events, campaigns, views)
        print(f"\n{as_text(rows)}\n\n{summary}")
    return 0


def count_views(events: Flow, campaigns: pa.Table) -> Flow:
    """Views per campaign and window of 10 s."""
    return (
        events.with_watermark("event_time", "2s")  # a stream closes a window this long after its end
        .filter(col("event_type") == "view")
        .join(campaigns, on="ad_id")
        .group_by("campaign_id", si.tumbling("event_time", "10s"))
        .agg(views=si.count())
    )


def summarise(views: pa.Table) -> Flow:
    """One row a window: all views, the busiest campaign, and its views."""
    return (
        si.from_arrow(views)
        .group_by(window="window_start")
        .agg(views=col("views").sum(), busiest=col("campaign_id").arg_max("views"), most=col("views").max())
    )


def as_text(views: pa.Table) -> str:
    """The summary as a table for the terminal, in order of time."""
    answer = summarise(views).collect().sort_by("window")
    answer = answer.rename_columns(["window", "views", "busiest campaign", "its views"])
    return format_table(answer, group_digits={"views", "its views"})


def make_events(rows: int) -> pa.Table:
    """Events in order of time, up to 50 ms of jitter; every 10 s another ad is shown more than the rest."""
    rng = np.random.default_rng(SEED)
    elapsed_ms = np.arange(rows, dtype=np.int64) * (SPAN_S * 1000 - 50) // rows
    ads = rng.integers(0, ADS, rows, dtype=np.int32)
    promoted = (elapsed_ms // 10_000 * 37 % ADS).astype(np.int32)
    ads = np.where(rng.random(rows, dtype=np.float32) < 0.05, promoted, ads)
    times = START_MS + elapsed_ms + rng.integers(0, 50, rows, dtype=np.int16)
    kinds = pa.DictionaryArray.from_arrays(rng.integers(0, 3, rows, dtype=np.int8), ["view", "click", "purchase"])
    return pa.table({"event_time": pa.array(times).cast(pa.timestamp("ms")), "ad_id": ads, "event_type": kinds})


def make_campaigns() -> pa.Table:
    """Which campaign each ad belongs to: ten ads each, shuffled."""
    campaign = np.random.default_rng(SEED).permutation(ADS).astype(np.int32) // (ADS // CAMPAIGNS)
    return pa.table({"ad_id": np.arange(ADS, dtype=np.int32), "campaign_id": campaign})


# --- the second half: the same flow as a stream inside Spark


def missing_for_spark() -> str | None:
    """What this machine lacks for the second half, in one sentence; None if it lacks nothing."""
    second = "The second half runs the same flow as a stream inside Spark"
    if find_spec("pyspark") is None:
        return f'{second}, for which it needs pyspark and Java: pip install "scalein[spark]"'
    from scalein.spark.errors import SparkFailed
    from scalein.spark.session import java_version

    try:
        java_version()
    except SparkFailed as error:
        return f"{second}. {error.what}: {error.hint}"
    return None


def stream_in_spark(events: pa.Table, campaigns: pa.Table, views: pa.Table) -> tuple[pa.Table, str]:
    """Count the views of a stream of the events, and print its progress; gives the rows and a summary of the run.

    The rows must be those of `views`.
    """
    import scalein.spark as sis

    with TemporaryDirectory(prefix="scalein-demo-") as name:
        folder = Path(name)
        start = time.perf_counter()
        with ThreadPoolExecutor(1) as pool:  # meanwhile the JVM, another process, starts
            written = pool.submit(write_files, events, folder / "in")
            spark = sis.session()
            written.result()
        print(f"\nThe same flow as a stream: {FILES} files through Spark {spark.version} "
              f"(started in {time.perf_counter() - start:.1f} s)")
        stream = (spark.readStream.schema(spark.read.parquet(str(folder / "in")).schema)
                  .option("maxFilesPerTrigger", 1).parquet(str(folder / "in")))  # fmt: skip
        flow = count_views(si.flow(stream.schema), campaigns)
        query = sis.start(flow, stream, sink=si.to_parquet(folder / "out"), checkpoint=folder / "checkpoint",
                          partitions=PARTITIONS, trigger={"availableNow": True})
        for line in progress_lines(query):
            print(line, flush=True)
        still_open = sis.read_state(folder / "checkpoint")
        closed = ds.dataset(folder / "out", schema=still_open.schema).to_table()  # perhaps no window has closed
        batches_s = batch_times_s(query.query)
        print("  and once more by Spark's own streaming ...", flush=True)
        spark_batches_s = batch_times_s(stream_by_spark_alone(spark, campaigns, folder))
        check_spark_rows(folder / "spark-out", views)
    rows = pa.concat_tables([closed, still_open.select(closed.column_names)]).cast(views.schema)
    order = [(column, "ascending") for column in ("window_start", "campaign_id")]
    if not rows.sort_by(order).equals(views.sort_by(order)):
        raise InternalError("the stream's rows are not those of the first half")
    ratio = sum(spark_batches_s[1:]) / sum(batches_s[1:])
    return rows, (
        f"{closed.num_rows:,} counts of closed windows in files, {still_open.num_rows:,} of open ones in the state: "
        f"row for row the {views.num_rows:,} of the first half, each event counted exactly once\n"
        f"scalein inside Spark: {as_rate(batches_s, events.num_rows)}\n"
        f"Spark's own streaming, with RocksDB: {as_rate(spark_batches_s, events.num_rows)}, {ratio:.1f} times as long")


def as_rate(batches_s: list[float], rows: int) -> str:
    """How long the batches took: the first, which starts processes and compiles, and the rate of the others."""
    rate = rows * (FILES - 1) / FILES / sum(batches_s[1:])
    return (f"{sum(batches_s):.1f} s, {batches_s[0]:.1f} s of it for the first batch; "
            f"then {rate / 1e6:,.2f} million rows/s")


def batch_times_s(query: Any) -> list[float]:
    """Seconds of each batch with rows, as Spark measured them."""
    return [each.durationMs["triggerExecution"] / 1e3 for each in query.recentProgress if each.numInputRows]


def stream_by_spark_alone(spark: Any, campaigns: pa.Table, folder: Path) -> Any:
    """The same query by Spark alone, over the same files, one a batch, its rows written as Parquet; gives its handle,
    after its end.
    """
    own = spark.newSession()
    for name, value in SPARK_SETTINGS.items():
        own.conf.set(name, value)
    files = str(folder / "in")
    stream = (own.readStream.schema(own.read.parquet(files).schema).option("maxFilesPerTrigger", 1).parquet(files)
              .selectExpr("CAST(event_time AS timestamp) AS event_time", "ad_id", "event_type")
              .withWatermark("event_time", "2 seconds"))  # fmt: skip
    stream.createOrReplaceTempView("events")
    own.createDataFrame(campaigns).createOrReplaceTempView("campaigns")
    query = (own.sql(SPARK_QUERY).writeStream.format("parquet").outputMode("append").trigger(availableNow=True)
             .option("checkpointLocation", str(folder / "spark-checkpoint")).start(str(folder / "spark-out")))
    query.awaitTermination()
    return query


def check_spark_rows(folder: Path, views: pa.Table) -> None:
    """What Spark's own streaming wrote must be counts of the first half: those of the windows that it closed."""
    found = ds.dataset([str(path) for path in folder.glob("*.parquet")]).to_table()
    found = found.set_column(1, "window_start", found["window_start"].cast(pa.timestamp("us")).cast(
        views.schema.field("window_start").type))
    joined = found.join(views.select(found.column_names), found.column_names, join_type="left anti")
    if joined.num_rows:
        raise InternalError("Spark's own streaming counts otherwise", found=joined.slice(0, 1).to_pylist())


def progress_lines(query: Any) -> Iterator[str]:
    """A line for each micro-batch; after batch SCALE_AFTER_BATCH the stream gets more partitions."""
    shown = -1
    while True:
        is_over = query.await_termination(0.05)
        for progress in query.recent_progress:
            if progress["batch_id"] <= shown:
                continue
            shown = progress["batch_id"]
            yield (f"  batch {progress['batch_id']:>2}: {progress['rows_in']:>9,} events in "
                   f"{progress['duration_s']:.2f} s, {progress['partitions']} partitions, "
                   f"{progress['rows_out']:>3,} counts out, {progress['state_bytes'] / 1e3:,.0f} kB of state")
            if shown == SCALE_AFTER_BATCH:
                query.scale(SCALED_PARTITIONS)
                yield f"  scaled from {PARTITIONS} to {SCALED_PARTITIONS} partitions; no state moved"
        if is_over:
            return


def write_files(events: pa.Table, folder: Path) -> None:
    """The events as Parquet files, in order: Spark reads files in order of their modification times."""
    folder.mkdir()
    for number in range(FILES):
        first = number * events.num_rows // FILES
        path = folder / f"{number:02}.parquet"
        pq.write_table(events.slice(first, (number + 1) * events.num_rows // FILES - first), path)
        os.utime(path, (1_700_000_000 + number,) * 2)


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start
