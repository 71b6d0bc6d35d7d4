"""Every function and aggregate there is, over random data: what is compared is derived from the registries."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalein.ir.aggregates import AGGREGATES
from tests import nested
from tests.duck import UNTRANSLATED
from tests.engines import DUCKDB, VARIED, Engine, check, examples
from tests.examples import AGGS, EXAMPLES, FUNCTIONS, TABLE
from tests.strategies import tables

PLAIN = [field for field in TABLE.schema if not pa.types.is_nested(field.type)]
NESTED = [field for field in TABLE.schema if pa.types.is_nested(field.type)]


@st.composite
def like_the_table(draw: st.DrawFn) -> pa.Table:
    """Random rows with the columns of the examples."""
    found = draw(tables(pa.schema(PLAIN), most=64, chunked=False))
    for field in NESTED:
        found = found.append_column(field, draw(nested.arrays(field.type, found.num_rows)))
    return found.select(TABLE.column_names)


def engines(name: str) -> list[Engine]:
    return [VARIED] if name in UNTRANSLATED else [VARIED, DUCKDB]


@pytest.mark.parametrize("name", FUNCTIONS)
@examples(4)
@given(like_the_table())
def test_functions(name: str, table: pa.Table) -> None:
    for engine in engines(name):
        check(engine, table, lambda flow: flow.select("y", out=EXAMPLES[name]), ordered=True)


@pytest.mark.parametrize("name", AGGREGATES)
@examples(4)
@given(like_the_table())
def test_aggregates(name: str, table: pa.Table) -> None:
    for engine in engines(name):
        check(engine, table, lambda flow: flow.group_by("b").agg(out=AGGS[name]), ordered=False,
              tolerance=1e-9 * (product_size(table) if name == "cov" else 1))  # fmt: skip


def product_size(table: pa.Table) -> float:
    """The greatest product of two finite values of `x` and `f`: a covariance near 0 is a sum of such that cancel."""
    x, f = (max((abs(value) for value in table[name].to_pylist() if value is not None and math.isfinite(value)),
                default=0) for name in "xf")  # fmt: skip
    return max(1.0, x * f)
