"""Networks of queues against formulas that are exact, and against a simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scalein as si
from scalein.model import Network, Stage
from scalein.model.network import erlang_c, gamma_quantile
from tests.model.simulation import simulate

SHOP = [Stage("gateway", "2ms", workers=2), Stage("orders", "10ms", workers=4, variability=0.5),
        Stage("db", "3ms", workers=3, variability=2.0)]
ROUTES = {"gateway": {"orders": 0.3, "db": 0.7}, "orders": {"db": 2}}


def test_one_server_with_random_times_is_exact() -> None:
    found = Network([Stage("only", "10ms")]).predict(rate=80)
    assert found.mean_s == pytest.approx(1 / (100 - 80))
    for q in (0.5, 0.9, 0.99):
        assert found.quantile_s(q) == pytest.approx(-math.log(1 - q) / (100 - 80), rel=0.001)


@given(st.integers(1, 64), st.floats(0.01, 0.99))
def test_erlang_c_is_the_sum_of_its_definition(workers: int, busy: float) -> None:
    load = busy * workers
    terms = [load ** k / math.factorial(k) for k in range(workers)]
    last = load ** workers / math.factorial(workers) / (1 - busy)
    assert erlang_c(load, workers) == pytest.approx(last / (sum(terms) + last), rel=1e-9)


@pytest.mark.parametrize("shape", [0.05, 0.5, 1.0, 3.0, 50.0])
@pytest.mark.parametrize("q", [0.1, 0.5, 0.99])
def test_gamma_quantiles_are_those_of_a_sample(shape: float, q: float) -> None:
    sample = np.random.default_rng(7).gamma(shape, 2.5, 100_000)
    found = gamma_quantile(shape * 2.5, shape * 2.5 ** 2, q)
    assert (sample <= found).mean() == pytest.approx(q, abs=5 * math.sqrt(q * (1 - q) / len(sample)))


@pytest.mark.parametrize("load", [0.3, 0.6, 0.85])
@pytest.mark.parametrize(("stages", "routes"), [
    (SHOP, ROUTES),
    ([Stage("a", "1ms", workers=1, variability=0), Stage("b", "5ms", workers=8)], {"a": {"b": 1}}),
    ([Stage("a", "1ms", workers=2), Stage("retry", "4ms", workers=3)], {"a": {"retry": 0.5}, "retry": {"a": 0.4}}),
], ids=["shop", "pipeline", "loop"])
def test_latencies_are_those_of_a_simulation(stages: list[Stage], routes: dict[str, dict[str, float]],
                                             load: float) -> None:
    network = Network(stages, routes)
    found = network.predict(rate=load * network.max_rate)
    truth = np.array(simulate(stages, routes, found.rate, 20_000, seed=int(load * 100)))
    assert found.utilization == pytest.approx(load)
    assert found.mean_s == pytest.approx(truth.mean(), rel=0.2)
    for q, guess in ((0.5, found.p50_s), (0.99, found.p99_s)):
        assert guess == pytest.approx(np.quantile(truth, q), rel=0.35), q


def test_rates_follow_the_branches() -> None:
    network = Network(SHOP, ROUTES)
    assert list(network.visits) == pytest.approx([1, 0.3, 1.3])
    assert network.max_rate == pytest.approx(min(2 / 0.002, 4 / 0.010 / 0.3, 3 / 0.003 / 1.3))
    found = network.predict(rate=2 * network.max_rate)
    assert found.saturated
    assert found.p99_s == math.inf
    assert found.bottleneck == "db"
    assert "saturated" in str(found)


def test_bursts_wait_longer() -> None:
    network = Network(SHOP, ROUTES)
    calm, bursts = (network.predict(rate=600, variability=scv) for scv in (0.5, 8.0))
    assert calm.p99_s < bursts.p99_s
    assert network.predict(rate=0).p50_s > 0


@pytest.mark.parametrize(("make", "says"), [
    (lambda: Stage("a", "soon"), "service of stage 'a'"),
    (lambda: Stage("a", 0), "more than 0"),
    (lambda: Stage("a", "1s", workers=0), "workers"),
    (lambda: Network([]), "has stages"),
    (lambda: Network([Stage("a", 1), Stage("a", 1)]), "names of their own"),
    (lambda: Network([Stage("a", 1)], {"a": {"b": 1}}), "'b'"),
    (lambda: Network([Stage("a", 1), Stage("b", 1)]), "no request gets to b"),
    (lambda: Network([Stage("a", 1)], {"a": {"a": 1}}), "for ever"),
    (lambda: Network([Stage("a", 1)]).predict(rate=-1), "rate"),
    (lambda: Network([Stage("a", 1)]).predict(rate=0.5).stage("b"), "no such stage"),
])
def test_mistakes_are_named(make: object, says: str) -> None:
    with pytest.raises(si.ScaleinError, match=says) as caught:
        make()
    assert "test_network.py" in str(caught.value)


def test_intervals_hold_where_service_times_are_a_tenth_wrong() -> None:
    """Simulated with service times that are drawn within a tenth of those that are predicted with."""
    dice, held = np.random.default_rng(3), 0
    stages = [Stage("a", 0.010, 2), Stage("b", 0.020, 3, 0.5)]
    routes = {"a": {"b": 0.8}}
    found = Network(stages, routes).predict(110)
    for seed in range(6):
        wrong = [Stage(each.name, each.service_s * dice.uniform(0.9, 1.1), each.workers, each.variability)
                 for each in stages]
        latencies = np.array(simulate(wrong, routes, 110, 20_000, seed))
        for name, value in (("p50_s", np.quantile(latencies, 0.5)), ("p99_s", np.quantile(latencies, 0.99))):
            low, high = found.intervals[name]
            held += low <= value <= high
        low, high = found.intervals["max_rate"]
        assert low <= Network(wrong, routes).max_rate <= high
    assert held >= 11
    assert found.intervals["p50_s"][1] < 2 * found.p50_s


def test_a_network_shows_itself() -> None:
    found = Network([Stage("a", 0.010, 2)]).predict(100)
    assert "<svg" in found._repr_html_()
    assert "bottleneck" in found._repr_html_()
    assert " to " in str(found)
    assert "saturated" in Network([Stage("a", 0.010, 2)]).predict(300)._repr_html_()
