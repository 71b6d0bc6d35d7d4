"""Files that Spark's tasks read themselves: those of a flow that is bound to its data (`run`), and those of a DataFrame
that is a scan (`file_scan.py`).

Spark schedules and shuffles; rows never go through the JVM before they are aggregated. Files are cut into splits (parts
of a Parquet file, whole files of other formats), which are assigned to tasks of about the same size: not more tasks
than needed, because each sends partial groups of its own. Where groups are many and tasks few, each task reads all
splits instead, for the rows of its own keys, and nothing is shuffled (`scan_all_by_key`). A task decodes its splits
with scalein's readers, on a thread beside the kernels; row groups that statistics rule out are dropped on the driver.
A DataFrame's files are read by row groups, in the types of its columns (`row_groups.py`). Sources with partitions of
another kind (user-defined sources, generators) have one task for each partition. Data in this process's memory goes
through `createDataFrame`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from scalein.connectors.base import QUIET_S, BoundSource
from scalein.connectors.formats.base import FileSplit, reading
from scalein.connectors.formats.parquet import Parquet
from scalein.connectors.in_memory import Batches
from scalein.connectors.sources.files import FileSource
from scalein.connectors.sources.read_ahead import ReadTask, read_ahead
from scalein.errors import BadArgument, InternalError, SourceLoc, here, locating
from scalein.ir import ops
from scalein.ir.rewrite import walk_ops
from scalein.options import Options
from scalein.spark.batch.tasks import FromSpark, Rows, Step
from scalein.spark.map_reduce import MapReduce
from scalein.spark.row_groups import TASK_BYTES, RowGroups, assign_splits
from scalein.spark.shuffle import key_hashes, rows_of_target, shuffle_partitions
from scalein.spark.types import spark_arrow_schema, spark_schema, to_spark
from scalein.storage.checked_json import Json

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from scalein.api.flow import Flow

MAX_FULL_READERS = 4  # tasks that each read all files
MAX_ROWS_PER_GROUP = 8  # up to which partial groups are about as large as the rows

Split = tuple[str, int, int | None]  # name of a file, first row, and the row after the last; None is the file's end


def run(flow: Flow, spark: SparkSession) -> DataFrame:
    """The rows of a flow that is bound to its data, as a DataFrame; executors read the files themselves.

    Every executor must see the files under the same path. Before an action only the files' metadata and the static
    tables of joins are read. As in `scalein.spark.apply`, rows have no order.
    """
    from scalein.api.flow import Flow
    from scalein.spark.batch.apply import plan_flow

    at = here()
    if not isinstance(flow, Flow):
        raise BadArgument("run takes a flow and a Spark session, in this order", at=at, found=type(flow).__name__)
    if not hasattr(spark, "createDataFrame"):
        raise BadArgument("run takes a Spark session", at=at, found=type(spark).__name__,
                          hint="scalein.spark.session() gives one")
    for each in walk_ops(flow.op):
        if isinstance(each, ops.Source) and each.data is None:
            raise BadArgument("the flow has no data yet: it begins with si.flow(schema)", at=at,
                              hint="begin it with a reader, or use scalein.spark.apply(q, df)")
        if isinstance(each, ops.Source) and isinstance(each.data, BoundSource) and not each.data.bounded:
            raise BadArgument(f"the input ({each.data.name}) never ends, so it has no complete result", at=at,
                              hint="start(sink=...) runs it as a job")
    return plan_flow(flow.op, spark, {}, at)


def scan_source(source: ops.Source, map_reduce: MapReduce, spark: SparkSession,
                at: SourceLoc) -> tuple[DataFrame, Step]:
    """A DataFrame, and the step that turns its batches into the rows of a source that `map_reduce` reads."""
    columns = map_reduce.reads
    data = source.data
    if isinstance(data, Batches):
        table = pa.Table.from_batches(list(data.read()), data.schema).select(columns)
        sent_types = spark_arrow_schema(table.schema, at)
        parts = [part for batch in table.to_batches() for part in to_spark(batch, sent_types)]
        # Renamed: mapInArrow splits a name at its dots.
        renamed = pa.schema([field.with_name(f"c{k}") for k, field in enumerate(sent_types)])
        total = pa.Table.from_batches(parts, sent_types).rename_columns(renamed.names)
        return spark.createDataFrame(total, schema=spark_schema(renamed, at)), FromSpark(table.schema)
    if not isinstance(data, BoundSource):
        raise InternalError("a source without data reached Spark", at=at)
    connected = data.project(columns).where(map_reduce.scan_conditions)
    step: Step
    if isinstance(connected.source, FileSource):
        with locating(source.at):
            splits = assign_splits(*file_splits(connected.source), parallelism(spark))
        step, count = ScanFiles(connected.name, connected.source, tuple(map(tuple, splits)), source.at), len(splits)
    else:
        names = tuple(connected.partitions())
        step, count = ScanPartitions(connected, names), len(names)
    return spark.range(0, count, 1, max(1, count)), step


def scan_all_by_key(source: ops.Source, map_reduce: MapReduce, spark: SparkSession) -> tuple[DataFrame, Step] | None:
    """The rows of a source that `map_reduce` reads, by their keys: each task reads all rows and selects its own.

    None unless this costs less than a shuffle, in which a row takes some five times as long as to decode it and to
    hash its key. So tasks must be few, and partial groups not many times fewer than rows.
    """
    data, keys = source.data, map_reduce.source_keys
    cores = parallelism(spark)
    if keys is None or cores > MAX_FULL_READERS or not isinstance(data, BoundSource):
        return None
    connected = data.project(map_reduce.reads).where(map_reduce.scan_conditions)
    files = connected.source
    if not isinstance(files, FileSource) or not isinstance(files.format, Parquet):
        return None
    splits, sizes = file_splits(files)
    if not splits or sum(sizes) > TASK_BYTES * cores:
        return None
    name, row, _ = splits[len(splits) // 2]
    path = files.listing.path(name)
    part = next(files.splits(name, list(dict.fromkeys(keys)), row), None)
    file_bytes = sum(size for (each, *_), size in zip(splits, sizes, strict=True) if each == name)
    if part is None or not _has_many_groups(next(part.open(), None), keys,
                                            _rows(path) / max(1, file_bytes) * sum(sizes)):
        return None
    step = ScanAllByKey(ScanFiles(connected.name, files, (tuple(splits),), source.at), keys, cores)
    return spark.range(0, cores, 1, cores), step


def scan_row_groups(row_groups: RowGroups, spark: SparkSession) -> tuple[DataFrame, Step]:
    """A DataFrame, and the step that turns its batches into the rows of row groups."""
    parts = row_groups.split(parallelism(spark))
    return spark.range(0, len(parts), 1, max(1, len(parts))), ScanRowGroups(parts)


def scan_row_groups_by_key(row_groups: RowGroups, map_reduce: MapReduce,
                           spark: SparkSession) -> tuple[DataFrame, Step] | None:
    """`scan_all_by_key` for row groups."""
    keys, cores = map_reduce.source_keys, parallelism(spark)
    if keys is None or cores > MAX_FULL_READERS or not 0 < sum(row_groups.sizes) <= TASK_BYTES * cores:
        return None
    middle = row_groups.row_group(len(row_groups.groups) // 2).select(list(dict.fromkeys(keys)))
    if not _has_many_groups(next(middle.read(), None), keys, sum(row_groups.rows)):
        return None
    return spark.range(0, cores, 1, cores), ScanAllByKey(ScanRowGroups((row_groups,)), keys, cores)


def _has_many_groups(sample: pa.RecordBatch | None, keys: Sequence[str], rows: float) -> bool:
    """Whether there are about as many groups as rows, or not many times fewer, by a sample from the middle.

    Of s rows of n equally frequent keys, where n is much greater, some s * s / 2n repeat an earlier key.
    """
    if sample is None:
        return False
    hashes = key_hashes(sample, keys, Options.make(workers=1))
    repeats = len(hashes) - len(np.unique(hashes))
    return bool(4 * repeats <= len(hashes) and 2 * repeats * rows <= MAX_ROWS_PER_GROUP * len(hashes) ** 2)


def _rows(path: str) -> int:
    import pyarrow.parquet as pq

    return int(pq.read_metadata(path, memory_map=True).num_rows)


def file_splits(source: FileSource) -> tuple[list[Split], list[int]]:
    """The splits of files, and about how many bytes are read of each."""
    splits: list[Split] = []
    sizes: list[int] = []
    splits_of_task: float | None = None
    for file in source.listing.files():
        if source.rules_out(file.name):
            continue
        path = source.listing.path(file.name)
        rows = [0]
        if isinstance(source.format, Parquet):  # other formats would have to be read to be cut
            rows = [part.row for part in source.format.splits(path, source.whole, None, 0)]
            splits_of_task = _read_fraction(path, source.schema.names) if splits_of_task is None else splits_of_task
        splits += [(file.name, row, end) for row, end in zip(rows, [*rows[1:], None], strict=False)]
        size = int(os.stat(path).st_size * (1.0 if splits_of_task is None else splits_of_task))
        sizes += [size // len(rows)] * len(rows) if rows else []
    return splits, sizes


def _read_fraction(path: str, columns: list[str]) -> float | None:
    """The fraction of a Parquet file's bytes in some columns, by its first row group; None if there is none."""
    import pyarrow.parquet as pq

    with reading(path, "parquet"), pq.ParquetFile(path, memory_map=True) as file:
        if not file.metadata.num_row_groups or not columns:
            return None
        # Read first: in a damaged file pyarrow's reader raises, while its metadata crash the process.
        next(file.iter_batches(1, [0], columns, use_threads=False), None)
        group = file.metadata.row_group(0)
        sizes = [(group.column(k).path_in_schema, group.column(k).total_compressed_size)
                 for k in range(group.num_columns)]  # fmt: skip
    total = sum(size for _, size in sizes)
    read = sum(size for path, size in sizes if path in columns or path.partition(".")[0] in columns)  # of a struct, too
    return read / total if total and read else None


def parallelism(spark: SparkSession) -> int:
    """How many tasks run at a time."""
    try:
        return max(1, int(spark.sparkContext.defaultParallelism))
    except Exception:  # Spark Connect has no context, and raises various errors
        return shuffle_partitions(spark)


@dataclass(frozen=True)
class ScanPartitions:
    """Reads partitions of a source; its input rows are their numbers."""

    data: BoundSource
    names: tuple[str, ...]

    def run(self, batches: Rows, options: Options) -> Rows:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from (rows for rows, _ in self.data.read_from(self.names[number], None) if rows.num_rows)


@dataclass(frozen=True)
class ScanFiles:
    """Reads the splits of tasks; its input rows are the numbers of tasks."""

    name: str
    files: FileSource
    task_splits: tuple[tuple[Split, ...], ...]
    at: SourceLoc

    def run(self, batches: Rows, options: Options) -> Rows:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from self.rows_of_task(number, options)

    def rows_of_task(self, number: int, options: Options) -> Rows:
        source = _SplitSource(self.files, self.task_splits[number], options.workers)
        return BoundSource(self.name, source, self.at).read()


@dataclass(frozen=True)
class ScanRowGroups:
    """Reads the row groups of tasks; its input rows are the numbers of tasks."""

    parts: tuple[RowGroups, ...]

    def run(self, batches: Rows, options: Options) -> Rows:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from self.rows_of_task(number, options)

    def rows_of_task(self, number: int, options: Options) -> Rows:
        part = self.parts[number]
        tasks = iter([part.row_group(k).read for k in range(len(part.groups))])
        return (batch for batch in read_ahead(tasks, options.workers, QUIET_S) if batch is not None)


@dataclass(frozen=True)
class ScanAllByKey:
    """Reads all rows and selects those of each task's own keys; its input rows are the numbers of tasks."""

    rows: ScanFiles | ScanRowGroups  # with all of them in one task
    keys: tuple[str, ...]
    tasks: int

    def run(self, batches: Rows, options: Options) -> Rows:
        for number in (each for batch in batches for each in batch.column(0).to_pylist()):
            for rows in self.rows.rows_of_task(0, options):
                if (own_rows := rows_of_target(rows, self.keys, number, self.tasks, options)).num_rows:
                    yield own_rows


@dataclass(frozen=True)
class _SplitSource:
    """Some splits as a source of one partition."""

    files: FileSource
    splits: tuple[Split, ...]
    threads: int

    @property
    def schema(self) -> pa.Schema:
        return self.files.schema

    def partitions(self) -> Sequence[str]:
        return ("splits",)

    def read(self, partition: str, offset: Json) -> Iterator[tuple[pa.RecordBatch, Json]]:
        for batch in read_ahead(self._units(), self.threads, QUIET_S):
            if batch is not None:
                yield batch, None

    def _units(self) -> Iterator[ReadTask[pa.RecordBatch]]:
        files = self.files
        for name, first, end in self.splits:
            for part in files.splits(name, None, first):
                if end is not None and part.row >= end:
                    break
                yield partial(_rows_in_split, part, first, end)


def _rows_in_split(part: FileSplit, first: int, end: int | None) -> Iterator[pa.RecordBatch]:
    """The rows of a part that are in a split: executors may cut files into other parts than the driver did."""
    row = part.row
    for batch in part.open():
        start = max(0, first - row)
        stop = batch.num_rows if end is None else min(batch.num_rows, end - row)
        row += batch.num_rows
        if start < stop:
            yield batch if stop - start == batch.num_rows else batch.slice(start, stop - start)
