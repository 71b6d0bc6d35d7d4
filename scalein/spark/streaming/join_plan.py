"""The plan of a stream that joins two: of several inputs, or of one with itself.

Map tasks run what precedes the join on each side (`several_inputs.py`); the rows of both sides are shuffled by their
keys, and the reduce side is the operator of jobs (`exec/stream_join.py`). A row is late if its time is before the
watermark after the batch before, or in windows, if its window is closed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

from scalein.compiler import compile_flow
from scalein.dtypes import DType
from scalein.errors import BadArgument, SourceLoc
from scalein.exec.bounded import Program
from scalein.exec.fragments import Fragment, check_bounded, check_event_time
from scalein.ir import ops
from scalein.ir.exprs import Call
from scalein.ir.rewrite import walk_ops
from scalein.ir.stages import FOREVER
from scalein.options import Options
from scalein.spark.map_reduce import MapReduce
from scalein.spark.serialize import optimise
from scalein.spark.shuffle import route
from scalein.spark.stream_joins import ShuffledJoin, with_join_columns
from scalein.spark.streaming.event_time import Clock
from scalein.spark.streaming.several_inputs import Inputs, UnionPlan
from scalein.spark.streaming.stream_plan import (
    MapSummary,
    StreamPlan,
    branch_of,
    inputs_and_last,
    rows_in_time,
    stream_ops,
    unbound_sources,
)
from scalein.state.hash_runs import Run
from scalein.storage.checked_json import Json

PARTS = ("", "right")  # of the state


def plan_of(op: ops.Op, emit: str, late: str, on_error: str, at: SourceLoc) -> StreamPlan:
    """The plan of a stream."""
    check_event_time([op], may_move=False)
    if any(isinstance(each, ops.StreamJoin) for each in stream_ops(op)):
        return JoinPlan(op, emit, late, on_error, at)
    plan = UnionPlan if len(unbound_sources(op, at)) > 1 else StreamPlan
    return plan(op, emit, late, on_error, at)


class JoinPlan(StreamPlan):
    """A flow over streams that are joined."""

    def __init__(self, op: ops.Op, emit: str, late: str, on_error: str, at: SourceLoc) -> None:
        self._op, self.emit, self._late, self._on_error, self._at = op, emit, late, on_error, at
        for name, policy, other in (("late", late, "drop"), ("on_error", on_error, "null")):
            if policy == "sink":
                raise BadArgument(f"the rows of a join's two sides have different columns, so {name} has no sink",
                                  at=at, step="join", hint=f'{name}="{other}"')
        sources = unbound_sources(op, at)
        self._edges, self._first = inputs_and_last(with_join_columns(optimise(op)), at)
        self.fragment, self.map_reduce = self._first, MapReduce(self._first)
        if not isinstance(self.fragment.state, ops.BufferedJoin):
            raise BadArgument("a flow over a stream has at most one operator with state, and this one has several",
                              at=at, hint="start a second stream over the output of the first")
        _check_times(op)
        check_bounded(self._edges, False, emit, at)
        self.join = ShuffledJoin(self.fragment)
        self.inputs = Inputs(op, sources, self._edges, lambda edge: Program(compile_flow(branch_of(
            edge, self.fragment))))
        self.edge = next((edge for edge in self._edges if edge.watermark is not None), self._edges[0])
        self.source = self.inputs.source
        self.watermark_op, self.sends_late = self.edge.watermark, False
        self.time_type, self.max_gap = self._time_type(), None

    def _time_type(self) -> DType | None:
        return None if self.watermark_op is None else self.edge.timed.schema[self.watermark_op.column].dtype

    mode = "joining"
    window = lateness = slice_column = skipped_time = row_keys = None
    has_origin = holds_rows = may_be_coded = takes_partials = False
    scan_conditions = ()

    @property
    def state_parts(self) -> tuple[str, ...]:
        return PARTS

    def version(self, watermark: int | None, part: str) -> dict[str, Json]:
        return {} if part else {"watermark": watermark}

    @property
    def is_timed(self) -> bool:
        return self.fragment.is_timed

    @property
    def reduced(self) -> Fragment:
        return self.fragment

    @property
    def signature(self) -> list[Json]:
        return [f"{self.mode} {self.state_text}"]

    @property
    def outdated_signatures(self) -> list[list[Json]]:
        return []

    # --- the map side

    def map_rows(self, batches: Iterable[pa.RecordBatch], clock: Clock, summary: MapSummary,
                 options: Options) -> Iterator[pa.RecordBatch]:
        """The rows of both sides to shuffle that are in time."""
        assert self.inputs is not None
        for _, batch in self.inputs.rows(batches, clock, summary, options):
            side = self.join.sides[self.join.side_of(batch.schema.names)]
            if side.time is not None:
                batch, late, timeless = rows_in_time(batch, side.time, self._least_on_time(clock.watermark))
                summary.timeless += timeless
                if late.num_rows:
                    self._add_late(late, summary)
            if batch.num_rows:
                yield batch

    def _least_on_time(self, watermark: int | None) -> int | None:
        bound = self._join_op.bound
        if watermark is None:
            return None
        return watermark if bound is None or not bound.is_window else bound.window_start(watermark)

    @property
    def _join_op(self) -> ops.StreamJoin:
        assert isinstance(self.fragment.state, ops.BufferedJoin)
        return self.fragment.state.join

    def routed(self, rows: Iterable[pa.RecordBatch], targets: int,
               options: Options) -> Iterator[tuple[int, int, pa.RecordBatch]]:
        for side, batch in self.join.by_side(rows):
            for target, part in route([batch], self.join.sides[side].keys, targets, options):
                yield target, side, part

    @property
    def shuffle_schemas(self) -> list[pa.Schema]:
        return [side.schema for side in self.join.sides]

    def coalesced(self, shuffled: Iterable[pa.RecordBatch], watermark: int | None) -> Iterator[pa.RecordBatch]:
        return (batch for _, batch in self.join.by_side(shuffled))

    # --- time

    def drained_at(self, runs: Iterable[Run], clock: Clock) -> int | None:
        """The watermark at which all rows are final that wait for a match."""
        newest = [run.newest for run in runs if run.newest is not None]
        bound = self._join_op.bound
        if bound is None or not newest or self.watermark_op is None:
            return None
        waits = [wait for wait in (bound.left_wait, bound.right_wait) if wait < FOREVER]
        return min(max(newest) + max([0, *waits]) + 1, FOREVER)


def _check_times(op: ops.Op) -> None:
    """Refuse sides with times of two types: their watermark would be in units of either."""
    for each in walk_ops(op):
        bound = each.bound if isinstance(each, ops.StreamJoin) else None
        if bound is not None and any(isinstance(time, Call) and time.fn == "cast"
                                     for time in (bound.left, bound.right)):  # fmt: skip
            raise BadArgument("in a stream both sides of a join have times of one type", at=each.at,
                              found=str(bound), hint="cast the time of one side before with_watermark")
