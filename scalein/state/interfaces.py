"""What operators ask of their state, wherever it is: in a job's LogStore and row buffers (`exec/local_state.py`), or in
the hash-sorted runs of a Spark task (`run_table.py`).

An operator restores its state from the version that a checkpoint names, changes it, and captures the next version:
plain JSON, which is durable once it is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from scalein.state.row_buffer import BufferSegment
from scalein.storage.checked_json import Json

StateFuture = Callable[[], dict[str, Json]]  # waits until a version is durable, and returns it; on any thread


class GroupMerger(Protocol):
    """Merges partial groups of equal keys (`exec/combine.py`)."""

    @property
    def names(self) -> list[str]:
        """The columns of values."""

    @property
    def functions(self) -> dict[str, str] | None:
        """How each column combines on its own: sum, min or max; None if they combine only together."""

    def combine_pairs(self, left: pa.RecordBatch, right: pa.RecordBatch) -> list[pa.Array]:
        """The value columns of `left` combined with those of `right`, row by row."""

    def combine_numbered(self, rows: pa.RecordBatch, numbers: np.ndarray) -> pa.RecordBatch:
        """The combined values of all rows of each number, in the order of the numbers: 0, 1, 2, ... without gaps."""


class Change(NamedTuple):
    """Groups that were changed: `now`, whether they `existed`, and perhaps `before` (undefined where they did not),
    row by row.
    """

    now: pa.RecordBatch
    existed: np.ndarray
    before: pa.RecordBatch | None


class RowChange(NamedTuple):
    """Rows of `groups` groups before a change and now, each with the number of its group."""

    before: pa.RecordBatch
    before_of: np.ndarray
    now: pa.RecordBatch
    now_of: np.ndarray
    groups: int


class State(Protocol):
    """State of an operator."""

    @property
    def memory_bytes(self) -> int: ...

    def restore(self, version: Json) -> None:
        """Take over a version; None: begin empty."""

    def snapshot(self) -> StateFuture: ...

    def retain(self, kept: Sequence[Json]) -> None:
        """Remove what neither these versions nor the present state need."""

    def close(self) -> None: ...


class KeyedTable(State, Protocol):
    """Partial groups by key; with windows, a group is of one window, whose anchor is a part of its key."""

    @property
    def is_empty(self) -> bool: ...

    def merge_and_get(self, partials: pa.RecordBatch, gets_before: bool) -> Change: ...

    def expire(self, first_open: int) -> None:
        """Forget windows with an earlier anchor: they do not change any more."""


class KeySet(State, Protocol):
    """Keys that were seen."""

    def insert(self, keys: pa.RecordBatch) -> np.ndarray:
        """Which of these keys, none of which occurs twice, are new; from now on they are not."""


class KeyedRows(State, Protocol):
    """Rows by key, for aggregates whose value needs all rows of its group."""

    def append_and_get(self, rows: pa.RecordBatch) -> RowChange: ...


class KeyedRecords(State, Protocol):
    """Values by key, which are replaced as a whole. A batch has each key once."""

    @property
    def resident_bytes(self) -> int | None:
        """About what all records take; None if they should not be read at once."""

    def get(self, keys: pa.RecordBatch) -> pa.RecordBatch:
        """The records of those of these keys that have one."""

    def put(self, records: pa.RecordBatch) -> None: ...

    def delete(self, keys: pa.RecordBatch) -> None: ...

    def scan(self) -> Iterable[pa.RecordBatch]:
        """All records."""


class WindowBuffer(State, Protocol):
    """Rows or partial groups by slice of time, until their windows close."""

    schema: pa.Schema

    @property
    def segments(self) -> Sequence[BufferSegment]: ...

    def add(self, batch: pa.RecordBatch, first: int, last: int) -> None:
        """Append rows whose slices are in [first, last]."""

    def read(self, segment: BufferSegment) -> list[pa.RecordBatch]: ...

    def size_bytes(self, segments: Sequence[BufferSegment]) -> int: ...

    def taken(self) -> AbstractContextManager[list[BufferSegment]]:
        """Everything that there is, which is forgotten; it can be read within."""

    def drop(self, first_open: int) -> None:
        """Forget slices that begin before a time."""

    def coalesce(self) -> None:
        """Join segments, if they are many."""

    def compact(self, combine: Callable[[list[BufferSegment]], Iterable[pa.RecordBatch]]) -> None:
        """Replace segments by what they combine to, if they are many."""

    def snapshot(self, others: Sequence[BufferSegment] = ()) -> StateFuture:
        """A version with other segments as well."""


class JoinRows(State, Protocol):
    """Rows of a side of a join, in segments by time."""

    @property
    def segments(self) -> Sequence[BufferSegment]: ...

    @property
    def rows(self) -> int: ...

    def add(self, batch: pa.RecordBatch, first: int, last: int) -> None:
        """Append rows whose times are in [first, last]."""

    def replace(self, segments: list[BufferSegment]) -> None:
        """Hold these segments instead."""

    def read(self, segment: BufferSegment) -> pa.RecordBatch: ...

    @property
    def reads_by_key(self) -> bool:
        """Whether `read_matching` reads less than all; then few rows are not worth a table that stays."""

    def read_matching(self, segment: BufferSegment, keys: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
        """The rows that have one of these keys, and perhaps others."""

    def keep_newest(self, limit: int) -> bool:
        """From now on, of the rows before a time only the newest of each key are needed. Whether it sees to that."""


class StateBackend(Protocol):
    """Makes the state of an operator. `keys` and `slices` name columns; without `slices` there are no windows."""

    def table(self, keys: pa.Schema, values: pa.Schema, slices: str | None, merger: GroupMerger) -> KeyedTable: ...

    def key_set(self, keys: pa.Schema) -> KeySet: ...

    def rows_by_key(self, schema: pa.Schema, keys: Sequence[str]) -> KeyedRows | None:
        """None if it has no such state."""

    def records(self, keys: pa.Schema, values: pa.Schema, placed_by: Sequence[str] | None = None) -> KeyedRecords:
        """`placed_by` are those keys that say which task has a record; None: all of them."""

    def buffer(self, schema: pa.Schema, keys: Sequence[str], slices: str, merger: GroupMerger | None,
               name: str = "rows") -> WindowBuffer:
        """With `merger`, its rows are partial groups. An operator with several gives each a name, of letters."""

    def join_rows(self, schema: pa.Schema, keys: Sequence[str], time: str | None, part: str) -> JoinRows:
        """`part` tells the sides of a join apart; `time` is a column, if there is one."""
