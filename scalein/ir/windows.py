"""Windows of event time: which of them hold a time, when they close, and the slices that they share.

Pure arithmetic on numbers in units of the time column. A window's size and step are read here alone: plans and kernels
know slices (`Table.window_slices`, `Table.window_step`), drivers the ends of windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd

import numpy as np

from scalein.dtypes import I64
from scalein.ir.exprs import Expr, type_of
from scalein.ir.functions.arithmetic import floored, plus
from scalein.ir.printer import show_expr, show_span
from scalein.ir.unify import cast_to


@dataclass(frozen=True, slots=True)
class Window:
    """Half-open windows [k * every, k * every + size), aligned to the epoch. Tumbling windows have `every == size`.

    `size` need not be a multiple of `every`: the slices that windows share have the length gcd(size, every).
    """

    time: Expr
    size: int
    every: int

    @property
    def is_tumbling(self) -> bool:
        """Whether every time is in exactly one window."""
        return self.size == self.every

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
        return self.size + self.every

    def in_slices(self, slice_size: int) -> tuple[int, int]:
        """The number of slices in a window, and from the start of a window to that of the next."""
        return self.size // slice_size, self.every // slice_size

    # --- when windows close: at the watermark that reaches their end

    def least_open(self, watermark: int) -> int:
        """The least time in a window that ends after the watermark."""
        return ((watermark - self.size) // self.every + 1) * self.every

    def last_closed_end(self, watermark: int) -> int:
        """The end of the last window that ends at the watermark or before."""
        return self.least_open(watermark) - self.every + self.size

    def first_open_end(self, watermark: int) -> int:
        """The end of the first window that ends after the watermark."""
        return self.least_open(watermark) + self.size

    # --- the windows of a time

    def end_of(self, start: int) -> int:
        """The end of the window that begins at a time."""
        return start + self.size

    def first_end(self, time: int) -> int:
        """The end of the first window that holds a time."""
        return self.first_open_end(time)

    def last_ends(self, times: np.ndarray) -> np.ndarray:
        """For each time, the end of the last window that holds it."""
        ends: np.ndarray = times // self.every * self.every + self.size
        return ends

    def starts_of(self, times: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """For the newest window that may hold each time, the one before it, and so on: its start, and whether it does.
        """
        newest = times // self.every * self.every
        for back in range(self.windows_per_row):
            starts = newest - back * self.every
            yield starts, starts + self.size > times

    def limits(self) -> tuple[Expr, Expr]:
        """The begin of the first and the end of the last window of a row, in the type of the time; where that type
        cannot hold them, an error.
        """
        own, time = type_of(self.time), cast_to(self.time, I64)
        begin = plus(floored(plus(time, -self.size), self.every), self.every)
        end = plus(floored(time, self.every), self.size)
        return (cast_to(begin, own), cast_to(end, own)) if own.is_int else (begin, end)

    # --- other forms

    def sliced(self, slice_size: int) -> Window:
        """Slices of these windows, as windows that do not overlap."""
        return replace(self, size=slice_size, every=slice_size)

    def apart(self) -> Window:
        """The same windows for rows of which each is in one of them only, the one that begins at its time."""
        return replace(self, every=self.size)

    def to_json(self) -> list[int]:
        return [self.size, self.every]

    def wrong(self, slice_size: int | None = None) -> Iterator[str]:
        """What is wrong with the numbers, for `verify`."""
        if self.size <= 0 or self.every <= 0:
            yield f"a window of {self.size} every {self.every}"
        elif slice_size is not None and (slice_size <= 0 or self.size % slice_size or self.every % slice_size):
            yield f"a window of {self.size} every {self.every} in slices of {slice_size}"

    def __str__(self) -> str:
        """`tumbling(t, 10s)` or `sliding(t, 10s, every=2s)`."""
        time, size = show_expr(self.time), show_span(self.size, self.time.dtype)
        if self.is_tumbling:
            return f"tumbling({time}, {size})"
        return f"sliding({time}, {size}, every={show_span(self.every, self.time.dtype)})"
