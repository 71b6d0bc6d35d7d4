"""Values over other rows: every function and aggregate, over frames of every kind, nulls, NaN, ties and no keys."""

from __future__ import annotations

import random
from collections.abc import Callable
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import col
from scalein.api.column import Column
from scalein.api.flow import Flow
from scalein.exec import over
from tests.engines import Engine, check, each_engine, every_compiler, every_engine, examples
from tests.strategies import ALL, of_types, tables

KEYS = pa.schema({"k": pa.int64(), "j": pa.string(), "f": pa.float64()})
ROWS = pa.schema([*KEYS, ("t", pa.int32()), ("x", pa.int64()), ("y", pa.float64()), ("ok", pa.bool_())])


@st.composite
def rows(draw: st.DrawFn) -> pa.Table:
    """Few keys and many ties."""
    table = draw(tables(ROWS, most=90))
    small = st.integers(0, 4) | st.none()
    count = table.num_rows
    keys = draw(st.lists(small, min_size=count, max_size=count))
    times = draw(st.lists(st.integers(-9, 9) | st.none(), min_size=count, max_size=count))
    table = table.set_column(0, "k", pa.array(keys, pa.int64()))
    texts = [None if key is None else "xy"[key % 2] * 9 for key in keys]
    table = table.set_column(1, "j", pa.array(texts, pa.string()))
    floats = [None if key is None else [0.0, -0.0, float("nan"), 1.5, -1.5][key] for key in keys]
    table = table.set_column(2, "f", pa.array(floats, pa.float64()))
    return table.set_column(3, "t", pa.array(times, pa.int32()))


KEY_LISTS = [[], ["k"], ["j"], ["f"], ["k", "j"], ["f", "k", "j"], [col("k") % 2]]
FRAMES: list[dict[str, object]] = [
    {}, {"order_by": "t"}, {"order_by": "t", "rows": 1}, {"order_by": "t", "rows": 3}, {"order_by": "t", "rows": 10**9},
    {"order_by": "t", "within": 0}, {"order_by": "t", "within": 4}, {"rows": 2},
    {"order_by": ["y", "t"], "descending": [True, False], "rows": 4}, {"order_by": "j", "descending": True},
    {"order_by": col("t") * 2 + 1, "within": 5},
]  # fmt: skip
AGGREGATES: dict[str, Callable[[], Column]] = {
    "rows": si.count, "values": lambda: col("y").count(), "sum": lambda: col("x").sum(), "fsum": lambda: col("y").sum(),
    "true": lambda: col("ok").sum(), "mean": lambda: col("x").mean(), "fmean": lambda: col("y").mean(),
    "min": lambda: col("x").min(), "fmax": lambda: col("y").max(), "fmin": lambda: col("y").min(),
    "text": lambda: col("j").max(), "bool": lambda: col("ok").min(), "var": lambda: col("y").var(),
    "std": lambda: col("x").std(), "counted": lambda: si.count().filter(col("ok")),
    "chosen": lambda: col("x").sum().filter(col("y") > 0),
}  # fmt: skip
OTHERS: dict[str, Callable[[], Column]] = {
    "first": lambda: col("j").first(), "last": lambda: col("y").last(), "of": lambda: col("x").last().filter("ok"),
    "arg": lambda: col("j").arg_min("y"), "greatest": lambda: col("x").arg_max("t"),
    "different": lambda: col("k").n_unique(),
    "median": lambda: col("y").quantile(0.5), "list": lambda: col("x").collect(), "top": lambda: col("j").top_k(2, "x"),
    "pair": lambda: si.cov("x", "y"),
}  # fmt: skip
PLACES: dict[str, Callable[[], Column]] = {
    "n": si.row_number, "r": si.rank, "d": si.dense_rank, "lag": lambda: col("j").lag(), "far": lambda: col("x").lag(3),
    "lead": lambda: col("y").lead(2), "same": lambda: col("ok").lag(0),
}  # fmt: skip


def chosen(data: st.DataObject, of: dict[str, Callable[[], Column]], keys: list[object],
           frame: dict[str, object]) -> dict[str, Column]:  # fmt: skip
    names = data.draw(st.lists(st.sampled_from(sorted(of)), min_size=1, max_size=4, unique=True))
    return {name: of[name]().over(*keys, **frame) for name in names}  # type: ignore[arg-type]


@every_engine
@examples(40)
@given(st.data(), rows())
def test_aggregates_over_frames(engine: Engine, data: st.DataObject, table: pa.Table) -> None:
    keys, frame = data.draw(st.sampled_from(KEY_LISTS)), data.draw(st.sampled_from(FRAMES))
    columns = chosen(data, AGGREGATES, keys, frame)
    check(engine, table, lambda flow: flow.with_columns(**columns), ordered=True, tolerance=1e-9)


@every_compiler
@examples(20)
@given(st.data(), rows())
def test_rows_picked_and_all_values(engine: Engine, data: st.DataObject, table: pa.Table) -> None:
    keys, frame = data.draw(st.sampled_from(KEY_LISTS)), data.draw(st.sampled_from(FRAMES))
    columns = chosen(data, OTHERS, keys, frame)
    check(engine, table, lambda flow: flow.with_columns(**columns), ordered=True, tolerance=1e-9)


@every_engine
@examples(20)
@given(st.data(), rows())
def test_places_in_the_order(engine: Engine, data: st.DataObject, table: pa.Table) -> None:
    keys = data.draw(st.sampled_from(KEY_LISTS))
    by = data.draw(st.sampled_from(["t", "y", ["j", "t"], ["f", "ok", "x"]]))
    way = data.draw(st.booleans())
    columns = chosen(data, PLACES, keys, {"order_by": by, "descending": way})
    check(engine, table, lambda flow: flow.with_columns(**columns), ordered=True)


@every_compiler
@examples(16)
@given(st.data())
def test_every_type(engine: Engine, data: st.DataObject) -> None:
    """As a key, in the order, least and greatest, and taken from another row."""
    schema = of_types(data.draw(st.sampled_from(ALL)), data.draw(st.sampled_from(ALL)))
    table = data.draw(tables(schema, most=60, extreme=True))
    a, b = schema.names[:2]
    check(engine, table, lambda flow: flow.with_columns(
        n=si.row_number().over(a, order_by=b), least=col(a).min().over(order_by=b, rows=3), lag=col(b).lag().over(a),
        most=col(b).max().over(a)), ordered=True)


@each_engine
def test_in_expressions_and_filters(engine: Engine) -> None:
    table = pa.table({"k": ["a", "b", "a", "b", "a"], "t": [3, 1, 2, 9, 1], "x": [5, 4, 3, 2, 1]})

    def build(flow: Flow) -> Flow:
        before = col("x").lag().over("k", order_by="t")
        share = (col("x") / col("x").sum()).over("k")
        deep = (col("x") - col("x").mean().over("k")).abs().max().over()
        place = si.row_number().over("k", order_by="t") * 10
        shown = flow.with_columns(d=col("x") - before, share=share, deep=deep, n=place)
        return shown.filter(si.rank().over("k", order_by="d") <= 2, col("x") > 1)

    check(engine, table, build, ordered=True, tolerance=1e-12)


@each_engine
def test_float_sums_do_not_drift(engine: Engine) -> None:
    """What leaves a frame leaves nothing: neither an infinity, nor what a great number had swallowed."""
    table = pa.table({"x": [1e300, 1.0, -1e300, 0.1, float("inf"), 0.2, float("-inf"), 0.3, float("nan"), 1.0, 2.0]})
    found = check(engine, table, lambda flow: flow.select(s=col("x").sum().over(rows=2)), ordered=True, tolerance=1e-15)
    assert found is not None
    assert found["s"].to_pylist()[-1] == 3.0


def test_sums_that_do_not_fit_fail_where_they_are_called() -> None:
    flow = si.from_arrow({"x": [2**62, 2**62, -(2**62)]})
    good = flow.select(s=col("x").sum().over(order_by=col("x") * -1 + 2**60, rows=1))
    with pytest.raises(si.ComputeError):
        flow.select(s=col("x").sum().over(rows=2)).collect()
    assert flow.select(s=col("x").sum().over()).collect()["s"].to_pylist() == [2**62] * 3
    del good


def test_memory_is_bounded_by_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    from scalein.exec import over

    spilled: list[int] = []
    whole = over._spilled
    monkeypatch.setattr(over, "_spilled", lambda *given: spilled.append(1) or whole(*given))
    table = pa.table({"k": [n * 7 % 1009 for n in range(60_000)], "x": [float(n % 31) for n in range(60_000)]})
    flow = si.from_arrow(pa.Table.from_batches(table.to_batches(max_chunksize=5000)))
    shown = flow.with_columns(s=col("x").sum().over("k", rows=5), n=si.row_number().over("k"))
    order = [("k", "ascending"), ("n", "ascending")]
    assert shown.collect(memory="2MB").sort_by(order).equals(shown.collect().sort_by(order))
    assert spilled


@pytest.mark.parametrize(("make", "why"), [
    (lambda: col("x").over("k"), "needs an aggregate"),
    (lambda: col("x").sum().over("k", rows=0), "1 or more"),
    (lambda: col("x").sum().over("k", order_by="t", rows=2, within=3), "not both"),
    (lambda: col("x").sum().over("k", within=3), "time to order by"),
    (lambda: col("x").sum().over("k", order_by="t", within="3s"), "integer"),
    (lambda: col("x").sum().over("k", order_by="y", within=3), "timestamp or an integer"),
    (lambda: si.rank().over("k"), "needs an order"),
    (lambda: col("x").lag(-1), "0 or more"),
    (lambda: col("x").lag(1).over("k", order_by="t", rows=3), "takes no frame"),
    (lambda: col("x").lag(1), "of rows in an order"),
    (lambda: col("z").sum().over("k"), "no column 'z'"),
    (lambda: col("x").sum().over("kk"), "did you mean 'k'|no column 'kk'"),
])  # fmt: skip
def test_wrong_arguments_are_refused(make: Callable[[], Column], why: str) -> None:
    flow = si.from_arrow({"k": [1], "t": [2], "x": [3], "y": [1.5]})
    with pytest.raises(si.ScaleinError, match=why):
        flow.with_columns(z=make())


@pytest.mark.parametrize("step", [
    lambda flow, x: flow.sort(x), lambda flow, x: flow.group_by(x), lambda flow, x: flow.group_by("k").agg(s=x.sum()),
    lambda flow, x: flow.join(flow, left_on=x, right_on="k"),
])  # fmt: skip
def test_other_steps_say_where_it_goes(step: Callable[[Flow, Column], Flow]) -> None:
    flow = si.from_arrow({"k": [1], "x": [3]})
    with pytest.raises(si.ScaleinError, match="over"):
        step(flow, col("x").lag().over("k"))


def test_a_window_function_is_no_aggregate_of_a_group() -> None:
    flow = si.from_arrow({"k": [1], "x": [3]})
    with pytest.raises(si.ScaleinError, match="of rows in an order"):
        flow.group_by("k").agg(n=si.row_number())


def test_what_is_not_needed_is_not_computed() -> None:
    flow = si.from_arrow({"k": [1], "x": [3]}).with_columns(n=si.row_number().over("k"), s=col("x").sum().over("k"))
    assert "over" not in flow.select("k").explain("fused")
    assert "Filter" in flow.filter(col("k") > 0).explain(verbose=True)


@pytest.mark.parametrize("high", [10**6, 10**17, 10**24])
def test_sums_of_decimals_take_one_pass(high: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of more than 64 bits, or whose sums have more, are still right, frame by frame."""
    made = random.Random(high)
    count = 300
    values = [None if k % 7 == 3 else Decimal(made.randint(-high, high)).scaleb(-3) for k in range(count)]
    keys = [None if k % 11 == 5 else made.randrange(3) for k in range(count)]
    table = pa.table({"k": keys, "t": range(count), "d": pa.array(values, pa.decimal128(30, 3))})
    flow = si.from_arrow(table).select(all=col("d").sum().over("k", order_by="t"),
                                       near=col("d").sum().over("k", order_by="t", rows=4),
                                       whole=col("d").sum().over("k"))
    if high == 10**6:
        monkeypatch.setattr(over._Frames, "_aggregated", lambda frames, call: pytest.fail("frame by frame"))
    got = flow.collect()
    for row, key in enumerate(keys):
        own = [k for k in range(count) if keys[k] == key]
        until = [k for k in own if k <= row]
        for name, frame in (("all", until), ("near", until[-4:]), ("whole", own)):
            there = [value for k in frame if (value := values[k]) is not None]
            assert got[name][row].as_py() == (sum(there) if there else None)


@pytest.mark.parametrize("kind", [pa.int64(), pa.string(), pa.float64(), pa.decimal128(25, 2)])
def test_running_numbers_of_different_values_take_one_pass(kind: pa.DataType, monkeypatch: pytest.MonkeyPatch) -> None:
    made = random.Random(4)
    values = pa.array([None if k % 9 == 2 else made.randrange(40) for k in range(300)]).cast(kind)
    table = pa.table({"k": [k % 5 or None for k in range(300)], "t": [k // 3 for k in range(300)], "v": values})
    flow = si.from_arrow(table).select(some=col("v").n_unique().over("k", order_by="t"),
                                       all=col("v").n_unique().over(order_by="t"))
    monkeypatch.setattr(over._Frames, "_aggregated", lambda frames, call: pytest.fail("frame by frame"))
    got, rows = flow.collect().to_pylist(), table.to_pylist()
    for k, row in enumerate(rows):
        until = rows[: k + 1]
        assert got[k]["some"] == len({each["v"] for each in until if each["k"] == row["k"]} - {None})
        assert got[k]["all"] == len({each["v"] for each in until} - {None})
