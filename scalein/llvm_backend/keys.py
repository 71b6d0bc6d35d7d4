"""Keys of tables and joins: their canonical form, in which equal keys have equal bits, and their hash.

A float's NaNs become one NaN and -0.0 becomes 0.0 (`values.canonical`); a null's value is zero and its bit is set in
the row's null word; a string becomes 16 bytes: its size and 12 bytes of text, or its size, 4 bytes
and a pointer. A block's keys are laid out in scratch, one array a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llvmlite import ir

from scalein.dtypes import DType
from scalein.ir.exprs import Expr, type_of
from scalein.layout import INLINE_BYTES, NULL_BITS
from scalein.llvm_backend.block import PADDED, Block, rows
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.exprs import lower_expr
from scalein.llvm_backend.fn import I1, I8, I16, I32, I64, I128, PTR, Fn, const
from scalein.llvm_backend.values import Env, Row, Str, Value, canonical

# Odd constants with well mixed bits; changing one changes which group a key belongs to.
MIX = (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F)
PAGE = 4096


@dataclass(frozen=True, slots=True)
class KeyBlock:
    """Scratch arrays of a block's canonical keys, null words and hashes."""

    types: tuple[DType, ...]
    data: tuple[ir.Value, ...]
    nulls: ir.Value | None
    hashes: ir.Value


def mix(f: Fn, h: ir.Value, word: ir.Value) -> ir.Value:
    """Fold one more word into a hash. The top 32 bits, which the index uses, depend on every bit."""
    b = f.b
    x = b.xor(h, word)
    x = b.xor(x, b.lshr(x, const(32)))
    x = b.mul(x, const(MIX[0]))
    x = b.xor(x, b.lshr(x, const(29)))
    return b.mul(x, const(MIX[1]))


def _widened(f: Fn, data: ir.Value) -> ir.Value:
    return data if data.type == I64 else f.b.zext(data, I64)


def halves(f: Fn, data: ir.Value) -> list[ir.Value]:
    """The words of a canonical key that are hashed: a decimal has two."""
    if data.type != I128:
        return [data]
    return [f.b.trunc(data, I64), f.b.trunc(f.b.lshr(data, const(64, I128)), I64)]


def hash_words(f: Fn, words: Sequence[ir.Value], nulls: ir.Value | None) -> ir.Value:
    """The hash of canonical words; a null word of zero does not count."""
    h: ir.Value = const(MIX[2])
    for word in words:
        h = mix(f, h, _widened(f, word))
    if nulls is not None:
        h = f.b.select(f.b.icmp_unsigned("==", nulls, const(0)), h, mix(f, h, nulls))
    return h


def null_word(f: Fn, values: Sequence[Value]) -> ir.Value:
    word: ir.Value = const(0)
    for k, value in enumerate(values):
        if value.valid is not None:
            word = f.b.or_(word, f.b.select(value.valid, const(0), const(1 << min(k, NULL_BITS - 1))))
    return word


def key_block(code: Code, block: Block, env: Env, keys: Sequence[Expr], has_nulls: bool,
              slices: ir.Value | None = None) -> KeyBlock:
    """Compute, canonicalise and hash the keys of a block's live rows (with its slice, if it is a key)."""
    f = code.f
    types = tuple(type_of(key) for key in keys)
    arrays = tuple(key_array(f, k, t) for k, t in enumerate(types))
    nulls = f.scratch(I64, PADDED, "nulls") if has_nulls else None
    hashes = f.scratch(I64, PADDED, "hashes")
    with rows(code, block) as row:
        word, h = row_key(code, row, env, keys, has_nulls, arrays)
        if slices is not None:
            h = mix(f, h, f.load(slices, row.k, I64))
        if nulls is not None:
            f.store(word, nulls, row.k)
        f.store(h, hashes, row.k)
    return KeyBlock(types, arrays, nulls, hashes)


def row_key(code: Code, row: Row, env: Env, keys: Sequence[Expr], has_nulls: bool,
            arrays: Sequence[ir.Value] = ()) -> tuple[ir.Value, ir.Value]:
    """Null word and hash of one row's keys; canonical keys are stored if there are arrays for them."""
    f = code.f
    values = [lower_expr(code, key, env, row) for key in keys]
    words: list[ir.Value] = []
    for k, (key, value) in enumerate(zip(keys, values, strict=True)):
        if isinstance(value.data, Str):
            text = value.data if value.valid is None else Str(
                value.data.ptr, f.b.select(value.valid, value.data.size, const(0)))
            low, high = first_bytes(code, text)
            if arrays:
                first, second = string_words(f, text, low, high)
                twice = f.b.shl(row.k, const(1))
                f.store(first, arrays[k], twice)
                f.store(second, arrays[k], f.b.add(twice, const(1)))
            words.append(hash_string(code, text, low, high))
        else:
            plain = canonical(f, value, type_of(key)).data
            if arrays:
                f.store(plain, arrays[k], row.k)
            words += halves(f, plain)
    word = null_word(f, values)
    return word, hash_words(f, words, word if has_nulls else None)


def array_type(dtype: DType) -> ir.Type:
    if dtype.is_bytes:
        return I64
    return {1: I8, 8: I8, 16: I16, 32: I32, 64: I64, 128: I128}[dtype.bits]


def key_array(f: Fn, number: int, dtype: DType) -> ir.Value:
    """Scratch for a key of a block's rows: a string takes two words."""
    return f.scratch(array_type(dtype), PADDED * (2 if dtype.is_bytes else 1), f"key{number}")


def key_at(f: Fn, block: KeyBlock, number: int, k: ir.Value) -> ir.Value | tuple[ir.Value, ir.Value]:
    """Canonical key of row k: an integer, or the two words of a string."""
    array, dtype = block.data[number], block.types[number]
    if dtype.is_bytes:
        twice = f.b.shl(k, const(1))
        return f.load(array, twice, I64), f.load(array, f.b.add(twice, const(1)), I64)
    return f.load(array, k, array_type(dtype))


# --- strings


def first_bytes(code: Code, text: Str) -> tuple[ir.Value, ir.Value]:
    """Bytes 0-7 and 8-15 of a string, zero where it ends.

    Sixteen bytes are loaded at once where they lie in one page with the first (which is readable);
    near a page's end, and always in safe mode, byte by byte. An empty string reads a constant.
    """
    f, b = code.f, code.f.b
    empty = b.icmp_unsigned("==", text.size, const(0))
    ptr = b.select(empty, code.text(b""), text.ptr)
    low, high = f.var(I64), f.var(I64)
    inside = b.icmp_unsigned("<=", b.and_(b.ptrtoint(ptr, I64), const(PAGE - 1)), const(PAGE - 16))
    if f.safe:
        inside = empty
    with f.when_else(inside, likely=True) as (fast, slow):
        with fast:
            low.set(f.load_input(ptr, I64, align=1))
            high.set(f.load_input(f.byte_at(ptr, 8), I64, align=1))
        with slow:
            buffer = f.scratch(I64, 2, "edge")
            f.store(const(0), buffer, const(0))
            f.store(const(0), buffer, const(1))
            with f.loop(f.min(text.size, const(16))) as i:
                f.store(f.load_input(f.byte_at(ptr, i), I8), buffer, i)
            low.set(f.load(buffer, const(0), I64))
            high.set(f.load(buffer, const(1), I64))
    return b.and_(low.get(), byte_mask(f, text.size)), b.and_(high.get(), byte_mask(f, b.sub(text.size, const(8))))


def byte_mask(f: Fn, count: ir.Value) -> ir.Value:
    """A mask of the first `count` bytes of a word; all for 8 and more, none for 0 and fewer."""
    bits = f.b.shl(f.min(f.max(count, const(0)), const(7)), const(3))
    part = f.b.sub(f.b.shl(const(1), bits), const(1))
    return f.b.select(f.b.icmp_signed(">=", count, const(8)), const(-1), part)


def string_words(f: Fn, text: Str, low: ir.Value, high: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The 16 bytes that stand for a string, as two words, from its first bytes."""
    b = f.b
    first = b.or_(text.size, b.shl(low, const(32)))
    inline = b.or_(b.lshr(low, const(32)), b.shl(high, const(32)))
    short = b.icmp_unsigned("<=", text.size, const(INLINE_BYTES))
    return first, b.select(short, inline, b.ptrtoint(text.ptr, I64))


def _fold(f: Fn, h: ir.Value, word: ir.Value) -> ir.Value:
    """One more word of a string: half of `mix`, which follows for the string as a whole."""
    x = f.b.mul(f.b.xor(h, word), const(MIX[0]))
    return f.b.xor(x, f.b.lshr(x, const(32)))


def hash_string(code: Code, text: Str, low: ir.Value, high: ir.Value) -> ir.Value:
    """Size and up to 16 bytes at once; longer strings go on in 8-byte steps, the last overlapping."""
    f, b = code.f, code.f.b
    h = f.var(I64, _fold(f, _fold(f, text.size, low), high))
    with f.when(b.icmp_unsigned(">", text.size, const(16))):
        end = b.sub(text.size, const(8))
        with f.loop(end, start=const(16), step=8) as i:
            h.set(_fold(f, h.get(), f.load_input(f.byte_at(text.ptr, i), I64, align=1)))
        h.set(_fold(f, h.get(), f.load_input(f.byte_at(text.ptr, end), I64, align=1)))
    return h.get()


def same_string(code: Code, stored: ir.Value, first: ir.Value, second: ir.Value) -> ir.Value:
    """Whether a record's string (16 bytes at `stored`) equals a canonical one."""
    f, b = code.f, code.f.b
    same = f.var(I1, b.icmp_unsigned("==", b.load(stored, typ=I64, align=8), first))
    with f.when(same.get()):
        other = b.load(f.byte_at(stored, 8), typ=I64, align=8)
        size = b.and_(first, const(0xFFFFFFFF))
        same.set(b.icmp_unsigned("==", other, second))
        far = b.and_(b.not_(same.get()), b.icmp_unsigned(">", size, const(INLINE_BYTES)))
        with f.when(far):
            ptr = b.load(f.byte_at(stored, 8), typ=PTR, align=8)
            given = f.scratch(I64, 1, "given")
            f.store(second, given)
            same.set(b.icmp_unsigned("==", f.call("memcmp", I32, [ptr, b.load(given, typ=PTR), size]), const(0, I32)))
    return same.get()
