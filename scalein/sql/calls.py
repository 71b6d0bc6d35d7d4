"""Calls of functions and aggregates, by the names that the registries give them (`sql=`).

SQL's arguments are those of the function, and after them its constants. What is otherwise in SQL (positions count
from one, defaults, formats) stands in `_ADAPTED` under the name of the registry.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import cache
from math import log, pi

from sqlglot import exp

from scalein.dtypes import BOOL, I64, STR, UNITS_PER_SECOND, DType, Kind
from scalein.durations import Span
from scalein.errors import WrongType, guess
from scalein.ir import aggregates
from scalein.ir.aggregates import AGGREGATES
from scalein.ir.exprs import Agg, Call, Expr, Lit, type_of
from scalein.ir.functions.registry import ANY, REGISTRY
from scalein.ir.time_formats import parts, spelled_out
from scalein.ir.unify import Refused, own_type_of
from scalein.sql.exprs import _NILADIC, Exprs, _in_sql, _is_null, _sql_hint
from scalein.sql.parse import Text, span_of


@cache
def _functions() -> dict[str, str]:
    """The function that a name in SQL means."""
    return {name: fn for fn, function in REGISTRY.items() for name in function.sql}


@cache
def _aggregates() -> dict[str, tuple[str, ...]]:
    """The aggregates that a name in SQL may mean: COUNT is two, by its arguments."""
    found: dict[str, tuple[str, ...]] = {}
    for fn, aggregate in AGGREGATES.items():
        for name in aggregate.sql:
            found[name] = (*found.get(name, ()), fn)
    return found


def names_of(source: Text, node: exp.Expr) -> list[str]:
    """The name of a called function as it is written, then those that sqlglot knows it by."""
    meta = node._meta
    written = [source.text[meta["start"] : meta["end"] + 1].upper()] if meta and "start" in meta else []
    if isinstance(node, exp.Anonymous):
        return written or [node.name.upper()]
    return [*written, *(type(node).sql_names() if isinstance(node, exp.Func) else [])]


def shown_name(source: Text, node: exp.Expr) -> str:
    """What the user calls a function, for errors; the parser may know it by another name."""
    meta, span = node._meta, span_of(node)
    if (not meta or "start" not in meta) and span is not None and isinstance(node, exp.Func):
        match = re.search(r"(\w+)\s*\(\s*(?:DISTINCT\s+)?$", source.text[: span[0]], re.IGNORECASE)
        if match is not None:
            return match[1].upper()
    return next(iter(names_of(source, node)), type(node).__name__.upper())


def is_function(name: str) -> bool:
    """Whether there is a function or an aggregate of a name."""
    return any(name.upper() in known for known in (_functions(), _COMPOSED, _aggregates()))


def aggregate_named(source: Text, node: exp.Expr) -> tuple[str, ...]:
    """The aggregates that a call may be; none if it is no aggregate."""
    if isinstance(node, exp.Filter | exp.WithinGroup | exp.IgnoreNulls | exp.RespectNulls):
        return aggregate_named(source, node.this)
    if not isinstance(node, exp.Func):
        return ()
    return next((_aggregates()[name] for name in names_of(source, node) if name in _aggregates()), ()) or (
        _EXTRA_AGGREGATES.get(type(node), ()))


def arguments(node: exp.Expr) -> list[exp.Expr]:
    """What a call is given, in order."""
    if isinstance(node, exp.Anonymous):
        return list(node.expressions)
    found: list[exp.Expr] = []
    for name in type(node).arg_types:
        given = node.args.get(name)
        found += given if isinstance(given, list) else [given] if isinstance(given, exp.Expr) else []
    return found


def call_of(e: Exprs, node: exp.Expr) -> Expr:
    """The typed call of a scalar function."""
    special = _SPECIAL.get(type(node))
    if special is not None:
        return special(e, node)
    names = names_of(e.source, node)
    clock = next((name for name in names if name in _NILADIC), None)
    if clock is not None:
        return e.clock(clock, node)
    composed = next((_COMPOSED[name] for name in names if name in _COMPOSED), None)
    if composed is not None:
        return composed(e, node)
    fn = next((_functions()[name] for name in names if name in _functions()), None)
    if fn is None:
        if aggregate_named(e.source, node):
            raise e.refused(f"the aggregate {names[0]} cannot stand in {e.step}", node,
                            "conditions on aggregates go into HAVING" if e.step == "WHERE" else None)
        shown = shown_name(e.source, node)
        known = sorted({*_functions(), *_COMPOSED, *_aggregates()})
        raise e.refused(f"there is no function {shown}", node, guess(shown, known))
    given = [e.expr(each) for each in arguments(node)]
    adapted = _ADAPTED.get(fn)
    if adapted is not None:
        return adapted(e, node, fn, given)
    return _plain(e, node, fn, given)


def _plain(e: Exprs, node: exp.Expr, fn: str, given: list[Expr]) -> Expr:
    """Arguments, then constants."""
    arity = REGISTRY[fn].arity
    if arity == ANY:
        if not given:
            raise e.refused(f"{names_of(e.source, node)[0]} needs arguments", node)
        known = [each for each in given if not _is_null(each)]
        return e.call(node, fn, *e.meeting(node, *known)) if known else Lit(None)
    if len(given) < arity:
        raise e.refused(f"{names_of(e.source, node)[0]} takes {arity} arguments, not {len(given)}", node)
    args, rest = given[:arity], given[arity:]
    if any(map(_is_null, args)):
        return Lit(None)
    params = tuple(_constant(e, node, each) for each in rest)
    return e.call(node, fn, *args, params=params)


def _constant(e: Exprs, node: exp.Expr, arg: Expr) -> object:
    if not isinstance(arg, Lit):
        raise e.refused(f"{names_of(e.source, node)[0]} takes constants after its first argument", node)
    return arg.value


def _integer(e: Exprs, node: exp.Expr, arg: Expr) -> int:
    found = _constant(e, node, arg)
    if not isinstance(found, int):
        raise e.refused(f"{names_of(e.source, node)[0]} takes a constant integer there", node)
    return found


# --- functions whose arguments are otherwise in SQL -------------------------------------------------------------------

Adapted = Callable[[Exprs, exp.Expr, str, list[Expr]], Expr]


def _substring(e: Exprs, node: exp.Expr, fn: str, given: list[Expr]) -> Expr:
    """Positions count from one, and from the end where they are negative."""
    start = _integer(e, node, given[1])
    length = _integer(e, node, given[2]) if len(given) > 2 else None
    if length is not None and length < 0:
        raise e.refused("SUBSTRING takes a length of 0 or more", node)
    if start == 0 and length is not None:
        start, length = 1, max(0, length - 1)
    offset = start - 1 if start > 0 else start
    return e.call(node, fn, given[0], params=(offset, length))


def _round(e: Exprs, node: exp.Expr, fn: str, given: list[Expr]) -> Expr:
    """Half away from zero; integers too, where the number of places is negative."""
    places = _signed(e, node, given[1]) if len(given) > 1 else 0
    own = own_type_of(given[0])
    if own is None or not own.is_int or places >= 0:
        return e.call(node, fn, given[0], params=(places,))
    unit = 10**-places
    if unit >= 2 ** (own.bits - 1):
        raise e.refused(f"ROUND of {own!r} takes at most {len(str(2 ** (own.bits - 1))) - 1} places", node)
    rest = e.truncating(node, "mod", given[0], Lit(unit))
    whole = e.call(node, "sub", given[0], rest)
    return e.call(node, "if_else", e.call(node, "ge", rest, Lit(unit // 2)), e.call(node, "add", whole, Lit(unit)),
                  e.call(node, "le", rest, Lit(-(unit // 2))), e.call(node, "sub", whole, Lit(unit)), whole)


def _strip(e: Exprs, node: exp.Expr, fn: str, given: list[Expr]) -> Expr:
    where = str(node.args.get("position") or "").upper()
    fn = {"LEADING": "str_lstrip", "TRAILING": "str_rstrip"}.get(where, fn)
    return e.call(node, fn, given[0], params=(_constant(e, node, given[1]) if len(given) > 1 else " ",))


def _extract(e: Exprs, node: exp.Expr, fn: str, given: list[Expr]) -> Expr:
    """The group of the first match; null where there is none, as in Flink."""
    pattern = str(_constant(e, node, given[1]))
    group = _integer(e, node, given[2]) if len(given) > 2 else 0
    _check_regex(e, node, pattern)
    return e.call(node, fn, given[0], params=(pattern, group))


def _matches(e: Exprs, node: exp.Expr, fn: str, given: list[Expr]) -> Expr:
    pattern = str(_constant(e, node, given[1]))
    _check_regex(e, node, pattern)
    return e.call(node, fn, given[0], params=(pattern,))


def _check_regex(e: Exprs, node: exp.Expr, pattern: str) -> None:
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        pc.match_substring_regex(pa.array([""]), pattern)
    except pa.ArrowException as error:
        raise e.refused(f"the regular expression {pattern!r} cannot be read", node, str(error).split("\n")[0]) from None


def _date_format(e: Exprs, node: exp.Expr, fn: str, given: list[Expr]) -> Expr:
    """A pattern of strftime (%Y-%m-%d), or Java's (yyyy-MM-dd)."""
    pattern = str(_constant(e, node, given[1]))
    pattern = pattern if "%" in pattern else _of_java(e, node, pattern)
    time = _as_time(e, node, given[0])
    pieces = pattern.split(_MILLISECONDS)
    e._checked(node, lambda: Lit(str([parts(spelled_out(piece)) for piece in pieces])))
    texts = [e.call(node, fn, time, params=(part,)) if part else None for part in pieces]
    found = texts[0]
    for each in texts[1:]:
        millis = e.call(node, "str_slice", e.call(node, fn, time, params=("%f",)), params=(0, 3))
        for part in (millis, each):
            found = part if found is None else found if part is None else e.call(node, "concat", found, part)
    return Lit("") if found is None else found


_MILLISECONDS = "%3f"
_JAVA = {"yyyy": "%Y", "yy": "%y", "MM": "%m", "dd": "%d", "HH": "%H", "hh": "%I", "mm": "%M", "ss": "%S", "a": "%p",
         "SSS": _MILLISECONDS, "SSSSSS": "%f", "D": "%j", "DDD": "%j", "EEE": "%a", "EEEE": "%A", "MMM": "%b",
         "MMMM": "%B"}


def _of_java(e: Exprs, node: exp.Expr, pattern: str) -> str:
    """The pattern of Java's DateTimeFormatter in strftime's letters."""
    found = []
    for part in re.finditer(r"'([^']*)'|((?P<letter>[A-Za-z])(?P=letter)*)|[^A-Za-z']", pattern):
        quoted, letters = part[1], part[2]
        if letters is None:
            found.append((part[0] if quoted is None else quoted).replace("%", "%%"))
        elif letters in _JAVA:
            found.append(_JAVA[letters])
        else:
            raise e.refused(f"{letters!r} in the pattern {pattern!r} is not supported", node,
                            f"letters are {', '.join(_JAVA)}")
    return "".join(found)


def _as_time(e: Exprs, node: exp.Expr, arg: Expr) -> Expr:
    """A text that is a constant, as the timestamp that it is."""
    if isinstance(arg, Lit) and isinstance(arg.value, str):
        return e._read(node, arg, DType(Kind.TS, unit="us"))
    return arg


def _to_timestamp(e: Exprs, node: exp.Expr, fn: str, given: list[Expr]) -> Expr:
    """Of a text; by a pattern, or in ISO's form."""
    if len(given) == 1:
        own = own_type_of(given[0])
        if own is not None and (own.is_int or own.is_float):
            raise e.refused("TO_TIMESTAMP takes text; of seconds since 1970, cast the integer", node,
                            "CAST(seconds AS TIMESTAMP_S)")
        return e.call(node, "cast", given[0], dtype=DType(Kind.TS, unit="us"))
    pattern = str(_constant(e, node, given[1]))
    pattern = pattern if "%" in pattern else _of_java(e, node, pattern)
    return e.call(node, fn, given[0], params=(pattern,), dtype=DType(Kind.TS, unit="us"))


def _concat_ws(e: Exprs, node: exp.Expr, fn: str, given: list[Expr]) -> Expr:
    """Nulls are left out, as in DuckDB and Flink."""
    separator = str(_constant(e, node, given[0]))
    return _concatenated(e, node, given[1:], separator)


def _concatenated(e: Exprs, node: exp.Expr, given: list[Expr], separator: str) -> Expr:
    parts = [_text_of(e, node, each) for each in given if not _is_null(each)]
    if not parts:
        return Lit("")
    if not separator:
        found = _or_empty(e, node, parts[0])
        for each in parts[1:]:
            found = e.call(node, "concat", found, _or_empty(e, node, each))
        return found
    if all(not each.nullable for each in parts):
        found = parts[0]
        for each in parts[1:]:
            found = e.call(node, "concat", e.call(node, "concat", found, Lit(separator)), each)
        return found
    joined: Expr = _or_empty(e, node, e.call(node, "concat", Lit(separator), parts[0]))
    for each in parts[1:]:
        joined = e.call(node, "concat", joined, _or_empty(e, node, e.call(node, "concat", Lit(separator), each)))
    return e.call(node, "str_slice", joined, params=(len(separator), None))


def _or_empty(e: Exprs, node: exp.Expr, part: Expr) -> Expr:
    return e.call(node, "fill_null", part, Lit("")) if part.nullable else part


def _text_of(e: Exprs, node: exp.Expr, arg: Expr) -> Expr:
    own = own_type_of(arg)
    if own is not None and not own.is_string:
        return e.call(node, "cast", e.with_type(node, arg), dtype=STR)
    return e.with_type(node, arg)


def _if_null(e: Exprs, node: exp.Expr, fn: str, given: list[Expr]) -> Expr:
    return e.call(node, "coalesce", *e.meeting(node, *given))


def _struct(e: Exprs, node: exp.Expr, fn: str, given: list[Expr]) -> Expr:
    names = []
    for number, each in enumerate(node.expressions):
        names.append(each.alias_or_name or each.name or f"col{number + 1}")
    return e.call(node, fn, *(e.with_type(node, arg) for arg in given), params=tuple(names))


def _modulo(e: Exprs, node: exp.Expr, fn: str, given: list[Expr]) -> Expr:
    return e.truncating(node, fn, given[0], given[1])


_ADAPTED: dict[str, Adapted] = {
    "str_slice": _substring, "round": _round, "str_strip": _strip, "str_lstrip": _strip, "str_rstrip": _strip,
    "str_extract": _extract, "str_matches": _matches, "dt_strftime": _date_format, "str_strptime": _to_timestamp,
    "concat_str": _concat_ws, "fill_null": _if_null, "make_struct": _struct, "mod": _modulo,
}


# --- functions that are made of several ------------------------------------------------------------------------------


def _part(e: Exprs, node: exp.Expr, name: str, arg: Expr) -> Expr:
    """A part of a time, by its name in SQL."""
    arg = _as_time(e, node, arg)
    part = name.upper()
    fn = _functions().get(part)
    if fn is not None and fn.startswith("dt_"):
        return e.call(node, fn, arg)
    match part:
        case "DOW" | "DAYOFWEEK" | "WEEKDAY":  # Sunday is 0
            return e.call(node, "mod", e.call(node, "dt_weekday", arg), Lit(7))
        case "DOY":
            return e.call(node, "dt_ordinal_day", arg)
        case "EPOCH":
            return e.call(node, "div", e.call(node, "dt_epoch", arg, params=("us",)), Lit(1e6))
        case "MILLISECOND" | "MILLISECONDS" | "MICROSECOND" | "MICROSECONDS":
            unit, per = ("dt_millisecond", 1_000) if part.startswith("MILLI") else ("dt_microsecond", 1_000_000)
            seconds = e.call(node, "mul", e.call(node, "dt_second", arg), Lit(per))
            return e.call(node, "add", seconds, e.call(node, unit, arg))
    known = [each for each, fn in _functions().items() if fn.startswith("dt_")]
    raise e.refused(f"there is no part {name!r} of times", node,
                    guess(part, known) or f"parts are {', '.join((*known, 'DOW', 'DOY', 'EPOCH'))}")


def _extract_part(e: Exprs, node: exp.Expr) -> Expr:
    return _part(e, node, node.this.name, e.expr(node.args["expression"]))


def _date_part(e: Exprs, node: exp.Expr) -> Expr:
    first, second = arguments(node)[:2]
    return _part(e, node, str(e.constant(first)), e.expr(second))


_FIXED = {"MICROSECOND": "1us", "MILLISECOND": "1ms", "SECOND": "1s", "MINUTE": "1m", "HOUR": "1h", "DAY": "1d"}


def _truncated(e: Exprs, node: exp.Expr) -> Expr:
    """DATE_TRUNC('unit', t): weeks begin on Monday."""
    unit, arg = node.args["unit"].name.upper().removesuffix("S"), _as_time(e, node, e.typed(node.this))
    own = own_type_of(arg)
    is_date = own is not None and own.kind in (Kind.DATE, Kind.DATE64)
    if is_date and unit in _FIXED and unit != "DAY":
        arg = e._stamp(node, arg, "us")
    if unit in _FIXED:
        return arg if is_date and unit == "DAY" else _floored(e, node, arg, timedelta_of(unit))
    days = {"WEEK": lambda: e.call(node, "sub", e.call(node, "dt_weekday", arg), Lit(1)),
            "MONTH": lambda: e.call(node, "sub", e.call(node, "dt_day", arg), Lit(1)),
            "YEAR": lambda: e.call(node, "sub", e.call(node, "dt_ordinal_day", arg), Lit(1))}.get(unit)
    if days is None:
        raise e.refused(f"DATE_TRUNC does not take {unit!r}", node, ", ".join((*_FIXED, "WEEK", "MONTH", "YEAR")))
    day = arg if is_date else _floored(e, node, arg, timedelta(days=1))
    return e.call(node, "sub", day, e.call(node, "mul", Lit(timedelta(days=1)), days()))


def timedelta_of(unit: str) -> timedelta:
    """The length of a unit without a calendar."""
    return {"MICROSECOND": timedelta(microseconds=1), "MILLISECOND": timedelta(milliseconds=1),
            "SECOND": timedelta(seconds=1), "MINUTE": timedelta(minutes=1), "HOUR": timedelta(hours=1),
            "DAY": timedelta(days=1)}[unit]


def _floored(e: Exprs, node: exp.Expr, arg: Expr, to: timedelta) -> Expr:
    nanoseconds = (to.days * 86_400 + to.seconds) * 10**9 + to.microseconds * 1_000
    own = own_type_of(arg)
    if own is not None and own.unit and nanoseconds < 10**9 // UNITS_PER_SECOND[own.unit]:
        return arg
    return e.call(node, "dt_truncate", arg, params=(Span(nanoseconds, False, str(to)),))


def _date_diff(e: Exprs, node: exp.Expr) -> Expr:
    """The whole units between two times, towards zero (Flink's TIMESTAMPDIFF); DuckDB's DATE_DIFF counts borders."""
    end, start = e.expr(node.this), e.expr(node.args["expression"])
    unit = node.args["unit"].name.upper().removesuffix("S")
    return _difference(e, node, unit, end, start, counts_borders=isinstance(node, exp.DateDiff))


def _difference(e: Exprs, node: exp.Expr, unit: str, end: Expr, start: Expr, counts_borders: bool) -> Expr:
    end, start = _as_time(e, node, end), _as_time(e, node, start)
    end, start = e.meeting(node, end, start)
    names = [shown_name(e.source, node)]
    if counts_borders and unit in ("YEAR", "QUARTER", "MONTH"):
        return e.call(node, "sub", *(_calendar(e, node, each, unit) for each in (end, start)))
    if counts_borders and unit == "WEEK":
        return e.truncating(node, "floordiv", _difference(e, node, "DAY", end, start, True), Lit(7))
    if counts_borders and unit in _FIXED:
        end, start = (_floored(e, node, e._stamp(node, each, "us"), timedelta_of(unit)) for each in (end, start))
    total = {"DAY": "dt_total_days", "HOUR": "dt_total_hours", "MINUTE": "dt_total_minutes",
             "SECOND": "dt_total_seconds", "MILLISECOND": "dt_total_milliseconds",
             "MICROSECOND": "dt_total_microseconds"}.get(unit)
    if total is None:
        raise e.refused(f"{names[0] if names else 'DATE_DIFF'} does not take {unit!r}", node, ", ".join(_FIXED))
    return e.call(node, total, e.call(node, "sub", end, start))


def _calendar(e: Exprs, node: exp.Expr, time: Expr, unit: str) -> Expr:
    """The number of a year, or of a quarter or month since the year 0."""
    time = e.with_type(node, time)
    year = e.call(node, "cast", e.call(node, "dt_year", time), dtype=I64)
    if unit == "YEAR":
        return year
    part, count = ("dt_month", 12) if unit == "MONTH" else ("dt_quarter", 4)
    return e.call(node, "add", e.call(node, "mul", year, Lit(count)), e.call(node, part, time))


def _timestamp_diff(e: Exprs, node: exp.Expr) -> Expr:
    """Flink's TIMESTAMPDIFF(unit, start, end): whole units."""
    unit, start, end = arguments(node)
    return _difference(e, node, unit.name.upper().removesuffix("S"), e.expr(end), e.expr(start), counts_borders=False)


def _timestamp_add(e: Exprs, node: exp.Expr) -> Expr:
    """Flink's TIMESTAMPADD(unit, n, t)."""
    unit, number, time = arguments(node)
    length = e.expr(exp.Interval(this=number.copy(), unit=exp.var(unit.name)))
    return e.arithmetic(node, "add", _as_time(e, node, e.expr(time)), length)


def _padded(e: Exprs, node: exp.Expr) -> Expr:
    """LPAD and RPAD to a number of letters; what is longer is cut."""
    text, count = e.with_type(node, e.expr(node.this)), _integer(e, node, e.expr(node.args["expression"]))
    by = str(_constant(e, node, e.expr(node.args["fill_pattern"])) if node.args.get("fill_pattern") else " ")
    if not 0 <= count <= 1000 or not by or (node.args.get("is_left") and len(by) != 1):
        raise e.refused(f"{shown_name(e.source, node)} takes a length up to 1,000, and a letter to fill with", node)
    filling = Lit((by * count)[:count])
    if not node.args.get("is_left"):
        return e.call(node, "str_slice", e.call(node, "concat", text, filling), params=(0, count))
    padded = e.call(node, "str_slice", e.call(node, "concat", filling, text), params=(-count, None))
    is_long = e.call(node, "ge", e.call(node, "str_len", text), Lit(count))
    return e.call(node, "if_else", is_long, e.call(node, "str_slice", text, params=(0, count)), padded)


def _repeated(e: Exprs, node: exp.Expr) -> Expr:
    text, count = e.with_type(node, e.expr(node.this)), _signed(e, node, e.expr(node.args["times"]))
    if count > 100:
        raise e.refused("REPEAT takes a number up to 100", node)
    found = text if count > 0 else e.call(node, "str_slice", text, params=(0, 0))
    for _ in range(count - 1):
        found = e.call(node, "concat", found, text)
    return found


def _position(e: Exprs, node: exp.Expr) -> Expr:
    """Where a text first stands in another, from 1 on; 0 if nowhere."""
    text = e.with_type(node, e.expr(node.this))
    part = str(_constant(e, node, e.expr(node.args["substr"])))
    if not part:
        return e.call(node, "if_else", e.call(node, "is_null", text), Lit(None, I64), Lit(1, I64))
    before = e.call(node, "str_len", e.call(node, "str_split_part", text, params=(part, 1)))
    there = e.call(node, "contains", text, params=(part,))
    return e.call(node, "if_else", there, e.call(node, "add", before, Lit(1)), e.call(node, "is_null", text), Lit(None),
                  Lit(0))


def _cut(e: Exprs, node: exp.Expr) -> Expr:
    """TRUNC(x): towards zero."""
    if len(arguments(node)) != 1:
        raise e.refused("TRUNC takes one argument", node, "ROUND takes a number of places")
    arg = e.with_type(node, e.expr(arguments(node)[0]))
    if type_of(arg).is_int:
        return arg
    return e.call(node, "if_else", e.call(node, "lt", arg, Lit(0)), e.call(node, "ceil", arg),
                  e.call(node, "floor", arg))


def _scaled(by: float) -> Callable[[Exprs, exp.Expr], Expr]:
    return lambda e, node: e.call(node, "mul", e.expr(arguments(node)[0]), Lit(by))


def _count_letter(e: Exprs, node: exp.Expr) -> Expr:
    """How often a letter is in a text: the function that Nexmark's q14 brings for Flink."""
    text, letter = (e.expr(each) for each in arguments(node))
    given = str(_constant(e, node, letter))
    if len(given) != 1:
        raise e.refused("COUNT_CHAR takes one letter", node)
    text = e.with_type(node, text)
    rest = e.call(node, "str_replace", text, params=(given, ""))
    return e.call(node, "sub", *(e.call(node, "str_len", each) for each in (text, rest)))


def _time_of(e: Exprs, node: exp.Expr) -> Expr:
    """STRPTIME."""
    pattern = str(e.constant(node.args["format"]))
    return e.call(node, "str_strptime", e.expr(node.this), params=(pattern,), dtype=DType(Kind.TS, unit="us"))


def _text_of_time(e: Exprs, node: exp.Expr) -> Expr:
    """STRFTIME."""
    pattern = str(e.constant(node.args["format"]))
    e._checked(node, lambda: Lit(str(parts(spelled_out(pattern)))))
    return e.call(node, "dt_strftime", _as_time(e, node, e.expr(node.this)), params=(pattern,))


def _concat(e: Exprs, node: exp.Expr) -> Expr:
    """CONCAT leaves nulls out."""
    return _concatenated(e, node, [e.expr(each) for each in node.expressions], "")


def _split_index(e: Exprs, node: exp.Expr) -> Expr:
    """Flink's SPLIT_INDEX counts from zero."""
    text, by, number = (e.expr(each) for each in arguments(node))
    return e.call(node, "str_split_part", text,
                  params=(_constant(e, node, by), _integer(e, node, number) + 1))


def _log(e: Exprs, node: exp.Expr) -> Expr:
    """LOG10(x), LOG2(x), LOG(base, x); LOG(x) is of base 10, as in DuckDB. The parser knows them all as LOG."""
    given = arguments(node)
    base: Expr = Lit(10) if len(given) < 2 else e.expr(given[0])
    logs = [Lit(log(float(value.value))) if isinstance(value, Lit) and isinstance(value.value, int) and value.value > 0
            else e.call(node, "log", e.with_type(node, value)) for value in (e.expr(given[-1]), base)]
    return e.call(node, "div", *logs)


def _sign(e: Exprs, node: exp.Expr) -> Expr:
    arg = e.expr(arguments(node)[0])
    return e.call(node, "if_else", e.call(node, "gt", arg, Lit(0)), Lit(1), e.call(node, "lt", arg, Lit(0)), Lit(-1),
                  e.call(node, "is_null", e.with_type(node, arg)), Lit(None), Lit(0))


def _left(e: Exprs, node: exp.Expr) -> Expr:
    """The first letters; of a negative number, all but so many."""
    text, number = (e.expr(each) for each in arguments(node))
    count = _signed(e, node, number)
    if count >= 0:
        return e.call(node, "str_slice", text, params=(0, count))
    if count < -1000:
        raise e.refused("LEFT leaves out at most 1,000 letters", node)
    text = e.with_type(node, text)
    kept = e.call(node, "str_extract", text, params=(f"(?s)^(.*).{{{-count}}}$", 1))
    is_null = e.call(node, "is_null", text)
    return e.call(node, "if_else", is_null, Lit(None), e.call(node, "fill_null", kept, Lit("")))


def _right(e: Exprs, node: exp.Expr) -> Expr:
    """The last letters; of a negative number, all but so many."""
    text, number = (e.expr(each) for each in arguments(node))
    count = _signed(e, node, number)
    if count < 0:
        return e.call(node, "str_slice", text, params=(-count, None))
    return e.call(node, "str_slice", text, params=(-count, None) if count else (0, 0))


def _signed(e: Exprs, node: exp.Expr, arg: Expr) -> int:
    """A constant integer, which may be negative."""
    if isinstance(arg, Call) and arg.fn == "neg":
        return -_integer(e, node, arg.args[0])
    return _integer(e, node, arg)


def _add_time(e: Exprs, node: exp.Expr) -> Expr:
    """DATE_ADD(t, INTERVAL ...) and TIMESTAMPADD(unit, n, t)."""
    by = node.args["expression"]
    if isinstance(by, exp.Interval):
        return e.arithmetic(node, "add", e.expr(node.this), e.expr(by))
    length = timedelta_of(node.args["unit"].name.upper().removesuffix("S"))
    return e.arithmetic(node, "add", _as_time(e, node, e.expr(node.this)), e.call(node, "mul", Lit(length), e.expr(by)))


def _epoch(unit: str) -> Callable[[Exprs, exp.Expr], Expr]:
    return lambda e, node: e.call(node, "dt_epoch", e.expr(arguments(node)[0]), params=(unit,))


def _to_date(e: Exprs, node: exp.Expr) -> Expr:
    return e.call(node, "cast", e.expr(arguments(node)[0]), dtype=DType(Kind.DATE))


def _window_outside(e: Exprs, node: exp.Expr) -> Expr:
    name = names_of(e.source, node)[0]
    raise e.refused(f"{name} cannot stand in {e.step}", node,
                    f"put it into FROM, TABLE({name}(TABLE t, DESCRIPTOR(ts), ...)), or into GROUP BY")


_SPECIAL: dict[type[exp.Expr], Callable[[Exprs, exp.Expr], Expr]] = {
    exp.Extract: _extract_part, exp.TimestampTrunc: _truncated, exp.DateTrunc: _truncated, exp.DateDiff: _date_diff,
    exp.TimestampDiff: _timestamp_diff, exp.Pad: _padded, exp.Repeat: _repeated, exp.StrPosition: _position,
    exp.Trunc: _cut, exp.StrToTime: _time_of, exp.TimeToStr: _text_of_time, exp.Concat: _concat,
    exp.DateAdd: _add_time, exp.TimestampAdd: _add_time, exp.TsOrDsToDate: _to_date,
    exp.Date: _to_date,
}
_COMPOSED: dict[str, Callable[[Exprs, exp.Expr], Expr]] = {
    "DATE_PART": _date_part, "SPLIT_INDEX": _split_index, "LOG10": _log, "LOG": _log, "LOG2": _log,
    "TIMESTAMPADD": _timestamp_add, "COUNT_CHAR": _count_letter, "PI": lambda e, node: Lit(pi),
    "DEGREES": _scaled(180 / pi), "RADIANS": _scaled(pi / 180),
    "SIGN": _sign, "LEFT": _left, "RIGHT": _right, "EPOCH_MS": _epoch("ms"), "EPOCH_US": _epoch("us"),
    "DAYOFWEEK": lambda e, node: _part(e, node, "DOW", e.expr(arguments(node)[0])),
    "TUMBLE": _window_outside, "HOP": _window_outside, "SESSION": _window_outside, "CUMULATE": _window_outside,
}


def like(e: Exprs, node: exp.Expr, ignores_case: bool, escape: str = "") -> Expr:
    """LIKE: a plain comparison where the pattern is one, else a regular expression, which pyarrow computes."""
    arg, pattern = e.expr(node.this), e.expr(node.args["expression"])
    if _is_null(arg) or _is_null(pattern):
        return Lit(None, BOOL)
    if not (isinstance(pattern, Lit) and isinstance(pattern.value, str)):
        raise e.refused("LIKE takes a constant pattern", node, "CONTAINS and STARTS_WITH do as well")
    own = own_type_of(arg)
    if own is not None and not own.is_string:
        raise e.source.error(WrongType, f"LIKE takes text, not {own!r}", node, hint="CAST(... AS VARCHAR) makes text")
    text = e.with_type(node, arg)
    parts: list[str | None] = []  # None is %, "" is _
    letters = iter(pattern.value)
    for letter in letters:
        if escape and letter == escape:
            parts.append(next(letters, escape))
        else:
            parts.append(None if letter == "%" else "" if letter == "_" else letter)
    body = parts
    plain = "".join(each for each in body if each)
    if not ignores_case and "" not in body:
        inside = body[1:-1] if len(body) > 1 else []
        ends = (body[:1] == [None], body[-1:] == [None] and len(body) > 1)
        if None not in body:
            return e.call(node, "eq", text, Lit(plain))
        if None not in inside:
            if not plain:
                return e.call(node, "starts_with", text, params=("",))
            match ends:
                case (True, True):
                    return e.call(node, "contains", text, params=(plain,))
                case (True, False):
                    return e.call(node, "ends_with", text, params=(plain,))
                case (False, True):
                    return e.call(node, "starts_with", text, params=(plain,))
    regex = "".join(".*" if each is None else "." if each == "" else re.escape(each) for each in body)
    return e.call(node, "str_matches", text, params=(f"(?s{'i' if ignores_case else ''})^{regex}$",))


# --- aggregates ------------------------------------------------------------------------------------------------------

_EXTRA_AGGREGATES: dict[type[exp.Expr], tuple[str, ...]] = {
    exp.Median: ("quantile",), exp.PercentileCont: ("quantile",), exp.Quantile: ("quantile",),
    exp.AnyValue: ("first",), exp.LogicalAnd: ("min",), exp.LogicalOr: ("max",), exp.CountIf: ("count",),
}


def aggregate_of(e: Exprs, node: exp.Expr, grouped: bool) -> Agg:
    """The typed aggregate of a call, with FILTER, DISTINCT and WITHIN GROUP."""
    where: Expr | None = None
    call, ordered = node, None
    skips_nulls = False
    while isinstance(call, exp.Filter | exp.WithinGroup | exp.IgnoreNulls | exp.RespectNulls):
        skips_nulls = skips_nulls or isinstance(call, exp.IgnoreNulls)
        if isinstance(call, exp.Filter):
            where = replace_step(e, "FILTER").condition(call.args["expression"].this)
        if isinstance(call, exp.WithinGroup):
            ordered = call.args["expression"]
        call = call.this
    fns, given = aggregate_named(e.source, call), arguments(call)
    is_distinct = bool(given) and isinstance(given[0], exp.Distinct)
    if is_distinct:
        given = list(given[0].expressions)
    given = [each for each in given if not isinstance(each, exp.Star)]
    if isinstance(call, exp.CountIf | exp.LogicalAnd | exp.LogicalOr):
        condition = replace_step(e, shown_name(e.source, call)).condition(given[0])
        if isinstance(call, exp.CountIf):
            where = condition if where is None else e.call(node, "and", where, condition)
            given = []
    fn = next((each for each in fns if AGGREGATES[each].arity == len(given)), fns[0])
    shown = shown_name(e.source, call)
    is_descending = False
    if ordered is not None:
        if len(ordered.expressions) != 1 or fn not in ("quantile", "approx_quantile"):
            raise e.refused(f"WITHIN GROUP (ORDER BY ...) of {shown} is not supported", node,
                            "PERCENTILE_CONT(0.5) WITHIN GROUP (ORDER BY x) is")
        is_descending = bool(ordered.expressions[0].args.get("desc"))
        given = [ordered.expressions[0].this, *given]
    if is_distinct and fn == "count_valid":
        fn = "n_unique"
    elif is_distinct and fn not in ("min", "max", "n_unique", "approx_n_unique"):
        raise e.refused(f"{shown}(DISTINCT ...) is not supported", node,
                        "aggregate a subquery of SELECT DISTINCT, or use COUNT(DISTINCT ...)")
    if len(given) > 1 and fn == "n_unique":
        raise e.refused("COUNT(DISTINCT ...) takes one column", node, "count a subquery of SELECT DISTINCT")
    inside = replace_step(e, shown)
    arity = AGGREGATES[fn].arity
    params: tuple[float, ...] = ()
    if fn in ("quantile", "approx_quantile"):
        share = inside.constant(given[1]) if len(given) > 1 else 0.5
        try:
            params = (float(share),)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise e.refused(f"{shown} takes a constant share", node, "0.5 is the median") from None
        if not 0 <= params[0] <= 1:
            raise e.refused(f"{shown} takes a share from 0 to 1", node)
        params = (1 - params[0],) if is_descending else params
        given = given[:1]
    if len(given) != arity:
        raise e.refused(f"{shown} takes {arity} argument{'s' * (arity != 1)}, not {len(given)}", node)
    args = tuple(inside.typed(each) for each in given)
    if args[:1] and args[0].nullable and (fn in ("arg_min", "arg_max") or (skips_nulls and fn in ("first", "last"))):
        there = e.call(node, "is_not_null", args[0])  # as in DuckDB, which takes the row with the most of the others
        where = there if where is None else e.call(node, "and", where, there)
    try:
        return aggregates.typed(Agg(fn, args, params=params, at=e.source.at), args, where, grouped)
    except Refused as refused:
        raise e.source.error(WrongType, _in_sql(refused.what), node, hint=_sql_hint(refused.hint)) from None


def replace_step(e: Exprs, step: str) -> Exprs:
    """The same scope, with another clause in its errors."""
    return replace(e, step=step)
