"""Parts of times and dates in integer arithmetic, proleptic Gregorian, UTC or naive.

The calendar is computed from days since 1970-03-01-based eras of 400 years, in which leap days
come last: no table, no branch, right for negative days too.
"""

from __future__ import annotations

from llvmlite import ir

from scalein.dtypes import UNITS_PER_SECOND, DType, Kind, ticks_per_day
from scalein.llvm_backend.fn import I32, I64, Fn, const
from scalein.llvm_backend.functions.arithmetic import Fail, floor_divide

DAY_S = 86_400


def lower(f: Fn, fn: str, data: ir.Value, dtype: DType, params: tuple[object, ...], fail: Fail) -> ir.Value:
    if fn == "dt_truncate":
        every = int(str(params[0]))
        whole = floor_divide(f, data, every)
        low = -(-dtype.int_range()[0] // every)
        fail("integer overflow", f.b.icmp_signed("<", whole, const(low, data.type)))
        return f.b.mul(whole, const(every, data.type))
    if fn == "dt_epoch":
        have, want = UNITS_PER_SECOND[dtype.unit], UNITS_PER_SECOND[str(params[0])]
        if want <= have:
            return floor_divide(f, data, have // want)
        by = want // have
        limit = (2**63 - 1) // by
        too_great, too_small = f.b.icmp_signed(">", data, const(limit)), f.b.icmp_signed("<", data, const(-limit))
        fail("integer overflow", f.b.or_(too_great, too_small))
        return f.b.mul(data, const(by))
    data = f.b.sext(data, I64) if data.type == I32 else data
    if dtype.kind in (Kind.DATE, Kind.DATE64):
        return f.b.trunc(_calendar(f, fn, floor_divide(f, data, ticks_per_day(dtype))), I32)
    unit = UNITS_PER_SECOND[dtype.unit]
    if fn in ("dt_hour", "dt_minute", "dt_second"):
        return f.b.trunc(_clock(f, fn, data, unit), I32)
    if fn in ("dt_millisecond", "dt_microsecond", "dt_nanosecond"):
        want = {"dt_millisecond": 1_000, "dt_microsecond": 1_000_000, "dt_nanosecond": 1_000_000_000}[fn]
        part = _modulo(f, data, unit)
        scaled = f.b.mul(part, const(want // unit)) if want >= unit else f.b.sdiv(part, const(unit // want))
        return f.b.trunc(scaled, I32)
    return f.b.trunc(_calendar(f, fn, floor_divide(f, data, DAY_S * unit)), I32)


def _modulo(f: Fn, data: ir.Value, by: int) -> ir.Value:
    return f.b.sub(data, f.b.mul(floor_divide(f, data, by), const(by)))


def _clock(f: Fn, fn: str, data: ir.Value, unit: int) -> ir.Value:
    second_of_day = f.b.sdiv(_modulo(f, data, DAY_S * unit), const(unit))
    size, count = {"dt_hour": (3600, 24), "dt_minute": (60, 60), "dt_second": (1, 60)}[fn]
    return f.b.srem(f.b.sdiv(second_of_day, const(size)), const(count))


def _calendar(f: Fn, fn: str, days: ir.Value) -> ir.Value:
    b = f.b
    if fn == "dt_weekday":  # 1970-01-01 was a Thursday
        return b.add(_modulo(f, b.add(days, const(3)), 7), const(1))
    year, month, day = _civil(f, days)
    match fn:
        case "dt_year":
            return year
        case "dt_month":
            return month
        case "dt_day":
            return day
        case "dt_quarter":
            return b.sdiv(b.add(month, const(2)), const(3))
        case _:  # day of the year
            return b.add(b.sub(days, _days_before(f, year)), const(1))


def _civil(f: Fn, days: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Year, month and day of a day number."""
    b = f.b
    shifted = b.add(days, const(719_468))  # days since 0000-03-01
    era = floor_divide(f, shifted, 146_097)
    of_era = b.sub(shifted, b.mul(era, const(146_097)))
    year = b.sdiv(
        b.sub(b.add(b.sub(of_era, b.sdiv(of_era, const(1_460))), b.sdiv(of_era, const(36_524))),
              b.sdiv(of_era, const(146_096))), const(365))  # fmt: skip
    past = b.sub(b.add(b.mul(year, const(365)), b.sdiv(year, const(4))), b.sdiv(year, const(100)))
    of_year = b.sub(of_era, past)  # days since March 1st
    shifted_month = b.sdiv(b.add(b.mul(of_year, const(5)), const(2)), const(153))
    before = b.sdiv(b.add(b.mul(shifted_month, const(153)), const(2)), const(5))
    day = b.add(b.sub(of_year, before), const(1))
    early = b.icmp_signed("<", shifted_month, const(10))
    month = b.select(early, b.add(shifted_month, const(3)), b.sub(shifted_month, const(9)))
    year = b.add(year, b.mul(era, const(400)))
    return b.select(early, year, b.add(year, const(1))), month, day


def _days_before(f: Fn, year: ir.Value) -> ir.Value:
    """Day number of January 1st."""
    b = f.b
    last = b.sub(year, const(1))
    leaps = b.add(b.sub(floor_divide(f, last, 4), floor_divide(f, last, 100)), floor_divide(f, last, 400))
    return b.sub(b.add(b.mul(last, const(365)), leaps), const(719_162))
