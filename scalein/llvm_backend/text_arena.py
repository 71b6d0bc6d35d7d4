"""Text that a kernel makes, such as a concatenation: bytes on the C heap, which stay until the next block begins.

A kernel takes the bytes from a chunk, and from a new chunk when that is used up: text that was made never moves, and
nothing need be measured before. A chunk begins with the address of the one before it. When a block begins, the last
chunk is used from its start again and the others are freed; the last one is freed with the frame (`FrameData`). Rows
of a partition point to their text until the frame goes, so `Partition` kernels never call `begin_block`.

What is written here must not be stored by `Fn.store`, which says that no input is written: made text is read as input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from llvmlite import ir

from scalein.ir.exprs import Expr
from scalein.ir.functions.registry import makes_text
from scalein.ir.stages import Partition, Stage, step_exprs
from scalein.layout import ERROR
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.fn import I1, I64, PTR, const
from scalein.llvm_backend.values import Str

CHUNK_BYTES = 1 << 16  # some dozen bytes for each row of a block are not uncommon
HEADER_BYTES = 16
_NULL = ir.Constant(PTR, None)


def forgets_text(stage: Stage, sink_exprs: list[Expr]) -> bool:
    """Whether a stage makes text, and no longer needs it when a block ends."""
    exprs = [*sink_exprs, *step_exprs(stage.steps)]
    return not isinstance(stage.sink, Partition) and any(map(makes_text, exprs))


def begin_block(code: Code) -> None:
    """Forget the text of the block before."""
    f, b = code.f, code.f.b
    last = f.get_slot("text.chunk", PTR)
    with f.when(b.icmp_unsigned("!=", last, _NULL)):
        chunk = f.var(PTR, b.load(last, typ=PTR))
        with f.forever() as loop:
            loop.stop_if(b.icmp_unsigned("==", chunk.get(), _NULL))
            before = b.load(chunk.get(), typ=PTR)
            f.call("free", ir.VoidType(), [chunk.get()])
            chunk.set(before)
        b.store(_NULL, last)
        f.set_slot("text.at", f.byte_at(last, HEADER_BYTES))


class TextPlaces(NamedTuple):
    """Where a kernel has the places of made text: of the next one, of the end of the chunk, and of the chunk."""

    at: ir.Value
    end: ir.Value
    chunk: ir.Value


def text_places(code: Code) -> TextPlaces:
    return TextPlaces(*(code.f.slot_ptr(f"text.{name}") for name in TextPlaces._fields))


def new_text(code: Code, size: ir.Value) -> ir.Value:
    """The address of `size` bytes to write a text to."""
    f = code.f

    def leave(is_missing: ir.Value) -> None:
        with f.when(is_missing, likely=False):
            f.set_slot("errors", const(1 << code.bit(NO_MEMORY)))
            f.leave(ERROR)

    return take_text(code, text_places(code), size, leave)


NO_MEMORY = "no memory for text"


def take_text(code: Code, places: TextPlaces, size: ir.Value, fail: Callable[[ir.Value], None]) -> ir.Value:
    """The same where there is no frame: in the function of a udf. `fail` leaves it under a condition."""
    f, b = code.f, code.f.b
    is_full = b.icmp_unsigned(">=", b.add(b.load(places.at, typ=I64), size), b.load(places.end, typ=I64))
    with f.when(is_full, likely=False):
        room = f.max(const(CHUNK_BYTES), b.add(size, const(HEADER_BYTES + 1)))
        chunk = f.call("malloc", PTR, [room])
        fail(b.icmp_unsigned("==", chunk, _NULL))
        b.store(b.load(places.chunk, typ=PTR), chunk)
        b.store(chunk, places.chunk)
        b.store(f.byte_at(chunk, HEADER_BYTES), places.at)
        b.store(f.byte_at(chunk, room), places.end)
    start = b.load(places.at, typ=PTR)
    b.store(f.byte_at(start, size), places.at)
    return start


def joined(code: Code, pieces: list[Str], new: Callable[[ir.Value], ir.Value] | None = None) -> Str:
    """The bytes of all pieces, one after the other; `new` gives the address of so many bytes."""
    f, b = code.f, code.f.b
    total: ir.Value = const(0)
    for piece in pieces:
        total = b.add(total, piece.size)
    start = at = new_text(code, total) if new is None else new(total)
    for piece in pieces:
        f.call("llvm.memcpy.p0.p0.i64", ir.VoidType(), [at, piece.ptr, piece.size, const(0, I1)])
        at = f.byte_at(at, piece.size)
    return Str(start, total)
