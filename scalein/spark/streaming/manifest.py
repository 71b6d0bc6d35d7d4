"""Manifests: the state and the output of a stream after a batch, under that batch's number.

A manifest is the commit point of a batch. The files that it names are durable before it is published: runs of state
(`hash_runs.py`) and staged output; what follows it can be repeated: output is made visible. So a batch that Spark
repeats after a crash either has had no effect, or is done, and then only its output is made visible again.

    <checkpoint>/manifests/0000000003-0000000007.json   of the third start, after batch 7: one line of JSON, and a line
                                                        with its checksum; after batch -1: no batch is done
    <checkpoint>/manifests/0000000003-0000000007-000001.json   the same, revised between batches 7 and 8: output that
                                                        waited to become visible in larger files does so
    <checkpoint>/manifests/start-0000000003-<id>        claim of a driver, which may write until there is a later start
    <checkpoint>/manifests/stream                       the stream's name over all starts, and the number of the first
    <checkpoint>/state/0000000003-<id>.arrow            runs of the third start; <id> is unique to a task's attempt
    <checkpoint>/output/0000000003-<id>.parquet         rows for a function that takes a DataFrame
    <checkpoint>/spark/                                 Spark's own: offsets and commits

Fencing of drivers. An object store has no locks, and a driver that was taken for dead may continue at any moment. Each
start has a number, greater than all before, and writes only under names with that number. Of all manifests the last one
is valid: that of the latest start, and of these the one of the latest batch. A start first claims its number, then
reads the last manifest and writes it again as its own; from then on nothing that an earlier start writes is valid. A
driver makes the output of its manifest visible, and removes files, only if it finds no later start *after* publishing
it: so any driver that takes over afterwards has seen that manifest. It removes nothing that a later start has made, and
the files that a later start has adopted are named by its own last manifests, which it retains. So it may be suspended
between any two steps.

Files that none of the last `RETAINED` manifests name are garbage: of failed attempts, or merged since. They are removed
between two batches, when only attempts that have already failed may read them. Nothing in a manifest is executed or
unpickled. One thread at a time uses a `Manifests`.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from typing import IO, NamedTuple

from scalein.errors import Damaged, NewerFormat, SourceLoc, StoreFailed
from scalein.storage.checked_json import Json, as_int
from scalein.storage.claims import Claims
from scalein.storage.local import lock_file
from scalein.storage.object_store import MANIFESTS, OUTPUT, STATE, Location
from scalein.storage.publish import seal, unseal

FORMAT = 2  # 1: no revisions, and no output that waits
RETAINED = 2
_NAME = re.compile(r"(?:(\d{10})-)?(-?\d{9,10})(?:-(\d{6}))?\.json")  # without a start in the first version
_WRITTEN = re.compile(r"(\d{10})-\w+\.\w+")
_STREAM = f"{MANIFESTS}/stream"
_STREAM_CONTENT = re.compile(r"([0-9a-f]{8}) (\d+)")


class Key(NamedTuple):
    """The start and the batch of a manifest, and its revision; the greatest one is valid."""

    start: int
    batch: int  # -1: no batch is done
    revision: int = 0

    @property
    def name(self) -> str:
        start = f"{self.start:010}-" if self.start else ""
        revision = f"-{self.revision:06}" if self.revision else ""
        return f"{MANIFESTS}/{start}{self.batch:010}{revision}.json"


class Manifests:
    """The manifests of a checkpoint; after `acquire`, this start may write. On a local disk it also holds a lock."""

    def __init__(self, location: Location) -> None:
        self.location = location
        self.name, self.start = "", 0  # of the stream, and of this start
        self._claims = Claims(location, MANIFESTS, "start-")
        self._lock: IO[bytes] | None = None

    # --- ownership

    def acquire(self, at: SourceLoc) -> None:
        """Take ownership of the checkpoint as a new start."""
        self.location.create_folders(MANIFESTS, STATE, OUTPUT)
        if self.location.is_local:
            self._lock = lock_file(self.location.path(f"{MANIFESTS}/lock"))
            if self._lock is None:
                raise StoreFailed("another stream is using this checkpoint", at=at, file=self.location,
                                  hint="stop it first, or give another checkpoint")
            self.location.remove_temporary(MANIFESTS)
        known = self._stream()
        self.name, previous = known or (uuid.uuid4().hex[:8], 0)
        self.location.start = self.start = self._claims.take(previous + 1)
        self._claims.remove_earlier()
        if known is None:  # never again: HDFS replaces a file in two steps
            self.location.put(_STREAM, f"{self.name} {self.start}".encode())

    def _stream(self) -> tuple[str, int] | None:
        """The stream's name over all its starts, and the number of one of them; None before the first."""
        try:
            found = _STREAM_CONTENT.fullmatch(self.location.read(_STREAM).decode("ascii", "replace"))
        except FileNotFoundError:
            return None
        if found is None:
            raise Damaged("the name of a stream cannot be read", file=self.location.uri_of(_STREAM))
        return found[1], int(found[2])

    def check_not_superseded(self) -> None:
        """Raise if there is a later start."""
        self._claims.check("driver")

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()

    # --- content

    def all_keys(self) -> list[Key]:
        """The keys of all manifests; the last one is valid."""
        found = (_NAME.fullmatch(name) for name in self.location.names(MANIFESTS))
        return sorted(Key(int(match[1] or 0), int(match[2]), int(match[3] or 0)) for match in found if match)

    def newest(self) -> dict[str, Json] | None:
        """The valid manifest. If it is damaged there is no fallback: Spark will not send its rows again."""
        while keys := self.all_keys():
            try:
                found = self.read(keys[-1])
                return None if found["batch"] == -1 else found
            except FileNotFoundError:  # a running stream has removed it meanwhile: there are newer ones
                continue
        return None

    def is_newest(self, manifest: dict[str, Json]) -> bool:
        return self.all_keys()[-1:] == [key_of(manifest)]

    def read(self, key: Key) -> dict[str, Json]:
        try:
            found = unseal(self.location.read(key.name))
            if key_of(found) != key:
                raise ValueError("its content does not match its name")
        except ValueError as error:
            raise Damaged("the manifest of a batch cannot be read", file=self.location.uri_of(key.name), found=error,
                          hint="restore the file, or start again with another checkpoint") from error
        if not isinstance(version := found.get("format"), int) or version > FORMAT:
            raise NewerFormat("the checkpoint was written by a newer scalein", file=self.location.uri_of(key.name),
                              found=version, has=FORMAT)
        return found

    def adopt(self, last: dict[str, Json] | None) -> dict[str, Json] | None:
        """Continue from a manifest of an earlier start, or from nothing: what that start writes later is void."""
        if last is None:
            self.publish(-1, {})
            return None
        return self.publish(as_int(last["batch"]), last)

    def revise(self, last: dict[str, Json], content: dict[str, Json]) -> dict[str, Json]:
        """Publish the manifest of the last batch with other content: under another name, nothing is replaced."""
        return self.publish(as_int(last["batch"]), content, key_of(last).revision + 1)

    def publish(self, number: int, content: dict[str, Json], revision: int = 0) -> dict[str, Json]:
        """Publish the manifest of a batch. An error may also follow the publication, if there is a later start."""
        self.check_not_superseded()
        found: dict[str, Json] = {**content, "format": FORMAT, "start": self.start, "batch": number,
                                  "revision": revision}  # fmt: skip
        self.location.put(Key(self.start, number, revision).name, seal(found))
        self.check_not_superseded()
        return found

    def remove_unreferenced(self, needed: Iterable[str], previous: Iterable[str]) -> None:
        """Remove old manifests, and files that neither the last manifest names nor the one before.

        Files of a driver that has taken over in the meantime stay.
        """
        self.check_not_superseded()
        for key in self.all_keys()[:-RETAINED]:
            if key.start <= self.start:
                self.location.remove(key.name)
        retained = {*needed, *previous}
        for folder in (STATE, OUTPUT):
            for name in self.location.names(folder):
                if f"{folder}/{name}" not in retained and _start_of(name) <= self.start:
                    self.location.remove(f"{folder}/{name}")


def key_of(manifest: dict[str, Json]) -> Key:
    start, batch, revision = manifest.get("start", 0), manifest.get("batch"), manifest.get("revision", 0)
    if not isinstance(start, int) or not isinstance(batch, int) or not isinstance(revision, int):
        raise ValueError("it has no number")
    return Key(start, batch, revision)


def _start_of(name: str) -> int:
    """The start that wrote a file of state or output; 0 for files of versions without start numbers."""
    match = _WRITTEN.fullmatch(name)
    return 0 if match is None else int(match[1])
