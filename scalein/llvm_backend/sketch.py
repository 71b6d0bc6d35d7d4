"""approx_n_unique: HyperLogLog over the stable hash of a value, in 512 registers of a byte (`layout.SKETCH_BITS`).

A register keeps the longest run of leading zeros, plus one, of the hashes that chose it. The same values give the same
registers in whatever order and split they come, and two groups merge by the greater of each: so results depend on
neither batches nor workers. The oracle of the tests spells out the same estimate.
"""

from __future__ import annotations

from llvmlite import ir

from scalein.layout import SKETCH_BITS, SKETCH_REGISTERS
from scalein.llvm_backend.fn import F64, I1, I8, I64, Fn, const


def update_sketch(f: Fn, registers: ir.Value, hashed: ir.Value, valid: ir.Value | None) -> None:
    b = f.b
    number = b.lshr(hashed, const(64 - SKETCH_BITS))
    # A one after the last bit ends the run of a hash that is all zeros.
    rest = b.or_(b.shl(hashed, const(SKETCH_BITS)), const(1 << (SKETCH_BITS - 1)))
    run = b.trunc(b.add(f.call("llvm.ctlz.i64", I64, [rest, const(0, I1)]), const(1)), I8)
    if valid is not None:
        run = b.select(valid, run, const(0, I8))
    old = f.load(registers, number, I8)
    f.store(b.select(b.icmp_unsigned(">", run, old), run, old), registers, number)


def merge_sketch(f: Fn, registers: ir.Value, others: ir.Value) -> None:
    with f.loop(const(SKETCH_REGISTERS)) as k:
        mine, theirs = f.load(registers, k, I8), f.load(others, k, I8)
        f.store(f.b.select(f.b.icmp_unsigned(">", theirs, mine), theirs, mine), registers, k)


def estimate(f: Fn, registers: ir.Value) -> ir.Value:
    """The number of different values, rounded; few are counted by the registers that none has chosen."""
    b = f.b
    total, empty = f.var(F64, const(0.0, F64)), f.var(I64, const(0))
    with f.loop(const(SKETCH_REGISTERS)) as k:
        run = b.zext(f.load(registers, k, I8), I64)
        power = b.bitcast(b.shl(b.sub(const(1023), run), const(52)), F64)  # 2 ** -run
        total.set(b.fadd(total.get(), power))
        empty.set(b.add(empty.get(), b.zext(b.icmp_unsigned("==", run, const(0)), I64)))
    size = float(SKETCH_REGISTERS)
    raw = b.fdiv(const(0.7213 / (1 + 1.079 / size) * size * size, F64), total.get())
    unused = b.uitofp(empty.get(), F64)
    is_few = b.and_(b.fcmp_ordered("<=", raw, const(2.5 * size, F64)), b.icmp_unsigned(">", empty.get(), const(0)))
    some = b.select(is_few, unused, const(1.0, F64))
    few = b.fmul(const(size, F64), f.call("llvm.log.f64", F64, [b.fdiv(const(size, F64), some)]))
    return b.fptosi(b.fadd(b.select(is_few, few, raw), const(0.5, F64)), I64)
