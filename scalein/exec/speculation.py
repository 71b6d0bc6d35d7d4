"""Speculation: rows of windows are aggregated before their times are known, apart from all others.

Reading the times first, for the watermark and for late rows, would add half of the aggregation's cost; the kernels that
aggregate see the times anyway and report their bounds. Then the watermark moves, batch by batch, as it would have; if a
batch has a row that is late by then, the speculative tables are discarded, and the round is repeated the plain way.

While workers aggregate, more rows may be taken: a speculative round lasts as long as a round should, however fast it
turns out to be, and workers wait for each other only once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import pyarrow as pa

from scalein.exec.event_time import PartitionClock

if TYPE_CHECKING:
    from scalein.exec.window_aggregate import WindowedAggregate

MIN_ROWS = 1 << 20  # of a speculative round: its groups are drained afterwards
MAX_GROUPS = 1 << 18  # of a speculative round
PAUSE_ROUNDS = 16  # without speculation, after a round that was discarded or had too many groups


class Partition(Protocol):
    """What a batch was read from, by the name of its clock."""

    @property
    def name(self) -> str: ...


class Delivery(Protocol):
    """A piece of a source batch."""

    @property
    def reader(self) -> Partition: ...
    @property
    def batch(self) -> pa.RecordBatch: ...
    @property
    def is_last(self) -> bool: ...


D = TypeVar("D", bound=Delivery)


class WatermarkOwner(Protocol):
    """What has a watermark, which follows the clocks of partitions."""

    watermark: int | None

    def move_watermark(self) -> None: ...


def speculate(time: WatermarkOwner, step: WindowedAggregate, column: str, clocks: dict[str, PartitionClock],
              deliveries: list[D], more: Callable[[], list[D]]) -> bool:
    """True if the rows were aggregated and the watermark advanced. Otherwise nothing changed, except that `deliveries`
    may have grown by `more()`.
    """
    full = [delivery for delivery in deliveries if delivery.batch.num_rows]
    if not step.can_speculate(column, sum(delivery.batch.num_rows for delivery in full)):
        return False

    def batches() -> Iterator[pa.RecordBatch]:
        for delivery in full:  # and those that are added meanwhile
            yield delivery.batch
            if delivery is full[-1]:
                found = more()
                deliveries.extend(found)
                full.extend(each for each in found if each.batch.num_rows)

    found = step.speculate(batches(), lambda: [delivery.batch for delivery in full])
    if found is None:
        return False
    within = dict(zip(map(id, full), found, strict=True))
    before, watermark = {name: replace(clock) for name, clock in clocks.items()}, time.watermark
    for delivery in deliveries:
        clock, times = clocks[delivery.reader.name], within.get(id(delivery))
        if times is not None:
            if time.watermark is not None and step.is_late(times[0], time.watermark):
                for name, known in before.items():
                    vars(clocks[name]).update(vars(known))  # in place: the timeline has the same clocks
                time.watermark = watermark
                step.end_speculation(False)
                return False
            clock.observe(delivery.batch.column(column), times, time.watermark)
        if delivery.is_last:
            clock.end_batch()
            time.move_watermark()
    step.end_speculation(True)
    return True
