"""What Spark costs beside the work itself, measured on a session: micro-batches, tasks, Arrow to Python, runs of state.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from scalein.api.column import count
from scalein.api.flow import Flow
from scalein.api.sinks import to_parquet
from scalein.api.sources import flow
from scalein.errors import SourceLoc
from scalein.spark.session import session
from scalein.spark.streaming.start import start

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BATCHES = 16  # of the stream that is timed; the first ones warm up
GROUPS, GROUP_BATCHES = 300_000, 8  # of a stream with much state: each batch changes all groups
WAVES = 4  # of tasks, more than one
ROWS = 4_000_000  # of 8 bytes, that cross to Python workers, or are read from a file
TURNS = 3


def measure(at: SourceLoc) -> dict[str, float]:
    """The figures by the names of `model.calibration.SparkFigures`: a micro-batch without rows to speak of, tasks, a
    shuffle, and the bytes and groups that one core handles.
    """
    spark = session().newSession()  # with settings of its own
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "65536")  # as streams have it
    slots = max(1, spark.sparkContext.defaultParallelism)
    _seconds(spark, slots, slots, shuffled=True)  # workers start
    empty, full, shuffled = (min(_seconds(spark, rows, slots, many) for _ in range(TURNS))
                             for rows, many in ((slots, False), (ROWS * slots, False), (slots, True)))
    alone = min(_alone_s(spark, slots) for _ in range(TURNS))
    one_each = [pa.table({"k": [0, 1]})] * BATCHES
    batch_s, many_s = _batch_s(one_each, slots), _batch_s(one_each, (1 + WAVES) * slots)
    group_s, read_bytes_s = _of_groups(batch_s, slots)
    return {"batch_s": batch_s, "task_s": max((many_s - batch_s) / WAVES, 1e-4),
            "transfer_bytes_s": 8.0 * ROWS / max(full - empty, 1e-3), "stage_s": max(shuffled - alone, 1e-3),
            "read_bytes_s": read_bytes_s, "group_s": group_s}


def _seconds(spark: SparkSession, rows: int, tasks: int, shuffled: bool = False) -> float:
    """Of a query whose rows go to Python and are dropped there, perhaps after those that others shuffle to them."""
    started = time.perf_counter()
    found = spark.range(0, rows, 1, tasks).mapInArrow(_dropped, "n bigint")
    if shuffled:
        found = found.repartition(tasks, "n").mapInArrow(_dropped, "n bigint")
    found.collect()
    return time.perf_counter() - started


def _alone_s(spark: SparkSession, tasks: int) -> float:
    """Of one wave of tasks without rows, as those that read files themselves."""
    started = time.perf_counter()
    spark.sparkContext.parallelize(range(tasks), tasks).mapPartitions(_nothing).collect()
    return time.perf_counter() - started


def _nothing(numbers: Iterable[int]) -> Iterator[int]:
    yield from ()


def _dropped(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from (batch.slice(0, 0).rename_columns(["n"]) for batch in batches)


def _of_groups(batch_s: float, cores: int) -> tuple[float, float]:
    """Seconds of a group that is read, merged and written, and bytes of Parquet that one core reads in a second."""
    keys = np.random.default_rng(1).permutation(GROUPS)
    table = pa.table({"k": keys})
    with tempfile.TemporaryDirectory(prefix="scalein-calibrate-") as folder:
        path = f"{folder}/keys.parquet"
        pq.write_table(pa.table({"n": np.random.default_rng(2).integers(0, 1 << 40, ROWS // 4)}), path)
        started, took = time.thread_time(), []
        for _ in range(TURNS):
            started = time.thread_time()
            read = pq.read_table(path, use_threads=False)
            took.append(time.thread_time() - started)
    groups = GROUPS * 2  # there is as much state as changes: the old is read and merged, and both are written
    return (max(_batch_s([table] * GROUP_BATCHES, cores) - batch_s, 1e-3) * cores / groups,
            read.nbytes / max(min(took), 1e-6))


def _batch_s(tables: list[pa.Table], partitions: int) -> float:
    """The median time of a micro-batch with the rows of one of these tables, of a stream with state."""
    spark = session()
    with tempfile.TemporaryDirectory(prefix="scalein-calibrate-") as folder:
        place = Path(folder)
        (place / "in").mkdir()
        for number, table in enumerate(tables):
            pq.write_table(table, place / "in" / f"{number:03}.parquet")
        stream = spark.readStream.schema("k bigint").option("maxFilesPerTrigger", 1).parquet(str(place / "in"))
        counted: Flow = flow({"k": pa.int64()}).group_by("k").agg(n=count())
        job = start(counted, stream, sink=to_parquet(place / "out"), checkpoint=place / "checkpoint",
                    partitions=partitions, trigger={"availableNow": True}, emit="changes")
        job.wait()
        times = [float(each.durationMs["triggerExecution"]) / 1e3 for each in job.query.recentProgress
                 if "addBatch" in each.durationMs]
    return statistics.median(times[len(times) // 3:])
