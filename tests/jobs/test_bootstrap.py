"""Where a job begins: from a savepoint of another one, or with rows of the past."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from scalein.connectors.sinks.simple import MemorySink
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


def test_rows_of_the_past_are_the_past_of_all_partitions() -> None:
    rows = si.to_memory()
    source = Stream({"a": events(25, 40), "b": events(25, 40)})
    flow = si.from_source(source).with_watermark("t", 2).group_by(si.tumbling("t", 10)).agg(n=si.count())
    flow.start(sink=rows, bootstrap=si.from_batches(events(0, 25), SCHEMA)).wait()
    assert {row["window_start"]: row["n"] for row in rows.table().to_pylist()} == {20: 15, 30: 20}


@pytest.mark.parametrize("sorts", [False, True])
def test_a_job_that_is_stopped_in_its_past_begins_with_it_again(sorts: bool, tmp_path: Path) -> None:
    """Also if the past gives no rows before its end."""
    jobs: list[Job] = []
    given: list[int] = []

    def stops(batch: pa.RecordBatch) -> pa.RecordBatch:
        until(lambda: bool(jobs))
        jobs[0].stop()
        given.append(batch.num_rows)
        return batch

    past = si.from_batches(events(0, 25), SCHEMA)
    stopped = past.map_batches(stops, SCHEMA)
    jobs.append(windows(events(25, 60)).start(sink=si.to_memory(), checkpoint=tmp_path,
                                              bootstrap=stopped.sort("t") if sorts else stopped))  # fmt: skip
    jobs[0].wait()
    assert len(given) == 1
    assert jobs[0].status == "stopped"
    rows = si.to_memory()
    windows(events(25, 60)).start(sink=rows, checkpoint=tmp_path, bootstrap=past).wait()
    assert {row["window_start"]: row["n"] for row in rows.table().to_pylist()} == {20: 10, 30: 10, 40: 10, 50: 10}


def test_late_rows_of_the_past_are_no_news() -> None:
    past = si.from_batches([*events(50, 60), *events(0, 3)], SCHEMA)
    rows, late = si.to_memory(), si.to_memory()
    job = windows(events(52, 70)).start(sink=rows, late=late, bootstrap=past)
    job.wait()
    assert (late.table().num_rows, job.metrics()["late_rows"]) == (0, 0)
    assert {row["window_start"]: row["n"] for row in rows.table().to_pylist()} == {50: 18, 60: 10}
    windows(events(52, 70)).start(sink=rows, late="error", bootstrap=past).wait()


def test_a_past_of_several_sources_is_refused() -> None:
    flow = si.from_batches(events(0, 10), SCHEMA)
    with pytest.raises(si.ScaleinError, match="the past of one source, and the flow has several"):
        flow.union(flow).group_by("k").agg(n=si.count()).start(sink=si.to_memory(), bootstrap=flow)


@pytest.mark.parametrize("swapped", [False, True])
def test_sources_of_a_union_are_known_by_name(swapped: bool, tmp_path: Path) -> None:
    class Named(Stream):
        def __init__(self, name: str, allowed: int) -> None:
            rows = events(0, 40) if name == "a" else events(100, 104)
            super().__init__({"all": rows}, allowed={"all": min(allowed, len(rows))})
            self.name = name

    def start(names: str, allowed: int) -> Job:
        first, second = (si.from_source(Named(name, allowed)) for name in names)
        return first.union(second).start(sink=si.to_ipc(tmp_path / "out"), checkpoint=tmp_path / "c", every="1h")

    job = start("ab", 8)
    until(lambda: job.metrics()["rows_in"] == 12, job)
    job.stop()
    start("ba" if swapped else "ab", 40).wait()
    parts = [pa.ipc.open_file(part).read_all() for part in (tmp_path / "out").glob("part-*")]
    assert sorted(t for part in parts for t in part.column("t").to_pylist()) == [*range(40), *range(100, 104)]


def test_sources_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
        pq.write_table(pa.Table.from_batches(events(0, 4)), tmp_path / name / "rows.parquet")

    def start(names: str, keys: bool = False) -> Job:
        flows = [si.read_parquet(tmp_path / name) for name in names]
        first, second = (flow.distinct("t") for flow in flows) if keys else flows
        return first.union(second).start(sink=si.to_memory(), checkpoint=tmp_path / f"c{keys}")

    start("ab").wait()
    start("ba").wait()
    with pytest.raises(si.ScaleinError, match=r"other sources(.|\n)*checkpoint .*/a/(.|\n)*flow .*/c/, "):
        start("cb")
    (tmp_path / "a").rename(tmp_path / "moved")
    (tmp_path / "a").symlink_to(tmp_path / "moved")
    start("ab").wait()
    start("ab", keys=True).wait()
    with pytest.raises(si.ScaleinError, match=r"changed places, and some have state of their own"):
        start("ba", keys=True)


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
