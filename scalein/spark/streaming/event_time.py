"""The event time of a stream between two batches.

A task summarizes the times of its rows, and every process that has the summaries of all tasks computes the same clock.
Which times are outliers, and do not advance it, is the rule of jobs: `exec/event_time.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scalein.exec.event_time import TimeSummary, advance, merge_summaries
from scalein.storage.checked_json import Json, as_int, as_list, as_map


@dataclass(frozen=True, slots=True)
class Clock:
    """Event time between two batches, in units of the time column. The watermark never goes back."""

    greatest: int | None = None
    outlier_batches: int = 0  # consecutive, whose median row was an outlier
    outlier_rows: int = 0
    watermark: int | None = None  # stored: a stream may resume with another delay, and closed windows stay closed
    inputs: tuple[Clock, ...] = ()  # of a stream of several inputs, whose watermark is the least of theirs

    def advance(self, summaries: Iterable[TimeSummary], max_gap: int | None, delay: int) -> Clock:
        """The clock after a batch, from the summaries of all its tasks, in any order."""
        batch = merge_summaries(summaries, max_gap)
        if not batch.ranges:
            return self
        greatest, outliers, outlier_batches = advance(self.greatest, self.outlier_batches, batch, max_gap)
        watermark = greatest - delay if self.watermark is None else max(self.watermark, greatest - delay)
        return Clock(greatest, outlier_batches, self.outlier_rows + outliers, watermark)

    def united(self, inputs: Sequence[Clock]) -> Clock:
        """The clock of several inputs, whose clocks are these after a batch."""
        marks = [each.watermark for each in inputs]
        known = [mark for mark in marks if mark is not None]
        watermark = self.watermark if len(known) < len(marks) or not known else min(known)
        if self.watermark is not None and watermark is not None:
            watermark = max(self.watermark, watermark)
        return Clock(outlier_rows=sum(each.outlier_rows for each in inputs), watermark=watermark, inputs=tuple(inputs))

    def to_json(self) -> Json:
        found: dict[str, Json] = {"greatest": self.greatest, "far_batches": self.outlier_batches,
                                  "far_rows": self.outlier_rows, "watermark": self.watermark}
        return {**found, "inputs": [each.to_json() for each in self.inputs]} if self.inputs else found

    @staticmethod
    def from_json(content: Json) -> Clock:
        fields = as_map(content)
        greatest, watermark = (None if fields[name] is None else as_int(fields[name])
                               for name in ("greatest", "watermark"))
        inputs = tuple(Clock.from_json(each) for each in as_list(fields.get("inputs", [])))
        return Clock(greatest, as_int(fields["far_batches"]), as_int(fields["far_rows"]), watermark, inputs)
