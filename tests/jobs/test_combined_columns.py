"""Aggregates whose columns combine only together (var, std, first, last, arg_min, arg_max): over endless input, with
many groups and workers, and without keeping their rows.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from scalein.exec import radix, running_aggregate
from scalein.jobs import driver
from scalein.testing import Stream, until
from tests import duck
from tests.jobs.streams import rows_in
from tests.jobs.test_changelog import applied
from tests.same import assert_same

MANY = 40_000


def keyed(rows: int, keys: int) -> pa.Table:
    rng = np.random.default_rng(rows)

    def holes(values: Any) -> pa.Array:
        return pa.array(values, mask=rng.random(rows) < 0.1)

    return pa.table({"k": rng.integers(0, keys, rows), "x": holes(rng.integers(-9, 9, rows)),
                     "f": holes(rng.integers(0, 999, rows) / 8), "t": np.arange(rows) // 8,
                     "w": holes([f"a word of some length {i}" for i in rng.integers(0, 50, rows)])})  # fmt: skip


def grouped(flow: Flow, *more: Any) -> Flow:
    return flow.group_by("k", *more).agg(
        v=col("x").var(), s=col("f").std(), first=col("w").first(), last=col("x").last(), least=col("w").arg_min("x"),
        most=col("f").arg_max("w"), n=si.count())  # fmt: skip


def by_duckdb(table: pa.Table, *more: Any) -> pa.Table:
    return duck.run(grouped(si.from_arrow(table), *more).op)


@pytest.mark.parametrize(("has_checkpoint", "workers"), [(False, 1), (False, 3), (True, 3)])
@pytest.mark.parametrize("keys", [7, 30_000])
def test_many_rows_and_groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, keys: int, workers: int,
                              has_checkpoint: bool) -> None:
    monkeypatch.setattr(radix, "SAMPLE_ROWS", 1000)
    monkeypatch.setattr(running_aggregate, "MAX_PARTITIONED_BYTES", 1 << 18)
    monkeypatch.setattr(driver, "MAX_ROUND_ROWS", 5000)
    table, out = keyed(MANY, keys), si.to_memory()
    started = grouped(si.from_batches(table.to_batches(max_chunksize=700))).start(
        sink=out, workers=workers, checkpoint=tmp_path if has_checkpoint else None, every="1ms")
    started.scale(2)
    started.wait()
    assert_same(out.table(), by_duckdb(table), tolerance=1e-9)


@pytest.mark.parametrize("window", [None, si.tumbling("t", 2000)], ids=["running", "windows"])
def test_endless_input_is_counted_in(window: Any, tmp_path: Path) -> None:
    """Each part of the stream by a job of its own."""
    table = keyed(MANY, 50)
    more = [] if window is None else [window]
    batches = table.to_batches(max_chunksize=1000)
    told = si.to_memory()
    for _, end in pairwise([0, 3, 20, len(batches)]):
        stream = Stream({"all": batches}, ends=False, allowed={"all": end})
        flow = si.from_source(stream).with_watermark("t", 10)
        started = grouped(flow, *more).start(sink=told, checkpoint=tmp_path, every="5ms", emit="changes", workers=2)
        until(lambda: rows_in(started) == sum(b.num_rows for b in batches[:end]), started)  # noqa: B023
        started.stop()
    assert told.table().num_rows >= 50 * 3
    keys = ["k"] if window is None else ["k", "window_start"]
    assert_same(applied(told.table(), keys), by_duckdb(table, *more), tolerance=1e-9)


def test_windows_hold_groups_and_not_rows(tmp_path: Path) -> None:
    stream = Stream({"all": keyed(MANY, 5).to_batches(max_chunksize=1000)}, ends=False)
    started = grouped(si.from_source(stream).with_watermark("t", 10), si.tumbling("t", 1 << 20)).start(
        sink=si.to_memory(), checkpoint=tmp_path, every="1h")
    until(lambda: rows_in(started) == MANY, started)
    started.stop()
    kept = [pa.ipc.open_file(path).read_all() for path in tmp_path.rglob("rows-*.arrow")]
    assert 0 < sum(part.num_rows for part in kept) <= 5 * MANY // 1000


def test_what_is_as_large_as_its_input_is_still_refused() -> None:
    stream = Stream({"all": keyed(10, 2).to_batches()}, ends=False)
    with pytest.raises(si.ScaleinError, match="cannot follow n_unique"):
        si.from_source(stream).group_by("k").agg(l=col("x").last(), u=col("x").n_unique()).start(
            sink=si.to_memory(), emit="changes")
