"""group_by: no key, one or many of any type, and every aggregate."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import col
from scalein.api.column import Column
from tests.engines import COMPILED, Engine, check, each_engine, every_engine, examples
from tests.programs import aggregates
from tests.strategies import ALL, FIXED, NUMBERS, of_types, schemas, tables

# Sums of floats depend on the order of the rows, up to rounding.
ROUNDING = 1e-6

NUMERIC = ["sum", "mean", "var", "std"]
PICKING = ["min", "max", "first", "last"]


@every_engine
@examples(16)
@given(st.data())
def test_keys_of_any_type(engine: Engine, data: st.DataObject) -> None:
    schema = data.draw(schemas(ALL, least=1, most=3))
    table = data.draw(tables(schema))
    check(engine, table, lambda flow: flow.group_by(*schema.names).agg(n=si.count()), ordered=False)


@every_engine
@pytest.mark.parametrize("keys", [(), ("k",)], ids=["all", "by key"])
@pytest.mark.parametrize("fn", [*NUMERIC, "count"])
@examples(6)
@given(st.data())
def test_numeric_aggregates(engine: Engine, fn: str, keys: tuple[str, ...], data: st.DataObject) -> None:
    types = [*NUMBERS, pa.bool_(), pa.duration("us")] if fn == "sum" else NUMBERS
    schema = pa.schema([("x", data.draw(st.sampled_from(types))), ("k", pa.int16())])
    table = data.draw(tables(schema))
    build = lambda flow: flow.group_by(*keys).agg(out=getattr(col("x"), fn)())  # noqa: E731
    check(engine, table, build, ordered=False, tolerance=ROUNDING)


@every_engine
@pytest.mark.parametrize("keys", [(), ("k",)], ids=["all", "by key"])
@pytest.mark.parametrize("fn", PICKING)
@examples(6)
@given(st.data())
def test_picking_aggregates(engine: Engine, fn: str, keys: tuple[str, ...], data: st.DataObject) -> None:
    schema = pa.schema([("x", data.draw(st.sampled_from(FIXED))), ("k", pa.string())])
    table = data.draw(tables(schema, extreme=data.draw(st.booleans())))
    check(engine, table, lambda flow: flow.group_by(*keys).agg(out=getattr(col("x"), fn)()), ordered=False)


@every_engine
@pytest.mark.parametrize("fn", ["arg_min", "arg_max"])
@examples(10)
@given(st.data())
def test_arguments_of_extremes(engine: Engine, fn: str, data: st.DataObject) -> None:
    types = st.sampled_from(FIXED)
    schema = pa.schema([("x", data.draw(types)), ("by", data.draw(types)), ("k", pa.int8())])
    table = data.draw(tables(schema))
    keys = data.draw(st.sampled_from([(), ("k",)]))
    check(engine, table, lambda flow: flow.group_by(*keys).agg(out=getattr(col("x"), fn)("by")), ordered=False)


@every_engine
@examples(12)
@given(st.data())
def test_many_aggregates_at_once(engine: Engine, data: st.DataObject) -> None:
    schema = data.draw(schemas(least=2, most=4))
    table, aggs = data.draw(tables(schema)), data.draw(aggregates(schema))
    keys = data.draw(st.sampled_from([[], schema.names[:1], schema.names[:2]]))
    check(engine, table, lambda flow: flow.group_by(*keys).agg(**aggs), ordered=False, tolerance=ROUNDING)


@every_engine
@examples(3)
@given(st.data())
def test_many_rows_of_skewed_and_distinct_keys(engine: Engine, data: st.DataObject) -> None:
    schema = pa.schema([("k", data.draw(st.sampled_from(ALL))), ("x", pa.int64()), ("y", pa.float64())])
    table = data.draw(tables(schema, least=5000, most=5000))
    made: dict[str, Column] = {"n": si.count(), "s": col("x").sum(), "top": col("y").max(), "one": col("x").first()}
    check(engine, table, lambda flow: flow.group_by("k").agg(**made), ordered=False)


@every_engine
@examples(4)
@given(tables(of_types(pa.int32(), pa.string(), pa.float64())))
def test_keys_and_arguments_are_expressions(engine: Engine, table: pa.Table) -> None:
    keys = {"odd": col("a") % 2 == 1, "size": col("b").str.len()}
    made = {"s": (col("a") * 2 + 1).sum(), "m": (col("c") / 2).max()}
    check(engine, table, lambda flow: flow.group_by(**keys).agg(**made), ordered=False)


@each_engine
def test_nothing_in_one_row_out_without_keys(engine: Engine) -> None:
    empty = pa.table({"k": pa.array([], pa.string()), "x": pa.array([], pa.int32())})
    made = {"n": si.count(), "valid": col("x").count(), "s": col("x").sum(), "m": col("x").mean(), "v": col("x").var(),
            "lo": col("x").min(), "f": col("x").first(), "am": col("x").arg_min("x")}  # fmt: skip
    found = check(engine, empty, lambda flow: flow.group_by().agg(**made), ordered=False)
    assert found is not None
    assert found.to_pylist() == [{"n": 0, "valid": 0} | dict.fromkeys(["s", "m", "v", "lo", "f", "am"])]
    by_key = check(engine, empty, lambda flow: flow.group_by("k").agg(**made), ordered=False)
    assert by_key is not None
    assert by_key.num_rows == 0


@each_engine
def test_sums_are_exact_until_they_come_out(engine: Engine) -> None:
    big = 2**63 - 1
    fits = pa.table({"x": pa.array([big, big, -big, -5, None])})
    found = check(engine, fits, lambda flow: flow.group_by().agg(s=col("x").sum(), m=col("x").mean()), ordered=False)
    assert found is not None
    assert found["s"].to_pylist() == [big - 5]
    for table in (pa.table({"x": [big, 1]}), pa.table({"x": pa.array([2**64 - 1, 1], pa.uint64())}),
                  pa.table({"x": pa.array([-big, -2], pa.duration("ns"))})):  # fmt: skip
        assert check(engine, table, lambda flow: flow.group_by().agg(s=col("x").sum()), ordered=False) is None
    mean = pa.table({"x": [big, big, big]})
    found = check(engine, mean, lambda flow: flow.group_by().agg(m=col("x").mean()), ordered=False)
    assert found is not None
    assert found["m"].to_pylist() == [float(big)]


@each_engine
def test_zeros_and_nans_are_one_group_each(engine: Engine) -> None:
    nan = float("nan")
    for type_ in (pa.float32(), pa.float64()):
        table = pa.table({"k": pa.array([0.0, -0.0, nan, -nan, None, None], type_)})
        found = check(engine, table, lambda flow: flow.group_by("k").agg(n=si.count()), ordered=False)
        assert found is not None
        assert found["n"].to_pylist() == [2, 2, 2]


@pytest.mark.parametrize("engine", COMPILED[:3], ids=str)  # DuckDB raises an error for it
@pytest.mark.parametrize("values", [[0.25, math.inf], [math.inf, 0.25], [-math.inf, math.inf], [math.nan, 1]], ids=str)
def test_an_infinite_value_has_no_spread(engine: Engine, values: list[float]) -> None:
    table = pa.table({"k": [1] * len(values), "x": values})
    for keys in ((), ("k",)):
        check(engine, table, lambda flow, keys=keys: flow.group_by(*keys).agg(v=col("x").var()), ordered=False)
