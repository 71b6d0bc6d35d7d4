"""merge_filters: golden plans, and the guard in front of what can fail."""

from __future__ import annotations

from scalein import col
from scalein.api.flow import Flow
from scalein.ir.ops import Filter
from scalein.ir.passes.merge_filters import merge_filters
from scalein.ir.printer import show_expr
from tests.conftest import Golden
from tests.ir.plans import before_and_after, events


def merged(flow: Flow) -> str:
    op = merge_filters(flow.op)
    assert isinstance(op, Filter)
    return show_expr(op.predicate)


def test_filters_merge(golden: Golden) -> None:
    first = events().filter(col("qty") > 0).filter(col("price") < 9.5)
    flow = first.limit(3).filter(col("flag")).filter(col("kind") > 1)
    assert before_and_after(flow, merge_filters) == golden


def test_null_guards_like_false_in_front_of_what_can_fail() -> None:
    nullable = events().filter(col("qty") != 0).filter(10 // col("qty") > 1)
    assert merged(nullable) == "(qty != 0).fill_null(False) & (10 // qty > 1)"
    never_null = events().filter(col("kind") != 0).filter(10 // col("kind") > 1)
    assert merged(never_null) == "(kind != 0) & (10 // kind > 1)"


def test_three_filters_keep_their_order() -> None:
    flow = events().filter(col("kind") > 1).filter(col("kind") > 2).filter(col("kind") > 3)
    assert merged(flow) == "(kind > 1) & (kind > 2) & (kind > 3)"
