"""Ctrl-C ends a run soon; errors of sources, functions and workers arrive; no thread keeps running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

import scalein as si
from scalein import col
from scalein.errors import BadData, ComputeError

every_number_of_workers = pytest.mark.parametrize("workers", [1, 2])

PROGRAM = """
import contextlib, itertools, signal, sys, threading, numpy as np, pyarrow as pa, scalein as si
from scalein import col
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in background processes
name, workers, in_thread = sys.argv[1], int(sys.argv[2]), len(sys.argv) > 3
batch = pa.record_batch({"x": np.random.default_rng(1).integers(0, 10**6, 300_000), "t": np.arange(300_000)})
flows = {
    "filter": lambda rows: rows.filter(col("x") > 10**7),
    "one group": lambda rows: rows.group_by().agg(s=col("x").sum()),
    "many groups": lambda rows: rows.group_by(k=col("x") * 1000).agg(n=si.count()),
    "partitioned": lambda rows: rows.group_by("x", si.tumbling("t", 100)).agg(n=si.count()),
    "python": lambda rows: rows.map_batches(lambda b: b, batch.schema).group_by().agg(n=si.count()),
    "sort": lambda rows: rows.sort("s"),
    "quantile": lambda rows: rows.group_by().agg(q=col("v").quantile(0.5)),
    "join": lambda rows: rows.head(10).join(rows.select("s", "v"), on="s", how="left"),
    "joined rows": lambda rows: rows.filter(col("x") + col("y") < 0),
    "joined groups": lambda rows: rows.group_by().agg(n=si.count()),
}
def texts(is_long):
    rows = 600_000 if is_long else 2  # more than `DETACHED_ROWS`
    values = np.random.default_rng(1).random(rows)
    return pa.table({"s": pa.array(["the same beginning %s" % v for v in values.tolist()]), "v": values})
if name in ("sort", "quantile", "join"):
    long, short = texts(True), texts(False)
def flow(is_long):
    if name in ("sort", "quantile", "join"):
        return flows[name](si.from_arrow(long if is_long else short))
    if not name.startswith("joined"):
        return flows[name](si.from_batches(itertools.repeat(batch, *([] if is_long else [3])), batch.schema))
    x = np.zeros(200_000 if is_long else 200, np.int64)  # 40 thousand million rows
    return flows[name](si.from_arrow(pa.table({"x": x})).join(pa.table({"x": x, "y": np.arange(len(x))}), on="x"))
flow(is_long=False).collect(workers=workers)  # imports all that it needs: class bodies hide what interrupts them
endless = flow(is_long=True)
def run():
    try:
        print("started", flush=True)
        while True:
            endless.collect(workers=workers)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
if in_thread:
    ended = threading.Event()  # not `join`: after Ctrl-C in it, Python 3.11 takes the thread for ended
    threading.Thread(target=lambda: (run(), ended.set())).start()
    try:
        ended.wait()
    except KeyboardInterrupt:
        while not ended.wait(3):  # it came between two runs
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
else:
    run()
"""


@every_number_of_workers
@pytest.mark.parametrize(
    "flow", ["filter", "one group", "many groups", "partitioned", "python", "joined rows", "joined groups"]
)
def test_ctrl_c_stops_a_run(flow: str, workers: int) -> None:
    _interrupt(flow, workers)


@pytest.mark.parametrize("flow", ["sort", "quantile", "join"])
def test_ctrl_c_stops_a_long_step(flow: str) -> None:
    _interrupt(flow, 2)


@pytest.mark.parametrize(("flow", "workers"), [("filter", 1), ("many groups", 2), ("sort", 2), ("joined rows", 2)])
def test_ctrl_c_stops_a_run_in_another_thread(flow: str, workers: int) -> None:
    _interrupt(flow, workers, "thread")


def _interrupt(flow: str, workers: int, *where: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, flow, str(workers), *where], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        time.sleep(0.2)
        assert process.poll() is None, "the run ended before it could be interrupted"
        sent = time.monotonic()
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=30)
        took = time.monotonic() - sent
    finally:
        process.kill()
        process.wait()
    assert out == "interrupted\n", err
    assert process.returncode == 0
    assert took < 10  # seconds of a machine that may be busy; the runs are endless or take minutes


def _ours() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("scalein")]


@pytest.fixture(autouse=True)
def _before() -> None:
    """Threads that earlier tests left: idle ones stay until the garbage collector finds their owner."""
    _left[:] = _ours()


_left: list[threading.Thread] = []


def _assert_no_thread() -> None:
    end = time.monotonic() + 60
    while (new := [thread for thread in _ours() if thread not in _left]) and time.monotonic() < end:
        time.sleep(0.01)
    assert not new


SCHEMA = pa.schema([("k", pa.int64()), ("x", pa.int64())])
FLOWS = {
    "rows": lambda flow: flow.with_columns(y=col("x") + 1),
    "one group": lambda flow: flow.group_by().agg(s=(col("x") + 1).sum()),
    "groups": lambda flow: flow.group_by("k").agg(s=(col("x") + 1).sum()),
    "windows": lambda flow: flow.group_by("k", si.sliding("k", 20, every=10)).agg(s=(col("x") + 1).sum()),
}
each_flow = pytest.mark.parametrize("flow", FLOWS)


class Mine(Exception):
    """An error of the user's own."""


def _broken(error: BaseException, good: int = 5) -> Iterator[pa.RecordBatch]:
    for _ in range(good):
        yield pa.record_batch({"k": np.arange(1000) % 7, "x": np.arange(1000)})
    raise error


@pytest.mark.parametrize("workers", [1, 2, 4])
@each_flow
def test_a_source_that_raises(flow: str, workers: int) -> None:
    error = Mine("the disk is gone")
    with pytest.raises(BadData, match="Mine while batch 5") as caught:
        FLOWS[flow](si.from_batches(_broken(error), SCHEMA)).collect(workers=workers)
    assert caught.value.__cause__ is error
    _assert_no_thread()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("workers", [1, 2])
@each_flow
def test_what_is_no_exception_comes_through(flow: str, workers: int, kind: type[BaseException]) -> None:
    error = kind("now")
    with pytest.raises(kind) as caught:
        FLOWS[flow](si.from_batches(_broken(error), SCHEMA)).collect(workers=workers)
    assert caught.value is error
    _assert_no_thread()


@every_number_of_workers
@each_flow
def test_a_function_that_raises(flow: str, workers: int) -> None:
    error = Mine("no")

    def function(batch: pa.RecordBatch) -> pa.RecordBatch:
        if batch["x"][0].as_py() == 5000:
            raise error
        return batch

    x = np.arange(20_000)
    table = pa.Table.from_batches(pa.table({"k": x % 7, "x": x}).to_batches(max_chunksize=1000))
    with pytest.raises(BadData, match="Mine on batch 5") as caught:
        FLOWS[flow](si.from_arrow(table).map_batches(function, table.schema)).collect(workers=workers)
    assert caught.value.__cause__ is error
    _assert_no_thread()


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("source", ["table", "reader"])
@each_flow
def test_a_row_that_fails_in_a_worker(flow: str, source: str, workers: int) -> None:
    x = np.arange(1_200_000) % 1000
    x[1_100_000] = 2**63 - 1
    table = pa.table({"k": x % 7, "x": x})
    given = (
        si.from_arrow(table) if source == "table" else si.from_batches(iter(table.to_batches(100_000)), table.schema)
    )
    with pytest.raises(ComputeError, match=r"overflow in `x \+ 1`"):
        FLOWS[flow](given).collect(workers=workers)
    _assert_no_thread()


def test_a_run_that_is_left_leaves_no_thread() -> None:
    table = pa.table({"k": np.arange(3_000_000) % 7, "x": np.arange(3_000_000)})
    batches = si.from_arrow(table).with_columns(y=col("x") + 1).batches(workers=2)
    next(batches)
    del batches
    _assert_no_thread()
