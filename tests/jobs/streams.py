"""Runs of jobs: how the input is cut, when they are stopped, scaled and started again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import scalein as si
from scalein.api.flow import Flow
from scalein.exec import close_batches, local_state
from scalein.exec.schedule import Schedule, using
from scalein.jobs import driver, source_readers
from scalein.jobs.job import Job
from scalein.testing import Stream, until
from tests.schedules import RandomSchedule


def cut(table: pa.Table, sizes: Sequence[int]) -> list[pa.RecordBatch]:
    """A table in batches of these sizes, again and again; the last is what is left."""
    found, at, number = [], 0, 0
    while at < table.num_rows:
        size = sizes[number % len(sizes)]
        found += table.slice(at, size).combine_chunks().to_batches() or [_empty(table.schema)]
        at, number = at + size, number + 1
    return found or [_empty(table.schema)]


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], schema)


def rows_in(job: Job) -> int:
    return int(str(job.metrics()["rows_in"]))


def until_quiet(job: Job, partition: str) -> None:
    """Wait until a partition has reported that it has no rows now: from then on it may become idle."""
    readers = [reader for reader in job._driver.readers.readers if reader.name == partition]
    until(lambda: all(reader._quiet_since is not None for reader in readers), job)


class Ledger:
    """A sink of a user's: rows in a list that outlives the job, visible by `commit`, which may come twice."""

    def __init__(self) -> None:
        self.staged: dict[str, list[Any]] = {}
        self.visible: dict[str, list[Any]] = {}

    def open(self, schema: pa.Schema, committed: Any, next: str) -> None:
        self.schema = schema
        if committed is not None:
            self.commit(committed)
        self.staged.clear()
        self._name, self._number, self._rows = next, 0, []  # type: ignore[var-annotated]

    def write(self, batch: pa.RecordBatch) -> None:
        self._rows += batch.to_pylist()

    def prepare(self) -> str:
        name = f"{self._name}-{self._number}"
        self.staged[name], self._rows, self._number = self._rows, [], self._number + 1
        return name

    def commit(self, prepared: Any) -> None:
        self.visible.setdefault(prepared, self.staged.get(prepared, []))

    def close(self) -> None:
        self.staged.clear()

    @property
    def rows(self) -> list[Any]:
        return [row for rows in self.visible.values() for row in rows]

    def table(self) -> pa.Table:
        return pa.Table.from_pylist(self.rows, self.schema)


@dataclass
class Course:
    """How a job is run: what it is given, and what happens to it."""

    sizes: list[int]
    workers: int = 1
    checkpoint: bool = False
    memory: str | None = None
    stops: list[int] = field(default_factory=list)  # after so many batches it is stopped and started again
    scales: list[int] = field(default_factory=list)
    is_tight: bool = False  # what happens to millions of rows happens to a few
    seed: int | None = None  # of a random schedule
    options: dict[str, Any] = field(default_factory=dict)


def ran(build: Callable[[Flow], Flow], table: pa.Table, course: Course, folder: Path) -> tuple[pa.Table, Job]:
    """What a job over a table gives, and the job as it ended."""
    with pytest.MonkeyPatch.context() as patch:
        if course.is_tight:
            patch.setattr(source_readers, "PIECE_ROWS", 4)
            patch.setattr(driver, "MAX_ROUND_ROWS", 9)
            patch.setattr(local_state, "MIN_COMBINED_ROWS", 5)
            patch.setattr(local_state, "COMBINE_GROWTH", 2)
            patch.setattr(close_batches, "MIN_BYTES", 300)
        with using(Schedule() if course.seed is None else RandomSchedule(course.seed)):
            return _ran(build, table, course, folder)


def _ran(build: Callable[[Flow], Flow], table: pa.Table, course: Course, folder: Path) -> tuple[pa.Table, Job]:
    out = si.to_memory()
    batches = cut(table, course.sizes)
    given: dict[str, Any] = {"sink": out, "memory": course.memory, "workers": course.workers, **course.options}
    if course.checkpoint:
        given |= {"checkpoint": folder / "checkpoint", "every": "1ms"}
    scales = list(course.scales)
    for stop in sorted(set(course.stops)) if course.checkpoint else []:
        if stop < len(batches):
            stream = Stream({"all": batches}, allowed={"all": stop})
            job = build(si.from_source(stream)).start(**given)
            wanted = sum(b.num_rows for b in batches[:stop])
            until(lambda: rows_in(job) >= wanted or not job.is_active, job)  # noqa: B023
            if scales:
                job.scale(scales.pop())
            job.stop()
            assert job.status in ("stopped", "finished")  # a limit that is reached ends it
    job = build(si.from_source(Stream({"all": batches}))).start(**given)
    for workers in scales:
        job.scale(workers)
    job.wait()
    return out.table(), job
