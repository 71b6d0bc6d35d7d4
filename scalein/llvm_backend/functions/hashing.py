"""Column.hash() in a kernel: XXH64 as `scalein.ir.functions.hashing` defines it, word for word. (Tables and joins hash
their keys in another way: `llvm_backend/keys.py`.)

Numbers have a fixed number of bytes, so their hash is straight code that vectorizes. Text goes through the whole
algorithm: stripes of 32 bytes, then words of 8, of 4, and single bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from llvmlite import ir

from scalein.dtypes import DType
from scalein.ir.functions.hashing import P1, P2, P3, P4, P5, SEED, hashed_bits
from scalein.llvm_backend.fn import I8, I32, I64, Fn, Var, const
from scalein.llvm_backend.functions.registry import CallSite, lowers
from scalein.llvm_backend.values import Str, Value, canonical


@lowers("hash")
def _hash(c: CallSite) -> Value:
    """The hash of a value, and the seed for null."""
    f, (value,), (dtype,) = c.f, c.values, c.types
    found = _text(f, value.string) if dtype.is_bytes else _number(f, value, dtype)
    return Value(found if value.valid is None else f.b.select(value.valid, found, const(SEED)))


def _number(f: Fn, value: Value, dtype: DType) -> ir.Value:
    data, bits = canonical(f, Value(value.data), dtype).number, hashed_bits(dtype)
    if data.type.width < bits:
        data = (f.b.sext if dtype.is_signed else f.b.zext)(data, ir.IntType(bits))
    words = [f.b.trunc(f.b.lshr(data, const(64 * k, data.type)), I64) for k in range(2)] if bits == 128 else [
        f.b.trunc(data, I64) if data.type.width > 64 else data]  # fmt: skip
    found: ir.Value = const(SEED + P5 + bits // 8)
    for word in words:
        found = _of_four(f, found, word) if bits == 32 else _of_eight(f, found, word)
    return _finished(f, found)


def _text(f: Fn, text: Str) -> ir.Value:
    found, at = f.var(I64, const(SEED + P5)), f.var(I64, const(0))
    with f.when(f.b.icmp_signed(">=", text.size, const(32)), likely=False):
        found.set(_stripes(f, text, at))
    found.set(f.b.add(found.get(), text.size))
    with _while_left(f, text, at, 8) as ptr:
        found.set(_of_eight(f, found.get(), f.load_input(ptr, I64, align=1)))
    with _while_left(f, text, at, 4) as ptr:
        found.set(_of_four(f, found.get(), f.load_input(ptr, I32, align=1)))
    with _while_left(f, text, at, 1) as ptr:
        byte = f.b.zext(f.load_input(ptr, I8), I64)
        found.set(f.b.mul(_rotated(f, f.b.xor(found.get(), f.b.mul(byte, const(P5))), 11), const(P1)))
    return _finished(f, found.get())


def _stripes(f: Fn, text: Str, at: Var) -> ir.Value:
    """Four lanes over 32 bytes at a time, and what they come to."""
    b = f.b
    lanes = [f.var(I64, const(start)) for start in (SEED + P1 + P2, SEED + P2, SEED, SEED - P1)]
    with _while_left(f, text, at, 32) as ptr:
        for k, lane in enumerate(lanes):
            lane.set(_round(f, lane.get(), f.load_input(f.byte_at(ptr, 8 * k), I64, align=1)))
    found: ir.Value = const(0)
    for lane, by in zip(lanes, (1, 7, 12, 18), strict=True):
        found = b.add(found, _rotated(f, lane.get(), by))
    for lane in lanes:
        found = b.add(b.mul(b.xor(found, _round(f, const(0), lane.get())), const(P1)), const(P4))
    return found


@contextmanager
def _while_left(f: Fn, text: Str, at: Var, size: int) -> Iterator[ir.Value]:
    """A loop over the whole pieces of that many bytes; yields where each begins."""
    with f.forever() as loop:
        after = f.b.add(at.get(), const(size))
        loop.stop_if(f.b.icmp_signed(">", after, text.size))
        yield f.byte_at(text.ptr, at.get())
        at.set(after)


def _of_eight(f: Fn, found: ir.Value, word: ir.Value) -> ir.Value:
    mixed = _rotated(f, f.b.xor(found, _round(f, const(0), word)), 27)
    return f.b.add(f.b.mul(mixed, const(P1)), const(P4))


def _of_four(f: Fn, found: ir.Value, word: ir.Value) -> ir.Value:
    mixed = _rotated(f, f.b.xor(found, f.b.mul(f.b.zext(word, I64), const(P1))), 23)
    return f.b.add(f.b.mul(mixed, const(P2)), const(P3))


def _round(f: Fn, lane: ir.Value, word: ir.Value) -> ir.Value:
    return f.b.mul(_rotated(f, f.b.add(lane, f.b.mul(word, const(P2))), 31), const(P1))


def _rotated(f: Fn, number: ir.Value, by: int) -> ir.Value:
    return f.call("llvm.fshl.i64", I64, [number, number, const(by)])


def _finished(f: Fn, found: ir.Value) -> ir.Value:
    for shift, prime in ((33, P2), (29, P3)):
        found = f.b.mul(f.b.xor(found, f.b.lshr(found, const(shift))), const(prime))
    return f.b.xor(found, f.b.lshr(found, const(32)))
