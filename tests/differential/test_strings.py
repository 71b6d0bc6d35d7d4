"""Functions of text: code points, not bytes; every Arrow form of a string is the same string."""

from __future__ import annotations

import polars as pl
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import col
from tests import oracle
from tests.engines import Engine, check, every_engine, examples
from tests.programs import PATTERNS, exprs
from tests.strategies import STRINGS, of_types, tables


@every_engine
@examples(12)
@given(st.data())
def test_matching(engine: Engine, data: st.DataObject) -> None:
    table = data.draw(tables(of_types(data.draw(st.sampled_from(STRINGS)))))
    pattern = data.draw(st.sampled_from(PATTERNS))
    a = col("a").str
    made = {"starts": a.starts_with(pattern), "ends": a.ends_with(pattern), "has": a.contains(pattern),
            "is": col("a") == pattern, "size": a.len()}  # fmt: skip
    check(engine, table, lambda flow: flow.select(**made), ordered=True)


@every_engine
@examples(10)
@given(st.data())
def test_case(engine: Engine, data: st.DataObject) -> None:
    table = data.draw(tables(of_types(data.draw(st.sampled_from(STRINGS)))))
    check(engine, table, lambda flow: flow.select(up=col("a").str.upper(), low=col("a").str.lower()), ordered=True)


@every_engine
@examples(16)
@given(st.data())
def test_slices(engine: Engine, data: st.DataObject) -> None:
    table = data.draw(tables(of_types(data.draw(st.sampled_from(STRINGS)))))
    offset, length = data.draw(st.integers(-30, 30)), data.draw(st.none() | st.integers(0, 20))
    check(engine, table, lambda flow: flow.select(out=col("a").str.slice(offset, length)), ordered=True)


@examples(16)
@given(st.lists(st.none() | st.text(st.characters(exclude_categories=("Cs",)), max_size=8), max_size=6),
       st.integers(-10, 10), st.none() | st.integers(0, 10))  # fmt: skip
def test_slices_are_those_of_polars(texts: list[str | None], offset: int, length: int | None) -> None:
    table = pa.table({"a": pa.array(texts, pa.string())})
    got = oracle.collect(si.from_arrow(table).select(out=col("a").str.slice(offset, length)))
    assert got["out"].to_pylist() == pl.Series(texts, dtype=pl.String).str.slice(offset, length).to_list()


@every_engine
@examples(12)
@given(st.data())
def test_nested(engine: Engine, data: st.DataObject) -> None:
    schema = of_types(data.draw(st.sampled_from(STRINGS)), data.draw(st.sampled_from(STRINGS)), pa.bool_())
    table, made = data.draw(tables(schema)), data.draw(exprs(schema, pa.string(), 2))
    check(engine, table, lambda flow: flow.select("b", out=made).filter(col("out") != "a"), ordered=True)


@every_engine
@examples(2)
@given(st.data())
def test_many_rows(engine: Engine, data: st.DataObject) -> None:
    schema = of_types(data.draw(st.sampled_from(STRINGS)), pa.int32())
    table = data.draw(tables(schema, least=5000, most=5000))
    build = lambda flow: flow.filter(col("a").str.len() > 3).select("a", "b", head=col("a").str.slice(0, 3))  # noqa: E731
    check(engine, table, build, ordered=True)
