"""Queueing networks: stages with service times, parallelism and branching rates, under a load.

A request enters at the first stage; a stage sends to others, for each request that it handles, so many requests on
average (its branching rates, which may exceed 1). Flows are balanced: the rate of a stage is what enters plus what the
others send. Each stage is a queue G/G/c: arrivals and service have a mean and a squared coefficient of variation (scv:
0 is clockwork, 1 is random, more is bursty). The scv of arrivals follows from those of the stages before, by the linear
equations of Whitt's Queueing Network Analyzer; waiting is that of M/M/c (Erlang's C) times (ca + cs) / 2, the
correction of Allen and Cunneen. Of those that wait, waiting is taken as exponential.

A request's latency is the sum of its visits, one after the other. Its mean and variance are those of the branching
process: branching rates below 1 that sum to at most 1 choose one stage, others are taken one by one, a rate of 2.3 as
two requests and a third with a chance of 0.3. Quantiles are those of a gamma distribution with this mean and variance.
Where stages work for a request side by side, that is an upper bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, inf, isfinite, lgamma, log, sqrt

import numpy as np

from scalein.durations import span
from scalein.errors import BadArgument, SourceLoc, here
from scalein.notebook_card import Card

MAX_VISITS = 1e6  # of a stage by one request: beyond it, a loop that never ends is meant
APPROXIMATION = 1.2  # either way: by so much the equations are wrong besides, of latency
CURVE = (0.05, 0.2, 0.35, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)  # of the greatest rate, for plots
_NS = 1e-9


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage: its service time, how many requests it serves at once, and how much service times vary.

    >>> Stage("orders", service="10ms", workers=4).max_rate
    400.0
    """

    name: str
    service: object  # of a request: seconds, or text like "10ms"
    workers: int = 1
    variability: float = 1.0  # scv of service times
    service_s: float = field(init=False)

    def __post_init__(self) -> None:
        at = here()
        if not isinstance(self.name, str) or not self.name:
            raise BadArgument("a stage has a name", at=at, found=repr(self.name))
        object.__setattr__(self, "service_s", _seconds(self.service, f"service of stage {self.name!r}", at))
        if isinstance(self.workers, bool) or not isinstance(self.workers, int) or self.workers < 1:
            raise BadArgument(f"workers of stage {self.name!r} must be a number, at least 1", at=at,
                              found=repr(self.workers))
        _check_number(self.variability, f"variability of stage {self.name!r}", at)

    @property
    def max_rate(self) -> float:
        """Requests a second that it can serve."""
        return self.workers / self.service_s


@dataclass(frozen=True, slots=True)
class StagePrediction:
    """What a stage does under the load."""

    name: str
    rate: float
    utilization: float
    wait_s: float  # the mean time in its queue
    sojourn_s: float  # in queue and service
    visits: float  # by a request
    queue_length: float  # requests that wait, on average


@dataclass(frozen=True, slots=True)
class NetworkPrediction:
    """What a network does under a load. Times are those of a request from its arrival until all its visits are over."""

    rate: float
    max_rate: float
    bottleneck: str
    saturated: bool
    mean_s: float
    p50_s: float
    p99_s: float
    stages: tuple[StagePrediction, ...]
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # for service times as wrong as expected
    _variance: float = field(repr=False, default=0.0)
    _curve: tuple[float, ...] = field(repr=False, default=())  # p99 by load, up to 95 %

    @property
    def utilization(self) -> float:
        """That of the bottleneck."""
        return self.rate / self.max_rate

    def stage(self, name: str) -> StagePrediction:
        for each in self.stages:
            if each.name == name:
                return each
        names = ", ".join(each.name for each in self.stages)
        raise BadArgument("no such stage", at=here(), found=repr(name), has=names)

    def quantile_s(self, q: float) -> float:
        """The latency that a share `q` of the requests does not exceed."""
        at = here()
        _check_number(q, "a quantile", at)
        if not 0 < q < 1:
            raise BadArgument("a quantile is between 0 and 1", at=at, found=repr(q))
        return gamma_quantile(self.mean_s, self._variance, q)

    def _repr_html_(self) -> str:
        facts = [("greatest rate", f"{self.max_rate:,.0f} requests/s{self._interval('max_rate', _count)}"),
                 ("latency", "grows without end: saturated" if self.saturated else
                  f"p50 {_time(self.p50_s)}, p99 {_time(self.p99_s)}{self._interval('p99_s', _time)}"),
                 ("bottleneck", self.bottleneck),
                 *((each.name, f"{each.utilization:.0%} busy, {each.visits:.3g} visits, waits {_time(each.wait_s)}")
                   for each in self.stages)]
        status = "saturated" if self.saturated else f"{self.utilization:.0%} busy"
        return Card(f"Network at {self.rate:,.0f} requests/s", status, "", facts,
                    "The line is p99 latency by load, up to 95 %." if self._curve else "", self._curve).html

    def _interval(self, name: str, show: Callable[[float], str]) -> str:
        if name not in self.intervals:
            return ""
        low, high = self.intervals[name]
        return f" ({show(low)} to {show(high)})"

    def __str__(self) -> str:
        load = "saturated" if self.saturated else f"p50 {_time(self.p50_s)}, p99 {_time(self.p99_s)}" + (
            self._interval("p99_s", _time))
        lines = [f"{self.rate:,.0f} requests/s of at most {self.max_rate:,.0f} ({self.utilization:.0%}, "
                 f"bottleneck {self.bottleneck}): {load}"]
        width = max(len(each.name) for each in self.stages)
        lines += [f"  {each.name:<{width}}  {each.utilization:>4.0%} busy, {each.visits:.3g} visits, "
                  f"waits {_time(each.wait_s)}" for each in self.stages]
        return "\n".join(lines)


class Network:
    """Stages and the requests that they send to each other.

    >>> shop = Network(
    ...     [Stage("gateway", "2ms", workers=2), Stage("orders", "10ms", workers=4), Stage("db", "3ms", workers=4)],
    ...     routes={"gateway": {"orders": 0.3, "db": 0.7}, "orders": {"db": 2}})
    >>> found = shop.predict(rate=500)
    >>> found.bottleneck, round(found.max_rate), found.saturated
    ('gateway', 1000, False)
    >>> round(found.stage("orders").utilization, 3)
    0.375
    >>> found.p50_s < found.p99_s < shop.predict(rate=900).p99_s
    True
    """

    def __init__(self, stages: Sequence[Stage], routes: Mapping[str, Mapping[str, float]] | None = None,
                 entry: str | None = None) -> None:
        at = here()
        self.stages = tuple(stages)
        if not self.stages or not all(isinstance(each, Stage) for each in self.stages):
            raise BadArgument("a network has stages", at=at, found=repr(stages), hint='Stage("orders", service="10ms")')
        names = [each.name for each in self.stages]
        if len(set(names)) < len(names):
            raise BadArgument("stages have names of their own", at=at, found=", ".join(names))
        self._number = {name: number for number, name in enumerate(names)}
        self.entry = names[0] if entry is None else entry
        self._known(self.entry, "entry", at)
        self._sent = np.zeros((len(names), len(names)))  # by a request of one stage to another
        for source, targets in (routes or {}).items():
            for target, times in targets.items():
                self._known(source, "routes", at)
                self._known(target, "routes", at)
                _check_number(times, f"what {source!r} sends to {target!r}", at)
                self._sent[self._number[source], self._number[target]] = times
        self.visits = self._visits(at)

    def _known(self, name: str, what: str, at: SourceLoc) -> None:
        if name not in self._number:
            raise BadArgument(f"{what} names a stage that there is not", at=at, found=repr(name),
                              has=", ".join(self._number))

    def _visits(self, at: SourceLoc) -> np.ndarray:
        """How often a request visits each stage: what enters, plus what the others send."""
        enters = np.zeros(len(self.stages))
        enters[self._number[self.entry]] = 1.0
        radius = max(abs(np.linalg.eigvals(self._sent)), default=0.0)
        visits = np.full(len(enters), inf)
        if radius < 1:
            visits = np.linalg.solve(np.eye(len(enters)) - self._sent.T, enters)
        if not (visits < MAX_VISITS).all():
            raise BadArgument("requests go around for ever", at=at,
                              hint="the branching rates along a loop must multiply to less than 1")
        unused = [each.name for each, count in zip(self.stages, visits, strict=True) if count == 0]
        if unused:
            raise BadArgument(f"no request gets to {', '.join(unused)}", at=at, found=f"entry {self.entry!r}")
        return visits

    @property
    def max_rate(self) -> float:
        """The greatest rate of requests that all stages can follow."""
        return float(self._limits().min())

    def _limits(self) -> np.ndarray:
        limits: np.ndarray = np.array([each.max_rate for each in self.stages]) / self.visits
        return limits

    def predict(self, rate: float, variability: float = 1.0, spread: float = 0.1) -> NetworkPrediction:
        """What the network does when `rate` requests a second arrive; `variability` is the scv of the times between.

        `intervals` hold the true figures in about nine of ten cases, if all service times are right within `spread`, a
        relative error either way.
        """
        at = here()
        for name, value in (("rate", rate), ("variability", variability), ("spread", spread)):
            _check_number(value, name, at)
        found, best, worst = (self._predict(rate, variability, each) for each in (1.0, 1 / (1 + spread), 1 + spread))
        intervals = {"max_rate": (worst.max_rate, best.max_rate),
                     "utilization": (best.utilization, worst.utilization)}
        for name in ("mean_s", "p50_s", "p99_s"):
            intervals[name] = getattr(best, name) / APPROXIMATION, getattr(worst, name) * APPROXIMATION
        curve = tuple(self._predict(share * found.max_rate, variability).p99_s for share in CURVE)
        return replace(found, intervals=intervals, _curve=curve)

    def _predict(self, rate: float, variability: float, slower: float = 1.0) -> NetworkPrediction:
        """With service times that are longer by a factor."""
        limits = self._limits() / slower
        rates = rate * self.visits
        busy = rate / limits
        saturated = bool(busy.max() >= 1)
        arrivals = self._arrival_scv(rate, busy, variability)
        stages, means, variances = [], [], []
        for number, stage in enumerate(self.stages):
            service_s = stage.service_s * slower
            wait, wait_variance = waiting(float(busy[number]), stage.workers, service_s, float(arrivals[number]),
                                          stage.variability)
            visits = float(self.visits[number])
            stages.append(StagePrediction(stage.name, float(rates[number]), float(busy[number]), wait,
                                          wait + service_s, visits, float(rates[number]) * wait))
            means.append(wait + service_s)
            variances.append(wait_variance + stage.variability * service_s ** 2)
        mean, variance = (inf, inf) if saturated else self._latency(np.array(means), np.array(variances))
        return NetworkPrediction(float(rate), float(limits.min()), self.stages[int(limits.argmin())].name, saturated,
                                 mean, gamma_quantile(mean, variance, 0.5), gamma_quantile(mean, variance, 0.99),
                                 tuple(stages), _variance=variance)

    def _latency(self, means: np.ndarray, variances: np.ndarray) -> tuple[float, float]:
        """Mean and variance of the time that a request takes with all that it causes, from those of single visits."""
        system, entry = np.eye(len(means)) - self._sent, self._number[self.entry]
        whole = np.linalg.solve(system, means)
        chance = self._sent % 1
        chosen = (chance * whole ** 2).sum(axis=1) - (chance * whole).sum(axis=1) ** 2
        independent = (chance * (1 - chance) * whole ** 2).sum(axis=1)
        branches = np.where(chance.sum(axis=1) <= 1 + 1e-9, np.maximum(chosen, 0.0), independent)
        return float(whole[entry]), float(np.linalg.solve(system, variances + branches)[entry])

    def _arrival_scv(self, rate: float, busy: np.ndarray, external: float) -> np.ndarray:
        """The scv of arrivals at each stage, by linear equations: departures mix arrivals and service, branches thin
        them, and merged streams count by their rates.
        """
        count = len(self.stages)
        if rate <= 0:
            return np.ones(count)
        rates = rate * self.visits
        used = np.minimum(busy, 1.0)
        system, constant = np.eye(count), np.zeros(count)
        for to in range(count):
            enters = rate if to == self._number[self.entry] else 0.0
            constant[to] += enters / rates[to] * external
            for source in range(count):
                sent = self._sent[source, to]
                if sent <= 0:
                    continue
                share, stage = sent * rates[source] / rates[to], self.stages[source]
                # Departures: 1 + (1 - u^2)(ca - 1) + u^2 (cs - 1) / sqrt(c), which is a + b * ca. A branch of p < 1 has
                # p * cd + 1 - p; several requests are sent one after the other, which adds nothing.
                chance = min(sent, 1.0)
                factor = 1 - used[source] ** 2
                fixed = 1 - factor + used[source] ** 2 * (max(stage.variability, 0.2) - 1) / sqrt(stage.workers)
                constant[to] += share * (chance * fixed + 1 - chance)
                system[to, source] -= share * chance * factor
        found = np.linalg.solve(system, constant)
        return np.where(np.isfinite(found) & (found >= 0), found, 1.0)


def waiting(busy: float, workers: int, service_s: float, arrival_scv: float, service_scv: float) -> tuple[float, float]:
    """Mean and variance of the time in the queue of a G/G/c; infinite where it is saturated.

    >>> waiting(0.5, 1, 1.0, 1.0, 1.0)  # M/M/1: rho / (mu - lambda)
    (1.0, 3.0)
    """
    if busy >= 1:
        return inf, inf
    if busy <= 0:
        return 0.0, 0.0
    waits = erlang_c(busy * workers, workers)
    mean = (arrival_scv + service_scv) / 2 * service_s / (workers * (1 - busy))  # of those that wait
    return waits * mean, waits * 2 * mean ** 2 - (waits * mean) ** 2


def erlang_c(load: float, workers: int) -> float:
    """The probability that an arrival waits, in an M/M/c with a load of `load` busy workers.

    >>> round(erlang_c(2.0, 3), 4)
    0.4444
    """
    blocked = 1.0  # Erlang's B by its recursion, which does not overflow
    for count in range(1, workers + 1):
        blocked = load * blocked / (count + load * blocked)
    return blocked / (1 - load / workers * (1 - blocked))


def gamma_quantile(mean: float, variance: float, q: float) -> float:
    """A quantile of the gamma distribution with this mean and variance.

    >>> round(gamma_quantile(1.0, 1.0, 0.99), 4)  # the exponential one: -ln(0.01)
    4.6052
    """
    if not isfinite(mean) or not isfinite(variance):
        return inf
    if mean <= 0 or variance <= mean ** 2 * 1e-12:
        return mean
    shape, scale = mean ** 2 / variance, variance / mean
    low, high = -700.0, log(shape + 10 * sqrt(shape) + 10)  # of its logarithm: quantiles of small shapes are tiny
    while _gamma_share(shape, exp(high)) < q:
        high += 1
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _gamma_share(shape, exp(middle)) < q else (low, middle)
    return scale * exp((low + high) / 2)


def _gamma_share(shape: float, x: float) -> float:
    """The regularized lower incomplete gamma function: a series below shape + 1, Lentz's continued fraction above."""
    if x <= 0:
        return 0.0
    front = exp(shape * log(x) - x - lgamma(shape))
    if x < shape + 1:
        term = total = 1 / shape
        number = shape
        while term > total * 1e-15:
            number += 1
            term *= x / number
            total += term
        return min(1.0, front * total)
    b = x + 1 - shape
    c, d = 1e300, 1 / b
    found = d
    for number in range(1, 10_000):
        a = -number * (number - shape)
        b += 2
        d = 1 / (a * d + b or 1e-300)
        c = b + a / c or 1e-300
        step = c * d
        found *= step
        if abs(step - 1) < 1e-14:
            break
    return max(0.0, 1 - front * found)


def _seconds(value: object, what: str, at: SourceLoc) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        _check_number(value, what, at)
        found = float(value)
    else:
        found = span(value, what, at).length * _NS
    if found <= 0:
        raise BadArgument(f"{what} must be more than 0", at=at, found=repr(value))
    return found


def _check_number(value: object, what: str, at: SourceLoc) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not isfinite(value) or value < 0:
        raise BadArgument(f"{what} must be a number, at least 0", at=at, found=repr(value))


def _count(number: float) -> str:
    return f"{number:,.0f}"


def _time(seconds: float) -> str:
    if not isfinite(seconds):
        return "for ever"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / _NS:.3g} ns"
