"""Decimals, binaries and times of the day by the hundred thousand: as keys and arguments, hashed and partitioned."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

import scalein as si
from scalein import col
from tests.scale import assert_same_rows, by_duckdb, every_way, source_of

ROWS = 300_000


def decimals(numbers: np.ndarray, type_: pa.DataType, by: int = 1, nulls: np.ndarray | None = None) -> pa.Array:
    """Decimals of numbers times a factor that may leave 64 bits."""
    words = np.zeros((len(numbers), 2), np.int64)
    words[:, 0], words[:, 1] = numbers, numbers >> 63
    array = pa.Array.from_buffers(type_, len(numbers), [None, pa.py_buffer(words)])
    if by != 1:
        digits = b"".join((int(n) * by).to_bytes(16, "little", signed=True) for n in numbers)
        array = pa.Array.from_buffers(type_, len(numbers), [None, pa.py_buffer(digits)])
    return array if nulls is None else pa.array(np.where(nulls, None, np.array(array.to_pylist(), object)), type_)


def _keys(kind: str) -> pa.Array:
    numbers = np.random.default_rng(5).integers(-100_000, 100_000, ROWS)
    match kind:
        case "decimal of 64 bits":
            return decimals(numbers, pa.decimal128(12, 2))
        case "decimal of 128 bits":
            return decimals(numbers, pa.decimal128(38, 4), by=10**30)
        case "nullable decimal":
            return decimals(numbers, pa.decimal128(20, 0), nulls=numbers % 10 == 3)
        case "binary":
            return pa.array([b"\xff\0 a prefix of all %d" % n if n % 3 else b"%d" % n for n in numbers.tolist()])
        case "fixed":
            return pa.array([None if n % 50 == 7 else b"%016d" % n for n in numbers.tolist()], pa.binary(16))
        case "date64":
            return pa.array(numbers * 86_400_000).view(pa.date64())
        case _:
            return pa.array(np.abs(numbers) * 7).view(pa.time64("us"))


KINDS = ["decimal of 64 bits", "decimal of 128 bits", "nullable decimal", "binary", "fixed", "date64", "time"]


@every_way
@pytest.mark.parametrize("kind", KINDS)
def test_many_groups(kind: str, source: str, workers: int) -> None:
    rng = np.random.default_rng(6)
    small, large = rng.integers(-(10**9), 10**9, ROWS), rng.integers(-(10**12), 10**12, ROWS)
    table = pa.table({"k": _keys(kind), "x": decimals(small, pa.decimal128(15, 2)),
                      "w": decimals(large, pa.decimal128(30, 4)), "n": small})  # fmt: skip
    made = {"rows": si.count(), "s": col("x").sum(), "t": (col("x") * col("w")).sum(), "m": col("w").mean(),
            "lo": col("x").min(), "hi": col("w").max()}  # fmt: skip
    flow = source_of(table, source).filter(col("n") % 5 != 0).group_by("k").agg(**made)
    want = by_duckdb("""SELECT k, count(*) AS rows, sum(x) AS s, sum(x::DECIMAL(15, 2) * w::DECIMAL(23, 4)) AS t,
        avg(w) AS m, min(x) AS lo, max(w) AS hi FROM t WHERE n % 5 <> 0 GROUP BY k""", t=table)
    found = flow.collect(workers=workers)
    plain = {pa.binary(16): pa.binary(), pa.date64(): pa.timestamp("ms")}
    assert found.schema.field("k").type == table.schema.field("k").type
    key = plain.get(found.schema.field("k").type, found.schema.field("k").type)
    found = found.set_column(0, "k", found["k"].cast(key))
    assert_same_rows(found, want.set_column(0, "k", want["k"].cast(key)), by=["k"])


@pytest.mark.parametrize("workers", [1, 2])
def test_joins_and_payloads(workers: int) -> None:
    keys = decimals(np.arange(-50_000, 50_000), pa.decimal128(9, 2))
    names = pa.array([b"payload %d" % n if n % 4 else None for n in range(100_000)])
    right = pa.table({"k": keys, "name": names, "price": decimals(np.arange(100_000), pa.decimal128(38, 3), by=10**20)})
    left = pa.table({"k": decimals(np.random.default_rng(7).integers(-60_000, 60_000, ROWS), pa.decimal128(11, 2))})
    for how in ("inner", "left"):
        made = {"n": si.count(), "named": col("name").count(), "last": col("name").max(), "top": col("price").max(),
                "s": col("price").sum()}  # fmt: skip
        flow = si.from_arrow(left).join(right, on="k", how=how).group_by().agg(**made)
        want = by_duckdb(f"""SELECT count(*) AS n, count(name) AS named, max(name) AS last, max(price) AS top,
            sum(price) AS s FROM l {how} JOIN r USING (k)""", l=left, r=right)
        assert_same_rows(flow.collect(workers=workers), want)
