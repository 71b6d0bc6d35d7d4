"""distinct, sort, top_k, bottom_k, union: what they refuse, how plans show them, what passes make of them."""

from __future__ import annotations

import re
from collections.abc import Callable

import pyarrow as pa
import pytest

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from scalein.compiler import compile_flow
from scalein.errors import InternalError
from scalein.ir import physical
from scalein.ir.ops import By, Distinct, Filter, Sort
from scalein.ir.passes.fuse import fuse
from scalein.ir.passes.physicalize import physicalize
from scalein.ir.passes.prune import prune
from scalein.ir.passes.push_down import push_down
from scalein.ir.passes.top_rows import top_rows
from scalein.ir.physical import Pipeline, walk_nodes
from scalein.ir.printer import dump, show_expr
from scalein.ir.stage_printer import dump_program
from scalein.ir.verify import verify_ops, verify_program
from tests.conftest import Golden
from tests.ir.plans import before_and_after, events, users

NESTED = si.flow(pa.schema([("id", pa.int64()), ("tags", pa.list_(pa.string()))]))
flow = events()

CASES: dict[str, Callable[[], object]] = {
    'flow.distinct("prize")': lambda: flow.distinct("prize"),
    'flow.distinct(["user", "prize"])': lambda: flow.distinct(["user", "prize"]),
    'flow.distinct({"user"})': lambda: flow.distinct({"user"}),  # type: ignore[arg-type]
    'flow.distinct(col("qty") % 2)': lambda: flow.distinct(col("qty") % 2),  # type: ignore[arg-type]
    "nested.distinct()": lambda: NESTED.distinct(),
    'nested.distinct("tags")': lambda: NESTED.distinct("tags"),
    "flow.sort()": lambda: flow.sort(),
    'flow.sort("prise")': lambda: flow.sort("prise"),
    'flow.sort(["user", "quantity"])': lambda: flow.sort(["user", "quantity"]),
    'flow.sort({"user"})': lambda: flow.sort({"user"}),  # type: ignore[arg-type]
    'flow.sort("user", descending=[True, False])': lambda: flow.sort("user", descending=[True, False]),
    'flow.sort("user", descending="qty")': lambda: flow.sort("user", descending="qty"),  # type: ignore[arg-type]
    'flow.sort("user", nulls_last=None)': lambda: flow.sort("user", nulls_last=None),  # type: ignore[arg-type]
    'flow.sort(col("qty").sum())': lambda: flow.sort(col("qty").sum()),
    'nested.sort("tags")': lambda: NESTED.sort("tags"),
    'flow.top_k(0, "qty")': lambda: flow.top_k(0, "qty"),
    'flow.top_k("qty", 3)': lambda: flow.top_k("qty", 3),  # type: ignore[arg-type]
    "flow.top_k(3, [])": lambda: flow.top_k(3, []),
    "flow.top_k(3, 5)": lambda: flow.top_k(3, 5),  # type: ignore[arg-type]
    'flow.bottom_k(-1, "qty")': lambda: flow.bottom_k(-1, "qty"),
    'flow.bottom_k(2, "quantity")': lambda: flow.bottom_k(2, "quantity"),
    "flow.union()": lambda: flow.union(),
    "flow.union(users)": lambda: flow.union(users()),
    "flow.union(the same columns in another order)": lambda: flow.union(flow.select(*reversed(flow.columns))),
    'flow.union(flow.cast({"qty": "float64"}))': lambda: flow.union(flow.cast({"qty": "float64"})),
}


def test_errors(golden: Golden) -> None:
    entries = []
    for written, call in CASES.items():
        with pytest.raises(si.ScaleinError) as caught:
            call()
        assert re.fullmatch(r"test_ordering\.py:\d+", caught.value.facts["at"])
        text = re.sub(r"test_ordering\.py:\d+", "test_ordering.py", str(caught.value))
        entries.append(f"--- {written}\n{type(caught.value).__name__}: {text}")
    assert "\n\n".join(entries) == golden


@pytest.mark.parametrize(("name", "use"), [
    ("orderBy", "sort"), ("sort_values", "sort"), ("dropDuplicates", "distinct"), ("drop_duplicates", "distinct"),
    ("unique", "distinct"), ("nlargest", "top_k"), ("nsmallest", "bottom_k"), ("unionByName", "union"),
])  # fmt: skip
def test_names_from_elsewhere(name: str, use: str) -> None:
    with pytest.raises(AttributeError, match=f"use {use}"):
        getattr(flow, name)


# --- plans


def test_logical_plans(golden: Golden) -> None:
    plan = flow.sort("user", col("qty") % 3, descending=[False, True], nulls_last=True).distinct("user", "kind")
    assert dump(plan.top_k(3, ["price", "qty"]).op) == golden


def test_fused_plans(golden: Golden) -> None:
    once = flow.filter(col("qty") > 0).join(users(), on="user").distinct("city").with_columns(x=col("qty") + 1)
    groups = once.filter(col("x") > 3).group_by("kind").agg(n=si.count()).distinct("n")
    ordered = groups.sort(col("n") % 7, "kind").limit(5)
    assert dump_program(compile_flow(ordered.op)) == golden


def test_a_distinct_takes_in_what_is_around_it_but_no_second_one(golden: Golden) -> None:
    twice = flow.filter(col("flag")).distinct("user").filter(col("qty") > 0).distinct("kind").select("kind")
    assert dump_program(fuse(physicalize(twice.op))) == golden


def test_graph_text() -> None:
    text = str(flow.distinct("user").top_k(3, "qty").graph())
    assert "Distinct<br/>user" in text
    assert "qty descending, nulls last, first 3" in text


# --- passes


def test_a_limit_becomes_part_of_the_sort(golden: Golden) -> None:
    plan = flow.sort("qty", descending=True).select("user", cost=col("price") * 2).rename({"cost": "c"}).limit(9)
    assert before_and_after(plan.limit(7), top_rows) == golden


def test_a_limit_stays_where_a_filter_stands_between() -> None:
    plan = flow.sort("qty").filter(col("flag")).limit(3).op
    assert top_rows(plan) == plan
    other = flow.select("qty").limit(3).op
    assert top_rows(other) == other


def _on_top(plan: Flow) -> list[str]:
    op, found = push_down(plan.op), []
    while isinstance(op, Filter):
        found.append(show_expr(op.predicate))
        op = op.input
    return found


def test_filters_pass_a_distinct_only_by_its_keys() -> None:
    by_user = flow.distinct("user")
    assert _on_top(by_user.filter(col("user") == "ann")) == []
    assert _on_top(by_user.filter(col("qty") > 0)) == ["qty > 0"]
    assert _on_top(flow.distinct().filter(col("qty") > 0)) == []
    assert _on_top(by_user.filter((col("user") == "ann") & (col("qty") > 0))) == ["qty > 0"]
    # 0.0 and -0.0 are one key, so which of them a row has must not be asked below.
    assert _on_top(flow.distinct("price").filter(1 / col("price") > 0)) == ["1.0 / price > 0.0"]
    assert _on_top(flow.distinct("price").filter(col("price") > 0)) == []
    # pyarrow computes it: better for the few rows that come out.
    assert _on_top(by_user.filter(col("user").str.upper() == "ANN")) == ["user.str.upper() == 'ANN'"]


def test_filters_pass_a_sort_but_not_its_first_rows() -> None:
    fallible = 10 // col("qty") > 0
    assert _on_top(flow.sort("qty").filter(fallible)) == []
    assert _on_top(flow.top_k(3, "qty").filter(col("flag"))) == ["flag"]


def test_keys_are_not_pruned(golden: Golden) -> None:
    plan = flow.distinct("user", "kind").sort(col("qty") + 1).top_k(3, "price").select("flag")
    assert before_and_after(plan, prune) == golden


# --- promises


def test_broken_ops_are_named() -> None:
    source = flow.op
    for op, wrong in [
        (Distinct(source, ("nope",)), "no column 'nope'"),
        (Distinct(source, ()), "no keys"),
        (Sort(source, ()), "nothing to sort by"),
        (Sort(source, (By(col("qty").node),)), "qty has no type"),  # type: ignore[arg-type]
        (Sort(source, flow.sort("qty").op.by, count=-1), "count is -1"),  # type: ignore[union-attr]
    ]:
        with pytest.raises(InternalError, match=wrong):
            verify_ops(op)


def test_broken_programs_are_named() -> None:
    scan = physicalize(flow.op)
    node = physicalize(flow.distinct("user").op)
    assert isinstance(node, Pipeline)
    twice = Pipeline(scan, node.steps * 2, node.items)
    with pytest.raises(InternalError, match="a distinct too many"):
        verify_program(twice)
    with pytest.raises(InternalError, match="no column 'nope'"):
        verify_program(physical.Sort(scan, (("nope", False),), False, None))


def test_a_user_may_not_take_our_names() -> None:
    with pytest.raises(si.BadName, match="reserved for scalein"):
        si.from_arrow(pa.table({"#:by0": [1]}))


def test_walks_meet_a_sort() -> None:
    nodes = list(walk_nodes(compile_flow(flow.sort("qty").op)))
    assert [type(node).__name__ for node in nodes] == ["Scan", "Sort"]
