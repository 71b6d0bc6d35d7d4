"""Time that a test moves, and points at which a job waits or dies: nothing here depends on how fast the machine is."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import testing
from scalein.api.flow import Flow
from scalein.jobs.job import Job
from scalein.testing import POINTS, Clock, Crashed, Stream, crash_at, pause_at, until
from tests.engines import examples
from tests.jobs.streams import Ledger, rows_in, until_quiet

BATCHES = [pa.record_batch({"t": pa.array([n, n + 1]), "k": pa.array([n % 3, n % 5])}) for n in range(0, 40, 2)]
WHOLE = pa.Table.from_batches(BATCHES)


def epochs(job: Job) -> int:
    return int(str(job.metrics()["epochs"]))


# --- time


def test_a_silent_partition_holds_time_back_until_it_counts_as_idle() -> None:
    rows = si.to_memory()
    stream = Stream({"a": [pa.record_batch({"t": [5]})], "b": [pa.record_batch({"t": [1]})]}, ends=False)
    with Clock() as clock:
        flow = si.from_source(stream).with_watermark("t", 0).group_by(si.tumbling("t", 10)).agg(n=si.count())
        job = flow.start(sink=rows)
        stream.push("a", pa.record_batch({"t": [100]}))
        until(lambda: rows_in(job) == 3, job)
        until_quiet(job, "b")
        assert rows.table().num_rows == 0  # b is at 1
        clock.advance("4s")
        stream.push("a", pa.record_batch({"t": [101]}))
        until(lambda: rows_in(job) == 4, job)
        assert rows.table().num_rows == 0
        clock.advance("2s")  # b has been silent for 6 s, a for 2
        until(lambda: rows.table().num_rows == 1, job)
        assert job.metrics()["watermark"] == 101
        job.stop()


def test_checkpoints_are_taken_when_they_are_due(tmp_path: Path) -> None:
    stream = Stream({"all": BATCHES}, ends=False)
    with Clock() as clock:
        job = si.from_source(stream).start(sink=si.to_memory(), checkpoint=tmp_path, every="10s")
        until(lambda: rows_in(job) == 40, job)
        job.wait(0.1)
        assert epochs(job) == 0
        clock.advance("9s")
        job.wait(0.1)
        assert epochs(job) == 0
        for number, seconds in ((1, "2s"), (2, "10s")):
            clock.advance(seconds)
            until(lambda: epochs(job) == number, job)  # noqa: B023
            stream.push("all", BATCHES[0])
            until(lambda: rows_in(job) == 40 + 2 * number, job)  # noqa: B023
        job.wait(0.1)
        assert epochs(job) == 2
        job.stop()


def test_a_job_that_stands_still_takes_no_checkpoints(tmp_path: Path) -> None:
    stream = Stream({"all": BATCHES}, ends=False)
    job = si.from_source(stream).start(sink=si.to_memory(), checkpoint=tmp_path, every="1ms")
    until(lambda: rows_in(job) == 40 and epochs(job) > 0, job)
    job.snapshot()  # of all rows
    before = epochs(job)
    job.wait(0.2)
    assert epochs(job) == before
    job.snapshot()  # unless it is asked to
    stream.push("all", BATCHES[0])
    until(lambda: epochs(job) == before + 2, job)
    job.stop()


def test_a_rate_goes_by_the_clock() -> None:
    rows = si.to_memory()
    with Clock() as clock:
        job = si.from_arrow(pa.Table.from_batches(BATCHES)).start(sink=rows, max_rows_per_second=2)
        for seconds in range(4):
            until(lambda: rows.table().num_rows == 1 + 2 * seconds, job)  # noqa: B023
            job.wait(0.03)
            assert rows.table().num_rows == 1 + 2 * seconds
            clock.advance("1s")
        job.stop()


def test_a_batch_is_cut_as_a_rate_wants_it(tmp_path: Path) -> None:
    """Time moves where it ends nevertheless, also if the job is started again in the middle of it."""
    batches = [pa.record_batch({"t": list(range(k, k + 1_000))}) for k in (0, 1_000)]
    rows = si.to_memory()

    def start() -> Job:
        flow = si.from_source(Stream({"all": batches}, ends=False)).with_watermark("t", 0)
        return flow.group_by(si.tumbling("t", 100)).agg(n=si.count()).start(
            sink=rows, checkpoint=tmp_path, max_rows_per_second=1_000)

    def at(job: Job, count: int) -> int:
        until(lambda: rows_in(job) >= count - 2, job)  # a float may round
        job.scale(2)  # answered at a border: what came before is through
        assert rows_in(job) <= count + 2
        return int(rows.table().num_rows)

    with Clock() as clock:
        job = start()
        assert at(job, 10) == 0
        clock.advance("500ms")
        assert at(job, 510) == 0
        job.stop()
        job = start()
        assert at(job, 520) == 0
        clock.advance("470ms")
        assert at(job, 990) == 0
        clock.advance("20ms")
        assert at(job, 1_010) == 9
        job.stop(drain=True)
    assert [row["n"] for row in rows.table().to_pylist()] == [100] * 20


def test_generated_rows_come_when_they_are_due() -> None:
    rows = si.to_memory()
    with Clock() as clock:
        numbers = si.generate(lambda start, count: pa.record_batch({"n": pa.array(range(start, start + count))}),
                              {"n": pa.int64()}, batch_rows=10, rows_per_second=10)  # fmt: skip
        job = numbers.start(sink=rows)
        until_quiet(job, "rows")
        assert rows.table().num_rows == 0
        clock.advance("2s")
        until(lambda: rows.table().num_rows == 20, job)
        job.stop()


# --- pauses


def test_a_job_stands_between_two_batches() -> None:
    rows = si.to_memory()
    stream = Stream({"all": BATCHES}, allowed={"all": 1})
    with pause_at("batch") as pause:
        job = si.from_source(stream).start(sink=rows)
        pause.reached()
        stream.end()
        job.wait(0.05)
        assert rows.table().num_rows == 2  # it takes no more
        pause.go_on()
        job.wait()
    assert rows.table().num_rows == 40
    with pytest.raises(si.ScaleinError, match=r"no such failpoint(.|\n)*batch, prepare"), pause_at("lunch"):
        pass


def test_the_job_goes_on_while_an_epoch_is_on_its_way(tmp_path: Path) -> None:
    rows = si.to_memory()
    stream = Stream({"all": BATCHES}, allowed={"all": 1}, ends=False)
    with pause_at("commit") as pause:
        job = si.from_source(stream).start(sink=rows, checkpoint=tmp_path, every="1ms")
        pause.reached()
        stream.allow("all", 20)
        until(lambda: rows.table().num_rows == 40, job)
        assert epochs(job) == 0
    until(lambda: epochs(job) > 0, job)
    job.stop()


# --- deaths


def build(source: Flow) -> Flow:
    """Keys in a store, and windows that wait."""
    return source.distinct("t").with_watermark("t", 2).group_by("k", si.tumbling("t", 10)).agg(n=si.count())


@pytest.mark.parametrize("point", POINTS)
def test_a_job_that_died_goes_on_as_if_nothing_had_been(point: str, tmp_path: Path) -> None:
    ledger, files = Ledger(), tmp_path / "out"
    want = build(si.from_arrow(WHOLE)).collect()

    def job(sink: Any, name: str, stop: int) -> Job:
        stream = Stream({"all": BATCHES}, allowed={"all": stop})
        return build(si.from_source(stream)).start(sink=sink, checkpoint=tmp_path / name, every="1ms", workers=1)

    def lives(sink: Any, name: str, number: int) -> None:
        begun = job(sink, name, 8 * number)
        until(lambda: rows_in(begun) == 16 * number, begun)
        for _ in range(number):
            begun.snapshot()
        begun.stop()
        job(sink, name, 8 * number)  # "open": a second start

    for sink, name in ((ledger, "one"), (si.to_ipc(files), "two")):
        for number in (1, 2):
            with crash_at(point, number), pytest.raises(Crashed, match=point):
                lives(sink, name, number)
        job(sink, name, len(BATCHES)).wait()
    testing.assert_same(ledger.table(), want)
    testing.assert_same(pa.concat_tables(pa.ipc.open_file(part).read_all() for part in files.glob("part-*")), want)
    assert [path.name for path in files.glob("_*")] == ["_owner"]


lives_of_jobs = st.lists(st.tuples(st.sampled_from(list(POINTS)), st.integers(1, 5), st.integers(1, 3),
                                   st.integers(0, 20), st.sampled_from(["1ms", "20ms", "1h"])), max_size=6)


@examples(2)
@given(lives=lives_of_jobs, kind=st.sampled_from(["files", "ledger"]))
def test_any_number_of_deaths(lives: list[tuple[str, int, int, int, str]], kind: str) -> None:
    ledger = Ledger()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)

        def start(allowed: int, workers: int, every: str) -> Job:
            stream = Stream({"all": BATCHES}, allowed={"all": allowed})
            sink: Any = si.to_ipc(folder / "out") if kind == "files" else ledger
            return build(si.from_source(stream)).start(sink=sink, checkpoint=folder / "c", every=every, workers=workers)

        for point, number, workers, allowed, every in lives:
            with crash_at(point, number), suppress(Crashed):
                job = start(allowed, workers, every)
                until(lambda: rows_in(job) >= 2 * allowed or not job.is_active, job)  # noqa: B023
                job.scale(3)
                job.stop()
        job = start(len(BATCHES), 1, "1h")
        job.wait()
        want = build(si.from_arrow(WHOLE)).collect()
        parts = [pa.ipc.open_file(part).read_all() for part in (folder / "out").glob("part-*")]
        got = pa.concat_tables(parts) if parts else ledger.table()
        testing.assert_same(got, want)
        assert job.metrics()["rows_in"] == 40
        assert [path.name for path in folder.rglob("_*")] == ["_owner"] * (kind == "files")


def test_a_sink_that_forgets_is_found_out(tmp_path: Path) -> None:
    """That is what the points are for: a sink that does not complete its commit when it is opened loses rows."""
    class Forgetful(Ledger):
        def open(self, schema: pa.Schema, committed: Any, next: str) -> None:
            super().open(schema, None, next)

    ledger = Forgetful()
    flow = si.from_arrow(WHOLE)
    with crash_at("commit"), pytest.raises(Crashed):
        flow.start(sink=ledger, checkpoint=tmp_path).wait()
    flow.start(sink=ledger, checkpoint=tmp_path).wait()
    assert ledger.rows == []
