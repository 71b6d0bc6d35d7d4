"""Lossless conversion: from the type that a file has for a column to the type in which the column is read.

    integers       to wider ones; of up to 32 bits to float64
    floats         to wider ones
    decimals       to more digits on both sides of the point
    timestamps     to another unit, if both have a zone or both have none; date64 to date32
    text           between string, large_string, string_view and dictionaries of them; binary likewise
    lists, structs and maps   by their elements

Types decide whether all values fit. The exceptions are times of a finer unit and date64: there a value that would lose
digits is an error when it is read.
"""

from __future__ import annotations

import pyarrow as pa

from scalein.errors import BadData

_TEXTS = (pa.string(), pa.large_string(), pa.string_view())
_BINARIES = (pa.binary(), pa.large_binary(), pa.binary_view())
_EXACT_IN_FLOAT64 = 32  # bits of an integer


def converts(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a column of one type can be read as another, without loss.

    >>> converts(pa.timestamp("ms"), pa.timestamp("us")), converts(pa.int64(), pa.int32())
    (True, False)
    """
    is_ = pa.types
    if found == wanted:
        return True
    if is_.is_dictionary(wanted):
        if is_.is_dictionary(found):
            return bool(wanted.index_type.bit_width >= found.index_type.bit_width) and converts(
                found.value_type, wanted.value_type)
        return bool(wanted.index_type.bit_width >= 32) and converts(found, wanted.value_type)
    if is_.is_dictionary(found) or is_.is_run_end_encoded(found):
        return converts(found.value_type, wanted)
    if is_.is_integer(found):
        return _integer_converts(found, wanted)
    if is_.is_floating(found):
        return bool(is_.is_floating(wanted)) and wanted.bit_width >= found.bit_width
    if is_.is_decimal(found):
        return bool(is_.is_decimal(wanted)) and wanted.scale >= found.scale and (
            wanted.precision - wanted.scale >= found.precision - found.scale)
    if is_.is_timestamp(found):
        return bool(is_.is_timestamp(wanted)) and (found.tz is None) == (wanted.tz is None)
    if found in _TEXTS:
        return wanted in _TEXTS
    if found in _BINARIES or is_.is_fixed_size_binary(found):
        return wanted in _BINARIES
    return (found, wanted) == (pa.date64(), pa.date32()) or _nested_converts(found, wanted)


def _integer_converts(found: pa.DataType, wanted: pa.DataType) -> bool:
    is_ = pa.types
    if is_.is_integer(wanted):
        is_signed = bool(is_.is_signed_integer(wanted))
        spare_bits = wanted.bit_width - found.bit_width
        return spare_bits >= 0 if is_signed == is_.is_signed_integer(found) else is_signed and spare_bits > 0
    if is_.is_decimal(wanted):  # of up to 3, 5, 10 and 20 digits
        return bool(wanted.precision - wanted.scale >= {8: 3, 16: 5, 32: 10, 64: 20}[found.bit_width])
    return bool(wanted == pa.float64() and found.bit_width <= _EXACT_IN_FLOAT64)


def _nested_converts(found: pa.DataType, wanted: pa.DataType) -> bool:
    is_ = pa.types
    if is_.is_map(found):
        return bool(is_.is_map(wanted)) and converts(found.key_type, wanted.key_type) and converts(
            found.item_type, wanted.item_type)
    if is_.is_struct(found):
        return bool(is_.is_struct(wanted)) and [each.name for each in found] == [each.name for each in wanted] and all(
            converts(a.type, b.type) for a, b in zip(found, wanted, strict=True))
    if is_.is_list(found) or is_.is_large_list(found):
        return bool(is_.is_list(wanted) or is_.is_large_list(wanted)) and converts(found.value_type, wanted.value_type)
    return False


def converted(column: pa.Array, field: pa.Field, path: str) -> pa.Array:
    """A column of a file in the type of `field`, for types that `converts` accepts; a zone is only another label.

    >>> converted(pa.array([1], pa.int32()), pa.field("x", pa.int64()), "a.parquet").type
    DataType(int64)
    """
    wanted, found = field.type, column.type
    if found == wanted:
        return column
    try:
        if pa.types.is_timestamp(found) and pa.types.is_timestamp(wanted):
            if found.unit != wanted.unit:
                column = column.cast(pa.timestamp(wanted.unit, found.tz))
            return column.view(wanted)
        if pa.types.is_dictionary(wanted) and not pa.types.is_dictionary(found):
            column = column.cast(wanted.value_type).dictionary_encode()
        if pa.types.is_dictionary(found) and not pa.types.is_dictionary(wanted):
            column = column.dictionary_decode()  # a cast to views is not known
        if pa.types.is_run_end_encoded(found):
            from pyarrow.compute import run_end_decode

            column = run_end_decode(column)
        return column.cast(wanted)
    except pa.ArrowException as error:
        raise BadData(f"column {field.name!r} of {path} is {found}, and a value does not convert to {wanted}",
                      found=error) from None
