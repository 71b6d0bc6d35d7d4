"""Which session a row is in, where that must be known of each row.

Aggregates as large as their input (lists, quantiles, distinct values) and those that hold text are computed in two
passes over the rows: the first finds the sessions, the second joins each row with its own, the last one of its key that
begins at the row's time or before, and groups by keys and session.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from scalein.arrow_rows import as_integers, filtered
from scalein.compiler import compile_flow
from scalein.dtypes import BOOL, I64, DType, Field, Kind, Schema
from scalein.exec.bounded import Program
from scalein.exec.join_build import JoinTable, build
from scalein.exec.pipeline import run_pipeline
from scalein.ir import ops
from scalein.ir.exprs import Call, Col, Expr, Lit, Named, type_of
from scalein.ir.internal_names import internal
from scalein.ir.passes.aggregate_layout import aggregate_table
from scalein.ir.physical import JoinBuild, Pipeline, Scan, WindowAggregate, identity
from scalein.ir.stages import FOREVER, Probe, TimeRange
from scalein.ir.tables import Key, Slicing
from scalein.ir.unify import cast_to
from scalein.ir.windows import Session, session
from scalein.options import Options

if TYPE_CHECKING:
    from scalein.exec.aggregate import HashAggregate

Batches = list[pa.RecordBatch]
_START, _END, _TIME = internal("session_start"), internal("session_end"), internal("time")


def run_in_two_passes(run: HashAggregate, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The groups of an aggregation in sessions whose records do not hold all of a session."""
    from scalein.exec.aggregate import HashAggregate
    from scalein.exec.emit import Emitter
    from scalein.exec.partitioned_aggregate import arguments_of, over_columns

    options = run.options
    rows = list(run_pipeline(arguments_of(run.node), batches, run.joins, options, None))
    node = over_columns(run.node)
    window = node.table.window
    assert isinstance(window, Session)
    named = tuple(Named(internal(f"key{k}"), key) for k, key in enumerate(node.keys))
    spans = replace(node, table=aggregate_table(named, window, ()))
    finder = HashAggregate(spans, {}, options, None, Emitter(spans, None, {}, options))
    found = list(finder.run(iter(rows)))
    finder.release()
    join = SessionJoin(node.input.schema, named, window.time)
    tables = {0: join.table(found, options)}
    dtype = type_of(window.time)
    ends = tuple(Key(name, dtype, False) for name in ("window_start", "window_end"))
    cols = tuple(Col(name, dtype, False) for name in (_START, _END))
    table = replace(node.table, keys=(*node.table.keys, *ends), window=None, slicing=Slicing.NONE, slice_size=0)
    grouped = replace(node, steps=(join.probe("inner"),), table=table, keys=(*node.keys, *cols),
                      joins=((0, join.build),))
    last = HashAggregate(grouped, tables, options, None, run.emitter.over(grouped, options))
    yield from last.run(iter(rows))
    last.release()


class SessionJoin:
    """Rows with the sessions that they are in. `keys` and `time` are columns of the rows, or computed from them; the
    sessions have the names of the keys, `window_start` and `window_end`.
    """

    def __init__(self, rows: Schema, keys: Sequence[Named], time: Expr) -> None:
        self._rows, self._time = rows, time
        self._keys = tuple(_comparable([key.expr for key in keys]))
        dtype = type_of(time)
        fields = [Field(key.name, type_of(key.expr), key.expr.nullable) for key in keys]
        limits = [Field(name, dtype, False) for name in ("window_start", "window_end")]
        given = Schema((*fields, *limits))
        source = Scan(ops.Source("sessions", given.arrow, tuple(given.names)))
        cols = [Col(f.name, f.dtype, f.nullable) for f in given]
        items = [Named(internal(f"by{k}"), key) for k, key in enumerate(_comparable(cols[:-2]))]
        items += [Named(_START, cols[-2]), Named(_END, cols[-1]), Named(_TIME, cast_to(cols[-2], I64))]
        self._sessions, self._pipe = given, Pipeline(source, (), tuple(items), name="project")
        names = [item.name for item in items[: len(self._keys)]]
        by = tuple(Col(name, type_of(item.expr), False) for name, item in zip(names, items, strict=False))
        self.build = JoinBuild(self._pipe, by, (_START, _END), time=_TIME)

    def table(self, sessions: Iterable[pa.RecordBatch], options: Options) -> JoinTable:
        """The table of some sessions."""
        given = (batch.select(self._sessions.names) for batch in sessions)
        return build(self.build, run_pipeline(self._pipe, given, {}, options, None), options)

    def probe(self, how: str) -> Probe:
        time = cast_to(self._time, I64)
        if time.nullable:
            time = Call("fill_null", (time, Lit(0, I64)), dtype=I64, nullable=False)
        times = TimeRange(time, -FOREVER, time, 0, "backward")
        return Probe(0, self._keys, how, ((_START, _START), (_END, _END)), times=times)

    def split(self, rows: Batches, sessions: Batches, gap: int, options: Options) -> tuple[Batches, Batches]:
        """Rows that are in one of these sessions, and the others."""
        dtype = type_of(self._time)
        items = (*identity(self._rows), Named(_END, Col(_END, dtype, True)), Named(_TIME, cast_to(self._time, I64)))
        source = Scan(ops.Source("rows", self._rows.arrow, tuple(self._rows.names)))
        node = Pipeline(source, (self.probe("left"),), items, ((0, self.build),), name="join")
        inside: Batches = []
        outside: Batches = []
        program = Program(node, {id(self.build): self.table(sessions, options)})
        for batch in program.run(rows, options):
            last = pc.subtract(as_integers(batch.column(_END)), gap)
            is_in = pc.fill_null(pc.less_equal(batch.column(_TIME), last), False)
            own = batch.select(self._rows.names)
            inside.append(filtered(own, is_in))
            outside.append(filtered(own, pc.invert(is_in)))
        return ([batch for batch in found if batch.num_rows] for found in (inside, outside))  # type: ignore[return-value]


def spans_of(source: Schema, keys: tuple[Named, ...], window: Session) -> WindowAggregate:
    """The sessions of rows, without aggregates."""
    root = compile_flow(ops.Aggregate(ops.Source("rows", source.arrow, tuple(source.names)), keys, session(
        window.time, window.gap), ()))
    assert isinstance(root, WindowAggregate)
    return root


def _comparable(keys: Sequence[Expr]) -> list[Expr]:
    """Keys of a join that match as those of groups do, null with null; there is at least one."""
    found: list[Expr] = []
    for key in keys:
        if key.nullable:
            dtype = type_of(key)
            found.append(Call("fill_null", (key, Lit(_zero(dtype), dtype)), dtype=dtype, nullable=False))
            found.append(Call("is_null", (key,), dtype=BOOL, nullable=False))
        else:
            found.append(key)
    return found or [Lit(0, I64)]


def _zero(dtype: DType) -> object:
    """A value of a type."""
    if dtype.is_float:
        return 0.0
    if dtype.is_decimal:
        return Decimal(0)
    if dtype.is_bytes:
        return "" if dtype.is_string else b""
    return False if dtype.kind is Kind.BOOL else 0
