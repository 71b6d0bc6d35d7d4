"""HotTable: the records in memory. 256 key groups, each with an index, record chunks and text chunks of its own.

Invariant: every record of a group is reached from its index and lies in one of its chunks; a record's long strings lie
in the text chunks of its group. Headers, shared with kernels, say where its next record and text go (`layout.py`).

Threads: kernels of several workers may run at once on different groups; `serve` makes room under a lock. Everything
else happens between kernels, by the store's caller.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from scalein.errors import InternalError, ScaleinError
from scalein.layout import (
    ARENA_FULL,
    BUCKET_WORDS,
    BUCKETS,
    GROUP_WORDS,
    GROUPS,
    HEAP_FULL,
    INDEX_FULL,
    INLINE_BYTES,
    LOAD_SIXTEENTHS,
    MASK,
    NEW_FLAGS,
    POOLED,
    RECORD_AT,
    RECORD_END,
    ROOM,
    SHIFT,
    TAG_BITS,
    TEXT_AT,
    TEXT_END,
    TOMB,
    UNDO_BATCH_SHIFT,
    UNDO_FULL,
    FrameData,
    SortedRecords,
)
from scalein.memory import address
from scalein.state.arena import LEAST_CHUNK, MOST_CHUNK, Arena, Buckets

if TYPE_CHECKING:
    from scalein.kernels.store import Allocate, StoreKernels

FIRST_BUCKETS = 8
CROWDED_BYTES = 16 << 10  # that a group may grow by before anybody looks for what is dead
SHRINK_SHARE = 0.8  # of the room of half an index: a group that has less when it is thinned gets that
POOL_CHUNKS = 64  # at most, that wait for kernels to take them
POOL_SHARE = 64  # one of so many bytes in use may wait so
RECORDS, TEXTS = 0, 1  # kinds of chunks


class ChunkList:
    """Chunks in use: columns that a snapshot can copy at once, whatever their number."""

    def __init__(self) -> None:
        self.rows = np.zeros((64, 5), np.int64)  # group, kind, offset, size, serial; free rows have group -1
        self.rows[:, 0] = -1
        self.count = 0
        self._serial = 0  # of the last one: another chunk in the same place has another
        self._free: list[int] = []

    def add(self, group: int, kind: int, offset: int, size: int) -> int:
        if self._free:
            row = self._free.pop()
        else:
            if self.count == len(self.rows):
                more = np.zeros_like(self.rows)
                more[:, 0] = -1
                self.rows = np.concatenate((self.rows, more))
            row, self.count = self.count, self.count + 1
        self._serial += 1
        self.rows[row] = group, kind, offset, size, self._serial
        return row

    def drop(self, rows: list[int]) -> None:
        self.rows[rows, 0] = -1
        self._free += rows


@dataclass(eq=False)
class Left:
    """Records that were taken out of groups and are on their way elsewhere: those with fewer hits than others.

    They are in `chunks`, which stay as they are until they are given back. Which of the records there leave, only the
    groups' old index says.
    """

    chunks: list[tuple[int, int, int]]
    count: int
    _sort: Callable[[], SortedRecords]
    _sorted: SortedRecords | None = field(default=None, init=False)

    def in_order(self) -> SortedRecords:
        """Any thread may ask, one at a time; looked for once."""
        if self._sorted is None:
            self._sorted = self._sort()
        return self._sorted


class Pool:
    """Chunks that a worker's kernels may take without asking: the last first. `groups` has who took which."""

    def __init__(self) -> None:
        self.chunks, self.groups = np.zeros(POOL_CHUNKS, np.int64), np.zeros(POOL_CHUNKS, np.int64)
        self.chunks_at, self.groups_at = address(self.chunks), address(self.groups)
        self.left = 0


class HotTable:
    """Key groups in memory. `on_undo_full(segment)` copies a segment whose undo log is full."""

    def __init__(self, kernels: StoreKernels, arena: Arena, most_chunk: int = MOST_CHUNK,
                 load_sixteenths: int = LOAD_SIXTEENTHS) -> None:
        self.kernels, self.arena, self._load_sixteenths = kernels, arena, load_sixteenths
        self.on_undo_full: Callable[[int], None] | None = None
        self.is_torn = False  # records are on their way, and only who moves them knows; or did not get there
        self.headers = np.zeros((GROUP_WORDS, GROUPS), np.int64).T
        self.chunks = ChunkList()
        self.buckets = Buckets(len(arena.memory) >> 2)
        self._own: list[tuple[list[int], list[int]]] = [([], []) for _ in range(GROUPS)]  # rows of `chunks`, by kind
        self._lock = threading.Lock()
        self._pools: list[Pool] = []  # by worker
        self._most_chunk = most_chunk
        self._usual = np.full((GROUPS, 2), LEAST_CHUNK, np.int64)  # sizes of the chunks that come next, by kind
        nothing = np.zeros(len(arena.dirty), np.int64)
        self.undo_at: list[np.ndarray] = [nothing]  # by worker
        self.undo_end: list[np.ndarray] = [nothing]
        self._bytes = [0] * GROUPS  # of each group's chunks
        self._settled = [0] * GROUPS  # the same when it was last looked at
        self.crowded: set[int] = set()  # groups that have doubled since: they may hold much that is dead
        self.batch = 0  # the number of the call, for the undo logs of several workers
        self.running: dict[int, FrameData] = {}  # frames of kernels under way, by worker
        for group in range(GROUPS):
            self._new_index(group)

    # --- kernels

    def attach(self, frame: FrameData, worker: int) -> None:
        if frame.keep.get("table") is not self:
            arena = self.arena
            frame.keep["table"] = self
            frame["table.groups"] = address(self.headers)
            frame["table.arena"], frame["table.arena_size"] = arena.base, len(arena.memory)
            frame["segment.shift"] = arena.shift
            frame["segment.dirty"], frame["segment.copying"] = address(arena.dirty), address(arena.copying)
            frame["copying"] = address(arena.any_copying)
            frame["undo.at"], frame["undo.end"] = address(self.undo_at[worker]), address(self.undo_end[worker])
            frame["undo.batch"] = (self.batch << UNDO_BATCH_SHIFT) & ((1 << 64) - 1)
        pool = self._pool(worker)
        frame["pool.chunks"], frame["pool.groups"] = pool.chunks_at, pool.groups_at
        frame["pool.left"], frame["pool.size"] = pool.left, self._most_chunk
        self.running[worker] = frame

    def detach(self, worker: int) -> None:
        frame, pool = self.running.pop(worker), self._pool(worker)
        left = frame.get("pool.left", pool.left)
        if left < pool.left:
            with self._lock:
                for k in range(pool.left - 1, left - 1, -1):  # in the order in which they were taken
                    offset = int(pool.chunks[k]) - self.arena.base
                    self._have_chunk(int(pool.groups[k]), RECORDS, offset, self._most_chunk)
            pool.left = left

    def _pool(self, worker: int) -> Pool:
        while worker >= len(self._pools):
            self._pools.append(Pool())
        return self._pools[worker]

    def serve(self, status: int, frame: FrameData, worker: int) -> None:
        """Give a kernel what it left for. Where that fails, some of its rows are in and others are not."""
        try:
            self._serve(status, frame, worker)
        except BaseException:
            self.is_torn = True
            raise

    def _serve(self, status: int, frame: FrameData, worker: int) -> None:
        if status == UNDO_FULL:
            assert self.on_undo_full is not None
            self.on_undo_full(frame["full.segment"])
            return
        group = frame["full.group"]
        with self._lock:
            match status:
                case _ if status == INDEX_FULL:
                    self._grow(group)
                case _ if status == ARENA_FULL:
                    self._add_chunk(group, RECORDS, self.kernels.record_bytes)
                    self._fill_pool(self._pool(worker))
                case _ if status == HEAP_FULL:
                    self._add_chunk(group, TEXTS, frame["full.need"])
                case _:
                    raise InternalError(f"a kernel of the store left with status {status}")

    # --- room

    def _room_in(self, words: int) -> int:
        """Records that an index of so many words has room for."""
        return words * self._load_sixteenths // 16

    def _add_chunk(self, group: int, kind: int, need: int) -> None:
        """A chunk that is large enough, and the larger the more the group has."""
        own = self._own[group][kind]
        size = max(int(self._usual[group, kind]), 1 << (need - 1).bit_length())
        if len(own) > 1:  # two of a size are followed by a larger one; a group that was evicted begins where it was
            self._usual[group, kind] = min(self._most_chunk, 2 * self._usual[group, kind])
        if size > self.arena.segment_bytes:
            raise ScaleinError("a value is longer than the store keeps", found=f"{need} bytes",
                               wanted=f"at most {self.arena.segment_bytes}")
        offset = self.arena.take(size)
        self._have_chunk(group, kind, offset, size)
        at, end = (RECORD_AT, RECORD_END) if kind == RECORDS else (TEXT_AT, TEXT_END)
        self.headers[group, at] = self.arena.base + offset
        self.headers[group, end] = self.arena.base + offset + size
        if kind == RECORDS:
            self.headers[group, POOLED] = need <= self._most_chunk == self._usual[group, kind]

    def _have_chunk(self, group: int, kind: int, offset: int, size: int) -> None:
        self._bytes[group] += size
        if self._bytes[group] > 2 * self._settled[group] + CROWDED_BYTES:
            self.crowded.add(group)
        self._own[group][kind].append(self.chunks.add(group, kind, offset, size))
        self.arena.dirty[offset >> self.arena.shift] = 1

    def _fill_pool(self, pool: Pool) -> None:
        """Chunks for kernels to take: leaving one for each would cost them more than what they do with it."""
        room = min(len(pool.chunks), self.arena.in_use // POOL_SHARE // self._most_chunk)
        while pool.left < room:
            pool.chunks[pool.left] = self.arena.base + self.arena.take(self._most_chunk)
            pool.left += 1

    def _new_index(self, group: int, buckets: int = FIRST_BUCKETS) -> None:
        header = self.headers[group]
        header[BUCKETS] = self.buckets.take(buckets * BUCKET_WORDS * 8)
        header[SHIFT], header[MASK] = TAG_BITS - (buckets.bit_length() - 1), buckets - 1
        header[ROOM] = self._room_in(buckets * BUCKET_WORDS)

    def _grow(self, group: int) -> None:
        """Double a group's index."""
        header = self.headers[group]
        place, shift, buckets, room = int(header[BUCKETS]), int(header[SHIFT]), int(header[MASK]) + 1, int(header[ROOM])
        if shift <= 0:
            raise ScaleinError("a key group has more keys than its index can tell apart")
        size = buckets * BUCKET_WORDS * 8
        new = self.buckets.take(2 * size)
        self.kernels.split(place, buckets, new, shift - 1, 2 * buckets - 1)
        header[BUCKETS], header[SHIFT], header[MASK] = new, shift - 1, 2 * buckets - 1
        header[ROOM] = room + self._room_in(buckets * BUCKET_WORDS)
        self.buckets.give_back(place, size)

    # --- groups

    def set_flags(self, group: int, flags: int) -> None:
        """Flags of records that will be inserted."""
        self.headers[group, NEW_FLAGS] = flags

    def pointers(self, group: int) -> np.ndarray:
        """All records of a group."""
        size = self.kernels.record_bytes
        parts = [np.arange(start, end - size + 1, size, dtype=np.int64) for start, end in self._extents(group, RECORDS)]
        return np.concatenate(parts).view(np.uint64) if parts else np.zeros(0, np.uint64)

    def _extents(self, group: int, kind: int) -> list[tuple[int, int]]:
        rows = self.chunks.rows[self._own[group][kind]]
        starts = self.arena.base + rows[:, 2]
        ends = starts + rows[:, 3]
        if len(ends):
            ends[-1] = self.headers[group, RECORD_AT if kind == RECORDS else TEXT_AT]
        return list(zip(starts.tolist(), ends.tolist(), strict=True))

    def heads(self, group: int) -> np.ndarray:
        """The first words of all records of a group."""
        words = self.kernels.record_bytes // 8
        parts = []
        for start, end in self._extents(group, RECORDS):
            first = start - self.arena.base
            count = (end - start) // self.kernels.record_bytes
            area = self.arena.memory[first : first + count * self.kernels.record_bytes]
            parts.append(area.view(np.uint64).reshape(count, words)[:, 0])
        return np.concatenate(parts) if parts else np.zeros(0, np.uint64)

    def release(self, group: int) -> list[tuple[int, int, int]]:
        """Forget a group's records; gives its chunks, which stay as they are until they are given back.

        Its index stays as large as it is: what left memory once is followed by as much again.
        """
        header = self.headers[group]
        buckets = int(header[MASK]) + 1
        ctypes.memset(int(header[BUCKETS]), 0, buckets * BUCKET_WORDS * 8)
        header[ROOM] = self._room_in(buckets * BUCKET_WORDS)
        return self._without_chunks(range(group, group + 1))

    def _without_chunks(self, groups: range) -> list[tuple[int, int, int]]:
        """The chunks of groups, which have none any more."""
        rows = [row for group in groups for own in self._own[group] for row in own]
        for group in groups:
            self._own[group] = [], []
            self._bytes[group] = 0
        self.headers[groups.start : groups.stop, RECORD_AT : TEXT_END + 1] = 0
        chunks = [(row, offset, size) for row, (offset, size) in
                  zip(rows, self.chunks.rows[rows, 2:4].tolist(), strict=True)]
        self.chunks.drop(rows)
        return chunks

    def thin(self, groups: range, least_hits: int, drop: int, allocate: Allocate) -> Left:
        """Take those with fewer hits out of groups; those with a flag of `drop` just go. Without text.

        `allocate` gives memory that lives until the last of them has left. Nobody but the caller knows of them: whoever
        has put them where they are found sets `is_torn` back.
        """
        headers = self.headers[groups.start : groups.stop]
        counts = (headers[:, MASK] + 1) * BUCKET_WORDS
        used = counts * self._load_sixteenths // 16 - headers[:, ROOM]
        # All that is needed: without memory nothing may be released.
        old, records = allocate(int(counts.sum())), int(used.sum())
        room = SortedRecords(allocate(records), allocate(records))
        extents = self._all_extents(groups)
        moves = np.empty((len(groups), 3), np.int64)
        moves[:, 0], moves[:, 1] = address(old) + 8 * (counts.cumsum() - counts), headers[:, BUCKETS]
        moves[:, 2] = 8 * counts
        self.kernels.clear(moves)
        self.is_torn = True
        headers[:, ROOM] = counts * self._load_sixteenths // 16
        chunks = self._without_chunks(groups)
        is_wide = used < counts // 2 * self._load_sixteenths // 16 * SHRINK_SHARE
        for k in np.flatnonzero(is_wide & (counts > FIRST_BUCKETS * BUCKET_WORDS)).tolist():
            self.buckets.give_back(int(moves[k, 1]), int(moves[k, 2]))
            self._new_index(groups[k], int(counts[k]) // 2 // BUCKET_WORDS)
        count = self.kernels.retain(self, extents, least_hits, drop)
        base, size = self.arena.base, len(self.arena.memory)
        return Left(chunks, count, lambda: self.kernels.evict(base, size, old, least_hits, drop, room))

    def _all_extents(self, groups: range) -> np.ndarray:
        """Where the records of groups are: addresses, and how many lie there one behind the other."""
        own = [(group, self._own[group][RECORDS]) for group in groups if self._own[group][RECORDS]]
        rows = self.chunks.rows[[row for _, some in own for row in some]]
        extents = np.stack((self.arena.base + rows[:, 2], rows[:, 3]), axis=1)
        last = np.array([len(some) for _, some in own], np.int64).cumsum() - 1
        extents[last, 1] = self.headers[[group for group, _ in own], RECORD_AT] - extents[last, 0]
        extents[:, 1] //= self.kernels.record_bytes
        return extents

    def record_count(self, group: int) -> int:
        header = self.headers[group]
        return self._room_in((int(header[MASK]) + 1) * BUCKET_WORDS) - int(header[ROOM])

    @property
    def memory_bytes(self) -> int:
        return self.arena.touched + self.buckets.touched

    def give_back(self, chunks: list[tuple[int, int, int]]) -> None:
        """Chunks of released groups may be used again, and are in the list no more. Any thread may say so."""
        with self._lock:
            while chunks:
                _, offset, size = chunks.pop()
                self.arena.give_back(offset, size)

    def pin(self) -> int:
        """Keep the records of all chunks as they are, also of those that will be given back, until this is unpinned."""
        with self._lock:
            self.arena.pinned += 1
            return self.arena.pinned

    def unpin(self, pin: int) -> None:
        """In the order in which they were pinned. Any thread may say so."""
        with self._lock:
            self.arena.unpinned = pin

    def in_use_beside(self, leaving: Iterable[list[tuple[int, int, int]]]) -> int:
        """Bytes in use, but for chunks that will be given back."""
        with self._lock:
            return self.in_use - sum(size for chunks in leaving for _, _, size in chunks)

    def trim(self, most: int, at_most: int) -> None:
        """Give memory that nobody uses back to the system: down to `most` bytes in all by whole huge pages, and down to
        `at_most` in any case."""
        touched = self.arena.touched + self.buckets.touched
        if touched > most:
            with self._lock:
                self.arena.trim(touched - most, touched - at_most)

    def expect(self, group: int, records: int) -> None:
        """Make the index of a group without records large enough for so many."""
        header = self.headers[group]
        least = -(-records * 16 // self._load_sixteenths // BUCKET_WORDS) + 1
        buckets = 1 << (least - 1).bit_length()
        if buckets > int(header[MASK]) + 1 and not self._own[group][RECORDS]:
            place, size = int(header[BUCKETS]), (int(header[MASK]) + 1) * BUCKET_WORDS * 8
            self._new_index(group, buckets)
            self.buckets.give_back(place, size)  # not before: if there is no room, the group keeps what it has

    def dead_share(self, group: int) -> float:
        """The share of a group's bytes that deleted records and replaced texts take."""
        self.crowded.discard(group)
        self._settled[group] = total = self._bytes[group]
        size = self.kernels.record_bytes
        dead = int(((self.heads(group) & np.uint64(TOMB)) != 0).sum()) * size
        if self.kernels.text_cells:
            used = sum(end - start for start, end in self._extents(group, TEXTS))
            records = self.kernels.gather(self.pointers(group))
            for cell in self.kernels.text_cells:
                lengths = records[:, cell : cell + 4].copy().view("<u4")[:, 0].astype(np.int64)
                used -= int(lengths[lengths > INLINE_BYTES].sum())
            dead += used
        return dead / total

    def begin_small(self, group: int) -> None:
        """Let the chunks of a released group grow from the smallest again."""
        self._usual[group] = LEAST_CHUNK
        self.headers[group, POOLED] = 0

    def settled(self, group: int) -> None:
        """The group was written anew."""
        self._settled[group] = self._bytes[group]
        self.crowded.discard(group)

    def clear(self, groups: range) -> None:
        for group in groups:
            if self._own[group][RECORDS]:
                self.give_back(self.release(group))
                header = self.headers[group]
                self.buckets.give_back(int(header[BUCKETS]), (int(header[MASK]) + 1) * BUCKET_WORDS * 8)
                self._new_index(group)

    def rewind(self, groups: range) -> None:
        """Forget records like `clear`, but leave a group that is small its chunk and its index."""
        for group in groups:
            records, texts = self._own[group]
            if len(records) != 1 or texts:
                self.clear(range(group, group + 1))
                continue
            header = self.headers[group]
            words = (int(header[MASK]) + 1) * BUCKET_WORDS
            ctypes.memset(int(header[BUCKETS]), 0, words * 8)
            header[ROOM] = self._room_in(words)
            header[RECORD_AT] = self.arena.base + int(self.chunks.rows[records[0], 2])

    @property
    def in_use(self) -> int:
        """Bytes of memory in use."""
        return self.arena.in_use + self.buckets.in_use
