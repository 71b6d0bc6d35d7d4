"""A crash at every file operation of a sink: no row is lost or doubled, nothing is left over."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

import scalein as si
from scalein.connectors.sinks import files as file_sinks
from scalein.connectors.sinks.files import FileSink
from scalein.storage.checked_json import Json

ROWS, EPOCH_ROWS, BATCH_ROWS = 18, 6, 3
SCHEMA = pa.schema({"k": pa.int64(), "v": pa.int64()})


class Crash(BaseException):
    """The process ends here: nothing of ours runs behind it."""


@dataclass
class Power:
    """Ends the process at the `left`-th operation on files; before it is done, or just after."""

    left: int
    is_after: bool
    wreck: list[object] = field(default_factory=list)  # kept, so that no destructor tidies up

    def around(self, operation: Callable[..., object]) -> Callable[..., object]:
        def guarded(*args: object, **more: object) -> object:
            self.left -= 1
            is_mine = self.left == 0  # operations inside of this one go on counting
            if is_mine and not self.is_after:
                raise Crash
            result = operation(*args, **more)
            if is_mine:
                raise Crash
            return result

        return guarded


@pytest.fixture
def power(monkeypatch: pytest.MonkeyPatch) -> Iterator[Power]:
    power = Power(0, False)
    for name in ("rename", "fsync", "remove", "makedirs", "rmdir"):
        monkeypatch.setattr(os, name, power.around(getattr(os, name)))
    for name in ("flush", "finish"):
        monkeypatch.setattr(file_sinks.StagedFile, name, power.around(getattr(file_sinks.StagedFile, name)))
    yield power
    power.left = 0
    for sink in power.wreck:
        assert isinstance(sink, FileSink)
        sink._open.clear()


@dataclass
class Manifest:
    """What a job's checkpoint would hold."""

    prepared: Json = None
    row: int = 0
    run: int = 0


def batch(start: int) -> pa.RecordBatch:
    numbers = range(start, start + BATCH_ROWS)
    return pa.record_batch([pa.array(n % 2 for n in numbers), pa.array(numbers)], schema=SCHEMA)


def work(sink: FileSink, manifest: Manifest) -> None:
    """A run of the job, from its last manifest to the end."""
    manifest.run += 1
    sink.open(SCHEMA, manifest.prepared, f"job-{manifest.run}")
    for start in range(manifest.row, ROWS, EPOCH_ROWS):
        for first in range(start, start + EPOCH_ROWS, BATCH_ROWS):
            sink.write(batch(first))
        prepared = sink.prepare()
        manifest.prepared, manifest.row = json.loads(json.dumps(prepared)), start + EPOCH_ROWS
        sink.commit(prepared)
    sink.close()


def crash(folder: Path, manifest: Manifest, by: str | None, power: Power, at: int, is_after: bool) -> bool:
    """Whether the run crashed; else it had fewer operations than that."""
    sink = si.to_parquet(folder, partition_by=by, roll=1)  # a file for each batch
    power.wreck.append(sink)
    power.left, power.is_after = at, is_after
    try:
        work(sink, manifest)
    except Crash:
        return True
    finally:
        power.left = 0
    return False


def check(folder: Path, by: str | None) -> None:
    seen = ds.dataset(folder, partitioning="hive" if by else None).to_table()
    assert sorted(seen["v"].to_pylist()) == list(range(ROWS))
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert [path for path in files if not path.name.startswith("part-")] == []
    assert all(any(path.iterdir()) for path in folder.iterdir() if path.is_dir())


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("by", [None, "k"])
def test_a_crash_at_every_operation(tmp_path: Path, power: Power, by: str | None, is_after: bool) -> None:
    for at in range(1, 1000):
        folder, manifest = tmp_path / str(at), Manifest()
        has_crashed = crash(folder, manifest, by, power, at, is_after)
        if has_crashed:
            work(si.to_parquet(folder, partition_by=by), manifest)
        check(folder, by)
        if not has_crashed:
            assert at > 30
            return
    raise AssertionError("it never came to its end")


@pytest.mark.parametrize("step", [3, 7, 11])
def test_a_crash_again_and_again(tmp_path: Path, power: Power, step: int) -> None:
    """Each run gets a bit further than the one before it; recovery itself crashes, too."""
    manifest, at = Manifest(), 1
    while crash(tmp_path / "out", manifest, "k", power, at, at % 2 == 0):
        at += step
    check(tmp_path / "out", "k")
