"""Row groups of Parquet files that Spark would scan: planned on the driver from footers, read by tasks.

From Spark's reader a row reaches Python through Spark's own row format and Arrow, which costs several times what a
kernel does with it. So tasks read the files themselves, where that gives the rows that Spark would read, in its types:

    a column of the file       if its type converts to Spark's without loss (`connectors/formats/conversion.py`)
    a partition column         the value that Spark found in the path, for all rows of the file
    a column the file lacks    null
    dates and times            in the Gregorian calendar, so not from files of Spark 2, nor rebased ones

INT96 times are instants, and so are times without a zone where Spark's column has one. Times in nanoseconds, which
Spark cannot read, are read if they are whole microseconds, and are an error otherwise. In all other cases
`plan_row_groups` gives None, and Spark reads.

Text with few different values is read as dictionaries by flows that are planned for that (`coded_types`): codes are
cheaper to decode, to compare and to group by.

Row groups in which a condition holds for no row are not read. If their times advance a watermark, these come from the
statistics, and a row group is read where they do not say enough (`_skipped_times`).
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeVar

import pyarrow as pa

from scalein.connectors.formats import statistics
from scalein.connectors.formats.base import reading
from scalein.connectors.formats.conversion import converts
from scalein.connectors.formats.parquet import CODED, HEADER_BYTES, MAX_CODE_BYTES, converted_batches
from scalein.connectors.formats.statistics import Condition
from scalein.connectors.partition_columns import Values, with_constants
from scalein.exec.event_time import NO_TIMES, TimeRange, TimeSummary, merge_summaries

TASK_BYTES = 256 << 20  # of compressed files that a task reads, at least if there are enough cores
BATCH_ROWS = 1 << 18
BATCH_BYTES = 64 << 20  # rows of a batch are fewer where they are wide
_INSTANT = pa.timestamp("us", "UTC")
_LEGACY = (b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96")

RowGroup = tuple[str, int]  # a file's path, and the number of one of its row groups
Item = TypeVar("Item")


@dataclass(frozen=True)
class ScannedFile:
    """A file of a scan, and the values of the partition columns for all its rows."""

    path: str
    values: Values


@dataclass(frozen=True)
class TimeColumn:
    """The column whose times advance a watermark, in rows that need not be read as well."""

    name: str
    max_gap: int | None  # by which event time advances from row to row at most
    known: int | None = None  # the event time of earlier rows


@dataclass(frozen=True)
class Skipped:
    """Row groups that are not read."""

    row_groups: int = 0
    rows: int = 0
    times: TimeSummary = NO_TIMES  # of their rows, where these advance a watermark


@dataclass(frozen=True)
class RowGroups:
    """Row groups of Parquet files: the rows of a scan, or of one of its tasks."""

    schema: pa.Schema  # the columns that are read, in the types in which Spark would send them
    groups: tuple[RowGroup, ...]
    sizes: tuple[int, ...]  # compressed bytes of the columns in each
    rows: tuple[int, ...]
    values: Mapping[str, Values]  # of partition columns, by path
    coded: frozenset[str]  # columns of text with few different values in each
    skipped: Skipped  # of the scan

    def read(self) -> Iterator[pa.RecordBatch]:
        """All rows, decoded by one thread."""
        for path, some in groupby(self.groups, key=itemgetter(0)):
            numbers = [number for _, number in some]
            coded = [field.name for field in self.schema if field.type == CODED]
            with reading(path, "parquet"), _open(path, coded) as file:
                yield from _read(path, file, numbers, self.schema, self.values.get(path, {}))

    def split(self, tasks: int) -> tuple[RowGroups, ...]:
        """The row groups of each task, of about the same size."""
        return tuple(map(self._some, assign_splits(range(len(self.groups)), self.sizes, tasks)))

    def row_group(self, number: int) -> RowGroups:
        """One of the row groups."""
        return self._some([number])

    def select(self, columns: Sequence[str]) -> RowGroups:
        """The same rows with fewer columns."""
        return replace(self, schema=pa.schema([self.schema.field(name) for name in columns]))

    def with_dictionaries(self) -> RowGroups:
        """The same rows, with dictionaries in the columns `coded`."""
        return replace(self, schema=coded_types(self.schema, self.coded))

    def _some(self, numbers: Sequence[int]) -> RowGroups:
        groups = tuple(self.groups[k] for k in numbers)
        values = {path: self.values[path] for path, _ in groups if path in self.values}
        return replace(self, groups=groups, sizes=tuple(self.sizes[k] for k in numbers),
                       rows=tuple(self.rows[k] for k in numbers), values=values)


def coded_types(schema: pa.Schema, names: Collection[str]) -> pa.Schema:
    """The schema with dictionaries of text in some columns."""
    return pa.schema([field.with_type(CODED) if field.name in names else field for field in schema])


def _open(path: str, coded: Collection[str] = ()) -> Any:
    """A file, with dictionaries in some columns if it has them."""
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path, memory_map=True, coerce_int96_timestamp_unit="us")
    stored = [name for name in coded if name in file.schema_arrow.names]
    return file if not stored else pq.ParquetFile(path, metadata=file.metadata, memory_map=True,
                                                  coerce_int96_timestamp_unit="us", read_dictionary=stored)


def _read(path: str, file: Any, numbers: list[int], schema: pa.Schema, values: Values) -> Iterator[pa.RecordBatch]:
    """The rows of some row groups of a file."""
    names = file.schema_arrow.names
    stored = pa.schema([field for field in schema if field.name in names and field.name not in values])
    about = [file.metadata.row_group(number) for number in numbers]
    rows = sum(group.num_rows for group in about)
    row_bytes = sum(_size(group, stored.names, "total_uncompressed_size") for group in about) / max(1, rows)
    batch_rows = max(1024, min(BATCH_ROWS, int(BATCH_BYTES / max(1.0, row_bytes))))
    if stored.names == schema.names:
        yield from converted_batches(path, file, numbers, schema, batch_rows, use_threads=False)
    elif stored.names:
        for batch in converted_batches(path, file, numbers, stored, batch_rows, use_threads=False):
            yield with_constants(batch, schema, values, batch.num_rows)
    else:
        for start in range(0, rows, batch_rows):
            yield with_constants(None, schema, values, min(batch_rows, rows - start))


def plan_row_groups(files: Sequence[ScannedFile], schema: pa.Schema, conditions: Sequence[Condition] = (),
                    condition_types: pa.Schema | None = None, time: TimeColumn | None = None) -> RowGroups | None:
    """The row groups of some files, if tasks can read the columns of `schema`, in Spark's types, as it does; else None.

    Row groups in which one of the conditions holds for no row are left out; `condition_types` has the types of their
    constants, and of `time`.
    """
    types = schema if condition_types is None else condition_types
    groups: list[RowGroup] = []
    sizes: list[int] = []
    rows: list[int] = []
    values: dict[str, Values] = {}
    coded = {field.name for field in schema if field.type == pa.string()}
    skipped: list[int] = []  # rows of each
    skipped_times: list[TimeSummary] = []
    for each in files:
        try:
            if not os.stat(each.path).st_size:  # Spark skips such files, too
                continue
            with _open(each.path) as file:
                metadata, names = file.metadata, _stored_columns(file, schema, each.values)
        except (pa.ArrowException, OSError):  # Spark reports the error when it reads the file
            return None
        if names is None:
            return None
        is_wanted = _wanted(metadata, types, conditions, names, each.values)
        if each.values:
            values[each.path] = each.values
        coded &= {*names, *each.values}
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            if not group.num_rows:
                continue
            times = NO_TIMES if time is None else _skipped_times(metadata, group, types, time, names)
            if not is_wanted[number] and times is not None:
                skipped.append(group.num_rows)
                skipped_times.append(times)
            else:
                groups.append((each.path, number))
                sizes.append(_size(group, names, "total_compressed_size"))
                rows.append(group.num_rows)
                coded -= {name for name in coded if name in names and _size(group, [name], "total_uncompressed_size")
                          > MAX_CODE_BYTES * group.num_rows + HEADER_BYTES}
    times_of_skipped = merge_summaries(skipped_times, None if time is None else time.max_gap)
    return RowGroups(schema, tuple(groups), tuple(sizes), tuple(rows), values, frozenset(coded),
                     Skipped(len(skipped), sum(skipped), times_of_skipped))


def _wanted(metadata: Any, types: pa.Schema, conditions: Sequence[Condition], names: Collection[str],
            values: Values) -> list[bool]:
    """For each row group of a file whether it may have rows for which all conditions hold."""
    if not all(statistics.holds(test, values[test.column]) for test in conditions if test.column in values):
        return [False] * metadata.num_row_groups
    stored = [test for test in conditions if test.column in names]
    return statistics.wanted(metadata, types, stored) if stored else [True] * metadata.num_row_groups


def _skipped_times(metadata: Any, group: Any, types: pa.Schema, time: TimeColumn,
                   names: Collection[str]) -> TimeSummary | None:
    """The times of a row group as its rows would give them; None if that takes more than the least and the greatest:
    where there may be a gap between them that event time does not pass, it must be read.
    """
    place = next((k for k in range(metadata.num_columns) if metadata.schema.column(k).path == time.name), None)
    if place is None or time.name not in names:
        return None
    found = statistics.extent(group.column(place).statistics, group.num_rows, metadata.schema.column(place),
                              types.field(time.name).type)
    if found is None:
        return None
    least, greatest, _ = found
    start = least if time.known is None else max(least, time.known)
    return TimeSummary((TimeRange(*found),)) if time.max_gap is None or greatest - start <= time.max_gap else None


def _size(group: Any, names: Sequence[str], attribute: str) -> int:
    """The bytes of some columns of a row group."""
    columns = (group.column(k) for k in range(group.num_columns))
    return sum(getattr(column, attribute) for column in columns
               if column.path_in_schema in names or column.path_in_schema.partition(".")[0] in names)


def _stored_columns(file: Any, schema: pa.Schema, values: Values) -> list[str] | None:
    """The columns of a schema that a file has itself; None if they are not readable as Spark reads them."""
    found = file.schema_arrow
    by_lower_name: dict[str, list[str]] = {}
    for name in found.names:
        by_lower_name.setdefault(name.lower(), []).append(name)
    stored = []
    for field in schema:
        if field.name in values:
            continue
        alike = by_lower_name.get(field.name.lower(), [])
        if not alike:
            continue
        if alike != [field.name]:  # names that differ in case: Spark may take them for the same, or refuse them
            return None
        if not converts(_type_in_spark(file, field), field.type):
            return None
        if _has_dates(field.type) and _is_legacy(file.metadata.metadata or {}):
            return None
        stored.append(field.name)
    return stored


def _type_in_spark(file: Any, wanted: pa.Field) -> pa.DataType:
    """The type of a file's column, with the zone that Spark takes it to have."""
    found = file.schema_arrow.field(wanted.name).type
    leaves = (file.schema.column(k) for k in range(len(file.schema)))
    if any(leaf.physical_type == "INT96" for leaf in leaves if leaf.path == wanted.name):
        return _INSTANT
    is_instant = pa.types.is_timestamp(found) and pa.types.is_timestamp(wanted.type) and wanted.type.tz is not None
    return pa.timestamp(found.unit, wanted.type.tz) if is_instant else found


def _has_dates(arrow: pa.DataType) -> bool:
    return bool(pa.types.is_temporal(arrow)) or any(_has_dates(arrow.field(k).type) for k in range(arrow.num_fields))


def _is_legacy(metadata: dict[bytes, bytes]) -> bool:
    """Whether a file's dates may be in the hybrid calendar of Spark before version 3."""
    version = metadata.get(b"org.apache.spark.version", b"3")
    return any(key in metadata for key in _LEGACY) or version.split(b".")[0] in (b"1", b"2")


def assign_splits(splits: Sequence[Item], sizes: Sequence[int], cores: int) -> list[list[Item]]:
    """The splits of each task, of about the same number of bytes, in their order.

    >>> [[name for name, *_ in task] for task in assign_splits([(name, 0, None) for name in "abcd"], [9, 1, 1, 7], 2)]
    [['a'], ['b', 'c', 'd']]
    """
    total = sum(sizes)
    rounds = max(1, -(-total // (TASK_BYTES * cores)))
    count = min(len(splits), rounds * cores)
    tasks: list[tuple[int, int, list[int]]] = [(0, k, []) for k in range(count)]
    for k in sorted(range(len(splits)), key=lambda k: -sizes[k]):  # the largest first, to the smallest task
        size, number, numbers = heapq.heappop(tasks)
        numbers.append(k)
        heapq.heappush(tasks, (size + sizes[k], number, numbers))
    return [[splits[k] for k in sorted(numbers)] for _, _, numbers in sorted(tasks, key=lambda each: each[1])]
