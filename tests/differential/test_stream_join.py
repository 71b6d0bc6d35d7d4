"""Joins of two streams: in windows, by interval, as-of, and of all rows; nulls, ties, the ends of time."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from tests.engines import Engine, check, every_compiler, every_engine, examples
from tests.strategies import ALL, of_types, tables

HOWS = ["inner", "left", "right", "outer", "semi", "anti"]
FAR = 2**63 - 1


def bounded(how: str) -> list[Callable[[Flow, Flow], Flow]]:
    return [lambda a, b: a.join(b, on="k", within=si.tumbling("t", 7), how=how),
            lambda a, b: a.join(b, on="k", between=(-3, 5), how=how),
            lambda a, b: a.join(b, on="k", between=(2, 2), how=how),
            lambda a, b: a.join(b, on="k", keep=4, how=how), lambda a, b: a.join(b, on="k", keep="forever", how=how)]


@st.composite
def sides(draw: st.DrawFn, key: pa.DataType | None = None, far: bool = False) -> tuple[pa.Table, pa.Table]:
    """Rows with keys, times and payloads, some of them null; few keys and times, so that many match."""
    times = st.one_of(st.none(), st.integers(-20, 20), *([st.sampled_from([FAR, -FAR - 1])] if far else []))
    found = []
    for payload in ("x", "y"):
        if key is None:
            rows = draw(st.lists(st.tuples(st.one_of(st.none(), st.integers(0, 3)), times), max_size=40))
            keys = pa.array([each for each, _ in rows], pa.int32())
        else:
            keys = draw(tables(of_types(key), most=24)).column(0).combine_chunks()
            rows = [(None, draw(times)) for _ in range(len(keys))]
        found.append(pa.table({"k": keys, "t": pa.array([each for _, each in rows], pa.int64()),
                               payload: pa.array(range(len(rows)), pa.int16())}))
    return found[0], found[1]


def watermarked(flow: Flow) -> Flow:
    return flow.with_watermark("t", 3)


@every_engine
@pytest.mark.parametrize("how", HOWS)
@examples(6)
@given(sides(), st.integers(0, 4))
def test_by_time(engine: Engine, how: str, both: tuple[pa.Table, pa.Table], number: int) -> None:
    left, right = both
    check(engine, left, lambda flow: bounded(how)[number](watermarked(flow), watermarked(si.from_arrow(right))),
          ordered=False)


@every_engine
@pytest.mark.parametrize("how", HOWS)
@examples(2)
@given(st.sampled_from(ALL).flatmap(sides), st.integers(0, 4))
def test_keys_of_any_type(engine: Engine, how: str, both: tuple[pa.Table, pa.Table], number: int) -> None:
    left, right = both
    check(engine, left, lambda flow: bounded(how)[number](watermarked(flow), watermarked(si.from_arrow(right))),
          ordered=False)


@every_compiler
@pytest.mark.parametrize("strategy", ["backward", "forward", "nearest"])
@examples(5)
@given(sides(far=True), st.sampled_from([None, 0, 1, 6]))
def test_as_of(engine: Engine, strategy: str, both: tuple[pa.Table, pa.Table], tolerance: int | None) -> None:
    left, right = both
    check(engine, left, lambda flow: flow.join_asof(right, on="t", by="k", strategy=strategy, tolerance=tolerance),
          ordered=False)


@every_engine
@examples(5)
@given(sides(), st.sampled_from(HOWS))
def test_what_follows_and_what_precedes(engine: Engine, both: tuple[pa.Table, pa.Table], how: str) -> None:
    """Filters are pushed to a side only where that changes nothing."""
    left, right = both

    def build(flow: Flow) -> Flow:
        a = watermarked(flow).filter(col("x") % 3 != 1)
        joined = a.join(watermarked(si.from_arrow(right)), left_on=["k", (col("t") + 1) % 2] if how not in
                        ("right", "outer") else ["k", "x"], right_on=["k", col("t") % 2] if how not in
                        ("right", "outer") else ["k", "y"], between=(-9, 9), how=how)  # fmt: skip
        return joined.filter(col("k") > 0, col("x") < 20).group_by("k").agg(n=si.count(), s=col("x").sum())

    check(engine, left, build, ordered=False)


@every_compiler
@examples(3)
@given(sides(far=True), st.sampled_from(HOWS))
def test_times_at_the_ends_of_their_type(engine: Engine, both: tuple[pa.Table, pa.Table], how: str) -> None:
    left, right = both
    check(engine, left, lambda flow: watermarked(flow).join(watermarked(si.from_arrow(right)), on="k",
                                                            between=(-(2**62), 2**62), how=how), ordered=False)


def test_nested_columns_and_several_types_of_time() -> None:
    left = pa.table({"k": ["a", "b"], "t": pa.array([1000, 2000], pa.timestamp("ms")), "tags": [["x"], None]})
    right = pa.table({"k": ["b", "a", "a"], "t": pa.array([2, 1, 3], pa.timestamp("s")),
                      "at": [{"u": 1}, None, {"u": 2}]})
    flow = si.from_arrow(left).with_watermark("t", "1s")
    other = si.from_arrow(right).with_watermark("t", "1s")
    got = flow.join(other, on="k", between=("-1s", "2s"), how="left").collect().sort_by([("k", "ascending"),
                                                                                         ("t_right", "ascending")])
    assert got["tags"].to_pylist() == [["x"], ["x"], None]
    assert got["at"].to_pylist() == [None, {"u": 2}, {"u": 1}]
    got = flow.join(other, on="k", within=si.tumbling("t", "1s")).sort("k").collect()
    assert got["at"].to_pylist() == [None, {"u": 1}]


@pytest.mark.parametrize(("wrong", "why"), [
    ({"within": "10s"}, "takes a window"), ({"within": si.sliding("t", 10, every=5)}, "tumbling"),
    ({"between": "5s"}, "two limits"), ({"between": (5, -5)}, "wrong order"), 
    ({"between": ("-5s", "5s")}, "integer"),
    ({"keep": 5, "between": (1, 2)}, "not both"), ({"keep": -1}, "negative"), ({"keep": 5, "how": "cross"}, "has keys"),
    ({"keep": 5, "how": "best"}, "no such join"), ({"within": si.tumbling("u", 10)}, "u"),
])  # fmt: skip
def test_wrong_arguments_are_refused(wrong: dict[str, object], why: str) -> None:
    flow = si.from_arrow({"k": [1], "t": [2]}).with_watermark("t", 1)
    with pytest.raises(si.ScaleinError, match=why):
        flow.join(flow, on="k", **wrong)  # type: ignore[arg-type]


def test_event_time_is_needed_where_it_is_meant() -> None:
    flow = si.from_arrow({"k": [1], "t": [2]})
    with pytest.raises(si.ScaleinError, match="the right side of the join has no event time"):
        flow.with_watermark("t", 1).join(flow, on="k", between=(-1, 1))
    with pytest.raises(si.ScaleinError, match="strategy"):
        flow.join_asof(flow, on="t", by="k", strategy="back")
    with pytest.raises(si.ScaleinError, match="by="):
        flow.join_asof(flow, on="t")
