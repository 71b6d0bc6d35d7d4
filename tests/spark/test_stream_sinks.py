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
from scalein.spark.streaming.diagnose import why_no_output
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
    changes,
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


# --- files_every


class Time:
    """A clock that a test moves."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    found = Time()
    monkeypatch.setattr(sinks, "time", found)
    return found


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("part-*"))


FORMATS = {si.to_parquet: "parquet", si.to_ipc: "ipc", si.to_csv: "csv", si.to_json: "json"}


@pytest.mark.parametrize("make", FORMATS)
def test_output_waits_and_is_joined(make: Any, clock: Time, tmp_path: Path) -> None:
    """It becomes visible in a file for each folder, when the first rows have waited long enough, and at the end."""
    schema = pa.schema({"x": pa.int64(), "s": pa.string(), "p": pa.string()})
    batches = [[pa.table({"x": [2 * n], "s": [f'"{n}", é'], "p": ["a"]}, schema),
                pa.table({"x": [2 * n + 1], "s": [None], "p": ["b"]}, schema)] for n in range(6)]  # fmt: skip
    out = tmp_path / "out"
    coordinator = start_stream(si.flow(schema), tmp_path / "checkpoint", make(out, partition_by="p"),
                               files_every_s=60.0)  # fmt: skip
    run(coordinator, batches[:2])
    clock.now += 59
    coordinator.publish_waiting()
    run(coordinator, batches[2:3], first=2)
    assert (visible(out), coordinator.has_waiting) == ([], True)
    assert why_no_output(coordinator, coordinator._spec.plan).endswith("waits to become visible in larger files.")
    clock.now += 1
    run(coordinator, batches[3:4], first=3)
    assert (len(visible(out)), coordinator.has_waiting) == (2, False)
    run(coordinator, batches[4:5], first=4)
    clock.now += 60
    coordinator.publish_waiting()  # though no batch comes
    assert len(visible(out)) == 4
    run(coordinator, batches[5:], first=5)
    assert len(visible(out)) == 4
    coordinator.publish_waiting(is_end=True)
    coordinator.close()
    assert len(visible(out)) == 6
    assert not list(out.rglob("_staged*"))
    found = ds.dataset(out, format=FORMATS[make], partitioning="hive").to_table().to_pylist()
    wanted = [row for batch in batches for part in batch for row in part.to_pylist()]
    assert sorted((row["x"], row["s"] or None, row["p"]) for row in found) == [
        (row["x"], row["s"], row["p"]) for row in wanted]


def test_output_that_fills_a_file_does_not_wait(clock: Time, tmp_path: Path) -> None:
    """A large file is not written again, and small ones are joined up to the size at which files are rolled."""
    schema = pa.schema({"x": pa.int64()})
    sizes = [10, 10, 4000, 10, 10, 4000]  # values of 8 bytes
    coordinator = start_stream(si.flow(schema), tmp_path / "checkpoint", si.to_ipc(tmp_path / "out", roll=60_000),
                               files_every_s=60.0)  # fmt: skip
    run(coordinator, [[pa.table({"x": range(size)}, schema)] for size in sizes])
    coordinator.close()
    assert sorted((ds.dataset(path, format="ipc").count_rows(), "-999999-" in path.name)
                  for path in (tmp_path / "out").glob("part-*")) == [(4000, False), (4040, True)]  # fmt: skip
    assert not list((tmp_path / "out").glob("_staged*"))


def test_output_that_waits_belongs_to_its_sink(clock: Time, tmp_path: Path) -> None:
    """After a crash it waits in the sink's folder: another sink cannot make it visible. The next start does at once,
    and does not join it, as it may write another format.
    """
    coordinator = begin(tmp_path, files_every_s=60.0)
    run(coordinator, [rows(0), rows(1)])
    crash(coordinator)
    with pytest.raises(BadArgument, match="waits to become visible in larger files, and this start has another sink"):
        start_stream(FLOW, tmp_path / "checkpoint", si.to_memory(), emit="changes")
    assert visible(tmp_path / "out") == []
    staged = [path.name.replace("_staged-", "part-") for path in (tmp_path / "out").glob("_staged-*")]
    other = start_stream(FLOW, tmp_path / "checkpoint", si.to_csv(tmp_path / "out"), emit="changes", files_every_s=60.0)
    assert (visible(tmp_path / "out"), other.has_waiting) == (sorted(staged), False)
    other.close()
    coordinator = begin(tmp_path)
    run(coordinator, [rows(1)], first=1)  # Spark may repeat it
    run(coordinator, [rows(2), rows(3)], first=2)
    coordinator.close()
    check(tmp_path)
    start_stream(FLOW, tmp_path / "checkpoint", si.to_memory(), emit="changes").close()


@pytest.mark.parametrize(("cleanup", "most"), [(1, 64), (64, 64), (1, 4)])
def test_a_reader_sees_each_row_once_at_any_moment(cleanup: int, most: int, clock: Time, tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at after every change of the folder: no row twice, and none disappears."""
    monkeypatch.setattr(sinks, "CLEANUP_EVERY", cleanup)
    monkeypatch.setattr(files, "_MAX_WAITING", most)
    out, seen = tmp_path / "out", [0]

    def watched(name: str) -> Any:
        original = getattr(files.os, name)

        def change(*given: Any, **more: Any) -> Any:
            found = original(*given, **more)
            if str(given[0]).startswith(str(out)) and visible(out):
                count = changes(out).num_rows  # which are all different
                assert count >= seen[0]
                seen[0] = count
            return found

        return change

    for name in ("rename", "remove", "fsync"):
        monkeypatch.setattr(files.os, name, watched(name))
    coordinator = begin(tmp_path, files_every_s=60.0)
    for number in range(BATCHES):
        clock.now += 30
        run(coordinator, [rows(number)], first=number, attempts=2)
        assert len(files.waiting_files(coordinator._last["output"]["out"][1])) <= most  # type: ignore[index,call-overload]
    coordinator.publish_waiting(is_end=True)
    coordinator.close()
    begin(tmp_path).close()
    check(tmp_path)
    assert len(visible(out)) == 2
    assert seen[0] == changes(out).num_rows


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
