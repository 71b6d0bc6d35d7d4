"""What may go wrong around a job: requests from inside of it, sinks that cannot commit or are left out, odd files."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import scalein as si
from scalein import col, testing
from scalein.api.flow import Flow
from scalein.exec.metrics_log import log_lines
from scalein.jobs import coordinator
from scalein.jobs.coordinator import MAX_FAILURES
from scalein.jobs.job import Job
from scalein.state.row_buffer import RowBuffer
from scalein.testing import Clock, Crashed, Stream, crash_at, until
from tests.jobs.streams import rows_in

BATCHES = [pa.record_batch({"t": pa.array([n, n + 1]), "k": pa.array([n % 3, n % 5])}) for n in range(0, 40, 2)]
WHOLE = pa.Table.from_batches(BATCHES)


class Sink:
    """Does something in one of its methods."""

    def __init__(self, where: str, does: Callable[[], None]) -> None:
        self._where, self._does, self.rows, self.opened = where, does, 0, False

    def _called(self, name: str) -> None:
        if name == self._where:
            self._does()

    def open(self, schema: pa.Schema, committed: Any, next: str) -> None:
        self.opened = True

    def write(self, batch: pa.RecordBatch) -> None:
        self.rows += batch.num_rows
        self._called("write")

    def prepare(self) -> Any:
        self._called("prepare")
        return 1

    def commit(self, prepared: Any) -> None:
        self._called("commit")

    def close(self) -> None:
        pass


# --- from inside


@pytest.mark.parametrize("where", ["write", "prepare", "commit", "source", "map", "udf"])
def test_whatever_runs_inside_of_a_job_may_stop_it(where: str, tmp_path: Path) -> None:
    jobs: list[Job] = []
    heard: list[str] = []

    def stops() -> None:
        until(lambda: bool(jobs))
        jobs[0].scale(2)
        with pytest.raises(si.ScaleinError, match="wait for itself"):
            jobs[0].wait()
        with pytest.raises(si.ScaleinError, match="wait for itself"):
            jobs[0].snapshot()
        jobs[0].stop()
        heard.append(threading.current_thread().name)

    def maps(batch: pa.RecordBatch) -> pa.RecordBatch:
        stops()
        return batch

    class Asking(Stream):
        def read(self, partition: str, offset: Any) -> Any:
            for batch in super().read(partition, offset):
                if where == "source":
                    stops()
                yield batch

    @si.udf(compile=False)
    def asks(x: int) -> int:
        stops()
        return x

    flow = si.from_source(Asking({"all": BATCHES}, ends=False, allowed={"all": 1}))
    if where == "map":
        flow = flow.map_batches(maps, WHOLE.schema)
    if where == "udf":
        flow = flow.select(y=asks(col("k")))
    jobs.append(flow.start(sink=Sink(where, stops), checkpoint=tmp_path, every="1ms", workers=2))
    assert jobs[0].await_termination(20)
    assert (jobs[0].status, bool(heard)) == ("stopped", True)


# --- commits


@pytest.mark.filterwarnings("ignore:a checkpoint failed:RuntimeWarning")
def test_a_commit_that_fails_again_and_again_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "RETRY_S", 1e-5)
    tries: list[int] = []

    def fails() -> None:
        tries.append(1)
        raise RuntimeError("no such table")

    job = si.from_source(Stream({"all": BATCHES}, ends=False)).start(sink=Sink("commit", fails), checkpoint=tmp_path,
                                                                     every="1ms")  # fmt: skip
    with pytest.raises(si.ScaleinError, match=r"RuntimeError when it was committed(.|\n)*no such table"):
        job.wait(30)
    assert (job.status, len(tries)) == ("failed", MAX_FAILURES)
    again = Sink("", fails)
    si.from_source(Stream({"all": BATCHES})).start(sink=again, checkpoint=tmp_path).wait()
    assert again.rows == 0  # all that the first sink has prepared


@pytest.mark.filterwarnings("ignore:a checkpoint failed:RuntimeWarning")
def test_output_of_a_checkpoint_that_failed_is_committed_with_the_next_one(tmp_path: Path,
                                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the job dies before that: then its next run commits the older part before it opens the sink."""
    real, fails = os.rename, [True]

    def rename(old: Any, new: Any) -> None:
        if fails and "_epoch-0" in os.fspath(old):
            raise OSError(errno.ENOSPC, "no space left", os.fspath(new))
        real(old, new)

    def start(allowed: int) -> tuple[Job, Stream]:
        stream = Stream({"all": BATCHES}, allowed={"all": allowed})
        sink = si.to_ipc(tmp_path / "out")
        return si.from_source(stream).start(sink=sink, checkpoint=tmp_path / "c", every="1h"), stream

    monkeypatch.setattr(os, "rename", rename)
    job, stream = start(5)
    until(lambda: rows_in(job) == 10, job)
    with pytest.raises(si.ScaleinError, match="no space left"):
        job.snapshot()
    stream.allow("all", 9)
    until(lambda: rows_in(job) == 18, job)
    fails.clear()
    with crash_at("commit"), pytest.raises(Crashed):
        job.stop()
    assert len(list((tmp_path / "out").glob("_staged-*"))) == 2
    start(len(BATCHES))[0].wait()
    parts = [pa.ipc.open_file(part).read_all() for part in (tmp_path / "out").glob("part-*")]
    testing.assert_same(pa.concat_tables(parts), WHOLE)


def start_late(folder: Path, **sinks: Any) -> Job:
    """A job with late rows."""
    rows = [pa.record_batch({"t": [100]}), pa.record_batch({"t": [1, 2]})]
    flow = si.from_source(Stream({"all": rows})).with_watermark("t", 0).group_by(si.tumbling("t", 10)).agg(n=si.count())
    return flow.start(sink=si.to_ipc(folder / "out"), checkpoint=folder / "checkpoint", **sinks)


def test_a_sink_with_output_that_is_not_visible_may_not_be_left_out(tmp_path: Path) -> None:
    late = si.to_ipc(tmp_path / "late")
    with crash_at("commit"), pytest.raises(Crashed):
        start_late(tmp_path, late=late).wait()
    with pytest.raises(si.ScaleinError, match=r"another sink for late rows, whose output is not all visible"):
        start_late(tmp_path)
    with pytest.raises(si.ScaleinError, match=r"another sink for late rows(.|\n)*found  FileSink"):
        start_late(tmp_path, late=si.to_memory())
    assert not list((tmp_path / "late").glob("part-*"))
    start_late(tmp_path, late=late).wait()
    assert len(list((tmp_path / "late").glob("part-*"))) == 1
    for _ in range(2):
        start_late(tmp_path).wait()  # now it may
        start_late(tmp_path, late=Sink("", lambda: None)).wait()
        start_late(tmp_path).wait()
    assert len(list((tmp_path / "late").glob("part-*"))) == 1
    start_late(tmp_path, late=late).wait()  # and come back
    assert len(list((tmp_path / "late").glob("part-*"))) == 1


@pytest.mark.parametrize("below", [".", "late"])
def test_a_sink_below_the_folder_of_another(below: str, tmp_path: Path) -> None:
    late = tmp_path / "out" / below
    with crash_at("commit"), pytest.raises(Crashed):
        start_late(tmp_path, late=si.to_ipc(late)).wait()
    start_late(tmp_path, late=si.to_ipc(late)).wait()
    parts = [pa.ipc.open_file(part).read_all() for part in sorted((tmp_path / "out").rglob("part-*"))]
    assert sorted(part.column_names for part in parts) == [["t"], ["window_start", "window_end", "n"]]
    assert [part["t"].to_pylist() for part in parts if part.column_names == ["t"]] == [[1, 2]]


# --- savepoints


def manifests(folder: Path) -> list[Path]:
    return sorted(folder.glob("epoch-*.json"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def test_savepoints_whose_names_differ_by_an_underscore(tmp_path: Path) -> None:
    """The folder in which one is made must not be another's."""
    source = Stream({"all": BATCHES}, ends=False)
    job = si.from_source(source).start(sink=si.to_memory(), checkpoint=tmp_path / "job")
    places = {name: job.snapshot(name) for name in ("_a", "a", "__a", "_")}
    job.stop()
    for name, place in places.items():
        assert place == tmp_path / "job" / "savepoints" / name
        assert [path.name for path in place.glob("epoch-*.json")] != []
        other = si.from_source(Stream({"all": BATCHES})).start(
            sink=si.to_memory(), checkpoint=tmp_path / f"from {name}", savepoint=place)
        assert other.wait(20)
    assert sorted(path.name for path in (tmp_path / "job" / "savepoints").iterdir()) == ["_", "__a", "_a", "a"]


def test_a_job_begun_from_a_savepoint_never_writes_twice(tmp_path: Path) -> None:
    """To go back to the savepoint would be to forget what this job has written since."""
    def start(name: str, allowed: int, **options: Any) -> Job:
        stream = Stream({"all": BATCHES}, allowed={"all": allowed})
        return si.from_source(stream).start(sink=si.to_ipc(tmp_path / f"{name}-out"), checkpoint=tmp_path / name,
                                            every="1h", **options)  # fmt: skip

    first = start("one", 5)
    until(lambda: rows_in(first) == 10, first)
    point = first.snapshot("fork")
    first.stop()
    job = start("two", 9, savepoint=point)
    until(lambda: rows_in(job) == 18, job)
    job.snapshot()
    job.stop()
    own = manifests(tmp_path / "two")
    assert len(own) == 3  # the savepoint's is gone
    flip(own[-1])
    flip(own[-2])
    with pytest.warns(RuntimeWarning, match="going back to epoch"):
        job = start("two", len(BATCHES), savepoint=point)
    job.wait()
    rows = pa.concat_tables(pa.ipc.open_file(part).read_all() for part in (tmp_path / "two-out").glob("part-*"))
    testing.assert_same(rows, WHOLE.slice(10))
    for path in manifests(tmp_path / "two"):
        flip(path)
    with pytest.raises(si.ScaleinError, match="manifest cannot be read"):
        start("two", len(BATCHES), savepoint=point)


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM])
def test_a_savepoint_is_copied_where_files_cannot_be_linked(number: int, tmp_path: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    def start(name: str, **options: Any) -> Job:
        flow = si.from_arrow(WHOLE).group_by("k").agg(n=si.count())
        return flow.start(sink=si.to_ipc(tmp_path / f"{name}-out"), checkpoint=tmp_path / name, every="1h", **options)

    def link(old: Any, new: Any) -> None:
        raise OSError(number, os.strerror(number), os.fspath(new))

    monkeypatch.setattr(os, "link", link)
    with Clock():  # it stands still: the rate lets only the first rows pass
        job = start("one", max_rows_per_second=100)
        until(lambda: rows_in(job) > 0, job)
        point = job.snapshot("fork")
        job.stop(drain=True)
    start("two", savepoint=point).wait()
    for name in ("one", "two"):
        rows = pa.concat_tables(pa.ipc.open_file(part).read_all() for part in (tmp_path / f"{name}-out").glob("part-*"))
        testing.assert_same(rows, si.from_arrow(WHOLE).group_by("k").agg(n=si.count()).collect())


# --- files


def test_errors_of_the_system_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(folder: Path) -> Job:
        flow = si.from_arrow(WHOLE).group_by("k").agg(v=col("t").collect())
        return flow.start(sink=si.to_memory(), checkpoint=folder, every="1ms", memory="1B")

    def refuse(match: str, *functions: str) -> None:
        for function in functions:
            real = getattr(os, function)

            def wrapped(path: Any, *args: Any, real: Any = real, **named: Any) -> Any:
                if match in os.fspath(path):
                    raise PermissionError(errno.EACCES, "not allowed", os.fspath(path))
                return real(path, *args, **named)

            monkeypatch.setattr(os, function, wrapped)

    started(tmp_path / "one").wait()
    (tmp_path / "one" / "_epoch-left").touch()
    with monkeypatch.context():
        refuse("_epoch-left", "unlink", "remove")
        with pytest.raises(si.ScaleinError, match=r"cannot tidy(.|\n)*_epoch-left(.|\n)*not allowed"):
            started(tmp_path / "one")
    monkeypatch.undo()
    (tmp_path / "two" / "state-0").mkdir(parents=True)
    (tmp_path / "two" / "state-0" / "rows-0000000001.arrow").touch()
    refuse("state-0", "rmdir")
    with pytest.raises(si.ScaleinError, match=r"cannot remove state(.|\n)*state-0(.|\n)*not allowed"):
        started(tmp_path / "two")
    monkeypatch.undo()
    refuse("rows-", "unlink", "remove")  # garbage: that is no reason to fail
    log = RowBuffer(tmp_path / "three", WHOLE.schema, None)
    log.add(BATCHES[0])
    log.write(log.segments)
    log.replace([])
    log.remove_unreferenced(set())
    assert len(list((tmp_path / "three").iterdir())) == 1
    monkeypatch.undo()
    log.remove_unreferenced(set())
    assert not list((tmp_path / "three").iterdir())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
        with pytest.raises(si.ScaleinError, match=r"needs a temporary folder(.|\n)*nowhere"):
            si.from_arrow(WHOLE).start(sink=si.to_memory())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_log_that_cannot_be_written_ends_and_the_job_does_not() -> None:
    job = si.from_source(Stream({"all": BATCHES}, ends=False)).start(sink=si.to_memory())
    with pytest.warns(RuntimeWarning, match=r"the log of a job ends here: /dev/full(.|\n)*No space left"):
        log_lines(job, "/dev/full", 0.01).join(20)
    assert job.is_active
    job.stop()


@pytest.mark.parametrize("how", ["short", "gone"])
def test_a_damaged_image_of_the_state_leads_back_an_epoch(how: str, tmp_path: Path) -> None:
    rows = [pa.record_batch({"k": pa.array(range(n, n + 20_000), pa.int64())}) for n in range(0, 80_000, 20_000)]

    def start(allowed: int) -> Job:
        flow = si.from_source(Stream({"all": rows}, allowed={"all": allowed}))
        return flow.distinct("k").start(sink=si.to_ipc(tmp_path / "out"), checkpoint=tmp_path / "c", every="1h")

    for allowed in (2, 3):
        job = start(allowed)
        until(lambda: rows_in(job) == 20_000 * allowed, job)  # noqa: B023
        if allowed == 2:
            job.snapshot()
            before = {path.name for path in (tmp_path / "c").rglob("*")}
        job.stop()
    new = [path for path in (tmp_path / "c" / "state-0").iterdir() if path.name not in before]
    image = max(new, key=lambda path: path.stat().st_size)
    if how == "short":
        os.truncate(image, image.stat().st_size // 2)
    else:
        image.unlink()
    with pytest.warns(RuntimeWarning, match="going back to epoch"):
        job = start(len(rows))
    job.wait()
    got = pa.concat_tables(pa.ipc.open_file(part).read_all() for part in (tmp_path / "out").glob("part-*"))
    assert sorted(got.column("k").to_pylist()) == list(range(80_000))


# --- windows that close


def test_closing_windows_does_not_look_through_the_whole_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from scalein.state import LogStore

    scans: list[int] = []
    real = LogStore.scan

    def scan(self: LogStore, *args: Any, **named: Any) -> Any:
        scans.append(len(self))
        return real(self, *args, **named)

    monkeypatch.setattr(LogStore, "scan", scan)

    def flow(source: Flow) -> Flow:
        return source.with_watermark("t", 3).group_by("k", si.tumbling("t", 4)).agg(n=si.count())

    def start(allowed: int, sink: Any) -> Job:
        stream = Stream({"all": BATCHES}, allowed={"all": allowed})
        return flow(si.from_source(stream)).start(sink=sink, emit="changes", checkpoint=tmp_path, every="1h")

    first, second = si.to_memory(), si.to_memory()
    job = start(12, first)
    until(lambda: rows_in(job) == 24, job)
    held = int(str(job.metrics()["state_bytes"]))
    job.stop()
    assert (scans, held > 0) == ([], True)
    start(len(BATCHES), second).wait()
    assert scans == []  # nor after a restart
    rows = {}
    for row in (*first.table().to_pylist(), *second.table().to_pylist()):
        assert row.pop("op") == ("update" if (row["k"], row["window_start"]) in rows else "insert")
        rows[row["k"], row["window_start"]] = row
    testing.assert_same(pa.Table.from_pylist(list(rows.values()), flow(si.from_arrow(WHOLE)).collect().schema),
                        flow(si.from_arrow(WHOLE)).collect())
