"""Spilling: records of a bundle leave memory for a run, which threads write; those that cannot come back.

Invariant: what leaves is found. Its run is in the list of its bundle as soon as memory has forgotten it, and who looks
there waits until it is written. Of a bundle, one part leaves at a time: so what comes back is older than all in memory,
and newer than all runs.

Threads: `_write_run` runs on threads of its own; all else is called under the store's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from scalein.layout import HITS_SHIFT, MOST_HITS
from scalein.state.compaction import Compactor
from scalein.state.memtable import HotTable
from scalein.state.run_file import Run
from scalein.state.run_levels import Cold, ColdRun, groups_of
from scalein.state.workspace import Room

if TYPE_CHECKING:
    from scalein.kernels.store import Functions, StoreKernels

LEAVING_AT_ONCE = 3  # bundles on their way to disk

# Gives records sorted, with their hashes, so many at a time; the next ones may overwrite them.
InOrder = Callable[[int], Iterator[tuple[np.ndarray, np.ndarray]]]


@dataclass(frozen=True, eq=False)
class Leaving:
    """Records on their way to a run, where they are, and the chunks that they are still in."""

    bundle: int
    run: ColdRun
    pointers: Callable[[], np.ndarray]
    chunks: list[tuple[int, int, int]]  # that were not given back yet
    room: Room | None  # the memory of all that is not in chunks


class Spiller:
    """Writes records of `hot` to runs of `cold`. `new_id` numbers files."""

    def __init__(self, hot: HotTable, cold: Cold, kernels: StoreKernels, compactor: Compactor,
                 new_id: Callable[[], int]) -> None:  # fmt: skip
        self._hot, self._cold, self._kernels, self._compactor, self._new_id = hot, cold, kernels, compactor, new_id
        self.threads = ThreadPoolExecutor(LEAVING_AT_ONCE, "scalein-spill")  # they wait for the disk most of the time
        self.leaving: list[Leaving] = []
        self.rooms: list[Room] = []  # of those that have left

    @property
    def memory_bytes(self) -> int:
        """What those who leave take beside their chunks, and what waits for the next. Any thread may ask."""
        under_way = [one.room for one in list(self.leaving) if one.room is not None]
        return sum(room.size_bytes for room in (*under_way, *list(self.rooms)))

    def leave(self, bundle: int, least: int, drop: int, functions: Functions) -> None:
        """Let a bundle's records with fewer hits than `least` leave; those with a flag of `drop` just go."""
        (self._leave_with_text if self._kernels.text_cells else self._leave_plain)(bundle, least, drop, functions)

    def settle(self, most: int) -> None:
        """Wait until at most so many bundles are on their way; the first that cannot leave comes back: raises why."""
        while len(self.leaving) > most or (self.leaving and self.leaving[0].run.made.done()):
            one = self.leaving.pop(0)
            error = one.run.made.exception()
            if error is not None:
                self._hot.is_torn = True
                self._compactor.replace(one.bundle, (one.run,), [])
                self._hot.batch += 1
                self._kernels.merge_records(self._hot, one.pointers(), one.run.functions, older=True)
                self._hot.is_torn = False
            self._hot.give_back(one.chunks)
            self.rooms += [one.room] if one.room is not None else []
            if error is not None:
                raise error
            self._compactor.soon(one.bundle)

    def _leave_plain(self, bundle: int, least: int, drop: int, functions: Functions) -> None:
        """Those with fewer hits than `least`; their chunks stay as they are until they are written."""
        room = self.rooms.pop() if self.rooms else Room()
        room.begin()
        left = self._hot.thin(groups_of(bundle), least, drop, room.words)
        if not left.count:
            self._hot.is_torn = False
            self._hot.give_back(left.chunks)
            self.rooms.append(room)
            return

        def in_order(step: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
            hashes, pointers = left.in_order()
            words = room.words(min(step, len(hashes)) * self._kernels.record_bytes // 8)
            for start in range(0, len(hashes), step):
                some = slice(start, start + step)
                yield self._kernels.gather(pointers[some], lambda count: words[:count]), hashes[some]

        run = self._to_run(bundle, left.count, functions, in_order, left.chunks)
        self._leave(Leaving(bundle, run, lambda: left.in_order().pointers, left.chunks, room))
        self._hot.is_torn = False

    def _leave_with_text(self, bundle: int, least: int, drop: int, functions: Functions) -> None:
        """Those with fewer hits than `least`; their chunks stay as they are until they are written."""
        hot, groups = self._hot, groups_of(bundle)
        pointers = np.concatenate([hot.pointers(group) for group in groups])
        heads = np.concatenate([hot.heads(group) for group in groups])
        goes = (heads >> np.uint64(HITS_SHIFT) & np.uint64(MOST_HITS)) < np.uint64(least)
        staying = np.ascontiguousarray(pointers[~goes])
        pointers = np.ascontiguousarray(pointers[goes & ((heads & np.uint64(drop)) == 0)])
        hot.is_torn = True
        chunks = [chunk for group in groups for chunk in hot.release(group)]
        if len(pointers):
            # Those who stay are still in the same chunks: the thread must not give these back.
            run = self._to_run(bundle, len(pointers), functions,
                               lambda _: iter([self._cold.sorted_records(pointers)]), [])
            self._leave(Leaving(bundle, run, lambda: pointers, chunks, None))
        self._kernels.merge_records(hot, staying, functions, older=False)
        hot.is_torn = False
        if not len(pointers):
            hot.give_back(chunks)

    def _to_run(self, bundle: int, count: int, functions: Functions, in_order: InOrder,
                chunks: list[tuple[int, int, int]]) -> ColdRun:
        """Let a thread write records to a run, and give back chunks."""
        id, has_filter = self._new_id(), bool(self._cold.runs[bundle])
        made = self.threads.submit(self._write_run, id, count, functions, has_filter, in_order, chunks)
        return ColdRun(id, count, functions, made)

    def _leave(self, one: Leaving) -> None:
        self.leaving.append(one)
        self._compactor.replace(one.bundle, (), [one.run])

    def _write_run(self, id: int, count: int, functions: Functions, has_filter: bool,
                   in_order: InOrder, chunks: list[tuple[int, int, int]]) -> Run:
        writer = self._cold.writer(id, functions, count, count * self._kernels.record_bytes, has_filter)
        try:
            for records, hashes in in_order(writer.records_at_once):
                writer.add(records, hashes)
            writer.finish()
        except BaseException:
            writer.abandon()
            raise
        run = self._cold.reader(id)
        self._hot.give_back(chunks)  # not before: what does not come to disk comes back to memory
        return run

    def close(self) -> None:
        self.threads.shutdown(wait=True)
