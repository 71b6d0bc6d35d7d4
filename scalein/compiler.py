"""compile_flow(): the whole pipeline on one screen.

    ops      fold -> push_down -> merge_filters -> top_rows -> prune      each verified
    stages   split -> fuse                                                each verified; split calls place_state
    kernels  specialise -> lower_stage -> verify -> optimise -> emit, at run time, cached by digest
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable

from scalein.errors import BadName
from scalein.ir import ops
from scalein.ir.passes import OP_PASSES
from scalein.ir.passes.fuse import fuse
from scalein.ir.passes.physicalize import split
from scalein.ir.physical import Node
from scalein.ir.rewrite import walk_ops
from scalein.ir.verify import verify_ops, verify_program

Trace = Callable[[str, ops.Op | Node], None]

# Programs of the flows used last, by the op's identity (which the entry keeps from being reused): a
# flow that is collected again is not compiled again.
_KEPT = 64
_programs: OrderedDict[int, tuple[ops.Op, Node]] = OrderedDict()
_lock = threading.Lock()


def program_of(op: ops.Op) -> Node:
    """The program of an op tree, compiled when it is first asked for."""
    with _lock:
        known = _programs.get(id(op))
        if known is not None:
            _programs.move_to_end(id(op))
            return known[1]
    node = compile_flow(op)
    with _lock:
        _programs[id(op)] = (op, node)
        while len(_programs) > _KEPT:
            _programs.popitem(last=False)
    return node


def compile_flow(op: ops.Op, trace: Trace | None = None) -> Node:
    """The program of an op tree; every pass is handed to `trace`."""
    tell = trace or (lambda name, plan: None)
    _refuse_our_names(op)
    known: dict[int, ops.Op] = {}  # what has been verified
    verify_ops(op, known)
    tell("resolve", op)
    for step in OP_PASSES:
        op = step(op)
        verify_ops(op, known)
        tell(step.__name__, op)
    node = split(op)
    verify_program(node)
    tell("split", node)
    node = fuse(node)
    verify_program(node)
    tell("fuse", node)
    return node


# Names that programs and kernels give to columns of their own: see `stage_printer` for what they stand for.
_OURS = re.compile(r"#((host|materialized|by|lookup|acc)\d+|row|at|(id|ids|at|code|match|start|count|null)\..*)|\?row")


def _refuse_our_names(root: ops.Op) -> None:
    for op in walk_ops(root):
        if not op.names_columns:
            continue
        for name in op.schema.names:
            if _OURS.fullmatch(name):
                raise BadName(f"a column is called {name!r}, which is a name that scalein keeps for itself", at=op.at,
                              hint=f"rename it, for example to {name[1:]!r}")
