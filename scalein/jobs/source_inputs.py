"""Source inputs: a source of a job, its partitions with their clocks, and the operators that its rows come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from scalein.compiler import compile_flow
from scalein.connectors.base import BoundSource
from scalein.connectors.formats.statistics import Condition
from scalein.connectors.in_memory import Batches
from scalein.errors import BadArgument
from scalein.exec.event_time import PartitionClock, max_gap_of
from scalein.exec.fragments import SourceEdge
from scalein.exec.operator import Context, FragmentRunner
from scalein.exec.rounds import Node, Timeline
from scalein.exec.scan_predicates import scan_conditions
from scalein.ir import ops
from scalein.ir.exprs import Col, Named
from scalein.jobs.source_readers import Reader, SourcePosition
from scalein.storage.checked_json import Json, as_map


@dataclass(eq=False)
class SourceInput:
    """A source, its partitions, and the operators that its rows come to first."""

    edge: SourceEdge
    readers: list[Reader]
    clocks: dict[str, PartitionClock]
    absent: dict[str, Json]  # partitions that only earlier runs had: if they return, they resume at their offset
    nodes: list[Node]  # that its rows come to first
    times: FragmentRunner | None  # computes the event times of a batch, where they are not a column of the source
    is_timed: bool  # whether an operator on the path uses event time
    tests: str  # the pushed-down predicates, by which the rows of a partly read batch are counted

    @property
    def timeline(self) -> Timeline:
        return self.nodes[0].timeline

    def to_json(self, with_watermark: bool) -> dict[str, Json]:
        """The offset and the clock of each partition, and the watermark of all, if it is not that of the job."""
        time: dict[str, Json] = {"watermark": self.timeline.watermark} if with_watermark else {}
        return {**self.absent, **{
            reader.name: {"place": reader.position.to_json(), "tests": self.tests if reader.position.rows else "",
                          "clock": self.clocks[reader.name].to_json() if self.clocks else None, **time}
            for reader in self.readers}}  # fmt: skip


def source_input_of(edge: SourceEdge, needed: Sequence[str], context: Context, known: dict[str, Json],
                    nodes: list[Node], is_timed: bool) -> SourceInput:
    """The input of one source whose first operators read some columns, restored from an epoch."""
    data = edge.source.data
    assert isinstance(data, Batches | BoundSource)
    reads, times = list(dict.fromkeys(needed)), None
    if edge.watermark is not None:
        if edge.has_own_times:
            reads += [edge.watermark.column] if edge.watermark.column not in reads else []
        else:
            times = _times(edge, edge.watermark, context)
            reads = list(edge.first.input.columns)
    all_columns = edge.source.arrow.names
    needed = [name for name in all_columns if name in reads] or all_columns[:1]
    reads = needed if context.failed is None else all_columns  # a dead letter has all of them
    tests, malformed_columns = "", list[str]()
    if isinstance(data, BoundSource):
        conditions = _tests(edge)
        data, tests = data.project(reads).where(conditions), repr(conditions) if conditions else ""
        if context.failed is not None:
            kept = data.lenient("keep", needed)
            malformed_columns = [name for name in kept.schema.names if name not in data.schema.names]
            data = kept
    names = data.partitions() if isinstance(data, BoundSource) else ["all"]
    positions = {name: SourcePosition.of(as_map(known[name])["place"]) for name in names if name in known}
    readers = [Reader(name, data, reads, positions.get(name, SourcePosition()), malformed_columns=malformed_columns)
               for name in names]
    for reader in readers:
        if reader.position.rows and as_map(known[reader.name]).get("tests", tests) != tests:
            raise BadArgument("a batch of the source is half read, and the filter by which it omits rows has changed",
                              at=edge.source.at, source=edge.source.name, partition=reader.name,
                              hint="run the flow as it was for a moment, without max_rows_per_second; then change it")
    absent = {name: about for name, about in known.items() if name not in names}
    return SourceInput(edge, readers, _clocks(edge, names, known), absent, nodes, times, is_timed, tests)


def _times(edge: SourceEdge, mark: ops.Watermark, context: Context) -> FragmentRunner:
    """The times of a batch that the watermark is about."""
    field = edge.timed.schema[mark.column]
    item = Named("time", Col(field.name, field.dtype, field.nullable))
    # Rows that fail here fail again in the operators, which report them.
    failed = None if context.failed is None else lambda batch, number, error: None
    context = replace(context, options=replace(context.options, workers=1), failed=failed)
    return FragmentRunner(ops.Project(edge.timed, (item,)), context)


def _clocks(edge: SourceEdge, names: Sequence[str], known: dict[str, Json]) -> dict[str, PartitionClock]:
    if edge.watermark is None:
        return {}
    found = {}
    max_gap = max_gap_of(edge.timed.schema[edge.watermark.column].dtype)
    for name in names:
        found[name] = PartitionClock(edge.watermark.delay, max_gap)
        if name in known and (clock := as_map(known[name])["clock"]) is not None:  # there was a watermark
            found[name].restore(clock)
    return found


def _tests(edge: SourceEdge) -> tuple[Condition, ...]:
    """What holds for all rows of a source that matter: for results, and for its watermark."""
    rows = edge.first.before if edge.watermark is None else edge.timed
    is_all = rows is edge.first.input or len(edge.firsts) > 1  # each of several may need other rows
    return () if is_all else scan_conditions(compile_flow(rows))
