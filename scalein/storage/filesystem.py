"""The interface to file systems: files of one directory by name, and what its implementations share."""

from __future__ import annotations

import errno
import mmap
import os
from typing import Protocol

import numpy as np

from scalein.errors import Damaged, StoreFailed

MAPPED_BYTES = 256 << 10
PAGE = 4096  # what O_DIRECT wants of addresses, offsets and sizes, on every disk that we know
LOCK = "LOCK"

Data = memoryview | np.ndarray  # contiguous


class Output(Protocol):
    """A new file that is being written."""

    def write(self, offset: int, data: Data) -> None:
        """Write all of `data` at `offset`; from page-aligned memory it need not be copied."""

    def sync(self) -> None:
        """Make all that was written survive a power cut, and cut the file behind the last byte written."""

    def close(self) -> None:
        """Give the file back; what was not synced may be lost."""


class Input(Protocol):
    """A file that is read. It stays readable after it was removed."""

    @property
    def size(self) -> int:
        """Its bytes when it was opened."""

    def read(self, offset: int, size: int) -> np.ndarray:
        """That many bytes in new, page-aligned memory."""

    def read_into(self, offset: int, into: memoryview, direct: bool = False) -> None:
        """Fill `into`; `direct` goes past the page cache where alignment allows it."""

    @property
    def direct(self) -> int:
        """A descriptor of the file that goes past the page cache, for `aio`; -1 where there is none."""

    def will_need(self, offset: int, size: int) -> None:
        """Start reading into the page cache, without waiting."""

    def forget(self, offset: int = 0, size: int = 0) -> None:
        """Let the bytes leave the page cache; size 0 is all up to the end."""

    def close(self) -> None:
        """Give the file back."""


class Held(Protocol):
    """A lock that is held."""

    def release(self) -> None: ...


class Files(Protocol):
    """The files of one directory, by name."""

    def names(self) -> list[str]:
        """All names there are, sorted."""

    def size(self, name: str) -> int:
        """Bytes of a file; 0 if there is none."""

    def take_over(self, other: Files, name: str) -> None:
        """Have a file of another directory as well, under the same name, synced."""

    def create(self, name: str, size_bytes: int = 0) -> Output:
        """A new, empty file with room for that many bytes. An older one of the name is removed, not overwritten."""

    def open(self, name: str) -> Input: ...

    def rename(self, old: str, new: str) -> None:
        """Give a file another name, atomically; a file that has it already is replaced."""

    def remove(self, name: str) -> None: ...

    def sync_directory(self) -> None:
        """Make names survive a power cut."""

    def lock(self) -> Held:
        """The right to write here; `StoreFailed` if somebody else has it."""

    def name_of(self, name: str) -> str:
        """The name to show in messages."""


def aligned(size_bytes: int) -> np.ndarray:
    """New memory that begins at a page, its content anything. Much of it goes back to the system with its last user:
    what malloc keeps for others would be no part of any budget.
    """
    if size_bytes >= MAPPED_BYTES:
        try:
            return np.frombuffer(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
        except OSError as error:  # no file failed: whoever asks is told what malloc would have told
            raise MemoryError(f"{size_bytes} bytes") from error
    area = np.empty(size_bytes + PAGE, np.uint8)
    start = -int(area.ctypes.data) % PAGE
    return area[start : start + size_bytes]


def flat(data: Data) -> memoryview:
    """The bytes of contiguous memory."""
    array = np.frombuffer(data, np.uint8) if isinstance(data, memoryview) else data.reshape(-1).view(np.uint8)
    return array.data


def failed(what: str, file: str, error: OSError, offset: int | None = None) -> StoreFailed:
    """The error that says what the system refused, with its reason."""
    number = error.errno or 0
    reason = os.strerror(number) if number else str(error)
    return StoreFailed(f"{what}: {reason}", file=file, offset=offset, error=errno.errorcode.get(number),
                       hint=_HINTS.get(number))  # fmt: skip


def ends_early(file: str, offset: int, size: int, found: int) -> Damaged:
    """The error of a file that lacks bytes which it should have."""
    return Damaged("a file of the store ends too early", file=file, offset=offset, needs=f"{size} bytes there",
                   found=f"{found} bytes in the file")  # fmt: skip


_HINTS = {
    errno.ENOSPC: "make room on the disk; the last snapshot is whole",
    errno.EDQUOT: "make room in the quota; the last snapshot is whole",
    errno.EIO: "the disk or its connection fails; see the system's log",
    errno.EROFS: "open with readonly=True to look at the store",
    errno.EACCES: "readonly=True opens a store that may not be written",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}
