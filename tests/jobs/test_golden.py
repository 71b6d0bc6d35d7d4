"""Checkpoints that earlier versions wrote are gone on from by this one: nothing is lost, nothing comes twice."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path

import pytest

from scalein.testing import Stream
from tests.jobs.golden import BATCHES, FLOWS, FOLDER, rows, start

GOLDEN = sorted(FOLDER.parent.glob("golden_v*"))


def test_there_are_golden_checkpoints_of_every_version() -> None:
    assert [path.name for path in GOLDEN] == ["golden_v1"]
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(FLOWS)


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.name)
@pytest.mark.parametrize("name", FLOWS)
def test_an_old_checkpoint_is_gone_on_from(name: str, golden: Path, tmp_path: Path) -> None:
    old = Path(shutil.copytree(golden / name, tmp_path / "old"))
    newest = max((old / "checkpoint").glob("epoch-*.json"))
    known = json.loads(newest.read_bytes().partition(b"\n")[0])
    assert known["format"] == 1
    staged = [path.name for path in old.rglob("_staged-*")]
    assert sorted(f for out in known["output"] for word in out.values() for f in word["files"]) == sorted(staged)
    fresh = tmp_path / "fresh"
    undisturbed, job = (start(name, folder, Stream({"all": BATCHES})) for folder in (fresh, old))
    undisturbed.wait()
    job.wait()
    for part in ("out", "late"):
        assert rows(old / part) == rows(fresh / part), part
    assert sorted(path.name for path in old.rglob("_*")) == ["_owner", "_owner"]
    for figure in ("rows_in", "late_rows"):
        assert job.metrics()[figure] == undisturbed.metrics()[figure], figure


def test_a_manifest_that_does_not_name_kinds_of_sinks_is_gone_on_from(tmp_path: Path) -> None:
    """The first that format 1 had were so."""
    old = Path(shutil.copytree(FOLDER / "running", tmp_path / "old"))
    for path in (old / "checkpoint").glob("epoch-*.json"):
        known = json.loads(path.read_bytes().partition(b"\n")[0])
        del known["sinks"]
        text = json.dumps(known).encode()
        path.write_bytes(text + b"\n%08x\n" % zlib.crc32(text))
    for folder in (old, tmp_path / "fresh"):
        start("running", folder, Stream({"all": BATCHES})).wait()
    assert rows(old / "out") == rows(tmp_path / "fresh" / "out")
