"""Text of expressions and plans."""

from __future__ import annotations

from datetime import date, datetime, timedelta

import pyarrow as pa
import pytest

import scalein as si
from scalein import col, lit, when
from scalein.api.column import Column
from scalein.dtypes import DType, Kind
from scalein.ir.exprs import Agg
from scalein.ir.printer import dump, show_expr, show_span, show_value
from tests.conftest import Golden
from tests.ir.plans import events, users


def text_of(column: Column) -> str:
    assert not isinstance(column.node, Agg)
    return show_expr(column.node)


@pytest.mark.parametrize(("column", "text"), [
    (col("x") + 1, "x + 1"),
    ((col("x") + 1) * 2, "(x + 1) * 2"),
    (col("x") - (col("y") - 1), "x - (y - 1)"),
    (col("x") - col("y") - 1, "x - y - 1"),
    ((col("x") > 1) & (col("y") < 2) | col("z"), "(x > 1) & (y < 2) | z"),
    ((col("x") > 1) & ((col("y") < 2) | col("z")), "(x > 1) & ((y < 2) | z)"),
    ((col("x") < 1) == (col("y") < 1), "(x < 1) == (y < 1)"),
    (~(col("x") == "view"), "~(x == 'view')"),
    (-col("x") ** 2, "-x ** 2"),
    ((-col("x")) ** 2, "(-x) ** 2"),
    (col("x") * -1, "x * -1"),
    (col("odd name") / 2, "col('odd name') / 2"),
    ((col("x") + 1).is_null(), "(x + 1).is_null()"),
    (col("x").str.upper().str.starts_with("A"), "x.str.upper().str.starts_with('A')"),
    (col("x").str.slice(1), "x.str.slice(1)"),
    (col("x").dt.year() + 1, "x.dt.year() + 1"),
    (when(col("x")).then(2).when(col("y")).then(3).otherwise(4), "when(x).then(2).when(y).then(3).otherwise(4)"),
    (when(col("x") > 1).then(2), "when(x > 1).then(2)"),
    (lit(None).fill_null(1), "lit(None).fill_null(1)"),
])  # fmt: skip
def test_reads_like_the_python_that_makes_it(column: Column, text: str) -> None:
    assert text_of(column).replace("'", '"') == text.replace("'", '"')


def test_resolved_expressions(golden: Golden) -> None:
    """Implicit casts, sets and times, as error messages and plans show them."""
    flow = events().select(
        cast=col("kind") + col("qty"),
        ratio=col("qty") / 2,
        member=col("qty").is_in([1, 2, None]),
        late=col("time") > datetime(2024, 5, 1, 10, 0, 0, 250_000),
        shifted=col("time") + timedelta(hours=1, minutes=30),
        day=col("time").cast(pa.date32()) == date(2024, 2, 29),
        floor=col("time").dt.truncate("1h30m"),
        rounded=col("price").round(2),
        text=col("qty").cast(pa.string()),
    )
    assert dump(flow.op).replace(", ", ",\n") == golden


def test_every_op(golden: Golden) -> None:
    shared = events().with_watermark("time", "2s")
    flow = (
        shared.filter(col("qty") > 0)
        .union(shared)
        .map_batches(lambda batch: batch, events().schema)
        .join(users(), on="user", how="left")
        .limit(1000)
        .group_by("city", si.sliding("time", "10s", every="2s"), old=col("age") > 40)
        .agg(si.count().alias("n"), total=col("qty").sum(), best=col("qty").arg_max("price"), seen=col("qty").count())
        .select("city", "window_end", "n", share=col("total") / col("n"))
    )
    assert dump(flow.op) == golden


def test_spans() -> None:
    assert show_span(0, DType(Kind.DUR, unit="s")) == "0s"
    assert show_span(-90_061_001, DType(Kind.DUR, unit="ms")) == "-1d1h1m1s1ms"
    assert show_span(10, DType(Kind.I64)) == "10"


def test_times_outside_of_the_calendar() -> None:
    assert show_value(2**62, DType(Kind.TS, unit="s")) == f"datetime({2**62})"
    assert show_value(-(2**31), DType(Kind.DATE)) == f"date({-(2**31)})"
    assert show_value(-1, DType(Kind.TS, unit="us", tz="UTC")) == "datetime('1969-12-31 23:59:59.999999Z')"
