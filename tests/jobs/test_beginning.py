"""Where a job begins: from a savepoint of another one, or with rows of the past."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import scalein as si
from scalein import col
from scalein.connectors.sinks import MemorySink
from scalein.flow import Flow
from scalein.jobs.job import Job
from scalein.testing import Stream, until


def events(first: int, last: int) -> list[pa.RecordBatch]:
    return [pa.record_batch({"t": pa.array([n], pa.int64()), "k": pa.array([n % 3], pa.int64())})
            for n in range(first, last)]  # fmt: skip


SCHEMA = pa.schema({"t": pa.int64(), "k": pa.int64()})


def counted(batches: list[pa.RecordBatch]) -> Flow:
    return si.from_batches(batches, SCHEMA).group_by("k").agg(n=si.count(), last=col("t").max())


def windows(batches: list[pa.RecordBatch]) -> Flow:
    return si.from_batches(batches, SCHEMA).with_watermark("t", 2).group_by(si.tumbling("t", 10)).agg(n=si.count())


@pytest.mark.parametrize("flow", [counted, windows])
def test_a_savepoint_begins_other_jobs_for_good(flow: object, tmp_path: Path) -> None:
    make = flow
    job = make(events(0, 400)).start(  # type: ignore[operator]
        sink=si.to_memory(), checkpoint=tmp_path / "one", every="5ms", max_rows_per_second=2_000)
    while not job.metrics()["rows_in"]:
        pass
    point = job.snapshot("before the change")
    assert point == tmp_path / "one" / "savepoints" / "before the change"
    with pytest.raises(si.ScaleinError, match="savepoint"):
        job.snapshot("before the change")
    job.wait()
    for name in ("two", "three"):
        rows = si.to_memory()
        again = make(events(0, 400)).start(sink=rows, checkpoint=tmp_path / name, savepoint=point)  # type: ignore[operator]
        again.wait()
        assert again.metrics()["rows_in"] == 400
        want = make(events(0, 400)).collect().to_pylist()  # type: ignore[operator]
        got = rows.table().to_pylist()
        assert got
        assert all(row in want for row in got)
        if make is counted:
            assert sorted(map(str, got)) == sorted(map(str, want))


def test_rows_of_the_past_fill_the_state_and_give_nothing() -> None:
    rows = si.to_memory()
    job = windows(events(25, 60)).start(sink=rows, bootstrap=si.from_batches(events(0, 25), SCHEMA))
    job.wait()
    got = {row["window_start"]: row["n"] for row in rows.table().to_pylist()}
    assert got == {20: 10, 30: 10, 40: 10, 50: 10}
    assert job.metrics()["rows_in"] == 35


def test_what_cannot_be_a_beginning_is_refused(tmp_path: Path) -> None:
    flow = counted(events(0, 10))
    with pytest.raises(si.ScaleinError, match="bootstrap gives other columns"):
        flow.start(sink=si.to_memory(), bootstrap=si.from_arrow(pa.table({"t": [1]})))
    with pytest.raises(si.ScaleinError, match="needs a checkpoint"):
        flow.start(sink=si.to_memory(), savepoint=tmp_path)
    with pytest.raises(si.ScaleinError, match="no savepoint"):
        flow.start(sink=si.to_memory(), savepoint=tmp_path / "nothing", checkpoint=tmp_path / "c")
    job = flow.start(sink=si.to_memory())
    with pytest.raises(si.ScaleinError, match="plain name"):
        job.snapshot("../up")
    job.wait()


def test_a_limit_ends_an_endless_job() -> None:
    rows = si.to_memory()
    numbers = si.generate(lambda start, count: pa.record_batch({"n": pa.array(range(start, start + count))}),
                          {"n": pa.int64()}, batch_rows=10)  # fmt: skip
    numbers.filter(col("n") % 2 == 0).limit(7).select(m=col("n") + 1).start(sink=rows).wait(20)
    assert rows.table().to_pydict() == {"m": [1, 3, 5, 7, 9, 11, 13]}


def test_a_savepoint_begins_another_job_while_the_first_one_runs(tmp_path: Path) -> None:
    def started(name: str, **options: Any) -> tuple[Job, MemorySink]:
        rows = si.to_memory()
        stream = Stream({"all": events(0, 9)}, ends=False)
        flow = si.from_source(stream).group_by("k").agg(n=si.count())
        return flow.start(sink=rows, checkpoint=tmp_path / name, emit="changes", **options), rows

    job, _ = started("one")
    until(lambda: job.metrics()["rows_in"] == 9, job)
    other, rows = started("two", savepoint=job.snapshot("fork"))
    assert other.metrics()["rows_in"] == 9
    other.stop()
    job.stop()
    assert rows.table().num_rows == 0


def test_a_savepoint_of_a_job_that_has_ended_is_no_silent_nothing(tmp_path: Path) -> None:
    job = counted(events(0, 10)).start(sink=si.to_memory(), checkpoint=tmp_path)
    job.wait()
    with pytest.raises(si.ScaleinError, match="ended before the savepoint"):
        job.snapshot("late")
    job.snapshot()  # the last checkpoint has it all


def test_other_sources_are_refused_and_a_watermark_may_be_added(tmp_path: Path) -> None:
    flow = si.from_batches(events(0, 10), SCHEMA)
    window = si.tumbling("t", 10)
    flow.group_by(window).agg(n=si.count()).start(sink=si.to_memory(), checkpoint=tmp_path).wait()
    with pytest.raises(si.ScaleinError, match="other sources"):
        flow.union(flow).group_by(window).agg(n=si.count()).start(sink=si.to_memory(), checkpoint=tmp_path)
    marked = flow.with_watermark("t", 2).group_by(window).agg(n=si.count())
    marked.start(sink=si.to_memory(), checkpoint=tmp_path).wait()
