"""Bulk work on the bytes of stored tables: copies, checksums, gathered records, undo logs, blocks of runs.

A row of these kernels is a page, a block, an entry or a hash. They run in background threads beside kernels that change
what they read: a copy may be torn, and the undo log mends it.
"""

from __future__ import annotations

from llvmlite import ir

from scalein.errors import InternalError
from scalein.ir.store_kernels import BulkOp
from scalein.layout import PAGE_BYTES, UNDO_BATCH_SHIFT
from scalein.llvm_backend.block import Block
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.fn import I1, I8, I32, I64, PTR, const

# The checksum, as `state/checksum.py` defines it.
LANES = 8
_SEED, _MIX, _FOLD = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F
_VECTOR = ir.VectorType(I64, LANES)
_FILTER = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93)  # as in `state/bloom.py`


def lower_bulk(code: Code, sink: BulkOp, block: Block, start: ir.Value) -> None:
    f = code.f
    lower = {"copy": _copy, "checksum": _checksum, "gather": _gather, "restore": _restore, "pack": _pack,
             "mark": _mark, "merge": _merge, "clear": _clear}.get(sink.what)  # fmt: skip
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


def _clear(code: Code, row: ir.Value) -> None:
    """Row `row` of `lists`: where bytes go, where they are and will be zero, and how many."""
    f = code.f
    entry = f.at(f.slot("lists", PTR), f.b.mul(row, const(3)), I64)
    target, source, size = f.load(entry, const(0), PTR), f.load(entry, const(1), PTR), f.load(entry, const(2), I64)
    _move(code, target, source, size)
    f.call("llvm.memset.p0.i64", ir.VoidType(), [source, const(0, I8), size, const(0, I1)])


def _gather(code: Code, row: ir.Value) -> None:
    """Copies the record of pointer `row` to its position at `target`."""
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
    f = code.f
    first = f.byte_at(f.slot("source", PTR), f.b.mul(row, f.slot("size")))
    sum = sum_of(code, first, f.slot("size"), f.load(f.slot("seeds", PTR), row, I64))
    f.store(sum, f.slot("target", PTR), row)


def sum_of(code: Code, first: ir.Value, size: ir.Value, seed: ir.Value) -> ir.Value:
    f, b = code.f, code.f.b
    zeros = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    lanes = b.shuffle_vector(b.insert_element(undefined, seed, const(0, I32)), undefined, zeros)
    begin = ir.Constant(_VECTOR, [k * _SEED & (1 << 64) - 1 for k in range(LANES)])
    sums = f.var(_VECTOR, b.xor(lanes, begin))
    with f.loop(size, step=LANES * 8) as at:
        words = b.load(f.byte_at(first, at), typ=_VECTOR, align=8)
        f.prefetch(f.byte_at(first, b.add(at, size)))  # of the next block, which the disk wrote
        mixed = b.mul(b.xor(sums.get(), words), ir.Constant(_VECTOR, [_MIX] * LANES))
        sums.set(b.xor(mixed, b.lshr(mixed, ir.Constant(_VECTOR, [32] * LANES))))
    h: ir.Value = const(0)
    for lane in range(LANES):
        h = b.mul(b.xor(h, b.extract_element(sums.get(), const(lane, I32))), const(_FOLD))
        h = b.xor(h, b.lshr(h, const(29)))
    return h


def _pack(code: Code, row: ir.Value) -> None:
    """Block `row` of a run, `block` bytes at `target`: the next `per` of `count` records of `size` bytes at `source`.

    The blocks will lie from `offset` of the file `id` on.
    """
    f, b = code.f, code.f.b
    per, size, bytes = f.slot("per"), f.slot("size"), f.slot("block")
    done, before = b.mul(row, per), b.mul(row, bytes)
    place = f.byte_at(f.slot("target", PTR), before)
    records = f.min(per, b.sub(f.slot("count"), done))
    used = b.mul(records, size)
    f.store(records, place)
    f.store(const(0), place, const(1))
    _move(code, f.byte_at(place, 16), f.byte_at(f.slot("source", PTR), b.mul(done, size)), used)
    rest = b.sub(b.sub(bytes, const(16)), used)
    tail = f.byte_at(place, b.add(used, const(16)))
    f.call("llvm.memset.p0.i64", ir.VoidType(), [tail, const(0, I8), rest, const(0, I1)])
    seed = b.xor(f.slot("id"), b.add(f.slot("offset"), before))
    f.store(sum_of(code, place, bytes, seed), place, const(1))


def _mark(code: Code, row: ir.Value) -> None:
    """Set the bits of hash `row` of `source` in the filter at `target`."""
    f, b = code.f, code.f.b
    h = f.load(f.slot("source", PTR), row, I64)
    for step in _FILTER:
        place = b.lshr(b.mul(h, const(step)), f.slot("shift"))
        byte = f.byte_at(f.slot("target", PTR), b.lshr(place, const(3)))
        bit = b.shl(const(1, I8), b.trunc(b.and_(place, const(7)), I8))
        f.store(b.or_(b.load(byte, typ=I8), bit), byte)


def _merge(code: Code, row: ir.Value) -> None:
    """Two sorted lists of hashes with a word each into one; of equal hashes those of the first list come first.

    Row `row` of `lists` says where both and the result are (hashes, words), and how many each list has. Masks in the
    place of selects, which would become unpredictable branches.
    """
    f, b = code.f, code.f.b
    entry = f.at(f.slot("lists", PTR), b.mul(row, const(8)), I64)
    hashes, words = ([f.load(entry, const(2 * k + what), PTR) for k in range(3)] for what in range(2))
    ends = [f.load(entry, const(6 + k), I64) for k in range(2)]
    at = [f.var(I64, const(0)) for _ in range(3)]
    with f.forever() as both:
        i, j, k = (one.get() for one in at)
        both.stop_if(b.or_(b.icmp_signed(">=", i, ends[0]), b.icmp_signed(">=", j, ends[1])))
        left, right = f.load(hashes[0], i, I64), f.load(hashes[1], j, I64)
        is_left = b.zext(b.icmp_unsigned("<=", left, right), I64)
        mask = b.sub(const(0), is_left)
        for target, one, other in ((hashes[2], left, right),
                                   (words[2], f.load(words[0], i, I64), f.load(words[1], j, I64))):  # fmt: skip
            f.store(b.xor(other, b.and_(b.xor(one, other), mask)), target, k)
        at[0].set(b.add(i, is_left))
        at[1].set(b.add(j, b.xor(is_left, const(1))))
        at[2].set(b.add(k, const(1)))
    for number in range(2):
        left_over = b.sub(ends[number], at[number].get())
        for lists in (hashes, words):
            _move(code, f.at(lists[2], at[2].get(), I64), f.at(lists[number], at[number].get(), I64),
                  b.shl(left_over, const(3)))
        at[2].set(b.add(at[2].get(), left_over))
