"""One file with all rows of a flow: under its name when it is complete, never before.

Rows go to a file of a temporary name in the same directory, which readers of directories skip. It is synced and then
renamed; after an error it is removed, and a file that was there before stays as it is. Rows are buffered until they
make a good row group.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Iterable

import pyarrow as pa

from scalein.connectors.sinks.file_writers import GROUP_BYTES, GROUP_ROWS, WriteFormat, writing
from scalein.connectors.sinks.files import StagedFile, sync_path
from scalein.errors import BadArgument, SourceLoc, WriteFailed


def file_path(path: object, step: str, at: SourceLoc) -> str:
    """The absolute path of a file that can be written."""
    try:
        text = os.path.expanduser(os.fspath(path))  # type: ignore[call-overload]
    except TypeError:
        raise BadArgument(f"{step} takes the path of a file", at=at, found=repr(path)) from None
    if not isinstance(text, str) or not text:
        raise BadArgument(f"{step} takes the path of a file", at=at, found=repr(path))
    if re.match(r"[A-Za-z][\w+.-]+:/", text):  # a pathlib.Path has one slash where an address has two
        raise BadArgument(f"{step} writes a file of this machine, and this is an address", at=at, found=text,
                          hint="for batch in flow.batches() gives the rows to any other writer")
    found = os.path.abspath(text)
    if os.path.isdir(found):
        to = step.replace("write_", "to_")
        raise WriteFailed(f"{found} is a directory, but {step} writes a file", at=at,
                          hint=f"name a file in it; flow.start(sink=si.{to}(...)) writes files into a directory")
    if not os.path.isdir(os.path.dirname(found)):
        raise WriteFailed(f"there is no directory {os.path.dirname(found)}", at=at, step=step, hint="make it first")
    return found


def write_file(path: str, format: WriteFormat, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> int:
    """Write all rows; how many there were."""
    directory, name = os.path.split(path)
    staged = os.path.join(directory, f"_{name}-{uuid.uuid4().hex[:12]}")
    with writing(path):
        # Refuses types that the format cannot write, before anything is computed.
        format.begin(pa.BufferOutputStream(), schema).close()
        raw = pa.OSFile(staged, "wb")
    count = 0
    try:
        with writing(path):
            file = StagedFile(name, path, raw, format.begin(raw, schema), schema)
        for batch in batches:
            count += batch.num_rows
            for start in range(0, batch.num_rows, GROUP_ROWS):
                file.add(batch.slice(start, GROUP_ROWS))
                if file.buffered_bytes >= GROUP_BYTES or file.buffered_rows >= GROUP_ROWS:
                    file.flush()
        file.finish()
        with writing(path):
            sync_path(staged)
            os.replace(staged, path)
    except BaseException:
        for close in (raw.close, lambda: os.remove(staged)):
            with contextlib.suppress(OSError, pa.ArrowException):
                close()
        raise
    sync_path(directory)
    return count
