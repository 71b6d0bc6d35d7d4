"""compile_flow(): the whole pipeline on one screen.

    ops      fold -> push_down -> merge_filters -> top_rows -> prune      each verified
    stages   physicalize -> fuse                                          each verified
    plans    cached by digest, without data: see `plan_of`
    kernels  specialise -> lower_stage -> verify -> optimise -> emit, at run time, cached by digest
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from scalein.ir import ops
from scalein.ir.exprs import Call, walk
from scalein.ir.functions.registry import is_host
from scalein.ir.passes import OP_PASSES
from scalein.ir.passes.fuse import fuse
from scalein.ir.passes.physicalize import physicalize
from scalein.ir.physical import Host, Node, walk_nodes
from scalein.ir.rewrite import rewrite, walk_ops
from scalein.ir.verify import verify_ops, verify_program

Trace = Callable[[str, ops.Op | Node], None]

_MAX_PLANS = 64
_plans: OrderedDict[tuple[bytes, tuple[int, ...]], Node] = OrderedDict()  # those used last; they hold no data
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Input:
    """Stands for the data of a source in a plan that is bound to its data when it runs."""

    number: int  # among the sources of the flow, in the order of `walk_ops`


def plan_of(op: ops.Op) -> tuple[Node, tuple[ops.Source, ...]]:
    """The plan of a flow with an `Input` in the place of each source's data, and the sources by number.

    It is found by the digest, and by which ops are shared: digests do not tell a shared source from an equal one.
    """
    numbers = {id(each): number for number, each in enumerate(walk_ops(op))}
    sources = tuple(each for each in walk_ops(op) if isinstance(each, ops.Source))
    key = op.digest, tuple(numbers[id(below)] for each in walk_ops(op) for below in each.inputs)
    with _lock:
        if key in _plans:
            _plans.move_to_end(key)
            return _plans[key], sources
    open_ = {id(source): replace(source, data=Input(number)) for number, source in enumerate(sources)}
    plan = compile_flow(rewrite(op, lambda each: open_.get(id(each))))
    if not any(isinstance(node, Host) and _holds_function(node) for node in walk_nodes(plan)):
        with _lock:
            _plans[key] = plan
            while len(_plans) > _MAX_PLANS:
                _plans.popitem(last=False)
    return plan, sources


def _holds_function(node: Host) -> bool:
    """Whether a Python function is called, which may hold anything."""
    calls = (part for item in node.items for part in walk(item.expr) if isinstance(part, Call))
    return isinstance(node.op, ops.MapBatches) or any(call.fn == "udf" and is_host(call) for call in calls)


def compile_flow(op: ops.Op, trace: Trace | None = None) -> Node:
    """The program of an op tree; every pass is handed to `trace`."""
    tell = trace or (lambda name, plan: None)
    known: dict[int, ops.Op] = {}  # what has been verified
    verify_ops(op, known)
    tell("resolve", op)
    for step in OP_PASSES:
        op = step(op)
        verify_ops(op, known)
        tell(step.__name__, op)
    node = physicalize(op)
    verify_program(node)
    tell("physicalize", node)
    node = fuse(node)
    verify_program(node)
    tell("fuse", node)
    return node
