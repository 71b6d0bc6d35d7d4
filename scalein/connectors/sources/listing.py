"""Which files a path, a glob or a directory means, in which order, and which of them are new.

Names that begin with `_` or `.`, and everything in directories of such names, are ignored: they are being written.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from scalein.errors import BadArgument, BadData, SourceLoc


@dataclass(frozen=True, slots=True, order=True)
class File:
    """A file by the name it has below the root; its times are 0 where the order is by name only."""

    mtime_ns: int
    name: str
    ctime_ns: int = field(default=0, compare=False)  # when it got this name, or its entry changed otherwise


@dataclass(frozen=True, slots=True)
class Listing:
    """The files below `root`: all of a directory, those that match a pattern, or one."""

    root: str
    pattern: str  # "" is the whole directory

    @staticmethod
    def of(given: object, step: str, at: SourceLoc) -> Listing:
        """The listing for a path; nothing need match it yet, but its directory exists."""
        try:
            path = os.path.abspath(os.path.expanduser(os.fspath(given)))  # type: ignore[call-overload]
        except TypeError:
            raise BadArgument(f"{step} takes a path, a glob or a directory", at=at, found=repr(given)) from None
        if os.path.isdir(path):
            return Listing(path, "")
        root, pattern = os.path.split(path)
        if not os.path.exists(path):
            while glob.has_magic(root):
                root, name = os.path.split(root)
                pattern = os.path.join(name, pattern)
        else:
            pattern = glob.escape(pattern)
        if not os.path.isdir(root):
            raise BadData(f"there is no directory {root}", at=at, found=repr(given))
        return Listing(root, pattern)

    @property
    def is_one_file(self) -> bool:
        """Whether it names one file, with no wildcard."""
        return bool(self.pattern) and not _has_wildcard(self.pattern)

    def __str__(self) -> str:
        return os.path.join(self.root, self.pattern)

    def path(self, name: str) -> str:
        return os.path.join(self.root, name)

    def files(self, timed: bool = False) -> list[File]:
        """All files there are now, in order: by name, or by modification time and then name."""
        found = []
        for name in self._names():
            try:
                about = os.stat(self.path(name))
                found.append(File(about.st_mtime_ns, name, about.st_ctime_ns) if timed else File(0, name))
            except FileNotFoundError:
                continue  # removed since it was listed
        return sorted(found)

    def _names(self) -> Iterator[str]:
        if self.is_one_file:
            yield from glob.glob(self.pattern, root_dir=self.root)
        elif self.pattern:
            for name in glob.glob(self.pattern, root_dir=self.root, recursive=True):
                if not _is_hidden(name) and os.path.isfile(self.path(name)):
                    yield name
        else:
            yield from _below(self.root, "")


def _below(root: str, under: str) -> Iterator[str]:
    try:
        entries = list(os.scandir(os.path.join(root, under)))
    except OSError as error:
        raise BadData(f"{os.path.join(root, under)} cannot be listed", found=error) from error
    for entry in entries:
        name = os.path.join(under, entry.name)
        if _is_hidden(entry.name):
            continue
        if entry.is_dir():
            if "=" in entry.name:
                raise BadData(f"{os.path.join(root, name)} is a directory of a partitioned table",
                              hint='read it with from_arrow(pyarrow.dataset.dataset(path, partitioning="hive"))')
            yield from _below(root, name)
        else:
            yield name


def _is_hidden(name: str) -> bool:
    return any(part[0] in "_." for part in name.split(os.sep) if part)


def _has_wildcard(pattern: str) -> bool:
    return glob.has_magic(pattern.replace("[[]", "").replace("[?]", "").replace("[*]", ""))
