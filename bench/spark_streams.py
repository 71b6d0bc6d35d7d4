"""Streams on Spark over a long time, with tiny batches and with much state: what does not show in a rate.

`python -m bench.spark_streams [batches] [tiny] [restart]` prints, each beside Spark's own aggregation in RocksDB:

batches  the time of a micro-batch and the files of the checkpoint, after 50 and after 200 of them
tiny     the time of a micro-batch of ten rows, and of none
restart  a new process and session, 1 GB of state: seconds from the start of the query to the end of its first batch

Each case runs in processes of its own, with a local session of two cores. Results are compared with `collect`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import scalein as si
from bench.bench_spark import ROCKSDB
from bench.race import assert_same
from scalein import col
from scalein.api.flow import Flow

BATCHES, TINY_BATCHES, STATE_KEYS = 200, 30, 8_000_000
VALUES = [f"v{number}" for number in range(8)]
SPARKS_OWN = "spark"  # the folder of a checkpoint that Spark writes


def session() -> Any:
    from scalein.spark.session import session

    return session(cores=2, config={**ROCKSDB, "spark.driver.memory": "4g",
                                    "spark.sql.streaming.numRecentProgressUpdates": 10 * BATCHES})


def write_file(folder: Path, number: int, table: pa.Table) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    hidden = folder / f".{number:05}.parquet"  # Spark must see the file with its final time only
    pq.write_table(table, hidden)
    os.utime(hidden, (1_700_000_000 + number,) * 2)
    hidden.rename(folder / f"{number:05}.parquet")


def some_rows(number: int, rows: int, keys: int) -> pa.Table:
    rng = np.random.default_rng(number)
    return pa.table({"key": rng.integers(0, keys, rows), "value": rng.integers(0, 1 << 20, rows) / 64.0})


def arriving(spark: Any, folder: Path) -> Any:
    schema = spark.read.parquet(str(folder / "00000.parquet")).schema
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(folder))


def running(values: Flow) -> Flow:
    return values.group_by("key").agg(s=col("value").sum(), n=si.count())


def by_scalein(spark: Any, folder: Path, place: Path, flow: Callable[[Flow], Flow]) -> Any:
    """Start the stream, which writes each change as Parquet."""
    import scalein.spark as sis

    stream = arriving(spark, folder)
    return sis.start(flow(si.flow(stream.schema)), stream, sink=si.to_parquet(place / "out"),
                     checkpoint=place / "checkpoint", partitions=2, trigger={"availableNow": True}, emit="changes")


def by_spark(spark: Any, folder: Path, place: Path) -> Any:
    """Start Spark's own aggregation, which drops its output."""
    from pyspark.sql import functions as f

    totals = arriving(spark, folder).groupBy("key").agg(f.sum("value").alias("s"), f.count("*").alias("n"))
    return (totals.writeStream.outputMode("update").format("noop")
            .option("checkpointLocation", str(place / "checkpoint")).trigger(availableNow=True).start())  # fmt: skip


def batch_times_ms(query: Any) -> list[float]:
    """Milliseconds of each batch, as Spark measured them."""
    found = {each.batchId: each.durationMs["triggerExecution"] for each in query.recentProgress
             if "addBatch" in each.durationMs}
    return [float(found[number]) for number in sorted(found)]


def files_by_owner(checkpoint: Path) -> Counter[str]:
    return Counter("spark" if path.relative_to(checkpoint).parts[0] == SPARKS_OWN else "scalein"
                   for path in checkpoint.rglob("*") if path.is_file())


# --- the cases


def many_batches(folder: Path) -> None:
    import scalein.spark as sis

    tables = [some_rows(number, 2_000, 20_000) for number in range(BATCHES)]
    for number, table in enumerate(tables):
        write_file(folder / "in", number, table)
    spark = session()
    files: dict[int, Counter[str]] = {}
    job = by_scalein(spark, folder / "in", folder / "ours", running)
    while not job.wait(0.2):
        if job.query.lastProgress is not None:
            files[job.query.lastProgress.batchId] = files_by_owner(folder / "ours" / "checkpoint")
    want = running(si.from_arrow(pa.concat_tables(tables))).collect()
    assert_same(sis.read_state(folder / "ours" / "checkpoint"), want, by=("key",))
    theirs = by_spark(spark, folder / "in", folder / "theirs")
    theirs.awaitTermination()
    for name, times in (("scalein", batch_times_ms(job.query)), ("spark", batch_times_ms(theirs))):
        assert len(times) == BATCHES, len(times)
        early, late = statistics.median(times[10:50]), statistics.median(times[-40:])
        print(f"batches  {name:8} batches 10 to 50: {early:4.0f} ms, the last 40: {late:4.0f} ms ({late / early:.2f})")
    for wanted in (50, 100, 150, BATCHES - 1):
        number = min(files, key=lambda each: abs(each - wanted))
        print(f"batches  after batch {number:3}: {files[number]['scalein']} files of scalein, "
              f"{files[number]['spark']} of Spark")


def tiny_batches(folder: Path) -> None:
    import scalein.spark as sis

    spark = session()
    found: dict[str, dict[str, float]] = {}
    for kind, rows in (("ten rows", 10), ("empty", 0)):
        # The first file has rows: the state is not empty.
        tables = [some_rows(number, rows if number else 1_000, 1_000) for number in range(TINY_BATCHES)]
        for number, table in enumerate(tables):
            write_file(folder / kind, number, table)
        found[kind] = {}
        for turn in range(2):
            job = by_scalein(spark, folder / kind, folder / f"{kind} ours {turn}", running)
            job.wait()
            theirs = by_spark(spark, folder / kind, folder / f"{kind} theirs {turn}")
            theirs.awaitTermination()
            want = running(si.from_arrow(pa.concat_tables(tables))).collect()
            assert_same(sis.read_state(folder / f"{kind} ours {turn}" / "checkpoint"), want, by=("key",))
            for name, query in (("scalein", job.query), ("spark", theirs)):
                took = statistics.median(batch_times_ms(query)[5:])
                found[kind][name] = min(took, found[kind].get(name, took))
        ours, their = found[kind]["scalein"], found[kind]["spark"]
        print(f"tiny     {kind}: scalein {ours:.0f} ms, Spark {their:.0f} ms: {ours - their:+.0f} ms (goal: at most "
              "+150)")


def wide(values: Flow) -> Flow:
    """Some 130 bytes of state a key."""
    sums = {f"s{name}": col(name).sum() for name in VALUES}
    return values.group_by("key").agg(**sums, **{f"m{name}": col(name).max() for name in VALUES[:6]}, n=si.count())


def wide_rows(number: int, first: int, rows: int) -> pa.Table:
    values = np.random.default_rng(number).random(rows)
    return pa.table({"key": np.arange(first, first + rows), **{name: values * k for k, name in enumerate(VALUES, 1)}})


def fill(folder: Path) -> None:
    """State of a stream, and the files of Spark's own query, which has next to none."""
    step = STATE_KEYS // 8
    for number in range(8):
        write_file(folder / "in", number, wide_rows(number, number * step, step))
        write_file(folder / "small", number, some_rows(number, 10, 10))
    spark = session()
    by_scalein(spark, folder / "in", folder / "ours", wide).wait()
    by_spark(spark, folder / "small", folder / "theirs").awaitTermination()
    size = sum(path.stat().st_size for path in (folder / "ours" / "checkpoint").rglob("*") if path.is_file())
    print(json.dumps({"state_gb": size / 1e9}))


def resume(folder: Path, whose: str, number: int) -> None:
    """Print the seconds of one more batch, from the start of the query on."""
    name = "in" if whose == "scalein" else "small"
    write_file(folder / name, number, wide_rows(number, 0, 1_000) if whose == "scalein" else some_rows(number, 10, 10))
    spark = session()
    spark.range(10).count()  # the session itself has run a job
    start = time.perf_counter()
    if whose == "scalein":
        by_scalein(spark, folder / name, folder / "ours", wide).wait()
        took_s = time.perf_counter() - start
        table = pa.concat_tables([pq.read_table(path) for path in (folder / "ours" / "out").glob("*.parquet")
                                  if int(path.name.split("-")[2]) == number])
        want = sum(wide_rows(each, 0, 1_000)["v0"].to_numpy() for each in (0, *range(8, number + 1)))
        assert np.allclose(np.sort(table["sv0"].to_numpy()), np.sort(want)), "other sums than those of all rows"
    else:
        by_spark(spark, folder / name, folder / "theirs").awaitTermination()
        took_s = time.perf_counter() - start
    print(json.dumps({"seconds": took_s}))


def restart(folder: Path) -> None:
    state_gb = child("fill", folder)["state_gb"]
    took: dict[str, list[float]] = {"scalein": [], "spark": []}
    for number in range(8, 10):
        for whose, each in took.items():
            each.append(child("resume", folder, whose, str(number))["seconds"])
    ours, theirs = min(took["scalein"]), min(took["spark"])
    print(f"restart  {state_gb:.2f} GB of state: scalein {ours:.1f} s, Spark with ten keys {theirs:.1f} s: "
          f"{ours - theirs:+.1f} s (goal: below +2)")


def child(*given: object) -> Any:
    done = subprocess.run([sys.executable, "-m", "bench.spark_streams", "--child", *map(str, given)],
                          stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


CASES: dict[str, Callable[[Path], None]] = {"batches": many_batches, "tiny": tiny_batches, "restart": restart}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--child", action="store_true")
    given = parser.parse_args()
    if given.child:
        what, folder, *more = given.cases
        if what == "fill":
            fill(Path(folder))
        elif what == "resume":
            resume(Path(folder), more[0], int(more[1]))
        else:
            CASES[what](Path(folder))
        return
    for name in given.cases or CASES:
        folder = tempfile.mkdtemp(prefix="scalein-streams-")
        start = time.monotonic()
        if name == "restart":
            restart(Path(folder))
        else:
            subprocess.run([sys.executable, "-m", "bench.spark_streams", "--child", name, folder], check=True)
        print(f"{name} took {time.monotonic() - start:.0f} s", flush=True)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
