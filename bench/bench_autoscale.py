"""An autoscaled job on a daily wave: by its model and a forecast, by DS2, and by thresholds; a day takes two minutes.

The load needs between one and two workers. Each policy has a day, one after the other, with the same flow and the same
wave; the greatest rates of one and two workers are measured before. `python -m bench.bench_autoscale` does so too.
The model's forecast begins with what the days before were like, as the metrics of the job say; the others need none.
Saturated is a job whose rows are half a second behind. A perfect plan knows each load, and uses workers up to 90 %.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

import scalein as si
from scalein import col
from scalein.model import DS2, Observation, Reactive

DAY_S = 120.0
EVERY_S = 1.0  # between two decisions
BEHIND_S = 0.5
HIGHEST = 0.9
TICK_S = 0.1  # of the source: where rounds are short, what they wait for a busy machine counts as being busy
BATCH_ROWS = 1 << 17
SCHEMA = pa.schema({"n": pa.int64(), "x": pa.float64()})


@si.udf
def work(x: float) -> float:
    """Some 150 ns: a division after the other."""
    for _ in range(24):
        x = x * 0.999 + 1.0 / (1.0 + x * x)
    return x


@dataclass
class Wave:
    """A source of as many rows as have come since its first read: the rate is a cosine, from night to noon and back."""

    low: float  # rows a second
    high: float
    day_s: float
    days: float = 1.0
    schema: pa.Schema = field(default=SCHEMA, init=False)
    replays: bool = field(default=False, init=False)
    began_s: float = field(default=0.0, init=False)

    def rate(self, at_s: float) -> float:
        return self.low + (self.high - self.low) * (1 - float(np.cos(2 * np.pi * at_s / self.day_s))) / 2

    def due(self, at_s: float) -> int:
        """Rows that have come until then."""
        turns = 2 * np.pi / self.day_s
        mean = (self.low + self.high) / 2
        return int(mean * at_s - (self.high - self.low) / 2 * float(np.sin(turns * at_s)) / turns)

    def partitions(self) -> list[str]:
        return ["all"]

    def read(self, partition: str, offset: Any) -> Iterator[tuple[pa.RecordBatch, Any]]:
        self.began_s, sent = time.monotonic(), 0
        block = np.random.default_rng(1).random(BATCH_ROWS)
        while (at_s := time.monotonic() - self.began_s) < self.day_s * self.days:
            for first in range(sent, due := self.due(at_s), BATCH_ROWS):
                count = min(BATCH_ROWS, due - first)
                columns = [pa.array(np.arange(first, first + count)), pa.array(block[:count])]
                yield pa.record_batch(columns, schema=SCHEMA), first + count
            sent = due
            time.sleep(TICK_S)


def flow_over(rows: si.Flow) -> si.Flow:
    return rows.group_by(k=col("n") % 1000).agg(s=work(col("x")).sum())


def profiled() -> Any:
    sample = pa.table({"n": np.arange(400_000), "x": np.random.default_rng(1).random(400_000)}, schema=SCHEMA)
    return si.model.profile(flow_over(si.flow(SCHEMA)), sample, emit="changes")


def started(source: Wave, workers: int) -> Any:
    return flow_over(si.from_source(source)).start(sink=si.to_callback(lambda _: None), workers=workers, emit="changes")


def greatest_rate(workers: int, seconds: float) -> float:
    """Rows a second of a job that always has some."""
    job = started(Wave(2e9, 2e9, 1e6), workers)
    while not job.work_done()[0]:  # compiled now
        time.sleep(0.01)
    job.await_end(0.2)
    began, before = time.monotonic(), job.work_done()[0]
    job.await_end(seconds)
    rows = job.work_done()[0] - before
    seconds = time.monotonic() - began
    job.stop()
    return float(rows / seconds)


@dataclass
class Day:
    """What a policy did: of each tenth of a second the load, the workers, and how many seconds of rows were behind."""

    name: str
    rates: list[float]
    workers: list[int]
    behind_s: list[float]
    step_s: float
    observations: list[Observation]

    def row(self, greatest: dict[int, float]) -> dict[str, float]:
        perfect = [1 if rate <= HIGHEST * greatest[1] else 2 for rate in self.rates]
        return {"worker_s": sum(self.workers) * self.step_s, "cost": sum(self.workers) / sum(perfect),
                "saturated_s": sum(each > BEHIND_S for each in self.behind_s) * self.step_s,
                "greatest_behind_s": max(self.behind_s),
                "rescales": sum(a != b for a, b in zip(self.workers, self.workers[1:], strict=False))}


def run_day(name: str, policy: Any, wave: Wave, history: list[Observation], **how: Any) -> Day:
    """Run a job over the wave, and look at it ten times a second until it ends."""
    job = started(wave, 1)
    while not wave.began_s:
        time.sleep(0.001)
    scaler = job.autoscale(policy, every=EVERY_S, least=1, most=2, **how)
    scaler.observations = list(history)
    day = Day(name, [], [], [], 0.1, scaler.observations)
    while not job.await_end(day.step_s - 0.001):
        at_s = time.monotonic() - wave.began_s
        done, _, workers = job.work_done()
        day.rates.append(wave.rate(at_s))
        day.workers.append(workers)
        day.behind_s.append(max(0.0, wave.due(at_s) - done) / wave.rate(at_s))
    job.wait()
    assert scaler.error is None
    day.step_s = wave.day_s * wave.days / len(day.rates)
    day.observations = scaler.observations[len(history):]
    return day


def measure(day_s: float) -> tuple[dict[int, float], list[Day]]:
    """The greatest rates, and a day of each policy, over waves of 0.3 to 1.5 times what one worker does."""
    found: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(3):
        for workers, rates in found.items():
            rates.append(greatest_rate(workers, min(3.0, day_s / 20)))
    greatest = {workers: statistics.median(rates) for workers, rates in found.items()}
    days: list[Day] = []
    for name, policy in (("thresholds", Reactive()), ("DS2", DS2()), ("model", profiled())):
        wave = Wave(0.3 * greatest[1], min(1.5 * greatest[1], 0.8 * greatest[2]), day_s)
        history = [each for day in days for each in day.observations] if name == "model" else []
        how = {"period": day_s, "ahead": 5 * EVERY_S} if name == "model" else {}
        days.append(run_day(name, policy, wave, history, **how))
    return greatest, days


def report(greatest: dict[int, float], days: list[Day]) -> str:
    lines = [f"greatest rates: {', '.join(f'{n} workers {rate:,.0f} rows/s' for n, rate in greatest.items())}"]
    for day in days:
        found = day.row(greatest)
        lines.append(f"{day.name:<12} {found['cost']:.2f} of a perfect plan's worker-seconds, saturated for "
                     f"{found['saturated_s']:.1f} s, at most {found['greatest_behind_s']:.2f} s behind, "
                     f"{found['rescales']:.0f} rescales")
    return "\n".join(lines)


def bench_daily_wave(benchmark: Any, seconds: float) -> None:
    """A day of four times `--bench-seconds` for each policy; goals: no saturation, 1.3 of a perfect plan."""
    greatest, days = benchmark.pedantic(measure, args=(4 * seconds,), rounds=1)
    benchmark.extra_info.update({day.name: day.row(greatest) for day in days})
    print("\n" + report(greatest, days))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--day", type=float, default=DAY_S, help="seconds of a day")
    print(report(*measure(parser.parse_args().day)))
