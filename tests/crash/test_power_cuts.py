"""A power cut at every operation of everything that publishes: the next start has every row, once.

The state store has its own disk for this (`tests/state/test_store_power_cut.py`). Jobs and Spark streams are cut at a
few operations, others in each run; SCALEIN_STORE_CUTS=0 cuts them at all.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from scalein.connectors.sinks.files import FileSink
from scalein.jobs.checkpoint import RETAINED_EPOCHS, Checkpoint
from scalein.state import hash_runs
from scalein.storage.checked_json import Json
from scalein.storage.local import LocalFileSystem
from scalein.storage.publish import put, read_all, seal, unseal
from tests.crash.power_cut_folder import PowerCut, PowerCutFolder
from tests.same import assert_same
from tests.spark.simulated import start_stream, tasks_over
from tests.spark.test_stream_faults import BATCHES, FLOW, check
from tests.spark.test_stream_faults import rows as stream_rows
from tests.state.test_store_power_cut import sample

Work = Callable[[Path], None]


def lose_power(folder: Path, work: Work, fail_at: int | None, seed: int) -> PowerCutFolder:
    """Run until the cut, or to the end; the folder is then one that may be found after it."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error" if fail_at is None else "ignore", RuntimeWarning)  # checkpoints fail at the cut
        disk = PowerCutFolder(folder, patch, fail_at)
        try:
            work(folder)
        except (PowerCut, Exception):
            if not disk.is_off:
                raise
    disk.restore(Random(seed))
    return disk


def cut_everywhere(base: Path, work: Work, is_right: Work, is_sampled: bool = False) -> int:
    """Cut at operations of `work`, each in a folder of its own: afterwards `is_right`, and nothing is damaged, so that
    there is no warning. The number of operations.
    """
    seeds = SystemRandom()
    healthy = lose_power(base / "healthy", work, None, 0)
    is_right(base / "healthy")
    for cut in sample(healthy.operations, Random(seeds.random())) if is_sampled else range(healthy.operations):
        seed, folder = seeds.randrange(1 << 30), base / str(cut)
        disk = lose_power(folder, work, cut, seed)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", RuntimeWarning)
                is_right(folder)
        except BaseException as error:
            error.add_note(f"cut at {cut}, after it {seed}: {disk.log[-8:]}")
            raise
    return healthy.operations


# --- epochs of a job


def test_epochs(tmp_path: Path) -> None:
    acknowledged: dict[str, Any] = {}

    def work(folder: Path) -> None:
        acknowledged.clear()
        acknowledged.update(name=None, run=-1, epoch=0)
        for life in range(2):
            checkpoint = Checkpoint(folder / "new" / "c")
            checkpoint.open()
            acknowledged["name"] = checkpoint.name()
            acknowledged["run"] = checkpoint.begin_run(-1)
            for epoch in range(1 + 4 * life, 5 + 4 * life):
                checkpoint.publish(epoch, {"content": epoch * 1000})
                acknowledged["epoch"] = epoch
            checkpoint.close()

    def is_right(folder: Path) -> None:
        checkpoint = Checkpoint(folder / "new" / "c")
        checkpoint.open()
        found = checkpoint.recovered(lambda epoch: epoch)
        number = 0 if found is None else found["epoch"]
        assert number in (acknowledged["epoch"], acknowledged["epoch"] + 1)
        assert found is None or found["content"] == 1000 * number
        assert len(checkpoint.kept()) >= min(number, RETAINED_EPOCHS - 1)
        assert acknowledged["name"] in (None, checkpoint.name())
        assert checkpoint.begin_run(-1) > acknowledged["run"]
        assert not [name for name in os.listdir(checkpoint.path) if name.startswith("_")]
        checkpoint.close()

    assert cut_everywhere(tmp_path, work, is_right) > 30


# --- files of a sink

SCHEMA = pa.schema({"k": pa.int64(), "v": pa.int64()})
ROWS, EPOCH_ROWS = 12, 4


def write_epochs(folder: Path) -> None:
    """A run of a job, from its last manifest to the end."""
    manifests = LocalFileSystem(folder / "manifests")
    content: dict[str, Json] = {"run": 0, "row": 0, "prepared": None}
    if manifests.size("manifest"):
        content = unseal(read_all(manifests, "manifest"))
    run, first = int(str(content["run"])) + 1, int(str(content["row"]))
    put(manifests, "manifest", seal({**content, "run": run}))
    sink = si.to_ipc(folder / "deep" / "out", partition_by="k", roll=1)
    assert isinstance(sink, FileSink)
    sink.acquire(f"job-{run}", "manifests")
    sink.open(SCHEMA, content["prepared"], f"job-{run}")
    for start in range(first, ROWS, EPOCH_ROWS):
        numbers = range(start, start + EPOCH_ROWS)
        sink.write(pa.record_batch([pa.array(n % 2 for n in numbers), pa.array(numbers)], schema=SCHEMA))
        prepared = sink.prepare()
        put(manifests, "manifest", seal({"run": run, "row": start + EPOCH_ROWS, "prepared": prepared}))
        sink.commit(prepared)
    sink.close()


def test_output_files(tmp_path: Path) -> None:
    def is_right(folder: Path) -> None:
        write_epochs(folder)
        out = folder / "deep" / "out"
        found = ds.dataset(out, format="ipc", partitioning="hive").to_table()
        assert sorted(found["v"].to_pylist()) == list(range(ROWS))
        left = [path.name for path in out.rglob("*") if path.is_file() and not path.name.startswith("part-")]
        assert left == ["_owner"]

    assert cut_everywhere(tmp_path, write_epochs, is_right) > 40


def test_one_file(tmp_path: Path) -> None:
    """The old file or the new one."""
    tables = [pa.table({"x": range(number, number + 50)}) for number in range(3)]

    def work(folder: Path) -> None:
        for table in tables:
            si.from_arrow(table).write_parquet(folder / "all.parquet")

    def is_right(folder: Path) -> None:
        if (folder / "all.parquet").exists():
            found = pq.read_table(folder / "all.parquet")
            assert any(found.equals(table) for table in tables)

    assert cut_everywhere(tmp_path, work, is_right) >= 9


# --- all of it

EVENTS = pa.table({"id": [n * n % 83 for n in range(300)], "k": [f"key {n % 5}" for n in range(300)],
                   "t": pa.array(np.arange(300) * 10 + np.arange(300) % 7, pa.timestamp("ms")), "x": range(300)})


class Batches:
    """The rows in batches; an offset is a number of batches."""

    schema = EVENTS.schema

    def partitions(self) -> list[str]:
        return ["all"]

    def read(self, partition: str, offset: Any) -> Iterator[tuple[pa.RecordBatch, Any]]:
        for number, batch in enumerate(EVENTS.to_batches(max_chunksize=15)):
            if number >= (offset or 0):
                yield batch, number + 1


def windows(source: Flow) -> Flow:
    """Keys in a store, windows in a row buffer."""
    fresh = source.with_watermark("t", "100ms").distinct("id")
    return fresh.group_by("k", si.tumbling("t", "200ms")).agg(n=si.count(), total=col("x").sum())


def test_a_job(tmp_path: Path) -> None:
    wanted = windows(si.from_arrow(EVENTS)).collect()

    def run_job(folder: Path) -> None:
        job = windows(si.from_source(Batches())).start(sink=si.to_ipc(folder / "out"), checkpoint=folder / "c",
                                                       every="1ms", workers=1, max_rows_per_second=3_000)
        assert job.wait(timeout=120)

    def is_right(folder: Path) -> None:
        run_job(folder)
        parts = sorted((folder / "out").glob("part-*"))
        assert_same(pa.concat_tables([pa.ipc.open_file(part).read_all() for part in parts]), wanted)

    assert cut_everywhere(tmp_path, run_job, is_right, is_sampled=True) > 20


class Arrived(Batches):
    """The same rows, of which some batches are there."""

    bounded = False

    def __init__(self, batches: int) -> None:
        self._batches = batches

    def until_now(self) -> Arrived:
        return self

    def read(self, partition: str, offset: Any) -> Iterator[tuple[pa.RecordBatch, Any]]:
        return (each for each in super().read(partition, offset) if each[1] <= self._batches)


def test_a_flow_that_changes(tmp_path: Path) -> None:
    """Both aggregations get more aggregates: windows in a row buffer, and groups of these in a store."""
    first_batches, delay, size = 9, 100, 200
    lives = [0]  # that came to their end

    def run_job(folder: Path, batches: int, **more: Any) -> None:
        rows = si.from_source(Arrived(batches)).with_watermark("t", f"{delay}ms")
        per = rows.group_by("k", si.tumbling("t", f"{size}ms")).agg(n=si.count(), **{
            name: col("x").sum() for name in more})
        flow = per.group_by("k").agg(n=col("n").sum(), **{name: col(name).sum() for name in more})
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the flow has changed|aggregates were added", RuntimeWarning)
            job = flow.start(sink=si.to_ipc(folder / f"out{batches}"), checkpoint=folder / "c", emit="changes",
                             until="now", evolve=True, workers=1, every="1ms", max_rows_per_second=3_000)
        assert job.wait(timeout=120)

    def run_rest(folder: Path) -> None:
        for number in range(lives[0], 2):
            run_job(folder, first_batches, **{}) if number == 0 else run_job(folder, 20, total=True)
            lives[0] = number + 1

    def work(folder: Path) -> None:
        lives[0] = 0
        run_rest(folder)

    times, keys, values = (EVENTS[name].cast(pa.int64()).to_pylist() if name == "t" else EVENTS[name].to_pylist()
                           for name in ("t", "k", "x"))  # fmt: skip
    closed = [max(times[: batches * 15]) - delay for batches in (first_batches, 20)]
    wanted: dict[str, tuple[int, int | None]] = {}
    for key in set(keys):
        mine = [(time // size * size + size, number, value) for number, (time, value) in enumerate(
            zip(times, values, strict=True)) if keys[number] == key]  # fmt: skip
        totals = [value for end, number, value in mine if closed[0] < end <= closed[1] and number >= first_batches * 15]
        wanted[key] = (sum(end <= closed[1] for end, _, _ in mine), sum(totals) if totals else None)

    def is_right(folder: Path) -> None:
        run_rest(folder)
        parts = [pa.ipc.open_file(part).read_all() for part in sorted((folder / "out20").glob("part-*"))]
        found = {row["k"]: (row["n"], row["total"]) for part in parts for row in part.to_pylist()}
        assert found == wanted

    assert cut_everywhere(tmp_path, work, is_right, is_sampled=True) > 40


@pytest.mark.parametrize("files_every_s", [None, 1e6], ids=["", "files_every"])
def test_a_spark_stream(files_every_s: float | None, tmp_path: Path) -> None:
    done = [0]  # as Spark's own log has it

    def run_stream(folder: Path) -> None:
        hash_runs._open_files.clear()
        coordinator = start_stream(FLOW, folder / "checkpoint", si.to_parquet(folder / "out"), emit="changes",
                                   files_every_s=files_every_s)
        for number in range(done[0], BATCHES):
            coordinator.run_batch(number, "query", tasks_over(stream_rows(number)), None)
            done[0] = number + 1
            coordinator.publish_waiting(is_end=number % 2 == 1)
        coordinator.publish_waiting(is_end=True)
        coordinator.close()

    def work(folder: Path) -> None:
        done[0] = 0
        run_stream(folder)

    def is_right(folder: Path) -> None:
        run_stream(folder)
        check(folder)

    assert cut_everywhere(tmp_path, work, is_right, is_sampled=True) > 50
