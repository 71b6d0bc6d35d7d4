"""The least, the greatest and the first known value of a row, and clip, for every type; NaN is the greatest float."""

from __future__ import annotations

from datetime import date
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import ComputeError, WrongType, col, lit
from tests.engines import Engine, check, each_engine, every_engine, examples, or_refused
from tests.strategies import ALL, NUMBERS, of_types, tables

NAN = float("nan")
FLOAT_ZERO = 0.0


@every_engine
@examples(30)
@given(st.data())
def test_of_one_type(engine: Engine, data: st.DataObject) -> None:
    type_ = data.draw(st.sampled_from(ALL))
    table = data.draw(tables(of_types(type_, type_, type_), most=64, extreme=data.draw(st.booleans())))
    check(engine, table, lambda flow: flow.select(
        low=si.min_horizontal("a", "b", "c"), high=si.max_horizontal("a", "b", "c"), first=si.coalesce("a", "b", "c"),
        clip=col("a").clip(col("b"), col("c"))), ordered=True)


@every_engine
@examples(20)
@given(st.data())
def test_types_widen(engine: Engine, data: st.DataObject) -> None:
    types = [data.draw(st.sampled_from(NUMBERS)) for _ in range(3)]
    table = data.draw(tables(of_types(*types), most=64))
    check(engine, table, or_refused(lambda flow: flow.select(
        low=si.min_horizontal("a", "b", "c"), high=si.max_horizontal("c", "a", 3), first=si.coalesce("a", "c", 0),
        clip=col("a").clip(-2, col("b")))), ordered=True)


@each_engine
def test_meaning_in_examples(engine: Engine) -> None:
    table = pa.table({"x": [1, None, 5, 7, None], "f": [NAN, 2.0, None, 0.5, None]})
    x, f = col("x"), col("f")
    made = {"high": si.max_horizontal("x", f), "low": si.min_horizontal(x, "f", 3), "first": si.coalesce("f", "x"),
            "clip": x.clip(2, 6), "least": x.clip(2), "most": x.clip(high=2), "nan": f.clip(0.6, 1.5), "by": f.clip(x)}
    found = check(engine, table, lambda flow: flow.select(**made), ordered=True)
    assert found is not None
    want: dict[str, list[Any]] = {
        "high": [NAN, 2.0, 5.0, 7.0, None], "low": [1.0, 2.0, 3.0, 0.5, 3.0], "first": [NAN, 2.0, 5.0, 0.5, None],
        "clip": [2, None, 5, 6, None], "least": [2, None, 5, 7, None], "most": [1, None, 2, 2, None],
        "nan": [1.5, 1.5, None, 0.6, None], "by": [NAN, 2.0, None, 7.0, None],
    }  # fmt: skip
    assert repr(found.to_pydict()) == repr(want)


def test_bounds_of_the_wrong_order() -> None:
    flow = si.from_arrow(pa.table({"x": [1, 5, 9]}))
    assert flow.select(y=col("x").clip(7, 3)).collect()["y"].to_pylist() == [3, 3, 3]


def test_text_and_dates() -> None:
    flow = si.from_arrow(pa.table({"s": ["b", None, "a"], "d": [date(2024, 1, 1), None, date(2025, 1, 1)]}))
    found = flow.select(s=si.max_horizontal("s", lit("aa")), d=col("d").clip(date(2024, 6, 1), None),
                        c=si.coalesce("s", lit("?"))).collect().to_pydict()
    assert found == {"s": ["b", "aa", "aa"], "d": [date(2024, 6, 1), None, date(2025, 1, 1)], "c": ["b", "?", "a"]}


def test_what_is_not_asked_for_cannot_fail() -> None:
    flow = si.from_arrow(pa.table({"x": [0, 4, None], "y": [7, None, 1]}))
    assert flow.select(z=si.coalesce("y", 8 // col("x"))).collect()["z"].to_pylist() == [7, 2, 1]
    with pytest.raises(ComputeError, match="division by zero"):
        flow.select(z=si.max_horizontal("y", 8 // col("x"))).collect()


def test_refused() -> None:
    flow = si.from_arrow(pa.table({"s": ["a"], "x": [1], "u": pa.array([1], pa.uint64()), "l": [[1]]}))
    for make, what in ((lambda: si.max_horizontal("s", "x"), "max_horizontal does not take str and i64"),
                       (lambda: si.min_horizontal("u", "x"), "min_horizontal does not take u64 and i64"),
                       (lambda: si.coalesce("l", "l"), "coalesce does not take list"),
                       (lambda: col("s").clip(1, 2), "clip does not take str and i64"),
                       (lambda: si.coalesce(None, None), "null alone has no type")):
        with pytest.raises(WrongType, match=what):
            flow.select(y=make())


def test_how_they_read() -> None:
    assert repr(si.coalesce("x", 0)) == "Column(coalesce(x, 0))"
    assert repr(si.max_horizontal(["x", "y"])) == "Column(max_horizontal(x, y))"
    assert repr(col("x").clip(1, 2)) == "Column(x.clip(1, 2))"
