"""Bindings for a stage's input columns: Arrow buffers, partition rows, records of a table."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from scalein.ir.stages import Read
from scalein.layout import COLUMN, INLINE_BYTES, size_of
from scalein.llvm_backend.block import PADDED, unpack_bits
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.fn import I8, I16, I32, I64, I128, PTR, Fn, const
from scalein.llvm_backend.functions.decimals import is_small
from scalein.llvm_backend.values import Binding, Row, Str, Value, from_memory, memory_type

SlotOf = Callable[..., ir.Value]  # a slot of a column, by the slot's part and its type (an address)

CODE_TYPES = {8: I8, 16: I16, 32: I32}


class ArrowColumn:
    """A column of the batch. Bitmaps are unpacked to bytes once a block, so rows test a byte.

    Frame slots, all for row 0 of the batch: `name.data`, `name.bits` (validity), `name.bit` (its
    offset in bits), `name.last` (its last byte), `name.offsets`, `name.buffers`.
    """

    def __init__(self, code: Code, read: Read, source: str = "in") -> None:
        self._code, self._read, self._source = code, read, source
        self._block: tuple[ir.Value, ir.Value] | None = None
        self._opened: dict[ir.Function, tuple[ir.Value | None, ir.Value | None]] = {}  # by kernel or part

    def _scratch(self) -> tuple[ir.Value | None, ir.Value | None]:
        """Bytes for the block's validity, and for its bools."""
        f, read = self._code.f, self._read
        valid = f.scratch(I8, PADDED, f"{read.name}.valid") if read.nulls else None
        return valid, f.scratch(I8, PADDED, f"{read.name}.bools") if read.form == "bits" else None

    def _slot(self, part: str, typ: ir.Type = PTR) -> ir.Value:
        return self._code.f.slot(f"{COLUMN}{self._read.name}.{part}", typ)

    def open_block(self, start: ir.Value, count: ir.Value, only_parts: bool = False) -> None:
        """Unpack what this block needs; a part of the kernel does so itself."""
        self._block = start, count
        if not only_parts:
            self._unpack()

    def _unpack(self) -> None:
        f = self._code.f
        assert self._block is not None
        start, count = self._block
        valid, bools = self._scratch()
        if valid is not None:
            first = f.b.add(start, self._slot("bit", I64))
            unpack_bits(f, self._slot("bits"), first, count, self._slot("last", I64), valid)
        if bools is not None:
            first = f.b.add(start, self._slot("data_bit", I64))
            unpack_bits(f, self._slot("data"), first, count, self._slot("data_last", I64), bools)
        self._opened[f.fn] = valid, bools

    def _unpacked(self) -> tuple[ir.Value | None, ir.Value | None]:
        f = self._code.f
        if f.has_part and f.fn not in self._opened:
            with f.before_part():
                self._unpack()
        return self._opened[f.fn]

    def binding(self, start: ir.Value) -> Binding:
        read = self._read
        shape = read.dtype, read.form, read.nulls, read.code_bits
        return Binding(lambda row: self._value(row, start), shape=shape, names=(f"{COLUMN}{read.name}",))

    def _value(self, row: Row, start: ir.Value) -> Value:
        f, read = self._code.f, self._read
        offset = row.offset(self._source)
        index = f.b.add(start, offset)
        self._code.check_within(f"a row of column {read.name!r}", index, lambda: f.slot("end"))
        valid_bytes, bools = self._unpacked()
        valid = None
        if valid_bytes is not None:
            valid = f.b.icmp_unsigned("!=", f.load(valid_bytes, offset, I8), const(0, I8))
        if bools is not None:
            return Value(f.b.icmp_unsigned("!=", f.load(bools, offset, I8), const(0, I8)), valid)
        return load_column(self._code, read, index, valid, self._slot)


def load_column(code: Code, read: Read, index: ir.Value, valid: ir.Value | None, slot: SlotOf) -> Value:
    """The value at `index` of a column's buffers. A null string gets no bytes."""
    f = code.f
    match read.form:
        case "fixed":
            return Value(_fixed(f, read, f.at(slot("data"), index, memory_type(read.dtype))), valid)
        case "bytes":
            place = f.byte_at(slot("data"), f.b.mul(index, const(read.dtype.width)))
            return _no_bytes_if_null(f, Str(place, const(read.dtype.width)), valid)
        case "str32" | "str64":
            return _no_bytes_if_null(f, _plain_string(code, read, index, slot), valid)
        case "view":
            return _no_bytes_if_null(f, _view_string(code, read, index, valid, slot), valid)
        case "dict":
            codes = _code_at(code, read, index, valid, slot)
            return _no_bytes_if_null(f, _plain_string(code, read, codes, slot), valid)
        case "lut":
            return _looked_up(code, read, index, valid, slot)
        case _:
            raise AssertionError(read.form)


def _code_at(code: Code, read: Read, index: ir.Value, valid: ir.Value | None, slot: SlotOf) -> ir.Value:
    """The dictionary code of a row; that of a null may be anything, so it reads as 0."""
    f = code.f
    typ = CODE_TYPES[read.code_bits]
    found = f.b.zext(f.load_input(f.at(slot("codes"), index, typ), typ), I64)
    found = found if valid is None else f.b.select(valid, found, const(0))
    code.check_within(f"a dictionary code of column {read.name!r}", found, lambda: slot("values", I64))
    return found


def _looked_up(code: Code, read: Read, index: ir.Value, valid: ir.Value | None, slot: SlotOf) -> Value:
    f, typ = code.f, memory_type(read.dtype)
    codes = _code_at(code, read, index, valid, slot)
    return Value(_fixed(f, read, f.at(slot("data"), codes, typ)), valid)


def _fixed(f: Fn, read: Read, place: ir.Value) -> ir.Value:
    """A value of fixed width from an input buffer; of a decimal of few digits the low half says it all."""
    if is_small(read.dtype):
        return f.b.sext(f.load_input(place, I64, align=8), I128)
    typ = memory_type(read.dtype)
    return from_memory(f, f.load_input(place, typ), read.dtype)


def _plain_string(code: Code, read: Read, index: ir.Value, slot: SlotOf) -> Str:
    f = code.f
    typ = I64 if read.form == "str64" else I32
    place = f.at(slot("offsets"), index, typ)
    start = f.load_input(place, typ)
    end = f.load_input(f.at(place, const(1), typ), typ)
    if typ is not I64:
        start, end = f.b.sext(start, I64), f.b.sext(end, I64)
    if f.safe:
        code.check(f"the bytes of column {read.name!r}", f.b.icmp_signed(">=", start, const(0)),
                   f.b.icmp_signed("<=", start, end), f.b.icmp_signed("<=", end, slot("bytes", I64)))
    return Str(f.byte_at(slot("data"), start), f.b.sub(end, start))


def _view_string(code: Code, read: Read, index: ir.Value, valid: ir.Value | None, slot: SlotOf) -> Str:
    """An Arrow string view: up to 12 bytes in place, else in one of the column's buffers."""
    f = code.f
    view = f.at(slot("data"), index, ir.ArrayType(I8, 16))
    size = f.b.zext(f.load_input(view, I32, align=4), I64)
    if valid is not None:
        size = f.b.select(valid, size, const(0))
    short = f.b.icmp_unsigned("<=", size, const(INLINE_BYTES))
    number = f.b.zext(f.load_input(f.byte_at(view, 8), I32, align=4), I64)
    start = f.b.zext(f.load_input(f.byte_at(view, 12), I32, align=4), I64)
    number = f.b.select(short, const(0), number)
    if f.safe:
        code.check_within(f"a buffer of column {read.name!r}", number, lambda: slot("buffer_count", I64))
        room = f.load_input(f.at(slot("sizes"), number, I64), I64)
        fits = f.b.icmp_unsigned("<=", f.b.add(start, size), room)
        code.check(f"the bytes of column {read.name!r}", f.b.or_(short, fits))
    buffer = f.load_input(f.at(slot("buffers"), number, PTR), PTR)
    far = f.byte_at(buffer, f.b.select(short, const(0), start))
    return Str(f.b.select(short, f.byte_at(view, 4), far), size)


def _no_bytes_if_null(f: Fn, text: Str, valid: ir.Value | None) -> Value:
    if valid is None:
        return Value(text)
    return Value(Str(text.ptr, f.b.select(valid, text.size, const(0))), valid)


def stored_string(f: Fn, place: ir.Value) -> Str:
    """A string of a record: its bytes in place when short, else where its pointer leads."""
    size = f.b.zext(f.b.load(place, typ=I32, align=4), I64)
    short = f.b.icmp_unsigned("<=", size, const(INLINE_BYTES))
    far = f.b.load(f.byte_at(place, 8), typ=PTR, align=8)
    return Str(f.b.select(short, f.byte_at(place, 4), far), size)


def field_value(code: Code, place: ir.Value, read: Read, nulls: ir.Value | None) -> Value:
    """A field of a record or partition row at `place`; `nulls` is its null word."""
    f = code.f
    valid = None
    if read.nulls and nulls is not None:
        bit = f.b.and_(nulls, const(1 << read.null_bit))
        valid = f.b.icmp_unsigned("==", bit, const(0))
    if read.dtype.is_bytes:
        return Value(stored_string(f, place), valid)
    typ = memory_type(read.dtype)
    size = min(8, size_of(read.dtype))
    return Value(from_memory(f, f.b.load(place, typ=typ, align=size), read.dtype), valid)
