"""File scans in Spark's plans: the files that a DataFrame, or a micro-batch of a stream, consists of.

A scan is recognised if it is all that the plan does, but for a selection of columns, and for a DataFrame filters that
mean the same in a flow (`catalyst_filters.py`): Parquet files that Spark has listed itself, no buckets, no metadata
columns, no option or setting that changes which rows are read or what they mean. Paths are on the local file system of
the machines, as Spark's own tasks would open them. The files are those of Spark's own listing, and the values of
partition columns those that Spark inferred or cast.

Names of Spark's plans are not public: where one is missing or has another form, there is no scan, and Spark reads.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from scalein.connectors.formats.statistics import Condition
from scalein.connectors.partition_columns import Values
from scalein.errors import NOWHERE
from scalein.spark.catalyst_filters import column_of, value_of
from scalein.spark.csv_lines import CsvLines
from scalein.spark.json_lines import JsonLines
from scalein.spark.row_groups import RowGroups, ScannedFile, coded_types, plan_row_groups
from scalein.spark.text_splits import Lines
from scalein.spark.types import arrow_schema
from scalein.spark.zones import session_zone

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from scalein.api.column import Column

MAX_FILES = 4096  # the driver reads their footers
MAX_PARTITIONS = 1024  # the driver asks the JVM for the values of each
_PARQUET = "org.apache.spark.sql.execution.datasources.parquet.ParquetFileFormat"
_CSV = "org.apache.spark.sql.execution.datasources.csv.CSVFileFormat"
_JSON = "org.apache.spark.sql.execution.datasources.json.JsonFileFormat"
_INDEX = "org.apache.spark.sql.execution.datasources.InMemoryFileIndex"
_SELECTING_OPTIONS = {"path", "paths", "basepath", "__globpaths__", "maxfilespertrigger", "maxbytespertrigger",
                      "latestfirst", "maxfileage", "filenameonly", "cleansource", "sourcearchivedir", "pathglobfilter",
                      "recursivefilelookup", "modifiedbefore", "modifiedafter", "maxcachedfiles",
                      "discardcachedinputratio"}  # they select files
_REQUIRED_SETTINGS = {"spark.sql.files.ignoreCorruptFiles": "false", "spark.sql.files.ignoreMissingFiles": "false",
                      "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
                      "spark.sql.parquet.int96RebaseModeInRead": "CORRECTED",
                      "spark.sql.parquet.int96TimestampConversion": "false",
                      "spark.sql.parquet.fieldId.read.enabled": "false"}  # fmt: skip
_CSV_OPTIONS = {"header", "sep", "delimiter", "mode"}  # where all rows are well-formed, modes are the same
_JSON_OPTIONS = {"mode"}
_TEXT_SETTINGS = {"spark.sql.csv.parser.columnPruning.enabled": "true",
                  "spark.sql.legacy.timeParserPolicy": "CORRECTED"}  # fmt: skip
_CORRUPT_RECORD = "spark.sql.columnNameOfCorruptRecord"
_ROW_WRAPPERS = ("WholeStageCodegenExec", "InputAdapter", "ColumnarToRowExec")


def are_settings_plain(spark: SparkSession, required: Mapping[str, str] = _REQUIRED_SETTINGS) -> bool:
    """Whether a session has no setting that changes what files mean."""
    return all(spark.conf.get(name, value) == value for name, value in required.items())


def are_columns_plain(struct: Any, names: Iterable[str]) -> bool:
    """Whether columns of a StructType have no metadata: Spark has default values there, and padded text."""
    wanted = set(names)
    return not any(set(field.metadata or {}) - {"comment"} for field in struct.fields if field.name in wanted)


@dataclass(frozen=True)
class FileScan:
    """The files that a DataFrame is a scan of."""

    files: tuple[ScannedFile, ...]
    struct: StructType  # of the files, with partition columns
    condition: Column | None  # rows for which it is not true are no rows of the DataFrame
    condition_reads: tuple[str, ...]

    def row_groups(self, schema: pa.Schema, conditions: Sequence[Condition] = ()) -> RowGroups | None:
        """The row groups of the files with the columns of `schema`, the flow's types, if tasks can read them; without
        those in which one of the conditions holds for no row. Where the flow has dictionaries, they do.
        """
        if not are_columns_plain(self.struct, schema.names):
            return None
        coded = [field.name for field in schema if pa.types.is_dictionary(field.type)]
        types = coded_types(arrow_schema(self.struct, NOWHERE, schema.names), coded)
        return plan_row_groups(self.files, types, conditions, schema)


def scan_of_dataframe(df: DataFrame) -> FileScan | None:
    """The scan that a DataFrame is; None if it is anything else, or belongs to Spark Connect."""
    from py4j.protocol import Py4JError
    from pyspark.sql.types import StructType

    if not hasattr(df, "_jdf") or df.isStreaming:
        return None
    try:
        plan = df._jdf.queryExecution().optimizedPlan()
        conditions, reads = list["Column"](), list[str]()
        while (kind := plan.getClass().getSimpleName()) != "LogicalRelation":
            if kind == "Filter":
                if (condition := column_of(plan.condition())) is None:
                    return None
                conditions.append(condition)
                references = plan.condition().references().toSeq()
                reads += [references.apply(k).name() for k in range(references.size())]
            elif not (kind == "Project" and _are_attributes(plan.projectList())):
                return None
            plan = plan.child()
        relation = plan.relation()
        if relation.getClass().getSimpleName() != "HadoopFsRelation":
            return None
        struct = StructType.fromJson(json.loads(relation.schema().json()))
        names = {name.lower() for name in struct.names}
        files = _files(relation) if are_settings_plain(df.sparkSession) and len(names) == len(struct.names) else None
        return None if files is None or not set(df.columns) <= set(struct.names) else FileScan(
            files, struct, reduce(and_, conditions) if conditions else None, tuple(dict.fromkeys(reads)))
    except (Py4JError, AttributeError, TypeError, ValueError):
        return None


def scan_of_batch(spark: SparkSession, query: str) -> Any | None:
    """The FileSourceScanExec that is the whole plan of a query's current batch; None if the plan has more."""
    from py4j.protocol import Py4JError

    try:
        plan = spark._jsparkSession.streams().get(query).streamingQuery().lastExecution().executedPlan()
        while (kind := plan.getClass().getSimpleName()) != "FileSourceScanExec":
            if not (kind in _ROW_WRAPPERS or (kind == "ProjectExec" and _are_attributes(plan.projectList()))):
                return None
            plan = plan.children().apply(0)
        is_plain = (plan.dataFilters().isEmpty() and plan.partitionFilters().isEmpty()
                    and plan.fileConstantMetadataColumns().isEmpty())
        return plan if is_plain else None
    except (Py4JError, AttributeError, TypeError):
        return None


def files_of_batch(scan: Any) -> tuple[ScannedFile, ...] | None:
    """The files of a scan that `scan_of_batch` found; None if tasks cannot read them."""
    from py4j.protocol import Py4JError

    try:
        return _files(scan.relation())
    except (Py4JError, AttributeError, TypeError, ValueError):
        return None


def text_of_batch(scan: Any, spark: SparkSession) -> tuple[tuple[ScannedFile, ...], Lines] | None:
    """The files of a scan that `scan_of_batch` found, if they are text files that tasks may be able to read; else None.

    `spark` is the session with the settings of the scan.
    """
    from py4j.protocol import Py4JError

    try:
        relation = scan.relation()
        names = tuple(relation.dataSchema().fieldNames())
        if not (are_settings_plain(spark, _TEXT_SETTINGS) and relation.partitionSchema().isEmpty()
                and spark.conf.get(_CORRUPT_RECORD) not in names and len(set(names)) == len(names)):
            return None
        if (files := _files(relation, _JSON, _SELECTING_OPTIONS | _JSON_OPTIONS)) is not None:
            return files, JsonLines(session_zone(spark))
        if (files := _files(relation, _CSV, _SELECTING_OPTIONS | _CSV_OPTIONS)) is None:
            return None
        options = {name.lower(): str(relation.options().apply(name)) for name in _option_names(relation)}
        separator = options.get("sep", options.get("delimiter", ","))
        has_header = options.get("header", "false").lower()
        return None if has_header not in ("true", "false") else (
            files, CsvLines(names, separator, has_header == "true", session_zone(spark)))
    except (Py4JError, AttributeError, TypeError, ValueError):
        return None


def _are_attributes(projection: Any) -> bool:
    return all(projection.apply(k).getClass().getSimpleName() == "AttributeReference" for k in range(projection.size()))


def _option_names(relation: Any) -> list[str]:
    return [name for name in relation.options().keySet().mkString("\n").split("\n") if name]


def _files(relation: Any, file_format: str = _PARQUET,
           options: Collection[str] = _SELECTING_OPTIONS) -> tuple[ScannedFile, ...] | None:
    """The files of a HadoopFsRelation; None if they are of another format, have other options, or are not on the local
    file system.
    """
    location = relation.location()
    if not (relation.fileFormat().getClass().getName() == file_format and location.getClass().getName() == _INDEX
            and all(name.lower() in options for name in _option_names(relation)) and relation.bucketSpec().isEmpty()):
        return None
    addresses = list(location.inputFiles())
    if len(addresses) > MAX_FILES:
        return None
    paths = [_local_path(address) for address in addresses]
    values_of: dict[str, Values] | None = _partition_values(relation, location)
    if None in paths or values_of is None:
        return None
    files = []
    for path in paths:
        assert path is not None
        folder, name = posixpath.split(path)
        if name.startswith(".") or (name.startswith("_") and "=" not in name):  # summaries of metadata
            continue
        if values_of and folder not in values_of:
            return None
        files.append(ScannedFile(path, values_of.get(folder, {})))
    return tuple(files)


def _local_path(address: str) -> str | None:
    """The path of a file on the local file system; None for other addresses."""
    parts = urlsplit(address)
    return unquote(parts.path) if parts.scheme == "file" and not parts.netloc else None


def _partition_values(relation: Any, location: Any) -> dict[str, Values] | None:
    """The values of partition columns by folder; empty if there are none, None if they cannot be read."""
    from pyspark.sql.types import StructType

    if relation.partitionSchema().isEmpty():
        return {}
    schema = relation.partitionSchema()
    types = arrow_schema(StructType.fromJson(json.loads(schema.json())), NOWHERE)
    partitions = location.partitionSpec().partitions()
    if partitions.size() > MAX_PARTITIONS:
        return None
    spark_types = [schema.apply(k).dataType() for k in range(len(types))]
    found: dict[str, Values] = {}
    for number in range(partitions.size()):
        partition = partitions.apply(number)
        row, folder = partition.values(), partition.path().toUri().getPath()
        found[folder] = {field.name: value_of(None if row.isNullAt(k) else row.get(k, spark_types[k]), field.type)
                         for k, field in enumerate(types)}
    return found
