"""`over`: what the user gave, and the ops that compute it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import count

from scalein.api.arguments import flat
from scalein.api.column import Column, as_column
from scalein.dtypes import BOOL, Kind
from scalein.durations import Span, in_units, span
from scalein.errors import BadArgument, SourceLoc, WrongType
from scalein.ir.exprs import Agg, AggregateResult, Call, Col, Expr, OverResult, post_order, type_of
from scalein.ir.internal_names import internal
from scalein.ir.ops import By, Filter, Op, Over
from scalein.ir.over import Frame, OverCall, is_window_function, typed_call
from scalein.ir.printer import show_agg, show_expr
from scalein.ir.resolve import Scope, explained, resolve, shown
from scalein.ir.rewrite import rebuild, with_args
from scalein.ir.unify import nested_hint

_EXAMPLE = 'col("price").sum().over("user", order_by="time")'


def over(column: Column, keys: Iterable[object], order_by: object, descending: object, rows: object, within: object,
         at: SourceLoc) -> Column:
    """The column with each aggregate in it over other rows of a row's partition."""
    partition = tuple(_expr(key, "over", at) for key in flat(keys))
    by = [] if order_by is None else [_expr(each, "order_by", at) for each in flat([order_by])]
    ways = list(descending) if isinstance(descending, list | tuple) else [descending] * len(by)
    if not all(isinstance(way, bool) for way in ways) or len(ways) != len(by):
        raise BadArgument("descending is True, False, or a list of them, one for each column of order_by", at=at,
                          found=repr(descending))
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or not 0 < rows < 2**62):
        raise BadArgument("rows= is a number of rows, 1 or more: this row and those before it", at=at,
                          found=repr(rows))
    if rows is not None and within is not None:
        raise BadArgument("over takes rows= or within=, not both", at=at)
    length = None if within is None else span(within, "length of the frame", at, zero=True)
    if length is not None and (len(by) != 1 or ways[0]):
        raise BadArgument("within= needs a time to order by, from the least on", at=at,
                          hint=f"{_EXAMPLE[:-1]}, within={str(within)!r})")

    def made(agg: Agg) -> OverResult:
        if is_window_function(agg):
            if rows is not None or within is not None:
                raise BadArgument(f"{show_agg(agg)} takes no frame: rows= and within= are for aggregates", at=at)
            if agg.fn.endswith("rank") and not by:
                raise BadArgument(f"{agg.fn} needs an order", at=at, hint='over("key", order_by="price")')
        directed = tuple((expr, bool(way)) for expr, way in zip(by, ways, strict=True))
        result = OverResult("", agg=agg, keys=partition, by=directed, rows=rows, within=length, at=at)
        return replace(result, name=_text(result))

    node = column.node
    if isinstance(node, Agg):
        return Column(made(node), column._alias)
    found: list[OverResult] = []

    def replaced(part: Expr, args: tuple[Expr, ...]) -> Expr:
        if isinstance(part, AggregateResult):
            found.append(made(part.agg))
            return found[-1]
        return with_args(part, args)

    whole = rebuild(node, replaced)
    if not found:
        raise BadArgument("over needs an aggregate, or a function of rows in an order", at=at, found=repr(column),
                          hint=f'{_EXAMPLE}; the row before: col("x").lag(1).over("user", order_by="time")')
    return Column(whole, column._alias)


def _expr(given: object, what: str, at: SourceLoc) -> Expr:
    if not isinstance(given, Column | str):
        raise BadArgument(f"{what} takes columns and their names", at=at, found=repr(given))
    return as_column(given, what)._expr()


def _text(result: OverResult) -> str:
    """As the user wrote it."""
    given = [show_expr(key) for key in result.keys]
    if result.by:
        by = [f"{show_expr(expr)}{' descending' if way else ''}" for expr, way in result.by]
        given.append(f"order_by={by[0] if len(by) == 1 else '[' + ', '.join(by) + ']'}")
    if result.rows is not None:
        given.append(f"rows={result.rows}")
    if isinstance(result.within, Span):
        given.append(f"within={result.within}")
    return f"{show_agg(result.agg)}.over({', '.join(given)})"


def computed(op: Op, nodes: Iterable[Expr | Agg], scope: Scope) -> tuple[Op, Scope]:
    """The op with a column for everything that expressions compute over other rows, and the scope that knows them.

    Calls with the same partitions and order are computed together; one that stands in another comes before it.
    """
    event = op.event_time.column
    waiting = _in_order([node for node in nodes if not isinstance(node, Agg)])
    results: dict[Agg | OverResult, str] = dict(scope.results)
    numbers = count()
    while waiting:
        inner = replace(scope, schema=op.schema, results=results)
        ready = [each for each in waiting if all(below in results for below in _below(each))]
        first = ready[0]
        together = [each for each in ready if (each.keys, each.by) == (first.keys, first.by)]
        keys = tuple(_key(key, inner) for key in first.keys)
        by = tuple(By(_order(expr, inner), way) for expr, way in first.by)
        calls = tuple(OverCall(internal(f"over{next(numbers)}"), _agg(each, inner), _frame(each, by, inner))
                      for each in together)
        time = event if [(each.expr, each.descending) for each in by] == [(_column(op, event), False)] else ""
        if time and op.schema[time].nullable:  # as wherever event time matters
            there = Call("is_not_null", (by[0].expr,), dtype=BOOL, nullable=False)
            op = Filter(op, there, at=first.at)
        limit = None if time else op.event_time.limit_among(keys)
        op = Over(op, keys, by, calls, time=time if limit is None else limit.name, at=first.at)
        results |= {each: call.name for each, call in zip(together, calls, strict=True)}
        waiting = [each for each in waiting if each not in results]
    return op, replace(scope, schema=op.schema, results=results)


def _column(op: Op, name: str) -> Expr | None:
    field = op.schema.get(name)
    return None if field is None else Col(field.name, field.dtype, field.nullable)


def _in_order(nodes: list[Expr]) -> list[OverResult]:
    """All of them once, inner ones first."""
    found: dict[OverResult, None] = {}
    for node in nodes:
        for part in post_order(node):
            if isinstance(part, OverResult):
                found |= dict.fromkeys(_in_order(_parts(part)))
                found[part] = None
    return list(found)


def _parts(result: OverResult) -> list[Expr]:
    where = () if result.agg.where is None else (result.agg.where,)
    return [*result.agg.args, *where, *result.keys, *(expr for expr, _ in result.by)]


def _below(result: OverResult) -> list[OverResult]:
    return _in_order(_parts(result))


def _key(key: Expr, scope: Scope) -> Expr:
    found = resolve(key, scope)
    if type_of(found).is_nested:
        raise WrongType(f"over takes no nested keys, but {show_expr(key)} is {type_of(found)!r}", at=scope.at,
                        hint=nested_hint(type_of(found)))
    return found


def _order(expr: Expr, scope: Scope) -> Expr:
    found = resolve(expr, scope)
    if type_of(found).is_nested:
        raise WrongType(f"{type_of(found)!r} has no order", at=scope.at, step=scope.step, found=show_expr(expr),
                        hint=nested_hint(type_of(found)))
    return found


def _agg(result: OverResult, scope: Scope) -> Agg:
    args = tuple(resolve(arg, scope) for arg in result.agg.args)
    where = None if result.agg.where is None else resolve(result.agg.where, scope)
    with explained(result.agg, scope):
        return typed_call(result.agg, args, where)


def _frame(result: OverResult, by: tuple[By, ...], scope: Scope) -> Frame:
    if isinstance(result.within, Span):
        time, name = by[0].expr, show_expr(result.by[0][0])
        dtype = type_of(time)
        if not (dtype.kind is Kind.TS or dtype.is_int):
            raise WrongType(f"within= needs a timestamp or an integer to order by, but {name} is {dtype!r}",
                            at=scope.at, step=scope.step, has=shown(scope.schema))
        units = in_units(result.within, dtype, "length of the frame", name, scope.at)
        return Frame(within=units, with_peers=True)
    is_whole = not by and result.rows is None and not is_window_function(result.agg)
    return Frame(rows=result.rows, is_whole=is_whole)
