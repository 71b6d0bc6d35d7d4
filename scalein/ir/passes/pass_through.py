"""Which columns of a pipe are its input's own: handed on without a copy, or taken from it by row number.

Where every row stays in its place, an untouched column is the input's. Where rows go or come, a kernel writes them
anew, except for nested columns, which no kernel reads: it writes down the row numbers instead, and pyarrow takes
those rows. The same goes for nested columns of a joined table.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from scalein.dtypes import I32, I64
from scalein.ir.exprs import Col, Expr, Named, type_of
from scalein.ir.physical import Pipeline, WindowAggregate
from scalein.ir.stages import Probe, ProjectStep, Step

ROW = "#row"  # the number of a row in its batch, in a kernel
PLACE = "#at"  # the number of a row in a joined table, as a column of that table


class Origin(NamedTuple):
    """A column of a pipe's input, or of the table of a join."""

    join: int | None
    column: str


def split_items(pipe: Pipeline) -> tuple[dict[int, str], tuple[Named, ...]]:
    """Columns handed on as they are (position -> input column), and those a kernel must write."""
    passed: dict[int, str] = {}
    if all(isinstance(step, ProjectStep) for step in pipe.steps):  # every row stays, in its place
        origins = {i: _origin(pipe, item) for i, item in enumerate(pipe.items)}
        passed = {i: origin.column for i, origin in origins.items() if origin is not None}
    taken = taken_items(pipe)
    return passed, tuple(item for i, item in enumerate(pipe.items) if i not in passed and i not in taken)


def taken_items(pipe: Pipeline) -> dict[int, Origin]:
    """Nested columns behind steps that change which rows there are: position -> where they come from."""
    if all(isinstance(step, ProjectStep) for step in pipe.steps):
        return {}
    origins = {i: _origin(pipe, item) for i, item in enumerate(pipe.items) if type_of(item.expr).is_nested}
    return {i: origin for i, origin in origins.items() if origin is not None}


def row_numbers(pipe: Pipeline) -> dict[int | None, Named]:
    """What a kernel writes for `taken_items`: a column of row numbers for the input (None) and for each join."""
    wanted = {origin.join for origin in taken_items(pipe).values()}
    found: dict[int | None, Named] = {None: Named(ROW, Col(ROW, I64, False))} if None in wanted else {}
    for step in pipe.steps:
        if isinstance(step, Probe) and step.table in wanted:
            name = f"{PLACE}.{step.table}"
            found[step.table] = Named(name, Col(name, I32, step.how == "left"))
    return found


def kernel_steps(node: Pipeline | WindowAggregate) -> tuple[Step, ...]:
    """The steps as a kernel can do them: a probe keeps no nested column, but its place in the table, if it is asked."""
    return tuple(_without_nested(node, step) if isinstance(step, Probe) else step for step in node.steps)


def _without_nested(node: Pipeline | WindowAggregate, probe: Probe) -> Probe:
    schema = dict(node.joins)[probe.table].input.schema
    keep = [pair for pair in probe.keep if not schema[pair[1]].dtype.is_nested]
    if len(keep) < len(probe.keep) and isinstance(node, Pipeline):
        keep.append((f"{PLACE}.{probe.table}", PLACE))
    return replace(probe, keep=tuple(keep))


def is_copy_free(pipe: Pipeline) -> bool:
    """Whether a pipe has nothing to compute, and so no kernel."""
    return not split_items(pipe)[1] and all(isinstance(step, ProjectStep) for step in pipe.steps)


def _origin(pipe: Pipeline, item: Named) -> Origin | None:
    """The column that an item is, through renaming steps."""
    expr: Expr | None = item.expr
    for step in reversed(pipe.steps):
        if not isinstance(expr, Col):
            return None
        match step:
            case ProjectStep(items):
                expr = next((i.expr for i in items if i.name == expr.name), None)
            case Probe(keep=keep):
                kept = dict(keep).get(expr.name)
                if kept is not None:
                    return Origin(step.table, kept)
    return Origin(None, expr.name) if isinstance(expr, Col) else None
