"""Filters towards the sources, one conjunct at a time.

What makes a move legal is the set of rows that a predicate is computed for: one that can fail must not meet a row that
it did not meet before. So it never passes a filter that stays above it; which ops it passes, each op says (`Op.push`,
in `ir/ops/`: for joins `join.py`). That rows are gone earlier can only remove errors of the ops in between. Which of
the filters that reach a source skip files and row groups: `exec/scan_predicates.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from scalein.errors import SourceLoc
from scalein.ir.exprs import Expr, Lit
from scalein.ir.functions.registry import can_fail
from scalein.ir.ops import Filter, Op
from scalein.ir.passes.fold import fold_expr
from scalein.ir.rewrite import Known, operands


class _Pending(NamedTuple):
    """A predicate on its way down, and where the user wrote its filter."""

    predicate: Expr
    at: SourceLoc


class _Moves(NamedTuple):
    """What becomes of the filters above an op: some conjuncts go to its inputs, the others stay."""

    base: Op
    below: tuple[tuple[_Pending, ...], ...]  # for each input
    stay: list[_Pending]  # the lowest first
    filters: list[Op]  # as they stood, if nothing moved


def push_down(root: Op) -> Op:
    """Filter(Project(x, b = a + 1), b > 0) -> Project(Filter(x, a + 1 > 0), b = a + 1), and so on downwards."""
    known: Known[Expr] = {}
    planned: dict[_Key, _Moves] = {}
    done: dict[_Key, Op] = {}
    made: dict[tuple[int, int], Op] = {}
    waiting: list[tuple[Op, tuple[_Pending, ...]]] = [(root, ())]
    while waiting:
        op, pending = waiting[-1]
        key = _key(op, pending)
        if key in done:
            waiting.pop()
            continue
        moves = planned.get(key)
        if moves is None:
            moves = planned[key] = _moves(op, pending, known)
        pairs = list(zip(moves.base.inputs, moves.below, strict=True))
        unfinished = [pair for pair in pairs if _key(*pair) not in done]
        if unfinished:
            waiting += reversed(unfinished)
            continue
        done[key] = _rebuilt(moves, tuple(done[_key(*pair)] for pair in pairs), made)
        waiting.pop()
    return done[_key(root, ())]


_Key = tuple[int, ...]


def _key(op: Op, pending: tuple[_Pending, ...]) -> _Key:
    """Two users of an op that send it the same predicates share what becomes of it."""
    return (id(op), *(id(each.predicate) for each in pending))


def _moves(top: Op, pending: tuple[_Pending, ...], known: Known[Expr]) -> _Moves:
    """Where the filters at `top`, and those that come from above, go."""
    filters: list[Op] = []
    base = top
    while isinstance(base, Filter):
        filters.append(base)
        base = base.input
    filters.reverse()
    wholes = [_Pending(each.predicate, each.at) for each in filters if isinstance(each, Filter)] + list(pending)
    below: list[list[_Pending]] = [[] for _ in base.inputs]
    kept: list[list[Expr]] = []  # of each filter, what stays
    last_moved = -1
    is_guarded = False  # a part that stays guards those after it, which must not fail where it is false
    for number, (predicate, at) in enumerate(wholes):
        kept.append([])
        for part in conjuncts(predicate):
            where = None if is_guarded and can_fail(part) else base.push(part)
            if where is None:
                kept[-1].append(part)
                is_guarded = True
                continue
            last_moved = number
            for to, lowered in where:
                moved = lowered if lowered is part else fold_expr(lowered, known)
                if not _is_true(moved):
                    below[to].append(_Pending(moved, at))
    stay = [_Pending(part, whole.at) for parts, whole in zip(kept[: last_moved + 1], wholes, strict=False)
            for part in parts if not _is_true(part)]  # fmt: skip
    stay += wholes[last_moved + 1 :]
    return _Moves(base, tuple(map(tuple, below)), stay, filters if last_moved < 0 else [])


def _rebuilt(moves: _Moves, inputs: tuple[Op, ...], made: dict[tuple[int, int], Op]) -> Op:
    """The op over its new inputs, and the filters that stay; one that several stacks begin with stays shared."""
    op = moves.base.with_inputs(inputs)
    for each in moves.filters:
        op = made.setdefault((id(each), id(op)), each.with_inputs((op,)))
    for predicate, at in moves.stay[len(moves.filters) :]:
        op = Filter(op, predicate, at=at)
    return op


def _is_true(predicate: Expr) -> bool:
    return isinstance(predicate, Lit) and predicate.value is True


def conjuncts(predicate: Expr) -> list[Expr]:
    """`a & b & c` -> a, b, c: what a row must pass, in the order in which one guards the next."""
    return operands(predicate, "and")
