"""Error locations: the user's line of the expression that failed, which cached machine code cannot contain."""

from __future__ import annotations

import re
from collections.abc import Iterator

from scalein.errors import ComputeError, SourceLoc
from scalein.ir import ops
from scalein.ir.exprs import Call, Expr
from scalein.ir.passes.host_steps import HOST
from scalein.ir.physical import Host, Node, walk_nodes
from scalein.ir.printer import show_brief, show_expr, show_operand, with_aggregates
from scalein.ir.rewrite import walk_ops


def located(error: ComputeError, root: ops.Op, program: Node) -> ComputeError:
    """The error in terms of the user's expressions, with the line of the expression in its backticks."""
    text = _in_user_terms(error.what, program)
    found = None if "at" in error.facts else _place(text, root)
    text = with_aggregates(text, root if found is None else found[0])
    error = error if text == error.what else error.saying(text)
    return error if found is None else _at(error, found[1])


def _place(text: str, root: ops.Op) -> tuple[ops.Op, SourceLoc] | None:
    """The op and the line of what failed."""
    for op in walk_ops(root):
        for expr, _ in op.exprs():
            for node, at in _with_lines(expr, op.at):
                if at.line and f"`{show_brief(node)}`" in text:
                    return op, at
        if isinstance(op, ops.Aggregate):
            for named in op.aggs:
                if named.agg.at.line and text.endswith(f"the sum `{named.name}`"):
                    return op, named.agg.at
    return None


def _with_lines(expr: Expr, at: SourceLoc) -> Iterator[tuple[Call, SourceLoc]]:
    """The calls of an expression; one that the user did not write, such as an implicit cast, has the line of what is
    around it.
    """
    waiting, seen = [(expr, at)], set[int]()
    while waiting:
        node, at = waiting.pop()
        if isinstance(node, Call) and id(node) not in seen:
            seen.add(id(node))
            at = node.at if node.at.line else at
            yield node, at
            waiting += [(arg, at) for arg in reversed(node.args)]


def _in_user_terms(text: str, program: Node) -> str:
    """The text with internal columns replaced by the user's expressions, in brackets where necessary."""
    origins = {origin.name: origin.expr for node in walk_nodes(program) if isinstance(node, Host)
               for origin in node.origins}

    def shown(found: re.Match[str]) -> str:
        expr = origins.get(found[0])
        return found[0] if expr is None else show_expr(expr) if found["alone"] else show_operand(expr)

    return _OURS.sub(shown, text)


_OURS = re.compile(rf"(?P<alone>((?<=[(`])|(?<=, )){HOST}\d+(?=[),`]))|{HOST}\d+")


def _at(error: ComputeError, at: SourceLoc) -> ComputeError:
    others = {name: fact for name, fact in error.facts.items() if name != "hint"}
    return ComputeError(error.what, at=at, hint=error.hint, **others)
