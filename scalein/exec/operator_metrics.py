"""What passed an operator in this run, and how long that took, with the workers that it waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import pyarrow as pa

from scalein.kernels.kernel_metrics import WorkerMetrics, recording


class _Batch(Protocol):
    @property
    def batch(self) -> pa.RecordBatch: ...


Arrived = TypeVar("Arrived", bound=_Batch)


@dataclass
class OperatorMetrics:
    """Counters of one operator; the job's thread updates them, and any thread may read them."""

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
