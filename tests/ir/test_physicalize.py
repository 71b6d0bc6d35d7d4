"""physicalize: where a kernel must end, and what pyarrow computes in between."""

from __future__ import annotations

import pyarrow as pa
import pytest

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from scalein.ir.passes.physicalize import physicalize
from scalein.ir.physical import Host, Limit, Node, Pipeline, Scan, Sort, Union, WindowAggregate, walk_nodes
from scalein.ir.stage_printer import dump_program
from scalein.ir.verify import verify_program
from tests.conftest import Golden
from tests.ir.plans import events, users


def physical_of(flow: Flow) -> Node:
    node = physicalize(flow.op)
    verify_program(node)
    assert node.schema.names == flow.op.schema.names
    return node


def kinds(flow: Flow) -> list[type]:
    return [type(node) for node in walk_nodes(physical_of(flow))]


def unchanged(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


@pytest.mark.parametrize(("flow", "expected"), [
    (events(), [Scan]),
    (events().with_watermark("time", "2s"), [Scan]),
    (events().filter(col("flag")), [Scan, Pipeline]),
    (events().filter(col("flag")).select("qty"), [Scan, Pipeline, Pipeline]),
    (events().limit(3).filter(col("flag")), [Scan, Limit, Pipeline]),
    (events().union(events()), [Scan, Scan, Union]),
    (events().map_batches(unchanged, events().schema), [Scan, Host]),
    (events().join(users(), on="user"), [Scan, Scan, Pipeline]),
    (events().group_by("user").agg(n=si.count()), [Scan, WindowAggregate]),
    (events().filter(col("user").str.upper() == "A"), [Scan, Host, Pipeline]),
    (events().filter(col("user").cast(int) > 5), [Scan, Host, Pipeline]),
    (events().group_by().agg(n=col("user").cast(int).sum()), [Scan, Host, WindowAggregate]),
    (events().sort((col("qty") + 1).cast(pa.string())), [Scan, Pipeline, Host, Sort, Pipeline]),
    (events().group_by(u=col("user").str.lower()).agg(n=si.count()), [Scan, Host, WindowAggregate]),
    (events().join(users(), left_on=col("user").str.lower(), right_on="user"), [Scan, Scan, Host, Pipeline]),
])  # fmt: skip
def test_one_node_for_every_op_that_computes(flow: Flow, expected: list[type]) -> None:
    assert kinds(flow) == expected


def test_pyarrow_computes_a_part_once_and_the_kernel_the_rest(golden: Golden) -> None:
    upper = col("user").str.upper()
    flow = events().filter((upper == "A") | upper.str.starts_with("B") & (col("qty") > 3))
    assert dump_program(physical_of(flow)) == golden


def test_a_part_that_can_fail_is_given_null_where_nobody_asks_for_it(golden: Golden) -> None:
    number = col("user").cast(pa.int64())
    flow = events().filter(col("flag") & (number > 3) & (number < 9))
    assert dump_program(physical_of(flow)) == golden


def test_kernels_compute_what_pyarrow_is_given(golden: Golden) -> None:
    text = (col("qty") + 1).cast(pa.string())
    flow = events().select(u=text.str.upper() == text, n=(text.str.len() + 1).cast(pa.string()).str.len())
    assert dump_program(physical_of(flow)) == golden


def test_joins_and_host_columns_are_numbered_through() -> None:
    lower = events().with_columns(user=col("user").str.lower())
    flow = lower.join(users(), on="user").with_columns(city=col("city").str.upper())
    text = dump_program(physical_of(flow.join(users(), on="user", how="semi")))
    assert [name for name in ("join0", "join1", "#:host0", "#:host1") if name not in text] == []


def test_a_join_is_the_same_however_often_it_is_used() -> None:
    joined = events().join(users(), on="user")
    root = physical_of(joined.union(joined))
    assert isinstance(root, Union)
    assert root.inputs[0] is root.inputs[1]
