"""Tasks: what runs in a Python worker, from an iterator of Arrow batches to another.

Spark sends batches of 10,000 rows (`spark.sql.execution.arrow.maxRecordsPerBatch`). They are joined before a kernel
sees them, so that what Python does for a batch is done for many rows. All steps of a task are generators over one
another: a batch is asked for when the one before it has been worked on.

A `Task` is pickled as its steps, which hold plans; a process unpacks each task once (`shipping.py`).
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
from scalein.ir import ops
from scalein.ir.rewrite import walk_ops
from scalein.options import Options
from scalein.spark.phases import Phases
from scalein.spark.serialize import MOST_KEPT, Packed, optimised, pack, settled, unpack
from scalein.spark.shuffle import cells, joined, opened, routed
from scalein.spark.types import checked_columns, entering, leaving, leaving_schema

if TYPE_CHECKING:
    from pyspark.sql import Row

JOINED_ROWS = 1 << 17  # of a batch for kernels
JOINED_BYTES = 16 << 20
ROWS_AT_ONCE = 10_000  # Python objects that become a batch

Rows = Iterator[pa.RecordBatch]


class Step(Protocol):
    """A picklable function of batches."""

    def run(self, batches: Rows, options: Options) -> Rows: ...


def task_options() -> Options:
    """Options of the task that this process runs: as many threads as Spark has given it cores."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return Options.make(workers=1 if context is None else max(1, context.cpus()))


class Task:
    """Steps one behind the other: the function that Spark calls with the batches of a partition."""

    def __init__(self, *steps: Step) -> None:
        self.steps = steps

    @cached_property
    def _packed(self) -> Packed:
        return pack(self.steps)

    def __reduce__(self) -> tuple[object, ...]:
        return _task, self._packed

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        options = task_options()
        rows = iter(batches)
        for step in self.steps:
            rows = step.run(rows, options)
        return rows


def _task(digest: str, data: bytes) -> Task:
    steps = unpack(digest, data)
    assert isinstance(steps, tuple)
    return Task(*steps)


@dataclass(frozen=True)
class Entering:
    """Spark's columns, in the order of a schema, as a flow has them; small batches are joined."""

    schema: pa.Schema

    def run(self, batches: Rows, options: Options) -> Rows:
        for batch in joined(batches, JOINED_BYTES, JOINED_ROWS):
            yield entering(batch, self.schema)


@dataclass(frozen=True)
class Leaving:
    """A flow's columns in exactly the types that Spark was told of."""

    schema: pa.Schema

    def run(self, batches: Rows, options: Options) -> Rows:
        for batch in batches:
            yield from leaving(batch, self.schema)


@dataclass(frozen=True)
class Mapped:
    """Row by row ops."""

    phases: Phases

    def run(self, batches: Rows, options: Options) -> Rows:
        return self.phases.map(batches, options)


@dataclass(frozen=True)
class Whole:
    """A segment over all rows of some keys."""

    phases: Phases

    def run(self, batches: Rows, options: Options) -> Rows:
        return self.phases.whole(batches, options)


@dataclass(frozen=True)
class Received:
    """The half of a segment behind the shuffle."""

    phases: Phases

    def run(self, batches: Rows, options: Options) -> Rows:
        rows = self.phases.crossing_rows
        schemas = [self.phases.crossing] if rows is None else [self.phases.crossing, rows]
        return self.phases.final(opened(batches, schemas), options)


@dataclass(frozen=True)
class Sent:
    """The half of a segment before the shuffle, as cells; the number of a target is its place."""

    phases: Phases
    places: tuple[int, ...]

    def run(self, batches: Rows, options: Options) -> Rows:
        phases = self.phases
        names = phases.crossing.names
        crossing = phases.map(batches, options, rows_too=True)
        for is_groups, some in groupby(crossing, key=lambda batch: batch.schema.names == names):
            keys = phases.keys if is_groups else phases.row_keys
            yield from cells(routed(some, keys, len(self.places), options), self.places, 0 if is_groups else 1)


# --- Flow.map_in_arrow, Flow.map_partitions


class Mapping:
    """A flow over the rows of one partition."""

    def __init__(self, op: ops.Op) -> None:
        self.op = settled(optimised(op), NOWHERE)
        waiting = [below for below in walk_ops(self.op) if isinstance(below, ops.Source) and below.data is None]
        if len(waiting) != 1:
            found = f"{len(waiting)} unbound inputs" if waiting else "its data already"
            raise BadArgument("in Spark, a flow gets its rows from a partition, so it begins with si.flow(schema)",
                              found=found, hint="scalein.spark.run(flow, spark) runs a flow that is bound to files")
        self.source = waiting[0]
        self._program: Program | None = None

    def run(self, batches: Rows, options: Options) -> Rows:
        """The flow's rows for rows of its source's columns."""
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
    """What `Flow.map_in_arrow` gives for the batches of a partition."""
    mapping = _mapping_of(op)
    out = leaving_schema(op.schema.arrow, NOWHERE)
    options = task_options()
    for batch in mapping.run(_as_wanted(iter(batches), mapping.reads), options):
        yield from leaving(batch, out)


def map_partitions(op: ops.Op, rows: Iterable[Any]) -> Iterator[Row]:
    """What `Flow.map_partitions` gives for the rows of a partition."""
    from pyspark.sql import Row

    mapping = _mapping_of(op)
    make = Row(*op.schema.names)
    out = leaving_schema(op.schema.arrow, NOWHERE)
    for batch in mapping.run(_batches_of(iter(rows), mapping.source, mapping.reads), task_options()):
        for part in leaving(batch, out):
            for values in zip(*(column.to_pylist() for column in part.columns), strict=True):
                yield make(*values)


_mappings: OrderedDict[int, tuple[ops.Op, Mapping]] = OrderedDict()  # by the op's identity, which the entry keeps


def _mapping_of(op: ops.Op) -> Mapping:
    """The mapping of a flow; plans are equal whatever their static tables hold, so they are told apart by identity."""
    known = _mappings.get(id(op))
    if known is None:
        known = _mappings[id(op)] = (op, Mapping(op))
        while len(_mappings) > MOST_KEPT:
            _mappings.popitem(last=False)
    return known[1]


def _as_wanted(batches: Rows, wanted: pa.Schema) -> Rows:
    """Batches of a DataFrame that nobody has looked at yet, as the flow wants them."""
    first = next(batches, None)
    if first is None:
        return
    schema = checked_columns(wanted, first.schema)
    names = wanted.names
    for batch in joined((each if each.schema.names == names else each.select(names)
                         for each in chain([first], batches)), JOINED_BYTES, JOINED_ROWS):
        yield entering(batch, schema)


def _batches_of(rows: Iterator[Any], source: ops.Source, wanted: pa.Schema) -> Rows:
    """Rows of Python objects as batches: Rows and dicts by name, tuples in the order of the flow's schema."""
    while some := list(islice(rows, ROWS_AT_ONCE)):
        columns = []
        for field in wanted:
            values = _values(some, field.name, source.arrow.names.index(field.name))
            try:
                columns.append(pa.array(_in_zone(values, field.type), field.type))
            except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, OverflowError) as error:
                raise BadData(f"values of {field.name!r} are not of the flow's type {field.type}",
                              found=error) from None
        yield entering(pa.RecordBatch.from_arrays(columns, names=wanted.names), wanted)


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


def _in_zone(values: list[Any], arrow: pa.DataType) -> list[Any]:
    """Spark's rows have times of this machine's zone where the flow has moments."""
    if not (pa.types.is_timestamp(arrow) and arrow.tz is not None):
        return values
    return [value.astimezone() if isinstance(value, datetime) and value.tzinfo is None else value for value in values]
