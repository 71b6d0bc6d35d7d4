"""The only traversals of the IR: over ops, nodes and expressions, and over the expressions of an op.

Ops are remembered by identity, so an input that two ops share is visited once and stays shared.
Whatever does not change is handed back as the same object, not as an equal one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from scalein.ir.exprs import Agg, Call, Col, Expr, Named, NamedAgg
from scalein.ir.ops import Aggregate, Filter, Join, Op, Project, Sort, Source, Union, inputs

Tree = TypeVar("Tree")
Rule = Callable[[Op], Op | None]
ExprRule = Callable[[Expr], Expr | None]


def walk_ops(root: Op) -> Iterator[Op]:
    """Every op once, inputs before the ops they feed; reversed, it gives users before their inputs."""
    seen: set[int] = set()

    def visit(op: Op) -> Iterator[Op]:
        if id(op) not in seen:
            seen.add(id(op))
            for below in inputs(op):
                yield from visit(below)
            yield op

    return visit(root)


def map_inputs(op: Op, fn: Callable[[Op], Op]) -> Op:
    """The op with `fn` applied to each of its inputs; the same object if none of them changed."""
    old = inputs(op)
    new = tuple(fn(below) for below in old)
    if all(a is b for a, b in zip(old, new, strict=True)):
        return op
    match op:
        case Union():
            return replace(op, inputs=new)
        case Join():
            return replace(op, left=new[0], right=new[1])
        case Source():
            return op
        case _:
            return replace(op, input=new[0])


def rewrite(root: Op, rule: Rule) -> Op:
    """The plan after `rule` was applied from the sources up until it has nothing to do anywhere.

    A rule sees an op whose inputs are finished and answers with a new op or None. What it answers is
    visited again, new inputs first: so a rule need only do one step.
    """
    return _rewrite(root, map_inputs, rule)


def rewrite_expr(expr: Expr, rule: ExprRule) -> Expr:
    """The expression after `rule` was applied from the leaves up until it has nothing to do anywhere."""
    return _rewrite(expr, map_args, rule)


def _rewrite(root: Tree, map_parts: Callable[[Tree, Callable[[Tree], Tree]], Tree],
             rule: Callable[[Tree], Tree | None]) -> Tree:
    """Finished parts are remembered, so an answer that reuses them costs no second walk over them."""
    done: dict[int, tuple[Tree, Tree]] = {}  # id -> (part, result); holding the part keeps its id from being reused

    def visit(part: Tree) -> Tree:
        known = done.get(id(part))
        if known is not None:
            return known[1]
        mapped = map_parts(part, visit)
        changed = rule(mapped)
        result = mapped if changed is None else visit(changed)
        done[id(part)] = (part, result)
        done[id(result)] = (result, result)
        return result

    return visit(root)


def map_args(expr: Expr, fn: Callable[[Expr], Expr]) -> Expr:
    """The expression with `fn` applied to each argument; the same object if none of them changed."""
    if not isinstance(expr, Call):
        return expr
    new = tuple(fn(arg) for arg in expr.args)
    return expr if all(a is b for a, b in zip(expr.args, new, strict=True)) else replace(expr, args=new)


def substitute(expr: Expr, by_name: Mapping[str, Expr]) -> Expr:
    """The expression with columns replaced by what `by_name` gives for them; others stay.

    One pass: columns inside of a replacement are not replaced again.
    """
    if isinstance(expr, Col):
        return by_name.get(expr.name, expr)
    return map_args(expr, lambda arg: substitute(arg, by_name))


def exprs_of(op: Op) -> tuple[tuple[Expr, Op], ...]:
    """Every expression an op holds, each with the input whose columns it reads."""
    match op:
        case Filter():
            return ((op.predicate, op.input),)
        case Project():
            return tuple((item.expr, op.input) for item in op.items)
        case Join():
            return (*((key, op.left) for key in op.left_keys), *((key, op.right) for key in op.right_keys))
        case Sort():
            return tuple((by.expr, op.input) for by in op.by)
        case Aggregate():
            held = [key.expr for key in op.keys]
            held += [op.window.time] if op.window is not None else []
            held += [arg for named in op.aggs for arg in named.agg.args]
            return tuple((expr, op.input) for expr in held)
        case _:
            return ()


def map_exprs(op: Op, fn: Callable[[Expr], Expr]) -> Op:
    """The op with `fn` applied to each expression it holds; the same object if none of them changed.

    `fn` must keep types. It need not keep nullability except where an output column has it from the
    expression: in the items of a Project and the keys of an Aggregate.
    """
    old = exprs_of(op)
    new = iter([fn(expr) for expr, _ in old])
    rebuilt = _with_exprs(op, new)
    return op if all(a is b for (a, _), (b, _) in zip(old, exprs_of(rebuilt), strict=True)) else rebuilt


def _with_exprs(op: Op, new: Iterator[Expr]) -> Op:
    """The op with its expressions taken from `new`, in the order of `exprs_of`."""
    match op:
        case Filter():
            return replace(op, predicate=next(new))
        case Project():
            return replace(op, items=tuple(Named(item.name, next(new)) for item in op.items))
        case Join():
            left = tuple(next(new) for _ in op.left_keys)
            return replace(op, left_keys=left, right_keys=tuple(next(new) for _ in op.right_keys))
        case Sort():
            return replace(op, by=tuple(replace(by, expr=next(new)) for by in op.by))
        case Aggregate():
            keys = tuple(Named(key.name, next(new)) for key in op.keys)
            window = replace(op.window, time=next(new)) if op.window is not None else None
            return replace(op, keys=keys, window=window, aggs=tuple(_with_args(a, new) for a in op.aggs))
        case _:
            return op


def _with_args(named: NamedAgg, new: Iterator[Expr]) -> NamedAgg:
    agg: Agg = replace(named.agg, args=tuple(next(new) for _ in named.agg.args))
    return NamedAgg(named.name, agg)
