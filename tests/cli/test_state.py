"""scalein state: the epochs of a checkpoint, damage that a start does not find, and the way back."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest

import scalein as si
from scalein import col
from scalein.cli.main import main
from scalein.jobs.job import Job
from scalein.testing import Stream, until
from tests.jobs.streams import rows_in

BATCHES = [pa.record_batch({"k": [n, n + 1, n + 2], "x": [1, 2, 3]}) for n in range(20)]


def start(folder: Path, allowed: int, ends: bool = False) -> Job:
    stream = Stream({"all": BATCHES}, ends=ends, allowed={"all": allowed})
    fresh = si.from_source(stream).distinct("k").select("k", y=col("x") * 2)
    return fresh.start(sink=si.to_ipc(folder / "out"), checkpoint=folder / "c", every="1h", workers=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A job with three epochs, each with some state of its own."""
    for allowed in (5, 10, 15):
        job = start(tmp_path, allowed)
        until(lambda: rows_in(job) == 3 * allowed, job)  # noqa: B023
        job.stop()
    return tmp_path


def results(folder: Path) -> list[int]:
    parts = [pa.ipc.open_file(part).read_all() for part in sorted((folder / "out").glob("part-*"))]
    return sorted(pa.concat_tables(parts)["k"].to_pylist())


def damage(folder: Path, number: int) -> Path:
    """Change the records of one of the stored images of keys, oldest first: no start reads them."""
    path = sorted((folder / "c" / "state-0").glob("image-*"))[number]
    data = bytearray(path.read_bytes())
    for at in range(len(data) // 2, len(data)):
        data[at] ^= 0xFF
    path.write_bytes(data)
    return path


def numbers(shown: str) -> list[int]:
    return [int(line.split()[1]) for line in shown.splitlines() if line.startswith("epoch ")]


def test_whole_epochs_and_what_comes_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["state", str(folder / "c")]) == 0
    newest, middle, oldest = capsys.readouterr().out.splitlines()
    assert newest.endswith("45 rows read, 17 results, whole")
    assert "30 rows read, 12 results, whole; from here 5 results come again: in " in middle
    assert "15 rows read, 7 results, whole; from here 10 results come again: in " in oldest
    assert middle.endswith("out, files with them are replaced")


def test_damage_that_is_found_late_has_a_way_back(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = damage(folder, -1)
    for _ in range(2):
        with pytest.raises(si.Damaged, match=rf"hint   `scalein state {folder / 'c'}`"):
            start(folder, 20, ends=True).wait(60)
    assert main(["state", str(folder / "c")]) == 1
    shown = capsys.readouterr().out
    newest, middle, _ = numbers(shown)
    assert "DAMAGED: " in shown
    assert path.name in shown
    assert shown.splitlines()[-1] == f"to go back: scalein state {folder / 'c'} --back-to {middle}"
    assert main(["state", str(folder / "c"), "--back-to", str(newest)]) == 1
    assert "is damaged" in capsys.readouterr().err
    assert main(["state", str(folder / "c"), "--back-to", str(middle)]) == 0
    assert f"goes on from epoch {middle}" in capsys.readouterr().out
    assert start(folder, 20, ends=True).wait(60)
    assert results(folder) == list(range(22))


def test_a_checkpoint_in_use_is_shown_but_not_changed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = start(folder, 15)
    assert main(["state", str(folder / "c")]) == 0
    number = numbers(capsys.readouterr().out)[-1]
    assert main(["state", str(folder / "c"), "--back-to", str(number)]) == 1
    assert "another job is using this checkpoint" in capsys.readouterr().err
    job.stop()


def test_damaged_manifests_and_savepoints(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = start(folder, 15)
    job.snapshot("good")
    job.stop()
    os.truncate(sorted((folder / "c").glob("epoch-*"))[-1], 20)
    assert main(["state", str(folder / "c")]) == 1
    shown = capsys.readouterr().out
    assert "? rows read, ? results, DAMAGED: an epoch's manifest cannot be read" in shown
    assert "whole; from here later results come again" in shown
    assert 'savepoint good: begin another checkpoint with start(savepoint=' in shown


@pytest.mark.parametrize(("args", "message"), [([], "no checkpoint in this directory"),
                                               (["--back-to", "3"], "no checkpoint in this directory")])
def test_what_is_no_checkpoint(args: list[str], message: str, tmp_path: Path,
                               capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        assert main(["state", str(path), *args]) == 1
        assert message in capsys.readouterr().err


def test_no_such_epoch(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["state", str(folder / "c"), "--back-to", "99"]) == 1
    assert "there is no epoch 99" in capsys.readouterr().err
