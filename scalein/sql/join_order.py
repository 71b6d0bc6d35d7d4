"""In which order relations are joined."""

from __future__ import annotations

from sqlglot import exp

from scalein.sql.scope import Relation


def ordered(relations: list[Relation], edges: list[tuple[int, int, exp.Expr]]) -> list[int]:
    """The numbers of the relations in the order in which they are joined: as written, but connected ones first."""
    found = [0]
    waiting = list(range(1, len(relations)))
    while waiting:
        here = set(found)
        connected = next((each for each in waiting if any(
            (a == each and b in here) or (b == each and a in here) for a, b, _ in edges)), waiting[0])
        found.append(connected)
        waiting.remove(connected)
    return found
