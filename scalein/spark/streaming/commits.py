"""A stream's batches, as the driver sees them: from what tasks have said to what counts.

A batch of number b:

    manifest b is there      the batch is done: its output is made visible once more, and that is all
    else                     tasks run (`tasks.py`), from what manifest b-1 names; whatever they wrote is durable
                             output is prepared, manifest b is published: the commit point
                             output is made visible; what no manifest needs is removed

So the driver may end at any instruction: Spark marks b as done when `Commits.do` comes back, and plays it again
otherwise, with the same rows. The number of partitions is read at the beginning of a batch: another one costs nothing
(`runs.py`). One thread at a time calls; nothing here knows Spark but the function that runs the tasks.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from scalein.errors import BadArgument, Damaged, InternalError, ScaleinError, SourceLoc, StoreFailed
from scalein.spark.serialize import Carried
from scalein.spark.shuffle import KEY_GROUPS
from scalein.spark.streaming.clocks import Clock
from scalein.spark.streaming.manifest import Manifests, key_of
from scalein.spark.streaming.read_state import described
from scalein.spark.streaming.runs import Run, joined_runs
from scalein.spark.streaming.sinks import Outlet
from scalein.spark.streaming.tasks import Batch, Heard, counted, seen_of
from scalein.spark.streaming.work import Work
from scalein.storage.checked_json import Json, as_int, as_list, as_map
from scalein.storage.object_store import Location

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class Plan:
    """Everything that `start` was given, checked."""

    work: Work
    entering: pa.Schema  # the stream's columns that are read
    outlets: dict[str, Outlet]  # out, and perhaps late and failed
    location: Location
    partitions: int
    trigger: dict[str, object]
    migration: str
    at: SourceLoc


class Commits:
    """What a stream has committed, and how it goes on. It holds the checkpoint until `close`."""

    def __init__(self, plan: Plan, work: Carried) -> None:
        self._plan, self._work = plan, work
        self.partitions = plan.partitions
        self.progress: dict[str, object] | None = None
        self._has_warned = False
        self._manifests = Manifests(plan.location)
        self._manifests.take(plan.at)
        self._opened: list[Outlet] = []
        try:
            self._recover()
        except BaseException:
            self.close()
            raise

    def _recover(self) -> None:
        """Go on from the last manifest, if there is one."""
        plan, location = self._plan, self._plan.location
        self._last = self._manifests.newest()
        self._clock, self._runs, self._before = Clock(), list[Run](), set[str]()
        committed: dict[str, Json] = {}
        if self._last is not None:
            try:
                self._check_same(as_list(self._last["flow"]))
                self._clock = Clock.of(self._last["clock"])
                self._runs = [Run.of(each) for each in as_list(self._last["runs"])]
                committed = as_map(self._last["output"])
                self._before = self._named(self._runs, committed)
            except (ValueError, KeyError, TypeError) as error:
                raise Damaged("a manifest does not say what one says", found=repr(error),
                              file=location.uri_of(key_of(self._last).name)) from error
        self._last = self._manifests.adopt(self._last)  # before anything of earlier starts is removed
        for role, outlet in plan.outlets.items():
            outlet.open(self._committed(role, committed), f"{self._manifests.name}-{self._manifests.start}")
            self._opened.append(outlet)

    def _committed(self, role: str, output: dict[str, Json]) -> Json:
        """What a manifest says of an output, if it was of the same kind."""
        if role not in output:
            return None
        kind, prepared = as_list(output[role])
        return prepared if kind == self._plan.outlets[role].kind else None

    def _check_same(self, before: list[Json]) -> None:
        now = self._plan.work.signature
        if before in self._plan.work.outdated:
            raise BadArgument("an older scalein wrote the checkpoint, which kept rows for these aggregates; now they "
                              "are partial groups", at=self._plan.at, checkpoint="\n".join(map(str, before)),
                              flow="\n".join(map(str, now)), hint="the flow may stay as it is: give a new checkpoint")
        if before != now:
            raise BadArgument("this flow keeps other state than the one that wrote the checkpoint", at=self._plan.at,
                              checkpoint="\n".join(map(str, before)) or "nothing",
                              flow="\n".join(map(str, now)) or "nothing",
                              hint="give another checkpoint, or go on with the flow as it was")

    # --- a batch

    def do(self, number: int, query: str, act: Callable[[Batch], Heard], spark: SparkSession | None) -> None:
        """Have a batch of a query of Spark's counted; `act` runs its tasks."""
        self._check_query(query)
        done = -1 if self._last is None else as_int(self._last["batch"])
        if number == done:
            self._check_outlets()
            self._manifests.check()
            self._commit(spark)
        elif number == done + 1:
            self._run(number, query, act, spark)
        else:  # a lower number too: its rows may be other ones than those that are counted
            raise Damaged(f"Spark is at batch {number}, and the last manifest is "
                          f"{f'that of batch {done}' if done >= 0 else 'missing'}",
                          file=self._plan.location.uri_of("manifests" if number > done else "spark"),
                          hint="bring the missing files back, or begin again with another checkpoint")

    def _check_query(self, found: str) -> None:
        """Batches of two queries must not be mixed: numbers of one say nothing of the other's rows."""
        if self._last is not None and (known := self._last["query"]) != found:
            raise BadArgument("another query wrote this checkpoint: Spark's part of it was removed or replaced",
                              at=self._plan.at, file=self._plan.location.uri_of("spark"), checkpoint=known, found=found,
                              hint="give another checkpoint, or bring its folder spark back")

    def _check_outlets(self) -> None:
        """Spark plays the last batch again, so its output need not be visible: its own sink must see to that."""
        assert self._last is not None
        for role, (kind, prepared) in ((role, as_list(word)) for role, word in as_map(self._last["output"]).items()):
            if prepared is not None and (role not in self._plan.outlets or self._plan.outlets[role].kind != kind):
                raise BadArgument("the last start had another sink, whose output is perhaps not all visible",
                                  at=self._plan.at, found=kind, rows=role,
                                  hint="start the stream once more with that sink; then it may be another")

    def _run(self, number: int, query: str, act: Callable[[Batch], Heard], spark: SparkSession | None) -> None:
        began, partitions = time.monotonic(), self.partitions
        plan, prefix = self._plan, f"{self._manifests.name}-{number:010}"
        outputs = {role: outlet.output for role, outlet in plan.outlets.items()}
        said = act(Batch(self._work, plan.entering, prefix, partitions, self._clock, tuple(self._runs), plan.location,
                         plan.migration, outputs))
        words = [said.words[task] for task in sorted(said.words)]
        runs, clock = self._state_behind(words, partitions)
        output: dict[str, Json] = {}
        for role, outlet in plan.outlets.items():
            prepared = outlet.prepared(prefix, [each[role] for each in words], said.rows[role])
            output[role] = [outlet.kind, prepared]
        progress = self._counted(words, number, partitions, runs, clock)
        content: dict[str, Json] = {
            "query": query, "job": self._manifests.name, "partitions": partitions, "flow": plan.work.signature,
            "state": described(plan.work), "runs": [[*run.to_json()] for run in runs], "clock": clock.to_json(),
            "watermark": clock.watermark, "output": output, "progress": progress}  # fmt: skip
        named = self._named(runs, output)
        self._check_visible(runs, named - {run.file for run in runs})
        self._last = self._manifests.publish(number, content)
        self._runs, self._clock = runs, clock
        self._commit(spark)
        self._manifests.forget(named, self._before)
        self._before = named
        self.progress = {**progress, "duration_s": round(time.monotonic() - began, 3)}

    def _check_visible(self, runs: list[Run], others: set[str]) -> None:
        """What tasks wrote must be where the driver looks for it, or nobody will find it in the next batch."""
        known = {run.file for run in self._runs}
        wanted = {run.file: run.size_bytes for run in runs if run.file not in known} | dict.fromkeys(others)
        for name, size in zip(wanted, self._plan.location.sizes(list(wanted)), strict=True):
            if size is None or wanted[name] not in (None, size):
                raise StoreFailed("a task wrote a file of the checkpoint, and it is not there for the driver",
                                  at=self._plan.at, file=self._plan.location.uri_of(name), found=f"{size} bytes",
                                  hint="every machine must see this very folder under this path: give a checkpoint on "
                                       "a filesystem that they share")

    def _state_behind(self, words: list[dict[str, Json]], partitions: int) -> tuple[list[Run], Clock]:
        if self._plan.work.mode == "rowwise":
            return [], self._plan.work.moved(self._clock, seen_of(words))
        if not words:  # a batch without a single partition
            return self._runs, self._clock
        clocks = [Clock.of(each["clock"]) for each in words]
        if len(words) != partitions or len(set(clocks)) > 1:
            raise InternalError("tasks of a batch did not say what they should", found=f"{len(words)} of {partitions}")
        return joined_runs(Run.of(each) for some in words for each in as_list(some["runs"])), clocks[0]

    def _counted(self, words: list[dict[str, Json]], number: int, partitions: int, runs: list[Run],
                 clock: Clock) -> dict[str, Json]:
        rows, timeless, late, failed = counted(words, self._plan.work.mode).values()
        if late and "late" not in self._plan.outlets and not self._has_warned:
            self._has_warned = True
            warnings.warn(f"{late} rows came too late and were dropped; later ones are only counted: see "
                          'last_progress["late_rows"], or give late= a sink', RuntimeWarning, stacklevel=2)
        return {"batch_id": number, "partitions": partitions, "rows_in": rows,
                "rows_out": sum(as_int(each["rows_out"]) for each in words), "late_rows": late,
                "failed_rows": failed, "timeless_rows": timeless, "far_rows": clock.far_rows,
                "watermark": clock.watermark, "state_files": len({run.file for run in runs}),
                "state_bytes": sum({run.file: run.size_bytes for run in runs}.values())}

    def _commit(self, spark: SparkSession | None) -> None:
        """Make the output of the last manifest visible."""
        assert self._last is not None
        output = as_map(self._last["output"])
        for role, outlet in self._plan.outlets.items():
            if (prepared := self._committed(role, output)) is not None:
                outlet.commit(prepared, spark, as_int(self._last["batch"]))

    def _named(self, runs: list[Run], output: dict[str, Json]) -> set[str]:
        """The files that a manifest needs."""
        named = {run.file for run in runs}
        for role, outlet in self._plan.outlets.items():
            if (prepared := self._committed(role, output)) is not None:
                named.update(outlet.files(prepared))
        return named

    def close(self) -> None:
        """Give everything back."""
        failed: ScaleinError | None = None
        for outlet in self._opened:
            try:
                outlet.close()
            except ScaleinError as error:
                failed = failed or error
        self._manifests.close()
        if failed is not None:
            raise failed


def checked_partitions(given: object, at: SourceLoc) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= KEY_GROUPS:
        raise BadArgument(f"partitions must be an integer from 1 to {KEY_GROUPS}", at=at, found=repr(given))
    return given
