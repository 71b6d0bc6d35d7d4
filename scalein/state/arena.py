"""Arena: one reserved address range, cut into segments; key groups take chunks of it and give them back.

Invariant: an address is an offset from the range's start, for as long as the store is open. A chunk lies in one
segment and has one owner. A chunk that was given back while a snapshot copies its segment is not used again before
that is done.

Threads: chunks are taken and given back under the lock of the table; the copier only clears `copying`.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from scalein.errors import ScaleinError
from scalein.layout import PAGE_BYTES
from scalein.memory import address, forget, reserve

SEGMENT_BYTES = 16 << 20
SPACE_BYTES = 1 << 38
LEAST_CHUNK = PAGE_BYTES
MOST_CHUNK = 256 << 10


class Arena:
    """Chunks of powers of two between a page and a segment. Free ones that make a larger one, up to `whole`, become it.

    So groups that grow, and want larger chunks than before, find those that they once had.
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
        self._free: dict[int, dict[int, None]] = defaultdict(dict)  # by size; the last that came goes first
        self._forgotten: dict[int, list[int]] = defaultdict(list)  # free as well, but taking no memory
        self._forgotten_bytes = 0
        self._waiting: list[tuple[int, int]] = []

    @property
    def touched(self) -> int:
        """Bytes that may be in memory: all that were ever used, but for those that went back to the system."""
        return self._at - self._forgotten_bytes

    def trim(self, size: int) -> None:
        """Give free chunks back to the system, so many bytes of them if there are as many."""
        for chunk, free in self._free.items():
            while free and size > 0:
                offset, _ = free.popitem()
                if not forget(self.base + offset, chunk):
                    free[offset] = None
                    return
                self._forgotten[chunk].append(offset)
                self._forgotten_bytes += chunk
                size -= chunk

    @property
    def segments(self) -> int:
        """How many segments have been begun."""
        return (self._at - 1 >> self.shift) + 1

    def used(self, segment: int) -> int:
        """Bytes of a segment that may hold anything."""
        return min(self.segment_bytes, self._at - (segment << self.shift))

    def take(self, size: int) -> int:
        """The offset of a chunk; its content is anything."""
        if self._waiting:
            self._settle()
        free = self._free[size]
        larger = size
        while not free and larger < self._whole:  # halves of a larger one
            larger *= 2
            if self._free[larger]:
                first, _ = self._free[larger].popitem()
                while larger > size:
                    larger //= 2
                    self._free[larger][first + larger] = None
                free[first] = None
        if not free and self._forgotten[size]:
            free[self._forgotten[size].pop()] = None
            self._forgotten_bytes -= size
        while not free and self._at + size > (self._at >> self.shift) + 1 << self.shift:
            self._finish_segment()  # what is left of the segment is too small
        if not free and self._at & size - 1:  # chunks of the smaller sizes up to the next multiple
            self._fill_up(-self._at & size - 1)
        self.in_use += size
        if free:
            return free.popitem()[0]
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
            self._free[step][self._at] = None
            self._at += step

    def give_back(self, offset: int, size: int) -> None:
        self.in_use -= size
        if self.copying[offset >> self.shift]:
            self._waiting.append((offset, size))
        else:
            self._add_free(offset, size)

    def _add_free(self, offset: int, size: int) -> None:
        while size < self._whole and offset ^ size in self._free[size]:
            del self._free[size][offset ^ size]
            offset &= ~size
            size *= 2
        self._free[size][offset] = None

    def _settle(self) -> None:
        waiting, self._waiting = self._waiting, []
        for offset, size in waiting:
            if self.copying[offset >> self.shift]:
                self._waiting.append((offset, size))
            else:
                self._add_free(offset, size)


class Buckets:
    """Zeroed memory for index tables, whose sizes are powers of two. Whole pages go back to the system."""

    def __init__(self, space_bytes: int = SPACE_BYTES >> 2) -> None:
        self.memory = reserve(space_bytes)
        self.base = address(self.memory)
        self._at = 0
        self._free: dict[int, list[int]] = defaultdict(list)
        self._forgotten: set[int] = set()  # free tables that take no memory, and are zero
        self._forgotten_bytes = 0
        self.in_use = 0

    @property
    def touched(self) -> int:
        return self._at - self._forgotten_bytes

    def take(self, size: int) -> int:
        """The address of zeroed bytes."""
        if size < PAGE_BYTES and not self._free[size]:  # small ones share pages
            first = self._new(PAGE_BYTES)
            self._free[size] = [first + at for at in range(0, PAGE_BYTES, size)]
        self.in_use += size
        free = self._free[size]
        if not free:
            return self.base + self._new(size)
        at = free.pop()
        if at in self._forgotten:
            self._forgotten.discard(at)
            self._forgotten_bytes -= size
        else:
            self.memory[at : at + size] = 0
        return self.base + at

    def _new(self, size: int) -> int:
        if self._at + size > len(self.memory):
            raise ScaleinError("the index needs more address space than this process may have",
                               found=f"{len(self.memory) >> 20} MiB", hint="give the store a smaller memory= budget")
        at = self._at
        self._at += size
        return at

    def give_back(self, place: int, size: int) -> None:
        self.in_use -= size
        at = place - self.base
        self._free[size].append(at)
        if size >= PAGE_BYTES and forget(place, size):
            self._forgotten.add(at)
            self._forgotten_bytes += size
