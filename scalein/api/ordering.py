"""Rows in an order, or the first of each key: what the user gave, resolved and checked."""

from __future__ import annotations

from collections.abc import Sequence

from scalein.api.column import Column
from scalein.api.naming import as_item, row_expr
from scalein.errors import BadArgument, WrongType
from scalein.ir.exprs import type_of
from scalein.ir.ops import By, Distinct, Op, Sort
from scalein.ir.resolve import Scope, column, shown
from scalein.ir.unify import nested_hint

Order = str | Column | Sequence[str | Column]


def distinct(op: Op, names: Sequence[object], scope: Scope) -> Distinct:
    """The first rows by the named columns; by all of them if none is named."""
    for name in names:
        if not isinstance(name, str):
            hint = "unpack it: distinct(*names)" if isinstance(name, list | tuple | set) else (
                "compute it first: with_columns(k=...).distinct(\"k\")")
            raise BadArgument("distinct takes names of columns", at=scope.at, found=repr(name), hint=hint)
    keys = [column(str(name), scope) for name in names] or [column(name, scope) for name in op.schema.names]
    for key in keys:
        if type_of(key).is_nested:
            hint = "name the columns to tell rows apart by" if not names else nested_hint(type_of(key))
            raise WrongType(f"rows cannot be told apart by {key.name!r}, which is {type_of(key)!r}", at=scope.at,
                            step=scope.step, hint=hint)
    return Distinct(op, tuple(dict.fromkeys(key.name for key in keys)), at=scope.at)


def sort(op: Op, by: Sequence[object], descending: object, nulls_last: object, scope: Scope) -> Sort:
    """All rows in order."""
    example = f'for example {scope.step}("x", descending=True)'
    if not by:
        raise BadArgument(f"{scope.step} needs something to sort by", at=scope.at, has=shown(scope.schema),
                          hint=example)
    if not isinstance(nulls_last, bool):
        raise BadArgument("nulls_last is True or False", at=scope.at, found=repr(nulls_last))
    directions = list(descending) if isinstance(descending, list | tuple) else [descending] * len(by)
    if not all(isinstance(each, bool) for each in directions):
        raise BadArgument("descending is True, False, or a list of them", at=scope.at, found=repr(descending),
                          hint=example)
    if len(directions) != len(by):
        raise BadArgument("descending needs one value for each column to sort by", at=scope.at,
                          found=f"{len(directions)} for {len(by)}")
    keys = tuple(_by(each, bool(way), scope) for each, way in zip(by, directions, strict=True))
    return Sort(op, keys, nulls_last, at=scope.at)


def first_rows(op: Op, count: object, by: object, descending: bool, scope: Scope) -> Sort:
    """The rows with the greatest (or least) values, best first; null is never preferred."""
    if isinstance(count, bool) or not isinstance(count, int) or not 0 < count < 2**63:
        hint = f'the number comes first: {scope.step}(10, "x")' if isinstance(count, str | Column) else None
        raise BadArgument(f"{scope.step} takes a number of rows, 1 or more", at=scope.at, found=repr(count), hint=hint)
    listed = list(by) if isinstance(by, list | tuple) else [by]
    if not listed:
        raise BadArgument(f"{scope.step} needs a column to compare rows by", at=scope.at, has=shown(scope.schema),
                          hint=f'for example {scope.step}(10, "x")')
    return Sort(op, tuple(_by(each, descending, scope) for each in listed), True, count, at=scope.at)


def _by(given: object, descending: bool, scope: Scope) -> By:
    if not isinstance(given, str | Column | list | tuple | set):
        raise BadArgument(f"{scope.step} takes columns and their names", at=scope.at, found=repr(given))
    expr = row_expr(as_item(given, scope), scope)
    if type_of(expr).is_nested:
        raise WrongType(f"{type_of(expr)!r} has no order", at=scope.at, step=scope.step, found=repr(given),
                        hint=nested_hint(type_of(expr)))
    return By(expr, descending)
