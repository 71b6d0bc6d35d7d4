"""A session of SQL: tables and views that statements make, and what the other statements ask for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sqlglot import exp

from scalein.api.column import Column, col, lit
from scalein.api.flow import Flow
from scalein.errors import NOWHERE, BadSql, ScaleinError, SourceLoc, guess
from scalein.sql.calls import is_function
from scalein.sql.dialect import word
from scalein.sql.inputs import Inputs
from scalein.sql.parse import Statement, Text, not_too_deep, statements, tree
from scalein.sql.plan import Planner
from scalein.sql.tables import SINKS, Maker, Table, declared


@dataclass(frozen=True)
class Rows:
    """A query: its flow."""

    flow: Flow


@dataclass(frozen=True)
class Insert:
    """INSERT INTO: a flow, and the table that its rows go to."""

    flow: Flow
    table: Table


@dataclass(frozen=True)
class Answer:
    """A question about tables and plans: what there is to say."""

    text: str


@dataclass(frozen=True)
class Done:
    """A statement that has been executed: what it did."""

    text: str


@dataclass(frozen=True)
class Inserts:
    """Statements that are one job."""

    inserts: tuple[Insert, ...]


Step = Rows | Inserts | Answer | Done


class Session:
    """Runs statements one after the other; what they make is there for the next ones.

    >>> import pyarrow as pa
    >>> session = Session({"sales": pa.table({"shop": ["a", "b"], "price": [1.0, 4.0]})})
    >>> list(session.steps("CREATE VIEW dear AS SELECT * FROM sales WHERE price > 2"))
    [Done(text='view dear')]
    >>> (rows,) = session.steps("SELECT shop FROM dear")
    >>> rows.flow.collect().to_pydict()
    {'shop': ['b']}
    """

    def __init__(self, given: Mapping[str, object] | Inputs | None = None,
                 connectors: Mapping[str, Maker] | None = None) -> None:
        self.inputs = given if isinstance(given, Inputs) else Inputs(given or {}, NOWHERE)
        self.tables: dict[str, Table] = {}
        self._waiting: dict[str, None] = {}  # tables that no query can read yet
        self._connectors = dict(connectors or {})

    def names(self) -> list[str]:
        """The tables and views there are."""
        return list(dict.fromkeys([*self.inputs.names(), *self.tables]))

    def columns(self, name: str) -> list[str]:
        """The columns of a table; none if it cannot be read."""
        try:
            op = self.inputs.op(name)
        except ScaleinError:
            return []
        return [] if op is None else op.schema.names

    def steps(self, text: str, file: str | None = None, at: SourceLoc = NOWHERE) -> Iterator[Step]:
        """What the statements of a text ask for; one after the other, since each sees what those before did.

        INSERTs that follow one another come together. The text is in a file, or at a place of the user's program.
        """
        inserts: list[Insert] = []
        for statement in statements(Text(text, at)):
            line = text.count("\n", 0, statement.span[0]) + 1
            source = Text(text, at if file is None else SourceLoc(file, line))
            if statement.starts("INSERT"):
                with not_too_deep(source):
                    inserts.append(self._insert(source, statement))
                continue
            if inserts:
                yield Inserts(tuple(inserts))
                inserts.clear()
            self._find_sources()
            with not_too_deep(source):
                step = self._step(source, statement)
            yield step
        if inserts:
            yield Inserts(tuple(inserts))

    def _step(self, source: Text, statement: Statement) -> Step:
        first = [statement.starts(each) for each in ("CREATE", "EXPLAIN", "SHOW", "DESCRIBE", "DESC")]
        if first[0]:
            return self._create(source, statement)
        if first[1]:
            return self._explain(source, statement)
        if first[2]:
            return Answer("\n".join(self.names()))
        if first[3] or first[4]:
            return self._describe(source, statement)
        node = tree(source, statement)
        if isinstance(node, exp.Drop):
            return self._drop(source, node)
        if isinstance(node, exp.Query):
            return Rows(self._flow(source, node))
        raise source.error(BadSql, f"there is no statement {statement.tokens[0].text.upper()}", statement.span,
                           has="SELECT, INSERT INTO, CREATE VIEW, CREATE TABLE, DROP, EXPLAIN, DESCRIBE, SHOW TABLES")

    def _flow(self, source: Text, node: exp.Expr) -> Flow:
        return Flow(Planner(source, self.inputs).query(node).op)

    def _create(self, source: Text, statement: Statement) -> Step:
        is_query = any(statement.starts(*words) for words in (
            ("CREATE", "VIEW"), ("CREATE", "TEMPORARY", "VIEW"), ("CREATE", "OR"))) or _has_query(statement)
        if any(word(token) == "FUNCTION" for token in statement.tokens[1:3]):
            return self._function(source, statement)
        if not is_query:
            table = declared(source, statement)
            known = (*SINKS, *self._connectors)
            if table.connector not in known:
                raise table.error(f"there is no connector {table.connector!r}", guess(table.connector, known),
                                  has=", ".join(known))
            self.tables[table.name] = table
            if table.connector in ("filesystem", *self._connectors):
                self._waiting[table.name] = None
                self._find_sources()
            return Done(f"table {table.name}")
        node = tree(source, statement)
        if not isinstance(node, exp.Create) or node.args.get("kind") not in ("VIEW", "TABLE") or not isinstance(
                node.args.get("expression"), exp.Query):
            raise source.error(BadSql, "CREATE makes a view of a query, or a table", statement.span,
                               hint="CREATE VIEW v AS SELECT ...")
        others = [each for each in (node.args["properties"].expressions if node.args.get("properties") else [])
                  if not isinstance(each, exp.TemporaryProperty)]
        if others:
            raise source.error(BadSql, "a view of a query takes no options", others[0])
        columns = node.this.expressions if isinstance(node.this, exp.Schema) else []
        name = (node.this.this if isinstance(node.this, exp.Schema) else node.this).name
        if node.args.get("exists") and name in self.names():
            return Done(f"{node.args['kind'].lower()} {name}, which is there")
        flow = self._flow(source, node.args["expression"])
        if columns:
            if len(columns) != len(flow.columns) or not all(isinstance(each, exp.Identifier) for each in columns):
                raise source.error(BadSql, f"the query has {len(flow.columns)} columns, and {len(columns)} are named",
                                   node.this, query=", ".join(flow.columns))
            flow = flow.select(**{each.name: col(given) for each, given in zip(columns, flow.columns, strict=True)})
        if node.args["kind"] == "TABLE":
            from scalein.api.sources import from_arrow

            flow = from_arrow(flow.collect())
        self.inputs.add(name, flow)
        return Done(f"{node.args['kind'].lower()} {name}")

    def _function(self, source: Text, statement: Statement) -> Step:
        """CREATE FUNCTION of one that is there already: published scripts name the class that computes it."""
        names = [token.text for token in statement.tokens[1:8]]
        start = next(k for k, name in enumerate(names) if name.upper() == "FUNCTION") + 1
        start += 3 if [name.upper() for name in names[start : start + 3]] == ["IF", "NOT", "EXISTS"] else 0
        name = names[start] if start < len(names) else ""
        if not is_function(name):
            raise source.error(BadSql, f"the function {name} cannot be made in SQL", statement.span,
                               hint="a compiled one in Python: @si.udf, in with_columns before the query")
        return Done(f"function {name}, which is there")

    def _find_sources(self) -> None:
        """Makes tables that are there by now ones that queries can read: a folder may be written to first."""
        for name in [*self._waiting]:
            table = self.tables[name]
            if table.is_there:
                del self._waiting[name]
                self._add_source(table)

    def _add_source(self, table: Table) -> None:
        flow = table.flow(self._connectors)
        self.inputs.add(table.name, flow)
        if table.computed:
            columns = ", ".join(f'{text} AS "{name}"' for name, text in table.computed.items())
            source = Text(f'SELECT *, {columns} FROM "{table.name}"', table.source.at)
            (statement,) = statements(source)
            flow = self._flow(source, tree(source, statement))
        if table.watermark is not None:
            flow = flow.with_watermark(*table.watermark)
        self.inputs.add(table.name, flow)

    def _explain(self, source: Text, statement: Statement) -> Step:
        start, end = statement.span
        match = re.match(r"EXPLAIN\s+(ANALYZE\s+)?", source.text[start:end], re.IGNORECASE)
        skipped = start + (0 if match is None else match.end())
        analyze = match is not None and match[1] is not None
        # The tokenizer takes what follows EXPLAIN for one text. Blanks for the word leave all places as they are.
        rest = Text(re.sub(r"[^\n]", " ", source.text[:skipped]) + source.text[skipped:end], source.at)
        found = statements(rest)
        if not found:
            raise source.error(BadSql, "EXPLAIN takes a query", statement.span, hint="EXPLAIN SELECT ...")
        node = tree(rest, found[0])
        if not isinstance(node, exp.Query):
            raise source.error(BadSql, "EXPLAIN takes a query", statement.span, hint="EXPLAIN SELECT ...")
        return Answer(self._flow(rest, node).explain("fused" if analyze else "logical", analyze=analyze))

    def _describe(self, source: Text, statement: Statement) -> Step:
        name = statement.tokens[-1].text
        op = self.inputs.op(name)
        if op is None:
            raise source.error(BadSql, f"there is no table {name!r}", statement.span, has=", ".join(self.names()),
                               hint=guess(name, self.names()))
        width = max(map(len, op.schema.names), default=0)
        return Answer("\n".join(f"{field.name:<{width}}  {field.dtype!r}{'?' * field.nullable}" for field in op.schema))

    def _drop(self, source: Text, node: exp.Drop) -> Step:
        named = node.args.get("tables") or [node.this]
        for each in named:
            table, view = self.tables.pop(each.name, None), self.inputs.drop(each.name)
            self._waiting.pop(each.name, None)
            if table is None and not view and not node.args.get("exists"):
                raise source.error(BadSql, f"there is no table {each.name!r}", each, has=", ".join(self.names()),
                                   hint=guess(each.name, self.names()))
        return Done(f"dropped {', '.join(each.name for each in named)}")

    def _insert(self, source: Text, statement: Statement) -> Insert:
        self._find_sources()
        node = tree(source, statement)
        if not isinstance(node, exp.Insert) or not isinstance(node.expression, exp.Query):
            raise source.error(BadSql, "INSERT takes a query", statement.span, hint="INSERT INTO t SELECT ...")
        into = node.this.this if isinstance(node.this, exp.Schema) else node.this
        table = self.tables.get(into.name)
        if table is None:
            raise source.error(BadSql, f"INSERT writes to a table that CREATE TABLE made, not {into.name!r}", into,
                               has=", ".join(self.tables) or "none", hint=guess(into.name, self.tables))
        flow = self._flow(source, node.expression)
        if table.columns:
            wanted = [*table.columns, *table.computed]
            if isinstance(node.this, exp.Schema):
                flow, wanted = self._placed(source, node.this, table, flow)
            if len(wanted) != len(flow.columns):
                raise source.error(BadSql, f"the query has {len(flow.columns)} columns and the table {table.name!r} "
                                   f"{len(wanted)}", into, query=", ".join(flow.columns), table=", ".join(wanted))
            flow = flow.select(**{name: col(given) for name, given in zip(wanted, flow.columns, strict=True)})
            others = {name: kind for name, kind in table.columns.items() if flow.schema.field(name).type != kind}
            flow = flow.cast(others) if others else flow
        return Insert(flow, table)

    def _placed(self, source: Text, schema: exp.Expr, table: Table, flow: Flow) -> tuple[Flow, list[str]]:
        """The columns of the query under the names that INSERT INTO t (...) lists, in the order of the table.

        Those that are not listed are null.
        """
        own = [*table.columns, *table.computed]
        listed: list[str] = []
        for each in schema.expressions:
            known = next((name for name in own if name.lower() == each.name.lower()), None)
            if known is None or known in listed:
                raise source.error(BadSql, f"the table {table.name!r} has no column {each.name!r}" if known is None else
                                   f"{each.name!r} is listed twice", each, has=", ".join(own),
                                   hint=guess(each.name, own) if known is None else None)
            listed.append(known)
        if len(listed) != len(flow.columns):
            raise source.error(BadSql, f"the query has {len(flow.columns)} columns, and {len(listed)} are listed",
                               schema, query=", ".join(flow.columns), listed=", ".join(listed))
        given = dict(zip(listed, flow.columns, strict=True))
        columns: dict[str, Column] = {}
        for name in own:
            if name in given:
                columns[name] = col(given[name])
            elif name in table.columns:
                columns[name] = lit(None).cast(table.columns[name])
        return flow.select(**columns), list(columns)


def _has_query(statement: Statement) -> bool:
    """Whether AS comes right after the name, as in CREATE TABLE t AS SELECT."""
    words = [word(token) for token in statement.tokens[:8]]
    return "AS" in words and ("(" not in words or words.index("AS") < words.index("("))
