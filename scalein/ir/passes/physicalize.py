"""physicalize: an op tree into nodes, cut where a kernel must end. How an op becomes a node, each op says
(`Op.physical`, in `ir/ops/`): a join, for example, builds its right side.

A kernel ends at keyed state, at a limit, at a union, at Python code, and where an expression is
pyarrow's to compute (`Host`). Each remaining op becomes a `Pipeline` of its own; `fuse` joins them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from scalein.ir import ops
from scalein.ir.exprs import Col, Expr, Named, NamedAgg
from scalein.ir.functions.registry import has_host
from scalein.ir.internal_names import internal
from scalein.ir.passes.aggregate_layout import aggregate_table, distinct_table
from scalein.ir.passes.host_steps import HostSteps
from scalein.ir.physical import Node, Pipeline, identity
from scalein.ir.rewrite import walk_ops
from scalein.ir.tables import Table
from scalein.ir.windows import Window


def physicalize(root: ops.Op) -> Node:
    """Filter(Source) -> Pipeline(Scan, [filter]); one node for every op that computes."""
    planner = Planner()
    for op in walk_ops(root):
        planner.add(op)
    return planner.node(root)


class Planner:
    """What ops need to become nodes. Numbers joins and host columns, so that their names are unique in the program."""

    def __init__(self) -> None:
        self._joins = itertools.count()
        self._hosted = itertools.count()
        self._done: dict[int, Node] = {}

    def add(self, op: ops.Op) -> None:
        self._done[id(op)] = op.physical(self)

    def node(self, op: ops.Op) -> Node:
        """The node of an op that has been added."""
        return self._done[id(op)]

    def join_number(self) -> int:
        return next(self._joins)

    def table(self, keys: tuple[Named, ...], window: Window | None, aggs: tuple[NamedAgg, ...]) -> Table:
        """The state of an aggregation."""
        return aggregate_table(keys, window, aggs)

    def first_rows(self, keys: tuple[Named, ...]) -> Table:
        """The state of a distinct."""
        return distinct_table(keys)

    def columns(self, node: Node, exprs: Sequence[Expr]) -> tuple[Node, list[Col]]:
        """The input with a column for each expression that is not a column yet, and these columns."""
        node, exprs = self.hosts(node, exprs)
        added = {e: Named(internal(f"by{k}"), e) for k, e in enumerate(exprs) if not isinstance(e, Col)}
        if added:
            node = Pipeline(node, (), (*identity(node.schema), *added.values()), name="project")
        return node, [e if isinstance(e, Col) else Col(added[e].name, e.dtype, e.nullable) for e in exprs]

    def hosts(self, node: Node, exprs: Sequence[Expr]) -> tuple[Node, list[Expr]]:
        """The input with a column for each part that pyarrow computes, and expressions that read it."""
        if not any(map(has_host, exprs)):
            return node, list(exprs)
        steps = HostSteps(self._hosted)
        left = [steps.left(e) if has_host(e) else e for e in exprs]
        return steps.over(node), left
