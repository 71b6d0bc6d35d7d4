"""Units of work: a piece of a batch with the number of its first row in the source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

# Rows a worker takes at once: some milliseconds of work, so that handing out costs nothing and
# Ctrl-C is seen soon.
UNIT_ROWS = 1 << 20
ALONE_ROWS = 1 << 22


@dataclass(frozen=True, slots=True)
class Unit:
    """Rows to work on, and where they stand in the source's order."""

    batch: pa.RecordBatch
    first_row: int


def units(batches: Iterator[pa.RecordBatch], workers: int) -> Iterator[Unit]:
    """The batches cut into units; order and row numbers do not depend on the number of workers."""
    size = ALONE_ROWS if workers == 1 else UNIT_ROWS
    row = 0
    for batch in batches:
        for start in range(0, batch.num_rows, size):
            piece = batch.slice(start, size) if batch.num_rows > size else batch
            yield Unit(piece, row + start)
        row += batch.num_rows
