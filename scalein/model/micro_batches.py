"""What a micro-batch of `scalein.spark.start` takes, from the costs of a flow, figures of Spark and a configuration.

A batch has one or two waves of tasks (`spark/streaming/query.py`). Small batches of files: each of `partitions` tasks
reads all rows, keeps those of its keys, and holds its part of the state; nothing is shuffled. Others: tasks on all
cores read the rows and make partial groups of them, which are shuffled to `partitions` tasks. Tasks that find no free
core wait: as many partitions as slots, or a multiple, keep all of them busy; fewer leave some idle.

State is in sorted runs: a batch writes one of the groups that it touched, merged with those that are not much larger
(`hash_runs.choose_to_merge`, which decides here as well). An aggregation crosses the shuffle as partial groups, a few
of a heavy key for each task that makes them; rows of `process` and of joins cross one by one, so the partition of a
heavy key is the one that the batch waits for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2

from scalein.model.calibration import SparkFigures
from scalein.model.costs import Costs, StateCost
from scalein.state.hash_runs import MIGRATION_RATIO, MIGRATION_ROWS, MIGRATION_STEPS, choose_to_merge

BY_ROW = ("process", "join")  # whose rows are shuffled
SELECT_S = 4e-9  # of a row that a task reads and that has a key of another task
GROUP_BYTES = 48.0  # of a group of which the calibration says how long it takes
MERGED_BATCHES = 64  # that are looked at, to find how often a group is written


@dataclass(frozen=True, slots=True)
class SparkConfig:
    """Of a stream: the arguments of `start`, and the machines."""

    partitions: int
    executors: int
    cores: int
    every_s: float
    read_by: str  # tasks, as of files; or spark
    migration: str

    @property
    def slots(self) -> int:
        return self.executors * self.cores

    @property
    def waves(self) -> int:
        """How often a slot has a task that holds state."""
        return ceil(self.partitions / self.slots)


@dataclass(frozen=True, slots=True)
class Touched:
    """The groups of a step with state, in all and in a batch."""

    state: StateCost
    groups: float
    changed: float

    @property
    def work(self) -> float:
        """The same in groups of the size that the calibration has."""
        return self.written * max(1.0, self.state.group_bytes / GROUP_BYTES)

    @property
    def written(self) -> float:
        """Groups that a batch reads, merges and writes, on average."""
        return self.changed * _rewrites(self.groups / self.changed) if self.changed else 0.0


@dataclass(frozen=True, slots=True)
class Batch:
    """Where the seconds of a micro-batch go."""

    parts: dict[str, float]
    written_bytes: float  # of state

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def batch_of(rows: float, row_s: float, costs: Costs, touched: list[Touched], figures: SparkFigures,
             config: SparkConfig, slower: float = 1.0) -> Batch:
    """A micro-batch of `rows` rows, each of which takes `row_s` of a core."""
    from scalein.spark.streaming.inputs import READ_ALL_BYTES  # needed for streams on Spark only

    size = rows * costs.bytes
    partitions, slots = config.partitions, config.slots
    share = fullest_share(costs, partitions)  # of the partition that takes longest
    behind = config.waves * partitions * share if partitions > slots else partitions * share
    state_s = sum(each.work for each in touched) * figures.group_s * slower
    task_s, fixed_s = figures.task_s, max(figures.batch_s - figures.task_s, 0.2 * figures.batch_s)
    decode_s = size / (figures.read_bytes_s if config.read_by == "tasks" else figures.transfer_bytes_s)
    parts = {"fixed cost of a batch": fixed_s}
    by_row_s = serial_share(costs) * rows * row_s  # where the state is
    first_s = rows * row_s - by_row_s
    name = "reading of files" if config.read_by == "tasks" else "Arrow from Spark"
    if not costs.states:
        parts["fixed cost of a batch"] += task_s
        parts["kernels"], parts[name] = rows * row_s / slots, decode_s / slots
        return Batch(parts, 0.0)
    if config.read_by == "tasks" and partitions * size <= slots * READ_ALL_BYTES:
        parts["fixed cost of a batch"] += config.waves * task_s
        parts[name] = config.waves * (decode_s + (rows * SELECT_S * slower if partitions > 1 else 0.0))
        parts["kernels"] = behind * rows * row_s / partitions
    else:
        parts["fixed cost of a batch"] += figures.stage_s + config.waves * task_s
        parts["kernels"] = first_s / slots + behind * by_row_s / partitions
        parts[name] = decode_s / slots
        if by_row_s:
            parts["rows in the shuffle"] = size / figures.transfer_bytes_s * (1 / slots + behind / partitions)
    parts["runs of state"] = config.waves * state_s / partitions
    written = sum(each.written * each.state.group_bytes for each in touched)
    return Batch({name: each for name, each in parts.items() if each > 0}, written)


def serial_share(costs: Costs) -> float:
    """The share of the kernels' time in steps that have the rows of a key one after the other."""
    whole = sum(each.seconds for each in costs.stages)
    return sum(each.seconds for each in costs.stages if each.is_serial) / whole if whole else 0.0


def fullest_share(costs: Costs, partitions: int) -> float:
    """The share of rows that the partition with most of them has; groups count once, however often they occur."""
    shares = [each.groups.fullest(partitions) for each in costs.states if each.name in BY_ROW]
    return max(shares, default=1 / partitions)


def rescale_s(touched: list[Touched], figures: SparkFigures, config: SparkConfig) -> float:
    """Seconds that the batch after a rescale takes longer: tasks open the files of the old ones; "eager" rewrites all.
    """
    def moved(each: Touched) -> float:
        """The groups that move with the first batch."""
        if config.migration == "lazy":
            return 0.0
        limit = max(MIGRATION_ROWS * config.partitions, MIGRATION_RATIO * each.changed)
        return each.groups if config.migration == "eager" else min(each.groups / MIGRATION_STEPS, limit)

    groups = sum(moved(each) * max(1.0, each.state.group_bytes / GROUP_BYTES) for each in touched)
    return figures.task_s * config.waves + groups * figures.group_s * config.waves / config.partitions


@lru_cache(maxsize=4_096)
def _rewrites_of(step: int) -> float:
    groups, handled = 2.0 ** (step / 4), 0.0
    runs = [groups]
    for _ in range(MERGED_BATCHES):
        chosen = choose_to_merge([round(each * 1_000) for each in runs], 1_000)
        left = 1 - 1 / groups if groups > 1 else 0.0  # the share of all groups that the merged runs do not have
        for each in chosen:
            left *= max(0.0, 1 - runs[each] / groups)
        handled += 1 + sum(runs[each] for each in chosen)
        runs = [*(run for k, run in enumerate(runs) if k not in chosen), groups * (1 - left)]
    return handled / MERGED_BATCHES


def _rewrites(groups: float) -> float:
    """The groups that are read and merged for each one that changes; there are `groups` for each one that changes."""
    return _rewrites_of(round(4 * log2(max(1.0, groups))))
