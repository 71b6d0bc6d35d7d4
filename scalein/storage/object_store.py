"""Places: a folder on any filesystem that pyarrow knows, and how its files become durable there.

A file of state or output is written once, under a name of its own, and never changed; what a manifest names is durable
before the manifest is. On a local disk that means synced, and the folder too; an object store takes a file whole, when
it is closed. Files of other filesystems are read through a copy on the local disk, which any process of this machine
may make and use. A copy is removed when a batch no longer needs the file, when nobody has used it for some time, and
when copies take more than half of what the disk has to give: first those that were used least recently.

`put` replaces a small file as a whole: a reader finds the old bytes or the new ones.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import time
import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa
from pyarrow import fs

from scalein.errors import BadArgument, Damaged, SourceLoc, StoreFailed

STATE, OUTPUT, MANIFESTS = "state", "output", "manifests"  # folders of a checkpoint
_UNUSED_S = 3600.0  # after which a local copy goes
_TEMPORARY = "_"  # names that begin with it are of files that are being written


class Place:
    """A folder; pickled as where it is. Names are below it, with "/" between folders."""

    def __init__(self, files: fs.FileSystem, base: str, uri: str, start: int = 0) -> None:
        self.files, self.base, self.uri = files, base, uri
        self.start = start  # of the driver that has new files made here (`manifest.py`)
        self.is_local = isinstance(files, fs.LocalFileSystem)
        self._is_whole = files.type_name != "hdfs"  # a file is there when it is closed, and not before

    def __reduce__(self) -> tuple[object, ...]:
        return Place, (self.files, self.base, self.uri, self.start)

    def __repr__(self) -> str:
        return self.uri

    def path(self, name: str) -> str:
        """Where pyarrow finds a file."""
        return f"{self.base}/{name}"

    def uri_of(self, name: str) -> str:
        """What people call a file."""
        return f"{self.uri}/{name}"

    def address_of(self, name: str) -> str:
        """Where Spark finds a file: a path alone would be one of the cluster's default filesystem."""
        return f"file://{self.path(name)}" if self.is_local else self.uri_of(name)

    def new_name(self, folder: str, suffix: str) -> str:
        """A name that no other file has, nor will have."""
        return f"{folder}/{self.start:010}-{uuid.uuid4().hex}{suffix}"

    def make(self, *folders: str) -> None:
        with _failing("cannot make a folder of", self.uri):
            for folder in folders:
                self.files.create_dir(self.path(folder), recursive=True)
            if self.is_local:
                for folder in (*(self.path(each) for each in folders), self.base, os.path.dirname(self.base)):
                    _sync(folder)

    def names(self, folder: str) -> list[str]:
        """The files of a folder, without those that are being written."""
        with _failing("cannot list", self.uri_of(folder)):
            found = self.files.get_file_info(fs.FileSelector(self.path(folder), allow_not_found=True))
        names = (each.base_name for each in found if each.type == fs.FileType.File)
        return sorted(name for name in names if not name.startswith(_TEMPORARY))

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Of some files, in bytes; None where there is none."""
        with _failing("cannot look into", self.uri):
            found = self.files.get_file_info([self.path(name) for name in names])
        return [each.size if each.type == fs.FileType.File else None for each in found]

    def read(self, name: str) -> bytes:
        with _failing("cannot read", self.uri_of(name)), self.files.open_input_stream(self.path(name)) as file:
            return bytes(file.read())

    def put(self, name: str, data: bytes) -> None:
        """Have a file with these bytes, whole and durable."""
        folder, _, base = name.rpartition("/")
        staged = f"{folder}/{_TEMPORARY}{base}-{uuid.uuid4().hex}"
        with _failing("cannot write", self.uri_of(name)):
            if not self.is_local:
                with self.files.open_output_stream(self.path(name if self._is_whole else staged)) as file:
                    file.write(data)
                if not self._is_whole:
                    if self.files.get_file_info(self.path(name)).type != fs.FileType.NotFound:
                        self.files.delete_file(self.path(name))
                    self.files.move(self.path(staged), self.path(name))
                return
            try:
                with open(self.path(staged), "wb") as local:
                    local.write(data)
                    local.flush()
                    os.fsync(local.fileno())
                os.rename(self.path(staged), self.path(name))
            except OSError:
                with suppress(OSError):
                    os.remove(self.path(staged))
                raise
            _sync(self.path(folder))

    @contextmanager
    def writing(self, name: str) -> Iterator[Written]:
        """A new file, durable when the block ends; after an error there is none."""
        path = self.path(name)
        with _failing("cannot write", self.uri_of(name)):
            try:
                file: Any = open(path, "wb") if self.is_local else self.files.open_output_stream(path)  # noqa: SIM115
            except FileNotFoundError as error:
                hint = "every machine that runs tasks must see the checkpoint, under this path"
                raise StoreFailed(f"cannot write {self.uri_of(name)}: there is no such folder", hint=hint) from error
            try:
                with file:
                    yield Written(file)
                    file.flush()
                    if self.is_local:
                        os.fsync(file.fileno())
                if self.is_local:
                    _sync(os.path.dirname(path))
            except BaseException:
                with suppress(OSError):
                    self.files.delete_file(path)
                raise

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError), _failing("cannot remove", self.uri_of(name)):
            self.files.delete_file(self.path(name))

    def remove_temporary(self, folder: str) -> None:
        """Remove what a process that ended was writing; nobody else writes here now."""
        for each in os.scandir(self.path(folder)):
            if each.name.startswith(_TEMPORARY):
                with suppress(FileNotFoundError), _failing("cannot remove", each.path):
                    os.remove(each.path)

    # --- reading whole files

    def mapped(self, name: str) -> pa.Buffer:
        """A file's bytes, mapped: of a local file itself, else of its copy on this machine."""
        try:
            with pa.memory_map(self.path(name) if self.is_local else self._copy(name)) as file:
                return file.read_buffer()
        except FileNotFoundError as error:
            raise Damaged("a file of the checkpoint is gone", file=self.uri_of(name)) from error
        except (OSError, pa.ArrowException) as error:
            raise StoreFailed("cannot read a file of the checkpoint", file=self.uri_of(name), found=error) from error

    def drop_copy(self, name: str) -> bool:
        """Remove the copy of a file on this machine; whether files have copies. They are not synced, so one may be
        damaged where the file is not.
        """
        if not self.is_local:
            with suppress(FileNotFoundError):
                os.remove(self._path_of_copy(name))
        return not self.is_local

    @property
    def _copies(self) -> str:
        own = hashlib.sha256(f"{os.getuid()} {self.uri}".encode()).hexdigest()[:16]
        return os.path.join(tempfile.gettempdir(), f"scalein-runs-{own}")

    def _path_of_copy(self, name: str) -> str:
        return os.path.join(self._copies, name.replace("/", "-"))

    def _copy(self, name: str) -> str:
        folder, path = self._copies, self._path_of_copy(name)
        if os.path.exists(path):
            with suppress(OSError):
                os.utime(path)
            return path
        os.makedirs(folder, mode=0o700, exist_ok=True)
        staged = f"{path}-{uuid.uuid4().hex}"
        with open(staged, "wb") as local, self.files.open_input_stream(self.path(name)) as remote:
            while block := remote.read(1 << 22):
                local.write(block)
        os.rename(staged, path)
        self._forget_copies(keep=path)
        return path

    def keep_copies(self, names: Iterable[str]) -> None:
        """Remove the copies of other files of state than these."""
        if self.is_local:
            return
        wanted = {self._path_of_copy(name) for name in names}
        with suppress(FileNotFoundError):
            for path in [each.path for each in os.scandir(self._copies)]:
                if path.endswith(".arrow") and path not in wanted:
                    with suppress(OSError):  # another process is faster
                        os.remove(path)

    def _forget_copies(self, keep: str) -> None:
        oldest = time.time() - _UNUSED_S
        copies: list[tuple[float, int, str]] = []  # when each was used last, its bytes and its path
        for each in os.scandir(self._copies):
            with suppress(OSError):
                copies.append(((about := each.stat()).st_mtime, about.st_size, each.path))
        used = sum(size for _, size, _ in copies)
        most = (used + shutil.disk_usage(self._copies).free) // 2
        for when, size, path in sorted(copies):
            if path != keep and (when < oldest or used > most):
                used -= size
                with suppress(OSError):
                    os.remove(path)


class Written:
    """A file that is being written, its size, and the checksum of bytes of it."""

    closed = False  # pyarrow asks

    def __init__(self, file: Any) -> None:
        self._file = file
        self.size_bytes, self._sum = 0, 0

    def write(self, data: bytes) -> int:
        self._file.write(data)
        self._sum = zlib.crc32(data, self._sum)
        self.size_bytes += len(data)
        return len(data)

    def sum_since(self) -> int:
        """Of the bytes since the last call."""
        found, self._sum = self._sum, 0
        return found

    def flush(self) -> None:
        pass

    def tell(self) -> int:
        return self.size_bytes

    def close(self) -> None:
        pass  # whoever opened the file closes it

    def writable(self) -> bool:
        return True


def place_of(given: object, at: SourceLoc) -> Place:
    """The folder that a path or an address ("s3://...", "hdfs://...") means."""
    if not isinstance(given, str | os.PathLike) or not (text := os.fspath(given)) or not isinstance(text, str):
        raise BadArgument("checkpoint takes a directory, or the address of one", at=at, found=repr(given))
    if "://" not in text:
        if re.match(r"[A-Za-z][\w+.-]+:/", text):  # Spark knows that as well: "dbfs:/..."
            raise BadArgument("an address has two slashes behind its colon", at=at, found=text,
                              hint="scheme://..., or the path alone")
        path = os.path.abspath(os.path.expanduser(text))
        if os.path.exists(path) and not os.path.isdir(path):
            raise BadArgument("the checkpoint is no directory", at=at, file=path)
        return Place(fs.LocalFileSystem(), path, path)
    scheme, rest = text.rstrip("/").split("://", 1)
    try:  # what Spark calls s3a is s3 to pyarrow
        files, base = fs.FileSystem.from_uri(f"{'s3' if scheme in ('s3a', 's3n') else scheme}://{rest}")
    except (pa.ArrowException, OSError, ValueError) as error:
        raise BadArgument("there is no such place for a checkpoint", at=at, found=text, why=error,
                          hint="a path, or an address that pyarrow.fs.FileSystem.from_uri takes") from error
    base = base.rstrip("/")
    return Place(files, base, base if isinstance(files, fs.LocalFileSystem) else text.rstrip("/"))


@contextmanager
def _failing(what: str, name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise StoreFailed(f"{what} {name}", found=error) from error


def _sync(folder: str) -> None:
    """Have the names in a folder on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
