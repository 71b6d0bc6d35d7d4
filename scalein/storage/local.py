"""LocalFileSystem: a directory of a Linux file system; `filesystem.py` states what survives a power cut (fsync).

The page cache counts as the store's memory. Large writes from aligned memory bypass it (O_DIRECT); other writes are
dropped from it at `sync`, or every 32 MiB. Reads of many blocks (`aio`) and `read_into(direct=True)` bypass it where
the file system supports that; other reads stay in it until `drop_cache`.

Known limits: the lock is an flock. A process forked while it is held shares it; some network file systems ignore it.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Lock as ThreadLock
from typing import IO

import numpy as np

from scalein.errors import StoreFailed
from scalein.storage.filesystem import (
    LOCK,
    PAGE,
    Data,
    FileSystem,
    Lock,
    aligned_buffer,
    flat_bytes,
    store_failed,
    truncated,
)

DIRECT_BYTES = 64 << 10  # least size of writes and reads that bypass the page cache by default
UNSYNCED_BYTES = 32 << 20  # most bytes that buffered writes leave in the page cache before they are synced
BOUNCE_BYTES = 1 << 20  # of the aligned buffer through which unaligned memory is written


@contextmanager
def _wrap_errors(what: str, file: str, offset: int | None = None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise store_failed(what, file, error, offset) from error


class LocalFileSystem:
    """Files of a local directory. Unless `readonly`, the directory is created if it does not exist."""

    def __init__(self, path: str | os.PathLike[str], readonly: bool = False) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self.readonly = readonly
        if sys.platform != "linux":
            raise StoreFailed("the state store runs on Linux only", found=sys.platform)
        with _wrap_errors("cannot open the store's directory", self.path):
            if not readonly:
                make_directory(self.path)
            os.listdir(self.path)  # fails unless it is a readable directory

    def path_of(self, name: str) -> str:
        return os.path.join(self.path, name)

    def names(self) -> list[str]:
        with _wrap_errors("cannot list the store's directory", self.path):
            return sorted(os.listdir(self.path))

    def size(self, name: str) -> int:
        try:
            return os.stat(self.path_of(name)).st_size
        except OSError:
            return 0

    def link_from(self, other: FileSystem, name: str) -> None:
        source, target = other.path_of(name), self._writable(name)
        with _wrap_errors("cannot link a file of another store", target), suppress(FileExistsError):
            try:
                os.link(source, target)
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
                    raise
                shutil.copyfile(source, target)
                sync_path(target)

    def create(self, name: str, size_bytes: int = 0) -> LocalOutput:
        path = self._writable(name)
        with _wrap_errors("cannot create a file of the store", path):
            try:
                return LocalOutput(path, size_bytes)
            except FileExistsError:
                os.unlink(path)
            return LocalOutput(path, size_bytes)

    def open(self, name: str) -> LocalInput:
        path = self.path_of(name)
        with _wrap_errors("cannot open a file of the store", path):
            return LocalInput(path)

    def rename(self, old: str, new: str) -> None:
        with _wrap_errors("cannot rename a file of the store", self._writable(old)):
            os.rename(self.path_of(old), self.path_of(new))

    def remove(self, name: str) -> None:
        with _wrap_errors("cannot remove a file of the store", self._writable(name)):
            os.unlink(self.path_of(name))

    def sync_directory(self) -> None:
        with _wrap_errors("cannot sync the store's directory", self.path):
            sync_path(self.path)

    def lock(self) -> Lock:
        path = self._writable(LOCK)
        with _wrap_errors("cannot lock the store", path):
            return _DirectoryLock(self.path, path)

    def _writable(self, name: str) -> str:
        path = self.path_of(name)
        if self.readonly:
            raise StoreFailed("the store was opened with readonly=True and cannot be written", file=path)
        return path


def make_directory(path: str | os.PathLike[str]) -> None:
    """Create a directory and its parents, each durably."""
    path = os.path.abspath(path)
    if not os.path.isdir(path):
        make_directory(os.path.dirname(path))
        with suppress(FileExistsError):
            os.mkdir(path)
        sync_path(os.path.dirname(path))


def sync_path(path: str | os.PathLike[str]) -> None:
    """Make the bytes of a file durable, or the names in a directory."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def lock_file(path: str | os.PathLike[str]) -> IO[bytes] | None:
    """An exclusive lock, held until the file is closed or the process ends; None if another one has it."""
    import fcntl  # not available on every platform that can import scalein

    file = open(path, "ab")  # noqa: SIM115 (held by the caller)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except BaseException:
        file.close()
        raise
    return file


class _DirectoryLock:
    """An exclusive flock on a directory. Its file holds the owner's pid, which the error message of others shows."""

    def __init__(self, directory: str, path: str) -> None:
        import fcntl  # not available on every platform that can import scalein

        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, str(os.getpid()).encode(), 0)
        except BlockingIOError:
            pid = os.pread(self._fd, 20, 0).decode("ascii", "replace")
            os.close(self._fd)
            owner = "this process" if pid == str(os.getpid()) else f"process {pid}" if pid.isdigit() else "a process"
            raise StoreFailed("the store is open in another process or store object", file=directory, owner=owner,
                              hint="close it there, or open it with readonly=True") from None  # fmt: skip
        except BaseException:
            os.close(self._fd)
            raise

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LocalOutput:
    """A file written with O_DIRECT where the file system supports it."""

    def __init__(self, path: str, size_bytes: int) -> None:
        self._path = path
        self._end = self._unsynced = 0
        self._preallocated = size_bytes
        self._direct: int | None = None  # opened on first use
        self._bounce: np.ndarray | None = None
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            if size_bytes:
                os.posix_fallocate(self._fd, 0, size_bytes)
        except BaseException:
            self.close()
            with suppress(OSError):
                os.unlink(path)
            raise

    def write(self, offset: int, data: Data) -> None:
        left, at = flat_bytes(data), offset
        try:
            while left:
                done = self._write_some(at, left)
                if done == 0:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                at, left = at + done, left[done:]
        except OSError as error:
            raise store_failed("cannot write a file of the store", self._path, error, at) from error
        self._end = max(self._end, at)

    def _write_some(self, offset: int, data: memoryview) -> int:
        """Write the first part of `data`, directly if its size and offset allow it; the number of bytes written."""
        size = len(data) // PAGE * PAGE
        if size < DIRECT_BYTES or offset % PAGE or (direct := self._direct_fd()) < 0:
            return self._write_buffered(offset, data)
        part = data[:size]
        if np.frombuffer(part, np.uint8).ctypes.data % PAGE:
            if self._bounce is None:
                self._bounce = aligned_buffer(BOUNCE_BYTES)
            size = min(size, BOUNCE_BYTES)
            self._bounce[:size] = part[:size]
            part = self._bounce[:size].data
        try:
            return os.pwrite(direct, part, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            os.close(direct)  # the file system accepts O_DIRECT in open, but not in write
            self._direct = -1
            return self._write_buffered(offset, data)

    def _direct_fd(self) -> int:
        if self._direct is None:
            try:
                self._direct = os.open(self._path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
            except OSError:  # a file system without O_DIRECT: buffered writes
                self._direct = -1
        return self._direct

    def _write_buffered(self, offset: int, data: memoryview) -> int:
        done = os.pwrite(self._fd, data[:UNSYNCED_BYTES], offset)
        self._unsynced += done
        if self._unsynced >= UNSYNCED_BYTES:
            self._sync_and_drop_cache()
        return done

    def _sync_and_drop_cache(self) -> None:
        os.fdatasync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._unsynced = 0

    def sync(self) -> None:
        with _wrap_errors("cannot sync a file of the store", self._path):
            if self._preallocated > self._end:
                os.ftruncate(self._fd, self._end)
            self._sync_and_drop_cache()

    def close(self) -> None:
        for fd in (self._fd, -1 if self._direct is None else self._direct):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct = -1
        self._bounce = None


class LocalInput:
    """A file read with `pread`, so that a failing disk raises an error instead of a signal."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._opening = ThreadLock()
        self._direct: int | None = None  # opened on first use
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.size = os.fstat(self._fd).st_size
            # Blocks are read at random: the default readahead would fetch up to 8 MiB for each.
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
        except BaseException:
            self.close()
            raise

    def read(self, offset: int, size: int) -> np.ndarray:
        if offset + size > self.size:  # before memory is allocated
            raise truncated(self._path, offset, size, self.size)
        into = aligned_buffer(size)
        # Large reads bypass the page cache, which would read page by page: readahead is off.
        self.read_into(offset, into.data, direct=size >= DIRECT_BYTES)
        return into

    def read_into(self, offset: int, into: memoryview, direct: bool = False) -> None:
        done = self._read_direct(offset, into) if direct and _is_aligned(offset, into) else 0
        try:
            while done < len(into):
                more = os.preadv(self._fd, [into[done:]], offset + done)
                if more == 0:
                    raise truncated(self._path, offset, len(into), self.size)
                done += more
        except OSError as error:
            raise store_failed("cannot read a file of the store", self._path, error, offset + done) from error

    def _read_direct(self, offset: int, into: memoryview) -> int:
        """Read the first part past the page cache; the number of bytes read. The caller reads the rest buffered."""
        if self.direct_fd < 0:
            return 0
        try:
            return os.preadv(self.direct_fd, [into], offset)
        except OSError:
            return 0

    @property
    def direct_fd(self) -> int:
        with self._opening:
            if self._direct is None:
                try:
                    # Not by path: the file may have been removed. A second descriptor: `_fd` uses the page cache.
                    self._direct = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
                except OSError:
                    self._direct = -1
            return self._direct

    def prefetch(self, offset: int, size: int) -> None:
        with suppress(OSError):  # advice only: the read itself reports errors
            os.posix_fadvise(self._fd, offset, size, os.POSIX_FADV_WILLNEED)

    def drop_cache(self, offset: int = 0, size: int = 0) -> None:
        with suppress(OSError):
            os.posix_fadvise(self._fd, offset, size, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        for fd in (self._fd, -1 if self._direct is None else self._direct):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct = -1


def _is_aligned(offset: int, into: memoryview) -> bool:
    return not (offset % PAGE or len(into) % PAGE or np.frombuffer(into, np.uint8).ctypes.data % PAGE)
