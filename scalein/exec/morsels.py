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
LAST_ROWS = 1 << 18


@dataclass(frozen=True, slots=True)
class Unit:
    """Rows to work on, and where they stand in the source's order."""

    batch: pa.RecordBatch
    first_row: int


def joined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows with small batches put together, in the same order; dictionaries stay apart, since they may differ."""
    some: list[pa.RecordBatch] = []
    rows, schema, is_plain = 0, None, False  # of `some`; of the batch before this one
    for batch in batches:
        if schema is None or batch.schema != schema:
            yield from _one(some)
            some, rows, schema = [], 0, batch.schema
            is_plain = not any(map(pa.types.is_dictionary, schema.types))
        is_small = is_plain and batch.num_rows < SMALL_ROWS
        if rows >= JOINED_ROWS or not is_small:
            yield from _one(some)
            some, rows = [], 0
        if is_small:
            some.append(batch)
            rows += batch.num_rows
        else:
            yield batch
    yield from _one(some)


def _one(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """The batches as one; as they are, if an array cannot hold all of their text."""
    try:
        return batches if len(batches) <= 1 else [pa.concat_batches(batches)]
    except (pa.ArrowInvalid, pa.ArrowCapacityError):
        return batches


def units(batches: Iterator[pa.RecordBatch], workers: int, row: int = 0) -> Iterator[Unit]:
    """The batches cut into units; order and row numbers do not depend on the number of workers. Rows are numbered from
    `row` on.
    """
    given = schedule()
    for batch in batches:
        start = 0
        while start < batch.num_rows:
            size = given.morsel_rows(_unit_rows(batch.num_rows, batch.num_rows - start, workers))
            yield Unit(batch if start == 0 and size >= batch.num_rows else batch.slice(start, size), row + start)
            start += size
        row += batch.num_rows


def _unit_rows(rows: int, left: int, workers: int) -> int:
    """How many of the rows that are left of a batch are the next unit."""
    if workers == 1:
        return ALONE_ROWS
    if rows <= ALONE_ROWS:
        return UNIT_ROWS
    # The less is left, the less each takes: few units in all, and workers end at nearly the same time.
    return min(ALONE_ROWS, max(LAST_ROWS, left // (2 * workers)))
