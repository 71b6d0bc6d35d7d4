"""when/then/otherwise: a null condition is not true, and a branch that is not taken cannot fail."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from scalein import col, lit, when
from tests.engines import Engine, check, each_engine, every_engine, examples
from tests.programs import exprs, predicates
from tests.strategies import ALL, of_types, tables


@every_engine
@examples(20)
@given(st.data())
def test_choices_of_every_type(engine: Engine, data: st.DataObject) -> None:
    type_ = data.draw(st.sampled_from(ALL))
    schema = of_types(type_, type_, pa.int32())
    table = data.draw(tables(schema))
    condition, other = data.draw(predicates(schema, 2)), data.draw(predicates(schema, 1))
    value, default = data.draw(exprs(schema, type_, 1)), data.draw(exprs(schema, type_, 1))
    made = {
        "one": when(condition).then(value).otherwise(default),
        "two": when(condition).then(value).when(other).then(default).otherwise(col("a")),
        "open": when(other).then(col("b")),
    }
    check(engine, table, lambda flow: flow.select(**made), ordered=True)


@each_engine
def test_a_branch_not_taken_cannot_fail(engine: Engine) -> None:
    table = pa.table({"a": pa.array([0, 1, 2, None, 0]), "b": pa.array([1, 2, 3, 4, None])})
    safe = when(col("a") == 0).then(lit(-1)).otherwise(col("b") // col("a"))
    found = check(engine, table, lambda flow: flow.select(out=safe), ordered=True)
    assert found is not None
    assert found["out"].to_pylist() == [-1, 2, 1, None, -1]
    # The condition is null where a is: the division of a null cannot fail either.
    taken = when(col("a") != 0).then(lit(-1)).otherwise(col("b") // col("a"))
    assert check(engine, table, lambda flow: flow.select(out=taken), ordered=True) is None


@each_engine
def test_a_decided_side_cannot_fail(engine: Engine) -> None:
    table = pa.table({"a": pa.array([0, 1, 2, 0]), "b": pa.array([1, 2, 3, None]), "c": [True, None, False, True]})
    bad = col("b") // col("a") > 1
    for made in ((col("a") != 0) & bad, (col("a") == 0) | bad):
        assert check(engine, table, lambda flow, m=made: flow.select(out=m), ordered=True) is not None
    for made in (bad & (col("a") != 0), bad | (col("a") == 0)):
        assert check(engine, table, lambda flow, m=made: flow.select(out=m), ordered=True) is None
    undecided = pa.table({"a": [0], "b": [1], "c": pa.array([None], pa.bool_())})
    for made in (col("c") & bad, col("c") | bad):
        assert check(engine, undecided, lambda flow, m=made: flow.select(out=m), ordered=True) is None


@every_engine
@examples(4)
@given(tables(of_types(pa.int8(), pa.float32(), pa.int64())))
def test_branches_of_several_types_widen(engine: Engine, table: pa.Table) -> None:
    made = when(col("a") > 0).then(col("a")).when(col("b") > 0).then(col("b")).otherwise(0.5)
    check(engine, table, lambda flow: flow.select(out=made), ordered=True)
