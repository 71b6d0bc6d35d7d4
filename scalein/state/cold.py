"""The cold tier: runs of records that left memory, by bundles of key groups, and everything that reads several of them.

A bundle is a sixteenth of the hashes. Its runs lie from the oldest to the newest; a record of a newer run hides or
continues (`PARTIAL`) those of older ones. Whoever needs the truth about some keys brings their records together, oldest
first: a read in a scratch table; a scan and compaction by folding sorted runs, range by range of hashes (in a scratch
table as well where records have texts, or were made by different functions).

Invariant: the list of a bundle's runs is replaced, never changed, so a reader keeps what it began with; files stay
readable after they were removed.

Threads: readers and one compactor; whoever replaces a list holds the lock of `Tiers` over them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from scalein.layout import GROUPS, HITS_SHIFT, MOST_HITS, PARTIAL, TOMB
from scalein.memory import address
from scalein.state.arena import Arena
from scalein.state.files import Files
from scalein.state.hot import HotTable
from scalein.state.kernels import Functions, Kernels
from scalein.state.runs import Run, RunWriter

BUNDLES = 16
BUNDLE_GROUPS = GROUPS // BUNDLES
SCRATCH_SEGMENT = 1 << 22  # bytes; no row may have longer texts


@dataclass(frozen=True, eq=False)
class ColdRun:
    """A run, perhaps still being written, and what the rows behind its partials did to each value."""

    id: int
    record_count: int
    functions: Functions
    made: Future[Run]
    groups: frozenset[int] | None = None  # key groups whose records count; None: all

    def only(self, groups: frozenset[int]) -> ColdRun:
        bundle = self.run.least_hash >> 60
        mine = (frozenset(groups_of(bundle)) if self.groups is None else self.groups) & groups
        return replace(self, groups=mine)

    def counting(self, hashes: np.ndarray) -> np.ndarray:
        """Which records count, by their hashes."""
        if self.groups is None:
            return np.ones(len(hashes), bool)
        return np.isin(hashes >> np.uint64(56), np.array(sorted(self.groups), np.uint64))

    @property
    def run(self) -> Run:
        """Waits until it is written."""
        return self.made.result()


def groups_of(bundle: int) -> range:
    return range(bundle * BUNDLE_GROUPS, (bundle + 1) * BUNDLE_GROUPS)


def bundle_range(bundle: int) -> tuple[int, int]:
    """The least and the greatest hash of a bundle."""
    return bundle << 60, (bundle + 1 << 60) - 1


def pointers_to(records: np.ndarray) -> np.ndarray:
    """Addresses of records that lie one behind the other."""
    start, size = address(records), records.shape[1]
    return np.arange(start, start + len(records) * size, size, dtype=np.uint64)


class Together(NamedTuple):
    """Records of several ages, each key once, in the order of their hashes."""

    records: np.ndarray
    hashes: np.ndarray


# Pointers, their hashes, what rows did to the values, and what keeps the records alive.
Aged = tuple[np.ndarray, np.ndarray, Functions, object]


class Scratch:
    """A table in which records of several ages are brought together."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.table = HotTable(kernels, Arena(SCRATCH_SEGMENT, 1 << 34), most_chunk=1 << 16)
        self._groups = range(GROUPS)

    def absorb(self, pointers: np.ndarray, functions: Functions) -> None:
        """Records newer than all before."""
        self._kernels.absorb(self.table, pointers, functions, older=False)

    def begin(self, least: int = 0, greatest: int = (1 << 64) - 1, records: int = 0) -> None:
        """Forget everything; so many records of a range of hashes will come."""
        self.table.clear(self._groups)
        self._groups = range(least >> 56, (greatest >> 56) + 1)
        if records:
            for group in self._groups:  # hashes are evenly spread
                inside = min(greatest, (group + 1 << 56) - 1) - max(least, group << 56) + 1
                self.table.expect(group, records * inside // (greatest - least + 1))

    def pointers(self) -> np.ndarray:
        return np.concatenate([self.table.pointers(group) for group in self._groups])

    @property
    def memory_bytes(self) -> int:
        return self.table.arena.touched + self.table.buckets.touched


class Cold:
    """Opens, writes and reads runs; brings about `at_once` records together at a time."""

    def __init__(self, files: Files, kernels: Kernels, at_once: int) -> None:
        self._files, self._kernels, self._at_once = files, kernels, at_once
        self.runs: list[tuple[ColdRun, ...]] = [() for _ in range(BUNDLES)]

    def open(self, id: int, groups: frozenset[int] | None = None) -> ColdRun:
        run = self.reader(id)
        made: Future[Run] = Future()
        made.set_result(run)
        return ColdRun(id, int(run.record_count), tuple(json.loads(run.spec)), made, groups)

    def reader(self, id: int) -> Run:
        return Run(self._files, id, self._kernels.record_bytes, self._kernels.text_cells, self._kernels.checksums)

    def writer(self, id: int, functions: Functions, expected_bytes: int, has_filter: bool) -> RunWriter:
        """A new run. A filter is for those that most keys are not in: the oldest has nearly all."""
        return RunWriter(self._files, id, self._kernels.record_bytes, json.dumps(functions), self._kernels.text_cells,
                         expected_bytes, self._kernels.checksums, has_filter)

    def sorted_records(self, pointers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Records as a run wants them: copies in the order of their hashes, and these."""
        hashes = self._kernels.hashes(pointers)
        order = np.argsort(hashes)
        return self._kernels.gather(np.ascontiguousarray(pointers[order])), hashes[order]

    def find(self, bundle: int, hashes: np.ndarray, scratch: Scratch) -> None:
        """Bring everything that a bundle's runs have of some sorted hashes together."""
        for cold in self.runs[bundle]:
            likely = hashes[cold.run.may_have(hashes)]
            if not len(likely):
                continue
            found = cold.run.read_blocks(cold.run.blocks_for(likely))
            cold.run.forget()
            mine = pointers_to(found.records)
            place = np.searchsorted(hashes, theirs := self._kernels.hashes(mine))
            wanted = (hashes[np.minimum(place, len(hashes) - 1)] == theirs) & cold.counting(theirs)
            scratch.absorb(np.ascontiguousarray(mine[wanted]), cold.functions)

    def ranges(self, bundle: int, runs: tuple[ColdRun, ...], scratch: Scratch,
               newest: tuple[np.ndarray, np.ndarray, Functions] | None = None) -> Iterator[Together]:
        """Everything in some runs, and in records newer than these, brought together range by range of hashes.

        Texts lie in scratch, which the next range overwrites. `newest`: pointers, their hashes, functions.
        """
        count = sum(cold.record_count for cold in runs) + (0 if newest is None else len(newest[0]))
        parts = -(-count // self._at_once) or 1
        functions = {cold.functions for cold in runs} | ({newest[2]} if newest is not None else set())
        can_fold = len(functions) == 1 and not self._kernels.text_cells
        for least, greatest in _cut(bundle, parts):
            given = list(self._within(least, greatest, runs, newest))
            if can_fold and given:
                yield Together(*self._folded(given))
                continue
            scratch.begin(least, greatest, count // parts)
            for pointers, _, how, _ in given:
                scratch.absorb(pointers, how)
            yield Together(*self.sorted_records(scratch.pointers()))

    def _within(self, least: int, greatest: int, runs: tuple[ColdRun, ...],
                newest: tuple[np.ndarray, np.ndarray, Functions] | None) -> Iterator[Aged]:
        """What runs, and newer records, have of a range of hashes; oldest first."""
        for cold in runs:
            first, last = cold.run.blocks_between(least, greatest)
            if first < last:
                found = cold.run.read_range(first, last)
                pointers = pointers_to(found.records)
                hashes = self._kernels.hashes(pointers)
                inside = (hashes >= np.uint64(least)) & (hashes <= np.uint64(greatest)) & cold.counting(hashes)
                yield np.ascontiguousarray(pointers[inside]), hashes[inside], cold.functions, found
        if newest is not None:
            pointers, hashes, functions = newest
            inside = (hashes >= np.uint64(least)) & (hashes <= np.uint64(greatest))
            yield np.ascontiguousarray(pointers[inside]), hashes[inside], functions, None

    def _folded(self, given: list[Aged]) -> tuple[np.ndarray, np.ndarray]:
        """Records of several ages, each key once, in the order of their hashes. Sorted runs are merged, not sorted."""
        hashes = np.concatenate([some for _, some, _, _ in given])
        order = np.argsort(hashes, kind="stable")  # which keeps the ages in order
        pointers = np.concatenate([some for some, _, _, _ in given])[order]
        return self._kernels.fold(pointers, hashes[order], given[0][2])

    def merged(self, bundle: int, runs: tuple[ColdRun, ...], id: int, scratch: Scratch,
               is_bottom: bool) -> ColdRun | None:
        """One run in the place of several; at the bottom, nothing older is left to hide or to continue."""
        functions = runs[-1].functions
        writer = self.writer(id, functions, sum(cold.run.size_bytes for cold in runs), has_filter=not is_bottom)
        count = 0
        try:
            for records, hashes in self.ranges(bundle, runs, scratch):
                if is_bottom:
                    heads = records[:, :8].view(np.uint64)
                    alive = (heads[:, 0] & np.uint64(TOMB)) == 0
                    heads &= ~np.uint64(PARTIAL)
                    records, hashes = records[alive], hashes[alive]
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


def _cut(bundle: int, parts: int) -> list[tuple[int, int]]:
    """Ranges of a bundle's hashes with about as many records each: hashes are evenly spread."""
    least, greatest = bundle_range(bundle)
    step = (greatest - least + 1) // parts
    borders = [least + k * step for k in range(parts)] + [greatest + 1]
    return [(low, high - 1) for low, high in pairwise(borders)]


# --- decisions


def cold_enough(heads: np.ndarray, share_kept: float) -> np.ndarray:
    """Which records leave memory: those hit least, and more than `1 - share_kept` of all."""
    hits = (heads >> np.uint64(HITS_SHIFT)) & np.uint64(MOST_HITS)
    counts = np.bincount(hits.astype(np.int64), minlength=MOST_HITS + 1)
    hotter = np.cumsum(counts[::-1])[::-1]  # records with at least so many hits
    least_kept = int(np.argmax(hotter <= share_kept * len(heads))) if (hotter <= share_kept * len(heads)).any() else 256
    return hits < np.uint64(max(2, least_kept))


def to_merge(sizes: list[int]) -> int:
    """The first of the runs, oldest first, that should be merged with all newer ones; their number if none.

    A run is merged when the newer ones together are as large: a record is written again about log2(state / budget)
    times, a bundle has few runs, and they take at most twice the room of one.
    """
    for first in range(len(sizes)):
        if len(sizes) - first >= 3 and sum(sizes[first + 1 :]) >= sizes[first]:
            return first
    return len(sizes)
