"""Error locations: the user's line of the expression that failed, which cached machine code cannot contain."""

from __future__ import annotations

import re

from scalein.errors import ComputeError, SourceLoc
from scalein.ir import ops
from scalein.ir.exprs import Call, walk
from scalein.ir.passes.host_steps import HOST
from scalein.ir.physical import Host, Node, walk_nodes
from scalein.ir.printer import show_brief, show_expr, show_operand
from scalein.ir.rewrite import walk_ops


def located(error: ComputeError, root: ops.Op, program: Node) -> ComputeError:
    """The error in terms of the user's expressions, with the line of the expression in its backticks."""
    text = _in_user_terms(error.what, program)
    error = error if text == error.what else error.saying(text)
    if "at" in error.facts:
        return error
    for op in walk_ops(root):
        for expr, _ in op.exprs():
            for node in walk(expr):
                if isinstance(node, Call) and node.at.line and f"`{show_brief(node)}`" in error.what:
                    return _at(error, node.at)
        if isinstance(op, ops.Aggregate):
            for named in op.aggs:
                if named.agg.at.line and error.what.endswith(f"the sum `{named.name}`"):
                    return _at(error, named.agg.at)
    return error


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
