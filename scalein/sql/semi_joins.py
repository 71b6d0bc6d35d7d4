"""Where semi and anti joins are computed: below other joins, at the table whose columns they test."""

from __future__ import annotations

from dataclasses import replace

from scalein.ir.exprs import Col, Expr, columns
from scalein.ir.functions.registry import can_fail
from scalein.ir.ops import Filter, Join, Op, OuterJoin, Project, Reordered
from scalein.ir.rewrite import substitute
from scalein.sql.cardinality import Cardinalities, Unknown

_MORE_ROWS = 2.0  # than the join's result may be tested below it, which leaves fewer rows to what is in between


def placed(op: Op, known: Cardinalities) -> Op:
    """A semi or anti join over joins, moved to the deepest of their inputs that has not many more rows than their
    result. Jobs and Spark take it where it was written, which does not depend on sizes.
    """
    if not isinstance(op, Join) or op.how not in ("semi", "anti") or any(map(can_fail, op.left_keys)):
        return op
    left = op.left
    inner, written = (left.input, left.written) if isinstance(left, Reordered) else (left, left)
    try:
        found = _below(inner, op, op.left_keys, known, _MORE_ROWS * known.rows(inner))
    except Unknown:
        return op
    if found is None:
        return op
    estimate = left.estimate if isinstance(left, Reordered) else ""
    return Reordered(found, replace(op, left=written), estimate, at=op.at)


def _below(op: Op, join: Join, keys: tuple[Expr, ...], known: Cardinalities, most_rows: float) -> Op | None:
    """The op with the join below a join in it; None if there is no such place."""
    match op:
        case Filter(below) | Reordered(below):
            found = _below(below, join, keys, known, most_rows)
        case Project(below, items):
            made = {item.name: item.expr for item in items}
            found = _below(below, join, tuple(substitute(key, made) for key in keys), known, most_rows)
        case OuterJoin():
            return None
        case Join(left, right):
            return _at_side(op, join, keys, known, most_rows, left, right)
        case _:
            return None
    return None if found is None else op.with_inputs((found,))


def _at_side(op: Join, join: Join, keys: tuple[Expr, ...], known: Cardinalities, most_rows: float, left: Op,
             right: Op) -> Op | None:
    """The join in one side of another: rather in the table, which is smaller then; equal keys may be tested there."""
    wanted = {name for key in keys for name in columns(key)}
    if not wanted:
        return None
    if op.how in ("inner", "cross"):
        there: dict[str, Expr] = {name: Col(column, right.schema[column].dtype, right.schema[column].nullable)
                                  for name, column in op.keep}
        there.update((a.name, b) for a, b in zip(op.left_keys, op.right_keys, strict=True)
                     if isinstance(a, Col) and isinstance(b, Col))
        if wanted <= there.keys():
            found = _tested(right, join, tuple(substitute(key, there) for key in keys), known, most_rows)
            if found is not None:
                return op.with_inputs((left, found))
    if wanted <= set(left.schema.names):
        found = _tested(left, join, keys, known, most_rows)
        return None if found is None else op.with_inputs((found, right))
    return None


def _tested(side: Op, join: Join, keys: tuple[Expr, ...], known: Cardinalities, most_rows: float) -> Op | None:
    """The join in a side of another, or at its end."""
    found = _below(side, join, keys, known, most_rows)
    if found is None and known.rows(side) <= most_rows:
        return replace(join, left=side, left_keys=keys)
    return found
