"""The headers of a Parquet column chunk's pages, in Thrift's compact protocol: a row of `PAGE_WORDS` for each page.

A header is a struct, in which a struct (field 5, 7 or 8) describes the kind of page; there may be statistics
in that. A field is a byte (how much greater its number is than the last one's, and its type) and its value. Numbers of
the first two levels are looked at, everything else is passed.

Invariant: no byte outside of the chunk is read, and every page lies within it. What is not understood, leads out of it,
or is of no kind that we decode is ERROR, and so is a page without values.
"""

from __future__ import annotations

from llvmlite import ir

from scalein.layout import (
    DONE,
    ERROR,
    HEADER_FIELDS,
    OUTPUT_FULL,
    PAGE_COMPRESSED,
    PAGE_KIND,
    PAGE_LEVELS,
    PAGE_PLAIN,
    PAGE_RAW_SIZE,
    PAGE_SIZE,
    PAGE_START,
    PAGE_VALUES,
    PAGE_WORDS,
)
from scalein.llvm_backend.fn import I64, PTR, Fn, Var, const
from scalein.llvm_backend.parquet.dictionary_pages import Cursor
from scalein.llvm_backend.stage import Lowered

# Numbers of parquet.thrift
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_PLAIN, _PLAIN_DICTIONARY, _RLE, _RLE_DICTIONARY = 0, 2, 3, 8
_OF_DATA, _OF_DICTIONARY, _OF_DATA_V2 = 5, 7, 8  # fields that tell of a kind of page

_DEPTH = 4  # of structs in one another
_ABSENT = -1
_MAX_PAGE_BYTES = 1 << 28
_MAX_GAIN = 32  # times the bytes that Snappy makes of some: 64 of 3 at most


def lower_page_headers() -> Lowered:
    """The kernel that walks over pages until these have `left` values, or the output is full.

    `optional`: values have levels. `compressed`: pages are.
    """
    f = Fn("page_headers")
    b = f.b
    out = f.slot("out", PTR)
    at, rows, left = (f.var(I64, f.get_slot(name)) for name in ("at", "rows", "left"))
    chunk = Cursor(f, f.var(PTR, f.slot("data", PTR)), f.var(I64, f.slot("size")), at)
    last, fields = f.scratch(I64, _DEPTH, "last"), f.scratch(I64, 2 * HEADER_FIELDS, "fields")

    def save() -> None:
        for name, var in (("at", at), ("rows", rows), ("left", left)):
            f.set_slot(name, var.get())

    with f.forever() as pages:
        pages.stop_if(b.icmp_signed("<=", left.get(), const(0)))
        with f.when(b.icmp_signed(">=", rows.get(), f.slot("room"))):
            save()
            f.leave(OUTPUT_FULL)
        inner = _read_fields(f, chunk, last, fields)
        row = f.at(out, b.mul(rows.get(), const(PAGE_WORDS)), I64)
        is_dictionary, values = _write_page(f, chunk, inner, fields, row)
        rows.set(b.add(rows.get(), const(1)))
        # A dictionary comes first, and other pages have values: so no bytes give more rows than there are values.
        is_wrong = b.select(is_dictionary, b.icmp_signed("!=", rows.get(), const(1)),
                            b.icmp_signed("<=", values, const(0)))
        f.leave_if(is_wrong, ERROR)
        left.set(b.sub(left.get(), b.select(is_dictionary, const(0), values)))
    save()
    b.ret(const(DONE))
    frame = f.finish()
    return Lowered("page_headers", f.text(), frame, (), (), ())


def _read_fields(f: Fn, chunk: Cursor, last: ir.Value, out: ir.Value) -> Var:
    """The numbers of a header, then those of the struct in it, by their fields; gives the field of that struct."""
    b = f.b
    with f.loop(const(2 * HEADER_FIELDS), rare=True) as k:
        f.store(const(_ABSENT), out, k)
    depth, inner = f.var(I64, const(0)), f.var(I64, const(_ABSENT))
    f.store(const(0), last, const(0))

    def signed() -> ir.Value:
        found = chunk.varint()
        return b.xor(b.lshr(found, const(1)), b.sub(const(0), b.and_(found, const(1))))

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

        def is_kind(*kinds: int, kind: ir.Value = kind) -> ir.Value:
            return f.any_of(*(b.icmp_signed("==", kind, const(each)) for each in kinds))

        value = f.var(I64, const(_ABSENT))
        with f.when(is_kind(12)):
            with f.when(b.icmp_signed("==", depth.get(), const(0))):
                f.leave_if(b.icmp_signed("!=", inner.get(), const(_ABSENT)), ERROR)  # their numbers would mix
                inner.set(number.get())
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
            f.store(value.get(), out, b.add(b.mul(depth.get(), const(HEADER_FIELDS)), number.get()))
    return inner


def _write_page(f: Fn, chunk: Cursor, inner: Var, fields: ir.Value, row: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The row of the page that begins here, which is passed; gives whether it is a dictionary, and its values."""
    b = f.b

    def whole(number: int) -> ir.Value:
        return f.load(fields, const(number), I64)

    def of(number: int) -> ir.Value:
        return whole(HEADER_FIELDS + number)

    def one_of(value: ir.Value, *wanted: int) -> ir.Value:
        return f.any_of(*(b.icmp_signed("==", value, const(each)) for each in wanted))

    kind, raw_size, size, values = whole(1), whole(2), whole(3), of(1)
    is_data, is_dictionary, is_v2 = (one_of(kind, each) for each in (_DATA, _DICTIONARY, _DATA_V2))
    is_optional, is_compressed = (b.icmp_signed("!=", f.slot(name), const(0)) for name in ("optional", "compressed"))
    encoding = b.select(is_v2, of(4), of(2))
    within = b.select(is_optional, const(-1), const(0))
    levels = b.select(is_v2, of(5), b.select(is_dictionary, const(0), within))
    before = f.max(levels, const(0))
    no_levels = b.icmp_signed("==", f.slot("optional"), const(0))
    is_known = f.any_of(
        is_dictionary,
        f.all_of(is_data, f.any_of(one_of(of(3), _RLE), no_levels)),
        f.all_of(is_v2, one_of(of(2), 0), one_of(of(6), 0), b.icmp_signed(">=", levels, f.slot("optional"))))
    field = b.select(is_data, const(_OF_DATA), b.select(is_dictionary, const(_OF_DICTIONARY), const(_OF_DATA_V2)))
    is_known = f.all_of(is_known, b.icmp_signed("==", inner.get(), field))
    is_plain = f.any_of(is_dictionary, one_of(encoding, _PLAIN))
    is_coded = f.all_of(b.not_(is_dictionary), one_of(encoding, _RLE_DICTIONARY))
    is_known = f.all_of(is_known, f.any_of(one_of(encoding, _PLAIN, _PLAIN_DICTIONARY), is_coded))
    is_sound = f.all_of(b.icmp_signed(">=", values, const(0)), b.icmp_signed("<=", before, f.min(size, raw_size)),
                        b.icmp_signed("<=", raw_size, const(_MAX_PAGE_BYTES)))
    packed = f.all_of(is_compressed, f.any_of(b.not_(is_v2), b.icmp_signed("!=", of(7), const(0))))
    # Sizes are bounded by what the page can expand to: a page of a few bytes does not become gigabytes.
    most = b.mul(b.sub(size, before), const(_MAX_GAIN))
    is_sound = f.all_of(is_sound, f.any_of(b.not_(packed), b.icmp_signed("<=", b.sub(raw_size, before), most)))
    f.leave_if(b.not_(f.all_of(is_known, is_sound)), ERROR)
    for word, value in ((PAGE_START, chunk.at.get()), (PAGE_SIZE, size), (PAGE_RAW_SIZE, raw_size),
                        (PAGE_VALUES, values), (PAGE_PLAIN, b.zext(is_plain, I64)), (PAGE_LEVELS, levels),
                        (PAGE_COMPRESSED, b.zext(packed, I64)), (PAGE_KIND, kind)):  # fmt: skip
        f.store(value, row, const(word))
    chunk.skip(size)
    return is_dictionary, values
