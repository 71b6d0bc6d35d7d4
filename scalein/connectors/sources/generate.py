"""Generated rows: a function of row numbers, at a rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from scalein.connectors.base import QUIET_S
from scalein.connectors.clock import clock
from scalein.errors import BadData
from scalein.storage.checked_json import Json

BATCH_ROWS = 1 << 16


@dataclass(frozen=True)
class Pace:
    """Which rows are made at once, and when: all of them without delay, or so many a second.

    Batches begin at multiples of `batch_rows`, whatever the offset. At a rate, a batch is given when its last row is
    due; a reader that falls behind gets the missed batches at once. Without `rows` there is no end.
    """

    rows_per_second: float | None
    rows: int | None
    batch_rows: int

    def spans(self, offset: int) -> Iterator[tuple[int, int]]:
        """The first row of each batch and the row after its last; an empty span while nothing is due."""
        start = offset
        time = clock()
        began_s = time.now()
        while self.rows is None or start < self.rows:
            end = (start // self.batch_rows + 1) * self.batch_rows
            end = end if self.rows is None else min(end, self.rows)
            if self.rows_per_second is not None:
                due_s = began_s + (end - offset) / self.rows_per_second
                while (left_s := due_s - time.now()) > 0:
                    time.sleep(min(left_s, QUIET_S))
                    if left_s > QUIET_S:
                        yield start, start
            yield start, end
            start = end


@dataclass(frozen=True)
class Generated:
    """`fn(start, count)` gives the rows with these numbers, always the same; an offset is a row number."""

    fn: Callable[[int, int], pa.RecordBatch]
    schema: pa.Schema
    pace: Pace
    replays = True

    @property
    def bounded(self) -> bool:
        return self.pace.rows is not None

    def partitions(self) -> Sequence[str]:
        return ("rows",)

    def read(self, partition: str, offset: Json) -> Iterator[tuple[pa.RecordBatch, Json]]:
        empty = pa.RecordBatch.from_pylist([], schema=self.schema)
        for start, end in self.pace.spans(offset if isinstance(offset, int) else 0):
            if start == end:
                yield empty, start
                continue
            batch = self.fn(start, end - start)
            if not isinstance(batch, pa.RecordBatch) or batch.num_rows != end - start:
                found = f"{batch.num_rows} rows" if isinstance(batch, pa.RecordBatch) else type(batch).__name__
                raise BadData(f"the function of generate was asked for {end - start} rows from {start} on", found=found,
                              wanted="a pyarrow.RecordBatch with that number of rows")
            yield batch, end
