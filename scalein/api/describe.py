"""describe(): each column of a flow in a few numbers.

One pass over the batches of the result, by pyarrow and numpy: an aggregation would compile a kernel for each quantile,
which takes longer than to describe a million rows. The values of numeric columns are held, 8 bytes each, since exact
quantiles need them all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalein.dtypes import DType, Kind, Schema

STATISTIC = "statistic"
NAMES = ("count", "null_count", "mean", "std", "min", "25%", "50%", "75%", "max")


def describe(schema: Schema, batches: Iterable[pa.RecordBatch]) -> pa.Table:
    """A row for each statistic and a column for each of the flow's columns; null where a type has no such value."""
    columns = [_described(field.dtype) for field in schema]
    for batch in batches:
        for column, values in zip(columns, batch.columns, strict=True):
            column.add(values)
    return pa.table([pa.array(NAMES), *(column.result() for column in columns)], [STATISTIC, *schema.names])


class _Counted:
    """A column whose values have no order: how many there are."""

    def __init__(self) -> None:
        self._count = self._nulls = 0

    def add(self, values: pa.Array) -> None:
        self._nulls += values.null_count
        self._count += len(values) - values.null_count

    def result(self) -> pa.Array:
        return pa.array([self._count, self._nulls, *[None] * 7]).cast(pa.string())


class _Ordered(_Counted):
    """Text, binary and times: the least and the greatest value as well, as text."""

    def __init__(self) -> None:
        super().__init__()
        self._ends: list[pa.Scalar] = []
        self._type: pa.DataType | None = None

    def add(self, values: pa.Array) -> None:
        super().add(values)
        found = pc.min_max(values.cast(_COMPARABLE.get(values.type.id, values.type)))
        self._type = values.type
        self._ends += [end for end in (found["min"], found["max"]) if end.is_valid]

    def result(self) -> pa.Array:
        least, greatest = None, None
        if self._ends:
            ends = pc.min_max(pa.array(self._ends, self._ends[0].type))
            least, greatest = (_text(ends[end].cast(self._type)) for end in ("min", "max"))
        return pa.array([str(self._count), str(self._nulls), None, None, least, None, None, None, greatest])


# What pyarrow compares in the place of types that it does not.
_COMPARABLE = {pa.string_view().id: pa.large_string(), pa.binary_view().id: pa.large_binary(),
               pa.duration("s").id: pa.int64()}


class _Numbers(_Counted):
    """Numbers and bools, as float64; NaN is the greatest."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[np.ndarray] = []

    def add(self, values: pa.Array) -> None:
        super().add(values)
        plain = values.drop_null() if values.null_count else values
        if pa.types.is_boolean(plain.type):
            plain = plain.cast(pa.uint8())
        self._parts.append(np.asarray(plain.cast(pa.float64(), safe=False)))

    def result(self) -> pa.Array:
        found: list[Any] = [self._count, self._nulls, *[None] * 7]
        if self._count:
            values = np.concatenate(self._parts)
            places = np.array([0, 0.25, 0.5, 0.75, 1]) * (self._count - 1)
            low, high = np.floor(places).astype(np.int64), np.ceil(places).astype(np.int64)
            values.partition(np.unique([low, high]))  # as if sorted at these places, with NaN last
            with np.errstate(invalid="ignore"):  # infinite values
                found[2] = values.mean()
                found[3] = values.std(ddof=1) if self._count > 1 else None
                found[4:] = values[low] + np.where(high > low, (places - low) * (values[high] - values[low]), 0.0)
        return pa.array(found, pa.float64())


def _described(dtype: DType) -> _Counted:
    if dtype.is_int or dtype.is_float or dtype.is_decimal or dtype.kind is Kind.BOOL:
        return _Numbers()
    return _Counted() if dtype.is_nested else _Ordered()


def _text(value: pa.Scalar) -> str:
    """Times by pyarrow: Python's own do not hold nanoseconds."""
    if pa.types.is_duration(value.type):
        value = value.cast(pa.duration("us"), safe=False)
    elif pa.types.is_temporal(value.type):
        value = value.cast(pa.string())
    return str(value.as_py())
