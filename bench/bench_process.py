"""A class with state over the rows of a million keys: a running sum and a rule with a threshold.

The goals are absolute: 10 M rows/s on one core in `collect`, 5 M in a job, with and without a watermark. The rows that
it gives are compared with those of a numpy program over all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import scalein as si
from bench.data import SEED
from bench.race import assert_same

KEYS = 1_000_000
BATCH_ROWS = 1 << 16
MAX_DELAY_MS = 50


@si.process
class Spikes:
    total: int = 0
    n: int = 0

    def on_row(self, row: Any) -> Any:
        self.total += row.price
        self.n += 1
        if row.price > 9990 and row.price * self.n > 2 * self.total:
            yield {"price": row.price, "total": self.total, "n": self.n}


def sales(rows: int) -> pa.Table:
    """Rows in the order of time, but for 50 ms."""
    rng = np.random.default_rng(SEED + 23)
    times = np.arange(rows) // 8 + rng.integers(0, MAX_DELAY_MS, rows)
    return pa.table({"user": rng.integers(0, KEYS, rows), "price": rng.integers(0, 10_000, rows),
                     "ts": pa.array(times, pa.timestamp("ms"))})


def by_numpy(table: pa.Table, by_time: bool) -> pa.Table:
    user, price, times = (np.asarray(table[name].cast(pa.int64())) for name in ("user", "price", "ts"))
    if by_time:
        order = np.argsort(times, kind="stable")
        user, price = user[order], price[order]
    order = np.argsort(user, kind="stable")
    user, price = user[order], price[order]
    is_first = np.diff(user, prepend=-1) != 0
    starts = np.flatnonzero(is_first)[np.cumsum(is_first) - 1]
    sums = np.concatenate(([0], np.cumsum(price)))
    total, n = sums[1:] - sums[starts], np.arange(len(user)) - starts + 1
    picked = (price > 9990) & (price * n > 2 * total)
    return pa.table({"user": user[picked], "price": price[picked], "total": total[picked], "n": n[picked]})


def run(table: pa.Table, timed: bool, way: str, folder: Path) -> Callable[[], pa.Table]:
    def flow(source: si.Flow) -> si.Flow:
        return (source.with_watermark("ts", f"{MAX_DELAY_MS}ms") if timed else source).group_by("user").process(Spikes)

    bounded, batches = flow(si.from_arrow(table)), table.to_batches(max_chunksize=BATCH_ROWS)
    runs = iter(range(1 << 30))

    def job() -> pa.Table:
        out = si.to_memory()
        checkpoint = {"checkpoint": folder / f"c{next(runs)}", "every": "1s"} if way == "checkpoints" else {}
        flow(si.from_batches(batches, table.schema)).start(sink=out, workers=1, **checkpoint).wait()  # type: ignore[arg-type]
        return out.table()

    return (lambda: bounded.collect(workers=1)) if way == "collect" else job


@pytest.mark.parametrize("way", ["collect", "job", "checkpoints"])
@pytest.mark.parametrize("timed", [False, True], ids=["arrival", "watermark"])
def bench_process(benchmark: Any, rows: int, way: str, timed: bool, tmp_path: Path) -> None:
    """Bound: a cache miss a row, for the record of its key; with a watermark a sort of each round besides."""
    table = sales(rows)
    ours = run(table, timed, way, tmp_path)
    assert_same(ours(), by_numpy(table, timed), by=("user", "n"))
    benchmark.extra_info.update(row_count=rows, keys=KEYS, goal=10e6 if way == "collect" else 5e6)
    benchmark.pedantic(ours, rounds=3)
