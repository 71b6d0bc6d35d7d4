"""fold: golden plans, and what it must leave alone."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest

from scalein import col, lit, when
from scalein.api.column import Column
from scalein.dtypes import BOOL, F32, F64, I32, I64, U64, DType, Kind
from scalein.ir.exprs import Call, Lit
from scalein.ir.functions.registry import evaluate
from scalein.ir.ops import Filter, Project
from scalein.ir.passes.fold import fold
from scalein.ir.printer import show_expr
from tests.conftest import Golden
from tests.ir.plans import before_and_after, events


def test_constants_and_identities(golden: Golden) -> None:
    flow = (
        events()
        .filter((col("qty") % (lit(2) + 3) == 0) & lit(True))
        .filter(~~(col("price") > lit(1) / 4) | lit(False))
        .select("user", total=col("price") * (lit(2.0) + 1), even=col("qty") % 2 != 0)
        .group_by(k=when(lit(True)).then(col("user")).otherwise(lit("none")))
        .agg(s=(col("total") + (lit(1.5) - 1.5)).sum())
    )
    assert before_and_after(flow, fold) == golden


def test_a_filter_that_is_always_true_goes(golden: Golden) -> None:
    assert before_and_after(events().filter((lit(1) < 2) | (col("qty") // 0 == 1)), fold) == golden


def folded(column: Column) -> str:
    """Text of an expression over events after fold."""
    op = fold(events().select(x=column).op)
    assert isinstance(op, Project)
    return show_expr(op.items[0].expr)


@pytest.mark.parametrize(("column", "text"), [
    # constants that fail stay, to fail where rows reach them
    (lit(1) // 0, "1 // 0"),
    (lit(2**63 - 1) + 1, "9223372036854775807 + 1"),
    (lit(300).cast(pa.int8()), "lit(300).cast(i8)"),
    (lit(math.nan).cast(pa.int64()), "lit(nan).cast(i64)"),
    (when(col("qty") > 0).then(lit(1) // 0).otherwise(2), "when(qty > 0).then(1 // 0).otherwise(2)"),
    # Kleene: null and x is null or false, so it is not null; only the deciding constant decides
    (lit(None).cast(pa.bool_()) & col("flag"), "None & flag"),
    (col("flag") & col("flag"), "flag"),
    # null conditions take the other branch
    (when(lit(None).cast(pa.bool_())).then(col("qty")).otherwise(7 + col("qty")), "7 + qty"),
    (when(col("flag")).then(col("qty")).otherwise(col("qty")), "qty"),
    # null checks by nullability
    (col("kind").is_null(), "False"),
    (~col("qty").is_null(), "qty.is_not_null()"),
    (col("kind").fill_null(3), "kind"),
    (col("qty").fill_null(lit(None)), "qty"),
    # divisibility: constants other than zero, integers only, both ways around
    (col("qty") % 10 == 0, "qty % 10 == 0"),
    (col("qty") % -3 != 0, "~(qty % -3 == 0)"),
    (col("qty") % 10 == 1, "qty % 10 == 1"),
    (col("price") % 10 == 0, "price % 10.0 == 0.0"),
    # arithmetic, NaN the greatest, -0.0 equal to 0.0
    (lit(7) // -2 + lit(7) % -2, "-5"),
    (lit(1.0) / 0, "inf"),
    (lit(math.nan) > math.inf, "True"),
    (lit(-0.0) == 0.0, "True"),
    (lit("b") > "a", "True"),
])  # fmt: skip
def test_folded_text(column: Column, text: str) -> None:
    assert folded(column) == text


def test_divisible_is_a_call_of_its_own() -> None:
    op = fold(events().filter(col("qty") % 10 == 0).op)
    assert isinstance(op, Filter)
    assert isinstance(op.predicate, Call)
    assert (op.predicate.fn, op.predicate.params) == ("divisible", (10,))


def test_a_column_stays_as_nullable_as_it_was() -> None:
    """`flow.schema` was shown to the user: what a fold learns about nulls must not change it."""
    flow = events().select(
        a=when(lit(True)).then(col("kind")).otherwise(lit(None)),
        b=when(lit(True)).then(lit(1)).otherwise(lit(None)),
        c=col("flag") & lit(False),
    )
    assert fold(flow.op).schema == flow.op.schema


TS_S, TS_MS = DType(Kind.TS, unit="s"), DType(Kind.TS, unit="ms")


@pytest.mark.parametrize(("value", "source", "target", "expected"), [
    (-1, TS_MS, TS_S, -1),
    (1, TS_S, TS_MS, 1000),
    (2**62, TS_S, TS_MS, None),
    (-1, TS_MS, DType(Kind.DATE), -1),
    (-1.9, F64, I32, -1),
    (3e9, F64, I32, None),
    (0.1, F64, F32, 0.10000000149011612),
    (1e300, F64, F32, math.inf),
    (2**53 + 1, I64, F64, float(2**53)),
    (2**60 + 1, I64, F32, None),  # would be rounded twice
    (-1, I64, U64, None),
    (True, BOOL, F64, 1.0),
    (0.0, F64, BOOL, False),
    (5, DType(Kind.TS, unit="s", tz="Asia/Tokyo"), DType(Kind.DATE), None),  # pyarrow knows the zone
])  # fmt: skip
def test_cast_of_a_constant(value: object, source: DType, target: DType, expected: object) -> None:
    got = evaluate(Call("cast", (Lit(value, source),), (), target, False))
    assert got == (None if expected is None else Lit(expected, target))


def test_null_in_a_strict_function_is_null() -> None:
    null = Lit(None, I64)
    assert evaluate(Call("add", (null, Lit(1, I64)), (), I64)) == null
    assert folded(col("qty") // lit(None).cast(pa.int64())) == "None"
