"""compile_flow(): the whole pipeline on one screen.

    ops      fold -> push_down -> merge_filters -> top_rows -> prune      each verified
    stages   split -> fuse                                                each verified; split calls place_state
    plans    cached by digest, without data: see `plan_of`
    kernels  specialise -> lower_stage -> verify -> optimise -> emit, at run time, cached by digest
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from scalein.errors import BadName
from scalein.ir import ops
from scalein.ir.digest import digest
from scalein.ir.passes import OP_PASSES
from scalein.ir.passes.fuse import fuse
from scalein.ir.passes.physicalize import split
from scalein.ir.physical import Node
from scalein.ir.rewrite import rewrite, walk_ops
from scalein.ir.verify import verify_ops, verify_program

Trace = Callable[[str, ops.Op | Node], None]

_MOST_PLANS = 64
_plans: OrderedDict[bytes, Node] = OrderedDict()  # those used last, by digest; they hold no data
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Input:
    """Stands for the data of a source in a plan that is bound to its data when it runs."""

    number: int  # among the sources of the flow, in the order of `walk_ops`


def plan_of(op: ops.Op) -> tuple[Node, tuple[ops.Source, ...]]:
    """The plan of a flow with an `Input` in the place of each source's data, and the sources by number."""
    sources = tuple(each for each in walk_ops(op) if isinstance(each, ops.Source))
    key = digest(op)
    with _lock:
        if key is not None and key in _plans:
            _plans.move_to_end(key)
            return _plans[key], sources
    open_ = {id(source): replace(source, data=Input(number)) for number, source in enumerate(sources)}
    plan = compile_flow(rewrite(op, lambda each: open_.get(id(each))))
    if key is not None:
        with _lock:
            _plans[key] = plan
            while len(_plans) > _MOST_PLANS:
                _plans.popitem(last=False)
    return plan, sources


def compile_flow(op: ops.Op, trace: Trace | None = None) -> Node:
    """The program of an op tree; every pass is handed to `trace`."""
    tell = trace or (lambda name, plan: None)
    _refuse_our_names(op)
    verify_ops(op)
    tell("resolve", op)
    for step in OP_PASSES:
        op = step(op)
        verify_ops(op)
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
        if isinstance(op, ops.Filter | ops.Limit | ops.Distinct | ops.Sort | ops.Watermark):
            continue  # they name nothing
        for name in op.schema.names:
            if _OURS.fullmatch(name):
                raise BadName(f"a column is called {name!r}, which is a name that scalein keeps for itself", at=op.at,
                              hint=f"rename it, for example to {name[1:]!r}")
