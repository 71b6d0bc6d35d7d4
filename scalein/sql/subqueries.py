"""Subqueries in expressions, as joins: EXISTS and IN are semi and anti joins, scalar ones bring a column.

A subquery may read columns of the query around it in conditions of its WHERE (`links`). Equalities among them are keys
of the join; for others, the rows of the left side that have a match are found by an inner join, and looked up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from sqlglot import exp

from scalein.dtypes import BOOL, F64, I64, Kind
from scalein.ir.aggregates import AGGREGATES, typed
from scalein.ir.exprs import Agg, Call, Col, Expr, Lit, Named, NamedAgg, columns, type_of
from scalein.ir.functions.registry import REGISTRY
from scalein.ir.internal_names import internal
from scalein.ir.ops import Aggregate, Distinct, Project
from scalein.sql import windows
from scalein.sql.calls import aggregate_of
from scalein.sql.exprs import Exprs
from scalein.sql.from_clause import FromClause
from scalein.sql.groups import aggregates_in, has_aggregates
from scalein.sql.joins import Pair, equi_join, filtered, null_safe_semi
from scalein.sql.over import numbered, ordered_by
from scalein.sql.parse import unwrapped
from scalein.sql.scope import Relation, apart, fresh

if TYPE_CHECKING:
    from scalein.errors import SourceLoc
    from scalein.sql.plan import Env, Planner

_CLAUSES = {"group": "GROUP BY", "having": "HAVING", "qualify": "QUALIFY"}


def _subqueries(node: exp.Expr) -> Iterator[exp.Expr]:
    """The outermost subqueries in an expression: EXISTS, IN with a query, and scalar ones."""
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if isinstance(each, exp.Exists) or (isinstance(each, exp.In) and each.args.get("query") is not None) or (
                isinstance(each, exp.Subquery | exp.Select | exp.SetOperation)):
            yield each
            if isinstance(each, exp.In):
                waiting.append(each.this)
            continue
        if isinstance(each, exp.EQ | exp.NEQ) and isinstance(each.args["expression"], exp.Any | exp.All):
            yield each
            continue
        waiting += each.iter_expressions()


def has_subquery(node: exp.Expr) -> bool:
    """Whether there is a subquery in an expression."""
    return any(True for _ in _subqueries(node))


def filtered_by(planner: Planner, e: Exprs, relation: Relation, node: exp.Expr, env: Env) -> Relation:
    """The rows for which a condition is true; EXISTS and IN by themselves are joins."""
    node = unwrapped(node)
    is_negated = False
    inner = node
    while isinstance(inner, exp.Not):
        inner, is_negated = unwrapped(inner.this), not is_negated
    e = replace(e, relation=relation)
    if isinstance(inner, exp.Exists):
        return _Subqueries(planner, e, relation, env).exists(inner, is_negated)
    if isinstance(inner, exp.In) and inner.args.get("query") is not None and not has_subquery(inner.this):
        return _Subqueries(planner, e, relation, env).contained(inner, is_negated)
    relation = joined(planner, e, relation, [node], env)
    e.relation = relation
    return filtered(relation, e.condition(node), planner.at)


def joined(planner: Planner, e: Exprs, relation: Relation, nodes: list[exp.Expr], env: Env) -> Relation:
    """The relation with a column for each subquery in some expressions, which `e` knows then."""
    for node in nodes:
        for each in _subqueries(node):
            if id(each) in e.known:
                continue
            found, value = _Subqueries(planner, replace(e, relation=relation), relation, env).column(each)
            relation = found
            e.known[id(each)] = value
    return relation


def semi_by_rows(left: Relation, matched: Relation, names: list[str], how: str, at: SourceLoc) -> Relation:
    """The rows of the left side of which a join has (or has not) a row, by the columns that decide."""
    if not names:
        return equi_join(left, Relation(Project(matched.op, (Named(internal("one"), Lit(1, I64)),), at=at), ()), [],
                         how, at)
    keys = tuple(Named(name, Col(name, left.op.schema[name].dtype, left.op.schema[name].nullable)) for name in names)
    found = Distinct(Project(matched.op, keys, at=at), tuple(names), at=at)
    return null_safe_semi(left, found, names, how, at)


_COMPARISONS: dict[type[exp.Expr], str] = {exp.NEQ: "ne", exp.LT: "lt", exp.LTE: "le", exp.GT: "gt", exp.GTE: "ge"}
_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


class _Subqueries:
    """Joins subqueries to one relation."""

    def __init__(self, planner: Planner, e: Exprs, relation: Relation, env: Env) -> None:
        self.planner = planner
        self.source = planner.source
        self.at = planner.at
        self.e = e
        self.relation = relation
        self.env = env

    # --- as conditions

    def exists(self, node: exp.Expr, is_negated: bool) -> Relation:
        """WHERE [NOT] EXISTS (...)."""
        how = "anti" if is_negated else "semi"
        select = _query_of(node.this)
        inner, links = self._rows(select)
        if not links:
            return equi_join(self.relation, self._apart(self.planner.query(node.this, self.env)), [], how, self.at)
        self._refuse_groups(select)
        return self._semi(self._limited(select, inner, links, is_exists=True), links, [], how)

    def contained(self, node: exp.Expr, is_negated: bool) -> Relation:
        """WHERE x [NOT] IN (...). NOT IN is never true where the subquery has a null, unless it is empty."""
        select = _query_of(node.args["query"])
        inner, links = self._rows(select)
        if links:
            self._refuse_groups(select)
            self._refuse_distinct(select)
            inner = self._limited(select, inner, links)
            values = self._outputs(select, inner)
        else:
            inner = self.planner.query(node.args["query"], self.env)
            values = [each.expr for each in inner.columns if not each.is_merged]
        given = self._given(node, values)
        left = self.relation
        names = [f"{internal('in')}{k}" for k in range(len(values))]
        names = [fresh(name, [*left.op.schema.names, *inner.op.schema.names]) for name in names]
        inner = self._apart(self._with_columns(inner, dict(zip(names, values, strict=True))))
        held = [Col(name, inner.op.schema[name].dtype, inner.op.schema[name].nullable) for name in names]
        pairs = [self._pair(node, a, b) for a, b in zip(given, held, strict=True)]
        if not is_negated:
            return self._semi(inner, links, pairs, "semi")
        if not any(a.nullable or b.nullable for a, b in pairs):
            return self._semi(inner, links, pairs, "anti")
        if len(pairs) > 1:
            raise self.planner.error("NOT IN with several columns that may be null is not supported", node,
                                     "write NOT EXISTS (SELECT ... WHERE a = b AND ...)")
        relation, count, valid = self._counts(inner, links, held[0])
        self.relation = relation
        found = self._semi(inner, links, pairs, "anti")
        is_empty = self._call("eq", count, Lit(0, I64))
        is_known = self._call("and", Call("is_not_null", (given[0],), dtype=BOOL, nullable=False),
                              self._call("eq", count, valid))
        return filtered(found, self._call("or", is_empty, is_known), self.at)

    # --- as columns

    def column(self, node: exp.Expr) -> tuple[Relation, Expr]:
        """The relation with what a subquery gives for each row, and that."""
        if isinstance(node, exp.Exists):
            return self._exists_column(node)
        if isinstance(node, exp.In):
            return self._in_column(node)
        if isinstance(node, exp.EQ | exp.NEQ):
            raise self.planner.error("ANY and ALL are not supported", node, "write IN (SELECT ...)")
        return self._scalar(node)

    def _exists_column(self, node: exp.Expr) -> tuple[Relation, Expr]:
        select = _query_of(node.this)
        inner, links = self._rows(select)
        if not links:
            inner = self.planner.query(node.this, self.env)
        else:
            self._refuse_groups(select)
            inner = self._limited(select, inner, links, is_exists=True)
        relation, count, _ = self._counts(self._apart(inner), links, None)
        return relation, self._call("gt", count, Lit(0, I64))

    def _in_column(self, node: exp.Expr) -> tuple[Relation, Expr]:
        """True, false, or null where a null could be the match."""
        select = _query_of(node.args["query"])
        inner, links = self._rows(select)
        if links:
            raise self.planner.error("IN with a subquery that reads this query cannot stand here", node,
                                     "it can as a condition of WHERE by itself, joined with AND to others")
        inner = self.planner.query(node.args["query"], self.env)
        values = [each.expr for each in inner.columns if not each.is_merged]
        given = self._given(node, values)
        if len(values) > 1:
            raise self.planner.error("IN with several columns cannot stand here", node)
        inner = self._apart(inner)
        value = next(each.expr for each in inner.columns if not each.is_merged)
        relation, count, valid = self._counts(inner, [], value)
        a, b = self._pair(node, given[0], value)
        key, mark = self._fresh("in", inner), self._fresh("found", inner)
        rows = Project(inner.op, (Named(key, b),), at=self.at)
        marked = Project(Distinct(rows, (key,), at=self.at),
                         (Named(key, Col(key, type_of(b), b.nullable)), Named(mark, Lit(True, BOOL))), at=self.at)
        found = equi_join(relation, Relation(marked, ()), [(a, Col(key, type_of(b), b.nullable))], "left", self.at)
        is_found = Call("is_not_null", (Col(mark, BOOL, True),), dtype=BOOL, nullable=False)
        unknown = self._call("or", Call("is_null", (a,), dtype=BOOL, nullable=False), self._call("ne", count, valid))
        none = self._call("eq", count, Lit(0, I64))
        args = (none, Lit(False, BOOL), is_found, Lit(True, BOOL), unknown, Lit(None, BOOL), Lit(False, BOOL))
        return replace(found, columns=relation.columns), self._call("if_else", *args)

    def _scalar(self, node: exp.Expr) -> tuple[Relation, Expr]:
        """One value for each row: of an aggregation, or of the one row that there is."""
        select = _query_of(node)
        inner, links = self._rows(select)
        if links:
            assert isinstance(select, exp.Select)
            return self._correlated(node, select, inner, links)
        found = self.planner.query(node, self.env)
        values = [each.expr for each in found.columns if not each.is_merged]
        if len(values) != 1:
            raise self.planner.error(f"a scalar subquery has one column, not {len(values)}", node)
        found = self._apart(found)
        value = next(each.expr for each in found.columns if not each.is_merged)
        if not found.is_single_row:
            found, value = self._one_row(found, value, ())
        joined = equi_join(self.relation, found, [], "cross", self.at)
        field = joined.op.schema[value.name] if isinstance(value, Col) else None
        assert field is not None
        return replace(joined, columns=self.relation.columns, is_single_row=self.relation.is_single_row), Col(
            field.name, field.dtype, field.nullable)

    def _one_row(self, found: Relation, value: Expr, keys: tuple[Named, ...]) -> tuple[Relation, Expr]:
        """The value of the only row; an error at run time if there are several."""
        name, count = self._fresh("value", found), self._fresh("rows of the scalar subquery", found)
        grouped = bool(keys)
        aggs = (NamedAgg(name, typed(Agg("first", (value,), at=self.at), (value,), None, grouped)),
                NamedAgg(count, typed(Agg("count", (), at=self.at), (), None, grouped)))
        op = Aggregate(found.op, keys, None, aggs, at=self.at)
        number = Col(count, I64, False)
        # The quotient is 1 for one row and fails by a zero divisor for more.
        checked = self._call("floordiv", Lit(1, I64), self._call("sub", Lit(2, I64), self._call(
            "row_min", self._call("row_max", number, Lit(1, I64)), Lit(2, I64))))
        held = Col(name, type_of(value), True)
        is_one = self._call("eq", checked, Lit(1, I64))
        result = self._call("if_else", is_one, held, Lit(None, type_of(value)))
        out = self._fresh("scalar", found)
        items = (*(Named(key.name, _column(key)) for key in keys),
                 Named(out, result))
        return Relation(Project(op, items, at=self.at), (), is_single_row=not grouped), Col(out, type_of(value), True)

    def _correlated(self, node: exp.Expr, select: exp.Select, inner: Relation,
                    links: list[exp.Expr]) -> tuple[Relation, Expr]:
        """An aggregation for each value of the columns that link it to this query, joined by them."""
        for clause in ("group", "having", "qualify"):
            if select.args.get(clause) is not None:
                raise self.planner.error(f"{_CLAUSES[clause]} in a subquery that reads this query is not supported",
                                         select.args[clause])
        if len(select.expressions) != 1:
            raise self.planner.error(f"a scalar subquery has one column, not {len(select.expressions)}", node)
        inner = windows.as_columns(inner, self.source)
        is_aggregated = has_aggregates(self.planner, select)
        if is_aggregated:
            self._refuse_limit(select)
        else:
            self._refuse_distinct(select)
            inner = self._limited(select, inner, links)
        pairs, rest = self._links(inner, links)
        if rest:
            raise self.planner.error("a scalar subquery is linked to the query around it by equalities", rest[0])
        keys = tuple(Named(self._fresh(f"link{k}", inner), b) for k, (_, b) in enumerate(pairs))
        joins: list[Pair] = [(a, _column(key)) for (a, _), key in zip(pairs, keys, strict=True)]
        e = Exprs(self.source, inner, "SELECT")
        output = unwrapped(select.expressions[0].this if isinstance(select.expressions[0], exp.Alias)
                           else select.expressions[0])
        if not is_aggregated:
            value = e.typed(output)
            if select.args.get("distinct") is not None:
                inner, keys, value = self._distinct(inner, keys, value)
            found, value = self._one_row(inner, value, keys)
            result = equi_join(self.relation, self._without_clash(found), joins, "left", self.at)
            return replace(result, columns=self.relation.columns), value
        aggs: dict[Agg, str] = {}
        known: dict[int, Expr] = {}
        for each in aggregates_in(self.planner, [output]):
            agg = aggregate_of(e, each, grouped=True)
            name = aggs.setdefault(agg, self._fresh(f"scalar{len(aggs)}", inner))
            held: Expr = Col(name, type_of(agg), True)
            if AGGREGATES[agg.fn].never_null and type_of(agg).is_int:
                held = self._call("fill_null", held, Lit(0, I64))
            known[id(each)] = held
        op = Aggregate(inner.op, keys, None, tuple(NamedAgg(name, agg) for agg, name in aggs.items()), at=self.at)
        result = equi_join(self.relation, Relation(op, ()), joins, "left", self.at)
        value = Exprs(self.source, Relation(op, ()), "SELECT", known=known).typed(output)
        return replace(result, columns=self.relation.columns), value

    # --- parts

    def _rows(self, select: exp.Expr) -> tuple[Relation, list[exp.Expr]]:
        """FROM and WHERE of a subquery, and the conditions that link it to this query."""
        if not isinstance(select, exp.Select):
            return self.relation, []
        env = self.planner._with(select, self.env)
        rows = FromClause(self.planner, env, self._around()).rows(select)
        return rows.relation, rows.links

    def _around(self) -> Relation:
        """The columns that a subquery may read: after GROUP BY, the keys under their old names too."""
        return self.relation

    def _refuse_groups(self, select: exp.Expr) -> None:
        for clause in ("group", "having", "qualify"):
            if select.args.get(clause) is not None:
                raise self.planner.error(f"{_CLAUSES[clause]} in a subquery that reads this query is not supported",
                                         select.args[clause])
        if isinstance(select, exp.Select) and has_aggregates(self.planner, select):
            raise self.planner.error("an aggregate in a subquery that reads this query is not supported here", select)

    def _limits(self, select: exp.Expr) -> tuple[int | None, int]:
        """LIMIT and OFFSET."""
        limit, offset = select.args.get("limit"), select.args.get("offset")
        count = None if limit is None else self.planner.count(limit, "LIMIT", self.e)
        return count, 0 if offset is None else self.planner.count(offset, "OFFSET", self.e) or 0

    def _limited(self, select: exp.Expr, inner: Relation, links: list[exp.Expr], is_exists: bool = False) -> Relation:
        """The rows of a linked subquery that ORDER BY, LIMIT and OFFSET leave, of those that have the same links."""
        count, first = self._limits(select)
        if (count is None and not first) or (is_exists and count != 0 and not first):
            return inner
        inner = windows.as_columns(inner, self.source)
        if count == 0:
            return filtered(inner, Lit(False, BOOL), self.at)
        pairs, rest = self._links(inner, links)
        if rest:
            raise self.planner.error("LIMIT in a subquery that is linked to the query around it by more than "
                                     "equalities is not supported", rest[0])
        aliases = {each.alias.lower(): each.this for each in select.expressions if isinstance(each, exp.Alias)}
        e = Exprs(self.source, inner, "ORDER BY", aliases=aliases, prefers_aliases=True)
        order = select.args.get("order")
        by = tuple(one for each in (order.expressions if order is not None else [])
                   for one in ordered_by(self.planner, e, self._ordered(select, each)))
        op, place = numbered(inner.op, tuple(b for _, b in pairs), by, self.at)
        found = inner.over(op)
        if first:
            found = filtered(found, self._call("gt", place, Lit(first, I64)), self.at)
        return found if count is None else filtered(found, self._call("le", place, Lit(first + count, I64)), self.at)

    def _ordered(self, select: exp.Expr, node: exp.Expr) -> exp.Expr:
        """An item of ORDER BY, where a number means an output."""
        value = unwrapped(node.this)
        if not isinstance(value, exp.Literal) or value.args.get("is_string"):
            return node
        number = int(str(value.this)) if str(value.this).isdigit() else 0
        if not 1 <= number <= len(select.expressions):
            raise self.planner.error(f"ORDER BY {value.this}: SELECT has {len(select.expressions)} columns", value)
        output = select.expressions[number - 1]
        found = node.copy()
        found.set("this", (output.this if isinstance(output, exp.Alias) else output).copy())
        return found

    def _refuse_limit(self, select: exp.Expr) -> None:
        """An aggregation has one row, which LIMIT may only leave."""
        count, first = self._limits(select)
        if first or count == 0:
            raise self.planner.error("LIMIT 0 and OFFSET leave no row of an aggregate", select.args.get("offset")
                                     or select.args["limit"])

    def _refuse_distinct(self, select: exp.Expr) -> None:
        """Of DISTINCT that a join by links cannot follow."""
        distinct = select.args.get("distinct")
        if distinct is not None and (distinct.args.get("on") is not None or self._limits(select) != (None, 0)):
            raise self.planner.error("DISTINCT ON, and DISTINCT with LIMIT, in a subquery that reads this query "
                                     "are not supported", select.args.get("limit") or distinct)

    def _distinct(self, inner: Relation, keys: tuple[Named, ...],
                  value: Expr) -> tuple[Relation, tuple[Named, ...], Expr]:
        """The distinct values of each link."""
        name = self._fresh("distinct", inner)
        op = Project(inner.op, (*keys, Named(name, value)), at=self.at)
        found = Distinct(op, tuple(op.schema.names), at=self.at)
        return Relation(found, ()), tuple(Named(key.name, _column(key)) for key in keys), Col(
            name, type_of(value), value.nullable)

    def _outputs(self, select: exp.Expr, inner: Relation) -> list[Expr]:
        e = Exprs(self.source, inner, "SELECT")
        return [e.typed(each.this if isinstance(each, exp.Alias) else each) for each in select.expressions]

    def _given(self, node: exp.Expr, values: list[Expr]) -> list[Expr]:
        left = unwrapped(node.this)
        given = left.expressions if isinstance(left, exp.Tuple) else [left]
        if len(given) != len(values):
            raise self.planner.error(f"IN compares {len(given)} columns with {len(values)}", node)
        return [self.e.typed(each) for each in given]

    def _with_columns(self, relation: Relation, new: dict[str, Expr]) -> Relation:
        own = [Named(f.name, Col(f.name, f.dtype, f.nullable)) for f in relation.op.schema]
        items = (*own, *(Named(name, expr) for name, expr in new.items()))
        return relation.over(Project(relation.op, items, at=self.at))

    def _apart(self, inner: Relation) -> Relation:
        return apart(self.relation.op.schema, windows.as_columns(inner, self.source), self.at)

    def _without_clash(self, inner: Relation) -> Relation:
        return inner

    def _fresh(self, name: str, inner: Relation) -> str:
        number = 0
        taken = {*self.relation.op.schema.names, *inner.op.schema.names}
        while internal(f"{name}.{number}") in taken:
            number += 1
        return internal(f"{name}.{number}")

    def _pair(self, node: exp.Expr, a: Expr, b: Expr) -> Pair:
        from scalein.sql.joins import typed_pair

        a, b = (self.e.with_type(node, each) for each in self.e.meeting(node, a, b))
        if type_of(a).is_float != type_of(b).is_float and type_of(a).is_number and type_of(b).is_number:
            a, b = (self.e.call(node, "cast", each, dtype=F64) for each in (a, b))
        with windows.underlined(self.source, node):
            return typed_pair(a, b, self.at)

    def _call(self, fn: str, *args: Expr) -> Expr:
        return REGISTRY[fn].rule(Call(fn, args, at=self.at), args)

    def _links(self, inner: Relation, links: list[exp.Expr]) -> tuple[list[Pair], list[exp.Expr]]:
        """The equalities among conditions that link a subquery, this query's side first; and the others."""
        pairs: list[Pair] = []
        rest: list[exp.Expr] = []
        for each in links:
            node = unwrapped(each)
            sides = [node.this, node.args["expression"]] if isinstance(node, exp.EQ) else []
            inside = [self._is_inside(side, inner) for side in sides]
            if inside == [True, False]:
                sides.reverse()
                inside.reverse()
            if inside == [False, True] and not self._is_mixed(sides[0], inner):
                pairs.append(self._pair(node, self.e.typed(sides[0]),
                                        Exprs(self.source, inner, "WHERE").typed(sides[1])))
            else:
                rest.append(each)
        return pairs, rest

    def _is_inside(self, node: exp.Expr, inner: Relation) -> bool:
        """Whether all columns are those of the subquery."""
        return all(inner.find(each.name, each.table) for each in node.find_all(exp.Column))

    def _is_mixed(self, node: exp.Expr, inner: Relation) -> bool:
        return any(inner.find(each.name, each.table) for each in node.find_all(exp.Column))

    def _semi(self, inner: Relation, links: list[exp.Expr], pairs: list[Pair], how: str) -> Relation:
        """The rows with (or without) a match among those of a subquery."""
        inner = self._apart(inner)
        more, rest = self._links(inner, links)
        pairs = [*pairs, *more]
        if not rest:
            return self._presence(equi_join(self.relation, inner, pairs, how, self.at))
        compared = self._comparison(inner, rest[0]) if len(rest) == 1 else None
        if compared is not None:
            return self._by_extremes(inner, pairs, *compared, how)
        left = self.relation
        matched = equi_join(left, inner, pairs, "inner" if pairs else "cross", self.at)
        count = len(left.columns)
        mine, theirs = matched.columns[:count], matched.columns[count:]
        names = {each.name.lower() for each in theirs}
        tables = {each.table.lower() for each in theirs}
        # Names mean columns of the subquery first.
        around = tuple(replace(each, is_merged=each.is_merged or each.name.lower() in names)
                       for each in mine if each.table.lower() not in tables or each.name.lower() not in names)
        scope = replace(matched, columns=(*theirs, *around))
        used: set[str] = set()
        for a, _ in pairs:
            used |= columns(a)
        for each in rest:
            condition = Exprs(self.source, scope, "WHERE").condition(each)
            used |= columns(condition)
            matched = filtered(matched, condition, self.at)
        return semi_by_rows(left, matched, sorted(used & set(left.op.schema.names)), how, self.at)

    def _presence(self, found: Relation) -> Relation:
        """A semi or anti join, at its cheapest place."""
        from scalein.sql.cardinality import Cardinalities
        from scalein.sql.semi_joins import placed

        known = self.planner.cardinalities = self.planner.cardinalities or Cardinalities()
        return found.over(placed(found.op, known))

    def _comparison(self, inner: Relation, node: exp.Expr) -> tuple[str, Pair] | None:
        """A link that compares a value of the subquery with one of this query: how, and this query's value first."""
        node = unwrapped(node)
        fn = _COMPARISONS.get(type(node))
        if fn is None:
            return None
        mine, other = node.this, node.args["expression"]
        if self._is_inside(mine, inner):
            mine, other, fn = other, mine, _MIRRORED.get(fn, fn)
        if self._is_mixed(mine, inner) or not self._is_inside(other, inner):
            return None
        pair = self._pair(node, self.e.typed(mine), Exprs(self.source, inner, "WHERE").typed(other))
        dtype = type_of(pair[0])
        return (fn, pair) if dtype.is_number or dtype.kind in (Kind.DATE, Kind.TS) else None

    def _by_extremes(self, inner: Relation, pairs: list[Pair], fn: str, compared: Pair, how: str) -> Relation:
        """Rows with (or without) a match by keys and one comparison: `x < some y` is `x < max(y)`, and so on.

        x differs from some y if it differs from the least or from the greatest.
        """
        value, other = compared
        keys = tuple(Named(self._fresh(f"link{k}", inner), b) for k, (_, b) in enumerate(pairs))
        wanted = {"ne": ("min", "max"), "lt": ("max",), "le": ("max",), "gt": ("min",), "ge": ("min",)}[fn]
        names = [self._fresh(each, inner) for each in wanted]
        aggs = tuple(NamedAgg(name, typed(Agg(each, (other,), at=self.at), (other,), None, bool(keys)))
                     for name, each in zip(names, wanted, strict=True))
        op = Aggregate(inner.op, keys, None, aggs, at=self.at)
        joins: list[Pair] = [(a, _column(key)) for (a, _), key in zip(pairs, keys, strict=True)]
        kind = "cross" if not keys else "inner" if how == "semi" else "left"
        found = equi_join(self.relation, Relation(op, ()), joins, kind, self.at)
        fields = found.op.schema
        tests = [self._call(fn, value, Col(name, fields[name].dtype, fields[name].nullable)) for name in names]
        condition = tests[0] if len(tests) == 1 else self._call("or", *tests)
        if how == "anti":
            condition = self._call("not", self._call("fill_null", condition, Lit(False, BOOL)))
        return filtered(replace(found, columns=self.relation.columns, is_single_row=self.relation.is_single_row),
                        condition, self.at)

    def _counts(self, inner: Relation, links: list[exp.Expr],
                value: Expr | None) -> tuple[Relation, Expr, Expr]:
        """The relation with the number of rows that a subquery has, and of those with a value."""
        pairs, rest = self._links(inner, links)
        if rest:
            raise self.planner.error("a subquery is linked to the query around it by equalities here", rest[0])
        keys = tuple(Named(self._fresh(f"link{k}", inner), b) for k, (_, b) in enumerate(pairs))
        joins: list[Pair] = [(a, _column(key)) for (a, _), key in zip(pairs, keys, strict=True)]
        count, valid = self._fresh("rows", inner), self._fresh("values", inner)
        aggs = [NamedAgg(count, typed(Agg("count", (), at=self.at), (), None, bool(keys)))]
        if value is not None:
            aggs.append(NamedAgg(valid, typed(Agg("count_valid", (value,), at=self.at), (value,), None, bool(keys))))
        op = Aggregate(inner.op, keys, None, tuple(aggs), at=self.at)
        found = equi_join(self.relation, Relation(op, ()), joins, "left" if keys else "cross", self.at)
        held = [self._call("fill_null", Col(name, I64, True), Lit(0, I64)) if keys else Col(name, I64, False)
                for name in (count, valid)]
        return replace(found, columns=self.relation.columns), held[0], held[1]


def _column(item: Named) -> Col:
    return Col(item.name, type_of(item.expr), item.expr.nullable)


def _query_of(node: exp.Expr) -> exp.Expr:
    """The query inside of parentheses."""
    while isinstance(node, exp.Subquery | exp.Paren):
        node = node.this
    return node
