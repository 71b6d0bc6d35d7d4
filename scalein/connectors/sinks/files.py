"""FileSink: rows written to files of a directory, visible epoch by epoch.

The rows of an epoch go to files `_staged-<next>-<epoch>-<k>.<suffix>`, which readers skip. `prepare` completes and
syncs them and returns their names; once these are in a manifest, `commit` renames them to `part-...`. A crash leaves
staged files: the next `open` of the same job renames those that its last manifest names and removes the others. If
recovery fell back to an older manifest because the newest was damaged, the files of later epochs are removed as well:
the job writes their rows again. The names of files sort in the order in which their rows were written: numbers of runs
and epochs have leading zeros.

An epoch records the folder it was staged in: a sink of the same job in another folder commits its files there, unless
they were moved with it (a folder may be moved, and a copy of a job must not touch the original). It removes files of
its own folder only.

A job takes its folder before it opens the sink (`acquire`): another job is refused there, and an earlier run of the
same job can commit nothing more (`storage/publish.py`). A sink that is opened without that takes no folder.

Where other processes write the rows (Spark's tasks), each stages files with `for_task`, under unique names; of repeated
attempts, only those whose names reach the driver are committed. Such files need not become visible with their epoch:
those that an epoch names as `waiting` stay staged, and a later epoch joins them into few and commits these. So
a row that waits is in staged files only, and whoever reads the directory sees it once, from one moment on.

Threads: one caller at a time, but `commit` may run beside `write`; the only mutable state they share is `_changed`.
Rows are buffered until they make a good row group, at most `_BUFFERED_BYTES` in all. A file ends with its epoch, and at
`roll` bytes (`write`).
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa

from scalein.connectors.sinks.file_writers import GROUP_BYTES, GROUP_ROWS, WriteFormat, Writer, writing
from scalein.connectors.sinks.partitioning import can_split, split
from scalein.errors import (
    BadArgument,
    Damaged,
    SourceLoc,
    StoreFailed,
    UnknownColumn,
    WriteFailed,
    WrongType,
    guess,
    warn,
)
from scalein.storage import local
from scalein.storage.checked_json import Json
from scalein.storage.local import make_directory
from scalein.storage.publish import FolderLock, OwnedFolder, hold_folder, take_folder

STAGED, PART = "_staged-", "part-"
_BUFFERED_BYTES = 128 << 20
_SYNC_THREADS = 16
_MAX_WAITING = 64  # files of a directory, on average
_REJOINED_BYTES = 16 << 20  # up to which files that wait are joined before they are due
_LAST_TASK = 999_999  # number of the last task of an epoch written by several tasks
_MAX_OPEN = 256  # files written at once; more values of `partition_by` close the oldest


@dataclass(slots=True, eq=False)
class StagedFile:
    """A file that is being written, and the rows buffered for it."""

    name: str  # below the sink's directory
    path: str
    file: pa.NativeFile
    writer: Writer
    schema: pa.Schema
    buffered: list[pa.RecordBatch] = field(default_factory=list)
    buffered_rows: int = 0
    buffered_bytes: int = 0

    def add(self, batch: pa.RecordBatch) -> None:
        self.buffered.append(batch)
        self.buffered_rows += batch.num_rows
        self.buffered_bytes += batch.nbytes

    def flush(self) -> None:
        if self.buffered:
            with writing(self.path):
                self.writer.write(pa.Table.from_batches(self.buffered, self.schema).combine_chunks())
            self.buffered, self.buffered_rows, self.buffered_bytes = [], 0, 0

    def finish(self) -> None:
        """Complete the file; it is not synced yet."""
        self.flush()
        with writing(self.path):
            self.writer.close()
            self.file.close()


class FileSink:
    """A two-phase `Sink` into one directory."""

    def __init__(self, path: object, format: WriteFormat, partition_by: Sequence[str], roll_bytes: int, step: str,
                 at: SourceLoc) -> None:
        try:
            text = os.path.expanduser(os.fspath(path))  # type: ignore[call-overload]
            self.path = os.path.abspath(text)
        except TypeError:
            raise BadArgument(f"{step} takes the path of a directory", at=at, found=repr(path)) from None
        if re.match(r"[A-Za-z][\w+.-]+:/", text):  # a pathlib.Path has one slash where an address has two
            raise BadArgument(f"{step} writes to a directory of this machine, and this is an address", at=at,
                              found=text,
                              hint="the path of a mounted folder; a stream on Spark also takes a function: "
                                   'sink=lambda df, batch: df.write.mode("append").parquet("s3://...")')
        if os.path.exists(self.path) and not os.path.isdir(self.path):
            raise WriteFailed(f"{self.path} is a file, but {step} writes to a directory", at=at)
        self._format, self._by, self._roll_bytes, self._step, self._at = format, partition_by, roll_bytes, step, at
        self._file_schema = pa.schema([])  # the columns of the files, without `partition_by`
        self._prefix, self._epoch, self._count = "", 0, 0
        self._attempt = ""  # part of file names, where several tasks stage files of an epoch
        self._open: dict[str, StagedFile] = {}  # by directory below `path`; the least recently opened first
        self._finished: list[str] = []  # file names of the current epoch
        self._changed: set[str] = set()  # directories, below `path` or absolute, whose entries were not synced
        self._owned: OwnedFolder | FolderLock | None = None  # a lock: of a job without a checkpoint
        self._predecessor = ("", "")  # a job that hands over the folder, and what its files begin with

    def __repr__(self) -> str:
        return f"{self._step}({self.path!r})"

    def take_over(self, job: str, name: str) -> None:
        """Let the next `acquire` take the folder of a job from whose savepoint another one begins. What that has made
        visible after the savepoint is removed when the sink is opened: the rows come again.
        """
        self._predecessor = (job, name)

    def acquire(self, run: str, checkpoint: str | None) -> None:
        """Take the folder for a run of a job. A job without a checkpoint has it until `close`, another one for good."""
        self._release()
        try:
            self._make_root()
            with writing(self.path):
                self._owned = (hold_folder(self.path, run) if checkpoint is None
                               else take_folder(self.path, run, checkpoint, self._predecessor[0]))
        except StoreFailed as error:
            raise WriteFailed(f"{self.path} cannot be written", at=self._at, found=error.__cause__ or error) from error

    def check_no_output(self, job: str) -> None:
        """Raise if files of a job are visible."""
        for directory, _, names in os.walk(self.path):
            for name in names:
                if name.startswith(f"{PART}{job}-"):
                    raise Damaged("a file has output of this job, and the job's checkpoint has no epoch any more",
                                  file=os.path.join(directory, name),
                                  hint="restore the checkpoint, or begin with a new one and another output folder")

    def _make_root(self) -> None:
        with writing(self.path):
            make_directory(self.path)

    def _release(self) -> None:
        if isinstance(self._owned, FolderLock):
            self._owned.release()
        self._owned = None

    def open(self, schema: pa.Schema, committed: Json, next: str) -> None:
        for name in self._by:
            if name not in schema.names:
                raise UnknownColumn(f"no column {name!r} to partition by", at=self._at, step=self._step,
                                    has=", ".join(schema.names), hint=guess(name, schema.names))
            if not can_split(schema.field(name).type):
                raise WrongType(f"column {name!r} is {schema.field(name).type}, which cannot name a directory",
                                at=self._at, step=self._step, hint="partition by text, numbers or times")
        self._prefix, self._epoch, self._count = next, 0, 0
        self._open, self._finished = {}, []
        self._file_schema = pa.schema([each for each in schema if each.name not in self._by])
        if not self._file_schema.names:
            raise BadArgument("partition_by names all columns, so none is left to write", at=self._at, step=self._step)
        self._make_root()
        with writing(self.path):  # refuses types that the format cannot write
            self._format.begin(pa.BufferOutputStream(), self._file_schema).close()
        self.commit(committed)
        own, (_, before), last = next.partition("-")[0], self._predecessor, _epoch_of(committed)
        if before and (gone := self._remove_orphans(before, last or (-1, -1))):
            warn(f"{gone} files that another job wrote to {self.path} after the savepoint were removed: this job "
                 "writes their rows again", self._at)
        is_own = committed is None or _read(committed).name.startswith(f"{own}-")
        self._remove_orphans(own, last if is_own else None, waiting=waiting_files(committed))

    def for_task(self, schema: pa.Schema, prefix: str, task: int) -> FileSink:
        """A sink for the rows of one of several tasks: it stages files, which this sink commits.

        `prefix` is `<job>-<number>`, as `next` is to `open`. `prepare` returns the names; `epoch_of` combines those
        of all tasks.
        """
        found = FileSink(self.path, self._format, self._by, self._roll_bytes, self._step, self._at)
        found._file_schema = pa.schema([each for each in schema if each.name not in self._by])
        found._prefix, found._epoch, found._attempt = prefix, task, uuid.uuid4().hex[:12]
        return found

    def epoch_of(self, prefix: str, prepared: Sequence[Json]) -> Json:
        """What `commit` takes for the files that the tasks of one prefix have prepared; all must exist."""
        files = [name for each in prepared for name in _read(each).files]
        for name in files:
            if not os.path.exists(os.path.join(self.path, name)):
                raise WriteFailed(f"a task wrote a file to {self.path}, and it is not there", at=self._at, found=name,
                                  hint="every machine that runs tasks must have this very directory under this path")
        return {"epoch": f"{prefix}-{_LAST_TASK}", "files": [*files]}

    def epoch_with_waiting(self, epoch: Json, waiting: Sequence[str]) -> Json:
        """The epoch in which these staged files wait.

        Many are joined meanwhile, up to a size that is soon copied, so that an epoch has few names.
        """
        name, directories = _read(epoch).name, {os.path.dirname(each) for each in waiting}
        is_many = len(waiting) >= _MAX_WAITING * max(1, len(directories))
        files = self._join(waiting, name, min(self._roll_bytes, _REJOINED_BYTES)) if is_many else [*waiting]
        return {"epoch": name, "files": [], "waiting": [*files], "joined": _missing(waiting, files)}

    def epoch_of_waiting(self, epoch: Json, waiting: Sequence[str], joins: bool) -> Json:
        """The epoch in which staged files that have waited are committed: joined, or as they are."""
        name = _read(epoch).name
        files = self._join(waiting, name, self._roll_bytes) if joins else [*waiting]
        return {"epoch": name, "files": [*files], "joined": _missing(waiting, files)}

    def _join(self, names: Sequence[str], epoch: str, limit_bytes: int) -> list[str]:
        """Staged, durable files with the rows of these, of up to `limit_bytes` each; larger ones are not copied."""
        groups: dict[str, list[tuple[list[str], int]]] = {}  # by directory: names, and their bytes
        for name in names:
            size, some = self.size_bytes([name]), groups.setdefault(os.path.dirname(name), [])
            if some and some[-1][1] + size <= limit_bytes:
                some[-1] = ([*some[-1][0], name], some[-1][1] + size)
            else:
                some.append(([name], size))
        attempt, joined, written = uuid.uuid4().hex[:12], list[str](), list[str]()
        try:
            for directory, some in groups.items():
                for members, _ in some:
                    if len(members) == 1:
                        joined += members
                        continue
                    name = os.path.join(directory, f"{STAGED}{epoch}-{attempt}{len(joined):04}{self._format.suffix}")
                    joined.append(name)
                    written.append(name)
                    path = os.path.join(self.path, name)
                    with writing(path), pa.OSFile(path, "wb") as file:
                        self._format.join([os.path.join(self.path, each) for each in members], file, self._file_schema)
                    self._changed.add(directory)
            self._sync(written)
        except BaseException:
            self._remove_files(written)
            raise
        self._sync_directories()
        return joined

    def size_bytes(self, names: Sequence[str]) -> int:
        """The size of some files of the sink."""
        with writing(self.path):
            return sum(os.stat(os.path.join(self.path, name)).st_size for name in names)

    def is_full(self, names: Sequence[str]) -> bool:
        """Whether some files are together as large as a file should become."""
        return self.size_bytes(names) >= self._roll_bytes

    def _remove_files(self, names: Sequence[str]) -> None:
        """Remove staged files, where they are still there."""
        for name in names:
            with writing(os.path.join(self.path, name)), contextlib.suppress(FileNotFoundError):
                os.remove(os.path.join(self.path, name))

    def remove_staged(self, prefix: str, waiting: Sequence[str]) -> None:
        """Remove staged files of a job up to a number, but for those that wait: those of attempts whose names did not
        reach the driver. Later ones may belong to a driver that has taken over.
        """
        job, _, number = prefix.partition("-")
        self._remove_orphans(job, None, int(number), waiting)

    def _remove_orphans(self, job: str, committed: tuple[int, int] | None, last: int | None = None,
                        waiting: Sequence[str] = ()) -> int:
        """Remove staged files of a job, and visible ones after an epoch: the number of these."""
        visible = 0
        retained = {os.path.join(self.path, name) for name in waiting}
        for directory, _, names in os.walk(self.path):
            orphans = [name for name in names if name.startswith(f"{STAGED}{job}-")
                       and os.path.join(directory, name) not in retained]  # fmt: skip
            if last is not None:
                orphans = [name for name in orphans if (found := _number(name)) is not None and found[0] <= last]
            if committed is not None:
                parts = (name for name in names if name.startswith(f"{PART}{job}-"))
                later = [name for name in parts if (found := _number(name)) is not None and found > committed]
                visible += len(later)
                orphans += later
                if later:  # none may come back after the next epoch
                    self._note_changed(os.path.relpath(directory, self.path))
            for name in orphans:
                # Missing: the attempt that made it has removed it itself.
                with writing(os.path.join(directory, name)), contextlib.suppress(FileNotFoundError):
                    os.remove(os.path.join(directory, name))
            if orphans and directory != self.path:
                self._drop_empty(directory)
        return visible

    def _drop_empty(self, directory: str) -> None:
        """Remove directories that nothing is left in, up to the sink's own."""
        with contextlib.suppress(OSError):
            while directory != self.path:
                os.rmdir(directory)
                directory = os.path.dirname(directory)

    def write(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        for directory, rows in split(batch, self._by, self._file_schema):
            staged = self._open.get(directory) or self._begin(directory)
            staged.add(rows)
            if staged.buffered_bytes >= min(GROUP_BYTES, self._roll_bytes) or staged.buffered_rows >= GROUP_ROWS:
                staged.flush()
                if staged.file.tell() >= self._roll_bytes:
                    self._finish(directory)
        if len(self._open) > 1 and sum(each.buffered_bytes for each in self._open.values()) > _BUFFERED_BYTES:
            for staged in self._open.values():
                staged.flush()

    def _begin(self, directory: str) -> StagedFile:
        while len(self._open) >= _MAX_OPEN:
            self._finish(next(iter(self._open)))
        name = f"{STAGED}{self._prefix}-{self._epoch:010}-{self._attempt}{self._count:04}{self._format.suffix}"
        self._count += 1
        name = os.path.join(directory, name)
        path = os.path.join(self.path, name)
        with writing(path):
            self._make(directory)
            file = pa.OSFile(path, "wb")
            staged = StagedFile(name, path, file, self._format.begin(file, self._file_schema), self._file_schema)
        self._changed.add(directory)
        self._open[directory] = staged
        return staged

    def _make(self, directory: str) -> None:
        if directory:
            os.makedirs(os.path.join(self.path, directory), exist_ok=True)
            self._note_changed(os.path.dirname(directory))  # existing ones too: another task may have made them

    def _note_changed(self, directory: str) -> None:
        """Entries of a directory below the sink's own, and of all above it, are to be synced."""
        directory = "" if directory == "." else directory
        self._changed.add(directory)
        while directory:
            directory = os.path.dirname(directory)
            self._changed.add(directory)

    def _finish(self, directory: str) -> None:
        staged = self._open[directory]
        staged.finish()
        del self._open[directory]
        self._finished.append(staged.name)

    def prepare(self) -> Json:
        for directory in list(self._open):
            self._finish(directory)
        self._sync(self._finished)
        self._sync_directories()
        prepared: dict[str, Json] = {"epoch": f"{self._prefix}-{self._epoch:010}", "files": [*self._finished],
                                    "folder": self.path}  # fmt: skip
        self._finished, self._epoch, self._count = [], self._epoch + 1, 0
        return prepared

    def commit(self, prepared: Json) -> None:
        if prepared is None:
            return
        epoch = _read(prepared)
        if isinstance(self._owned, OwnedFolder):
            self._owned.check()
        folders = list(dict.fromkeys([self.path, epoch.folder or self.path]))
        missing = [final for staged, final in epoch.renames()
                   if not any(self._rename(folder, staged, final) for folder in folders)]
        if missing:  # a consumer of the results may have moved them since
            warn(f"files of the last epoch are not in {' or '.join(folders)}, nor staged there: {missing[0]} "
                 f"and {len(missing) - 1} more; unless a consumer moved them, their rows are lost", self._at)
        self._remove_files(epoch.joined)

    def _rename(self, folder: str, staged: str, final: str) -> bool:
        """Make a file visible; False if the folder does not have it."""
        path = os.path.join(folder, final)
        with writing(path):
            try:
                os.rename(os.path.join(folder, staged), path)
            except FileNotFoundError:  # an earlier call renamed it
                if not os.path.exists(path):
                    return False
        self._changed.add(os.path.dirname(final if folder == self.path else path))
        return True

    def _sync_directories(self) -> None:
        """Syncs renames too: in time, as the manifest that names the files is replaced by the next one only."""
        changed, self._changed = self._changed, set()
        self._sync([directory for directory in changed if os.path.isdir(os.path.join(self.path, directory))])

    def _sync(self, names: list[str]) -> None:
        """Sync these in parallel: file systems commit their journal for several at once."""
        paths = [os.path.join(self.path, name) for name in names]
        if len(paths) < 2:
            list(map(sync_path, paths))
        else:
            from concurrent.futures import ThreadPoolExecutor

            with ThreadPoolExecutor(min(len(paths), _SYNC_THREADS)) as pool:
                list(pool.map(sync_path, paths))

    def close(self) -> None:
        """Prepared files stay: a manifest may name them, which only the next `open` can know."""
        for staged in self._open.values():
            for each in (staged.writer, staged.file):
                with contextlib.suppress(OSError, pa.ArrowException):
                    each.close()
        for name in [*self._finished, *(staged.name for staged in self._open.values())]:
            path = os.path.join(self.path, name)
            with contextlib.suppress(OSError):
                os.remove(path)
                self._drop_empty(os.path.dirname(path))
        self._open, self._finished = {}, []
        self._sync_directories()
        self._release()


class _Epoch(NamedTuple):
    """The result of `prepare`."""

    name: str
    files: list[str]  # staged, below the folder
    folder: str  # "": absent in the first manifests, and in those of Spark, whose sinks have one folder
    waiting: list[str]  # staged, for a later epoch
    joined: list[str]  # staged, whose rows are in `files`

    def renames(self) -> Iterator[tuple[str, str]]:
        for name in self.files:
            directory, base = os.path.split(name)
            yield name, os.path.join(directory, PART + base.removeprefix(STAGED))


def _read(prepared: Json) -> _Epoch:
    match prepared:
        case {"epoch": str(epoch), "files": list(files), **more}:
            folder = more.get("folder", "")
            names, waiting = _staged_names(files), _staged_names(more.get("waiting", []))
            joined = _staged_names(more.get("joined", []))
            if (names is not None and waiting is not None and joined is not None and isinstance(folder, str)
                    and (not folder or os.path.isabs(folder))):
                return _Epoch(epoch, names, folder, waiting, joined)
    raise WriteFailed("this is no list of staged files", found=f"{prepared!r:.200}")


def _missing(names: Sequence[str], among: Sequence[str]) -> list[Json]:
    there = {*among}
    return [name for name in names if name not in there]


def waiting_files(prepared: Json) -> list[str]:
    """The staged files that wait for a later epoch than this one."""
    return [] if prepared is None else _read(prepared).waiting


def staged_files(prepared: Json) -> list[str]:
    """The staged files that become visible with an epoch."""
    return _read(prepared).files


def _staged_names(names: object) -> list[str] | None:
    """The names in a list, if all are those of staged files; else None."""
    if not isinstance(names, list):
        return None
    found = [name for name in names if isinstance(name, str) and _is_staged(name)]
    return found if len(found) == len(names) else None


def _is_staged(name: str) -> bool:
    """Whether a name is that of a staged file below the sink's directory."""
    directory, base = os.path.split(name)
    return base.startswith(STAGED) and not os.path.isabs(name) and ".." not in directory.split(os.sep)


def _epoch_of(committed: Json) -> tuple[int, int] | None:
    return None if committed is None else _number(f"{PART}{_read(committed).name}-")


def _number(name: str) -> tuple[int, int] | None:
    """The run and the epoch in a file name."""
    match name.split("-"):
        case [_, _, run, epoch, _] if run.isdigit() and epoch.isdigit():
            return int(run), int(epoch)
    return None


def sync_path(path: str) -> None:
    """Make a file or directory durable."""
    with writing(path):
        local.sync_path(path)
