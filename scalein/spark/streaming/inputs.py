"""Inputs of a stream: tasks read plain Parquet, CSV and JSON files themselves, so that no row goes through the JVM.

Spark still lists the files, numbers the batches and stores the offsets; its plan of a batch names the files of its rows
(`file_scan.py`), and the number of rows is reported to its metrics. Whether tasks read a batch is decided by its files:
before it runs for Parquet (`row_groups.py`), and by tasks for text (`text_splits.py`). In all other cases Spark reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from scalein.connectors.formats.statistics import Condition
from scalein.spark.file_scan import are_settings_plain, files_of_batch, text_of_batch
from scalein.spark.file_scan import scan_of_batch as file_scan_of_batch
from scalein.spark.origin import ORIGIN
from scalein.spark.row_groups import RowGroups, ScannedFile, TimeColumn, plan_row_groups
from scalein.spark.streaming.event_time import Clock
from scalein.spark.text_splits import TextSplits, plan_text

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# A shuffle takes as long as decoding about so many bytes; below, all tasks read all files instead.
READ_ALL_BYTES = 64 << 20
READ_ALL_TEXT_BYTES = 16 << 20  # of text, which takes several times as long to decode


@dataclass(frozen=True)
class StreamInput:
    """The columns of a stream that a flow reads; for dead letters, the last one is `ORIGIN`."""

    spark_types: pa.Schema  # in the types in which Spark sends them
    flow_types: pa.Schema
    conditions: Sequence[Condition]  # rows for which one does not hold need not be read
    time: TimeColumn | None  # whose times advance the watermark nevertheless
    is_plain: bool  # Spark's columns have no default values or other attributes


@dataclass(frozen=True)
class BatchScan:
    """The rows of a batch in its files, and Spark's own count of rows read."""

    rows: RowGroups | TextSplits
    metric: Any  # an SQLMetric of the JVM

    def report_rows(self, rows: int) -> None:
        """Add rows to Spark's progress."""
        self.metric.add(rows)


def scan_of_batch(spark: SparkSession, query_session: SparkSession, query: str, input: StreamInput,
                  clock: Clock) -> BatchScan | None:
    """The files of a query's current batch, if tasks may be able to read them; else None.

    `spark` is the session that the query was started in, `query_session` the query's own copy of it; `clock` is the
    event time before the batch.
    """
    scan = file_scan_of_batch(spark, query) if input.is_plain else None
    if scan is None or not are_settings_plain(query_session):
        return None
    rows: RowGroups | TextSplits | None = None
    if (files := files_of_batch(scan)) is not None:
        rows = row_groups_of(files, input, clock)
    elif (found := text_of_batch(scan, query_session)) is not None:
        rows = plan_text(found[0], input.spark_types, found[1])
    return None if rows is None else BatchScan(rows, scan.metrics().apply("numOutputRows"))


def row_groups_of(files: Sequence[ScannedFile], input: StreamInput, clock: Clock) -> RowGroups | None:
    """The row groups of some files that a batch needs to read, if tasks can read them; else None."""
    time = None if input.time is None else replace(input.time, known=clock.greatest)
    if ORIGIN in input.spark_types.names:
        files = [replace(each, values={**each.values, ORIGIN: pa.scalar(each.path)}) for each in files]
    return plan_row_groups(files, input.spark_types, input.conditions, input.flow_types, time)
