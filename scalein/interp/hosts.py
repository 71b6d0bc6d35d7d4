"""The functions whose meaning is pyarrow's: letter case, text to and from values, local time.

`functions.is_host` says which calls these are. They take whole arrays, and run in compiled flows as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from scalein.dtypes import UNITS_PER_SECOND
from scalein.interp.scalars import NoValue
from scalein.ir.exprs import Call, type_of


def apply(call: Call, args: Sequence[pa.Array]) -> pa.Array:
    """The call over its arguments' arrays; raises `NoValue` if a row has none."""
    (array,) = args
    try:
        found = _function(call)(array)
    except pa.ArrowInvalid as error:
        raise NoValue("impossible cast") from error
    except pa.ArrowNotImplementedError as error:
        raise NoValue("cast that pyarrow does not know") from error
    return found if found.type == type_of(call).arrow else found.cast(type_of(call).arrow)


def _function(call: Call) -> Callable[[pa.Array], pa.Array]:
    target = type_of(call)
    match call.fn:
        case "lower":
            return lambda array: pc.utf8_lower(array.cast(pa.large_string()))
        case "upper":
            return lambda array: pc.utf8_upper(array.cast(pa.large_string()))
        case "cast" if target.is_string:
            return lambda array: array.cast(pa.large_string())
        case "cast":
            return lambda array: array.cast(pa.large_string()).cast(target.arrow)
        case "dt_truncate":
            return lambda array: _truncate(call, array)
        case _:
            return _LOCAL_PARTS[call.fn]


def _truncate(call: Call, array: pa.Array) -> pa.Array:
    """Floored in local time; the unit is the coarsest that divides, since pyarrow's multiple is an int32."""
    (every,) = call.params
    assert isinstance(every, int)
    nanoseconds = every * (10**9 // UNITS_PER_SECOND[type_of(call).unit])
    name, size = next((name, size) for name, size in _UNITS if nanoseconds % size == 0)
    return pc.floor_temporal(array, nanoseconds // size, name)


_UNITS = [("day", 86_400 * 10**9), ("hour", 3_600 * 10**9), ("minute", 60 * 10**9), ("second", 10**9),
          ("millisecond", 10**6), ("microsecond", 10**3), ("nanosecond", 1)]  # fmt: skip


def _sub_second(array: pa.Array, digits: int) -> pa.Array:
    """The fraction of the second in units of 10^-digits; pyarrow gives three digits at a time."""
    total = pc.millisecond(array)
    for more in (pc.microsecond, pc.nanosecond)[: digits // 3 - 1]:
        total = pc.add(pc.multiply(total, 1000), more(array))
    return total


# Parts of the clock and calendar of the column's own zone.
_LOCAL_PARTS: dict[str, Callable[[pa.Array], pa.Array]] = {
    "dt_year": pc.year,
    "dt_quarter": pc.quarter,
    "dt_month": pc.month,
    "dt_day": pc.day,
    "dt_weekday": lambda array: pc.day_of_week(array, count_from_zero=False, week_start=1),
    "dt_ordinal_day": pc.day_of_year,
    "dt_hour": pc.hour,
    "dt_minute": pc.minute,
    "dt_second": pc.second,
    "dt_millisecond": lambda array: _sub_second(array, 3),
    "dt_microsecond": lambda array: _sub_second(array, 6),
    "dt_nanosecond": lambda array: _sub_second(array, 9),
}
