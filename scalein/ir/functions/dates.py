"""Functions of times and dates. A timestamp with a zone means its local time, which pyarrow knows."""

from __future__ import annotations

from dataclasses import replace

from scalein.dtypes import I32, I64, Kind
from scalein.durations import Span, in_units
from scalein.ir.exprs import Call, Expr, type_of
from scalein.ir.functions.casts import is_utc, to_finer
from scalein.ir.functions.registry import Args, Function, always, declare, typed
from scalein.ir.unify import Refused, settle

_CALENDAR = ("year", "quarter", "month", "day", "weekday", "ordinal_day")
_CLOCK = ("hour", "minute", "second", "millisecond", "microsecond", "nanosecond")
DT_PARTS = tuple(f"dt_{part}" for part in _CALENDAR + _CLOCK)
DT_DATE_PARTS = tuple(f"dt_{part}" for part in _CALENDAR)  # those that a date has as well


def _instant(call: Call, args: Args) -> Expr:
    arg = settle(args[0])
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


def _in_a_zone(call: Call) -> bool:
    return not is_utc(type_of(call.args[0]))


def _epoch_fails(call: Call) -> bool:
    return to_finer(type_of(call.args[0]), str(call.params[0]))


def _declare_part(part: str, duckdb: str = "") -> None:
    """`duckdb` names the function of a timestamp; empty for parts that it computes of other units."""
    declare(Function(f"dt_{part}", _part, host=_in_a_zone, arrow=f"local_{part}", show=f"{{0}}.dt.{part}()",
                     duckdb=f"{duckdb}({{0}})" if duckdb else ""))


for _name in ("year", "quarter", "month", "day", "hour", "minute"):
    _declare_part(_name, _name)
_declare_part("weekday", "isodow")
_declare_part("ordinal_day", "dayofyear")
for _name in ("second", "millisecond", "microsecond", "nanosecond"):
    _declare_part(_name)
declare(
    Function("dt_truncate", _truncate, fallible=always, host=_in_a_zone, arrow="truncate",
             show="{0}.dt.truncate({span})"),
    Function("dt_epoch", _epoch, fallible=_epoch_fails, show="{0}.dt.epoch({params})"),
)
