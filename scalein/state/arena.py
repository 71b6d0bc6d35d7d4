"""Arena: one reserved address range, cut into segments; key groups take chunks of it and give them back.

Invariant: an address is an offset from the range's start, for as long as the store is open. A chunk lies in one
segment and has one owner. A chunk that was given back while a snapshot copies its segment, or while the index of a
snapshot is made from records in memory, is not used again before that is done.

Threads: chunks are taken, given back and pinned under the lock of the table; the copier only clears `copying`.
"""

from __future__ import annotations

from collections import defaultdict
from heapq import heappop, heappush

import numpy as np

from scalein.errors import ScaleinError
from scalein.layout import PAGE_BYTES
from scalein.memory import HUGE, address, forget, reserve

SEGMENT_BYTES = 16 << 20
SPACE_BYTES = 1 << 38
LEAST_CHUNK = PAGE_BYTES
MOST_CHUNK = 256 << 10


class _Free:
    """Free chunks of one size: the first goes first."""

    def __init__(self) -> None:
        self.offsets: set[int] = set()  # whoever removes one here leaves it in the heap
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
    """Chunks of powers of two between a page and a segment. Free ones that make a larger one, up to `whole`, become it.

    So groups that grow, and want larger chunks than before, find those that they once had. The first free chunk is
    taken, so the last ones become free together, and whole huge pages go back to the system. Holes would break them up:
    a store of 57 MB on small pages waits for the page table at every other row.
    """

    def __init__(self, segment_bytes: int = SEGMENT_BYTES, space_bytes: int = SPACE_BYTES,
                 whole: int = LEAST_CHUNK) -> None:
        self.memory = reserve(space_bytes)
        self.base = address(self.memory)
        self.segment_bytes = segment_bytes
        self.shift = segment_bytes.bit_length() - 1
        count = len(self.memory) >> self.shift
        self.dirty = np.zeros(count, np.int64)  # segments that changed since they were last copied
        self.copying = np.zeros(count, np.int64)
        self.any_copying = np.zeros(1, np.int64)
        self.in_use = 0  # bytes of chunks
        self._at = LEAST_CHUNK  # address 0 means "empty" in the index
        self._whole = whole
        self._free: dict[int, _Free] = defaultdict(_Free)  # by size
        self._forgotten: dict[int, _Free] = defaultdict(_Free)  # free as well, but taking no memory
        self._forgotten_bytes = 0
        self.pinned = self.unpinned = 0  # snapshots that have asked that chunks stay, and those that need them no more
        self._waiting: list[tuple[int, int, int]] = []  # offset, size, the snapshots that were pinned

    @property
    def touched(self) -> int:
        """Bytes that may be in memory: all that were ever used, but for those that went back to the system."""
        return self._at - self._forgotten_bytes

    def trim(self, size: int, must: int) -> None:
        """Give free memory back to the system, the last first: so many bytes if there are as many whole huge pages
        (segments, if these are smaller); where there are not, `must` bytes in pieces.
        """
        whole = min(self.segment_bytes, HUGE)
        if self.touched - self.in_use < whole and must <= 0:
            return
        before = self._forgotten_bytes
        found: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for chunk, free in self._free.items():
            for offset in free.offsets:
                found[offset // whole].append((offset, chunk))
        places = sorted(found, reverse=True)
        for is_whole, wanted in ((True, size), (False, must)):
            for place in places:
                if self._forgotten_bytes - before >= wanted:
                    break
                if (sum(chunk for _, chunk in found[place]) == whole) == is_whole and not self._forget(found[place]):
                    return

    def _forget(self, chunks: list[tuple[int, int]]) -> bool:
        for offset, chunk in chunks:
            if not forget(self.base + offset, chunk):
                return False
            self._free[chunk].offsets.remove(offset)
            self._forgotten[chunk].add(offset)
            self._forgotten_bytes += chunk
        return True

    @property
    def segments(self) -> int:
        """How many segments have been begun."""
        return (self._at - 1 >> self.shift) + 1

    def used(self, segments: np.ndarray) -> np.ndarray:
        """Bytes of segments that may hold anything: whole pages, as chunks are."""
        used: np.ndarray = np.minimum(self.segment_bytes, self._at - (segments << self.shift))
        return used

    def take(self, size: int) -> int:
        """The offset of a chunk; its content is anything."""
        if self._waiting:
            offset, _, pinned = self._waiting[0]  # the one that waits longest
            if not self._is_needed(offset, pinned):
                self._settle()
        free = self._free[size]
        larger = size
        while not free and larger < self._whole:  # halves of a larger one
            larger *= 2
            if self._free[larger]:
                first = self._free[larger].pop()
                while larger > size:
                    larger //= 2
                    self._free[larger].add(first + larger)
                free.add(first)
        if not free and self._forgotten[size]:
            free.add(self._forgotten[size].pop())
            self._forgotten_bytes -= size
        while not free and self._at + size > (self._at >> self.shift) + 1 << self.shift:
            self._finish_segment()  # what is left of the segment is too small
        if not free and self._at & size - 1:  # chunks of the smaller sizes up to the next multiple
            self._fill_up(-self._at & size - 1)
        self.in_use += size
        if free:
            return free.pop()
        if self._at + size > len(self.memory):
            raise ScaleinError("the store needs more address space than this process may have",
                               found=f"{len(self.memory) >> 20} MiB", hint="give it a smaller memory= budget")
        offset = self._at
        self._at += size
        return offset

    def _finish_segment(self) -> None:
        self._fill_up(-self._at & self.segment_bytes - 1)

    def _fill_up(self, size: int) -> None:
        """Turn the next bytes into free chunks."""
        end = self._at + size
        while self._at < end:
            step = min(self._at & -self._at, 1 << (end - self._at).bit_length() - 1, MOST_CHUNK)
            self._free[step].add(self._at)
            self._at += step

    def give_back(self, offset: int, size: int) -> None:
        self.in_use -= size
        self._free_unless_needed(offset, size, self.pinned)

    def _is_needed(self, offset: int, pinned: int) -> bool:
        return pinned > self.unpinned or bool(self.copying[offset >> self.shift])

    def _free_unless_needed(self, offset: int, size: int, pinned: int) -> None:
        if self._is_needed(offset, pinned):
            self._waiting.append((offset, size, pinned))
        else:
            self._add_free(offset, size)

    def _add_free(self, offset: int, size: int) -> None:
        while size < self._whole and offset ^ size in self._free[size].offsets:
            self._free[size].offsets.remove(offset ^ size)
            offset &= ~size
            size *= 2
        self._free[size].add(offset)

    def _settle(self) -> None:
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            self._free_unless_needed(*one)


class Buckets:
    """Zeroed memory for index tables, whose sizes are powers of two. Free ones that make a larger one become it.

    None goes back to the system: that would break huge pages up, and every row looks into a table. Tables grow at about
    the same time, so what one of them leaves another takes.
    """

    def __init__(self, space_bytes: int = SPACE_BYTES >> 2) -> None:
        self.memory = reserve(space_bytes)
        self.base = address(self.memory)
        self._free: dict[int, set[int]] = defaultdict(set)  # offsets by size, each a multiple of it
        self.touched = 0  # bytes from the start; what follows is zero
        self.in_use = 0

    def take(self, size: int) -> int:
        """The address of zeroed bytes."""
        self.in_use += size
        larger = min((free for free, some in self._free.items() if some and free >= size), default=0)
        if not larger:
            return self.base + self._new(size)
        at = self._free[larger].pop()
        while larger > size:
            larger //= 2
            self._free[larger].add(at + larger)
        self.memory[at : at + size] = 0
        return self.base + at

    def _new(self, size: int) -> int:
        at = -(-self.touched // size) * size
        if at + size > len(self.memory):
            raise ScaleinError("the index needs more address space than this process may have",
                               found=f"{len(self.memory) >> 20} MiB", hint="give the store a smaller memory= budget")
        while self.touched < at:
            step = self.touched & -self.touched
            self._add_free(self.touched, step)
            self.touched += step
        self.touched += size
        return at

    def give_back(self, place: int, size: int) -> None:
        self.in_use -= size
        self._add_free(place - self.base, size)

    def _add_free(self, at: int, size: int) -> None:
        while at ^ size in self._free[size]:
            self._free[size].remove(at ^ size)
            at &= ~size
            size *= 2
        self._free[size].add(at)
