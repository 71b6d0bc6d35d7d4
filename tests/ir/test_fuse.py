"""fuse: neighbours become one kernel, and nothing else does."""

from __future__ import annotations

import pyarrow as pa

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from scalein.ir.passes.fuse import fuse
from scalein.ir.passes.physicalize import physicalize
from scalein.ir.physical import Pipeline, WindowAggregate, walk_nodes
from scalein.ir.stage_printer import dump_program
from scalein.ir.stages import FilterStep, Probe, ProjectStep
from scalein.ir.verify import verify_program
from tests.conftest import Golden
from tests.ir.plans import events, users


def before_and_after(flow: Flow) -> str:
    before = physicalize(flow.op)
    after = fuse(before)
    verify_program(after)
    assert after.schema == before.schema
    assert fuse(after) == after
    return f"{dump_program(before)}\n\nfuse ->\n\n{dump_program(after)}"


def test_pipes_and_the_group_behind_them_are_one_kernel(golden: Golden) -> None:
    flow = (
        events()
        .filter(col("qty") > 0)
        .with_columns(cost=col("price") * col("qty"))
        .filter(col("cost") < 100)
        .join(users(), on="user")
        .group_by("city")
        .agg(n=si.count(), cost=col("cost").sum())
    )
    assert before_and_after(flow) == golden


def test_a_limit_a_union_and_python_stay_between_kernels(golden: Golden) -> None:
    flow = (
        events()
        .filter(col("qty") > 0)
        .limit(10)
        .filter(col("flag"))
        .union(events().filter(col("qty") < 0))
        .map_batches(lambda batch: batch, events().schema)
        .select("user", twice=col("qty") * 2)
    )
    assert before_and_after(flow) == golden


def test_an_outer_join_is_fused_with_what_is_below_it(golden: Golden) -> None:
    flow = events().filter(col("qty") > 1).join(users(), on="user", how="outer").filter(col("age") > 3)
    assert before_and_after(flow) == golden


def test_a_cross_join_is_a_step_like_others(golden: Golden) -> None:
    assert before_and_after(events().join(users(), how="cross").filter(col("age") > col("qty"))) == golden


def test_the_table_of_a_join_is_fused_too(golden: Golden) -> None:
    old = users().filter(col("age") > 40).select("user", years=col("age") + 1).filter(col("years") < 99)
    assert before_and_after(events().join(old, on="user", how="left")) == golden


def test_columns_that_keep_their_names_need_no_step() -> None:
    root = fuse(physicalize(events().filter(col("flag")).filter(col("qty") > 1).op))
    assert isinstance(root, Pipeline)
    assert [type(step) for step in root.steps] == [FilterStep, FilterStep]


def test_steps_stay_in_their_order() -> None:
    flow = events().filter(col("flag")).select("user", q=col("qty") + 1).join(users(), on="user").filter(col("q") > 1)
    root = fuse(physicalize(flow.group_by("city").agg(n=si.count()).op))
    assert isinstance(root, WindowAggregate)
    assert [type(step) for step in root.steps] == [FilterStep, ProjectStep, Probe, FilterStep]
    assert [number for number, _ in root.joins] == [0]


def test_many_pipes_end_in_one() -> None:
    flow = si.flow({"x": pa.int64()})
    for _ in range(50):
        flow = flow.with_columns(x=col("x") + 1).filter(col("x") > 0)
    assert len(list(walk_nodes(fuse(physicalize(flow.op))))) == 2
