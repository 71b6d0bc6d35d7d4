"""Manifest: the file that makes a snapshot one. What it names is in the snapshot, everything else is garbage.

Invariant: under its real name a manifest is whole, and so is every file that it names. It is written under a temporary
name, synced and renamed, after the files that it names were synced, and their names with the directory. So after a
power cut there is the old one or the new one; a torn one is an orphan whose name begins with `_`.

A manifest holds JSON for what is small and arrays of numbers for what is large. Nothing in it is code: it is never
unpickled, and no length in it is believed before it was held against the file's size.

Threads: functions without state; `publish` is called by one thread at a time.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from scalein.errors import Damaged, InternalError, ScaleinError
from scalein.state import format
from scalein.state.checksum import Checksums, block_checksums
from scalein.storage.filesystem import FileSystem, aligned_buffer

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

MOST_BYTES = 1 << 30  # of a manifest that is read: a hostile file may claim any size

_SIZES = struct.Struct("<QQ")  # bytes of JSON, bytes of tables
_JSON_AT = format.START.size + _SIZES.size
_DTYPES = ("<u8", "<i8", "<u4", "<i4", "<u2", "<i2", "|u1", "|i1", "<f8", "<f4")


@dataclass(frozen=True, eq=False)
class Manifest:
    """What a snapshot consists of: small facts by name, and one-dimensional arrays of numbers by name."""

    id: int
    meta: dict[str, Json]
    tables: dict[str, np.ndarray] = field(default_factory=dict)


def encode(manifest: Manifest, checksums: Checksums = block_checksums) -> np.ndarray:
    """The bytes of a manifest's file."""
    arrays = {name: _plain(name, table) for name, table in manifest.tables.items()}
    described = [[name, array.dtype.str, len(array)] for name, array in arrays.items()]
    text = json.dumps({"meta": manifest.meta, "tables": described}, separators=(",", ":")).encode()
    table_bytes = sum(array.nbytes for array in arrays.values())
    area = aligned_buffer(format.padded(_JSON_AT + len(text) + table_bytes + format.SEAL))
    area[:] = 0
    format.START.pack_into(area.data, 0, format.MANIFEST_MAGIC, format.VERSION, 0, manifest.id)
    _SIZES.pack_into(area.data, format.START.size, len(text), table_bytes)
    at = _JSON_AT
    for part in (np.frombuffer(text, np.uint8), *(array.view(np.uint8) for array in arrays.values())):
        area[at : at + len(part)] = part
        at += len(part)
    format.seal(area, manifest.id, checksums)
    return area


def _plain(name: str, table: np.ndarray) -> np.ndarray:
    little = np.ascontiguousarray(table, table.dtype.newbyteorder("<"))
    if table.ndim != 1 or little.dtype.str not in _DTYPES:
        raise InternalError(f"table {name!r} of a manifest is no list of numbers", found=f"{table.dtype} {table.shape}")
    return little


def decode(data: np.ndarray, id: int, file: str, checksums: Checksums = block_checksums) -> Manifest:
    """The manifest that a file's bytes hold; `Damaged` or `NewerFormat` if they hold none. Changes `data`."""
    if len(data) == 0 or len(data) % format.BLOCK:
        raise Damaged("a snapshot's manifest has no size that was ever written", file=file, found=f"{len(data)} bytes",
                      right=f"a multiple of {format.BLOCK}")  # fmt: skip
    format.check_start(data, format.MANIFEST_MAGIC, id, file, "a snapshot's manifest", checksums)
    json_bytes, table_bytes = _SIZES.unpack_from(data.data, format.START.size)
    tables_at = _JSON_AT + json_bytes
    if format.padded(tables_at + table_bytes + format.SEAL) != len(data):
        raise _wrong(file, format.START.size, f"{json_bytes} and {table_bytes} bytes in {len(data)}")
    try:
        content = json.loads(data[_JSON_AT:tables_at].tobytes())
        meta, described = content["meta"], [(str(name), str(kind), int(count))
                                            for name, kind, count in content["tables"]]  # fmt: skip
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise _wrong(file, _JSON_AT, f"{type(error).__name__}: {error}") from error
    if not isinstance(meta, dict) or any(kind not in _DTYPES or count < 0 for _, kind, count in described):
        raise _wrong(file, _JSON_AT, "tables of no known type")
    ends = np.cumsum([0, *(count * np.dtype(kind).itemsize for _, kind, count in described)], dtype=object)
    if ends[-1] != table_bytes:
        raise _wrong(file, tables_at, f"{table_bytes} bytes for tables of {ends[-1]}")
    tables = {name: np.frombuffer(data[tables_at + ends[k] : tables_at + ends[k + 1]].tobytes(), kind).copy()
              for k, (name, kind, _) in enumerate(described)}  # fmt: skip
    return Manifest(id, meta, tables)


def _wrong(file: str, offset: int, found: str) -> Damaged:
    return Damaged("a snapshot's manifest contradicts itself", file=file, offset=offset, found=found)


def publish(fs: FileSystem, manifest: Manifest, checksums: Checksums = block_checksums) -> None:
    """Make a snapshot the newest one, for good once this returns. The files that it names were synced before.

    If it raises, the snapshot may be there after the next start all the same, or not. So what it names must stay, and
    its id must not be given to another one, until a later snapshot was published.
    """
    name = format.manifest_name(manifest.id)
    temporary = format.TEMPORARY + name
    data = encode(manifest, checksums)
    try:
        output = fs.create(temporary, len(data))
        try:
            output.write(0, data)
            output.sync()
        finally:
            output.close()
        fs.sync_directory()  # the names of its files: they must not be lost where the rename is kept
        fs.rename(temporary, name)
    except ScaleinError:
        with suppress(ScaleinError):
            fs.remove(temporary)
        raise
    fs.sync_directory()


def read(fs: FileSystem, id: int, checksums: Checksums = block_checksums) -> Manifest:
    """The manifest of a snapshot; `Damaged`, `NewerFormat` or `StoreFailed` if it cannot be had."""
    name = format.manifest_name(id)
    source = fs.open(name)
    try:
        if source.size > MOST_BYTES:
            raise _wrong(fs.path_of(name), 0, f"{source.size} bytes")
        data = source.read(0, source.size)
        source.drop_cache()
    finally:
        source.close()
    return decode(data, id, fs.path_of(name), checksums)


def newest(fs: FileSystem, checksums: Checksums = block_checksums) -> Iterator[Manifest | Damaged]:
    """The manifests that there are, newest first; a damaged one as its error, so that the caller can warn and go on.

    Only damage is a reason to fall back. A newer format and a failing system raise: to open an older snapshot because
    of them, and to go on from there, would lose what the newer one holds.
    """
    for id in reversed(format.ids(fs.names(), "snapshot")):
        try:
            found: Manifest | Damaged = read(fs, id, checksums)
        except Damaged as error:
            found = error
        yield found
