"""Where an error of a row comes from: the line that wrote the expression, which cached machine code cannot know."""

from __future__ import annotations

import re

from scalein.errors import ComputeError, SourceLoc
from scalein.ir import ops
from scalein.ir.exprs import Call, walk
from scalein.ir.physical import Host, Node, walk_nodes
from scalein.ir.printer import show_brief, show_expr, show_operand
from scalein.ir.rewrite import walk_ops


def placed(error: ComputeError, root: ops.Op, program: Node) -> ComputeError:
    """The error with what the user wrote for columns of ours, and the line of the expression in its backticks."""
    words = _in_their_words(error.what, program)
    error = error if words == error.what else error.saying(words)
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


def _in_their_words(text: str, program: Node) -> str:
    """The text with the user's expressions for columns of ours, in brackets where they need some."""
    wrote = {origin.name: origin.expr for node in walk_nodes(program) if isinstance(node, Host)
             for origin in node.origins}

    def shown(found: re.Match[str]) -> str:
        expr = wrote.get(found[0])
        return found[0] if expr is None else show_expr(expr) if found["alone"] else show_operand(expr)

    return _OURS.sub(shown, text)


_OURS = re.compile(r"(?P<alone>((?<=[(`])|(?<=, ))#host\d+(?=[),`]))|#host\d+")


def _at(error: ComputeError, at: SourceLoc) -> ComputeError:
    others = {name: fact for name, fact in error.facts.items() if name != "hint"}
    return ComputeError(error.what, at=at, hint=error.hint, **others)
