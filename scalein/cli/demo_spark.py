"""The second half of the demo: the same flow as a stream, inside Spark.

The events come as files, one after the other, through Structured Streaming on this machine. Stages are compiled in
Spark's workers, counts live in our state, windows close when event time has passed them, and the number of partitions
changes while the stream runs. In the end the rows must be those of the first half: the windows that were closed from
the files written, those still open from the state.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

import scalein as si
from scalein.api.flow import Flow
from scalein.errors import InternalError

FILES = 10
PARTITIONS, MORE_PARTITIONS, SCALE_AFTER = 2, 4, 4


def what_it_needs() -> str | None:
    """One sentence on what this machine lacks for the second half; None if it has all."""
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


def stream(events: pa.Table, query: Callable[[Flow], Flow], views: pa.Table) -> tuple[pa.Table, str]:
    """Run a query over the events as a stream, and tell how it goes; its rows, and what to say of them.

    They must be the rows of `views`.
    """
    import scalein.spark as sis

    with TemporaryDirectory(prefix="scalein-demo-") as name:
        folder = Path(name)
        start = time.perf_counter()
        with ThreadPoolExecutor(1) as pool:  # the session is another process's work
            written = pool.submit(write_files, events, folder / "in")
            spark = sis.session()
            written.result()
        print(f"\nThe same flow as a stream: {FILES} files through Spark {spark.version} "
              f"(started in {time.perf_counter() - start:.1f} s)")
        arriving = (spark.readStream.schema(spark.read.parquet(str(folder / "in")).schema)
                    .option("maxFilesPerTrigger", 1).parquet(str(folder / "in")))  # fmt: skip
        start = time.perf_counter()
        job = sis.start(query(si.flow(arriving.schema)), arriving, sink=si.to_parquet(folder / "out"),
                        checkpoint=folder / "checkpoint", partitions=PARTITIONS, trigger={"availableNow": True})
        for line in progress(job):
            print(line, flush=True)
        took_s = time.perf_counter() - start
        still_open = sis.read_state(folder / "checkpoint")
        closed = ds.dataset(folder / "out", schema=still_open.schema).to_table()  # perhaps no window has closed
    rows = pa.concat_tables([closed, still_open.select(closed.column_names)]).cast(views.schema)
    by = [(column, "ascending") for column in ("window_start", "campaign_id")]
    if not rows.sort_by(by).equals(views.sort_by(by)):
        raise InternalError("the stream's rows are not those of the first half")
    return rows, (
        f"{closed.num_rows:,} counts of closed windows in files, {still_open.num_rows:,} of open ones in the state: "
        f"row for row the {views.num_rows:,} of the first half\n{events.num_rows:,} events in {took_s:.1f} s = "
        f"{events.num_rows / took_s / 1e6:,.2f} million rows/s through Spark, each counted exactly once")


def progress(job: Any) -> Iterator[str]:
    """A line a batch; after some of them the stream gets more partitions."""
    seen = -1
    while True:
        is_over = job.await_termination(0.05)
        now = job.last_progress
        if now is not None and now["batch_id"] != seen:
            seen = now["batch_id"]
            yield told(now)
            if seen == SCALE_AFTER:
                job.scale(MORE_PARTITIONS)
                yield f"  scaled from {PARTITIONS} to {MORE_PARTITIONS} partitions; no state moved"
        if is_over:
            return


def told(now: dict[str, Any]) -> str:
    """One line on a batch."""
    return (f"  batch {now['batch_id']:>2}: {now['rows_in']:>9,} events in {now['duration_s']:.2f} s, "
            f"{now['partitions']} partitions, {now['rows_out']:>3,} counts out, "
            f"{now['state_bytes'] / 1e3:,.0f} kB of state")


def write_files(events: pa.Table, folder: Path) -> None:
    """The events as Parquet files, in order; a stream takes files in order of their times."""
    folder.mkdir()
    for number in range(FILES):
        first = number * events.num_rows // FILES
        path = folder / f"{number:02}.parquet"
        pq.write_table(events.slice(first, (number + 1) * events.num_rows // FILES - first), path)
        os.utime(path, (1_700_000_000 + number,) * 2)
