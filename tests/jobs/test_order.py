"""Across the inputs of a union, or the partitions of a source, a job's order is arrival: some aggregates want `by`."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest

import scalein as si
from scalein import col
from scalein.api.column import Column
from scalein.api.flow import Flow
from scalein.testing import Stream
from tests import oracle
from tests.same import assert_same

TABLE = pa.table({"k": [1, 1, 2, 2], "t": [0, 1, 2, 3], "x": [5, 6, 7, 8]})
ORDERED: dict[str, tuple[Column, str]] = {
    "first": (col("x").first(), "arg_min(by)"),
    "last": (col("x").last(), "arg_max(by)"),
    "collect": (col("x").collect(), "top_k(k, by)"),
}
SEVERAL: dict[str, Callable[[], Flow]] = {
    "a union": lambda: si.from_arrow(TABLE).union(si.from_arrow(TABLE)),
    "partitions": lambda: si.from_source(Stream({"a": TABLE.to_batches(), "b": TABLE.to_batches()})),
    "a filtered union": lambda: si.from_arrow(TABLE).union(si.from_arrow(TABLE)).filter(col("x") > 0).distinct("x"),
}


@pytest.mark.parametrize("name", ORDERED)
@pytest.mark.parametrize("several", SEVERAL)
@pytest.mark.parametrize("windows", [(), (si.tumbling("t", 10),)], ids=["running", "windows"])
def test_what_depends_on_order_is_refused(name: str, several: str, windows: tuple[si.Window, ...]) -> None:
    made, instead = ORDERED[name]
    flow = SEVERAL[several]().with_watermark("t", 0).group_by("k", *windows).agg(a=si.count(), b=made)
    with pytest.raises(si.BadArgument, match=f"{name} depends on the order of rows") as caught:
        flow.start(sink=si.to_memory())
    assert caught.value.hint == f"use {instead}"
    assert caught.value.facts["at"].startswith("test_order.py:")


@pytest.mark.parametrize("name", ORDERED)
def test_one_partition_has_an_order_and_so_has_what_was_sorted(name: str) -> None:
    made, _ = ORDERED[name]
    for flow in (si.from_arrow(TABLE), si.from_arrow(TABLE).union(si.from_arrow(TABLE)).sort("x", "t")):
        grouped, out = flow.group_by("k").agg(b=made), si.to_memory()
        grouped.start(sink=out).wait()
        assert_same(out.table(), oracle.collect(grouped))


def test_the_forms_that_take_by_are_allowed() -> None:
    flow = si.from_arrow(TABLE).union(si.from_arrow(TABLE.set_column(2, "x", pa.array([15, 16, 17, 18]))))
    grouped = flow.group_by("k").agg(a=col("x").arg_min("x"), b=col("x").arg_max("x"), c=col("x").top_k(9, by="x"))
    out = si.to_memory()
    grouped.start(sink=out).wait()
    assert_same(out.table(), oracle.collect(grouped))


def test_limit_and_distinct_follow_arrival() -> None:
    for flow, rows in ((SEVERAL["partitions"]().limit(3), 3), (SEVERAL["partitions"]().distinct("k"), 2)):
        out = si.to_memory()
        flow.start(sink=out).wait()
        assert out.table().num_rows == rows
