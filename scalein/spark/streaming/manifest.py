"""Manifests: what a stream had counted after a batch, under that batch's number.

A manifest is the commit point of a batch. What it names is durable before it is there: runs of state (`runs.py`) and
staged output; behind it comes only what can be done again: output is made visible. So a batch that Spark plays again,
after a crash, is either as if it had never run, or done, and then only its output is made visible again.

    <checkpoint>/manifests/0000000003-0000000007.json   of the third start, behind batch 7: one line of JSON, and a line
                                                        with its checksum; behind batch -1: nothing was done before
    <checkpoint>/manifests/start-0000000003-<id>        a driver that may write, until there is a later start
    <checkpoint>/manifests/stream                       the stream's name over all starts, and how many there were
    <checkpoint>/state/0000000003-<id>.arrow            runs of the third start; <id> is unique to a task's attempt
    <checkpoint>/output/0000000003-<id>.parquet         rows for a function that takes a DataFrame
    <checkpoint>/spark/                                 Spark's own: offsets and commits

Drivers and starts. An object store has no locks, and a driver that was taken for dead may go on at any moment. Each
start has a number, greater than all before, and writes under names with that number only. Of all manifests the last
one counts: that of the latest start, and of these the one of the latest batch. A start first takes its number, then
looks for the last manifest and writes it again as its own; from then on nothing counts that an earlier start writes. A
driver makes its manifest's output visible, and removes files, only when it has found no later start *behind* writing
it: so whoever takes over afterwards has seen it. It removes nothing that a later start has made, and what a later one
has taken over from it is named by its last manifests, which it keeps. So it may be stopped between any two steps.

Files that none of the last `KEPT` manifests name are garbage: of attempts that lost, or merged since. They are removed
between two batches, when nobody reads them but attempts that have lost already. Nothing in a manifest is executed or
unpickled.
"""

from __future__ import annotations

import fcntl
import json
import re
import uuid
import zlib
from collections.abc import Iterable
from typing import IO, NamedTuple

from scalein.errors import Damaged, NewerFormat, SourceLoc, StoreFailed
from scalein.storage.checked_json import Json, as_int
from scalein.storage.object_store import MANIFESTS, OUTPUT, STATE, Location

FORMAT = 1
KEPT = 2
_NAME = re.compile(r"(?:(\d{10})-)?(-?\d{9,10})\.json")  # without a start: of a version that did not number them
_CLAIM = re.compile(r"start-(\d{10})-\w+")
_MADE = re.compile(r"(\d{10})-\w+\.\w+")
_STREAM = f"{MANIFESTS}/stream"
_JOB = re.compile(r"([0-9a-f]{8}) (\d+)")


class Key(NamedTuple):
    """What a manifest is found by; the greatest one counts."""

    start: int
    batch: int  # -1: nothing was done

    @property
    def name(self) -> str:
        start = f"{self.start:010}-" if self.start else ""
        return f"{MANIFESTS}/{start}{self.batch:010}.json"


class Manifests:
    """The manifests of a checkpoint, and after `take` those of one start. On a local disk it also holds a lock."""

    def __init__(self, location: Location) -> None:
        self.location = location
        self.name, self.start = "", 0  # of the stream, and of this start
        self._lock: IO[bytes] | None = None

    # --- who writes

    def take(self, at: SourceLoc) -> None:
        """Become the one that writes."""
        self.location.create_folders(MANIFESTS, STATE, OUTPUT)
        if self.location.is_local:
            self._lock = open(self.location.path(f"{MANIFESTS}/lock"), "ab")  # noqa: SIM115 (held until close)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                self.close()
                raise StoreFailed("another stream is using this checkpoint", at=at, file=self.location,
                                  hint="stop it first, or give another checkpoint") from error
            self.location.remove_temporary(MANIFESTS)
        self.name, before = self._stream()
        self.location.start = self.start = self._claimed(before)
        self.location.put(_STREAM, f"{self.name} {self.start}".encode())

    def _stream(self) -> tuple[str, int]:
        """The stream's own name over all its starts, and how many there were."""
        try:
            found = _JOB.fullmatch(self.location.read(_STREAM).decode("ascii", "replace"))
        except FileNotFoundError:
            return uuid.uuid4().hex[:8], 0
        if found is None:
            raise Damaged("the name of a stream cannot be read", file=self.location.uri_of(_STREAM))
        return found[1], int(found[2])

    def _claimed(self, before: int) -> int:
        """A number of a start that nobody else has: whoever finds it taken as well goes on to the next."""
        start = before
        while True:
            start = max([start, *self._starts()]) + 1
            claim = f"{MANIFESTS}/start-{start:010}-{uuid.uuid4().hex}"
            self.location.put(claim, b"")
            starts = self._starts()
            if starts.count(start) == 1:
                break
            self.location.remove(claim)
        for name in self.location.names(MANIFESTS):
            if (match := _CLAIM.fullmatch(name)) and int(match[1]) < start:
                self.location.remove(f"{MANIFESTS}/{name}")
        return start

    def _starts(self) -> list[int]:
        return [int(match[1]) for name in self.location.names(MANIFESTS) if (match := _CLAIM.fullmatch(name))]

    def check(self) -> None:
        """Refuse to go on if there is a later start."""
        if max(self._starts(), default=0) != self.start:
            raise StoreFailed("another driver has taken over this checkpoint", file=self.location,
                              hint="one of the two must end; this one has")

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()

    # --- what they say

    def known(self) -> list[Key]:
        """The manifests that there are, the one that counts last."""
        found = (_NAME.fullmatch(name) for name in self.location.names(MANIFESTS))
        return sorted(Key(int(match[1] or 0), int(match[2])) for match in found if match)

    def newest(self) -> dict[str, Json] | None:
        """What the last batch left. If it is damaged there is no way back: Spark will not give its rows again."""
        while known := self.known():
            try:
                found = self.read(known[-1])
                return None if found["batch"] == -1 else found
            except FileNotFoundError:  # a stream that runs has removed it meanwhile: there are newer ones
                continue
        return None

    def is_newest(self, manifest: dict[str, Json]) -> bool:
        return self.known()[-1:] == [key_of(manifest)]

    def read(self, key: Key) -> dict[str, Json]:
        try:
            text, _, check = self.location.read(key.name).partition(b"\n")
            if check.strip() != b"%08x" % zlib.crc32(text):
                raise ValueError("the checksum does not fit")
            found = json.loads(text)
            if not isinstance(found, dict) or key_of(found) != key:
                raise ValueError("it is not what its name says")
        except (ValueError, RecursionError) as error:
            raise Damaged("the manifest of a batch cannot be read", file=self.location.uri_of(key.name), found=error,
                          hint="bring the file back, or begin again with another checkpoint") from error
        if not isinstance(found.get("format"), int) or found["format"] > FORMAT:
            raise NewerFormat("the checkpoint was written by a newer scalein", file=self.location.uri_of(key.name),
                              found=found.get("format"), has=FORMAT)
        return found

    def adopt(self, last: dict[str, Json] | None) -> dict[str, Json] | None:
        """Go on from a manifest of an earlier start, or from nothing: whatever else that start writes is void."""
        if last is None:
            self.publish(-1, {})
            return None
        return self.publish(as_int(last["batch"]), last)

    def publish(self, number: int, content: dict[str, Json]) -> dict[str, Json]:
        """Commit a batch, and give the manifest. An error may come behind it: then there is a later start."""
        self.check()
        found: dict[str, Json] = {**content, "format": FORMAT, "start": self.start, "batch": number}
        text = json.dumps(found, separators=(",", ":")).encode()
        self.location.put(Key(self.start, number).name, text + b"\n%08x\n" % zlib.crc32(text))
        self.check()
        return found

    def forget(self, named: Iterable[str], before: Iterable[str]) -> None:
        """Remove old manifests, and files that neither the last one names nor the one before.

        Making output visible may have taken long: what a driver has made that has taken over meanwhile stays.
        """
        self.check()
        for key in self.known()[:-KEPT]:
            if key.start <= self.start:
                self.location.remove(key.name)
        kept = {*named, *before}
        for folder in (STATE, OUTPUT):
            for name in self.location.names(folder):
                if f"{folder}/{name}" not in kept and _start_of(name) <= self.start:
                    self.location.remove(f"{folder}/{name}")


def key_of(manifest: dict[str, Json]) -> Key:
    start, batch = manifest.get("start", 0), manifest.get("batch")
    if not isinstance(start, int) or not isinstance(batch, int):
        raise ValueError("it has no number")
    return Key(start, batch)


def _start_of(name: str) -> int:
    """The start that a file of state or output is of; 0 where these had no numbers."""
    match = _MADE.fullmatch(name)
    return 0 if match is None else int(match[1])
