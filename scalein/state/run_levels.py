"""The cold tier: runs of records that left memory, by bundles of key groups, and everything that reads several of them.

A bundle is a sixteenth of the hashes. Its runs lie from the oldest to the newest; a record of a newer run hides or
continues (`PARTIAL`) those of older ones. Whoever needs the truth about some keys brings their records together, oldest
first: a read in a scratch table; a scan and compaction by folding sorted runs, range by range of hashes (in a scratch
table as well where records have texts, or were made by different functions).

Invariant: the list of a bundle's runs is replaced, never changed, so a reader keeps what it began with; files stay
readable after they were removed.

Threads: readers and compactors, at most one a bundle; whoever replaces a list holds the lock of `Tiers` over them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from scalein.layout import GROUPS, MOST_HITS, PARTIAL, TOMB, SortedRecords
from scalein.memory import address
from scalein.state.arena import Arena
from scalein.state.memtable import HotTable
from scalein.state.run_file import Held, Run
from scalein.state.run_writer import RunWriter
from scalein.state.workspace import Room
from scalein.storage.aio import BlockReader
from scalein.storage.filesystem import FileSystem, Input

if TYPE_CHECKING:
    from scalein.kernels.store import Functions, StoreKernels

BUNDLES = 16
BUNDLE_GROUPS = GROUPS // BUNDLES
TOGETHER = 8  # runs of one size that are merged at once
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


class Aged(NamedTuple):
    """Records of one age, what rows did to their values, and what keeps them alive."""

    sorted: SortedRecords
    functions: Functions
    kept: object


class _Span(NamedTuple):
    """A range of hashes, and the blocks [first, last) that runs have of it, read together."""

    least: int
    greatest: int
    runs: list[ColdRun]  # oldest first
    blocks: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray

    @staticmethod
    def all(cuts: list[tuple[int, int]], runs: tuple[ColdRun, ...]) -> Iterator[_Span]:
        leasts, greatests = np.array(cuts, np.uint64).T
        spans = np.stack([cold.run.spans(leasts, greatests) for cold in runs]) if runs else np.zeros((0, 4, len(cuts)))
        for number, (least, greatest) in enumerate(cuts):
            some = np.flatnonzero(spans[:, 0, number] < spans[:, 1, number])
            of_runs = spans[some, :, number].astype(np.int64)
            yield _Span(least, greatest, [runs[k] for k in some.tolist()], of_runs[:, :2], of_runs[:, 2], of_runs[:, 3])

    @property
    def inputs(self) -> list[Input]:
        return [cold.run.input for cold in self.runs]

    @property
    def input_index(self) -> np.ndarray:
        return np.arange(len(self.runs))


class _Desk:
    """What one thread needs to bring runs together, used again and again."""

    def __init__(self) -> None:
        self.room = Room()
        self.reader = BlockReader(0, buffers=2)  # one range is read while another is merged


class Scratch:
    """A table in which records of several ages are brought together."""

    def __init__(self, kernels: StoreKernels) -> None:
        self._kernels = kernels
        self.table = HotTable(kernels, Arena(SCRATCH_SEGMENT, 1 << 34), most_chunk=1 << 16)
        self._groups = range(GROUPS)

    def absorb(self, pointers: np.ndarray, functions: Functions) -> None:
        """Records newer than all before."""
        self._kernels.merge_records(self.table, pointers, functions, older=False)

    def begin(self, least: int = 0, greatest: int = (1 << 64) - 1, records: int = 0) -> None:
        """Forget everything; so many records of a range of hashes will come, or a few of any."""
        (self.table.clear if records else self.table.rewind)(self._groups)
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
    """Opens, writes and reads runs; brings about `at_once` records together, and writes so many bytes, at a time."""

    def __init__(self, fs: FileSystem, kernels: StoreKernels, at_once: int, write_bytes: int) -> None:
        self._fs, self._kernels, self._at_once, self._write_bytes = fs, kernels, at_once, write_bytes
        self.runs: list[tuple[ColdRun, ...]] = [() for _ in range(BUNDLES)]
        self._held = Held()
        self._desks: list[_Desk] = []  # that nobody uses now
        self._rooms: list[Room] = []  # of writers; the same
        self._opened: list[Run] = []  # of snapshots, before it is known which of them stay

    def open_all(self, ids: list[list[int]], groups: dict[int, frozenset[int] | None]) -> list[tuple[ColdRun, ...]]:
        """Runs of a snapshot, open until `begin` or `close` says otherwise; of each those groups count."""
        found: list[tuple[ColdRun, ...]] = []
        for some in ids:
            runs = []
            for id in some:
                runs.append(self.open(id, groups[id]))
                self._opened.append(runs[-1].run)
            found.append(tuple(runs))
        return found

    def begin(self, runs: list[tuple[ColdRun, ...]]) -> None:
        """Have these of the runs that were opened; nobody needs the others."""
        self.runs = runs
        staying = {id(cold.run) for some in runs for cold in some}
        for run in self._opened:
            if id(run) not in staying:
                run.close()
        self._opened = []

    def open(self, id: int, groups: frozenset[int] | None = None) -> ColdRun:
        run = self.reader(id)
        try:
            functions = tuple(json.loads(run.spec))
        except BaseException:
            run.close()
            raise
        made: Future[Run] = Future()
        made.set_result(run)
        return ColdRun(id, int(run.record_count), functions, made, groups)

    def reader(self, id: int) -> Run:
        kernels = self._kernels
        return Run(self._fs, id, kernels.record_bytes, kernels.text_cells, kernels.checksums, self._held)

    @property
    def index_bytes(self) -> int:
        """Directories and filters in memory."""
        return self._held.bytes

    @property
    def memory_bytes(self) -> int:
        """Directories and filters, and what waits on desks for the next who merges."""
        rooms = [*(desk.room for desk in list(self._desks)), *self._rooms]
        return (self.index_bytes + sum(room.size_bytes for room in rooms) +
                sum(desk.reader.memory_bytes for desk in list(self._desks)))  # fmt: skip

    def forget_rooms(self) -> None:
        """Let go of what writers have left for the next."""
        self._rooms.clear()

    @property
    def whole_index_bytes(self) -> int:
        """What those of all runs will take in memory when all are looked into."""
        return sum(cold.run.index_bytes for runs in self.runs for cold in runs)

    def writer(self, id: int, functions: Functions, records: int, size_bytes: int, has_filter: bool) -> RunWriter:
        """A new run, with room for so much. A filter is for those most keys are not in: the oldest has nearly all."""
        kernels = self._kernels
        return RunWriter(self._fs, id, kernels.record_bytes, json.dumps(functions), kernels.text_cells, size_bytes,
                         kernels.checksums, records if has_filter else None, kernels.pack, kernels.set_filter_bits,
                         self._rooms, self._write_bytes)

    def sorted_records(self, pointers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Records as a run wants them: copies in the order of their hashes, and these."""
        hashes = self._kernels.hash_keys(pointers)
        order = np.argsort(hashes)
        return self._kernels.gather(np.ascontiguousarray(pointers[order])), hashes[order]

    def ranges(self, groups: range, runs: tuple[ColdRun, ...], scratch_table: Callable[[], Scratch],
               newest: tuple[np.ndarray, np.ndarray, Functions] | None = None) -> Iterator[Together]:
        """All of a bundle's groups, or of some, in its runs, and in newer records, together range by range of hashes.

        The next range overwrites the records of the last, and texts in the scratch table. `newest`: pointers, their
        hashes, functions.
        """
        count = sum(cold.record_count for cold in runs) * len(groups) // BUNDLE_GROUPS  # hashes are evenly spread
        count += 0 if newest is None else len(newest[0])
        parts = -(-count // self._at_once) or 1
        functions = {cold.functions for cold in runs} | ({newest[2]} if newest is not None else set())
        if self._kernels.text_cells:
            for least, greatest in _cut(groups, parts):
                texts = [*self._with_text(least, greatest, runs), *_newest(least, greatest, newest)]
                yield self._absorbed(texts, scratch_table(), least, greatest, count // parts)
            return
        try:
            desk = self._desks.pop()
        except IndexError:  # not asked for before: another thread may take the last one meanwhile
            desk = _Desk()
        for span, area in desk.reader.read(_Span.all(_cut(groups, parts), runs)):
            desk.room.begin()
            given = [*self._plain(span, area, desk.room), *_newest(span.least, span.greatest, newest)]
            if len(functions) == 1 and given:
                hashes, pointers = self._kernels.merge_sorted([one.sorted for one in given], desk.room.words)
                yield Together(*self._kernels.combine_records(pointers, hashes, given[0].functions, desk.room.words))
            else:
                yield self._absorbed(given, scratch_table(), span.least, span.greatest, count // parts)
        self._desks.append(desk)

    def _absorbed(self, given: list[Aged], scratch: Scratch, least: int, greatest: int, records: int) -> Together:
        """Records of several ages, by way of a table."""
        scratch.begin(least, greatest, records)
        for one in given:
            scratch.absorb(one.sorted.pointers, one.functions)
        return Together(*self.sorted_records(scratch.pointers()))

    def _plain(self, span: _Span, area: np.ndarray, room: Room) -> Iterator[Aged]:
        """What runs without text have of a range of hashes; oldest first."""
        if not span.runs:
            return
        per_block, size = span.runs[0].run.block_shape
        counts, at = span.blocks[:, 1] - span.blocks[:, 0], span.sizes.cumsum() - span.sizes
        pieces = np.array([(0, cold.id, 0) for cold in span.runs], np.int64)
        pieces[:, 0], pieces[:, 2] = counts, span.offsets
        fits = counts * size == span.sizes
        found: list[SortedRecords | None] = [None] * len(pieces)
        if fits.all():
            found = self._kernels.read_blocks(area, pieces, per_block, size, span.least, span.greatest, room.words)
        else:  # the one that is wrong is named
            k = int(np.argmin(fits))
            span.runs[k].run.refuse(area[at[k] : at[k] + span.sizes[k]], *span.blocks[k].tolist())
        for k, (cold, records) in enumerate(zip(span.runs, found, strict=True)):
            if records is None:
                cold.run.refuse(area[at[k] : at[k] + span.sizes[k]], *span.blocks[k].tolist())
            yield Aged(_counting(cold, records), cold.functions, None)

    def _with_text(self, least: int, greatest: int, runs: tuple[ColdRun, ...]) -> Iterator[Aged]:
        """What runs have of a range of hashes; oldest first."""
        for cold in runs:
            first, last = cold.run.blocks_between(least, greatest)
            if first < last:
                found = cold.run.read_range(first, last)
                pointers = pointers_to(found.records)
                hashes = self._kernels.hash_keys(pointers)
                inside = slice(hashes.searchsorted(np.uint64(least)), hashes.searchsorted(np.uint64(greatest), "right"))
                yield Aged(_counting(cold, SortedRecords(hashes[inside], pointers[inside])), cold.functions, found)

    def close(self) -> None:
        for desk in self._desks:
            desk.reader.close()
        for run in self._opened:
            run.close()

    def merged(self, bundle: int, runs: tuple[ColdRun, ...], id: int, scratch_table: Callable[[], Scratch],
               is_bottom: bool) -> ColdRun | None:
        """One run in the place of several; at the bottom, nothing older is left to hide or to continue."""
        functions = runs[-1].functions
        writer = self.writer(id, functions, sum(cold.record_count for cold in runs),
                             sum(cold.run.size_bytes for cold in runs), has_filter=not is_bottom)
        count = 0
        try:
            for records, hashes in self.ranges(groups_of(bundle), runs, scratch_table):
                if is_bottom:
                    heads = records[:, :8].view(np.uint64)
                    alive = (heads[:, 0] & np.uint64(TOMB)) == 0
                    heads &= ~np.uint64(PARTIAL)
                    if not alive.all():
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


def _counting(cold: ColdRun, found: SortedRecords) -> SortedRecords:
    """Those of a run's records that count."""
    if cold.groups is None:
        return found
    counts = cold.counting(found.hashes)
    return SortedRecords(found.hashes[counts], found.pointers[counts])


def _newest(least: int, greatest: int, newest: tuple[np.ndarray, np.ndarray, Functions] | None) -> Iterator[Aged]:
    """What records in memory have of a range of hashes."""
    if newest is not None:
        pointers, hashes, functions = newest
        chosen = (hashes >= np.uint64(least)) & (hashes <= np.uint64(greatest))
        hashes, pointers = hashes[chosen], pointers[chosen]
        order = np.argsort(hashes)
        yield Aged(SortedRecords(hashes[order], pointers[order]), functions, None)


def _cut(groups: range, parts: int) -> list[tuple[int, int]]:
    """Ranges of the hashes of groups with about as many records each: hashes are evenly spread."""
    least, greatest = groups.start << 56, (groups.stop << 56) - 1
    step = (greatest - least + 1) // parts
    borders = [least + k * step for k in range(parts)] + [greatest + 1]
    return [(low, high - 1) for low, high in pairwise(borders)]


# --- decisions


def least_kept(hits: np.ndarray, share: float) -> int:
    """The hits of a record from which on it stays in memory: at least 2, and at most a share of all have as many."""
    counts = np.bincount(hits, minlength=MOST_HITS + 1)
    hotter = np.append(np.cumsum(counts[::-1])[::-1], 0)  # records with at least so many hits
    return max(2, int(np.argmax(hotter <= share * len(hits))))


def to_merge(sizes: list[int]) -> int:
    """The first of the runs, oldest first, that should be merged with all newer ones; their number if none.

    The oldest is merged when the newer ones together are as large, so all take at most twice the room of one; newer
    ones when `TOGETHER` are of about one size. So a record is written about log8(state / budget) + 2 times, and a
    bundle has a few times as many runs.
    """
    for first in range(len(sizes)):
        count, newer = len(sizes) - first, sum(sizes[first + 1 :])
        if first == 0 and count >= 3 and newer >= sizes[0]:
            return 0
        if count >= TOGETHER and 2 * newer >= (count - 1) * sizes[first]:
            return first
    return len(sizes)
