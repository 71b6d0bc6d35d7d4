"""Windows of event time: which of them hold a time, when they close, and the slices that they share.

Pure arithmetic on numbers in units of the time column. A window's size, step and offset are read here alone: plans and
kernels know slices (`Table.window_slices`, `Table.window_step`), drivers the ends of windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import gcd

import numpy as np

from scalein.dtypes import BOOL, I64
from scalein.ir.exprs import Call, Expr, type_of
from scalein.ir.functions.arithmetic import floored, plus, plus_steps
from scalein.ir.printer import show_expr, show_span
from scalein.ir.unify import cast_to


@dataclass(frozen=True, slots=True)
class Window:
    """Half-open windows [k * every + offset, k * every + offset + size). Tumbling windows have `every == size`.

    `size` need not be a multiple of `every`: the slices that windows share have the length gcd(size, every). Slice k
    begins at k * slice size + offset. The windows of one key differ in their anchors: here, their starts.
    """

    time: Expr
    size: int
    every: int
    offset: int = 0  # at least 0, less than `stride`

    @property
    def stride(self) -> int:
        """From the start of a window to the next start of others."""
        return self.every

    @property
    def cumulates(self) -> bool:
        """Whether the windows of a row begin together, and end one slice after the other."""
        return False

    @property
    def is_session(self) -> bool:
        """Whether the rows decide where windows begin and end."""
        return False

    @property
    def is_tumbling(self) -> bool:
        """Whether every time is in exactly one window."""
        return self.size == self.every

    @property
    def exprs(self) -> tuple[Expr, ...]:
        """What is computed of each row."""
        return (self.time,)

    def over(self, new: Callable[[Expr], Expr]) -> Window:
        """The same over other expressions."""
        return replace(self, time=new(self.time))

    @property
    def windows_per_row(self) -> int:
        """The most windows that a time is in."""
        return -(-self.size // self.every)

    @property
    def slice_size(self) -> int:
        """The length of the longest slices that every window consists of."""
        return gcd(self.size, self.every)

    @property
    def margin(self) -> int:
        """No window of a time begins or ends farther from it than this."""
        return self.size + self.stride

    def in_slices(self, slice_size: int) -> tuple[int, int]:
        """The number of slices in the longest window, and from the start of a window to the next start."""
        return self.size // slice_size, self.stride // slice_size

    # --- when windows close: at the watermark that reaches their end

    def least_open(self, watermark: int) -> int:
        """The least time in a window that ends after the watermark."""
        return ((watermark - self.offset - self.size) // self.stride + 1) * self.stride + self.offset

    def last_closed_end(self, watermark: int) -> int:
        """The end of the last window that ends at the watermark or before."""
        return self.least_open(watermark) - self.every + self.size

    def first_open_end(self, watermark: int) -> int:
        """The end of the first window that ends after the watermark."""
        return self.least_open(watermark) + self.size

    def first_open_anchor(self, watermark: int) -> int:
        """The anchor of that window: windows with an earlier one are closed."""
        return self.least_open(watermark)

    # --- the windows of windows

    def of_starts(self, start: Expr) -> Window:
        """Windows each of which holds the start of one of these: what their rows are grouped by once more."""
        return Window(start, self.every, self.every, self.offset)

    def end_from(self, start: Expr) -> Expr:
        """The end of the window that begins there, in the type of the time."""
        return cast_to(plus(cast_to(start, I64), self.size), type_of(start))

    # --- the windows of a time

    @property
    def least_size(self) -> int:
        """No window is shorter."""
        return self.size

    def end_of(self, anchor: int) -> int:
        """The end of the window with an anchor."""
        return anchor + self.size

    def first_end(self, time: int) -> int:
        """The end of the first window that holds a time."""
        return self.first_open_end(time)

    def last_ends(self, times: np.ndarray) -> np.ndarray:
        """For each time, the end of the last window that holds it."""
        ends: np.ndarray = self._starts(times, self.stride) + self.size
        return ends

    def anchors_of(self, times: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """For the newest window that may hold each time, the one before it, and so on: its anchor, and whether it does.
        """
        newest = self._starts(times, self.every)
        for back in range(self.windows_per_row):
            starts = newest - back * self.every
            yield starts, starts + self.size > times

    def bounds_of(self, times: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """For the newest window that may hold each time, the one before it, and so on: where it starts, where it ends,
        and whether it does.
        """
        for anchors, holds in self.anchors_of(times):
            yield self._starts(times, self.stride) if self.cumulates else anchors, anchors + self.end_of(0), holds

    def limits(self) -> tuple[Expr, Expr]:
        """The begin of the first and the end of the last window of a row, in the type of the time; where that type
        cannot hold them, an error.
        """
        own, time = type_of(self.time), plus(cast_to(self.time, I64), -self.offset)
        begin = plus(floored(plus(time, -self.size), self.stride), self.stride + self.offset)
        end = plus(floored(time, self.stride), self.size + self.offset)
        return (cast_to(begin, own), cast_to(end, own)) if own.is_int else (begin, end)

    def nth_limits(self, time: Expr, nth: Expr) -> tuple[Expr, Expr, Expr]:
        """The begin and end of one of the windows of a time, a 64-bit integer, and whether it holds the time: of all
        `windows_per_row`, counted back from the newest.
        """
        own = plus(time, -self.offset) if self.offset else time
        newest = floored(own, self.every)
        begin = newest if self.is_tumbling else plus_steps(newest, nth, -self.every)
        begin = plus(begin, self.offset) if self.offset else begin
        end = plus(begin, self.size)
        return begin, end, _holds("lt", time, end)

    # --- slices

    def slice_starts(self, times: np.ndarray, slice_size: int) -> np.ndarray:
        """The start of the slice of each time."""
        return self._starts(times, slice_size)

    def _starts(self, times: np.ndarray, step: int) -> np.ndarray:
        starts: np.ndarray = times - (times % step - self.offset % step) % step
        return starts

    # --- other forms

    def sliced(self, slice_size: int) -> Window:
        """Slices of these windows, as windows that do not overlap."""
        return Window(self.time, slice_size, slice_size, self.offset)

    def apart(self) -> Window:
        """The same windows for rows of which each is in one of them only, the one whose anchor is its time."""
        return replace(self, every=self.size)

    def to_json(self) -> list[int | str]:
        """For `window_from_json`."""
        return [self.size, self.every, *([self.offset] if self.offset else [])]

    def wrong(self, slice_size: int | None = None) -> Iterator[str]:
        """What is wrong with the numbers, for `verify`."""
        if self.size <= 0 or self.every <= 0:
            yield f"a window of {self.size} every {self.every}"
        elif slice_size is not None and (slice_size <= 0 or self.size % slice_size or self.every % slice_size):
            yield f"a window of {self.size} every {self.every} in slices of {slice_size}"

    def __str__(self) -> str:
        """`tumbling(t, 10s)` or `sliding(t, 10s, every=2s)`."""
        every = () if self.is_tumbling else (f"every={self._span(self.every)}",)
        return self._shown("tumbling" if self.is_tumbling else "sliding", *every)

    def _shown(self, kind: str, *details: str) -> str:
        offset = (f"offset={self._span(self.offset)}",) if self.offset else ()
        return f"{kind}({', '.join((show_expr(self.time), self._span(self.size), *details, *offset))})"

    def _span(self, length: int) -> str:
        return show_span(length, self.time.dtype)


@dataclass(frozen=True, slots=True)
class Cumulate(Window):
    """Windows that grow: of [k * size, (k + 1) * size) the first `every`, the first 2 * `every`, ... up to all of it.

    A window's anchor is the start of its last slice.
    """

    is_apart: bool = False

    @property
    def stride(self) -> int:
        return self.size

    @property
    def cumulates(self) -> bool:
        return True

    @property
    def is_tumbling(self) -> bool:
        return self.is_apart

    @property
    def slice_size(self) -> int:
        return self.every

    def last_closed_end(self, watermark: int) -> int:
        return (watermark - self.offset) // self.every * self.every + self.offset

    def first_open_end(self, watermark: int) -> int:
        return self.last_closed_end(watermark) + self.every

    def first_open_anchor(self, watermark: int) -> int:
        return self.last_closed_end(watermark)

    @property
    def least_size(self) -> int:
        return self.every

    def end_of(self, anchor: int) -> int:
        return anchor + self.every

    def anchors_of(self, times: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        slices, starts = self._starts(times, self.every), self._starts(times, self.size)
        for ahead in range(self.windows_per_row):
            anchors = slices + ahead * self.every
            yield anchors, anchors < starts + self.size

    def nth_limits(self, time: Expr, nth: Expr) -> tuple[Expr, Expr, Expr]:
        """Counted from the shortest one."""
        own = plus(time, -self.offset)
        begin = plus(floored(own, self.size), self.offset)
        end = plus_steps(plus(floored(own, self.every), self.every + self.offset), nth, self.every)
        return begin, end, _holds("le", end, plus(begin, self.size))

    def apart(self) -> Window:
        return replace(self, is_apart=True)

    def to_json(self) -> list[int | str]:
        return ["cumulate", self.size, self.every, self.offset]

    def wrong(self, slice_size: int | None = None) -> Iterator[str]:
        if self.every <= 0 or self.size <= 0 or self.size % self.every or slice_size not in (None, self.every):
            yield f"a window of up to {self.size} in steps of {self.every} and slices of {slice_size}"

    def __str__(self) -> str:
        """`cumulate(t, 1d, step=1h)`."""
        return self._shown("cumulate", f"step={self._span(self.every)}")


@dataclass(frozen=True, slots=True)
class Session(Window):
    """[first, last + gap) of rows of a key that are at most a gap apart: `size` and `every` are the gap.

    It is final once the watermark is after last + gap: a row exactly a gap later still joins. Rows may be sessions
    themselves, or parts of some: then `end` is where theirs end. No slices are shared, and no anchor is known.
    Groups that are forgotten after some time without a row are such sessions: `is_ttl` is how they are shown.
    """

    end: Expr | None = None
    is_ttl: bool = False

    @property
    def gap(self) -> int:
        return self.size

    @property
    def is_session(self) -> bool:
        return True

    @property
    def exprs(self) -> tuple[Expr, ...]:
        return (self.time,) if self.end is None else (self.time, self.end)

    def over(self, new: Callable[[Expr], Expr]) -> Window:
        return replace(self, time=new(self.time), end=None if self.end is None else new(self.end))

    @property
    def margin(self) -> int:
        return self.gap

    def least_open(self, watermark: int) -> int:
        """The least time whose session is not final by itself; an earlier one may be in a longer session."""
        return watermark - self.gap

    def last_closed_end(self, watermark: int) -> int:
        return watermark - 1

    def first_open_end(self, watermark: int) -> int:
        return watermark

    def last_ends(self, times: np.ndarray) -> np.ndarray:
        """For each time, the end of the session that has no other."""
        ends: np.ndarray = times + self.gap
        return ends

    def limits(self) -> tuple[Expr, Expr]:
        own, time = type_of(self.time), cast_to(self.time, I64)
        end = plus(time, self.gap)
        return (self.time, cast_to(end, own)) if own.is_int else (time, end)

    def sliced(self, slice_size: int) -> Window:
        return self

    def apart(self) -> Window:
        return self

    def to_json(self) -> list[int | str]:
        return ["session", self.gap]

    def wrong(self, slice_size: int | None = None) -> Iterator[str]:
        if self.gap <= 0 or self.every != self.gap or self.offset:
            yield f"a session with a gap of {self.gap}"

    def __str__(self) -> str:
        """`session(t, gap=30s)`."""
        if self.is_ttl:
            return f"ttl={self._span(self.gap + 1)} of {show_expr(self.time)}"
        return f"session({show_expr(self.time)}, gap={self._span(self.gap)})"


def session(time: Expr, gap: int, end: Expr | None = None) -> Session:
    return Session(time, gap, gap, end=end)


def ttl_window(time: Expr, ttl: int) -> Session:
    """The life of a group that is forgotten after `ttl` without a row; one that comes exactly then is another's."""
    return Session(time, ttl - 1, ttl - 1, is_ttl=True)


def _holds(fn: str, left: Expr, right: Expr) -> Expr:
    return Call(fn, (left, right), dtype=BOOL, nullable=left.nullable or right.nullable)


def window_from_json(content: list[int | str], time: Expr) -> Window:
    """The window that `to_json` describes, over a time; ValueError if it describes none."""
    if content[:1] == ["session"] and len(content) == 2:
        found = session(time, int(content[1]))
        for what in found.wrong():
            raise ValueError(what)
        return found
    kind, numbers = (Cumulate, content[1:]) if content[:1] == ["cumulate"] else (Window, content)
    if len(numbers) not in (2, 3):
        raise ValueError(f"a window of {len(numbers)} numbers")
    window = kind(time, *map(int, numbers))
    for what in window.wrong():
        raise ValueError(what)
    return window
