"""What pyarrow computes between kernels: functions whose meaning is pyarrow's.

A function that declares `arrow="reverse"` is `reverse(call, array)` here, over whole arrays, one an argument;
`registry.is_host` says which calls these are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalein.arrow_rows import extents, taken
from scalein.dtypes import BOOL, F64, FLOATS, I64, INTS, STR, UNITS_PER_SECOND, DType, Kind
from scalein.errors import ComputeError, InternalError
from scalein.ir.exprs import Call, Col, Expr, Lit, type_of
from scalein.ir.functions.registry import REGISTRY, NoValue, fallible, is_host
from scalein.ir.printer import show_expr
from scalein.ir.udf import PythonUdf

# --- expressions over batches ------------------------------------------------------------------------------------


def evaluate(expr: Expr, batch: pa.RecordBatch) -> pa.Array:
    """The value of an expression of a host step in every row, as an array of exactly its type.

    It is a call whose arguments are columns and constants (`ir/passes/host_steps.py`), tried or not; or a call of
    Python that only some rows ask for.
    """
    match expr:
        case Col(name):
            return _as_type(batch.column(name), type_of(expr))
        case Lit(value):
            return pa.nulls(batch.num_rows, type_of(expr).arrow) if value is None else (
                pa.repeat(pa.scalar(value, type_of(expr).arrow), batch.num_rows))
        case Call("if_else", (Col(asked), Call(params=(PythonUdf(),)) as call, Lit(None))):
            return _call_python(call, batch, pc.fill_null(batch.column(asked), False).to_pylist())
        case Call(params=(PythonUdf(),)):
            return _call_python(expr, batch)
        case Call("try", (Call(params=(PythonUdf(),)) as tried,)):
            return _call_python(tried, batch, is_tried=True)
        case Call("try", (Call() as tried,)):
            return attempt(tried, [evaluate(arg, batch) for arg in tried.args])
        case Call() if is_host(expr):
            words = _dictionary(expr, batch)
            if words is not None:  # once for each word, not for each row
                return _applied(expr, [_as_type(words.dictionary, type_of(expr.args[0]))]).take(words.indices)
            return _applied(expr, [evaluate(arg, batch) for arg in expr.args])
        case _:
            raise InternalError("pyarrow does not compute this", found=show_expr(expr))


def _dictionary(call: Call, batch: pa.RecordBatch) -> pa.DictionaryArray | None:
    """The column that a call of one column reads, if it is a dictionary of no more words than rows.

    A word that no row has must not fail.
    """
    if fallible(call) or len(call.args) > 1 or not isinstance(call.args[0], Col):
        return None
    column = batch.column(call.args[0].name)
    is_coded = isinstance(column, pa.DictionaryArray) and type_of(call.args[0]).is_string
    return column if is_coded and len(column.dictionary) <= len(column) else None


def _as_type(column: pa.Array, dtype: DType) -> pa.Array:
    """The column as a plain array of the type; a dictionary is decoded."""
    return column if column.type == dtype.arrow else column.cast(dtype.arrow)


def _applied(call: Call, args: Sequence[pa.Array]) -> pa.Array:
    try:
        return apply(call, args)
    except NoValue as error:
        raise _failure(error, call) from error.__cause__


def _failure(error: NoValue, call: Call) -> ComputeError:
    return ComputeError(f"{error} in `{show_expr(call)}`", at=call.at, type=type_of(call), found=error.__cause__)


def apply(call: Call, args: Sequence[pa.Array]) -> pa.Array:
    """The call over its arguments' arrays; raises `NoValue` if a row has none."""
    function: Callable[..., pa.Array] = getattr(sys.modules[__name__], REGISTRY[call.fn].arrow)
    try:
        found = function(call, *args)
    except pa.ArrowInvalid as error:
        if "UTF8" in str(error):
            raise NoValue("bytes that are not valid UTF-8") from error
        raise NoValue("impossible cast" if call.fn == "cast" else "a value that it does not take") from error
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


# --- functions of the user's that stay Python --------------------------------------------------------------------


_PYTHON = {F64: float, I64: int, BOOL: bool, STR: str}
_INT_LOW, _INT_HIGH = I64.int_range()


def _call_python(call: Call, batch: pa.RecordBatch, asked: Sequence[bool] | None = None,
                 is_tried: bool = False) -> pa.Array:
    """The user's function in every row that asks for it, null in the others.

    It is not called where an argument is null that it cannot take. Where it is `tried`, a row that fails is null.
    """
    (udf,) = call.params
    assert isinstance(udf, PythonUdf)
    columns = [evaluate(arg, batch).to_pylist() for arg in call.args]
    strict = [number for number, param in enumerate(udf.params) if not param.nullable]

    def called(row: Sequence[Any]) -> Any:
        if any(row[number] is None for number in strict):
            return None
        try:
            return _checked(udf, row)
        except NoValue as error:
            if is_tried:
                return None
            raise _failure(error, call) from error.__cause__

    rows = zip(*columns, strict=True) if columns else [()] * batch.num_rows
    live = [True] * batch.num_rows if asked is None else asked
    found = [called(row) if is_asked else None for row, is_asked in zip(rows, live, strict=True)]
    return pa.array(found, type_of(call).arrow)


def _checked(udf: PythonUdf, row: Sequence[Any]) -> Any:
    """What the function gives for a row, if it has the type that it declares."""
    try:
        found = udf.call(*row)
    except Exception as error:
        raise NoValue(f"{type(error).__name__} ({error})") from error
    if found is None and udf.nullable:
        return None
    wanted = _PYTHON[udf.dtype]
    if wanted is float and type(found) is int:
        return float(found)
    if not isinstance(found, wanted) or (wanted is int and isinstance(found, bool)):
        raise NoValue(f"a result of type {type(found).__name__} instead of {wanted.__name__}")
    if wanted is int and isinstance(found, int) and not _INT_LOW <= found <= _INT_HIGH:
        raise NoValue("integer overflow")
    return found


# --- casts and null tests ----------------------------------------------------------------------------------------


def cast(call: Call, array: pa.Array) -> pa.Array:
    """From and to text, and to the time of day in a zone."""
    target = type_of(call)
    if target.is_string:
        return array.cast(pa.large_string())
    if target.kind is not Kind.TIME:
        return array.cast(pa.large_string()).cast(target.arrow)
    if type_of(call.args[0]).is_string:
        return _time_of_day(array, target)
    return pc.local_timestamp(array).cast(target.arrow, safe=False)


def _time_of_day(array: pa.Array, target: DType) -> pa.Array:
    """Text like 12:30 or 12:30:05.25, read as a moment of the first day: pyarrow reads no times alone."""
    moments = pc.binary_join_element_wise(_LARGE("1970-01-01 "), array.cast(pa.large_string()), _LARGE(""))
    return moments.cast(pa.timestamp(target.unit)).cast(target.arrow, safe=False)


_LARGE = partial(pa.scalar, type=pa.large_string())


def is_null(call: Call, array: pa.Array) -> pa.Array:
    return pc.is_null(array)


def is_not_null(call: Call, array: pa.Array) -> pa.Array:
    return pc.is_valid(array)


# --- text: regular expressions are RE2's -------------------------------------------------------------------------


def _large(array: pa.Array) -> pa.Array:
    """With 64-bit offsets, which no result outgrows."""
    return array.cast(pa.large_string())


def lower(call: Call, array: pa.Array) -> pa.Array:
    return pc.utf8_lower(_large(array))


def upper(call: Call, array: pa.Array) -> pa.Array:
    return pc.utf8_upper(_large(array))


def _trim(whitespace: Callable[..., pa.Array], given: Callable[..., pa.Array], call: Call,
          array: pa.Array) -> pa.Array:
    (chars,) = call.params
    return whitespace(_large(array)) if chars is None else given(_large(array), chars)


strip = partial(_trim, pc.utf8_trim_whitespace, pc.utf8_trim)
lstrip = partial(_trim, pc.utf8_ltrim_whitespace, pc.utf8_ltrim)
rstrip = partial(_trim, pc.utf8_rtrim_whitespace, pc.utf8_rtrim)


def replace(call: Call, array: pa.Array) -> pa.Array:
    old, new = call.params
    return pc.replace_substring(_large(array), old, new)


def split_part(call: Call, array: pa.Array) -> pa.Array:
    """Part `number` from 1, or from the end if negative; empty where there is none."""
    by, number = call.params
    assert isinstance(number, int)
    parts = pc.split_pattern(_large(array), by)
    found = element(parts, number - 1 if number > 0 else number)
    return pc.if_else(array.is_valid(), found.fill_null(""), None)


def matches(call: Call, array: pa.Array) -> pa.Array:
    return matches_regex(_large(array), str(call.params[0]))


def extract(call: Call, array: pa.Array) -> pa.Array:
    pattern, group = call.params
    assert isinstance(group, int)
    return extract_group(_large(array), str(pattern), group)


def matches_regex(text: pa.Array, pattern: str) -> pa.Array:
    """Whether a regular expression matches somewhere in each text."""
    return pc.match_substring_regex(text, pattern)


def extract_group(text: pa.Array, pattern: str, group: int) -> pa.Array:
    """What a group of the first match holds (0 is all of it), null where nothing matches.

    pyarrow takes apart patterns whose groups all have names. So the whole text is replaced by the group: what stands
    before the first match is as short as can be, and what follows it is the rest.
    """
    whole = rf"(?s:\A.*?)({pattern})(?s:.*\z)"
    found = pc.replace_substring_regex(text, whole, rf"\{group + 1}")
    return pc.if_else(matches_regex(text, pattern), found, None)


# --- times in the column's own zone ------------------------------------------------------------------------------


def truncate(call: Call, array: pa.Array) -> pa.Array:
    """Floored in local time; the unit is the coarsest that divides, since pyarrow's multiple is an int32."""
    (every,) = call.params
    assert isinstance(every, int)
    nanoseconds = every * (10**9 // UNITS_PER_SECOND[type_of(call).unit])
    name, size = next((name, size) for name, size in _UNITS if nanoseconds % size == 0)
    return pc.floor_temporal(array, nanoseconds // size, name)


_UNITS = [("day", 86_400 * 10**9), ("hour", 3_600 * 10**9), ("minute", 60 * 10**9), ("second", 10**9),
          ("millisecond", 10**6), ("microsecond", 10**3), ("nanosecond", 1)]  # fmt: skip


def _local(part: Callable[[pa.Array], pa.Array], call: Call, array: pa.Array) -> pa.Array:
    return part(array)


def _fraction(digits: int, call: Call, array: pa.Array) -> pa.Array:
    """The fraction of the second in units of 10^-digits; pyarrow gives three digits at a time."""
    total = pc.millisecond(array)
    for more in (pc.microsecond, pc.nanosecond)[: digits // 3 - 1]:
        total = pc.add(pc.multiply(total, 1000), more(array))
    return total


def local_time(call: Call, array: pa.Array) -> pa.Array:
    return pc.local_timestamp(array)


local_year = partial(_local, pc.year)
local_quarter = partial(_local, pc.quarter)
local_month = partial(_local, pc.month)
local_day = partial(_local, pc.day)
local_weekday = partial(_local, partial(pc.day_of_week, count_from_zero=False, week_start=1))
local_ordinal_day = partial(_local, pc.day_of_year)
local_hour = partial(_local, pc.hour)
local_minute = partial(_local, pc.minute)
local_second = partial(_local, lambda array: pc.second(pc.local_timestamp(array)))  # pc.second leaves the offset out
local_millisecond = partial(_fraction, 3)
local_microsecond = partial(_fraction, 6)
local_nanosecond = partial(_fraction, 9)


# --- lists and structs -------------------------------------------------------------------------------------------


def list_len(call: Call, array: pa.Array) -> pa.Array:
    """The number of elements of each list, null for a null list."""
    found = extents(array)
    return pa.array(found.sizes, pa.int64(), mask=~found.valid)


def list_get(call: Call, array: pa.Array) -> pa.Array:
    (number,) = call.params
    assert isinstance(number, int)
    return element(array, number)


def make_struct(call: Call, *arrays: pa.Array) -> pa.Array:
    return pa.StructArray.from_arrays(arrays, fields=list(type_of(call).arrow))


def struct_field(call: Call, array: pa.Array) -> pa.Array:
    return pc.struct_field(array, [array.type.get_field_index(call.params[0])])


def element(array: pa.Array, number: int) -> pa.Array:
    """Element `number` of each list, counted from 0 or, if negative, from the end; null where there is none."""
    found = extents(array)
    there = found.valid & ((found.sizes > number) if number >= 0 else (found.sizes >= -number))
    place = found.starts + number + (0 if number >= 0 else found.sizes)
    return taken(found.values, pa.array(np.where(there, place, 0), pa.int64(), mask=~there))
