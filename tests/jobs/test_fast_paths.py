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
from scalein.api.flow import Flow
from scalein.errors import ComputeError
from scalein.exec import (
    event_time,
    morsels,
    radix,
    ring_preaggregate,
    rounds,
    running_aggregate,
    speculation,
    window_aggregate,
)
from scalein.jobs import driver, job_graph

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


def windows(batches: list[pa.RecordBatch], size: int, every: int, delay: int, thinned: bool, keys: list[str],
            ordered: bool) -> Flow:
    unit = "ms" if pa.types.is_timestamp(batches[0].schema.field("t").type) else ""
    size_, every_, delay_ = (f"{each}ms" if unit else each for each in (size, every, delay))
    flow = si.from_batches(batches).with_watermark("t", delay_)
    flow = flow.filter(col("f") > 2) if thinned else flow
    window = si.tumbling("t", size_) if size == every else si.sliding("t", size_, every=every_)
    more = {"first": col("x").first(), "last": col("f").last(), "a": col("f").arg_min("x")} if ordered else {}
    return flow.group_by(*keys, window).agg(n=si.count(), s=col("x").sum(), m=col("f").max(), c=col("x").count(),
                                            lo=col("x").min(), **more)  # fmt: skip


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
       st.integers(1, 4), st.integers(1, 12), st.booleans(), st.lists(st.integers(1, 5), max_size=3),
       st.sampled_from([["k"], ["k"], []]), st.booleans(), st.sampled_from([0, 50, 1 << 20]))  # fmt: skip
@settings(max_examples=6, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_trials_and_rings_give_what_the_plain_way_gives(
        tmp_path_factory: pytest.TempPathFactory, seed: int, window: tuple[int, int], delay: int, thinned: bool,
        workers: int, ahead: int, has_checkpoint: bool, scales: list[int], keys: list[str], ordered: bool,
        more: int) -> None:
    batches = stream(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculation, "MIN_ROWS", 1 << 60)
        patch.setattr(window_aggregate, "ring", SimpleNamespace(fits=lambda table: False))
        want = run(windows(batches, *window, delay, thinned, keys, ordered), [], workers=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculation, "MIN_ROWS", 1)
        patch.setattr(window_aggregate, "MIN_OUTSIDE_ROWS", 50)
        patch.setattr(driver, "MAX_ROUND_ROWS", 60 * ahead)
        patch.setattr(driver, "MORE_ROWS", more)
        patch.setattr(job_graph, "SHARED_TIMES", 1)
        patch.setattr(event_time, "MAX_NUMPY_TIMES", 50)
        patch.setattr(morsels, "MORSEL_ROWS", 64)
        folder = tmp_path_factory.mktemp("job") if has_checkpoint else None
        got = run(windows(batches, *window, delay, thinned, keys, ordered), scales, workers=workers,
                  checkpoint=folder, every="1ms")
    assert got == want


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever there is comes at once, as all that is in memory does, and is counted in on trial."""
    monkeypatch.setattr(speculation, "MIN_ROWS", 1)


def timed(*batches: list[int | None]) -> Flow:
    return si.from_batches([pa.record_batch({"t": pa.array(times, pa.int64())}) for times in batches]
                           ).with_watermark("t", 0)  # fmt: skip


@pytest.mark.usefixtures("at_once")
def test_a_trial_that_cannot_look_at_some_times_is_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that reads nulls does not watch times: the units before tell nothing of the late row."""
    monkeypatch.setattr(morsels, "MORSEL_ROWS", 8)
    flow = timed([1000] * 5, [*[1000] * 20, 5, None]).group_by(si.tumbling("t", 100)).agg(n=si.count())
    found, _, late_rows, timeless_rows = run(flow, [], workers=2)
    assert (found, late_rows, timeless_rows) == (["{'window_start': 1000, 'window_end': 1100, 'n': 25}"], 1, 1)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("workers", [1, 2])
def test_rows_are_added_to_a_trial_while_it_is_under_way(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    monkeypatch.setattr(driver, "MAX_ROUND_ROWS", 100)
    monkeypatch.setattr(driver, "MORE_ROWS", 70)
    monkeypatch.setattr(driver, "ROUND_S", 60.0)
    monkeypatch.setattr(driver, "LONG_ROUND_S", 60.0)
    trials: list[int] = []
    speculate = rounds.speculate

    def counted(*given: object) -> bool:
        is_good = speculate(*given)  # type: ignore[arg-type]
        trials.append(len(given[4]))  # type: ignore[arg-type]
        return is_good

    monkeypatch.setattr(rounds, "speculate", counted)
    flow = timed(*([at] * 50 for at in range(0, 1000, 10))).group_by(si.tumbling("t", 100)).agg(n=si.count())
    found, _, late_rows, _ = run(flow, [], workers=workers)
    assert trials == [100]  # batches
    assert (len(found), late_rows) == (10, 0)
    assert all("'n': 500}" in row for row in found)


@pytest.mark.usefixtures("at_once")
def test_windows_that_slide_close_during_speculation() -> None:
    flow = timed([100], [115], [105]).group_by(si.sliding("t", 20, every=10)).agg(n=si.count())
    found, *_ = run(flow, [], workers=1)
    assert found == ["{'window_start': 100, 'window_end': 120, 'n': 3}", "{'window_start': 110, 'window_end': 130, "
                     "'n': 1}", "{'window_start': 90, 'window_end': 110, 'n': 1}"]  # fmt: skip


@pytest.mark.usefixtures("at_once")
def test_a_function_of_the_users_sees_no_row_twice() -> None:
    seen: list[int] = []

    @si.udf(compile=False)
    def is_good(at: int) -> bool:
        seen.append(at)
        return True

    flow = timed([100, 101], [102]).filter(is_good(col("t"))).group_by(si.tumbling("t", 10)).agg(n=si.count())
    run(flow, [], workers=1)
    assert seen == [100, 101, 102]


def test_a_ring_stays_while_a_log_has_a_part_of_its_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_preaggregate, "MIN_DRAINED_RECORDS", 2)
    monkeypatch.setattr(ring_preaggregate.RingPreAggregation, "drain_partials", None)
    times = [500, 480, *range(505, 900, 5)]  # the second is no ring's
    batches = [pa.record_batch({"k": list(range(10)), "t": [at] * 10}) for at in times]
    flow = si.from_batches(batches).with_watermark("t", 10).group_by("k", si.sliding("t", 20, every=5))
    run(flow.agg(n=si.count()), [], workers=1)


def keyed(n: int, keys: int) -> pa.Table:
    rng = np.random.default_rng(n)
    return pa.table({"k": rng.integers(0, keys, n), "x": pa.array(rng.integers(-99, 99, n), mask=rng.random(n) < 0.1)})


@pytest.mark.parametrize("has_checkpoint", [False, True])
@pytest.mark.parametrize("most_parted", [1 << 30, 1])
@pytest.mark.parametrize("workers", [1, 3])
def test_rows_of_many_groups_are_partitioned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, workers: int,
                                             most_parted: int, has_checkpoint: bool) -> None:
    monkeypatch.setattr(radix, "SAMPLE_ROWS", 1000)
    monkeypatch.setattr(running_aggregate, "MAX_PARTITIONED_BYTES", most_parted)
    monkeypatch.setattr(driver, "MAX_ROUND_ROWS", 5000)
    table = keyed(40_000, 30_000)
    flow = si.from_batches(table.to_batches(max_chunksize=700)).group_by("k").agg(
        n=si.count(), s=col("x").sum(), m=col("x").mean(), lo=col("x").min()).filter(col("n") > 1)
    seen: list[bool] = []
    parted = radix.RadixPartitions.add

    def add(*given: object) -> None:
        seen.append(True)
        parted(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(radix.RadixPartitions, "add", add)
    out = si.to_memory()
    started = flow.start(sink=out, workers=workers, checkpoint=tmp_path if has_checkpoint else None, every="5ms")
    started.scale(2)
    started.wait()
    assert seen
    assert rows(out.table()) == rows(flow.collect())


@pytest.mark.parametrize("times", [[100, 90], [100, 90, 160, 140, 135, 200], [-100, -107, -115, -60, -75]])
def test_windows_that_begin_before_a_ring_does_are_not_lost(times: list[int]) -> None:
    """A ring begins with the first window of the first row; later rows may be in that one, and in earlier ones."""
    flow = si.from_batches([pa.record_batch({"k": [1], "t": [at]}) for at in times]).with_watermark("t", 1000)
    flow = flow.group_by("k", si.sliding("t", 20, every=5)).agg(n=si.count())
    found, *_ = run(flow, [], workers=1)
    assert found == rows(flow.collect())


def test_a_ring_begins_anew_with_the_first_null() -> None:
    table = pa.table({"k": pa.array([1, 2, None, 1, None, 3] * 50), "t": list(range(300)), "x": [1.0, None] * 150})
    first = table.slice(0, 2).combine_chunks()
    flow = si.from_batches([*first.to_batches(), *table.slice(2).combine_chunks().to_batches(max_chunksize=20)])
    flow = flow.with_watermark("t", 3).group_by("k", si.sliding("t", 20, every=5)).agg(n=si.count(), m=col("x").mean())
    out = si.to_memory()
    flow.start(sink=out, workers=2).wait()
    assert rows(out.table()) == rows(flow.collect())


@pytest.mark.parametrize("window", [[], [si.sliding("t", 20, every=5)]])
def test_a_sum_that_is_too_large_has_its_line_however_it_was_made(window: list[object]) -> None:
    flow = si.from_arrow(pa.table({"k": [1, 1], "t": [1, 1], "x": [2**62, 2**62]})).with_watermark("t", 0)
    started = flow.group_by("k", *window).agg(s=col("x").sum()).start(sink=si.to_memory())  # type: ignore[arg-type]
    with pytest.raises(ComputeError, match="overflow in the sum `s`") as found:
        started.wait()
    assert "test_fast_paths" in str(found.value)


def test_results_do_not_keep_the_job() -> None:
    """A job leads nowhere back to itself: who drops it and its sink gets the memory back at once."""
    flow = si.from_arrow(keyed(100, 5)).group_by("k").agg(n=si.count())
    gc.collect()
    gc.disable()
    try:
        started = flow.start(sink=si.to_memory())
        started.wait()
        started._driver._thread.join()
        gone = weakref.ref(started._driver)
        del started
        assert gone() is None
    finally:
        gc.enable()
