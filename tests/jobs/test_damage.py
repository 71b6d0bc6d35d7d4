"""Checkpoints that are damaged, hostile, of another flow, in use, or cannot be written."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import tempfile
import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from scalein.jobs import coordinator, supervisor
from scalein.jobs.coordinator import MAX_FAILURES
from scalein.jobs.job import Job
from scalein.state import LogStore, row_buffer
from scalein.state.row_buffer import RowBuffer
from scalein.testing import Stream, until
from tests.engines import examples
from tests.jobs.dying import flow, rows
from tests.jobs.streams import rows_in
from tests.same import assert_same

BATCHES = rows().slice(0, 1_000).to_batches(max_chunksize=50)


def start(folder: Path, allowed: int = len(BATCHES), build: Callable[[Flow], Flow] = flow, **options: Any) -> Job:
    stream = Stream({"all": BATCHES}, allowed={"all": allowed})
    given = {"every": "1h", "workers": 1, "sink": si.to_ipc(folder / "out"), **options}
    return build(si.from_source(stream)).start(checkpoint=folder / "checkpoint", **given)


def output(folder: Path) -> pa.Table:
    return pa.concat_tables([pa.ipc.open_file(part).read_all() for part in sorted((folder / "out").glob("part-*"))])


def check_whole(folder: Path) -> None:
    """The directory has every row once, and nothing half done."""
    assert_same(output(folder), flow(si.from_arrow(pa.Table.from_batches(BATCHES))).collect(), ordered=False)
    assert [path.name for path in folder.rglob("_*")] == ["_owner"]


def manifests(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoint").glob("epoch-*.json"))


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job that was stopped on its way, with several epochs, of two runs."""
    folder = tmp_path_factory.mktemp("history")
    for stop in (6, 12):
        stream = Stream({"all": BATCHES}, allowed={"all": stop - 3})
        job = flow(si.from_source(stream)).start(sink=si.to_ipc(folder / "out"), checkpoint=folder / "checkpoint",
                                                 every="1h", workers=1)
        until(lambda: rows_in(job) == (stop - 3) * 50, job)  # noqa: B023
        job.snapshot()
        stream.allow("all", stop)
        until(lambda: rows_in(job) == stop * 50, job)  # noqa: B023
        job.stop()
    assert len(manifests(folder)) == 3
    return folder


@pytest.fixture
def folder(history: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(history, tmp_path / "copy"))


def flip(path: Path, share: float = 0.5, change: int = 0x10) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * share)] ^= change
    path.write_bytes(data)


def newest_only(folder: Path, kind: str) -> Path:
    """A file of the state that only the newest epoch needs."""
    files = sorted((folder / "checkpoint").rglob(kind), key=lambda path: path.name)
    named = [manifest.read_text() for manifest in manifests(folder)[:-1]]
    return next(path for path in reversed(files) if not any(path.name in text for text in named))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "manifest": lambda folder: flip(manifests(folder)[-1]),
    "short manifest": lambda folder: os.truncate(manifests(folder)[-1], 100),
    "empty manifest": lambda folder: os.truncate(manifests(folder)[-1], 0),
    "rows": lambda folder: flip(newest_only(folder, "rows-*.arrow")),
    "rows are gone": lambda folder: newest_only(folder, "rows-*.arrow").unlink(),
    "snapshot": lambda folder: flip(newest_only(folder, "snapshot-*.manifest")),
    "snapshot is gone": lambda folder: newest_only(folder, "snapshot-*.manifest").unlink(),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_the_epoch_before_a_damaged_one_is_used(kind: str, folder: Path) -> None:
    DAMAGES[kind](folder)
    with pytest.warns(RuntimeWarning, match="going back to epoch"):
        job = start(folder)
    job.wait()
    check_whole(folder)


def test_two_damaged_epochs(folder: Path) -> None:
    flip(manifests(folder)[-1])
    flip(manifests(folder)[-2])
    with pytest.warns(RuntimeWarning, match="going back to epoch"):
        job = start(folder)
    job.wait()
    check_whole(folder)


def test_older_epochs_can_still_be_used_after_a_start(folder: Path) -> None:
    start(folder, allowed=0).stop()  # one more epoch, with nothing new
    for path in manifests(folder)[1:]:
        flip(path)
    with pytest.warns(RuntimeWarning, match="going back to epoch"):
        job = start(folder)
    job.wait()
    check_whole(folder)


def test_a_damaged_older_epoch_harms_nobody(folder: Path) -> None:
    flip(manifests(folder)[0])
    job = start(folder, every="1ms")
    job.wait()
    assert job.metrics()["failed_checkpoints"] == 0
    check_whole(folder)


def test_if_all_are_damaged_nothing_is_begun_anew(folder: Path) -> None:
    for path in manifests(folder):
        flip(path)
    with pytest.raises(si.ScaleinError, match=r"manifest cannot be read(.|\n)*epoch-"):
        start(folder)


def test_if_all_are_gone_no_row_is_written_again(folder: Path) -> None:
    before = output(folder)
    for path in manifests(folder):
        path.unlink()
    with pytest.raises(si.Damaged, match=r"no epoch any more(.|\n)*out/part-"):
        start(folder)
    assert_same(output(folder), before)


def test_damage_in_the_store_never_gives_wrong_rows(folder: Path) -> None:
    for path in (folder / "checkpoint").rglob("image-*.seg"):
        flip(path, 0.3)
    with pytest.raises(si.ScaleinError), warnings.catch_warnings():  # noqa: PT012
        warnings.simplefilter("ignore")
        start(folder).wait()


def changed(value: Any, path: list[int], new: Any) -> Any:
    """A value with a part of it replaced, chosen by numbers."""
    if not path or not isinstance(value, dict | list) or not value:
        return new
    keys = sorted(value) if isinstance(value, dict) else list(range(len(value)))
    key = keys[path[0] % len(keys)]
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[key] = changed(value[key], path[1:], new)  # type: ignore[index]
    return copy


ODD = [None, True, -1, 1 << 70, 1.5, "", "../../x", "state", [], [[]], {}, [1, 2, 3, 4, 5], {"snapshot": 99},
       {"epoch": "x", "files": ["/x"]}, {"epoch": "a-1-000001", "files": ["../_staged-x"]}]  # fmt: skip


@examples(12)
@given(path=st.lists(st.integers(0, 20), min_size=1, max_size=6), new=st.sampled_from(ODD))
def test_a_hostile_manifest_is_refused_or_harmless(history: Path, path: list[int], new: Any) -> None:
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(shutil.copytree(history, Path(place) / "copy"))
        *older, newest = manifests(folder)
        for each in older:
            each.unlink()
        found = changed(json.loads(newest.read_bytes().partition(b"\n")[0]), path, new)
        text = json.dumps(found).encode()
        newest.write_bytes(text + b"\n%08x\n" % zlib.crc32(text))
        with suppress(si.ScaleinError):
            start(folder).wait()


@examples(10)
@given(share=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255))
def test_rows_whose_checksum_was_forged(share: float, change: int, history: Path) -> None:
    """The job says so, or gives other results: it does not end the process."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(shutil.copytree(history, Path(temporary) / "copy"))
        checksums = {}
        for path in (folder / "checkpoint").rglob("rows-*.arrow"):
            flip(path, share, change)
            checksums[path.name] = zlib.crc32(path.read_bytes())
        assert checksums
        for path in manifests(folder):
            found = json.loads(path.read_bytes().partition(b"\n")[0])
            for state in found["states"]:
                state.get("files", {}).update({name: checksums[name] for name in state.get("files", {})})
            text = json.dumps(found).encode()
            path.write_bytes(text + b"\n%08x\n" % zlib.crc32(text))
        with suppress(si.ScaleinError):
            start(folder).wait()


def test_a_checkpoint_has_one_job(folder: Path) -> None:
    job = start(folder, allowed=12)
    with pytest.raises(si.ScaleinError, match="another job is using"):
        start(folder)
    job.stop()
    start(folder).wait()
    check_whole(folder)


def test_another_flow_is_refused_with_the_difference(folder: Path) -> None:
    def other(source: Flow) -> Flow:
        fresh = source.with_watermark("t", "60ms").distinct("id")
        return fresh.group_by("k", si.tumbling("t", "200ms")).agg(n=si.count(), total=col("x").sum())

    with pytest.raises(si.ScaleinError, match=r"other state(.|\n)*checkpoint .*100(.|\n)*flow .*200"):
        start(folder, build=other)
    with pytest.raises(si.ScaleinError, match=r"nothing more"):
        start(folder, build=lambda source: source.with_watermark("t", "60ms").distinct("id"))


def test_a_new_stateless_step_is_accepted(folder: Path) -> None:
    seen = si.to_memory()
    start(folder, build=lambda source: flow(source.filter(col("x") >= 0)).with_columns(more=col("n") + 1),
          sink=seen).wait()
    assert "more" in seen.table().column_names
    rest = flow(si.from_arrow(pa.Table.from_batches(BATCHES))).collect().num_rows - output(folder).num_rows
    assert seen.table().num_rows == rest


def test_a_finished_job_gives_nothing_more(folder: Path) -> None:
    start(folder).wait()
    for _ in range(2):
        job = start(folder)
        job.wait()
        assert job.status == "finished"
    check_whole(folder)


# --- a disk that fails


def failing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int, where: str) -> list[str]:
    """Calls of a function about files with `where` in their name fail while the list that this gives is not empty."""
    real, fails = getattr(owner, name), ["yes"]

    def wrapped(*args: Any, **named: Any) -> Any:
        first = args[0]
        about = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)
        if fails and where in about:
            raise OSError(number, os.strerror(number))
        return real(*args, **named)

    monkeypatch.setattr(owner, name, wrapped)
    return fails


@pytest.mark.parametrize(("name", "where", "number"), [
    ("fdatasync", "_epoch-", errno.EIO), ("rename", "_epoch-", errno.ENOSPC), ("fsync", "/rows-", errno.ENOSPC),
    ("fdatasync", "/_snapshot-", errno.EIO), ("fdatasync", "image-", errno.ENOSPC),
    ("posix_fallocate", "state-", errno.ENOSPC), ("pwrite", "state-", errno.EIO),
])  # fmt: skip
def test_the_job_goes_on_when_a_checkpoint_cannot_be_written(
        name: str, where: str, number: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    stream = Stream({"all": BATCHES}, allowed={"all": 14})
    job = flow(si.from_source(stream)).start(sink=si.to_ipc(folder / "out"), checkpoint=folder / "checkpoint",
                                             every="5ms", workers=1)
    until(lambda: rows_in(job) == 14 * 50, job)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fails = failing(monkeypatch, os, name, number, where)
        stream.allow("all", 16)
        if name in ("posix_fallocate", "pwrite") or where == "image-":  # also the file system may not do without it
            until(lambda: rows_in(job) == 16 * 50, job)
        else:
            until(lambda: int(str(job.metrics()["failed_checkpoints"])) > 1, job)
        fails.clear()
        epochs = int(str(job.metrics()["epochs"]))
        stream.allow("all", 18)
        until(lambda: int(str(job.metrics()["epochs"])) > epochs, job)
    if job.metrics()["failed_checkpoints"]:
        assert any("a checkpoint failed" in str(each.message) for each in caught)
    assert job.is_active
    stream.end()
    job.wait()
    check_whole(folder)


@pytest.mark.filterwarnings("ignore:a checkpoint failed:RuntimeWarning")
@pytest.mark.parametrize(("name", "where"), [("rename", "_epoch-"), ("fsync", "/rows-"), ("fdatasync", "/_snapshot-")])
def test_checkpoints_that_fail_again_and_again_end_the_job(
        name: str, where: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(coordinator, "RETRY_S", 1e-5)
    stream = Stream({"all": BATCHES}, allowed={"all": 14})
    job = flow(si.from_source(stream)).start(sink=si.to_ipc(folder / "out"), checkpoint=folder / "checkpoint",
                                             every="1ms", workers=1)
    until(lambda: rows_in(job) == 14 * 50, job)
    fails = failing(monkeypatch, os, name, errno.ENOSPC, where)
    stream.allow("all", 16)
    with pytest.raises(si.StoreFailed, match=r"No space left(.|\n)*10 checkpoints in a row"):
        job.wait(60)
    assert (job.status, job.metrics()["failed_checkpoints"]) == ("failed", MAX_FAILURES)
    fails.clear()
    start(folder).wait()
    check_whole(folder)


def test_snapshots_on_request_that_fail_again_and_again_end_the_job(
        folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    job = start(folder, allowed=14)
    until(lambda: rows_in(job) == 14 * 50, job)
    fails = failing(monkeypatch, os, "rename", errno.ENOSPC, "_epoch-")
    for _ in range(MAX_FAILURES):
        assert job.is_active
        with pytest.raises(si.StoreFailed, match="cannot write the checkpoint"):
            job.snapshot()
    with pytest.raises(si.StoreFailed, match="10 checkpoints in a row"):
        job.wait(60)
    fails.clear()
    start(folder).wait()
    check_whole(folder)


@pytest.mark.filterwarnings("ignore:a checkpoint failed:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:the job failed:RuntimeWarning")
def test_restarts_are_not_counted_anew_without_a_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job whose checkpoints all fail may run for long: it makes no progress, and the attempts come to an end."""
    monkeypatch.setattr(coordinator, "RETRY_S", 1e-5)
    monkeypatch.setattr(supervisor, "STEADY_S", 0.0)
    monkeypatch.setattr(supervisor, "FIRST_WAIT_S", 0.001)
    fails = failing(monkeypatch, os, "rename", errno.ENOSPC, "_epoch-")
    job = start(folder, allowed=14, every="1ms", restarts=2)
    with pytest.raises(si.StoreFailed, match="10 checkpoints in a row"):
        job.wait(60)
    assert job.metrics()["restarts"] == 2
    fails.clear()
    start(folder).wait()
    check_whole(folder)


def test_a_snapshot_that_fails_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = start(folder, allowed=14)
    until(lambda: rows_in(job) == 14 * 50, job)
    fails = failing(monkeypatch, os, "rename", errno.ENOSPC, "_epoch-")
    with pytest.raises(si.ScaleinError, match="cannot write the checkpoint"):
        job.snapshot()
    fails.clear()
    job.snapshot()
    job.stop()
    start(folder).wait()
    check_whole(folder)


def test_a_freeze_that_fails_is_made_up_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = start(folder, allowed=14)
    until(lambda: rows_in(job) == 14 * 50, job)
    real = LogStore.snapshot

    def refuse(self: LogStore) -> Any:
        raise si.ScaleinError("no address space")

    monkeypatch.setattr(LogStore, "snapshot", refuse)
    with pytest.raises(si.ScaleinError, match="no address space"):
        job.snapshot()
    monkeypatch.setattr(LogStore, "snapshot", real)
    job.stop()
    start(folder).wait()
    check_whole(folder)


def test_a_start_that_cannot_read_does_not_go_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scalein.errors import StoreFailed

    def refuse(*args: Any, **named: Any) -> Any:
        raise StoreFailed("too many open files") from OSError(errno.EMFILE, "too many open files")

    before = manifests(folder)
    with monkeypatch.context() as patched:
        patched.setattr(LogStore, "open", refuse)
        with pytest.raises(StoreFailed, match="too many"):
            start(folder)
    assert manifests(folder) == before
    start(folder).wait()
    check_whole(folder)


def test_everything_is_on_disk_before_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a manifest names was synced before it got its name, and so was its directory."""
    synced: set[str] = set()

    def noting(real: Callable[[int], None]) -> Callable[[int], None]:
        def wrapped(handle: int) -> None:
            real(handle)
            synced.add(os.readlink(f"/proc/self/fd/{handle}"))

        return wrapped

    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, noting(getattr(os, name)))
    real, checked = os.rename, []

    def rename(old: Any, new: Any) -> None:
        if "epoch-0" in os.path.basename(new):
            found = json.loads(Path(old).read_bytes().partition(b"\n")[0])
            assert str(old) in synced
            for output in found["output"]:
                for name in output["out"]["files"]:
                    assert str(tmp_path / "out" / name) in synced
                    checked.append(name)
            for number, state in enumerate(found["states"]):
                for name in state.get("files", ()):
                    assert str(tmp_path / "checkpoint" / f"state-{number}" / name) in synced
                    checked.append(name)
        real(old, new)

    monkeypatch.setattr(os, "rename", rename)
    stream = Stream({"all": BATCHES}, allowed={"all": 5})
    job = flow(si.from_source(stream)).start(sink=si.to_ipc(tmp_path / "out"), checkpoint=tmp_path / "checkpoint",
                                             every="1h", workers=1)
    for allowed in (5, 10, 15):
        stream.allow("all", allowed)
        until(lambda: rows_in(job) == allowed * 50, job)  # noqa: B023
        job.snapshot()
    stream.end()
    job.wait()
    assert len(checked) > 2


@pytest.mark.parametrize("kind", ["epoch-", "rows-"])
def test_files_that_cannot_be_read_now_are_not_damaged(kind: str, folder: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    before = manifests(folder)
    with monkeypatch.context() as patched:
        fails = failing(patched, io, "open", errno.EMFILE, kind)
        patched.setattr("builtins.open", io.open)
        with pytest.raises(si.ScaleinError, match=r"cannot be read(.|\n)*Too many open files"):
            start(folder)
        fails.clear()
    assert manifests(folder) == before
    start(folder).wait()
    check_whole(folder)


def test_a_file_of_rows_is_summed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RowBuffer(tmp_path, BATCHES[0].schema, None)
    log.add(BATCHES[0])
    first = log.to_json(log.segments)
    monkeypatch.setattr(row_buffer, "_checksum", lambda path: -1)
    log.add(BATCHES[1])
    second = log.to_json(log.segments)
    assert sorted(second["files"].values()) == sorted([-1, *first["files"].values()])  # type: ignore[union-attr]


def test_rows_that_cannot_be_taken_into_the_state_are_not_left_out(tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in no table any more: a job that went on would commit the next epoch without them."""
    def count(source: Flow) -> Flow:
        return source.group_by("k").agg(n=si.count())

    job = start(tmp_path, allowed=5, build=count)
    until(lambda: rows_in(job) == 250, job)

    def refuse(self: LogStore, rows: Any, **functions: str) -> None:
        raise si.ScaleinError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(LogStore, "merge", refuse)
        with pytest.raises(si.ScaleinError, match="no space left"):
            job.snapshot()
        with pytest.raises(si.ScaleinError, match="no space left"):
            job.wait(20)
    start(tmp_path, build=count).wait()
    assert_same(output(tmp_path), count(si.from_arrow(pa.Table.from_batches(BATCHES))).collect(), ordered=False)
