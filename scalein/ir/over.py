"""Values of a row that other rows of its partition decide: `x.sum().over("k", order_by="t", rows=10)`.

A call is an aggregate over the frame of each row, or a function of a row's place in the order (`WINDOW_FUNCTIONS`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from scalein.dtypes import BOOL, I64, DType
from scalein.ir.aggregates import AGGREGATES, Args, typed
from scalein.ir.exprs import Agg, Expr, type_of
from scalein.ir.printer import show_span
from scalein.ir.unify import Refused


@dataclass(frozen=True, slots=True)
class Frame:
    """The rows that the value of a row is computed from: of its partition, up to the row itself in the order.

    At most `rows` of them, or those whose time is at most `within` earlier; all, without either. `with_peers` adds rows
    that are equal to it in the order, `is_whole` all rows after it.
    """

    rows: int | None = None
    within: int | None = None
    with_peers: bool = False
    is_whole: bool = False

    def shown(self, time: DType | None) -> str:
        """Its arguments in a call of `over`."""
        if self.rows is not None:
            return f", rows={self.rows}"
        return "" if self.within is None else f", within={show_span(self.within, time)!r}"

    def wrong(self) -> Iterator[str]:
        if self.rows is not None and self.rows < 1:
            yield f"a frame of {self.rows} rows"
        if self.within is not None and self.within < 0:
            yield f"a frame of {self.within}"


@dataclass(frozen=True, slots=True)
class OverCall:
    """A column that is computed over frames; `agg` is an aggregate, or a call of a window function."""

    name: str
    agg: Agg
    frame: Frame

    @property
    def is_running(self) -> bool:
        """Whether it is of all rows up to this one."""
        frame = self.frame
        is_place = self.agg.fn in ("row_number", "rank", "dense_rank")
        is_all = frame.rows is None and frame.within is None and not frame.is_whole
        return is_place or (is_all and not is_window_function(self.agg))


class WindowFunction:
    """A function of where a row stands in the order of its partition."""

    name: ClassVar[str]
    arity: ClassVar[int] = 0
    is_method: ClassVar[bool] = False
    sql: ClassVar[tuple[str, ...]] = ()
    duckdb: ClassVar[str] = ""

    def shown(self, agg: Agg) -> str:
        return self.name

    def typed(self, agg: Agg, args: Args) -> Agg:
        """The call over typed arguments."""
        return Agg(self.name, args, I64, False, agg.params, agg.at)


class RowNumber(WindowFunction):
    name, sql, duckdb = "row_number", ("ROW_NUMBER",), "row_number()"


class Rank(WindowFunction):
    name, sql, duckdb = "rank", ("RANK",), "rank()"


class DenseRank(WindowFunction):
    name, sql, duckdb = "dense_rank", ("DENSE_RANK",), "dense_rank()"


class Lag(WindowFunction):
    """The value of the row that is some rows before; null where there is no such row."""

    name, arity, is_method, sql, duckdb = "lag", 1, True, ("LAG",), "lag({0}, {params[0]})"

    def typed(self, agg: Agg, args: Args) -> Agg:
        return Agg(self.name, args, type_of(args[0]), True, agg.params, agg.at)


class Lead(Lag):
    name, sql, duckdb = "lead", ("LEAD",), "lead({0}, {params[0]})"


class Spaced(WindowFunction):
    """Whether a row is the first of its partition, or so much later than the last one before it that is: the rows that
    `distinct(within=)` keeps.
    """

    name = "spaced"

    def typed(self, agg: Agg, args: Args) -> Agg:
        return Agg(self.name, args, BOOL, False, agg.params, agg.at)


class AfterQuiet(Spaced):
    """Whether a row is the first of its partition, or so much later than the row before it: the rows that
    `distinct(ttl=)` keeps.
    """

    name = "after_quiet"


SPACING = (Spaced.name, AfterQuiet.name)  # they compare times of event time
WINDOW_FUNCTIONS: dict[str, WindowFunction] = {function.name: function for function in (
    RowNumber(), Rank(), DenseRank(), Lag(), Lead(), Spaced(), AfterQuiet())}


def typed_call(agg: Agg, args: Args, where: Expr | None) -> Agg:
    """An aggregate or window function over typed arguments; raises `Refused`."""
    function = WINDOW_FUNCTIONS.get(agg.fn)
    if function is None:
        return typed(agg, args, where, True)
    if where is not None:
        raise Refused(f"{agg.fn} takes no filter", "filter the rows before: flow.filter(...)")
    return function.typed(agg, args)


def is_window_function(agg: Agg) -> bool:
    return agg.fn not in AGGREGATES

