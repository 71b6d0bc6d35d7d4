"""What text methods find: positions, parts, and whether all characters are of a class. Positions count code points."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import cache

from llvmlite import ir

from scalein.llvm_backend.code import Code
from scalein.llvm_backend.fn import I1, I8, I16, I64, PTR, Fn, const
from scalein.llvm_backend.functions import strings
from scalein.llvm_backend.functions.arithmetic import Fail
from scalein.llvm_backend.functions.udf_text import decode
from scalein.llvm_backend.values import Str

_NULL = ir.Constant(PTR, None)


def position(code: Code, fn: str, text: Str, args: Sequence[Str | ir.Value], fail: Fail) -> ir.Value:
    """find, rfind, index, rindex and count; `args` are what is looked for, and the bounds, which may be missing."""
    f, b = code.f, code.f.b
    wanted, *bounds = args
    assert isinstance(wanted, Str)
    view, start, is_outside = _view(code, text, bounds)
    if fn == "count":
        found = _count(code, view, wanted)
        return found if is_outside is None else b.select(is_outside, const(0), found)
    place = (_last if fn.startswith("r") else _first)(code, view, wanted)
    is_missing = f.any_of(b.icmp_signed("<", place, const(0)), is_outside)
    assert is_missing is not None
    if fn.endswith("index"):
        fail("substring not found", is_missing)
    before = Str(view.ptr, b.select(is_missing, const(0), place))
    return b.select(is_missing, const(-1), b.add(start, strings.length(code, before)))


def _view(code: Code, text: Str, bounds: Sequence[ir.Value]) -> tuple[Str, ir.Value, ir.Value | None]:
    """The code points within bounds, the number of the first, and whether the bounds are outside of the text."""
    f, b = code.f, code.f.b
    if not bounds:
        return text, const(0), None
    count = strings.length(code, text)
    clipped = [f.max(b.select(b.icmp_signed("<", bound, const(0)), b.add(bound, count), bound), const(0))
               for bound in bounds]  # fmt: skip
    start, stop = clipped[0], count if len(clipped) == 1 else f.min(clipped[1], count)
    is_outside = b.icmp_signed(">", start, stop)
    begin = strings.advance(f, text, start)
    rest = Str(f.byte_at(text.ptr, begin), b.sub(text.size, begin))
    size = strings.advance(f, rest, b.sub(stop, f.min(start, stop)))
    return Str(rest.ptr, size), start, is_outside


def _hit(f: Fn, text: Str, wanted: Str, at: ir.Value) -> ir.Value:
    """The address of the first occurrence from a byte on; null if there is none."""
    return f.call("memmem", PTR, [f.byte_at(text.ptr, at), f.b.sub(text.size, at), wanted.ptr, wanted.size])


def _offset(f: Fn, hit: ir.Value, text: Str) -> ir.Value:
    return f.b.sub(f.b.ptrtoint(hit, I64), f.b.ptrtoint(text.ptr, I64))


def _first(code: Code, text: Str, wanted: Str) -> ir.Value:
    """The byte at which it is found first; -1 if nowhere."""
    f, b = code.f, code.f.b
    hit = _hit(f, text, wanted, const(0))
    is_empty = b.icmp_unsigned("==", wanted.size, const(0))
    found = b.select(b.icmp_unsigned("==", hit, _NULL), const(-1), _offset(f, hit, text))
    return b.select(is_empty, const(0), found)


def _last(code: Code, text: Str, wanted: Str) -> ir.Value:
    f, b = code.f, code.f.b
    found, at = f.var(I64, b.select(b.icmp_unsigned("==", wanted.size, const(0)), text.size, const(-1))), f.var(I64)
    at.set(b.select(b.icmp_unsigned("==", wanted.size, const(0)), b.add(text.size, const(1)), const(0)))
    with f.forever() as loop:
        loop.stop_if(b.icmp_signed(">=", at.get(), text.size))
        hit = _hit(f, text, wanted, at.get())
        loop.stop_if(b.icmp_unsigned("==", hit, _NULL))
        found.set(_offset(f, hit, text))
        at.set(b.add(found.get(), const(1)))
    return found.get()


def _count(code: Code, text: Str, wanted: Str) -> ir.Value:
    """How often it is found, one after the other; the empty text before each code point and at the end."""
    f, b = code.f, code.f.b
    total, at = f.var(I64, const(0)), f.var(I64, const(0))
    with f.when_else(b.icmp_unsigned("==", wanted.size, const(0))) as (empty, other):
        with empty:
            total.set(b.add(strings.length(code, text), const(1)))
        with other, f.forever() as loop:
            loop.stop_if(b.icmp_signed(">=", at.get(), text.size))
            hit = _hit(f, text, wanted, at.get())
            loop.stop_if(b.icmp_unsigned("==", hit, _NULL))
            total.set(b.add(total.get(), const(1)))
            at.set(b.add(_offset(f, hit, text), wanted.size))
    return total.get()


def partition(code: Code, fn: str, text: Str, separator: Str, fail: Fail) -> tuple[Str, Str, Str]:
    """The text before a separator, the separator, and the text after it; all of the text is one end if it has none."""
    f, b = code.f, code.f.b
    fail("an empty separator", b.icmp_unsigned("==", separator.size, const(0)))
    place = (_last if fn == "rpartition" else _first)(code, text, separator)
    is_missing = b.icmp_signed("<", place, const(0))
    missing = text.size if fn == "partition" else const(0)
    before = b.select(is_missing, missing, place)
    middle = b.select(is_missing, const(0), separator.size)
    after = b.add(before, middle)
    return (Str(text.ptr, before), Str(f.byte_at(text.ptr, before), middle),
            Str(f.byte_at(text.ptr, after), b.sub(text.size, after)))


def without(code: Code, fn: str, text: Str, part: Str) -> Str:
    """removeprefix and removesuffix."""
    f, b = code.f, code.f.b
    is_there = f.var(I1, const(0, I1))
    rest = b.sub(text.size, part.size)
    with f.when(b.icmp_signed(">=", rest, const(0))):
        start = text.ptr if fn == "removeprefix" else f.byte_at(text.ptr, rest)
        is_there.set(strings.equal(code, Str(start, part.size), part))
    size = b.select(is_there.get(), rest, text.size)
    return Str(text.ptr if fn == "removesuffix" else f.byte_at(text.ptr, b.sub(text.size, size)), size)


# --- classes of characters

_PAGE = 256
_TESTS: dict[str, Callable[[str], bool]] = {
    "islower": lambda char: char.islower(),
    "isupper": lambda char: char.isupper(),
    "not islower": lambda char: char.isupper() or char.istitle(),  # what a text of lower case does not have
    "not isupper": lambda char: char.islower() or (char.istitle() and not char.isupper()),
}


@cache
def _class_data(name: str) -> tuple[bytes, bytes]:
    """Numbers of pages, and pages with a bit for each code point: whether it is of the class."""
    test = _TESTS.get(name) or getattr(str, name)
    pages: dict[bytes, int] = {}
    index = []
    for first in range(0, 0x110000, _PAGE):
        bits = sum(1 << place for place in range(_PAGE) if test(chr(first + place)))
        index.append(pages.setdefault(bits.to_bytes(_PAGE // 8, "little"), len(pages)))
    return struct.pack(f"<{len(index)}H", *index), b"".join(pages)


def _is_of_class(code: Code, name: str, point: ir.Value) -> ir.Value:
    f, b = code.f, code.f.b
    index, pages = (f.constant_array(f"{name}.{part}", ir.ArrayType(I8, len(data)), bytearray(data))
                    for part, data in zip(("index", "pages"), _class_data(name), strict=True))
    page = f.load(index, b.zext(b.lshr(point, const(8, point.type)), I64), I16)
    place = b.and_(b.zext(point, I64), const(_PAGE - 1))
    at = b.add(b.mul(b.zext(page, I64), const(_PAGE // 8)), b.lshr(place, const(3)))
    bit = b.lshr(f.load(pages, at, I8), b.trunc(b.and_(place, const(7)), I8))
    return b.trunc(bit, I1)


def all_of_class(code: Code, fn: str, text: Str) -> ir.Value:
    """isdigit, isupper and the like: of all characters, of which there is one at least."""
    f, b = code.f, code.f.b
    if fn == "isascii":
        high = f.var(I8, const(0, I8))
        with f.loop(text.size) as k:
            high.set(b.or_(high.get(), f.load_input(f.byte_at(text.ptr, k), I8)))
        return b.icmp_signed(">=", high.get(), const(0, I8))
    return b.trunc(b.call(code.helper(fn, lambda code: _all_of_class(code, fn)), [text.ptr, text.size]), I1)


def _all_of_class(code: Code, fn: str) -> ir.Function:
    f = code.f
    with f.function(fn, I8, [PTR, I64]) as fn_:
        b = f.b
        text = Str(*fn_.args)
        has_case = fn in ("isupper", "islower")
        is_seen = f.var(I1, const(int(fn == "isprintable"), I1))
        at = f.var(I64, const(0))
        with f.forever() as loop:
            loop.stop_if(b.icmp_signed(">=", at.get(), text.size))
            point, size = decode(code, text, at.get())
            of_class = _is_of_class(code, fn, point)
            refused = _is_of_class(code, f"not {fn}", point) if has_case else b.not_(of_class)
            with f.when(refused):
                f.give(const(0, I8))
            is_seen.set(b.or_(is_seen.get(), of_class))
            at.set(b.add(at.get(), size))
        b.ret(b.zext(is_seen.get(), I8))
    return fn_
