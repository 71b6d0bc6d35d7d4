"""The translation to DuckDB itself: what it reads as, and what it leaves out."""

from __future__ import annotations

import pyarrow as pa
import pytest

import scalein as si
from scalein import col
from tests import duck
from tests.same import assert_same

TABLE = pa.table({
    "k": ["a", None, "b", "a"],
    "x": pa.array([1, 2, None, -4], pa.int32()),
    "t": pa.array([0, 1, -1, 90_000], pa.int64()).cast(pa.timestamp("ms")),
})  # fmt: skip


def test_rows_come_back_as_they_went_in() -> None:
    assert_same(duck.run(si.from_arrow(TABLE).op), TABLE, ordered=True)


def test_groups() -> None:
    flow = si.from_arrow(TABLE).group_by("k", si.tumbling("t", "1m")).agg(n=si.count(), s=col("x").sum())
    want = pa.table({
        "k": ["a", None, "b", "a"],
        "window_start": pa.array([0, 0, -60_000, 60_000]).cast(pa.timestamp("ms")),
        "window_end": pa.array([60_000, 60_000, 0, 120_000]).cast(pa.timestamp("ms")),
        "n": [1, 1, 1, 1],
        "s": [1, 2, None, -4],
    })  # fmt: skip
    assert_same(duck.run(flow.op), want, ordered=False)


def test_order_survives_filters_unions_and_limits() -> None:
    flow = si.from_arrow(TABLE)
    found = duck.run(flow.filter(col("x") != 1).union(flow).limit(4).op)
    assert found["x"].to_pylist() == [2, -4, 1, 2]


@pytest.mark.parametrize(
    "build",
    [
        lambda flow: flow.select(y=col("k").cast(pa.float64())),
        lambda flow: flow.select(y=col("t").cast(pa.timestamp("ms", "Europe/Berlin")).dt.hour()),
        lambda flow: flow.select(y=col("x").cast(pa.float32()).round()),
        lambda flow: flow.group_by("k").agg(n=si.count()).limit(1),
        lambda flow: flow.map_batches(lambda batch: batch, TABLE.schema),
    ],
)
def test_what_duckdb_means_otherwise_is_left_out(build) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(duck.Untranslatable):
        duck.run(build(si.from_arrow(TABLE)).op)
