"""Lossless conversion of columns of files."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import scalein as si
from scalein import col
from scalein.connectors.formats.conversion import converted, converts
from scalein.errors import BadData

WORDS = pa.array(["a", None, "b"])
KEPT: list[tuple[pa.Array, pa.DataType, list[Any]]] = [
    (pa.array([1, None, -128], pa.int8()), pa.int64(), [1, None, -128]),
    (pa.array([255, None], pa.uint8()), pa.int16(), [255, None]),
    (pa.array([2**64 - 1], pa.uint64()), pa.decimal128(20, 0), [Decimal(2**64 - 1)]),
    (pa.array([2**31 - 1], pa.int32()), pa.float64(), [2.0**31 - 1]),
    (pa.array([1.5, None], pa.float32()), pa.float64(), [1.5, None]),
    (pa.array([Decimal("1.25"), None], pa.decimal128(5, 2)), pa.decimal128(9, 3), [Decimal("1.250"), None]),
    (pa.array([Decimal("1.25")], pa.decimal64(5, 2)), pa.decimal128(5, 2), [Decimal("1.25")]),
    (pa.array([7, None], pa.timestamp("ms")), pa.timestamp("us"), [7000, None]),
    (pa.array([7000], pa.timestamp("ns", "UTC")), pa.timestamp("us", "Europe/Berlin"), [7]),
    (pa.array([date(2026, 1, 1)], pa.date64()), pa.date32(), [date(2026, 1, 1)]),
    (WORDS.dictionary_encode(), pa.string(), ["a", None, "b"]),
    (WORDS.cast(pa.large_string()), pa.string(), ["a", None, "b"]),
    (WORDS.cast(pa.string_view()), pa.large_string(), ["a", None, "b"]),
    (WORDS, pa.dictionary(pa.int32(), pa.string()), ["a", None, "b"]),
    (pa.array([b"xy"], pa.binary(2)), pa.binary(), [b"xy"]),
    (pa.array([[1, None]], pa.list_(pa.int8())), pa.list_(pa.int32()), [[1, None]]),
    (pa.array([{"x": 1}], pa.struct({"x": pa.int8()})), pa.struct({"x": pa.int64()}), [{"x": 1}]),
]
LOST: list[tuple[pa.DataType, pa.DataType]] = [
    (pa.int64(), pa.int32()), (pa.int8(), pa.uint8()), (pa.uint32(), pa.int32()), (pa.int64(), pa.float64()),
    (pa.float64(), pa.float32()), (pa.decimal128(9, 2), pa.decimal128(9, 3)), (pa.decimal128(9, 2), pa.float64()),
    (pa.timestamp("us"), pa.timestamp("us", "UTC")), (pa.timestamp("us"), pa.date32()), (pa.string(), pa.binary()),
    (pa.binary(), pa.string()), (pa.int64(), pa.string()), (pa.string(), pa.dictionary(pa.int8(), pa.string())),
    (pa.struct({"x": pa.int8()}), pa.struct({"y": pa.int8()})), (pa.list_(pa.int64()), pa.list_(pa.int32())),
]  # fmt: skip


@pytest.mark.parametrize(("column", "wanted", "values"), KEPT)
def test_values_are_kept(column: pa.Array, wanted: pa.DataType, values: list[Any]) -> None:
    assert converts(column.type, wanted)
    found = converted(column, pa.field("x", wanted), "a.parquet")
    assert found.type == wanted
    assert (found.cast(pa.int64()) if pa.types.is_timestamp(wanted) else found).to_pylist() == values


@pytest.mark.parametrize(("found", "wanted"), LOST)
def test_types_that_lose_are_refused(found: pa.DataType, wanted: pa.DataType) -> None:
    assert not converts(found, wanted)


def test_a_time_that_loses_digits_is_an_error() -> None:
    with pytest.raises(BadData, match=r"column 't' of a\.parquet is timestamp\[ns\]"):
        converted(pa.array([7001], pa.timestamp("ns")), pa.field("t", pa.timestamp("us")), "a.parquet")


def test_files_are_read_in_the_types_of_the_first(tmp_path: Path) -> None:
    """Also where statistics of a file in another unit decide whether a row group is read."""
    pq.write_table(pa.table({"t": pa.array([1_000, 2_000], pa.timestamp("us")), "k": pa.array([1, 2])}),
                   tmp_path / "a.parquet")
    pq.write_table(pa.table({"k": pa.array([3, None], pa.int8()), "t": pa.array([3, 4], pa.timestamp("ms"))}),
                   tmp_path / "b.parquet")
    flow = si.read_parquet(tmp_path)
    assert flow.collect().column("t").cast(pa.int64()).to_pylist() == [1_000, 2_000, 3_000, 4_000]
    assert flow.filter(col("k") >= 2).select("k").collect().to_pydict() == {"k": [2, 3]}
    pq.write_table(pa.table({"t": pa.array([1], pa.timestamp("us")), "k": pa.array([2.5])}), tmp_path / "c.parquet")
    with pytest.raises(BadData, match=r"column 'k' of .*c\.parquet is double, not int64"):
        flow.collect()
