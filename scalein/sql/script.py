"""A text of one or more statements as a flow: views and tables, then a query."""

from __future__ import annotations

from scalein.api.flow import Flow
from scalein.errors import BadSql, SourceLoc
from scalein.sql.inputs import Inputs
from scalein.sql.parse import Statement, Text, not_too_deep, statements, tree
from scalein.sql.plan import Planner

_OF_SESSIONS = ("CREATE", "EXPLAIN", "SHOW", "DESCRIBE", "DESC", "DROP", "INSERT")


def flow_of(text: str, inputs: Inputs, at: SourceLoc) -> Flow:
    """The flow of the last statement; those before make views and tables. EXPLAIN and its like give a text."""
    source = Text(text, at)
    with not_too_deep(source):
        found = statements(source)
        if not found:
            raise source.error(BadSql, "there is no statement", (0, len(text)), hint="SELECT * FROM t")
        if len(found) == 1 and not any(map(found[0].starts, _OF_SESSIONS)):
            return query(source, found[0], inputs)
        return _last(source, found, inputs)


def query(source: Text, statement: Statement, inputs: Inputs) -> Flow:
    """The flow of a query."""
    return Flow(Planner(source, inputs).query(tree(source, statement)).op)


def _last(source: Text, found: tuple[Statement, ...], inputs: Inputs) -> Flow:
    from scalein.api.sources import from_arrow
    from scalein.sql.session import Answer, Inserts, Rows, Session

    for number, step in enumerate(Session(inputs).steps(source.text, at=source.at)):
        is_last = number == len(found) - 1
        if isinstance(step, Inserts):
            raise source.error(BadSql, "INSERT INTO writes, and gives no rows", (0, len(source.text)),
                               hint="scalein run executes scripts; in Python: si.sql(...).to(sink) or .start(sink=...)")
        if isinstance(step, Rows) and is_last:
            return step.flow
        if isinstance(step, Answer) and is_last:
            return from_arrow({"text": [step.text]})
        if isinstance(step, Rows):
            raise source.error(BadSql, "only the last statement is a query", found[number].span)
    raise source.error(BadSql, "the last statement gives no rows", found[-1].span, hint="SELECT * FROM t")
