"""Budget: what part of the memory that a store may have goes where. Decisions only.

Records and index get 60 %; the rest is for what is under way: copies of segments, a scratch table, the buffers of
runs. Sizes of segments and chunks follow, so that a small budget is not spent on room that nobody uses.
"""

from __future__ import annotations

from dataclasses import dataclass

from scalein.layout import GROUPS, LOAD_SIXTEENTHS
from scalein.state.arena import LEAST_CHUNK, MOST_CHUNK, SEGMENT_BYTES

MOST_BYTES = 1 << 62  # without a limit
HOT_SHARE = 0.6  # of the budget, for records and index
SEGMENT_SHARE = 32  # segments in a budget
COPIED_SHARE = 0.1  # of the budget, for copies of segments
COPIES = 64  # without a limit: a copy that need not wait for the disk is over sooner, and fewer changes are logged
SCRATCH_SHARE = 0.1  # of the budget, for records of several runs; two or three such are under way
MOST_SCRATCH = 1 << 18
DENSE_SIXTEENTHS = 14  # of an index in a budget that are taken before it doubles
LEAST_SEGMENT = 64 << 10
SLICE_ROWS = 1 << 20
SLICE_SHARE = 16  # slices of rows in a budget
LEAST_ROWS = 256
READ_BUFFER_SHARE = 32  # windows of blocks in a budget
WRITE_SHARE = 64  # buffers of writers in a budget: each has a few, and some write at once
LEAST_WRITE, MOST_WRITE = 64 << 10, 512 << 10  # not less: it would go through the page cache
MIN_READ_BUFFER, MAX_READ_BUFFER = 16 << 10, 4 << 20


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes for everything (None: no limit), and what follows from it."""

    total: int | None
    segment_bytes: int = SEGMENT_BYTES
    most_chunk: int = MOST_CHUNK

    @staticmethod
    def of(total: int | None) -> Budget:
        if total is None:
            return Budget(None)
        segment = _power_of_two(total // SEGMENT_SHARE, LEAST_SEGMENT, SEGMENT_BYTES)
        return Budget(total, segment, _power_of_two(total // GROUPS // 8, LEAST_CHUNK, MOST_CHUNK))

    @property
    def load_sixteenths(self) -> int:
        """How full an index may be. A group is nearly empty after it was evicted: on average it is half as full."""
        return LOAD_SIXTEENTHS if self.total is None else DENSE_SIXTEENTHS

    @property
    def copies(self) -> int:
        """Copies of segments that may wait to be written."""
        return COPIES if self.total is None else max(1, int(self.total * COPIED_SHARE) // self.segment_bytes)

    @property
    def log_bytes(self) -> int:
        """For what kernels change in a segment while it is copied. When it is full, a merge waits for the copy."""
        return 2 * self.segment_bytes if self.total is None else self.segment_bytes // 2

    def scratch_records(self, record_bytes: int) -> int:
        """Records of several runs that may be brought together at once: read, merged and folded, the next ones read."""
        most = MOST_SCRATCH if self.total is None else int(self.total * SCRATCH_SHARE) // (3 * record_bytes + 56)
        return max(LEAST_ROWS, min(MOST_SCRATCH, most))

    @property
    def read_buffer_bytes(self) -> int:
        """Bytes of blocks that are read, or looked through, at once; a few such windows are under way."""
        most = MAX_READ_BUFFER if self.total is None else self.total // READ_BUFFER_SHARE
        return _power_of_two(most, MIN_READ_BUFFER, MAX_READ_BUFFER)

    @property
    def write_bytes(self) -> int:
        """Bytes of records that are collected for one write to a run."""
        return MOST_WRITE if self.total is None else _power_of_two(self.total // WRITE_SHARE, LEAST_WRITE, MOST_WRITE)

    @property
    def hot_bytes(self) -> int:
        """For records and index."""
        return MOST_BYTES if self.total is None else int(self.total * HOT_SHARE)

    def hot_beside(self, index_bytes: int) -> int:
        """For records and index, beside the directories and filters of runs: they may take half of that room."""
        return self.hot_bytes - min(index_bytes, self.hot_bytes // 2)

    def rows(self, record_bytes: int) -> int:
        """Rows that may come in before memory is looked at again."""
        if self.total is None:
            return SLICE_ROWS
        return max(LEAST_ROWS, min(SLICE_ROWS, self.total // SLICE_SHARE // (record_bytes + 16)))


def _power_of_two(size: int, least: int, most: int) -> int:
    return max(least, min(most, 1 << max(0, size.bit_length() - 1)))
