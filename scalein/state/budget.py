"""Budget: how a store's memory is divided. Decisions only.

Records and their index get 60 %, or 45 % if they have text; the rest is for copies of segments, merge tables and the
buffers of run files, which take more with text. The sizes of segments and chunks follow from the budget, so that a
small one is not spent on unused space.
When records leave memory: `Tiers.evict_to_budget` (`tiers.py`); which ones: `evict.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from scalein.layout import GROUPS, LOAD_SIXTEENTHS
from scalein.state.arena import MAX_CHUNK, MIN_CHUNK, SEGMENT_BYTES

UNLIMITED = 1 << 62
MEMTABLE_SHARE = 0.6  # of the budget, for records and their index
TEXT_MEMTABLE_SHARE = 0.45  # the same, if records have text: their copies are arrays of many sizes
SEGMENTS = 32  # in a budget
COPY_SHARE = 0.1  # of the budget, for copies of segments
COPIES = 64  # without a limit: a copy that need not wait for the disk is done sooner, and fewer changes are logged
MERGE_SHARE = 0.1  # of the budget, for records of several runs that are merged; two or three merges run at once
MAX_MERGE_RECORDS = 1 << 18
DENSE_SIXTEENTHS = 14  # load factor of an index under a budget, in sixteenths, at which it doubles
MIN_SEGMENT = 64 << 10
BATCH_ROWS = 1 << 20
BATCHES = 16  # slices of rows in a budget
MIN_ROWS = 256
READ_BUFFERS = 32  # in a budget
WRITE_BUFFERS = 64  # in a budget: a writer has a few, and several write at once
MIN_WRITE, MAX_WRITE = 64 << 10, 512 << 10  # smaller writes would go through the page cache
MIN_READ_BUFFER, MAX_READ_BUFFER = 16 << 10, 4 << 20


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes for everything (None: no limit), and the sizes that follow from it."""

    total: int | None
    segment_bytes: int = SEGMENT_BYTES
    max_chunk: int = MAX_CHUNK
    has_text: bool = False

    @staticmethod
    def of(total: int | None) -> Budget:
        if total is None:
            return Budget(None)
        segment = _power_of_two(total // SEGMENTS, MIN_SEGMENT, SEGMENT_BYTES)
        return Budget(total, segment, _power_of_two(total // GROUPS // 8, MIN_CHUNK, MAX_CHUNK))

    @property
    def load_sixteenths(self) -> int:
        """The load factor at which an index doubles. A group is nearly empty after its eviction, so on average an index
        is half as full.
        """
        return LOAD_SIXTEENTHS if self.total is None else DENSE_SIXTEENTHS

    @property
    def segment_copies(self) -> int:
        """Copies of segments that may wait to be written."""
        return COPIES if self.total is None else max(1, int(self.total * COPY_SHARE) // self.segment_bytes)

    @property
    def undo_log_bytes(self) -> int:
        """Size of the undo log of a segment that is copied. A merge that fills it waits for the copy."""
        return 2 * self.segment_bytes if self.total is None else self.segment_bytes // 2

    def merge_records(self, record_bytes: int) -> int:
        """Records of several runs that are merged at once: they are read, merged and combined, the next ones read."""
        most = MAX_MERGE_RECORDS if self.total is None else int(self.total * MERGE_SHARE) // (3 * record_bytes + 56)
        return max(MIN_ROWS, min(MAX_MERGE_RECORDS, most))

    @property
    def read_buffer_bytes(self) -> int:
        """Bytes of blocks that are read at once; a reader has a few such buffers."""
        most = MAX_READ_BUFFER if self.total is None else self.total // READ_BUFFERS
        return _power_of_two(most, MIN_READ_BUFFER, MAX_READ_BUFFER)

    @property
    def write_bytes(self) -> int:
        """Bytes of records that are collected for one write to a run."""
        return MAX_WRITE if self.total is None else _power_of_two(self.total // WRITE_BUFFERS, MIN_WRITE, MAX_WRITE)

    @property
    def memtable_bytes(self) -> int:
        """For records and their index."""
        share = TEXT_MEMTABLE_SHARE if self.has_text else MEMTABLE_SHARE
        return UNLIMITED if self.total is None else int(self.total * share)

    def memtable_bytes_beside(self, run_index_bytes: int) -> int:
        """The same, less the directories and filters of runs, which may take up to half of it."""
        return self.memtable_bytes - min(run_index_bytes, self.memtable_bytes // 2)

    def batch_rows(self, record_bytes: int) -> int:
        """Rows that are merged between two checks of the memory in use."""
        if self.total is None:
            return BATCH_ROWS
        return max(MIN_ROWS, min(BATCH_ROWS, self.total // BATCHES // (record_bytes + 16)))


def _power_of_two(size: int, least: int, most: int) -> int:
    return max(least, min(most, 1 << max(0, size.bit_length() - 1)))
