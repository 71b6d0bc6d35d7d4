"""Tiers: where a key's truth is. Records in memory, pieces that a reopened store has not read yet, runs on disk.

Invariant: what a key's value is follows from, oldest first: its bundle's runs, the pieces, the record in memory. A
record that does not know all that is older is PARTIAL; new records of a group are, while anything older lies outside
of memory (`NEW_FLAGS`). All partials in memory and in pieces were made by the same functions.

Threads: everything is called under the store's lock, but what `spilling.py` and `compacting.py` do in the background.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from scalein.errors import Damaged, NewerFormat, ScaleinError, StoreFailed
from scalein.layout import GROUPS, HITS_SHIFT, MOST_HITS, PARTIAL, TOMB
from scalein.memory import address
from scalein.state import format
from scalein.state.arena import Arena
from scalein.state.budget import MOST_BYTES, Budget
from scalein.state.compaction import Compactor
from scalein.state.evict import LEAVING_AT_ONCE, Spiller
from scalein.state.memtable import HotTable
from scalein.state.point_reads import Points
from scalein.state.restored import Past
from scalein.state.run_levels import (
    BUNDLE_GROUPS,
    BUNDLES,
    Cold,
    ColdRun,
    Scratch,
    groups_of,
    least_kept,
    pointers_to,
)
from scalein.storage.aio import BlockReader
from scalein.storage.filesystem import FileSystem

if TYPE_CHECKING:
    from scalein.kernels.store import Functions, StoreKernels

DEAD_SHARE = 0.3  # of a group's bytes, from which on it is written anew
KEPT_SHARE = 0.25  # of a bundle's records, those hit most, that stay in memory when it is evicted
HITS_LOOKED_AT = 1 << 12  # records of a bundle, to choose those that stay
COMING_SHARE = 4  # one of so many bytes of hot memory, at most, is kept free for rows to come
SPARE_SHARE = 16  # one of so many bytes may be free and not given back to the system,
BROKEN_SHARE = 4  # or one of so many where huge pages would be broken up


class Tiers:
    """The records of a store, wherever they are. `new_id` numbers files, `clean` removes those that nobody needs."""

    def __init__(self, fs: FileSystem, kernels: StoreKernels, budget: Budget, new_id: Callable[[], int],
                 clean: Callable[[], None]) -> None:
        self._kernels, self._budget, self._clean = kernels, budget, clean
        self.hot = HotTable(kernels, Arena(budget.segment_bytes, whole=budget.most_chunk), budget.most_chunk,
                            budget.load_sixteenths)
        self.cold = Cold(fs, kernels, budget.scratch_records(kernels.record_bytes), budget.write_bytes)
        self.functions: Functions = ()  # of the partials
        self._clock = 0  # the bundle that is evicted next
        self._in_use = 0  # bytes of hot records when room was made last
        self._scratch: Scratch | None = None
        self._reader = BlockReader(budget.read_buffer_bytes)
        self._points = Points(kernels, self._reader)
        self._closer = ThreadPoolExecutor(1, "scalein-close")
        self.past = Past(fs, kernels, self.hot, self._reader, self._closer)
        self.compactor = Compactor(self.cold, kernels, new_id, clean)
        self.spiller = Spiller(self.hot, self.cold, kernels, self.compactor, new_id)
        self._untold: ScaleinError | None = None  # why records could not leave, if who caused it was not told
        self._stuck: set[int] = set()  # bundles that cannot leave: what is older than their records cannot be read
        self._nothing = np.frombuffer(bytearray(kernels.template), np.uint8)  # the record of a key that is not there
        self._nothing[0] |= TOMB
        self._found = np.zeros((0, kernels.record_bytes), np.uint8)  # what the pointers given last lead to

    def flag_groups(self) -> None:
        """Say of each group whether its new records are partial."""
        waiting = self.past.waiting()
        for group in range(GROUPS):
            is_partial = group in waiting or bool(self.cold.runs[group // BUNDLE_GROUPS])
            self.hot.set_flags(group, PARTIAL if is_partial else 0)

    def files(self, runs: list[tuple[ColdRun, ...]]) -> set[str]:
        """The files that records are in, apart from images of what is in memory."""
        return {format.run_name(run.id) for some in runs for run in some} | self.past.files()

    # --- rows

    def use_functions(self, functions: Functions) -> None:
        """Partials in memory are all made by the same functions: those of others leave it before."""
        if functions != self.functions:
            if self.past.pieces or any(self.cold.runs):
                self.load_all()
                for bundle in range(BUNDLES):
                    self._evict(bundle, 0.0)
                self.settle()
                self.spiller.rooms.clear()  # as large as bundles are, and not needed soon
            self.functions = functions

    def find(self, batch: pa.RecordBatch) -> np.ndarray:
        """Pointers to whole records of the batch's keys; to a deleted one where there is none.

        A disk that takes nothing any more still gives what it has, and memory is over the budget then.
        """
        self._tried(lambda: self.settle(waits=False))
        if self.past.pieces:
            self._tried(self.make_room)
        if self._budget.total is not None:
            # Before the filters come: afterwards nothing that was found may leave.
            self._tried(lambda: self.make_room(index_bytes=self.cold.whole_index_bytes))
        self._settle_all()  # without a budget as well: several may have failed to leave for other functions
        if self._budget.total is not None:
            self.spiller.rooms.clear()
            self.cold.forget_rooms()
        pointers, hashes = self._kernels.lookup(self.hot, batch)
        if self.past.pieces or any(self.cold.runs):
            self._find_older(batch, pointers, hashes)
        pointers[pointers == 0] = address(self._nothing)
        return pointers

    def _find_older(self, batch: pa.RecordBatch, pointers: np.ndarray, hashes: np.ndarray) -> None:
        """Let pointers to rows' keys in memory lead to records that know all that is older, if there is any."""
        groups = (hashes >> np.uint64(56)).astype(np.int64)
        if self.past.pieces and self._load_asked(np.bincount(groups, minlength=GROUPS)):
            pointers[:] = self._kernels.lookup(self.hot, batch)[0]
        waiting = self.past.waiting()
        has_older = np.array([bool(self.cold.runs[group // BUNDLE_GROUPS]) or group in waiting
                              for group in range(GROUPS)])[groups]
        asked = np.flatnonzero(has_older & (pointers == 0))
        found = np.flatnonzero(has_older & (pointers != 0))
        if len(found):
            partial = (self._heads(pointers[found]) & np.uint64(PARTIAL)) != 0
            asked = np.sort(np.concatenate((asked, found[partial])))
        if len(asked):
            self._find_cold(batch.take(pa.array(asked)), asked, pointers, hashes)

    def _find_cold(self, batch: pa.RecordBatch, asked: np.ndarray, pointers: np.ndarray, hashes: np.ndarray) -> None:
        """Bring together what runs, pieces and memory have of rows' keys; let pointers lead there."""
        scratch = self._scratch_table()
        wanted = np.unique(hashes[asked])
        self._load_indexes(np.unique(wanted >> np.uint64(60)).tolist())
        read = self._points.find(list(self.cold.runs), wanted, scratch)
        if self.past.again is None:  # who only reads merges nothing
            self.compactor.count_reads(read, np.bincount((wanted >> np.uint64(60)).astype(int), minlength=BUNDLES))
        self.past.find(wanted, self.functions, scratch)
        partial = np.unique(pointers[asked])
        scratch.absorb(np.ascontiguousarray(partial[partial != 0]), self.functions)
        pointers[asked] = self._kernels.lookup(scratch.table, batch)[0]

    def _load_indexes(self, bundles: list[int]) -> None:
        """Read directories and filters of many runs side by side; those of a few are read when they are asked."""
        new = [cold.run for bundle in bundles for cold in self.cold.runs[bundle] if not cold.run.is_loaded]
        if len(new) > LEAVING_AT_ONCE:
            loads = [self.spiller.threads.submit(run.load) for run in new]
            wait(loads)  # for all, also if one fails: who leaves the lock may close them
            for load in loads:
                load.result()

    def make_whole(self, batch: pa.RecordBatch) -> None:
        """Let the records of the batch's keys in memory know all that is older: sums that go on are the keys' own."""
        whole = self.find(batch)
        pointers, _ = self._kernels.lookup(self.hot, batch)
        others = np.unique(whole[(whole != pointers) & (whole != np.uint64(address(self._nothing)))])
        if len(others):
            arena = self._scratch_table(clear=False).table.arena
            words = arena.memory.view(np.uint64)
            words[(others - np.uint64(arena.base)) >> np.uint64(3)] &= ~np.uint64(PARTIAL)
            self.hot.batch += 1
            self._kernels.merge_records(self.hot, others, self.functions, older=False)

    @property
    def parts(self) -> list[range]:
        """Groups that are looked through together: bundles, or less if pieces must not all be in memory at once."""
        is_small = self.past.again is not None and self._budget.total is not None
        return [range(group, group + 1) for group in range(GROUPS)] if is_small else [*map(groups_of, range(BUNDLES))]

    def alive(self, groups: range) -> Iterator[np.ndarray]:
        """Pointers to all records of one of the `parts` that were not deleted; the next step may overwrite them."""
        self._load_within(groups, make_room=True)
        self._settle_all()
        runs = self.cold.runs[groups.start // BUNDLE_GROUPS]
        pointers = np.concatenate([self.hot.pointers(group) for group in groups])
        if not runs:
            heads = np.concatenate([self.hot.heads(group) for group in groups])
            yield np.ascontiguousarray(pointers[(heads & np.uint64(TOMB)) == 0])
            return
        newest = (pointers, self._kernels.hash_keys(pointers), self.functions)
        for records, _ in self.cold.ranges(groups, runs, self._scratch_table, newest):
            heads = records[:, :8].copy().view(np.uint64)[:, 0]
            self._found = records
            yield np.ascontiguousarray(pointers_to(records)[(heads & np.uint64(TOMB)) == 0])

    def _heads(self, pointers: np.ndarray) -> np.ndarray:
        """The first words of records."""
        return self._kernels.gather(np.ascontiguousarray(pointers))[:, :8].copy().view(np.uint64)[:, 0]

    # --- memory

    @property
    def memory_bytes(self) -> int:
        scratch = self._scratch.memory_bytes if self._scratch else 0
        return (self.hot.memory_bytes + scratch + self._reader.memory_bytes + self.cold.memory_bytes +
                self.spiller.memory_bytes + self.past.images.memory_bytes)  # fmt: skip

    def _scratch_table(self, clear: bool = True) -> Scratch:
        if self._scratch is None:
            self._scratch = Scratch(self._kernels)
        if clear:
            self._scratch.begin()
        return self._scratch

    def make_room(self, text_bytes: int = 0, index_bytes: int = 0) -> None:
        """Let bundles leave memory, one after the other, until what comes has room: text, or an index of runs."""
        if self.hot.crowded and self.past.again is None:
            self.tidy()
        most = self._budget.hot_beside(max(index_bytes, self.cold.index_bytes))
        if self.past.again is not None:  # nothing may be written, and nothing in memory is newer than its piece
            if self.hot.in_use > most:
                self.hot.clear(range(GROUPS))
                self.past.forget()
                self.flag_groups()
            return
        # As much will come as came last: with room for it, memory that is given up is used again, and not given back
        # to the system, which would clear it anew.
        coming = min(max(0, self.hot.in_use - self._in_use), most // COMING_SHARE)
        for evicted in range(2 * BUNDLES):
            staying = self.hot.in_use_beside(one.chunks for one in self.spiller.leaving)
            if staying + max(coming, text_bytes) <= most:
                if evicted:
                    self.hot.trim(most + most // SPARE_SHARE, most + most // BROKEN_SHARE)
                break
            bundle, self._clock = self._clock, (self._clock + 1) % BUNDLES  # first: one that fails is not in the way
            if bundle not in self._stuck:
                self._evict(bundle, KEPT_SHARE)
        self._in_use = self.hot.in_use

    def tidy(self) -> None:
        """Write groups anew that deleted records and replaced texts fill."""
        for group in sorted(self.hot.crowded):
            if self.hot.dead_share(group) < DEAD_SHARE:
                continue
            pointers = self.hot.pointers(group)
            if not self.cold.runs[group // BUNDLE_GROUPS] and not self.past.has(group):
                pointers = pointers[(self.hot.heads(group) & np.uint64(TOMB)) == 0]
            chunks = self.hot.release(group)
            self.hot.begin_small(group)
            self.hot.batch += 1
            self._kernels.merge_records(self.hot, np.ascontiguousarray(pointers), self.functions, older=False)
            self.hot.give_back(chunks)
            self.hot.settled(group)

    def _evict(self, bundle: int, share_kept: float) -> None:
        """Forget the records of a bundle that are hit least; a thread writes them to a run."""
        hot, groups = self.hot, groups_of(bundle)
        # One that is still leaving comes back if it cannot: then nothing newer of its bundle may be on disk.
        self.settle(0 if any(one.bundle == bundle for one in self.spiller.leaving) else LEAVING_AT_ONCE - 1)
        self.compactor.wait_for_room(bundle)
        try:
            self._load_within(groups, make_room=False)
        except (Damaged, NewerFormat) as error:
            self._stuck.add(bundle)
            self._untold = error.with_traceback(None)
            return
        if not any(map(hot.record_count, groups)):
            return
        drop = 0 if self.cold.runs[bundle] else TOMB  # nothing older: what was deleted needs no trace
        # Not by hits if all must leave: these are looked at in some groups only.
        least = least_kept(self._hits(groups), share_kept) if share_kept else MOST_HITS + 1
        self.spiller.leave(bundle, least, drop, self.functions)
        for group in groups:
            hot.set_flags(group, PARTIAL if self.cold.runs[bundle] else 0)

    def _hits(self, groups: range) -> np.ndarray:
        """How often records were hit: of some groups, if these are enough to tell how it is with all."""
        found: list[np.ndarray] = []
        for group in groups:
            found.append(self.hot.heads(group))
            if sum(map(len, found)) >= HITS_LOOKED_AT:
                break
        return (np.concatenate(found) >> np.uint64(HITS_SHIFT) & np.uint64(MOST_HITS)).astype(np.int64)

    def settle(self, most: int = 0, waits: bool = True) -> None:
        """Let records leave until at most so many bundles are on their way; what could not comes back.

        `waits`: for files that nobody needs to be freed as well.
        """
        for run in self.compactor.take_retired():  # nobody reads them any more: that happens under the store's lock
            if run.made.exception() is None and (most or not waits):  # to free a removed file takes 0.1 s and more
                self._closer.submit(run.run.close)
            elif run.made.exception() is None:
                run.run.close()
        self.spiller.settle(most)

    def _settle_all(self) -> None:
        """Let all records leave that are on their way, or come back."""
        while self.spiller.leaving:
            self._tried(self.settle)

    def _tried(self, step: Callable[[], None]) -> bool:
        """Whether a step that makes room could do so. If not, all is still found: records that cannot leave are back,
        of which the next rows are told (`tell`), and who asks for what is damaged is told then.
        """
        try:
            step()
        except (StoreFailed, Damaged, NewerFormat) as error:
            if self.hot.is_torn:
                raise
            if isinstance(error, StoreFailed):
                self._untold = error.with_traceback(None)
            return False
        return True

    def tell(self) -> None:
        """Raise what nobody was told yet."""
        error, self._untold = self._untold, None
        if error is not None:
            raise error

    # --- pieces of the past

    def _load(self, groups: list[int], first: int = 0) -> None:
        """Bring groups' records back to memory, under those that are newer; from this piece on."""
        for group in self.past.load(groups, self.functions, first):
            if not self.cold.runs[group // BUNDLE_GROUPS] and not self.past.has(group):
                self.hot.set_flags(group, 0)

    def join(self) -> None:
        """Load the newest pieces if there are too many, or some groups of them: the snapshot to come has fewer then.

        It must not fail for what it can do without: a group that cannot be read stays where it is.
        """
        first, groups = self.past.to_join()
        newest = self.past.pieces[first:]
        for group in groups:
            if not self._tried(self.make_room):
                return
            first = self.past.first_of(newest)  # older ones may be gone meanwhile
            self._tried(functools.partial(self._load, [group], first))

    def _load_asked(self, keys: np.ndarray) -> bool:
        """Load groups of which so many keys are asked for, where that is worth it and there is room, and those that
        nobody can look into; whether there were any."""
        room = MOST_BYTES
        if self.past.again is not None:  # who only reads can make room by forgetting, but not in the midst of a call
            room = self._budget.hot_beside(self.cold.whole_index_bytes) - self.hot.in_use
        bare, worth = self.past.worth_loading(keys, room)
        if self.past.again is not None or self._budget.total is None:
            self._load([*bare, *worth])  # at once: to make room could forget what was just loaded
        else:
            has_room = True
            for group in (*bare, *worth):
                has_room = has_room and self._tried(self.make_room)
                if has_room or group in bare:
                    self._load([group])
            self._settle_all()  # nothing that will be found may leave
        return bool(bare or worth)

    def load_all(self) -> None:
        self._load_within(range(GROUPS), make_room=True)

    def _load_within(self, some: Iterable[int], make_room: bool) -> None:
        if self.past.pieces and make_room:
            self._tried(self.make_room)
        groups = sorted(self.past.waiting() & set(some)) if self.past.pieces else []
        if not make_room or self.past.again is not None or self._budget.total is None:
            self._load(groups)  # at once: to make room could forget what was just loaded
            return
        has_room = True
        for group in groups:
            has_room = has_room and self._tried(self.make_room)
            self._load([group])

    def compact(self) -> bool:
        """Merge all runs of each bundle into one; whether there was anything to merge."""
        self.settle()
        some = self.compactor.merge_all(self._scratch_table)
        self.settle()  # closes those that were replaced
        self._clean()
        return some

    def close(self) -> None:
        """Stop compaction and close the files. Not under the lock."""
        self.spiller.close()
        self._closer.shutdown(wait=True)
        self.compactor.close()
        for runs in (*self.cold.runs, self.compactor.take_retired()):
            for run in runs:
                if run.made.exception() is None:
                    run.run.close()
        self.past.close()
        self.cold.close()
        self._reader.close()

    def verify(self) -> None:
        """Read all runs and pieces; `Damaged` names the file that is not what was written."""
        self._settle_all()
        for runs in self.cold.runs:
            for run in runs:
                run.run.verify()
        self.past.verify()
