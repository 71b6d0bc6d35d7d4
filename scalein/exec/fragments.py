"""Fragments: a flow cut at its stateful ops, so that each fragment runs again and again over what arrives.

A fragment is a plan over a source without data: stateless ops around at most one stateful op. Fragments feed one
another; a union is a fragment with several inputs. Joined tables are static: read completely when first needed.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from scalein.compiler import compile_flow
from scalein.connectors.base import BoundSource
from scalein.connectors.in_memory import Batches
from scalein.dtypes import Schema
from scalein.errors import BadArgument, SourceLoc
from scalein.ir import ops
from scalein.ir.aggregates import AGGREGATES
from scalein.ir.physical import Node
from scalein.ir.rewrite import rewrite, stacked, stream_path, walk_ops
from scalein.ir.windows import Window


@dataclass(eq=False)
class Fragment:
    """A part of a flow, and the one that its rows go to."""

    op: ops.Op  # over `input`
    input: ops.Source  # without data
    state: ops.Aggregate | ops.Distinct | ops.Limit | ops.OuterJoin | ops.Sort | None  # waits or remembers, as in `op`
    then: Fragment | None
    _programs: dict[str, Node] = field(default_factory=dict)

    def program(self, name: str, of: Callable[[], ops.Op]) -> Node:
        """One of the programs of a fragment, compiled on first use."""
        if name not in self._programs:
            self._programs[name] = compile_flow(of())
        return self._programs[name]

    @property
    def before(self) -> ops.Op:
        """The rows that the op with state gets."""
        return self.op if self.state is None else self.state.streams[0]

    @property
    def window(self) -> Window | None:
        """The windows that it groups by."""
        return self.state.window if isinstance(self.state, ops.Aggregate) else None

    @property
    def is_blocking(self) -> bool:
        """Whether it gives its rows at the end of the input."""
        return self.state is not None and self.state.is_blocking


@dataclass(eq=False)
class SourceEdge:
    """The edge from a source to the first fragment that takes its rows, with its watermark."""

    source: ops.Source
    first: Fragment
    watermark: ops.Watermark | None
    timed: ops.Op = field(init=False)  # the rows that the watermark is about, over `first.input`

    def __post_init__(self) -> None:
        self.timed = self.first.input

    def over(self, source: ops.Source) -> SourceEdge:
        """The same edge, from a source that differs in its data only."""
        found = SourceEdge(source, self.first, self.watermark)
        found.timed = self.timed
        return found


class _Known(NamedTuple):
    """A flow that was cut, cached without the user's data; its fragments hold static tables."""

    of: weakref.ref[object]  # the data of its first source; the entry dies with it
    plan: ops.Op  # with sources without data
    static: list[ops.Source]
    edges: list[SourceEdge]


# Of the flows used last, by the op's identity: a flow that is started again is not compiled again, 2.4 of 7.3 ms.
_MAX_FLOWS = 8
_known: OrderedDict[int, _Known] = OrderedDict()
_lock = threading.RLock()  # re-entrant: the weakref callback may run while it is held


def cut(root: ops.Op) -> list[SourceEdge]:
    """The sources of a flow, in order, each with the fragments its rows pass."""
    fed, static = _sources(root)
    with _lock:
        known = _known.get(id(root))
    # Identities are reused after garbage collection.
    if known is not None and known.plan == root and all(
            a.data is b.data for a, b in zip(known.static, static, strict=True)):  # fmt: skip
        return [edge.over(source) for edge, source in zip(known.edges, fed, strict=True)]
    edges = list(_cut(root))
    for edge in edges:
        edge.watermark, edge.timed = _marked(edge.first)
    if not {id(source.data) for source in fed} & {id(source.data) for source in static}:
        _remember(root, static, edges)
    return edges


def _sources(root: ops.Op) -> tuple[list[ops.Source], list[ops.Source]]:
    """The sources of a flow, as `_cut` comes to them, and those of tables that it joins with."""
    fed: list[ops.Source] = []
    static: list[ops.Source] = []
    waiting = [root]
    while waiting:
        op = waiting.pop()
        if isinstance(op, ops.Source):
            fed.append(op)
        waiting += reversed(op.streams)
        static += [below for table in op.inputs[len(op.streams) :] for below in walk_ops(table)
                   if isinstance(below, ops.Source)]
    return fed, static


def _remember(root: ops.Op, static: list[ops.Source], edges: list[SourceEdge]) -> None:
    first, key = edges[0].source.data, id(root)
    if not isinstance(first, Batches | BoundSource):
        return  # a flow without data

    def drop(of: weakref.ref[object]) -> None:
        with _lock:
            if key in _known and _known[key].of is of:
                del _known[key]

    plan = rewrite(root, lambda op: _without_data(op) if isinstance(op, ops.Source) and op.data is not None else None)
    own = [edge.over(_without_data(edge.source)) for edge in edges]
    with _lock:
        _known[key] = _Known(weakref.ref(first, drop), plan, static, own)
        while len(_known) > _MAX_FLOWS:
            _known.popitem(last=False)


def _without_data(source: ops.Source) -> ops.Source:
    return replace(source, data=None)


def _marked(first: Fragment) -> tuple[ops.Watermark | None, ops.Op]:
    """The watermark of a source's rows, and the rows that it is about: it may come after a union or a distinct."""
    below: ops.Op = first.input
    fragment: Fragment | None = first
    while fragment is not None:
        # Rows come out at other times than they go in.
        ends_here = isinstance(fragment.state, ops.Aggregate) or fragment.is_blocking
        path = stream_path(fragment.before if ends_here else fragment.op, fragment.input)
        marks = [op for op in path if isinstance(op, ops.Watermark)]
        if marks:
            return marks[0], _without_state(marks[0].input, fragment, below)
        if ends_here:
            break
        below = _without_state(fragment.op, fragment, below)
        fragment = fragment.then
    return None, first.input


def _without_state(op: ops.Op, fragment: Fragment, below: ops.Op) -> ops.Op:
    """The plan over another input, with all rows where some would be remembered."""
    return stacked((each for each in stream_path(op, fragment.input) if each is not fragment.state), below)


def _cut(root: ops.Op) -> Iterator[SourceEdge]:
    """The edges of the sources of a flow, each with the fragment that its rows come to first."""
    waiting: list[tuple[ops.Op, Fragment | None]] = [(root, None)]
    while waiting:
        top, then = waiting.pop()
        op, has_state = top, False
        while op.is_row_by_row or (op.has_state and not has_state):
            has_state = has_state or op.has_state
            (op,) = op.streams
        fragment = _fragment(top, op, then)
        if isinstance(op, ops.Source):
            yield SourceEdge(op, fragment, None)
        else:
            waiting += [(below, fragment) for below in reversed(op.streams if isinstance(op, ops.Union) else (op,))]


def _fragment(top: ops.Op, bottom: ops.Op, then: Fragment | None) -> Fragment:
    """The ops from one down to another, which its input takes the place of."""
    source = placeholder(bottom.schema)
    op = over(top, bottom, source)
    state = next((each for each in stream_path(op, source) if each.has_state), None)
    assert isinstance(state, ops.Aggregate | ops.Distinct | ops.Limit | ops.OuterJoin | ops.Sort | None)
    return Fragment(op, source, state, then)


def placeholder(schema: Schema) -> ops.Source:
    """A source without data."""
    return ops.Source("input", schema.arrow, tuple(schema.names))


def over(op: ops.Op, old: ops.Op, new: ops.Op) -> ops.Op:
    """The plan with another op in the place of one on its way; a static table may hold the same one, and keeps it."""
    return stacked(stream_path(op, old), new)


def check_bounded(edges: list[SourceEdge], is_bounded: bool, emit: str, at: SourceLoc) -> None:
    """Refuse what would never come to an end."""
    if is_bounded:
        return
    for fragment in fragments(edges):
        if isinstance(fragment.state, ops.Sort):
            raise BadArgument("an endless flow cannot be sorted", at=at, step="sort",
                              hint='the greatest rows of each window: group_by(si.tumbling("t", "1m")).agg('
                                   'col("x").top_k(10, by="x")); or read a bounded source')
        if isinstance(fragment.state, ops.OuterJoin):
            raise BadArgument(f"a join with how={fragment.state.how!r} needs a flow that ends: only then it is known "
                              "which rows of the table have no match", at=fragment.state.at, step="join",
                              hint='take how="left" or "inner", or read a bounded source')
        is_final = emit == "final" or fragment.then is not None
        if isinstance(fragment.state, ops.Aggregate) and fragment.state.window is None and is_final:
            raise BadArgument("a running aggregate over an endless source has no final result", at=at,
                              step="group_by", hint='give emit="changes", or group by a window of time as well')
        if isinstance(fragment.state, ops.Aggregate) and is_final and not any(
                edge.watermark is not None for edge in edges if fragment in fragments([edge])):
            raise BadArgument("windows over an endless source never close without a watermark", at=at,
                              step="group_by", hint="with_watermark(column, delay) after the source")


def check_order(fragments: list[Fragment], inputs: list[tuple[list[int], int]]) -> None:
    """Refuse aggregates that depend on the order of rows where rows come from several inputs or partitions.

    `inputs` has the numbers of the fragments that an input's rows pass, and how many partitions it has. After a sort
    there is an order again.
    """
    for number, fragment in enumerate(fragments):
        if not isinstance(fragment.state, ops.Aggregate):
            continue
        arriving = sum(partitions for path, partitions in inputs if number in path and not any(
            isinstance(fragments[before].state, ops.Sort | ops.Aggregate) for before in path[: path.index(number)]))
        for named in fragment.state.aggs if arriving > 1 else ():
            instead = AGGREGATES[named.agg.fn].without_order
            if instead:
                raise BadArgument(f"{named.agg.fn} depends on the order of rows, and a job has none across the inputs "
                                  "of a union or the partitions of a source",
                                  at=named.agg.at if named.agg.at.line else fragment.state.at, found=named.name,
                                  hint=f"use {instead}")


def fragments(edges: list[SourceEdge]) -> list[Fragment]:
    """Every fragment once, in topological order."""
    found: list[Fragment] = []
    for edge in edges:
        path = []
        fragment: Fragment | None = edge.first
        while fragment is not None:
            path.append(fragment)
            fragment = fragment.then
        place = next((k for k, each in enumerate(path) if each in found), len(path))
        shared = found.index(path[place]) if place < len(path) else len(found)
        found[shared:shared] = path[:place]
    return found
