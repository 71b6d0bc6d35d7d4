"""Morsels: pieces of batches with the number of their first row in the source. Small batches are coalesced.

The size of a round of a job is decided in `jobs/driver.py` (`ROUND_S`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from scalein.exec.schedule import schedule

# Rows of a morsel: a few milliseconds of work, so that dispatch costs nothing and Ctrl-C takes effect soon.
MORSEL_ROWS = 1 << 20  # of an aggregation
PIPELINE_MORSEL_ROWS = 1 << 19  # of a pipeline without state: about a millisecond
SMALL_ROWS = 1 << 13  # of a batch for which the call of a kernel costs as much as its rows
SMALL_BYTES = 1 << 20  # a batch with more is not copied: few rows may have long text
COALESCED_ROWS = 1 << 16
COALESCED_BYTES = 1 << 24
SERIAL_ROWS = 1 << 22  # of a morsel of a single worker
LAST_ROWS = 1 << 18  # of the last morsels of a large batch


@dataclass(frozen=True, slots=True)
class Morsel:
    """Rows, and the position of the first in the source's order."""

    batch: pa.RecordBatch
    first_row: int


def coalesce(batches: Iterable[pa.RecordBatch], is_limited: bool = False) -> Iterator[pa.RecordBatch]:
    """The batches with small ones concatenated, in the same order; batches with dictionaries stay as they are, since
    their dictionaries may differ. If memory is limited, so do those with long text.
    """
    pending: list[pa.RecordBatch] = []
    rows, size, schema, is_plain = 0, 0, None, False  # rows and bytes of `pending`; schema of the last batch
    is_fixed = False  # few rows are few bytes, as all columns have values of a fixed width, or no limit asks for it
    for batch in batches:
        if schema is None or batch.schema != schema:
            yield from _one(pending)
            pending, rows, size, schema = [], 0, 0, batch.schema
            is_plain = not any(map(pa.types.is_dictionary, schema.types))
            is_fixed = not is_limited or all(map(pa.types.is_primitive, schema.types))
        is_small = is_plain and batch.num_rows < SMALL_ROWS
        given = batch.nbytes if is_small and not is_fixed else 0
        is_small = is_small and given < SMALL_BYTES
        if rows >= COALESCED_ROWS or size >= COALESCED_BYTES or not is_small:
            yield from _one(pending)
            pending, rows, size = [], 0, 0
        if is_small:
            pending.append(batch)
            rows += batch.num_rows
            size += given
        else:
            yield batch
    yield from _one(pending)


def _one(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """The batches concatenated; unchanged if one array cannot hold all of their text."""
    try:
        return batches if len(batches) <= 1 else [pa.concat_batches(batches)]
    except (pa.ArrowInvalid, pa.ArrowCapacityError):
        return batches


def cut_morsels(batches: Iterator[pa.RecordBatch], workers: int, row: int = 0) -> Iterator[Morsel]:
    """The batches cut into morsels; order and row numbers do not depend on the number of workers. Rows are numbered
    from `row` on.
    """
    given = schedule()
    for batch in batches:
        start = 0
        while start < batch.num_rows:
            size = given.morsel_rows(_morsel_rows(batch.num_rows, batch.num_rows - start, workers))
            yield Morsel(batch if start == 0 and size >= batch.num_rows else batch.slice(start, size), row + start)
            start += size
        row += batch.num_rows


def _morsel_rows(rows: int, left: int, workers: int) -> int:
    """The size of the next morsel of a batch, of which `left` rows are left."""
    if workers == 1:
        return SERIAL_ROWS
    if rows <= SERIAL_ROWS:
        return MORSEL_ROWS
    # Morsels get smaller towards the end: few in all, and workers finish at nearly the same time.
    return min(SERIAL_ROWS, max(LAST_ROWS, left // (2 * workers)))
