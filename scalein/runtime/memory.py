"""Memory for kernels: arrays for small things, anonymous maps on huge pages for large ones.

Huge pages spare a table of hundreds of megabytes a hundred thousand page faults. They are asked for
from the second 2 MiB on, so that a small result does not pay for zeroing a whole one.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

HUGE = 2 << 20
_NORESERVE = 0x4000 if hasattr(mmap, "MAP_NORESERVE") is False else mmap.MAP_NORESERVE


def allocate(size: int) -> np.ndarray:
    """At least one byte of memory, zeroed if it is large, aligned to a cache line."""
    if size < 2 * HUGE:
        raw = np.empty(size + 64, np.uint8)
        start = -raw.ctypes.data % 64
        return raw[start : start + max(1, size)]
    return _mapped(size, reserve=True)


def reserve(size: int) -> np.ndarray:
    """Address space that becomes memory as it is touched; less than asked for where a limit says so."""
    while True:
        try:
            return _mapped(size, reserve=False)
        except (OSError, ValueError, OverflowError, MemoryError):
            size //= 2
            if size < HUGE:
                raise


def _mapped(size: int, reserve: bool) -> np.ndarray:
    size = (size + HUGE - 1) // HUGE * HUGE
    if os.name != "posix":
        return np.zeros(size, np.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0 if reserve else _NORESERVE)
    area = mmap.mmap(-1, size, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            area.madvise(mmap.MADV_HUGEPAGE, 0 if reserve else min(HUGE, size - HUGE), size if reserve else size - min(HUGE, size - HUGE))
        except OSError:
            pass  # a kernel without huge pages
    return np.frombuffer(area, np.uint8)


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)
