"""Whatever raises ends the job: `wait` says what it was, what is committed stays, and nothing is left running."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from scalein.exec import close_batches, sort
from scalein.jobs.job import Job
from scalein.jobs.source_readers import SourceReaders
from scalein.testing import Clock, Stream, until
from tests.jobs.streams import rows_in

TABLE = pa.table({"x": range(100)})
BATCHES = TABLE.to_batches(max_chunksize=10)


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = set(threading.enumerate())
    handles = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    end = time.monotonic() + 30
    while (new := [t for t in threading.enumerate() if t not in before and t.is_alive()]) and time.monotonic() < end:
        time.sleep(0.01)
    assert not new, f"threads: {new}"
    assert not os.listdir(folder), "temporary files"
    assert len(os.listdir("/proc/self/fd")) <= handles + 2, "open files"


def breaks(batch: pa.RecordBatch) -> pa.RecordBatch:
    if pc.max(batch.column("x")).as_py() >= 50:
        raise RuntimeError("my own mistake")
    return batch


class Broken(Stream):
    def read(self, partition: str, offset: Any) -> Iterator[tuple[pa.RecordBatch, Any]]:
        for batch, behind in super().read(partition, offset):
            if behind > 50:
                raise RuntimeError("my own mistake")
            yield batch, behind


class Sink:
    """A sink of the user's that fails in one of its methods."""

    def __init__(self, fails: str, after: int = 0) -> None:
        self.fails, self.after, self.calls = fails, after, []  # type: ignore[var-annotated]

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails and self.calls.count(name) > self.after:
            raise RuntimeError("my own mistake")

    def open(self, schema: pa.Schema, committed: Any, next: str) -> None:
        self._called("open")

    def write(self, batch: pa.RecordBatch) -> None:
        self._called("write")

    def prepare(self) -> Any:
        self._called("prepare")
        return 1

    def commit(self, prepared: Any) -> None:
        self._called("commit")

    def close(self) -> None:
        self._called("close")


def generator() -> Iterator[pa.RecordBatch]:
    yield from BATCHES[:5]
    raise RuntimeError("my own mistake")


FLOWS: dict[str, Callable[[], Flow]] = {
    "map_batches": lambda: si.from_arrow(TABLE).map_batches(breaks, TABLE.schema),
    "source": lambda: si.from_source(Broken({"all": BATCHES})),
    "batches": lambda: si.from_batches(generator(), TABLE.schema),
    "behind a group": lambda: si.from_arrow(TABLE).group_by("x").agg(n=si.count()).select("x").map_batches(
        breaks, pa.schema({"x": pa.int64()})),
}  # fmt: skip


@pytest.mark.parametrize("kind", FLOWS)
def test_an_error_of_the_users_ends_the_job(kind: str) -> None:
    job = FLOWS[kind]().start(sink=si.to_memory())
    with pytest.raises(si.ScaleinError, match="RuntimeError") as found:
        job.wait()
    assert "my own mistake" in str(found.value)
    assert job.status == "failed"
    assert job.exception is found.value
    with pytest.raises(si.ScaleinError):
        job.stop()
    with pytest.raises(si.BadArgument, match="the job has ended"):
        job.scale(2)


@pytest.mark.parametrize("rate", [None, 1e6])
def test_a_source_that_breaks_is_no_end_of_the_input(rate: float | None) -> None:
    for _ in range(5):
        out = si.to_memory()
        job = si.from_source(Broken({"all": BATCHES})).group_by().agg(n=si.count()).start(
            sink=out, max_rows_per_second=rate)
        with pytest.raises(si.ScaleinError, match="my own mistake"):
            job.wait()
        assert out.table().num_rows == 0


def test_a_partition_that_breaks_is_not_hidden_by_others() -> None:
    class Half(Stream):
        def read(self, partition: str, offset: Any) -> Iterator[tuple[pa.RecordBatch, Any]]:
            if partition == "b":
                raise RuntimeError("my own mistake")
            while True:
                yield BATCHES[0], (offset or 0) + 1
                time.sleep(0.001)

    job = si.from_source(Half({"a": BATCHES, "b": BATCHES}, ends=False)).start(sink=si.to_callback(lambda batch: None))
    with pytest.raises(si.ScaleinError, match="my own mistake"):
        job.wait(20)
    assert job.status == "failed"


def test_a_partition_that_breaks_has_not_come_to_its_end(tmp_path: Path) -> None:
    """Else the others' time would pass it by, and its rows, read by the next run, would be late."""
    began, broke = threading.Event(), threading.Event()

    class Half(Stream):
        breaks = True

        def read(self, partition: str, offset: Any) -> Iterator[tuple[pa.RecordBatch, Any]]:
            for batch, behind in super().read(partition, offset):
                if self.breaks and partition == "b":
                    began.wait(60)
                    broke.set()
                    raise RuntimeError("my own mistake")
                yield batch, behind

    def slow(batch: pa.RecordBatch) -> pa.RecordBatch:
        began.set()
        broke.wait(60)
        time.sleep(0.05)  # the thread of the other partition comes to its end
        return batch

    def start(breaks: bool) -> Job:
        rows = {"a": [pa.record_batch({"t": [t]}) for t in (1, 100, 100)], "b": [pa.record_batch({"t": [2]})]}
        source = Half(rows, allowed={"a": 2 if breaks else 3, "b": 1})  # at first, one goes on and one breaks
        source.breaks = breaks
        flow = si.from_source(source).map_batches(slow, source.schema).with_watermark("t", 0)
        return flow.group_by(si.tumbling("t", 10)).agg(n=si.count()).start(
            sink=si.to_ipc(tmp_path / "out"), checkpoint=tmp_path / "c", every="1ms", workers=1)

    with pytest.raises(si.ScaleinError, match="my own mistake"):
        start(True).wait()
    job = start(False)
    job.wait()
    rows = si.read_ipc(tmp_path / "out").collect().to_pylist()
    assert {row["window_start"]: row["n"] for row in rows} == {0: 2, 100: 2}
    assert job.metrics()["late_rows"] == 0


def test_a_callback_that_breaks_is_named() -> None:
    def shows_rows(batch: pa.RecordBatch) -> None:
        raise RuntimeError("my own mistake")

    with pytest.raises(si.ScaleinError, match=r"shows_rows(.|\n)*my own mistake"):
        si.from_arrow(TABLE).start(sink=si.to_callback(shows_rows)).wait()


@pytest.mark.parametrize("method", ["write", "prepare", "commit"])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_sink_that_breaks_is_named(method: str, checkpoint: bool, tmp_path: Path) -> None:
    sink = Sink(method)
    job = si.from_arrow(TABLE).start(sink=sink, checkpoint=tmp_path if checkpoint else None)
    with pytest.raises(si.ScaleinError, match=r"sink Sink raised RuntimeError(.|\n)*my own mistake"):
        job.wait()
    assert sink.calls[-1] == "close"


def test_a_sink_that_cannot_be_opened_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(si.ScaleinError, match="my own mistake"):
        si.from_arrow(TABLE).start(sink=Sink("open"), checkpoint=tmp_path)
    si.from_arrow(TABLE).start(sink=si.to_memory(), checkpoint=tmp_path).wait()  # it is free again


@pytest.mark.filterwarnings("ignore:a checkpoint failed:RuntimeWarning")
def test_a_commit_that_fails_once_is_made_up_for(tmp_path: Path) -> None:
    class Once(Sink):
        def _called(self, name: str) -> None:
            super()._called(name)
            if name == "commit" and self.calls.count("commit") == 1:
                raise RuntimeError("my own mistake")

    sink = Once("")
    stream = Stream({"all": BATCHES}, allowed={"all": 3})
    job = si.from_source(stream).start(sink=sink, checkpoint=tmp_path, every="1ms")
    until(lambda: sink.calls.count("commit") > 2, job)
    assert job.metrics()["failed_checkpoints"] == 1
    stream.end()
    job.wait()


def test_what_was_committed_stays(tmp_path: Path) -> None:
    stream = Stream({"all": BATCHES}, allowed={"all": 5})
    given: dict[str, Any] = {"checkpoint": tmp_path / "checkpoint", "every": "1h"}
    job = si.from_source(stream).map_batches(breaks, TABLE.schema).start(sink=si.to_parquet(tmp_path / "out"), **given)
    until(lambda: rows_in(job) == 50, job)
    job.snapshot()
    stream.end()
    with pytest.raises(si.ScaleinError, match="my own mistake"):
        job.wait()
    assert sorted(si.read_parquet(tmp_path / "out").collect().column("x").to_pylist()) == list(range(50))
    assert [path.name for path in (tmp_path / "out").glob("_*")] == ["_owner"]
    mended = si.from_source(stream).map_batches(lambda batch: batch, TABLE.schema)
    mended.start(sink=si.to_parquet(tmp_path / "out"), **given).wait()
    assert sorted(si.read_parquet(tmp_path / "out").collect().column("x").to_pylist()) == list(range(100))


def test_poison_rows_go_to_their_sink_and_the_rest_comes_through(tmp_path: Path) -> None:
    table = pa.table({"k": [1, 2] * 20, "x": [i % 7 for i in range(40)]})
    good, bad = si.to_memory(), si.to_memory()
    flow = si.from_arrow(pa.Table.from_batches(table.to_batches(max_chunksize=6)))
    flow = flow.group_by("k").agg(s=(60 // col("x")).sum(), n=si.count())
    job = flow.start(sink=good, on_error=bad, checkpoint=tmp_path, every="1ms", workers=2)
    job.wait()
    fine = table.filter(pc.not_equal(table.column("x"), 0))
    want = si.from_arrow(fine).group_by("k").agg(s=(60 // col("x")).sum(), n=si.count()).collect()
    assert good.table().sort_by("k").equals(want.sort_by("k"))
    assert bad.table().column("x").to_pylist() == [0] * (40 - fine.num_rows)
    assert job.metrics()["failed_rows"] == 40 - fine.num_rows


def test_a_snapshot_of_a_job_that_fails_says_so(tmp_path: Path) -> None:
    job = si.from_source(Stream({"all": BATCHES}, ends=False)).start(sink=Sink("prepare"), checkpoint=tmp_path,
                                                                     every="1h")  # fmt: skip
    with pytest.raises(si.ScaleinError, match="my own mistake"):
        job.snapshot()
    with pytest.raises(si.ScaleinError, match="my own mistake"):
        job.wait()


def test_a_table_may_come_in_other_batches_the_next_time(tmp_path: Path) -> None:
    out = si.to_memory()
    with Clock():  # it stands still: the rate lets only the first rows pass
        job = si.from_arrow(pa.Table.from_batches(BATCHES)).start(sink=out, checkpoint=tmp_path, every="1h",
                                                                  max_rows_per_second=100)  # fmt: skip
        until(lambda: rows_in(job) > 0, job)
        job.stop()
    assert 0 < out.table().num_rows < 100
    again = pa.Table.from_batches(TABLE.to_batches(max_chunksize=7))
    si.from_arrow(again).start(sink=out, checkpoint=tmp_path).wait()
    assert out.table().column("x").to_pylist() == list(range(100))


def test_a_sink_may_stop_its_job() -> None:
    seen: list[pa.RecordBatch] = []

    def enough(batch: pa.RecordBatch) -> None:
        seen.append(batch)
        until(lambda: bool(jobs))
        jobs[0].scale(2)
        with pytest.raises(si.ScaleinError, match="wait for itself"):
            jobs[0].wait()
        jobs[0].stop()

    jobs: list[Job] = []
    stream = Stream({"all": BATCHES}, ends=False, allowed={"all": 1})
    jobs.append(si.from_source(stream).start(sink=si.to_callback(enough)))
    jobs[0].wait(20)
    assert (jobs[0].status, len(seen)) == ("stopped", 1)


def test_a_group_that_fails_does_not_tear_others_apart() -> None:
    """Groups are made of many partial ones: left out row by row, they would come out in pieces."""
    table = pa.table({"k": [1, 2] * 20, "t": [0] * 40})
    flow = si.from_arrow(pa.Table.from_batches(table.to_batches(max_chunksize=4))).with_watermark("t", 0)
    flow = flow.group_by("k", si.tumbling("t", 10)).agg(n=si.count()).select("k", y=col("n") // (col("k") - 1))
    good, bad = si.to_memory(), si.to_memory()
    with pytest.raises(si.ScaleinError, match="division by zero"):
        flow.start(sink=good, on_error=bad, workers=1).wait()
    assert good.table().num_rows == bad.table().num_rows == 0


def test_rows_on_disk_are_removed_also_without_a_checkpoint() -> None:
    batches = [pa.record_batch({"t": pa.array([t], pa.int64())}) for t in range(0, 400, 10)]
    stream = Stream({"all": batches}, ends=False, allowed={"all": 0})
    flow = si.from_source(stream).with_watermark("t", 0).group_by(si.tumbling("t", 10)).agg(v=col("t").collect())
    out = si.to_memory()
    job = flow.start(sink=out, memory="1B", every="1ms", workers=1)
    for number in range(1, len(batches) + 1):
        stream.allow("all", number)
        until(lambda: rows_in(job) == number, job)  # noqa: B023
    until(lambda: len(list(Path(tempfile.gettempdir()).rglob("rows-*.arrow"))) < 5, job)
    job.stop()
    assert out.table().num_rows == len(batches) - 1


def test_a_rate_that_was_not_used_is_not_saved_for_long() -> None:
    edges = SourceReaders([], 1_000.0)
    edges._began -= 3_600
    assert 900 <= edges._allowed(0.0) <= 1_100


FINISHES = {"sort": lambda flow: flow.sort("x", descending=True),
            "windows": lambda flow: flow.group_by("x", si.tumbling("x", 5)).agg(n=si.count())}


@pytest.mark.parametrize("kind", FINISHES)
@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_stop_does_not_wait_for_the_end_of_the_input(kind: str, has_checkpoint: bool, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes out there may be the work of minutes; the next run does it again."""
    monkeypatch.setattr(sort, "RESULT_ROWS", 10)
    monkeypatch.setattr(close_batches, "MIN_BYTES", 1)
    reached, may_go_on = threading.Event(), threading.Event()
    given: list[int] = []

    def hold(batch: pa.RecordBatch) -> pa.RecordBatch:
        given.append(batch.num_rows)
        if len(given) == 2:
            reached.set()
            assert may_go_on.wait(60)
        return batch

    flow = FINISHES[kind](si.from_arrow(TABLE)).select("x")
    flow = flow.map_batches(hold, flow.schema)
    where = {"checkpoint": tmp_path / "checkpoint"} if has_checkpoint else {}
    options: dict[str, Any] = {"sink": si.to_ipc(tmp_path / "out"), "workers": 1, "memory": "1B", **where}
    job = flow.start(**options)
    assert reached.wait(60)
    job._supervisor.request_stop()
    may_go_on.set()
    assert job.wait(60)
    assert job.status == "stopped"
    assert sum(given) < 100
    written = [pa.ipc.open_file(part).read_all() for part in (tmp_path / "out").glob("part-*")]
    assert sum(map(len, written)) <= (0 if has_checkpoint else sum(given))
    if has_checkpoint:
        flow.start(**options).wait()
        written = [pa.ipc.open_file(part).read_all() for part in (tmp_path / "out").glob("part-*")]
        assert sorted(pa.concat_tables(written)["x"].to_pylist()) == list(range(100))


def test_waiting_with_a_bar_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    std = pytest.importorskip("tqdm.std")
    monkeypatch.setattr(std.tqdm, "monitor_interval", 0)  # a thread of tqdm's own, that stays
    job = si.from_source(Stream({"all": BATCHES}, ends=False)).start(sink=si.to_memory())
    job.wait(0.3, progress=True)
    assert job.is_active
    job.stop()


@pytest.mark.parametrize("how", ["right", "outer"])
def test_an_outer_join_of_an_endless_flow_is_refused(how: str) -> None:
    endless = si.from_source(Stream({"all": BATCHES}, ends=False))
    with pytest.raises(si.BadArgument, match=f"how='{how}' needs a flow that ends"):
        endless.join({"x": [1]}, on="x", how=how).start(sink=si.to_memory())


def test_a_join_with_an_endless_right_side_is_refused_before_anything_runs() -> None:
    endless = si.from_source(Stream({"all": BATCHES}, ends=False))
    joined = endless.join(endless.filter(col("x") > 0), on="x")
    with pytest.raises(si.BadArgument, match="the right side of a join must be bounded") as caught:
        joined.start(sink=si.to_memory())
    assert "found  Stream, which never ends" in str(caught.value)
    assert f"at     {Path(__file__).name}" in str(caught.value)
