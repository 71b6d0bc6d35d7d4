"""GROUP BY: keys, windows and aggregates, and what expressions mean afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from sqlglot import exp

from scalein.errors import WrongType
from scalein.ir.exprs import Agg, Col, Expr, Named, NamedAgg, type_of
from scalein.ir.internal_names import internal
from scalein.ir.ops import Aggregate, Op, Project
from scalein.ir.rewrite import substitute
from scalein.ir.unify import nested_hint
from scalein.sql import windows
from scalein.sql.calls import aggregate_named, aggregate_of, arguments, names_of
from scalein.sql.exprs import Exprs
from scalein.sql.parse import unwrapped
from scalein.sql.scope import EventWindow, Relation, Visible, fresh

if TYPE_CHECKING:
    from scalein.sql.plan import Env, Output, Planner

_IN_GROUP_BY = ("TUMBLE", "HOP", "SESSION", "CUMULATE", "WINDOW", "SESSION_WINDOW")
_EDGES = {"START": 0, "END": 1, "ROWTIME": 2, "PROCTIME": 2}  # TUMBLE_START(...)


def has_aggregates(planner: Planner, node: exp.Select) -> bool:
    """Whether a SELECT aggregates all its rows to one."""
    return any(True for _ in aggregates_in(planner, _clauses(node)))


def _clauses(node: exp.Select) -> list[exp.Expr]:
    found = list(node.expressions)
    found += [node.args[name].this for name in ("having", "qualify") if node.args.get(name) is not None]
    return found + [each.this for each in (node.args["order"].expressions if node.args.get("order") else [])]


def aggregates_in(planner: Planner, nodes: list[exp.Expr]) -> Iterator[exp.Expr]:
    """The aggregates in expressions, with their FILTER; those of subqueries and of OVER itself are not among them."""
    waiting = list(reversed(nodes))
    while waiting:
        node = waiting.pop()
        if isinstance(node, exp.Query | exp.Exists):
            continue
        if isinstance(node, exp.In) and node.args.get("query") is not None:
            waiting.append(node.this)
            continue
        if isinstance(node, exp.Window):
            inner = node.this
            while isinstance(inner, exp.Filter | exp.IgnoreNulls | exp.RespectNulls):
                inner = inner.this
            waiting += list(inner.iter_expressions())
            waiting += [each for each in node.iter_expressions() if each is not node.this]
            continue
        if aggregate_named(planner.source, node):
            yield node
            continue
        waiting += reversed(list(node.iter_expressions()))


def aggregated(planner: Planner, node: exp.Select, relation: Relation, outputs: list[Output],
               aliases: dict[str, exp.Expr], env: Env) -> tuple[Relation, Exprs]:
    """The groups of a SELECT, and how to read expressions over them."""
    group = node.args.get("group")
    before = Exprs(planner.source, relation, "GROUP BY", aliases=aliases)
    given = _keys(planner, group, node, before) if group is not None else []
    relation, window, spelled = _window(planner, relation, given, before)
    before = replace(before, relation=relation)
    keys: list[tuple[Named, exp.Expr]] = []
    listed = [before.typed(each) for each in given if window is None]
    second = windows.again(relation, listed) if window is None else None
    periods: list[Expr] = []
    if second is not None:
        window = second
    elif window is None and (found_periods := windows.of_time(relation, listed)) is not None:
        window, periods = found_periods
    taken = {"window_start", "window_end"} if window is not None else set()
    exprs: list[Expr] = []
    of_window: list[Named] = []  # keys that are made of the start of the window
    for each in given:
        if window is not None and id(each) in spelled:
            continue
        expr = before.typed(each)
        if window is not None and expr in (window.start, window.end, window.last):
            continue
        if expr in exprs:
            continue
        if type_of(expr).is_nested:
            raise planner.source.error(WrongType, f"GROUP BY takes no {type_of(expr)!r}", each,
                                       hint=nested_hint(type_of(expr)))
        name = _name_of(each, expr, outputs, taken)
        taken.add(name)
        exprs.append(expr)
        if expr in periods:
            of_window.append(Named(name, expr))
            continue
        keys.append((Named(name, expr), each))
    if len(keys) > 64:
        raise planner.error("GROUP BY takes at most 64 keys", keys[64][1])
    if window is not None and window.kind == "SESSION" and not set(window.keys) <= set(exprs):
        raise planner.error("sessions are those of their keys: GROUP BY them, window_start and window_end", group)
    if window is not None and window.kind == "SESSION" and window.keys and set(window.keys) != set(exprs):
        extra = next(each for named, each in keys if named.expr not in window.keys)
        raise planner.error("sessions are those of their keys: other keys cannot be grouped by", extra,
                            "add it to PARTITION BY of SESSION")
    grouped = bool(keys) or window is not None
    found: dict[Agg, str] = {}
    nodes: dict[int, str] = {}
    own = {id(each.node): each.name for each in outputs if each.node is not None}
    inside = replace(before, step="SELECT")
    for each in aggregates_in(planner, [*_clauses(node)]):
        agg = aggregate_of(inside, each, grouped)
        if agg not in found:
            wanted = own.get(id(each))
            name = wanted if wanted is not None and wanted not in taken else internal(f"agg{len(found)}")
            found[agg] = fresh(name, taken)
            taken.add(found[agg])
        nodes[id(each)] = found[agg]
    if not grouped and not found:
        raise planner.error("GROUP BY () without an aggregate", group)
    op: Op = Aggregate(relation.op, tuple(named for named, _ in keys), None if window is None else window.window,
                       tuple(NamedAgg(name, agg) for agg, name in found.items()), at=planner.at)
    if window is not None and (second is not None or of_window):
        op = _completed(op, window, relation.window if second is not None else None, of_window, planner)
    keys += [(named, exp.null()) for named in of_window]
    fields = {f.name: f for f in op.schema}

    def column(name: str) -> Col:
        return Col(name, fields[name].dtype, fields[name].nullable)

    met: list[tuple[Expr, Expr]] = [(named.expr, column(named.name)) for named, _ in keys]
    after = Relation(op, tuple(Visible("", named.name, column(named.name)) for named, _ in keys),
                     is_single_row=not grouped)
    known: dict[int, Expr] = {number: column(name) for number, name in nodes.items()}
    if window is not None:
        sides: list[Expr] = [column("window_start"), column("window_end")]
        sides.append(windows.last_of(sides[1]))
        met += zip((window.start, window.end, window.last), sides, strict=True)
        for each, edge in _window_calls(planner, _clauses(node), window):
            known[id(each)] = sides[edge]
        held = window.window if second is None or relation.window is None else relation.window.window
        after = replace(after, window=replace(window, start=sides[0], end=sides[1], last=sides[2], is_pending=False,
                                              time=sides[0], window=held))
    return after, Exprs(planner.source, after, "SELECT", known=known, aliases=aliases, keys=met, before=inside)


def _completed(op: Op, window: EventWindow, before: EventWindow | None, keys: list[Named], planner: Planner) -> Op:
    """The groups of windows with what else they are grouped by: the ends of windows that were grouped `before`, and
    keys that are the same in a window, which are made of its start.
    """
    fields = {f.name: f for f in op.schema}
    start = Col("window_start", fields["window_start"].dtype, False)
    items = {f.name: Named(f.name, Col(f.name, f.dtype, f.nullable)) for f in op.schema}
    if before is not None and before.window is not None:
        items["window_end"] = Named("window_end", before.window.end_from(start))
    made = [Named(key.name, substitute(key.expr, {window.time.name: start})) for key in keys
            if isinstance(window.time, Col)]
    return Project(op, (*made, *items.values()), at=planner.at)


def _keys(planner: Planner, group: exp.Expr, node: exp.Select, before: Exprs) -> list[exp.Expr]:
    """What GROUP BY lists: expressions, positions, aliases, or ALL that is no aggregate."""
    for clause in ("cube", "rollup", "grouping_sets", "totals"):
        if group.args.get(clause):
            raise planner.error(f"{clause.upper().replace('_', ' ')} is not supported", group,
                                "UNION ALL of one GROUP BY for each set of keys")
    outputs = [each.this if isinstance(each, exp.Alias) else each for each in node.expressions]
    if group.args.get("all"):
        return [each for each in outputs if not any(True for _ in aggregates_in(planner, [each]))]
    found: list[exp.Expr] = []
    for each in group.expressions:
        value = unwrapped(each)
        if isinstance(value, exp.Rollup | exp.Cube | exp.GroupingSets):
            raise planner.error(f"{type(value).__name__.upper()} is not supported", group,
                                "UNION ALL of one GROUP BY for each set of keys")
        if isinstance(value, exp.Tuple):
            found += value.expressions
            continue
        if isinstance(value, exp.Literal) and not value.args.get("is_string"):
            number = int(str(value.this)) if str(value.this).isdigit() else 0
            if not 1 <= number <= len(outputs):
                raise planner.error(f"GROUP BY {value.this}: SELECT has {len(outputs)} columns", value)
            value = unwrapped(outputs[number - 1])
        elif isinstance(value, exp.Column) and not value.table and not before.relation.find(value.name):
            value = unwrapped(before.aliases.get(value.name.lower(), value))
        if any(True for _ in aggregates_in(planner, [value])):
            raise planner.error("an aggregate cannot stand in GROUP BY", value)
        found.append(value)
    return found


def _window(planner: Planner, relation: Relation, given: list[exp.Expr],
            before: Exprs) -> tuple[Relation, EventWindow | None, set[int]]:
    """The window that rows are grouped by: that of FROM, or one spelled out in GROUP BY."""
    spelled = [each for each in given if isinstance(each, exp.Func)
               and any(name in _IN_GROUP_BY for name in names_of(planner.source, each))]
    if spelled:
        if len(spelled) > 1:
            raise planner.error("GROUP BY takes one window", spelled[1])
        relation = windows.as_columns(relation, planner.source)
        node = spelled[0]
        name = next(name for name in names_of(planner.source, node) if name in _IN_GROUP_BY)
        e = replace(before, relation=relation)
        window = windows.group_window(e, node, name, arguments(node))
        return relation, window, {id(node)}
    pending = relation.window
    if pending is None or not pending.is_pending:
        return relation, None, set()
    sides = (pending.start, pending.end, pending.last)
    met = {sides.index(found.expr) for each in given if isinstance(each, exp.Column)
           for found in relation.find(each.name, each.table) if found.expr in sides}
    if not met or (0 not in met and 1 not in met and 2 not in met):
        return windows.as_columns(relation, planner.source), None, set()
    needs_both = pending.kind in ("CUMULATE", "SESSION")
    if needs_both and not {0, 1} <= met:
        raise planner.error(f"group the windows of {pending.kind} by window_start and window_end", given[0])
    return relation, pending, set()


def _window_calls(planner: Planner, nodes: list[exp.Expr], window: EventWindow) -> Iterator[tuple[exp.Expr, int]]:
    """TUMBLE_START(...) and its like, and `window.start` of Spark's windows."""
    for node in nodes:
        for each in node.walk():
            if isinstance(each, exp.Column) and each.table.lower() == "window":
                if each.name.upper() in ("START", "END"):
                    yield each, _EDGES[each.name.upper()]
            elif isinstance(each, exp.Func):
                name = next(iter(names_of(planner.source, each)), "")
                kind, _, edge = name.rpartition("_")
                if kind in _IN_GROUP_BY and edge in _EDGES:
                    yield each, _EDGES[edge]


def _name_of(node: exp.Expr, expr: Expr, outputs: list[Output], taken: set[str]) -> str:
    """The name of a key: that of its column, or of the output that it is."""
    if isinstance(expr, Col) and expr.name not in taken:
        return expr.name
    wanted = next((each.name for each in outputs if each.node is node or (each.node is not None and each.node == node)),
                  None)
    return wanted if wanted is not None and wanted not in taken else fresh(internal(f"key{len(taken)}"), taken)

