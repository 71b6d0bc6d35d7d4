"""apply: a whole flow on a DataFrame, cut where rows must meet.

The flow is cut into fragments (`exec/fragments.py`), each with a map and a reduce side (`map_reduce.py`). The reduce
side of one fragment and the map side of the next run in one Python task; between the two sides of a fragment stands
Spark's shuffle of blocks (`shuffle.py`):

    df -> filter, select -> [map] -> blocks -> repartition -> [reduce | map] -> ... -> df
          run by Spark

Blocks are partitioned by target; their number is Spark's own (`shuffle.shuffle_partitions`), and adaptive execution
coalesces small ones.
Without keys all blocks meet in one partition; an empty block is added, because the group of all rows exists even if
there is no row.

A plan is a list of `PendingFrame`s: a DataFrame and the steps that its rows still have to pass. The inputs of a union
stay separate until a shuffle, or the end, brings them together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from scalein.api.binding import by_name, inputs_of
from scalein.api.flow import Flow
from scalein.errors import NOWHERE, BadArgument, BadData, ScaleinError, SourceLoc, here, type_name
from scalein.exec.fragments import Fragment, SourceEdge, cut, fragments, over, placeholder
from scalein.ir import ops
from scalein.ir.exprs import Named
from scalein.ir.ops.join import as_written
from scalein.ir.physical import identity
from scalein.ir.rewrite import rewrite, walk_ops
from scalein.spark.batch.aggregate_in_spark import aggregate_in_spark
from scalein.spark.batch.filters import push_to_spark, quote_name
from scalein.spark.batch.outer_join import expand_outer_joins
from scalein.spark.batch.scan import (
    scan_all_by_key,
    scan_row_groups,
    scan_row_groups_by_key,
    scan_source,
)
from scalein.spark.batch.tasks import (
    CompleteAggregate,
    FromSpark,
    JoinBlocks,
    MapRows,
    ProcessBlocks,
    ReduceBlocks,
    ShuffleWrite,
    ShuffleWriteProcess,
    ShuffleWriteSide,
    Step,
    Task,
    ToSpark,
)
from scalein.spark.file_scan import FileScan, scan_of_dataframe
from scalein.spark.map_reduce import MapReduce
from scalein.spark.row_groups import RowGroups, coded_types
from scalein.spark.serialize import optimise, read_static_tables
from scalein.spark.shuffle import SHUFFLE_DDL, shuffle_partitions, target_ids
from scalein.spark.stream_joins import ShuffledJoin, with_join_columns
from scalein.spark.types import arrow_schema, check_clocks, check_input_schema, spark_arrow_schema, spark_schema
from scalein.spark.zones import session_zone
from scalein.state.key_groups import KEY_GROUPS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SORT_COLUMN = "__scalein_by{}"


@dataclass(frozen=True)
class PendingFrame:
    """A DataFrame, and the steps that its batches still have to pass."""

    df: DataFrame
    steps: tuple[Step, ...]
    is_plain: bool = False  # no step is left, and the rows are in Spark's types
    side: int = 0  # of a join of streams

    def then(self, step: Step) -> PendingFrame:
        return replace(self, steps=(*self.steps, step))

    def map_in_arrow(self, step: Step, schema: Any) -> DataFrame:
        """The DataFrame after all steps and a last one, in one task."""
        return self.df.mapInArrow(Task(*self.steps, step), schema)


def apply(q: Flow, df: DataFrame | Mapping[str, DataFrame]) -> DataFrame:
    """The flow `q` on all rows of a DataFrame, as a DataFrame: `df.transform(apply, q)` works as well.

    The flow begins with `si.flow(schema)`, where `schema` may be `df.schema`; a column that is missing or of another
    type is refused here. Nothing runs before an action, as with every DataFrame. Joined static tables are read now and
    sent with the plan; a right or outer join with one reads its left side twice, the second time for the keys that
    match.

    A flow of several inputs, such as a join of two streams, gets a DataFrame for each, by the names that
    `si.flow(schema, name="clicks")` gave them: `apply(q, {"clicks": clicks_df, "views": views_df})`. Joins of streams
    shuffle the rows of both sides by their keys; the rows of a task's keys must fit in its memory.

    Where a DataFrame is a scan of Parquet files that mean the same to both, perhaps with simple filters and a
    selection of columns, and is not cached, tasks read the files themselves. Otherwise Spark does the reading, the
    projection (columns that the flow does not need are not sent to Python), comparisons of a column with a constant in
    filters next to the input, and an aggregation next to it that means the same there: to send rows to Python costs
    more than to group them. In both cases it does the scheduling, the shuffle, of partial groups, and full sorts. All
    else is compiled, and runs in Spark's Python workers. Sums, counts, minima, maxima, means and distinct rows are
    aggregated before the shuffle. Aggregates that need all values (`n_unique`, `quantile`, `top_k`, `arg_max`, ...)
    send the columns that they read. `process` needs a watermark: then each task sorts the rows of its keys by their
    time, and rows of equal times come in any order.

    Spark's rows have no order of their own: `first`, `last`, `collect`, `limit` without `sort` and `distinct` of some
    columns are refused, and ties of `sort`, `top_k`, `arg_min`, `arg_max` and `join_asof` are broken arbitrarily.
    """
    at = here()
    if isinstance(df, Flow):
        q, df = df, q
    if not isinstance(q, Flow):
        raise BadArgument("apply takes a flow and a DataFrame", at=at, found=f"{type_name(q)} and {type_name(df)}")
    inputs = inputs_of(q.op, at)
    if not inputs:
        raise BadArgument("the flow has its data already", at=at,
                          hint="begin it with si.flow(df.schema), or use scalein.spark.run(flow, spark)")
    frames = dataframes_of(inputs, df, at)
    for each in frames.values():
        if not hasattr(each, "mapInArrow"):
            raise BadArgument("apply takes a Spark DataFrame", at=at, found=type_name(each),
                              hint="for other data, use q.collect(data)")
    return plan_flow(q.op, next(iter(frames.values())).sparkSession, frames, at)


def dataframes_of(inputs: Collection[str], given: Any, at: SourceLoc) -> dict[str, Any]:
    """The DataFrame of each input of a flow, by its name."""
    if len(inputs) == 1 and not isinstance(given, Mapping):
        return dict.fromkeys(inputs, given)
    return by_name(inputs, given, "DataFrame", at)


def plan_flow(op: ops.Op, spark: SparkSession, frames: Mapping[str, DataFrame], at: SourceLoc) -> DataFrame:
    """The DataFrame of a flow's rows; `frames` are its unbound inputs."""
    schema = op.schema.arrow
    op, found = bound_inputs(op, {name: df.schema for name, df in frames.items()}, at)
    scans: dict[str, FileScan] = {}
    for name, source in found.items():
        op, scan = over_files(op, source, scan_of_dataframe(frames[name]))
        if scan is not None:
            scans[name] = scan
    # Bounded input has no late rows.
    op = rewrite(op, lambda each: each.input if isinstance(each, ops.Watermark) else None)
    inputs = cut(expand_outer_joins(read_static_tables(with_join_columns(optimise(op)), at)))
    for name, df in frames.items():
        needed = [field for edge in inputs if edge.source.data is None and edge.source.name == name
                  for field in edge.source.schema.arrow]
        check_clocks([field for field in needed if field.name in df.columns], df.schema, session_zone(spark), at)
    return _Planner(spark, frames, scans, at).plan(inputs, schema)


def bound_inputs(op: ops.Op, structs: Mapping[str, Any], at: SourceLoc) -> tuple[ops.Op, dict[str, ops.Source]]:
    """The flow over the columns of DataFrames with these schemas, and the source of each input."""
    op = as_written(op)
    found: dict[str, ops.Source] = {}
    typed: dict[int, ops.Source] = {}
    for name, sources in inputs_of(op, at).items():
        found[name] = replace(sources[0], arrow=check_input_schema(sources[0].arrow, structs[name], at))
        typed.update({id(each): found[name] for each in sources})
    return rewrite(op, lambda each: typed.get(id(each))), found


def over_files(op: ops.Op, source: ops.Source, scan: FileScan | None) -> tuple[ops.Op, FileScan | None]:
    """The flow over the files that its DataFrame is a scan of, with dictionaries in columns of text with few different
    values; the flow itself, and None, if tasks cannot read the files.
    """
    if scan is None:
        return op, None
    whole, over_scan = source, op
    if scan.condition is not None:
        try:
            more = arrow_schema(scan.struct, NOWHERE, [name for name in scan.condition_reads
                                                       if name not in source.arrow.names])
            whole = replace(source, arrow=pa.schema([*source.arrow, *more]), columns=(*source.columns, *more.names))
            filtered = Flow(whole).filter(scan.condition).select(*source.columns).op
        except ScaleinError:  # a column or a constant of a type that flows do not have
            return op, None
        over_scan = rewrite(op, lambda each: filtered if each is source else None)
    reads = [each for each in walk_ops(optimise(over_scan)) if isinstance(each, ops.Source) and each.data is None
             and each.name == source.name]
    columns = dict.fromkeys(name for each in reads for name in each.columns)
    row_groups = scan.row_groups(pa.schema([whole.arrow.field(name) for name in columns]))
    if row_groups is None:
        return op, None
    coded = replace(whole, arrow=coded_types(whole.arrow, row_groups.coded))
    return rewrite(over_scan, lambda each: coded if each is whole else None), scan


class _Planner:
    """Plans the fragments of a flow, one after the other."""

    def __init__(self, spark: SparkSession, frames: Mapping[str, DataFrame], scans: Mapping[str, FileScan],
                 at: SourceLoc) -> None:
        """DataFrames, and those of them that are scans, are by the names of the flow's inputs."""
        self._spark, self._frames, self._scans, self._at = spark, frames, scans, at
        self._row_groups: dict[tuple[object, ...], RowGroups | None] = {}  # by input, columns and conditions

    def plan(self, inputs: list[SourceEdge], schema: pa.Schema) -> DataFrame:
        """The DataFrame of all fragments; each is planned when all its inputs are."""
        input_of = {id(first): input for input in inputs for first in input.firsts}
        pending: dict[int, list[PendingFrame]] = {}
        result: list[PendingFrame] = []
        for fragment in fragments(inputs):
            input = input_of[id(fragment)].source if id(fragment) in input_of else pending.pop(id(fragment))
            frames = self._plan_fragment(fragment, input)
            result = result if fragment.consumers else frames
            for consumer in fragment.consumers:
                if isinstance(consumer.state, ops.BufferedJoin):
                    side = ShuffledJoin(consumer).side_of(fragment.op.schema.names)
                    frames = [replace(frame, side=side) for frame in frames]
                pending.setdefault(id(consumer), []).extend(frames)
        sent_types, spark_types = spark_arrow_schema(schema, self._at), spark_schema(schema, self._at)
        return _union([frame.df if frame.is_plain else frame.map_in_arrow(ToSpark(sent_types), spark_types)
                       for frame in result])

    def _plan_fragment(self, fragment: Fragment, input: ops.Source | list[PendingFrame]) -> list[PendingFrame]:
        """The rows of a fragment, for its input: a source, or the frames of earlier fragments."""
        state = fragment.state
        if isinstance(state, ops.BufferedJoin):
            assert isinstance(input, list)
            return [self._join(input, ShuffledJoin(fragment))]
        if isinstance(state, ops.Sort) and state.count is None:
            if not fragment.consumers:
                return self._sort(fragment, state, input)
            # No op downstream depends on the order: those that would are refused.
            fragment = Fragment(over(fragment.op, state, state.input), fragment.input, None, fragment.consumers)
        if isinstance(input, ops.Source):
            frame = self._aggregate_in_spark(fragment, input) or self._plan_without_shuffle(fragment, input)
            if frame is not None:
                return [frame]
        frames, map_reduce = self._read(fragment, input)
        if map_reduce.kind == "rowwise":
            return [frame.then(MapRows(map_reduce)) for frame in frames]
        ids = self._target_ids(frames, map_reduce.keys)
        if map_reduce.kind == "process":
            blocks = [frame.map_in_arrow(ShuffleWriteProcess(map_reduce, ids), SHUFFLE_DDL) for frame in frames]
            return [self._shuffled(blocks, map_reduce.keys, ProcessBlocks(map_reduce.reduce_only))]
        return [self._shuffled([frame.map_in_arrow(ShuffleWrite(map_reduce, ids), SHUFFLE_DDL) for frame in frames],
                               map_reduce.keys, ReduceBlocks(map_reduce.reduce_only))]

    def _join(self, frames: list[PendingFrame], join: ShuffledJoin) -> PendingFrame:
        """The join of the frames of two sides."""
        keys = join.sides[0].keys
        ids = self._target_ids(frames, keys)
        blocks = [frame.map_in_arrow(ShuffleWriteSide(join, frame.side, ids), SHUFFLE_DDL) for frame in frames]
        return self._shuffled(blocks, keys, JoinBlocks(join))

    def _read(self, fragment: Fragment, input: ops.Source | list[PendingFrame]) -> tuple[list[PendingFrame], MapReduce]:
        """The frames that a fragment reads, and its map and reduce side."""
        if isinstance(input, list):
            return input, MapReduce(fragment)
        if input.data is not None:
            map_reduce = MapReduce(fragment)
            df, step = scan_source(input, map_reduce, self._spark, self._at)
            return [PendingFrame(df, (step,))], map_reduce
        map_reduce = MapReduce(fragment)
        if (row_groups := self._scanned(input, map_reduce)) is not None:
            df, step = scan_row_groups(row_groups, self._spark)
            return [PendingFrame(df, (step, FromSpark(_read_schema(input, map_reduce))))], map_reduce
        whole = self._frames[input.name]
        fragment, condition = push_to_spark(fragment, whole.schema)
        map_reduce = MapReduce(fragment)
        df = whole if condition is None else whole.filter(condition)
        steps = (FromSpark(_read_schema(input, map_reduce)),)
        return [PendingFrame(select_columns(df, map_reduce.reads), steps)], map_reduce

    def _scanned(self, source: ops.Source, map_reduce: MapReduce) -> RowGroups | None:
        """The row groups with the columns that `map_reduce` reads, if the DataFrame is a scan that tasks can read."""
        if (scan := self._scans.get(source.name)) is None:
            return None
        schema = _read_schema(source, map_reduce)
        wanted = (source.name, *schema.names, *map_reduce.scan_conditions)
        if wanted not in self._row_groups:
            self._row_groups[wanted] = scan.row_groups(schema, map_reduce.scan_conditions)
            if self._row_groups[wanted] is None and scan.condition is not None:
                raise BadData("files of the DataFrame have changed while the flow was planned", at=self._at)
        return self._row_groups[wanted]

    def _aggregate_in_spark(self, fragment: Fragment, source: ops.Source) -> PendingFrame | None:
        """The fragment with an aggregation of Spark's, if its rows come from the JVM and it means the same there."""
        state = fragment.state
        if source.data is not None or not isinstance(state, ops.Aggregate | ops.Distinct):
            return None
        if source.name in self._scans and self._scanned(source, MapReduce(fragment)) is not None:
            return None
        groups = aggregate_in_spark(fragment, self._frames[source.name])
        return None if groups is None else _downstream(fragment, state, groups)

    def _plan_without_shuffle(self, fragment: Fragment, source: ops.Source) -> PendingFrame | None:
        """The fragment with tasks that each read all files for the rows of their own keys, if a shuffle costs more."""
        if not isinstance(fragment.state, ops.Aggregate):
            return None
        map_reduce = MapReduce(fragment)
        if source.data is not None:
            read = scan_all_by_key(source, map_reduce, self._spark)
            return None if read is None else PendingFrame(read[0], (read[1], CompleteAggregate(map_reduce)))
        row_groups = self._scanned(source, map_reduce)
        read = None if row_groups is None else scan_row_groups_by_key(row_groups, map_reduce, self._spark)
        return None if read is None else PendingFrame(
            read[0], (read[1], FromSpark(_read_schema(source, map_reduce)), CompleteAggregate(map_reduce)))

    def _target_ids(self, frames: list[PendingFrame], keys: Sequence[str]) -> tuple[int, ...]:
        """The `target` of each partition after a shuffle of some frames."""
        if any(frame.df.isStreaming for frame in frames):
            raise BadArgument("apply aggregates and joins bounded DataFrames, and this one is a stream", at=self._at,
                              hint="use scalein.spark.start(q, stream_df, sink=..., checkpoint=...)")
        return target_ids(shuffle_partitions(self._spark))[:KEY_GROUPS] if keys else (0,)

    def _shuffled(self, blocks: list[DataFrame], keys: Sequence[str], reduce: Step) -> PendingFrame:
        """The rows of a reduce side, for the blocks of a map side."""
        if keys:
            shuffled = _union(blocks).repartition("target")
        else:
            empty = self._spark.range(0, 1, 1, 1).selectExpr(
                "cast(0 as int) target", "cast(0 as tinyint) kind", "cast('' as binary) block")
            shuffled = _union([*blocks, empty]).repartition(1)
        return PendingFrame(shuffled, (reduce,))

    def _sort(self, fragment: Fragment, sort: ops.Sort, input: ops.Source | list[PendingFrame]) -> list[PendingFrame]:
        """Rows sorted by Spark, then the ops downstream of the sort."""
        from pyspark.sql import functions

        items = [*identity(sort.schema), *(Named(_SORT_COLUMN.format(k), by.expr) for k, by in enumerate(sort.by))]
        before = ops.Project(sort.input, tuple(items))
        frames, map_reduce = self._read(Fragment(before, fragment.input, None), input)
        types = before.schema.arrow
        sent_types, spark_types = spark_arrow_schema(types, self._at), spark_schema(types, self._at)
        df = _union([frame.then(MapRows(map_reduce)).map_in_arrow(ToSpark(sent_types), spark_types)
                     for frame in frames])
        order = []
        for k, by in enumerate(sort.by):
            column = functions.col(_SORT_COLUMN.format(k))
            order.append({(False, False): column.asc_nulls_first, (False, True): column.asc_nulls_last,
                          (True, False): column.desc_nulls_first,
                          (True, True): column.desc_nulls_last}[by.descending, sort.nulls_last]())
        df = df.orderBy(*order)
        return [_downstream(fragment, sort, df)]


def _downstream(fragment: Fragment, state: ops.Op, rows: DataFrame) -> PendingFrame:
    """The ops downstream of one that Spark has computed; its rows have at least its columns."""
    names = state.schema.names
    if fragment.op is state and not fragment.consumers:
        from pyspark.sql import functions

        return PendingFrame(rows.select(*(functions.col(quote_name(name)) for name in names)), (), is_plain=True)
    steps: tuple[Step, ...] = ()
    if fragment.op is not state:
        source = placeholder(state.schema)
        downstream = MapReduce(Fragment(over(fragment.op, state, source), source, None))
        names, steps = downstream.reads, (MapRows(downstream),)
    schema = pa.schema([state.schema.arrow.field(name) for name in names])
    return PendingFrame(select_columns(rows, names), (FromSpark(schema), *steps))


def _read_schema(source: ops.Source, map_reduce: MapReduce) -> pa.Schema:
    """The columns of a source that `map_reduce` reads."""
    return pa.schema([source.arrow.field(name) for name in map_reduce.reads])


def _union(frames: Sequence[DataFrame]) -> DataFrame:
    union = frames[0]
    for frame in frames[1:]:
        union = union.unionAll(frame)
    return union


def select_columns(df: DataFrame, names: Sequence[str]) -> DataFrame:
    """Some columns, in this order; all are renamed if mapInArrow would split a name at its dots."""
    from pyspark.sql import functions

    columns = [functions.col(quote_name(name)) for name in names]
    if not all(name.isidentifier() for name in names):
        columns = [column.alias(f"c{k}") for k, column in enumerate(columns)]
    return df.select(*columns)
