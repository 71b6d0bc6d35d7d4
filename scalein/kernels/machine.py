"""What this machine's memory can do: the bound of most scans, and what `explain` and `doctor` measure against."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

COPY_BYTES = 256 << 20  # far beyond L2, and beyond one core's share of most L3s


def copy_bandwidth(threads: int = 1, size_bytes: int = COPY_BYTES, repeats: int = 4) -> float:
    """Bytes a second that threads read and write when they copy large arrays, best of some repeats."""
    source = np.ones(size_bytes // 8, dtype=np.int64)
    target = np.empty_like(source)
    parts = list(zip(np.array_split(target, threads), np.array_split(source, threads), strict=True))
    times_s = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats + 1):  # the first one also faults the target's pages in
            start = time.perf_counter()
            list(pool.map(lambda part: np.copyto(*part), parts))  # numpy lets go of the GIL while it copies
            times_s.append(time.perf_counter() - start)
    return 2 * source.nbytes / min(times_s[1:])
