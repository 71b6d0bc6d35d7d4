"""OVER: a column for each call, computed over the rows of its partition by the op of `flow.with_columns(x.over(...))`.

Calls with the same partition and order are computed together. In SQL a frame with an order and without ROWS goes to
the last row that is equal in the order, and nulls come last.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from sqlglot import exp

from scalein.dtypes import BOOL, I64
from scalein.durations import Span, in_units
from scalein.errors import SourceLoc, WrongType
from scalein.ir.exprs import Agg, Call, Col, Expr, type_of
from scalein.ir.internal_names import internal
from scalein.ir.ops import By, Filter, Op, Over
from scalein.ir.over import WINDOW_FUNCTIONS, Frame, OverCall
from scalein.ir.unify import nested_hint
from scalein.sql import windows
from scalein.sql.calls import aggregate_named, aggregate_of, arguments, names_of
from scalein.sql.exprs import Exprs
from scalein.sql.scope import Relation, fresh

if TYPE_CHECKING:
    from scalein.sql.plan import Planner


@dataclass(frozen=True, slots=True)
class _Spec:
    """What stands after OVER."""

    keys: tuple[exp.Expr, ...]
    order: tuple[exp.Expr, ...]
    frame: exp.Expr | None


def planned(planner: Planner, node: exp.Select, e: Exprs, relation: Relation, nodes: list[exp.Expr]) -> Relation:
    """The relation with a column for each OVER in some expressions, which `e` knows then."""
    calls = [each for one in nodes for each in _calls(one)]
    waiting = [each for each in calls if id(each) not in e.known]
    if not waiting:
        return relation
    relation = windows.as_columns(relation, planner.source)
    e.relation = relation
    named = {each.this.name.lower(): each for each in node.args.get("windows") or []}
    together: dict[tuple[tuple[Expr, ...], tuple[By, ...]], list[tuple[exp.Expr, Agg, Frame]]] = {}
    inside = replace(e, step="OVER")
    for each in waiting:
        spec = _spec(planner, each, named)
        keys = tuple(_checked(planner, inside, key, "PARTITION BY") for key in spec.keys)
        by = tuple(one for given in spec.order for one in ordered_by(planner, inside, given))
        agg = _function(planner, inside, each)
        together.setdefault((keys, by), []).append((each, agg, _frame(planner, inside, each, spec, by, agg)))
    taken = set(relation.op.schema.names)
    op = relation.op
    for (keys, by), found in together.items():
        made: dict[tuple[Agg, Frame], str] = {}
        for each, agg, frame in found:
            name = made.setdefault((agg, frame), fresh(internal(f"over{len(taken)}"), taken))
            taken.add(name)
            e.known[id(each)] = Col(name, type_of(agg), agg.nullable)
        calls_of = tuple(OverCall(name, agg, frame) for (agg, frame), name in made.items())
        time = _time(op, keys, by)
        if time and op.schema[time].nullable:  # as wherever event time matters
            op = Filter(op, Call("is_not_null", (by[0].expr,), dtype=BOOL, nullable=False), at=planner.at)
        op = Over(op, keys, by, calls_of, nulls_last=True, time=time, at=planner.at)
    return relation.over(op)


def _time(op: Op, keys: tuple[Expr, ...], by: tuple[By, ...]) -> str:
    """The column whose watermark completes rows: a limit of windows, if it is a key, or event time that is in order.

    So a job need not wait for the end of its input.
    """
    limit, event = op.event_time.limit_among(keys), op.event_time.column
    field = op.schema.get(event) if event else None
    if limit is not None or field is None or len(by) != 1:
        return "" if limit is None else limit.name
    return event if by[0].expr == Col(field.name, field.dtype, field.nullable) and not by[0].descending else ""


def numbered(op: Op, keys: tuple[Expr, ...], by: tuple[By, ...], at: SourceLoc) -> tuple[Op, Col]:
    """The rows with their numbers from 1 on, among those with the same keys, and the column that has them."""
    number = Col(fresh(internal("number"), op.schema.names), I64, False)
    call = OverCall(number.name, WINDOW_FUNCTIONS["row_number"].typed(Agg("row_number", (), at=at), ()), Frame())
    return Over(op, keys, by, (call,), nulls_last=True, at=at), number


def _calls(node: exp.Expr) -> list[exp.Expr]:
    """The calls with OVER, but for those of subqueries."""
    found: list[exp.Expr] = []
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if isinstance(each, exp.Query):
            continue
        if isinstance(each, exp.Window):
            found.append(each)
            continue
        waiting += reversed(list(each.iter_expressions()))
    return found


def _spec(planner: Planner, node: exp.Expr, named: dict[str, exp.Expr]) -> _Spec:
    """PARTITION BY, ORDER BY and the frame; those of a named window, where OVER has none."""
    alias = node.args.get("alias")
    base = _Spec((), (), None)
    if alias is not None:
        window = named.get(alias.name.lower())
        if window is None:
            raise planner.error(f"there is no window {alias.name!r}", alias, "WINDOW w AS (PARTITION BY ...)",
                                has=", ".join(named))
        base = _spec(planner, window, {})
    order = node.args.get("order")
    return _Spec(tuple(node.args.get("partition_by") or base.keys),
                 tuple(order.expressions) if order is not None else base.order, node.args.get("spec") or base.frame)


def _checked(planner: Planner, e: Exprs, node: exp.Expr, step: str) -> Expr:
    found = replace(e, step=step).typed(node)
    if type_of(found).is_nested:
        raise planner.source.error(WrongType, f"{step} takes no {type_of(found)!r}", node,
                                   hint=nested_hint(type_of(found)))
    return found


def ordered_by(planner: Planner, e: Exprs, node: exp.Expr) -> list[By]:
    """One item of ORDER BY."""
    expr = _checked(planner, e, node.this, "ORDER BY")
    is_first = bool(node.args.get("nulls_first"))
    flag = By(Call("is_not_null", (expr,), dtype=BOOL, nullable=False))
    return [*([flag] if is_first and expr.nullable else []), By(expr, bool(node.args.get("desc")))]


def _function(planner: Planner, e: Exprs, node: exp.Expr) -> Agg:
    """The aggregate or window function that is called."""
    call = node.this
    names = names_of(planner.source, call) if isinstance(call, exp.Func) else []
    known = {name: function for function in WINDOW_FUNCTIONS.values() for name in function.sql}
    function = next((known[name] for name in names if name in known), None)
    if function is None:
        if not aggregate_named(planner.source, call):
            shown = names[0] if names else type(call).__name__.upper()
            raise planner.error(f"{shown} with OVER is not supported", node,
                                f"aggregates are, and {', '.join(known)}")
        return aggregate_of(e, call, grouped=True)
    given = arguments(call)
    if function.arity == 0:
        return function.typed(Agg(function.name, (), at=planner.at), ())
    steps = e.constant(given[1]) if len(given) > 1 else 1
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise planner.error(f"{names[0]} takes a constant number of rows, 0 or more", node)
    if len(given) > 2 and e.constant(given[2]) is not None:
        raise planner.error(f"the default of {names[0]} is not supported", given[2],
                            f"COALESCE({names[0]}(...) OVER (...), ...)")
    args = (e.typed(given[0]),)
    return function.typed(Agg(function.name, args, params=(steps,), at=planner.at), args)


def _frame(planner: Planner, e: Exprs, node: exp.Expr, spec: _Spec, by: tuple[By, ...], agg: Agg) -> Frame:
    """Which rows a value is of."""
    if agg.fn in WINDOW_FUNCTIONS:
        if agg.fn.endswith("rank") and not by:
            raise planner.error(f"{agg.fn.upper()} needs ORDER BY", node)
        return Frame()
    frame = spec.frame
    if frame is None:
        return Frame(with_peers=True) if by else Frame(is_whole=True)
    kind = str(frame.args.get("kind") or "").upper()
    start, end = frame.args.get("start"), frame.args.get("end")
    is_all = str(start).upper() == "UNBOUNDED"
    to_end = str(end).upper() == "UNBOUNDED"
    if is_all and to_end:
        return Frame(is_whole=True)
    if (end is not None and str(end).upper() != "CURRENT ROW") or str(frame.args.get("start_side") or "").upper() == (
            "FOLLOWING") or kind not in ("ROWS", "RANGE"):
        raise planner.error("a frame ends at the current row", node,
                            "ROWS BETWEEN 9 PRECEDING AND CURRENT ROW, or RANGE BETWEEN INTERVAL '1' HOUR PRECEDING "
                            "AND CURRENT ROW")
    if is_all:
        return Frame(with_peers=kind == "RANGE")
    if kind == "ROWS":
        rows = 0 if str(start).upper() == "CURRENT ROW" else e.constant(start) if isinstance(start, exp.Expr) else None
        if not isinstance(rows, int) or rows < 0:
            raise planner.error("ROWS takes a constant number of rows", node)
        return Frame(rows=rows + 1)
    length = e.constant(start) if isinstance(start, exp.Expr) else 0
    if len(by) != 1 or by[0].descending or not windows.is_time(type_of(by[0].expr)):
        raise planner.error("RANGE needs one time to order by, from the least on", node,
                            "ORDER BY ts RANGE BETWEEN INTERVAL '1' HOUR PRECEDING AND CURRENT ROW")
    dtype = type_of(by[0].expr)
    with windows.underlined(planner.source, node):
        if isinstance(length, timedelta):
            nanoseconds = ((length.days * 86_400 + length.seconds) * 1_000_000 + length.microseconds) * 1_000
            span = Span(nanoseconds, False, str(length))
        elif isinstance(length, int):
            span = Span(length, dtype.is_int or length != 0, str(length))
        else:
            raise planner.error("RANGE takes an interval", node)
        return Frame(within=in_units(span, dtype, "length of the frame", "the time", planner.at), with_peers=True)
