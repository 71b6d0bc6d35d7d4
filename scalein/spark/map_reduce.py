"""MapReduce: a fragment of a flow as a map side, which Spark runs where the data is, and a reduce side after a shuffle.

A fragment (`exec/fragments.py`) is a chain of row-wise ops around at most one that needs other rows.

    rowwise    map                      no other rows are needed
    partials   map  ->  combine, final  rows become partial groups (`ir/partials.py`) before the shuffle
    rows       map  ->  final           aggregates without partial columns (distinct values, quantiles): the columns
                                        that they read are shuffled, row by row
    top        map  ->  combine, final  the first rows of an order: those of each task are shuffled to one target
    process    map  ->  processed       the columns that the class reads, row by row; of a stream to an operator
    over       map  ->  final           rows with their keys, to be computed over those with the same; of a stream to
                                        an operator
    distinct   map  ->  an operator     of a stream: rows with keys that a task has not seen yet

The sessions of a stream are shuffled as rows, since which of them are late is known only where the sessions are.

Where there are nearly as many partial groups as rows, making them only costs time: `map` may then send rows instead for
the rest of a task (the columns that the aggregation reads, `row_shuffle_schema`), and `final` accepts both.

A `MapReduce` is pickled as ops and compiled where it is used, once a process if it is cached there (`serialize.py`).
The result of `map` has the columns of `shuffle_schema`; rows that are equal in the columns `keys` must meet in one call
of `final`, and without keys all rows must. One thread at a time uses a `MapReduce`.
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
from scalein.exec.aggregate_operator import aggregate_node, replaced
from scalein.exec.bounded import PreAggregationProgram, Program
from scalein.exec.error_location import located
from scalein.exec.fragments import Fragment, over, placeholder
from scalein.exec.operator import reads
from scalein.exec.process import run_process
from scalein.exec.process_operator import class_units
from scalein.exec.scan_predicates import conditions_of
from scalein.ir import ops
from scalein.ir.aggregates import AGGREGATES
from scalein.ir.exprs import Col, Expr, Named, type_of
from scalein.ir.internal_names import internal
from scalein.ir.partials import TwoPhase, fits, two_phase
from scalein.ir.physical import Node, Pipeline, Process, Scan, WindowAggregate, identity, walk_nodes
from scalein.ir.process import NEVER
from scalein.ir.rewrite import stream_path, transform_streams, walk_streams
from scalein.ir.stages import FilterStep
from scalein.ir.windows import Window
from scalein.options import Options

MAX_GROUPS = 1 << 20  # held by a task before they are sent
MIN_ROWS_PER_GROUP = 2.0  # from which on partial groups are worth making
BUFFERED_BYTES = 256 << 20  # of shuffled rows that become groups at once
CHECK_ROWS = 1 << 18  # between two checks of the number of groups

Batches = Iterable[pa.RecordBatch]
Rows = Iterator[pa.RecordBatch]


def refuse_joins_by_partition(op: ops.Op) -> None:
    """Refuse joins of two streams where rows do not meet."""
    for each in walk_streams(op):
        if isinstance(each, ops.StreamJoin):
            raise BadArgument("a join of two streams needs the rows of all partitions", at=each.at, step="join",
                              hint="scalein.spark.apply(q, {...}) shuffles both sides; or join with a static table")


def refuse_order(op: ops.Op) -> None:
    """Refuse ops that depend on the order of rows: Spark has none."""
    why = "depends on the order of rows, and Spark has none"
    match op:
        case ops.Aggregate():
            for named in op.aggs:
                instead = AGGREGATES[named.agg.fn].without_order
                if instead:
                    raise BadArgument(f"{named.agg.fn} {why}", at=named.agg.at if named.agg.at.line else op.at,
                                      found=named.name, hint=f"use {instead}")
        case ops.Process() if not op.time:
            raise BadArgument(f"process {why}", at=op.at,
                              hint="with_watermark(column, delay) before it: then rows come in the order of event time")
        case ops.Over() if not op.by:
            for call in op.calls:
                if call.agg.fn == "row_number":
                    raise BadArgument(f"the number of a row, also in a count window, {why}", at=op.at,
                                      hint="give order_by=, or take a window of time")
                instead = AGGREGATES[call.agg.fn].without_order if call.frame.is_whole else "order_by="
                if instead:
                    raise BadArgument(f"{call.agg.fn} over other rows {why}", at=op.at, hint=f"use {instead}")
        case ops.Limit():
            raise BadArgument(f"limit {why}", at=op.at, hint="sort before it, or use top_k(k, by)")
        case ops.Distinct() if set(op.keys) != set(op.schema.names):
            raise BadArgument(f"distinct of some columns gives first rows, which {why}", at=op.at,
                              hint="group_by these columns, and take arg_min(by) or arg_max(by) of the others")


class MapReduce:
    """The map and the reduce side of a fragment; `kind` is rowwise, partials, rows, top, distinct, process or over.

    The rows of a stream have the order of arrival (`by_arrival`), those of a DataFrame have none. With `keeps_all` the
    rows of a process or of sessions are shuffled with all columns.
    """

    def __init__(self, fragment: Fragment, by_arrival: bool = False, keeps_all: bool = False) -> None:
        state = fragment.state
        self._by_arrival, self._keeps_all = by_arrival, keeps_all
        self.holds_rows = False  # an aggregation needs the rows themselves
        if state is not None and not (by_arrival and isinstance(state, ops.Distinct)):
            refuse_order(state)
        if isinstance(state, ops.Over):
            fragment = _with_key_columns(fragment, state)
        if isinstance(state, ops.Distinct):
            keys = tuple(item for item in identity(state.schema) if item.name in state.keys)
            ordered: ops.Op = replace(state, keys=tuple(key.name for key in keys))  # state is sorted by their hash
            if not by_arrival:  # of all columns: a group_by without aggregates
                ordered = ops.Aggregate(state.input, keys, None, (), at=state.at)
            fragment = Fragment(over(fragment.op, state, ordered), fragment.input, ordered)
        assert not isinstance(fragment.state, ops.Limit | ops.OuterJoin)  # see batch/outer_join.py
        self.fragment = replace(fragment, consumers=[])
        self.state = fragment.state
        self._idle_programs: list[PreAggregationProgram] = []  # they hold the tables of joins, and no groups
        match self.state:
            case None:
                self.kind = "rowwise"
            case ops.Sort():
                self.kind = "top"
            case ops.Distinct():
                self.kind = "distinct"
            case ops.Process():
                self.kind = "process"
            case ops.Over():
                self.kind = "over"
            case ops.Aggregate():
                table = aggregate_node(self._root).table
                self.holds_rows = not fits(table) or table.needs_two_passes
                is_session = self.state.window is not None and self.state.window.is_session
                self.kind = "rows" if self.holds_rows or (by_arrival and is_session) else "partials"

    def __reduce__(self) -> tuple[object, ...]:
        return MapReduce, (self.fragment, self._by_arrival, self._keeps_all)

    @property
    def reduce_only(self) -> MapReduce:
        """The same for `final` alone: reduce tasks do not need the tables of joins before the shuffle."""
        state = self.state
        assert isinstance(state, ops.Aggregate | ops.Sort | ops.Process | ops.Over)
        reduced = replace(state, input=_without_tables(state.input))
        return MapReduce(Fragment(over(self.fragment.op, state, reduced), self.fragment.input, reduced))

    # --- the shuffle

    @cached_property
    def shuffle_schema(self) -> pa.Schema:
        """The columns that `map` gives, and that `combine` and `final` take."""
        match self.kind:
            case "partials":
                names = [*self._two_phase.keys.names, *self._two_phase.values.names]
                return pa.schema([self._two_phase.partial.schema.arrow.field(name) for name in names])
            case "rows" | "process":
                return self._shuffled_rows.schema.arrow
            case "over":
                assert isinstance(self.state, ops.Over)
                return self.state.input.schema.arrow
            case "top" | "distinct":
                assert self.state is not None
                return self.state.schema.arrow
            case _:
                return self.fragment.op.schema.arrow

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The columns of `shuffle_schema` by which rows meet; none if all rows must meet, or none need to."""
        if isinstance(self.state, ops.Distinct):
            return tuple(self.state.keys)
        if isinstance(self.state, ops.Over):
            return tuple(key.name for key in self.state.keys if isinstance(key, Col))
        if isinstance(self.state, ops.Process):
            return self.row_keys
        if not isinstance(self.state, ops.Aggregate):
            return ()
        return self.row_keys if self.kind == "rows" else tuple(key.name for key in self.state.keys)

    @cached_property
    def row_shuffle_schema(self) -> pa.Schema | None:
        """The columns of rows that are shuffled instead of partial groups; None if that is not possible."""
        if self.kind != "partials" or not self.keys:
            return None
        over_rows = two_phase(aggregate_node(compile_flow(self.over_shuffled_rows)))
        two = self._two_phase
        is_same = over_rows.partial.schema == two.partial.schema and over_rows.functions == two.functions
        return self._shuffled_rows.schema.arrow if is_same else None

    @property
    def row_keys(self) -> tuple[str, ...]:
        """The columns of `row_shuffle_schema` that are the keys."""
        assert isinstance(self.state, ops.Aggregate | ops.Process)
        return tuple(self.shuffle_names[key.expr] for key in self.state.keys)

    @cached_property
    def source_keys(self) -> tuple[str, ...] | None:
        """The columns of the input that are the keys; None if keys are computed, or there are none."""
        if not self.keys or isinstance(self.state, ops.Process | ops.Over):
            return None
        if isinstance(self.state, ops.Distinct):
            path = stream_path(self.state.input, self.fragment.input)
            return self.keys if all(op.passes_through(name) for op in path for name in self.keys) else None
        node = aggregate_node(self._root)
        names = tuple(key.name for key in node.keys if isinstance(key, Col))
        is_plain = isinstance(node.input, Scan) and all(isinstance(step, FilterStep) for step in node.steps)
        return names if is_plain and len(names) == len(node.keys) else None

    @property
    def is_by_column(self) -> bool:
        """Whether the columns of partial groups, if these are shuffled, combine independently of each other."""
        return self.kind != "partials" or self._two_phase.is_by_column

    @property
    def window(self) -> Window | None:
        return self.state.window if isinstance(self.state, ops.Aggregate) else None

    @cached_property
    def slice_size(self) -> int:
        """The length of the time slices of partial groups, in units of the time column; 0 without a window."""
        return aggregate_node(self._root).table.slice_size if self.window is not None else 0

    @cached_property
    def reads(self) -> list[str]:
        """The columns of the input that `map` needs."""
        return list(dict.fromkeys(reads(self._map.node)))

    @cached_property
    def scan_conditions(self) -> tuple[Condition, ...]:
        """Conditions that hold for every input row that passes the filters of `map`: a source may skip others."""
        return tuple(test for node in walk_nodes(self._map.node) if isinstance(node, Pipeline | WindowAggregate)
                     and isinstance(node.input, Scan) and node.input.source.data is None and node.steps
                     and isinstance(node.steps[0], FilterStep) for test in conditions_of(node.steps[0].predicate))

    # --- the two sides

    def map(self, batches: Batches, options: Options, *, may_send_rows: bool = False) -> Rows:
        """The rows to shuffle, for rows of the input (its columns `reads`, or more). Holds a bounded number of groups.

        With `may_send_rows`, batches of `row_shuffle_schema` may follow those of `shuffle_schema`.
        """
        if self.kind == "distinct":
            return self._distinct(batches, options)
        if self.kind != "partials":
            return self._run(self._map, batches, options)
        return self._partials(batches, options, may_send_rows and self.row_shuffle_schema is not None)

    def combine(self, batches: Batches, options: Options) -> Rows:
        """The same in fewer rows: one partial group for each key and slice; rows are passed through."""
        if self._combine is None:
            return iter(batches)
        names = self.shuffle_schema.names
        return (batch if batch.schema.names == names else batch.select(names)
                for batch in self._run(self._combine, batches, options))

    def final(self, batches: Batches, options: Options) -> Rows:
        """The results of all shuffled rows of some keys; without keys also for no rows."""
        if self.row_shuffle_schema is not None:
            batches = self._as_partials(batches, options)
        return self._run(self._final, batches, options)

    def _as_partials(self, batches: Batches, options: Options) -> Rows:
        """Partial groups; shuffled rows become partial groups in large portions, which is faster."""
        buffered: list[pa.RecordBatch] = []
        names, size = self.shuffle_schema.names, 0
        for batch in batches:
            if batch.schema.names == names:
                yield batch
                continue
            buffered.append(batch)
            size += batch.nbytes
            if size > BUFFERED_BYTES:
                yield from self._run(self._partials_from_rows, iter(buffered), options)
                buffered, size = [], 0
        if buffered:
            yield from self._run(self._partials_from_rows, iter(buffered), options)

    def processed(self, batches: Batches, latest: int | None, options: Options) -> Rows:
        """The results of a process over all shuffled rows of some keys; `latest` is the greatest time of any row."""
        op, node = self.over_shuffled_rows, self._process.node
        assert isinstance(op, ops.Process)
        assert isinstance(node, Process)
        until = -NEVER if latest is None else latest * class_units(op)
        try:
            rows = run_process(node, self._before_process.run(batches, options), options, None, until)
            yield from self._after_process.run(rows, options)
        except ComputeError as error:
            raise located(error, self.fragment.op, node) from None

    def complete(self, batches: Batches, options: Options) -> Rows:
        """The results for all rows of some keys, without a shuffle."""
        return self._run(self._complete, batches, options)

    def _distinct(self, batches: Batches, options: Options) -> Rows:
        """The first row of each key; a key may come several times, since a bounded number of them is remembered."""
        rest = _CountedBatches(batches)
        while rest.has_more:
            yield from self._run(self._map, rest.take(MAX_GROUPS), options)

    def _run(self, program: Program, batches: Batches, options: Options) -> Rows:
        try:
            yield from program.run(batches, options)
        except ComputeError as error:
            raise located(error, self.fragment.op, program.node) from None

    def _partials(self, batches: Batches, options: Options, may_send_rows: bool) -> Rows:
        """Partial groups; a key may come several times, since groups are sent whenever there are MAX_GROUPS."""
        names = self.shuffle_schema.names
        program = self._idle_programs.pop() if self._idle_programs else PreAggregationProgram(self._two_phase.partial)
        rest, rows_before = _CountedBatches(batches), 0
        pays_off = True
        while pays_off and rest.has_more:
            try:
                program.add(rest.take(CHECK_ROWS), options)
            except ComputeError as error:
                raise located(error, self.fragment.op, program.node) from None
            if program.count > MAX_GROUPS:
                pays_off = not may_send_rows or rest.rows - rows_before >= MIN_ROWS_PER_GROUP * program.count
                rows_before = rest.rows
                yield from (batch.select(names) for batch in program.drain())
        yield from (batch.select(names) for batch in program.drain())
        self._idle_programs.append(program)  # only now: after an error or an abandoned task its groups are undefined
        if rest.has_more:
            yield from self._run(self._map_rows, rest.take(), options)

    # --- programs

    @cached_property
    def _root(self) -> Node:
        return compile_flow(self.fragment.op)

    @cached_property
    def _two_phase(self) -> TwoPhase:
        return two_phase(aggregate_node(self._root))

    @cached_property
    def _map(self) -> Program:
        match self.kind:
            case "partials":
                return Program(self._two_phase.partial)
            case "rows" | "process":
                return self._map_rows
            case "over":
                assert isinstance(self.state, ops.Over)
                return Program(compile_flow(self.state.input))
            case "top" | "distinct":
                assert self.state is not None
                return Program(compile_flow(self.state))
            case _:
                return Program(self._root)

    @cached_property
    def _process(self) -> Program:
        return Program(compile_flow(self.over_shuffled_rows))

    @cached_property
    def _before_process(self) -> Program:
        assert isinstance(self._process.node, Process)
        return Program(self._process.node.input)

    @cached_property
    def _after_process(self) -> Program:
        assert self.state is not None
        return Program(compile_flow(over(self.fragment.op, self.state, placeholder(self.state.schema))))

    @cached_property
    def _complete(self) -> Program:
        return Program(self._root)

    @cached_property
    def _map_rows(self) -> Program:
        return Program(compile_flow(self._shuffled_rows))

    @cached_property
    def _partials_from_rows(self) -> Program:
        return Program(two_phase(aggregate_node(compile_flow(self.over_shuffled_rows))).partial)

    @cached_property
    def _combine(self) -> Program | None:
        match self.kind:
            case "partials":
                return Program(self._two_phase.combine)
            case "top":
                return Program(compile_flow(self.state_over_shuffled))
            case _:
                return None

    @cached_property
    def _final(self) -> Program:
        if self.kind == "partials":
            return Program(replaced(self._root, aggregate_node(self._root), self._two_phase.final))
        assert self.state is not None
        return Program(compile_flow(over(self.fragment.op, self.state, self.state_over_shuffled)))

    @cached_property
    def state_over_shuffled(self) -> ops.Op:
        """The op with state over shuffled rows."""
        if isinstance(self.state, ops.Aggregate | ops.Process):
            return self.over_shuffled_rows
        assert self.state is not None
        return self.state.with_inputs((placeholder(Schema.from_arrow(self.shuffle_schema)),))

    @property
    def reduced(self) -> Fragment:
        """What the reduce side does, over shuffled rows; with partial groups, over the rows that these were of."""
        if self.kind == "partials":
            return self.fragment
        state = self.state_over_shuffled
        (source,) = state.inputs
        assert self.state is not None and isinstance(source, ops.Source)  # noqa: PT018
        return Fragment(over(self.fragment.op, self.state, state), source, state)

    @cached_property
    def over_shuffled_rows(self) -> ops.Aggregate | ops.Process:
        """The op with state over the columns that it reads."""
        assert isinstance(self.state, ops.Aggregate | ops.Process)
        names = self.shuffle_names
        source = placeholder(self._shuffled_rows.schema)

        def column(expr: Expr) -> Col:
            return Col(names[expr], type_of(expr), expr.nullable)

        return self.state.with_inputs((source,)).with_exprs([column(expr) for expr, _ in self.state.exprs()])

    @cached_property
    def shuffle_names(self) -> dict[Expr, str]:
        """The expressions that the op reads, each with its name in the shuffle: a column has its own name."""
        assert isinstance(self.state, ops.Aggregate | ops.Process)
        exprs = dict.fromkeys(expr for expr, _ in self.state.exprs())
        if isinstance(self.state, ops.Process) and self.state.time:
            found = self.state.input.schema[self.state.time]
            exprs[Col(found.name, found.dtype, found.nullable)] = None
        if self._keeps_all:
            exprs |= dict.fromkeys(item.expr for item in identity(self.state.input.schema))
        return {expr: expr.name if isinstance(expr, Col) else f"#value{k}" for k, expr in enumerate(exprs)}

    @cached_property
    def _shuffled_rows(self) -> ops.Op:
        """The expressions that the op with state reads, row by row."""
        assert self.state is not None
        return ops.Project(self.state.inputs[0], tuple(Named(name, expr) for expr, name in self.shuffle_names.items()))


def _with_key_columns(fragment: Fragment, state: ops.Over) -> Fragment:
    """The fragment with keys that are columns: rows meet by these."""
    made = {key: Named(internal(f"key{k}"), key) for k, key in enumerate(state.keys) if not isinstance(key, Col)}
    if not made:
        return fragment
    keys = tuple(key if isinstance(key, Col) else Col(made[key].name, type_of(key), key.nullable) for key in state.keys)
    before = ops.Project(state.input, (*identity(state.input.schema), *made.values()), at=state.at)
    keyed = replace(state, input=before, keys=keys)
    return Fragment(over(fragment.op, state, ops.Project(keyed, tuple(identity(state.schema)), at=state.at)),
                    fragment.input, keyed, fragment.consumers)


def _without_tables(op: ops.Op) -> ops.Op:
    return transform_streams(op, lambda each: each, lambda table: placeholder(table.schema))


class _CountedBatches:
    """Batches in portions, and the number of rows so far."""

    def __init__(self, batches: Batches) -> None:
        self._rest = iter(batches)
        self._next = next(self._rest, None)
        self.rows = 0

    @property
    def has_more(self) -> bool:
        return self._next is not None

    def take(self, rows: int = 1 << 62) -> Rows:
        """Batches of about so many rows."""
        end = self.rows + rows
        while self._next is not None and self.rows < end:
            batch, self._next = self._next, None
            self.rows += batch.num_rows
            yield batch
            self._next = next(self._rest, None)
