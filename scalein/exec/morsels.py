"""Units of work: a piece of a batch with the number of its first row in the source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from scalein.exec.schedule import schedule

# Rows a worker takes at once: some milliseconds of work, so that handing out costs nothing and
# Ctrl-C is seen soon.
UNIT_ROWS = 1 << 20
SMALL_ROWS = 1 << 13  # of a batch whose call costs as much as its rows
JOINED_ROWS = 1 << 16
ALONE_ROWS = 1 << 22


@dataclass(frozen=True, slots=True)
class Unit:
    """Rows to work on, and where they stand in the source's order."""

    batch: pa.RecordBatch
    first_row: int


def joined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows with small batches put together, in the same order; dictionaries stay apart, since they may differ."""
    some: list[pa.RecordBatch] = []
    for batch in batches:
        is_alike = bool(some) and batch.schema == some[0].schema
        is_plain = is_alike or not any(map(pa.types.is_dictionary, batch.schema.types))
        is_small = batch.num_rows < SMALL_ROWS and is_plain
        if some and not (is_small and is_alike and sum(each.num_rows for each in some) < JOINED_ROWS):
            yield _one(some)
            some = []
        if is_small:
            some.append(batch)
        else:
            yield batch
    if some:
        yield _one(some)


def _one(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def units(batches: Iterator[pa.RecordBatch], workers: int, row: int = 0) -> Iterator[Unit]:
    """The batches cut into units; order and row numbers do not depend on the number of workers. Rows are numbered from
    `row` on.
    """
    size = schedule().morsel_rows(ALONE_ROWS if workers == 1 else UNIT_ROWS)
    for batch in batches:
        for start in range(0, batch.num_rows, size):
            piece = batch.slice(start, size) if batch.num_rows > size else batch
            yield Unit(piece, row + start)
        row += batch.num_rows
