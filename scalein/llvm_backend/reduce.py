"""Aggregates without keys: one loop a block over registers, then one update of the record.

Counts, sums, min and max are reductions that LLVM vectorizes. A 64-bit integer sum must not wrap: a
block's low and high halves are summed apart (each far from overflow within a block) and joined in
128 bits. Variance takes two passes over the block, which is in L1, and merges the result. The
rest (first, last, arg_min, arg_max, covariance) is updated row by row.

Short methods of a user's class update several groups in registers, in turns, which are merged at the end
of the block: one group alone would wait for each of its sums, and several are one vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from llvmlite import ir

from scalein.dtypes import I64 as INT
from scalein.ir.accumulators import ExprAcc
from scalein.ir.exprs import type_of
from scalein.ir.tables import Acc, AccKind, Table
from scalein.ir.udf import Method, has_loops, unchecked_counts, walk
from scalein.layout import ERROR
from scalein.llvm_backend import accumulators, expr_accumulators
from scalein.llvm_backend.block import Block, rows
from scalein.llvm_backend.cells import Place
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.exprs import lower_expr
from scalein.llvm_backend.fn import F64, I64, I128, Var, const
from scalein.llvm_backend.functions.decimals import is_small, narrowed
from scalein.llvm_backend.hash_index import place_in
from scalein.llvm_backend.parts import acc_shape, can_outline, is_many
from scalein.llvm_backend.side_state import find_sides
from scalein.llvm_backend.values import Env, Row, from_memory, memory_type, to_memory

_ROW_BY_ROW = (AccKind.FIRST, AccKind.LAST, AccKind.ARG_MIN, AccKind.ARG_MAX, AccKind.CHAIN, AccKind.SKETCH,
               AccKind.COMOMENTS, AccKind.EXPR)


def _is_slow(acc: Acc) -> bool:
    return acc.kind in _ROW_BY_ROW or acc.has_side or acc.has_heap or bool(acc.parts)


def lower_reduce(code: Code, table: Table, block: Block, env: Env, ordinal: Callable[[Row], ir.Value],
                 record: ir.Value) -> None:
    place = place_in(code.f, table, record)
    sides = find_sides(code, table, block, env, lambda row: const(0))

    def update(accs: Sequence[tuple[int, Acc]]) -> None:
        """Row by row."""
        with rows(code, block) as row:
            for k, acc in accs:
                if acc.has_side:
                    sides.count_in(k, acc, place, row, lambda: const(0), lambda: ordinal(row))
                else:
                    accumulators.update(code, k, acc, place, row, env, lambda: ordinal(row))

    accs = [(k, acc) for k, acc in enumerate(table.accs) if acc.kind is not AccKind.QUANTILE]
    apart = {k for k, acc in accs if can_outline(acc)} if is_many(table.accs) else set()
    for k, acc in accs:
        if k in apart:
            write = partial(update, [(k, acc)]) if _is_slow(acc) else partial(_reduce, code, k, acc, block, env, place)
            shape = acc_shape(k, acc, env)
            code.part(write, *(("reduce", shape[0]), shape[1]) if shape else ())
        elif not _is_slow(acc):
            _reduce(code, k, acc, block, env, place)
        elif _has_lanes(acc):
            _reduce_in_lanes(code, k, acc, block, env, place)
    slow = [(k, acc) for k, acc in accs if _is_slow(acc) and k not in apart and not _has_lanes(acc)]
    if slow:
        update(slow)
    code.check_errors(ERROR)


_LANES = 8
_MOST_PARTS = 80  # of the methods: the code is there once for each lane


def _has_lanes(acc: Acc) -> bool:
    """Whether an accumulator is a class of the user's with short methods, over rows."""
    if acc.kind is not AccKind.EXPR or len(acc.params) > 1 or not isinstance(acc.expr.update, Method):
        return False
    both = (acc.expr.update, acc.expr.merge)
    is_plain = not any(slot.dtype.is_bytes for slot in acc.expr.slots) and acc.by is None
    return is_plain and not any(map(has_loops, both)) and sum(1 for each in both for _ in walk(each)) <= _MOST_PARTS


def _reduce_in_lanes(code: Code, k: int, acc: Acc, block: Block, env: Env, place: Place) -> None:
    f, b = code.f, code.f.b
    (expr,) = acc.params
    assert isinstance(expr, ExprAcc)
    assert isinstance(expr.update, Method)
    starts = {f"self.{slot.name}": slot.init for slot in expr.slots if slot.dtype == INT and not slot.nullable}
    in_lane = replace(acc, params=(replace(expr, update=unchecked_counts(expr.update, starts)),))

    def count(row: Row, group: Place) -> None:
        expr_accumulators.update(code, k, acc if group is place else in_lane, group, row, env)

    size = b.lshr(block.count, const(_LANES.bit_length() - 1))
    with f.when(b.icmp_signed(">", size, const(0))):
        lanes = [expr_accumulators.new_group(code, k, acc) for _ in range(_LANES)]
        with f.loop(size) as i:
            for number, lane in enumerate(lanes):
                count(block.row(f, b.add(b.mul(i, const(_LANES)), const(number))), lane)
        for lane in lanes:
            expr_accumulators.merge(code, k, acc, place, lane)
    with f.loop(block.count, b.mul(size, const(_LANES)), rare=True) as i:
        count(block.row(f, i), place)


def _reduce(code: Code, k: int, acc: Acc, block: Block, env: Env, place: Place) -> None:
    f, b, name = code.f, code.f.b, f"acc{k}"
    if acc.kind is AccKind.ROWS:
        f.store(b.add(b.load(place(name), typ=I64), block.count), place(name))
        return
    assert acc.arg is not None
    dtype = type_of(acc.arg)
    match acc.kind:
        case AccKind.VALID:
            total = f.var(I64, const(0))
            with rows(code, block) as row:
                valid = lower_expr(code, acc.arg, env, row).valid
                total.set(b.add(total.get(), const(1) if valid is None else b.zext(valid, I64)))
            f.store(b.add(b.load(place(name), typ=I64), total.get()), place(name))
        case AccKind.ISUM if dtype.is_decimal and not is_small(dtype):
            wide = f.var(accumulators.sum_type(dtype), b.load(place(name), typ=accumulators.sum_type(dtype)))
            with rows(code, block) as row:
                value = lower_expr(code, acc.arg, env, row)
                data = accumulators.widened(f, value.number, dtype)
                if value.valid is not None:
                    data = b.select(value.valid, data, const(0, data.type))
                wide.set(b.add(wide.get(), data))
            f.store(wide.get(), place(name))
        case AccKind.ISUM:
            low, high = f.var(I64, const(0)), f.var(I64, const(0))
            with rows(code, block) as row:
                _add_halves(code, acc, env, row, low, high)
            joined = b.add(b.zext(low.get(), I128), b.shl(b.sext(high.get(), I128), const(32, I128)))
            f.store(b.add(b.load(place(name), typ=I128, align=8), joined), place(name), align=8)
        case AccKind.FSUM:
            sum_ = f.var(F64, const(-0.0, F64))
            with rows(code, block) as row:
                value = lower_expr(code, acc.arg, env, row)
                data = value.number if value.number.type == F64 else b.fpext(value.number, F64)
                if value.valid is not None:
                    data = b.select(value.valid, data, const(-0.0, F64))
                sum_.set(b.fadd(sum_.get(), data, flags=["reassoc"]))
            f.store(b.fadd(b.load(place(name), typ=F64), sum_.get()), place(name))
        case AccKind.MIN | AccKind.MAX:
            small = is_small(dtype)
            typ = I64 if small else memory_type(dtype)
            best = f.var(typ, b.load(place(name), typ=typ))
            with rows(code, block) as row:
                value = lower_expr(code, acc.arg, env, row)
                old = from_memory(f, best.get(), dtype)
                data = narrowed(f, value.data) if small else value.data
                new = accumulators.better(f, acc.kind, old, data, dtype)
                if value.valid is not None:
                    new = b.select(value.valid, new, old)
                best.set(to_memory(f, new))
            f.store(b.sext(best.get(), I128) if small else best.get(), place(name))
        case _:
            _reduce_moments(code, k, acc, block, env, place)


def _add_halves(code: Code, acc: Acc, env: Env, row: Row, low: Var, high: Var) -> None:
    b = code.f.b
    assert acc.arg is not None
    value, dtype = lower_expr(code, acc.arg, env, row), type_of(acc.arg)
    wide = value.number
    if wide.type == I128:  # a decimal of few digits
        wide = narrowed(code.f, wide)
    elif wide.type != I64:
        wide = (b.sext if dtype.is_signed else b.zext)(wide, I64)
    if value.valid is not None:
        wide = b.select(value.valid, wide, const(0))
    low.set(b.add(low.get(), b.and_(wide, const(0xFFFFFFFF))))
    shift = b.ashr if dtype.is_signed else b.lshr
    high.set(b.add(high.get(), shift(wide, const(32))))


def _reduce_moments(code: Code, k: int, acc: Acc, block: Block, env: Env, place: Place) -> None:
    f, b = code.f, code.f.b
    assert acc.arg is not None
    n, total = f.var(F64, const(0.0, F64)), f.var(F64, const(0.0, F64))
    with rows(code, block) as row:
        value = lower_expr(code, acc.arg, env, row)
        one = const(1.0, F64) if value.valid is None else b.uitofp(value.valid, F64)
        data = value.data if value.valid is None else b.select(value.valid, value.data, const(0.0, F64))
        n.set(b.fadd(n.get(), one, flags=["reassoc"]))
        total.set(b.fadd(total.get(), data, flags=["reassoc"]))
    count = n.get()
    mean = b.fdiv(total.get(), b.select(b.fcmp_ordered("==", count, const(0.0, F64)), const(1.0, F64), count))
    spread = f.var(F64, const(0.0, F64))
    with rows(code, block) as row:
        value = lower_expr(code, acc.arg, env, row)
        off = b.fsub(value.data, mean)
        if value.valid is not None:
            off = b.select(value.valid, off, const(0.0, F64))
        spread.set(b.fadd(spread.get(), b.fmul(off, off), flags=["reassoc"]))
    accumulators.merge_moments(f, f"acc{k}", place, count, mean, spread.get())
