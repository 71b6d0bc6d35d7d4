"""Comparisons of every type: NaN equals NaN and is the greatest, -0.0 equals 0.0, text goes by its bytes."""

from __future__ import annotations

import math

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from scalein import col
from tests.engines import DUCKDB, Engine, check, every_engine, examples
from tests.programs import COMPARISONS, constants
from tests.strategies import ALL, NUMBERS, STRINGS, of_types, tables


@every_engine
@examples(16)
@given(st.data())
def test_two_columns_of_one_type(engine: Engine, data: st.DataObject) -> None:
    type_ = data.draw(st.sampled_from(ALL))
    table = data.draw(tables(of_types(type_, type_), extreme=data.draw(st.booleans())))
    made = {f"out{i}": compare(col("a"), col("b")) for i, compare in enumerate(COMPARISONS)}
    check(engine, table, lambda flow: flow.select(**made), ordered=True)


@every_engine
@examples(16)
@given(st.data())
def test_a_column_and_a_constant(engine: Engine, data: st.DataObject) -> None:
    type_ = data.draw(st.sampled_from(ALL))
    table, constant = data.draw(tables(of_types(type_))), data.draw(constants(type_))
    made = {f"out{i}": compare(col("a"), constant) for i, compare in enumerate(COMPARISONS)}
    check(engine, table, lambda flow: flow.select(**made), ordered=True)


@every_engine
@examples(8)
@given(st.data())
def test_numbers_of_two_types(engine: Engine, data: st.DataObject) -> None:
    types = st.sampled_from([type_ for type_ in NUMBERS if type_ != pa.uint64()])
    table = data.draw(tables(of_types(data.draw(types), data.draw(types)), extreme=True))
    made = {f"out{i}": compare(col("a"), col("b")) for i, compare in enumerate(COMPARISONS)}
    check(engine, table, lambda flow: flow.select(**made), ordered=True)


@every_engine
@examples(6)
@given(st.data())
def test_texts_of_two_forms(engine: Engine, data: st.DataObject) -> None:
    forms = st.sampled_from(STRINGS)
    table = data.draw(tables(of_types(data.draw(forms), data.draw(forms))))
    check(engine, table, lambda flow: flow.select(eq=col("a") == col("b"), lt=col("a") < col("b")), ordered=True)


def test_order_in_examples() -> None:
    table = pa.table({"a": [math.nan, math.nan, 0.0, math.inf], "b": [math.nan, math.inf, -0.0, math.nan]})
    made = {"eq": col("a") == col("b"), "gt": col("a") > col("b")}
    found = check(DUCKDB, table, lambda flow: flow.select(**made), ordered=True)
    assert found is not None
    assert found.to_pydict() == {"eq": [True, False, True, False], "gt": [False, True, False, False]}
