"""Which row groups of a Parquet file their statistics rule out for a filter.

The filter itself runs over everything that is read, so only "no row can match" must be right. Statistics leave out
nulls, which no test matches, and NaN, which is the greatest value: lower bounds on floats skip nothing. Writers may
truncate the bounds of long text, but they remain bounds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

_UNITS = {"milliseconds": 1_000_000, "microseconds": 1_000, "nanoseconds": 1}  # in nanoseconds
_ARROW_UNITS = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}


@dataclass(frozen=True, slots=True)
class Condition:
    """A column compared with constants: `how` is eq, lt, le, gt, ge or in. Constants are of the column's type:
    times are integers in its unit, and dates are days. Rows for which it is not true are dropped by the filter.
    """

    column: str
    how: str
    values: tuple[Any, ...]


class SkipCounter:
    """The number of row groups left out, shared by all readers of a source."""

    def __init__(self) -> None:
        self.row_groups = 0


def wanted(metadata: Any, schema: pa.Schema, tests: Sequence[Condition]) -> list[bool]:
    """For each row group of a file whether it may have rows for which all tests hold."""
    leaves = [metadata.schema.column(k) for k in range(metadata.num_columns)]
    places = {leaf.path: k for k, leaf in enumerate(leaves) if not leaf.max_repetition_level}
    known = [(test, places[test.column]) for test in tests if "." not in test.column and test.column in places]
    found = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        found.append(all(_may_hold(test, group.column(place).statistics, group.num_rows, leaves[place],
                                   schema.field(test.column).type) for test, place in known))
    return found


def holds(test: Condition, value: pa.Scalar) -> bool:
    """Whether the test may hold for rows that all have this value of its column."""
    if not value.is_valid:
        return False
    known = value.value if value.type == pa.date32() else value.as_py()
    if not (isinstance(known, str) or (isinstance(known, int) and not isinstance(known, bool))):
        return True
    return any(type(known) is not type(constant) or _meets(test.how, known, known, constant)
               for constant in test.values)


def extent(statistics: Any, rows: int, leaf: Any, type_: pa.DataType) -> tuple[int, int, int] | None:
    """The least and the greatest value of a column of integers or times in a row group, in units of `type_`, and how
    many values it has; None if the statistics do not say so exactly, or if it has none.
    """
    if statistics is None or not statistics.has_min_max or not statistics.has_null_count:
        return None
    about = json.loads(leaf.logical_type.to_json())
    if leaf.physical_type not in ("INT32", "INT64") or not about.get("isSigned", True):
        return None
    low, high, values = statistics.min_raw, statistics.max_raw, rows - statistics.null_count
    if pa.types.is_timestamp(type_):
        unit, own = _UNITS.get(about.get("timeUnit", "")), _ARROW_UNITS[type_.unit]
        if unit is None or low * unit % own or high * unit % own:
            return None
        low, high = low * unit // own, high * unit // own
    elif not pa.types.is_signed_integer(type_):
        return None
    return (low, high, values) if low <= high and 0 < values <= rows else None


def _may_hold(test: Condition, statistics: Any, rows: int, leaf: Any, type_: pa.DataType) -> bool:
    if statistics is None:
        return True
    if statistics.has_null_count and statistics.null_count == rows:
        return False
    if not statistics.has_min_max:
        return True
    try:
        bounds = _bounds(statistics, leaf, type_, test.how)
        return bounds is None or any(_meets(test.how, *bounds, _comparable(value, type_)) for value in test.values)
    except (ValueError, TypeError, OverflowError, pa.ArrowException):  # statistics of an unknown form
        return True


def _bounds(statistics: Any, leaf: Any, type_: pa.DataType, how: str) -> tuple[Any, Any] | None:
    """Bounds of the values that are not null, as `_comparable` gives constants; None if nothing is known."""
    value_type = type_.value_type if pa.types.is_dictionary(type_) else type_
    if pa.types.is_timestamp(value_type):
        unit = _UNITS.get(json.loads(leaf.logical_type.to_json()).get("timeUnit", ""))
        return None if unit is None else (statistics.min_raw * unit, statistics.max_raw * unit)
    low, high = statistics.min, statistics.max
    if pa.types.is_floating(value_type):
        return None if how in ("gt", "ge") or math.isnan(low) or math.isnan(high) else (low, high)
    wanted = int if pa.types.is_integer(value_type) else str if _is_text(value_type) else None
    return (low, high) if wanted is not None and type(low) is type(high) is wanted else None


def _comparable(value: Any, type_: pa.DataType) -> Any:
    """A constant as the column holds it; times in nanoseconds."""
    if pa.types.is_timestamp(type_):
        return value * _ARROW_UNITS[type_.unit]
    return float(np.float32(value)) if type_ == pa.float32() else value


def _meets(how: str, low: Any, high: Any, value: Any) -> bool:
    """Whether a value between two bounds may be in this relation to a constant; NaN is beyond all bounds."""
    if isinstance(value, float) and math.isnan(value):
        return True
    match how:
        case "lt":
            return bool(low < value)
        case "le":
            return bool(low <= value)
        case "gt":
            return bool(high > value)
        case "ge":
            return bool(high >= value)
    return bool(low <= value <= high)


def _is_text(type_: pa.DataType) -> bool:
    return type_ in (pa.string(), pa.large_string(), pa.string_view())
