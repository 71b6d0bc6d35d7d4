"""MemTable: the records in memory. 256 key groups, each with a hash index, record chunks and text chunks of its own.

Invariant: every record of a group is in its index and lies in one of its chunks; a record's long strings lie in the
text chunks of its group. The group headers, which kernels share, hold the position of the next record and text
(`layout.py`).

When records leave for disk: `Tiers.evict_to_budget`; which ones: `evict.py`; how much memory there is: `budget.py`.
When a group is rewritten without its garbage: `Tiers.collect_garbage`.

Threads: kernels of several workers may run at once on different groups; `serve` allocates under a lock. Everything else
is called between kernels, by the store's caller, except where a method says otherwise.
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
from scalein.state.arena import MAX_CHUNK, MIN_CHUNK, Arena, BucketAllocator

if TYPE_CHECKING:
    from scalein.kernels.store import Allocate, StoreKernels

FIRST_BUCKETS = 8
GC_SLACK_BYTES = 16 << 10  # that a group may grow by before it is checked for garbage
SHRINK_SHARE = 0.8  # of the capacity of half an index: a group with fewer records at its eviction gets half
POOL_CHUNKS = 64  # of a worker, at most
POOL_SHARE = 64  # a pool holds at most this fraction (1/64) of the bytes in use
RECORDS, TEXTS = 0, 1  # kinds of chunks


class ChunkList:
    """Chunks in use: one array, which a snapshot copies at once."""

    def __init__(self) -> None:
        self.rows = np.zeros((64, 5), np.int64)  # group, kind, offset, size, serial; free rows have group -1
        self.rows[:, 0] = -1
        self.count = 0
        self._serial = 0  # of the newest chunk; never reused, also not for a chunk at the same offset
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
class EvictedRecords:
    """Records that were taken out of groups and are written to a run: those with the fewest accesses.

    They lie in `chunks`, which stay unchanged until they are freed. Which records of the chunks were evicted is known
    from the old index of the groups only.
    """

    chunks: list[tuple[int, int, int]]
    count: int
    _sort: Callable[[], SortedRecords]
    _sorted: SortedRecords | None = field(default=None, init=False)

    def in_order(self) -> SortedRecords:
        """Any thread may call, one at a time; sorted once."""
        if self._sorted is None:
            self._sorted = self._sort()
        return self._sorted


class ChunkPool:
    """Chunks that a worker's kernels may use without returning, the last one first. `groups`: of those in use."""

    def __init__(self) -> None:
        self.chunks, self.groups = np.zeros(POOL_CHUNKS, np.int64), np.zeros(POOL_CHUNKS, np.int64)
        self.chunks_at, self.groups_at = address(self.chunks), address(self.groups)
        self.left = 0


class MemTable:
    """Key groups in memory. `on_undo_full(segment)` copies a segment whose undo log is full."""

    def __init__(self, kernels: StoreKernels, arena: Arena, max_chunk: int = MAX_CHUNK,
                 load_sixteenths: int = LOAD_SIXTEENTHS) -> None:
        self.kernels, self.arena, self._load_sixteenths = kernels, arena, load_sixteenths
        self.on_undo_full: Callable[[int], None] | None = None
        self.is_inconsistent = False  # records are being moved, or were lost on the way: no snapshot may be taken
        self.headers = np.zeros((GROUP_WORDS, GROUPS), np.int64).T
        self.chunks = ChunkList()
        self.buckets = BucketAllocator(len(arena.memory) >> 2)
        self._chunk_rows: list[tuple[list[int], list[int]]] = [([], []) for _ in range(GROUPS)]  # of `chunks`, by kind
        self._lock = threading.Lock()
        self._pools: list[ChunkPool] = []  # by worker
        self._max_chunk = max_chunk
        self._next_sizes = np.full((GROUPS, 2), MIN_CHUNK, np.int64)  # of each group's next chunk, by kind
        nothing = np.zeros(len(arena.dirty), np.int64)
        self.undo_at: list[np.ndarray] = [nothing]  # by worker
        self.undo_end: list[np.ndarray] = [nothing]
        self._bytes = [0] * GROUPS  # of each group's chunks
        self._bytes_at_gc = [0] * GROUPS  # the same at the last check for garbage
        self.gc_candidates: set[int] = set()  # groups that have doubled since: much of them may be garbage
        self.batch = 0  # the number of the call, for the undo logs of several workers
        self.running: dict[int, FrameData] = {}  # frames of running kernels, by worker
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
        frame["pool.left"], frame["pool.size"] = pool.left, self._max_chunk
        self.running[worker] = frame

    def detach(self, worker: int) -> None:
        frame, pool = self.running.pop(worker), self._pool(worker)
        left = frame.get("pool.left", pool.left)
        if left < pool.left:
            with self._lock:
                for k in range(pool.left - 1, left - 1, -1):  # in the order in which they were used
                    offset = int(pool.chunks[k]) - self.arena.base
                    self._register_chunk(int(pool.groups[k]), RECORDS, offset, self._max_chunk)
            pool.left = left

    def _pool(self, worker: int) -> ChunkPool:
        while worker >= len(self._pools):
            self._pools.append(ChunkPool())
        return self._pools[worker]

    def serve(self, status: int, frame: FrameData, worker: int) -> None:
        """Give a kernel what it returned for. If that fails, some of its rows are merged and others are not."""
        try:
            self._serve(status, frame, worker)
        except BaseException:
            self.is_inconsistent = True
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
                    self._allocate_chunk(group, RECORDS, self.kernels.record_bytes)
                    self._fill_pool(self._pool(worker))
                case _ if status == HEAP_FULL:
                    self._allocate_chunk(group, TEXTS, frame["full.need"])
                case _:
                    raise InternalError(f"a kernel of the store left with status {status}")

    # --- allocation

    def _index_capacity(self, words: int) -> int:
        """The number of records that an index of this many words can hold before it grows."""
        return words * self._load_sixteenths // 16

    def _allocate_chunk(self, group: int, kind: int, need: int) -> None:
        """Allocate a chunk of at least `need` bytes; chunks grow with the group."""
        rows = self._chunk_rows[group][kind]
        size = max(int(self._next_sizes[group, kind]), 1 << (need - 1).bit_length())
        if len(rows) > 1:  # two of a size are followed by a larger one; an evicted group starts with its last size
            self._next_sizes[group, kind] = min(self._max_chunk, 2 * self._next_sizes[group, kind])
        if size > self.arena.segment_bytes:
            raise ScaleinError("a value is longer than the store can hold", found=f"{need} bytes",
                               wanted=f"at most {self.arena.segment_bytes}")
        offset = self.arena.allocate(size)
        self._register_chunk(group, kind, offset, size)
        at, end = (RECORD_AT, RECORD_END) if kind == RECORDS else (TEXT_AT, TEXT_END)
        self.headers[group, at] = self.arena.base + offset
        self.headers[group, end] = self.arena.base + offset + size
        if kind == RECORDS:
            self.headers[group, POOLED] = need <= self._max_chunk == self._next_sizes[group, kind]

    def _register_chunk(self, group: int, kind: int, offset: int, size: int) -> None:
        self._bytes[group] += size
        if self._bytes[group] > 2 * self._bytes_at_gc[group] + GC_SLACK_BYTES:
            self.gc_candidates.add(group)
        self._chunk_rows[group][kind].append(self.chunks.add(group, kind, offset, size))
        self.arena.dirty[offset >> self.arena.shift] = 1

    def _fill_pool(self, pool: ChunkPool) -> None:
        """Fill a worker's pool: returning for every chunk would take a kernel longer than filling the chunk."""
        wanted = min(len(pool.chunks), self.arena.in_use // POOL_SHARE // self._max_chunk)
        while pool.left < wanted:
            pool.chunks[pool.left] = self.arena.base + self.arena.allocate(self._max_chunk)
            pool.left += 1

    def _new_index(self, group: int, buckets: int = FIRST_BUCKETS) -> None:
        header = self.headers[group]
        header[BUCKETS] = self.buckets.allocate(buckets * BUCKET_WORDS * 8)
        header[SHIFT], header[MASK] = TAG_BITS - (buckets.bit_length() - 1), buckets - 1
        header[ROOM] = self._index_capacity(buckets * BUCKET_WORDS)

    def _grow(self, group: int) -> None:
        """Double a group's index."""
        header = self.headers[group]
        old, shift, buckets, free = int(header[BUCKETS]), int(header[SHIFT]), int(header[MASK]) + 1, int(header[ROOM])
        if shift <= 0:
            raise ScaleinError("a key group has more keys than its index can distinguish")
        size = buckets * BUCKET_WORDS * 8
        new = self.buckets.allocate(2 * size)
        self.kernels.split(old, buckets, new, shift - 1, 2 * buckets - 1)
        header[BUCKETS], header[SHIFT], header[MASK] = new, shift - 1, 2 * buckets - 1
        header[ROOM] = free + self._index_capacity(buckets * BUCKET_WORDS)
        self.buckets.free(old, size)

    # --- groups

    def set_flags(self, group: int, flags: int) -> None:
        """Set the flags of records that are inserted from now on."""
        self.headers[group, NEW_FLAGS] = flags

    def pointers(self, group: int) -> np.ndarray:
        """Addresses of all records of a group."""
        size = self.kernels.record_bytes
        parts = [np.arange(start, end - size + 1, size, dtype=np.int64) for start, end in self._extents(group, RECORDS)]
        return np.concatenate(parts).view(np.uint64) if parts else np.zeros(0, np.uint64)

    def _extents(self, group: int, kind: int) -> list[tuple[int, int]]:
        rows = self.chunks.rows[self._chunk_rows[group][kind]]
        starts = self.arena.base + rows[:, 2]
        ends = starts + rows[:, 3]
        if len(ends):
            ends[-1] = self.headers[group, RECORD_AT if kind == RECORDS else TEXT_AT]
        return list(zip(starts.tolist(), ends.tolist(), strict=True))

    def heads(self, group: int) -> np.ndarray:
        """The head words of all records of a group."""
        words = self.kernels.record_bytes // 8
        parts = []
        for start, end in self._extents(group, RECORDS):
            first = start - self.arena.base
            count = (end - start) // self.kernels.record_bytes
            area = self.arena.memory[first : first + count * self.kernels.record_bytes]
            parts.append(area.view(np.uint64).reshape(count, words)[:, 0])
        return np.concatenate(parts) if parts else np.zeros(0, np.uint64)

    def release(self, group: int) -> list[tuple[int, int, int]]:
        """Remove a group's records; returns its chunks, which stay unchanged until they are freed.

        The index keeps its size: an evicted group usually grows to the same size again.
        """
        header = self.headers[group]
        buckets = int(header[MASK]) + 1
        ctypes.memset(int(header[BUCKETS]), 0, buckets * BUCKET_WORDS * 8)
        header[ROOM] = self._index_capacity(buckets * BUCKET_WORDS)
        return self._detach_chunks(range(group, group + 1))

    def _detach_chunks(self, groups: range) -> list[tuple[int, int, int]]:
        """Take the chunks of groups away from them."""
        rows = [row for group in groups for by_kind in self._chunk_rows[group] for row in by_kind]
        for group in groups:
            self._chunk_rows[group] = [], []
            self._bytes[group] = 0
        self.headers[groups.start : groups.stop, RECORD_AT : TEXT_END + 1] = 0
        chunks = [(row, offset, size) for row, (offset, size) in
                  zip(rows, self.chunks.rows[rows, 2:4].tolist(), strict=True)]
        self.chunks.drop(rows)
        return chunks

    def evict(self, groups: range, least_accesses: int, drop: int, allocate: Allocate) -> EvictedRecords:
        """Take the records with fewer accesses out of groups; those with a flag of `drop` are discarded. Without text.

        `allocate` gives memory that lives until the evicted records are written. The table is inconsistent on return:
        the caller clears the flag once readers can find the records in a run.
        """
        headers = self.headers[groups.start : groups.stop]
        counts = (headers[:, MASK] + 1) * BUCKET_WORDS
        used = counts * self._load_sixteenths // 16 - headers[:, ROOM]
        # Everything is allocated first: if memory runs out, nothing has been removed.
        old, records = allocate(int(counts.sum())), int(used.sum())
        into = SortedRecords(allocate(records), allocate(records))
        extents = self._record_extents(groups)
        moves = np.empty((len(groups), 3), np.int64)
        moves[:, 0], moves[:, 1] = address(old) + 8 * (counts.cumsum() - counts), headers[:, BUCKETS]
        moves[:, 2] = 8 * counts
        self.kernels.clear(moves)
        self.is_inconsistent = True
        headers[:, ROOM] = counts * self._load_sixteenths // 16
        chunks = self._detach_chunks(groups)
        is_wide = used < counts // 2 * self._load_sixteenths // 16 * SHRINK_SHARE
        for k in np.flatnonzero(is_wide & (counts > FIRST_BUCKETS * BUCKET_WORDS)).tolist():
            self.buckets.free(int(moves[k, 1]), int(moves[k, 2]))
            self._new_index(groups[k], int(counts[k]) // 2 // BUCKET_WORDS)
        count = self.kernels.retain(self, extents, least_accesses, drop)
        base, size = self.arena.base, len(self.arena.memory)
        return EvictedRecords(chunks, count, lambda: self.kernels.evict(base, size, old, least_accesses, drop, into))

    def _record_extents(self, groups: range) -> np.ndarray:
        """The extents of groups' records: the address, and the number of contiguous records."""
        by_group = [(group, self._chunk_rows[group][RECORDS]) for group in groups if self._chunk_rows[group][RECORDS]]
        rows = self.chunks.rows[[row for _, rows in by_group for row in rows]]
        extents = np.stack((self.arena.base + rows[:, 2], rows[:, 3]), axis=1)
        last = np.array([len(rows) for _, rows in by_group], np.int64).cumsum() - 1
        extents[last, 1] = self.headers[[group for group, _ in by_group], RECORD_AT] - extents[last, 0]
        extents[:, 1] //= self.kernels.record_bytes
        return extents

    def record_count(self, group: int) -> int:
        header = self.headers[group]
        return self._index_capacity((int(header[MASK]) + 1) * BUCKET_WORDS) - int(header[ROOM])

    @property
    def memory_bytes(self) -> int:
        return self.arena.committed_bytes + self.buckets.committed_bytes

    def free(self, chunks: list[tuple[int, int, int]]) -> None:
        """Free chunks of released groups, and empty the list. Any thread may call."""
        with self._lock:
            while chunks:
                _, offset, size = chunks.pop()
                self.arena.free(offset, size)

    def pin(self) -> int:
        """Keep all chunks unchanged, including those that are freed meanwhile, until `unpin`."""
        with self._lock:
            self.arena.pinned += 1
            return self.arena.pinned

    def unpin(self, pin: int) -> None:
        """In the order of the pins. Any thread may call."""
        with self._lock:
            self.arena.unpinned = pin

    def in_use_without(self, evicted: Iterable[list[tuple[int, int, int]]]) -> int:
        """Bytes in use, without evicted chunks that are about to be freed."""
        with self._lock:
            return self.in_use - sum(size for chunks in evicted for _, _, size in chunks)

    def trim(self, most: int, hard_limit: int) -> None:
        """Return unused memory to the system: down to `most` bytes by whole huge pages, and down to `hard_limit` in any
        case."""
        committed = self.memory_bytes
        if committed > most:
            with self._lock:
                self.arena.trim(committed - most, committed - hard_limit)

    def reserve(self, group: int, records: int) -> None:
        """Make the index of an empty group large enough for this many records."""
        header = self.headers[group]
        least = -(-records * 16 // self._load_sixteenths // BUCKET_WORDS) + 1
        buckets = 1 << (least - 1).bit_length()
        if buckets > int(header[MASK]) + 1 and not self._chunk_rows[group][RECORDS]:
            old, size = int(header[BUCKETS]), (int(header[MASK]) + 1) * BUCKET_WORDS * 8
            self._new_index(group, buckets)
            self.buckets.free(old, size)  # last: if the allocation fails, the group keeps its index

    def garbage_share(self, group: int) -> float:
        """The share of a group's bytes that deleted records and replaced texts take."""
        self.gc_candidates.discard(group)
        self._bytes_at_gc[group] = total = self._bytes[group]
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

    def reset_chunk_size(self, group: int) -> None:
        """Let the chunks of a released group start with the smallest size again."""
        self._next_sizes[group] = MIN_CHUNK
        self.headers[group, POOLED] = 0

    def mark_collected(self, group: int) -> None:
        """The group was just rewritten: it has no garbage."""
        self._bytes_at_gc[group] = self._bytes[group]
        self.gc_candidates.discard(group)

    def clear(self, groups: range) -> None:
        for group in groups:
            if self._chunk_rows[group][RECORDS]:
                self.free(self.release(group))
                header = self.headers[group]
                self.buckets.free(int(header[BUCKETS]), (int(header[MASK]) + 1) * BUCKET_WORDS * 8)
                self._new_index(group)

    def reset(self, groups: range) -> None:
        """Remove all records like `clear`, but let small groups keep their chunk and their index."""
        for group in groups:
            records, texts = self._chunk_rows[group]
            if len(records) != 1 or texts:
                self.clear(range(group, group + 1))
                continue
            header = self.headers[group]
            words = (int(header[MASK]) + 1) * BUCKET_WORDS
            ctypes.memset(int(header[BUCKETS]), 0, words * 8)
            header[ROOM] = self._index_capacity(words)
            header[RECORD_AT] = self.arena.base + int(self.chunks.rows[records[0], 2])

    @property
    def in_use(self) -> int:
        """Bytes of memory in use."""
        return self.arena.in_use + self.buckets.in_use
