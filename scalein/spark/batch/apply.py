"""apply: a whole flow on a DataFrame, cut where rows must meet.

The flow is cut into segments (`jobs/segments.py`), each in two halves (`phases.py`). The second half of one and the
first of the next run in one Python task; between the halves stands Spark's shuffle of cells (`blobs.py`):

    df -> filter, select -> [first half] -> cells -> repartition -> [second half | first half] -> ... -> df
          left to Spark

Cells are partitioned by target, without a number of partitions, so that adaptive execution joins small ones. Without
keys all cells meet in one partition; an empty one is added, because a group of all rows is there even if no row is.

A plan is a list of `Part`s: a DataFrame and the steps its rows still have to pass. Those of a union stay apart until a
shuffle, or the end, brings them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from scalein.api.flow import Flow
from scalein.errors import BadArgument, SourceLoc, here, type_name
from scalein.ir import ops
from scalein.ir.exprs import Named
from scalein.ir.physical import identity
from scalein.ir.rewrite import rewrite, walk_ops
from scalein.jobs.fragments import Feed, Fragment, cut, fragments, over, placeholder
from scalein.spark.batch.filters import pulled, quoted
from scalein.spark.batch.scan import bound_rows, read_by_all, shuffle_partitions
from scalein.spark.batch.tasks import Entering, Leaving, Mapped, Received, Sent, Step, Task, Whole
from scalein.spark.phases import Phases
from scalein.spark.serialize import optimised, settled
from scalein.spark.shuffle import CELL_COLUMNS, KEY_GROUPS, placed
from scalein.spark.types import checked_schema, leaving_schema, spark_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_BY = "__scalein_by{}"


@dataclass(frozen=True)
class Part:
    """A DataFrame, and what its batches have to pass before they are the rows that are meant."""

    df: DataFrame
    steps: tuple[Step, ...]
    is_plain: bool = False  # the rows themselves, in Spark's types

    def through(self, step: Step) -> Part:
        return replace(self, steps=(*self.steps, step))

    def mapped(self, step: Step, schema: Any) -> DataFrame:
        """All steps and a last one, in one task."""
        return self.df.mapInArrow(Task(*self.steps, step), schema)


def apply(q: Flow, df: DataFrame) -> DataFrame:
    """The flow `q` on all rows of a DataFrame, as a DataFrame: `df.transform(lambda df: apply(q, df))` works as well.

    The flow begins with `si.flow(schema)`, where `schema` may be `df.schema`; a column that is missing or of another
    type is refused here. Nothing runs before an action, as with every DataFrame. Joins are with static tables, which
    are read now and travel with the plan.

    What stays with Spark: reading, caching and scheduling, of course; the choice of columns (those that the flow does
    not need do not cross the border to Python); comparisons of a column with a constant in filters that stand next to
    the input; the shuffle, of partial groups; and full sorts. All else is compiled, and runs in Spark's Python workers.
    Sums, counts, minima, maxima, means and distinct rows are aggregated before the shuffle. Aggregates that need all
    values (`n_unique`, `quantile`, `top_k`, `arg_max`, ...) send the columns that they read.

    Spark's rows have no order of their own: `first`, `last`, `collect`, `limit` without `sort` and `distinct` of some
    columns are refused, and ties of `sort`, `top_k`, `arg_min` and `arg_max` are decided by chance.
    """
    at = here()
    if not isinstance(q, Flow):
        raise BadArgument("apply takes a flow and a DataFrame, in this order", at=at, found=type(q).__name__)
    if not hasattr(df, "mapInArrow"):
        raise BadArgument("apply takes a Spark DataFrame", at=at, found=type_name(df),
                          hint="of other data, use q.collect(data)")
    waiting = {id(below): below for below in walk_ops(q.op) if isinstance(below, ops.Source) and below.data is None}
    if not waiting:
        raise BadArgument("the flow has its data already", at=at,
                          hint="begin it with si.flow(df.schema), or use scalein.spark.run(flow, spark)")
    if len(waiting) > 1:
        raise BadArgument("the flow waits for more than one input", at=at, found=f"{len(waiting)} unbound inputs",
                          hint="bind all but one with from_arrow or a reader")
    return planned(q.op, df.sparkSession, df, at)


def planned(op: ops.Op, spark: SparkSession, df: DataFrame | None, at: SourceLoc) -> DataFrame:
    """The DataFrame of a flow's rows; `df` is the input of the source that has no data."""
    schema = op.schema.arrow
    if df is not None:
        source = next(each for each in walk_ops(op) if isinstance(each, ops.Source) and each.data is None)
        known = replace(source, arrow=checked_schema(source.arrow, df.schema, at))
        op = rewrite(op, lambda below: known if below is source else None)
    op = rewrite(op, lambda below: below.input if isinstance(below, ops.Watermark) else None)  # nothing is late here
    feeds = cut(settled(optimised(op), at))
    return _Planner(spark, df, at).whole(feeds, schema)


class _Planner:
    """Parts of the result, segment by segment."""

    def __init__(self, spark: SparkSession, df: DataFrame | None, at: SourceLoc) -> None:
        self._spark, self._df, self._at = spark, df, at

    def whole(self, feeds: list[Feed], schema: pa.Schema) -> DataFrame:
        """All segments, each when all parts that it waits for are there."""
        feed_of = {id(feed.first): feed for feed in feeds}
        waiting: dict[int, list[Part]] = {}
        result: list[Part] = []
        for segment in fragments(feeds):
            given = feed_of[id(segment)].source if id(segment) in feed_of else waiting.pop(id(segment))
            parts = self._through(segment, given)
            result = parts if segment.then is None else result
            if segment.then is not None:
                waiting.setdefault(id(segment.then), []).extend(parts)
        wanted, spark_types = leaving_schema(schema, self._at), spark_schema(schema, self._at)
        return _union([part.df if part.is_plain else part.mapped(Leaving(wanted), spark_types) for part in result])

    def _through(self, segment: Fragment, given: ops.Source | list[Part]) -> list[Part]:
        """The rows of a segment for those of its input: a source, or parts."""
        state = segment.state
        if isinstance(state, ops.Sort) and state.count is None:
            if segment.then is None:
                return self._sorted(segment, state, given)
            # Nothing behind it looks at the order: whatever would is refused.
            segment = Fragment(over(segment.op, state, state.input), segment.input, None, segment.then)
        if isinstance(given, ops.Source) and (whole := self._without_shuffle(segment, given)) is not None:
            return [whole]
        parts, phases = self._entered(segment, given)
        if phases.kind == "rowwise":
            return [part.through(Mapped(phases)) for part in parts]
        if any(part.df.isStreaming for part in parts):
            raise BadArgument("apply aggregates bounded DataFrames, and this one is a stream", at=self._at,
                              hint="use scalein.spark.start(q, stream_df, sink=..., checkpoint=...)")
        return [self._shuffled(parts, phases)]

    def _entered(self, segment: Fragment, given: ops.Source | list[Part]) -> tuple[list[Part], Phases]:
        """The phases of a segment, and the parts that they take."""
        if isinstance(given, list):
            return given, Phases(segment)
        if given.data is not None:
            phases = Phases(segment)
            df, step = bound_rows(given, phases, self._spark, self._at)
            return [Part(df, (step,))], phases
        assert self._df is not None
        segment, condition = pulled(segment, self._df.schema)
        phases = Phases(segment)
        df = self._df if condition is None else self._df.filter(condition)
        schema = pa.schema([given.arrow.field(name) for name in phases.reads])
        return [Part(chosen(df, phases.reads), (Entering(schema),))], phases

    def _without_shuffle(self, segment: Fragment, source: ops.Source) -> Part | None:
        """A segment each of whose tasks reads all files for the rows of its own keys, if that costs less."""
        if source.data is None or not isinstance(segment.state, ops.Aggregate):
            return None
        phases = Phases(segment)
        read = read_by_all(source, phases, self._spark)
        return None if read is None else Part(read[0], (read[1], Whole(phases)))

    def _shuffled(self, parts: list[Part], phases: Phases) -> Part:
        places = placed(shuffle_partitions(self._spark))[:KEY_GROUPS] if phases.keys else (0,)
        cells = [part.mapped(Sent(phases, places), CELL_COLUMNS) for part in parts]
        if phases.keys:
            whole = _union(cells).repartition("target")
        else:
            empty = self._spark.range(0, 1, 1, 1).selectExpr(
                "cast(0 as int) target", "cast(0 as tinyint) kind", "cast('' as binary) blob")
            whole = _union([*cells, empty]).repartition(1)
        return Part(whole, (Received(phases.second),))

    def _sorted(self, segment: Fragment, sort: ops.Sort, given: ops.Source | list[Part]) -> list[Part]:
        """Rows in Spark's order of the columns that they are sorted by, then through the ops behind the sort."""
        from pyspark.sql import functions

        names = sort.schema.names
        items = [*identity(sort.schema), *(Named(_BY.format(k), by.expr) for k, by in enumerate(sort.by))]
        before = ops.Project(sort.input, tuple(items))
        parts, phases = self._entered(Fragment(before, segment.input, None, None), given)
        types = before.schema.arrow
        wanted, spark_types = leaving_schema(types, self._at), spark_schema(types, self._at)
        df = _union([part.through(Mapped(phases)).mapped(Leaving(wanted), spark_types) for part in parts])
        order = []
        for k, by in enumerate(sort.by):
            column = functions.col(_BY.format(k))
            order.append({(False, False): column.asc_nulls_first, (False, True): column.asc_nulls_last,
                          (True, False): column.desc_nulls_first,
                          (True, True): column.desc_nulls_last}[by.descending, sort.nulls_last]())
        df = df.orderBy(*order)
        if segment.op is sort:
            return [Part(df.select(*(functions.col(quoted(name)) for name in names)), (), is_plain=True)]
        source = placeholder(sort.schema)
        behind = Phases(Fragment(over(segment.op, sort, source), source, None, None))
        schema = pa.schema([sort.schema.arrow.field(name) for name in behind.reads])
        return [Part(chosen(df, behind.reads), (Entering(schema), Mapped(behind)))]


def _union(parts: Sequence[DataFrame]) -> DataFrame:
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.unionAll(part)
    return whole


def chosen(df: DataFrame, names: Sequence[str]) -> DataFrame:
    """Some columns, in this order; where mapInArrow would take a name apart, all get others: nobody looks."""
    from pyspark.sql import functions

    columns = [functions.col(quoted(name)) for name in names]
    if not all(name.isidentifier() for name in names):
        columns = [column.alias(f"c{k}") for k, column in enumerate(columns)]
    return df.select(*columns)
