"""Checkpoint: the epochs of a job on disk. An epoch is what a job had read, its state and its output at one barrier.

An epoch's manifest is the commit point. Before it exists, the state is durable and the output is staged and synced;
afterwards the output is made visible, which is idempotent. So a job that is killed at any instruction resumes from its
last manifest, and no row is lost or duplicated.

    <checkpoint>/name                      of the job, over all its runs
    <checkpoint>/run                       the number of the last one
    <checkpoint>/epoch-0000000007.json     the manifests of the last epochs
    <checkpoint>/committed                 the checksum of the newest one whose output is known to be visible
    <checkpoint>/state-0/                  the state of an operator; epochs name the folders (`exec/evolution.py`)
    <checkpoint>/_...                      one that was being written
    <checkpoint>/savepoints/<name>/        an epoch and its state that stay for good

A manifest is one line of JSON and a line with its checksum; nothing in it is executed or unpickled.

When an epoch begins is decided in `coordinator.py` (`Coordinator.is_due`).
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TypeVar

from scalein.errors import Damaged, Fenced, NewerFormat, ScaleinError, StoreFailed, here, warn
from scalein.storage.checked_json import Json, as_int
from scalein.storage.filesystem import CHECKPOINT_LOCK, LOCK
from scalein.storage.local import LocalFileSystem, lock_file, make_directory, sync_path
from scalein.storage.publish import TEMPORARY, put, seal, unseal

Opened = TypeVar("Opened")

FORMAT = 1
RETAINED_EPOCHS = 3  # besides savepoints
SAVEPOINTS = "savepoints"
_NAME = re.compile(r"epoch-(\d{10})\.json")
_JOB = re.compile(r"[0-9a-f]{8}")
_RUN = re.compile(r"[0-9]{1,9}")


class Checkpoint:
    """A directory of epochs, and the lock over it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[bytes] | None = None
        self._adopted: int | None = None
        self._run: int | None = None
        self._fs: LocalFileSystem | None = None
        self._writer = uuid.uuid4().hex  # of temporary files

    @property
    def address(self) -> str:
        """Where it is, for messages and for the owners of output folders."""
        return str(self.path.absolute())

    @property
    def is_adopted(self) -> bool:
        """Whether the epoch that the job goes on from is a savepoint's: it says nothing of this job's output."""
        return self._adopted is not None

    def open(self) -> None:
        """Take the directory."""
        with _named("cannot open the checkpoint", self.path):
            make_directory(self.path)
            self._lock = lock_file(self.path / CHECKPOINT_LOCK)
        if self._lock is None:
            raise StoreFailed("another job is using this checkpoint", at=here(), file=self.path,
                              hint="stop it first, or give another directory")
        with _named("cannot tidy the checkpoint", self.path):
            for left in self.path.glob(f"{TEMPORARY}*"):
                left.unlink()

    def name(self) -> str:
        """The name of the job whose checkpoint this is. Files that it staged bear it, also before the first epoch."""
        found = self._noted("name", _JOB)
        if found is None:
            found = uuid.uuid4().hex[:8]
            self._note("name", found)
        return found

    def begin_run(self, last: int) -> int:
        """The number of a new run: above that of the last epoch's, and those of runs that ended before their first."""
        found = self._noted("run", _RUN)
        number = max(last, -1 if found is None else int(found)) + 1
        self._note("run", str(number))
        self._run = number
        return number

    def _check_not_superseded(self) -> None:
        """Raise if a later run has begun: some file systems that are mounted from elsewhere ignore the lock."""
        if self._run is not None and self._noted("run", _RUN) not in (str(self._run), None):
            raise Fenced("another run has taken over this checkpoint", file=self.path,
                         hint="one of the two must end; this one has")

    def _noted(self, name: str, form: re.Pattern[str]) -> str | None:
        with suppress(OSError, UnicodeDecodeError):
            if form.fullmatch(found := (self.path / name).read_text("ascii")):
                return found
        return None

    def _note(self, name: str, text: str) -> None:
        with _named("cannot write the checkpoint", self.path / name):
            self._put(name, text.encode())

    def _put(self, name: str, data: bytes) -> None:
        if self._fs is None:
            self._fs = LocalFileSystem(self.path)
        put(self._fs, name, data, writer=self._writer)

    def recovered(self, attempt: Callable[[dict[str, Json] | None], Opened]) -> Opened:
        """What `attempt` makes of the newest epoch that is whole, with its state; of None if there is no epoch."""
        damaged: ScaleinError | None = None
        for number in sorted(self.numbers(), reverse=True):
            try:
                epoch = self.read(number)
                found = attempt(epoch)
            except (Damaged, StoreFailed) as error:
                if isinstance(error, StoreFailed) and not isinstance(error.__cause__, FileNotFoundError | None):
                    raise  # the disk cannot be read now: falling back because of that would lose the newest epoch
                damaged = damaged or error
                continue
            except (ValueError, KeyError, IndexError, OverflowError) as error:
                damaged = damaged or Damaged("an epoch's manifest is malformed",
                                             file=self.path / manifest_name(number), found=repr(error))
                continue
            if damaged is not None:
                warn(f"the newest checkpoint is damaged, going back to epoch {number}: {damaged}")
                self.remove_after(number)
            self._adopted = number if epoch.get("adopted") is True else None
            return found
        if damaged is not None:
            raise damaged
        with _named("cannot remove state that no epoch names", self.path):
            for state in self.path.glob("state-*"):  # it was never committed
                shutil.rmtree(state)
        return attempt(None)

    def remove_after(self, number: int) -> None:
        """Remove the epochs after one, which is the newest then."""
        with _named("cannot remove an epoch", self.path):
            for newer in self.numbers():
                if newer > number:
                    (self.path / manifest_name(newer)).unlink()
            sync_path(self.path)

    def save_as(self, name: str) -> Path | str:
        """Keep the newest epoch under a name, for good: files are linked where that can be. No epoch is under way."""
        path, staged = self.path / SAVEPOINTS / name, self.path / SAVEPOINTS / f".{name}"  # no name begins with a dot
        try:
            shutil.rmtree(staged, ignore_errors=True)
            staged.mkdir(parents=True)
            newest = manifest_name(self.numbers()[-1])
            _link(self.path / newest, staged / newest)
            for state in self.path.glob("state-*"):
                _link_files(state, staged / state.name)
            sync_path(staged)
            os.rename(staged, path)
            for parent in (path.parent, self.path):
                sync_path(parent)
        except OSError as error:
            shutil.rmtree(staged, ignore_errors=True)
            raise StoreFailed("cannot keep a savepoint", at=here(), file=path, found=error,
                              hint="names of savepoints are used once") from error
        return path

    def begin_from(self, savepoint: Path) -> None:
        """Begin with what a savepoint has. There is no epoch yet."""
        other = Checkpoint(savepoint)
        if not savepoint.is_dir() or not other.numbers():
            raise StoreFailed("there is no savepoint in this directory", at=here(), file=savepoint)
        with _named("cannot begin from a savepoint", savepoint):
            for state in savepoint.glob("state-*"):
                shutil.rmtree(self.path / state.name, ignore_errors=True)
                _link_files(state, self.path / state.name)
            sync_path(self.path)
        found = other.read(other.numbers()[-1])
        # Output of the other job is the other job's, unless a sink goes on in its place (`Coordinator.open`).
        before: dict[str, Json] = {"job": found["job"], "output": found["output"]}
        self.publish(as_int(found["epoch"]),
                     {**found, "job": self.name(), "output": [], "adopted": True, "predecessor": before})

    def numbers(self) -> list[int]:
        with _named("cannot look into the checkpoint", self.path):
            matches = (_NAME.fullmatch(name) for name in os.listdir(self.path))
            return sorted(int(match[1]) for match in matches if match)

    def read(self, number: int) -> dict[str, Json]:
        path = self.path / manifest_name(number)
        try:
            data = path.read_bytes()
        except OSError as error:  # unless it is gone, that says nothing of what is in it
            raise StoreFailed("an epoch's manifest cannot be read", file=path, found=error) from error
        try:
            found = unseal(data)
            if found.get("epoch") != number:
                raise ValueError("it is not what its name says")
        except ValueError as error:
            raise Damaged("an epoch's manifest cannot be read", file=path, found=error) from error
        if not isinstance(version := found.get("format"), int) or version > FORMAT:
            raise NewerFormat("the checkpoint was written by a newer scalein", file=path, found=version, has=FORMAT)
        return found

    def publish(self, epoch: int, content: dict[str, Json]) -> list[dict[str, Json]]:
        """Commit an epoch: synced, then under its name. Gives those that stay, oldest first."""
        path = self.path / manifest_name(epoch)
        self._check_not_superseded()
        try:
            self._put(path.name, seal({**content, "format": FORMAT, "epoch": epoch}))
            self._check_not_superseded()
            gone = [number for number in self.numbers()[:-RETAINED_EPOCHS] if number != self._adopted]
            if self._adopted is not None:  # who goes back to it would not know what this job has written
                gone.append(self._adopted)
            for old in gone:
                (self.path / manifest_name(old)).unlink(missing_ok=True)
            if gone:
                sync_path(self.path)  # a manifest must not come back without its files
            self._adopted = None
        except Fenced:
            raise
        except (OSError, StoreFailed) as error:
            with suppress(OSError):  # a start that finds it nevertheless has all that it names
                path.unlink(missing_ok=True)
            raise StoreFailed("cannot write the checkpoint", file=path, found=_reason(error),
                              hint="the last one is whole") from error
        return self.kept()

    def note_committed(self, epoch: int) -> None:
        """Remember that the output of an epoch is visible; if that gets lost, it is only not known."""
        with suppress(OSError):
            (self.path / "committed").write_bytes(check_of(self.path / manifest_name(epoch)))

    def is_committed(self, epoch: int) -> bool:
        """Whether all output of an epoch is known to be visible."""
        with suppress(OSError):
            return (self.path / "committed").read_bytes() == check_of(self.path / manifest_name(epoch))
        return False

    def kept(self) -> list[dict[str, Json]]:
        """The manifests that there are, oldest first, without damaged ones."""
        found = []
        for number in self.numbers()[-RETAINED_EPOCHS:]:
            with suppress(Damaged):
                found.append(self.read(number))
        return found

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()


@contextmanager
def _named(what: str, path: Path) -> Iterator[None]:
    """Errors of the system say what could not be done to which file."""
    try:
        yield
    except OSError as error:
        raise StoreFailed(what, at=here(), file=error.filename or path, found=error) from error
    except StoreFailed as error:
        raise StoreFailed(what, at=here(), file=path, found=_reason(error)) from error


def _reason(error: Exception) -> object:
    """What the system said."""
    return error.__cause__ or error


def check_of(path: Path) -> bytes:
    """What tells a manifest from all others: an epoch that turned out to be damaged gives its number to another."""
    return path.read_bytes().rpartition(b"\n")[0].rpartition(b"\n")[2]


def _link_files(source: Path, target: Path) -> None:
    """The files of a state under a second name: they are written once and never changed, but for a store's lock."""
    target.mkdir()
    for path in source.iterdir():
        with suppress(FileNotFoundError):  # what no epoch names may be removed meanwhile
            if path.is_file() and path.name != LOCK:
                _link(path, target / path.name)
    sync_path(target)


def _link(source: Path, target: Path) -> None:
    """The same file under a second name; where file systems allow no link, a copy, synced."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK):
            raise
        shutil.copyfile(source, target)
        sync_path(target)


def manifest_name(number: int) -> str:
    return f"epoch-{number:010}.json"
