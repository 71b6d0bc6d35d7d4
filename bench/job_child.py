"""A job in a process of its own, for `bench_job_killed`: `fill` builds its state and dies, `go` goes on and dies."""

from __future__ import annotations

import os
import signal
import sys
import time

BEGAN_S = time.perf_counter()

import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402

import scalein as si  # noqa: E402
from scalein import col  # noqa: E402
from scalein.api.flow import Flow  # noqa: E402


def flow(keys: int, batch_rows: int, rows_per_second: float | None) -> Flow:
    """Every key once, then some of them again."""

    def source(start: int, count: int) -> pa.RecordBatch:
        is_new = start < keys
        drawn = np.arange(start, start + count) if is_new else np.random.default_rng(start).integers(0, keys, count)
        return pa.record_batch({"k": drawn, "v": np.ones(count)})

    rows = si.generate(source, {"k": pa.int64(), "v": pa.float64()}, rows=1 << 50, batch_rows=batch_rows,
                       rows_per_second=rows_per_second)
    v = col("v")
    return rows.group_by("k").agg(n=si.count(), s=v.sum(), lo=v.min(), hi=v.max())


def fill(folder: str, keys: int) -> None:
    sink = si.to_callback(lambda batch: None)
    job = flow(keys, 1 << 18, None).start(sink=sink, checkpoint=folder, every="5s", workers=2, emit="changes")
    while int(str(job.metrics()["rows_in"])) < keys:
        time.sleep(0.1)
    job.snapshot()
    print(int(str(job.metrics()["state_bytes"])) >> 20, flush=True)


def go_on(folder: str, keys: int) -> None:
    """Print the seconds that imports, `start` and the first output took."""
    first: list[float] = []
    sink = si.to_callback(lambda batch: first.append(time.perf_counter()))
    imported = time.perf_counter()
    flow(keys, 1_000, 1e6).start(sink=sink, checkpoint=folder, workers=2, emit="changes")
    opened = time.perf_counter()
    while not first:
        time.sleep(0.001)
    print(imported - BEGAN_S, opened - imported, first[0] - opened, flush=True)


if __name__ == "__main__":
    (fill if sys.argv[1] == "fill" else go_on)(sys.argv[2], int(sys.argv[3]))
    os.kill(os.getpid(), signal.SIGKILL)
