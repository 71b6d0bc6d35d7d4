"""Neighbouring filters into one predicate."""

from __future__ import annotations

from scalein.dtypes import BOOL
from scalein.ir.exprs import Call, Expr, Lit
from scalein.ir.functions.registry import can_fail
from scalein.ir.ops import Filter, Op
from scalein.ir.rewrite import rewrite


def merge_filters(root: Op) -> Op:
    """Filter(Filter(x, p), q) -> Filter(x, p & q), so that fusion meets one predicate.

    `&` guards from left to right: where p is false, q cannot fail. A null p drops the row in two filters
    but leaves `p & q` undecided, so in front of a q that can fail it is turned into false.
    """
    return rewrite(root, _merge_pair)


def _merge_pair(op: Op) -> Op | None:
    match op:
        case Filter(Filter(source, first), second):
            guard = _null_is_false(first) if first.nullable and can_fail(second) else first
            both = Call("and", (guard, second), (), BOOL, guard.nullable or second.nullable, at=op.at)
            return Filter(source, both, at=op.at)
        case _:
            return None


def _null_is_false(predicate: Expr) -> Expr:
    return Call("fill_null", (predicate, Lit(False, BOOL)), (), BOOL, nullable=False)
