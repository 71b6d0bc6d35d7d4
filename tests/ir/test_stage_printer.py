"""Text of fused plans and of stages, as `explain` shows them."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

import scalein as si
from scalein import col
from scalein.api.column import Column
from scalein.api.windows import WindowSpec
from scalein.compiler import compile_flow
from scalein.dtypes import BOOL, F64, I32, I64, STR
from scalein.ir.exprs import Call, Col, Named
from scalein.ir.physical import WindowAggregate
from scalein.ir.stage_printer import dump_program, dump_stage
from scalein.ir.stages import (
    Collect,
    FilterStep,
    FromBatches,
    FromRecords,
    FromTable,
    Group,
    GroupMode,
    Merge,
    Partition,
    Probe,
    Read,
    Stage,
)
from scalein.ir.tables import Slicing, Table
from tests.conftest import Golden
from tests.ir.plans import events, users


def upper(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def table_of(*keys: str | WindowSpec, **aggs: Column) -> Table:
    node = compile_flow(events().group_by(*keys).agg(**aggs).op)
    assert isinstance(node, WindowAggregate)
    return node.table


def test_the_plan_of_the_readme(golden: Golden) -> None:
    flow = (
        events()
        .filter(col("kind") == 1)
        .join(users(), on="user")
        .group_by("city", si.tumbling("time", "10s"))
        .agg(si.count().alias("n"), cost=(col("price") * col("qty")).sum())
        .filter(col("n") > 10)
    )
    assert dump_program(compile_flow(flow.op)) == golden


def test_every_node(golden: Golden) -> None:
    flow = (
        events()
        .map_batches(upper, events().schema)
        .with_columns(name=col("user").str.lower())
        .union(events().with_columns(name=col("user")))
        .limit(1000)
        .join(users(), left_on="name", right_on="user", how="anti")
        .select("name", "qty", cost=col("price") * 2)
    )
    assert dump_program(compile_flow(flow.op)) == golden


def test_columns_that_are_not_copied(golden: Golden) -> None:
    """A kernel writes what it computes; without one, renamed columns are handed on."""
    computed = events().with_columns(twice=col("qty") * 2).rename({"user": "name"})
    renamed = events().select("qty", name="user")
    filtered = events().filter(col("flag")).select("qty", name="user")
    texts = [dump_program(compile_flow(flow.op)) for flow in (computed, renamed, filtered)]
    assert "\n\n".join(texts) == golden


READS = (
    Read("user", STR, "dict", nulls=False),
    Read("city", STR, "view"),
    Read("flag", BOOL, "bits", nulls=False),
    Read("qty", I64),
    Read("#:lookup0", BOOL, "lut", nulls=False, via="user"),
)


def test_a_stage_that_collects(golden: Golden) -> None:
    items = (Named("qty", Col("qty", I64)), Named("cost", Call("mul", (Col("qty", I64), Col("qty", I64)), (), I64)))
    steps = (FilterStep(Col("#:lookup0", BOOL)), Probe(0, (Col("user", STR),), "left", (), direct=True, unique=False))
    assert dump_stage(Stage("filter", FromBatches(READS), steps, Collect(items))) == golden


def test_stages_of_a_group(golden: Golden) -> None:
    """Rows in, records merged, groups out; tumbling, sliding with slices, a ring."""
    table = table_of("user", si.sliding("time", "10s", every="2s"), n=si.count(), s=col("qty").sum())
    ring = replace(table, slicing=Slicing.RING, ring=8)
    keys, out = (Col("user", STR),), (Named("user", Col("#:id.user", I32)), Named("n", Col("n", I64)))
    stages = [
        Stage("group", FromBatches(READS), (), Group(table, keys, GroupMode.DIRECT)),
        Stage("ring", FromBatches(READS), (), Group(ring, keys, owned=True)),
        Stage("merge", FromRecords(), (), Merge(table, slide=True)),
        Stage("emit", FromTable(ring, 5), (FilterStep(Col("s", BOOL)),), Collect(out)),
    ]
    assert "\n\n".join(map(dump_stage, stages)) == golden


def test_stages_of_many_groups(golden: Golden) -> None:
    table = table_of("user", first=col("price").first())
    items = (Named("key0", Col("user", STR)), Named("arg0", Col("price", F64)))
    partition = Partition((Col("user", STR),), items, ordinal=True)
    stages = [
        Stage("partition", FromBatches(()), (), partition),
        Stage("update", partition.reader, (), Group(table, (Col("key0", STR),))),
        Stage("all", FromBatches(()), (), Group(table_of(n=si.count()), (), GroupMode.ONE)),
    ]
    assert "\n\n".join(map(dump_stage, stages)) == golden
