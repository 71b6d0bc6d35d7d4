"""compile_flow(): the whole pipeline on one screen.

    ops      fold -> push_down -> merge_filters -> prune      each verified
    stages   split -> fuse                                    (place_state inside split)
    kernels  specialise -> lower_stage -> verify -> optimise -> emit, at run time, cached by digest
"""

from __future__ import annotations

from collections.abc import Callable

from scalein.ir import ops
from scalein.ir.passes import OP_PASSES
from scalein.ir.passes.fuse import fuse
from scalein.ir.passes.split import split
from scalein.ir.stages import Node
from scalein.ir.verify import verify_ops

Trace = Callable[[str, ops.Op | Node], None]


def compile_flow(op: ops.Op, trace: Trace | None = None) -> Node:
    """The program of an op tree; every pass is handed to `trace`."""
    tell = trace or (lambda name, plan: None)
    verify_ops(op)
    tell("resolve", op)
    for step in OP_PASSES:
        op = step(op)
        verify_ops(op)
        tell(step.__name__, op)
    node = split(op)
    tell("split", node)
    node = fuse(node)
    tell("fuse", node)
    return node
