"""Which columns of a pipe are its input's own, handed on without a copy."""

from __future__ import annotations

from scalein.ir.exprs import Col, Expr, Named
from scalein.ir.nodes import Pipe
from scalein.ir.stages import Let


def split_items(pipe: Pipe) -> tuple[dict[int, str], tuple[Named, ...]]:
    """Columns handed on as they are (position -> input column), and those a kernel must write."""
    if all(isinstance(step, Let) for step in pipe.steps):  # every row stays, in its place
        names = {i: _origin(pipe, item) for i, item in enumerate(pipe.items)}
        passed = {i: name for i, name in names.items() if name is not None}
    else:
        passed = {}
    return passed, tuple(item for i, item in enumerate(pipe.items) if i not in passed)


def is_copy_free(pipe: Pipe) -> bool:
    """Whether a pipe has nothing to compute, and so no kernel."""
    return not split_items(pipe)[1] and not pipe.steps


def _origin(pipe: Pipe, item: Named) -> str | None:
    """The input column that an item is, through renaming steps."""
    expr: Expr | None = item.expr
    for step in reversed(pipe.steps):
        if isinstance(expr, Col) and isinstance(step, Let):
            expr = next((i.expr for i in step.items if i.name == expr.name), None)
    return expr.name if isinstance(expr, Col) else None
