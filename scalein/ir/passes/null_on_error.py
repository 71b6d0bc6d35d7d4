"""on_error="null": a plan in which whatever can fail is tried, and gives null in the rows where it does.

It is the innermost expression that fails that becomes null, as with `try_cast` and its like: `60 // x` in
`(60 // x).fill_null(0)`, and null means what it always means to what stands around it. So the plan is rewritten once,
and the job runs it as it would run any other; no row is computed twice. What is now null at times is declared so, all
the way up. A line of a file that cannot be decoded is null in the fields that cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scalein.dtypes import Schema
from scalein.ir import ops
from scalein.ir.exprs import Call, Col, Expr, NamedAgg
from scalein.ir.functions.registry import fallible
from scalein.ir.passes.loosen import loosened_agg, nullable_over
from scalein.ir.rewrite import map_exprs, rebuild, rewrite_expr, transform

_OURS = ("on_error",)  # what a `try` holds that the user did not write



def null_on_error(root: ops.Op) -> ops.Op:
    """The plan with null where an expression would fail. A sum that leaves its 64 bits is no row's fault, and a
    function of `map_batches` no expression: they raise as ever.
    """
    return null_on_errors([root])[0]


def null_on_errors(roots: Sequence[ops.Op]) -> list[ops.Op]:
    """The same of several plans: what they share stays shared."""
    return transform(roots, _loosened)


def _loosened(op: ops.Op) -> ops.Op:
    if isinstance(op, ops.Source):
        return op.null_on_error()
    new = op.with_exprs([_tried(expr, op.inputs[number].schema) for expr, number in op.exprs()])
    if not isinstance(op, ops.Aggregate) or not isinstance(new, ops.Aggregate):
        return new
    return replace(new, aggs=tuple(NamedAgg(old.name, loosened_agg(old.agg, now.agg))
                                   for old, now in zip(op.aggs, new.aggs, strict=True)))  # fmt: skip


def _tried(expr: Expr, fields: Schema) -> Expr:
    def attempt(node: Expr, args: tuple[Expr, ...]) -> Expr:
        if isinstance(node, Col):
            return replace(node, nullable=fields[node.name].nullable)
        if not isinstance(node, Call):
            return node
        if node.fn == "try":  # its argument is already such a `try`, around the same call
            (inner,) = args
            is_ours = isinstance(inner, Call) and inner.fn == "try" and inner.params == _OURS
            return replace(node, args=inner.args if isinstance(inner, Call) and is_ours else args)
        call = replace(node, args=args, nullable=nullable_over(node, args))
        return Call("try", (call,), _OURS, call.dtype, True, at=call.at) if fallible(call) else call

    return rebuild(expr, attempt)


def as_written(op: ops.Op) -> ops.Op:
    """An op as the user wrote it, where that makes no difference to what its state has.

    So a job that a row has ended can go on with on_error="null". A value that could not be null before is another: its
    nulls are counted.
    """
    return map_exprs(op, lambda expr: rewrite_expr(expr, _as_written))


def _as_written(expr: Expr) -> Expr | None:
    match expr:
        case Call("try", (Call() as inner,), params) if params == _OURS and inner.nullable:
            return inner
    return None
