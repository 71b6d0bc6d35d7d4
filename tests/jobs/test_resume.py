"""A job that is started once more: with objects that a running one has, with other sources, with other wishes."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import scalein as si
from scalein.jobs.job import Job
from scalein.testing import Crashed, Stream, crash_at, until
from tests.jobs.streams import rows_in

BATCHES = [pa.record_batch({"t": pa.array([n, n + 1])}) for n in range(0, 40, 2)]
WHOLE = list(range(40))


def written(folder: Path) -> list[int]:
    return sorted(t for part in folder.glob("part-*") for t in pa.ipc.open_file(part).read_all()["t"].to_pylist())


# --- a sink is one job's


def test_a_start_that_fails_does_not_touch_the_sink_of_a_running_job(tmp_path: Path) -> None:
    """As when a cell of a notebook is run again."""
    stream, sink = Stream({"all": BATCHES}, allowed={"all": 5}), si.to_ipc(tmp_path / "out")

    def start(**options: Any) -> Job:
        return si.from_source(stream).start(sink=sink, every="1h", **options)

    job = start(checkpoint=tmp_path / "c")
    until(lambda: rows_in(job) == 10, job)
    with pytest.raises(si.ScaleinError, match="another job is using this checkpoint"):
        start(checkpoint=tmp_path / "c")
    with pytest.raises(si.BadArgument, match=r"another job's, which is still running(.|\n)*to_ipc"):
        start(checkpoint=tmp_path / "other")
    stream.end()
    job.wait()
    assert written(tmp_path / "out") == WHOLE
    with pytest.raises(si.WriteFailed, match="the output of another job"):
        start(checkpoint=tmp_path / "other")  # the sink is free now, its folder is not
    start(checkpoint=tmp_path / "c").wait()
    assert written(tmp_path / "out") == WHOLE


def test_what_keeps_nothing_may_serve_many_jobs() -> None:
    out = si.to_memory()
    jobs = [si.from_source(Stream({"all": BATCHES}, ends=False)).start(sink=out) for _ in range(2)]
    until(lambda: out.table().num_rows == 80, jobs[0])
    for job in jobs:
        job.stop()


def test_files_are_in_order_by_name_after_many_starts(tmp_path: Path) -> None:
    """So whoever folds changes reads them in order."""
    for count in range(1, 13):
        job = si.from_source(Stream({"all": BATCHES}, allowed={"all": count})).start(
            sink=si.to_ipc(tmp_path / "out"), checkpoint=tmp_path / "c", every="1h")
        until(lambda: rows_in(job) == 2 * count, job)  # noqa: B023
        job.stop()
    assert si.read_ipc(tmp_path / "out").collect()["t"].to_pylist() == WHOLE[:24]


@pytest.mark.parametrize("point", ["batch", "publish"])
def test_no_two_runs_have_one_name(point: str, tmp_path: Path) -> None:
    """Also those that died before they had an epoch: a sink may name its transactions so."""
    class Sink:
        names: ClassVar[list[str]] = []

        def open(self, schema: pa.Schema, committed: Any, next: str) -> None:
            self.names.append(next)

        def prepare(self) -> None: ...

        def write(self, batch: pa.RecordBatch) -> None: ...

        def commit(self, prepared: Any) -> None: ...

        def close(self) -> None: ...

    def start() -> Job:
        return si.from_source(Stream({"all": BATCHES})).start(sink=Sink(), checkpoint=tmp_path)

    for _ in range(2):
        with crash_at(point), pytest.raises(Crashed):
            start().wait()
    (tmp_path / "run").write_text("damaged")
    for _ in range(2):
        start().wait()
    assert len({name.partition("-")[0] for name in Sink.names}) == 1
    assert [int(name.partition("-")[2]) for name in Sink.names] == [0, 1, 0, 1]  # without its file, as it always was


# --- what the checkpoint knows


def test_the_rows_of_another_source_are_not_passed_over(tmp_path: Path) -> None:
    for name, values in (("in", [1, 2]), ("in2", [3, 4])):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"t": values}), tmp_path / name / "rows.parquet")
    given: dict[str, Any] = {"sink": si.to_ipc(tmp_path / "out"), "checkpoint": tmp_path / "c"}
    si.read_parquet(tmp_path / "in").start(**given).wait()
    with pytest.raises(si.BadArgument, match=r"(?s)other sources.*checkpoint .*/in/\n.*flow .*/in2/\n.*hint .*another"):
        si.read_parquet(tmp_path / "in2").start(**given)


@pytest.mark.parametrize("first", ["final", "changes"])
@pytest.mark.parametrize("is_windowed", [False, True])
def test_a_checkpoint_with_another_emit_is_refused(first: str, is_windowed: bool, tmp_path: Path) -> None:
    def start(emit: str) -> Job:
        flow = si.from_source(Stream({"all": BATCHES}, allowed={"all": 5})).with_watermark("t", 100)
        key = si.tumbling("t", 10) if is_windowed else "t"
        return flow.group_by(key).agg(n=si.count()).start(sink=si.to_memory(), emit=emit, checkpoint=tmp_path)

    job = start(first)
    until(lambda: rows_in(job) == 10, job)
    job.stop()
    other = {"final": "changes", "changes": "final"}[first]
    with pytest.raises(si.BadArgument, match=f"(?s)another emit=.*checkpoint .*{first}.*flow .*{other}"):
        start(other)
    start(first).stop()


def test_rows_without_groups_may_be_told_of_in_another_way(tmp_path: Path) -> None:
    for emit in ("final", "changes", "final"):
        si.from_source(Stream({"all": BATCHES})).distinct("t").start(sink=si.to_memory(), emit=emit,
                                                                     checkpoint=tmp_path).wait()  # fmt: skip


def test_a_partition_that_comes_back_goes_on_where_it_was(tmp_path: Path) -> None:
    for partitions, allowed in (("ab", 4), ("a", 6), ("ab", 10)):
        stream = Stream({name: BATCHES[:10] if name == "a" else BATCHES[10:] for name in partitions}, ends=False,
                        allowed=dict.fromkeys(partitions, allowed))  # fmt: skip
        job = si.from_source(stream).start(sink=si.to_ipc(tmp_path / "out"), checkpoint=tmp_path / "c", every="1h")
        until(lambda: all(r.position.offset == 2 * allowed for r in job._driver.graph.readers), job)  # noqa: B023
        job.stop()
    assert written(tmp_path / "out") == WHOLE


def test_a_filter_may_not_change_what_a_half_read_batch_counts(tmp_path: Path) -> None:
    """Where a source leaves rows out, so many rows of a batch are others behind another filter."""
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"t": range(300)}), tmp_path / "in" / "rows.parquet", row_group_size=100)

    def start(least: int, **options: Any) -> Job:
        flow = si.read_parquet(tmp_path / "in").filter(si.col("t") >= least)
        return flow.start(sink=si.to_ipc(tmp_path / "out"), checkpoint=tmp_path / "c", every="1h", **options)

    job = start(100, max_rows_per_second=1_000)
    until(lambda: rows_in(job) > 0, job)
    job.stop()
    assert 0 < rows_in(job) < 200
    with pytest.raises(si.BadArgument, match=r"(?s)half read, and the filter.*without max_rows_per_second"):
        start(0)
    start(100).wait()
    assert written(tmp_path / "out") == list(range(100, 300))


# --- another folder


def start_in(folder: Path, checkpoint: Path, allowed: int = len(BATCHES)) -> tuple[Job, Stream]:
    stream = Stream({"all": BATCHES}, allowed={"all": allowed})
    return si.from_source(stream).start(sink=si.to_ipc(folder), checkpoint=checkpoint, every="1h"), stream


@pytest.fixture
def died(tmp_path: Path) -> Path:
    """The place of a job that died between a manifest and the renames that it tells of, with an epoch before."""
    with crash_at("commit", 2):
        job, stream = start_in(tmp_path / "one" / "out", tmp_path / "one" / "c", 5)
        until(lambda: rows_in(job) == 10, job)
        job.snapshot()
        stream.allow("all", 9)
        until(lambda: rows_in(job) == 18, job)
        with pytest.raises(Crashed):
            job.stop()
    assert written(tmp_path / "one" / "out") == WHOLE[:10]
    return tmp_path / "one"


@pytest.fixture
def without_a_warning() -> Iterator[None]:
    """But that the sink is another one."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", r"the flow has changed since .*: the sink \S+ is now \S+$", RuntimeWarning)
        yield


@pytest.mark.usefixtures("without_a_warning")
def test_what_was_staged_in_another_folder_becomes_visible_there(died: Path) -> None:
    start_in(died / "new", died / "c")[0].wait()
    assert written(died / "out") == WHOLE[:18]
    assert written(died / "new") == WHOLE[18:]
    assert not list(died.rglob("_staged-*"))


@pytest.mark.usefixtures("without_a_warning")
def test_a_folder_that_was_moved_has_its_staged_files_with_it(died: Path) -> None:
    (died / "out").rename(died / "moved")
    start_in(died / "moved", died / "c")[0].wait()
    assert written(died / "moved") == WHOLE
    assert not (died / "out").exists()


@pytest.mark.usefixtures("without_a_warning")
def test_the_copy_of_a_job_leaves_the_job_alone(died: Path) -> None:
    copy = shutil.copytree(died, died.parent / "copy")
    start_in(copy / "out", copy / "c")[0].wait()
    assert written(copy / "out") == WHOLE
    assert written(died / "out") == WHOLE[:10]
    start_in(died / "out", died / "c")[0].wait()
    assert written(died / "out") == WHOLE


@pytest.mark.usefixtures("without_a_warning")
def test_a_job_that_was_stopped_may_go_on_in_another_folder(tmp_path: Path) -> None:
    job, _ = start_in(tmp_path / "out", tmp_path / "c", 5)
    until(lambda: rows_in(job) == 10, job)
    job.stop()
    start_in(tmp_path / "new", tmp_path / "c")[0].wait()
    assert (written(tmp_path / "out"), written(tmp_path / "new")) == (WHOLE[:10], WHOLE[10:])


def test_files_that_are_in_neither_folder_are_told_of(died: Path) -> None:
    shutil.rmtree(died / "out")
    with pytest.warns(RuntimeWarning, match=r"not in .*/new or .*/one/out, nor staged there: part-.*rows are lost"):
        job, _ = start_in(died / "new", died / "c")
    job.wait()
    assert written(died / "new") == WHOLE[18:]


# --- a flow that has changed


def test_what_has_changed_is_said(tmp_path: Path) -> None:
    """A filter, a joined table and a sink may change; the state stays."""
    rows = pa.table({"x": [1, 2, 3, 4]})

    def start(least: int, names: list[str], out: str) -> None:
        table = pa.table({"x": range(1, len(names) + 1), "name": names})
        flow = si.from_arrow(rows).filter(si.col("x") >= least).join(table, on="x").limit(3)
        flow.start(sink=si.to_ipc(tmp_path / out), checkpoint=tmp_path / "c").wait()

    start(1, ["a", "b", "c", "d"], "out")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start(1, ["a", "b", "c", "d"], "out")
    with pytest.warns(RuntimeWarning, match=r"has changed since(.|\n)*Filter x >= 1 is now Filter x >= 2"):
        start(2, ["a", "b", "c", "d"], "out")
    with pytest.warns(RuntimeWarning, match=r"a joined table of 4 rows, .* bytes is now a joined table of 2 rows"):
        start(2, ["a", "b"], "out")
    with pytest.warns(RuntimeWarning, match=r"the sink .*out is now .*other"):
        start(2, ["a", "b"], "other")
    with pytest.warns(RuntimeWarning, match=r"a joined table with checksum \w+ is now a joined table with checksum"):
        start(2, ["a", "c"], "other")


def test_another_file_of_a_joined_table_is_said(tmp_path: Path) -> None:
    """Of as many rows and bytes; the outputs are recognised all the same."""
    path = tmp_path / "names.csv"

    def start(text: str, changed_s: int) -> None:
        path.write_text(text)
        os.utime(path, (changed_s, changed_s))
        flow = si.from_arrow(pa.table({"x": [1, 2]})).join(si.read_csv(path), on="x")
        one, two = flow.to(si.to_memory()), flow.filter(si.col("x") > 1).to(si.to_memory())
        si.start(one, two, checkpoint=tmp_path / "c").wait()

    start("x,name\n1,a\n2,b\n", 1_000_000_000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start("x,name\n1,a\n2,b\n", 1_000_000_000)
    with pytest.warns(RuntimeWarning, match=r"names.csv: 1 file, 15 bytes, last changed at 2001-09-09 .* is now "
                                            r".*names.csv: 1 file, 15 bytes, last changed at 2033-05-18"):
        start("x,name\n1,a\n2,c\n", 2_000_000_000)
