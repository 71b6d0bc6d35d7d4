"""Overflow, division by zero and impossible casts are errors that name the expression; never a silent wrap."""

from __future__ import annotations

import pyarrow as pa
import pytest

import scalein as si
from scalein import ComputeError, col, when
from scalein.api.column import Column
from scalein.api.flow import Flow
from tests.engines import DUCKDB, Engine, by_engine, by_oracle, compare, compare_with_duckdb, each_engine
from tests.strategies import INTS


def collect(engine: Engine, table: pa.Table, made: Column) -> pa.Table:
    return outcome(engine, si.from_arrow(table).select(out=made))


def outcome(engine: Engine, flow: Flow) -> pa.Table:
    """What the engine gives, compared with the oracle; or what the oracle gives, compared with DuckDB."""
    found = by_oracle(flow.op)
    if engine is DUCKDB:
        compare_with_duckdb(found, flow, ordered=True)
    else:
        want, found = found, by_engine(flow, workers=engine.workers, cpu=engine.cpu)
        compare(found, want, ordered=True)
    if found.table is None:
        raise found.errors[0]
    return found.table


@each_engine
@pytest.mark.parametrize("type_", INTS, ids=str)
def test_integers_never_wrap(engine: Engine, type_: pa.DataType) -> None:
    bits, signed = type_.bit_width, pa.types.is_signed_integer(type_)
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    table = pa.table({"a": pa.array([1] * 20 + [high], type_), "b": pa.array([1] * 20 + [low], type_)})
    failing = [col("a") + 1, col("b") - 1, col("a") * 2, col("b") - col("a")]
    failing += [-col("b"), abs(col("b")), col("b") // -1] if signed else []
    for made in failing:
        with pytest.raises(ComputeError, match="overflow"):
            collect(engine, table, made)
    for made in (col("a") + 0, col("b") * 1, col("a") - col("a"), col("a") // 1, col("b") % 7):
        collect(engine, table, made)


@each_engine
@pytest.mark.parametrize("type_", INTS, ids=str)
def test_integers_are_not_divided_by_zero(engine: Engine, type_: pa.DataType) -> None:
    table = pa.table({"a": pa.array([6, 6, None], type_), "b": pa.array([2, 0, 0], type_)})
    for made in (col("a") // col("b"), col("a") % col("b"), col("a") // 0, col("a") % 0):
        with pytest.raises(ComputeError, match="zero"):
            collect(engine, table, made)
    safe = when(col("b") != 0).then(col("a") // col("b"))
    assert collect(engine, table, safe)["out"].to_pylist() == [3, None, None]


@each_engine
def test_a_null_cannot_fail(engine: Engine) -> None:
    table = pa.table({"a": pa.array([None, 2**63 - 1], pa.int64()), "b": pa.array([0, None], pa.int64())})
    for made in (col("a") + col("b"), col("a") // col("b"), col("a") * col("b")):
        assert collect(engine, table, made)["out"].to_pylist() == [None, None]


@each_engine
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e9, -3e9])
def test_floats_that_are_no_integers(engine: Engine, value: float) -> None:
    table = pa.table({"price": [1.5, value, None]})
    with pytest.raises(ComputeError, match="price"):
        collect(engine, table, col("price").cast(pa.int32()))


@each_engine
def test_the_error_names_the_expression(engine: Engine) -> None:
    table = pa.table({"qty": [2**62]})
    with pytest.raises(ComputeError, match=r"overflow in .?qty \* 4"):
        collect(engine, table, col("qty") * 4 - 1)


@each_engine
def test_rows_that_are_gone_cannot_fail(engine: Engine) -> None:
    table = pa.table({"a": [1, 2**63 - 1], "k": ["x", "y"]})
    flow = si.from_arrow(table)
    only = flow.filter(col("a") < 10)
    assert outcome(engine, only.select(out=col("a") + 1))["out"].to_pylist() == [2]
    assert outcome(engine, only.group_by("k").agg(s=(col("a") * 3).sum()))["s"].to_pylist() == [3]
    joined = flow.join(pa.table({"k": ["x"]}), on="k").select(out=col("a") + 1)
    assert outcome(engine, joined)["out"].to_pylist() == [2]
    assert outcome(engine, flow.limit(1).select(out=col("a") + 1))["out"].to_pylist() == [2]


@each_engine
def test_a_sum_that_overflows_says_so(engine: Engine) -> None:
    flow = si.from_arrow(pa.table({"x": [2**62] * 4})).group_by().agg(s=col("x").sum())
    with pytest.raises(ComputeError, match="overflow"):
        outcome(engine, flow)


@pytest.mark.parametrize("keys", [(), ("b",)])
def test_a_count_of_what_fails_fails_whatever_the_source(keys: tuple[str, ...]) -> None:
    """A table is known to have no nulls, a reader is not: that must not decide whether a column is computed."""
    table = pa.table({"b": pa.array([0], pa.int16())})
    for source in (table, table.to_reader()):
        flow = si.from_arrow(source).with_columns(n=col("b") // col("b")).with_columns(m=col("n"))
        with pytest.raises(ComputeError, match="division by zero"):
            flow.group_by(*keys).agg(count=col("m").count()).collect(workers=1)
