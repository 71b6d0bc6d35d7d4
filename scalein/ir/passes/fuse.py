"""fuse: neighbouring pipes into one, and pipes into the group that follows: one kernel for all.

The columns that the first pipe gave become a `ProjectStep`: they are bound, not computed, until a later
step needs them, and each is computed once a loop however often it is named (a costly one once a block:
`llvm_backend/materialize.py`).

A `distinct` is a step like others, but its rows must not be run twice, as groups do that try a few rows first
or read their input again: so a group starts a new stage after it. So does a second distinct, which keeps it
to one table a kernel.

A kernel ends at every node but a `Pipeline`; which node an op becomes, `Op.physical` says (`ir/ops/`).
"""

from __future__ import annotations

from dataclasses import replace

from scalein.ir.exprs import Col
from scalein.ir.physical import Node, OuterJoin, Pipeline, Scan, Union, WindowAggregate, walk_nodes
from scalein.ir.stages import ProjectStep, Step


def fuse(root: Node) -> Node:
    """Pipeline(Pipeline(x, a), b) -> Pipeline(x, a, project, b), bottom up."""
    done: dict[int, Node] = {}
    for node in walk_nodes(root):
        done[id(node)] = _fused(node, done)
    return done[id(root)]


def _fused(node: Node, done: dict[int, Node]) -> Node:
    match node:
        case Scan():
            return node
        case Union():
            return replace(node, inputs=tuple(done[id(below)] for below in node.inputs))
        case Pipeline() | WindowAggregate():
            joins = tuple((number, replace(table, input=done[id(table.input)])) for number, table in node.joins)
            return _absorb(replace(node, input=done[id(node.input)], joins=joins))
        case OuterJoin():
            pipe = done[id(node.input)]
            assert isinstance(pipe, Pipeline)
            return replace(node, input=pipe)
        case _:
            return replace(node, input=done[id(node.input)])


def _absorb(node: Pipeline | WindowAggregate) -> Node:
    before = node.input
    if not isinstance(before, Pipeline):
        return node
    if before.dedup is not None and (isinstance(node, WindowAggregate) or node.dedup is not None):
        return node
    steps: tuple[Step, ...] = (*before.steps, *_let(before), *node.steps)
    return replace(node, input=before.input, steps=steps, joins=(*before.joins, *node.joins))


def _let(pipe: Pipeline) -> tuple[ProjectStep, ...]:
    """The pipeline's columns as a step; none if every column keeps its name."""
    if all(isinstance(i.expr, Col) and i.expr.name == i.name for i in pipe.items):
        return ()
    return (ProjectStep(pipe.items),)
