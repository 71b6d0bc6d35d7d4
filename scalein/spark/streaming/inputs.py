"""Inputs of a stream: tasks read plain Parquet files themselves, so that no row goes through the JVM.

Spark still lists the files, numbers the batches and stores the offsets; its plan of a batch names the files of its rows
(`file_scan.py`), and the number of rows is reported to its metrics. Whether tasks read a batch is decided by its files
(`row_groups.py`); in all other cases Spark reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from scalein.connectors.formats.statistics import Condition
from scalein.spark.file_scan import are_settings_plain, files_of_batch
from scalein.spark.file_scan import scan_of_batch as file_scan_of_batch
from scalein.spark.row_groups import RowGroups, ScannedFile, TimeColumn, plan_row_groups
from scalein.spark.streaming.event_time import Clock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# A shuffle takes as long as decoding about so many bytes; below, all tasks read all files instead.
READ_ALL_BYTES = 64 << 20


@dataclass(frozen=True)
class StreamInput:
    """The columns of a stream that a flow reads."""

    spark_types: pa.Schema  # in the types in which Spark sends them
    flow_types: pa.Schema
    conditions: Sequence[Condition]  # rows for which one does not hold need not be read
    time: TimeColumn | None  # whose times advance the watermark nevertheless
    is_plain: bool  # Spark's columns have no default values or other attributes


@dataclass(frozen=True)
class BatchScan:
    """The row groups of a batch, and Spark's own count of rows read."""

    row_groups: RowGroups
    metric: Any  # an SQLMetric of the JVM

    def report_rows(self, rows: int) -> None:
        """Add rows to Spark's progress."""
        self.metric.add(rows)


def scan_of_batch(spark: SparkSession, query_session: SparkSession, query: str, input: StreamInput,
                  clock: Clock) -> BatchScan | None:
    """The row groups of a query's current batch, if tasks can read them; else None.

    `spark` is the session that the query was started in, `query_session` the query's own copy of it; `clock` is the
    event time before the batch.
    """
    scan = file_scan_of_batch(spark, query) if input.is_plain else None
    files = None if scan is None or not are_settings_plain(query_session) else files_of_batch(scan)
    if scan is None or files is None:
        return None
    row_groups = row_groups_of(files, input, clock)
    return None if row_groups is None else BatchScan(row_groups, scan.metrics().apply("numOutputRows"))


def row_groups_of(files: Sequence[ScannedFile], input: StreamInput, clock: Clock) -> RowGroups | None:
    """The row groups of some files that a batch needs to read, if tasks can read them; else None."""
    time = None if input.time is None else replace(input.time, known=clock.greatest)
    return plan_row_groups(files, input.spark_types, input.conditions, input.flow_types, time)
