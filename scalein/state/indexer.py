"""Indexer: the index files of a store's snapshots, built from records in memory and merged in the background.

A record does not move, and its key does not change, until its chunk is freed. So an index entry stays valid while its
record is updated, and a snapshot needs entries only for records that are new since the last one. A freed chunk leaves
stale entries, which point to no record or to one of another key: readers ignore them (see `piece_lookups.py`), and
merges drop those of chunks that no longer exist.

Invariant: every record of a published snapshot has an entry in one of the index files that the snapshot names.

Threads: `add`, `schedule_merge` and `close` are called by the thread that writes snapshots; merges run on a thread of
their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from scalein.errors import ScaleinError
from scalein.layout import GROUPS
from scalein.state import format
from scalein.state.compaction import lower_priority
from scalein.state.index_runs import IndexRun, IndexWriter, entry_offsets, make_entries
from scalein.state.memtable import RECORDS
from scalein.storage.filesystem import FileSystem

if TYPE_CHECKING:
    from scalein.kernels.store import StoreKernels

MIN_MERGED = 1 << 20  # entries: smaller files are merged as if they had as many
GROWTH = 2  # a file is merged with all newer ones once these have half as many entries


class RecordChunks(NamedTuple):
    """The chunks of a snapshot that hold records, sorted by key group."""

    group: np.ndarray
    offset: np.ndarray
    records: np.ndarray  # number of records in each
    serial: np.ndarray

    @staticmethod
    def of(tables: dict[str, np.ndarray], record_bytes: int) -> RecordChunks:
        rows = np.flatnonzero(tables["kind"] == RECORDS)
        rows = rows[np.argsort(tables["group"][rows], kind="stable")]
        group, offset, used, serial = (tables[name][rows].astype(np.int64)
                                       for name in ("group", "offset", "used", "serial"))
        return RecordChunks(group, offset, used // record_bytes, serial)

    def without(self, known: RecordChunks, record_bytes: int) -> RecordChunks:
        """The records of these chunks that are not in the known ones."""
        order = np.argsort(known.serial)
        serials, records = np.append(known.serial[order], -1), np.append(known.records[order], 0)
        at = serials[:-1].searchsorted(self.serial)
        done = np.where(serials[at] == self.serial, records[at], 0)
        is_new = done < self.records
        return RecordChunks(self.group[is_new], (self.offset + done * record_bytes)[is_new],
                            (self.records - done)[is_new], self.serial[is_new])

    def offsets(self, record_bytes: int) -> np.ndarray:
        """The offsets of all records."""
        before = self.records.cumsum() - self.records
        numbers = np.arange(int(self.records.sum()))
        found: np.ndarray = np.repeat(self.offset - before * record_bytes, self.records) + numbers * record_bytes
        return found

    def between(self, first: int, last: int) -> RecordChunks:
        return RecordChunks(*(column[first:last] for column in self))


class _IndexMerge(NamedTuple):
    runs: list[IndexRun]
    id: int
    merged: Future[IndexRun]


class Indexer:
    """The index files of the memtable's records. About `batch_records` records are indexed at a time."""

    def __init__(self, fs: FileSystem, kernels: StoreKernels, base: int, batch_records: int) -> None:
        self._fs, self._kernels, self._base, self._batch_records = fs, kernels, base, batch_records
        self.runs: list[IndexRun] = []  # oldest first; replaced, never changed
        nothing = np.zeros(0, np.int64)
        self._indexed = RecordChunks(nothing, nothing, nothing, nothing)  # records that have entries in the runs
        self._merge: _IndexMerge | None = None
        self._is_closing = False
        self.error: BaseException | None = None  # of the last merge
        self._thread = ThreadPoolExecutor(1, "scalein-index", lower_priority)

    @property
    def files(self) -> set[str]:
        """The files that must not be removed, including one that is being written."""
        merge = self._merge  # read first: once it is None, its result is among the runs
        return {format.index_name(run.id) for run in self.runs} | (
            set() if merge is None else {format.index_name(merge.id)})  # fmt: skip

    def add(self, id: int, chunks: RecordChunks) -> list[int]:
        """Index the new records of a snapshot; returns the ids of the files that together index all of it."""
        self._install_merged()
        # If too many entries are stale, because chunks were freed and reused, all records are indexed anew.
        is_full = sum(run.count for run in self.runs) > 2 * int(chunks.records.sum()) + MIN_MERGED
        new = chunks if is_full else chunks.without(self._indexed, self._kernels.record_bytes)
        old, retained = (self.runs, []) if is_full else ([], self.runs)
        self.runs = [*retained, self._write(id, new)] if len(new.group) else retained
        self._indexed = chunks
        for run in old:
            if self._merge is None or run not in self._merge.runs:
                run.close()
        return [run.id for run in self.runs]

    def _write(self, id: int, chunks: RecordChunks) -> IndexRun:
        writer = IndexWriter(self._fs, id, int(chunks.records.sum()), self._kernels.checksums)
        try:
            for group, entries in self._entries(chunks):
                writer.add(group, entries)
            writer.finish()
        except BaseException:
            writer.abandon()
            raise
        return IndexRun(self._fs, id, self._kernels.checksums)

    def _entries(self, chunks: RecordChunks) -> Iterator[tuple[int, np.ndarray]]:
        """The sorted entries of each group. Several groups at a time, so that memory is bounded and calls are few."""
        groups, firsts = np.unique(chunks.group, return_index=True)
        bounds = [*firsts.tolist(), len(chunks.group)]
        ends = chunks.records.cumsum()
        first = 0
        while first < len(groups):
            before = int(ends[bounds[first]] - chunks.records[bounds[first]])
            last = first + 1
            while last < len(groups) and int(ends[bounds[last + 1] - 1]) - before <= self._batch_records:
                last += 1
            offsets = chunks.between(bounds[first], bounds[last]).offsets(self._kernels.record_bytes)
            entries = make_entries(self._kernels.hash_keys((offsets + self._base).view(np.uint64)), offsets)
            for number in range(first, last):
                low, high = (int(ends[bound - 1]) - before if bound else 0 for bound in bounds[number : number + 2])
                group_entries = entries[low:high]
                group_entries.sort()
                yield int(groups[number]), group_entries
            first = last

    # --- in the background

    def schedule_merge(self, id: int) -> None:
        """Merge files if there are too many."""
        if self._merge is not None:
            return
        first = first_to_merge([run.count for run in self.runs])
        if first < len(self.runs):
            runs = self.runs[first:]
            self._merge = _IndexMerge(runs, id, self._thread.submit(self._merge_files, runs, id, self._indexed))

    def _merge_files(self, runs: list[IndexRun], id: int, chunks: RecordChunks) -> IndexRun:
        """Merge files into one, without the entries of chunks that no longer exist."""
        writer = IndexWriter(self._fs, id, sum(run.count for run in runs), self._kernels.checksums)
        try:
            for group, (low, high) in enumerate(_spans(chunks.group)):
                if self._is_closing:
                    raise ScaleinError("the store is being closed: no snapshot would name the merged index")
                group_chunks = chunks.between(low, high)
                entries = np.concatenate([run.entries(group, group + 1) for run in runs])
                entries = entries[_is_inside(entry_offsets(entries), group_chunks, self._kernels.record_bytes)]
                writer.add(group, np.unique(entries))
            writer.finish()
        except BaseException:
            writer.abandon()
            raise
        return IndexRun(self._fs, id, self._kernels.checksums)

    def _install_merged(self) -> None:
        """Replace files by the one that they were merged into. A merge that failed is tried again later."""
        merge = self._merge
        if merge is None or not merge.merged.done():
            return
        if merge.merged.exception() is None:
            merged = merge.merged.result()
            if merge.runs[0] in self.runs:
                at = self.runs.index(merge.runs[0])
                self.runs = [*self.runs[:at], merged, *self.runs[at + len(merge.runs) :]]
            else:  # all records were indexed anew meanwhile
                merged.close()
        self.error = None if self._is_closing else merge.merged.exception()
        for run in merge.runs:
            if run not in self.runs:
                run.close()
        self._merge = None

    def close(self) -> None:
        self._is_closing = True
        self._thread.shutdown(wait=True)
        self._install_merged()
        for run in self.runs:
            run.close()


def _spans(groups: np.ndarray) -> list[tuple[int, int]]:
    """The range of each key group among sorted ones."""
    return list(pairwise(groups.searchsorted(np.arange(GROUPS + 1)).tolist()))


def _is_inside(offsets: np.ndarray, chunks: RecordChunks, record_bytes: int) -> np.ndarray:
    """Which offsets lie in the records of the chunks."""
    if not len(chunks.offset):
        return np.zeros(len(offsets), bool)
    order = np.argsort(chunks.offset)
    starts, sizes = chunks.offset[order], chunks.records[order] * record_bytes
    at = np.maximum(starts.searchsorted(offsets, "right") - 1, 0)
    within = offsets - starts[at]
    found: np.ndarray = (within >= 0) & (within < sizes[at])
    return found


def first_to_merge(counts: list[int]) -> int:
    """The first of the files, oldest first, to merge with all newer ones; the number of files if there is none.

    So a file has more than twice as many entries as all newer ones together, there are about log3(records / 2^20)
    files, and an entry is written two or three times as often. Files of less than 2^20 entries, some milliseconds of
    work, are merged with every new one.
    """
    sizes = [max(MIN_MERGED, count) for count in counts]
    for first in range(len(sizes) - 1):
        if GROWTH * sum(sizes[first + 1 :]) >= sizes[first]:
            return first
    return len(sizes)
