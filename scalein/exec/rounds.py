"""Rounds: rows and watermarks pass the operators of a graph, in topological order.

`Rounds` is the graph at work. Rows that enter it pass every operator downstream; a fork gives its rows to each of its
consumers. Then the watermark is announced, operator by operator: what one emits has passed all operators downstream
before the next one's time advances.

Event time: inputs that meet somewhere share a `Timeline`, whose watermark is the least of their partitions' clocks. The
watermark of an operator's input follows from it by what the operators in between promise (`Operator.promise`); the
least one counts where several inputs meet. A watermark that closes sliding windows is announced before the next rows.

This module has no sources, sinks or checkpoints: a driver feeds it, and takes what comes out, by number of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import pyarrow as pa

import scalein.exec.distinct
import scalein.exec.over_operator
import scalein.exec.process_operator
import scalein.exec.stream_join
import scalein.exec.time_sort  # noqa: F401 (these register their operators)
from scalein.exec.changelog import changelog_rows
from scalein.exec.event_time import PartitionClock, least
from scalein.exec.operator import Morsel, Operator
from scalein.exec.operator_metrics import OperatorMetrics
from scalein.exec.speculation import D, speculate
from scalein.exec.window_aggregate import WindowedAggregate


class Result(NamedTuple):
    """A batch of an output."""

    output: int
    batch: pa.RecordBatch


class Timeline:
    """The event time of inputs that meet: one watermark, which never goes back."""

    def __init__(self, watermark: int | None) -> None:
        """`watermark` is that of a checkpoint, which operators know of."""
        self.watermark = self.announced = watermark
        self.clocks: list[PartitionClock] = []
        self.nodes: list[Node] = []  # in topological order
        self.waiting: list[Node] = []  # those that a watermark may be due for before the end of a round

    def move_watermark(self) -> None:
        """Follow the clocks."""
        found = least(self.clocks)
        if found is not None and (self.watermark is None or found > self.watermark):
            self.watermark = found

    @property
    def is_due(self) -> bool:
        """Whether an operator must see the watermark before more rows."""
        if self.watermark is None or self.watermark == self.announced:
            return False
        for node in self.waiting:
            due, mark = node.operator.due, node.input_watermark(self.watermark)
            if due is not None and mark is not None and mark >= due:
                return True
        return False


@dataclass(eq=False)
class Node:
    """An operator in its place."""

    operator: Operator
    metrics: OperatorMetrics
    timeline: Timeline
    is_timed: bool  # it uses event time
    is_fed: bool = False  # by a source
    number: int = 0
    inputs: list[Node] = field(default_factory=list)
    consumers: list[Node] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    lead: int = 0  # how much later than the watermark of its input the times are that it compares with it
    delays: bool = False  # the watermark that it gets is not always that of its timeline
    _known: tuple[int, int | None] | None = None  # the last watermark of the timeline, and that of the input

    def input_watermark(self, watermark: int) -> int | None:
        """The watermark that it gets, when that of its timeline is this; None: rows of any time may come."""
        if not self.delays:
            return watermark
        if self._known is None or self._known[0] != watermark:
            self._known = watermark, self._least(watermark)
        return self._known[1]

    def _least(self, watermark: int) -> int | None:
        found = [watermark] if self.is_fed else []
        for node in self.inputs:
            mark = node.input_watermark(watermark)
            promised = None if mark is None else node.operator.promise(mark)
            if promised is None:
                return None
            found.append(promised)
        return min(found) + self.lead

    def rows(self, morsels: Iterable[Morsel]) -> list[Morsel]:
        if self.delays and self.is_timed:
            morsels = (morsel if morsel.watermark is None else
                       morsel._replace(watermark=self.input_watermark(morsel.watermark)) for morsel in morsels)
        with self.metrics.working():
            found = self.operator.rows(self.metrics.taking(morsels))
        self.metrics.rows_out += sum(morsel.batch.num_rows for morsel in found)
        return found


class Rounds:
    """The operators of a graph, in topological order, and how rows and time pass them."""

    def __init__(self, nodes: list[Node], emit: str) -> None:
        self.nodes, self._emit = nodes, emit
        self._timelines = list(dict.fromkeys(node.timeline for node in nodes))
        for number, node in enumerate(nodes):
            node.number = number
            # A promise that holds at any watermark is that of an operator which passes rows on as they come.
            is_late = (below.delays or below.is_timed or below.operator.promise(0) != 0 for below in node.inputs)
            node.delays = bool(node.lead) or any(is_late)
            node.timeline.nodes.append(node)
            if node.operator.due is not None:
                node.timeline.waiting.append(node)

    @property
    def operators(self) -> list[Operator]:
        return [node.operator for node in self.nodes]

    def is_done(self, nodes: Iterable[Node]) -> bool:
        """Whether rows for these nodes can change nothing: all of them would meet a limit that is reached."""
        done: list[bool] = [False] * len(self.nodes)
        for node in reversed(self.nodes):
            downstream = not node.outputs and all(done[consumer.number] for consumer in node.consumers)
            done[node.number] = node.operator.is_done or downstream
        return all(done[node.number] for node in nodes)

    # --- rows

    def speculate(self, node: Node, column: str, clocks: dict[str, PartitionClock], deliveries: list[D],
                  more: Callable[[], list[D]]) -> bool:
        """Whether the rows were aggregated, and the watermark moved, before their times were read
        (`speculation.py`); they may have become more.
        """
        if not isinstance(node.operator, WindowedAggregate) or node.delays:
            return False
        with node.metrics.working():
            is_done = speculate(node.timeline, node.operator, column, clocks, deliveries, more)
        if is_done:
            node.metrics.rows_in += sum(delivery.batch.num_rows for delivery in deliveries)
        return is_done

    def run(self, nodes: Sequence[Node], morsels: Iterator[Morsel]) -> Iterator[Result]:
        """The results of rows that enter at some nodes of one timeline, and of windows that must close among them.

        Time moves while `morsels` is consumed. The caller exhausts what this gives, then calls `advance`.
        """
        held_back: list[Morsel] = []
        timeline = nodes[0].timeline
        while True:
            yield from self._along(nodes, self._until_due(timeline, morsels, held_back))
            if not held_back:
                return
            yield from self._announce(timeline)

    def _until_due(self, timeline: Timeline, morsels: Iterator[Morsel], held_back: list[Morsel]) -> Iterator[Morsel]:
        """Morsels until an operator must see the watermark; the first one after that goes to `held_back`."""
        while held_back:
            yield held_back.pop()
        for morsel in morsels:
            if timeline.waiting and timeline.is_due:
                held_back.append(morsel)
                return
            yield morsel

    def _along(self, nodes: Sequence[Node], morsels: Iterable[Morsel]) -> list[Result]:
        """What comes out of rows that these nodes, and those downstream of them, get."""
        results: list[Result] = []
        pending: dict[int, Iterable[Morsel]] = {}
        # One node takes rows while they are in the cache.
        _give(pending, nodes, morsels if len(nodes) == 1 else list(morsels))
        while pending:
            number = min(pending)
            node = self.nodes[number]
            found = node.rows(pending.pop(number))
            if not found:
                continue
            for output in node.outputs:
                results += [self._result(node, output, morsel.batch) for morsel in found]
            _give(pending, node.consumers, found)
        return results

    def _result(self, node: Node, output: int, batch: pa.RecordBatch) -> Result:
        """Results that nothing takes back are inserts where changes are wanted."""
        is_insert = self._emit == "changes" and not node.operator.emits_changes
        return Result(output, changelog_rows(batch, "insert") if is_insert else batch)

    def _emitted(self, node: Node, batches: Iterator[pa.RecordBatch], watermark: int | None) -> Iterator[Result]:
        """What an operator emits goes to its outputs, and to those downstream."""
        for batch in batches:
            for output in node.outputs:
                yield self._result(node, output, batch)
            if node.consumers:
                yield from self._along(node.consumers, [Morsel(batch, watermark)])

    # --- time

    def advance(self) -> Iterator[Result]:
        """Results of windows that the watermarks have closed, as they are asked for; the end of a round."""
        for timeline in self._timelines:
            yield from self._announce(timeline)
        for node in self.nodes:
            if node.operator.defers_results:
                yield from self._emitted(node, node.metrics.giving(node.operator.deferred), node.timeline.announced)

    def _announce(self, timeline: Timeline) -> Iterator[Result]:
        if timeline.watermark is None or timeline.watermark == timeline.announced:
            return
        before, timeline.announced, now = timeline.announced, timeline.watermark, timeline.watermark
        for node in timeline.nodes:
            mark = node.input_watermark(now)
            if mark is not None:
                emitted = node.metrics.giving(partial(node.operator.advance, mark))
                yield from self._emitted(node, emitted, before)

    def finish(self) -> Iterator[Result]:
        """Everything that is left, one batch after the other: it may be more than fits into memory. Nothing follows."""
        for node in self.nodes:
            yield from self._emitted(node, node.metrics.giving(node.operator.finish), node.timeline.announced)


def _give(pending: dict[int, Iterable[Morsel]], nodes: Sequence[Node], morsels: Iterable[Morsel]) -> None:
    """Rows for some nodes; one that takes an input twice gets them twice."""
    for node in nodes:
        before = pending.get(node.number)
        pending[node.number] = morsels if before is None else [*before, *morsels]
