"""Memory for kernels: arrays for small things, anonymous maps on huge pages for large ones.

Huge pages spare a table of hundreds of megabytes a hundred thousand page faults. Zeroing new pages
was a third of the time of a large aggregation, so maps that are no longer used are pooled for the
next request, up to a limit, and marked MADV_FREE: the system may reclaim their pages at any time. While a run with a
small memory limit is active, fewer are pooled (`keep_at_most`).

How much a run may take: `Options.memory` (no limit by default). The operators of a bounded run share a `MemoryAccount`;
a job divides its memory in `jobs/spec.py` (`Shares`), a store in `state/budget.py`.
"""

from __future__ import annotations

import _thread
import ctypes
import mmap
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from scalein.errors import ScaleinError

HUGE = 2 << 20
MIN_MAPPED_BYTES = 2 * HUGE
MAX_POOLED_BYTES = 1 << 30
SHARES = 16  # a reservation takes at most this share of the remaining address space
_DONTNEED = getattr(mmap, "MADV_DONTNEED", 4)
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)

# Limits of a process that address space counts for, and where its use is among the numbers of /proc/self/statm.
_LIMITS = [(resource.RLIMIT_AS, 0), (resource.RLIMIT_DATA, 5)]

_lock = threading.Lock()
_free: dict[int, list[mmap.mmap]] = {}
_free_bytes = 0
_max_pooled: list[int] = [MAX_POOLED_BYTES]  # limits of the active runs; the least one applies


def allocate(size: int) -> np.ndarray:
    """Memory of at least this size, aligned to a cache line. Its content is anything."""
    if size < MIN_MAPPED_BYTES or not hasattr(mmap, "MAP_ANONYMOUS"):
        try:
            raw = np.empty(size + 64, np.uint8)
        except MemoryError as error:
            raise _too_much(size) from error
        start = -raw.ctypes.data % 64
        return raw[start : start + max(1, size)]
    rounded = _size_class(size)
    return _view(_take(rounded) or _new(rounded), rounded)


def reserve(size: int, huge: bool = True) -> np.ndarray:
    """Address space that becomes zeroed memory as it is touched; less than asked for where a limit says so.

    Under a limit of the process it is a small share of what is left: many ask, and all need memory besides. A `huge`
    page makes the first access wait while 2 MiB are found and zeroed: up to 60 ms.
    """
    left = _allowed()
    if left is not None:
        size = max(MIN_MAPPED_BYTES, min(size, left // SHARES // HUGE * HUGE))
    while True:
        try:
            # The first pages stay small, so that a table of a few records does not pay for 2 MiB.
            return np.frombuffer(_map(size, _NORESERVE, huge_from=HUGE if huge else size), np.uint8)
        except (OSError, ValueError, OverflowError) as error:
            if size // 2 < MIN_MAPPED_BYTES and not _forget():
                raise _too_much(size) from error
            size = max(MIN_MAPPED_BYTES, size // 2)


def forget(place: int, size: int) -> bool:
    """Give pages of reserved memory to the system; they are zero when they are touched again. Whether it took them."""
    if _libc is None:
        return False
    return bool(_libc.madvise(ctypes.c_void_p(place), ctypes.c_size_t(size), _DONTNEED) == 0)


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def _size_class(size: int) -> int:
    """The size rounded up to an eighth of its power of two, so that maps can be used again."""
    step = max(HUGE, 1 << (size.bit_length() - 4))
    return -(-size // step) * step


def _allowed() -> int | None:
    """How much more address space the process may have; None if nothing limits it."""
    left = []
    for limit, field in _LIMITS:
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY:
            with suppress(OSError), open("/proc/self/statm", "rb") as file:  # a system without it: the halving is left
                left.append(max(0, most - int(file.read().split()[field]) * mmap.PAGESIZE))
    return min(left, default=None)


class MemoryAccount:
    """What a run may hold, and what its operators have reserved of it: a tree whose root has the limit, in bytes.

    An operator reserves what it holds and will need to process that, and spills when the account is under pressure.
    """

    def __init__(self, limit: int | None = None, parent: MemoryAccount | None = None) -> None:
        self._limit, self._parent, self._used = limit, parent, 0

    def child(self) -> MemoryAccount:
        """The account of one operator."""
        return MemoryAccount(self._limit, self)

    @property
    def limit(self) -> int | None:
        return self._limit

    @property
    def used(self) -> int:
        """What is reserved here and in all children."""
        return self._used

    @property
    def is_under_pressure(self) -> bool:
        """Whether the run has reserved more than it may hold."""
        root = self if self._parent is None else self._parent
        return root._limit is not None and root._used > root._limit

    def reserve(self, size: int) -> None:
        with _lock:
            self._used += size
        if self._parent is not None:
            self._parent.reserve(size)

    def release(self, size: int | None = None) -> None:
        """Give back what was reserved; all of it, if no size is given."""
        self.reserve(-self._used if size is None else -size)


@contextmanager
def keep_at_most(size: int | None) -> Iterator[None]:
    """Pool at most this many bytes of unused maps; None sets no limit."""
    size = MAX_POOLED_BYTES if size is None else size
    _max_pooled.append(size)
    if _free_bytes > size:
        _forget()
    try:
        yield
    finally:
        _max_pooled.remove(size)


def _new(size: int) -> mmap.mmap:
    try:
        return _map(size)
    except (OSError, ValueError, OverflowError):
        _forget()
    try:
        return _map(size)
    except (OSError, ValueError, OverflowError) as error:
        raise _too_much(size) from error


def _forget() -> bool:
    """Release the pooled maps; false if there were none."""
    global _free_bytes
    with _lock:
        had_some = bool(_free_bytes)
        gone = list(_free.values())
        _free.clear()
        _free_bytes = 0
    del gone
    return had_some


def _too_much(size: int) -> ScaleinError:
    return ScaleinError("the data of this flow needs more memory than this process may use",
                        found=f"{max(1, size >> 20)} MiB more",
                        hint="filter or aggregate earlier, or raise the limit (ulimit -v)")


def _map(size: int, flags: int = 0, huge_from: int = 0) -> mmap.mmap:
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags)
    if hasattr(mmap, "MADV_HUGEPAGE") and huge_from < size:
        with suppress(OSError):  # a kernel without huge pages
            area.madvise(mmap.MADV_HUGEPAGE, huge_from, size - huge_from)
    return area


class _Lease:
    """Gives a map back when the last array over it is gone."""

    def __init__(self, area: mmap.mmap) -> None:
        self._area = area

    def __del__(self) -> None:
        try:
            _give_back(self._area)
        except KeyboardInterrupt:  # Python drops what a finalizer raises: hand Ctrl-C on to the main thread
            _thread.interrupt_main()


def _view(area: mmap.mmap, size: int) -> np.ndarray:
    # A ctypes array is the one buffer that can carry a lease of its own, apart from the map's life.
    view: Any = (ctypes.c_uint8 * size).from_buffer(area)
    view.lease = _Lease(area)
    array: np.ndarray = np.frombuffer(view, np.uint8)
    return array


def _take(size: int) -> mmap.mmap | None:
    global _free_bytes
    with _lock:
        areas = _free.get(size)
        if not areas:
            return None
        _free_bytes -= size
        return areas.pop()


def _give_back(area: mmap.mmap) -> None:
    global _free_bytes
    size = len(area)
    if not _lock.acquire(blocking=False):
        return  # a garbage collection inside of this module: let the map go
    try:
        if _free_bytes + size <= min(_max_pooled):
            if hasattr(mmap, "MADV_FREE"):
                area.madvise(mmap.MADV_FREE)
            _free.setdefault(size, []).append(area)
            _free_bytes += size
    except (OSError, ValueError):
        pass
    finally:
        _lock.release()
