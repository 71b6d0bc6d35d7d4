"""Peak memory of runs under `memory=`: each case in a process of its own, over files that are not held in memory.

`python -m bench.peak_memory [--memory 256MB] [--workers N] [case ...]` prints, for each case, the peak of anonymous
memory (mapped files of the input do not count) above that just before the run, and the seconds it took. Results are
consumed batch by batch. `--memory none` sets no limit. The files are written once, into a folder of the
system's temporary directory. Cases that begin with "job:" run as a job with a checkpoint, those with "store:" fill a
LogStore and read all of it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

FOLDER = Path(tempfile.gettempdir()) / "scalein-peak-memory"
CHUNK = 1 << 20
LONG_ROWS = 16  # of a batch of long texts
MB = 10**6
SAMPLE_S = 0.005


def _number_rows(rows: int, seed: int) -> Iterator[pa.Table]:
    """`k`: as many keys as rows, in random order; `few`: 1,000 keys; `some`: 100,000; `v`: random values; `s`: the key
    as text; `t`: the row's number.
    """
    rng = np.random.default_rng(seed)
    for start in range(0, rows, CHUNK):
        size = min(CHUNK, rows - start)
        numbers = np.arange(start, start + size, dtype=np.uint64)
        k = (numbers * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(8)).astype(np.int64)
        text = pc.binary_join_element_wise("key-number", pa.array(k).cast(pa.string()), "-")
        yield pa.table({"k": k, "few": rng.integers(0, 1000, size), "some": rng.integers(0, 100_000, size),
                        "v": rng.random(size), "s": text, "t": numbers.astype(np.int64)})


def _long_texts(rows: int, seed: int) -> Iterator[pa.Table]:
    """`k`: the row's number, in random order; `few`: 10 keys; `s`: a text of 1 MB."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(rows)
    for number, k in enumerate(order.tolist()):
        text = rng.integers(97, 123, MB, dtype=np.uint8).tobytes().decode()
        yield pa.table({"k": [k], "few": [number % 10], "s": [text]})


FILES: dict[str, Callable[[], Iterator[pa.Table]]] = {
    "rows20": lambda: _number_rows(20_000_000, 1),
    "rows10": lambda: _number_rows(10_000_000, 2),
    "texts": lambda: _long_texts(1000, 3),
}


# The file, the key, and the other columns with how they are merged.
STORES = {"store: text keys": ("rows20", "s", {"n": "sum", "v": "sum"}),
          "store: keys": ("rows20", "k", {"n": "sum", "v": "sum"}), "store: long texts": ("texts", "k", {"s": "last"})}


def _file_of(name: str) -> str:
    return (STORES if name in STORES else _cases())[name][0]


def _cases() -> dict[str, tuple[str, Callable[[Any], Any]]]:
    import scalein as si
    from scalein import col

    def table(name: str) -> Any:
        return si.read_parquet(str(FOLDER / f"{name}.parquet"))

    return {
        "text keys": ("rows20", lambda f: f.group_by("s").agg(n=si.count(), v=col("v").sum())),
        "quantile": ("rows10", lambda f: f.group_by("some").agg(q=col("v").quantile(0.9))),
        "quantile of few groups": ("rows10", lambda f: f.group_by("few").agg(q=col("v").quantile(0.9))),
        "quantile of all": ("rows10", lambda f: f.group_by().agg(q=col("v").quantile(0.9))),
        "collect": ("rows10", lambda f: f.group_by("some").agg(x=col("v").collect())),
        "collect text": ("rows10", lambda f: f.group_by("some").agg(x=col("s").collect())),
        "n_unique": ("rows10", lambda f: f.group_by("some").agg(n=col("k").n_unique())),
        "n_unique text": ("rows10", lambda f: f.group_by("some").agg(n=col("s").n_unique())),
        "n_unique of few groups": ("rows10", lambda f: f.group_by("few").agg(n=col("k").n_unique())),
        "sort": ("rows10", lambda f: f.sort("k")),
        "sort by text": ("rows10", lambda f: f.sort("s")),
        "join": ("rows10", lambda f: f.select("k", "few").join(table("rows10").select("k", "v", "t"), on="k")),
        "join text": ("rows10", lambda f: f.select("k", "s").join(table("rows10").select("s", "v"), on="s")),
        "join: right": ("rows10", lambda f: f.select("k", "few")
                        .join(table("rows10").select("t", "v", k=col("k") + 1), on="k", how="right")),
        "join text: outer": ("rows10", lambda f: f.select("k", "s").join(table("rows10").select("s", "v"), on="s",
                                                                         how="outer")),
        "distinct": ("rows10", lambda f: f.select("k").distinct()),
        "distinct text": ("rows10", lambda f: f.select("s").distinct()),
        "long texts: sort": ("texts", lambda f: f.sort("k")),
        "long texts: max": ("texts", lambda f: f.group_by("few").agg(m=col("s").max())),
        "long texts: key": ("texts", lambda f: f.group_by("s").agg(n=si.count())),
        "long texts: collect": ("texts", lambda f: f.group_by("k").agg(x=col("s").collect())),
        "long texts: join": ("texts", lambda f: f.select("k", "few").join(table("texts").select("k", "s"), on="k")),
        "long texts: n_unique": ("texts", lambda f: f.group_by("few").agg(x=col("s").n_unique())),
        "process": ("rows10", lambda f: f.group_by("k").process(_sums())),
        "sessions": ("rows10", lambda f: f.group_by("some", si.session("t", gap=100_000)).agg(v=col("v").sum())),
        "over": ("rows10", lambda f: f.select("k", "t", s=col("v").sum().over("some", order_by="t"))),
        "stream join": ("rows10", lambda f: f.select("t", "k").with_watermark("t", 0).join(
            table("rows10").select("k", "v", u="t").with_watermark("u", 0), on="k", between=(-1000, 1000))),
        "job: text keys": ("rows20", lambda f: f.group_by("s").agg(n=si.count(), v=col("v").sum())),
        "job: keys": ("rows20", lambda f: f.group_by("k").agg(n=si.count(), v=col("v").sum())),
        "job: window quantile": ("rows10", lambda f: f.group_by("few", si.tumbling("t", 2_000_000))
                                 .agg(q=col("v").quantile(0.9))),
        "job: window n_unique": ("rows10", lambda f: f.group_by("few", si.tumbling("t", 2_000_000))
                                 .agg(n=col("k").n_unique())),
        "job: distinct text": ("rows10", lambda f: f.select("s").distinct()),
        "job: sort": ("rows10", lambda f: f.sort("k")),
        "job: join": ("rows10", lambda f: f.select("k", "few").join(table("rows10").select("k", "v", "t"), on="k")),
        "job: quantile": ("rows10", lambda f: f.group_by("some").agg(q=col("v").quantile(0.9))),
        "job: long texts: sort": ("texts", lambda f: f.sort("k")),
        "job: long texts: max": ("texts", lambda f: f.group_by("few").agg(m=col("s").max())),
        "job: process": ("rows10", lambda f: f.group_by("k").process(_sums())),
        "job: sessions": ("rows10", lambda f: f.with_watermark("t", 0).group_by(
            "some", si.session("t", gap=100_000)).agg(v=col("v").sum())),
        "job: over": ("rows10", lambda f: f.with_watermark("t", 0).select(
            "k", "t", s=col("v").sum().over("some", order_by="t"))),
        "job: stream join": ("rows10", lambda f: f.select("t", "k").with_watermark("t", 0).join(
            table("rows10").select("k", "v", u="t").with_watermark("u", 0), on="k", between=(-1000, 1000))),
    }


def _sums() -> Any:
    """A class that remembers a sum for each key."""
    import scalein as si

    @si.process
    class Sums:
        total: float = 0.0

        def on_row(self, row: Any) -> Any:
            self.total += row.v
            if self.total < 0.5:
                yield {"total": self.total}

    return Sums


def _store_rows(path: Path, columns: list[str]) -> Iterator[pa.RecordBatch]:
    file = pq.ParquetFile(path, pre_buffer=False)  # a whole file that is prebuffered would be held in memory
    size = CHUNK // 8 if file.metadata.num_rows > CHUNK else LONG_ROWS
    for rows in file.iter_batches(size, columns=[name for name in columns if name != "n"]):
        yield rows.append_column("n", pa.array(np.ones(rows.num_rows, np.int64))) if "n" in columns else rows


def _run_store(name: str, path: Path, memory: str | None, workers: int | None, warm: bool) -> int:
    """Merge rows into a store, then scan it."""
    from scalein.state import LogStore

    _, key, how = STORES[name]
    types = {"s": pa.string(), "k": pa.int64(), "n": pa.int64(), "v": pa.float64()}
    batches = _store_rows(path, [key, *how])
    with tempfile.TemporaryDirectory() as folder, LogStore.open(
            folder, key={key: types[key]}, value={each: types[each] for each in how}, memory=memory,
            workers=workers or 2) as store:  # fmt: skip
        for rows in (rows.slice(0, 100) for rows in islice(batches, 1)) if warm else batches:
            store.merge(rows.select([key, *how]), **how)
        store.snapshot()
        return sum(batch.num_rows for batch in store.scan())


def _run_job(flow: Any, memory: str | None, workers: int | None) -> int:
    import scalein as si

    rows: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        sink = si.to_callback(lambda batch: rows.append(batch.num_rows))
        flow.start(sink=sink, checkpoint=Path(folder) / "checkpoint", memory=memory, workers=workers).wait()
    return sum(rows)


def _run(name: str, path: Path, memory: str | None, workers: int | None, warm: bool) -> int:
    """The number of rows that a case gives; to warm up, over the first few of its file."""
    import scalein as si

    file = pq.ParquetFile(path)
    sample = pa.Table.from_batches([next(file.iter_batches(100))])
    if name.startswith("store:"):
        return _run_store(name, path, memory, workers, warm)
    flow = _cases()[name][1](si.from_arrow(sample) if warm else si.read_parquet(str(path)))
    if name.startswith("job:"):
        return _run_job(flow, memory, workers)
    return sum(batch.num_rows for batch in flow.batches(memory=memory, workers=workers))


def _status(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def run_case(name: str, memory: str | None, workers: int | None) -> dict[str, float]:
    """Run a case in this process."""
    path = FOLDER / f"{_file_of(name)}.parquet"
    if "join" not in name:
        _run(name, path, memory, workers, warm=True)
    before, started = _status("RssAnon"), time.perf_counter()
    done, peaks = threading.Event(), [before]

    def watch() -> None:
        while not done.wait(SAMPLE_S):
            peaks.append(_status("RssAnon"))

    threading.Thread(target=watch, daemon=True).start()
    rows = _run(name, path, memory, workers, warm=False)
    done.set()
    return {"rows": rows, "seconds": time.perf_counter() - started, "before": before / MB,
            "peak": (max(peaks) - before) / MB, "after": (_status("RssAnon") - before) / MB}


def write_files() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, tables in FILES.items():
        path = FOLDER / f"{name}.parquet"
        if path.exists():
            continue
        writer = None
        for table in tables():
            writer = writer or pq.ParquetWriter(path.with_suffix(".part"), table.schema)
            writer.write_table(table, row_group_size=CHUNK // 8)
        assert writer is not None
        writer.close()
        path.with_suffix(".part").rename(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--memory", default="256MB")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--child", action="store_true")
    given = parser.parse_args()
    memory = None if given.memory == "none" else given.memory
    if given.child:
        print(json.dumps(run_case(given.cases[0], memory, given.workers)))
        return
    write_files()
    for name in given.cases or [*_cases(), *STORES]:
        command = [sys.executable, "-m", "bench.peak_memory", "--child", "--memory", given.memory]
        command += ["--workers", str(given.workers)] if given.workers else []
        done = subprocess.run([*command, name], capture_output=True, text=True)
        if done.returncode:
            print(f"{name:24} failed: {done.stderr.strip().splitlines()[-1] if done.stderr else done.returncode}")
            continue
        found = json.loads(done.stdout)
        print(f"{name:24} peak {found['peak']:6.0f} MB above {found['before']:4.0f}   after {found['after']:5.0f}"
              f"   {found['seconds']:6.1f} s   {found['rows']:,.0f} rows", flush=True)


if __name__ == "__main__":
    main()
