"""Sessions: rows of a key that are at most a gap apart, whatever their order."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from tests import oracle
from tests.engines import Engine, check, each_compiler, every_engine, examples
from tests.same import assert_same
from tests.strategies import NAIVE, ZONED, tables

SMALL = {"n": si.count(), "total": col("x").sum(), "m": col("y").mean(), "v": col("x").var(), "lo": col("y").min(),
         "first": col("x").first(), "at": col("x").arg_max("y"),
         "some": col("x").sum().filter(col("y") > 0)}  # fmt: skip
LARGE = {"u": col("x").n_unique(), "all": col("x").collect(), "q": col("y").quantile(0.3), "word": col("s").max(),
         "last": col("s").last(), "top": col("x").top_k(2, by="y"), "n": si.count()}  # fmt: skip


@si.udaf
class Spread:
    least: float = float("inf")
    greatest: float = float("-inf")

    def update(self, x: float) -> None:
        self.least = min(self.least, x)
        self.greatest = max(self.greatest, x)

    def merge(self, other: Spread) -> None:
        self.least = min(self.least, other.least)
        self.greatest = max(self.greatest, other.greatest)

    def finish(self) -> float:
        return self.greatest - self.least


def timed(type_: pa.DataType) -> pa.Schema:
    return pa.schema([("t", type_), ("x", pa.int32()), ("y", pa.float64()), ("k", pa.int16()), ("s", pa.string()),
                      ("f", pa.float64())])


@every_engine
@examples(16)
@given(st.data())
def test_of_integers(engine: Engine, data: st.DataObject) -> None:
    table = data.draw(tables(timed(data.draw(st.sampled_from([pa.int16(), pa.int32(), pa.int64()])))))
    keys = data.draw(st.sampled_from([[], ["k"], ["s"], ["f", "k"]]))
    made = data.draw(st.sampled_from([SMALL, LARGE, {"n": si.count(), "w": Spread(col("x").cast(pa.float64()))}]))
    gap = data.draw(st.sampled_from([1, 5, 30, 1000]))
    check(engine, table, lambda flow: flow.group_by(*keys, si.session("t", gap=gap)).agg(**made), ordered=False,
          tolerance=1e-6)


@every_engine
@examples(8)
@given(st.data())
def test_of_timestamps(engine: Engine, data: st.DataObject) -> None:
    table = data.draw(tables(timed(data.draw(st.sampled_from([*NAIVE, *ZONED])))))
    made = data.draw(st.sampled_from([SMALL, LARGE]))

    def build(flow: Flow) -> Flow:
        kept = flow.filter(col("x") > -5).with_columns(u=col("t").dt.truncate("1s"))
        return kept.group_by("k", si.session("u", gap="90s"), odd=col("x") % 2).agg(**made)

    check(engine, table, build, ordered=False, tolerance=1e-6)


ORDERS: dict[str, Callable[[random.Random, int], int]] = {
    "in order": lambda rng, time: 0,
    "nearly in order": lambda rng, time: rng.randrange(-60, 60),
    "backward": lambda rng, time: -2 * time,
    "alternating ends": lambda rng, time: -2 * time if rng.random() < 0.5 else 0,
    "at random": lambda rng, time: rng.randrange(100_000),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("keys", [2, 4000])
def test_many_sessions_in_any_order(order: str, keys: int) -> None:
    """More sessions of a key than kernels walk along, and more keys than are aggregated without partitioning."""
    rng, count, gap = random.Random(order), 6_000 if keys == 2 else 400_000, 7
    latest = np.cumsum(np.random.default_rng(keys).integers(0, 10 if keys == 2 else 3, count))
    move = ORDERS[order]
    times = np.array([time + move(rng, time) for time in latest.tolist()])
    users = np.random.default_rng(1).integers(0, keys * 50 if keys > 2 else keys, count)
    values = np.arange(count)
    order_ = np.lexsort((times, users))
    begins = np.ones(count, bool)
    begins[1:] = (np.diff(users[order_]) != 0) | (np.diff(times[order_]) > gap)
    at = np.flatnonzero(begins)
    want = pa.table({"k": users[order_][at], "window_start": times[order_][at],
                     "window_end": times[order_][np.append(at[1:], count) - 1] + gap,
                     "n": np.diff(np.append(at, count)), "s": np.add.reduceat(values[order_], at)})
    flow = si.from_arrow({"k": users, "t": times, "v": values}).group_by("k", si.session("t", gap=gap)).agg(
        n=si.count(), s=col("v").sum())
    for options in ({"workers": 1}, {"workers": 3}, {"memory": "16MB"}):
        got = flow.collect(**options)  # type: ignore[arg-type]
        assert got.sort_by([("k", "ascending"), ("window_start", "ascending")]).equals(want.cast(got.schema)), options


@each_compiler
def test_meaning_in_examples(engine: Engine) -> None:
    table = pa.table({"t": pa.array([0, 30, 61, None, 5, -40, 5]), "k": [1, 1, 1, 1, None, 2, None]})
    found = check(engine, table, lambda flow: flow.group_by("k", si.session("t", gap=30)).agg(n=si.count()),
                  ordered=False)
    assert found is not None
    assert sorted(map(str, found.to_pylist())) == [
        "{'k': 1, 'window_start': 0, 'window_end': 60, 'n': 2}",
        "{'k': 1, 'window_start': 61, 'window_end': 91, 'n': 1}",
        "{'k': 2, 'window_start': -40, 'window_end': -10, 'n': 1}",
        "{'k': None, 'window_start': 5, 'window_end': 35, 'n': 2}"]


@each_compiler
def test_a_row_without_a_time_cannot_fail(engine: Engine) -> None:
    table = pa.table({"t": pa.array([None, 5], pa.int64()), "text": ["none", "7"], "x": [0, 1]})
    for made in (si.count(), (1 // col("x")).n_unique()):
        def build(flow: Flow, made: si.Column = made) -> Flow:
            key = col("text").cast(pa.int64()) // col("x")
            return flow.group_by(si.session("t", gap=10), k=key).agg(n=made, m=(1 // col("x")).max())

        check(engine, table, build, ordered=False)


@pytest.mark.parametrize(("type_", "time"), [(pa.int8(), 127), (pa.int64(), 2**63 - 1), (pa.uint16(), 65_530)])
def test_a_session_whose_end_the_type_cannot_hold_is_an_error(type_: pa.DataType, time: int) -> None:
    flow = si.from_arrow(pa.table({"t": pa.array([time], type_)})).group_by(si.session("t", gap=10)).agg(n=si.count())
    for run in (flow.collect, lambda: oracle.collect(flow)):
        with pytest.raises(si.ComputeError, match="overflow"):
            run()


def test_the_extremes_of_time() -> None:
    table = pa.table({"t": pa.array([-(2**63), -(2**63) + 9, 2**63 - 20, -(2**63) + 20, 2**63 - 11], pa.int64())})
    flow = si.from_arrow(table).group_by(si.session("t", gap=10)).agg(n=si.count())
    assert_same(flow.collect(), oracle.collect(flow), ordered=False)


@pytest.mark.parametrize(("window", "says"), [
    (lambda: si.session("t", gap="10s"), "t"), (lambda: si.session("t", gap=0), "gap"),
    (lambda: si.session("s", gap=10), "timestamp or an integer")])  # fmt: skip
def test_what_is_refused(window: Callable[[], object], says: str) -> None:
    table = pa.table({"t": [1], "s": ["a"]})
    with pytest.raises(si.ScaleinError, match=says):
        si.from_arrow(table).group_by(window()).agg(n=si.count())


def test_more_accumulators_than_one_function_has() -> None:
    table = pa.table({"t": [0, 5, 30, 3], **{f"c{k}": [k, 2 * k, 3, 1] for k in range(70)}})
    made = {f"c{k}": col(f"c{k}").sum() for k in range(70)}
    flow = si.from_arrow(table).group_by(si.session("t", gap=10)).agg(**made)
    assert_same(flow.collect(), oracle.collect(flow), ordered=False)


def test_explain_shows_the_window() -> None:
    flow = si.from_arrow(pa.table({"t": pa.array([0], pa.timestamp("ms"))})).group_by(si.session("t", gap="1m30s"))
    assert 'session(t, gap=1m30s)' in str(flow.agg(n=si.count()).explain())
