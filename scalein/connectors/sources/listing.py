"""Which files a path, a glob or a directory means, in which order, and which of them are new.

Names that begin with `_` or `.`, and everything in directories of such names, are ignored: they are being written. A
directory `_k=1` below one that is listed as a whole is that of a partition column `_k`, and not ignored.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from scalein.errors import BadArgument, BadData, SourceLoc


@dataclass(frozen=True, slots=True, order=True)
class File:
    """A file by the name it has below the root; its time is 0 where the order is by name only."""

    mtime_ns: int
    name: str


@dataclass(frozen=True, slots=True)
class Listing:
    """The files below `root`: all of a directory, those that match a pattern, or one."""

    root: str
    pattern: str  # "" is the whole directory

    @staticmethod
    def of(given: object, step: str, at: SourceLoc) -> Listing:
        """The listing for a path; nothing need match it yet, but its directory exists."""
        try:
            path = os.path.abspath(os.path.expanduser(os.fsdecode(given)))  # type: ignore[arg-type]
        except TypeError:
            raise BadArgument(f"{step} takes a path, a glob or a directory", at=at, found=repr(given)) from None
        except OSError as error:
            raise BadData("the current directory is gone, so a relative path means nothing", at=at,
                          found=repr(given)) from error
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
            if "://" in str(given):
                raise BadArgument(f"{step} takes a path on this machine, not a URL", at=at, found=repr(given),
                                  hint="what pyarrow, pandas or polars read from a URL is a flow by si.from_arrow(...)")
            raise BadData(f"there is no directory {root}", at=at, found=repr(given))
        return Listing(root, pattern)

    @property
    def is_one_file(self) -> bool:
        """Whether it names one file, with no wildcard."""
        return bool(self.pattern) and not _has_wildcard(self.pattern)

    @property
    def is_directory(self) -> bool:
        """Whether it is a directory with all that is below."""
        return not self.pattern

    def __str__(self) -> str:
        return os.path.join(self.root, self.pattern)

    def path(self, name: str) -> str:
        return os.path.join(self.root, name)

    def files(self) -> list[File]:
        """All files there are now, in the order of their names."""
        return [File(0, file.name) for file in sorted(self.timed(self._names()), key=lambda file: file.name)]

    def names(self) -> list[str]:
        """The names that there are now, in any order; a link among them may lead nowhere."""
        return list(self._names())

    def timed(self, names: Iterable[str]) -> list[File]:
        """Those of the files that there are, in the order of modification time and then name."""
        found = []
        for name in names:
            try:
                found.append(File(os.stat(self.path(name)).st_mtime_ns, name))
            except FileNotFoundError:
                continue  # removed since it was listed
            except OSError as error:
                raise BadData(f"{self.path(name)} cannot be read", found=error) from error
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
        with os.scandir(os.path.join(root, under)) as entries:
            found = [(entry.name, entry.is_dir()) for entry in entries if not _is_hidden(entry.name)
                     or (_is_partition(entry.name) and entry.is_dir())]
    except OSError as error:
        raise BadData(f"{error.filename or os.path.join(root, under)} cannot be listed", found=error) from error
    for entry, is_folder in found:
        name = os.path.join(under, entry)
        if is_folder:
            yield from _below(root, name)
        else:
            yield name


def _is_hidden(name: str) -> bool:
    return any(part[0] in "_." for part in name.split(os.sep) if part)


def _is_partition(folder: str) -> bool:
    return folder[0] != "." and "=" in folder


def _has_wildcard(pattern: str) -> bool:
    return glob.has_magic(pattern.replace("[[]", "").replace("[?]", "").replace("[*]", ""))
