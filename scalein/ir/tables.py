"""Keyed state as a kernel sees it: keys, accumulators, outputs, and the record that holds them.

`place_state` decides what a table has; its `layout` gives the bytes. The store that replaces the memory behind it
reads the same description.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum

from scalein.dtypes import F64, I64, DType, Field, Kind, Schema
from scalein.ir import ops
from scalein.ir.exprs import Expr, type_of
from scalein.layout import RecordLayout, Slot, size_of


class AccKind(Enum):
    """What a group remembers. Finished by `Output`s; several outputs may share one."""

    ROWS = "rows"
    VALID = "valid"
    ISUM = "isum"
    FSUM = "fsum"
    MIN = "min"
    MAX = "max"
    MOMENTS = "moments"
    FIRST = "first"
    LAST = "last"
    ARG_MIN = "arg_min"
    ARG_MAX = "arg_max"
    CHAIN = "chain"


@dataclass(frozen=True, slots=True)
class Acc:
    """One accumulator: its kind and the expressions it takes."""

    kind: AccKind
    arg: Expr | None = None
    by: Expr | None = None

    @property
    def dtype(self) -> DType:
        return I64 if self.arg is None else type_of(self.arg)


@dataclass(frozen=True, slots=True)
class Output:
    """An aggregate of the user's, computed from accumulators when a group is emitted."""

    name: str
    fn: str
    dtype: DType
    nullable: bool
    accs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Key:
    """A group key. Dictionary strings are kept as ids of the run's dictionary (`coded`)."""

    name: str
    dtype: DType
    nullable: bool
    coded: bool = False

    @property
    def stored(self) -> DType:
        return DType(Kind.I32) if self.coded else self.dtype


class Slicing(Enum):
    """Where a window lives in the state."""

    NONE = "none"
    KEY = "key"  # the slice's start is one more key
    RING = "ring"  # a ring of slices in each record


@dataclass(frozen=True)
class Table:
    """Keyed state: what place_state decided."""

    keys: tuple[Key, ...]
    accs: tuple[Acc, ...]
    outputs: tuple[Output, ...]
    slicing: Slicing = Slicing.NONE
    window: ops.Window | None = None
    slice_size: int = 0
    ring: int = 0

    @property
    def has_nulls(self) -> bool:
        return any(key.nullable for key in self.keys)

    @property
    def layout(self) -> RecordLayout:
        fixed = [Slot("hash", 8)] if self.keys or self.window else []
        if self.has_nulls:
            fixed.append(Slot("nulls", 8))
        fixed += [Slot(f"key{k}", size_of(key.stored)) for k, key in enumerate(self.keys)]
        if self.slicing is Slicing.KEY:
            fixed.append(Slot("slice", 8))
        fields = [slot for k, acc in enumerate(self.accs) for slot in acc_slots(k, acc)]
        if self.slicing is Slicing.RING:
            return RecordLayout(tuple(fixed), tuple(fields), self.ring)
        return RecordLayout(tuple(fixed + fields))

    @property
    def schema(self) -> Schema:
        fields = [Field(k.name, k.dtype, k.nullable) for k in self.keys]
        if self.window is not None:
            dtype = type_of(self.window.time)
            fields += [Field("window_start", dtype, False), Field("window_end", dtype, False)]
        return Schema(tuple(fields + [Field(o.name, o.dtype, o.nullable) for o in self.outputs]))


def acc_slots(number: int, acc: Acc) -> list[Slot]:
    """The fields of an accumulator, with the values that mean "no row yet"."""
    name = f"acc{number}"
    value = Slot(f"{name}.value", size_of(acc.dtype))
    match acc.kind:
        case AccKind.ROWS | AccKind.VALID:
            return [Slot(name, 8)]
        case AccKind.ISUM:
            return [Slot(name, 16)]
        case AccKind.FSUM:
            return [Slot(name, 8)]
        case AccKind.MIN | AccKind.MAX:
            return [Slot(name, value.size, extreme(acc.dtype, least=acc.kind is AccKind.MAX))]
        case AccKind.MOMENTS:
            return [Slot(f"{name}.n", 8), Slot(f"{name}.mean", 8), Slot(f"{name}.m2", 8)]
        case AccKind.FIRST | AccKind.LAST:
            worst = 2**63 - 1 if acc.kind is AccKind.FIRST else -1
            return [Slot(f"{name}.row", 8, worst.to_bytes(8, "little", signed=True)), value, Slot(f"{name}.ok", 1)]
        case AccKind.ARG_MIN | AccKind.ARG_MAX:
            by = type_of(acc.by) if acc.by is not None else F64
            return [Slot(f"{name}.row", 8, (-1).to_bytes(8, "little", signed=True)),
                    Slot(f"{name}.by", size_of(by)), value, Slot(f"{name}.ok", 1)]
        case AccKind.CHAIN:
            minus = (-1).to_bytes(8, "little", signed=True)
            return [Slot(f"{name}.head", 8, minus), Slot(f"{name}.tail", 8, minus)]


def extreme(dtype: DType, *, least: bool) -> bytes:
    """The least or greatest value of a type, as bytes: where max and min start. NaN is the greatest."""
    if dtype.is_float:
        return struct.pack("<f" if dtype.bits == 32 else "<d", float("-inf") if least else float("nan"))
    if dtype.kind is Kind.BOOL:
        return b"\0" if least else b"\1"
    low, high = dtype.int_range()
    return (low if least else high).to_bytes(dtype.bits // 8, "little", signed=dtype.is_signed)
