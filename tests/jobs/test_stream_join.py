"""Joins of streams as jobs: the rows of `collect`, whatever the batches; late rows; what is retained; what is refused.

Crashes, rescales, partitions and spills of joins are in `tests/conformance`.
"""

from __future__ import annotations

from threading import Event

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein.api.flow import Flow
from scalein.testing import Stream, check_steps, until
from tests.engines import examples
from tests.same import assert_same

HOWS = ["inner", "left", "right", "outer", "semi", "anti"]
BOUNDS = [{"within": si.tumbling("t", 6)}, {"between": (-3, 5)}, {"between": (2, 9)}, {"between": (-9, -2)},
          {"keep": 4}, {"keep": "forever"}, {"within": si.tumbling("t", 6, offset=-2)}]  # fmt: skip
DELAY = 5


def side(rng: np.random.Generator, payload: str, count: int) -> pa.Table:
    """Rows at most DELAY behind the latest one; some have no key or no time."""
    times = np.cumsum(rng.integers(0, 4, count)) - rng.integers(0, DELAY + 1, count)
    return pa.table({"k": pa.array(rng.integers(0, 4, count), mask=rng.random(count) < 0.1),
                     "t": pa.array(times, mask=rng.random(count) < 0.1), payload: np.arange(count)})


def stream(table: pa.Table, rows: int) -> Flow:
    """Batches of a table in memory: readers of others are threads, and which of them is first is a matter of chance."""
    parts = pa.Table.from_batches(table.to_batches(max_chunksize=rows), table.schema)
    return si.from_arrow(parts).with_watermark("t", DELAY)


def bounded(table: pa.Table) -> Flow:
    return si.from_arrow(table).with_watermark("t", DELAY)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@examples(10)
@given(st.integers(0, 1 << 32), st.sampled_from(HOWS), st.sampled_from(BOUNDS), st.integers(1, 30), st.integers(1, 30))
def test_a_job_gives_the_rows_of_collect(seed: int, how: str, bound: dict[str, object], left_rows: int,
                                         right_rows: int) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    left, right = side(rng, "x", int(rng.integers(0, 60))), side(rng, "y", int(rng.integers(0, 60)))
    out = si.to_memory()
    job = stream(left, left_rows).join(stream(right, right_rows), on="k", how=how, **bound).start(  # type: ignore[arg-type]
        sink=out, workers=int(rng.integers(1, 3)), memory=rng.choice([None, "1B"]))  # fmt: skip
    job.wait()
    assert job.metrics()["late_rows"] == 0
    assert_same(out.table(), bounded(left).join(bounded(right), on="k", how=how, **bound).collect())  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@examples(5)
@given(st.integers(0, 1 << 32), st.sampled_from(["backward", "forward", "nearest"]), st.sampled_from([None, 0, 4]))
def test_as_of(seed: int, strategy: str, tolerance: int | None) -> None:
    rng = np.random.default_rng(seed)
    left, right = side(rng, "x", int(rng.integers(0, 60))), side(rng, "y", int(rng.integers(0, 60)))
    rows = int(rng.integers(1, 30))
    out = si.to_memory()
    stream(left, rows).join_asof(stream(right, rows), on="t", by="k", strategy=strategy,
                                 tolerance=tolerance).start(sink=out).wait()
    assert_same(out.table(), bounded(left).join_asof(right, on="t", by="k", strategy=strategy,
                                                     tolerance=tolerance).collect())


def ticks(count: int) -> pa.Table:
    return pa.table({"k": np.arange(count) % 5, "t": np.arange(count), "v": np.arange(count)})


def test_an_as_of_join_without_a_tolerance_keeps_the_last_row_of_each_key() -> None:
    table = ticks(30_000)
    out = si.to_memory()
    job = stream(table, 500).join_asof(stream(table, 500), on="t", by="k").start(sink=out)
    job.wait()
    assert out.table()["v_right"].to_pylist() == out.table()["v"].to_pylist()
    assert out.table().num_rows == table.num_rows
    assert job.metrics()["peak_state_rows"] < 20_000  # type: ignore[operator]


@pytest.mark.parametrize("how", HOWS)
def test_rows_that_nothing_can_match_are_dropped(how: str) -> None:
    table = ticks(6_000)
    job = stream(table, 100).join(stream(table, 130), on="k", between=(-3, 2), how=how).start(sink=si.to_memory())
    job.wait()
    assert job.metrics()["peak_state_rows"] < 1_500  # type: ignore[operator]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_late_rows_take_no_part() -> None:
    def build(left: Flow, right: Flow) -> Flow:
        left, right = left.with_watermark("t", DELAY), right.with_watermark("t", DELAY)
        return left.join(right, on="k", between=(-5, 5), how="left").select("x", "y")

    check_steps(build, """
        left   k  t    x
        right  k  t    y
        ------------------
        left   1  100  1
        right  1  100  1
        =      1  1
        ------------------
        left   1  200  2
        right  1  200  2
        =      2  2
        ------------------
        left   1  10   3
        late   1
        ------------------
        left   1  195  4
        right  1  199  5
        =      4  2
        =      4  5
        =      2  5
        ------------------
        left   1  206  6
        end
        =      6  -
    """)


def test_semi_and_anti_joins_give_each_row_once_and_when_it_is_sure() -> None:
    for how, found in (("semi", 1), ("anti", 2)):
        check_steps(lambda left, right, how=how: left.with_watermark("t", 0).join(  # type: ignore[misc]
            right.with_watermark("t", 0), on="k", between=(0, 3), how=how).select("x"), f"""
                left   k  t   x
                right  k  t   y
                ------------------
                left   1  1   1
                left   2  2   2
                ------------------
                right  1  2   -
                right  1  3   -
                ------------------
                right  3  9   -
                left   4  20  3
                = {found}
                ------------------
                end
                {"= 3" if how == "anti" else ""}
            """)


def test_rows_at_the_end_of_time_come_out() -> None:
    left = pa.table({"k": [1, 2], "t": pa.array([5, (1 << 63) - 10], pa.timestamp("ns"))})
    out = si.to_memory()
    flow, other = (si.from_arrow(table).with_watermark("t", "1ns") for table in (left, left.slice(0, 1)))
    flow = flow.join(other, on="k", between=("0ns", "2ns"), how="left")
    flow.start(sink=out).wait()
    assert_same(out.table(), flow.collect(), ordered=False)


def endless() -> Flow:
    return si.generate(lambda start, n: pa.record_batch({"k": np.arange(start, start + n) % 7,
                                                         "t": np.arange(start, start + n)}),
                       {"k": pa.int64(), "t": pa.int64()})  # fmt: skip


@pytest.mark.parametrize(("build", "why"), [
    (lambda s: s.join(s, on="k"), "keep"),
    (lambda s: s.join(s, on="k", keep="forever", how="left"), "never knows"),
    (lambda s: s.join(s, on="k", within=si.tumbling("t", 5)), "grows without bound"),
    (lambda s: s.with_watermark("t", 1).join(s, on="k", within=si.tumbling("t", 5)), "of both sides"),
    (lambda s: s.with_watermark("t", 1).join_asof(s.with_watermark("t", 1), on="t", by="k", strategy="forward"),
     "tolerance"),
    (lambda s: s.with_watermark("t", 1).join(s.with_watermark("t", 1), on="k", keep="forever").group_by(
        si.tumbling("t", 5)).agg(n=si.count()), "never close"),
])  # fmt: skip
def test_what_would_never_end_is_refused(build: object, why: str) -> None:
    with pytest.raises(si.ScaleinError, match=why):
        build(endless()).start(sink=si.to_memory())  # type: ignore[operator]


def test_a_window_downstream_of_a_join_closes_by_its_watermark() -> None:
    table = ticks(400)
    out = si.to_memory()

    def build(a: Flow, b: Flow) -> Flow:
        return a.join(b, on="k", between=(-3, 8)).group_by("k", si.tumbling("t", 50)).agg(n=si.count())

    job = build(stream(table, 30), stream(table, 17)).start(sink=out)
    job.wait()
    assert job.metrics()["late_rows"] == 0
    assert_same(out.table(), build(bounded(table), bounded(table)).collect())


def test_a_window_downstream_of_an_as_of_join_closes_before_the_end() -> None:
    joined = endless().with_watermark("t", 1).join_asof(endless().with_watermark("t", 1), on="t", by="k")
    flow = joined.group_by(si.tumbling("t", 5)).agg(n=si.count())
    closed = Event()
    job = flow.start(sink=si.to_callback(lambda batch: closed.set() if batch.num_rows else None))
    assert closed.wait(60)
    job.stop()


def test_outputs_of_one_job_join_the_same_sides() -> None:
    table = ticks(100)
    seen: list[int] = []

    def look(batch: pa.RecordBatch) -> pa.RecordBatch:
        seen.append(batch.num_rows)
        return batch

    def build(a: Flow, b: Flow) -> list[Flow]:
        a = a.map_batches(look, a.schema)
        return [a.join(b, on="k", between=(-3, 8)), a.join(b, on="k", within=si.tumbling("t", 6), how="anti"), a]

    outs = [si.to_memory() for _ in range(3)]
    flows = build(stream(table, 30), stream(table, 17))
    si.start(*(flow.to(out) for flow, out in zip(flows, outs, strict=True))).wait()
    assert sum(seen) == 100, "the steps of a side run once"
    for out, flow in zip(outs, build(bounded(table), bounded(table)), strict=True):
        assert_same(out.table(), flow.collect())


def test_state_bytes_count_the_tables_of_segments() -> None:
    """A row of one side makes a table of the rows of the other, which is in memory as long as these."""
    schema = pa.schema([("k", pa.int64()), ("t", pa.int64())])
    many = pa.record_batch([pa.array(range(20_000)), pa.array([5] * 20_000)], schema=schema)
    one = pa.record_batch([pa.array([1]), pa.array([5])], schema=schema)
    sides = [Stream({"a": [batch]}, ends=False, allowed={"a": 0}) for batch in (many, one)]
    left, right = (si.from_source(side).with_watermark("t", 9) for side in sides)
    out = si.to_memory()
    job = left.join(right, on="k", between=(-9, 9)).start(sink=out)
    sides[0].allow("a", 1)
    until(lambda: job.metrics()["rows_in"] == 20_000, job)
    before = job.metrics()["state_bytes"]
    sides[1].allow("a", 1)
    until(lambda: out.table().num_rows == 1, job)
    until(lambda: job.metrics()["state_bytes"] > before + 20_000 * 16, job)  # type: ignore[operator]
    for side in sides:
        side.end()
    job.wait()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bound", [{"between": ("-4s", "5s")}, {"within": si.tumbling("t", "5s", offset="2s")}])
@pytest.mark.parametrize("how", ["inner", "outer"])
def test_sides_may_have_times_of_different_units(how: str, bound: dict[str, object]) -> None:
    """A watermark of milliseconds and one of microseconds are compared in the finer unit, on either side."""
    sides = []
    for seed, unit, payload in ((1, "ms", "x"), (2, "us", "y")):
        rows = side(np.random.default_rng(seed), payload, 60)
        times = pa.array([None if t is None else 1000 * t for t in rows["t"].to_pylist()], pa.timestamp("ms"))
        sides.append(rows.set_column(1, "t", times.cast(pa.timestamp(unit))))
    for one, other in (sides, sides[::-1]):
        flows = [[si.from_arrow(pa.Table.from_batches(each.to_batches(max_chunksize=size), each.schema)).with_watermark(
            "t", f"{DELAY}s") for each in (one, other)] for size in (7, 100)]
        joins = [left.join(right, on="k", how=how, **bound) for left, right in flows]  # type: ignore[arg-type]
        out = si.to_memory()
        job = joins[0].start(sink=out)
        job.wait()
        assert job.metrics()["late_rows"] == 0
        assert job.metrics()["peak_state_rows"] < 80  # type: ignore[operator]
        found, wanted = out.table(), joins[1].collect()
        assert found.num_rows > 20
        assert_same(found, wanted)


def test_a_join_in_moved_windows() -> None:
    left, right = pa.table({"k": [1] * 12, "t": range(12)}), pa.table({"k": [1] * 12, "t": range(12), "y": range(12)})
    found = si.from_arrow(left).join(si.from_arrow(right), on="k", within=si.tumbling("t", 5, offset=12)).collect()
    wanted = [(t, u, (t - 2) // 5 * 5 + 2) for t in range(12) for u in range(12) if (t - 2) // 5 == (u - 2) // 5]
    assert sorted(zip(*(found[name].to_pylist() for name in ("t", "y", "window_start")), strict=True)) == sorted(wanted)
