"""Files: the one seam between the store and the operating system; a test puts a disk that loses power in its place.

Invariant: a byte survives a power cut once `Output.sync` returned after it was written; a name once `sync_directory`
returned after it was made, changed or removed. Nothing else is promised, and nothing in the store assumes more. After
a `sync` that raised, the file must be thrown away: the kernel may have dropped the pages that it could not write.

A call does the whole of what it says or raises: `StoreFailed` with the system's reason, `Damaged` where a file ends
before the bytes that are asked for. (Python itself goes on after EINTR.)

Threads: every method may be called from any thread, but an `Output` belongs to one at a time.

Page cache counts as the store's memory. Large writes from aligned memory go past it (O_DIRECT); what cannot leaves it
again at `sync`, or every 32 MiB. Reads of many pieces (`aio`) and `read_into(direct=True)` go past it where that
works, others through it until `forget`.

Known limits: the lock is flock's. A process forked while it is held shares it, and some network file systems ignore it.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Protocol

import numpy as np

from scalein.errors import Damaged, StoreFailed

MAPPED_BYTES = 256 << 10
PAGE = 4096  # what O_DIRECT wants of addresses, offsets and sizes, on every disk that we know
DIRECT_BYTES = 64 << 10  # least size of what goes past the page cache where nobody asks for it
UNSYNCED_BYTES = 32 << 20  # most bytes that plain writes leave in the page cache before they are synced
BOUNCE_BYTES = 1 << 20
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

    def take_over(self, other: RealFiles, name: str) -> None:
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


@contextmanager
def _told(what: str, file: str, offset: int | None = None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise failed(what, file, error, offset) from error


class RealFiles:
    """Files of a real directory. Unless `readonly`, the directory is made if it is not there."""

    def __init__(self, path: str | os.PathLike[str], readonly: bool = False) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self.readonly = readonly
        if sys.platform != "linux":
            raise StoreFailed("the state store runs on Linux only", found=sys.platform)
        with _told("cannot open the store's directory", self.path):
            if not readonly:
                _make_directory(self.path)
            os.listdir(self.path)  # it is a directory, and it can be read

    def name_of(self, name: str) -> str:
        return os.path.join(self.path, name)

    def names(self) -> list[str]:
        with _told("cannot list the store's directory", self.path):
            return sorted(os.listdir(self.path))

    def size(self, name: str) -> int:
        try:
            return os.stat(self.name_of(name)).st_size
        except OSError:
            return 0

    def take_over(self, other: RealFiles, name: str) -> None:
        source, target = other.name_of(name), self._writable(name)
        with _told("cannot take over a file of another store", target), suppress(FileExistsError):
            try:
                os.link(source, target)
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
                    raise
                shutil.copyfile(source, target)
                with open(target, "rb") as copied:
                    os.fsync(copied.fileno())

    def create(self, name: str, size_bytes: int = 0) -> RealOutput:
        path = self._writable(name)
        with _told("cannot create a file of the store", path):
            with suppress(FileNotFoundError):
                os.unlink(path)
            return RealOutput(path, size_bytes)

    def open(self, name: str) -> RealInput:
        path = self.name_of(name)
        with _told("cannot open a file of the store", path):
            return RealInput(path)

    def rename(self, old: str, new: str) -> None:
        with _told("cannot rename a file of the store", self._writable(old)):
            os.rename(self.name_of(old), self.name_of(new))

    def remove(self, name: str) -> None:
        with _told("cannot remove a file of the store", self._writable(name)):
            os.unlink(self.name_of(name))

    def sync_directory(self) -> None:
        with _told("cannot sync the store's directory", self.path):
            _sync_directory(self.path)

    def lock(self) -> Held:
        path = self._writable(LOCK)
        with _told("cannot lock the store", path):
            return _Flock(self.path, path)

    def _writable(self, name: str) -> str:
        path = self.name_of(name)
        if self.readonly:
            raise StoreFailed("the store was opened with readonly=True and cannot be written", file=path)
        return path


def _make_directory(path: str) -> None:
    """Make a directory and those above it, so that none is lost in a power cut."""
    if not os.path.isdir(path):
        _make_directory(os.path.dirname(path))
        with suppress(FileExistsError):
            os.mkdir(path)
        _sync_directory(os.path.dirname(path))


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class _Flock:
    """The exclusive lock on a directory, with the owner's pid in its file for the message that others get."""

    def __init__(self, directory: str, path: str) -> None:
        import fcntl  # not everywhere that scalein can be imported

        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, str(os.getpid()).encode(), 0)
        except BlockingIOError:
            pid = os.pread(self._fd, 20, 0).decode("ascii", "replace")
            os.close(self._fd)
            owner = "this process" if pid == str(os.getpid()) else f"process {pid}" if pid.isdigit() else "a process"
            raise StoreFailed("the store is open elsewhere", file=directory, owner=owner,
                              hint="close it there, or open it with readonly=True") from None  # fmt: skip
        except BaseException:
            os.close(self._fd)
            raise

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class RealOutput:
    """A file written past the page cache where that works."""

    def __init__(self, path: str, size_bytes: int) -> None:
        self._path = path
        self._end = self._unsynced = 0
        self._room = size_bytes
        self._direct = -1
        self._bounce: np.ndarray | None = None
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            if size_bytes:
                os.posix_fallocate(self._fd, 0, size_bytes)
            with suppress(OSError):  # a file system without O_DIRECT: plain writes
                self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
        except BaseException:
            self.close()
            with suppress(OSError):
                os.unlink(path)
            raise

    def write(self, offset: int, data: Data) -> None:
        left, at = flat(data), offset
        try:
            while left:
                done = self._some(at, left)
                if done == 0:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                at, left = at + done, left[done:]
        except OSError as error:
            raise failed("cannot write a file of the store", self._path, error, at) from error
        self._end = max(self._end, at)

    def _some(self, offset: int, data: memoryview) -> int:
        """Write the beginning of `data`, the direct way if its size and place allow it; the bytes written."""
        size = len(data) // PAGE * PAGE
        if self._direct < 0 or size < DIRECT_BYTES or offset % PAGE:
            return self._plainly(offset, data)
        part = data[:size]
        if np.frombuffer(part, np.uint8).ctypes.data % PAGE:
            if self._bounce is None:
                self._bounce = aligned(BOUNCE_BYTES)
            size = min(size, BOUNCE_BYTES)
            self._bounce[:size] = part[:size]
            part = self._bounce[:size].data
        try:
            return os.pwrite(self._direct, part, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            os.close(self._direct)  # it takes O_DIRECT to open a file, but not to write it
            self._direct = -1
            return self._plainly(offset, data)

    def _plainly(self, offset: int, data: memoryview) -> int:
        done = os.pwrite(self._fd, data[:UNSYNCED_BYTES], offset)
        self._unsynced += done
        if self._unsynced >= UNSYNCED_BYTES:
            self._leave_cache()
        return done

    def _leave_cache(self) -> None:
        os.fdatasync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._unsynced = 0

    def sync(self) -> None:
        with _told("cannot sync a file of the store", self._path):
            if self._room > self._end:
                os.ftruncate(self._fd, self._end)
            self._leave_cache()

    def close(self) -> None:
        for fd in (self._fd, self._direct):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct = -1
        self._bounce = None


class RealInput:
    """A file read by `pread`, so that a failing disk is an error and not a signal."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._opening = Lock()
        self._direct: int | None = None  # opened when it is first asked for
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.size = os.fstat(self._fd).st_size
            # Blocks are read at random: the default readahead would fetch up to 8 MiB for each.
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
        except BaseException:
            self.close()
            raise

    def read(self, offset: int, size: int) -> np.ndarray:
        if offset + size > self.size:  # before memory is taken for it
            raise ends_early(self._path, offset, size, self.size)
        into = aligned(size)
        # Much at once goes past the page cache, which would read it page by page: see the advice above.
        self.read_into(offset, into.data, direct=size >= DIRECT_BYTES)
        return into

    def read_into(self, offset: int, into: memoryview, direct: bool = False) -> None:
        done = self._directly(offset, into) if direct and _is_aligned(offset, into) else 0
        try:
            while done < len(into):
                more = os.preadv(self._fd, [into[done:]], offset + done)
                if more == 0:
                    raise ends_early(self._path, offset, len(into), self.size)
                done += more
        except OSError as error:
            raise failed("cannot read a file of the store", self._path, error, offset + done) from error

    def _directly(self, offset: int, into: memoryview) -> int:
        """Read the beginning of it past the page cache; the bytes read. What fails here is tried the plain way."""
        if self.direct < 0:
            return 0
        try:
            return os.preadv(self.direct, [into], offset)
        except OSError:
            return 0

    @property
    def direct(self) -> int:
        with self._opening:
            if self._direct is None:
                try:
                    # Not by its path: the file may have been removed. Anew: `_fd` must go through the page cache.
                    self._direct = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
                except OSError:
                    self._direct = -1
            return self._direct

    def will_need(self, offset: int, size: int) -> None:
        with suppress(OSError):  # advice: the read itself will tell
            os.posix_fadvise(self._fd, offset, size, os.POSIX_FADV_WILLNEED)

    def forget(self, offset: int = 0, size: int = 0) -> None:
        with suppress(OSError):
            os.posix_fadvise(self._fd, offset, size, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        for fd in (self._fd, -1 if self._direct is None else self._direct):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct = -1


def _is_aligned(offset: int, into: memoryview) -> bool:
    return not (offset % PAGE or len(into) % PAGE or np.frombuffer(into, np.uint8).ctypes.data % PAGE)
