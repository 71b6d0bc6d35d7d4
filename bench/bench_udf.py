"""A compiled Python function against the same loop in C, and against Python on batches, row by row."""

from __future__ import annotations

import ctypes

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
