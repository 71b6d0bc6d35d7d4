"""Cells: a value in a record that is replaced now and then, of any type.

Bytes are 16 bytes in the record, as keys are: up to 12 in place, else 4 and a pointer to the heap of the
table's owner. A cell keeps its piece of heap for as long as what comes fits, and takes one of twice the size when
it does not, so that a group whose value changes a million times wastes less than twice its bytes.

A kernel must not run out of heap half-way through a block. `leave_without_room` comes before anything is
changed: there must be space for the worst case, that each row's bytes need a new piece (`needed`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from llvmlite import ir

from scalein.dtypes import DType
from scalein.layout import HEAP_FULL, INLINE_BYTES
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.fn import I1, I32, I64, PTR, Fn, const
from scalein.llvm_backend.functions.compare import compare_floats
from scalein.llvm_backend.functions.strings import order
from scalein.llvm_backend.keys import first_bytes, string_words
from scalein.llvm_backend.readers import stored_string
from scalein.llvm_backend.values import Str, from_memory, memory_type, to_memory

CELLS = "heap"  # the heap of cells, by the prefix of its slots; every log has one as well

Place = Callable[[str], ir.Value]
Data: TypeAlias = ir.Value | Str


def read_cell(f: Fn, place: ir.Value, dtype: DType) -> Data:
    if dtype.is_bytes:
        return stored_string(f, place)
    return from_memory(f, f.b.load(place, typ=memory_type(dtype)), dtype)


def write_cell(code: Code, place: Place, name: str, data: Data) -> None:
    """Replace a cell's value."""
    f, b = code.f, code.f.b
    if not isinstance(data, Str):
        _store_plain(f, data, place(name))
        return
    first, second = string_words(f, data, *first_bytes(code, data))
    f.store(first, place(name), align=8)
    f.store(second, f.byte_at(place(name), 8), align=8)
    with f.when(b.icmp_unsigned(">", data.size, const(INLINE_BYTES))):
        with f.when(b.icmp_unsigned("<", b.load(place(f"{name}.room"), typ=I64), data.size)):
            # The next power of two, which `needed` counts as twice the size.
            zeros = f.call("llvm.ctlz.i64", I64, [b.sub(data.size, const(1)), const(0, I1)])
            room = b.shl(const(1), b.sub(const(64), zeros))
            f.store(_taken(f, room), place(f"{name}.heap"))
            f.store(room, place(f"{name}.room"))
        target = b.load(place(f"{name}.heap"), typ=PTR)
        f.call("llvm.memcpy.p0.p0.i64", ir.VoidType(), [target, data.ptr, data.size, const(0, I1)])
        f.store(target, f.byte_at(place(name), 8), align=8)


def append_cell(code: Code, place: ir.Value, data: Data, heap: str) -> None:
    """Write a value that nothing will replace: its bytes take just the space they need, in a separate heap."""
    f, b = code.f, code.f.b
    if not isinstance(data, Str):
        _store_plain(f, data, place)
        return
    first, second = string_words(f, data, *first_bytes(code, data))
    f.store(first, place, align=8)
    f.store(second, f.byte_at(place, 8), align=8)
    with f.when(b.icmp_unsigned(">", data.size, const(INLINE_BYTES))):
        target = _taken(f, data.size, heap)
        f.call("llvm.memcpy.p0.p0.i64", ir.VoidType(), [target, data.ptr, data.size, const(0, I1)])
        f.store(target, f.byte_at(place, 8), align=8)


def _taken(f: Fn, size: ir.Value, heap: str = CELLS) -> ir.Value:
    """The next free bytes of a heap."""
    at = f.get_slot(f"{heap}.at", PTR)
    f.set_slot(f"{heap}.at", f.byte_at(at, size))
    f.set_slot(f"{heap}.left", f.b.sub(f.get_slot(f"{heap}.left"), size))
    return at


def needed(f: Fn, given: Iterable[Data]) -> ir.Value:
    """Bytes of heap that these values may take, at most."""
    b = f.b
    total: ir.Value = const(0)
    for data in given:
        if isinstance(data, Str):
            is_long = b.icmp_unsigned(">", data.size, const(INLINE_BYTES))
            total = b.add(total, b.select(is_long, b.shl(data.size, const(1)), const(0)))
    return total


def leave_without_room(f: Fn, need: ir.Value, heap: str = CELLS) -> None:
    with f.when(f.b.icmp_signed("<", f.get_slot(f"{heap}.left"), need), likely=False):
        f.set_slot(f"{heap}.need", need)
        f.leave(HEAP_FULL)


def ordering(code: Code, new: Data, place: ir.Value, dtype: DType) -> tuple[ir.Value, ir.Value]:
    """Whether a value is less than a cell's, and whether they are equal. NaN is the greatest."""
    f, b = code.f, code.f.b
    if isinstance(new, Str):
        found = _compare_bytes(code, new, place)
        return b.icmp_signed("<", found, const(0)), b.icmp_signed("==", found, const(0))
    old = read_cell(f, place, dtype)
    if dtype.is_float:
        return compare_floats(f, "lt", new, old), compare_floats(f, "eq", new, old)
    compare = b.icmp_signed if dtype.is_signed else b.icmp_unsigned
    return compare("<", new, old), compare("==", new, old)


def _compare_bytes(code: Code, new: Str, place: ir.Value) -> ir.Value:
    """Negative, zero or positive. What lies in the record is compared as big-endian words, without a call.

    The cell is loaded as memory that this kernel writes, which `first_bytes` of it would not do.
    """
    f, b = code.f, code.f.b
    low, high = first_bytes(code, new)
    size = b.zext(b.load(place, typ=I32, align=8), I64)
    result = f.var(I64)
    with f.when_else(b.icmp_signed("<=", f.max(new.size, size), const(INLINE_BYTES)), likely=True) as (short, far):
        with short:
            old_low = b.load(f.byte_at(place, 4), typ=I64, align=4)
            old_high = b.zext(b.load(f.byte_at(place, 12), typ=I32, align=4), I64)
            tie = b.select(b.icmp_unsigned("==", high, old_high), b.sub(new.size, size), _order(f, high, old_high))
            result.set(b.select(b.icmp_unsigned("==", low, old_low), tie, _order(f, low, old_low)))
        with far:
            start, old_start = b.trunc(low, I32), b.load(f.byte_at(place, 4), typ=I32, align=4)
            result.set(_order(f, start, old_start))
            with f.when(b.icmp_unsigned("==", start, old_start)):
                result.set(order(code, new, stored_string(f, place)))
    return result.get()


def _order(f: Fn, a: ir.Value, b: ir.Value) -> ir.Value:
    """1 or -1 by the order of two different words as they lie in memory, first byte first."""
    a, b = (f.call(f"llvm.bswap.i{word.type.width}", word.type, [word]) for word in (a, b))
    return f.b.select(f.b.icmp_unsigned("<", a, b), const(-1), const(1))


def _store_plain(f: Fn, data: ir.Value, place: ir.Value) -> None:
    f.store(to_memory(f, data), place)
