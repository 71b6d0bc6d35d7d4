"""Profiles: a flow runs over a sample for about a second, and what it costs is measured and counted.

The operators of a job are driven here, round by round, by one thread and without its sources and sinks: so a round can
be timed in seconds of that thread's CPU, which other work on the machine hardly disturbs, as often as it takes. Rounds
of different sizes are measured, each several times, of which the least counts; `costs.fit` takes them apart. Kernels
report what their code does for a row (`ir/estimate.py`).

A sample is repeated to fill long rounds; times of a watermark's column go on from one repetition to the next, as far as
their type reaches.
"""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from scalein.api.binding import bind, by_name, inputs_of
from scalein.api.flow import Flow
from scalein.arrow_rows import as_integers
from scalein.connectors.base import BoundSource
from scalein.connectors.in_memory import Batches, of_arrow
from scalein.errors import NOWHERE, BadArgument, SourceLoc, here, type_name
from scalein.exec.fragments import SourceEdge, cut_together
from scalein.exec.morsels import COALESCED_ROWS, SMALL_ROWS
from scalein.exec.rounds import Result
from scalein.ir import ops
from scalein.ir.estimate import estimate
from scalein.ir.ops.join import as_written
from scalein.ir.rewrite import rewrite, walk_streams
from scalein.ir.stages import DedupStep, Process, Stage
from scalein.jobs.driver import LONG_ROUND_S
from scalein.jobs.job_graph import JobGraph, OutputSpec
from scalein.jobs.metrics import Metrics
from scalein.jobs.source_readers import Reader, SourcePosition, SourceReaders
from scalein.kernels.kernel_metrics import Profile, profiling
from scalein.model.calibration import calibration_of
from scalein.model.costs import Costs, Round, StageShare, fit
from scalein.model.model import FEW_ROWS, Model
from scalein.model.states import states_of
from scalein.options import Options

MAX_SAMPLE_ROWS = 1 << 21
LONG_ROUND_ROWS = 1 << 21  # of the longest rounds that are measured
READ_BATCHES = 500  # that are handed over by a source's thread, to measure that
MAX_COPIES = 48  # of a sample
SAMPLE_S = 3.0  # for which a source without an end is read, where it has fewer rows
SMALL_SAMPLE_ROWS = 1 << 14  # a smaller one is repeated first: of a few rows, no cost can be measured
FEW_SPREAD = 0.3  # the relative error, at least, of a sample that says little
LONG_BATCH_ROWS = 1 << 18
REPEATS = 7
BUDGET_S = 0.15  # of each measurement, which is made at least twice


@dataclass
class _Pass:
    """The rounds of one pass over a sample, by seconds of this thread's CPU. The first one, which prepares the kernels,
    does not count where there are others.
    """

    rounds: list[Round] = field(default_factory=list)
    rows_out: int = 0
    stages: tuple[StageShare, ...] = ()

    @property
    def warm(self) -> list[Round]:
        return self.rounds[1:] or self.rounds

    @property
    def whole_s(self) -> float:
        return sum(each.seconds for each in self.warm)

    @property
    def total(self) -> Round:
        return Round(*(sum(values) for values in zip(*map(astuple, self.warm), strict=True)))


class _Graph(JobGraph):
    """A graph whose ends of rounds are timed."""

    end_s = 0.0
    kernels: Profile

    def advance(self) -> Iterator[Result]:
        started, before = self.kernels.cpu_s(), self.kernels.seconds
        yield from list(super().advance())
        self.end_s += self.kernels.cpu_s() - started - (self.kernels.seconds - before)


def profile(flow: Flow, sample: object = None, *, calibration: object = None, emit: str = "final") -> Model:
    """A model of a flow as a job, from a run over a sample that takes a second or two.

    `sample` is the data of an unbound flow, or stands for that of its source: some hundred thousand rows as they will
    come, in their order. Without it, the first rows of the flow's own source are read, of one without an end those of
    three seconds. With several inputs it is a dict by their names. `calibration` is what `scalein calibrate` wrote, of
    the machine that this runs on.

    >>> import pyarrow as pa, scalein as si
    >>> q = si.flow({"k": pa.int64()}).group_by("k").agg(n=si.count())
    >>> model = si.model.profile(q, {"k": [1, 2, 3] * 1000})
    >>> one = model.predict(workers=1)
    >>> 0 < one.low <= one.max_rate <= one.high
    True
    """
    at = here()
    if not isinstance(flow, Flow):
        raise BadArgument("profile takes a flow", at=at, found=type_name(flow))
    if emit not in ("final", "changes"):
        raise BadArgument("no such way to emit", at=at, found=repr(emit), has="'final', 'changes'")
    op = _sampled(as_written(flow.op), sample, emit, at)
    costs = measure(op, emit, at)
    return Model(costs, calibration_of(calibration, at))


def _sampled(op: ops.Op, sample: object, emit: str, at: SourceLoc) -> ops.Op:
    """The flow over tables of at most `MAX_SAMPLE_ROWS` rows."""
    if inputs_of(op, at):
        if sample is None:
            raise BadArgument("a flow without data needs a sample", at=at, hint="si.model.profile(flow, sample)")
        op, sample = bind(op, sample, at), None
    edges = cut_together([op], emit)
    names = [edge.source.name for edge in edges]
    given: Mapping[str, object] = {}
    if sample is not None:
        is_by_name = len(edges) > 1 or (isinstance(sample, Mapping) and sample.keys() == {names[0]})
        given = by_name(dict.fromkeys(names), sample, "sample", at) if is_by_name else {names[0]: sample}
    tables = {edge.source.name: _table(edge.source, given.get(edge.source.name), at) for edge in edges}
    if not all(table.num_rows for table in tables.values()):
        raise BadArgument("a sample needs rows", at=at)
    streams = {id(each) for each in walk_streams(op) if isinstance(each, ops.Source)}

    def rule(each: ops.Op) -> ops.Op | None:
        if not isinstance(each, ops.Source) or id(each) not in streams:
            return None
        table = tables[each.name]
        return replace(each, arrow=table.schema, data=Batches(table.schema, NOWHERE, table=table))

    return rewrite(op, rule)


def _table(source: ops.Source, given: object, at: SourceLoc) -> pa.Table:
    data = source.data if given is None else of_arrow(given, at, source.arrow)
    assert isinstance(data, Batches | BoundSource)
    if isinstance(data, Batches) and data.table is not None:
        return data.table.slice(0, MAX_SAMPLE_ROWS).combine_chunks()
    found, rows = [], 0
    for batch in _endless(data) if isinstance(data, BoundSource) and not data.bounded else data.read():
        found.append(batch)
        rows += batch.num_rows
        if rows >= MAX_SAMPLE_ROWS:
            break
    return pa.Table.from_batches(found, data.schema).slice(0, MAX_SAMPLE_ROWS).combine_chunks()


def _endless(source: BoundSource) -> Iterator[pa.RecordBatch]:
    """Rows of a source without an end, of its partitions in turns, as far as they come within a few seconds."""
    source, ends_s = source.until_now() or source, time.monotonic() + SAMPLE_S
    partitions = deque(source.read_from(partition, None) for partition in source.partitions())
    try:
        while partitions and time.monotonic() < ends_s:
            found = next(partitions[0], None)
            if found is None:
                partitions.popleft()
                continue
            partitions.rotate(-1)
            if found[0].num_rows:
                yield found[0]
    finally:
        for each in partitions:
            each.close()


# --- measuring


def measure(op: ops.Op, emit: str, at: SourceLoc) -> Costs:
    """The costs of a flow whose sources are tables."""
    edges = cut_together([op], emit)
    tables = {edge.source.name: edge.source.data.table for edge in edges
              if isinstance(edge.source.data, Batches) and edge.source.data.table is not None}
    given, whole_op, room = sum(table.num_rows for table in tables.values()), op, _room(op, edges)
    rows, moved = given, sum(_read_bytes(edge, tables[edge.source.name]) for edge in edges) / given
    while rows < SMALL_SAMPLE_ROWS and room > 1:
        copies = min(MAX_COPIES, -(-SMALL_SAMPLE_ROWS // rows), room)
        op, rows, room = _repeated(op, edges, copies), rows * copies, room // copies
    small, medium = max(1, min(1_000, rows // 4)), max(1, min(1 << 14, rows // 4))

    def passes(flow: ops.Op, batch_rows: int, per_round: int, most: int) -> list[_Pass]:
        return _passes(flow, batch_rows, per_round, most, emit, at)

    singles = [passes(op, small, 1, 40 * small), passes(op, medium, 1, 24 * medium),
               passes(op, LONG_BATCH_ROWS, 1, 6 * LONG_BATCH_ROWS)]
    best = _best(singles[1])
    # No round takes longer than this, however many rows there are.
    longest = max(1 << 17, LONG_ROUND_S * best.total.rows / best.whole_s)
    most_copies = min(MAX_COPIES, room)
    long_rows = int(max(1, min(LONG_ROUND_ROWS, most_copies * rows // 3, longest)))
    copies = min(most_copies, max(1, -(-3 * long_rows // rows)))
    flow = _repeated(op, edges, copies)
    sizes = [(LONG_BATCH_ROWS, long_rows), (LONG_BATCH_ROWS, long_rows // 4), (medium, long_rows // 4),
             (small, min(long_rows // 4, 1_024 * small))]
    longs = [passes(flow, max(1, min(size, round_rows)), max(1, -(-round_rows // size)), max(1, 3 * round_rows))
             for size, round_rows in sizes]
    whole = _best(longs[0])
    taken = sum(each.rows for each in whole.rounds)
    # Of the last batch of a pass, which may be shorter, nothing is said.
    times = np.min([[one.seconds for one in each.warm] for each in singles[1]], axis=0)[:-1]
    scv = float(np.var(times) / np.mean(times) ** 2) if len(times) > 2 else 0.1
    common = {"variability": min(scv, 4.0), "rows": given, "bytes": moved, "rows_out": whole.rows_out / taken,
              "stages": whole.stages, "states": tuple(states_of(whole_op, given)), "emits_late": emit == "final"}
    found, alone = _fitted(longs), _fitted(singles)
    reading_s = max(_reading_s(tables[edge.source.name], _read_columns(edge, tables[edge.source.name]))
                    for edge in edges)
    return replace(found, **common, spread=max(found.spread, FEW_SPREAD if given < FEW_ROWS else 0.0),
                   batch_s=found.batch_s + reading_s, alone=replace(alone, batch_s=alone.batch_s + reading_s))


def _reading_s(table: pa.Table, columns: list[str]) -> float:
    """Seconds of a batch in the thread that hands over what a source gives: Python, so nothing else is prepared then.
    """
    few = table.slice(0, READ_BATCHES * 100).to_batches(max_chunksize=100)
    batches, took = few * -(-READ_BATCHES // len(few)), list[float]()

    def given() -> Iterator[pa.RecordBatch]:
        started = time.thread_time()
        yield from batches
        took.append((time.thread_time() - started) / len(batches))

    for _ in range(3):
        reader = Reader("sample", Batches(table.schema, NOWHERE, open=given), columns, SourcePosition())
        readers = SourceReaders([reader], None)
        while not readers.has_ended:
            readers.take(1 << 16, 1.0)
        readers.close()
    return min(took)


def _fitted(measured: list[list[_Pass]]) -> Costs:
    """The costs of rounds, from passes over rounds of different sizes."""
    parts = fit([_best(each).total for each in measured])
    noise = [np.median([one.whole_s for one in each]) / _best(each).whole_s - 1 for each in measured]
    spread = max(0.02, parts.error, min(0.2, float(np.median(noise)) / 2))
    return Costs(parts.batch_s, parts.call_s, parts.row_s, parts.round_s, parts.end_row_s, parts.kernel_call_s,
                 parts.kernel_row_s, spread=spread)


def _best(passes: list[_Pass]) -> _Pass:
    return min(passes, key=lambda each: each.whole_s)


def _passes(op: ops.Op, batch_rows: int, per_round: int, most: int, emit: str, at: SourceLoc) -> list[_Pass]:
    """Some passes over the first `most` rows; one before them compiles the kernels."""
    cut = _in_batches(op, batch_rows, most)
    _run(cut, batch_rows, per_round, emit, at)
    found: list[_Pass] = []
    while len(found) < 2 or (len(found) < REPEATS and sum(each.whole_s for each in found) < BUDGET_S):
        found.append(_run(cut, batch_rows, per_round, emit, at))
    return found


def _run(op: ops.Op, batch_rows: int, per_round: int, emit: str, at: SourceLoc) -> _Pass:
    """One pass over the flow's tables, in rounds of so many batches."""
    found = _Pass()
    output = OutputSpec(["out"], emit, lambda rows: None, False, None, has_checkpoints=False)
    options, metrics = Options.make(workers=1, at=at), Metrics(outputs=[("", 0)])
    with tempfile.TemporaryDirectory(prefix="scalein-profile-") as folder, profiling() as kernels:
        graph = _Graph([op], options, output, Path(folder), None, metrics, at)
        graph.kernels = kernels
        try:
            readers = SourceReaders(graph.readers, None)
            while True:
                started, kernels_s, end_s = kernels.cpu_s(), kernels.seconds, graph.end_s
                deliveries = readers.take(per_round * batch_rows, 0)
                if not deliveries:
                    break
                found.rows_out += sum(result.batch.num_rows for result in graph.run(deliveries))
                rows = [each.batch.num_rows for each in deliveries]  # as the driver does for each of its rounds
                metrics.latency.add([time.monotonic() - each.arrival_s for each in deliveries], rows)
                whole_s = kernels.cpu_s() - started
                kernels_s, end_s = kernels.seconds - kernels_s, graph.end_s - end_s
                taken = sum(rows)
                calls = len(deliveries) if batch_rows >= SMALL_ROWS else -(-taken // COALESCED_ROWS)
                found.rounds.append(Round(1, len(deliveries), calls, taken, max(0.0, whole_s - end_s - kernels_s),
                                          max(0.0, end_s), kernels_s))
                if len(found.rounds) == 1:
                    graph.flush()  # as the first checkpoint does: where groups are many, rows go into the store then
            taken = sum(each.rows for each in found.rounds)
            found.stages = tuple(StageShare(estimate(each.stage), each.rows / taken, each.seconds / taken,
                                            _is_serial(each.stage))
                                 for each in kernels.kernels.values() if each.rows)
            found.rows_out += sum(result.batch.num_rows for result in graph.finish())
        finally:
            graph.close()
    return found


def _is_serial(stage: Stage) -> bool:
    """Whether jobs run it in one thread: the first rows of keys, and the rows of a `process`."""
    return isinstance(stage.sink, Process) or any(isinstance(step, DedupStep) for step in stage.steps)


def _in_batches(op: ops.Op, batch_rows: int, most: int) -> ops.Op:
    """The flow over the first `most` rows of its sources, in batches."""
    def cut(table: pa.Table) -> pa.Table:
        return pa.Table.from_batches(table.slice(0, most).to_batches(max_chunksize=batch_rows), table.schema)

    return _with_tables(op, lambda source, table: cut(table))


def _with_tables(op: ops.Op, new: Callable[[ops.Source, pa.Table], pa.Table]) -> ops.Op:
    """The flow with other tables in the place of those that its streams come from."""
    streams = {id(each) for each in walk_streams(op) if isinstance(each, ops.Source)}

    def rule(each: ops.Op) -> ops.Op | None:
        if id(each) not in streams or not isinstance(each, ops.Source) or not isinstance(each.data, Batches):
            return None
        table = new(each, each.data.table)
        return replace(each, arrow=table.schema, data=Batches(table.schema, NOWHERE, table=table))

    return rewrite(op, rule)


def _read_columns(edge: SourceEdge, table: pa.Table) -> list[str]:
    """The columns of a table that are read."""
    return sorted({name for first in edge.firsts for name in first.before.schema.names} & set(table.column_names))


def _read_bytes(edge: SourceEdge, table: pa.Table) -> float:
    return float(table.select(_read_columns(edge, table)).nbytes)


def _times(edges: list[SourceEdge]) -> dict[str, str]:
    """The columns of watermarks, by the names of their sources."""
    return {edge.source.name: edge.watermark.column for edge in edges
            if edge.watermark is not None and edge.has_own_times}


def _room(op: ops.Op, edges: list[SourceEdge]) -> int:
    """How many copies of the tables, one after the other in time, the types of their times have room for.

    Windows and waits beyond the last row need some of it too.
    """
    found, margin, times = MAX_COPIES * SMALL_SAMPLE_ROWS, 0, _times(edges)
    for each in walk_streams(op):
        match each:
            case ops.Watermark():
                margin += each.delay
            case ops.Aggregate(window=window) | ops.AssignWindows(window=window) if window is not None:
                margin += 2 * window.margin
            case ops.StreamJoin(bound=bound) if bound is not None:
                margin += abs(bound.left_wait) + abs(bound.right_wait)
            case ops.Over() if each.length is not None:
                margin += each.length
            case _:
                pass
    for edge in edges:
        data = edge.source.data
        if edge.source.name not in times or not isinstance(data, Batches) or data.table is None:
            continue
        column = data.table[times[edge.source.name]]
        bits = column.type.bit_width - (not pa.types.is_unsigned_integer(column.type))
        last = (1 << min(63, bits)) - 1
        known = pc.min_max(as_integers(column.combine_chunks()))
        if known["max"].is_valid:
            step = known["max"].as_py() - known["min"].as_py() + 1
            found = min(found, 1 + max(0, last - margin - known["max"].as_py()) // step)
    return found


def _repeated(op: ops.Op, edges: list[SourceEdge], copies: int) -> ops.Op:
    """The flow over tables that are repeated; times of a watermark's column go on from one copy to the next."""
    if copies == 1:
        return op
    times = _times(edges)

    def repeated(source: ops.Source, table: pa.Table) -> pa.Table:
        column = times.get(source.name)
        found = pa.concat_tables([table] * copies if column is None else _later(table, column, copies))
        return found.combine_chunks() if found.num_rows < SMALL_SAMPLE_ROWS * MAX_COPIES // 16 else found

    return _with_tables(op, repeated)


def _later(table: pa.Table, column: str, copies: int) -> Iterator[pa.Table]:
    """Copies of a table, each with times after those of the one before."""
    place, kind = table.column_names.index(column), table[column].type
    numbers = as_integers(table[column].combine_chunks())
    known = pc.min_max(numbers)
    step = known["max"].as_py() - known["min"].as_py() + 1 if known["max"].is_valid else 0
    for number in range(copies):
        shifted = pc.add(numbers, pa.scalar(number * step, pa.int64()))
        yield table.set_column(place, table.field(column), shifted if shifted.type == kind else shifted.cast(kind))
