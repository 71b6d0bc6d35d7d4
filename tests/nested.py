"""Nested columns for tests: types of every layout, and arrays of them, sliced as often as not."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

LISTS = [
    pa.list_(pa.int64()),
    pa.large_list(pa.string()),
    pa.list_(pa.int32(), 2),
    pa.list_view(pa.float64()),
    pa.large_list_view(pa.int8()),
    pa.list_(pa.list_(pa.int64())),
    pa.list_(pa.struct({"u": pa.int64(), "v": pa.list_(pa.string())})),
    pa.list_(pa.string_view()),
    pa.list_(pa.timestamp("us")),
    pa.list_(pa.decimal128(9, 2)),
    pa.list_(pa.bool_()),
]
UNTRANSLATED = [pa.list_(pa.timestamp("us")), pa.list_(pa.decimal128(9, 2))]  # for DuckDB
STRUCTS = [
    pa.struct({"u": pa.int64(), "v": pa.string()}),
    pa.struct({"u": pa.list_(pa.int32()), "w": pa.struct({"u": pa.float64()})}),
    pa.struct({"u": pa.string_view()}),
]
NESTED = [*LISTS, *STRUCTS, pa.map_(pa.string(), pa.int32()), pa.null(), pa.large_list(pa.binary())]


def values(arrow: pa.DataType) -> st.SearchStrategy[Any]:
    """A value of a type, as Arrow gives it to Python."""
    is_ = pa.types
    if is_.is_null(arrow):
        return st.none()
    if is_.is_struct(arrow):
        return st.none() | st.fixed_dictionaries({field.name: values(field.type) for field in arrow})
    if is_.is_map(arrow):
        return st.none() | st.dictionaries(st.text("ab", max_size=2), st.integers(0, 9), max_size=3).map(
            lambda some: list(some.items()))
    if is_.is_nested(arrow):
        few = (arrow.list_size,) * 2 if is_.is_fixed_size_list(arrow) else (0, 3)
        return st.none() | st.lists(values(arrow.value_type), min_size=few[0], max_size=few[1])
    return st.none() | _plain(arrow)


def _plain(arrow: pa.DataType) -> st.SearchStrategy[Any]:
    is_ = pa.types
    if is_.is_boolean(arrow):
        return st.booleans()
    if is_.is_floating(arrow):
        return st.sampled_from([0.5, -1.0, float("nan")])
    if is_.is_timestamp(arrow):
        return st.integers(0, 9).map(lambda hour: datetime(2024, 5, 1, hour))
    if is_.is_decimal(arrow):
        return st.sampled_from([Decimal("0.00"), Decimal("-12.34")])
    if is_.is_binary(arrow):
        return st.sampled_from([b"", b"\xff", b"abc"])
    if is_.is_integer(arrow):
        return st.integers(-5, 100)
    return st.sampled_from(["", "a", "é", "a longer one than twelve"])


@st.composite
def arrays(draw: st.DrawFn, arrow: pa.DataType, count: int) -> pa.Array:
    """An array of `count` rows; beyond a few, rows repeat. As often as not a slice of a longer one."""
    before, after = draw(st.sampled_from([(0, 0), (1, 0), (3, 2)]))
    few = draw(st.lists(values(arrow), min_size=1, max_size=12))
    total = before + count + after
    return pa.array((few * (total // len(few) + 1))[:total], arrow).slice(before, count)


@st.composite
def tables(draw: st.DrawFn, *types: pa.DataType, keys: bool = True) -> pa.Table:
    """Columns k (small integers), x (text), and n0, n1, ... of the nested types; in one batch or several."""
    count = draw(st.sampled_from([0, 1, 2, 5, 17, 100, 1500]))
    step = draw(st.integers(1, 7))
    columns: dict[str, pa.Array] = {}
    if keys:
        columns["k"] = pa.array([None if i % 5 == 4 else i * step % 11 for i in range(count)], pa.int64())
        columns["x"] = pa.array([f"text {i % 3}" for i in range(count)], pa.string())
    columns |= {f"n{number}": draw(arrays(arrow, count)) for number, arrow in enumerate(types)}
    batch = pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
    cuts = sorted(draw(st.lists(st.integers(0, count), max_size=2)))
    parts = [batch.slice(start, stop - start) for start, stop in zip([0, *cuts], [*cuts, count], strict=True)]
    return pa.Table.from_batches(parts, batch.schema)
