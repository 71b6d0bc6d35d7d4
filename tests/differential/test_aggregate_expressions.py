"""Expressions of aggregates, aggregates with a filter, and those of pairs: in groups, windows and without either."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import col, lit, when
from scalein.api.column import Column
from scalein.ir.ops import Aggregate, Project
from scalein.ir.rewrite import walk_ops
from tests import oracle
from tests.engines import COMPILED, Engine, check, each_engine, every_engine, examples
from tests.examples import AGGS
from tests.same import assert_same
from tests.strategies import NUMBERS, tables

ROUNDING = 1e-6
SCHEMA = pa.schema({"k": pa.int8(), "x": pa.int32(), "y": pa.int16(), "f": pa.float64(), "s": pa.string(),
                    "b": pa.bool_(), "t": pa.int32()})

x, y, f, b = (col(name) for name in "xyfb")
EXPRESSIONS: dict[str, Column] = {
    "ratio": x.sum() / si.count(),
    "span": x.max() - x.min(),
    "rounded": ((x.sum() * 2 + 1) / x.count()).round(2),
    "compared": x.max() > y.max(),
    "chosen": when(si.count() > 2).then(x.mean()).otherwise(lit(-1.0)),
    "guarded": when(y.sum() != 0).then(x.sum() // y.sum()).otherwise(lit(0)),
    "filtered": x.sum().filter(x > 0) - x.sum().filter(x < 0),
    "text": col("s").max().str.len() + col("s").n_unique(),
    "list": col("s").collect().list.len(),
    "missing": x.min().fill_null(-5) + f.count(),
}


@every_engine
@pytest.mark.parametrize("keys", [(), ("k",), ("k", si.tumbling("t", 10)), (si.sliding("t", 10, every=5),)],
                         ids=["all", "by key", "by key and window", "by window"])
@examples(12)
@given(st.data())
def test_expressions_of_aggregates(engine: Engine, keys: tuple[Any, ...], data: st.DataObject) -> None:
    table = data.draw(tables(SCHEMA))
    names = data.draw(st.lists(st.sampled_from(list(EXPRESSIONS)), min_size=1, max_size=3, unique=True))
    made = {"n": si.count(), **{name: EXPRESSIONS[name] for name in names}}
    check(engine, table, lambda flow: flow.group_by(*keys).agg(**made), ordered=False, tolerance=ROUNDING)


@each_engine
def test_keys_and_windows_may_stand_in_expressions(engine: Engine) -> None:
    table = pa.table({"k": [1, 1, 2], "t": [1, 12, 3], "x": [5, 7, 11]})
    made = {"a": x.sum() * col("k"), "w": x.max() - col("window_start")}
    found = check(engine, table, lambda flow: flow.group_by("k", si.tumbling("t", 10)).agg(**made), ordered=False)
    assert found is not None
    assert found.sort_by([("k", "ascending"), ("window_start", "ascending")]).to_pydict() == {
        "k": [1, 1, 2], "window_start": [0, 10, 0], "window_end": [10, 20, 10], "a": [5, 7, 22], "w": [5, -3, 11]}


def test_equal_aggregates_are_computed_once() -> None:
    flow = si.from_arrow(pa.table({"x": [1, 2]})).group_by().agg(
        total=x.sum(), mean=x.sum() / si.count(), twice=(x.sum() + x.sum()) / si.count())
    project, aggregate = flow.op, flow.op.inputs[0]
    assert isinstance(project, Project)
    assert isinstance(aggregate, Aggregate)
    assert [named.name for named in aggregate.aggs] == ["total", "#:agg0"]
    assert flow.collect().to_pydict() == {"total": [3], "mean": [1.5], "twice": [3.0]}


def test_plain_aggregates_need_no_projection() -> None:
    flow = si.from_arrow(pa.table({"x": [1, 2]})).group_by().agg(x.sum(), n=si.count().filter(x > 1))
    assert not any(isinstance(op, Project) for op in walk_ops(flow.op))


def test_an_internal_name_never_meets_one_of_the_user() -> None:
    flow = si.from_arrow(pa.table({"#agg0": [1, 1, 2], "x": [1, 2, 3]}))
    got = flow.group_by("#agg0").agg(**{"#agg1": x.sum() / si.count()}).collect().sort_by("#agg0")
    assert got.to_pydict() == {"#agg0": [1, 2], "#agg1": [1.5, 3.0]}


@pytest.mark.parametrize("keys", [(), ("g",), (si.tumbling("y", 2),)], ids=["all", "by key", "by window"])
@pytest.mark.parametrize("fn", AGGS)
def test_a_filter_leaves_out_rows(fn: str, keys: tuple[Any, ...]) -> None:
    """Against the same aggregate over a flow that has only these rows, and over none for other groups."""
    rng = np.random.default_rng(5)
    count = 300
    table = pa.table({
        "g": rng.integers(0, 7, count), "x": pa.array(rng.integers(-9, 9, count), mask=rng.random(count) < 0.2),
        "y": rng.integers(0, 9, count), "f": pa.array(rng.integers(0, 50, count) / 4, mask=rng.random(count) < 0.2),
        "s": pa.array([None if v < 2 else "abcdefgh"[v % 8] * v for v in rng.integers(0, 9, count)]),
        "b": pa.array(rng.random(count) < 0.3, mask=rng.random(count) < 0.3),
    })  # fmt: skip
    condition = b & (col("g") != 3)
    flow = si.from_arrow(table)
    names = [name for name in ("g", "window_start") if name in flow.group_by(*keys).agg(n=si.count()).columns]
    got = flow.group_by(*keys).agg(out=AGGS[fn].filter(condition))
    want = {tuple(row[name] for name in names): row["out"]
            for row in oracle.collect(flow.filter(condition).group_by(*keys).agg(out=AGGS[fn])).to_pylist()}
    empty = oracle.collect(flow.filter(lit(False)).group_by().agg(out=AGGS[fn]))["out"][0].as_py()
    for collect in (lambda: oracle.collect(got), lambda: got.collect(workers=2)):
        found = {tuple(row[name] for name in names): row["out"] for row in collect().to_pylist()}
        assert found.keys() >= want.keys()
        for key, value in found.items():
            wanted = want.get(key, empty)
            assert value == (pytest.approx(wanted, rel=1e-9, nan_ok=True) if isinstance(wanted, float) else wanted), key


@every_engine
@pytest.mark.parametrize("keys", [(), ("k",)], ids=["all", "by key"])
@examples(10)
@given(st.data())
def test_filters_of_any_aggregate(engine: Engine, keys: tuple[str, ...], data: st.DataObject) -> None:
    table = data.draw(tables(SCHEMA))
    made: dict[str, Column] = {
        "n": si.count().filter(b), "s": (x * 2).sum().filter(b, y > 0), "lo": col("s").min().filter(b),
        "first": x.first().filter(b), "last": col("s").last().filter(y > 0), "top": x.arg_max("y").filter(~b),
        "d": col("s").n_unique().filter(b)}  # fmt: skip
    chosen = data.draw(st.lists(st.sampled_from(list(made)), min_size=1, max_size=3, unique=True))
    check(engine, table, lambda flow: flow.group_by(*keys).agg(**{name: made[name] for name in chosen}), ordered=False)


@each_engine
def test_an_argument_cannot_fail_where_the_filter_is_not_true(engine: Engine) -> None:
    table = pa.table({"x": [0, 2, 5, 0], "s": ["x", "2", "5", None]})
    made = {"q": (10 // x).sum().filter(x != 0), "c": col("s").cast(pa.int64()).max().filter(x > 0),
            "f": (10 // x).first().filter(x != 0)}
    if engine.name == "duckdb":
        made.pop("c")  # text to integers
    found = check(engine, table, lambda flow: flow.group_by().agg(**made), ordered=False)
    assert found is not None
    assert found["q"].to_pylist() == [7]
    assert found["f"].to_pylist() == [5]


@each_engine
def test_shares_of_bools(engine: Engine) -> None:
    table = pa.table({"k": [1, 1, 2, 3], "ok": [True, False, None, True]})
    made = {"share": col("ok").mean(), "some": col("ok").sum()}
    found = check(engine, table, lambda flow: flow.group_by("k").agg(**made), ordered=False)
    assert found is not None
    assert found.sort_by("k").to_pydict() == {"k": [1, 2, 3], "share": [0.5, None, 1.0], "some": [1, None, 1]}
    whole = check(engine, table, lambda flow: flow.group_by().agg(share=col("ok").mean()), ordered=False)
    assert whole is not None
    assert whole["share"].to_pylist() == [2 / 3]


# --- pairs


@every_engine
@pytest.mark.parametrize("keys", [(), ("k",), (si.sliding("t", 20, every=10),)], ids=["all", "by key", "by window"])
@examples(10)
@given(st.data())
def test_covariance_and_correlation(engine: Engine, keys: tuple[Any, ...], data: st.DataObject) -> None:
    types = st.sampled_from([each for each in NUMBERS if not pa.types.is_floating(each)])
    schema = pa.schema({"k": pa.int8(), "x": data.draw(types), "y": data.draw(types), "t": pa.int16()})
    table = data.draw(tables(schema, extreme=False))
    made = {"v": si.cov("x", "y"), "c": si.corr("x", "y"), "same": si.corr("x", "x")}
    check(engine, table, lambda flow: flow.group_by(*keys).agg(**made), ordered=False, tolerance=ROUNDING)


def test_correlation_is_stable_far_from_zero() -> None:
    rng = np.random.default_rng(3)
    near = rng.normal(size=20_000)
    table = pa.table({"x": near + 1e9, "y": 2 * near + rng.normal(size=20_000) - 1e9, "g": rng.integers(0, 5, 20_000)})
    want = np.corrcoef(table["x"].to_numpy() - 1e9, table["y"].to_numpy() + 1e9)[0, 1]
    for workers in (1, 3):  # floats near 1e9 are 1e-7 apart; sums of squares there would leave no digit
        found = si.from_arrow(table).group_by().agg(c=si.corr("x", "y")).collect(workers=workers)
        assert found["c"][0].as_py() == pytest.approx(want, rel=1e-7)


@pytest.mark.parametrize(("values", "want"), [
    ([], {"v": None, "c": None}), ([(1.0, 2.0)], {"v": None, "c": None}),
    ([(1.0, None), (2.0, 1.0), (None, 3.0)], {"v": None, "c": None}),
    ([(0.1, 1.0), (0.1, 2.0), (0.1, 4.0)], {"v": 0.0, "c": math.nan}),
    ([(1.0, 1.0), (2.0, 3.0)], {"v": 1.0, "c": 1.0}),
    ([(1.0, math.inf), (2.0, 3.0)], {"v": math.nan, "c": math.nan}),
    ([(1.0, math.nan), (2.0, 3.0)], {"v": math.nan, "c": math.nan}),
], ids=["none", "one", "one pair", "constant", "two", "infinite", "nan"])  # fmt: skip
@pytest.mark.parametrize("workers", [1, 2])
def test_ends_of_covariance(values: list[tuple[float | None, float | None]], want: dict[str, float | None],
                            workers: int) -> None:
    table = pa.table({"x": pa.array([a for a, _ in values], pa.float64()),
                      "y": pa.array([b for _, b in values], pa.float64())})
    made = {"v": si.cov("x", "y"), "c": si.corr("x", "y")}
    flow = si.from_arrow(table).group_by().agg(**made)
    for found in (flow.collect(workers=workers), oracle.collect(flow)):
        assert_same(found, pa.table({name: pa.array([value], pa.float64()) for name, value in want.items()}))


def test_many_groups_of_pairs_are_spilled() -> None:
    rng = np.random.default_rng(7)
    count = 200_000
    table = pa.table({"k": rng.integers(0, 60_000, count), "x": rng.integers(0, 100, count).astype(float),
                      "y": rng.integers(0, 100, count).astype(float)})
    flow = si.from_arrow(table).group_by("k").agg(c=si.corr("x", "y"), v=si.cov("x", "y"))
    whole = flow.collect().sort_by("k")
    small = flow.collect(memory="1MB", workers=2).sort_by("k")
    assert_same(small, whole, tolerance=1e-9)
    some = si.from_arrow(table.filter(pa.compute.less(table["k"], 50))).group_by("k").agg(
        c=si.corr("x", "y"), v=si.cov("x", "y"))
    assert_same(whole.filter(pa.compute.less(whole["k"], 50)), oracle.collect(some).sort_by("k"), tolerance=1e-9)


# --- what is refused


T = si.from_arrow(pa.table({"k": ["a"], "x": [1], "y": [2.0], "ok": [True]}))
REFUSED: list[tuple[str, Callable[[], object], str]] = [
    ("no key", lambda: T.group_by("k").agg(r=x.sum() / y), "'y' is neither a key nor in an aggregate"),
    ("no column", lambda: T.group_by("k").agg(r=x.sum() / col("z")), "no column 'z'"),
    ("nested", lambda: T.group_by("k").agg(r=(x - x.mean()).sum()), "x.mean\\(\\) is an aggregate, inside of another"),
    ("in a filter", lambda: T.group_by("k").agg(r=x.sum().filter(x > x.mean())), "x.mean.* is an aggregate, inside"),
    ("no condition", lambda: T.group_by("k").agg(r=x.sum().filter("x")), "filter takes a condition"),
    ("of a column", lambda: x.filter(x > 1), "filter belongs to an aggregate"),
    ("of an expression", lambda: (x.sum() / si.count()).filter(x > 1), "filter belongs to an aggregate"),
    ("row by row", lambda: T.select(r=x.sum() / si.count()), "x.sum.* is an aggregate, but select"),
    ("no aggregate", lambda: T.group_by("k").agg(r=col("k") + "x"), "agg takes aggregates only"),
    ("types", lambda: T.group_by("k").agg(r=x.sum() + col("k").max()), "(?s)not take.*x.sum\\(\\) \\+ k.max\\(\\)"),
    ("text in corr", lambda: T.group_by().agg(r=si.corr("k", "x")), "(?s)corr takes a number.*corr\\(k, x\\)"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "says"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_is_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(si.ScaleinError, match=says) as caught:
        make()
    assert "test_aggregate_expressions.py" in str(caught.value)


def test_an_error_names_the_aggregates() -> None:
    flow = si.from_arrow(pa.table({"x": [2**62, -(2**62) - 1, 2**62]}))
    with pytest.raises(si.ComputeError, match=r"integer overflow in `x.max\(\) - x.min\(\)`(?s:.*)test_aggregate_expr"):
        flow.group_by().agg(span=x.max() - x.min()).collect()
    with pytest.raises(si.ComputeError, match=r"integer overflow in the sum `x.sum\(\)`(?s:.*)test_aggregate_expr"):
        flow.filter(x > 0).group_by().agg(mean=x.sum() / si.count()).collect()


@pytest.mark.parametrize("engine", COMPILED[:2], ids=str)
def test_more_accumulators_than_one_function_takes(engine: Engine) -> None:
    table = pa.table({"k": [1, 2, 1, 2], "x": [1, 2, 3, 5], "y": [1, 0, 2, 4]})
    made = {f"c{n}": si.cov(x + n, y) / (n + 1) for n in range(70)}
    check(engine, table, lambda flow: flow.group_by("k").agg(**made), ordered=False, tolerance=1e-12)
