"""prune: golden plans, row counts, and shared inputs."""

from __future__ import annotations

import scalein as si
from scalein import col, lit
from scalein.ir.ops import Project, Source, Union
from scalein.ir.passes.prune import prune
from scalein.ir.rewrite import walk_ops
from tests.conftest import Golden
from tests.ir.plans import before_and_after, events, users


def test_unused_columns_go(golden: Golden) -> None:
    flow = (
        events()
        .with_columns(cost=col("price") * 2, never=col("qty") // 0)
        .filter(col("kind") > 1)
        .group_by("user")
        .agg(total=col("cost").sum(), last=col("qty").max())
        .select("total")
    )
    assert before_and_after(flow, prune) == golden


def test_joins_keep_keys_and_what_is_read(golden: Golden) -> None:
    flow = events().join(users(), on="user").select("qty", "city")
    assert before_and_after(flow, prune) == golden


def test_unions_stay_alike(golden: Golden) -> None:
    flow = events().filter(col("flag")).union(events().filter(col("price") > 0)).group_by("user").agg(n=si.count())
    assert before_and_after(flow, prune) == golden


def test_projections_merge_unless_work_is_repeated(golden: Golden) -> None:
    flow = (
        events()
        .with_columns(a=col("qty") + 1, c=lit(2))
        .select(b=col("a") * 2, d=col("c") + col("c"), e=col("user"))
        .select(x=col("b") * col("b"), y="d", z="e")
        .select(p="x", q="y")
        .select("p", "q")
    )
    assert before_and_after(flow, prune) == golden


def test_a_count_keeps_one_cheap_column(golden: Golden) -> None:
    flow = events().select("user", a=col("qty") // 0, b=col("price")).group_by().agg(n=si.count())
    assert before_and_after(flow, prune) == golden


def test_a_count_of_a_source_reads_its_narrowest_column() -> None:
    op = prune(events().group_by().agg(n=si.count()).op)
    assert [source.columns for source in walk_ops(op) if isinstance(source, Source)] == [("flag",)]


def test_a_count_of_groups_keeps_one_row_without_keys() -> None:
    one_row = events().group_by().agg(s=col("qty").sum(), n=si.count())
    op = prune(one_row.group_by().agg(rows=si.count()).op)
    assert before_and_after(one_row.group_by().agg(rows=si.count()), prune)
    assert sum(1 for _ in walk_ops(op)) == 3


def test_a_function_of_batches_sees_all_its_columns() -> None:
    flow = events().map_batches(lambda batch: batch, events().schema).select("qty")
    sources = [op.columns for op in walk_ops(prune(flow.op)) if isinstance(op, Source)]
    assert sources == [tuple(events().schema.names)]


def test_a_shared_source_is_narrowed_once_for_all_its_users() -> None:
    base = events()
    left, right = base.select(x="qty"), base.filter(col("flag")).select(x=col("kind").cast("int64"))
    op = prune(left.union(right).op)
    sources = [found for found in walk_ops(op) if isinstance(found, Source)]
    assert [source.columns for source in sources] == [("kind", "qty", "flag")]


def test_an_identity_is_no_projection_and_another_order_is() -> None:
    names = events().schema.names
    assert isinstance(prune(events().select(*names).op), Source)
    assert isinstance(prune(events().select(*reversed(names)).op), Project)


def test_a_union_of_all_columns_gets_no_projections() -> None:
    op = prune(events().union(events()).op)
    assert isinstance(op, Union)
    assert all(isinstance(below, Source) for below in op.inputs)
