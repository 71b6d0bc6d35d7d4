"""Flows on many machines, on paper: how many are needed, what limits them, what breaks first, and a simulation.

A `Cluster` knows what a row takes (`Footprint`, from a model, a `Network`, or figures), and what a `Machine` offers.
`predict` and `need` are formulas: each resource (cores, bandwidths, the heaviest key group, checkpoints, what failures
cost) has a utilization a + b * rate for a number of machines. Latency is that of the hottest machine as a G/G/c of
batches of rows; to it failures add the rows that wait for a restart.

`simulate` runs the same assumptions over time: rows arrive at random, machines fail and come back, a policy adds and
removes machines. It goes step by step, with vectors of machines: what arrives in a step is Poisson, and what is done is
Poisson with the cores that have a batch to work on, which for short steps is an M/M/c, and for long ones a fluid.

Known limits: failures are independent of each other (no racks), machines are alike (no stragglers), and when machines
are added the rows that wait are divided anew by the shares of the machines, not by key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil, inf, isfinite
from typing import Any

import numpy as np

from scalein.durations import span
from scalein.errors import BadArgument, SourceLoc, here
from scalein.model.autoscale import HISTORY, Observation, Policy, Predicts
from scalein.model.model import Model
from scalein.model.network import Network, gamma_quantile, waiting
from scalein.options import parse_size
from scalein.state.key_groups import KEY_GROUPS

MOST_MACHINES = 100_000  # that `need` looks for
HEAVY_KEYS = 1 << 17  # keys that are placed one by one; the many light ones beyond them spread as sums of many do
_LATENCIES = np.geomspace(1e-6, 1e7, 1200)  # s: upper bounds of the classes in which latencies are counted
_CLASS = float(np.log(_LATENCIES[1] / _LATENCIES[0]))  # 2.5 % wide
_FACTOR = 1000.0  # a figure that may be so much worse is not what breaks
_BYTES = ("memory bandwidth", "network in", "network out", "memory", "checkpoints")  # resources but cores


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a flow asks of machines, for each row, and what its state needs.

    >>> Footprint(core_rate=2e6, row_bytes=40, state_bytes="64GB", checkpoint_bytes="2GB").state_size
    64000000000
    """

    core_rate: float  # rows a second that one core does
    row_bytes: float = 0.0  # of a row as it arrives over the network
    touched_bytes: float = 0.0  # moved between memory and cores for a row
    shuffled_bytes: float = 0.0  # sent to the machine of its key, for a row; after partial aggregation, less
    output_bytes: float = 0.0  # of results, for a row
    state_bytes: object = 0  # of all keys together: a number, or text like "64GB"
    checkpoint_bytes: object = None  # written by each checkpoint, all machines together; all of the state unless given
    keyed: float = 1.0  # the share of the work that is done where the key is: 0 where partial groups are made before
    recovery_rate: float = 0.5e9  # bytes of state a second that one machine reads back after a failure
    state_size: int = field(init=False)
    checkpoint_size: int = field(init=False)

    def __post_init__(self) -> None:
        at = here()
        for name in ("core_rate", "recovery_rate"):
            _number(getattr(self, name), name, at, above_0=True)
        for name in ("row_bytes", "touched_bytes", "shuffled_bytes", "output_bytes"):
            _number(getattr(self, name), name, at)
        _share(self.keyed, "keyed", at)
        object.__setattr__(self, "state_size", _size(self.state_bytes, "state_bytes", at))
        written = self.state_bytes if self.checkpoint_bytes is None else self.checkpoint_bytes
        object.__setattr__(self, "checkpoint_size", _size(written, "checkpoint_bytes", at))

    @classmethod
    def of(cls, model: object, *, workers: int = 1, keys: int | None = None, **figures: object) -> Footprint:
        """That of a model, as far as it knows it; all other figures, and better ones, are given by name.

        Of the model of a flow: the rate of a worker in jobs with so many `workers` (a machine may run several jobs),
        the bytes of a row in the columns that are read, and between memory and core, and the state of `keys` keys. Of
        a `Network`, a row is a request, and a core's rate the inverse of all the service that it causes.

        >>> from scalein.model import Network, Stage
        >>> shop = Network([Stage("web", "2ms"), Stage("db", "1ms")], routes={"web": {"db": 3}})
        >>> Footprint.of(shop, row_bytes=500).core_rate
        200.0
        """
        found: dict[str, Any] = {}
        if isinstance(model, Network):
            found["core_rate"] = 1 / sum(float(visits) * stage.service_s
                                         for visits, stage in zip(model.visits, model.stages, strict=True))
        elif isinstance(model, Model):
            job = model.predict(workers=workers, keys=keys)
            touched = sum(each.rows * each.cost.bytes for each in model.costs.stages)
            found = {"core_rate": job.max_rate / workers, "row_bytes": model.costs.bytes, "touched_bytes": touched,
                     "state_bytes": job.state_bytes}
        elif isinstance(model, Predicts):
            found["core_rate"] = float(model.predict(workers=workers, rate=0.0).max_rate) / workers
        else:
            raise BadArgument("a footprint is that of a model or a network", at=here(), found=type(model).__name__,
                              hint="si.model.profile(flow, sample) gives one, Footprint(core_rate=1e6) takes figures")
        return cls(**{**found, **figures})


@dataclass(frozen=True, slots=True)
class Machine:
    """What a machine offers; rates in bytes a second, those of networks in each direction.

    >>> Machine(cores=32, memory="256GB", network_rate=12.5e9, mtbf="90d").mtbf_s
    7776000.0
    """

    cores: int = 16
    memory: object = "64GB"
    memory_rate: float = 50e9
    network_rate: float = 1.25e9
    disk_rate: float = 1e9
    mtbf: object = "90d"  # mean time between its failures; None if it has none
    memory_size: int = field(init=False)
    mtbf_s: float = field(init=False)

    def __post_init__(self) -> None:
        at = here()
        if isinstance(self.cores, bool) or not isinstance(self.cores, int) or self.cores < 1:
            raise BadArgument("cores must be a number, at least 1", at=at, found=repr(self.cores))
        for name in ("memory_rate", "network_rate", "disk_rate"):
            _number(getattr(self, name), name, at, above_0=True)
        object.__setattr__(self, "memory_size", _size(self.memory, "memory", at))
        object.__setattr__(self, "mtbf_s", inf if self.mtbf is None else _seconds(self.mtbf, "mtbf", at))


@dataclass(frozen=True, slots=True)
class ClusterPrediction:
    """What so many machines do under a load. Utilizations above 1 say by how much a resource is too small."""

    machines: int
    rate: float
    max_rate: float
    bottleneck: str
    saturated: bool
    p50_s: float
    p99_s: float
    resources: dict[str, float]  # utilization of each
    outage_s: float  # from the failure of a machine until its rows are processed again
    behind_s: float  # of work that is done late after it: the outage, and what is done again since the last checkpoint
    failures_a_day: float
    late_share: float  # of rows that wait for a restart, or for what it has left to do

    @property
    def utilization(self) -> float:
        """That of the bottleneck."""
        return self.resources[self.bottleneck]

    def __str__(self) -> str:
        load = "saturated" if self.saturated else f"p50 {self.p50_s:.3g} s, p99 {self.p99_s:.3g} s"
        lines = [f"{self.machines:,} machines, {self.rate:,.0f} rows/s of at most {self.max_rate:,.0f} "
                 f"(bottleneck {self.bottleneck}): {load}"]
        lines += [f"  {name:<16} {used:>5.0%}" for name, used in self.resources.items()]
        lines.append(f"  {self.failures_a_day:.3g} failures a day, {self.outage_s:.3g} s each; "
                     f"{self.late_share:.2g} of all rows are late by them")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Break:
    """A figure of the plan, and the value at which the planned machines no longer hold, all others as planned."""

    figure: str
    planned: float
    breaking: float
    resource: str  # that is too small then

    @property
    def factor(self) -> float:
        """How far away: the greater of the two values over the less; of skew, the difference and 1."""
        if self.figure in ("skew", "keyed"):
            return 1 + self.breaking - self.planned
        return max(self.breaking / self.planned, self.planned / self.breaking)


@dataclass(frozen=True, slots=True)
class Need:
    """The fewest machines that hold a rate, by resource, and what would break first."""

    machines: int
    cores: int
    log_machines: int  # that the replicated log needs from which rows are read, and read again after a failure
    log_bytes: float  # kept in it
    by_resource: dict[str, float]  # machines that each resource alone needs; infinite where no number is enough
    prediction: ClusterPrediction
    breaks: tuple[Break, ...]  # nearest first

    def __str__(self) -> str:
        lines = [f"{self.machines:,} machines ({self.cores:,} cores) for {self.prediction.rate:,.0f} rows/s, and "
                 f"{self.log_machines:,} for the log, which keeps {self.log_bytes / 1e12:,.1f} TB"]
        lines += [f"  {name:<16} {count:>9,.0f}" for name, count in self.by_resource.items()]
        lines += [f"  breaks at {each.figure} {each.breaking:.4g} in place of {each.planned:.4g}: {each.resource}"
                  for each in self.breaks[:3]]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class ClusterRun:
    """A simulation, by step: rows that arrived, were done and wait, latency of what arrives, machines that are paid."""

    step_s: float
    arrived: np.ndarray
    done: np.ndarray  # rows that were done again after failures included
    waiting: np.ndarray
    p50_s: np.ndarray
    p99_s: np.ndarray
    machines: np.ndarray
    down: np.ndarray  # machines that wait for their restart
    failures: int
    perfect_machine_s: float  # of a plan that knows each load, within the same greatest utilization
    _latencies: np.ndarray = field(repr=False)  # rows by class of waiting time

    @property
    def machine_s(self) -> float:
        return float(self.machines.sum() * self.step_s)

    @property
    def cost(self) -> float:
        """Machine-seconds over those of the perfect plan."""
        return self.machine_s / self.perfect_machine_s

    def quantile_s(self, q: float) -> float:
        """The latency that a share `q` of all rows does not exceed."""
        _share(q, "a quantile", here())
        return _quantile(self._latencies, q)

    def late_share(self, after: object) -> float:
        """The share of all rows that take longer than `after`."""
        bound = np.searchsorted(_LATENCIES, _seconds(after, "after", here()), side="right")
        return float(self._latencies[bound:].sum() / max(self._latencies.sum(), 1e-300))

    def __str__(self) -> str:
        return (f"{len(self.arrived) * self.step_s:,.0f} s, {self.arrived.sum():,.0f} rows, {self.failures} failures: "
                f"p50 {self.quantile_s(0.5):.3g} s, p99 {self.quantile_s(0.99):.3g} s, "
                f"{self.machine_s:,.0f} machine-seconds ({self.cost:.2f} of a perfect plan)")


@dataclass(frozen=True)
class Cluster:
    """Machines that run a flow on parts of the rows, each with the state of its key groups.

    `skew` is the exponent of Zipf's law for the keys' rows, 0 where all keys have as many. `restarts="machine"` says
    that after a failure only the rows of that machine wait, `"all"` that all machines go back to the last checkpoint.
    `catch_up` is how long it may take until what has waited is done. Rows come in `batch_rows`, at random times.

    >>> flow = Footprint(core_rate=4e6, row_bytes=40, state_bytes="2TB", checkpoint_bytes="50GB", keyed=0.2)
    >>> cluster = Cluster(flow, Machine(cores=16, network_rate=3e9), keys=10**8, skew=0.8)
    >>> need = cluster.need(rate=1e9)
    >>> need.prediction.bottleneck, need.machines == round(max(need.by_resource.values()))
    ('memory', True)
    >>> cluster.predict(workers=need.machines, rate=1e9).saturated
    False
    """

    footprint: Footprint
    machine: Machine = field(default_factory=Machine)
    keys: int = 0  # 0: rows have no keys, or so many that no key matters
    skew: float = 0.0
    groups: int = KEY_GROUPS  # of keys: a group is on one machine, and worked on by one core at a time
    every: object = "10s"  # between two checkpoints
    detect: object = "10s"  # until a failure is noticed
    restart: object = "10s"  # until another machine has taken its place
    restarts: str = "machine"
    catch_up: object = "5m"
    batch_rows: int = 10_000
    log_replicas: int = 3
    retention: object = "1h"  # of the log
    seed: int = 0
    every_s: float = field(init=False)
    detect_s: float = field(init=False)
    restart_s: float = field(init=False)
    catch_up_s: float = field(init=False)
    retention_s: float = field(init=False)

    def __post_init__(self) -> None:
        at = here()
        if not isinstance(self.footprint, Footprint) or not isinstance(self.machine, Machine):
            found = f"{type(self.footprint).__name__}, {type(self.machine).__name__}"
            raise BadArgument("a cluster has a footprint and a machine", at=at, found=found, hint="Footprint.of(model)")
        for name, least in (("keys", 0), ("groups", 1), ("batch_rows", 1), ("log_replicas", 0), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise BadArgument(f"{name} must be a number, at least {least}", at=at, found=repr(value))
        _number(self.skew, "skew", at)
        if self.restarts not in ("machine", "all"):
            raise BadArgument('restarts is "machine" or "all"', at=at, found=repr(self.restarts))
        for name in ("every", "detect", "restart", "catch_up", "retention"):
            object.__setattr__(self, f"{name}_s", _seconds(getattr(self, name), name, at))

    # --- formulas

    def predict(self, workers: int, rate: float = 0.0) -> ClusterPrediction:
        """What so many machines do under a load: a cluster is a model, whose workers are machines."""
        at = here()
        _number(rate, "rate", at)
        _count(workers, "workers", at)
        names, fixed, per_row = self._resources(workers)
        used = fixed + per_row * rate
        limits = _limits(fixed, per_row)
        outage_s = self._outage_s(workers)
        busy = float(used[0])
        behind_s = outage_s + self.every_s
        failing = workers if self.restarts == "all" else 1
        catching_up_s = behind_s * busy / (1 - busy) if busy < 1 else inf
        late = min(1.0, failing * (outage_s + catching_up_s) / self.machine.mtbf_s) if rate else 0.0
        saturated = bool((used >= 1).any())
        p50_s, p99_s = (inf, inf) if saturated else self._latency(workers, rate, busy, late, behind_s)
        found = int(limits.argmin()) if isfinite(limits.min()) else int(used.argmax())
        return ClusterPrediction(
            workers, float(rate), float(limits.min()), names[found], saturated, p50_s, p99_s,
            dict(zip(names, map(float, used), strict=True)), outage_s, behind_s,
            workers * 86_400 / self.machine.mtbf_s, late)

    def _resources(self, machines: int) -> tuple[list[str], np.ndarray, np.ndarray]:
        """For each resource its utilization without rows, and what a row a second adds to it."""
        flow, machine = self.footprint, self.machine
        hottest, heaviest = _greatest_shares(*self._keys, machines)
        others = 1 - 1 / machines
        checkpoint_rate = flow.checkpoint_size / self.every_s / machines
        core = hottest / (machine.cores * flow.core_rate)
        found: list[tuple[str, float, float]] = [
            ("cores", 0.0, core),
            ("one key group", 0.0, heaviest / flow.core_rate),
            ("memory bandwidth", 0.0, flow.touched_bytes * hottest / machine.memory_rate),
            ("network in", 0.0,
             (flow.row_bytes / machines + flow.shuffled_bytes * hottest * others) / machine.network_rate),
            ("network out", checkpoint_rate / machine.network_rate,
             (flow.shuffled_bytes * others + flow.output_bytes) / machines / machine.network_rate),
            ("memory", flow.state_size / machines / machine.memory_size, 0.0),
            ("checkpoints", checkpoint_rate / machine.disk_rate, 0.0),
        ]
        if isfinite(machine.mtbf_s):
            behind_s = self._outage_s(machines) + self.every_s
            failing = machines if self.restarts == "all" else 1
            found += [("catching up", 0.0, core * (self.catch_up_s + behind_s) / self.catch_up_s),
                      ("failures", failing * behind_s / machine.mtbf_s, core)]
        names, fixed, per_row = zip(*found, strict=True)
        return list(names), np.array(fixed), np.array(per_row)

    def _outage_s(self, machines: int) -> float:
        """A failure noticed, a machine in place of it, and its state read back."""
        state_s = self.footprint.state_size / machines / self.footprint.recovery_rate
        return self.detect_s + self.restart_s + state_s

    def _latency(self, machines: int, rate: float, busy: float, late: float,
                 behind_s: float) -> tuple[float, float]:
        """p50 and p99: queueing for the cores of the hottest machine, and rows that wait for a restart."""
        service_s = self.batch_rows / self.footprint.core_rate
        wait_s, variance = waiting(busy, self.machine.cores, service_s, 1.0, 1.0)
        found = [gamma_quantile(wait_s + service_s, variance + service_s ** 2, q) for q in (0.5, 0.99)]
        # Rows that wait for a restart do so for any time up to all of it.
        return found[0], max(found[1], behind_s * (1 - 0.01 / late)) if late > 0.01 else found[1]

    @property
    def _keys(self) -> tuple[int, float, int, int, float]:
        """What the shares of machines depend on."""
        return self.keys, float(self.skew), self.groups, self.seed, float(self.footprint.keyed)

    def need(self, rate: float, *, highest: float = 0.7) -> Need:
        """The fewest machines whose resources are used up to `highest` at this rate, and what breaks first.

        What failures take may be all that there is: there it is 1 in place of `highest`.
        """
        at = here()
        _number(rate, "rate", at, above_0=True)
        _share(highest, "highest", at)
        names = self._resources(1)[0]
        allowed = np.array([1.0 if name in ("catching up", "failures") else highest for name in names]) + 1e-12

        def held(machines: int) -> np.ndarray:
            """By resource, and at last by all together."""
            _, fixed, per_row = self._resources(machines)
            found = fixed + per_row * rate <= allowed
            return np.append(found, found.all())

        fewest = _fewest(held)
        if not fewest[-1]:
            _, fixed, per_row = self._resources(self.groups)
            wrong = [name for name, count in zip(names, fewest, strict=False) if not count]
            raise BadArgument(f"no number of machines holds {rate:,.0f} rows/s", at=at,
                              found=f"too small whatever their number: {', '.join(wrong) or 'failures with cores'}",
                              has=f"{self.groups} machines would do {highest * _limits(fixed, per_row).min():,.0f}",
                              hint="more key groups or less keyed work; checkpoints more often, or restarts='machine'")
        machines = fewest[-1]
        by_resource = dict(zip(names, map(float, fewest), strict=False))
        ingest = rate * self.footprint.row_bytes
        log = max(ingest * self.log_replicas / self.machine.disk_rate, ingest * self.log_replicas
                  / self.machine.network_rate) / highest
        prediction = self.predict(machines, rate)
        binding = max(by_resource, key=by_resource.__getitem__)
        return Need(machines, machines * self.machine.cores, ceil(log), ingest * self.log_replicas * self.retention_s,
                    by_resource, replace(prediction, bottleneck=binding), self._breaks(machines, rate))

    def _breaks(self, machines: int, rate: float) -> tuple[Break, ...]:
        """Each figure made worse until the machines are saturated; those that never do so are left out."""
        found = []
        for figure, planned, worse in self._figures(rate):
            def used(factor: float, worse: Callable[[float], tuple[Cluster, float]] = worse) -> tuple[float, str]:
                cluster, load = worse(factor)
                names, fixed, per_row = cluster._resources(machines)
                busy = fixed + per_row * load
                return float(busy.max()), names[int(busy.argmax())]

            low, high = 1.0, _FACTOR
            if used(high)[0] < 1:
                continue
            for _ in range(30):
                middle = (low * high) ** 0.5
                low, high = (middle, high) if used(middle)[0] < 1 else (low, middle)
            cluster, load = worse(high)
            value = load if figure == "rate" else _figure(cluster, figure)
            found.append(Break(figure, planned, value, used(high)[1]))
        return tuple(sorted(found, key=lambda each: each.factor))

    def _figures(self, rate: float) -> list[tuple[str, float, Callable[[float], tuple[Cluster, float]]]]:
        """The figures that matter, as planned, and the cluster and load where one is worse by a factor."""
        def flow(name: str, up: bool) -> Callable[[float], tuple[Cluster, float]]:
            def changed(by: float) -> tuple[Cluster, float]:
                worse: Any = {name: _scaled(_figure(self, name), by if up else 1 / by, name)}
                return replace(self, footprint=replace(self.footprint, **worse)), rate
            return changed

        def machine(name: str) -> Callable[[float], tuple[Cluster, float]]:
            def changed(by: float) -> tuple[Cluster, float]:
                worse: Any = {name: _scaled(_figure(self, name), 1 / by, name)}
                return replace(self, machine=replace(self.machine, **worse)), rate
            return changed

        found: list[tuple[str, float, Callable[[float], tuple[Cluster, float]]]] = [
            ("rate", rate, lambda by: (self, rate * by))]
        for name in ("row_bytes", "touched_bytes", "shuffled_bytes", "output_bytes", "state_bytes",
                     "checkpoint_bytes"):
            found.append((name, _figure(self, name), flow(name, True)))
        for name in ("core_rate", "recovery_rate"):
            found.append((name, _figure(self, name), flow(name, False)))
        for name in ("memory", "memory_rate", "network_rate", "disk_rate", "mtbf"):
            found.append((name, _figure(self, name), machine(name)))
        found = [each for each in found if 0 < each[1] < inf]
        if self.keys and self.footprint.keyed:
            found.append(("skew", self.skew,
                          lambda by: (replace(self, skew=self.skew + (by - 1) / _FACTOR * 2), rate)))
        return found

    # --- simulation

    def simulate(self, loads: Sequence[float] | np.ndarray, machines: int, *, step: object = "1s",
                 policy: Policy | None = None, decide: object = "30s", least: int = 1, most: int | None = None,
                 boot: object = "60s", failures: bool = True, highest: float = 0.9) -> ClusterRun:
        """Run these loads (rows a second, one a step). A policy decides how many machines there are.

        More machines work `boot` after the decision, and are paid from then on; all wait for a `restart` when their
        number changes.

        >>> cluster = Cluster(Footprint(core_rate=1e6), Machine(cores=8), batch_rows=1_000)
        >>> found = cluster.simulate([2e7] * 100, machines=4, failures=False)
        >>> bool(abs(found.done.sum() / 2e9 - 1) < 0.01), bool(found.waiting[-1] < 1e5)
        (True, True)
        """
        at = here()
        rates = np.asarray(loads, float)
        if rates.ndim != 1 or not len(rates) or not (np.isfinite(rates) & (rates >= 0)).all():
            raise BadArgument("loads are rows a second, one a step", at=at, found=repr(loads)[:60])
        _count(machines, "machines", at)
        _count(least, "least", at)
        most = max(machines, least) if most is None else most
        _count(most, "most", at)
        simulation = _Simulation(self, machines, _seconds(step, "step", at), failures)
        scaling = None if policy is None else _Scaling(
            policy, simulation, _seconds(decide, "decide", at), _seconds(boot, "boot", at), least, most)
        for rate in rates:
            simulation.advance(float(rate))
            if scaling is not None:
                scaling.advance()
        return simulation.result(self._perfect_machine_s(rates, least, most, highest) * simulation.step_s)

    def _perfect_machine_s(self, rates: np.ndarray, least: int, most: int, highest: float) -> float:
        """Machines, summed over the steps, of a plan that always has the fewest that hold."""
        counts = np.unique(np.geomspace(least, most, 400).round().astype(int)) if most - least > 2_000 else (
            np.arange(least, most + 1))
        greatest = np.array([_limits(*self._resources(int(count))[1:]).min() for count in counts]) * highest
        places = np.searchsorted(np.maximum.accumulate(greatest), rates)
        return float(counts[np.minimum(places, len(counts) - 1)].sum())


class _Simulation:
    """The machines at a moment: what waits at each, what it has done since its checkpoint, until when it is down."""

    def __init__(self, cluster: Cluster, machines: int, step_s: float, failures: bool) -> None:
        self.cluster, self.step_s, self.now_s = cluster, step_s, 0.0
        self._dice = np.random.default_rng(cluster.seed)
        mtbf_s = cluster.machine.mtbf_s if failures else inf
        self._fails = -np.expm1(-step_s / mtbf_s)  # within a step
        self._next_checkpoint_s = cluster.every_s
        self.failures, self.paid = 0, machines
        self._steps: list[tuple[float, float, float, float, float, int, int]] = []
        self._latencies = np.zeros(len(_LATENCIES) + 1)
        self._waiting, self._since, self._until_s = (np.zeros(machines) for _ in range(3))
        self._place()

    @property
    def machines(self) -> int:
        return len(self._waiting)

    def _place(self) -> None:
        """Shares of the work, and batches a second that each machine can do, for this number of machines."""
        cluster, flow = self.cluster, self.cluster.footprint
        self._shares, groups = machine_shares(*cluster._keys, self.machines)
        names, fixed, per_row = cluster._resources(self.machines)
        bytes_only = _limits(fixed, per_row)[[name in _BYTES for name in names]].min()
        cores = np.minimum(cluster.machine.cores, np.divide(self._shares, groups, out=np.full(self.machines, inf),
                                                            where=groups > 0))
        self._core_batches = flow.core_rate / cluster.batch_rows
        self._cores = np.minimum(cores, max(0.0, bytes_only) / self.machines / flow.core_rate)

    def scale(self, machines: int) -> None:
        """Divide what waits, and what would be done again, by the new shares; all machines wait for a restart."""
        waiting, since, until_s = self._waiting.sum(), self._since.sum(), self._until_s
        self._waiting = np.empty(machines)
        self._place()
        self._waiting, self._since = waiting * self._shares, since * self._shares
        self._until_s = np.full(machines, self.now_s + self.cluster.restart_s)
        kept = min(machines, len(until_s))
        self._until_s[:kept] = np.maximum(self._until_s[:kept], until_s[:kept])

    def advance(self, rate: float) -> None:
        """One step: failures, rows that arrive, rows that are done, a checkpoint."""
        cluster = self.cluster
        self._fail()
        self.now_s += self.step_s
        batches = rate * self.step_s / cluster.batch_rows
        arrived = self._dice.poisson(batches * self._shares).astype(float)
        self._waiting += arrived
        # The share of the step in which a machine was up.
        up = np.clip((self.now_s - self._until_s) / self.step_s, 0.0, 1.0)
        busy = np.minimum(self._waiting, self._cores) * up
        done = np.minimum(self._waiting, self._dice.poisson(busy * self._core_batches * self.step_s))
        self._waiting -= done
        self._since += done
        is_up = self._until_s <= self.now_s
        if self.now_s >= self._next_checkpoint_s:
            self._next_checkpoint_s += cluster.every_s
            self._since[is_up] = 0.0
        self._record(arrived.sum(), done.sum(), ~is_up)

    def _fail(self) -> None:
        """Who fails does again what it did since its last checkpoint, after an outage."""
        if not self._fails:
            return
        fails = (self._until_s <= self.now_s) & (self._dice.random(self.machines) < self._fails)
        count = int(fails.sum())
        if count:
            self.failures += count
            if self.cluster.restarts == "all":
                fails[:] = True
            self._until_s[fails] = self.now_s + self.cluster._outage_s(self.machines)
            self._waiting[fails] += self._since[fails]
            self._since[fails] = 0.0

    def _record(self, arrived: float, done: float, is_down: np.ndarray) -> None:
        """Latency of a row that arrives now: what is left of an outage, what waits before it, and itself."""
        rate = np.maximum(self._cores, 1e-12) * self._core_batches
        beyond = np.maximum(self._waiting - self._cores + 1, 0.0)  # batches that must end before a core is free
        latency = np.maximum(self._until_s - self.now_s, 0.0) + beyond / rate + 1 / self._core_batches
        classes = np.clip(np.ceil(np.log(latency / _LATENCIES[0]) / _CLASS), 0, len(_LATENCIES)).astype(int)
        counts = np.bincount(classes, weights=self._shares, minlength=len(_LATENCIES) + 1)
        self._latencies += counts * arrived
        rows = self.cluster.batch_rows
        self._steps.append((arrived * rows, done * rows, float(self._waiting.sum()) * rows, _quantile(counts, 0.5),
                            _quantile(counts, 0.99), max(self.paid, self.machines), int(is_down.sum())))

    def observe(self, steps: int) -> Observation:
        """The last steps, as a scheduler sees them: rows that were done, and how busy the machines were."""
        last = self._steps[-steps:]
        rate = sum(each[1] for each in last) / (len(last) * self.step_s)
        able = float((self._cores * (self._until_s <= self.now_s)).sum()) * self.cluster.footprint.core_rate
        return Observation(self.now_s, rate, min(1.0, rate / able) if able else 1.0, self.machines)

    def result(self, perfect_machine_s: float) -> ClusterRun:
        arrived, done, waiting, p50_s, p99_s, machines, down = map(np.array, zip(*self._steps, strict=True))
        return ClusterRun(self.step_s, arrived, done, waiting, p50_s, p99_s, machines, down, self.failures,
                          perfect_machine_s, self._latencies)


class _Scaling:
    """A policy that observes the machines at intervals; machines that it adds work when they have started."""

    def __init__(self, policy: Policy, simulation: _Simulation, decide_s: float, boot_s: float, least: int,
                 most: int) -> None:
        self._policy, self._simulation, self._boot_s = policy, simulation, boot_s
        self._least, self._most = least, most
        self._steps = max(1, round(decide_s / simulation.step_s))
        self._count, self._wanted, self._from_s = 0, simulation.machines, 0.0
        self._history: list[Observation] = []

    def advance(self) -> None:
        simulation = self._simulation
        self._count += 1
        if self._count % self._steps == 0:
            self._history = [*self._history, simulation.observe(self._steps)][-HISTORY:]
            wanted = self._policy.decide(self._history, self._least, self._most).workers
            if wanted != self._wanted:
                self._wanted = wanted
                self._from_s = simulation.now_s + (self._boot_s if wanted > simulation.machines else 0.0)
            simulation.paid = self._wanted
        if self._wanted != simulation.machines and simulation.now_s >= self._from_s:
            simulation.scale(self._wanted)


# --- shares of keys, groups and machines


@lru_cache(maxsize=64)
def key_group_shares(keys: int, skew: float, groups: int, seed: int) -> np.ndarray:
    """The share of rows of each group, where keys are hashed to groups and their rows follow Zipf's law.

    >>> key_group_shares(0, 0.0, 4, 0).tolist()
    [0.25, 0.25, 0.25, 0.25]
    """
    if not keys:
        return np.full(groups, 1 / groups)
    dice = np.random.default_rng([seed, 1])
    heavy = min(keys, HEAVY_KEYS)
    weights = np.arange(1, heavy + 1, dtype=float) ** -skew
    found = np.bincount(dice.integers(0, groups, heavy), weights=weights, minlength=groups)
    light = _power_sum(heavy, keys, skew)
    deviation = (_power_sum(heavy, keys, 2 * skew) / groups) ** 0.5
    found = np.maximum(found + light / groups + deviation * dice.standard_normal(groups), 0.0)
    shares: np.ndarray = found / found.sum()
    return shares


def _power_sum(first: int, last: int, exponent: float) -> float:
    """The sum of k ** -exponent for first < k <= last, by the midpoint rule; exact enough beyond the first 1000."""
    low, high = first + 0.5, last + 0.5
    if high <= low:
        return 0.0
    if abs(exponent - 1) < 1e-9:
        return float(np.log(high / low))
    return float((high ** (1 - exponent) - low ** (1 - exponent)) / (1 - exponent))


@lru_cache(maxsize=1 << 16)
def _greatest_shares(keys: int, skew: float, groups: int, seed: int, keyed: float,
                     machines: int) -> tuple[float, float]:
    """The share of the work of the hottest machine, and of the heaviest key group."""
    shares, heaviest = machine_shares(keys, skew, groups, seed, keyed, machines)
    return float(shares.max()), float(heaviest.max())


def machine_shares(keys: int, skew: float, groups: int, seed: int, keyed: float,
                   machines: int) -> tuple[np.ndarray, np.ndarray]:
    """The share of the work of each machine, and of its heaviest key group, which one core at a time works on.

    Each machine has a range of the groups, all of (nearly) equal size.

    >>> [each.tolist() for each in machine_shares(0, 0.0, 4, 0, 1.0, 3)]
    [[0.5, 0.25, 0.25], [0.25, 0.25, 0.25]]
    """
    if not keyed:
        return np.full(machines, 1 / machines), np.zeros(machines)
    weights = key_group_shares(keys, skew, groups, seed) * keyed
    borders = -(-groups * np.arange(machines + 1) // machines)
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    starts, has_some = borders[:-1], np.diff(borders) > 0
    heaviest = np.zeros(machines)
    heaviest[has_some] = np.maximum.reduceat(weights, starts[has_some])
    shares: np.ndarray = sums[borders[1:]] - sums[starts] + (1 - keyed) / machines
    return shares, heaviest


def _limits(fixed: np.ndarray, per_row: np.ndarray) -> np.ndarray:
    """The greatest rate that each resource allows."""
    free = np.maximum(1 - fixed, 0.0)
    found: np.ndarray = np.divide(free, per_row, out=np.where(free > 0, inf, 0.0), where=per_row > 0)
    return found


def _fewest(held: Callable[[int], np.ndarray]) -> list[int]:
    """For each condition the least number of machines that holds it, on a grid of 2 % and then exactly; 0 if none.

    Not by bisection alone: with more machines, more of them fail.
    """
    count = len(held(1))
    low, high = [0] * count, [0] * count
    before = 0
    for machines in _GRID:
        holds = held(machines)
        for n in range(count):
            if holds[n] and not high[n]:
                low[n], high[n] = before, machines
        before = machines
        if all(high):
            break
    for n in range(count):
        while high[n] - low[n] > 1:
            middle = (low[n] + high[n]) // 2
            low[n], high[n] = (low[n], middle) if held(middle)[n] else (middle, high[n])
    return high


_GRID = [int(each) for each in np.unique(np.geomspace(1, MOST_MACHINES, 600).round())]


def _quantile(counts: np.ndarray, q: float) -> float:
    """Of waiting times that are counted in classes: the upper bound of the class that it is in."""
    sums = np.cumsum(counts)
    place = int(np.searchsorted(sums, q * sums[-1]))
    return float(_LATENCIES[min(place, len(_LATENCIES) - 1)])


# --- arguments


_PARSED = {"state_bytes": "state_size", "checkpoint_bytes": "checkpoint_size", "memory": "memory_size",
           "mtbf": "mtbf_s"}  # fmt: skip


def _figure(cluster: Cluster, name: str) -> float:
    """A figure of the cluster, its flow or its machine, as a number."""
    name = _PARSED.get(name, name)
    places = (cluster, cluster.footprint, cluster.machine)
    return float(next(getattr(each, name) for each in places if hasattr(each, name)))


def _scaled(value: float, by: float, name: str) -> float:
    return value * by if _PARSED.get(name) is None or name == "mtbf" else max(1, round(value * by))


def _number(value: object, what: str, at: SourceLoc, above_0: bool = False) -> None:
    is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    if not is_number or not isfinite(value) or value < 0 or (above_0 and value == 0):  # type: ignore[arg-type,operator]
        raise BadArgument(f"{what} must be a number, {'above' if above_0 else 'at least'} 0", at=at, found=repr(value))


def _share(value: object, what: str, at: SourceLoc) -> None:
    _number(value, what, at)
    if value > 1:  # type: ignore[operator]
        raise BadArgument(f"{what} is between 0 and 1", at=at, found=repr(value))


def _count(value: object, what: str, at: SourceLoc) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise BadArgument(f"{what} must be a number, at least 1", at=at, found=repr(value))


def _size(value: object, what: str, at: SourceLoc) -> int:
    if isinstance(value, float):
        _number(value, what, at)
        value = round(value)
    if value == 0 and not isinstance(value, bool):
        return 0
    return parse_size(value, what, at)  # type: ignore[arg-type]


def _seconds(value: object, what: str, at: SourceLoc) -> float:
    """Seconds as a number, or a length of time as text."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        _number(value, what, at, above_0=True)
        return float(value)
    return span(value, what, at).length / 1e9
