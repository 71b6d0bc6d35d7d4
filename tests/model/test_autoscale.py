"""Policies over series of loads, and the loop that applies them to a job: by a clock of their own, without waiting."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import scalein as si
from scalein.errors import ScaleinError
from scalein.model import DS2, Autoscaler, Observation, Policy, Predictive, Reactive, autoscale, simulate

RATES = {1: 100.0, 2: 195.0, 3: 285.0, 4: 370.0}


@dataclass(frozen=True)
class Prediction:
    max_rate: float
    p99_s: float


@dataclass(frozen=True)
class Model:
    """Knows the greatest rates, but for a factor; latency is that of an M/M/1."""

    factor: float = 1.0

    def predict(self, *, workers: int, rate: float, **configuration: Any) -> Prediction:
        most = RATES[workers] * self.factor
        return Prediction(most, float("inf") if rate >= most else 4.6 / (most - rate))


def day(days: int, noise: float = 0.02, step: int = 40) -> np.ndarray:
    """A daily wave between 40 and 320 rows/s; a day has 40 steps."""
    steps = np.arange(days * step)
    wave = 180 - 140 * np.cos(2 * np.pi * steps / step)
    return wave * (1 + np.random.default_rng(5).normal(0, noise, len(wave)))


@pytest.mark.parametrize("factor", [1.0, 0.6, 1.7])
def test_the_model_scales_ahead_of_a_daily_wave(factor: float) -> None:
    """Also when its rates are wrong by a factor: that is corrected by what is observed."""
    found = simulate(Predictive(Model(factor), ahead=4, period=40, patience=2), day(4), RATES)
    second = slice(80, None)  # a forecast of a season has seen two of them
    assert (found.backlog[second] > 0).sum() == 0
    assert found.cost < 1.3


def test_policies_without_a_forecast_follow_the_load() -> None:
    loads = day(4)
    reactive, ds2 = (simulate(policy, loads, RATES) for policy in (Reactive(), DS2()))
    assert set(reactive.workers) == set(ds2.workers) == {1, 2, 3, 4}
    assert max(ds2.saturated_steps, reactive.saturated_steps) < 10
    assert 0.9 < ds2.cost < 1.4
    assert 0.9 < reactive.cost < 1.6


def test_a_step_of_the_load_that_nobody_foresaw() -> None:
    """Who is saturated sees less than what arrives: it adds workers until nothing waits."""
    loads = np.concatenate([np.full(50, 60.0), np.full(50, 350.0)])
    found = simulate(Predictive(Model()), loads, RATES)
    assert found.workers[49] == 1
    assert found.workers[60] == 4
    assert found.backlog[-1] == 0


def test_a_noisy_load_does_not_make_it_swing() -> None:
    loads = 90 + np.random.default_rng(3).normal(0, 4, 100)
    used = simulate(Predictive(Model()), loads, RATES).workers
    assert np.abs(np.diff(used)).sum() <= 4


class Job:
    """A target with a clock of its own."""

    def __init__(self, loads: list[float]) -> None:
        self.loads, self.workers, self.time = loads, 1, 0
        self.rows = self.busy_s = 0.0

    def pass_time(self) -> None:
        rate = min(self.loads[self.time], RATES[self.workers])
        self.rows += rate
        self.busy_s += rate / RATES[self.workers]
        self.time += 1

    def clock(self) -> float:
        return float(self.time)

    def work_done(self) -> tuple[float, float, int]:
        return self.rows, self.busy_s, self.workers

    def scale(self, workers: int) -> None:
        self.workers = workers

    def await_end(self, timeout: float) -> bool:
        return self.time >= len(self.loads)


def test_decisions_are_logged_with_what_they_led_to(tmp_path: Path) -> None:
    job, log = Job([50.0] * 10 + [150.0] * 10), tmp_path / "decisions.jsonl"
    scaler = Autoscaler(job, Predictive(Model()), every_s=1, least=1, most=4, log=str(log), clock=job.clock)
    assert scaler.step() is None  # no time has passed
    for _ in job.loads:
        job.pass_time()
        scaler.step()
    assert job.workers == scaler.decisions[-1].workers > 1
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(lines) == len(scaler.decisions) - 1  # what the last one leads to is not known yet
    busy = 150 / RATES[job.workers]
    assert lines[-1]["realized"] == {"rate": pytest.approx(150.0), "utilization": pytest.approx(busy)}
    assert lines[-1]["predicted"]["utilization"] == pytest.approx(busy, rel=0.05)
    assert "workers for" in str(scaler.decisions[-1])


def test_deciding_does_not_stretch_the_intervals() -> None:
    """A season is so many observations: they come when they are due, and one that was missed is left out."""
    class Timed(Job):
        now_s = 0.0

        def clock(self) -> float:
            return self.now_s

        def await_end(self, timeout: float) -> bool:
            self.now_s += timeout
            self.rows += timeout
            return self.now_s > 20

    class Slow(Policy):
        def decide(self, history: Any, least: int, most: int) -> si.model.Decision:
            job.now_s += 0.75 if len(history) != 3 else 2.5
            return si.model.Decision(history[-1].at_s, 1, 1, "", history[-1].rate)

    job = Timed([])
    scaler = Autoscaler(job, Slow(), every_s=1, least=1, most=1, clock=job.clock)
    scaler._run()
    assert [each.at_s for each in scaler.observations][:6] == [1, 2, 3, 6, 7, 8]


def test_a_running_job_is_scaled() -> None:
    """A policy of the user's own, whose first decision changes the workers."""
    class Two(Policy):
        def decide(self, history: Any, least: int, most: int) -> si.model.Decision:
            return si.model.Decision(history[-1].at_s, history[-1].workers, 2, "always", history[-1].rate)

    def numbers(start: int, count: int) -> pa.RecordBatch:
        return pa.record_batch({"n": np.arange(start, start + count)})

    flow = si.generate(numbers, {"n": pa.int64()}, rows_per_second=20_000)
    job = flow.start(sink=si.to_callback(lambda _: None), workers=1)
    try:
        scaler = job.autoscale(Two(), every=0.02, most=2)
        while not job.metrics()["rescales"]:
            assert scaler.error is None
            assert not job.await_end(0.01)
    finally:
        job.stop()
    assert job.metrics()["workers"] == 2
    assert scaler.decisions[0].before == 1


class Stream(Job):
    """Batches of five seconds and more, one after the other: each takes the rows that came during the one before."""

    def __init__(self, loads: list[float], batch_s: int = 5) -> None:
        super().__init__(loads)
        self.length, self.batches, self.ended_s, self.had = batch_s, 0, None, 0
        self.waiting, self.taken, self.begun_s, self.begun_with = 0.0, 0.0, None, 1
        self.asked: list[dict[str, Any]] = []

    def pass_time(self) -> None:
        self.waiting += self.loads[self.time]
        self.time += 1
        if self.begun_s is None and self.waiting:
            self.begun_s, self.taken, self.waiting, self.begun_with = self.time, self.waiting, 0.0, self.workers
        elif self.begun_s is not None and self.time - self.begun_s >= self.length:
            busy_s = min(self.length, self.taken / RATES[self.begun_with])
            self.rows, self.busy_s, self.batches = self.rows + self.taken, self.busy_s + busy_s, self.batches + 1
            self.ended_s, self.had = float(self.time), self.begun_with
            self.begun_s = None

    def batches_done(self) -> tuple[float, float, int, float | None, int]:
        return self.rows, self.busy_s, self.batches, self.ended_s, self.had

    def is_in_batch(self) -> bool:
        return self.begun_s is not None

    def configuration(self, workers: int) -> dict[str, Any]:
        self.asked.append({"workers": workers, "every": "5s"})
        return self.asked[-1]

    def most_workers(self) -> int:
        return 3


def run(stream: Stream, policy: Policy) -> list[int]:
    """The partitions after each second, observed every second."""
    scaler = Autoscaler(stream, policy, every_s=1, least=1, most=4, clock=stream.clock)
    used = []
    for _ in stream.loads:
        stream.pass_time()
        scaler.step()
        used.append(stream.workers)
    assert all(0 < each.rate < 400 for each in scaler.observations if each.batch_s is not None)
    return used


@pytest.mark.parametrize("policy", [DS2(), Reactive(), Predictive(Model())])
def test_whole_batches_are_observed(policy: Policy) -> None:
    """A batch takes longer than an interval: looks at its middle would show an idle stream, then one above all limits.
    """
    used = run(Stream([150.0] * 200), policy)
    assert max(used) <= 3
    assert np.count_nonzero(np.diff(used)) <= 3
    assert used[-1] == used[-60] >= 2


def test_a_stream_without_rows_is_idle() -> None:
    used = run(Stream([150.0] * 60 + [0.0] * 100), DS2(stable=1))
    assert max(used) >= 2
    idle = Stream([0.0] * 30)
    assert set(run(idle, Reactive())) == {1}


def test_a_model_is_asked_about_the_stream() -> None:
    stream = Stream([])
    scaler = autoscale(stream, Model(), every=60)
    scaler.stop()
    assert scaler._most == 3
    assert stream.asked == [{"workers": 1, "every": "5s"}]  # before it scales, so that an error is the user's

    class Jobs:
        def predict(self, *, workers: int, rate: float) -> Prediction:
            raise AssertionError

    with pytest.raises(TypeError):
        autoscale(stream, Jobs(), every=60)


def test_latency_between_two_looks_is_logged() -> None:
    class Counting(Job):
        counts = np.zeros(4, int)

        def latency_counts(self) -> tuple[np.ndarray, np.ndarray]:
            return np.array([0.1, 1.0, 10.0]), self.counts.copy()

    job = Counting([50.0] * 10)
    scaler = Autoscaler(job, DS2(), every_s=1, least=1, most=4, clock=job.clock)
    for place in (0, 1, 2, 3):
        job.counts[place] += 1_000
        job.pass_time()
        scaler.step()
    assert [each.realized.get("p99_s") for each in scaler.decisions] == [1.0, 10.0, 10.0, None]


@pytest.mark.parametrize(("given", "text"), [
    ({"model": 3}, "a model or a policy"), ({"model": DS2(), "p99": "1s"}, "belong to a model"),
    ({"model": DS2(), "least": 0}, "least must be"), ({"model": DS2(), "least": 3, "most": 2}, "not be above"),
    ({"model": DS2(), "every": "x"}, "every"), ({"model": DS2(), "every": 0}, "above 0"),
])  # fmt: skip
def test_bad_arguments(given: dict[str, Any], text: str) -> None:
    job = si.from_arrow(pa.table({"x": [1]})).start(sink=si.to_memory())
    job.wait()
    with pytest.raises(ScaleinError, match=text) as error:
        job.autoscale(given["model"], **{name: each for name, each in given.items() if name != "model"})
    assert error.value.facts["at"].startswith("test_autoscale.py:")


def test_an_idle_job_needs_no_rate() -> None:
    idle = Observation(0.0, 0.0, 0.0, 2)
    assert DS2().decide([idle], 1, 4).workers == 2
    assert Predictive(Model(), patience=1).decide([idle], 1, 4).workers == 1
