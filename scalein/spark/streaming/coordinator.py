"""The coordinator of a stream, on the driver: from the results of tasks to committed batches.

A batch of number b:

    manifest b exists        the batch is done: its output is made visible once more, and that is all
    else                     tasks run (`tasks.py`) on the runs of manifest b-1; whatever they wrote is durable
                             output is prepared, manifest b is published: the commit point
                             output is made visible; files that no manifest needs are removed

So the driver may crash at any instruction: Spark marks b as done when `Coordinator.run_batch` returns, and repeats it
otherwise, with the same rows. The number of partitions is read at the start of a batch: changing it costs nothing
(`hash_runs.py`). Only the function that runs the tasks knows Spark.

Output may wait for several batches, so that it is in fewer and larger files (`sinks.py`). It becomes visible with a
later batch, or between two of them with a revision of the manifest (`publish_waiting`).

Threads: one runs batches, another one publishes what waits; a lock lets them take turns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from scalein.errors import BadArgument, Damaged, InternalError, ScaleinError, SourceLoc, StoreFailed, warn
from scalein.exec.diagnosis import shown
from scalein.exec.event_time import TimeSummary, outlier_warning
from scalein.spark.row_groups import Skipped
from scalein.spark.serialize import BroadcastPlan
from scalein.spark.streaming.event_time import Clock
from scalein.spark.streaming.inputs import StreamInput
from scalein.spark.streaming.manifest import Manifests, key_of
from scalein.spark.streaming.read_state import describe_state
from scalein.spark.streaming.sinks import Committer, has_waiting
from scalein.spark.streaming.stream_plan import StreamPlan
from scalein.spark.streaming.tasks import BatchResult, MicroBatch, TaskResult, batch_totals
from scalein.state.hash_runs import Run, join_ranges
from scalein.state.key_groups import KEY_GROUPS
from scalein.storage.checked_json import Json, as_int, as_list, as_map, as_text
from scalein.storage.object_store import Location

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RunTasks = Callable[[MicroBatch], BatchResult]
RECENT_BATCHES = 100  # whose progress is known


@dataclass(frozen=True)
class StreamSpec:
    """The arguments of `start`, checked."""

    plan: StreamPlan
    input: StreamInput  # the stream's columns that are read
    committers: dict[str, Committer]  # by role: out, and perhaps late and failed
    location: Location
    partitions: int
    trigger: dict[str, object]
    migration: str
    at: SourceLoc
    name: str | None = None  # of Spark's query
    files_every_s: float | None = None  # for which output waits at most


@dataclass
class Totals:
    """Counts of the batches since the start of a stream."""

    batches: int = 0
    busy_s: float = 0.0
    rows_in: int = 0
    rows_out: int = 0
    late_rows: int = 0
    timeless_rows: int = 0
    ended_s: float | None = None  # when the last batch did, by `time.monotonic`
    partitions: int = 0  # of it


class Phases:
    """Seconds of the phases of a batch."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.monotonic()

    def end(self, phase: str) -> None:
        """End a phase that began with the end of the one before."""
        now = time.monotonic()
        self.seconds[phase], self._since = round(now - self._since, 3), now


class Coordinator:
    """Runs and commits the batches of a stream. It holds the checkpoint until `close`."""

    def __init__(self, spec: StreamSpec, broadcast: BroadcastPlan) -> None:
        self._spec, self._broadcast = spec, broadcast
        self.partitions = spec.partitions
        self.progress: dict[str, object] | None = None  # of the last batch, perhaps of an earlier start
        self.recent_progress: tuple[dict[str, object], ...] = ()  # of the last batches of this start
        self.totals = Totals()
        self._lock = threading.Lock()
        self._is_settled = True  # `_last` is the newest manifest, and its output is visible
        self._has_warned_of_late_rows = self._has_warned_of_outliers = False
        self._manifests = Manifests(spec.location)
        self._manifests.acquire(spec.at)
        self._opened: list[Committer] = []
        try:
            self._recover()
        except BaseException:
            self.close()
            raise

    def _recover(self) -> None:
        """Resume from the last manifest, if there is one."""
        spec, location = self._spec, self._spec.location
        self._last = self._manifests.newest()
        self.clock, self._runs, self._previous_files = Clock(), list[Run](), set[str]()
        committed: dict[str, Json] = {}
        if self._last is not None:
            try:
                self._check_same(as_list(self._last["flow"]))
                self.clock = Clock.from_json(self._last["clock"])
                self._runs = [Run.from_json(each) for each in as_list(self._last["runs"])]
                committed = as_map(self._last["output"])
                self._check_nothing_waits_elsewhere(committed)
                self._previous_files = self._needed_files(self._runs, committed)
                self.progress = {**as_map(self._last["progress"]), "duration_s": None, "phases_s": {}}
            except (ValueError, KeyError, TypeError) as error:
                raise Damaged("a manifest has unexpected content", found=repr(error),
                              file=location.uri_of(key_of(self._last).name)) from error
        self._last = self._manifests.adopt(self._last)  # before anything of earlier starts is removed
        run = f"{self._manifests.name}-{self._manifests.start}"
        for committer in spec.committers.values():
            self._opened.append(committer)
            committer.claim(run, location.uri)
        for role, committer in spec.committers.items():
            committer.open(self._committed(role, committed), run)
        self.publish_waiting(is_end=True)  # what an earlier start has left

    def _committed(self, role: str, output: dict[str, Json]) -> Json:
        """The entry of an output in a manifest, if it was of the same kind."""
        if role not in output:
            return None
        kind, prepared = as_list(output[role])
        return prepared if kind == self._spec.committers[role].kind else None

    def _check_nothing_waits_elsewhere(self, output: dict[str, Json]) -> None:
        """Output of committed batches that waits becomes visible only through its own sink."""
        for role, (kind, prepared) in ((role, as_list(entry)) for role, entry in output.items()):
            now = self._spec.committers.get(role)
            if has_waiting(as_text(kind), prepared) and (now is None or now.kind != kind):
                raise BadArgument("output of the last start waits to become visible in larger files, and this start "
                                  "has another sink", at=self._spec.at, found=kind, rows=role,
                                  hint="start the stream once with that sink; after that it may be another")

    def _check_same(self, before: list[Json]) -> None:
        now = self._spec.plan.signature
        if before in self._spec.plan.outdated_signatures:
            raise BadArgument("an older scalein wrote the checkpoint, with rows for these aggregates; now they are "
                              "partial groups", at=self._spec.at, checkpoint="\n".join(map(str, before)),
                              flow="\n".join(map(str, now)), hint="give a new checkpoint; the flow need not change")
        if before != now:
            raise BadArgument("this flow has other state than the one that wrote the checkpoint", at=self._spec.at,
                              checkpoint="\n".join(map(str, before)) or "nothing",
                              flow="\n".join(map(str, now)) or "nothing",
                              hint="give another checkpoint, or resume with the flow as it was")

    # --- a batch

    def run_batch(self, number: int, query: str, run_tasks: RunTasks, spark: SparkSession | None) -> None:
        """Run and commit a batch of Spark's `query`; `run_tasks` runs its tasks."""
        with self._lock:
            self._run_or_repeat(number, query, run_tasks, spark)

    def _run_or_repeat(self, number: int, query: str, run_tasks: RunTasks, spark: SparkSession | None) -> None:
        self._check_query(query)
        done = -1 if self.last_batch is None else self.last_batch
        if number == done:
            self._check_outlets()
            self._manifests.check_not_superseded()
            self._commit(spark)
        elif number == done + 1:
            self._run(number, query, run_tasks, spark)
        else:  # a lower number too: its rows may differ from those already counted
            raise Damaged(f"Spark is at batch {number}, and the last manifest is "
                          f"{f'that of batch {done}' if done >= 0 else 'missing'}",
                          file=self._spec.location.uri_of("manifests" if number > done else "spark"),
                          hint="restore the missing files, or start again with another checkpoint")

    def _check_query(self, found: str) -> None:
        """Batches of two queries must not be mixed: equal numbers have other rows."""
        if self._last is not None and (known := self._last["query"]) != found:
            raise BadArgument("another query wrote this checkpoint: Spark's part of it was removed or replaced",
                              at=self._spec.at, file=self._spec.location.uri_of("spark"), checkpoint=known, found=found,
                              hint="give another checkpoint, or restore its folder spark")

    def _check_outlets(self) -> None:
        """Spark repeats the last batch, so its output may not be visible yet: only its own sink can commit it."""
        assert self._last is not None
        for role, (kind, prepared) in ((role, as_list(entry)) for role, entry in as_map(self._last["output"]).items()):
            if prepared is not None and (role not in self._spec.committers or self._spec.committers[role].kind != kind):
                raise BadArgument("the last start had another sink, whose output may not be fully visible",
                                  at=self._spec.at, found=kind, rows=role,
                                  hint="start the stream once with that sink; after that it may be another")

    def drain(self, run_tasks: RunTasks, spark: SparkSession | None) -> None:
        """Close all windows that have rows, after the last batch. The watermark is then at the end of the last one, so
        that they stay closed if the stream resumes.
        """
        with self._lock:
            drains_to = self._last_window_end()
            if self._last is not None and self._is_settled and drains_to is not None:
                self._run(as_int(self._last["batch"]), as_text(self._last["query"]), run_tasks, spark, drains_to)

    def _last_window_end(self) -> int | None:
        """The watermark that makes all results final, if it is not reached yet."""
        end = self._spec.plan.drained_at(self._runs, self.clock)
        if end is None:
            return None
        return end if self.clock.watermark is None or self.clock.watermark < end else None

    def _run(self, number: int, query: str, run_tasks: RunTasks, spark: SparkSession | None,
             drains_to: int | None = None) -> None:
        phases, partitions = Phases(), self.partitions
        spec, prefix = self._spec, f"{self._manifests.name}-{number:010}"
        sinks = {role: committer.task_sink for role, committer in spec.committers.items()}
        result = run_tasks(MicroBatch(self._broadcast, spec.input.flow_types, prefix, partitions, self.clock,
                                      tuple(self._runs), spec.location, spec.migration, sinks, drains_to=drains_to))
        phases.end("tasks")
        results = [result.tasks[task] for task in sorted(result.tasks)]
        runs, clock = self._state_after(results, partitions, result.skipped.times)
        output: dict[str, Json] = {}
        for role, committer in spec.committers.items():
            prepared = committer.prepare(prefix, [each[role] for each in results], result.rows[role])
            output[role] = [committer.kind, prepared]
        progress = {**self._progress(results, result.skipped, number, partitions, runs, clock),
                    "read_by": result.read_by}
        content: dict[str, Json] = {
            "query": query, "job": self._manifests.name, "partitions": partitions, "flow": spec.plan.signature,
            "state": describe_state(spec.plan), "runs": [[*run.to_json()] for run in runs], "clock": clock.to_json(),
            "watermark": clock.watermark, "output": output, "progress": progress}  # fmt: skip
        needed = self._needed_files(runs, output)
        self._check_visible(runs, needed - {run.file for run in runs})
        phases.end("prepare")
        self._is_settled = False
        if drains_to is None:
            self._last = self._manifests.publish(number, content)
        else:
            assert self._last is not None
            self._last = self._manifests.revise(self._last, content)
        self._runs, self.clock = runs, clock
        phases.end("publish")
        self._commit(spark)
        self._is_settled = True
        phases.end("commit")
        self._manifests.remove_unreferenced(needed, self._previous_files)
        self._previous_files = needed
        phases.end("cleanup")
        took_s = sum(phases.seconds.values())
        self.progress = {**progress, "duration_s": round(took_s, 3), "phases_s": phases.seconds}
        self.recent_progress = (*self.recent_progress[1 - RECENT_BATCHES :], self.progress)
        totals = Totals(self.totals.batches + 1, self.totals.busy_s + took_s, *(
            getattr(self.totals, name) + as_int(progress[name])
            for name in ("rows_in", "rows_out", "late_rows", "timeless_rows")))
        self.totals = replace(totals, ended_s=time.monotonic(), partitions=partitions)

    def publish_waiting(self, is_end: bool = False) -> None:
        """Make output of earlier batches visible that waits for larger files, if it is time; at the end, all of it."""
        with self._lock:
            if self._last is None or not self._is_settled:
                return
            due = {role: prepared for role, committer in self._spec.committers.items()
                   if (prepared := committer.publish_waiting(is_end)) is not None}
            if not due:
                return
            entries: dict[str, Json] = {role: [self._spec.committers[role].kind, prepared]
                                        for role, prepared in due.items()}  # fmt: skip
            self._is_settled = False
            self._last = self._manifests.revise(
                self._last, {**self._last, "output": {**as_map(self._last["output"]), **entries}})
            for role, prepared in due.items():
                self._spec.committers[role].commit(prepared, None, as_int(self._last["batch"]))
            self._is_settled = True

    @property
    def has_waiting(self) -> bool:
        """Whether results wait to become visible in larger files."""
        if self._last is None:
            return False
        kind, prepared = as_list(as_map(self._last["output"])["out"])
        return has_waiting(as_text(kind), prepared)

    @property
    def last_batch(self) -> int | None:
        """The number of the last batch of the checkpoint."""
        return None if self._last is None else as_int(self._last["batch"])

    @property
    def next_end(self) -> int | None:
        """The end of the first open window that has rows."""
        watermark, lateness, runs = self.clock.watermark, self._spec.plan.lateness, self._runs
        slices = [(run.oldest, run.newest) for run in runs if run.oldest is not None and run.newest is not None]
        if lateness is None or not slices:
            return None
        oldest, newest = min(oldest for oldest, _ in slices), max(newest for _, newest in slices)
        if watermark is not None and newest < lateness.least_open(watermark):
            return None
        return lateness.next_end(oldest if watermark is None else max(oldest, watermark))

    def _check_visible(self, runs: list[Run], others: set[str]) -> None:
        """Files that tasks wrote must be visible to the driver, or the tasks of the next batch will not find them."""
        known = {run.file for run in self._runs}
        wanted = {run.file: run.size_bytes for run in runs if run.file not in known} | dict.fromkeys(others)
        for name, size in zip(wanted, self._spec.location.sizes(list(wanted)), strict=True):
            if size is None or wanted[name] not in (None, size):
                raise StoreFailed("a task wrote a file of the checkpoint, and the driver does not see it",
                                  at=self._spec.at, file=self._spec.location.uri_of(name), found=f"{size} bytes",
                                  hint="all machines must share this folder under this path: give a checkpoint on a "
                                       "shared filesystem")

    def _state_after(self, results: list[TaskResult], partitions: int,
                     skipped_times: TimeSummary) -> tuple[list[Run], Clock]:
        if self._spec.plan.mode == "rowwise":
            return [], self._spec.plan.advance_clock(self.clock, results, skipped_times)
        if not results:  # a batch without partitions
            return self._runs, self.clock
        clocks = [Clock.from_json(each["clock"]) for each in results]
        if len(results) != partitions or len(set(clocks)) > 1:
            raise InternalError("the results of a batch's tasks do not agree", found=f"{len(results)} of {partitions}")
        return join_ranges(Run.from_json(each) for some in results for each in as_list(some["runs"])), clocks[0]

    def _progress(self, results: list[TaskResult], skipped: Skipped, number: int, partitions: int, runs: list[Run],
                  clock: Clock) -> dict[str, Json]:
        rows, timeless, late, failed = batch_totals(results, self._spec.plan.mode).values()
        rows += skipped.rows
        text = outlier_warning(clock.outlier_rows - self.clock.outlier_rows, rows)
        if text is not None and not self._has_warned_of_outliers:
            self._has_warned_of_outliers = True
            warn(text, self._spec.at)
        if late and "late" not in self._spec.committers and not self._has_warned_of_late_rows:
            self._has_warned_of_late_rows = True
            warn(f"{late} rows came too late and were dropped; later ones are only counted: see "
                 'last_progress["late_rows"], or give late= a sink', self._spec.at)
        by_file = {run.file: run for run in runs}.values()
        traffic = {f"state_bytes_{name}": sum(as_int(each["traffic"][name]) for each in results if "traffic" in each)
                   for name in ("read", "moved", "written", "verified")}
        return {"name": self._spec.name, "batch_id": number, "partitions": partitions, "rows_in": rows,
                "row_groups_skipped": skipped.row_groups,
                "rows_out": sum(as_int(each["rows_out"]) for each in results), "late_rows": late,
                "failed_rows": failed, "timeless_rows": timeless, "outlier_rows": clock.outlier_rows,
                "watermark": clock.watermark, "watermark_time": self.watermark_time(clock),
                "why_no_watermark": self._why_no_watermark(clock), "state_files": len(by_file),
                "state_rows": sum(run.rows for run in by_file), "state_bytes": sum(run.size_bytes for run in by_file),
                **traffic}

    def watermark_time(self, clock: Clock) -> str | None:
        """The watermark as a time that people read."""
        dtype = self._spec.plan.time_type
        return None if clock.watermark is None or dtype is None else shown(clock.watermark, dtype)

    def _why_no_watermark(self, clock: Clock) -> str | None:
        if self._spec.plan.watermark_op is None:
            return "the flow has no with_watermark"
        return "no row with a time has arrived yet" if clock.watermark is None else None

    def _commit(self, spark: SparkSession | None) -> None:
        """Make the output of the last manifest visible."""
        assert self._last is not None
        output = as_map(self._last["output"])
        for role, committer in self._spec.committers.items():
            if (prepared := self._committed(role, output)) is not None:
                committer.commit(prepared, spark, as_int(self._last["batch"]))

    def _needed_files(self, runs: list[Run], output: dict[str, Json]) -> set[str]:
        """The files that a manifest needs."""
        needed = {run.file for run in runs}
        for role, committer in self._spec.committers.items():
            if (prepared := self._committed(role, output)) is not None:
                needed.update(committer.files(prepared))
        return needed

    def close(self) -> None:
        """Release the sinks and the checkpoint."""
        failed: ScaleinError | None = None
        for committer in self._opened:
            try:
                committer.close()
            except ScaleinError as error:
                failed = failed or error
        self._manifests.close()
        if failed is not None:
            raise failed


def checked_partitions(given: object, at: SourceLoc) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= KEY_GROUPS:
        raise BadArgument(f"partitions must be an integer from 1 to {KEY_GROUPS}", at=at, found=repr(given))
    return given
