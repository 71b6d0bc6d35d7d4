"""Evictor: flushes the least used records of a shard from the memtable to a run, which background threads write.

Invariant: evicted records can always be found. Their run is in the list of the shard as soon as the memtable has
removed them, and a reader of that run waits until it is written. A shard has at most one eviction in flight, so the
records of a failed one, which go back to the memtable, are older than all in memory and newer than all runs.

When to evict, and which shard: `Tiers.evict_to_budget`; how much memory the memtable may take: `budget.py`. Which of a
shard's records leave is decided here (`eviction_threshold`).

Threads: `_write_run` runs on threads of its own; everything else is called under the store's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from scalein.layout import ACCESSES_SHIFT, MAX_ACCESSES
from scalein.state.arena import Workspace
from scalein.state.compaction import Compactor
from scalein.state.memtable import MemTable
from scalein.state.run_file import RunFile
from scalein.state.run_levels import Run, RunLevels, shard_groups

if TYPE_CHECKING:
    from scalein.kernels.store import Functions, StoreKernels

MAX_EVICTIONS = 3  # in flight
RETAINED_SHARE = 0.25  # of a shard's records, those accessed most, that an eviction leaves in memory
ACCESS_SAMPLE = 1 << 12  # records of a shard whose accesses decide which are retained

# Yields records in the order of their hashes, with these, at most so many at a time; the next ones may overwrite them.
RecordSource = Callable[[int], Iterator[tuple[np.ndarray, np.ndarray]]]


@dataclass(frozen=True, eq=False)
class Eviction:
    """Records that are being written to a run, and the chunks that still hold them."""

    shard: int
    run: Run
    pointers: Callable[[], np.ndarray]
    chunks: list[tuple[int, int, int]]  # that are not freed yet
    workspace: Workspace | None  # all other memory


class Evictor:
    """Writes records of the memtable to runs. `new_id` numbers files."""

    def __init__(self, memtable: MemTable, levels: RunLevels, kernels: StoreKernels, compactor: Compactor,
                 new_id: Callable[[], int]) -> None:
        self._memtable, self._levels, self._kernels, self._compactor = memtable, levels, kernels, compactor
        self._new_id = new_id
        self.threads = ThreadPoolExecutor(MAX_EVICTIONS, "scalein-spill")  # they mostly wait for the disk
        self.evictions: list[Eviction] = []  # in flight, oldest first
        self.workspaces: list[Workspace] = []  # unused

    @property
    def memory_bytes(self) -> int:
        """Memory of evictions besides their chunks, and of unused workspaces. Any thread may read it."""
        in_flight = [eviction.workspace for eviction in list(self.evictions) if eviction.workspace is not None]
        return sum(workspace.size_bytes for workspace in (*in_flight, *list(self.workspaces)))

    def evict(self, shard: int, retained_share: float, drop: int, functions: Functions) -> None:
        """Evict the least accessed records of a shard, all but a share; those with a flag of `drop` are discarded. The
        chunks stay unchanged until the records are written.
        """
        # Accesses are sampled, so an eviction of all records does not depend on them.
        least_accesses = MAX_ACCESSES + 1
        if retained_share:
            least_accesses = eviction_threshold(self._access_counts(shard_groups(shard)), retained_share)
        evict = self._evict_with_text if self._kernels.text_cells else self._evict_plain
        evict(shard, least_accesses, drop, functions)

    def _access_counts(self, groups: range) -> np.ndarray:
        """The numbers of accesses of records: of as many groups as a sample needs."""
        found: list[np.ndarray] = []
        for group in groups:
            found.append(self._memtable.heads(group))
            if sum(map(len, found)) >= ACCESS_SAMPLE:
                break
        return (np.concatenate(found) >> np.uint64(ACCESSES_SHIFT) & np.uint64(MAX_ACCESSES)).astype(np.int64)

    def finish(self, max_in_flight: int) -> None:
        """Wait until at most so many evictions are in flight. The records of a failed one go back to memory: raises."""
        while len(self.evictions) > max_in_flight or (self.evictions and self.evictions[0].run.written.done()):
            eviction = self.evictions.pop(0)
            error = eviction.run.written.exception()
            if error is not None:
                self._memtable.is_inconsistent = True
                self._compactor.replace(eviction.shard, (eviction.run,), [])
                self._memtable.batch += 1
                self._kernels.merge_records(self._memtable, eviction.pointers(), eviction.run.functions, older=True)
                self._memtable.is_inconsistent = False
            self._memtable.free(eviction.chunks)
            self.workspaces += [eviction.workspace] if eviction.workspace is not None else []
            if error is not None:
                raise error
            self._compactor.schedule(eviction.shard)

    def _evict_plain(self, shard: int, least_accesses: int, drop: int, functions: Functions) -> None:
        workspace = self.workspaces.pop() if self.workspaces else Workspace()
        workspace.reset()
        evicted = self._memtable.evict(shard_groups(shard), least_accesses, drop, workspace.word_buffer)
        if not evicted.count:
            self._memtable.is_inconsistent = False
            self._memtable.free(evicted.chunks)
            self.workspaces.append(workspace)
            return

        def records(step: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
            hashes, pointers = evicted.in_order()
            buffer = workspace.word_buffer(min(step, len(hashes)) * self._kernels.record_bytes // 8)
            for start in range(0, len(hashes), step):
                part = slice(start, start + step)
                yield self._kernels.gather(pointers[part], lambda count: buffer[:count]), hashes[part]

        run = self._start_write(shard, evicted.count, functions, records, evicted.chunks)
        self._register(Eviction(shard, run, lambda: evicted.in_order().pointers, evicted.chunks, workspace))
        self._memtable.is_inconsistent = False

    def _evict_with_text(self, shard: int, least_accesses: int, drop: int, functions: Functions) -> None:
        memtable, groups = self._memtable, shard_groups(shard)
        pointers = np.concatenate([memtable.pointers(group) for group in groups])
        heads = np.concatenate([memtable.heads(group) for group in groups])
        is_evicted = (heads >> np.uint64(ACCESSES_SHIFT) & np.uint64(MAX_ACCESSES)) < np.uint64(least_accesses)
        retained = np.ascontiguousarray(pointers[~is_evicted])
        pointers = np.ascontiguousarray(pointers[is_evicted & ((heads & np.uint64(drop)) == 0)])
        memtable.is_inconsistent = True
        chunks = [chunk for group in groups for chunk in memtable.release(group)]

        def records(step: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
            hashes = self._kernels.hash_keys(pointers)
            order = np.argsort(hashes)
            for start in range(0, len(order), step):
                part = order[start : start + step]
                yield self._kernels.gather(np.ascontiguousarray(pointers[part])), hashes[part]

        if len(pointers):
            # The retained records are still in the same chunks: the thread must not free these.
            run = self._start_write(shard, len(pointers), functions, records, [])
            self._register(Eviction(shard, run, lambda: pointers, chunks, None))
        self._kernels.merge_records(memtable, retained, functions, older=False)
        memtable.is_inconsistent = False
        if not len(pointers):
            memtable.free(chunks)

    def _start_write(self, shard: int, count: int, functions: Functions, records: RecordSource,
                     chunks: list[tuple[int, int, int]]) -> Run:
        """Let a thread write records to a run, and then free chunks."""
        id, has_filter = self._new_id(), bool(self._levels.runs[shard])
        written = self.threads.submit(self._write_run, id, count, functions, has_filter, records, chunks)
        return Run(id, count, functions, written)

    def _register(self, eviction: Eviction) -> None:
        self.evictions.append(eviction)
        self._compactor.replace(eviction.shard, (), [eviction.run])

    def _write_run(self, id: int, count: int, functions: Functions, has_filter: bool, records: RecordSource,
                   chunks: list[tuple[int, int, int]]) -> RunFile:
        writer = self._levels.writer(id, functions, count, count * self._kernels.record_bytes, has_filter)
        try:
            for part, hashes in records(writer.records_per_write):
                writer.add(part, hashes)
            writer.finish()
        except BaseException:
            writer.abandon()
            raise
        file = self._levels.open_file(id)
        self._memtable.free(chunks)  # last: if the write fails, the records go back to memory
        return file

    def close(self) -> None:
        self.threads.shutdown(wait=True)


def eviction_threshold(accesses: np.ndarray, share: float) -> int:
    """The number of accesses from which on a record is retained in memory: at least 2, and at most a share of all
    records has as many."""
    counts = np.bincount(accesses, minlength=MAX_ACCESSES + 1)
    at_least = np.append(np.cumsum(counts[::-1])[::-1], 0)  # records with at least so many accesses
    return max(2, int(np.argmax(at_least <= share * len(accesses))))
