"""What `split` gives, without memory of its own: the text, its separator, and a cursor that finds piece after piece.

Each piece is a view of the text. `len` and an index look for separators from the start of the text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from llvmlite import ir

from scalein.llvm_backend.code import Code
from scalein.llvm_backend.fn import I1, I64, PTR, Fn, Loop, const
from scalein.llvm_backend.functions import strings
from scalein.llvm_backend.functions.arithmetic import Fail
from scalein.llvm_backend.functions.udf_text import decode, space_ranges
from scalein.llvm_backend.values import Str, Value

_NULL = ir.Constant(PTR, None)
_PIECE = ir.LiteralStructType([I64, I64, I64])


@dataclass(frozen=True, slots=True)
class Pieces:
    """A text cut at a separator, or at whitespace where that is empty.

    The first `joined` separators cut nothing (rsplit with a limit); after `most` cuts comes the rest.
    """

    TYPES: ClassVar[tuple[ir.Type, ...]] = (PTR, I64, PTR, I64, I64, I64)
    text: Str
    separator: Str
    most: ir.Value
    joined: ir.Value

    @staticmethod
    def of(registers: list[ir.Value]) -> Pieces:
        start, size, separator, width, most, joined = registers
        return Pieces(Str(start, size), Str(separator, width), most, joined)

    def registers(self) -> list[ir.Value]:
        return [self.text.ptr, self.text.size, self.separator.ptr, self.separator.size, self.most, self.joined]


def pieces_of(value: Value) -> Pieces:
    assert isinstance(value.data, Pieces)
    return value.data


@dataclass(frozen=True, slots=True)
class Characters:
    """A text as its code points."""

    text: Str


class Cursor:
    """A place in a text, from which it steps from piece to piece."""

    def __init__(self, code: Code, over: Pieces | Characters) -> None:
        self._code, self._f, self._over = code, code.f, over
        self._at = code.f.var(I64, const(0))
        self._left = code.f.var(I64, over.most if isinstance(over, Pieces) else const(0))

    def step(self, loop: Loop) -> Str:
        """The next piece; where there is none, the loop ends."""
        f, b, over = self._f, self._f.b, self._over
        at = self._at.get()
        if isinstance(over, Characters):
            loop.stop_if(b.icmp_signed(">=", at, over.text.size))
            rest = Str(f.byte_at(over.text.ptr, at), b.sub(over.text.size, at))
            size = strings.advance(f, rest, const(1))
            self._at.set(b.add(at, size))
            return Str(rest.ptr, size)
        found = b.call(self._code.helper("piece", _piece), [*over.registers()[:4], over.joined, at, self._left.get()])
        start, size, following = (b.extract_value(found, place) for place in range(3))
        loop.stop_if(b.icmp_signed("<", start, const(0)))
        self._at.set(following)
        self._left.set(b.sub(self._left.get(), const(1)))  # below zero: without a limit
        return Str(f.byte_at(over.text.ptr, start), size)


def _piece(code: Code) -> ir.Function:
    """{ start, size, where the next one begins }; the start is -1 after the last."""
    f = code.f
    with f.function("piece", _PIECE, [PTR, I64, PTR, I64, I64, I64, I64]) as fn:
        b = f.b
        text, size, separator, width, joined, at, left = fn.args
        none = _piece_of(f, const(-1), const(0), at)
        with f.when(b.icmp_unsigned("==", width, const(0))):  # whitespace
            first = f.var(I64, at)
            with f.forever() as loop:
                end = b.icmp_signed(">=", first.get(), size)
                with f.when(end):
                    f.give(none)
                point, bytes_ = decode(code, Str(text, size), first.get())
                loop.stop_if(b.not_(_is_space(f, point)))
                first.set(b.add(first.get(), bytes_))
            start = first.get()
            with f.when(b.icmp_unsigned("==", left, const(0))):
                f.give(_piece_of(f, start, b.sub(size, start), size))
            with f.forever() as loop:
                loop.stop_if(b.icmp_signed(">=", first.get(), size))
                point, bytes_ = decode(code, Str(text, size), first.get())
                loop.stop_if(_is_space(f, point))
                first.set(b.add(first.get(), bytes_))
            f.give(_piece_of(f, start, b.sub(first.get(), start), first.get()))
        with f.when(b.icmp_signed(">", at, size)):
            f.give(none)
        place = f.var(I64, at)
        with f.when(b.icmp_unsigned("==", left, const(0))):
            f.give(_piece_of(f, at, b.sub(size, at), b.add(size, const(1))))
        skipped = f.var(I64, b.select(b.icmp_unsigned("==", at, const(0)), joined, const(0)))
        with f.forever() as loop:
            hit = f.call("memmem", PTR, [f.byte_at(text, place.get()), b.sub(size, place.get()), separator, width])
            with f.when(b.icmp_unsigned("==", hit, _NULL)):
                f.give(_piece_of(f, at, b.sub(size, at), b.add(size, const(1))))
            place.set(b.add(b.sub(b.ptrtoint(hit, I64), b.ptrtoint(text, I64)), width))
            loop.stop_if(b.icmp_signed("<=", skipped.get(), const(0)))
            skipped.set(b.sub(skipped.get(), const(1)))
        b.ret(_piece_of(f, at, b.sub(b.sub(place.get(), width), at), place.get()))
    return fn


def _piece_of(f: Fn, *parts: ir.Value) -> ir.Value:
    found = ir.Constant(_PIECE, ir.Undefined)
    for place, part in enumerate(parts):
        found = f.b.insert_value(found, part, place)
    return found


def _is_space(f: Fn, point: ir.Value) -> ir.Value:
    b = f.b
    inside = [b.icmp_unsigned("<=", b.sub(point, const(low, point.type)), const(high - low, point.type))
              for low, high in space_ranges()]  # fmt: skip
    return f.any_of(*inside)


def words(text: Str, most: ir.Value) -> Pieces:
    """`text.split(None, most)`."""
    return Pieces(text, Str(_NULL, const(0)), most, const(0))


def split(code: Code, text: Str, separator: Str, most: ir.Value, fail: Fail) -> Pieces:
    """`text.split(separator, most)`."""
    fail("an empty separator", code.f.b.icmp_unsigned("==", separator.size, const(0)))
    return Pieces(text, separator, most, const(0))


def split_from_right(code: Code, text: Str, separator: Str, most: ir.Value) -> Pieces:
    """`text.rsplit(separator, most)`: all separators but the last `most` stay in the first piece."""
    f, b = code.f, code.f.b
    whole = Pieces(text, separator, const(-1), const(0))
    cuts = b.sub(count(code, whole), const(1))
    joined = f.max(b.sub(cuts, most), const(0))
    is_limited = b.icmp_signed(">=", most, const(0))
    left = b.select(is_limited, f.min(most, cuts), const(-1))
    return Pieces(text, separator, left, b.select(is_limited, joined, const(0)))


def each(code: Code, pieces: Pieces, body: Callable[[Loop, Str], None]) -> None:
    cursor = Cursor(code, pieces)
    with code.f.forever() as loop:
        body(loop, cursor.step(loop))


def count(code: Code, pieces: Pieces) -> ir.Value:
    total = code.f.var(I64, const(0))
    each(code, pieces, lambda loop, piece: total.set(code.f.b.add(total.get(), const(1))))
    return total.get()


def is_empty(code: Code, pieces: Pieces) -> ir.Value:
    """Whether there is no piece: only of whitespace."""
    found = code.f.var(I1, const(1, I1))

    def first(loop: Loop, piece: Str) -> None:
        found.set(const(0, I1))
        loop.stop_if(const(1, I1))

    each(code, pieces, first)
    return found.get()


def item(code: Code, pieces: Pieces, index: ir.Value, fail: Fail) -> Str:
    """A piece by its number, which counts from the end if it is negative."""
    f, b = code.f, code.f.b
    if not (isinstance(index, ir.Constant) and not index.constant >> 63):
        before = f.var(I64, index)
        with f.when(b.icmp_signed("<", index, const(0))):
            before.set(b.add(index, count(code, pieces)))
            fail("list index out of range", b.icmp_signed("<", before.get(), const(0)))
        index = before.get()
    left, start, size = f.var(I64, index), f.var(PTR, pieces.text.ptr), f.var(I64, const(0))

    def step(loop: Loop, piece: Str) -> None:
        start.set(piece.ptr)
        size.set(piece.size)
        left.set(b.sub(left.get(), const(1)))
        loop.stop_if(b.icmp_signed("<", left.get(), const(0)))

    each(code, pieces, step)
    fail("list index out of range", b.icmp_signed(">=", left.get(), const(0)))
    return Str(start.get(), size.get())


def contains(code: Code, pieces: Pieces, text: Str) -> ir.Value:
    found = code.f.var(I1, const(0, I1))

    def look(loop: Loop, piece: Str) -> None:
        found.set(strings.equal(code, piece, text))
        loop.stop_if(found.get())

    each(code, pieces, look)
    return found.get()
