"""Location: a folder on any file system that pyarrow supports, and how its files become durable there.

A file of state or output is written once, under a unique name, and never changed; files that a manifest names are
durable before the manifest is. On a local disk that means that file and folder are synced; an object store makes a file
visible when it is closed. Files of remote file systems are read through a copy on the local disk, which all processes
of the machine share. A copy is removed when no batch needs the file, when it was not used for an hour, and, least
recently used first, while the copies take more than half of the disk space that is free or theirs.

`put` replaces a small file atomically: a reader finds the old bytes or the new ones.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa
from pyarrow import fs

from scalein.errors import BadArgument, Damaged, SourceLoc, StoreFailed
from scalein.storage.local import LocalFileSystem, make_directory, sync_path
from scalein.storage.publish import TEMPORARY, put

STATE, OUTPUT, MANIFESTS = "state", "output", "manifests"  # folders of a checkpoint
_OBJECT_STORES = ("s3", "gcs", "abfs", "mock")  # names of pyarrow's
_UNUSED_S = 3600.0  # age of an unused local copy at which it is removed


class Location:
    """A folder. Names are relative to it, with "/" between folders. It is pickled as its address."""

    def __init__(self, files: fs.FileSystem, base: str, uri: str, start: int = 0) -> None:
        self.files, self.base, self.uri = files, base, uri
        self.start = start  # number of the driver's start, which new names carry (see spark/streaming/manifest.py)
        self.is_local = isinstance(files, fs.LocalFileSystem)
        self._is_atomic = _type_of(files) in _OBJECT_STORES  # a new file becomes visible when it is closed, not before

    def __reduce__(self) -> tuple[object, ...]:
        return Location, (self.files, self.base, self.uri, self.start)

    def __repr__(self) -> str:
        return self.uri

    def path(self, name: str) -> str:
        """The path of a file for pyarrow."""
        return f"{self.base}/{name}"

    def uri_of(self, name: str) -> str:
        """The address of a file for messages."""
        return f"{self.uri}/{name}"

    def spark_uri(self, name: str) -> str:
        """The address of a file for Spark: a bare path would be on the cluster's default file system."""
        return f"file://{self.path(name)}" if self.is_local else self.uri_of(name)

    def new_name(self, folder: str, suffix: str) -> str:
        """A unique name."""
        return f"{folder}/{self.start:010}-{uuid.uuid4().hex}{suffix}"

    def create_folders(self, *folders: str) -> None:
        with _wrap_errors("cannot create a folder of", self.uri):
            for folder in folders:
                try:
                    if self.is_local:
                        make_directory(self.path(folder))
                    else:
                        self.files.create_dir(self.path(folder), recursive=True)
                except FileNotFoundError as error:  # of a folder in which the system lets no one create any
                    raise StoreFailed(f"cannot create a folder of {self.uri}", found=error) from error

    def names(self, folder: str) -> list[str]:
        """The files of a folder, without those that are being written."""
        with _wrap_errors("cannot list", self.uri_of(folder)):
            found = self.files.get_file_info(fs.FileSelector(self.path(folder), allow_not_found=True))
        names = (each.base_name for each in found if each.type == fs.FileType.File)
        return sorted(name for name in names if not name.startswith(TEMPORARY))

    def folders(self, folder: str) -> list[str]:
        """The folders in a folder."""
        with _wrap_errors("cannot list", self.uri_of(folder)):
            found = self.files.get_file_info(fs.FileSelector(self.path(folder), allow_not_found=True))
        return sorted(each.base_name for each in found if each.type == fs.FileType.Directory)

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Sizes in bytes; None where there is no such file."""
        with _wrap_errors("cannot list", self.uri):
            found = self.files.get_file_info([self.path(name) for name in names])
        return [each.size if each.type == fs.FileType.File else None for each in found]

    def read(self, name: str) -> bytes:
        with _wrap_errors("cannot read", self.uri_of(name)), self.files.open_input_stream(self.path(name)) as file:
            return bytes(file.read())

    def put(self, name: str, data: bytes) -> None:
        """Write a file with these bytes, atomically and durably."""
        folder, _, base = name.rpartition("/")
        staged = f"{folder}/{TEMPORARY}{base}-{uuid.uuid4().hex}"
        with _wrap_errors("cannot write", self.uri_of(name)):
            if not self.is_local:
                with self.files.open_output_stream(self.path(name if self._is_atomic else staged)) as file:
                    file.write(data)
                if not self._is_atomic:
                    if self.files.get_file_info(self.path(name)).type != fs.FileType.NotFound:
                        self.files.delete_file(self.path(name))
                    self.files.move(self.path(staged), self.path(name))
                return
            put(LocalFileSystem(self.path(folder)), base, data, writer=uuid.uuid4().hex)

    @contextmanager
    def create(self, name: str) -> Iterator[CountedOutput]:
        """A new file, durable when the block ends; after an error there is no file."""
        path = self.path(name)
        with _wrap_errors("cannot write", self.uri_of(name)):
            try:
                file: Any = open(path, "wb") if self.is_local else self.files.open_output_stream(path)  # noqa: SIM115
            except FileNotFoundError as error:
                hint = "every machine that runs tasks must see the checkpoint under this path"
                raise StoreFailed(f"cannot write {self.uri_of(name)}: the folder does not exist", hint=hint) from error
            try:
                with file:
                    yield CountedOutput(file)
                    file.flush()
                    if self.is_local:
                        os.fsync(file.fileno())
                if self.is_local:
                    sync_path(os.path.dirname(path))
            except BaseException:
                with suppress(OSError):
                    self.files.delete_file(path)
                raise

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError), _wrap_errors("cannot remove", self.uri_of(name)):
            self.files.delete_file(self.path(name))

    def remove_temporary(self, folder: str) -> None:
        """Remove what an earlier process was writing; no other process writes here now."""
        for each in os.scandir(self.path(folder)):
            if each.name.startswith(TEMPORARY):
                with suppress(FileNotFoundError), _wrap_errors("cannot remove", each.path):
                    os.remove(each.path)

    # --- local copies of remote files

    def map_file(self, name: str) -> pa.Buffer:
        """A file's bytes, memory-mapped: the local file itself, or its copy on this machine."""
        try:
            with pa.memory_map(self.path(name) if self.is_local else self._copy(name)) as file:
                return file.read_buffer()
        except FileNotFoundError as error:
            raise Damaged("a file of the checkpoint is missing", file=self.uri_of(name)) from error
        except (OSError, pa.ArrowException) as error:
            raise StoreFailed("cannot read a file of the checkpoint", file=self.uri_of(name), found=error) from error

    def drop_local_copy(self, name: str) -> bool:
        """Remove the local copy of a file; whether files have copies. Copies are not synced, so a power cut may damage
        a copy where the file itself is intact.
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
        self._remove_old_copies(keep=path)
        return path

    def retain_local_copies(self, names: Iterable[str]) -> None:
        """Remove the copies of all other files of state."""
        if self.is_local:
            return
        wanted = {self._path_of_copy(name) for name in names}
        with suppress(FileNotFoundError):
            for path in [each.path for each in os.scandir(self._copies)]:
                if path.endswith(".arrow") and path not in wanted:
                    with suppress(OSError):  # another process may have removed it
                        os.remove(path)

    def _remove_old_copies(self, keep: str) -> None:
        oldest = time.time() - _UNUSED_S
        copies: list[tuple[float, int, str]] = []  # time of last use, size in bytes, path
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


class CountedOutput:
    """A file that is being written, with its size."""

    closed = False  # pyarrow reads it

    def __init__(self, file: Any) -> None:
        self._file = file
        self.size_bytes = 0

    def write(self, data: bytes) -> int:
        self._file.write(data)
        self.size_bytes += len(data)
        return len(data)

    def flush(self) -> None:
        pass

    def tell(self) -> int:
        return self.size_bytes

    def close(self) -> None:
        pass  # `Location.create` closes the file

    def writable(self) -> bool:
        return True


def parse_location(given: object, at: SourceLoc) -> Location:
    """The folder that a path or an address ("s3://...", "hdfs://...") names."""
    if not isinstance(given, str | os.PathLike) or not (text := os.fspath(given)) or not isinstance(text, str):
        raise BadArgument("checkpoint takes a directory, or the address of one", at=at, found=repr(given))
    if "://" not in text:
        if re.match(r"[A-Za-z][\w+.-]+:/", text):  # Spark accepts "dbfs:/..."
            raise BadArgument("an address has two slashes after its colon", at=at, found=text,
                              hint="scheme://..., or the path alone")
        path = os.path.abspath(os.path.expanduser(text))
        if os.path.exists(path) and not os.path.isdir(path):
            raise BadArgument("the checkpoint is not a directory", at=at, file=path)
        return Location(fs.LocalFileSystem(), path, path)
    scheme, rest = text.rstrip("/").split("://", 1)
    try:  # Spark's s3a is pyarrow's s3
        files, base = fs.FileSystem.from_uri(f"{'s3' if scheme in ('s3a', 's3n') else scheme}://{rest}")
    except (pa.ArrowException, OSError, ValueError) as error:
        raise BadArgument("the address of the checkpoint is not supported", at=at, found=text, why=error,
                          hint="a path, or an address that pyarrow.fs.FileSystem.from_uri accepts") from error
    base = base.rstrip("/")
    return Location(files, base, base if isinstance(files, fs.LocalFileSystem) else text.rstrip("/"))


def _type_of(files: fs.FileSystem) -> str:
    """The name of a file system, or of the one that a view of it is over."""
    while isinstance(files, fs.SubTreeFileSystem):
        files = files.base_fs
    return str(files.type_name)


@contextmanager
def _wrap_errors(what: str, name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise StoreFailed(f"{what} {name}", found=error) from error
