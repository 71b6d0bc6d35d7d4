"""split: an op tree into nodes, cut where a kernel must end.

A kernel ends at keyed state, at a limit, at a union, at Python code, and where an expression is
pyarrow's to compute (`Host`). Each remaining op becomes a `Pipeline` of its own; `fuse` joins them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from scalein.dtypes import BOOL
from scalein.ir import ops
from scalein.ir.exprs import Agg, Call, Col, Expr, Named, NamedAgg
from scalein.ir.functions.registry import can_fail, has_host
from scalein.ir.passes.host_steps import HostSteps
from scalein.ir.passes.place_state import place_first_rows, place_state
from scalein.ir.physical import Host, JoinBuild, Limit, Node, Pipeline, Scan, Sort, Union, WindowAggregate, identity
from scalein.ir.stages import DedupStep, FilterStep, Probe
from scalein.layout import NULL_BITS


def split(root: ops.Op) -> Node:
    """Filter(Source) -> Pipeline(Scan, [filter]); one node for every op that computes."""
    return _Splitter().node(root)


class _Splitter:
    """Numbers joins and host columns, so that their names are unique in the program."""

    def __init__(self) -> None:
        self._joins = itertools.count()
        self._hosted = itertools.count()
        self._done: dict[int, Node] = {}

    def node(self, op: ops.Op) -> Node:
        found = self._done.get(id(op))
        if found is None:
            found = self._done[id(op)] = self._split(op)
        return found

    def _split(self, op: ops.Op) -> Node:
        match op:
            case ops.Source():
                return Scan(op)
            case ops.Watermark():  # event time matters to jobs; a bounded run sees everything
                return self.node(op.input)
            case ops.Filter():
                before, (predicate,) = self._hosts(self.node(op.input), [op.predicate])
                return Pipeline(before, (FilterStep(predicate),), identity(op.schema), name="filter")
            case ops.Project():
                before, exprs = self._hosts(self.node(op.input), [item.expr for item in op.items])
                items = tuple(Named(i.name, e) for i, e in zip(op.items, exprs, strict=True))
                return Pipeline(before, (), items, name="project")
            case ops.Limit():
                return Limit(self.node(op.input), op.count)
            case ops.Distinct():
                return self._distinct(op)
            case ops.Sort():
                return self._sort(op)
            case ops.Union():
                return Union(tuple(self.node(i) for i in op.inputs), op.schema)
            case ops.MapBatches() | ops.Explode():
                return Host(self.node(op.input), op)
            case ops.Join():
                return self._join(op)
            case ops.Aggregate():
                return self._aggregate(op)

    def _join(self, op: ops.Join) -> Node:
        left, left_keys = self._hosts(self.node(op.left), op.left_keys)
        right, right_keys = self._columns(self.node(op.right), op.right_keys)
        number = next(self._joins)
        table = JoinBuild(right, tuple(right_keys), tuple(dict.fromkeys(column for _, column in op.keep)))
        probe = Probe(number, tuple(left_keys), op.how, op.keep)
        return Pipeline(left, (probe,), identity(op.schema), joins=((number, table),), name="join")

    def _distinct(self, op: ops.Distinct) -> Node:
        fields = op.input.schema
        keys = [Named(name, Col(name, fields[name].dtype, fields[name].nullable)) for name in op.keys]
        # A record has one word of null bits, whose last is shared: keys that share it tell null from zero themselves.
        keys += [Named(f"#null.{key.name}", Call("is_null", (key.expr,), dtype=BOOL, nullable=False))
                 for key in keys[NULL_BITS - 1 :] if key.expr.nullable]
        step = DedupStep(place_first_rows(tuple(keys)), tuple(key.expr for key in keys))
        return Pipeline(self.node(op.input), (step,), identity(op.schema), name="distinct")

    def _sort(self, op: ops.Sort) -> Node:
        """Keys that are no columns are computed before, and dropped behind."""
        before, keys = self._columns(self.node(op.input), [by.expr for by in op.by])
        by = tuple((key.name, by.descending) for key, by in zip(keys, op.by, strict=True))
        node = Sort(before, by, op.nulls_last, op.count)
        if node.schema.names == op.schema.names:
            return node
        return Pipeline(node, (), identity(op.schema), name="project")

    def _aggregate(self, op: ops.Aggregate) -> Node:
        exprs = [k.expr for k in op.keys] + [arg for a in op.aggs for arg in a.agg.args]
        before, window = self.node(op.input), None
        if op.window is not None:
            before, (time,) = self._hosts(before, [op.window.time])
            window = ops.Window(time, op.window.size, op.window.every)
            if time.nullable and any(has_host(e) and can_fail(e) for e in exprs):
                # A row without a time is in no window: what pyarrow computes of it must not fail.
                known = Call("is_not_null", (time,), dtype=BOOL, nullable=False)
                before = Pipeline(before, (FilterStep(known),), identity(before.schema), name="filter")
        before, exprs = self._hosts(before, exprs)
        rest = iter(exprs)
        keys = tuple(Named(k.name, next(rest)) for k in op.keys)
        aggs = tuple(NamedAgg(a.name, _with_args(a.agg, rest)) for a in op.aggs)
        table = place_state(keys, window, aggs)
        return WindowAggregate(before, (), table, tuple(k.expr for k in keys))

    def _columns(self, node: Node, exprs: Sequence[Expr]) -> tuple[Node, list[Col]]:
        """The input with a column for each expression that is none yet, and the columns that they all are."""
        node, exprs = self._hosts(node, exprs)
        added = {e: Named(f"#by{k}", e) for k, e in enumerate(exprs) if not isinstance(e, Col)}
        if added:
            node = Pipeline(node, (), (*identity(node.schema), *added.values()), name="project")
        return node, [e if isinstance(e, Col) else Col(added[e].name, e.dtype, e.nullable) for e in exprs]

    def _hosts(self, node: Node, exprs: Sequence[Expr]) -> tuple[Node, list[Expr]]:
        """The input with a column for each part that pyarrow computes, and expressions that read it."""
        if not any(map(has_host, exprs)):
            return node, list(exprs)
        steps = HostSteps(self._hosted)
        left = [steps.left(e) if has_host(e) else e for e in exprs]
        return steps.over(node), left


def _with_args(agg: Agg, rest: Iterator[Expr]) -> Agg:
    return Agg(agg.fn, tuple(next(rest) for _ in agg.args), agg.dtype, agg.nullable, agg.params, agg.at)
