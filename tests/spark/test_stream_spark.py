"""Streams on Spark itself. Results and faults are tested without it, much faster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as pf

import scalein as si
import scalein.spark as sis
from scalein import col
from scalein.api.flow import Flow
from scalein.cli.main import main
from scalein.errors import NOWHERE, BadArgument, BadData, ComputeError, ScaleinError, WriteFailed
from scalein.spark.streaming import inputs
from scalein.spark.streaming import query as job_module
from scalein.spark.streaming.manifest import Manifests
from scalein.storage.object_store import parse_location
from scalein.testing import until
from tests.same import assert_same
from tests.spark.simulated import fold_changes

NOW = {"availableNow": True}
LIVES = int(os.environ.get("SCALEIN_STREAM_LIVES", "0"))  # test_cluster.py kills drivers each day


def rows(number: int, count: int = 400) -> pa.Table:
    rng = np.random.default_rng(number)
    times = np.datetime64("2026-01-01T00:00:00", "us") + (number * 10_000_000 + rng.integers(0, 10_000_000, count))
    return pa.table({"t": times, "k": [None if k == 7 else f"key {k}" for k in rng.integers(0, 8, count)],
                     "x": rng.integers(-9, 10, count), "unused": rng.random(count),
                     "a.b": rng.integers(0, 9, count)})  # fmt: skip


def write(folder: Path, numbers: range) -> pa.Table:
    """Write one file for each batch; gives all rows so far."""
    folder.mkdir(exist_ok=True)
    for number in numbers:
        hidden = folder / f"_p{number:03}.parquet"  # a running stream must not see half a file
        pq.write_table(rows(number), hidden)
        os.utime(hidden, (1_700_000_000 + number, 1_700_000_000 + number))
        hidden.rename(folder / f"p{number:03}.parquet")
    return pa.concat_tables([rows(number) for number in range(numbers.stop)])


def stream(spark: Any, folder: Path) -> Any:
    schema = spark.read.parquet(str(folder)).schema
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(folder))


def descriptions(spark: Any) -> list[str]:
    """Those of the jobs in Spark's UI."""
    jobs = spark.sparkContext._jsc.sc().statusStore().jobsList(None)
    return [str(jobs.apply(k).description()) for k in range(jobs.size())]


GROUPS = si.flow(rows(0).schema).group_by("k").agg(n=si.count(), s=col("x").sum(), most=col("x").max())
WINDOWS = (si.flow(rows(0).schema).with_watermark("t", "2s").group_by("k", si.tumbling("t", "5s"))
           .agg(n=si.count(), m=col("x").mean(), most=col("a.b").max()))  # fmt: skip


def test_changes_scale_and_stop(spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "in", range(3))
    where: dict[str, Any] = {"sink": si.to_parquet(tmp_path / "out"), "checkpoint": tmp_path / "checkpoint",
                             "emit": "changes"}
    job = sis.start(GROUPS, stream(spark, tmp_path / "in"), partitions=2, trigger="0 seconds", name="by key", **where)
    with pytest.raises(ScaleinError, match="another stream is using this checkpoint"):
        sis.start(GROUPS, stream(spark, tmp_path / "in"), **where)
    with pytest.raises(BadArgument, match="a query with the name 'by key' is active"):
        sis.start(GROUPS, stream(spark, tmp_path / "in"), name="by key", **{**where, "checkpoint": tmp_path / "other"})
    assert not (tmp_path / "other").exists()
    assert "by key" in [query.name for query in spark.streams.active]
    while job.last_progress is None or job.last_progress["batch_id"] != 2:
        time.sleep(0.05)
        assert job.is_active, job.exception
    assert (job.last_progress["rows_in"], job.last_progress["partitions"]) == (400, 2)
    job.log_metrics(tmp_path / "log")
    job.scale(3)
    everything = write(tmp_path / "in", range(3, 5))
    while job.last_progress["batch_id"] != 4:
        time.sleep(0.05)
        assert job.is_active, job.exception
    assert job.last_progress["partitions"] == 3
    while job.batches_done()[2] != 5:  # counted after the progress is known
        time.sleep(0.05)
    took_in, busy_s, _, ended_s, partitions = job.batches_done()
    assert (took_in, partitions, job.work_done()[2]) == (everything.num_rows, 3, 3)
    assert 0 < busy_s < ended_s <= time.monotonic()
    assert job.configuration(4) == {"partitions": 4, "executors": 1, "cores": job.most_workers(), "migration": "lazy",
                                    "read_by": job.last_progress["read_by"]}
    assert job.metrics()["batch_s"] == job.last_progress["duration_s"]
    assert (job.name, job.last_progress["name"], job.query.lastProgress.name) == ("by key",) * 3
    assert list(job.last_progress["phases_s"]) == ["tasks", "prepare", "publish", "commit", "cleanup"]
    of_batch = list[str]()
    while not of_batch:  # Spark's UI hears of jobs a little later
        of_batch = [text for text in descriptions(spark) if text.startswith("Some(by key\n") and "batch = 4" in text]
    assert of_batch[0].endswith("\nscalein: Aggregate by k: n = count(), s = x.sum(), most = x.max())")
    job.stop()
    assert repr(job) == "StreamJob('by key', stopped, batch 4, 3 partitions)"
    assert (job.status, job.exception) == ("stopped", None)
    job.wait()
    until(lambda: '"stopped"' in (tmp_path / "log").read_text())  # written after the end
    assert main(["top", str(tmp_path / "log")]) == 0
    assert f"rows in         {everything.num_rows:,}" in capsys.readouterr().out
    assert_same(sis.read_state(tmp_path / "checkpoint"), GROUPS.collect(everything))
    changed = ds.dataset(tmp_path / "out").to_table().sort_by("n")  # the count of a key gives the order of its changes
    assert_same(pa.Table.from_pylist(fold_changes(changed, ["k"]), GROUPS.schema), GROUPS.collect(everything))


@si.udaf
class Mean:
    total: float = 0.0
    n: int = 0

    def update(self, x: float) -> None:
        self.total += x
        self.n += 1

    def merge(self, other: Mean) -> None:
        self.total += other.total
        self.n += other.n

    def finish(self) -> float:
        return self.total / self.n


@si.process
class Total:
    total: int = 0

    def on_row(self, row: Any) -> Any:
        self.total += row.x
        yield {"t": row.t, "total": self.total}


SHAPES: dict[str, tuple[str, Callable[[Flow], Flow]]] = {
    "rows": ("final", lambda q: q.filter(col("x") > 0).select("k", y=col("x") * 2)),
    "union": ("final", lambda q: q.select("k", "x").union(q.filter(col("x") > 5).select("k", x=-col("x")))),
    "distinct": ("final", lambda q: q.distinct("k", "x").select("k", "x")),
    "groups": ("changes", lambda q: q.group_by("k").agg(n=si.count(), s=col("x").sum(), v=col("x").var(),
                                                            m=Mean(col("x")))),
    "rows of groups": ("changes", lambda q: q.group_by("k").agg(n=si.count(), u=col("x").n_unique())),
    "groups of a union": ("changes", lambda q: q.select("k", "x").union(q.select("k", x=-col("x"))).group_by("k").agg(
        n=si.count(), s=col("x").sum())),
    "windows": ("final", lambda q: q.group_by("k", si.sliding("t", "6s", every="2s")).agg(n=si.count())),
    "sessions": ("final", lambda q: q.group_by("k", si.session("t", "300ms")).agg(n=si.count(), m=Mean(col("x")))),
    "process": ("final", lambda q: q.group_by("k").process(Total)),
    "over": ("final", lambda q: q.select("k", "t", before=col("x").lag().over("k", order_by="t"))),
    "join": ("final", lambda q: q.select("k", "t", "x").join(q.select("k", "t", y="x"), on="k",
                                                             between=("0s", "100ms"))),
    "changes of windows": ("changes", lambda q: q.group_by("k", si.sliding("t", "6s", every="2s")).agg(n=si.count())),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_give_the_rows_of_collect(shape: str, spark: Any, tmp_path: Path) -> None:
    """As the conformance suite does for all shapes, without Spark."""
    emit, build = SHAPES[shape]
    table = write(tmp_path / "in", range(2))
    flow = build(si.flow(table.schema).with_watermark("t", "10s"))
    out = si.to_memory()
    sis.start(flow, stream(spark, tmp_path / "in"), sink=out, checkpoint=tmp_path / "checkpoint", emit=emit,
              partitions=2, trigger=NOW).wait()
    got, want = out.table(), flow.collect(table)
    if emit == "changes":
        keys = [name for name in ("k", "window_start") if name in want.column_names]
        got = pa.Table.from_pylist(fold_changes(got, keys), want.schema)
    watermark = pc.subtract(pc.max(table["t"]), pa.scalar(10_000_000, pa.duration("us")))
    if emit == "final" and "window_end" in want.column_names:  # others are open
        want = want.filter(pc.less_equal(want["window_end"], watermark))
    if shape in ("process", "over"):  # other rows wait
        want = want.filter(pc.less(want["t"], watermark))
    assert got.num_rows
    assert_same(got, want, tolerance=1e-9)


@pytest.mark.parametrize("reader", ["all tasks", "split", "spark"])
def test_results_do_not_depend_on_who_reads_the_files(reader: str, spark: Any, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks read plain files themselves, all of them or a split; Spark reads what it has to filter or to fill up."""
    everything = write(tmp_path / "in", range(2))
    found: list[bool] = []

    def recorded(*args: Any) -> Any:
        scan = inputs.scan_of_batch(*args)
        found.append(scan is not None)
        return scan

    monkeypatch.setattr(job_module, "scan_of_batch", recorded)
    monkeypatch.setattr(job_module, "READ_ALL_BYTES", 1 << 20 if reader == "all tasks" else 0)
    rows_in = stream(spark, tmp_path / "in")
    job = sis.start(GROUPS, rows_in.filter("x > -7") if reader == "spark" else rows_in, partitions=3, trigger=NOW,
                    sink=si.to_parquet(tmp_path / "out"), checkpoint=tmp_path / "checkpoint", emit="changes")
    job.wait()
    wanted = everything.filter(pc.field("x") > -7) if reader == "spark" else everything
    assert_same(sis.read_state(tmp_path / "checkpoint"), GROUPS.collect(wanted))
    assert found == [reader != "spark"] * 2
    assert job.last_progress is not None
    assert job.last_progress["read_by"] == ("spark" if reader == "spark" else "tasks")
    assert [each.numInputRows for each in job.query.recentProgress if each.numInputRows] == [400, 400]


@pytest.mark.parametrize("chosen", [None, "FileContextBasedCheckpointFileManager"])
def test_spark_writes_its_log_without_processes_of_the_system(spark: Any, tmp_path: Path, chosen: str | None) -> None:
    """Unless the user has chosen how. The session's setting is as before, and a stream resumes either way."""
    name, ours = job_module._FILE_MANAGER, job_module._RENAMING_MANAGER
    theirs = None if chosen is None else f"{ours.rpartition('.')[0]}.{chosen}"
    location = parse_location(tmp_path / "checkpoint", NOWHERE)
    for number in range(2):
        everything = write(tmp_path / "in", range(number, number + 1))
        if theirs is not None and number:
            spark.conf.set(name, theirs)
        try:
            before = spark.conf.get(name, None)
            assert job_module._log_settings(spark, location) == ({name: ours} if before is None else {})
            sis.start(GROUPS, stream(spark, tmp_path / "in"), trigger=NOW, sink=si.to_parquet(tmp_path / "out"),
                      checkpoint=tmp_path / "checkpoint", emit="changes").wait()
            assert spark.conf.get(name, None) == before
        finally:
            spark.conf.unset(name)
    assert_same(sis.read_state(tmp_path / "checkpoint"), GROUPS.collect(everything))


def test_files_of_a_month_close_their_windows(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number, name in enumerate(("2024-01", "2024-02", "2024-03")):
        month, path = np.datetime64(name, "M"), tmp_path / "in" / f"{name}.parquet"
        times = np.arange(month.astype("M8[us]"), (month + 1).astype("M8[us]"), np.timedelta64(1, "h"))
        pq.write_table(pa.table({"t": times, "x": np.arange(len(times))}), path)
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))
    everything = ds.dataset(tmp_path / "in").to_table()
    flow = (si.flow(everything.schema).with_watermark("t", "1h").group_by(si.tumbling("t", "1h"))
            .agg(n=si.count(), s=col("x").sum()))  # fmt: skip
    job = sis.start(flow, stream(spark, tmp_path / "in"), sink=si.to_parquet(tmp_path / "out"), partitions=1,
                    checkpoint=tmp_path / "checkpoint", trigger=NOW)  # fmt: skip
    job.wait()
    want = flow.collect(everything)
    assert_same(ds.dataset(tmp_path / "out").to_table(), want.sort_by("window_start").slice(0, want.num_rows - 2))
    assert job.last_progress is not None
    assert (job.last_progress["batch_id"], job.last_progress["outlier_rows"]) == (2, 0)
    assert job.last_progress["watermark_time"] == "2024-03-31 22:00:00"
    assert job.why_no_output() == f"There is output: {want.num_rows - 2:,} rows since the start."
    again = sis.start(flow, stream(spark, tmp_path / "in"), sink=si.to_parquet(tmp_path / "out"), partitions=1,
                      checkpoint=tmp_path / "checkpoint", trigger=NOW)  # fmt: skip
    again.wait()
    assert again.why_no_output() == (
        "The stream is finished, without a batch: Spark has found no new rows in its source. It resumes after batch 2, "
        "with the watermark at 2024-03-31 22:00:00: rows of that batch and of earlier ones do not come again.")
    assert again.last_progress is not None
    assert (again.last_progress["batch_id"], again.last_progress["duration_s"]) == (2, None)


def test_windows_and_a_function_of_a_dataframe(spark: Any, tmp_path: Path) -> None:
    everything = write(tmp_path / "in", range(3))
    found: list[tuple[int, list[Any]]] = []
    job = sis.start(WINDOWS, stream(spark, tmp_path / "in"), checkpoint=str(tmp_path / "checkpoint"), trigger=NOW,
                    sink=lambda df, batch: found.append((batch, df.orderBy("window_start", "k").collect())),
                    partitions=2)  # fmt: skip
    job.wait()
    assert job.status == "finished"
    assert [batch for batch, _ in found] == [0, 1, 2]
    want = WINDOWS.collect(everything)
    closed = pa.scalar(np.datetime64("2026-01-01T00:00:25", "us"))  # the watermark is some 2 s before the last row
    got = [row for _, some in found for row in some]
    expected = [row for row in want.to_pylist() if row["window_end"] <= closed.as_py()]
    assert sorted((str(row.k), row.window_start, row.n) for row in got) == sorted(
        (str(row["k"]), row["window_start"], row["n"]) for row in expected)
    left = sis.read_state(tmp_path / "checkpoint")
    assert left.num_rows == want.num_rows - len(expected)
    with pytest.raises(BadArgument, match="a sink function knows results by the number of their batch"):
        job.stop(drain=True)


def test_a_drain_closes_all_windows(spark: Any, tmp_path: Path) -> None:
    everything = write(tmp_path / "in", range(2))
    job = sis.start(WINDOWS, stream(spark, tmp_path / "in"), sink=si.to_parquet(tmp_path / "out"), partitions=2,
                    checkpoint=tmp_path / "checkpoint", trigger="0 seconds", files_every="1h")  # fmt: skip
    while job.last_progress is None or job.last_progress["batch_id"] != 1:
        time.sleep(0.05)
        assert job.is_active, job.exception
    job.stop(drain=True)
    assert (job.status, job.exception) == ("stopped", None)
    assert_same(ds.dataset(tmp_path / "out").to_table(), WINDOWS.collect(everything))
    assert len(list((tmp_path / "out").glob("part-*"))) == 1
    assert sis.read_state(tmp_path / "checkpoint").num_rows == 0


def test_output_waits_for_larger_files(spark: Any, tmp_path: Path) -> None:
    """Until the stream ends, and while it runs for as long as was asked for, though no batch follows."""
    everything = write(tmp_path / "in", range(3))
    flow, out = si.flow(rows(0).schema).select("t", "k", "x"), tmp_path / "out"
    where: dict[str, Any] = {"sink": si.to_parquet(out), "checkpoint": tmp_path / "checkpoint"}
    sis.start(flow, stream(spark, tmp_path / "in"), trigger=NOW, files_every="1h", **where).wait()
    assert len(list(out.glob("part-*"))) == 1
    assert_same(ds.dataset(out).to_table(), flow.collect(everything))
    everything = write(tmp_path / "in", range(3, 4))
    job = sis.start(flow, stream(spark, tmp_path / "in"), trigger="0 seconds", files_every="100ms", **where)
    while len(list(out.glob("part-*"))) != 2:
        time.sleep(0.05)
        assert job.is_active, job.exception
    job.stop()
    assert_same(ds.dataset(out).to_table(), flow.collect(everything))
    assert not list(out.glob("_staged-*"))
    with pytest.raises(BadArgument, match="files_every is about the files of a sink"):
        sis.start(flow, stream(spark, tmp_path / "in"), files_every="1m", **{**where, "sink": si.to_memory()})


def test_a_static_table_is_broadcast_once_and_released(spark: Any, tmp_path: Path) -> None:
    """Inside tasks, a large value would be a new file on the driver's disk for each batch."""
    write(tmp_path / "in", range(2))
    names = pa.table({"x": range(-9, 10), "name": ["a long name " * 10_000] * 19})
    flow = si.flow(rows(0).schema).join(names, on="x").group_by("k").agg(n=si.count(), s=col("name").str.len().sum())
    held: list[int] = []

    def new_files() -> int:
        return len(set(os.listdir(spark.sparkContext._temp_dir)) - before)

    before = set(os.listdir(spark.sparkContext._temp_dir))
    sis.start(flow, stream(spark, tmp_path / "in"), sink=lambda df, batch: held.append(new_files()), partitions=2,
              checkpoint=tmp_path / "checkpoint", trigger=NOW, emit="changes").wait()
    assert held == [1] * 2
    assert new_files() == 0


def test_errors_are_translated(spark: Any, tmp_path: Path) -> None:
    write(tmp_path / "in", range(1))
    given = stream(spark, tmp_path / "in")
    where: dict[str, Any] = {"checkpoint": tmp_path / "checkpoint", "trigger": NOW, "emit": "changes"}
    failing = si.flow(rows(0).schema).group_by("k").agg(s=(1 // (col("x") - col("x"))).sum())
    job = sis.start(failing, given, sink=si.to_memory(), **where)
    with pytest.raises(ComputeError, match="division by zero"):
        job.wait()
    assert job.status == "failed"
    for reader in ("tasks", "spark"):
        frame = given if reader == "tasks" else given.filter("x > -100")
        job = sis.start(failing, frame, sink=si.to_memory(), on_error=(failed := si.to_memory()),
                        **{**where, "checkpoint": tmp_path / reader})
        job.wait()
        assert job.last_progress is not None
        assert job.last_progress["read_by"] == reader
        letters = failed.table()
        assert_same(letters.select(rows(0).column_names), rows(0))
        assert set(letters["bad_file"].to_pylist()) == {str(tmp_path / "in" / "p000.parquet")}
        assert "division by zero" in letters["error"][0].as_py()

    def refuse(df: Any, batch: int) -> None:
        raise RuntimeError(f"not batch {batch}")

    job = sis.start(GROUPS, given, sink=refuse, **{**where, "checkpoint": tmp_path / "second"})
    with pytest.raises(WriteFailed, match="not batch 0"):
        job.wait()
    calls: list[int] = []  # its manifest is published: repeated, only the function is called again
    job = sis.start(GROUPS, given, sink=lambda df, batch: calls.append(df.count()),
                    **{**where, "checkpoint": tmp_path / "second"})
    job.wait()
    assert calls == [8]

    refused: list[tuple[type[ScaleinError], str, dict[str, Any]]] = [
        (BadArgument, r"takes a streaming DataFrame(.|\n)*found  a batch DataFrame", {"stream_df": spark.range(3)}),
        (BadArgument, r"takes a streaming DataFrame(.|\n)*found  pyarrow.Table", {"stream_df": rows(0)}),
        (BadArgument, "sink takes a sink", {"sink": 3}),
        (BadArgument, "no such trigger", {"trigger": {"now": True}}),
        (BadArgument, "does not take this trigger", {"trigger": "often"}),
        (BadArgument, "does not take this trigger", {"trigger": {"availableNow": False}}),
        (BadArgument, "partitions must be", {"partitions": 0}),
        (BadArgument, "no such way to emit", {"emit": "all"}),
        (BadArgument, "no such migration", {"migration": "now"}),
        (BadArgument, "late has no such policy", {"late": "keep"}),
        (BadArgument, "late takes a sink of its own", {"late": 3}),
        (BadArgument, "the flow has neither", {"late": si.to_memory()}),
        (BadArgument, "on_error has no such policy", {"on_error": "drop"}),
        (BadArgument, "on_error takes a sink of its own", {"on_error": 3}),
        (BadArgument, "checkpoint takes a directory", {"checkpoint": 3}),
        (BadArgument, r"needs a checkpoint(.|\n)*hint +checkpoint=", {"checkpoint": None}),
        (BadArgument, "name takes a text", {"name": " "}),
        (BadArgument, "name takes a text", {"name": 3}),
        (BadData, "has no column 'y'", {"q": si.flow({"y": pa.int64()}).select("y")}),
    ]  # fmt: skip
    for kind, message, wrong in refused:
        with pytest.raises(kind, match=message):
            sis.start(**{"q": GROUPS, "stream_df": given, "sink": si.to_memory(), **where, **wrong})


def test_another_query_is_refused(spark: Any, tmp_path: Path) -> None:
    import shutil

    write(tmp_path / "in", range(1))
    where: dict[str, Any] = {"sink": si.to_memory(), "checkpoint": tmp_path / "checkpoint", "trigger": NOW}
    flow = si.flow(rows(0).schema).filter(col("x") > 5).select("k", "x")
    sis.start(flow, stream(spark, tmp_path / "in"), **where).wait()
    shutil.rmtree(tmp_path / "checkpoint" / "spark")
    job = sis.start(flow, stream(spark, tmp_path / "in"), **where)
    with pytest.raises(BadArgument, match="another query wrote this checkpoint"):
        job.wait()


_DRIVER = """
import sys
from pathlib import Path
import scalein as si, scalein.spark as sis
from tests.spark.test_stream_spark import GROUPS, NOW, stream
folder = Path(sys.argv[1])
spark = sis.session(cores=2)
print("begun", flush=True)
job = sis.start(GROUPS, stream(spark, folder / "in"), sink=si.to_parquet(folder / "out"), emit="changes",
                checkpoint=folder / "checkpoint", partitions=int(sys.argv[2]), trigger=NOW)
job.wait()
print("done", flush=True)
"""


@pytest.mark.skipif(not LIVES, reason="SCALEIN_STREAM_LIVES says how many drivers are killed")
def test_a_killed_driver_is_resumed(tmp_path: Path) -> None:
    """Real processes, killed with -9 at any time; each restarts with another number of partitions."""
    everything = write(tmp_path / "in", range(12))
    random = Random(time.time_ns())
    root = Path(__file__).parent.parent.parent
    for life in range(LIVES + 1):
        process = subprocess.Popen([sys.executable, "-c", _DRIVER, str(tmp_path), str(2 + life % 3)], cwd=root,
                                   stdout=subprocess.PIPE, start_new_session=True)  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        if life < LIVES:
            before = _manifests(tmp_path)
            while process.poll() is None and _manifests(tmp_path) <= before:
                time.sleep(0.01)
            time.sleep(random.random())
            os.killpg(process.pid, signal.SIGKILL)  # the JVM and its workers too
            process.wait()
        else:
            assert process.stdout.read().endswith(b"done\n")
            process.wait()
    assert_same(sis.read_state(tmp_path / "checkpoint"), GROUPS.collect(everything))
    changed = ds.dataset(tmp_path / "out").to_table().sort_by("n")
    assert_same(pa.Table.from_pylist(fold_changes(changed, ["k"]), GROUPS.schema), GROUPS.collect(everything))


def _manifests(folder: Path) -> int:
    manifests = Manifests(parse_location(folder / "checkpoint", NOWHERE))
    return max((key.batch for key in manifests.all_keys()), default=-1)


@pytest.mark.parametrize("where", ["footer", "page"])
def test_a_damaged_file_is_named(spark: Any, tmp_path: Path, where: str) -> None:
    """Spark reads a file whose footer is damaged, and a task one whose footer is not."""
    write(tmp_path / "in", range(2))
    frame, path = stream(spark, tmp_path / "in"), tmp_path / "in" / "p001.parquet"
    column = pq.read_metadata(path).row_group(0).column(2)
    first = -8 if where == "footer" else column.dictionary_page_offset or column.data_page_offset
    data = bytearray(path.read_bytes())
    data[first : first + 8] = b"\xff" * 8
    path.write_bytes(data)
    job = sis.start(GROUPS, frame, sink=si.to_parquet(tmp_path / "out"), checkpoint=tmp_path / "checkpoint",
                    emit="changes", trigger=NOW)
    with pytest.raises(BadData, match=r"p001\.parquet") as raised:
        job.wait()
    assert "py4j" not in str(raised.value)


def test_an_exception_of_the_jvm_is_one_sentence(spark: Any, tmp_path: Path) -> None:
    write(tmp_path / "in", range(1))
    frame = stream(spark, tmp_path / "in").filter("reflect('java.lang.Integer', 'parseInt', k) is null")
    job = sis.start(GROUPS, frame, sink=si.to_parquet(tmp_path / "out"), checkpoint=tmp_path / "checkpoint",
                    emit="changes", trigger=NOW)
    with pytest.raises(ScaleinError, match="NumberFormatException") as raised:
        job.wait()
    assert [line.split()[0] for line in str(raised.value).splitlines()] == ["Spark", "at", "found"]


def test_a_stream_of_collated_text_or_of_another_clock_is_refused(spark: Any, tmp_path: Path) -> None:
    write(tmp_path / "in", range(1))
    where: dict[str, Any] = {"sink": si.to_parquet(tmp_path / "out"), "checkpoint": tmp_path / "checkpoint",
                             "emit": "changes"}
    collated = stream(spark, tmp_path / "in").selectExpr("* except (k)", "k collate UTF8_LCASE as k")
    with pytest.raises(ScaleinError, match="column 'k' has the collation UTF8_LCASE"):
        sis.start(GROUPS, collated, **where)
    zoned = stream(spark, tmp_path / "in").selectExpr("* except (t)", "cast(t as timestamp) as t")
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        with pytest.raises(ScaleinError, match="time zone Asia/Tokyo"):
            sis.start(WINDOWS, zoned, **where)
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")


@pytest.mark.parametrize("read_by", ["tasks", "spark"])
def test_a_streams_clock_is_that_of_the_session(spark: Any, tmp_path: Path, read_by: str) -> None:
    write(tmp_path / "in", range(2))
    for path in (tmp_path / "in").iterdir():  # instants, and hours that differ
        table = pq.read_table(path)
        hours = pc.multiply(table["x"], 3_600_000_000)
        times = pc.add(table["t"].cast(pa.int64()), hours).cast(pa.timestamp("us", "UTC"))
        pq.write_table(table.set_column(0, "t", times), path)
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        frame = stream(spark, tmp_path / "in")
        frame = frame if read_by == "tasks" else frame.filter("x > -100")
        q = si.flow(frame.schema).group_by(h=col("t").dt.hour(), day=col("t").dt.truncate("1d")).agg(n=si.count())
        job = sis.start(q, frame, sink=si.to_parquet(tmp_path / "out"), checkpoint=tmp_path / "checkpoint",
                        emit="changes", trigger=NOW)
        job.wait()
        assert job.last_progress is not None
        assert job.last_progress["read_by"] == read_by
        state = sis.read_state(tmp_path / "checkpoint").to_pylist()
        got = {(row["h"], row["day"].timestamp(), row["n"]) for row in state}
        want = spark.read.parquet(str(tmp_path / "in")).groupBy(
            pf.hour("t").alias("h"), pf.unix_seconds(pf.date_trunc("DAY", "t")).alias("day")).count().collect()
        assert got == {(row["h"], row["day"], row["count"]) for row in want}
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
