"""Streams that fail: attempts that are repeated, drivers that end at every step, disks that refuse. Without Spark.

A driver that dies is an exception that nothing catches, raised at some step of the protocol, after which another
driver begins from what is on disk, as after a kill; `test_stream_spark.py` kills real ones.
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
from scalein.spark.serialize import Carried
from scalein.spark.streaming import query, reducing, runs, sinks
from scalein.spark.streaming.commits import Commits
from scalein.spark.streaming.manifest import Manifests
from scalein.spark.streaming.query import StreamJob
from scalein.spark.streaming.read_state import read_state
from scalein.spark.streaming.tasks import Batch, Heard
from scalein.storage import object_store
from scalein.storage.object_store import OUTPUT, Location, parse_location
from tests.same import assert_same
from tests.spark.simulated import acting, begun, run

BATCHES = 4


def rows(batch: int) -> list[pa.Table]:
    rng = np.random.default_rng(batch)
    return [pa.table({"k": rng.integers(0, 12, 30), "x": rng.integers(0, 9, 30)}) for _ in range(2)]


def everything() -> pa.Table:
    return pa.concat_tables([part for batch in range(BATCHES) for part in rows(batch)])


FLOW = si.flow(rows(0)[0].schema).group_by("k").agg(n=si.count(), s=col("x").sum())


def changes(folder: Path) -> pa.Table:
    """The changes that are visible; each has a count of its own, so that a row which comes twice shows."""
    found = ds.dataset(folder).to_table() if any(folder.rglob("part-*")) else None
    assert found is not None
    assert len(found) == len(found.select(["k", "n"]).group_by(["k", "n"]).aggregate([])), "a change came twice"
    return found


def check(folder: Path, batches: int = BATCHES) -> None:
    """All rows are counted once, in the state and in the output."""
    want = FLOW.collect(pa.concat_tables([part for batch in range(batches) for part in rows(batch)]))
    assert_same(read_state(folder / "checkpoint"), want)
    last = changes(folder / "out").sort_by("n").to_pylist()
    assert_same(pa.Table.from_pylist(list({row["k"]: row for row in last}.values())).drop_columns("op").cast(
        want.schema), want)
    assert not list((folder / "out").rglob("_staged*"))


def begin(folder: Path, **how: Any) -> Commits:
    return begun(FLOW, folder / "checkpoint", si.to_parquet(folder / "out"), emit="changes", **how)


class Death(BaseException):
    """Nothing of ours catches it."""


@contextmanager
def dying(target: object, name: str, call: int, before: bool) -> Iterator[None]:
    """A process that ends at the n-th call of something, before or behind it."""
    calls, original = [0], getattr(target, name)

    def mortal(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call and before:
            raise Death
        found = original(*args, **kwargs)
        if calls[0] == call and not before:
            raise Death
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, mortal)
        yield


STEPS: list[tuple[object, str, int]] = [
    (Manifests, "publish", 2),  # tasks are done; and the manifest is there
    (Location, "put", 2), (object_store.os, "rename", 4), (object_store.os, "rename", 5),  # in the middle of writing it
    (FileSink, "commit", 3), (object_store.os, "rename", 6), (object_store.os, "rename", 7),  # in a commit
    (Manifests, "forget", 2), (Location, "remove", 2),
    (reducing, "write_run", 4), (FileSink, "prepare", 5),
]  # fmt: skip


@pytest.mark.parametrize("before", [True, False], ids=["before", "behind"])
@pytest.mark.parametrize(("target", "name", "call"), STEPS)
def test_a_driver_may_end_anywhere(target: object, name: str, call: int, before: bool, tmp_path: Path) -> None:
    died, number = 0, 0
    commits = begin(tmp_path)
    with dying(target, name, call, before):
        while number < BATCHES:
            try:
                commits.do(number, "query", acting(rows(number)), None)
                number += 1
            except Death:
                died += 1
                let_go(commits)
                runs._open.clear()
                commits = begin(tmp_path, partitions=2)  # Spark plays the batch again, whose function did not come back
    let_go(commits)
    assert died == 1
    begin(tmp_path).close()
    check(tmp_path)


def let_go(commits: Commits) -> None:
    """What the system does for a process that has ended: nothing is committed, removed or closed well."""
    commits._manifests.close()


def test_a_batch_that_is_done_is_only_made_visible_again(tmp_path: Path) -> None:
    commits = begin(tmp_path)
    for number in range(BATCHES):
        for _ in range(2):
            commits.do(number, "query", acting(rows(number)) if _ == 0 else _never, None)
    commits.close()
    check(tmp_path)


def _never(batch: Batch) -> Heard:
    raise AssertionError("tasks of a batch that is done must not run")


@pytest.mark.parametrize("attempts", [2, 3])
def test_attempts_that_come_twice_count_once(attempts: int, tmp_path: Path) -> None:
    commits = begin(tmp_path)
    run(commits, [rows(number) for number in range(BATCHES)], attempts=attempts)
    commits.close()
    begin(tmp_path).close()  # what attempts that lost have staged goes at the next start
    check(tmp_path)
    kept = {path.name for path in (tmp_path / "checkpoint" / "state").iterdir()}
    assert len(kept) <= 6  # nothing of theirs stays


def test_either_of_two_attempts_may_win(tmp_path: Path) -> None:
    """A speculative attempt runs beside the first one, and the one that ends first is heard."""

    def act(batch: Batch) -> Heard:
        first, second = acting(rows(0))(batch), acting(rows(0))(batch)
        words = {task: (first if task % 2 else second).words[task] for task in first.words}
        return Heard(words, first.rows)

    commits = begin(tmp_path)
    commits.do(0, "query", act, None)
    commits.close()
    begin(tmp_path).close()
    check(tmp_path, batches=1)


def test_an_attempt_that_fails_leaves_nothing_that_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = begin(tmp_path)
    run(commits, [rows(0)])
    full = [True]
    original = Location.create

    @contextmanager
    def create(self: Location, name: str) -> Iterator[object_store.ChecksummedOutput]:
        with original(self, name) as written:
            yield written
            if full[0]:
                raise OSError(28, "No space left on device")

    monkeypatch.setattr(Location, "create", create)
    with pytest.raises(StoreFailed, match="No space left"):
        commits.do(1, "query", acting(rows(1)), None)
    full[0] = False
    run(commits, [rows(number) for number in range(1, BATCHES)], first=1)
    commits.close()
    begin(tmp_path).close()
    check(tmp_path)


def test_a_task_that_fails_unstages_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = begin(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(FileSink, "prepare", lambda sink: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            commits.do(0, "query", acting(rows(0)), None)
    assert list((tmp_path / "out").iterdir()) == []
    commits.close()


def test_rows_for_a_function_do_not_wait_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "GROUP_BYTES", 1000)
    location = parse_location(tmp_path, NOWHERE)
    location.create_folders(OUTPUT)
    table = everything()
    for is_kept in (True, False):
        taken: Any = sinks.Stored(location, table.schema).begin("job-1", 0)
        for batch in table.to_batches(max_chunksize=20):
            taken.write(batch)
            assert taken.waiting_bytes < 1000
        if is_kept:
            assert taken.finish() == ([taken.name], [])
            assert pq.read_table(location.path(taken.name)).equals(table)
            assert pq.ParquetFile(location.path(taken.name)).num_row_groups > 2
        else:
            taken.abandon()
            assert not Path(location.path(taken.name)).exists()
    assert sinks.Stored(location, table.schema).begin("job-1", 0).finish() == ([], [])


def test_a_damaged_run_stops_the_stream_and_is_named(tmp_path: Path) -> None:
    commits = begin(tmp_path)
    run(commits, [rows(0)])
    for path in (tmp_path / "checkpoint" / "state").iterdir():
        path.write_bytes(path.read_bytes()[:-9] + b"?" * 9)
    runs._open.clear()
    with pytest.raises(Damaged, match=r"state/[\w-]+\.arrow"):
        commits.do(1, "query", acting(rows(1)), None)
    commits.close()
    with pytest.raises(Damaged, match=r"state/[\w-]+\.arrow"):
        read_state(tmp_path / "checkpoint")


def test_state_that_the_driver_does_not_see_is_not_committed(tmp_path: Path) -> None:
    """As with a checkpoint on a disk that each machine has for itself."""
    commits = begin(tmp_path)
    run(commits, [rows(0)])

    def elsewhere(batch: Batch) -> Heard:
        said = acting(rows(1))(batch)
        name = str(said.words[0]["runs"][-1][0])  # type: ignore[index, call-overload]
        (tmp_path / "checkpoint" / name).unlink()
        return said

    with pytest.raises(StoreFailed, match="not there for the driver") as found:
        commits.do(1, "query", elsewhere, None)
    assert "state/" in found.value.facts["file"]
    run(commits, [rows(number) for number in range(1, BATCHES)], first=1)
    commits.close()
    begin(tmp_path).close()
    check(tmp_path)


DF: Any = SimpleNamespace(sparkSession=SimpleNamespace(
    sparkContext=SimpleNamespace(getLocalProperty=lambda name: "query")))  # fmt: skip


def standing() -> StreamJob:
    """A stream that Spark does not know of."""
    stream = StreamJob.__new__(StreamJob)
    stream._error, stream._wants_stop, stream._is_cut, stream._caller = None, False, False, 0
    stream._idle, stream._ended, stream._work = threading.Lock(), threading.Event(), Carried("", b"")
    return stream


@pytest.mark.parametrize("is_begun", [True, False], ids=["fails", "is cut"])
def test_a_stop_does_not_hide_what_ended_the_stream(is_begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of whatever kind is told; what Spark says of a batch that a stop has cut is not one."""
    stream, at_work, cut = standing(), threading.Event(), threading.Event()
    monkeypatch.setattr(query, "STOP_S", 0.01)

    class Query:
        def stop(self) -> None:
            cut.set()

        def awaitTermination(self) -> None:
            raise RuntimeError("said by Spark")

    class Doing:
        def do(self, *given: object) -> None:
            at_work.set()
            assert is_begun or cut.wait(20)
            raise RuntimeError("no more room")

        def close(self) -> None:
            pass

    stream._query, stream._commits = Query(), Doing()  # type: ignore[assignment]

    def live() -> None:
        with suppress(RuntimeError):
            stream._on_batch(DF, 0)
        stream._watch()

    thread = threading.Thread(target=live)
    thread.start()
    assert at_work.wait(20)
    if is_begun:
        thread.join(20)
    stream.stop()
    thread.join(20)
    assert (str(stream.exception), stream.status) == (("no more room", "failed") if is_begun else ("None", "stopped"))


def test_a_batch_does_not_wait_for_a_stop_that_waits_for_it() -> None:
    stream = standing()
    stream._wants_stop = True
    stream._idle.acquire()  # as `stop` does, before it asks Spark to end the thread that calls
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


def test_a_sinks_own_function_may_stop_the_stream() -> None:
    """It would wait for its own batch."""
    stream, said = standing(), list[str]()

    class Query:
        def stop(self) -> None:
            said.append("stopped")
            stream._ended.set()

    class Doing:
        def do(self, *given: object) -> None:
            stream.stop()
            said.append("done")

    stream._query, stream._commits = Query(), Doing()  # type: ignore[assignment]
    stream._on_batch(DF, 0)
    assert stream._ended.wait(20)
    assert said == ["done", "stopped"]


def test_a_callback_that_raises_ends_the_batch(tmp_path: Path) -> None:
    def refuse(batch: pa.RecordBatch) -> None:
        raise RuntimeError("no more room at the inn")

    commits = begun(FLOW, tmp_path, si.to_callback(refuse), emit="changes")
    with pytest.raises(WriteFailed, match="no more room at the inn"):
        run(commits, [rows(0)])
    commits.close()


@pytest.mark.parametrize("is_local", [True, False], ids=["local", "elsewhere"])
def test_files_that_no_batch_needs_are_let_go(is_local: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that lives for many batches holds the files of the last one, and so does its disk."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    runs._open.clear()
    folder = tmp_path / "checkpoint"
    where = folder if is_local else Location(fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "checkpoint",
                                          "far://off")
    commits = begun(FLOW, where, si.to_memory(), emit="changes", partitions=1)
    for number in range(12):
        commits.do(number, "query", acting(rows(number % BATCHES)), None)
        named = {run.file for run in commits._runs}
    commits.do(12, "query", acting(rows(0)), None)
    commits.close()
    assert {name.partition("checkpoint/" if is_local else "off/")[2] for name in runs._open} <= named
    assert len(list(tmp_path.glob("scalein-runs-*/*"))) <= (0 if is_local else len(named))
    runs._open.clear()


def test_everything_runs_on_other_filesystems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    far = Location(fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "far", "far://away")
    sink = si.to_memory()
    make: Callable[[], Commits] = lambda: begun(FLOW, far, sink, emit="changes")  # noqa: E731
    for number in range(BATCHES):
        commits = make()
        commits.do(number, "query", acting(rows(number)), None)
        commits.close()
        runs._open.clear()
    assert_same(read_state(tmp_path / "far"), FLOW.collect(everything()))
