"""The reduce side of a stream: the shuffled rows of a range of key groups meet the state of these groups.

A task reads the runs of its range, adds one with the batch's new rows (merged with runs that are not much larger), and
emits results. It changes no existing file: what it wrote is valid once the driver's manifest names it, so a task may be
repeated, or run twice at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalein.arrow_rows import scattered
from scalein.compiler import compile_flow
from scalein.errors import ComputeError
from scalein.exec.aggregate_operator import aggregate_node
from scalein.exec.changelog import OP, Changelog
from scalein.exec.combine import Combiner
from scalein.exec.error_location import located
from scalein.exec.event_time import as_integers
from scalein.exec.operator import Context, filtered
from scalein.ir.partials import TwoPhase, two_phase
from scalein.options import Options
from scalein.spark.key_groups import KEY_GROUPS
from scalein.spark.shuffle import key_hashes
from scalein.spark.streaming.event_time import Clock
from scalein.spark.streaming.merge_runs import Match, key_numbers, look_up, merge_blocks, take_rows
from scalein.spark.streaming.runs import (
    MIGRATION_STEPS,
    Run,
    choose_to_merge,
    hash_with_slices,
    hashes_of,
    hottest_range,
    read_run,
    schema_with_hash,
    sort_by_hash,
    write_run,
)
from scalein.spark.streaming.stream_plan import SLICE, StreamPlan
from scalein.storage.object_store import Location

Rows = Iterator[pa.RecordBatch]
Blocks = list[pa.RecordBatch]


@dataclass(frozen=True)
class ReduceInput:
    """The input of a reduce task besides rows: its key groups, their runs, the clock before and after the batch."""

    groups: tuple[int, int]
    runs: list[Run]
    before: Clock
    after: Clock
    migration: str = "lazy"


class Reducer:
    """The reduce side of a flow; programs are compiled at their first use."""

    def __init__(self, plan: StreamPlan, options: Options) -> None:
        self._plan, self._map_reduce, self._options = plan, plan.map_reduce, options

    def run(self, given: ReduceInput, shuffled: list[pa.RecordBatch], location: Location,
            write: Callable[[pa.RecordBatch], None]) -> list[Run]:
        """The runs of the key groups after a batch, of which `shuffled` are the rows; results go to `write`."""
        new = self._sort(shuffled)
        # Changes of windows that this batch closes are emitted as well.
        first_open = self._first_open_slice(given.after if self._plan.mode == "closing" else given.before)
        if self._plan.mode == "closing":
            for batch in self._close_windows(given, new, location):
                write(self._plan.changelog_rows(batch))
        runs = [run for run in given.runs if not _is_expired(run, first_open)]
        runs, migrating = self._migrating(runs, given, new, location)
        opened = [read_run(location, run, self._plan.state_schema) for run in runs]
        sizes = [sum(block.num_rows for block in blocks) for blocks in opened]
        chosen = choose_to_merge(sizes, new.num_rows) | migrating
        chosen |= {k for k, run in enumerate(runs) if _is_half_expired(run, first_open)}
        if not new.num_rows and not chosen:
            return runs
        parts = [[self._open_rows(block, first_open) for block in part]
                 for part in ([new], *(opened[k] for k in sorted(chosen)))]
        touched: list[tuple[pa.RecordBatch, np.ndarray]] = []  # new state of the batch's keys, and whether they existed

        def blocks() -> Iterator[pa.RecordBatch]:
            for each in merge_blocks(parts, self._plan.group_columns, self._combiner):
                if self._combiner is not None and self._plan.mode in ("running", "distinct"):
                    touched.append((take_rows(each.block.select(self._plan.state_schema.names), each.at), each.existed))
                yield each.block

        run = write_run(location, blocks(), given.groups, self._plan.slice_column)
        if new.num_rows and self._plan.mode in ("running", "distinct"):
            for batch in self._changes_of_batch(parts[0][0], opened, chosen, touched):
                if batch.num_rows:
                    write(batch)
        return [*(each for k, each in enumerate(runs) if k not in chosen), *([] if run is None else [run])]

    def _migrating(self, runs: list[Run], given: ReduceInput, new: pa.RecordBatch,
                   location: Location) -> tuple[list[Run], set[int]]:
        """The runs, and which of them are rewritten because other tasks have rows in their files too.

        A run that migrates in steps is cut.
        """
        if given.migration == "lazy":
            return runs, set()
        width = -(-(given.groups[1] - given.groups[0]) // (1 if given.migration == "eager" else MIGRATION_STEPS))
        rows = np.bincount(hashes_of(new) >> np.uint64(56), minlength=KEY_GROUPS)
        found, migrating = list[Run](), set[int]()
        for run in runs:
            rest: list[Run] = []
            if sum(block.num_rows for block in read_run(location, run, self._plan.state_schema)) < run.rows:
                run, rest = hottest_range(run, width, rows)
                migrating.add(len(found))
            found += [run, *rest]
        return found, migrating

    # --- new rows

    def _sort(self, shuffled: list[pa.RecordBatch]) -> pa.RecordBatch:
        """The shuffled rows sorted by hash, as in runs, with each key once if rows combine."""
        shuffled = [batch for batch in shuffled if batch.num_rows]
        if not shuffled:
            return _empty(schema_with_hash(self._plan.state_schema))
        rows = shuffled[0] if len(shuffled) == 1 else pa.concat_batches(shuffled)
        keys = self._map_reduce.keys
        found = key_hashes(rows, keys, self._options) if keys else np.zeros(rows.num_rows, np.uint64)
        if self._plan.slice_column is not None:
            if self._plan.slice_column == SLICE:
                columns = [*rows.columns, self._slices_of(rows)]
                rows = pa.RecordBatch.from_arrays(columns, schema=self._plan.state_schema)
            found = hash_with_slices(found, np.asarray(as_integers(rows.column(self._plan.slice_column))))
        (merged,) = merge_blocks([[sort_by_hash(rows, found)]], self._plan.group_columns, self._combiner,
                                 max_rows=len(found))
        return merged.block

    def _slices_of(self, rows: pa.RecordBatch) -> pa.Array:
        size = self._map_reduce.slice_size
        return pa.array(np.asarray(as_integers(rows.column(self._plan.time_column))) // size * size)

    # --- time

    def _first_open_slice(self, clock: Clock) -> int | None:
        """The start of the first slice that is still needed."""
        watermark, lateness = clock.watermark, self._plan.lateness
        return None if watermark is None or lateness is None else lateness.least_open(watermark)

    def _open_rows(self, block: pa.RecordBatch, first_open: int | None) -> pa.RecordBatch:
        if first_open is None or self._plan.slice_column is None:
            return block
        return filtered(block, pc.greater_equal(as_integers(block.column(self._plan.slice_column)), first_open))

    def _close_windows(self, given: ReduceInput, new: pa.RecordBatch, location: Location) -> Rows:
        """The results of the windows that the batch closes."""
        window, lateness, slices = self._plan.window, self._plan.lateness, self._plan.slice_column
        before, after = given.before.watermark, given.after.watermark
        assert window is not None and lateness is not None and slices is not None  # noqa: PT018
        if after is None or (before is not None and lateness.last_end(after) <= lateness.last_end(before)):
            return
        end, first = lateness.last_end(after), None if before is None else lateness.least_open(before)
        candidates = [new, *(block for run in given.runs if run.oldest is not None and run.oldest < end
                             for block in read_run(location, run, self._plan.state_schema))]
        closing = []
        for block in candidates:
            starts = as_integers(block.column(slices))
            is_closing = pc.less(starts, end)
            if first is not None:  # a run may still have slices that closed in earlier batches
                is_closing = pc.and_(is_closing, pc.greater_equal(starts, first))
            if (rows := filtered(block, is_closing).select(self._map_reduce.shuffle_schema.names)).num_rows:
                closing.append(rows)
        if not closing:
            return
        if window.is_tumbling:
            yield from self._map_reduce.final(closing, self._options)
            return
        for batch in self._map_reduce.aggregated(closing, self._options):
            ends = as_integers(batch.column("window_end"))
            closes_now = pc.less_equal(ends, end)
            if before is not None:
                closes_now = pc.and_(closes_now, pc.greater(ends, lateness.last_end(before)))
            yield from self._map_reduce.downstream([filtered(batch, closes_now)], self._options)

    # --- changes

    def _changes_of_batch(self, new: pa.RecordBatch, opened: list[Blocks], chosen: set[int],
                          touched: list[tuple[pa.RecordBatch, np.ndarray]]) -> Rows:
        """The changes of results by the rows of a batch."""
        combiner, keys = self._combiner, self._plan.group_columns
        if combiner is None:
            return iter(self._changes_of_rows(new, opened))
        existed = np.concatenate([had_state for _, had_state in touched])
        after = touched[0][0] if len(touched) == 1 else pa.concat_batches([rows for rows, _ in touched])
        for k, blocks in enumerate(opened):
            for each in look_up(new, blocks, keys) if k not in chosen else ():
                existed[each.numbers] = True
                values = combiner.combine_pairs(take_rows(after, each.numbers), each.rows)
                after = _with_values(after, each.numbers, dict(zip(combiner.names, values, strict=True)))
        if self._plan.mode == "distinct":
            unseen = filtered(after, pa.array(~existed)).select(self._map_reduce.shuffle_schema.names)
            return map(self._plan.changelog_rows, self._map_reduce.final([unseen], self._options))
        if self._changes.is_one_to_one and (groups := self._finish(after)) is not None:
            return self._changelog(groups, existed)
        before = after
        if not self._changes.is_one_to_one:
            before = self._state_before(new, [*(each for blocks in opened for each in look_up(new, blocks, keys))])
        return iter(self._changes.between(before, after, existed))

    def _finish(self, groups: pa.RecordBatch) -> pa.RecordBatch | None:
        assert self._combiner is not None
        assert self._two_phase is not None
        try:
            return self._combiner.finish(groups)
        except ComputeError as error:
            raise located(error, self._plan.fragment.op, self._two_phase.final) from None

    def _changelog(self, groups: pa.RecordBatch, existed: np.ndarray) -> Rows:
        """The changelog of groups, if the ops downstream of the aggregation give one row for each, in order."""
        start = 0
        for batch in self._map_reduce.downstream([groups], self._options):
            op = pc.if_else(pa.array(existed[start : start + batch.num_rows]), "update", "insert")
            yield batch.append_column(pa.field(OP, pa.string(), False), op)
            start += batch.num_rows

    def _state_before(self, new: pa.RecordBatch, found: list[Match]) -> pa.RecordBatch:
        """The groups of rows before the batch; groups that did not exist have arbitrary values."""
        assert self._combiner is not None
        numbers = np.concatenate([np.zeros(0, np.int64), *(each.numbers for each in found)])
        missing = np.setdiff1d(np.arange(new.num_rows), numbers)
        rows = pa.concat_batches([take_rows(new, missing), *(each.rows for each in found)])
        values = self._combiner.combine_numbered(rows, np.concatenate([missing, numbers]))
        columns = [values.column(name) if name in values.schema.names else column
                   for name, column in zip(new.schema.names, new.columns, strict=True)]
        return pa.RecordBatch.from_arrays(columns, schema=new.schema)

    def _changes_of_rows(self, new: pa.RecordBatch, opened: list[Blocks]) -> list[pa.RecordBatch]:
        """The same for buffered rows: the results of their groups are computed again."""
        keys, columns = self._plan.group_columns, self._map_reduce.shuffle_schema.names
        numbers = key_numbers(new, keys)
        count = int(numbers.max()) + 1
        first = np.empty(count, np.int64)
        first[numbers[::-1]] = np.arange(len(numbers))[::-1]
        groups = take_rows(new, first)
        found = [each for blocks in opened for each in look_up(groups, blocks, keys)]
        before = pa.concat_batches([new.slice(0, 0), *(each.rows for each in found)]).select(columns)
        before_of = np.concatenate([np.zeros(0, np.int64), *(each.numbers for each in found)])
        after, after_of = pa.concat_batches([before, new.select(columns)]), np.concatenate([before_of, numbers])
        return self._changes.of_groups(before, before_of, after, after_of, count)

    # --- programs

    @cached_property
    def _two_phase(self) -> TwoPhase | None:
        if self._map_reduce.kind != "partials":
            return None
        return two_phase(aggregate_node(compile_flow(self._plan.fragment.op)))

    @cached_property
    def _combiner(self) -> Combiner | None:
        return None if self._two_phase is None else Combiner(self._two_phase, self._options)

    @cached_property
    def _changes(self) -> Changelog:
        two = self._two_phase
        final = aggregate_node(compile_flow(self._map_reduce.state_over_shuffled)) if two is None else two.final
        context = Context(self._options, Path(), lambda rows: None, False, lambda rows: None, None)
        return Changelog(self._plan.fragment, final, context)


def _is_expired(run: Run, first_open: int | None) -> bool:
    return first_open is not None and run.newest is not None and run.newest < first_open


def _is_half_expired(run: Run, first_open: int | None) -> bool:
    """Whether closed slices cover half of a run, so that rewriting it without them pays off."""
    if first_open is None or run.oldest is None or run.newest is None:
        return False
    return first_open > run.oldest + (run.newest - run.oldest) // 2


def _with_values(rows: pa.RecordBatch, positions: np.ndarray, values: dict[str, pa.Array]) -> pa.RecordBatch:
    columns = [scattered(column, positions, values[name]) if name in values else column
               for name, column in zip(rows.schema.names, rows.columns, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=rows.schema)


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
