"""Expressions over one row, and which of them fail there.

What is not asked for cannot fail: the branch of a `when` that was not taken, the right side of an `and` whose left side
is false or of an `or` whose left side is true, what would fill a null where there is none. Null in, null out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import pyarrow as pa

from scalein.errors import ComputeError
from scalein.ir.exprs import Call, Col, Expr, Lit, columns, type_of
from scalein.ir.printer import show_expr
from tests.oracle.functions import FUNCTIONS, NULL_TAKING, NoValue
from tests.oracle.values import Row, rows_of, to_arrow

Meaning = Callable[[Row], Any]


class Failed(Exception):
    """A call that has no value in this row."""

    def __init__(self, call: Call, reason: NoValue) -> None:
        super().__init__(str(reason))
        self.call, self.reason = call, reason

    def as_error(self) -> ComputeError:
        """What the user sees."""
        cause = self.reason.__cause__
        return ComputeError(f"{self.reason} in `{show_expr(self.call)}`", at=self.call.at, type=type_of(self.call),
                            found=cause)


@dataclass
class Failures:
    """All that fails in a run. An engine that computes by blocks, or with several threads, may report any of it."""

    errors: list[ComputeError] = field(default_factory=list)

    def values(self, meaning: Meaning, rows: Iterable[Row]) -> Iterable[tuple[Row, Any]]:
        """Each row with its value; rows that fail are noted and left out."""
        for row in rows:
            try:
                yield row, meaning(row)
            except Failed as failed:
                self.errors.append(failed.as_error())

    def raise_any(self) -> None:
        if self.errors:
            raise self.errors[0]


def evaluate(expr: Expr, batch: pa.RecordBatch | pa.Table) -> pa.Array:
    """The value of a typed expression in every row, as an array of exactly its type."""
    table = pa.Table.from_batches([batch]) if isinstance(batch, pa.RecordBatch) else batch
    rows = rows_of(table.to_batches(), sorted(columns(expr)))
    failures = Failures()
    found = [value for _, value in failures.values(meaning(expr), rows)]
    failures.raise_any()
    return to_arrow(found, type_of(expr))


def meaning(expr: Expr) -> Meaning:
    """The expression as a function of a row."""
    match expr:
        case Col():
            return itemgetter(expr.name)
        case Lit():
            return lambda row: expr.value
        case Call(fn="and" | "or"):
            return _connect(expr.fn == "or", [meaning(arg) for arg in expr.args])
        case Call(fn="if_else"):
            condition, taken, other = map(meaning, expr.args)
            return lambda row: taken(row) if condition(row) is True else other(row)
        case Call(fn="fill_null"):
            value, default = map(meaning, expr.args)
            return lambda row: default(row) if (found := value(row)) is None else found
        case Call(fn="try"):
            return _try(expr.args[0])
    return _call(expr, [meaning(arg) for arg in expr.args])


def _call(call: Call, args: Sequence[Meaning]) -> Meaning:
    function, takes_null = FUNCTIONS[call.fn], call.fn in NULL_TAKING

    def apply(row: Row) -> Any:
        values = [arg(row) for arg in args]
        if not takes_null and None in values:
            return None
        try:
            return function(call, *values)
        except NoValue as reason:
            raise Failed(call, reason) from None

    return apply


def _try(tried: Expr) -> Meaning:
    """A call's value, null where that call itself has none; its arguments fail as ever."""
    assert isinstance(tried, Call)
    value = meaning(tried)

    def attempt(row: Row) -> Any:
        try:
            return value(row)
        except Failed as failed:
            if failed.call is tried:
                return None
            raise

    return attempt


def _connect(decides: bool, args: Sequence[Meaning]) -> Meaning:
    """Kleene's and, or: one side decides alone (false for and, true for or), else null wins."""

    def connect(row: Row) -> bool | None:
        unknown = False
        for arg in args:
            found = arg(row)
            if found is decides:
                return decides
            unknown |= found is None
        return None if unknown else not decides

    return connect
