"""Windows of event time in SQL: table functions in FROM, and Flink's older and Spark's spelling in GROUP BY.

A window in FROM stays pending until it is known what its rows are for: grouped by the window they are aggregated by it,
otherwise each row gets the start and end of its windows as columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import pyarrow as pa
from sqlglot import exp

from scalein.api.binding import source as source_of
from scalein.api.column import Column
from scalein.api.windows import WindowSpec, resolve_window
from scalein.connectors.in_memory import of_arrow
from scalein.dtypes import BOOL, I64, UNITS_PER_SECOND, DType, Kind
from scalein.durations import Span
from scalein.errors import BadSql, ScaleinError
from scalein.ir.exprs import Call, Col, Expr, Lit, Named, type_of
from scalein.ir.functions.registry import REGISTRY
from scalein.ir.internal_names import internal
from scalein.ir.ops import Aggregate, AssignWindows, Filter, Join, Op, Project
from scalein.ir.resolve import Scope
from scalein.ir.unify import cast_to
from scalein.ir.windows import Window
from scalein.sql.exprs import Exprs
from scalein.sql.parse import Text
from scalein.sql.scope import EventWindow, Relation, Visible, fresh
from scalein.sql.stream_joins import is_endless, is_stream

NAMES = ("window_start", "window_end", "window_time")
_ARGUMENTS = {  # after the table and the time
    "TUMBLE": ("SIZE", "OFFSET"), "HOP": ("SLIDE", "SIZE", "OFFSET"), "CUMULATE": ("STEP", "SIZE", "OFFSET"),
    "SESSION": ("GAP",),
}
_EXAMPLES = {
    "TUMBLE": "TUMBLE(t, ts, INTERVAL '10' SECOND)", "HOP": "HOP(t, ts, INTERVAL '2' SECOND, INTERVAL '10' SECOND)",
    "CUMULATE": "CUMULATE(t, ts, INTERVAL '1' HOUR, INTERVAL '1' DAY)",
    "SESSION": "SESSION(t PARTITION BY k, ts, INTERVAL '5' SECOND)",
}


@contextmanager
def underlined(source: Text, node: exp.Expr) -> Iterator[None]:
    """Errors of the API, which know nothing of SQL, with the part of the text that they are about."""
    from scalein.sql.parse import span_of

    try:
        yield
    except ScaleinError as error:
        span = span_of(node)
        if "sql" not in error.facts and span is not None:
            error.add("sql", source.shown(span))
        raise


def duration(e: Exprs, node: exp.Expr, what: str) -> Span:
    """A length in a window: an interval, a text as in Spark, or an integer for integer times."""
    from scalein.durations import span

    value = e.constant(node)
    if isinstance(value, str):
        with underlined(e.source, node):
            return span(value, what, e.source.at, zero=True, negative=True)
    if isinstance(value, timedelta):
        nanoseconds = ((value.days * 86_400 + value.seconds) * 1_000_000 + value.microseconds) * 1_000
        return Span(nanoseconds, False, e.source.of(node) or str(value))
    if isinstance(value, int) and not isinstance(value, bool):
        return Span(value, True, str(value))
    raise e.refused(f"the {what} is an interval", node, "INTERVAL '10' SECOND")


def event_window(e: Exprs, node: exp.Expr, kind: str, time: exp.Expr, lengths: dict[str, exp.Expr],
                 keys: tuple[Expr, ...] = ()) -> EventWindow:
    """The windows that a table function or a function in GROUP BY describes, over the relation of `e`."""
    expr = e.typed(time)
    found = {name.lower(): duration(e, given, f"{name.lower()} of {kind}") for name, given in lengths.items()}
    dtype = type_of(expr)
    start, end, last = (Col(internal(name), dtype, False) for name in NAMES)
    if kind == "SESSION":
        return EventWindow(kind, expr, _session(e, node, expr, found["gap"]), start, end, last, keys)
    size = found["size"]
    every = found.get("slide") or found.get("step") or size
    name = {"TUMBLE": "tumbling", "HOP": "sliding", "CUMULATE": "cumulate"}[kind]
    for length, what in ((size, "size"), (every, "step")):
        if length.length <= 0:
            raise e.refused(f"the {what} of {kind} must be longer than zero", node)
    if name == "sliding" and every.length > size.length:
        raise e.refused("the windows of HOP would leave gaps between them", node,
                        "the slide comes first, then the size: " + _EXAMPLES[kind])
    if name == "cumulate" and size.length % every.length:
        raise e.refused("the size of CUMULATE must be a multiple of its step", node, _EXAMPLES[kind])
    offset = found.get("offset")
    with underlined(e.source, time):
        window = _resolved(name, expr, size, every, offset, e)
    return EventWindow(kind, expr, window, start, end, last, keys)


def _resolved(name: str, time: Expr, size: Span, every: Span, offset: Span | None, e: Exprs) -> Window:
    """`resolve_window` over a column; a time that is computed is put in afterwards."""
    from scalein.dtypes import Field, Schema

    standing = time.name if isinstance(time, Col) else "time"
    scope = Scope(Schema((Field(standing, type_of(time), time.nullable),)), e.step, e.source.at)
    spec = WindowSpec(name, Column(Col(standing)), size, every, offset)
    return replace(resolve_window(spec, scope), time=time)


def _session(e: Exprs, node: exp.Expr, time: Expr, gap: Span) -> Window:
    from scalein.api.windows import session
    from scalein.dtypes import Field, Schema

    standing = time.name if isinstance(time, Col) else "time"
    scope = Scope(Schema((Field(standing, type_of(time), time.nullable),)), e.step, e.source.at)
    with underlined(e.source, node):
        spec = session(standing, gap=gap.length if gap.is_count else timedelta(microseconds=gap.length / 1_000))
        window: Window = replace(resolve_window(spec, scope), time=time)
        return window


def table_function(e: Exprs, node: exp.Expr, kind: str, given: list[exp.Expr]) -> EventWindow:
    """The windows of TUMBLE(table, time, ...), whose table `e` reads; its arguments come in order or by name."""
    wanted = _ARGUMENTS[kind]
    named = {each.this.name.upper(): each.args["expression"] for each in given if isinstance(each, exp.Kwarg)}
    rest = [each for each in given[1:] if not isinstance(each, exp.Kwarg)]
    time = named.pop("TIMECOL", None)
    named.pop("DATA", None)
    keys: list[exp.Expr] = []
    if kind == "SESSION":
        lengths = {"GAP": named["GAP"]} if "GAP" in named else {}
        if not lengths and rest:
            lengths = {"GAP": rest.pop()}
        if time is None and rest:
            time = rest.pop()
        keys = rest
    else:
        if time is None and rest:
            time = rest.pop(0)
        lengths = {**dict(zip(wanted, rest, strict=False)), **named}
    if time is None or not set(wanted) - {"OFFSET"} <= lengths.keys() or not lengths.keys() <= set(wanted):
        raise e.refused(f"{kind} takes a table, a time, and {', '.join(wanted).lower()}", node, _EXAMPLES[kind])
    return event_window(e, node, kind, time, lengths, tuple(e.typed(key) for key in keys))


def with_window(relation: Relation, window: EventWindow) -> Relation:
    """The relation with the window's columns, which are pending."""
    table = relation.tables[0] if relation.tables else ""
    edges = zip(NAMES, (window.start, window.end, window.last), strict=True)
    return replace(relation, window=window,
                   columns=(*relation.columns, *(Visible(table, name, expr) for name, expr in edges)))


def as_columns(relation: Relation, source: Text) -> Relation:
    """The rows, each with the start and end of its windows: once for each window that it is in."""
    pending = relation.window
    if pending is None or not pending.is_pending:
        return relation
    window, at = pending.window, source.at
    if pending.kind == "SESSION" or window is None:
        raise BadSql("the rows of SESSION can only be grouped by their windows", at=at,
                     hint="GROUP BY the keys, window_start, window_end")
    op: Op = relation.op
    time = pending.time
    if time.nullable:
        op = Filter(op, Call("is_not_null", (time,), dtype=BOOL, nullable=False), at=at)
        time = _call("fill_null", time, Lit(0, type_of(time)))
    number = cast_to(time, I64)
    taken = [*op.schema.names]
    nth: Expr = Lit(0, I64)
    if window.windows_per_row > 1:
        name = fresh(internal("nth"), taken)
        numbers = pa.table({name: pa.array(range(window.windows_per_row), pa.int64())},
                           schema=pa.schema([pa.field(name, pa.int64(), nullable=False)]))
        op = Join(op, source_of("arrow", of_arrow(numbers, at), at), (), (), "cross", ((name, name),), at=at)
        nth = Col(name, I64, False)
    begin, end, holds = window.nth_limits(number, nth)
    if window.windows_per_row > 1:
        op = Filter(op, holds, at=at)
    own = type_of(time)
    names = {each: fresh(each, taken) for each in NAMES}
    edges = [cast_to(begin, own), cast_to(end, own)]
    edges.append(last_of(edges[1]))
    items = [Named(f.name, Col(f.name, f.dtype, f.nullable)) for f in op.schema if f.name in taken]
    items += [Named(names[each], edge) for each, edge in zip(NAMES, edges, strict=True)]
    op = Project(op, tuple(items), at=at)
    found = [Col(names[each], op.schema[names[each]].dtype, False) for each in NAMES]
    moved = dict(zip((pending.start, pending.end, pending.last), found, strict=True))
    columns = tuple(replace(each, expr=moved[each.expr] if isinstance(each.expr, Col) and each.expr in moved
                            else each.expr) for each in relation.columns)
    return replace(relation, op=op, columns=columns, window=replace(
        pending, start=found[0], end=found[1], last=found[2], is_pending=False))


def assigned(relation: Relation) -> Relation:
    """The rows of a stream in their windows, by the op of `group_by(..., window).top_k`, which knows late ones.

    Other rows stay as they are: they get their windows by `as_columns`.
    """
    pending = relation.window
    if pending is None or not pending.is_pending or pending.window is None or pending.kind == "SESSION":
        return relation
    if not is_stream(relation.op) or {"window_start", "window_end"} & set(relation.op.schema.names):
        return relation
    op = AssignWindows(relation.op, pending.window, at=relation.op.at)
    start, end = (Col(name, op.schema[name].dtype, False) for name in NAMES[:2])
    moved = dict(zip((pending.start, pending.end, pending.last), (start, end, last_of(end)), strict=True))
    columns = tuple(replace(each, expr=moved.get(each.expr, each.expr)) for each in relation.columns)
    return replace(relation, op=op, columns=columns, window=replace(
        pending, start=start, end=end, last=moved[pending.last], is_pending=False))


def are_complete(op: Op) -> bool:
    """Whether rows are those of an aggregation by windows: they come once their window is complete."""
    while isinstance(op, Project | Filter):
        op = op.input
    return isinstance(op, Aggregate) and op.window is not None


def again(relation: Relation, given: Iterable[Expr]) -> EventWindow | None:
    """The window of a second aggregation by windows: rows of one start are in a window of its own, as long as a step.

    It closes when the watermark has passed the windows that begin there, so a job need not wait for its end.
    """
    window = relation.window
    if window is None or window.is_pending or window.window is None or window.kind not in ("TUMBLE", "HOP"):
        return None
    if not ({window.start, window.end} <= set(given) and is_stream(relation.op) and are_complete(relation.op)):
        return None
    return replace(window, window=window.window.of_starts(window.start), time=window.start)


_PERIODS = {"%Y%m%d": 86_400, "%Y%j": 86_400, "%Y%m%d%H": 3_600, "%Y%m%d%H%M": 60, "%Y%m%d%H%M%S": 1}  # seconds


def of_time(relation: Relation, keys: list[Expr]) -> tuple[EventWindow, list[Expr]] | None:
    """The windows that keys mean which are periods of event time, such as its day, and these keys.

    Where rows never end, groups are complete when their period is over; without windows they never would be.
    """
    event = relation.op.event_time.column if is_endless(relation.op) else ""
    field = relation.op.schema.get(event) if event else None
    if field is None or field.dtype.kind is not Kind.TS or field.dtype.tz:
        return None
    time = Col(field.name, field.dtype, field.nullable)
    periods = {key: period for key in keys if (period := _period(key, time)) is not None}
    size = min(periods.values(), default=0)
    if not size or any(period % size for period in periods.values()):
        return None
    start, end = (Col(internal(name), field.dtype, False) for name in NAMES[:2])
    return EventWindow("TUMBLE", time, Window(time, size, size), start, end, last_of(end)), list(periods)


def _period(key: Expr, time: Col) -> int | None:
    """The length of what a key tells apart, in units of the time: a day of DATE_FORMAT(t, 'yyyy-MM-dd')."""
    if not isinstance(key, Call) or key.args != (time,):
        return None
    units = UNITS_PER_SECOND[type_of(time).unit or "s"]
    seconds: int | None = None
    if key.fn == "dt_strftime":
        letters = set(re.findall(r"%.", str(key.params[0])))
        seconds = next((length for parts, length in _PERIODS.items() if set(re.findall(r"%.", parts)) == letters), None)
    elif key.fn == "cast" and type_of(key).kind in (Kind.DATE, Kind.DATE64):
        seconds = 86_400
    elif key.fn == "dt_truncate" and isinstance(key.params[0], int):
        return key.params[0]
    return None if seconds is None else seconds * units


def _call(fn: str, *args: Expr) -> Expr:
    return REGISTRY[fn].rule(Call(fn, args), args)


def last_of(end: Expr) -> Expr:
    """Flink's `window_time`: the last millisecond of a window."""
    dtype = type_of(end)
    if dtype.is_int:
        return _call("sub", end, Lit(1))
    unit = timedelta(seconds=1) if dtype.unit == "s" else timedelta(milliseconds=1)
    return _call("sub", end, Lit(unit))


def group_window(e: Exprs, node: exp.Expr, name: str, given: list[exp.Expr]) -> EventWindow:
    """The windows of TUMBLE(ts, INTERVAL ...) or window(ts, '10 minutes') in GROUP BY."""
    if not given:
        raise e.refused(f"{name} takes a time and a length", node, f"{name}(ts, INTERVAL '10' SECOND)")
    time, rest = given[0], given[1:]
    names: tuple[str, ...]
    if name == "WINDOW":
        kind = "HOP" if len(rest) > 1 else "TUMBLE"
        names = ("SIZE", "SLIDE", "OFFSET")
    elif name == "SESSION_WINDOW":
        kind, names = "SESSION", ("GAP",)
    else:
        kind, names = name, _ARGUMENTS[name]
    lengths = dict(zip(names, rest, strict=False))
    if len(rest) > len(names) or not set(_ARGUMENTS[kind]) - {"OFFSET"} <= lengths.keys():
        raise e.refused(f"{name} in GROUP BY takes a time and its lengths", node, f"{name}(ts, INTERVAL '10' SECOND)")
    return event_window(e, node, kind, time, lengths)


def is_time(dtype: DType) -> bool:
    """Whether a column of a type may be event time."""
    return dtype.kind is Kind.TS or (dtype.is_int and (dtype.is_signed or dtype.bits < 64))

