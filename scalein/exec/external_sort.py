"""External merge sort: rows beyond the memory limit are sorted in runs, which are spilled and merged.

A run is a part of the input, sorted, in blocks. Merging holds the next block of each run. The least of the blocks' last
rows is a bound: no row that is still on disk comes before it. So all rows up to the bound are sorted at once, by the
same vector code as any rows, and emitted. Runs whose first row is beyond the bound take no part. Equal rows stay in the
order of the input, since runs are merged in their order and the sort is stable.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from scalein.arrow_rows import from_numpy, taken
from scalein.cancellation import raise_if_cancelled
from scalein.exec.sort import in_order, row_order
from scalein.exec.spill_file import SpilledBatches, SpillFile
from scalein.ir.physical import Sort
from scalein.kernels.bind import conformed
from scalein.memory import MemoryAccount

WORKING_FACTOR = 8  # bytes needed for each byte of a run while it is sorted: rows, whole columns, order, results
MERGE_SHARE = 6  # of the limit, the blocks of all runs that are merged have 1/6
BLOCK_SHARE = 512  # of the limit, a block has 1/512
MIN_BLOCK_BYTES = 1 << 14
MIN_RUNS = 4  # merged at once
BLOCK_ROWS = 1 << 16


def sort_within(node: Sort, batches: Iterator[pa.RecordBatch], schema: pa.Schema,
                account: MemoryAccount) -> Iterator[pa.RecordBatch]:
    """The sorted rows, in the memory of the account; they are spilled only if they are more."""
    assert account.limit is not None
    parts: list[pa.RecordBatch] = []
    runs = SortedRuns(node, schema, account.limit)
    try:
        for batch in batches:
            raise_if_cancelled()
            parts.append(conformed(batch, schema))
            account.reserve(WORKING_FACTOR * parts[-1].nbytes)
            if account.is_under_pressure:
                runs.add(in_order(node, parts, schema, None))
                account.release()
        if not runs:
            yield from in_order(node, parts, schema, None)
            return
        if parts:
            runs.add(in_order(node, parts, schema, None))
            account.release()
        yield from runs.merged()
    finally:
        account.release()
        runs.close()


class SortedRuns:
    """Sorted runs in a spill file, in the order of the input."""

    def __init__(self, node: Sort, schema: pa.Schema, limit: int) -> None:
        self._node, self._schema = node, schema
        self._block_bytes = max(MIN_BLOCK_BYTES, limit // BLOCK_SHARE)
        self._most = max(MIN_RUNS, limit // MERGE_SHARE // self._block_bytes)
        self._file: SpillFile | None = None
        self._runs: list[SpilledBatches] = []

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, rows: Iterator[pa.RecordBatch]) -> None:
        """Spill sorted rows as a run."""
        self._file = self._file or SpillFile()
        run = SpilledBatches(self._file, self._schema)
        for batch in rows:
            given = conformed(batch, self._schema)
            step = max(1, min(BLOCK_ROWS, self._block_bytes * given.num_rows // max(1, given.nbytes)))
            for start in range(0, given.num_rows, step):
                run.add(given.slice(start, step))
        pa.default_memory_pool().release_unused()
        if run.rows:
            self._runs.append(run)

    def merged(self) -> Iterator[pa.RecordBatch]:
        """All rows in order. Where there are too many runs for one merge, neighbours are merged into longer runs."""
        while len(self._runs) > self._most:
            old, self._runs = self._runs, []
            for start in range(0, len(old), self._most):
                self.add(self._merge(old[start : start + self._most]))
        return self._merge(self._runs)

    def _merge(self, runs: list[SpilledBatches]) -> Iterator[pa.RecordBatch]:
        heads = [_Head(run) for run in runs]
        while heads := [head for head in heads if head.fill()]:
            raise_if_cancelled()
            ours, parts = heads, [head.rows for head in heads]
            more = [head for head in heads if head.has_more]
            if more:
                lasts = [head.rows.slice(head.rows.num_rows - 1) for head in more]
                bound = more[int(self._order(lasts)[0])]
                # The bound is compared as the last of the rows: a first row that equals it takes part, needed or not.
                firsts = self._order([*(head.rows.slice(0, 1) for head in heads),
                                      bound.rows.slice(bound.rows.num_rows - 1)])
                near = set(firsts[: int(np.flatnonzero(firsts == len(heads))[0])].tolist())
                ours = [head for k, head in enumerate(heads) if k in near or head is bound]
                parts = [head.rows for head in ours]
            order = self._order(parts)
            ends = np.cumsum([part.num_rows for part in parts])
            if more:
                last = int(ends[ours.index(bound)]) - 1
                order = order[: int(np.flatnonzero(order == last)[0]) + 1]
            counts = np.bincount(np.searchsorted(ends, order, side="right"), minlength=len(ours))
            whole = pa.concat_batches(parts)
            for head, count in zip(ours, counts.tolist(), strict=True):
                head.drop(count)
            for start in range(0, len(order), BLOCK_ROWS):
                rows = from_numpy(order[start : start + BLOCK_ROWS])
                yield pa.RecordBatch.from_arrays([taken(column, rows) for column in whole.columns], schema=self._schema)

    def _order(self, parts: list[pa.RecordBatch]) -> np.ndarray:
        keys = [name for name, _ in self._node.by]
        whole = pa.concat_batches([part.select(keys) for part in parts])
        return row_order(self._node, dict(zip(keys, whole.columns, strict=True)))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class _Head:
    """The rows of a run that are in memory: the next ones."""

    def __init__(self, run: SpilledBatches) -> None:
        self._run, self._next = run, 0
        self.rows = run[0].slice(0, 0)

    @property
    def has_more(self) -> bool:
        """Whether rows are still on disk."""
        return self._next < len(self._run)

    def fill(self) -> bool:
        """Read the next block when less than half of one is left; false at the end of the run."""
        if self.has_more and 2 * self.rows.num_rows < self._run.rows // len(self._run):
            block = self._run[self._next]
            self._next += 1
            self.rows = pa.concat_batches([self.rows, block]) if self.rows.num_rows else block
        return bool(self.rows.num_rows)

    def drop(self, count: int) -> None:
        """Remove the first rows."""
        self.rows = self.rows.slice(count)
