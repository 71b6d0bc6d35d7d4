"""Event time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from scalein.errors import NOWHERE, SourceLoc
from scalein.ir.event_time import EventTime, Promise
from scalein.ir.ops.base import Op, SameColumns
from scalein.ir.physical import Node
from scalein.ir.printer import show_span

if TYPE_CHECKING:
    from scalein.ir.passes.physicalize import Planner


@dataclass(frozen=True, eq=False, repr=False)
class Watermark(SameColumns):
    """Event time of a job: watermark = max(column) - delay. No filter passes it: its rows move it."""

    input: Op
    column: str
    delay: int
    at: SourceLoc = field(default=NOWHERE, compare=False)

    is_row_by_row = True
    is_one_to_one = True

    def _detail(self) -> str:
        column = self.input.schema.get(self.column)
        return f"{self.column} - {show_span(self.delay, None if column is None else column.dtype)}"

    def wrong(self) -> Iterator[str]:
        if self.input.schema.get(self.column) is None:
            yield f"no column {self.column!r} in its input"

    def reads(self, needed: set[str]) -> tuple[set[str], ...]:
        return (needed | {self.column},)

    def _time_of(self, below: Sequence[EventTime]) -> EventTime:
        """Rows that come at other times than the source's keep the watermark that they have."""
        (rows,) = below
        return replace(rows, column=self.column) if rows.is_derived else EventTime(
            self.column, {self.column: Promise(0, self.column)})

    def physical(self, p: Planner) -> Node:
        """A bounded run sees everything, and ignores it."""
        return p.node(self.input)
