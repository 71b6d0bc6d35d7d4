"""Inputs of a stream: tasks read plain Parquet files themselves, so that no row goes through the JVM.

From Spark's reader a row reaches Python through Spark's own row format and Arrow, which costs several times what a
batch does with it afterwards. Spark still lists the files, numbers the batches and stores the offsets; its plan of a
batch names the files of its rows, and the number of rows is reported to its metrics.

The rows must be those that Spark would read. So Spark's plan must be a scan of Parquet files, perhaps with a
projection, without any option that changes what is read; every file has the needed columns, in exactly the types of the
flow; and dates are in the Gregorian calendar. In all other cases, and where Spark's plans have an unknown form, Spark
reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from scalein.connectors.formats.base import reading
from scalein.connectors.formats.parquet import batches_of
from scalein.spark.batch.scan import assign_splits

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MAX_FILES = 256  # of a batch: the driver reads their footers
BATCH_ROWS = 1 << 18
# A shuffle takes as long as decoding about so many bytes; below, all tasks read all files instead.
READ_ALL_BYTES = 64 << 20
_WRAPPERS = ("WholeStageCodegenExec", "InputAdapter", "ColumnarToRowExec")
_ALLOWED_OPTIONS = {"path", "basepath", "__globpaths__", "maxfilespertrigger", "maxbytespertrigger", "latestfirst",
                    "maxfileage", "filenameonly", "cleansource", "sourcearchivedir", "pathglobfilter",
                    "recursivefilelookup", "maxcachedfiles", "discardcachedinputratio"}  # they select files
_REQUIRED_SETTINGS = {"spark.sql.files.ignoreCorruptFiles": "false", "spark.sql.files.ignoreMissingFiles": "false",
                      "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED"}  # fmt: skip
_LEGACY = (b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96")

RowGroup = tuple[str, int]  # a file's path, and the number of one of its row groups


@dataclass(frozen=True)
class RowGroups:
    """Row groups of Parquet files: the rows of a batch, or of a task."""

    columns: tuple[str, ...]
    groups: tuple[RowGroup, ...]
    sizes: tuple[int, ...]  # compressed bytes of the columns in each

    def read(self) -> Iterator[pa.RecordBatch]:
        import pyarrow.parquet as pq

        columns = list(self.columns)
        for path, some in groupby(self.groups, key=itemgetter(0)):
            numbers = [number for _, number in some]
            with reading(path), pq.ParquetFile(path, memory_map=True) as file:
                yield from batches_of(path, file, numbers, columns, BATCH_ROWS, use_threads=False)

    def split(self, cores: int) -> tuple[RowGroups, ...]:
        """The row groups of each task, of about the same size."""
        numbers = list(range(len(self.groups)))
        return tuple(RowGroups(self.columns, tuple(self.groups[k] for k in part), tuple(self.sizes[k] for k in part))
                     for part in assign_splits(numbers, self.sizes, cores))


@dataclass(frozen=True)
class BatchScan:
    """The row groups of a batch, and Spark's own count of rows read."""

    row_groups: RowGroups
    metric: Any  # an SQLMetric of the JVM

    def report_rows(self, rows: int) -> None:
        """Add rows to Spark's progress."""
        self.metric.add(rows)


def scan_of_batch(spark: SparkSession, query_session: SparkSession, query: str, schema: pa.Schema) -> BatchScan | None:
    """The row groups of a query's current batch, if tasks can read them in the types of `schema`; else None.

    `spark` is the session that the query was started in, `query_session` the query's own copy of it.
    """
    scan = _file_scan(spark, query)
    if scan is None or any(query_session.conf.get(name) != value for name, value in _REQUIRED_SETTINGS.items()):
        return None
    paths = [_local_path(address) for address in scan.relation().location().inputFiles()]
    if len(paths) > MAX_FILES or None in paths:
        return None
    row_groups = plan_row_groups([path for path in paths if path is not None], schema)
    return None if row_groups is None else BatchScan(row_groups, scan.metrics().apply("numOutputRows"))


def _file_scan(spark: SparkSession, query: str) -> Any | None:
    """The file scan that is a batch's whole plan; None if the plan has more. These are not public names of Spark: where
    one of them is missing, the result is None.
    """
    from py4j.protocol import Py4JError

    try:
        plan = spark._jsparkSession.streams().get(query).streamingQuery().lastExecution().executedPlan()
        while (kind := plan.getClass().getSimpleName()) != "FileSourceScanExec":
            if kind == "ProjectExec":
                projection = plan.projectList()
                kinds = {projection.apply(k).getClass().getSimpleName() for k in range(projection.size())}
                if kinds != {"AttributeReference"}:
                    return None
            elif kind not in _WRAPPERS:
                return None
            plan = plan.children().apply(0)
        relation = plan.relation()
        options = relation.options().keysIterator()
        names = {options.next().lower() for _ in range(relation.options().size())}
        format_name = relation.fileFormat().getClass().getSimpleName()
        is_plain = (format_name == "ParquetFileFormat" and names <= _ALLOWED_OPTIONS
                    and plan.dataFilters().isEmpty() and plan.partitionFilters().isEmpty()
                    and relation.partitionSchema().size() == 0 and plan.fileConstantMetadataColumns().isEmpty())
        return plan if is_plain else None
    except (Py4JError, AttributeError, TypeError):
        return None


def _local_path(address: str) -> str | None:
    """The path of a file on this machine's own filesystem; None for other addresses."""
    parts = urlsplit(address)
    return unquote(parts.path) if parts.scheme == "file" and not parts.netloc else None


def plan_row_groups(paths: Sequence[str], schema: pa.Schema) -> RowGroups | None:
    """All row groups of some files, if each file has the columns of a schema in their types; else None."""
    import pyarrow.parquet as pq

    groups: list[RowGroup] = []
    sizes: list[int] = []
    for path in paths:
        try:
            with pq.ParquetFile(path, memory_map=True) as file:
                metadata, found = file.metadata, file.schema_arrow
        except (pa.ArrowException, OSError):  # Spark reports the error when it reads the file
            return None
        if any(found.names.count(field.name) != 1 or found.field(field.name).type != field.type for field in schema):
            return None
        if any(pa.types.is_temporal(field.type) for field in schema) and _is_legacy(metadata.metadata or {}):
            return None
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            columns = (group.column(k) for k in range(group.num_columns))
            groups.append((path, number))
            sizes.append(sum(column.total_compressed_size for column in columns
                             if column.path_in_schema.partition(".")[0] in schema.names))
    return RowGroups(tuple(schema.names), tuple(groups), tuple(sizes))


def _is_legacy(metadata: dict[bytes, bytes]) -> bool:
    """Whether a file's dates may be in the hybrid calendar of Spark before version 3."""
    version = metadata.get(b"org.apache.spark.version", b"3")
    return any(key in metadata for key in _LEGACY) or version.split(b".")[0] in (b"1", b"2")
