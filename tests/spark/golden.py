"""Streams as version 1 of the format of runs leaves them, for every later version: `python -m tests.spark.golden`.

It writes those that are missing; for a new version of the format it has a new folder. What is there stays.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from tests.spark.simulated import run, start_stream

FOLDER = Path(__file__).parent / "golden_v1"
ROWS = 60
TABLE = pa.table({
    "id": [n * 7 % 31 for n in range(ROWS)], "k": [None if n % 11 == 5 else f"key {n % 4}" for n in range(ROWS)],
    "t": pa.array([n * 10 - (200 if n % 13 == 6 else 0) for n in range(ROWS)], pa.timestamp("us")),
    "x": [float("nan") if n % 17 == 3 else -n / 4 for n in range(ROWS)],
})  # fmt: skip
BATCHES = [[TABLE.slice(first, 10), TABLE.slice(first + 10, 10)] for first in (0, 20, 40)]  # each of two partitions
BEFORE = 2  # batches that are in the checkpoint

FLOWS: dict[str, tuple[Callable[[Flow], Flow], str]] = {
    "running": (lambda s: s.group_by("k").agg(
        n=si.count(), total=col("id").sum(), m=col("x").mean(), hi=col("x").max(), low=col("id").min()), "changes"),
    "text": (lambda s: s.group_by("id").agg(word=col("k").min(), other=col("k").arg_max("x")), "changes"),
    "together": (lambda s: s.group_by("k").agg(v=col("id").var(), d=col("x").std(), c=si.corr("id", "x"),
                                               a=col("x").arg_min("id")), "changes"),
    "windows": (lambda s: s.with_watermark("t", "25us").group_by("k", si.sliding("t", "60us", every="30us")).agg(
        n=si.count(), total=col("id").sum()), "final"),
    "rows": (lambda s: s.group_by("k").agg(u=col("id").n_unique(), q=col("x").quantile(0.5)), "changes"),
    "distinct": (lambda s: s.select("id", "k").distinct(), "final"),
}  # fmt: skip


def flow_of(name: str) -> Flow:
    return FLOWS[name][0](si.flow(TABLE.schema))


def write() -> None:
    for name, (_, emit) in FLOWS.items():
        if (FOLDER / name).exists():  # what a version has written is never written again
            continue
        folder = Path(tempfile.mkdtemp())
        coordinator = start_stream(flow_of(name), folder / "checkpoint", si.to_memory(), emit=emit, partitions=2)
        run(coordinator, BATCHES[:BEFORE])
        coordinator.close()
        shutil.copytree(folder / "checkpoint", FOLDER / name, ignore=shutil.ignore_patterns("*lock*", "*LOCK*"))
        shutil.rmtree(folder)


if __name__ == "__main__":
    write()
