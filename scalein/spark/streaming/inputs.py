"""Files: where a stream is of plain Parquet files, tasks read them themselves, and no row goes through the JVM.

From Spark's reader a row comes to Python through Spark's own rows and Arrow's, which costs several times what a batch
does with it afterwards. Spark still lists the files, numbers the batches and keeps the offsets; what it planned for a
batch tells which files hold its rows, and it is told how many there were.

The rows must be those that Spark would read. So its plan has to be a scan of Parquet files and perhaps a choice of
columns, with no option that changes what is read; every file has the columns that are needed, in the very types of the
flow; and dates are of today's calendar. If anything is otherwise, or not as we know Spark's plans to be, Spark reads.
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
from scalein.spark.batch.scan import dealt

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MOST_FILES = 256  # of a batch, whose footers the driver reads
BATCH_ROWS = 1 << 18
# A task that reads all files needs no shuffle, which takes as long as decoding about so many bytes.
WHOLE_BYTES = 64 << 20
_WRAPPERS = ("WholeStageCodegenExec", "InputAdapter", "ColumnarToRowExec")
_OPTIONS = {"path", "basepath", "__globpaths__", "maxfilespertrigger", "maxbytespertrigger", "latestfirst",
            "maxfileage", "filenameonly", "cleansource", "sourcearchivedir", "pathglobfilter", "recursivefilelookup",
            "maxcachedfiles", "discardcachedinputratio"}  # that are about which files there are
_PLAIN_SETTINGS = {"spark.sql.files.ignoreCorruptFiles": "false", "spark.sql.files.ignoreMissingFiles": "false",
                   "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED"}  # fmt: skip
_LEGACY = (b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96")

Group = tuple[str, int]  # a file's path, and the number of one of its row groups


@dataclass(frozen=True)
class Files:
    """Row groups of Parquet files, with the rows of a batch or of a task."""

    columns: tuple[str, ...]
    groups: tuple[Group, ...]
    sizes: tuple[int, ...]  # bytes of the columns in each, as they are in the file

    def read(self) -> Iterator[pa.RecordBatch]:
        import pyarrow.parquet as pq

        columns = list(self.columns)
        for path, some in groupby(self.groups, key=itemgetter(0)):
            numbers = [number for _, number in some]
            with reading(path), pq.ParquetFile(path, memory_map=True) as file:
                yield from batches_of(path, file, numbers, columns, BATCH_ROWS, use_threads=False)

    def shares(self, cores: int) -> tuple[Files, ...]:
        """The same for some tasks, of about the same size."""
        places = list(range(len(self.groups)))
        return tuple(Files(self.columns, tuple(self.groups[k] for k in share), tuple(self.sizes[k] for k in share))
                     for share in dealt(places, self.sizes, cores))


@dataclass(frozen=True)
class Scanned:
    """The files of a batch, and Spark's own count of the rows that were read."""

    files: Files
    counted: Any  # a metric of Spark's

    def count(self, rows: int) -> None:
        """Have the rows in Spark's progress."""
        self.counted.add(rows)


def scanned(spark: SparkSession, own: SparkSession, query: str, schema: pa.Schema) -> Scanned | None:
    """What the batch under way of a query reads, if tasks can read it as `schema` says; None if Spark has to.

    `spark` is the session that the query was started in, `own` the query's own copy of it.
    """
    scan = _scan(spark, query)
    if scan is None or any(own.conf.get(name) != value for name, value in _PLAIN_SETTINGS.items()):
        return None
    paths = [_local(address) for address in scan.relation().location().inputFiles()]
    if len(paths) > MOST_FILES or None in paths:
        return None
    files = row_groups([path for path in paths if path is not None], schema)
    return None if files is None else Scanned(files, scan.metrics().apply("numOutputRows"))


def _scan(spark: SparkSession, query: str) -> Any | None:
    """The one scan that is all of a batch's plan; None if there is more to it. These are no public names of Spark's:
    where one of them is missing, there is no such scan.
    """
    from py4j.protocol import Py4JError

    try:
        plan = spark._jsparkSession.streams().get(query).streamingQuery().lastExecution().executedPlan()
        while (kind := plan.getClass().getSimpleName()) != "FileSourceScanExec":
            if kind == "ProjectExec":
                chosen = plan.projectList()
                kinds = {chosen.apply(k).getClass().getSimpleName() for k in range(chosen.size())}
                if kinds != {"AttributeReference"}:
                    return None
            elif kind not in _WRAPPERS:
                return None
            plan = plan.children().apply(0)
        relation = plan.relation()
        options = relation.options().keysIterator()
        names = {options.next().lower() for _ in range(relation.options().size())}
        is_plain = (relation.fileFormat().getClass().getSimpleName() == "ParquetFileFormat" and names <= _OPTIONS
                    and plan.dataFilters().isEmpty() and plan.partitionFilters().isEmpty()
                    and relation.partitionSchema().size() == 0 and plan.fileConstantMetadataColumns().isEmpty())
        return plan if is_plain else None
    except (Py4JError, AttributeError, TypeError):
        return None


def _local(address: str) -> str | None:
    """The path of a file on this machine's own filesystem."""
    parts = urlsplit(address)
    return unquote(parts.path) if parts.scheme == "file" and not parts.netloc else None


def row_groups(paths: Sequence[str], schema: pa.Schema) -> Files | None:
    """All rows of some files, if each has the columns of a schema as it says."""
    import pyarrow.parquet as pq

    groups: list[Group] = []
    sizes: list[int] = []
    for path in paths:
        try:
            with pq.ParquetFile(path, memory_map=True) as file:
                about, found = file.metadata, file.schema_arrow
        except (pa.ArrowException, OSError):  # whatever is wrong, Spark has words for it
            return None
        if any(found.names.count(field.name) != 1 or found.field(field.name).type != field.type for field in schema):
            return None
        if any(pa.types.is_temporal(field.type) for field in schema) and _is_legacy(about.metadata or {}):
            return None
        for number in range(about.num_row_groups):
            group = about.row_group(number)
            columns = (group.column(k) for k in range(group.num_columns))
            groups.append((path, number))
            sizes.append(sum(column.total_compressed_size for column in columns
                             if column.path_in_schema.partition(".")[0] in schema.names))
    return Files(tuple(schema.names), tuple(groups), tuple(sizes))


def _is_legacy(metadata: dict[bytes, bytes]) -> bool:
    """Whether a file's dates may be of the calendar that Spark had before version 3."""
    version = metadata.get(b"org.apache.spark.version", b"3")
    return any(key in metadata for key in _LEGACY) or version.split(b".")[0] in (b"1", b"2")
