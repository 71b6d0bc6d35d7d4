"""A folder of the real file system that loses power at any operation.

What survives a cut: the bytes of a file when it was last synced, and the names in a directory when that was last
synced. Each unsynced change of a directory is lost or done; a rename is one change. An unsynced file has its old
content, its new one, a part of it, or zeros. A sync of a file says nothing about its name.

Operations are calls of `os` below the folder: rename, replace, link, unlink, mkdir, rmdir, fsync, fdatasync. Files that
are created or removed in other ways (by pyarrow) are found at the next operation.
"""

from __future__ import annotations

import os
import shutil
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

_NAMES = ("rename", "replace", "link", "unlink", "remove", "mkdir", "rmdir")
Entries = dict[tuple[int, str], int]  # (inode of a directory, name) -> inode


class PowerCut(BaseException):
    """The machine lost power; every later operation raises it too. No handler of scalein catches it."""


class PowerCutFolder:
    """The folder, until `restore`; `fail_at` is the operation that loses power, counted from 0."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch, fail_at: int | None = None) -> None:
        path.mkdir(exist_ok=True)
        self.path, self.operations, self.log = str(path), 0, list[str]()
        self._fail_at, self._lock, self.is_off = fail_at, threading.RLock(), False
        self._root = os.stat(path).st_ino
        self._handles: dict[int, int] = {}  # by inode; an inode that is open is not used for another file
        self._folders = {self._root}
        self._entries = self._scan()
        self._durable = dict(self._entries)
        self._synced = {inode: self._read(inode) for inode in self._handles if inode not in self._folders}
        self._current: dict[int, bytes] = {}  # contents at the cut
        self._pending: list[dict[tuple[int, str], int | None]] = []
        for name in _NAMES:
            patch.setattr(os, name, self._around_change(name, getattr(os, name)))
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, self._sync)

    # --- the disk after the cut

    def restore(self, random: Random) -> None:
        """Make the folder what may be found after the cut; the caller has undone the patches."""
        with self._lock:
            if not self.is_off:
                self._cut()
            for handle in self._handles.values():
                os.close(handle)
        names = dict(self._durable)
        for change in self._pending:
            if random.random() < 0.5:
                _apply(names, change)
        shutil.rmtree(self.path)
        os.mkdir(self.path)
        found: dict[int, bytes] = {}
        todo = [(self._root, self.path)]
        while todo:
            directory, path = todo.pop()
            for (parent, name), inode in names.items():
                if parent != directory:
                    continue
                if inode in self._folders:
                    os.mkdir(f"{path}/{name}")
                    todo.append((inode, f"{path}/{name}"))
                else:
                    content = found.setdefault(inode, self._after_cut(inode, random))
                    with open(f"{path}/{name}", "wb") as file:
                        file.write(content)

    def _after_cut(self, inode: int, random: Random) -> bytes:
        old, new = self._synced.get(inode, b""), self._current[inode]
        if old == new:
            return old
        cut = random.randrange(len(new) + 1)
        return random.choice((old, new, new[:cut], new[:cut] + bytes(len(new) - cut)))

    # --- operations

    def _around_change(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def change(*args: Any, **more: Any) -> Any:
            paths = [self._inside(each, more.get("dir_fd")) for each in args[: 2 if name in _NAMES[:3] else 1]]
            if not any(paths):
                return real(*args, **more)
            with self._lock:
                self._observe()
                is_cut = self._begin(f"{name} {' '.join(filter(None, paths))}")
                result = real(*args, **more)
                self._observe(is_one=True)
                if is_cut:
                    self._cut()
                    raise PowerCut(f"in operation {self.operations}: {name} {paths}")
                return result

        return change

    def _sync(self, handle: int) -> None:
        path = self._inside(os.readlink(f"/proc/self/fd/{handle}"))
        if path is None:
            return
        with self._lock:
            self._observe()
            if self._begin(f"sync {path}"):
                self._cut()
                raise PowerCut(f"in operation {self.operations}: sync {path}")
            about = os.fstat(handle)
            if stat.S_ISDIR(about.st_mode):
                for change in [each for each in self._pending if any(parent == about.st_ino for parent, _ in each)]:
                    _apply(self._durable, change)
                    self._pending.remove(change)
            else:
                self._synced[about.st_ino] = self._read(about.st_ino)

    def _inside(self, given: object, directory: int | None = None) -> str | None:
        path = os.fsdecode(os.fspath(given))  # type: ignore[call-overload]
        path = os.path.join(os.getcwd() if directory is None else os.readlink(f"/proc/self/fd/{directory}"), path)
        return path if path.startswith(f"{self.path}/") or path == self.path else None

    def _begin(self, what: str) -> bool:
        """Count an operation; whether it is the one that loses power."""
        if self.is_off:
            raise PowerCut(f"after {self.operations} operations")
        if self.operations == self._fail_at:
            return True
        self.operations += 1
        self.log.append(what.replace(f"{self.path}/", ""))
        return False

    def _observe(self, is_one: bool = False) -> None:
        """Note what has changed since the last operation: as one change, or each by itself."""
        if self.is_off:
            return
        now = self._scan()
        changed = {key: now.get(key) for key in {*now, *self._entries} if now.get(key) != self._entries.get(key)}
        self._pending += ([changed] if changed else []) if is_one else [{key: value} for key, value in changed.items()]
        self._entries = now

    def _scan(self) -> Entries:
        entries: Entries = {}
        todo = [(self._root, self.path)]
        while todo:
            directory, path = todo.pop()
            for each in list(os.scandir(path)):
                with suppress(FileNotFoundError):  # removed by pyarrow in another thread
                    inode = each.stat(follow_symlinks=False).st_ino
                    if inode not in self._handles:
                        self._handles[inode] = os.open(each.path, os.O_RDONLY)
                    entries[directory, each.name] = inode
                    if each.is_dir():
                        self._folders.add(inode)
                        todo.append((inode, each.path))
        return entries

    def _read(self, inode: int) -> bytes:
        handle = self._handles[inode]
        return os.pread(handle, os.fstat(handle).st_size, 0)

    def _cut(self) -> None:
        self._observe()
        self._current = {inode: self._read(inode) for inode in self._handles if inode not in self._folders}
        self.is_off = True


def _apply(names: Entries, change: dict[tuple[int, str], int | None]) -> None:
    for key, inode in change.items():
        if inode is None:
            names.pop(key, None)
        else:
            names[key] = inode
