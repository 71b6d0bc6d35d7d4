"""Filters towards the sources, one conjunct at a time.

What makes a move legal is the set of rows that a predicate is computed for: one that can fail must not
meet a row that it did not meet before. So it never passes a filter that stays behind, a join that drops
rows, or a window (which drops rows without time); a predicate that cannot fail passes all of them. That
rows are gone earlier can only remove errors of the ops in between.

Never passed: Limit and the first rows of a Sort (they count rows), MapBatches (its function sees them),
Watermark (they move it).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from scalein.errors import SourceLoc
from scalein.ir.exprs import Call, Col, Expr, Lit, columns, type_of, walk
from scalein.ir.functions.registry import REGISTRY, can_fail, has_host
from scalein.ir.functions.udf import has_udf
from scalein.ir.ops import Aggregate, Distinct, Explode, Filter, Join, Op, Project, Sort, Union
from scalein.ir.passes.fold import fold_expr
from scalein.ir.rewrite import rewrite, substitute

_SIZE_LIMIT = 100  # nodes


class Part(NamedTuple):
    """One conjunct of a stack of filters, with the place of the filter it stood in."""

    predicate: Expr
    at: SourceLoc


Lower = Callable[[Expr], Expr | None]  # the predicate over the op's input, or None if it must stay above


def push_down(root: Op) -> Op:
    """Filter(Project(x, b = a + 1), b > 0) -> Project(Filter(x, a + 1 > 0), b = a + 1), and so on downwards."""
    return rewrite(root, _push)


def _push(op: Op) -> Op | None:
    """One step: the conjuncts that may, moved below the op under a stack of filters."""
    if not isinstance(op, Filter):
        return None
    parts: list[Part] = []
    base: Op = op
    while isinstance(base, Filter):
        parts = [Part(each, base.at) for each in conjuncts(base.predicate)] + parts
        base = base.input
    match base:
        case Project():
            moved, kept = _divide(parts, _over({item.name: item.expr for item in base.items}))
            lowered: Op = replace(base, input=_filtered(base.input, moved))
        case Aggregate():
            moved, kept = _divide(parts, _below_aggregate(base))
            lowered = replace(base, input=_filtered(base.input, moved))
        case Distinct():
            moved, kept = _divide(parts, _below_distinct(base))
            lowered = replace(base, input=_filtered(base.input, moved))
        case Sort(count=None):  # every row is there, below as above
            moved, kept = parts, []
            lowered = replace(base, input=_filtered(base.input, moved))
        case Explode():
            moved, kept = _divide(parts, _below_explode(base))
            lowered = replace(base, input=_filtered(base.input, moved))
        case Union():
            moved, kept = parts, []
            lowered = replace(base, inputs=tuple(_filtered(each, moved) for each in base.inputs))
        case Join():
            to_left, rest = _divide(parts, _left_of(base))
            to_right, kept = _divide(rest, _right_of(base))
            moved = to_left + to_right
            lowered = replace(base, left=_filtered(base.left, to_left), right=_filtered(base.right, to_right))
        case _:
            return None
    return _filtered(lowered, kept) if moved else None


def conjuncts(predicate: Expr) -> list[Expr]:
    """`a & b & c` -> a, b, c: what a row must pass, in the order in which one guards the next."""
    if isinstance(predicate, Call) and predicate.fn == "and":
        return [each for arg in predicate.args for each in conjuncts(arg)]
    return [predicate]


def _filtered(op: Op, parts: list[Part]) -> Op:
    for predicate, at in parts:
        if not (isinstance(predicate, Lit) and predicate.value is True):
            op = Filter(op, predicate, at=at)
    return op


def _divide(parts: list[Part], lower: Lower) -> tuple[list[Part], list[Part]]:
    """The parts that go below, rewritten for there, and those that stay.

    A predicate that can fail is held back by any part before it that stays: that part guards it.
    """
    moved: list[Part] = []
    kept: list[Part] = []
    for part in parts:
        below = None if kept and can_fail(part.predicate) else lower(part.predicate)
        if below is None:
            kept.append(part)
        else:
            moved.append(Part(below, part.at))
    return moved, kept


def _over(items: dict[str, Expr]) -> Lower:
    """Substitution of columns by the expressions that make them.

    They are then computed for the filter and again for the rows it keeps. That is cheap, but for what pyarrow
    or a udf computes: so that stays. So does what would outgrow `_SIZE_LIMIT`: twenty steps of x = x * x are a
    million nodes when written as one expression.
    """

    def lower(predicate: Expr) -> Expr | None:
        if any(has_host(items[name]) or has_udf(items[name]) for name in columns(predicate)):
            return None
        below = substitute(predicate, items)
        return fold_expr(below) if _size(below) <= max(_SIZE_LIMIT, _size(predicate)) else None

    return lower


def _size(expr: Expr) -> int:
    return sum(1 for _ in walk(expr))


def _below_aggregate(op: Aggregate) -> Lower:
    """A predicate on keys keeps or drops whole groups. Without keys there is one row even for no input."""
    keys = {key.name: key.expr for key in op.keys}
    over = _over(keys)

    def lower(predicate: Expr) -> Expr | None:
        if not keys or not columns(predicate) <= keys.keys() or not _is_same_within_group(predicate):
            return None
        return None if op.window is not None and can_fail(predicate) else over(predicate)

    return lower


def _below_distinct(op: Distinct) -> Lower:
    """A predicate on keys keeps or drops all rows of a key, so the first of them stays the first.

    What pyarrow computes is left to the few rows behind.
    """

    def lower(predicate: Expr) -> Expr | None:
        may_move = columns(predicate) <= set(op.keys) and _is_same_within_group(predicate) and not has_host(predicate)
        return predicate if may_move else None

    return lower


def _below_explode(op: Explode) -> Lower:
    """What the elements of a list share decides for all of them; a row without elements must not fail."""

    def lower(predicate: Expr) -> Expr | None:
        return None if op.column in columns(predicate) or can_fail(predicate) else predicate

    return lower


def _is_same_within_group(expr: Expr) -> bool:
    """Whether equal keys give equal answers: not so if it looks at the sign of a zero (1.0 / key > 0.0)."""
    return not any(
        isinstance(arg, Col) and type_of(arg).is_float
        for node in walk(expr)
        if isinstance(node, Call) and not REGISTRY[node.fn].canonical
        for arg in node.args
    )


def _left_of(op: Join) -> Lower:
    """A left join keeps every row of the left side; the others drop rows that a predicate must not fail for."""
    names = set(op.left.schema.names)

    def lower(predicate: Expr) -> Expr | None:
        may_move = columns(predicate) <= names and (op.how == "left" or not can_fail(predicate))
        return predicate if may_move else None

    return lower


def _right_of(op: Join) -> Lower:
    fields = op.right.schema
    kept = {name: Col(column, fields[column].dtype, fields[column].nullable) for name, column in op.keep}

    def lower(predicate: Expr) -> Expr | None:
        may_move = op.how == "inner" and columns(predicate) <= kept.keys() and not can_fail(predicate)
        return substitute(predicate, kept) if may_move else None

    return lower
