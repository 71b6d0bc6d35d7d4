"""The reduce side of a stream: the operator of the flow's state, over the runs of a range of key groups.

It is the operator that a job has (`exec/rounds.py` drives both); what differs is its state (`state/run_table.py`), and
that an aggregation gets the partial groups of map tasks. A round is what was shuffled to the task; then the watermark
after the batch is announced. A task changes no existing file: what it wrote is valid once the driver's manifest names
it, so a task may be repeated, or run twice at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa

from scalein.exec.operator import Context, Morsel, StatefulOperator, open_operator
from scalein.exec.operator_metrics import OperatorMetrics
from scalein.exec.rounds import Node, Rounds, Timeline
from scalein.options import Options
from scalein.spark.shuffle import key_hashes
from scalein.spark.streaming.event_time import Clock
from scalein.spark.streaming.stream_plan import StreamPlan
from scalein.state.hash_runs import Run, StateTraffic
from scalein.state.run_table import RUNS, RunBackend
from scalein.storage.checked_json import Json, as_list, as_map
from scalein.storage.object_store import Location


@dataclass(frozen=True)
class ReduceInput:
    """The input of a reduce task besides rows: its key groups, their runs, the clock before and after the batch."""

    groups: tuple[int, int]
    runs: list[Run]
    before: Clock
    after: Clock
    migration: str = "lazy"
    is_last: bool = False  # all that waits for the watermark comes out


@dataclass
class Reduced:
    """What a reduce task has found besides results: the runs of its key groups, and rows that are not in any."""

    runs: list[Run] = field(default_factory=list)
    late: list[pa.RecordBatch] = field(default_factory=list)  # if late rows have a sink
    late_rows: int = 0
    timeless: int = 0


class Reducer:
    """The reduce side of a flow; it runs one task at a time, and its programs are compiled once."""

    def __init__(self, plan: StreamPlan, options: Options) -> None:
        self._plan, self._options = plan, options
        self._backend = RunBackend(lambda rows, keys: key_hashes(rows, keys, options))
        self._operator: StatefulOperator | None = None
        self._found = Reduced()

    def run(self, given: ReduceInput, shuffled: list[pa.RecordBatch], location: Location,
            write: Callable[[pa.RecordBatch], None]) -> Reduced:
        """What follows from a batch, of which `shuffled` are the rows; results go to `write`."""
        self._found = Reduced()
        self._backend.begin(location, given.groups, given.migration)
        operator, self._operator = self._operator or self._open(), None  # one that fails is not used again
        operator.restore(self._version(given))
        timeline = Timeline(given.before.watermark)
        node = Node(operator, OperatorMetrics("reduce"), timeline, self._plan.is_timed, outputs=[0])
        rounds = Rounds([node], self._plan.emit)
        watermark = given.before.watermark
        morsels = (Morsel(batch, watermark) for batch in self._plan.coalesced(shuffled, watermark) if batch.num_rows)
        for result in rounds.run([node], morsels):
            write(result.batch)
        timeline.watermark = given.after.watermark
        for result in rounds.advance():
            write(result.batch)
        if given.is_last and self._plan.drains_all:
            for result in rounds.finish():
                write(result.batch)
        operator.flush()
        version = as_map(operator.snapshot()())
        self._operator = operator
        self._found.runs = [replace(Run.from_json(each), part=part) for part in self._plan.state_parts
                            for each in as_list(as_map(version[part] if part else version)[RUNS])]
        return self._found

    @property
    def traffic(self) -> StateTraffic:
        """Of the last task."""
        return self._backend.traffic

    def _open(self) -> StatefulOperator:
        plan = self._plan
        context = Context(self._options, Path(), self._late, plan.sends_late, self._timeless, None, state=self._backend,
                          takes_partials=plan.takes_partials, holds_rows=plan.holds_rows)
        # Windows of rows have one result, when they close.
        found = open_operator(plan.reduced, context, None, "final" if plan.mode == "closing" else plan.emit)
        assert isinstance(found, StatefulOperator)
        return found

    def _late(self, rows: pa.RecordBatch) -> None:
        self._plan.check_late(rows)
        self._found.late_rows += rows.num_rows
        if self._plan.sends_late:
            self._found.late.append(rows.select(self._plan.late_schema.names))

    def _timeless(self, rows: int) -> None:
        self._found.timeless += rows

    def _version(self, given: ReduceInput) -> dict[str, Json]:
        """The state before the batch, as its operator restores it."""
        plan, watermark = self._plan, given.before.watermark
        parts: dict[str, Json] = {part: {RUNS: [[*run.to_json()] for run in given.runs if run.part == part],
                                         **plan.version(watermark, part)} for part in plan.state_parts}
        return {**as_map(parts.pop("", {})), **parts}
