"""Phases: how a part of a flow is cut for Spark, which runs the first half beside its data and the second behind a
shuffle.

A part is a segment (`jobs/segments.py`): row by row ops around at most one that needs other rows.

    rowwise    map                      no other rows are needed
    partials   map  ->  combine, final  rows become partial groups (`ir/two_phase.py`) where they are; those cross
    rows       map  ->  final           aggregates without columns of their own (distinct values, quantiles): what they
                                        read crosses, row by row
    top        map  ->  combine, final  the first rows of an order: those of each task cross, to one place

Where partial groups would be nearly as many as rows, making them only costs: `map` may then go over to `rows` for the
rest of a task (what the aggregation reads, `crossing_rows`), and `final` takes both.

`Phases` are pickled as ops and compiled where they are used, once a process if they are kept there (`shipping.py`).
What `map` gives has the columns of `crossing`; rows that are equal in the columns `keys` must meet in one call of
`final`, and without keys all rows must.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property

import pyarrow as pa

from scalein.compiler import compile_flow
from scalein.connectors.formats.statistics import Condition
from scalein.dtypes import Schema
from scalein.errors import BadArgument, ComputeError
from scalein.exec.bounded import PreAggregationProgram, Program
from scalein.exec.error_location import located
from scalein.exec.scan_predicates import conditions_of
from scalein.ir import ops
from scalein.ir.aggregates import AGGREGATES
from scalein.ir.exprs import Col, Expr, Named, type_of
from scalein.ir.partials import TwoPhase, fits, two_phase
from scalein.ir.physical import Node, Pipeline, Scan, WindowAggregate, identity, walk_nodes
from scalein.ir.rewrite import transform_streams
from scalein.ir.stages import FilterStep
from scalein.jobs.fragments import Fragment, over, placeholder
from scalein.jobs.operators import reads
from scalein.jobs.partials import group_of, replaced, scan_of
from scalein.options import Options

MOST_GROUPS = 1 << 20  # held by a task before they are handed on
WORTH = 2.0  # rows a group, from which on partial groups are worth making
KEPT_BYTES = 256 << 20  # of rows that wait to become groups at once
ADDED_ROWS = 1 << 18  # between two looks at the number of groups

Batches = Iterable[pa.RecordBatch]
Rows = Iterator[pa.RecordBatch]


def refuse_order(op: ops.Op) -> None:
    """Refuse what depends on the order of rows: Spark has none."""
    why = "depends on the order of rows, and Spark has none"
    match op:
        case ops.Aggregate():
            for named in op.aggs:
                instead = AGGREGATES[named.agg.fn].without_order
                if instead:
                    raise BadArgument(f"{named.agg.fn} {why}", at=named.agg.at if named.agg.at.line else op.at,
                                      found=named.name, hint=f"use {instead}")
        case ops.Limit():
            raise BadArgument(f"limit {why}", at=op.at, hint="sort before it, or use top_k(k, by)")
        case ops.Distinct() if set(op.keys) != set(op.schema.names):
            raise BadArgument(f"distinct of some columns keeps first rows, which {why}", at=op.at,
                              hint="group_by these columns, and take arg_min(by) or arg_max(by) of the others")


class Phases:
    """One segment in two halves; `kind` is rowwise, partials, rows or top."""

    def __init__(self, segment: Fragment) -> None:
        state = segment.state
        if state is not None:
            refuse_order(state)
        if isinstance(state, ops.Distinct):  # of all columns: groups without an aggregate
            whole = ops.Aggregate(state.input, identity(state.schema), None, (), at=state.at)
            segment = Fragment(over(segment.op, state, whole), segment.input, whole, None)
        assert not isinstance(segment.state, ops.Limit | ops.Distinct)
        self.segment = replace(segment, then=None)
        self.state = segment.state
        self._idle: list[PreAggregationProgram] = []  # with the tables of joins, and no groups
        match self.state:
            case None:
                self.kind = "rowwise"
            case ops.Sort():
                self.kind = "top"
            case ops.Aggregate():
                self.kind = "partials" if fits(group_of(self._root).table) else "rows"

    def __reduce__(self) -> tuple[object, ...]:
        return Phases, (self.segment,)

    @property
    def second(self) -> Phases:
        """The same, for `final` alone: tables of joins before the shuffle need not travel behind it."""
        state = self.state
        assert isinstance(state, ops.Aggregate | ops.Sort)
        new = replace(state, input=_without_tables(state.input))
        return Phases(Fragment(over(self.segment.op, state, new), self.segment.input, new, None))

    # --- what crosses

    @cached_property
    def crossing(self) -> pa.Schema:
        """The columns that `map` gives, and `combine` and `final` take."""
        match self.kind:
            case "partials":
                names = [*self._two.keys.names, *self._two.values.names]
                return pa.schema([self._two.partial.schema.arrow.field(name) for name in names])
            case "rows":
                return self._rows_op.schema.arrow
            case "top":
                assert self.state is not None
                return self.state.schema.arrow
            case _:
                return self.segment.op.schema.arrow

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The columns of `crossing` by which rows meet; none if all must, or none need to."""
        if not isinstance(self.state, ops.Aggregate):
            return ()
        return self.row_keys if self.kind == "rows" else tuple(key.name for key in self.state.keys)

    @cached_property
    def crossing_rows(self) -> pa.Schema | None:
        """The columns of rows that cross in the place of partial groups; None if these always are groups."""
        if self.kind != "partials" or not self.keys:
            return None
        again = two_phase(group_of(compile_flow(self.over_rows)))
        is_same = again.partial.schema == self._two.partial.schema and again.functions == self._two.functions
        return self._rows_op.schema.arrow if is_same else None

    @property
    def row_keys(self) -> tuple[str, ...]:
        """The columns of `crossing_rows` that `keys` are."""
        assert isinstance(self.state, ops.Aggregate)
        return tuple(self._crossing_names[key.expr] for key in self.state.keys)

    @cached_property
    def source_keys(self) -> tuple[str, ...] | None:
        """The columns of the input that `keys` are; None if they are computed, or there are none."""
        if not self.keys:
            return None
        node = group_of(self._root)
        names = tuple(key.name for key in node.keys if isinstance(key, Col))
        is_plain = isinstance(node.input, Scan) and all(isinstance(step, FilterStep) for step in node.steps)
        return names if is_plain and len(names) == len(node.keys) else None

    @property
    def is_by_column(self) -> bool:
        """Whether the columns of partial groups, if these are what crosses, combine each on its own."""
        return self.kind != "partials" or self._two.is_by_column

    @property
    def window(self) -> ops.Window | None:
        return self.state.window if isinstance(self.state, ops.Aggregate) else None

    @cached_property
    def slice_size(self) -> int:
        """How long the slices of time are that partial groups belong to; 0 if there is no window."""
        return group_of(self._root).table.slice_size if self.window is not None else 0

    @cached_property
    def reads(self) -> list[str]:
        """The columns of the input that `map` needs."""
        return list(dict.fromkeys(reads(self._map.node)))

    @cached_property
    def tests(self) -> tuple[Condition, ...]:
        """What holds for every row of the input that `map` keeps."""
        return tuple(test for node in walk_nodes(self._map.node) if isinstance(node, Pipeline | WindowAggregate)
                     and isinstance(node.input, Scan) and node.input.source.data is None and node.steps
                     and isinstance(node.steps[0], FilterStep) for test in conditions_of(node.steps[0].predicate))

    # --- the halves

    def map(self, batches: Batches, options: Options, *, rows_too: bool = False) -> Rows:
        """What crosses, for rows of the input (its columns `reads`, or more). Holds a bounded number of groups.

        With `rows_too`, batches of `crossing_rows` may follow those of `crossing`.
        """
        if self.kind != "partials":
            return self._run(self._map, batches, options)
        return self._partials(batches, options, rows_too and self.crossing_rows is not None)

    def combine(self, batches: Batches, options: Options) -> Rows:
        """The same in fewer rows: of partial groups, one for each key and slice; rows stay as they are."""
        if self._combine is None:
            return iter(batches)
        names = self.crossing.names
        return (batch if batch.schema.names == names else batch.select(names)
                for batch in self._run(self._combine, batches, options))

    def final(self, batches: Batches, options: Options) -> Rows:
        """The results of all that has crossed for some keys; without keys also of nothing."""
        if self.crossing_rows is not None:
            batches = self._as_partials(batches, options)
        return self._run(self._final, batches, options)

    def _as_partials(self, batches: Batches, options: Options) -> Rows:
        """Partial groups, also of rows that crossed as such: many at once, for which there is a faster way."""
        waiting: list[pa.RecordBatch] = []
        names, size = self.crossing.names, 0
        for batch in batches:
            if batch.schema.names == names:
                yield batch
                continue
            waiting.append(batch)
            size += batch.nbytes
            if size > KEPT_BYTES:
                yield from self._run(self._partials_of_rows, iter(waiting), options)
                waiting, size = [], 0
        if waiting:
            yield from self._run(self._partials_of_rows, iter(waiting), options)

    def whole(self, batches: Batches, options: Options) -> Rows:
        """The results for all rows of some keys, in one half."""
        return self._run(self._whole, batches, options)

    def groups(self, batches: Batches, options: Options) -> Rows:
        """The groups (or windows) of what has crossed, before the ops that stand behind the aggregation."""
        return self._run(self._groups, batches, options)

    def behind(self, batches: Batches, options: Options) -> Rows:
        """What the ops behind the aggregation make of groups."""
        return self._run(self._behind, batches, options)

    def _run(self, program: Program, batches: Batches, options: Options) -> Rows:
        try:
            yield from program.run(batches, options)
        except ComputeError as error:
            raise located(error, self.segment.op, program.node) from None

    def _partials(self, batches: Batches, options: Options, rows_too: bool) -> Rows:
        """Partial groups; a group comes again when there were too many in between."""
        names = self.crossing.names
        standing = self._idle.pop() if self._idle else PreAggregationProgram(self._two.partial)
        rest, counted = _Counted(batches), 0
        is_worth = True
        while is_worth and rest.has_more:
            try:
                standing.add(rest.some(ADDED_ROWS), options)
            except ComputeError as error:
                raise located(error, self.segment.op, standing.node) from None
            if standing.count > MOST_GROUPS:
                is_worth = not rows_too or rest.rows - counted >= WORTH * standing.count
                counted = rest.rows
                yield from (batch.select(names) for batch in standing.drain())
        yield from (batch.select(names) for batch in standing.drain())
        self._idle.append(standing)  # only now: after an error, or a task that was given up, nothing is known of it
        if rest.has_more:
            yield from self._run(self._map_rows, rest.some(), options)

    # --- programs

    @cached_property
    def _root(self) -> Node:
        return compile_flow(self.segment.op)

    @cached_property
    def _two(self) -> TwoPhase:
        return two_phase(group_of(self._root))

    @cached_property
    def _map(self) -> Program:
        match self.kind:
            case "partials":
                return Program(self._two.partial)
            case "rows":
                return self._map_rows
            case "top":
                assert self.state is not None
                return Program(compile_flow(self.state))
            case _:
                return Program(self._root)

    @cached_property
    def _whole(self) -> Program:
        return Program(self._root)

    @cached_property
    def _map_rows(self) -> Program:
        return Program(compile_flow(self._rows_op))

    @cached_property
    def _partials_of_rows(self) -> Program:
        return Program(two_phase(group_of(compile_flow(self.over_rows))).partial)

    @cached_property
    def _combine(self) -> Program | None:
        match self.kind:
            case "partials":
                return Program(self._two.combine)
            case "top":
                return Program(compile_flow(self._state_again))
            case _:
                return None

    @cached_property
    def _final(self) -> Program:
        if self.kind == "partials":
            return Program(replaced(self._root, group_of(self._root), self._two.final))
        assert self.state is not None
        return Program(compile_flow(over(self.segment.op, self.state, self._state_again)))

    @cached_property
    def _groups(self) -> Program:
        return Program(self._two.final if self.kind == "partials" else compile_flow(self._state_again))

    @cached_property
    def _behind(self) -> Program:
        node = group_of(self._root)
        return Program(replaced(self._root, node, scan_of(node)))

    @cached_property
    def _state_again(self) -> ops.Op:
        """The op with state over rows that have crossed."""
        if isinstance(self.state, ops.Aggregate):
            return self.over_rows
        assert self.state is not None
        return replace(self.state, input=placeholder(Schema.from_arrow(self.crossing)))

    @cached_property
    def over_rows(self) -> ops.Aggregate:
        """The aggregation over what it reads."""
        assert isinstance(self.state, ops.Aggregate)
        names = self._crossing_names
        source = placeholder(self._rows_op.schema)

        def column(expr: Expr) -> Col:
            return Col(names[expr], type_of(expr), expr.nullable)

        return self.state.with_inputs((source,)).with_exprs([column(expr) for expr, _ in self.state.exprs()])

    @cached_property
    def _crossing_names(self) -> dict[Expr, str]:
        """What an aggregation reads, each with the name under which it crosses: a column keeps its own."""
        assert isinstance(self.state, ops.Aggregate)
        exprs = dict.fromkeys(expr for expr, _ in self.state.exprs())
        return {expr: expr.name if isinstance(expr, Col) else f"#value{k}" for k, expr in enumerate(exprs)}

    @cached_property
    def _rows_op(self) -> ops.Op:
        """What an aggregation reads, row by row."""
        assert self.state is not None
        return ops.Project(self.state.input, tuple(Named(name, expr) for expr, name in self._crossing_names.items()))


def _without_tables(op: ops.Op) -> ops.Op:
    return transform_streams(op, lambda each: each, lambda table: placeholder(table.schema))


class _Counted:
    """Batches in portions, and how many rows there were so far."""

    def __init__(self, batches: Batches) -> None:
        self._rest = iter(batches)
        self._next = next(self._rest, None)
        self.rows = 0

    @property
    def has_more(self) -> bool:
        return self._next is not None

    def some(self, rows: int = 1 << 62) -> Rows:
        """Batches of about so many rows."""
        end = self.rows + rows
        while self._next is not None and self.rows < end:
            batch, self._next = self._next, None
            self.rows += batch.num_rows
            yield batch
            self._next = next(self._rest, None)
