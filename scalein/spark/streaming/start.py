"""start: what a stream is given, checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pyarrow as pa

from scalein.api.flow import Flow
from scalein.connectors.base import Sink
from scalein.errors import BadArgument, SourceLoc, here, type_name
from scalein.ir.passes.null_on_error import tried
from scalein.spark.serialize import settled
from scalein.spark.streaming.commits import Plan, checked_partitions
from scalein.spark.streaming.query import StreamJob
from scalein.spark.streaming.runs import MIGRATIONS
from scalein.spark.streaming.sinks import outlet
from scalein.spark.streaming.work import Work, bound_types, one_source
from scalein.spark.types import checked_schema
from scalein.storage.object_store import parse_location

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_TRIGGERS = ("processingTime", "availableNow", "once")


def start(q: Flow, stream_df: DataFrame, *, sink: object, checkpoint: object, partitions: int = 8,
          trigger: str | Mapping[str, object] | None = None, emit: str = "final", late: object = "drop",
          on_error: object = "raise", migration: str = "lazy") -> StreamJob:
    """Run a flow on a stream of Spark's, in the background: `wait()` for its end, `stop()` it, `scale(n)` it meanwhile.

    The flow begins with `si.flow(schema)` and has at most one aggregation or `distinct()`; joins are with static
    tables. Spark reads, and says where the stream is; state and results are ours. `checkpoint` is a directory, or the
    address of one that both Spark and pyarrow know ("s3://...", "hdfs://..."): started again with the same one, after a
    stop or a crash, the stream goes on where it was, and no row is lost or counted twice. The state is in `partitions`
    ranges of keys, 1 to 256; `job.scale(n)` changes that between two batches, and moves nothing: tasks read what is
    theirs of the files that there are, until these are merged as all are (`migration="lazy"`). With "eager" they write
    it into files of their own in the next batch, which takes the longer; with "hybrid" some of it in each batch, first
    where this has most rows, so that eight batches move all.

    `sink` is one of scalein's (`si.to_parquet("out/")`: written by the executors, visible batch by batch), any other
    with its methods (its rows come to the driver), or a function of a DataFrame and the batch's number, as
    `foreachBatch` takes it: after a crash it may be called again with both. `trigger` is as in Spark:
    `{"processingTime": "5 seconds"}`, or that text alone, or `{"availableNow": True}`.

    `emit` is "final" (a window when the watermark has passed its end) or "changes" (each group that a batch has
    changed, with a column `op`: insert, update or delete). `late` is "drop", "error", or a sink for rows that come
    after all their windows have closed. A stream never ends by itself, so it does not close its last windows.

    A row in which an expression fails ends the stream, and would end it again at each start (`on_error="raise"`).
    "null" gives null where an expression fails; a sink takes the rows that fail, with the columns that the flow reads,
    and the others go on. What fails behind an aggregation is no row's fault, and ends the stream.
    """
    at = here()
    if not isinstance(q, Flow):
        raise BadArgument("start takes a flow and a streaming DataFrame, in this order", at=at, found=type(q).__name__)
    _check_stream(stream_df, at)
    if emit not in ("final", "changes"):
        raise BadArgument("no such way to emit", at=at, found=repr(emit), has="'final', 'changes'")
    if migration not in MIGRATIONS:
        raise BadArgument("no such migration", at=at, found=repr(migration), has=", ".join(map(repr, MIGRATIONS)))
    how_late = _word("late", late, ("drop", "error"), at)
    how_wrong = _word("on_error", on_error, ("raise", "null"), at)
    if not isinstance(sink, Sink) and not callable(sink):
        raise BadArgument("sink takes a sink, or a function of a DataFrame and a batch's number", at=at,
                          found=repr(sink), hint='for example si.to_parquet("out/"), or lambda df, batch: ...')
    if how_late == how_wrong == "sink" and late is on_error:
        raise BadArgument("one sink cannot take two kinds of rows", at=at, hint="give each its own")
    for name, given, how in (("late", late, how_late), ("on_error", on_error, how_wrong)):
        if how == "sink" and (not isinstance(given, Sink) or given is sink):
            raise BadArgument(f"{name} takes a sink of its own", at=at, found=repr(given),
                              hint=f'for example si.to_parquet("{"late" if name == "late" else "failed"}/")')
    location = parse_location(checkpoint, at)
    entering = checked_schema(one_source(q.op, at).arrow, stream_df.schema, at)
    op = settled(bound_types(q.op, entering), at)
    work = Work(tried(op) if how_wrong == "null" else op, emit, how_late, how_wrong, at)
    outlets = {"out": outlet(sink, work.schema, "out", location, at)}
    if how_late == "sink":
        if work.window is None:
            raise BadArgument("late rows are those whose windows have closed, and the flow has no windows", at=at)
        outlets["late"] = outlet(late, work.late_schema, "late", location, at)
    reads = pa.schema([entering.field(name) for name in work.reads])
    if how_wrong == "sink":
        outlets["failed"] = outlet(on_error, reads, "failed", location, at)
    return StreamJob(Plan(work, reads, outlets, location, checked_partitions(partitions, at),
                          _trigger(trigger, stream_df, at), migration, at), stream_df)


def _word(name: str, given: object, words: tuple[str, str], at: SourceLoc) -> str:
    """What becomes of rows that are no result: one of some words, or "sink"."""
    if isinstance(given, str) and given not in words:
        raise BadArgument(f"{name} does not know this word", at=at, found=repr(given),
                          has=", ".join(map(repr, words)) + ", or a sink")
    return given if isinstance(given, str) else "sink"


def _check_stream(df: object, at: SourceLoc) -> None:
    if not getattr(df, "isStreaming", False):
        raise BadArgument("start takes a streaming DataFrame", at=at,
                          found="a batch DataFrame" if hasattr(df, "isStreaming") else type_name(df),
                          hint="spark.readStream...; of other data use scalein.spark.apply(q, df)")
    if ".connect." in type(df).__module__:
        raise BadArgument("streams run where the driver is, so Spark Connect cannot start them", at=at,
                          hint="use a session that is not remote")


def _trigger(given: str | Mapping[str, object] | None, df: DataFrame, at: SourceLoc) -> dict[str, object]:
    """What Spark's `trigger` takes, and has taken once: a writer that is not started does nothing."""
    from pyspark.errors import PySparkException

    if given is None:
        return {}
    found = {"processingTime": given} if isinstance(given, str) else given
    if not isinstance(found, Mapping) or len(found) != 1 or not set(found) <= {*_TRIGGERS}:
        raise BadArgument("no such trigger", at=at, found=repr(given), has=", ".join(_TRIGGERS),
                          hint='for example {"availableNow": True}')
    try:
        df.writeStream.trigger(**found)  # type: ignore[call-overload]
    except PySparkException:
        raise BadArgument("Spark does not take this trigger", at=at, found=repr(given),
                          hint='for example "5 seconds" or {"availableNow": True}') from None
    return dict(found)
