"""The drivers of `test_cluster.py`, each a process of its own: `python -m tests.spark.cluster_driver ...`.

Faults are injected by a step of the flows: it creates a marker file when a task runs it, takes a moment, fails the
first time, or waits the first time until Spark has started a speculative attempt.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from scalein.spark.standalone import SHORT_LIVED

ROWS, FILES = 48_000, 12
SLOW_S = 60.0  # for which a task waits for its speculative attempt
Step = Callable[[pa.RecordBatch], pa.RecordBatch]


def make_events() -> pa.Table:
    """Eight minutes of events, up to a second out of order; 500 users, the first of them in a third of all rows."""
    rng = np.random.default_rng(6)
    times = np.arange(ROWS) * 10_000 + rng.integers(-500_000, 500_000, ROWS)
    users = np.where(rng.random(ROWS) < 0.3, 0, rng.integers(0, 500, ROWS))
    return pa.table({"time": pa.array(1_700_000_000_000_000 + times, pa.timestamp("us")), "user": users,
                     "price": rng.integers(0, 1_000, ROWS)})


def write_events(folder: Path) -> None:
    """As files that a stream reads one after the other."""
    folder.mkdir()
    table = make_events()
    for number in range(FILES):
        path = folder / f"{number:02}.parquet"
        pq.write_table(table.slice(number * ROWS // FILES, ROWS // FILES), path)
        os.utime(path, (1_700_000_000 + number,) * 2)


def inject_faults(markers: Path, name: str, *, pause_s: float = 0.0, fail: bool = False, slow_s: float = 0.0) -> Step:
    """A step that passes batches through: it marks that it runs, and injects each fault once.

    A step that waits continues when another attempt of its task runs; then both attempts end.
    """
    folder_name = str(markers)

    def step(batch: pa.RecordBatch) -> pa.RecordBatch:
        import os
        import time

        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        task = f"{context.stageId()}.{context.partitionId()}"

        def is_first(what: str) -> bool:
            try:
                os.close(os.open(f"{folder_name}/{name}-{what}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return False
            return True

        os.close(os.open(f"{folder_name}/{name}-at-work-{time.time_ns()}", os.O_CREAT))
        if fail and is_first("failed"):
            raise RuntimeError("a task that fails once")
        if slow_s and is_first("slow"):
            is_first(f"slow-{task}")
            end = time.monotonic() + slow_s
            while not os.path.exists(f"{folder_name}/{name}-doubled") and time.monotonic() < end:
                time.sleep(0.05)
        elif slow_s and os.path.exists(f"{folder_name}/{name}-slow-{task}"):
            is_first("doubled")
        time.sleep(pause_s)
        return batch

    return step


def by_user(flow: Flow) -> Flow:
    return flow.group_by("user").agg(n=si.count(), spent=col("price").sum(), dear=col("price").max())


def by_window(flow: Flow) -> Flow:
    return flow.group_by("user", si.tumbling("time", "1m")).agg(n=si.count(), spent=col("price").sum())


def connect(url: str) -> Any:
    from scalein.spark.session import session

    return session(config={
        "spark.master": url, "spark.driver.host": "127.0.0.1", "spark.driver.memory": "512m", "spark.ui.enabled": False,
        "spark.driver.extraJavaOptions": SHORT_LIVED, "spark.executor.extraJavaOptions": SHORT_LIVED,
        "spark.executor.memory": "512m", "spark.executor.cores": 1, "spark.sql.shuffle.partitions": 4,
        "spark.speculation": True, "spark.speculation.interval": "100ms", "spark.speculation.multiplier": 1.2,
        "spark.speculation.quantile": 0.5, "spark.speculation.minTaskRuntime": "100ms"})


def check(got: pa.Table, want: pa.Table, what: str) -> None:
    """Assert that both have the same rows."""
    got = got.select(want.column_names).cast(want.schema)
    by = [(name, "ascending") for name in want.column_names]
    assert got.sort_by(by).equals(want.sort_by(by)), (
        f"{what}: {got.num_rows} rows for {want.num_rows}, n {pc.sum(got['n'])} for {pc.sum(want['n'])}")
    print(what, "is right", flush=True)


def batch(url: str, folder: Path, markers: Path) -> None:
    """apply with a failing and a speculated task; run, slowly enough to lose a worker meanwhile."""
    import scalein.spark as sis

    spark, table = connect(url), make_events()
    faulty = inject_faults(markers, "apply", fail=True, slow_s=SLOW_S)
    flow = by_user(si.flow(table.schema).map_batches(faulty, table.schema))
    df = spark.createDataFrame(table).repartition(6)
    check(sis.apply(flow, df).toArrow(), by_user(si.from_arrow(table)).collect(), "apply")
    slow = inject_faults(markers, "run", pause_s=0.4)
    flow = by_user(si.read_parquet(folder / "in").map_batches(slow, table.schema))
    check(sis.run(flow, spark).toArrow(), by_user(si.from_arrow(table)).collect(), "run")
    found = sis.doctor(spark)
    assert found.ok, found
    assert sum(host.executors for host in found.executors) >= 1
    stream(url, folder, markers)


def shipped(url: str, folder: Path, markers: Path) -> None:
    """The stream on executors whose Python has no scalein until it is sent to them."""
    import scalein.spark as sis

    spark = connect(url)
    (problem,) = sis.doctor(spark).problems
    assert problem.endswith("has no scalein: install it there, or call scalein.spark.ship(spark) once"), problem
    sis.ship(spark)
    stream(url, folder, markers, "shipped")


def stream(url: str, folder: Path, markers: Path, name: str = "stream") -> None:
    """All files, as a stream of windows; started again it resumes."""
    import scalein.spark as sis

    spark, table = connect(url), make_events()
    slow = inject_faults(markers, name, fail=True, slow_s=SLOW_S, pause_s=0.1)
    flow = by_window(si.flow(table.schema).with_watermark("time", "5s").map_batches(slow, table.schema))
    arriving = (spark.readStream.schema(spark.read.parquet(str(folder / "in")).schema)
                .option("maxFilesPerTrigger", 2).parquet(str(folder / "in")))  # a single task is not speculated
    job = sis.start(flow, arriving, sink=si.to_parquet(folder / "out"), checkpoint=folder / "checkpoint", partitions=3,
                    trigger={"availableNow": True})
    job.wait()
    still_open = sis.read_state(folder / "checkpoint")
    closed = ds.dataset(folder / "out").to_table()
    assert 0 < still_open.num_rows < closed.num_rows
    want = by_window(si.from_arrow(table)).collect()
    check(pa.concat_tables([closed, still_open.select(closed.column_names)]), want, "start")


if __name__ == "__main__":
    mode, url, folder_name = sys.argv[1:4]
    {"batch": batch, "stream": stream, "shipped": shipped}[mode](url, Path(folder_name), Path(folder_name) / "marks")
