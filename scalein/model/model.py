"""A model of a flow: predicts how a configuration will do before it is deployed, from costs and a calibration.

The greatest rate is that of rounds as long as the job makes them (`costs.py`), with the time in kernels shared by
workers, never faster than memory delivers the bytes. Where state is larger than in the sample, each probe takes what
the calibration says of a table of that size; where it is larger than `memory=`, rows that meet a cold group pay for
writing and merging it on disk.

Latency is that of a queue whose server takes all that waits as one round (gated service): a batch waits until the
round before has ended, and leaves with its own. The wait for the batches before it is that of a G/G/1
(`network.waiting`); between them lies what a round takes besides its rows, of which a loaded job pays less often.
Waking a thread and checkpoints add to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import exp, inf, isfinite, log2, sqrt
from typing import Any

from scalein.durations import seconds
from scalein.errors import BadArgument, SourceLoc, here
from scalein.jobs.driver import LONG_ROUND_S, MAX_ROUND_ROWS, MIN_ROUND_ROWS, ROUND_S
from scalein.jobs.spec import Shares
from scalein.model.autoscale import Scales
from scalein.model.calibration import Calibration, calibration_of
from scalein.model.costs import Costs
from scalein.model.micro_batches import (
    Batch,
    SparkConfig,
    Touched,
    batch_of,
    fullest_share,
    rescale_s,
    serial_share,
)
from scalein.model.network import gamma_quantile, waiting
from scalein.model.prediction import Checkpoint, Interval, Plan, Prediction
from scalein.notebook_card import format_bytes
from scalein.options import parse_size
from scalein.state.hash_runs import MIGRATIONS
from scalein.state.key_groups import KEY_GROUPS

BATCH_ROWS = 1 << 12, 1 << 18  # of a source, if nothing is said: the least and the most
BATCH_S = 0.004  # of a worker's time that such a batch takes
HORIZON_S = 3_600.0  # of a state that grows, if nothing says how many keys there are: as after an hour
SMOOTH = 4.0  # the exponent by which what workers share and what they do one at a time are added
CONTENTION = 0.04  # of a worker's time that each other worker costs it
SEGMENT_BYTES = 1 << 24  # of a store, that a snapshot writes whole
MERGE_S = 60e-9  # of a group that goes from a worker's table into a store
COLD_WRITES = 3.0  # bytes written for each byte of a cold group that changes: its partial, and compactions
COLD_S = 0.4e-6  # CPU of a row that meets a cold group
EPOCH_S = 1.5e-3  # of the job's thread, for each checkpoint
RESCALE_S = 1e-4
QUANTILE = 1.645  # of a normal distribution, for intervals of 90 %
MODEL_ERROR, WORKER_ERROR, DISK_ERROR, MACHINE_ERROR = 0.06, 0.05, 0.3, 0.2  # relative standard deviations
SPARK_ERROR = 0.15
LATENCY_FACTOR = 1.4  # either way, besides what the error of the greatest rate does
READ_BY = "tasks", "spark"
HEADROOM = 0.9  # the greatest utilization that is planned for
FEW_ROWS = 5_000  # of a sample that says little
PARTITIONS = [1 << power for power in range(9)]  # of a stream on Spark, that are tried
MOST_CHOICES = 32
MOST_WORKERS, MOST_ASKED = 64, 1_024
GREATEST_FACTOR = 1_000.0  # on a rate, that a plan looks at
GREATEST = 1e18  # of any number that is given


@dataclass(frozen=True, slots=True)
class Config:
    """A configuration, checked."""

    workers: int
    batch_rows: int
    memory: int | None
    every_s: float | None
    keys: int | None
    variability: float  # squared coefficient of variation of the times between batches


@dataclass(frozen=True, slots=True)
class _Figures:
    """What a configuration can do, whatever the rate."""

    row_s: float  # of a row at the greatest rate, with all that it causes
    parts: dict[str, float]  # the same, by what causes it
    first_s: float  # of a round with one batch
    batch_s: float  # of a batch more in a round
    fixed_s: float  # of a round, without its batches


class Model(Scales):
    """Of one flow: see `si.model.profile`.

    >>> from scalein.model.costs import Costs
    >>> from scalein.model.calibration import TYPICAL
    >>> model = Model(Costs(1e-5, 2e-5, 0.0, 1e-4, 0.0, 0.0, ((1e6, 1e-8),)), TYPICAL)
    >>> one, two = model.predict(workers=1), model.predict(workers=2)
    >>> 1.5 < two.max_rate / one.max_rate < 2
    True
    >>> model.predict(workers=1, rate=2 * one.max_rate).saturated
    True
    >>> model.recommend(rate=0.7 * two.max_rate, p99="100ms").workers
    2
    """

    def __init__(self, costs: Costs, calibration: Calibration) -> None:
        self.costs, self.calibration = costs, calibration

    def predict(self, *, workers: int = 1, rate: float | None = None, memory: str | int | None = None,
                every: object = None, batch_rows: int | None = None, keys: int | None = None,
                variability: float = 1.0, on: object = None, partitions: int | None = None,
                executors: int | None = None, cores: int | None = None, read_by: str | None = None,
                migration: str | None = None) -> Prediction:
        """What a job with this configuration will do: the arguments are those of `start`.

        `rate` is in rows a second (70 % of the greatest if it is not given), in batches of `batch_rows` (what a worker
        does in 4 ms, at most 262,144), which arrive at random: `variability` is the squared coefficient of variation of
        the times between them, 0 for a clock, more than 1 for bursts. `keys` says how many distinct keys there are in
        all, where the sample cannot tell. `on` is the calibration of another machine.

        With `partitions`, `executors` or `cores` (of each executor) it is about `scalein.spark.start`, whose trigger is
        `every` (a second if it is not given): this needs a calibration with Spark (`scalein calibrate --spark`).
        `read_by` is "tasks" where tasks read files themselves, "spark" where rows come out of the JVM (as in
        `last_progress`), and `migration` is that of `start`, for the pause of a rescale.
        """
        at = here()
        config = self._config(workers, memory, every, batch_rows, keys, variability, at)
        if rate is not None:
            _check(rate, "rate", at, zero=True)
        machine = self.calibration if on is None else calibration_of(on, at)
        given = partitions, executors, cores, read_by, migration
        if any(each is not None for each in given):
            return self._predict_spark(config, self._spark_config(config, machine, *given, at), rate, machine)
        return self._predict(config, rate, machine)

    def recommend(self, *, rate: float, p99: object = None, memory: object = None, every: object = None,
                  batch_rows: object = None, keys: int | None = None, variability: float = 1.0, on: object = None,
                  partitions: object = None, cores: int | None = None, read_by: str | None = None,
                  most: int = MOST_WORKERS, headroom: float = HEADROOM) -> Plan:
        """The fewest workers, at most `most`, that hold a rate within a p99 latency, no more than `headroom` busy.

        `memory`, `every`, `batch_rows` and `partitions` may each be a list to choose from: of what holds with the
        fewest workers, it is the one with the least memory, and then the least latency. With `partitions` (True: any
        number), `cores` or `read_by` it is about a stream on Spark, and what is fewest are executors.
        """
        at = here()
        _check(rate, "rate", at)
        _check(headroom, "headroom", at)
        machine = self.calibration if on is None else calibration_of(on, at)
        limit_s = inf if p99 is None else _duration(p99, "p99", at)
        if isinstance(most, bool) or not isinstance(most, int) or not 1 <= most <= MOST_ASKED:
            raise BadArgument(f"most must be a number of workers from 1 to {MOST_ASKED}", at=at, found=repr(most))
        is_spark = any(each is not None for each in (partitions, cores, read_by))
        numbers = PARTITIONS if is_spark and partitions in (None, True) else partitions
        choices = list(product(*(_choices(name, given, at) for name, given in (
            ("memory", memory), ("every", every), ("batch_rows", batch_rows), ("partitions", numbers)))))

        def of(count: int, choice: tuple[Any, ...]) -> Prediction:
            bytes_, every, rows, number = choice
            config = self._config(1 if is_spark else count, bytes_, every, rows, keys, variability, at)
            if not is_spark:
                return self._predict(config, rate, machine)
            return self._predict_spark(config, self._spark_config(config, machine, number, count, cores, read_by, None,
                                                                  at), rate, machine)

        def holds(found: Prediction) -> bool:
            return found.utilization <= headroom and found.p99_s <= limit_s

        def price(found: Prediction) -> tuple[float, float, float]:
            given = found.config.get("memory")
            return inf if given is None else float(str(given)), found.p99_s, -found.max_rate

        for count in range(1, most + 1):
            if holding := [each for choice in choices if holds(each := of(count, choice))]:
                return self._plan(True, min(holding, key=price), limit_s, headroom, at)
        best = max((of(most, choice) for choice in choices), key=lambda each: (-each.p99_s, each.max_rate))
        return self._plan(False, best, limit_s, headroom, at)

    # --- configurations

    def _config(self, workers: int, memory: str | int | None, every: object, batch_rows: int | None, keys: int | None,
                variability: float, at: SourceLoc) -> Config:
        batch_rows = self._batch_rows() if batch_rows is None else batch_rows
        for name, value in (("workers", workers), ("batch_rows", batch_rows), ("keys", 1 if keys is None else keys)):
            _check_count(value, name, at)
        _check(variability, "variability", at, zero=True)
        bytes_ = None if memory is None else parse_size(memory, at=at)
        _check_count(1 if bytes_ is None else bytes_, "memory", at)
        return Config(workers, batch_rows, bytes_, None if every is None else _duration(every, "every", at), keys,
                      float(variability))

    def _batch_rows(self) -> int:
        """A power of two, so that it stays the same when costs are measured again."""
        rows = BATCH_S / (self.costs.kernels_s(1e6, 1e6) / 1e6 + self.costs.row_s + self.costs.end_row_s)
        return int(min(BATCH_ROWS[1], max(BATCH_ROWS[0], 2.0 ** round(log2(rows)))))

    def _predict(self, config: Config, rate: float | None, machine: Calibration) -> Prediction:
        """The prediction, and what it would be with costs that are wrong by their error, for the intervals."""
        error = QUANTILE * self._error(config, machine)
        found = self._figures(config, rate, machine)
        max_rate = 1 / found.row_s
        rate = 0.7 * max_rate if rate is None else float(rate)
        busy = rate / max_rate
        p50, p99 = self._latency(found, config, rate, machine)
        _, best = self._latency(_scaled(found, 1 / (1 + error)), config, rate, machine)
        _, worst = self._latency(_scaled(found, 1 + error), config, rate, machine)
        state, kept = self._state(config, rate), self._kept(config)
        on_disk = max(0.0, state - kept)
        memory = state - on_disk + self._waiting_bytes(config, rate, found)
        checkpoint = None if config.every_s is None else self._checkpoint(config, rate, machine)
        pause = RESCALE_S + config.workers * machine.wake_s
        intervals: dict[str, Interval] = {
            "max_rate": (max_rate / (1 + error), max_rate * (1 + error)),
            "utilization": (busy / (1 + error), busy * (1 + error)),
            "p50_s": (p50 / LATENCY_FACTOR, p50 * LATENCY_FACTOR),
            "p99_s": (best / LATENCY_FACTOR, worst * LATENCY_FACTOR),
            "memory": (memory / 1.3, memory * 1.3), "rescale_pause_s": (pause / 3, pause * 3)}
        if checkpoint is not None:
            intervals["checkpoint_s"] = (checkpoint.seconds / 2, checkpoint.seconds * 2)
        low, high = intervals["max_rate"]
        shown: dict[str, object] = {
            "workers": config.workers, "batch_rows": config.batch_rows, "memory": config.memory,
            "every": config.every_s, "keys": config.keys}
        return Prediction(shown, rate, max_rate, low, high, busy, p50, p99, busy >= 1, state, memory, on_disk,
                          checkpoint, pause, _in_words(found, config), found.parts, intervals,
                          tuple(self._notes(config, machine)),
                          partial(self._predict, config, machine=machine))

    def _error(self, config: Config, machine: Calibration) -> float:
        """The relative standard deviation of the greatest rate: more the farther it is from what was measured."""
        parts = [MODEL_ERROR, self.costs.spread, WORKER_ERROR * log2(config.workers)]
        if self._state(config, None) > self._kept(config):
            parts.append(DISK_ERROR)
        if machine is not self.calibration or config.workers > machine.cores:
            parts.append(MACHINE_ERROR)
        return sqrt(sum(part ** 2 for part in parts))

    def _notes(self, config: Config, machine: Calibration) -> list[str]:
        found = []
        if not machine.is_measured:
            found.append("the machine was not calibrated (`scalein calibrate`): its figures are typical ones")
        if config.workers > machine.cores:
            found.append(f"the machine has {machine.cores} cores: this is of one like it with {config.workers}")
        if 0 < self.costs.rows < FEW_ROWS:
            found.append(f"the sample has only {self.costs.rows:,} rows: with some hundred thousand, as they will "
                         "come, figures are less of a guess")
        growing = [each.name for each in self.costs.states
                   if each.span is None and each.groups.is_growing and not each.keeps_rows]
        if growing and config.keys is None:
            found.append(f"most keys of {growing[0]} occur once in the sample: its state is that after an hour, if the "
                         "sample is like the rest; keys= says how many there are")
        return found

    # --- rounds

    def _figures(self, config: Config, rate: float | None, machine: Calibration) -> _Figures:
        is_late = self.costs.emits_late and config.memory is None
        target_s = LONG_ROUND_S if is_late else ROUND_S
        rows = 1e6
        parts = self._parts(config, rate, machine, rows)
        for _ in range(4):  # the longer a round, the less of it is fixed
            rows = min(MAX_ROUND_ROWS, max(MIN_ROUND_ROWS, target_s / sum(parts.values())))
            parts = self._parts(config, rate, machine, rows)
        batch_rows = config.batch_rows
        alone = self._parts(replace(config, workers=1), rate, machine, batch_rows, alone=True)
        first = batch_rows * sum(alone.values())
        more = batch_rows * sum(self._parts(config, rate, machine, max(batch_rows, rows)).values())
        fixed = (self.costs.alone or self.costs).round_s * self._slower(machine)
        return _Figures(sum(parts.values()), parts, max(first, fixed), max(1e-9, min(first, more)), fixed)

    def _slower(self, machine: Calibration) -> float:
        """The factor on what was measured here."""
        return 1.0 if machine is self.calibration else self.calibration.operations / machine.operations

    def _parts(self, config: Config, rate: float | None, machine: Calibration, rows: float, *,
               alone: bool = False) -> dict[str, float]:
        """Where the seconds of a row go, in a round of so many, or in a round of one batch."""
        costs, workers, slower = self.costs, config.workers, self._slower(machine)
        if alone and costs.alone is not None:
            costs = costs.alone
        crew = workers / (1 + CONTENTION * (workers - 1))
        kernels = costs.kernels_s(rows, config.batch_rows) * slower / rows
        prepare = costs.prepare_s(rows, config.batch_rows) * slower / rows
        end = costs.end_s(rows) * slower / rows + (machine.wake_s / rows if workers > 1 else 0.0)
        # One worker prepares while others compute: the longer of both counts, smoothly, as neither waits perfectly.
        alone_s = serial_share(self.costs) * kernels
        shared = (kernels - alone_s + prepare) / crew + alone_s
        both = shared if workers == 1 else (shared ** SMOOTH + prepare ** SMOOTH) ** (1 / SMOOTH)
        # What one worker moves is in what was measured here: no more than this machine can. Together, or on another
        # machine, workers may ask for more than there is.
        moved = min(sum(each.rows * each.cost.bytes for each in self.costs.stages),
                    kernels / slower * self.calibration.bandwidth_of(1))
        delivered = moved / machine.bandwidth_of(workers)
        by_all, left = (kernels - alone_s) / crew, both - (kernels - alone_s) / crew - alone_s
        parts = {"kernels": by_all, "kernels one at a time": alone_s, "preparation": left, "ends of rounds": end}
        if delivered > both:
            parts["memory bandwidth"] = delivered - both
        parts["cache misses of state"] = self._misses(config, rate, machine) / crew
        parts["state on disk"] = self._disk(config, rate, machine)
        if config.every_s is not None:
            share = self._checkpoint(config, 1 / sum(parts.values()) if rate is None else rate, machine).share
            parts["checkpoints"] = sum(parts.values()) * share / (1 - min(share, 0.9))
        return {name: each for name, each in parts.items() if each > 0}

    def _misses(self, config: Config, rate: float | None, machine: Calibration) -> float:
        """Seconds that the probes of a row take longer than in the sample, whose state was smaller, and which was
        measured on this machine.
        """
        found, slower = 0.0, self._slower(machine)
        for each in self.costs.states:
            if each.keeps_rows:  # they are written one after the other
                continue
            there = each.groups.distinct * each.group_bytes
            size = each.count(rate or 1e6, config.keys, self._rows(rate)) * each.group_bytes
            found += each.rows * max(0.0, machine.probe_s(size) - slower * self.calibration.probe_s(there))
        return found

    # --- state

    def _rows(self, rate: float | None) -> float:
        """Of the source, that have come when a state is looked at."""
        return max(self.costs.rows, (rate or 1e6) * HORIZON_S)

    def _state(self, config: Config, rate: float | None) -> float:
        return sum(each.count(rate or 1e6, config.keys, self._rows(rate)) * each.group_bytes
                   for each in self.costs.states)

    def _kept(self, config: Config) -> float:
        """Bytes of state that stay in memory."""
        if config.memory is None:
            return inf
        kept = Shares.of(config.memory, sum(4 if each.name == "group_by" else 3 for each in self.costs.states)).kept
        return float(kept or 0) * max(1, len(self.costs.states))

    def _cold_share(self, config: Config, rate: float | None) -> float:
        """The share of rows whose group is on disk: the coldest ones are."""
        state, kept = self._state(config, rate), self._kept(config)
        keyed = [each.groups for each in self.costs.states if not each.keeps_rows]
        if state <= kept:
            return 0.0
        return 1 - max((each.share_of_hottest(kept / state) for each in keyed), default=kept / state)

    def _disk(self, config: Config, rate: float | None, machine: Calibration) -> float:
        cold = self._cold_share(config, rate)
        if cold <= 0:
            return 0.0
        keyed, kept = (sum(each.rows * each.group_bytes for each in self.costs.states if each.keeps_rows == rows)
                       for rows in (False, True))
        by_key = COLD_S + keyed * COLD_WRITES / machine.disk_write if keyed else 0.0
        return cold * (by_key + kept * (1 / machine.disk_write + 1 / machine.disk_read))  # rows go there once, and back

    def _waiting_bytes(self, config: Config, rate: float, found: _Figures) -> float:
        """Of batches that wait, and those of a round."""
        busy = min(0.95, rate * found.row_s)
        return self.costs.bytes * config.batch_rows * (1 + busy / (1 - busy))

    def _checkpoint(self, config: Config, rate: float, machine: Calibration) -> Checkpoint:
        assert config.every_s is not None
        written = touched = 0.0
        for each in self.costs.states:
            groups = each.count(rate, config.keys, self._rows(rate))
            size = groups * each.group_bytes
            changed = min(groups, each.changed(rate, config.keys, config.every_s))
            segments = max(1.0, size / SEGMENT_BYTES)
            written += size * (1 - exp(-changed / segments))
            touched += changed
        # One after the other, they take as long as they take.
        took = written / machine.disk_write + 4 * machine.sync_s
        busy = EPOCH_S + touched * MERGE_S
        if machine.cores <= config.workers:  # else another core copies
            busy += written / machine.bandwidth_of(1)
        return Checkpoint(written, took, busy / (max(config.every_s, took) + busy))

    # --- latency

    def _latency(self, found: _Figures, config: Config, rate: float, machine: Calibration) -> tuple[float, float]:
        """p50 and p99."""
        arriving = rate / config.batch_rows
        busy = rate * found.row_s
        if busy >= 1:
            return inf, inf
        each, fixed = min(found.batch_s, config.batch_rows * found.row_s), found.fixed_s
        # A round takes what arrived during the one before; at least a batch.
        cycle = max(found.first_s, fixed / (1 - busy))
        is_busy = min(1.0, arriving * found.first_s)
        scv = max(self.costs.variability, 0.05)
        wait, variance = waiting(busy, 1, each, config.variability, scv)
        wait += is_busy * cycle / 2
        variance += is_busy * cycle ** 2 * (1 / 3 - is_busy / 4) + scv * found.first_s ** 2
        if config.every_s is not None:  # a batch that comes during a checkpoint's work in the job's thread waits for it
            stall = self._checkpoint(config, rate, machine).share * config.every_s
            wait += stall ** 2 / (2 * config.every_s)
            variance += stall ** 3 / (3 * config.every_s)
        wake_scv = (machine.wake_p99_s / machine.wake_s / 4) ** 2
        wait += machine.wake_s
        variance += wake_scv * machine.wake_s ** 2
        return tuple(found.first_s + gamma_quantile(wait, variance, q) for q in (0.5, 0.99))  # type: ignore[return-value]

    # --- Spark

    def _spark_config(self, config: Config, machine: Calibration, partitions: int | None, executors: int | None,
                      cores: int | None, read_by: str | None, migration: str | None, at: SourceLoc) -> SparkConfig:
        if machine.spark is None:
            raise BadArgument("the calibration has no figures of Spark", at=at, found=machine.machine,
                              hint="`scalein calibrate --spark` measures them")
        if config.memory is not None:
            raise BadArgument("memory is that of Spark's executors, and no argument of this prediction", at=at,
                              hint="state is in files there; the prediction says what tasks need")
        partitions, executors = (default if value is None else value
                                 for value, default in ((partitions, 8), (executors, 1)))
        _check_count(partitions, "partitions", at)
        if partitions > KEY_GROUPS:
            raise BadArgument(f"partitions is a number from 1 to {KEY_GROUPS}", at=at, found=repr(partitions))
        _check_count(executors, "executors", at)
        cores = max(1, machine.cores // executors) if cores is None else cores
        _check_count(cores, "cores", at)
        for name, value, known in (("read_by", read_by, READ_BY), ("migration", migration, MIGRATIONS)):
            if value is not None and value not in known:
                raise BadArgument(f"no such {name}", at=at, found=repr(value), has=", ".join(map(repr, known)))
        return SparkConfig(partitions, executors, cores, 1.0 if config.every_s is None else config.every_s,
                           read_by or READ_BY[0], migration or MIGRATIONS[0])

    def _predict_spark(self, config: Config, spark: SparkConfig, rate: float | None,
                       machine: Calibration) -> Prediction:
        """A stream in micro-batches, as `micro_batches.py` has them: each takes what came during the one before."""
        figures, costs, every_s = machine.spark, self.costs, spark.every_s
        assert figures is not None
        alone = self._parts(replace(config, workers=1, every_s=None), rate, machine, 1e6)
        row_s = sum(alone.values())

        def batch(seconds: float, each: float) -> Batch:
            return batch_of(each * seconds, row_s, costs, self._touched(config, each, seconds), figures, spark,
                            self._slower(machine))

        longest_s = max(every_s, 2 * batch(1e-9, 1e-9).seconds)  # of a batch, at the greatest rate
        max_rate = _greatest(lambda each: batch(longest_s, each).seconds <= longest_s, 1.0 / row_s * spark.slots)
        rate = 0.7 * max_rate if rate is None else float(rate)
        busy = rate / max_rate
        period_s = every_s
        for _ in range(50):  # a batch takes what came during the one before: until that stays the same
            period_s = min(max(every_s, batch(period_s, rate).seconds), 4 * longest_s)
        done = batch(period_s, rate)
        took_s = done.seconds if busy < 1 else inf
        p50, p99 = (period_s / 2 + took_s, 0.99 * period_s + 1.2 * took_s) if busy < 1 else (inf, inf)
        error = QUANTILE * sqrt(self._error(replace(config, workers=1), machine) ** 2 + SPARK_ERROR ** 2)
        touched = self._touched(config, rate, period_s)
        state = sum(each.groups * each.state.group_bytes for each in touched)
        # A task holds the rows that it reads and the runs that it merges.
        memory = costs.bytes * rate * period_s + min(spark.slots, spark.partitions) * 2 * done.written_bytes \
            / spark.partitions
        pause = rescale_s(touched, figures, spark)
        state_s = done.parts.get("runs of state", 0.0)
        checkpoint = Checkpoint(done.written_bytes, state_s + figures.task_s, state_s / period_s)
        intervals = {"max_rate": (max_rate / (1 + error), max_rate * (1 + error)),
                     "utilization": (busy / (1 + error), busy * (1 + error)),
                     "p50_s": (p50 / (1 + error), p50 * (1 + error)), "p99_s": (p99 / (1 + error), p99 * (1 + error)),
                     "batch_s": (took_s / (1 + error), took_s * (1 + error)), "memory": (memory / 2, memory * 2),
                     "rescale_pause_s": (pause / 3, pause * 3)}
        most = batch(longest_s, max_rate)
        parts = {name: each / max(max_rate * longest_s, 1e-9) for name, each in most.parts.items()}
        shown: dict[str, object] = {
            "workers": spark.slots, "partitions": spark.partitions, "executors": spark.executors, "cores": spark.cores,
            "every": every_s, "keys": config.keys, "read_by": spark.read_by, "migration": spark.migration}
        notes = self._notes(replace(config, workers=spark.cores), machine)
        if spark.partitions < spark.slots and costs.states:
            notes.append(f"{spark.partitions} partitions use {spark.partitions} of {spark.slots} cores for state")
        share = fullest_share(costs, spark.partitions) * spark.partitions
        if share > 1.5:
            notes.append(f"a heavy key: its partition has {share:.1f} times the rows of a fair one, and more "
                         "partitions do not divide it")
        figures_of = _Figures(sum(parts.values()), parts, 0.0, 0.0, 0.0)
        return Prediction(shown, rate, max_rate, *intervals["max_rate"], busy, p50, p99, busy >= 1, state, memory,
                          state, checkpoint, pause, _in_words(figures_of, config), parts, intervals, tuple(notes),
                          partial(self._predict_spark, config, spark, machine=machine), took_s)

    def _touched(self, config: Config, rate: float, seconds: float) -> list[Touched]:
        """The state that a batch changes which takes in `seconds` of a source with `rate` rows a second."""
        found = []
        for each in self.costs.states:
            groups = each.count(rate, config.keys, self._rows(rate))
            found.append(Touched(each, groups, each.changed(rate, config.keys, seconds)))
        return found

    # --- plans

    def _plan(self, is_feasible: bool, found: Prediction, limit_s: float, headroom: float, at: SourceLoc) -> Plan:
        limits = {"workers": found.max_rate / found.rate if found.rate else inf}
        if isfinite(limit_s):
            limits["latency"] = _greatest_factor(found, limit_s)
        notes = list(found.notes)
        if "partitions" in found.config:
            pass  # state is in files anyway
        elif found.on_disk_bytes:
            notes.append(f"{format_bytes(found.on_disk_bytes)} of the state are on disk: memory has no room for them")
        elif found.config.get("memory") is not None and (leaves := _leaves_memory(found)) is not None:
            limits["memory"] = leaves
        first = min(limits, key=limits.__getitem__)
        margin = limits[first]
        text = {
            "workers": f"the workers are saturated at {found.max_rate:,.0f} rows/s ({found.bottleneck})",
            "latency": f"p99 exceeds {limit_s * 1e3:,.4g} ms at {found.rate * limits.get('latency', 0):,.0f} rows/s",
            "memory": f"the state, {format_bytes(found.state_bytes)} now, leaves the memory",
        }[first]
        how_far = f"at {margin:.2f} times the load" if margin > 0 else "at any load"
        if not is_feasible and margin >= 1:
            notes.append(f"the rate can be held, but not with {1 - headroom:.0%} to spare")
        return Plan(is_feasible, found.workers, found, f"{text}: {how_far}", margin, limits, tuple(notes))


def _scaled(found: _Figures, factor: float) -> _Figures:
    return _Figures(found.row_s * factor, found.parts, found.first_s * factor, found.batch_s * factor,
                    found.fixed_s * factor)


def _greatest_factor(found: Prediction, limit_s: float) -> float:
    """The factor on a prediction's rate at which p99 exceeds a limit; 0 if it always does."""
    again: Callable[[float], Prediction] | None = found._at
    assert again is not None
    if again(found.max_rate * 1e-3).p99_s > limit_s:
        return 0.0
    low, high = 1e-3, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if again(found.max_rate * middle).p99_s <= limit_s else (low, middle)
    return low * found.max_rate / found.rate


def _choices(name: str, given: object, at: SourceLoc) -> list[Any]:
    """What may be chosen of an argument that is a value, or a list of them."""
    if not isinstance(given, list | tuple | range):
        return [given]
    if not 0 < len(given) <= MOST_CHOICES:
        raise BadArgument(f"{name} has 1 to {MOST_CHOICES} values to choose from", at=at, found=str(len(given)))
    return list(given)


def _greatest(holds: Callable[[float], bool], about: float) -> float:
    """The greatest rate that holds, from one that is about as great."""
    low, high = 0.0, about
    while holds(high):
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return max(low, 1e-9)


def _leaves_memory(found: Prediction) -> float | None:
    """The factor on a prediction's rate at which state leaves the memory; None if it does not, as it does not grow."""
    again: Callable[[float], Prediction] | None = found._at
    assert again is not None
    low, high = 1.0, GREATEST_FACTOR
    if not again(found.rate * high).on_disk_bytes:
        return None
    while high > low * 1.001:
        middle = sqrt(low * high)
        low, high = (low, middle) if again(found.rate * middle).on_disk_bytes else (middle, high)
    return low


_WORDS = {
    "kernels": "computation in kernels",
    "kernels one at a time": "the rows of keys, which one worker computes one after the other",
    "preparation": "what prepares kernels for each batch, one worker at a time",
    "ends of rounds": "what one thread does at the end of a round, such as closing windows",
    "memory bandwidth": "memory bandwidth",
    "cache misses of state": "cache misses of the state",
    "state on disk": "state that memory has no room for",
    "checkpoints": "checkpoints",
    "Arrow from Spark": "rows that cross from the JVM to Python",
    "reading of files": "files that tasks read",
    "rows in the shuffle": "rows that cross the shuffle",
    "runs of state": "state that is read, merged and written",
    "fixed cost of a batch": "the fixed cost of a micro-batch; a longer trigger would help",
}


def _in_words(found: _Figures, config: Config) -> str:
    """What takes most of a row's time, and what would help."""
    most = max(found.parts, key=found.parts.__getitem__)
    share = found.parts[most] / found.row_s
    help_ = {
        "preparation": f"; batches of more than {config.batch_rows:,} rows would help",
        "ends of rounds": "; more workers help little",
        "kernels one at a time": "; more workers help little", "memory bandwidth": "; more workers help little",
        "state on disk": "; more memory would help", "kernels": "; more workers help",
    }.get(most, "")
    return f"{_WORDS[most]}, {share:.0%} of the time{help_}"


def _duration(value: object, name: str, at: SourceLoc) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        _check(value, name, at)
        return float(value)
    return seconds(value, f"argument {name}", at)


def _check(value: object, name: str, at: SourceLoc, *, zero: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= GREATEST or (value == 0 and not zero):  # type: ignore[operator]
        least = "of at least 0" if zero else "above 0"
        raise BadArgument(f"{name} must be a number {least}", at=at, found=f"{value!r:.100}")


def _check_count(value: object, name: str, at: SourceLoc) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= GREATEST:
        raise BadArgument(f"{name} must be a whole number, at least 1", at=at, found=f"{value!r:.100}")
