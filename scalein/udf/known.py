"""What is known at a place in a function: which locals are set there, and which are not None."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce

Names = frozenset[str]
_NOBODY: Names = frozenset()


@dataclass(frozen=True, slots=True)
class Known:
    """Facts that hold on every way to this place."""

    is_set: Names
    not_none: Names = _NOBODY

    def after(self, name: str, nullable: bool) -> Known:
        """With the local `name` assigned."""
        rest = self.not_none - {name}
        return Known(self.is_set | {name}, rest if nullable else rest | {name})

    def given(self, test: ast.expr, truth: bool) -> Known:
        """Where a test has come out as `truth`."""
        return replace(self, not_none=self.not_none | not_none_if(test, truth))

    def forgetting(self, names: Iterable[str]) -> Known:
        """Where `names` may have been assigned again since: the head of a loop."""
        return replace(self, not_none=self.not_none - set(names))


def join(states: Iterable[Known | None]) -> Known | None:
    """What is known where several ways meet; a way that ended in a return is None."""
    alive = [state for state in states if state is not None]
    return reduce(lambda a, b: Known(a.is_set & b.is_set, a.not_none & b.not_none), alive) if alive else None


def not_none_if(test: ast.expr, truth: bool) -> Names:
    """The names that cannot be None where `test` is true, or where it is false.

    >>> sorted(not_none_if(ast.parse("x is None or not y", mode="eval").body, False))
    ['x', 'y']
    """
    match test:
        case ast.Name(name):
            return frozenset((name,)) if truth else _NOBODY
        case ast.Compare(ast.Name(name), [ast.Is()], [ast.Constant(None)]):
            return _NOBODY if truth else frozenset((name,))
        case ast.Compare(ast.Name(name), [ast.IsNot()], [ast.Constant(None)]):
            return frozenset((name,)) if truth else _NOBODY
        case ast.UnaryOp(ast.Not(), inner):
            return not_none_if(inner, not truth)
        case ast.BoolOp(op, parts):
            each = [not_none_if(part, truth) for part in parts]
            # All of them came out so, or any of them may have.
            return _NOBODY.union(*each) if isinstance(op, ast.And) == truth else each[0].intersection(*each[1:])
        case _:
            return _NOBODY


def assigned(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that statements assign somewhere."""
    named = (inner for node in nodes for inner in ast.walk(node) if isinstance(inner, ast.Name))
    return {name.id for name in named if isinstance(name.ctx, ast.Store)}
