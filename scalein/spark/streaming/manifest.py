"""Manifests: what a stream had counted after a batch, under that batch's number.

A manifest is the commit point of a batch. What it names is durable before it is there: runs of state (`runs.py`) and
staged output; behind it comes only what can be done again: output is made visible. So a batch that Spark plays again,
after a crash, is either as if it had never run, or done, and then only its output is made visible again.

    <checkpoint>/manifests/0000000007.json   one line of JSON, and a line with its checksum
    <checkpoint>/manifests/stream            its name over all starts, and how many there were
    <checkpoint>/manifests/owner             the driver that may write: one that finds another's name ends
    <checkpoint>/state/<id>.arrow            runs; <id> is unique to a task's attempt
    <checkpoint>/output/<id>.parquet         rows for a function that takes a DataFrame
    <checkpoint>/spark/                      Spark's own: offsets and commits

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
from contextlib import suppress
from typing import IO

from scalein.connectors.base import Json
from scalein.errors import Damaged, NewerFormat, SourceLoc, StoreFailed
from scalein.spark.streaming.places import MANIFESTS, OUTPUT, STATE, Place

FORMAT = 1
KEPT = 2
_NAME = re.compile(r"(\d{10})\.json")
_OWNER = f"{MANIFESTS}/owner"
_STREAM = f"{MANIFESTS}/stream"
_JOB = re.compile(r"([0-9a-f]{8}) (\d+)")


class Manifests:
    """The manifests of a checkpoint. One driver writes them: on a local disk it holds a lock, elsewhere its name is
    looked up before each.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self._me = uuid.uuid4().hex
        self._lock: IO[bytes] | None = None

    def take(self, at: SourceLoc) -> None:
        """Become the one that writes."""
        self.place.make(MANIFESTS, STATE, OUTPUT)
        if self.place.is_local:
            self._lock = open(self.place.path(f"{MANIFESTS}/lock"), "ab")  # noqa: SIM115 (held until close)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                self.close()
                raise StoreFailed("another stream is using this checkpoint", at=at, file=self.place,
                                  hint="stop it first, or give another checkpoint") from error
            self.place.remove_temporary(MANIFESTS)
        self.place.put(_OWNER, self._me.encode())

    def next_run(self) -> tuple[str, int]:
        """The stream's own name over all its starts, and the number of this one."""
        name, run = uuid.uuid4().hex[:8], 0
        with suppress(FileNotFoundError):
            found = _JOB.fullmatch(self.place.read(_STREAM).decode("ascii", "replace"))
            if found is None:
                raise Damaged("the name of a stream cannot be read", file=self.place.uri_of(_STREAM))
            name, run = found[1], int(found[2])
        self.place.put(_STREAM, f"{name} {run + 1}".encode())
        return name, run + 1

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def numbers(self) -> list[int]:
        """The batches that have a manifest."""
        return [int(match[1]) for name in self.place.names(MANIFESTS) if (match := _NAME.fullmatch(name))]

    def newest(self) -> dict[str, Json] | None:
        """What the last batch left. If it is damaged there is no way back: Spark will not give its rows again."""
        while numbers := self.numbers():
            try:
                return self.read(numbers[-1])
            except FileNotFoundError:  # a stream that runs has removed it meanwhile: there are newer ones
                continue
        return None

    def read(self, number: int) -> dict[str, Json]:
        name = _name(number)
        try:
            text, _, check = self.place.read(name).partition(b"\n")
            if check.strip() != b"%08x" % zlib.crc32(text):
                raise ValueError("the checksum does not fit")
            found = json.loads(text)
            if not isinstance(found, dict) or found.get("batch") != number:
                raise ValueError("it is not what its name says")
        except (ValueError, RecursionError) as error:
            raise Damaged("the manifest of a batch cannot be read", file=self.place.uri_of(name), found=error,
                          hint="bring the file back, or begin again with another checkpoint") from error
        if not isinstance(found.get("format"), int) or found["format"] > FORMAT:
            raise NewerFormat("the checkpoint was written by a newer scalein", file=self.place.uri_of(name),
                              found=found.get("format"), has=FORMAT)
        return found

    def publish(self, number: int, content: dict[str, Json]) -> None:
        """Commit a batch."""
        self._check_owner()
        text = json.dumps({"format": FORMAT, "batch": number, **content}, separators=(",", ":")).encode()
        self.place.put(_name(number), text + b"\n%08x\n" % zlib.crc32(text))

    def _check_owner(self) -> None:
        try:
            owner = self.place.read(_OWNER)
        except FileNotFoundError:
            owner = b"nobody"
        if owner != self._me.encode():
            raise StoreFailed("another driver has taken over this checkpoint", file=self.place,
                              hint="one of the two must end; this one has")

    def forget(self, named: Iterable[str], before: Iterable[str]) -> None:
        """Remove old manifests, and files that neither the last one names nor the one before.

        Making output visible may have taken long: a driver that has taken over meanwhile has files of its own there.
        """
        self._check_owner()
        for number in self.numbers()[:-KEPT]:
            self.place.remove(_name(number))
        kept = {*named, *before}
        for folder in (STATE, OUTPUT):
            for name in self.place.names(folder):
                if f"{folder}/{name}" not in kept:
                    self.place.remove(f"{folder}/{name}")


def _name(number: int) -> str:
    return f"{MANIFESTS}/{number:010}.json"
