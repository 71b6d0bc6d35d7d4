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
from scalein.ir.physical import Node
from scalein.ir.rewrite import map_inputs, rewrite, walk_ops

_ROW_BY_ROW = (ops.Filter, ops.Project, ops.MapBatches, ops.Explode, ops.Join, ops.Watermark)
_WITH_STATE = (ops.Aggregate, ops.Distinct, ops.Limit, ops.Sort)


@dataclass(eq=False)
class Fragment:
    """A part of a flow, and the one that its rows go to."""

    op: ops.Op  # over `input`
    input: ops.Source  # without data
    state: ops.Aggregate | ops.Distinct | ops.Limit | ops.Sort | None  # the op that waits or remembers, as in `op`
    then: Fragment | None
    _programs: dict[str, Node] = field(default_factory=dict)

    def program(self, name: str, of: Callable[[], ops.Op]) -> Node:
        """One of the programs that a segment needs, compiled when it is first asked for."""
        if name not in self._programs:
            self._programs[name] = compile_flow(of())
        return self._programs[name]

    @property
    def before(self) -> ops.Op:
        """The rows that the op with state gets."""
        return self.op if self.state is None else self.state.input

    @property
    def window(self) -> ops.Window | None:
        """The windows that it groups by."""
        return self.state.window if isinstance(self.state, ops.Aggregate) else None


@dataclass(eq=False)
class Feed:
    """A source of a flow, its watermark, and where its rows go."""

    source: ops.Source
    first: Fragment
    watermark: ops.Watermark | None
    timed: ops.Op = field(init=False)  # the rows that the watermark is about, over `first.input`

    def __post_init__(self) -> None:
        self.timed = self.first.input

    def over(self, source: ops.Source) -> Feed:
        """The same feed, from a source that only its data tells from this one."""
        found = Feed(source, self.first, self.watermark)
        found.timed = self.timed
        return found


class _Known(NamedTuple):
    """A flow that was cut. Its rows are the user's, so it is kept without its data; the segments hold static tables."""

    of: weakref.ref[object]  # the data of its first source: with that goes the flow, and this
    bare: ops.Op
    static: list[ops.Source]
    feeds: list[Feed]


# Of the flows used last, by the op's identity: a flow that is started again is not compiled again, 2.4 of 7.3 ms.
_KEPT = 8
_known: OrderedDict[int, _Known] = OrderedDict()
_lock = threading.RLock()  # whoever holds it may be the one to drop an entry


def cut(root: ops.Op) -> list[Feed]:
    """The sources of a flow, in order, each with the segments its rows pass."""
    fed: list[ops.Source] = []
    static: list[ops.Source] = []
    _sort_out(root, fed, static)
    with _lock:
        known = _known.get(id(root))
    # An identity is another op's once its own is gone.
    if known is not None and known.bare == root and all(
            a.data is b.data for a, b in zip(known.static, static, strict=True)):  # fmt: skip
        return [feed.over(source) for feed, source in zip(known.feeds, fed, strict=True)]
    feeds = list(_cut(root, None))
    for feed in feeds:
        feed.watermark, feed.timed = _marked(feed.first)
    if not {id(source.data) for source in fed} & {id(source.data) for source in static}:
        _remember(root, static, feeds)
    return feeds


def _sort_out(op: ops.Op, fed: list[ops.Source], static: list[ops.Source]) -> None:
    """The sources of a flow, as `_cut` comes to them, and those of tables that it joins with."""
    match op:
        case ops.Source():
            fed.append(op)
        case ops.Union():
            for below in op.inputs:
                _sort_out(below, fed, static)
        case ops.Join():
            _sort_out(op.left, fed, static)
            static += [below for below in walk_ops(op.right) if isinstance(below, ops.Source)]
        case _:
            _sort_out(op.input, fed, static)


def _remember(root: ops.Op, static: list[ops.Source], feeds: list[Feed]) -> None:
    first, key = feeds[0].source.data, id(root)
    if not isinstance(first, Batches | BoundSource):
        return  # a flow without data

    def drop(of: weakref.ref[object]) -> None:
        with _lock:
            if key in _known and _known[key].of is of:
                del _known[key]

    bare = rewrite(root, lambda op: _bare(op) if isinstance(op, ops.Source) and op.data is not None else None)
    with _lock:
        _known[key] = _Known(weakref.ref(first, drop), bare, static, [feed.over(_bare(feed.source)) for feed in feeds])
        while len(_known) > _KEPT:
            _known.popitem(last=False)


def _bare(source: ops.Source) -> ops.Source:
    return replace(source, data=None)


def _marked(first: Fragment) -> tuple[ops.Watermark | None, ops.Op]:
    """The watermark of a source's rows, and the rows that it is about: it may come behind a union or a distinct."""
    below: ops.Op = first.input
    fragment: Fragment | None = first
    while fragment is not None:
        ends_here = isinstance(fragment.state, ops.Aggregate | ops.Sort)  # rows come out at other times than they go in
        marks = [op for op in _chain(fragment.before if ends_here else fragment.op, fragment.input)
                 if isinstance(op, ops.Watermark)]
        if marks:
            return marks[-1], _without_state(marks[-1].input, fragment, below)
        if ends_here:
            break
        below = _without_state(fragment.op, fragment, below)
        fragment = fragment.then
    return None, first.input


def _chain(op: ops.Op, source: ops.Source) -> Iterator[ops.Op]:
    """The ops that rows of a segment pass, the last one first."""
    while op is not source:
        yield op
        assert not isinstance(op, ops.Source | ops.Union)
        op = op.left if isinstance(op, ops.Join) else op.input


def _without_state(op: ops.Op, fragment: Fragment, below: ops.Op) -> ops.Op:
    """The plan over another input, with all rows where some would be remembered."""
    if op is fragment.input:
        return below
    if op is fragment.state:
        assert isinstance(op, ops.Distinct | ops.Limit)
        op = op.input
        return _without_state(op, fragment, below)
    return map_inputs(op, lambda each: _without_state(each, fragment, below))


def _cut(top: ops.Op, then: Fragment | None) -> Iterator[Feed]:
    """The feeds below an op whose rows go to a segment."""
    op, has_state = top, False
    while True:
        if isinstance(op, _ROW_BY_ROW):
            op = op.left if isinstance(op, ops.Join) else op.input
        elif isinstance(op, _WITH_STATE) and not has_state:
            op, has_state = op.input, True
        else:
            break
    fragment = _fragment(top, op, then)
    match op:
        case ops.Source():
            yield Feed(op, fragment, None)
        case ops.Union():
            for below in op.inputs:
                yield from _cut(below, fragment)
        case _:
            yield from _cut(op, fragment)


def _fragment(top: ops.Op, bottom: ops.Op, then: Fragment | None) -> Fragment:
    """The ops from one down to another, which its input takes the place of."""
    source = placeholder(bottom.schema)
    op = over(top, bottom, source)
    state = None
    below = op
    while below is not source:
        if isinstance(below, _WITH_STATE):
            state = below
        assert not isinstance(below, ops.Source | ops.Union)
        below = below.left if isinstance(below, ops.Join) else below.input
    return Fragment(op, source, state, then)


def placeholder(schema: Schema) -> ops.Source:
    """A source without data."""
    return ops.Source("input", schema.arrow, tuple(schema.names))


def over(op: ops.Op, old: ops.Op, new: ops.Op) -> ops.Op:
    """The plan with another op in the place of one on its way; a static table may hold the same one, and keeps it."""
    if op is old:
        return new
    if isinstance(op, ops.Join):
        return replace(op, left=over(op.left, old, new))
    return map_inputs(op, lambda below: over(below, old, new))


def check_bounded(feeds: list[Feed], is_bounded: bool, emit: str, at: SourceLoc) -> None:
    """Refuse what would never come to an end."""
    if is_bounded:
        return
    for fragment in fragments(feeds):
        if isinstance(fragment.state, ops.Sort):
            raise BadArgument("an endless flow cannot be sorted", at=at, step="sort",
                              hint="sort what windows give, or read a bounded source")
        is_final = emit == "final" or fragment.then is not None
        if isinstance(fragment.state, ops.Aggregate) and fragment.state.window is None and is_final:
            raise BadArgument("a running aggregate over an endless source has no final result", at=at,
                              step="group_by", hint='give emit="changes", or group by a window of time as well')
        if isinstance(fragment.state, ops.Aggregate) and is_final and not any(
                feed.watermark is not None for feed in feeds if fragment in fragments([feed])):
            raise BadArgument("windows over an endless source never close without a watermark", at=at,
                              step="group_by", hint="with_watermark(column, delay) behind the source")


def fragments(feeds: list[Feed]) -> list[Fragment]:
    """Every segment once, each before the one that it feeds."""
    found: list[Fragment] = []
    for feed in feeds:
        path = []
        fragment: Fragment | None = feed.first
        while fragment is not None:
            path.append(fragment)
            fragment = fragment.then
        place = next((k for k, each in enumerate(path) if each in found), len(path))
        shared = found.index(path[place]) if place < len(path) else len(found)
        found[shared:shared] = path[:place]
    return found
