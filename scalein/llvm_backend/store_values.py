"""Values and texts of stored records: where they are, and what a row, or a newer record, does to them.

A value of a fixed size is changed in place. A long text never is: a new one is appended to its group's text.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from scalein.dtypes import DType
from scalein.ir.tables import AccKind
from scalein.layout import GROUPS, INLINE_BYTES, TEXT_AT
from scalein.llvm_backend import accumulators
from scalein.llvm_backend.cells import ordering, read_cell
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.fn import I1, I64, PTR, Fn, const
from scalein.llvm_backend.functions import arithmetic, decimals
from scalein.llvm_backend.keys import first_bytes, string_words
from scalein.llvm_backend.values import Str, Value, to_memory


def header_word(f: Fn, header: ir.Value, number: int) -> ir.Value:
    """Where a word of a key group's header is: see `GROUP_WORDS`."""
    return f.at(header, const(number * GROUPS), I64)


# --- texts


def long_bytes(f: Fn, size: ir.Value) -> ir.Value:
    """Bytes that a string takes outside of its record."""
    return f.b.select(f.b.icmp_unsigned(">", size, const(INLINE_BYTES)), size, const(0))


def store_text(f: Fn, header: ir.Value, place: ir.Value, first: ir.Value, second: ir.Value) -> None:
    """A string's 16 bytes; a long one is appended to the group's text."""
    b = f.b
    f.store(first, place, align=8)
    f.store(second, f.byte_at(place, 8), align=8)
    size = b.and_(first, const(0xFFFFFFFF))
    with f.when(b.icmp_unsigned(">", size, const(INLINE_BYTES))):
        at = header_word(f, header, TEXT_AT)
        target = b.load(at, typ=PTR)
        source = b.load(f.byte_at(place, 8), typ=PTR, align=8)
        f.call("llvm.memcpy.p0.p0.i64", ir.VoidType(), [target, source, size, const(0, I1)])
        f.store(target, f.byte_at(place, 8), align=8)
        f.store(f.byte_at(target, size), at)


# --- values


@dataclass(frozen=True, slots=True)
class ValuePlace:
    """A value in a record: where it is, of which type, and the header of the group that keeps its text."""

    code: Code
    name: str
    place: ir.Value
    dtype: DType
    header: ir.Value

    def read(self) -> ir.Value | Str:
        return read_cell(self.code.f, self.place, self.dtype)

    def write(self, data: ir.Value | Str) -> None:
        f = self.code.f
        if isinstance(data, Str):
            store_text(f, self.header, self.place, *string_words(f, data, *first_bytes(self.code, data)))
        else:
            f.store(to_memory(f, data), self.place)

    def write_if(self, condition: ir.Value, data: ir.Value | Str) -> None:
        f = self.code.f
        if isinstance(data, Str):
            with f.when(condition):
                self.write(data)
        else:
            new = to_memory(f, data)
            f.store(f.b.select(condition, new, f.b.load(self.place, typ=new.type)), self.place)


def update(function: str, into: ValuePlace, is_null: ir.Value, given: Value) -> ir.Value:
    """Let a newer value into a record's; `is_null` says whether that has one. Gives whether it is null afterwards.

    A null changes nothing, except that `replace` takes it like any other value.
    """
    f, b = into.code.f, into.code.f.b
    valid = const(1, I1) if given.valid is None else given.valid
    match function:
        case "replace":
            into.write_if(valid, given.data)
            return b.not_(valid)
        case "first":
            into.write_if(b.and_(valid, is_null), given.data)
        case "last":
            into.write_if(valid, given.data)
        case "sum":
            counts = b.and_(valid, b.not_(is_null))
            total = _add(into, into.read(), given.number, counts)
            into.write_if(valid, b.select(is_null, given.number, total))
        case "min" | "max" if into.dtype.is_bytes:
            wins = f.var(I1, valid)
            with f.when(b.and_(valid, b.not_(is_null))):
                less, tie = ordering(into.code, given.data, into.place, into.dtype)
                wins.set(less if function == "min" else b.not_(b.or_(less, tie)))
            into.write_if(wins.get(), given.data)
        case "min" | "max":
            best = accumulators.better(f, AccKind(function), into.read(), given.number, into.dtype)
            into.write_if(valid, b.select(is_null, given.number, best))
        case _:
            raise AssertionError(function)
    return b.and_(is_null, b.not_(valid))


def _add(into: ValuePlace, old: ir.Value, new: ir.Value, counts: ir.Value) -> ir.Value:
    """The sum of two values; fails, where it counts, if the column's type cannot hold it."""
    code, f, b, dtype = into.code, into.code.f, into.code.f.b, into.dtype
    if dtype.is_decimal:
        total = b.add(old, new)
        code.fail(f"overflow in the sum of {into.name!r}", b.and_(counts, decimals.outside(f, total, dtype.precision)))
        return total

    def fail(what: str, wrong: ir.Value) -> None:
        code.fail(f"{what} in the sum of {into.name!r}", b.and_(counts, wrong))

    return arithmetic.add(f, [old, new], dtype, fail)


def count(into: ValuePlace, is_null: ir.Value, valid: ir.Value | None) -> ir.Value:
    """Count a row in; without one there are none yet, which is not null."""
    b = into.code.f.b
    old = into.read()
    assert not isinstance(old, Str)
    one = const(1, old.type) if valid is None else b.zext(valid, old.type)
    into.write(_add(into, b.select(is_null, const(0, old.type), old), one, const(1, I1)))
    return const(0, I1)


def is_set(f: Fn, word: ir.Value, bits: int) -> ir.Value:
    return f.b.icmp_unsigned("!=", f.b.and_(word, const(bits)), const(0))

