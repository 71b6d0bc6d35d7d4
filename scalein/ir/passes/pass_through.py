"""Which columns of a pipe are its input's own: handed on without a copy, or taken from it by row number.

Where every row stays in its place, an untouched column is the input's. Where rows go or come, a kernel writes them
anew, except for nested columns, which no kernel reads: it writes down the row numbers instead, and pyarrow takes
those rows. The same goes for nested columns of a joined table.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from scalein.dtypes import I32, I64
from scalein.ir.exprs import Col, Named, type_of
from scalein.ir.internal_names import internal
from scalein.ir.physical import Pipeline, WindowAggregate
from scalein.ir.stages import Probe, ProjectStep, Step

ROW = internal("row")  # the number of a row in its batch, in a kernel
PLACE = internal("at")  # the number of a row in a joined table, as a column of that table


class Origin(NamedTuple):
    """A column of a pipe's input, or of the table of a join."""

    join: int | None
    column: str


def split_items(pipe: Pipeline) -> tuple[dict[int, str], tuple[Named, ...]]:
    """Columns handed on as they are (position -> input column), and those a kernel must write."""
    passed: dict[int, str] = {}
    if all(isinstance(step, ProjectStep) for step in pipe.steps):  # every row stays, in its place
        passed = {i: origin.column for i, origin in _origins(pipe, dict(enumerate(pipe.items))).items()}
    taken = taken_items(pipe)
    return passed, tuple(item for i, item in enumerate(pipe.items) if i not in passed and i not in taken)


def taken_items(pipe: Pipeline) -> dict[int, Origin]:
    """Nested columns after steps that change which rows there are: position -> origin."""
    if all(isinstance(step, ProjectStep) for step in pipe.steps):
        return {}
    return _origins(pipe, {i: item for i, item in enumerate(pipe.items) if type_of(item.expr).is_nested})


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
    """The steps as a kernel runs them: a probe yields no nested column, but its row in the table, if that is needed."""
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


def _origins(pipe: Pipeline, items: dict[int, Named]) -> dict[int, Origin]:
    """The columns that some items are, by position, through renaming steps; those that are computed are left out."""
    found: dict[int, Origin] = {}
    names = {i: item.expr.name for i, item in items.items() if isinstance(item.expr, Col)}
    for step in reversed(pipe.steps):
        if not names:
            break
        match step:
            case ProjectStep(projected):
                made = {item.name: item.expr for item in projected}
                names = {i: expr.name for i, name in names.items() if isinstance(expr := made.get(name), Col)}
            case Probe(keep=keep):
                kept = dict(keep)
                found |= {i: Origin(step.table, kept[name]) for i, name in names.items() if name in kept}
                names = {i: name for i, name in names.items() if name not in kept}
    found |= {i: Origin(None, name) for i, name in names.items()}
    return {i: found[i] for i in items if i in found}
