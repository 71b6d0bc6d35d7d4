"""Aggregates whose state has no fixed size: n_unique, quantile, collect, top_k, and text that is picked."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import col
from scalein.api.column import Column
from tests.engines import Engine, check, each_engine, every_compiler, every_engine, examples
from tests.strategies import ALL, FIXED, NUMBERS, STRINGS, tables

# Between two values a quantile is rounded in an order of its own.
ROUNDING = 1e-9

PICKED = {
    "min": lambda: col("x").min(),
    "max": lambda: col("x").max(),
    "first": lambda: col("x").first(),
    "last": lambda: col("x").last(),
    "arg_min": lambda: col("x").arg_min("y"),
    "arg_max": lambda: col("y").arg_max("x"),
}
KEYS = st.sampled_from([(), ("k",), ("t",), ("k", "t")])


def _table(data: st.DataObject, types: list[pa.DataType]) -> pa.Table:
    schema = pa.schema([("x", data.draw(st.sampled_from(types))), ("y", data.draw(st.sampled_from(types))),
                        ("k", pa.int16()), ("t", data.draw(st.sampled_from(STRINGS))), ("time", pa.int32())])
    return data.draw(tables(schema))


@every_engine
@examples(10)
@given(st.data())
def test_n_unique(engine: Engine, data: st.DataObject) -> None:
    table, keys = _table(data, ALL), data.draw(KEYS)
    check(engine, table, lambda flow: flow.group_by(*keys).agg(n=col("x").n_unique(), m=col("y").n_unique(),
                                                               rows=si.count()), ordered=False)


@every_engine
@examples(10)
@given(st.data())
def test_quantile(engine: Engine, data: st.DataObject) -> None:
    table, keys = _table(data, NUMBERS), data.draw(KEYS)
    share = data.draw(st.sampled_from([0.0, 0.01, 0.5, 0.9, 1.0]) | st.floats(0, 1))

    def build(flow: si.Flow) -> si.Flow:
        return flow.group_by(*keys).agg(
            q=col("x").quantile(share), median=col("x").median(), other=col("y").quantile(share), n=col("x").n_unique(),
            all=col("x").collect())

    check(engine, table, build, ordered=False, tolerance=ROUNDING)


@every_engine
@pytest.mark.parametrize("fn", PICKED)
@examples(4)
@given(st.data())
def test_picked_text(engine: Engine, fn: str, data: st.DataObject) -> None:
    table, keys = _table(data, STRINGS), data.draw(KEYS)
    check(engine, table, lambda flow: flow.group_by(*keys).agg(out=PICKED[fn]()), ordered=False)


@every_engine
@examples(10)
@given(st.data())
def test_collect(engine: Engine, data: st.DataObject) -> None:
    table, keys = _table(data, [*NUMBERS, pa.bool_(), *STRINGS]), data.draw(KEYS)
    check(engine, table, lambda flow: flow.group_by(*keys).agg(a=col("x").collect(), n=si.count(),
                                                               b=col("y").collect()), ordered=False)


ORDERING = [each for each in FIXED if not pa.types.is_decimal(each)]


@every_engine
@examples(10)
@given(st.data())
def test_top_k(engine: Engine, data: st.DataObject) -> None:
    schema = pa.schema([("x", data.draw(st.sampled_from([*NUMBERS, *STRINGS]))),
                        ("y", data.draw(st.sampled_from(ORDERING))), ("k", pa.int16()), ("t", pa.string())])
    table, keys, k = data.draw(tables(schema)), data.draw(KEYS), data.draw(st.integers(1, 5))
    check(engine, table, lambda flow: flow.group_by(*keys).agg(best=col("x").top_k(k, by="y")), ordered=False)


@each_engine
def test_top_k_by_the_least_value_there_is(engine: Engine) -> None:
    table = pa.table({"x": [1, 2, 3], "u": pa.array([0, 0, 5], pa.uint64()), "i": [-(2**63), None, -(2**63)]})

    def build(flow: si.Flow) -> si.Flow:
        return flow.group_by().agg(a=col("x").top_k(2, by="u"), b=col("x").top_k(2, by="i"))

    check(engine, table, build, ordered=True)


@every_engine
@examples(10)
@given(st.data())
def test_in_windows(engine: Engine, data: st.DataObject) -> None:
    table = _table(data, [pa.float64(), pa.int16()])
    size, every = data.draw(st.sampled_from([(10, 10), (100, 30), (64, 16)]))
    keys = data.draw(st.sampled_from([(), ("k",)]))

    def build(flow: si.Flow) -> si.Flow:
        return (flow.filter(col("time").between(-1000, 1000))
                .group_by(*keys, si.sliding("time", size, every=every))
                .agg(n=col("x").n_unique(), q=col("x").quantile(0.5), last=col("t").last(), all=col("t").collect()))

    check(engine, table, build, ordered=False, tolerance=ROUNDING)


@each_engine
def test_what_follows_a_group(engine: Engine) -> None:
    table = pa.table({"k": [1, 1, 2, 2, 3], "x": [5, 5, 6, 7, None], "s": ["b", "a", None, "d", "e"]})

    def build(flow: si.Flow) -> si.Flow:
        groups = flow.group_by("k").agg(n=col("x").n_unique(), least=col("s").min(), all=col("s").collect())
        return groups.filter(col("n") > 0).select("k", "all", twice=col("n") * 2, start=col("least").str.slice(0, 1))

    check(engine, table, build, ordered=False)


@each_engine
@pytest.mark.parametrize("keys", [(), ("k",)], ids=["all", "by key"])
def test_no_rows(engine: Engine, keys: tuple[str, ...]) -> None:
    table = pa.table({"k": pa.array([], pa.int64()), "x": pa.array([], pa.float64()), "s": pa.array([], pa.string())})
    aggs: dict[str, Column] = {"n": col("s").n_unique(), "q": col("x").quantile(0.3), "a": col("s").collect(),
                               "t": col("x").top_k(2, by="k"), "m": col("s").max()}
    check(engine, table, lambda flow: flow.group_by(*keys).agg(**aggs), ordered=False)


@every_compiler
@examples(10)
@given(st.data())
def test_approximations(engine: Engine, data: st.DataObject) -> None:
    """The estimates themselves are the same for every engine and split; how good they are, the next test asks."""
    table, keys = _table(data, NUMBERS), data.draw(KEYS)
    share = data.draw(st.floats(0, 1))

    def build(flow: si.Flow) -> si.Flow:
        return flow.group_by(*keys).agg(
            a=col("x").approx_n_unique(), b=col("t").approx_n_unique(), q=col("y").approx_quantile(share))

    check(engine, table, build, ordered=False, tolerance=ROUNDING)


@pytest.mark.parametrize("count", [0, 1, 100, 10_000, 300_000])
def test_approximations_are_near(count: int) -> None:
    values = pa.array(range(count), pa.int64())
    table = pa.table({"x": pa.chunked_array([values, values], pa.int64())})
    flow = si.from_arrow(table).group_by().agg(n=col("x").approx_n_unique(), q=col("x").approx_quantile(0.3))
    (found,) = flow.collect().to_pylist()
    assert found["n"] == pytest.approx(count, rel=0.15)  # three standard deviations
    assert found["q"] == (pytest.approx(0.3 * (count - 1), rel=0.004, abs=1) if count else None)
