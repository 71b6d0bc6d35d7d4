"""Lateness: which rows are late, and which windows are closed.

A window [start, start + size) is closed once the watermark has reached its end; a row is late when all of its windows
are closed. All in units of the time column.

Late rows are dropped, written to a sink or an error: `Driver._late`. The watermark itself: `exec/event_time.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from scalein.arrow_rows import as_integers, filtered
from scalein.compiler import compile_flow
from scalein.exec.bounded import Program
from scalein.exec.event_time import extent
from scalein.exec.fragments import Fragment
from scalein.exec.operator import Morsel
from scalein.ir import ops
from scalein.ir.exprs import Col, Named, type_of
from scalein.ir.internal_names import internal
from scalein.ir.physical import identity
from scalein.ir.rewrite import stream_path
from scalein.ir.windows import Window
from scalein.options import Options

_EARLIEST = -(1 << 63)


@dataclass(frozen=True, slots=True)
class SplitRows:
    """The rows of an aggregation's input: on time, late, and the number of those without a time."""

    good: pa.RecordBatch
    late: pa.RecordBatch
    timeless: int


@dataclass(frozen=True, slots=True)
class TimedRows:
    """Rows and their times."""

    rows: pa.RecordBatch
    times: pa.Array


class Lateness:
    """Separates late rows. Batches without late rows, which are most, are passed through unchanged."""

    def __init__(self, fragment: Fragment, window: Window, kept: Sequence[str]) -> None:
        self._window = window
        self._kept = list(kept)  # columns of the rows that are passed on
        time = window.time
        is_own = isinstance(time, Col) and _passes_through(fragment.before, time.name, fragment.input)
        self.column = time.name if isinstance(time, Col) and is_own else None  # a column of the fragment's input
        self._name = internal("time")
        items = (*(item for item in identity(fragment.before.schema) if item.name in kept), Named(self._name, time))
        name = f"rows with {', '.join(kept)} and times"
        self.rows = Program(fragment.program(name, lambda: ops.Project(fragment.before, items)))
        self._times: dict[tuple[str, ...], Program] = {}  # by the columns of the rows
        self.dtype = type_of(time)

    def least_open(self, watermark: int) -> int:
        """The least time that is in a window which is not closed."""
        return max(self._window.least_open(watermark), _EARLIEST)

    def last_end(self, watermark: int) -> int:
        """The end of the last window that is closed."""
        return max(self._window.last_closed_end(watermark), _EARLIEST)

    def next_end(self, watermark: int) -> int:
        """The end of the first window that is not closed."""
        return self._window.first_open_end(watermark)

    def first_open_anchor(self, watermark: int) -> int:
        """The anchor of that window."""
        return max(self._window.first_open_anchor(watermark), _EARLIEST)

    def split(self, morsel: Morsel) -> tuple[Morsel | None, pa.RecordBatch | None]:
        """Rows of the fragment's input that surely have a time and are not late, and those that must be checked.

        Of the first it is known how far their times reach.
        """
        batch, watermark = morsel.batch, morsel.watermark
        if self.column is None:
            return None, batch
        times = batch.column(self.column)
        within = (morsel.least, morsel.greatest) if morsel.column == self.column else extent(times)
        if within is None:
            return None, batch
        least_open = within[0] if watermark is None else self.least_open(watermark)
        if not times.null_count and within[0] >= least_open:
            return Morsel(batch, watermark, self.column, *within), None
        is_good = pc.fill_null(pc.greater_equal(as_integers(times), least_open), False)
        good, rest = filtered(batch, is_good), filtered(batch, pc.invert(is_good))
        least = max(within[0], least_open)
        return Morsel(good, watermark, self.column, least, within[1]) if good.num_rows else None, rest

    def timed(self, rows: pa.RecordBatch, options: Options) -> Iterable[TimedRows]:
        """Rows of the group's input with their times; they have one."""
        names = tuple(rows.schema.names)
        if names not in self._times:
            source = ops.Source("input", rows.schema, names)
            items = (*identity(source.schema), Named(self._name, self._window.time))
            self._times[names] = Program(compile_flow(ops.Project(source, items)))
        for found in self._times[names].run([rows], options):
            yield TimedRows(found.select(list(names)), as_integers(found.column(self._name)))

    def with_times(self, batch: pa.RecordBatch, options: Options) -> Iterable[tuple[pa.RecordBatch, pa.Array]]:
        """The input of the aggregation for a batch of the fragment's input, with the times of its rows or null."""
        for rows in self.rows.run([batch], options):
            yield rows.select(self._kept), as_integers(rows.column(self._name))

    def split_late(self, batch: pa.RecordBatch, watermark: int | None, options: Options) -> Iterable[SplitRows]:
        """The input of the aggregation for a batch of the fragment's input, with its late rows."""
        for rows in self.rows.run([batch], options):
            times = as_integers(rows.column(self._name))
            known = times.is_valid()
            if watermark is None:
                open_ = known
            else:
                open_ = pc.and_kleene(known, pc.greater_equal(times, self.least_open(watermark)))
            rest = pc.and_not(known, pc.fill_null(open_, False))
            rows = rows.select(self._kept)
            yield SplitRows(filtered(rows, pc.fill_null(open_, False)), filtered(rows, rest), times.null_count)


def _passes_through(op: ops.Op, name: str, source: ops.Op) -> bool:
    """Whether a column is the input's own, so that its least value can be looked up there."""
    return all(each.passes_through(name) for each in stream_path(op, source))
