"""Small calls: one row through flows that were run before or are made anew, and 10,000 batches of 100 rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import scalein as si
from bench import data
from bench.race import assert_same
from scalein import Flow, col

ONE = pa.table({"auction": [246], "price": [1_000], "ts": [data.T0_MS]})
NAMES = pa.table({"auction": [123, 246], "name": ["a", "b"]})
FLOWS: dict[str, Callable[[Flow], Flow]] = {
    "filter": lambda flow: flow.filter(col("auction") % 123 == 0).select("auction", price=col("price") * 2),
    "groups": lambda flow: flow.group_by("auction").agg(n=si.count(), price=col("price").max()),
    "windows": lambda flow: flow.group_by("auction", si.tumbling("ts", 10_000)).agg(price=col("price").sum()),
    "join": lambda flow: flow.join(NAMES, on="auction").group_by("name").agg(price=col("price").sum()),
}

WANTED: dict[str, dict[str, object]] = {
    "filter": {"auction": 246, "price": 2_000},
    "groups": {"auction": 246, "n": 1, "price": 1_000},
    "windows": {"auction": 246, "window_start": data.T0_MS // 10_000 * 10_000,
                "window_end": data.T0_MS // 10_000 * 10_000 + 10_000, "price": 1_000},
    "join": {"name": "b", "price": 1_000},
}  # fmt: skip


@pytest.mark.parametrize("name", FLOWS)
def bench_one_row_given(benchmark: Any, machine: Mapping[str, object], name: str) -> None:
    """`collect(data)` of an unbound flow; goal: below 0.3 ms."""
    flow = FLOWS[name](si.flow(ONE.schema))
    assert flow.collect(ONE).to_pylist() == [WANTED[name]]
    benchmark(lambda: flow.collect(ONE))
    benchmark.extra_info.update(machine, goal_below_ms=0.3)


@pytest.mark.parametrize("name", FLOWS)
def bench_one_row_of_a_new_flow(benchmark: Any, machine: Mapping[str, object], name: str) -> None:
    """A flow that is made for each row: its plan is known, its kernels are found by their digest."""
    make = FLOWS[name]
    assert make(si.from_arrow(ONE)).collect().to_pylist() == [WANTED[name]]
    benchmark(lambda: make(si.from_arrow(ONE)).collect())
    benchmark.extra_info.update(machine)


BATCHES = 10_000
SMALL_ROWS = 100


def many() -> tuple[pa.Table, Flow]:
    table = data.bids(BATCHES * SMALL_ROWS)
    return table, si.from_batches(table.to_batches(max_chunksize=SMALL_ROWS))


@pytest.mark.parametrize("workers", [1, 2])
def bench_groups_of_small_batches(benchmark: Any, machine: Mapping[str, object], workers: int) -> None:
    """10,000 batches of 100 rows into groups; goal: below 200 ms."""
    table, rows = many()
    flow = rows.group_by("auction").agg(n=si.count(), hi=col("price").max())
    wanted = table.group_by("auction").aggregate([("price", "count"), ("price", "max")])
    assert_same(flow.collect(workers=workers), wanted.rename_columns(["auction", "n", "hi"]), by=("auction",))
    benchmark.pedantic(lambda: flow.collect(workers=workers), rounds=7)
    benchmark.extra_info.update(machine, goal_below_ms=200)


@pytest.mark.parametrize("workers", [1, 2])
def bench_filter_of_small_batches(benchmark: Any, machine: Mapping[str, object], workers: int) -> None:
    """10,000 batches of 100 rows through a filter, into few chunks; goal: below 300 ms."""
    table, rows = many()
    flow = rows.filter(col("price") > 5_000_000).select("auction", twice=col("price") * 2)
    kept = table.filter(pc.greater(table["price"], 5_000_000))
    found = flow.collect(workers=workers)
    assert_same(found, pa.table({"auction": kept["auction"], "twice": pc.multiply(kept["price"], 2)}), by=())
    assert found["twice"].num_chunks < BATCHES // 100
    benchmark.pedantic(lambda: flow.collect(workers=workers), rounds=7)
    benchmark.extra_info.update(machine, goal_below_ms=300, chunks=found["twice"].num_chunks)
