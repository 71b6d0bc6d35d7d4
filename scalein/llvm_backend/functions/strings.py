"""Strings: equality, order, search, length and slices over (pointer, size), without allocation.

A constant is compared by a few overlapping loads. A row whose size rules the match out reads the
constant's own bytes instead of its own, so the compare needs no branch and never leaves a buffer.
A null string is readable too: readers give it no bytes.
"""

from __future__ import annotations

from collections.abc import Generator

from llvmlite import ir

from scalein.ir.exprs import Call, Expr
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.fn import I1, I8, I16, I32, I64, PTR, Fn, const
from scalein.llvm_backend.functions.registry import CallSite, lowers, lowers_lazily
from scalein.llvm_backend.text_arena import joined
from scalein.llvm_backend.values import Str, Value

_WORDS = {1: I8, 2: I16, 4: I32, 8: I64}
MAX_UNROLLED_BYTES = 32  # a longer constant is compared by memcmp


@lowers("str_len")
def _str_len(c: CallSite) -> ir.Value:
    return length(c.code, c.string)


@lowers("starts_with", "ends_with", "contains")
def _match(c: CallSite) -> ir.Value:
    return match(c.code, c.call.fn, c.string, str(c.params[0]).encode())


@lowers("str_slice")
def _str_slice(c: CallSite) -> Str:
    return slice_(c.code, c.string, c.params)


@lowers_lazily("concat")
def _concat(c: CallSite) -> Generator[tuple[Expr, ir.Value | None], Value, Value]:
    """All texts of a chain of `+` at once; where the result is null, or nothing asks for it, there are no bytes."""
    pieces: list[Value] = []
    waiting: list[Expr] = [c.call]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Call) and node.fn == c.call.fn:
            waiting += reversed(node.args)
        else:
            pieces.append((yield node, c.live))
    valid = c.f.all_of(*(piece.valid for piece in pieces))
    is_asked = c.f.all_of(c.live, valid)
    texts = [piece.string for piece in pieces]
    if is_asked is not None:
        texts = [Str(text.ptr, c.f.b.select(is_asked, text.size, const(0))) for text in texts]
    return Value(joined(c.code, texts), valid)


def compare(code: Code, fn: str, a: Str, b: Str, literals: list[object]) -> ir.Value:
    if fn == "ne":
        return code.f.b.not_(compare(code, "eq", a, b, literals))
    if fn == "eq":
        for text, literal in ((a, literals[1]), (b, literals[0])):
            if literal is not None:
                return equals(code, text, as_bytes(literal))
        return equal(code, a, b)
    sign = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}[fn]
    return code.f.b.icmp_signed(sign, order(code, a, b), const(0))


def as_bytes(constant: object) -> bytes:
    """The bytes of a constant of text or binary; null has none."""
    if constant is None:
        return b""
    return constant if isinstance(constant, bytes) else str(constant).encode()


def equals(code: Code, text: Str, content: bytes) -> ir.Value:
    """text == content."""
    fits = code.f.b.icmp_unsigned("==", text.size, const(len(content)))
    return _same_bytes(code, text.ptr, content, fits)


def _same_bytes(code: Code, ptr: ir.Value, content: bytes, fits: ir.Value) -> ir.Value:
    """Whether the bytes at `ptr` are `content`, for rows in which `fits` says they can be read."""
    f, size = code.f, len(content)
    if size == 0:
        return fits
    constant = code.text(content)
    ptr = f.b.select(fits, ptr, constant)
    if size > MAX_UNROLLED_BYTES:
        return f.b.and_(fits, _memcmp_is_zero(f, ptr, constant, const(size)))
    width = max(w for w in _WORDS if w <= size)
    starts = sorted({*range(0, size - width + 1, width), size - width})
    different: ir.Value | None = None
    for start in starts:
        typ = _WORDS[width]
        want = const(int.from_bytes(content[start : start + width], "little"), typ)
        got = f.load_input(f.byte_at(ptr, start), typ, align=1)
        part = f.b.xor(got, want)
        different = part if different is None else f.b.or_(different, part)
    assert different is not None
    return f.b.and_(fits, f.b.icmp_unsigned("==", different, const(0, different.type)))


def _memcmp_is_zero(f: Fn, a: ir.Value, b: ir.Value, size: ir.Value) -> ir.Value:
    return f.b.icmp_unsigned("==", f.call("memcmp", I32, [a, b, size]), const(0, I32))


def equal(code: Code, a: Str, b: Str) -> ir.Value:
    """Whether two strings have the same bytes."""
    f = code.f
    same = f.var(I1, f.b.icmp_unsigned("==", a.size, b.size))
    with f.when(same.get()):
        same.set(_memcmp_is_zero(f, a.ptr, b.ptr, a.size))
    return same.get()


def order(code: Code, a: Str, b: Str) -> ir.Value:
    """Negative, zero or positive: byte order, then length."""
    f = code.f
    shorter = f.min(a.size, b.size)
    order = f.b.sext(f.call("memcmp", I32, [a.ptr, b.ptr, shorter]), I64)
    tie = f.b.icmp_unsigned("==", order, const(0))
    return f.b.select(tie, f.b.sub(a.size, b.size), order)


def match(code: Code, fn: str, text: Str, pattern: bytes) -> ir.Value:
    """starts_with, ends_with or contains a constant."""
    f = code.f
    size = const(len(pattern))
    fits = f.b.icmp_signed(">=", text.size, size)
    if fn == "starts_with":
        return _same_bytes(code, text.ptr, pattern, fits)
    if fn == "ends_with":
        return _same_bytes(code, f.byte_at(text.ptr, f.b.sub(text.size, size)), pattern, fits)
    if not pattern:
        return const(1, I1)
    found = f.var(I1, const(0, I1))
    with f.when(fits):
        hit = f.call("memmem", PTR, [text.ptr, text.size, code.text(pattern), size])
        found.set(f.b.icmp_unsigned("!=", hit, ir.Constant(PTR, None)))
    return found.get()


def _is_start(f: Fn, byte: ir.Value) -> ir.Value:
    """Whether a byte of UTF-8 begins a code point."""
    return f.b.icmp_unsigned("!=", f.b.and_(byte, const(0xC0, I8)), const(0x80, I8))


def length(code: Code, text: Str) -> ir.Value:
    """Code points."""
    f = code.f
    total = f.var(I64, const(0))
    with f.loop(text.size) as i:
        start = _is_start(f, f.load_input(f.byte_at(text.ptr, i), I8))
        total.set(f.b.add(total.get(), f.b.zext(start, I64)))
    return total.get()


def advance(f: Fn, text: Str, points: ir.Value) -> ir.Value:
    """Bytes of the first `points` code points, at most all."""
    at, left = f.var(I64, const(0)), f.var(I64, points)
    with f.forever() as loop:
        loop.stop_if(f.b.icmp_signed(">=", at.get(), text.size))
        byte = f.load_input(f.byte_at(text.ptr, at.get()), I8)
        start = _is_start(f, byte)
        loop.stop_if(f.b.and_(start, f.b.icmp_signed("<=", left.get(), const(0))))
        left.set(f.b.sub(left.get(), f.b.zext(start, I64)))
        at.set(f.b.add(at.get(), const(1)))
    return at.get()


def slice_(code: Code, text: Str, params: tuple[object, ...]) -> Str:
    """Code points [offset, offset + length); a negative offset counts from the end."""
    f = code.f
    offset = int(str(params[0]))
    first: ir.Value = const(offset)
    room: ir.Value | None = None if params[1] is None else const(int(str(params[1])))
    if offset < 0:
        first = f.b.add(length(code, text), const(offset))
        if room is not None:  # a start before the string eats into the length
            room = f.max(f.b.add(room, f.min(first, const(0))), const(0))
        first = f.max(first, const(0))
    start = advance(f, text, first)
    rest = Str(f.byte_at(text.ptr, start), f.b.sub(text.size, start))
    return rest if room is None else Str(rest.ptr, advance(f, rest, room))
