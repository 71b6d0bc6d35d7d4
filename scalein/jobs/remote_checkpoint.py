"""RemoteCheckpoint: the epochs and savepoints of a job on any file system that pyarrow supports.

State is on the local disk, in a working folder that is a checkpoint itself (`checkpoint.py`). When an epoch is complete
there, its new files are put to the remote folder, then an entry that names all of its files: that is the commit point.
The thread that publishes epochs does so, beside the job. A start downloads the last epochs into a new working folder.

    <remote>/name                                     of the job, over all its runs
    <remote>/claims/<run>-<id>                        of a run: the greatest owns the checkpoint, all others are fenced
    <remote>/epochs/<run>-<epoch>.json                an entry: the manifest, and the remote name and size of each file
    <remote>/files/<run>-<id>-<folder>-<file>         a file of state: written once, under a name that is never reused
    <remote>/committed                                the checksum of the newest manifest whose output is known visible
    <remote>/savepoints/<name>/                       a folder of this form, with one entry and copies of its files

A run claims the checkpoint before it reads the newest entry, and publishes that again under its own number before it
removes or writes anything: what an earlier run that still works publishes later is never the newest. Such a run notices
the claim before or after its next entry, and ends. The file system must list what was put.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from scalein.errors import Damaged, ScaleinError, StoreFailed, here, warn
from scalein.jobs.checkpoint import FORMAT, RETAINED_EPOCHS, SAVEPOINTS, Checkpoint, Opened, check_of, manifest_name
from scalein.jobs.epochs import files_of_epoch
from scalein.storage.checked_json import Json, as_int, as_list, as_map, as_text
from scalein.storage.claims import Claims
from scalein.storage.object_store import Location
from scalein.storage.publish import seal, unseal

CLAIMS, EPOCHS, FILES = "claims", "epochs", "files"
BLOCK_BYTES = 1 << 22  # read and written at once
_ENTRY = re.compile(r"(\d{10})-(\d{10})\.json")
_LOCAL = re.compile(r"state-\d{1,9}/[\w.-]{1,200}")
_REMOTE = re.compile(r"[\w.-]{1,250}")


@dataclass(frozen=True)
class RemoteFile:
    """A file of state: its name in the folder of files, and its size in bytes."""

    name: str
    size: int


@dataclass(frozen=True)
class Entry:
    """An epoch as it is in the remote folder. `files` are by their names in the working folder."""

    name: str
    number: int
    content: dict[str, Json]
    files: dict[str, RemoteFile]


class RemoteEpochs:
    """The entries of a remote folder, and local copies of their files, for whoever reads them."""

    def __init__(self, location: Location, path: Path) -> None:
        self.location, self.path = location, path
        self.files: dict[str, RemoteFile] = {}  # that were copied, by their local names

    def names(self) -> list[str]:
        """Entries, newest first: that of a later run is newer."""
        return sorted((name for name in self.location.names(EPOCHS) if _ENTRY.fullmatch(name)), reverse=True)

    def fetch(self, name: str) -> Entry:
        """Copy an epoch: its manifest and all that this names."""
        entry = self.read(name)
        for local, file in entry.files.items():
            self._download(local, file)
        (self.path / manifest_name(entry.number)).write_bytes(seal(entry.content))
        return entry

    def read(self, name: str) -> Entry:
        number, file = number_of(name), self.location.uri_of(f"{EPOCHS}/{name}")
        try:
            content = unseal(self.location.read(f"{EPOCHS}/{name}"))
            files = {}
            for local, about in as_map(content.pop("remote_files")).items():
                remote, size = as_text(as_list(about)[0]), as_int(as_list(about)[1])
                if not _LOCAL.fullmatch(local) or not _REMOTE.fullmatch(remote):
                    raise ValueError(f"a file {local!r:.100} in {remote!r:.100}")
                files[local] = RemoteFile(remote, size)
            if content.get("epoch") != number:
                raise ValueError("it is not what its name says")
        except (ValueError, KeyError, IndexError) as error:
            raise Damaged("an epoch's entry cannot be read", file=file, found=repr(error)) from error
        except FileNotFoundError as error:
            raise Damaged("an epoch's entry is gone", file=file) from error
        return Entry(name, number, content, files)

    def _download(self, local: str, file: RemoteFile) -> None:
        path, name = self.path / local, f"{FILES}/{file.name}"
        if local in self.files:  # of a newer epoch
            if self.files[local] != file:
                raise Damaged("two epochs have different files of one name", file=self.location.uri_of(name))
            return
        path.parent.mkdir(exist_ok=True)
        size = 0
        try:
            with open(path, "wb") as target, self.location.files.open_input_stream(self.location.path(name)) as source:
                while block := source.read(BLOCK_BYTES):
                    size += target.write(block)
        except FileNotFoundError as error:
            raise Damaged("a file of the checkpoint is missing", file=self.location.uri_of(name)) from error
        except OSError as error:
            raise StoreFailed("cannot read the checkpoint", file=self.location.uri_of(name), found=error) from error
        if size != file.size:
            raise Damaged("a file of the checkpoint is not as long as it was", file=self.location.uri_of(name))
        self.files[local] = file


def number_of(name: str) -> int:
    """The epoch of an entry.

    >>> number_of("0000000002-0000000007.json")
    7
    """
    return int(name[11:21])


class RemoteCheckpoint(Checkpoint):
    """Epochs in a remote folder, through a working folder that is removed at the end."""

    def __init__(self, location: Location) -> None:
        super().__init__(Path(tempfile.mkdtemp(prefix="scalein-checkpoint-")))
        self._remote = location
        self._own, self._id = 0, uuid.uuid4().hex[:8]  # number of this run, and a part of its names that no other has
        self._claims = Claims(location, CLAIMS)
        self._entries: list[Entry] = []  # that are retained, oldest first
        self._reader = RemoteEpochs(location, self.path)

    @property
    def address(self) -> str:
        return self._remote.uri

    def open(self) -> None:
        super().open()
        self._remote.create_folders("", CLAIMS, EPOCHS, FILES)
        runs = [int(match[1]) for name in self._remote.names(EPOCHS) if (match := _ENTRY.fullmatch(name))]
        self._own = self._claims.take(max(runs, default=-1) + 1)
        self._fetch()

    def begin_run(self, last: int) -> int:
        self._run = self._own
        return self._own

    def _check_not_superseded(self) -> None:
        """The working folder is this run's alone."""

    def _noted(self, name: str, form: re.Pattern[str]) -> str | None:
        with suppress(FileNotFoundError, UnicodeDecodeError):
            if form.fullmatch(found := self._remote.read(name).decode("ascii")):
                return found
        return None

    def _note(self, name: str, text: str) -> None:
        self._remote.put(name, text.encode())

    # --- a start

    def _fetch(self) -> None:
        """Copy the last epochs into the working folder; one that lacks a file is left out."""
        names = self._reader.names()
        found: list[Entry] = []
        damaged: ScaleinError | None = None
        for name in names:
            if len(found) == RETAINED_EPOCHS or (found and number_of(name) >= found[-1].number):
                continue  # of a run that went on beside a later one, or published again by that
            try:
                found.append(self._reader.fetch(name))
            except Damaged as error:
                damaged = damaged or error
        if damaged is not None:
            if not found:
                raise damaged
            if found[0].name != names[0]:
                warn(f"the newest checkpoint is damaged, going back to epoch {found[0].number}: {damaged}")
        self._entries = found[::-1]

    def recovered(self, attempt: Callable[[dict[str, Json] | None], Opened]) -> Opened:
        found = super().recovered(attempt)
        numbers = self.numbers()  # of epochs that are whole
        self._entries = [entry for entry in self._entries if entry.number in numbers]
        if self._entries:
            newest = self._entries.pop()
            self._put_entry(newest.number, newest.content, newest.files)
        named = {file.name for entry in self._entries for file in entry.files.values()}
        kept = {entry.name for entry in self._entries}
        for folder, needed in ((EPOCHS, kept), (FILES, named)):
            for name in self._remote.names(folder):
                if name not in needed:
                    self._remote.remove(f"{folder}/{name}")
        self._claims.remove_earlier()
        return found

    # --- an epoch

    def publish(self, epoch: int, content: dict[str, Json]) -> list[dict[str, Json]]:
        kept = super().publish(epoch, content)
        try:
            files = {}
            for local in files_of_epoch(self.path, content):
                if local not in self._reader.files:
                    self._reader.files[local] = self._upload(local)
                files[local] = self._reader.files[local]
            self._put_entry(epoch, {**content, "format": FORMAT, "epoch": epoch}, files)
            self._retain()
        except OSError as error:
            raise StoreFailed("cannot write the checkpoint", file=self.address, found=error,
                              hint="the last one is whole") from error
        return kept

    def _upload(self, local: str, name: str = "") -> RemoteFile:
        own = f"{self._own:010}-{self._id}-{local.replace('/', '-')}"
        size = 0
        with open(self.path / local, "rb") as source, self._remote.create(name or f"{FILES}/{own}") as target:
            while block := source.read(BLOCK_BYTES):
                size += target.write(block)
        return RemoteFile(own, size)

    def _put_entry(self, number: int, content: dict[str, Json], files: dict[str, RemoteFile]) -> None:
        name = f"{self._own:010}-{number:010}.json"
        self._claims.check("run")
        self._remote.put(f"{EPOCHS}/{name}", seal(_with_files(content, files)))
        self._claims.check("run")
        self._entries = [entry for entry in self._entries if entry.name != name]
        self._entries.append(Entry(name, number, content, files))

    def _retain(self) -> None:
        """Remove older epochs, then the files that no other names: one that cannot be removed is removed by a start."""
        gone, self._entries = self._entries[:-RETAINED_EPOCHS], self._entries[-RETAINED_EPOCHS:]
        named = {file.name for entry in self._entries for file in entry.files.values()}
        with suppress(StoreFailed):
            for entry in gone:
                self._remote.remove(f"{EPOCHS}/{entry.name}")
            for file in {file.name for entry in gone for file in entry.files.values()} - named:
                self._remote.remove(f"{FILES}/{file}")
        self._reader.files = {local: file for local, file in self._reader.files.items() if file.name in named}

    def note_committed(self, epoch: int) -> None:
        with suppress(OSError, StoreFailed):
            self._remote.put("committed", check_of(self.path / manifest_name(epoch)))

    def is_committed(self, epoch: int) -> bool:
        with suppress(OSError):
            return self._remote.read("committed") == check_of(self.path / manifest_name(epoch))
        return False

    def save_as(self, name: str) -> str:
        """Copy the newest epoch, for good: its entry is put last."""
        entry, folder = self._entries[-1], f"{SAVEPOINTS}/{name}"
        try:
            if self._remote.names(f"{folder}/{EPOCHS}"):
                raise StoreFailed("cannot keep a savepoint", at=here(), file=self._remote.uri_of(folder),
                                  hint="names of savepoints are used once")
            self._remote.create_folders(f"{folder}/{EPOCHS}", f"{folder}/{FILES}")
            for local, file in entry.files.items():
                self._copy(local, f"{FILES}/{file.name}", f"{folder}/{FILES}/{file.name}")
            self._remote.put(f"{folder}/{EPOCHS}/{entry.name}", seal(_with_files(entry.content, entry.files)))
        except OSError as error:
            raise StoreFailed("cannot keep a savepoint", at=here(), file=self._remote.uri_of(folder),
                              found=error) from error
        return self._remote.uri_of(folder)

    def _copy(self, local: str, source: str, target: str) -> None:
        """A file of the remote folder under a second name: by the file system, where it can."""
        try:
            self._remote.files.copy_file(self._remote.path(source), self._remote.path(target))
        except (pa.ArrowNotImplementedError, NotImplementedError):
            self._upload(local, target)

    def close(self) -> None:
        super().close()
        shutil.rmtree(self.path, ignore_errors=True)


def _with_files(content: dict[str, Json], files: dict[str, RemoteFile]) -> dict[str, Json]:
    named: dict[str, Json] = {local: [file.name, file.size] for local, file in files.items()}
    return {**content, "remote_files": named}


def fetch_savepoint(location: Location, into: Path) -> None:
    """Copy the newest epoch of a remote folder, a checkpoint or a savepoint, into a local one."""
    epochs = RemoteEpochs(location, into)
    if not (names := epochs.names()):
        raise StoreFailed("there is no savepoint in this directory", at=here(), file=location)
    epochs.fetch(names[0])
