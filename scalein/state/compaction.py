"""Compaction: runs of a bundle become one, in the background; and the lists of runs, which are replaced only here.

Runs are merged when they are too many (`to_merge`), and when looking into several of them for single keys has cost as
much as merging them will: so who writes and never reads merges little, and who reads soon has one run a bundle.

Threads: `_merge` runs on threads of its own, one a bundle at most, that step back behind those that rows wait for. All
else is called under the store's lock, but for `replace`, which has a lock over the lists and takes no other.
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
from scalein.state.run_levels import BUNDLES, Cold, ColdRun, Scratch, to_merge

if TYPE_CHECKING:
    from scalein.kernels.store import StoreKernels

AT_ONCE = 2  # bundles: one merges while the other waits for the disk
MOST_RUNS = 32  # of a bundle, before its next records wait for compaction
READ_WORTH = 16 << 10  # bytes that can be merged in the time of one read
NICE = 10  # of the threads, to the scheduler


class Compactor:
    """Merges runs of `cold`. `new_id` numbers files, `clean` removes those that nobody needs."""

    def __init__(self, cold: Cold, kernels: StoreKernels, new_id: Callable[[], int], clean: Callable[[], None]) -> None:
        self._cold, self._kernels, self._new_id, self._clean = cold, kernels, new_id, clean
        self._threads = ThreadPoolExecutor(AT_ONCE, "scalein-compact", step_back)
        self._under_way: dict[int, tuple[int, Future[None]]] = {}  # bundle -> id of the run that is written
        self._lock = Lock()  # over the lists of runs, which are replaced as a whole
        self._reads = np.zeros(BUNDLES, np.int64)  # blocks of a bundle that were read because it has several runs
        self._retired: list[ColdRun] = []
        self.dropped: set[str] = set()  # files of runs that others replaced
        self.error: BaseException | None = None

    def replace(self, bundle: int, old: tuple[ColdRun, ...], new: list[ColdRun]) -> None:
        """Runs that follow one another by others, or others behind all. Any thread may do so."""
        with self._lock:
            now = self._cold.runs[bundle]
            at = now.index(old[0]) if old else len(now)
            if now[at : at + len(old)] != old:
                raise InternalError("runs that others have replaced were replaced again", found=f"bundle {bundle}")
            self._cold.runs[bundle] = (*now[:at], *new, *now[at + len(old) :])
            self._retired += old
            self.dropped |= {format.run_name(run.id) for run in old}

    def take_retired(self) -> list[ColdRun]:
        """Runs that were replaced since the last time, and are still open."""
        with self._lock:
            retired, self._retired = self._retired, []
            return retired

    def being_written(self) -> set[str]:
        return {format.run_name(id) for id, _ in list(self._under_way.values())}

    # --- in the background

    def soon(self, bundle: int, whole: bool = False) -> None:
        """Merge runs of a bundle, all or if there are too many."""
        if bundle in self._under_way:  # asked first: a job that ends now has replaced the runs that are looked at next
            return
        runs = tuple(run for run in self._cold.runs[bundle] if run.made.done())
        first = 0 if whole else to_merge([run.record_count for run in runs])
        if len(runs) - first < 2:
            return
        if len({run.functions for run in runs[first:]}) > 1:
            first = 0
        id = self._new_id()
        with self._lock:  # which the job needs to end
            job = self._threads.submit(self._merge, bundle, runs[first:], first == 0, id)
            self._under_way[bundle] = id, job

    def count_reads(self, read: np.ndarray, asked: np.ndarray) -> None:
        """So many blocks of each bundle were read for so many keys."""
        self._reads += np.maximum(0, read - asked)
        for bundle in np.flatnonzero(self._reads).tolist():
            size = sum(cold.run.size_bytes for cold in self._cold.runs[bundle])
            if self._reads[bundle] * READ_WORTH > size:
                self.soon(bundle, whole=True)
                self._reads[bundle] = 0

    def _merge(self, bundle: int, runs: tuple[ColdRun, ...], is_bottom: bool, id: int) -> None:
        try:
            merged = self._cold.merged(bundle, runs, id, cache(lambda: Scratch(self._kernels)), is_bottom)
            self.replace(bundle, runs, [merged] if merged else [])
            self._clean()
        except BaseException as error:
            self.error = error.with_traceback(None)  # which would keep buffers alive
        finally:
            with self._lock:
                del self._under_way[bundle]

    def wait(self) -> None:
        for _, job in list(self._under_way.values()):
            job.result()

    def wait_for_room(self, bundle: int) -> None:
        """Let a bundle that has too many runs get fewer."""
        if len(self._cold.runs[bundle]) >= MOST_RUNS and (found := self._under_way.get(bundle)) is not None:
            found[1].result()

    # --- at once

    def merge_all(self, scratch_table: Callable[[], Scratch]) -> bool:
        """Merge all runs of each bundle into one; whether there was anything to merge."""
        self.wait()
        some = False
        for bundle, runs in enumerate(self._cold.runs):
            if len(runs) > 1:
                merged = self._cold.merged(bundle, runs, self._new_id(), scratch_table, is_bottom=True)
                self.replace(bundle, runs, [merged] if merged else [])
                some = True
        return some

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)


def step_back() -> None:
    """Let threads that rows wait for go first on a busy core; where that is not for us to say, all are alike."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, get_native_id(), NICE)
