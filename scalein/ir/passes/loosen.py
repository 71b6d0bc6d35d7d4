"""Nullability that a change of a plan makes looser, carried up to all that reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from scalein.dtypes import Schema
from scalein.ir import ops
from scalein.ir.aggregates import AGGREGATES
from scalein.ir.exprs import Agg, Call, Col, Expr, NamedAgg
from scalein.ir.functions.registry import nullable
from scalein.ir.rewrite import rebuild, transform


def loosen(roots: Sequence[ops.Op], change: Callable[[ops.Op], ops.Op]) -> list[ops.Op]:
    """Plans with every op changed, inputs first: an expression over a column that may be null now may be null too.

    Aggregate(k, s = x.sum()) of which `s` may be null  ->  Filter(s > 1) over `s?`, Project(y = s * 2) with `y?`
    """
    return transform(roots, lambda op: change(_over_inputs(op)))


def _over_inputs(op: ops.Op) -> ops.Op:
    new = op.with_exprs([_over(expr, op.inputs[number].schema) for expr, number in op.exprs()])
    if new is op or not isinstance(op, ops.Aggregate) or not isinstance(new, ops.Aggregate):
        return new
    return replace(new, aggs=tuple(NamedAgg(old.name, loosened_agg(old.agg, now.agg))
                                   for old, now in zip(op.aggs, new.aggs, strict=True)))  # fmt: skip


def _over(expr: Expr, fields: Schema) -> Expr:
    def loosened(node: Expr, args: tuple[Expr, ...]) -> Expr:
        if isinstance(node, Col) and fields[node.name].nullable and not node.nullable:
            return replace(node, nullable=True)
        if not isinstance(node, Call) or all(new is old for new, old in zip(args, node.args, strict=True)):
            return node
        return replace(node, args=args, nullable=nullable_over(node, args))

    return rebuild(expr, loosened)


def loosened_agg(old: Agg, new: Agg) -> Agg:
    """An aggregate over new arguments, some of which may be null now."""
    return replace(new, nullable=old.nullable or (is_looser(old, new.args) and not AGGREGATES[old.fn].never_null))


def nullable_over(call: Call, args: Sequence[Expr]) -> bool:
    """Whether a call may be null, now that some of its arguments may."""
    return call.nullable or (is_looser(call, args) and nullable(call, args))


def is_looser(call: Call | Agg, args: Sequence[Expr]) -> bool:
    return any(new.nullable and not old.nullable for new, old in zip(args, call.args, strict=True))
