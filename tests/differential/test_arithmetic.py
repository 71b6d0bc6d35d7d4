"""select with arithmetic: whole numbers are exact or fail, floats follow IEEE in their own width."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalein import col, lit
from scalein.api.column import Column
from scalein.api.flow import Flow
from tests.engines import DUCKDB, Engine, check, every_compiler, every_engine, examples, or_refused
from tests.programs import exprs
from tests.strategies import FLOATS, INTS, NUMBERS, of_types, schemas, tables

Binary = Callable[[Column, Column], Column]
BINARY = [operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod]


@every_engine
@pytest.mark.parametrize("op", BINARY)
@examples(8)
@given(st.data())
def test_two_columns_of_any_numbers(engine: Engine, op: Binary, data: st.DataObject) -> None:
    table = data.draw(tables(data.draw(schemas(NUMBERS, least=2, most=2)), extreme=data.draw(st.booleans())))
    check(engine, table, or_refused(lambda flow: flow.select(out=op(col("a"), col("b")))), ordered=True)


@every_engine
@pytest.mark.parametrize("op", BINARY)
@examples(5)
@given(st.data())
def test_a_column_and_a_constant(engine: Engine, op: Binary, data: st.DataObject) -> None:
    table = data.draw(tables(data.draw(schemas(NUMBERS, most=1)), extreme=data.draw(st.booleans())))
    number = data.draw(st.sampled_from([0, 1, -1, 2, -2, 3, 10, 0.5, -0.1, 1e10, 128, 2**31, 2**40]))
    if data.draw(st.booleans()):
        check(engine, table, or_refused(lambda flow: flow.select(out=op(col("a"), lit(number)))), ordered=True)
    else:
        check(engine, table, or_refused(lambda flow: flow.select(out=op(lit(number), col("a")))), ordered=True)


@every_engine
@examples(16)
@given(st.data())
def test_nested_arithmetic(engine: Engine, data: st.DataObject) -> None:
    type_ = data.draw(st.sampled_from(NUMBERS))
    schema = of_types(type_, type_, pa.bool_())
    table, made = data.draw(tables(schema)), data.draw(exprs(schema, type_))
    check(engine, table, lambda flow: flow.with_columns(out=made), ordered=True)


@every_engine
@pytest.mark.parametrize("fn", ["floor", "ceil", "sqrt", "exp", "log", "abs", "round"])
@examples(6)
@given(st.data())
def test_functions_of_numbers(engine: Engine, fn: str, data: st.DataObject) -> None:
    is_refused = engine is DUCKDB and fn == "exp"  # DuckDB computes in 64 bits, and casts no 1e39 to 32
    types = [each for each in NUMBERS if each != pa.float32()] if is_refused else NUMBERS
    table = data.draw(tables(data.draw(schemas(types, most=1)), extreme=data.draw(st.booleans())))
    check(engine, table, lambda flow: flow.select(out=getattr(col("a"), fn)()), ordered=True)


@every_engine
@examples(6)
@given(tables(of_types(pa.float64(), pa.float64())))
def test_pow(engine: Engine, table: pa.Table) -> None:
    check(engine, table, lambda flow: flow.select(out=col("a") ** col("b"), square=col("a") ** 2), ordered=True)


@every_engine
@examples(10)
@given(st.data())
def test_round_to_digits(engine: Engine, data: st.DataObject) -> None:
    types = [pa.float64()] if engine is DUCKDB else FLOATS
    table = data.draw(tables(data.draw(schemas(types, most=1)), extreme=data.draw(st.booleans())))
    digits = data.draw(st.integers(-3, 4))
    check(engine, table, lambda flow: flow.select(out=col("a").round(digits)), ordered=True)


@every_engine
@examples(8)
@given(st.data())
def test_negation(engine: Engine, data: st.DataObject) -> None:
    types = [*INTS[:4], *FLOATS, pa.duration("ms")]
    table = data.draw(tables(data.draw(schemas(types, most=1)), extreme=data.draw(st.booleans())))
    check(engine, table, lambda flow: flow.select(out=-col("a"), size=abs(col("a"))), ordered=True)


@every_compiler
@examples(2)
@given(tables(of_types(pa.int64(), pa.int32(), pa.float64()), least=5000, most=5000))
def test_many_rows(engine: Engine, table: pa.Table) -> None:
    made = {"p": col("a") * col("b"), "q": col("a") - col("b") * 2, "r": col("c") / col("a")}
    check(engine, table, lambda flow: flow.select(**made), ordered=True)


def test_meaning_in_examples() -> None:
    table = pa.table({"a": [7, -7, 7, -7], "b": [2, 2, -2, -2], "x": [2.5, -2.5, 0.49999999999999994, -0.5]})

    def build(flow: Flow) -> Flow:
        return flow.select(q=col("a") // col("b"), r=col("a") % col("b"), near=col("x").round(), over=col("x") / 0)

    found = check(DUCKDB, table, build, ordered=True)
    assert found is not None
    assert found["q"].to_pylist() == [3, -4, -4, 3]
    assert found["r"].to_pylist() == [1, 1, -1, -1]
    assert found["near"].to_pylist() == [3.0, -3.0, 0.0, -1.0]
    assert found["over"].to_pylist() == [math.inf, -math.inf, math.inf, -math.inf]
