"""What a group remembers: update by a row, merge with another group's, finish into a value.

Each works on fields of a record, reached through `place(name) -> pointer`, so the same code serves
records, slices of a ring and the one record of an ungrouped aggregate. Every accumulator can be
merged in any order: first, last and ties carry the row's number in the source.

Sums of integers have 128 bits and fail in `finish`; sums of floats are plain additions. Without keys, blocks of rows
are summed in `reduce.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from scalein.dtypes import F64 as DOUBLE
from scalein.dtypes import DType
from scalein.ir.exprs import type_of
from scalein.ir.tables import COMOMENTS, Acc, AccKind, Output, Table, sum_bytes
from scalein.llvm_backend import expr_accumulators
from scalein.llvm_backend.cells import Data, Place, ordering, read_cell, write_cell
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.exprs import lower_expr
from scalein.llvm_backend.fn import F64, I1, I8, I64, I128, Fn, const
from scalein.llvm_backend.functions import decimals
from scalein.llvm_backend.sketch import estimate, merge_sketch, update_sketch
from scalein.llvm_backend.values import Env, Row, Str, Value, from_memory, memory_type, to_memory


def update(code: Code, number: int, acc: Acc, place: Place, row: Row, env: Env,
           ordinal: Callable[[], ir.Value]) -> None:
    """Count a live row in."""
    f, b, name = code.f, code.f.b, f"acc{number}"
    if acc.parts and acc.kind in (AccKind.ROWS, AccKind.VALID, AccKind.ISUM):
        _add_partial(code, acc, place(name), lower_expr(code, acc.parts[0], env, row))
        return
    if acc.kind is AccKind.ROWS:
        _bump(f, place(name), const(1))
        return
    if acc.kind is AccKind.CHAIN:
        _append(f, name, place, ordinal())
        return
    if acc.kind is AccKind.EXPR:
        expr_accumulators.update(code, number, acc, place, row, env)
        return
    assert acc.arg is not None
    value = lower_expr(code, acc.arg, env, row)
    data, valid = value.data, value.valid
    dtype = type_of(acc.arg)
    match acc.kind:
        case AccKind.VALID:
            _bump(f, place(name), const(1) if valid is None else b.zext(valid, I64))
        case AccKind.ISUM:
            wide = widened(f, value.number, dtype)
            if valid is not None:
                wide = b.select(valid, wide, const(0, wide.type))
            total = b.load(place(name), typ=wide.type, align=8)
            f.store(b.add(total, wide), place(name), align=8)
        case AccKind.FSUM:
            wide = data if value.number.type == F64 else b.fpext(data, F64)
            if valid is not None:
                wide = b.select(valid, wide, const(-0.0, F64))
            f.store(b.fadd(b.load(place(name), typ=F64), wide), place(name))
        case AccKind.MIN | AccKind.MAX if dtype.is_bytes:
            _improve(code, acc, name, place, data, valid)
        case AccKind.MIN | AccKind.MAX:
            old = from_memory(f, b.load(place(name), typ=memory_type(dtype)), dtype)
            new = better(f, acc.kind, old, data, dtype)
            if valid is not None:
                new = b.select(valid, new, old)
            f.store(to_memory(f, new), place(name))
        case AccKind.MOMENTS if acc.parts:
            n, m2 = (lower_expr(code, part, env, row) for part in acc.parts)
            counted = n.data if n.valid is None else b.select(n.valid, n.data, const(0.0, F64))
            merge_moments(f, name, place, counted, data, m2.data)
        case AccKind.MOMENTS:
            one = const(1.0, F64) if valid is None else b.uitofp(valid, F64)
            if valid is not None:
                data = b.select(valid, data, b.load(place(f"{name}.mean"), typ=F64))
            merge_moments(f, name, place, one, data, const(0.0, F64))
        case AccKind.COMOMENTS:
            assert acc.by is not None
            by = lower_expr(code, acc.by, env, row)
            if acc.parts:
                n, m2, by_m2, co = (lower_expr(code, part, env, row) for part in acc.parts)
                counted = n.data if n.valid is None else b.select(n.valid, n.data, const(0.0, F64))
                merge_comoments(f, name, place, counted, data, m2.data, by.data, by_m2.data, co.data)
            else:
                both, zero = f.all_of(valid, by.valid), const(0.0, F64)
                one = const(1.0, F64) if both is None else b.uitofp(both, F64)
                merge_comoments(f, name, place, one, data, zero, by.data, zero, zero)
        case AccKind.FIRST | AccKind.LAST:
            this, known = _row_number(code, acc, row, env, ordinal)
            counts = None if acc.by is None else lower_expr(code, acc.by, env, row)
            is_asked = (None, None) if counts is None else (counts.number, counts.valid)
            wins = f.all_of(_is_before(f, acc.kind, name, place, this), known, *is_asked)
            assert wins is not None
            _take(code, name, place, wins, this, data, valid)
        case AccKind.ARG_MIN | AccKind.ARG_MAX:
            assert acc.by is not None
            by = lower_expr(code, acc.by, env, row)
            this, known = _row_number(code, acc, row, env, ordinal)
            wins = f.all_of(_wins(code, acc, name, place, by.data, this), by.valid, known)
            assert wins is not None
            _take(code, name, place, wins, this, data, valid)
            _write_if(code, wins, place, f"{name}.by", by.data)
        case AccKind.SKETCH:
            update_sketch(f, place(name), value.number, valid)
        case AccKind.QUANTILE:  # computed from the log of its values when the group is finished
            pass
        case _:
            raise AssertionError(f"{acc.kind} is counted in by `sides`")


def _add_partial(code: Code, acc: Acc, ptr: ir.Value, given: Value) -> None:
    """Count a partial group in, of which a column has the number of rows or the sum."""
    f, b = code.f, code.f.b
    typ = sum_type(acc.dtype) if acc.kind is AccKind.ISUM else I64
    value = given.number if given.number.type == typ else b.sext(given.number, typ)
    if given.valid is not None:
        value = b.select(given.valid, value, const(0, typ))
    f.store(b.add(b.load(ptr, typ=typ, align=8), value), ptr, align=8)


def _row_number(code: Code, acc: Acc, row: Row, env: Env,
                ordinal: Callable[[], ir.Value]) -> tuple[ir.Value, ir.Value | None]:
    """The number of the row that a value is of, and whether there is one: of a partial group a column says it."""
    if not acc.parts:
        return ordinal(), None
    value = lower_expr(code, acc.parts[0], env, row)
    return value.number, value.valid


def merge(code: Code, number: int, acc: Acc, place: Place, other: Place) -> None:
    """Count another group's rows in."""
    f, b, name = code.f, code.f.b, f"acc{number}"
    dtype = acc.dtype
    match acc.kind:
        case AccKind.ROWS | AccKind.VALID:
            _bump(f, place(name), b.load(other(name), typ=I64))
        case AccKind.ISUM:
            typ = sum_type(dtype)
            total = b.add(b.load(place(name), typ=typ, align=8), b.load(other(name), typ=typ, align=8))
            f.store(total, place(name), align=8)
        case AccKind.FSUM:
            f.store(b.fadd(b.load(place(name), typ=F64), b.load(other(name), typ=F64)), place(name))
        case AccKind.VALUES | AccKind.LIST | AccKind.TOP:  # the entries follow: see `sides`
            _bump(f, place(name), b.load(other(name), typ=I64))
        case AccKind.SKETCH:
            merge_sketch(f, place(name), other(name))
        case AccKind.DISTINCT | AccKind.QUANTILE:
            pass
        case AccKind.MIN | AccKind.MAX if dtype.is_bytes:
            ok = b.icmp_unsigned("!=", b.load(other(f"{name}.ok"), typ=I8), const(0, I8))
            _improve(code, acc, name, place, read_cell(f, other(f"{name}.value"), dtype), ok)
        case AccKind.MIN | AccKind.MAX:
            typ = memory_type(dtype)
            old, new = (from_memory(f, b.load(p(name), typ=typ), dtype) for p in (place, other))
            f.store(to_memory(f, better(f, acc.kind, old, new, dtype)), place(name))
        case AccKind.MOMENTS:
            merge_moments(f, name, place, *(b.load(other(f"{name}.{part}"), typ=F64) for part in ("n", "mean", "m2")))
        case AccKind.COMOMENTS:
            merge_comoments(f, name, place, *(b.load(other(f"{name}.{part}"), typ=F64) for part in COMOMENTS))
        case AccKind.FIRST | AccKind.LAST | AccKind.ARG_MIN | AccKind.ARG_MAX:
            this = b.load(other(f"{name}.row"), typ=I64)
            if acc.kind in (AccKind.FIRST, AccKind.LAST):
                wins = _is_before(f, acc.kind, name, place, this)
            else:
                assert acc.by is not None
                by = read_cell(f, other(f"{name}.by"), type_of(acc.by))
                wins = b.and_(_wins(code, acc, name, place, by, this), b.icmp_signed(">=", this, const(0)))
                _write_if(code, wins, place, f"{name}.by", by)
            data = read_cell(f, other(f"{name}.value"), dtype)
            ok = b.icmp_unsigned("!=", b.load(other(f"{name}.ok"), typ=I8), const(0, I8))
            _take(code, name, place, wins, this, data, ok)
        case AccKind.EXPR:
            expr_accumulators.merge(code, number, acc, place, other)
        case AccKind.CHAIN:
            raise AssertionError("chains are never merged")


def finish(code: Code, table: Table, output: Output, place: Place) -> Value:
    """An aggregate's value from its group's accumulators."""
    f, b = code.f, code.f.b
    first = output.accs[0]
    acc, name = table.accs[first], f"acc{first}"

    def count(position: int) -> ir.Value:
        return b.load(place(f"acc{output.accs[position]}"), typ=I64)

    def seen() -> ir.Value | None:
        """Whether any value was counted; an accumulator of its own says so where nulls are possible."""
        return None if len(output.accs) < 2 else b.icmp_signed(">", count(1), const(0))

    if acc.kind is AccKind.EXPR and not output.part:
        return expr_accumulators.finish(code, name, acc, place, seen())
    match output.fn:
        case "count" | "count_valid" | "n_unique":
            return Value(b.load(place(name), typ=I64))
        case "approx_n_unique":
            return Value(estimate(f, place(name)))
        case "quantile" | "approx_quantile":
            return Value(b.load(place(name), typ=F64), seen() if output.nullable else None)
        case "raw":
            return _raw(code, acc, name, output, place)
        case "sum" if acc.dtype.is_decimal and not output.dtype.is_decimal:  # partial sums of integers
            total = b.load(place(name), typ=sum_type(acc.dtype), align=8)
            low = b.trunc(total, I64)
            again = (b.sext if output.dtype.is_signed else b.zext)(low, total.type)
            code.fail(f"integer overflow in the sum `{output.name}`", b.icmp_unsigned("!=", again, total))
            return Value(low, seen())
        case "sum" if acc.dtype.is_decimal:
            total = b.load(place(name), typ=sum_type(acc.dtype), align=8)
            wrong = decimals.outside(f, total, output.dtype.precision)
            code.fail(f"decimal overflow in the sum `{output.name}`", wrong)
            return Value(total if total.type == I128 else b.trunc(total, I128), seen())
        case "sum" if acc.kind is AccKind.ISUM:
            low, high = _halves(f, place(name))
            sign = b.ashr(low, const(63)) if output.dtype.is_signed else const(0)
            code.fail(f"integer overflow in the sum `{output.name}`", b.icmp_unsigned("!=", high, sign))
            return Value(low, seen())
        case "sum":
            return Value(b.load(place(name), typ=F64), seen())
        case "mean":
            if acc.dtype.is_decimal:
                total = b.load(place(name), typ=sum_type(acc.dtype), align=8)
                real = decimals.over_power(f, decimals.to_float(f, total), acc.dtype.scale)
            elif acc.kind is AccKind.ISUM:
                real = as_float(f, *_halves(f, place(name)), acc.dtype.is_signed)
            else:
                real = b.load(place(name), typ=F64)
            n = count(1)
            return Value(b.fdiv(real, b.sitofp(n, F64)), b.icmp_signed(">", n, const(0)) if output.nullable else None)
        case "min" | "max" if not acc.dtype.is_bytes:
            return Value(from_memory(f, b.load(place(name), typ=memory_type(acc.dtype)), acc.dtype), seen())
        case "var" | "std":
            n, m2 = (b.load(place(f"{name}.{part}"), typ=F64) for part in ("n", "m2"))
            variance = b.fdiv(m2, b.fsub(n, const(1.0, F64)))
            if output.fn == "std":
                variance = f.call("llvm.sqrt.f64", F64, [variance])
            return Value(variance, b.fcmp_ordered(">=", n, const(2.0, F64)))
        case "cov" | "corr":
            n, _, m2, _, by_m2, co = (b.load(place(f"{name}.{part}"), typ=F64) for part in COMOMENTS)
            together = b.fdiv(co, b.fsub(n, const(1.0, F64))) if output.fn == "cov" else _correlation(f, m2, by_m2, co)
            return Value(together, b.fcmp_ordered(">=", n, const(2.0, F64)))
        case _:  # first, last, arg_min, arg_max, and bytes of any kind
            data = read_cell(f, place(f"{name}.value"), acc.dtype)
            return Value(data, b.icmp_unsigned("!=", b.load(place(f"{name}.ok"), typ=I8), const(0, I8)))


def _raw(code: Code, acc: Acc, name: str, output: Output, place: Place) -> Value:
    """An accumulator as it is: a column of a partial group (`ir/partials.py`)."""
    f, b = code.f, code.f.b
    match acc.kind:
        case AccKind.ISUM:
            total = b.load(place(name), typ=sum_type(acc.dtype), align=8)
            if total.type == I128:
                return Value(total)
            code.fail("decimal overflow in a partial sum", decimals.outside(f, total, output.dtype.precision))
            return Value(b.trunc(total, I128))
        case AccKind.FSUM:
            return Value(b.load(place(name), typ=F64))
        case AccKind.MIN | AccKind.MAX if acc.dtype.is_bytes:
            data = read_cell(f, place(f"{name}.value"), acc.dtype)
            return Value(data, b.icmp_unsigned("!=", b.load(place(f"{name}.ok"), typ=I8), const(0, I8)))
        case AccKind.MIN | AccKind.MAX:
            return Value(from_memory(f, b.load(place(name), typ=memory_type(acc.dtype)), acc.dtype))
        case AccKind.MOMENTS | AccKind.COMOMENTS:
            return Value(b.load(place(f"{name}.{output.part}"), typ=F64))
        case AccKind.EXPR:
            return expr_accumulators.read_slot(f, place, f"{name}.{output.part}", dict(acc.expr.parts)[output.part])
        case AccKind.FIRST | AccKind.LAST | AccKind.ARG_MIN | AccKind.ARG_MAX:
            row = b.load(place(f"{name}.row"), typ=I64)
            if output.part == "row":
                return Value(row)
            data = read_cell(f, place(f"{name}.{output.part}"), output.dtype)
            if output.part == "by":
                return Value(data, b.icmp_signed(">=", row, const(0)))
            return Value(data, b.icmp_unsigned("!=", b.load(place(f"{name}.ok"), typ=I8), const(0, I8)))
        case _:
            return Value(b.load(place(name), typ=I64))


def sum_type(dtype: DType) -> ir.IntType:
    """The integer in which values of a type are summed."""
    return ir.IntType(8 * sum_bytes(dtype))


def widened(f: Fn, data: ir.Value, dtype: DType) -> ir.Value:
    """A value as its sum's integer."""
    typ = sum_type(dtype)
    return data if data.type == typ else (f.b.sext if dtype.is_signed else f.b.zext)(data, typ)


def _halves(f: Fn, place: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The low and high word of a sum."""
    return f.b.load(place, typ=I64), f.b.load(f.byte_at(place, 8), typ=I64)


def as_float(f: Fn, low: ir.Value, high: ir.Value, signed: bool) -> ir.Value:
    """A 128-bit sum as a float. One that fits 64 bits is rounded once; beyond that, parts are added."""
    b = f.b
    to_float = b.sitofp if signed else b.uitofp
    fits = b.icmp_unsigned("==", high, b.ashr(low, const(63)) if signed else const(0))
    parts = b.fadd(b.fmul(to_float(high, F64), const(2.0**64, F64)), b.uitofp(low, F64))
    return b.select(fits, to_float(low, F64), parts)


def better(f: Fn, kind: AccKind, old: ir.Value, new: ir.Value, dtype: DType) -> ir.Value:
    """The lesser or greater value. NaN is the greatest: minnum skips it, maximum keeps it."""
    least = kind is AccKind.MIN
    if dtype.is_float:
        suffix = "f64" if dtype.kind is DOUBLE.kind else "f32"
        return f.call(f"llvm.{'minnum' if least else 'maximum'}.{suffix}", old.type, [old, new])
    compare = f.b.icmp_signed if dtype.is_signed else f.b.icmp_unsigned
    return f.b.select(compare("<" if least else ">", new, old), new, old)


def _bump(f: Fn, ptr: ir.Value, by: ir.Value) -> None:
    f.store(f.b.add(f.b.load(ptr, typ=I64), by), ptr)


def _append(f: Fn, name: str, place: Place, row: ir.Value) -> None:
    """Put a row at the end of its key's chain, so that matches come in the table's order."""
    tail = f.b.load(place(f"{name}.tail"), typ=I64)
    with f.when_else(f.b.icmp_signed("<", tail, const(0))) as (empty, longer):
        with empty:
            f.store(row, place(f"{name}.head"))
        with longer:
            f.store(f.b.trunc(row, ir.IntType(32)), f.slot("chain.next", ir.PointerType()), tail)
            f.set_slot("chain.longer", const(1))
    f.store(row, place(f"{name}.tail"))


def merge_moments(f: Fn, name: str, place: Place, n: ir.Value, mean: ir.Value, m2: ir.Value) -> None:
    """Chan's formula for count, mean and sum of squared deviations; n = 1 is Welford's step."""
    b = f.b
    old_n, old_mean, old_m2 = (b.load(place(f"{name}.{part}"), typ=F64) for part in ("n", "mean", "m2"))
    total = b.fadd(old_n, n)
    nothing = b.fcmp_ordered("==", total, const(0.0, F64))
    share = b.fdiv(n, b.select(nothing, const(1.0, F64), total))
    delta = b.fsub(mean, old_mean)
    step = b.fmul(delta, share)
    f.store(total, place(f"{name}.n"))
    # A group without rows yet takes the other's mean as it is: no rounding, no inf - inf.
    fresh = b.fcmp_ordered("==", old_n, const(0.0, F64))
    none = b.fcmp_ordered("==", n, const(0.0, F64))
    new_mean = b.select(fresh, mean, b.fadd(old_mean, step))
    undefined = b.fsub(new_mean, new_mean)  # inf - inf: an infinite value has no spread; 0 otherwise
    f.store(b.select(none, old_mean, new_mean), place(f"{name}.mean"))
    spread = b.fadd(b.fadd(old_m2, m2), b.fmul(b.fmul(delta, step), old_n))
    spread = b.fadd(b.select(fresh, m2, spread), undefined)
    f.store(b.select(none, old_m2, spread), place(f"{name}.m2"))


def merge_comoments(f: Fn, name: str, place: Place, n: ir.Value, mean: ir.Value, m2: ir.Value, by_mean: ir.Value,
                    by_m2: ir.Value, co: ir.Value) -> None:
    """Chan's formula for pairs: count, mean and squared deviations of either side, and products of deviations."""
    b = f.b
    old = {part: b.load(place(f"{name}.{part}"), typ=F64) for part in COMOMENTS}
    total = b.fadd(old["n"], n)
    nothing = b.fcmp_ordered("==", total, const(0.0, F64))
    share = b.fdiv(n, b.select(nothing, const(1.0, F64), total))
    fresh = b.fcmp_ordered("==", old["n"], const(0.0, F64))
    none = b.fcmp_ordered("==", n, const(0.0, F64))
    deltas = [b.fsub(new, old[part]) for part, new in (("mean", mean), ("by_mean", by_mean))]
    steps = [b.fmul(delta, share) for delta in deltas]
    # A group without rows yet takes the other's means as they are: no rounding, no inf - inf.
    means = [b.select(fresh, new, b.fadd(old[part], step))
             for part, new, step in (("mean", mean, steps[0]), ("by_mean", by_mean, steps[1]))]
    undefined = [b.fsub(new, new) for new in means]  # inf - inf: an infinite value has no spread; 0 otherwise

    def spread(part: str, new: ir.Value, delta: ir.Value, step: ir.Value, *infinite: ir.Value) -> ir.Value:
        joined = b.fadd(b.fadd(old[part], new), b.fmul(b.fmul(delta, step), old["n"]))
        found = b.select(fresh, new, joined)
        for each in infinite:
            found = b.fadd(found, each)
        return found

    found = {"n": total, "mean": means[0], "by_mean": means[1],
             "m2": spread("m2", m2, deltas[0], steps[0], undefined[0]),
             "by_m2": spread("by_m2", by_m2, deltas[1], steps[1], undefined[1]),
             "co": spread("co", co, deltas[0], steps[1], *undefined)}
    for part, new in found.items():
        f.store(b.select(none, old[part], new), place(f"{name}.{part}"))


def _correlation(f: Fn, m2: ir.Value, by_m2: ir.Value, co: ir.Value) -> ir.Value:
    """Between -1 and 1 whatever was rounded; NaN where a side has no spread."""
    b = f.b
    roots = [f.call("llvm.sqrt.f64", F64, [each]) for each in (m2, by_m2)]
    found = b.fdiv(b.fdiv(co, roots[0]), roots[1])
    one, minus = const(1.0, F64), const(-1.0, F64)
    found = b.select(b.fcmp_ordered(">", found, one), one, found)
    return b.select(b.fcmp_ordered("<", found, minus), minus, found)


def _is_before(f: Fn, kind: AccKind, name: str, place: Place, this: ir.Value) -> ir.Value:
    sign = "<" if kind is AccKind.FIRST else ">"
    return f.b.icmp_signed(sign, this, f.b.load(place(f"{name}.row"), typ=I64))


def _wins(code: Code, acc: Acc, name: str, place: Place, by: Data, this: ir.Value) -> ir.Value:
    """Whether `by` beats the best so far; equal ones go to the earlier row."""
    assert acc.by is not None
    b = code.f.b
    row = b.load(place(f"{name}.row"), typ=I64)
    less, tie = ordering(code, by, place(f"{name}.by"), type_of(acc.by))
    if acc.kind is AccKind.ARG_MAX:
        less = b.not_(b.or_(less, tie))
    earlier = b.and_(tie, b.icmp_signed("<", this, row))
    return b.or_(b.icmp_signed("<", row, const(0)), b.or_(less, earlier))


def _improve(code: Code, acc: Acc, name: str, place: Place, new: Data, valid: ir.Value | None) -> None:
    """The lesser or greater of two texts; the first comes as it is."""
    f, b = code.f, code.f.b
    wins = f.var(I1, const(1, I1) if valid is None else valid)
    has_one = b.icmp_unsigned("!=", b.load(place(f"{name}.ok"), typ=I8), const(0, I8))
    with f.when(b.and_(wins.get(), has_one)):
        less, tie = ordering(code, new, place(f"{name}.value"), acc.dtype)
        wins.set(less if acc.kind is AccKind.MIN else b.not_(b.or_(less, tie)))
    with f.when(wins.get()):
        write_cell(code, place, f"{name}.value", new)
        f.store(const(1, I8), place(f"{name}.ok"))


def _take(code: Code, name: str, place: Place, wins: ir.Value, this: ir.Value, data: Data,
          valid: ir.Value | None) -> None:
    f = code.f
    _store_if(f, wins, place(f"{name}.row"), this)
    _write_if(code, wins, place, f"{name}.value", data)
    _store_if(f, wins, place(f"{name}.ok"), const(1, I8) if valid is None else f.b.zext(valid, I8))


def _write_if(code: Code, condition: ir.Value, place: Place, name: str, data: Data) -> None:
    if isinstance(data, Str):
        with code.f.when(condition):
            write_cell(code, place, name, data)
    else:
        _store_if(code.f, condition, place(name), to_memory(code.f, data))


def _store_if(f: Fn, condition: ir.Value, ptr: ir.Value, value: ir.Value) -> None:
    f.store(f.b.select(condition, value, f.b.load(ptr, typ=value.type)), ptr)
