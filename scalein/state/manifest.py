"""Manifest: the file that makes a snapshot. The files that it names are part of the snapshot; others are
garbage, which `snapshot_writer.py` removes.

Invariant: under its final name a manifest is complete, and so is every file that it names. It is written under a
temporary name, synced and renamed, after the files that it names are synced and their names are durable. So a power cut
leaves the old manifest or the new one; a partial one has a name that begins with `_`.

A manifest holds JSON for small values and arrays of numbers for large ones. It contains no code: nothing is unpickled,
and every length is checked against the size of the file before it is used.

Threads: functions without state; `publish` is called by one thread at a time.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from scalein.errors import (
    BadArgument,
    BadName,
    Damaged,
    InternalError,
    StoreFailed,
    WrongType,
    here,
    warn,
)
from scalein.state import format
from scalein.state.checksum import Checksums, block_checksums
from scalein.state.columns import check_names, key_schema, value_schema
from scalein.storage.checked_json import Json
from scalein.storage.filesystem import FileSystem, aligned_buffer
from scalein.storage.publish import put

MAX_BYTES = 1 << 30  # of a manifest that is read: a hostile file may have any size

_SIZES = struct.Struct("<QQ")  # bytes of JSON, bytes of tables
_JSON_AT = format.START.size + _SIZES.size
_DTYPES = ("<u8", "<i8", "<u4", "<i4", "<u2", "<i2", "|u1", "|i1", "<f8", "<f4")


@dataclass(frozen=True, eq=False)
class Manifest:
    """What a snapshot consists of: JSON values by name, and one-dimensional arrays of numbers by name."""

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
        raise InternalError(f"table {name!r} of a manifest is not an array of numbers",
                            found=f"{table.dtype} {table.shape}")
    return little


def decode(data: np.ndarray, id: int, file: str, checksums: Checksums = block_checksums) -> Manifest:
    """The manifest in a file's bytes; `Damaged` or `NewerFormat` if there is none. Changes `data`."""
    if len(data) == 0 or len(data) % format.BLOCK:
        raise Damaged("a snapshot's manifest has an invalid size", file=file, found=f"{len(data)} bytes",
                      expected=f"a multiple of {format.BLOCK}")  # fmt: skip
    format.check_start(data, format.MANIFEST_MAGIC, id, file, "a snapshot's manifest", checksums)
    json_bytes, table_bytes = _SIZES.unpack_from(data.data, format.START.size)
    tables_at = _JSON_AT + json_bytes
    if format.padded(tables_at + table_bytes + format.SEAL) != len(data):
        raise _inconsistent(file, format.START.size, f"{json_bytes} and {table_bytes} bytes in {len(data)}")
    try:
        content = json.loads(data[_JSON_AT:tables_at].tobytes())
        meta, described = content["meta"], [(str(name), str(kind), int(count))
                                            for name, kind, count in content["tables"]]  # fmt: skip
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise _inconsistent(file, _JSON_AT, f"{type(error).__name__}: {error}") from error
    if not isinstance(meta, dict) or any(kind not in _DTYPES or count < 0 for _, kind, count in described):
        raise _inconsistent(file, _JSON_AT, "tables of an unknown type")
    ends = np.cumsum([0, *(count * np.dtype(kind).itemsize for _, kind, count in described)], dtype=object)
    if ends[-1] != table_bytes:
        raise _inconsistent(file, tables_at, f"{table_bytes} bytes for tables of {ends[-1]}")
    tables = {name: np.frombuffer(data[tables_at + ends[k] : tables_at + ends[k + 1]].tobytes(), kind).copy()
              for k, (name, kind, _) in enumerate(described)}  # fmt: skip
    return Manifest(id, meta, tables)


def _inconsistent(file: str, offset: int, found: str) -> Damaged:
    return Damaged("a snapshot's manifest is inconsistent", file=file, offset=offset, found=found)


def publish(fs: FileSystem, manifest: Manifest, checksums: Checksums = block_checksums) -> None:
    """Make a snapshot the newest one; it is durable once this returns. The files that it names are synced before.

    If it raises, the snapshot may or may not be found at the next start. So the files that it names must stay, and its
    id must not be reused, until a later snapshot is published.
    """
    # The names of its files must not be lost if the rename survives.
    put(fs, format.manifest_name(manifest.id), encode(manifest, checksums), sync_names_first=True)


def read(fs: FileSystem, id: int, checksums: Checksums = block_checksums) -> Manifest:
    """The manifest of a snapshot; raises `Damaged`, `NewerFormat` or `StoreFailed` if it cannot be read."""
    name = format.manifest_name(id)
    source = fs.open(name)
    try:
        if source.size > MAX_BYTES:
            raise _inconsistent(fs.path_of(name), 0, f"{source.size} bytes")
        data = source.read(0, source.size)
        source.drop_cache()
    finally:
        source.close()
    return decode(data, id, fs.path_of(name), checksums)


def newest(fs: FileSystem, checksums: Checksums = block_checksums) -> Iterator[Manifest | Damaged]:
    """All manifests, newest first; a damaged one as its error, so that the caller can warn and fall back.

    Only damage is a reason to fall back. A newer format and a failing system raise: opening an older snapshot because
    of them, and continuing from there, would lose what the newer one holds.
    """
    for id in reversed(format.ids(fs.names(), "snapshot")):
        try:
            found: Manifest | Damaged = read(fs, id, checksums)
        except Damaged as error:
            found = error
        yield found


def find_snapshot(fs: FileSystem, snapshot: int | None, checksums: Checksums) -> Manifest | None:
    """The manifest of a snapshot, by default the newest intact one; warns if a newer one is damaged."""
    if snapshot is not None:
        known = format.ids(fs.names(), "snapshot")
        if snapshot not in known:
            raise StoreFailed(f"the store has no snapshot {snapshot}", at=here(), file=fs.path_of(""),
                              has=", ".join(map(str, known)))
        return read(fs, snapshot, checksums)
    damaged: Damaged | None = None
    for found in newest(fs, checksums):
        if isinstance(found, Manifest):
            if damaged is not None:
                warn(f"the newest snapshot is damaged, falling back to {found.id}: {damaged}")
            return found
        damaged = damaged or found
    if damaged is not None:
        raise damaged
    return None


def manifest_files(found: Manifest) -> frozenset[str]:
    """The files that a snapshot consists of."""
    names = found.meta["files"]
    if not isinstance(names, list):
        raise ValueError(f"files: {names!r}")
    return frozenset(str(name) for name in names)


def file_id(given: Json) -> int:
    """A file id of a manifest, checked."""
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given < 1 << 62:
        raise ValueError(f"not the id of a file: {given!r}")
    return given


def encode_schema(schema: pa.Schema) -> str:
    return bytes(schema.serialize()).hex()


def decode_schemas(found: Manifest, fs: FileSystem) -> tuple[pa.Schema, pa.Schema]:
    """The key and value columns of a snapshot."""
    try:
        key, value = (pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(str(found.meta[name]))))
                      for name in ("key", "value"))
        if not (key_schema(key).equals(key) and value_schema(value).equals(value)):
            raise ValueError(f"columns of types that are not stored: {[*key.names, *value.names]}")
        check_names(key, value)
    except (KeyError, ValueError, pa.ArrowException, BadArgument, BadName, WrongType) as error:
        raise Damaged("a snapshot's manifest has no valid columns", file=fs.path_of(format.manifest_name(found.id)),
                      found=repr(error)) from error
    return key, value
