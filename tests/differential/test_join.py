"""join with a static table: inner, left, semi, anti; several keys, duplicates, nulls."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from tests.engines import Engine, check, each_engine, every_engine, examples
from tests.strategies import ALL, STRINGS, of_types, schemas, tables

HOWS = ["inner", "left", "semi", "anti"]


def named(table: pa.Table, *names: str) -> pa.Table:
    return table.rename_columns(list(names))


@every_engine
@pytest.mark.parametrize("how", HOWS)
@examples(10)
@given(st.data())
def test_one_key_of_any_type(engine: Engine, how: str, data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(ALL))
    left = named(data.draw(tables(of_types(key, pa.int32()), most=64)), "k", "x")
    right = named(data.draw(tables(of_types(key, pa.string(), pa.float64()), most=64)), "k", "x", "y")
    check(engine, left, lambda flow: flow.join(right, on="k", how=how), ordered=False)


@every_engine
@pytest.mark.parametrize("how", HOWS)
@examples(6)
@given(st.data())
def test_several_keys(engine: Engine, how: str, data: st.DataObject) -> None:
    schema = data.draw(schemas(least=2, most=3))
    left, right = data.draw(tables(schema, most=64)), data.draw(tables(schema, most=64))
    right = right.append_column("extra", pa.array(range(right.num_rows), pa.int64()))
    check(engine, left, lambda flow: flow.join(right, on=schema.names, how=how), ordered=False)


@every_engine
@pytest.mark.parametrize("how", HOWS)
@examples(4)
@given(st.data())
def test_keys_of_other_names_and_widths(engine: Engine, how: str, data: st.DataObject) -> None:
    left = data.draw(tables(of_types(pa.int16(), pa.int64()), most=64))
    right = named(data.draw(tables(of_types(pa.int64(), pa.bool_()), most=64)), "id", "b")
    check(engine, left, lambda flow: flow.join(right, left_on="a", right_on="id", how=how), ordered=False)


@every_engine
@examples(4)
@given(st.data())
def test_texts_of_two_forms(engine: Engine, data: st.DataObject) -> None:
    forms = st.sampled_from(STRINGS)
    left = named(data.draw(tables(of_types(data.draw(forms), pa.int8()))), "k", "x")
    right = named(data.draw(tables(of_types(data.draw(forms), pa.int8()), most=64)), "k", "y")
    check(engine, left, lambda flow: flow.join(right, on="k"), ordered=False)


@every_engine
@pytest.mark.parametrize("how", HOWS)
@examples(4)
@given(tables(of_types(pa.int32(), pa.int64())))
def test_rows_keep_their_order_where_a_key_matches_once(engine: Engine, how: str, left: pa.Table) -> None:
    right = pa.table({"a": pa.array(range(-10, 10, 2), pa.int32()), "name": [f"n{i}" for i in range(10)]})
    check(engine, left, lambda flow: flow.join(right, on="a", how=how), ordered=True)


@every_engine
@pytest.mark.parametrize("how", HOWS)
@examples(3)
@given(tables(of_types(pa.int32(), pa.int64()), most=64))
def test_a_flow_on_the_right(engine: Engine, how: str, left: pa.Table) -> None:
    right = si.from_arrow(left).group_by("a").agg(n=si.count(), top=col("b").max())

    def build(flow: Flow) -> Flow:
        return flow.with_columns(c=col("b").fill_null(0)).join(right, on="a", how=how).filter(col("c") != 3)

    check(engine, left, build, ordered=False)


@each_engine
def test_meaning_in_examples(engine: Engine) -> None:
    left = pa.table({"k": [1.0, float("nan"), None, -0.0, 7.0], "x": [1, 2, 3, 4, 5]})
    right = pa.table({"k": [float("nan"), 0.0, None, 1.0, 1.0], "x": [10, 20, 30, 40, 50]})
    found = check(engine, left, lambda flow: flow.join(right, on="k", how="left"), ordered=False)
    assert found is not None
    assert found.schema.names == ["k", "x", "x_right"]
    pairs = sorted(zip(found["x"].to_pylist(), found["x_right"].to_pylist(), strict=True), key=str)
    assert pairs == [(1, 40), (1, 50), (2, 10), (3, None), (4, 20), (5, None)]
    left_over = check(engine, left, lambda flow: flow.join(right, on="k", how="anti"), ordered=False)
    assert left_over is not None
    assert sorted(left_over["x"].to_pylist()) == [3, 5]
