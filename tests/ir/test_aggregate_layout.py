"""aggregate_table: which accumulators a group keeps, and what is finished from them."""

from __future__ import annotations

from itertools import pairwise

import pytest

import scalein as si
from scalein import col
from scalein.api.column import Column
from scalein.api.flow import Flow
from scalein.ir.passes.physicalize import physicalize
from scalein.ir.physical import WindowAggregate
from scalein.ir.stage_printer import dump_program
from scalein.ir.tables import Slicing, Table
from tests.conftest import Golden
from tests.ir.plans import events


def table_of(flow: Flow) -> Table:
    node = physicalize(flow.op)
    assert isinstance(node, WindowAggregate)
    return node.table


def kinds(table: Table) -> list[str]:
    return [acc.kind.value for acc in table.accs]


@pytest.mark.parametrize(("agg", "kept"), [
    (si.count(), []),
    (col("qty").count(), ["valid"]),
    (col("kind").count(), []),  # cannot be null: as many values as rows
    (col("qty").sum(), ["isum", "valid"]),
    (col("kind").sum(), ["isum"]),
    (col("price").sum(), ["fsum", "valid"]),
    (col("price").mean(), ["fsum", "valid"]),
    (col("qty").min(), ["min", "valid"]),
    (col("time").max(), ["max"]),
    (col("qty").std(), ["moments"]),
    (col("qty").first(), ["first"]),
    (col("qty").arg_max("price"), ["arg_max"]),
])  # fmt: skip
def test_rows_come_first_and_a_count_of_values_where_nulls_may_be(agg: Column, kept: list[str]) -> None:
    table = table_of(events().group_by("user").agg(out=agg))
    assert kinds(table) == ["rows", *kept]


def test_accumulators_are_shared() -> None:
    qty = col("qty")
    flow = events().group_by("user").agg(qty.sum().alias("s"), qty.mean().alias("m"), qty.count().alias("n"),
                                         qty.var().alias("v"), qty.std().alias("d"), all=si.count())  # fmt: skip
    table = table_of(flow)
    assert kinds(table) == ["rows", "isum", "valid", "moments"]
    assert [output.accs for output in table.outputs] == [(1, 2), (1, 2), (2,), (3,), (3,), (0,)]


def test_without_keys_rows_say_whether_there_is_a_value() -> None:
    assert table_of(events().group_by().agg(out=col("kind").max())).outputs[0].accs == (1, 0)
    assert table_of(events().group_by("user").agg(out=col("kind").max())).outputs[0].accs == (1,)


@pytest.mark.parametrize(("size", "every", "slice_s"), [("10s", "10s", 10), ("10s", "4s", 2), ("9s", "3s", 3)])
def test_windows_are_cut_into_slices(size: str, every: str, slice_s: int) -> None:
    table = table_of(events().group_by("user", si.sliding("time", size, every=every)).agg(n=si.count()))
    assert (table.slicing, table.slice_size) == (Slicing.KEY, slice_s * 1000)


def test_a_record_is_a_multiple_of_8_bytes_and_starts_as_if_no_row_had_come() -> None:
    aggs = [getattr(col("kind"), fn)().alias(fn) for fn in ("min", "max", "first", "last", "sum", "mean", "var")]
    layout = table_of(events().group_by("user", "flag", "kind").agg(*aggs)).layout
    assert layout.size % 8 == 0
    assert len(layout.template) == layout.size
    fields = {slot.name: (layout.offset(slot.name), slot) for slot in layout.fixed}
    ends = sorted((at, at + slot.size) for at, slot in fields.values())
    assert all(end <= start for (_, end), (start, _) in pairwise(ends)), "fields overlap"
    for at, slot in fields.values():
        assert at % min(slot.size, 8) == 0, f"{slot.name} is not aligned"
        assert layout.template[at : at + slot.size] == slot.init.ljust(slot.size, b"\0")


def test_text(golden: Golden) -> None:
    flow = events().group_by("user", si.sliding("time", "10s", every="4s"), old=col("qty") > 40).agg(
        si.count().alias("n"), total=col("qty").sum(), mean=col("price").mean(), best=col("qty").arg_max("price"),
        seen=col("flag").count(), spread=col("price").std())  # fmt: skip
    assert dump_program(physicalize(flow.op)) == golden
