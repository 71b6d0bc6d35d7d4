"""Sinks of a stream: file sinks and user-defined ones, late rows, changed folders, vanished files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from pyarrow import fs

import scalein as si
from scalein.connectors.sinks import files
from scalein.errors import NOWHERE, BadArgument, Fenced, WriteFailed
from scalein.spark.streaming import sinks
from scalein.spark.streaming.coordinator import Coordinator
from scalein.spark.streaming.manifest import Manifests
from scalein.spark.streaming.tasks import BatchResult, MicroBatch
from scalein.storage.object_store import Location, parse_location
from tests.same import assert_same
from tests.spark.simulated import run, start_stream, tasks_over
from tests.spark.test_stream_faults import (
    BATCHES,
    FLOW,
    Crash,
    begin,
    check,
    crash,
    crash_at_call,
    rows,
)


class RecordingSink:
    """A two-phase sink as users write it; committed rows survive a crash."""

    def __init__(self, disk: dict[str, list[int]]) -> None:
        self._disk, self._rows, self._number = disk, list[int](), 0

    def open(self, schema: pa.Schema, committed: Any, next: str) -> None:
        self._next = next
        self.commit(committed)

    def write(self, batch: pa.RecordBatch) -> None:
        self._rows += batch.column("n").to_pylist()

    def prepare(self) -> Any:
        rows, self._rows, self._number = self._rows, [], self._number + 1
        return {"name": f"{self._next}-{self._number}", "rows": rows}

    def commit(self, prepared: Any) -> None:
        if prepared is not None:
            self._disk[prepared["name"]] = prepared["rows"]

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("target", "name", "before"), [
    (Manifests, "publish", True), (Manifests, "publish", False), (RecordingSink, "commit", True),
    (RecordingSink, "commit", False)])
def test_user_defined_sinks_get_each_row_once(target: object, name: str, before: bool, tmp_path: Path) -> None:
    disk: dict[str, list[int]] = {}
    coordinator = start_stream(FLOW, tmp_path, RecordingSink(disk), emit="changes")
    number = 0
    with crash_at_call(target, name, 2, before):
        while number < BATCHES:
            try:
                coordinator.run_batch(number, "query", tasks_over(rows(number)), None)
                number += 1
            except Crash:
                crash(coordinator)
                coordinator = start_stream(FLOW, tmp_path, RecordingSink(disk), emit="changes")
    coordinator.close()
    changes_out = [n for some in disk.values() for n in some]
    plain = si.to_memory()
    coordinator = start_stream(FLOW, tmp_path / "plain", plain, emit="changes")
    run(coordinator, [rows(number) for number in range(BATCHES)])
    coordinator.close()
    assert sorted(changes_out) == sorted(plain.table().column("n").to_pylist())


def test_late_rows_are_staged_with_the_batch(tmp_path: Path) -> None:
    schema = pa.schema([("t", pa.int64()), ("x", pa.int64())])
    flow = si.flow(schema).with_watermark("t", 0).group_by(si.tumbling("t", 10)).agg(n=si.count())
    coordinator = start_stream(flow, tmp_path / "checkpoint", si.to_parquet(tmp_path / "out"),
                               late=si.to_csv(tmp_path / "late"))
    run(coordinator, [[pa.table({"t": [1, 25], "x": [1, 2]}, schema)], [pa.table({"t": [3, 40], "x": [7, 8]}, schema)]],
        attempts=2)  # fmt: skip
    coordinator.close()
    assert ds.dataset(tmp_path / "late", format="csv").to_table().to_pydict() == {"t": [3], "x": [7]}
    assert sorted(ds.dataset(tmp_path / "out").to_table().column("n").to_pylist()) == [1, 1]


def test_late_rows_may_be_in_a_folder_below_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sink of results removes unreferenced files from its folder, but not these."""
    monkeypatch.setattr(sinks, "CLEANUP_EVERY", 1)
    schema = pa.schema([("t", pa.int64())])
    flow = si.flow(schema).with_watermark("t", 0).group_by(si.tumbling("t", 10)).agg(n=si.count())

    def make() -> Coordinator:
        return start_stream(flow, tmp_path / "checkpoint", si.to_parquet(tmp_path / "out"),
                            late=si.to_parquet(tmp_path / "out" / "late"))

    coordinator = make()
    run(coordinator, [[pa.table({"t": [1, 25]}, schema)], [pa.table({"t": [2]}, schema)]])
    with monkeypatch.context() as patch:
        patch.setattr(Coordinator, "_commit", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(coordinator, [[pa.table({"t": [3]}, schema)]], first=2)
    coordinator.close()
    make().close()
    assert sorted(ds.dataset(tmp_path / "out" / "late").to_table().column("t").to_pylist()) == [2, 3]


def test_another_sink_does_not_commit_prepared_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = start_stream(FLOW, tmp_path / "checkpoint", si.to_parquet(tmp_path / "out"), emit="changes")
    with monkeypatch.context() as patch:
        patch.setattr(Coordinator, "_commit", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(coordinator, [rows(0)])
    coordinator.close()
    coordinator = start_stream(FLOW, tmp_path / "checkpoint", si.to_memory(), emit="changes")
    with pytest.raises(BadArgument, match="another sink, whose output"):
        run(coordinator, [rows(0)])
    coordinator.close()
    coordinator = start_stream(FLOW, tmp_path / "checkpoint", si.to_parquet(tmp_path / "out"), emit="changes")
    run(coordinator, [rows(0)])
    coordinator.close()
    coordinator = start_stream(FLOW, tmp_path / "checkpoint", sink := si.to_memory(), emit="changes")
    run(coordinator, [rows(1)], first=1)
    coordinator.close()
    assert sink.table().num_rows
    changes_out = ds.dataset(tmp_path / "out").to_table().drop_columns("op")
    assert_same(changes_out, FLOW.collect(pa.concat_tables(rows(0))).cast(changes_out.schema))


def end_before_commit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Crash after the first manifest is published, before its output is visible."""
    coordinator = begin(folder)
    with monkeypatch.context() as patch:
        patch.setattr(Coordinator, "_commit", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(coordinator, [rows(0)])
    coordinator.close()


def test_another_folder_does_not_commit_prepared_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end_before_commit(tmp_path, monkeypatch)
    coordinator = start_stream(FLOW, tmp_path / "checkpoint", si.to_parquet(tmp_path / "out2"), emit="changes")
    with pytest.raises(BadArgument, match="another sink, whose output") as found:
        run(coordinator, [rows(0)])
    assert found.value.facts["found"] == f"files {tmp_path / 'out'}"
    coordinator.close()
    coordinator = begin(tmp_path)
    run(coordinator, [rows(0)])
    coordinator.close()
    check(tmp_path, batches=1)


def test_lost_output_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end_before_commit(tmp_path, monkeypatch)
    for path in (tmp_path / "out").iterdir():
        path.unlink()
    with pytest.warns(RuntimeWarning, match="their rows are lost"):
        begin(tmp_path).close()


def test_attempts_may_remove_their_files_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here while the driver searches for files of failed attempts, after the commit of a batch."""
    monkeypatch.setattr(sinks, "CLEANUP_EVERY", 1)
    coordinator = begin(tmp_path)
    original = files.os.walk

    def walk(folder: str) -> Iterator[Any]:
        for directory, folders, names in original(folder):
            for name in names:
                if name.startswith("_staged-"):
                    (Path(directory) / name).unlink()
            yield directory, folders, names

    monkeypatch.setattr(files.os, "walk", walk)
    run(coordinator, [rows(number) for number in range(BATCHES - 1)], attempts=2)
    monkeypatch.setattr(files.os, "walk", original)
    later = tmp_path / "out" / f"_staged-{coordinator._manifests.name}-{BATCHES:010}-000001-other0000.parquet"
    later.write_bytes(b"")  # of a driver that has taken over
    run(coordinator, [rows(BATCHES - 1)], first=BATCHES - 1, attempts=2)
    coordinator.close()
    assert list((tmp_path / "out").glob("_staged-*")) == [later]
    later.unlink()
    check(tmp_path)


def test_file_sinks_write_to_this_machine() -> None:
    for address in ("s3://bucket/x", Path("s3://bucket/x"), "file:///x", "dbfs:/x"):
        with pytest.raises(BadArgument, match="this is an address") as found:
            si.to_parquet(address)
        assert "df.write" in found.value.facts["hint"]


def test_files_that_the_driver_does_not_see_are_not_committed(tmp_path: Path) -> None:
    """As on machines without a shared folder."""
    coordinator = start_stream(FLOW, tmp_path / "checkpoint", si.to_parquet(tmp_path / "out"), emit="changes")

    def run_elsewhere(batch: MicroBatch) -> BatchResult:
        output = tasks_over(rows(0))(batch)
        next((tmp_path / "out").glob("_staged-*")).unlink()
        return output

    with pytest.raises(WriteFailed, match="it is not there"):
        coordinator.run_batch(0, "query", run_elsewhere, None)
    coordinator.close()
    assert Manifests(parse_location(tmp_path / "checkpoint", NOWHERE)).newest() is None


def test_a_second_stream_or_job_is_refused(tmp_path: Path) -> None:
    """The folder is the first one's, also after its end."""
    out = tmp_path / "out"
    first = begin(tmp_path)
    run(first, [rows(0)])
    before = sorted(path.name for path in out.iterdir())
    for _ in range(2):
        with pytest.raises(WriteFailed, match=rf"(?s)two jobs may not write.*{out}.*{tmp_path / 'checkpoint'}.*_owner"):
            start_stream(FLOW, tmp_path / "other", si.to_parquet(out), emit="changes")
        with pytest.raises(WriteFailed, match="two jobs may not write"):
            si.from_arrow(rows(0)[0]).start(sink=si.to_parquet(out), checkpoint=tmp_path / "job")
        assert sorted(path.name for path in out.iterdir()) == before
        first.close()
    start_stream(FLOW, tmp_path / "checkpoint", si.to_parquet(out), emit="changes").close()


def test_a_replaced_driver_makes_nothing_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was suspended after it published its manifest, before the renames: its successor does these."""
    out, far = tmp_path / "out", fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())

    def start() -> Coordinator:  # nothing can be locked there
        return start_stream(FLOW, Location(far, "checkpoint", "far://checkpoint"), si.to_parquet(out), emit="changes")

    zombie = start()
    commit, successors, visible = files.FileSink.commit, list[Coordinator](), list[list[str]]()

    def suspended(sink: files.FileSink, prepared: Any) -> None:
        monkeypatch.setattr(files.FileSink, "commit", commit)
        successors.append(start())
        visible.append(sorted(path.name for path in out.glob("part-*")))
        commit(sink, prepared)

    monkeypatch.setattr(files.FileSink, "commit", suspended)
    with pytest.raises(Fenced, match="taken over this folder"):
        run(zombie, [rows(0)])
    assert visible == [sorted(path.name for path in out.glob("part-*"))]
    assert visible[0]
    zombie.close()
    run(successors[0], [rows(number) for number in range(BATCHES)])
    successors[0].close()
    check(tmp_path)
