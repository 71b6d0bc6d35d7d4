"""scalein bench migration: rescale a keyed counter under load, and compare ways to move its state.

The experiment of lazy state migration: source -> counter by key -> sink, with a state that grows, rescaled from 2 to
4 to 3 in the middle.

local, cluster  a stream on Spark, in a local session and on a standalone cluster of two workers, with `migration=`
                eager, lazy and hybrid. Files arrive at a fixed pace, and each is a batch: its latency is the time from
                its arrival until its results are visible. Every strategy gets the same files at the same pace.
job             a job, by `job.scale` and by stopping it and starting it again from its checkpoint with other workers.
curves          throughput and latency by the number of workers, without state (source -> map -> sink) and with it.

All results are compared with those computed by numpy before a figure is reported.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import scalein as si
from scalein import col
from scalein.api.flow import Flow
from scalein.connectors.sinks.simple import format_table
from scalein.errors import BadArgument, InternalError

PARTS = ("local", "cluster", "job", "curves")
MIGRATIONS = ("eager", "lazy", "hybrid")
WAYS = ("scale", "restart")
RESCALES = (2, 4, 3)  # partitions of a stream, workers of a job
VALUES = 8  # columns, of which the counter keeps sum and maximum
FILL_FILES, WARM_FILES = 4, 4  # before the pace begins: the state, and batches that compile
NEW_SHARE = 0.1  # of a batch's rows have new keys
FIRST_TIME_S = 1_700_000_000  # the time of the first file: each is a second after the one before
PATIENCE_S = 300.0
RING_ROWS = 1 << 20  # keys of a job's source, over and over
JOB_BATCHES_PER_S = 100
NEAR_S = 0.1  # after a rescale, for which a pause is its own
CURVE_BATCH_ROWS = 1 << 16
PILOT_ROWS = 1 << 20


@dataclass(frozen=True)
class BatchPoint:
    """A micro-batch: seconds since the pace began, and bytes of state."""

    number: int
    partitions: int
    rows: int
    arrived_s: float
    committed_s: float
    duration_s: float
    read: int
    moved: int
    written: int
    verified: int
    state: int

    @property
    def latency_s(self) -> float:
        return self.committed_s - self.arrived_s


@dataclass(frozen=True)
class StreamRun:
    """A stream on Spark with one way to migrate."""

    where: str
    migration: str
    batches: list[BatchPoint]

    def firsts(self) -> list[BatchPoint]:
        """The first batch after each rescale."""
        return [after for before, after in itertools.pairwise(self.batches) if before.partitions != after.partitions]

    def steady_s(self) -> float:
        """The median of a batch before the first rescale."""
        return statistics.median(each.duration_s for each in self.batches if each.partitions == RESCALES[0])

    def later_s(self) -> float:
        """The median of a batch after the first rescale and before the next, without the first."""
        return statistics.median(each.duration_s for each in self.batches[1:]
                                 if each.partitions == RESCALES[1] and each is not self.firsts()[0])

    def pause_s(self) -> float:
        """The longest time without a batch from the first rescale on, beyond the median before it."""
        ends = [each.committed_s for each in self.batches]
        gaps = np.diff(ends)
        is_before = np.array([each.partitions == RESCALES[0] for each in self.batches[1:]])
        return max(0.0, float(gaps[~is_before].max() - np.median(gaps[is_before])))


@dataclass(frozen=True)
class JobRun:
    """A job that is rescaled in one way: its output batches (seconds, rows, latency in seconds) and its rescales."""

    way: str
    rate: float
    outputs: list[tuple[float, int, float]]
    rescaled_s: list[float]
    state_bytes_moved: int

    def pauses_s(self) -> list[float]:
        """The longest time without output that begins at each rescale, or just after it: others have other reasons."""
        ends = np.array([each[0] for each in self.outputs])
        found = []
        for moment in self.rescaled_s:
            first, last = np.searchsorted(ends, [moment, moment + NEAR_S])
            found.append(float(np.diff(ends[max(0, first - 1) : last + 1]).max(initial=0.0)))
        return found

    def quiet_gap_s(self) -> float:
        """The longest time without output in the second half of the time before the first rescale."""
        ends = np.array([each[0] for each in self.outputs])
        return float(np.diff(ends[(ends > self.rescaled_s[0] / 2) & (ends < self.rescaled_s[0])]).max(initial=0.0))

    def latency_s(self, quantile: float) -> float:
        return float(np.quantile([each[2] for each in self.outputs], quantile))


@dataclass(frozen=True)
class CurvePoint:
    """The greatest rate with a number of workers, and the latency at half of that rate."""

    flow: str
    workers: int
    rows_per_s: float
    p50_s: float
    p99_s: float


# --- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", default=",".join(PARTS), metavar="NAMES",
                        help=f"some of {','.join(PARTS)} (default: all)")
    parser.add_argument("--keys", type=int, default=100_000, help="keys in the state of a stream at the first rescale, "
                        "some 300 bytes each (default: 100,000)")
    parser.add_argument("--touched", type=float, default=0.01, help="share of the keys in a batch (default: 0.01)")
    parser.add_argument("--batches", type=int, default=6, help="batches between two rescales (default: 6)")
    parser.add_argument("--pace", type=float, help="seconds between two files (default: 1.5 times what a batch takes)")
    parser.add_argument("--seconds", type=float, default=2.0,
                        help="of a job between two rescales, and of a point of a curve (default: 2)")
    parser.add_argument("--rate", type=float, default=200_000, help="rows a second of the job (default: 200,000)")
    parser.add_argument("--workers", default="1,2,4", metavar="NUMBERS", help="of the curves (default: 1,2,4)")
    parser.add_argument("--out", type=Path, default=Path("migration"), metavar="FOLDER",
                        help="for results.json, CSV and plots (default: migration)")
    parser.add_argument("--no-plots", action="store_true", help="draw nothing")


def run(args: argparse.Namespace) -> int:
    parts = _chosen(args.parts)
    workers = _numbers(args.workers)
    for name, least in (("keys", 1_000), ("batches", 3), ("seconds", 0.05), ("rate", 1_000), ("pace", 0.001)):
        if (value := getattr(args, name)) is not None and value < least:
            raise BadArgument(f"--{name} must be at least {least}", found=str(value))
    if not 0 < args.touched <= 1:
        raise BadArgument("--touched is a share between 0 and 1", found=str(args.touched))
    if not args.no_plots and find_spec("matplotlib") is None:
        raise BadArgument("plots need matplotlib, which is not installed", hint="pip install matplotlib, or --no-plots")
    load = Load(args.keys, args.touched, args.batches, args.pace)
    streams, jobs, points = list[StreamRun](), list[JobRun](), list[CurvePoint]()
    with tempfile.TemporaryDirectory(prefix="scalein-migration-") as folder:
        for where in (part for part in parts if part in ("local", "cluster")):
            streams += run_streams(where, load, Path(folder))
        if "job" in parts:
            jobs = [run_job(way, args.keys, args.rate, args.seconds) for way in WAYS]
    if "curves" in parts:
        points = curves(workers, args.keys, args.seconds)
    results = {"settings": {name: str(value) for name, value in vars(args).items() if name != "out"},
               "cores": os.cpu_count(), "streams": [asdict(each) for each in streams],
               "jobs": [asdict(each) for each in jobs], "curves": [asdict(each) for each in points]}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "results.json").write_text(json.dumps(results) + "\n", encoding="utf-8")
    write_tables(args.out, streams, jobs, points)
    if not args.no_plots:
        from scalein.cli.migration_plots import draw

        draw(args.out, streams, jobs, points)
    print(report(streams, jobs, points))
    print(f"\nresults, tables and plots: {args.out}", file=sys.stderr)
    return 0


def load_results(path: Path) -> tuple[list[StreamRun], list[JobRun], list[CurvePoint]]:
    """The runs in a `results.json`."""
    found = json.loads(path.read_text(encoding="utf-8"))
    streams = [StreamRun(each["where"], each["migration"], [BatchPoint(**point) for point in each["batches"]])
               for each in found["streams"]]
    return streams, [JobRun(**each) for each in found["jobs"]], [CurvePoint(**each) for each in found["curves"]]


def _chosen(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = next((name for name in names if name not in PARTS), None)
    if unknown is not None or not names:
        raise BadArgument(f"no part {unknown!r} of this experiment", has=", ".join(PARTS))
    return names


def _numbers(text: str) -> list[int]:
    try:
        found = [int(each) for each in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise BadArgument("--workers takes numbers of threads, such as 1,2,4", found=repr(text))
    return found


# --- a stream on Spark


@dataclass(frozen=True)
class Load:
    """What arrives at a stream: first its state, then batches that touch a share of the keys and add some."""

    keys: int
    touched: float
    batches: int  # between two rescales
    pace_s: float | None = None

    def tables(self) -> Iterator[pa.Table]:
        """The files of a stream, in the order of their arrival."""
        for k in range(FILL_FILES):
            yield self._rows(k, np.arange(self.keys * k // FILL_FILES, self.keys * (k + 1) // FILL_FILES))
        rows = max(2, round(self.keys * self.touched))
        new = max(1, int(rows * NEW_SHARE))
        for k in range(FILL_FILES, self.files):
            first = self.keys + (k - FILL_FILES) * new
            old = np.random.default_rng(k).integers(0, first, rows - new)
            yield self._rows(k, np.concatenate([old, np.arange(first, first + new)]))

    @property
    def files(self) -> int:
        return FILL_FILES + WARM_FILES + len(RESCALES) * self.batches

    @staticmethod
    def _rows(seed: int, keys: np.ndarray) -> pa.Table:
        value = np.random.default_rng(seed).integers(0, 1 << 20, len(keys))
        return pa.table({"key": keys, **{f"v{k}": value * (k + 1) for k in range(VALUES)}})


def counter(rows: Flow) -> Flow:
    """The keyed counter: how often a key was there, with sums and maxima of its values."""
    return rows.group_by("key").agg(n=si.count(), **{f"s{k}": col(f"v{k}").sum() for k in range(VALUES)},
                                    **{f"m{k}": col(f"v{k}").max() for k in range(VALUES)})


def run_streams(where: str, load: Load, folder: Path) -> list[StreamRun]:
    """The stream with each way to migrate, in one session."""
    found = list[StreamRun]()
    with spark_session(where, folder) as spark:
        for migration in MIGRATIONS:
            print(f"{where}: {migration}", file=sys.stderr, flush=True)
            place = folder / f"{where}-{migration}"
            each, load = run_stream(spark, where, migration, load, place)
            check_changes(place / "out", load.tables())
            found.append(each)
            shutil.rmtree(place)
    return found


@contextmanager
def spark_session(where: str, folder: Path) -> Iterator[Any]:
    """A local session of two cores, or one on a standalone cluster of two workers of one core each."""
    import scalein.spark as sis
    from scalein.spark.session import session
    from scalein.spark.standalone import Cluster

    if where == "local":
        spark = session(cores=2)
        try:
            yield spark
        finally:
            spark.stop()
        return
    (folder / "cluster").mkdir()
    with Cluster(folder / "cluster") as cluster:
        for _ in range(2):
            cluster.add_worker()
        spark = session(config={
            "spark.master": cluster.url, "spark.driver.host": "127.0.0.1", "spark.ui.enabled": False,
            "spark.executor.memory": "512m", "spark.executor.cores": 1, "spark.sql.shuffle.partitions": 4,
            "spark.scheduler.minRegisteredResourcesRatio": 1.0,
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "60s"})
        try:
            sis.ship(spark)
            yield spark
        finally:
            spark.stop()


def run_stream(spark: Any, where: str, migration: str, load: Load, folder: Path) -> tuple[StreamRun, Load]:
    """Run it and give its batches, and the load with the pace, which the next stream then has too."""
    import scalein.spark as sis

    staged, arriving = folder / "staged", folder / "in"
    for each in (staged, arriving):
        each.mkdir(parents=True)
    rows = list[int]()
    for number, table in enumerate(load.tables()):
        pq.write_table(table, staged / f"{number:06}.parquet")
        rows.append(table.num_rows)
    schema = spark.read.parquet(str(staged / "000000.parquet")).schema
    stream = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(arriving))
    job = sis.start(counter(si.flow(schema)), stream, sink=si.to_parquet(folder / "out"), migration=migration,
                    checkpoint=folder / "checkpoint", partitions=RESCALES[0], emit="changes",
                    trigger={"processingTime": "0 seconds"})
    try:
        watch = _Watch(job, staged, arriving)
        warm = FILL_FILES + WARM_FILES
        for number in range(warm):
            watch.publish(number)
            watch.wait_for(number)
        if load.pace_s is None:
            took = statistics.median(watch.took_s(number) for number in range(warm - 3, warm))
            load = Load(load.keys, load.touched, load.batches, max(0.25, 1.5 * took))
        assert load.pace_s is not None
        begin = time.monotonic()
        for k in range(len(RESCALES) * load.batches):
            watch.wait_until(begin + k * load.pace_s)
            if k % load.batches == 0 and k:
                # From the batch on that arrives now: the one before it may still run.
                watch.wait_for(warm + k - 1)
                job.scale(RESCALES[k // load.batches])
            watch.publish(warm + k, begin + k * load.pace_s)
        watch.wait_for(load.files - 1)
    finally:
        job.stop()
    points = []
    for number in range(warm, load.files):
        progress = watch.progress[number]
        traffic = {name: progress[f"state_bytes_{name}"] for name in ("read", "moved", "written", "verified")}
        points.append(BatchPoint(number, progress["partitions"], rows[number], watch.arrived[number] - begin,
                                 watch.committed[number] - begin, progress["duration_s"],
                                 state=progress["state_bytes"], **traffic))
    return StreamRun(where, migration, points), load


class _Watch:
    """Publishes files to a stream and notes when their batches are committed."""

    def __init__(self, job: Any, staged: Path, arriving: Path) -> None:
        self._job, self._staged, self._arriving = job, staged, arriving
        self.arrived: dict[int, float] = {}
        self.committed: dict[int, float] = {}
        self.progress: dict[int, dict[str, Any]] = {}

    def publish(self, number: int, arrived: float | None = None) -> None:
        """Move a file to where the stream finds it; a file that is late has arrived when it was due."""
        name = f"{number:06}.parquet"
        os.utime(self._staged / name, (FIRST_TIME_S + number,) * 2)  # Spark takes files in the order of their times
        self.arrived[number] = time.monotonic() if arrived is None else arrived
        os.rename(self._staged / name, self._arriving / name)

    def look(self) -> None:
        for each in self._job.recent_progress:
            if each["batch_id"] not in self.committed:
                self.committed[each["batch_id"]] = time.monotonic()
                self.progress[each["batch_id"]] = each

    def wait_until(self, moment: float) -> None:
        while time.monotonic() < moment:
            self.look()
            time.sleep(0.005)

    def wait_for(self, number: int) -> None:
        """Wait for the batch of a file; raises the stream's error."""
        end = time.monotonic() + PATIENCE_S
        while number not in self.committed:
            self._job.wait(0)
            if not self._job.is_active or time.monotonic() > end:
                raise InternalError(f"batch {number} of the stream does not come", found=self._job.why_no_output())
            self.look()
            time.sleep(0.005)

    def took_s(self, number: int) -> float:
        return self.committed[number] - self.arrived[number]


def check_changes(out: Path, tables: Iterable[pa.Table]) -> None:
    """Raises unless the changes that a stream wrote are exactly those of its files, batch by batch."""
    files: dict[int, list[Path]] = {}
    for path in out.glob("*.parquet"):
        files.setdefault(int(path.name.split("-")[2]), []).append(path)
    size = 0
    counts = sums = maxima = np.zeros(0, np.int64)
    number = -1
    for number, table in enumerate(tables):
        keys, values = (table[name].to_numpy() for name in ("key", "v0"))
        if (needed := int(keys.max()) + 1) > size:
            more = needed - size
            counts, sums = (np.concatenate([each, np.zeros(more, np.int64)]) for each in (counts, sums))
            maxima, size = np.concatenate([maxima, np.full(more, -1)]), needed
        before = counts.copy()
        np.add.at(counts, keys, 1)
        np.add.at(sums, keys, values)
        np.maximum.at(maxima, keys, values)
        touched = np.unique(keys)
        want = {"key": touched, "n": counts[touched],
                **{f"s{k}": sums[touched] * (k + 1) for k in range(VALUES)},
                **{f"m{k}": maxima[touched] * (k + 1) for k in range(VALUES)}}
        parts = [pq.read_table(path) for path in files.pop(number, [])]
        got = pa.concat_tables(parts or [_no_changes()], promote_options="default").sort_by("key")
        wrong = [name for name, column in want.items() if not np.array_equal(got[name].to_numpy(), column)]
        is_new = np.array([each == "insert" for each in got["op"].to_pylist()], bool)
        if wrong or not np.array_equal(is_new, before[touched] == 0):
            raise InternalError(f"batch {number} of the stream has other changes than its file",
                                columns=", ".join(wrong) or "op", found=f"{got.num_rows} rows of {len(touched)}")
    if files:
        raise InternalError("the stream wrote batches that had no file", found=sorted(files), files=number + 1)


def _no_changes() -> pa.Table:
    names = ["op", "key", "n", *(f"{kind}{k}" for kind in "sm" for k in range(VALUES))]
    return pa.table({name: pa.array([], pa.int64()) for name in names})


# --- a job


class Rows:
    """Rows with keys from a ring, at a rate or as fast as they are taken: the same for the same numbers."""

    schema = pa.schema({"key": pa.int64(), "row": pa.int64()})

    def __init__(self, keys: int, rate: float | None = None) -> None:
        self._ring = np.random.default_rng(keys).integers(0, keys, RING_ROWS)
        self._long = np.concatenate([self._ring, self._ring[:CURVE_BATCH_ROWS]])
        self._keys, self.rate = keys, rate
        self._begin: float | None = None

    def __call__(self, start: int, count: int) -> pa.RecordBatch:
        if self.rate is not None:
            due = self.due(start + count)
            while (wait_s := due - time.monotonic()) > 0:
                time.sleep(min(wait_s, 0.01))
        at = start % RING_ROWS
        return pa.record_batch({"key": self._long[at : at + count], "row": np.arange(start, start + count)})

    def due(self, row: int) -> float:
        """When a row arrives: the first one with the first call."""
        assert self.rate is not None
        if self._begin is None:
            self._begin = time.monotonic()
        return self._begin + row / self.rate

    def late_s(self, rows: pa.Array, now: float) -> float:
        """How long ago the last of these rows arrived; 0 without a rate."""
        return 0.0 if self.rate is None else max(0.0, now - self.due(int(rows.to_numpy().max()) + 1))

    def flow(self, batch_rows: int, rows: int | None = None) -> Flow:
        return si.generate(self, self.schema, rows=rows, batch_rows=batch_rows)

    def counts(self, rows: int) -> np.ndarray:
        """How often each key is in the first rows."""
        rounds, rest = divmod(rows, RING_ROWS)
        once = np.bincount(self._ring, minlength=self._keys) * rounds
        return once + np.bincount(self._ring[:rest], minlength=self._keys)

    def key_sum(self, rows: int) -> int:
        rounds, rest = divmod(rows, RING_ROWS)
        return int(self._ring.sum()) * rounds + int(self._ring[:rest].sum())


class _CountedChanges:
    """A sink of the counter's changes: rows and latency of each output batch, and the counts so far."""

    def __init__(self, source: Rows, keys: int) -> None:
        self._source, self._lock = source, threading.Lock()
        self.counts = np.zeros(keys, np.int64)
        self.outputs: list[tuple[float, int, float]] = []
        self.begin = 0.0  # the first output

    def __call__(self, batch: pa.RecordBatch) -> None:
        now = time.monotonic()
        self.begin = self.begin or now
        keys, counts = (batch.column(name).to_numpy() for name in ("key", "n"))
        with self._lock:
            rows = int((counts - self.counts[keys]).sum())
            self.counts[keys] = counts
            self.outputs.append((now - self.begin, rows, self._source.late_s(batch.column("last"), now)))

    def wait_for_output(self) -> None:
        """Wait until there is more output than now."""
        known, end = len(self.outputs), time.monotonic() + PATIENCE_S
        while len(self.outputs) == known:
            if time.monotonic() > end:
                raise InternalError("the job has no output")
            time.sleep(0.001)

    def check(self, what: str, rows: int | None = None) -> None:
        """Raises unless each key was counted as often as the source gave it, `rows` times in all."""
        total = int(self.counts.sum())
        if rows not in (None, total) or not np.array_equal(self.counts, self._source.counts(total)):
            raise InternalError(f"{what} has counted other rows than came", rows=total)


def run_job(way: str, keys: int, rate: float, seconds: float) -> JobRun:
    """A counter at a rate, with a checkpoint a second, rescaled by `job.scale` or by a stop and a new start."""
    print(f"job: {way}", file=sys.stderr, flush=True)
    source = Rows(keys, rate)
    changes = _CountedChanges(source, keys)
    flow = source.flow(max(1, int(rate / JOB_BATCHES_PER_S))).group_by("key").agg(n=si.count(), last=col("row").max())
    moments, moved = list[float](), 0
    with tempfile.TemporaryDirectory(prefix="scalein-migration-") as folder:
        def start(workers: int) -> Any:
            sink = si.to_callback(changes)
            return flow.start(sink=sink, emit="changes", workers=workers, checkpoint=folder, every="1s")

        job = start(RESCALES[0])
        try:
            changes.wait_for_output()
            time.sleep(seconds)
            for workers in RESCALES[1:]:
                moments.append(time.monotonic() - changes.begin)
                if way == "scale":
                    job.scale(workers)
                else:
                    job.stop()
                    job = start(workers)
                changes.wait_for_output()
                time.sleep(seconds)
            if way == "scale":
                moved = sum(int(each["state_bytes_moved"]) for each in job.metrics()["rescales"])
        finally:
            job.stop()
    changes.check(f"the job that was rescaled by {way}")
    return JobRun(way, rate, changes.outputs, moments, moved)


# --- curves


def curves(workers: Sequence[int], keys: int, seconds: float) -> list[CurvePoint]:
    """Points for the flows with and without state."""
    found = list[CurvePoint]()
    for name, measure in (("stateless", _stateless), ("stateful", _stateful)):
        for count in workers:
            print(f"curves: {name}, {count} workers", file=sys.stderr, flush=True)
            pilot = measure(Rows(keys), keys, PILOT_ROWS, CURVE_BATCH_ROWS, count)
            rows = max(PILOT_ROWS, int(PILOT_ROWS / pilot.took_s * seconds))
            rate = rows / measure(Rows(keys), keys, rows, CURVE_BATCH_ROWS, count).took_s
            paced = Rows(keys, rate / 2)
            half = measure(paced, keys, int(rate / 2 * seconds), max(1, int(rate / 2 / JOB_BATCHES_PER_S)), count)
            late_s = half.late_s[len(half.late_s) // 4 :]
            found.append(CurvePoint(name, count, rate, *map(float, np.quantile(late_s, [0.5, 0.99]))))
    return found


@dataclass(frozen=True)
class _Measured:
    took_s: float
    late_s: list[float]  # of output batches, if the rows came at a rate


def _stateless(source: Rows, keys: int, rows: int, batch_rows: int, workers: int) -> _Measured:
    """Source -> map -> sink."""
    total = [0, 0]
    late_s, lock = list[float](), threading.Lock()

    def take(batch: pa.RecordBatch) -> None:
        now = time.monotonic()
        with lock:
            total[0] += batch.num_rows
            total[1] += int(batch.column("y").to_numpy().sum())
            if batch.num_rows:
                late_s.append(source.late_s(batch.column("row"), now))

    flow = source.flow(min(batch_rows, CURVE_BATCH_ROWS), rows).select("row", y=col("key") * 3 + 1)
    took_s = _timed_job(flow, si.to_callback(take), workers)
    if total != [rows, 3 * source.key_sum(rows) + rows]:
        raise InternalError("the stateless job has other rows than came", found=total, rows=rows)
    return _Measured(took_s, late_s)


def _stateful(source: Rows, keys: int, rows: int, batch_rows: int, workers: int) -> _Measured:
    """Source -> counter -> sink."""
    flow = source.flow(min(batch_rows, CURVE_BATCH_ROWS), rows).group_by("key").agg(n=si.count(), last=col("row").max())
    changes = _CountedChanges(source, keys)
    took_s = _timed_job(flow, si.to_callback(changes), workers, emit="changes")
    changes.check("the stateful job", rows)
    return _Measured(took_s, [each[2] for each in changes.outputs])


def _timed_job(flow: Flow, sink: Any, workers: int, **how: Any) -> float:
    start_s = time.perf_counter()
    flow.start(sink=sink, workers=workers, **how).wait()
    return time.perf_counter() - start_s


# --- results


def write_tables(folder: Path, streams: Sequence[StreamRun], jobs: Sequence[JobRun],
                 points: Sequence[CurvePoint]) -> None:
    """The figures as CSV."""
    tables: dict[str, list[Mapping[str, object]]] = {
        "streams": [{"where": run.where, "migration": run.migration, "latency_s": each.latency_s, **asdict(each)}
                    for run in streams for each in run.batches],
        "jobs": [{"way": run.way, "seconds": at, "rows": rows, "latency_s": late_s}
                 for run in jobs for at, rows, late_s in run.outputs],
        "curves": [asdict(point) for point in points]}
    for name, rows in tables.items():
        if rows:
            with open(folder / f"{name}.csv", "w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)


def report(streams: Sequence[StreamRun], jobs: Sequence[JobRun], points: Sequence[CurvePoint]) -> str:
    """The figures as tables for the terminal."""
    found = list[str]()
    if streams:
        found.append(_table(streams, {
            "Spark": lambda run: run.where,
            "migration": lambda run: run.migration,
            "state, MB": lambda run: round(run.firsts()[0].state / 1e6),
            "steady, ms": lambda run: round(run.steady_s() * 1e3),
            **{f"{before} to {after}": partial(_first_in_steady_batches, number=k)
               for k, (before, after) in enumerate(itertools.pairwise(RESCALES))},
            "later, ms": lambda run: round(run.later_s() * 1e3),
            "moved then, MB": lambda run: round(run.firsts()[0].moved / 1e6, 2),
            "moved, MB": lambda run: round(sum(each.moved for each in run.batches) / 1e6, 2),
            "written, MB": lambda run: round(sum(each.written for each in run.batches) / 1e6, 1),
            "pause, ms": lambda run: round(run.pause_s() * 1e3),
            "worst latency, ms": lambda run: round(max(each.latency_s for each in run.batches) * 1e3)}))
        found.append("2 to 4, 4 to 3: the first batch after the rescale, in steady batches before it; later: those "
                     "after the first rescale; moved then: by its first batch")
    if jobs:
        found.append(_table(jobs, {
            "job": lambda run: run.way,
            "rows/s": lambda run: round(run.rate),
            "pause, ms": lambda run: round(max(run.pauses_s()) * 1e3, 1),
            "without a rescale, ms": lambda run: round(run.quiet_gap_s() * 1e3, 1),
            "p50, ms": lambda run: round(run.latency_s(0.5) * 1e3, 1),
            "p99, ms": lambda run: round(run.latency_s(0.99) * 1e3, 1),
            "moved, MB": lambda run: round(run.state_bytes_moved / 1e6, 2)}))
    if points:
        found.append(_table(points, {
            "curve": lambda point: point.flow,
            "workers": lambda point: point.workers,
            "M rows/s": lambda point: round(point.rows_per_s / 1e6, 2),
            "p50 at half, ms": lambda point: round(point.p50_s * 1e3, 1),
            "p99 at half, ms": lambda point: round(point.p99_s * 1e3, 1)}))
    return "\n\n".join(found)


def _first_in_steady_batches(run: StreamRun, number: int) -> float:
    return round(run.firsts()[number].duration_s / run.steady_s(), 2)


def _table(rows: Sequence[Any], columns: Mapping[str, Callable[[Any], object]]) -> str:
    return format_table(pa.table({name: [value(row) for row in rows] for name, value in columns.items()}))
