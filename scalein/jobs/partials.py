"""Partial groups: what arrives is aggregated by all workers as `collect` would do it, into tables that stay between two
borders (`runtime/standing.py`); at a border the partial groups (`ir/two_phase.py`) are taken out of them. So the fast
path of a job is that of a bounded run, and a change of workers moves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from scalein.compiler import compile_flow
from scalein.dtypes import Schema
from scalein.errors import ComputeError
from scalein.ir import ops
from scalein.ir.exprs import columns
from scalein.ir.nodes import Grouped, Host, Node, Ordered, Pipe, Scan, Take
from scalein.ir.passes.fuse import fuse
from scalein.ir.rewrite import exprs_of
from scalein.ir.two_phase import TwoPhase, finished_rows, two_phase
from scalein.jobs.late import Lateness
from scalein.jobs.segments import Segment, over, placeholder
from scalein.jobs.steps import (
    Arrival,
    Batches,
    Runner,
    Surroundings,
    filtered,
    reads,
)
from scalein.jobs.watermarks import as_integers
from scalein.runtime.blame import placed
from scalein.runtime.run import Program, StandingProgram

FOREVER = (1 << 63) - 1  # in units of time
MOST_STANDING = 1 << 20  # groups in workers' own tables
MANY_SHARE = 0.3  # of the rows, from which on groups are many


class Timed:
    """What all kinds of groups share: late rows, and the aggregation over rows that were looked at for that."""

    def __init__(self, segment: Segment, around: Surroundings) -> None:
        assert isinstance(segment.state, ops.Aggregate)
        self._segment, self._around = segment, around
        self._window = segment.state.window
        used = {name for expr, _ in exprs_of(segment.state) for name in columns(expr)}
        fields = Schema(tuple(field for field in segment.before.schema if field.name in used)
                        or tuple(segment.before.schema)[:1])
        self._names = fields.names
        self._late = None if self._window is None else Lateness(
            segment, self._window, around.delay, segment.before.schema.names if around.keeps_late else self._names)
        self._sorted_op = over(segment.op, segment.before, placeholder(fields))
        self._counted = 0  # rows since partial groups were taken
        self._has_many = False  # groups, compared with rows

    def _reads(self, program: Program) -> list[str]:
        return reads(program) + ([] if self._late is None else reads(self._late.rows))

    def _arrived(self, arrivals: Iterable[Arrival], sorted_: Batches) -> Iterator[pa.RecordBatch]:
        """Batches as they came that have no late rows; of the others, rows of the group's input go to `sorted_`."""
        for arrival in arrivals:
            if self._late is None or self._late.is_clean(arrival):
                self._counted += arrival.batch.num_rows
                yield arrival.batch
                continue
            for found in self._late.sort(arrival.batch, arrival.watermark, self._around.options):
                self._around.timeless(found.timeless)
                if found.late.num_rows:
                    self._around.late(found.late)
                if found.good.num_rows:
                    sorted_.append(found.good.select(self._names))

    next_end: int | None = None

    def close(self) -> None:
        pass


class Partial(Timed):
    """Rows to partial groups, and those to results."""

    def __init__(self, segment: Segment, around: Surroundings) -> None:
        super().__init__(segment, around)
        root = compile_flow(segment.op)
        node = group_of(root)
        self._two = two = two_phase(node)
        self._partial = Runner(segment.op, around, Program(two.partial))
        # Rows that fail are found by trying again, which needs a run that has no memory.
        self._standing = None if around.failed is not None else StandingProgram(two.partial)
        again = two_phase(group_of(compile_flow(self._sorted_op))).partial
        self._sorted_partial = Runner(self._sorted_op, around, Program(again))
        self._finish = Finish(segment.op, root, node, two.final, around, two)
        self.reads = self._reads(self._partial.program)

    def _partials(self, arrivals: Iterable[Arrival]) -> Batches:
        """Partial groups of rows; those of most rows come with `_taken`."""
        sorted_: Batches = []
        clean = self._arrived(arrivals, sorted_)
        found: Batches = []
        if self._standing is None:
            found = self._partial.run(list(clean))
        else:
            try:
                self._standing.add(clean, self._around.options)
            except ComputeError as error:
                raise placed(error, self._segment.op, self._standing.node) from None
            if self._standing.count > MOST_STANDING:
                self._has_many |= self._standing.count > MANY_SHARE * self._counted
                found = self._taken()
        return [*found, *(self._sorted_partial.run(sorted_) if sorted_ else [])]

    def _taken(self) -> Batches:
        """Partial groups of the rows since the last time."""
        self._counted = 0
        return [] if self._standing is None else list(self._standing.take())


class Finish:
    """From what waits to results: all groups, or those of windows that end in a range."""

    def __init__(self, op: ops.Op, root: Node, node: Grouped, final: Grouped, around: Surroundings,
                 two: TwoPhase | None = None) -> None:
        self._whole = Runner(op, around, Program(replaced(root, node, final)), by_row=False)
        self._windows = Runner(op, around, Program(final), by_row=False)
        items = None if two is None else finished_rows(two)
        rows = None if items is None else replaced(root, node, Pipe(final.input, (), items))
        self._rows = None if rows is None else Runner(op, around, Program(fuse(rows)))
        self._behind = Runner(op, around, Program(replaced(root, node, scan_of(node))), by_row=False)

    def all(self, given: Batches) -> Batches:
        """The results of partial groups, of which one key may have several."""
        return self._whole.run(given)

    def each(self, given: Batches) -> Batches:
        """The results of groups that are whole: no key twice."""
        return (self._whole if self._rows is None else self._rows).run(given)

    def between(self, given: Batches, after: int, end: int) -> Batches:
        """Windows that end behind `after`, up to `end`, of slices some of which others need too."""
        windows = []
        for batch in self._windows.run(given):
            ends = as_integers(batch.column("window_end"))
            windows.append(filtered(batch, pc.and_(pc.greater(ends, after), pc.less_equal(ends, end))))
        return self._behind.run(windows)


# --- programs


def group_of(node: Node) -> Grouped:
    """The aggregation of a segment's program."""
    while not isinstance(node, Grouped):
        assert isinstance(node, Pipe | Host | Take | Ordered)
        node = node.input
    return node


def replaced(node: Node, old: Grouped, new: Node) -> Node:
    """The program with another node in the place of its aggregation."""
    if node is old:
        return new
    assert isinstance(node, Pipe | Host | Take | Ordered)
    return replace(node, input=replaced(node.input, old, new))


def scan_of(node: Grouped) -> Scan:
    """A source of what a group gives."""
    return Scan(ops.Source("groups", node.schema.arrow, tuple(node.schema.names)))
