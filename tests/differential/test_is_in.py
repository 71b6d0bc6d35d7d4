"""is_in and between: SQL's IN, with its null, on every type."""

from __future__ import annotations

import datetime
import math

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from scalein import col
from scalein.dtypes import from_arrow_type
from tests.engines import Engine, check, each_engine, every_engine, examples
from tests.oracle.values import to_arrow
from tests.programs import constants
from tests.strategies import ALL, of_types, tables, values


@every_engine
@examples(20)
@given(st.data())
def test_lists_of_every_type(engine: Engine, data: st.DataObject) -> None:
    type_ = data.draw(st.sampled_from(ALL))
    dtype = from_arrow_type(type_)
    table = data.draw(tables(of_types(type_)))
    drawn = data.draw(st.lists(st.none() | values(dtype, extreme=False), max_size=12))
    listed = [None if value is None else to_arrow([value], dtype)[0] for value in drawn]
    check(engine, table, lambda flow: flow.select(out=col("a").is_in(listed)), ordered=True)


@every_engine
@examples(16)
@given(st.data())
def test_between(engine: Engine, data: st.DataObject) -> None:
    type_ = data.draw(st.sampled_from(ALL))
    table = data.draw(tables(of_types(type_, type_)))
    low, high = data.draw(constants(type_)), data.draw(constants(type_))
    made = {"const": col("a").between(low, high), "columns": col("a").between(col("b"), high)}
    check(engine, table, lambda flow: flow.select(**made), ordered=True)


@each_engine
def test_meaning_in_examples(engine: Engine) -> None:
    table = pa.table({"a": [1.0, math.nan, None, -0.0]})
    made = {"plain": col("a").is_in([1.0, 2]), "nan": col("a").is_in([math.nan]), "null": col("a").is_in([0.0, None]),
            "empty": col("a").is_in([])}  # fmt: skip
    found = check(engine, table, lambda flow: flow.select(**made), ordered=True)
    assert found is not None
    assert found.to_pydict() == {
        "plain": [True, False, None, False],
        "nan": [False, True, None, False],
        "null": [None, None, None, True],
        "empty": [False, False, None, False],
    }


@each_engine
def test_dates_are_found(engine: Engine) -> None:
    days = [datetime.date(2024, 2, 29), None, datetime.date(1969, 12, 31)]
    found = check(engine, pa.table({"a": days}), lambda flow: flow.select(x=col("a").is_in(days[:1])), ordered=True)
    assert found is not None
    assert found["x"].to_pylist() == [True, None, False]
