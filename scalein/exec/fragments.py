"""Fragments: a flow cut at its stateful ops, so that each fragment runs again and again over what arrives.

A fragment is a plan over a source without data: stateless ops around at most one stateful op. Fragments feed one
another: a union is a fragment with several inputs, a fork one with several consumers. Joined tables are static: read
completely when first needed.

Flows of one job that are equal up to some op share it (`cut_together`): that op ends a fragment, whose rows go to all
its consumers. What they share of a source is its reader; a source is read once for each watermark.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from scalein.compiler import compile_flow
from scalein.connectors.base import BoundSource
from scalein.connectors.in_memory import Batches
from scalein.dtypes import Schema
from scalein.errors import BadArgument, SourceLoc
from scalein.ir import ops
from scalein.ir.aggregates import AGGREGATES
from scalein.ir.internal_names import is_internal
from scalein.ir.ops.aggregate import by_window
from scalein.ir.ops.over import streamed
from scalein.ir.ops.stream_join import as_buffered, with_times_of_one_type
from scalein.ir.physical import Node
from scalein.ir.printer import show_expr
from scalein.ir.rewrite import rewrite, stacked, stream_path, transform, walk_ops, walk_streams
from scalein.ir.stages import FOREVER
from scalein.ir.windows import Window


@dataclass(eq=False)
class Fragment:
    """A part of a flow, and those that its rows go to."""

    op: ops.Op  # over `input`
    input: ops.Source  # without data
    state: ops.Op | None  # the stateful op of `op`
    consumers: list[Fragment] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)  # of the job, by number
    # For a sort by the column of windows that it names, first of all: how much later than the watermark its values to
    # come are at least. So rows leave when their windows are complete.
    sorted_by: tuple[str, int] | None = None
    lead: int = 0  # how much later than the watermark the times to come of its op are at least
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
    def is_timed(self) -> bool:
        """Whether it uses event time."""
        is_timed_process = isinstance(self.state, ops.Process) and bool(self.state.time)
        is_timed_process |= isinstance(self.state, ops.Over) and bool(self.state.kind)
        is_timed_join = isinstance(self.state, ops.BufferedJoin) and self.state.join.bound is not None
        return self.window is not None or is_timed_join or is_timed_process

    @property
    def is_blocking(self) -> bool:
        """Whether it gives its rows at the end of the input."""
        return self.state is not None and self.state.is_blocking and self.sorted_by is None


@dataclass(eq=False)
class SourceEdge:
    """The edge from a source to the fragments that take its rows first, with its watermark."""

    source: ops.Source
    firsts: list[Fragment]
    watermark: ops.Watermark | None
    timed: ops.Op  # the rows that the watermark is about, over the input of one of `firsts`

    @property
    def first(self) -> Fragment:
        """The fragment that takes its rows, or one of them."""
        return self.firsts[0]

    @property
    def has_own_times(self) -> bool:
        """Whether the watermark is about a column of the source."""
        return any(self.timed is first.input for first in self.firsts)

    def over(self, source: ops.Source) -> SourceEdge:
        """The same edge, from a source that differs in its data only."""
        return SourceEdge(source, self.firsts, self.watermark, self.timed)


class _Known(NamedTuple):
    """A flow that was cut, cached without the user's data; its fragments hold static tables."""

    of: weakref.ref[object]  # the data of its first source; the entry dies with it
    plan: ops.Op  # with sources without data
    static: list[ops.Source]
    edges: list[SourceEdge]


# Their rows have other times than those that they get.
_RETIMING = ops.Aggregate | ops.BufferedJoin | ops.Over | ops.Process

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
    edges = [SourceEdge(source, [first], *_marked(first))
             for source, first in _cut(as_buffered([root]), lambda op: False)]
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


def cut_together(roots: Sequence[ops.Op], emit: str) -> list[SourceEdge]:
    """The sources of several flows, which are the outputs of one job: what flows have in common is there once."""
    roots = _as_of_a_job(roots, emit)
    if len(roots) == 1:
        return cut(roots[0])
    roots = _as_one_plan(as_buffered(roots))
    order = list(walk_streams(*roots))
    consumers = Counter(map(id, roots))
    for op in reversed(order):
        for each in op.streams:  # the rows of a join's sides are not rows of one schema: each side is a fork instead
            consumers[id(each)] += consumers[id(op)] if isinstance(op, ops.JoinSides) else 1
    timed: set[int] = set()  # ops whose rows have a watermark, or come at other times than those of the source
    grouped: set[int] = set()
    early: set[int] = set()  # ops whose rows get a watermark later
    for op in order:
        below = {id(each) for each in op.streams}
        if below & timed or isinstance(op, ops.Watermark | _RETIMING) or op.is_blocking:
            timed.add(id(op))
        if below & grouped or isinstance(op, ops.Aggregate):
            grouped.add(id(op))
    for op in reversed(order):
        if isinstance(op, ops.Watermark) or id(op) in early:
            early.update(id(each) for each in op.streams if id(each) not in timed)

    def is_fork(op: ops.Op) -> bool:
        if consumers[id(op)] < 2 or isinstance(op, ops.JoinSides) or _is_free(op) or id(op) in early:
            return False
        return emit == "final" or id(op) not in grouped  # groups that emit changes have no other consumer

    edges: list[SourceEdge] = []
    for source, first in _cut(roots, is_fork):
        watermark, timed_rows = _marked(first)
        same = next((edge for edge in edges if edge.source is source and (
            watermark is None or edge.watermark is None
            or (watermark == edge.watermark and timed_rows == edge.timed))), None)
        if same is None:
            edges.append(SourceEdge(source, [first], watermark, timed_rows))
            continue
        same.firsts.append(first)
        if same.watermark is None:
            same.watermark, same.timed = watermark, timed_rows
    return edges


def _as_of_a_job(roots: Sequence[ops.Op], emit: str) -> Sequence[ops.Op]:
    """The plans with ops in the place of those that are computed in another way as rows arrive; else the same ones."""
    def replaced(op: ops.Op) -> ops.Op:
        return streamed(by_window(op) if emit == "final" else op)

    return transform(roots, replaced) if any(replaced(op) is not op for op in walk_streams(*roots)) else roots


def _as_one_plan(roots: Sequence[ops.Op]) -> list[ops.Op]:
    """The plans with one object for all ops that are equal, over the same data."""
    done: dict[int, ops.Op] = {}
    known: dict[tuple[object, ...], ops.Op] = {}
    for op in (each for root in roots for each in walk_ops(root)):
        new = op.with_inputs(tuple(done[id(below)] for below in op.inputs))
        data = id(op.data) if isinstance(op, ops.Source) else None
        done[id(op)] = known.setdefault((new.digest, data, *map(id, new.inputs)), new)
    return [done[id(root)] for root in roots]


def _is_free(op: ops.Op) -> bool:
    """Whether rows pass unchanged from the source: then each consumer may as well begin there."""
    while isinstance(op, ops.Watermark):
        op = op.input
    return isinstance(op, ops.Source)


def _marked(first: Fragment) -> tuple[ops.Watermark | None, ops.Op]:
    """The watermark of a source's rows, and the rows that it is about: it may come after a union or a distinct.

    Where fragments fork, the rows have one already, or none of the consumers gives them one.
    """
    below: ops.Op = first.input
    fragment = first
    while True:
        # Rows come out at other times than they go in.
        ends_here = isinstance(fragment.state, _RETIMING) or fragment.is_blocking
        path = stream_path(fragment.before if ends_here else fragment.op, fragment.input)
        marks = [op for op in path if isinstance(op, ops.Watermark)]
        if marks:
            return marks[-1], _without_state(marks[-1].input, fragment, below)
        if ends_here or not fragment.consumers:
            return None, first.input
        below = _without_state(fragment.op, fragment, below)
        fragment = fragment.consumers[0]


def _without_state(op: ops.Op, fragment: Fragment, below: ops.Op) -> ops.Op:
    """The plan over another input, with all rows where some would be remembered."""
    return stacked((each for each in stream_path(op, fragment.input) if each is not fragment.state), below)


def _cut(roots: Sequence[ops.Op], is_fork: Callable[[ops.Op], bool]) -> Iterator[tuple[ops.Source, Fragment]]:
    """The sources of flows, each with a fragment that its rows come to first; a fork ends a fragment."""
    made: dict[int, Fragment] = {}  # by the fork that they end with
    waiting: list[tuple[ops.Op, Fragment | int]] = []
    waiting += [(root, number) for number, root in reversed(list(enumerate(roots)))]
    while waiting:
        top, consumer = waiting.pop()
        if id(top) in made:
            _connect(made[id(top)], consumer)
            continue
        op, has_state = top, False
        while (op.is_row_by_row or (op.has_state and not has_state)) and (op is top or not is_fork(op)):
            has_state = has_state or op.has_state
            (op,) = op.streams
        fragment = _fragment(top, op)
        _connect(fragment, consumer)
        if is_fork(top):
            made[id(top)] = fragment
        if isinstance(op, ops.Source):
            yield op, fragment
        else:
            is_union = isinstance(op, ops.Union) and (op is top or not is_fork(op))
            waiting += [(below, fragment) for below in reversed(op.streams if is_union else (op,))]


def _connect(fragment: Fragment, consumer: Fragment | int) -> None:
    if isinstance(consumer, int):
        fragment.outputs.append(consumer)
    else:
        fragment.consumers.append(consumer)


def _fragment(top: ops.Op, bottom: ops.Op) -> Fragment:
    """The ops from one down to another, which its input takes the place of."""
    source = placeholder(bottom.schema)
    op = over(top, bottom, source)
    state = next((each for each in stream_path(op, source) if each.has_state), None)
    given = next((each for each in stream_path(top, bottom) if each.has_state), None)
    if given is None:
        return Fragment(op, source, state)
    rows = given.streams[0].event_time
    leads = [rows.lead(time) for time, _ in given.times()]
    lead = min((each for each in leads if each is not None), default=0)
    return Fragment(op, source, state, sorted_by=given.limit_of_windows(rows) if isinstance(given, ops.Sort) else None,
                    lead=lead)


def placeholder(schema: Schema) -> ops.Source:
    """A source without data."""
    return ops.Source("input", schema.arrow, tuple(schema.names))


def over(op: ops.Op, old: ops.Op, new: ops.Op) -> ops.Op:
    """The plan with another op in the place of one on its way; a static table may hold the same one, and keeps it."""
    return stacked(stream_path(op, old), new)


def check_event_time(roots: Sequence[ops.Op], may_move: bool = True) -> None:
    """Refuse what compares a column with the watermark that the watermark is not about: it would drop rows as late that
    keep its promise, or wait for them until the end. Unless times `may_move`, none is before the watermark's.
    """
    for op in walk_streams(*roots):
        given = with_times_of_one_type(op) if isinstance(op, ops.StreamJoin) else op
        for time, number in given.times():
            rows = given.streams[number].event_time
            lead = rows.lead(time)
            if rows.promised is None or (lead is not None and (may_move or lead >= 0)):
                continue
            known = ", ".join(name for name in rows.promised if not is_internal(name)) or "no column"
            name = show_expr(time)
            raise BadArgument(f"the watermark says nothing of {name}: windows, joins and orders of a job are over "
                              "times with a watermark, else rows that are not late would be dropped", at=op.at,
                              has=f"a watermark of {known}",
                              hint="take a column with a watermark" if rows.is_derived else
                              f"with_watermark({name!r}, delay) after {name} was computed")


def check_bounded(edges: list[SourceEdge], is_bounded: bool, emit: str, at: SourceLoc) -> None:
    """Refuse what would never come to an end."""
    for fragment in fragments(edges):
        if isinstance(fragment.state, ops.BufferedJoin) and fragment.is_timed:
            marks = [edge.watermark is not None for edge in edges if fragment in fragments([edge])]
            if any(marks) and not all(marks):
                raise BadArgument("a join by time needs the event time of both sides", at=fragment.state.at,
                                  step="join", hint='give both sides one: .with_watermark("t", "10s")')
    if is_bounded:
        return
    timed = {id(each) for edge in edges if edge.watermark is not None for each in fragments([edge])}
    timeless = {id(each): join for join in fragments(edges) if isinstance(join.state, ops.BufferedJoin)
                and join.state.join.bound is None for each in _downstream(join)}
    for fragment in fragments(edges):
        if isinstance(fragment.state, ops.Sort) and fragment.is_blocking:
            raise BadArgument("an endless flow cannot be sorted", at=at, step="sort",
                              hint='sort what windows give by "window_start" first; the greatest rows of each window: '
                                   'group_by(si.tumbling("t", "1m")).agg(col("x").top_k(10, by="x")); or read a '
                                   'bounded source')
        if isinstance(fragment.state, ops.OuterJoin):
            raise BadArgument(f"a join with how={fragment.state.how!r} needs a flow that ends: only then it is known "
                              "which rows of the table have no match", at=fragment.state.at, step="join",
                              hint='take how="left" or "inner", or read a bounded source')
        if isinstance(fragment.state, ops.Over):
            check_over(fragment.state, id(fragment) in timed)
        if isinstance(fragment.state, ops.BufferedJoin):
            _check_join(fragment.state, id(fragment) in timed)
        is_final = emit == "final" or bool(fragment.consumers)
        if isinstance(fragment.state, ops.Aggregate) and fragment.state.window is None and is_final:
            raise BadArgument("a running aggregate over an endless source has no final result", at=at,
                              step="group_by", hint='give emit="changes", or group by a window of time as well')
        if isinstance(fragment.state, ops.Aggregate) and is_final and id(fragment) not in timed:
            raise BadArgument("windows over an endless source never close without a watermark", at=at,
                              step="group_by", hint="with_watermark(column, delay) after the source")
        if isinstance(fragment.state, ops.Aggregate) and is_final and id(fragment) in timeless:
            raise BadArgument("windows over a join that keeps rows forever never close: rows of any time may come",
                              at=at, step="group_by", hint='bound the join: keep="1h", or between=("-5s", "5s")')


def _downstream(fragment: Fragment) -> list[Fragment]:
    """The fragments that get rows of another, directly or not."""
    found = list(fragment.consumers)
    for each in found:
        found += [consumer for consumer in each.consumers if consumer not in found]
    return found


def check_over(op: ops.Over, is_timed: bool) -> None:
    """Refuse values over other rows of which an endless stream never has the last one."""
    if op.kind and is_timed:
        return
    hint = "with_watermark(column, delay), and order_by= that column"
    if op.kind or not op.time:
        raise BadArgument("rows of an endless source have no order, or no last row, without event time", at=op.at,
                          step="over", hint=hint + "; or a window of time")
    raise BadArgument("this needs all rows of a key, and an endless source never has them", at=op.at, step="over",
                      found=op.describe()[1], hint="give its frame a bound: rows=10, or within=\"1h\"; sums, counts, "
                                                   "min, max, first, lag and numbers of rows need none")


def _check_join(op: ops.BufferedJoin, is_timed: bool) -> None:
    """Refuse a join of endless streams that would wait for ever."""
    join, bound = op.join, op.join.bound
    if bound is not None and not is_timed:
        raise BadArgument("a join of endless streams by time needs a watermark on both sides: without one its state "
                          "grows without bound", at=op.at, step="join",
                          hint="with_watermark(column, delay) on both sides")
    waits = FOREVER if bound is None else max(bound.left_wait if join.how != "right" else 0,
                                              bound.right_wait if join.how in ("right", "outer") else 0)
    if join.how != "inner" and waits >= FOREVER:
        what = "an as-of join without a tolerance" if bound is not None else f"a join with how={join.how!r}"
        raise BadArgument(f"{what} over endless streams never knows that a row has no match", at=op.at, step="join",
                          hint='give it a tolerance=, or take strategy="backward"' if bound is not None else
                          'keep="1h" says how long rows wait for one; or take how="inner"')


def check_order(edges: list[SourceEdge], partitions: Sequence[int]) -> None:
    """Refuse aggregates that depend on the order of rows where rows come from several inputs or partitions.

    `partitions` is how many each source has. After a sort there is an order again.
    """
    arriving: Counter[int] = Counter()  # ways on which rows come to a fragment
    for edge, count in zip(edges, partitions, strict=True):
        for first in edge.firsts:
            arriving[id(first)] += count
    for fragment in fragments(edges):
        state = fragment.state
        for named in state.aggs if isinstance(state, ops.Aggregate) and arriving[id(fragment)] > 1 else ():
            instead = AGGREGATES[named.agg.fn].without_order
            if instead:
                assert state is not None
                raise BadArgument(f"{named.agg.fn} depends on the order of rows, and a job has none across the inputs "
                                  "of a union or the partitions of a source",
                                  at=named.agg.at if named.agg.at.line else state.at, found=named.name,
                                  hint=f"use {instead}")
        for consumer in () if isinstance(state, ops.Sort | ops.Aggregate) else fragment.consumers:
            arriving[id(consumer)] += arriving[id(fragment)]


def fragments(edges: list[SourceEdge]) -> list[Fragment]:
    """Every fragment once, in topological order: the inputs of each before it, in the order of the sources."""
    inputs: dict[int, list[Fragment]] = {}
    ends: list[Fragment] = []
    waiting = [first for edge in reversed(edges) for first in reversed(edge.firsts)]
    for first in waiting:
        inputs.setdefault(id(first), [])
    while waiting:
        fragment = waiting.pop()
        if fragment.outputs and fragment not in ends:
            ends.append(fragment)
        for consumer in fragment.consumers:
            known = inputs.setdefault(id(consumer), [])
            if fragment not in known:
                known.append(fragment)
                waiting.append(consumer)
    return _in_order(sorted(ends, key=lambda each: min(each.outputs)), inputs)


def upstream(end: Fragment, edges: list[SourceEdge]) -> list[Fragment]:
    """The fragments that an output's rows pass, in topological order."""
    inputs: dict[int, list[Fragment]] = {}
    for fragment in fragments(edges):
        for consumer in fragment.consumers:
            inputs.setdefault(id(consumer), []).append(fragment)
    return _in_order([end], inputs)


def _in_order(ends: list[Fragment], inputs: dict[int, list[Fragment]]) -> list[Fragment]:
    """Ends and what feeds them, inputs first."""
    found: dict[int, Fragment] = {}
    waiting = [(end, False) for end in reversed(ends)]
    while waiting:
        fragment, is_over = waiting.pop()
        if is_over:
            found[id(fragment)] = fragment
        elif id(fragment) not in found:
            waiting.append((fragment, True))
            waiting += [(below, False) for below in reversed(inputs.get(id(fragment), []))]
    return list(found.values())
