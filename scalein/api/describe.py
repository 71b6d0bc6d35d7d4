"""describe(): each column of a flow in a few numbers, by one aggregation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from scalein.api.column import Column, col, count
from scalein.dtypes import DType, Kind
from scalein.errors import BadName, here

if TYPE_CHECKING:
    from scalein.api.flow import Flow

STATISTIC = "statistic"
NAMES = ("count", "null_count", "mean", "std", "min", "25%", "50%", "75%", "max")
_ROWS = "#rows"


def describe(flow: Flow, collect: Callable[[Flow], pa.Table]) -> pa.Table:
    """A row for each statistic and a column for each of the flow's columns; null where a type has no such value."""
    schema = flow.op.schema
    if STATISTIC in schema.names:
        raise BadName(f"describe names its own column {STATISTIC!r}", at=here(), hint="rename the flow's, or drop it")
    aggregates = {_ROWS: count()}
    for number, field in enumerate(schema):
        found = _aggregates(col(field.name), field.dtype)
        aggregates |= {f"{number} {name}": each for name, each in found.items()}
    values = {name: column[0].as_py() for name, column in zip(
        aggregates, collect(flow.group_by().agg(**aggregates)).columns, strict=True)}
    columns = [pa.array(NAMES)]
    for number, field in enumerate(schema):
        known = {name: values.get(f"{number} {name}") for name in NAMES}
        known["count"] = known["count"] or 0  # a sum of nothing is null
        known["null_count"] = values[_ROWS] - known["count"]
        columns.append(_column(known, _is_numeric(field.dtype)))
    return pa.table(columns, [STATISTIC, *schema.names])


def _is_numeric(dtype: DType) -> bool:
    return dtype.is_int or dtype.is_float or dtype.is_decimal or dtype.kind is Kind.BOOL


def _aggregates(x: Column, dtype: DType) -> dict[str, Column]:
    if dtype.is_nested:
        return {"count": x.is_not_null().cast(pa.int64()).sum()}
    if not _is_numeric(dtype):
        return {"count": x.count(), "min": x.min(), "max": x.max()}
    number = x.cast(pa.float64())
    quantiles = {f"{share}%": number.quantile(share / 100) for share in (25, 50, 75)}
    return {"count": x.count(), "mean": number.mean(), "std": number.std(), "min": number.min(), "max": number.max(),
            **quantiles}


def _column(values: dict[str, Any], is_numeric: bool) -> pa.Array:
    listed = [values[name] for name in NAMES]
    if is_numeric:
        return pa.array([None if value is None else float(value) for value in listed], pa.float64())
    return pa.array([None if value is None else str(value) for value in listed], pa.string())
