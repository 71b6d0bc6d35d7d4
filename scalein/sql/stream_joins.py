"""Joins of two streams, recognised by their inputs and conditions.

A join of two relations that have event time, or never end, is one of streams: rows of either side come while a job
runs. Conditions that keep the difference of two times between constants bound it, and with that what a job retains; a
join without such conditions retains all rows of both sides, as a regular join does in Flink.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from sqlglot import exp

from scalein.connectors.base import BoundSource
from scalein.dtypes import UNITS_PER_SECOND, Kind
from scalein.ir.exprs import Col, Lit, type_of
from scalein.ir.ops import Join, Op, OuterJoin, Source, StreamJoin, Watermark
from scalein.ir.ops.stream_join import TimeBound
from scalein.ir.rewrite import walk_streams
from scalein.sql.exprs import Exprs
from scalein.sql.joins import Pair, equi_join
from scalein.sql.parse import unwrapped
from scalein.sql.scope import Relation

if TYPE_CHECKING:
    from scalein.sql.from_clause import FromClause

Comparison = tuple[type[exp.Expr], exp.Expr, exp.Expr]
_MIRRORED: dict[type[exp.Expr], type[exp.Expr]] = {exp.GTE: exp.LTE, exp.LTE: exp.GTE, exp.GT: exp.LT, exp.LT: exp.GT}


def inner(clause: FromClause, left: Relation, right: Relation, pairs: list[Pair],
          pool: list[exp.Expr]) -> Relation | None:
    """The join of two streams that the conditions mean; None if they mean one with a table."""
    if not pairs:
        return None
    found = _bound(clause, left, right, pool)
    if found is None and not (is_stream(left.op) and is_stream(right.op)):
        return None
    for each in found.conditions if found is not None else []:
        pool[:] = [other for other in pool if other is not each]
    bound = _in_windows(left, right, pairs) if found is None else found.bound
    return _streaming(equi_join(left, right, pairs, "inner", clause.at), bound)


def outer(clause: FromClause, left: Relation, right: Relation, kind: str, pairs: list[Pair],
          rest: list[exp.Expr]) -> Relation | None:
    """The same for an outer, semi or anti join, whose other conditions must all be those of times."""
    if not pairs or not (is_stream(left.op) and is_stream(right.op)):
        return None
    found = _bound(clause, left, right, rest) if rest else None
    if rest and (found is None or len(found.conditions) < len(rest)):
        return None
    bound = _in_windows(left, right, pairs) if found is None else found.bound
    return _streaming(equi_join(left, right, pairs, kind, clause.at), bound)


def is_stream(op: Op) -> bool:
    """Whether the rows of an op have event time, or never end."""
    return any(isinstance(each, Watermark) or (isinstance(each, Source) and isinstance(each.data, BoundSource)
                                               and not each.data.bounded) for each in walk_streams(op))


def is_endless(op: Op) -> bool:
    """Whether the rows of an op never end."""
    return any(isinstance(each, Source) and isinstance(each.data, BoundSource) and not each.data.bounded
               for each in walk_streams(op))


def _in_windows(left: Relation, right: Relation, pairs: list[Pair]) -> TimeBound | None:
    """The bound of a join of windows by their starts: of endless streams, no row waits longer than its window."""
    if left.window is None or right.window is None or left.window.is_pending or right.window.is_pending:
        return None
    if not (is_endless(left.op) and is_endless(right.op)):
        return None
    start, other = left.window.start, right.window.start
    return TimeBound(start, other) if (start, other) in pairs and not (start.nullable or other.nullable) else None


def _streaming(joined: Relation, bound: TimeBound | None) -> Relation:
    """A join of a table as one of streams."""
    op = joined.op
    assert isinstance(op, Join | OuterJoin)
    return joined.over(StreamJoin(op.left, op.right, op.left_keys, op.right_keys, op.how, op.keep, bound, at=op.at))


@dataclass
class _Found:
    bound: TimeBound
    conditions: list[exp.Expr]


def _bound(clause: FromClause, left: Relation, right: Relation, pool: list[exp.Expr]) -> _Found | None:
    """The least and the greatest difference of two times that the conditions allow."""
    limits: dict[tuple[Col, Col], list[tuple[bool, int, exp.Expr]]] = {}
    for each in pool:
        for comparison in _comparisons(unwrapped(each)):
            limit = _limit(clause, left, right, comparison)
            if limit is not None:
                times, is_low, value = limit
                limits.setdefault(times, []).append((is_low, value, each))
    for (mine, others), found in limits.items():
        lows = [value for is_low, value, _ in found if is_low]
        highs = [value for is_low, value, _ in found if not is_low]
        if not lows or not highs or max(lows) > min(highs) or not _may_bound(left, right, mine, others):
            continue
        conditions = list({id(each): each for _, _, each in found}.values())
        # A BETWEEN whose other end is no constant stays as a filter.
        whole = [each for each in conditions
                 if sum(one is each for _, _, one in found) == len(list(_comparisons(unwrapped(each))))]
        return _Found(TimeBound(mine, others, max(lows), min(highs)), whole)
    return None


def _may_bound(left: Relation, right: Relation, mine: Col, others: Col) -> bool:
    """Whether two columns are event time: those of watermarks, or times where neither side has any."""
    if not (is_stream(left.op) or is_stream(right.op)):
        return type_of(mine).kind is Kind.TS
    return all(each.op.event_time.lead(time) == 0 for each, time in ((left, mine), (right, others)))


def _comparisons(node: exp.Expr) -> list[Comparison]:
    """The comparisons that a condition consists of: BETWEEN is two."""
    if isinstance(node, exp.Between):
        return [(exp.GTE, node.this, node.args["low"]), (exp.LTE, node.this, node.args["high"])]
    return [(type(node), node.this, node.args["expression"])] if type(node) in _MIRRORED else []


def _limit(clause: FromClause, left: Relation, right: Relation,
           comparison: Comparison) -> tuple[tuple[Col, Col], bool, int] | None:
    """A limit of right time - left time: whether it is the least, and its value in units of the times."""
    kind, *given = comparison
    one, other = (_moved(clause, [left, right], each) for each in given)
    if one is None or other is None or {one[0], other[0]} != {0, 1}:
        return None
    (first, a, moved_a), (_, b, moved_b) = one, other
    if first == 0:  # the right side's time first
        (a, moved_a), (b, moved_b), kind = (b, moved_b), (a, moved_a), _MIRRORED[kind]
    if type_of(a) != type_of(b) or type_of(a).kind not in (Kind.TS, Kind.I64, Kind.I32):
        return None
    limit = _units(moved_b, a) - _units(moved_a, a)
    strict = 1 if kind is exp.GT else -1 if kind is exp.LT else 0
    return (b, a), kind in (exp.GTE, exp.GT), limit + strict


def _units(moved: int | timedelta, time: Col) -> int:
    if isinstance(moved, int):
        return moved
    microseconds = (moved.days * 86_400 + moved.seconds) * 1_000_000 + moved.microseconds
    return microseconds * UNITS_PER_SECOND[type_of(time).unit or "s"] // 1_000_000


def _moved(clause: FromClause, relations: list[Relation], node: exp.Expr) -> tuple[int, Col, int | timedelta] | None:
    """A column of one side, moved by a constant: the side, the column, and the length."""
    node, sign, length = unwrapped(node), 1, Lit(0)
    if isinstance(node, exp.Add | exp.Sub):
        e = Exprs(clause.source, relations[0], "JOIN")
        first, second = unwrapped(node.this), unwrapped(node.args["expression"])
        if isinstance(node, exp.Add) and isinstance(second, exp.Column):
            first, second = second, first
        if not isinstance(second, exp.Interval | exp.Literal):
            return None
        found = e.expr(second)
        if not isinstance(found, Lit) or not isinstance(found.value, int | timedelta):
            return None
        node, length, sign = first, found, 1 if isinstance(node, exp.Add) else -1
    if not isinstance(node, exp.Column):
        return None
    owners = clause._owners(node, relations)
    if owners is None or len(owners) != 1:
        return None
    (side,) = owners
    column = Exprs(clause.source, relations[side], "JOIN").typed(node)
    value = length.value
    if not isinstance(column, Col) or not isinstance(value, int | timedelta):
        return None
    if isinstance(value, int) != type_of(column).is_int and value != 0:
        return None
    return side, column, sign * value if isinstance(value, int) else value * sign


