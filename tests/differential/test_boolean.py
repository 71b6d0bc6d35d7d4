"""and, or, not, is_null, fill_null: SQL's three-valued logic."""

from __future__ import annotations

import itertools

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from scalein import col
from tests.engines import Engine, check, each_engine, every_engine, examples
from tests.programs import constants, exprs
from tests.strategies import ALL, of_types, tables

TRUTHS = [True, False, None]
PAIRS = pa.table({"a": [a for a, _ in itertools.product(TRUTHS, TRUTHS)],
                  "b": [b for _, b in itertools.product(TRUTHS, TRUTHS)]})  # fmt: skip


@each_engine
def test_truth_tables(engine: Engine) -> None:
    made = {"both": col("a") & col("b"), "any": col("a") | col("b"), "no": ~col("a")}
    found = check(engine, PAIRS, lambda flow: flow.select(**made), ordered=True)
    assert found is not None
    assert found["both"].to_pylist() == [True, False, None, False, False, False, None, False, None]
    assert found["any"].to_pylist() == [True, True, True, True, False, None, True, None, None]
    assert found["no"].to_pylist() == [False] * 3 + [True] * 3 + [None] * 3


@every_engine
@examples(12)
@given(st.data())
def test_nested_logic(engine: Engine, data: st.DataObject) -> None:
    schema = of_types(pa.bool_(), pa.bool_(), pa.bool_())
    table, made = data.draw(tables(schema)), data.draw(exprs(schema, pa.bool_()))
    check(engine, table, lambda flow: flow.select("a", out=made), ordered=True)


@every_engine
@examples(16)
@given(st.data())
def test_nulls_of_every_type(engine: Engine, data: st.DataObject) -> None:
    type_ = data.draw(st.sampled_from(ALL))
    table, constant = data.draw(tables(of_types(type_, type_))), data.draw(constants(type_))
    made = {"gone": col("a").is_null(), "there": col("a").is_not_null(), "filled": col("a").fill_null(constant),
            "other": col("a").fill_null(col("b"))}  # fmt: skip
    check(engine, table, lambda flow: flow.select(**made), ordered=True)


@every_engine
@examples(4)
@given(st.data())
def test_columns_that_are_never_null(engine: Engine, data: st.DataObject) -> None:
    schema = pa.schema([pa.field("a", pa.int64(), nullable=False), pa.field("b", pa.bool_(), nullable=False)])
    table = data.draw(tables(schema))
    made = {"gone": col("a").is_null(), "filled": col("a").fill_null(7), "c": (col("a") > 1) & col("b")}
    check(engine, table, lambda flow: flow.select(**made), ordered=True)


@every_engine
@examples(4)
@given(st.data())
def test_is_nan(engine: Engine, data: st.DataObject) -> None:
    table = data.draw(tables(of_types(pa.float64(), pa.float32())))
    check(engine, table, lambda flow: flow.select(x=col("a").is_nan(), y=col("b").is_nan()), ordered=True)
