"""The checkpoint coordinator: epochs on their way from a snapshot to visible output.

At most one epoch is in flight. The job's thread takes the snapshot at a barrier and continues; a second thread waits
until the state is durable, publishes the epoch, and commits the output. A failed epoch is covered by the next one,
which commits the output of both. `MAX_FAILURES` failed epochs in a row end the job with the error of the last one, so
what is prepared and not committed is bounded; the wait before each further attempt is doubled, from `RETRY_S` on.

The last committed output of a sink that an earlier run had stays in the manifests, so that the sink may return. It may
not be left out, or replaced by one of another kind, while some of its output is not visible.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pyarrow as pa

from scalein.connectors.sinks.sink_writer import SinkWriter
from scalein.errors import NOWHERE, BadArgument, Fenced, ScaleinError, SourceLoc, warn
from scalein.exec.operator import SnapshotFuture
from scalein.jobs.checkpoint import Checkpoint
from scalein.jobs.job_graph import JobGraph
from scalein.jobs.metrics import Metrics
from scalein.storage.checked_json import Json, as_int, as_list, as_map, as_text
from scalein.storage.failpoints import failpoint

MAX_FAILURES = 10  # consecutive failed epochs that end the job
RETRY_S = 0.1  # least wait after the first failed epoch; with its doublings, MAX_FAILURES take 51 s or more


class Coordinator:
    """The epochs of one job. All but `_publish` is the job's thread's."""

    def __init__(self, checkpoint: Checkpoint | None, metrics: Metrics, name: str) -> None:
        self._checkpoint, self._metrics, self._name = checkpoint, metrics, name
        self._sinks: dict[str, SinkWriter] = {}  # by role: results of each output, late rows, dead letters
        self._at = NOWHERE  # where the job was started
        self.number = 0  # of the last epoch
        self._run = 0
        self._prepared: list[dict[str, Json]] = []  # by sinks, in no published epoch yet
        self._absent: dict[str, Json] = {}  # last prepared output of sinks that only earlier runs had
        self._absent_kinds: dict[str, Json] = {}
        self._failures = 0  # consecutive failed epochs
        self._thread: threading.Thread | None = None
        self._publisher = ThreadPoolExecutor(1, "scalein-epoch")
        self._under_way: Future[None] | None = None
        self._now: Callable[[], float] = time.monotonic
        self._every_s = 0.0
        self._due = 0.0  # when the next epoch should begin

    def open(self, epoch: dict[str, Json] | None, sinks: dict[str, SinkWriter], schemas: dict[str, pa.Schema],
             at: SourceLoc) -> None:
        """Resume after an epoch, and open the sinks as it left them."""
        self._at, self._sinks = at, sinks
        outputs: list[dict[str, Json]] = []
        if epoch is not None:
            self.number, self._run, self._name = as_int(epoch["epoch"]), as_int(epoch["run"]), as_text(epoch["job"])
            outputs = [as_map(each) for each in as_list(epoch["output"])]
        kinds = {} if epoch is None else as_map(epoch.get("sinks", {}))  # the first manifests of format 1 had none
        others = {name for name, sink in self._sinks.items() if kinds.get(name, sink.kind) != sink.kind}
        last = {name: word for each in outputs for name, word in each.items() if word is not None}
        self._absent = {name: word for name, word in last.items() if name not in self._sinks}
        self._absent_kinds = {name: kind for name, kind in kinds.items() if name in self._absent}
        gone = [name for name in last if name in self._absent or name in others]
        if gone and self._checkpoint is not None and not self._checkpoint.is_committed(self.number):
            rows = _ROWS.get(gone[0], "results")
            raise BadArgument(f"the last run had another sink for {rows}, whose output is not all visible", at=at,
                              found=kinds.get(gone[0]),
                              hint="start the job once more with that sink; then it may be left out")
        if self._checkpoint is not None:
            self._run = self._checkpoint.begin_run(-1 if epoch is None else self._run)
        folder = None if self._checkpoint is None else self._checkpoint.address
        inherited = self._inherited(epoch, others)
        for sink in self._sinks.values():
            sink.claim(f"{self._name}-{self._run}", folder)
        for name, sink in self._sinks.items():
            words = inherited.get(name) or [each[name] for each in outputs if name in each and name not in others]
            for earlier in words[:-1]:
                sink.commit(earlier)
            job = _files_of(self._name, name)
            if epoch is None and self._checkpoint is not None:
                sink.check_no_output(job)
            sink.open(schemas[name], words[-1] if words else None, f"{job}-{self._run:010}")

    def _inherited(self, epoch: dict[str, Json] | None, others: set[str]) -> dict[str, list[Json]]:
        """Of an epoch that is a savepoint's: what the job of the savepoint had prepared, by sinks that go on writing
        where it wrote to. They take that over.
        """
        before = as_map((epoch or {}).get("predecessor", {}))
        if not before:
            return {}
        assert epoch is not None
        job, places = as_text(before["job"]), as_map(epoch.get("places", {}))
        outputs = [as_map(each) for each in as_list(before["output"])]
        found = {}
        for name, sink in self._sinks.items():
            if sink.can_take_over and name not in others and places.get(name) == sink.place:
                sink.take_over(job, _files_of(job, name))
                found[name] = [each[name] for each in outputs if each.get(name) is not None]
        return found

    def has_thread(self, thread: threading.Thread) -> bool:
        return thread is self._thread

    def schedule(self, every_s: float, now: Callable[[], float]) -> None:
        """Epochs are due at an interval from now on."""
        self._every_s, self._now, self._due = every_s, now, now() + every_s

    @property
    def due_in_s(self) -> float:
        return self._due - self._now()

    def is_due(self, has_changed: bool) -> bool:
        """Whether an epoch should begin at this barrier: the last one is complete, the interval has passed, and the
        job has advanced or output waits for its commit.
        """
        if self._under_way is not None and not self._under_way.done():
            return False
        self.await_epoch()
        if self._now() < self._due:
            return False
        self._due = max(self._due + self._every_s, self._now())
        return has_changed or bool(self._prepared)  # prepared: by an epoch that failed

    @property
    def places(self) -> dict[str, Json]:
        """Where each sink writes to, as text."""
        return {name: sink.place for name, sink in self._sinks.items()}

    def begin(self, graph: JobGraph, is_finished: bool) -> None:
        """Take a snapshot of the job at this barrier; publishing runs in the background."""
        self.await_epoch()
        if self._checkpoint is not None:
            graph.flush()
        failpoint("prepare")
        self._prepared.append({name: sink.prepare() for name, sink in self._sinks.items()})
        self.number += 1
        failpoint("freeze")
        try:
            content, frozen = graph.snapshot() if self._checkpoint is not None else ({}, [])
        except ScaleinError as error:
            self._under_way = Future()
            self._under_way.set_exception(error)
            return
        content |= {"finished": is_finished, "metrics": {**self._metrics.to_json()}, "job": self._name,
                    "run": self._run, "output": [{**self._absent, **self._prepared[0]}, *self._prepared[1:]],
                    "sinks": {**self._absent_kinds, **{name: sink.kind for name, sink in self._sinks.items()}},
                    "places": self.places}
        self._under_way = self._publisher.submit(self._publish, graph, content, frozen, time.monotonic())

    def _publish(self, graph: JobGraph, content: dict[str, Json], frozen: list[SnapshotFuture],
                 began: float) -> None:
        self._thread = threading.current_thread()
        kept: list[dict[str, Json]] = []
        if self._checkpoint is not None:
            content["states"] = graph.stateful([wait() for wait in frozen])
            failpoint("publish")
            kept = self._checkpoint.publish(self.number, content)
        graph.retain(kept)
        failpoint("commit")
        for each in map(as_map, as_list(content["output"])):
            for name, sink in self._sinks.items():
                sink.commit(each[name])
        if self._checkpoint is not None:
            self._checkpoint.note_committed(self.number)
        failpoint("committed")
        self._metrics.checkpoint_s, self._metrics.checkpoint_at = time.monotonic() - began, time.time()

    def await_epoch(self, is_last: bool = False) -> None:
        """Wait for the epoch in flight. A failed one is covered by the next; the last one must not fail."""
        if self._under_way is None:
            return
        under_way, self._under_way = self._under_way, None
        try:
            under_way.result()
            self._prepared.clear()
            self._failures = 0
            self._metrics.epochs += 1
        except ScaleinError as error:
            self._metrics.failed_checkpoints += 1
            self._failures += 1
            self._due = max(self._due, self._now() + RETRY_S * 2 ** (self._failures - 1))
            if self.has_given_up:
                error.add("failed", f"{self._failures} checkpoints in a row")
            if is_last or self.has_given_up or isinstance(error, Fenced):
                raise
            warn(f"a checkpoint failed; the job continues, and the next one includes its output: {error}", self._at)

    @property
    def has_given_up(self) -> bool:
        """Whether `MAX_FAILURES` epochs have failed in a row: the job must end."""
        return self._failures >= MAX_FAILURES

    def close(self) -> None:
        self._publisher.shutdown(wait=True)


def _files_of(job: str, role: str) -> str:
    """What the files of a sink begin with. It may write below another's folder: neither must take the other's files for
    its own.
    """
    return job if role == "out" else f"{job}{role}"


_ROWS = {"late": "late rows", "failed": "rows that failed"}
