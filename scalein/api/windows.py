"""Windows: values that `group_by` takes beside its keys. They meet the time column's type there.

Which windows hold a time and when they close: `ir/windows.py`. The slice of a row: `llvm_backend/sinks/group.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from scalein.api.column import Column, as_column, as_expr, lit
from scalein.api.hints import with_argument_hints
from scalein.dtypes import Kind
from scalein.durations import Duration, Span, in_units, span
from scalein.errors import BadArgument, BadDuration, SourceLoc, WrongType, here
from scalein.ir.exprs import type_of
from scalein.ir.printer import show_expr
from scalein.ir.resolve import Scope, resolve, shown
from scalein.ir.windows import Cumulate, Window
from scalein.ir.windows import session as session_window

_STEPS = {"sliding": "every", "cumulate": "step"}  # what the user calls it


@dataclass(frozen=True, slots=True)
class WindowSpec:
    """A window as the user asked for it: half-open, aligned to the epoch, or moved by an offset."""

    kind: str
    time: Column
    size: Span
    every: Span
    offset: Span | None = None

    def __repr__(self) -> str:
        if self.kind == "count":
            return f"count_window({self.size}, every={self.every})"
        if self.kind == "session":
            return f"session({self.time!r}, gap={self.size})"
        every = f", {_STEPS[self.kind]}={self.every}" if self.kind in _STEPS else ""
        offset = "" if self.offset is None else f", offset={self.offset}"
        return f"{self.kind}({self.time!r}, {self.size}{every}{offset})"


@with_argument_hints
def tumbling(time: str | Column, size: Duration, *, offset: Duration | None = None) -> WindowSpec:
    """Windows of one size, one after the other: [0, size), [size, 2 * size), ...

    They add `window_start` and `window_end` after the keys, of the type of `time`. `offset` moves all of them: days
    that begin at six are `si.tumbling("t", "1d", offset="6h")`, and of a local day that begins at 16:00 UTC
    `offset="-8h"`.

    >>> import scalein as si
    >>> si.tumbling("event_time", "10s")
    tumbling(Column(event_time), '10s')
    """
    at = here()
    length = span(size, "size of the window", at)
    return WindowSpec("tumbling", as_column(time, "tumbling"), length, length, _offset(offset, at))


@with_argument_hints
def sliding(time: str | Column, size: Duration, *, every: Duration, offset: Duration | None = None) -> WindowSpec:
    """Windows of one size that overlap: a new one starts at each multiple of `every`, moved by `offset`.

    >>> import scalein as si
    >>> si.sliding("event_time", "10s", every="2s")
    sliding(Column(event_time), '10s', every='2s')
    """
    at = here()
    length, step = span(size, "size of the window", at), span(every, "step of the window", at)
    if length.is_count == step.is_count and step.length > length.length:
        raise BadDuration("the windows would leave gaps between them", at=at, found=f"every {step}, size {length}",
                          hint="every must not be longer than the size")
    return WindowSpec("sliding", as_column(time, "sliding"), length, step, _offset(offset, at))


@with_argument_hints
def cumulate(time: str | Column, size: Duration, *, step: Duration, offset: Duration | None = None) -> WindowSpec:
    """Windows that grow by a step up to a size, and then begin anew: of each day the first hour, the first two, ...

    >>> import scalein as si
    >>> sales = si.from_arrow({"minute": [1, 12, 14, 25], "price": [5, 3, 2, 9]})
    >>> day = si.cumulate("minute", 20, step=10)
    >>> sales.group_by(day).agg(total=si.col("price").sum()).sort("window_start", "window_end").collect().to_pylist()
    [{'window_start': 0, 'window_end': 10, 'total': 5}, {'window_start': 0, 'window_end': 20, 'total': 10},
     {'window_start': 20, 'window_end': 30, 'total': 9}, {'window_start': 20, 'window_end': 40, 'total': 9}]
    """
    at = here()
    length, each = span(size, "size of the window", at), span(step, "step of the window", at)
    if length.is_count == each.is_count and length.length % each.length:
        raise BadDuration("the windows would not end where the next ones begin", at=at, 
                          found=f"step {each}, size {length}", hint="the size must be a multiple of the step")
    return WindowSpec("cumulate", as_column(time, "cumulate"), length, each, _offset(offset, at))


@with_argument_hints
def count_window(size: int, *, every: int | None = None) -> WindowSpec:
    """Windows of `size` rows of a key, in the source's order: one after the other, or a new one after `every` rows.

    `window_start` and `window_end` are the numbers of a window's first row and of the row after its last, from 0 on for
    each key. Windows that are not full at the end come out as well.

    >>> import scalein as si
    >>> flow = si.from_arrow({"k": ["a", "b", "a", "a"], "x": [1, 2, 3, 4]})
    >>> flow.group_by("k", si.count_window(2)).agg(s=si.col("x").sum()).sort("k", "window_start").collect().to_pydict()
    {'k': ['a', 'a', 'b'], 'window_start': [0, 2, 0], 'window_end': [2, 3, 1], 's': [4, 4, 2]}
    """
    at = here()
    for name, rows in (("count_window", size), ("every=", size if every is None else every)):
        if isinstance(rows, bool) or not isinstance(rows, int) or not 0 < rows < 2**62:
            raise BadArgument(f"{name} takes a number of rows, 1 or more", at=at, found=repr(rows))
    if every is not None and every > size:
        raise BadDuration("the windows would leave gaps between them", at=at, found=f"every {every}, size {size}",
                          hint="every must not be greater than the size")
    length = span(size, "rows of the window", at)
    return WindowSpec("count", lit(0), length, length if every is None else span(every, "rows", at))


@with_argument_hints
def session(time: str | Column, gap: Duration) -> WindowSpec:
    """Rows of a key that are at most a gap apart: [first, last + gap). A row exactly `gap` later still joins.

    They add `window_start` and `window_end` after the keys, of the type of `time`. In a job a session is final once the
    watermark has passed its end; a row that is behind may still connect two sessions that are open.

    >>> import scalein as si
    >>> clicks = si.from_arrow({"user": ["a", "b", "a", "a"], "at": [0, 5, 30, 61], "page": [1, 2, 3, 4]})
    >>> visits = clicks.group_by("user", si.session("at", gap=30)).agg(pages=si.count())
    >>> visits.sort("user", "window_start").collect().to_pylist()
    [{'user': 'a', 'window_start': 0, 'window_end': 60, 'pages': 2},
     {'user': 'a', 'window_start': 61, 'window_end': 91, 'pages': 1},
     {'user': 'b', 'window_start': 5, 'window_end': 35, 'pages': 1}]
    """
    length = span(gap, "gap of the session", here())
    return WindowSpec("session", as_column(time, "session"), length, length)


def _offset(offset: Duration | None, at: SourceLoc) -> Span | None:
    return None if offset is None else span(offset, "offset of the window", at, zero=True, negative=True)


def resolve_window(spec: WindowSpec, scope: Scope) -> Window:
    """The window in units of its time column."""
    if spec.kind == "count":
        raise BadArgument(f"{scope.step} takes windows of time", at=scope.at, found=repr(spec))
    node = as_expr(spec.time, scope.at)
    time = resolve(node, scope)
    name, dtype = show_expr(node), type_of(time)
    if not (dtype.kind is Kind.TS or dtype.is_int):
        is_near = dtype.kind in (Kind.DATE, Kind.DATE64, Kind.STR)
        hint = "cast it to a timestamp: .cast(pa.timestamp(\"us\"))" if is_near else None
        raise WrongType(f"the time of a window is a timestamp or an integer, but {name} is {dtype!r}", at=scope.at,
                        step=scope.step, has=shown(scope.schema), hint=hint)
    if spec.kind == "session":
        if not dtype.is_signed and dtype.bits == 64:
            raise WrongType(f"windows are computed in signed 64 bits, but {name} is {dtype!r}", at=scope.at,
                            step=scope.step, hint="cast it to a signed integer: .cast(pa.int64())")
        return session_window(time, in_units(spec.size, dtype, "gap of the session", name, scope.at))
    size = in_units(spec.size, dtype, "size of the window", name, scope.at)
    every = in_units(spec.every, dtype, "step of the window", name, scope.at)
    stride = size if spec.kind == "cumulate" else every
    given = 0 if spec.offset is None else in_units(spec.offset, dtype, "offset of the window", name, scope.at)
    offset = given % stride
    if not dtype.is_signed and (size != stride or offset or dtype.bits == 64):
        moves = size != stride or bool(offset)
        why = f"{spec.kind} windows can start before zero" if moves else "windows are computed in signed 64 bits"
        raise WrongType(f"{why}, but {name} is {dtype!r}", at=scope.at,
                        step=scope.step, hint="cast it to a signed integer: .cast(pa.int64())")
    return Cumulate(time, size, every, offset) if spec.kind == "cumulate" and size != every else Window(
        time, size, every if spec.kind == "sliding" else size, offset)
