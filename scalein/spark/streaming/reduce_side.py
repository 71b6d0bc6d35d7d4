"""The reduce side of a stream: the operator of the flow's state, over the runs of a range of key groups.

It is the operator that a job has (`exec/rounds.py` drives both); what differs is its state (`state/run_table.py`), and
that an aggregation gets the partial groups of map tasks. A round is what was shuffled to the task; then the watermark
after the batch is announced. A task changes no existing file: what it wrote is valid once the driver's manifest names
it, so a task may be repeated, or run twice at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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


class Reducer:
    """The reduce side of a flow; it runs one task at a time, and its programs are compiled once."""

    def __init__(self, plan: StreamPlan, options: Options) -> None:
        self._plan, self._options = plan, options
        self._backend = RunBackend(lambda rows, keys: key_hashes(rows, keys, options))
        self._operator: StatefulOperator | None = None

    def run(self, given: ReduceInput, shuffled: list[pa.RecordBatch], location: Location,
            write: Callable[[pa.RecordBatch], None]) -> list[Run]:
        """The runs of the key groups after a batch, of which `shuffled` are the rows; results go to `write`."""
        self._backend.begin(location, given.groups, given.migration)
        operator, self._operator = self._operator or self._open(), None  # one that fails is not used again
        operator.restore(self._version(given))
        timeline = Timeline(given.before.watermark)
        node = Node(operator, OperatorMetrics("reduce"), timeline, self._plan.is_timed, outputs=[0])
        rounds = Rounds([node], self._plan.emit)
        morsels = (Morsel(batch, given.before.watermark) for batch in self._plan.coalesced(shuffled) if batch.num_rows)
        for result in rounds.run([node], morsels):
            write(result.batch)
        timeline.watermark = given.after.watermark
        for result in rounds.advance():
            write(result.batch)
        operator.flush()
        version = as_map(operator.snapshot()())
        self._operator = operator
        return [replace(Run.from_json(each), part=part) for part in self._plan.state_parts
                for each in as_list(as_map(version[part] if part else version)[RUNS])]

    @property
    def traffic(self) -> StateTraffic:
        """Of the last task."""
        return self._backend.traffic

    def _open(self) -> StatefulOperator:
        plan = self._plan
        context = Context(self._options, Path(), lambda rows: None, False, lambda rows: None, None, state=self._backend,
                          takes_partials=plan.takes_partials, holds_rows=plan.holds_rows)
        # Windows of rows have one result, when they close.
        found = open_operator(plan.reduced, context, None, "final" if plan.holds_rows else plan.emit)
        assert isinstance(found, StatefulOperator)
        return found

    def _version(self, given: ReduceInput) -> dict[str, Json]:
        """The state before the batch, as its operator restores it."""
        plan, watermark = self._plan, given.before.watermark
        parts: dict[str, Json] = {part: {RUNS: [[*run.to_json()] for run in given.runs if run.part == part],
                                         **plan.version(watermark, part)} for part in plan.state_parts}
        return {**as_map(parts.pop("")), **parts}
