"""Clusters on paper: formulas against the simulation, and the simulation against what is known exactly."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np
import pytest

import scalein as si
from scalein.model import DS2, Cluster, Footprint, Machine, Model, Network, Predictive, Stage
from scalein.model.calibration import TYPICAL
from scalein.model.cluster import HEAVY_KEYS, _power_sum, key_group_shares
from scalein.model.costs import Costs
from scalein.model.network import waiting

FLOW = Footprint(core_rate=2e6, row_bytes=50, touched_bytes=100, shuffled_bytes=10, output_bytes=1, state_bytes="500GB",
             checkpoint_bytes="20GB", keyed=0.3)
CLUSTER = Cluster(FLOW, Machine(cores=8, memory="64GB", network_rate=2e9, disk_rate=1e9, mtbf="30d"), keys=10**7,
                  skew=0.6)


@pytest.mark.parametrize(("cores", "busy"), [(1, 0.5), (4, 0.8), (16, 0.9)])
def test_short_steps_are_an_m_m_c(cores: int, busy: float) -> None:
    """By Erlang's formula: the batches at each of many machines, on average over time and machines."""
    cluster = Cluster(Footprint(core_rate=1.0, keyed=0.0), Machine(cores=cores, mtbf=None), batch_rows=1, seed=3)
    machines, steps = 600, 1600
    found = cluster.simulate([busy * cores * machines] * steps, machines, step=0.04)
    wait_s, _ = waiting(busy, cores, 1.0, 1.0, 1.0)
    assert found.waiting[steps // 2:].mean() / machines == pytest.approx(busy * cores * (wait_s + 1), rel=0.1)
    assert found.done.sum() == pytest.approx(found.arrived.sum() - found.waiting[-1])


def test_long_steps_are_a_fluid() -> None:
    """Twice the capacity for a while: what waits grows and falls by the difference of the rates."""
    cluster = Cluster(Footprint(core_rate=1e6, keyed=0.0), Machine(cores=10, mtbf=None), batch_rows=100)
    found = cluster.simulate([8e7] * 20 + [2e7] * 60, machines=4)
    assert found.waiting[19] == pytest.approx(20 * 4e7, rel=0.02)
    assert found.waiting[39] == pytest.approx(20 * 4e7 - 20 * 2e7, rel=0.04)
    assert found.waiting[-1] < 1e6
    assert found.p99_s[19] == pytest.approx(20 * 4e7 / 4e7, rel=0.05)


def test_failures_are_binomial() -> None:
    """Each machine is down for one end of a step: how many are is how many failed in it."""
    cluster = Cluster(Footprint(core_rate=1e6, keyed=0.0), Machine(mtbf=5_000), detect=0.75, restart=0.75)
    found = cluster.simulate([0.0] * 3_000, machines=500)
    chance = -np.expm1(-1 / 5_000)
    mean, variance = 500 * chance, 500 * chance * (1 - chance)
    assert found.failures == found.down.sum()
    assert found.down.mean() == pytest.approx(mean, abs=5 * (variance / 3_000) ** 0.5)
    assert found.down.var() == pytest.approx(variance, rel=0.25)


def test_machines_are_down_as_renewal_theory_says() -> None:
    """Up for the mean time between failures, down for the outage."""
    cluster = Cluster(Footprint(core_rate=1e6, state_bytes=0, keyed=0.0), Machine(mtbf="10m"), detect="50s",
                      restart="50s")
    found = cluster.simulate([1e6] * 1_500, machines=1_000)
    assert found.down[500:].mean() / 1_000 == pytest.approx(100 / (600 + 100), rel=0.05)


def test_late_rows_are_those_of_the_formula() -> None:
    """Rows that come during an outage, or before what it has left to do is done."""
    cluster = Cluster(Footprint(core_rate=1e6, keyed=0.0), Machine(cores=8, mtbf="1h"), every="5s", detect="10s",
                      restart="10s")
    said = cluster.predict(workers=400, rate=400 * 8e6 * 0.6)
    found = cluster.simulate([said.rate] * 2_500, machines=400)
    assert found.late_share("1s") == pytest.approx(said.late_share, rel=0.2)
    assert said.p99_s == pytest.approx(found.quantile_s(0.99), rel=0.3)


def test_all_machines_go_back_together_or_one_alone() -> None:
    machine = Machine(cores=8, mtbf="7d")
    alone = Cluster(FLOW, machine, keys=10**7)
    together = replace(alone, restarts="all")
    assert together.predict(workers=20, rate=1e8).resources["failures"] < 1
    assert together.predict(workers=20_000, rate=1e8).resources["failures"] > 1 > (
        alone.predict(workers=20_000, rate=1e8).resources["failures"])
    lost = together.simulate([1e9] * 2_000, machines=500)
    kept = alone.simulate([1e9] * 2_000, machines=500)
    assert lost.late_share("1s") > 20 * kept.late_share("1s")


def test_the_need_holds_and_one_machine_less_does_not() -> None:
    need = CLUSTER.need(rate=5e8)
    used = CLUSTER.predict(workers=need.machines, rate=5e8).resources
    less = CLUSTER.predict(workers=need.machines - 1, rate=5e8).resources
    both = ("catching up", "failures")
    assert all(value <= (1 if name in both else 0.7 + 1e-9) for name, value in used.items())
    assert any(value > (1 if name in both else 0.7) for name, value in less.items())
    assert need.machines == max(need.by_resource.values())
    assert need.log_machines == np.ceil(5e8 * 50 * 3 / 1e9 / 0.7)
    assert need.log_bytes == 5e8 * 50 * 3 * 3600
    assert "for the log" in str(need)
    assert "late by them" in str(need.prediction)


def test_what_breaks_first_does_break_it() -> None:
    need = CLUSTER.need(rate=5e8)
    assert [each.factor for each in need.breaks] == sorted(each.factor for each in need.breaks)
    by_name = {each.figure: each for each in need.breaks}
    assert {"rate", "core_rate", "network_rate", "row_bytes", "state_bytes", "skew"} <= set(by_name)
    for name, cluster in {
        "core_rate": replace(CLUSTER, footprint=replace(FLOW, core_rate=by_name["core_rate"].breaking * 0.99)),
        "row_bytes": replace(CLUSTER, footprint=replace(FLOW, row_bytes=by_name["row_bytes"].breaking * 1.01)),
        "skew": replace(CLUSTER, skew=by_name["skew"].breaking + 0.01),
        "network_rate": replace(CLUSTER, machine=replace(CLUSTER.machine,
                                                         network_rate=by_name["network_rate"].breaking * 0.99)),
    }.items():
        found = cluster.predict(workers=need.machines, rate=5e8)
        assert found.saturated, name
        assert found.resources[by_name[name].resource] >= 1, name
    assert not CLUSTER.predict(workers=need.machines, rate=by_name["rate"].breaking * 0.99).saturated


def test_what_the_formula_calls_saturated_falls_behind() -> None:
    """A heavy key group is worked on by one core, whatever the number of machines."""
    cluster = Cluster(replace(FLOW, keyed=1.0, state_bytes=0), Machine(cores=8, mtbf=None), keys=10**6, skew=1.0)
    most = cluster.predict(workers=64).max_rate
    assert cluster.predict(workers=64).bottleneck == cluster.predict(workers=128).bottleneck == "one key group"
    assert cluster.predict(workers=128).max_rate == pytest.approx(most)
    calm, behind = (cluster.simulate([most * load] * 300, machines=64) for load in (0.9, 1.1))
    assert calm.waiting[-1] < calm.arrived[-1] < behind.waiting[-1]
    combined = replace(cluster, footprint=replace(cluster.footprint, keyed=0.0))
    assert combined.predict(workers=64).max_rate > 3 * most


@pytest.mark.parametrize(("keys", "skew"), [(1_000, 0.0), (50_000, 1.0), (10**9, 0.7)])
def test_shares_of_key_groups(keys: int, skew: float) -> None:
    shares = key_group_shares(keys, skew, 256, 5)
    assert shares.sum() == pytest.approx(1)
    squares = (_power_sum(0, keys, 2 * skew) if skew == 0 else
               (np.arange(1, HEAVY_KEYS + 1) ** (-2 * skew)).sum() + _power_sum(HEAVY_KEYS, keys, 2 * skew))
    total = (np.arange(1, min(keys, HEAVY_KEYS) + 1) ** -skew).sum() + _power_sum(HEAVY_KEYS, keys, skew)
    assert shares.var() <= 3 * squares / total ** 2 / 256
    assert shares.var() >= 0.2 * squares / total ** 2 / 256 or skew == 1.0


def test_sums_of_powers() -> None:
    for exponent in (0.0, 0.7, 1.0, 1.4, 2.0):
        exact = (np.arange(1_001, 200_001, dtype=float) ** -exponent).sum()
        assert _power_sum(1_000, 200_000, exponent) == pytest.approx(exact, rel=1e-6)


def test_policies_scale_the_machines() -> None:
    """A daily wave of 20 decisions, three times: the cluster is the model that the policy asks."""
    cluster = Cluster(Footprint(core_rate=1e6, keyed=0.0), Machine(cores=10, mtbf=None), restart=0.1)
    wave = 1e8 * (1 - 0.6 * np.cos(2 * np.pi * np.arange(600) / 200))
    how: dict[str, Any] = {"machines": 20, "decide": 10, "boot": 5, "least": 1, "most": 30}
    ahead = cluster.simulate(wave, policy=Predictive(cluster, ahead=2, period=20, patience=2), **how)
    later = cluster.simulate(wave, policy=DS2(), **how)
    needed = np.ceil(wave / 1e7 / 0.9)
    assert ahead.perfect_machine_s == needed.sum()
    assert 1.0 < ahead.machines[400:].sum() / needed[400:].sum() < 1.35
    assert len(np.unique(ahead.machines)) > 5
    assert (ahead.waiting[400:] > wave[400:] / 2).sum() == 0 < (later.waiting[400:] > wave[400:] / 2).sum()
    assert later.done.sum() == pytest.approx(ahead.done.sum(), rel=0.02)


@dataclass(frozen=True)
class OneRate:
    max_rate: float
    p99_s: float = 0.0

    def predict(self, *, workers: int, rate: float) -> OneRate:
        return OneRate(self.max_rate * workers)


def test_footprints_of_models() -> None:
    shop = Network([Stage("web", "2ms", workers=3), Stage("db", "1ms")], routes={"web": {"db": 3}})
    assert Footprint.of(shop).core_rate == pytest.approx(1 / (0.002 + 3 * 0.001))
    model = Model(Costs(1e-5, 2e-5, 0.0, 1e-4, 0.0, 0.0, ((1e6, 1e-7),), bytes=24.0), TYPICAL)
    flow = Footprint.of(model, keyed=0, state_bytes="3GB")
    assert flow.core_rate == pytest.approx(model.predict(workers=1).max_rate)
    assert Footprint.of(model, workers=4).core_rate == pytest.approx(model.predict(workers=4).max_rate / 4)
    assert (flow.row_bytes, flow.state_size) == (24.0, 3_000_000_000)
    assert Footprint.of(OneRate(5e6), row_bytes=20, keyed=0) == Footprint(core_rate=5e6, row_bytes=20, keyed=0)


def test_a_seed_gives_the_same_run() -> None:
    runs = [replace(CLUSTER, seed=seed).simulate([3e8] * 50, machines=30) for seed in (1, 1, 2)]
    assert (runs[0].arrived == runs[1].arrived).all()
    assert (runs[0].arrived != runs[2].arrived).any()


@pytest.mark.parametrize(("make", "says"), [
    (lambda: Footprint(core_rate=0), "core_rate must be a number, above 0"),
    (lambda: Footprint(core_rate=1, keyed=2), "keyed is between"),
    (lambda: Footprint(core_rate=1, state_bytes="lots"), "state_bytes"),
    (lambda: Footprint.of("fast"), "a model or a network"),
    (lambda: Machine(cores=0), "cores must be"),
    (lambda: Machine(mtbf="soon"), "mtbf"),
    (lambda: Cluster(3), "a footprint and a machine"),
    (lambda: Cluster(FLOW, keys=-1), "keys must be"),
    (lambda: Cluster(FLOW, restarts="some"), "restarts is"),
    (lambda: CLUSTER.predict(workers=0), "workers must be"),
    (lambda: CLUSTER.need(rate=inf), "rate must be"),
    (lambda: CLUSTER.need(rate=1e12), "no number of machines holds"),
    (lambda: CLUSTER.simulate([], machines=1), "rows a second, one a step"),
    (lambda: CLUSTER.simulate([1.0], machines=1, step=0), "step"),
])  # fmt: skip
def test_mistakes_are_named(make: object, says: str) -> None:
    with pytest.raises(si.ScaleinError, match=says) as caught:
        make()
    assert "test_cluster.py" in str(caught.value)
