"""What a group remembers: update by a row, merge with another group's, finish into a value.

Each works on fields of a record, reached through `place(name) -> pointer`, so the same code serves
records, slices of a ring and the one record of an ungrouped aggregate. Every accumulator can be
merged in any order: first, last and ties carry the row's number in the source.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from scalein.dtypes import F64 as DOUBLE
from scalein.dtypes import DType
from scalein.ir.exprs import type_of
from scalein.ir.tables import Acc, AccKind, Output, Table
from scalein.llvm_backend.code import Code
from scalein.llvm_backend.compare import compare_floats
from scalein.llvm_backend.exprs import lower_expr
from scalein.llvm_backend.fn import F64, I8, I64, I128, Fn, const
from scalein.llvm_backend.values import Env, Row, Value, from_memory, memory_type, to_memory

Place = Callable[[str], ir.Value]


def update(code: Code, number: int, acc: Acc, place: Place, row: Row, env: Env,
           ordinal: Callable[[], ir.Value]) -> None:
    """Count a live row in."""
    f, b, name = code.f, code.f.b, f"acc{number}"
    if acc.kind is AccKind.ROWS:
        _bump(f, place(name), const(1))
        return
    if acc.kind is AccKind.CHAIN:
        _append(f, name, place, ordinal())
        return
    assert acc.arg is not None
    value = lower_expr(code, acc.arg, env, row)
    data, valid = value.data, value.valid
    dtype = type_of(acc.arg)
    match acc.kind:
        case AccKind.VALID:
            _bump(f, place(name), const(1) if valid is None else b.zext(valid, I64))
        case AccKind.ISUM:
            wide = (b.sext if dtype.is_signed else b.zext)(data, I128)
            if valid is not None:
                wide = b.select(valid, wide, const(0, I128))
            total = b.load(place(name), typ=I128, align=8)
            f.store(b.add(total, wide), place(name), align=8)
        case AccKind.FSUM:
            wide = data if value.number.type == F64 else b.fpext(data, F64)
            if valid is not None:
                wide = b.select(valid, wide, const(-0.0, F64))
            f.store(b.fadd(b.load(place(name), typ=F64), wide), place(name))
        case AccKind.MIN | AccKind.MAX:
            old = from_memory(f, b.load(place(name), typ=memory_type(dtype)), dtype)
            new = better(f, acc.kind, old, data, dtype)
            if valid is not None:
                new = b.select(valid, new, old)
            f.store(to_memory(f, new), place(name))
        case AccKind.MOMENTS:
            one = const(1.0, F64) if valid is None else b.uitofp(valid, F64)
            if valid is not None:
                data = b.select(valid, data, b.load(place(f"{name}.mean"), typ=F64))
            merge_moments(f, name, place, one, data, const(0.0, F64))
        case AccKind.FIRST | AccKind.LAST:
            this = ordinal()
            _take(f, name, place, dtype, _is_before(f, acc.kind, name, place, this), this, data, valid)
        case AccKind.ARG_MIN | AccKind.ARG_MAX:
            assert acc.by is not None
            by = lower_expr(code, acc.by, env, row)
            this = ordinal()
            wins = _wins(f, acc, name, place, by.data, this)
            wins = f.all_of(wins, by.valid)
            _take(f, name, place, dtype, wins, this, data, valid)
            _store_if(f, wins, place(f"{name}.by"), to_memory(f, by.data))


def merge(f: Fn, number: int, acc: Acc, place: Place, other: Place) -> None:
    """Count another group's rows in."""
    b, name = f.b, f"acc{number}"
    dtype = acc.dtype
    match acc.kind:
        case AccKind.ROWS | AccKind.VALID:
            _bump(f, place(name), b.load(other(name), typ=I64))
        case AccKind.ISUM:
            total = b.add(b.load(place(name), typ=I128, align=8), b.load(other(name), typ=I128, align=8))
            f.store(total, place(name), align=8)
        case AccKind.FSUM:
            f.store(b.fadd(b.load(place(name), typ=F64), b.load(other(name), typ=F64)), place(name))
        case AccKind.MIN | AccKind.MAX:
            typ = memory_type(dtype)
            old, new = (from_memory(f, b.load(p(name), typ=typ), dtype) for p in (place, other))
            f.store(to_memory(f, better(f, acc.kind, old, new, dtype)), place(name))
        case AccKind.MOMENTS:
            merge_moments(f, name, place, *(b.load(other(f"{name}.{part}"), typ=F64) for part in ("n", "mean", "m2")))
        case AccKind.FIRST | AccKind.LAST | AccKind.ARG_MIN | AccKind.ARG_MAX:
            this = b.load(other(f"{name}.row"), typ=I64)
            if acc.kind in (AccKind.FIRST, AccKind.LAST):
                wins = _is_before(f, acc.kind, name, place, this)
            else:
                assert acc.by is not None
                by_type = type_of(acc.by)
                by = from_memory(f, b.load(other(f"{name}.by"), typ=memory_type(by_type)), by_type)
                wins = b.and_(_wins(f, acc, name, place, by, this), b.icmp_signed(">=", this, const(0)))
                _store_if(f, wins, place(f"{name}.by"), to_memory(f, by))
            data = from_memory(f, b.load(other(f"{name}.value"), typ=memory_type(dtype)), dtype)
            ok = b.icmp_unsigned("!=", b.load(other(f"{name}.ok"), typ=I8), const(0, I8))
            _take(f, name, place, dtype, wins, this, data, ok)
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

    match output.fn:
        case "count" | "count_valid":
            return Value(b.load(place(name), typ=I64))
        case "sum" if acc.kind is AccKind.ISUM:
            total = b.load(place(name), typ=I128, align=8)
            low = b.trunc(total, I64)
            back = (b.sext if output.dtype.is_signed else b.zext)(low, I128)
            code.fail(f"integer overflow in the sum `{output.name}`", b.icmp_unsigned("!=", back, total))
            return Value(low, seen())
        case "sum":
            return Value(b.load(place(name), typ=F64), seen())
        case "mean":
            if acc.kind is AccKind.ISUM:
                real = _as_float(f, b.load(place(name), typ=I128, align=8), acc.dtype.is_signed)
            else:
                real = b.load(place(name), typ=F64)
            n = count(1)
            return Value(b.fdiv(real, b.sitofp(n, F64)), b.icmp_signed(">", n, const(0)) if output.nullable else None)
        case "min" | "max":
            return Value(from_memory(f, b.load(place(name), typ=memory_type(acc.dtype)), acc.dtype), seen())
        case "var" | "std":
            n, m2 = (b.load(place(f"{name}.{part}"), typ=F64) for part in ("n", "m2"))
            variance = b.fdiv(m2, b.fsub(n, const(1.0, F64)))
            if output.fn == "std":
                variance = f.call("llvm.sqrt.f64", F64, [variance])
            return Value(variance, b.fcmp_ordered(">=", n, const(2.0, F64)))
        case _:  # first, last, arg_min, arg_max
            data = from_memory(f, b.load(place(f"{name}.value"), typ=memory_type(acc.dtype)), acc.dtype)
            return Value(data, b.icmp_unsigned("!=", b.load(place(f"{name}.ok"), typ=I8), const(0, I8)))


def _as_float(f: Fn, total: ir.Value, signed: bool) -> ir.Value:
    """A 128-bit sum as a float. One that fits 64 bits is rounded once; beyond that, parts are added."""
    b = f.b
    low, high = b.trunc(total, I64), b.trunc(b.ashr(total, const(64, I128)), I64)
    to_float = b.sitofp if signed else b.uitofp
    fits = b.icmp_unsigned("==", (b.sext if signed else b.zext)(low, I128), total)
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
    f.store(b.select(none, old_mean, new_mean), place(f"{name}.mean"))
    spread = b.fadd(b.fadd(old_m2, m2), b.fmul(b.fmul(delta, step), old_n))
    spread = b.select(fresh, b.fadd(m2, b.fsub(mean, mean)), spread)  # inf - inf: an infinite value has no spread
    f.store(b.select(none, old_m2, spread), place(f"{name}.m2"))


def _is_before(f: Fn, kind: AccKind, name: str, place: Place, this: ir.Value) -> ir.Value:
    sign = "<" if kind is AccKind.FIRST else ">"
    return f.b.icmp_signed(sign, this, f.b.load(place(f"{name}.row"), typ=I64))


def _wins(f: Fn, acc: Acc, name: str, place: Place, by: ir.Value, this: ir.Value) -> ir.Value:
    """Whether `by` beats the best so far; equal ones go to the earlier row."""
    assert acc.by is not None
    b, dtype = f.b, type_of(acc.by)
    best = from_memory(f, b.load(place(f"{name}.by"), typ=memory_type(dtype)), dtype)
    row = b.load(place(f"{name}.row"), typ=I64)
    least = acc.kind is AccKind.ARG_MIN
    if dtype.is_float:
        less = compare_floats(f, "lt" if least else "gt", by, best)
        tie = compare_floats(f, "eq", by, best)
    else:
        compare = b.icmp_signed if dtype.is_signed else b.icmp_unsigned
        less, tie = compare("<" if least else ">", by, best), compare("==", by, best)
    earlier = b.and_(tie, b.icmp_signed("<", this, row))
    return b.or_(b.icmp_signed("<", row, const(0)), b.or_(less, earlier))


def _take(f: Fn, name: str, place: Place, dtype: DType, wins: ir.Value | None, this: ir.Value, data: ir.Value,
          valid: ir.Value | None) -> None:
    _store_if(f, wins, place(f"{name}.row"), this)
    _store_if(f, wins, place(f"{name}.value"), to_memory(f, data))
    _store_if(f, wins, place(f"{name}.ok"), const(1, I8) if valid is None else f.b.zext(valid, I8))


def _store_if(f: Fn, condition: ir.Value | None, ptr: ir.Value, value: ir.Value) -> None:
    if condition is not None:
        value = f.b.select(condition, value, f.b.load(ptr, typ=value.type))
    f.store(value, ptr)
