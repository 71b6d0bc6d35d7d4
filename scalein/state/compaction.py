"""Compaction: merges the runs of a shard in the background. The lists of runs are replaced here only.

Runs are merged when there are too many (`first_to_compact`), and when reading single keys from several of them has cost
as much as merging them will: a store that is only written compacts little, and one that is read soon has one run a
shard.

Threads: `_merge` runs on its own threads, at most one per shard, with a lower priority than the threads that rows wait
for. Everything else is called under the store's lock, except `replace`, which takes only the lock of the lists.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from threading import Lock, get_native_id
from typing import TYPE_CHECKING

import numpy as np

from scalein.errors import InternalError
from scalein.state import format
from scalein.state.run_levels import SHARDS, MergeTable, Run, RunLevels

if TYPE_CHECKING:
    from scalein.kernels.store import StoreKernels

COMPACTION_WIDTH = 8  # runs of about one size that are merged at once
THREADS = 2  # one merges while the other waits for the disk
MAX_RUNS = 32  # of a shard, before its next eviction waits for compaction
BYTES_PER_READ = 16 << 10  # that can be merged in the time of one block read
NICE = 10  # of background threads


class Compactor:
    """Merges runs of `levels`. `new_id` numbers files; `remove_obsolete` removes files that are not referenced."""

    def __init__(self, levels: RunLevels, kernels: StoreKernels, new_id: Callable[[], int],
                 remove_obsolete: Callable[[], None]) -> None:
        self._levels, self._kernels, self._new_id, self._remove_obsolete = levels, kernels, new_id, remove_obsolete
        self._threads = ThreadPoolExecutor(THREADS, "scalein-compact", lower_priority)
        self._running: dict[int, tuple[int, Future[None]]] = {}  # shard -> id of the run that is written
        self._lock = Lock()  # over the lists of runs
        self._reads = np.zeros(SHARDS, np.int64)  # blocks of a shard that were read because it has several runs
        self._replaced: list[Run] = []
        self.obsolete_files: set[str] = set()  # of runs that were replaced
        self.error: BaseException | None = None

    def replace(self, shard: int, old: tuple[Run, ...], new: list[Run]) -> None:
        """Replace adjacent runs, or append to the newest if `old` is empty. Any thread may call."""
        with self._lock:
            runs = self._levels.runs[shard]
            at = runs.index(old[0]) if old else len(runs)
            if runs[at : at + len(old)] != old:
                raise InternalError("runs were replaced twice", found=f"shard {shard}")
            self._levels.runs[shard] = (*runs[:at], *new, *runs[at + len(old) :])
            self._replaced += old
            self.obsolete_files |= {format.run_name(run.id) for run in old}

    def take_replaced(self) -> list[Run]:
        """Runs that were replaced since the last call; their files are still open."""
        with self._lock:
            replaced, self._replaced = self._replaced, []
            return replaced

    def files_being_written(self) -> set[str]:
        return {format.run_name(id) for id, _ in list(self._running.values())}

    # --- in the background

    def schedule(self, shard: int, all_runs: bool = False) -> None:
        """Merge runs of a shard: all, or if there are too many."""
        if shard in self._running:  # checked before the list: a merge that ends now has replaced the runs read below
            return
        runs = tuple(run for run in self._levels.runs[shard] if run.written.done())
        first = 0 if all_runs else first_to_compact([run.record_count for run in runs])
        if len(runs) - first < 2:
            return
        if len({run.functions for run in runs[first:]}) > 1:
            first = 0
        id = self._new_id()
        with self._lock:  # the merge needs it to end, so it is registered before it ends
            merge = self._threads.submit(self._merge, shard, runs[first:], first == 0, id)
            self._running[shard] = id, merge

    def count_block_reads(self, read: np.ndarray, keys: np.ndarray) -> None:
        """Note how many blocks of each shard were read for how many keys; merge where that has cost enough."""
        self._reads += np.maximum(0, read - keys)
        for shard in np.flatnonzero(self._reads).tolist():
            size = sum(run.file.size_bytes for run in self._levels.runs[shard])
            if self._reads[shard] * BYTES_PER_READ > size:
                self.schedule(shard, all_runs=True)
                self._reads[shard] = 0

    def _merge(self, shard: int, runs: tuple[Run, ...], is_bottom: bool, id: int) -> None:
        try:
            merged = self._levels.compact(shard, runs, id, cache(lambda: MergeTable(self._kernels)), is_bottom)
            self.replace(shard, runs, [merged] if merged else [])
            self._remove_obsolete()
        except BaseException as error:
            self.error = error.with_traceback(None)  # a traceback would keep buffers alive
        finally:
            with self._lock:
                del self._running[shard]

    def wait(self) -> None:
        for _, merge in list(self._running.values()):
            merge.result()

    def wait_for_backlog(self, shard: int) -> None:
        """Wait for the compaction of a shard that has too many runs."""
        if len(self._levels.runs[shard]) >= MAX_RUNS and (running := self._running.get(shard)) is not None:
            running[1].result()

    # --- on the caller's thread

    def compact_all(self, merge_table: Callable[[], MergeTable]) -> bool:
        """Merge all runs of each shard into one; whether there was anything to merge."""
        self.wait()
        has_merged = False
        for shard, runs in enumerate(self._levels.runs):
            if len(runs) > 1:
                merged = self._levels.compact(shard, runs, self._new_id(), merge_table, is_bottom=True)
                self.replace(shard, runs, [merged] if merged else [])
                has_merged = True
        return has_merged

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)


def lower_priority() -> None:
    """Let threads that rows wait for run first on a busy core, where the system allows a process to say so."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, get_native_id(), NICE)


def first_to_compact(sizes: list[int]) -> int:
    """The first of the runs, oldest first, to merge with all newer ones; the number of runs if there is none.

    The oldest is merged when the newer ones together are as large, so all runs take at most twice the space of one;
    newer ones when there are `COMPACTION_WIDTH` of about one size. So a record is written about
    log8(state / budget) + 2 times, and a shard has a few times as many runs.
    """
    for first in range(len(sizes)):
        count, newer = len(sizes) - first, sum(sizes[first + 1 :])
        if first == 0 and count >= 3 and newer >= sizes[0]:
            return 0
        if count >= COMPACTION_WIDTH and 2 * newer >= (count - 1) * sizes[first]:
            return first
    return len(sizes)
