"""run: a flow that is bound to its data, read by Spark's tasks themselves.

Spark schedules and moves what must meet; rows never go through the JVM before they are aggregated. Files are cut into
splits (parts of a Parquet file, whole files of other formats), which are dealt out to tasks of about the same size:
not more tasks than needed, because each sends partial groups of its own. Where groups are many and tasks few, each
task reads all splits instead, for the rows of its own keys, and nothing has to cross (`read_by_all`). A task decodes
its splits with our readers, on a thread beside the kernels; row groups whose statistics rule them out are left out here
already. What has partitions of another kind (own sources, generators) is a task a partition. Data in this process's
memory goes through `createDataFrame`.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pyarrow as pa

from scalein.connectors.base import QUIET_S, BoundSource
from scalein.connectors.formats.base import FileSplit, reading
from scalein.connectors.formats.parquet import Parquet
from scalein.connectors.in_memory import Batches
from scalein.connectors.sources.files import FileSource
from scalein.connectors.sources.read_ahead import ReadTask, read_ahead
from scalein.errors import BadArgument, InternalError, SourceLoc, here
from scalein.ir import ops
from scalein.ir.rewrite import walk_ops
from scalein.options import Options
from scalein.spark.batch.tasks import Entering, Rows, Step
from scalein.spark.phases import Phases
from scalein.spark.shuffle import hashes, own_rows
from scalein.spark.types import leaving, leaving_schema, spark_schema
from scalein.storage.checked_json import Json

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from scalein.api.flow import Flow

TASK_BYTES = 256 << 20  # of files, compressed as they are, that a task reads at least if there are cores enough
MOST_READERS = 4  # tasks that each read all files
ROWS_A_GROUP = 8  # up to which partial groups take about as much room as rows

Item = TypeVar("Item")
Split = tuple[str, int, int | None]  # name of a file, first row, and the row behind the last; None is the file's end


def run(flow: Flow, spark: SparkSession) -> DataFrame:
    """The rows of a flow that is bound to its data, as a DataFrame; executors read the files themselves.

    Every executor must see the files under the same path. Nothing is read before an action but what the plan needs:
    the files' metadata, and the static tables of joins. What is said of order in `scalein.spark.apply` holds here too.
    """
    from scalein.api.flow import Flow
    from scalein.spark.batch.apply import planned

    at = here()
    if not isinstance(flow, Flow):
        raise BadArgument("run takes a flow and a Spark session, in this order", at=at, found=type(flow).__name__)
    if not hasattr(spark, "createDataFrame"):
        raise BadArgument("run takes a Spark session", at=at, found=type(spark).__name__,
                          hint="scalein.spark.session() gives one")
    for below in walk_ops(flow.op):
        if isinstance(below, ops.Source) and below.data is None:
            raise BadArgument("the flow has no data yet: it begins with si.flow(schema)", at=at,
                              hint="begin it with a reader, or use scalein.spark.apply(q, df)")
        if isinstance(below, ops.Source) and isinstance(below.data, BoundSource) and not below.data.bounded:
            raise BadArgument(f"the input ({below.data.name}) never ends, so its result cannot be had", at=at,
                              hint="start(sink=...) runs it as a job")
    return planned(flow.op, spark, None, at)


def bound_rows(source: ops.Source, phases: Phases, spark: SparkSession, at: SourceLoc) -> tuple[DataFrame, Step]:
    """A DataFrame, and the step that makes of its batches the rows of a source that `phases` read."""
    columns = phases.reads
    data = source.data
    if isinstance(data, Batches):
        table = pa.Table.from_batches(list(data.read()), data.schema).select(columns)
        wanted = leaving_schema(table.schema, at)
        parts = [part for batch in table.to_batches() for part in leaving(batch, wanted)]
        # Others than their own names: mapInArrow takes one with a dot apart.
        named = pa.schema([field.with_name(f"c{k}") for k, field in enumerate(wanted)])
        whole = pa.Table.from_batches(parts, wanted).rename_columns(named.names)
        return spark.createDataFrame(whole, schema=spark_schema(named, at)), Entering(table.schema)
    if not isinstance(data, BoundSource):
        raise InternalError("a source without data reached Spark", at=at)
    connected = data.project(columns).where(phases.tests)
    step: Step
    if isinstance(connected.source, FileSource):
        shares = dealt(*splits_of(connected.source), parallelism(spark))
        step, count = FilesRead(connected.name, connected.source, tuple(map(tuple, shares)), source.at), len(shares)
    else:
        names = tuple(connected.partitions())
        step, count = PartitionsRead(connected, names), len(names)
    return spark.range(0, count, 1, max(1, count)), step


def read_by_all(source: ops.Source, phases: Phases, spark: SparkSession) -> tuple[DataFrame, Step] | None:
    """The rows of a source that `phases` read, dealt out by their keys: each task reads everything and keeps its own.

    None unless this costs less than a shuffle: there a row takes some five times what it takes to decode it and to
    look at its key. So tasks must be few, and partial groups not many times fewer than rows.
    """
    data, keys = source.data, phases.source_keys
    cores = parallelism(spark)
    if keys is None or cores > MOST_READERS or not isinstance(data, BoundSource):
        return None
    connected = data.project(phases.reads).where(phases.tests)
    files = connected.source
    if not isinstance(files, FileSource) or not isinstance(files.format, Parquet):
        return None
    splits, sizes = splits_of(files)
    if not splits or sum(sizes) > TASK_BYTES * cores or not _has_many_groups(files, keys, splits, sizes):
        return None
    step = AllRead(FilesRead(connected.name, files, (tuple(splits),), source.at), keys, cores)
    return spark.range(0, cores, 1, cores), step


def _has_many_groups(files: FileSource, keys: Sequence[str], splits: Sequence[Split], sizes: Sequence[int]) -> bool:
    """Whether there are about as many groups as rows, or not many times fewer, by some rows in the middle.

    Of s rows of n equally frequent keys, where n is much greater, some s * s / 2n have a key that was there before.
    """
    import pyarrow.parquet as pq

    name, row, _ = splits[len(splits) // 2]
    path = files.listing.path(name)
    part = next(files.format.splits(path, files.whole, list(dict.fromkeys(keys)), row), None)
    batch = None if part is None else next(part.open(), None)
    if batch is None:
        return False
    of_file = sum(size for (each, *_), size in zip(splits, sizes, strict=True) if each == name)
    rows = pq.read_metadata(path, memory_map=True).num_rows / max(1, of_file) * sum(sizes)
    found = hashes(batch, keys, Options.make(workers=1))
    repeats = len(found) - len(np.unique(found))
    return bool(4 * repeats <= len(found) and 2 * repeats * rows <= ROWS_A_GROUP * len(found) ** 2)


def splits_of(source: FileSource) -> tuple[list[Split], list[int]]:
    """The splits of files, and how many bytes are read of each, about."""
    splits: list[Split] = []
    sizes: list[int] = []
    share: float | None = None
    for file in source.listing.files():
        path = source.listing.path(file.name)
        rows = [0]
        if isinstance(source.format, Parquet):  # others would be read to be cut, and are read whole
            rows = [part.row for part in source.format.splits(path, source.whole, None, 0)]
            share = _share_read(path, source.schema.names) if share is None else share
        splits += [(file.name, row, end) for row, end in zip(rows, [*rows[1:], None], strict=False)]
        size = int(os.stat(path).st_size * (1.0 if share is None else share))
        sizes += [size // len(rows)] * len(rows) if rows else []
    return splits, sizes


def _share_read(path: str, columns: list[str]) -> float | None:
    """The share of a Parquet file's bytes that some columns have, by its first row group; None if there is none."""
    import pyarrow.parquet as pq

    with reading(path), pq.ParquetFile(path, memory_map=True) as file:
        if not file.metadata.num_row_groups or not columns:
            return None
        # First, whatever is wrong with it: where pyarrow's reader raises, its metadata end the process.
        next(file.iter_batches(1, [0], columns, use_threads=False), None)
        group = file.metadata.row_group(0)
        sizes = [(group.column(k).path_in_schema, group.column(k).total_compressed_size)
                 for k in range(group.num_columns)]  # fmt: skip
    whole = sum(size for _, size in sizes)
    read = sum(size for path, size in sizes if path in columns or path.partition(".")[0] in columns)  # of a struct, too
    return read / whole if whole and read else None


def dealt(splits: Sequence[Item], sizes: Sequence[int], cores: int) -> list[list[Item]]:
    """The splits of each task: about the same number of bytes, neighbours together where that costs nothing.

    >>> [[name for name, *_ in share] for share in dealt([(name, 0, None) for name in "abcd"], [9, 1, 1, 7], 2)]
    [['a'], ['b', 'c', 'd']]
    """
    whole = sum(sizes)
    rounds = max(1, -(-whole // (TASK_BYTES * cores)))
    count = min(len(splits), rounds * cores)
    shares: list[tuple[int, int, list[int]]] = [(0, k, []) for k in range(count)]
    for k in sorted(range(len(splits)), key=lambda k: -sizes[k]):  # the largest first, to whoever has least
        size, number, share = heapq.heappop(shares)
        share.append(k)
        heapq.heappush(shares, (size + sizes[k], number, share))
    return [[splits[k] for k in sorted(share)] for _, _, share in sorted(shares, key=lambda each: each[1])]


def parallelism(spark: SparkSession) -> int:
    """How many tasks run at once."""
    try:
        return max(1, int(spark.sparkContext.defaultParallelism))
    except Exception:  # Spark Connect has no context; whatever it raises says so
        return shuffle_partitions(spark)


def shuffle_partitions(spark: SparkSession) -> int:
    """How many partitions a shuffle has; some vendors' Spark says "auto"."""
    found = str(spark.conf.get("spark.sql.shuffle.partitions", "200"))
    return int(found) if found.isdigit() else 200


@dataclass(frozen=True)
class PartitionsRead:
    """Partitions of a source; Spark gives their numbers."""

    data: BoundSource
    names: tuple[str, ...]

    def run(self, batches: Rows, options: Options) -> Rows:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from (rows for rows, _ in self.data.read_from(self.names[number], None) if rows.num_rows)


@dataclass(frozen=True)
class FilesRead:
    """Shares of files; Spark gives their numbers."""

    name: str
    files: FileSource
    shares: tuple[tuple[Split, ...], ...]
    at: SourceLoc

    def run(self, batches: Rows, options: Options) -> Rows:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from self.share(number, options)

    def share(self, number: int, options: Options) -> Rows:
        return BoundSource(self.name, _Some(self.files, self.shares[number], options.workers), self.at).read()


@dataclass(frozen=True)
class AllRead:
    """All rows of a source, of which each task keeps those of its own keys; Spark gives the numbers of tasks."""

    rows: FilesRead  # in one share
    keys: tuple[str, ...]
    tasks: int

    def run(self, batches: Rows, options: Options) -> Rows:
        for number in (each for batch in batches for each in batch.column(0).to_pylist()):
            for rows in self.rows.share(0, options):
                if (own := own_rows(rows, self.keys, number, self.tasks, options)).num_rows:
                    yield own


@dataclass(frozen=True)
class _Some:
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
        columns = None if files.columns is None else list(files.columns)
        for name, first, end in self.splits:
            for part in files.format.splits(files.listing.path(name), files.whole, columns, first):
                if end is not None and part.row >= end:
                    break
                yield partial(_between, part, first, end)


def _between(part: FileSplit, first: int, end: int | None) -> Iterator[pa.RecordBatch]:
    """The rows of a part that are in a split: should files be cut otherwise here than where splits were dealt out."""
    row = part.row
    for batch in part.open():
        start = max(0, first - row)
        stop = batch.num_rows if end is None else min(batch.num_rows, end - row)
        row += batch.num_rows
        if start < stop:
            yield batch if stop - start == batch.num_rows else batch.slice(start, stop - start)
