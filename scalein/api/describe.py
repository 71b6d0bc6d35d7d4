"""describe(): each column of a flow in a few numbers.

One pass over the batches of the result, by pyarrow and numpy: an aggregation would compile a kernel for each quantile,
which takes longer than to describe a million rows. The values of numbers and times are held, 8 bytes each, since exact
quantiles need them all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalein.dtypes import TIMES, DType, Kind, Schema

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
        return self._shown([None] * 7)

    def _shown(self, others: list[str | None]) -> pa.Array:
        return pa.array([str(self._count), str(self._nulls), *others], pa.string())


class _Texts(_Counted):
    """Text and binary: the least and the greatest value as well."""

    def __init__(self) -> None:
        super().__init__()
        self._ends: list[pa.Scalar] = []

    def add(self, values: pa.Array) -> None:
        super().add(values)
        if pa.types.is_string_view(values.type) or pa.types.is_binary_view(values.type):  # pyarrow compares none
            values = values.cast(pa.large_string() if pa.types.is_string_view(values.type) else pa.large_binary())
        found = pc.min_max(values)
        self._ends += [end for end in (found["min"], found["max"]) if end.is_valid]

    def result(self) -> pa.Array:
        if not self._ends:
            return super().result()
        ends = pc.min_max(pa.array(self._ends, self._ends[0].type))
        return self._shown([None, None, _text(ends["min"]), None, None, None, _text(ends["max"])])


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
            with np.errstate(invalid="ignore"):  # infinite values
                low, between = _quantiles(values)
                found[4:] = low + between
                found[2] = values.mean()
                found[3] = values.std(ddof=1) if self._count > 1 else None
        return pa.array(found, pa.float64())


class _Times(_Counted):
    """Dates, times and durations, as text: by their integers, since Python's own types hold no nanoseconds."""

    def __init__(self, dtype: DType) -> None:
        super().__init__()
        self._type = dtype.arrow
        self._parts: list[np.ndarray] = []

    def add(self, values: pa.Array) -> None:
        super().add(values)
        plain = values.drop_null() if values.null_count else values
        self._parts.append(np.asarray(plain.view(self._integer)).astype(np.int64))

    @property
    def _integer(self) -> pa.DataType:
        return pa.int32() if self._type.bit_width == 32 else pa.int64()

    def result(self) -> pa.Array:
        if not self._count:
            return super().result()
        values = np.concatenate(self._parts)
        least = int(values.min())
        offsets = values.view(np.uint64) - np.uint64(least % 2**64)  # two times may lie further apart than int64 holds
        low, between = _quantiles(offsets)
        shown = [round(offsets.mean()), *(int(each) + round(more) for each, more in zip(low, between, strict=True))]
        mean, *quantiles = pa.array([least + each for each in shown], self._integer).view(self._type)
        return self._shown([_text(mean), None, *map(_text, quantiles)])


def _quantiles(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The least value, the quartiles and the greatest: the values at or below these places, and what is to be added
    where a place lies between two of them. Reorders the values.
    """
    places = np.array([0, 0.25, 0.5, 0.75, 1]) * (len(values) - 1)
    low, high = np.floor(places).astype(np.int64), np.ceil(places).astype(np.int64)
    values.partition(np.unique([low, high]))  # as if sorted at these places, with NaN last
    return values[low], np.where(high > low, (places - low) * (values[high] - values[low]), 0.0)


def _described(dtype: DType) -> _Counted:
    if dtype.is_int or dtype.is_float or dtype.is_decimal or dtype.kind is Kind.BOOL:
        return _Numbers()
    if dtype.kind in TIMES:
        return _Times(dtype)
    return _Counted() if dtype.is_nested else _Texts()


def _text(value: pa.Scalar) -> str:
    if pa.types.is_string(value.type) or pa.types.is_large_string(value.type):
        return bytes(value.as_buffer()).decode(errors="replace")  # an Arrow text may have bytes that are no UTF-8
    if pa.types.is_duration(value.type):  # no cast of pyarrow's gives text
        value = value.cast(pa.duration("us"), safe=False)
    elif pa.types.is_temporal(value.type):
        value = value.cast(pa.string())
    return str(value.as_py())
