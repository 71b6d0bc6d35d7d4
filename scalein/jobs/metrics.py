"""Metrics of a job: counters that its threads update, and the figures that users see."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from scalein.storage.checked_json import Json, as_int

LATENCY_LIMITS = np.geomspace(1e-5, 100.0, 141)  # seconds; 20 a decade
_BUCKETS_A_STEP = 7  # of those, to one that others see


@dataclass
class Latency:
    """A histogram of times, in steps of 12 %."""

    counts: np.ndarray = field(default_factory=lambda: np.zeros(len(LATENCY_LIMITS) + 1, np.int64))
    total_s: float = 0.0  # over all rows

    def add(self, seconds: list[float], rows: list[int]) -> None:
        """How long each of some batches took, and how many rows it had."""
        np.add.at(self.counts, np.searchsorted(LATENCY_LIMITS, seconds), rows)
        self.total_s += sum(each * count for each, count in zip(seconds, rows, strict=True))

    def percentile(self, share: float) -> float | None:
        """The time that a share of the rows stayed below, in seconds."""
        total = int(self.counts.sum())
        if not total:
            return None
        place = int(np.searchsorted(np.cumsum(self.counts), share * total))
        return float(LATENCY_LIMITS[min(place, len(LATENCY_LIMITS) - 1)])

    def buckets(self) -> list[tuple[float, int]]:
        """A cumulative histogram: limits in seconds, each 2.2 times the one before and the last infinite, with the
        number of rows that took no longer.
        """
        below = np.cumsum(self.counts)
        places = range(0, len(LATENCY_LIMITS), _BUCKETS_A_STEP)
        return [*((float(LATENCY_LIMITS[k]), int(below[k])) for k in places), (float("inf"), int(below[-1]))]


@dataclass
class Metrics:
    """Counters over the job's life, with those of earlier runs of its checkpoint."""

    rows_in: int = 0
    bytes_in: int = 0
    rows_out: int = 0
    late_rows: int = 0
    timeless_rows: int = 0
    failed_rows: int = 0
    epochs: int = 0
    failed_checkpoints: int = 0
    busy_s: float = 0.0
    wait_s: float = 0.0
    rescales: list[dict[str, float | int]] = field(default_factory=list)
    checkpoint_s: float | None = None  # from the freeze to the commit, of the last one
    checkpoint_at: float | None = None  # time of that commit, in seconds since 1970
    latency: Latency = field(default_factory=Latency)
    began: float = field(default_factory=time.time)
    earlier: dict[str, int] = field(default_factory=dict)  # counters as earlier runs left them
    outputs: list[tuple[str, int]] = field(default_factory=list)  # where each writes to, and its rows of this run

    KEPT: ClassVar = ("rows_in", "bytes_in", "rows_out", "late_rows", "timeless_rows", "failed_rows")

    def note_result(self, output: int, rows: int) -> None:
        self.rows_out += rows
        place, before = self.outputs[output]
        self.outputs[output] = place, before + rows

    def note_rescale(self, workers: int, pause_s: float) -> None:
        """No state has moved: tables and stores belong to the steps, and any worker may serve them."""
        self.rescales.append({"workers": workers, "state_bytes_moved": 0, "pause_s": pause_s, "at": time.time()})

    def to_json(self) -> dict[str, int]:
        """Counters that go on in the next run."""
        return {name: getattr(self, name) for name in self.KEPT}

    def restore(self, given: dict[str, Json]) -> None:
        self.earlier = {name: as_int(given[name]) for name in self.KEPT}
        for name, count in self.earlier.items():
            setattr(self, name, count)

    def of_run(self, name: str) -> int:
        """A counter without what earlier runs counted."""
        return int(getattr(self, name)) - self.earlier.get(name, 0)
