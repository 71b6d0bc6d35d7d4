"""The publish protocol: how a file becomes what the next reader of a folder finds, and which run may still publish.

`put` is the commit point of everything durable here. The file is written under a temporary name and synced, renamed to
its own, and the directory is synced: after a power cut there is the old file or the new one, never a part. What the
file names is durable before.

Fencing. An output folder has one owner, recorded in `_owner`: a job, the checkpoint by which users know it, and an
epoch that grows by one with each run that takes the folder. Another job is refused when it starts, unless it begins
from a savepoint of the owner, which must have ended: then it is the owner from there on. A run that was taken for dead
and continues finds the record of its successor, and publishes nothing more (`OwnedFolder.check`). If the successor
comes between that check and a rename, it has read the manifest that names the renamed file, and makes the same file
visible; staged files that no manifest names, it has removed.

A job without a checkpoint never comes back, so it leaves no record: it holds a lock on the folder while it runs.

Threads: any thread may call; two calls for one folder take turns.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scalein.errors import Damaged, Fenced, NewerFormat, ScaleinError, StoreFailed, WriteFailed
from scalein.storage.checked_json import Json, as_int, as_text
from scalein.storage.filesystem import CHECKPOINT_LOCK, FileSystem
from scalein.storage.local import LocalFileSystem, lock_file

TEMPORARY = "_"  # prefix of the names of files that are being written
OWNER = "_owner"  # name of the record of an output folder's owner; readers of data skip names that begin with "_"
OWNER_FORMAT = 1
_PREALLOCATED_BYTES = 1 << 20
_LOCK_S = 2.0  # longest wait for another process that is taking the folder
_PROCESS = uuid.uuid4().hex  # two runs of one job that copies of a checkpoint started are different owners


def put(fs: FileSystem, name: str, data: bytes | np.ndarray, *, writer: str = "",
        sync_names_first: bool = False) -> None:
    """Publish a file, in place of an older one of that name; it is durable once this returns.

    `writer` tells the temporary file from those of other processes, where no lock excludes these. `sync_names_first`
    also makes the names durable that were created in this directory before: those of files that the new one refers to.
    If this raises, the file may or may not be found at the next start.

    >>> import tempfile
    >>> folder = LocalFileSystem(tempfile.mkdtemp())
    >>> put(folder, "name", b"old"); put(folder, "name", b"new")
    >>> read_all(folder, "name"), folder.names()
    (b'new', ['name'])
    """
    temporary = f"{TEMPORARY}{name}{writer and '-'}{writer}"
    array = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
    try:
        # Space for a small file is not worth an allocation of its own, which its sync would have to write as well.
        output = fs.create(temporary, len(array) if len(array) >= _PREALLOCATED_BYTES else 0)
        try:
            output.write(0, array)
            output.sync()
        finally:
            output.close()
        if sync_names_first:
            fs.sync_directory()
        fs.rename(temporary, name)
    except ScaleinError:
        with suppress(ScaleinError):
            fs.remove(temporary)
        raise
    fs.sync_directory()


def read_all(fs: FileSystem, name: str) -> bytes:
    """The bytes of a file."""
    file = fs.open(name)
    try:
        return bytes(file.read(0, file.size))
    finally:
        file.close()


def seal(content: Mapping[str, Json]) -> bytes:
    """An entry of a checkpoint: one line of JSON, and a line with its checksum.

    >>> seal({"epoch": 7})
    b'{"epoch":7}\\n802035ff\\n'
    """
    text = json.dumps(content, separators=(",", ":")).encode()
    return text + b"\n%08x\n" % zlib.crc32(text)


def unseal(data: bytes) -> dict[str, Json]:
    """The content of an entry; `ValueError` if it is damaged. Nothing in it is executed or unpickled."""
    text, _, checksum = data.partition(b"\n")
    if checksum.strip() != b"%08x" % zlib.crc32(text):
        raise ValueError("the checksum does not fit")
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError("it is no object")
    return found


# --- ownership of output folders


@dataclass(frozen=True)
class Owner:
    """The record of a folder's owner."""

    job: str  # the same over all runs
    run: str
    checkpoint: str
    epoch: int  # of the ownership: a run that takes the folder has a greater one than all before
    process: str

    def to_json(self) -> dict[str, Json]:
        return {"format": OWNER_FORMAT, "job": self.job, "run": self.run, "checkpoint": self.checkpoint,
                "epoch": self.epoch, "process": self.process}  # fmt: skip


@dataclass(frozen=True)
class OwnedFolder:
    """A folder that a run has taken."""

    fs: LocalFileSystem
    owner: Owner

    def check(self) -> None:
        """Raise `Fenced` if another run has taken the folder since.

        Without a record nobody has: whoever moved everything out of the folder took it along.
        """
        with suppress(FileNotFoundError), open(self.fs.path_of(OWNER), "rb") as file:
            if file.read() == seal(self.owner.to_json()):
                return
        found = _read_owner(self.fs)
        if found is not None and found != self.owner:
            raise Fenced("another run has taken over this folder, so this one may not write to it any more",
                         file=self.fs.path, owner=found.checkpoint, hint="one of the two must end; this one has")


def take_folder(path: str, run: str, checkpoint: str, predecessor: str = "") -> OwnedFolder:
    """Make a job the owner of a folder, as its newest run. `run` is `<job>-...`; the folder exists.

    `predecessor` is a job that hands the folder over: this one has begun from its savepoint.
    """
    job = run.partition("-")[0]
    fs = LocalFileSystem(path)
    with _taking(path), ExitStack() as stack:
        for left in fs.names():
            if left.startswith(f"{TEMPORARY}{OWNER}-"):  # a process ended while it was taking the folder
                fs.remove(left)
        if predecessor and (found := _read_owner(fs)) is not None and found.job == predecessor:
            stack.enter_context(_ended(found, fs))
        else:
            found = _checked_owner(fs, job, checkpoint)
        owner = Owner(job, run, checkpoint, 1 if found is None else found.epoch, _PROCESS)
        if found != owner:  # equal: another sink of the same run writes here
            owner = Owner(job, run, checkpoint, 1 if found is None else found.epoch + 1, _PROCESS)
            put(fs, OWNER, seal(owner.to_json()), writer=_PROCESS)
    return OwnedFolder(fs, owner)


@contextmanager
def _ended(owner: Owner, fs: LocalFileSystem) -> Iterator[None]:
    """Refuse the folder of a job that is running, and keep it from starting: if its checkpoint is on this machine."""
    folder = Path(owner.checkpoint)
    if not folder.is_dir():
        yield
        return
    lock = lock_file(folder / CHECKPOINT_LOCK)
    if lock is None:
        raise WriteFailed("the job of the savepoint is running, and its folder goes to the job that begins from it",
                          file=fs.path, owner=f"the job of checkpoint {owner.checkpoint}",
                          hint="stop it first, or give this job a folder of its own")
    with lock:
        yield


def hold_folder(path: str, run: str) -> FolderLock:
    """The right to write to a folder until it is released, for a job without a checkpoint. The folder exists."""
    job = run.partition("-")[0]
    with _held_lock:
        if (held := _held.get(path)) is not None and held.job == job:
            held.count += 1
            return held
        lock = FolderLock(path, job, _flock(path, _LOCK_S))
        try:
            _checked_owner(LocalFileSystem(path), job, None)
        except BaseException:
            lock.release_locked()
            raise
        _held[path] = lock
        return lock


class FolderLock:
    """A lock on a folder, shared by the sinks of one job."""

    def __init__(self, path: str, job: str, fd: int) -> None:
        self.path, self.job, self.count = path, job, 1
        self._fd = fd

    def release(self) -> None:
        with _held_lock:
            self.release_locked()

    def release_locked(self) -> None:
        """`release`, for a caller that has `_held_lock`."""
        self.count -= 1
        if self.count == 0:
            _held.pop(self.path, None)
            if self._fd >= 0:
                os.close(self._fd)


_held: dict[str, FolderLock] = {}  # by path
_held_lock = threading.Lock()


@contextmanager
def _taking(path: str) -> Iterator[None]:
    fd = _flock(path, _LOCK_S)
    try:
        yield
    finally:
        if fd >= 0:
            os.close(fd)


def _flock(path: str, wait_s: float) -> int:
    """The descriptor of a folder that is locked; -1 where the file system has no locks, as some that are mounted from
    elsewhere: there the record alone tells jobs apart.
    """
    import fcntl  # not available on every platform that can import scalein

    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    end = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if time.monotonic() > end:
                os.close(fd)
                raise WriteFailed("another job, without a checkpoint, is writing to this folder", file=path,
                                  hint="wait for its end, or give this job a folder of its own") from None
            time.sleep(0.02)
        except OSError:
            os.close(fd)
            return -1


def _read_owner(fs: LocalFileSystem) -> Owner | None:
    if not fs.size(OWNER):
        return None
    path = fs.path_of(OWNER)
    try:
        found = unseal(read_all(fs, OWNER))
        if as_int(found["format"]) > OWNER_FORMAT:
            raise NewerFormat("a newer scalein writes to this folder", file=path, found=found["format"],
                              has=OWNER_FORMAT)
        return Owner(as_text(found["job"]), as_text(found["run"]), as_text(found["checkpoint"]),
                     as_int(found["epoch"]), as_text(found["process"]))
    except StoreFailed as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise
    except (ValueError, KeyError) as error:
        raise Damaged("the record of a folder's owner cannot be read", file=path, found=repr(error),
                      hint="remove it, if no other job writes to this folder") from error


def _checked_owner(fs: LocalFileSystem, job: str, checkpoint: str | None) -> Owner | None:
    """The record of this job's last run; refuses the folder of another job."""
    found = _read_owner(fs)
    if found is not None and found.job != job:
        is_anew = found.checkpoint == checkpoint
        raise WriteFailed("this folder has the output of another job, and two jobs may not write to one folder",
                          file=fs.path, owner=f"the job of checkpoint {found.checkpoint}" + (
                              ", which was removed or replaced since" if is_anew else ""),
                          hint=("remove the output as well, or give this job a folder of its own" if is_anew else
                                "give this job a folder of its own, resume the other one with its checkpoint, or begin "
                                "from a savepoint of it, which hands the folder over; if that job is gone for good, "
                                f"remove {fs.path_of(OWNER)}"))
    return found
