"""The bounded driver: runs a physical plan to its end; each node is an iterator of batches over its input's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa

from scalein.cancellation import interruptible
from scalein.compiler import Input, plan_of
from scalein.connectors.base import BoundSource
from scalein.connectors.formats.statistics import Condition
from scalein.connectors.in_memory import Batches
from scalein.errors import ComputeError, InternalError, ScaleinError, here, reported
from scalein.exec import arrow_offset_limits
from scalein.exec.aggregate import HashAggregate, hash_aggregate
from scalein.exec.morsels import coalesce
from scalein.exec.pipeline import PipelineOperator, prepare_pipeline, run_pipeline, run_prepared
from scalein.exec.scan_predicates import conditions_of
from scalein.ir import ops
from scalein.ir.exprs import Col
from scalein.ir.physical import (
    Host,
    JoinBuild,
    Limit,
    Node,
    OuterJoin,
    Over,
    Pipeline,
    Process,
    Scan,
    Sort,
    Union,
    WindowAggregate,
    walk_nodes,
)
from scalein.ir.printer import show_expr
from scalein.ir.rewrite import rewrite
from scalein.ir.stages import FilterStep, Probe
from scalein.kernels.bind import conformed
from scalein.memory import MemoryAccount, keep_at_most
from scalein.options import Options

if TYPE_CHECKING:  # what only some flows need is imported with the first of them
    from scalein.exec.grace_join import SpilledTable
    from scalein.exec.join_build import JoinTable
    from scalein.exec.preaggregate import PreAggregation

_NO_LIMIT = nullcontext()
POOLED_SHARE = 8  # of a memory limit, unused maps that are pooled for reuse have 1/8
READ_SHARE = 8  # of a memory limit, what a source may prefetch is 1/8
SMALL_INPUT_ROWS = 1 << 16  # preparing the operators would take longer than running them
JoinTables: TypeAlias = "dict[int, JoinTable | SpilledTable]"  # static tables, by the identity of the join's node
ReusedOperators: TypeAlias = "dict[int, PreAggregation | PipelineOperator]"  # by the node's identity
IdleOperators = dict[tuple[object, ...], HashAggregate | PipelineOperator]  # by the node's identity and options


def collect(op: ops.Op, options: Options) -> pa.Table:
    """The whole result."""
    return Query(op).collect(options)


def batches(op: ops.Op, options: Options) -> Iterator[pa.RecordBatch]:
    """The result batch by batch."""
    return Query(op).batches(options)


class Query:
    """A flow that can be run many times, each time to its end.

    The plan, operators with their kernels and small static tables are retained between runs. A run takes an idle
    operator out and puts it back at its end, so concurrent runs share none. No input data of a run is retained.
    """

    def __init__(self, op: ops.Op) -> None:
        self._op, self._schema = op, op.schema.arrow
        self._plan, self._sources = plan_of(rewrite(op, _coded))
        self._idle: IdleOperators = {}
        self._join_tables: JoinTables = {}
        tables = (table for node in walk_nodes(self._plan) if isinstance(node, Pipeline | WindowAggregate)
                  for _, table in node.joins)  # fmt: skip
        self._static = frozenset(id(table) for table in tables if self._is_small(table))
        self._is_rounded = any(isinstance(node, WindowAggregate) and node.table.is_rounded
                               for node in walk_nodes(self._plan))

    def _is_small(self, table: JoinBuild) -> bool:
        """Whether a static table consists of few rows that the flow holds in memory, without a Python step."""
        below = list(walk_nodes(table.input))
        inputs = [node.source.data for node in below if isinstance(node, Scan)]
        data = [self._sources[each.number].data for each in inputs if isinstance(each, Input)]
        is_small = all(isinstance(each, Batches) and each.table is not None and each.table.num_rows <= SMALL_INPUT_ROWS
                     for each in data)  # fmt: skip
        return is_small and not any(isinstance(node, Host) for node in below)

    def collect(self, options: Options, given: Batches | None = None) -> pa.Table:
        """The whole result; `given` is the data of the source that has none of its own."""
        return pa.Table.from_batches(list(self.batches(options, given)), self._schema)

    def batches(self, options: Options, given: Batches | None = None) -> Iterator[pa.RecordBatch]:
        """The result batch by batch."""
        inputs = [given if source.data is None else source.data for source in self._sources]
        if options.deterministic and self._is_rounded:
            # All aggregations: later sums depend on the order of groups. No table of another run, which was parallel.
            run = _Run(options, join_tables={}, inputs=inputs, serial_aggregates=True)
        else:
            run = _Run(options, join_tables=self._join_tables, inputs=inputs, idle=self._idle, static=self._static)
        pooled = None if options.memory is None else options.memory // POOLED_SHARE
        try:
            with interruptible(), _NO_LIMIT if pooled is None else keep_at_most(pooled):
                rows = _conformed(lambda: run.rows(self._plan), self._schema)
                yield from arrow_offset_limits.with_limit_errors("this flow", rows)
        except ComputeError as error:
            from scalein.exec.error_location import located

            raise reported(located(error, self._op, self._plan), here(self._op.at)) from None
        except ScaleinError as error:
            error.locate(here(self._op.at))
            raise
        except (OSError, UnicodeError) as error:
            raise reported(error, here(self._op.at)) from error


def _coded(op: ops.Op) -> ops.Op | None:
    """A source with dictionaries where they are cheaper to read."""
    if not isinstance(op, ops.Source) or not isinstance(op.data, BoundSource):
        return None
    data = op.data.with_dictionaries()
    return None if data is op.data else replace(op, arrow=data.schema, data=data)


def _conformed(rows: Callable[[], Iterator[pa.RecordBatch]], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for batch in rows():
        if batch.schema == schema:
            yield batch
        else:
            yield from (conformed(part, schema) for part in arrow_offset_limits.split_heavy(batch))


class Program:
    """A compiled plan that can be run many times, over the batches of each call; static tables are built once.

    For small inputs, operators are reused with their kernels and tables. A run takes them out and puts them back at its
    end, so concurrent runs share none.
    """

    def __init__(self, node: Node, join_tables: JoinTables | None = None) -> None:
        """`join_tables` are those that there are, by the identity of the join's node, which `node` keeps alive."""
        self.node, self._schema = node, node.schema.arrow
        self._join_tables: JoinTables = {} if join_tables is None else join_tables
        self._held = MemoryAccount()  # of the tables that were read under a memory limit
        self._reused: ReusedOperators = {}
        self._given: pa.Schema | None = None  # of the batches that `_reused` was prepared for

    def run(self, batches: Iterable[pa.RecordBatch], options: Options) -> Iterator[pa.RecordBatch]:
        """The output for these batches."""
        reused = None
        if isinstance(batches, list) and 0 < sum(batch.num_rows for batch in batches) <= SMALL_INPUT_ROWS:
            if any(batch.schema != self._given for batch in batches):
                self._reused, self._given = {}, batches[0].schema
            if all(batch.schema == self._given for batch in batches):
                reused, options = self._reused, replace(options, workers=1)
        run = _Run(options, batches, join_tables=self._join_tables, reused=reused, held=self._held)
        return _conformed(lambda: run.rows(self.node), self._schema)


class PreAggregationProgram:
    """A plan that ends in an aggregation, over the batches of many calls; groups are drained on request.

    With `track_times`, kernels report the least and the greatest time of each batch.
    """

    def __init__(self, node: WindowAggregate, track_times: bool = False,
                 complete: WindowAggregate | None = None) -> None:
        self.node, self._track_times, self._complete = node, track_times, complete
        self._schema = node.schema.arrow
        self._join_tables: JoinTables = {}
        self._held = MemoryAccount()  # of the tables that were read under a memory limit
        self._pre_aggregation: PreAggregation | None = None

    def add(self, batches: Iterable[pa.RecordBatch], options: Options, row: int = 0) -> int:
        """Aggregate rows, which are numbered from `row` on as they reach the aggregation; returns the next number.

        After an error, the groups are undefined.
        """
        from scalein.exec.preaggregate import PreAggregation

        run = _Run(options, batches, join_tables=self._join_tables, held=self._held)
        if self._pre_aggregation is None:
            self._pre_aggregation = PreAggregation(self.node, run.joins(self.node.joins), options,
                                                   track_times=self._track_times, complete=self._complete)
        rows, self._pre_aggregation.row = run.rows(self.node.input), row
        self._pre_aggregation.add(rows if self._track_times else coalesce(rows), options.workers)
        return self._pre_aggregation.row

    def time_bounds(self, batches: list[pa.RecordBatch]) -> list[tuple[int, int]] | None:
        """The least and the greatest time of each of the batches that were added last; None if they are unknown."""
        is_direct = isinstance(self.node.input, Scan) and self._pre_aggregation is not None
        return self._pre_aggregation.time_bounds(batches) if is_direct and self._pre_aggregation is not None else None

    @property
    def count(self) -> int:
        return 0 if self._pre_aggregation is None else self._pre_aggregation.count

    def drain(self) -> Iterator[pa.RecordBatch]:
        """Yield all groups since the last drain, and remove them."""
        if self._pre_aggregation is not None:
            yield from _conformed(self._pre_aggregation.drain, self._schema)

    def drain_complete(self) -> Iterator[pa.RecordBatch]:
        """Yield all groups since the last drain as those of `complete`, and remove them."""
        if self._pre_aggregation is not None and self._complete is not None:
            yield from _conformed(self._pre_aggregation.drain_complete, self._complete.schema.arrow)

    @property
    def is_partitioned(self) -> bool:
        """Whether rows are buffered by key group, and aggregated when they are drained."""
        return self._pre_aggregation is not None and self._pre_aggregation.is_partitioned

    @property
    def partitioned_bytes(self) -> int:
        return 0 if self._pre_aggregation is None else self._pre_aggregation.partitioned_bytes


class RingPreAggregationProgram:
    """A plan that ends in sliding windows, over the batches of many calls: see `ring_preaggregate.py`."""

    def __init__(self, node: WindowAggregate, partial: WindowAggregate, size: int, options: Options) -> None:
        from scalein.exec.ring_preaggregate import RingPreAggregation

        self.node, self._options = node, options
        self._join_tables: JoinTables = {}
        joins = _Run(options, join_tables=self._join_tables).joins(node.joins)
        self.ring = RingPreAggregation(node, partial, joins, options, size)

    def add(self, batches: list[pa.RecordBatch], workers: int) -> list[pa.RecordBatch]:
        """Aggregate rows; returns partial groups that the ring had to drain. After an error, windows are undefined."""
        run = _Run(replace(self._options, workers=workers), batches, join_tables=self._join_tables)
        return self.ring.add([batch for batch in run.rows(self.node.input) if batch.num_rows], workers)


class SessionTableProgram:
    """A plan that ends in sessions, over the batches of many calls: see `session_table.py`."""

    def __init__(self, node: WindowAggregate, partial: WindowAggregate, options: Options) -> None:
        from scalein.exec.session_table import SessionTable

        self.node = node
        self._join_tables: JoinTables = {}
        joins = _Run(options, join_tables=self._join_tables).joins(node.joins)
        self.table = SessionTable(node, partial, joins, options)

    def add(self, batches: Iterable[pa.RecordBatch], options: Options, row: int) -> int:
        """Count rows in, which are numbered from `row` on as they reach the aggregation; returns the next number. After
        an error, sessions are undefined.
        """
        run = _Run(options, batches, join_tables=self._join_tables)
        return self.table.add(list(run.rows(self.node.input)), options.workers, row)


class _Run:
    """One run of a plan. `given` are the batches of a source without data of its own, `inputs` the data of the plan's
    sources by number. `join_tables` are static tables, retained by the caller for the next run (all, or those of
    `static`), and `held` is the memory that they have reserved; `reused` and `idle` are operators of earlier runs.
    `serial_aggregates` run on one worker.
    """

    def __init__(self, options: Options, given: Iterable[pa.RecordBatch] = (), *, join_tables: JoinTables,
                 reused: ReusedOperators | None = None, inputs: Sequence[object] = (),
                 idle: IdleOperators | None = None, static: frozenset[int] | None = None,
                 serial_aggregates: bool = False, held: MemoryAccount | None = None) -> None:
        self._options, self._given, self._join_tables, self._reused = options, given, join_tables, reused
        self._inputs, self._idle, self._static = inputs, idle, static
        self._aggregate_options = replace(options, workers=1) if serial_aggregates else options
        self._account, self._held = MemoryAccount(options.memory), held or MemoryAccount()
        self._account.reserve(self._held.used)
        self._tables: JoinTables = {}  # of joins, under a memory limit, that are not retained

    def _data(self, node: Scan) -> object:
        """The data of a source; None where batches are given."""
        data = node.source.data
        return self._inputs[data.number] if isinstance(data, Input) else data

    def _table(self, node: Node) -> pa.Table | None:
        """The table that a scan reads, if it is in memory: then the facts of the whole input are free."""
        if not isinstance(node, Scan):
            return None
        data = self._data(node)
        if isinstance(data, Batches):
            return data.table
        if data is None and isinstance(self._given, list) and self._given:
            return pa.Table.from_batches([batch.select(list(node.source.columns)) for batch in self._given])
        return None

    def rows(self, node: Node) -> Iterator[pa.RecordBatch]:
        """The batches of a node; errors of pyarrow and the system name the step."""
        return arrow_offset_limits.with_limit_errors(_step(node), self._rows(node))

    def _rows(self, node: Node) -> Iterator[pa.RecordBatch]:
        match node:
            case Scan():
                return self._scan(node)
            case Pipeline(input=WindowAggregate() as group) if node.dedup is None:
                return self._aggregate(group, node)
            case WindowAggregate():
                return self._aggregate(node, None)
            case Pipeline():
                return self._pipeline(node)
            case Process():
                from scalein.exec.process import run_process  # few flows have one

                return run_process(node, self.rows(node.input), self._options, self._table(node.input),
                                   account=self._account)
            case OuterJoin():
                return self._outer_join(node)
            case Host():
                from scalein.exec.host import run_host  # imports pyarrow.compute, which takes 30 ms

                return run_host(node, self.rows(node.input))
            case Limit():
                return _limit(self.rows(node.input), node.count)
            case Sort():
                from scalein.exec.sort import run_sort  # imports pyarrow.compute

                return run_sort(node, self.rows(node.input), self._account)
            case Over():
                from scalein.exec.over import run_over  # few flows have one

                return run_over(node, self.rows(node.input), self._options, self._account)
            case Union():
                return self._union(node)

    def _aggregate(self, node: WindowAggregate, downstream: Pipeline | None) -> Iterator[pa.RecordBatch]:
        """The groups of a node, through the pipeline that follows, if any."""
        top = node if downstream is None else downstream
        if (cut := self._join_spilled(node)) is not None:
            rest, rows = cut
            assert isinstance(rest, WindowAggregate)
            below = {} if downstream is None else self.joins(downstream.joins)
            return hash_aggregate(rest, self._joins_of(rest), self._aggregate_options, None, downstream, below,
                                  self._account).run(coalesce(rows, is_limited=True))
        joins, downstream_joins = self.joins(node.joins), {} if downstream is None else self.joins(downstream.joins)
        if (reused := self._reusable_at(node)) is not None and not node.table.needs_two_passes:
            return self._aggregate_reusing(top, node, downstream, reused)
        table, rows = self._table(node.input), self._input(node)
        key = self._idle_key(top, table, [*node.joins, *(() if downstream is None else downstream.joins)])
        known = None if key is None or self._idle is None else self._idle.pop(key, None)
        if isinstance(known, HashAggregate) and table is not None:
            known.reset(table, self._aggregate_options, self._account)
        else:
            known = hash_aggregate(node, joins, self._aggregate_options, table, downstream, downstream_joins,
                                   self._account)
        return self._then_release(known, known.run(rows), key)

    def _pipeline(self, node: Pipeline) -> Iterator[pa.RecordBatch]:
        """The rows of a pipeline."""
        if (cut := self._join_spilled(node)) is not None:
            rest, rows = cut
            assert isinstance(rest, Pipeline)
            return run_pipeline(rest, rows, self._joins_of(rest), self._options, None, self._account)
        joins = self.joins(node.joins)
        if node.dedup is None and (reused := self._reusable_at(node)) is not None:
            return self._run_pipeline_reusing(node, reused)
        table, rows = self._table(node.input), self._input(node)
        if node.dedup is not None:
            return run_pipeline(node, rows, joins, self._options, table, self._account)
        key = self._idle_key(node, table, node.joins)
        known = None if key is None or self._idle is None else self._idle.pop(key, None)
        if isinstance(known, PipelineOperator):
            known.prepared.reset(table)
        else:
            known = prepare_pipeline(node, joins, self._options, table)
        return self._then_release(known, run_prepared(known, rows, self._options), key)

    def _outer_join(self, node: OuterJoin) -> Iterator[pa.RecordBatch]:
        """The rows of the pipeline, which marks the rows of the table that match, and then the unmarked ones."""
        pipe, schema = node.input, node.schema.arrow
        if (tables := self._spilled_tables(pipe)) is not None:
            from scalein.exec.grace_join import outer_join_spilled

            rows = outer_join_spilled(node, self._input(pipe), tables, self._options, self._account)
            yield from _conformed(lambda: rows, schema)
            return
        joins = self.joins(pipe.joins)
        joins[node.table] = joins[node.table].with_marks()
        rows = run_pipeline(pipe, self._input(pipe), joins, self._options, self._table(pipe.input), self._account)
        yield from _conformed(lambda: rows, schema)
        yield from joins[node.table].unmatched(node.origins, schema)

    def _idle_key(self, node: Node, table: pa.Table | None,
                  joins: Iterable[tuple[int, JoinBuild]]) -> tuple[object, ...] | None:
        """The key of a node's operator in `idle`; None if it cannot be reused with other data.

        A kernel depends on the facts of the whole input, and on the static tables.
        """
        if self._idle is None or self._static is None or table is None:
            return None
        if any(id(join) not in self._static for _, join in joins):
            return None
        return id(node), self._options.cpu, self._options.safe, self._options.cache

    def _then_release(self, used: HashAggregate | PipelineOperator, rows: Iterator[pa.RecordBatch],
                  key: tuple[object, ...] | None) -> Iterator[pa.RecordBatch]:
        """The rows; at their end, the operator becomes idle."""
        yield from rows
        if key is not None and self._idle is not None:
            used.release()
            self._idle[key] = used

    def _reusable_at(self, node: Pipeline | WindowAggregate) -> ReusedOperators | None:
        """The reusable operators, if the node's input is the given batches, some of which have rows."""
        is_given = isinstance(node.input, Scan) and node.input.source.data is None
        return self._reused if is_given else None

    def _aggregate_reusing(self, top: Node, node: WindowAggregate, downstream: Pipeline | None,
                           reused: ReusedOperators) -> Iterator[pa.RecordBatch]:
        from scalein.exec.preaggregate import PreAggregation

        known = reused.pop(id(top), None)
        if not isinstance(known, PreAggregation):
            known = PreAggregation(node, self.joins(node.joins), self._options, downstream,
                                   {} if downstream is None else self.joins(downstream.joins), small_input=True)
        known.add(self.rows(node.input), 1)
        yield from known.drain()
        reused[id(top)] = known

    def _run_pipeline_reusing(self, node: Pipeline, reused: ReusedOperators) -> Iterator[pa.RecordBatch]:
        known = reused.pop(id(node), None)
        if not isinstance(known, PipelineOperator):
            known = prepare_pipeline(node, self.joins(node.joins), self._options, self._table(node.input))
            known.prepared.has_all_facts = False  # the batches of later runs may have nulls where these have none
        yield from run_prepared(known, self.rows(node.input), self._options)
        reused[id(node)] = known

    def _input(self, node: Pipeline | WindowAggregate) -> Iterator[pa.RecordBatch]:
        """The rows that a kernel reads; a source may skip rows that its first filter drops.

        Small batches are coalesced where that delays no output: all rows are in memory, or all are aggregated before
        the first group is emitted.
        """
        match node.input, node.steps:
            case Scan() as scan, (FilterStep(predicate), *_) if isinstance(self._data(scan), BoundSource):
                rows = arrow_offset_limits.with_limit_errors(_step(scan), self._scan(scan, conditions_of(predicate)))
            case below, _:
                rows = self.rows(below)
        data = self._data(node.input) if isinstance(node.input, Scan) else None
        is_at_hand = isinstance(data, Batches) and data.table is not None
        if not is_at_hand and not isinstance(node, WindowAggregate):
            return rows
        return coalesce(rows, is_limited=self._options.memory is not None)

    def _scan(self, node: Scan, conditions: tuple[Condition, ...] = ()) -> Iterator[pa.RecordBatch]:
        data = self._data(node)
        if data is None:
            names = list(node.source.columns)
            yield from (batch if batch.schema.names == names else batch.select(names) for batch in self._given)
            return
        if not isinstance(data, Batches | BoundSource):
            raise InternalError("a source without data was executed")
        names = list(node.source.columns)
        if isinstance(data, BoundSource):
            data = data.project(names).where(conditions)
            if self._options.memory is not None:
                data = data.within(self._options.memory // READ_SHARE)
        memory = self._options.memory
        for batch in data.read() if memory is None else _releasing(data.read(), memory):
            yield batch if batch.schema.names == names else batch.select(names)

    def _union(self, node: Union) -> Iterator[pa.RecordBatch]:
        schema = node.schema.arrow
        for each in node.inputs:
            yield from _conformed(partial(self.rows, each), schema)

    def _join_spilled(self, node: Pipeline | WindowAggregate
                      ) -> tuple[Pipeline | WindowAggregate, Iterator[pa.RecordBatch]] | None:
        """Under a memory limit, the part of a node after its joins with tables that do not fit, and the rows that reach
        it; None if there are none.
        """
        if (tables := self._spilled_tables(node)) is None:
            return None
        from scalein.exec.grace_join import join_spilled

        return join_spilled(node, self._input(node), tables, self._options, self._account)

    def _spilled_tables(self, node: Pipeline | WindowAggregate) -> dict[int, JoinTable | SpilledTable] | None:
        """The tables of a node's joins, if some of them do not fit into a memory limit."""
        if self._options.memory is None or not node.joins:
            return None
        from scalein.exec.grace_join import SpilledTable

        tables = {number: self._table_of(table) for number, table in node.joins}
        return tables if any(isinstance(table, SpilledTable) for table in tables.values()) else None

    def _joins_of(self, node: Pipeline | WindowAggregate) -> dict[int, JoinTable]:
        """The tables that the steps of a node probe."""
        probed = {step.table for step in node.steps if isinstance(step, Probe)}
        return self.joins(tuple((number, table) for number, table in node.joins if number in probed))

    def _table_of(self, table: JoinBuild) -> JoinTable | SpilledTable:
        """A table that was read, in memory if it fits."""
        known: JoinTable | SpilledTable | None = self._join_tables.get(id(table)) or self._tables.get(id(table))
        if known is None:
            from scalein.exec.grace_join import read_table

            account = self._account.child()
            known = read_table(table, self.rows(table.input), self._options, account)
            if self._static is None or id(table) in self._static:
                self._join_tables[id(table)] = known
                self._held.reserve(account.used)
            else:
                self._tables[id(table)] = known
        return known

    def joins(self, joins: tuple[tuple[int, JoinBuild], ...]) -> dict[int, JoinTable]:
        return {number: self._join(table) for number, table in joins}

    def _join(self, table: JoinBuild) -> JoinTable:
        from scalein.exec.join_build import JoinTable, build

        known = self._join_tables.get(id(table)) or self._tables.get(id(table))
        if not isinstance(known, JoinTable):
            known = build(table, self.rows(table.input), self._options)
            if self._static is None or id(table) in self._static:
                self._join_tables[id(table)] = known
        return known


def _releasing(batches: Iterator[pa.RecordBatch], memory: int) -> Iterator[pa.RecordBatch]:
    """The batches; memory that Arrow has freed goes back to the system now and then."""
    size = 0
    for batch in batches:
        size += batch.nbytes
        yield batch
        if size > memory // READ_SHARE:
            pa.default_memory_pool().release_unused()
            size = 0


def _step(node: Node) -> str:
    """The user's name of a node."""
    match node:
        case Host(op=ops.Explode()):
            return "explode"
        case Host(op=ops.MapBatches()):
            return "map_batches"
        case Host():
            return ", ".join(f"`{show_expr(node.origin(i))}`" for i in node.items if not isinstance(i.expr, Col))
        case Sort():
            return "sort" if node.count is None else "top_k, or a sort with a limit"
        case WindowAggregate():
            return "group_by"
        case OuterJoin():
            return "join"
        case Over():
            return "over"
        case _:
            return "this flow"


def _limit(rows: Iterator[pa.RecordBatch], count: int) -> Iterator[pa.RecordBatch]:
    left = count
    if left <= 0:
        return  # not one batch is asked for
    for batch in rows:
        yield batch.slice(0, left)
        left -= batch.num_rows
        if left <= 0:
            return
