"""Block: the rows a kernel works on at once (`layout.BLOCK_ROWS`), and how filters thin them out.

A block starts dense: row k of the block is row base + k of the input. The first filter makes a
selection vector (row numbers within the block, 32 bits, ascending); later ones compact it. A join adds a
vector of row numbers in its table beside it. Whatever loop comes next runs over the live rows only.

Compaction is explicit vector code: LLVM does not find it. With AVX-512 sixteen row numbers are
compressed in a register and stored; elsewhere a table of 256 entries gives the positions of the set
bits of eight rows' mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from llvmlite import ir

from scalein.layout import BLOCK_ROWS
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.fn import I1, I8, I16, I32, I64, Fn, const
from scalein.llvm_backend.values import Row

# Compaction writes whole vectors: 16 lanes past the last selected row.
PADDED = BLOCK_ROWS + 16


@dataclass(frozen=True, slots=True)
class Block:
    """Live rows of the current block: how many, and a vector of row numbers for each input.

    A None vector is dense. Numbers of the batch (`in`) count from the block's first row, those of a
    joined table from the table's first row.
    """

    count: ir.Value
    vectors: dict[str, ir.Value | None]

    def row(self, f: Fn, k: ir.Value, live: ir.Value | None = None) -> Row:
        def offset(vector: ir.Value | None) -> Callable[[ir.Value], ir.Value]:
            if vector is None:
                return lambda k: k
            return lambda k: f.b.sext(f.load(vector, k, I32), I64)

        return Row(f, k, {name: offset(vector) for name, vector in self.vectors.items()}, live)


@contextmanager
def rows(code: Code, block: Block, rare: bool = False) -> Iterator[Row]:
    """A loop over the live rows of a block."""
    with code.f.loop(block.count, rare=rare) as k:
        yield block.row(code.f, k)


def keep(code: Code, block: Block, test: Callable[[Row], ir.Value]) -> Block:
    """The rows for which `test` gives true: a vector loop of tests, then compaction."""
    f = code.f
    mask = f.scratch(I8, PADDED, "mask")
    selected = f.var(I64, const(0))
    with rows(code, block) as row:
        flag = f.b.zext(test(row), I8)
        f.store(flag, mask, row.k)
        selected.set(f.b.add(selected.get(), f.b.zext(flag, I64)))
    # When all rows stay, so do the vectors: nothing is copied.
    whole = f.b.icmp_signed("==", selected.get(), block.count)
    vectors: dict[str, ir.Value | None] = {}
    for name, old in block.vectors.items():
        new = f.scratch(I32, PADDED, f"rows.{name}")
        with f.when(f.b.not_(whole)):
            _compact(code, mask, old, new, block.count)
        vectors[name] = f.b.select(whole, _all_rows(code) if old is None else old, new)
    code.check("the number of rows in a block", f.b.icmp_unsigned("<=", selected.get(), const(BLOCK_ROWS)))
    return replace(block, count=selected.get(), vectors=vectors)


def _all_rows(code: Code) -> ir.Value:
    """The vector 0, 1, 2, ... that stands for a dense block."""
    # As bytes: llvmlite writes them as one string, and 1,024 numbers one by one.
    numbers = bytearray(b"".join(k.to_bytes(4, "little") for k in range(BLOCK_ROWS)))
    return code.f.constant_array("all_rows", ir.ArrayType(I8, len(numbers)), numbers, align=64)


def _compact(code: Code, mask: ir.Value, old: ir.Value | None, new: ir.Value | None, count: ir.Value) -> None:
    """Row numbers whose mask byte is set, in order."""
    f = code.f
    wide = "compress" in f.features
    lanes = 16 if wide else 8
    vector = ir.VectorType(I32, lanes)
    # The last vector reaches past `count`: its mask bytes must be zero.
    f.store(ir.Constant(ir.VectorType(I8, 16), [0] * 16), f.at(mask, count, I8), align=1)
    at = f.var(I64, const(0))
    steps = ir.Constant(vector, list(range(lanes)))
    with f.loop(count, step=lanes) as k:
        bytes_ = f.b.load(f.at(mask, k, I8), typ=ir.VectorType(I8, lanes), align=1)
        bits = f.b.trunc(bytes_, ir.VectorType(I1, lanes))
        if old is None:
            numbers = f.b.add(steps, _splat(f, f.b.trunc(k, I32), lanes))
        else:
            numbers = f.b.load(f.at(old, k, I32), typ=vector, align=4)
        target = f.at(new, at.get(), I32)
        packed = f.b.bitcast(bits, ir.IntType(lanes))
        if wide:
            squeezed = f.call(f"llvm.experimental.vector.compress.v{lanes}i32", vector,
                              [numbers, bits, ir.Constant(vector, ir.Undefined)])
            f.store(squeezed, target, align=4)
        else:
            _store_by_table(code, numbers, packed, target, old is None, f.b.trunc(k, I32))
        hits = f.b.zext(f.b.ctpop(packed), I64) if lanes < 64 else f.b.ctpop(packed)
        at.set(f.b.add(at.get(), hits))


def _splat(f: Fn, value: ir.Value, lanes: int) -> ir.Value:
    vector = ir.VectorType(value.type, lanes)
    one = f.b.insert_element(ir.Constant(vector, ir.Undefined), value, const(0, I32))
    zeros = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
    return f.b.shuffle_vector(one, ir.Constant(vector, ir.Undefined), zeros)


def _store_by_table(code: Code, numbers: ir.Value, packed: ir.Value, target: ir.Value, dense: bool,
                    k: ir.Value) -> None:
    """Compress eight lanes without AVX-512: the set bits' positions come from a table by mask."""
    f = code.f
    table = _positions(code)
    entry = f.at(table, f.b.mul(f.b.zext(packed, I64), const(8)), I8)
    positions = f.b.load(entry, typ=ir.VectorType(I8, 8), align=8)
    wide = f.b.zext(positions, ir.VectorType(I32, 8))
    if dense:
        f.store(f.b.add(wide, _splat(f, k, 8)), target, align=4)
        return
    spill = f.scratch(I32, 8, "lanes")
    f.store(numbers, spill, align=32)
    for lane in range(8):
        position = f.b.zext(f.b.extract_element(positions, const(lane, I32)), I64)
        f.store(f.load(spill, position, I32), target, const(lane))


def _positions(code: Code) -> ir.Value:
    """For each mask of eight rows, the positions of its set bits."""
    flat: list[int] = []
    for mask in range(256):
        hits = [bit for bit in range(8) if mask >> bit & 1]
        flat += hits + [0] * (8 - len(hits))
    return code.f.constant_array("set_bit_positions", ir.ArrayType(I8, len(flat)), bytearray(flat), align=64)


def unpack_bits(f: Fn, bitmap: ir.Value, first: ir.Value, count: ir.Value, last_byte: ir.Value, out: ir.Value) -> None:
    """Bits first..first+count of a bitmap as bytes of 0 and 1; reads no byte after `last_byte`."""
    shift = f.b.trunc(f.b.and_(first, const(7)), I16)
    start = f.b.lshr(first, const(3))
    with f.loop(count, step=8) as k:
        at = f.b.add(start, f.b.lshr(k, const(3)))
        low = f.b.zext(f.load_input(f.at(bitmap, f.min(at, last_byte), I8), I8), I16)
        high = f.b.zext(f.load_input(f.at(bitmap, f.min(f.b.add(at, const(1)), last_byte), I8), I8), I16)
        word = f.b.lshr(f.b.or_(low, f.b.shl(high, const(8, I16))), shift)
        bits = f.b.bitcast(f.b.trunc(word, I8), ir.VectorType(I1, 8))
        f.store(f.b.zext(bits, ir.VectorType(I8, 8)), f.at(out, k, I8), align=1)
