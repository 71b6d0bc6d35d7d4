"""push_down: golden plans, and moves that would add an error or change a result."""

from __future__ import annotations

import pyarrow as pa
import pytest

import scalein as si
from scalein import col
from scalein.api.column import Column
from scalein.api.flow import Flow
from scalein.ir.ops import Filter
from scalein.ir.passes.push_down import push_down
from scalein.ir.printer import show_expr
from scalein.ir.rewrite import walk_ops
from tests.conftest import Golden
from tests.ir.plans import before_and_after, events, users

SAFE = col("qty") > 0
FALLIBLE = 10 // col("qty") > 0


def kept_on_top(flow: Flow) -> list[str]:
    """The predicates still above the op that the test put below the last filter, first one first."""
    op = push_down(flow.op)
    found = []
    while isinstance(op, Filter):
        found.insert(0, show_expr(op.predicate))
        op = op.input
    return found


def test_through_project_by_substitution(golden: Golden) -> None:
    flow = events().select("user", cost=col("price") * col("qty")).filter((col("cost") > 10) & (col("user") == "ann"))
    assert before_and_after(flow, push_down) == golden


def test_what_a_udf_computes_is_not_computed_twice(golden: Golden) -> None:
    @si.udf
    def costly(n: int) -> int:
        return n * n

    flow = events().select("user", x=costly(col("qty"))).filter((col("user") == "ann") & (col("x") > 10))
    assert before_and_after(flow, push_down) == golden


def test_through_everything_to_the_source(golden: Golden) -> None:
    flow = (
        events()
        .with_columns(big=col("qty") > 100)
        .join(users(), on="user")
        .rename({"city": "town"})
        .filter(col("big") & (col("town") == "Oslo") & (col("age") < col("kind")))
    )
    assert before_and_after(flow, push_down) == golden


def test_into_every_input_of_a_union(golden: Golden) -> None:
    flow = events().filter(col("flag")).union(events().with_columns(qty=col("qty") + 1)).filter(FALLIBLE)
    assert before_and_after(flow, push_down) == golden


def test_keys_through_an_aggregate(golden: Golden) -> None:
    flow = (
        events()
        .group_by("user", si.tumbling("time", "10s"), k=col("qty") // 10)
        .agg(n=si.count())
        .filter((col("user") == "ann") & (col("n") > 3) & (col("k") < 5))
    )
    assert before_and_after(flow, push_down) == golden


def test_past_a_filter_that_stays(golden: Golden) -> None:
    flow = events().join(users(), on="user").filter(col("age") > col("qty")).filter(SAFE).filter(FALLIBLE)
    assert before_and_after(flow, push_down) == golden


@pytest.mark.parametrize("how", ["inner", "semi", "anti"])
def test_a_fallible_predicate_does_not_pass_a_join_that_drops_rows(how: str) -> None:
    flow = events().join(users(), on="user", how=how)
    assert kept_on_top(flow.filter(FALLIBLE)) == ["10 // qty > 0"]
    assert kept_on_top(flow.filter(SAFE)) == []


def test_a_left_join_keeps_its_rows_so_everything_of_the_left_passes() -> None:
    flow = events().join(users(), on="user", how="left")
    assert kept_on_top(flow.filter(FALLIBLE)) == []
    # Of the right side nothing: rows without a match have nulls that are not there below.
    assert kept_on_top(flow.filter(col("age").is_null())) == ["age.is_null()"]


def test_a_right_join_keeps_the_tables_rows_so_everything_of_the_right_passes() -> None:
    flow = events().join(users(), on="user", how="right")
    assert kept_on_top(flow.filter(10 // col("age") > 0)) == []
    # Without a row of the left, another one of the right would have no match.
    assert kept_on_top(flow.filter(SAFE)) != []
    assert kept_on_top(flow.filter(col("user") == "ann")) == ["user == 'ann'"]


def test_nothing_passes_an_outer_join() -> None:
    flow = events().join(users(), on="user", how="outer")
    for predicate in (SAFE, col("age") > 3, col("user") == "ann"):
        assert kept_on_top(flow.filter(predicate)) != []


def test_either_side_of_a_cross_join() -> None:
    flow = events().join(users(), how="cross")
    assert kept_on_top(flow.filter(SAFE & (col("age") > 3))) == []
    assert kept_on_top(flow.filter(col("age") > col("qty"))) == ["age.cast(i64) > qty"]
    assert kept_on_top(flow.filter(FALLIBLE)) == ["10 // qty > 0"]


def test_a_filter_that_stays_guards_the_fallible_ones_behind_it() -> None:
    flow = events().join(users(), on="user", how="left")
    guarded = flow.filter(col("age") > 0).filter(FALLIBLE).filter(SAFE)
    assert kept_on_top(guarded) == ["age > 0", "10 // qty > 0"]
    in_one = flow.filter((col("age") > 0) & FALLIBLE & SAFE)
    assert kept_on_top(in_one) == ["age > 0", "10 // qty > 0"]


def test_a_fallible_predicate_stays_behind_its_guard_all_the_way_down() -> None:
    flow = events().filter(col("qty") != 0).with_columns(x=10 // col("qty")).filter(col("x") > 1)
    predicates = [show_expr(op.predicate) for op in walk_ops(push_down(flow.op)) if isinstance(op, Filter)]
    assert predicates == ["qty != 0", "10 // qty > 1"]


@pytest.mark.parametrize("flow", [
    events().limit(10),
    events().map_batches(lambda batch: batch, events().schema),
    events().with_watermark("time", "2s"),
], ids=["limit", "map_batches", "watermark"])  # fmt: skip
def test_never_passed(flow: Flow) -> None:
    assert kept_on_top(flow.filter(SAFE)) == ["qty > 0"]


def test_an_aggregate_without_keys_has_a_row_whatever_is_below() -> None:
    flow = events().group_by().agg(n=si.count())
    assert kept_on_top(flow.filter(si.lit(1) > 2)) == ["1 > 2"]


def test_a_window_drops_rows_without_time() -> None:
    keyed = events().group_by("qty", si.tumbling("time", "10s")).agg(n=si.count())
    assert kept_on_top(keyed.filter(FALLIBLE)) == ["10 // qty > 0"]
    assert kept_on_top(events().group_by("qty").agg(n=si.count()).filter(FALLIBLE)) == []


@pytest.mark.parametrize(("predicate", "passes"), [
    (col("price") > 0, True),
    (col("price").is_in([0.0, 1.0]), True),
    (1 / col("price") > 0, False),  # -0.0 and 0.0 are one group and have two reciprocals
    (col("price").cast(pa.string()) == "0", False),
])  # fmt: skip
def test_float_keys_pass_only_where_the_sign_of_zero_is_not_seen(predicate: Column, passes: bool) -> None:
    flow = events().group_by("price").agg(n=si.count()).filter(predicate)
    assert (kept_on_top(flow) == []) == passes


def test_what_pyarrow_computes_is_not_computed_twice() -> None:
    flow = events().with_columns(name=col("user").str.upper())
    assert kept_on_top(flow.filter(col("name") == "ANN")) == ["name == 'ANN'"]
    assert kept_on_top(flow.filter(col("user") == "ann")) == []


def test_a_predicate_does_not_explode() -> None:
    flow = events().select(x="price")
    for _ in range(40):
        flow = flow.select(x=col("x") * col("x") + col("x"))
    op = push_down(flow.filter(col("x") > 0).op)
    sizes = [len(show_expr(found.predicate)) for found in walk_ops(op) if isinstance(found, Filter)]
    assert sizes
    assert max(sizes) < 2_000


def test_a_shared_input_stays_shared() -> None:
    flow = events().filter(SAFE)
    op = push_down(flow.union(flow).filter(col("flag")).op)
    sources = [found for found in walk_ops(op) if not found.inputs]
    assert len(sources) == 1
