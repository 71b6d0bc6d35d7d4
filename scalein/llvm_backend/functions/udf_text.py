"""Text in udfs: parts of a text are views of it; text that is built is made text of the kernel (`text_arena.py`).

Positions count code points. Case and whitespace are those of this Python: tables made from its own `str`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import cache

from llvmlite import ir

from scalein.dtypes import BOOL, DType
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.fn import F64, I1, I8, I16, I32, I64, PTR, Fn, const
from scalein.llvm_backend.functions import strings
from scalein.llvm_backend.functions.arithmetic import Fail
from scalein.llvm_backend.text_arena import NO_MEMORY, TextPlaces, joined, take_text
from scalein.llvm_backend.values import Str

_NULL = ir.Constant(PTR, None)
_MOST_BYTES = 1 << 40  # of a text that a count of the user's makes


class Builder:
    """Builds text; what fails goes to `fail`."""

    def __init__(self, code: Code, places: TextPlaces | None, fail: Fail) -> None:
        self.code, self.f, self.fail = code, code.f, fail
        self._places = places

    @property
    def places(self) -> TextPlaces:
        assert self._places is not None, "a udf that builds text is given them"
        return self._places

    def room(self, size: ir.Value) -> ir.Value:
        """The address of `size` bytes."""
        return take_text(self.code, self.places, size, lambda is_missing: self.fail(NO_MEMORY, is_missing))

    def keep(self, start: ir.Value, size: ir.Value) -> Str:
        """The text that was written last, from `start`; the rest of its room is free again."""
        self.f.b.store(self.f.byte_at(start, size), self.places.at)
        return Str(start, size)

    def concat(self, parts: list[Str]) -> Str:
        return joined(self.code, parts, self.room)

    def text(self, data: ir.Value, dtype: DType | None) -> Str:
        """An int or bool as Python writes it."""
        f, b = self.f, self.f.b
        if dtype == BOOL:
            yes, no = (self.code.text(word) for word in (b"True", b"False"))
            return Str(b.select(data, yes, no), b.select(data, const(4), const(5)))
        start = self.room(const(20))  # -9223372036854775808
        negative = b.icmp_signed("<", data, const(0))
        left = f.var(I64, b.select(negative, b.sub(const(0), data), data))  # as unsigned: 2^63 has no int
        at = f.var(I64, const(20))
        with f.forever() as loop:
            at.set(b.sub(at.get(), const(1)))
            digit = b.trunc(b.urem(left.get(), const(10)), I8)
            b.store(b.add(digit, const(ord("0"), I8)), f.byte_at(start, at.get()))
            left.set(b.udiv(left.get(), const(10)))
            loop.stop_if(b.icmp_unsigned("==", left.get(), const(0)))
        with f.when(negative):
            at.set(b.sub(at.get(), const(1)))
            b.store(const(ord("-"), I8), f.byte_at(start, at.get()))
        return Str(f.byte_at(start, at.get()), b.sub(const(20), at.get()))

    def fixed(self, data: ir.Value, digits: int, letter: str = "f") -> Str:
        """A float with `digits` digits after the point, as by `{x:.2f}`; or as by `e` or `g`."""
        f, b = self.f, self.f.b
        most = 330 + digits  # sign, 309 digits before the point
        start = self.room(const(most))
        typ = ir.FunctionType(I32, [PTR, I64, PTR], var_arg=True)
        write = f.module.globals.get("snprintf") or ir.Function(f.module, typ, "snprintf")
        form = self.code.text(f"%.{digits}{letter}\0".encode())
        is_nan = b.fcmp_unordered("uno", data, data)  # C writes its sign
        number = b.select(is_nan, const(0.0, F64), data)
        size = b.sext(b.call(write, [start, const(most), form, number]), I64)
        found = self.keep(start, size)
        return Str(b.select(is_nan, self.code.text(b"nan"), found.ptr), b.select(is_nan, const(3), found.size))

    def replace(self, text: Str, old: Str, new: Str, most: ir.Value) -> Str:
        """Every `old`, from the left and at most `most` of them unless that is negative, as `new`."""
        f, b = self.f, self.f.b
        needle, width = old.ptr, old.size
        self.fail("replace of an empty text", b.icmp_unsigned("==", width, const(0)))

        def each(found: Callable[[ir.Value, ir.Value], None]) -> ir.Value:
            """Calls with the start of what stands before each `old`, and its size; gives where the rest begins."""
            start, left = f.var(I64, const(0)), f.var(I64, most)
            with f.forever() as loop:
                loop.stop_if(b.icmp_unsigned("==", left.get(), const(0)))
                left.set(b.sub(left.get(), const(1)))
                at = start.get()
                hit = f.call("memmem", PTR, [f.byte_at(text.ptr, at), b.sub(text.size, at), needle, width])
                loop.stop_if(b.icmp_unsigned("==", hit, _NULL))
                place = b.sub(b.ptrtoint(hit, I64), b.ptrtoint(text.ptr, I64))
                found(at, b.sub(place, at))
                start.set(b.add(place, width))
            return start.get()

        count = f.var(I64, const(0))
        each(lambda at, size: count.set(b.add(count.get(), const(1))))
        start = self.room(b.add(text.size, b.mul(count.get(), b.sub(new.size, width))))
        to = f.var(I64, const(0))

        def copy(source: ir.Value, size: ir.Value) -> None:
            f.call("memcpy", PTR, [f.byte_at(start, to.get()), source, size])
            to.set(b.add(to.get(), size))

        def write(at: ir.Value, size: ir.Value) -> None:
            copy(f.byte_at(text.ptr, at), size)
            copy(new.ptr, new.size)

        rest = each(write)
        copy(f.byte_at(text.ptr, rest), b.sub(text.size, rest))
        return Str(start, to.get())

    def _bounded(self, size: ir.Value) -> ir.Value:
        """The address of `size` bytes, which may be more than a computer has."""
        self.fail(NO_MEMORY, self.f.b.icmp_unsigned(">", size, const(_MOST_BYTES)))
        return self.room(size)

    def _fill(self, start: ir.Value, text: Str, count: ir.Value) -> None:
        """Writes a text `count` times."""
        f, b = self.f, self.f.b
        with f.loop(count) as k:
            to = f.byte_at(start, b.mul(k, text.size))
            f.call("memcpy", PTR, [to, text.ptr, text.size])

    def repeat(self, text: Str, count: ir.Value) -> Str:
        f, b = self.f, self.f.b
        count = f.max(count, const(0))
        pair = b.umul_with_overflow(text.size, count)
        self.fail(NO_MEMORY, b.extract_value(pair, 1))
        size = b.extract_value(pair, 0)
        count = b.select(b.icmp_unsigned("==", size, const(0)), const(0), count)
        start = self._bounded(size)
        self._fill(start, text, count)
        return Str(start, size)

    def pad(self, text: Str, width: ir.Value, fill: Str, align: str) -> Str:
        """The text with a width, in code points; `c` centers like str.center, `^` like a format."""
        f, b = self.f, self.f.b
        missing = f.max(b.sub(f.max(width, const(0)), strings.length(self.code, text)), const(0))
        self.fail(NO_MEMORY, b.icmp_unsigned(">", missing, const(_MOST_BYTES)))
        half = b.lshr(missing, const(1))
        odd = b.and_(b.and_(missing, width), const(1))
        before = {"<": const(0), ">": missing, "^": half, "c": b.add(half, odd)}[align]
        size = b.add(text.size, b.mul(missing, fill.size))
        start = self._bounded(size)
        self._fill(start, fill, before)
        at = f.byte_at(start, b.mul(before, fill.size))
        f.call("memcpy", PTR, [at, text.ptr, text.size])
        self._fill(f.byte_at(at, text.size), fill, b.sub(missing, before))
        return Str(start, size)

    def zfill(self, text: Str, width: ir.Value) -> Str:
        """Zeros between the sign and the digits."""
        f, b = self.f, self.f.b
        first = f.var(I8, const(0, I8))
        with f.when(b.icmp_signed(">", text.size, const(0))):
            first.set(f.load_input(text.ptr, I8))
        is_signed = f.any_of(*(b.icmp_unsigned("==", first.get(), const(ord(sign), I8)) for sign in "+-"))
        count = b.zext(is_signed, I64)
        rest = Str(f.byte_at(text.ptr, count), b.sub(text.size, count))
        zero = Str(self.code.text(b"0"), const(1))
        return self.concat([Str(text.ptr, count), self.pad(rest, b.sub(f.max(width, count), count), zero, ">")])

    def grouped(self, text: Str) -> Str:
        """A number's text with commas between each three digits before the point."""
        f, b = self.f, self.f.b
        start = self.room(b.mul(text.size, const(2)))
        sign = b.zext(matches(self.code, "starts_with", text, Str(self.code.text(b"-"), const(1))), I64)
        end = f.var(I64, sign)
        with f.forever() as loop:
            loop.stop_if(b.icmp_signed(">=", end.get(), text.size))
            digit = b.sub(f.load_input(f.byte_at(text.ptr, end.get()), I8), const(ord("0"), I8))
            loop.stop_if(b.icmp_unsigned(">", digit, const(9, I8)))
            end.set(b.add(end.get(), const(1)))
        stop, to = end.get(), f.var(I64, const(0))

        def put(byte: ir.Value) -> None:
            b.store(byte, f.byte_at(start, to.get()))
            to.set(b.add(to.get(), const(1)))

        with f.loop(text.size) as k:
            left = b.sub(stop, k)  # digits from here on
            third = b.icmp_unsigned("==", b.urem(f.max(left, const(0)), const(3)), const(0))
            between = f.all_of(third, b.icmp_signed(">", left, const(0)), b.icmp_signed(">", k, sign))
            with f.when(between):
                put(const(ord(","), I8))
            put(f.load_input(f.byte_at(text.ptr, k), I8))
        return self.keep(start, to.get())

    def reversed(self, text: Str) -> Str:
        f, b = self.f, self.f.b
        start, at = self.room(text.size), f.var(I64, const(0))
        with f.forever() as loop:
            loop.stop_if(b.icmp_signed(">=", at.get(), text.size))
            _, size = decode(self.code, text, at.get())
            to = b.sub(b.sub(text.size, at.get()), size)
            f.call("memcpy", PTR, [f.byte_at(start, to), f.byte_at(text.ptr, at.get()), size])
            at.set(b.add(at.get(), size))
        return Str(start, text.size)

    def chr(self, point: ir.Value) -> Str:
        b = self.f.b
        half = b.icmp_unsigned("<", b.sub(point, const(0xD800)), const(0x800))  # of a pair: no text has one
        self.fail("chr() of a number that is no character", b.or_(half, b.icmp_unsigned(">", point, const(0x10FFFF))))
        start = self.room(const(4))
        size = b.call(self.code.helper("encode", _encode), [start, b.trunc(point, I32)])
        return self.keep(start, size)

    def join(self, separator: Str, each: Callable[[Callable[[Str], None]], None]) -> Str:
        """The texts that `each` calls with, and the separator between them."""
        f, b = self.f, self.f.b
        total, count = f.var(I64, const(0)), f.var(I64, const(0))

        def measure(piece: Str) -> None:
            total.set(b.add(total.get(), piece.size))
            count.set(b.add(count.get(), const(1)))

        each(measure)
        cuts = f.max(b.sub(count.get(), const(1)), const(0))
        size = b.add(total.get(), b.mul(cuts, separator.size))
        start, to = self.room(size), f.var(I64, const(0))
        count.set(const(0))

        def copy(text: Str) -> None:
            f.call("memcpy", PTR, [f.byte_at(start, to.get()), text.ptr, text.size])
            to.set(b.add(to.get(), text.size))

        def write(piece: Str) -> None:
            with f.when(b.icmp_unsigned("!=", count.get(), const(0))):
                copy(separator)
            copy(piece)
            count.set(b.add(count.get(), const(1)))

        each(write)
        return Str(start, size)

    def cased(self, text: Str, fn: str) -> Str:
        """In upper or lower case."""
        f, b = self.f, self.f.b
        table = _CaseTable(self.code, fn)
        start = self.room(b.mul(text.size, const(3)))  # no code point grows to more
        at, to = f.var(I64, const(0)), f.var(I64, const(0))

        def put(point: ir.Value) -> None:
            size = b.call(self.code.helper("encode", _encode), [f.byte_at(start, to.get()), point])
            to.set(b.add(to.get(), size))

        with f.forever() as loop:
            loop.stop_if(b.icmp_signed(">=", at.get(), text.size))
            place = at.get()
            byte = f.load_input(f.byte_at(text.ptr, place), I8)
            with f.when_else(b.icmp_unsigned("<", byte, const(0x80, I8)), likely=True) as (ascii_, other):
                with ascii_:
                    first, last = (ord("a"), ord("z")) if fn in ("upper", "titled") else (ord("A"), ord("Z"))
                    inside = b.icmp_unsigned("<=", b.sub(byte, const(first, I8)), const(last - first, I8))
                    b.store(b.xor(byte, b.select(inside, const(0x20, I8), const(0, I8))), f.byte_at(start, to.get()))
                    to.set(b.add(to.get(), const(1)))
                    at.set(b.add(place, const(1)))
                with other:
                    point, size = decode(self.code, text, place)
                    at.set(b.add(place, size))
                    entry = table.entry(point)
                    is_long = b.icmp_signed("<", entry, const(0, I32))
                    with f.when_else(is_long, likely=False) as (long, short):
                        with long:
                            number = b.zext(b.and_(entry, const(_POINT, I32)), I64)
                            many = f.at(table.long, number, ir.ArrayType(I32, 4))
                            with f.loop(b.sext(f.load(many, const(0), I32), I64)) as k:
                                put(f.load(many, b.add(k, const(1)), I32))
                        with short:
                            target = b.and_(entry, const(_POINT, I32))
                            if fn == "lower":
                                target = _final_sigma(self.code, table, text, place, point, target)
                            put(target)
        return self.keep(start, to.get())


# --- views


def char_at(code: Code, text: Str, index: ir.Value, fail: Fail) -> Str:
    """The code point at a position, which counts from the end if it is negative."""
    f, b = code.f, code.f.b
    if isinstance(index, ir.Constant) and not index.constant >> 63:
        place = strings.advance(f, text, index)
        fail("string index out of range", b.icmp_signed(">=", place, text.size))
    else:
        count = strings.length(code, text)
        index = b.select(b.icmp_signed("<", index, const(0)), b.add(index, count), index)
        fail("string index out of range", b.icmp_unsigned(">=", index, count))
        place = strings.advance(f, text, index)
    rest = Str(f.byte_at(text.ptr, place), b.sub(text.size, place))
    return Str(rest.ptr, strings.advance(f, rest, const(1)))


def slice_of(code: Code, text: Str, start: ir.Value, stop: ir.Value) -> Str:
    """Code points [start, stop), each of them counted from the end if it is negative."""
    f, b = code.f, code.f.b
    if not all(isinstance(bound, ir.Constant) and not bound.constant >> 63 for bound in (start, stop)):
        count = strings.length(code, text)
        start, stop = (f.max(b.select(b.icmp_signed("<", bound, const(0)), b.add(bound, count), bound), const(0))
                       for bound in (start, stop))
    first = strings.advance(f, text, start)
    rest = Str(f.byte_at(text.ptr, first), b.sub(text.size, first))
    if isinstance(stop, ir.Constant) and stop.constant == ALL:
        return rest
    return Str(rest.ptr, strings.advance(f, rest, b.sub(stop, f.min(start, stop))))


ALL = 2**63 - 1  # the end of a slice that goes to the end of the text


def stripped(code: Code, text: Str, fn: str, chars: str | None) -> Str:
    """Without whitespace, or some characters, at its ends."""
    f, b = code.f, code.f.b
    ranges = space_ranges() if chars is None else _ranges(sorted(set(map(ord, chars))))
    first, last = f.var(I64, const(0)), f.var(I64, text.size)

    def is_out(point: ir.Value) -> ir.Value:
        inside = [b.icmp_unsigned("<=", b.sub(point, const(low, I32)), const(high - low, I32)) for low, high in ranges]
        return f.any_of(*inside) or const(0, I1)

    if fn != "rstrip":
        with f.forever() as loop:
            loop.stop_if(b.icmp_signed(">=", first.get(), last.get()))
            point, size = decode(code, text, first.get())
            loop.stop_if(b.not_(is_out(point)))
            first.set(b.add(first.get(), size))
    if fn != "lstrip":
        with f.forever() as loop:
            loop.stop_if(b.icmp_signed(">=", first.get(), last.get()))
            before = _before(f, text, last.get())
            point, _ = decode(code, text, before)
            loop.stop_if(b.not_(is_out(point)))
            last.set(before)
    return Str(f.byte_at(text.ptr, first.get()), b.sub(last.get(), first.get()))


def matches(code: Code, fn: str, text: Str, pattern: Str) -> ir.Value:
    """starts_with, ends_with or contains, of any text."""
    f, b = code.f, code.f.b
    found = f.var(I1, const(0, I1))
    with f.when(b.icmp_signed(">=", text.size, pattern.size)):
        if fn == "contains":
            hit = f.call("memmem", PTR, [text.ptr, text.size, pattern.ptr, pattern.size])
            found.set(b.or_(b.icmp_unsigned("!=", hit, _NULL), b.icmp_unsigned("==", pattern.size, const(0))))
        else:
            offset = const(0) if fn == "starts_with" else b.sub(text.size, pattern.size)
            found.set(strings.equal(code, Str(f.byte_at(text.ptr, offset), pattern.size), pattern))
    return found.get()


def _ranges(points: Sequence[int]) -> list[tuple[int, int]]:
    """Sorted code points as ranges, both ends included."""
    found: list[tuple[int, int]] = []
    for point in points:
        if found and found[-1][1] == point - 1:
            found[-1] = found[-1][0], point
        else:
            found.append((point, point))
    return found


@cache
def space_ranges() -> list[tuple[int, int]]:
    """The code points of whitespace."""
    return _ranges([point for point in range(0x10000) if chr(point).isspace()])


def point_of(code: Code, text: Str, fail: Fail) -> ir.Value:
    """ord(text)."""
    b = code.f.b
    what = "ord() of a text that is not one character"
    fail(what, b.icmp_unsigned("==", text.size, const(0)))
    point, size = decode(code, text, const(0))
    fail(what, b.icmp_unsigned("!=", size, text.size))
    return b.zext(point, I64)


# --- code points


def _before(f: Fn, text: Str, place: ir.Value) -> ir.Value:
    """Where the code point before a place begins; the place is not 0."""
    at = f.var(I64, place)
    with f.forever() as loop:
        at.set(f.b.sub(at.get(), const(1)))
        loop.stop_if(f.b.icmp_signed("<=", at.get(), const(0)))
        byte = f.load_input(f.byte_at(text.ptr, at.get()), I8)
        loop.stop_if(f.b.icmp_unsigned("!=", f.b.and_(byte, const(0xC0, I8)), const(0x80, I8)))
    return at.get()


def decode(code: Code, text: Str, place: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The code point at a place within the text, and its bytes; what is cut off at the end is one of few bytes."""
    b = code.f.b
    found = b.call(code.helper("decode", _decoder), [text.ptr, text.size, place])
    return b.trunc(found, I32), b.lshr(found, const(32))


def _decoder(code: Code) -> ir.Function:
    f = code.f
    with f.function("decode", I64, [PTR, I64, I64]) as fn:
        b = f.b
        ptr, size, place = fn.args
        first = b.zext(f.load_input(f.byte_at(ptr, place), I8), I32)
        with f.when(b.icmp_unsigned("<", first, const(0x80, I32)), likely=True):
            f.give(b.or_(b.zext(first, I64), const(1 << 32)))
        length = b.select(b.icmp_unsigned("<", first, const(0xE0, I32)), const(2),
                          b.select(b.icmp_unsigned("<", first, const(0xF0, I32)), const(3), const(4)))
        length = f.min(length, b.sub(size, place))
        point = f.var(I32, b.and_(first, b.lshr(const(0x7F, I32), b.trunc(length, I32))))
        with f.loop(length, const(1)) as k:
            byte = b.zext(f.load_input(f.byte_at(ptr, b.add(place, k)), I8), I32)
            point.set(b.or_(b.shl(point.get(), const(6, I32)), b.and_(byte, const(0x3F, I32))))
        b.ret(b.or_(b.zext(point.get(), I64), b.shl(length, const(32))))
    return fn


def _encode(code: Code) -> ir.Function:
    """Writes a code point; gives its bytes."""
    f = code.f
    with f.function("encode", I64, [PTR, I32]) as fn:
        b = f.b
        to, point = fn.args

        def put(number: int, value: ir.Value) -> None:
            b.store(b.trunc(value, I8), f.byte_at(to, number))

        def tail(shift: int) -> ir.Value:
            return b.or_(b.and_(b.lshr(point, const(shift, I32)), const(0x3F, I32)), const(0x80, I32))

        for most, size, mark in ((0x80, 1, 0), (0x800, 2, 0xC0), (0x10000, 3, 0xE0), (0x110000, 4, 0xF0)):
            with f.when(b.icmp_unsigned("<", point, const(most, I32))):
                put(0, b.or_(b.lshr(point, const(6 * (size - 1), I32)), const(mark, I32)))
                for k in range(1, size):
                    put(k, tail(6 * (size - 1 - k)))
                f.give(const(size))
        b.ret(const(0))
    return fn


# --- case

_CASES: dict[str, Callable[[str], str]] = {
    "upper": str.upper, "lower": str.lower, "casefold": str.casefold, "titled": str.title,
}  # fmt: skip
_POINT = (1 << 21) - 1
_CASED, _IGNORABLE, _LONG = 1 << 21, 1 << 22, 1 << 31
_PAGE = 256
_PLANES = 0x20000  # no code point beyond has a case
_SIGMA, _FINAL_SIGMA = 0x3A3, 0x3C2


@cache
def _case_data(fn: str) -> tuple[bytes, bytes, bytes]:
    """Numbers of pages, pages of entries, and what code points become that become several.

    An entry has the code point that this one becomes, or the number of several, and for lower case whether it has a
    case and whether it is ignored beside letters that have: that is what a final sigma depends on.
    """
    long: dict[str, int] = {}
    pages: dict[bytes, int] = {}
    index = []
    for first in range(0, _PLANES, _PAGE):
        entries = []
        for point in range(first, first + _PAGE):
            char = chr(point)
            new = _CASES[fn](char)
            entry = ord(new) if len(new) == 1 else _LONG | long.setdefault(new, len(long))
            entries.append(entry | (_sigma_flags(char) if fn == "lower" else 0))
        page = struct.pack(f"<{_PAGE}I", *entries)
        if page == struct.pack(f"<{_PAGE}I", *range(first, first + _PAGE)):
            index.append(0xFFFF)
        else:
            index.append(pages.setdefault(page, len(pages)))
    several = b"".join(struct.pack("<4I", len(new), *map(ord, new), *[0] * (3 - len(new))) for new in long)
    return struct.pack(f"<{len(index)}H", *index), b"".join(pages), several


def _sigma_flags(char: str) -> int:
    if 0xD800 <= ord(char) < 0xE000:
        return 0
    is_cased = char.isupper() or char.islower() or char.istitle()
    is_final = f"{'' if is_cased else 'A'}{char}{chr(_SIGMA)}".lower().endswith(chr(_FINAL_SIGMA))
    is_ignored = is_final != is_cased
    return _CASED * is_cased | _IGNORABLE * is_ignored


class _CaseTable:
    """The tables of one direction as constants of the kernel."""

    def __init__(self, code: Code, fn: str) -> None:
        def constant(name: str, data: bytes) -> ir.Value:
            return code.f.constant_array(f"{fn}.{name}", ir.ArrayType(I8, len(data)), bytearray(data))

        index, pages, long = _case_data(fn)
        self.fn, self.f = fn, code.f
        self.index, self.pages, self.long = constant("index", index), constant("pages", pages), constant("long", long)

    def entry(self, point: ir.Value) -> ir.Value:
        f, b = self.f, self.f.b
        found = f.var(I32, point)
        with f.when(b.icmp_unsigned("<", point, const(_PLANES, I32))):
            page = f.load(self.index, b.zext(b.lshr(point, const(8, I32)), I64), I16)
            with f.when(b.icmp_unsigned("!=", page, const(0xFFFF, I16))):
                place = b.or_(b.shl(b.zext(page, I64), const(8)), b.zext(b.and_(point, const(255, I32)), I64))
                found.set(f.load(self.pages, place, I32))
        return found.get()


def _final_sigma(code: Code, table: _CaseTable, text: Str, place: ir.Value, point: ir.Value,
                 target: ir.Value) -> ir.Value:
    """A capital sigma at the end of a word becomes another letter: after one that has a case, and before none."""
    f, b = code.f, code.f.b
    found = f.var(I32, target)

    def has(entry: ir.Value, flag: int) -> ir.Value:
        return b.icmp_unsigned("!=", b.and_(entry, const(flag, I32)), const(0, I32))

    with f.when(b.icmp_unsigned("==", point, const(_SIGMA, I32)), likely=False):
        is_after, at = f.var(I1, const(0, I1)), f.var(I64, place)
        with f.forever() as loop:
            loop.stop_if(b.icmp_signed("<=", at.get(), const(0)))
            at.set(_before(f, text, at.get()))
            entry = table.entry(decode(code, text, at.get())[0])
            is_after.set(b.and_(has(entry, _CASED), b.not_(has(entry, _IGNORABLE))))
            loop.stop_if(b.not_(has(entry, _IGNORABLE)))
        is_before = f.var(I1, const(0, I1))
        at.set(b.add(place, const(2)))
        with f.forever() as loop:
            loop.stop_if(b.icmp_signed(">=", at.get(), text.size))
            following, size = decode(code, text, at.get())
            entry = table.entry(following)
            is_before.set(b.and_(has(entry, _CASED), b.not_(has(entry, _IGNORABLE))))
            loop.stop_if(b.not_(has(entry, _IGNORABLE)))
            at.set(b.add(at.get(), size))
        is_final = b.and_(is_after.get(), b.not_(is_before.get()))
        found.set(b.select(is_final, const(_FINAL_SIGMA, I32), target))
    return found.get()
