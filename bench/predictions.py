"""Predictions of `si.model` beside what jobs then did, for configurations and flows that no constant was fitted to.

    python -m bench.predictions            all parts: rates, memory, latency
    python -m bench.predictions rates      one of them; --rows N for another size, --json for the cases
    python -m bench.predictions rates --cpu    on a machine that does other work: one worker, by seconds of CPU

rates    the greatest rate of six flows with 1 and 2 workers and batches of 1 k to 1 M rows
memory   of a running aggregate whose state is from half of `memory=` to ten times of it
latency  p99 of three flows at 30, 60 and 90 % of the rate that they reached
spark    the time of a micro-batch on two local cores, by partitions and rows, with figures that are measured before

Each flow is profiled once, over a part of its rows. A job's rate is that of its rounds, the best of some turns: rows
over the seconds that it was busy, from rows in memory and without a sink. Latency is of rows that come in batches by a
clock, as the job's own metrics have it. Errors are relative to what was measured. Running aggregates are jobs with a
checkpoint a second, as without one a short job only buffers its rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import scalein as si
from bench import data
from scalein import col
from scalein.api.flow import Flow
from scalein.model import Model

ROWS, SAMPLE_ROWS, TURNS = 2_000_000, 500_000, 2
MAX_ROWS, RUN_S = 48_000_000, 0.3
BATCHES = (1_000, 16_384, 1 << 18, 1 << 20)
LOADS, SECONDS = (0.3, 0.6, 0.9), 3.0
STATE_KEYS = 2_000_000
SPARK_KEYS, SPARK_PARTITIONS, SPARK_ROWS, SPARK_BATCHES = 200_000, (1, 2, 8), (50_000, 500_000, 4_000_000), 9
SHARES = (2.0, 1.0, 0.5, 0.25, 0.1)  # of the state, that memory has room for


@dataclass(frozen=True)
class Case:
    """A figure as predicted, with its interval, and as it was."""

    name: str
    predicted: float
    low: float
    high: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def is_covered(self) -> bool:
        return self.low <= self.measured <= self.high


# --- flows: of a source and of its rows


def _views(source: Flow) -> Flow:
    return (source.with_watermark("event_time", 100).filter(col("event_type") == 0).join(data.campaigns(), on="ad_id")
            .group_by("campaign_id", si.tumbling("event_time", 10_000)).agg(n=si.count()))  # fmt: skip


def _hot_bids(source: Flow) -> Flow:
    return (source.with_watermark("ts", 100).group_by("auction", si.sliding("ts", 10_000, every=2_000))
            .agg(n=si.count(), hi=col("price").max()))  # fmt: skip


def _per_second(source: Flow) -> Flow:
    return (source.with_watermark("ts", 100).group_by("auction", si.tumbling("ts", 1_000))
            .agg(mean=col("price").mean()))  # fmt: skip


def _convert(source: Flow) -> Flow:
    return source.filter(col("auction") % 7 == 0).select("auction", price=col("price") * 0.908, day=col("ts") // 86_400)


def _totals(source: Flow) -> Flow:
    value = col("value")
    return source.group_by("key").agg(s=value.sum(), n=si.count(), lo=value.min(), hi=value.max())


def _first_seen(source: Flow) -> Flow:
    return source.distinct("ad_id", "event_type").filter(col("event_type") < 2)


RUNNING = ("totals", "first seen")  # without windows
FLOWS: Mapping[str, tuple[Callable[[Flow], Flow], Callable[[int], pa.Table]]] = {
    "views": (_views, data.ad_events),
    "hot bids": (_hot_bids, data.bids),
    "bids a second": (_per_second, data.bids),
    "convert": (_convert, data.bids),
    "totals": (_totals, lambda rows: data.keyed_values(rows, keys=200_000)),
    "first seen": (_first_seen, data.ad_events),
}


def profiled(flow: Callable[[Flow], Flow], table: pa.Table) -> Model:
    return si.model.profile(flow(si.flow(table.schema)), table.slice(0, SAMPLE_ROWS))


# --- what jobs do


def later(table: pa.Table, copies: int) -> pa.Table:
    """Copies of a table, each with times after those of the one before."""
    time_column = next((name for name in ("event_time", "ts") if name in table.column_names), None)
    if time_column is None:
        return pa.concat_tables([table] * copies)
    times, place = table[time_column].to_numpy(), table.column_names.index(time_column)
    step = int(times.max() - times.min()) + 1
    return pa.concat_tables([table.set_column(place, time_column, pa.array(times + number * step))
                             for number in range(copies)])


def reached(flow: Callable[[Flow], Flow], table: pa.Table, batch_rows: int, workers: int, expected: float,
            turns: int = TURNS, **how: Any) -> tuple[float, float]:
    """Rows a second while the job was busy, the best of some turns; and rows by seconds of the process's CPU."""
    rows = int(min(MAX_ROWS, max(table.num_rows, expected * RUN_S)))
    batches = later(table, -(-rows // table.num_rows)).slice(0, rows).to_batches(max_chunksize=batch_rows)
    found, by_cpu = [], []
    for turn in range(turns):
        # A checkpoint of its own: else the job goes on at the end of the turn before.
        own = {**how, "checkpoint": f"{how['checkpoint']}/{turn}"} if "checkpoint" in how else how
        job = flow(si.from_batches(batches)).start(sink=si.to_callback(_dropped), workers=workers, **own)
        started = time.process_time()
        job.wait()
        by_cpu.append(rows / (time.process_time() - started))
        found.append(rows / float(str(job.metrics()["busy_s"])))
    return max(found), max(by_cpu)


def _dropped(batch: pa.RecordBatch) -> None:
    """A sink that costs nothing."""


def latency(flow: Callable[[Flow], Flow], table: pa.Table, batch_rows: int, rate: float) -> float:
    """p99 in seconds, under a load of batches that come by a clock."""
    batches = table.to_batches(max_chunksize=batch_rows)

    def paced() -> Iterator[pa.RecordBatch]:
        began, sent = time.perf_counter(), 0
        for batch in batches:
            wait_s = began + sent / rate - time.perf_counter()
            if wait_s > 0:
                time.sleep(wait_s)
            elif sent / rate > SECONDS:
                return
            sent += batch.num_rows
            yield batch

    job = flow(si.from_batches(paced, table.schema)).start(sink=si.to_callback(_dropped), workers=1)
    job.wait()
    found: Any = job.metrics()["latency_s"]
    return float(found["p99"])


# --- the parts


def rates(rows: int, by_cpu: bool) -> Iterator[Case]:
    for name, (flow, make) in FLOWS.items():
        table = make(rows).combine_chunks()
        model = profiled(flow, table)
        every = "1s" if name in RUNNING else None
        for workers in (1,) if by_cpu else (1, 2):
            for batch_rows in BATCHES:
                found = model.predict(workers=workers, batch_rows=batch_rows, every=every)
                with tempfile.TemporaryDirectory() as folder:
                    how: dict[str, Any] = {} if every is None else {"checkpoint": folder, "every": every}
                    busy, cpu = reached(flow, table, batch_rows, workers, found.max_rate, **how)
                yield Case(f"{name}, {workers} workers, batches of {batch_rows:,}", found.max_rate, found.low,
                           found.high, cpu if by_cpu else busy)


def memory(rows: int, by_cpu: bool) -> Iterator[Case]:
    table = data.keyed_values(rows, keys=STATE_KEYS).combine_chunks()
    model = profiled(_totals, table)
    state = model.predict(keys=STATE_KEYS).state_bytes
    for share in SHARES:
        limit = int(share * state * 2)  # a job's state has about half of its memory
        found = model.predict(workers=1, batch_rows=1 << 18, memory=limit, keys=STATE_KEYS)
        with tempfile.TemporaryDirectory() as folder:
            busy, cpu = reached(_totals, table, 1 << 18, 1, found.max_rate, turns=1, memory=limit, checkpoint=folder,
                                every="1h")
        yield Case(f"totals, memory for {share:.0%} of {state / 1e6:,.0f} MB", found.max_rate, found.low, found.high,
                   cpu if by_cpu else busy)


def latencies(rows: int, by_cpu: bool) -> Iterator[Case]:
    for name, batch_rows in (("views", 16_384), ("totals", 4_096), ("convert", 16_384)):
        flow, make = FLOWS[name]
        table = make(rows).combine_chunks()
        model = profiled(flow, table)
        most, _ = reached(flow, table, batch_rows, 1, model.predict(batch_rows=batch_rows).max_rate)
        for load in LOADS:
            found = model.predict(workers=1, batch_rows=batch_rows, rate=load * most, variability=0)
            low, high = found.intervals["p99_s"]
            yield Case(f"{name}, p99 at {load:.0%}", found.p99_s, low, high,
                       latency(flow, table, batch_rows, load * most))


def spark(rows: int, by_cpu: bool) -> Iterator[Case]:
    from scalein.errors import here
    from scalein.model.calibration import TYPICAL, SparkFigures
    from scalein.spark.calibrate import measure
    from scalein.spark.session import session

    running = session(cores=2)
    machine = replace(TYPICAL, cores=2, spark=SparkFigures(**measure(here())))
    print(machine.spark, flush=True)
    for name, keys, emit in (("totals", SPARK_KEYS, "changes"), ("hot bids", None, "final")):
        flow, make = FLOWS[name]
        table = (data.keyed_values(rows, keys=SPARK_KEYS) if keys else make(rows)).combine_chunks()
        model = profiled(flow, table)
        for partitions in SPARK_PARTITIONS:
            for batch_rows in SPARK_ROWS:
                found = model.predict(partitions=partitions, executors=1, cores=2, every=60, keys=keys, on=machine,
                                      rate=batch_rows / 60)
                assert found.batch_s is not None
                yield Case(f"{name}, {partitions} partitions, batches of {batch_rows:,}", found.batch_s,
                           *found.intervals["batch_s"], _batch_s(running, flow, table, batch_rows, partitions, emit))


def _batch_s(running: Any, flow: Callable[[Flow], Flow], table: pa.Table, batch_rows: int, partitions: int,
             emit: str) -> float:
    """The median time of a micro-batch."""
    import scalein.spark as sis

    whole = later(table, -(-SPARK_BATCHES * batch_rows // table.num_rows))
    with tempfile.TemporaryDirectory() as folder:
        for number in range(SPARK_BATCHES):
            pq.write_table(whole.slice(number * batch_rows, batch_rows), f"{folder}/{number:03}.parquet")
        schema = running.read.parquet(f"{folder}/000.parquet").schema
        stream = running.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(folder)
        with tempfile.TemporaryDirectory() as place:
            job = sis.start(flow(si.flow(table.schema)), stream, sink=si.to_parquet(f"{place}/out"), emit=emit,
                            checkpoint=f"{place}/checkpoint", partitions=partitions, trigger={"availableNow": True})
            job.wait()
            times = [each.durationMs["triggerExecution"] / 1e3 for each in job.query.recentProgress
                     if "addBatch" in each.durationMs]
    return statistics.median(times[SPARK_BATCHES // 3:])


PARTS: Mapping[str, Callable[[int, bool], Iterator[Case]]] = {"rates": rates, "memory": memory, "latency": latencies,
                                                              "spark": spark}


def summary(cases: Sequence[Case]) -> str:
    """The median error, how many cases are near, and how many intervals hold what was measured."""
    errors = [abs(case.error) for case in cases]
    factors = [max(case.predicted / case.measured, case.measured / case.predicted) for case in cases]
    return (f"{len(cases)} cases: median error {statistics.median(errors):.0%}, within 20 % "
            f"{np.mean(np.array(errors) <= 0.2):.0%}, within a factor of 1.5 {np.mean(np.array(factors) <= 1.5):.0%}, "
            f"intervals hold {np.mean([case.is_covered for case in cases]):.0%}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Predictions beside what jobs then did.")
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--cpu", action="store_true", help="rates of one worker, by seconds of the process's CPU")
    parser.add_argument("--json", metavar="FILE", help="write the cases there")
    asked = parser.parse_args()
    found: dict[str, list[Case]] = {}
    for part in asked.parts or PARTS:
        found[part] = []
        for case in PARTS[part](asked.rows, asked.cpu):
            found[part].append(case)
            shown = f"{case.predicted:14,.4g}{case.measured:14,.4g}{case.error:>+8.0%}"
            print(f"{case.name:<48}{shown}{'' if case.is_covered else '  outside'}", flush=True)
        print(f"{part}: {summary(found[part])}", flush=True)
    if asked.json:
        with open(asked.json, "w", encoding="utf-8") as file:
            json.dump({part: [asdict(case) for case in cases] for part, cases in found.items()}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
