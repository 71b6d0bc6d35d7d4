"""Limits into sorts: the first rows of an order are found without sorting the others, in one pass over them.

A limit passes projections on its way: they keep rows and their order, so fewer of them are computed.
"""

from __future__ import annotations

from dataclasses import replace

from scalein.ir.ops import Limit, Op, Project, Sort
from scalein.ir.rewrite import rewrite


def top_rows(root: Op) -> Op:
    """Limit(Project(Sort(x, by), items), 3) -> Project(Sort(x, by, first 3), items)."""
    return rewrite(root, _lower)


def _lower(op: Op) -> Op | None:
    match op:
        case Limit(Sort() as sort, count):
            return replace(sort, count=count if sort.count is None else min(count, sort.count))
        case Limit(Project()):
            return _below_projections(op)
        case _:
            return None


def _below_projections(limit: Limit) -> Op | None:
    """The limit below the projections under it, if they stand over a sort."""
    passed: list[Op] = []
    below = limit.input
    while isinstance(below, Project):
        passed.append(below)
        below = below.input
    if not isinstance(below, Sort):
        return None
    lowered: Op = replace(limit, input=below)
    for project in reversed(passed):
        lowered = project.with_inputs((lowered,))
    return lowered
