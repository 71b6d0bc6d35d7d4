"""Event time: which column of some rows it is, and which of their columns a watermark makes a promise about.

A watermark is a number that an operator's input has: of the rows to come, `column >= watermark + lead` holds for each
column with a `Promise`. Each op says what its rows have, given what its inputs' have (`Op.event_time`): a renamed
column keeps its promise, one that is moved by a constant gets another lead, any other expression has none. Windows,
joins and orders in a job are over columns with a promise: over others a row may be dropped that no watermark was about.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from scalein.ir.exprs import Call, Col, Expr, Named
from scalein.ir.functions.registry import REGISTRY
from scalein.ir.printer import show_expr
from scalein.ir.windows import Window

WINDOW_START, WINDOW_END = "window_start", "window_end"


class Promise(NamedTuple):
    """Values to come are at least the watermark and `lead`. Columns `of` the same time differ by a constant."""

    lead: int
    of: str
    is_limit: bool = False  # where a window starts or ends

    def moved(self, by: int) -> Promise:
        return self._replace(lead=self.lead + by)


@dataclass(frozen=True, slots=True)
class EventTime:
    """The event time of some rows: its column, empty if they have none, and the columns that their watermark promises.

    `promised` is None where no watermark comes, so that no row is late whatever it has. `is_derived`: rows come at
    other times than those of the source did, so that a further `with_watermark` says nothing of when.
    """

    column: str = ""
    promised: Mapping[str, Promise] | None = field(default=None, hash=False)
    is_derived: bool = False

    def lead(self, expr: Expr) -> int | None:
        """How much later than the watermark the values to come of an expression are at least; None: not known."""
        found = self.promise(expr)
        return None if found is None else found.lead

    def promise(self, expr: Expr) -> Promise | None:
        """What is known of an expression over these rows."""
        if self.promised is None:
            return None
        if isinstance(expr, Col):
            return self.promised.get(expr.name)
        moved = REGISTRY[expr.fn].moved(expr) if isinstance(expr, Call) else None
        found = None if moved is None else self.promise(moved.of)
        if moved is None or found is None:
            return None
        return found.moved(moved.by) if moved.is_exact else Promise(found.lead + moved.by, show_expr(expr))

    def through(self, names: Iterable[str]) -> EventTime:
        """The same of rows that have these columns, under their names."""
        kept = dict.fromkeys(names)
        promised = None if self.promised is None else {n: p for n, p in self.promised.items() if n in kept}
        column = self.column if self.column in kept else self._other_name(promised or {})
        return replace(self, column=column, promised=promised)

    def _other_name(self, promised: Mapping[str, Promise]) -> str:
        """The name of another column with the values of event time; empty if there is none."""
        known = (self.promised or {}).get(self.column)
        return next((name for name, each in promised.items() if known is not None and each == known), "")

    def projected(self, items: Iterable[Named]) -> EventTime:
        """The same of rows whose columns are computed from these."""
        given = list(items)
        found = {item.name: self.promise(item.expr) for item in given}
        same = [item.name for item in given if isinstance(item.expr, Col) and item.expr.name == self.column]
        promised = {name: each for name, each in found.items() if each is not None}
        is_there = self.column in same or self.column in promised
        column = self.column if is_there else same[0] if same else self._other_name(promised)
        return replace(self, column=column, promised=None if self.promised is None else promised)

    def limit_among(self, exprs: Iterable[Expr]) -> Col | None:
        """The column with a limit of windows among some: rows with its values are complete once the watermark has
        passed these. Of several the one that is passed first.
        """
        found = [(each.lead, expr) for expr in exprs if isinstance(expr, Col)
                 and (each := self.promise(expr)) is not None and each.is_limit]
        return max(found, key=lambda pair: pair[0])[1] if found else None

    def in_order_of(self, time: str) -> EventTime:
        """The same of rows that leave once the watermark has passed this column: their watermark is about it."""
        if self.promised is None:
            return self
        if time not in self.promised:
            return replace(self, promised={}, is_derived=True)
        by = self.promised[time]
        return replace(self, is_derived=True, promised={name: each.moved(-by.lead) for name, each
                                                        in self.promised.items() if each.of == by.of})


NO_TIME = EventTime()
AT_THE_END = EventTime(is_derived=True)  # of rows that come when no watermark does any more


def of_windows(below: EventTime, time: Expr, names: Mapping[str, Expr], window: Window) -> EventTime:
    """The event time of the rows of windows, which come when these close: `names` are columns beside their limits.

    No window to come starts before the watermark, and none is shorter than the shortest.
    """
    if below.promised is None:
        return AT_THE_END
    known = below.promise(time)
    has_one_length = not window.is_session and not window.cumulates
    limits = {WINDOW_START: Promise(0, WINDOW_START, True),
              WINDOW_END: Promise(window.least_size, WINDOW_START if has_one_length else WINDOW_END, True)}
    inside: dict[str, Promise] = {}
    for name, expr in names.items():
        each = below.promise(expr)
        if each is not None and known is not None and each.of == known.of:
            inside[name] = Promise(each.lead - known.lead, name, each.is_limit)
    return EventTime("", {**inside, **limits}, True)


def of_union(below: Iterable[EventTime]) -> EventTime:
    """The event time of the rows of several inputs: what all of them have."""
    given = list(below)
    columns = {each.column for each in given}
    marked = [each.promised for each in given if each.promised is not None]
    column = columns.pop() if len(columns) == 1 else ""
    if not marked:
        return EventTime(column, None, any(each.is_derived for each in given))
    return EventTime(column, dict(_shared(marked)), True)


def _shared(marked: list[Mapping[str, Promise]]) -> Iterator[tuple[str, Promise]]:
    for name, first in marked[0].items():
        others = [each[name] for each in marked[1:] if name in each]
        if len(others) == len(marked) - 1:
            is_same = all(each == first for each in others)
            lead = min([first.lead, *(each.lead for each in others)])
            yield name, Promise(lead, first.of if is_same else name, first.is_limit and all(o.is_limit for o in others))
