"""Windows: values that `group_by` takes beside its keys. They meet the time column's type there.

Which windows hold a time and when they close: `ir/windows.py`. The slice of a row: `llvm_backend/sinks/group.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from scalein.api.column import Column, as_column, as_expr
from scalein.api.hints import with_argument_hints
from scalein.dtypes import Kind
from scalein.durations import Duration, Span, in_units, span
from scalein.errors import BadDuration, WrongType, here
from scalein.ir.exprs import type_of
from scalein.ir.printer import show_expr
from scalein.ir.resolve import Scope, resolve, shown
from scalein.ir.windows import Window


@dataclass(frozen=True, slots=True)
class WindowSpec:
    """A window as the user asked for it: half-open, aligned to the epoch."""

    kind: str
    time: Column
    size: Span
    every: Span

    def __repr__(self) -> str:
        every = f", every={self.every}" if self.kind == "sliding" else ""
        return f"{self.kind}({self.time!r}, {self.size}{every})"


@with_argument_hints
def tumbling(time: str | Column, size: Duration) -> WindowSpec:
    """Windows of one size, one behind the other: [0, size), [size, 2 * size), ...

    They add `window_start` and `window_end` behind the keys, of the type of `time`.

    >>> import scalein as si
    >>> si.tumbling("event_time", "10s")
    tumbling(Column(event_time), '10s')
    """
    length = span(size, "size of the window", here())
    return WindowSpec("tumbling", as_column(time, "tumbling"), length, length)


@with_argument_hints
def sliding(time: str | Column, size: Duration, *, every: Duration) -> WindowSpec:
    """Windows of one size that overlap: a new one starts at each multiple of `every`.

    >>> import scalein as si
    >>> si.sliding("event_time", "10s", every="2s")
    sliding(Column(event_time), '10s', every='2s')
    """
    at = here()
    length, step = span(size, "size of the window", at), span(every, "step of the window", at)
    if length.is_count == step.is_count and step.length > length.length:
        raise BadDuration("the windows would leave gaps between them", at=at, found=f"every {step}, size {length}",
                          hint="every must not be longer than the size")
    return WindowSpec("sliding", as_column(time, "sliding"), length, step)


def resolve_window(spec: WindowSpec, scope: Scope) -> Window:
    """The window in units of its time column."""
    node = as_expr(spec.time, scope.at)
    time = resolve(node, scope)
    name, dtype = show_expr(node), type_of(time)
    if not (dtype.kind is Kind.TS or dtype.is_int):
        is_near = dtype.kind in (Kind.DATE, Kind.DATE64, Kind.STR)
        hint = "cast it to a timestamp: .cast(pa.timestamp(\"us\"))" if is_near else None
        raise WrongType(f"the time of a window is a timestamp or an integer, but {name} is {dtype!r}", at=scope.at,
                        step=scope.step, has=shown(scope.schema), hint=hint)
    size = in_units(spec.size, dtype, "size of the window", name, scope.at)
    every = in_units(spec.every, dtype, "step of the window", name, scope.at)
    if not dtype.is_signed and (size != every or dtype.bits == 64):
        why = "sliding windows can start before zero" if size != every else "windows are computed in signed 64 bits"
        raise WrongType(f"{why}, but {name} is {dtype!r}", at=scope.at,
                        step=scope.step, hint="cast it to a signed integer: .cast(pa.int64())")
    return Window(time, size, every)
