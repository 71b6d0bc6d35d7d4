"""The oracle of streams: examples worked out by hand, and its own contract with the bounded plan."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from tests import oracle
from tests.engines import examples
from tests.oracle.streams import Arrived, Batch, End, Idle, Trace, interval_join, run, window_join
from tests.same import assert_same

SCHEMA = pa.schema({"t": pa.int64(), "v": pa.int64()})
FLOW = si.flow(SCHEMA)


def batch(*rows: tuple[int | None, int], partition: str = "all", source: int = 0) -> Batch:
    made = pa.record_batch([[t for t, _ in rows], [v for _, v in rows]], schema=SCHEMA)
    return Batch(made, partition, source)


def sums(trace: Trace) -> list[dict[int, int]]:
    return [{row["window_start"]: row["s"] for row in step} for step in trace.outputs]


def windowed(delay: int = 0, size: int = 10, every: int = 10, flow: Flow = FLOW) -> Flow:
    window = si.tumbling("t", size) if size == every else si.sliding("t", size, every=every)
    return flow.with_watermark("t", delay).group_by(window).agg(s=col("v").sum())


def test_a_window_closes_when_the_watermark_reaches_its_end() -> None:
    events = [batch((1, 1), (9, 2)), batch((11, 4)), batch((12, 8), (3, 16)), batch((4, 32)), End()]
    trace = run(windowed(delay=2), events)
    assert trace.watermarks == [7, 9, 10, 10, None]
    assert sums(trace) == [{}, {}, {0: 19}, {}, {10: 12}]
    assert trace.late == [{"t": 4, "v": 32}]


def test_rows_of_a_batch_are_not_late_by_that_batch() -> None:
    trace = run(windowed(), [batch((50, 1), (3, 2)), batch((4, 4)), End()])
    assert sums(trace) == [{0: 2}, {}, {50: 1}]
    assert trace.late == [{"t": 4, "v": 4}]


def test_a_row_counts_in_those_of_its_windows_that_are_open() -> None:
    trace = run(windowed(size=10, every=5), [batch((10, 1)), batch((7, 2), (4, 4), (None, 8)), End()])
    assert sums(trace) == [{}, {}, {5: 3, 10: 1}]
    assert (trace.late, trace.timeless) == ([{"t": 4, "v": 4}], 1)


def test_the_watermark_is_the_least_of_active_partitions() -> None:
    events = [batch((20, 1), partition="a"), batch((5, 2), partition="b"), Idle("b"), batch((6, 4), partition="b"),
              End("b"), End("a")]
    trace = run(windowed(), events)
    assert trace.watermarks == [None, 5, 20, 20, 20, None]
    assert sums(trace) == [{}, {}, {0: 2}, {}, {}, {20: 1}]
    assert trace.late == [{"t": 6, "v": 4}]


def test_where_all_are_idle_time_is_as_far_as_the_furthest() -> None:
    events = [batch((20, 1), partition="a"), batch((5, 2), partition="b"), Idle("a"), Idle("b")]
    assert run(windowed(), events).watermarks == [None, 5, 5, 20]


def test_a_union_waits_for_both_sources() -> None:
    other = si.flow(SCHEMA)
    both = FLOW.with_watermark("t", 0).union(other.with_watermark("t", 0))
    flow = both.group_by(si.tumbling("t", 10)).agg(s=col("v").sum())
    trace = run(flow, [batch((20, 1)), batch((5, 2), source=1), batch((12, 4), source=1), End(), End(source=1)])
    assert sums(trace) == [{}, {}, {0: 2}, {}, {10: 4, 20: 1}]


def test_times_far_ahead_are_believed_when_batches_agree() -> None:
    day = 86_400
    schema = pa.schema({"t": pa.timestamp("s")})
    flow = si.flow(schema).with_watermark("t", "0s").group_by(si.tumbling("t", "10s")).agg(n=si.count())
    times = [[0, 5], [365 * day], [7], [500 * day], [500 * day + 1], [500 * day + 2]]
    events = [Batch(pa.record_batch([pa.array(some, pa.timestamp("s"))], schema=schema)) for some in times]
    assert run(flow, events).watermarks == [5, 5, 7, 7, 7, 500 * day + 2]


def ticks(*days: float, partition: str = "all") -> Batch:
    times = pa.array([round(day * 86_400) for day in days], pa.timestamp("s"))
    return Batch(pa.record_batch({"t": times}), partition)


def test_time_goes_on_by_steps_of_at_most_a_day() -> None:
    flow = si.flow(pa.schema({"t": pa.timestamp("s")})).with_watermark("t", "0s").group_by(si.tumbling("t", "1h"))
    batches = [ticks(3, 0, 2.5, 9), ticks(6, 5, 4, 70, 2), ticks(6.5, 9), ticks(6, 8, 7.5), ticks(9)]
    marks = run(flow.agg(n=si.count()), batches).watermarks
    assert [mark and mark / 86_400 for mark in marks] == [3, 6, 6.5, 8, 9]
    events = [ticks(1, partition="a"), ticks(1, partition="b"), Idle("b"), ticks(*range(1, 20), partition="a"),
              ticks(19.5, partition="b"), ticks(22, partition="b"), ticks(20, partition="a")]
    marks = run(flow.agg(n=si.count()), events).watermarks
    assert [mark and mark / 86_400 for mark in marks] == [None, 1, 1, 19, 19, 19, 19.5]


def test_what_has_no_window_comes_at_the_end_and_what_arrives_first_is_first() -> None:
    events = [batch((3, 1)), batch((1, 2), (2, 1)), End()]
    assert [len(step) for step in run(FLOW.sort("t"), events).outputs] == [0, 0, 3]
    assert [len(step) for step in run(FLOW.group_by("v").agg(n=si.count()), events).outputs] == [0, 0, 2]
    assert run(FLOW.distinct("v").limit(2), events).outputs == [[{"t": 3, "v": 1}], [{"t": 1, "v": 2}], []]


def test_changes_are_the_bounded_plan_over_what_has_arrived() -> None:
    trace = run(FLOW.group_by("v").agg(n=si.count()), [batch((3, 1)), batch((1, 2), (2, 1)), End()], changes=True)
    both = [{"v": 1, "n": 2}, {"v": 2, "n": 1}]
    assert trace.changes == [[{"v": 1, "n": 1}], both, both]


PLANS = {
    "rows": lambda s: s.filter(col("v") > 2).select("v", u=col("t") + 1),
    "tumbling": lambda s: s.with_watermark("t", 20).group_by("v", si.tumbling("t", 7)).agg(n=si.count()),
    "sliding": lambda s: s.with_watermark("t", 20).group_by(si.sliding("t", 10, every=4)).agg(s=col("v").sum()),
    "windows of windows": lambda s: s.with_watermark("t", 20).group_by(si.tumbling("t", 5)).agg(n=si.count()).group_by(
        si.tumbling("window_start", 15)).agg(m=col("n").max()),
    "running": lambda s: s.group_by("v").agg(t=col("t").max()),
    "limit": lambda s: s.limit(4),
    "distinct": lambda s: s.distinct("v"),
    "sort": lambda s: s.sort("v", "t"),
}


@pytest.mark.parametrize("name", PLANS)
@examples(20)
@given(st.lists(st.tuples(st.none() | st.integers(0, 20), st.integers(0, 5)), max_size=20),
       st.lists(st.integers(0, 20)))  # fmt: skip
def test_if_no_row_is_late_all_that_comes_out_is_the_bounded_plan(
        name: str, rows: list[tuple[int | None, int]], cuts: list[int]) -> None:  # fmt: skip
    """However the rows are cut."""
    ends = sorted({*(cut for cut in cuts if cut < len(rows)), len(rows)})
    pieces = [batch(*rows[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    trace = run(PLANS[name](FLOW), [*pieces, End()])
    want = oracle.collect(PLANS[name](FLOW), pa.Table.from_batches([piece.rows for piece in pieces], SCHEMA))
    assert_same(trace.table(), want, ordered=name in ("rows", "limit", "distinct", "sort"))
    assert trace.late == []


def arrived(*rows: tuple[str | None, int | None, int | None], name: str) -> list[Arrived]:
    return [Arrived({"k": k, name: time}, time, mark) for k, time, mark in rows]


def test_an_interval_join_takes_both_ends() -> None:
    left = arrived(("a", 10, None), ("b", 10, None), (None, 10, None), ("a", None, None), name="t")
    right = arrived(("a", 5, None), ("a", 15, None), ("a", 16, None), ("b", 4, None), (None, 10, None), name="u")
    keep = [("u", "u")]
    assert interval_join(left, right, ["k"], -5, 5, "inner", keep) == [
        {"k": "a", "t": 10, "u": 5}, {"k": "a", "t": 10, "u": 15}]
    assert [row["t"] for row in interval_join(left, right, ["k"], -5, 5, "anti")] == [10, 10]
    outer = interval_join(left, right, ["k"], -5, 5, "outer", keep)
    assert [(row["k"], row["t"], row["u"]) for row in outer] == [
        ("a", 10, 5), ("a", 10, 15), ("b", 10, None), (None, 10, None), ("a", None, 16), ("b", None, 4),
        (None, None, 10)]


def test_a_late_row_of_an_interval_join_takes_no_part() -> None:
    left, right = arrived(("a", 10, 10), ("a", 9, 10), name="t"), arrived(("a", 10, 0), name="u")
    assert interval_join(left, right, ["k"], -5, 5, "inner", [("u", "u")]) == [{"k": "a", "t": 10, "u": 10}]


def test_a_window_join_pairs_rows_in_each_window_that_holds_both() -> None:
    left, right = arrived(("a", 4, None), ("b", 4, None), name="t"), arrived(("a", 7, None), ("a", 12, 10), name="u")
    keep = [("u", "u")]
    assert window_join(left, right, ["k"], 10, 10, "inner", keep) == [
        {"k": "a", "t": 4, "u": 7, "window_start": 0, "window_end": 10}]
    sliding = window_join(left, right, ["k"], 10, 5, "left", keep)
    assert [(row["k"], row["u"], row["window_start"]) for row in sliding] == [
        ("a", None, -5), ("b", None, -5), ("a", 7, 0), ("b", None, 0)]


def test_a_late_row_counts_in_windows_of_a_join_that_are_open() -> None:
    left, right = arrived(("a", 7, 10), name="t"), arrived(("a", 8, None), name="u")
    assert [row["window_start"] for row in window_join(left, right, ["k"], 10, 5, "inner", [("u", "u")])] == [5]
