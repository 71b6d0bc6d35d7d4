"""What ops and programs promise: names exist, types match, nothing is untyped; else there is an InternalError.

Users never see one of these: `flow.py` and `resolve` refuse what they wrote with an error in their words.
The compiler verifies after every pass, so a broken plan names the pass that made it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from scalein.dtypes import BOOL, I64, DType, Field, Kind, Schema
from scalein.errors import InternalError
from scalein.ir import physical
from scalein.ir.checks import expect, wrong_keys, wrong_names
from scalein.ir.exprs import Call, Col, Expr, Lit, type_of, walk
from scalein.ir.functions.compare import COMPARISONS
from scalein.ir.functions.registry import ANY, REGISTRY, has_host
from scalein.ir.physical import Host, JoinBuild, Node, Pipeline, WindowAggregate, walk_nodes
from scalein.ir.printer import dump, show_expr
from scalein.ir.rewrite import walk_ops
from scalein.ir.stages import DedupStep, FilterStep, Probe, ProjectStep
from scalein.ir.tables import Acc, AccKind, Table

if TYPE_CHECKING:
    from scalein.ir.ops import Op

Fields = Mapping[str, Field]

Plan = TypeVar("Plan")

_HINT = "this is a bug of scalein's; please send us this text"


def verify_ops(root: Op, known: dict[int, Op] | None = None) -> None:
    """Raise an InternalError, with the plan, if an op at or below `root` breaks a promise.

    Ops that are `known`, by their id, have been looked at before; the others are entered.
    """
    seen = {} if known is None else known
    for op in walk_ops(root):
        if id(op) in seen:
            continue
        seen[id(op)] = op
        wrong = next(_wrong_in_op(op), None)
        if wrong is not None:
            raise InternalError(f"{type(op).__name__}: {wrong}", at=op.at, plan="\n" + _text_of(root, dump),
                                hint=_HINT)


def verify_program(root: Node) -> None:
    """Raise an InternalError, with the program, if a node below or at `root` breaks a promise."""
    for node in walk_nodes(root):
        wrong = next(_wrong_in_node(node), None)
        if wrong is not None:
            from scalein.ir.stage_printer import dump_program

            raise InternalError(f"{type(node).__name__}: {wrong}", plan="\n" + _text_of(root, dump_program),
                                hint=_HINT)


def _text_of(root: Plan, show: Callable[[Plan], str]) -> str:
    """The plan, even if it is too broken to be printed in full."""
    try:
        return show(root)
    except Exception as error:
        return f"{root!r}\n(cannot be printed: {error!r})"


def _wrong_in_op(op: Op) -> Iterator[str]:
    """What is wrong with an op over sound inputs."""
    known = [below.schema.by_name for below in op.inputs]
    for expr, number in op.exprs():
        if not _is_column(expr, known[number]):
            yield from _wrong_inside(expr, known[number])
    yield from op.wrong()
    if op.names_columns:
        yield from wrong_names(op.schema.names)


def _wrong_inside(expr: Expr, fields: Fields) -> Iterator[str]:
    if _is_column(expr, fields):
        return
    for node in walk(expr):
        yield from _wrong_in_expr(node, fields)


def _is_column(expr: Expr, fields: Fields) -> bool:
    """Whether an expression is a column as its input has it: nothing is wrong with most of those in wide plans."""
    if not isinstance(expr, Col):
        return False
    field = fields.get(expr.name)
    return field is not None and field.dtype == expr.dtype and (expr.nullable or not field.nullable)


def _wrong_in_expr(node: Expr, fields: Fields) -> Iterator[str]:
    """One node, not what is below it."""
    if node.dtype is None:
        yield f"{show_expr(node)} has no type"
        return
    match node:
        case Col(name):
            field = fields.get(name)
            if field is None:
                yield f"no column {name!r} in its input"
                return
            yield from expect(lambda: f"column {name!r}", node.dtype, field.dtype)
            if field.nullable and not node.nullable:
                yield f"column {name!r} can be null and is read as if it could not"
        case Lit(value):
            if value is not None and not isinstance(value, _held_by(node.dtype)):
                yield f"literal {value!r} of type {node.dtype!r}"
        case Call(fn):
            if fn not in REGISTRY or REGISTRY[fn].spelled_out:
                yield f"no function {fn!r}"
            elif REGISTRY[fn].arity not in (ANY, len(node.args)):
                yield f"{fn} with {len(node.args)} arguments"
            else:
                yield from _wrong_in_call(node)


_HELD_BY = {Kind.BOOL: bool, Kind.STR: str, Kind.BIN: bytes}


def _held_by(dtype: DType) -> type:
    """The Python type of the physical values of a literal."""
    if dtype.is_float:
        return float
    return _HELD_BY.get(dtype.kind, int)


def _wrong_in_call(call: Call) -> Iterator[str]:
    """Promises about the types of arguments, where one function differs from the next in nothing else."""
    types = [arg.dtype for arg in call.args]
    if call.fn in COMPARISONS:
        yield from expect(lambda: f"the right side of {show_expr(call)}", types[1], types[0])
        yield from expect(lambda: show_expr(call), call.dtype, BOOL)
    elif call.fn in ("and", "or", "not"):
        for found in [*types, call.dtype]:
            yield from expect(lambda: f"a part of {show_expr(call)}", found, BOOL)
    elif call.fn == "if_else":
        yield from expect(lambda: f"the condition of {show_expr(call)}", types[0], BOOL)
        for found in types[1:]:
            yield from expect(lambda: f"a branch of {show_expr(call)}", found, call.dtype)
    elif call.fn == "fill_null":
        for found in types:
            yield from expect(lambda: f"a part of {show_expr(call)}", found, call.dtype)


# --- programs


def _wrong_in_node(node: Node) -> Iterator[str]:
    """What is wrong with a node over sound inputs."""
    match node:
        case Pipeline(items=items):
            fields = yield from _wrong_in_kernel(node)
            yield from (wrong for item in items for wrong in _wrong_in_kernel_expr(item.expr, fields))
        case WindowAggregate():
            fields = yield from _wrong_in_kernel(node)
            yield from _wrong_in_table(node, fields)
        case Host(op=None):
            fields = node.input.schema.by_name
            yield from (wrong for item in node.items for wrong in _wrong_inside(item.expr, fields))
        case physical.Limit(count=count) if count < 0:
            yield f"count is {count}"
        case physical.Sort():
            yield from (f"no column {name!r} in its input" for name, _ in node.by if name not in node.schema.names)
        case physical.OuterJoin():
            yield from _wrong_in_outer_join(node)
        case physical.Union():
            for below in node.inputs:
                yield from _wrong_in_part(below.schema, node.schema)
    yield from wrong_names(list(node.schema.names))


def _wrong_in_part(part: Schema, whole: Schema) -> Iterator[str]:
    if part.names != whole.names:
        yield f"an input has columns {list(part.names)}, not {list(whole.names)}"
        return
    for found, expected in zip(part, whole, strict=True):
        yield from expect(partial("column {!r} of an input".format, found.name), found.dtype, expected.dtype)


def _wrong_in_outer_join(node: physical.OuterJoin) -> Iterator[str]:
    yield from _wrong_in_part(node.input.schema, node.schema)
    table = dict(node.input.joins).get(node.table)
    if table is None or not table.is_outer:
        yield f"it has no outer table join{node.table}"
        return
    if not any(isinstance(step, Probe) and step.table == node.table and step.marks for step in node.input.steps):
        yield f"nothing marks the rows of join{node.table}"
    known = {*table.columns, *(key.name for key in table.keys)}
    yield from (f"no column {name!r} in join{node.table}" for name in node.origins if name not in {None, *known})


def _wrong_in_kernel(node: Pipeline | WindowAggregate) -> Generator[str, None, Fields]:
    """What is wrong with a kernel's steps; returns the names that are visible after the last."""
    tables = dict(node.joins)
    probes = [step.table for step in node.steps if isinstance(step, Probe)]
    if len(tables) != len(node.joins) or len(set(probes)) != len(probes) or set(probes) != set(tables):
        yield f"it probes joins {probes} and has tables {[number for number, _ in node.joins]}"
    if sum(isinstance(step, DedupStep) for step in node.steps) > isinstance(node, Pipeline):
        yield "a distinct too many"
    fields = node.input.schema.by_name
    for step in node.steps:
        match step:
            case FilterStep(predicate):
                yield from _wrong_in_kernel_expr(predicate, fields)
                yield from expect(lambda: "a predicate", predicate.dtype, BOOL)
            case ProjectStep(items):
                yield from (wrong for item in items for wrong in _wrong_in_kernel_expr(item.expr, fields))
                yield from wrong_names([item.name for item in items])
                fields = {i.name: Field(i.name, type_of(i.expr), i.expr.nullable) for i in items}
            case Probe():
                yield from _wrong_in_probe(step, tables[step.table], fields)
                fields = {**fields, **_kept(step, tables[step.table])}
            case DedupStep():
                yield from _wrong_keys_of(step.table, step.keys, fields)
    return fields


def _wrong_in_kernel_expr(expr: Expr, fields: Fields) -> Iterator[str]:
    if _is_column(expr, fields):
        return
    yield from _wrong_inside(expr, fields)
    if has_host(expr):
        yield f"{show_expr(expr)} is pyarrow's to compute, and stands in a kernel"
    if not isinstance(expr, Col) and any(type_of(node).is_nested for node in walk(expr)):
        yield f"{show_expr(expr)} reads a nested column in a kernel"


def _wrong_in_probe(probe: Probe, table: JoinBuild, fields: Fields) -> Iterator[str]:
    known = table.input.schema.by_name
    yield from (wrong for expr in probe.exprs for wrong in _wrong_in_kernel_expr(expr, fields))
    yield from (wrong for key in table.keys for wrong in _wrong_inside(key, known))
    yield from wrong_keys(probe.how, probe.keys, table.keys, bool(probe.keep))
    if (probe.times is None) != (not table.time):
        yield f"join{probe.table} is ordered by {table.time or 'nothing'}, and its probe {probe.times}"
    elif probe.times is not None:
        for expr in (probe.times.low_of, probe.times.high_of):
            yield from expect(partial("the time {}".format, show_expr(expr)), expr.dtype, I64)
    yield from (f"no column {column!r} in join{probe.table}" for _, column in probe.keep
                if column not in table.columns or column not in known)


def _kept(probe: Probe, table: JoinBuild) -> Fields:
    """The columns that a probe adds."""
    schema = table.input.schema
    return {name: Field(name, schema[column].dtype, schema[column].nullable or probe.how == "left")
            for name, column in probe.keep}


def _wrong_keys_of(table: Table, keys: tuple[Expr, ...], fields: Fields) -> Iterator[str]:
    """What is wrong with the keys by which rows find their record."""
    if len(table.keys) != len(keys):
        yield f"{len(keys)} keys for a table of {len(table.keys)}"
        return
    for key, expr in zip(table.keys, keys, strict=True):
        yield from _wrong_in_kernel_expr(expr, fields)
        yield from expect(partial("key {!r}".format, key.name), expr.dtype, key.dtype)
        if expr.nullable and not key.nullable:
            yield f"key {key.name!r} can be null, but its layout has no null flag"


def _wrong_in_table(node: WindowAggregate, fields: Fields) -> Iterator[str]:
    table = node.table
    yield from _wrong_keys_of(table, node.keys, fields)
    given = [e for acc in table.accs for e in acc.exprs]
    for expr in given if table.window is None else [*given, *table.window.exprs]:
        yield from _wrong_in_kernel_expr(expr, fields)
    if table.accs[:1] != (Acc(AccKind.ROWS),):
        yield "the first accumulator does not count rows"
    yield from (f"output {output.name!r} is made of accumulators {output.accs} of {len(table.accs)}"
                for output in table.outputs if not output.accs or max(output.accs) >= len(table.accs))
    if table.window is not None:
        yield from table.window.wrong(table.slice_size)
