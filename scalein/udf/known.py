"""Flow analysis: which locals are set, and which are not None, at a point of a function."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce

Names = frozenset[str]
_NO_NAMES: Names = frozenset()


@dataclass(frozen=True, slots=True)
class Known:
    """Facts that hold on every path to a point."""

    is_set: Names
    not_none: Names = _NO_NAMES

    def after(self, name: str, nullable: bool) -> Known:
        """The facts after an assignment to `name`."""
        rest = self.not_none - {name}
        return Known(self.is_set | {name}, rest if nullable else rest | {name})

    def given(self, test: ast.expr, truth: bool) -> Known:
        """The facts where a test has this result."""
        return replace(self, not_none=self.not_none | not_none_if(test, truth))


def join(states: Iterable[Known | None]) -> Known | None:
    """The facts where several paths meet; a path that ended in a return is None."""
    open_paths = [state for state in states if state is not None]
    return reduce(lambda a, b: Known(a.is_set & b.is_set, a.not_none & b.not_none), open_paths) if open_paths else None


def not_none_if(test: ast.expr, truth: bool) -> Names:
    """The names that cannot be None where `test` is true, or where it is false.

    >>> sorted(not_none_if(ast.parse("x is None or not y", mode="eval").body, False))
    ['x', 'y']
    """
    match test:
        case ast.Name(name):
            return frozenset((name,)) if truth else _NO_NAMES
        case ast.Compare(ast.Name(name), [ast.Is()], [ast.Constant(None)]):
            return _NO_NAMES if truth else frozenset((name,))
        case ast.Compare(ast.Name(name), [ast.IsNot()], [ast.Constant(None)]):
            return frozenset((name,)) if truth else _NO_NAMES
        case ast.Compare(ast.Name(name), [ast.Eq()], [ast.Constant()]):
            return frozenset((name,)) if truth else _NO_NAMES
        case ast.Compare(ast.Name(name), [ast.NotEq()], [ast.Constant()]):
            return _NO_NAMES if truth else frozenset((name,))
        case ast.UnaryOp(ast.Not(), inner):
            return not_none_if(inner, not truth)
        case ast.BoolOp(op, parts):
            each = [not_none_if(part, truth) for part in parts]
            # Either all parts have this result, or at least one has.
            return _NO_NAMES.union(*each) if isinstance(op, ast.And) == truth else each[0].intersection(*each[1:])
        case _:
            return _NO_NAMES


def assigned(nodes: Iterable[ast.AST]) -> set[str]:
    """The names to which statements assign."""
    named = (inner for node in nodes for inner in ast.walk(node) if isinstance(inner, ast.Name))
    return {name.id for name in named if isinstance(name.ctx, ast.Store)}
