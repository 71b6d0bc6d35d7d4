"""Measures what this machine can do, in well under a minute: `scalein calibrate`.

Every figure is the best, or the median, of several turns, so that other work on the machine disturbs little.
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

import numpy as np

from scalein.errors import SourceLoc, StoreFailed, here
from scalein.kernels.machine import copy_bandwidth, describe_cpu
from scalein.model.calibration import Calibration, SparkFigures
from scalein.options import granted_cores

BIGGEST = 1 << 28  # bytes of the greatest table that is probed, and of the file
PROBES = 1 << 18  # reads of a turn
TURNS = 5
WAKES = 400


def calibrate(folder: str | os.PathLike[str] | None = None, *, spark: bool = False, biggest: int | None = None,
              report: Callable[[str], None] = lambda text: None) -> Calibration:
    """The figures of this machine; files are written to `folder`, by default that of temporary files.

    >>> found = calibrate(biggest=1 << 16)
    >>> found.is_measured, found.cores >= 1, found.bandwidth_of(1) > 0
    (True, True, True)
    """
    at, cores, biggest = here(), granted_cores(), biggest or BIGGEST
    report("operations in the cache")
    operations = _operations()
    report(f"bandwidth of up to {cores} threads")
    size_bytes = max(1 << 16, biggest // 4)
    rates = [copy_bandwidth(threads, size_bytes=size_bytes, repeats=TURNS) for threads in _powers(cores)]
    bandwidth = tuple(zip(_powers(cores), accumulate(rates, max), strict=True))  # more threads deliver no less
    report("reads at random places")
    probes = tuple(_probes(biggest))
    report("the disk")
    read, write, sync_s = _disk(Path(tempfile.gettempdir() if folder is None else folder), biggest, at)
    report("waking threads")
    wake_s, wake_p99_s = _wakes()
    figures: SparkFigures | None = None
    if spark:
        report("Spark")
        from scalein.spark.calibrate import measure  # only this part needs pyspark

        figures = SparkFigures(**measure(at))
    return Calibration(describe_cpu(), cores, operations, bandwidth, probes, read, write, sync_s, wake_s, wake_p99_s,
                       figures)


def _powers(most: int) -> list[int]:
    """1, 2, 4, ... and `most`.

    >>> _powers(6)
    [1, 2, 4, 6]
    """
    return sorted({most, *(1 << power for power in range(most.bit_length()))})


def _operations() -> float:
    """Additions of 64-bit numbers a second, one thread, without a miss."""
    left, right = np.arange(2_048), np.arange(2_048)
    found = []
    for _ in range(4 * TURNS):
        started = time.thread_time()
        for _ in range(200):
            np.add(left, right, out=left)
        found.append(time.thread_time() - started)
    return 200 * len(left) / max(min(found), 1e-9)


def _probes(biggest: int) -> Iterator[tuple[int, float]]:
    """Seconds of a read at a random place, by the size of the table. Reads do not wait for each other, as in kernels.
    """
    dice = np.random.default_rng(1)
    sizes = [each for each in (1 << power for power in range(15, 40, 2)) if each < biggest]
    for size in (*sizes, biggest):
        table = np.ones(size // 8, np.int64)
        out = np.empty(PROBES, np.int64)
        found = []
        for _ in range(TURNS):
            places = dice.integers(0, len(table), PROBES)  # new ones: those of the last turn are in the cache
            started = time.thread_time()
            np.take(table, places, out=out, mode="wrap")  # else it makes a copy
            found.append(time.thread_time() - started)
        yield size, max(min(found), 1e-7) / PROBES


def _disk(folder: Path, size: int, at: SourceLoc) -> tuple[float, float, float]:
    """Bytes a second read and written past the cache, and the seconds of a small write with its sync."""
    block = mmap.mmap(-1, 1 << 20)  # aligned, as direct writes want it
    block.write(os.urandom(1 << 20))
    count = max(1, size >> 20)
    try:
        with tempfile.TemporaryDirectory(prefix="scalein-calibrate-", dir=folder) as place:
            path = os.path.join(place, "blocks")
            write_s = min(_write(path, block, count) for _ in range(2))
            read_s = min(_read(path, block, count) for _ in range(2))
            synced = []
            with open(os.path.join(place, "synced"), "wb", buffering=0) as file:
                for _ in range(4 * TURNS):
                    started = time.perf_counter()
                    file.write(b"x" * 4_096)
                    os.fsync(file.fileno())
                    synced.append(time.perf_counter() - started)
    except OSError as error:
        raise StoreFailed("the disk cannot be measured", at=at, file=folder, found=error,
                          hint="give a folder that can be written, with --folder") from error
    return (count << 20) / read_s, (count << 20) / write_s, statistics.median(synced)


def _write(path: str, block: mmap.mmap, count: int) -> float:
    """Seconds until so many blocks are on the disk."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    started = time.perf_counter()
    descriptor = _opened(path, flags)
    try:
        for _ in range(count):
            os.write(descriptor, block)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return max(time.perf_counter() - started, 1e-9)


def _read(path: str, block: mmap.mmap, count: int) -> float:
    descriptor = _opened(path, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fadvise"):  # where direct reads are refused
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        for _ in range(count):
            os.readv(descriptor, [block])
        return max(time.perf_counter() - started, 1e-9)
    finally:
        os.close(descriptor)


def _opened(path: str, flags: int) -> int:
    """A file, past the page cache where the file system can."""
    with suppress(OSError):
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
    return os.open(path, flags, 0o600)


def _wakes() -> tuple[float, float]:
    """Seconds until a thread that waits runs: the median, and what 1 in 100 exceeds."""
    asked, answered = threading.Semaphore(0), threading.Semaphore(0)
    found: list[float] = []
    started = [0.0]

    def wait() -> None:
        for _ in range(WAKES):
            asked.acquire()
            found.append(time.perf_counter() - started[0])
            answered.release()

    thread = threading.Thread(target=wait, name="scalein-calibrate", daemon=True)
    thread.start()
    for _ in range(WAKES):
        started[0] = time.perf_counter()
        asked.release()
        answered.acquire()
    thread.join()
    found.sort()
    return max(found[WAKES // 2], 1e-7), max(found[WAKES * 99 // 100], 1e-7)
