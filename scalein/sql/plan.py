"""From the tree of a query to the ops of a flow.

A SELECT is planned in the order in which SQL means it: FROM and WHERE (`from_clause`), GROUP BY (`groups`), HAVING,
OVER, SELECT, DISTINCT, ORDER BY, LIMIT. Each step has a relation, whose columns are the names that the next one may
use, and makes ops over it. Subqueries are joined to the relation before the expression that they stand in is read
(`subqueries`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sqlglot import exp

from scalein.dtypes import BOOL, I64, DType, Kind, alike
from scalein.errors import BadName, BadSql, WrongType, guess
from scalein.ir.exprs import Call, Col, Expr, Lit, Named, type_of
from scalein.ir.functions.registry import REGISTRY
from scalein.ir.internal_names import internal
from scalein.ir.ops import By, Distinct, Filter, Limit, Op, Project, Sort, Union
from scalein.ir.unify import common_type, nested_hint
from scalein.sql import windows
from scalein.sql.calls import arguments, names_of
from scalein.sql.dialect import WINDOW_FUNCTIONS
from scalein.sql.exprs import Exprs
from scalein.sql.inputs import Inputs, files
from scalein.sql.over import numbered
from scalein.sql.parse import Text, conjuncts, span_of, unwrapped
from scalein.sql.scope import EventWindow, Relation, fresh, unknown

if TYPE_CHECKING:
    from scalein.sql.cardinality import Cardinalities


@dataclass
class Env:
    """The queries that WITH has named, each planned when it is first used."""

    queries: Mapping[str, exp.CTE] = field(default_factory=dict)
    outside: Env | None = None
    planned: dict[str, Relation] = field(default_factory=dict)
    open: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Output:
    """A column of SELECT: what it is called, and its expression as a tree, or typed where it comes from `*`."""

    name: str
    node: exp.Expr | None
    expr: Expr | None = None


class Planner:
    """Plans the queries of one text."""

    def __init__(self, source: Text, inputs: Inputs) -> None:
        self.source = source
        self.inputs = inputs
        self.at = source.at
        self.cardinalities: Cardinalities | None = None

    def error(self, what: str, node: exp.Expr | None, hint: str | None = None, **facts: object) -> BadSql:
        """An error about a part of the text."""
        return self.source.error(BadSql, what, node, hint=hint, **facts)

    # --- queries

    def query(self, node: exp.Expr, env: Env | None = None) -> Relation:
        """The rows of a query; their columns have its names, in order."""
        env = self._with(node, env or Env())
        match node:
            case exp.Subquery() | exp.Paren():
                inner = self.query(node.this, env)
                return self._ordered(node, inner, env)
            case exp.Select():
                return self.select(node, env)
            case exp.SetOperation():
                return self._ordered(node, self._set_operation(node, env), env)
            case exp.Values():
                return self._ordered(node, self._values(node), env)
            case exp.Table():
                return self.table(node, env)
        raise self.error(f"{type(node).__name__.upper()} is no query", node, "SELECT ... FROM ...")

    def _with(self, node: exp.Expr, env: Env) -> Env:
        clause = node.args.get("with_") or node.args.get("with")
        if clause is None:
            return env
        queries = {cte.alias.lower(): cte for cte in clause.expressions}
        return Env(queries, env)

    def _named_query(self, name: str, env: Env | None, node: exp.Expr) -> Relation | None:
        """A query of WITH; one sees those before it, and not itself."""
        key = name.lower()
        while env is not None:
            cte = env.queries.get(key)
            if cte is not None and key not in env.open:
                if key not in env.planned:
                    env.open.add(key)
                    try:
                        env.planned[key] = self._renamed(self.query(cte.this, env), cte.args.get("alias"), name)
                    finally:
                        env.open.discard(key)
                return env.planned[key]
            if cte is not None and self.inputs.op(name) is None:
                raise self.error(f"{name!r} reads itself: WITH RECURSIVE is not supported", node)
            env = env.outside
        return None

    def _renamed(self, relation: Relation, alias: exp.Expr | None, name: str) -> Relation:
        """The relation under its alias, with the names of columns that this gives."""
        if alias is None:
            return relation.named(name)
        names = tuple(each.name for each in alias.args.get("columns") or [])
        width = sum(not each.is_merged for each in relation.columns)
        if len(names) > width:
            raise self.error(f"{name!r} has {width} columns, not {len(names)}", alias)
        return relation.named(alias.name or name, names)

    def _values(self, node: exp.Values) -> Relation:
        """A table of constants."""
        import pyarrow as pa

        from scalein.api.binding import source as source_of
        from scalein.connectors.in_memory import of_arrow

        e = Exprs(self.source, Relation(_nothing(self), ()), "VALUES")
        rows = []
        for row in node.expressions:
            given = row.expressions if isinstance(row, exp.Tuple) else [row]
            values = []
            for each in given:
                found = e.expr(each)
                if not isinstance(found, Lit):
                    raise self.error("VALUES takes constants", each)
                values.append(found.value)
            rows.append(values)
        if len({len(row) for row in rows}) > 1:
            raise self.error("the rows of VALUES have different lengths", node)
        columns = {f"col{k}": _column_of([row[k] for row in rows]) for k in range(len(rows[0]))}
        op = source_of("arrow", of_arrow(pa.table(columns), self.at), self.at)
        alias = node.args.get("alias")
        return self._renamed(Relation.of(op, ""), alias, alias.name if alias is not None else "")

    # --- tables

    def table(self, node: exp.Expr, env: Env) -> Relation:
        """One item of FROM."""
        if isinstance(node, exp.Subquery):
            is_table = isinstance(node.this, exp.Table)
            found = self._joined(node, self.query(node.this, self._with(node, env)), env)
            return found if is_table and not node.alias else self._renamed(found, node.args.get("alias"), node.alias)
        if isinstance(node, exp.Values):
            return self._values(node)
        if isinstance(node, exp.Paren):
            return self.table(node.this, env)
        if not isinstance(node, exp.Table):
            kind = type(node).__name__.upper()
            raise self.error(f"{kind} cannot stand in FROM", node,
                             "explode a list with flow.explode(...) before" if kind == "UNNEST" else None)
        alias = node.args.get("alias")
        if isinstance(node.this, exp.Func):
            found = self._function(node, env)
            return self._renamed(found, alias, alias.name) if alias is not None and alias.name else found
        name = ".".join(part.name for part in node.parts)
        found = self._read(name, node, env)
        return self._joined(node, self._renamed(found, alias, node.name), env)

    def _joined(self, node: exp.Expr, first: Relation, env: Env) -> Relation:
        """Joins in parentheses: FROM (a JOIN b ON ...)."""
        joins = node.args.get("joins")
        if not joins:
            return first
        from scalein.sql.from_clause import FromClause

        return FromClause(self, env).nested(first, joins)

    def _read(self, name: str, node: exp.Expr, env: Env) -> Relation:
        found = self._named_query(name, env, node)
        if found is not None:
            return found
        op = self.inputs.op(name)
        if op is None and ("/" in name or "." in name or "*" in name):
            with windows.underlined(self.source, node):
                op = files(name, self.at)
        if op is not None:
            return Relation.of(op, name)
        known: list[str] = []
        around: Env | None = env
        while around is not None:
            known += around.queries
            around = around.outside
        known += self.inputs.names()
        kind = self.inputs.unusable(name)
        hint = guess(name, known) or (f"the variable {name!r} is a {kind}, and no table" if kind else
                                      f"give it by name: si.sql(..., {name}=flow)" if name.isidentifier() else None)
        raise self.source.error(BadName, f"there is no table {name!r}", node, hint=hint,
                                has=", ".join(known[:24]) or "no table at all")

    def _function(self, node: exp.Table, env: Env) -> Relation:
        """Windows over a table, and readers of files."""
        call = node.this
        names = names_of(self.source, call)
        kind = next((name for name in names if name in WINDOW_FUNCTIONS), None)
        if kind is not None:
            given = arguments(call)
            data = next((each.args["expression"] for each in given if isinstance(each, exp.Kwarg)
                         and each.this.name.upper() == "DATA"), None)
            if data is None and not given:
                raise self.error(f"{kind} takes a table, a time and lengths", node)
            if data is not None:
                given = [data, *(each for each in given if not (isinstance(each, exp.Kwarg)
                                                                and each.this.name.upper() == "DATA"))]
            relation = windows.as_columns(self._argument(given[0], env), self.source)
            e = Exprs(self.source, relation, kind)
            return windows.with_window(relation, windows.table_function(e, call, kind, given))
        if names and names[0].startswith("READ_"):
            e = Exprs(self.source, Relation(_nothing(self), ()), names[0])
            path = e.constant(arguments(call)[0]) if arguments(call) else None
            from scalein.api import sources

            reader = getattr(sources, names[0].lower().replace("_auto", "").replace("ndjson", "json"), None)
            if isinstance(path, str) and reader is not None:
                with windows.underlined(self.source, node):
                    return Relation.of(reader(path).op, names[0].lower())
        shown = names[0] if names else type(call).__name__.upper()
        raise self.error(f"there is no table function {shown}", node,
                         guess(shown, (*WINDOW_FUNCTIONS, "READ_PARQUET", "READ_CSV", "READ_JSON")))

    def _argument(self, node: exp.Expr, env: Env) -> Relation:
        """The table that a table function is over."""
        if isinstance(node, exp.Column):
            return self._read(".".join(part.name for part in node.parts), node, env).named(node.name)
        if isinstance(node, exp.Subquery | exp.Select | exp.Paren):
            return self.query(node, env).named(node.alias if isinstance(node, exp.Subquery) else "")
        if isinstance(node, exp.Func):
            return self._function(exp.Table(this=node), env)
        if isinstance(node, exp.Literal):
            return self._read(str(node.this), node, env)
        raise self.error("a window is over a table", node, "TUMBLE(t, ts, INTERVAL '10' SECOND)")

    # --- SELECT

    def select(self, node: exp.Select, env: Env) -> Relation:
        """The rows of a SELECT."""
        from scalein.sql.from_clause import FromClause

        rows = FromClause(self, env).rows(node)
        return self.projected(node, rows.relation, env)

    def projected(self, node: exp.Select, relation: Relation, env: Env) -> Relation:
        """What follows FROM and WHERE."""
        from scalein.sql import over
        from scalein.sql.groups import aggregated, has_aggregates
        from scalein.sql.subqueries import joined

        aliases = {each.alias.lower(): each.this for each in node.expressions if isinstance(each, exp.Alias)}
        is_grouped = node.args.get("group") is not None or has_aggregates(self, node)
        if not is_grouped:
            relation = windows.assigned(relation) if _ranks(node) else relation
            relation = windows.as_columns(relation, self.source)
        outputs = list(self._outputs(node, relation))
        if is_grouped:
            relation, e = aggregated(self, node, relation, outputs, aliases, env)
        else:
            e = Exprs(self.source, relation, "SELECT", aliases=aliases)
        having = node.args.get("having")
        if having is not None:
            if not is_grouped:
                raise self.error("HAVING needs GROUP BY or an aggregate", having.this, "WHERE filters rows")
            relation = self.filtered(replace(e, step="HAVING"), relation, having.this, env)
            e.relation = relation
        qualify = node.args.get("qualify")
        listed = [each.node for each in outputs if each.node is not None]
        conditions = [] if qualify is None else [qualify.this]
        relation = over.planned(self, node, e, relation, [*listed, *conditions, *_order_nodes(node)])
        e.relation = relation
        if qualify is not None:
            relation = self.filtered(replace(e, step="QUALIFY"), relation, qualify.this, env)
            e.relation = relation
        relation = joined(self, e, relation, [*listed, *_order_nodes(node)], env)
        e.relation = relation
        items = [Named(each.name, _expr(e, each)) for each in outputs]
        return self._finished(node, e, relation, items, aliases, is_grouped)

    def filtered(self, e: Exprs, relation: Relation, node: exp.Expr, env: Env) -> Relation:
        """The rows for which a condition is true, with the subqueries in it joined."""
        from scalein.sql.subqueries import filtered_by

        for each in conjuncts(node):
            e.relation = relation
            relation = filtered_by(self, e, relation, each, env)
        return relation

    def _outputs(self, node: exp.Select, relation: Relation) -> Iterator[Output]:
        """What SELECT lists, with `*` written out; names are distinct."""
        taken: set[str] = set()
        texts = None if all(isinstance(each, exp.Alias | exp.Column | exp.Star) for each in node.expressions) else (
            self.source.items(node))
        for number_of, each in enumerate(node.expressions):
            for found in self._expanded(each, relation, None if texts is None else texts[number_of]):
                name = found.name
                number = 1
                while name in taken:
                    name, number = f"{found.name}_{number}", number + 1
                taken.add(name)
                yield replace(found, name=name)

    def _expanded(self, node: exp.Expr, relation: Relation, text: str | None = None) -> Iterator[Output]:
        star = node if isinstance(node, exp.Star) else node.this if isinstance(node, exp.Column) else None
        if not isinstance(star, exp.Star):
            value = node.this if isinstance(node, exp.Alias) else node
            yield Output(self._name(node, relation, text), unwrapped(value))
            return
        table = node.args["table"].name if isinstance(node, exp.Column) and node.args.get("table") else ""
        without = {each.name.lower() for each in star.args.get("except_") or star.args.get("except") or []}
        instead = {each.alias.lower(): each.this for each in star.args.get("replace") or []}
        found = [each for each in relation.columns
                 if (each.table.lower() == table.lower() if table else not each.is_merged)]
        if not found:
            if table:
                raise unknown(relation, "*", table, self.source, span_of(node), "SELECT")
            raise self.error("SELECT * needs FROM", node)
        for name in without:
            if name not in {each.name.lower() for each in found}:
                raise unknown(relation, name, table, self.source, span_of(node), "SELECT")
        for each in found:
            if each.name.lower() in instead:
                yield Output(each.name, instead[each.name.lower()])
            elif each.name.lower() not in without:
                reference = exp.column(each.name, table=each.table or None)
                yield Output(each.name, None, each.expr) if relation.window is None or not relation.window.is_pending \
                    else Output(each.name, reference)

    def _name(self, node: exp.Expr, relation: Relation, text: str | None) -> str:
        """The name of an output: its alias, that of its column, or what the user wrote."""
        if isinstance(node, exp.Alias):
            return str(node.alias)
        node = unwrapped(node)
        if isinstance(node, exp.Column):
            found = relation.find(node.name, node.table)
            return found[0].name if len(found) == 1 else node.name
        if isinstance(node, exp.Dot):
            return node.args["expression"].name or "value"
        return (text or self.source.of(node) or type(node).__name__.lower())[:80]

    # --- ORDER BY, DISTINCT, LIMIT

    def _finished(self, node: exp.Select, e: Exprs, relation: Relation, items: list[Named],
                  aliases: dict[str, exp.Expr], is_grouped: bool) -> Relation:
        at = self.at
        distinct = node.args.get("distinct")
        keys_of = distinct.args.get("on") if distinct is not None else None
        is_all = distinct is not None and keys_of is None
        by_output = {item.name.lower(): item.expr for item in items}
        taken = [item.name for item in items]
        hidden: list[Named] = []
        order: list[tuple[Expr, bool, bool]] = []
        scope = replace(e, step="ORDER BY", prefers_aliases=True)

        def held(expr: Expr) -> Col:
            """The column of the projection that has an expression; a hidden one, if there is none."""
            found = next((item for item in (*items, *hidden) if item.expr == expr), None)
            if found is None:
                if is_all:
                    raise self.error("with DISTINCT, rows are ordered by what is selected", node.args.get("order"))
                found = Named(fresh(internal(f"order{len(hidden)}"), taken), expr)
                hidden.append(found)
            return Col(found.name, type_of(expr), expr.nullable)

        for each in self._order(node):
            value = unwrapped(each.this)
            is_plain = isinstance(value, exp.Column) and not value.table
            if isinstance(value, exp.Literal) and not value.args.get("is_string"):
                expr = self._ordinal(value, items, "ORDER BY")
            elif isinstance(value, exp.Var | exp.Column) and value.name.upper() == "ALL" and "all" not in by_output:
                for item in items:
                    order.append((held(item.expr), *_direction(each)))
                continue
            elif is_plain and value.name.lower() in by_output:
                expr = by_output[value.name.lower()]
            else:
                expr = scope.typed(value)
            order.append((held(expr), *_direction(each)))
        on: list[str] = []
        if keys_of is not None:
            given = keys_of.expressions if isinstance(keys_of, exp.Tuple) else [keys_of]
            on = [held(scope.typed(each)).name for each in given]
        op: Op = relation.op
        plain = [Named(f.name, Col(f.name, f.dtype, f.nullable)) for f in op.schema]
        if [*items, *hidden] != plain:
            op = Project(op, (*items, *hidden), at=at)
        if is_all:
            op = self._distinct(op, [item.name for item in items], node)
        op = self._sorted(op, order)
        if on:
            op = Distinct(op, tuple(dict.fromkeys(on)), at=at)
        op = self._limited(op, node, e)
        if hidden:
            op = Project(op, tuple(Named(i.name, Col(i.name, type_of(i.expr), i.expr.nullable)) for i in items), at=at)
        found = Relation.of(op, "")
        is_single = is_grouped and not relation.tables and relation.is_single_row
        return replace(found, window=_kept_window(relation.window, items), is_single_row=is_single)

    def _order(self, node: exp.Expr) -> list[exp.Expr]:
        order = node.args.get("order")
        return list(order.expressions) if order is not None else []

    def _ordinal(self, node: exp.Expr, items: list[Named], step: str) -> Expr:
        number = int(str(node.this)) if str(node.this).isdigit() else 0
        if not 1 <= number <= len(items):
            raise self.error(f"{step} {node.this}: SELECT has {len(items)} columns", node)
        return items[number - 1].expr

    def _distinct(self, op: Op, names: list[str], node: exp.Expr) -> Op:
        for name in names:
            dtype = op.schema[name].dtype
            if dtype.is_nested:
                raise self.source.error(WrongType, f"rows cannot be told apart by {name!r}, which is {dtype!r}", node,
                                        hint=nested_hint(dtype))
        return Distinct(op, tuple(names), at=self.at)

    def _sorted(self, op: Op, order: list[tuple[Expr, bool, bool]]) -> Op:
        """Nulls come last, as in DuckDB, but where the query says otherwise."""
        if not order:
            return op
        by: list[By] = []
        for expr, descending, nulls_first in order:
            if type_of(expr).is_nested:
                raise WrongType(f"{type_of(expr)!r} has no order", at=self.at, hint=nested_hint(type_of(expr)))
            if nulls_first and expr.nullable:
                by.append(By(Call("is_not_null", (expr,), dtype=BOOL, nullable=False)))
            by.append(By(expr, descending))
        return Sort(op, tuple(by), True, at=self.at)

    def _limited(self, op: Op, node: exp.Expr, e: Exprs) -> Op:
        """LIMIT, after the rows that OFFSET leaves out."""
        limit, offset = node.args.get("limit"), node.args.get("offset")
        count = None if limit is None else self.count(limit, "LIMIT", e)
        first = 0 if offset is None else self.count(offset, "OFFSET", e) or 0
        if not first:
            return op if count is None else Limit(op, count, at=self.at)
        op = op if count is None else Limit(op, first + count, at=self.at)
        rows, number = numbered(op, (), (), self.at)
        among = Call("gt", (number, Lit(first, I64)), dtype=BOOL, nullable=False, at=self.at)
        kept = Sort(Filter(rows, among, at=self.at), (By(number),), True, at=self.at)
        return Project(kept, tuple(Named(f.name, Col(f.name, f.dtype, f.nullable)) for f in op.schema), at=self.at)

    def count(self, node: exp.Expr, what: str, e: Exprs) -> int | None:
        """The constant of LIMIT or OFFSET; None for ALL."""
        given = node.args.get("expression") or node.args.get("count")
        if given is None or (isinstance(given, exp.Column | exp.Var) and given.name.upper() == "ALL"):
            return None
        found = Exprs(self.source, Relation(e.relation.op, ()), what).constant(given)
        if isinstance(found, bool) or not isinstance(found, int) or found < 0:
            raise self.error(f"{what} takes a constant number of rows", node.args.get("expression") or node)
        return found

    def _ordered(self, node: exp.Expr, relation: Relation, env: Env) -> Relation:
        """ORDER BY and LIMIT of a whole query, by its outputs."""
        if not self._order(node) and node.args.get("limit") is None and node.args.get("offset") is None:
            return relation
        e = Exprs(self.source, relation, "ORDER BY")
        items = [Named(each.name, each.expr) for each in relation.columns]
        order = []
        for each in self._order(node):
            value = unwrapped(each.this)
            is_number = isinstance(value, exp.Literal) and not value.args.get("is_string")
            order.append((self._ordinal(value, items, "ORDER BY") if is_number else e.typed(value), *_direction(each)))
        op = self._limited(self._sorted(relation.op, order), node, e)
        return replace(relation.over(op), is_single_row=False)

    # --- UNION, INTERSECT, EXCEPT

    def _set_operation(self, node: exp.SetOperation, env: Env) -> Relation:
        """Set operations; a chain of UNION ALL is one op."""
        if node.args.get("by_name"):
            raise self.error("BY NAME is not supported", node, "list the columns in one order")
        sides = [self.query(each, env) for each in _operands(node)]
        aligned = self._aligned(node, sides)
        names = aligned[0].schema.names
        if isinstance(node, exp.Union):
            op: Op = Union(tuple(aligned), at=self.at)
            if node.args.get("distinct"):
                op = self._distinct(op, names, node)
            return Relation.of(op, "")
        if not node.args.get("distinct", True):
            raise self.error(f"{type(node).__name__.upper()} ALL is not supported", node, "without ALL it is")
        from scalein.sql.joins import null_safe_semi

        left = Relation.of(self._distinct(aligned[0], names, node), "")
        how = "semi" if isinstance(node, exp.Intersect) else "anti"
        return null_safe_semi(left, aligned[1], names, how, self.at)

    def _aligned(self, node: exp.Expr, sides: list[Relation]) -> list[Op]:
        """The sides with the names of the first, and types that they share."""
        columns = [[each.expr for each in side.columns if not each.is_merged] for side in sides]
        widths = {len(each) for each in columns}
        if len(widths) > 1:
            raise self.error("the sides have different numbers of columns", node,
                             found=" and ".join(map(str, map(len, columns))))
        names = [each.name for each in sides[0].columns if not each.is_merged]
        found: list[list[Expr]] = [[] for _ in sides]
        for k, name in enumerate(names):
            exprs = [each[k] for each in columns]
            target = type_of(exprs[0])
            for each in exprs[1:]:
                shared = target if alike(target, type_of(each)) else _shared(target, type_of(each))
                if shared is None:
                    raise self.source.error(WrongType, f"column {name!r} is {target!r} on one side and "
                                            f"{type_of(each)!r} on the other", node, hint="CAST one of them")
                target = shared
            for side, each in zip(found, exprs, strict=True):
                expr = each if type_of(each) == target else REGISTRY["cast"].rule(
                    Call("cast", (each,), dtype=target, at=self.at), (each,))
                side.append(expr)
        return [Project(side.op, tuple(Named(name, expr) for name, expr in zip(names, exprs, strict=True)), at=self.at)
                for side, exprs in zip(sides, found, strict=True)]


def _expr(e: Exprs, output: Output) -> Expr:
    if output.expr is not None:
        return output.expr
    assert output.node is not None
    return e.typed(output.node)


def _operands(node: exp.SetOperation) -> list[exp.Expr]:
    """The sides of a set operation; those of a chain of UNION ALL, or of UNION, all at once."""
    found: list[exp.Expr] = []
    waiting: list[exp.Expr] = [node]
    while waiting:
        each = waiting.pop()
        is_same = isinstance(each, exp.Union) and isinstance(node, exp.Union) and (
            each.args.get("distinct") == node.args.get("distinct")) and (
            each is node or not any(each.args.get(k) for k in ("order", "limit", "offset", "with_")))
        if each is node or is_same:
            waiting += [each.args["expression"], each.this]
        else:
            found.append(each)
    return found


def _shared(a: DType, b: DType) -> DType | None:
    kinds = {a.kind, b.kind}
    if kinds == {Kind.TS, Kind.DATE}:
        return a if a.kind is Kind.TS else b
    return common_type(a, b)


def _direction(node: exp.Expr) -> tuple[bool, bool]:
    """Whether an ORDER BY is descending, and whether nulls come first."""
    if not isinstance(node, exp.Ordered):
        return False, False
    return bool(node.args.get("desc")), bool(node.args.get("nulls_first"))


def _ranks(node: exp.Select) -> bool:
    """Whether a SELECT has OVER, and no subqueries, which are joined."""
    from scalein.sql.subqueries import has_subquery

    nodes = [*node.expressions, *_order_nodes(node), *([node.args["qualify"]] if node.args.get("qualify") else [])]
    return any(each.find(exp.Window) is not None for each in nodes) and not any(map(has_subquery, nodes))


def _order_nodes(node: exp.Select) -> list[exp.Expr]:
    order = node.args.get("order")
    return [each.this for each in order.expressions] if order is not None else []


def _kept_window(window: EventWindow | None, items: list[Named]) -> EventWindow | None:
    """The windows of the rows, if their start and end come out."""
    if window is None:
        return None
    names: dict[Expr, Named] = {item.expr: item for item in items if isinstance(item.expr, Col)}
    start, end = names.get(window.start), names.get(window.end)
    if start is None or end is None:
        return None
    edges = [Col(each.name, type_of(each.expr), each.expr.nullable) for each in (start, end)]
    last = names.get(window.last)
    time = names.get(window.time) if isinstance(window.time, Col) else None
    return replace(window, start=edges[0], end=edges[1], is_pending=False,
                   last=edges[1] if last is None else Col(last.name, type_of(last.expr), False),
                   time=edges[0] if time is None else Col(time.name, type_of(time.expr), time.expr.nullable))


def _nothing(planner: Planner) -> Op:
    """One row without columns of the user's: what SELECT without FROM is over."""
    import pyarrow as pa

    from scalein.api.binding import source as source_of
    from scalein.connectors.in_memory import of_arrow

    name = internal("row")
    table = pa.table({name: pa.array([0], pa.int32())}, schema=pa.schema([pa.field(name, pa.int32(), nullable=False)]))
    return source_of("arrow", of_arrow(table, planner.at), planner.at)


def _column_of(values: list[object]) -> object:
    import pyarrow as pa

    return pa.array(values, pa.int32()) if all(value is None for value in values) else pa.array(
        values, pa.int64() if all(value is None or type(value) is int for value in values) else None)
