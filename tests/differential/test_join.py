"""join with a static table: all kinds of it; several keys, duplicates, nulls."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from tests import nested
from tests.engines import Engine, check, each_engine, every_engine, examples
from tests.strategies import ALL, STRINGS, of_types, schemas, tables

HOWS = ["inner", "left", "right", "outer", "semi", "anti"]
OUTER = ["right", "outer"]


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


@every_engine
@pytest.mark.parametrize("how", OUTER)
@examples(6)
@given(st.data())
def test_steps_around_an_outer_join(engine: Engine, how: str, data: st.DataObject) -> None:
    """Filters above must stay there where rows without a match would differ; filters below are fused with the probe."""
    left = named(data.draw(tables(of_types(pa.int32(), pa.int64(), pa.string()), most=64)), "k", "x", "s")
    right = named(data.draw(tables(of_types(pa.int32(), pa.int64(), pa.string()), most=64)), "k", "y", "s")

    def build(flow: Flow) -> Flow:
        joined = flow.filter(col("x").fill_null(0) % 3 != 0).join(right, on="k", how=how)
        return joined.filter((col("k") != 5) & (col("y").fill_null(1) > -100) & col("x").is_null())

    check(engine, left, build, ordered=False)

    def grouped(flow: Flow) -> Flow:
        once = flow.distinct("k").join(right, on="k", how=how)
        return once.group_by("s_right", known=col("x").is_not_null()).agg(n=si.count(), top=col("y").max())

    check(engine, left, grouped, ordered=False)

    def twice(flow: Flow) -> Flow:
        other = si.from_arrow(right).group_by("k").agg(n=si.count())
        return flow.join(right, on="k", how=how).join(other, on="k", how=how).select("k", "y", "n")

    check(engine, left, twice, ordered=False)


@every_engine
@pytest.mark.parametrize("how", OUTER)
@examples(4)
@given(st.data())
def test_nested_columns_of_either_side(engine: Engine, how: str, data: st.DataObject) -> None:
    left = data.draw(nested.tables(pa.list_(pa.int64()), pa.struct({"a": pa.int32()})))
    right = data.draw(nested.tables(pa.struct({"b": pa.string()}))).rename_columns({"n0": "there"})
    check(engine, left, lambda flow: flow.join(right, on="k", how=how), ordered=False)


@every_engine
@examples(8)
@given(st.data())
def test_every_pair(engine: Engine, data: st.DataObject) -> None:
    left = named(data.draw(tables(of_types(pa.int32(), pa.string()), most=40)), "x", "s")
    right = named(data.draw(tables(of_types(pa.int64(), pa.string()), most=data.draw(st.sampled_from([0, 1, 7, 40])))),
                  "y", "s")
    check(engine, left, lambda flow: flow.join(right, how="cross"), ordered=False)
    check(engine, left, lambda flow: flow.join(right, how="cross").filter((col("y") > col("x")) & (col("x") > 0)),
          ordered=False)
    check(engine, left, lambda flow: flow.join(right, how="cross").group_by("s_right").agg(n=si.count()), ordered=False)


@each_engine
def test_an_outer_join_in_an_example(engine: Engine) -> None:
    left = pa.table({"id": pa.array([1, 2, None, 4], pa.int32()), "x": ["a", "b", "c", "d"]})
    right = pa.table({"key": pa.array([4, None, 9, 1, 1]), "x": [40, 50, 90, 10, 11]})
    found = check(engine, left, lambda flow: flow.join(right, left_on="id", right_on="key", how="outer"), ordered=True)
    assert found is not None
    assert found.to_pydict() == {"id": [1, 1, 2, None, 4, None, 9], "x": ["a", "a", "b", "c", "d", None, None],
                                 "x_right": [10, 11, None, None, 40, 50, 90]}
    assert found.schema.field("id").type == pa.int64(), "the type that both keys fit"
    found = check(engine, left, lambda flow: flow.join(right, left_on="id", right_on="key", how="right"), ordered=True)
    assert found is not None
    assert found.to_pydict() == {"id": [1, 1, 4, None, 9], "x": ["a", "a", "d", None, None],
                                 "x_right": [10, 11, 40, 50, 90]}
    empty = check(engine, left.slice(0, 0), lambda flow: flow.join(right, left_on="id", right_on="key", how="right"),
                  ordered=True)
    assert empty is not None
    assert empty["id"].to_pylist() == [4, None, 9, 1, 1]
    none = check(engine, left, lambda flow: flow.join(right.slice(0, 0), left_on="id", right_on="key", how="outer"),
                 ordered=True)
    assert none is not None
    assert none["x_right"].to_pylist() == [None] * 4


@each_engine
@pytest.mark.parametrize("how", HOWS)
def test_dictionaries_on_both_sides(engine: Engine, how: str) -> None:
    """Each part has a dictionary of its own; a match is looked up by code."""
    def coded(numbers: range, word: str, hole: int) -> pa.Array:
        return pa.array([None if n % hole == 0 else f"{word}{n % 13}" for n in numbers]).dictionary_encode()

    parts = [pa.table({"k": coded(range(n, n + 60), "w", 7), "s": coded(range(n, n + 60), "s", 5)})
             for n in (0, 4, 300)]  # fmt: skip
    right = pa.table({"k": coded(range(8, 50, 2), "w", 5), "p": coded(range(21), "p", 3)}).slice(2, 15)
    check(engine, pa.concat_tables(parts), lambda flow: flow.join(right, on="k", how=how), ordered=False)


def test_a_flow_runs_again_with_marks_of_its_own() -> None:
    """Small tables are kept between runs, and what one run has matched must not count in the next."""
    right = pa.table({"k": [1, 2, 3], "y": [10, 20, 30]})
    flow = si.flow({"k": pa.int64()}).join(right, on="k", how="outer")
    assert flow.collect({"k": [1, 2, 3]}).num_rows == 3
    assert flow.collect({"k": [1]}).to_pydict() == {"k": [1, 2, 3], "y": [10, 20, 30]}
    assert flow.collect({"k": [5]}).to_pydict() == {"k": [5, 1, 2, 3], "y": [None, 10, 20, 30]}


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
