"""RunLevels: the runs of evicted records, by shard, and the merging of several of them.

A shard is a sixteenth of the hashes. Its runs are ordered from the oldest to the newest; a record of a newer run hides
the older ones of its key, or continues them if it is PARTIAL. To know the value of a key, its records are merged,
oldest first: point reads merge in a hash table (`MergeTable`); scans and compaction merge sorted runs, range by range
of hashes, and combine records of equal keys (in a hash table too, if records have texts or different merge functions).

Invariant: the list of a shard's runs is replaced, never changed, so a reader keeps the runs that it started with; files
stay readable after they are removed.

Threads: readers, and at most one compaction per shard. `Compactor.replace` replaces a list, under a lock.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from scalein.layout import GROUPS, PARTIAL, TOMB, SortedRecords
from scalein.memory import address
from scalein.state.arena import Arena, Workspace
from scalein.state.memtable import MemTable
from scalein.state.run_file import IndexMemory, RunFile
from scalein.state.run_writer import RunWriter
from scalein.storage.aio import BlockReader
from scalein.storage.filesystem import FileSystem, Input

if TYPE_CHECKING:
    from scalein.kernels.store import Functions, StoreKernels

SHARDS = 16
SHARD_GROUPS = GROUPS // SHARDS
MERGE_SEGMENT = 1 << 22  # bytes of a segment of a merge table; the texts of a row must fit


@dataclass(frozen=True, eq=False)
class Run:
    """A run, perhaps still being written, and the merge functions of its partial records."""

    id: int
    record_count: int
    functions: Functions
    written: Future[RunFile]
    groups: frozenset[int] | None = None  # key groups whose records belong to this store; None: all

    def restrict_to(self, groups: frozenset[int]) -> Run:
        shard = self.file.least_hash >> 60
        owned = (frozenset(shard_groups(shard)) if self.groups is None else self.groups) & groups
        return replace(self, groups=owned)

    def owns(self, hashes: np.ndarray) -> np.ndarray:
        """Which records belong to this store, by their hashes."""
        if self.groups is None:
            return np.ones(len(hashes), bool)
        return np.isin(hashes >> np.uint64(56), np.array(sorted(self.groups), np.uint64))

    @property
    def file(self) -> RunFile:
        """Waits until the file is written."""
        return self.written.result()


def shard_groups(shard: int) -> range:
    return range(shard * SHARD_GROUPS, (shard + 1) * SHARD_GROUPS)


def shard_range(shard: int) -> tuple[int, int]:
    """The least and the greatest hash of a shard."""
    return shard << 60, (shard + 1 << 60) - 1


def pointers_to(records: np.ndarray) -> np.ndarray:
    """Addresses of contiguous records."""
    start, size = address(records), records.shape[1]
    return np.arange(start, start + len(records) * size, size, dtype=np.uint64)


class MergedRecords(NamedTuple):
    """Records of several runs, one per key, in the order of their hashes."""

    records: np.ndarray
    hashes: np.ndarray


class RunSlice(NamedTuple):
    """Records of one run in a range of hashes, their merge functions, and the object that owns their memory."""

    sorted: SortedRecords
    functions: Functions
    owner: object


class _RangeRead(NamedTuple):
    """A range of hashes, and the blocks [first, last) of each run that may hold some of it, read at once."""

    least: int
    greatest: int
    runs: list[Run]  # oldest first
    blocks: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray

    @staticmethod
    def all(ranges: list[tuple[int, int]], runs: tuple[Run, ...]) -> Iterator[_RangeRead]:
        leasts, greatests = np.array(ranges, np.uint64).T
        spans = np.zeros((0, 4, len(ranges)))
        if runs:
            spans = np.stack([run.file.blocks_in_ranges(leasts, greatests) for run in runs])
        for number, (least, greatest) in enumerate(ranges):
            has_blocks = np.flatnonzero(spans[:, 0, number] < spans[:, 1, number])
            blocks = spans[has_blocks, :, number].astype(np.int64)
            yield _RangeRead(least, greatest, [runs[k] for k in has_blocks.tolist()], blocks[:, :2], blocks[:, 2],
                             blocks[:, 3])

    @property
    def inputs(self) -> list[Input]:
        return [run.file.input for run in self.runs]

    @property
    def input_index(self) -> np.ndarray:
        return np.arange(len(self.runs))


class _MergeBuffers:
    """The buffers of one thread that merges runs, reused."""

    def __init__(self) -> None:
        self.workspace = Workspace()
        self.reader = BlockReader(0, buffers=2)  # one range is read while another is merged


class MergeTable:
    """A memtable in which records of several runs are merged."""

    def __init__(self, kernels: StoreKernels) -> None:
        self._kernels = kernels
        self.table = MemTable(kernels, Arena(MERGE_SEGMENT, 1 << 34), max_chunk=1 << 16)
        self._groups = range(GROUPS)

    def merge(self, pointers: np.ndarray, functions: Functions) -> None:
        """Merge records that are newer than all before."""
        self._kernels.merge_records(self.table, pointers, functions, older=False)

    def reset(self, least: int = 0, greatest: int = (1 << 64) - 1, records: int = 0) -> None:
        """Remove all records, and make space for this many of a range of hashes, or for a few of any."""
        (self.table.clear if records else self.table.reset)(self._groups)
        self._groups = range(least >> 56, (greatest >> 56) + 1)
        if records:
            for group in self._groups:  # hashes are uniformly distributed
                inside = min(greatest, (group + 1 << 56) - 1) - max(least, group << 56) + 1
                self.table.reserve(group, records * inside // (greatest - least + 1))

    def pointers(self) -> np.ndarray:
        return np.concatenate([self.table.pointers(group) for group in self._groups])

    @property
    def memory_bytes(self) -> int:
        return self.table.memory_bytes


class RunLevels:
    """Opens, writes, reads and merges runs: about `merge_records` records and `write_bytes` bytes at a time."""

    def __init__(self, fs: FileSystem, kernels: StoreKernels, merge_records: int, write_bytes: int) -> None:
        self._fs, self._kernels, self._merge_records, self._write_bytes = fs, kernels, merge_records, write_bytes
        self.runs: list[tuple[Run, ...]] = [() for _ in range(SHARDS)]
        self._index_memory = IndexMemory()
        self._merge_buffers: list[_MergeBuffers] = []  # unused
        self._workspaces: list[Workspace] = []  # of writers; unused
        self._opened: list[RunFile] = []  # by `open_all`, until `install` chooses among them

    def open_all(self, ids: list[list[int]], groups: dict[int, frozenset[int] | None]) -> list[tuple[Run, ...]]:
        """Open the runs of a snapshot, each restricted to groups, until `install` or `close`."""
        found: list[tuple[Run, ...]] = []
        for shard_ids in ids:
            runs = []
            for id in shard_ids:
                runs.append(self.open(id, groups[id]))
                self._opened.append(runs[-1].file)
            found.append(tuple(runs))
        return found

    def install(self, runs: list[tuple[Run, ...]]) -> None:
        """Use these of the opened runs, and close the others."""
        self.runs = runs
        used = {id(run.file) for shard_runs in runs for run in shard_runs}
        for file in self._opened:
            if id(file) not in used:
                file.close()
        self._opened = []

    def open(self, id: int, groups: frozenset[int] | None = None) -> Run:
        file = self.open_file(id)
        try:
            functions = tuple(json.loads(file.spec))
        except BaseException:
            file.close()
            raise
        written: Future[RunFile] = Future()
        written.set_result(file)
        return Run(id, int(file.record_count), functions, written, groups)

    def open_file(self, id: int) -> RunFile:
        kernels = self._kernels
        return RunFile(self._fs, id, kernels.record_bytes, kernels.text_cells, kernels.checksums, self._index_memory)

    @property
    def index_bytes(self) -> int:
        """Directories and filters in memory."""
        return self._index_memory.bytes

    @property
    def memory_bytes(self) -> int:
        """Directories, filters and unused buffers."""
        buffers = list(self._merge_buffers)
        workspaces = [*(one.workspace for one in buffers), *self._workspaces]
        return (self.index_bytes + sum(workspace.size_bytes for workspace in workspaces) +
                sum(one.reader.memory_bytes for one in buffers))  # fmt: skip

    def free_workspaces(self) -> None:
        """Free the unused memory of writers."""
        self._workspaces.clear()

    @property
    def full_index_bytes(self) -> int:
        """Memory of the directories and filters of all runs, once all are loaded."""
        return sum(run.file.index_bytes for runs in self.runs for run in runs)

    def writer(self, id: int, functions: Functions, records: int, size_bytes: int, has_filter: bool) -> RunWriter:
        """A new run of about this size. The oldest run of a shard needs no filter: it has nearly all keys."""
        kernels = self._kernels
        return RunWriter(self._fs, id, kernels.record_bytes, json.dumps(functions), kernels.text_cells, size_bytes,
                         kernels.checksums, records if has_filter else None, kernels.pack, kernels.set_filter_bits,
                         self._workspaces, self._write_bytes)

    def sorted_records(self, pointers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Copies of records in the order of their hashes, and these."""
        hashes = self._kernels.hash_keys(pointers)
        order = np.argsort(hashes)
        return self._kernels.gather(np.ascontiguousarray(pointers[order])), hashes[order]

    def ranges(self, groups: range, runs: tuple[Run, ...], newest_count: int = 0) -> list[tuple[int, int]]:
        """Ranges of the hashes of some groups of a shard that are each merged at once, for the records of its runs and
        `newest_count` newer ones.
        """
        count = sum(map(self._weight, runs)) * len(groups) // SHARD_GROUPS  # hashes are uniformly distributed
        return _split_range(groups, -(-(count + newest_count) // self._merge_records) or 1)

    def _weight(self, run: Run) -> int:
        """The number of records of a run; with texts, of records without text that would be as large."""
        return run.file.size_bytes // self._kernels.record_bytes if self._kernels.text_cells else run.record_count

    def merged_ranges(self, ranges: list[tuple[int, int]], runs: tuple[Run, ...],
                      merge_table: Callable[[], MergeTable],
                      newest: tuple[np.ndarray, np.ndarray, Functions] | None = None) -> Iterator[MergedRecords]:
        """The merged records of a shard, from its runs and from newer records, range by range of hashes.

        The next range overwrites the records of the last one, and texts in the merge table. `newest`: pointers, their
        hashes, merge functions.
        """
        count = sum(run.record_count for run in runs) * (ranges[-1][1] + 1 - ranges[0][0]) >> 60
        count = (count + (0 if newest is None else len(newest[0]))) // len(ranges)  # records of a range, about
        functions = {run.functions for run in runs} | ({newest[2]} if newest is not None else set())
        if self._kernels.text_cells:
            for least, greatest in ranges:
                slices = [*self._slices_with_text(least, greatest, runs), *_newest_slice(least, greatest, newest)]
                yield self._merge_in_table(slices, merge_table(), least, greatest, count)
            return
        try:
            buffers = self._merge_buffers.pop()
        except IndexError:  # not checked before: another thread may take the last one
            buffers = _MergeBuffers()
        allocate = buffers.workspace.word_buffer
        for read, area in buffers.reader.read(_RangeRead.all(ranges, runs)):
            buffers.workspace.reset()
            slices = [*self._slices(read, area, buffers.workspace), *_newest_slice(read.least, read.greatest, newest)]
            if len(functions) == 1 and slices:
                hashes, pointers = self._kernels.merge_sorted([one.sorted for one in slices], allocate)
                yield MergedRecords(*self._kernels.combine_records(pointers, hashes, slices[0].functions, allocate))
            else:
                yield self._merge_in_table(slices, merge_table(), read.least, read.greatest, count)
        self._merge_buffers.append(buffers)

    def _merge_in_table(self, slices: list[RunSlice], table: MergeTable, least: int, greatest: int,
                        records: int) -> MergedRecords:
        table.reset(least, greatest, records)
        for one in slices:
            table.merge(one.sorted.pointers, one.functions)
        return MergedRecords(*self.sorted_records(table.pointers()))

    def _slices(self, read: _RangeRead, area: np.ndarray, workspace: Workspace) -> Iterator[RunSlice]:
        """The records of runs without text in a range of hashes, oldest first."""
        if not read.runs:
            return
        per_block, size = read.runs[0].file.block_shape
        counts, at = read.blocks[:, 1] - read.blocks[:, 0], read.sizes.cumsum() - read.sizes
        origins = np.array([(0, run.id, 0) for run in read.runs], np.int64)
        origins[:, 0], origins[:, 2] = counts, read.offsets
        fits = counts * size == read.sizes
        found: list[SortedRecords | None] = [None] * len(origins)
        if fits.all():
            found = self._kernels.read_blocks(area, origins, per_block, size, read.least, read.greatest,
                                              workspace.word_buffer)
        else:
            k = int(np.argmin(fits))
            read.runs[k].file.raise_damage(area[at[k] : at[k] + read.sizes[k]], *read.blocks[k].tolist())
        for k, (run, records) in enumerate(zip(read.runs, found, strict=True)):
            if records is None:
                run.file.raise_damage(area[at[k] : at[k] + read.sizes[k]], *read.blocks[k].tolist())
            yield RunSlice(_owned(run, records), run.functions, None)

    def _slices_with_text(self, least: int, greatest: int, runs: tuple[Run, ...]) -> Iterator[RunSlice]:
        """The records of runs in a range of hashes, oldest first."""
        for run in runs:
            first, last = run.file.blocks_in_range(least, greatest)
            if first < last:
                found = run.file.read_range(first, last)
                pointers = pointers_to(found.records)
                hashes = self._kernels.hash_keys(pointers)
                inside = slice(hashes.searchsorted(np.uint64(least)), hashes.searchsorted(np.uint64(greatest), "right"))
                yield RunSlice(_owned(run, SortedRecords(hashes[inside], pointers[inside])), run.functions, found)

    def close(self) -> None:
        for one in self._merge_buffers:
            one.reader.close()
        for file in self._opened:
            file.close()

    def compact(self, shard: int, runs: tuple[Run, ...], id: int, merge_table: Callable[[], MergeTable],
                is_bottom: bool) -> Run | None:
        """Merge runs into one, or into none if nothing is left. At the bottom there is no older record to hide or to
        continue: tombstones go, and partial records become full ones.
        """
        functions = runs[-1].functions
        writer = self.writer(id, functions, sum(run.record_count for run in runs),
                             sum(run.file.size_bytes for run in runs), has_filter=not is_bottom)
        count = 0
        try:
            ranges = self.ranges(shard_groups(shard), runs)
            for records, hashes in self.merged_ranges(ranges, runs, merge_table):
                if is_bottom:
                    heads = records[:, :8].view(np.uint64)
                    is_live = (heads[:, 0] & np.uint64(TOMB)) == 0
                    heads &= ~np.uint64(PARTIAL)
                    if not is_live.all():
                        records, hashes = records[is_live], hashes[is_live]
                writer.add(records, hashes)
                count += len(records)
            writer.finish()
        except BaseException:
            writer.abandon()
            raise
        if count:
            return self.open(id)
        writer.abandon()
        return None


def _owned(run: Run, records: SortedRecords) -> SortedRecords:
    """The records of a run that belong to this store."""
    if run.groups is None:
        return records
    is_owned = run.owns(records.hashes)
    return SortedRecords(records.hashes[is_owned], records.pointers[is_owned])


def _newest_slice(least: int, greatest: int,
                  newest: tuple[np.ndarray, np.ndarray, Functions] | None) -> Iterator[RunSlice]:
    """The records in memory in a range of hashes."""
    if newest is not None:
        pointers, hashes, functions = newest
        inside = (hashes >= np.uint64(least)) & (hashes <= np.uint64(greatest))
        hashes, pointers = hashes[inside], pointers[inside]
        order = np.argsort(hashes)
        yield RunSlice(SortedRecords(hashes[order], pointers[order]), functions, None)


def _split_range(groups: range, parts: int) -> list[tuple[int, int]]:
    """Ranges of the hashes of groups with about equally many records: hashes are uniformly distributed."""
    least, greatest = groups.start << 56, (groups.stop << 56) - 1
    step = (greatest - least + 1) // parts
    bounds = [least + k * step for k in range(parts)] + [greatest + 1]
    return [(low, high - 1) for low, high in pairwise(bounds)]
