"""What lowerings hand on: a Value, the Row it belongs to, the Bindings that name columns.

A binding says how a column is computed; it is lowered where a row first asks for it, once a loop
body. A column that a later filter makes unneeded is never computed, and an expression that stands
under several names is lowered once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llvmlite import ir

from scalein.dtypes import DType, Kind
from scalein.ir.exprs import Expr
from scalein.llvm_backend.fn import F32, F64, I1, I8, I16, I32, I64, I128, Fn, const

if TYPE_CHECKING:
    from scalein.llvm_backend.materialize import MaterializedColumn


@dataclass(frozen=True, slots=True)
class Str:
    """A string: where its bytes are and how many. Never null-terminated."""

    ptr: ir.Value
    size: ir.Value  # i64, bytes


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a row. `valid` None: it cannot be null, and no code is made for it.

    Where `valid` is false, `data` is anything of its type: every use must be total.
    """

    data: ir.Value | Str
    valid: ir.Value | None = None

    @property
    def number(self) -> ir.Value:
        """The data of anything but a string: one register."""
        assert not isinstance(self.data, Str)
        return self.data

    @property
    def string(self) -> Str:
        assert isinstance(self.data, Str)
        return self.data


@dataclass(eq=False, slots=True)
class Binding:
    """How to compute a column for a row; compared by identity."""

    make: Callable[[Row], Value]
    column: tuple[Expr, Env] | None = None  # of a column in terms of others, instead of `make`
    needs: tuple[MaterializedColumn, ...] = ()  # costly columns below it, computed before the loop that reads it
    # Bindings of one shape make the same code but for their names, the first words of slots and fields.
    shape: object = None
    names: tuple[str, ...] = ()


Env = Mapping[str, Binding]


@dataclass(slots=True)
class Row:
    """One row inside a loop body: its position in each input, and what has been computed for it."""

    f: Fn
    k: ir.Value  # position among the block's live rows
    offsets: Mapping[str, Callable[[ir.Value], ir.Value]]  # input -> row number from k
    live: ir.Value | None = None  # None: every row of the loop is live
    _known: dict[int, Value] = field(default_factory=dict)
    _rows: dict[str, ir.Value] = field(default_factory=dict)

    def get(self, binding: Binding) -> Value:
        found = self.known(binding)
        return self.remember(binding, binding.make(self)) if found is None else found

    def known(self, binding: Binding) -> Value | None:
        """Its value, if it has been computed for this row."""
        return self._known.get(id(binding))

    def remember(self, binding: Binding, value: Value) -> Value:
        self._known[id(binding)] = value
        return value

    def offset(self, source: str) -> ir.Value:
        """Row number in an input."""
        found = self._rows.get(source)
        if found is None:
            found = self._rows[source] = self.offsets[source](self.k)
        return found


_TYPES = {
    Kind.BOOL: I1, Kind.I8: I8, Kind.U8: I8, Kind.I16: I16, Kind.U16: I16, Kind.I32: I32, Kind.U32: I32,
    Kind.I64: I64, Kind.U64: I64, Kind.F32: F32, Kind.F64: F64, Kind.DATE: I32, Kind.TS: I64, Kind.DUR: I64,
    Kind.DATE64: I64, Kind.DEC: I128,
}  # fmt: skip


def register_type(dtype: DType) -> ir.Type:
    """The LLVM type of a value in a register; a bool is one bit."""
    if dtype.kind is Kind.TIME:
        return I32 if dtype.bits == 32 else I64
    return _TYPES[dtype.kind]


def memory_type(dtype: DType) -> ir.Type:
    """The LLVM type of a value in records and output buffers; a bool is a byte."""
    return I8 if dtype.kind is Kind.BOOL else register_type(dtype)


def to_memory(f: Fn, data: ir.Value) -> ir.Value:
    return f.b.zext(data, I8) if data.type == I1 else data


def from_memory(f: Fn, data: ir.Value, dtype: DType) -> ir.Value:
    return f.b.icmp_unsigned("!=", data, const(0, I8)) if dtype.kind is Kind.BOOL else data


def zero(dtype: DType) -> ir.Value:
    typ = register_type(dtype)
    return const(0.0 if dtype.is_float else 0, typ)


def canonical(f: Fn, value: Value, dtype: DType) -> Value:
    """A fixed-width value as the integer that stands for it."""
    b, data = f.b, value.number
    if dtype.is_float:
        nan = b.fcmp_unordered("uno", data, data)
        data = b.fadd(data, const(0.0, data.type))  # -0.0 + 0.0 = 0.0
        data = b.select(nan, const(float("nan"), data.type), data)
        data = b.bitcast(data, I32 if data.type == F32 else I64)
    else:
        data = to_memory(f, data)
    if value.valid is not None:
        data = b.select(value.valid, data, const(0, data.type))
    return Value(data, value.valid)
