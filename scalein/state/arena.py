"""The store's memory: the arena of record and text chunks, the allocator of index tables, and reusable workspaces.

The arena is one reserved address range, divided into segments; key groups allocate chunks of it and free them.

Invariant: an address stays valid for as long as the store is open. A chunk lies in one segment and has one owner. A
chunk that is freed while a snapshot copies its segment, or while a snapshot's index is built from records in memory, is
not reused before that is done.

Threads: chunks are allocated, freed and pinned under the lock of the memtable; the segment copier only clears
`copying`. A workspace is used by one thread at a time.
"""

from __future__ import annotations

from collections import defaultdict
from heapq import heappop, heappush

import numpy as np

from scalein.errors import ScaleinError
from scalein.layout import PAGE_BYTES
from scalein.memory import HUGE, address, forget, reserve
from scalein.storage.filesystem import PAGE, aligned_buffer

SEGMENT_BYTES = 16 << 20
SPACE_BYTES = 1 << 38
MIN_CHUNK = PAGE_BYTES
MAX_CHUNK = 256 << 10


class _FreeList:
    """Free chunks of one size, lowest offset first."""

    def __init__(self) -> None:
        self.offsets: set[int] = set()  # an offset that is removed here stays in the heap
        self._heap: list[int] = []

    def __bool__(self) -> bool:
        return bool(self.offsets)

    def add(self, offset: int) -> None:
        self.offsets.add(offset)
        heappush(self._heap, offset)
        if len(self._heap) > 2 * len(self.offsets) + 64:
            self._heap = sorted(self.offsets)

    def pop(self) -> int:
        while (offset := heappop(self._heap)) not in self.offsets:
            pass
        self.offsets.remove(offset)
        return offset


class Arena:
    """A buddy allocator of chunks, whose sizes are powers of two between a page and a segment.

    Free buddies coalesce up to `coalesced` bytes, so that groups which grow and need larger chunks can reuse the
    smaller ones that they freed. The lowest free chunk is allocated first, so the highest ones become free together,
    and whole huge pages go back to the system. Holes would break huge pages up: a store of 57 MB on small pages has a
    TLB miss at every other row.
    """

    def __init__(self, segment_bytes: int = SEGMENT_BYTES, space_bytes: int = SPACE_BYTES,
                 coalesced: int = MIN_CHUNK) -> None:
        self.memory = reserve(space_bytes)
        self.base = address(self.memory)
        self.segment_bytes = segment_bytes
        self.shift = segment_bytes.bit_length() - 1
        count = len(self.memory) >> self.shift
        self.dirty = np.zeros(count, np.int64)  # segments that changed since their last copy
        self.copying = np.zeros(count, np.int64)
        self.any_copying = np.zeros(1, np.int64)
        self.in_use = 0  # bytes of allocated chunks
        self._end = MIN_CHUNK  # of the part that was ever used; offset 0 means "empty" in the index
        self._coalesced = coalesced
        self._free: dict[int, _FreeList] = defaultdict(_FreeList)  # by size
        self._decommitted: dict[int, _FreeList] = defaultdict(_FreeList)  # free as well, but without memory
        self._decommitted_bytes = 0
        self.pinned = self.unpinned = 0  # numbers of the newest snapshot that pinned all chunks, and that unpinned them
        self._deferred: list[tuple[int, int, int]] = []  # offset, size, newest pin when it was freed

    @property
    def committed_bytes(self) -> int:
        """Bytes that may be in memory: all that were ever used, without those that went back to the system."""
        return self._end - self._decommitted_bytes

    def trim(self, size: int, required: int) -> None:
        """Return free memory to the system, highest addresses first: `size` bytes as far as there are whole free huge
        pages (segments, if these are smaller), and at least `required` bytes in smaller pieces.
        """
        unit = min(self.segment_bytes, HUGE)
        if self.committed_bytes - self.in_use < unit and required <= 0:
            return
        before = self._decommitted_bytes
        by_unit: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for chunk, free in self._free.items():
            for offset in free.offsets:
                by_unit[offset // unit].append((offset, chunk))
        units = sorted(by_unit, reverse=True)
        for is_whole, wanted in ((True, size), (False, required)):
            for number in units:
                if self._decommitted_bytes - before >= wanted:
                    break
                chunks = by_unit[number]
                if (sum(chunk for _, chunk in chunks) == unit) == is_whole and not self._decommit(chunks):
                    return

    def _decommit(self, chunks: list[tuple[int, int]]) -> bool:
        for offset, chunk in chunks:
            if not forget(self.base + offset, chunk):
                return False
            self._free[chunk].offsets.remove(offset)
            self._decommitted[chunk].add(offset)
            self._decommitted_bytes += chunk
        return True

    @property
    def segments(self) -> int:
        """The number of segments that were ever used."""
        return (self._end - 1 >> self.shift) + 1

    def used(self, segments: np.ndarray) -> np.ndarray:
        """Bytes of each segment that may hold data: whole pages, as chunks are."""
        used: np.ndarray = np.minimum(self.segment_bytes, self._end - (segments << self.shift))
        return used

    def allocate(self, size: int) -> int:
        """The offset of an uninitialised chunk."""
        if self._deferred:
            offset, _, pinned = self._deferred[0]  # the oldest
            if not self._is_pinned(offset, pinned):
                self._free_deferred()
        free = self._free[size]
        larger = size
        while not free and larger < self._coalesced:  # split a larger one
            larger *= 2
            if self._free[larger]:
                first = self._free[larger].pop()
                while larger > size:
                    larger //= 2
                    self._free[larger].add(first + larger)
                free.add(first)
        if not free and self._decommitted[size]:
            free.add(self._decommitted[size].pop())
            self._decommitted_bytes -= size
        while not free and self._end + size > (self._end >> self.shift) + 1 << self.shift:
            self._finish_segment()  # the rest of the segment is too small
        if not free and self._end & size - 1:  # smaller chunks up to the next multiple of the size
            self._add_free_chunks(-self._end & size - 1)
        self.in_use += size
        if free:
            return free.pop()
        if self._end + size > len(self.memory):
            raise ScaleinError("the store needs more address space than this process may have",
                               found=f"{len(self.memory) >> 20} MiB", hint="give it a smaller memory= budget")
        offset = self._end
        self._end += size
        return offset

    def _finish_segment(self) -> None:
        self._add_free_chunks(-self._end & self.segment_bytes - 1)

    def _add_free_chunks(self, size: int) -> None:
        """Turn the next `size` bytes after the used part into free chunks."""
        end = self._end + size
        while self._end < end:
            step = min(self._end & -self._end, 1 << (end - self._end).bit_length() - 1, MAX_CHUNK)
            self._free[step].add(self._end)
            self._end += step

    def free(self, offset: int, size: int) -> None:
        self.in_use -= size
        self._free_unless_pinned(offset, size, self.pinned)

    def _is_pinned(self, offset: int, pinned: int) -> bool:
        return pinned > self.unpinned or bool(self.copying[offset >> self.shift])

    def _free_unless_pinned(self, offset: int, size: int, pinned: int) -> None:
        if self._is_pinned(offset, pinned):
            self._deferred.append((offset, size, pinned))
        else:
            self._add_free(offset, size)

    def _add_free(self, offset: int, size: int) -> None:
        while size < self._coalesced and offset ^ size in self._free[size].offsets:
            self._free[size].offsets.remove(offset ^ size)
            offset &= ~size
            size *= 2
        self._free[size].add(offset)

    def _free_deferred(self) -> None:
        deferred, self._deferred = self._deferred, []
        for chunk in deferred:
            self._free_unless_pinned(*chunk)


class BucketAllocator:
    """A buddy allocator of zeroed memory for hash index tables, whose sizes are powers of two.

    Nothing goes back to the system: that would break huge pages up, and every row probes a table. Tables grow at about
    the same time, so a table that one group frees is reused by another.
    """

    def __init__(self, space_bytes: int = SPACE_BYTES >> 2) -> None:
        self.memory = reserve(space_bytes)
        self.base = address(self.memory)
        self._free: dict[int, set[int]] = defaultdict(set)  # offsets by size, each a multiple of it
        self.committed_bytes = 0  # from the start; the memory after it is zero
        self.in_use = 0

    def allocate(self, size: int) -> int:
        """The address of zeroed bytes."""
        self.in_use += size
        larger = min((free for free, offsets in self._free.items() if offsets and free >= size), default=0)
        if not larger:
            return self.base + self._extend(size)
        offset = self._free[larger].pop()
        while larger > size:
            larger //= 2
            self._free[larger].add(offset + larger)
        self.memory[offset : offset + size] = 0
        return self.base + offset

    def _extend(self, size: int) -> int:
        offset = -(-self.committed_bytes // size) * size
        if offset + size > len(self.memory):
            raise ScaleinError("the index needs more address space than this process may have",
                               found=f"{len(self.memory) >> 20} MiB", hint="give the store a smaller memory= budget")
        while self.committed_bytes < offset:
            step = self.committed_bytes & -self.committed_bytes
            self._add_free(self.committed_bytes, step)
            self.committed_bytes += step
        self.committed_bytes += size
        return offset

    def free(self, address: int, size: int) -> None:
        self.in_use -= size
        self._add_free(address - self.base, size)

    def _add_free(self, offset: int, size: int) -> None:
        while offset ^ size in self._free[size]:
            self._free[size].remove(offset ^ size)
            offset &= ~size
            size *= 2
        self._free[size].add(offset)


class Workspace:
    """Buffers that one thread reuses step after step, carved from one area that grows to what a step needs.

    Allocating them anew would cost page faults, and malloc would cache more than is ever used. Buffers live until the
    next `reset`, even if only their addresses are kept.
    """

    def __init__(self) -> None:
        self._area = aligned_buffer(0)
        self._overflow: list[np.ndarray] = []  # buffers that do not fit into the area
        self._used = 0

    @property
    def size_bytes(self) -> int:
        return len(self._area) + sum(map(len, list(self._overflow)))

    def reset(self) -> None:
        """Start the next step: the buffers of the last one may be overwritten."""
        self._overflow.clear()
        if self._used > len(self._area):
            self._area = aligned_buffer(0)  # freed before the larger one is allocated
            self._area = aligned_buffer(self._used + self._used // 8)
        self._used = 0

    def byte_buffer(self, size: int) -> np.ndarray:
        """Page-aligned bytes, uninitialised."""
        start = self._used
        self._used += -(-size // PAGE) * PAGE
        if self._used <= len(self._area):
            return self._area[start : start + size]
        self._overflow.append(aligned_buffer(size))
        return self._overflow[-1]

    def word_buffer(self, count: int) -> np.ndarray:
        """Words of 64 bits, uninitialised."""
        return self.byte_buffer(8 * count).view(np.uint64)
