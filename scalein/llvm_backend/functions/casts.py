"""Casts between fixed-width types; an impossible one fails in live rows only."""

from __future__ import annotations

from llvmlite import ir

from scalein.dtypes import I64 as I64_TYPE
from scalein.dtypes import TIMES, DType, Kind, ticks_per_day
from scalein.llvm_backend.fn import F64, I32, I64, Fn, const
from scalein.llvm_backend.functions import decimals
from scalein.llvm_backend.functions.arithmetic import Fail, floor_divide
from scalein.llvm_backend.functions.registry import CallSite, lowers
from scalein.llvm_backend.values import Str, register_type


@lowers("cast", plain=True)
def _cast(c: CallSite) -> ir.Value | Str:
    if c.types[0].is_string and c.dtype.kind in TIMES:
        from scalein.llvm_backend.functions.time_text import read_iso  # most flows have none

        return read_iso(c)
    return lower_cast(c.f, c.args[0], c.types[0], c.dtype, c.fail)


def lower_cast(f: Fn, data: ir.Value | Str, have: DType, want: DType, fail: Fail) -> ir.Value | Str:
    if isinstance(data, Str):
        if want.form == "fixed":
            fail("impossible cast", f.b.icmp_unsigned("!=", data.size, const(want.width)))
        return data
    if have.is_decimal or want.is_decimal:
        return decimals.cast(f, data, have, want, fail)
    if want.kind is Kind.TIME:
        return _cast_clock(f, data, have, want, fail)
    if have.kind in TIMES and want.kind in TIMES:
        return _cast_time(f, data, have, want, fail)
    if want.kind is Kind.BOOL:
        if have.is_float:
            return f.b.fcmp_unordered("!=", data, const(0.0, data.type))
        return f.b.icmp_unsigned("!=", data, const(0, data.type))
    if have.kind is Kind.BOOL:
        if want.is_float:
            return f.b.uitofp(data, register_type(want))
        return f.b.zext(data, register_type(want))
    if want.is_float:
        return _to_float(f, data, have, want)
    if have.is_float:
        return _float_to_int(f, data, want, fail)
    found = _int_to_int(f, data, have, want, fail)
    if want.kind is Kind.DATE64:  # Arrow has it in milliseconds, but only of whole days
        day = ticks_per_day(want)
        fail("impossible cast", f.b.icmp_signed("!=", f.b.mul(floor_divide(f, found, day), const(day)), found))
    return found


def _to_float(f: Fn, data: ir.Value, have: DType, want: DType) -> ir.Value:
    typ = register_type(want)
    if have.is_float:
        if have.bits == want.bits:
            return data
        return f.b.fpext(data, typ) if have.bits < want.bits else f.b.fptrunc(data, typ)
    return (f.b.sitofp if have.is_signed else f.b.uitofp)(data, typ)


def _float_to_int(f: Fn, data: ir.Value, want: DType, fail: Fail) -> ir.Value:
    wide = f.b.fpext(data, F64) if data.type != F64 else data
    whole = f.call("llvm.trunc.f64", F64, [wide])
    low, high = want.int_range()
    # 2^63 and 2^64 are floats, 2^63 - 1 is not: compare with the power of two, exclusively.
    inside = f.b.and_(f.b.fcmp_ordered(">=", whole, const(float(low), F64)),
                      f.b.fcmp_ordered("<", whole, const(float(high + 1), F64)))
    fail("impossible cast", f.b.not_(inside))
    safe = f.b.select(inside, whole, const(0.0, F64))
    typ = register_type(want)
    return f.b.fptosi(safe, typ) if want.is_signed else f.b.fptoui(safe, typ)


def _int_to_int(f: Fn, data: ir.Value, have: DType, want: DType, fail: Fail) -> ir.Value:
    (low, high), (least, most) = have.int_range(), want.int_range()
    compare = f.b.icmp_signed if have.is_signed else f.b.icmp_unsigned
    outside = []
    if low < least:
        outside.append(compare("<", data, const(least, data.type)))
    if high > most:
        outside.append(compare(">", data, const(most, data.type)))
    if (bad := f.any_of(*outside)) is not None:
        fail("impossible cast", bad)
    typ = register_type(want)
    if have.bits == want.bits:
        return data
    if have.bits > want.bits:
        return f.b.trunc(data, typ)
    return (f.b.sext if have.is_signed else f.b.zext)(data, typ)


def _cast_clock(f: Fn, data: ir.Value, have: DType, want: DType, fail: Fail) -> ir.Value:
    """A time of the day: in another unit, of a timestamp, or of an integer that must lie within a day."""
    day, typ = ticks_per_day(want), register_type(want)
    if have.kind not in TIMES:
        found = _int_to_int(f, data, have, I64_TYPE, fail)
        fail("impossible cast", f.b.icmp_unsigned(">=", found, const(day)))
    else:
        found = f.b.sext(data, I64) if data.type == I32 else data
        one = ticks_per_day(have)
        if have.kind is Kind.TS:
            found = f.b.sub(found, f.b.mul(floor_divide(f, found, one), const(one)))
        found = f.b.mul(found, const(day // one)) if day >= one else floor_divide(f, found, one // day)
    return found if typ == I64 else f.b.trunc(found, typ)


def _cast_time(f: Fn, data: ir.Value, have: DType, want: DType, fail: Fail) -> ir.Value:
    if have.kind is want.kind and not have.unit:
        return data
    data = f.b.sext(data, I64) if data.type == I32 else data
    one, other = ticks_per_day(have), ticks_per_day(want)
    if want.kind in (Kind.DATE, Kind.DATE64):
        days = floor_divide(f, data, one)
        if want.kind is Kind.DATE64:
            return _scale(f, days, other, want, fail)
        narrow = f.b.trunc(days, I32)
        fail("impossible cast", f.b.icmp_signed("!=", f.b.sext(narrow, I64), days))
        return narrow
    if other >= one:
        return _scale(f, data, other // one, want, fail)
    return floor_divide(f, data, one // other)


def _scale(f: Fn, data: ir.Value, by: int, want: DType, fail: Fail) -> ir.Value:
    if by == 1:
        return data
    low, high = want.int_range()
    bad = f.b.or_(f.b.icmp_signed("<", data, const(-(-low // by))), f.b.icmp_signed(">", data, const(high // by)))
    fail("integer overflow", bad)
    return f.b.mul(data, const(by))
