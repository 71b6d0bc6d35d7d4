"""Checkpoint: the epochs of a job on disk. An epoch is what a job had read, its state and its output at one barrier.

An epoch's manifest is the commit point. Before it exists, the state is durable and the output is staged and synced;
afterwards the output is made visible, which is idempotent. So a job that is killed at any instruction resumes from its
last manifest, and no row is lost or duplicated.

    <checkpoint>/name                      of the job, over all its runs
    <checkpoint>/run                       the number of the last one
    <checkpoint>/epoch-0000000007.json     the manifests of the last epochs
    <checkpoint>/committed                 the checksum of the newest one whose output is known to be visible
    <checkpoint>/state-<segment>/          the stores of the flow's fragments
    <checkpoint>/_epoch-...                one that was being written
    <checkpoint>/savepoints/<name>/        an epoch and its state that stay for good

A manifest is one line of JSON and a line with its checksum; nothing in it is executed or unpickled.

When an epoch begins is decided in `coordinator.py` (`Coordinator.is_due`).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TypeVar

from scalein.errors import Damaged, NewerFormat, ScaleinError, StoreFailed, here, warn
from scalein.storage.checked_json import Json, as_int
from scalein.storage.filesystem import LOCK

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

    @property
    def is_adopted(self) -> bool:
        """Whether the epoch that the job goes on from is a savepoint's: it says nothing of this job's output."""
        return self._adopted is not None

    def open(self) -> None:
        """Take the directory."""
        with _named("cannot open the checkpoint", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / "lock", "ab")  # noqa: SIM115 (held until close)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise StoreFailed("another job is using this checkpoint", at=here(), file=self.path,
                              hint="stop it first, or give another directory") from error
        with _named("cannot tidy the checkpoint", self.path):
            for left in self.path.glob("_epoch-*"):
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
        return number

    def _noted(self, name: str, form: re.Pattern[str]) -> str | None:
        with suppress(OSError, UnicodeDecodeError):
            if form.fullmatch(found := (self.path / name).read_text("ascii")):
                return found
        return None

    def _note(self, name: str, text: str) -> None:
        path, staged = self.path / name, self.path / f"_epoch-{name}"
        with _named("cannot write the checkpoint", path):
            _write(staged, text.encode())
            os.rename(staged, path)
            _sync(self.path)

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
                                             file=self.path / _name(number), found=repr(error))
                continue
            if damaged is not None:
                warn(f"the newest checkpoint is damaged, going back to epoch {number}: {damaged}")
                with _named("cannot remove a damaged epoch", self.path):
                    for newer in self.numbers():
                        if newer > number:
                            (self.path / _name(newer)).unlink()
            self._adopted = number if epoch.get("adopted") is True else None
            return found
        if damaged is not None:
            raise damaged
        with _named("cannot remove state that no epoch names", self.path):
            for state in self.path.glob("state-*"):  # it was never committed
                shutil.rmtree(state)
        return attempt(None)

    def save_as(self, name: str) -> Path:
        """Keep the newest epoch under a name, for good: files are linked where that can be. No epoch is under way."""
        path, staged = self.path / SAVEPOINTS / name, self.path / SAVEPOINTS / f".{name}"  # no name begins with a dot
        try:
            shutil.rmtree(staged, ignore_errors=True)
            staged.mkdir(parents=True)
            newest = _name(self.numbers()[-1])
            _link(self.path / newest, staged / newest)
            for state in self.path.glob("state-*"):
                _link_files(state, staged / state.name)
            _sync(staged)
            os.rename(staged, path)
            for parent in (path.parent, self.path):
                _sync(parent)
        except OSError as error:
            shutil.rmtree(staged, ignore_errors=True)
            raise StoreFailed("cannot keep a savepoint", at=here(), file=path, found=error,
                              hint="names of savepoints are used once") from error
        return path

    def begin_from(self, savepoint: Path) -> None:
        """Begin with what a savepoint has, unless there is an epoch already."""
        if self.numbers():
            return
        other = Checkpoint(savepoint)
        if not savepoint.is_dir() or not other.numbers():
            raise StoreFailed("there is no savepoint in this directory", at=here(), file=savepoint)
        with _named("cannot begin from a savepoint", savepoint):
            for state in savepoint.glob("state-*"):
                shutil.rmtree(self.path / state.name, ignore_errors=True)
                _link_files(state, self.path / state.name)
            _sync(self.path)
        found = other.read(other.numbers()[-1])
        # Output of the other job is the other job's.
        self.publish(as_int(found["epoch"]), {**found, "job": self.name(), "output": [], "adopted": True})

    def numbers(self) -> list[int]:
        with _named("cannot look into the checkpoint", self.path):
            matches = (_NAME.fullmatch(name) for name in os.listdir(self.path))
            return sorted(int(match[1]) for match in matches if match)

    def read(self, number: int) -> dict[str, Json]:
        path = self.path / _name(number)
        try:
            data = path.read_bytes()
        except OSError as error:  # unless it is gone, that says nothing of what is in it
            raise StoreFailed("an epoch's manifest cannot be read", file=path, found=error) from error
        try:
            text, _, check = data.partition(b"\n")
            if check.strip() != b"%08x" % zlib.crc32(text):
                raise ValueError("the checksum does not fit")
            found = json.loads(text)
            if not isinstance(found, dict) or found.get("epoch") != number:
                raise ValueError("it is not what its name says")
        except (ValueError, RecursionError) as error:
            raise Damaged("an epoch's manifest cannot be read", file=path, found=error) from error
        if not isinstance(found.get("format"), int) or found["format"] > FORMAT:
            raise NewerFormat("the checkpoint was written by a newer scalein", file=path, found=found.get("format"),
                              has=FORMAT)
        return found

    def publish(self, epoch: int, content: dict[str, Json]) -> list[dict[str, Json]]:
        """Commit an epoch: synced, then under its name. Gives those that stay, oldest first."""
        text = json.dumps({**content, "format": FORMAT, "epoch": epoch}, separators=(",", ":")).encode()
        staged, path = self.path / f"_{_name(epoch)}", self.path / _name(epoch)
        try:
            _write(staged, text + b"\n%08x\n" % zlib.crc32(text))
            os.rename(staged, path)
            _sync(self.path)
            gone = [number for number in self.numbers()[:-RETAINED_EPOCHS] if number != self._adopted]
            if self._adopted is not None:  # who goes back to it would not know what this job has written
                gone.append(self._adopted)
            for old in gone:
                (self.path / _name(old)).unlink(missing_ok=True)
            if gone:
                _sync(self.path)  # a manifest must not come back without its files
            self._adopted = None
        except OSError as error:
            for left in (staged, path):
                with suppress(OSError):  # a start that finds it nevertheless has all that it names
                    left.unlink(missing_ok=True)
            raise StoreFailed("cannot write the checkpoint", file=path, found=error,
                              hint="the last one is whole") from error
        return self.kept()

    def note_committed(self, epoch: int) -> None:
        """Remember that the output of an epoch is visible; if that gets lost, it is only not known."""
        with suppress(OSError):
            (self.path / "committed").write_bytes(_check_of(self.path / _name(epoch)))

    def is_committed(self, epoch: int) -> bool:
        """Whether all output of an epoch is known to be visible."""
        with suppress(OSError):
            return (self.path / "committed").read_bytes() == _check_of(self.path / _name(epoch))
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


def _check_of(path: Path) -> bytes:
    """What tells a manifest from all others: an epoch that turned out to be damaged gives its number to another."""
    return path.read_bytes().rpartition(b"\n")[0].rpartition(b"\n")[2]


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Have a file, or the names in a directory, on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _link_files(source: Path, target: Path) -> None:
    """The files of a state under a second name: they are written once and never changed, but for a store's lock."""
    target.mkdir()
    for path in source.iterdir():
        with suppress(FileNotFoundError):  # what no epoch names may be removed meanwhile
            if path.is_file() and path.name != LOCK:
                _link(path, target / path.name)
    _sync(target)


def _link(source: Path, target: Path) -> None:
    """The same file under a second name; where file systems allow no link, a copy, synced."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK):
            raise
        shutil.copyfile(source, target)
        _sync(target)


def _name(number: int) -> str:
    return f"epoch-{number:010}.json"
