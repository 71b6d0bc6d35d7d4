"""Room: memory that one thread uses again and again, for what lives until the next step.

What is freed and asked for anew costs page faults, and allocators keep more of it than anybody uses.
"""

from __future__ import annotations

import numpy as np

from scalein.storage.filesystem import PAGE, aligned_buffer


class Room:
    """Pieces of one area, as large as the steps so far needed. What has no room in it comes from elsewhere, once.

    Pieces live until the next step begins, also if only their addresses are known.
    """

    def __init__(self) -> None:
        self._area = aligned_buffer(0)
        self._others: list[np.ndarray] = []
        self._used = 0

    @property
    def size_bytes(self) -> int:
        return len(self._area) + sum(map(len, list(self._others)))

    def begin(self) -> None:
        """The next step begins: the pieces of the last may be overwritten."""
        self._others.clear()
        if self._used > len(self._area):
            self._area = aligned_buffer(0)  # goes before the larger one comes
            self._area = aligned_buffer(self._used + self._used // 8)
        self._used = 0

    def bytes(self, size: int) -> np.ndarray:
        """So many bytes from the beginning of a page on, their content anything."""
        start = self._used
        self._used += -(-size // PAGE) * PAGE
        if self._used <= len(self._area):
            return self._area[start : start + size]
        self._others.append(aligned_buffer(size))
        return self._others[-1]

    def words(self, count: int) -> np.ndarray:
        """So many words of 64 bits, their content anything."""
        return self.bytes(8 * count).view(np.uint64)
