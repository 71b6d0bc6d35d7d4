"""The types a flow computes with, and their Arrow equals.

A `DType` is what an expression has; how a source stores it (plain, large, view or dictionary
strings) matters to the reader of a batch only. Strings remember the Arrow type
they come out as; dictionaries come out as their values. Lists, structs and whatever else has no
arithmetic of its own are NESTED: they are passed through, and unpacked by pyarrow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TypeVar

import pyarrow as pa

from scalein.errors import WrongType

Data = TypeVar("Data", pa.Table, pa.RecordBatch)


class Kind(Enum):
    """What a value is; the number of bits lives in `WIDTH`."""

    BOOL = "bool"
    I8 = "i8"
    I16 = "i16"
    I32 = "i32"
    I64 = "i64"
    U8 = "u8"
    U16 = "u16"
    U32 = "u32"
    U64 = "u64"
    F32 = "f32"
    F64 = "f64"
    STR = "str"
    DATE = "date"
    TS = "timestamp"
    DUR = "duration"
    DATE64 = "date64"  # milliseconds, whole days
    TIME = "time"  # of the day
    DEC = "decimal"
    BIN = "binary"
    NESTED = "nested"


SIGNED = (Kind.I8, Kind.I16, Kind.I32, Kind.I64)
UNSIGNED = (Kind.U8, Kind.U16, Kind.U32, Kind.U64)
INTS = SIGNED + UNSIGNED
FLOATS = (Kind.F32, Kind.F64)
NUMBERS = INTS + FLOATS
TIMES = (Kind.TS, Kind.DATE, Kind.DUR, Kind.DATE64, Kind.TIME)

# Bits of one value in a fixed-width buffer; a time of day has 32 or 64 by its unit, bytes and nested values none.
WIDTH = {
    Kind.BOOL: 1, Kind.I8: 8, Kind.I16: 16, Kind.I32: 32, Kind.I64: 64,
    Kind.U8: 8, Kind.U16: 16, Kind.U32: 32, Kind.U64: 64, Kind.F32: 32, Kind.F64: 64,
    Kind.DATE: 32, Kind.TS: 64, Kind.DUR: 64, Kind.DATE64: 64, Kind.DEC: 128,
}  # fmt: skip

UNITS_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
MAX_PRECISION = 38  # digits that 128 bits hold, whatever they are


@dataclass(frozen=True, slots=True)
class DType:
    """A kind, with its parameters.

    >>> DType(Kind.TS, unit="ms")
    timestamp[ms]
    >>> DType(Kind.DEC, precision=12, scale=2)
    decimal[12, 2]
    """

    kind: Kind
    unit: str = ""
    tz: str = ""
    form: str = ""  # strings and binaries only: "large", "view" or "fixed"; "" is pa.string() or pa.binary()
    precision: int = 0  # decimals: digits, at most 38
    scale: int = 0  # decimals: digits after the point, may be negative
    width: int = 0  # fixed-size binaries: bytes
    nested: pa.DataType | None = None  # NESTED only: the Arrow type

    def __repr__(self) -> str:
        if self.nested is not None:
            return str(self.nested)
        if self.kind is Kind.DEC:
            return f"decimal[{self.precision}, {self.scale}]"
        width = str(self.width) if self.form == "fixed" else ""
        inside = ", ".join(part for part in (self.unit, self.tz, width) if part)
        return f"{self.kind.value}[{inside}]" if inside else self.kind.value

    @property
    def is_int(self) -> bool:
        return self.kind in INTS

    @property
    def is_signed(self) -> bool:
        return self.kind in SIGNED or self.kind in TIMES or self.kind is Kind.DEC

    @property
    def is_float(self) -> bool:
        return self.kind in FLOATS

    @property
    def is_number(self) -> bool:
        return self.kind in NUMBERS

    @property
    def is_string(self) -> bool:
        return self.kind is Kind.STR

    @property
    def is_bytes(self) -> bool:
        """Whether a value is a pointer and a size: text or binary."""
        return self.kind in (Kind.STR, Kind.BIN)

    @property
    def is_loose(self) -> bool:
        """Whether values have variable length, stored consecutively."""
        return self.is_bytes and self.form != "fixed"

    @property
    def is_decimal(self) -> bool:
        return self.kind is Kind.DEC

    @property
    def is_nested(self) -> bool:
        return self.kind is Kind.NESTED

    @property
    def bits(self) -> int:
        if self.kind is Kind.TIME:
            return 32 if self.unit in ("s", "ms") else 64
        return WIDTH[self.kind]

    @property
    def arrow(self) -> pa.DataType:
        """The Arrow type that values of this type come out as."""
        match self.kind:
            case Kind.STR:
                return {"": pa.string(), "large": pa.large_string(), "view": pa.string_view()}[self.form]
            case Kind.TS:
                return pa.timestamp(self.unit, tz=self.tz or None)
            case Kind.DUR:
                return pa.duration(self.unit)
            case Kind.TIME:
                return pa.time32(self.unit) if self.bits == 32 else pa.time64(self.unit)
            case Kind.DEC:
                return pa.decimal128(self.precision, self.scale)
            case Kind.BIN:
                return {"": pa.binary(), "large": pa.large_binary(), "view": pa.binary_view(),
                        "fixed": pa.binary(self.width)}[self.form]
            case Kind.NESTED:
                return self.nested
            case _:
                return _ARROW[self.kind]

    def int_range(self) -> tuple[int, int]:
        """Smallest and greatest value of an integer-like type; of a decimal's digits as one integer."""
        if self.is_decimal:
            return 1 - 10**self.precision, 10**self.precision - 1
        if self.is_signed:
            return -(1 << (self.bits - 1)), (1 << (self.bits - 1)) - 1
        return 0, (1 << self.bits) - 1


_ARROW = {
    Kind.BOOL: pa.bool_(), Kind.I8: pa.int8(), Kind.I16: pa.int16(), Kind.I32: pa.int32(), Kind.I64: pa.int64(),
    Kind.U8: pa.uint8(), Kind.U16: pa.uint16(), Kind.U32: pa.uint32(), Kind.U64: pa.uint64(),
    Kind.F32: pa.float32(), Kind.F64: pa.float64(), Kind.DATE: pa.date32(), Kind.DATE64: pa.date64(),
}  # fmt: skip
_KINDS = {arrow: kind for kind, arrow in _ARROW.items()}

BOOL = DType(Kind.BOOL)
I32 = DType(Kind.I32)
I64 = DType(Kind.I64)
U64 = DType(Kind.U64)
F32 = DType(Kind.F32)
F64 = DType(Kind.F64)
STR = DType(Kind.STR)
DATE = DType(Kind.DATE)


def from_arrow_type(arrow: pa.DataType, column: str = "") -> DType:
    """The type of an Arrow column; a dictionary has the type of its values."""
    if pa.types.is_dictionary(arrow):
        values = from_arrow_type(arrow.value_type, column)
        return STR if values.is_string else values
    found = from_arrow_type_or_none(arrow)
    if found is None:
        raise WrongType(f"column {column!r} has a type that scalein does not compute with yet", found=arrow,
                        hint="decimals have 38 digits at most: cast the column to pa.decimal128(38, ...) before"
                        if pa.types.is_decimal(arrow) else "drop or cast the column before handing the data over")
    return found


_BYTES = {
    pa.string(): STR, pa.large_string(): DType(Kind.STR, form="large"), pa.string_view(): DType(Kind.STR, form="view"),
    pa.binary(): DType(Kind.BIN), pa.large_binary(): DType(Kind.BIN, form="large"),
    pa.binary_view(): DType(Kind.BIN, form="view"),
}  # fmt: skip


def from_arrow_type_or_none(arrow: pa.DataType) -> DType | None:
    if arrow in _KINDS:
        return DType(_KINDS[arrow])
    if arrow in _BYTES:
        return _BYTES[arrow]
    if pa.types.is_fixed_size_binary(arrow):
        return DType(Kind.BIN, form="fixed", width=arrow.byte_width)
    if pa.types.is_timestamp(arrow):
        return DType(Kind.TS, unit=arrow.unit, tz=arrow.tz or "")
    if pa.types.is_duration(arrow):
        return DType(Kind.DUR, unit=arrow.unit)
    if pa.types.is_time(arrow):
        return DType(Kind.TIME, unit=arrow.unit)
    if pa.types.is_decimal(arrow) and arrow.bit_width <= 128:  # the narrower ones are widened when they are read
        return DType(Kind.DEC, precision=arrow.precision, scale=arrow.scale)
    if pa.types.is_nested(arrow) or pa.types.is_null(arrow):
        return DType(Kind.NESTED, nested=arrow)
    return None


def alike(a: DType, b: DType) -> bool:
    """Whether two types are one to an expression: the Arrow form of text and binary is no difference."""
    return a == b or (a.kind is b.kind and a.is_loose and b.is_loose)


def element_of(dtype: DType) -> pa.Field | None:
    """The Arrow field of a list's elements, whatever the list's layout; None for what is no list."""
    arrow, is_ = dtype.nested, pa.types
    lists = (is_.is_list, is_.is_large_list, is_.is_fixed_size_list, is_.is_list_view, is_.is_large_list_view)
    return arrow.value_field if arrow is not None and any(test(arrow) for test in lists) else None


def ticks_per_day(dtype: DType) -> int:
    """Units of a time type in a day."""
    if dtype.kind is Kind.DATE:
        return 1
    return 86_400 * UNITS_PER_SECOND["ms" if dtype.kind is Kind.DATE64 else dtype.unit]


def plain_arrow(arrow: pa.DataType) -> pa.DataType:
    """The Arrow type that columns of this type are read as: of encodings only dictionaries of text stay."""
    if pa.types.is_run_end_encoded(arrow):
        return plain_arrow(arrow.value_type)
    if pa.types.is_dictionary(arrow):
        text = from_arrow_type_or_none(arrow.value_type)
        return arrow if text is not None and text.is_string else plain_arrow(arrow.value_type)
    if pa.types.is_decimal(arrow) and arrow.bit_width < 128:
        return pa.decimal128(arrow.precision, arrow.scale)
    return arrow


def as_plain(data: Data) -> Data:
    """The table or batch with its columns as they are read; itself, if they are that already."""
    plain = [pa.field(f.name, plain_arrow(f.type), f.nullable) for f in data.schema]
    if all(field.type == old for field, old in zip(plain, data.schema.types, strict=True)):
        return data
    columns = [_decoded(old, field.type) for old, field in zip(data.columns, plain, strict=True)]
    return type(data).from_arrays(columns, schema=pa.schema(plain))


def _decoded(column: pa.Array | pa.ChunkedArray, arrow: pa.DataType) -> pa.Array | pa.ChunkedArray:
    if isinstance(column, pa.ChunkedArray):
        return pa.chunked_array([_decoded(chunk, arrow) for chunk in column.chunks], arrow)
    if pa.types.is_run_end_encoded(column.type):
        from pyarrow.compute import run_end_decode  # a tenth of the time that `import scalein` may take

        return _decoded(run_end_decode(column), arrow)
    column = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
    return column if column.type == arrow else column.cast(arrow)


@dataclass(frozen=True, slots=True)
class Field:
    """A named column: `price: f64?` may hold nulls, `price: f64` may not."""

    name: str
    dtype: DType
    nullable: bool = True

    def __repr__(self) -> str:
        return f"{self.name}: {self.dtype!r}{'?' if self.nullable else ''}"


@dataclass(frozen=True)
class Schema:
    """Fields in order, with distinct names."""

    fields: tuple[Field, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Field]:
        """The fields, to be looked up."""
        return {field.name: field for field in reversed(self.fields)}

    def __reduce__(self) -> tuple[object, ...]:
        return Schema, (self.fields,)

    def __iter__(self) -> Iterator[Field]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def __repr__(self) -> str:
        return ", ".join(map(repr, self.fields))

    @property
    def names(self) -> list[str]:
        return [field.name for field in self.fields]

    def get(self, name: str) -> Field | None:
        return self.by_name.get(name)

    def __getitem__(self, name: str) -> Field:
        return self.by_name[name]

    @property
    def arrow(self) -> pa.Schema:
        return pa.schema([pa.field(f.name, f.dtype.arrow, f.nullable) for f in self.fields])

    @staticmethod
    def from_arrow(arrow: pa.Schema) -> Schema:
        return Schema(tuple(Field(f.name, from_arrow_type(f.type, f.name), f.nullable) for f in arrow))
