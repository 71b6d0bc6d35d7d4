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
from scalein.memory import address, reserve

SEGMENT_BYTES = 16 << 20
SPACE_BYTES = 1 << 38
LEAST_CHUNK = PAGE_BYTES
MOST_CHUNK = 256 << 10


class Arena:
    """Chunks of powers of two between a page and a segment."""

    def __init__(self, segment_bytes: int = SEGMENT_BYTES, space_bytes: int = SPACE_BYTES) -> None:
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
        self._free: dict[int, list[int]] = defaultdict(list)
        self._waiting: list[tuple[int, int]] = []

    @property
    def touched(self) -> int:
        """Bytes that were ever used, all of which may be in memory."""
        return self._at

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
            self._free[step].append(self._at)
            self._at += step

    def give_back(self, offset: int, size: int) -> None:
        self.in_use -= size
        if self.copying[offset >> self.shift]:
            self._waiting.append((offset, size))
        else:
            self._free[size].append(offset)

    def _settle(self) -> None:
        waiting, self._waiting = self._waiting, []
        for offset, size in waiting:
            if self.copying[offset >> self.shift]:
                self._waiting.append((offset, size))
            else:
                self._free[size].append(offset)


class Buckets:
    """Zeroed memory for index tables, whose sizes are powers of two."""

    def __init__(self, space_bytes: int = SPACE_BYTES >> 2) -> None:
        self._memory = reserve(space_bytes)
        self.base = address(self._memory)
        self._at = 0
        self._free: dict[int, list[int]] = defaultdict(list)
        self.in_use = 0

    @property
    def touched(self) -> int:
        return self._at

    def take(self, size: int) -> int:
        """The address of zeroed bytes."""
        self.in_use += size
        free = self._free[size]
        if free:
            at = free.pop()
            self._memory[at : at + size] = 0
            return self.base + at
        if self._at + size > len(self._memory):
            raise ScaleinError("the index needs more address space than this process may have",
                               found=f"{len(self._memory) >> 20} MiB", hint="give the store a smaller memory= budget")
        at = self._at
        self._at += size
        return self.base + at

    def give_back(self, place: int, size: int) -> None:
        self.in_use -= size
        self._free[size].append(place - self.base)
