"""start: checks the arguments of a stream before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pyarrow as pa

from scalein.api.binding import inputs_of
from scalein.api.flow import Flow
from scalein.connectors.base import Sink
from scalein.connectors.sinks.files import FileSink
from scalein.durations import Duration, seconds
from scalein.errors import BadArgument, SourceLoc, here, locating, type_name
from scalein.exec.dead_letters import dead_letter_schema
from scalein.ir.passes.null_on_error import null_on_error
from scalein.spark.batch.apply import bound_inputs, dataframes_of
from scalein.spark.file_scan import are_columns_plain
from scalein.spark.origin import with_origin
from scalein.spark.serialize import read_static_tables
from scalein.spark.streaming.coordinator import StreamSpec, checked_partitions
from scalein.spark.streaming.inputs import StreamInput
from scalein.spark.streaming.join_plan import plan_of
from scalein.spark.streaming.query import StreamJob
from scalein.spark.streaming.sinks import make_committer
from scalein.spark.streaming.stream_plan import unbound_sources
from scalein.spark.types import arrow_schema, check_clocks
from scalein.spark.zones import session_zone
from scalein.state.hash_runs import MIGRATIONS
from scalein.storage.object_store import parse_location

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_TRIGGERS = ("processingTime", "availableNow", "once")


def start(q: Flow, stream_df: DataFrame | Mapping[str, DataFrame], *, sink: object = None, checkpoint: object = None,
          partitions: int = 8, name: str | None = None, trigger: str | Mapping[str, object] | None = None,
          emit: str = "final", late: object = "drop", on_error: object = "raise", migration: str = "lazy",
          files_every: Duration | None = None) -> StreamJob:
    """Run a flow on a stream of Spark, in the background: `wait()` for its end, `stop()` it, `scale(n)` it meanwhile.

    The flow begins with `si.flow(schema)` and has at most one operator with state: an aggregation, also in sessions or
    with `ttl=`, `distinct`, values over the rows before, the first rows of groups in windows, `process` (the last three
    with a watermark) or a join of two streams; perhaps after a union of branches that begin with this same
    flow, or of several streams. Other joins are with static tables.

    Streams that are joined or united are inputs with names, `si.flow(schema, name="clicks")`, and are given by these:
    `start(q, {"clicks": clicks_df, "views": views_df}, ...)`. Spark reads them as one; each has its own watermark, and
    the least of them decides what is late, what is final, what has no match, and what is forgotten. Rows that have
    found a match come out with their batch. A late row of a join is dropped and counted, or an error.

    Spark reads the stream and tracks its offsets; scalein holds the state and writes results. `checkpoint` is a
    directory, or the address of one that both Spark and pyarrow know ("s3://...", "hdfs://..."): started again with the
    same one, after a stop or a crash, the stream resumes where it was, and no row is lost or counted twice. The state
    is in `partitions` ranges of keys, 1 to 256; `job.scale(n)` changes that between two batches, and moves nothing:
    tasks read their part of the existing files, until these are merged as usual (`migration="lazy"`). With "eager"
    they rewrite their part in the next batch, which then takes longer; with "hybrid" a range of it in each batch, first
    where the batch has most rows, so that all has moved after eight batches.

    `sink` is one of scalein's (`si.to_parquet("out/")`: written by the executors, visible batch by batch), any other
    with its methods (its rows are sent to the driver), or a function of a DataFrame and the batch's number, as
    `foreachBatch` takes it: after a crash it may be called again with both. `trigger` is as in Spark:
    `{"processingTime": "5 seconds"}`, or that text alone, or `{"availableNow": True}`: the stream ends when it has
    taken what is there now. `name` is that of Spark's query, in `spark.streams.active` and in its UI; no other query of
    the session that is active may have it.

    Each batch writes at least one file for each partition that has results, so that a stream with short batches leaves
    many small ones. `files_every="1m"` collects the rows of several batches in file sinks: they are durable with their
    batch, and become visible in few files (of up to the sink's `roll` bytes) a minute later, or as soon as they fill a
    file, or when the stream ends. Whoever reads the folder sees each row once, at any moment. The driver joins the
    files, except for large ones, which only get their names.

    `emit` is "final" (a window when the watermark has passed its end) or "changes" (each group that a batch has
    changed, with a column `op`: insert, update or delete). `late` is "drop", "error", or a sink for rows that arrive
    after all their windows have closed, or after the watermark where rows are taken in the order of time. A stream
    never ends by itself, so it does not close its last windows; `job.stop(drain=True)` does. If nothing comes out,
    `job.why_no_output()` says why.

    A row in which an expression fails ends the stream, and would end it again at each start (`on_error="raise"`).
    "null" gives null where an expression fails; a sink receives the rows that fail as dead letters, and the others
    pass: all columns of the row, the reason (`error`), and its file (`bad_file`; the number of the batch where rows are
    not from files). An expression that fails downstream of an aggregation ends the stream: it belongs to no single row.
    """
    at = here()
    if not isinstance(q, Flow):
        raise BadArgument("start takes a flow and a streaming DataFrame, in this order", at=at, found=type(q).__name__)
    if not isinstance(stream_df, Mapping):
        _check_stream(stream_df, at)
    if emit not in ("final", "changes"):
        raise BadArgument("no such way to emit", at=at, found=repr(emit), has="'final', 'changes'")
    if migration not in MIGRATIONS:
        raise BadArgument("no such migration", at=at, found=repr(migration), has=", ".join(map(repr, MIGRATIONS)))
    late_policy = _policy("late", late, ("drop", "error"), at)
    error_policy = _policy("on_error", on_error, ("raise", "null"), at)
    if not isinstance(sink, Sink) and not callable(sink):
        raise BadArgument("sink takes a sink, or a function of a DataFrame and a batch's number", at=at,
                          found=repr(sink), hint='for example si.to_parquet("out/"), or lambda df, batch: ...')
    if checkpoint is None:
        raise BadArgument("a stream on Spark needs a checkpoint, which holds its state", at=at,
                          hint='checkpoint="folder", or an address that all machines reach, like "s3://...": one of '
                               "its own for each stream")
    frames = _frames(q, stream_df, at)
    _check_name(name, next(iter(frames.values())), at)
    files_every_s = None if files_every is None else seconds(files_every, "argument files_every", at)
    if files_every_s is not None and not isinstance(sink, FileSink):
        raise BadArgument("files_every is about the files of a sink, and this sink writes none", at=at,
                          found=repr(sink), hint='for example si.to_parquet("out/")')
    if late_policy == error_policy == "sink" and late is on_error:
        raise BadArgument("one sink cannot take two kinds of rows", at=at, hint="give each its own")
    for role, argument, policy in (("late", late, late_policy), ("on_error", on_error, error_policy)):
        if policy == "sink" and (not isinstance(argument, Sink) or argument is sink):
            raise BadArgument(f"{role} takes a sink of its own", at=at, found=repr(argument),
                              hint=f'for example si.to_parquet("{"late" if role == "late" else "failed"}/")')
    location = parse_location(checkpoint, at)
    op, sources = bound_inputs(q.op, {name: df.schema for name, df in frames.items()}, at)
    op = read_static_tables(op, at)
    plan = plan_of(null_on_error(op) if error_policy == "null" else op, emit, late_policy, error_policy, at)
    is_united = plan.inputs is not None and plan.inputs.is_united
    stream = plan.inputs.united(frames) if plan.inputs is not None and is_united else next(iter(frames.values()))
    committers = {"out": make_committer(sink, plan.schema, "out", location, at, files_every_s)}
    if late_policy == "sink":
        if not plan.is_timed:
            raise BadArgument("late rows are those whose windows have closed, or that come after the watermark where "
                              "rows are taken in the order of time; the flow has neither", at=at)
        committers["late"] = make_committer(late, plan.late_schema, "late", location, at, files_every_s)
    reads = pa.schema([plan.source.arrow.field(name) for name in plan.reads])
    for input_name, columns in plan.reads_by_input.items():
        check_clocks([sources[input_name].arrow.field(column) for column in columns], frames[input_name].schema,
                     session_zone(stream.sparkSession), at)
    if error_policy == "sink":
        letters = dead_letter_schema(reads)
        committers["failed"] = make_committer(on_error, letters, "failed", location, at, files_every_s)
    types = arrow_schema(stream.schema, at, reads.names), reads
    spark_types, flow_types = map(with_origin, types) if plan.has_origin else types
    input = StreamInput(spark_types, flow_types, plan.scan_conditions, plan.skipped_time,
                        not is_united and are_columns_plain(stream.schema, reads.names))
    spec = StreamSpec(plan, input, committers, location, checked_partitions(partitions, at),
                      _trigger(trigger, stream, at), migration, at, name, files_every_s)
    with locating(at):
        return StreamJob(spec, stream)


def _frames(q: Flow, given: object, at: SourceLoc) -> dict[str, DataFrame]:
    """The stream of each input of a flow."""
    unbound_sources(q.op, at)
    frames = dataframes_of(inputs_of(q.op, at), given, at)
    for each in frames.values():
        _check_stream(each, at)
    return frames


def _policy(name: str, argument: object, policies: tuple[str, str], at: SourceLoc) -> str:
    """One of the policies, or "sink" for a sink."""
    if isinstance(argument, str) and argument not in policies:
        raise BadArgument(f"{name} has no such policy", at=at, found=repr(argument),
                          has=", ".join(map(repr, policies)) + ", or a sink")
    return argument if isinstance(argument, str) else "sink"


def _check_name(name: object, df: DataFrame, at: SourceLoc) -> None:
    if name is None:
        return
    if not isinstance(name, str) or not name.strip():
        raise BadArgument("name takes a text that is not empty", at=at, found=repr(name))
    if any(query.name == name for query in df.sparkSession.streams.active):
        raise BadArgument(f"a query with the name {name!r} is active in this session", at=at,
                          hint="stop that one first, or give another name")


def _check_stream(df: object, at: SourceLoc) -> None:
    if not getattr(df, "isStreaming", False):
        raise BadArgument("start takes a streaming DataFrame", at=at,
                          found="a batch DataFrame" if hasattr(df, "isStreaming") else type_name(df),
                          hint="spark.readStream...; for other data use scalein.spark.apply(q, df)")
    if ".connect." in type(df).__module__:
        raise BadArgument("streams run in the driver's process, so Spark Connect cannot start them", at=at,
                          hint="use a session that is not remote")


def _trigger(argument: str | Mapping[str, object] | None, df: DataFrame, at: SourceLoc) -> dict[str, object]:
    """The arguments of Spark's `trigger`, checked by a writer that is not started."""
    from pyspark.errors import PySparkException

    if argument is None:
        return {}
    options = {"processingTime": argument} if isinstance(argument, str) else argument
    if not isinstance(options, Mapping) or len(options) != 1 or not set(options) <= {*_TRIGGERS}:
        raise BadArgument("no such trigger", at=at, found=repr(argument), has=", ".join(_TRIGGERS),
                          hint='for example {"availableNow": True}')
    try:
        df.writeStream.trigger(**options)  # type: ignore[call-overload]
    except PySparkException:
        raise BadArgument("Spark does not take this trigger", at=at, found=repr(argument),
                          hint='for example "5 seconds" or {"availableNow": True}') from None
    return dict(options)
