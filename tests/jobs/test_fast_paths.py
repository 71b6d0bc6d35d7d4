"""Fast paths of jobs against the plain one: rows counted in on trial, rings of slices, partitioned rows.

Whatever comes, late or without a time, in which batches, with how many workers and checkpoints: the same rows come out,
and the same are late.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import scalein as si
from scalein import col
from scalein.flow import Flow
from scalein.jobs import feeds, groups, job, running
from scalein.runtime import radix

WINDOWS = [(100, 100), (1000, 1000), (100, 20), (500, 200), (1000, 100), (30, 20)]


def stream(seed: int) -> list[pa.RecordBatch]:
    """Batches of a stream that is in order, or not so much, or has a few times that lie far away."""
    rng = np.random.default_rng(seed)
    n, span = int(rng.integers(1, 2000)), int(rng.choice([100, 2000, 20_000]))
    times = np.sort(rng.integers(0, span, n)) + rng.integers(-int(rng.choice([0, 5, 200, 3000])), 1, n)
    if rng.random() < 0.3:
        times[rng.random(n) < 0.02] -= span
    if rng.random() < 0.2:
        times[rng.random(n) < 0.01] += 3 * span

    def holes(share: float) -> np.ndarray:
        return rng.random(n) < (share if rng.random() < 0.4 else 0)

    keys = pa.array(rng.integers(0, int(rng.choice([1, 5, 300])), n), mask=holes(0.1))
    if rng.random() < 0.3:
        keys = keys.cast(pa.string())
        keys = keys.dictionary_encode() if rng.random() < 0.5 else keys
    kind = pa.timestamp("ms") if rng.random() < 0.5 else pa.int64()
    table = pa.table({"k": keys, "t": pa.array(times, kind, mask=holes(0.05)),
                      "x": pa.array(rng.integers(-1000, 1000, n), mask=holes(0.2)), "f": rng.integers(0, 64, n) / 8})
    cuts = [0, *np.sort(rng.integers(0, n, int(rng.integers(0, 30)))).tolist(), n]
    return [batch for a, b in pairwise(cuts) if b > a
            for batch in table.slice(a, b - a).combine_chunks().to_batches()]


def windows(batches: list[pa.RecordBatch], size: int, every: int, delay: int, thinned: bool) -> Flow:
    unit = "ms" if pa.types.is_timestamp(batches[0].schema.field("t").type) else ""
    size_, every_, delay_ = (f"{each}ms" if unit else each for each in (size, every, delay))
    flow = si.from_batches(batches).with_watermark("t", delay_)
    flow = flow.filter(col("f") > 2) if thinned else flow
    window = si.tumbling("t", size_) if size == every else si.sliding("t", size_, every=every_)
    return flow.group_by("k", window).agg(n=si.count(), s=col("x").sum(), m=col("f").max(), c=col("x").count(),
                                          lo=col("x").min())  # fmt: skip


Outcome = tuple[list[str], list[str], object, object]


def run(flow: Flow, scales: list[int], **how: object) -> Outcome:
    out, late = si.to_memory(), si.to_memory()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        started = flow.start(sink=out, late=late, **how)  # type: ignore[arg-type]
        for workers in scales:
            started.scale(workers)
        started.wait()
    found = started.metrics()
    return rows(out.table()), rows(late.table()), found["late_rows"], found["timeless_rows"]


def rows(table: pa.Table) -> list[str]:
    return sorted(map(repr, table.to_pylist()))




@given(st.integers(0, 1 << 32), st.sampled_from(WINDOWS), st.sampled_from([0, 10, 300]), st.booleans(),
       st.integers(1, 4), st.integers(1, 12), st.booleans(), st.lists(st.integers(1, 5), max_size=3))  # fmt: skip
@settings(max_examples=15, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_trials_and_rings_give_what_the_plain_way_gives(
        tmp_path_factory: pytest.TempPathFactory, seed: int, window: tuple[int, int], delay: int, thinned: bool,
        workers: int, ahead: int, has_checkpoint: bool, scales: list[int]) -> None:
    batches = stream(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "TRIED_ROWS", 1 << 60)
        patch.setattr(groups, "ring", SimpleNamespace(fits=lambda table: False))
        want = run(windows(batches, *window, delay, thinned), [], workers=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "TRIED_ROWS", 1)
        patch.setattr(groups, "MANY_OUTSIDE", 50)
        patch.setattr(feeds, "AHEAD_BATCHES", ahead)
        folder = tmp_path_factory.mktemp("job") if has_checkpoint else None
        got = run(windows(batches, *window, delay, thinned), scales, workers=workers, checkpoint=folder, every="1ms")
    assert got == want


def keyed(n: int, keys: int) -> pa.Table:
    rng = np.random.default_rng(n)
    return pa.table({"k": rng.integers(0, keys, n), "x": pa.array(rng.integers(-99, 99, n), mask=rng.random(n) < 0.1)})


@pytest.mark.parametrize("has_checkpoint", [False, True])
@pytest.mark.parametrize("most_parted", [1 << 30, 1])
@pytest.mark.parametrize("workers", [1, 3])
def test_rows_of_many_groups_are_partitioned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, workers: int,
                                             most_parted: int, has_checkpoint: bool) -> None:
    monkeypatch.setattr(radix, "TRIAL_ROWS", 1000)
    monkeypatch.setattr(running, "MOST_PARTED", most_parted)
    monkeypatch.setattr(job, "STEP_ROWS", 5000)
    table = keyed(40_000, 30_000)
    flow = si.from_batches(table.to_batches(max_chunksize=700)).group_by("k").agg(
        n=si.count(), s=col("x").sum(), m=col("x").mean(), lo=col("x").min()).filter(col("n") > 1)
    seen: list[bool] = []
    parted = radix.Parted.add

    def add(*given: object) -> None:
        seen.append(True)
        parted(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(radix.Parted, "add", add)
    out = si.to_memory()
    started = flow.start(sink=out, workers=workers, checkpoint=tmp_path if has_checkpoint else None, every="5ms")
    started.scale(2)
    started.wait()
    assert seen
    assert rows(out.table()) == rows(flow.collect())


def test_a_ring_begins_anew_with_the_first_null() -> None:
    table = pa.table({"k": pa.array([1, 2, None, 1, None, 3] * 50), "t": list(range(300)), "x": [1.0, None] * 150})
    first = table.slice(0, 2).combine_chunks()
    flow = si.from_batches([*first.to_batches(), *table.slice(2).combine_chunks().to_batches(max_chunksize=20)])
    flow = flow.with_watermark("t", 3).group_by("k", si.sliding("t", 20, every=5)).agg(n=si.count(), m=col("x").mean())
    out = si.to_memory()
    flow.start(sink=out, workers=2).wait()
    assert rows(out.table()) == rows(flow.collect())


def test_results_do_not_keep_the_job() -> None:
    """A job leads nowhere back to itself: who drops it and its sink gets the memory back at once."""
    flow = si.from_arrow(keyed(100, 5)).group_by("k").agg(n=si.count())
    gc.collect()
    gc.disable()
    try:
        started = flow.start(sink=si.to_memory())
        started.wait()
        started._thread.join()
        gone = weakref.ref(started)
        del started
        assert gone() is None
    finally:
        gc.enable()
