"""Flow: the fluent API. Each method resolves its expressions against the schema and adds one op, nothing more.

A flow is immutable: a method gives a new one, and a flow may be used in several. What is wrong with a call is
raised by that call; only what depends on the data waits for `collect`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, Self

import pyarrow as pa

from scalein.api import hints
from scalein.api.arguments import (
    Keys,
    Order,
    as_item,
    asof_join,
    distinct,
    distinct_in_time,
    explode,
    first_rows,
    flat,
    join,
    projected_to,
    row_expr,
    row_outputs,
    sort,
    stream_join,
    unnest,
    with_overs,
)
from scalein.api.binding import Queries, as_schema, bind, source
from scalein.api.column import Column, count
from scalein.api.groupby import GroupBy, group
from scalein.api.hints import ForeignNames
from scalein.api.windows import WindowSpec
from scalein.cancellation import handle_interrupts
from scalein.connectors.in_memory import of_arrow
from scalein.dtypes import BOOL, Kind
from scalein.durations import Duration, in_units, span
from scalein.errors import BadArgument, BadName, WrongType, here, locating
from scalein.ir import ops
from scalein.ir.exprs import Call, Col, Expr, Named, type_of
from scalein.ir.internal_names import refuse_internal
from scalein.ir.literals import as_dtype
from scalein.ir.physical import identity
from scalein.ir.printer import dump
from scalein.ir.resolve import Scope, column, resolve, shown
from scalein.ir.rewrite import stacked, stream_path
from scalein.options import Options

if TYPE_CHECKING:
    from scalein.api.graph import Graph
    from scalein.api.start import FlowOutput
    from scalein.connectors.sinks.file_writers import WriteFormat
    from scalein.jobs.job import Job

LEVELS = ("logical", "fused", "llvm", "asm")


class Flow(ForeignNames):
    """A dataflow: where rows come from, and what happens to them. Nothing runs before `collect` or `batches`.

    >>> import pyarrow as pa, scalein as si
    >>> from scalein import col
    >>> si.from_arrow(pa.table({"x": [1, 2, 3]})).filter(col("x") > 1).select(y=col("x") * 10).collect().to_pydict()
    {'y': [20, 30]}
    """

    __slots__ = ("_queries", "op")
    _called, _elsewhere = "a Flow", hints.FLOW

    def __init__(self, op: ops.Op) -> None:
        if op.names_columns:
            refuse_internal(op.schema.names, op.at)
        handle_interrupts()
        self.op = op
        self._queries = Queries(op)

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the result.

        >>> import scalein as si
        >>> si.from_arrow({"x": [1]}).with_columns(y=si.col("x") / 2).schema.field("y").type
        DataType(double)
        """
        return self.op.schema.arrow

    @property
    def columns(self) -> list[str]:
        """The names of the result's columns, in order.

        >>> import scalein as si
        >>> si.from_arrow({"x": [1]}).with_columns(y=si.col("x") / 2).columns
        ['x', 'y']
        """
        return self.op.schema.names

    def __repr__(self) -> str:
        return f"Flow\n{dump(self.op)}"

    def _repr_html_(self) -> str:
        from html import escape

        rows = "".join(f"<tr><td>{escape(f.name)}</td><td>{escape(repr(f.dtype))}</td>"
                       f"<td>{'yes' if f.nullable else 'no'}</td></tr>" for f in self.op.schema)
        head = "<tr><th>column</th><th>type</th><th>nullable</th></tr>"
        return f"<table>{head}{rows}</table><pre>{escape(dump(self.op))}</pre>"

    def _scope(self, step: str) -> Scope:
        return Scope(self.op.schema, step, here(self.op.at))

    # --- row by row ---

    def filter(self, *predicates: Column | str | Sequence[Column | str]) -> Flow:
        """The rows for which every predicate is true; null counts as false.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"x": [1, None, 3], "ok": [True, True, False]}))
        >>> flow.filter(col("x") > 0, "ok").collect().to_pydict()
        {'x': [1], 'ok': [True]}
        """
        scope = self._scope("filter")
        conditions = flat(predicates)
        op, scope = with_overs(self.op, conditions, scope)
        if not conditions:
            raise BadArgument("filter needs a condition", at=scope.at, hint='for example col("x") > 1')
        whole: Expr | None = None
        for given in conditions:
            condition = _condition(given, scope)
            whole = condition if whole is None else Call(
                "and", (whole, condition), dtype=BOOL, nullable=whole.nullable or condition.nullable, at=scope.at)
        assert whole is not None
        kept = ops.Filter(op, whole, at=scope.at)
        return Flow(kept if op is self.op else ops.Project(kept, identity(self.op.schema), at=scope.at))

    def select(self, *columns: Column | str | Sequence[Column | str], **named: object) -> Flow:
        """Only these columns, in this order: names, expressions, lists of them, and `name=expression`.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> si.from_arrow(pa.table({"x": [1, 2], "y": [3, 4]})).select("y", s=col("x") + col("y")).columns
        ['y', 's']
        """
        scope = self._scope("select")
        op, scope = with_overs(self.op, (*flat(columns), *named.values()), scope)
        items = row_outputs(columns, named, scope)
        if not items:
            raise BadArgument("select needs at least one column", at=scope.at, has=shown(scope.schema))
        return Flow(ops.Project(op, tuple(items), at=scope.at))

    def with_columns(self, *columns: Column | str | Sequence[Column | str], **named: object) -> Flow:
        """All columns, and these: one of a name that exists takes its place, new ones follow at the end.

        All expressions see the columns as they were before.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> si.from_arrow(pa.table({"x": [1, 2]})).with_columns(col("x") * 2, y=col("x")).collect().to_pydict()
        {'x': [2, 4], 'y': [1, 2]}
        """
        scope = self._scope("with_columns")
        op, scope = with_overs(self.op, (*flat(columns), *named.values()), scope)
        new = {item.name: item for item in row_outputs(columns, named, scope)}
        if not new:
            raise BadArgument("with_columns needs at least one column", at=scope.at)
        kept = [new.pop(name, Named(name, column(name, scope))) for name in self.columns]
        return Flow(ops.Project(op, (*kept, *new.values()), at=scope.at))

    def drop(self, *names: str | Sequence[str]) -> Flow:
        """All columns but these.

        >>> import scalein as si
        >>> si.from_arrow({"x": [1], "y": [2], "z": [3]}).drop("x", "z").columns
        ['y']
        """
        scope = self._scope("drop")
        gone = {column(_name(name, scope), scope).name for name in flat(names)}
        if not gone:
            raise BadArgument("drop needs at least one name", at=scope.at)
        if len(gone) == len(self.columns):
            raise BadArgument("drop would leave no column", at=scope.at, has=shown(scope.schema))
        items = [Named(name, column(name, scope)) for name in self.columns if name not in gone]
        return Flow(ops.Project(self.op, tuple(items), at=scope.at))

    def rename(self, names: Mapping[str, str]) -> Flow:
        """The same columns under new names: `rename({"old": "new"})`.

        >>> import scalein as si
        >>> si.from_arrow({"x": [1], "y": [2]}).rename({"x": "z"}).collect().to_pydict()
        {'z': [1], 'y': [2]}
        """
        scope = self._scope("rename")
        if not isinstance(names, Mapping) or not names:
            raise BadArgument("rename takes a dict of old and new names", at=scope.at, found=repr(names))
        new = {column(_name(old, scope), scope).name: _name(to, scope) for old, to in names.items()}
        given = {new.get(name, name): name for name in self.columns}
        if len(given) < len(self.columns):
            twice = next(name for name in given if [new.get(n, n) for n in self.columns].count(name) > 1)
            raise BadName(f"two columns would be called {twice!r} after rename", at=scope.at, has=shown(scope.schema),
                          hint="drop or rename the other one as well")
        items = [Named(name, column(old, scope)) for name, old in given.items()]
        return Flow(ops.Project(self.op, tuple(items), at=scope.at))

    def cast(self, types: Mapping[str, object]) -> Flow:
        """The same columns, some with another type: `cast({"price": "float32"})`; see `Column.cast`.

        >>> import scalein as si
        >>> si.from_arrow({"x": [1, 2], "y": ["3", "4"]}).cast({"y": "int64"}).collect().to_pydict()
        {'x': [1, 2], 'y': [3, 4]}
        """
        scope = self._scope("cast")
        if not isinstance(types, Mapping) or not types:
            raise BadArgument("cast takes a dict of names and types", at=scope.at, found=repr(types))
        target = {column(_name(name, scope), scope).name: as_dtype(given, scope.at) for name, given in types.items()}
        items = [Named(name, resolve(Call("cast", (Col(name),), dtype=target[name], at=scope.at), scope)
                       if name in target else column(name, scope)) for name in self.columns]
        return Flow(ops.Project(self.op, tuple(items), at=scope.at))

    def limit(self, count: int) -> Flow:
        """The first `count` rows in the source's order.

        >>> import scalein as si
        >>> si.from_arrow({"x": [3, 1, 2]}).limit(2).collect().to_pydict()
        {'x': [3, 1]}
        """
        return self._limit(count, "limit")

    def head(self, n: int = 5) -> Flow:
        """The first `n` rows, to look at: `limit` with a default.

        >>> import scalein as si
        >>> si.from_arrow({"x": list(range(100))}).head(3).collect().to_pydict()
        {'x': [0, 1, 2]}
        """
        return self._limit(n, "head")

    def _limit(self, count: int, step: str) -> Flow:
        at = here(self.op.at)
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < 2**63:
            raise BadArgument(f"{step} takes a number of rows, 0 or more", at=at, found=repr(count))
        return Flow(ops.Limit(self.op, count, at=at))

    # --- some rows, in some order ---

    def distinct(self, *names: str | Sequence[str], within: Duration | None = None,
                 ttl: Duration | None = None) -> Flow:
        """Rows unlike any before them; with names, the first row of each value of these columns.

        Rows keep the source's order. Null is a value of its own.

        >>> import pyarrow as pa, scalein as si
        >>> flow = si.from_arrow(pa.table({"user": ["b", "a", "b"], "page": [1, 2, 3]}))
        >>> flow.distinct("user").collect().to_pydict()
        {'user': ['b', 'a'], 'page': [1, 2]}

        With `within="1h"` a row comes again once an hour of event time, that of `with_watermark`, has passed since the
        last one that came with its values; in a job rows come when the watermark has passed them, and what is older
        than an hour is forgotten. Rows without a time are dropped.

        >>> visits = si.from_arrow({"user": ["a", "a", "a"], "t": [0, 5, 12]}).with_watermark("t", 2)
        >>> visits.distinct("user", within=10).collect()["t"].to_pylist()
        [0, 12]

        With `ttl="1h"` values are forgotten that no row had for an hour of event time: where `within` counts from the
        last row that came out, `ttl` counts from the last row.

        >>> visits = si.from_arrow({"user": ["a", "a", "a", "a"], "t": [0, 6, 12, 22]}).with_watermark("t", 2)
        >>> visits.distinct("user", ttl=10).collect()["t"].to_pylist()
        [0, 22]
        """
        scope = self._scope("distinct")
        if within is None and ttl is None:
            return Flow(distinct(self.op, names, scope))
        return Flow(distinct_in_time(self.op, names, within, ttl, scope))

    def sort(self, *by: Column | str | Sequence[Column | str], descending: bool | Sequence[bool] = False,
             nulls_last: bool = False) -> Flow:
        """All rows in order; ties keep the source's order, and what follows row by row keeps this one.

        `descending` may be a list, one for each column. Nulls come first, or last with `nulls_last`, whatever the
        direction; NaN is the greatest. `limit` after it finds the first rows without sorting the others.

        >>> import pyarrow as pa, scalein as si
        >>> flow = si.from_arrow(pa.table({"shop": ["b", "a", "b"], "price": [3, 2, 5]}))
        >>> flow.sort("shop", "price", descending=[False, True]).collect().to_pydict()
        {'shop': ['a', 'b', 'b'], 'price': [2, 5, 3]}
        """
        return Flow(sort(self.op, by, descending, nulls_last, self._scope("sort")))

    def top_k(self, k: int, by: Order) -> Flow:
        """The `k` rows with the greatest `by` (a column or a list of them), greatest first, nulls last.

        Ties are decided by the source's order. Never more than `k` rows and a batch are held.

        >>> import pyarrow as pa, scalein as si
        >>> flow = si.from_arrow(pa.table({"shop": ["a", "b", "c"], "price": [3, None, 5]}))
        >>> flow.top_k(2, "price").collect().to_pydict()
        {'shop': ['c', 'a'], 'price': [5, 3]}
        """
        return Flow(first_rows(self.op, k, by, True, self._scope("top_k")))

    def bottom_k(self, k: int, by: Order) -> Flow:
        """The `k` rows with the least `by`, least first, nulls last; otherwise like `top_k`.

        >>> import pyarrow as pa, scalein as si
        >>> flow = si.from_arrow(pa.table({"shop": ["a", "b", "c"], "price": [3, None, 5]}))
        >>> flow.bottom_k(1, "price").collect().to_pydict()
        {'shop': ['a'], 'price': [3]}
        """
        return Flow(first_rows(self.op, k, by, False, self._scope("bottom_k")))

    def map_batches(self, fn: Callable[[pa.RecordBatch], pa.RecordBatch], schema: object) -> Flow:
        """What a Python function makes of each Arrow batch; `schema` says what that will be.

        The number of rows may change. Batches may be cut anywhere, so the function must not rely on their size.

        >>> import pyarrow as pa, pyarrow.compute as pc, scalein as si
        >>> def lengths(batch):
        ...     return pa.record_batch({"n": pc.list_value_length(batch["tags"])})
        >>> flow = si.from_arrow(pa.table({"tags": [["a"], [], ["b", "c"]]}))
        >>> flow.map_batches(lengths, pa.schema({"n": pa.int32()})).collect().to_pydict()
        {'n': [1, 0, 2]}
        """
        at = here(self.op.at)
        if not callable(fn):
            raise BadArgument("map_batches takes a function of a record batch", at=at, found=repr(fn))
        return Flow(ops.MapBatches(self.op, fn, as_schema(schema, "map_batches", at), at=at))

    def explode(self, *columns: str | Sequence[str]) -> Flow:
        """A row for each element of a list column, in order; the other columns repeat.

        A null or empty list gives no row. Several columns are exploded side by side: the lists of a row must have one
        length.

        >>> import pyarrow as pa, scalein as si
        >>> flow = si.from_arrow(pa.table({"user": ["a", "b"], "tags": [["x", "y"], []], "n": [[1, 2], None]}))
        >>> flow.explode("tags").select("user", "tags").collect().to_pydict()
        {'user': ['a', 'a'], 'tags': ['x', 'y']}
        >>> flow.explode("tags", "n").collect().to_pydict()
        {'user': ['a', 'a'], 'tags': ['x', 'y'], 'n': [1, 2]}
        """
        return Flow(explode(self.op, columns, self._scope("explode")))

    def unnest(self, *columns: str | Sequence[str]) -> Flow:
        """The fields of struct columns as columns of their own, in the struct's place; null where the struct is null.

        >>> import scalein as si
        >>> flow = si.from_arrow({"id": [1, 2], "at": [{"x": 3, "y": 4}, None]})
        >>> flow.unnest("at").collect().to_pydict()
        {'id': [1, 2], 'x': [3, None], 'y': [4, None]}
        """
        return Flow(unnest(self.op, columns, self._scope("unnest")))

    # --- several inputs ---

    def union(self, *others: object) -> Flow:
        """The rows of this flow, then those of the others; all have the same names and types.

        >>> import scalein as si
        >>> one, other = si.from_arrow({"x": [1, 2]}), si.from_arrow({"x": [3]})
        >>> one.union(other).collect().to_pydict()
        {'x': [1, 2, 3]}
        """
        at = here(self.op.at)
        if not others:
            raise BadArgument("union needs another flow", at=at)
        if any(isinstance(item, Flow) for other in others if isinstance(other, list | tuple) for item in other):
            raise BadArgument("union takes flows, not a list of them", at=at, hint="flow.union(*others)")
        first = self.op.schema
        rest = (projected_to(_as_op(other), first, number, at) for number, other in enumerate(others, 2))
        return Flow(ops.Union((self.op, *rest), at=at))

    def join(self, other: object, on: Keys | None = None, *, left_on: Keys | None = None,
             right_on: Keys | None = None, how: str = "inner", within: WindowSpec | None = None,
             between: tuple[Duration, Duration] | None = None, keep: Duration | None = None) -> Flow:
        """Each row with the matching rows of a static table or of another stream: a flow, or anything that
        `from_arrow` takes.

        `how` is "inner", "left", "right", "outer", "semi" (rows with a match, once), "anti" (rows without one), or
        "cross" (every pair of rows, without keys). The result has the left columns, then the right ones except the
        keys; a name that both have gets `_right`. Null matches nothing.

        "right" and "outer" keep the table's rows without a match: they come last, and the left key columns hold their
        keys. So the flow must end: jobs over endless input refuse them.

        >>> import pyarrow as pa, scalein as si
        >>> ads = pa.table({"ad": [1, 2], "campaign": ["a", "b"]})
        >>> views = si.from_arrow(pa.table({"ad": [2, 2, 3]}))
        >>> views.join(ads, on="ad").collect().to_pydict()
        {'ad': [2, 2], 'campaign': ['b', 'b']}
        >>> views.join(ads, on="ad", how="outer").collect().to_pydict()
        {'ad': [2, 2, 3, 1], 'campaign': ['b', 'b', None, 'a']}

        Two streams are joined by key and time. `within=si.tumbling("t", "10s")` joins rows of the same window, and adds
        `window_start` and `window_end`. `between=("-5s", "5s")` has the limits of the other's event time minus ours,
        both included; event times are those of `with_watermark` on each side. `keep="1h"` is the same as
        `between=("-1h", "1h")`, `keep="forever"` retains all rows of both. Rows without a time take no part. In a job
        pairs are emitted as soon as both are there, rows without a match when the watermark says that none can come.

        >>> bids = si.from_arrow({"ad": [1, 1, 2], "t": [0, 9, 20]}).with_watermark("t", 5)
        >>> clicks = si.from_arrow({"ad": [1, 2], "t": [3, 40]}).with_watermark("t", 5)
        >>> sorted(bids.join(clicks, on="ad", between=(-6, 6)).collect()["t"].to_pylist())
        [0, 9]
        >>> bids.join(clicks, on="ad", within=si.tumbling("t", 5)).collect().to_pydict()
        {'ad': [1], 't': [0], 't_right': [3], 'window_start': [0], 'window_end': [5]}
        """
        at = here(self.op.at)
        if within is None and between is None and keep is None:
            return Flow(join(self.op, _as_op(other), on, left_on, right_on, how, at))
        return Flow(stream_join(self.op, _as_op(other), (on, left_on, right_on), how, within=within, between=between,
                                keep=keep, at=at))

    def join_asof(self, other: object, on: str, by: Keys | None = None, *, tolerance: Duration | None = None,
                  strategy: str = "backward") -> Flow:
        """Each row with the row of the other side that has the same `by` and the nearest time `on`: the last one that
        is not later ("backward"), the first one that is not earlier ("forward"), or either of them ("nearest", the
        earlier one if both are as near). Of equal times it is the last row.

        `tolerance` is the longest time between the two. A row without a match has nulls; one without a time is
        dropped. The result has the left columns, then the right ones except `on` and `by`.

        >>> import scalein as si
        >>> trades = si.from_arrow({"k": ["a", "a", "b"], "t": [5, 20, 7]})
        >>> quotes = si.from_arrow({"k": ["a", "a", "b"], "t": [1, 19, 9], "quote": [10, 11, 12]})
        >>> trades.join_asof(quotes, on="t", by="k").collect().to_pydict()
        {'k': ['a', 'a', 'b'], 't': [5, 20, 7], 'quote': [10, 11, None]}
        """
        at = here(self.op.at)
        return Flow(asof_join(self.op, _as_op(other), on, by, tolerance, strategy, at))

    # --- groups and time ---

    def group_by(self, *keys: Column | str | WindowSpec | Sequence[Column | str | WindowSpec],
                 **named: object) -> GroupBy:
        """Groups of rows with equal keys: names, expressions, lists of them, and at most one window. `agg` follows.

        Without keys all rows are one group, even if there are none.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> flow = si.from_arrow(pa.table({"t": [1, 5, 12], "v": [1, 2, 3]}))
        >>> flow.group_by(si.tumbling("t", 10)).agg(s=col("v").sum()).columns
        ['window_start', 'window_end', 's']
        """
        return group(self.op, keys, named, Flow)

    def with_watermark(self, time: str, delay: Duration) -> Flow:
        """The same rows, with event time: in a job, no row is more than `delay` behind the latest one.

        The watermark, the latest time less `delay`, closes windows. It advances between batches, over times at most a
        day apart: a row after a longer gap is an outlier, as of a wrong clock, and does not advance it, unless most
        rows of three batches in a row are outliers. `collect` ignores it.

        >>> import pyarrow as pa, scalein as si
        >>> flow = si.from_arrow(pa.table({"t": [1, 5, 12]})).with_watermark("t", 2)
        >>> flow.group_by(si.tumbling("t", 10)).agg(n=si.count()).collect().num_rows
        2
        """
        scope = self._scope("with_watermark")
        dtype = type_of(column(_name(time, scope), scope))
        if not (dtype.kind is Kind.TS or dtype.is_int):
            raise WrongType(f"event time is a timestamp or an integer, but {time} is {dtype!r}", at=scope.at,
                            step=scope.step, has=shown(scope.schema))
        units = in_units(span(delay, "delay", scope.at, zero=True), dtype, "delay", time, scope.at)
        return Flow(ops.Watermark(self.op, time, units, at=scope.at))

    def named(self, name: str) -> Flow:
        """The same flow, with a name for its last step that has state: group_by, distinct, limit, sort, an outer join.

        A job finds the state of such a step in its checkpoint by this name, also after other steps were inserted,
        dropped or put in another order. Steps without a name are found by their order.

        >>> import pyarrow as pa, scalein as si
        >>> clicks = si.from_arrow(pa.table({"user": ["a", "b", "a"]})).group_by("user").agg(n=si.count())
        >>> clicks.named("clicks").columns
        ['user', 'n']
        """
        at = here(self.op.at)
        if not isinstance(name, str) or not name:
            raise BadArgument("named takes the name of a step", at=at, found=repr(name))
        step = self.op
        while step.is_row_by_row:
            (step,) = step.streams
        if not isinstance(step, ops.Aggregate | ops.Distinct | ops.Limit | ops.OuterJoin | ops.Over | ops.Process
                          | ops.Sort | ops.StreamJoin):
            raise BadArgument("named() needs a step that has state", at=at, found=repr(name),
                              hint="name the flow after group_by, distinct, limit, sort or a join that has state")
        return Flow(stacked(stream_path(self.op, step), replace(step, name=name)))

    # --- running and looking ---

    def collect(self, data: object = None, *, workers: int | None = None, memory: str | int | None = None,
                cpu: str | None = None, deterministic: bool = False) -> pa.Table:
        """The whole result as a table. `data` is for flows that begin with `si.flow(schema)`.

        `memory="1GB"` limits what aggregations, sorts and joins hold; what is more goes to disk meanwhile. The rows of
        one group whose values are all needed (quantiles, lists), the table of a right or outer join, and the keys of
        `distinct` are held in memory, however many they are.

        Results do not depend on the number of workers, except that float sums may differ in rounding.
        `deterministic=True` makes them equal to the last bit for any number of workers over the same batches: where a
        flow has a sum or mean of floats, a variance, a correlation or a `udaf`, its aggregations run on one worker,
        with the steps that are fused into them. What else there is stays parallel.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> q = si.flow({"x": pa.int64()}).filter(col("x") > 1)
        >>> q.collect(pa.table({"x": [1, 2]})).to_pydict()
        {'x': [2]}
        """
        at = here(self.op.at)
        options = Options.make(workers=workers, memory=memory, cpu=cpu, deterministic=deterministic, at=at)
        query, given = self._queries.of(data, at)
        return query.collect(options, given)

    def batches(self, data: object = None, *, workers: int | None = None, memory: str | int | None = None,
                cpu: str | None = None, deterministic: bool = False) -> Iterator[pa.RecordBatch]:
        """The result batch by batch, as it is computed; the options are those of `collect`.

        >>> import scalein as si
        >>> flow = si.from_arrow({"x": list(range(10))}).filter(si.col("x") > 6)
        >>> sum(batch.num_rows for batch in flow.batches())
        3
        """
        at = here(self.op.at)
        options = Options.make(workers=workers, memory=memory, cpu=cpu, deterministic=deterministic, at=at)
        query, given = self._queries.of(data, at)
        return query.batches(options, given)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """The result as an Arrow stream, for `pa.table(flow)`, `pl.DataFrame(flow)`, DuckDB and others.

        The flow runs while the stream is read, each time anew. The protocol carries errors as text: they are raised by
        the library that reads, as an exception of its own.

        >>> import pyarrow as pa, scalein as si
        >>> pa.table(si.from_arrow({"x": [1, 2, 3]}).filter(si.col("x") > 1)).to_pydict()
        {'x': [2, 3]}
        """
        return pa.RecordBatchReader.from_batches(self.schema, self.batches()).__arrow_c_stream__(requested_schema)

    def count(self, data: object = None, *, workers: int | None = None, memory: str | int | None = None,
              cpu: str | None = None) -> int:
        """The number of rows. Only what decides about it is computed.

        >>> import scalein as si
        >>> si.from_arrow({"x": [1, 2, 3]}).filter(si.col("x") > 1).count()
        2
        """
        found = self.group_by().agg(count()).collect(data, workers=workers, memory=memory, cpu=cpu)
        return int(found["count"][0].as_py())

    def describe(self, data: object = None, *, workers: int | None = None, memory: str | int | None = None,
                 cpu: str | None = None) -> pa.Table:
        """Each column in nine numbers, in one pass: count, null_count, mean, std, min, 25%, 50%, 75%, max.

        Numbers and bools are described as float64, times as text; their quantiles are exact, so their values are held
        in memory. Text has its least and greatest value, nested columns have their counts.

        >>> import scalein as si
        >>> table = si.from_arrow({"x": [1, 2, 3, None], "s": ["b", "a", "c", "a"]}).describe()
        >>> table["statistic"].to_pylist()
        ['count', 'null_count', 'mean', 'std', 'min', '25%', '50%', '75%', 'max']
        >>> table["x"].to_pylist()
        [3.0, 1.0, 2.0, 1.0, 1.0, 1.5, 2.0, 2.5, 3.0]
        >>> table["s"].to_pylist()
        ['4', '0', None, None, 'a', None, None, None, 'c']
        """
        from scalein.api.describe import STATISTIC, describe

        if STATISTIC in self.columns:
            raise BadName(f"describe names its own column {STATISTIC!r}", at=here(),
                          hint="rename the other, or drop it")
        return describe(self.op.schema, self.batches(data, workers=workers, memory=memory, cpu=cpu))

    def write_parquet(self, path: object, data: object = None, *, workers: int | None = None,
                      memory: str | int | None = None, cpu: str | None = None) -> int:
        """Write the result to one Parquet file, and return its number of rows.

        The file is there when it is complete: rows go to a temporary file beside it, which takes its name at the end.
        Batches are written as they are computed, so the result may be larger than memory.

        >>> import scalein as si, tempfile
        >>> path = tempfile.mkdtemp() + "/x.parquet"
        >>> si.from_arrow({"x": [1, 2, 3]}).filter(si.col("x") > 1).write_parquet(path)
        2
        >>> si.read_parquet(path).collect().to_pydict()
        {'x': [2, 3]}
        """
        from scalein.connectors.sinks.file_writers import ParquetFiles

        return self._write(path, ParquetFiles(), "write_parquet", data, workers, memory, cpu)

    def write_ipc(self, path: object, data: object = None, *, workers: int | None = None,
                  memory: str | int | None = None, cpu: str | None = None) -> int:
        """Write the result to one Arrow IPC file; otherwise like `write_parquet`.

        >>> import scalein as si, tempfile
        >>> si.from_arrow({"x": [1, 2, 3]}).write_ipc(tempfile.mkdtemp() + "/x.arrow")
        3
        """
        from scalein.connectors.sinks.file_writers import IpcFiles

        return self._write(path, IpcFiles(), "write_ipc", data, workers, memory, cpu)

    def write_csv(self, path: object, data: object = None, *, workers: int | None = None,
                  memory: str | int | None = None, cpu: str | None = None) -> int:
        """Write the result to one CSV file with a line of names; otherwise like `write_parquet`.

        >>> import scalein as si, tempfile
        >>> path = tempfile.mkdtemp() + "/x.csv"
        >>> si.from_arrow({"x": [1, None], "s": ["a", "b,c"]}).write_csv(path)
        2
        >>> print(open(path).read().strip())
        "x","s"
        1,"a"
        ,"b,c"
        """
        from scalein.connectors.sinks.file_writers import CsvFiles

        return self._write(path, CsvFiles(), "write_csv", data, workers, memory, cpu)

    def write_json(self, path: object, data: object = None, *, workers: int | None = None,
                   memory: str | int | None = None, cpu: str | None = None) -> int:
        """Write the result to one file with a JSON object a line; otherwise like `write_parquet`.

        >>> import scalein as si, tempfile
        >>> path = tempfile.mkdtemp() + "/x.json"
        >>> si.from_arrow({"x": [1, None]}).write_json(path)
        2
        >>> print(open(path).read().strip())
        {"x":1}
        {"x":null}
        """
        from scalein.connectors.sinks.file_writers import JsonFiles

        return self._write(path, JsonFiles(), "write_json", data, workers, memory, cpu)

    def _write(self, path: object, format: WriteFormat, step: str, data: object, workers: int | None,
               memory: str | int | None, cpu: str | None) -> int:
        from scalein.connectors.sinks.single_file import file_path, write_file

        at = here()
        target = file_path(path, step, at)
        batches = self.batches(data, workers=workers, memory=memory, cpu=cpu)
        with locating(at):
            return write_file(target, format, self.schema, batches)

    def start(self, data: object = None, *, sink: object, checkpoint: object = None, every: Duration = "1s",
              emit: str = "final", late: object = "drop", on_error: object = "raise", workers: int | None = None,
              memory: str | int | None = None, max_rows_per_second: float | None = None, savepoint: object = None,
              bootstrap: Flow | None = None, until: str | None = None, restarts: int = 0,
              evolve: bool = False) -> Job:
        """Run the flow as a job, in the background: `wait()` for its end, `stop()` it, `scale(n)` it meanwhile.

        With a `checkpoint` directory, or the address of one on a filesystem that pyarrow supports ("s3://bucket/job"),
        everything is saved `every` so often; started again with the same one, after a stop or a crash, the job goes on
        where it was, and no row is lost or written twice. `emit` is "final" (a window
        when it closes, a running aggregate at the end) or "changes" (each group whenever it changed, with a column
        `op`). `late` is "drop", "error", or a sink for rows that come after all their windows have closed; `on_error`
        is "raise", "null" (an expression that fails in a row is null there, and so is a field of a CSV or JSON line
        that cannot be decoded), or a sink for dead letters: rows whose computation fails, with all columns of the
        source; lines that cannot be decoded; files that cannot be read. Their columns `error`, `bad_file`, `bad_line`
        and `bad_text` have the reason and the origin; a `_` is added to names that the source has. A new job may begin
        from a `savepoint` of another one (`job.snapshot("name")`), or with the rows of a bounded flow (`bootstrap`),
        which fill its state and give no results. `memory` is for batches that wait, tables and state together; what is
        more goes to disk, or waits in the source.

        `until="now"` ends the job when it has taken what is there, with windows left open: the next start with the same
        checkpoint takes what came since, as a job of every night does. `restarts` is how often a job that failed is
        started again, from its last checkpoint, after failures that may pass: of a disk, a network or a sink. One
        failed checkpoint does not end the job; ten in a row do, with growing waits in between, after a minute or more.

        A flow may change between two starts. What differs in filters, joined tables and sinks is reported; aggregates
        that are gone are ignored, and renamed ones continue. `evolve=True` goes on with aggregates that were added:
        they begin empty, as if no earlier row had a value for them (a count is 0, a sum null), with a warning, while
        all others continue. Other keys or windows are refused. See `named` for steps that change places.

        >>> import pyarrow as pa, scalein as si
        >>> from scalein import col
        >>> rows = si.to_memory()
        >>> job = si.from_arrow(pa.table({"x": [1, 2, 3]})).filter(col("x") > 1).start(sink=rows)
        >>> job.wait()
        True
        >>> rows.table().to_pydict()
        {'x': [2, 3]}
        """
        at = here(self.op.at)
        from scalein.api.start import start_one

        return start_one(self.op, data, sink, checkpoint, savepoint, None if bootstrap is None else _as_op(bootstrap),
                         every, emit, late, on_error, max_rows_per_second, until, restarts, evolve,
                         Options.make(workers=workers, memory=memory, at=at), at)

    def to(self, sink: object) -> FlowOutput:
        """The flow with a sink for its results, as an output of a job with several: `si.start(a.to(x), b.to(y))`.

        >>> import pyarrow as pa, scalein as si
        >>> rows = si.to_memory()
        >>> si.start(si.from_arrow(pa.table({"x": [1, 2]})).to(rows)).wait()
        True
        >>> rows.table().to_pydict()
        {'x': [1, 2]}
        """
        from scalein.api.start import flow_output

        return flow_output(self.op, sink, here(self.op.at))

    def explain(self, level: str = "logical", *, verbose: bool = False, analyze: bool = False) -> str:
        """The plan as text: "logical", "fused" (stages and kernels), "llvm" or "asm".

        `verbose` shows it after every pass; `analyze` runs it and adds rows and times to each stage.

        >>> import scalein as si
        >>> print(si.from_arrow({"x": [1]}).filter(si.col("x") > 0).explain())
        Filter x > 0
          Source arrow  -> x: i64?
        """
        if level not in LEVELS:
            raise BadArgument("no such level", at=here(self.op.at), found=repr(level), has=", ".join(LEVELS))
        at = here(self.op.at)
        op = bind(self.op, None, at, "analyze runs the flow: begin it with from_arrow") if analyze else self.op
        from scalein.exec.explain import explain

        return explain(op, Options.make(at=at), level, verbose, analyze)

    def graph(self) -> Graph:
        """The plan as a picture: SVG in a notebook, Mermaid when printed.

        >>> import scalein as si
        >>> print(si.from_arrow({"x": [1]}).filter(si.col("x") > 0).graph())
        flowchart TD
            op0[("Source<br/>arrow")]
            op1["Filter<br/>x #62; 0"]
            op0 --> op1
        """
        from scalein.api.graph import Graph

        return Graph(self.op)

    # --- inside Spark ---

    @property
    def map_in_arrow(self) -> PartitionFunction:
        """The flow's rows for each partition of a DataFrame: `df.mapInArrow(q.map_in_arrow, scalein.spark.schema(q))`.

        The flow begins with `si.flow(schema)`. What needs other rows (`group_by`, `sort`, `distinct`, `limit`) sees
        those of its partition only: `scalein.spark.apply(q, df)` is the whole flow on the whole DataFrame. Small
        batches are joined, so their number in the result is another one. Tables that the flow joins are read when
        Spark serializes this function, and sent with it.

        The function itself is one of batches:

        >>> import pyarrow as pa, scalein as si
        >>> q = si.flow({"x": "int64"}).filter(si.col("x") > 1)
        >>> [batch.to_pydict() for batch in q.map_in_arrow(iter([pa.record_batch({"x": [1, 2, 3]})]))]
        [{'x': [2, 3]}]
        """
        return PartitionFunction(self, "map_in_arrow")

    @property
    def map_partitions(self) -> PartitionFunction:
        """The same for `df.rdd.mapPartitions(q.map_partitions)`: Rows, dicts, or tuples in the schema's order.

        Spark's rows are Python objects, each of which is made and read on its own: `map_in_arrow` is far faster.

        >>> import scalein as si
        >>> q = si.flow({"x": "int64"}).filter(si.col("x") > 1)
        >>> [row["x"] for row in q.map_partitions(iter([{"x": 1}, {"x": 2}]))]
        [2]
        """
        return PartitionFunction(self, "map_partitions")

    # --- habits from elsewhere

    if not TYPE_CHECKING:  # a type checker should go on reporting names that are not there

        def __getattr__(self, name: str) -> object:
            if not name.startswith("_") and name != "op" and name in self.columns:
                raise AttributeError(f"a Flow has no {name!r}; col({name!r}) is the column", name=name, obj=self)
            return super().__getattr__(name)

    def __getitem__(self, key: object) -> NoReturn:
        raise TypeError(f"a Flow has no items; {hints.subscript(key)}")

    def __len__(self) -> NoReturn:
        raise TypeError("a Flow has no length before it runs; use flow.count()")

    def __iter__(self) -> NoReturn:
        raise TypeError("a Flow cannot be looped over; use flow.batches(), or flow.collect().to_pylist() for rows")

    def __contains__(self, name: object) -> NoReturn:
        raise TypeError(f"`in` does not look into a Flow; flow.columns has the names: {name!r} in flow.columns")

    def __bool__(self) -> bool:
        return True

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.op,)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self


class PartitionFunction:
    """A flow as a function of the rows of one partition, for Spark's methods that take one.

    It is pickled with the joined tables, of which executors may not have the files; a Flow itself is pickled as it is.
    """

    __slots__ = ("__name__", "flow")  # no __dict__: functools.wraps would copy the flow from it

    def __init__(self, flow: Flow, name: str) -> None:
        self.flow, self.__name__ = flow, name

    def __call__(self, rows: Iterable[Any]) -> Iterator[Any]:
        from scalein.spark.batch import tasks

        found: Iterator[Any] = getattr(tasks, self.__name__)(self.flow.op, rows)
        return found

    def __reduce__(self) -> tuple[object, ...]:
        from scalein.spark.serialize import rebuild_function, serialize_plan

        return rebuild_function, (self.__name__, *serialize_plan(self.flow.op))


def _condition(given: object, scope: Scope) -> Expr:
    if isinstance(given, bool):
        raise BadArgument("filter takes a condition over columns, but this one is a plain bool", at=scope.at,
                          found=repr(given), hint="Python computes `is`, `in`, `and` and `not` itself; "
                          "use .is_null(), .is_in(), & and ~")
    written = as_item(given, scope)
    condition = row_expr(written, scope)
    if type_of(condition).kind is not Kind.BOOL:
        raise WrongType(f"filter takes a condition, not {type_of(condition)!r}", at=scope.at,
                        found=repr(written), hint="compare it with something: >, ==, .is_in(...)")
    return condition


def _name(given: object, scope: Scope) -> str:
    if not isinstance(given, str) or not given:
        raise BadArgument(f"{scope.step} takes names of columns", at=scope.at, found=repr(given))
    return given


def _as_op(other: object) -> ops.Op:
    return (other if isinstance(other, Flow) else Flow(source("arrow", of_arrow(other, here()), here()))).op
