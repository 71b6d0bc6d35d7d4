"""Digests of plans: equal for what computes the same in the same way, whatever its data and its lines."""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa

import scalein as si
from scalein import Flow, col

TABLE = pa.table({"x": [1, 2], "y": [0.5, 1.5], "s": ["a", "b"]})


def flow(limit: object = 1, table: pa.Table = TABLE) -> Flow:
    return (si.from_arrow(table).filter(col("x") > limit).join(pa.table({"x": [1], "z": [2]}), on="x")
            .group_by("s", si.tumbling("x", 10)).agg(n=si.count(), q=col("y").quantile(0.5)))  # fmt: skip


def test_data_and_lines_do_not_count() -> None:
    other = flow(1, pa.table({"x": [7], "y": [2.5], "s": ["c"]}))
    again = flow(
        1
    )
    assert flow().op.digest == other.op.digest == again.op.digest


def test_what_computes_otherwise_has_another_digest() -> None:
    rows = si.from_arrow(TABLE)
    flows = [flow(1), flow(2), rows, rows.limit(1), rows.limit(2), rows.select("x"), rows.select("x", "y"),
             rows.select(z="x"), rows.filter(col("y") > 0.0), rows.filter(col("y") > -0.0),
             rows.with_columns(z=si.lit(1)), rows.with_columns(z=si.lit(True)), rows.with_columns(z=si.lit(1.0)),
             rows.with_columns(z=si.lit("1")), rows.with_columns(z=si.lit(Decimal("1.0"))),
             rows.with_columns(z=si.lit(Decimal("1.00"))),
             si.from_arrow(pa.table({"x": pa.array([1], pa.int32()), "y": [0.5], "s": ["a"]})),
             si.from_arrow(TABLE.cast(pa.schema([("x", pa.int64()), ("y", pa.float64()), ("s", pa.large_string())])))]
    assert len({each.op.digest for each in flows}) == len(flows)
