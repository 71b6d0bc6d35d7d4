"""What ops share to say where a predicate may go, and what a column costs."""

from __future__ import annotations

from collections.abc import Mapping

from scalein.dtypes import Field
from scalein.ir.exprs import Call, Col, Expr, Lit, Named, columns, type_of, walk
from scalein.ir.functions.registry import REGISTRY, can_fail, has_host, makes_text
from scalein.ir.functions.udf import has_udf
from scalein.ir.rewrite import substitute

_SIZE_LIMIT = 100  # nodes


def over(items: Mapping[str, Expr], predicate: Expr) -> Expr | None:
    """A predicate with its columns replaced by the expressions that make them; None if it must stay above.

    They are then computed for the filter and again for the rows it keeps. That is cheap, but for what pyarrow
    or a udf computes, and for text that is made: so that stays. So does what would outgrow `_SIZE_LIMIT`: twenty steps
    of x = x * x are a million nodes when written as one expression.
    """
    made = {name: items[name] for name in columns(predicate)}
    if any(isinstance(expr, Call) and (has_host(expr) or has_udf(expr) or makes_text(expr)) for expr in made.values()):
        return None
    below = substitute(predicate, made)
    return below if below.size <= max(_SIZE_LIMIT, predicate.size) else None


def is_same_within_group(expr: Expr) -> bool:
    """Whether equal keys give equal answers: not so if it looks at the sign of a zero (1.0 / key > 0.0)."""
    return not any(
        isinstance(arg, Col) and type_of(arg).is_float
        for node in walk(expr)
        if isinstance(node, Call) and not REGISTRY[node.fn].canonical
        for arg in node.args
    )


def width(column: Field | Expr) -> int:
    """Bits a row, more for text than for anything else, but for what is nested."""
    dtype = column.dtype
    if dtype is None or dtype.is_nested:
        return 1 << 17
    return 1 << 16 if dtype.is_bytes else dtype.bits


def cost(item: Named) -> tuple[int, int]:
    """What it costs to compute a column, for comparisons."""
    match item.expr:
        case Lit():
            return 0, 0
        case Col() as column:
            return 1, width(column)
        case expr:
            return (3 if can_fail(expr) else 2), width(expr)
