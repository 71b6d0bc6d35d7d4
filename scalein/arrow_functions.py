"""The functions whose meaning is pyarrow's: letter case, text to and from values, local time.

`functions.is_host` says which calls these are. They take whole arrays, and run in compiled flows as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from scalein.dtypes import FLOATS, INTS, UNITS_PER_SECOND, DType, Kind
from scalein.interp.lists import element, length
from scalein.interp.scalars import NoValue
from scalein.interp.texts import text_function
from scalein.ir.exprs import Call, type_of
from scalein.ir.functions import HOST_TEXT


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


def attempt(call: Call, args: Sequence[pa.Array]) -> pa.Array:
    """The call over its arguments' arrays, null in the rows that have no value.

    pyarrow says only that some row has none, and a microsecond for each such row later. So a few rows are tried first.
    Where one fails, text that cannot be a value is found by its look; for what is left the array is halved until the
    row stands alone, over distinct values.
    """
    (array,) = args
    try:
        apply(call, [array[:_FEW_ROWS]])
        return apply(call, [array])
    except NoValue:
        pass
    if not type_of(call.args[0]).is_string:
        return pa.concat_arrays(_halved(call, array))
    text = array.cast(pa.large_string())
    look = _LOOKS.get(type_of(call).kind, _TIME_LOOK)
    words = pc.if_else(pc.match_substring_regex(text, look), text, None).dictionary_encode()
    return pa.concat_arrays(_halved(call, words.dictionary)).take(words.indices)


_FEW_ROWS = 256


def _halved(call: Call, array: pa.Array) -> list[pa.Array]:
    try:
        return [apply(call, [array])]
    except NoValue:
        if len(array) == 1:
            return [pa.nulls(1, type_of(call).arrow)]
    middle = len(array) // 2
    return _halved(call, array[:middle]) + _halved(call, array[middle:])


# What text must look like to be a value at all, by the kind that it is cast to: no less than pyarrow accepts.
_INT_LOOK = r"^[+-]?([0-9]+|0[xX][0-9a-fA-F]+)$"
_FLOAT_LOOK = r"(?i)^[+-]?([0-9.]+(e[+-]?[0-9]+)?|inf(inity)?|nan.*)$"
_TIME_LOOK = r"^[+-]?[0-9][0-9T Zz:.+-]*$"
_LOOKS = {
    **dict.fromkeys(INTS, _INT_LOOK), **dict.fromkeys((*FLOATS, Kind.DEC), _FLOAT_LOOK),
    Kind.BOOL: r"(?i)^(true|false|0|1)$", Kind.BIN: "",
}  # fmt: skip


def _function(call: Call) -> Callable[[pa.Array], pa.Array]:
    target = type_of(call)
    match call.fn:
        case fn if fn in ("lower", "upper", *HOST_TEXT):
            return lambda array: text_function(call)(array.cast(pa.large_string()))
        case "cast" if target.is_string:
            return lambda array: array.cast(pa.large_string())
        case "cast" if target.kind is Kind.TIME and not type_of(call.args[0]).is_string:
            return lambda array: pc.local_timestamp(array).cast(target.arrow, safe=False)
        case "cast" if target.kind is Kind.TIME:
            return lambda array: _time_of_day(array, target)
        case "cast":
            return lambda array: array.cast(pa.large_string()).cast(target.arrow)
        case "is_null":
            return pc.is_null  # type: ignore[no-any-return]
        case "is_not_null":
            return pc.is_valid  # type: ignore[no-any-return]
        case "list_len":
            return length
        case "list_get":
            return lambda array: element(array, int(str(call.params[0])))
        case "struct_field":
            return lambda array: pc.struct_field(array, [array.type.get_field_index(call.params[0])])
        case "dt_truncate":
            return lambda array: _truncate(call, array)
        case _:
            return _LOCAL_PARTS[call.fn]


def _time_of_day(array: pa.Array, target: DType) -> pa.Array:
    """Text like 12:30 or 12:30:05.25, read as a moment of the first day: pyarrow reads no times alone."""
    moments = pc.binary_join_element_wise(_LARGE("1970-01-01 "), array.cast(pa.large_string()), _LARGE(""))
    return moments.cast(pa.timestamp(target.unit)).cast(target.arrow, safe=False)


_LARGE = partial(pa.scalar, type=pa.large_string())


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
