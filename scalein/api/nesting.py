"""Lists into rows: what the user asked to explode, checked."""

from __future__ import annotations

from scalein.dtypes import element_of, from_arrow_type
from scalein.errors import BadArgument, WrongType
from scalein.ir.exprs import type_of
from scalein.ir.ops import Explode, Op
from scalein.ir.resolve import Scope, column
from scalein.ir.unify import nested_hint


def explode(op: Op, name: object, scope: Scope) -> Explode:
    """The op with a row for each element of a list."""
    if not isinstance(name, str) or not name:
        raise BadArgument("explode takes the name of a column", at=scope.at, found=repr(name),
                          hint="compute it first: with_columns(tags=...).explode(\"tags\")")
    dtype = type_of(column(name, scope))
    element = element_of(dtype)
    if element is None:
        raise WrongType(f"explode takes a list, but {name!r} is {dtype!r}", at=scope.at, step=scope.step,
                        hint=nested_hint(dtype) if dtype.is_nested else _lists(scope))
    from_arrow_type(element.type, name)  # refused here, where the user called, if nothing can be done with it
    return Explode(op, name, at=scope.at)


def _lists(scope: Scope) -> str:
    names = [field.name for field in scope.schema if element_of(field.dtype) is not None]
    if names:
        return f"the lists here are {', '.join(map(repr, names))}"
    return "no column here is a list; .collect() in agg(...) makes them"
