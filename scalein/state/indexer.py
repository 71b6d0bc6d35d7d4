"""Indexing: the index files of a store's snapshots, made from records in memory and merged in the background.

A record stays where it is, and its key never changes, until its chunk is given back. So an entry of an index stays true
while records are updated, and a snapshot needs entries only of records that are new since the last one. A chunk that
was given back leaves entries behind that lead nowhere, or to a record of another key: readers drop them (see
`lookups.py`), merges drop those of chunks that are gone.

Invariant: every record of a snapshot that was published has an entry in one of the index files that it names.

Threads: `add`, `merge_soon` and `close` are called by the thread that writes snapshots, merges run on one of their own.
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
from scalein.state.compaction import step_back
from scalein.state.index_runs import IndexRun, IndexWriter, entries_of, places_of
from scalein.state.memtable import RECORDS
from scalein.storage.filesystem import FileSystem

if TYPE_CHECKING:
    from scalein.kernels.store import StoreKernels

LEAST_MERGED = 1 << 20  # entries: files with fewer are merged as if they had as many
GROWTH = 2  # a file is merged with all newer ones when so many times their entries are as many as its own


class Chunks(NamedTuple):
    """The chunks of a snapshot that hold records, by key group."""

    group: np.ndarray
    offset: np.ndarray
    records: np.ndarray  # how many there are in each
    serial: np.ndarray

    @staticmethod
    def of(tables: dict[str, np.ndarray], record_bytes: int) -> Chunks:
        rows = np.flatnonzero(tables["kind"] == RECORDS)
        rows = rows[np.argsort(tables["group"][rows], kind="stable")]
        group, offset, used, serial = (tables[name][rows].astype(np.int64)
                                       for name in ("group", "offset", "used", "serial"))
        return Chunks(group, offset, used // record_bytes, serial)

    def beyond(self, known: Chunks, record_bytes: int) -> Chunks:
        """What is in these chunks and was not in those known."""
        order = np.argsort(known.serial)
        serials, records = np.append(known.serial[order], -1), np.append(known.records[order], 0)
        at = serials[:-1].searchsorted(self.serial)
        done = np.where(serials[at] == self.serial, records[at], 0)
        new = done < self.records
        return Chunks(self.group[new], (self.offset + done * record_bytes)[new], (self.records - done)[new],
                      self.serial[new])

    def places(self, record_bytes: int) -> np.ndarray:
        """Of all records."""
        before = self.records.cumsum() - self.records
        numbers = np.arange(int(self.records.sum()))
        found: np.ndarray = np.repeat(self.offset - before * record_bytes, self.records) + numbers * record_bytes
        return found

    def some(self, first: int, last: int) -> Chunks:
        return Chunks(*(column[first:last] for column in self))


class _Merging(NamedTuple):
    runs: list[IndexRun]
    id: int
    merged: Future[IndexRun]


class Indexer:
    """The index files of what is in memory. About `at_once` records are indexed at a time."""

    def __init__(self, fs: FileSystem, kernels: StoreKernels, base: int, at_once: int) -> None:
        self._fs, self._kernels, self._base, self._at_once = fs, kernels, base, at_once
        self.runs: list[IndexRun] = []  # oldest first; replaced, never changed
        nothing = np.zeros(0, np.int64)
        self._known = Chunks(nothing, nothing, nothing, nothing)  # what the runs have entries of
        self._merging: _Merging | None = None
        self._is_closing = False
        self.error: BaseException | None = None  # of the last merge
        self._thread = ThreadPoolExecutor(1, "scalein-index", step_back)

    @property
    def files(self) -> set[str]:
        """Those that must stay: also one that is being written."""
        merging = self._merging  # asked first: what it gives is in the runs once it is no more
        return {format.index_name(run.id) for run in self.runs} | (
            set() if merging is None else {format.index_name(merging.id)})  # fmt: skip

    def add(self, id: int, chunks: Chunks) -> list[int]:
        """Index what is new in the chunks of a snapshot; the ids of the files that together have all of it."""
        self._adopt()
        # Where chunks come and go, entries remain whose places others of their group have now: then all are made anew.
        is_full = sum(run.count for run in self.runs) > 2 * int(chunks.records.sum()) + LEAST_MERGED
        new = chunks if is_full else chunks.beyond(self._known, self._kernels.record_bytes)
        old, stay = (self.runs, []) if is_full else ([], self.runs)
        self.runs = [*stay, self._written(id, new)] if len(new.group) else stay
        self._known = chunks
        for run in old:
            if self._merging is None or run not in self._merging.runs:
                run.close()
        return [run.id for run in self.runs]

    def _written(self, id: int, chunks: Chunks) -> IndexRun:
        writer = IndexWriter(self._fs, id, int(chunks.records.sum()), self._kernels.checksums)
        try:
            for group, entries in self._entries(chunks):
                writer.add(group, entries)
            writer.finish()
        except BaseException:
            writer.abandon()
            raise
        return IndexRun(self._fs, id, self._kernels.checksums)

    def _entries(self, chunks: Chunks) -> Iterator[tuple[int, np.ndarray]]:
        """Those of each group, sorted; whole groups at a time, so that memory is bounded and calls are few."""
        groups, firsts = np.unique(chunks.group, return_index=True)
        borders = [*firsts.tolist(), len(chunks.group)]
        ends = chunks.records.cumsum()
        part = 0
        while part < len(groups):
            before = int(ends[borders[part]] - chunks.records[borders[part]])
            behind = part + 1
            while behind < len(groups) and int(ends[borders[behind + 1] - 1]) - before <= self._at_once:
                behind += 1
            places = chunks.some(borders[part], borders[behind]).places(self._kernels.record_bytes)
            entries = entries_of(self._kernels.hash_keys((places + self._base).view(np.uint64)), places)
            for number in range(part, behind):
                low, high = (int(ends[border - 1]) - before if border else 0
                             for border in borders[number : number + 2])
                some = entries[low:high]
                some.sort()
                yield int(groups[number]), some
            part = behind

    # --- in the background

    def merge_soon(self, id: int) -> None:
        """Merge files if they are too many."""
        if self._merging is not None:
            return
        first = first_merged([run.count for run in self.runs])
        if first < len(self.runs):
            runs = self.runs[first:]
            self._merging = _Merging(runs, id, self._thread.submit(self._merged, runs, id, self._known))

    def _merged(self, runs: list[IndexRun], id: int, chunks: Chunks) -> IndexRun:
        """One file with the entries of several whose chunks are still there."""
        writer = IndexWriter(self._fs, id, sum(run.count for run in runs), self._kernels.checksums)
        try:
            for group, (low, high) in enumerate(_spans(chunks.group)):
                if self._is_closing:
                    raise ScaleinError("the store is being closed: no snapshot would name what is merged")
                some = chunks.some(low, high)
                entries = np.concatenate([run.entries(group, group + 1) for run in runs])
                entries = entries[_inside(places_of(entries), some, self._kernels.record_bytes)]
                writer.add(group, np.unique(entries))
            writer.finish()
        except BaseException:
            writer.abandon()
            raise
        return IndexRun(self._fs, id, self._kernels.checksums)

    def _adopt(self) -> None:
        """Take a merged file in the place of those that it was made of. One that failed is tried again."""
        merging = self._merging
        if merging is None or not merging.merged.done():
            return
        if merging.merged.exception() is None:
            merged = merging.merged.result()
            if merging.runs[0] in self.runs:
                at = self.runs.index(merging.runs[0])
                self.runs = [*self.runs[:at], merged, *self.runs[at + len(merging.runs) :]]
            else:  # all were made anew meanwhile
                merged.close()
        self.error = None if self._is_closing else merging.merged.exception()
        for run in merging.runs:
            if run not in self.runs:
                run.close()
        self._merging = None

    def close(self) -> None:
        self._is_closing = True
        self._thread.shutdown(wait=True)
        self._adopt()
        for run in self.runs:
            run.close()


def _spans(groups: np.ndarray) -> list[tuple[int, int]]:
    """Where each key group begins and ends among sorted ones."""
    return list(pairwise(groups.searchsorted(np.arange(GROUPS + 1)).tolist()))


def _inside(places: np.ndarray, chunks: Chunks, record_bytes: int) -> np.ndarray:
    """Which places are those of records in some chunks."""
    if not len(chunks.offset):
        return np.zeros(len(places), bool)
    order = np.argsort(chunks.offset)
    starts, sizes = chunks.offset[order], chunks.records[order] * record_bytes
    at = np.maximum(starts.searchsorted(places, "right") - 1, 0)
    within = places - starts[at]
    found: np.ndarray = (within >= 0) & (within < sizes[at])
    return found


def first_merged(counts: list[int]) -> int:
    """The first of the files, oldest first, that should be merged with all newer ones; their number if none.

    So a file has more than twice as many entries as all newer ones together, there are about log3(records / 2^20) of
    them, and an entry is written two or three times as often; but files of less than 2^20 entries, some milliseconds of
    work, are merged with every new one.
    """
    sizes = [max(LEAST_MERGED, count) for count in counts]
    for first in range(len(sizes) - 1):
        if GROWTH * sum(sizes[first + 1 :]) >= sizes[first]:
            return first
    return len(sizes)
