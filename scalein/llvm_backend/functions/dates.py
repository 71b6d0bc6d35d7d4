"""Parts of times and dates in integer arithmetic, proleptic Gregorian, UTC or naive.

The calendar is computed from days since 1970-03-01-based eras of 400 years, in which leap days
come last: no table, no branch, right for negative days too.
"""

from __future__ import annotations

from llvmlite import ir

from scalein.dtypes import UNITS_PER_SECOND, ticks_per_day
from scalein.ir.functions.dates import TOTALS_PER_DAY
from scalein.llvm_backend.fn import I32, I64, Fn, const
from scalein.llvm_backend.functions.arithmetic import floor_divide
from scalein.llvm_backend.functions.registry import CallSite, lowers

DAY_S = 86_400


@lowers("dt_truncate")
def _truncate(c: CallSite) -> ir.Value:
    f, (data,), (dtype,) = c.f, c.args, c.types
    every = int(str(c.params[0]))
    whole = floor_divide(f, data, every)
    low = -(-dtype.int_range()[0] // every)
    c.fail("integer overflow", f.b.icmp_signed("<", whole, const(low, data.type)))
    return f.b.mul(whole, const(every, data.type))


@lowers("dt_epoch")
def _epoch(c: CallSite) -> ir.Value:
    f, (data,) = c.f, c.args
    have, want = UNITS_PER_SECOND[c.types[0].unit], UNITS_PER_SECOND[str(c.params[0])]
    if want <= have:
        return floor_divide(f, data, have // want)
    by = want // have
    limit = (2**63 - 1) // by
    too_great, too_small = f.b.icmp_signed(">", data, const(limit)), f.b.icmp_signed("<", data, const(-limit))
    c.fail("integer overflow", f.b.or_(too_great, too_small))
    return f.b.mul(data, const(by))


@lowers(*TOTALS_PER_DAY)
def _total(c: CallSite) -> ir.Value:
    """Whole units of a duration, towards zero."""
    f, (data,) = c.f, c.args
    have, want = ticks_per_day(c.types[0]), TOTALS_PER_DAY[c.call.fn]
    if want <= have:
        return f.b.sdiv(data, const(have // want))
    by = want // have
    limit = (2**63 - 1) // by
    too_great, too_small = f.b.icmp_signed(">", data, const(limit)), f.b.icmp_signed("<", data, const(-limit))
    c.fail("integer overflow", f.b.or_(too_great, too_small))
    return f.b.mul(data, const(by))


def _ticks(c: CallSite) -> ir.Value:
    """The argument in 64 bits."""
    (data,) = c.args
    return c.f.b.sext(data, I64) if data.type == I32 else data


# What a second holds of each part.
_FRACTIONS = {"dt_millisecond": 1_000, "dt_microsecond": 1_000_000, "dt_nanosecond": 1_000_000_000}
# Seconds of each part, and how many there are before it starts again.
_CLOCK = {"dt_hour": (3600, 24), "dt_minute": (60, 60), "dt_second": (1, 60)}


@lowers(*_FRACTIONS)
def _fraction(c: CallSite) -> ir.Value:
    f, data, want = c.f, _ticks(c), _FRACTIONS[c.call.fn]
    unit = UNITS_PER_SECOND[c.types[0].unit]
    part = modulo(f, data, unit)
    scaled = f.b.mul(part, const(want // unit)) if want >= unit else f.b.sdiv(part, const(unit // want))
    return f.b.trunc(scaled, I32)


@lowers(*_CLOCK)
def _clock(c: CallSite) -> ir.Value:
    f, data, (size, count) = c.f, _ticks(c), _CLOCK[c.call.fn]
    unit = UNITS_PER_SECOND[c.types[0].unit]
    second_of_day = f.b.sdiv(modulo(f, data, DAY_S * unit), const(unit))
    return f.b.trunc(f.b.srem(f.b.sdiv(second_of_day, const(size)), const(count)), I32)


def _days(c: CallSite) -> ir.Value:
    """The number of the day."""
    return floor_divide(c.f, _ticks(c), ticks_per_day(c.types[0]))


@lowers("dt_year")
def _year(c: CallSite) -> ir.Value:
    return c.f.b.trunc(civil(c.f, _days(c))[0], I32)


@lowers("dt_month")
def _month(c: CallSite) -> ir.Value:
    return c.f.b.trunc(civil(c.f, _days(c))[1], I32)


@lowers("dt_day")
def _day(c: CallSite) -> ir.Value:
    return c.f.b.trunc(civil(c.f, _days(c))[2], I32)


@lowers("dt_quarter")
def _quarter(c: CallSite) -> ir.Value:
    b = c.f.b
    month = civil(c.f, _days(c))[1]
    return b.trunc(b.sdiv(b.add(month, const(2)), const(3)), I32)


@lowers("dt_weekday")
def _weekday(c: CallSite) -> ir.Value:
    b = c.f.b
    monday = b.add(_days(c), const(3))  # 1970-01-01 was a Thursday
    return b.trunc(b.add(modulo(c.f, monday, 7), const(1)), I32)


@lowers("dt_ordinal_day")
def _ordinal_day(c: CallSite) -> ir.Value:
    b, days = c.f.b, _days(c)
    year, _, _ = civil(c.f, days)
    return b.trunc(b.add(b.sub(days, days_before(c.f, year)), const(1)), I32)


def modulo(f: Fn, data: ir.Value, by: int) -> ir.Value:
    return f.b.sub(data, f.b.mul(floor_divide(f, data, by), const(by)))


def civil(f: Fn, days: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
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


def days_before(f: Fn, year: ir.Value) -> ir.Value:
    """Day number of January 1st."""
    b = f.b
    last = b.sub(year, const(1))
    leaps = b.add(b.sub(floor_divide(f, last, 4), floor_divide(f, last, 100)), floor_divide(f, last, 400))
    return b.sub(b.add(b.mul(last, const(365)), leaps), const(719_162))
