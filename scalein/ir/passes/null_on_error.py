"""on_error="null": a plan in which whatever can fail is tried, and gives null in the rows where it does.

It is the innermost expression that fails that becomes null, as with `try_cast` and its like: `60 // x` in
`(60 // x).fill_null(0)`, and null means what it always means to what stands around it. So the plan is rewritten once,
and the job runs it as it would run any other; no row is computed twice. What is now null at times is declared so, all
the way up. A line of a file that cannot be decoded is null in the fields that cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scalein.connectors.base import BoundSource
from scalein.dtypes import Schema
from scalein.ir import ops
from scalein.ir.aggregates import AGGREGATES
from scalein.ir.exprs import Agg, Call, Col, Expr, Lit, Named, NamedAgg
from scalein.ir.functions.registry import fallible, nullable
from scalein.ir.rewrite import map_exprs, map_inputs, rewrite_expr

_OURS = ("on_error",)  # what a `try` holds that the user did not write



def tried(root: ops.Op) -> ops.Op:
    """The plan with null where an expression would fail. A sum that leaves its 64 bits is no row's fault, and a
    function of `map_batches` no expression: they raise as ever.
    """
    done: dict[int, ops.Op] = {}

    def visit(op: ops.Op) -> ops.Op:
        if id(op) not in done:
            done[id(op)] = _with_exprs(map_inputs(op, visit))
        return done[id(op)]

    return visit(root)


def _with_exprs(op: ops.Op) -> ops.Op:
    match op:
        case ops.Source(data=BoundSource() as data):
            return replace(op, data=data.lenient("null"))
        case ops.Join():
            left, right = op.left.schema, op.right.schema
            return replace(op, left_keys=tuple(_tried(key, left) for key in op.left_keys),
                           right_keys=tuple(_tried(key, right) for key in op.right_keys))
        case ops.Aggregate():
            fields = op.input.schema
            keys = tuple(Named(key.name, _tried(key.expr, fields)) for key in op.keys)
            window = None if op.window is None else replace(op.window, time=_tried(op.window.time, fields))
            return replace(op, keys=keys, window=window,
                           aggs=tuple(NamedAgg(each.name, _tried_agg(each.agg, fields)) for each in op.aggs))
        case ops.Filter() | ops.Project() | ops.Sort():
            fields = op.input.schema
            return map_exprs(op, lambda expr: _tried(expr, fields))
        case _:
            return op


def _tried_agg(agg: Agg, fields: Schema) -> Agg:
    args = tuple(_tried(arg, fields) for arg in agg.args)
    is_looser = _is_looser(agg, args) and not AGGREGATES[agg.fn].never_null
    return replace(agg, args=args, nullable=agg.nullable or is_looser)


def _tried(expr: Expr, fields: Schema) -> Expr:
    match expr:
        case Col(name):
            return replace(expr, nullable=fields[name].nullable)
        case Lit():
            return expr
        case Call("try", (Call() as inner,)):
            inner = replace(inner, args=tuple(_tried(arg, fields) for arg in inner.args))
            return replace(expr, args=(inner,))
    args = tuple(_tried(arg, fields) for arg in expr.args)
    call = replace(expr, args=args, nullable=_nullable(expr, args))
    return Call("try", (call,), _OURS, call.dtype, True, at=call.at) if fallible(call) else call


def _nullable(call: Call, args: Sequence[Expr]) -> bool:
    """Whether a call may be null, now that some of its arguments may."""
    return call.nullable or (_is_looser(call, args) and nullable(call, args))


def _is_looser(call: Call | Agg, args: Sequence[Expr]) -> bool:
    return any(new.nullable and not old.nullable for new, old in zip(args, call.args, strict=True))


def untried(op: ops.Op) -> ops.Op:
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
