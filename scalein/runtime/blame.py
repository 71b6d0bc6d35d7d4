"""Where an error of a row comes from: the line that wrote the expression, which cached machine code cannot know."""

from __future__ import annotations

from scalein.errors import ComputeError, SourceLoc
from scalein.ir import ops
from scalein.ir.exprs import Call, walk
from scalein.ir.printer import show_expr
from scalein.ir.rewrite import exprs_of, walk_ops


def placed(error: ComputeError, root: ops.Op) -> ComputeError:
    """The error with the line of the expression that it names in backticks; itself if there is none to find."""
    if "at" in error.facts:
        return error
    for op in walk_ops(root):
        for expr, _ in exprs_of(op):
            for node in walk(expr):
                if isinstance(node, Call) and node.at.line and f"`{show_expr(node)}`" in error.what:
                    return _at(error, node.at)
        if isinstance(op, ops.Aggregate):
            for named in op.aggs:
                if named.agg.at.line and error.what.endswith(f"the sum `{named.name}`"):
                    return _at(error, named.agg.at)
    return error


def _at(error: ComputeError, at: SourceLoc) -> ComputeError:
    others = {name: fact for name, fact in error.facts.items() if name != "hint"}
    return ComputeError(error.what, at=at, hint=error.hint, **others)
