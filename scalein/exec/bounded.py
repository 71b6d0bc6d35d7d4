"""run: a program's nodes, each an iterator of batches over the one below it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial

import numpy as np
import pyarrow as pa

from scalein.arrow_functions import taken
from scalein.compiler import Input, plan_of
from scalein.connectors.base import BoundSource
from scalein.connectors.formats.statistics import Condition
from scalein.connectors.in_memory import Batches
from scalein.dtypes import I64, Field, Schema
from scalein.errors import ComputeError, InternalError
from scalein.exec import array_limits
from scalein.exec.error_location import placed
from scalein.exec.hash_aggregate import GroupRun, group_run
from scalein.exec.host import run_host
from scalein.exec.join_build import JoinTable, build
from scalein.exec.morsels import joined
from scalein.exec.pipeline import Work, ready, run_pipe, run_ready
from scalein.exec.preaggregate import Standing
from scalein.exec.ring_preaggregate import StandingRing
from scalein.exec.scan_predicates import tests_of
from scalein.exec.sort import run_ordered
from scalein.ir import ops
from scalein.ir.exprs import Col
from scalein.ir.partials import TwoPhase
from scalein.ir.physical import Host, JoinBuild, Limit, Node, Pipeline, Scan, Sort, Union, WindowAggregate, walk_nodes
from scalein.ir.printer import show_expr
from scalein.ir.stages import FilterStep
from scalein.ir.tables import Key, Slicing
from scalein.kernels.bind import conformed
from scalein.options import Options

FEW_ROWS = 1 << 16  # in which making ready would take longer than running
Again = dict[int, Standing | Work]  # by the node's identity
Idle = dict[tuple[object, ...], GroupRun | Work]  # by the node's identity, and the options that make kernels others


def collect(op: ops.Op, options: Options) -> pa.Table:
    """The whole result."""
    return Query(op).collect(options)


def batches(op: ops.Op, options: Options) -> Iterator[pa.RecordBatch]:
    """The result batch by batch."""
    return Query(op).batches(options)


class Query:
    """A flow that is run again and again, each time to its end.

    The plan, kernels and small static tables stay between runs. A run takes what it uses again and puts it back, so
    runs at the same time do not meet. Nothing is retained of data that was given to one run.
    """

    def __init__(self, op: ops.Op) -> None:
        self._op, self._schema = op, op.schema.arrow
        self._plan, self._sources = plan_of(op)
        self._idle: Idle = {}
        self._built: dict[int, JoinTable] = {}
        tables = (table for node in walk_nodes(self._plan) if isinstance(node, Pipeline | WindowAggregate)
                  for _, table in node.joins)  # fmt: skip
        self._static = frozenset(id(table) for table in tables if self._is_small(table))

    def _is_small(self, table: JoinBuild) -> bool:
        """Whether all rows of a static table are the flow's own, in memory, and few, and no Python makes others."""
        below = list(walk_nodes(table.input))
        inputs = [node.source.data for node in below if isinstance(node, Scan)]
        data = [self._sources[each.number].data for each in inputs if isinstance(each, Input)]
        is_few = all(isinstance(each, Batches) and each.table is not None and each.table.num_rows <= FEW_ROWS
                     for each in data)  # fmt: skip
        return is_few and not any(isinstance(node, Host) for node in below)

    def collect(self, options: Options, given: Batches | None = None) -> pa.Table:
        """The whole result; `given` is the data of the source that has none of its own."""
        return pa.Table.from_batches(list(self.batches(options, given)), self._schema)

    def batches(self, options: Options, given: Batches | None = None) -> Iterator[pa.RecordBatch]:
        """The result batch by batch."""
        inputs = [given if source.data is None else source.data for source in self._sources]
        run = _Run(options, built=self._built, inputs=inputs, idle=self._idle, static=self._static)
        try:
            yield from array_limits.guarded("this flow", _conformed(lambda: run.rows(self._plan), self._schema))
        except ComputeError as error:
            raise placed(error, self._op, self._plan) from None


def _conformed(rows: Callable[[], Iterator[pa.RecordBatch]], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for batch in rows():
        if batch.schema == schema:
            yield batch
        else:
            yield from (conformed(part, schema) for part in array_limits.light(batch))


class Program:
    """A compiled program that is run again and again over batches given to it; static tables are built once.

    For few rows, what a node made ready is used again: kernels and tables. A run takes it and puts it back, so runs at
    the same time do not meet.
    """

    def __init__(self, node: Node) -> None:
        self.node, self._schema = node, node.schema.arrow
        self._built: dict[int, JoinTable] = {}  # by the join's identity, which the program keeps
        self._again: Again = {}
        self._given: pa.Schema | None = None  # of the batches that `_again` is for

    def run(self, batches: Iterable[pa.RecordBatch], options: Options) -> Iterator[pa.RecordBatch]:
        """What the program makes of batches of its input's columns."""
        again = None
        if isinstance(batches, list) and 0 < sum(batch.num_rows for batch in batches) <= FEW_ROWS:
            if any(batch.schema != self._given for batch in batches):
                self._again, self._given = {}, batches[0].schema
            if all(batch.schema == self._given for batch in batches):
                again, options = self._again, replace(options, workers=1)
        return _conformed(lambda: _Run(options, batches, built=self._built, again=again).rows(self.node), self._schema)


class StandingProgram:
    """A program that ends in groups, whose rows are counted in again and again, and whose groups are taken at times.

    If times are `watched`, kernels tell how far those of each batch reach.
    """

    def __init__(self, node: WindowAggregate, watched: bool = False, whole: WindowAggregate | None = None) -> None:
        self.node, self._watched, self._whole = node, watched, whole
        self._schema = node.schema.arrow
        self._built: dict[int, JoinTable] = {}
        self._standing: Standing | None = None

    def add(self, batches: Iterable[pa.RecordBatch], options: Options, row: int = 0) -> int:
        """Count rows in, which as the groups get them are numbered from `row` on; gives the number behind the last.

        After an error, nothing is known of the groups.
        """
        run = _Run(options, batches, built=self._built)
        if self._standing is None:
            self._standing = Standing(self.node, run.joins(self.node.joins), options, watched=self._watched,
                                      whole=self._whole)
        rows, self._standing.row = run.rows(self.node.input), row
        self._standing.add(rows if self._watched else joined(rows), options.workers)
        return self._standing.row

    def seen(self, batches: list[pa.RecordBatch]) -> list[tuple[int, int]] | None:
        """The least and the greatest time of each of the batches that were added last; None if nobody could look."""
        is_direct = isinstance(self.node.input, Scan) and self._standing is not None
        return self._standing.seen(batches) if is_direct and self._standing is not None else None

    @property
    def count(self) -> int:
        return 0 if self._standing is None else self._standing.count

    def take(self) -> Iterator[pa.RecordBatch]:
        """All groups since the last time."""
        if self._standing is not None:
            yield from _conformed(self._standing.take, self._schema)

    def take_whole(self) -> Iterator[pa.RecordBatch]:
        """All groups since the last time, as those of `whole`."""
        if self._standing is not None and self._whole is not None:
            yield from _conformed(self._standing.take_whole, self._whole.schema.arrow)

    @property
    def is_parted(self) -> bool:
        """Whether rows wait, by key group, to be aggregated when groups are taken."""
        return self._standing is not None and self._standing.is_parted

    @property
    def part_bytes(self) -> int:
        return 0 if self._standing is None else self._standing.part_bytes


class RingProgram:
    """A program that ends in sliding windows, whose rows are counted in again and again: see `standing_ring.py`."""

    def __init__(self, node: WindowAggregate, partial: WindowAggregate, size: int, options: Options) -> None:
        self.node, self._options = node, options
        self._built: dict[int, JoinTable] = {}
        joins = _Run(options, built=self._built).joins(node.joins)
        self.ring = StandingRing(node, partial, joins, options, size)

    def add(self, batches: list[pa.RecordBatch], workers: int) -> list[pa.RecordBatch]:
        """Count rows in; gives partial groups that had to leave. After an error, nothing is known of the windows."""
        run = _Run(replace(self._options, workers=workers), batches, built=self._built)
        return self.ring.add([batch for batch in run.rows(self.node.input) if batch.num_rows], workers)


class _Run:
    """One run of a program with its options. `given` are the batches of a source that has no data of its own, `inputs`
    the data of a plan's sources by number. `built` are static tables by the identity of their node, which the caller
    retains for the next run (all, or those of `static`); `again` and `idle` is what the last run left for the next.
    """

    def __init__(self, options: Options, given: Iterable[pa.RecordBatch] = (), *, built: dict[int, JoinTable],
                 again: Again | None = None, inputs: Sequence[object] = (), idle: Idle | None = None,
                 static: frozenset[int] | None = None) -> None:
        self._options, self._given, self._built, self._again = options, given, built, again
        self._inputs, self._idle, self._static = inputs, idle, static

    def _data(self, node: Scan) -> object:
        """The data of a source; None where batches are given."""
        data = node.source.data
        return self._inputs[data.number] if isinstance(data, Input) else data

    def _table(self, node: Node) -> pa.Table | None:
        """The table behind a scan, if all its data is in memory: facts of the whole input for free."""
        if not isinstance(node, Scan):
            return None
        data = self._data(node)
        if isinstance(data, Batches):
            return data.table
        if data is None and isinstance(self._given, list) and self._given:
            return pa.Table.from_batches([batch.select(list(node.source.columns)) for batch in self._given])
        return None

    def rows(self, node: Node) -> Iterator[pa.RecordBatch]:
        """The batches of a node; errors of pyarrow and the system say which step met them."""
        return array_limits.guarded(_step(node), self._rows(node))

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
            case Host():
                return run_host(node, self.rows(node.input))
            case Limit():
                return _take(self.rows(node.input), node.count)
            case Sort():
                return run_ordered(node, self.rows(node.input))
            case Union():
                return self._chain(node)

    def _aggregate(self, node: WindowAggregate, then: Pipeline | None) -> Iterator[pa.RecordBatch]:
        """The groups of a node, through the pipeline that follows, if any."""
        top = node if then is None else then
        joins, then_joins = self.joins(node.joins), {} if then is None else self.joins(then.joins)
        if (again := self._again_at(node)) is not None:
            return self._group_again(top, node, then, again)
        table, rows = self._table(node.input), self._input(node)
        key = self._idle_key(top, table, [*node.joins, *(() if then is None else then.joins)])
        known = None if key is None or self._idle is None else self._idle.pop(key, None)
        if isinstance(known, GroupRun) and table is not None:
            known.renew(table, self._options)
        else:
            known = group_run(node, joins, self._options, table, then, then_joins)
        return self._and_back(known, known.run(rows), key)

    def _pipeline(self, node: Pipeline) -> Iterator[pa.RecordBatch]:
        """The rows of a pipeline."""
        joins = self.joins(node.joins)
        if node.dedup is None and (again := self._again_at(node)) is not None:
            return self._pipe_again(node, again)
        table, rows = self._table(node.input), self._input(node)
        if node.dedup is not None:
            return run_pipe(node, rows, joins, self._options, table)
        key = self._idle_key(node, table, node.joins)
        known = None if key is None or self._idle is None else self._idle.pop(key, None)
        if isinstance(known, Work):
            known.prepared.renew(table)
        else:
            known = ready(node, joins, self._options, table)
        return self._and_back(known, run_ready(known, rows, self._options), key)

    def _idle_key(self, node: Node, table: pa.Table | None,
                  joins: Iterable[tuple[int, JoinBuild]]) -> tuple[object, ...] | None:
        """Under which what a node made ready is found again; None if a run with other data may need another.

        Facts of a whole table decide on a kernel, and so do the static tables.
        """
        if self._idle is None or self._static is None or table is None:
            return None
        if any(id(join) not in self._static for _, join in joins):
            return None
        return id(node), self._options.cpu, self._options.safe, self._options.cache

    def _and_back(self, used: GroupRun | Work, rows: Iterator[pa.RecordBatch],
                  key: tuple[object, ...] | None) -> Iterator[pa.RecordBatch]:
        """The rows; then what made them is left for the next run."""
        yield from rows
        if key is not None and self._idle is not None:
            used.release()
            self._idle[key] = used

    def _again_at(self, node: Pipeline | WindowAggregate) -> Again | None:
        """What the last run left, if the node is right over the batches that were given, some of which have rows."""
        is_given = isinstance(node.input, Scan) and node.input.source.data is None
        return self._again if is_given else None

    def _group_again(self, top: Node, node: WindowAggregate, then: Pipeline | None,
                     again: Again) -> Iterator[pa.RecordBatch]:
        known = again.pop(id(top), None)
        if not isinstance(known, Standing):
            known = Standing(node, self.joins(node.joins), self._options, then,
                             {} if then is None else self.joins(then.joins), few=True)
        known.add(self.rows(node.input), 1)
        yield from known.take()
        again[id(top)] = known

    def _pipe_again(self, node: Pipeline, again: Again) -> Iterator[pa.RecordBatch]:
        known = again.pop(id(node), None)
        if not isinstance(known, Work):
            known = ready(node, self.joins(node.joins), self._options, self._table(node.input))
            known.prepared.knows_all = False  # the batches of later runs may have nulls where these have none
        yield from run_ready(known, self.rows(node.input), self._options)
        again[id(node)] = known

    def _input(self, node: Pipeline | WindowAggregate) -> Iterator[pa.RecordBatch]:
        """The rows that a kernel reads; a source may leave out those that its first filter drops.

        Small batches are put together, so that a kernel is called once for many, where that keeps no result waiting:
        all rows are in memory, or all are counted before the first group comes out.
        """
        match node.input, node.steps:
            case Scan() as scan, (FilterStep(predicate), *_) if isinstance(self._data(scan), BoundSource):
                rows = array_limits.guarded(_step(scan), self._scan(scan, tests_of(predicate)))
            case below, _:
                rows = self.rows(below)
        data = self._data(node.input) if isinstance(node.input, Scan) else None
        is_at_hand = isinstance(data, Batches) and data.table is not None
        return joined(rows) if is_at_hand or isinstance(node, WindowAggregate) else rows

    def _scan(self, node: Scan, tests: tuple[Condition, ...] = ()) -> Iterator[pa.RecordBatch]:
        data = self._data(node)
        if data is None:
            names = list(node.source.columns)
            yield from (batch if batch.schema.names == names else batch.select(names) for batch in self._given)
            return
        if not isinstance(data, Batches | BoundSource):
            raise InternalError("a source without data reached the runtime")
        names = list(node.source.columns)
        if isinstance(data, BoundSource):
            data = data.project(names).where(tests)
        for batch in data.read():
            yield batch if batch.schema.names == names else batch.select(names)

    def _chain(self, node: Union) -> Iterator[pa.RecordBatch]:
        schema = node.schema.arrow
        for each in node.inputs:
            yield from _conformed(partial(self.rows, each), schema)

    def joins(self, joins: tuple[tuple[int, JoinBuild], ...]) -> dict[int, JoinTable]:
        return {number: self._join(table) for number, table in joins}

    def _join(self, table: JoinBuild) -> JoinTable:
        known = self._built.get(id(table))
        if known is None:
            known = build(table, self.rows(table.input), self._options)
            if self._static is None or id(table) in self._static:
                self._built[id(table)] = known
        return known


def _step(node: Node) -> str:
    """What the user calls a node."""
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
        case _:
            return "this flow"


def _take(rows: Iterator[pa.RecordBatch], count: int) -> Iterator[pa.RecordBatch]:
    left = count
    for batch in rows:
        if left <= 0:
            return
        yield batch.slice(0, left)
        left -= batch.num_rows
        if left <= 0:
            return


# Combining partial groups by group number instead of keys: for groups whose position is known already, next to those of
# a store or a file. The output is in the order of the numbers.
_NUMBER = "#number"


class CombineByNumber:
    """The `combine` phase of an aggregation, by group numbers instead of keys."""

    def __init__(self, two: TwoPhase) -> None:
        self._two = two

    def combine(self, rows: pa.RecordBatch, numbers: np.ndarray, options: Options) -> pa.RecordBatch:
        """The combined values of each number, in the order of the numbers, which are 0, 1, ... without gaps."""
        names = self._two.values.names
        given = rows.select(names).add_column(0, pa.field(_NUMBER, pa.int64(), False), pa.array(numbers, pa.int64()))
        found = pa.concat_batches(list(self._program.run([given], options)))
        order = pa.array(np.argsort(np.asarray(found.column(_NUMBER)), kind="stable"))
        return pa.RecordBatch.from_arrays([taken(found.column(name), order) for name in names], names=names)

    @cached_property
    def _program(self) -> Program:
        values = self._two.values
        source = ops.Source("partials", Schema((Field(_NUMBER, I64, False), *values)).arrow, (_NUMBER, *values.names))
        table = replace(self._two.combine.table, keys=(Key(_NUMBER, I64, False),), window=None, slicing=Slicing.NONE,
                        slice_size=0)
        return Program(WindowAggregate(Scan(source), (), table, (Col(_NUMBER, I64, False),)))
