"""Bulk work on the bytes of stored tables: copies, checksums, gathered records, undo logs.

A row of these kernels is a page, a block or an entry. They run in background threads beside kernels that change what
they read: a copy may be torn, and the undo log mends it.
"""

from __future__ import annotations

from llvmlite import ir

from scalein.errors import InternalError
from scalein.ir.stages import Bulk
from scalein.layout import PAGE_BYTES, UNDO_BATCH_SHIFT
from scalein.llvm_backend.block import Block
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.fn import I1, I32, I64, PTR, const

# The checksum, as `state/checksum.py` defines it.
LANES = 8
_SEED, _MIX, _FOLD = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F
_VECTOR = ir.VectorType(I64, LANES)


def lower_bulk(code: Code, sink: Bulk, block: Block, start: ir.Value) -> None:
    f = code.f
    lower = {"copy": _copy, "checksum": _checksum, "gather": _gather, "restore": _restore}.get(sink.what)
    if lower is None:
        raise InternalError(f"no kernel for {sink.what!r}")
    with f.loop(block.count) as k:
        lower(code, f.b.add(start, k))


def _move(code: Code, target: ir.Value, source: ir.Value, size: ir.Value) -> None:
    code.f.call("llvm.memcpy.p0.p0.i64", ir.VoidType(), [target, source, size, const(0, I1)])


def _copy(code: Code, row: ir.Value) -> None:
    """Page `row` from `source` to `target`."""
    f = code.f
    at = f.b.mul(row, const(PAGE_BYTES))
    _move(code, f.byte_at(f.slot("target", PTR), at), f.byte_at(f.slot("source", PTR), at), const(PAGE_BYTES))


def _gather(code: Code, row: ir.Value) -> None:
    """The record that pointer `row` leads to, behind those before it at `target`."""
    f = code.f
    source, size = f.load(f.slot("pointers", PTR), row, PTR), f.slot("size")
    _move(code, f.byte_at(f.slot("target", PTR), f.b.mul(row, size)), source, size)


def _restore(code: Code, row: ir.Value) -> None:
    """Entry `row` of an undo log, counted from its end, into the image of its segment."""
    f, b = code.f, code.f.b
    size = f.slot("size")  # of an entry
    number = b.sub(b.sub(f.slot("end"), const(1)), row)
    entry = f.byte_at(f.slot("source", PTR), b.mul(number, size))
    offset = b.and_(b.load(entry, typ=I64), const((1 << UNDO_BATCH_SHIFT) - 1))
    place = b.sub(offset, f.slot("first"))
    _move(code, f.byte_at(f.slot("target", PTR), place), f.byte_at(entry, 8), b.sub(size, const(8)))


def _checksum(code: Code, row: ir.Value) -> None:
    """The checksum of block `row` of `size` bytes at `source`, begun with its word of `seeds`, to `target`."""
    f, b = code.f, code.f.b
    first = f.byte_at(f.slot("source", PTR), b.mul(row, f.slot("size")))
    seed = f.load(f.slot("seeds", PTR), row, I64)
    zeros = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    lanes = b.shuffle_vector(b.insert_element(undefined, seed, const(0, I32)), undefined, zeros)
    begin = ir.Constant(_VECTOR, [k * _SEED & (1 << 64) - 1 for k in range(LANES)])
    sums = f.var(_VECTOR, b.xor(lanes, begin))
    with f.loop(f.slot("size"), step=LANES * 8) as at:
        words = b.load(f.byte_at(first, at), typ=_VECTOR, align=8)
        mixed = b.mul(b.xor(sums.get(), words), ir.Constant(_VECTOR, [_MIX] * LANES))
        sums.set(b.xor(mixed, b.lshr(mixed, ir.Constant(_VECTOR, [32] * LANES))))
    h: ir.Value = const(0)
    for lane in range(LANES):
        h = b.mul(b.xor(h, b.extract_element(sums.get(), const(lane, I32))), const(_FOLD))
        h = b.xor(h, b.lshr(h, const(29)))
    f.store(h, f.slot("target", PTR), row)
