"""Tasks: the functions that run in a Python worker, from an iterator of Arrow batches to another.

Spark sends batches of 10,000 rows (`spark.sql.execution.arrow.maxRecordsPerBatch`). They are coalesced before a kernel
sees them, so that the Python code for a batch runs once for many rows. All steps of a task are generators over one
another: a batch is pulled when the one before it is done.

A `Task` is pickled as its steps, which hold plans; a process deserializes each task once (`serialize.py`). One thread
of a worker process runs a task at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import chain, groupby, islice
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from scalein.errors import NOWHERE, BadArgument, BadData, ComputeError
from scalein.exec.bounded import Program
from scalein.exec.error_location import located
from scalein.exec.event_time import extent
from scalein.ir import ops
from scalein.ir.rewrite import walk_ops
from scalein.options import Options
from scalein.spark.map_reduce import MapReduce, refuse_joins_by_partition
from scalein.spark.serialize import MAX_CACHED, Serialized, deserialize, optimise, read_static_tables, serialize
from scalein.spark.shuffle import coalesce_batches, decode_blocks, route, shuffle_blocks
from scalein.spark.stream_joins import ShuffledJoin
from scalein.spark.types import check_batch_schema, from_spark, spark_arrow_schema, to_spark

if TYPE_CHECKING:
    from pyspark.sql import Row

COALESCED_ROWS = 1 << 17  # of a coalesced batch
COALESCED_BYTES = 16 << 20
ROW_BATCH = 10_000  # Python rows that become a batch

Rows = Iterator[pa.RecordBatch]


class Step(Protocol):
    """A picklable function of batches."""

    def run(self, batches: Rows, options: Options) -> Rows: ...


def task_options() -> Options:
    """Options of the task that this process runs: as many threads as Spark has assigned it cores."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return Options.make(workers=1 if context is None else max(1, context.cpus()))


class Task:
    """A chain of steps: the function that Spark calls with the batches of a partition."""

    def __init__(self, *steps: Step) -> None:
        self.steps = steps

    @cached_property
    def _serialized(self) -> Serialized:
        return serialize(self.steps)

    def __reduce__(self) -> tuple[object, ...]:
        return _task, self._serialized

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        options = task_options()
        rows = iter(batches)
        for step in self.steps:
            rows = step.run(rows, options)
        return rows


def _task(digest: str, data: bytes) -> Task:
    steps = deserialize(digest, data)
    assert isinstance(steps, tuple)
    return Task(*steps)


@dataclass(frozen=True)
class FromSpark:
    """Converts Spark's columns, in the order of a schema, to the flow's types; small batches are coalesced."""

    schema: pa.Schema

    def run(self, batches: Rows, options: Options) -> Rows:
        for batch in coalesce_batches(batches, COALESCED_BYTES, COALESCED_ROWS):
            yield from_spark(batch, self.schema)


@dataclass(frozen=True)
class ToSpark:
    """Converts a flow's columns to exactly the types of the schema given to Spark."""

    schema: pa.Schema

    def run(self, batches: Rows, options: Options) -> Rows:
        for batch in batches:
            yield from to_spark(batch, self.schema)


@dataclass(frozen=True)
class MapRows:
    """Row-wise ops."""

    map_reduce: MapReduce

    def run(self, batches: Rows, options: Options) -> Rows:
        return self.map_reduce.map(batches, options)


@dataclass(frozen=True)
class CompleteAggregate:
    """A whole fragment, over all rows of some keys."""

    map_reduce: MapReduce

    def run(self, batches: Rows, options: Options) -> Rows:
        return self.map_reduce.complete(batches, options)


@dataclass(frozen=True)
class ReduceBlocks:
    """The reduce side of a fragment, over shuffle blocks."""

    map_reduce: MapReduce

    def run(self, batches: Rows, options: Options) -> Rows:
        rows = self.map_reduce.row_shuffle_schema
        schemas = [self.map_reduce.shuffle_schema] if rows is None else [self.map_reduce.shuffle_schema, rows]
        return self.map_reduce.final(decode_blocks(batches, schemas), options)


@dataclass(frozen=True)
class ShuffleWrite:
    """The map side of a fragment, as shuffle blocks; `target_ids` has the `target` value of each partition."""

    map_reduce: MapReduce
    target_ids: tuple[int, ...]

    def run(self, batches: Rows, options: Options) -> Rows:
        map_reduce = self.map_reduce
        names = map_reduce.shuffle_schema.names
        shuffle_schema = map_reduce.map(batches, options, may_send_rows=True)
        for are_groups, batches_of_kind in groupby(shuffle_schema, key=lambda batch: batch.schema.names == names):
            keys = map_reduce.keys if are_groups else map_reduce.row_keys
            routed = route(batches_of_kind, keys, len(self.target_ids), options)
            yield from shuffle_blocks(routed, self.target_ids, 0 if are_groups else 1)


LATEST_SCHEMA = pa.schema([pa.field("latest", pa.int64(), False)])


@dataclass(frozen=True)
class ShuffleWriteProcess:
    """The rows of a process, as shuffle blocks; every target also gets their greatest time, up to which timers fire."""

    map_reduce: MapReduce
    target_ids: tuple[int, ...]

    def run(self, batches: Rows, options: Options) -> Rows:
        state, targets, latest = self.map_reduce.state, len(self.target_ids), list[int]()
        assert isinstance(state, ops.Process)

        def timed() -> Rows:
            for batch in self.map_reduce.map(batches, options):
                if (found := extent(batch.column(state.time))) is not None:
                    latest[:] = [max([found[1], *latest])]
                yield batch

        yield from shuffle_blocks(route(timed(), self.map_reduce.keys, targets, options), self.target_ids)
        if latest and state.body.has_timer:
            time = pa.RecordBatch.from_arrays([pa.array(latest, pa.int64())], schema=LATEST_SCHEMA)
            yield from shuffle_blocks(((target, time) for target in range(targets)), self.target_ids, 1)


@dataclass(frozen=True)
class ProcessBlocks:
    """A process, over shuffle blocks."""

    map_reduce: MapReduce

    def run(self, batches: Rows, options: Options) -> Rows:
        schemas = [self.map_reduce.shuffle_schema, LATEST_SCHEMA]
        rows, latest = list[pa.RecordBatch](), list[int]()
        for batch in decode_blocks(batches, schemas):
            if batch.schema.names == LATEST_SCHEMA.names:
                latest += batch.column(0).to_pylist()
            else:
                rows.append(batch)
        return self.map_reduce.processed(rows, max(latest, default=None), options)


@dataclass(frozen=True)
class ShuffleWriteSide:
    """The rows of a side of a join, as shuffle blocks."""

    join: ShuffledJoin
    side: int
    target_ids: tuple[int, ...]

    def run(self, batches: Rows, options: Options) -> Rows:
        keys = self.join.sides[self.side].keys
        return shuffle_blocks(route(batches, keys, len(self.target_ids), options), self.target_ids, self.side)


@dataclass(frozen=True)
class JoinBlocks:
    """The join of both sides' shuffle blocks."""

    join: ShuffledJoin

    def run(self, batches: Rows, options: Options) -> Rows:
        return self.join.joined(decode_blocks(batches, [side.schema for side in self.join.sides]), options)


# --- Flow.map_in_arrow, Flow.map_partitions


class Mapping:
    """A flow over the rows of one partition."""

    def __init__(self, op: ops.Op) -> None:
        refuse_joins_by_partition(op)
        self.op = read_static_tables(optimise(op), NOWHERE)
        unbound = [each for each in walk_ops(self.op) if isinstance(each, ops.Source) and each.data is None]
        if len(unbound) != 1:
            found = f"{len(unbound)} unbound inputs" if unbound else "its data already"
            raise BadArgument("in Spark, a flow gets its rows from a partition, so it begins with si.flow(schema)",
                              found=found, hint="scalein.spark.run(flow, spark) runs a flow that is bound to files")
        self.source = unbound[0]
        self._program: Program | None = None

    def run(self, batches: Rows, options: Options) -> Rows:
        """The flow's rows, for rows of its source's columns."""
        if self._program is None:
            from scalein.compiler import compile_flow

            self._program = Program(compile_flow(self.op))
        try:
            yield from self._program.run(batches, options)
        except ComputeError as error:
            raise located(error, self.op, self._program.node) from None

    @cached_property
    def reads(self) -> pa.Schema:
        return pa.schema([self.source.arrow.field(name) for name in self.source.columns])


def map_in_arrow(op: ops.Op, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The result of `Flow.map_in_arrow` for the batches of a partition."""
    mapping = _mapping_for(op)
    sent_types = spark_arrow_schema(op.schema.arrow, NOWHERE)
    options = task_options()
    for batch in mapping.run(_from_dataframe(iter(batches), mapping.reads), options):
        yield from to_spark(batch, sent_types)


def map_partitions(op: ops.Op, rows: Iterable[Any]) -> Iterator[Row]:
    """The result of `Flow.map_partitions` for the rows of a partition."""
    from pyspark.sql import Row

    mapping = _mapping_for(op)
    make_row = Row(*op.schema.names)
    sent_types = spark_arrow_schema(op.schema.arrow, NOWHERE)
    for batch in mapping.run(_batches_of(iter(rows), mapping.source, mapping.reads), task_options()):
        for part in to_spark(batch, sent_types):
            for values in zip(*(column.to_pylist() for column in part.columns), strict=True):
                yield make_row(*values)


_mappings: OrderedDict[int, tuple[ops.Op, Mapping]] = OrderedDict()  # by identity; the entry keeps the op alive


def _mapping_for(op: ops.Op) -> Mapping:
    """The mapping of a flow, by identity: plans compare equal even if their static tables differ."""
    entry = _mappings.get(id(op))
    if entry is None:
        entry = _mappings[id(op)] = (op, Mapping(op))
        while len(_mappings) > MAX_CACHED:
            _mappings.popitem(last=False)
    return entry[1]


def _from_dataframe(batches: Rows, schema_wanted: pa.Schema) -> Rows:
    """Batches of a DataFrame, whose schema is checked now, in the flow's types."""
    first = next(batches, None)
    if first is None:
        return
    schema = check_batch_schema(schema_wanted, first.schema)
    names = schema_wanted.names
    for batch in coalesce_batches((each if each.schema.names == names else each.select(names)
                                   for each in chain([first], batches)), COALESCED_BYTES, COALESCED_ROWS):
        yield from_spark(batch, schema)


def _batches_of(rows: Iterator[Any], source: ops.Source, schema_wanted: pa.Schema) -> Rows:
    """Rows of Python objects as batches: Rows and dicts by name, tuples in the order of the flow's schema."""
    while batches_of_kind := list(islice(rows, ROW_BATCH)):
        columns = []
        for field in schema_wanted:
            values = _values(batches_of_kind, field.name, source.arrow.names.index(field.name))
            try:
                columns.append(pa.array(_with_zone(values, field.type), field.type))
            except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, OverflowError) as error:
                raise BadData(f"values of {field.name!r} are not of the flow's type {field.type}",
                              found=error) from None
        yield from_spark(pa.RecordBatch.from_arrays(columns, names=schema_wanted.names), schema_wanted)


def _values(rows: list[Any], name: str, position: int) -> list[Any]:
    first = rows[0]
    try:
        if isinstance(first, dict):
            return [row[name] for row in rows]
        names = getattr(first, "__fields__", None)
        at = position if names is None else list(names).index(name)
        return [row[at] for row in rows]
    except (KeyError, ValueError, IndexError, TypeError):
        raise BadData(f"the rows have no column {name!r}, which the flow's schema names", found=repr(first)) from None


def _with_zone(values: list[Any], arrow: pa.DataType) -> list[Any]:
    """Spark's Row has a naive datetime in this machine's zone where the flow has a timestamp with a zone."""
    if not (pa.types.is_timestamp(arrow) and arrow.tz is not None):
        return values
    return [value.astimezone() if isinstance(value, datetime) and value.tzinfo is None else value for value in values]
