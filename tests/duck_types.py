"""DuckDB's names for our types, and how values cross over and come back.

Times of every kind cross over as integers, the count of their units. Decimals and binaries are DuckDB's own; a decimal
of negative scale has no equal there, and its `CAST` of one to an integer rounds, so `cast` truncates first.
"""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa

from scalein.dtypes import TIMES, DType, Kind, element_of, from_arrow_type_or_none, ticks_per_day
from tests.oracle.values import from_arrow, to_arrow


class Untranslatable(Exception):
    """DuckDB cannot mean the same; the text says what."""


_NAMES = {
    Kind.BOOL: "BOOLEAN", Kind.I8: "TINYINT", Kind.I16: "SMALLINT", Kind.I32: "INTEGER", Kind.I64: "BIGINT",
    Kind.U8: "UTINYINT", Kind.U16: "USMALLINT", Kind.U32: "UINTEGER", Kind.U64: "UBIGINT",
    Kind.F32: "FLOAT", Kind.F64: "DOUBLE", Kind.STR: "VARCHAR", Kind.BIN: "BLOB",
}  # fmt: skip

F32_LIMIT = 3.4028235677973366e38  # halfway behind the greatest float32: from here on it rounds to inf


def sql_type(dtype: DType) -> str:
    """The type in which DuckDB computes values of ours."""
    if dtype.kind in TIMES:
        return "BIGINT" if dtype.bits == 64 else "INTEGER"
    if dtype.is_decimal:
        if not 0 <= dtype.scale <= dtype.precision:
            raise Untranslatable(f"{dtype!r}")
        return f"DECIMAL({dtype.precision}, {dtype.scale})"
    return _NAMES[dtype.kind]


def _crossing(dtype: DType) -> pa.DataType:
    """The Arrow type in which a column goes to DuckDB and comes back."""
    if dtype.kind in TIMES:
        return pa.int64() if dtype.bits == 64 else pa.int32()
    if dtype.is_bytes:
        return pa.string() if dtype.is_string else pa.binary()
    return dtype.arrow if dtype.nested is None else _nested(dtype.nested)


def _nested(arrow: pa.DataType) -> pa.DataType:
    """A nested type as DuckDB has it: one kind of list, and nothing inside that crosses over as an integer."""
    if pa.types.is_struct(arrow):
        return pa.struct([field.with_type(_nested(field.type)) for field in arrow])
    if (element := element_of(DType(Kind.NESTED, nested=arrow))) is not None:
        return pa.list_(_nested(element.type))
    found = from_arrow_type_or_none(arrow)
    if found is None or not (found.is_number or found.is_string or found.kind is Kind.BOOL):
        raise Untranslatable(f"{arrow} in a nested column")
    return found.arrow if not found.is_string else pa.string()


def crossed(column: pa.ChunkedArray, dtype: DType) -> pa.Array:
    """A column of ours as DuckDB gets it."""
    if dtype.is_decimal:
        sql_type(dtype)  # some have none
    values = from_arrow(column)
    return to_arrow(values, dtype) if dtype.is_decimal else pa.array(values, _crossing(dtype))


def restored(column: pa.ChunkedArray, dtype: DType) -> pa.Array:
    """A column of DuckDB's as we have it."""
    crossing = _crossing(dtype)
    plain = column.cast(crossing).combine_chunks()
    if dtype.kind in TIMES:
        return plain.view(dtype.arrow)
    return plain if crossing == dtype.arrow else pa.array(plain.to_pylist(), dtype.arrow)


def literal(value: object, dtype: DType) -> str:
    """SQL of a physical value."""
    if value is None:
        text = "NULL"
    elif dtype.is_decimal:
        digits = tuple(map(int, str(abs(int(str(value))))))
        text = f"'{Decimal((int(str(value).startswith('-')), digits, -dtype.scale)):f}'"
    elif isinstance(value, bool | int):
        text = str(value)
    elif isinstance(value, float):
        text = f"CAST('{value!r}' AS DOUBLE)"
    elif isinstance(value, bytes):
        text = f"from_hex('{value.hex()}')"
    else:
        text = "'" + str(value).replace("'", "''") + "'"
    return f"CAST({text} AS {sql_type(dtype)})"


def floordiv(a: str, b: str) -> str:
    """Floored quotient of whole numbers; DuckDB's // truncates and its % has the sign of the dividend."""
    mixed = f"({a}::HUGEINT % {b}::HUGEINT <> 0 AND ({a} < 0) <> ({b} < 0))"
    return f"({a}::HUGEINT // {b}::HUGEINT - CASE WHEN {mixed} THEN 1 ELSE 0 END)"


def cast(x: str, source: DType, target: DType) -> str:
    """SQL of a value that DuckDB's own CAST takes to the target."""
    if source.is_bytes or target.is_bytes:
        return _cast_bytes(x, source, target)
    if source.is_float and target.is_decimal:  # DuckDB adds a billionth first
        raise Untranslatable(f"cast from {source!r} to {target!r}")
    if source.is_decimal and target.is_int:
        return f"trunc({x})"
    if target.kind is Kind.BOOL:
        return f"({x} <> 0)"
    if target.kind is Kind.F32 and source.kind is Kind.F64:
        return f"CASE WHEN isfinite({x}) AND abs({x}) >= {F32_LIMIT!r} THEN sign({x}) * 'inf'::DOUBLE ELSE {x} END"
    if target.is_float or target.is_decimal:
        return x
    if source.is_float:
        return f"trunc({x})"
    return _cast_time(x, source, target)


def _cast_bytes(x: str, source: DType, target: DType) -> str:
    if source.is_string and target.kind is Kind.BIN:
        x = f"encode({x})"
    elif source.kind is not target.kind and not (source.is_int or source.kind is Kind.BOOL):
        raise Untranslatable(f"cast from {source!r} to {target!r}")
    if target.form != "fixed":
        return x
    return f"CASE WHEN octet_length({x}) <> {target.width} THEN error('impossible cast') ELSE {x} END"


def _cast_time(x: str, source: DType, target: DType) -> str:
    if source.kind not in TIMES and target.kind is Kind.TIME:
        return f"CASE WHEN {x} < 0 OR {x} >= {ticks_per_day(target)} THEN error('impossible cast') ELSE {x} END"
    if source.kind not in TIMES and target.kind is Kind.DATE64:
        return f"CASE WHEN {x} % {ticks_per_day(target)} <> 0 THEN error('impossible cast') ELSE {x} END"
    if source.kind not in TIMES or target.kind not in TIMES:
        return x
    have, want = ticks_per_day(source), ticks_per_day(target)
    if target.kind is Kind.TIME and source.tz not in ("", "UTC"):
        raise Untranslatable("the time of the day in a zone")
    if target.kind is Kind.TIME:
        x = f"({x} - {have} * {floordiv(x, str(have))})"
    found = floordiv(f"({x}::HUGEINT * {want})", str(have))
    return f"({floordiv(found, str(want))} * {want})" if target.kind is Kind.DATE64 else found
