"""Texts of several statements: views and tables, then a query."""

from __future__ import annotations

from sqlglot import exp

from scalein.api.flow import Flow
from scalein.errors import BadSql, SourceLoc
from scalein.sql.inputs import Inputs
from scalein.sql.parse import Statement, Text, statements, tree
from scalein.sql.plan import Planner


def flow_of(text: str, inputs: Inputs, at: SourceLoc) -> Flow:
    """The flow of the last statement; those before make views and tables."""
    source = Text(text, at)
    found = statements(source)
    if not found:
        raise source.error(BadSql, "there is no statement", (0, len(text)), hint="SELECT * FROM t")
    for statement in found[:-1]:
        execute(source, statement, inputs)
    return query(source, found[-1], inputs)


def query(source: Text, statement: Statement, inputs: Inputs) -> Flow:
    """The flow of a query."""
    node = tree(source, statement)
    return Flow(Planner(source, inputs).query(node).op)


def execute(source: Text, statement: Statement, inputs: Inputs) -> None:
    """Makes a view."""
    node = tree(source, statement)
    if isinstance(node, exp.Create) and node.args.get("kind") == "VIEW":
        relation = Planner(source, inputs).query(node.args["expression"])
        inputs.add(node.this.name, Flow(relation.op))
        return
    raise source.error(BadSql, "only the last statement is a query", node)
