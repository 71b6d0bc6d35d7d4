"""Metrics of a job: counters that its threads update, and the figures that users see."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from scalein.kernels.kernel_metrics import WorkerMetrics, recording
from scalein.storage.checked_json import Json, as_int

_BUCKETS = np.geomspace(1e-5, 100.0, 141)  # seconds; 20 a decade
_BUCKETS_A_STEP = 7  # of those, to one that others see


class _Batch(Protocol):
    @property
    def batch(self) -> pa.RecordBatch: ...


Arrived = TypeVar("Arrived", bound=_Batch)


@dataclass
class Latency:
    """A histogram of times, in steps of 12 %."""

    counts: np.ndarray = field(default_factory=lambda: np.zeros(len(_BUCKETS) + 1, np.int64))
    total_s: float = 0.0  # over all rows

    def add(self, seconds: list[float], rows: list[int]) -> None:
        """How long each of some batches took, and how many rows it had."""
        np.add.at(self.counts, np.searchsorted(_BUCKETS, seconds), rows)
        self.total_s += sum(each * count for each, count in zip(seconds, rows, strict=True))

    def percentile(self, share: float) -> float | None:
        """The time that a share of the rows stayed below, in seconds."""
        total = int(self.counts.sum())
        if not total:
            return None
        place = int(np.searchsorted(np.cumsum(self.counts), share * total))
        return float(_BUCKETS[min(place, len(_BUCKETS) - 1)])

    def buckets(self) -> list[tuple[float, int]]:
        """A cumulative histogram: limits in seconds, each 2.2 times the one before and the last infinite, with the
        number of rows that took no longer.
        """
        below = np.cumsum(self.counts)
        places = range(0, len(_BUCKETS), _BUCKETS_A_STEP)
        return [*((float(_BUCKETS[k]), int(below[k])) for k in places), (float("inf"), int(below[-1]))]


@dataclass
class Stage:
    """What passed a step of a job in this run, and how long that took, with the workers that it waited for."""

    name: str
    rows_in: int = 0
    rows_out: int = 0
    busy_s: float = 0.0
    worker_metrics: WorkerMetrics = field(default_factory=WorkerMetrics)

    def taking(self, morsels: Iterable[Arrived]) -> Iterator[Arrived]:
        for morsel in morsels:
            self.rows_in += morsel.batch.num_rows
            yield morsel

    @contextmanager
    def working(self) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            with recording(self.worker_metrics):
                yield
        finally:
            self.busy_s += time.perf_counter() - begun

    def giving(self, make: Callable[[], Iterable[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
        """What a step gives, one batch after the other; the time between two is not the step's."""
        with self.working():
            batches = iter(make())
        while True:
            with self.working():
                batch = next(batches, None)
            if batch is None:
                return
            self.rows_out += batch.num_rows
            yield batch

    def to_json(self) -> dict[str, object]:
        workers = [{"rows": each.rows, "bytes": int(each.bytes), "useful_s": round(each.useful_s, 3),
                    "wait_s": round(each.wait_s, 3)} for each in list(self.worker_metrics.counters)]
        return {"stage": self.name, "rows_in": self.rows_in, "rows_out": self.rows_out,
                "busy_s": round(self.busy_s, 3), "workers": workers}


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

    KEPT: ClassVar = ("rows_in", "bytes_in", "rows_out", "late_rows", "timeless_rows", "failed_rows")

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
