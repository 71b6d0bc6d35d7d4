"""FileSystem: the interface through which the store reads and writes files. Tests replace it by a simulated disk.

Invariant: a byte survives a power cut once `Output.sync` returned after it was written; a name once `sync_directory`
returned after it was created, renamed or removed. Nothing else is promised, and the store assumes nothing else. After a
`sync` that raised, the file must be discarded: the kernel may have dropped the pages that it could not write.

A call completes or raises: `StoreFailed` with the system's reason, `Damaged` if a file ends before the requested bytes.

Threads: every method may be called from any thread, but an `Output` is used by one thread at a time.
"""

from __future__ import annotations

import errno
import mmap
import os
from typing import Protocol

import numpy as np

from scalein.errors import Damaged, StoreFailed

MAPPED_BYTES = 256 << 10  # buffers of at least this size are mapped, so that freeing them returns them to the system
PAGE = 4096  # alignment of addresses, offsets and sizes that O_DIRECT needs, on every disk that we know
LOCK = "LOCK"  # name of the lock file of a directory
CHECKPOINT_LOCK = "lock"  # of that which a running job holds, in its checkpoint

Data = memoryview | np.ndarray  # contiguous


class Output(Protocol):
    """A new file that is being written."""

    def write(self, offset: int, data: Data) -> None:
        """Write all of `data` at `offset`; page-aligned memory is written without a copy."""

    def sync(self) -> None:
        """Make everything written so far durable, and truncate the file after the last byte written."""

    def close(self) -> None:
        """Close the file; bytes that were not synced may be lost."""


class Input(Protocol):
    """A file that is read. It stays readable after it is removed."""

    @property
    def size(self) -> int:
        """Size in bytes when it was opened."""

    def read(self, offset: int, size: int) -> np.ndarray:
        """`size` bytes in new, page-aligned memory."""

    def read_into(self, offset: int, into: memoryview, direct: bool = False) -> None:
        """Fill `into`; `direct` bypasses the page cache where alignment allows it."""

    @property
    def direct_fd(self) -> int:
        """A descriptor that bypasses the page cache, for `aio`; -1 if there is none."""

    def prefetch(self, offset: int, size: int) -> None:
        """Start reading into the page cache, without waiting."""

    def drop_cache(self, offset: int = 0, size: int = 0) -> None:
        """Drop the bytes from the page cache; size 0 means up to the end."""

    def close(self) -> None:
        """Close the file."""


class Lock(Protocol):
    """A lock that is held."""

    def release(self) -> None: ...


class FileSystem(Protocol):
    """The files of one directory, by name."""

    def names(self) -> list[str]:
        """All names, sorted."""

    def size(self, name: str) -> int:
        """Size of a file in bytes; 0 if there is none."""

    def link_from(self, other: FileSystem, name: str) -> None:
        """Add a file of another directory under the same name, durably: a hard link, or a copy where links fail."""

    def create(self, name: str, size_bytes: int = 0) -> Output:
        """A new, empty file with space preallocated. An older file of that name is removed, not overwritten."""

    def open(self, name: str) -> Input: ...

    def rename(self, old: str, new: str) -> None:
        """Rename a file atomically; a file that has the new name is replaced."""

    def remove(self, name: str) -> None: ...

    def sync_directory(self) -> None:
        """Make created, renamed and removed names durable."""

    def lock(self) -> Lock:
        """Take the exclusive right to write; `StoreFailed` if another process holds it."""

    def path_of(self, name: str) -> str:
        """The path of a file, as messages show it."""


def aligned_buffer(size_bytes: int) -> np.ndarray:
    """New page-aligned memory, uninitialised. Large buffers go back to the system when they are freed: memory that
    malloc caches would be outside of every budget.
    """
    if size_bytes >= MAPPED_BYTES:
        try:
            return np.frombuffer(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
        except OSError as error:  # not the failure of a file: raise what malloc would have raised
            raise MemoryError(f"{size_bytes} bytes") from error
    area = np.empty(size_bytes + PAGE, np.uint8)
    start = -int(area.ctypes.data) % PAGE
    return area[start : start + size_bytes]


def flat_bytes(data: Data) -> memoryview:
    """The bytes of a contiguous buffer."""
    array = np.frombuffer(data, np.uint8) if isinstance(data, memoryview) else data.reshape(-1).view(np.uint8)
    return array.data


def store_failed(what: str, file: str, error: OSError, offset: int | None = None) -> StoreFailed:
    """The error for a call that the system refused, with its reason."""
    number = error.errno or 0
    reason = os.strerror(number) if number else str(error)
    return StoreFailed(f"{what}: {reason}", file=file, offset=offset, error=errno.errorcode.get(number),
                       hint=_HINTS.get(number))  # fmt: skip


def truncated(file: str, offset: int, size: int, found: int) -> Damaged:
    """The error for a file that is shorter than what was written."""
    return Damaged("a file of the store ends too early", file=file, offset=offset, needs=f"{size} bytes there",
                   found=f"{found} bytes in the file")  # fmt: skip


_HINTS = {
    errno.ENOSPC: "free space on the disk; the last snapshot is intact",
    errno.EDQUOT: "free space in the quota; the last snapshot is intact",
    errno.EIO: "the disk or its connection fails; see the system's log",
    errno.EROFS: "open the store with readonly=True",
    errno.EACCES: "open the store with readonly=True",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}
