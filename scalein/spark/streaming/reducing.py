"""The reduce side: what crossed for a range of key groups meets the state of these groups.

A task gets the runs of its range, adds one with what the batch brought (merged with those that are not much larger),
and gives the results. It changes nothing that exists: what it wrote counts when the driver's manifest names it, so it
may be run again, or twice at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalein.compiler import compile_flow
from scalein.exec.event_time import as_integers
from scalein.ir.partials import TwoPhase, two_phase
from scalein.jobs.changelog import OP, Changelog
from scalein.jobs.operators import Context, filtered
from scalein.jobs.partials import group_of
from scalein.options import Options
from scalein.spark.shuffle import KEY_GROUPS, hashes
from scalein.spark.streaming.clocks import Clock
from scalein.spark.streaming.combining import Combining, placed_in
from scalein.spark.streaming.merging import Found, looked_up, merged, numbered_keys, rows_at
from scalein.spark.streaming.runs import (
    PIECES,
    Run,
    hashes_of,
    hottest,
    in_order,
    pieces_of,
    to_merge,
    with_hash,
    with_slices,
    write_run,
)
from scalein.spark.streaming.work import SLICE, Work
from scalein.storage.object_store import Location

_NUMBER = "#number"

Rows = Iterator[pa.RecordBatch]
Pieces = list[pa.RecordBatch]


@dataclass(frozen=True)
class Share:
    """What a task has to do: its key groups, their runs, time before and behind the batch, and how state moves."""

    groups: tuple[int, int]
    runs: list[Run]
    before: Clock
    now: Clock
    migration: str = "lazy"


class Reducer:
    """The reduce side of a flow; programs are compiled when they are first needed."""

    def __init__(self, work: Work, options: Options) -> None:
        self._work, self._phases, self._options = work, work.phases, options

    def run(self, share: Share, given: list[pa.RecordBatch], location: Location,
            write: Callable[[pa.RecordBatch], None]) -> list[Run]:
        """The runs of a share behind a batch, of which `given` has crossed; results go to `write`."""
        new = self._sorted(given)
        # Changes of windows that this very batch closes are told as well.
        first_open = self._first_open(share.now if self._work.mode == "closing" else share.before)
        if self._work.mode == "closing":
            for batch in self._closed(share, new, location):
                write(self._work.told(batch))
        runs = [run for run in share.runs if not _is_past(run, first_open)]
        runs, moved = self._moved(runs, share, new, location)
        opened = [pieces_of(location, run) for run in runs]
        sizes = [sum(piece.num_rows for piece in pieces) for pieces in opened]
        chosen = to_merge(sizes, new.num_rows) | {k for k, run in enumerate(runs) if _is_half_past(run, first_open)}
        chosen |= moved
        if not new.num_rows and not chosen:
            return runs
        parts = [[self._still_open(piece, first_open) for piece in part]
                 for part in ([new], *(opened[k] for k in sorted(chosen)))]
        touched: list[tuple[pa.RecordBatch, np.ndarray]] = []  # new rows as they are now, and whether they were there

        def pieces() -> Iterator[pa.RecordBatch]:
            for each in merged(parts, self._work.identity, self._combining):
                if self._combining is not None and self._work.mode in ("running", "distinct"):
                    touched.append((rows_at(each.piece.select(self._work.kept.names), each.at), each.others))
                yield each.piece

        run = write_run(location, pieces(), share.groups, self._work.slices)
        if new.num_rows and self._work.mode in ("running", "distinct"):
            for batch in self._changed(parts[0][0], opened, chosen, touched):
                if batch.num_rows:
                    write(batch)
        return [*(each for k, each in enumerate(runs) if k not in chosen), *([] if run is None else [run])]

    def _moved(self, runs: list[Run], share: Share, new: pa.RecordBatch,
               location: Location) -> tuple[list[Run], set[int]]:
        """Runs, and which of them are rewritten because their files have rows of other tasks too. One that moves piece
        by piece is cut.
        """
        if share.migration == "lazy":
            return runs, set()
        width = -(-(share.groups[1] - share.groups[0]) // (1 if share.migration == "eager" else PIECES))
        rows = np.bincount(hashes_of(new) >> np.uint64(56), minlength=KEY_GROUPS)
        found, moved = list[Run](), set[int]()
        for run in runs:
            rest: list[Run] = []
            if sum(piece.num_rows for piece in pieces_of(location, run)) < run.rows:
                run, rest = hottest(run, width, rows)
                moved.add(len(found))
            found += [run, *rest]
        return found, moved

    # --- what came

    def _sorted(self, given: list[pa.RecordBatch]) -> pa.RecordBatch:
        """What has crossed, each key once if rows combine, in the order of runs."""
        given = [batch for batch in given if batch.num_rows]
        if not given:
            return _empty(with_hash(self._work.kept))
        rows = given[0] if len(given) == 1 else pa.concat_batches(given)
        keys = self._phases.keys
        found = hashes(rows, keys, self._options) if keys else np.zeros(rows.num_rows, np.uint64)
        if self._work.slices is not None:
            if self._work.slices == SLICE:
                rows = pa.RecordBatch.from_arrays([*rows.columns, self._slices_of(rows)], schema=self._work.kept)
            found = with_slices(found, np.asarray(as_integers(rows.column(self._work.slices))))
        (found_rows,) = merged([[in_order(rows, found)]], self._work.identity, self._combining, most_rows=len(found))
        return found_rows.piece

    def _slices_of(self, rows: pa.RecordBatch) -> pa.Array:
        size = self._phases.slice_size
        return pa.array(np.asarray(as_integers(rows.column(self._work.time))) // size * size)

    # --- time

    def _first_open(self, clock: Clock) -> int | None:
        """The least slice that is still needed."""
        watermark, lateness = clock.watermark, self._work.lateness
        return None if watermark is None or lateness is None else lateness.least_open(watermark)

    def _still_open(self, piece: pa.RecordBatch, first_open: int | None) -> pa.RecordBatch:
        if first_open is None or self._work.slices is None:
            return piece
        return filtered(piece, pc.greater_equal(as_integers(piece.column(self._work.slices)), first_open))

    def _closed(self, share: Share, new: pa.RecordBatch, location: Location) -> Rows:
        """The results of windows that the batch has closed."""
        window, lateness, slices = self._work.window, self._work.lateness, self._work.slices
        before, now = share.before.watermark, share.now.watermark
        assert window is not None and lateness is not None and slices is not None  # noqa: PT018
        if now is None or (before is not None and lateness.last_end(now) <= lateness.last_end(before)):
            return
        end, first = lateness.last_end(now), None if before is None else lateness.least_open(before)
        waiting = [new, *(piece for run in share.runs if run.oldest is not None and run.oldest < end
                          for piece in pieces_of(location, run))]
        given = []
        for piece in waiting:
            starts = as_integers(piece.column(slices))
            is_wanted = pc.less(starts, end)
            if first is not None:  # what is closed since long may still be in a run
                is_wanted = pc.and_(is_wanted, pc.greater_equal(starts, first))
            if (rows := filtered(piece, is_wanted).select(self._phases.crossing.names)).num_rows:
                given.append(rows)
        if not given:
            return
        if window.is_tumbling:
            yield from self._phases.final(given, self._options)
            return
        for batch in self._phases.groups(given, self._options):
            ends = as_integers(batch.column("window_end"))
            is_due = pc.less_equal(ends, end)
            if before is not None:
                is_due = pc.and_(is_due, pc.greater(ends, lateness.last_end(before)))
            yield from self._phases.behind([filtered(batch, is_due)], self._options)

    # --- what changed

    def _changed(self, new: pa.RecordBatch, opened: list[Pieces], chosen: set[int],
                 touched: list[tuple[pa.RecordBatch, np.ndarray]]) -> Rows:
        """What rows of a batch did to the results of their groups."""
        combining, keys = self._combining, self._work.identity
        if combining is None:
            return iter(self._rows_changed(new, opened))
        existed = np.concatenate([is_there for _, is_there in touched])
        now = touched[0][0] if len(touched) == 1 else pa.concat_batches([rows for rows, _ in touched])
        for k, pieces in enumerate(opened):
            for each in looked_up(new, pieces, keys) if k not in chosen else ():
                existed[each.numbers] = True
                values = combining.pairs(rows_at(now, each.numbers), each.rows)
                now = _with_values(now, each.numbers, dict(zip(combining.names, values, strict=True)))
        if self._work.mode == "distinct":
            fresh = filtered(now, pa.array(~existed)).select(self._phases.crossing.names)
            return map(self._work.told, self._phases.final([fresh], self._options))
        if self._changes.is_one_to_one and (groups := combining.finished(now)) is not None:
            return self._told(groups, existed)
        before = now
        if not self._changes.is_one_to_one:
            before = self._before(new, [*(each for pieces in opened for each in looked_up(new, pieces, keys))])
        return iter(self._changes.between(before, now, existed))

    def _told(self, groups: pa.RecordBatch, existed: np.ndarray) -> Rows:
        """Results of groups row by row: what stands behind the aggregation gives a row for each, in the same order."""
        start = 0
        for batch in self._phases.behind([groups], self._options):
            op = pc.if_else(pa.array(existed[start : start + batch.num_rows]), "update", "insert")
            yield batch.append_column(pa.field(OP, pa.string(), False), op)
            start += batch.num_rows

    def _before(self, new: pa.RecordBatch, found: list[Found]) -> pa.RecordBatch:
        """The groups of rows as they were; what did not exist has any value."""
        assert self._combining is not None
        numbers = np.concatenate([np.zeros(0, np.int64), *(each.numbers for each in found)])
        missing = np.setdiff1d(np.arange(new.num_rows), numbers)
        rows = pa.concat_batches([rows_at(new, missing), *(each.rows for each in found)])
        values = self._combining.numbered(rows, np.concatenate([missing, numbers]))
        columns = [values.column(name) if name in values.schema.names else column
                   for name, column in zip(new.schema.names, new.columns, strict=True)]
        return pa.RecordBatch.from_arrays(columns, schema=new.schema)

    def _rows_changed(self, new: pa.RecordBatch, opened: list[Pieces]) -> list[pa.RecordBatch]:
        """The same for rows that wait: the results of their groups are computed again."""
        keys, crossing = self._work.identity, self._phases.crossing.names
        numbers = numbered_keys(new, keys)
        count = int(numbers.max()) + 1
        first = np.empty(count, np.int64)
        first[numbers[::-1]] = np.arange(len(numbers))[::-1]
        groups = rows_at(new, first)
        found = [each for pieces in opened for each in looked_up(groups, pieces, keys)]
        before = pa.concat_batches([new.slice(0, 0), *(each.rows for each in found)]).select(crossing)
        before_of = np.concatenate([np.zeros(0, np.int64), *(each.numbers for each in found)])
        now, now_of = pa.concat_batches([before, new.select(crossing)]), np.concatenate([before_of, numbers])
        return self._changes.of_groups(before, before_of, now, now_of, count)

    # --- programs

    @cached_property
    def _two(self) -> TwoPhase | None:
        if self._phases.kind != "partials":
            return None
        return two_phase(group_of(compile_flow(self._work.segment.op)))

    @cached_property
    def _combining(self) -> Combining | None:
        return None if self._two is None else Combining(self._two, self._options)

    @cached_property
    def _changes(self) -> Changelog:
        final = self._two.final if self._two is not None else group_of(compile_flow(self._phases._state_again))
        around = Context(self._options, Path(), lambda rows: None, False, lambda rows: None, None, 0)
        return Changelog(self._work.segment, final, around)


def _is_past(run: Run, first_open: int | None) -> bool:
    return first_open is not None and run.newest is not None and run.newest < first_open


def _is_half_past(run: Run, first_open: int | None) -> bool:
    """Whether it is time to drop what is closed of a run."""
    if first_open is None or run.oldest is None or run.newest is None:
        return False
    return first_open > run.oldest + (run.newest - run.oldest) // 2


def _with_values(rows: pa.RecordBatch, places: np.ndarray, values: dict[str, pa.Array]) -> pa.RecordBatch:
    columns = [placed_in(column, places, values[name]) if name in values else column
               for name, column in zip(rows.schema.names, rows.columns, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=rows.schema)


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
