"""Tiers: where the records of a key are: in memory, in restored pieces that are not loaded yet, in runs on disk.

Invariant: the value of a key follows from, oldest first: the runs of its shard, the pieces, the record in memory. A
record that does not include all older ones is PARTIAL; new records of a group are, while anything older exists outside
of memory (`NEW_FLAGS`). All partial records in memory and in pieces have the same merge functions.

When records are flushed to disk (`evict_to_budget`) and when garbage is collected (`collect_garbage`) is decided here.

Threads: everything is called under the store's lock, except for the background work of `evict.py` and `compaction.py`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from scalein.errors import Damaged, NewerFormat, ScaleinError, StoreFailed
from scalein.layout import GROUPS, PARTIAL, TOMB
from scalein.memory import address
from scalein.state import format
from scalein.state.arena import Arena
from scalein.state.budget import UNLIMITED, Budget
from scalein.state.compaction import Compactor
from scalein.state.evict import MAX_EVICTIONS, RETAINED_SHARE, Evictor
from scalein.state.memtable import MemTable
from scalein.state.point_reads import PointReads
from scalein.state.restored import RestoredState
from scalein.state.run_levels import (
    SHARD_GROUPS,
    SHARDS,
    MergeTable,
    Run,
    RunLevels,
    pointers_to,
    shard_groups,
)
from scalein.state.sum_bounds import greatest
from scalein.storage.aio import BlockReader
from scalein.storage.filesystem import FileSystem

if TYPE_CHECKING:
    from scalein.kernels.store import Functions, StoreKernels

SCANNED_RANGES = 4  # ranges of hashes whose rows a scan holds at once: about an eighth of the budget
GARBAGE_SHARE = 0.3  # of a group's bytes, from which on it is rewritten
HEADROOM_SHARE = 4  # at most this fraction (1/4) of the memtable's memory is kept free for new rows
SPARE_SHARE = 16  # this fraction (1/16) of memory may be free without going back to the system,
FRAGMENTED_SHARE = 4  # or this one (1/4) if huge pages would be broken up


class Tiers:
    """The records of a store on all tiers. `new_id` numbers files; `remove_obsolete` removes unreferenced ones."""

    def __init__(self, fs: FileSystem, kernels: StoreKernels, budget: Budget, new_id: Callable[[], int],
                 remove_obsolete: Callable[[], None]) -> None:
        self._kernels, self._budget, self._remove_obsolete = kernels, budget, remove_obsolete
        self.memtable = MemTable(kernels, Arena(budget.segment_bytes, coalesced=budget.max_chunk), budget.max_chunk,
                                 budget.load_sixteenths)
        self.levels = RunLevels(fs, kernels, budget.merge_records(kernels.record_bytes), budget.write_bytes)
        self.functions: Functions = ()  # of the partial records
        self._next_shard = 0  # to evict
        self._bytes_before = 0  # in use when memory was checked last
        self._merge_table: MergeTable | None = None
        self._reader = BlockReader(budget.read_buffer_bytes)
        self._point_reads = PointReads(kernels, self._reader)
        self._closer = ThreadPoolExecutor(1, "scalein-close")
        self.restored = RestoredState(fs, kernels, self.memtable, self._reader, self._closer)
        self.compactor = Compactor(self.levels, kernels, new_id, remove_obsolete)
        self.evictor = Evictor(self.memtable, self.levels, kernels, self.compactor, new_id)
        self._run_bounds: list[dict[int, list[int] | None]] = [{} for _ in range(SHARDS)]  # by run, see greatest_values
        self._unreported: ScaleinError | None = None  # why an eviction failed, if no caller has seen it
        self._unevictable: set[int] = set()  # shards whose older records cannot be read
        self._absent = np.frombuffer(bytearray(kernels.template), np.uint8)  # the record of a key that does not exist
        self._absent[0] |= TOMB
        self._scanned = np.zeros((0, kernels.record_bytes), np.uint8)  # keeps the records of the last pointers alive

    def set_group_flags(self) -> None:
        """Set for each group whether its new records are partial."""
        unloaded = self.restored.unloaded_groups()
        for group in range(GROUPS):
            is_partial = group in unloaded or bool(self.levels.runs[group // SHARD_GROUPS])
            self.memtable.set_flags(group, PARTIAL if is_partial else 0)

    def file_names(self, runs: list[tuple[Run, ...]]) -> set[str]:
        """The files of runs and pieces, without the images of the memtable."""
        return {format.run_name(run.id) for shard_runs in runs for run in shard_runs} | self.restored.file_names()

    # --- rows

    def use_functions(self, functions: Functions) -> None:
        """Set the merge functions of partial records. Partial records of other functions are evicted before."""
        if functions != self.functions:
            if self.restored.pieces or any(self.levels.runs):
                self.load_all()
                for shard in range(SHARDS):
                    self._evict(shard, 0.0)
                self.finish_evictions()
                self.evictor.workspaces.clear()  # as large as shards, and not needed soon
            self.functions = functions

    def find(self, batch: pa.RecordBatch) -> np.ndarray:
        """Pointers to complete records of the batch's keys; to a deleted one for keys that do not exist.

        Reads succeed on a disk that accepts no writes; memory is over the budget then.
        """
        self._try(lambda: self.finish_evictions(wait_for_close=False))
        if self.restored.pieces:
            self._try(self.evict_to_budget)
        if self._budget.total is not None:
            # Before filters are loaded: afterwards no record that was found may be evicted.
            self._try(lambda: self.evict_to_budget(run_index_bytes=self.levels.full_index_bytes))
        self._finish_all_evictions()  # also without a budget: evictions for other functions may have failed
        if self._budget.total is not None:
            self.evictor.workspaces.clear()
            self.levels.free_workspaces()
        pointers, hashes = self._kernels.lookup(self.memtable, batch)
        if self.restored.pieces or any(self.levels.runs):
            self._find_older(batch, pointers, hashes)
        pointers[pointers == 0] = address(self._absent)
        return pointers

    def _find_older(self, batch: pa.RecordBatch, pointers: np.ndarray, hashes: np.ndarray) -> None:
        """Let the pointers of rows whose keys have older records lead to records that include these."""
        groups = (hashes >> np.uint64(56)).astype(np.int64)
        if self.restored.pieces and self._load_requested(np.bincount(groups, minlength=GROUPS)):
            pointers[:] = self._kernels.lookup(self.memtable, batch)[0]
        unloaded = self.restored.unloaded_groups()
        has_older = np.array([bool(self.levels.runs[group // SHARD_GROUPS]) or group in unloaded
                              for group in range(GROUPS)])[groups]
        incomplete = np.flatnonzero(has_older & (pointers == 0))
        in_memory = np.flatnonzero(has_older & (pointers != 0))
        if len(in_memory):
            is_partial = (self._heads(pointers[in_memory]) & np.uint64(PARTIAL)) != 0
            incomplete = np.sort(np.concatenate((incomplete, in_memory[is_partial])))
        if len(incomplete):
            self._merge_older(batch.take(pa.array(incomplete)), incomplete, pointers, hashes)

    def _merge_older(self, batch: pa.RecordBatch, rows: np.ndarray, pointers: np.ndarray, hashes: np.ndarray) -> None:
        """Merge the records of rows' keys in runs, pieces and memory; let the pointers lead to the results."""
        table = self._cleared_merge_table()
        wanted = np.unique(hashes[rows])
        shards = wanted >> np.uint64(60)
        self._load_run_indexes(np.unique(shards).tolist())
        blocks = self._point_reads.read(list(self.levels.runs), wanted, table)
        if not self.restored.is_readonly:
            self.compactor.count_block_reads(blocks, np.bincount(shards.astype(int), minlength=SHARDS))
        self.restored.read(wanted, self.functions, table)
        partial = np.unique(pointers[rows])
        table.merge(np.ascontiguousarray(partial[partial != 0]), self.functions)
        pointers[rows] = self._kernels.lookup(table.table, batch)[0]

    def _load_run_indexes(self, shards: list[int]) -> None:
        """Load directories and filters of many runs concurrently; those of a few are loaded on first use."""
        unloaded = [run.file for shard in shards for run in self.levels.runs[shard] if not run.file.is_loaded]
        if len(unloaded) > MAX_EVICTIONS:
            loads = [self.evictor.threads.submit(file.load) for file in unloaded]
            wait(loads)  # for all, even if one fails: files may be closed once the caller releases the lock
            for load in loads:
                load.result()

    def resolve_partials(self, batch: pa.RecordBatch) -> None:
        """Let the records of the batch's keys in memory include all older ones, so that sums are complete."""
        complete = self.find(batch)
        pointers, _ = self._kernels.lookup(self.memtable, batch)
        others = np.unique(complete[(complete != pointers) & (complete != np.uint64(address(self._absent)))])
        if len(others):
            assert self._merge_table is not None
            arena = self._merge_table.table.arena
            words = arena.memory.view(np.uint64)
            words[(others - np.uint64(arena.base)) >> np.uint64(3)] &= ~np.uint64(PARTIAL)
            self.memtable.batch += 1
            self._kernels.merge_records(self.memtable, others, self.functions, older=False)

    def scan(self, least: int) -> tuple[int, Iterator[np.ndarray]]:
        """A part of a scan: the hash after it, and pointers to the records of hashes from `least` up to there that are
        not deleted. The next step overwrites what the pointers of the last one lead to.

        A part ends with its shard, or with its group if pieces must not all be loaded at once. Under a budget it is at
        most `SCANNED_RANGES` of the ranges in which runs are merged.
        """
        group = least >> 56
        is_small = self.restored.is_readonly and self._budget.total is not None
        groups = range(group, group + 1) if is_small else shard_groups(group // SHARD_GROUPS)
        self._load_groups(groups, make_space=True)
        self._finish_all_evictions()
        runs = self.levels.runs[group // SHARD_GROUPS]
        ranges = [(least, (groups.stop << 56) - 1)]
        if runs:
            count = sum(map(self.memtable.record_count, groups))
            ranges = [(max(low, least), high) for low, high in self.levels.ranges(groups, runs, count) if high >= least]
            ranges = ranges if self._budget.total is None else ranges[:SCANNED_RANGES]
        return ranges[-1][1] + 1, self._live_records(ranges, runs)

    def _live_records(self, ranges: list[tuple[int, int]], runs: tuple[Run, ...]) -> Iterator[np.ndarray]:
        """Pointers to the records of ranges of hashes that are not deleted."""
        least, greatest = ranges[0][0], ranges[-1][1]
        groups = range(least >> 56, (greatest >> 56) + 1)
        pointers = np.concatenate([self.memtable.pointers(group) for group in groups])
        if not runs:
            heads = np.concatenate([self.memtable.heads(group) for group in groups])
            live = pointers[(heads & np.uint64(TOMB)) == 0]
            if least != groups.start << 56:  # there were runs when the scan began with this group
                live = live[self._kernels.hash_keys(live) >= np.uint64(least)]
            yield np.ascontiguousarray(live)
            return
        newest = (pointers, self._kernels.hash_keys(pointers), self.functions)
        for records, _ in self.levels.merged_ranges(ranges, runs, self._cleared_merge_table, newest):
            heads = records[:, :8].copy().view(np.uint64)[:, 0]
            self._scanned = records
            yield np.ascontiguousarray(pointers_to(records)[(heads & np.uint64(TOMB)) == 0])

    def greatest_values(self, shard: int, names: list[str]) -> tuple[int, list[int]]:
        """Bounds of the absolute values of columns in a shard, of full records and of all merges of partial ones;
        before them, how many records were read.
        """
        groups = shard_groups(shard)
        self._load_groups(groups, make_space=True)
        self._finish_all_evictions()
        pointers = np.concatenate([self.memtable.pointers(group) for group in groups])
        count, bounds, runs = len(pointers), self._greatest(pointers, names), self.levels.runs[shard]
        self._run_bounds[shard] = {run.id: self._run_bounds[shard].get(run.id) for run in runs}
        for run in runs:
            found = self._run_bounds[shard][run.id]
            if found is None:
                found, count = [0] * len(names), count + run.record_count
                for records, _ in self.levels.merged_ranges(self.levels.ranges(groups, (run,)), (run,),
                                                            self._cleared_merge_table):
                    found = [*map(max, found, self._greatest(pointers_to(records), names))]
                self._run_bounds[shard][run.id] = found
            bounds = [*map(operator.add, bounds, found)]
        return count, bounds

    def _greatest(self, pointers: np.ndarray, names: list[str]) -> list[int]:
        found = [0] * len(names)
        for rows in self._kernels.rows(pointers, names):
            found = [*map(max, found, greatest(rows.columns))]
        return found

    def _heads(self, pointers: np.ndarray) -> np.ndarray:
        """The head words of records."""
        return self._kernels.gather(np.ascontiguousarray(pointers))[:, :8].copy().view(np.uint64)[:, 0]

    # --- memory

    @property
    def memory_bytes(self) -> int:
        merge_table = self._merge_table.memory_bytes if self._merge_table else 0
        return (self.memtable.memory_bytes + merge_table + self._reader.memory_bytes + self.levels.memory_bytes +
                self.evictor.memory_bytes + self.restored.files.memory_bytes)  # fmt: skip

    def _cleared_merge_table(self) -> MergeTable:
        if self._merge_table is None:
            self._merge_table = MergeTable(self._kernels)
        self._merge_table.reset()
        return self._merge_table

    def evict_to_budget(self, text_bytes: int = 0, run_index_bytes: int = 0) -> None:
        """Evict shards, in turn, until there is memory for what comes: texts, or the indexes of runs."""
        if self.memtable.gc_candidates and not self.restored.is_readonly:
            self.collect_garbage()
        most = self._budget.memtable_bytes_beside(max(run_index_bytes, self.levels.index_bytes))
        if self.restored.is_readonly:  # nothing may be written, and nothing in memory is newer than its piece
            if self.memtable.in_use > most:
                self.memtable.clear(range(GROUPS))
                self.restored.reset()
                self.set_group_flags()
            return
        # As much will come as came last. With headroom for it, freed memory is reused instead of being returned to the
        # system, which would have to zero it again.
        headroom = min(max(0, self.memtable.in_use - self._bytes_before), most // HEADROOM_SHARE)
        for evicted in range(2 * SHARDS):
            in_use = self.memtable.in_use_without(eviction.chunks for eviction in self.evictor.evictions)
            if in_use + max(headroom, text_bytes) <= most:
                if evicted:
                    self.memtable.trim(most + most // SPARE_SHARE, most + most // FRAGMENTED_SHARE)
                break
            shard, self._next_shard = self._next_shard, (self._next_shard + 1) % SHARDS  # also if this one fails
            if shard not in self._unevictable:
                self._evict(shard, RETAINED_SHARE)
        self._bytes_before = self.memtable.in_use

    def collect_garbage(self) -> None:
        """Rewrite groups that are full of deleted records and replaced texts."""
        for group in sorted(self.memtable.gc_candidates):
            if self.memtable.garbage_share(group) < GARBAGE_SHARE:
                continue
            pointers = self.memtable.pointers(group)
            if not self.levels.runs[group // SHARD_GROUPS] and not self.restored.has(group):
                pointers = pointers[(self.memtable.heads(group) & np.uint64(TOMB)) == 0]
            chunks = self.memtable.release(group)
            self.memtable.reset_chunk_size(group)
            self.memtable.batch += 1
            self._kernels.merge_records(self.memtable, np.ascontiguousarray(pointers), self.functions, older=False)
            self.memtable.free(chunks)
            self.memtable.mark_collected(group)

    def _evict(self, shard: int, retained_share: float) -> None:
        """Evict the least accessed records of a shard; a thread writes them to a run."""
        groups = shard_groups(shard)
        # If an eviction of the shard in flight fails, its records go back to memory: nothing newer may be on disk then.
        is_in_flight = any(eviction.shard == shard for eviction in self.evictor.evictions)
        self.finish_evictions(0 if is_in_flight else MAX_EVICTIONS - 1)
        self.compactor.wait_for_backlog(shard)
        try:
            self._load_groups(groups, make_space=False)
        except (Damaged, NewerFormat) as error:
            self._unevictable.add(shard)
            self._unreported = error.with_traceback(None)
            return
        if not any(map(self.memtable.record_count, groups)):
            return
        drop = 0 if self.levels.runs[shard] else TOMB  # without older records, a deletion needs no tombstone
        self.evictor.evict(shard, retained_share, drop, self.functions)
        for group in groups:
            self.memtable.set_flags(group, PARTIAL if self.levels.runs[shard] else 0)

    def finish_evictions(self, max_in_flight: int = 0, wait_for_close: bool = True) -> None:
        """Wait until at most so many evictions are in flight; raises if one failed, whose records are back in memory.

        `wait_for_close`: also until obsolete files are closed.
        """
        for run in self.compactor.take_replaced():  # no reader is left: readers hold the store's lock
            if run.written.exception() is None and (max_in_flight or not wait_for_close):
                self._closer.submit(run.file.close)  # freeing a removed file takes 0.1 s and more
            elif run.written.exception() is None:
                run.file.close()
        self.evictor.finish(max_in_flight)

    def _finish_all_evictions(self) -> None:
        """Wait until no eviction is in flight, whether they succeed or fail."""
        while self.evictor.evictions:
            self._try(self.finish_evictions)

    def _try(self, step: Callable[[], None]) -> bool:
        """Whether a step that frees memory succeeded. If not, every record can still be found: those of a failed
        eviction are back in memory, and the next rows report why (`raise_unreported`); damage is reported when the
        damaged records are read.
        """
        try:
            step()
        except (StoreFailed, Damaged, NewerFormat) as error:
            if self.memtable.is_inconsistent:
                raise
            if isinstance(error, StoreFailed):
                self._unreported = error.with_traceback(None)
            return False
        return True

    def raise_unreported(self) -> None:
        """Raise the error of a background eviction that no caller has seen yet."""
        error, self._unreported = self._unreported, None
        if error is not None:
            raise error

    # --- restored pieces

    def _load(self, groups: list[int], first: int = 0) -> None:
        """Load groups into memory, under newer records, from the pieces from `first` on."""
        for group in self.restored.load(groups, self.functions, first):
            if not self.levels.runs[group // SHARD_GROUPS] and not self.restored.has(group):
                self.memtable.set_flags(group, 0)

    def load_newest_pieces(self) -> None:
        """If there are too many pieces, load the newest or some of their groups, so that the next snapshot has fewer.

        A group that cannot be read stays where it is: the snapshot does not need it.
        """
        first, groups = self.restored.groups_to_merge()
        newest = self.restored.pieces[first:]
        for group in groups:
            if not self._try(self.evict_to_budget):
                return
            first = self.restored.position_of(newest)  # older ones may have been loaded meanwhile
            self._try(functools.partial(self._load, [group], first))

    def _load_requested(self, keys: np.ndarray) -> bool:
        """Load the groups that are better loaded than looked up when so many keys of each are requested, and those
        without an index; whether there were any."""
        free = UNLIMITED
        if self.restored.is_readonly:  # its memtable may be cleared, but not during a call
            free = self._budget.memtable_bytes_beside(self.levels.full_index_bytes) - self.memtable.in_use
        required, better = self.restored.groups_to_load(keys, free)
        if self.restored.is_readonly or self._budget.total is None:
            self._load([*required, *better])  # at once: making space in between could clear what was just loaded
        else:
            has_space = True
            for group in (*required, *better):
                has_space = has_space and self._try(self.evict_to_budget)
                if has_space or group in required:
                    self._load([group])
            self._finish_all_evictions()  # no record that will be found may be evicted
        return bool(required or better)

    def load_all(self) -> None:
        self._load_groups(range(GROUPS), make_space=True)

    def _load_groups(self, wanted: Iterable[int], make_space: bool) -> None:
        if self.restored.pieces and make_space:
            self._try(self.evict_to_budget)
        groups = sorted(self.restored.unloaded_groups() & set(wanted)) if self.restored.pieces else []
        if not make_space or self.restored.is_readonly or self._budget.total is None:
            self._load(groups)  # at once: making space in between could clear what was just loaded
            return
        has_space = True
        for group in groups:
            has_space = has_space and self._try(self.evict_to_budget)
            self._load([group])

    def compact(self) -> bool:
        """Merge all runs of each shard into one; whether there was anything to merge."""
        self.finish_evictions()
        has_merged = self.compactor.compact_all(self._cleared_merge_table)
        self.finish_evictions()  # closes the replaced files
        self._remove_obsolete()
        return has_merged

    def close(self) -> None:
        """Stop background work and close the files. Not under the lock."""
        self.evictor.close()
        self._closer.shutdown(wait=True)
        self.compactor.close()
        for runs in (*self.levels.runs, self.compactor.take_replaced()):
            for run in runs:
                if run.written.exception() is None:
                    run.file.close()
        self.restored.close()
        self.levels.close()
        self._reader.close()

    def verify(self) -> None:
        """Read all runs and pieces; `Damaged` names the file that is not what was written."""
        self._finish_all_evictions()
        for runs in self.levels.runs:
            for run in runs:
                run.file.verify()
        self.restored.verify()
