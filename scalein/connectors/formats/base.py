"""File formats as sources read them: the schema of a file, and its rows as splits that are decoded in parallel.

A split is a range of rows of one file. Splits before the first row wanted are not read if the format has an index of
its blocks (Parquet, Arrow IPC files).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import eq
from typing import Protocol

import pyarrow as pa

from scalein.errors import NO_PERMISSION, BadData

MAX_ROWS = 1 << 18  # of a batch, whatever a file has


@dataclass(frozen=True, slots=True)
class FileSplit:
    """A range of rows that begins at `row` of its file and is decoded independently of the others."""

    row: int
    open: Callable[[], Iterator[pa.RecordBatch]]


class Format(Protocol):
    """How one kind of file is read. `columns` is None for all; `schema` is what the first file has."""

    @property
    def name(self) -> str:
        """As in `read_<name>`."""

    def schema(self, path: str) -> pa.Schema | None:
        """The schema of a file; None if the file is empty."""

    def splits(self, path: str, schema: pa.Schema, columns: list[str] | None, row: int) -> Iterator[FileSplit]:
        """The splits with rows at or after `row`, in order; a file with another schema is refused."""


_ALIKE = "files read together have the columns and types of the first one, or of schema="
_COMPLETE = "a file is complete when it gets its name: write it under one that begins with _, and rename it"


_KINDS = {"parquet": "a Parquet file", "ipc": "an Arrow IPC file", "json": "a file of JSON", "csv": "a text file"}


@contextmanager
def reading(path: str, format: str, hint: str = _COMPLETE) -> Iterator[None]:
    """Errors of pyarrow and the system come out as `BadData` that names the file; `format` is what it is read as."""
    try:
        yield
    except FileNotFoundError as error:
        raise BadData(f"{path} is gone: it was there when the files were listed", found=error) from error
    except PermissionError as error:
        raise BadData(f"{path} cannot be read", found=error, hint=NO_PERMISSION) from error
    except UnicodeError as error:
        other = _hint_for_kind(path, format)
        what = f"{path} cannot be read" + ("" if other else ": it is not UTF-8")
        raise BadData(what, found=error, hint=other or "write it again as UTF-8, for example with iconv") from error
    except (pa.ArrowException, OSError, EOFError) as error:
        raise BadData(f"{path} cannot be read", found=str(error).strip() or type(error).__name__,
                      hint=_hint_for_kind(path, format) or hint) from error


def _hint_for_kind(path: str, format: str) -> str | None:
    """A hint for a file that begins as one of another kind does."""
    try:
        with open(path, "rb") as file:
            begin = file.read(256)
    except (OSError, ValueError):
        return None
    found = _kind(begin)
    if found is None or found == format:
        return None
    return f"it looks like {_KINDS[found]}: use read_{found}, or move it out of the folder"


def _kind(begin: bytes) -> str | None:
    """The kind of file that begins so; None if no kind is recognised.

    >>> _kind(b"PAR1\\x15"), _kind(b"name,age\\n"), _kind(b"\\x00\\x01")
    ('parquet', 'csv', None)
    """
    if begin.startswith(b"PAR1"):
        return "parquet"
    if begin.startswith(b"ARROW1"):
        return "ipc"
    text = begin.removeprefix(b"\xef\xbb\xbf").strip()
    if not text or not all(byte >= 0x20 or byte in b"\t\r\n" for byte in text):
        return None
    return "json" if text[:1] in b"{[" else "csv" if b"\n" in begin else None


def check_names(path: str, found: list[str], wanted: list[str]) -> None:
    """A file has the columns of the first one, or of the schema given; their order is free, and others are ignored."""
    missing = next((name for name in wanted if name not in found), None)
    if missing is not None:
        raise BadData(f"{path} has no column {missing!r}", has=", ".join(found), wanted=", ".join(wanted), hint=_ALIKE)


def check_schema(path: str, found: pa.Schema, wanted: pa.Schema,
                 is_alike: Callable[[pa.DataType, pa.DataType], bool] = eq) -> None:
    """`check_names`, and each type is alike: the same, unless another relation of found and wanted type is given."""
    check_names(path, found.names, wanted.names)
    for column in wanted:
        if not is_alike(found.field(column.name).type, column.type):
            raise BadData(f"column {column.name!r} of {path} is {found.field(column.name).type}, not {column.type}",
                          hint=_ALIKE)
