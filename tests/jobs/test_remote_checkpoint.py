"""Checkpoints that are not on the local file system: each row once, whatever fails, and one run at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import fs

import scalein as si
from scalein.cli import state
from scalein.cli.main import main
from scalein.errors import Fenced
from scalein.jobs import remote_checkpoint
from scalein.jobs.job import Job
from scalein.jobs.remote_checkpoint import RemoteCheckpoint
from scalein.storage.failpoints import POINTS
from scalein.storage.object_store import Location
from scalein.testing import Crashed, Stream, crash_at, until
from tests.jobs.dying import flow, rows
from tests.jobs.streams import rows_in
from tests.same import assert_same

BATCHES = rows().slice(0, 1_000).to_batches(max_chunksize=50)
WANT = flow(si.from_arrow(pa.Table.from_batches(BATCHES))).collect()


def subtree(folder: Path) -> Location:
    return Location(fs.SubTreeFileSystem(str(folder), fs.LocalFileSystem()), "far/c", f"far://{folder.name}/c")


def in_memory(folder: Path) -> Location:
    return Location(fs._MockFileSystem(), "far/c", f"mock://{folder.name}/c")


def start(folder: Path, where: Location, allowed: int = len(BATCHES), **options: Any) -> Job:
    stream = Stream({"all": BATCHES}, allowed={"all": allowed})
    given = {"every": "1h", "workers": 1, "sink": si.to_ipc(folder / "out"), **options}
    return flow(si.from_source(stream)).start(checkpoint=where, **given)


def check_whole(folder: Path) -> None:
    parts = [pa.ipc.open_file(part).read_all() for part in sorted((folder / "out").glob("part-*"))]
    assert_same(pa.concat_tables(parts), WANT, ordered=False)


def run_to(folder: Path, where: Location, allowed: int, epochs: int = 1) -> None:
    job = start(folder, where, allowed - epochs + 1)
    until(lambda: rows_in(job) == (allowed - epochs + 1) * 50, job)
    for _ in range(epochs - 1):
        job.snapshot()
    job.stop()


@pytest.mark.parametrize("make", [subtree, in_memory])
def test_a_job_goes_on_in_a_new_working_folder(make: Callable[[Path], Location], tmp_path: Path) -> None:
    where = make(tmp_path)
    for allowed in (4, 8, 12):
        run_to(tmp_path, where, allowed, epochs=3)
    entries = where.names("epochs")
    assert len(entries) == 3
    assert max(entries).startswith("0000000002-")
    named: set[str] = set()
    for name in entries:
        found = json.loads(where.read(f"epochs/{name}").partition(b"\n")[0])
        named |= {file for file, _ in found["remote_files"].values()}
    assert set(where.names("files")) == named
    assert len(where.names("claims")) == 1
    start(tmp_path, where).wait()
    check_whole(tmp_path)
    assert start(tmp_path, where).wait()  # it has finished
    check_whole(tmp_path)


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("point", sorted(POINTS))
def test_a_crash_anywhere_loses_and_repeats_nothing(point: str, number: int, tmp_path: Path) -> None:
    where = subtree(tmp_path)
    run_to(tmp_path, where, 3)
    with crash_at(point, number), suppress(Crashed):
        start(tmp_path, where, every="1ms").wait(60)
    start(tmp_path, where).wait()
    check_whole(tmp_path)


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 6, 8, 11, 15, 20])
def test_a_power_cut_between_any_two_operations(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the operation of this number on the remote folder, of a run that goes on from another one."""
    where = subtree(tmp_path)
    run_to(tmp_path, where, 3)
    left = [number]

    def cut(name: str) -> None:
        real = getattr(Location, name)

        def wrapped(self: Location, *args: Any) -> Any:
            left[0] -= 1
            if left[0] <= 0:
                raise Crashed("the power is cut")
            return real(self, *args)

        monkeypatch.setattr(Location, name, wrapped)

    def run() -> None:
        job = start(tmp_path, where, 6)
        until(lambda: rows_in(job) == 6 * 50, job)
        while True:
            job.snapshot()

    for name in ("put", "create", "remove"):
        cut(name)
    with pytest.raises(Crashed):
        run()
    monkeypatch.undo()
    start(tmp_path, where).wait()
    check_whole(tmp_path)


@pytest.mark.filterwarnings("ignore:a checkpoint failed:RuntimeWarning")
def test_uploads_that_fail_are_repeated_with_the_next_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = subtree(tmp_path)
    run_to(tmp_path, where, 3)
    real, fails = Location.put, [True]

    def put(self: Location, name: str, data: bytes) -> None:
        if fails and name.startswith("epochs/"):
            raise si.StoreFailed("cannot write", file=name) from ConnectionResetError("gone")
        real(self, name, data)

    job = start(tmp_path, where, 8)
    until(lambda: rows_in(job) == 8 * 50, job)
    monkeypatch.setattr(Location, "put", put)
    for _ in range(2):
        with pytest.raises(si.StoreFailed, match="cannot write"):
            job.snapshot()
    fails.clear()
    job.snapshot()
    job.stop()
    start(tmp_path, where).wait()
    check_whole(tmp_path)


def test_a_later_run_fences_an_earlier_one(tmp_path: Path) -> None:
    """It is on another machine, where no lock is seen."""
    where = subtree(tmp_path)
    first = start(tmp_path, where, 6, sink=si.to_memory())
    until(lambda: rows_in(first) == 6 * 50, first)
    first.snapshot()
    second = start(tmp_path, where, 9, sink=si.to_memory())
    with pytest.raises(si.ScaleinError, match="another run has taken over"):
        first.stop()
    until(lambda: rows_in(second) >= 3 * 50, second)
    second.stop()
    assert max(where.names("epochs")).startswith("0000000001-")
    third = start(tmp_path, where, sink=si.to_memory())
    assert third.wait(60)
    assert third.metrics()["rows_in"] == len(BATCHES) * 50


def test_concurrent_starts_get_different_numbers(tmp_path: Path) -> None:
    """Also if both look for a number before one of them has put its claim: the files of one are never the other's."""
    where = subtree(tmp_path)
    first, second = RemoteCheckpoint(where), RemoteCheckpoint(subtree(tmp_path))
    put = where.put

    def late(name: str, data: bytes) -> None:
        where.put = put  # type: ignore[method-assign]
        second.open()
        put(name, data)

    where.put = late  # type: ignore[method-assign]
    first.open()
    assert (first.begin_run(0), second.begin_run(0)) == (1, 0)
    uploaded = []
    for checkpoint, content in ((second, b"of the second"), (first, b"of the first")):
        (checkpoint.path / "state-1").mkdir()
        (checkpoint.path / "state-1" / "run").write_bytes(content)
        uploaded.append((checkpoint._upload("state-1/run").name, content))
    assert [where.read(f"files/{name}") for name, _ in uploaded] == [content for _, content in uploaded]
    first._put_entry(1, {}, {})
    with pytest.raises(Fenced, match="another run has taken over"):
        second._put_entry(1, {}, {})
    assert where.names("epochs") == ["0000000001-0000000001.json"]
    first.close()
    second.close()


@pytest.mark.parametrize("damage", ["entry", "file is gone", "short file"])
def test_the_epoch_before_a_damaged_one_is_used(damage: str, tmp_path: Path) -> None:
    where = subtree(tmp_path)
    for allowed in (4, 8):
        run_to(tmp_path, where, allowed)
    newest, before = sorted(where.names("epochs"), reverse=True)[:2]
    contents = [json.loads(where.read(f"epochs/{name}").partition(b"\n")[0]) for name in (newest, before)]
    ours, theirs = ({file for file, _ in each["remote_files"].values()} for each in contents)
    folder = tmp_path / "far" / "c"
    name = sorted(ours - theirs)[0]
    match damage:
        case "entry":
            (folder / "epochs" / newest).write_bytes(b"{}")
        case "file is gone":
            (folder / "files" / name).unlink()
        case "short file":
            (folder / "files" / name).write_bytes((folder / "files" / name).read_bytes()[:-1])
    with pytest.warns(RuntimeWarning, match="going back to epoch"):
        job = start(tmp_path, where)
    job.wait()
    check_whole(tmp_path)


def test_addresses(tmp_path: Path) -> None:
    out = si.to_memory()
    table = pa.table({"x": [1]})
    si.from_arrow(table).start(sink=out, checkpoint=f"file://{tmp_path}/c").wait()
    assert list((tmp_path / "c").glob("epoch-*"))
    with pytest.raises(si.BadArgument, match="not supported"):
        si.from_arrow(table).start(sink=out, checkpoint="nowhere://bucket/c")
    job = si.from_arrow(table).start(sink=out, checkpoint=subtree(tmp_path))
    job.wait()


def test_working_folders_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_checkpoint.tempfile, "tempdir", str(tmp_path / "work"))
    (tmp_path / "work").mkdir()
    run_to(tmp_path, subtree(tmp_path), 4)
    assert list((tmp_path / "work").iterdir()) == []
    start(tmp_path, subtree(tmp_path)).wait()
    assert list((tmp_path / "work").iterdir()) == []
    check_whole(tmp_path)


class NoCopies:
    """A file system of pyarrow's that copies no files."""

    def __init__(self, files: fs.FileSystem) -> None:
        self._files = files

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def copy_file(self, source: str, target: str) -> None:
        raise pa.ArrowNotImplementedError("copy")


@pytest.mark.filterwarnings("ignore:.*another job wrote", "ignore:the flow has changed")
@pytest.mark.parametrize("make", [subtree, in_memory])
@pytest.mark.parametrize("is_copied", [True, False])
def test_a_savepoint_begins_another_job(is_copied: bool, make: Callable[[Path], Location], tmp_path: Path) -> None:
    """In the same output folder; with a remote and with a local checkpoint."""
    where = make(tmp_path)
    job = start(tmp_path, where, 8)
    until(lambda: rows_in(job) == 8 * 50, job)
    if not is_copied:
        where.files = NoCopies(where.files)
    address = job.snapshot("before")
    assert address == where.uri_of("savepoints/before")
    with pytest.raises(si.StoreFailed, match=r"(?s)cannot keep a savepoint.*used once"):
        job.snapshot("before")
    job.stop()
    start(tmp_path, where, 12).stop()  # what the first job has now, is removed
    point = Location(where.files, f"{where.base}/savepoints/before", str(address))
    for name in where.names("files"):
        where.remove(f"files/{name}")  # it has all that it needs
    begun = start(tmp_path, Location(where.files, "far/second", "far://second"), savepoint=point)
    begun.wait()
    check_whole(tmp_path)
    start(tmp_path, tmp_path / "local", savepoint=point, sink=si.to_ipc(tmp_path / "two" / "out")).wait()
    parts = [pa.ipc.open_file(part).read_all() for part in sorted((tmp_path / "two" / "out").glob("part-*"))]
    assert 0 < sum(part.num_rows for part in parts) <= WANT.num_rows
    with pytest.raises(si.StoreFailed, match="there is no savepoint"):
        start(tmp_path, tmp_path / "other", savepoint=Location(where.files, "far/no", "far://no"))


def shown(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, list[str]]:
    code = main(["state", "far://c", *args])
    out = capsys.readouterr()
    return code, [*out.out.splitlines(), *out.err.splitlines()]


def test_the_epochs_are_shown_and_gone_back_to(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    where = subtree(tmp_path)
    monkeypatch.setattr(state, "parse_location", lambda given, at: where)
    assert shown(capsys) == (1, ["scalein: there is no checkpoint in this directory", f"  file   {where}"])
    for allowed in (4, 8, 12):
        run_to(tmp_path, where, allowed)
    job = start(tmp_path, where, 12)
    until(lambda: rows_in(job) == 12 * 50, job)
    job.snapshot("here")
    code, lines = shown(capsys)
    assert code == 0
    assert [line.split()[1] for line in lines if line.startswith("epoch")] == ["4", "3", "2"]
    assert all("whole" in line for line in lines[:3])
    assert lines[3:] == [f"savepoint here: begin another checkpoint with start(savepoint='{where}/savepoints/here')"]
    assert shown(capsys, "--back-to", "9")[0] == 1
    image = max(where.names("files"), key=lambda name: (name.rpartition("state-")[2].startswith("0-image"), name))
    path = Path(tmp_path / where.base / "files" / image)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    code, lines = shown(capsys)
    damaged = [line for line in lines if "DAMAGED" in line]
    assert code == 1 or damaged
    assert all(str(where) in line for line in damaged)
    path.unlink()
    code, lines = shown(capsys)
    assert any("a file of the checkpoint is missing" in line and path.name in line for line in lines)
    whole = [line.split()[1] for line in lines if line.startswith("epoch") and "DAMAGED" not in line]
    assert shown(capsys, "--back-to", whole[-1]) == (0, [*lines[:-1], f"the next start goes on from epoch {whole[-1]}"])
    with pytest.raises(Fenced):  # it was still running
        job.snapshot()
    assert [name.rpartition("-")[2] for name in where.names("epochs")] == [f"{int(whole[-1]):010}.json"]
    start(tmp_path, where).wait()
    check_whole(tmp_path)


class CutWrites:
    """A file system whose process ends in the middle of a file."""

    def __init__(self, files: fs.FileSystem) -> None:
        self._files = files

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def open_output_stream(self, path: str) -> CutFile:
        return CutFile(self._files.open_output_stream(path))


class CutFile:
    def __init__(self, file: pa.NativeFile) -> None:
        self._file = file

    def __enter__(self) -> CutFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, data: bytes) -> None:
        self._file.write(data[: len(data) // 2])
        self._file.flush()
        raise Crashed("killed")


def test_a_file_that_was_being_written_is_not_there(tmp_path: Path) -> None:
    """Where a file is visible before it is closed: the first entry of a checkpoint would be damaged for good."""
    where = subtree(tmp_path)
    where.create_folders("epochs")
    real, where.files = where.files, CutWrites(where.files)
    with pytest.raises(Crashed):
        where.put("epochs/0000000000-0000000001.json", b"content")
    where.files = real
    assert where.names("epochs") == []
    start(tmp_path, where).wait()
    check_whole(tmp_path)
