"""Tables and buffers of a Spark task, in hash-sorted runs (`hash_runs.py`) on any file system that pyarrow knows.

A task restores the runs of its key groups, adds one with its new rows (merged with runs that are not much larger), and
gives the runs after that. It changes no existing file: what it wrote is valid once the driver's manifest names it, so a
task may be repeated, or run twice at a time. Nothing is read before it is needed.

One object serves the tasks of a process one after the other, as its operator does: `RunBackend.begin` names the task's
key groups and files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalein.arrow_rows import as_integers, filtered, from_numpy, scattered
from scalein.state.hash_runs import (
    HASH,
    Run,
    StateTraffic,
    argsort,
    choose_to_merge,
    hash_with_slices,
    hashes_of,
    hottest_ranges,
    migration_width,
    read_run,
    schema_with_hash,
    sort_by_hash,
    write_run,
)
from scalein.state.interfaces import Change, GroupMerger, RowChange, StateFuture
from scalein.state.key_groups import KEY_GROUPS
from scalein.state.merge_runs import Match, key_numbers, look_up, merge_blocks, rows_with_hashes, take_rows
from scalein.state.row_buffer import BufferSegment
from scalein.storage.checked_json import Json, as_int, as_list, as_map
from scalein.storage.object_store import Location

NUMBER, IS_GONE = "#number", "#gone"  # columns of records: later ones supersede earlier ones
SEEN = "#acc0"  # a column of counts, which the state of a distinct has besides its keys
RUNS, DROPPED = "runs", "dropped"  # in a version; rows before a time that were dropped may be in files still
Hasher = Callable[[pa.RecordBatch, Sequence[str]], np.ndarray]
Blocks = list[pa.RecordBatch]


@dataclass
class RunBackend:
    """Makes the state of a reduce task. `hasher` gives 64-bit hashes of the columns that it names."""

    hasher: Hasher
    location: Location | None = None
    groups: tuple[int, int] = (0, KEY_GROUPS)
    migration: str = "lazy"
    traffic: StateTraffic = field(default_factory=StateTraffic)  # of the current task

    def begin(self, location: Location, groups: tuple[int, int], migration: str) -> None:
        """Begin a task: its files, its key groups [first, last), and when it rewrites rows of files that it shares."""
        self.location, self.groups, self.migration = location, groups, migration
        self.traffic = StateTraffic()

    def table(self, keys: pa.Schema, values: pa.Schema, slices: str | None, merger: GroupMerger) -> RunTable:
        return RunTable(self, pa.schema([*keys, *values]), [name for name in keys.names if name != slices], slices,
                        merger)

    def key_set(self, keys: pa.Schema) -> RunTable:
        schema = keys.append(pa.field(SEEN, pa.int64(), False))
        return RunTable(self, schema, keys.names, None, _Counts())

    def rows_by_key(self, schema: pa.Schema, keys: Sequence[str]) -> RunTable:
        return RunTable(self, schema, keys, None, None)

    def records(self, keys: pa.Schema, values: pa.Schema, placed_by: Sequence[str] | None = None) -> RunRecords:
        return RunRecords(self, stored_records(keys, values), keys.names, NUMBER,
                          NewestRecord([*values.names, NUMBER, IS_GONE]), given=pa.schema([*keys, *values]),
                          placed_by=placed_by)

    def buffer(self, schema: pa.Schema, keys: Sequence[str], slices: str, merger: GroupMerger | None,
               name: str = "rows") -> RunBuffer:
        return RunBuffer(self, schema, keys, slices, merger)

    def join_rows(self, schema: pa.Schema, keys: Sequence[str], time: str | None, part: str) -> RunRows:
        return RunRows(self, schema, keys, time, None)


@dataclass
class _RunState:
    """Runs of rows with some columns, of which `keys` and the slice of time identify a group."""

    backend: RunBackend
    schema: pa.Schema
    keys: Sequence[str]  # without the slice
    slices: str | None
    merger: GroupMerger | None  # None: rows of a key do not combine
    _runs: list[Run] = field(default_factory=list)
    _first_open: int | None = None  # slices before it are forgotten
    _is_merged: bool = False  # in this task, a run was written or none was due

    def __post_init__(self) -> None:
        self._group = list(dict.fromkeys([*self.keys, *([] if self.slices is None else [self.slices])]))

    memory_bytes = 0  # of what outlives a task

    @property
    def is_empty(self) -> bool:
        return not self._runs

    def restore(self, version: Json) -> None:
        self._runs = [] if version is None else [Run.from_json(each) for each in as_list(as_map(version)[RUNS])]
        self._first_open, self._is_merged = None, False

    def snapshot(self) -> StateFuture:
        if not self._is_merged:
            self._merge(self._sorted([]))
        runs: list[Json] = [[*run.to_json()] for run in self._runs]
        return lambda: {RUNS: runs}

    def retain(self, kept: Sequence[Json]) -> None:
        """The driver removes files."""

    def close(self) -> None:
        pass

    def _forget(self, first_open: int) -> None:
        self._first_open = first_open if self._first_open is None else max(self._first_open, first_open)
        self._runs = [run for run in self._runs if run.newest is None or run.newest >= self._first_open]

    # --- files

    @property
    def _location(self) -> Location:
        assert self.backend.location is not None
        return self.backend.location

    def _open(self, run: Run) -> Blocks:
        """The rows of a run, mapped: none is read yet."""
        return read_run(self._location, run, self.schema, self.backend.traffic)

    def _read(self, run: Run) -> Blocks:
        """The rows of a run, all of which are read."""
        blocks = self._open(run)
        self._count(run, blocks, _row_count(blocks))
        return blocks

    def _look_up(self, wanted: pa.RecordBatch, run: Run, blocks: Blocks) -> Iterator[Match]:
        """The rows of a run with the keys of the wanted rows."""
        rows = 0
        for match in look_up(wanted, blocks, self._group):
            rows += match.rows.num_rows
            yield match
        self._count(run, blocks, rows)

    def _count(self, run: Run, blocks: Blocks, rows: int) -> None:
        """Count rows of a run that were read; `blocks` are those of the task's key groups."""
        self.backend.traffic.add_rows(run, rows, _row_count(blocks) < run.rows)

    def _open_rows(self, block: pa.RecordBatch) -> pa.RecordBatch:
        if self._first_open is None or self.slices is None:
            return block
        return filtered(block, pc.greater_equal(as_integers(block.column(self.slices)), self._first_open))

    def _is_half_expired(self, run: Run) -> bool:
        """Whether closed slices cover half of a run, so that rewriting it without them pays off."""
        if self._first_open is None or run.oldest is None or run.newest is None:
            return False
        return self._first_open > run.oldest + (run.newest - run.oldest) // 2

    def _sorted(self, batches: Iterable[pa.RecordBatch]) -> pa.RecordBatch:
        """New rows with their hashes, sorted by these as in runs, with each key once if rows combine."""
        batches = [batch for batch in batches if batch.num_rows]
        if not batches:
            return pa.RecordBatch.from_pylist([], schema_with_hash(self.schema))
        rows = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        hashes = self._hashes(rows)
        (merged,) = merge_blocks([[sort_by_hash(rows, hashes)]], self._group, self.merger, max_rows=len(hashes))
        return merged.block

    def _hashes(self, rows: pa.RecordBatch) -> np.ndarray:
        hashes = self.backend.hasher(rows, self.keys) if self.keys else np.zeros(rows.num_rows, np.uint64)
        if self.slices is None:
            return hashes
        return hash_with_slices(hashes, np.asarray(as_integers(rows.column(self.slices))))

    def _merge(self, new: pa.RecordBatch, gets: bool = False) -> _Merged:
        """Add a run of new rows, merged with some of the runs there are. With `gets`, the state of their keys is
        wanted.
        """
        self._is_merged = True
        rows_of = dict[str, int]()  # by file: one from which a part has migrated is in several runs
        for part in self._runs:
            rows_of[part.file] = rows_of.get(part.file, 0) + _row_count(self._open(part))
        files = list(rows_of)
        merged_files = {files[k] for k in choose_to_merge([*rows_of.values()], new.num_rows)}
        runs, migrating = self._migrating(new, rows_of, merged_files)
        opened = [self._open(run) for run in runs]
        sizes = [_row_count(blocks) for blocks in opened]
        chosen = {k for k, run in enumerate(runs) if run.file in merged_files} | migrating
        chosen |= {k for k, run in enumerate(runs) if self._is_half_expired(run)}
        touched: list[tuple[pa.RecordBatch, np.ndarray]] = []
        for k in chosen:
            self._count(runs[k], opened[k], sizes[k])
        if new.num_rows or chosen:
            parts = [[self._open_rows(block) for block in rows]
                     for rows in ([new], *(opened[k] for k in sorted(chosen)))]

            def blocks() -> Iterator[pa.RecordBatch]:
                for each in merge_blocks(parts, self._group, self.merger):
                    if gets and len(each.at):
                        touched.append((take_rows(each.block, each.at), each.existed))
                    yield self._reduced(each.block, len(chosen) == len(runs))

            run = write_run(self._location, blocks(), self.backend.groups, self.slices)
            self._runs = [*(each for k, each in enumerate(runs) if k not in chosen), *([] if run is None else [run])]
            self.backend.traffic.written += 0 if run is None else run.size_bytes
        return _Merged(runs, opened, chosen, touched)

    def _reduced(self, block: pa.RecordBatch, is_all: bool) -> pa.RecordBatch:
        """The rows of a block to write, which has all rows of each of its hashes in the runs that are merged; `is_all`:
        in all runs.
        """
        return block

    def _migrating(self, new: pa.RecordBatch, rows_of: Mapping[str, int],
                   merged_files: set[str]) -> tuple[list[Run], set[int]]:
        """The runs, and which of them are rewritten because other tasks have rows in their files too, and not because
        they are merged; the task's rows by file.

        A run that migrates in steps is cut.
        """
        (first, last), migration = self.backend.groups, self.backend.migration
        if migration == "lazy":
            return self._runs, set()
        new_rows = np.bincount(hashes_of(new) >> np.uint64(56), minlength=KEY_GROUPS)
        found, migrating = list[Run](), set[int]()
        for file, rows in rows_of.items():
            moving, rest = list[Run](), [run for run in self._runs if run.file == file]
            if file not in merged_files and rows < rest[0].rows:
                width = migration_width(last - first, rows, new.num_rows) if migration == "hybrid" else last - first
                moving, rest = hottest_ranges(rest, width, new_rows)
            migrating.update(range(len(found), len(found) + len(moving)))
            found += [*moving, *rest]
        return found, migrating


@dataclass(frozen=True)
class _Merged:
    """The runs before a merge with their blocks, which of them were merged, and the state of the new rows' keys after
    it, with whether they existed.
    """

    runs: list[Run]
    opened: list[Blocks]
    chosen: set[int]
    touched: list[tuple[pa.RecordBatch, np.ndarray]]


@dataclass
class RunTable(_RunState):
    """Groups, keys or rows by key. A key may occur several times in new rows, as several map tasks send it."""

    def merge_and_get(self, partials: pa.RecordBatch, gets_before: bool) -> Change:
        assert self.merger is not None
        new = self._sorted([partials.select(self.schema.names)])
        merged = self._merge(new, gets=True)
        existed = np.concatenate([np.zeros(0, bool), *(had_state for _, had_state in merged.touched)])
        rows = [each for each, _ in merged.touched]
        now = rows[0] if len(rows) == 1 else pa.concat_batches([new.slice(0, 0), *rows])
        for each in self._others(new, merged):
            existed[each.numbers] = True
            values = self.merger.combine_pairs(take_rows(now, each.numbers), each.rows)
            now = _with_values(now, each.numbers, dict(zip(self.merger.names, values, strict=True)))
        before = None
        if gets_before:
            before = self._before(new, [each for blocks in merged.opened for each in look_up(new, blocks, self._group)])
        return Change(now.select(self.schema.names), existed, before)

    def _others(self, new: pa.RecordBatch, merged: _Merged) -> Iterator[Match]:
        """Rows of the same keys in runs that were not merged."""
        for k, blocks in enumerate(merged.opened):
            if k not in merged.chosen:
                yield from self._look_up(new, merged.runs[k], blocks)

    def _before(self, new: pa.RecordBatch, found: list[Match]) -> pa.RecordBatch:
        """The groups of rows before they were merged; groups that did not exist have arbitrary values."""
        assert self.merger is not None
        numbers = np.concatenate([np.zeros(0, np.int64), *(each.numbers for each in found)])
        missing = np.setdiff1d(np.arange(new.num_rows), numbers)
        rows = pa.concat_batches([take_rows(new, missing), *(each.rows for each in found)])
        values = self.merger.combine_numbered(rows, np.concatenate([missing, numbers]))
        columns = [values.column(name) if name in values.schema.names else new.column(name)
                   for name in self.schema.names]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def expire(self, first_open: int) -> None:
        self._forget(first_open)

    def insert(self, keys: pa.RecordBatch) -> np.ndarray:
        rows = keys.append_column(pa.field(SEEN, pa.int64(), False), from_numpy(np.ones(keys.num_rows, np.int64)))
        hashes = self._hashes(rows)
        new = sort_by_hash(rows, hashes)
        merged = self._merge(new, gets=True)
        existed = np.concatenate([np.zeros(0, bool), *(had_state for _, had_state in merged.touched)])
        for each in self._others(new, merged):
            existed[each.numbers] = True
        is_new = np.empty(len(existed), bool)
        is_new[argsort(hashes)] = ~existed
        return is_new

    def append_and_get(self, rows: pa.RecordBatch) -> RowChange:
        new = self._sorted([rows.select(self.schema.names)])
        merged = self._merge(new)
        numbers = key_numbers(new, self._group)
        count = int(numbers.max()) + 1
        first = np.empty(count, np.int64)
        first[numbers[::-1]] = np.arange(len(numbers))[::-1]
        groups = take_rows(new, first)
        found = [each for run, blocks in zip(merged.runs, merged.opened, strict=True)
                 for each in self._look_up(groups, run, blocks)]
        names = self.schema.names
        before = pa.concat_batches([new.slice(0, 0), *(each.rows for each in found)]).select(names)
        before_of = np.concatenate([np.zeros(0, np.int64), *(each.numbers for each in found)])
        now = pa.concat_batches([before, new.select(names)])
        return RowChange(before, before_of, now, np.concatenate([before_of, numbers]), count)


@dataclass
class RunBuffer(_RunState):
    """Rows, or partial groups, until their windows close. New ones become a run with the version after the task."""

    _new: list[BufferSegment] = field(default_factory=list)

    def restore(self, version: Json) -> None:
        super().restore(version)
        self._new = []
        dropped = None if version is None else as_map(version).get(DROPPED)
        self._first_open = None if dropped is None else as_int(dropped)

    @property
    def segments(self) -> Sequence[BufferSegment]:
        stored = (BufferSegment(run.oldest, run.newest, run.rows, None, number=number)
                  for number, run in enumerate(self._runs) if run.oldest is not None and run.newest is not None)
        return [*stored, *self._new]

    def add(self, batch: pa.RecordBatch, first: int, last: int) -> None:
        self._new.append(BufferSegment(first, last, batch.num_rows, batch))

    def read(self, segment: BufferSegment) -> list[pa.RecordBatch]:
        if segment.batch is not None:
            return [segment.batch]
        blocks = self._read(self._runs[segment.number])
        if self._first_open is not None and segment.first < self._first_open:
            blocks = [self._open_rows(block) for block in blocks]
        return [block.select(self.schema.names) for block in blocks]

    def size_bytes(self, segments: Sequence[BufferSegment]) -> int:
        return sum(segment.size_bytes or sum(batch.nbytes for batch in self.read(segment)) for segment in segments)

    @contextmanager
    def taken(self) -> Iterator[list[BufferSegment]]:
        found = [BufferSegment(each.first, each.last, batch.num_rows, batch)
                 for each in self.segments for batch in self.read(each)]
        self._runs, self._new = [], []
        yield found

    def drop(self, first_open: int) -> None:
        self._forget(first_open)

    def compact(self, combine: Callable[[list[BufferSegment]], Iterable[pa.RecordBatch]]) -> None:
        """Runs are merged when a version is made."""

    def coalesce(self) -> None:
        """The same."""

    def snapshot(self, others: Sequence[BufferSegment] = ()) -> StateFuture:
        assert not others
        self._merge(self._sorted([self._open_rows(each.batch) for each in self._new if each.batch is not None]))
        self._new = []
        return super().snapshot()


@dataclass
class RunRows(_RunState):
    """Rows of a side of a join. Their hashes are of the keys alone, so that those of some keys are found in a run
    without reading all of it. `slices` is the column with their times, if there is one.
    """

    segments: list[BufferSegment] = field(default_factory=list)
    _newest_before: int | None = None
    reads_by_key = True

    def __post_init__(self) -> None:
        self._group = list(self.keys)

    @property
    def rows(self) -> int:
        """Rows of files that other tasks share count for each."""
        return sum(segment.rows for segment in self.segments)

    def restore(self, version: Json) -> None:
        super().restore(version)
        self._newest_before = None
        self.segments = [BufferSegment(run.oldest or 0, run.newest or 0, run.rows, None, number=number)
                         for number, run in enumerate(self._runs)]

    def add(self, batch: pa.RecordBatch, first: int, last: int) -> None:
        self.segments.append(BufferSegment(first, last, batch.num_rows, batch))

    def replace(self, segments: list[BufferSegment]) -> None:
        self.segments = segments

    def read(self, segment: BufferSegment) -> pa.RecordBatch:
        if segment.batch is not None:
            return segment.batch
        return self._joined(block.select(self.schema.names) for block in self._read(self._runs[segment.number]))

    def read_matching(self, segment: BufferSegment, keys: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
        if segment.batch is not None:
            return segment.batch
        hashes = np.unique(np.concatenate([self.backend.hasher(each, each.schema.names) for each in keys]))
        run = self._runs[segment.number]
        blocks = self._open(run)
        found = self._joined(rows_with_hashes(block, hashes).select(self.schema.names) for block in blocks)
        self._count(run, blocks, found.num_rows)
        return found

    def _joined(self, blocks: Iterable[pa.RecordBatch]) -> pa.RecordBatch:
        found = [block for block in blocks if block.num_rows]
        return found[0] if len(found) == 1 else pa.concat_batches([_empty(self.schema), *found])

    def keep_newest(self, limit: int) -> bool:
        self._newest_before = limit
        return True

    def _hashes(self, rows: pa.RecordBatch) -> np.ndarray:
        return self.backend.hasher(rows, self.keys) if self.keys else np.zeros(rows.num_rows, np.uint64)

    def _reduced(self, block: pa.RecordBatch, is_all: bool) -> pa.RecordBatch:
        """Without rows that a newer one of their key supersedes."""
        if self._newest_before is None or self.slices is None:
            return block
        numbers, times = key_numbers(block, self.keys), np.asarray(as_integers(block.column(self.slices)))
        is_old = times < self._newest_before
        order = np.lexsort((times, ~is_old, numbers))  # of each key, the old rows in the order of time, then the others
        is_newest = np.ones(len(order), bool)
        is_newest[:-1] = (numbers[order[1:]] != numbers[order[:-1]]) | ~is_old[order[1:]]
        kept = np.empty(len(order), bool)
        kept[order] = is_newest | ~is_old[order]
        return filtered(block, from_numpy(kept))

    def snapshot(self) -> StateFuture:
        held = {segment.number for segment in self.segments if segment.batch is None}
        self._runs = [run for number, run in enumerate(self._runs) if number in held]
        self._merge(self._sorted([each.batch for each in self.segments if each.batch is not None]))
        return super().snapshot()


@dataclass
class RunRecords(_RunState):
    """Values by key. A record supersedes those of its key with smaller numbers; a task numbers its own from the
    greatest of its key groups' runs on (`slices`). A key that is deleted has a record too, until all runs are merged.

    Key groups are those of the keys `placed_by`; other keys are mixed into the rest of the hash.
    """

    given: pa.Schema = field(default_factory=lambda: pa.schema([]))  # the columns of records as they are put
    placed_by: Sequence[str] | None = None
    _new: list[pa.RecordBatch] = field(default_factory=list)  # sorted by hash
    _next: int = 0
    resident_bytes = None

    def __post_init__(self) -> None:
        self._group = list(self.keys)
        self._values = [name for name in self.schema.names if name not in (NUMBER, IS_GONE)]

    def restore(self, version: Json) -> None:
        super().restore(version)
        self._new, self._next = [], 1 + max((run.newest or 0 for run in self._runs), default=0)

    def _hashes(self, rows: pa.RecordBatch) -> np.ndarray:
        placed_by = self.keys if self.placed_by is None else self.placed_by
        hashes = self.backend.hasher(rows, placed_by) if placed_by else np.zeros(rows.num_rows, np.uint64)
        others = [name for name in self.keys if name not in placed_by]
        return hash_with_slices(hashes, self.backend.hasher(rows, others)) if others else hashes

    def get(self, keys: pa.RecordBatch) -> pa.RecordBatch:
        wanted = sort_by_hash(keys, self._hashes(keys))
        found = [*(each for run in self._runs for each in self._look_up(wanted, run, self._open(run))),
                 *look_up(wanted, self._new, self._group)]
        rows = pa.concat_batches([_empty(schema_with_hash(self.schema)), *(each.rows for each in found)])
        numbers = np.concatenate([np.zeros(0, np.int64), *(each.numbers for each in found)])
        return self._as_given(live_records(take_rows(rows, _newest(rows, numbers)), self._values))

    def _as_given(self, records: pa.RecordBatch) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(records.columns, schema=self.given)

    def put(self, records: pa.RecordBatch) -> None:
        self._add(records, False)

    def delete(self, keys: pa.RecordBatch) -> None:
        columns = [keys.column(name) if name in keys.schema.names else
                   pa.nulls(keys.num_rows, self.schema.field(name).type) for name in self._values]
        self._add(pa.RecordBatch.from_arrays(columns, self._values), True)

    def _add(self, records: pa.RecordBatch, is_gone: bool) -> None:
        columns = [records.column(name).cast(self.schema.field(name).type) for name in self._values]
        count = records.num_rows
        marks = [pa.array(np.full(count, self._next)), pa.array(np.full(count, is_gone))]
        rows = pa.RecordBatch.from_arrays([*columns, *marks], schema=self.schema)
        self._new.append(sort_by_hash(rows, self._hashes(rows)))
        self._next += 1

    def scan(self) -> Iterator[pa.RecordBatch]:
        parts = [*map(self._read, self._runs), *([block] for block in self._new)]
        for each in merge_blocks(parts, self._group, self.merger):
            yield self._as_given(live_records(each.block, self._values))

    def _reduced(self, block: pa.RecordBatch, is_all: bool) -> pa.RecordBatch:
        return filtered(block, pc.invert(block.column(IS_GONE))) if is_all else block

    def snapshot(self) -> StateFuture:
        self._merge(self._sorted([each.drop_columns([HASH]) for each in self._new]))
        self._new = []
        return super().snapshot()


def _row_count(blocks: Blocks) -> int:
    return sum(block.num_rows for block in blocks)


def stored_records(keys: pa.Schema, values: pa.Schema) -> pa.Schema:
    """The columns of records in runs; a key that is gone has no values."""
    return pa.schema([*keys, *(field.with_nullable(True) for field in values), pa.field(NUMBER, pa.int64(), False),
                      pa.field(IS_GONE, pa.bool_(), False)])


def live_records(rows: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
    """The records of keys that are not gone."""
    return filtered(rows, pc.invert(rows.column(IS_GONE))).select(names)


def _newest(rows: pa.RecordBatch, numbers: np.ndarray) -> np.ndarray:
    """Of records with the numbers of their keys, the places of the newest ones, by these numbers."""
    order = np.lexsort((np.asarray(rows.column(NUMBER)), numbers))
    is_last = np.ones(len(order), bool)
    is_last[:-1] = numbers[order[1:]] != numbers[order[:-1]]
    return order[is_last]


@dataclass(frozen=True)
class NewestRecord:
    """Of records with one key, the one with the greatest number."""

    names: list[str]
    functions: ClassVar[dict[str, str] | None] = None

    def combine_pairs(self, left: pa.RecordBatch, right: pa.RecordBatch) -> list[pa.Array]:
        is_left = pc.greater(left.column(NUMBER), right.column(NUMBER))
        return [pc.if_else(is_left, left.column(name), right.column(name)) for name in self.names]

    def combine_numbered(self, rows: pa.RecordBatch, numbers: np.ndarray) -> pa.RecordBatch:
        return take_rows(rows.select(self.names), _newest(rows, numbers))


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], schema)


class _Counts:
    """Adds the counts of keys."""

    names: ClassVar = [SEEN]
    functions: ClassVar = {SEEN: "sum"}

    def combine_pairs(self, left: pa.RecordBatch, right: pa.RecordBatch) -> list[pa.Array]:
        return [pc.add(left.column(SEEN), right.column(SEEN))]

    def combine_numbered(self, rows: pa.RecordBatch, numbers: np.ndarray) -> pa.RecordBatch:
        totals = np.zeros(int(numbers.max(initial=-1)) + 1, np.int64)
        np.add.at(totals, numbers, np.asarray(rows.column(SEEN)))
        return pa.RecordBatch.from_arrays([from_numpy(totals)], names=self.names)


def _with_values(rows: pa.RecordBatch, positions: np.ndarray, values: dict[str, pa.Array]) -> pa.RecordBatch:
    columns = [scattered(column, positions, values[name]) if name in values else column
               for name, column in zip(rows.schema.names, rows.columns, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=rows.schema)
