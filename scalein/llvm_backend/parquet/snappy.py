"""Snappy: pages of a Parquet column chunk, decompressed consecutively.

pyarrow does so as fast, but a page has some ten thousand values only, and then a call for each takes longer than its
bytes do.

The format: how many bytes it gives, as a varint, then elements. The low two bits of an element's first byte tell its
kind: 0, a literal of that many bytes follows; 1 to 3, a copy of that many bytes from earlier output, maybe
over one another ("abab" is two bytes and four of two back).

Invariants: no byte outside of a page is read, and none outside of its output buffer is written: that is its `raw_size`
and `SLOP` bytes, which the next page overwrites. What gives more or fewer bytes, or reaches back too far, is ERROR.
"""

from __future__ import annotations

from llvmlite import ir

from scalein.layout import (
    DONE,
    ERROR,
    OPEN_WORDS,
    PAGE_COMPRESSED,
    PAGE_LEVELS,
    PAGE_RAW_SIZE,
    PAGE_SIZE,
    PAGE_START,
    PAGE_VALUES,
    PAGE_WORDS,
    WITHIN,
)
from scalein.llvm_backend.fn import I1, I8, I64, PTR, Fn, const
from scalein.llvm_backend.parquet.dictionary_pages import Cursor, pass_levels
from scalein.llvm_backend.stage import Lowered

_SHORT = 16  # bytes, that are copied whole if some of them are wanted
_LONG_LITERAL = 60  # from which on the length is in bytes of its own


def lower_open_pages() -> Lowered:
    """The kernel that opens `pages.count` pages of a file at `file`: those that are compressed into `room`, and `out`
    gets `OPEN_WORDS` for each. Levels that stand apart have to be all 1."""
    f = Fn("open_pages")
    b = f.b
    at = f.var(PTR, f.slot("room", PTR))
    with f.loop(f.slot("pages.count"), rare=True) as k:
        row = f.at(f.slot("pages", PTR), b.mul(k, const(PAGE_WORDS)), I64)
        start, size, raw_size, values, levels, is_compressed = (f.load(row, const(word), I64) for word in (
            PAGE_START, PAGE_SIZE, PAGE_RAW_SIZE, PAGE_VALUES, PAGE_LEVELS, PAGE_COMPRESSED))
        before = f.max(levels, const(0))
        whole = f.byte_at(f.slot("file", PTR), start)
        with f.when(b.icmp_signed(">", levels, const(0))):
            apart = Cursor(f, f.var(PTR, whole), f.var(I64, levels), f.var(I64, const(0)))
            pass_levels(f, apart, values, levels)
        data, length = f.byte_at(whole, before), b.sub(size, before)
        opened = f.at(f.slot("out", PTR), b.mul(k, const(OPEN_WORDS)), I64)
        f.store(values, opened, const(2))
        f.store(b.zext(b.icmp_signed("==", levels, const(WITHIN)), I64), opened, const(3))
        with f.when_else(b.icmp_signed("!=", is_compressed, const(0))) as (packed, plain):
            with packed:
                wanted = b.sub(raw_size, before)
                source = Cursor(f, f.var(PTR, data), f.var(I64, length), f.var(I64, const(0)))
                _decompress(f, source, at.get(), wanted)
                f.store(at.get(), opened, const(0))
                f.store(wanted, opened, const(1))
                at.set(f.byte_at(at.get(), wanted))
            with plain:
                f.store(data, opened, const(0))
                f.store(length, opened, const(1))
    b.ret(const(DONE))
    frame = f.finish()
    return Lowered("open_pages", f.text(), frame, (), (), ())


def _decompress(f: Fn, source: Cursor, target: ir.Value, wanted: ir.Value) -> None:
    b = f.b
    f.leave_if(b.icmp_unsigned("!=", source.varint(), wanted), ERROR)
    done = f.var(I64, const(0))
    with f.forever() as elements:
        elements.stop_if(b.icmp_unsigned(">=", done.get(), wanted))
        tag = source.byte()
        kind, number = b.and_(tag, const(3)), b.lshr(tag, const(2))
        place, room = f.byte_at(target, done.get()), b.sub(wanted, done.get())
        length = f.var(I64, b.add(number, const(1)))
        with f.when_else(b.icmp_unsigned("==", kind, const(0))) as (literal, again):
            with literal:
                with f.when(b.icmp_unsigned(">=", number, const(_LONG_LITERAL))):
                    length.set(b.add(_number(f, source, b.sub(number, const(_LONG_LITERAL - 1))), const(1)))
                f.leave_if(b.icmp_unsigned(">", length.get(), room), ERROR)
                _copy(f, source, place, length.get())
            with again:
                back = f.var(I64, const(0))
                with f.when_else(b.icmp_unsigned("==", kind, const(1))) as (near, far):
                    with near:
                        length.set(b.add(b.and_(number, const(7)), const(4)))
                        back.set(b.or_(b.shl(b.lshr(tag, const(5)), const(8)), source.byte()))
                    with far:
                        back.set(_number(f, source, b.shl(const(1), b.sub(kind, const(1)))))
                f.leave_if(b.icmp_unsigned(">", length.get(), room), ERROR)
                # One that leads nowhere as well: 0 - 1 is the greatest number.
                f.leave_if(b.icmp_unsigned(">=", b.sub(back.get(), const(1)), done.get()), ERROR)
                _repeat(f, place, back.get(), length.get())
        done.set(b.add(done.get(), length.get()))
    f.leave_if(b.icmp_signed("!=", source.at.get(), source.size.get()), ERROR)


def _number(f: Fn, source: Cursor, size: ir.Value) -> ir.Value:
    """A number of 1 to 4 bytes."""
    b, found = f.b, f.var(I64, const(0))
    for k in range(4):
        with f.when(b.icmp_unsigned(">", size, const(k))):
            found.set(b.or_(found.get(), b.shl(source.byte(), const(8 * k))))
    return found.get()


def _copy(f: Fn, source: Cursor, place: ir.Value, length: ir.Value) -> None:
    """The source's next bytes. A few are copied with some that follow, if these are the source's."""
    b = f.b
    start, left = f.byte_at(source.data.get(), source.at.get()), b.sub(source.size.get(), source.at.get())
    source.skip(length)
    is_short = b.and_(b.icmp_unsigned("<=", length, const(_SHORT)), b.icmp_unsigned(">=", left, const(_SHORT)))
    with f.when_else(is_short) as (short, long):
        with short:
            whole = ir.VectorType(I8, _SHORT)
            b.store(b.load(start, typ=whole, align=1), place, align=1)
        with long:
            f.call("llvm.memcpy.p0.p0.i64", ir.VoidType(), [place, start, length, const(0, I1)])


def _repeat(f: Fn, place: ir.Value, back: ir.Value, length: ir.Value) -> None:
    """Bytes that stand before a place once more: by words, unless a word would reach into what it makes."""
    b = f.b
    first = f.byte_at(place, b.sub(const(0), back))
    with f.when_else(b.icmp_unsigned(">=", back, const(8))) as (words, bytes_):
        with words, f.loop(b.lshr(b.add(length, const(7)), const(3)), rare=True) as k:
            b.store(b.load(f.at(first, k, I64), typ=I64, align=1), f.at(place, k, I64), align=1)
        with bytes_, f.loop(length, rare=True) as k:
            b.store(b.load(f.byte_at(first, k), typ=I8), f.byte_at(place, k))
