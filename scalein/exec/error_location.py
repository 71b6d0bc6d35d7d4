"""Error locations: the user's line of the expression that failed, which cached machine code cannot contain."""

from __future__ import annotations

import re

from scalein.errors import ComputeError, SourceLoc
from scalein.ir import ops
from scalein.ir.exprs import Call, walk
from scalein.ir.internal_names import internal, is_internal
from scalein.ir.passes.host_steps import HOST
from scalein.ir.physical import Host, Node, walk_nodes
from scalein.ir.printer import show_agg, show_brief, show_expr, show_operand
from scalein.ir.rewrite import walk_ops


def located(error: ComputeError, root: ops.Op, program: Node) -> ComputeError:
    """The error in terms of the user's expressions, with the line of the expression in its backticks."""
    text = _in_user_terms(error.what, program)
    found = None if "at" in error.facts else _place(text, root)
    text = _with_aggregates(text, root if found is None else found[0])
    error = error if text == error.what else error.saying(text)
    return error if found is None else _at(error, found[1])


def _place(text: str, root: ops.Op) -> tuple[ops.Op, SourceLoc] | None:
    """The op and the line of what failed."""
    for op in walk_ops(root):
        for expr, _ in op.exprs():
            for node in walk(expr):
                if isinstance(node, Call) and node.at.line and f"`{show_brief(node)}`" in text:
                    return op, node.at
        if isinstance(op, ops.Aggregate):
            for named in op.aggs:
                if named.agg.at.line and text.endswith(f"the sum `{named.name}`"):
                    return op, named.agg.at
    return None


def _with_aggregates(text: str, root: ops.Op) -> str:
    """The text with the aggregates of an expression (`GroupBy.agg`) in the place of their internal columns."""
    names = {named.name: show_agg(named.agg) for op in walk_ops(root) if isinstance(op, ops.Aggregate)
             for named in op.aggs if is_internal(named.name)}
    return re.sub(rf"{internal('agg')}\d+", lambda found: names.get(found[0], found[0]), text) if names else text


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
