"""fuse: neighbouring pipes into one, and pipes into the group that follows: one kernel for all.

The columns that the first pipe gave become a `Let`: they are bound, not computed, until a later
step needs them, and each is computed once a loop however often it is named (a costly one once a block:
`llvm_backend/kept.py`).

A `distinct` is a step like others, but its rows must not be run twice, as groups do that try a few rows first
or read their input again: so a group starts anew behind it. So does a second distinct, which keeps it
to one table a kernel.
"""

from __future__ import annotations

from dataclasses import replace

from scalein.ir.exprs import Col, Named
from scalein.ir.physical import Chain, Grouped, Host, JoinTable, Node, Ordered, Pipe, Scan, Take
from scalein.ir.stages import Let, Step


def fuse(root: Node) -> Node:
    """Pipe(Pipe(x, a), b) -> Pipe(x, a, let, b), bottom up."""
    match root:
        case Scan():
            return root
        case Chain():
            return replace(root, inputs=tuple(fuse(i) for i in root.inputs))
        case Pipe() | Grouped():
            node = replace(root, input=fuse(root.input), joins=tuple((n, _fuse_table(t)) for n, t in root.joins))
            return _absorb(node)
        case Host() | Take() | Ordered():
            return replace(root, input=fuse(root.input))


def _fuse_table(table: JoinTable) -> JoinTable:
    return replace(table, input=fuse(table.input))


def _absorb(node: Pipe | Grouped) -> Node:
    before = node.input
    if not isinstance(before, Pipe):
        return node
    if before.fresh is not None and (isinstance(node, Grouped) or node.fresh is not None):
        return node
    steps: tuple[Step, ...] = (*before.steps, *_let(before), *node.steps)
    return replace(node, input=before.input, steps=steps, joins=(*before.joins, *node.joins))


def _let(pipe: Pipe) -> tuple[Let, ...]:
    """The pipe's columns as a step; none if every column keeps its name."""
    if all(isinstance(i.expr, Col) and i.expr.name == i.name for i in pipe.items):
        return ()
    return (Let(tuple(Named(i.name, i.expr) for i in pipe.items)),)
