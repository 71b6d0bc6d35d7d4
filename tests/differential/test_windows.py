"""Aligned windows: half-open, from the epoch or an offset on, before it too; a null time is in none."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from scalein.dtypes import F64, I64
from scalein.ir.exprs import Agg, Col, Named, NamedAgg
from scalein.ir.ops import Aggregate
from scalein.ir.windows import Window
from tests import duck, oracle
from tests.engines import DUCKDB, Engine, check, each_compiler, each_engine, every_engine, examples
from tests.same import assert_same
from tests.strategies import NAIVE, ZONED, tables

INTEGERS = [pa.int16(), pa.int32(), pa.int64()]
SIZES = [("10s", "10s"), ("10s", "2s"), ("10s", "4s"), ("7s", "3s"), ("1m", "1m"), ("1d", "1h30m"), ("1h", "30m")]


def timed(type_: pa.DataType, key: pa.DataType | None = None) -> pa.Schema:
    return pa.schema([("t", type_), ("x", pa.int32()), ("y", pa.float64()), ("k", key or pa.int16())])


@every_engine
@examples(16)
@given(st.data())
def test_windows_on_timestamps(engine: Engine, data: st.DataObject) -> None:
    table = data.draw(tables(timed(data.draw(st.sampled_from([*NAIVE, *ZONED])))))
    size, every = data.draw(st.sampled_from(SIZES))
    keys = data.draw(st.sampled_from([[], ["k"]]))
    offset = data.draw(st.sampled_from([None, "1s", "-2h"]))
    window = si.tumbling("t", size, offset=offset) if size == every else si.sliding(
        "t", size, every=every, offset=offset)

    def build(flow: Flow) -> Flow:
        return flow.group_by(*keys, window).agg(n=si.count(), s=col("x").sum(), top=col("y").max())

    check(engine, table, build, ordered=False)


@every_engine
@examples(16)
@given(st.data())
def test_windows_on_integers(engine: Engine, data: st.DataObject) -> None:
    time, key = data.draw(st.sampled_from(INTEGERS)), data.draw(st.sampled_from([pa.string(), pa.float64()]))
    table = data.draw(tables(timed(time, key)))
    size = data.draw(st.integers(1, 30))
    every = data.draw(st.integers(1, size))
    keys = data.draw(st.sampled_from([[], ["k"]]))
    made = {"n": si.count(), "valid": col("y").count(), "first": col("x").first(), "last": col("x").last(),
            "at": col("x").arg_max("y"), "lo": col("y").min()}  # fmt: skip
    offset = data.draw(st.integers(-40, 40))
    window = data.draw(st.sampled_from([
        si.sliding("t", size, every=every), si.sliding("t", size, every=every, offset=offset),
        si.cumulate("t", size * every, step=every, offset=offset)]))
    build = lambda flow: flow.group_by(*keys, window).agg(**made)  # noqa: E731
    check(engine, table, build, ordered=False)


@every_engine
@examples(6)
@given(st.data())
def test_tumbling_windows_on_unsigned_integers(engine: Engine, data: st.DataObject) -> None:
    type_ = data.draw(st.sampled_from([pa.uint8(), pa.uint16(), pa.uint32()]))
    table, size = data.draw(tables(timed(type_))), data.draw(st.integers(1, 30))
    check(engine, table, lambda flow: flow.group_by("k", si.tumbling("t", size)).agg(n=si.count()), ordered=False)


@every_engine
@examples(6)
@given(st.data())
def test_means_and_deviations_in_windows(engine: Engine, data: st.DataObject) -> None:
    table = data.draw(tables(timed(pa.timestamp("ms"))))
    window = data.draw(st.sampled_from([si.tumbling("t", "1m"), si.sliding("t", "1m", every="20s")]))
    made = {"m": col("y").mean(), "v": col("y").var(), "d": col("x").std(), "s": col("y").sum()}
    check(engine, table, lambda flow: flow.group_by("k", window).agg(**made), ordered=False, tolerance=1e-6)


@every_engine
@examples(2)
@given(tables(timed(pa.timestamp("us"), pa.string()), least=5000, most=5000))
def test_many_rows(engine: Engine, table: pa.Table) -> None:
    build = lambda flow: flow.group_by("k", si.sliding("t", "10m", every="3m")).agg(n=si.count(), s=col("x").sum())  # noqa: E731
    check(engine, table, build, ordered=False)


@every_engine
@examples(4)
@given(tables(timed(pa.timestamp("ms"))))
def test_the_time_is_an_expression_and_rows_are_filtered(engine: Engine, table: pa.Table) -> None:
    def build(flow: Flow) -> Flow:
        shifted = flow.with_watermark("t", "2s").filter(col("x") > -5).with_columns(u=col("t").dt.truncate("1s"))
        return shifted.group_by(si.tumbling("u", "5s"), odd=col("x") % 2).agg(n=si.count(), m=col("t").max())

    check(engine, table, build, ordered=False)


@each_engine
def test_meaning_in_examples(engine: Engine) -> None:
    table = pa.table({"t": pa.array([-1, 0, 9, 10, -10, None, -11]), "x": [1, 2, 4, 8, 16, 32, 64]})
    found = check(engine, table, lambda flow: flow.group_by(si.tumbling("t", 10)).agg(s=col("x").sum()), ordered=False)
    assert found is not None
    assert found.sort_by("window_start").to_pydict() == {
        "window_start": [-20, -10, 0, 10], "window_end": [-10, 0, 10, 20], "s": [64, 17, 6, 8]}  # fmt: skip
    empty = check(engine, table.slice(0, 0), lambda flow: flow.group_by(si.tumbling("t", 10)).agg(n=si.count()),
                  ordered=False)  # fmt: skip
    assert empty is not None
    assert empty.num_rows == 0


@each_engine
def test_a_row_without_time_cannot_fail(engine: Engine) -> None:
    table = pa.table({"t": [1, None], "x": [1, 1], "d": [1, 0]})
    build = lambda flow: flow.group_by(si.tumbling("t", 10), k=col("x") // col("d")).agg(  # noqa: E731
        s=(col("x") % col("d")).sum())  # fmt: skip
    assert check(engine, table, build, ordered=False) is not None


@examples(12)
@given(st.data())
def test_windows_with_gaps(data: st.DataObject) -> None:
    """The IR allows them although `sliding` refuses them: rows between windows are in none."""
    table = data.draw(tables(timed(pa.int32())))
    every = data.draw(st.integers(2, 30))
    window = Window(Col("t", I64), data.draw(st.integers(1, every)), every)
    source = si.from_arrow(table).with_columns(t=col("t").cast(pa.int64())).op
    aggs = (NamedAgg("n", Agg("count", (), I64, False)), NamedAgg("lo", Agg("min", (Col("y", F64),), F64)))
    op = Aggregate(source, (Named("k", Col("t", I64)),), window, aggs)
    assert_same(duck.run(op), oracle.run(op), ordered=False)


@pytest.mark.parametrize(("type_", "time"), [(pa.int8(), 127), (pa.int64(), 2**63 - 1), (pa.int64(), -(2**63))])
def test_a_window_that_the_type_cannot_hold_is_an_error(type_: pa.DataType, time: int) -> None:
    table = pa.table({"t": pa.array([time], type_)})
    flow = si.from_arrow(table).group_by(si.tumbling("t", 10)).agg(n=si.count())
    with pytest.raises(si.ComputeError, match="overflow"):
        oracle.collect(flow)


def test_duckdb_sees_the_same_windows() -> None:
    table = pa.table({"t": pa.array([-1, 5, 61_000], pa.int64()).cast(pa.timestamp("ms"))})
    build = lambda flow: flow.group_by(si.sliding("t", "1m", every="20s")).agg(n=si.count())  # noqa: E731
    found = check(DUCKDB, table, build, ordered=False)
    assert found is not None
    assert found.num_rows == 7


@each_compiler
def test_a_row_without_a_time_cannot_fail(engine: Engine) -> None:
    """Not even where pyarrow computes its key: text to numbers."""
    table = pa.table({"t": pa.array([None, 5], pa.int64()), "text": ["none", "7"], "x": [0, 1]})

    def build(flow: Flow) -> Flow:
        key = col("text").cast(pa.int64()) // col("x")
        return flow.group_by(si.tumbling("t", 10), k=key).agg(n=si.count(), m=(1 // col("x")).max())

    check(engine, table, build, ordered=False)
