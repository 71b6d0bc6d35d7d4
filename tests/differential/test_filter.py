"""filter: the rows for which a random condition is true, in their order."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from scalein import col, lit
from tests.engines import Engine, check, each_engine, every_engine, examples
from tests.programs import predicates
from tests.strategies import of_types, schemas, tables


@every_engine
@examples(16)
@given(st.data())
def test_filter_keeps_the_rows_of_the_condition(engine: Engine, data: st.DataObject) -> None:
    schema = data.draw(schemas(most=3))
    table = data.draw(tables(schema))
    condition = data.draw(predicates(schema))
    check(engine, table, lambda flow: flow.filter(condition), ordered=True)


@every_engine
@examples(6)
@given(st.data())
def test_filters_in_a_row(engine: Engine, data: st.DataObject) -> None:
    schema = data.draw(schemas(most=2))
    table = data.draw(tables(schema))
    first, second = data.draw(predicates(schema, 2)), data.draw(predicates(schema, 2))
    check(engine, table, lambda flow: flow.filter(first, second).filter(first | second), ordered=True)


@every_engine
@examples(2)
@given(tables(of_types(pa.int32(), pa.string(), pa.float64()), least=5000, most=5000))
def test_filter_of_many_rows(engine: Engine, table: pa.Table) -> None:
    check(engine, table, lambda flow: flow.filter((col("a") > 3) & (col("b") != "view")), ordered=True)


@each_engine
def test_constant_conditions(engine: Engine) -> None:
    table = pa.table({"a": [1, None, 3]})
    for condition in (lit(True), lit(False), lit(None, pa.bool_())):
        check(engine, table, lambda flow, c=condition: flow.filter(c), ordered=True)


@each_engine
def test_a_condition_fails_only_in_rows_that_are_left(engine: Engine) -> None:
    table = pa.table({"a": pa.array([0, 1, 2, None, 0]), "b": pa.array([1, 2, 3, 4, None])})
    check(engine, table, lambda flow: flow.filter(col("a") != 0).filter(col("b") // col("a") > 1), ordered=True)
    check(engine, table, lambda flow: flow.filter((col("a") != 0) & (col("b") // col("a") > 1)), ordered=True)
    failed = check(engine, table, lambda flow: flow.filter((col("b") // col("a") > 1) & (col("a") != 0)), ordered=True)
    assert failed is None
