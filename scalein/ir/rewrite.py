"""The only traversals of the IR: over ops and expressions, and over the expressions of an op.

They are loops over an explicit stack, so a plan may be of any depth. Parts are remembered by identity: what two others
share is visited once and stays shared. Whatever does not change is handed back as the same object, not as an equal one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from scalein.ir.exprs import Call, Col, Expr, args_of, post_order

if TYPE_CHECKING:
    from scalein.ir.ops import Op

Tree = TypeVar("Tree")
Known = dict[int, tuple[Tree, Tree]]  # id -> (part, result); holding the part keeps its id from being reused


def walk_ops(root: Op) -> Iterator[Op]:
    """Every op once, inputs before the ops they feed; reversed, it gives users before their inputs."""
    return _walk([root], lambda op: op.inputs)


def _walk(roots: Sequence[Op], below: Callable[[Op], Sequence[Op]]) -> Iterator[Op]:
    seen: set[int] = set()
    waiting: list[tuple[Op, bool]] = [(root, False) for root in reversed(roots)]
    while waiting:
        op, is_over = waiting.pop()
        if is_over:
            yield op
        elif id(op) not in seen:
            seen.add(id(op))
            waiting.append((op, True))
            waiting += [(each, False) for each in reversed(below(op))]


def map_inputs(op: Op, fn: Callable[[Op], Op]) -> Op:
    """The op with `fn` applied to each of its inputs; the same object if none of them changed."""
    return op.with_inputs(tuple(map(fn, op.inputs)))


def map_exprs(op: Op, fn: Callable[[Expr], Expr]) -> Op:
    """The op with `fn` applied to each expression it holds; the same object if none of them changed.

    `fn` must keep types. It need not keep nullability except where `op.keeps_nullable`: there output columns have it
    from the expression.
    """
    return op.with_exprs([fn(expr) for expr, _ in op.exprs()])


def transform(roots: Sequence[Op], fn: Callable[[Op], Op]) -> list[Op]:
    """The plans with `fn` applied once to every op, over inputs to which it has been applied."""
    done: dict[int, Op] = {}
    for op in _walk(roots, lambda op: op.inputs):
        done[id(op)] = fn(op.with_inputs(tuple(done[id(below)] for below in op.inputs)))
    return [done[id(root)] for root in roots]


def walk_streams(*roots: Op) -> Iterator[Op]:
    """The ops that rows of a stream pass, each once, inputs before the ops they feed."""
    return _walk(roots, lambda op: op.streams)


def transform_streams(root: Op, fn: Callable[[Op], Op], static: Callable[[Op], Op] = lambda op: op) -> Op:
    """As `transform`, for ops that rows of a stream pass; tables that they are joined with become `static` of them."""
    done: dict[int, Op] = {}
    for op in walk_streams(root):
        tables = op.inputs[len(op.streams) :]
        done[id(op)] = fn(op.with_inputs((*(done[id(below)] for below in op.streams), *map(static, tables))))
    return done[id(root)]


def stream_path(top: Op, bottom: Op) -> list[Op]:
    """The ops that rows pass from `bottom`, which does not count, up to `top`; no union is among them."""
    path: list[Op] = []
    while top is not bottom:
        path.append(top)
        (top,) = top.streams
    return path[::-1]


def stacked(ops: Iterable[Op], bottom: Op) -> Op:
    """Ops one on the other, the first one over another input; tables that they are joined with stay."""
    for op in ops:
        bottom = op.with_inputs((bottom, *op.inputs[1:]))
    return bottom


def rewrite(root: Op, rule: Callable[[Op], Op | None]) -> Op:
    """The plan after `rule` was applied from the sources up until it has nothing to do anywhere.

    A rule sees an op whose inputs are finished and answers with a new op or None. What it answers is
    visited again, new inputs first: so a rule need only do one step.
    """
    return _rewrite(root, lambda op: op.inputs, lambda op, inputs: op.with_inputs(tuple(inputs)), rule, {})


def rewrite_expr(expr: Expr, rule: Callable[[Expr], Expr | None], known: Known[Expr] | None = None) -> Expr:
    """The expression after `rule` was applied from the leaves up until it has nothing to do anywhere.

    `known` is shared by calls with one rule: parts that one of them has finished are not visited again.
    """
    return _rewrite(expr, args_of, with_args, rule, {} if known is None else known)


def _rewrite(root: Tree, parts_of: Callable[[Tree], Sequence[Tree]],
             with_parts: Callable[[Tree, Sequence[Tree]], Tree], rule: Callable[[Tree], Tree | None],
             done: Known[Tree]) -> Tree:
    """Finished parts are remembered, so an answer that reuses them costs no second walk over them."""
    waiting: list[tuple[Tree, bool, Tree | None]] = [(root, False, None)]  # part, its own are finished, its answer
    while waiting:
        part, is_over, answer = waiting.pop()
        if answer is not None:
            result = done[id(answer)][1]
        elif not is_over:
            if id(part) not in done:
                waiting.append((part, True, None))
                waiting += [(below, False, None) for below in reversed(parts_of(part))]
            continue
        else:
            result = with_parts(part, [done[id(below)][1] for below in parts_of(part)])
            answer = rule(result)
            if answer is not None:
                waiting += [(part, True, answer), (answer, False, None)]
                continue
        done[id(part)] = (part, result)
        done[id(result)] = (result, result)
    return done[id(root)][1]


def map_args(expr: Expr, fn: Callable[[Expr], Expr]) -> Expr:
    """The expression with `fn` applied to each argument; the same object if none of them changed."""
    return with_args(expr, [fn(arg) for arg in args_of(expr)])


def with_args(expr: Expr, args: Sequence[Expr]) -> Expr:
    """The expression with other arguments; the same object if they are the same."""
    if not isinstance(expr, Call) or all(map(operator.is_, expr.args, args)):
        return expr
    return replace(expr, args=tuple(args))


def rebuild(expr: Expr, fn: Callable[[Expr, tuple[Expr, ...]], Expr]) -> Expr:
    """What `fn` makes of an expression and of what it has made of its arguments, from the leaves up, once each."""
    done: dict[int, Expr] = {}
    for node in post_order(expr):
        done[id(node)] = fn(node, tuple(done[id(arg)] for arg in args_of(node)))
    return done[id(expr)]


def operands(expr: Expr, fn: str) -> list[Expr]:
    """`a & b & c` -> a, b, c, of a function that is nested in either argument."""
    found: list[Expr] = []
    waiting = [expr]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Call) and part.fn == fn:
            waiting += reversed(part.args)
        else:
            found.append(part)
    return found


Stacked = Generator["Stacked[Tree]", Tree, Tree]


def run_stacked(first: Stacked[Tree]) -> Tree:
    """What a generator returns that yields others like it, and is sent what each of these returns.

    It reads like a recursive function, and runs on a stack of its own.
    """
    waiting = [first]
    given: Tree | None = None
    while True:
        try:
            waiting.append(waiting[-1].send(given))  # type: ignore[arg-type]
            given = None
        except StopIteration as ended:
            waiting.pop()
            if not waiting:
                return ended.value  # type: ignore[no-any-return]
            given = ended.value


def substitute(expr: Expr, by_name: Mapping[str, Expr]) -> Expr:
    """The expression with columns replaced by what `by_name` gives for them; others stay.

    One pass: columns inside of a replacement are not replaced again.
    """
    def replaced(node: Expr, args: tuple[Expr, ...]) -> Expr:
        if not isinstance(node, Col):
            return with_args(node, args)
        found = by_name.get(node.name, node)
        return node if found == node else found

    return rebuild(expr, replaced)
