"""A simulated disk: it loses power at any operation, fills up, fails, and has bytes flipped.

What survives a cut: every byte that `sync` confirmed, every name that `sync_directory` confirmed. Of unsynced writes
each page of 4 KiB is lost, written, or written in part (sectors of 512 bytes), in any combination; a file that grew has
its old size, its new one, or any size that a written page needs. Each unsynced change of the directory is lost or done.
A sync of a file says nothing about its name.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from itertools import pairwise
from random import Random

import numpy as np

from scalein.errors import StoreFailed
from scalein.storage.filesystem import Data, aligned_buffer, flat_bytes, store_failed, truncated

PAGE = 4096
SECTOR = 512


class PowerCut(Exception):
    """The machine lost power; every later operation raises it too."""


class _Node:
    """A file: its durable content, its current content, and the unsynced writes."""

    def __init__(self, content: bytes = b"") -> None:
        self.durable = content
        self.current = bytearray(content)
        self.unsynced: list[tuple[int, bytes]] = []
        self.dropped: list[tuple[int, bytes]] = []  # by a failed sync: no later sync confirms them

    def write(self, offset: int, data: bytes) -> None:
        _put(self.current, offset, data)
        self.unsynced.append((offset, data))

    def sync(self) -> None:
        content = bytearray(self.durable)
        for offset, data in self.unsynced:
            _put(content, offset, data)
        self.durable = bytes(content)
        self.unsynced.clear()

    def after_cut(self, random: Random) -> bytes:
        content = bytearray(self.durable)
        for offset, data in self.dropped + self.unsynced:
            for start, end in _pages(offset, len(data)):
                fate = random.choice(("lost", "written", "written", "partial"))
                if fate == "lost":
                    continue
                for at in range(start, end, SECTOR):
                    if fate == "written" or random.random() < 0.5:
                        stop = min(end, at + SECTOR)
                        _put(content, at, data[at - offset : stop - offset])
        if len(content) < len(self.current) and random.random() < 0.5:
            content.extend(bytes(len(self.current) - len(content)))  # the size survived, the bytes did not
        return bytes(content)


def _put(content: bytearray, offset: int, data: bytes) -> None:
    if len(content) < offset:
        content.extend(bytes(offset - len(content)))
    content[offset : offset + len(data)] = data


def _pages(offset: int, size: int) -> list[tuple[int, int]]:
    """The ranges of a write, split at page boundaries."""
    cuts = [offset, *range((offset // PAGE + 1) * PAGE, offset + size, PAGE), offset + size]
    return [(a, b) for a, b in pairwise(cuts) if a < b]


class PowerCutDisk:
    """A `FileSystem` in memory. Operations are the calls that change it: create, write, sync, rename, remove, ..."""

    def __init__(self, content: dict[str, bytes] | None = None) -> None:
        self.operations = 0
        self.written_bytes = 0
        self.log: list[str] = []  # every operation, for messages
        self._lock = threading.RLock()
        self._durable = {name: _Node(bytes_) for name, bytes_ in (content or {}).items()}
        self._current = dict(self._durable)
        self._changes: list[Callable[[dict[str, _Node]], object]] = []  # of the directory, unsynced
        self._cut_at: int | None = None
        self._is_off = False
        self._is_locked = False
        self._free: int | None = None
        self._faults: dict[tuple[str, int], int] = {}
        self._calls: dict[str, int] = {}

    # --- for tests

    def fail_at(self, operation: int) -> None:
        """Lose power in this operation, counted from 0 since the disk was created."""
        self._cut_at = operation

    def cut(self) -> None:
        """Lose power now."""
        self._is_off = True

    def after_cut(self, random: Random) -> PowerCutDisk:
        """A disk with one of the many contents that are possible after the power cut."""
        with self._lock:
            names = dict(self._durable)
            for change in self._changes:
                if random.random() < 0.5:
                    change(names)
            contents: dict[int, bytes] = {}
            for node in names.values():
                contents.setdefault(id(node), node.after_cut(random))
            return PowerCutDisk({name: contents[id(node)] for name, node in names.items()})

    def full_after(self, size_bytes: int | None) -> None:
        """Raise ENOSPC once this many more bytes are written; None: never."""
        self._free = size_bytes

    def fail(self, kind: str, call: int, number: int = errno.EIO) -> None:
        """Let a call fail: `kind` is read, write, sync, create, rename, remove or sync_directory; 0 is the next."""
        self._faults[kind, self._calls.get(kind, 0) + call] = number

    def content(self, name: str) -> bytes:
        return bytes(self._current[name].current)

    def replace(self, name: str, content: bytes) -> None:
        """Replace the content of a file, durably."""
        self._durable[name] = self._current[name] = _Node(content)

    def flip(self, name: str, offset: int, bits: int = 1) -> None:
        """Flip bits of a byte on the disk."""
        content = bytearray(self.content(name))
        content[offset] ^= bits
        self.replace(name, bytes(content))

    # --- FileSystem

    def path_of(self, name: str) -> str:
        return f"disk/{name}"

    def names(self) -> list[str]:
        self._check_power()
        return sorted(self._current)

    def size(self, name: str) -> int:
        self._check_power()
        return len(self._current[name].current) if name in self._current else 0

    def create(self, name: str, size_bytes: int = 0) -> _Output:
        with self._lock:
            self._fault("create", name)
            if self._free is not None and size_bytes > self._free:
                raise store_failed("cannot create a file of the store", self.path_of(name), _error(errno.ENOSPC))
            if name in self._current:
                self._change(lambda names: names.pop(name, None), f"remove {name}")
            node = _Node()
            self._change(lambda names: names.__setitem__(name, node), f"create {name}")
            return _Output(self, name, node)

    def open(self, name: str) -> _Input:
        self._check_power()
        if name not in self._current:
            raise store_failed("cannot open a file of the store", self.path_of(name), _error(errno.ENOENT))
        return _Input(self, name, self._current[name])

    def rename(self, old: str, new: str) -> None:
        with self._lock:
            self._fault("rename", old)
            node = self._existing(old, "rename")

            def change(names: dict[str, _Node]) -> None:
                if names.get(old) is node:
                    del names[old]
                names[new] = node

            self._change(change, f"rename {old} {new}")

    def remove(self, name: str) -> None:
        with self._lock:
            self._fault("remove", name)
            node = self._existing(name, "remove")

            def change(names: dict[str, _Node]) -> None:
                if names.get(name) is node:
                    del names[name]

            self._change(change, f"remove {name}")

    def sync_directory(self) -> None:
        with self._lock:
            self._fault("sync_directory", ".")
            self._operation("sync_directory")
            self._durable = dict(self._current)
            self._changes.clear()

    def lock(self) -> _Lock:
        self._check_power()
        if self._is_locked:
            raise StoreFailed("the store is open in another process or store object", file="disk")
        self._is_locked = True
        return _Lock(self)

    # --- internals

    def _check_power(self) -> None:
        if self._is_off:
            raise PowerCut(f"after {self.operations} operations")

    def _operation(self, what: str, undone: Callable[[], None] = lambda: None) -> None:
        """Count an operation. In the one that loses power, `undone` applies what may reach the disk all the same."""
        self._check_power()
        if self.operations == self._cut_at:
            self._is_off = True
            undone()
            raise PowerCut(f"in operation {self.operations}: {what}")
        self.operations += 1
        self.log.append(what)

    def _change(self, change: Callable[[dict[str, _Node]], object], what: str) -> None:
        self._operation(what, lambda: self._changes.append(change))
        change(self._current)
        self._changes.append(change)

    def _fault(self, kind: str, name: str, offset: int | None = None) -> None:
        self._check_power()
        call = self._calls.get(kind, 0)
        self._calls[kind] = call + 1
        if (number := self._faults.pop((kind, call), None)) is not None:
            raise store_failed(f"cannot {kind} a file of the store", self.path_of(name), _error(number), offset)

    def _existing(self, name: str, what: str) -> _Node:
        if name not in self._current:
            raise store_failed(f"cannot {what} a file of the store", self.path_of(name), _error(errno.ENOENT))
        return self._current[name]


class _Output:
    def __init__(self, files: PowerCutDisk, name: str, node: _Node) -> None:
        self._files, self._name, self._node = files, name, node

    def write(self, offset: int, data: Data) -> None:
        disk, content = self._files, bytes(flat_bytes(data))
        with disk._lock:
            disk._fault("write", self._name, offset)
            written = len(content) if disk._free is None else min(len(content), disk._free)
            part = content[:written]
            disk._operation(f"write {self._name} {offset} {len(part)}", lambda: self._node.write(offset, part))
            self._node.write(offset, part)
            disk.written_bytes += len(part)
            if disk._free is not None:
                disk._free -= written
            if written < len(content):
                what = "cannot write a file of the store"
                raise store_failed(what, disk.path_of(self._name), _error(errno.ENOSPC), offset + written)

    def sync(self) -> None:
        disk = self._files
        with disk._lock:
            try:
                disk._fault("sync", self._name)
            except StoreFailed:
                self._node.dropped += self._node.unsynced
                self._node.unsynced.clear()
                raise
            disk._operation(f"sync {self._name}")
            self._node.sync()

    def close(self) -> None:
        """Nothing to close."""


class _Input:
    direct_fd = -1

    def __init__(self, files: PowerCutDisk, name: str, node: _Node) -> None:
        self._files, self._name, self._node = files, name, node
        self.size = len(node.current)

    def read(self, offset: int, size: int) -> np.ndarray:
        if offset + size > self.size:
            raise truncated(self._files.path_of(self._name), offset, size, self.size)
        into = aligned_buffer(size)
        self.read_into(offset, into.data)
        return into

    def read_into(self, offset: int, into: memoryview, direct: bool = False) -> None:
        disk = self._files
        with disk._lock:
            disk._fault("read", self._name, offset)
            found = self._node.current[offset : offset + len(into)]
            if len(found) < len(into):
                raise truncated(disk.path_of(self._name), offset, len(into), self.size)
            into[:] = found

    def prefetch(self, offset: int, size: int) -> None:
        self._files._check_power()

    def drop_cache(self, offset: int = 0, size: int = 0) -> None:
        self._files._check_power()

    def close(self) -> None:
        """Nothing to close."""


class _Lock:
    def __init__(self, files: PowerCutDisk) -> None:
        self._files = files

    def release(self) -> None:
        self._files._is_locked = False


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
