"""The types a flow computes with, and their Arrow equals.

A `DType` is what an expression has; how a source stores it (plain, large, view or dictionary
strings) matters to the reader of a batch and to nobody else. Strings remember the Arrow type
they come out as; dictionaries come out as plain strings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import pyarrow as pa

from scalein.errors import WrongType


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


SIGNED = (Kind.I8, Kind.I16, Kind.I32, Kind.I64)
UNSIGNED = (Kind.U8, Kind.U16, Kind.U32, Kind.U64)
INTS = SIGNED + UNSIGNED
FLOATS = (Kind.F32, Kind.F64)
NUMBERS = INTS + FLOATS
TIMES = (Kind.TS, Kind.DATE, Kind.DUR)

# Bits of one value in a fixed-width buffer; strings have no fixed width.
WIDTH = {
    Kind.BOOL: 1, Kind.I8: 8, Kind.I16: 16, Kind.I32: 32, Kind.I64: 64,
    Kind.U8: 8, Kind.U16: 16, Kind.U32: 32, Kind.U64: 64, Kind.F32: 32, Kind.F64: 64,
    Kind.DATE: 32, Kind.TS: 64, Kind.DUR: 64,
}  # fmt: skip

UNITS_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}


@dataclass(frozen=True, slots=True)
class DType:
    """A kind, with unit and zone for times and the Arrow form for strings.

    >>> DType(Kind.TS, unit="ms")
    timestamp[ms]
    """

    kind: Kind
    unit: str = ""
    tz: str = ""
    form: str = ""  # strings only: "large" or "view"; "" is pa.string()

    def __repr__(self) -> str:
        inside = ", ".join(part for part in (self.unit, self.tz) if part)
        return f"{self.kind.value}[{inside}]" if inside else self.kind.value

    @property
    def is_int(self) -> bool:
        return self.kind in INTS

    @property
    def is_signed(self) -> bool:
        return self.kind in SIGNED or self.kind in TIMES

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
    def bits(self) -> int:
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
            case _:
                return _ARROW[self.kind]

    def int_range(self) -> tuple[int, int]:
        """Smallest and greatest value of an integer-like type."""
        if self.is_signed:
            return -(1 << (self.bits - 1)), (1 << (self.bits - 1)) - 1
        return 0, (1 << self.bits) - 1


_ARROW = {
    Kind.BOOL: pa.bool_(), Kind.I8: pa.int8(), Kind.I16: pa.int16(), Kind.I32: pa.int32(), Kind.I64: pa.int64(),
    Kind.U8: pa.uint8(), Kind.U16: pa.uint16(), Kind.U32: pa.uint32(), Kind.U64: pa.uint64(),
    Kind.F32: pa.float32(), Kind.F64: pa.float64(), Kind.DATE: pa.date32(),
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
    if pa.types.is_dictionary(arrow) and from_arrow_type_or_none(arrow.value_type) in (STR, _LARGE, _VIEW):
        return STR
    found = from_arrow_type_or_none(arrow)
    if found is None:
        raise WrongType(f"column {column!r} has a type that scalein does not compute with yet", found=arrow,
                        hint="drop or cast the column before handing the data over")
    return found


_LARGE = DType(Kind.STR, form="large")
_VIEW = DType(Kind.STR, form="view")


def from_arrow_type_or_none(arrow: pa.DataType) -> DType | None:
    if arrow in _KINDS:
        return DType(_KINDS[arrow])
    if pa.types.is_string(arrow):
        return STR
    if pa.types.is_large_string(arrow):
        return _LARGE
    if pa.types.is_string_view(arrow):
        return _VIEW
    if pa.types.is_timestamp(arrow):
        return DType(Kind.TS, unit=arrow.unit, tz=arrow.tz or "")
    if pa.types.is_duration(arrow):
        return DType(Kind.DUR, unit=arrow.unit)
    return None


@dataclass(frozen=True, slots=True)
class Field:
    """A named column: `price: f64?` may hold nulls, `price: f64` may not."""

    name: str
    dtype: DType
    nullable: bool = True

    def __repr__(self) -> str:
        return f"{self.name}: {self.dtype!r}{'?' if self.nullable else ''}"


@dataclass(frozen=True, slots=True)
class Schema:
    """Fields in order, with distinct names."""

    fields: tuple[Field, ...]

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
        return next((field for field in self.fields if field.name == name), None)

    def __getitem__(self, name: str) -> Field:
        found = self.get(name)
        if found is None:
            raise KeyError(name)
        return found

    @property
    def arrow(self) -> pa.Schema:
        return pa.schema([pa.field(f.name, f.dtype.arrow, f.nullable) for f in self.fields])

    @staticmethod
    def from_arrow(arrow: pa.Schema) -> Schema:
        return Schema(tuple(Field(f.name, from_arrow_type(f.type, f.name), f.nullable) for f in arrow))
