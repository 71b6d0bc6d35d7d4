"""What `bench.against` times: workloads through the public API alone, so that they run on any commit of scalein.

A group is a function that prepares a process and gives its workloads by name. A workload does its work once and gives
the seconds that it took, and its result. As a program (`python -m bench.workloads GROUP FOLDER`) this is a child of
`bench.against`: it prepares the group, prints the names of its workloads, and then answers requests, one a line: "check
NAME" with a digest of the workload's result, "time NAME" with its seconds, and with the CPU seconds of the whole call.
Inputs lie in FOLDER, which the children of both commits share; what a child writes goes to the folder that it runs in.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from bench import data

if TYPE_CHECKING:
    from scalein import Flow

ROWS = 20_000_000
BATCH_ROWS = 1 << 18
CALL_ROWS = 1 << 20
SMALL_ROWS = 100

Workload = Callable[[], tuple[float, object]]
Workloads = dict[str, Workload]


def timed(work: Callable[[], object], calls: int = 1) -> Workload:
    """A workload of one function; of many short `calls`, the seconds of one."""

    def run() -> tuple[float, object]:
        start = time.perf_counter()
        for _ in range(calls - 1):
            work()
        result = work()
        return (time.perf_counter() - start) / calls, result

    return run


def stored(folder: Path, name: str, make: Callable[[], pa.Table]) -> pa.Table:
    """An input of one chunk, made by the first child that needs it and read into memory by all others."""
    path = folder / f"{name}.arrow"
    if not path.exists():
        table = make().combine_chunks()
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    with pa.OSFile(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


# --- queries


def views(events: Flow, view: int | str = 0, campaigns: pa.Table | None = None) -> Flow:
    """W1: filter, join, tumbling count."""
    import scalein as si

    return (events.filter(si.col("event_type") == view)
            .join(data.campaigns() if campaigns is None else campaigns, on="ad_id")
            .group_by("campaign_id", si.tumbling("event_time", 10_000)).agg(n=si.count()))  # fmt: skip


def hot_bids(bids: Flow) -> Flow:
    """W2: sliding count."""
    import scalein as si

    return bids.group_by("auction", si.sliding("ts", 10_000, every=2_000)).agg(n=si.count())


def totals(values: Flow) -> Flow:
    """W3: four aggregates of many keys."""
    import scalein as si

    value = si.col("value")
    return values.group_by("key").agg(s=value.sum(), n=si.count(), lo=value.min(), hi=value.max())


def some_bids(bids: Flow) -> Flow:
    """W4: filter and arithmetic."""
    from scalein import col

    return bids.filter(col("auction") % 123 == 0).select("auction", price=col("price") * 0.908)


def collecting(flow: Flow) -> Workloads:
    """A flow collected by one worker and by two."""

    def collect(workers: int) -> Workload:
        return timed(lambda: flow.collect(workers=workers))

    return {str(workers): collect(workers) for workers in (1, 2)}


def ad_events(folder: Path) -> pa.Table:
    return stored(folder, "ad_events", lambda: data.ad_events(ROWS))


def bids(folder: Path) -> pa.Table:
    return stored(folder, "bids", lambda: data.bids(ROWS))


def keyed_values(folder: Path) -> pa.Table:
    return stored(folder, "keyed_values", lambda: data.keyed_values(ROWS))


def w1(folder: Path) -> Workloads:
    import scalein as si

    return collecting(views(si.from_arrow(ad_events(folder))))


def w2(folder: Path) -> Workloads:
    import scalein as si

    return collecting(hot_bids(si.from_arrow(bids(folder))))


def w3(folder: Path) -> Workloads:
    import scalein as si

    return collecting(totals(si.from_arrow(keyed_values(folder))))


def w4(folder: Path) -> Workloads:
    import scalein as si

    return collecting(some_bids(si.from_arrow(bids(folder))))


def operators(folder: Path) -> Workloads:
    """Strings, a sort, distinct rows, aggregates without a fixed size, a compiled Python function; one worker."""
    import scalein as si
    from scalein import col

    events = ad_events(folder).slice(0, ROWS // 8).select(["event_time", "ad_id", "event_type"])
    values = keyed_values(folder).slice(0, ROWS // 8)
    flows: dict[str, Flow] = {}
    for name in ("dictionary", "strings"):
        words, campaigns = (data.with_strings(table, as_dictionary=name == "dictionary")
                            for table in (events, data.campaigns()))  # fmt: skip
        flows[name] = views(si.from_arrow(words), "view", campaigns)
    few = values.set_column(0, "key", pa.array(values["key"].to_numpy() % 10_000))
    flows["sort"] = si.from_arrow(values).sort("value", "key")
    flows["distinct"] = si.from_arrow(values).distinct("key")
    flows["n_unique"] = si.from_arrow(few).group_by("key").agg(n=col("value").n_unique())
    flows["quantile"] = si.from_arrow(few).group_by("key").agg(q=col("value").quantile(0.9))
    flows["udf"] = si.from_arrow(values).select(x=si.udf(score)(col("value"), col("key")))

    def collect(flow: Flow) -> Workload:
        return timed(lambda: flow.collect(workers=1))

    return {name: collect(flow) for name, flow in flows.items()}


def score(price: float, qty: int) -> float:
    total = 0.0
    if qty > 5_000_000:
        for k in range(8):
            total = total * 0.9 + price / (k + 1)
    else:
        total = price * qty
    return total


# --- small calls, plans


def small(folder: Path) -> Workloads:
    """One row through an unbound flow, and 10,000 batches of 100 rows."""
    import scalein as si
    from scalein import col

    one = pa.RecordBatch.from_pydict({"auction": [246], "price": [1_000], "ts": [data.T0_MS]})
    unbound = some_bids(si.flow(one.schema))
    grouped = hot_bids(si.flow(one.schema))
    many = data.bids(10_000 * SMALL_ROWS).to_batches(max_chunksize=SMALL_ROWS)
    by_key = si.from_batches(many).group_by("auction").agg(n=si.count(), hi=col("price").max())
    kept = si.from_batches(many).filter(col("price") > 5_000_000).select("auction", twice=col("price") * 2)
    return {
        "one_row_filter": timed(lambda: unbound.collect(one, workers=1), 200),
        "one_row_group": timed(lambda: grouped.collect(one, workers=1), 100),
        "batches_group": timed(lambda: by_key.collect(workers=1)),
        "batches_filter": timed(lambda: kept.collect(workers=1)),
    }


def plan(folder: Path) -> Workloads:
    """Building and planning without running: W1 to W4, a wide flow, and chains. A plan's text is no result: it may
    change from commit to commit."""
    import scalein as si
    from scalein import col

    schema = pa.schema({f"c{k}": pa.int64() for k in range(200)})

    def w1_to_w4() -> list[str]:
        bids = pa.schema({"auction": pa.int64(), "price": pa.int64(), "ts": pa.int64()})
        flows = (views(si.flow(data.ad_events(1).schema)), hot_bids(si.flow(bids)), some_bids(si.flow(bids)),
                 totals(si.flow(pa.schema({"key": pa.int64(), "value": pa.float64()}))))  # fmt: skip
        return [name for flow in flows for name in planned(flow)]

    def wide() -> list[str]:
        return planned(si.flow(schema).filter(col("c0") > 0).select(
            **{f"d{k}": col(f"c{k}") + col(f"c{k + 1}") * 2 for k in range(199)}))

    def chained_columns() -> list[str]:
        flow = si.flow({"x": pa.int64()})
        for k in range(48):
            flow = flow.with_columns(**{f"y{k}": col(f"y{k - 1}" if k else "x") + 1})
        return planned(flow)

    def chained_filters() -> list[str]:
        flow = si.flow({"x": pa.int64()})
        for k in range(100):
            flow = flow.filter(col("x") != k)
        return planned(flow)

    return {work.__name__: timed(work, calls) for work, calls in (
        (w1_to_w4, 5), (wide, 1), (chained_columns, 1), (chained_filters, 1))}


def planned(flow: Flow) -> list[str]:
    flow.explain("fused")
    return list(flow.columns)


# --- compiling: in processes of their own


def compiling(folder: Path) -> Workloads:
    """A new process: imports, and the first W1 over few rows with an empty and with a full cache of kernels."""
    Path("kernels").mkdir(exist_ok=True)
    full = Path(tempfile.mkdtemp(dir="kernels"))

    def first(figure: str, what: str, cache: Path | None) -> tuple[float, object]:
        used = cache or Path(tempfile.mkdtemp(dir="kernels"))
        done = subprocess.run([sys.executable, "-m", "bench.workloads", "first", what], check=True, text=True,
                              stdout=subprocess.PIPE, env={**os.environ, "SCALEIN_CACHE_DIR": str(used.absolute())})
        if cache is None:
            shutil.rmtree(used)
        report = json.loads(done.stdout)
        return report[figure], report["rows"]

    first("first_s", "w1", full)
    return {
        "import": lambda: first("import_s", "w1", full),
        "process_cold": lambda: first("whole_s", "w1", None),
        "process_warm": lambda: first("whole_s", "w1", full),
        "cold": lambda: first("first_s", "w1", None),
        "warm": lambda: first("first_s", "w1", full),
        "cold_wide": lambda: first("first_s", "wide", None),
    }


def first_run(what: str) -> dict[str, float]:
    """Seconds of `import scalein`, of the first collect of another flow, which imports the engine and starts LLVM, and
    of the first collect of W1 or of a wide flow; `whole_s` is all of it."""
    start = time.perf_counter()
    si = importlib.import_module("scalein")
    import_s = time.perf_counter() - start
    col = si.col
    events, names = data.ad_events(1_000), [f"c{k}" for k in range(100)]
    numbers = pa.table({name: np.arange(100) for name in names})
    flow = views(si.from_arrow(events)) if what == "w1" else si.from_arrow(numbers).filter(col("c0") > 0).select(
        **{f"d{k}": col(f"c{k}") * 3 + col(f"c{(k + 1) % 100}") % 7 for k in range(100)})
    other = pa.table({"k": ["a", "b"], "x": [1.5, 2.5]})
    engine_s = timed(lambda: si.from_arrow(other).join(pa.table({"k": ["a"], "y": [1]}), on="k").group_by("k").agg(
        s=col("x").sum()).collect(workers=1))()[0]
    first_s, result = timed(lambda: flow.collect(workers=1))()
    assert isinstance(result, pa.Table)
    return {"import_s": import_s, "first_s": first_s, "whole_s": import_s + engine_s + first_s, "rows": result.num_rows}


# --- sources


def sources(folder: Path) -> Workloads:
    """Files with text in two of three columns, read by two workers and aggregated to a few rows."""
    import scalein as si
    from scalein import col

    files = folder / "files"
    if not files.exists():
        new = folder / "files.new"
        table = data.with_strings(data.ad_events(ROWS // 8), as_dictionary=False)
        for parts in (1, 20):
            (new / f"parquet_{parts}").mkdir(parents=True)
            for number in range(parts):
                first = number * table.num_rows // parts
                part = table.slice(first, (number + 1) * table.num_rows // parts - first)
                pq.write_table(part, new / f"parquet_{parts}" / f"{number:02}.parquet")
        with pa.ipc.new_file(new / "events.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=BATCH_ROWS)
        few = table.slice(0, ROWS // 80)
        pa.csv.write_csv(few, new / "events.csv")
        with open(new / "events.jsonl", "w", encoding="ascii") as lines:
            lines.writelines(json.dumps(row) + "\n" for row in few.to_pylist())
        new.rename(files)
    flows = {
        "parquet_1": si.read_parquet(files / "parquet_1"),
        "parquet_20": si.read_parquet(files / "parquet_20"),
        "ipc": si.read_ipc(files / "events.arrow"),
        "csv": si.read_csv(files / "events.csv"),
        "json": si.read_json(files / "events.jsonl"),
    }

    def count(flow: Flow) -> Workload:
        counted = flow.group_by("event_type").agg(n=si.count(), last=col("event_time").max(), ad=col("ad_id").max())
        return timed(lambda: counted.collect(workers=2))

    return {name: count(flow) for name, flow in flows.items()}


# --- state


KEY, VALUE = {"k": pa.int64()}, {"s": pa.float64(), "n": pa.int64(), "m": pa.float64()}
FUNCTIONS = {"s": "sum", "n": "count", "m": "max"}


class Stores:
    """Stores in the child's folder, and the updates that they get; the same on both sides."""

    def __init__(self, keys: int) -> None:
        self._folders = (Path(tempfile.mkdtemp(dir=".")) / str(number) for number in itertools.count())
        self.updates = {kind: data.Updates(keys, kind, 1 << 22) for kind in ("uniform", "zipf")}

    def open(self, memory: str | None = None, workers: int = 1) -> Any:
        from scalein.state import LogStore

        return LogStore.open(next(self._folders), key=KEY, value=VALUE, memory=memory, workers=workers)

    def full(self, memory: str | None = None, workers: int = 1) -> Any:
        """A store that has every key."""
        store = self.open(memory, workers)
        for rows in self.updates["uniform"].all_keys():
            store.merge(rows, **FUNCTIONS)
        return store

    def merging(self, store: Any, kind: str, calls: int, rows: int) -> Workload:
        """Some merges of fresh rows; checked by the values of some keys."""

        def run() -> tuple[float, object]:
            given = [self.updates[kind].take(rows) for _ in range(calls)]
            taken_s, _ = timed(lambda: [store.merge(each, **FUNCTIONS) for each in given])()
            return taken_s, store.get(given[0]["k"].slice(0, 1_000))

        return run

    def getting(self, store: Any, keys: int) -> Workload:
        def run() -> tuple[float, object]:
            asked = self.updates["uniform"].take(keys)["k"]
            return timed(lambda: store.get(asked))()

        return run


def store(folder: Path) -> Workloads:
    """Merges into 4 M keys in memory, and into a new store; reads; snapshots of what a tenth of the keys changed."""
    stores = Stores(ROWS // 5)
    one, two = stores.full(), stores.full(workers=2)

    def merge_new() -> tuple[float, object]:
        new, rows = stores.open(), [stores.updates["uniform"].take(CALL_ROWS) for _ in range(2)]
        taken_s, _ = timed(lambda: [new.merge(each, **FUNCTIONS) for each in rows])()
        found = new.get(rows[0]["k"].slice(0, 1_000))
        new.abandon()
        return taken_s, found

    def snapshot(part: str) -> Workload:
        def run() -> tuple[float, object]:
            one.merge(stores.updates["uniform"].take(ROWS // 50), **FUNCTIONS)
            start = time.perf_counter()
            taken = one.snapshot()
            frozen_s = time.perf_counter() - start
            taken.wait()
            return frozen_s if part == "freeze" else time.perf_counter() - start, None

        return run

    return {
        "merge_1": stores.merging(one, "uniform", 4, CALL_ROWS),
        "merge_2": stores.merging(two, "uniform", 4, CALL_ROWS),
        "merge_zipf": stores.merging(one, "zipf", 4, CALL_ROWS),
        "merge_small": stores.merging(one, "uniform", 200, 1_000),
        "merge_new": merge_new,
        "get": stores.getting(one, CALL_ROWS),
        "snapshot": snapshot("whole"),
        "snapshot_freeze": snapshot("freeze"),
    }


def spill(folder: Path) -> Workloads:
    """2 M keys in a store with memory for a quarter of them."""
    stores = Stores(ROWS // 10)
    limited = stores.full(memory="32MB")

    def scan() -> tuple[float, object]:
        taken_s, rows = timed(lambda: sum(batch.num_rows for batch in limited.scan()))()
        return taken_s, rows

    return {
        "uniform": stores.merging(limited, "uniform", 8, 1 << 16),
        "zipf": stores.merging(limited, "zipf", 8, 1 << 16),
        "get": stores.getting(limited, 10_000),
        "scan": scan,
    }


# --- jobs


def jobs(folder: Path) -> Workloads:
    """W1 and W2 as jobs with batches of 262,144 rows, by one worker and by two."""
    import scalein as si

    def delivered(table: pa.Table) -> Flow:
        return si.from_batches(table.to_batches(max_chunksize=BATCH_ROWS))

    flows = {"w1": views(delivered(ad_events(folder)).with_watermark("event_time", 100)),
             "w2": hot_bids(delivered(bids(folder).slice(0, ROWS // 2)).with_watermark("ts", 100))}  # fmt: skip
    return {f"{name}_{workers}": job_run(flow, workers=workers)
            for name, flow in flows.items() for workers in (1, 2)}  # fmt: skip


def job_run(flow: Flow, **how: Any) -> Workload:
    import scalein as si

    def run() -> pa.Table:
        sink = si.to_memory()
        flow.start(sink=sink, **how).wait()
        return sink.table()

    return timed(run)


def small_jobs(folder: Path) -> Workloads:
    """Jobs with their state in a store: without and with checkpoints, many small batches, and how late changes are."""
    import scalein as si
    from scalein import col

    values = keyed_values(folder).slice(0, ROWS // 8)
    values = values.set_column(0, "key", pa.array(values["key"].to_numpy() % 1_000_000))
    by_key = totals(si.from_batches(values.to_batches(max_chunksize=1 << 16)))
    batches = data.bids(2_000_000).to_batches(max_chunksize=1_000)
    changing = si.from_batches(batches).group_by("auction").agg(n=si.count(), hi=col("price").max())

    def checkpointed() -> tuple[float, object]:
        checkpoints = Path(tempfile.mkdtemp(dir=".")).absolute()
        taken = job_run(by_key, workers=1, checkpoint=checkpoints, every="100ms")()
        shutil.rmtree(checkpoints)
        return taken

    def changes() -> int:
        rows: list[int] = []
        changing.start(sink=si.to_callback(lambda batch: rows.append(batch.num_rows)), emit="changes", workers=1).wait()
        return int(bool(rows))  # how often a group is reported depends on the time that rounds take

    return {
        "keys": job_run(by_key, workers=1),
        "checkpoints": checkpointed,
        "changes": timed(changes),
        "latency": latency,
    }


def latency() -> tuple[float, object]:
    """The median time from a row's making to its group's change, at 1 M rows/s in batches of 1,000."""
    import scalein as si
    from scalein import col

    late_s: list[float] = []

    def source(start: int, count: int) -> pa.RecordBatch:
        now = time.perf_counter_ns()
        return pa.record_batch({"k": np.arange(start, start + count) % 100, "at": np.full(count, now)})

    flow = si.generate(source, {"k": pa.int64(), "at": pa.int64()}, rows=1_000_000, rows_per_second=1e6,
                       batch_rows=1_000).group_by("k").agg(n=si.count(), last=col("at").max())
    flow.start(sink=si.to_callback(lambda batch: late_s.append(
        (time.perf_counter_ns() - batch.column("last")[0].as_py()) / 1e9)), emit="changes", workers=2).wait()
    return statistics.median(late_s[len(late_s) // 3 :]), None


# --- Spark


def spark(folder: Path) -> Workloads:
    """W1 by `run` over files and by `apply` over a cached DataFrame, and the batches of a stream with state."""
    import scalein as si
    import scalein.spark as sis
    from scalein import col

    session: Any = sis.session(cores=2, config={"spark.sql.shuffle.partitions": 4, "spark.driver.memory": "3g"})
    files, updates = folder / "spark", folder / "updates"
    table, stream_batches = data.ad_events(ROWS), 8
    if not files.exists():
        files.mkdir()
        for number in range(20):
            pq.write_table(table.slice(number * ROWS // 20, ROWS // 20), files / f"{number:02}.parquet")
        updates.mkdir()
        for number in range(stream_batches):
            path = updates / f"{number:03}.parquet"
            pq.write_table(data.keyed_values(ROWS // 40).slice(number, ROWS // 80), path, row_group_size=ROWS // 320)
            os.utime(path, (1_700_000_000 + number,) * 2)
    events = session.read.parquet(str(files)).cache()
    assert events.count() == ROWS
    run, apply = sis.run(views(si.read_parquet(files)), session), sis.apply(views(si.flow(table.schema)), events)
    running = si.flow({"key": pa.int64(), "value": pa.float64()}).group_by("key").agg(
        s=col("value").sum(), n=si.count())

    def stream_batch() -> tuple[float, object]:
        """The median batch but for the first two; the state at the end."""
        place = Path(tempfile.mkdtemp(dir=".")).absolute()
        arriving = (session.readStream.schema("key long, value double").option("maxFilesPerTrigger", 1)
                    .parquet(str(updates)))  # fmt: skip
        job = sis.start(running, arriving, sink=si.to_parquet(place / "out"), checkpoint=place / "state", partitions=2,
                        trigger={"availableNow": True}, emit="changes")
        job.wait()
        times_s = [each.durationMs["triggerExecution"] / 1e3 for each in job.query.recentProgress if each.numInputRows]
        state = sis.read_state(place / "state")
        shutil.rmtree(place)
        return statistics.median(times_s[2:]), state.select(["key", "s", "n"])

    def collected(df: Any) -> Workload:
        return timed(lambda: pa.Table.from_pylist([row.asDict() for row in df.collect()]))

    return {"run": collected(run), "apply": collected(apply), "batch": stream_batch}


# --- results


def digest(result: object) -> object:
    """What must be equal on both sides: of a table its rows in any order, to the last bit."""
    if not isinstance(result, pa.Table):
        return result
    columns = sorted(result.column_names)
    if any(not pa.types.is_primitive(field.type) for field in result.schema):
        rows = sorted(map(repr, result.select(columns).to_pylist()))
        return [result.num_rows, hashlib.sha256("\n".join(rows).encode()).hexdigest()]
    whole = np.zeros(result.num_rows, np.uint64)
    for name in columns:
        whole = _mixed(whole + _bits(result[name]))
    return [result.num_rows, columns, int(whole.sum(dtype=np.uint64))]


def _bits(column: pa.ChunkedArray) -> npt.NDArray[np.uint64]:
    nulls: npt.NDArray[np.uint64] = np.left_shift(column.is_null().to_numpy().astype(np.uint64), np.uint64(62))
    values = column.fill_null(0).to_numpy()
    values = values.astype(np.float64).view(np.uint64) if values.dtype.kind == "f" else values.astype(np.uint64)
    nulls += values
    return nulls


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The rounds of splitmix64."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words = np.multiply(words ^ (words >> np.uint64(shift)), np.uint64(factor))
    return words


# --- the child


GROUPS: Mapping[str, Callable[[Path], Workloads]] = {
    "w1": w1, "w2": w2, "w3": w3, "w4": w4, "operators": operators, "small": small, "plan": plan,
    "compile": compiling, "sources": sources, "store": store, "spill": spill, "jobs": jobs, "small_jobs": small_jobs,
    "spark": spark,
}  # fmt: skip


def serve(group: str, folder: Path, answers: IO[str]) -> None:
    import scalein

    prepared = GROUPS[group](folder)
    print(json.dumps({"names": list(prepared), "code": scalein.__file__}), file=answers, flush=True)
    for line in sys.stdin:
        request, name = line.split()
        start = cpu_s()
        seconds, result = prepared[name]()
        times_s = [seconds, cpu_s() - start]
        print(json.dumps(digest(result) if request == "check" else times_s), file=answers, flush=True)
        del result


def cpu_s() -> float:
    """Seconds of a core that this process and its ended children have used."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def main(args: Sequence[str]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Spark prints is no answer
    if args[0] == "groups":
        print(json.dumps(list(GROUPS)), file=answers)
    elif args[0] == "first":
        print(json.dumps(first_run(args[1])), file=answers)
    else:
        serve(args[0], Path(args[1]), answers)


if __name__ == "__main__":
    main(sys.argv[1:])
