"""A node cut at one of its steps, so that an operator which spills runs between the two parts: the columns of the rows
at that step, and those that the second part reads.
"""

from __future__ import annotations

from collections.abc import Sequence

from scalein.dtypes import Schema
from scalein.ir import ops
from scalein.ir.exprs import Col, Expr, type_of, walk
from scalein.ir.physical import JoinBuild, Pipeline, Scan, WindowAggregate
from scalein.ir.stages import Probe, ProjectStep, Step, step_exprs
from scalein.kernels.prepare import table_exprs


def scan_of_rows(schema: Schema) -> Scan:
    """The input of a node that reads rows which an operator hands on."""
    return Scan(ops.Source("spilled", schema.arrow, tuple(schema.names)))


def columns_after(node: Pipeline | WindowAggregate, steps: Sequence[Step]) -> dict[str, Col]:
    """The columns that there are after some steps of a node."""
    found = {field.name: Col(field.name, field.dtype, field.nullable) for field in node.input.schema}
    for step in steps:
        if isinstance(step, ProjectStep):
            found = {item.name: Col(item.name, type_of(item.expr), item.expr.nullable) for item in step.items}
        elif isinstance(step, Probe):
            found |= {column.name: column for column in joined_columns(step, dict(node.joins)[step.table])}
    return found


def joined_columns(probe: Probe, table: JoinBuild) -> list[Col]:
    """The columns that a probe adds."""
    fields = table.input.schema
    return [Col(name, fields[column].dtype, fields[column].nullable or probe.how == "left")
            for name, column in probe.keep]


def used_after(node: Pipeline | WindowAggregate, at: int) -> set[str]:
    """The names that are read after step `at`; some may be of columns that later steps make."""
    return names_of([*step_exprs(node.steps[at + 1 :]), *_outputs(node)])


def names_of(exprs: Sequence[Expr]) -> set[str]:
    """The columns that expressions read."""
    return {part.name for expr in exprs for part in walk(expr) if isinstance(part, Col)}


def _outputs(node: Pipeline | WindowAggregate) -> list[Expr]:
    if isinstance(node, Pipeline):
        return [item.expr for item in node.items]
    return [*node.keys, *table_exprs(node.table)]
