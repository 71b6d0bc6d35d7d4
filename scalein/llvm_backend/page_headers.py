"""The headers of a Parquet column chunk's pages, in Thrift's compact protocol: a row of words for each page.

A header is a struct, in which a struct (field 5, 7 or 8) tells of the kind of page that it is; there may be statistics
in that. A field is a byte (how much greater its number is than the last one's, and its type) and its value. Numbers of
the first two levels are kept, by their fields' numbers; everything else is passed.

Invariant: no byte outside of the chunk is read. What is not understood, or leads out of it, is ERROR, and so is a page
without values. Nothing else is checked here: the words may be any.
"""

from __future__ import annotations

from llvmlite import ir

from scalein.layout import DONE, ERROR, HEADER_FIELDS, HEADER_WORDS, OUTPUT_FULL
from scalein.llvm_backend.fn import I64, PTR, Fn, const
from scalein.llvm_backend.stage import Lowered
from scalein.llvm_backend.unpack import Cursor

_DEPTH = 4  # of structs in one another
_ABSENT = -1


def lower_page_headers() -> Lowered:
    """The kernel that walks over pages until these have `left` values, or there is no room for one more row."""
    f = Fn("page_headers")
    b = f.b
    out = f.slot("out", PTR)
    at, rows, left = (f.var(I64, f.get_slot(name)) for name in ("at", "rows", "left"))
    chunk = Cursor(f, f.var(PTR, f.slot("data", PTR)), f.var(I64, f.slot("size")), at)
    last = f.scratch(I64, _DEPTH, "last")

    def signed() -> ir.Value:
        found = chunk.varint()
        return b.xor(b.lshr(found, const(1)), b.sub(const(0), b.and_(found, const(1))))

    with f.forever() as pages:
        pages.stop_if(b.icmp_signed("<=", left.get(), const(0)))
        with f.when(b.icmp_signed(">=", rows.get(), f.slot("room"))):
            for name, var in (("at", at), ("rows", rows), ("left", left)):
                f.set_slot(name, var.get())
            f.leave(OUTPUT_FULL)
        row = f.at(out, b.mul(rows.get(), const(HEADER_WORDS)), I64)
        with f.loop(const(HEADER_WORDS), rare=True) as k:
            f.store(const(_ABSENT), row, k)
        depth = f.var(I64, const(0))
        f.store(const(0), last, const(0))
        with f.forever() as fields:
            head = chunk.byte()
            with f.when(b.icmp_signed("==", head, const(0))):
                with f.when(b.icmp_signed("==", depth.get(), const(0))):
                    fields.stop()
                depth.set(b.sub(depth.get(), const(1)))
                fields.again()
            number = f.var(I64, b.add(f.load(last, depth.get(), I64), b.lshr(head, const(4))))
            with f.when(b.icmp_unsigned("<", head, const(16))):
                number.set(signed())
            f.store(number.get(), last, depth.get())
            kind = b.and_(head, const(15))

            def is_kind(*kinds: int) -> ir.Value:
                return f.any_of(*(b.icmp_signed("==", kind, const(each)) for each in kinds))

            value = f.var(I64, const(_ABSENT))
            with f.when(is_kind(12)):
                depth.set(b.add(depth.get(), const(1)))
                f.leave_if(b.icmp_signed(">=", depth.get(), const(_DEPTH)), ERROR)
                f.store(const(0), last, depth.get())
                fields.again()
            with f.when(is_kind(1, 2)):
                value.set(b.sub(const(2), kind))
            with f.when(is_kind(3)):
                value.set(chunk.byte())
            with f.when(is_kind(4, 5, 6)):
                value.set(signed())
            with f.when(is_kind(7)):
                chunk.skip(const(8))
            with f.when(is_kind(8)):
                chunk.skip(chunk.varint())
            f.leave_if(f.any_of(is_kind(0), b.icmp_signed(">", kind, const(8))), ERROR)
            is_kept = f.all_of(b.icmp_unsigned("<", number.get(), const(HEADER_FIELDS)),
                               b.icmp_signed("<", depth.get(), const(2)))
            with f.when(is_kept):
                f.store(value.get(), row, b.add(b.mul(depth.get(), const(HEADER_FIELDS)), number.get()))
        f.store(at.get(), row, const(0))  # no field has the number 0
        chunk.skip(f.load(row, const(3), I64))
        rows.set(b.add(rows.get(), const(1)))
        is_dictionary = b.icmp_signed("==", f.load(row, const(1), I64), const(2))
        values = f.load(row, const(HEADER_FIELDS + 1), I64)
        # A dictionary comes first, and other pages have values: so no bytes give more rows than there are values.
        is_wrong = b.select(is_dictionary, b.icmp_signed("!=", rows.get(), const(1)),
                            b.icmp_signed("<=", values, const(0)))
        f.leave_if(is_wrong, ERROR)
        left.set(b.sub(left.get(), b.select(is_dictionary, const(0), values)))
    for name, var in (("at", at), ("rows", rows), ("left", left)):
        f.set_slot(name, var.get())
    b.ret(const(DONE))
    frame = f.finish()
    return Lowered("page_headers", f.text(), frame, (), (), ())
