"""Unused columns out of sources, projections, joins and aggregates; needless projections gone.

Relies on verified ops. What an op gives after pruning is a part of what it gave, in the old order: all
that is needed above it, and perhaps a column that a filter below it reads. The root gives what it gave.
An unused expression or aggregate that could fail is dropped with its error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from scalein.dtypes import Field, Schema
from scalein.ir.exprs import Col, Expr, Lit, Named, columns, walk
from scalein.ir.functions.registry import can_fail
from scalein.ir.ops import Aggregate, Distinct, Explode, Join, MapBatches, Op, Project, Source, Union, Watermark
from scalein.ir.passes.fold import fold_expr, with_nullable
from scalein.ir.rewrite import exprs_of, map_inputs, rewrite, substitute, walk_ops


def prune(root: Op) -> Op:
    """Project(Project(Source(a, b, c), a, d = b + 1), d) -> Project(Source(b), d = b + 1)."""
    ops = list(walk_ops(root))
    needed: dict[int, set[str]] = {id(op): set() for op in ops}
    needed[id(root)].update(root.schema.names)
    for op in reversed(ops):  # users first: when an op's turn comes, all of them have said what they need
        needed[id(op)] = needed[id(op)] or _cheapest(op)
        for below, names in _reads(op, needed[id(op)]):
            needed[id(below)] |= names
    narrow: dict[int, Op] = {}
    for op in ops:
        narrow[id(op)] = _narrow(map_inputs(op, lambda below: narrow[id(below)]), needed[id(op)])
    return rewrite(narrow[id(root)], _tidy)


def _cheapest(op: Op) -> set[str]:
    """One column to carry the number of rows, where nothing but that is needed; none if the op's input has it."""
    match op:
        case Source() | Union():
            return {min(op.schema.fields, key=_width).name}
        case Project():
            return {min(op.items, key=_effort).name}
        case Aggregate(keys=(), window=None):
            return {min(op.aggs, key=lambda named: len(named.agg.args)).name}
        case _:
            return set()


def _width(column: Field | Expr) -> int:
    """Bits a row, more for text than for anything else, but for what is nested."""
    dtype = column.dtype
    if dtype is None or dtype.is_nested:
        return 1 << 17
    return 1 << 16 if dtype.is_bytes else dtype.bits


def _effort(item: Named) -> tuple[int, int]:
    match item.expr:
        case Lit():
            return 0, 0
        case Col() as column:
            return 1, _width(column)
        case expr:
            return (3 if can_fail(expr) else 2), _width(expr)


def _reads(op: Op, needed: set[str]) -> Iterator[tuple[Op, set[str]]]:
    """Which columns an op reads of each of its inputs, to give those that are needed of it."""
    match op:
        case Source():
            return
        case MapBatches():
            yield op.input, set(op.input.schema.names)
        case Union():
            for below in op.inputs:
                yield below, needed
        case Join():
            yield op.left, needed & set(op.left.schema.names)
            yield op.right, {column for name, column in op.keep if name in needed}
        case Project() | Aggregate():
            yield op.input, set()  # only what its expressions read, see below
        case Watermark() | Explode():
            yield op.input, needed | {op.column}
        case Distinct():
            yield op.input, needed | set(op.keys)
        case _:
            yield op.input, needed
    for expr, below in exprs_of(_narrow(op, needed)):
        yield below, columns(expr)


def _narrow(op: Op, needed: set[str]) -> Op:
    """The op without what is not needed of it; its inputs stay."""
    match op:
        case Source():
            return replace(op, columns=tuple(name for name in op.columns if name in needed))
        case Project():
            return replace(op, items=tuple(item for item in op.items if item.name in needed))
        case Join():
            return replace(op, keep=tuple(pair for pair in op.keep if pair[0] in needed))
        case Aggregate():
            return replace(op, aggs=tuple(named for named in op.aggs if named.name in needed))
        case Union():
            return replace(op, inputs=tuple(_exactly(below, needed) for below in op.inputs))
        case _:
            return op


def _exactly(op: Op, needed: set[str]) -> Op:
    """The op, with a projection on top if it gives more than is needed: all inputs of a union are alike."""
    fields = [field for field in op.schema if field.name in needed]
    return op if len(fields) == len(op.schema) else Project(op, _same_columns(fields), at=op.at)


def _same_columns(fields: list[Field] | Schema) -> tuple[Named, ...]:
    return tuple(Named(field.name, Col(field.name, field.dtype, field.nullable)) for field in fields)


def _tidy(op: Op) -> Op | None:
    match op:
        case Project(below, items) if items == _same_columns(below.schema):
            return below
        case Project(Project(source, inner), outer) if _computes_once(inner, outer):
            by_name = {item.name: item.expr for item in inner}
            merged = [_merged(item.expr, by_name) for item in outer]
            if None in merged:
                return None
            named = (Named(item.name, expr) for item, expr in zip(outer, merged, strict=True) if expr is not None)
            return Project(source, tuple(named), at=op.at)
        case _:
            return None


def _computes_once(inner: tuple[Named, ...], outer: tuple[Named, ...]) -> bool:
    """Whether no call of the inner projection would stand twice in the merged one."""
    uses = Counter(node.name for item in outer for node in walk(item.expr) if isinstance(node, Col))
    return all(uses[item.name] <= 1 or isinstance(item.expr, Col | Lit) for item in inner)


def _merged(expr: Expr, by_name: dict[str, Expr]) -> Expr | None:
    """The expression over the inner projection's input; None if its column could not stay as nullable as it was."""
    merged = substitute(expr, by_name)
    return with_nullable(fold_expr(merged), expr.nullable) or with_nullable(merged, expr.nullable)
