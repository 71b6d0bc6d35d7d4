"""The state of a stream as a table, without the flow that made it.

A manifest says of what its runs are made: key columns, and how results come from accumulators, or from columns of
rows that wait. That is all that is needed to finish groups, so nothing of the flow's code is stored or run.
"""

from __future__ import annotations

import base64
from math import gcd
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from scalein.compiler import compile_flow
from scalein.dtypes import Field, Schema, from_arrow_type
from scalein.errors import BadArgument, Damaged, here
from scalein.exec.bounded import Program
from scalein.exec.event_time import as_integers
from scalein.ir import ops
from scalein.ir.exprs import Agg, Col, Named, NamedAgg
from scalein.ir.partials import two_phase
from scalein.ir.physical import Scan, WindowAggregate
from scalein.ir.tables import Acc, AccKind, Key, Output, Slicing, Table
from scalein.jobs.fragments import placeholder
from scalein.jobs.operators import filtered
from scalein.jobs.partials import group_of
from scalein.options import Options
from scalein.spark.streaming.clocks import least_open
from scalein.spark.streaming.manifest import Manifests
from scalein.spark.streaming.runs import HASH, Run, pieces_of
from scalein.spark.streaming.work import SLICE, Work
from scalein.storage.checked_json import Json, as_int, as_list, as_map, as_text
from scalein.storage.object_store import parse_location


def read_state(checkpoint: object) -> pa.Table:
    """The state of a stream as it was behind the last batch that was committed; the stream may be running.

    Of groups these are the keys and aggregates, of open windows with what they have so far; of a distinct the rows
    seen.
    """
    at = here()
    location = parse_location(checkpoint, at)
    manifests = Manifests(location)
    for attempt in range(_ATTEMPTS):
        found = manifests.newest()
        if found is None:
            raise BadArgument("there is no state of a stream in this checkpoint", at=at, file=location,
                              hint="it is there behind the first batch")
        try:
            state = found["state"]
            if state is None:
                raise BadArgument("the flow of this checkpoint keeps no state: it works row by row", at=at,
                                  file=location)
            pieces = [piece for run in as_list(found["runs"]) for piece in pieces_of(location, Run.of(run))]
            return _finished(as_map(state), pieces, found["watermark"])
        except (KeyError, ValueError, TypeError) as error:
            raise Damaged("a manifest does not say what one says", file=location.uri_of("manifests"),
                          found=repr(error)) from error
        except Damaged:  # a running stream may have removed a file meanwhile: then there is a newer manifest
            if attempt == _ATTEMPTS - 1 or manifests.is_newest(found):
                raise
    raise AssertionError


_ATTEMPTS = 5


def described(work: Work) -> Json:
    """What a manifest says of the state of a flow; None if it has none."""
    if work.mode == "rowwise":
        return None
    window: Json = None if work.window is None else [work.window.size, work.window.every]
    about: dict[str, Json] = {"mode": work.mode, "kind": work.phases.kind, "window": window, "slices": work.slices,
                              "columns": _schema_text(work.kept)}
    if work.phases.kind != "partials":
        about["aggregate"] = _described_aggregate(work.phases.over_rows)
        return about
    final = two_phase(group_of(compile_flow(work.segment.op))).final
    table = final.table
    time = [] if table.window is None else ["window_start"]
    fields = pa.schema([work.phases.crossing.field(name) for name in (*(key.name for key in table.keys), *time)])
    about["keys"] = _schema_text(fields)
    about["accumulators"] = [_described_acc(acc) for acc in table.accs]
    about["outputs"] = [[output.name, output.fn, [*output.accs]] for output in table.outputs]
    outputs = Schema(tuple(Field(output.name, output.dtype, output.nullable) for output in table.outputs))
    about["results"] = _schema_text(outputs.arrow)
    return about


def _described_acc(acc: Acc) -> Json:
    """An accumulator of partial groups: its kind, what it takes, and, if it takes more, by what and which parts."""
    columns = ["" if expr is None else _column(expr) for expr in (acc.arg, acc.by)]
    return [acc.kind.value, *(columns + [_column(part) for part in acc.parts] if acc.parts else columns[:1])]


def _described_aggregate(op: ops.Aggregate) -> Json:
    """An aggregation of columns: keys, the time of its window, and of each result the function and what it takes."""
    aggs: list[Json] = []
    for each in op.aggs:
        params: list[Json] = []
        for param in each.agg.params:
            assert isinstance(param, str | int | float), param
            params.append(param)
        aggs.append([each.name, each.agg.fn, [_column(arg) for arg in each.agg.args], params])
    return {"keys": [[key.name, _column(key.expr)] for key in op.keys],
            "time": None if op.window is None else _column(op.window.time), "aggs": aggs,
            "results": _schema_text(op.schema.arrow)}


def _column(expr: object) -> str:
    assert isinstance(expr, Col)
    return expr.name


def _finished(state: dict[str, Json], pieces: list[pa.RecordBatch], watermark: Json) -> pa.Table:
    """The table of a state."""
    columns = _schema(state["columns"])
    window = None if state["window"] is None else [as_int(each) for each in as_list(state["window"])]
    if window is not None and watermark is not None:
        first = least_open(as_int(watermark), *window)
        slices = as_text(state["slices"])
        pieces = [filtered(piece, pc.greater_equal(as_integers(piece.column(slices)), first)) for piece in pieces]
    given = [piece.drop_columns([HASH]) for piece in pieces if piece.num_rows]
    if state["kind"] == "partials":
        program = Program(_group(state, window, columns))
    elif "aggregate" in state:
        program = Program(compile_flow(_aggregate(as_map(state["aggregate"]), window, columns)))
        given = [piece.select([name for name in columns.names if name != SLICE]) for piece in given]
    else:  # a version that did not say of what the rows are
        return pa.Table.from_batches(given, columns).select([name for name in columns.names if name != SLICE])
    found = list(program.run(given, Options.make())) if given else []
    if window is not None and watermark is not None:  # what is open is also part of windows that are closed
        found = [filtered(batch, pc.greater(as_integers(batch.column("window_end")), as_int(watermark)))
                 for batch in found]
    table = pa.Table.from_batches(found, program.node.schema.arrow)
    return table.select(_schema(state["keys"]).names) if state["mode"] == "distinct" else table


def _group(state: dict[str, Json], window: list[int] | None, columns: pa.Schema) -> WindowAggregate:
    """The aggregation of partial groups, from its description."""
    keys, results = _schema(state["keys"]), _schema(state["results"])
    typed = {field.name: from_arrow_type(field.type) for field in columns}
    accs = []
    for each in map(as_list, as_list(state["accumulators"])):
        taken = [Col(name, typed[name], True) if name else None for name in map(as_text, each[1:])]
        parts = tuple(column for column in taken[2:] if column is not None)
        accs.append(Acc(AccKind(as_text(each[0])), taken[0], taken[1] if parts else None, parts=parts))
    outputs = tuple(Output(field.name, as_text(fn), from_arrow_type(field.type), field.nullable,
                           tuple(as_int(k) for k in as_list(numbers)))
                    for field, (_, fn, numbers) in zip(results, map(as_list, as_list(state["outputs"])), strict=True))
    own = tuple(Key(field.name, from_arrow_type(field.type), field.nullable) for field in keys
                if window is None or field.name != "window_start")
    span = None if window is None else ops.Window(Col("window_start", typed["window_start"], False), *window)
    table = Table(own, tuple(accs), outputs, Slicing.NONE if span is None else Slicing.KEY, span,
                  0 if window is None else gcd(*window))
    source = ops.Source("partials", columns, tuple(columns.names))
    return WindowAggregate(Scan(source), (), table, tuple(Col(key.name, key.dtype, key.nullable) for key in own))


def _aggregate(about: dict[str, Json], window: list[int] | None, columns: pa.Schema) -> ops.Op:
    """The aggregation of rows that wait, from its description."""
    rows = Schema.from_arrow(pa.schema([field for field in columns if field.name != SLICE]))
    results = _schema(about["results"])

    def column(name: Json) -> Col:
        found = rows[as_text(name)]
        return Col(found.name, found.dtype, found.nullable)

    keys = tuple(Named(as_text(name), column(of)) for name, of in map(as_list, as_list(about["keys"])))
    aggs = []
    for name, fn, args, params in map(as_list, as_list(about["aggs"])):
        result = results.field(as_text(name))
        agg = Agg(as_text(fn), tuple(map(column, as_list(args))), from_arrow_type(result.type), result.nullable,
                  tuple(as_list(params)))
        aggs.append(NamedAgg(result.name, agg))
    span = None if window is None else ops.Window(column(about["time"]), *window)
    return ops.Aggregate(placeholder(rows), keys, span, tuple(aggs))


def _schema_text(schema: pa.Schema) -> str:
    return base64.b64encode(schema.serialize()).decode()


def _schema(text: Any) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(as_text(text))))
