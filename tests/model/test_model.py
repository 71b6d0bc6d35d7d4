"""Predictions from costs that are given, so that no figure depends on this machine; and one profile of a real flow."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pyarrow as pa
import pytest

import scalein as si
from scalein import col
from scalein.errors import ScaleinError
from scalein.ir.estimate import StageCost
from scalein.model.calibration import TYPICAL, SparkFigures, calibration_of
from scalein.model.costs import Costs, Groups, Round, Span, StageShare, StateCost, fit
from scalein.model.model import Model
from scalein.model.states import states_of

# 10 ns a row in kernels, 1 ns besides; 30 us a batch, 100 us a round.
COSTS = Costs(batch_s=1e-5, call_s=2e-5, row_s=1e-9, round_s=1e-4, end_row_s=0.0, kernel_call_s=0.0,
              kernel_row_s=((1e6, 1e-8),), rows=500_000, bytes=16.0)
MANY = StateCost("group_by", Groups(500_000, {1: 200_000, 2: 150_000}), 64.0, 1.0)


def model(*states: StateCost, **changes: Any) -> Model:
    machine = replace(TYPICAL, cores=4, is_measured=True)
    return Model(replace(COSTS, states=states, **changes), machine)


def test_the_greatest_rate_is_what_rounds_take() -> None:
    found = model().predict(workers=1, batch_rows=1 << 18)
    row_s = 1e-8 + 1e-9 + 3e-5 / (1 << 18)  # and 0.1 ms a round of 0.1 s
    assert found.max_rate == pytest.approx(1 / row_s / 1.001, rel=0.001)
    assert found.low < found.max_rate < found.high
    assert sum(found.row_s.values()) == pytest.approx(1 / found.max_rate)


def test_workers_share_kernels_but_not_all() -> None:
    rates = [model().predict(workers=count).max_rate for count in (1, 2, 4, 8, 64)]
    assert rates == sorted(rates)
    assert 1.7 < rates[1] / rates[0] < 2
    assert rates[-1] * 1e-9 < 1  # 1 ns a row is done by one worker at a time


def test_memory_delivers_no_more_than_it_can() -> None:
    """What one worker moves is in what was measured; many of them may ask for more than there is."""
    scan = StageShare(StageCost("pipe", 500.0, 1, 0, 0), 1.0, 1e-8)
    machine = replace(TYPICAL, cores=64, bandwidth=((1, 1e10), (2, 1.2e10)))
    one, eight = (Model(replace(COSTS, stages=(scan,)), machine).predict(workers=count) for count in (1, 8))
    assert one.max_rate == pytest.approx(model().predict(workers=1).max_rate)
    assert eight.max_rate < 1.35 * one.max_rate
    assert "memory bandwidth" in eight.bottleneck


def test_rounds_of_one_batch_have_costs_of_their_own() -> None:
    slow = model(alone=replace(COSTS, kernel_row_s=((1e6, 1e-7),)))
    assert slow.predict().max_rate == model().predict().max_rate
    assert slow.predict(rate=1e6).p50_s > 5 * model().predict(rate=1e6).p50_s


def test_small_batches_are_slow() -> None:
    large, small = (model().predict(workers=1, batch_rows=rows) for rows in (1 << 18, 1_000))
    assert small.max_rate < large.max_rate / 1.5
    assert "batches of more than 1,000 rows would help" in small.bottleneck
    assert "kernels" in large.bottleneck


def test_latency_grows_with_the_load() -> None:
    one = model()
    most = one.predict().max_rate
    found = [one.predict(rate=share * most) for share in (0.1, 0.3, 0.5, 0.7, 0.9, 0.97)]
    assert all(each.p50_s <= each.p99_s for each in found)
    assert [each.p99_s for each in found] == sorted(each.p99_s for each in found)
    assert found[2].utilization == pytest.approx(0.5)
    idle = one.predict(rate=0)
    assert idle.utilization == 0
    assert 0 < idle.p50_s <= found[0].p50_s
    over = one.predict(rate=1.5 * most)
    assert over.saturated
    assert over.p99_s == float("inf")
    calm, bursts = (one.predict(rate=0.8 * most, variability=each).p99_s for each in (0, 9))
    assert calm < found[4].p99_s < bursts
    assert all(low <= each.p99_s <= high for each in found for low, high in [each.intervals["p99_s"]])


def test_state_beyond_memory_slows_it_down() -> None:
    keyed = model(MANY)
    free = keyed.predict(keys=10_000_000)
    assert free.state_bytes == pytest.approx(64e7, rel=0.01)
    assert free.on_disk_bytes == 0
    rates = []
    for share in (2, 0.5, 0.1):
        found = keyed.predict(keys=10_000_000, memory=int(64e7 * share))
        rates.append(found.max_rate)
        assert found.memory < 64e7 * max(share, 1) * 1.1
    assert rates[0] > rates[1] > rates[2]
    assert found.on_disk_bytes > 0.8 * found.state_bytes
    assert "memory has no room" in found.bottleneck
    assert (found.high / found.max_rate) > (free.high / free.max_rate)


def test_checkpoints_cost_a_share() -> None:
    keyed = model(MANY)
    without, often, seldom = (keyed.predict(keys=1_000_000, every=every) for every in (None, "100ms", "10s"))
    assert without.checkpoint is None
    assert often.checkpoint is not None
    assert seldom.checkpoint is not None
    assert without.max_rate > seldom.max_rate > often.max_rate
    assert seldom.checkpoint.bytes == pytest.approx(64e6, rel=0.2)


def test_windows_keep_what_is_open() -> None:
    hot = StateCost("group_by", Groups(1000, {10: 100}), 100.0, 1.0, Span(2.0, seconds=10.0))
    found = model(hot).predict(rate=1_000_000)
    assert found.state_bytes == pytest.approx(2 * 100 * 100)  # each of 100 keys in two slices of time
    assert model(replace(hot, span=Span(1.0, rows=20.0))).predict(rate=10).state_bytes == pytest.approx(1_800, rel=0.1)


def test_keys_that_keep_coming_are_said() -> None:
    found = model(replace(MANY, groups=Groups(1000, {1: 900, 2: 50}))).predict()
    assert any("keys= says" in note for note in found.notes)
    assert not any("keys=" in note for note in model(MANY).predict(keys=10**6).notes)


def test_a_recommendation_says_what_breaks_first() -> None:
    one = model()
    two = one.predict(workers=2).max_rate
    plan = one.recommend(rate=0.7 * two, p99="100ms")
    assert plan.feasible
    assert plan.workers == 2
    assert plan.margin == min(plan.limits.values()) > 1
    tight = one.recommend(rate=0.7 * two, p99=plan.prediction.p99_s * 1.01)
    assert "p99 exceeds" in tight.breaks_first
    assert 1 < tight.margin < plan.margin
    none = one.recommend(rate=1000 * two, p99="100ms")
    assert not none.feasible
    assert none.margin < 1
    assert not one.recommend(rate=0.7 * two, p99="100ms", most=1).feasible
    assert any("cores" in note for note in one.recommend(rate=one.predict(workers=5).max_rate * 0.85).notes)


def test_a_plan_chooses_what_it_may() -> None:
    """By trying all of it: the fewest workers, then the least memory, then the least latency."""
    keyed, memories, rows = model(MANY), ["50MB", "1GB", "4GB"], [1_000, 16_384, 1 << 18]
    rate = 0.8 * keyed.predict(workers=1, keys=10**7, batch_rows=1 << 18).max_rate
    found = keyed.recommend(rate=rate, p99="200ms", keys=10**7, memory=memories, batch_rows=rows)
    tried = [keyed.recommend(rate=rate, p99="200ms", keys=10**7, memory=memory, batch_rows=count)
             for memory in memories for count in rows]
    fewest = min(each.workers for each in tried if each.feasible)
    assert found.feasible
    assert found.workers == fewest
    assert (found.prediction.config["memory"], found.prediction.p99_s) == min(
        (each.prediction.config["memory"], each.prediction.p99_s) for each in tried
        if each.feasible and each.workers == fewest)
    assert not keyed.recommend(rate=1e12, memory=memories, most=2).feasible
    spark = on_spark(MANY)
    stream = spark.recommend(rate=1e7, keys=10**7, p99="30s", every=["1s", "10s"], partitions=True, cores=4)
    assert stream.feasible
    assert stream.prediction.config["partitions"] in {1 << power for power in range(9)}
    executors = int(str(stream.prediction.config["executors"]))
    fewer = [spark.predict(rate=1e7, keys=10**7, every=every, partitions=1 << power, executors=executors - 1, cores=4)
             for power in range(9) for every in ("1s", "10s")] if executors > 1 else []
    assert all(each.utilization > 0.9 or each.p99_s > 30 for each in fewer)
    with pytest.raises(ScaleinError, match="values to choose from"):
        keyed.recommend(rate=1.0, memory=[])


def test_a_plan_says_when_state_leaves_the_memory() -> None:
    """Where it grows with the rate; where it is on disk already, there is nothing to come."""
    rows = StateCost("over", Groups(1000, {1: 1000}), 100.0, 1.0, Span(1.0, seconds=10.0), keeps_rows=True)
    growing = model(rows).recommend(rate=1e6, memory="4GB")  # 1 GB now; 5/8 of the memory are for state
    assert growing.limits["memory"] == pytest.approx(2.5, rel=0.01)
    assert "leaves the memory" in growing.breaks_first
    at_the_edge = model(rows).predict(rate=1e6 * growing.margin * 1.01, memory="4GB")
    assert at_the_edge.on_disk_bytes > 0
    keyed = model(MANY)  # 640 MB, however fast they come
    for memory, is_on_disk in (("2GB", False), ("100MB", True)):
        plan = keyed.recommend(rate=1e5, memory=memory, keys=10_000_000)
        assert "memory" not in plan.limits
        assert any("on disk" in note for note in plan.notes) == is_on_disk


def test_another_machine() -> None:
    slow = replace(TYPICAL, operations=TYPICAL.operations / 2, cores=4)
    here = model()
    assert here.predict(on=slow).max_rate == pytest.approx(here.predict().max_rate / 2, rel=0.02)
    scan = model(stages=(StageShare(StageCost("pipe", 500.0, 1, 0, 0), 1.0, 1e-8),))
    narrow = replace(scan.calibration, bandwidth=((1, 1e9), (4, 1.5e9)))
    assert scan.predict().max_rate == pytest.approx(here.predict().max_rate)  # its traffic is in what was measured
    assert scan.predict(on=narrow).max_rate == pytest.approx(1 / (100 / 1e9), rel=0.1)  # 100 bytes fit into 10 ns here
    assert "memory bandwidth" in scan.predict(on=narrow).bottleneck
    late = replace(here.calibration, probes=tuple((size, 20 * seconds) for size, seconds in TYPICAL.probes))
    keyed = model(replace(MANY, groups=Groups(500_000, {100: 5_000})))
    assert keyed.predict(on=late).max_rate < 0.5 * keyed.predict().max_rate
    assert "cache misses" in keyed.predict(on=late).bottleneck


def test_a_calibration_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    whole = replace(TYPICAL, spark=SparkFigures(0.2, 0.01, 4e8))
    whole.save(path)
    assert calibration_of(path) == whole
    assert model().predict(on=path).max_rate > 0
    for word in ("GB/s", "MiB", "sync", "wake-up", "Spark"):
        assert word in str(whole)
    good = json.loads(path.read_text())
    without = {name: each for name, each in good.items() if name != "wake_s"}
    wrong = [{**good, "disk_read": 0}, {**good, "probes": [[4, 1], [2, 1]]}, {**good, "cores": "two"}, without, []]
    for text in ("no json", *map(json.dumps, wrong)):
        path.write_text(text)
        with pytest.raises(ScaleinError, match="calibration") as error:
            model().predict(on=path)
        assert error.value.facts["at"].startswith("test_model.py:")
    with pytest.raises(ScaleinError, match="cannot be read"):
        model().predict(on=str(tmp_path / "none.json"))


@pytest.mark.parametrize("given", [
    {"workers": 0}, {"workers": True}, {"rate": -1}, {"rate": "x"}, {"memory": "a lot"}, {"every": "soon"},
    {"every": 0}, {"batch_rows": 1.5}, {"keys": 0}, {"variability": -1}, {"on": 3},
])  # fmt: skip
def test_bad_arguments(given: dict[str, Any]) -> None:
    with pytest.raises(ScaleinError) as error:
        model().predict(**given)
    assert error.value.facts["at"].startswith("test_model.py:")


@pytest.mark.parametrize("given", [{"rate": 0}, {"rate": 1.0, "p99": "x"}, {"rate": 1.0, "most": 0}])
def test_bad_plans(given: dict[str, Any]) -> None:
    with pytest.raises(ScaleinError):
        model().recommend(**given)


FIGURES = SparkFigures(batch_s=0.2, task_s=0.01, transfer_bytes_s=4e8, stage_s=0.05, read_bytes_s=1e9, group_s=4e-7)


def on_spark(*states: StateCost, **changes: Any) -> Model:
    return Model(replace(COSTS, states=states, **changes), replace(TYPICAL, cores=64, spark=FIGURES))


def test_spark_streams() -> None:
    """A flow without state, by hand: tasks on all cores read 16 bytes a row, and nothing is shuffled."""
    keyed = on_spark()
    one, two = (keyed.predict(partitions=8, executors=count, cores=2) for count in (1, 2))
    row_s = (1e-8 + 1e-9 + 16 / 1e9) / 2
    fixed_s = 0.2
    assert one.max_rate == pytest.approx((1 - fixed_s) / row_s, rel=0.05)
    assert 1.8 < two.max_rate / one.max_rate < 2.3
    assert "files that tasks read" in one.bottleneck
    half = keyed.predict(partitions=8, executors=1, cores=2, rate=0.5 * one.max_rate)
    assert half.batch_s == pytest.approx(fixed_s + 0.5 * (1 - fixed_s), rel=0.02)
    assert half.p50_s == pytest.approx(0.5 + half.batch_s, rel=0.01)
    from_jvm = keyed.predict(partitions=8, executors=1, cores=2, read_by="spark")
    assert from_jvm.max_rate < 0.7 * one.max_rate
    assert "JVM" in from_jvm.bottleneck
    assert keyed.predict(partitions=8, rate=1e12).saturated
    short = keyed.predict(partitions=8, every="10ms")
    assert "fixed cost of a micro-batch" in short.bottleneck
    assert "micro-batch" in repr(half)
    for given, text in (({"partitions": 0}, "partitions must"), ({"cores": 1, "memory": "1GB"}, "memory"),
                        ({"executors": 0}, "executors must"), ({"executors": "two"}, "executors must"),
                        ({"partitions": 300}, "1 to 256"), ({"partitions": 2, "read_by": "x"}, "no such read_by"),
                        ({"partitions": 2, "migration": "now"}, "no such migration")):
        with pytest.raises(ScaleinError, match=text) as error:
            keyed.predict(**given)
        assert error.value.facts["at"].startswith("test_model.py:")
    with pytest.raises(ScaleinError, match="no figures of Spark"):
        model().predict(partitions=4)


def test_partitions_limit_what_spark_does_at_a_time() -> None:
    """State is in as many tasks as there are partitions, in waves where they are more than cores."""
    keyed = on_spark(MANY)
    rates = {(partitions, executors): keyed.predict(partitions=partitions, executors=executors, cores=2, every="10s",
                                                    keys=50_000_000).max_rate
             for partitions in (1, 8, 32) for executors in (1, 16)}
    assert rates[1, 16] < 1.5 * rates[1, 1]  # most of the batch is state, which one task holds
    assert rates[32, 16] > 8 * rates[1, 16]
    assert rates[8, 1] > 1.5 * rates[1, 1]
    few = keyed.predict(partitions=1, executors=16, cores=2, keys=10**7)
    assert any("1 partitions use 1 of 32 cores" in note for note in few.notes)
    batches = [keyed.predict(partitions=count, executors=1, cores=2, rate=10_000, every="1s", keys=1_000).batch_s
               for count in (2, 8, 64)]
    assert batches[1] == pytest.approx(batches[0] + 3 * FIGURES.task_s, rel=0.1)  # waves of short tasks
    assert batches[2] == pytest.approx(batches[0] + 31 * FIGURES.task_s, rel=0.1)


def test_state_of_spark_streams_is_part_of_a_batch() -> None:
    keyed = on_spark(MANY)
    found = [keyed.predict(partitions=4, executors=1, cores=4, rate=1e5, every="1s", keys=keys, migration="eager")
             for keys in (1_000, 1_000_000, 100_000_000)]
    assert found[0].batch_s < found[1].batch_s
    touched = 1e5  # about: groups that a batch of a million keys changes; they are read and merged several times
    assert found[1].row_s["runs of state"] > 0
    assert found[1].checkpoint is not None
    assert 64 * touched * 0.9 < found[1].checkpoint.bytes < 12 * 64 * touched
    assert found[1].on_disk_bytes == found[1].state_bytes == pytest.approx(64e6, rel=0.05)
    small, large = ({how: keyed.predict(partitions=4, executors=1, cores=4, rate=1e5, keys=keys,
                                        migration=how).rescale_pause_s for how in ("lazy", "hybrid", "eager")}
                    for keys in (100_000, 100_000_000))
    assert large["lazy"] < 0.1
    assert small["eager"] - small["lazy"] == pytest.approx(8 * (small["hybrid"] - small["lazy"]))
    assert large["lazy"] < large["hybrid"] < large["lazy"] + 0.1  # in proportion to the batch
    assert large["eager"] == pytest.approx(found[2].state_bytes / 48 * FIGURES.group_s / 4, rel=0.1)  # of 48 bytes


def test_a_heavy_key_has_one_owner_on_spark() -> None:
    """Rows of `process` cross the shuffle one by one, to the partition of their key; groups cross as partial groups."""
    even, skewed = Groups(100_000, {10: 10_000}), Groups(100_000, {80_000: 1, 2: 10_000})
    serial = (StageShare(StageCost("rows", 16.0, 1, 0, 0), 1.0, 1e-8, is_serial=True),)

    def rate(groups: Groups, name: str, partitions: int) -> float:
        state = StateCost(name, groups, 64.0, 1.0)
        stages = serial if name == "process" else ()
        found = on_spark(state, stages=stages).predict(partitions=partitions, executors=4, cores=4, every="60s")
        assert any("heavy key" in note for note in found.notes) == (name == "process" and groups is skewed)
        return found.max_rate

    slow = rate(skewed, "process", 16)
    assert rate(even, "process", 16) > 3 * slow
    assert rate(skewed, "process", 64) < 1.3 * slow  # a rescale does not divide a key
    assert rate(skewed, "group_by", 16) == pytest.approx(rate(even, "group_by", 16), rel=0.2)


def test_rows_of_keys_in_turn_are_not_shared_by_workers() -> None:
    """In jobs a heavy key costs an aggregation nothing, and rows of `process` are one worker's, whatever their keys."""
    stages = (StageShare(StageCost("rows", 16.0, 1, 0, 0), 1.0, 1e-8, is_serial=True),)
    one, eight = (model(stages=stages).predict(workers=count) for count in (1, 8))
    assert eight.max_rate < 1.2 * one.max_rate
    assert "one after the other" in eight.bottleneck
    half = (*stages, StageShare(StageCost("filter", 16.0, 1, 0, 0), 1.0, 1e-8))
    assert one.max_rate * 1.4 < model(stages=half).predict(workers=8).max_rate < one.max_rate * 2


def test_predictions_are_pickled() -> None:
    for found in (model(MANY).predict(workers=2), on_spark(MANY).predict(partitions=4, keys=10**6)):
        again = pickle.loads(pickle.dumps(found))
        assert again == found
        assert again.curve() == found.curve()


def test_it_shows_itself() -> None:
    found = model(MANY).predict(workers=2, every="1s", memory="1GB", keys=1_000_000)
    text = repr(found)
    for word in ("workers=2", "greatest rate", "latency", "checkpoints", "bottleneck"):
        assert word in text
    assert "<svg" in found._repr_html_()
    assert "saturated" in repr(model().predict(rate=1e12))
    assert json.loads(json.dumps(found.to_json()))["config"]["workers"] == 2
    assert json.loads(json.dumps(model().predict(rate=1e12).to_json()))["p99_s"] is None
    plan = model().recommend(rate=1e6, p99="1s")
    assert "breaks first" in repr(plan)
    assert "breaks first" in plan._repr_html_()
    assert json.loads(json.dumps(plan.to_json()))["feasible"] is True
    with mpl.rc_context({"backend": "agg"}):
        axes = found.plot()
        assert axes.get_ylabel() == "latency, ms"
        mpl.pyplot.close("all")


def test_a_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ScaleinError, match="plot needs matplotlib"):
        model().predict().plot()


def test_a_fit_takes_costs_apart() -> None:
    """Noise of a hundredth does not move what matters."""
    dice = np.random.default_rng(1)
    kinds = [(40, 1, 1, 1_000), (4, 64, 1, 64_000), (23, 1, 1, 1 << 14), (2, 4, 4, 1 << 18), (2, 8, 8, 1 << 20)]
    measured = [Round(n, n * k, n * c, n * r, n * (1e-5 * k + 2e-5 * c + 1e-9 * r) * dice.normal(1, 0.01), n * 1e-4,
                      n * r * 1e-8) for n, k, c, r in kinds]
    found = fit(measured)
    assert found.row_s == pytest.approx(1e-9, rel=0.1)
    assert found.round_s == pytest.approx(1e-4, rel=0.01)
    assert found.kernel_row_s[-1][1] == pytest.approx(1e-8, rel=0.01)


def test_groups_of_a_sample() -> None:
    zipf = Groups(20, {10: 1, 5: 1, 1: 5})
    assert (zipf.distinct, zipf.heaviest) == (7, 0.5)
    assert zipf.share_of_hottest(2 / 7) == pytest.approx(0.75)
    assert zipf.expected(20) == 7
    assert zipf.expected(10) < 7 < zipf.expected(1000) <= 7 + zipf.unseen
    assert zipf.expected(10**9, keys=100) == pytest.approx(100)
    assert zipf.expected(10**9, keys=5) == 5


EVENTS = pa.table({"time": pa.array(np.arange(4_000) * 5, pa.timestamp("ms")), "user": np.arange(4_000) % 500,
                   "name": [f"user {number % 50}" for number in range(4_000)], "price": np.arange(4_000) * 0.5})


def test_a_profile_of_a_flow() -> None:
    q = (si.flow(EVENTS.schema).with_watermark("time", "1s").filter(col("price") > 500)
         .group_by("user", si.tumbling("time", "2s")).agg(n=si.count(), total=col("price").sum()))
    found = si.model.profile(q, EVENTS)
    one, two = found.predict(workers=1), found.predict(workers=2)
    assert 0 < one.low <= one.max_rate < two.max_rate <= 2.1 * one.max_rate
    assert found.costs.rows == 4_000
    (state,) = found.costs.states
    assert state.rows == pytest.approx(0.75, abs=0.01)
    assert state.groups.distinct == 500
    assert state.span is not None
    assert state.span.seconds == pytest.approx(3.0)
    assert all(0 < each.rows <= 1 for each in found.costs.stages)
    group = next(each.cost for each in found.costs.stages if each.cost.name == "group")
    assert group.bytes >= 16
    assert group.operations >= 2
    assert group.state_bytes >= 24


@si.udf
def rounds_of(x: float) -> float:
    for _ in range(40):
        x = x * 0.999 + 1.0 / (1.0 + x * x)
    return x


def test_loops_of_the_user_count() -> None:
    """They run in a thread of their own, so that Ctrl-C ends them."""
    flow, sample = si.flow({"x": pa.float64()}), pa.table({"x": np.random.default_rng(1).random(4_000)})
    light, heavy = (si.model.profile(flow.group_by().agg(s=value.sum()), sample).predict(workers=1).max_rate
                    for value in (col("x"), rounds_of(col("x"))))
    assert heavy < light / 4


def test_samples_of_bound_flows_and_of_several_inputs() -> None:
    q = si.from_arrow(EVENTS).group_by("name").agg(n=si.count())
    own, given = si.model.profile(q), si.model.profile(q, EVENTS.slice(0, 1_000))
    assert (own.costs.rows, given.costs.rows) == (4_000, 1_000)
    assert own.costs.states[0].groups.distinct == 50
    left, right = (si.flow(EVENTS.schema, name=name) for name in ("left", "right"))
    found = si.model.profile(left.union(right).filter(col("price") > 1), {"left": EVENTS, "right": EVENTS.slice(3_000)})
    assert found.costs.rows == 5_000
    assert found.costs.states == ()


def test_what_streams_that_are_joined_keep() -> None:
    left, right = (si.from_arrow(EVENTS.slice(0, rows)).with_watermark("time", "1s") for rows in (4_000, 2_000))
    joined = left.join(right, on="user", within=si.tumbling("time", "2s"))
    found = list(states_of(joined.op, 6_000))
    assert [round(each.rows, 2) for each in found] == [0.67, 0.33]
    assert all(each.span is not None and each.span.seconds == pytest.approx(3.0) for each in found)


@pytest.mark.parametrize(("given", "text"), [
    ((3,), "takes a flow"), ((si.flow(EVENTS.schema),), "needs a sample"),
    ((si.flow(EVENTS.schema), EVENTS.slice(0, 0)), "needs rows"), ((si.flow(EVENTS.schema), 3), "Arrow"),
])  # fmt: skip
def test_bad_samples(given: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ScaleinError, match=text) as error:
        si.model.profile(*given)
    assert error.value.facts["at"].startswith("test_model.py:")
