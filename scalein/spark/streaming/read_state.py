"""The state of a stream as a table, without the flow that made it.

A manifest describes its runs: key columns, and how results are computed from accumulators, or from columns of buffered
rows. That is enough to finish groups, so no code of the flow is stored or run.
"""

from __future__ import annotations

import base64
from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from scalein.arrow_rows import as_integers, filtered
from scalein.compiler import compile_flow
from scalein.dtypes import I64, Field, Schema, from_arrow_type
from scalein.errors import BadArgument, Damaged, here, warn
from scalein.exec.aggregate_operator import aggregate_node
from scalein.exec.bounded import Program
from scalein.exec.fragments import placeholder
from scalein.ir import ops
from scalein.ir.exprs import Agg, Col, Named, NamedAgg, type_of
from scalein.ir.partials import is_mergeable, two_phase
from scalein.ir.physical import Scan, WindowAggregate, identity
from scalein.ir.printer import aggregate_texts
from scalein.ir.tables import Acc, AccKind, Key, Output, Slicing, Table
from scalein.ir.windows import Window, window_from_json
from scalein.options import Options
from scalein.spark.streaming.manifest import Manifests
from scalein.spark.streaming.stream_plan import SLICE, StreamPlan
from scalein.state.hash_runs import HASH, Run, read_run
from scalein.state.merge_runs import merge_blocks
from scalein.state.run_table import NewestRecord, live_records, stored_records
from scalein.storage.checked_json import Json, as_int, as_list, as_map, as_text
from scalein.storage.object_store import Location, parse_location


def read_state(checkpoint: object) -> pa.Table:
    """The state of a stream after its last committed batch; the stream may be running.

    Of groups these are the keys and the aggregates so far, also of open windows; of a distinct its rows so far. Of an
    expression of aggregates these are the aggregates in it, under their own texts: `x.sum()`, `count()`. Aggregates of
    your own (`@si.udaf`) are left out. Of a process these are the keys and the fields of the class. Of a join of
    streams these are the rows of both sides that are retained: a column `side`, the columns of the left side, then
    those of the right one, with `_right` where both have a name.
    """
    at = here()
    location = parse_location(checkpoint, at)
    manifests = Manifests(location)
    for attempt in range(_ATTEMPTS):
        found = manifests.newest()
        if found is None:
            raise BadArgument("there is no state of a stream in this checkpoint", at=at, file=location,
                              hint="it is there after the first batch")
        try:
            state = found["state"]
            if state is None:
                raise BadArgument("the flow of this checkpoint has no state: it works row by row", at=at, file=location)
            if (mode := as_map(state).get("mode")) in ("over", "sessions"):
                what = "sessions" if mode == "sessions" else "values over other rows"
                raise BadArgument(f"the state of {what} is not shown as a table", at=at, file=location)
            if "records" in as_map(state):
                return _records(location, [Run.from_json(run) for run in as_list(found["runs"])], as_map(state))
            if "sides" in as_map(state):
                return _sides(location, [Run.from_json(run) for run in as_list(found["runs"])], as_map(state))
            columns = _schema(as_map(state)["columns"])
            blocks = [block for run in as_list(found["runs"])
                      for block in read_run(location, Run.from_json(run), columns)]
            return _finish(as_map(state), blocks, found["watermark"])
        except (KeyError, ValueError, TypeError) as error:
            raise Damaged("a manifest has unexpected content", file=location.uri_of("manifests"),
                          found=repr(error)) from error
        except Damaged:  # a running stream may have removed a file meanwhile: then there is a newer manifest
            if attempt == _ATTEMPTS - 1 or manifests.is_newest(found):
                raise
    raise AssertionError


_ATTEMPTS = 5


def _records(location: Location, runs: list[Run], state: dict[str, Json]) -> pa.Table:
    """The fields of the keys of a process."""
    schema, keys = _schema(state["records"]), [as_text(name) for name in as_list(state["keys"])]
    parts = [read_run(location, run, schema) for run in runs if not run.part]
    merger = NewestRecord([name for name in schema.names if name not in keys])
    names = [*keys, *map(as_text, as_list(state["fields"]))]
    found = [live_records(each.block, names) for each in merge_blocks(parts, keys, merger)]
    return pa.Table.from_batches(found, pa.schema([schema.field(name) for name in names]))


def _sides(location: Location, runs: list[Run], state: dict[str, Json]) -> pa.Table:
    """The rows of both sides of a join."""
    found: list[pa.Table] = []
    for number, (part, text) in enumerate(map(as_list, as_list(state["sides"]))):
        schema = _schema(text)
        blocks = [block.drop_columns([HASH]) for run in runs if run.part == part
                  for block in read_run(location, run, schema)]
        table = pa.Table.from_batches(blocks, schema)
        names = [f"{name}_right" if number and name in found[0].column_names else name for name in schema.names]
        side = pa.array(["right" if number else "left"] * table.num_rows, pa.string())
        found.append(table.rename_columns(names).add_column(0, "side", side))
    return pa.concat_tables(found, promote_options="default")


def describe_state(plan: StreamPlan) -> Json:
    """The description of a flow's state in a manifest; None if it has none."""
    if plan.mode == "rowwise":
        return None
    if plan.mode in ("over", "sessions"):
        return {"mode": plan.mode}
    if isinstance(plan.fragment.state, ops.BufferedJoin):
        return {"mode": plan.mode, "sides": [[part, _schema_text(side.schema.arrow)] for part, side in
                                             zip(plan.state_parts, plan.fragment.state.join.inputs, strict=True)]}
    if isinstance(op := plan.fragment.state, ops.Process):
        keys = pa.schema([pa.field(key.name, type_of(key.expr).arrow, key.expr.nullable) for key in op.keys])
        values = pa.schema([pa.field(slot.name, slot.dtype.arrow, slot.nullable) for slot in op.body.stored])
        return {"mode": plan.mode, "records": _schema_text(stored_records(keys, values)), "keys": [*keys.names],
                "fields": [slot.name for slot in op.body.slots]}
    window: Json = None if plan.window is None else [*plan.window.to_json()]
    kind = "partials" if plan.mode == "distinct" else plan.map_reduce.kind
    description: dict[str, Json] = {"mode": plan.mode, "kind": kind, "window": window,
                                    "slices": plan.slice_column,
                                    "columns": _schema_text(plan.state_schema)}
    if kind == "partials" and plan.mode == "running" and plan.window is not None and not plan.window.is_tumbling:
        description["apart"] = True  # each group is of one window, whose anchor is `window_start`
    if kind != "partials":
        rows = plan.map_reduce.over_shuffled_rows
        assert isinstance(rows, ops.Aggregate)
        description["aggregate"] = _describe_aggregate(rows, _shown_names(plan))
        return description
    final = two_phase(aggregate_node(compile_flow(_groups(plan)))).final
    table = final.table
    time = [] if table.window is None else ["window_start"]
    names = (*(key.name for key in table.keys), *time)
    fields = pa.schema([plan.state_schema.field(name) for name in names])
    description["keys"] = _schema_text(fields)
    description["accumulators"] = [_describe_accumulator(acc) for acc in table.accs]
    shown = _shown_names(plan)
    description["outputs"] = [[shown.get(output.name, output.name), output.fn, [*output.accs]]
                              for output in table.outputs]
    outputs = Schema(tuple(Field(shown.get(output.name, output.name), output.dtype, output.nullable)
                           for output in table.outputs))
    description["results"] = _schema_text(outputs.arrow)
    return description


def _groups(plan: StreamPlan) -> ops.Op:
    """The aggregation of a state; that of a distinct counts the rows of its keys."""
    state = plan.fragment.state
    if not isinstance(state, ops.Distinct):
        return plan.fragment.op
    keys = tuple(item for item in identity(state.schema) if item.name in state.keys)
    return ops.Aggregate(placeholder(state.schema), keys, None, ())


def _describe_accumulator(acc: Acc) -> Json:
    """An accumulator of partial groups: its kind and argument, and if it has parts, its order column and its parts."""
    columns = ["" if expr is None else _column(expr) for expr in (acc.arg, acc.by)]
    return [acc.kind.value, *(columns + [_column(part) for part in acc.parts] if acc.parts else columns[:1])]


def _shown_names(plan: StreamPlan) -> dict[str, str]:
    """The names that users see of the internal columns of aggregates, where those are unique."""
    texts, taken = aggregate_texts(plan.fragment.op), Counter(plan.fragment.op.schema.names)
    taken.update(texts.values())
    return {name: text for name, text in texts.items() if taken[text] == 1}


def _describe_aggregate(op: ops.Aggregate, shown: dict[str, str]) -> Json:
    """An aggregation of columns: keys, the time of its window, and the function and arguments of each result."""
    aggs: list[Json] = []
    for each in op.aggs:
        params: list[Json] = []
        for param in each.agg.params:
            assert isinstance(param, str | int | float), param
            params.append(param)
        aggs.append([shown.get(each.name, each.name), each.agg.fn, [_column(arg) for arg in each.agg.args], params])
    return {"keys": [[key.name, _column(key.expr)] for key in op.keys],
            "time": None if op.window is None else _column(op.window.time), "aggs": aggs,
            "results": _schema_text(pa.schema([field.with_name(shown.get(field.name, field.name))
                                               for field in op.schema.arrow]))}


def _column(expr: object) -> str:
    assert isinstance(expr, Col)
    return expr.name


def _finish(state: dict[str, Json], blocks: list[pa.RecordBatch], watermark: Json) -> pa.Table:
    """The table of a state."""
    columns = _schema(state["columns"])
    window = None if state["window"] is None else as_list(state["window"])
    if window is not None and watermark is not None:
        found_window = _window(window, Col(as_text(state["slices"]), I64, False))
        is_apart = "apart" in state
        first = (found_window.first_open_anchor if is_apart else found_window.least_open)(as_int(watermark))
        slices = as_text(state["slices"])
        blocks = [filtered(block, pc.greater_equal(as_integers(block.column(slices)), first)) for block in blocks]
    rows = [block.drop_columns([HASH]) for block in blocks if block.num_rows]
    if state["kind"] == "partials":
        program = Program(_group(state, window, columns))
    elif "aggregate" in state:
        program = Program(compile_flow(_aggregate(as_map(state["aggregate"]), window, columns)))
        rows = [block.select([name for name in columns.names if name != SLICE]) for block in rows]
    else:  # a version that did not describe the aggregation
        return pa.Table.from_batches(rows, columns).select([name for name in columns.names if name != SLICE])
    found = list(program.run(rows, Options.make())) if rows else []
    if window is not None and watermark is not None:  # open slices are also part of windows that are closed
        found = [filtered(batch, pc.greater(as_integers(batch.column("window_end")), as_int(watermark)))
                 for batch in found]
    table = pa.Table.from_batches(found, program.node.schema.arrow)
    return table.select(_schema(state["keys"]).names) if state["mode"] == "distinct" else table


def _window(content: list[Json], time: Col) -> Window:
    return window_from_json([each if isinstance(each, str) else as_int(each) for each in content], time)


def _group(state: dict[str, Json], window: list[Json] | None, columns: pa.Schema) -> WindowAggregate:
    """The aggregation of partial groups, from its description."""
    keys, results = _schema(state["keys"]), _schema(state["results"])
    typed = {field.name: from_arrow_type(field.type) for field in columns}
    accs, numbered = list[Acc](), dict[int, int]()
    for number, each in enumerate(map(as_list, as_list(state["accumulators"]))):
        if each[0] == AccKind.EXPR.value:
            continue
        numbered[number] = len(accs)
        columns_read = [Col(name, typed[name], True) if name else None for name in map(as_text, each[1:])]
        parts = tuple(column for column in columns_read[2:] if column is not None)
        accs.append(Acc(AccKind(as_text(each[0])), columns_read[0], columns_read[1] if parts else None, parts=parts))
    outputs, own = list[Output](), list[str]()
    for field, (_, fn, numbers) in zip(results, map(as_list, as_list(state["outputs"])), strict=True):
        read = [as_int(k) for k in as_list(numbers)]
        if any(k not in numbered for k in read):
            own.append(field.name)
        else:
            outputs.append(Output(field.name, as_text(fn), from_arrow_type(field.type), field.nullable,
                                  tuple(numbered[k] for k in read)))
    if own:
        warn(f"the state of {', '.join(own)} is left out: how your own class finishes it is not in the checkpoint")
    key_columns = tuple(Key(field.name, from_arrow_type(field.type), field.nullable) for field in keys
                        if window is None or field.name != "window_start")
    window_op = None if window is None else _window(window, Col("window_start", typed["window_start"], False))
    if not all(map(is_mergeable, accs)):
        raise ValueError(f"accumulators that cannot be merged: {[acc.kind.value for acc in accs]}")
    slice_size = 0 if window_op is None else window_op.slice_size
    if window_op is not None and "apart" in state:
        window_op = window_op.apart()
    slicing = Slicing.NONE if window_op is None else Slicing.KEY
    table = Table(key_columns, tuple(accs), tuple(outputs), slicing, window_op, slice_size)
    source = ops.Source("partials", columns, tuple(columns.names))
    keys_read = tuple(Col(key.name, key.dtype, key.nullable) for key in key_columns)
    return WindowAggregate(Scan(source), (), table, keys_read)


def _aggregate(description: dict[str, Json], window: list[Json] | None, columns: pa.Schema) -> ops.Op:
    """The aggregation of buffered rows, from its description."""
    rows = Schema.from_arrow(pa.schema([field for field in columns if field.name != SLICE]))
    results = _schema(description["results"])

    def column(name: Json) -> Col:
        found = rows[as_text(name)]
        return Col(found.name, found.dtype, found.nullable)

    keys = tuple(Named(as_text(name), column(read)) for name, read in map(as_list, as_list(description["keys"])))
    aggs = []
    for name, fn, args, params in map(as_list, as_list(description["aggs"])):
        result = results.field(as_text(name))
        agg = Agg(as_text(fn), tuple(map(column, as_list(args))), from_arrow_type(result.type), result.nullable,
                  tuple(as_list(params)))
        aggs.append(NamedAgg(result.name, agg))
    window_op = None if window is None else _window(window, column(description["time"]))
    return ops.Aggregate(placeholder(rows), keys, window_op, tuple(aggs))


def _schema_text(schema: pa.Schema) -> str:
    return base64.b64encode(schema.serialize()).decode()


def _schema(text: Any) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(as_text(text))))
