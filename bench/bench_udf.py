"""A compiled Python function against the same loop in C, and against Python on batches, row by row."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import scalein as si
from bench import yardsticks
from bench.data import SEED
from bench.race import Race, assert_same, duck
from scalein import col


def score_in_python(price: float, qty: int) -> float:
    total = 0.0
    if qty > 50:
        for k in range(8):
            total = total * 0.9 + price / (k + 1)
    else:
        total = price * qty
    return total


score = si.udf(score_in_python)


def orders(rows: int) -> pa.Table:
    rng = np.random.default_rng(SEED + 7)
    return pa.table({"price": rng.random(rows) * 100, "qty": rng.integers(0, 100, rows)})


def bench_udf_against_c(race: Race, c: ctypes.CDLL, rows: int) -> None:
    """The goal of 0.77 is C's time within 1.3 of ours."""
    table = orders(rows)
    flow, by_hand = si.from_arrow(table).select(score=score(col("price"), col("qty"))), yardsticks.score(c, table)
    assert_same(flow.collect(workers=1), by_hand()(), by=())
    race(lambda: flow.collect(workers=1), c=by_hand, goals={"c": 1 / 1.3},
         row_count=rows, size_bytes=24 * rows, bound="arithmetic")


def label_in_python(name: str, qty: int) -> str:
    if name.startswith("a"):
        return name[:3].upper() + "-" + str(qty)
    return f"{name}/{qty % 10}"


label = si.udf(label_in_python)


@pytest.mark.parametrize("workers", [1, 2])
def bench_text_udf(race: Race, rows: int, workers: int) -> None:
    """A function that reads and builds text, against the same in SQL, and against Python row by row."""
    rng = np.random.default_rng(SEED + 9)
    names = pa.array([f"{start} item-{n}" for n, start in enumerate(["an", "bé", "cd", "ap"] * 256)])
    count = rows // 4
    table = pa.table({"name": names.take(pa.array(rng.integers(0, len(names), count))),
                      "qty": rng.integers(0, 1000, count)})
    flow = si.from_arrow(table).select(label=label(col("name"), col("qty")))
    in_duckdb = duck("select case when starts_with(name, 'a') then upper(name[:3]) || '-' || qty "
                     "else name || '/' || (qty % 10) end as label from orders", workers, orders=table)
    some = table.slice(0, count // 10)
    in_python = [label_in_python(*row) for row in zip(*(some[name].to_pylist() for name in ("name", "qty")),
                                                      strict=True)]
    found = flow.collect(workers=workers)
    assert found["label"].slice(0, len(some)).to_pylist() == in_python
    assert_same(found, in_duckdb(), by=())
    race(lambda: flow.collect(workers=workers), duckdb=in_duckdb, rounds=5, goals={"duckdb": 1},
         row_count=count, size_bytes=40 * count, bound="copies of a few bytes")


@si.udaf
class Mean:
    total: float = 0.0
    n: int = 0

    def update(self, x: float):  # type: ignore[no-untyped-def]
        self.total += x
        self.n += 1

    def merge(self, other):  # type: ignore[no-untyped-def]
        self.total += other.total
        self.n += other.n

    def finish(self) -> float:
        return self.total / self.n


@si.udaf
class Sum:
    total: float = 0.0

    def update(self, x: float):  # type: ignore[no-untyped-def]
        self.total += x

    def merge(self, other):  # type: ignore[no-untyped-def]
        self.total += other.total

    def finish(self) -> float:
        return self.total


_UDAFS: dict[str, Any] = {"mean": Mean, "sum": Sum}


@pytest.mark.parametrize("keys", [0, 1_000, 1_000_000])
@pytest.mark.parametrize("kind", ["mean", "sum"])
def bench_udaf_against_built_in(race: Race, rows: int, kind: str, keys: int) -> None:
    """A class that computes what an aggregate of scalein does; without keys, and of few and many groups."""
    rng = np.random.default_rng(SEED + 11)
    table = pa.table({"k": rng.integers(0, max(keys, 1), rows), "x": rng.random(rows)})
    flow = si.from_arrow(table)
    groups = flow.group_by("k") if keys else flow.group_by()
    own = groups.agg(m=_UDAFS[kind](col("x")))
    built_in = groups.agg(m=col("x").mean() if kind == "mean" else col("x").sum())
    assert_same(own.collect(workers=1), built_in.collect(workers=1), by=("k",) if keys else ())
    race(lambda: own.collect(workers=1), built_in=lambda: built_in.collect(workers=1),
         goals={"built_in": 0.7 if kind == "mean" else 1 / 1.5},
         row_count=rows, size_bytes=(16 if keys else 8) * rows, bound="memory" if not keys else "misses")


def bench_udf_against_map_batches(race: Race, rows: int) -> None:
    """The same function called by Python for each row of a batch."""
    table = orders(rows // 40)

    def each_row(batch: pa.RecordBatch) -> pa.RecordBatch:
        price, qty = (batch.column(name).to_pylist() for name in ("price", "qty"))
        return pa.record_batch({"score": pa.array(map(score_in_python, price, qty), pa.float64())})

    flow = si.from_arrow(table).select(score=score(col("price"), col("qty")))
    by_row = si.from_arrow(table).map_batches(each_row, pa.schema([("score", pa.float64())]))
    assert_same(flow.collect(workers=1), by_row.collect(), by=())
    race(lambda: flow.collect(workers=1), map_batches=by_row.collect, rounds=5, goals={"map_batches": 50},
         row_count=table.num_rows, size_bytes=24 * table.num_rows, bound="arithmetic")
