"""Outputs of a step: what the user gave, resolved, each under its own name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from scalein.api.column import Column, as_column, lit
from scalein.errors import BadArgument, BadName, type_name
from scalein.ir.exprs import Agg, Expr, Named
from scalein.ir.literals import PLAIN
from scalein.ir.printer import show_agg
from scalein.ir.resolve import Scope, resolve


def row_outputs(given: Iterable[object], named: Mapping[str, object], scope: Scope) -> list[Named]:
    """Positional columns under their own names, then keyword ones; names are distinct."""
    items = [_own_name(as_item(item, scope), scope) for item in given]
    items += [Named(name, row_expr(_keyword(value), scope)) for name, value in named.items()]
    check_distinct([item.name for item in items], scope)
    return items


def as_item(item: object, scope: Scope) -> Column:
    """A positional argument as a column: a Column, or a name."""
    if isinstance(item, Column | str):
        return as_column(item, scope.step)
    found = repr(item) if isinstance(item, (*PLAIN, list, tuple, set)) else type_name(item)
    hint = "a constant needs a name: give it as name=value"
    if isinstance(item, list | tuple | set):
        hint = f"unpack it: {scope.step}(*names)"
    elif scope.step == "filter" or not isinstance(item, PLAIN):
        hint = f'write it with scalein.col: {scope.step}(col("x") > 1)'
    raise BadArgument(f"{scope.step} takes columns and their names", at=scope.at, found=found, hint=hint)


def _keyword(value: object) -> Column:
    """`new=col("x") + 1`; a str names a column, anything else is a constant."""
    return value if isinstance(value, Column) else as_column(value, "") if isinstance(value, str) else lit(value)


def row_expr(given: Column, scope: Scope) -> Expr:
    """The typed expression of a column that is computed row by row."""
    if isinstance(given.node, Agg):
        raise BadArgument(f"{show_agg(given.node)} is an aggregate, but {scope.step} works row by row", at=scope.at,
                          hint="aggregates go into group_by(...).agg(...); group_by() takes all rows as one group")
    return resolve(given.node, scope)


def _own_name(given: Column, scope: Scope) -> Named:
    expr = row_expr(given, scope)
    if given.name is None:
        raise BadName(f"an output of {scope.step} has no name", at=scope.at, found=repr(given),
                      hint="name it with .alias(...), or give it as name=...")
    return Named(given.name, expr)


def check_distinct(names: list[str], scope: Scope) -> None:
    """Raise `BadName` for the first name that appears twice among the outputs."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise BadName(f"two outputs of {scope.step} are called {name!r}", at=scope.at, has=", ".join(names),
                          hint="name one of them with .alias(...)")
        if not name:
            raise BadName(f"an output of {scope.step} has an empty name", at=scope.at)
        seen.add(name)
