"""Functions of times and dates. A timestamp with a zone means its local time, which pyarrow knows."""

from __future__ import annotations

from dataclasses import replace

from scalein.dtypes import I32, I64, STR, DType, Kind, ticks_per_day
from scalein.durations import Span, in_units
from scalein.ir.exprs import Call, Expr, type_of
from scalein.ir.functions.casts import is_utc, to_finer
from scalein.ir.functions.registry import Args, Function, Moved, always, declare, typed
from scalein.ir.functions.strings import text_argument
from scalein.ir.time_formats import letters, needs_clock, needs_date, needs_zone
from scalein.ir.unify import Refused, type_literal

_CALENDAR = ("year", "quarter", "month", "day", "weekday", "ordinal_day")
_CLOCK = ("hour", "minute", "second", "millisecond", "microsecond", "nanosecond")
DT_PARTS = tuple(f"dt_{part}" for part in _CALENDAR + _CLOCK)
TOTALS_PER_DAY = {
    "dt_total_days": 1, "dt_total_hours": 24, "dt_total_minutes": 1_440, "dt_total_seconds": 86_400,
    "dt_total_milliseconds": 86_400 * 10**3, "dt_total_microseconds": 86_400 * 10**6,
    "dt_total_nanoseconds": 86_400 * 10**9,
}  # fmt: skip
DT_DATE_PARTS = tuple(f"dt_{part}" for part in _CALENDAR)  # those that a date has as well


def _instant(call: Call, args: Args) -> Expr:
    arg = type_literal(args[0])
    kind, is_date_part = type_of(arg).kind, call.fn in DT_DATE_PARTS
    if kind is Kind.TS or (kind in (Kind.DATE, Kind.DATE64) and is_date_part):
        return arg
    if kind is Kind.TIME and call.fn in DT_PARTS and not is_date_part:
        return arg
    has_days = kind in (Kind.DATE, Kind.DATE64) or type_of(arg).is_string
    hint = 'cast it first: .cast(pa.timestamp("us"))' if has_days else None
    raise Refused(f"dt.{call.fn.removeprefix('dt_')} takes a timestamp, not {type_of(arg)!r}", hint)


def _part(call: Call, args: Args) -> Expr:
    return typed(call, [_instant(call, args)], I32)


def _truncate(call: Call, args: Args) -> Expr:
    arg, every = _instant(call, args), call.params[0]
    assert isinstance(every, Span)
    units = in_units(every, type_of(arg), "length to truncate to", "the column", call.at)
    return replace(typed(call, [arg], type_of(arg)), params=(units,))


def _epoch(call: Call, args: Args) -> Expr:
    return typed(call, [_instant(call, args)], I64)


def _total(call: Call, args: Args) -> Expr:
    arg = type_literal(args[0])
    if type_of(arg).kind is not Kind.DUR:
        is_time = type_of(arg).kind in (Kind.TS, Kind.DATE, Kind.DATE64)
        raise Refused(f"dt.{call.fn.removeprefix('dt_')} takes a duration, not {type_of(arg)!r}",
                      "subtract another time to get a duration" if is_time else None)
    return typed(call, [arg], I64)


def _total_overflows(call: Call) -> bool:
    return TOTALS_PER_DAY[call.fn] > ticks_per_day(type_of(call.args[0]))


def _strftime(call: Call, args: Args) -> Expr:
    """Text of a time; of a zone's clock in two steps, of which pyarrow computes the first."""
    arg, pattern = type_literal(args[0]), str(call.params[0])
    dtype = type_of(arg)
    if dtype.kind not in (Kind.TS, Kind.DATE, Kind.DATE64, Kind.TIME):
        raise Refused(f"dt.strftime takes a time or date, not {dtype!r}",
                      "go through .dt.total_seconds()" if dtype.kind is Kind.DUR else None)
    if dtype.kind is Kind.TIME and needs_date(pattern):
        raise Refused(f"a time of the day has no date to write by {pattern!r}")
    if not is_utc(dtype):
        if needs_zone(pattern):
            raise Refused(f"{pattern!r} would write an offset of {dtype.tz}", "cast the column to UTC first")
        local = DType(Kind.TS, unit=dtype.unit)
        arg = typed(Call("dt_local", (), at=call.at), [arg], local)
    return typed(call, [arg], STR)


def _strptime(call: Call, args: Args) -> Expr:
    """A time, in the type of the call, of a text."""
    arg, target, pattern = text_argument(call, args), type_of(call), str(call.params[0])
    has_date, has_clock, has_zone = needs_date(pattern), needs_clock(pattern), needs_zone(pattern)
    if target.kind not in (Kind.TS, Kind.DATE, Kind.DATE64, Kind.TIME):
        raise Refused(f"str.strptime gives times and dates, not {target!r}",
                      'for example str.strptime(pa.timestamp("us"), "%Y-%m-%d %H:%M:%S")')
    if target.kind is Kind.TIME:
        if has_date or has_zone or not has_clock:
            raise Refused(f"{pattern!r} reads no time of the day", "that has %H, %M, %S and %f, or %I and %p")
        return typed(call, [arg], target)
    if not letters(pattern) & frozenset("Yy"):
        raise Refused(f"{pattern!r} reads no year, so the date is not known", "the year is %Y, or %y of two digits")
    if target.kind is not Kind.TS and (has_clock or has_zone):
        raise Refused(f"{pattern!r} reads more than a date", 'read a timestamp, and cast it: .cast(pa.date32())')
    if has_zone and not target.tz:
        raise Refused(f"{pattern!r} reads an offset, but {target!r} has no zone", 'read a pa.timestamp("us", "UTC")')
    if not has_zone and not is_utc(target):
        raise Refused(f"{pattern!r} reads no offset, so the instant in {target.tz} is not known",
                      "read a timestamp without zone")
    return typed(call, [arg], target)


def _local(call: Call, args: Args) -> Expr:
    return call  # only `_strftime` makes it


def _in_a_zone(call: Call) -> bool:
    return not is_utc(type_of(call.args[0]))


def _epoch_fails(call: Call) -> bool:
    return to_finer(type_of(call.args[0]), str(call.params[0]))


_SQL = {  # in SQL, the parts of a second count from the minute on
    "ordinal_day": ("DAYOFYEAR",), "weekday": ("ISODOW",), "day": ("DAY", "DAYOFMONTH"),
    **dict.fromkeys(("millisecond", "microsecond", "nanosecond"), ()),
}  # fmt: skip


def _declare_part(part: str, duckdb: str = "") -> None:
    """`duckdb` names the function of a timestamp; empty for parts that it computes of other units."""
    declare(Function(f"dt_{part}", _part, host=_in_a_zone, arrow=f"local_{part}", show=f"{{0}}.dt.{part}()",
                     sql=_SQL.get(part, (part.upper(),)), duckdb=f"{duckdb}({{0}})" if duckdb else ""))


for _name in ("year", "quarter", "month", "day", "hour", "minute"):
    _declare_part(_name, _name)
_declare_part("weekday", "isodow")
_declare_part("ordinal_day", "dayofyear")
for _name in ("second", "millisecond", "microsecond", "nanosecond"):
    _declare_part(_name)
def _truncated(call: Call) -> Moved | None:
    (unit,) = call.params
    return None if _in_a_zone(call) or not isinstance(unit, int) else Moved(call.args[0], 1 - unit, is_exact=False)


declare(
    Function("dt_strftime", _strftime, makes_text=always, show="{0}.dt.strftime({params})", sql=("DATE_FORMAT",),
             duckdb="strftime({0}, {params[0]})"),
    Function("dt_local", _local, host=always, arrow="local_time", show="{0}"),
    Function("str_strptime", _strptime, fallible=always, show="{0}.str.strptime({type}, {params})",
             sql=("TO_TIMESTAMP",)),
    *(Function(_name, _total, fallible=_total_overflows, show=f"{{0}}.dt.{_name.removeprefix('dt_')}()")
      for _name in TOTALS_PER_DAY),
    Function("dt_truncate", _truncate, fallible=always, host=_in_a_zone, arrow="truncate", moved=_truncated,
             show="{0}.dt.truncate({span})"),
    Function("dt_epoch", _epoch, fallible=_epoch_fails, show="{0}.dt.epoch({params})"),
)
