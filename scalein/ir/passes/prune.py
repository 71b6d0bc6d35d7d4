"""Unused columns out of sources, projections, joins and aggregates; needless projections gone.

Relies on verified ops. What an op gives after pruning is a part of what it gave, in the old order: all
that is needed above it, and perhaps a column that a filter below it reads. The root gives what it gave.
An unused expression or aggregate that could fail is dropped with its error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from scalein.ir.exprs import Col, Expr, Lit, Named, columns, walk
from scalein.ir.ops import Op, Project
from scalein.ir.passes.fold import fold_expr, with_nullable
from scalein.ir.physical import identity
from scalein.ir.rewrite import Known, map_inputs, rewrite, substitute, walk_ops


def prune(root: Op) -> Op:
    """Project(Project(Source(a, b, c), a, d = b + 1), d) -> Project(Source(b), d = b + 1)."""
    ops = list(walk_ops(root))
    needed: dict[int, set[str]] = {id(op): set() for op in ops}
    needed[id(root)].update(root.schema.names)
    for op in reversed(ops):  # users first: when an op's turn comes, all of them have said what they need
        needed[id(op)] = needed[id(op)] or op.cheapest()
        for below, names in _reads(op, needed[id(op)]):
            needed[id(below)] |= names
    narrow: dict[int, Op] = {}
    for op in ops:
        narrow[id(op)] = map_inputs(op, lambda below: narrow[id(below)]).narrow(needed[id(op)])
    known: Known[Expr] = {}
    return rewrite(narrow[id(root)], lambda op: _tidy(op, known))


def _reads(op: Op, needed: set[str]) -> Iterator[tuple[Op, set[str]]]:
    """Which columns an op reads of each of its inputs, to give those that are needed of it."""
    yield from zip(op.inputs, op.reads(needed), strict=True)
    for expr, number in op.narrow(needed).exprs():
        yield op.inputs[number], columns(expr)


def _tidy(op: Op, known: Known[Expr]) -> Op | None:
    match op:
        case Project(below, items) if items == identity(below.schema):
            return below
        case Project(Project(source, inner), outer) if _computes_once(inner, outer):
            by_name = {item.name: item.expr for item in inner}
            merged = [_merged(item.expr, by_name, known) for item in outer]
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


def _merged(expr: Expr, by_name: dict[str, Expr], known: Known[Expr]) -> Expr | None:
    """The expression over the inner projection's input; None if its column could not stay as nullable as it was."""
    merged = substitute(expr, by_name)
    return with_nullable(fold_expr(merged, known), expr.nullable) or with_nullable(merged, expr.nullable)
