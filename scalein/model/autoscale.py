"""Scaling a job, or a Spark stream, while it runs: it is observed, a policy decides, and each decision is logged.

A policy sees observations (the rate of rows, how busy the workers were) and gives the number of workers. Three are
here: `Reactive` thresholds, as schedulers of containers have them; `DS2`, which computes the number from the rate that
a worker truly reached while it was busy (Kalavri et al., OSDI 2018); and `Predictive`, which asks a model about the
greatest load that a forecast allows in the near future, so that it scales before the load is there. A model's error is
corrected by what is observed: where workers are busier than predicted, its rates are lowered by that factor.

`Autoscaler` is the loop: one thread, which observes the job at intervals. `simulate` runs the same policies over a
series of loads without a job, to compare them.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import ceil, inf
from typing import Any, Protocol, runtime_checkable

import numpy as np

from scalein.durations import span
from scalein.errors import BadArgument, SourceLoc, here
from scalein.model.forecast import MIN_VALUES, forecast
from scalein.options import granted_cores

_LOG = logging.getLogger("scalein.model")
HISTORY = 20_000  # observations that a policy sees
MAX_POINTS = 400  # of a forecast's history: of longer ones, means of several observations, so that it takes 0.1 s
SATURATED = 0.97  # of the time busy: the rate that arrives may be greater than the one that is observed


@dataclass(frozen=True, slots=True)
class Observation:
    """What a job did since the observation before."""

    at_s: float
    rate: float  # rows a second that it took in
    utilization: float  # the share of the time that it was busy
    workers: int  # of a Spark stream: partitions
    batch_s: float | None = None  # of a Spark stream: what its batches took, on average

    @property
    def capacity(self) -> float | None:
        """Rows a second that its workers reach while they are busy; None if they had nothing to do."""
        return self.rate / self.utilization if self.utilization > 0 and self.rate > 0 else None


@dataclass(slots=True)
class Decision:
    """How many workers from now on, and why. `realized` is what the next observation shows."""

    at_s: float
    before: int
    workers: int
    reason: str
    rate: float  # rows a second for which it decides
    predicted: dict[str, float] = field(default_factory=dict)
    realized: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        change = f"{self.before} -> {self.workers}" if self.before != self.workers else str(self.workers)
        figures = "".join(f"; {name} {', '.join(f'{key} {value:,.3g}' for key, value in values.items())}"
                          for name, values in (("predicted", self.predicted), ("realized", self.realized)) if values)
        return f"{change} workers for {self.rate:,.0f} rows/s: {self.reason}{figures}"


class Scales:
    """What can be given to `job.autoscale`: a policy, or a model."""

    __slots__ = ()

    def autoscale(self, job: Target, **options: Any) -> Autoscaler:
        """Scale a running job: see `scalein.model.autoscale`."""
        return autoscale(job, self, **options)


class Policy(Scales, ABC):
    """Decides on the number of workers. Own ones override `decide`."""

    __slots__ = ()

    @abstractmethod
    def decide(self, history: Sequence[Observation], least: int, most: int) -> Decision:
        """How many workers, at least `least` and at most `most`, after these observations, the newest last."""


@runtime_checkable
class Predicts(Protocol):
    """What `Predictive` asks of a model: predictions that have `max_rate` and `p99_s`."""

    def predict(self, *, workers: int, rate: float) -> Any: ...


def _as_workers(count: int) -> Mapping[str, Any]:
    return {"workers": count}


@dataclass(slots=True)
class Reactive(Policy):
    """One worker more above a share of busy time, one less below another, and a pause after each change.

    >>> calm, busy = Observation(0, 100, 0.5, 2), Observation(1, 100, 0.9, 2)
    >>> Reactive().decide([calm], 1, 4).workers, Reactive().decide([busy], 1, 4).workers
    (2, 3)
    """

    high: float = 0.8
    low: float = 0.35
    cooldown: int = 3  # observations after a change
    _rest: int = 0

    def decide(self, history: Sequence[Observation], least: int, most: int) -> Decision:
        now = history[-1]
        workers, reason = now.workers, f"{now.utilization:.0%} busy"
        self._rest = max(0, self._rest - 1)
        if not self._rest and now.utilization > self.high:
            workers += 1
        elif not self._rest and now.utilization < self.low:
            workers -= 1
        workers = min(max(workers, least), most)
        if workers != now.workers:
            self._rest = self.cooldown + 1
        return Decision(now.at_s, now.workers, workers, reason, now.rate)


@dataclass(slots=True)
class DS2(Policy):
    """As many workers as the rate needs at the rate that one worker truly reached, the same for several observations.

    >>> DS2(stable=1).decide([Observation(0, 900, 0.9, 2)], 1, 8).workers  # 500 a busy worker; 0.8 of it is used
    3
    """

    headroom: float = 0.8  # the share of a worker's true rate that is used
    stable: int = 2  # observations that must agree before a change
    _wanted: list[int] = field(default_factory=list)

    def decide(self, history: Sequence[Observation], least: int, most: int) -> Decision:
        now = history[-1]
        if now.capacity is None:
            return Decision(now.at_s, now.workers, now.workers, "no rows", now.rate)
        each = now.capacity / now.workers
        target = min(max(ceil(now.rate / (each * self.headroom)), least), most)
        self._wanted = [*self._wanted, target][-self.stable:]
        settled = len(self._wanted) == self.stable and len(set(self._wanted)) == 1
        return Decision(now.at_s, now.workers, target if settled else now.workers,
                        f"a busy worker does {each:,.0f} rows/s", now.rate, {"max_rate": each * target})


@dataclass(slots=True)
class Predictive(Policy):
    """The fewest workers that hold the greatest load of the near future within the latency, by a model and a forecast.

    It goes up at once, and down when fewer workers have been enough for the forecasts of `patience` observations.
    """

    model: Predicts
    p99_s: float = inf
    ahead: int = 10  # observations that the forecast looks ahead
    period: int | Sequence[int] = ()  # of the load's seasons, in observations
    patience: int = 5
    highest: float = 0.9  # the greatest utilization that is planned for
    configuration: Callable[[int], Mapping[str, Any]] = _as_workers  # what the model is asked about, by their number
    _factor: float = 1.0  # observed capacity over the predicted one
    _fewer: list[int] = field(default_factory=list)
    _peaks: list[tuple[float, str]] = field(default_factory=list)  # of the last forecast, for the observations to come

    def decide(self, history: Sequence[Observation], least: int, most: int) -> Decision:
        now = history[-1]
        self._correct(now)
        rate, reason = self._expected(history)
        found = next((count for count in range(least, most) if self._holds(count, rate)), most)
        if now.utilization >= SATURATED:  # more may arrive than is observed
            found = max(found, min(now.workers + 1, most))
            reason += ", saturated now"
        self._fewer = [*self._fewer, found][-self.patience:]
        if found < now.workers:
            found = now.workers if len(self._fewer) < self.patience else min(now.workers, max(self._fewer))
        prediction = self._predict(found, rate / self._factor)
        return Decision(now.at_s, now.workers, found, reason, rate,
                        {"max_rate": prediction.max_rate * self._factor, "utilization": self._busy(found, now.rate),
                         "p99_s": prediction.p99_s})

    def _predict(self, workers: int, rate: float) -> Any:
        return self.model.predict(**self.configuration(workers), rate=rate)

    def _correct(self, now: Observation) -> None:
        """Move the factor a third of the way to what was observed; an almost idle job shows little of its capacity. Of
        a batch, part of which is fixed, the time is compared.
        """
        if now.capacity is None or now.utilization <= 0.1:
            return
        predicted = self._predict(now.workers, now.rate)
        expected_s = getattr(predicted, "batch_s", None)
        if now.batch_s is None or expected_s is None:
            seen = now.capacity / predicted.max_rate
        else:
            seen = min(expected_s, 10 * now.batch_s) / now.batch_s
        self._factor += (min(max(seen, 0.1), 10.0) - self._factor) / 3

    def _expected(self, history: Sequence[Observation]) -> tuple[float, str]:
        """The greatest rate within sight, as the forecast's interval allows; no more than twice what there ever was."""
        greatest = max(each.rate for each in history)
        if len(history) < 2 * MIN_VALUES:
            return greatest * 1.2, "little history: a fifth more than the greatest load"
        if not self._peaks:
            self._forecast(np.array([each.rate for each in history]))
        peak, method = self._peaks.pop(0)
        peak = min(max(peak, history[-1].rate), 2 * greatest)
        return peak, f"the load may reach {peak:,.0f} rows/s within {self.ahead} steps ({method})"

    def _forecast(self, rates: np.ndarray) -> None:
        """The greatest rates within sight of this observation and of the next ones, a quarter of the way ahead."""
        uses = max(1, self.ahead // 4)
        each = ceil(len(rates) / MAX_POINTS)
        points = rates[len(rates) % each:].reshape(-1, each).mean(axis=1)
        periods = [self.period] if isinstance(self.period, int) else self.period
        found = forecast(points, ahead=ceil((self.ahead + uses - 1) / each),
                         period=[round(period / each) for period in periods if round(period / each) > 1])
        high = np.repeat(found.high, each)
        self._peaks = [(float(high[use:use + self.ahead].max()), found.method) for use in range(uses)]

    def _holds(self, workers: int, rate: float) -> bool:
        found = self._predict(workers, rate / self._factor)
        return bool(found.p99_s <= self.p99_s and self._busy(workers, rate) <= self.highest)

    def _busy(self, workers: int, rate: float) -> float:
        return float(rate / (self._predict(workers, rate).max_rate * self._factor))


# --- the loop


class Target(Protocol):
    """What can be scaled: a job, or a Spark stream."""

    def work_done(self) -> tuple[float, float, int]: ...  # rows taken in and seconds busy so far; workers

    def scale(self, workers: int) -> None: ...

    def await_end(self, timeout: float) -> bool: ...


@runtime_checkable
class Batched(Protocol):
    """A target that works in batches, which are observed whole, and that says how a model is asked about it."""

    def batches_done(self) -> tuple[float, float, int, float | None, int]:
        """Rows and seconds of the batches so far, and their number; when the last one ended, by `time.monotonic`, and
        the partitions that it had.
        """

    def is_in_batch(self) -> bool: ...

    def configuration(self, workers: int) -> Mapping[str, Any]: ...  # arguments of `Model.predict`

    def most_workers(self) -> int: ...


@runtime_checkable
class WithLatency(Protocol):
    """A target that counts how long rows took: limits in seconds, and the rows below each; the last are beyond all."""

    def latency_counts(self) -> tuple[np.ndarray, np.ndarray]: ...


class Autoscaler:
    """Observes a job at intervals and scales it as a policy decides, until the job ends or `stop()`.

    `decisions` has them all; with `log=`, each is a line of JSON in a file as soon as it is known what it led to.
    """

    def __init__(self, target: Target, policy: Policy, *, every_s: float, least: int, most: int,
                 log: str | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.decisions: list[Decision] = []
        self.observations: list[Observation] = []
        self.error: BaseException | None = None
        self._target, self._policy, self._every_s = target, policy, every_s
        self._least, self._most = least, most
        self._log, self._clock = log, clock
        self._last = (clock(), *target.work_done())  # of a stream: the number of batches in the place of workers
        self._batches, self._longest_s = target if isinstance(target, Batched) else None, 0.0
        if self._batches is not None:
            rows, busy_s, batches, ended_s, _ = self._batches.batches_done()
            self._last = clock() if ended_s is None else ended_s, rows, busy_s, batches
        self._latency = target if isinstance(target, WithLatency) else None
        self._counts = np.zeros(0) if self._latency is None else self._latency.latency_counts()[1]
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scalein-autoscale", daemon=True)

    def start(self) -> Autoscaler:
        self._thread.start()
        return self

    def step(self) -> Decision | None:
        """Observe, decide and scale, once; None if no time has passed, or no batch has ended."""
        seen = self._observed() if self._batches is None else self._observed_batches(self._batches)
        if seen is None:
            return None
        workers = seen.workers
        self.observations = [*self.observations, seen][-HISTORY:]
        if self.decisions:
            self._report(seen)
        decision = self._policy.decide(self.observations, self._least, self._most)
        self.decisions.append(decision)
        if decision.workers != workers:
            self._target.scale(decision.workers)
            _LOG.info("%s", decision)
        return decision

    def _observed(self) -> Observation | None:
        """What the target did since the last look."""
        now, (rows, busy_s, workers) = self._clock(), self._target.work_done()
        before_s, before_rows, before_busy_s, _ = self._last
        passed_s = now - before_s
        if passed_s <= 0:
            return None
        self._last = now, rows, busy_s, workers
        return Observation(now, (rows - before_rows) / passed_s, min(1.0, (busy_s - before_busy_s) / passed_s), workers)

    def _observed_batches(self, target: Batched) -> Observation | None:
        """What whole batches did, from the end of one to the end of another. A target that waits for rows for longer
        than it took before, and than two looks, is idle.
        """
        now, workers, is_running = self._clock(), self._target.work_done()[2], target.is_in_batch()
        rows, busy_s, batches, ended_s, partitions = target.batches_done()
        before_s, before_rows, before_busy_s, before_batches = self._last
        if batches == before_batches or ended_s is None:
            if is_running or now - before_s < 2 * max(self._every_s, self._longest_s):
                return None
            ended_s = now
        self._last = ended_s, rows, busy_s, batches
        passed_s, took_s, count = ended_s - before_s, busy_s - before_busy_s, batches - before_batches
        if passed_s <= 0:
            return None
        if count:
            self._longest_s = max(passed_s / count, self._longest_s / 2)
            if partitions != workers:  # it began before the last decision, and shows nothing of that
                return None
        return Observation(ended_s, (rows - before_rows) / passed_s, min(1.0, took_s / passed_s), workers,
                           took_s / count if count else None)

    def _report(self, seen: Observation) -> None:
        """Complete the decision before with what it led to."""
        last = self.decisions[-1]
        last.realized = {"rate": seen.rate, "utilization": seen.utilization}
        if seen.batch_s is not None:
            last.realized["batch_s"] = seen.batch_s
        if self._latency is not None:
            limits, counts = self._latency.latency_counts()
            rows = np.cumsum(counts - self._counts)
            self._counts = counts
            if rows[-1] > 0:
                place = int(np.searchsorted(rows, 0.99 * rows[-1]))
                last.realized["p99_s"] = float(limits[min(place, len(limits) - 1)])
        if self._log is not None:
            with open(self._log, "a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(last)) + "\n")

    def _run(self) -> None:
        due_s = self._clock()
        try:
            while not self._stopped.is_set():
                due_s += self._every_s  # what deciding takes does not stretch a season, which is so many observations
                while due_s < self._clock():
                    due_s += self._every_s
                if self._target.await_end(max(0.0, due_s - self._clock())):
                    break
                self.step()
        except BaseException as error:
            if not self._target.await_end(0.0):  # a job that ends meanwhile refuses to be scaled
                self.error = error
                _LOG.warning("scaling has ended, the job goes on with the workers that it has: %s", error)

    def stop(self) -> None:
        """Leave the job as it is from now on."""
        self._stopped.set()

    def __repr__(self) -> str:
        last = f", the last: {self.decisions[-1]}" if self.decisions else ""
        return f"Autoscaler({len(self.decisions)} decisions{last})"


def autoscale(job: Target, policy: object, *, p99: object = None, every: object = "5s", least: int = 1,
              most: int | None = None, period: object = None, ahead: object = None,
              log: str | None = None) -> Autoscaler:
    """Scale a running job, or a Spark stream, between `least` and `most` workers (partitions) by a policy or a model.

    A model is asked about the greatest load that a forecast sees within `ahead` (ten times `every` by default); `p99`
    is the latency to hold, `period` the length of the load's season. `most` is the cores that this process has, or
    those of Spark, unless given. A stream is observed from the end of one batch to that of another, and the model is
    asked about its partitions, cores and trigger; give it a trigger, as one without is always busy. `log` names a file
    of JSON lines. `job.autoscale(policy, ...)` is the same.

    >>> import pyarrow as pa, scalein as si
    >>> job = si.from_arrow(pa.table({"x": range(1000)})).filter(si.col("x") > 5).start(sink=si.to_memory())
    >>> scaler = job.autoscale(si.model.DS2(), every="1s", most=2)
    >>> job.wait()
    True
    """
    at = here()
    every_s = _duration_s(every, "every", at)
    batched = job if isinstance(job, Batched) else None
    if most is None and isinstance(least, int):
        most = max(least, granted_cores() if batched is None else batched.most_workers())
    for name, count in (("least", least), ("most", most)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise BadArgument(f"{name} must be a number of workers, at least 1", at=at, found=repr(count))
    assert most is not None
    if least > most:
        raise BadArgument("least must not be above most", at=at, found=f"least={least}, most={most}")
    if isinstance(policy, Policy):
        if p99 is not None or period is not None or ahead is not None:
            raise BadArgument("p99, period and ahead belong to a model: this policy decides by itself", at=at,
                              found=type(policy).__name__)
    elif isinstance(policy, Predicts):
        policy = Predictive(policy, inf if p99 is None else _duration_s(p99, "p99", at),
                            10 if ahead is None else max(1, round(_duration_s(ahead, "ahead", at) / every_s)),
                            () if period is None else max(2, round(_duration_s(period, "period", at) / every_s)),
                            configuration=_as_workers if batched is None else batched.configuration)
        if batched is not None:  # a model that knows nothing of Spark says so here, and not while it scales
            policy._predict(least, 1.0)
    else:
        raise BadArgument("autoscale needs a model or a policy", at=at, found=type(policy).__name__,
                          hint="si.model.profile(flow, sample) gives a model, si.model.DS2() is a policy")
    return Autoscaler(job, policy, every_s=every_s, least=least, most=most, log=log).start()


def _duration_s(value: object, name: str, at: SourceLoc) -> float:
    found = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else (
        span(value, f"duration {name}", at).length * 1e-9)
    if not found > 0:
        raise BadArgument(f"{name} must be a duration above 0", at=at, found=repr(value), hint='"5s", or seconds')
    return found


# --- policies, compared over a series of loads


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a policy did over a series of loads. Rows that were not done at once wait in a backlog."""

    workers: np.ndarray
    backlog: np.ndarray  # rows that wait at the end of each step
    worker_seconds: float
    perfect_worker_seconds: float  # of a plan that knows each load, within the same greatest utilization

    @property
    def saturated_steps(self) -> int:
        """Steps at whose end rows wait."""
        return int((self.backlog > 0).sum())

    @property
    def cost(self) -> float:
        """Worker-seconds over those of the perfect plan."""
        return self.worker_seconds / self.perfect_worker_seconds


def simulate(policy: Policy, loads: Sequence[float] | np.ndarray, max_rates: Mapping[int, float], *,
             step_s: float = 1.0, highest: float = 0.9) -> Simulated:
    """Run a policy over loads (rows a second, one a step); `max_rates` has the greatest rate by number of workers.

    >>> found = simulate(DS2(), [100.0] * 20, {1: 80.0, 2: 160.0})
    >>> int(found.workers[-1]), found.cost
    (2, 0.95)
    """
    rates = np.asarray(loads, float)
    counts = sorted(max_rates)
    workers, waiting, history = counts[0], 0.0, list[Observation]()
    used, backlog = np.zeros(len(rates), int), np.zeros(len(rates))
    for step, rate in enumerate(rates):
        offered = rate + waiting / step_s
        done = min(offered, max_rates[workers])
        waiting = (offered - done) * step_s
        used[step], backlog[step] = workers, waiting
        history = [*history, Observation(step * step_s, done, done / max_rates[workers], workers)][-HISTORY:]
        workers = policy.decide(history, counts[0], counts[-1]).workers
    perfect = sum(next((count for count in counts if max_rates[count] * highest >= rate), counts[-1]) for rate in rates)
    return Simulated(used, backlog, float(used.sum() * step_s), float(perfect * step_s))
