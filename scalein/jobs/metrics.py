"""Figures of a job: counters that its threads add to, and what a user sees of them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from scalein.connectors.base import Json
from scalein.jobs.json import as_int

_BUCKETS = np.geomspace(1e-5, 100.0, 141)  # seconds; 20 a decade


@dataclass
class Latency:
    """A histogram of times, in steps of 12 %."""

    counts: np.ndarray = field(default_factory=lambda: np.zeros(len(_BUCKETS) + 1, np.int64))

    def add(self, seconds: float, rows: int) -> None:
        self.counts[np.searchsorted(_BUCKETS, seconds)] += rows

    def percentile(self, share: float) -> float | None:
        """The time that a share of the rows stayed below, in seconds."""
        total = int(self.counts.sum())
        if not total:
            return None
        place = int(np.searchsorted(np.cumsum(self.counts), share * total))
        return float(_BUCKETS[min(place, len(_BUCKETS) - 1)])


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
    latency: Latency = field(default_factory=Latency)
    began: float = field(default_factory=time.time)

    KEPT: ClassVar = ("rows_in", "bytes_in", "rows_out", "late_rows", "timeless_rows", "failed_rows")

    def to_json(self) -> dict[str, int]:
        """Counters that go on in the next run."""
        return {name: getattr(self, name) for name in self.KEPT}

    def restore(self, given: dict[str, Json]) -> None:
        for name in self.KEPT:
            setattr(self, name, as_int(given[name]))
