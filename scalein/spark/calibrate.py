"""What Spark costs beside the work itself, measured on a session: of a micro-batch, a task, and Arrow to Python."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from scalein.api.column import count
from scalein.api.flow import Flow
from scalein.api.sinks import to_memory
from scalein.api.sources import flow
from scalein.errors import SourceLoc
from scalein.spark.session import session
from scalein.spark.streaming.start import start

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BATCHES = 16  # of the stream that is timed; the first ones warm up
ROWS = 4_000_000  # of 8 bytes, that cross to Python workers
TURNS = 3


def measure(at: SourceLoc) -> tuple[float, float, float]:
    """Seconds of a micro-batch without rows to speak of, of a task, and bytes a second to a Python worker."""
    spark = session()
    slots = max(1, spark.sparkContext.defaultParallelism)
    few, many = (min(_seconds(spark, tasks, tasks) for _ in range(TURNS)) for tasks in (slots, 9 * slots))
    task_s = max((many - few) / 8, 1e-4)
    full = min(_seconds(spark, ROWS * slots, slots) for _ in range(TURNS))
    empty = min(_seconds(spark, slots, slots) for _ in range(TURNS))
    return _batch_s(spark), task_s, 8.0 * ROWS / max(full - empty, 1e-3)


def _seconds(spark: SparkSession, rows: int, tasks: int) -> float:
    """Of a query whose rows go to Python and are dropped there."""
    started = time.perf_counter()
    spark.range(0, rows, 1, tasks).mapInArrow(_dropped, "n bigint").count()
    return time.perf_counter() - started


def _dropped(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from (batch.slice(0, 0).rename_columns(["n"]) for batch in batches)


def _batch_s(spark: SparkSession) -> float:
    """The median time of a micro-batch of a few rows, of a stream with state."""
    with tempfile.TemporaryDirectory(prefix="scalein-calibrate-") as folder:
        place = Path(folder)
        (place / "in").mkdir()
        for number in range(BATCHES):
            pq.write_table(pa.table({"k": [number, 1]}), place / "in" / f"{number:03}.parquet")
        stream = spark.readStream.schema("k bigint").option("maxFilesPerTrigger", 1).parquet(str(place / "in"))
        counted: Flow = flow({"k": pa.int64()}).group_by("k").agg(n=count())
        job = start(counted, stream, sink=to_memory(), checkpoint=place / "checkpoint", partitions=2,
                    trigger={"availableNow": True}, emit="changes")
        job.wait()
        times = [float(each.durationMs["triggerExecution"]) / 1e3 for each in job.query.recentProgress
                 if "addBatch" in each.durationMs]
    return statistics.median(times[len(times) // 3:])
