"""FROM and WHERE: which tables are joined, in which order, and by what.

Inner, cross and comma joins are one set of relations and one set of conditions (ON and WHERE together). A condition on
one relation filters it; an equality of two joins them by keys; what is left filters as soon as its columns are there.
An outer join is between what came before it and its right side.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sqlglot import exp

from scalein.dtypes import Kind
from scalein.errors import ScaleinError, SourceLoc
from scalein.ir.exprs import Call, Col, Expr, Named, columns, type_of
from scalein.ir.functions.registry import REGISTRY, can_fail
from scalein.ir.ops import Op, Project, Reordered
from scalein.sql import join_order, stream_joins, windows
from scalein.sql.exprs import Exprs
from scalein.sql.joins import Pair, equi_join, filtered, left_join_where, typed_pair
from scalein.sql.parse import (
    conjuncts,
    in_branches,
    in_every_branch,
    is_comparison,
    joined_by,
    span_of,
    unwrapped,
)
from scalein.sql.scope import Relation, Visible, apart, fresh, unknown

if TYPE_CHECKING:
    from scalein.sql.plan import Env, Planner


_WORTHWHILE = 0.7  # of the rows may be left by a condition that is tested a second time


@dataclass
class Rows:
    """The rows of FROM and WHERE. `links` are the conditions on columns of the query around it, which are left."""

    relation: Relation
    links: list[exp.Expr] = field(default_factory=list)


@dataclass(frozen=True)
class _Order:
    """An order of joins. `derived` are equalities that follow from others; `classes` are by the id of each's node."""

    tree: join_order.Tree
    estimate: str
    derived: list[exp.Expr]
    classes: Mapping[int, int]


@dataclass(frozen=True)
class _Equality:
    """Keys of two relations that are equal, and the condition that says so."""

    relations: tuple[int, int]
    pair: Pair
    node: exp.Expr

    def sides(self) -> list[tuple[int, Expr]]:
        return list(zip(self.relations, self.pair, strict=True))


class FromClause:
    """Plans FROM and WHERE of one SELECT."""

    def __init__(self, planner: Planner, env: Env, outer: Relation | None = None) -> None:
        self.planner = planner
        self.source = planner.source
        self.at = planner.at
        self.env = env
        self.outer = outer
        self.aliases: dict[str, exp.Expr] = {}  # outputs of SELECT, which WHERE may name where no column is called so
        self.tables: set[str] = set()  # those of this FROM, in lower case: their names mean no structs

    def rows(self, node: exp.Select) -> Rows:
        """The rows that SELECT is over."""
        from scalein.sql.plan import _nothing
        from scalein.sql.subqueries import filtered_by, has_subquery

        clause = node.args.get("from_") or node.args.get("from")
        where = node.args.get("where")
        conditions = list(conjuncts(where.this)) if where is not None else []
        plain = [each for each in conditions if not has_subquery(each)]
        plain += [common for each in plain for common in in_every_branch(each)]
        self.aliases = {each.alias.lower(): each.this for each in node.expressions if isinstance(each, exp.Alias)}
        if clause is None:
            relation = Relation(_nothing(self.planner), (), tables=())
            for each in plain:
                relation = filtered(relation, Exprs(self.source, relation, "WHERE").condition(each), self.at)
            links: list[exp.Expr] = []
        else:
            relation, links = self._joined(self.planner.table(clause.this, self.env),
                                           [*(clause.this.args.get("joins") or []), *(node.args.get("joins") or [])],
                                           plain)
        for each in conditions:
            if has_subquery(each):
                relation = windows.as_columns(relation, self.source)
                relation = filtered_by(self.planner, Exprs(self.source, relation, "WHERE"), relation, each, self.env)
        return Rows(relation, links)

    def nested(self, first: Relation, joins: list[exp.Expr]) -> Relation:
        """Joins in parentheses."""
        relation, _ = self._joined(first, joins, [])
        return relation

    # --- the chain of joins

    def _joined(self, first: Relation, joins: list[exp.Expr],
                conditions: list[exp.Expr]) -> tuple[Relation, list[exp.Expr]]:
        if joins:
            first = windows.as_columns(first, self.source)
        groups: list[list[Relation]] = [[first]]
        given: list[exp.Expr] = []  # of ON
        rights = [windows.as_columns(self.planner.table(join.this, self.env), self.source) for join in joins]
        self.tables = {table.lower() for each in (first, *rights) for table in each.tables}
        conditions = [self._with_aliases(each, (first, *rights)) for each in conditions]
        for join, right in zip(joins, rights, strict=True):
            self._check_names([each for group in groups for each in group], right, join)
            kind = self._kind(join)
            on = join.args.get("on")
            using = [each.name for each in join.args.get("using") or []]
            if join.args.get("method") == "NATURAL":
                using = self._natural([each for group in groups for each in group], right, join)
            if kind == "comma":
                groups.append([right])
            elif kind in ("inner", "cross") and not using:
                groups[-1].append(right)
                given += conjuncts(on)
            else:
                if kind in ("left", "semi", "anti"):
                    pool = [*given, *conditions]
                    left = self._assembled(groups[-1], pool, strict=False)
                    given = [each for each in given if any(each is other for other in pool)]
                    conditions = [each for each in conditions if any(each is other for other in pool)]
                else:
                    left = self._assembled(groups[-1], given, strict=False)
                groups[-1] = [self._using(left, right, using, kind, join) if using else
                              self._on(left, right, kind, list(conjuncts(on)), join)]
        pool = [*given, *conditions]
        relation = self._assembled([each for group in groups for each in group], pool, strict=True)
        links = []
        for each in pool:
            if self._is_outer(each, relation):
                links.append(each)
            else:
                if self._reads_window(each, relation):
                    relation = windows.as_columns(relation, self.source)
                relation = filtered(relation, Exprs(self.source, relation, "WHERE").condition(each), self.at)
        return relation, links

    def _with_aliases(self, node: exp.Expr, relations: Sequence[Relation]) -> exp.Expr:
        """A condition of WHERE, where names of outputs are what these are."""
        def meant(each: exp.Expr) -> exp.Expr | None:
            if not isinstance(each, exp.Column) or each.table or any(one.find(each.name) for one in relations):
                return None
            found = self.aliases.get(each.name.lower())
            return None if found is None or found.find(exp.AggFunc, exp.Window, exp.Query) is not None else found

        if not any(meant(each) is not None for each in node.find_all(exp.Column)):
            return node
        return node.transform(lambda each: each if (found := meant(each)) is None else exp.Paren(this=found.copy()))

    def _kind(self, join: exp.Expr) -> str:
        side, kind, method = (str(join.args.get(name) or "").upper() for name in ("side", "kind", "method"))
        if method == "ASOF":
            raise self.planner.error("ASOF JOIN is not supported in SQL", join, "flow.join_asof(other, on=..., by=...)")
        if kind in ("SEMI", "ANTI"):
            return kind.lower()
        if side in ("LEFT", "RIGHT", "FULL"):
            return side.lower()
        if kind in ("CROSS", "INNER"):
            return kind.lower()
        if kind in ("OUTER",):
            return "full"
        if method not in ("", "NATURAL") or kind:
            raise self.planner.error(f"{method or kind} JOIN is not supported", join.this)
        if join.args.get("on") is not None or join.args.get("using") or method:
            return "inner"
        place = span_of(join.this)
        if place is not None and re.search(r"\bJOIN[\s(]*$", self.source.text[: place[0]], re.IGNORECASE):
            raise self.planner.error("JOIN needs ON or USING", join.this, "CROSS JOIN pairs all rows")
        return "comma"

    def _check_names(self, known: list[Relation], right: Relation, join: exp.Expr) -> None:
        taken = {table.lower() for each in known for table in each.tables if table}
        for table in right.tables:
            if table.lower() in taken:
                raise self.planner.error(f"two tables are called {table!r}", join.this,
                                         "give one an alias: FROM t AS a")

    def _natural(self, known: list[Relation], right: Relation, join: exp.Expr) -> list[str]:
        mine = {name.lower() for each in known for name in (c.name for c in each.columns if not c.is_merged)}
        found = [each.name for each in right.columns if each.name.lower() in mine]
        if not found:
            raise self.planner.error("NATURAL JOIN of tables that have no column in common", join.this)
        return found

    # --- one join

    def _using(self, left: Relation, right: Relation, names: list[str], kind: str, join: exp.Expr) -> Relation:
        """A join by columns that both sides have: each is one column afterwards."""
        mirrored = kind == "right"
        sides = (right, left) if mirrored else (left, right)
        first, second = sides[0], apart(sides[0].op.schema, sides[1], self.at)
        pairs: list[Pair] = []
        merged: list[tuple[Visible, Visible]] = []
        for name in names:
            found = []
            for side in (first, second):
                here = side.find(name)
                if len(here) != 1:
                    raise unknown(side, name, "", self.source, span_of(join.this), "USING") if not here else (
                        self.planner.error(f"{name!r} in USING is a column of several tables", join.this))
                found.append(here[0])
            pairs.append(self._pair(found[0].expr, found[1].expr, join))
            merged.append((found[0], found[1]))
        how = "left" if mirrored else kind
        joined = equi_join(first, second, pairs, how, self.at)
        if how in ("semi", "anti"):
            return joined
        position = {(each.table, each.name): k for k, each in enumerate((*first.columns, *second.columns))}
        columns = list(joined.columns)
        op, items = joined.op, list[Named]()
        for a, b in merged:
            one, other = columns[position[a.table, a.name]], columns[position[b.table, b.name]]
            whole: Expr = one.expr
            if how == "full":
                name = fresh(f"{a.name}", [*op.schema.names, *(item.name for item in items)])
                args = (one.expr, other.expr)
                whole = REGISTRY["coalesce"].rule(Call("coalesce", args, at=self.at), args)
                items.append(Named(name, whole))
                whole = Col(name, type_of(whole), whole.nullable)
            for k in (position[a.table, a.name], position[b.table, b.name]):
                columns[k] = replace(columns[k], is_merged=True)
            columns.append(Visible("", a.name, whole))
        if items:
            op = Project(op, (*(Named(f.name, Col(f.name, f.dtype, f.nullable)) for f in op.schema), *items),
                         at=self.at)
        new = columns[-len(merged) :]
        rest = columns[: -len(merged)]
        if mirrored:  # the columns of the left side come first
            count = len(first.columns)
            rest = [*rest[count:], *rest[:count]]
        return replace(joined, op=op, columns=(*new, *rest))

    def _on(self, left: Relation, right: Relation, kind: str, conditions: list[exp.Expr], join: exp.Expr) -> Relation:
        """An outer, semi or anti join by any condition."""
        if kind == "right":
            found = self._on(right, left, "left", conditions, join)
            mine = len(right.columns)
            return replace(found, columns=(*found.columns[mine:], *found.columns[:mine]))
        right = apart(left.op.schema, right, self.at)
        pairs: list[Pair] = []
        rest: list[exp.Expr] = []
        for each in conditions:
            pair = self._equality(each, left, right)
            if pair is not None:
                pairs.append(pair)
                continue
            owners = self._owners(each, [left, right])
            if owners == {1} and kind in ("left", "semi", "anti"):
                right = filtered(right, Exprs(self.source, right, "ON").condition(each), self.at)
                continue
            if not owners and kind in ("left", "semi", "anti") and isinstance(unwrapped(each), exp.Boolean) and (
                    unwrapped(each).this):
                continue
            rest.append(each)
        found_stream = stream_joins.outer(self, left, right, kind, pairs, rest)
        if found_stream is not None:
            return found_stream
        if not rest:
            return equi_join(left, right, pairs, kind, self.at)
        if kind == "full":
            raise self.planner.error("FULL JOIN takes equalities in ON", rest[0],
                                     "LEFT JOIN takes any condition; UNION ALL adds the rows of the other side")
        # Rows without a match have no key on the right side, so its keys are columns of their own.
        matched = equi_join(left, right, pairs, "inner" if pairs else "cross", self.at, keeps_keys=True)
        used: set[str] = set()
        for a, _ in pairs:
            used |= columns(a)
        for each in rest:
            condition = Exprs(self.source, matched, "ON").condition(each)
            used |= columns(condition) & set(left.op.schema.names)
            matched = filtered(matched, condition, self.at)
        names = sorted(used & set(left.op.schema.names))
        if kind == "left":
            return left_join_where(left, right, matched, names, self.at)
        from scalein.sql.subqueries import semi_by_rows

        return semi_by_rows(left, matched, names, kind, self.at)

    # --- inner joins

    def _assembled(self, relations: list[Relation], pool: list[exp.Expr], strict: bool) -> Relation:
        """The inner join of relations by the conditions of the pool that are about them; those are taken from it.

        The order is the one that costs least, where the sizes of tables are known (`join_order`). Else it is that of
        FROM, except that a relation waits until a condition connects it with those before.
        """
        if len(relations) == 1 and not strict:
            return self._pushed(relations[0], relations, 0, pool)
        edges = self._edges(relations, pool)
        implied = self._implied(relations, edges, pool) if len(relations) > 1 else []
        relations = [self._pushed(each, relations, k, pool) for k, each in enumerate(relations)]
        if len(relations) == 1:
            return relations[0]
        reduced = list(relations)
        for k, each in implied:
            reduced[k] = self._reduced(reduced[k], each)
        connected = {(a, b) for one, other, _ in edges for a, b in ((one, other), (other, one))}
        written = join_order.as_written(len(relations), lambda a, b: (a, b) in connected)
        order = self._cheapest(reduced, edges, pool)
        if order is None or (order.tree == written and reduced == relations):
            return self._in_tree(written, relations, pool)
        theirs = [*pool, *order.derived]
        found = self._in_tree(written, relations, pool)
        if _may_fail(found.op, relations):
            return found  # in another order, a key or condition would meet rows that this one drops before
        return _reordered(found, self._in_tree(order.tree, reduced, theirs, order.classes), order.estimate, self.at)

    def _in_tree(self, tree: join_order.Tree, relations: list[Relation], pool: list[exp.Expr],
                 classes: Mapping[int, int] | None = None) -> Relation:
        """The joins of a tree. Conditions of the pool filter as soon as their columns are there."""

        def joined(part: join_order.Tree) -> tuple[Relation, set[int]]:
            if isinstance(part, int):
                return relations[part], {part}
            (left, mine), (right, theirs) = map(joined, part)
            numbers = mine | theirs
            return self._covered(self._inner(left, right, pool, classes), pool, relations, numbers), numbers

        return _in_order(joined(tree)[0], relations)

    def _cheapest(self, relations: list[Relation], edges: list[tuple[int, int, exp.Expr]],
                  pool: list[exp.Expr]) -> _Order | None:
        """The order that costs least; None where sizes are not known, or rows are streams."""
        if any(each.window is not None or stream_joins.is_stream(each.op) for each in relations):
            return None
        from scalein.sql.cardinality import Cardinalities, Unknown

        known = self.planner.cardinalities = self.planner.cardinalities or Cardinalities()
        equalities = []
        for a, b, node in edges:
            pair = self._equality(node, relations[a], relations[b])
            if pair is None:
                return None
            equalities.append(_Equality((a, b), pair, unwrapped(node)))
        numbers = _classes(equalities)
        classes: dict[int, dict[int, float]] = {}
        try:
            rows = [known.rows(each.op) for each in relations]
            for number, equality in zip(numbers, equalities, strict=True):
                for k, key in zip(equality.relations, equality.pair, strict=True):
                    classes.setdefault(number, {})[k] = known.distinct(relations[k].op, key)
        except Unknown:
            return None
        owners = [self._owners(each, relations) for each in pool if not any(each is node for _, _, node in edges)]
        others = [(frozenset(each), join_order.UNKNOWN_SHARE) for each in owners if each is not None and len(each) > 1]
        graph = join_order.Graph(rows, list(classes.values()), others)
        tree = join_order.cheapest(graph)
        derived = [(number, node) for number in classes for node in _missing(equalities, numbers, number)]
        by_node = {id(node): number for number, (_, _, node) in zip(numbers, edges, strict=True)}
        by_node.update((id(node), number) for number, node in derived)
        names = [" ".join(filter(None, each.tables)) or "?" for each in relations]
        return _Order(tree, join_order.shown(tree, graph, names), [node for _, node in derived], by_node)

    def _edges(self, relations: list[Relation], pool: list[exp.Expr]) -> list[tuple[int, int, exp.Expr]]:
        """Which relations an equality connects."""
        found = []
        for each in pool:
            node = unwrapped(each)
            if isinstance(node, exp.EQ):
                sides = [self._owners(part, relations) for part in (node.this, node.args["expression"])]
                if all(side is not None and len(side) == 1 for side in sides):
                    (a,), (b,) = sides  # type: ignore[misc]
                    if a != b:
                        found.append((a, b, each))
        return found

    def _implied(self, relations: list[Relation], edges: list[tuple[int, int, exp.Expr]],
                 pool: list[exp.Expr]) -> list[tuple[int, exp.Expr]]:
        """Conditions on one relation that follow from the others, each with the relation's number.

        `a.x = b.x AND a.x > 5` gives `b.x > 5`, and `(a.x = 1 AND b.y = 2) OR (a.x = 3 AND b.y = 4)` gives
        `a.x = 1 OR a.x = 3` and `b.y = 2 OR b.y = 4`.
        """
        if any(each.window is not None or stream_joins.is_stream(each.op) for each in relations):
            return []
        found = []
        for each in pool:
            branches = [list(conjuncts(branch)) for branch in in_branches(each)]
            owners = self._owners(each, relations) if len(branches) > 1 else None
            for k in sorted(owners or ()) if owners is not None and len(owners) > 1 else ():
                about = [[part for part in branch if self._owners(part, relations) == {k}] for branch in branches]
                if all(about):
                    found.append((k, joined_by(exp.Or, [joined_by(exp.And, parts) for parts in about])))
        columns_of: list[tuple[tuple[int, exp.Expr], tuple[int, exp.Expr]]] = []
        for a, b, node in edges:
            sides = unwrapped(node).this, unwrapped(node).args["expression"]
            pair = self._equality(node, relations[a], relations[b])
            if pair is not None and all(isinstance(key, Col) for key in pair) and all(
                    isinstance(side, exp.Column) for side in sides):
                columns_of += [((a, sides[0]), (b, sides[1])), ((b, sides[1]), (a, sides[0]))]
        known = [(k, each) for each in pool for k in self._owners(each, relations) or () if is_comparison(each)]
        for k, each in known:  # which grows: what follows for one relation may have consequences for a third
            for (mine_k, mine), (k_other, other) in columns_of:
                if mine_k == k and all(part == mine for part in each.find_all(exp.Column)):
                    new = each.copy().transform(lambda part, mine=mine, other=other: other.copy()
                                                if part == mine else part)
                    if (k_other, new) not in known:
                        known.append((k_other, new))
                        found.append((k_other, new))
        return found

    def _reduced(self, relation: Relation, node: exp.Expr) -> Relation:
        """The relation without rows that a later condition drops, if that is worth it and the condition cannot fail."""
        from scalein.sql.cardinality import Cardinalities, Unknown

        condition = Exprs(self.source, relation, "WHERE").condition(node)
        if can_fail(condition):
            return relation
        known = self.planner.cardinalities = self.planner.cardinalities or Cardinalities()
        found = filtered(relation, condition, self.at)
        try:
            return found if known.rows(found.op) <= _WORTHWHILE * known.rows(relation.op) else relation
        except Unknown:
            return relation

    def _pushed(self, relation: Relation, relations: list[Relation], number: int, pool: list[exp.Expr]) -> Relation:
        """The relation with the conditions that are about it alone."""
        for each in list(pool):
            if self._owners(each, relations) == {number}:
                if self._reads_window(each, relation):
                    relation = windows.as_columns(relation, self.source)
                relation = filtered(relation, Exprs(self.source, relation, "WHERE").condition(each), self.at)
                _remove(pool, each)
        return relation

    def _inner(self, left: Relation, right: Relation, pool: list[exp.Expr],
               classes: Mapping[int, int] | None = None) -> Relation:
        """A join by the equalities of the pool; of those in one class (by the node's id) one is enough."""
        right = apart(left.op.schema, right, self.at)
        pairs: list[Pair] = []
        used: set[int] = set()
        for each in list(pool):
            pair = self._equality(each, left, right)
            if pair is not None:
                number = None if classes is None else classes.get(id(each))
                if number is None or number not in used:
                    pairs.append(pair)
                used |= set() if number is None else {number}
                _remove(pool, each)
        stream = stream_joins.inner(self, left, right, pairs, pool)
        if stream is not None:
            return stream
        return equi_join(left, right, pairs, "inner" if pairs else "cross", self.at)

    def _covered(self, found: Relation, pool: list[exp.Expr], relations: list[Relation], numbers: set[int]) -> Relation:
        """The join with the conditions whose columns are all there."""
        for each in list(pool):
            owners = self._owners(each, relations)
            if owners is not None and owners <= numbers:
                found = filtered(found, Exprs(self.source, found, "WHERE").condition(each), self.at)
                _remove(pool, each)
        return found

    def _equality(self, node: exp.Expr, left: Relation, right: Relation) -> Pair | None:
        """The keys of an equality between the two sides, if that is what a condition is."""
        node = unwrapped(node)
        if not isinstance(node, exp.EQ):
            return None
        sides = [node.this, node.args["expression"]]
        owners = [self._owners(each, [left, right]) for each in sides]
        if owners == [{1}, {0}]:
            sides.reverse()
        elif owners != [{0}, {1}]:
            return None
        a, b = (Exprs(self.source, relation, "JOIN").typed(each)
                for relation, each in zip((left, right), sides, strict=True))
        e = Exprs(self.source, left, "JOIN")
        kinds = {type_of(a).kind, type_of(b).kind}
        if kinds & {Kind.TS} and kinds & {Kind.DATE, Kind.DATE64}:
            a, b = e.meeting(node, a, b)
        try:
            return typed_pair(a, b, self.at)
        except ScaleinError:
            if type_of(a).is_number and type_of(b).is_number:
                return None  # the comparison of SQL, which may be of floats
            with windows.underlined(self.source, node):
                raise

    def _pair(self, a: Expr, b: Expr, join: exp.Expr) -> Pair:
        with windows.underlined(self.source, join.this):
            return typed_pair(a, b, self.at)

    # --- whose columns a condition reads

    def _owners(self, node: exp.Expr, relations: list[Relation]) -> set[int] | None:
        """The relations that a condition is about; None if it has a column of none, or one that several have."""
        found: set[int] = set()
        for each in node.find_all(exp.Column):
            holders = [k for k, relation in enumerate(relations) if self._has(relation, each)]
            if len(holders) != 1:
                return None
            found.add(holders[0])
        return found

    def _is_outer(self, node: exp.Expr, relation: Relation) -> bool:
        """Whether a condition reads columns of the query around this one."""
        outer = self.outer
        if outer is None:
            return False
        return any(not self._has(relation, each) and self._has(outer, each) for each in node.find_all(exp.Column))

    def _has(self, relation: Relation, node: exp.Column) -> bool:
        """Whether a name is one of the relation's columns, or a field of one."""
        if relation.find(node.name, node.table):
            return True
        first, *rest = (part.name.lower() for part in node.parts)
        if first in self.tables:
            return len(rest) > 1 and bool(relation.find(rest[0], first))
        return bool(rest) and bool(relation.structs(first))

    def _reads_window(self, node: exp.Expr, relation: Relation) -> bool:
        window = relation.window
        if window is None or not window.is_pending:
            return False
        edges = (window.start, window.end, window.last)
        return any(found.expr in edges for each in node.find_all(exp.Column)
                   for found in relation.find(each.name, each.table))


def _remove(pool: list[exp.Expr], node: exp.Expr) -> None:
    pool[:] = [each for each in pool if each is not node]


def _in_order(found: Relation, relations: list[Relation]) -> Relation:
    """The columns in the order of FROM, whatever the order of the joins."""
    places: dict[tuple[str, str, bool], int] = {}
    for relation in relations:
        for each in relation.columns:
            places.setdefault((each.table, each.name, each.is_merged), len(places))
    ordered = sorted(found.columns, key=lambda each: places.get((each.table, each.name, each.is_merged), len(places)))
    return replace(found, columns=tuple(ordered))



def _classes(equalities: list[_Equality]) -> list[int]:
    """For each equality the number of its class: those that have a column in common are one.

    Only columns of one type: equal numbers of different types may be other numbers in a third. A class in which a
    relation has two columns is left as it was.
    """
    joined = list(range(len(equalities)))
    for k, each in enumerate(equalities):
        if all(isinstance(key, Col) for key in each.pair):
            for j, other in enumerate(equalities[:k]):
                if joined[j] != joined[k] and set(each.sides()) & set(other.sides()):
                    here = {joined[j], joined[k]}
                    sides = {side for number, e in zip(joined, equalities, strict=True) if number in here
                             for side in e.sides()}
                    if len({relation for relation, _ in sides}) == len(sides):
                        joined = [min(here) if number in here else number for number in joined]
    return joined


def _missing(equalities: list[_Equality], numbers: list[int], number: int) -> list[exp.Expr]:
    """The equalities of a class that follow from the others."""
    members: dict[int, exp.Expr] = {}
    there = set()
    for each in (each for each, found in zip(equalities, numbers, strict=True) if found == number):
        there.add(frozenset(each.relations))
        for k, side in zip(each.relations, (each.node.this, each.node.args["expression"]), strict=True):
            members.setdefault(k, side)
    return [exp.EQ(this=members[a].copy(), expression=members[b].copy())
            for a in sorted(members) for b in sorted(members) if a < b and frozenset((a, b)) not in there]


def _may_fail(op: Op, relations: Sequence[Relation]) -> bool:
    """Whether a key or condition that joins the relations can fail for a row."""
    known = {id(each.op) for each in relations}
    waiting = [op]
    while waiting:
        op = waiting.pop()
        if id(op) not in known:
            if any(can_fail(expr) for expr, _ in op.exprs()):
                return True
            waiting += op.inputs
    return False


def _reordered(written: Relation, found: Relation, estimate: str, at: SourceLoc) -> Relation:
    """The joins in the order found, with the columns of those as written: their names, order and expressions."""
    by_name = {(each.table, each.name, each.is_merged): each.expr for each in found.columns}
    fields = written.op.schema
    items: dict[str, Expr] = {}
    for each in written.columns:
        assert isinstance(each.expr, Col)
        items.setdefault(each.expr.name, by_name[each.table, each.name, each.is_merged])
    op = Project(written.op, tuple(Named(name, Col(name, fields[name].dtype, fields[name].nullable)) for name in items),
                 at=at)
    other = Project(found.op, tuple(Named(name, expr) for name, expr in items.items()), at=at)
    return replace(written, op=Reordered(other, op, estimate, at=at))
