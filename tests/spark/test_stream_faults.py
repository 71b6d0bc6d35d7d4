"""Faults of streams, without Spark: repeated attempts, drivers that crash at every step, full disks.

A driver that crashes is an exception that nothing catches, raised at some step of the protocol, after which another
driver starts from what is on disk, as after a kill; `test_stream_spark.py` kills real ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

import scalein as si
from scalein import col
from scalein.connectors.sinks.files import FileSink
from scalein.errors import NOWHERE, Damaged, StoreFailed, WriteFailed
from scalein.spark.serialize import BroadcastPlan
from scalein.spark.streaming import query, sinks
from scalein.spark.streaming.coordinator import Coordinator
from scalein.spark.streaming.manifest import Manifests
from scalein.spark.streaming.query import StreamJob
from scalein.spark.streaming.read_state import read_state
from scalein.spark.streaming.tasks import BatchResult, MicroBatch
from scalein.state import hash_runs, run_table
from scalein.storage import object_store
from scalein.storage.object_store import OUTPUT, Location, parse_location
from tests.same import assert_same
from tests.spark.simulated import run, start_stream, tasks_over

BATCHES = 4


def rows(batch: int) -> list[pa.Table]:
    rng = np.random.default_rng(batch)
    return [pa.table({"k": rng.integers(0, 12, 30), "x": rng.integers(0, 9, 30)}) for _ in range(2)]


def everything() -> pa.Table:
    return pa.concat_tables([part for batch in range(BATCHES) for part in rows(batch)])


FLOW = si.flow(rows(0)[0].schema).group_by("k").agg(n=si.count(), s=col("x").sum())


def changes(folder: Path) -> pa.Table:
    """The visible changes; counts of a key differ, so that a repeated change is found."""
    found = ds.dataset(folder).to_table() if any(folder.rglob("part-*")) else None
    assert found is not None
    assert len(found) == len(found.select(["k", "n"]).group_by(["k", "n"]).aggregate([])), "a change came twice"
    return found


def check(folder: Path, batches: int = BATCHES) -> None:
    """All rows are counted exactly once, in the state and in the output."""
    want = FLOW.collect(pa.concat_tables([part for batch in range(batches) for part in rows(batch)]))
    assert_same(read_state(folder / "checkpoint"), want)
    last = changes(folder / "out").sort_by("n").to_pylist()
    assert_same(pa.Table.from_pylist(list({row["k"]: row for row in last}.values())).drop_columns("op").cast(
        want.schema), want)
    assert not list((folder / "out").rglob("_staged*"))


def begin(folder: Path, **how: Any) -> Coordinator:
    return start_stream(FLOW, folder / "checkpoint", si.to_parquet(folder / "out"), emit="changes", **how)


class Crash(BaseException):
    """No handler of scalein catches it."""


@contextmanager
def crash_at_call(target: object, name: str, call: int, before: bool) -> Iterator[None]:
    """A process that crashes at the n-th call of a function, before or after it."""
    calls, original = [0], getattr(target, name)

    def crashing(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call and before:
            raise Crash
        found = original(*args, **kwargs)
        if calls[0] == call and not before:
            raise Crash
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, crashing)
        yield


STEPS: list[tuple[object, str, int]] = [
    (Manifests, "publish", 2),  # tasks are done; and the manifest is published
    (Location, "put", 2), (object_store.os, "rename", 4), (object_store.os, "rename", 5),  # while it is written
    (FileSink, "commit", 3), (object_store.os, "rename", 6), (object_store.os, "rename", 7),  # in a commit
    (Manifests, "remove_unreferenced", 2), (Location, "remove", 2),
    (run_table, "write_run", 4), (FileSink, "prepare", 5),
]  # fmt: skip


JOINING_STEPS: list[tuple[object, str, int]] = [
    (Manifests, "revise", 1), (Manifests, "publish", 4),  # output waits; what is joined becomes visible
    (FileSink, "_join", 1), (FileSink, "commit", 4), (FileSink, "_remove_files", 3), (object_store.os, "remove", 2),
]  # fmt: skip


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize(("target", "name", "call", "waits"), [
    *((*step, False) for step in STEPS), *((*step, True) for step in JOINING_STEPS)])
def test_a_driver_may_crash_at_any_step(target: object, name: str, call: int, waits: bool, before: bool,
                                        tmp_path: Path) -> None:
    crashes, number, is_published = 0, 0, False
    how: dict[str, Any] = {"files_every_s": 1e6} if waits else {}
    coordinator = begin(tmp_path, **how)
    with crash_at_call(target, name, call, before):
        while number < BATCHES or not is_published:
            try:
                if number % 2 == 0 and not is_published:  # after two batches
                    coordinator.publish_waiting(is_end=True)
                    is_published = True
                else:
                    coordinator.run_batch(number, "query", tasks_over(rows(number)), None)
                    number, is_published = number + 1, False
            except Crash:
                crashes += 1
                crash(coordinator)
                hash_runs._open_files.clear()
                coordinator = begin(tmp_path, partitions=2, **how)  # Spark repeats a batch that did not return
    crash(coordinator)
    assert crashes == 1
    begin(tmp_path).close()
    check(tmp_path)
    if waits:  # what waited when the driver crashed becomes visible as it was
        assert len([*(tmp_path / "out").glob("part-*-999999-*")]) >= 1


def crash(coordinator: Coordinator) -> None:
    """Release what the operating system releases after a crash; nothing is committed or removed."""
    coordinator._manifests.close()


def test_a_committed_batch_is_only_made_visible_again(tmp_path: Path) -> None:
    coordinator = begin(tmp_path)
    for number in range(BATCHES):
        for _ in range(2):
            coordinator.run_batch(number, "query", tasks_over(rows(number)) if _ == 0 else _never, None)
    coordinator.close()
    check(tmp_path)


def _never(batch: MicroBatch) -> BatchResult:
    raise AssertionError("tasks of a committed batch must not run")


@pytest.mark.parametrize("attempts", [2, 3])
def test_repeated_attempts_count_once(attempts: int, tmp_path: Path) -> None:
    coordinator = begin(tmp_path)
    run(coordinator, [rows(number) for number in range(BATCHES)], attempts=attempts)
    coordinator.close()
    begin(tmp_path).close()  # files staged by failed attempts are removed at the next start
    check(tmp_path)
    retained = {path.name for path in (tmp_path / "checkpoint" / "state").iterdir()}
    assert len(retained) <= 6  # no file of a failed attempt stays


def test_either_of_two_attempts_may_be_used(tmp_path: Path) -> None:
    """A speculative attempt runs at the same time, and the result of the one that ends first is used."""

    def run_tasks(batch: MicroBatch) -> BatchResult:
        first, second = tasks_over(rows(0))(batch), tasks_over(rows(0))(batch)
        tasks = {task: (first if task % 2 else second).tasks[task] for task in first.tasks}
        return BatchResult(tasks, first.rows, first.read_by)

    coordinator = begin(tmp_path)
    coordinator.run_batch(0, "query", run_tasks, None)
    coordinator.close()
    begin(tmp_path).close()
    check(tmp_path, batches=1)


def test_a_failed_attempt_has_no_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = begin(tmp_path)
    run(coordinator, [rows(0)])
    full = [True]
    original = Location.create

    @contextmanager
    def create(self: Location, name: str) -> Iterator[object_store.CountedOutput]:
        with original(self, name) as written:
            yield written
            if full[0]:
                raise OSError(28, "No space left on device")

    monkeypatch.setattr(Location, "create", create)
    with pytest.raises(StoreFailed, match="No space left"):
        coordinator.run_batch(1, "query", tasks_over(rows(1)), None)
    full[0] = False
    run(coordinator, [rows(number) for number in range(1, BATCHES)], first=1)
    coordinator.close()
    begin(tmp_path).close()
    check(tmp_path)


def test_a_failed_task_removes_its_staged_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = begin(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(FileSink, "prepare", lambda sink: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            coordinator.run_batch(0, "query", tasks_over(rows(0)), None)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["_owner"]
    coordinator.close()


def test_rows_for_a_function_are_not_buffered_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "ROW_GROUP_BYTES", 1000)
    location = parse_location(tmp_path, NOWHERE)
    location.create_folders(OUTPUT)
    table = everything()
    for succeeds in (True, False):
        writer: Any = sinks.CheckpointFiles(location, table.schema).open("job-1", 0)
        for batch in table.to_batches(max_chunksize=20):
            writer.write(batch)
            assert writer.buffered_bytes < 1000
        if succeeds:
            assert writer.finish() == ([writer.name], [])
            assert pq.read_table(location.path(writer.name)).equals(table)
            assert pq.ParquetFile(location.path(writer.name)).num_row_groups > 2
        else:
            writer.abort()
            assert not Path(location.path(writer.name)).exists()
    assert sinks.CheckpointFiles(location, table.schema).open("job-1", 0).finish() == ([], [])


def test_a_damaged_run_ends_the_stream_and_is_reported(tmp_path: Path) -> None:
    coordinator = begin(tmp_path)
    run(coordinator, [rows(0)])
    for path in (tmp_path / "checkpoint" / "state").iterdir():
        path.write_bytes(path.read_bytes()[:-9] + b"?" * 9)
    hash_runs._open_files.clear()
    with pytest.raises(Damaged, match=r"state/[\w-]+\.arrow"):
        coordinator.run_batch(1, "query", tasks_over(rows(1)), None)
    coordinator.close()
    with pytest.raises(Damaged, match=r"state/[\w-]+\.arrow"):
        read_state(tmp_path / "checkpoint")


def test_state_that_the_driver_does_not_see_is_not_committed(tmp_path: Path) -> None:
    """As with a checkpoint on a disk that is local to each machine."""
    coordinator = begin(tmp_path)
    run(coordinator, [rows(0)])

    def run_elsewhere(batch: MicroBatch) -> BatchResult:
        output = tasks_over(rows(1))(batch)
        name = str(output.tasks[0]["runs"][-1][0])  # type: ignore[index, call-overload]
        (tmp_path / "checkpoint" / name).unlink()
        return output

    with pytest.raises(StoreFailed, match="the driver does not see it") as found:
        coordinator.run_batch(1, "query", run_elsewhere, None)
    assert "state/" in found.value.facts["file"]
    run(coordinator, [rows(number) for number in range(1, BATCHES)], first=1)
    coordinator.close()
    begin(tmp_path).close()
    check(tmp_path)


DF: Any = SimpleNamespace(sparkSession=SimpleNamespace(
    sparkContext=SimpleNamespace(getLocalProperty=lambda name: "query")))  # fmt: skip


def make_stream() -> StreamJob:
    """A stream without a query of Spark."""
    stream = StreamJob.__new__(StreamJob)
    stream._error, stream._is_stopping, stream._is_cancelled, stream._batch_thread = None, False, False, 0
    stream._is_draining = False
    stream._batch_lock, stream._ended, stream._broadcast = threading.Lock(), threading.Event(), BroadcastPlan("", b"")
    stream._coded, stream._spec = {}, SimpleNamespace(files_every_s=None)  # type: ignore[assignment]
    return stream


@pytest.mark.parametrize("has_failed", [True, False], ids=["fails", "is cancelled"])
def test_a_stop_does_not_hide_an_error(has_failed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of any kind is reported; Spark's error for a batch that a stop has cancelled is not."""
    stream, running, cancelled = make_stream(), threading.Event(), threading.Event()
    monkeypatch.setattr(query, "STOP_S", 0.01)

    class FakeQuery:
        def stop(self) -> None:
            cancelled.set()

        def awaitTermination(self) -> None:
            raise RuntimeError("raised by Spark")

    class FakeCoordinator:
        def run_batch(self, *given: object) -> None:
            running.set()
            assert has_failed or cancelled.wait(20)
            raise RuntimeError("no more room")

        def publish_waiting(self, is_end: bool) -> None:
            pass

        def close(self) -> None:
            pass

    stream._query, stream._coordinator = FakeQuery(), FakeCoordinator()  # type: ignore[assignment]

    def live() -> None:
        with suppress(RuntimeError):
            stream._on_batch(DF, 0)
        stream._watch()

    thread = threading.Thread(target=live)
    thread.start()
    assert running.wait(20)
    if has_failed:
        thread.join(20)
    stream.stop()
    thread.join(20)
    assert (str(stream.exception), stream.status) == (("no more room", "failed") if has_failed else ("None", "stopped"))


def test_a_stop_and_a_batch_do_not_deadlock() -> None:
    stream = make_stream()
    stream._is_stopping = True
    stream._batch_lock.acquire()  # as `stop` does, before it asks Spark to end the calling thread
    found: list[BaseException] = []

    def call() -> None:
        try:
            stream._on_batch(None, 0)  # type: ignore[arg-type]
        except Exception as error:
            found.append(error)

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(20)
    assert len(found) == 1
    assert stream.exception is None


def test_a_sink_function_may_stop_the_stream() -> None:
    """A plain stop would wait for the batch that calls it."""
    stream, output = make_stream(), list[str]()

    class FakeQuery:
        def stop(self) -> None:
            output.append("stopped")
            stream._ended.set()

    class FakeCoordinator:
        def run_batch(self, *given: object) -> None:
            stream.stop()
            output.append("done")

    stream._query, stream._coordinator = FakeQuery(), FakeCoordinator()  # type: ignore[assignment]
    stream._on_batch(DF, 0)
    assert stream._ended.wait(20)
    assert output == ["done", "stopped"]


def test_a_callback_that_raises_ends_the_batch(tmp_path: Path) -> None:
    def refuse(batch: pa.RecordBatch) -> None:
        raise RuntimeError("no more room at the inn")

    coordinator = start_stream(FLOW, tmp_path, si.to_callback(refuse), emit="changes")
    with pytest.raises(WriteFailed, match="no more room at the inn"):
        run(coordinator, [rows(0)])
    coordinator.close()


@pytest.mark.parametrize("is_local", [True, False], ids=["local", "remote"])
def test_files_that_no_batch_needs_are_closed(is_local: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of many batches has only the files of the last one open and on its disk."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    hash_runs._open_files.clear()
    folder = tmp_path / "checkpoint"
    where = folder if is_local else Location(fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "checkpoint",
                                             "far://off")
    coordinator = start_stream(FLOW, where, si.to_memory(), emit="changes", partitions=1)
    for number in range(12):
        coordinator.run_batch(number, "query", tasks_over(rows(number % BATCHES)), None)
        named = {run.file for run in coordinator._runs}
    coordinator.run_batch(12, "query", tasks_over(rows(0)), None)
    coordinator.close()
    assert {name.partition("checkpoint/" if is_local else "off/")[2] for name in hash_runs._open_files} <= named
    assert len(list(tmp_path.glob("scalein-runs-*/*"))) <= (0 if is_local else len(named))
    hash_runs._open_files.clear()


def test_streams_run_on_other_filesystems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    remote = Location(fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "far", "far://away")
    sink = si.to_memory()
    make: Callable[[], Coordinator] = lambda: start_stream(FLOW, remote, sink, emit="changes")  # noqa: E731
    for number in range(BATCHES):
        coordinator = make()
        coordinator.run_batch(number, "query", tasks_over(rows(number)), None)
        coordinator.close()
        hash_runs._open_files.clear()
    assert_same(read_state(tmp_path / "far"), FLOW.collect(everything()))
