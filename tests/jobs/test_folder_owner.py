"""An output folder has one owner: another job is refused, an earlier run is fenced; so it is in a checkpoint."""

from __future__ import annotations

import shutil
import threading
from contextlib import nullcontext
from pathlib import Path

import pyarrow as pa
import pytest

import scalein as si
from scalein.errors import Damaged, Fenced, NewerFormat
from scalein.jobs.checkpoint import Checkpoint
from scalein.jobs.job import Job
from scalein.storage import publish
from scalein.storage.local import LocalFileSystem
from scalein.storage.publish import OWNER, hold_folder, put, read_all, seal, take_folder, unseal
from scalein.testing import Crashed, Stream, crash_at, until
from tests.jobs.streams import rows_in
from tests.jobs.test_resume import BATCHES, WHOLE, written


def start(out: Path, checkpoint: Path | None, allowed: int = len(BATCHES),
          late: Path | None = None) -> tuple[Job, Stream]:
    stream = Stream({"all": BATCHES}, allowed={"all": allowed})
    job = si.from_source(stream).start(sink=si.to_ipc(out), late="drop" if late is None else si.to_ipc(late),
                                       checkpoint=checkpoint, every="1h")
    return job, stream


def epoch_of(folder: Path) -> object:
    return unseal((folder / OWNER).read_bytes())["epoch"]


def test_a_second_job_is_refused_while_the_first_one_runs_and_after_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    job, stream = start(out, tmp_path / "one", 5)
    until(lambda: rows_in(job) == 10, job)
    for has_ended in (False, True):
        with pytest.raises(si.WriteFailed, match="two jobs may not write to one folder") as raised:
            start(out, tmp_path / "two")
        for said in (str(out), f"the job of checkpoint {tmp_path / 'one'}", "a folder of its own", str(out / OWNER),
                     "test_folder_owner.py"):  # fmt: skip
            assert said in str(raised.value)
        if not has_ended:
            stream.allow("all", len(BATCHES))
            job.wait()
    assert written(out) == WHOLE
    assert not list(out.glob("_staged-*"))


def test_a_job_in_the_folder_of_its_removed_checkpoint(tmp_path: Path) -> None:
    start(tmp_path / "out", tmp_path / "c")[0].wait()
    shutil.rmtree(tmp_path / "c")
    with pytest.raises(si.WriteFailed, match=r"(?s)removed or replaced since.*remove the output as well"):
        start(tmp_path / "out", tmp_path / "c")
    shutil.rmtree(tmp_path / "out")
    start(tmp_path / "out", tmp_path / "c")[0].wait()
    assert written(tmp_path / "out") == WHOLE


def test_the_folder_of_late_rows_has_an_owner_as_well(tmp_path: Path) -> None:
    start(tmp_path / "out", tmp_path / "one")[0].wait()
    with pytest.raises(si.WriteFailed, match="another job"):
        start(tmp_path / "other", tmp_path / "two", late=tmp_path / "out")
    assert not list((tmp_path / "other").glob("part-*"))
    start(tmp_path / "out", tmp_path / "one", late=tmp_path / "out")[0].wait()  # one job, two sinks, one folder


def test_each_run_takes_the_folder_with_a_greater_epoch(tmp_path: Path) -> None:
    out, checkpoint = tmp_path / "out", tmp_path / "c"
    seen = []
    for point in ("batch", "commit", None):
        if point is None:
            start(out, checkpoint)[0].wait()
        else:
            with crash_at(point), pytest.raises(Crashed):
                start(out, checkpoint)[0].wait()
        seen.append(epoch_of(out))
    assert seen == [1, 2, 3]
    assert written(out) == WHOLE


def test_a_run_that_was_replaced_makes_nothing_visible(tmp_path: Path) -> None:
    """A copy of the checkpoint goes on as the same job, elsewhere: as after the first machine was taken for dead."""
    out = tmp_path / "out"
    zombie, stream = start(out, tmp_path / "c", 5)
    until(lambda: rows_in(zombie) == 10, zombie)
    zombie.snapshot()
    shutil.copytree(tmp_path / "c", tmp_path / "copy")
    successor, rest = start(out, tmp_path / "copy", 8)
    until(lambda: rows_in(successor) == 16, successor)
    successor.snapshot()
    stream.allow("all", len(BATCHES))
    until(lambda: rows_in(zombie) == 40, zombie)
    with pytest.raises(Fenced, match=r"(?s)another run has taken over this folder.*copy"):
        zombie.wait()
    assert written(out) == WHOLE[:16]
    rest.allow("all", len(BATCHES))
    successor.wait()
    assert written(out) == WHOLE
    start(out, tmp_path / "copy")[0].wait()  # removes what the zombie had staged
    assert not list(out.glob("_staged-*"))


def test_a_job_that_is_fenced_ends_with_the_next_epoch(tmp_path: Path) -> None:
    """It does not try again, as after other failures of a commit."""
    stream = Stream({"all": BATCHES}, allowed={"all": 5})
    job = si.from_source(stream).start(sink=si.to_ipc(tmp_path / "out"), checkpoint=tmp_path / "c", every="10ms")
    until(lambda: rows_in(job) == 10, job)
    name = (tmp_path / "c" / "name").read_text()
    take_folder(str(tmp_path / "out"), f"{name}-99", "elsewhere")
    stream.allow("all", 6)
    with pytest.raises(Fenced):
        job.wait(timeout=30)
    assert job.status == "failed"


def test_jobs_without_a_checkpoint_write_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "_LOCK_S", 0.05)
    job, stream = start(tmp_path, None, 5, late=tmp_path)
    for checkpoint in (None, tmp_path / "c"):
        with pytest.raises(si.WriteFailed, match=r"(?s)without a checkpoint, is writing to this folder.*its end"):
            start(tmp_path, checkpoint)
    stream.allow("all", len(BATCHES))
    job.wait()
    start(tmp_path, None)[0].wait()
    assert written(tmp_path) == sorted(2 * WHOLE)  # appended, as the user asked
    start(tmp_path, tmp_path / "c")[0].wait()
    with pytest.raises(si.WriteFailed, match="two jobs may not write to one folder"):
        start(tmp_path, None)


def test_a_folder_that_was_emptied_is_free(tmp_path: Path) -> None:
    job, stream = start(tmp_path / "out", tmp_path / "one", 5)
    until(lambda: rows_in(job) == 10, job)
    job.snapshot()
    for path in (tmp_path / "out").iterdir():
        path.unlink()
    stream.allow("all", 8)
    until(lambda: rows_in(job) == 16, job)
    job.stop()  # whoever empties a folder does not stop the job
    assert written(tmp_path / "out") == WHOLE[10:16]
    (tmp_path / "out" / OWNER).unlink(missing_ok=True)
    start(tmp_path / "out", tmp_path / "two")[0].wait()
    with pytest.raises(si.WriteFailed, match="another job"):
        start(tmp_path / "out", tmp_path / "one")


def test_records_that_cannot_be_read(tmp_path: Path) -> None:
    fs = LocalFileSystem(tmp_path)
    take_folder(str(tmp_path), "job-1", "c")
    whole = unseal(read_all(fs, OWNER))
    for wrong in (b"nonsense", b"{}\n", seal({"format": 1}), seal({**whole, "job": 3})):
        put(fs, OWNER, wrong)
        with pytest.raises(Damaged, match=r"(?s)_owner.*remove it, if no other job"):
            start(tmp_path, tmp_path / "c")
    put(fs, OWNER, seal({**whole, "format": 2}))
    with pytest.raises(NewerFormat, match="newer scalein"):
        start(tmp_path, tmp_path / "c")


def test_of_jobs_that_start_at_once_one_gets_the_folder(tmp_path: Path) -> None:
    results: list[object] = []

    def take(number: int) -> None:
        try:
            results.append(take_folder(str(tmp_path), f"job{number}-1", f"c{number}"))
        except si.WriteFailed as error:
            results.append(error)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [owned] = [each for each in results if not isinstance(each, si.WriteFailed)]
    assert isinstance(owned, publish.OwnedFolder)
    owned.check()
    assert [path.name for path in tmp_path.iterdir()] == [OWNER]


def test_a_file_system_without_locks_has_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr("fcntl.flock", refuse)
    lock = hold_folder(str(tmp_path), "other-1")
    lock.release()
    owned = take_folder(str(tmp_path), "job-1", "c")
    owned.check()
    with pytest.raises(si.WriteFailed, match="another job"):
        take_folder(str(tmp_path), "other-1", "c2")
    take_folder(str(tmp_path), "job-2", "c")
    with pytest.raises(Fenced):
        owned.check()


def test_a_sink_inside_of_a_users_sink_takes_its_folder_when_asked(tmp_path: Path) -> None:
    """`acquire` is optional; a sink that has it can refuse."""

    class Refusing:
        def acquire(self, run: str, checkpoint: str | None) -> None:
            raise ValueError(f"{run.partition('-')[2]} {checkpoint}")

        def open(self, schema: pa.Schema, committed: object, next: str) -> None: ...
        def write(self, batch: pa.RecordBatch) -> None: ...
        def prepare(self) -> None: ...
        def commit(self, prepared: object) -> None: ...
        def close(self) -> None: ...

    with pytest.raises(si.WriteFailed, match=rf"(?s)raised ValueError when it was acquired.*0 {tmp_path}"):
        si.from_arrow(pa.table({"x": [1]})).start(sink=Refusing(), checkpoint=tmp_path)


@pytest.mark.parametrize("is_between", [False, True], ids=["before", "between its check and its write"])
def test_an_earlier_run_publishes_no_epoch(is_between: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system that ignores locks, where two runs can have one checkpoint."""
    monkeypatch.setattr("fcntl.flock", lambda fd, operation: None)

    def opened() -> Checkpoint:
        checkpoint = Checkpoint(tmp_path)
        checkpoint.open()
        checkpoint.begin_run(-1)
        return checkpoint

    first, later = opened(), list[Checkpoint]()
    first.publish(1, {"from": "first"})
    if is_between:
        write = first._put

        def late(name: str, data: bytes) -> None:
            later.append(opened())
            write(name, data)

        monkeypatch.setattr(first, "_put", late)
    else:
        later.append(opened())
    with pytest.raises(Fenced, match="another run has taken over this checkpoint"):
        first.publish(2, {"from": "first"})
    later[0].publish(2, {"from": "later"})
    assert [each["from"] for each in later[0].kept()] == ["first", "later"]
    later[0].close()
    first.close()


def begun_from(point: Path, out: Path, checkpoint: Path, late: Path | None = None) -> Job:
    return si.from_source(Stream({"all": BATCHES})).start(sink=si.to_ipc(out), checkpoint=checkpoint, savepoint=point,
                                                          late="drop" if late is None else si.to_ipc(late))


@pytest.mark.filterwarnings("ignore:.*files that another job wrote:RuntimeWarning")
@pytest.mark.parametrize("crash", ["open", "prepare", "publish", "commit", None])
def test_a_savepoint_hands_the_folder_over(crash: str | None, tmp_path: Path) -> None:
    """With what the first job wrote after the savepoint, which comes again; the first job cannot come back."""
    out = tmp_path / "out"
    job, stream = start(out, tmp_path / "one", 5, late=tmp_path / "late")
    until(lambda: rows_in(job) == 10, job)
    point = job.snapshot("fork")
    assert point is not None
    stream.allow("all", 9)
    until(lambda: rows_in(job) == 18, job)
    with pytest.raises(si.WriteFailed, match=r"(?s)the job of the savepoint is running.*stop it first"):
        begun_from(point, out, tmp_path / "two", tmp_path / "late")
    job.stop()
    assert written(out) == WHOLE[:18]
    if crash is not None:
        with crash_at(crash), pytest.raises(Crashed):
            begun_from(point, out, tmp_path / "two", tmp_path / "late").wait()
    are_removed = pytest.warns(RuntimeWarning, match="files that another job wrote")
    with are_removed if crash in (None, "open") else nullcontext():
        begun_from(point, out, tmp_path / "two", tmp_path / "late").wait()
    assert written(out) == WHOLE
    with pytest.raises(si.WriteFailed, match="two jobs may not write to one folder"):
        start(out, tmp_path / "one", late=tmp_path / "late")
    begun_from(point, out, tmp_path / "two", tmp_path / "late").wait()
    assert written(out) == WHOLE
    assert not list(out.glob("_staged-*"))


def test_a_checkpoint_hands_over_what_its_job_had_not_made_visible(tmp_path: Path) -> None:
    with crash_at("commit", 2):
        job, stream = start(tmp_path / "out", tmp_path / "one", 5)
        until(lambda: rows_in(job) == 10, job)
        job.snapshot()
        stream.allow("all", 9)
        until(lambda: rows_in(job) == 18, job)
        with pytest.raises(Crashed):
            job.snapshot()
    assert written(tmp_path / "out") == WHOLE[:10]
    begun_from(tmp_path / "one", tmp_path / "out", tmp_path / "two").wait()
    assert written(tmp_path / "out") == WHOLE


def test_a_savepoint_hands_over_its_own_folders_only(tmp_path: Path) -> None:
    start(tmp_path / "out", tmp_path / "one")[0].wait()
    start(tmp_path / "other", tmp_path / "three")[0].wait()
    with pytest.raises(si.WriteFailed, match="two jobs may not write to one folder"):
        begun_from(tmp_path / "one", tmp_path / "other", tmp_path / "two")
    begun_from(tmp_path / "one", tmp_path / "new", tmp_path / "four").wait()
    assert written(tmp_path / "out") == written(tmp_path / "other") == WHOLE
